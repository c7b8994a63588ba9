import numpy as np
import pytest

from metrics import cluster_metrics, match_clusters, size_groups


def test_worked_by_hand():
    truth = np.array([0, 0, 1, 1, 2, 2])
    cluster = np.array([1, 1, 0, 0, 2, 0])
    scores = cluster_metrics(truth, cluster, num_known=2, class_counts=np.array([50, 20, 5]))
    assert scores["ACC"] == pytest.approx(100 * 5 / 6)
    assert scores["known"] == 100 and scores["novel"] == 50
    assert scores["per_class_mean"] == pytest.approx(100 * 2.5 / 3)
    assert scores["NMI"] == pytest.approx(73.97, abs=0.01)
    # pairs together in truth 3, in clusters 4, in both 2; expected 3 * 4 / 15 = 0.8
    assert scores["ARI"] == pytest.approx(100 * (2 - 0.8) / ((3 + 4) / 2 - 0.8))


def test_one_matching_over_all_classes():
    truth = np.array([0] * 6 + [1] * 4)
    cluster = np.array([0] * 10)  # everything in one cluster: it can serve one class only
    scores = cluster_metrics(truth, cluster, 1, np.array([6, 4]))
    assert scores["ACC"] == 60 and scores["known"] == 100 and scores["novel"] == 0


def test_more_and_fewer_clusters_than_classes():
    truth = np.array([0, 0, 0, 1, 1, 1])
    assert cluster_metrics(truth, np.array([5, 5, 7, 2, 2, 3]), 1, np.array([3, 3]))["ACC"] == pytest.approx(100 * 4 / 6)
    assert cluster_metrics(truth, np.zeros(6, dtype=int), 1, np.array([3, 3]))["ACC"] == 50


def test_a_permutation_of_the_numbers_changes_nothing():
    rng = np.random.default_rng(0)
    truth, cluster = rng.integers(0, 9, 200), rng.integers(0, 9, 200)
    counts = rng.permutation(np.arange(10, 19))
    first = cluster_metrics(truth, cluster, 6, counts)
    assert first == pytest.approx(cluster_metrics(truth, rng.permutation(9)[cluster], 6, counts))
    assert sorted(match_clusters(truth, cluster)) == list(range(9))


@pytest.mark.parametrize("only", [0, 1])
def test_matchings_with_the_same_acc_are_met_in_the_middle(only):
    scores = cluster_metrics([0, 1], [only, only], 1, [2, 1])  # the one cluster is either class's
    assert [scores[key] for key in ("ACC", "known", "novel", "per_class_mean")] == [50] * 4


def test_ties_do_not_hang_on_the_numbers():
    rng = np.random.default_rng(1)
    truth = np.repeat(np.arange(12), 5)  # many best matchings: few rows, and half of the clusters never used
    cluster = rng.integers(0, 6, 60)
    found = [cluster_metrics(truth, rng.permutation(12)[cluster], 7, np.arange(10, 22)) for _ in range(20)]
    assert all(scores == pytest.approx(found[0]) for scores in found)
    single = {np.isin(truth[match_clusters(truth, c)[c] == truth], range(7)).sum()
              for c in (rng.permutation(12)[cluster] for _ in range(20))}
    assert len(single) > 1, "a case without ties tests nothing"
    assert 7 * found[0]["known"] + 5 * found[0]["novel"] == pytest.approx(12 * found[0]["ACC"])


@pytest.mark.parametrize("counts", [np.array([0.2, 0.8]), np.ones((2, 2), dtype=int)])
def test_shares_are_no_class_counts(counts):
    with pytest.raises(ValueError, match="class_counts must be integers"):
        cluster_metrics([0, 1], [0, 1], 1, counts)


def test_head_medium_tail_within_known_and_within_novel():
    counts = np.array([10, 90, 80, 70, 60, 50, 40, 30, 20, 100] + [5, 15, 25])  # 10 known, 3 novel
    groups = size_groups(counts, 10)
    assert sorted(groups["head"]) == [1, 2, 9, 12] and sorted(groups["tail"]) == [0, 7, 8, 10]
    assert sorted(np.concatenate(list(groups.values()))) == list(range(13))
    big = size_groups(np.arange(150), 113)
    assert [len(big[g]) for g in ("head", "medium", "tail")] == [34 + 11, 45 + 15, 34 + 11]
    assert size_groups(np.array([9, 7, 5, 0], dtype=np.uint8), 4)["head"].tolist() == [0]
    small = size_groups(np.arange(20), 15)
    assert [len(small[g]) for g in ("head", "medium", "tail")] == [6, 8, 6]  # what the paper's Table 3 can be a share of


def test_a_group_without_rows_is_nan_not_zero():
    assert np.isnan(cluster_metrics(np.array([0, 1]), np.array([0, 1]), 2, np.array([3, 4]))["novel"])


@pytest.mark.parametrize("truth,cluster", [([], []), ([0, 1], [0]), ([0, -1], [0, 1]), ([0, 1], [0, -1]),
                                           ([[0, 1]], [[0, 1]])])
def test_bad_arguments(truth, cluster):
    with pytest.raises(ValueError):
        match_clusters(np.array(truth, dtype=int), np.array(cluster, dtype=int))


def test_a_mask_is_no_clustering_and_groups_need_their_classes():
    with pytest.raises(ValueError, match="integers"):
        cluster_metrics(np.array([0, 1]), np.array([True, False]), 1, [1, 1])
    with pytest.raises(ValueError, match="integers"):
        match_clusters(np.array([True, False]), np.array([0, 1]))
    for num_known in (-1, 4, 2.0):
        with pytest.raises(ValueError, match="num_known"):
            size_groups([5, 4, 3], num_known)


@pytest.mark.parametrize("num_known,class_counts", [(2, [5, 3]), (4, [5, 3, 1]), (-1, [5, 3, 1]), (2.0, [5, 3, 1])])
def test_every_class_needs_its_count(num_known, class_counts):
    with pytest.raises(ValueError, match="class_counts"):
        cluster_metrics(np.array([0, 1, 2]), np.array([0, 1, 1]), num_known, class_counts)


def test_lists_do_as_well_and_nothing_may_be_known():
    scores = cluster_metrics([0, 1, 1], [1, 0, 0], 0, [1, 2])
    assert scores["ACC"] == scores["novel"] == 100 and np.isnan(scores["known"])
    assert match_clusters([0, 1, 1], [1, 0, 0]).tolist() == [1, 0] == match_clusters([0, 1], [1, 0]).tolist()
    groups = size_groups([4] * 40, 0)  # of equal sizes, the first ones
    assert groups["head"].tolist() == list(range(12)) and groups["tail"].tolist() == list(range(28, 40))
    assert size_groups([7], 1)["head"].dtype == np.int64, "an index, empty as it is"


def test_classes_without_a_row_are_not_in_the_mean():
    assert cluster_metrics([0, 0, 2], [0, 0, 1], 2, [5, 4, 3])["per_class_mean"] == 100


def test_a_single_class_is_medium():
    assert {group: ids.tolist() for group, ids in size_groups([7], 1).items()} == {"head": [], "medium": [0], "tail": []}


def test_classes_of_one_size_are_grouped_in_their_order():
    groups = size_groups(np.arange(150) % 3, 150)  # many: an unstable sort leaves few in their order
    assert groups["head"].tolist() == list(range(2, 135, 3)) and groups["tail"].tolist() == list(range(15, 150, 3))

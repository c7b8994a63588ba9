"""The first centres, the number of classes and the k-means rows: on made-up clusters and against plain formulas."""
import math

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch.nn.functional import normalize, one_hot

from seeding import (
    appendix_e,
    class_means,
    class_sizes,
    estimate_num_classes,
    evidence,
    fitted_kmeans,
    kmeans,
    mixture_score,
    mixture_step,
    num_classes_by_size,
    num_classes_without_labels,
    seed_centres,
    semi_supervised_kmeans,
    splits_and_merges,
)


def blobs(sizes, H=16, seed=0, spread=0.08):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    centre = normalize(torch.randn(len(sizes), H, generator=generator), dim=1)
    x = normalize(centre[truth] + spread * torch.randn(len(truth), H, generator=generator), dim=1)
    label = torch.full((len(truth),), -1)
    for k in range(2):  # classes 0 and 1 known, three labelled rows each
        label[torch.where(truth == k)[0][:3]] = k
    return x, label, truth


def test_kmeans_gives_the_same_bytes_on_many_threads():
    z = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    with threadpool_limits(4, "openmp"):  # as if there were as many cores; scikit-learn alone gives about nine results here
        assert len({kmeans(z, 20, seed=0, n_init=1)[0].numpy().tobytes() for _ in range(20)}) == 1


@pytest.mark.parametrize("method", ["mixture", "kmeans"])
def test_clusterers_find_long_tailed_blobs_and_keep_known_classes_in_place(method):
    x, label, truth = blobs([80, 60, 40, 20, 10])
    if method == "mixture":
        centre = seed_centres(x, label, 5, 2, kappa=20.0, label_weight=10.0, swaps=60, sample_rate=0.0, seed=0)
        assert torch.allclose(centre.norm(dim=1), torch.ones(5), atol=1e-5)
    else:
        centre = semi_supervised_kmeans(x, label, 5, 2, seed=0)
    found = torch.cdist(x, centre).argmin(1)
    for k in range(5):
        assert len(found[truth == k].unique()) == 1, "a class was split"
    assert len(found.unique()) == 5 and (found[truth == 0] == 0).all() and (found[truth == 1] == 1).all()


def test_kmeans_from_given_centres_keeps_their_numbers():
    x, _, truth = blobs([30, 20, 10])
    for order in (torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2])):
        centre, found = kmeans(x, 3, seed=0, init=class_means(x, truth, 3)[order])
        assert torch.equal(order[found], truth)
        assert torch.allclose(normalize(centre, dim=1), class_means(x, truth, 3)[order], atol=1e-5)


def test_semi_supervised_kmeans_holds_a_labelled_row_among_strangers():
    x, label = torch.eye(2).repeat_interleave(5, 0), torch.full((11,), -1)
    x = torch.cat([x, x[-1:]])
    label[[0, 5, 10]] = torch.tensor([0, 1, 0])
    assert torch.allclose(semi_supervised_kmeans(x, label, 2, 2, seed=0)[0], torch.tensor([5 / 6, 1 / 6]))


def test_semi_supervised_kmeans_leaves_the_centre_of_an_empty_cluster_where_it_is():
    x, label = torch.eye(2).repeat_interleave(10, 0), torch.full((20,), -1)
    label[0] = 0
    for seed in range(5):  # two different rows for three centres
        assert semi_supervised_kmeans(x, label, 3, 1, seed, n_init=1).norm(dim=1).min() > 0.5, "one is at the origin"


def test_kmeans_plus_plus_starts_far_from_the_known_centres():
    x, label, truth = blobs([20] * 6, spread=0.02)
    for seed in range(5):
        centre = semi_supervised_kmeans(x, label, 6, 2, seed, n_init=1, plus_plus=True)
        assert torch.cdist(class_means(x, truth, 6), centre).argmin(1).unique().numel() == 6, "two classes share a centre"


def test_novel_centres_start_far_from_all_others():
    x, label, truth = blobs([20] * 6, spread=0.01)
    for seed in range(5):
        centre = seed_centres(x, label, 6, 2, 20.0, 10.0, 0, 0.0, seed)
        assert (class_means(x, truth, 6) @ centre.T).argmax(1).unique().numel() == 6, "two classes share a centre"


def test_of_a_large_corpus_some_rows_are_searched_and_all_settle_the_centres(monkeypatch):
    x, label, truth = blobs([80, 60, 40, 20, 10])
    seen, step = [], mixture_step
    monkeypatch.setattr("seeding.SEARCHED", 120)
    monkeypatch.setattr("seeding.mixture_step", lambda *given: seen.append((len(given[0]), given[7])) or step(*given))
    centre = seed_centres(x, label, 5, 2, 20.0, 10.0, 60, 0.1, seed=0)
    assert [size for size in seen if size[0] == 126] == seen[:-30], "the six labelled rows and 120 others"
    assert all(size is None for rows, size in seen if rows == 126), "of which the labelled ones are no tenth"
    assert all(rows == 210 and len(size) == 2 for rows, size in seen[-30:])
    found, means = (x @ centre.T).argmax(1), class_means(x, truth, 5)
    assert torch.equal(found[truth < 2], truth[truth < 2])
    for k in range(2, 5):
        own = found[truth == k].unique()
        assert len(own) == 1 and float(means[k] @ centre[own[0]]) > 1 - 1e-5, "its centre is the mean of all its rows"


def test_labelled_rows_are_judged_by_centres_without_them():
    """mixture_step's objective against one that really takes each labelled row out of its class's sum."""
    x, label, _ = blobs([30, 20, 10])
    label[1:3] = -1  # class 0 keeps one row and nothing else: with that left out it has no centre at all
    held, w = torch.where(label >= 0)[0], 3.0
    total = torch.zeros(3, x.shape[1]).index_add_(0, label[held], w * x[held])
    total[1] += x[35:45].sum(0)
    total[2] += x[50:].sum(0)
    log_share = torch.tensor([0.5, 0.3, 0.2]).log()
    *_, likelihood, objective = mixture_step(x, held, label, total, log_share, 20.0, w)
    expected = mixture_score(x, total, log_share, 20.0).logsumexp(1)
    assert torch.allclose(likelihood, expected, atol=1e-4)
    expected = float(expected.sum() - expected[held].sum())
    for i in held.tolist():
        without = total.clone()
        without[label[i]] -= w * x[i]
        without[label[i]] *= without[label[i]].norm() > 1e-3
        expected += w * float(mixture_score(x[i:i + 1], without, log_share, 20.0).log_softmax(1)[0, label[i]])
    assert float(objective) == pytest.approx(expected, abs=1e-2)


def test_known_sizes_draw_the_classes_to_them_and_weigh_what_is_left():
    """20 of 60 rows lie between two known classes: a size says whose they are, and the objective holds the KL divergence."""
    x, label, _ = blobs([20, 20])
    between = normalize(x[:20].mean(0) + x[20:].mean(0) + 0.3 * torch.randn(
        20, x.shape[1], generator=torch.Generator().manual_seed(1)) / x.shape[1] ** 0.5, dim=1)
    x, label = torch.cat([x, between]), torch.cat([label, torch.full((20,), -1)])
    held = torch.where(label >= 0)[0]
    for size in ([20.0, 40.0], [40.0, 20.0]):
        total = torch.zeros(2, x.shape[1]).index_add_(0, label[held], x[held])
        log_share, size = torch.full((2,), 0.5).log(), torch.tensor(size)
        for _ in range(40):
            total, log_share, _, _ = mixture_step(x, held, label, total, log_share, 20.0, 1.0, size)
        share = mixture_score(x, total, log_share, 20.0).softmax(1)
        share[held] = torch.eye(2)[label[held]]
        n = share.sum(0)
        assert torch.allclose(n, size, atol=1.0)
    size, held_rows = torch.tensor([30.0, 30.0]), label[held].bincount()
    *_, without = mixture_step(x, held, label, total, log_share, 20.0, 1.0)
    *_, objective = mixture_step(x, held, label, total, log_share, 20.0, 1.0, size)
    divergence = (size * (size / n).log() - size + n).sum()
    lagrange = ((size - held_rows) * (log_share - math.log(0.5))).sum()
    assert float(without - objective) == pytest.approx(float(divergence + lagrange), rel=1e-3)


def test_the_offsets_of_known_classes_raise_no_objective_by_themselves():
    """A size that cannot be reached drives its offset on and on; the objective must not rise with it, or any move would do."""
    x, label, _ = blobs([30, 30, 20])
    held, size = torch.where(label >= 0)[0], torch.tensor([60.0, 45.0])
    total = torch.zeros(3, x.shape[1]).index_add_(0, label[held], x[held])
    total[2], state = x[60:].sum(0), torch.full((3,), 1 / 3).log()
    values = []
    for _ in range(30):
        total, state, _, objective = mixture_step(x, held, label, total, state, 20.0, 10.0, size)
        values.append(float(objective))
    assert values[-1] <= max(values[5:10]) + 1
    offset = state[:2] - (size / len(x)).log()
    assert float(offset.abs().max()) == pytest.approx(3, abs=1e-4), "it goes on to where it is held"


def test_a_known_class_does_not_take_in_a_new_one_that_its_labelled_rows_cannot_account_for():
    """Two classes close together, of which one is known: its 4 labelled rows in 10 % say that it has 40 rows, not 80."""
    generator = torch.Generator().manual_seed(0)
    base = normalize(torch.randn(3, 16, generator=generator), dim=1)
    base[1] = normalize(base[0] + 0.45 * base[1], dim=0)
    truth = torch.arange(3).repeat_interleave(torch.tensor([40, 40, 30]))
    x = normalize(base[truth] + 0.08 * torch.randn(110, 16, generator=generator), dim=1)
    label = torch.full((110,), -1)
    label[:4] = 0
    told, untold = ((x @ seed_centres(x, label, 3, 1, 20.0, 10.0, 30, rate, seed=0).T).argmax(1)[:80] == 0
                for rate in (0.1, 0.0))
    assert told[:40].float().mean() > 0.9 and told[40:].float().mean() < 0.1
    assert untold[40:].all(), "without it the new class is taken in"


def test_labelled_rows_tell_the_sizes_of_classes():
    label = torch.tensor([0] * 4 + [1] + [-1] * 30)
    assert class_sizes(label, 2, 5, 0.1).tolist() == [35.5, 5.5], "31 to 40 rows, 1 to 10"
    assert class_sizes(label, 2, 5, 1.0).tolist() == [4, 1], "all rows are labelled"
    balanced = torch.cat([torch.arange(6).repeat(12), torch.full((8 * 120 - 72,), -1)])
    assert class_sizes(balanced, 6, 8, 0.1).tolist() == [120] * 8, "12 labelled rows are 111 to 120"
    assert class_sizes(balanced, 6, 6, 0.1).tolist() == [115.5] * 6, "there is no novel class"
    assert class_sizes(balanced, 6, 7, 0.1).tolist() == [120] * 6 + [240], "one class too few"
    one_more = class_sizes(torch.cat([balanced, torch.tensor([5])]), 6, 8, 0.1)
    assert one_more.tolist()[:6] == [120] * 5 + [121], "13 are 121 to 130"
    assert len(class_sizes(torch.cat([balanced, torch.tensor([5] * 5)]), 6, 8, 0.1)) == 6, "a long tail"
    barely = torch.cat([torch.arange(6).repeat(2), torch.full((180,), -1)])
    assert len(class_sizes(barely, 6, 8, 0.1)) == 6, "two labelled rows each say little"
    few = torch.cat([torch.arange(3).repeat(12), torch.full((60,), -1)])
    assert len(class_sizes(few, 3, 8, 0.1)) == 3, "three classes may be of a size by chance"
    enough = torch.cat([torch.arange(6).repeat(3), torch.full((182,), -1)])
    assert len(class_sizes(enough, 6, 8, 0.1)) == 8, "three labelled rows each are enough"
    full = torch.cat([torch.arange(6).repeat(12), torch.full((590,), -1)])
    assert class_sizes(full, 6, 8, 0.1).tolist()[6:] == [1, 1], "no row is left for the others"


@pytest.mark.parametrize("seed", [0, 2])
def test_novel_classes_of_balanced_data_are_expected_to_be_of_one_size(seed):
    """Seven classes of 40 rows, four known; two of the novel ones are close together, the third is wide enough to be split."""
    generator = torch.Generator().manual_seed(seed)
    base = normalize(torch.randn(7, 16, generator=generator), dim=1)
    base[5] = normalize(base[4] + 0.45 * base[5], dim=0)
    truth, spread = torch.arange(7).repeat_interleave(40), torch.full((280, 1), 0.08)
    spread[truth == 6] = 0.25
    x = normalize(base[truth] + spread * torch.randn(280, 16, generator=generator), dim=1)
    label = torch.full((280,), -1)
    for k in range(4):
        label[40 * k:40 * k + 4] = k
    found = (x @ seed_centres(x, label, 7, 4, 20.0, 10.0, 60, 0.1, seed=0).T).argmax(1)
    assert found[truth == 4].mode()[0] != found[truth == 5].mode()[0]
    assert found[truth == 4].bincount().max() >= 35 and found[truth == 5].bincount().max() >= 35


def test_class_means_of_an_empty_class_are_zero():
    means = class_means(torch.eye(3), torch.tensor([0, -1, 0]), 2)
    assert means[1].abs().sum() == 0 and means[0].norm() == pytest.approx(1)


def test_estimate_counts_the_large_clusters():
    x, _, _ = blobs([80, 60, 40, 30], spread=0.02)
    assert appendix_e(x, 1, max_classes=4, min_cluster=0, seed=0) == 2  # those above the mean, 52.5
    x = torch.cat([x, normalize(torch.randn(2, 16, generator=torch.Generator().manual_seed(9)), dim=1)])
    assert appendix_e(x, 2, max_classes=6, min_cluster=20, seed=0) == 4
    assert appendix_e(x[:5], 3, max_classes=0, min_cluster=0, seed=0) == 5  # no more clusters than rows
    assert appendix_e(x, 5, max_classes=6, min_cluster=20, seed=0) == 5  # never fewer than the known ones
    assert appendix_e(x, 0, max_classes=4, min_cluster=1000, seed=0) == 1  # nor none at all


# ---- the number of classes ----

def made_up(K, num_known, seed, spread=0.7, size=60, labelled=6, H=32):
    """Unit rows of K round classes in H dimensions, long-tailed, and dev rows of the known ones."""
    g = torch.Generator().manual_seed(seed)
    centre = normalize(torch.randn(K, H, generator=g), dim=1)
    sizes = [max(10, int(size * 5 ** (-k / K))) for k in torch.randperm(K, generator=g).tolist()]
    truth = torch.repeat_interleave(torch.arange(K), torch.tensor(sizes))

    def rows(truth):
        return normalize(centre[truth] + spread * torch.randn(len(truth), H, generator=g) / H**0.5, dim=1)

    label = torch.full((len(truth),), -1)
    for k in range(num_known):
        label[torch.where(truth == k)[0][:labelled]] = k
    dev = torch.arange(num_known).repeat_interleave(10)
    return rows(truth), label, rows(dev), dev


def test_classes_of_one_labelled_text_each_do_not_mislead_the_estimate():
    z, label, _, _ = made_up(20, 6, 1, labelled=1)
    assert 14 <= estimate_num_classes(z, label, z[:0], label[:0], (30.0, 10.0, 300, 0.0), 0) <= 28
    assert estimate_num_classes(z[label >= 0], label[label >= 0], z[:0], label[:0], (30.0, 10.0, 300, 0.0), 0) == 6


@pytest.mark.parametrize("K,num_known", [(40, 30), (40, 24)])
def test_the_number_of_classes_is_found(K, num_known):
    z, label, dev_z, dev = made_up(K, num_known, 0)
    found = estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 300, 0.0), 0)
    assert abs(found - K) <= 0.1 * K
    assert found == estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 300, 0.0), 0)
    assert abs(appendix_e(z, num_known, 0, 0, 0) - K) >= abs(found - K)


def test_the_number_of_classes_without_labels():
    z, label, dev_z, dev = made_up(20, 0, 1)
    assert 15 <= estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 300, 0.0), 0) <= 26


def test_evidence_is_the_likelihood_less_the_price_of_the_centres():
    z, label, _, _ = made_up(5, 5, 3, spread=0.3, size=80, labelled=1000)
    sizes, centre = label.bincount(), class_means(z, label, 5)
    x, kappa = z.double().numpy(), 20.0
    spectrum = np.linalg.eigvalsh(np.cov(x.T))
    v, d = spectrum.sum(), spectrum.sum() ** 2 / (spectrum ** 2).sum()
    scores = (sizes / len(z)).log().numpy() + kappa * x @ centre.double().numpy().T  # far apart: shares are sizes
    expected = np.log(np.exp(scores).sum(1)).sum() - sum(d / 2 * np.log(1 + kappa * v / d * n) for n in sizes.tolist())
    assert evidence(z, centre) == pytest.approx(expected, rel=1e-4)
    halves = torch.cat([class_means(z[label == k], torch.arange(int(n)) % 2, 2) for k, n in enumerate(sizes)])
    assert evidence(z, centre) > max(evidence(z, centre[1:]), evidence(z, halves))


def test_without_labels_both_measures_count_alike(monkeypatch):
    z, asked = made_up(20, 0, 1)[0], []
    monkeypatch.setattr("seeding.evidence", lambda z, centre: asked.append(len(centre)) or -abs(len(centre) - 80))
    found = num_classes_without_labels(z, 0, (30.0, 10.0, 60, 0.0), 0)
    peak = min(asked, key=lambda K: abs(K - 80))
    assert max(asked) > 2 * peak and 15 <= found ** 2 / peak <= 26


@pytest.mark.parametrize("per_class,share", [(3, 0.35), (10, 0.0)])
def test_the_fewer_labels_the_more_the_measures_without_labels_have_a_say(monkeypatch, per_class, share):
    """20 known classes with `per_class` labelled rows each and none on dev: 60 in all, or 200, where it is not even asked."""
    z, label, _, _ = made_up(30, 20, 0, labelled=per_class)

    def estimate(answer):
        monkeypatch.setattr("seeding.num_classes_without_labels", lambda *_: answer)
        return estimate_num_classes(z, label, z[:0], label[:0], (30.0, 10.0, 100, 0.0), 0)

    assert abs(estimate(10_000) / estimate(2_500) - 4 ** share) < 0.03


def test_splits_and_merges_are_bcubed_of_the_hidden_classes_with_the_unseen_ones_reckoned_in(monkeypatch):
    """Eight known classes, two hidden at a time, centres drawn at random: row by row as the docstring says it."""
    g = torch.Generator().manual_seed(0)
    K, num_known, H = 14, 8, 6
    z, dev_z = normalize(torch.randn(90, H, generator=g), dim=1), normalize(torch.randn(40, H, generator=g), dim=1)
    label, dev = torch.arange(90) % num_known, torch.arange(40) % num_known
    label[48:] = -1
    folds = []

    def drawn(x, visible, K, *_, **__):
        folds.append((visible.clone(), normalize(torch.randn(K, H, generator=g), dim=1)))
        return folds[-1][1]

    monkeypatch.setattr("seeding.seed_centres", drawn)
    found = splits_and_merges(z, label, dev_z, dev, K, (), 0)
    rows, truth = torch.cat([z[:48], dev_z]), label[:48].tolist() + dev.tolist()
    recall, precision, ever_hidden = [], [], []
    for visible, centre in folds:
        hidden = {k for i, k in enumerate(label.tolist()) if k >= 0 and visible[i] < 0}
        ever_hidden += hidden
        shown = [k for k in range(num_known) if k not in hidden]
        assert [shown[k] for k in visible[visible >= 0].tolist()] == [k for k in label[:48].tolist() if k not in hidden]
        cluster = [shown.index(k) if i < 48 and k in shown else int((rows[i] @ centre.T).argmax())
                   for i, k in enumerate(truth)]
        for i, k in enumerate(truth):
            if k in hidden:
                others = [truth[j] for j in range(88) if j != i and cluster[j] == cluster[i]]
                rivals = sum(other in hidden and other != k for other in others)
                recall.append(others.count(k) / (truth.count(k) - 1))
                precision.append(others.count(k) / max(1e-9, len(others) + rivals * (K - num_known) / (len(hidden) - 1)))
    assert sorted(ever_hidden) == list(range(num_known)) and len(folds) == 4
    assert found == pytest.approx((sum(recall) / len(recall), sum(precision) / len(precision)), rel=1e-4)


def test_a_hidden_class_of_a_single_labelled_text_is_not_judged():
    z, label, dev_z, dev = made_up(12, 8, 0)
    label[torch.where(label == 7)[0][1:]] = -1
    kept = dev != 7
    assert all(map(math.isfinite, splits_and_merges(z, label, dev_z[kept], dev[kept], 12, (30.0, 10.0, 5, 0.0), 0)))


@pytest.mark.parametrize("balance, found", [({2: 2.5, 3: 1.5, 4: 0.5, 5: -0.5}, 38), ({2: 0.3, 3: 0.2, 4: 0.01, 5: -0.3}, 34)])
def test_the_number_of_classes_is_read_off_a_line_through_four_values(monkeypatch, balance, found):
    """Recall minus precision at 20 * 1.15^step classes: on a line that crosses at 4.5, and where one through two says 35."""
    z, label, dev_z, dev = made_up(30, 20, 0, labelled=10)

    def measured(*given):
        return balance[round(math.log(given[4] / 20) / math.log(1.15))], 0.0

    monkeypatch.setattr("seeding.splits_and_merges", measured)
    assert estimate_num_classes(z, label, z[:0], label[:0], (30.0, 10.0, 5, 0.0), 0) == found


@pytest.mark.parametrize("num_known, found", [(3, 40), (12, round((12 / 1.15) ** 0.25 * 40 ** 0.75)), (13, 13)])
def test_with_few_known_classes_the_measures_without_labels_have_most_of_the_say(monkeypatch, num_known, found):
    z, label, dev_z, dev = made_up(20, num_known, 0, labelled=8)
    monkeypatch.setattr("seeding.num_classes_without_labels", lambda *_: 40.0)
    monkeypatch.setattr("seeding.splits_and_merges", lambda *given: (0.0, given[4] / num_known))  # at any number: too many
    assert estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 5, 0.0), 0) == found


def test_the_estimate_moves_a_fifth_as_many_centres(monkeypatch):
    z, label, dev_z, dev = made_up(30, 20, 0, labelled=10)
    seen = []
    monkeypatch.setattr("seeding.splits_and_merges", lambda *given: seen.append(given[5]) or (0.0, 1.0))
    estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 300, 0.0), 0)
    assert set(seen) == {(30.0, 10.0, 60, 0.0)}


def test_class_sizes_bound_the_number_of_classes(monkeypatch):
    """12 classes known, 8 novel ones of two separate halves each, which the features alone give a wrong number for."""
    g = torch.Generator().manual_seed(1)
    centre = normalize(torch.randn(28, 32, generator=g), dim=1)
    truth = torch.repeat_interleave(torch.arange(28), torch.where(torch.arange(28) < 12, 56, 28))
    z = normalize(centre[truth] + 0.7 * torch.randn(len(truth), 32, generator=g) / 32**0.5, dim=1)
    label = torch.full((len(truth),), -1)
    for k in range(12):
        label[torch.where(truth == k)[0][:6]] = k
    dev = torch.arange(12).repeat_interleave(10)
    dev_z = normalize(centre[dev] + 0.7 * torch.randn(120, 32, generator=g) / 32**0.5, dim=1)
    least, most = num_classes_by_size(label, 12, 0.1)
    assert 18 < least < 20 < most < 23

    def estimate(bounds):
        monkeypatch.setattr("seeding.num_classes_by_size", lambda *_: bounds)
        return estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 100, 0.1), 0)

    free = estimate((12, 60))
    assert 12 < free < 60 and estimate((free + 2, 60)) == free + 2 and estimate((12, free - 1)) == free - 1
    assert estimate((least, most)) == round(min(max(free, least), most))


def test_the_bounds_hold_the_spread_of_the_sizes_and_what_a_labelled_row_leaves_open():
    """2, 4, 6 and 8 of a tenth are 15.5 to 75.5 rows, 45.5 in the mean, and the 455 others make ten classes more."""
    label = torch.cat([torch.arange(4).repeat_interleave(torch.tensor([2, 4, 6, 8])), torch.full((617,), -1)])
    spread = 10 * math.sqrt(400 * 5 / 3) / 45.5 * math.sqrt(1 / 4 + 1 / 10)
    error = math.hypot(spread, 14 * 4.5 / 45.5 / math.sqrt(4))
    assert num_classes_by_size(label, 4, 0.1) == pytest.approx((14 - error, 14 + error))


def test_of_a_large_corpus_some_rows_tell_the_number_of_classes(monkeypatch):
    z, label, dev_z, dev = made_up(20, 10, 0)
    seen = []
    monkeypatch.setattr("seeding.SEARCHED", 300)
    monkeypatch.setattr("seeding.seed_centres", lambda x, *given, **_: seen.append((len(x), given[6])) or x[:given[1]])
    estimate_num_classes(z, label, dev_z, dev, (30.0, 10.0, 300, 0.1), 0)
    assert set(seen) == {(360, 0.0)}, "with the 60 labelled ones, which are no tenth of their classes any more"


def test_semi_supervised_kmeans_keeps_the_best_start_and_draws_by_its_seed():
    x, label, _ = blobs([30] * 12, spread=0.2)
    inertia = [float(torch.cdist(x, semi_supervised_kmeans(x, label, 12, 2, 0, n_init=n)).amin(1).square().sum())
               for n in (1, 3, 10)]
    assert inertia == sorted(inertia, reverse=True) and inertia[2] < inertia[0]
    for plus_plus in (False, True):
        found = []
        for i, seed in enumerate((0, 0, 1)):
            torch.manual_seed(i)
            found.append(semi_supervised_kmeans(x, label, 12, 2, seed, n_init=1, plus_plus=plus_plus))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_seeds_and_starts():
    x, label, _ = blobs([30] * 12, spread=0.3)
    assert not torch.equal(*(seed_centres(x, label, 12, 2, 20.0, 10.0, 5, 0.0, seed) for seed in (0, 1)))
    assert not torch.equal(*(kmeans(x, 12, seed, n_init=1)[0] for seed in (0, 1)))
    assert fitted_kmeans(x, 12, 0)._n_init == 10 and fitted_kmeans(x, 12, 0, n_init=3)._n_init == 3


@pytest.mark.parametrize("seed", range(3))
def test_the_moves_find_every_class(seed):
    x, label, truth = blobs([60] * 4 + [30] * 8 + [15] * 12, seed=seed, spread=0.12)
    found = (x @ seed_centres(x, label, 24, 2, 20.0, 10.0, 60, 0.0, seed).T).argmax(1)
    assert len({int(found[truth == k].mode()[0]) for k in range(24)}) == 24


def test_a_move_stays_only_where_the_objective_rises(monkeypatch):
    x, label, _ = blobs([40] * 3)
    fell = []

    def falling(*given):
        fell.append(1)
        return *mixture_step(*given)[:3], torch.tensor(-float(len(fell)))

    monkeypatch.setattr("seeding.mixture_step", falling)
    moved, unmoved = (seed_centres(x, label, 4, 2, 20.0, 10.0, swaps, 0.0, 0) for swaps in (10, 0))
    assert torch.equal(moved, unmoved)


def test_a_moved_centre_starts_with_an_equal_share_and_what_is_missed_is_reckoned_anew(monkeypatch):
    """Here every move stays. 20 steps come before the first, three with each."""
    x, label, _ = blobs([40] * 4, spread=0.2)
    shares, scored = [], []

    def rising(*given):
        shares.append(given[4].clone())
        return *mixture_step(*given)[:3], torch.tensor(float(len(shares)))

    monkeypatch.setattr("seeding.mixture_step", rising)
    monkeypatch.setattr("seeding.mixture_score", lambda *given: scored.append(1) or mixture_score(*given))
    seed_centres(x, label, 6, 2, 20.0, 10.0, 4, 0.0, 0)
    assert len(scored) == len(shares) + 4, "once a step, and once before each move"
    assert all((shares[20 + 3 * i][2:] + math.log(6)).abs().min() < 1e-6 for i in range(4))


def test_equal_rows_and_few_rows():
    label = torch.tensor([0, 0] + [-1] * 38)
    assert seed_centres(torch.eye(4)[:1].repeat(40, 1), label, 4, 1, 20.0, 10.0, 5, 0.0, 0).isfinite().all()
    assert num_classes_without_labels(torch.eye(4)[:1].repeat(40, 1), 0, (20.0, 10.0, 5, 0.0), 0) == 1
    two = torch.eye(4)[torch.arange(40) % 2]  # at any K the silhouette is 1
    assert num_classes_without_labels(two, 0, (20.0, 10.0, 5, 0.0), 0) == 4  # where the search begins
    few = torch.tensor([0] * 10 + [-1] * 6)
    assert seed_centres(blobs([8, 8])[0], few, 3, 1, 20.0, 10.0, 5, 0.0, 0).isfinite().all()


def test_the_sizes_bound_what_the_measures_without_labels_say(monkeypatch):
    x, label, _ = blobs([80, 60, 40, 20, 10])
    for bounds, said, found in (((2, 7.0), 1000, 7), ((5, 7.0), 3, 5)):
        monkeypatch.setattr("seeding.num_classes_without_labels", lambda *_, said=said: said)
        monkeypatch.setattr("seeding.num_classes_by_size", lambda *_, bounds=bounds: bounds)
        assert estimate_num_classes(x, label, x[:0], label[:0], (20.0, 10.0, 50, 0.1), 0) == found


def test_appendix_e_starts_from_three_times_the_known_classes(monkeypatch):
    asked, x = [], blobs([80, 60, 40, 20, 10])[0]
    monkeypatch.setattr("seeding.kmeans", lambda z, K, *_, **__: asked.append(K) or (None, torch.arange(len(z)) % K))
    appendix_e(x, 5, 0, 0, 0)
    assert asked == [15]


def test_labelled_rows_weigh_in_and_all_rows_settle_the_centres(monkeypatch):
    x, label, _ = blobs([80, 60, 40, 20, 10])
    seen = []
    monkeypatch.setattr("seeding.mixture_step", lambda *given: seen.append(given) or mixture_step(*given))
    seed_centres(x, label, 5, 2, 20.0, 10.0, 0, 0.0, seed=0)
    assert torch.allclose(seen[0][3][0], 10 * x[label == 0].sum(0), atol=1e-5)
    assert len(seen) > 30 and all(given[0] is x for given in seen[-30:])


def test_the_share_of_labelled_rows_says_nothing_where_no_class_is_known():
    x, label, _ = blobs([20] * 4)
    assert seed_centres(x, torch.full_like(label, -1), 4, 0, 20.0, 10.0, 5, 0.1, 0).isfinite().all()


def test_semi_supervised_kmeans_goes_on_until_its_centres_are_means():
    x, label, _ = blobs([30] * 12, spread=0.3)
    centre = semi_supervised_kmeans(x, label, 12, 2, 0, n_init=1)
    found = torch.cdist(x, centre).argmin(1)
    found[label >= 0] = label[label >= 0]
    assert torch.allclose(centre, torch.stack([x[found == k].mean(0) for k in range(12)]), atol=1e-5)


def test_a_step_gives_each_class_the_rows_that_are_likely_its_own_and_its_labelled_ones_by_their_weight():
    x, label, _ = blobs([30, 20, 10], spread=0.3)
    held, log_share = torch.where(label >= 0)[0], torch.tensor([0.5, 0.3, 0.2]).log()
    total = torch.stack([x[:30].sum(0), x[30:50].sum(0), x[50:].sum(0)])
    following, shares, _, _ = mixture_step(x, held, label, total, log_share, 5.0, 3.0)
    share = mixture_score(x, total, log_share, 5.0).softmax(1)
    share[held] = one_hot(label[held], 3).float()
    assert torch.allclose(shares.exp(), share.mean(0), atol=1e-3)
    share[held] *= 3
    assert torch.allclose(following, share.T @ x, atol=1e-4)


def test_the_silhouette_is_half_that_of_rows_and_half_that_of_clusters(monkeypatch):
    """One large cluster and K - 1 rows alone: the rows are best off at 5, the clusters at 10, both together at 6."""
    z, values = torch.eye(24)[[0] * 40 + list(range(1, 24))], {5: (1.0, 0.0), 6: (0.7, 0.7), 10: (0.0, 1.0)}

    def silhouette(_, cluster, metric):
        large, alone = values.get(cluster.max() + 1, (0.0, 0.0))
        return np.where(cluster == 0, large, alone)

    monkeypatch.setattr("sklearn.metrics.silhouette_samples", silhouette)
    monkeypatch.setattr("seeding.evidence", lambda *_: 0.0)  # the first number, 4
    monkeypatch.setattr("seeding.seed_centres", lambda z, _, K, *__, **___: torch.eye(24)[:K])
    assert num_classes_without_labels(z, 0, (20.0, 10.0, 5, 0.0), 0) == math.sqrt(6 * 4)


def test_a_move_draws_rows_that_are_explained_badly(monkeypatch):
    (x, label, _), seen, drawn, draw = blobs([40] * 3, spread=0.2), [], [], torch.multinomial
    monkeypatch.setattr("seeding.mixture_step", lambda *given: seen.append(mixture_step(*given)) or seen[-1])
    monkeypatch.setattr(torch, "multinomial", lambda weight, *more, **named: drawn.append((weight, len(seen))) or draw(
        weight, *more, **named))
    seed_centres(x, label, 4, 2, 20.0, 10.0, 1, 0.0, 0)
    weight, steps = drawn[-1]
    likelihood = seen[steps - 1][2][label < 0]
    assert steps == 20 and torch.allclose(weight, likelihood.max() - likelihood, atol=1e-5) and weight.max() > 1

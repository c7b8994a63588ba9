"""Clustering metrics of new intent discovery: ACC, NMI, ARI, and ACC by group. One file, numpy/scipy/scikit-learn: copy it.

    import numpy as np
    from metrics import cluster_metrics, size_groups

    truth = np.array([0, 0, 1, 1, 2, 2])                # classes 0 and 1 known, class 2 novel
    cluster = np.array([1, 1, 0, 0, 2, 0])              # any numbers from 0 on: one Hungarian matching over all classes
    scores = cluster_metrics(truth, cluster, num_known=2, class_counts=np.array([50, 20, 5]))
    print(scores["ACC"], scores["known"], scores["novel"], scores["tail"])

All results are percentages, not rounded.
"""
import numpy as np
from scipy.optimize import linear_sum_assignment


def agreement(truth, cluster):
    """int64 (size, size): rows of each cluster in each class; size is one more than the largest number in either.

    truth, cluster: non-negative int (N,), else ValueError. Memory goes with the square of size.
    """
    truth, cluster = np.asarray(truth), np.asarray(cluster)
    if truth.ndim != 1 or truth.shape != cluster.shape or len(truth) == 0:
        raise ValueError(f"truth and cluster must be non-empty and of one length, got {truth.shape} and {cluster.shape}")
    if truth.dtype.kind not in "iu" or cluster.dtype.kind not in "iu" or min(truth.min(), cluster.min()) < 0:
        raise ValueError("truth and cluster must be integers, none of them negative")
    size = int(max(truth.max(), cluster.max())) + 1
    table = np.zeros((size, size), dtype=np.int64)
    np.add.at(table, (cluster, truth), 1)
    return table


def match_clusters(truth, cluster):
    """The one-to-one map from clusters to classes with the most rows in agreement (Hungarian algorithm), or one such map.

    truth, cluster: as agreement takes them. Returns int, one entry for each number up to the largest in either: the class of
    each cluster; that of a cluster left over shares no row with it, or is a number above all classes.
    """
    return linear_sum_assignment(agreement(truth, cluster), maximize=True)[1]


def size_groups(class_counts, num_known):
    """Head, medium and tail classes, 3:4:3 by training size within known and within novel, then joined (Sec. 4.1).

    class_counts: int (K,) training rows a class, known classes first. Returns {"head": ids, "medium": ids, "tail": ids}.
    Raises ValueError where num_known is no integer from 0 to K, or class_counts holds no integers (shares, say).
    """
    class_counts = np.asarray(class_counts)
    if class_counts.ndim != 1 or class_counts.size and class_counts.dtype.kind not in "iu":
        raise ValueError(f"class_counts must be integers (K,), got {class_counts.dtype} {class_counts.shape}")
    class_counts = class_counts.astype(np.int64)  # of an unsigned type, -0 would be above -1
    if not (isinstance(num_known, (int, np.integer)) and 0 <= num_known <= len(class_counts)):
        raise ValueError(f"num_known must be an integer from 0 to {len(class_counts)}, the entries of class_counts, got "
                         f"{num_known!r}")
    groups = {"head": [], "medium": [], "tail": []}
    for ids in (np.arange(num_known), np.arange(num_known, len(class_counts))):
        ids = ids[np.argsort(-class_counts[ids], kind="stable")]
        n = round(0.3 * len(ids))  # half to even: 6 : 8 : 6 of StackOverflow's 15 and 5, which the paper's Table 3 fits
        for name, part in zip(groups, (ids[:n], ids[n:len(ids) - n], ids[len(ids) - n:])):
            groups[name].extend(part.tolist())
    return {name: np.array(ids, dtype=np.int64) for name, ids in groups.items()}


def cluster_metrics(truth, cluster, num_known, class_counts):
    """Every figure of the paper's tables, in percent.

    truth: int (N,) class ids, known classes (0 to num_known - 1) first. cluster: int (N,), any numbers from 0 on; there may
    be more or fewer clusters than classes. class_counts: int (K,), training rows a class, for the groups.

    Returns {"ACC", "NMI", "ARI", "known", "novel", "head", "medium", "tail", "per_class_mean"}: ACC is the share of rows
    whose matched cluster is right, under one matching over all classes; known to tail are that share within a group of
    classes (NaN for a group without rows), per_class_mean the mean over classes. Matchings with the same ACC, which a poor
    clustering can have many of, share it out differently: of these six, each is the middle between the lowest and the
    highest that such a matching gives, so that none depends on how the clusters are numbered. Raises ValueError where
    class_counts is too short, it or num_known not what size_groups takes, or truth and cluster not what agreement takes.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score  # whose import takes a second
    table, K = agreement(truth, cluster), len(class_counts)
    rows, N = table.sum(0), len(truth)
    if (largest := int(np.flatnonzero(rows)[-1])) >= K:
        raise ValueError(f"class_counts must have an entry for every class in truth (to {largest}), got {K}")

    def right(weight):
        """Rows in agreement under the best matchings, each counted as the weight (size,) of its class, 0 to 1."""
        tie_break = (table * (2 * N + sign * weight) for sign in (1, -1))  # never outweighs a row
        ends = [linear_sum_assignment(scores, maximize=True) for scores in tie_break]
        return sum(float((table * weight)[matched].sum()) for matched in ends) / 2

    def share(classes):
        weight = np.isin(np.arange(len(rows)), classes)
        return 100 * right(weight) / float(rows[weight].sum()) if rows[weight].any() else float("nan")

    return {"ACC": 100 * right(np.ones(len(rows))) / N,
            "NMI": 100 * float(normalized_mutual_info_score(truth, cluster)),
            "ARI": 100 * float(adjusted_rand_score(truth, cluster)),
            "known": share(np.arange(num_known)),
            "novel": share(np.arange(num_known, K)),
            **{name: share(ids) for name, ids in size_groups(class_counts, num_known).items()},
            "per_class_mean": 100 * right(1 / rows.clip(1)) / int(np.count_nonzero(rows))}

"""What sentence features give by themselves: the first centres, the number of classes, the k-means rows. Not run by itself.

`seed_centres` is where the cluster head of train_imbanid.py starts: known classes from their labelled rows, novel ones from a
mixture whose centres are moved about. `estimate_num_classes` is --num_classes auto, `appendix_e` the paper's rule. None of it
trains anything. docs/experiments.md says what was measured and dropped. Used by pretrain.py (class_means alone),
train_imbanid.py and baselines/.
"""
import math
import sys

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # comes with scikit-learn
from torch.nn.functional import normalize, softplus
from tqdm import tqdm

from encoder import pick_dtype

SEARCHED = 20_000  # unlabelled rows that the first centres and the number of classes are searched on


def class_means(z, label, K):
    """Unit-length mean of the unit rows z (N, H) of each class 0..K-1 in label (N,). (K, H); zeros for an empty class."""
    total = torch.zeros(K, z.shape[1], device=z.device)
    total.index_add_(0, label[label >= 0], z[label >= 0])
    return normalize(total, dim=1)


def fitted_kmeans(z, K, seed, n_init=10, init=None):
    """scikit-learn's KMeans fitted to z (N, H): the best of n_init k-means++ starts, or from the centres init (K, H) on.

    On two threads, also where OMP_NUM_THREADS is 1: more of them add up in any order, and the same run would give other bytes.
    """
    from sklearn.cluster import KMeans  # a second that pretrain.py, which has only class_means from here, need not take
    start = {"n_init": n_init} if init is None else {"n_init": 1, "init": init.cpu().numpy()}
    with threadpool_limits(2, "openmp"):
        return KMeans(K, **start, random_state=seed).fit(z.cpu().numpy())


def kmeans(z, K, seed, n_init=10, init=None):
    """fitted_kmeans as tensors: (centre (K, H), id (N,))."""
    found = fitted_kmeans(z, K, seed, n_init, init)
    return torch.from_numpy(found.cluster_centers_).to(z), torch.from_numpy(found.labels_).long().to(z.device)


def nearest(z, centre):
    """int64 (n,): the centre (K, H) nearest to each row of z (n, H)."""
    return torch.cdist(z, centre.to(z)).argmin(1)


def semi_supervised_kmeans(x, label, K, num_known, seed, n_init=10, plus_plus=False):
    """k-means with the labelled rows held in their classes (GCD's). x: (N, H). label: (N,), -1 unlabelled. Returns centres.

    Known centres start from class_means, novel ones from random unlabelled rows, with plus_plus from rows far from the
    centres so far (k-means++); the best of n_init inertias wins.
    """
    generator = torch.Generator().manual_seed(seed)
    held, free = torch.where(label >= 0)[0], torch.where(label < 0)[0]
    known, doubled = class_means(x, label, num_known), 2 * x
    best = (math.inf, None)
    if plus_plus:  # left @ right[j] is the squared distance to row j; torch.cdist would make both anew for every centre
        unlabelled, to_known = x[free], torch.cdist(x[free], known).amin(1)
        square, one = unlabelled.pow(2).sum(1, keepdim=True), x.new_ones(len(free), 1)
        left, right = torch.cat([-2 * unlabelled, square, one], 1), torch.cat([unlabelled, one, square], 1)
    for _ in range(n_init):
        novel = free[torch.randperm(len(free), generator=generator)[:K - num_known].to(free.device)]
        if plus_plus:
            distance = to_known
            for j in range(K - num_known):
                drawn = torch.multinomial((distance ** 2 + 1e-9).cpu(), 1, generator=generator).to(free.device)
                novel[j] = free[drawn]
                distance = torch.minimum(distance, (left @ right[drawn].T)[:, 0].clamp_min(0).sqrt())
        centre, assigned = torch.cat([known, x[novel]]), None
        for _ in range(100):
            last, distance = assigned, (centre ** 2).sum(1) - doubled @ centre.T
            assigned = distance.argmin(1)
            assigned[held] = label[held]
            if last is not None and torch.equal(last, assigned):
                break
            total = torch.zeros_like(centre).index_add_(0, assigned, x)
            size = torch.bincount(assigned, minlength=K)[:, None]
            centre = torch.where(size > 0, total / size.clamp_min(1), centre)
        inertia = float(distance.gather(1, assigned[:, None]).sum())
        best = min(best, (inertia, centre), key=lambda pair: pair[0])
    return best[1]


def mixture_score(x, total, log_share, kappa):
    """log share_k + kappa cos(x_i, total_k): (N, K). x: (N, H) unit rows. total: (K, H) of any length. log_share: (K,)."""
    return (x @ (kappa * normalize(total, dim=1)).to(x.dtype).T).float().add_(log_share)


def class_sizes(label, num_known, K, sample_rate):
    """How many rows each known class has, judged by its c labelled ones: (num_known,), or of all classes (K,).

    c = ceil(sample_rate n) of a class's n rows are labelled, so (c - 1) / rate < n <= c / rate: the middle of that. If the
    known classes are as large as each other, the data are balanced, and the novel ones share what is left; to conclude that,
    four known classes must have three labelled rows each.
    """
    count = label[label >= 0].bincount(minlength=num_known).clamp_min(1)
    most = count / sample_rate
    size = torch.maximum(most - 0.5 / sample_rate + 0.5, count)
    balanced = count.max() <= max(1.1 * count.min(), count.min() + 1)
    if K > num_known >= 4 and count.min() >= 3 and balanced:
        size = torch.full_like(size, len(label) / K).clamp(most - 1 / sample_rate + 1, most)
        each = max(len(label) - float(size.sum()), K - num_known) / (K - num_known)
        size = torch.cat([size, size.new_full((K - num_known,), each)])
    return size


def mixture_step(x, held, label, total, log_share, kappa, label_weight, size=None):
    """One EM step of a von Mises-Fisher mixture of one concentration, labelled rows `held` in their classes.

    x: (N, H) unit rows. total: (K, H) weighted sum of each class's rows, its direction the centre. log_share: (K,).
    size: (k,) rows that the first k classes are thought to have, None where nothing is known of it.
    Returns the new total and log_share, and of the old ones each row's log-likelihood (N,), up to a constant, and the
    objective: the log-likelihood of the unlabelled rows plus label_weight times log p(class | row) of the labelled ones, each
    of them judged with its class's centre as it is without it. With `size`, log_share of such a class is no share but the
    offset (at most 3 from the share) that brings the number n_k of its rows to `size`, a Lagrange multiplier whose term is
    taken off the objective, and so is the KL divergence of what n_k remains from `size`. The other classes have the shares of
    all rows that they hold, however many these are: a row that the sized classes lack makes the objective one larger.
    """
    score = mixture_score(x, total, log_share, kappa)
    share = score.softmax(1)
    likelihood = score.amax(1) - share.amax(1).log()
    y, w = label[held], label_weight
    dot = (x[held] * total[y]).sum(1)
    rest = (total[y].square().sum(1) - 2 * w * dot + w * w).clamp_min(0).sqrt()  # length of the class's sum without the row
    own = kappa * torch.where(rest > 0.01 * w, (dot - w) / rest, 0) + log_share[y]
    without = own - score[held].scatter(1, y[:, None], own[:, None]).logsumexp(1)
    objective = likelihood.sum() - likelihood[held].sum() + w * without.sum()
    share[held] = 0
    share[held, y] = 1
    n = share.sum(0)
    following = ((n + 1e-3) / len(x)).log()
    if size is not None:
        sized, expected = slice(len(size)), (size / len(x)).log()
        excess, missing = (n[sized].clamp_min(1e-3) / size).log(), size - y.bincount(minlength=len(size))
        objective = objective - (missing * (log_share[sized] - expected)).sum() + (size * (excess - excess.exp() + 1)).sum()
        following[sized] = torch.maximum(torch.minimum(log_share[sized] - 0.5 * excess, expected + 3), expected - 3)
    share[held] *= w
    return (share.to(x.dtype).T @ x).float(), following, likelihood, objective


def searched_rows(label, generator):
    """int64: the labelled rows of label (N,), then at most SEARCHED of the unlabelled ones, drawn."""
    held, free = torch.where(label >= 0)[0], torch.where(label < 0)[0]
    return torch.cat([held, free[torch.randperm(len(free), generator=generator)[:SEARCHED].to(free.device)]])


def seed_centres(x, label, K, num_known, kappa, label_weight, swaps, sample_rate, seed, quiet=False):
    """Unit centres (K, H) to start the cluster head from: known classes from their labelled rows, novel ones discovered.

    A mixture with learned class shares, so that a large class is not split to even out sizes. Each labelled row stands for
    label_weight rows of its class, which keeps a known centre from drifting to a larger neighbour. Where the labelled rows
    were drawn at sample_rate from every known class (0: who knows), their number tells the class's size, and a known centre
    that has taken in a new intent, or has lost rows to a novel centre, is seen by having too many rows or too few. Where the
    known classes are all of a size, the novel ones are expected to be so as well.

    EM alone keeps the novel centres near where they start, so `swaps` times one is moved: of four drawn the one that the rows
    would miss least, and of 16 rows that are explained badly to the one where it helps most. The move stays if mixture_step's
    objective is higher three steps later, a part of which these steps may have given anyway. Its labelled part is what tells a
    new intent from half of a known one: a novel centre that takes over a known class makes that class's own labelled rows,
    each left out in turn, look like strangers. Of a large corpus the moves are tried on SEARCHED unlabelled rows, then all
    rows settle the centres.
    """
    generator = torch.Generator().manual_seed(seed)
    held, free = torch.where(label >= 0)[0], torch.where(label < 0)[0]

    def draw(weight, n):
        return free[torch.multinomial(weight.clamp_min(1e-6).cpu(), n, generator=generator).to(free.device)]

    def settle(x, total, log_share, steps):
        for _ in range(steps):
            total, log_share, likelihood, objective = mixture_step(x, held, label, total, log_share, kappa, label_weight, size)
        return total, log_share, likelihood[free], objective

    uniform = -math.log(K)
    size = class_sizes(label, num_known, K, sample_rate) if sample_rate and num_known else None
    if len(free) > SEARCHED:
        rows = searched_rows(label, generator)
        centre = seed_centres(x[rows], label[rows], K, num_known, kappa, label_weight, swaps, 0.0, seed, quiet)
        return normalize(settle(x, centre, torch.full((K,), uniform, device=x.device), 30)[0], dim=1)
    fast = x.bfloat16() if pick_dtype("auto", x.device) == torch.bfloat16 else x  # good enough to compare moves
    total = torch.zeros(K, x.shape[1], device=x.device).index_add_(0, label[held], label_weight * x[held])
    similarity = x[free] @ normalize(total[:num_known], dim=1).T
    closest = similarity.amax(1) if num_known else x.new_zeros(len(free))  # cosine of each row to its nearest centre
    for j in range(num_known, K):  # k-means++: a row far from every centre so far
        total[j] = x[draw(1 - closest, 1)]
        closest = torch.maximum(closest, x[free] @ total[j])

    missed, unlabelled = None, fast[free]
    now = settle(fast, total, torch.full((K,), uniform, device=x.device), 20)
    for _ in tqdm(range(swaps if K > num_known else 0), desc="seeding", disable=quiet or not sys.stderr.isatty(), leave=False):
        if missed is None:  # what the log-likelihood loses without each centre
            share = mixture_score(fast, now[0], now[1], kappa).softmax(1)
            missed = -torch.log1p(-share.clamp_max(1 - 1e-6)).sum(0)
        few = num_known + torch.randint(K - num_known, (4,), generator=generator).to(x.device)
        j = few[missed[few].argmin()]
        rows = draw(now[2].max() - now[2], min(16, len(free)))
        gain = softplus(kappa * (unlabelled @ fast[rows].T).float() + uniform - now[2][:, None]).sum(0)
        total, log_share = now[0].clone(), now[1].clone()
        total[j], log_share[j] = x[rows[gain.argmax()]], uniform
        moved = settle(fast, total, log_share, 3)
        if moved[3] > now[3]:
            now, missed = moved, None
    return normalize(settle(x, now[0], now[1], 30)[0], dim=1)


def appendix_e(z, num_known, max_classes, min_cluster, seed):
    """The paper's Appendix E: how many clusters of a k-means with K' clusters on the features z (N, H) have at least t rows; no
    fewer than num_known, and at least one.

    max_classes: K', 0 for three times num_known. min_cluster: t, 0 for the mean size N / K', as in the code of DeepAligned
    (Zhang et al. 2021), which the paper follows here.
    """
    K = min(max_classes or 3 * num_known, len(z))
    sizes = kmeans(z, K, seed, n_init=1)[1].bincount(minlength=K)
    return max(int((sizes >= (min_cluster or len(z) / K)).sum()), num_known, 1)


def splits_and_merges(z, label, dev_z, dev_label, K, args_of_seeding, seed):
    """B-cubed recall and precision, from 0 to 1, of known classes that were hidden from a seeding with K centres.

    Every known class is hidden once, a quarter of them at a time, of few up to a third. z: (N, H), label: (N,), -1 unlabelled;
    dev_z, dev_label: other labelled rows, whose labels the seeding never sees. args_of_seeding: seed_centres' kappa to
    sample_rate. Recall is the share of a row's class that is in its cluster, precision the share of its cluster that is of its
    class, both over labelled and dev rows, itself left out; the mean over hidden rows. The K - num_known unknown classes
    compete for the novel centres too, but no row of theirs has a label: how many of their rows are in a cluster is judged by
    how many of the other hidden classes are there.
    """
    num_known, generator = int(label.max()) + 1, torch.Generator().manual_seed(seed)
    rows, truth = torch.cat([z[label >= 0], dev_z]), torch.cat([label[label >= 0], dev_label])
    held = torch.arange(len(rows), device=z.device) < (label >= 0).sum()
    recall, precision = [], []
    for fold in torch.randperm(num_known, generator=generator).to(z.device).chunk(4):
        visible = torch.full((num_known + 1,), True, device=z.device)  # the last entry stands for -1
        visible[fold] = visible[-1] = False
        renamed = torch.where(visible, visible.cumsum(0) - 1, -1)
        centre = seed_centres(z, renamed[label], K, int(visible.sum()), *args_of_seeding, seed, quiet=True)
        cluster = torch.where(held & visible[truth], renamed[truth], (rows @ centre.T).argmax(1))
        together = torch.zeros(num_known, K, device=z.device)
        together.index_put_((truth, cluster), torch.ones(len(rows), device=z.device), accumulate=True)
        same, of_class = together[truth, cluster] - 1, together.sum(1)[truth] - 1
        rivals = together[fold].sum(0)[cluster] - together[truth, cluster]  # rows of other hidden classes
        unseen = rivals * (K - num_known) / max(1, len(fold) - 1)
        in_cluster = together.sum(0)[cluster] - 1 + unseen
        judged = torch.isin(truth, fold) & (of_class > 0)
        recall.append((same / of_class)[judged])
        precision.append((same / in_cluster.clamp_min(1e-9))[judged])
    return torch.cat(recall).mean().item(), torch.cat(precision).mean().item()


def evidence(z, centre):
    """How likely a von Mises-Fisher mixture with these unit centres (K, H) makes the unit rows z (N, H), less what they cost.

    Its shares are fitted. A centre of n rows costs d/2 log(1 + kappa v/d n) of log-likelihood (Laplace's approximation), with v
    the variance of the rows and d the number of directions that they vary in, the participation ratio of their covariance.
    """
    kappa, covariance = 20.0, torch.cov(z.T)
    variance = covariance.trace()
    directions = variance ** 2 / covariance.square().sum()  # of its eigenvalues: the square of their sum over that of squares
    n = z.new_full((len(centre),), len(z) / len(centre))
    for _ in range(20):
        score = mixture_score(z, centre, ((n + 1e-3) / len(z)).log(), kappa)
        n = score.softmax(1).sum(0)
    return float(score.logsumexp(1).sum() - directions / 2 * torch.log1p(kappa * variance / directions * n).sum())


def num_classes_without_labels(z, num_known, args_of_seeding, seed):
    """The number of classes where hardly any is known: the geometric mean of the two that two measures choose on a grid.

    One is the silhouette, the mean of its mean over rows, which large clusters decide, and over clusters, which the many small
    ones decide. It knows no scale, and may find groups of classes or parts of them. The other is the evidence, whose scale is
    its kappa; with few rows it sees few classes. Where one finds too many the other often finds too few. The labels are not
    used: a class held to its one labelled row, which counts for several, would make any K look best.
    """
    from sklearn.metrics import silhouette_samples  # see fitted_kmeans
    label = torch.full((len(z),), -1, device=z.device)
    looked_at = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:3000].to(z.device)
    sharpest = likeliest = (-math.inf, max(1, num_known))
    K = max(4, num_known)
    while K <= len(z) / 2 and K < 4 * max(sharpest[1], likeliest[1]) + 8:  # well past either peak, which may be a flat one
        centre = seed_centres(z, label, K, 0, *args_of_seeding, seed, quiet=True)
        likeliest = max(likeliest, (evidence(z, centre), K), key=lambda pair: pair[0])
        found, cluster = (z[looked_at] @ centre.T).argmax(1).cpu().unique(return_inverse=True)
        if 1 < len(found) < len(looked_at):
            score = silhouette_samples(z[looked_at].cpu().numpy(), cluster.numpy(), metric="cosine")
            by_cluster = np.bincount(cluster, score) / np.bincount(cluster)
            sharpest = max(sharpest, ((score.mean() + by_cluster.mean()) / 2, K), key=lambda pair: pair[0])
        K = math.ceil(1.2 * K)
    return math.sqrt(sharpest[1] * likeliest[1])


def num_classes_by_size(label, num_known, sample_rate):
    """Bounds of the number of classes, about a standard error around what the known classes' mean size says of the other rows.

    Two errors add up: the known sizes are a sample, and each is known to half a labelled row, which averages out over as many
    classes as there are different counts of labelled rows.
    """
    size = class_sizes(label, num_known, num_known, sample_rate)
    mean = float(size.mean())
    novel = max(len(label) - float(size.sum()), 1.0) / mean
    drawn = novel * float(size.std()) / mean * math.sqrt(1 / num_known + 1 / novel)
    rounded = (num_known + novel) * (0.5 / sample_rate - 0.5) / mean / math.sqrt(len(size.unique()))
    error = math.hypot(drawn, rounded)
    return max(num_known, num_known + novel - error), num_known + novel + error


def estimate_num_classes(z, label, dev_z, dev_label, args_of_seeding, seed):
    """The number of classes at which known classes, had they been hidden, are split as often as they are merged.

    With too few centres a hidden class shares its cluster (precision is low), with too many it is torn (recall is low); where
    the two meet the number is right on average for the known classes, hence for the unknown ones, which differ from them in
    nothing but that nobody labelled them. K is searched on a geometric grid and read off a straight line through the four
    values nearest to the crossing. num_classes_without_labels has a say in it, since the two err in different ways: with fewer
    than 200 labelled rows up to half, with at most twelve known classes of two labelled rows or more three quarters (of these
    about three are hidden at a time then, which tells too little of merges, and the number is too low), with fewer than four
    all of it. Of a large corpus SEARCHED unlabelled rows are looked at. Where the labelled rows tell the sizes of the known
    classes, the estimate is held within the bounds of num_classes_by_size.
    """
    num_known, balance = int(label.max()) + 1, {}
    if (label >= 0).all():
        return num_known
    kappa, label_weight, swaps, sample_rate = args_of_seeding
    least, most = num_classes_by_size(label, num_known, sample_rate) if sample_rate and num_known > 1 else (num_known, math.inf)
    rows = searched_rows(label, torch.Generator().manual_seed(seed))
    if len(rows) < len(label):
        sample_rate = 0.0  # not that of the rows that are left
    args_of_seeding = kappa, label_weight, swaps // 5, sample_rate  # 300 moves find better centres, but the same number of them
    z, label = z[rows], label[rows]

    def measure(step):
        K = round(num_known * 1.15 ** step)
        recall, precision = splits_and_merges(z, label, dev_z, dev_label, K, args_of_seeding, seed)
        balance[step] = recall - precision

    sizes = torch.cat([label[label >= 0], dev_label]).bincount(minlength=max(1, num_known))
    told = int((sizes > 1).sum())  # classes of which can be said whether they are split
    if told < 4:
        return round(min(max(num_classes_without_labels(z, num_known, args_of_seeding, seed), least), most))
    step = 2
    measure(step)
    if balance[step] > 0:  # classes are merged: more centres, until they are split
        while balance[step] > 0 and num_known * 1.15 ** step < len(z) / 4:
            step += 1
            measure(step)
    else:
        while balance[step] <= 0 and step > 0:
            step -= 1
            measure(step)
    near = sorted(balance, key=lambda s: abs(balance[s]))[:4]
    slope, height = np.polyfit(near, [balance[s] for s in near], 1) if len(near) > 1 else (0, 0)
    crossing = -height / slope if slope < -1e-9 else near[0]  # equal values have a slope of rounding errors
    found = num_known * 1.15 ** min(max(crossing, min(near) - 1), max(near) + 1)
    say = max(0.0, 0.5 - int(sizes.sum()) / 400, 0.75 * (told <= 12))
    if say:
        found = found ** (1 - say) * num_classes_without_labels(z, num_known, args_of_seeding, seed) ** say
    return round(min(max(found, least), most))


def kmeans_rows(raw, label, K, num_known, seed, pretrained=None):
    """Test clusters (rows, M) of k-means, of the same with labelled rows held, and, where given, of k-means on pretrained ones.

    raw, pretrained: {"train": (N, H), "test": (M, H)} unit rows. Fitted on train, test rows go to the nearest centre.
    """
    fitted = [(raw, kmeans(raw["train"], K, seed, n_init=3)[0]),
              (raw, semi_supervised_kmeans(raw["train"], label, K, num_known, seed))]
    if pretrained:
        fitted.append((pretrained, kmeans(pretrained["train"], K, seed, n_init=3)[0]))
    return np.stack([nearest(z["test"], centre).cpu().numpy() for z, centre in fitted])

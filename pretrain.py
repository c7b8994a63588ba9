"""Stage 1 of ImbaNID: pre-train the encoder on the labelled rows and on all text (Sec. 3.3).

Reads   data/<run>/               (make_lt_data.py)
Writes  out/<run>/pretrain.pt     trained_layers, mlm_head, the known-class classifier, config, log
        out/<run>/pretrain_part.pt while it runs: a killed run goes on from its last epoch

    python pretrain.py --dataset clinc --gamma 10 --seed 0 --encoder minilm
    torchrun --nproc_per_node 4 pretrain.py --dataset clinc --gamma 10 --seed 0

L_p = cross-entropy on the labelled rows + masked language modelling on all rows (Eq. 2). Only the last transformer layer
(--trained_layers: more) and the heads train. The best epoch on dev, which holds known classes only, is kept.
"""
import datetime
import hashlib
import math
import os
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_samples
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus
from tqdm import tqdm

from encoder import Encoder, pick_dtype, weights_sha256
from make_lt_data import ThisProcessError, UserError, check_positive, first_process, open_run, run_script, write_atomic

SEARCHED = 20_000  # unlabelled rows that the first centres and the number of classes are searched on


@dataclass
class Args:
    dataset: str = "clinc"  # as given to make_lt_data.py; of a table of your own, the file's name is enough
    gamma: float = 10.0  # as given to make_lt_data.py
    seed: int = 0  # as given to make_lt_data.py; also draws batches, masks, dropout and a missing language-model head
    known_ratio: float = 0.75  # as given to make_lt_data.py
    labeled_ratio: float = 0.1  # as given to make_lt_data.py
    data_dir: str = "data"  # where make_lt_data.py wrote
    out_dir: str = "out"  # where out/<run>/ is written
    encoder: str = "bert-base-uncased"  # the paper's (Sec. 4.1), minilm, a local folder, or a hub name
    epochs: int = 30  # at most; the paper does not say
    max_steps: int = 1200  # no new epoch after so many batches: a large corpus needs fewer epochs
    patience: int = 20  # epochs without a better dev result after which it stops (Appendix D)
    select: str = "loss"  # what is best on dev: loss (cross-entropy), or accuracy as in the paper; see README
    lr: float = 5e-5  # AdamW (Appendix D)
    head_lr: float = 5e-4  # AdamW, for the heads, which start from nothing or from class means
    batch_size: int = 512  # rows of the masked-language-modelling batch (Appendix D)
    labeled_batch_size: int = 128  # labelled rows beside them; the paper does not say
    temperature: float = 0.1  # of the cosine classifier, log P = softmax(z . w / temperature); not in the paper
    mask_epochs: int = 5  # epochs that share one random masking of the corpus, since the trunk has to run for each
    no_mlm: bool = False  # leave the masked language modelling out
    trained_layers: int = 1  # the last layers of the encoder that train, here and in what starts from here (Sec. 4.1)
    max_length: int = 128  # tokens a text is cut at
    no_cache: bool = False  # run the frozen trunk for every batch anew: slow, to compare with
    cache_gb: float = 8.0  # on a CPU, hidden states larger than this, for each copy of the corpus, are mapped from out/<run>/
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 where the hardware multiplies it natively
    restart: bool = False  # replace an earlier run that had other settings


def pick_device(name):
    """--device as a torch.device."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name} is unknown: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible here; pass --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def data_fingerprint(folder):
    """sha256 over all that training reads of data/<run>/, so that a result can be tied to its data."""
    digest = hashlib.sha256()
    for name in ("train.tsv", "dev.tsv", "test.tsv", "train_label.npy", "dev_label.npy", "labels.txt"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def load_checkpoint(path):
    """A checkpoint's dict, or None where there is no file. Tensors and plain types only."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (PermissionError, MemoryError):
        raise
    except Exception as err:
        reason = str(err).strip().split("\n")[0]
        raise UserError(f"{path} is damaged ({reason[:80]}): delete it and run the same command again") from None


def commit():
    """The commit of this checkout, with + behind it when files differ; empty outside git.

    To be asked as a run begins: when it ends, the checkout may be another one.
    """
    ask = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        said = subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return said.stdout.strip()


def save_checkpoint(path, **state):
    def write(file):
        try:
            torch.save(state, file)
        except RuntimeError as err:  # its zip writer hides a full disk behind one of its own
            raise err.__context__ if isinstance(err.__context__, OSError) else err from None

    write_atomic(path, write)


def open_pretrained(path, data):
    """The checkpoint that pretrain.py left at path, made from what the folder data holds now. Raises UserError."""
    pre = load_checkpoint(path)
    if pre is None:
        raise UserError(f"{path} is missing: run pretrain.py first, with the same --dataset and what else names the task")
    if pre["config"]["data"] != data_fingerprint(data):
        raise UserError(f"{path} was trained on other data than {data} holds now: run pretrain.py --restart")
    return pre


def settings(args, dtype):
    """The flags by which a later call knows a finished run again, --dtype resolved: all but those on where it runs."""
    kept = {k: v for k, v in asdict(args).items() if k not in ("data_dir", "out_dir", "cache_gb", "restart", "device", "tag")}
    return kept | {"dtype": str(dtype).split(".")[1]}


def same_config(found, config, path, restart):
    """True if a checkpoint's config is the one asked for; with other settings, False on --restart and an error without."""
    different = [key for key in config if found.get(key) != config[key]]
    if not different or restart:
        return not different
    key, of = different[0], ""
    if isinstance(found.get(key), dict) and isinstance(config[key], dict):  # the settings of the pre-training it starts from
        found, config, of = found[key], config[key], f"{key}'s "
        key = next(k for k in {**found, **config} if found.get(k) != config.get(k))
    raise UserError(f"{path} was made with other settings ({of}{key} {found.get(key)}, now {config.get(key)}): pass --restart "
                    "to replace it, or another --out_dir (train_imbanid.py: --tag) to keep both")


def seed_epoch(seed, epoch, rank=0):
    """Seed dropout for an epoch and return the generator of its batches: a resumed run draws what an unbroken one draws."""
    torch.manual_seed(1_000_003 * (seed + 1) + 1009 * epoch + rank)
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + 1009 * epoch)


def class_means(z, label, K):
    """Unit-length mean of the unit rows z (N, H) of each class 0..K-1 in label (N,). (K, H); zeros for an empty class."""
    total = torch.zeros(K, z.shape[1], device=z.device)
    total.index_add_(0, label[label >= 0], z[label >= 0])
    return normalize(total, dim=1)


def trained_state(module):
    """The parameters of a module that train, by name, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}


def load_trained(module, state):
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
        raise UserError("the checkpoint belongs to another encoder: pass the --encoder it was made with")
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def check_trunk(encoder, state):
    """UserError where a checkpoint was trained on other frozen weights than the encoder of that name has now."""
    if state["trunk"] != encoder.fingerprint:
        raise UserError("the weights of --encoder are not those that the checkpoint was trained with: put them back, or "
                        "remove the run's folders in out/, those with a tag too, and start anew")


def load_trained_layers(encoder, state):
    check_trunk(encoder, state)
    load_trained(encoder.trained_layers, state["trained_layers"])


# ---- what the pre-trained features give by themselves: K, the first centres, the k-means rows ----

def semi_supervised_kmeans(x, label, K, num_known, seed, n_init=10, plus_plus=False):
    """k-means with the labelled rows held in their classes (GCD's). x: (N, H). label: (N,), -1 unlabelled. Returns centres.

    Known centres start from class_means, novel ones from random unlabelled rows, with plus_plus from rows far from the
    centres so far (k-means++); the best of n_init inertias wins.
    """
    generator = torch.Generator().manual_seed(seed)
    held, free = torch.where(label >= 0)[0], torch.where(label < 0)[0]
    known = class_means(x, label, num_known)
    best = (math.inf, None)
    if plus_plus:
        unlabelled, to_known = x[free], torch.cdist(x[free], known).amin(1)
    for _ in range(n_init):
        novel = free[torch.randperm(len(free), generator=generator)[:K - num_known].to(free.device)]
        if plus_plus:
            distance = to_known
            for j in range(K - num_known):
                novel[j] = free[torch.multinomial((distance ** 2 + 1e-9).cpu(), 1, generator=generator).to(free.device)]
                distance = torch.minimum(distance, torch.cdist(unlabelled, x[novel[j], None])[:, 0])
        centre, assigned = torch.cat([known, x[novel]]), None
        for _ in range(100):
            last, distance = assigned, (centre ** 2).sum(1) - 2 * x @ centre.T
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
    """Rows that the first classes have, of whose n rows c = ceil(sample_rate n) are labelled: (c - 1) / rate < n <= c / rate.

    Those of the known classes (num_known,), the middle of that range. If these are as large as each other, so that the data
    are balanced, those of all classes (K,): the novel ones share what is left. Fewer than four known classes with three
    labelled rows each say nothing of that.
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
    objective: the log-likelihood of the unlabelled rows plus label_weight times log p(class | row) of the labelled ones,
    each of them judged by centres that it had no part in. With `size`, log_share of such a class is no share but the offset
    (at most 3 from the share) that brings the number n_k of its rows to `size`, a Lagrange multiplier whose term is taken off
    the objective, and so is the KL divergence of what n_k remains from `size`.
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
    would miss least, and of 16 rows that are explained badly to the one where it helps most. The move stays if
    mixture_step's objective rises within three steps. Its labelled part is what tells a new intent from half of a known one:
    a novel centre that takes over a known class makes that class's own labelled rows, each left out in turn, look like
    strangers. Of a large corpus the moves are tried on SEARCHED unlabelled rows, then all rows settle the centres.
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
    size = None
    if sample_rate and num_known:
        size = class_sizes(label, num_known, K, sample_rate)
    if len(free) > SEARCHED:
        rows = searched_rows(label, generator)
        centre = seed_centres(x[rows], label[rows], K, num_known, kappa, label_weight, swaps, 0.0, seed, quiet)
        return normalize(settle(x, centre, torch.full((K,), uniform, device=x.device), 30)[0], dim=1)
    fast = x.bfloat16() if pick_dtype("auto", x.device) == torch.bfloat16 else x  # good enough to compare moves
    total = torch.zeros(K, x.shape[1], device=x.device).index_add_(0, label[held], label_weight * x[held])
    similarity = x[free] @ normalize(total[:num_known], dim=1).T
    nearest = similarity.amax(1) if num_known else x.new_zeros(len(free))
    for j in range(num_known, K):  # k-means++: a row far from every centre so far
        total[j] = x[draw(1 - nearest, 1)]
        nearest = torch.maximum(nearest, x[free] @ total[j])

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
    """The paper's Appendix E: k-means with K' clusters on the features z (N, H); the clusters with at least t rows count.

    max_classes: K', 0 for three times num_known. min_cluster: t, 0 for the mean size N / K', as in the code of DeepAligned
    (Zhang et al. 2021), which the paper follows here.
    """
    K = min(max_classes or 3 * num_known, len(z))
    sizes = np.bincount(KMeans(K, n_init=1, random_state=seed).fit_predict(z.cpu().numpy()), minlength=K)
    return max(int((sizes >= (min_cluster or len(z) / K)).sum()), num_known)


def splits_and_merges(z, label, dev_z, dev_label, K, args_of_seeding, seed):
    """B-cubed recall and precision of known classes that were hidden from a seeding with K centres.

    Every known class is hidden once, a quarter of them at a time. z: (N, H), label: (N,), -1 unlabelled; dev_z, dev_label: the
    labelled rows that the seeding never sees. Recall is the share of a row's class that is in its cluster, precision the
    share of its cluster that is of its class, both over labelled and dev rows, itself left out; the mean over hidden rows.
    Of the classes that compete for the novel centres only the hidden ones have labelled rows to be seen by; what they put
    into a row's cluster stands for what the K - num_known unknown classes put there as well.
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


def silhouette_num_classes(z, num_known, args_of_seeding, seed):
    """The number of classes with the best silhouette on a geometric grid, for where hardly any class is known.

    It is the mean of the mean over rows, which the large clusters decide, and of the mean over clusters, which the many
    small ones do. Nothing is made of the labels: a class held to its one labelled row, which counts for several, makes the
    best K anything.
    """
    label = torch.full((len(z),), -1, device=z.device)
    looked_at = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:3000].to(z.device)
    best, K = (-1.0, max(1, num_known)), max(4, num_known)
    while K <= len(z) / 2 and K < 4 * best[1] + 8:  # well past its peak, which may be a flat one
        centre = seed_centres(z, label, K, 0, *args_of_seeding, seed, quiet=True)
        found, cluster = (z[looked_at] @ centre.T).argmax(1).cpu().unique(return_inverse=True)
        if 1 < len(found) < len(looked_at):
            score = silhouette_samples(z[looked_at].cpu().numpy(), cluster.numpy(), metric="cosine")
            by_cluster = np.bincount(cluster, score) / np.bincount(cluster)
            best = max(best, ((score.mean() + by_cluster.mean()) / 2, K))
        K = math.ceil(1.2 * K)
    return best[1]


def num_classes_by_size(label, num_known, sample_rate):
    """Bounds of the number of classes, one standard error around what the known classes' mean size says of the other rows.

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

    With too few centres a hidden class shares its cluster (precision is low), with too many it is torn (recall is low);
    where the two meet the number is right on average for the known classes, hence for the unknown ones, which differ from
    them in nothing but that nobody labelled them. K is searched on a geometric grid and read off a straight line through
    the four values around the crossing. With fewer than 200 labelled rows the silhouette has a say in it, the more the
    fewer, since the two err in different ways; with fewer than four known classes of two labelled rows or more it decides.
    Of a large corpus SEARCHED unlabelled rows are looked at. Where the labelled rows tell the sizes of the known classes, the
    estimate is held within one standard error of the number of classes of their mean size in the other rows.
    """
    num_known, balance = int(label.max()) + 1, {}
    if (label >= 0).all():
        return num_known
    kappa, label_weight, swaps, sample_rate = args_of_seeding
    least, most = num_classes_by_size(label, num_known, sample_rate) if sample_rate and num_known > 1 else (num_known, math.inf)
    rows = searched_rows(label, torch.Generator().manual_seed(seed))
    if len(rows) < len(label):
        sample_rate = 0.0  # not that of the rows that are left
    args_of_seeding = kappa, label_weight, swaps // 5, sample_rate  # 300 moves find better centres, but as many of them
    z, label = z[rows], label[rows]

    def measure(step):
        K = round(num_known * 1.15 ** step)
        recall, precision = splits_and_merges(z, label, dev_z, dev_label, K, args_of_seeding, seed)
        balance[step] = recall - precision
        return balance[step]

    sizes = torch.cat([label[label >= 0], dev_label]).bincount(minlength=max(1, num_known))
    if (sizes > 1).sum() < 4:
        return round(min(max(silhouette_num_classes(z, num_known, args_of_seeding, seed), least), most))
    step = 2
    if measure(step) > 0:  # classes are merged: more centres
        while 1.15 ** step * num_known < len(z) / 4 and measure(step := step + 1) > 0:
            pass
    else:
        while step > 0 and measure(step := step - 1) <= 0:
            pass
    near = sorted(balance, key=lambda s: abs(balance[s]))[:4]
    slope, height = np.polyfit(near, [balance[s] for s in near], 1) if len(near) > 1 else (0, 0)
    crossing = -height / slope if slope < 0 else near[0]
    found, few = num_known * 1.15 ** min(max(crossing, min(near) - 1), max(near) + 1), max(0.0, 0.5 - int(sizes.sum()) / 400)
    if few:
        found = found ** (1 - few) * silhouette_num_classes(z, num_known, args_of_seeding, seed) ** few
    return round(min(max(found, least), most))


def kmeans_rows(raw, pretrained, label, K, num_known, seed):
    """Test clusters (3, M) of k-means on raw features, the same with labelled rows held, and k-means on pretrained ones.

    raw, pretrained: {"train": (N, H), "test": (M, H)} unit rows. Fitted on train, test rows go to the nearest centre.
    """
    def nearest(z, centre):
        return ((centre ** 2).sum(1) - 2 * z["test"] @ centre.T).argmin(1).cpu().numpy()

    plain = [torch.from_numpy(KMeans(K, n_init=3, random_state=seed).fit(z["train"].cpu().numpy()).cluster_centers_).to(
        z["train"]) for z in (raw, pretrained)]
    held = semi_supervised_kmeans(raw["train"], label, K, num_known, seed)
    return np.stack([nearest(raw, plain[0]), nearest(raw, held), nearest(pretrained, plain[1])])


# ---- torchrun: process `rank` of `world` holds rows rank::world, and process 0 does what is done once ----

def start_processes(device):
    """(rank, world size, this process's device) from torchrun's environment; one process without it."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, device
    if device.type == "cuda":
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            raise UserError(f"{os.environ['LOCAL_WORLD_SIZE']} processes for {torch.cuda.device_count()} GPUs: start one for "
                            "each GPU, or pass --device cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        share, told = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]), torch.get_num_threads()
        torch.set_num_threads(max(1, share if told == 1 else min(share, told)))  # 1 is what torchrun sets on any machine
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(agreed_prefix(store, rank, world), store)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world,
                            timeout=datetime.timedelta(hours=2),  # process 0 seeds a large corpus while the others wait
                            device_id=device if on_gpu else None)
    return rank, world, device


def agreed_prefix(store, rank, world):
    """A name that the processes of this start share, and nobody before them: it comes from process 0, to whoever asks.

    torchrun --max_restarts keeps its store, in which the new processes could read the addresses of the dead ones; and its
    number of restarts is each node's own.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks {rank}", name)
        agreed = store.get(f"for {name}").decode()
        store.set(f"{rank} has {agreed}", "")
        return agreed
    for other in range(1, world):
        while not store.check([f"{other} has {name}"]):  # the one that asked may have been a dead one
            if store.check([f"asks {other}"]):
                store.set(f"for {store.get(f'asks {other}').decode()}", name)
            time.sleep(0.02)
    return name


def sum_over_ranks(x):
    """x summed over processes; x itself on one."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather_rows(x, N):
    """The (N, ...) tensor of all rows, on every process, of which this one holds rows rank::world as x."""
    if not dist.is_initialized():
        return x
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(N, *x.shape[1:], dtype=x.dtype, device=x.device)
    whole[rank::world] = x
    return sum_over_ranks(whole) if N else whole


def check_same_epoch(epoch, folder, world, device):
    """UserError where the processes did not find the same checkpoint."""
    if int(sum_over_ranks(torch.tensor(epoch, device=device))) != world * epoch:
        raise UserError(f"the processes found different checkpoints: every node needs the same {folder}/ (a shared disk)")


def on_all_processes(device, work):
    """work(rank, world, device) on each of torchrun's processes, which end here; on the only one without torchrun."""
    try:
        rank, world, device = start_processes(device)
        work(rank, world, device)
        if world > 1:
            dist.barrier()  # process 0 is still writing: a process that left would look like a failure to torchrun
    except RuntimeError as err:
        if "RANK" not in os.environ or not any(word in str(err) for word in ("onnection", "NCCL", "peer", "imed out")):
            raise
        reason = str(err).strip().splitlines()[-1].strip()
        raise ThisProcessError(f"another process died or cannot be reached ({reason[:150]}): the same command goes on from the "
                               "last finished epoch") from None
    if world > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that tears itself down


def joint_step(loss, optimizer, where, rows):
    """An optimizer step with the gradients of all processes' shares of the loss summed, and clipped to 1.0.

    where and rows, training rows of the batch (this process's or all), are for the UserError of a gradient that is not finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    if loss.requires_grad:  # a process may have no row in a batch
        loss.backward()
    flat = sum_over_ranks(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
    if not torch.isfinite(flat).all():
        parts = [rows.tolist()]
        if dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows.tolist())
        raise UserError(f"a gradient is not finite in {where}, at lr {optimizer.param_groups[0]['lr']:.1e}: try a smaller --lr "
                        "or --dtype float32; finished epochs are saved. Training rows of the batch: "
                        f"{sorted({*sum(parts, [])})}")
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def check_weights(optimizer, where):
    """UserError where the last step has driven weights so far that they say nothing: nobody wants to go on from there."""
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"] if p.numel()]
    largest = float(torch.stack([p.abs().max() for p in parameters]).max())  # Python's own max may pass over a nan
    if not largest < 1e6:
        raise UserError(f"a weight of {largest:.0e} after {where}: try a smaller --lr or --dtype float32; epochs finished "
                        "before it are saved")


# ---- pre-training ----

def train_epoch(encoder, classifier, optimizer, hidden, masked, target, label, args, epoch, rank, world):
    """One pass over all rows in random order, a labelled batch beside every batch. Returns mean CE and mean MLM loss.

    hidden, masked, target: this process's rows. label (N,): of all. Every process draws the same batches and computes the
    share of its own rows. Without a labelled row there is no cross-entropy.
    """
    generator = seed_epoch(args.seed, epoch, rank)
    encoder.train()
    labelled = torch.where(label >= 0)[0]
    batches = torch.randperm(len(label), generator=generator).to(encoder.device).split(args.batch_size)
    sums = torch.zeros(2, device=encoder.device)
    for step, rows in enumerate(batches, 1):
        drawn, ce, mlm = rows[:0], *torch.zeros(2, device=encoder.device)
        if len(labelled):
            drawn = labelled[torch.randint(len(labelled), (min(args.labeled_batch_size, len(labelled)),), generator=generator)]
            own = drawn[drawn % world == rank]
            if len(own):
                z = normalize(encoder.features(hidden, own // world), dim=1)
                ce = cross_entropy(z @ normalize(classifier, dim=1).T / args.temperature, label[own]) * (len(own) / len(drawn))
        if not args.no_mlm:
            mlm, tokens = encoder.mlm_loss(masked, rows[rows % world == rank] // world, target)
            mlm = mlm * (tokens / max(1, int(sum_over_ranks(torch.tensor(tokens, device=encoder.device)))))
        joint_step(ce + mlm, optimizer, f"epoch {epoch}, step {step} of {len(batches)}", torch.cat([rows, drawn]))
        sums += torch.stack([ce.detach(), mlm.detach()])
    return (sum_over_ranks(sums) / len(batches)).tolist()


def dev_result(z, classifier, label, temperature):
    """Cross-entropy and accuracy in percent on dev, unit features z (n, H), known classes only; NaN without dev rows."""
    if len(label) == 0:
        return math.nan, math.nan
    logits = z @ normalize(classifier.detach(), dim=1).T / temperature
    return float(cross_entropy(logits, label)), 100 * float((logits.argmax(1) == label).float().mean())


def main(args):
    run, data, texts, labels, meta = open_run(args)
    out = Path(args.out_dir) / run
    if args.select not in ("loss", "accuracy"):
        raise UserError(f"--select {args.select} is unknown: choose loss or accuracy")
    check_positive(args, "epochs", "patience", "lr", "head_lr", "batch_size", "labeled_batch_size", "temperature",
                   "mask_epochs", "max_steps", "cache_gb")
    if args.no_mlm and not (labels["train"] >= 0).any():
        raise UserError("--no_mlm leaves nothing to learn where no row has a label")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    config = settings(args, dtype) | {"dataset": meta["dataset"], "data": data_fingerprint(data)}
    done = out / "pretrain.pt"
    found = load_checkpoint(done)
    if found and same_config(found["config"], config, done, args.restart):
        if first_process():
            kept = f" (dev accuracy {found['dev_accuracy']:.2f})" if len(labels["dev"]) else ""
            print(f"{done} is there already, made with the same settings{kept}: skipped")
        return
    on_all_processes(device, lambda *where: train(args, texts, labels, meta, config, dtype, out, *where))


def read_texts(args, texts, device, dtype, out, rank, world):
    """The encoder, and of this process's rows the token ids and the hidden states: {"train", "dev"} of Packed each."""
    torch.manual_seed(args.seed)  # minilm comes without a language-model head: it is drawn
    encoder = Encoder(args.encoder, args.max_length, device, dtype, not args.no_cache, args.cache_gb, out, args.trained_layers)
    tokens = {split: encoder.tokenize(texts[split]) for split in ("train", "dev")}
    unknown = tokens["train"].values == encoder.tokenizer.unk_token_id
    long, unknown = tokens["train"].lengths >= encoder.max_length, unknown[unknown | ~encoder.special(tokens["train"])].float()
    if long.any() and rank == 0:
        print(f"{int(long.sum())} text(s) of {encoder.max_length} tokens or more: read up to there (--max_length)")
    if unknown.mean() > 0.05 and rank == 0:
        print(f"{100 * float(unknown.mean()):.0f} % of the tokens are unknown to --encoder {args.encoder}: another one "
              "may suit these texts better")
    encoder.limit_vocabulary(tokens["train"])
    tokens = {split: ids.take(torch.arange(len(ids), device=device)[rank::world]) for split, ids in tokens.items()}
    hidden = {split: encoder.cache(ids, f"reading {split}" if rank == 0 else None) for split, ids in tokens.items()}
    return encoder, tokens, hidden


def train(args, texts, labels, meta, config, dtype, out, rank, world, device):
    """From the texts to pretrain.pt."""
    done, part = out / "pretrain.pt", out / "pretrain_part.pt"
    start, N, code = time.time(), len(labels["train"]), commit()
    encoder, tokens, hidden = read_texts(args, texts, device, dtype, out, rank, world)
    label, dev_label = (torch.from_numpy(labels[split]).to(device) for split in ("train", "dev"))

    def unit_features(split):
        return gather_rows(normalize(encoder.all_features(hidden[split]), dim=1), len(labels[split]))

    classifier = nn.Parameter(class_means(unit_features("train"), label, meta["num_known"]))
    layers = list(encoder.trained_layers.parameters())
    heads = [classifier] + [p for p in encoder.mlm_head.parameters() if p.requires_grad and not args.no_mlm]
    optimizer = torch.optim.AdamW([{"params": layers, "lr": args.lr}, {"params": heads, "lr": args.head_lr}], weight_decay=0.01)

    def state():
        return {"trained_layers": trained_state(encoder.trained_layers), "mlm_head": trained_state(encoder.mlm_head),
                "classifier": classifier.detach().cpu().clone(), "trunk": encoder.fingerprint}

    epochs = min(args.epochs, math.ceil(args.max_steps / math.ceil(N / args.batch_size)))
    tells = len(dev_label) and meta["num_known"] > 1  # with one known class every dev loss is 0
    epoch, log, best = 0, [], {"epoch": 0}
    found = load_checkpoint(part)
    if found and same_config(found["config"], config, part, args.restart):
        load_trained_layers(encoder, found)
        load_trained(encoder.mlm_head, found["mlm_head"])
        classifier.data.copy_(found["classifier"])
        optimizer.load_state_dict(found["optimizer"])
        epoch, log, best = found["epoch"], found["log"], found["best"]
        start -= found["seconds"]
        if rank == 0:
            print(f"resuming {part} after epoch {epoch}")
    check_same_epoch(epoch, out, world, device)

    out.mkdir(parents=True, exist_ok=True)
    masked = target = None
    with tqdm(total=epochs, initial=epoch, desc="pre-training", disable=rank > 0 or not sys.stderr.isatty()) as bar:
        while epoch < epochs and epoch - best["epoch"] < args.patience:
            if not args.no_mlm and (masked is None or epoch % args.mask_epochs == 0):
                drawing = torch.Generator().manual_seed(args.seed + 7919 * (epoch // args.mask_epochs + 1) + 104729 * rank)
                masked, target = encoder.mask_tokens(tokens["train"], drawing)
                masked = encoder.cache(masked)
            epoch += 1
            ce, mlm = train_epoch(encoder, classifier, optimizer, hidden["train"], masked, target, label, args, epoch,
                                  rank, world)
            check_weights(optimizer, f"epoch {epoch}")
            z = unit_features("dev")
            judged = dev_result(z, classifier, dev_label, args.temperature) if rank == 0 else (0.0, 0.0)  # one for all
            loss, accuracy = sum_over_ranks(torch.tensor(judged, dtype=torch.float64, device=device)).tolist()
            log.append({"epoch": epoch, "ce": ce, "mlm": mlm, "dev_loss": loss, "dev_accuracy": accuracy})
            better = best["epoch"] == 0 or not tells or (
                loss < best["dev_loss"] if args.select == "loss" else accuracy > best["dev_accuracy"])
            now = state()
            if better:
                best = {**now, **log[-1]}
            if rank > 0:
                continue
            save_checkpoint(part, **now, optimizer=optimizer.state_dict(), epoch=epoch, log=log, best=best, config=config,
                            seconds=time.time() - start)
            bar.update()
            bar.set_postfix(dev=f"{accuracy:.2f}", best=f"{best['dev_accuracy']:.2f}")
    if rank > 0:
        return
    seconds = time.time() - start
    config["weights"] = weights_sha256(best["trained_layers"].values())[:12]  # for what starts from it: settings do not tell
    # The number of processes is kept because each draws its own masks.
    save_checkpoint(done, **best, config=config, log=log, seconds=seconds, commit=code, processes=world)
    part.unlink(missing_ok=True)
    kept = (f"kept epoch {best['epoch']} with dev loss {best['dev_loss']:.4f} and accuracy {best['dev_accuracy']:.2f}"
            if tells else "no dev rows of two classes to choose by")
    print(f"pre-training: {epoch} epochs in {seconds:.0f} s, {kept}; written to {done}")


if __name__ == "__main__":
    run_script(main, Args)

"""Stages 2 and 3 of ImbaNID: pseudo-labels by relaxed optimal transport, robust representation learning, repeat.

Reads   data/<run>/            (make_lt_data.py; train_truth.npy only for the metrics printed at the end)
        out/<run>/pretrain.pt  (pretrain.py)
Writes  out/<run>/  last.pt  pseudo_label.npy confidence.npy beta.npy train_feature.npy log.jsonl results.json
        and of a benchmark, which has a test set, test_feature.npy test_pred.npy; with --tag TAG in out/<run>_TAG/
        out/<run>/kmeans_<K>_<dtype>_<weights>_<data>.npy, the k-means rows of a benchmark's results.json, which all tags share

    python train_imbanid.py --dataset clinc --gamma 10 --seed 0
    torchrun --nproc_per_node 4 train_imbanid.py --dataset clinc --gamma 10 --seed 0
    python train_imbanid.py --pseudo_label cot --tag cot          (an ablation of the paper's Table 3)

One epoch: features of all rows -> log P of the cluster head -> relaxed_ot (Eq. 5) -> select_clean (Eq. 6-9) -> batches of
CWCL (Eq. 10), IWCL (Eq. 11) and cross-entropy on the clean rows (Eq. 12). Test rows get the head's argmax.
"""
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, normalize, one_hot
from tqdm import tqdm

from encoder import Encoder, pick_dtype
from losses import class_wise_loss, contrastive_objective, instance_wise_loss, select_clean
from make_lt_data import (
    CORPORA,
    UserError,
    check_positive,
    check_shares,
    check_tag,
    check_used,
    first_process,
    open_run,
    run_script,
    set_aside,
    write_atomic,
)
from metrics import cluster_metrics
from pretrain import (
    commit,
    dropout_state,
    find_checkpoint,
    gather_rows,
    load_trained_layers,
    of_all,
    of_first,
    on_all_processes,
    open_pretrained,
    pick_device,
    run_batches,
    same_config,
    save_checkpoint,
    seed_epoch,
    settings,
    signals_held,
    so_far,
    sum_over_ranks,
    trained_state,
)
from rot import RotResult, moving_average_marginal, relaxed_ot
from seeding import appendix_e, estimate_num_classes, fitted_kmeans, kmeans, kmeans_rows, nearest, seed_centres


@dataclass
class Args:
    dataset: str = "clinc"  # as given to make_lt_data.py; of a table of your own, the file's name is enough
    gamma: float = 10.0  # as given to make_lt_data.py
    seed: int = 0  # as given to make_lt_data.py; also draws seedings, batches, replaced tokens and dropout
    known_ratio: float = 0.75  # as given to make_lt_data.py
    labeled_ratio: float = 0.1  # as given to make_lt_data.py
    data_dir: str = "data"  # where make_lt_data.py wrote
    out_dir: str = "out"  # where pretrain.py wrote; results go to out/<run>/
    tag: str = ""  # write to out/<run>_<tag>/ instead, starting from the same pretrain.pt
    num_classes: str = ""  # K: true (the benchmark's), auto (estimated), appendix_e, a number; empty: true where it is known
    max_classes: int = 0  # K' of Appendix E; 0: three times the known classes
    min_cluster: int = 0  # t of Appendix E; 0: the mean cluster size N / K', as in DeepAligned
    pseudo_label: str = "rot"  # rot, or Sec. 4.3's cot (beta uniform), eot (KL(beta || uniform)), mot (moving average); kmeans
    mu: float = 0.9  # moving average of mot (Sec. 4.3); the paper does not say
    lambda1: float = 0.05  # entropic weight of the transport (Appendix F)
    lambda2: float = 0.0  # weight of its KL term; 0: 2, but 7 on a benchmark at gamma 1 (Appendix F)
    rho: float = 0.7  # share of the class prior that DR selects (Sec. 4.1; Appendix D says 0.65)
    tau_g: float = 0.9  # confidence above which QR selects (Sec. 4.1)
    no_dr: bool = False  # without the distribution-aware regularization
    no_qr: bool = False  # without the quality-aware regularization
    no_adaptive_weight: bool = False  # w_ij = 1 in CWCL
    no_cwcl: bool = False  # without class-wise contrastive learning
    no_iwcl: bool = False  # without instance-wise contrastive learning
    omega: float = 0.5  # weight of the contrastive term against cross-entropy (Eq. 12); the paper does not say
    tau: float = 0.07  # contrastive temperature (Sec. 4.1; Appendix D says 0.1)
    temperature: float = 0.05  # of the cluster head, log P = log softmax(z . w / temperature); not in the paper
    replace_rate: float = 0.25  # tokens replaced in the augmented view (CLNN's)
    view_epochs: int = 2  # epochs that share one augmented view of the corpus, since the trunk has to run for each
    epochs: int = 6  # at least, see --min_steps; the paper does not say; 0: the seeded head as it is
    min_steps: int = 60  # batches at least: a small corpus needs more epochs than --epochs to have them; 0: no minimum
    max_steps: int = 400  # no new epoch after so many batches: a large corpus needs fewer epochs
    lr: float = 5e-5  # AdamW, trained layers
    head_lr: float = 5e-4  # AdamW, cluster head
    batch_size: int = 512  # rows, over all processes (Sec. 4.1)
    kappa: float = 30.0  # concentration of the mixture that seeds the head's novel rows; not in the paper
    label_weight: float = 0.0  # rows a labelled row counts for in that mixture; 0: 1 / labeled_ratio (own table: at most 10)
    swaps: int = 300  # relocations of a novel centre that the seeding tries
    no_class_sizes: bool = False  # do not infer class sizes from the labelled rows (in the seeding and --num_classes auto)
    no_cache: bool = False  # run the frozen trunk for every batch anew: slow, to compare with
    cache_gb: float = 8.0  # on a CPU, hidden states of more GB than this, per copy of the corpus, are mapped from out/<run>/
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 where that is native; the seeding always goes by auto
    restart: bool = False  # replace an earlier run that had other settings


# ---- torchrun: what only this script needs; the rest is in pretrain.py ----

class _Gather(torch.autograd.Function):
    """Rows of all processes, this one's first. The gradient of a row is summed over the processes that used it."""

    @staticmethod
    def forward(ctx, x):
        rank, ctx.sizes = dist.get_rank(), of_all(torch.tensor(len(x), device=x.device)).tolist()
        padded = x.new_zeros(max(ctx.sizes), *x.shape[1:])
        padded[:len(x)] = x
        parts = [part[:size] for part, size in zip(of_all(padded), ctx.sizes)]
        return torch.cat([parts[rank]] + parts[:rank] + parts[rank + 1:])

    @staticmethod
    def backward(ctx, grad):
        rank = dist.get_rank()
        own, before, after = grad.split([ctx.sizes[rank], sum(ctx.sizes[:rank]), sum(ctx.sizes[rank + 1:])])
        grad = sum_over_ranks(torch.cat([before, own, after]).contiguous())
        return grad.split(ctx.sizes)[rank]


def gather(x):
    return _Gather.apply(x) if dist.is_initialized() else x


# ---- the loop ----

def kmeans_result(z, centre, N, rank):
    """Pseudo-labels by k-means instead (what Sec. 4.8 compares with), on unit features of all rows; z (n, H): this process's.

    It starts from centre (K, H), the head's rows, so that cluster k stays class k. Returns a RotResult whose plan has one
    cluster a row.
    """
    everyone, steps, K = gather_rows(z, N), torch.zeros(1, device=z.device), len(centre)
    found = torch.zeros_like(centre)
    if rank == 0:
        fitted = fitted_kmeans(everyone, K, seed=0, init=centre)  # nothing to draw: the start is given
        found += torch.from_numpy(fitted.cluster_centers_).to(z)
        steps += fitted.n_iter_
    plan = one_hot(nearest(z, of_first(found)), K).double() / N
    return RotResult(plan, sum_over_ranks(plan.sum(0)), torch.zeros(K), int(of_first(steps)), 0.0, True)


def lambda2_of(args):
    """--lambda2, by default the paper's (Appendix F): 2 on long-tailed data, 7 on a benchmark at gamma 1."""
    return args.lambda2 or (7.0 if args.gamma <= 1 and args.dataset in CORPORA else 2.0)


def transport_plan(log_p, args, potential, marginal):
    """Sec. 3.4 on this process's rows of log_p (n, K); marginal: MOT's beta. Returns a RotResult and the next marginal."""
    penalty = {"rot": "reverse_kl", "eot": "kl", "cot": "equality", "mot": "equality"}[args.pseudo_label]
    prior = None
    if args.pseudo_label == "mot":
        prior = marginal = moving_average_marginal(marginal, log_p, args.mu, sum_over_ranks)
    try:
        result = relaxed_ot(log_p, args.lambda1, lambda2_of(args), penalty=penalty, init=potential, reduce=sum_over_ranks,
                            prior=prior)
    except ValueError as err:  # on all processes alike
        raise UserError(f"no pseudo-labels with --lambda1 {args.lambda1} and --temperature {args.temperature}: pass larger "
                        f"ones ({err})") from None
    return result, marginal


def batch_loss(encoder, head, hidden, view, rows, pseudo_label, confidence, clean, args):
    """Eq. 12 on one batch: this process's share of the mean over the global batch. Returns (loss, contrastive, ce)."""
    z = normalize(torch.stack([encoder.features(hidden, rows), encoder.features(view, rows)], 1), dim=2)
    y, q, ok = pseudo_label[rows], confidence[rows], clean[rows]
    counts = sum_over_ranks(torch.tensor([float(z.shape[0] * z.shape[1]), float(2 * ok.sum())], device=z.device))
    none = torch.zeros(z.shape[:2], device=z.device)
    cwcl, num_positive = (none, none) if args.no_cwcl else class_wise_loss(
        z, y, q, ok, args.tau, not args.no_adaptive_weight, gather)
    iwcl = none if args.no_iwcl else instance_wise_loss(z, args.tau, gather)
    contrastive = contrastive_objective(cwcl, iwcl, num_positive).sum() / counts[0]
    logits = z[ok].flatten(0, 1) @ normalize(head, dim=1).T / args.temperature
    ce = cross_entropy(logits, y[ok].repeat_interleave(2), reduction="sum") / counts[1].clamp_min(1)
    return args.omega * contrastive + (1 - args.omega) * ce, contrastive.detach(), ce.detach()


def train_epoch(encoder, head, optimizer, schedule, hidden, view, pseudo_label, confidence, clean, steps, args, epoch, came,
                done, rank, world):
    """`steps` batches of all rows, as pretrain.py's run_batches has it; sums of the contrastive loss and CE.

    Every process draws the same batches and takes its rows of them, hidden and view: Packed. pseudo_label, confidence, clean
    (N,): of all rows.
    """
    generator = seed_epoch(args.seed, epoch, rank, done.step)
    encoder.train()
    batches = torch.randperm(len(pseudo_label), generator=generator).tensor_split(steps)
    mine = [x[rank::world] for x in (pseudo_label, confidence, clean)]

    def loss_of(rows):
        own = (rows[rows % world == rank] // world).to(encoder.device)
        loss, contrastive, ce = batch_loss(encoder, head, hidden, view, own, *mine, args)
        return loss, torch.stack([contrastive, ce]), rows

    return run_batches([(rows,) for rows in batches], loss_of, optimizer, args, epoch, came, done, rank, schedule)


# ---- results ----

def save_run(out, arrays, results):
    """Write a finished run: {name: array} as <name>.npy, then results.json, which says that it is finished."""
    for name, value in arrays.items():
        write_atomic(out / f"{name}.npy", lambda f, value=value: np.save(f, value))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
                "numpy": np.__version__, "scikit-learn": importlib.metadata.version("scikit-learn")}
    results |= {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "threads": torch.get_num_threads(), "versions": versions}
    if torch.cuda.is_initialized():
        results["peak_gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    clean = json.loads(json.dumps(results), parse_constant=lambda name: None)  # a group without rows: null, not NaN
    write_atomic(out / "results.json", json.dumps(clean, indent=1) + "\n")


def read_finished(out, config, args):
    """results.json of an earlier run with these settings, after saying so; None where there is none."""
    path = out / "results.json"
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
        method, found = results["method"], results["config"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: delete it and run the same command again") from None
    if method != config.get("method", "imbanid"):
        raise UserError(f"{out}/ belongs to a run of {method}: choose another --tag")
    if not same_config(found, config, path, args):
        return None
    if first_process():
        code, now = results.get("commit"), commit()
        other = f" (by code of commit {code}, this is {now}: remove that file and last.pt beside it to run it anew)"
        print(f"{path} is there already, made with the same settings: skipped" + other * bool(code and now and code != now))
    return results


def print_scores(results, rows):
    """A table of results.json's rows, {title: row}; the score of a group without rows, NaN or null, is a dash."""
    print(f"{'':28}" + "".join(f"{c.replace('per_class_mean', 'classes'):>9}" for c in results["test"]))
    for title, row in rows.items():
        print(f"{title:28}" + "".join("        -" if v is None or v != v else f"{v:9.2f}" for v in results[row].values()))


def print_results(results, out):
    if "own" in results:
        print(f"\n{results['dataset']}: {results['num_rows']} rows, {results['num_known']} known classes and "
              f"{results['num_classes'] - results['num_known']} new ones, in {out}/; next: python predict.py {out}, which names"
              " them")
        return
    print(f"\n{results['dataset']}, gamma {results['gamma']:g}, seed {results['seed']}, encoder {results['encoder']}, "
          f"K {results['num_classes']}; test, percent")
    print_scores(results, {"ImbaNID": "test", "ImbaNID, k-means on test (T)": "test_kmeans", "k-means, raw": "kmeans_raw",
                           "semi-sup. k-means, raw": "ss_kmeans_raw", "k-means, pre-trained": "kmeans_pretrained"})
    ahead = results["test"]["ACC"]
    print(f"ImbaNID is {ahead - results['kmeans_raw']['ACC']:+.2f} ACC against k-means on raw features, "
          f"{ahead - results['kmeans_pretrained']['ACC']:+.2f} on pre-trained ones, "
          f"{ahead - results['ss_kmeans_raw']['ACC']:+.2f} against semi-supervised k-means on raw features")
    files = ("results.json log.jsonl last.pt test_pred.npy train_feature.npy test_feature.npy pseudo_label.npy confidence.npy "
             "beta.npy").split()
    missing = [name for name in files if not (out / name).exists()]
    print(f"{out}/ lacks {', '.join(missing)}: to make it again remove {out}/results.json and last.pt and run the same command"
          if missing else f"everything is in {out}/: {', '.join(files)}")


# ---- the number of classes ----

def seeding_settings(args, meta):
    """The settings of seed_centres. Nobody says how the labelled rows of an own table were chosen, so they tell no sizes."""
    return (args.kappa, args.label_weight or 1 / meta["labeled_ratio"], args.swaps,
            0.0 if args.no_class_sizes or "own" in meta else meta["labeled_ratio"])


def wanted_classes(args, meta):
    """(--num_classes as a number, or the name of the estimate that will give it; the largest number there are rows for)."""
    own, least, most = "own" in meta, max(1, meta["num_known"]), meta["num_known"] + meta["num_unlabelled"]
    wanted = args.num_classes or ("auto" if own else "true")
    if not own:
        most = min(most, meta["num_test"])  # k-means with K clusters is fitted on train and on test
        wanted = str(meta["num_classes"]) if wanted == "true" else wanted
    if own and meta["num_unlabelled"] == meta["num_dev"]:  # every text has a label, those of dev too, and keeps it
        if wanted not in ("auto", "appendix_e", str(meta["num_known"])):
            raise UserError(f"--num_classes {wanted}: every text has a label and keeps it, so there are {meta['num_known']} "
                            "classes and nothing new can be found: leave the cell empty of a text that may be of another")
        return meta["num_known"], most
    if wanted == "appendix_e" and not (meta["num_known"] or args.max_classes):
        raise UserError("--num_classes appendix_e needs known classes, or --max_classes")
    if wanted in ("auto", "appendix_e"):
        return wanted, most
    if not wanted.isdecimal() or not least <= int(wanted) <= most:
        known = " (the known classes)" if meta["num_known"] else ""
        raise UserError(f"--num_classes {wanted}: pass true (on a benchmark), auto, appendix_e, or a number from "
                        f"{least}{known} to {most} (as many as there are rows for)")
    return int(wanted), most


def resolve_num_classes(args, z, label, meta, rank):
    """--num_classes as a number; it is estimated on process 0. z: {"train", "dev"} pre-trained features; label: likewise."""
    wanted, most = wanted_classes(args, meta)
    if isinstance(wanted, int):
        return wanted
    K = 0
    if rank == 0:
        K = min(most, appendix_e(z["train"], meta["num_known"], args.max_classes, args.min_cluster, args.seed)
                if wanted == "appendix_e" else estimate_num_classes(
                    z["train"], label["train"], z["dev"], label["dev"], seeding_settings(args, meta), args.seed))
        if meta["num_classes"]:
            note = f" (the benchmark has {meta['num_classes']})"
        elif K == meta["num_known"]:
            note = ", no more than are known: --num_classes N looks for more"
        else:
            note = f"{', a guess with so few known classes:' if meta['num_known'] < 20 else ';'} --num_classes sets it"
        print(f"estimated number of classes: {K}{note}")
    return int(of_first(torch.tensor([K], device=z["train"].device)))


# ---- scores ----

def evaluate(args, z, head, pseudo_label, data, labels, meta, kmeans_file):
    """Metrics of the finished model: {row of results.json: scores}, and the test predictions (M,).

    z: {"raw", "pretrained", "final"}: {"train", "test"} unit features.
    """
    K, num_known = len(head), meta["num_known"]
    pred = (z["final"]["test"] @ normalize(head, dim=1).T).argmax(1).cpu().numpy()
    found = None
    if kmeans_file.exists() and not args.restart:
        with contextlib.suppress(ValueError, EOFError):  # a damaged one is made anew
            found = np.load(kmeans_file)
    if found is None:
        label = torch.from_numpy(labels["train"]).to(head.device)
        found = kmeans_rows(z["raw"], label, K, num_known, args.seed, z["pretrained"])
        write_atomic(kmeans_file, lambda f: np.save(f, found))
    clusters = dict(zip(("kmeans_raw", "ss_kmeans_raw", "kmeans_pretrained"), found), test=pred)
    clusters["test_kmeans"] = kmeans(z["final"]["test"], K, args.seed)[1].cpu().numpy()
    return score(clusters, pseudo_label, labels, data, num_known), pred


def score(clusters, pseudo_label, labels, data, num_known):
    """{row of results.json: cluster_metrics}: of clusters of the test rows, {row: int (M,)}, and of the pseudo-labels (N,).

    This is the one place that uses train_truth.npy: open_run sees only that it can be opened.
    """
    counts, truth, unlabelled = np.load(data / "class_counts.npy"), np.load(data / "train_truth.npy"), labels["train"] < 0
    return {**{row: cluster_metrics(labels["test"], found, num_known, counts) for row, found in clusters.items()},
            "train_unlabelled": cluster_metrics(truth[unlabelled], pseudo_label[unlabelled], num_known, counts)}


# ---- the run ----

def wanted_epochs(args, N):
    """(--epochs, or as many as N rows need for --min_steps batches, which a later call compares (settings); these batches)."""
    fewest = min(args.min_steps, args.max_steps)
    return max(args.epochs, math.ceil(fewest / math.ceil(N / args.batch_size))) if args.epochs else 0, fewest


def check_flags(args):
    if args.pseudo_label not in ("rot", "cot", "eot", "mot", "kmeans"):
        raise UserError(f"--pseudo_label {args.pseudo_label} is unknown: choose rot, cot, eot, mot or kmeans")
    check_positive(args, "batch_size", "max_steps", "view_epochs", "tau", "temperature", "lambda1", "lr", "head_lr",
                   "kappa", "cache_gb")
    check_positive(args, "epochs", "min_steps", "lambda2", "label_weight", "swaps", "max_classes", "min_cluster", or_zero=True)
    check_shares(args, "omega", "rho", "tau_g", "replace_rate")
    kinds = "true", "auto", "appendix_e"
    if args.num_classes not in ("", *kinds) and not args.num_classes.isdecimal():
        raise UserError(f"--num_classes {args.num_classes}: pass a number, or {', '.join(kinds)}")
    if not 0 < args.mu < 1:
        raise UserError(f"--mu {args.mu} must be between 0 and 1")
    check_used(args, "num_classes", "appendix_e", "max_classes", "min_cluster")
    check_used(args, "pseudo_label", "mot", "mu")
    if args.batch_size < int(os.environ.get("WORLD_SIZE", 1)):
        raise UserError(f"--batch_size {args.batch_size} is less than a row for each of {os.environ['WORLD_SIZE']} processes")
    check_tag(args)
    if args.tag != "shared" and (Path(__file__).parent / "baselines" / f"{args.tag}.py").exists():
        raise UserError(f"--tag {args.tag}: out/<run>_{args.tag}/ belongs to the compared method: choose another")
    if args.dataset in CORPORA and re.fullmatch(r"[kl][\d.]+(_l[\d.]+)?", args.tag):  # a table's folder has no ratios
        raise UserError(f"--tag {args.tag}: out/<run>_{args.tag}/ belongs to runs with other ratios: choose another")


def main(args):
    check_flags(args)
    run, data, texts, labels, meta = open_run(args)
    wanted_classes(args, meta)  # refused now rather than after the features
    if args.num_classes == ("auto" if "own" in meta else "true"):
        args = replace(args, num_classes="")  # the default spelled out is the same run
    asked, (epochs, fewest) = args.epochs, wanted_epochs(args, len(labels["train"]))
    args = replace(args, epochs=epochs)
    base = Path(args.out_dir) / run
    out = base.with_name(f"{run}_{args.tag}") if args.tag else base
    pre = open_pretrained(base / "pretrain.pt", data)
    device = pick_device(args.device)
    config = settings(args, pick_dtype(args.dtype, device)) | {"dataset": meta["dataset"], "pretrain": pre["config"]}
    results = read_finished(out, config, args)
    if results:
        if first_process():  # a table may repeat other texts than before, which nobody trains anew for
            print_results(results | {"num_rows": meta.get("num_rows")}, out)
        return
    if first_process() and epochs > asked:
        print(f"{epochs} epochs instead of {asked}, so that these few rows make {fewest} batches (--min_steps)")
    on_all_processes(device, config, out, partial(train, args, texts, labels, meta, pre, config, data, base, out))


def train(args, texts, labels, meta, pre, config, data, base, out, rank, world, device):
    """From the features to results.json."""
    clock, seconds, code = [time.monotonic()], {"pretrain": pre["seconds"]}, commit()

    def lap(stage):
        if device.type == "cuda":
            torch.cuda.synchronize()  # or what is still to do there would count for the next stage
        clock.append(time.monotonic())
        seconds[stage] = seconds.get(stage, 0.0) + clock[-1] - clock[-2]

    label = {split: torch.from_numpy(labels[split]).to(device) for split in ("train", "dev")}
    encoder = Encoder(pre["config"]["encoder"], pre["config"]["max_length"], device, pick_dtype(args.dtype, device),
                      not args.no_cache, args.cache_gb, out, pre["config"]["trained_layers"])
    tokens = {split: encoder.tokenize(rows[rank::world]) for split, rows in texts.items()}
    hidden = {split: encoder.cache(ids, f"reading {split}" if rank == 0 else None) for split, ids in tokens.items()}

    def unit_features(*splits):
        """{split: (., H)}, unit length, all processes' rows."""
        return {s: gather_rows(normalize(encoder.all_features(hidden[s]), dim=1), len(texts[s])) for s in splits}

    z = {} if "own" in meta else {"raw": unit_features("train", "test")}
    load_trained_layers(encoder, pre)
    z["pretrained"] = unit_features("train", "dev", "test")  # dev for the number of classes
    found = find_checkpoint(out / "last.pt", config, args, rank, world, device)
    if rank == 0 and not found:
        clear_out(out)
    seconds |= found["seconds"] if found else {}  # what killed runs have spent
    K = len(found["head"]) if found else resolve_num_classes(args, z["pretrained"], label, meta, rank)
    lap("features")

    # The cluster head: K unit rows, known classes first. Process 0 seeds it, the others receive it.
    head = torch.zeros(K, encoder.hidden_size, device=device)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        head += found["head"].to(device) if found else seed_centres(
            z["pretrained"]["train"], label["train"], K, meta["num_known"], *seeding_settings(args, meta), args.seed)
    head = nn.Parameter(of_first(head))
    if rank > 0:
        z.clear()  # of all rows; only process 0 needs them again
    lap("seeding")

    epoch, assigned = run_epochs(args, encoder, head, tokens, hidden, label, out, config, found, seconds, rank, world)
    pseudo_label, confidence, beta = (x.cpu().numpy() for x in assigned)
    z["final"] = unit_features("train", "test")
    lap("train")
    if rank > 0:
        return
    arrays = {"pseudo_label": pseudo_label, "confidence": confidence, "beta": beta,
              "train_feature": z["final"]["train"].half().cpu().numpy()}
    if "own" in meta:  # nobody knows the truth
        scores = {"own": True, **{k: meta[k] for k in ("num_rows", "num_known", "num_labelled", "num_dev", "text_column")}}
    else:
        kmeans_file = base / f"kmeans_{K}_{config['dtype']}_{pre['config']['weights']}_{pre['config']['data'][:8]}.npy"
        scores, arrays["test_pred"] = evaluate(args, z, head.detach(), pseudo_label, data, labels, meta, kmeans_file)
        arrays["test_feature"] = z["final"]["test"].cpu().numpy()
    lap("evaluate")
    results = {"dataset": meta["dataset"], "gamma": meta.get("gamma"), "seed": args.seed, "method": "imbanid", "tag": args.tag,
               "encoder": pre["config"]["encoder"], "epochs": epoch, "kept": {"pretrain": pre["epoch"]}, **scores,
               "num_classes": K, "processes": world, "pretrain_processes": pre["processes"], "seconds": seconds,
               "commit": code, "config": config, "on_dev": bool(meta.get("on_dev"))}
    save_run(out, arrays, results)
    print_results(results, out)


def clear_out(out):
    """Remove what a finished run of other settings (--restart) left in out; an edited clusters.csv is copied aside first."""
    set_aside(out / "clusters.csv")
    for name in ("results.json", "clusters.csv", "train_row.npy", "report.html"):
        (out / name).unlink(missing_ok=True)


def run_epochs(args, encoder, head, tokens, hidden, label, out, config, found, seconds, rank, world):
    """The loop of the module docstring, from the checkpoint `found` on where there is one.

    tokens, hidden: {split: Packed}, this process's rows. label: {"train", "dev"}, all processes' rows. seconds: {stage: spent
    so far}, for the checkpoint. Returns the last epoch's number and the trained model's (label, confidence, beta), see assign.
    """
    N, K, labelled = len(label["train"]), len(head), label["train"] >= 0
    steps = math.ceil(N / args.batch_size)
    epochs = min(args.epochs, math.ceil(args.max_steps / steps))
    optimizer = torch.optim.AdamW([{"params": list(encoder.trained_layers.parameters()), "lr": args.lr},
                                   {"params": [head], "lr": args.head_lr}], weight_decay=0.01,
                                  fused=encoder.device.type == "cpu")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / max(1, steps * epochs)))
    start, epoch, log, view = time.monotonic(), 0, [], None
    done_before = so_far(found, encoder.device, rank)
    potential, marginal = None, torch.full((K,), 1 / K, dtype=torch.float64, device=encoder.device)
    if found:
        load_trained_layers(encoder, found)
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        epoch, log = found["epoch"], found["log"]
        potential, marginal = found["potential"].to(encoder.device), found["marginal"].to(encoder.device)
        assigned, solved = [x.to(encoder.device) for x in found["assigned"]], found["solved"]

    def assign():
        """Stage 2: (label (N,), confidence (N,), beta (K,)) of all rows, then the next potential and marginal, log entries."""
        z = normalize(encoder.all_features(hidden["train"]), dim=1)
        centre, own_label = normalize(head.detach(), dim=1), label["train"][rank::world]
        log_p = (z @ centre.T / args.temperature).log_softmax(1)
        if sum_over_ranks((~log_p.isfinite()).sum()[None]) > 0:
            raise UserError(f"log P is not finite before epoch {epoch + 1}: try a smaller --lr or --head_lr, a larger "
                            "--temperature or --dtype float32")
        result, following = ((kmeans_result(z, centre, N, rank), marginal) if args.pseudo_label == "kmeans" else
                             transport_plan(log_p, args, potential, marginal))
        pseudo_label = torch.where(own_label >= 0, own_label, result.plan.argmax(1))  # labelled rows keep their labels
        confidence = log_p.gather(1, pseudo_label[:, None])[:, 0].exp()
        confidence = torch.where(own_label >= 0, 1.0, confidence)
        return ((gather_rows(pseudo_label, N), gather_rows(confidence, N), result.beta), result.potential, following,
                {"rot_iterations": result.n_iter, "rot_residual": result.residual})

    def save(epoch, step, sums):
        rng = dropout_state(encoder.device) if step else None  # of all processes, so on each
        if rank == 0:
            write_atomic(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log))
            save_checkpoint(out / "last.pt", trained_layers=trained_state(encoder.trained_layers), trunk=encoder.fingerprint,
                            head=head.detach().cpu(), optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                            rng=rng, epoch=epoch, step=step, sums=sums.cpu(), log=log, assigned=[x.cpu() for x in assigned],
                            solved=solved, potential=potential.cpu(), marginal=marginal.cpu(), config=config,
                            seconds=seconds | {"train": seconds.get("train", 0.0) + time.monotonic() - start})

    with tqdm(total=steps * epochs, initial=steps * epoch + done_before.step, desc="training", unit="batch",
              disable=rank > 0 or not sys.stderr.isatty()) as bar:
        while epoch < epochs:
            if done_before.step == 0:  # a checkpoint from within an epoch has what the epoch began with
                assigned, potential, marginal, solved = assign()
            pseudo_label, confidence, beta = assigned
            clean = select_clean(*assigned, args.rho, args.tau_g, not args.no_dr, not args.no_qr, labelled)
            if view is None or epoch % args.view_epochs == 0:
                view = None  # frees the old view before the new one is made
                drawing = torch.Generator().manual_seed(7919 * (epoch // args.view_epochs + 1) + 104729 * args.seed + rank)
                view = encoder.replace_tokens(tokens["train"], args.replace_rate, drawing)
                view = encoder.cache(view, before=(tokens["train"], hidden["train"]))
            epoch += 1
            with signals_held() as came:  # until what was done is saved
                for step, sums in train_epoch(encoder, head, optimizer, schedule, hidden["train"], view, pseudo_label,
                                              confidence, clean, steps, args, epoch, came, done_before, rank, world):
                    bar.update(steps * (epoch - 1) + step - bar.n)
                    if step < steps:
                        save(epoch - 1, step, sums)
                contrastive, ce = (sums.sum(0) / steps).tolist()
                done_before = so_far(None, encoder.device, rank)
                predicted = (encoder.all_features(hidden["dev"]) @ normalize(head.detach(), dim=1).T).argmax(1)
                right = int(sum_over_ranks((predicted == label["dev"][rank::world]).sum()))
                log.append({"epoch": epoch, "contrastive": contrastive, "ce": ce, "clean": float(clean.float().mean()),
                            "confidence": float(confidence.mean()), **solved,
                            "beta_max": float(beta.max()), "beta_min": float(beta.min()),
                            "dev_accuracy": 100 * right / len(label["dev"]) if len(label["dev"]) else None})
                save(epoch, 0, done_before.sums)
            bar.set_postfix(epoch=epoch, dev=f"{right / max(1, len(label['dev'])):.1%}", clean=f"{log[-1]['clean']:.2f}")
    if epoch > 0 or not found:  # of --epochs 0 the checkpoint holds this already
        assigned, potential, marginal, solved = assign()
    if epoch == 0:  # --epochs 0: what the head was seeded with
        save(0, 0, done_before.sums)
    return epoch, assigned


if __name__ == "__main__":
    run_script(main, Args)

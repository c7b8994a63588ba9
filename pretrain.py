"""Stage 1 of ImbaNID: pre-train the encoder on the labelled rows and on all text (Sec. 3.3).

Reads   data/<run>/               (make_lt_data.py)
Writes  out/<run>/pretrain.pt     trained_layers, mlm_head, the known-class classifier, config, log
        out/<run>/pretrain_part.pt while it runs: a killed run goes on from there

    python pretrain.py --dataset clinc --gamma 10 --seed 0 --encoder minilm
    torchrun --nproc_per_node 4 pretrain.py --dataset clinc --gamma 10 --seed 0

L_p = cross-entropy on the labelled rows + masked language modelling on all rows (Eq. 2). Only the last transformer layer
(--trained_layers: more) and the heads train. The best epoch on dev, which holds known classes only, is kept.

What both stages share is here too: checkpoints, torchrun's processes and, as run_batches, an epoch.
"""
import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm

from encoder import Encoder, pick_dtype, weights_sha256
from make_lt_data import (
    NO_MEMORY,
    ThisProcessError,
    UserError,
    check_positive,
    first_process,
    open_run,
    quoted,
    run_script,
    write_atomic,
)
from seeding import class_means

LIMIT = datetime.timedelta(hours=2)  # how long processes wait for one another: process 0 may be seeding a large corpus
SAVE_STEPS = 50  # batches between two checkpoints within an epoch, since one over a large corpus takes long


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
    select: str = "loss"  # what is best on dev: loss (cross-entropy), or accuracy; the paper says neither, see README
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
    cache_gb: float = 8.0  # on a CPU, hidden states of more GB than this, per copy of the corpus, are mapped from out/<run>/
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 where the hardware multiplies it natively
    restart: bool = False  # replace an earlier run that had other settings


# ---- checkpoints, and what they were made with: for both stages ----

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
    except Exception as err:  # a damaged file comes as an error of many kinds, one of them the system's for a bad seek
        system = isinstance(err, OSError) and err.errno != errno.EINVAL
        if system or isinstance(err, MemoryError) or re.search(NO_MEMORY, str(err)):
            raise
        raise UserError(f"{path} is damaged ({quoted(err)}): delete it and run the same command again") from None


def commit():
    """The commit of this checkout, with + behind it when files differ; empty outside git.

    Ask for it when a run begins: by its end the checkout may have changed.
    """
    ask = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        said = subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return said.stdout.strip()


@contextmanager
def signals_held():
    """Hold Ctrl-C and SIGTERM back until the block is done. Yields the list of those that have come so far."""
    came = []
    before = {which: signal.signal(which, lambda number, _: came.append(number)) for which in (signal.SIGINT, signal.SIGTERM)
              if signal.getsignal(which) is not signal.SIG_IGN}  # as nohup and a script's & leave SIGINT
    try:
        yield came
    except RuntimeError:
        if signal.SIGINT not in came:
            raise  # else it only says that Ctrl-C has ended another process first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came[:1]:  # not reached after an error, which the user must see instead
        signal.raise_signal(number)


def save_checkpoint(path, **state):
    def write(file):
        try:
            torch.save(state, file)
        except RuntimeError as err:  # its zip writer hides a full disk behind one of its own
            raise err.__context__ if isinstance(err.__context__, OSError) else err from None

    with signals_held():  # torch's zip writer would make an error of its own of them
        write_atomic(path, write)


def open_pretrained(path, data):
    """The checkpoint that pretrain.py left at path, made from what the folder data holds now. Raises UserError."""
    pre = load_checkpoint(path)
    if pre is None:
        raise UserError(f"{path} is missing: run pretrain.py first, with the same --dataset, --gamma, --seed and ratios")
    if pre["config"]["data"] != data_fingerprint(data):
        raise UserError(f"{path} was trained on other data than {data} holds now: run pretrain.py --restart")
    return pre


def settings(args, dtype):
    """The flags by which a later call recognises a finished run, --dtype resolved, without those that say where it runs.

    --min_steps is left out too: the number of epochs that it led to is in --epochs (train_imbanid.wanted_epochs).
    """
    left_out = "data_dir", "out_dir", "cache_gb", "restart", "device", "tag", "min_steps"
    return {k: v for k, v in asdict(args).items() if k not in left_out} | {"dtype": str(dtype).split(".")[1]}


def same_config(found, config, path, args):
    """True if a checkpoint's config is the one asked for; with other settings, False on --restart and an error without.

    --dtype auto asks for no type: what was begun on a machine that has another one is the same run, and goes on in this one's.
    """
    different = [key for key in config if found.get(key) != config[key] and not (key == "dtype" and args.dtype == "auto")]
    if not different or args.restart:
        return not different
    key, of = different[0], ""
    if isinstance(found.get(key), dict) and isinstance(config[key], dict):  # the settings of the pre-training it starts from
        found, config, of = found[key], config[key], f"{key}'s "
        key = next(k for k in {**found, **config} if found.get(k) != config.get(k))
    other = "--tag" if hasattr(args, "tag") else "--out_dir (the scripts run one by one)"
    made = f"with other settings ({of}{key} {found.get(key)!r}, now {config.get(key)!r})"
    if key == "data":
        made, other = "from other data", f"{other}, or for a table another file name,"
    raise UserError(f"{path} was made {made}: pass --restart to replace it, or another {other} to keep both")


def open_checkpoint(path, config, args):
    """load_checkpoint of one made with this config, else None: there is none, or with --restart one of other settings."""
    found = load_checkpoint(path)
    return found if found and same_config(found["config"], config, path, args) else None


def in_other_type(found, config):
    """What a line on resuming a checkpoint adds where it was made in another type, see same_config."""
    before, now = found["config"].get("dtype"), config["dtype"]
    return f", so far in {before}, now in {now}, this machine's: --dtype {before} keeps it" * (before != now)


def seed_epoch(seed, epoch, rank=0, step=0):
    """Seed dropout for what follows step `step` of an epoch and return the generator of the epoch's batches.

    Thus a resumed run draws what an uninterrupted one on as many processes draws: from a checkpoint at a multiple of
    SAVE_STEPS by this, from one that a signal caused at another step by the generators that it holds (dropout_state).
    """
    torch.manual_seed(1_000_003 * (seed + 1) + 1009 * epoch + rank + 15_485_863 * step)
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + 1009 * epoch)


def dropout_state(device):
    """{kind of device: uint8 (P, bytes)}: what dropout's generator there stands at, on each of P processes."""
    module = torch.cuda if device.type == "cuda" else torch
    return {device.type: of_all(module.get_rng_state().to(device)).cpu()}


def set_dropout_state(device, rank, state):
    """Let dropout go on from `state`, dropout_state's of a checkpoint, if that is of such a device and as many processes."""
    found = (state or {}).get(device.type, ())
    if len(found) == world_size():
        module = torch.cuda if device.type == "cuda" else torch
        module.set_rng_state(found[rank].clone())  # torch ends with a segmentation fault on a view of a later row


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
    """UserError where the encoder of that name has other frozen weights now than a checkpoint was trained on, or another
    tokenizer.
    """
    if not encoder.fingerprint.startswith(state["trunk"]):  # older checkpoints know the weights alone
        raise UserError("the weights or the tokenizer of --encoder are not those that the checkpoint was trained with: put "
                        "them back, or remove the run's folders in out/, those with a tag too, and start anew")


def load_trained_layers(encoder, state):
    check_trunk(encoder, state)
    load_trained(encoder.trained_layers, state["trained_layers"])


# ---- torchrun: process `rank` of `world` holds rows rank::world, and process 0 does what is done once ----

def start_processes(device, config):
    """(rank, world size, this process's device) from torchrun's environment; one process without it.

    config: the settings, which all processes must have alike, else UserError.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, device
    if not os.environ.keys() >= {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        raise UserError(f"WORLD_SIZE is {world}, but nothing else says that torchrun started this: start it with torchrun, or "
                        "unset WORLD_SIZE")
    if device.type == "cuda":
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            raise UserError(f"{os.environ['LOCAL_WORLD_SIZE']} processes for {torch.cuda.device_count()} visible GPUs: start "
                            "one for each GPU, or pass --device cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        share, told = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]), torch.get_num_threads()
        torch.set_num_threads(max(1, share if told == 1 else min(share, told)))  # 1 is what torchrun sets on any machine
    store, rank, world = next(dist.rendezvous("env://", timeout=LIMIT))
    store = dist.PrefixStore(agreed_prefix(store, rank, world), store)
    on_gpu = device.type == "cuda"
    check_same_job(store, rank, world, config | {"device": device.type})
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world,
                            timeout=LIMIT, device_id=device if on_gpu else None)
    return rank, world, device


def agreed_prefix(store, rank, world):
    """A name that the processes of this start share with none before them: process 0 makes it and gives it to whoever asks.

    torchrun --max_restarts keeps its store, in which the new processes could read the addresses of the dead ones. Its count
    of restarts cannot be the name, since each node counts its own.
    """
    name, late = uuid.uuid4().hex, time.monotonic() + LIMIT.total_seconds()
    if rank > 0:
        store.set(f"asks {rank}", name)
        agreed = store.get(f"for {name}").decode()
        store.set(f"{rank} has {agreed}", "")
        return agreed
    for other in range(1, world):
        while not store.check([f"{other} has {name}"]):  # the one that asked may have been a dead one
            if store.check([f"asks {other}"]):
                store.set(f"for {store.get(f'asks {other}').decode()}", name)
            if time.monotonic() > late:
                raise RuntimeError(f"timed out: process {other} has not come")
            time.sleep(0.02)
    return name


def check_same_job(store, rank, world, config):
    """UserError on every process where one was started with another config than process 0: they would wait for each other."""
    store.set(f"job {rank}", json.dumps(config, sort_keys=True))
    jobs = [json.loads(store.get(f"job {other}")) for other in range(world)]
    for other, job in enumerate(jobs):
        if different := [key for key in {**jobs[0], **job} if jobs[0].get(key) != job.get(key)]:
            raise UserError(f"process {other} was started with another {different[0]} than process 0: every node needs the "
                            "same command, data/ and out/, and the same --device and --dtype where their machines differ")


def sum_over_ranks(x):
    """x summed over processes, in place; x as it is on one."""
    if dist.is_initialized() and x.numel():
        dist.all_reduce(x)
    return x


def of_first(x):
    """Process 0's x, in place on every process; what the others have in theirs is lost."""
    if dist.is_initialized() and x.numel():
        dist.broadcast(x, 0)
    return x


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_rows(x, N):
    """The (N, ...) tensor of all rows, on every process, of which this one holds rows rank::world as x."""
    if not dist.is_initialized():
        return x
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(N, *x.shape[1:], dtype=x.dtype, device=x.device)
    whole[rank::world] = x
    return sum_over_ranks(whole)


def of_all(x):
    """(P, ...): x of each of the P processes, on every process."""
    return gather_rows(x[None], world_size())


def find_checkpoint(path, config, args, rank, world, device):
    """open_checkpoint, and a line on resuming what it found. UserError where the processes did not all find the same."""
    found = open_checkpoint(path, config, args)
    epoch, step = (found["epoch"], found["step"]) if found else (0, 0)
    if sum_over_ranks(torch.tensor([epoch, step], device=device)).tolist() != [world * epoch, world * step]:
        raise UserError(f"the processes found different checkpoints: every node needs the same {path.parent}/ (a shared disk)")
    if rank == 0 and found:
        more = f" and {step} batches" * (step > 0)
        print(f"resuming {path} after epoch {epoch}{more}{in_other_type(found, config)}")
    return found


@contextmanager
def locked(folder):
    """Lock the folder of a run's files while the block runs. Yields whether no other process has it locked.

    Raises PermissionError where nothing can be written to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # said now, and not at the first checkpoint
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    place, free = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go when the process ends, however it ends
    except OSError as err:
        free = err.errno not in (errno.EAGAIN, errno.EACCES)  # other errors come from disks without locks
    try:
        yield free
    finally:
        if free:
            with suppress(OSError):
                folder.rmdir()  # if nothing was written
        os.close(place)


def on_all_processes(device, config, out, work):
    """work(rank, world, device) on each of torchrun's processes, which end here; on the only one without torchrun.

    The first process holds the folder out meanwhile. UserError on all where another run does: the two would mix their files.
    """
    try:
        rank, world, device = start_processes(device, config)
        with locked(out) if rank == 0 else nullcontext(True) as free:
            # On a GPU only where several ask: whether one can be used, move_to_gpu finds out, and says so.
            if sum_over_ranks(torch.tensor(int(not free), device=device if world > 1 else "cpu")):
                raise UserError(f"another run is writing to {out}/: wait until it has ended, or pass another --tag (to "
                                "pretrain.py another --out_dir)")
            work(rank, world, device)
        if world > 1:
            dist.barrier()  # process 0 is still writing: a process that left would look like a failure to torchrun
    except RuntimeError as err:
        words = "onnection", "NCCL", "peer", "imed out", "timeout"
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not any(word in str(err) for word in words):
            raise
        raise ThisProcessError(f"another process died or cannot be reached ({quoted(err, -1)}): the same command goes on from "
                               "what is saved") from None
    if world > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that tears itself down


def rates_and_advice(optimizer):
    """The learning rates in words, and what to try where they were too large. With one rate it is a compared method's."""
    rates = [f"{group['lr']:.1e}" for group in optimizer.param_groups]
    smaller = "--lr or --head_lr" if len(rates) > 1 else "learning rate"
    return f"at lr {' and '.join(rates)}: try a smaller {smaller}, or --dtype float32"


def joint_step(loss, optimizer, where, rows, came=()):
    """An optimizer step with the gradients of all processes' shares of the loss summed, and clipped to 1.0.

    where and rows, the training rows of the batch, are for the UserError of a loss or a gradient that is not finite. came:
    what signals_held yields. Returns whether a signal came to any process, so that all stop at one step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    if loss.requires_grad:  # a process may have no row in a batch
        loss.backward()
    beside = torch.stack([loss.detach().float(), torch.full_like(loss, bool(came), dtype=torch.float32)])
    flat = sum_over_ranks(torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters] + [beside]))
    norm = torch.linalg.vector_norm(flat[:-2])
    finite, stopped = torch.stack([(norm + flat[-2]).isfinite(), flat[-1] > 0]).tolist()  # at once: a GPU waits for this alone
    if not finite:
        raise UserError(f"the loss or a gradient is not finite in {where}, {rates_and_advice(optimizer)}; the last checkpoint "
                        f"is from before. Training rows of the batch: {sorted({*rows.tolist()})}")
    flat *= (1 / norm).clamp_max(1)
    for p, g in zip(parameters, flat[:-2].split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)
    optimizer.step()
    return stopped


def check_weights(optimizer, where):
    """UserError where training has diverged (a weight of 1e4 or more), so that no checkpoint is written from there."""
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"] if p.numel()]
    largest = float(torch.stack([p.abs().max() for p in parameters]).max())  # Python's own max may pass over a nan
    if not largest < 1e4:
        raise UserError(f"a weight of {largest:.0e} after {where}, {rates_and_advice(optimizer)}; the last checkpoint is from "
                        "before")


# ---- pre-training ----

def batch_loss(encoder, classifier, hidden, masked, target, label, rows, drawn, args, rank, world):
    """Eq. 2 on one batch: this process's share of the cross-entropy of the rows `drawn` and of the MLM loss of `rows`.

    rows, drawn: int64, training rows of all processes, the same on each. hidden, masked, target: this process's rows alone.
    label (N,): of all. The shares of all processes add up to the two means over the batch.
    """
    ce, mlm = torch.zeros(2, device=encoder.device)
    own = drawn[drawn % world == rank]
    if len(own):
        z = normalize(encoder.features(hidden, own // world), dim=1)
        ce = cross_entropy(z @ normalize(classifier, dim=1).T / args.temperature, label[own]) * (len(own) / len(drawn))
    if not args.no_mlm:
        mlm, tokens = encoder.mlm_loss(masked, rows[rows % world == rank] // world, target)
        if world > 1:
            mlm = mlm * (tokens / max(1, int(sum_over_ranks(torch.tensor(tokens, device=encoder.device)))))
    return ce, mlm


class SoFar(NamedTuple):
    """What is done of an epoch."""
    step: int  # batches
    sums: torch.Tensor  # (2,): of the two parts of their losses, this process's
    rng: dict | None  # dropout_state behind them, None before the first


def so_far(found, device, rank):
    """SoFar of the epoch in which the checkpoint `found` was written, None: of one that is to begin.

    Of a checkpoint of another number of processes the first one takes all sums.
    """
    if not found:
        return SoFar(0, torch.zeros(2, device=device), None)
    sums = found["sums"].view(-1, 2).to(device)
    return SoFar(found["step"], sums[rank] if len(sums) == world_size() else sums.sum(0) * (rank == 0), found.get("rng"))


def run_batches(batches, loss_of, optimizer, args, epoch, came, done, rank, schedule=None):
    """An optimizer step for each batch of an epoch that is not done yet; call seed_epoch before.

    loss_of(*batch): this process's share of the loss, two parts of it (2,), and training rows for joint_step's message.
    done: SoFar. schedule: stepped after the optimizer. Yields (step, those parts summed over the batches, (P, 2), a
    row for each process) for a checkpoint: after every SAVE_STEPS batches, after the last and, once a signal has come
    (joint_step), after that batch; then, but for the last, KeyboardInterrupt ends the run.
    """
    step, sums, rng = done
    set_dropout_state(sums.device, rank, rng)
    for batch in batches[step:]:
        step += 1
        loss, parts, rows = loss_of(*batch)
        where = f"epoch {epoch}, step {step} of {len(batches)}"
        stopped = joint_step(loss, optimizer, where, rows, came)
        due = stopped or step % SAVE_STEPS == 0 or step == len(batches)
        if due:
            check_weights(optimizer, where)
        if schedule:
            schedule.step()
        sums = sums + parts.detach()
        if step % SAVE_STEPS == 0:
            seed_epoch(args.seed, epoch, rank, step)
        if due:
            yield step, of_all(sums)
        if stopped and step < len(batches):
            raise KeyboardInterrupt


def train_epoch(encoder, classifier, optimizer, hidden, masked, target, label, args, epoch, came, done, rank, world):
    """One pass over all rows in random order, a labelled batch beside every batch, as run_batches has it; sums of CE and MLM.

    Every process draws the same batches, of which batch_loss takes its rows. Without a labelled row there is no
    cross-entropy.
    """
    generator = seed_epoch(args.seed, epoch, rank, done.step)
    encoder.train()
    labelled = torch.where(label >= 0)[0]
    batches = torch.randperm(len(label), generator=generator).to(encoder.device).split(args.batch_size)
    size = min(args.labeled_batch_size, len(labelled))
    beside = [labelled[torch.randint(max(1, len(labelled)), (size,), generator=generator)] for _ in batches]

    def loss_of(rows, drawn):
        ce, mlm = batch_loss(encoder, classifier, hidden, masked, target, label, rows, drawn, args, rank, world)
        return ce + mlm, torch.stack([ce, mlm]), torch.cat([rows, drawn])

    return run_batches(list(zip(batches, beside)), loss_of, optimizer, args, epoch, came, done, rank)


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
    path, part = out / "pretrain.pt", out / "pretrain_part.pt"
    found = open_checkpoint(path, config, args)
    if found:
        if first_process():
            # A kill after pretrain.pt was written leaves it behind; with other settings it is of a killed --restart.
            if open_checkpoint(part, config, replace(args, restart=True)):
                part.unlink(missing_ok=True)  # another node's first process may have been here
            kept = f" (dev accuracy {found['dev_accuracy']:.2f})" if len(labels["dev"]) else ""
            print(f"{path} is there already, made with the same settings{kept}: skipped")
        return
    on_all_processes(device, config, out, partial(train, args, texts, labels, meta, config, dtype, out))


def read_texts(args, texts, device, dtype, out, rank, world):
    """The encoder, and of this process's rows the token ids and the hidden states: {"train", "dev"} of Packed each."""
    torch.manual_seed(args.seed)  # minilm comes without a language-model head: it is drawn
    encoder = Encoder(args.encoder, args.max_length, device, dtype, not args.no_cache, args.cache_gb, out, args.trained_layers)
    tokens = {split: encoder.tokenize(texts[split]) for split in ("train", "dev")}
    long = tokens["train"].lengths >= encoder.max_length
    unknown = tokens["train"].values == encoder.tokenizer.unk_token_id
    unknown = unknown[unknown | ~encoder.special(tokens["train"])].float()  # the unknown token is one of the special ones
    if long.any() and rank == 0:
        print(f"{int(long.sum())} text(s) of {encoder.max_length} tokens or more: read up to there (--max_length)")
    if not unknown.mean() <= 0.95:  # or there is no token at all
        raise UserError(f"--encoder {args.encoder} knows hardly any of the words of these texts: it is for another language, "
                        "or its folder lacks the tokenizer's files")
    if unknown.mean() > 0.05 and rank == 0:
        print(f"{100 * float(unknown.mean()):.0f} % of the tokens are unknown to --encoder {args.encoder}: another one "
              "may suit these texts better")
    encoder.limit_vocabulary(tokens["train"])
    tokens = {split: ids.take(torch.arange(len(ids), device=device)[rank::world]) for split, ids in tokens.items()}
    hidden = {split: encoder.cache(ids, f"reading {split}" if rank == 0 else None) for split, ids in tokens.items()}
    return encoder, tokens, hidden


def train(args, texts, labels, meta, config, dtype, out, rank, world, device):
    """From the texts to pretrain.pt."""
    path, part = out / "pretrain.pt", out / "pretrain_part.pt"
    start, N, code = time.monotonic(), len(labels["train"]), commit()
    encoder, tokens, hidden = read_texts(args, texts, device, dtype, out, rank, world)
    label, dev_label = (torch.from_numpy(labels[split]).to(device) for split in ("train", "dev"))

    def unit_features(split):
        return gather_rows(normalize(encoder.all_features(hidden[split]), dim=1), len(labels[split]))

    classifier = nn.Parameter(of_first(class_means(unit_features("train"), label, meta["num_known"])))  # GPUs may round apart
    layers = list(encoder.trained_layers.parameters())
    heads = [classifier] + [p for p in encoder.mlm_head.parameters() if p.requires_grad and not args.no_mlm]
    optimizer = torch.optim.AdamW([{"params": layers, "lr": args.lr}, {"params": heads, "lr": args.head_lr}], weight_decay=0.01,
                                  fused=device.type == "cpu")

    def state():
        return {"trained_layers": trained_state(encoder.trained_layers), "mlm_head": trained_state(encoder.mlm_head),
                "classifier": classifier.detach().cpu().clone(), "trunk": encoder.fingerprint}

    steps = math.ceil(N / args.batch_size)
    epochs = min(args.epochs, math.ceil(args.max_steps / steps))
    dev_decides = len(dev_label) and meta["num_known"] > 1  # with one known class every dev loss is 0
    epoch, log, best = 0, [], {"epoch": 0}
    found = find_checkpoint(part, config, args, rank, world, device)
    done_before = so_far(found, device, rank)
    if found:
        load_trained_layers(encoder, found)
        load_trained(encoder.mlm_head, found["mlm_head"])
        classifier.data.copy_(found["classifier"])
        optimizer.load_state_dict(found["optimizer"])
        epoch, log, best = found["epoch"], found["log"], found["best"]
        start -= found["seconds"]

    def save(epoch, step, sums):
        rng = dropout_state(device) if step else None  # of all processes, so on each
        if rank == 0:
            save_checkpoint(part, **state(), optimizer=optimizer.state_dict(), epoch=epoch, step=step, sums=sums.cpu(), log=log,
                            rng=rng, best=best, config=config, seconds=time.monotonic() - start)

    out.mkdir(parents=True, exist_ok=True)
    masked = target = None
    with tqdm(total=steps * epochs, initial=steps * epoch + done_before.step, desc="pre-training", unit="batch",
              disable=rank > 0 or not sys.stderr.isatty()) as bar:
        while epoch < epochs and epoch - best["epoch"] < args.patience:
            if not args.no_mlm and (masked is None or epoch % args.mask_epochs == 0):
                drawing = torch.Generator().manual_seed(args.seed + 7919 * (epoch // args.mask_epochs + 1) + 104729 * rank)
                masked, target = encoder.mask_tokens(tokens["train"], drawing)
                masked = encoder.cache(masked, before=(tokens["train"], hidden["train"]))
            epoch += 1
            with signals_held() as came:  # until what was done is saved
                for step, sums in train_epoch(encoder, classifier, optimizer, hidden["train"], masked, target, label, args,
                                              epoch, came, done_before, rank, world):
                    bar.update(steps * (epoch - 1) + step - bar.n)
                    if step < steps:
                        save(epoch - 1, step, sums)
                ce, mlm = (sums.sum(0) / steps).tolist()
                done_before = so_far(None, device, rank)
                z = unit_features("dev")
                judged = torch.tensor(dev_result(z, classifier, dev_label, args.temperature), dtype=torch.float64)
                loss, accuracy = of_first(judged.to(device)).tolist()  # one best epoch for all
                log.append({"epoch": epoch, "ce": ce, "mlm": mlm, "dev_loss": loss, "dev_accuracy": accuracy})
                if best["epoch"] == 0 or not dev_decides or (
                        loss < best["dev_loss"] if args.select == "loss" else accuracy > best["dev_accuracy"]):
                    best = {**state(), **log[-1]}
                save(epoch, 0, done_before.sums)
            bar.set_postfix(epoch=epoch, dev=f"{accuracy:.2f}", best=f"{best['dev_accuracy']:.2f}")
    if rank > 0:
        return
    seconds = time.monotonic() - start
    # For what starts from it: on another machine the same settings give other weights.
    config["weights"] = weights_sha256(best["trained_layers"].values())[:12]
    # The number of processes is kept because each draws its own masks.
    save_checkpoint(path, **best, config=config, log=log, seconds=seconds, commit=code, processes=world)
    part.unlink(missing_ok=True)
    kept = (f"kept epoch {best['epoch']} with dev loss {best['dev_loss']:.4f} and accuracy {best['dev_accuracy']:.2f}"
            if dev_decides else "kept the last one: no dev rows of two classes to choose by")
    print(f"pre-training: {epoch} epochs in {seconds:.0f} s, {kept}; written to {path}")


if __name__ == "__main__":
    run_script(main, Args)

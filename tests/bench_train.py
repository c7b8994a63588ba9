"""Seconds, rows per second and memory of pretrain.py and train_imbanid.py, against the same code without its short cuts.

Reads   the raw corpora ($RAW_DIR or ../shared/raw)
Writes  the screen, and as its last line JSON; with --keep results/bench_train.json; its runs lie in a temporary folder

    python tests/bench_train.py                  clinc, gamma 10, minilm: about 15 minutes on 2 cores

"fast" is the default run, in full. "slow" is --no_cache --dtype float32. Its epochs all cost the same, so it is run for one
epoch and for two of each stage, and what all would take follows from the difference. The floor is what the last layer's
matrix products alone would take, forward and backward, at the rate that a 4096 x 384 x 1536 product reaches here.
"""
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import pretrain  # noqa: E402
from encoder import Encoder, pick_dtype  # noqa: E402
from make_lt_data import UserError, read_run, run_script, write_atomic  # noqa: E402


@dataclass
class Args:
    dataset: str = "clinc"  # a corpus in the raw folder
    gamma: float = 10.0  # of the split
    processes: str = "1,2"  # numbers of processes whose seconds an epoch are compared
    keep: bool = False  # write results/bench_train.json, of which README's table is: with the defaults alone


def memory_of(pid):
    """Peak resident MB of a process and of all it started: {pid: MB}."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                status = (folder / "status").read_text()
            except OSError:
                continue
            if int(folder.name) == pid or parent == pid:
                found[int(folder.name)] = int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0
    return found


def run(script, task, *flags, nproc=1):
    """Run a script; returns its wall seconds and the peak memory in MB of its largest process besides torchrun itself."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)] if nproc > 1 else []
    start, peak = time.perf_counter(), {}
    command = [sys.executable, *launch, str(REPO / script), *map(str, (*task, *flags))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch():
        while process.poll() is None:
            for pid, mb in memory_of(process.pid).items():
                peak[pid] = max(mb, peak.get(pid, 0))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{script} failed")
    if nproc > 1:
        peak.pop(process.pid)
    return {"seconds": time.perf_counter() - start, "peak_memory_mb": max(peak.values())}


def full_length(script, task, flags, epochs):
    """What `epochs` epochs would take, from a run of one and a run of two."""
    one, two = (run(script, task, "--epochs", n, *flags, "--restart") for n in (1, 2))
    epoch = two["seconds"] - one["seconds"]
    return {"seconds": one["seconds"] + (epochs - 1) * epoch, "seconds_an_epoch": epoch,
            "peak_memory_mb": max(one["peak_memory_mb"], two["peak_memory_mb"])}


def matrix_rate(dtype, n=4096, m=384, k=1536, device="cpu"):
    """Measured operations per second of an n x m x k product."""
    a, b = torch.randn(n, m, device=device).to(dtype), torch.randn(m, k, device=device).to(dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(30):
        wait()
        start = time.perf_counter()
        a @ b
        wait()
        times.append(time.perf_counter() - start)
    return 2 * n * m * k / float(np.median(times))


def operations(encoder, data):
    """Multiply-adds of the last layer's products in an epoch of either stage: 12 H^2 a token, thrice with the backward pass, of
    which 3 H^2 for the unmasked tokens of MLM, once without it for features."""
    texts, labels, _, _ = read_run(data)
    tokens, dev = (len(encoder.tokenize(texts[split]).values) for split in ("train", "dev"))
    H, pre = encoder.hidden_size, pretrain.Args()
    steps = -(-len(texts["train"]) // pre.batch_size)
    labelled = tokens / len(texts["train"]) * min(pre.labeled_batch_size, int((labels["train"] >= 0).sum())) * steps
    mlm = tokens * (3 + 9 * 0.15)
    return H * H * (3 * (12 * labelled + mlm) + 12 * dev), H * H * (3 * 12 * 2 * tokens + 12 * tokens + 12 * dev)


def floor(data, dtype, epochs):
    """Seconds of these products in the epochs (pre-training's, stage 3's) at the rate of matrix_rate."""
    work = operations(Encoder("minilm", 128, torch.device("cpu"), torch.float32), data)
    return 2 * sum(n * each for n, each in zip(epochs, work)) / matrix_rate(dtype)


def main(args):
    processes = args.processes.split(",") if args.processes else []
    if not all(P.isdecimal() and int(P) > 0 for P in processes):
        raise UserError(f"--processes {args.processes}: pass numbers of processes, such as 1,2")
    if args.keep and args != Args(keep=True):
        raise UserError("--keep is for the table of clinc at gamma 10: leave the other flags out")
    raw = Path(os.environ.get("RAW_DIR") or REPO.parent / "shared/raw").resolve()
    dtype = pick_dtype("auto", torch.device("cpu"))
    found = {"machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "dtype": str(dtype),
             "commit": pretrain.commit()}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        task = ("--dataset", args.dataset, "--gamma", args.gamma, "--data_dir", folder / "data")
        run("make_lt_data.py", task, "--raw_dir", raw)
        name = f"{args.dataset}_g{args.gamma:g}_s0"
        rows = len(np.load(folder / "data" / name / "train_label.npy"))
        fast, slow = (*task, "--out_dir", folder / "fast"), (*task, "--out_dir", folder / "slow")
        plain = ("--no_cache", "--dtype", "float32")
        found["fast"] = {"pretrain": run("pretrain.py", fast, "--encoder", "minilm"), "train": run("train_imbanid.py", fast)}
        results = json.loads((folder / "fast" / name / "results.json").read_text())
        found["stages"], pre, train = results["seconds"], pretrain.Args().epochs, results["epochs"]
        found["slow"] = {"pretrain": full_length("pretrain.py", slow, ("--encoder", "minilm", *plain), pre),
                         "train": full_length("train_imbanid.py", slow, (*plain, "--min_steps", 0), train)}
        for side in ("fast", "slow"):
            found[side]["total"] = sum(found[side][stage]["seconds"] for stage in ("pretrain", "train"))
            for stage, epochs in (("pretrain", pre), ("train", train)):
                found[side][stage]["rows_per_second"] = rows * epochs / found[side][stage]["seconds"]
        found["ratio"] = found["slow"]["total"] / found["fast"]["total"]
        found["floor_seconds"] = floor(folder / "data" / name, dtype, (pre, train))
        found["over_floor"] = found["fast"]["total"] / found["floor_seconds"]
        found["processes"] = {}
        for P in map(int, processes):
            one, three = (run("train_imbanid.py", fast, "--tag", f"P{P}_{n}", "--epochs", n, "--min_steps", 0,
                              nproc=P) for n in (1, 3))
            found["processes"][P] = {"seconds_an_epoch": (three["seconds"] - one["seconds"]) / 2,
                                     "peak_memory_mb": three["peak_memory_mb"]}
    for side in ("fast", "slow"):
        print(f"{side}: {found[side]['total']:.0f} s   " + "   ".join(
            f"{stage} {s['seconds']:.0f} s, {s['rows_per_second']:.0f} rows/s, {s['peak_memory_mb']:.0f} MB"
            for stage, s in found[side].items() if stage != "total"))
    print(f"ratio {found['ratio']:.1f}; floor {found['floor_seconds']:.0f} s, of which the fast run takes "
          f"{found['over_floor']:.1f} times as long")
    for P, s in found["processes"].items():
        print(f"{P} processes: {s['seconds_an_epoch']:.1f} s an epoch, {s['peak_memory_mb']:.0f} MB in the largest process")
    if args.keep:
        write_atomic(REPO / "results/bench_train.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    run_script(main, Args)

"""Training on a GPU, against the same code without its short cuts: seconds an epoch, rows per second, utilisation, memory.

Reads   the raw corpora ($RAW_DIR or ../shared/raw)
Writes  the screen, and as its last line JSON; with --keep results/bench_gpu_<encoder>.json; its runs lie in a temporary folder

    python tests/bench_gpu.py --encoder minilm
    python tests/bench_gpu.py --encoder base          BERT's base size with random weights: speed needs no trained ones

"fast" is the default run, "slow" --no_cache --dtype float32, both at batch 512. Time is taken from the start of the second
epoch on over whole rounds of --mask_epochs and --view_epochs, so that the trunk's passes, dev and checkpoints are in it and
starting up is not. Utilisation is nvidia-smi's, the share of time in which a kernel ran, and, of "fast", the share of the
rate that a large matrix product reaches here which the last layer's products make up.
"""
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bench_train import matrix_rate, operations
from transformers import BertConfig, BertForMaskedLM

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import make_lt_data  # noqa: E402
import pretrain  # noqa: E402
import train_imbanid  # noqa: E402
from encoder import Encoder, load_masked_lm  # noqa: E402
from make_lt_data import UserError, parse_args, run_script, write_atomic  # noqa: E402


@dataclass
class Args:
    encoder: str = "minilm"  # minilm, or base: random weights, in minilm's vocabulary
    dataset: str = "clinc"  # a corpus in the raw folder
    gamma: float = 10.0  # of the split
    keep: bool = False  # write results/bench_gpu_<encoder>.json; of clinc at gamma 10 alone


def measure(module, epochs, *words):
    """Run a stage of so many epochs in this process. Seconds an epoch, nvidia-smi's utilisation and peak memory in MB."""
    starts, seen, original = [], [], module.train_epoch

    def train_epoch(*args):
        torch.cuda.synchronize()
        starts.append(time.perf_counter())
        yield from original(*args)

    ask = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "50"]
    smi = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
    watcher = threading.Thread(target=lambda: seen.extend((time.perf_counter(), line.strip()) for line in smi.stdout))
    watcher.start()
    torch.cuda.reset_peak_memory_stats()
    module.train_epoch = train_epoch
    try:
        module.main(parse_args(module.Args, [*map(str, words), "--epochs", str(epochs), "--restart"]))
    finally:
        module.train_epoch = original
        smi.terminate()
        watcher.join()
    used = [float(share) for at, share in seen if share.isdecimal() and starts[1] + 1 <= at <= starts[-1]]  # of the last second
    return {"seconds_an_epoch": (starts[-1] - starts[1]) / (len(starts) - 2),
            "utilisation": float(np.mean(used)) if used else None,
            "peak_gpu_memory_mb": torch.cuda.max_memory_allocated() / 2**20}


def base_encoder(folder):
    """A BERT of base size with random weights and minilm's tokenizer."""
    tokenizer, _ = load_masked_lm("minilm")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer))).save_pretrained(folder)


def main(args):
    if not torch.cuda.is_available():
        raise UserError("no GPU is visible here: tests/bench_train.py measures on a CPU")
    if args.encoder not in ("minilm", "base"):
        raise UserError(f"--encoder {args.encoder} is unknown: choose minilm or base")
    if args.keep and (args.dataset, args.gamma) != ("clinc", 10):
        raise UserError("--keep is for the table of clinc at gamma 10: leave --dataset and --gamma out")
    raw = Path(os.environ.get("RAW_DIR") or REPO.parent / "shared/raw").resolve()
    found = {"machine": torch.cuda.get_device_name(), "cores": os.cpu_count(), "torch": torch.__version__,
             "commit": pretrain.commit(), "encoder": args.encoder, "dataset": args.dataset, "gamma": args.gamma}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        task = ("--dataset", args.dataset, "--gamma", args.gamma, "--data_dir", folder / "data")
        make_lt_data.main(parse_args(make_lt_data.Args, [*map(str, task), "--raw_dir", str(raw)]))
        name = f"{args.dataset}_g{args.gamma:g}_s0"
        rows, encoder = len(np.load(folder / "data" / name / "train_label.npy")), args.encoder
        if encoder == "base":
            encoder = folder / "base"
            base_encoder(encoder)
        for side, flags in (("fast", ()), ("slow", ("--no_cache", "--dtype", "float32"))):  # behind the first epoch 10 with 2
            words = (*task, "--out_dir", folder / side, *flags)  # maskings, 6 with 3 views
            found[side] = {"pretrain": measure(pretrain, 12, *words, "--encoder", encoder, "--patience", 100),
                           "train": measure(train_imbanid, 8, *words, "--min_steps", 0)}
        model = Encoder(str(encoder), 128, torch.device("cuda"), torch.bfloat16)
        works, rate = operations(model, folder / "data" / name), matrix_rate(torch.bfloat16, 8192, 8192, 8192, "cuda")
    found["matrix_rate"] = rate
    for stage, work in zip(("pretrain", "train"), works):
        for side in ("fast", "slow"):
            found[side][stage]["rows_per_second"] = rows / found[side][stage]["seconds_an_epoch"]
        fast = found["fast"][stage]
        fast["of_matrix_rate"] = 2 * work / fast["seconds_an_epoch"] / rate
        found[f"{stage}_ratio"] = found["slow"][stage]["seconds_an_epoch"] / fast["seconds_an_epoch"]
        for side in ("fast", "slow"):
            s = found[side][stage]
            print(f"{stage}, {side}: {s['seconds_an_epoch']:.3f} s an epoch, {s['rows_per_second']:.0f} rows/s, "
                  f"{s['peak_gpu_memory_mb']:.0f} MB, GPU busy {s['utilisation']} %")
        print(f"{stage}: {found[f'{stage}_ratio']:.1f} times as fast; the last layer's products take "
              f"{100 * fast['of_matrix_rate']:.2f} % of the rate of a large one")
    if args.keep:
        write_atomic(REPO / f"results/bench_gpu_{args.encoder}.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    run_script(main, Args)

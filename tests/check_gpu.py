"""What only a GPU can show, checked on a real one: both stages, the compared methods, predict.py, rot.py, nccl.

Reads   data/raw/demo
Writes  the screen, one line for each check; its runs lie in a temporary folder

    python tests/check_gpu.py                   two to four minutes; exit code 1 where a check fails
    python tests/check_gpu.py nccl attention    these checks alone

pytest hides all GPUs: it has to pass without one, and test_gpu.py pretends one. On two GPUs or more nccl runs across two of
them; on one, two processes share it, each told by NCCL_HOSTID that it is a machine of its own, and meet over the loopback.
"""
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tiny import make_encoder

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import train_imbanid  # noqa: E402
from encoder import Dropout, Encoder, attend, attend_at_once  # noqa: E402
from rot import relaxed_ot  # noqa: E402

RUN = "demo_g4_s0"
STARTED = []  # every process, so that none outlives this one
# A script that gets a SIGTERM before its nth step, wherever that is in an epoch: python -c STOP n SCRIPT FLAGS.
STOP = '''import os, runpy, signal, sys
sys.path.insert(0, ".")
at, sys.argv = int(sys.argv[1]), sys.argv[2:]
import pretrain
joint_step, steps = pretrain.joint_step, []
def counted(*given):
    steps.append(1)
    if len(steps) == at:
        os.kill(os.getpid(), signal.SIGTERM)
    return joint_step(*given)
pretrain.joint_step = counted
runpy.run_path(sys.argv[0], run_name="__main__")'''
PRETRAIN = ("--epochs", 2, "--batch_size", 64, "--max_length", 32)
TRAIN = ("--epochs", 3, "--min_steps", 0, "--batch_size", 64, "--swaps", 5, "--head_lr", 0.01, "--lr", 0.001)
FLOAT = ("--dtype", "float32")
BOTH = ("--epochs", 2, "--pretrain_epochs", 2)
METHODS = {"gcd": ("--epochs", 2), "deepaligned": ("--epochs", 2), "clnn": ("--epochs", 2), "dpn": BOTH,
           "latentem": ("--epochs", 2), "usnid": BOTH, "kmeans": ("--semi_supervised",)}


def start(*words, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "2",  # several run at once
           "PYTHONUNBUFFERED": "1", **{key: str(value) for key, value in env.items()}}  # what a killed one has said is read
    STARTED.append(subprocess.Popen([sys.executable, *map(str, words)], cwd=REPO, text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE, env=env))
    return STARTED[-1]


def finish(process, ok=True):
    """(exit code, stdout, stderr), once it has ended or after 150 s was killed; with ok an error unless the code is 0."""
    late = ""
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.kill()
        late, (out, err) = " after 150 s", process.communicate()
    code = process.returncode
    words = next(word for word in process.args if re.search(r"\.py$|^baselines", word)), *process.args[-2:]
    assert not ok or code == 0, f"{' ... '.join(words)} ended with {code}{late}\n{out[-500:]}{err[-1500:]}"
    return code, out, err


def finish_all(processes):
    """finish of each; where any failed, one error that names all that did."""
    failed = []
    for process in processes:
        try:
            finish(process)
        except AssertionError as err:
            failed.append(str(err))
    assert not failed, "\n".join(failed)


def run(*words, **env):
    return finish(start(*words, **env))


def check_same_bytes(one, other):
    differ = [name for name in ("test_pred", "pseudo_label", "confidence", "train_feature")
              if (one / f"{name}.npy").read_bytes() != (other / f"{name}.npy").read_bytes()]
    assert not differ, f"{' and '.join(differ)} differ"


class Check:
    """The folder of the runs, and the checks: each a method that says in a line what it has seen, or raises."""

    def __init__(self, folder):
        self.folder = folder
        for name, dropout in (("calm", 0.0), ("plain", 0.1)):
            make_encoder(folder / name, hidden_size=64, layers=3, heads=4, dropout=dropout)
        make_encoder(folder / "mpnet", hidden_size=64, layers=3, heads=4, dropout=0.0, mpnet=True)
        self.task = ("--dataset", "demo", "--gamma", 4, "--data_dir", folder / "data")
        run("make_lt_data.py", *self.task)

    def both(self, where, *flags, train=()):
        """Both stages into folder/where. Returns the folder of the run."""
        out = (*self.task, "--out_dir", self.folder / where, *flags)
        run("pretrain.py", *out, "--encoder", self.folder / "plain", *PRETRAIN)
        run("train_imbanid.py", *out, *TRAIN, *train)
        return self.folder / where / RUN

    def pretraining_as_on_the_cpu(self):
        """Without dropout, which each draws in its own way, and in float32."""
        logs = []
        for kind in ("cpu", "cuda"):
            words = (*self.task, "--out_dir", self.folder / kind, "--encoder", self.folder / "calm")
            run("pretrain.py", *words, *PRETRAIN, *FLOAT, "--device", kind)
            logs.append(torch.load(self.folder / kind / RUN / "pretrain.pt", weights_only=True)["log"])
        furthest = max(abs(one[key] - other[key]) / abs(one[key]) for one, other in zip(*logs, strict=True)
                       for key in ("ce", "mlm", "dev_loss"))
        assert furthest < 1e-2, logs
        return f"the losses of pre-training differ by {furthest:.1e} at most"

    def same_seed_same_bytes(self):
        with ThreadPoolExecutor() as pool:
            one, other = pool.map(self.both, ("first", "second"))
        check_same_bytes(one, other)
        config = json.loads((one / "results.json").read_text())["config"]
        return f"two runs with dropout in {config['dtype']} end in the same bytes"

    def killed_and_resumed(self):
        flags = ("--epochs", 12)
        whole = self.both("whole", train=flags)
        task = (*self.task, "--out_dir", self.folder / "broken")
        run("pretrain.py", *task, "--encoder", self.folder / "plain", *PRETRAIN)
        words, log = ("train_imbanid.py", *task, *TRAIN, *flags), self.folder / "broken" / RUN / "log.jsonl"
        steps = math.ceil(len(np.load(self.folder / "data" / RUN / "train_label.npy")) / 64)
        code, _, err = finish(start("-c", STOP, steps + steps // 2, *words), ok=False)
        assert code == 2, err
        process = start(*words)
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 6):
            time.sleep(0.005)
        process.kill()
        code, first, err = finish(process, ok=False)
        assert code == -signal.SIGKILL and f"after epoch 1 and {steps // 2} batches" in first, (code, first, err)
        said = run(*words)[1]
        assert "resuming" in said, said
        check_same_bytes(whole, self.folder / "broken" / RUN)
        return (f"after SIGTERM and a kill -9, '{first.splitlines()[0].split('/')[-1]}' and "
                f"'{said.splitlines()[0].split('/')[-1]}', the same bytes as unbroken")

    def all_flags(self):
        """The pseudo-labels of Table 3 and the number of classes, each whole on the GPU."""
        task = (*self.task, "--out_dir", self.folder / "flags")
        run("pretrain.py", *task, "--encoder", self.folder / "plain", *PRETRAIN, "--trained_layers", 2)
        kinds = {"kmeans": ("--num_classes", "auto"), "mot": (), "eot": ("--num_classes", "appendix_e"), "cot": ("--no_cache",)}
        started = [start("train_imbanid.py", *task, *TRAIN, "--pseudo_label", kind, *flags, "--tag", f"by_{kind}")
                   for kind, flags in kinds.items()]
        finish_all(started)
        return f"--pseudo_label {', '.join(kinds)}, --num_classes auto and appendix_e, --no_cache, --trained_layers 2 end"

    def compared_methods(self):
        task = (*self.task, "--encoder", self.folder / "plain", "--max_length", 32)
        started = [start("-m", f"baselines.{name}", *task, "--out_dir", self.folder / f"of_{name}", *flags)
                   for name, flags in METHODS.items()]
        finish_all(started)
        return f"{', '.join(METHODS)} end"

    def new_texts(self):
        out = self.both("labelled", *FLOAT)
        texts = self.folder / "new.txt"
        texts.write_text("my card was declined\nbalance\nno signal\n")
        run("predict.py", out, "--data_dir", self.folder / "data")
        for device in ("cpu", "cuda"):
            run("predict.py", out, texts, "--data_dir", self.folder / "data", "--device", device, *FLOAT, "-o",
                self.folder / f"{device}.csv")
        one, other = ((self.folder / f"{device}.csv").read_text() for device in ("cpu", "cuda"))
        assert one == other, (one, other)
        return "predict.py writes the same table on both"

    def nccl(self):
        """Two processes. Without MLM, whose masks each draws for its rows, pre-training has the losses of one process."""
        run("pretrain.py", *self.task, "--out_dir", self.folder / "one", "--encoder", self.folder / "calm", *PRETRAIN, *FLOAT,
            "--no_mlm")
        several = torch.cuda.device_count() > 1

        def two(*words, first=(), ok=True):
            """finish of both; the first is started with the words `first` in front."""
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": 2 if several else 1}
            if not several:
                env |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1, "NCCL_IB_DISABLE": 1}
            own = [{"LOCAL_RANK": rank} if several else {"LOCAL_RANK": 0, "NCCL_HOSTID": f"host{rank}"} for rank in range(2)]
            started = [start(*(() if rank else first), *words, **env, RANK=rank, **own[rank]) for rank in range(2)]
            with ThreadPoolExecutor() as pool:  # with both read at once none waits for a full pipe
                return [*pool.map(partial(finish, ok=ok), started)]

        task = (*self.task, "--out_dir", self.folder / "two", *FLOAT)
        two("pretrain.py", *task, "--encoder", self.folder / "calm", *PRETRAIN, "--no_mlm")
        logs = [torch.load(self.folder / where / RUN / "pretrain.pt", weights_only=True)["log"] for where in ("one", "two")]
        furthest = max(abs(one["ce"] - other["ce"]) / one["ce"] for one, other in zip(*logs, strict=True))
        assert furthest < 1e-5, logs
        two("train_imbanid.py", *task, *TRAIN)
        results = json.loads((self.folder / "two" / RUN / "results.json").read_text())
        assert results["processes"] == 2 and abs(np.load(self.folder / "two" / RUN / "beta.npy").sum() - 1) < 1e-6
        run("pretrain.py", *self.task, "--out_dir", self.folder / "pair", "--encoder", self.folder / "plain", *PRETRAIN)
        words = ("train_imbanid.py", *self.task, "--out_dir", self.folder / "pair", *TRAIN, "--tag")  # with dropout
        two(*words, "whole")
        codes = [code for code, *_ in two(*words, "broken", first=("-c", STOP, 7), ok=False)]
        said = two(*words, "broken")[0][1]
        assert codes == [2, 2] and "after epoch 0 and 7 batches" in said, (codes, said)
        check_same_bytes(*(self.folder / "pair" / f"{RUN}_{tag}" for tag in ("whole", "broken")))
        return (f"two processes on {'two GPUs' if several else 'one GPU'}: the losses of pre-training differ from those of "
                f"one by {furthest:.1e}; stage 3 ends, and in the same bytes if it is stopped within an epoch")

    def refusals(self):
        """Exit code 2 and one line, where more processes than GPUs are started, and where the GPU has memory for nothing, for
        the model alone, and for that and its products.
        """
        count = torch.cuda.device_count() + 1
        words = (*self.task, "--encoder", self.folder / "plain", *PRETRAIN, "--out_dir")
        env = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": 29999}
        limited = ("import runpy, sys, torch; torch.cuda.set_per_process_memory_fraction({} / torch.cuda.mem_get_info()[1]); "
                   "sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')")
        said, started = [], [start("pretrain.py", *words, self.folder / "refused", **env)]
        started += [start("-c", limited.format(mb * 2**20), "pretrain.py", *words, self.folder / f"refused{mb}")
                    for mb in (1, 3, 45)]
        for process, reason in zip(started, ("visible GPUs", "cannot be used", "cannot be used", "out of memory"), strict=True):
            code, _, err = finish(process, ok=False)
            lines = [line for line in err.splitlines() if line.strip()]
            assert code == 2 and len(lines) == 1 and reason in lines[0], (code, reason, err[-1000:])
            said += lines
        return "refused: " + " | ".join(said)

    def attention(self):
        """attend_at_once in bfloat16 against attend in float32 on the CPU, a text at a time, and its gradient."""
        lengths, dropout = torch.tensor([3, 3, 5, 8, 8, 13, 40, 128]), Dropout(0.1).eval()
        qkv, weight = (torch.randn(208, n, 4, 32, generator=torch.Generator().manual_seed(n)) for n in (3, 1))
        here, there = qkv.clone().requires_grad_(), qkv.bfloat16().cuda().requires_grad_()
        texts = [attend(text[None, :, 0], text[None, :, 1:], dropout)[0] for text in here.split(lengths.tolist())]
        found = []
        for given, mixed in ((here, torch.cat(texts)),
                             (there, attend_at_once(there[:, 0], there[:, 1:], lengths.cuda(), dropout))):
            (mixed.float().cpu() * weight[:, 0]).sum().backward()
            found.append((mixed.detach().float().cpu(), given.grad.float().cpu()))
        off = [float((other - one).norm() / one.norm()) for one, other in zip(*found, strict=True)]
        assert max(off) < 2e-2, off
        return f"attention of texts of 3 to 128 tokens at once differs by {off[0]:.0e}, its gradient by {off[1]:.0e}"

    def transport(self):
        """rot.py on 100,000 rows and 150 columns, in float32: the same plan, and how many times as fast."""
        log_p = (20 * torch.randn(100_000, 150, generator=torch.Generator().manual_seed(0)) ** 3 / 10).log_softmax(1)
        found, seconds = [], []
        for device in ("cpu", "cuda"):
            scores = log_p.to(device)
            relaxed_ot(scores)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            found.append(relaxed_ot(scores))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        furthest = float((found[0].plan - found[1].plan.cpu()).abs().max()) * len(log_p)
        assert all(one.converged for one in found) and furthest < 1e-3, furthest
        return (f"N Q of 100,000 x 150 differs by {furthest:.1e}; {seconds[1]:.3f} s on the GPU, {seconds[0]:.2f} s on "
                f"{torch.get_num_threads()} threads, {found[1].n_iter} steps")

    def batch(self):
        """Trunk, features, loss and gradients of stage 3 in one batch of texts of all lengths, in both types, of two models."""
        texts = ["pay " + "my bill " * (i % 14) + str(i) for i in range(200)]
        found = {}
        for name, device, dtype in itertools.product(("calm", "mpnet"), ("cpu", "cuda"), ("float32", "bfloat16")):
            encoder = Encoder(str(self.folder / name), 32, torch.device(device), getattr(torch, dtype)).train()
            tokens, args = encoder.tokenize(texts), train_imbanid.Args()
            view = encoder.trunk(encoder.replace_tokens(tokens, 0.5, torch.Generator().manual_seed(0)))
            head = torch.nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(device))
            rows = torch.randperm(200, generator=torch.Generator().manual_seed(2)).to(device)
            label, confidence, clean = rows % 4, rows / 200, rows % 3 > 0
            given = encoder, head, encoder.trunk(tokens), view, rows, label, confidence, clean, args
            loss, *_ = train_imbanid.batch_loss(*given)
            loss.backward()
            grads = [p.grad.flatten() for p in (head, *encoder.trained_layers.parameters()) if p.grad is not None]
            found[name, device, dtype] = [x.detach().float().cpu()
                                          for x in (encoder.all_features(view), loss, torch.cat(grads))]
        off = {key: [float((x - y).norm() / y.norm()) for x, y in zip(value, found[key[0], "cpu", "float32"])]
               for key, value in found.items() if key[1] == "cuda"}
        assert all(max(value) < (1e-3 if key[2] == "float32" else 2e-2) for key, value in off.items()), off
        return "features, loss, gradients differ from the CPU's float32 by " + " and by ".join(
            ", ".join(f"{x:.0e}" for x in value) + f" in {dtype} ({name})" for (name, _, dtype), value in off.items())


def main():
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is visible here: pytest checks what can be checked without one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    names = [name for name in vars(Check) if not re.fullmatch("__.*|both", name)]
    wanted = sys.argv[1:] or names
    if not set(wanted) <= set(names):
        raise SystemExit(f"choose among {' '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder))

        def attempt(name):
            begun = time.perf_counter()
            try:
                said, well = getattr(check, name)(), True
            except Exception:
                said, well = traceback.format_exc()[-2500:], False
            print(f"{'ok' if well else 'FAILED'}: {name}, {time.perf_counter() - begun:.0f} s: {said}", flush=True)
            return well

        here = [name for name in wanted if name in ("transport", "batch", "attention")]  # before others share the GPU
        others = [name for name in wanted if name not in here]
        try:
            passed = {name: attempt(name) for name in here}
            with ThreadPoolExecutor() as pool:
                passed |= zip(others, pool.map(attempt, others))
        finally:
            for process in STARTED:
                process.kill()
                process.wait()
    failed = [name for name, well in passed.items() if not well]
    print(f"{len(passed) - len(failed)} of {len(passed)} checks passed" + f"; FAILED: {', '.join(failed)}" * bool(failed))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

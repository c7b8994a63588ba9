"""A tiny corpus and a tiny encoder, so that the real scripts run whole in seconds."""
import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from forked import REPO, run_forked
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(REPO))
for name in ("SEED", "SEEDS", "NPROC", "KNOWN_RATIO", "ENCODER"):  # of run_all.sh, as somebody's shell may have them
    os.environ.pop(name, None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several processes on one GPU are refused; what a GPU asks of the code is pretended
os.environ["OMP_NUM_THREADS"] = "1"  # two tests run side by side, and one that is slowed down then waits for no other thread
PATIENCE = 1500  # seconds until what does not end is killed; a machine that others use too can be ten times as slow as itself
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["predict", "figures", "train_imbanid", "transformers.models.bert.modeling_bert", "metrics",
                              "sklearn.cluster", "sklearn.feature_extraction.text"])
RAW = Path(os.environ.get("RAW_DIR") or REPO.parent / "shared" / "raw")


def read_tsv(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.reader(f, delimiter="\t"))


def write_tsv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f, delimiter="\t", lineterminator="\n").writerows(rows)


class Started:
    """A script that runs in a fork of a Python that has imported what the scripts import and done nothing else.

    What the tests need of subprocess.Popen. words: as a command line has them behind `python`. first: called in the fork
    before the script.
    """

    def __init__(self, words, cwd=REPO, env=None, first=None):
        self.args, self.folder = [*map(str, words)], tempfile.TemporaryDirectory()
        self.said = [Path(self.folder.name) / stream for stream in ("stdout", "stderr")]
        self.process = FORKS.Process(target=run_forked, args=(*self.said, cwd, self.args, env or {}, first), daemon=True)
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def send_signal(self, which):
        if self.poll() is None:
            os.kill(self.process.pid, which)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def finish(self, timeout=PATIENCE):
        """subprocess.CompletedProcess, once it has ended or, if it does not in time, was killed (exit code -9)."""
        self.process.join(timeout)
        self.kill()
        self.process.join()
        done = subprocess.CompletedProcess(self.args, self.poll(), *(
            path.read_text(encoding="utf-8") if path.exists() else "" for path in self.said))
        self.folder.cleanup()
        return done


def start_ranks(words, nproc):
    """[Started]: the script on nproc processes, with torchrun's environment; starting torchrun itself is slow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [Started(words, env={key: str(value) for key, value in {**both, "RANK": rank, "LOCAL_RANK": rank}.items()})
            for rank in range(nproc)]


def ranks(words, nproc):
    """The finished script of start_ranks, its processes' exit codes and words as those of one."""
    started = start_ranks(words, nproc)
    late = time.time() + PATIENCE
    while any(one.poll() is None for one in started) and all(not one.poll() for one in started) and time.time() < late:
        time.sleep(0.01)
    if any(one.poll() for one in started):  # torchrun ends the others then; these may have something to say before
        late = time.time() + 3
        while any(one.poll() is None for one in started) and time.time() < late:
            time.sleep(0.01)
        for one in started:
            one.send_signal(signal.SIGTERM)
    done = [one.finish(60) for one in started]
    return subprocess.CompletedProcess(words, max(abs(one.returncode) for one in done),
                                       "".join(one.stdout for one in done), "".join(one.stderr for one in done))


def script(name, *flags, ok=True, nproc=None, env=None, first=None, cwd=REPO):
    """Run a script as a user does, in a fork, with an environment of its own in a new Python. Returns the finished process.

    With ok, it must have exited with 0. nproc: on as many processes, see ranks. first: see Started.
    """
    assert (nproc is not None) + (env is not None) + (first is not None) <= 1
    words = [name if name == "-m" else str(REPO / name), *map(str, flags)]
    if env:
        done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE,
                              env={**os.environ, **env})
    else:
        done = ranks(words, nproc) if nproc else Started(words, cwd, first=first).finish()
    if ok:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def one_line_error(done, *words):
    """The script ended with exit code 2 and one clear line on stderr that holds all the words."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture(scope="session", autouse=True)
def _forkserver():
    """What Started forks from; not started by the process that only hands out the tests to others."""
    with contextlib.chdir(REPO):  # where it looks for the modules
        forkserver.ensure_running()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of the files whose tests share what takes long to make, each runs in one process, which makes it once.

    xdist 3.8's own groups do nothing under pytest 9.2, which keeps a test's name where they do not write it.
    """
    class BySharedFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return file if file.endswith(("test_baselines.py", "test_own.py", "test_pipeline.py")) else nodeid
    return BySharedFixtures(config, log)


@pytest.fixture(scope="session")
def real_raw():
    if not all((RAW / corpus / "train.tsv").exists() for corpus in ("clinc", "banking", "stackoverflow")):
        pytest.skip(f"the raw corpora are not all in {RAW}: set RAW_DIR to their folder")
    return RAW


@pytest.fixture(scope="session")
def tiny_raw(tmp_path_factory):
    """raw_dir with eight intents of the demo corpus, 40 training rows each."""
    folder = tmp_path_factory.mktemp("raw")
    names = sorted({row[1] for row in read_tsv(REPO / "data/raw/demo/train.tsv")[1:]})[:8]
    for split, most in (("train", 40), ("dev", 10), ("test", 10)):
        rows = read_tsv(REPO / f"data/raw/demo/{split}.tsv")
        kept = [row for name in names for row in [r for r in rows[1:] if r[1] == name][:most]]
        write_tsv(folder / "demo" / f"{split}.tsv", [rows[0], *kept])
    return folder


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """A two-layer BERT with random weights and a word vocabulary, as a local model folder."""
    from tiny import make_encoder
    folder = tmp_path_factory.mktemp("encoder")
    make_encoder(folder)
    return folder


@pytest.fixture(scope="session")
def calm_encoder(tmp_path_factory, tiny_encoder):
    """tiny_encoder without dropout, of which each process and each device draws its own."""
    folder = shutil.copytree(tiny_encoder, tmp_path_factory.mktemp("calm") / "encoder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    return folder


KEPT = {}


@contextlib.contextmanager
def kept_passes():
    """Let Encoder.trunk read texts as they are once, whoever asks: no method changes what lies below the trained layer."""
    from encoder import Encoder, Packed
    trunk = Encoder.trunk

    def once(self, tokens, desc=None, before=None):
        if desc is None:  # a drawing, of which each is new
            return trunk(self, tokens, desc, before)
        key = self.fingerprint, self.dtype, *(x.numpy().tobytes() for x in (tokens.values, tokens.offsets))
        if key not in KEPT:
            KEPT[key] = trunk(self, tokens)
        return Packed(KEPT[key].values.clone(), tokens.offsets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "trunk", once)
        yield


def pretrained_demo(folder, seed, epochs):
    """Flags of the bundled corpus, with data/ made and pre-trained with the real encoder."""
    import pretrain
    task = {"dataset": "demo", "gamma": 10.0, "seed": seed, "data_dir": str(folder / "data")}
    script("make_lt_data.py", *(word for key, value in task.items() for word in (f"--{key}", value)))
    task["out_dir"] = str(folder / "out")
    with kept_passes():
        pretrain.main(pretrain.Args(**task, encoder="minilm", epochs=epochs))
    return task


@pytest.fixture
def short_ends(monkeypatch):
    """Compared methods whose two other ends, as seeded and with the labels held, search less: most of a tiny run's time."""
    from baselines import shared
    seed, held = shared.seed_centres, shared.semi_supervised_kmeans
    monkeypatch.setattr(shared, "seed_centres", lambda *given: seed(*given[:6], 5, *given[7:]))
    monkeypatch.setattr(shared, "semi_supervised_kmeans", lambda *given: held(*given[:5], 3, True))


TINY_PRETRAIN = ("--epochs", 2, "--batch_size", 64, "--max_length", 32, "--dtype", "float32")
TINY_TRAIN = ("--epochs", 2, "--min_steps", 0, "--batch_size", 64, "--swaps", 5, "--dtype", "float32", "--head_lr", 0.01,
              "--lr", 0.001)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_raw, tiny_encoder):
    """(task flags, folder) with data/ made and out/.../pretrain.pt trained once for the session."""
    folder = tmp_path_factory.mktemp("run")
    task = ("--dataset", "demo", "--gamma", 4, "--seed", 0, "--data_dir", folder / "data")
    script("make_lt_data.py", *task, "--raw_dir", tiny_raw)
    script("pretrain.py", *task, "--out_dir", folder / "out", "--encoder", tiny_encoder, *TINY_PRETRAIN)
    return (*task, "--out_dir", folder / "out"), folder

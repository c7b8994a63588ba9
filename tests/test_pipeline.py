"""run_all.sh as a user calls it, README against the files, and the style check."""
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import PATIENCE, REPO, kept_passes, one_line_error, pretrained_demo, script

import pretrain
import train_imbanid
from figures import TABLES


def run_all(*words, cwd=REPO, **env):
    return subprocess.run(["bash", "run_all.sh", *words], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, env={
        **os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", **env})


def test_usage_and_bad_input(tmp_path):
    for words in ((), ("demo",), ("demo", "--omega", "1")):
        done = run_all(*words)
        assert done.returncode == 2 and "usage" in done.stderr and "Traceback" not in done.stderr
    done = run_all("--help")
    assert done.returncode == 0 and "--method METHOD" in done.stdout and "NPROC" in done.stdout and not done.stderr
    done = run_all("demo", "10", "--seed", "3")
    assert done.returncode == 2 and "SEED" in done.stderr
    for words in (("demo", "10", "--encoder", "minilm"), ("demo", "10", "--method", "gcd", "--encoder=minilm")):
        one_line_error(run_all(*words), "ENCODER=NAME")
    one_line_error(run_all("no_such.csv", "--tag", "k40"), "no_such.csv")  # a table's runs may have a tag of this form
    done = run_all("demo", "10", "--method", "word2vec")
    assert done.returncode == 2 and "usnid" in done.stderr and "shared" not in done.stderr
    done = run_all("demo", "10", "--omga", "0.3")  # before anything is trained
    assert done.returncode == 2 and "train_imbanid.py: unrecognized arguments: --omga" in done.stderr and not done.stdout
    done = run_all("demo", "10", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: train_imbanid.py") and not done.stderr  # and that was all
    assert "--omega" in done.stdout
    done = run_all("demo", "10", "--num_classes", "many")
    assert done.returncode == 2 and "--num_classes many" in done.stderr and not done.stdout
    for path in [*REPO.glob("*.py"), REPO / "run_all.sh"]:  # elsewhere, since data are made before this can be known
        shutil.copy(path, tmp_path)
    shutil.copytree(REPO / "data/raw/demo", tmp_path / "data/raw/demo")
    done = run_all("demo", "7", "--num_classes", "5000", SEED="7", cwd=tmp_path)
    assert done.returncode == 2 and "--num_classes 5000" in done.stderr and not (tmp_path / "out").exists()
    assert (tmp_path / "data/demo_g7_s7/meta.json").exists()
    done = run_all("demo", "10", "--method", "clnn", "--omega", "0.3")
    assert done.returncode == 2 and done.stderr.startswith("clnn.py: unrecognized arguments: --omega")
    for processes in ("abc", "0", "1.5"):
        done = run_all("demo", "10", NPROC=processes)
        assert done.returncode == 2 and f"NPROC={processes}" in done.stderr
    for seeds in (" ", "0 x", "0,1", "1 0 1", "0 00", "07 1 7"):
        one_line_error(run_all("demo", "10", SEEDS=seeds), "SEEDS", "each once")
    done = run_all("atis", "10")
    assert done.returncode == 2 and "atis" in done.stderr and "Traceback" not in done.stderr


def test_flags_reach_the_stages_they_are_for(tmp_path):
    """With a python that only says what it was called with, and another folder than the repository's to be called from."""
    (tmp_path / "python").write_text("#!/bin/sh\n[ \"$1\" = -c ] && echo run || echo \"$@\"\n")
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho $OMP_NUM_THREADS \"$@\"\n")
    for name in ("python", "torchrun"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "model").mkdir()

    def said(*words, encoder="model", task=("demo", "10"), **more):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ENCODER": encoder, "RAW_DIR": "", **more}
        done = subprocess.run(["bash", REPO / "run_all.sh", *task, *words], cwd=tmp_path, env=env, text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    make, pre, train, mean = said("--device", "cpu", "--restart", "--omega=0.3", "--tag", "x")
    assert "--device" not in make and pre.endswith(f"--encoder {tmp_path}/model --device cpu --restart")
    assert train.endswith("--device cpu --restart --omega=0.3 --tag x") and mean == "figures.py mean out/run_x"
    assert said("--tag", "")[-1] == said("--tag=")[-1] == "figures.py mean out/run"
    for task, name in ((("demo", "10"), "minilm"), (("a.csv",), "minilm"), (("clinc", "3"), "bert-base-uncased")):
        assert said(encoder="", task=task)[1].endswith(f"--encoder {name}")
    *stages, _ = said(KNOWN_RATIO="0.5", RAW_DIR="corpora")
    assert len(stages) == 3 and all(" --known_ratio 0.5 " in f"{line} " for line in stages)
    assert stages[0].endswith(f"--raw_dir {tmp_path}/corpora")
    alone = {f.name for f in fields(pretrain.Args)} - {f.name for f in fields(train_imbanid.Args)} - {"encoder"}
    for flag in alone:
        words = [f"--{flag}"] if flag == "no_mlm" else [f"--{flag}", "7"]
        for given in (words, ["=".join(words)]):
            _, pre, train, _ = said(*given)
            assert pre.endswith(" ".join(["model", *given])) and flag not in train
    assert said("--method", "clnn", "--max_length", "7")[1].endswith("--max_length 7")
    for flag in ("text_column", "label_column", "dev_ratio"):
        for given in ([f"--{flag}", "a b"], [f"--{flag}=a b"]):
            make, *others = said(*given, task=("a.csv",))
            assert make.endswith(" ".join(given)) and len(others) == 4 and flag not in "".join(others)
    for given in (["--cache_gb", "4"], ["--cache_gb=4"]):
        make, *both = said(*given)[:3]
        assert "cache" not in make and all(line.endswith(" ".join(given)) for line in both)
    for name in ("a.tsv", "a.jsonl", "a.json", "A.CSV"):
        make, *_, predict, figures = said("--tag=x", task=(name,))
        assert f"--dataset {tmp_path}/{name}" in make and [predict, figures] == ["predict.py out/run_x", "figures.py out/run_x"]
    assert said("--tag=x", SEED="3")[-1] == "figures.py mean out/run_x"
    *stages, mean = said(SEEDS="0 1", SEED="3")  # of the two SEEDS counts
    assert mean == "figures.py mean out/run out/run" and len(stages) == 6
    assert all(f"--seed {n // 3} " in line for n, line in enumerate(stages))
    own = tmp_path / "own"
    for seed in (0, 1):
        (own / f"out/run{seed}").mkdir(parents=True)
    shutil.copy(REPO / "run_all.sh", own)
    (own / "python").write_text("#!/bin/sh\n[ \"$1\" = -c ] && echo run$5 || echo \"$@\"\n")
    (own / "ask").touch()
    for name in ("python", "ask"):
        (own / name).chmod(0o755)

    def run_own(*words, cwd=own, **more):
        env = {**os.environ, "PATH": f"{own}:{os.environ['PATH']}", **more}
        return subprocess.run(["bash", own / "run_all.sh", *words], cwd=cwd, env=env, text=True, capture_output=True)

    ask = " --name_command=ask"
    (office := tmp_path / "Büro's").mkdir()
    there = f" --name_command=cd '{tmp_path}/Büro'\\''s' && ask"
    assert subprocess.run(["sh", "-c", there.split("=", 1)[1].replace("ask", "pwd")], text=True, capture_output=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout == f"{office}\n"
    for cwd, naming in ((own, (ask, ask)), (office, ("", there))):  # once a run: names in a clusters.csv may have been edited
        done = run_own("a.csv", *ask.split(), cwd=cwd, SEEDS="0 1")
        assert done.returncode == 0
        assert [line for line in done.stdout.splitlines() if line.startswith(("predict", "figures"))] == [
            f"predict.py out/run0{naming[0]}", "figures.py out/run0", f"predict.py out/run1{naming[1]}", "figures.py out/run1"]
        assert ("out/run0/clusters.csv is there already" in done.stdout) == (not naming[0])
        assert done.stderr == "" if cwd == own else f"data/ and out/ are those in {own}\n" in done.stderr
        (own / "out/run0/clusters.csv").touch()
    for seed, refused in ((0, False), (1, True)):  # a program that is not there is not asked in the first case
        done = run_own("a.csv", "--name_command", "./no.sh | sed 1q", SEED=str(seed))
        assert done.returncode == 2 * refused and ("pretrain.py" in done.stdout) != refused, "before the training"
        assert ("--name_command ./no.sh is not there" in done.stderr) == refused
    for program, refused in (("ask me", False), ("./no.sh", True)):  # the names in out/run0 are not those of a run with a tag
        done = run_own("a.csv", "--tag", "x", f"--name_command={program}")
        assert done.returncode == 2 * refused and ("predict.py out/run0_x --name_command=ask me\n" in done.stdout) != refused
    (own / "a.csv").symlink_to(own / "blob")  # the run takes the name that was given
    done = run_own(own / "a.csv", cwd=None)
    assert done.returncode == 0 and f"--dataset {own}/a.csv" in done.stdout and "blob" not in done.stdout
    for words, why in ((["a.csv", "--name_command"], "needs"), (["a.csv", "--name_command="], "needs"),
                       (["a.csv", "--name_command", "--tag", "x"], "needs"), (["demo", "10", *ask.split()], "is for a table")):
        done = subprocess.run(["bash", own / "run_all.sh", *words], text=True, capture_output=True)
        assert done.returncode == 2 and not done.stdout and f"--name_command {why}" in done.stderr
    for words, ratio, why in ((["a.csv", "5"], "", "has no GAMMA"), (["a.csv"], "0.5", "KNOWN_RATIO is for benchmarks"),
                              (["a.xlsx"], "", "save it as CSV")):
        done = subprocess.run(["bash", own / "run_all.sh", *words], text=True, capture_output=True,
                              env={**os.environ, "KNOWN_RATIO": ratio})
        assert done.returncode == 2 and not done.stdout and why in done.stderr
    (own / "python").write_text("#!/bin/sh\n[ \"$1\" = -c ] && echo run || echo \"$@\"\n[ \"$1\" != pretrain.py ]\n")
    done = run_own("a.csv", cwd=None)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("pretrain.py"), "what fails is the last"
    assert said("--device=cpu", encoder="minilm")[1].endswith("--encoder minilm --device=cpu")
    for given, P, threads in (("", 2, max(1, os.cpu_count() // 2)), ("", 1000, 1), ("3", 2, 3)):  # the cores are shared out
        _, *stages, _ = said(NPROC=str(P), OMP_NUM_THREADS=given)
        assert len(stages) == 2 and all(line.startswith(f"{threads} --standalone --nproc_per_node {P} ") for line in stages)


def test_ctrl_c_is_said_below_what_torchrun_says_of_it(tmp_path):
    (tmp_path / "torchrun").write_text("#!/bin/sh\ntrap 'kill $!; echo a traceback >&2; exit 1' INT\ntouch started\n"
                                       "sleep 60 & wait\n")
    (tmp_path / "python").write_text("#!/bin/sh\n")
    for name in ("torchrun", "python"):
        (tmp_path / name).chmod(0o755)
    shutil.copy(REPO / "run_all.sh", tmp_path)
    run = subprocess.Popen(["bash", "run_all.sh", "demo", "10"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "NPROC": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}, start_new_session=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while run.poll() is None and not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    said = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == 2
    assert said == "a traceback\nrun_all.sh: stopped; the same command goes on from what is saved\n"


@pytest.fixture(scope="module")
def real_minilm_run(tmp_path_factory):
    """The real encoder on the bundled corpus, shortened: (folder, what train_imbanid.py says)."""
    task = pretrained_demo(tmp_path_factory.mktemp("minilm"), seed=5, epochs=3)
    with kept_passes(), contextlib.redirect_stdout(io.StringIO()) as said:
        train_imbanid.main(train_imbanid.Args(**task, epochs=2, min_steps=0))
    return Path(task["out_dir"]) / "demo_g10_s5", said.getvalue()


def test_the_real_encoder_learns_something(real_minilm_run):
    out, said = real_minilm_run
    results = json.loads((out / "results.json").read_text())
    assert results["encoder"] == "minilm" and results["num_classes"] == 24
    raw, pretrained, ours = (results[row]["ACC"] for row in ("kmeans_raw", "kmeans_pretrained", "test"))
    assert ours - 4 > max(52, raw, pretrained)  # 59.4, in float32 59.2; with learning rates of 1e-12 53.6 and 53.9
    before = pretrain.load_checkpoint(out / "pretrain.pt")["log"]
    assert all(before[-1][loss] < 0.95 * before[0][loss] for loss in ("ce", "mlm"))  # 0.92, 0.82; with 1e-12 1.12, 1.00
    first, *_, last = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert last["ce"] < 0.97 * first["ce"]
    for word in ("k-means, raw", "semi-sup. k-means, raw", "k-means, pre-trained", "test_pred.npy", str(out)):
        assert word in said
    assert f"{results['test']['ACC']:.2f}" in said


def test_on_two_threads_the_same_seed_gives_the_same_bytes(tiny_run, tmp_path):
    task, ends = (*tiny_run[0][:-1], tmp_path), []
    script("pretrain.py", *task, "--encoder", "minilm", "--epochs", 1)
    for tag in ("threads", "threads_again"):
        words = (*task, "--epochs", 2, "--min_steps", 0, "--swaps", 20, "--tag", tag)
        script("train_imbanid.py", *words, env={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"})  # of busy cores
        ends.append(tmp_path / f"demo_g4_s0_{tag}")
    assert json.loads((ends[0] / "results.json").read_text())["threads"] == 2
    for name in ("test_pred.npy", "pseudo_label.npy", "confidence.npy", "beta.npy", "train_feature.npy", "test_feature.npy"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


def test_mean_and_keep(real_minilm_run, tmp_path):
    out, _ = real_minilm_run
    results = json.loads((out / "results.json").read_text())
    ACC = results["test"]["ACC"]
    one = script("figures.py", "mean", out).stdout
    assert "±" not in one and f"{ACC:.2f}" in one and "semi-supervised k-means" in one
    (tmp_path / "other.json").write_text(json.dumps({**results, "seed": 6, "test": {**results["test"], "ACC": ACC + 2}}))
    assert f"{ACC + 1:.2f} ±1.41" in script("figures.py", "mean", out, tmp_path / "other.json").stdout
    script("figures.py", "keep", out, cwd=tmp_path)
    assert json.loads((tmp_path / "results/demo_g10_s5.json").read_text())["seed"] == 5
    one_line_error(script("figures.py", "keep", "results/demo_g10_s5.json", cwd=tmp_path, ok=False), "no folder")
    assert len([*(tmp_path / "results").iterdir()]) == 1
    assert script("figures.py", "draw", ok=False).returncode == 2


@pytest.mark.parametrize("name", ["make_lt_data.py", "pretrain.py", "train_imbanid.py", "predict.py", "figures.py"])
def test_a_script_starts_by_itself(name):
    """A new Python, where the other tests fork one that has imported everything: nothing but the help is said."""
    done = script(name, "--help", env={"PYTHONWARNINGS": "default"})
    assert not done.stderr and done.stdout.startswith(f"usage: {name}")


def test_flags_and_new_texts_do_not_wait_for_scikit_learn():
    code = "import sys, pretrain, train_imbanid, predict; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True).returncode == 0


DOCUMENTS = [REPO / name for name in ("README.md", "baselines/README.md", "docs/experiments.md")]


@pytest.mark.parametrize("build", TABLES)
def test_tables_are_the_ones_built_from_results(build):
    text = "\n\n".join(path.read_text() for path in DOCUMENTS)
    tables = build(REPO / "results")
    assert tables
    for table in tables.split("\n\n"):
        assert len(table.splitlines()) > 2 and text.count(f"\n\n{table}\n\n") == 1, "stale: python figures.py table"
        assert text.count(table.splitlines()[0]) == 1


def test_tables_are_put_where_older_ones_stand(tmp_path):
    now = DOCUMENTS[0].read_text(encoding="utf-8")
    old = re.sub(r"^\| CLINC150-LT \|.*\n", "", now, flags=re.M)
    (tmp_path / "old.md").write_text(old, encoding="utf-8")
    assert old != now
    said = script("figures.py", "table", tmp_path / "old.md").stdout
    assert (tmp_path / "old.md").read_text(encoding="utf-8") == now
    heads = {line for line in said.splitlines() if line.startswith("|")}
    assert heads and not heads & set(now.splitlines())
    assert heads <= {line for path in DOCUMENTS[1:] for line in path.read_text(encoding="utf-8").splitlines()}
    rest = [shutil.copy(path, tmp_path / f"{place}.md") for place, path in enumerate(DOCUMENTS[1:])]
    assert not script("figures.py", "table", tmp_path / "old.md", *rest).stdout
    one_line_error(script("figures.py", "table", tmp_path / "new.md", ok=False), "no document")
    one_line_error(script("figures.py", "table", "old.md", cwd=tmp_path, ok=False), "no runs in results/")
    assert (tmp_path / "old.md").read_text(encoding="utf-8") == now


def test_documents_name_flags_and_places_that_exist():
    scripts = [REPO / f"{name}.py" for name in ("make_lt_data", "pretrain", "train_imbanid")]
    scripts += [*(REPO / "baselines").glob("*.py"), *(REPO / "tests").glob("bench_*.py")]
    sources = "".join(path.read_text() for path in scripts)
    by_hand = re.findall(r'"--([a-z_]+)"', (REPO / "predict.py").read_text())
    titles = {path: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-")
                     for line in re.findall(r"^#+ (.*)", path.read_text(), re.M)} for path in DOCUMENTS}
    for path in DOCUMENTS:
        for flag in set(re.findall(r"`--([a-z_0-9]+)", path.read_text())) - {"nproc_per_node", "nnodes", "max_restarts", "help",
                                                                            *by_hand}:
            assert f"    {flag}: " in sources, flag
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            if not link.startswith("http"):
                file, _, title = link.partition("#")
                place = (path.parent / file).resolve() if file else path
                assert place.exists() and (not title or title in titles[place]), f"{path.name}: {link}"


def test_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

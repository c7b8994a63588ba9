import filecmp
import hashlib
import http.server
import os
import platform
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import PATIENCE, REPO, one_line_error, read_tsv, script, write_tsv

import make_lt_data
from make_lt_data import CORPORA, UserError, long_tail_counts, make_split, parse_args, raw_corpus, read_run, run_name

# The paper's (its counts of labelled and unlabelled rows together), but for CLINC at gamma 5, where it has 8883.
TOTALS = [("clinc", 3, 10863), ("clinc", 5, 8884), ("clinc", 10, 6978), ("banking", 3, 7770), ("banking", 5, 6411),
          ("banking", 10, 5041), ("stackoverflow", 3, 10970), ("stackoverflow", 5, 9036), ("stackoverflow", 10, 7179)]


def test_flags_of_a_class_without_source_have_no_help_but_work():
    """As under a profiler, to which __main__ is itself."""
    scope = {"__name__": "make_lt_data"}
    exec("from dataclasses import dataclass\n@dataclass\nclass Args:\n    epochs: int = 3  # how many\n", scope)
    assert parse_args(scope["Args"], ["--epochs", "4"]).epochs == 4


@pytest.mark.parametrize("dataset,gamma,total", TOTALS)
def test_the_papers_totals(real_raw, dataset, gamma, total):
    rows, _ = raw_corpus(dataset, real_raw, "")
    texts, labels, names, counts, num_known, labelled = make_split(rows, gamma, 0, 0.75, 0.1)
    K = {"clinc": 150, "banking": 77, "stackoverflow": 20}[dataset]
    assert len(texts["train"]) == counts.sum() == total
    assert (len(names), num_known) == (K, {150: 113, 77: 58, 20: 15}[K])
    assert np.array_equal(np.bincount(labels["train"], minlength=K), counts)
    assert set(labels["train"][labelled]) == set(range(num_known))  # every known class has a labelled row, no novel one has
    assert labels["dev"].max() < num_known and set(labels["test"]) == set(range(K))
    assert labelled.sum() == sum(-(-n // 10) for n in counts[:num_known].tolist())


def corpus(K=8, n=40):
    train = [(f"text {k} {i}", f"class {k}") for k in range(K) for i in range(n)]
    return {"train": train, "dev": train[::n], "test": train[::n]}


def test_of_equally_large_classes_the_seed_says_which_is_the_head():
    found = [long_tail_counts(np.full(20, 100), 10.0, np.random.default_rng(seed)) for seed in (0, 1)]
    assert not np.array_equal(*found) and not np.array_equal(found[0], np.sort(found[0])[::-1])


def test_known_classes_kept_rows_and_their_order_are_drawn():
    texts, labels, names, counts, num_known, _ = make_split(corpus(), 4, 0, 0.75, 0.1)
    assert set(names[:num_known]) != {f"class {k}" for k in range(6)}, "not the first of the alphabet"
    place, smallest = [int(text.split()[-1]) for text in texts["train"]], int(counts.argmin())
    kept = [i for i, label in zip(place, labels["train"]) if label == smallest]
    assert max(kept) >= counts[smallest], "not the first of the file"
    assert (np.diff(labels["train"]) != 0).sum() > len(labels["train"]) / 2, "the order of rows does not tell their classes"
    assert (names[num_known:], counts.tolist(), texts["train"][0]) == (
        ["class 1", "class 7"], [12, 26, 10, 18, 14, 32, 40, 22], "text 1 10"), "seed 0 is no longer the split of results/"


def test_edges_of_a_split():
    assert make_split(corpus(), 1, 0, 0.01, 0.1)[4] == 1, "one known class at least"
    assert make_split(corpus(2, 100), 1, 0, 0.5, 0.07)[5].sum() == 7, "and not 8, though 0.07 * 100 is above 7"
    with pytest.raises(UserError, match="without a single row"):
        make_split(corpus(), 100, 0, 0.75, 0.1)
    for split in ("dev", "test"):
        rows = corpus()
        rows[split] = [*rows[split], ("a", "elsewhere")]
        with pytest.raises(UserError, match="'elsewhere' of dev or test has no training row"):
            make_split(rows, 4, 0, 0.75, 0.1)


def test_real_corpora_are_the_published_ones(real_raw, capsys):
    for dataset, sizes in (("clinc", (18000, 2250, 2250)), ("banking", (9003, 1000, 3080)),
                           ("stackoverflow", (18000, 1000, 1000))):
        rows, sha = raw_corpus(dataset, real_raw, "")
        assert sha == CORPORA[dataset][2] and tuple(len(rows[s]) for s in ("train", "dev", "test")) == sizes
    assert capsys.readouterr().err == ""


def test_profile_worked_by_hand():
    rng = np.random.default_rng(0)
    assert sorted(long_tail_counts(np.full(3, 100), 100.0, rng).tolist()) == [1, 10, 100]  # 100, 100/10, 100/100
    assert long_tail_counts(np.array([5, 100, 50]), 4.0, rng).tolist() == [5, 100, 50]  # 25 wanted, 5 there: capped
    assert long_tail_counts(np.array([7, 9]), 1.0, rng).tolist() == [7, 9]
    assert min(long_tail_counts(np.full(150, 120), 10.0, rng)) == 12  # 120 / 10 and not 11


def test_same_seed_same_bytes_other_seed_other_split(tmp_path, tiny_raw):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        script("make_lt_data.py", "--dataset", "demo", "--gamma", 4, "--seed", seed, "--data_dir", tmp_path / name, "--raw_dir",
               tiny_raw, env={"PYTHONHASHSEED": str(ord(name))})  # no order of a set may get into the files
    first, again, other = (tmp_path / n / f"demo_g4_s{s}" for n, s in (("a", 3), ("b", 3), ("c", 4)))
    names = sorted(p.name for p in first.iterdir())
    assert filecmp.cmpfiles(first, again, names, shallow=False)[0] == names
    assert (first / "train.tsv").read_bytes() != (other / "train.tsv").read_bytes()
    assert not list(tmp_path.rglob("*.part"))


WRITER = """
import sys
from make_lt_data import write_atomic
from pathlib import Path
path, letter = Path(sys.argv[1]), sys.argv[2]
for _ in range(200):
    write_atomic(path, letter * 100_000)
    assert len(set(path.read_text())) == 1 and path.stat().st_size == 100_000
"""


def test_two_processes_may_write_the_same_file_and_what_killed_ones_left_goes(tmp_path):
    path = tmp_path / "same [1].txt"  # brackets mean something in a glob
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, letter], cwd=REPO) for letter in "ab"]
    assert [writer.wait(PATIENCE) for writer in writers] == [0, 0]
    of_dead, of_living, folder = (
        tmp_path / f"same [1].txt.{platform.node().replace('.', '-')}.{pid}.part"
        for pid in (writers[0].pid, os.getppid(), os.getpid()))
    elsewhere = tmp_path / f"same [1].txt.another-machine.{writers[0].pid}.part"  # where that number may be alive
    for left in (of_dead, of_living, elsewhere):
        left.write_text("half")
    folder.mkdir()
    assert make_lt_data.part_of(path) == folder, "a name that a killed process of the same number had"
    assert of_living.exists() and elsewhere.exists() and not of_dead.exists() and not folder.exists()


def test_of_two_that_make_the_same_data_the_first_stays(tmp_path, tiny_raw, monkeypatch):
    flags = ("--dataset", "demo", "--gamma", "4", "--raw_dir", str(tiny_raw), "--data_dir", str(tmp_path))
    save, folder = np.save, tmp_path / "demo_g4_s0"
    folder.mkdir()  # an empty one is nobody's

    def faster(path, values):
        monkeypatch.setattr(np, "save", save)
        script("make_lt_data.py", *flags)
        (folder / "train_row.npy").write_text("of the first")
        save(path, values)

    monkeypatch.setattr(np, "save", faster)
    make_lt_data.main(parse_args(make_lt_data.Args, [*flags]))
    assert (folder / "train_row.npy").read_text() == "of the first" and [*tmp_path.iterdir()] == [folder]


def test_a_label_of_a_corpus_is_one_line(tmp_path):
    write_tsv(tmp_path / "train.tsv", [["text", "label"], ["one", " a\nlabel "], ["two", "a  label"]])
    assert make_lt_data.read_rows(tmp_path / "train.tsv") == [["one", "a label"], ["two", "a label"]]


def test_hidden_labels_are_only_in_train_truth(tiny_run):
    task, folder = tiny_run
    run = folder / "data" / "demo_g4_s0"
    label, truth = np.load(run / "train_label.npy"), np.load(run / "train_truth.npy")
    written = [row[1] for row in read_tsv(run / "train.tsv")[1:]]
    names = (run / "labels.txt").read_text().split()
    assert [names.index(w) if w else -1 for w in written] == label.tolist()
    assert (label < 0).sum() > 0 and np.array_equal(label[label >= 0], truth[label >= 0])
    assert np.load(run / "class_counts.npy").tolist() == np.bincount(truth).tolist()
    (run / "train_truth.npy").rename(run / "aside.npy")
    try:
        texts, labels, _, _ = read_run(run, dataset="demo", gamma=4.0, seed=0)
        one_line_error(script("pretrain.py", *task, ok=False), "train_truth.npy", "is missing", "make_lt_data.py")
        (run / "train_truth.npy").write_bytes((run / "aside.npy").read_bytes()[:-9])
        one_line_error(script("pretrain.py", *task, ok=False), "train_truth.npy", "is damaged", "make_lt_data.py")
    finally:
        (run / "aside.npy").rename(run / "train_truth.npy")
    assert len(texts["train"]) == len(label) and "truth" not in labels


def test_skips_what_is_done_and_prints_the_table_row(tmp_path, tiny_raw):
    flags = ("--dataset", "demo", "--gamma", 4, "--data_dir", tmp_path, "--raw_dir", tiny_raw)
    first, second = script("make_lt_data.py", *flags).stdout, script("make_lt_data.py", *flags).stdout
    assert "skipped" in second and "skipped" not in first
    assert all("|Dl|" in out and "|Du|" in out for out in (first, second))


def test_known_ratios_and_run_names(tiny_raw):
    rows, _ = raw_corpus("demo", tiny_raw, "")
    assert [make_split(rows, 1, 0, ratio, 0.1)[4] for ratio in (0.25, 0.5, 0.75)] == [2, 4, 6]
    assert run_name("clinc", 10.0, 0) == "clinc_g10_s0" and run_name("clinc", 2.5, 1, 0.5, 0.2) == "clinc_g2.5_s1_k50_l20"


def broken(tmp_path, tiny_raw, change):
    for split in ("train", "dev", "test"):
        target = tmp_path / "raw/demo" / f"{split}.tsv"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tiny_raw / "demo" / f"{split}.tsv").read_bytes())
    change(tmp_path / "raw/demo/train.tsv")
    done = script("make_lt_data.py", "--dataset", "demo", "--gamma", 4, "--raw_dir", tmp_path / "raw", "--data_dir",
                  tmp_path / "data", ok=False)
    assert done.returncode == 0 or not list(tmp_path.glob("data/*")), "something half-written was left"
    return done


def append(what):
    return lambda path: path.write_bytes(path.read_bytes() + what)


@pytest.mark.parametrize("change,words", [
    (lambda p: p.unlink(), ["missing"]), (lambda p: p.write_bytes(b""), ["empty"]),
    (lambda p: p.write_bytes(b"text\tlabel\n"), ["empty"]), (append(b"one column\n"), ["line 322", "1 column"]),
    (append(b"a\tb\tc\n"), ["3 column"]), (append(b" \tcheck\n"), ["empty text"]), (append(b"hello\t\n"), ["empty label"]),
    (append(b"\xff\xfe\tx\n"), ["line 322", "UTF-8"]), (append(b"a\0b\tx\n"), ["NUL"]),
    (append(b'"open\tx\n'), ["quoting"]), (lambda p: p.write_bytes(p.read_bytes().split(b"\n", 1)[1]), ["line 1", "header"])])
def test_broken_raw_files(tmp_path, tiny_raw, change, words):
    one_line_error(broken(tmp_path, tiny_raw, change), "train.tsv", *words)


def test_a_quote_that_swallows_rows_is_told(tmp_path, tiny_raw):
    done = broken(tmp_path, tiny_raw, append(b'"open the door\tx\nhello\tx\nI said please"\tx\n'))
    assert done.returncode == 0 and "train.tsv: 1 text(s) of several lines, the first 'open the door\\tx'" in done.stderr


def test_a_corpus_that_is_not_the_published_one_is_told_each_time(tmp_path, tiny_raw, monkeypatch, capsys):
    monkeypatch.setitem(CORPORA, "demo", ("demo-LT", "", dict.fromkeys(("train", "dev", "test"), "0" * 64)))
    words = ("--dataset", "demo", "--gamma", "4", "--raw_dir", str(tiny_raw), "--data_dir", str(tmp_path))
    for _ in range(2):
        make_lt_data.main(parse_args(make_lt_data.Args, [*words]))
        assert capsys.readouterr().err.count("is not the published file") == 3


def test_fewer_test_rows_than_classes(tmp_path, tiny_raw):
    shutil.copytree(tiny_raw / "demo", tmp_path / "demo")
    write_tsv(tmp_path / "demo/test.tsv", read_tsv(tiny_raw / "demo/test.tsv")[:6])
    done = script("make_lt_data.py", "--dataset", "demo", "--raw_dir", tmp_path, "--data_dir", tmp_path / "data", ok=False)
    one_line_error(done, "5 test rows for 8 classes")
    assert not (tmp_path / "data").exists()


def test_an_empty_first_line_is_no_header(tmp_path, tiny_raw):
    assert broken(tmp_path, tiny_raw, lambda p: p.write_bytes(b"\n" + p.read_bytes())).returncode == 0
    assert "label" not in (tmp_path / "data/demo_g4_s0/labels.txt").read_text().split()


def test_a_carriage_return_in_a_text_is_a_new_line(tmp_path):
    (tmp_path / "t.tsv").write_bytes(b'text\tlabel\n"one\rtwo\r\nthree"\ta\n')
    assert make_lt_data.read_rows(tmp_path / "t.tsv") == [["one\ntwo\nthree", "a"]]


def test_crlf_is_accepted(tmp_path, tiny_raw):
    assert broken(tmp_path, tiny_raw, lambda p: p.write_bytes(p.read_bytes().replace(b"\n", b"\r\n"))).returncode == 0
    assert not any("\r" in row[0] for row in read_tsv(tmp_path / "data/demo_g4_s0/train.tsv"))


@pytest.mark.parametrize("flags,words", [
    (["--dataset", "atis"], ["atis", "clinc"]), (["--gamma", "0.5"], ["gamma", ">= 1"]), (["--gamma", "0"], ["gamma"]),
    (["--gamma", "ten"], ["gamma", "ten"]), (["--gamma", "nan"], ["gamma"]), (["--known_ratio", "0"], ["known_ratio"]),
    (["--labeled_ratio", "2"], ["labeled_ratio"]), (["--seed", "-1"], ["seed"]),
    (["--seed", "2147483648"], ["seed"]), (["--gama", "3"], ["--gama"]),
    (["--dataset", "demo", "--known_ratio", "1", "--labeled_ratio", "1"], ["nothing to discover", "--known_ratio"]),
    (["--dataset", "clinc", "--mirror", "http://127.0.0.1:9"], ["download", "--raw_dir"]),
    (["--dataset", "clinc", "--mirror", "http://127.0.0.1:port"], ["download", "--raw_dir"])])
def test_bad_flags(tmp_path, flags, words):
    one_line_error(script("make_lt_data.py", "--data_dir", tmp_path, *flags, ok=False, cwd=tmp_path), *words)
    assert not list(tmp_path.rglob("*.part"))


@pytest.fixture
def server(tmp_path):
    """A local host for downloads; requested paths are taken from tmp_path/www."""
    def handler(*args):
        return http.server.SimpleHTTPRequestHandler(*args, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", tmp_path / "www"
        httpd.shutdown()


def test_download_checks_sha256_and_renames(tmp_path, server, tiny_raw, monkeypatch):
    address, www = server
    sums = {}
    for split in ("train", "dev", "test"):
        raw = (tiny_raw / "demo" / f"{split}.tsv").read_bytes()
        (www / "home").mkdir(parents=True, exist_ok=True)
        (www / "home" / f"{split}.tsv").write_bytes(raw)
        sums[split] = hashlib.sha256(raw).hexdigest()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CORPORA, "clinc", ("CLINC150-LT", "home", sums))
    flags = ["--dataset", "clinc", "--gamma", "4", "--mirror", address]
    make_lt_data.main(parse_args(make_lt_data.Args, flags))
    assert (tmp_path / "data/clinc_g4_s0/meta.json").exists()
    assert sorted(p.name for p in (tmp_path / "data/raw/clinc").iterdir()) == ["dev.tsv", "test.tsv", "train.tsv"]


def test_wrong_checksum_leaves_nothing(tmp_path, server):
    address, www = server
    home = www / CORPORA["clinc"][1]
    write_tsv(home / "train.tsv", [["text", "label"], ["changed", "x"]])
    one_line_error(script("make_lt_data.py", "--mirror", address, ok=False, cwd=tmp_path), "sha256")
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    done = script("make_lt_data.py", "--dataset", "banking", "--mirror", address, ok=False, cwd=tmp_path)
    one_line_error(done, "File not found")


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"dataset": "demo", "gamma": 10.0, "raw_sha256": null}'])
def test_a_damaged_meta_file_is_said(tmp_path, text):
    for run, dataset in (("demo_g10_s0", "demo"), ("t_s0", tmp_path / "t.csv")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "meta.json").write_text(text)
        one_line_error(script("make_lt_data.py", "--dataset", dataset, "--data_dir", tmp_path, ok=False), "damaged")


def test_flags_that_say_nothing_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("text\n" + "".join(f"text {i}\n" for i in range(20)))
    for dataset, flags, words in (("demo", ("--dev_ratio", 0.5), ["--dev_ratio", "demo"]),
                                  (path, ("--labeled_ratio", 0.3), ["--labeled_ratio", "t.csv"]),
                                  ("clnic", ("--mirror", "x"), ["clnic is unknown"])):
        done = script("make_lt_data.py", "--dataset", dataset, *flags, "--data_dir", tmp_path / "data", ok=False)
        one_line_error(done, *words)
    assert not (tmp_path / "data").exists()


def test_a_folder_made_with_another_seed_is_refused(tmp_path, tiny_run):
    task, folder = tiny_run
    (tmp_path / "data").mkdir()
    (tmp_path / "data/demo_g4_s1").symlink_to(folder / "data/demo_g4_s0")
    done = script("pretrain.py", "--dataset", "demo", "--gamma", 4, "--seed", 1, "--data_dir", tmp_path / "data", "--out_dir",
                  tmp_path / "out", ok=False)
    one_line_error(done, "seed 0, not 1")
    done = script("make_lt_data.py", "--dataset", "demo", "--gamma", 4, "--seed", 1, "--data_dir", tmp_path / "data", ok=False)
    one_line_error(done, "seed 0, not 1", "remove it")


def test_hidden_classes_leave_nothing_of_the_test_set_and_no_label_of_their_own(tmp_path, tiny_raw):
    task = ("--dataset", "demo", "--gamma", 4, "--seed", 0)
    script("make_lt_data.py", *task, "--raw_dir", tiny_raw, "--data_dir", tmp_path)
    said = script("tests/hide_classes.py", tmp_path / "demo_g4_s0").stdout
    before, after = (read_run(folder / "demo_g4_s0") for folder in (tmp_path, tmp_path / "dev"))
    known, visible = before[3]["num_known"], after[3]["num_known"]
    assert visible == known - round(known / 4) and f"{visible} of {before[3]['num_classes']} classes stay known" in said
    assert after[0]["train"] == before[0]["train"] and after[0]["test"] == before[0]["dev"]
    names = [[[names[k] if k >= 0 else "" for k in labels[split]] for split in ("train", "dev", "test")]
             for _, labels, names, _ in (before, after)]
    hidden = set(before[2][:known]) - set(after[2][:visible])
    assert len(hidden) == known - visible and sorted(before[2]) == sorted(after[2])
    assert names[1][0] == ["" if name in hidden else name for name in names[0][0]]
    assert names[1][2] == names[0][1] and names[1][1] == [name for name in names[0][1] if name not in hidden]
    truth = [[found[2][k] for k in np.load(folder / "demo_g4_s0/train_truth.npy")]
             for found, folder in ((before, tmp_path), (after, tmp_path / "dev"))]
    assert truth[0] == truth[1]
    assert "skipped" in script("tests/hide_classes.py", tmp_path / "demo_g4_s0").stdout
    shutil.rmtree(tmp_path / "demo_g4_s0")
    script("make_lt_data.py", *task, "--data_dir", tmp_path)  # of the whole demo corpus
    one_line_error(script("tests/hide_classes.py", tmp_path / "demo_g4_s0", ok=False), "made from another", "remove")
    one_line_error(script("tests/hide_classes.py", ok=False), "usage")
    one_line_error(script("tests/hide_classes.py", tmp_path / "gone", ok=False), "make_lt_data.py")


def test_the_papers_counts_and_the_printed_row(capsys):
    for dataset, gamma, total in TOTALS:
        labelled, unlabelled = make_lt_data.PAPER_COUNTS[dataset, gamma]
        assert labelled + unlabelled == total - ((dataset, gamma) == ("clinc", 5)) and 0.07 < labelled / total < 0.09
    make_lt_data.print_table_row({"dataset": "clinc", "gamma": 10, "seed": 0, "known_ratio": 0.75, "labeled_ratio": 0.1,
                                  "num_classes": 150, "num_known": 113, "num_labelled": 584, "num_unlabelled": 6394,
                                  "num_test": 2250})
    assert [line[16:].split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["|Yk|", "|Yn|", "|Dl|", "|Du|", "|Dt|", "|Dl|+|Du|"], ["113", "37", "584", "6394", "2250", "6978"],
        ["113", "37", "583", "6395", "2250", "6978"]]


def test_known_and_novel_classes_are_each_in_alphabetical_order():
    _, _, names, _, num_known, _ = make_lt_data.make_split(corpus(20), 4, 0, 0.5, 0.1)
    assert (names[:num_known], names[num_known:]) == (sorted(names[:num_known]), sorted(names[num_known:]))


def test_the_labels_that_are_shown_and_what_the_meta_file_counts(tmp_path, tiny_raw):
    make_lt_data.main(make_lt_data.parse_args(make_lt_data.Args, [
        "--dataset", "demo", "--gamma", "4", "--raw_dir", str(tiny_raw), "--data_dir", str(tmp_path)]))
    texts, labels, _, meta = read_run(tmp_path / "demo_g4_s0")
    counts, shown = np.load(tmp_path / "demo_g4_s0/class_counts.npy"), labels["train"] >= 0
    assert np.bincount(labels["train"][shown]).tolist() == [-(-n // 10) for n in counts[:6].tolist()]
    assert [meta[f"num_{key}"] for key in ("classes", "known", "labelled", "unlabelled", "dev", "test")] == [
        8, 6, shown.sum(), (~shown).sum(), len(texts["dev"]), len(texts["test"])]


def test_data_made_from_another_raw_file_are_refused(tmp_path, tiny_raw):
    shutil.copytree(tiny_raw / "demo", tmp_path / "raw/demo")
    args = make_lt_data.parse_args(make_lt_data.Args, ["--dataset", "demo", "--gamma", "4", "--raw_dir", str(tmp_path / "raw"),
                                                       "--data_dir", str(tmp_path / "data")])
    make_lt_data.main(args)
    with open(tmp_path / "raw/demo/train.tsv", "a") as file:
        file.write("one more\tcheck\n")
    with pytest.raises(UserError, match="made from another .*train.tsv"):
        make_lt_data.main(args)


def test_stackoverflows_classes_are_called_after_what_they_are_about(real_raw):
    rows = make_lt_data.raw_corpus("stackoverflow", real_raw, "")[0]["train"]
    for name in {label for _, label in rows}:
        about = [label for text, label in rows if name.replace("-", " ") in text.lower()]
        assert max(set(about), key=about.count) == name

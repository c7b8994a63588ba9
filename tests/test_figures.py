"""figures.py on small made-up runs: every picture, the page, and what it says of files that are not there."""
import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, one_line_error, script
from matplotlib.container import BarContainer
from matplotlib.image import imread
from scipy.stats import ttest_rel

import figures
from make_lt_data import UserError, run_name

NASTY = ['</script><script>alert("1")</script>', "it's \"quoted\" & <b>bold</b>", "emoji \U0001f600, 日本語, عربى",
         "@DATA@ @TITLE@ \\u003c"]
NAMES = [r"$\cost$ of _x_", "_hidden", "日本語の意図", "a name longer than any picture has room for", "plain", "new & old"]
SCORES = {c: 60.0 + i for i, c in enumerate(figures.COLUMNS)} | {"tail": None}


def make_run(folder, seed=0, tag="", **settings):
    """out/<run>/ and data/<run>/ as the scripts leave them: 6 classes (4 known) in 8 dimensions, 10 test rows a class."""
    config = {"dataset": "demo", "gamma": 4.0, "seed": seed, "known_ratio": 0.75, "labeled_ratio": 0.1, "omega": 0.5,
              "lambda2": 0.0, "no_dr": tag == "no_dr", "dtype": "bfloat16",
              "pretrain": {"seed": seed, "epochs": 30, "dtype": "bfloat16", "trained_layers": 1}, **settings}
    run = run_name(*(config[k] for k in ("dataset", "gamma", "seed", "known_ratio", "labeled_ratio")))
    out, data, rng = folder / "out" / (f"{run}_{tag}" if tag else run), folder / "data" / run, np.random.default_rng(seed)
    out.mkdir(parents=True)
    data.mkdir(parents=True, exist_ok=True)
    label = np.repeat(np.arange(6), 10)
    (data / "labels.txt").write_text("".join(f"{name}\n" for name in NAMES), encoding="utf-8")
    (data / "meta.json").write_text(json.dumps({"num_known": 4}))
    np.save(data / "class_counts.npy", np.array([40, 25, 16, 10, 30, 11]))
    np.save(data / "test_label.npy", label)
    np.save(out / "test_feature.npy", np.eye(6, 8)[label] + 0.1 * rng.normal(size=(60, 8)))
    np.save(out / "test_pred.npy", (label + (rng.random(60) < 0.2)) % 6)
    log = [{"epoch": i, "dev_accuracy": 80.0 + i, "rot_iterations": 5, "rot_residual": 1e-8 * (i - 1)} for i in (1, 2, 3)]
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    results = {"dataset": "demo", "gamma": config["gamma"], "seed": seed, "method": "imbanid", "tag": tag, "encoder": "minilm",
               "epochs": 3, "seconds": {"train": 60}, "peak_memory_mb": 1000.0, "num_classes": 6, "config": config,
               "test": SCORES, "kmeans_raw": SCORES, "ss_kmeans_raw": SCORES, "test_kmeans": SCORES}
    (out / "results.json").write_text(json.dumps(results))
    return out


def of_folder(out):
    """A finished run as figures.py's pictures take it."""
    return {**figures.read_results(out), "folder": out}


ASSIGNED = "row text label cluster name confidence"


def write_csv(path, header, rows):
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([header.split(), *rows])


def make_own(folder, clusters=6, rows=40):
    """A run on own data, after predict.py: row 1 has no text, and the texts try to break the page."""
    out = folder / "out" / "mine_s0"
    out.mkdir(parents=True)
    rng, found = np.random.default_rng(0), np.arange(rows) % clusters
    np.save(out / "pseudo_label.npy", found)
    feature = np.eye(clusters, 8 + clusters)[found] + 0.1 * rng.random((rows, 8 + clusters))
    np.save(out / "train_feature.npy", feature.astype(np.float16))
    train_row = np.insert(np.arange(rows), 1, -1)
    np.save(out / "train_row.npy", train_row)
    texts = [NASTY[i % len(NASTY)] for i in range(rows)]
    write_csv(out / "assignments.csv", ASSIGNED, (
        [i + 1, texts[row], "", found[row], "x", "90.0"] if row >= 0 else [i + 1, "", "", "", "", ""]
        for i, row in enumerate(train_row)))
    lines = [[k, "no" if k % 3 else "yes", f"{NASTY[k % 4]} {k}", rows // clusters, "1.50", "88.1", "word, " * 5, *NASTY,
              "last"] for k in range(clusters)]
    header = "id known name size share confidence keywords example_1 example_2 example_3 example_4 example_5"
    write_csv(out / "clusters.csv", header, [*lines, [""] * 12])  # the last line as a spreadsheet may leave it
    log = {"epoch": 1, "dev_accuracy": None, "rot_iterations": 5, "rot_residual": 1e-8}
    (out / "log.jsonl").write_text(json.dumps(log) + "\n")
    (out / "results.json").write_text(json.dumps({
        "dataset": "mine", "own": True, "seed": 0, "num_classes": clusters, "num_known": (clusters + 2) // 3,
        "num_rows": rows + 1, "method": "imbanid",
        "encoder": "minilm", "epochs": 1, "seconds": {"train": 6.0}, "config": {"dataset": "mine", "seed": 0}}))
    return out


def is_picture(path):
    pixels = imread(path)
    return pixels.shape[1] == 1350 and pixels.shape[0] >= 400 and pixels[..., :3].std() > 0.02


def page_data(page):
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A benchmark run and a run on own data, drawn by one call of the script."""
    folder = tmp_path_factory.mktemp("runs")
    bench, own = make_run(folder), make_own(folder)
    return bench, own, script("figures.py", bench, own)


def test_every_picture_of_a_benchmark_run(runs):
    bench, _, done = runs
    for name in ("class_sizes", "tsne_map", "groups", "epochs", "confusion"):
        path = bench / "figures" / f"{name}.png"
        assert is_picture(path) and str(path) in done.stdout.splitlines()
    assert len(list((bench / "figures").iterdir())) == 5, "and nothing half-written"
    assert "Warning" not in done.stderr, done.stderr


def test_own_data_has_the_pictures_that_need_no_truth(runs):
    _, own, done = runs
    assert {path.name for path in (own / "figures").iterdir()} == {"class_sizes.png", "epochs.png"}
    assert all(map(is_picture, (own / "figures").iterdir()))
    page = (own / "report.html").read_text()
    assert page.count("<figure>") == 1 and figures.class_sizes.__doc__ in page, "no picture of the training's inner life"


def test_a_missing_clusters_file_leaves_the_report_out(runs):
    bench, _, done = runs
    line, = [line for line in done.stdout.splitlines() if line.startswith(f"{bench}/report.html")]
    assert f"`python predict.py {bench}`" in line and not (bench / "report.html").exists()


def test_the_report_is_self_contained_and_keeps_every_text(runs):
    _, own, _ = runs
    page = (own / "report.html").read_text(encoding="utf-8")
    assert not re.search("https?:|@import|url\\(|<link", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall("src='(.*?)'", page))
    assert page.count("<img") == 1 and page.count("<script") == page.count("</script>") == 2
    data = page_data(page)
    assert [data["clusters"][1][f"example_{i}"] for i in range(1, 6)] == [*NASTY, "last"]
    assert data["clusters"][2]["name"] == f"{NASTY[2]} 2"
    assert [p[3] for p in data["points"]] == [NASTY[i % 4] for i in range(40)], "in the rows' order, the empty one left out"
    assert [p[2] for p in data["points"]] == [i % 6 for i in range(40)]
    assert all(0 <= value <= 1 for p in data["points"] for value in p[:2])
    for part in ("known intents<dd>2", "new intents<dd>4", "<dd>minilm", "<h1>mine_s0</h1>"):
        assert part in page, part


def test_a_clusters_file_from_a_spreadsheet_is_reported_or_said_to_be_wrong(tmp_path, capsys):
    own = make_own(tmp_path)
    text = (own / "clusters.csv").read_text(encoding="utf-8")
    (own / "clusters.csv").write_text(text.replace(",1.50,88.1,", ',"1,50","88,1",'), encoding="utf-8")
    figures.draw([own])
    page = page_data((own / "report.html").read_text(encoding="utf-8"))
    assert {(line["share"], line["confidence"]) for line in page["clusters"]} == {("1.50", "88.1")}
    capsys.readouterr()
    for name, words in (("03", None), ("3.0", "row 4: id '3.0' is no whole number")):  # what a spreadsheet makes of an id
        (own / "clusters.csv").write_text(text.replace("\n3,", f"\n{name},"), encoding="utf-8")
        if words:
            with pytest.raises(UserError, match="report.html could not be made"):
                figures.draw([own])
            assert words in capsys.readouterr().out
        else:
            figures.draw([own])
            assert sum(p[2] == 3 for p in page_data((own / "report.html").read_text(encoding="utf-8"))["points"]) == 7
    (own / "clusters.csv").write_text(text.replace(",1.50,", " rows,1.50,", 1), encoding="utf-8")
    with pytest.raises(UserError, match="report.html could not be made"):
        figures.draw([own])
    assert "clusters.csv, id 0: size '6 rows' is no number: put it back" in capsys.readouterr().out


def test_the_report_counts_names_and_refuses_what_predict_refuses(tmp_path):
    own = make_own(tmp_path)
    run, lines = of_folder(own), figures.cluster_lines(own)
    with open(own / "assignments.csv", "a") as f:
        f.write(",,,,,\r\n")  # a spreadsheet's empty row
    for line, name in zip(lines, ("lights", "lights", "alarm", "music", "alarm", "door")):  # 0 and 3 are known
        line["name"] = name

    def write(*more):
        figures.write_atomic(own / "clusters.csv", "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in (
            [*lines[0]][:7], *([*line.values()][:7] for line in (*lines, *more)))))

    write()
    page = figures.report(run, {})
    assert "known intents<dd>2<" in page and "new intents<dd>2<" in page, "those of one name are one, a known name is not new"
    write(lines[5])
    with pytest.raises(UserError, match="row 7: id '5' is no whole number, or not the first"):
        figures.report(run, {})
    lines[1]["confidence"] = "Mai 25"  # a spreadsheet's guess at 5.25
    write()
    with pytest.raises(UserError, match="id 1: confidence 'Mai 25' is no number"):
        figures.report(run, {})


def test_each_row_stands_in_the_map_where_its_own_features_are(tmp_path, monkeypatch):
    """With rows in another order than the texts were learned in, one of them twice, and each as sure as itself."""
    own = make_own(tmp_path)
    train_row = np.load(own / "train_row.npy")[::-1]
    train_row[7] = train_row[3]
    np.save(own / "train_row.npy", train_row)
    write_csv(own / "assignments.csv", ASSIGNED, (
        [i + 1, f"text {row}", "x" * (row % 2), row % 6, "x", f"{row}.5"] if row >= 0 else [i + 1, "", "", "", "", ""]
        for i, row in enumerate(train_row)))
    monkeypatch.setattr(figures, "tsne", lambda feature, rows: (np.arange(len(rows)), np.stack([rows, rows], 1) / 100))
    page = figures.report(of_folder(own), {})
    rows = train_row[train_row >= 0].tolist()
    assert page_data(page)["points"] == [[row / 100, row / 100, row % 6, f"text {row}", f"{row}.5"] for row in rows]
    text = (own / "clusters.csv").read_text(encoding="utf-8")
    (own / "clusters.csv").write_text(re.sub("\n3,yes,.*?\n4,", "\n4,", text, flags=re.S), encoding="utf-8")  # a line less
    page = figures.report(of_folder(own), {})
    assert [p[3] for p in page_data(page)["points"]] == [f"text {row}" for row in rows if row % 6 != 3]
    for part in ("rows<dd>30 of 40<", "minutes<dd>0.1<", f"Up to {figures.MAP_ROWS:,} rows", "Up to 3,000 rows"):
        assert part in page, part


def test_a_report_of_two_thousand_clusters_is_a_few_megabytes(tmp_path, monkeypatch):
    own = make_own(tmp_path, clusters=2000, rows=2000)
    monkeypatch.setattr(figures, "MAP_ROWS", 50)
    page = figures.report(of_folder(own), {})
    data = page_data(page)
    assert len(data["clusters"]) == 2000 and len(data["points"]) == 50 and len(page.encode()) < 4e6


def test_the_map_separates_what_is_apart_and_repeats_itself():
    label = np.repeat([0, 1], 20)
    feature = np.eye(2, 6)[label] + 0.05 * np.random.default_rng(0).normal(size=(40, 6))
    rows, xy = figures.tsne(feature.astype(np.float16), np.arange(40))
    assert (rows == np.arange(40)).all() and (xy == figures.tsne(feature.astype(np.float16), np.arange(40))[1]).all()
    apart = np.linalg.norm(xy[label == 0].mean(0) - xy[label == 1].mean(0))
    assert apart > 2 * xy[label == 0].std(0).max()
    with pytest.raises(UserError, match="5 rows"):
        figures.tsne(feature, np.arange(4))


def test_missing_and_damaged_files_leave_out_one_picture_each(tmp_path):
    out = make_run(tmp_path)
    (out / "test_feature.npy").unlink()
    (out / "test_pred.npy").write_bytes(b"no array")
    (out / "log.jsonl").write_text("")  # of --epochs 0
    done = script("figures.py", out)
    for name, word in (("tsne_map", "test_feature.npy"), ("confusion", "damaged"), ("epochs", "nothing to draw")):
        line, = [line for line in done.stdout.splitlines() if line.startswith(f"{out}/figures/{name}.png")]
        assert "left out" in line and word in line
    assert {path.name for path in (out / "figures").iterdir()} == {"class_sizes.png", "groups.png"}


def test_sizes_of_own_clusters_are_those_of_the_table(tmp_path):
    own = make_own(tmp_path)
    text = (own / "clusters.csv").read_text(encoding="utf-8").replace(",6,1.50", ",9,1.50", 1)
    (own / "clusters.csv").write_text(text.replace("\n5,no,", "\n5,yes,"), encoding="utf-8")
    axis = figures.class_sizes(of_folder(own)).axes[0]
    known, new = ([row[1] for row in dots.get_offsets().tolist()] for dots in axis.collections)
    assert (known, new) == ([9, 6, 6], [6, 6, 6]) and axis.get_ylabel().startswith("rows")
    (own / "clusters.csv").write_text(text.replace(",yes,", ",no,"), encoding="utf-8")
    axis = figures.class_sizes(of_folder(own)).axes[0]
    assert [label.get_text() for label in axis.get_legend().get_texts()] == ["new"]


def test_a_map_without_a_second_direction_has_numbers():
    assert np.isfinite(figures.tsne(np.eye(2, 16)[np.arange(400) % 2].astype(np.float16), np.arange(400))[1]).all()


def test_every_gamma_has_a_curve_and_kmeans_no_residual(tmp_path):
    by_gamma = {gamma: [of_folder(out)] for gamma in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
                for out in [make_run(tmp_path, gamma=gamma)]}
    lines = figures.gamma_curves([("demo-LT", by_gamma)], "gamma").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 8
    out = make_run(tmp_path, tag="kmeans_labels")
    assert len(figures.epochs({"folder": out}).axes) == 3
    (out / "log.jsonl").write_text((out / "log.jsonl").read_text().replace("1e-08", "0.0").replace("2e-08", "0.0"))
    assert len(figures.epochs({"folder": out}).axes) == 2


def test_scores_on_dev_are_never_beside_those_on_the_test_set(tmp_path, monkeypatch, capsys):
    out, other = make_run(tmp_path), make_run(tmp_path, 1)
    for folder in ("out", "data"):
        (tmp_path / folder / "dev").mkdir()
    shutil.move(other, tmp_path / "out/dev")  # as README has it; older files do not say that they are of dev
    shutil.move(tmp_path / "data" / other.name, tmp_path / "data/dev")
    other = tmp_path / "out/dev" / other.name
    with pytest.raises(UserError, match="two means"):
        figures.main(["mean", str(out), str(other)])
    figures.main(["mean", str(other)])
    assert "dev with hidden classes" in capsys.readouterr().out
    figures.draw([other])
    assert f"{other}/figures/class_sizes.png\n" in capsys.readouterr().out, "its data folder is found"
    monkeypatch.chdir(tmp_path)
    tagged = make_run(tmp_path, 1, "no_dr")
    figures.main(["keep", str(tagged), str(other)])
    assert capsys.readouterr().out == "results/demo_g4_s1_no_dr.json\nresults/dev/demo_g4_s1.json\n"
    with pytest.raises(UserError, match="differ in no setting"):
        figures.main(["results/demo_g4_s1_no_dr.json", "results/dev/demo_g4_s1.json"])
    tenth = make_run(tmp_path, 1, gamma=10.0)
    shutil.move(tmp_path / "data" / tenth.name, tmp_path / "data/dev")
    figures.main(["keep", str(shutil.move(tenth, tmp_path / "out/dev"))])
    figures.main(["results/dev/demo_g4_s1.json", "results/dev/demo_g10_s1.json"])
    assert capsys.readouterr().out.endswith(f"{tmp_path}/out/dev/figures/gamma.png\n"), "of the data in data/dev"
    (tmp_path / "a").mkdir()
    elsewhere = shutil.move(make_run(tmp_path / "a", 2), tmp_path / "a/out/dev")  # a folder called so that holds no such runs
    (elsewhere / "results.json").write_text((elsewhere / "results.json").read_text().replace("{", '{"on_dev": false, ', 1))
    figures.main(["mean", str(elsewhere)])
    assert "hidden classes" not in capsys.readouterr().out
    shutil.move(out, tmp_path / "out/best")
    with pytest.raises(UserError, match="no table would find .*demo_g4_s0"):
        figures.main(["keep", str(tmp_path / "out/best")])


def test_a_corpus_that_the_list_lacks_is_said(tmp_path):
    results = tmp_path / "mybank_g4_s0.json"
    results.write_text((make_run(tmp_path) / "results.json").read_text().replace('"dataset": "demo"', '"dataset": "mybank"'))
    for call in (lambda: figures.draw([results]), lambda: figures.read_kept(tmp_path)):
        with pytest.raises(UserError, match="mybank, which CORPORA"):
            call()


def test_kmeans_is_told_once_in_a_mean(tmp_path, capsys):
    out = make_run(tmp_path)
    results = json.loads((out / "results.json").read_text())
    results |= {"method": "kmeans", "config": results["config"] | {"semi_supervised": False, "features": "raw"}}
    results |= {row: {**SCORES, "ACC": acc} for row, acc in (("test_kmeans", 51.0), ("ss_kmeans_raw", 71.0))}
    (out / "results.json").write_text(json.dumps(results))
    figures.print_mean([out])
    head, *rows, _ = capsys.readouterr().out.splitlines()[2:]
    assert [row[:35].split("  ")[0] for row in rows] == ["k-means, raw features", "k-means, raw features, protocol T",
                                                         "semi-supervised k-means, raw"]
    assert len({len(row) for row in (head, *rows)}) == 1
    assert [float(re.findall(r"\d+\.\d+", row)[0]) for row in rows] == [
        60.0, 51.0, 71.0]


def test_two_encoders_are_told_apart_in_pictures(tmp_path, capsys):
    outs = [make_run(tmp_path / encoder, seed, tag) for encoder in ("minilm", "other") for seed, tag in ((0, ""), (0, "no_dr"))]
    runs = [{**figures.read_results(out), "folder": out, "encoder": f"models/{out.parts[-3]}"} for out in outs]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "tag_dots", lambda given, _: found.extend(given) or figures.panels()[0])
        figures.draw_comparisons(runs)
    assert [title for title, _ in found] == ["demo-LT, gamma 4\nminilm", "demo-LT, gamma 4\nother"]
    for run in runs[1::2]:
        run["seed"] = 1
    capsys.readouterr()
    figures.draw_comparisons(runs)
    assert "tag: runs of demo-LT, gamma 4, minilm, demo-LT, gamma 4, other left out" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    one_line_error(script("figures.py", tmp_path / "nowhere", ok=False), "nowhere", "no run", "usage")
    one_line_error(script("figures.py", make_run(tmp_path), tmp_path, ok=False), str(tmp_path), "no run")
    assert not (tmp_path / "out/demo_g4_s0/figures").exists(), "nothing is drawn before every folder is looked at"
    one_line_error(script("figures.py", ok=False), "usage")
    one_line_error(script("figures.py", "mean", ok=False), "usage")
    other, own = make_run(tmp_path, omega=0.1, gamma=10.0), make_own(tmp_path)
    one_line_error(script("figures.py", "mean", tmp_path / "out/demo_g4_s0", other, ok=False), "gamma 4.0, 10.0")
    one_line_error(script("figures.py", "mean", *2 * [tmp_path / "out/demo_g4_s0"], ok=False), "each seed once")
    half = make_run(tmp_path, 1, known_ratio=0.5)
    one_line_error(script("figures.py", "mean", tmp_path / "out/demo_g4_s0", half, ok=False), "known_ratio 0.75, 0.5")
    less = make_run(tmp_path, 1, omega=0.1)
    one_line_error(script("figures.py", "mean", tmp_path / "out/demo_g4_s0", less, ok=False), "omega 0.5, 0.1")
    for command in ("mean", "keep"):
        one_line_error(script("figures.py", command, own, ok=False, cwd=tmp_path), "no test scores")
    assert not list(tmp_path.rglob("mine_s0.json"))
    for text, word in (("[1]", "damaged"), ('{"test": null}', "no test scores"), ('{"test": {"ACC": 1}}', "no 'dataset'")):
        (tmp_path / "old.json").write_text(text)
        one_line_error(script("figures.py", "mean", tmp_path / "old.json", ok=False), "old.json", word)


def test_several_runs_are_compared_where_they_differ(tmp_path):
    outs = [make_run(tmp_path, seed) for seed in (0, 1)]
    outs += [make_run(tmp_path, seed, f"omega{omega}", omega=omega) for omega in (0.1, 0.9) for seed in (0, 1)]
    outs += [make_run(tmp_path, 0, "l1", lambda2=1.0), make_run(tmp_path, 0, "no_dr"), make_run(tmp_path, gamma=10.0),
             make_run(tmp_path, known_ratio=0.5)]
    kept = [of_folder(out) for out in outs]
    same = "dataset gamma known_ratio labeled_ratio encoder omega lambda2".split()
    assert [{value: len(group) for value, group in by_value.items()} for key, how in
            (("omega", None), ("lambda2", None), ("known_ratio", None), ("tag", same), ("gamma", ["dataset"]))
            for _, by_value in figures.varied(kept, key, how)] == [
        {0.1: 2, 0.5: 2, 0.9: 2}, {1.0: 1, 2.0: 2}, {0.5: 1, 0.75: 2}, {"": 2, "no_dr": 1}, {4.0: 9, 10.0: 1}]
    for out in outs:  # the pictures of single runs have been looked at above
        (out / "log.jsonl").unlink()
        (out / "test_feature.npy").unlink()
        (out / "test_pred.npy").unlink()
    figures.draw(outs)
    drawn = tmp_path / "out/figures"
    assert {path.name for path in drawn.iterdir()} == {"omega.png", "lambda2.png", "known_ratio.png", "tag.png", "gamma.png"}
    assert all(map(is_picture, drawn.iterdir()))


def test_kept_results_alone_give_the_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept = [str(path) for name in ("clinc_g10_s0.json", "clinc_g10_s0_omega*.json") for path in (REPO / "results").glob(name)]
    figures.main(kept)
    assert [str(path) for path in Path().rglob("*.*")] == ["out/figures/omega.png"]
    drawn, axis = [], figures.setting_curves
    monkeypatch.setattr(figures, "setting_curves", lambda found, key: drawn.append(found) or axis(found, key))
    figures.main([*kept, *(str(REPO / f"results/clinc_g10_s{seed}.json") for seed in (1, 2))])  # of one value alone
    (_, by_value), = drawn[0]
    assert len(by_value) == 5 and {tuple(run["seed"] for run in runs) for runs in by_value.values()} == {(0,)}
    with pytest.raises(UserError, match="differ in no setting"):
        figures.main(kept[:1])
    capsys.readouterr()
    figures.main([kept[-1], str(REPO / "results/clinc_g10_s1.json")])
    assert "left out, since no seed has all values" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run"):
        figures.main([*kept, str(REPO / "results/bench_rot.json")])


def test_tags_are_named_after_their_method(tmp_path):
    for method, names in (("imbanid", ["ImbaNID", "w/o DR"]), ("kmeans", ["k-means", "no_dr"])):
        runs = [{**figures.read_results(make_run(tmp_path / method, tag=tag)), "folder": tmp_path, "method": method}
                for tag in ("", "no_dr")]
        figure = figures.tag_dots(figures.varied(runs, "tag", ["method"]), "tag")
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names


def test_seeds_alone_are_nothing_to_compare(tmp_path):
    runs = [{**figures.read_results(make_run(tmp_path, seed)), "folder": tmp_path} for seed in (0, 1)]
    assert not any(figures.varied(runs, key) for key in ("omega", "lambda2", "known_ratio", "tag", "gamma"))


def test_curves_and_bars_show_mean_and_deviation(tmp_path):
    runs = [{**figures.read_results(make_run(tmp_path, seed, f"o{omega}", omega=omega)), "folder": tmp_path}
            for omega in (0.1, 0.5) for seed in (0, 1)]
    for run, acc in zip(runs, (50, 60, 70, 90)):
        run["test"] = {**SCORES, "ACC": acc}
    figure = figures.setting_curves(figures.varied(runs, "omega"), "omega")
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [0.1, 0.5] and line.get_ydata().tolist() == [55, 80]
    ends = [segment[:, 1].tolist() for segment in figure.axes[0].collections[0].get_segments()]
    np.testing.assert_allclose(ends, [[55 - 50 ** 0.5, 55 + 50 ** 0.5], [80 - 200 ** 0.5, 80 + 200 ** 0.5]])


def test_a_setting_is_tabled_on_the_seeds_that_all_its_values_have(tmp_path):
    outs = [make_run(tmp_path, seed, f"o{omega}", omega=omega) for omega, seed in ((0.1, 0), (0.1, 1), (0.5, 1), (0.5, 2))]
    for out, acc in zip(outs, (50, 60, 70, 90)):
        results = figures.read_results(out)
        results["test"]["ACC"] = acc
        figures.write_atomic(tmp_path / f"{out.name}.json", json.dumps(results))
    found = [line.split(" | ")[:6] for line in figures.settings_table(tmp_path).splitlines()[2:]]
    head = ["| omega", "demo-LT, gamma 4"]
    assert found == [[*head, "0.1", "6", "1", "60.00"], [*head, "0.5", "6", "1", "70.00"]]


def test_a_setting_is_compared_with_the_main_tables_runs_of_its_seeds(tmp_path):
    for (tag, omega), scores in {("", 0.5): (70, 80, 90), ("o", 0.1): (60, 74)}.items():
        for seed, acc in enumerate(scores):
            results = figures.read_results(make_run(tmp_path, seed, f"x{tag}", omega=omega)) | {"tag": tag}
            results["test"]["ACC"], results["test_kmeans"] = acc, SCORES | {"ACC": 40}
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_x{tag}.json", json.dumps(results))
    rows = [line.strip("| ").split(" | ") for line in figures.settings_table(tmp_path).splitlines()[2:]]
    p = ttest_rel((60, 74), (70, 80)).pvalue
    assert [row[-3:-1] for row in rows] == [[f"-8.0 (p {p:.2g})", "+0.0"], ["", ""]]


def test_older_results_have_the_dtype_of_their_pretraining(tmp_path):
    runs = [figures.read_results(make_run(tmp_path, seed, tag, dtype=dtype))
            for seed, tag, dtype in ((0, "", "bfloat16"), (1, "", "bfloat16"), (0, "f", "float32"))]
    del runs[0]["config"]["dtype"]
    (_, by_value), = figures.varied(runs, "dtype")
    assert {value: len(group) for value, group in by_value.items()} == {"bfloat16": 2, "float32": 1}
    assert not figures.varied(runs, "num_classes")


def test_runs_of_two_trained_layers_are_not_compared_with_those_of_one(tmp_path):
    two = {"pretrain": {"dtype": "bfloat16", "trained_layers": 2}}
    runs = [figures.read_results(make_run(tmp_path, 0, tag, **settings)) for tag, settings in
            (("two_layers", two), ("", {"pretrain": {"dtype": "bfloat16"}}), ("o0.1", {"omega": 0.1}))]  # "" is older
    (_, by_value), = figures.varied(runs, "omega")
    assert {value: [run["tag"] for run in group] for value, group in by_value.items()} == {0.1: ["o0.1"], 0.5: [""]}
    (_, by_value), = figures.varied(runs, "trained_layers")
    assert {value: [run["tag"] for run in group] for value, group in by_value.items()} == {1: [""], 2: ["two_layers"]}


def test_flags_that_are_set_together_are_one_setting(tmp_path):
    alone = {"lr": 5e-5, "head_lr": 5e-4, "epochs": 6, "max_steps": 400}
    runs = [figures.read_results(make_run(tmp_path, 0, tag, **{**alone, **settings})) for tag, settings in
            (("", {}), ("lr3", {"lr": 1.5e-4, "head_lr": 1.5e-3}), ("long", {"epochs": 20, "max_steps": 1000}))]
    for key, tag in (("lr", "lr3"), ("epochs", "long")):
        (_, by_value), = figures.varied(runs, key)
        assert [[run["tag"] for run in group] for group in by_value.values()] == [[""], [tag]]


def test_compared_methods_have_settings_of_their_own(tmp_path):
    """Such a run holds a fingerprint of its data, and no pre-training where the method has its own."""
    runs = [figures.read_results(make_run(tmp_path, seed, known_ratio=known, pretrain=None, data=f"{seed}{known}"))
            | {"method": "gcd"} for seed in (0, 1) for known in (0.5, 0.75)]
    del runs[0]["config"]["dtype"]
    (_, by_value), = figures.varied(runs[1:], "known_ratio")
    assert {value: len(group) for value, group in by_value.items()} == {0.5: 1, 0.75: 2}
    assert figures.varied(runs[:1], "omega") == []


def test_the_best_of_the_six_is_named_where_all_six_are_there(tmp_path):
    six = [*figures.PAPER_METHODS]
    for method, settings in [(method, {}) for method in ("imbanid", *six)] + [
            ("kmeans", {"semi_supervised": ss, "features": of}) for ss, of in ((0, "raw"), (1, "raw"), (1, "pretrained"))]:
        results = figures.read_results(make_run(tmp_path / f"{len(list(tmp_path.iterdir()))}", 0, gamma=10.0, **settings))
        results |= {"dataset": "clinc", "method": method, "test_kmeans": SCORES,
                    "test": {**SCORES, "ACC": 70.0 + (method == six[2])}}
        figures.write_atomic(tmp_path / f"clinc_g10_s0_{method}_{'_'.join(map(str, settings.values()))}.json",
                             json.dumps(results))
    row, = figures.headline_table(tmp_path).splitlines()[2:]
    assert f" 71.0 ({figures.METHODS[six[2]]}) " in row
    other = figures.read_results(tmp_path / "clinc_g10_s0_imbanid_.json") | {"encoder": "hub/larger"}
    for seed, shown in ((1, False), (0, True)):  # on the seeds of the others alone
        other["seed"], other["test"] = seed, SCORES | {"ACC": 88.0 - seed}
        figures.write_atomic(tmp_path / f"clinc_g10_s{seed}_imbanid__larger.json", json.dumps(other))
        head, _, more = figures.headline_table(tmp_path).splitlines()
        assert ("| ImbaNID, here | ImbaNID, larger |" in head) == shown
        assert more == (row.replace("| **70.0** |", "| **70.0** | 88.0 |") if shown else row)
    again = next(tmp_path.glob("*kmeans_0_raw.json"))
    (tmp_path / "clinc_g10_s0_zz.json").write_text(again.read_text())
    with pytest.raises(UserError, match="two runs of k-means, raw features"):
        figures.headline_table(tmp_path)
    (tmp_path / "clinc_g10_s0_zz.json").unlink()
    demo = tmp_path / "of_demo"  # a corpus that the paper has no figures of
    demo.mkdir()
    for file in tmp_path.glob("clinc_g10_s0_*.json"):
        figures.write_atomic(demo / file.name.replace("clinc", "demo"), file.read_text().replace('"clinc"', '"demo"'))
    assert "| **70.0** | 88.0 |  | 71.0 " in figures.headline_table(demo)
    next(tmp_path.glob(f"*{six[2]}_.json")).unlink()
    assert figures.headline_table(tmp_path) == ""


def test_an_ablation_is_tested_against_the_same_seeds_unless_they_all_differ_alike(tmp_path):
    scores = figures.read_results(make_run(tmp_path))["test"] | {"tail": 60.0}
    for tag, acc in (("", (83.6, 85.7778, 85.2)), ("no_dr", (82, 83, 85)), ("no_qr", (83.7, 85.8778, 85.3)),
                     ("no_cwcl", (80,))):
        for seed, value in enumerate(acc):
            results = figures.read_results(make_run(tmp_path, seed, tag or "usual"))
            results |= {"dataset": "clinc", "gamma": 10.0, "tag": tag, "test": scores | {"ACC": value}, "ss_kmeans_raw": scores}
            results["config"]["dataset"] = "clinc"
            figures.write_atomic(tmp_path / f"clinc_g10_s{seed}_{tag}.json", json.dumps(results))
    rows = [line.strip("| ").split(" | ") for line in figures.ablation_table(tmp_path).splitlines()[2:]]
    found = {row[0]: row[-1] for row in rows}
    p = ttest_rel((83.6, 85.7778, 85.2), (82, 83, 85)).pvalue
    assert found["ImbaNID"] == "84.86" and found["w/o DR"] == f"83.33, -1.53 (p {p:.2g})"
    assert found["w/o QR"] == "84.96, +0.10 (each)" and found["w/o CWCL"] == "80.00" and found["w/ COT"] == "not run"
    under_t = dict(line.strip("| ").split(" | ") for line in figures.ablation_t_table(tmp_path).splitlines()[2:])
    assert under_t["w/o DR"] == f"{results['test_kmeans']['ACC']:.2f}" and under_t["w/ COT"] == "not run"


def test_methods_are_compared_on_the_seeds_they_share_and_on_all_that_imbanid_has(tmp_path):
    for seed, ours, kmeans in ((0, 80, 60), (1, 70, 64), (2, 75, 62)):
        results = figures.read_results(make_run(tmp_path, seed))
        results |= {"test_kmeans": SCORES, "epochs": 3}
        results["config"] |= {"pretrain": {"epochs": 30}, "features": "raw", "semi_supervised": False}
        for method, acc in (("imbanid", ours), ("kmeans", kmeans), *[("gcd", 70)] * (seed == 0)):
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}.json",
                                 json.dumps(results | {"method": method, "test": SCORES | {"ACC": acc}}))
    found = [line.strip("| ").split(" | ")[2:5] for line in figures.methods_table(tmp_path).splitlines()[2:]]
    assert found == [["k-means, raw features", "0", "60.00"], ["GCD", "0", "70.00"], ["ImbaNID", "0", "80.00"],
                     ["k-means, raw features", "0 1 2", "62.00"],
                     ["ImbaNID", "0 1 2", "75.00"]]
    found = [line.strip("| ").split(" | ") for line in figures.overview_table(tmp_path).splitlines()]
    t = f"{SCORES['ACC']:.1f}"  # under T all are alike
    assert [found[0][2:], *found[2:]] == [["seeds", "k-means, raw features", "GCD", "ImbaNID"], [
        *found[2][:2], "0", f"60.0 / **{t}**", f"70.0 / **{t}**", f"**80.0** / **{t}**"]], "the seed that all have, once"
    found = [line.strip("| ").split(" | ") for line in figures.groups_table(tmp_path).splitlines()]
    groups = f"**{SCORES['head']:.1f}** / **{SCORES['medium']:.1f}** / -"  # these have no tail
    assert [found[0][0], found[2][2:]] == ["head / medium / tail", ["0", *3 * [groups]]] and len(found) == 3
    leads = [line.strip("| ").split(" | ")[2:] for line in figures.leads_table(tmp_path).splitlines()]
    assert leads[0][:4] == ["seeds", "C, the six", "C, k-means", "tail (C), the six"]
    assert leads[2:] == [["0", "+10.0 (GCD)", "+20.0 (raw)", "-", "-", "+0.0 (GCD)", "+0.0 (raw)"]]
    for path in tmp_path.glob("*_imbanid.json"):  # the same of another encoder, whose rows are named after it
        (tmp_path / path.name.replace("imbanid", "imbanid_other")).write_text(
            path.read_text().replace('"encoder": "minilm"', '"encoder": "hub/other"'))
    (tmp_path / "demo_g4_s0_gcd_other.json").write_text(
        (tmp_path / "demo_g4_s0_gcd.json").read_text().replace('"encoder": "minilm"', '"encoder": "hub/other"'))
    for table in (figures.methods_table, figures.overview_table, figures.groups_table, figures.leads_table):
        assert {line.strip("| ").split(" | ")[0] for line in table(tmp_path).splitlines()[2:]} == {"demo-LT", "demo-LT, other"}
    for path in {*tmp_path.glob("*_gcd*.json"), *tmp_path.glob("*_other.json")}:
        path.unlink()
    p = ttest_rel((80, 70, 75), (60, 64, 62)).pvalue
    assert figures.leads_table(tmp_path).splitlines()[2].split(" | ")[2:] == [
        "0 1 2", "-", f"+13.0 (raw; p {p:.2g})", "-", "-", "-", "+0.0 (raw) |"]
    path = tmp_path / "demo_g4_s1_imbanid.json"
    path.write_text(path.read_text().replace('"omega": 0.5', '"omega": 0.9'))
    for table in (figures.methods_table, figures.overview_table, figures.results_table):
        with pytest.raises(UserError, match="imbanid on demo differ in more than the seed .omega 0.5, 0.9"):
            table(tmp_path)


def test_a_method_with_the_labelled_rows_held_is_a_row_of_its_own_where_all_its_runs_have_it(tmp_path):
    for seed, missing in ((0, False), (1, False), (2, True)):
        for method, acc in (("imbanid", 80), ("gcd", 64), ("usnid", 60 + seed)):
            results = figures.read_results(make_run(tmp_path / f"{method}{seed}", seed))
            results |= {"method": method, "test": SCORES | {"ACC": acc}, "epochs": 3}
            if method == "usnid" and not missing:
                results["test_held"] = SCORES | {"ACC": 70 + seed}
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}.json", json.dumps(results))
    assert "labels held" not in figures.methods_table(tmp_path) + figures.leads_table(tmp_path)
    for path in tmp_path.glob("demo_g4_s2_*.json"):
        path.unlink()
    found = [line.strip("| ").split(" | ")[2:5] for line in figures.methods_table(tmp_path).splitlines()[2:]]
    assert found[1:3] == [["USNID", "0 1", "60.50"], ["USNID, labels held", "0 1", "70.50"]]
    assert "+9.5 (USNID, labels held" in figures.leads_table(tmp_path)
    assert "labels held" not in figures.overview_table(tmp_path)


def test_ends_on_the_same_features_stand_beside_each_other(tmp_path):
    for seed in (0, 1):
        for method, ends in (("imbanid", {"test": 80 + seed}), ("gcd", {"test": 64, "test_seeded": 70 + 2 * seed}),
                             ("usnid", {"test": 60, "test_held": 65, "test_seeded": 69}), ("dpn", {"test": 50}),
                             ("kmeans", {"test": 40, "test_seeded": 90})):
            results = figures.read_results(make_run(tmp_path / f"{method}{seed}", seed))
            results["config"] |= {"features": "raw", "semi_supervised": True}
            results |= {"method": method} | {end: SCORES | {"ACC": acc} for end, acc in ends.items()}
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}.json", json.dumps(results))
    ends, leads = figures.ends_tables(tmp_path).split("\n\n")
    (head, _, row), (_, _, ahead) = ([line.strip("| ").split(" | ") for line in table.splitlines()] for table in (ends, leads))
    assert head[3:] == ["semi-sup. k-means, raw features", "GCD", "USNID", "ImbaNID"]
    assert row[2:] == ["0 1", "40.0 / - / 90.0", "64.0 / - / 71.0", "60.0 / 65.0 / 69.0", "80.5"]
    p = [ttest_rel((80, 81), other).pvalue for other in ((90, 90), (70, 72), (69, 69))]
    assert ahead[3:] == [f"-9.5 (p {p[0]:.2g})", f"+9.5 (p {p[1]:.2g})", f"+11.5 (p {p[2]:.2g})"]


def test_a_method_of_ones_own_is_tabled_and_is_none_of_the_six(tmp_path):
    for method, acc in (("imbanid", 80), ("gcd", 60), ("mine", 70)):
        results = figures.read_results(make_run(tmp_path / method, 0)) | {"method": method, "test": SCORES | {"ACC": acc}}
        figures.write_atomic(tmp_path / f"demo_g4_s0_{method}.json", json.dumps(results))
        if method == "mine":
            figures.write_atomic(tmp_path / "demo_g4_s0_mine_t.json", json.dumps(results | {"tag": "t"}))
    assert "| GCD | ImbaNID | mine |" in figures.overview_table(tmp_path)
    assert "+20.0 (GCD)" in figures.leads_table(tmp_path) and "mine" not in figures.leads_table(tmp_path)
    assert "| mine |" in figures.other_settings_table(tmp_path)
    (tmp_path / "demo_g4_s0_mine.json").rename(tmp_path / "demo_g4_s5_mine.json")
    run = json.loads((tmp_path / "demo_g4_s5_mine.json").read_text())
    (tmp_path / "demo_g4_s5_mine.json").write_text(json.dumps(run | {"seed": 5}))
    assert [seeds for _, seeds, _ in figures.compared(tmp_path)] == [[0]], "it does not take seeds from the others"
    assert figures.left_out(tmp_path) == ["mine on demo, gamma 4, minilm"]
    assert "| GCD | ImbaNID |" in figures.overview_table(tmp_path)


def test_ablations_are_compared_within_one_encoder(tmp_path):
    for encoder, tag, acc, seeds in (("minilm", "", 80, 1), ("minilm", "no_dr", 79, 1), ("minilm", "no_qr", 78, 1),
                                     ("zz", "", 55, 5), ("zz", "no_dr", 59, 1)):
        for seed in range(seeds):  # the encoder with most ablations, not with most runs
            results = figures.read_results(make_run(tmp_path / f"{encoder}{tag}{seed}", seed, tag or "usual"))
            results |= {"dataset": "clinc", "gamma": 10.0, "tag": tag, "encoder": encoder, "test": SCORES | {"ACC": acc}}
            figures.write_atomic(tmp_path / f"clinc_g10_s{seed}_{tag}_{encoder}.json", json.dumps(results))
    table = figures.ablation_table(tmp_path)
    assert " 80.00 |" in table and " 79.00 |" in table and "55.00" not in table


def test_a_mean_names_the_tag(tmp_path, capsys):
    for tag in ("usual", "no_dr"):
        out = make_run(tmp_path, 0, tag)
        results = figures.read_results(out) | {"peak_memory_mb": 1000.0}
        results["test"] = SCORES | {"tail": 50.0}
        results |= dict.fromkeys(("kmeans_raw", "ss_kmeans_raw", "test_kmeans"), results["test"])
        (out / "results.json").write_text(json.dumps(results))
        figures.main(["mean", str(out)])
        said = capsys.readouterr().out
        assert f"gamma 4, {tag}, encoder minilm" in said and "1.0 minutes a run, all its stages, peak memory 1.0 GB" in said
    other = results | {"seed": 1, "config": results["config"] | {"pretrain": {"trained_layers": 2, "weights": "b"}}}
    results["config"]["pretrain"] = {"trained_layers": 1, "weights": "a"}
    for name, run in (("a", results), ("b", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"pretrain.py --trained_layers 1, 2"):
        figures.main(["mean", str(tmp_path / "a.json"), str(tmp_path / "b.json")])


def test_a_run_of_another_encoder_is_kept_beside_the_first_and_never_over_one(tmp_path, monkeypatch):
    out = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    first = (out / "results.json").read_text()

    def keep(encoder):
        (out / "results.json").write_text(first.replace('"minilm"', f'"{encoder}"'))
        figures.main(["keep", str(out)])
        return {path.name: json.loads(path.read_text())["encoder"] for path in sorted(Path("results").iterdir())}

    alone = {f"{out.name}.json": "minilm"}
    assert keep("minilm") == alone
    both = alone | {f"{out.name}_b.json": "a/b"}
    assert keep("a/b") == both and keep("a/b") == both and keep("minilm") == both
    with pytest.raises(UserError, match="of encoder a/b, .* of c/b: remove the file"):
        keep("c/b")
    assert keep("minilm") == both
    monkeypatch.chdir(out)
    figures.main(["keep", "."])
    assert [path.name for path in Path("results").iterdir()] == [f"{out.name}.json"]


def test_runs_on_dev_are_kept_apart_and_tabled_beside_the_defaults(tmp_path, monkeypatch):
    folders = []
    for tag, flags, acc in (("default", {}, (80, 70)), ("tau1", {"tau": 1.0}, (81, 72)), ("no_mlm", {}, (79, 69)),
                            ("alone", {"tau": 2.0}, ())):
        for seed, one in enumerate(acc or (50,), start=0 if acc else 5):
            out = make_run(tmp_path, seed, tag)
            results = json.loads((out / "results.json").read_text())
            config = results["config"] | {"tau": 0.07, "pretrain": {"no_mlm": tag == "no_mlm", "data": seed, "lr": 1}} | flags
            results |= {"dataset": "clinc", "config": config, "test": SCORES | {"ACC": one}, "test_kmeans": SCORES}
            folders.append(tmp_path / "out/dev" / out.name.replace("demo", "clinc"))
            folders[-1].mkdir(parents=True)
            (folders[-1] / "results.json").write_text(json.dumps(results))
    monkeypatch.chdir(tmp_path)
    assert figures.dev_table() == ""
    figures.main(["keep", *map(str, folders)])
    assert {path.name for path in Path("results/dev").iterdir()} == {f"{folder.name}.json" for folder in folders}
    assert not figures.read_kept("results"), "they are no scores on a test set"
    found = [line.strip("|").split("|") for line in figures.dev_table().splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in found] == [
        ["the defaults", "80.0, 70.0", "", ""],
        ["pretrain.py --no_mlm", "79.0, 69.0", "-1.00 (each)", "+0.00"],
        ["--tau 1.0", "81.0, 72.0", "+1.50 (p 0.2)", "+0.00"]], "with a column for each corpus that the means are over"


def test_the_full_schedule_takes_the_place_of_the_short_one_once_all_its_seeds_have_run(tmp_path):
    for method, tag, acc, seeds in (("imbanid", "", 80, (0, 1)), ("gcd", "", 70, (0, 1)), ("gcd", "full", 60, (0, 1)),
                                    ("usnid", "", 50, (0, 1)), ("usnid", "full", 99, (1,)), ("imbanid", "full", 99, (0, 1))):
        for seed in seeds:
            results = figures.read_results(make_run(tmp_path / f"{method}{tag}{seed}", seed))
            results |= {"method": method, "tag": tag, "test": SCORES | {"ACC": acc}, "epochs": 100 if tag else 20}
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}_{tag}.json", json.dumps(results))
    found = [line.strip("| ").split(" | ")[2:5] for line in figures.methods_table(tmp_path).splitlines()[2:]]
    assert found == [["GCD", "0 1", "60.00"], ["USNID", "0 1", "50.00"], ["ImbaNID", "0 1", "80.00"]]
    assert "| +10.0 (GCD, cut short; each) |" in figures.leads_table(tmp_path), "the better of the two is what counts"
    assert "| GCD | USNID | ImbaNID |" in figures.overview_table(tmp_path).splitlines()[0]
    assert [line.strip("| ").split(" | ")[:2] for line in figures.schedules_table(tmp_path).splitlines()[2:]] == [
        ["GCD", "-10.0 (2; each; -10.0 to -10.0)"], ["USNID", "+49.0 (1; +49.0 to +49.0)"]]


def test_other_settings_of_a_method_stand_under_its_usual_ones_on_the_same_seeds(tmp_path):
    results = figures.read_results(make_run(tmp_path))
    for seed, tag, method, acc, epochs in (
            (0, "", "gcd", 50, 20), (1, "", "gcd", 60, 20), (1, "full", "gcd", 64, 100), (2, "full", "gcd", 99, 100),
            (1, "long", "gcd", 66, 200), (1, "older", "gcd", 62, 20), (1, "start", "gcd", 68, 200),
            (1, "half", "usnid", 99, 10), (1, "cot", "imbanid", 99, 3)):
        config = results["config"] | {"seed": seed, "epochs": epochs, "lr": 0.1,
                                      "pretrain": {"epochs": 90 if tag == "start" else 30, "seed": seed}}
        if tag == "older":
            del config["epochs"]  # written before there was the flag
        figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}_{tag}.json", json.dumps(
            results | {"method": method, "tag": tag, "seed": seed, "test": SCORES | {"ACC": acc}, "test_kmeans": SCORES,
                       "epochs": {"pretrain": 1, "last": epochs}, "config": config}))
    found = [line.strip("| ").split(" | ") for line in figures.other_settings_table(tmp_path).splitlines()[2:]]
    assert [(*row[:1], *row[3:6], row[11]) for row in found] == [
        ("GCD", "1", "--epochs 20 pretrain.py --epochs 30", "60.00", "1 + 20"),
        ("GCD", "1", "--epochs 100 pretrain.py --epochs 30", "64.00", "1 + 100"),
        ("GCD", "1", "--epochs 200 pretrain.py --epochs 30", "66.00", "1 + 200"),
        ("GCD", "1", "--epochs 20 pretrain.py --epochs 30", "62.00", "1 + 20"),
        ("GCD", "1", "--epochs 200 pretrain.py --epochs 90", "68.00", "1 + 200")]
    assert figures.other_settings_table(tmp_path / "nothing") == ""


def test_the_papers_figures_of_a_method():
    assert figures.paper_acc("usnid", "stackoverflow", 3) == "86.90" and figures.paper_acc("imbanid", "clinc", 10) == "82.40"
    for nothing in (("kmeans", "clinc", 10), ("gcd", "demo", 10), ("gcd", "clinc", 2)):
        assert figures.paper_acc(*nothing) == ""


def test_confusion_counts_the_matched_classes(tmp_path):
    out = make_run(tmp_path)
    label = np.load(tmp_path / "data/demo_g4_s0/test_label.npy")
    np.save(out / "test_pred.npy", (label + 1) % 6)  # clusters have numbers of their own
    figure = figures.confusion(of_folder(out))
    table = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(table[:6, :6], 100 * np.eye(6))
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()][1] == "plain (novel)", "by training size"


def test_the_tables_do_not_wait_for_matplotlib():
    code = "import sys, figures; figures.main(['table']); sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True).returncode == 0


def test_another_corpus_leaves_the_papers_figures_where_they_are(monkeypatch):
    tables = figures.ablation_table, figures.results_table, figures.methods_table
    before = [table(REPO / "results") for table in tables]
    monkeypatch.setattr(figures, "CORPORA", {"mine": ("MINE-LT", "", {}), **figures.CORPORA})
    assert all(before) and [table(REPO / "results") for table in tables] == before


def test_confusion_has_a_true_class_in_a_row(tmp_path):
    out = make_run(tmp_path)
    found = np.repeat(np.arange(6), 10)
    found[:4] = 1  # four of ten rows of class 0
    np.save(out / "test_pred.npy", found)
    table = figures.confusion(of_folder(out)).axes[0].images[0].get_array()  # classes 0, 4, 1, .. by size
    np.testing.assert_allclose(table[[0, 2]], [[60, 0, 40, 0, 0, 0, 0], [0, 0, 100, 0, 0, 0, 0]])


def test_known_and_novel_classes_of_a_benchmark_are_told_apart(tmp_path):
    run = of_folder(make_run(tmp_path))
    sizes = [dots.get_offsets()[:, 1].tolist() for dots in figures.class_sizes(run).axes[0].collections]
    assert sizes == [[40, 25, 16, 10], [30, 11]], "known, novel"
    figure = figures.tsne_map(run)
    named = [text.get_text().split("(")[1] for text in figure.legends[0].get_texts()]
    assert named == ["40)", "25)", "16)", "10)", "30)", "11)"]
    assert [len(dots.get_facecolors()) for dots in figure.axes[0].collections[1:]] == [1, 1, 1, 1, 0, 0], "hollow"
    curve = figures.gamma_curves([("demo-LT", {4.0: [run]})], "gamma").axes[0].lines[0]
    assert curve.get_ydata().tolist() == [40, 30, 25, 16, 11, 10]


def test_bars_and_dots_are_the_scores(tmp_path):
    runs = [of_folder(make_run(tmp_path, seed, tag, known_ratio=ratio)) for tag, ratio in (("", 0.5), ("no_dr", 0.75))
            for seed in (0, 1)]
    for run, acc in zip(runs, (50, 60, 70, 90)):
        run |= {"test": SCORES | {"ACC": acc}, "test_kmeans": SCORES | {"ACC": 30}}
    axis = figures.ratio_bars([("demo-LT", {0.5: runs[:2], 0.75: runs[2:]})], "known_ratio").axes[0]
    bars = {found.get_label(): found for found in axis.containers if isinstance(found, BarContainer)}
    assert {name: [bar.get_height() for bar in found] for name, found in bars.items()} == {
        "ACC": [55, 80], "NMI": [61, 61], "ARI": [62, 62]}
    ends = [segment[:, 1].tolist() for segment in bars["ACC"].errorbar.lines[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[55 - 50 ** 0.5, 55 + 50 ** 0.5], [80 - 200 ** 0.5, 80 + 200 ** 0.5]])
    axis = figures.tag_dots([("demo-LT", {"": runs[:2], "no_dr": runs[2:]})], "tag").axes[0]
    assert axis.lines[0].get_xdata().tolist() == [55, 80]
    ends = [segment[:, 0].tolist() for segment in axis.collections[0].get_segments()]
    np.testing.assert_allclose(ends, [[55 - 50 ** 0.5, 55 + 50 ** 0.5], [80 - 200 ** 0.5, 80 + 200 ** 0.5]])
    found = {bars.get_label(): bars[0].get_height() for bars in figures.groups(runs[0]).axes[0].containers}
    assert (found["ImbaNID"], found["ImbaNID, protocol T"]) == (50, 30)


def test_a_mean_says_how_long_and_how_large(tmp_path, capsys):
    folders = [make_run(tmp_path, seed) for seed in (0, 1)]
    for folder, minutes, memory in zip(folders, (3, 5), (2000, 1000)):
        results = figures.read_results(folder) | {"peak_memory_mb": memory}
        results["seconds"] = {"pretrain": 60, "train": 60 * minutes - 60}
        results |= dict.fromkeys(("test", "test_kmeans", "kmeans_raw", "ss_kmeans_raw"), SCORES | {"tail": 50.0})
        (folder / "results.json").write_text(json.dumps(results))
    figures.print_mean(folders)
    assert "4.0 minutes a run, all its stages, peak memory 2.1 GB" in capsys.readouterr().out


def test_lambda2_left_to_the_script_is_what_it_takes(tmp_path):
    for gamma, default in ((1.0, 7.0), (4.0, 2.0)):
        runs = [figures.read_results(make_run(tmp_path, 0, tag, gamma=gamma, lambda2=value))
                for tag, value in (("", 0.0), ("l1", 1.0))]
        (_, by_value), = figures.varied(runs, "lambda2")
        assert [*by_value] == [1.0, default]


def test_an_ablation_on_seeds_that_the_whole_method_lacks_has_no_difference():
    one, two = {"test": {"ACC": 60.0}}, {"test": {"ACC": 70.0}}
    runs = {("demo", ""): {0: one}, ("demo", "no_dr"): {0: one, 1: two}}
    assert figures.against_full(runs, "demo", "no_dr", "test") == "65.00"


def test_a_short_schedule_on_fewer_seeds_takes_none_from_the_others(tmp_path):
    for method, tag, acc, seeds in (("imbanid", "", 80, (0, 1, 2)), ("gcd", "full", 60, (0, 1, 2)), ("gcd", "", 70, (0,))):
        for seed in seeds:
            results = figures.read_results(make_run(tmp_path / f"{method}{tag}{seed}", seed))
            results |= {"method": method, "tag": tag, "test": SCORES | {"ACC": acc}, "epochs": 100 if tag else 20}
            figures.write_atomic(tmp_path / f"demo_g4_s{seed}_{method}_{tag}.json", json.dumps(results))
    assert [seeds for _, seeds, _ in figures.compared(tmp_path)] == [[0, 1, 2]]

"""Tables and pictures of finished runs.

Reads   out/<run>/  results.json log.jsonl *.npy  (train_imbanid.py; the tables: results/*.json), clusters.csv assignments.csv
        (predict.py), and data/<run>/ beside out/ for the true classes (make_lt_data.py)
Writes  out/<run>/figures/*.png and report.html; of several runs also out/figures/*.png, where gamma, omega, lambda2, the known
        ratio or the tag differ. The tables go to the screen; `keep` writes results/, which the documents' tables are built from

    python figures.py out/clinc_g10_s0                                             the pictures and the page of a run
    python figures.py out/clinc_g10_s*                                             of each run, and what compares them
    python figures.py mean out/clinc_g10_s0 out/clinc_g10_s1 out/clinc_g10_s2      mean and standard deviation over seeds
    python figures.py keep out/clinc_g10_s0 out/clinc_g10_s1    copy results.json to results/<run>.json, or where that is of
                                                               another encoder beside it, to results/<run>_<encoder>.json;
                                                               of runs on dev to results/dev/ (tests/hide_classes.py)
    python figures.py results/*_g10_s?_omega* results/*_g10_s?.json                what compares kept runs, in out/figures/
    python figures.py table                                                        the documents' tables, in Markdown
    python figures.py table README.md docs/experiments.md baselines/README.md      the same, put in their places
"""
import base64
import html
import json
import math
import os
import re
import sys
import warnings
from collections import Counter
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from make_lt_data import CORPORA, TASK, UserError, own_table, plain_text, read_clusters, run_name, run_script, write_atomic

# The paper's Table 2, ImbaNID's row: {(dataset, gamma): (ACC, NMI, ARI)}.
PAPER = {("clinc", 1): (95.64, 97.26, 91.78), ("clinc", 3): (90.44, 95.60, 85.36),
         ("clinc", 5): (88.04, 94.65, 81.90), ("clinc", 10): (82.40, 93.40, 76.21),
         ("banking", 1): (81.14, 87.66, 70.13), ("banking", 3): (76.72, 86.79, 67.35),
         ("banking", 5): (72.89, 83.60, 61.18), ("banking", 10): (66.59, 81.08, 55.80),
         ("stackoverflow", 1): (88.30, 83.52, 77.06), ("stackoverflow", 3): (87.40, 82.12, 75.09),
         ("stackoverflow", 5): (86.50, 81.42, 73.09), ("stackoverflow", 10): (82.60, 79.78, 71.15)}
PAPER_CORPORA = ("clinc", "banking", "stackoverflow")
# The ACC of its other rows, in the order of PAPER.
PAPER_METHODS = {
    "gcd": (77.50, 73.07, 67.96, 61.91, 58.95, 56.98, 53.41, 46.92, 66.81, 65.30, 59.10, 48.60),
    "deepaligned": (86.49, 81.78, 79.02, 71.47, 64.63, 63.64, 60.06, 54.03, 80.26, 77.10, 78.50, 73.80),
    "clnn": (89.46, 85.42, 79.38, 72.00, 77.22, 75.75, 70.65, 62.63, 82.90, 84.30, 76.70, 76.60),
    "dpn": (89.06, 85.64, 84.49, 77.51, 72.96, 72.27, 61.69, 57.95, 48.09, 85.00, 81.00, 78.30),
    "latentem": (88.99, 84.62, 83.78, 80.22, 74.03, 73.08, 69.51, 65.05, 80.50, 77.40, 79.20, 78.17),
    "usnid": (92.18, 85.33, 82.49, 74.40, 79.92, 75.03, 70.06, 63.15, 86.43, 86.90, 83.00, 78.90)}
# The paper's Table 3, gamma 10: {tag: (title, head medium tail of CLINC, of BANKING, of StackOverflow)}.
ABLATIONS = {
    "": ("ImbaNID", (82.52, 90.67, 71.26, 68.26, 66.05, 65.87, 90.67, 87.25, 81.67)),
    "no_training": ("w/o stage 3: the seeded head", ()),  # --epochs 0
    "no_class_sizes": ("w/o class sizes", ()),  # of the seeding, ours
    "no_swaps": ("w/o moved centres", ()),  # --swaps 0, of the seeding, ours
    "no_label_weight": ("w/o label weight", ()),  # --label_weight 1, of the seeding, ours
    "cot": ("w/ COT", (72.74, 87.44, 58.67, 62.72, 63.11, 48.70, 86.63, 85.75, 79.67)),
    "eot": ("w/ EOT", (81.41, 83.00, 65.33, 66.59, 65.40, 57.61, 90.00, 86.11, 81.60)),
    "mot": ("w/ MOT", (69.33, 57.67, 30.52, 62.07, 57.34, 26.20, 88.97, 66.00, 64.33)),
    "kmeans_labels": ("w/ k-means", ()),  # the paper's Sec. 4.8 has no figures; kmeans is a method's folder
    "no_dr": ("w/o DR", (80.74, 88.57, 71.21, 67.17, 65.08, 49.67, 88.33, 86.75, 81.33)),
    "no_qr": ("w/o QR", (82.50, 88.94, 70.52, 63.91, 65.42, 59.02, 87.67, 86.00, 81.57)),
    "no_dr_qr": ("w/o DR and QR", (81.19, 87.19, 71.05, 67.50, 64.88, 50.00, 88.33, 86.51, 80.33)),
    "no_adaptive_weight": ("w/o adaptive weight", (82.37, 90.22, 71.11, 68.18, 65.81, 64.57, 90.30, 87.00, 79.67)),
    "no_cwcl": ("w/o CWCL", (81.93, 90.11, 70.81, 67.83, 66.03, 58.70, 90.33, 85.22, 78.00)),
    "no_iwcl": ("w/o IWCL", (81.78, 86.44, 71.23, 65.54, 64.22, 65.20, 90.51, 76.75, 80.33))}
METHODS = {"kmeans": "k-means", "gcd": "GCD", "deepaligned": "DeepAligned", "clnn": "MTP-CLNN", "dpn": "DPN",
           "latentem": "LatentEM", "usnid": "USNID", "imbanid": "ImbaNID"}
ROWS = (("ImbaNID", "test"), ("ImbaNID, protocol T", "test_kmeans"), ("k-means, raw features", "kmeans_raw"),
        ("semi-supervised k-means, raw", "ss_kmeans_raw"), ("k-means, pre-trained features", "kmeans_pretrained"))
COLUMNS = ("ACC", "NMI", "ARI", "known", "novel", "head", "medium", "tail")
GROUPS = COLUMNS[-3:]
METHOD_COLUMNS = (*(f"{c} (C)" for c in COLUMNS[:5]), "ACC (T)", "epochs", "seconds")
HELD = ", labels held"  # behind a method's title: its features, with GCD's end instead of its own under C
CUT = ", cut short"  # likewise: on a shorter schedule than the published one, whose runs have the tag "full"
KEPT = "*_g*_s*"  # what a run's folder, and its file in results/, are called
GB = 2**20 / 1e9  # a "memory_mb" in results/ counts MiB
OF_A_RUN = ("seed", "data", "pretrain", "weights", "dtype", "no_cache")  # what runs over seeds and machines may differ in
WITH_IT = {"lr": "head_lr", "epochs": "max_steps"}  # flags that are set together, in tables of one of them
USAGE = ("usage: figures.py RUN..., figures.py mean RUN..., figures.py keep RUN..., or figures.py table "
         "[DOCUMENT...]; RUN is a folder in out/, or a file in results/")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666")  # Okabe and Ito: safe for all eyes
FONTS = ("Noto Sans CJK SC", "WenQuanYi Zen Hei", "Microsoft YaHei", "Hiragino Sans", "Arial Unicode MS")  # what DejaVu lacks
MAP_ROWS = 3000  # of which t-SNE takes 20 seconds


# ---- tables, a function each; those before own_runs read what they are made of ----

def read_results(path):
    """results.json of a run folder, or a small copy in results/."""
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        run = json.loads(path.read_text())
        if not isinstance(run, dict):
            raise ValueError
        return run
    except FileNotFoundError:
        raise UserError(f"{path} is missing: train_imbanid.py has not finished that run") from None
    except ValueError:
        raise UserError(f"{path} is damaged: delete it and run train_imbanid.py for it again") from None


def of_known_corpus(path, run):
    """The run; UserError where its corpus has no line in CORPORA, as in the checkout of somebody who has added one."""
    if run.get("dataset") not in CORPORA:
        raise UserError(f"{path} is of corpus {run.get('dataset')}, which CORPORA of make_lt_data.py lacks: add its line, or "
                        "leave the file out")
    return run


def on_dev(run, path):
    """Whether a run's test scores are of dev with hidden classes (tests/hide_classes.py): of older files the place tells."""
    home = Path(path).resolve().parent
    return run.get("on_dev", home.name == "dev" and home.parent.name in ("out", "results"))


def in_order(keys):
    """Keys (dataset, gamma, ...) sorted, the corpora in the order of CORPORA."""
    return sorted(keys, key=lambda key: (list(CORPORA).index(key[0]), *key[1:]))


def read_kept(folder, ratios=(0.75, 0.1)):
    """read_results of the runs in results/, by name: those with these known and labelled ratios, None: all."""
    runs = [of_known_corpus(path, read_results(path)) for path in sorted(Path(folder).glob(f"{KEPT}.json"))]
    return [run for run in runs if ratios in (None, (run["config"]["known_ratio"], run["config"]["labeled_ratio"]))]


def grouped(runs, *keys):
    """{(values of these keys): {seed: run}}."""
    groups = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in keys), {})[run["seed"]] = run
    return groups


def settings(run):
    """{flag: value} of a run and, as "pretrain.py --flag", of the pre-training it starts from; OF_A_RUN left out."""
    pretrain = {f"pretrain.py --{flag}": value for flag, value in (run["config"].get("pretrain") or {}).items()
                if flag not in OF_A_RUN}
    return {flag: value for flag, value in run["config"].items() if flag not in OF_A_RUN} | pretrain


def as_flag(flag, value):
    """A setting of `settings` as it is written behind a command."""
    return f"{flag if '--' in flag else f'--{flag}'} {value}"


def changed(first, other):
    """The (flag, value) of the settings `other` that `first` has otherwise; a flag that an older file lacks is none."""
    return [(flag, other[flag]) for flag in first if first[flag] != other.get(flag, first[flag])]


def scores_of(runs, row, column="ACC"):
    """float (S,): one score of a row of results of each of S runs, NaN where a run has no such row or nothing in it."""
    return np.array([run.get(row, {}).get(column) for run in runs], dtype=float)


def spread(runs, row):
    """{column: (mean, standard deviation)} of one row of results over seeds; NaN where any is null.

    UserError where the runs, or the pre-trainings they start from, differ in another setting than the seed.
    """
    first, *others = ({f: run[f] for f in ("dataset", "gamma", "encoder", "method", "tag")} | settings(run) for run in runs)
    for other in others:
        if different := changed(first, other):
            flag, value = different[0]
            raise UserError(f"these runs of {first['method']} on {first['dataset']} differ in more than the seed ({flag} "
                            f"{first[flag]!r}, {value!r}): take their means one by one, and for a table remove some of them "
                            "from results/")
    values = {c: scores_of(runs, row, c) for c in COLUMNS}
    return {c: (v.mean(), v.std(ddof=1) if len(v) > 1 else 0.0) for c, v in values.items()}


def mean_of(runs, row, column="ACC"):
    """The mean of scores_of, of runs that spread takes for comparable."""
    return spread(runs, row)[column][0]


def read_benchmark(path):
    """read_results of a run on a benchmark; UserError for anything else."""
    run = read_results(path)
    if "ACC" not in (run.get("test") or {}):
        raise UserError(f"{path} is no run on a benchmark: it has no test scores")
    for key in ("dataset", "gamma", "seed", "method", "tag", "encoder", "config", "seconds", "peak_memory_mb"):
        if key not in run:
            raise UserError(f"{path} has no {key!r}, as runs of this version have: leave it out, or run it anew")
    return run


def print_mean(folders):
    runs = [read_benchmark(folder) for folder in folders]
    first, rows = runs[0], {}
    for title, key in ROWS:
        if key in first:
            rows.setdefault(title.replace("ImbaNID", method_title(first)), spread(runs, key))  # k-means itself is twice there
    if len({run["seed"] for run in runs}) < len(runs):
        raise UserError("a mean over seeds has each seed once")
    of_dev = {on_dev(run, folder) for run, folder in zip(runs, folders)}
    if len(of_dev) > 1:
        raise UserError("some of these runs are scored on the test set, others on dev with hidden classes: take two means")
    several = len(runs) > 1  # one seed has no deviation
    where = (first["tag"] and f"{first['tag']}, ") + ("dev with hidden classes, " if True in of_dev else "")
    print(f"\n{first['dataset']}, gamma {first['gamma']:g}, {where}encoder {first['encoder']}, "
          + (f"seeds {' '.join(str(run['seed']) for run in runs)}: mean and standard deviation, percent" if several else
             f"seed {first['seed']}, percent"))
    width = max(map(len, rows)) + 1
    print(" " * width + "".join(f"{c:>{14 if several else 9}}" for c in COLUMNS))
    for title, scores in rows.items():
        print(title.ljust(width)
              + "".join(f"{mean:8.2f} ±{sd:4.2f}" if several else f"{mean:9.2f}" for mean, sd in scores.values()))
    minutes = np.array([sum(run["seconds"].values()) for run in runs]) / 60
    memory = max(run["peak_memory_mb"] for run in runs) * GB
    print(f"{minutes.mean():.1f} minutes a run, all its stages, peak memory {memory:.1f} GB")


def markdown(columns, rows):
    """A table in Markdown, "" without rows: make_tables then leaves it out."""
    if not rows:
        return ""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))


def with_encoder(title, encoder):
    """title, with the encoder where it is another than the one of most tables, which these therefore do not name."""
    return title if encoder == "minilm" else f"{title}, {Path(encoder).name}"


def own_runs(folder):
    """{(dataset, gamma, encoder): {seed: run}} of ImbaNID itself, no ablation and no other setting."""
    return grouped((run for run in read_kept(folder) if run["method"] == "imbanid" and not run["tag"]),
                   "dataset", "gamma", "encoder")


def results_table(folder="results"):
    """README's table in Markdown: our mean over seeds beside the paper's, built from results/*.json."""
    groups = own_runs(folder)
    columns = ("corpus", "gamma", "encoder", "seeds", "ACC", "NMI", "ARI", "known", "novel", "ACC (T)",
               "semi-sup. k-means (10 starts), ACC", "k-means, ACC", "paper (BERT) ACC / NMI / ARI", "ours minus it")
    rows = []
    for dataset, gamma, encoder in in_order(groups):
        runs = [*groups[dataset, gamma, encoder].values()]
        ours = spread(runs, "test")
        cells = [CORPORA[dataset][0], f"{gamma:g}", Path(encoder).name, " ".join(str(run["seed"]) for run in runs)]
        cells += [f"{mean:.2f}" + (f" ± {sd:.2f}" if len(runs) > 1 else "")
                  for mean, sd in (ours[c] for c in COLUMNS[:5])]
        cells += [f"{mean_of(runs, row):.2f}" for row in ("test_kmeans", "ss_kmeans_raw", "kmeans_raw")]
        paper = PAPER.get((dataset, gamma), ())
        cells += [" / ".join(f"{value:.2f}" for value in paper),
                  " / ".join(f"{ours[c][0] - value:+.2f}" for c, value in zip(COLUMNS, paper))]
        rows.append(cells)
    return markdown(columns, rows)


def paired_test(ours, others):
    """A paired t-test of scores (S,) of the same seeds: "p 0.04", "each" where all differ alike, else empty."""
    differ = (ours - others).round(9)  # the same on all seeds but for the last bit: no spread to test against
    if len(ours) == 1 or not differ.any():
        return ""
    return f"p {ttest_rel(ours, others).pvalue:.2g}" if np.ptp(differ) else "each"


def ablation_runs(folder):
    """({(dataset, tag): {seed: run}} of ImbaNID and its ablations at gamma 10, the corpora with ablations).

    Of the encoder with most ablations.
    """
    found = [run for run in read_kept(folder) if run["method"] == "imbanid" and run["tag"] in ABLATIONS and run["gamma"] == 10]
    encoders = Counter(run["encoder"] for run in found if run["tag"])
    encoder = max(encoders, key=encoders.get, default=None)
    runs = grouped((run for run in found if run["encoder"] == encoder), "dataset", "tag")
    return runs, [dataset for dataset in CORPORA if any(of == dataset and tag for of, tag in runs)]


def against_full(runs, dataset, tag, row):
    """"84.4, -0.5 (p 0.35)": mean ACC of an ablation under a row of results and, tested on the same seeds, its difference to
    the whole method; without that where there is none or the whole method lacks a seed, and "not run" without a run.
    """
    ablated, full = (runs.get((dataset, of), {}) for of in (tag, ""))
    if not ablated:
        return "not run"
    full = full if full.keys() >= ablated.keys() else ablated
    ours, theirs = (scores_of([side[seed] for seed in ablated], row) for side in (ablated, full))
    p = paired_test(ours, theirs)
    return f"{ours.mean():.2f}" + (f", {(ours - theirs).mean():+.2f} ({p})" if p else "")


def ablation_table(folder="results"):
    """README's ablation table: ours (the paper's) for head, medium and tail at gamma 10, and ACC with a paired t-test, or
    with `each` where the difference is the same on all seeds. Empty without an ablation.
    """
    runs, corpora = ablation_runs(folder)
    if not corpora:
        return ""
    rows = []
    for tag, (title, paper) in ABLATIONS.items():
        cells = [title]
        for dataset in corpora:
            ours = spread([*runs[dataset, tag].values()], "test") if (dataset, tag) in runs else None
            theirs = paper[3 * PAPER_CORPORA.index(dataset):][:3] if dataset in PAPER_CORPORA else ()
            cells += [f"{ours[group][0]:.2f}" + (f" ({value:.2f})" if value else "") if ours else "not run"
                      for group, value in zip_longest(GROUPS, theirs)]
            cells.append(against_full(runs, dataset, tag, "test"))
        rows.append(cells)
    rows.append(["semi-sup. k-means (10 starts), raw features"])
    for dataset in corpora:
        full = [*runs.get((dataset, ""), {}).values()]
        rows[-1] += [f"{mean_of(full, 'ss_kmeans_raw', c):.2f}" if full else "not run" for c in (*GROUPS, "ACC")]
    heads = [f"{CORPORA[dataset][0]} {group}" for dataset in corpora for group in (*GROUPS, "ACC")]
    return markdown(["", *heads], rows)


def ablation_t_table(folder="results"):
    """docs/experiments.md's table of the same ablations under T."""
    runs, corpora = ablation_runs(folder)
    rows = [[title, *(against_full(runs, dataset, tag, "test_kmeans") for dataset in corpora)]
            for tag, (title, _) in ABLATIONS.items()]
    return markdown(("ACC (T)", *(CORPORA[dataset][0] for dataset in corpora)), rows if corpora else [])


def method_place(method):
    """Where a method stands in a table: in the order of METHODS, those that somebody has added behind."""
    return [*METHODS, method].index(method)


def title_place(item):
    """Sorts {method's title: its runs}: methods as in method_place, their variants by title."""
    title, runs = item
    return method_place(runs[0]["method"]), title


def method_title(run):
    title = METHODS.get(run["method"], run["method"])  # one that somebody has added
    if run["method"] == "kmeans":
        title = ("semi-sup. " if run["config"]["semi_supervised"] else "") + title + f", {run['config']['features']} features"
    return title


def by_cell(folder):
    """{(dataset, gamma, encoder): {method's title: {seed: run}}} of results/*.json.

    The runs of tag "full" take the place of a method's others in a cell as soon as they are on all the seeds of those, which
    then follow as CUT. A method all of whose runs in a cell were scored with the labelled rows held as well is there with that
    end a second time.
    """
    found = {}
    for run in read_kept(folder):
        full = run["method"] in PAPER_METHODS and run["tag"] == "full"
        if not run["tag"] or run["method"] == "kmeans" or full:
            cell = found.setdefault((run["dataset"], run["gamma"], run["encoder"]), {})
            title = method_title(run) + full * " in full"
            by_seed = cell.setdefault(title, {})
            if run["seed"] in by_seed:
                raise UserError(f"{folder}/ holds two runs of {title} on {run['dataset']}, gamma {run['gamma']:g}, seed "
                                f"{run['seed']}: remove one of them")
            by_seed[run["seed"]] = run
    for cell in found.values():
        for title in [METHODS[method] for method in PAPER_METHODS]:
            full, others = cell.pop(title + " in full", {}), cell.get(title, {})
            if full and full.keys() >= others.keys():
                cell |= {title: full} | ({title + CUT: others} if others else {})
        cell |= {title + HELD: {seed: run | {"test": run["test_held"]} for seed, run in by_seed.items()}
                 for title, by_seed in cell.items() if all("test_held" in run for run in by_seed.values())}
    return found


def shared_seeds(cell):
    """The seeds that all of METHODS, but for CUT, in a cell of by_cell have; of a cell without one, that all in it have."""
    known = [runs for title, runs in cell.items() if not title.endswith((HELD, CUT))  # HELD has the seeds of its method
             and all(run["method"] in METHODS for run in runs.values())]
    return set.intersection(*map(set, known or cell.values()))


def left_out(folder):
    """What compared leaves out of methods of one's own, in words."""
    return [f"{title} on {dataset}, gamma {gamma:g}, {Path(encoder).name}" for (dataset, gamma, encoder), cell
            in by_cell(folder).items() for title, runs in cell.items()
            if shared_seeds(cell) - runs.keys() and not title.endswith((HELD, CUT))]


def compared(folder, more=False):
    """[((dataset, gamma, encoder), seeds, {method's title: a run for each seed})] of results/*.json, on shared_seeds.

    A method of one's own and one CUT that lack one of these are left out. more: where ImbaNID has more seeds than that, the
    methods that have these too follow once more.
    """
    cells, groups = by_cell(folder), []
    for key in in_order(cells):
        shared, ours = shared_seeds(cells[key]), set(cells[key].get("ImbaNID", ()))
        for seeds in (shared, ours) if more and ours > shared else (shared,):
            by_method = {title: [runs[seed] for seed in sorted(seeds)] for title, runs in cells[key].items()
                         if seeds and runs.keys() >= seeds}
            if len(by_method) > 1:
                groups.append((key, sorted(seeds), dict(sorted(by_method.items(), key=title_place))))
    return groups


def headline_table(folder="results"):
    """README's first table: mean ACC at gamma 10 beside the paper's, the best compared method's and that of k-means.

    Of the encoder with which all of them have been run; ImbaNID's also with others, where these have the same seeds.
    """
    kmeans = "semi-sup. k-means, pretrained features", "semi-sup. k-means, raw features", "k-means, raw features"
    ours, others, rows = own_runs(folder), [METHODS[method] for method in PAPER_METHODS], []
    for (dataset, gamma, encoder), seeds, by_method in compared(folder):
        acc = {title: mean_of(runs, "test") for title, runs in by_method.items()}
        if gamma == 10 and acc.keys() >= {"ImbaNID", *others, *kmeans}:
            best = max((title for title in acc if title.removesuffix(HELD).removesuffix(CUT) in others), key=acc.get)
            more = {other: f"{mean_of([runs[seed] for seed in seeds], 'test'):.1f}" for (*split, other), runs in ours.items()
                    if split == [dataset, gamma] and other != encoder and runs.keys() >= set(seeds)}
            rows.append(([CORPORA[dataset][0], f"**{acc['ImbaNID']:.1f}**"], more,
                         [f"{PAPER[dataset, gamma][0]:.1f}" if (dataset, gamma) in PAPER else "", f"{acc[best]:.1f} ({best})",
                          *(f"{acc[title]:.1f}" for title in kmeans)]))
    encoders = sorted({other for _, more, _ in rows for other in more})
    columns = ["corpus", "ImbaNID, here", *(f"ImbaNID, {Path(other).name}" for other in encoders),
               "ImbaNID, paper (BERT-base)", "best of the six compared methods", *kmeans]
    return markdown(columns, [[*left, *(more.get(other, "-") for other in encoders), *right] for left, more, right in rows])


def overview(folder, numbers):
    """A row of cells for each corpus and gamma, on the seeds that all methods have, and the methods' titles.

    numbers(runs): those of one method's runs, which its cell holds with the best of each in bold.
    """
    groups, rows = compared(folder), []
    titles = list(dict.fromkeys(title for *_, by_method in groups for title in by_method if not title.endswith((HELD, CUT))))
    for (dataset, gamma, encoder), seeds, by_method in groups:
        found = {title: numbers(runs) for title, runs in by_method.items() if title in titles}
        best = [np.max(column) for column in zip(*found.values())]  # unrounded; NaN, and so none, where a method has none
        rows.append([with_encoder(CORPORA[dataset][0], encoder), f"{gamma:g}", " ".join(map(str, seeds))])
        rows[-1] += [" / ".join("-" if np.isnan(x) else f"**{x:.1f}**" if x == top else f"{x:.1f}"
                                for x, top in zip(found.get(title, [np.nan]), best)) for title in titles]
    return rows, titles


def overview_table(folder="results"):
    """README's overview of the compared methods: ACC under C / under T."""
    rows, titles = overview(folder, lambda runs: [mean_of(runs, row) for row in ("test", "test_kmeans")])
    return markdown(("corpus", "gamma", "seeds", *titles), rows)


def groups_table(folder="results"):
    """baselines/README.md's table of the long tail, the paper's figure for gamma 3: ACC under C of head / medium / tail."""
    rows, titles = overview(folder, lambda runs: [mean_of(runs, "test", group) for group in GROUPS])
    rows = [row for row in rows if row[1] != "1"]  # where all classes have as many rows there is no tail
    return markdown((" / ".join(GROUPS), "gamma", "seeds", *titles), rows)


def leads_table(folder="results"):
    """baselines/README.md's table of what ImbaNID has above, or below, the best of the six and the best k-means row."""
    leads = {("test", "ACC"): "C", ("test", "tail"): "tail (C)", ("test_kmeans", "ACC"): "T"}
    rows, kinds = [], {"the six": PAPER_METHODS, "k-means": ("kmeans",)}
    for (dataset, gamma, encoder), seeds, by_method in compared(folder):
        cells = [with_encoder(CORPORA[dataset][0], encoder), f"{gamma:g}", " ".join(map(str, seeds))]
        for row, column in leads:
            ours = scores_of(by_method.get("ImbaNID", ()), row, column)
            for methods in kinds.values():
                others = {title.replace("k-means, ", "").removesuffix(" features"): scores_of(runs, row, column)
                          for title, runs in by_method.items() if runs[0]["method"] in methods}
                told = others and len(ours) and not np.isnan(ours).any() and (column != "tail" or gamma > 1)  # 1 has no tail
                best = max(others, key=lambda title: others[title].mean(), default="")
                cells.append(lead(ours, others[best], best) if told else "-")
        rows.append(cells)
    columns = [f"{name}, {kind}" for name in leads.values() for kind in kinds]
    return markdown(("corpus", "gamma", "seeds", *columns), rows)


def lead(ours, theirs, title=""):
    """"+8.5 (GCD; p 0.04)": what the mean of ours (S,) is above that of theirs, a method `title`'s; p of a paired t-test."""
    said = "; ".join(filter(None, (title, paired_test(ours, theirs))))
    return f"{(ours - theirs).mean():+.1f}{said and f' ({said})'}"


def ends_tables(folder="results"):
    """baselines/README.md's tables of what a method's end is worth: ACC under C of the same features with its own end, with
    the labelled rows held, and with the centres that ImbaNID's search finds; then ImbaNID's lead over that last one.
    """
    found, seeded = [], {}
    for (dataset, gamma, encoder), seeds, by_method in compared(folder):
        runs = {title: of for title, of in by_method.items() if not title.endswith((HELD, CUT))
                and not np.isnan(scores_of(of, "test_seeded")).any()}
        if runs and "ImbaNID" in by_method:
            cell = [with_encoder(CORPORA[dataset][0], encoder), f"{gamma:g}", " ".join(map(str, seeds))]
            found.append((cell, scores_of(by_method["ImbaNID"], "test"), runs))
            seeded |= runs
    ends, leads, titles = [], [], [title for title, _ in sorted(seeded.items(), key=title_place)]
    for cell, ours, runs in found:
        means = {title: [scores_of(of, row).mean() for row in ("test", "test_held", "test_seeded")]
                 for title, of in runs.items()}
        ends.append([*cell, *(" / ".join("-" if np.isnan(x) else f"{x:.1f}" for x in means.get(title, [np.nan]))
                              for title in titles), f"{ours.mean():.1f}"])
        leads.append([*cell, *(lead(ours, scores_of(runs[title], "test_seeded")) if title in runs else "-"
                               for title in titles)])
    return "\n\n".join(filter(None, (
        markdown(("corpus", "gamma", "seeds", *titles, "ImbaNID"), ends),
        markdown(("ImbaNID's lead over the seeded", "gamma", "seeds", *titles), leads))))


def methods_table(folder="results"):
    """baselines/README.md's table of all there is to the compared methods. Empty where nothing can be compared."""
    rows = []
    for (dataset, gamma, encoder), seeds, by_method in compared(folder, more=True):
        for title, runs in by_method.items():
            if CUT in title:
                continue  # other_settings_table has them
            cells = dict(zip(METHOD_COLUMNS, method_cells(runs)), paper=paper_acc(runs[0]["method"], dataset, gamma))
            if title.endswith(HELD):
                cells |= {"ACC (T)": "", "paper": ""}  # T is that of the row above
            rows.append([with_encoder(CORPORA[dataset][0], encoder), f"{gamma:g}", title, " ".join(map(str, seeds)),
                         *cells.values()])
    columns = "corpus", "gamma", "method", "seeds", *METHOD_COLUMNS, "paper (BERT), ACC"
    return markdown(columns, rows)


def method_cells(runs):
    """The cells under METHOD_COLUMNS, means over runs of one method: scores, epochs of the first, seconds."""
    epochs = runs[0]["epochs"]
    epochs = [*epochs.values()] if isinstance(epochs, dict) else [runs[0]["config"]["pretrain"]["epochs"], epochs]
    return [*(f"{mean_of(runs, 'test', c):.2f}" for c in COLUMNS[:5]), f"{mean_of(runs, 'test_kmeans'):.2f}",
            " + ".join(map(str, epochs)), f"{np.mean([sum(run['seconds'].values()) for run in runs]):.0f}"]


def other_settings_table(folder="results"):
    """The table in baselines/README.md of methods with other settings than in methods_table; empty without such runs.

    Runs with a tag, under the untagged ones of the same seeds, each with the flags, also of pretrain.py, that differ.
    """
    runs = grouped((run for run in read_kept(folder) if run["method"] not in ("imbanid", "kmeans")),
                   "method", "dataset", "gamma", "encoder", "tag")
    groups, rows = {}, []
    for (*key, tag), by_seed in runs.items():
        plain = runs.get((*key, ""), {})
        seeds = tuple(sorted(plain.keys() & by_seed.keys()))
        if tag and seeds:
            sides = groups.setdefault((*key, seeds), [[plain[seed] for seed in seeds]])
            sides.append([by_seed[seed] for seed in seeds])
    for key in sorted(groups, key=lambda key: (method_place(key[0]), list(CORPORA).index(key[1]), key[2])):
        (_, dataset, gamma, encoder, seeds), sides = key, groups[key]
        first = settings(sides[0][0])
        configs = [first | settings(runs[0]) for runs in sides]  # an older file may lack a flag
        flags = [flag for flag in first if any(config[flag] != first[flag] for config in configs)]
        rows += [[method_title(sides[0][0]), with_encoder(CORPORA[dataset][0], encoder), f"{gamma:g}",
                  " ".join(map(str, seeds)), " ".join(as_flag(flag, config[flag]) for flag in flags), *method_cells(runs),
                  f"{mean_of(runs, 'test_held'):.2f}" if all("test_held" in run for run in runs) else "",
                  f"{mean_of(runs, 'ss_kmeans_raw'):.2f}"]
                 for runs, config in zip(sides, configs)]
    columns = ("method", "corpus", "gamma", "seeds", "settings", *METHOD_COLUMNS, "ACC (C)" + HELD,
               "semi-sup. k-means (10 starts), ACC")
    return markdown(columns, rows)


def schedules_table(folder="results"):
    """The table in baselines/README.md of what the published schedules in full (tag "full") have above the short ones (no tag).

    Over all splits with both, whatever corpus and gamma; empty without any.
    """
    runs = {(run["method"], run["tag"], run["dataset"], run["gamma"], run["seed"], run["encoder"]): run
            for run in read_kept(folder)}
    rows = []
    for method in PAPER_METHODS:
        pairs = [(run, runs[method, "", *split]) for (name, tag, *split), run in runs.items()
                 if (name, tag) == (method, "full") and (method, "", *split) in runs]
        cells = []
        for row in ("test", "test_kmeans", "test_held"):
            gain = np.array([full[row]["ACC"] - short[row]["ACC"] for full, short in pairs if row in full and row in short])
            p = paired_test(gain, np.zeros_like(gain))
            cells.append(f"{gain.mean():+.1f} ({len(gain)}{p and '; ' + p}; {min(gain):+.1f} to {max(gain):+.1f})"
                         if len(gain) else "")
        if any(cells):
            rows.append([METHODS[method], *cells])
    return markdown(("full minus short, ACC", "C", "T", "C" + HELD), rows)


def paper_acc(method, dataset, gamma):
    """The paper's ACC of a method as a cell of a table, empty where it has none."""
    values = [acc for acc, *_ in PAPER.values()] if method == "imbanid" else PAPER_METHODS.get(method, ())
    found = dict(zip(PAPER, values)).get((dataset, gamma))
    return f"{found:.2f}" if found else ""


def settings_table(folder="results"):
    """docs/experiments.md's table of runs that differ in one setting, on the seeds that all its values have; empty without
    such runs.

    K shows how many classes a run had: the true number, or for each seed the estimated one. The last columns but one are what
    a row has above the main table's runs of these seeds, with a paired t-test.
    """
    runs = [run for run in read_kept(folder, None) if run["method"] == "imbanid"]
    rows, own = [], own_runs(folder)
    for key in ("known_ratio", "omega", "lambda2", "num_classes", "dtype", "processes", "trained_layers", "epochs", "lr"):
        for title, by_value in on_shared_seeds(varied(runs, key)):
            for value, found in by_value.items():
                K = sorted({run["num_classes"] for run in found})
                main = own.get(tuple(found[0][part] for part in ("dataset", "gamma", "encoder")), {})
                main = [main.get(run["seed"]) for run in found]
                above = [lead(scores_of(found, row), scores_of(main, row)) if all(main) and main != found else ""
                         for row in ("test", "test_kmeans")]
                rows.append([key, with_encoder(title, found[0]["encoder"]), value if key != "num_classes" else value or "true",
                             " ".join(map(str, K if len(K) == 1 else [run["num_classes"] for run in found])),
                             " ".join(str(run["seed"]) for run in found),
                             *method_cells(found)[:6], *above, f"{mean_of(found, 'ss_kmeans_raw'):.2f}"])
    columns = ("setting", "corpus", "value", "K", "seeds", *COLUMNS[:5], "ACC (T)", "ACC minus the default's",
               "ACC (T) minus the default's", "semi-sup. k-means (10 starts), ACC")
    return markdown(columns, rows)


def dev_table(folder="results"):
    """docs/experiments.md's table of settings on dev with hidden classes (tests/hide_classes.py), of results/dev/; or empty.

    ACC under C of each seed, then the mean difference to the runs of tag "default" over all splits, with a paired t-test.
    """
    runs, rows = [run for run in read_kept(Path(folder) / "dev") if run["method"] == "imbanid"], []
    corpora = [dataset for dataset in CORPORA if any(run["dataset"] == dataset for run in runs)]
    default = {(run["encoder"], run["dataset"], run["gamma"], run["seed"]): run for run in runs if run["tag"] == "default"}
    by_setting = {}
    for run in sorted(runs, key=lambda run: run["tag"] != "default"):
        split = run["dataset"], run["gamma"], run["seed"]
        if first := default.get((run["encoder"], *split)):
            flags = [as_flag(*setting).removesuffix(" True") for setting in changed(settings(first), settings(run))]
            found = by_setting.setdefault((run["encoder"], " ".join(flags) or "the defaults"), {})
            found[split] = run, first
    for (encoder, title), found in by_setting.items():
        splits = in_order(found)
        cells = [", ".join(f"{found[split][0]['test']['ACC']:.1f}" for split in splits if split[0] == dataset)
                 for dataset in corpora]
        for row in ("test", "test_kmeans"):
            both = np.array([[run[row]["ACC"] for run in found[split]] for split in splits]).T
            p = paired_test(*both)
            cells.append(f"{(both[0] - both[1]).mean():+.2f}{p and f' ({p})'}" if title != "the defaults" else "")
        rows.append([with_encoder(title, encoder), *cells])
    return markdown(("setting, on dev with hidden classes", *(CORPORA[dataset][0] for dataset in corpora),
                     "ACC (C) minus the defaults'", "ACC (T) minus the defaults'"), rows)


def transport_tables(folder="results"):
    """The tables on rot.py, built from results/bench_rot.json (tests/bench_rot.py --keep); empty without it."""
    if not (path := Path(folder) / "bench_rot.json").exists():
        return ""
    found = read_results(path)

    def span(values):
        return f"{min(values):.0f} to {max(values):.0f}" if len(set(values)) > 1 else f"{values[0]:.0f}"

    def ratios(part, dataset, *words):
        return [row["ratio"] for key, row in found[part].items()
                if key.startswith(f"{dataset},") and all(word in key for word in words)]

    rows = []
    for dataset, steps in found["steps"].items():
        kl = [ratios("pot", dataset, "kl", f"lambda2 {weight},", "unbalanced sinkhorn")[0] for weight in ("0.1", "1", "2", "7")]
        seconds = found["kmeans"][dataset]
        rows.append([CORPORA[dataset][0], span(steps["cold"]), span(steps["corner"]), span(steps["in training"][1:]),
                     f"{1000 * seconds['transport_s']:.0f} / {1000 * seconds['kmeans_s']:.0f}",
                     span(ratios("sinkhorn", dataset)), span(ratios("pot", dataset, "equality")),
                     ", ".join(f"{value:.2g}" for value in kl)])
    first = markdown(["log P of", "steps, cold", "steps, corners", "steps, next epochs", "ms: transport / k-means",
                      "Sinkhorn / Newton (lambda2 2, 7)", "POT / Newton, equality", "POT / Newton, kl (lambda2 .1, 1, 2, 7)"],
                     rows)
    second = markdown(["N", "K", "seconds", "steps", "MB above the input"], [
        [f"{r['N']:,}", f"{r['K']:,}", f"{r['seconds']:.3g}", r["steps"], f"{r['above_input_mb']:.0f}"]
        for r in found["scaling"]])
    return f"{first}\n\n{second}"


def speed_tables(folder="results"):
    """The tables on the speed of training, built from results/bench_train.json (tests/bench_train.py --keep); or empty."""
    if not (path := Path(folder) / "bench_train.json").exists():
        return ""
    found = read_results(path)
    rows = [[title, f"{found[side]['total']:.0f}",
             *(f"{found[side][stage]['seconds']:.0f} s, {found[side][stage]['rows_per_second']:.0f} rows/s, "
               f"{found[side][stage]['peak_memory_mb'] * GB:.1f} GB" for stage in ("pretrain", "train"))]
            for title, side in (("default", "fast"), ("--no_cache --dtype float32", "slow"))]
    processes = [[P, f"{row['seconds_an_epoch']:.1f}", f"{row['peak_memory_mb'] * GB:.1f}"]
                 for P, row in found["processes"].items()]
    return (markdown(["clinc, gamma 10, minilm", "seconds, both stages", "pretrain.py", "train_imbanid.py"], rows) + "\n\n"
            + markdown(["processes of train_imbanid.py", "seconds an epoch", "GB in the largest"], processes))


def gpu_table(folder="results"):
    """The table on training on a GPU, built from results/bench_gpu_*.json (tests/bench_gpu.py --keep); empty without them."""
    rows = []
    for path in sorted(Path(folder).glob("bench_gpu_*.json"), reverse=True):
        found = read_results(path)
        for stage, script in (("pretrain", "pretrain.py"), ("train", "train_imbanid.py")):
            fast, slow = (found[side][stage] for side in ("fast", "slow"))
            rows.append([found["encoder"], script, *(f"{side['rows_per_second']:,.0f}" for side in (fast, slow)),
                         f"{found[f'{stage}_ratio']:.1f}",
                         *("-" if side["utilisation"] is None else f"{side['utilisation']:.0f} %" for side in (fast, slow)),
                         f"{100 * fast['of_matrix_rate']:.1f} %", f"{fast['peak_gpu_memory_mb'] * GB:.1f}"])
    return markdown(["encoder, on a GPU", "stage", "rows/s", "rows/s, uncached float32", "ratio", "GPU busy",
                     "GPU busy, uncached float32", "of the matrix rate", "GB"], rows)


TABLES = (headline_table, results_table, ablation_table, ablation_t_table, settings_table, dev_table, overview_table,
          groups_table, leads_table, ends_tables, methods_table, other_settings_table, schedules_table, transport_tables,
          speed_tables, gpu_table)  # what `table` builds


# ---- pictures, a function each; what draws them is imported where it is used, so that the tables start at once ----

def panels(n=1, height=4.2, across=3):
    """n axes on a figure 9 inches wide, README's 900 pixels. height: inches, of all rows of axes or of each.

    Returns (figure, axes).
    """
    import matplotlib
    from matplotlib import figure, font_manager
    fonts = {font.name for font in font_manager.fontManager.ttflist}.intersection(FONTS)
    matplotlib.rcParams.update({"font.size": 10, "font.family": ["DejaVu Sans", *sorted(fonts)], "axes.titlesize": 10,
                                "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    warnings.filterwarnings("ignore", "Glyph ")  # a letter that no font has becomes a box
    across = min(n, across)
    heights = np.broadcast_to(height, math.ceil(n / across))
    whole = figure.Figure(figsize=(9, heights.sum()), layout="constrained")
    grid = whole.add_gridspec(len(heights), across, height_ratios=heights)
    return whole, [whole.add_subplot(grid[divmod(i, across)]) for i in range(n)]


def short(name):
    """A class name on one line, cut in the middle, since long names differ at their ends; a $ would start a formula."""
    name = " ".join(name.split())
    return (name if len(name) < 27 else name[:13] + "…" + name[-12:]).replace("$", r"\$")


def benchmark_of(run):
    """The benchmark's side of a run: its data folder, class names, training rows a class, and how many classes are known."""
    home, of_dev = run["folder"].resolve().parent, bool(run.get("on_dev"))
    root = home.parent.parent if of_dev and home.name == "dev" else home.parent
    data = root / ("data/dev" if of_dev else "data") / run_name(**{key: run["config"][key] for key in TASK})
    return (data, (data / "labels.txt").read_text(encoding="utf-8").splitlines(), np.load(data / "class_counts.npy"),
            json.loads((data / "meta.json").read_text())["num_known"])


def tsne(feature, rows):
    """Which of `rows` are drawn, all or MAP_ROWS of them, and their (n, 2) t-SNE in the unit square, the same at every call.

    feature: (N, H). rows: int, rows of it. Returns (int (n,), positions in `rows`; float (n, 2)).
    """
    from sklearn.manifold import TSNE
    if len(rows) < 5:
        raise UserError("fewer than 5 rows make no map")
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:MAP_ROWS])
    drawn = feature[rows[chosen]].astype(np.float32)
    if np.ptp(drawn, axis=0).max() == 0:
        raise UserError("all rows have the same features, which make no map: another --encoder may know these texts")
    xy = TSNE(perplexity=min(30, (len(chosen) - 1) / 3), random_state=0).fit_transform(drawn)
    return chosen, (xy - xy.min(0)) / np.maximum(np.ptp(xy, axis=0), 1e-9)


def class_sizes(run):
    """How many rows each class (of a table of your own: each cluster) has, the largest first."""
    if run.get("own"):
        clusters = cluster_lines(run["folder"])
        counts = np.array([int(line["size"]) for line in clusters])
        known = np.array([line["known"] == "yes" for line in clusters])
        unit, of = "rows", "clusters"
    else:
        counts, num_known = benchmark_of(run)[2:]
        known = np.arange(len(counts)) < num_known
        unit, of = "training rows", "classes"
    order = np.argsort(-counts, kind="stable")
    figure, (axis,) = panels()
    for rows, name, colour, face in ((known[order], "known", COLOURS[0], COLOURS[0]),
                                     (~known[order], "new", COLOURS[1], "none")):
        if rows.any():
            axis.scatter(1 + np.flatnonzero(rows), counts[order][rows], 30, facecolors=face, edgecolors=colour, label=name)
    axis.set(yscale="log", ylabel=f"{unit} (log scale)", xlabel=f"{of}, by size")
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.locator_params(axis="x", integer=True)
    axis.set_xlim(0.5, len(counts) + 0.5)
    axis.legend()
    return figure


def tsne_map(run):
    """Map of the test rows (t-SNE): true classes of all sizes in colour, the other classes grey."""
    data, names, counts, num_known = benchmark_of(run)
    label, by_size = np.load(data / "test_label.npy"), np.argsort(-counts, kind="stable")
    rows, xy = tsne(np.load(run["folder"] / "test_feature.npy"), np.arange(len(label)))
    figure, (axis,) = panels(height=6)
    axis.scatter(*xy.T, 5, c="#cccccc", linewidths=0)
    drawn = {}
    for novel, most in ((False, 10), (True, 5)):
        ids = by_size[(by_size >= num_known) == novel]
        for i, k in enumerate(ids[np.linspace(0, len(ids) - 1, min(most, len(ids))).round().astype(int)]):
            colour, marker = COLOURS[i % len(COLOURS)], "s" if novel else "o^"[i // len(COLOURS)]
            drawn[f"{short(names[k])} ({counts[k]})"] = axis.scatter(
                *xy[label[rows] == k].T, 34, marker=marker, facecolors="none" if novel else colour, edgecolors=colour)
    axis.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    figure.legend(drawn.values(), drawn, loc="outside right upper", alignment="left",
                  title="filled: known, hollow: novel\n(training rows)")
    return figure


def bars(axis, series, ticks, **labels):
    """series: {name: (values, deviations)} in percent, a bar each at every tick, with its value written into it."""
    width = 0.86 / len(series)
    for i, (name, (values, sds)) in enumerate(series.items()):
        x = np.arange(len(ticks)) + width * (i - (len(series) - 1) / 2)
        axis.bar(x, values, 0.92 * width, yerr=sds if np.any(sds) else None, capsize=2, label=name,
                 color=("#0072B2", "#56B4E9", "#BBBBBB", "#E69F00", "#CC79A7")[i % 5])
        for at, value, sd in zip(x, values, sds):
            axis.text(at, 2, "" if value != value else f"{value:.1f}" + (f" ± {sd:.1f}" if sd else ""), rotation=90,
                      ha="center", va="bottom", fontsize=9, color="black" if i % 5 or value < 25 else "white")
    axis.set(ylim=(0, 100), xticks=range(len(ticks)), xticklabels=ticks, **labels)


def groups(run):
    """Test accuracy of ImbaNID and of k-means, by group of classes."""
    columns = ("ACC", *COLUMNS[3:])
    figure, (axis,) = panels()
    rows = {title.replace("ImbaNID", method_title(run)): run[key] for title, key in ROWS if key in run}
    bars(axis, {title: (np.array([row[c] for c in columns], dtype=float), [0] * len(columns)) for title, row in rows.items()},
         ("all", *columns[1:]), xlabel="classes", ylabel="test accuracy, percent")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def epochs(run):
    """Stage 3, epoch by epoch: dev accuracy, the transport's steps, and its residual."""
    log = [json.loads(line) for line in (run["folder"] / "log.jsonl").read_text().splitlines()]
    shown = [row for row in (("dev_accuracy", "dev accuracy (known classes), percent", "linear"),
                             ("rot_iterations", "steps of the transport (or of k-means)", "linear"),
                             ("rot_residual", "residual of the transport (log scale)", "log"))
             if log and all(line.get(row[0]) is not None for line in log)
             and (row[2] != "log" or any(line[row[0]] for line in log))]  # k-means has no residual
    if not shown:
        raise UserError("its file holds nothing to draw")
    figure, axes = panels(len(shown), height=3.4)
    for axis, (key, title, scale) in zip(axes, shown):
        values = np.maximum([line[key] for line in log], 1e-17)
        axis.plot([line["epoch"] for line in log], values, "o-", color=COLOURS[0])
        axis.set(xlabel="epoch", ylabel=title, yscale=scale)
        if scale == "linear":  # so that no change of a tenth looks like a cliff
            axis.set_ylim(values.min() - 1, values.max() + 1)
        axis.locator_params(axis="x", integer=True)
        axis.set_xlim(0.5, len(log) + 0.5)
        axis.grid(alpha=0.3)
    return figure


def confusion(run):
    """Where the test rows of the 15 largest classes went: true class against the class matched to the found cluster."""
    from sklearn.metrics import confusion_matrix

    from metrics import match_clusters
    data, names, counts, num_known = benchmark_of(run)
    truth, cluster = np.load(data / "test_label.npy"), np.load(run["folder"] / "test_pred.npy")
    classes, top = match_clusters(truth, cluster), np.argsort(-counts, kind="stable")[:15]
    place = np.full(max(len(names), len(classes)), len(top))
    place[top] = np.arange(len(top))
    table = 100 * confusion_matrix(place[truth], place[classes[cluster]], labels=range(len(top) + 1), normalize="true")
    figure, (axis,) = panels(height=7.4)
    axis.imshow(table, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (i, j), value in np.ndenumerate(table):
        if value >= 0.5:
            axis.text(j, i, f"{value:.0f}", ha="center", va="center", color="white" if value > 60 else "black")
    titles = [short(names[k]) + ("" if k < num_known else " (novel)") for k in top] + ["other"]
    axis.set_yticks(range(len(titles)), titles)
    axis.set_xticks(range(len(titles)), titles, rotation=45, ha="right", rotation_mode="anchor")
    axis.set(ylabel="true class", xlabel="class matched to the found cluster; numbers: percent of the true class's test rows")
    return figure


# ---- pictures that compare runs ----

def varied(runs, key, same=None):
    """[(title, {value of key: runs})] where key varies among comparable runs.

    These are runs that agree in the settings named in `same`, or else in all but key, the flag set together with it (WITH_IT),
    the seed, the tag and the data; of the pre-training trained_layers counts, which no flag of stage 3 repeats.
    """
    ignored, found = (key, WITH_IT.get(key), "seed", "tag", "pretrain", "data"), {}
    for run in runs:
        pre = run["config"].get("pretrain") or {}
        config = {"dtype": pre.get("dtype"), "trained_layers": pre.get("trained_layers", 1),  # older files lack them
                  **run["config"], "tag": run.get("tag", ""), "encoder": run["encoder"], "method": run["method"],
                  "processes": run.get("processes", 1), "on_dev": run.get("on_dev", False)}
        config["lambda2"] = config.get("lambda2") or (2.0 if config["gamma"] > 1 else 7.0)  # what train_imbanid.py makes of 0
        rest = {k: v for k, v in config.items() if (k in same if same else k not in ignored)}
        title = CORPORA[run["dataset"]][0]
        if key != "gamma":
            method = METHODS.get(run["method"], run["method"])  # one that somebody has added
            title += ", dev" * config["on_dev"] + f", gamma {run['gamma']:g}" + (run["method"] != "imbanid") * f", {method}"
        found.setdefault(json.dumps(rest, sort_keys=True), (title, {}))[1].setdefault(config.get(key), []).append(run)
    return [(title, dict(sorted(by_value.items()))) for title, by_value in found.values() if len(by_value) > 1]


def on_shared_seeds(found):
    """What varied returns with one run for each seed that all values have; a value with more seeds would not compare."""
    shared = []
    for title, by_value in found:
        by_seed = {value: {run["seed"]: run for run in reversed(runs)} for value, runs in by_value.items()}
        seeds = sorted(set.intersection(*map(set, by_seed.values())))
        if seeds:
            shared.append((title, {value: [runs[seed] for seed in seeds] for value, runs in by_seed.items()}))
    return shared


def gamma_curves(found, _):
    """Training rows per class for each gamma."""
    figure, axes = panels(len(found), height=4)
    for axis, (title, by_gamma) in zip(axes, found):
        for i, (gamma, runs) in enumerate(by_gamma.items()):
            counts = np.sort(benchmark_of(runs[0])[2])[::-1]
            axis.plot(1 + np.arange(len(counts)), counts, ("-", "--", ":")[i // 7 % 3], color=COLOURS[i % 7],
                      label=f"gamma {gamma:g}", lw=2)
        axis.set(title=title, xlabel="classes, by size", ylabel="training rows", ylim=(0, None))
        axis.locator_params(axis="x", integer=True)
        axis.legend()
    return figure


def setting_curves(found, key):
    """Test ACC and NMI against a setting, mean and standard deviation over seeds."""
    figure, axes = panels(2, height=4)
    ticks = sorted({value for _, by_value in found for value in by_value})
    for axis, column in zip(axes, COLUMNS):
        for i, (title, by_value) in enumerate(found):
            mean, sd = np.transpose([spread(runs, "test")[column] for runs in by_value.values()])
            axis.errorbar(list(by_value), mean, sd, marker="os^DvP*"[i % 7], capsize=3, color=COLOURS[i % 7], label=title)
        axis.set(xscale="log" if key == "lambda2" else "linear", xlabel=key + " (log scale)" * (key == "lambda2"),
                 ylabel=f"test {column}, percent")
        axis.minorticks_off()
        axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def ratio_bars(found, _):
    """Test ACC, NMI and ARI for each share of known classes, mean and standard deviation over seeds."""
    figure, axes = panels(len(found), height=4)
    for axis, (title, by_value) in zip(axes, found):
        scores = [spread(runs, "test") for runs in by_value.values()]
        bars(axis, {c: tuple(zip(*(score[c] for score in scores))) for c in COLUMNS[:3]},
             [f"{100 * value:g}" for value in by_value], title=title, xlabel="known classes, percent", ylabel="test, percent")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def tag_dots(found, _):
    """Test ACC, NMI and ARI of each ablation or other tag, a line each, mean and standard deviation over seeds."""
    figure, axes = panels(len(found), height=[max(2.8, 1.2 + 0.3 * len(by_tag)) for _, by_tag in found], across=1)
    for axis, (title, by_tag) in zip(axes, found):
        known = list(ABLATIONS)  # in the order of the table, then what is in none
        tags = sorted(by_tag, key=lambda tag: known.index(tag) if tag in known else len(known))
        method = by_tag[tags[0]][0]["method"]
        names = {"": METHODS.get(method, method)} | {tag: row[0] for tag, row in ABLATIONS.items() if method == "imbanid"}
        for column, colour, marker in zip(COLUMNS, COLOURS, "os^"):
            mean, sd = np.transpose([spread(by_tag[tag], "test")[column] for tag in tags])
            axis.errorbar(mean, range(len(tags)), xerr=sd, fmt=marker, color=colour, capsize=2, label=column)
        axis.set(title=title, xlabel="percent", ylim=(len(tags) - 0.5, -0.5))
        axis.set_yticks(range(len(tags)), [names.get(tag, short(tag)) for tag in tags])
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def cluster_lines(folder):
    """The rows of a run's clusters.csv, cells cut to what a page shows."""
    if not (folder / "assignments.csv").exists():
        raise UserError(f"run `python predict.py {folder}` first, which writes clusters.csv and assignments.csv")
    clusters = [{key: value[:300] for key, value in line.items()}
                for line in read_clusters(folder, "known", "size", "share", "confidence", "keywords")]
    for line in clusters:
        line |= {key: line[key].replace(",", ".") for key in ("share", "confidence")}
        for key, number in (("size", r"\d+"), ("share", r"\d+(\.\d+)?"), ("confidence", r"\d+(\.\d+)?")):
            if not re.fullmatch(number, line[key]):
                raise UserError(f"{folder}/clusters.csv, id {line['id']}: {key} {line[key]!r} is no number: put it back")
    return clusters


def report(run, pictures):
    """The text of report.html. pictures: {path of a PNG: its caption}."""
    folder = run["folder"]
    clusters = cluster_lines(folder)
    train_row, place = np.load(folder / "train_row.npy"), {line["id"]: i for i, line in enumerate(clusters)}
    rows = np.flatnonzero(train_row >= 0)
    chosen, xy = tsne(np.load(folder / "train_feature.npy", mmap_mode="r"), train_row[rows])
    xy = dict(zip(rows[chosen].tolist(), xy.round(4).tolist()))
    points = [[*xy[row], place[line["cluster"]], line["text"][:300], line["confidence"]]
              for line in own_table(folder / "assignments.csv")
              if line["row"] and (row := int(line["row"]) - 1) in xy and line["cluster"] in place]
    known, new = ({line["name"] for line in clusters if (line["known"] == "yes") is said} for said in (True, False))
    shown = sum(int(line["size"]) for line in clusters)  # not those of clusters whose lines somebody has deleted
    scored = "dev" if run.get("on_dev") else "test"
    facts = {"rows": f"{shown:,}" + (f" of {len(rows):,}" if shown < len(rows) else ""),
             "known intents": len(known), "new intents": len(new - known),
             "encoder": html.escape(plain_text(Path(run["encoder"]).name)), "epochs": run["epochs"],
             "minutes": f"{sum(run['seconds'].values()) / 60:.1f}",
             **{f"{scored} {c}": f"{run['test'][c]:.1f} %" for c in COLUMNS[:3] if "test" in run}}
    parts = {"TITLE": html.escape(plain_text(folder.resolve().name)),
             "FACTS": "".join(f"<div><dt>{key}<dd>{value}</div>" for key, value in facts.items()),
             "FIGURES": "".join(f"<figure><figcaption>{caption}</figcaption><img alt='' src='data:image/png;base64,"
                                f"{base64.b64encode(path.read_bytes()).decode()}'></figure>"
                                for path, caption in pictures.items()),
             "DATA": json.dumps({"clusters": clusters, "points": points}, ensure_ascii=False,
                                allow_nan=False).replace("<", "\\u003c")}
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], PAGE)  # one pass: what a text says is never filled in again


# ---- what the command line asks for ----

def attempt(path, build, *given):
    """Write the picture or page that build(*given) makes and say so, or why not. Returns whether it was made."""
    try:
        made = build(*given)
    except FileNotFoundError as err:
        why = f"{err.filename} is missing"
    except (UserError, OSError) as err:
        why = str(err)
    except (ValueError, KeyError, IndexError, EOFError) as err:
        why = f"a file it needs is damaged or of another run ({err!r})"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, made if isinstance(made, str) else lambda f: made.savefig(f, format="png", dpi=150))
        print(path)
        return True
    print(f"{path} left out{', an older one stays' if path.exists() else ''}: {why}")
    return False


def draw(paths):
    runs = []
    for path in dict.fromkeys(map(Path, paths)):
        kept = path.suffix == ".json"  # of results/: for what compares runs alone
        if not (path if kept else path / "results.json").is_file() or "config" not in (run := read_results(path)):
            raise UserError(f"{path} is no run that has finished; {USAGE}")
        if not run.get("own"):
            of_known_corpus(path, run)
        of_dev = on_dev(run, path)
        runs.append({**run, "folder": Path("out", "dev" if of_dev else "", path.stem) if kept else path, "kept": kept,
                     "on_dev": of_dev})
    stale = [run for run in runs if not run["kept"] and not draw_run(run)]
    if not draw_comparisons(runs) and all(run["kept"] for run in runs):
        raise UserError("these files differ in no setting that a picture shows: pass runs that do, or folders of out/")
    if stale:
        raise UserError(f"{stale[0]['folder']}/report.html could not be made, for the reason above: mend that and run the same "
                        "command again")


def draw_run(run):
    """The pictures of a run and its page. Returns False where that could not be made though there is a clusters.csv."""
    builds = [class_sizes] if run.get("own") else [class_sizes, tsne_map, groups, confusion]
    builds += [epochs] if run["method"] == "imbanid" else []
    files = {build: run["folder"] / "figures" / f"{build.__name__}.png" for build in builds}
    pictures = {file: build.__doc__ for build, file in files.items() if attempt(file, build, run)
                and not (run.get("own") and build is epochs)}  # a page for readers of messages, not of the paper
    if run["method"] != "imbanid":
        return True
    return attempt(run["folder"] / "report.html", report, run, pictures) or not (run["folder"] / "clusters.csv").exists()


def draw_comparisons(runs):
    """A picture for each setting in which runs differ. Returns whether there is any such setting."""
    folder, runs = runs[0]["folder"].resolve().parent / "figures", [run for run in runs if "test" in run]
    differing, alike = False, "dataset method gamma known_ratio labeled_ratio encoder omega lambda2 on_dev".split()
    for key, build, same in (("gamma", gamma_curves, ("dataset",)), ("omega", setting_curves, None),
                             ("lambda2", setting_curves, None), ("known_ratio", ratio_bars, None), ("tag", tag_dots, alike)):
        differ = varied(runs, key, same)
        if build is not gamma_curves and len({run["encoder"] for run in runs}) > 1:
            differ = [(f"{title}\n{Path(next(iter(found.values()))[0]['encoder']).name}", found) for title, found in differ]
        found = differ if build is gamma_curves else on_shared_seeds(differ)
        differing = differing or bool(differ)
        if len(found) < len(differ):
            missing = ", ".join(title.replace("\n", ", ") for title, _ in differ if title not in dict(found))
            print(f"{key}: runs of {missing} left out, since no seed has all values")
        if found:
            attempt(folder / f"{key}.png", build, found, key)
    return differing


def keep(paths):
    """Copy results.json of runs to results/, of those on dev to results/dev/; beside another encoder's, under a longer name."""
    if files := [path for path in paths if not Path(path).is_dir()]:
        raise UserError(f"{files[0]} is no folder of out/, whose results.json could be kept")
    for path in paths:
        run, name = read_benchmark(path), Path(os.path.abspath(path)).name  # of a link its own name
        if not fnmatch(name, KEPT):
            raise UserError(f"{path}: no table would find a file of this name: give the folder back the one it was trained "
                            f"under, {run_name(**{key: run['config'][key] for key in TASK})} with its tag or method")
        folder = Path("results", "dev" if on_dev(run, path) else "")
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{name}.json"
        if target.exists() and read_results(target)["encoder"] != run["encoder"]:
            target = folder / f"{name}_{Path(run['encoder']).name}.json"
            if target.exists() and (there := read_results(target)["encoder"]) != run["encoder"]:
                raise UserError(f"{target} is of encoder {there}, {path} of {run['encoder']}: remove the file first, or keep "
                                "the run in another checkout")
        write_atomic(target, json.dumps(run, indent=1) + "\n")
        print(target)


def make_tables(paths):
    """Print the tables of results/, or with documents' paths put each into these, in place of the one with its header."""
    if not read_kept("results", ratios=None):
        raise UserError("no runs in results/ to make tables of: start in the repository's folder, or keep a run first")
    tables = {build.__name__: build() for build in TABLES}
    empty = [name for name, table in tables.items() if not table]
    for title in left_out("results"):
        print(f"left out: {title}, which lacks seeds that the others have", file=sys.stderr)
    tables = "\n\n".join(filter(None, tables.values()))
    if not paths:
        print(tables)
        return
    if empty:
        print("empty, and as they were in the documents: " + ", ".join(empty), file=sys.stderr)
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise UserError(f"{missing[0]} is no document whose tables could be replaced")
    heads, placed = {table.splitlines()[0]: table for table in tables.split("\n\n")}, set()
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        for head, table in heads.items():
            text, found = re.subn(rf"^{re.escape(head)}(\n\|.*)*$", lambda _, table=table: table, text, flags=re.M)
            if found:
                placed.add(head)
        write_atomic(path, text)
    if homeless := [head for head in heads if head not in placed]:
        print("not put anywhere, for want of a table with this header (after a change of columns, give it to the old one):",
              *homeless, sep="\n")


def main(words):
    match words:
        case [] | ["mean" | "keep"]:
            raise UserError(USAGE)
        case _ if {"-h", "--help"} & {*words}:
            print(f"{USAGE}\n\n{__doc__}")
        case ["mean", *folders]:
            print_mean(folders)
        case ["keep", *folders]:
            keep(folders)
        case ["table", *documents]:
            make_tables(documents)
        case _:
            draw(words)


PAGE = r"""<!doctype html><html lang="en"><meta charset="utf-8"><title>@TITLE@</title>
<meta name="viewport" content="width=device-width"><style>
:root { color-scheme: light dark; --known: #0072b2; --new: #b34f00; --pick: #fff2bf; --line: #8884 }
@media (prefers-color-scheme: dark) { :root { --known: #56b4e9; --new: #f0a830; --pick: #40391f } }
body { font: 14px/1.4 system-ui, sans-serif; max-width: 1500px; margin: auto; padding: 12px 20px; background: Canvas }
h1, p { margin: 0 0 6px } dl { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 0 0 12px }
dd { margin: 0; font-size: 19px } section { min-width: 0; position: relative }
main { display: grid; grid-template-columns: 5fr 7fr; gap: 20px } @media (max-width: 900px) { main { display: block } }
svg, #box { display: block; border: 1px solid var(--line); border-radius: 6px } #box { height: 580px; overflow: auto }
.known { color: var(--known) } .new { color: var(--new) } .faint { opacity: .12 } .big { r: 4.5px } [hidden] { display: none }
circle { fill: currentColor; pointer-events: all } circle.new { fill: none; stroke: currentColor }
text { font-weight: 600; font-size: 12px; text-anchor: middle; pointer-events: none; fill: CanvasText; stroke: Canvas;
  stroke-width: 4px; paint-order: stroke }
#tip { position: absolute; width: max-content; max-width: 300px; padding: 6px 9px; background: Canvas; border: 1px solid;
  pointer-events: none; white-space: pre-line; overflow-wrap: anywhere }
input { width: 60% } table { border-collapse: collapse; width: 100% }
td, th { padding: 4px 7px; text-align: left; vertical-align: top } td { overflow-wrap: anywhere; min-width: 100px }
th { position: sticky; top: 0; background: Canvas } th, td:nth-child(-n+5):nth-child(n+2) { white-space: nowrap; min-width: 0 }
tr > :nth-child(n+3):nth-child(-n+5) { text-align: right } tbody { border-top: 1px solid var(--line) } ul { margin: 0 }
.on { background: var(--pick) } tbody:not(.on) tr + tr { display: none }
button { all: unset; cursor: pointer; font-weight: 600 } button:focus-visible { outline: 2px solid }
figure { margin: 28px 0 } img { display: block; width: 900px; max-width: 100%; background: #fff }
</style>
<h1>@TITLE@</h1><dl>@FACTS@</dl>
<main><section>
<p>Up to 3,000 rows, <span class="known">● known</span>, <span class="new">○ new</span>; point to read, click to pick</p>
<svg viewBox="0 0 560 560" role="img" aria-label="map of the rows; the table holds the same clusters"></svg>
<div id="tip" hidden></div></section>
<section><p><input type="search" aria-label="search" placeholder="names, keywords, examples"> <span role="status"></span></p>
<div id="box" tabindex="0" role="region" aria-label="clusters"><table><thead><tr></tr></thead></table></div></section></main>
@FIGURES@
<script type="application/json" id="data">@DATA@</script>
<script>
const $ = what => document.querySelector(what), D = JSON.parse($("#data").textContent), tip = $("#tip"), svg = $("svg");
const kind = i => D.clusters[i].known == "yes" ? "known" : "new", at = p => [10 + 540 * p[0], 550 - 540 * p[1]];
function make(tag, set, ...inside) {
  const e = document.createElementNS((/circle|text/.test(tag) ? svg : document.body).namespaceURI, tag);
  for (const key in set) e.setAttribute(key, set[key]);
  e.append(...inside); return e;
}
const dots = D.points.map(p => make("circle", { cx: at(p)[0], cy: at(p)[1], r: 2.5, class: kind(p[2]) }));
const rows = D.clusters.map((c, i) => {
  const examples = [1, 2, 3, 4, 5].map(n => c["example_" + n]).filter(text => text);
  const mark = make("span", { class: kind(i) }, kind(i) == "new" ? "○ new" : "● known");
  const cells = [make("button", {}, c.name), mark, c.size, c.share, c.confidence, c.keywords];
  const list = make("ul", {}, ...examples.map(text => make("li", { dir: "auto" }, text)));
  const row = make("tbody", {}, make("tr", {}, ...cells.map(cell => make("td", { dir: "auto" }, cell))),
    make("tr", {}, make("td", { colspan: 6 }, list)));
  row.firstChild.onclick = () => pick(picked == i ? -1 : i);
  row.words = [c.name, c.keywords, ...examples].join("\n").normalize().toLowerCase();
  return row;
});
let picked, sorted, up;
function pick(i) {  // cluster i, -1: none; and show what the search asks for
  picked = i;
  rows.forEach((row, j) => { row.hidden = i != j && !row.words.includes($("input").value.normalize().toLowerCase());
    row.classList.toggle("on", i == j); row.querySelector("button").ariaExpanded = i == j; });
  $("[role=status]").textContent = rows.filter(row => !row.hidden).length + " of " + rows.length;
  dots.forEach((dot, j) => { const own = D.points[j][2]; dot.classList.toggle("big", i == own);
    dot.classList.toggle("faint", i < 0 ? rows[own].hidden : i != own); });
}
const heads = Object.entries({ name: "cluster", known: "kind", size: "rows", share: "share, %", confidence: "conf., %",
  keywords: "keywords" }).map(([key, title]) => {
  const head = make("th", {}, make("button", {}, title)), value = row => D.clusters[rows.indexOf(row)][key];
  const number = ["size", "share", "confidence"].includes(key);
  const order = (a, b) =>
    number && parseFloat(a) - parseFloat(b) || a.localeCompare(b, undefined, { numeric: true });
  head.onclick = () => {
    up = sorted == key ? !up : !number; sorted = key;
    $("table").append(...[...rows].sort((a, b) => order(value(a), value(b)) * (up ? 1 : -1)));
    heads.forEach(other => other.ariaSort = other != head ? "none" : up ? "ascending" : "descending");
  };
  return head;
});
svg.append(...dots); $("thead tr").append(...heads); $("table").append(...rows); $("input").oninput = () => pick(-1); pick(-1);

const taken = [], largest = D.clusters.map((c, i) => [c.size, i]).sort((a, b) => b[0] - a[0]).slice(0, 30);
for (const [, i] of largest) {  // its name in the middle of its dots, where there is room
  const own = D.points.filter(p => p[2] == i), name = [...D.clusters[i].name].slice(0, 28).join("");
  if (!own.length) continue;
  const title = svg.appendChild(make("text", {}, name)), half = 4 + title.getComputedTextLength() / 2;
  const [cx, cy] = at([0, 1].map(k => own.map(p => p[k]).sort((a, b) => a - b)[own.length >> 1]));
  const x = Math.min(Math.max(cx, half), 560 - half), y = Math.max(14, cy - 8);
  if (taken.some(t => Math.abs(t[0] - x) < t[2] + half && Math.abs(t[1] - y) < 17)) title.remove();
  else { taken.push([x, y, half]); title.setAttribute("x", x); title.setAttribute("y", y); }
}
const under = e => D.points[dots.indexOf(e.target)];
svg.onmouseover = e => {
  const p = under(e); tip.hidden = !p; tip.textContent = p && p[3] + "\n" + D.clusters[p[2]].name + ", " + p[4] + " %";
  tip.style.left = Math.min(e.offsetX + 14, svg.clientWidth - tip.offsetWidth) + "px"; tip.style.top = e.offsetY + 40 + "px";
};
svg.onmouseleave = () => tip.hidden = true;
svg.onclick = e => { const p = under(e); pick(p ? p[2] : -1); if (p) rows[p[2]].scrollIntoView({ block: "nearest" }); };
</script></html>
"""


if __name__ == "__main__":
    run_script(main)

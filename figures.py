"""Tables from finished runs.

Reads   out/<run>/results.json or results/*.json   (train_imbanid.py)
Writes  nothing but the screen; `keep` writes the small copies in results/ that README's tables are built from

    python figures.py mean out/clinc_g10_s0 out/clinc_g10_s1 out/clinc_g10_s2      mean and standard deviation over seeds
    python figures.py keep out/clinc_g10_s0 out/clinc_g10_s1                       copy results.json to results/<run>.json
    python figures.py table                                                        README's tables, in Markdown
"""
import json
import math
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from make_lt_data import CORPORA, UserError, run_script, write_atomic

# The paper's Table 2, ImbaNID's row: {(dataset, gamma): (NMI, ARI, ACC)}.
PAPER = {("clinc", 1): (97.26, 91.78, 95.64), ("clinc", 3): (95.60, 85.36, 90.44),
         ("clinc", 5): (94.65, 81.90, 88.04), ("clinc", 10): (93.40, 76.21, 82.40),
         ("banking", 1): (87.66, 70.13, 81.14), ("banking", 3): (86.79, 67.35, 76.72),
         ("banking", 5): (83.60, 61.18, 72.89), ("banking", 10): (81.08, 55.80, 66.59),
         ("stackoverflow", 1): (83.52, 77.06, 88.30), ("stackoverflow", 3): (82.12, 75.09, 87.40),
         ("stackoverflow", 5): (81.42, 73.09, 86.50), ("stackoverflow", 10): (79.78, 71.15, 82.60)}
# The paper's Table 3, gamma 10: {tag: (title, head medium tail of CLINC, of BANKING, of StackOverflow)}.
ABLATIONS = {
    "": ("ImbaNID", (82.52, 90.67, 71.26, 68.26, 66.05, 65.87, 90.67, 87.25, 81.67)),
    "cot": ("w/ COT", (72.74, 87.44, 58.67, 62.72, 63.11, 48.70, 86.63, 85.75, 79.67)),
    "eot": ("w/ EOT", (81.41, 83.00, 65.33, 66.59, 65.40, 57.61, 90.00, 86.11, 81.60)),
    "mot": ("w/ MOT", (69.33, 57.67, 30.52, 62.07, 57.34, 26.20, 88.97, 66.00, 64.33)),
    "no_dr": ("w/o DR", (80.74, 88.57, 71.21, 67.17, 65.08, 49.67, 88.33, 86.75, 81.33)),
    "no_qr": ("w/o QR", (82.50, 88.94, 70.52, 63.91, 65.42, 59.02, 87.67, 86.00, 81.57)),
    "no_dr_qr": ("w/o DR and QR", (81.19, 87.19, 71.05, 67.50, 64.88, 50.00, 88.33, 86.51, 80.33)),
    "no_adaptive_weight": ("w/o adaptive weight", (82.37, 90.22, 71.11, 68.18, 65.81, 64.57, 90.30, 87.00, 79.67)),
    "no_cwcl": ("w/o CWCL", (81.93, 90.11, 70.81, 67.83, 66.03, 58.70, 90.33, 85.22, 78.00)),
    "no_iwcl": ("w/o IWCL", (81.78, 86.44, 71.23, 65.54, 64.22, 65.20, 90.51, 76.75, 80.33))}
ROWS = (("ImbaNID", "test"), ("ImbaNID, protocol T", "test_kmeans"), ("k-means, raw features", "kmeans_raw"),
        ("semi-supervised k-means, raw", "ss_kmeans_raw"), ("k-means, pre-trained features", "kmeans_pretrained"))
COLUMNS = ("ACC", "NMI", "ARI", "known", "novel", "head", "medium", "tail")
GROUPS = COLUMNS[-3:]


def read_results(path):
    """results.json of a run folder, or a small copy in results/."""
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: train_imbanid.py has not finished that run") from None
    except ValueError:
        raise UserError(f"{path} is damaged: run train_imbanid.py for it again with --restart") from None


def spread(runs, key):
    """{column: (mean, standard deviation)} of one row of results over runs; null counts as missing."""
    values = {c: np.array([run[key][c] for run in runs], dtype=float) for c in COLUMNS}
    return {c: (v.mean(), v.std(ddof=1) if len(v) > 1 else 0.0) for c, v in values.items()}


def print_mean(folders):
    runs = [read_results(folder) for folder in folders]
    first = runs[0]
    print(f"\n{first['dataset']}, gamma {first['gamma']:g}, encoder {first['encoder']}, seeds "
          f"{' '.join(str(run['seed']) for run in runs)}: mean and standard deviation, percent")
    print(f"{'':30}" + "".join(f"{c:>14}" for c in COLUMNS))
    for title, key in ROWS:
        print(f"{title:30}" + "".join(f"{mean:8.2f} ±{sd:4.2f}" for mean, sd in spread(runs, key).values()))
    minutes = np.array([sum(run["seconds"].values()) for run in runs]) / 60
    print(f"{minutes.mean():.1f} minutes a run, peak memory {max(run['peak_memory_mb'] for run in runs):.0f} MB")


def markdown(columns, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows))


def results_table(folder="results"):
    """README's table in Markdown: our mean over seeds beside the paper's, built from results/*.json."""
    groups = {}
    for path in sorted(Path(folder).glob("*_g*_s*.json")):
        run = read_results(path)
        if run["method"] == "imbanid" and not run["tag"]:
            groups.setdefault((run["dataset"], run["gamma"], run["encoder"]), []).append(run)
    columns = ("corpus", "gamma", "encoder", "seeds", "ACC", "NMI", "ARI", "known", "novel", "semi-sup. k-means, ACC",
               "k-means, ACC", "paper ACC / NMI / ARI (BERT)")
    rows = []
    for key in sorted(groups, key=lambda key: (list(CORPORA).index(key[0]), key[1:])):
        (dataset, gamma, encoder), runs = key, groups[key]
        ours = spread(runs, "test")
        nmi, ari, acc = PAPER.get((dataset, gamma), (None, None, None))
        cells = [CORPORA[dataset][0], f"{gamma:g}", encoder, " ".join(str(run["seed"]) for run in runs)]
        cells += [f"{mean:.2f}" + (f" ± {sd:.2f}" if len(runs) > 1 else "")
                  for mean, sd in (ours[c] for c in ("ACC", "NMI", "ARI", "known", "novel"))]
        cells += [f"{spread(runs, row)['ACC'][0]:.2f}" for row in ("ss_kmeans_raw", "kmeans_raw")]
        cells.append(f"{acc:.2f} / {nmi:.2f} / {ari:.2f}" if acc else "")
        rows.append(cells)
    return markdown(columns, rows)


def ablation_table(folder="results"):
    """README's ablation table: ours (the paper's) for head, medium and tail at gamma 10, and ACC with a paired t-test.

    Empty while no such run is in results/.
    """
    runs = {}
    for path in sorted(Path(folder).glob("*_g10_s*.json")):
        run = read_results(path)
        if run["method"] == "imbanid" and run["config"]["known_ratio"] == 0.75:
            runs[run["dataset"], run["tag"], run["seed"]] = run["test"]
    corpora = [dataset for dataset in CORPORA if any(key[0] == dataset and key[1] for key in runs)]
    if not corpora:
        return ""
    rows = []
    for tag, (title, paper) in ABLATIONS.items():
        cells = [title]
        for dataset in corpora:
            seeds = [seed for name, of, seed in sorted(runs) if (name, of) == (dataset, tag)]
            if not seeds:
                cells += ["not run"] * 4
                continue
            theirs = paper[3 * list(CORPORA).index(dataset):]
            for group, value in zip(GROUPS, theirs):
                cells.append(f"{np.mean([runs[dataset, tag, seed][group] for seed in seeds]):.2f} ({value:.2f})")
            ours, full = (np.array([runs[dataset, which, seed]["ACC"] for seed in seeds]) for which in (tag, ""))
            p = ttest_rel(ours, full).pvalue if len(seeds) > 1 and (ours != full).any() else math.nan
            cells.append(f"{ours.mean():.2f}" + (f", {(ours - full).mean():+.2f} (p {p:.2f})" if p == p else ""))
        rows.append(cells)
    heads = [f"{CORPORA[dataset][0]} {group}" for dataset in corpora for group in (*GROUPS, "ACC")]
    return markdown(["", *heads], rows)


def transport_tables(folder="results"):
    """README's tables on rot.py, built from results/bench_rot.json (tests/bench_rot.py --keep)."""
    found = read_results(Path(folder) / "bench_rot.json")
    names = {dataset: CORPORA[dataset][0] for dataset in found["steps"]}

    def span(values):
        return f"{min(values):.0f} to {max(values):.0f}" if len(set(values)) > 1 else f"{values[0]:.0f}"

    def ratios(part, dataset, *words):
        return [row["ratio"] for key, row in found[part].items()
                if key.startswith(f"{dataset},") and all(word in key for word in words) and row["ratio"]]

    rows = []
    for dataset, steps in found["steps"].items():
        kl = [ratios("pot", dataset, "kl", f"lambda2 {weight},", "unbalanced sinkhorn")[0] for weight in ("0.1", "1", "2", "7")]
        seconds = found["kmeans"][dataset]
        rows.append([names[dataset], span(steps["cold"]), span(steps["corner"]), span(steps["in training"][1:]),
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


def speed_table(folder="results"):
    """README's table on the speed of training, built from results/bench_train.json (tests/bench_train.py --keep)."""
    found = read_results(Path(folder) / "bench_train.json")
    rows = [[title, f"{found[side]['total']:.0f}",
             *(f"{found[side][stage]['seconds']:.0f} s, {found[side][stage]['rows_per_second']:.0f} rows/s, "
               f"{found[side][stage]['peak_memory_mb'] / 1000:.1f} GB" for stage in ("pretrain", "train"))]
            for title, side in (("default", "fast"), ("--no_cache --dtype float32", "slow"))]
    return markdown(["clinc, gamma 10, minilm", "seconds, both stages", "pretrain.py", "train_imbanid.py"], rows)


def main(words):
    command, paths = (words or [""])[0], words[1:]
    if command not in ("mean", "keep", "table") or (command != "table" and not paths):
        raise UserError("usage: figures.py mean RUN..., figures.py keep RUN..., or figures.py table; RUN is a folder in out/")
    if command == "mean":
        print_mean(paths)
    elif command == "keep":
        Path("results").mkdir(exist_ok=True)
        for path in paths:
            write_atomic(Path("results") / f"{Path(path).name}.json", json.dumps(read_results(path), indent=1) + "\n")
    else:
        print(*filter(None, (results_table(), ablation_table(), transport_tables(), speed_table())), sep="\n\n")


if __name__ == "__main__":
    run_script(main)

"""Make of a benchmark split one to choose settings on: a quarter of its known classes hidden, and dev as its test set.

Reads   data/<run>/      (make_lt_data.py)
Writes  data/dev/<run>/  the same, but that the hidden classes count as novel: their rows have no label in training, and dev
        keeps the others alone. The split's own test rows are in no score of it, and its novel classes only in that of the
        pseudo-labels of training rows

    python tests/hide_classes.py data/clinc_g10_s0
    python pretrain.py --dataset clinc --gamma 10 --seed 0 --data_dir data/dev --out_dir out/dev --encoder minilm
    python train_imbanid.py --dataset clinc --gamma 10 --seed 0 --data_dir data/dev --out_dir out/dev --tag default
    python figures.py keep out/dev/clinc_g10_s0_default      to results/dev/, apart from the scores on test sets
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from make_lt_data import TASK, UserError, read_run, run_name, run_script, write_run  # noqa: E402


def hide_classes(labels, truth, num_known, num_classes, seed):
    """The labels of a split with a quarter of the known classes hidden, drawn by seed; the classes are numbered anew.

    labels: {"train" (-1 where hidden), "dev", "test"}. truth: (N,), of train. Returns labels, truth, the number of classes
    that stay known, and for each new number the old one.
    """
    hidden = np.random.default_rng(1000 + seed).permutation(num_known)[:round(num_known / 4)]
    visible = np.setdiff1d(np.arange(num_known), hidden)
    old = np.concatenate([visible, np.sort(hidden), np.arange(num_known, num_classes)])
    new = np.argsort(old)
    seen = (labels["train"] >= 0) & np.isin(labels["train"], visible)
    dev = new[labels["dev"]]
    return {"train": np.where(seen, new[truth], -1), "dev": dev[dev < len(visible)], "test": dev}, new[truth], len(visible), old


def main(words):
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError("usage: tests/hide_classes.py data/<run>")
    source = Path(words[0])
    texts, labels, names, meta = read_run(source)
    if "own" in meta or meta["num_known"] < 4:
        raise UserError(f"{source} is no split of a benchmark with four known classes or more")
    truth, counts = np.load(source / "train_truth.npy"), np.load(source / "class_counts.npy")
    labels, truth, num_known, old = hide_classes(labels, truth, meta["num_known"], meta["num_classes"], meta["seed"])
    texts["test"], texts["dev"] = texts["dev"], [
        text for text, k in zip(texts["dev"], labels["test"]) if k < num_known]
    labelled = int((labels["train"] >= 0).sum())
    meta |= {"on_dev": True, "num_known": num_known, "num_labelled": labelled, "num_unlabelled": len(truth) - labelled,
             "num_dev": len(texts["dev"]), "num_test": len(texts["test"])}
    folder = source.parent / "dev" / run_name(**{key: meta[key] for key in TASK})
    if (folder / "meta.json").exists():
        if read_run(folder)[3] != meta:
            raise UserError(f"{folder} was made from another {source}, or by older code: remove it")
        print(f"{folder} is there already, made from this {source}: skipped")
        return
    write_run(folder, texts, labels, [names[k] for k in old], {"train_truth": truth, "class_counts": counts[old]}, meta)
    print(f"{num_known} of {meta['num_classes']} classes stay known, {labelled} labelled rows; written to {folder}/")


if __name__ == "__main__":
    run_script(main)

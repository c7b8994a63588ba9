"""Make one new-intent-discovery task: an ImbaNID-Bench split of a raw intent corpus, or a table of your own.

Reads   data/raw/<dataset>/{train,dev,test}.tsv  (downloaded and checked by sha256, or taken from --raw_dir)
        or a .csv, .tsv or .jsonl file with a text column and, where there are labels, a label column
Writes  data/<run>/  labels.txt  train.tsv dev.tsv test.tsv  train_label.npy train_truth.npy dev_label.npy
        test_label.npy  class_counts.npy  meta.json        <run> is for example clinc_g10_s0
        of a table of your own: no train_truth.npy and class_counts.npy, empty test files, and train_row.npy

    python make_lt_data.py --dataset clinc --gamma 10 --seed 0
    python make_lt_data.py --dataset banking --gamma 3 --known_ratio 0.5 --raw_dir ~/corpora
    python make_lt_data.py --dataset my_utterances.csv --text_column message --label_column intent

The paper's Sec. 2: class k of K, sorted by size, keeps n_max * gamma^(-(k-1)/(K-1)) of its rows (an exponent as its tables
have it, see long_tail_counts), so the largest class is gamma times the smallest. 75 % of the classes are known, 10 % of their
rows are labelled, everything else is unlabelled.
A table of your own is taken as it is: rows with a label are labelled, rows without are not.

The second half is what every script shares: reading tables and data/<run>/, flags, a user's errors, files that appear whole.
"""
import argparse
import contextlib
import csv
import errno
import gc
import glob
import hashlib
import http.client
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
import unicodedata
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mode

import numpy as np


@dataclass
class Args:
    dataset: str = "clinc"  # clinc, banking, stackoverflow, demo (comes with the repository), or a table of your own
    gamma: float = 10.0  # imbalance ratio n_max / n_min, >= 1; 1 keeps the full training split (Table 2)
    seed: int = 0  # draws the known classes, the kept rows and the labelled rows
    known_ratio: float = 0.75  # share of the classes that is known (Sec. 2; 0.25 and 0.5 in Sec. 4.6)
    labeled_ratio: float = 0.1  # share of the rows of a known class that is labelled (Sec. 2)
    raw_dir: str = ""  # folder that holds <dataset>/{train,dev,test}.tsv; empty: data/raw, downloaded where missing
    data_dir: str = "data"  # where the run's folder is written
    text_column: str = ""  # own table: the column (JSON: key) with the texts; empty: guessed and printed
    label_column: str = ""  # own table: the column with the labels, empty cells are unlabelled; none: cluster without labels
    dev_ratio: float = 0.2  # own table: share of a class's labelled texts kept to check against
    mirror: str = "https://raw.githubusercontent.com"  # host to download from, for machines behind a proxy


TEXTOIR = "thuiar/TEXTOIR/82212b003c8703c3eb7c293afde7e924240f819f/data"
CORPORA = {  # the name in the paper, the pinned home, and the sha256 of each file
    "clinc": ("CLINC150-LT", f"{TEXTOIR}/clinc", {
        "train": "927bbeacbe134c524d1967196c3209d7e7fcd76e8de9ff24e43dc76ed5400dad",
        "dev": "f5ec4e85abfb84b377bd0fcecafd60de8e1ff111f48b3680226c0dad1511f2d5",
        "test": "a056d1e4981d36c783cbee0dd6d055b48537a5eaca94b2cf44b34b1df83a1684"}),
    "banking": ("BANKING77-LT", f"{TEXTOIR}/banking", {
        "train": "ed07418e59a34b76baad3dc697f3ede12139cd8f56e7a746fb38ab78d2b4d196",
        "dev": "b808b9f0b01574ca30d233fa690f43b8c44899a0ce1a737be66b06e1132802a7",
        "test": "684f0b9df082f50ae78243fd56b99d5c8f7debbbfb7086d6df9c5d08ced7d574"}),
    "stackoverflow": ("StackOverflow20-LT", "fanolabs/NID_ACLARR2022/c2bef5aee638dc3f280e0102b63a27d08ddd4bec/data/"
                      "stackoverflow", {
        "train": "9b5eeaf8ffa9f16b692684419695d7b8f2d093e9da9528658fe631ac026fc28d",
        "dev": "4c02e8d422e3db998b95e8af49fbae59443e6c2617b3d4c9279aaa7705434921",
        "test": "08a8bd2e82cef0a5b61715687953302abaa9fb43a17f847e260b15ae5fdadc8c"}),
    "demo": ("demo-LT", "", {}),
}
# StackOverflow's files say 1 to 20 where the others say a name.
STACKOVERFLOW_NAMES = dict(zip(map(str, range(1, 21)), (
    "wordpress oracle svn apache excel matlab visual-studio cocoa osx bash spring hibernate scala sharepoint ajax qt "
    "drupal linq haskell magento").split()))
# Table 1 (gamma 10) and Table 5 (gamma 3, 5) of the paper: |Dl| and |Du|; the other columns never change.
PAPER_COUNTS = {("clinc", 3): (868, 9995), ("clinc", 5): (719, 8164), ("clinc", 10): (583, 6395),
                ("banking", 3): (607, 7163), ("banking", 5): (487, 5924), ("banking", 10): (383, 4658),
                ("stackoverflow", 3): (830, 10140), ("stackoverflow", 5): (686, 8350), ("stackoverflow", 10): (510, 6669)}
SPLITS = ("train", "dev", "test")
TASK = ("dataset", "gamma", "seed", "known_ratio", "labeled_ratio")  # what tells one benchmark task from another, for run_name
MOST = {int: 1e18, float: 1e38}  # a flag's number must be below, where 64-bit integers and float32 end
NO_MEMORY = "out of memory|t allocate memory"  # torch says it by a RuntimeError
TABLE_ENDINGS = (".csv", ".tsv", ".jsonl", ".json")
TEXT_NAMES = ("text", "utterance", "message", "query", "question", "sentence", "body", "content", "input", "description")
LABEL_NAMES = ("label", "intent", "category", "class", "topic", "tag", "target")
LIKE_NONE = ("na", "n/a", "nan", "none", "null", "nil", "-", "--", "?", "unknown", "unlabeled", "unlabelled", "tbd", "todo",
             "other", "others", "misc", "miscellaneous", "oos", "out of scope", "#n/a", "<na>", "(blank)")
DELIMITERS = ",;\t|"
NO_TEXT = re.compile(r"""\{["']|\[["'{\[]|https?://\S+$""")  # JSON, or an address alone
OPEN_NAME = re.compile(rf'(?:^|[{DELIMITERS}])\s*"(?:[^"]|"")*$')  # a header whose last name is in quotes that are open
FEWEST_TEXTS = 10
UNSEEN = "\u200b\ufeff "  # zero-width marks and spaces, taken off both ends of a name or a label
csv.field_size_limit(2**31 - 1)  # a support ticket may be longer than the csv module's 131,072 characters


# ---- the benchmark ----

def long_tail_counts(available, gamma, rng):
    """How many rows each class keeps. available: int (K,). Returns int (K,).

    n_k = floor(n_max * gamma^(-(k-1)/(K-1))) for the k-th largest class, at most what it has. The paper prints the
    exponent (j-1)/K, which with either sign does not give its own tables; this does.
    """
    K = len(available)
    if gamma == 1 or K == 1:
        return available.copy()
    order = np.lexsort((rng.permutation(K), -available))  # largest first, ties in seeded order
    profile = available.max() * gamma ** (-np.arange(K) / (K - 1))
    kept = np.empty(K, dtype=np.int64)
    kept[order] = np.minimum(np.floor(profile + 1e-9), available[order])  # 1e-9: 120 * 10^-1 is 12, not 11.999...
    return kept


def make_split(rows, gamma, seed, known_ratio, labeled_ratio):
    """Draw one task. rows: {split: [(text, label)]}. Returns (texts, labels, names, counts, num_known, labelled).

    texts: {split: [str]}; labels: {split: int64 (N,)}; names: [str] (K,), known classes first, which is the class id;
    counts: int64 (K,) training rows a class; labelled: bool (N,), the training rows whose label may be seen.
    """
    names = sorted({label for _, label in rows["train"]})
    unknown = sorted({label for split in SPLITS for _, label in rows[split]} - set(names))
    if unknown:
        raise UserError(f"class {unknown[0]!r} of dev or test has no training row")
    K = len(names)
    num_known = max(1, math.floor(known_ratio * K + 0.5))
    rng = np.random.default_rng(seed)
    drawn = rng.permutation(K)
    names = [names[i] for i in sorted(drawn[:num_known])] + [names[i] for i in sorted(drawn[num_known:])]
    class_id = {name: i for i, name in enumerate(names)}
    labels = {split: np.array([class_id[label] for _, label in rows[split]], dtype=np.int64) for split in SPLITS}
    texts = {split: [text for text, _ in rows[split]] for split in SPLITS}

    counts = long_tail_counts(np.bincount(labels["train"], minlength=K), gamma, rng)
    if counts.min() < 1:
        raise UserError(f"--gamma {gamma:g} leaves class {names[counts.argmin()]!r} without a single row: choose a smaller one")
    kept, shown = [], []
    for k in range(K):
        members = rng.permutation(np.flatnonzero(labels["train"] == k))[:counts[k]]
        kept.append(members)
        if k < num_known:
            shown.append(members[:math.ceil(labeled_ratio * counts[k] - 1e-9)])
    kept = rng.permutation(np.concatenate(kept))  # so that the order of the rows tells nothing about hidden labels
    labelled = np.isin(kept, np.concatenate(shown))
    texts["train"], labels["train"] = [texts["train"][i] for i in kept], labels["train"][kept]
    known = labels["dev"] < num_known
    texts["dev"], labels["dev"] = [t for t, k in zip(texts["dev"], known) if k], labels["dev"][known]
    return texts, labels, names, counts, num_known, labelled


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_name(dataset):
    """What a table of one's own is called in folder names: my_utterances for ~/Inbox/my_utterances.csv or for itself."""
    path = Path(dataset)
    name = re.sub(r"[^\w-]+", "_", path.stem if path.suffix.lower() in TABLE_ENDINGS else path.name)
    return f"{name}_own" if re.fullmatch(f"({'|'.join(map(re.escape, CORPORA))})(_g[0-9_]*)?", name) else name


def run_name(dataset, gamma, seed, known_ratio=0.75, labeled_ratio=0.1):
    """clinc_g10_s0, with _k50 or _l20 behind it when a ratio is not the paper's 75 or 10 percent; my_utterances_s0."""
    if dataset not in CORPORA:
        return f"{own_name(dataset)}_s{seed}"
    name = f"{dataset}_g{gamma:g}_s{seed}"
    if known_ratio != 0.75:
        name += f"_k{100 * known_ratio:g}"
    if labeled_ratio != 0.1:
        name += f"_l{100 * labeled_ratio:g}"
    return name


def check_task(args):
    if not (args.gamma >= 1 and math.isfinite(args.gamma)):
        raise UserError(f"--gamma {args.gamma:g} is no imbalance ratio: it must be a number >= 1")
    if not 0 <= args.seed < 2 ** 31:  # scikit-learn's k-means takes no more than 32 bits
        raise UserError(f"--seed {args.seed} must be from 0 to {2 ** 31 - 1}")
    for flag, value in (("known_ratio", args.known_ratio), ("labeled_ratio", args.labeled_ratio)):
        if not 0 < value <= 1:
            raise UserError(f"--{flag} {value:g} must be above 0 and at most 1")


def download(url, path, sha256):
    """Fetch url to path, read whole, since no corpus's file is above a megabyte; it appears only if its sha256 is right."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            raw = answer.read()
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as err:
        raise UserError(f"cannot download {url} ({getattr(err, 'reason', err)}): check the network, or pass --raw_dir with "
                        f"a folder that holds {path.parent.name}/{path.name}") from None
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise UserError(f"{url} has sha256 {found[:12]}..., expected {sha256[:12]}...: the download is broken or was "
                        "changed; try again, or pass --raw_dir with a copy you trust")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, raw)


def plain_text(text):
    """text as any table can hold it: \\n for every end of a line, ? for what JSON may hold: NUL, half a surrogate pair."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "?").encode("utf-8", "replace").decode()


def as_cell(value):
    """A value of JSON as the text of a table's cell."""
    if value is None or value != value:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_rows(path):
    """The (text, label) rows of a raw file: tab separated, quoted as the csv module reads it, below the header text, label."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: put it there; without --raw_dir the published corpora are downloaded") from None
    if b"\0" in raw:
        raise UserError(f"{path} holds a NUL byte: it is not a text file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = raw[:err.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8; convert the file to UTF-8 first") from None
    rows, reader = [], csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    try:
        for row in filter(None, reader):
            rows.append([plain_text(cell) for cell in row])
            if len(row) != 2:
                raise UserError(f"{path}, line {reader.line_num}: {len(row)} column(s), expected text <tab> label")
            if not (row[0].strip() and row[1].strip()):
                raise UserError(f"{path}, line {reader.line_num}: empty {'text' if row[1].strip() else 'label'}")
            rows[-1][1] = " ".join(rows[-1][1].split())  # a line of labels.txt
    except csv.Error as err:
        raise UserError(f"{path}, line {reader.line_num}: broken quoting ({err})") from None
    if len(rows) < 2:
        raise UserError(f"{path} is empty: expected a header line and rows of text <tab> label")
    if [name.strip().lower() for name in rows[0]] != ["text", "label"]:
        raise UserError(f"{path}, line 1: expected the header text <tab> label: put it above the rows")
    return rows[1:]


def warn_unless_published(dataset, split, sha256, path, raw_dir):
    """Says so where a file of the paper's corpora, here at path, is another one than was published."""
    home, expected = CORPORA[dataset][1:]
    if expected and sha256 != expected[split]:
        again = "" if raw_dir or not home else "; remove it and what was made from it to download it again"
        print(f"warning: {path} is not the published file (sha256 {sha256[:12]}...): figures made from it are not comparable "
              f"with the paper's{again}", file=sys.stderr)


def raw_corpus(dataset, raw_dir, mirror):
    """{split: rows} and {split: sha256} of a raw corpus, downloaded to data/raw where it is missing."""
    home, expected = CORPORA[dataset][1:]
    folder = Path(raw_dir or "data/raw") / dataset
    if dataset == "demo" and not folder.exists():
        folder = Path(__file__).parent / "data/raw/demo"  # comes with the repository, wherever --raw_dir points
    rows, sha = {}, {}
    for split in SPLITS:
        path = folder / f"{split}.tsv"
        if not raw_dir and home and not path.exists():
            download(f"{mirror.rstrip('/')}/{home}/{split}.tsv", path, expected[split])
        rows[split] = read_rows(path)
        sha[split] = file_sha256(path)
        warn_unless_published(dataset, split, sha[split], path, raw_dir)
        long = [text for text, _ in rows[split] if "\n" in text]
        if long and not expected:
            print(f"{path}: {len(long)} text(s) of several lines, the first {quoted(long[0])!r}: if they are several rows, a "
                  "quote there is not closed", file=sys.stderr)
        if dataset == "stackoverflow":
            try:
                rows[split] = [[text, STACKOVERFLOW_NAMES[label]] for text, label in rows[split]]
            except KeyError as err:
                raise UserError(f"{path}: label {err} is not one of StackOverflow's ids 1 to 20") from None
    return rows, sha


# ---- a table of one's own ----

def open_table(path):
    return open(path, encoding="utf-8-sig", newline="")


def without_nul(first, file, path):
    """Yield the line `first` and the rest of an open table; UserError at a NUL byte."""
    for line in itertools.chain([first], file):
        if "\0" in line:
            raise UserError(f"{path} holds a NUL byte: it is not a text file (or not UTF-8)")
        yield line


def records(file, path):
    """Yield the rows of an open table as dicts of str, reading on as they are asked for.

    path: its name, whose ending tells .csv, .tsv, .jsonl and .json; anything else holds one text a line.
    """
    kind, number, above, said = Path(path).suffix.lower(), 0, 0, None
    try:
        first = file.readline()
        # A spreadsheet's empty row is delimiters alone; sep=; is how Excel says what delimits.
        while kind in TABLE_ENDINGS and first and (odd := re.fullmatch(r'(?:""|[\s,;|])*|"?sep=(.)"?\s*', first)):
            first, above, said = file.readline(), above + 1, odd[1] or said
        if kind in (".csv", ".tsv"):
            yield from delimited(file, path, first, above, said)
            return
        lines = without_nul(first, file, path)
        if kind not in TABLE_ENDINGS:
            yield from ({"text": line.rstrip("\r\n")} for line in lines if line)
            return
        whole = first.lstrip().startswith("[")
        for row in json.loads("".join(lines)) if whole else filter(str.strip, lines):
            number += 1
            row = row if whole else json.loads(row)
            yield {plain_text(key): plain_text(as_cell(value)) for key, value in row.items()}
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid UTF-8; convert the file to UTF-8 first (a spreadsheet can save a table as CSV "
                        "UTF-8)") from None
    except (ValueError, AttributeError, RecursionError) as err:
        where = f"{path}, row {number}" if number else path  # 0: a list [...] that is broken anywhere
        raise UserError(f"{where}: not a JSON object such as {{\"text\": ..., \"label\": ...}}; one a line, or a "
                        f"list [...] of them ({err})") from None


def way_out(row, columns, delimiter, other):
    """What to do about a row with other cells than the header. other: whether another delimiter is in the header."""
    if len(row) > len(columns) and not row[-1].strip():
        return "if every row ends in the delimiter, the header must too; if not, put texts that hold it in quotes"
    if len(row) > len(columns):
        return "put texts that hold the delimiter or a quote in quotes"
    if other:
        return "if the columns are divided by another character, put a line such as sep=; above the header"
    return f"put column names that hold {delimiter!r} in quotes, or a row with all cells first"


def header_lines(first, file):
    """The lines of the header that begins with the line `first`: several where a quoted name goes on in the next one."""
    lines = [first]
    if first.count('"') % 2 and OPEN_NAME.search(first):
        while line := file.readline():
            lines.append(line)
            if line.count('"') % 2:
                break
    return lines


def delimited(file, path, first, above, said):
    """records of a .csv or .tsv. first: the line its header begins with, which has `above` others above it.

    said: the delimiter, where one of these says so.
    """
    begin = above + 1  # the line in which begins what the reader reads next, for the error if that fails
    head = header_lines(first, file)
    first, above = "".join(head), above + len(head) - 1  # the reader takes the header for one line
    bare = re.sub('"[^"]*"', "", first)  # a comma in a quoted name delimits nothing
    delimiter = said or ("\t" if Path(path).suffix.lower() == ".tsv" and "\t" in first else max(DELIMITERS, key=bare.count))
    # A header of one name has no delimiter: no text holds a unit separator, so commas in unquoted texts do no harm.
    reader = csv.reader(without_nul(first, file, path), strict=True, delimiter=delimiter if delimiter in bare else "\x1f",
                        skipinitialspace=f"{delimiter} " in bare)  # which would hide a quote behind it
    full, short = False, []  # full: whether a row had all cells; short: the lines of those that had not
    between = behind = 0  # empty lines between rows, and behind the last one
    alone = []  # the first cells of a table with one column
    long = []  # the lines of rows in which a quote may have swallowed others
    try:
        columns = [plain_text(name).strip().strip(UNSEEN) for name in next(reader, [])]
        columns = [name or f"column {n}" for n, name in enumerate(columns, 1)]  # a spreadsheet saves empty columns too
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{path} has several columns called {twice!r}: give each a name of its own")
        begin = above + reader.line_num + 1
        for row in reader:
            line = above + reader.line_num
            begin = line + 1
            row = row or [""] * (len(columns) == 1)  # an empty line of a one-column table is a row without text
            if not row:
                behind += 1
                continue
            between, behind = between + behind, 0
            full = full or len(row) == len(columns)
            if not full or len(row) > len(columns):
                other = not said and set(DELIMITERS) & set(bare) - {delimiter}
                raise UserError(f"{path}, line {line}: {len(row)} cell(s), the header has {len(columns)}: "
                                f"{way_out(row, columns, delimiter, other)}")
            if any(cell.count("\n") > 20 or delimiter == "\t" in cell and "\n" in cell for cell in row):
                long.append(line - max(cell.count("\n") for cell in row))
            if len(columns) == 1 and row[0] and len(alone) < 100:
                alone.append(row[0])
            if len(row) < len(columns):  # a spreadsheet leaves out the delimiters of empty last cells
                short.append(line)
            yield dict(itertools.zip_longest(columns, map(plain_text, row), fillvalue=""))
    except csv.Error as err:
        reason = str(err).replace("'\x1f'", "the end of the line")
        raise UserError(f"{path}, the row that begins in line {begin}: broken quoting ({reason}); a quote within a "
                        "quoted text is written twice") from None
    for mark in DELIMITERS if len(alone) >= FEWEST_TEXTS else "":
        if mark in alone[0] and len({cell.count(mark) for cell in alone}) == 1:
            print(f"{path}: the header has one name, {columns[0]!r}, but its first rows have {alone[0].count(mark)} {mark!r} "
                  "each: if these divide cells, put the names of all columns in the first line", file=sys.stderr)
    if between:
        print(f"{path}: {between} empty line(s) left out, which the numbers of rows do not count", file=sys.stderr)
    if long:
        print(f"{path}: {len(long)} row(s) of many lines, the first around line {long[0]}: if they are several rows, a quote "
              "there is not closed", file=sys.stderr)
    if short:
        print(f"{path}: {len(short)} row(s) with fewer cells than the header has (first in line {short[0]}): their last cells "
              "count as empty", file=sys.stderr)


def digest(lines):
    """sha256 of a table's lines, dicts, the same whatever a spreadsheet does to quotes, spaces, order, or numbers (55,1)."""
    def plain(key, value):
        number = key in ("share", "confidence") and re.fullmatch(r"(\d+)(?:[.,](\d+))?", value)
        return str(float(f"{number[1]}.{number[2] or 0}")) if number else value

    said = (sorted((key, plain(key, " ".join(value.split()))) for key, value in line.items()) for line in lines)
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(repr(line).encode()).digest() for line in said))).hexdigest()


def own_table(path):
    """[dict of str], the rows of a table that we wrote. The notes that records makes are for tables of others."""
    with open_table(path) as file, contextlib.redirect_stderr(io.StringIO()):
        return list(records(file, path))


def read_clusters(run, *columns):
    """The rows of a run's clusters.csv as somebody's spreadsheet may have left it, names in one_form and each id once.

    columns: that must be there beside id and name. A cluster without rows has none, nor one that somebody took out.
    """
    path, lines, ids = run / "clusters.csv", [], set()
    mend = f"mend it (or remove the file, and the names you gave with it: python predict.py {run} writes it anew)"
    if not path.exists():
        raise UserError(f"{path} is missing: run python predict.py {run} first, which names the clusters")
    for number, line in enumerate(own_table(path), 1):
        if not any(line.values()):  # a spreadsheet may leave an empty one
            continue
        if lacking := [name for name in ("id", "name", *columns) if name not in line]:
            raise UserError(f"{path} has no column {lacking[0]}: {mend}")
        if not line["id"].isdecimal() or int(line["id"]) in ids:
            raise UserError(f"{path}, row {number}: id {line['id']!r} is no whole number, or not the first of its kind: {mend}")
        ids.add(int(line["id"]))
        line |= {"id": str(int(line["id"])), "name": one_form(line["name"])}
        if not line["name"]:
            raise UserError(f"{path}, row {number}: the cluster with id {line['id']} has no name: {mend}")
        lines.append(line)
    if not lines:
        raise UserError(f"{path} holds no id: {mend}")
    return lines


def set_aside(path):
    """Copy a table that somebody has changed since write_table wrote it, and say so. Returns whether it was."""
    if not path.exists():
        return False
    known = path.with_suffix(".sha256")
    try:
        if known.exists() and digest(own_table(path)) in known.read_text().split():
            return False
    except UserError:
        pass  # whatever a spreadsheet has made of it is not ours to write over
    numbered = (path.with_name(f"{path.stem}_edited{n or ''}{path.suffix}") for n in itertools.count())
    aside = next(candidate for candidate in numbered if not candidate.exists())
    write_atomic(aside, path.read_bytes())
    print(f"{path} {'was' if known.exists() else 'may have been'} edited: it is kept as {aside.name}")
    return True


def write_table(path, header, rows):
    """A .csv, and beside it the digest by which set_aside sees that somebody has changed it."""
    text, rows = io.StringIO(newline=""), [[*map(str, row)] for row in rows]
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    text, known = text.getvalue(), path.with_suffix(".sha256")
    new, old = digest(dict(zip(header, row)) for row in rows), known.read_text() if known.exists() else ""
    write_atomic(known, f"{new}\n{old}")  # a kill in between leaves a file that is either
    write_atomic(path, text.encode("ascii" if text.isascii() else "utf-8-sig"))  # by the mark a spreadsheet knows UTF-8
    write_atomic(known, new)


def pick_column(path, columns, flag, wanted, usual):
    """The name of a column: the one asked for, else the first with a usual name, else None."""
    if wanted and wanted not in columns:
        raise UserError(f"--{flag} {wanted} is not in {path}, whose {'other ' * (flag == 'label_column')}columns are "
                        f"{', '.join(columns)}")
    by_name = {name.lower(): name for name in reversed(columns)}
    return wanted or next((by_name[name] for name in usual if name in by_name), None)


def pick_text_column(path, rows, columns, wanted):
    """The column with the texts: the one asked for, one with a usual name, or the one with the most letters in rows."""
    cells = {name: [row[name] for row in rows if row.get(name)] for name in columns}
    letters = {name: sum(sum(map(str.isalpha, cell)) for cell in cells[name] if not NO_TEXT.match(cell)) for name in columns}
    labels = [name for name in columns if name.lower() in LABEL_NAMES and 2 * len(set(cells[name])) <= len(cells[name])]
    likely = [name for name in columns if name not in labels and letters[name]]
    found = pick_column(path, columns, "text_column", wanted, TEXT_NAMES) or max(likely, key=letters.get, default=None)
    if wanted or found and found.lower() in TEXT_NAMES:
        return found
    if found is None:
        raise UserError(f"{path} has no column with text: name it with --text_column")
    if len(found.split()) > 4 and not Path(path).suffix.lower().startswith(".json"):
        print(f"{path}: the texts are in a column called {found!r}: if that is one of them, the file has no header, and "
              "needs a first line such as text", file=sys.stderr)
    if any(re.fullmatch(r"-?\d+([.,]\d+)?", name) for name in columns):
        raise UserError(f"{path}: its first line holds a number and is probably no header ({', '.join(columns)[:100]}): put "
                        "one above it, such as id,text,label, or name the column of texts with --text_column")
    return found


def one_form(name):
    """name as it is compared and written: on one line, nothing without width around it, its accents in one form."""
    return unicodedata.normalize("NFC", " ".join(name.split()).strip(UNSEEN))


def plain_label(cell):
    """A label as a table's cell has it, in one_form, "" for none; a JSON list of one label, as annotation tools write it, is
    that label, an empty one none."""
    try:
        found = json.loads(cell) if cell.startswith(("[", "{")) else cell
    except (ValueError, RecursionError):
        found = cell
    if not found:
        return ""
    found = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else cell
    return one_form(found)


def read_table(path, asked_text, asked_label):
    """(texts, labels, text column, label column or None) of a table, stripped; a label is "" where there is none.

    asked_text, asked_label: --text_column and --label_column, "" where the column is to be found.
    """
    if path.suffix.lower() not in TABLE_ENDINGS:
        raise UserError(f"--dataset {path} is unknown: choose one of {', '.join(CORPORA)}, or a file ending in "
                        f"{', '.join(TABLE_ENDINGS)} with a text column")
    if not path.is_file():
        raise UserError(f"{path} is {'no regular file' if path.exists() else 'missing'}: pass the path of your table")
    with open_table(path) as file:
        rows = list(records(file, path))
    if not rows:
        raise UserError(f"{path} is empty, or a header without rows: expected a header line and texts")
    columns = list(dict.fromkeys(key for row in rows for key in row))  # a JSON object may leave a key out
    if asked_text and asked_text == asked_label:
        raise UserError(f"--text_column and --label_column are both {asked_text}: name two columns")
    no_text = asked_label if asked_label not in ("", "none") and len(columns) > 1 else None
    text_column = pick_text_column(path, rows[:1000], [c for c in columns if c != no_text], asked_text)
    others = [c for c in columns if c != text_column]
    if not asked_label:  # to label in later, perhaps
        others = [c for c in others if any(plain_label(row.get(c, "")) for row in rows)]
    label_column = None if asked_label == "none" else pick_column(path, others, "label_column", asked_label, LABEL_NAMES)
    if label_column is None and not asked_label and others:
        seen = ", ".join(repr(quoted(name)) for name in others[:20]) + ", ..." * (len(others) > 20)
        print(f"{path}: no other filled column is called {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}; if one of {seen} "
              "holds labels, name it with --label_column")
    texts = [row.get(text_column, "").strip() for row in rows]
    labels = [plain_label(row.get(label_column, "")) for row in rows]
    if label_column is not None and not any(labels):
        raise UserError(f"{path}: column {label_column!r} is empty in every row: name another with --label_column, or pass "
                        "--label_column none to cluster without labels")
    if len(set(texts) - {""}) < FEWEST_TEXTS:
        raise UserError(f"{path} has {len(rows)} row(s) with {len(set(texts) - {''})} different text(s) in column "
                        f"{text_column!r}: at least {FEWEST_TEXTS} are needed (--text_column chooses another column)")
    given = [label for label in labels if label]
    if not asked_label and len(given) > 0.9 * len(labels) and 2 * len(set(given)) > len(given):
        raise UserError(f"{path}: most rows have a value of their own in column {label_column!r}, probably not labels: "
                        f"pass --label_column none, or if they are --label_column {shlex.quote(label_column)}")
    return texts, labels, text_column, label_column


def make_own_task(texts, labels, seed, dev_ratio):
    """A task from a table. Returns (texts, labels, names, row) as write_run takes them; prints what was done with odd rows.

    A text that occurs twice is one training row; row: int64 (table rows,) tells which, -1 for an empty text. The
    dev texts stay in train as unlabelled rows, so that they count in the transport and are assigned like the others.
    """
    votes = {}
    for text, label in zip(texts, labels):
        if text:
            votes.setdefault(text, []).extend([label] if label else [])
    distinct = list(votes)
    chosen = [mode(found) if found else "" for found in votes.values()]  # of equally many the first
    names = sorted(set(chosen) - {""})
    class_id = {name: k for k, name in enumerate(names)} | {"": -1}
    label = np.array([class_id[c] for c in chosen], dtype=np.int64)
    rng, dev, few = np.random.default_rng(seed), [], []
    for k, name in enumerate(names):
        members = rng.permutation(np.flatnonzero(label == k))
        if len(members) < 3:
            few.append(name)
        elif dev_ratio:
            dev.append(members[:max(1, int(dev_ratio * len(members)))])
    dev = np.concatenate([np.zeros(0, dtype=np.int64), *dev])
    place = {text: i for i, text in enumerate(distinct)}
    row = np.array([place.get(text, -1) for text in texts], dtype=np.int64)
    train_label = label.copy()
    train_label[dev] = -1

    empty, conflicts = sum(not text for text in texts), sum(len(set(found)) > 1 for found in votes.values())
    like_none = [name for name in names if name.casefold() in LIKE_NONE]
    lost = sorted({label for label in labels if label} - set(chosen))
    same = [name for name, ways in Counter(name.casefold() for name in names).items() if ways > 1]
    notes = ((empty, "row(s) without text: kept in assignments.csv, without a cluster"),
             (len(texts) - empty - len(distinct), "row(s) repeat another's text: each text is learned from once"),
             (conflicts, "text(s) with more than one label: the most frequent label counts, or the first of these"),
             (len(lost), f"label(s) of such texts alone, which count for none of them and are no class "
              f"({', '.join(lost[:5])}{', ...' if lost[5:] else ''})"),
             (len(few), f"label(s) with fewer than 3 labelled texts ({', '.join(few[:5])}{', ...' if few[5:] else ''}): none "
              "of these is kept for dev"),
             (sum(c in like_none for c in chosen), f"text(s) with the label {' or '.join(like_none)}, a class like any other "
              "here: if it means that there is no label, leave the cell empty"),
             (sum(c.startswith('["') for c in chosen), "text(s) with several labels: each list of them is a class of its own"),
             (len(same), f"label(s) written in several ways ({', '.join(same[:5])}{', ...' if same[5:] else ''}): each way is"
              " a class"),
             (len(chosen) * all(chosen), "texts and a label for each, which they keep, so that nothing new can be found: leave "
              "the cell empty of a text that may be of another class"))
    for number, note in notes:
        if number:
            print(f"{number} {note}")
    return ({"train": distinct, "dev": [distinct[i] for i in dev], "test": []},
            {"train": train_label, "dev": label[dev], "test": np.zeros(0, dtype=np.int64)}, names, row)


def own_data(args):
    """main for a table of one's own."""
    path = Path(args.dataset)
    if not 0 <= args.dev_ratio < 1:
        raise UserError(f"--dev_ratio {args.dev_ratio:g} must be 0 or more and below 1")
    folder = Path(args.data_dir) / run_name(args.dataset, args.gamma, args.seed)
    asked = {k: getattr(args, k) for k in ("text_column", "label_column", "dev_ratio")}
    if (folder / "meta.json").exists():
        meta = read_run(folder)[3]
        anew = (f"remove {folder} and add --restart to run_all.sh (tables that you edited are kept as copies), or rename the "
                "file")
        if path.is_file() and file_sha256(path) != meta["raw_sha256"]["table"]:
            raise UserError(f"{folder} was made from another {path.name}: {anew}")
        if other := [f"without --{key}" if was == "" else f"with --{key} {shlex.quote(str(was))}"
                     for key, was in meta["asked"].items() if was != asked[key]]:
            if path.is_file():
                read_table(path, args.text_column, args.label_column)  # says so where there is no such column
            raise UserError(f"{folder} was made {' and '.join(other)}: leave it at that, or {anew}")
        print(f"{folder} is there already, {'made from the same file' if path.is_file() else f'but {path} is not'}: skipped")
        return
    texts, labels, text_column, label_column = read_table(path, args.text_column, args.label_column)
    guessed = "" if args.text_column and args.label_column else "; --text_column and --label_column choose others"
    print(f"{path}: {len(texts)} rows, texts in column {text_column!r}, "
          f"{'no labels' if label_column is None else f'labels in column {label_column!r}'}{guessed}")
    texts, labels, names, row = make_own_task(texts, labels, args.seed, args.dev_ratio)
    labelled = int((labels["train"] >= 0).sum())
    meta = {"dataset": own_name(args.dataset), "own": True, "seed": args.seed, "asked": asked, "text_column": text_column,
            "num_classes": 0, "num_known": len(names), "num_labelled": labelled,
            "labeled_ratio": max(0.1, labelled / len(texts["train"])),  # a labelled row counts for at most 10 in the seeding
            "num_unlabelled": len(texts["train"]) - labelled, "num_dev": len(texts["dev"]), "num_test": 0,
            "num_rows": len(row), "raw_sha256": {"table": file_sha256(path)}}
    write_run(folder, texts, labels, names, {"train_row": row}, meta)
    print(f"{len(names)} known classes, {labelled} labelled texts to learn from, {len(texts['dev'])} more kept for dev, "
          f"{len(texts['train'])} different texts in all; written to {folder}/")


# ---- what every script shares: one line for a user's mistake, flags from the dataclass, files that appear whole ----

class UserError(Exception):
    """Something the user can mend. run_script prints it as one line and exits with 2."""


class ThisProcessError(UserError):
    """What a process of torchrun may be alone to meet, so that it says so itself and does not leave it to the first one."""


def flag_parser(description):
    """An ArgumentParser that takes no abbreviations and raises UserError for a bad flag."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(message):  # argparse's own prints the usage as well and exits
        raise UserError(f"{message}; --help lists the flags")

    parser.error = error
    return parser


def parse_args(Args, argv=None):
    """Args with the command line applied: one flag a field, its help the field's comment. A bad flag raises UserError."""
    parser = flag_parser(sys.modules[Args.__module__].__doc__)
    source = ""
    with contextlib.suppress(OSError, TypeError):  # under a profiler the script is not __main__, and has no source
        source = "".join(inspect.getsource(part) for part in Args.__mro__[:-1])
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    for field in fields(Args):
        text = comments.get(field.name, "").replace("%", "%%")
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{field.name}", type=field.type, default=field.default, metavar=field.type.__name__,
                                help=f"{text} (default: {field.default!r})".replace("''", "empty"))
    return Args(**vars(parser.parse_args(argv)))


def first_process():
    """Whether this process prints for its node: under torchrun all of them meet the same errors and finished runs."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run_script(main, Args=None):
    """Run main(args), or main(words) without Args, and turn what a user can cause into one line on stderr, exit code 2."""
    def stop(*_):
        raise KeyboardInterrupt("SIGTERM")

    gc.freeze()  # what the imports made stays until the end: to look through it for garbage takes seconds
    signal.signal(signal.SIGTERM, stop)  # a batch system's way to say Ctrl-C, and torchrun's to those who outlive a process
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold what the screen has no letter for
    try:
        main(parse_args(Args) if Args else sys.argv[1:])
        flush_stdout()  # here, where an error still has a place
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done: stop() would only be a traceback from Python's own end
    except BaseException as err:
        said = explain(err, Args)
        if not said:
            raise
        leave(*said)


def quoted(text, line=0):
    """A line of another library's message, as a message of ours quotes it: cut, since some go on for a page."""
    said = (str(text).strip().splitlines() or [""])[line]
    return said if len(said) <= 150 else said[:147].rsplit(" ", 1)[0] + " ..."


def explain(err, Args):
    """(message, whether every process of torchrun says it or one for all) of an error that a user can mend, else None."""
    goes_on = "; the same command goes on from what is saved" if hasattr(Args, "restart") else ""
    if isinstance(err, UserError):
        return str(err), isinstance(err, ThisProcessError)
    if isinstance(err, BrokenPipeError):  # `| head` has read enough
        if not goes_on:
            os._exit(0)
        return "its standard output was closed" + goes_on, True
    # None is numpy's short write; the rest are disks that are full and paths that are not what they should be.
    if isinstance(err, OSError) and err.errno in (
            None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.ENOENT,
            errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EIO, errno.ENAMETOOLONG):
        words = f"cannot use {err.filename or 'the output folder'}: {err.strerror or err}; nothing was left half-written"
        return words + goes_on, True
    if isinstance(err, MemoryError) or isinstance(err, RuntimeError) and re.search(NO_MEMORY, str(err)):
        slower = " or, on a GPU, --no_cache" if hasattr(Args, "no_cache") else ""
        words = f"out of memory ({quoted(err) or 'numpy'}): free some, or pass a smaller --batch_size{slower}"
        return f"{words}; finished epochs are saved", True
    if isinstance(err, KeyboardInterrupt):
        if not err.args and not first_process():  # Ctrl-C reaches them all
            os._exit(2)
        return "stopped" + goes_on, True
    return None


def leave(message, every):
    """Print message as one line on stderr, under torchrun by the first process alone unless `every`, and exit with 2."""
    if not every and not first_process():  # torchrun ends the others when one has ended, and the first has yet to say it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(2))
        time.sleep(20)  # after that it is this process's alone
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun's may come while this is being said
        signal.signal(number, signal.SIG_IGN)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.stderr.flush()
    try:
        flush_stdout()
    except OSError:
        os._exit(2)  # Python would try once more and exit with 120
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # nccl and gloo would wait for the others, or add lines of their own
        os._exit(2)
    sys.exit(2)


def flush_stdout():
    if sys.stdout and not sys.stdout.closed:
        sys.stdout.flush()


def check_positive(args, *flags, or_zero=False):
    for flag in flags:
        value = getattr(args, flag)
        if not (0 < value < MOST[type(value)] or or_zero and value == 0):
            least = "0 or more" if or_zero else "a number above 0"
            raise UserError(f"--{flag} {value} must be {least} and below {MOST[type(value)]:g}")


def check_used(args, other, wanted, *flags):
    """UserError for flags that are set though they do nothing unless the flag `other` is `wanted`, True for a switch."""
    for flag in flags:
        if getattr(args, flag) != getattr(type(args), flag) and getattr(args, other) != wanted:
            needed = f"--{other}" + ("" if wanted is True else f" {wanted}")
            raise UserError(f"--{flag} has no effect without {needed}: add that, or leave --{flag} out")


def check_shares(args, *flags):
    for flag in flags:
        if not 0 <= getattr(args, flag) <= 1:
            raise UserError(f"--{flag} {getattr(args, flag)} must be between 0 and 1")


def check_tag(args):
    if "/" in args.tag:
        raise UserError(f"--tag {args.tag}: it becomes part of a folder's name and must not hold a /")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def part_of(path):
    """The name of a file or folder until it is whole: this process's own, since two may be writing the same one, even on two
    machines that share a disk.

    Removes what killed processes of this machine left under such names.
    """
    own = f"{path.name}.{platform.node().replace('.', '-')}."
    for left in path.parent.glob(f"{glob.escape(own)}*.part"):
        pid = left.name.removeprefix(own).removesuffix(".part")
        if pid.isdigit() and (int(pid) == os.getpid() or not is_running(int(pid))):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f"{own}{os.getpid()}.part")


def write_atomic(path, content):
    """Write a file so that it is either the old one or the whole new one. content: str, bytes or write(binary_file)."""
    path = Path(path)
    part = part_of(path)
    try:
        with open(part, "wb") as f:
            if callable(content):
                content(f)
            else:
                f.write(content.encode() if isinstance(content, str) else content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except FileNotFoundError:
        if path.parent.exists():
            raise
        raise UserError(f"cannot write {path}: there is no folder {path.parent}/ any more") from None
    except OSError as err:  # a full disk does not say of which file, and numpy not even that it is full
        if err.errno is None:
            raise OSError(errno.ENOSPC, str(err), str(path)) from None
        err.filename = err.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


# ---- data/<run>/ ----

def write_run(folder, texts, labels, names, arrays, meta):
    """Write data/<run>/ whole: into a folder beside it, then one rename. labels["train"]: -1 where hidden.

    texts, labels, names: as read_run gives them back. arrays: {name: array} more to save as <name>.npy. meta: for meta.json.
    """
    if folder.exists() and not (folder / "meta.json").exists() and any(folder.iterdir()):
        raise UserError(f"{folder} holds files but no meta.json, so they are not make_lt_data.py's: move them elsewhere")
    part = part_of(folder)
    part.mkdir(parents=True)
    try:
        (part / "labels.txt").write_text("".join(name + "\n" for name in names), encoding="utf-8")
        for split in SPLITS:
            with open(part / f"{split}.tsv", "w", encoding="utf-8", newline="") as f:
                out = csv.writer(f, delimiter="\t", lineterminator="\n")
                out.writerow(["text", "label"])
                out.writerows((text, names[k] if k >= 0 else "") for text, k in zip(texts[split], labels[split]))
            np.save(part / f"{split}_label.npy", labels[split])
        for name, values in arrays.items():
            np.save(part / f"{name}.npy", values)
        write_atomic(part / "meta.json", json.dumps(meta, indent=1) + "\n")
        try:
            os.replace(part, folder)  # which may be there, without a file in it
        except OSError:
            if not (folder / "meta.json").exists():  # else another run on the same task was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_run(folder, **task):
    """What training may see of data/<run>/: (texts, labels, names, meta); train_truth.npy stays closed.

    task: the settings asked for, checked against meta.json. texts: {split: [str]}. labels: {split: int64 (N,)} for train
    (-1 where hidden), dev and test. names: [str] (K,).
    """
    remake = f"run make_lt_data.py for {folder.name}"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dict(meta["raw_sha256"])  # the last of what a meta.json holds
        for key, value in task.items():
            if meta[key] != value:
                raise UserError(f"{folder} was made with {key} {meta[key]}, not {value}: remove it and {remake}")
        texts = {}
        for split in SPLITS:
            with open(folder / f"{split}.tsv", encoding="utf-8", newline="") as f:
                texts[split] = [row[0] for row in csv.reader(f, delimiter="\t")][1:]
        labels = {split: np.load(folder / f"{split}_label.npy") for split in SPLITS}
        names = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
        if "own" in meta:
            os.stat(folder / "train_row.npy")  # which predict.py opens
    except FileNotFoundError as err:
        again = (f"remove {folder} and {remake}" if folder.exists() else
                 f"{remake} first (or say where it is: --data_dir)")
        raise UserError(f"{err.filename} is missing: {again}") from None
    except (ValueError, KeyError, TypeError, IndexError, EOFError) as err:
        raise UserError(f"{folder} is damaged ({err}): remove it and {remake}") from None
    for split in SPLITS:
        if len(texts[split]) != len(labels[split]):
            raise UserError(f"{folder}/{split}.tsv and {split}_label.npy differ in length: remove the folder and {remake}")
    return texts, labels, names, meta


def open_run(args):
    """(run, data folder, texts, labels, meta) of the task that a script's Args name; see read_run."""
    check_task(args)
    task, own = {k: getattr(args, k) for k in TASK}, args.dataset not in CORPORA
    run = run_name(**task)
    if own:  # it has no gamma and no ratios
        task = {"dataset": own_name(args.dataset), "seed": args.seed}
    folder = Path(args.data_dir) / run
    texts, labels, _, meta = read_run(folder, **task)
    for name in () if own else ("train_truth.npy", "class_counts.npy"):
        try:  # said now: they are read after hours of training
            np.load(folder / name, mmap_mode="r")
        except (FileNotFoundError, ValueError, EOFError) as err:
            how = "missing" if isinstance(err, FileNotFoundError) else "damaged"
            raise UserError(f"{folder}/{name}, which the metrics need, is {how}: remove {folder} and run "
                            "make_lt_data.py") from None
    return run, folder, texts, labels, meta


def print_table_row(meta):
    """The row of the paper's Table 1 for this split, with the paper's own row under it where it has one."""
    print(f"{CORPORA[meta['dataset']][0]}, gamma {meta['gamma']:g}, seed {meta['seed']}")
    print(f"{'':16}{'|Yk|':>7}{'|Yn|':>7}{'|Dl|':>7}{'|Du|':>7}{'|Dt|':>7}{'|Dl|+|Du|':>11}")
    K, known, lab, unl, test = (meta[k] for k in ("num_classes", "num_known", "num_labelled", "num_unlabelled", "num_test"))
    print(f"{'this split':16}{known:7}{K - known:7}{lab:7}{unl:7}{test:7}{lab + unl:11}")
    paper = PAPER_COUNTS.get((meta["dataset"], meta["gamma"]))
    if paper and meta["known_ratio"] == 0.75 and meta["labeled_ratio"] == 0.1:
        print(f"{'paper':16}{known:7}{K - known:7}{paper[0]:7}{paper[1]:7}{test:7}{sum(paper):11}")


def main(args):
    check_task(args)
    own = args.dataset not in CORPORA
    unread = ("labeled_ratio", "mirror") if own else ("text_column", "label_column", "dev_ratio")
    for flag in unread:  # --gamma, --known_ratio and --raw_dir are let pass, since run_all.sh gives them for a table too
        if getattr(args, flag) != getattr(Args, flag) and (not own or Path(args.dataset).is_file()):
            raise UserError(f"--{flag} has no effect with --dataset {args.dataset}: leave it out")
    if own:
        own_data(args)
        return
    task = {k: getattr(args, k) for k in TASK}
    folder = Path(args.data_dir) / run_name(**task)
    if (folder / "meta.json").exists():
        meta = read_run(folder, **task)[3]
        for split, sha in meta["raw_sha256"].items():
            raw = Path(args.raw_dir or "data/raw") / args.dataset / f"{split}.tsv"
            if raw.exists() and file_sha256(raw) != sha:
                raise UserError(f"{folder} was made from another {raw} than the one that is there now: remove {folder}")
            warn_unless_published(args.dataset, split, sha, raw, args.raw_dir)
        print(f"{folder} is there already, made with the same settings: skipped")
        print_table_row(meta)
        return
    rows, sha = raw_corpus(args.dataset, args.raw_dir, args.mirror)
    texts, labels, names, counts, num_known, labelled = make_split(
        rows, args.gamma, args.seed, args.known_ratio, args.labeled_ratio)
    if labelled.all():
        raise UserError("every row has a label, so there is nothing to discover: lower --known_ratio or --labeled_ratio")
    if len(texts["test"]) < len(names):
        raise UserError(f"{args.dataset} has {len(texts['test'])} test rows for {len(names)} classes: one each is the least")
    meta = {**task, "num_classes": len(names), "num_known": num_known, "num_labelled": int(labelled.sum()),
            "num_unlabelled": int((~labelled).sum()), "num_dev": len(texts["dev"]), "num_test": len(texts["test"]),
            "raw_sha256": sha}
    truth = labels["train"]  # goes to train_truth.npy and nowhere else
    labels["train"] = np.where(labelled, truth, -1)
    write_run(folder, texts, labels, names, {"train_truth": truth, "class_counts": counts}, meta)
    print_table_row(meta)
    print(f"written to {folder}/")


if __name__ == "__main__":
    run_script(main, Args)

"""Name the clusters of a finished run, or label new texts with them.

Reads   out/<run>/{last.pt,pseudo_label.npy,confidence.npy,train_feature.npy,results.json}   (train_imbanid.py)
        data/<run>/                                                                           (make_lt_data.py)
Writes  out/<run>/clusters.csv     a line a cluster: known label or proposed name, size, keywords, five typical texts
        out/<run>/assignments.csv  a line for every row of the table, in its order: cluster, name, confidence
        out/<run>/train_row.npy    the training row of each of these lines, -1 for a line without text
        out/<run>/{clusters,assignments}.sha256  what they said as written, by which edits of them are seen
        or, with new texts, a table of them with their clusters: nothing in out/<run>/ changes then

A clusters.csv that is there is kept, and its names, which you may have edited, are used. It is rewritten, with its names, where
the table repeats other texts now, and with --name_command, which names the new clusters again, if that gives any name.
assignments.csv follows the transport, which weighs all rows at once, and the labels; new texts follow the cluster head alone,
and so may differ.

    python predict.py out/my_utterances_s0
    python predict.py out/my_utterances_s0 --name_command 'my_llm "Name this intent in two words"'
    python predict.py out/my_utterances_s0 new.csv -o labelled.csv
    cat messages.txt | python predict.py out/my_utterances_s0 - > labelled.csv      (one text a line)

Names come from class-based TF-IDF: words that are frequent in a cluster and rare outside it. Confidence is the cluster head's
probability in percent, 100 for a row that has a label.
"""
import codecs
import contextlib
import csv
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm import tqdm

from encoder import Encoder, pick_dtype
from make_lt_data import (
    TASK,
    UserError,
    check_positive,
    flag_parser,
    one_form,
    open_table,
    part_of,
    pick_text_column,
    quoted,
    read_clusters,
    read_run,
    records,
    run_name,
    run_script,
    set_aside,
    write_atomic,
    write_table,
)
from pretrain import data_fingerprint, load_checkpoint, load_trained_layers, pick_device

EXAMPLES = 5  # typical texts of a cluster in clusters.csv
KEYWORDS = 8  # of a cluster there, at most
# Function words of requests, and what is left of "don't" and "I'm", beside scikit-learn's list of English function words.
STOP_WORDS = set(
    "does did doing don doesn didn isn aren wasn won ll ve re just please want wants wanted need needs needed like know tell "
    "let make got getting going say said thing things way".split())
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"  # Thai, Lao, Burmese, Khmer; kana, Han
MARKS = (  # parts of words that \w leaves out: accents, points, and the vowels of India's scripts
    "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0963\u0966-\u096f\u0971-\u0df3")
WORD = rf"(?<![\w{MARKS}])[^\W\d_][\w{MARKS}]{{1,39}}(?![\w{MARKS}])"  # a longer one would make a name of itself
SHOWN = 20  # typical texts that --name_command reads
SPREADSHEETS = (".xlsx", ".xls", ".ods")
ASSIGNED = "row", "text", "label", "cluster", "name", "confidence"  # the columns of assignments.csv
NEW_COLUMNS = ("cluster", "name", "confidence", "second", "second_confidence", "third", "third_confidence")


# ---- names ----

def pieces(text):
    """Two to four neighbouring letters of the scripts in UNSPACED, and the words of others."""
    letter = rf"[^\W\d_{UNSPACED}]"
    runs, words = re.findall(f"[{UNSPACED}]+", text), re.findall(f"{letter}(?:{letter}|[{MARKS}]){{1,39}}", text.lower())
    return words + [run[i:i + n] for run in runs for n in (2, 3, 4) for i in range(len(run) - n + 1)]


def keywords(texts, cluster, K):
    """Class-based TF-IDF (Grootendorst 2022, Eq. 2): K lists of words, best first. texts: [str] (N,). cluster: int (N,).

    A pair of words, neighbours where function words are left out, leads if it weighs enough beside the best single word; the
    others are single words. Scripts that write without spaces are read by two to four letters instead, weighed by the root of
    their number.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer  # two seconds that new texts need not take
    letters = [letter for text in texts[:2000] for letter in text if letter.isalpha()]
    spaced = 2 * len(re.findall(f"[{UNSPACED}]", "".join(letters))) <= len(letters)
    vectorizer = CountVectorizer(analyzer=pieces)
    if spaced:
        vectorizer = CountVectorizer(ngram_range=(1, 2), stop_words=[*STOP_WORDS | ENGLISH_STOP_WORDS], token_pattern=WORD)
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError:  # not one word in all texts: numbers, emoji, function words alone
        return [[] for _ in range(K)]
    terms, found = vectorizer.get_feature_names_out(), []
    rarity = np.log1p(counts.sum() / K / np.asarray(counts.sum(0))[0]) * (1 if spaced else np.sqrt([*map(len, terms)]))
    pair = np.array([" " in term for term in terms])
    for k in range(K):
        own = np.asarray(counts[cluster == k].sum(0))[0]
        score = own / max(1, own.sum()) * rarity
        best = int((score * pair).argmax())
        leads = pair[best] and score[best] > 0.4 * score.max()
        chosen = [terms[best]] if leads else []
        seen = {word.rstrip("s") for term in chosen for word in term.split()}
        for j in np.argsort(-score * ~pair, kind="stable"):
            if pair[j] or score[j] <= 0 or len(chosen) == KEYWORDS:
                break
            if not spaced and any(terms[j] in term or term in terms[j] for term in chosen):
                continue
            if terms[j].rstrip("s") not in seen:  # card and cards are one keyword
                chosen.append(terms[j])
                seen.add(terms[j].rstrip("s"))
        found.append(chosen)
    return found


def unused(name, taken, key):
    """name, with the first number behind it that makes key(name) new to the set taken, which it joins."""
    numbered = (name if n == 1 else f"{name} {n}" for n in itertools.count(1))
    found = next(candidate for candidate in numbered if key(candidate) not in taken)
    taken.add(key(found))
    return found


def plain_name(name):
    """What two names that a reader would take for one have in common."""
    return name.casefold().replace("_", " ").replace("-", " ")


def propose_names(words, known):
    """A name for each new cluster from its keywords, different from all others and from the known ones. Returns [str]."""
    joint = "_" if any("_" in name for name in known) else " "
    taken, names = {plain_name(name) for name in known}, []
    for own in words:
        parts = own[:1] if own and " " in own[0] else own[:2]  # a pair of words is a name already
        rest = own[len(parts):]
        while parts and plain_name(" ".join(parts)) in taken and rest:
            parts.append(rest.pop(0))
        name = " ".join(parts) or "no words"
        names.append(unused(name, taken, plain_name).replace(" ", joint))
    return names


def ask_for_name(command, words, examples, proposed, first=True):
    """The first line the user's program prints when it reads a cluster's keywords and typical texts, None if it fails.

    UserError where there is no such program, if this is the first cluster it is asked about.
    """
    asked = [f"keywords: {', '.join(words)}", *(" ".join(text.split()) for text in examples)]
    said = subprocess.run(command, shell=True, capture_output=True, input="\n".join(asked) + "\n", encoding="utf-8",
                          errors="replace")
    printable = re.sub(r"\x1b\[[0-9;]*m|[\x00-\x09\x0b-\x1f\x7f]", " ", said.stdout)  # a terminal's colours, NUL
    line = next(filter(None, map(one_form, printable.splitlines())), "")
    reason = quoted(said.stderr, -1)
    if said.returncode in (126, 127) and first:
        raise UserError(f"--name_command {command!r} cannot be run: {reason}")
    if said.returncode or not line:
        print(f"--name_command failed for cluster {proposed!r} (exit code {said.returncode}{reason and ': ' + reason}): "
              "that name stays", file=sys.stderr)
        return None
    return line[:100]


# ---- a finished run ----

def open_model(run):
    """(checkpoint of the last epoch, results.json) of a run folder."""
    try:
        results = json.loads((run / "results.json").read_text())
        method = results["method"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        raise UserError(f"{run} is no finished run (results.json is missing or damaged): pass a folder that train_imbanid.py "
                        "wrote") from None
    if method != "imbanid":
        raise UserError(f"{run} is a run of {method}, which has no cluster head: pass one of train_imbanid.py")
    try:
        state = load_checkpoint(run / "last.pt")
    except UserError:
        state = None
    if state is None:
        raise UserError(f"{run}/last.pt is missing or damaged: delete it and {run}/results.json and run train_imbanid.py for "
                        "it again")
    return state, results


def open_data(config, data_dir):
    """The data folder that a run was trained on, and read_run of it."""
    data = Path(data_dir) / run_name(**{key: config[key] for key in TASK})
    found = read_run(data)
    if data_fingerprint(data) != config["pretrain"]["data"]:
        raise UserError(f"{data} holds other data now than the run was trained on: train it anew, or pass --data_dir")
    return data, *found


def load_array(run, name):
    try:
        return np.load(run / f"{name}.npy")
    except (OSError, ValueError, EOFError):
        raise UserError(f"{run}/{name}.npy is missing or damaged: delete {run}/results.json and run train_imbanid.py for it "
                        "again") from None


def cluster_titles(found, known, words, typical, size, command):
    """(title of each cluster, whether the command gave one, the Ctrl-C that ended the asking or None).

    found: {id: name} of clusters.csv, empty without one; other titles are labels of known classes or proposals, those of
    clusters that found lacks unlike all others. command: is asked to name the new clusters that found has, the largest first.
    words, typical, size: of each cluster, keywords, texts and rows.
    """
    K, num_known, answers, interrupt = len(words), len(known), {}, None
    titles = [found.get(k, title) for k, title in enumerate(known + propose_names(words[num_known:], known))]
    gone = [k for k in range(num_known, K) if found and k not in found]  # their lines somebody has deleted
    if command:
        asked = sorted((k for k in range(num_known, K) if typical[k] and k not in gone), key=lambda k: -size[k])
        bar = tqdm(asked, desc="naming", disable=not sys.stderr.isatty())
        try:
            for k in bar:
                if name := ask_for_name(command, words[k], typical[k][:SHOWN], titles[k], first=not answers):
                    answers[k] = name
        except KeyboardInterrupt as err:  # the names so far may have cost money
            interrupt = err
            print(f"{len(answers)} of {len(asked)} new clusters were named; predict.py with --name_command asks about all of "
                  "them again")
        taken = {title.casefold() for k, title in enumerate(titles) if k not in answers and k not in gone}
        for k, name in answers.items():
            titles[k] = unused(name, taken, str.casefold)
    taken = {plain_name(title) for k, title in enumerate(titles) if k not in gone}
    for k in gone:
        titles[k] = unused(titles[k], taken, plain_name)
    return titles, bool(answers), interrupt


def describe(args):
    """Write clusters.csv, assignments.csv and train_row.npy of a run and print what is in them."""
    run = Path(args.run)
    state, _ = open_model(run)
    data, texts, labels, names, meta = open_data(state["config"], args.data_dir)
    head = normalize(state["head"], dim=1).numpy()
    K, num_known = len(head), meta["num_known"]
    cluster, confidence, feature = (load_array(run, name) for name in ("pseudo_label", "confidence", "train_feature"))
    # given: the label that a training row has, -1 for none. row: the training row of each line of the table, -1 without text.
    given, row = labels["train"], np.arange(len(cluster))
    if "own" in meta:
        row = np.load(data / "train_row.npy")
        of_dev = dict(zip(texts["dev"], labels["dev"].tolist()))  # training rows too, whose labels were kept from training
        given = np.array([of_dev.get(text, k) for text, k in zip(texts["train"], given.tolist())])
    texts = texts["train"]
    cluster, confidence = np.where(given >= 0, given, cluster), np.where(given >= 0, 1.0, confidence)

    words = keywords(texts, cluster, K)
    nearness = np.einsum("nh,nh->n", feature.astype(np.float32), head[cluster])
    members = [np.flatnonzero(cluster == k) for k in range(K)]
    typical = [[texts[i] for i in own[np.argsort(-nearness[own], kind="stable")]] for own in members]
    used = row[row >= 0]  # a repeated text counts as often as it stands there
    size = np.bincount(cluster[used], minlength=K)
    found = cluster_names(run, K) if (run / "clusters.csv").exists() else {}
    titles, named, interrupt = cluster_titles(found, names[:num_known], words, typical, size, args.name_command)
    try:  # a table in which other texts are repeated than before has the same training rows, and clusters of other sizes
        counted = np.array_equal(np.load(run / "train_row.npy"), row)
    except (OSError, ValueError, EOFError):
        counted = False
    recount = bool(found) and not counted
    anew = named or recount or not found

    sure = np.bincount(cluster[used], confidence[used], K) / np.maximum(size, 1)
    order = np.argsort(-size, kind="stable")
    lines = [[k, "yes" if k < num_known else "no", titles[k], size[k], f"{100 * size[k] / len(used):.2f}",
              f"{100 * sure[k]:.1f}", ", ".join(words[k]), *(text[:1000] for text in (typical[k] + [""] * EXAMPLES)[:EXAMPLES])]
             for k in order if size[k] and (not found or k in found)]
    header = ["id", "known", "name", "size", "share", "confidence", "keywords", *(f"example_{n + 1}" for n in range(EXAMPLES))]
    if anew:
        set_aside(run / "clusters.csv")
        write_table(run / "clusters.csv", header, lines)
    if set_aside(run / "assignments.csv"):
        print("its labels are learned from when you give that file to run_all.sh")
    assigned = [[texts[i], titles[given[i]] if given[i] >= 0 else "", cluster[i], titles[cluster[i]],
                 f"{100 * confidence[i]:.1f}"] if i >= 0 else [""] * 5 for i in row.tolist()]
    write_table(run / "assignments.csv", ASSIGNED, [[number, *cells] for number, cells in enumerate(assigned, 1)])
    write_atomic(run / "train_row.npy", lambda f: np.save(f, row))
    new = [line for line in lines if line[1] == "no"]
    empty = sum(size == 0)
    print(f"{len(lines) - len(new)} known clusters and {len(new)} new ones{f', {empty} more without rows' if empty else ''}"
          + ("; the largest new ones:" if new else ""))
    for line in new[:10]:
        print(f"{line[3]:7} rows  {line[5]:>5} %  {line[2][:40]:40}  {' '.join(line[7].split())[:70]}")
    said = f"written to {run}/clusters.csv{' (sizes counted anew)' * recount} and assignments.csv" if anew else (
        f"written to {run}/assignments.csv with the names of clusters.csv (delete clusters.csv for new ones)")
    print(f"{said}; next: python figures.py {run}, which draws report.html")
    if interrupt:
        raise interrupt


# ---- new texts ----

class Labeller:
    """The encoder and cluster head of a run: texts in, the three best names and their probabilities out.

    names: {id: name} of the clusters that count; clusters with the same name are one, with the sum of their probabilities.
    """

    def __init__(self, state, names, device, dtype):
        config, device = state["config"], pick_device(device)
        pre = config["pretrain"]
        self.encoder = Encoder(pre["encoder"], pre["max_length"], device, pick_dtype(dtype, device),
                               trained_layers=pre["trained_layers"])
        load_trained_layers(self.encoder, state)
        self.names, self.temperature = list(dict.fromkeys(names.values())), config["temperature"]
        self.clusters = torch.tensor(sorted(names), device=device)
        self.named = torch.tensor([self.names.index(names[k]) for k in sorted(names)], device=device)
        self.head = normalize(state["head"].to(device)[self.clusters], dim=1)

    def __call__(self, texts):
        """texts: [str] (B,). Returns of each text its cluster, at most three names, best first, and their probabilities."""
        z = normalize(self.encoder.all_features(self.encoder.trunk(self.encoder.tokenize(texts))), dim=1)
        share = (z @ self.head.T / self.temperature).softmax(1)
        best = torch.zeros(len(z), len(self.names), device=z.device).index_add_(1, self.named, share).topk(
            min(3, len(self.names)), dim=1)
        cluster = self.clusters[torch.where(self.named == best.indices[:, :1], share, -1.0).argmax(1)]
        return cluster.tolist(), [[self.names[i] for i in row] for row in best.indices.tolist()], best.values.tolist()


def cluster_names(run, K):
    """{id: name} from clusters.csv. UserError where an id is none of the run's K clusters."""
    names = {int(line["id"]): line["name"] for line in read_clusters(run)}
    if max(names) >= K:
        raise UserError(f"{run}/clusters.csv: id {max(names)} is not one of 0 to {K - 1}: mend that line, or remove it")
    return names


def label_rows(rows, text_column, labeller, columns, batch):
    """Yield the rows with the seven columns added, batch by batch. A row without text gets none."""
    while part := list(itertools.islice(rows, batch)):
        filled = [row for row in part if row.get(text_column, "").strip()]
        found = labeller([row[text_column].strip() for row in filled]) if filled else ()
        for row, cluster, names, shares in zip(filled, *found):
            row |= dict(zip(columns, [cluster, *(cell for name, p in zip(names, shares) for cell in (name, f"{100 * p:.1f}"))]))
        yield part


def output_file(args):
    """(what is written in the end, what is written until then), once the input and --output are known to be usable."""
    stdin, output = args.input == "-", Path(args.output)
    if args.output == "-" and not sys.stdout:
        raise UserError("the standard output is closed: pass -o FILE")
    if stdin and not sys.stdin:
        raise UserError("the standard input is closed: pass a file of new texts")
    if not stdin and not Path(args.input).is_file():
        raise UserError(f"{args.input} is {'no regular file' if Path(args.input).exists() else 'missing'}: pass a .csv, .tsv "
                        "or .jsonl file, a file of lines, or - for stdin")
    if Path(args.input).suffix.lower() in SPREADSHEETS:
        raise UserError(f"{args.input} is a spreadsheet's own file: save it as CSV in UTF-8")
    regular = output.is_file() or not output.exists()  # not /dev/null and the like
    if regular:
        output = Path(os.path.realpath(output))  # what a link points to, and not the link, is replaced
    if args.output != "-" and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output {args.output} cannot be written: pass a file's name in a folder that exists")
    of_a_run = output.parent == Path(args.run).resolve() or any(
        (output.parent / name).exists() for name in ("pretrain.pt", "last.pt", "clusters.sha256"))
    if args.output != "-" and regular and of_a_run:
        raise UserError(f"--output {args.output} would lie among the files of a run: choose another folder")
    return output, part_of(output) if regular else output


def new_table_columns(args, sample, trained_on):
    """(all columns of the new table, that of the texts, those to add). sample: its first rows. trained_on: the run's column."""
    columns = seen = list(dict.fromkeys(key for row in sample for key in row))
    if Path(args.input).suffix.lower() in (".json", ".jsonl"):  # where any row may bring a new key
        with open_table(args.input) as whole:
            columns = list(dict.fromkeys(key for row in records(whole, args.input) for key in row))
    wanted = args.text_column or (trained_on if trained_on in columns else "")
    text_column = pick_text_column(args.input, sample, columns if wanted else seen, wanted)
    added = []
    for name in NEW_COLUMNS:
        while name in columns:
            name = f"predicted_{name}"
        added.append(name)
    return columns, text_column, added


def label_file(args):
    """Stream args.input to args.output with a cluster for every row."""
    run, stdin = Path(args.run), args.input == "-"
    state, results = open_model(run)
    names = cluster_names(run, len(state["head"]))
    output, part = output_file(args)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline="") if stdin else
                                   open_table(args.input))
        rows = records(file, "stdin" if stdin else args.input)
        sample = list(itertools.islice(rows, 1 if stdin else 1000))  # to choose the column by
        if not sample:
            raise UserError(f"{'stdin' if stdin else args.input} is empty, or a header without rows")
        columns, text_column, added = new_table_columns(args, sample, results.get("text_column"))
        labeller = Labeller(state, names, args.device, args.dtype)
        if args.output == "-":
            out = stack.enter_context(io.TextIOWrapper(sys.stdout.buffer, "utf-8", newline="", write_through=True))
        else:
            if part != output:
                stack.callback(part.unlink, missing_ok=True)
            with open(os.devnull if stdin else args.input, "rb") as given:  # with a spreadsheet's mark if that has one
                code = "utf-8-sig" if given.read(3) == codecs.BOM_UTF8 else "utf-8"
            out = stack.enter_context(open(part, "w", encoding=code, newline=""))
        bar = stack.enter_context(tqdm(total=None if stdin else os.path.getsize(args.input), unit="B", unit_scale=True,
                                       desc="labelling", disable=not sys.stderr.isatty()))
        table = csv.DictWriter(out, [*columns, *added], restval="", extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        count = without = 0
        for done in label_rows(itertools.chain(sample, rows), text_column, labeller, added, args.batch_size):
            table.writerows(done)
            count += len(done)
            without += sum(added[0] not in row for row in done)
            if not stdin:
                bar.update(file.buffer.tell() - bar.n)
        out.flush()
        elsewhere = "; if another column has the texts, pass --text_column" * (without == count and len(columns) > 1)
        print(f"{count - without} rows labelled by column {text_column!r}" + (f", {without} have no text" if without else "")
              + elsewhere, file=sys.stderr)
        if args.output != "-" and part != output:
            if output.exists():
                shutil.copymode(output, part)
            os.replace(part, output)
            print(f"written to {args.output}")


def texts_wait():
    """Whether a pipe or a file at standard input holds something that nobody has read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nothing that can hold any, or closed
        return not sys.stdin.isatty() and fcntl.ioctl(sys.stdin, termios.FIONREAD, b"\0" * 4) != b"\0" * 4
    return False


def main(words):
    parser = flag_parser(__doc__)
    parser.add_argument("run", help="a folder that train_imbanid.py wrote, such as out/my_utterances_s0")
    parser.add_argument("input", nargs="?", help="new texts: .csv, .tsv, .jsonl; another file or - (stdin) holds one a line")
    parser.add_argument("-o", "--output", default="-", help="where the labelled table (CSV) goes (default: -, the screen)")
    parser.add_argument("--text_column", default="", help="column of the new texts (default: guessed)")
    parser.add_argument("--name_command", default="", help="program that reads a new cluster's keywords and typical texts and "
                        "prints a name; nothing leaves the machine without it")
    parser.add_argument("--data_dir", default="data", help="where make_lt_data.py wrote (default: data)")
    parser.add_argument("--batch_size", type=int, default=1024, help="new texts taken at once (default: 1024)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, or auto: bfloat16 where it is native (default)")
    args = parser.parse_args(words)
    if Path(args.output).suffix.lower() in (".tsv", ".json", ".jsonl", *SPREADSHEETS):
        raise UserError(f"--output {args.output}: what is written is CSV: choose a name that ends in .csv")
    if args.output in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        args.output = "-"  # opened anew, a file that the shell appends to would be emptied
    check_positive(args, "batch_size")
    of_new_texts = [flag for flag in ("output", "text_column", "batch_size", "device", "dtype")
                    if getattr(args, flag) != parser.get_default(flag)]
    if args.input is None and of_new_texts:
        raise UserError(f"--{of_new_texts[0]} belongs to new texts, and none were given: predict.py RUN new.csv -o FILE")
    if args.input is not None and args.name_command:
        raise UserError("--name_command belongs to the naming of a run's clusters: pass no new texts with it")
    (describe if args.input is None else label_file)(args)
    if args.input is None and texts_wait():
        print(f"predict.py: the standard input was not read; to label its lines: predict.py {args.run} -", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)

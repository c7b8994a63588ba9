"""A table of one's own: reading it, names, report, and labels for new texts."""
import codecs
import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PATIENCE, REPO, TINY_PRETRAIN, TINY_TRAIN, one_line_error, read_tsv, script
from torch.nn.functional import normalize

import make_lt_data
import predict
from make_lt_data import (
    UserError,
    make_own_task,
    make_split,
    open_table,
    plain_label,
    raw_corpus,
    read_run,
    read_table,
    records,
    run_name,
    set_aside,
    write_table,
)
from metrics import cluster_metrics
from predict import Labeller, ask_for_name, cluster_names, cluster_titles, keywords, open_model, propose_names, unused
from pretrain import load_checkpoint
from train_imbanid import Args, clear_out, lambda2_of, wanted_classes

TEXTS = [f"{verb} the {thing}" for verb in ("open", "close", "paint") for thing in ("door", "window", "gate", "roof")]


def table(path, rows, header=("text", "label"), delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f, delimiter=delimiter).writerows([header, *rows])
    return path


def read(path):
    with open(path, encoding="utf-8-sig", newline="") as f:
        return list(csv.DictReader(f))


# ---- reading ----

def test_columns_are_guessed_and_can_be_named(tmp_path):
    rows = [(n, "x" * 50, text, "b" if n % 2 else "") for n, text in enumerate(TEXTS)]
    path = table(tmp_path / "t.csv", rows, ("id", "session", "Message", "Intent"), ";")
    texts, labels, text_column, label_column = read_table(path, "", "")
    assert (texts, text_column, label_column) == (TEXTS, "Message", "Intent") and labels == ["", "b"] * 6
    assert read_table(path, "", "none")[3] is None
    named = table(tmp_path / "n.csv", [(text, "c", text[::-1]) for text in TEXTS], ("text", "topic", "note"))
    index = table(tmp_path / "index.csv", list(enumerate(TEXTS)), ("", "text"))  # as pandas writes it
    assert read_table(index, "", "")[1] == read_table(index, "", "none")[1] == [""] * 12
    assert read_table(named, "note", "topic")[0][0] == "rood eht nepo" and read_table(named, "note", "text")[1] == TEXTS
    odd = table(tmp_path / "odd.tsv", [(n, text) for n, text in enumerate(TEXTS)], ("n", "what"), "\t")
    assert read_table(odd, "", "")[2:] == ("what", None)  # no usual name: the column with the most letters
    tag = table(tmp_path / "tag.csv", list(enumerate(TEXTS)), ("id", "tag"))
    assert read_table(tag, "", "")[2:] == ("tag", None)  # nothing else holds a letter
    uuid = table(tmp_path / "uuid.csv", [(f"x{n}", text) for n, text in enumerate(TEXTS)], ("uuid", "topic"))
    assert read_table(uuid, "", "")[2:] == ("topic", None)  # labels would repeat
    phrase = table(tmp_path / "phrase.csv", [(text, "a_long_name_of_an_intent" * 3) for text in TEXTS], ("phrase", "intent"))
    for asked in ("", "intent"):
        assert read_table(phrase, "", asked)[2:] == ("phrase", "intent")


def test_a_name_whose_quote_never_ends_is_told_as_soon_for_many_rows(tmp_path):
    path, start = tmp_path / "open.csv", time.time()
    path.write_text('id,"text\n' + "1,open the door\n" * 200_000)
    with open_table(path) as file, pytest.raises(UserError):
        list(records(file, path))
    assert time.time() - start < 10, "0.2 s; 40 where every line copied all before it"


def test_a_label_that_is_json_too_deep_to_read_is_taken_as_it_is():
    assert plain_label("[" * 100_000) == "[" * 100_000


def test_a_label_column_that_is_empty_everywhere_holds_no_labels(tmp_path, capsys):
    path = table(tmp_path / "t.csv", [(text, "", "", "x" if n else "") for n, text in enumerate(TEXTS)],
                 ("text", "label", "intent", "team"))
    texts, labels, _, label_column = read_table(path, "", "")
    assert texts == TEXTS and label_column is None and set(labels) == {""}
    assert "no other filled column is called" in (said := capsys.readouterr().out) and "one of 'team' holds" in said
    table(path, [(text, "", "a") for text in TEXTS], ("text", "label", "intent"))
    assert read_table(path, "", "")[3] == "intent"


def test_every_usual_name_of_a_label_column_is_found_and_label_first(tmp_path):
    said = (REPO / "README.md").read_text().split("The label column is found if it is called ")[1].split(".")[0]
    names = re.split(", | or ", said)
    assert len(names) == 7
    for name in names:
        path = table(tmp_path / "t.csv", [(text, "b", "a") for text in TEXTS], ("text", "note", name.title()))
        assert read_table(path, "", "")[1:] == (["a"] * len(TEXTS), "text", name.title())
    both = table(tmp_path / "both.csv", [("b", text, "a") for text in TEXTS], ("topic", "text", "label"))
    assert read_table(both, "", "")[3] == "label"  # the more usual name, wherever it stands
    swapped = table(tmp_path / "swapped.csv", [("an intent of a long name", text) for text in TEXTS], ("message", "note"))
    assert read_table(swapped, "", "message")[2:] == ("note", "message")  # what holds the labels is not read as texts


def test_ten_different_texts_are_enough_and_nine_are_not(tmp_path):
    rows = [(text, "") for text in TEXTS[:9]] * 2
    with pytest.raises(UserError, match="18 row.* 9 different text.* at least 10 are needed"):
        read_table(table(tmp_path / "nine.csv", rows), "", "none")
    assert len(read_table(table(tmp_path / "ten.csv", [*rows, (TEXTS[9], "")]), "", "none")[0]) == 19


def test_spaces_around_a_text_make_no_other_text_and_spaces_alone_none(tmp_path):
    own = [*TEXTS, "within  it\nthey are kept"]
    path = table(tmp_path / "t.csv", [(text, "") for text in [*own, f" {own[0]}", f"{own[1]}\t\n", " \n "]])
    found, _, _, row = make_own_task(*read_table(path, "", "none")[:2], 0, 0.2)
    assert found["train"] == own and row.tolist() == [*range(len(own)), 0, 1, -1]


def test_bars_divide_cells_and_tabs_before_commas(tmp_path):
    said = [f"{text}, please" for text in TEXTS]
    for name, columns, mark in (("bars.csv", "text|label", "|"), ("TABS.TSV", "text\tlabel\tid, case, ticket", "\t")):
        more = "1".join([mark, "\n"]) if "id" in columns else "\n"
        (tmp_path / name).write_text(f"{columns}\n" + "".join(f"{text}{mark}a{more}" for text in said))
        assert read_table(tmp_path / name, "", "")[:2] == (said, ["a"] * len(said)), name


def test_the_mark_of_utf_8_is_none_of_the_first_text_or_row(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "t.jsonl").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "t.txt").write_text("\n".join(TEXTS), encoding="utf-8-sig")
    for name in ("t.jsonl", "t.txt"):
        with open_table(tmp_path / name) as file:
            assert [row["text"] for row in records(file, name)] == TEXTS


def test_json_lines_json_and_unquoted_commas(tmp_path):
    labels = {7: {"label": "a"}, 8: {"label": None}, 9: {"label": float("nan")}}
    lines = [json.dumps({"text": text} | labels.get(n, {})) for n, text in enumerate(TEXTS)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "t.json").write_text("[" + ",\n".join(lines) + "]")
    for name in ("t.jsonl", "t.json"):
        texts, labels, _, label_column = read_table(tmp_path / name, "", "")
        assert texts == TEXTS and label_column == "label" and labels == [""] * 7 + ["a"] + [""] * 4
    (tmp_path / "one.csv").write_text("text\n" + "\n".join(f"well, {text}" for text in TEXTS))
    assert read_table(tmp_path / "one.csv", "", "")[0][0] == "well, open the door"
    (tmp_path / "gap.csv").write_text("text\r\n" + "\r\n\r\n".join(TEXTS))
    assert read_table(tmp_path / "gap.csv", "", "")[0] == [cell for text in TEXTS for cell in (text, "")][:-1]


def test_what_spreadsheets_put_around_a_table(tmp_path, capsys):
    rows = [{"text": f"{text}, please", "label": "a"} for text in TEXTS]
    for name, content in (("sep.csv", "sep=;\ntext;label\n" + "".join(f"{row['text']};a\n" for row in rows)),
                          ("colon.csv", "sep=:\ntext:label\n" + "".join(f"{row['text']}:a\n" for row in rows)),
                          ("blank.csv", "\n \ntext,label\n" + "".join(f'"{row["text"]}",a\n' for row in rows)),
                          ("quoted.csv", 'text;label;"a, b, c"\n' + "".join(f"{row['text']};a;\n" for row in rows)),
                          ("commas.tsv", "text,label\n" + "".join(f'"{row["text"]}",a\n' for row in rows)),
                          ("short.csv", f'text,label,note\n"{rows[0]["text"]}",a,\n' + "".join(
                              f'"{row["text"]}",a\n' for row in rows[1:])),
                          ("empty.csv", "text,label,,\n" + "".join(f'"{row["text"]}",a,,\n' for row in rows)),
                          ("space.csv", '"text", "label"\n' + "".join(f'"{row["text"]}", "a"\n' for row in rows)),
                          ("plain.csv", "text, label\n" + "".join(f'"{row["text"]}", "a"\n' for row in rows)),
                          ("gaps.csv", "text,label\n" + "\n\n".join(f'"{row["text"]}",a' for row in rows) + "\n\n"),
                          ("inches.csv", 'text,label,size 5"\n' + "".join(f'"{row["text"]}",a,1\n' for row in rows)),
                          ("break.csv", '"the\ntext",label\n' + "".join(f'"{row["text"]}",a\n' for row in rows)),
                          ("row.csv", ',,\nid,text,label\n' + "".join(f'1,"{row["text"]}",a\n' for row in rows)),
                          ("quoted_row.csv", '"";""\r\ntext;label\r\n' + "".join(f'{row["text"]};a\r\n' for row in rows)),
                          ("unnamed.csv", ",label\n" + "".join(f'"{row["text"]}",a\n' for row in rows)),
                          ("late.json", "\n\n" + json.dumps(rows, indent=1))):
        (tmp_path / name).write_text(content)
        assert read_table(tmp_path / name, "", "")[:2] == ([row["text"] for row in rows], ["a"] * len(rows)), name
    assert read_table(tmp_path / "late.json", "", "")[2:] == ("text", "label")
    short, gaps = capsys.readouterr().err.splitlines()
    assert short.startswith(f"{tmp_path}/short.csv: {len(rows) - 1} row(s) with fewer cells than the header has (first in line"
                            " 3)")
    assert gaps.startswith(f"{tmp_path}/gaps.csv: {len(rows) - 1} empty line(s) left out")
    (tmp_path / "nested.jsonl").write_text("\n".join(json.dumps({**row, "more": {"ö": True}}) for row in rows))
    with open_table(tmp_path / "nested.jsonl") as f:
        assert next(records(f, tmp_path / "nested.jsonl"))["more"] == '{"ö": true}'


def test_what_exports_hold(tmp_path, capsys):
    lists = [["lights \u200b"]] * 4 + [[]] * 4 + [["a", "b"]] * 2 + [{}] * 2
    said = [{"text": text, "label": found, "tags": ["c"]} for text, found in zip(TEXTS, lists)]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, said)))  # doccano's
    texts, labels, *_ = read_table(tmp_path / "lists.jsonl", "", "")
    assert labels == ["lights"] * 4 + [""] * 4 + ['["a", "b"]'] * 2 + [""] * 2
    make_own_task(texts, labels, 0, 0.2)
    assert "2 text(s) with several labels" in capsys.readouterr().out
    with open_table(tmp_path / "lists.jsonl") as f:
        assert next(records(f, "lists.jsonl"))["tags"] == '["c"]'  # another column is handed on as it is
    forms = [{"label": unicodedata.normalize(form, "Größe"), "text": text} for text, form in zip(TEXTS, ("NFC", "NFD") * 6)]
    (tmp_path / "forms.jsonl").write_text("\n".join(map(json.dumps, forms)))
    assert set(read_table(tmp_path / "forms.jsonl", "", "")[1]) == {"Größe"}
    more = [{"meta": {"agent": "a name that is long " * 9}, "link": f"https://example.org/{'long/' * 30}",
             "msg": ("[EXTERNAL] ", "https is broken: ")[n % 2] + text} for n, text in enumerate(TEXTS)]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, more)))
    assert read_table(tmp_path / "more.jsonl", "", "")[2] == "msg"
    swallowed = table(tmp_path / "swallowed.tsv", [(f'"{text}\ta\n{text}', "b") for text in TEXTS], ("text", "label"), "\t")
    capsys.readouterr()
    assert len(read_table(swallowed, "", "")[0]) == len(TEXTS)
    assert f"{len(TEXTS)} row(s) of many lines, the first around line 2: if they are several rows" in capsys.readouterr().err
    bare = table(tmp_path / "bare.csv", [(text, "a") for text in TEXTS], ("please turn the lights off", "lights"))
    assert read_table(bare, "", "")[2] == "please turn the lights off"  # it may be a survey's question
    assert "if that is one of them, the file has no header" in capsys.readouterr().err
    topics = table(tmp_path / "topics.csv", [(f"about {n}", text) for n, text in enumerate(TEXTS)], ("Topic", "Message"))
    with pytest.raises(UserError, match="--label_column none, or if they are --label_column Topic"):
        read_table(topics, "", "")
    assert read_table(topics, "", "Topic")[1][0] == "about 0" and read_table(topics, "", "none")[3] is None
    topics.write_text(topics.read_text().replace("about 3", ""))
    with pytest.raises(UserError, match="probably not labels"):  # one empty cell makes no labels of them
        read_table(topics, "", "")
    rows = [(text.replace(",", ""), "a" if n == 3 else "") for n, text in enumerate(TEXTS)]
    assert read_table(table(tmp_path / "few.csv", rows), "", "")[3] == "label"  # a label of its own where most have none
    unseen = table(tmp_path / "unseen.csv", rows, ("\ufeff\ufefftext", "\u200blabel"))
    assert read_table(unseen, "", "")[2:] == ("text", "label")
    capsys.readouterr()
    for first in ("text", "Export of 2024-05-01\n\nmessage,intent"):
        (tmp_path / "title.csv").write_text(f"{first}\n" + "".join(f"{text},{label}\n" for text, label in rows))
        read_table(tmp_path / "title.csv", "", "")
        said = capsys.readouterr().err
        assert "title.csv: the header has one name, " in said and "rows have 1 ',' each" in said
    prose = [(f"{text}{', ' * (n % 3)}",) for n, text in enumerate(TEXTS)]
    read_table(table(tmp_path / "prose.csv", prose, ("text",)), "", "")
    assert not capsys.readouterr().err


def test_words_of_any_script_are_whole():
    hindi = ["\u092c\u093f\u091c\u0932\u0940 \u0915\u093e \u092c\u093f\u0932\u0964",
             "\u0915\u093e\u0930\u094d\u0921 \u0916\u094b"]
    found = " ".join(term for own in keywords(hindi, np.array([0, 1]), 2) for term in own)
    assert found and {*found.split()} <= {*" ".join(hindi).replace("\u0964", "").split()}  # the danda is a full stop
    decomposed = unicodedata.normalize("NFD", "h\u1ee7y th\u1ebb")
    found = keywords([decomposed, "another thing"], np.array([0, 1]), 2)[0]
    assert decomposed.split()[0] in " ".join(found).split()
    assert all(len(word) < 90 for word in keywords(["b" * 5000 + " card", "lost"], np.array([0, 1]), 2)[0])


def test_odd_texts_survive(tmp_path):
    odd = ["смените пароль", "密码在哪里", "🙂🙃", "line one\nline two", 'say "hi", please', "x" * 200_000, "\u0130stanbul",
           "tab\there", "cr\rlf", "\ufeffmark", "a\u0000b"]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "label": "l1\nl\ud800"}) for text in [*odd, "half \ud800 pair"]))
    texts, labels, names, row = make_own_task(*read_table(path, "", "")[:2], 0, 0.2)
    assert "a?b" in texts["train"]  # a NUL byte would make clusters.csv no text file
    assert names == ["l1 l?"] and len(texts["train"]) == 12 and row.tolist() == list(range(12))
    folder = tmp_path / "data"
    script("make_lt_data.py", "--dataset", path, "--data_dir", folder)
    assert read_run(folder / "t_s0")[0]["train"] == texts["train"]
    (folder / "t_s0/train_row.npy").unlink()
    with pytest.raises(UserError, match="train_row.npy is missing"):
        read_run(folder / "t_s0")
    long = path.rename(tmp_path / f"{'x' * 248}.jsonl")
    one_line_error(script("make_lt_data.py", "--dataset", long, "--data_dir", folder, ok=False), "name too long")


def test_dev_texts_are_drawn_by_the_seed_and_of_three_texts_one():
    texts, labels = [f"t{n}" for n in range(45)], ["a"] * 40 + ["b"] * 3 + ["c"] * 2
    dev = [make_own_task(texts, labels, seed, 0.2)[0]["dev"] for seed in (0, 0, 1)]
    assert dev[0] == dev[1] and set(dev[0]) != set(dev[2])
    assert [sum(text in texts[a:b] for text in dev[0]) for a, b in ((0, 40), (40, 43), (43, 45))] == [8, 1, 0]


def test_duplicates_conflicts_and_dev(capsys):
    texts = ["a1", "a1", "a1", "b1", "", "b1"] + [f"a{n}" for n in range(2, 12)] + ["b2"]
    labels = ["a", "b", "a", "", "a", "b"] + ["a"] * 10 + [""]
    found, label, names, row = make_own_task(texts, labels, 0, 0.2)
    assert names == ["a", "b"] and len(found["train"]) == 13 == len(set(found["train"]))
    assert row[:6].tolist() == [0, 0, 0, 1, -1, 1]  # repeated texts are one training row, an empty one none
    assert len(found["dev"]) == 2 and set(label["dev"]) == {0}  # 20 % of the 11 texts of a; b has too few
    dev = [found["train"].index(text) for text in found["dev"]]
    assert (label["train"][dev] == -1).all() and (label["train"] == 0).sum() == 9 and label["train"][1] == 1
    said = capsys.readouterr().out
    for words in ("1 row(s) without text", "3 row(s) repeat", "1 text(s) with more than one", "1 label(s) with fewer than 3"):
        assert words in said
    assert "are no class" not in said
    assert make_own_task(["a1", "a1", *TEXTS], ["a", "b", *["a"] * 12], 0, 0.2)[2] == ["a"]
    assert "1 label(s) of such texts alone, which count for none of them and are no class (b)" in capsys.readouterr().out


def test_of_several_labels_of_a_text_the_most_frequent_one_counts():
    texts, labels = ["a1"] * 3 + ["b1"] * 3 + ["c1"] * 2, ["a", "b", "b", "a", "a", "b", "b", "a"]
    _, label, names, _ = make_own_task(texts, labels, 0, 0)
    assert [names[k] for k in label["train"]] == ["b", "a", "b"]  # of two that are as frequent the first one


def test_the_share_of_labelled_rows_is_a_tenth_or_what_it_is(tmp_path):
    for name, labelled, share in (("few", 1, 0.1), ("many", 6, 0.5)):  # by it the seeding weighs a labelled row
        path = table(tmp_path / f"{name}.csv", [(text, "a" * (n < labelled)) for n, text in enumerate(TEXTS)])
        make_lt_data.main(make_lt_data.Args(dataset=str(path), data_dir=str(tmp_path), dev_ratio=0.0))
        assert read_run(tmp_path / f"{name}_s0")[3]["labeled_ratio"] == share


def test_bad_tables_end_in_one_line(tmp_path):
    def check(name, content, *words, flags=()):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        one_line_error(script("make_lt_data.py", "--dataset", path, "--data_dir", tmp_path / "data", *flags, ok=False), *words)
        assert not (tmp_path / "data").exists()

    rows = "\n".join(f"{text},a" for text in TEXTS)
    check("missing.csv", None, "missing.csv is missing")
    check("notes.txt", "text\nhello", "unknown", ".csv")
    check("empty.csv", "", "empty")
    check("header.csv", "text,label\n", "header")
    check("one.csv", "text,label\nhello there,a\n", "1 different text")
    check("same.csv", "text,label\n" + "hello there,a\n" * 30, "30 row(s) with 1 different", "'text'", "--text_column")
    check("bare.csv", "17,open the door,a\n" + "\n".join(f"{n},{text},a" for n, text in enumerate(TEXTS)), "no header", "17")
    check("numbers.csv", "a,b\n" + "1,2\n" * 30, "no column with text")
    check("nolabel.csv", "text,label\n" + "\n".join(f"{text}," for text in TEXTS), "label", "empty in every row", "none",
          flags=("--label_column", "label"))
    check("team.csv", "text,label\n" + rows, "--label_column team", "other columns are label", flags=("--label_column", "team"))
    check("column.csv", "text,label\n" + rows, "--text_column body", "text, label", flags=("--text_column", "body"))
    check("quote.csv", 'text,label\n' + rows + '\n"shut\nit",a\n"open the door,a\n' + rows, "begins in line 16:", "quot")
    check("cells.csv", "text,label\n" + rows + "\nopen, or not,a\n", "line 14", "3 cell(s)")
    check("behind.csv", "text,label\n" + "\n".join(f"{text},a," for text in TEXTS), "line 2", "3 cell(s)", "header must too")
    check("break.csv", '"the\ntext",label\n' + rows + "\nopen, or not,a\n", "line 15", "3 cell(s)")
    check("open.csv", '"text,label\n' + "a sentence,a\n" * 20_000, "begins in line 1:", "quot")
    check("first.csv", "text,label\nhello there\n" + rows, "line 2", "1 cell(s)", "all cells first")
    check("few.csv", "id;text;label (yes, no, both)\n" + "\n".join(f"1;{text};a" for text in TEXTS), "line 2", "sep=;")
    check("above.csv", "\n\ntext,label\n" + rows + "\nopen, or not,a\n", "line 16", "3 cell(s)")
    check("nul.csv", "text,label\n" + rows + "\nop\0en,a\n", "NUL")
    check("dict.json", '{"data":\n [{"text": "a"}]}', "list [...]")
    check("image.csv", b"\x89PNG\r\n\x1a\n\x00\x00", "UTF-8")
    check("latin.csv", b"text,label\n" + "größe,a\n".encode("latin-1") * 12, "UTF-8")
    check("bad.jsonl", '{"text": "a"}\n{"text": \n', "JSON")
    check("braces.jsonl", "{}\n" * 12, "no column with text")
    check("deep.jsonl", "[" * 100_000, "JSON")
    check("twice.csv", "text,text\n" + "\n".join(f"{text},a" for text in TEXTS), "several columns called 'text'")
    check("list.jsonl", '["a", "b"]\n["c"]\n', "JSON")
    check("t.csv", "text,label\n" + rows, "dev_ratio", flags=("--dev_ratio", 1))
    check("both.csv", "text,label\n" + rows, "both text", flags=("--text_column", "text", "--label_column", "text"))


def test_labels_that_may_not_be_meant_are_counted(capsys):
    rows = [(f"{text} {n}", label) for n, label in enumerate(("Card", "card", "N/A", "nan", "")) for text in TEXTS]
    make_own_task(*map(list, zip(*rows)), 0, 0.2)
    said = capsys.readouterr().out
    assert f"{2 * len(TEXTS)} text(s) with the label N/A or nan" in said and "1 label(s) written in several ways (card)" in said
    assert "a label for each" not in said
    make_own_task(TEXTS, ["a", "b"] * (len(TEXTS) // 2) + ["a"] * (len(TEXTS) % 2), 0, 0.2)
    assert capsys.readouterr().out.startswith(f"{len(TEXTS)} texts and a label for each")


def test_where_every_text_has_a_label_there_are_no_new_classes():
    meta = {"own": True, "num_classes": None, "num_known": 3, "num_unlabelled": 5, "num_dev": 5}
    for flag in ("", "auto", "appendix_e", "3"):
        assert wanted_classes(Args(num_classes=flag), meta) == (3, 8)
    for flag in ("6", "2"):
        with pytest.raises(UserError, match=f"--num_classes {flag}: every text has a label"):
            wanted_classes(Args(num_classes=flag), meta)
    assert wanted_classes(Args(), {**meta, "num_unlabelled": 9})[0] == "auto"
    assert wanted_classes(Args(num_classes="6"), {**meta, "num_unlabelled": 9})[0] == 6


def test_names_of_runs_and_changed_tables(tmp_path):
    assert run_name("/a/b c/My Table.v2.csv", 10, 3) == run_name("My_Table_v2", 5, 3) == "My_Table_v2_s3"
    for name, run in (("clinc.csv", "clinc_own_s0"), ("demo_g10.csv", "demo_g10_own_s0"), ("a.json.csv", "a_json_s0"),
                      ("A.CSV", "A_s0")):
        assert run_name(name, 10, 0) == run == run_name(run[:-3], 10, 0)  # not a benchmark's folder; the name alone will do
    assert run_name("clinc", 10, 0) == "clinc_g10_s0"
    path = table(tmp_path / "t.csv", [(text, "a") for text in TEXTS])
    flags = ("--dataset", path, "--data_dir", tmp_path / "data")
    script("make_lt_data.py", *flags)
    assert "skipped" in script("make_lt_data.py", *flags).stdout
    one_line_error(script("make_lt_data.py", *flags, "--dev_ratio", 0.5, ok=False), "made with --dev_ratio 0.2: l", "remove")
    one_line_error(script("make_lt_data.py", *flags, "--text_column", "text", ok=False), "made without --text_column: leave")
    one_line_error(script("make_lt_data.py", *flags, "--label_column", "none", ok=False), "made without --label_column: leave")
    one_line_error(script("make_lt_data.py", *flags, "--text_column", "body", ok=False), "--text_column body is not in")
    table(path, [(text + "!", "a") for text in TEXTS])
    one_line_error(script("make_lt_data.py", *flags, ok=False), "another t.csv", "remove")
    path.unlink()
    assert f"but {path} is not: skipped" in script("make_lt_data.py", *flags).stdout
    name = table(tmp_path / "名.csv", [(text, "a") for text in TEXTS])  # on a screen without such letters
    done = subprocess.run([sys.executable, REPO / "make_lt_data.py", "--dataset", name, *flags[2:]], capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout=PATIENCE)
    assert done.returncode == 0 and rb"\u540d.csv" in done.stdout
    mine = tmp_path / "data/mine_s0/mine.csv"  # where the split would go, with a file of the user's in it
    mine.parent.mkdir()
    table(mine, [(text, "a") for text in TEXTS])
    one_line_error(script("make_lt_data.py", "--dataset", mine, *flags[2:], ok=False), "no meta.json", "elsewhere")
    assert [*mine.parent.iterdir()] == [mine] and not list(tmp_path.rglob("*.part"))


def test_records_read_on_as_they_are_asked_for():
    asked = []

    def lines():
        for n in range(10**9):  # would not end if it were read whole
            asked.append(n)
            yield "text,label\n" if n == 0 else f"open door {n},a\n"

    class Endless(io.StringIO):
        def __init__(self):
            super().__init__()
            self.lines = lines()

        def readline(self):
            return next(self.lines)

        def __next__(self):
            return next(self.lines)

    found = records(Endless(), "t.csv")
    assert [next(found)["text"] for _ in range(3)] == ["open door 1", "open door 2", "open door 3"] and len(asked) < 10


# ---- names ----

def test_keywords_and_names():
    texts = (["what is the exchange rate for euros", "tell me the exchange rate", "exchange rate for dollars please"] * 3
             + ["my card was stolen", "a stolen card", "they stole it, stolen card"] * 3 + ["the card, please"] * 9)
    cluster = np.repeat([0, 1, 2], 9)
    words = keywords(texts, cluster, 4)
    assert words[0][0] == "exchange rate" and "stolen" in " ".join(words[1]) and words[3] == []
    assert not {"the", "is", "please", "what"} & {word for own in words for word in own}
    assert len(words[0]) == len(set(words[0])) and "exchange" not in words[0]
    names = propose_names(words, ["Exchange_Rate", "no words"])
    # Written as the known names are, and different from them.
    assert names == ["exchange_rate_dollars", "stolen_card", "card", "no_words_2"]
    taken = {"b"}
    assert [unused(name, taken, str.casefold) for name in ("a", "A", "b")] == ["a", "A 2", "b 2"]


def test_keywords_are_eight_at_most_and_one_of_a_word_and_its_plural():
    texts = "card cards alpha beta gamma delta kappa sigma omega theta zeta".split()
    words = keywords(texts, np.array([0] * 10 + [1]), 2)
    assert words[0] == "alpha beta card delta gamma kappa omega sigma".split()
    assert propose_names([["card", "lost", "found", "blue"]] * 2, []) == ["card lost", "card lost found"]


def test_a_rare_pair_of_words_does_not_lead():
    texts = ["refund"] * 9 + ["blue sky refund", "lost card"]
    assert keywords(texts, np.array([0] * 10 + [1]), 2)[0][0] == "refund"


def test_a_cluster_whose_line_is_gone_takes_no_name_and_gets_none_that_is_given(capsys):
    words, rest = [["a"], ["door"], ["lamp"], ["rain"]], ([["x"]] * 4, [9, 9, 9, 9])  # texts and rows of each
    asked = cluster_titles({0: "a", 1: "lamp", 3: "Rain"}, ["a"], words, *rest, "")[0]
    assert asked == ["a", "lamp", "lamp 2", "Rain"]
    asked = cluster_titles({0: "a", 1: "mine", 3: "rain"}, ["a"], words, *rest, "echo lamp")
    assert asked == (["a", "lamp", "lamp 3", "lamp 2"], True, None)
    asked = cluster_titles({0: "a", 1: "mine", 3: "rain"}, ["a"], words, rest[0], [9, 1, 5, 2], "echo lamp")
    assert asked[0] == ["a", "lamp 2", "lamp 3", "lamp"], "the larger one is asked first, and has the name"
    assert cluster_titles({1: "mine"}, ["a"], words, *rest, "echo a")[0] == ["a", "a 2", "lamp", "rain"]
    assert cluster_titles({1: "my_lamp", 3: "La-mp"}, ["a"], words, *rest, "")[0] == ["a", "my_lamp", "lamp", "La-mp"]
    assert cluster_titles({1: "door bell"}, ["a"], [["a"], ["b"], ["door_bell"], ["rain"]], *rest, "")[0][2] == "door_bell 2"
    assert cluster_titles({}, ["a"], words, *rest, "")[0] == ["a", "door", "lamp", "rain"]


def test_the_program_reads_twenty_texts():
    said = cluster_titles({}, [], [["a"]], [["x"] * 30], [30], "awk 'END { print NR - 1 }'")  # the keywords' line beside them
    assert said[0] == ["20"]
    assert ask_for_name("echo an excuse; exit 1", [], [], "") is None


def test_names_until_ctrl_c_are_kept(monkeypatch):
    """They may have cost money. The others keep what was proposed."""
    def ask(command, words, *_, **__):
        if words == ["lamp"]:
            raise KeyboardInterrupt
        return "named"

    monkeypatch.setattr(predict, "ask_for_name", ask)
    titles, named, interrupt = cluster_titles({}, ["a"], [["a"], ["door"], ["lamp"], ["rain"]], [["x"]] * 4, [1, 3, 2, 1], "c")
    assert titles == ["a", "named", "lamp", "rain"] and named and isinstance(interrupt, KeyboardInterrupt)


def test_notes_on_tables_are_not_for_ones_that_we_wrote(tmp_path, capsys):
    write_table(tmp_path / "clusters.csv", ["id", "name", "example_1"], [[0, "mail", "line\n" * 30]])
    assert cluster_names(tmp_path, 1) == {0: "mail"} and not capsys.readouterr().err
    names = ("caf\u00e9", "cafe\u0301", " cafe\u0301\u200b")  # all look the same
    write_table(tmp_path / "same.csv", ["id", "name"], list(enumerate(names)))
    (tmp_path / "same").mkdir()
    (tmp_path / "same.csv").rename(tmp_path / "same/clusters.csv")
    assert {*cluster_names(tmp_path / "same", 3).values()} == {"caf\u00e9"}
    with open_table(tmp_path / "clusters.csv") as file:
        assert len(list(records(file, "clusters.csv"))) == 1 and "many lines" in capsys.readouterr().err


def test_keywords_of_texts_without_spaces_or_words():
    words = keywords(["我的银行卡丢了怎么办", "银行卡丢了", "今天天气怎么样啊", "天气预报"] * 3, np.array([0, 0, 1, 1] * 3), 2)
    assert words[1][0] == "天气" and {"银行卡", "银行卡丢"} & set(words[0])
    words = keywords(["我想转账。", "转账失败了", "查询余额？", "余额是多少"], np.array([0, 0, 1, 1]), 2)  # short ones
    assert words[0][0] == "转账" and words[1][0] == "余额" and all(2 <= len(word) <= 4 for own in words for word in own)
    assert not any(a in b for own in words for a in own for b in own if a != b)
    words = keywords(["我的iPhone充值失败了", "iphone怎么充值", "ฉันลืมรหัสผ่าน", "ลืมรหัส"], np.array([0, 0, 1, 1]), 2)
    assert words[0][0] == "iphone" and "充值" in words[0] and all(word in "ฉันลืมรหัสผ่าน" for word in words[1])
    assert keywords(["1 2", "3 4", "🙂"], np.array([0, 1, 1]), 2) == [[], []]
    assert propose_names([[], []], []) == ["no words", "no words 2"]


# ---- the whole path, with a tiny encoder ----

@pytest.fixture(scope="module")
def tiny_rows():
    """(text, intent) of six intents of the demo corpus: of four of them a third is labelled, one has a single label."""
    rows, seen = [], {}
    for text, intent in read_tsv(REPO / "data/raw/demo/train.tsv")[1:]:
        if len(seen) < 6 or intent in seen:
            n = seen[intent] = seen.get(intent, -1) + 1
            if n < 30:
                k = list(seen).index(intent)
                rows.append((text, intent if (k < 4 and n % 3 == 0) or (k == 4 and n == 0) else "", intent))
    return rows


@pytest.fixture(scope="module")
def own_run(tmp_path_factory, tiny_rows, tiny_encoder):
    """A checkout's scripts in an empty folder and run_all.sh in it, on a table with odd rows: (folder, run, rows, said)."""
    folder = tmp_path_factory.mktemp("own")
    for path in [*REPO.glob("*.py"), REPO / "run_all.sh"]:
        shutil.copy(path, folder)
    rows = [*tiny_rows, ("", "", ""), (tiny_rows[0][0], "", tiny_rows[0][2]), ("</script><b>\"quoted\" 🙂", "", "")]
    columns = ("id", "message", "intent")
    path = table(folder / "my table.csv", [(n, text, label) for n, (text, label, _) in enumerate(rows)], columns)
    env = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "ENCODER": str(tiny_encoder)}
    flags = ("--num_classes", "8", "--swaps", "5", "--batch_size=64", "--epochs", "2", "--min_steps", "0")
    done = subprocess.run(["bash", "run_all.sh", path, *flags], cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
                          env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, folder / "out/my_table_s0", rows, done.stdout


def test_from_csv_to_report_with_one_command(own_run):
    folder, run, rows, said = own_run
    assigned, clusters = read(run / "assignments.csv"), read(run / "clusters.csv")
    assert [line["text"] for line in assigned] == [text for text, _, _ in rows]  # every row, in order
    assert [int(line["row"]) for line in assigned] == list(range(1, len(rows) + 1))
    names = {line["id"]: line["name"] for line in clusters}
    for line, (text, label, _) in zip(assigned, rows):
        if not text:
            assert line["cluster"] == line["name"] == line["confidence"] == ""
        else:
            assert line["name"] == names[line["cluster"]] and 0 <= float(line["confidence"]) <= 100
        if label:
            assert line["name"] == label == line["label"] and line["confidence"] == "100.0"
    assert assigned[-2]["name"] == rows[-2][2] == assigned[0]["label"]  # the twin of a labelled row shares its label
    assert read_table(run / "assignments.csv", "", "")[2:] == ("text", "label")  # a table to go on with
    assert sum(int(line["size"]) for line in clusters) == len(rows) - 1
    assert len({line["name"].casefold() for line in clusters}) == len(clusters)
    assert {line["known"] for line in clusters} == {"yes", "no"} and sum(line["known"] == "yes" for line in clusters) == 5
    assert abs(sum(float(line["share"]) for line in clusters) - 100) < 0.1
    sizes = [int(line["size"]) for line in clusters]
    assert sizes == sorted(sizes, reverse=True)
    head = normalize(load_checkpoint(run / "last.pt")["head"], dim=1).numpy()
    place, feature = np.load(run / "train_row.npy"), np.load(run / "train_feature.npy").astype(np.float32)
    for line in clusters:
        own = [row for row, of in enumerate(assigned) if of["cluster"] == line["id"]]
        assert float(line["confidence"]) == pytest.approx(np.mean([float(assigned[row]["confidence"]) for row in own]), abs=0.2)
        near = feature[place[own]] @ head[int(line["id"])]  # the most typical text is the nearest to the cluster's centre
        best = [" ".join(assigned[row]["text"].split()) for row, value in zip(own, near) if value > near.max() - 1e-3]
        assert " ".join(line["example_1"].split()) in best
    page = (run / "report.html").read_text()
    assert "</script><b>" not in page and "\\u003c/script" in page and not re.search(r"(src|href)=.https?:", page)
    assert (run / "figures/class_sizes.png").exists() and str(run.relative_to(folder)) in said
    results = json.loads((run / "results.json").read_text())
    assert results["own"] and results["num_classes"] == 8 and "test" not in results
    assert not list(folder.rglob("*.part"))


def test_the_measurement_in_the_readme(own_run, monkeypatch, capsys):
    folder, _, rows, _ = own_run
    part = (REPO / "README.md").read_text().split("**To measure on your own labels**")[1]
    code = part.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    exec(code.replace("my_utterances", "my_table"), {"intents": [intent or "none" for _, _, intent in rows]})
    scores = eval(capsys.readouterr().out)
    assert 20 < scores["ACC"] <= 100 and 0 < scores["NMI"] <= 100


def test_texts_that_nobody_asked_to_read_are_told(own_run, tmp_path):
    folder, run, _, _ = own_run
    copy = shutil.copytree(run, tmp_path / "run")
    command = [sys.executable, REPO / "predict.py", copy, "--data_dir", folder / "data"]
    for given, told in (({"input": "a text\n"}, True), ({"input": ""}, False), ({"stdin": subprocess.DEVNULL}, False)):
        done = subprocess.run(command, capture_output=True, text=True, check=True, **given)
        assert ("standard input was not read; to label its lines: predict.py" in done.stderr) is told, done.stderr


def test_new_texts(own_run, tmp_path):
    folder, run, rows, _ = own_run
    new = table(tmp_path / "new.csv", [(n, text, "x") for n, (text, _, _) in enumerate(rows)], ("id", "text", "name"))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    script("predict.py", run, new, "-o", tmp_path / "labelled.csv", "--data_dir", folder / "data")
    found = read(tmp_path / "labelled.csv")
    assert [line["text"] for line in found] == [text for text, _, _ in rows] and {line["name"] for line in found} == {"x"}
    names = {line["id"]: line["name"] for line in read(run / "clusters.csv")}
    for line in found:
        if line["text"]:
            assert names[line["cluster"]] == line["predicted_name"]
            assert float(line["confidence"]) >= float(line["second_confidence"]) >= float(line["third_confidence"])
            assert len({line["predicted_name"], line["second"], line["third"]}) == 3
        else:
            assert line["cluster"] == line["predicted_name"] == ""
    # alone, in small batches, from stdin: the same answers; and the run folder is as it was
    lines = ["12345"] + [text for text, _, _ in rows if text and "\n" not in text]  # a first line without a letter
    done = subprocess.run([sys.executable, REPO / "predict.py", run, "-", "--batch_size", "7"], input="\n".join(lines) + "\n",
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = list(csv.DictReader(io.StringIO(done.stdout)))[1:]
    assert [[line["cluster"], line["confidence"]] for line in again] == [
        [line["cluster"], line["confidence"]] for line in found if line["text"] in set(lines)]
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_shares_of_new_texts_are_those_of_the_trained_model(own_run):
    """Those of the finished training's own features; the length of a cluster's centre says nothing."""
    folder, run, *_ = own_run
    texts, (state, _) = read_run(folder / "data/my_table_s0")[0]["train"], open_model(run)
    z = torch.from_numpy(np.load(run / "train_feature.npy")).float()
    expected = (z @ normalize(state["head"], dim=1).T / state["config"]["temperature"]).softmax(1)
    longer = state | {"head": state["head"] * torch.arange(1, 9)[:, None]}
    cluster, names, shares = Labeller(longer, {k: str(k) for k in range(8)}, "cpu", state["config"]["dtype"])(texts)
    best = expected.topk(3, dim=1)
    assert shares == pytest.approx(best.values.numpy(), abs=1e-3)  # the features are kept as float16
    told = best.values[:, 0] - best.values[:, 1] > 2e-3
    assert told.sum() > len(texts) / 2 and all(own[0] == str(k) for k, own in zip(cluster, names))
    assert [k for k, sure in zip(cluster, told) if sure] == best.indices[told, 0].tolist()


def test_columns_of_new_texts(own_run, tmp_path, capsys):
    """That of the run's own texts if it is there; another by --text_column. The added ones are new, whatever is there."""
    texts = [text for text, _, _ in own_run[2][:20]]
    rows = [(text, other, "x", "y") for text, other in zip(texts, texts[::-1])]
    new = table(tmp_path / "new.csv", rows, ("message", "text", "name", "predicted_name"))
    alone = table(tmp_path / "alone.csv", [(text,) for text in texts], ("message",))
    predict.main([str(own_run[1]), str(alone), "-o", str(tmp_path / "all.csv")])
    answers = {line["message"]: [line["cluster"], line["name"]] for line in read(tmp_path / "all.csv")}
    for column in ("message", "text"):
        flag = ["--text_column", "text"] if column == "text" else []
        predict.main([str(own_run[1]), str(new), "-o", str(tmp_path / "o.csv"), *flag])
        found = read(tmp_path / "o.csv")
        assert f"20 rows labelled by column {column!r}" in capsys.readouterr().err
        assert [line["message"] for line in found] == texts
        assert all((line["name"], line["predicted_name"]) == ("x", "y") for line in found)
        assert [[line["cluster"], line["predicted_predicted_name"]] for line in found] == [
            answers[line[column]] for line in found]
        assert all(100 / 8 - 0.1 < float(line["confidence"]) <= 100 for line in found)  # percent, the best of 8
    assert len({*map(tuple, answers.values())}) > 1


def test_a_line_without_text_stays_in_its_place(own_run, tmp_path, monkeypatch):
    lines = ["open the door", "", " \t", "close the door"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(codecs.BOM_UTF8 + "\n".join(lines).encode())))
    predict.main([str(own_run[1]), "-", "-o", str(tmp_path / "o.csv")])
    found = read(tmp_path / "o.csv")
    assert [line["text"] for line in found] == lines  # and none of them holds the mark of UTF-8
    assert [line["cluster"] + line["confidence"] != "" for line in found] == [True, False, False, True]


def test_clusters_of_one_name_are_one_to_a_new_text(own_run):
    run, texts = own_run[1], [text for text, _, _ in own_run[2] if text]
    state, _ = open_model(run)
    _, names, shares = Labeller(state, dict(enumerate("abc")), "cpu", "float32")(texts)
    for joined, lone in (("xxc", 2), ("xbx", 1), ("axx", 0)):
        pair, first = [k for k in range(3) if k != lone], set()
        for before, share, cluster, now, found in zip(names, shares, *Labeller(
                state, dict(enumerate(joined)), "cpu", "float32")(texts)):
            share = [share[before.index(name)] for name in "abc"]
            sums = {"x": share[pair[0]] + share[pair[1]], joined[lone]: share[lone]}
            assert dict(zip(now, found)) == pytest.approx(sums) and found[0] >= found[1]
            assert cluster == (max(pair, key=lambda k: share[k]) if now[0] == "x" else lone)
            first.add(cluster)
        assert first >= {*pair}, "both of the pair are some text's"


def test_new_tables_at_the_edge(own_run, tmp_path):
    """A lone carriage return in a cell, a key that only the last row has, and an output that is a link."""
    run = own_run[1]
    with open(tmp_path / "cr.csv", "w", newline="") as f:
        csv.writer(f).writerows([("text", "note"), ("open the door", "one\rtwo")])
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    script("predict.py", run, tmp_path / "cr.csv", "-o", link)
    assert [line["note"] for line in read(target)] == ["one\ntwo"] and link.is_symlink()
    for mark in (codecs.BOM_UTF8, b""):  # what a spreadsheet knows UTF-8 by is there as it was in the input
        (tmp_path / "mark.csv").write_bytes(mark + "text\nöffne die Tür\n".encode())
        script("predict.py", run, tmp_path / "mark.csv", "-o", tmp_path / "mark.csv")
        assert (tmp_path / "mark.csv").read_bytes().startswith(mark + b"text,cluster")
    rows = [{"text": "open the door"}] * 1500 + [{"text": "close it", "ticket": "T-1"}]
    (tmp_path / "late.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script("predict.py", run, tmp_path / "late.jsonl", "-o", tmp_path / "late.csv")
    assert [line["ticket"] for line in read(tmp_path / "late.csv")] == [""] * 1500 + ["T-1"]
    rows = [{"body": "open the door"}] * 1500 + [{"body": "close it", "text": "x"}]  # a usual name that one row has
    (tmp_path / "late.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "by column 'body'" in script("predict.py", run, tmp_path / "late.jsonl", "-o", tmp_path / "late.csv").stderr
    one_line_error(script("predict.py", run, tmp_path / "cr.csv", "-o", tmp_path / "cr.tsv", ok=False), "--output", "CSV")
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "gone/x.csv")
    one_line_error(script("predict.py", run, tmp_path / "cr.csv", "-o", tmp_path / "dangling.csv", ok=False), "--output")


def test_a_labelled_text_keeps_its_label_whatever_the_transport_says(own_run, tmp_path):
    """Also one that was kept for dev, and of the first class. The typical texts are the nearest five, the nearest first."""
    folder, run = own_run[0], shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    np.save(run / "pseudo_label.npy", np.full_like(np.load(run / "pseudo_label.npy"), 7))
    (run / "clusters.csv").unlink()
    script("predict.py", run, "--data_dir", folder / "data")
    given = {text: label for text, label, _ in own_run[2] if label}
    assigned, clusters = read(run / "assignments.csv"), read(run / "clusters.csv")
    for line in assigned:
        label = given.get(line["text"], "")
        assert line["label"] == label and (not label or (line["name"], line["confidence"]) == (label, "100.0"))
        assert label or line["cluster"] == "7" * bool(line["text"])
    head = normalize(load_checkpoint(run / "last.pt")["head"], dim=1).numpy()
    place, feature = np.load(run / "train_row.npy"), np.load(run / "train_feature.npy").astype(np.float32)
    for line in clusters:
        near = {row["text"]: feature[i] @ head[int(line["id"])] for row, i in zip(assigned, place)
                if row["cluster"] == line["id"]}
        shown = [near[text] for n in range(1, 6) if (text := line[f"example_{n}"])]
        assert shown == pytest.approx(sorted(near.values(), reverse=True)[:5], abs=1e-5), line["id"]


def test_sizes_are_counted_anew_where_as_many_rows_repeat_other_texts(own_run, tmp_path):
    run = shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    sizes = [line["size"] for line in read(run / "clusters.csv")]
    row = np.load(run / "train_row.npy")
    np.save(run / "train_row.npy", np.append(row[:-1], row[0]))  # the last row has been another one
    text = (run / "clusters.csv").read_text(encoding="utf-8-sig")
    (run / "clusters.csv").write_text(re.sub(r"(,(?:yes|no),[^,]*,)\d+", r"\g<1>1", text))
    assert "(sizes counted anew)" in script("predict.py", run, "--data_dir", own_run[0] / "data").stdout
    assert [line["size"] for line in read(run / "clusters.csv")] == sizes


def test_data_other_than_the_run_was_trained_on_are_refused(own_run, tmp_path):
    shutil.copytree(own_run[0] / "data", tmp_path / "data")
    names = tmp_path / "data/my_table_s0/labels.txt"
    names.write_text("".join(names.read_text().splitlines(True)[::-1]))
    before = (own_run[1] / "assignments.csv").read_bytes()
    one_line_error(script("predict.py", own_run[1], "--data_dir", tmp_path / "data", ok=False), "holds other data now")
    assert (own_run[1] / "assignments.csv").read_bytes() == before


def test_the_users_own_naming_program(own_run, tmp_path):
    folder, _, _, _ = own_run
    run = shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", "head -1 | cut -c11-40")
    new = [line for line in read(run / "clusters.csv") if line["known"] == "no"]
    assert new[0]["name"].startswith(new[0]["keywords"].split(",")[0][:20])
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", "sed -n '2p'")
    new = [line for line in read(run / "clusters.csv") if line["known"] == "no"]
    assert new[0]["name"] == " ".join(new[0]["example_1"].split())[:100]
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", "awk 'END { print NR - 1 }'")
    new = [line for line in read(run / "clusters.csv") if line["known"] == "no"]
    for line in new:  # two with as many have a number behind it
        texts = {row["text"] for row in read(run / "assignments.csv") if row["cluster"] == line["id"]}
        assert line["name"].split()[0] == str(min(20, len(texts)))
    assert max(int(line["name"].split()[0]) for line in new) > 1
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", "echo same")
    named = [line["name"] for line in read(run / "clusters.csv") if line["known"] == "no"]
    assert len(named) > 1 and named == ["same", *(f"same {n}" for n in range(2, len(named) + 1))]  # the largest is asked first
    lines = (run / "clusters.csv").read_text().splitlines()
    known = next(n for n, line in enumerate(lines) if ",yes," in line)
    lines[known] = lines[known].replace(f",yes,{lines[known].split(',')[2]}", ",yes,edited by hand")
    (run / "clusters.csv").write_text("\n".join(lines))
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", "echo same")
    assert "edited by hand" in {line["name"] for line in read(run / "clusters.csv") if line["known"] == "yes"}
    assert ask_for_name(r"printf '\n\342\200\213\n\033[31mred\000 \tname\033[0m\n'", [], [], "") == "red name"
    text = (run / "clusters.csv").read_text()
    (run / "clusters.csv").write_text(text.replace(",same 2,", ",same,"))  # to join the two
    named = ["same" if name == "same 2" else name for name in named]
    done = script("predict.py", run, "--data_dir", folder / "data", "--name_command", "false")
    assert "failed for cluster 'same'" in done.stderr
    (run / "clusters.csv").write_text((run / "clusters.csv").read_text() + "\n")  # an edit, be it a small one
    assert [line["name"] for line in read(run / "clusters.csv") if line["known"] == "no"] == named
    kept = (run / "clusters.csv").read_bytes()
    one_line_error(script("predict.py", run, "--data_dir", folder / "data", "--name_command", "no_such_program_here", ok=False),
                   "no_such_program_here", "cannot be run")
    done = script("predict.py", run, "--data_dir", folder / "data", "--name_command", "echo not now >&2; exit 1")
    assert "(exit code 1: not now)" in done.stderr and (run / "clusters.csv").read_bytes() == kept
    (tmp_path / "times").write_text("")
    once = f"echo >> {tmp_path}/times; [ $(wc -l < {tmp_path}/times) -lt 2 ] || exit 127; echo first"
    done = script("predict.py", run, "--data_dir", folder / "data", "--name_command", once)  # a program that goes missing
    assert "first" in {line["name"] for line in read(run / "clusters.csv")} and "(exit code 127)" in done.stderr
    lines = (run / "clusters.csv").read_text().splitlines()
    gone = lines.pop(next(n for n, line in enumerate(lines) if ",no," in line)).split(",")[0]
    (run / "clusters.csv").write_text("\n".join(lines))
    counting = f"echo >> {tmp_path}/asked; echo again"
    script("predict.py", run, "--data_dir", folder / "data", "--name_command", counting)
    left = read(run / "clusters.csv")
    assert gone not in {line["id"] for line in left} and len(left) == len(lines) - 1
    assert len((tmp_path / "asked").read_text()) == sum(line["known"] == "no" for line in left), "nor was it asked about"


def test_names_that_were_edited_are_kept_and_a_line_that_is_gone_gets_no_text(own_run, tmp_path):
    folder, _, rows, _ = own_run
    run = shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    lines = read(run / "clusters.csv")
    first, gone = lines[:2]
    with open(run / "clusters.csv", "w", newline="") as f:  # a column of one's own, a name of one's own, one line less
        out = csv.DictWriter(f, [*lines[0], "owner"], delimiter=";")
        out.writeheader()
        out.writerows({**line, "owner": "me", "name": "MY NAME" if line is first else line["name"]}
                      for line in lines if line is not gone)
    edited = (run / "clusters.csv").read_bytes()
    said = script("predict.py", run, "--data_dir", folder / "data").stdout
    assert "with the names of clusters.csv" in said and (run / "clusters.csv").read_bytes() == edited
    assigned = read(run / "assignments.csv")
    assert {line["name"] for line in assigned if line["cluster"] == first["id"]} == {"MY NAME"}
    left = [line["known"] for line in lines if line is not gone]
    assert f"{left.count('yes')} known clusters and {left.count('no')} new ones" in said
    script("figures.py", run)
    pages = (run / "report.html").read_text().split('id="data">')[1].split("</script>")[0]
    assert len(json.loads(pages)["clusters"]) == len(left)
    new = table(tmp_path / "new.csv", [(text, "") for text, _, _ in rows if text])
    script("predict.py", run, new, "-o", tmp_path / "o.csv")
    for line in read(tmp_path / "o.csv"):
        assert gone["name"] not in (line["name"], line["second"], line["third"]) and line["cluster"] != gone["id"]
    (run / "clusters.csv").unlink()
    script("predict.py", run, "--data_dir", folder / "data")
    assert [line["name"] for line in read(run / "clusters.csv")] == [line["name"] for line in lines]
    lines = read(run / "assignments.csv")
    with open(run / "assignments.csv", "w", newline="") as f:  # sorted in a spreadsheet: the map goes by the column row
        out = csv.DictWriter(f, lines[0])
        out.writeheader()
        out.writerows(lines[::-1])
    points = [], []
    for side in points:
        script("figures.py", run)
        side += json.loads((run / "report.html").read_text().split('id="data">')[1].split("</script>")[0])["points"]
        (run / "assignments.csv").unlink()
        script("predict.py", run, "--data_dir", folder / "data")
    assert points[0] != points[1] and sorted(points[0]) == sorted(points[1])

    def not_made():
        done = script("figures.py", run, ok=False)
        one_line_error(done, f"{run}/report.html could not be made")
        return done.stdout

    (run / "clusters.csv").write_text("id,name\n0,a\n")
    line, = [line for line in not_made().splitlines() if "report.html" in line]
    assert "left out, an older one stays: " in line and "clusters.csv has no column known" in line
    (run / "clusters.csv").unlink()
    script("predict.py", run, "--data_dir", folder / "data")
    (run / "assignments.csv").write_bytes("row;text;label;cluster;name;confidence\n1;größe;;0;a;9\n".encode("latin-1"))
    line, = [line for line in not_made().splitlines() if "report.html" in line]
    assert "left out, an older one stays" in line and "assignments.csv: not valid UTF-8" in line and len(line) < 400


def test_labels_that_were_filled_in_are_never_written_over(own_run, tmp_path):
    folder, _, rows, _ = own_run
    run = shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    assert (run / "assignments.csv").read_bytes().startswith(codecs.BOM_UTF8)  # there is a smiley in it
    known = next(line for line in read(run / "clusters.csv") if line["known"] == "yes")
    text = (run / "clusters.csv").read_text(encoding="utf-8-sig")
    (run / "clusters.csv").write_text(text.replace(f",yes,{known['name']}", ",yes,NEW \xa0 NAME"))

    def fill(change):
        lines = read(run / "assignments.csv")
        change(lines)
        with open(run / "assignments.csv", "w", newline="", encoding="utf-8") as f:
            out = csv.DictWriter(f, lines[0], delimiter=";")
            out.writeheader()
            out.writerows(lines)
        edited = (run / "assignments.csv").read_bytes()
        return edited, script("predict.py", run, "--data_dir", folder / "data").stdout

    script("predict.py", run, "--data_dir", folder / "data")
    def saved_anew(lines):  # sorted, with other numbers of digits, but with no other labels
        lines.reverse()
        for line, number in zip(lines, ("{}0", "{}")):
            line["confidence"] = number.format(line["confidence"]).replace(".", ",")

    _, said = fill(saved_anew)
    assert "was edited" not in said and not [*run.glob("assignments_edited*")]
    labels = [line["label"] for line in read(run / "assignments.csv")]  # of the new name, for a second round
    assert "NEW NAME" in labels and known["name"] not in labels
    assert [label != "" for label in labels[:len(rows) - 3]] == [label != "" for _, label, _ in rows[:-3]]
    empty, full = labels.index(""), labels.index("NEW NAME")

    def move(lines):
        return next(line for line in lines if not line["label"] and line["cluster"] not in ("", known["id"]))

    changes = (lambda lines: lines[empty].update(label=lines[empty]["name"]), lambda lines: lines[full].update(label=""),
               lambda lines: lines[full].update(label="another"), lambda lines: [line.pop("label") for line in lines],
               lambda lines: [line.update(label="another", name="another") for line in lines if line["label"] == "NEW NAME"],
               lambda lines: lines[empty].update(name="another"), lambda lines: [line.update(note="mine") for line in lines],
               lambda lines: move(lines).update(cluster=known["id"], name="NEW NAME"), lambda lines: lines.pop(empty),
               lambda lines: lines[full].update(text="corrected"), lambda lines: lines[full].update(confidence="99 (checked)"),
               lambda lines: lines[empty].update(confidence="100"))
    for n, change in enumerate(changes):
        edited, said = fill(change)
        aside = run / f"assignments_edited{n or ''}.csv"
        assert aside.read_bytes() == edited and f"was edited: it is kept as {aside.name}" in said
        assert [line["label"] for line in read(run / "assignments.csv")] == labels
    assert "was edited" not in script("predict.py", run, "--data_dir", folder / "data").stdout


def test_an_edited_clusters_csv_outlives_a_new_run(own_run, tmp_path, capsys):
    run = shutil.copytree(own_run[1], tmp_path / "my_table_s0")
    for change in (lambda text: text.replace(",no,", ",no,mine ", 1), lambda text: text.replace(",yes,", ",yes,", 1)):
        shutil.copy(own_run[1] / "clusters.csv", run)
        text = change((run / "clusters.csv").read_text(encoding="utf-8-sig"))
        (run / "clusters.csv").write_text(text, encoding="utf-8")
        clear_out(run)
        said = capsys.readouterr().out
        assert not (run / "clusters.csv").exists() and ("it is kept as clusters_edited.csv" in said) == ("mine" in text)
    assert "mine" in (run / "clusters_edited.csv").read_text() and not (run / "clusters_edited1.csv").exists()


def test_a_kill_between_a_table_and_its_digest_is_no_edit(tmp_path, monkeypatch, capsys):
    path, write = tmp_path / "t.csv", make_lt_data.write_atomic
    write_table(path, ("a", "confidence"), [("1\n" * 30, "50.0")])
    for count in (1, 2):
        writes = [write] * count
        monkeypatch.setattr(make_lt_data, "write_atomic",
                            lambda *given, writes=writes: writes.pop()(*given) if writes else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_table(path, ("a", "confidence"), [(f"{count}", "50.0")])
        monkeypatch.undo()
        assert not set_aside(path) and capsys.readouterr() == ("", "")
    path.with_suffix(".sha256").unlink()
    assert set_aside(path) and "may have been edited: it is kept as t_edited.csv" in capsys.readouterr().out


def test_a_table_that_cannot_be_read_any_more_is_an_edited_one(tmp_path, capsys):
    path = tmp_path / "t.csv"
    write_table(path, ("a", "b"), [("größe", "1")])
    for n, edited in enumerate(("a,b\ngröße,2\n".encode("latin-1"), "a,b\nGröße,1\n".encode())):  # or of a larger letter
        path.write_bytes(edited)
        assert set_aside(path) and (tmp_path / f"t_edited{n or ''}.csv").read_bytes() == edited
        assert f"was edited: it is kept as t_edited{n or ''}.csv" in capsys.readouterr().out


def test_a_table_has_no_gamma():
    assert [lambda2_of(Args(dataset=name, gamma=1)) for name in ("demo", "my_table")] == [7, 2]


def test_bad_calls_of_predict(own_run, tmp_path, tiny_run):
    folder, run, _, _ = own_run
    for text in (None, "{}", "[]", "{"):
        (tmp_path / "results.json").write_text(text) if text else None
        one_line_error(script("predict.py", tmp_path, ok=False), "no finished run")
    one_line_error(script("predict.py", run, tmp_path / "none.csv", ok=False), "missing")
    one_line_error(script("predict.py", run, "/dev/null", ok=False), "no regular file", "stdin")
    one_line_error(script("predict.py", ok=False), "--help")
    new = table(tmp_path / "new.csv", [(text, "") for text in TEXTS])
    other = shutil.copytree(run, tmp_path / "other_s0")  # whose tables are somebody's work as well
    for output in (tmp_path, tmp_path / "nowhere/o.csv", run / "clusters.csv", other / "clusters.csv", other / "last.pt",
                   os.path.relpath(folder / "out/my_table_s0/o.csv", REPO)):
        one_line_error(script("predict.py", run, new, "-o", output, ok=False), "--output")
    assert all((other / name).read_bytes() == (run / name).read_bytes() for name in ("clusters.csv", "last.pt"))
    one_line_error(script("predict.py", run, new, "-o", "/dev/fd/99", ok=False), "cannot use", "No such file")
    for flag, value in (("--output", tmp_path / "o.csv"), ("--device", "cpu"), ("--dtype", "float32"), ("--batch_size", 3)):
        one_line_error(script("predict.py", run, flag, value, ok=False), flag, "new texts")
    one_line_error(script("predict.py", run, new, "--name_command", "true", ok=False), "--name_command")
    assert script("predict.py", run, new, "-o", "/dev/null").returncode == 0 and not Path("/dev/null").is_file()
    before = read(run / "clusters.csv")
    (tmp_path / "all.csv").write_text("kept\n")
    (tmp_path / "all.csv").chmod(0o600)
    into = f"{sys.executable} {REPO}/predict.py {shlex.quote(str(run))} {shlex.quote(str(new))} -o"
    subprocess.run(["bash", "-c", f"{into} /dev/stdout >> {tmp_path}/all.csv"], check=True, capture_output=True)
    assert (tmp_path / "all.csv").read_text().startswith("kept\ntext,label,cluster")
    script("predict.py", run, new, "-o", tmp_path / "all.csv")
    assert (tmp_path / "all.csv").stat().st_mode & 0o777 == 0o600 and read(run / "clusters.csv") == before
    closed = f"{sys.executable} {REPO}/predict.py {shlex.quote(str(run))} {shlex.quote(str(new))} >&-"
    one_line_error(subprocess.run(["bash", "-c", closed], capture_output=True, text=True), "-o FILE")
    one_line_error(script("predict.py", run, "--data_dir", tmp_path / "nowhere", ok=False), "make_lt_data.py")
    (tmp_path / "empty.csv").write_text("text\n")
    one_line_error(script("predict.py", run, tmp_path / "empty.csv", "-o", tmp_path / "o.csv", ok=False), "empty")
    broken = tmp_path / "broken.csv"
    broken.write_text("text,n\n" + "open the door,1\n" * 3000 + 'a,b,c\n')
    one_line_error(script("predict.py", run, broken, "-o", tmp_path / "o.csv", ok=False), "line 3002")
    assert not list(tmp_path.glob("o.csv*"))
    for name in ("o.xlsx", "o.tsv"):
        one_line_error(script("predict.py", run, new, "-o", tmp_path / name, ok=False), "--output", "CSV")
    (tmp_path / "new.xlsx").write_bytes(b"PK")
    one_line_error(script("predict.py", run, tmp_path / "new.xlsx", ok=False), "CSV")
    edited = shutil.copytree(run, tmp_path / "my_table_s0")
    (edited / "last.pt").write_bytes(b"PK")
    one_line_error(script("predict.py", edited, new, ok=False), "last.pt", "results.json", "train_imbanid.py")
    shutil.copy(run / "last.pt", edited)
    for text, words in (("cluster,name\n0,a\n", "has no column id"), ("id,name\n0,a\n,all\n", "row 2: id ''"),
                        ("id,name\n99,a\n", "id 99 is not one of 0 to 7"), ("id,name\n", "holds no id"),
                        ("id,name\n0,a\n0,b\n", "row 2: id '0'"),
                        ("id,name\n1.0,a\n", "id '1.0'"), ("id,name\n0,  \n", "row 1: the cluster with id 0 has no name")):
        (edited / "clusters.csv").write_text(text)
        with pytest.raises(UserError, match=re.escape(words)):
            cluster_names(edited, 8)
    one_line_error(script("predict.py", edited, new, ok=False), "clusters.csv", "no name", "mend it")
    (edited / "clusters.csv").write_text("id,name\n0,a\n,\n")  # the empty row that spreadsheets leave
    (tmp_path / "gaps.csv").write_text("text,note\nopen the door,x\n,y\n")
    done = script("predict.py", edited, tmp_path / "gaps.csv")
    assert "1 rows labelled by column 'text', 1 have no text\n" in done.stderr
    (tmp_path / "gaps.csv").write_text("text,note\n,x\n")
    assert "1 have no text; if another column has the texts" in script("predict.py", edited, tmp_path / "gaps.csv").stderr


def test_without_any_label(tmp_path, tiny_rows, tiny_encoder):
    path = table(tmp_path / "bare.csv", [(text, "x") for text, _, _ in tiny_rows], ("utterance", "Kategorie"))
    task = flags = ("--dataset", path, "--data_dir", tmp_path / "data")
    said = script("make_lt_data.py", *flags).stdout
    assert "no labels" in said and "if one of 'Kategorie' holds labels, name it with --label_column" in said
    flags += ("--out_dir", tmp_path / "out")
    script("pretrain.py", *flags, "--encoder", tiny_encoder, *TINY_PRETRAIN)
    done = script("train_imbanid.py", *flags, *TINY_TRAIN)
    assert "estimated number of classes" in done.stdout and "0 known classes" in done.stdout
    script("predict.py", tmp_path / "out/bare_s0", "--data_dir", tmp_path / "data")
    assert {line["known"] for line in read(tmp_path / "out/bare_s0/clusters.csv")} == {"no"}
    log = (tmp_path / "out/bare_s0/log.jsonl").read_text().splitlines()
    assert all(json.loads(line)["dev_accuracy"] is None for line in log)
    # A resumed run takes K and the head from its checkpoint: an estimate on another machine may differ.
    state = torch.load(tmp_path / "out/bare_s0/last.pt")
    K = len(state["head"])
    (tmp_path / "out/bare_s0/results.json").unlink()
    done = script("train_imbanid.py", *flags, *TINY_TRAIN)
    assert "resuming" in done.stdout and "estimated" not in done.stdout
    assert json.loads((tmp_path / "out/bare_s0/results.json").read_text())["num_classes"] == K
    before = (tmp_path / "out/bare_s0/results.json").stat().st_mtime_ns
    script("train_imbanid.py", *flags, *TINY_TRAIN, "--num_classes", "auto")  # what it is without the flag
    assert (tmp_path / "out/bare_s0/results.json").stat().st_mtime_ns == before
    done = script("train_imbanid.py", *flags, *TINY_TRAIN, "--num_classes", "true", "--restart", ok=False)
    one_line_error(done, "--num_classes true")
    # The same texts, some of which are repeated now: nothing is trained anew, and the clusters are of other sizes.
    run, first = tmp_path / "out/bare_s0", tiny_rows[0][0]
    lines = read(run / "clusters.csv")
    old, named = lines[0]["name"], (run / "clusters.csv").read_text(encoding="utf-8-sig")
    (run / "clusters.csv").write_text(named.replace(f",no,{old},", ",no,MINE,"))
    table(path, [(text, "x") for text in [*(text for text, _, _ in tiny_rows), *[first] * 7]], ("utterance", "Kategorie"))
    shutil.rmtree(tmp_path / "data/bare_s0")
    script("make_lt_data.py", *task)
    done = script("train_imbanid.py", *flags, *TINY_TRAIN)
    assert "skipped" in done.stdout and f"{len(tiny_rows) + 7} rows" in done.stdout
    assert "(sizes counted anew)" in script("predict.py", run, "--data_dir", tmp_path / "data").stdout
    where = read(run / "assignments.csv")[0]["cluster"]
    now = {line["id"]: line for line in read(run / "clusters.csv")}
    assert {k: int(line["size"]) for k, line in now.items()} == {
        line["id"]: int(line["size"]) + 7 * (line["id"] == where) for line in lines}
    assert now[lines[0]["id"]]["name"] == "MINE" and "MINE" in (run / "clusters_edited.csv").read_text()
    assert "anew" not in script("predict.py", run, "--data_dir", tmp_path / "data").stdout
    (run / "train_row.npy").write_bytes(b"")  # predict.py's own file, the last that it writes
    assert "anew" in script("predict.py", run, "--data_dir", tmp_path / "data").stdout


def test_a_benchmark_run_gets_names_too(tiny_run, tmp_path):
    task, folder = tiny_run
    script("train_imbanid.py", *task, *TINY_TRAIN, "--tag", "named")
    run = folder / "out/demo_g4_s0_named"
    script("predict.py", run, "--data_dir", folder / "data")
    assert len(read(run / "assignments.csv")) == len(read_run(folder / "data/demo_g4_s0")[0]["train"])
    (tmp_path / "t.txt").write_text("turn off the lights\nplay some jazz\n")
    done = script("predict.py", run, tmp_path / "t.txt")
    assert len(done.stdout.splitlines()) == 3


# ---- a real corpus as one table ----

def test_a_real_corpus_as_a_table(real_raw, tmp_path):
    """A third of CLINC150-LT's classes, gamma 10, as a CSV with most labels blanked: K within 20 %, and names that tell.

    Both stages are shortened here, to 3 epochs and 1. README has the figures of full runs.
    """
    texts, labels, names, counts, num_known, labelled = make_split(raw_corpus("clinc", real_raw, "")[0], 10, 0, 0.75, 0.1)
    rows, num_known = np.flatnonzero(labels["train"] % 3 == 0), len(range(0, num_known, 3))
    truth, labelled, names, counts = labels["train"][rows] // 3, labelled[rows], names[::3], counts[::3]
    shown = [names[k] if seen else "" for k, seen in zip(truth, labelled)]
    path = table(tmp_path / "third.csv", zip([texts["train"][row] for row in rows], shown))
    flags = ("--dataset", path, "--data_dir", tmp_path / "data")
    script("make_lt_data.py", *flags)
    flags += ("--out_dir", tmp_path / "out")
    script("pretrain.py", *flags, "--encoder", "minilm", "--epochs", 3)
    script("train_imbanid.py", *flags, "--epochs", 1, "--min_steps", 0)
    run = tmp_path / "out/third_s0"
    script("predict.py", run, "--data_dir", tmp_path / "data")
    K = json.loads((run / "results.json").read_text())["num_classes"]
    assert abs(K - len(names)) <= 0.2 * len(names)
    with open_table(run / "assignments.csv") as f:
        cluster = np.array([int(line["cluster"]) for line in records(f, "a.csv")])
    scores = cluster_metrics(truth[~labelled], cluster[~labelled], num_known, counts)
    assert scores["ACC"] > 75 and scores["novel"] > 60  # here 91 and 92, of the next third of the classes 86 and 83
    hits = []
    for line in read(run / "clusters.csv"):
        if line["known"] == "no":
            intent = names[np.bincount(truth[cluster == int(line["id"])]).argmax()]
            hits.append(bool(set(intent.lower().split("_")) & set(re.split("[, ]+", line["keywords"]))))
    assert np.mean(hits) > 0.5


def test_tables_at_the_edge(tmp_path, tiny_encoder):
    """Every row labelled and none kept for dev; as few texts as are taken, each class with one label; one known class."""
    for name, rows, dev in (("full", [(f"{text} {n}", "ab"[n % 2]) for n in range(3) for text in TEXTS], 0),
                            ("few", [(text, text.split()[0] if "door" in text else "") for text in TEXTS[:-2]]
                             + [("open " * 99, ""), ("ж " * 20, "")], 0.2),
                            ("one", [(f"{text} {n}", "a" if n else "") for n in range(3) for text in TEXTS], 0.2)):
        path = table(tmp_path / f"{name}.csv", rows)
        flags = ("--dataset", path, "--data_dir", tmp_path / "data")
        script("make_lt_data.py", *flags, "--dev_ratio", dev)
        flags += ("--out_dir", tmp_path / "out")
        said = script("pretrain.py", *flags, "--encoder", tiny_encoder, *TINY_PRETRAIN).stdout
        assert "no dev rows" in said and ("1 text(s) of 32 tokens or more" in said) == (name == "few")
        assert "unknown to --encoder" in said or name != "few"
        assert load_checkpoint(tmp_path / f"out/{name}_s0/pretrain.pt")["epoch"] == 2
        script("train_imbanid.py", *flags, *TINY_TRAIN)
        assert name != "full" or json.loads((tmp_path / "out/full_s0/results.json").read_text())["num_classes"] == 2
        script("predict.py", tmp_path / f"out/{name}_s0", "--data_dir", tmp_path / "data")
        found = read(tmp_path / f"out/{name}_s0/assignments.csv")
        assert all(line["name"] == label for line, (_, label) in zip(found, rows) if label)

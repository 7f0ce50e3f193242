"""Labelled tasks of `preprocess.py task NAME`: every published format is read, splits are drawn,
and errors name what is wrong.

The expected values come from a few plain lines that read the raw files.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CLASSIFY, REGRESS, Forks, good, kept_as_scored, training

from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.store import Ragged, Store, open_store
from xformer.preprocess import cli, stats
from xformer.preprocess.tasks import dna, protein

Make = Callable[..., Store]
Raw = list[list[str]]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer, which decodes ids to exactly the text that was encoded."""
    place = tmp_path_factory.mktemp("bpe")
    words = ["the quick brown fox jumps over the lazy dog and does so again"] * 9
    vocabularies.learn("bpe", words, 280).save(place)
    return place


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bpe: Path) -> Make:
    """Run `preprocess.py task ARGUMENTS` into `tmp_path/NAME` and open the store."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: object, name: str = "store") -> Store:
        text = ["--tokenizer", bpe] if str(arguments[0]).startswith(("tsv", "glue")) else []
        line = ["task", *arguments, *text, "--output", tmp_path / name]
        monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, line)])
        cli.main()
        return open_store(tmp_path / name)

    return run


def texts(store: Store, split: str, column: str = "tokens") -> list[str]:
    """The texts of a split, decoded by the store's tokenizer."""
    values = store.split(split).columns[column]
    assert isinstance(values, Ragged)
    tokenizer = store.tokenizer()
    if tokenizer.kind == "symbols":
        separator = " " if max(map(len, tokenizer.pieces[5:])) > 1 else ""
        pieces = np.array(tokenizer.pieces)[np.asarray(values.values)].tolist()
        ends = values.offsets.tolist()
        return [separator.join(pieces[a:b]) for a, b in pairwise(ends)]
    return [tokenizer.decode(values[row]) for row in range(len(values))]


def labels(store: Store, split: str) -> list[Any]:
    """Class names (negative numbers for rows without one), or scores."""
    values = store.split(split).columns["label"].tolist()
    return [store.labels[i] if i >= 0 else i for i in values] if store.labels else values


def content(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """split -> rows (texts and label)."""
    rows = {}
    for split in store.splits:
        columns = [texts(store, split)]
        if "tokens_b" in store.split(split).columns:
            columns.append(texts(store, split, "tokens_b"))
        rows[split] = list(zip(*columns, labels(store, split), strict=True))
    return rows


def ids(store: Store, split: str) -> list[tuple[Any, ...]]:
    """The rows of a split like `content`, but with ids in place of texts, which is quicker."""
    columns = store.split(split).columns
    tokens = [columns[c] for c in ("tokens", "tokens_b") if c in columns]
    rows = range(store.split(split).rows)
    keys = [[column[row].tobytes() for row in rows] for column in tokens]
    return list(zip(*keys, labels(store, split), strict=True))


def write(place: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below a directory, given their relative paths."""
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


def tsv(rows: Raw) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


# ------------------------------------------------------------------------------ GLUE


def raw_rows(path: Path, header: bool) -> Raw:
    lines = path.read_bytes().decode("utf-8-sig").split("\n")
    rows = [line.rstrip("\r").split("\t") for line in lines if line.rstrip("\r")]
    return rows[1:] if header else rows


# directory; columns of the texts, and of the label, in train and dev; columns of the texts in test;
# rows per split; rows per class in train; whether train has a header
GLUE: dict[str, tuple[str, list[int], int, list[int], list[int], dict[str, int], bool]] = {
    "cola": (
        "CoLA",
        [3],
        1,
        [1],
        [8551, 1043, 1063],
        {"acceptable": 6023, "unacceptable": 2528},
        False,
    ),
    "sst2": (
        "SST-2",
        [0],
        1,
        [1],
        [67349, 872, 1821],
        {"positive": 37569, "negative": 29780},
        True,
    ),
    "mrpc": (
        "MRPC",
        [3, 4],
        0,
        [3, 4],
        [3668, 408, 1725],
        {"equivalent": 2474, "not_equivalent": 1194},
        True,
    ),
    "rte": ("RTE", [1, 2], 3, [1, 2], [2490, 277, 3000], {}, True),
    "wnli": ("WNLI", [1, 2], 3, [1, 2], [635, 71, 146], {}, True),
    "stsb": ("STS-B", [7, 8], 9, [7, 8], [5749, 1500, 1379], {}, True),
}
NUMBERED = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "wnli": ["not_entailment", "entailment"],
}


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.slow
def test_glue_as_published(name: str, shared: Path, make: Make) -> None:
    """Every label equals the raw file's, and so do the texts of 40 random rows per split."""
    folder, places, label, test_places, sizes, classes, header = GLUE[name]
    store = make(f"glue/{name}", "--input", shared / "glue" / folder)
    assert store.splits == ["train", "valid", "test"]
    assert [store.split(split).rows for split in store.splits] == sizes
    for split, file in (("train", "train"), ("valid", "dev"), ("test", "test")):
        raw = raw_rows(shared / f"glue/{folder}/{file}.tsv", header or split == "test")
        read = labels(store, split)
        if split == "test":
            assert np.isnan(read).all() if name == "stsb" else set(read) == {-1}
        elif name == "stsb":
            assert read == pytest.approx([float(row[label]) for row in raw], abs=1e-6)
        else:
            expected = [row[label] for row in raw]
            if name in NUMBERED:
                expected = [NUMBERED[name][int(value)] for value in expected]
            assert read == expected
        encode = store.tokenizer().encode_batch
        draw = np.random.default_rng(len(raw)).integers(len(raw), size=40)
        for column, place in zip(
            ("tokens", "tokens_b"), test_places if split == "test" else places, strict=False
        ):
            values = store.split(split).columns[column]
            for row, ids in zip(draw, encode([raw[i][place] for i in draw]), strict=True):
                assert values[row].tolist() == ids.tolist()
    if classes:
        assert Counter(labels(store, "train")) == classes
    metrics = {"cola": "mcc", "mrpc": "f1", "stsb": "spearman"}
    assert store.metric == metrics.get(name, "accuracy")


def test_mrpc_from_microsofts_files(shared: Path, make: Make, tmp_path: Path) -> None:
    """The rows and splits are those of GLUE, and the test set has labels."""
    raw = tmp_path / "Microsoft's own"
    raw.mkdir()
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv"):
        (raw / name).symlink_to(shared / "glue/MRPC" / name)
    original = make("glue/mrpc", "--input", raw, name="original")
    expected = make("glue/mrpc", "--input", shared / "glue/MRPC")
    for split in ("train", "valid"):
        assert Counter(ids(original, split)) == Counter(ids(expected, split))
    assert [row[:2] for row in ids(original, "test")] == [row[:2] for row in ids(expected, "test")]
    assert Counter(labels(original, "test")) == {"equivalent": 1147, "not_equivalent": 578}
    (raw / "mine.tsv").write_text("Quality\t#1 String\t#2 String\n1\ta\tb\n")
    given = make("glue/mrpc", "--input", raw, "--valid", raw / "mine.tsv", name="given")
    assert [given.split(s).rows for s in given.splits] == [4076, 1, 1725]


MNLI_HEAD = [
    "index",
    "promptID",
    "pairID",
    "genre",
    "sentence1_binary_parse",
    "sentence2_binary_parse",
    "sentence1_parse",
    "sentence2_parse",
    "sentence1",
    "sentence2",
]
MNLI = ["neutral", "entailment", "contradiction", "neutral"]


def mnli_file(rows: int, votes: int, seed: str) -> str:
    """A file of MNLI: parses, then the sentences, the labels of `votes` people, and the gold
    label.
    """
    marks = [f"label{i + 1}" for i in range(votes)] + (["gold_label"] if votes else [])
    lines = [[*MNLI_HEAD, *marks]]
    for i in range(rows):
        one, two = f'{seed} "one {i}', f"{seed} two {i}."
        parses = [f"( {one} )", f"( {two} )", f"(ROOT {one})", f"(ROOT {two})"]
        wrong = ["contradiction" if MNLI[i % 4] != "contradiction" else "neutral"]
        given = wrong + [MNLI[i % 4]] * (votes - 1) + [MNLI[i % 4]] if votes else []
        lines.append([str(i), f"{i}c", f"{i}e", "fiction", *parses, one, two, *given])
    return tsv(lines)


def test_mnli(make: Make, tmp_path: Path) -> None:
    raw = write(
        tmp_path / "MNLI",
        {
            "train.tsv": mnli_file(12, 1, "train"),
            "dev_matched.tsv": mnli_file(4, 5, "dev m"),
            "dev_mismatched.tsv": mnli_file(5, 5, "dev mm"),
            "test_matched.tsv": mnli_file(6, 0, "test m"),
            "test_mismatched.tsv": mnli_file(7, 0, "test mm"),
            "diagnostic.tsv": "something else\n",
            "original/x_train.tsv": "y\n",
        },
    )
    widths = [
        len((raw / f"{n}.tsv").read_text().split("\n")[0].split("\t"))
        for n in ("train", "dev_matched", "test_matched")
    ]
    assert widths == [12, 16, 10]
    store = make("glue/mnli", "--input", raw)
    assert store.labels == ["entailment", "neutral", "contradiction"]
    sizes = {"train": 12, "valid": 4, "valid_mismatched": 5, "test": 6, "test_mismatched": 7}
    assert {split: store.split(split).rows for split in store.splits} == sizes
    assert store.splits == list(sizes)
    for split, name in zip(sizes, ("train", "dev m", "dev mm", "test m", "test mm"), strict=True):
        assert texts(store, split) == [f'{name} "one {i}' for i in range(sizes[split])]
        assert texts(store, split, "tokens_b") == [f"{name} two {i}." for i in range(sizes[split])]
        hidden = split.startswith("test")
        expected = [-1 if hidden else MNLI[i % 4] for i in range(sizes[split])]
        assert labels(store, split) == expected
    (raw / "dev_mismatched.tsv").unlink()
    with pytest.raises(BadInput, match="no file of the split valid_mismatched"):
        make("glue/mnli", "--input", raw, name="other")


def test_qqp_and_its_broken_rows(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        [str(i), str(2 * i), str(2 * i + 1), f"q {i}?", f"r {i}?", str(i % 2)] for i in range(20)
    ]
    broken = ['7\t14\t15\t"a question', "in two lines\tother\t1", "8\t9"]
    body = tsv(rows[:5]) + "\n".join(broken) + "\n" + tsv(rows[5:])
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    raw = write(
        tmp_path / "QQP",
        {
            "train.tsv": head + body,
            "dev.tsv": head + tsv(rows[:3]).replace("q", "s"),
            "test.tsv": "id\tquestion1\tquestion2\n" + "0\tu\tv\n1\tw\tx\n",
        },
    )
    store = make("glue/qqp", "--input", raw)
    assert [store.split(s).rows for s in store.splits] == [20, 3, 2]
    expected = [(f"q {i}?", f"r {i}?", ["not_duplicate", "duplicate"][i % 2]) for i in range(20)]
    assert content(store)["train"] == expected
    assert content(store)["test"] == [("u", "v", -1), ("w", "x", -1)]
    assert store.meta["origin"]["skipped_rows"] == 3
    err = capsys.readouterr().err
    assert "3 bad rows were left out" in err
    for line, columns in ((7, "4 columns"), (8, "3 columns"), (9, "2 columns")):
        assert f"train.tsv:{line}: {columns} instead of 6" in err


def test_qnli(make: Make, tmp_path: Path) -> None:
    both = ["entailment", "not_entailment"]
    rows = [[str(i), f"When {i}?", f"In {i}.", both[i % 2]] for i in range(9)]
    head = ["index", "question", "sentence", "label"]
    raw = write(
        tmp_path / "QNLI",
        {
            "train.tsv": tsv([head, *rows]),
            "dev.tsv": tsv([head, *rows[:2]]),
            "test.tsv": tsv([row[:3] for row in [head, *rows[2:4]]]),
        },
    )
    store = make("glue/qnli", "--input", raw)
    assert store.labels == both
    assert content(store)["train"] == [(f"When {i}?", f"In {i}.", both[i % 2]) for i in range(9)]
    assert content(store)["test"] == [("When 2?", "In 2.", -1), ("When 3?", "In 3.", -1)]


def in_form(form: str, rows: list[dict[str, Any]], place: Path) -> None:
    """Write rows as csv, JSON lines, JSON or parquet."""
    place.parent.mkdir(exist_ok=True)
    if form == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), place)
    elif form == "csv":
        with place.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        place.write_text(json.dumps(rows, indent=2) if form == "json" else text)


HF: dict[str, tuple[list[str], list[Any], list[str]]] = {  # columns, labels, the classes' names
    "glue/cola": (["sentence"], [0, 1], ["unacceptable", "acceptable"]),
    "glue/mrpc": (["sentence1", "sentence2"], [0, 1], ["not_equivalent", "equivalent"]),
    "glue/qqp": (["question1", "question2"], [0, 1], ["not_duplicate", "duplicate"]),
    "glue/mnli": (["premise", "hypothesis"], [0, 1, 2], ["entailment", "neutral", "contradiction"]),
    "glue/qnli": (["question", "sentence"], [0, 1], ["entailment", "not_entailment"]),
    "glue/rte": (["sentence1", "sentence2"], [0, 1], ["entailment", "not_entailment"]),
    "glue/wnli": (["sentence1", "sentence2"], [0, 1], ["not_entailment", "entailment"]),
    "glue/sst2": (["sentence"], [0, 1], ["negative", "positive"]),
    "glue/stsb": (["sentence1", "sentence2"], [0.25, 5.0, 3.75], []),
}


@pytest.mark.parametrize("name", HF)
def test_glue_as_hugging_face_names_it(name: str, make: Make, tmp_path: Path) -> None:
    """Classes are numbers, the test set has the label -1, and files come in parts."""
    columns, numbers, classes = HF[name]
    matched = ["_matched", "_mismatched"] if name == "glue/mnli" else [""]
    splits = [("train", ["train"], 9)] + [
        (f"{ours}{'' if kind == '_matched' else kind}", [f"{theirs}{kind}"], 4)
        for ours, theirs in (("valid", "validation"), ("test", "test"))
        for kind in matched
    ]
    expected: dict[str, list[tuple[Any, ...]]] = {}
    made: list[tuple[str, list[dict[str, Any]]]] = []
    for split, (file,), size in splits:
        rows = []
        for i in range(size):
            hidden = -1.0 if name == "glue/stsb" else -1
            label: Any = hidden if split.startswith("test") else numbers[i % len(numbers)]
            both = {column: f'{split}, "{column}" {i}\nline é' for column in columns}
            rows.append({**both, "label": label, "idx": i})
            shown = -1 if label == hidden else classes[label] if classes else label
            expected.setdefault(split, []).append((*both.values(), shown))
        made.append((file, rows))
    for form in ("csv", "jsonl", "json", "parquet"):
        raw = tmp_path / form
        for file, rows in made:
            if file == "train" and form != "csv":  # write three parts, one with a hash in its name
                for part in range(3):
                    tail = "-6ef3991c06080e14" if form == "parquet" else ""
                    path = raw / f"{file}-0000{part}-of-00003{tail}.{form}"
                    in_form(form, rows[3 * part : 3 * part + 3], path)
            else:
                middle = "" if form == "csv" else "-00000-of-00001"
                in_form(form, rows, raw / f"{file}{middle}.{form}")
        rows_by_split = content(make(name, "--input", raw, name=f"{form}.store"))
        if name == "glue/stsb":
            assert np.isnan([row[-1] for row in rows_by_split["test"]]).all()
            rows_by_split["test"] = [(*row[:-1], -1) for row in rows_by_split["test"]]
        assert rows_by_split == expected


def test_packed_files(make: Make, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = "sentence\tlabel\n" + "".join(f"film {i}\t{i % 2}\n" for i in range(8))
    lines = "".join(json.dumps({"sentence": f"film {i}", "label": i % 2}) + "\n" for i in range(8))
    raw = write(tmp_path / "plain", {"train.tsv": plain, "dev.tsv": plain})
    expected = content(make("glue/sst2", "--input", raw))
    for ending, text in (("tsv", plain), ("jsonl", lines)):
        for packing, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
            packed = pack(text.encode())
            folder = f"{ending}{packing}"
            files = {f"train.{folder}": packed, f"validation.{folder}": packed}
            raw = write(tmp_path / folder, files)
            assert content(make("glue/sst2", "--input", raw, name=f"{folder}.s")) == expected


def test_only_train(make: Make, tmp_path: Path) -> None:
    """--train without --input gives only that split. With --input it replaces the training file of
    the directory.
    """
    text = "sentence\tlabel\n" + "".join(f"film {i}\t{i % 2}\n" for i in range(8))
    raw = write(tmp_path / "a b", {"train.tsv": text, "dev.tsv": text, "more.tsv": text})
    assert make("glue/sst2", "--train", raw / "train.tsv", name="one").splits == ["train"]
    two = ("--train", raw / "train.tsv", raw / "more.tsv")
    store = make("glue/sst2", "--input", raw, *two, name="two")
    assert [store.split(s).rows for s in store.splits] == [16, 8]


# ------------------------------------------------------------------------------ odd, but legal


def test_odd_delimited_files(make: Make, tmp_path: Path) -> None:
    """Windows line ends, a byte-order mark, line ends in quotes, tabs at the end of lines, and
    Unicode line separators."""
    pair = ["--text", "text", "--label", "label"]
    odd = "x\u2028y\x0b\x0c\x85z"
    raw = write(
        tmp_path / "r",
        {
            "TRAIN.CSV": b"\xef\xbb\xbf"
            + f'text,label\r\n"a ""1""\r\n\r\nb",x\r\n{odd},y\r\n'.encode()
        },
    )
    store = make("tsv", "--train", raw / "TRAIN.CSV", *pair, name="csv")
    assert content(store)["train"] == [('a "1"\n\nb', "x"), (odd, "y")]
    raw = write(
        tmp_path / "s",
        {
            "Train.TSV": f'text\tlabel\t\t\n"a\tx\t\t\n\n{odd}\ty\t\t\n',
            "._train.tsv": "junk",
            ".dev.tsv": "junk",
            "Dev.TSV": "text\tlabel\nb\tx",
        },
    )
    os.chmod(raw, 0o555)
    store = make("tsv", "--input", raw, *pair, name="tsv")
    assert content(store) == {"train": [('"a', "x"), (odd, "y")], "valid": [("b", "x")]}


def test_relative_paths_links_and_spaces(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "a dir", {"train.tsv": "text\tlabel\na\tx\nb\ty\n"})
    (tmp_path / "link").symlink_to(raw)
    monkeypatch.chdir(tmp_path)
    store = make("tsv", "--input", "link", "--text", "text", "--label", "label")
    assert content(store) == {"train": [("a", "x"), ("b", "y")]}


def test_json_of_columns_and_of_rows(make: Make, tmp_path: Path) -> None:
    rows = [{"t": f"a {i}", "n": i / 4} for i in range(4)]
    columns = {name: {str(i): row[name] for i, row in enumerate(rows)} for name in ("t", "n")}
    for name, text in (
        ("lines", "\n\n".join(map(json.dumps, rows))),
        ("list", json.dumps(rows)),
        ("list.indent", "\n" + json.dumps(rows, indent=1)),
        ("columns", json.dumps(columns)),
        ("columns.indent", json.dumps(columns, indent=1)),
    ):
        raw = write(tmp_path / name, {"train.json": text})
        store = make(
            "tsv",
            "--train",
            raw / "train.json",
            "--text",
            "t",
            "--label",
            "n",
            "--kind",
            "score",
            name=f"{name}.s",
        )
        assert content(store)["train"] == [("a 0", 0), ("a 1", 0.25), ("a 2", 0.5), ("a 3", 0.75)]


def test_texts_in_two_splits_are_reported(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"text {i}\t{'xy'[i % 2]}\n" for i in range(30)]
    head = "t\tl\n"
    raw = write(
        tmp_path / "r",
        {
            "train.tsv": head + "".join(rows[:20]),
            "dev.tsv": head + "".join(rows[18:24]),
            "test.tsv": head + "".join([*rows[23:], rows[0], rows[0], "text 1 \ty\n"]),
        },
    )
    store = make("tsv", "--input", raw, "--text", "t", "--label", "l")
    assert [store.split(s).rows for s in store.splits] == [20, 6, 10]
    twice = store.meta["origin"]["in_two_splits"]
    assert twice == {"valid": {"train": 2}, "test": {"train": 3, "valid": 1}}
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert len(notes) == 1
    assert "3 of the 10 rows of test are in train" in notes[0]


# ------------------------------------------------------------------------------ DNA


def letters(seed: int, number: int, length: int = 30, alphabet: str = "ACGT") -> list[str]:
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list(alphabet), length)) for _ in range(number)]


def test_alphabets() -> None:
    for alphabet in (dna.LETTERS, dna.IUPAC, protein.LETTERS):
        assert len(set(alphabet)) == len(alphabet)
    assert set(protein.LETTERS) == {*map(chr, range(65, 91)), "*"}
    assert set(dna.IUPAC) == set("ACGT") | set("RYSWKMBDHVN")


def test_dna_in_three_lines(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hilbert-CNN's format, with blank lines, Windows line ends and a record that is cut short."""
    made = letters(0, 100)
    text = "".join(
        f">i{i}\r\n{s.lower()}\r\n{i % 2}\r\n" + "\r\n" * (i % 3) for i, s in enumerate(made)
    )
    raw = write(
        tmp_path / "r",
        {
            "H3.txt": "\r\n" + text,
            "cut.txt": text + ">last\r\nACGT",
            "H3.txt.gz": gzip.compress(text.encode()),
            "inner.txt": text + ">a\nACGT\n>b\nACGT\n1\n",
        },
    )
    stores = [
        make("dna/h3", "--input", raw / name, name=f"{name}.s") for name in ("H3.txt", "H3.txt.gz")
    ]
    expected = [(sequence, str(i % 2)) for i, sequence in enumerate(made)]
    for store in stores:
        rows = content(store)
        assert {split: len(r) for split, r in rows.items()} == {"train": 90, "valid": 5, "test": 5}
        assert Counter(row for r in rows.values() for row in r) == Counter(expected)
    for name, more in (("cut", 0), ("inner", 1)):
        line = text.count("\n") + 1
        with pytest.raises(BadInput, match=rf"{name}\.txt:{line}: the record does not have three"):
            make("dna/h3", "--input", raw / f"{name}.txt", name="x")
        store = make("dna/h3", "--input", raw / f"{name}.txt", "--skip-bad", name=f"{name}.s")
        assert store.meta["origin"]["skipped_rows"] == 1
        assert sum(map(len, content(store).values())) == 100 + more


def test_a_bad_line_shifts_no_record_of_three_lines(make: Make, tmp_path: Path) -> None:
    """Also if no identifier begins with ">"."""
    records = [f"i{i}\n{s}\n{i % 2}\n".encode() for i, s in enumerate(letters(0, 60))]
    for at, line in ((7, b"i7\xff"), (20, b"AC\xffGT"), (40, b"\xff")):
        lines = records[at].split(b"\n")
        lines[{7: 0, 20: 1, 40: 2}[at]] = line
        records[at] = b"\n".join(lines)
    raw = write(tmp_path / "r", {"H3.txt": b"".join(records)})
    store = make("dna/h3", "--input", raw / "H3.txt", "--skip-bad", name="s")
    expected = [(s, str(i % 2)) for i, s in enumerate(letters(0, 60)) if i not in (7, 20, 40)]
    rows = [row for split in content(store).values() for row in split]
    assert Counter(rows) == Counter(expected)
    assert store.meta["origin"]["skipped_rows"] == 3


def test_an_open_quote_is_never_skipped(make: Make, tmp_path: Path) -> None:
    """It would lose all rows after it, and count as one."""
    text = "t,l\n" + "".join(f"a{i},{'xy'[i % 2]}\n" for i in range(60))
    raw = write(tmp_path / "r", {"open.csv": text.replace("a5,", '"a5,')})
    with pytest.raises(BadInput, match=r"open\.csv:61: unexpected end of data \(the row begins in"):
        make(*T, "--input", raw / "open.csv", "--skip-bad", name="s")


def test_the_label_in_a_header(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header may hold a description, so a note says which of its words becomes the label."""
    records = "".join(
        f">i{i} {'Homo' if i % 2 else 'Mus'} x\n{s}\n" for i, s in enumerate(letters(1, 60))
    )
    (tmp_path / "a.fna").write_text(records)
    make("dna", "--input", tmp_path / "a.fna")
    note = "note: the label is the second field of a header, 'Mus' in the first one of "
    assert f"{note}{tmp_path / 'a.fna'}\n" in capsys.readouterr().err
    for option in ("--label", "--sequence", "--id"):
        with pytest.raises(BadInput, match=f"{option} names a column, but .*a.fna has none"):
            make("dna", "--input", tmp_path / "a.fna", option, "x", name="no")


def test_dna_in_wrapped_fasta(make: Make, tmp_path: Path) -> None:
    """FASTA in a .txt file, wrapped or not, is not taken for three lines per record."""
    made = letters(1, 60)
    plain = "".join(f">i{i} {'NA'[i % 2]}\n{s}\n" for i, s in enumerate(made))
    wrapped = "".join(
        f">i{i} {'NA'[i % 2]}\n{s[:12]}\n{s[12:24]}\n{s[24:]}\n" for i, s in enumerate(made)
    )
    raw = write(
        tmp_path / "r",
        {
            "a.txt": plain,
            "b.txt": wrapped,
            "c.FASTA": wrapped,
            "d.txt.gz": gzip.compress(wrapped.encode()),
            "e.fa.gz": gzip.compress(wrapped.encode()),
        },
    )
    stores = [
        content(make("dna", "--input", path, name=f"{path.name}.s"))
        for path in sorted(raw.iterdir())
    ]
    assert all(rows == stores[0] for rows in stores)
    expected = Counter((s, "NA"[i % 2]) for i, s in enumerate(made))
    assert Counter(row for rows in stores[0].values() for row in rows) == expected


def test_dna_as_published(shared: Path, make: Make) -> None:
    """The files of GUE are read row by row."""
    for name, rows in (("H3", 1497), ("H4", 1461)):
        folder = shared / "dna/GUE/EMP" / name
        store = make(
            f"dna/{name.lower()}",
            "--train",
            folder / "dev.csv",
            "--test",
            folder / "test.csv",
            name=name,
        )
        assert [store.split(s).rows for s in store.splits] == [rows, rows]
        assert store.tokenizer().pieces[5:] == list(dna.IUPAC)
        for split, file in (("train", "dev"), ("test", "test")):
            lines = (folder / f"{file}.csv").read_text().split()[1:]
            assert labels(store, split) == [line.split(",")[1] for line in lines]
            assert texts(store, split)[::99] == [line.split(",")[0] for line in lines][::99]
    ecoli = shared / "dna/ecoli_promoter/v9d3.csv"  # columns `seqs` and `labels`, small letters
    store = make("dna", "--input", ecoli, name="ecoli")
    lines = ecoli.read_text().split()[1:]
    rows_ = Counter((line.split(",")[0].upper(), line.split(",")[1]) for line in lines)
    assert Counter(row for r in content(store).values() for row in r) == rows_


# ------------------------------------------------------------------------------ proteins


def test_deeploc(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The headers mark the test set, and a tenth of the rest is for validation. Proteins that are
    in two places are left out.
    """
    places = ["Cell.membrane-M", "Nucleus-U", "Lysosome/Vacuole-S", "Cytoplasm-S"]
    made = letters(2, 400, 40, "ACDEFGHIKLMNPQRSTVWY")
    records = [
        f">Q{i} {places[i % 4]}{' test' if i % 5 == 0 else ''}\n{s[:30]}\n{s[30:]}\n"
        for i, s in enumerate(made)
    ]
    records += [f">P{i} Cytoplasm-Nucleus-U{' test' * (i % 2)}\n{made[i]}\n" for i in range(4)]
    raw = write(tmp_path / "r", {"deeploc_data.fasta": "".join(records)})
    store = make("protein/localization", "--input", raw / "deeploc_data.fasta")
    assert store.labels == ["Cell.membrane", "Cytoplasm", "Lysosome/Vacuole", "Nucleus"]
    assert [store.split(s).rows for s in store.splits] == [288, 32, 80]
    assert sorted(texts(store, "test")) == sorted(made[::5])
    names = [label.split("-")[0] for label in places]
    for split in store.splits:
        for text, label in zip(texts(store, split), labels(store, split), strict=True):
            assert label == names[made.index(text) % 4]
    assert store.meta["origin"]["left_out_rows"] == 4
    assert "4 bad rows were left out" in capsys.readouterr().err
    ids = store.split("test").columns["id"]
    assert [ids.text(i) for i in range(3)] == ["Q0", "Q5", "Q10"]


@pytest.mark.parametrize("longest", [7, 8])
def test_both_ends_are_kept(longest: int, make: Make, tmp_path: Path) -> None:
    made = [s[: 5 + i % 6] for i, s in enumerate(letters(3, 60, 12, "ACDEFGHIKLMN"))]
    records = [f">i{i}\n{s}\n" for i, s in enumerate(made)]
    files: dict[str, str | bytes] = {"a.fa": "".join(records[:30]), "b.fa": "".join(records[30:])}
    raw = write(tmp_path / "r", files)
    store = make("protein/localization", "--input", raw, "--longest", longest)
    kept = []
    for sequence in made:
        whole = list(sequence)
        while len(whole) > longest:
            del whole[(longest + 1) // 2]
        kept.append("".join(whole))
    assert Counter(t for s in store.splits for t in texts(store, s)) == Counter(kept)
    assert store.meta["origin"]["columns"]["longest"] == longest


def test_multiloc_as_published(shared: Path, make: Make) -> None:
    """One FASTA file per class, and no sequence in two splits."""
    folder = shared / "protein/localization_multiloc/multiloc"
    store = make("protein/localization", "--input", folder, "--longest", 4000)
    rows = content(store)
    assert sum(map(len, rows.values())) == 5959
    assert Counter(label for r in rows.values() for _, label in r) == {
        "cytoplasmic": 1411,
        "plasma_membrane": 1238,
        "extracellular": 843,
        "nuclear": 837,
        "mitochondrial": 510,
        "chloroplast": 449,
        "ER": 198,
        "peroxisomal": 157,
        "Golgi": 150,
        "lysosomal": 103,
        "vacuolar": 63,
    }
    sets = {split: {text for text, _ in r} for split, r in rows.items()}
    assert not sets["train"] & sets["valid"] | sets["train"] & sets["test"]
    assert not sets["valid"] & sets["test"]
    raw = "".join((folder / "ER.fasta").read_text().split("\n"))
    whole = "".join(text for r in rows.values() for text, label in r if label == "ER")
    assert len(whole) == sum(
        len(line)
        for line in (folder / "ER.fasta").read_text().split("\n")
        if not line.startswith(">")
    )
    assert all(text in raw for text, label in rows["test"] if label == "ER")


def test_classes_by_file_names_and_a_training_file(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one file per class, compressed or with an ending in capitals.

    If one file is called train, the files are splits instead, and a note lists those that are not
    read.
    """
    made = letters(4, 40)
    body = ["".join(f">i{i} {'xy'[i % 2]}\n{made[i]}\n" for i in range(k, 40, 2)) for k in (0, 1)]
    raw = write(
        tmp_path / "r",
        {
            "beta-barrel.FASTA": body[0],
            "m.fna.gz": gzip.compress(body[1].encode()),
            "._m.fasta": "junk",
            "README.md": "x",
        },
    )
    rows = [row for r in content(make("dna", "--input", raw)).values() for row in r]
    assert Counter(rows) == {(s, ["beta-barrel", "m"][i % 2]): 1 for i, s in enumerate(made)}
    assert "so its files are splits" not in capsys.readouterr().err
    write(raw, {"train.fasta": body[0].replace("1\n", "2\n") + body[1], "test.fasta": ">z\nACGT\n"})
    (raw / "m.fna.gz").rename(raw / "m.fasta.gz")
    raw_names = "beta-barrel.FASTA, m.fasta.gz"
    (raw / "dev.csv").write_text("sequence,label\nACGT,x\n")
    with pytest.raises(BadInput, match="several formats"):
        make("dna", "--input", raw, name="x")
    (raw / "dev.csv").unlink()
    store = make("dna", "--input", raw, name="splits")
    assert content(store)["test"] == [("ACGT", -1)]
    assert store.split("train").rows == 40
    err = capsys.readouterr().err
    assert "holds train.fasta, so its files are splits" in err
    assert raw_names in err


def test_tape(make: Make, tmp_path: Path, shared: Path) -> None:
    """The score in JSON lines is a list of one number. In csv its column has another name."""
    folder = shared / "protein/fluorescence"
    file = folder / "fluorescence_valid.jsonl"
    store = make("protein/fluorescence", "--train", file)
    raw = [json.loads(line) for line in file.read_text().splitlines()]
    assert (store.kind, store.metric, store.split("train").rows) == ("score", "spearman", 5362)
    assert labels(store, "train") == pytest.approx(
        [r["log_fluorescence"][0] for r in raw], abs=1e-6
    )
    assert texts(store, "train")[::200] == [r["primary"] for r in raw][::200]
    assert store.meta["origin"]["columns"]["text"] == "primary"
    designs = shared / "protein/stability_rocklin/stability_designs.csv"
    with pytest.raises(BadInput, match="'stabilityscore_cnn_calibrated'; give --label COLUMN"):
        make("protein/stability", "--input", designs, name="x")
    store = make(
        "protein/stability",
        "--input",
        designs,
        "--label",
        "stabilityscore_cnn_calibrated",
        name="s",
    )
    with designs.open() as opened:
        expected = sorted(
            (r["sequence"], float(r["stabilityscore_cnn_calibrated"]))
            for r in csv.DictReader(opened)
        )
    rows = sorted(row for r in content(store).values() for row in r)
    assert [s for s, _ in rows] == [s for s, _ in expected]
    assert sum(n for _, n in rows) == pytest.approx(sum(n for _, n in expected), abs=1e-2)
    lines = "".join(
        json.dumps({"primary": s, "stability_score": [0.5]}) + "\n" for s in letters(5, 3)
    )
    bare = lines.replace(', "stability_score": [0.5]', "")
    raw_ = write(tmp_path / "t", {"stability_train.jsonl": lines, "stability_test.jsonl": bare})
    store = make("protein/stability", "--input", raw_, name="t.s")
    assert labels(store, "train") == [0.5] * 3
    assert np.isnan(labels(store, "test")).all()


# ------------------------------------------------------------------------------ music


def read_midi(path: Path) -> list[int]:
    """Pitches in order of tick, then pitch, without channel 10 (drums).

    They are read from the bytes by the MIDI standard.
    """
    data = path.read_bytes()
    assert data[:4] == b"MThd"
    notes: list[tuple[int, int]] = []
    at = 8 + int.from_bytes(data[4:8])
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8])
        at, tick, status = at + 8, 0, 0
        while at < end:
            for first in (True, False):  # first the time since the last event, then below a length
                value = 0
                while True:
                    value, more = value << 7 | data[at] & 127, data[at] & 128
                    at += 1
                    if not more:
                        break
                if not first:
                    at += value
                    break
                tick += value
                if data[at] & 128:
                    status, at = data[at], at + 1
                if status == 0xFF:
                    at += 1
                elif status not in (0xF0, 0xF7):
                    if status >> 4 == 9 and data[at + 1] and status & 15 != 9:
                        notes.append((tick, data[at]))
                    at += 1 if status >> 4 in (12, 13) else 2
                    break
    return [pitch for _, pitch in sorted(notes)]


def midi(pitches: list[int], drums: bool = False) -> bytes:
    """One track of quarter notes, two at a time with the higher one first."""
    track, channel = b"", 9 if drums else 0
    for i in range(0, len(pitches), 2):
        pair = sorted(pitches[i : i + 2], reverse=True)
        track += b"".join(struct.pack("4B", 0, 0x90 | channel, p, 64) for p in pair)
        for j, pitch in enumerate(pair):
            track += struct.pack("4B", 0 if j else 96, 0x80 | channel, pitch, 0)
    track += b"\x00\xff\x2f\x00"
    head = b"MThd" + struct.pack(">IHHH", 6, 0, 1, 96)
    return head + b"MTrk" + struct.pack(">I", len(track)) + track


def tune(seed: int, notes: int) -> list[int]:
    return np.random.default_rng(seed).permutation(100)[:notes].tolist()


def by_two(pitches: list[int]) -> list[int]:
    return [p for i in range(0, len(pitches), 2) for p in sorted(pitches[i : i + 2])]


def pieces_of(store: Store, split: str) -> dict[str, str]:
    """name -> its segments, concatenated. Asserts that they are in order and form one group."""
    columns = store.split(split).columns
    segments: dict[str, list[str]] = {}
    groups: dict[str, int] = {}
    for row, text in enumerate(texts(store, split)):
        name, _, number = columns["id"].text(row).rpartition(":")
        parts = segments.setdefault(name, [])
        assert int(number) == len(parts)
        assert groups.setdefault(name, int(columns["group"][row])) == columns["group"][row]
        parts.append(text)
    assert len(set(groups.values())) == len(groups)
    return {name: " ".join(parts) for name, parts in segments.items()}


def test_maestro_as_published(shared: Path, make: Make) -> None:
    folder = shared / "music/maestro-v1-subset"
    store = make("music/maestro", "--input", folder)
    with (folder / "maestro-v1.0.0.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    splits = {"train": "train", "validation": "valid", "test": "test"}
    composers = {row["midi_filename"]: row["canonical_composer"] for row in table}
    for split, pieces in (("train", 145), ("valid", 22), ("test", 26)):
        read = pieces_of(store, split)
        assert len(read) == pieces
        assert set(read) == {r["midi_filename"] for r in table if splits[r["split"]] == split}
        for name in sorted(read)[::12]:
            assert read[name].split() == [str(pitch) for pitch in read_midi(folder / name)]
        columns = store.split(split).columns
        lengths = np.diff(columns["tokens"].offsets)
        last = np.append(np.diff(columns["group"]) != 0, True)
        assert (lengths[~last] == 128).all()
        assert (lengths[last] <= 128).all()
        for row in range(0, len(lengths), 50):
            name = columns["id"].text(row).rpartition(":")[0]
            assert store.labels[columns["label"][row]] == composers[name]
    with pytest.raises(BadInput, match=r"v1\.0\.0\.csv:2: 2017/MIDI.*: there is no such file"):
        make("music/maestro", "--input", shared / "music/maestro_v1_metadata", name="x")
    with pytest.raises(BadInput, match="no example can be used"):
        make(
            "music/maestro", "--input", shared / "music/maestro_v1_metadata", "--skip-bad", name="x"
        )


def test_maestro_tables(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """csv; json as version 1 writes it (pieces) and as versions 2 and 3 do (columns); and pieces
    that cannot be read.
    """
    rows: list[dict[str, Any]] = [
        {
            "canonical_composer": ["Bach", "Chopin"][i % 2],
            "canonical_title": f'No {i}, "x"',
            "split": ["train", "train", "train", "validation", "test"][i % 5],
            "year": 2000 + i,
            "midi_filename": f"20/{i}.midi",
        }
        for i in range(10)
    ]
    files: dict[str, str | bytes] = {
        r["midi_filename"]: midi(tune(i, 50 + i)) for i, r in enumerate(rows)
    }
    columns = {name: {str(i): r[name] for i, r in enumerate(rows)} for name in rows[0]}
    stores: list[Store] = []
    for text in (None, json.dumps(rows), json.dumps(columns)):
        raw = write(tmp_path / f"r{len(stores)}", files)
        if text is None:
            in_form("csv", rows, raw / "maestro-v2.0.0.csv")
        else:
            write(raw, {"maestro-v3.0.0.json": text})
        table = [] if len(stores) % 2 else [next(raw.glob("maestro*"))]  # its directory, or itself
        stores.append(
            make(
                "music/maestro",
                "--input",
                *(table or [raw]),
                "--segment",
                20,
                name=f"s{len(stores)}",
            )
        )
    assert content(stores[0]) == content(stores[1]) == content(stores[2])
    assert pieces_of(stores[0], "valid") == {
        f"20/{i}.midi": " ".join(map(str, by_two(tune(i, 50 + i)))) for i in (3, 8)
    }
    assert [stores[0].split(s).rows for s in stores[0].splits] == [18, 6, 6]
    whole = midi(tune(0, 20))
    wrong: dict[str, str | bytes] = {
        "20/0.midi": b"",
        "20/1.midi": b"no music at all",
        "20/2.midi": whole[:40],
        "20/5.midi": midi([]),
        "20/4.midi": midi(tune(1, 9), drums=True),
    }
    raw = write(tmp_path / "wrong", {**files, "20/7.midi": midi(tune(7, 64))})
    in_form("csv", rows, raw / "maestro.csv")
    for name, data in wrong.items():
        write(raw, {name: data})
        with pytest.raises(BadInput) as caught:
            make("music/maestro", "--input", raw, name="x")
        assert f"maestro.csv:{int(name[3]) + 2}: {name}: " in str(caught.value)
        assert "\n" not in str(caught.value)
        write(raw, {name: files[name]})
    for name, data in wrong.items():
        write(raw, {name: data})
    (raw / "20/8.midi").unlink()
    capsys.readouterr()
    store = make("music/maestro", "--input", raw, "--skip-bad", name="left")
    assert store.meta["origin"]["skipped_rows"] == 6
    err = capsys.readouterr().err
    assert "maestro.csv:10: 20/8.midi: there is no such file" in err
    assert all(name in err for name in wrong)
    assert [list(pieces_of(store, s)) for s in store.splits] == [
        ["20/6.midi", "20/7.midi"],
        ["20/3.midi"],
        ["20/9.midi"],
    ]


def test_one_directory_per_composer(make: Make, tmp_path: Path) -> None:
    """Copies of a piece under other names go to the same split."""
    files: dict[str, str | bytes] = {
        f"Composer {i % 3}/opus/{i}.{['mid', 'MID', 'Midi'][i % 3]}": midi(tune(i, 60))
        for i in range(60)
    }
    files |= {f"Composer {i % 3}/copy of {i}.mid": midi(tune(i, 60)) for i in range(20)}
    raw = write(tmp_path / "r", {**files, "Composer 0/._1.mid": "junk", "top.mid": midi([1])})
    store = make("music/maestro", "--input", raw, "--segment", 16)
    assert store.labels == ["Composer 0", "Composer 1", "Composer 2"]
    by_split = {split: pieces_of(store, split) for split in store.splits}
    assert {n for pieces in by_split.values() for n in pieces} == set(files)
    assert {split: len(pieces) for split, pieces in by_split.items()} == pytest.approx(
        {"train": 72, "valid": 4, "test": 4}, abs=2
    )
    tunes = [set(pieces.values()) for pieces in by_split.values()]
    assert not tunes[0] & tunes[1] | tunes[0] & tunes[2] | tunes[1] & tunes[2]
    with pytest.raises(BadInput, match=r"holds neither maestro\*\.csv or \.json nor a directory"):
        make("music/maestro", "--input", raw / "Composer 0/opus", name="x")


# ------------------------------------------------------------------------------ drawn splits


def test_splits_are_drawn_by_the_seed(make: Make, tmp_path: Path) -> None:
    made = letters(6, 400)
    rows = [(s, i % 2) for i, s in enumerate(made)] + [(s, 1) for s in made[:80]]
    raw = write(
        tmp_path / "r",
        {"t.csv": "sequence,label\n" + "".join(f"{s},{label}\n" for s, label in rows)},
    )
    stores = [
        make("dna", "--input", raw / "t.csv", "--seed", seed, name=f"s{i}")
        for i, seed in enumerate((0, 0, 1))
    ]
    assert content(stores[0]) == content(stores[1]) != content(stores[2])
    for store in stores:
        by_split = content(store)
        assert {s: len(r) / 480 for s, r in by_split.items()} == pytest.approx(
            {"train": 0.9, "valid": 0.05, "test": 0.05}, abs=0.005
        )
        sets = [{text for text, _ in r} for r in by_split.values()]
        assert sum(map(len, sets)) == len(set().union(*sets)) == 400
        assert "in_two_splits" not in store.meta["origin"]
    assert [s.meta["origin"]["seed"] for s in stores] == [0, 0, 1]


# ------------------------------------------------------------------------------ bad input

SEQ = [*letters(7, 40)]
FASTA = "".join(f">i{i} {'xy'[i % 2]}\n{s}\n" for i, s in enumerate(SEQ))
CSV = "sequence,label\n" + "".join(f"{s},{i % 2}\n" for i, s in enumerate(SEQ))
JSONL = "".join(json.dumps({"sequence": s, "label": i % 2}) + "\n" for i, s in enumerate(SEQ))
T = ["tsv", "--text", "t", "--label", "l"]
TSV = "t\tl\na\tx\nb\ty\n"
SST2 = "sentence\tlabel\na\t1\nb\t0\n"

# files, arguments, the message, and the rows left by --skip-bad (None: it does not help)
REFUSED: list[tuple[dict[str, str | bytes], list[str], str, int | None]] = [
    ({"train.tsv": TSV + "c\n"}, [*T, "--input", "."], r"train\.tsv:4: 1 column instead of 2", 2),
    ({"train.tsv": TSV + "c\tx\ty\n"}, [*T, "--input", "."], r"train\.tsv:4: 3 columns inst", 2),
    ({"train.tsv": TSV + "c\t\n"}, [*T, "--input", "."], r"train\.tsv:4: the label is empty", 2),
    (
        {"train.tsv": TSV.encode() + b"caf\xe9\tx\n"},
        [*T, "--input", "."],
        r"train\.tsv:4: not valid UTF-8",
        2,
    ),
    (
        {"train.tsv": TSV.encode("utf-16")},
        [*T, "--input", "."],
        "train.tsv looks like UTF-16: convert",
        None,
    ),
    (
        {"train.tsv": TSV + "c\tz\n"},
        [*T, "--labels", "x,y", "--input", "."],
        r"train\.tsv:4: label 'z' is not one of x, y",
        2,
    ),
    (
        {"train.tsv": TSV.replace("x", "1").replace("y", "nan") + "c\t2\nd\tinf\n"},
        [*T, "--kind", "score", "--input", "."],
        r"train\.tsv:3: the score 'nan' is not a number",
        2,
    ),
    (
        {"train.tsv": TSV, "dev.tsv": "t\tl\n"},
        [*T, "--input", "."],
        r"dev\.tsv holds no example, so the split valid would be empty",
        None,
    ),
    ({"train.tsv": TSV, "dev.tsv": ""}, [*T, "--input", "."], r"dev\.tsv is empty", None),
    ({"train.tsv": "t\tt\tl\na\tb\tx\n"}, [*T, "--input", "."], "columns are called 't'", None),
    (
        {"train.csv": 't,l\na,x\nb,y\n"c,x\nd,y\n'},
        [*T, "--input", "."],
        r"train\.csv:5: unexpected end of data \(the row begins in line 4\)",
        None,
    ),
    (
        {"train.csv": "t,l\na,x\nb,y\nc,x\rd,y\n"},
        [*T, "--input", "."],
        r"train\.csv:4: a carriage return stands alone",
        2,
    ),
    ({"train.csv": 't,l\na,x\n"b"b,y\nc,y\n'}, [*T, "--input", "."], r"train\.csv:3: ',' expec", 2),
    (
        {"train.csv": b't,l\na,x\n\xff,y\n"c\n"c,y\nd,y\n'},
        [*T, "--input", "."],
        r"train\.csv:3: not valid UTF-8",
        2,
    ),
    (
        {"train.jsonl": '[1]\n{"t": "a", "l": 0}\n{"t": "b", "l": 1}\n'},
        [*T, "--input", "."],
        r"train\.jsonl:1: this is not a JSON object",
        2,
    ),
    (
        {"train.jsonl": '{"t": "a", "l": 0}\n{"t": "b",\n{"t": "b", "l": 1}\n'},
        [*T, "--input", "."],
        r"train\.jsonl:2: not valid JSON",
        2,
    ),
    (
        {"train.jsonl": '{"t": "a", "l": 0}\n{"t": "b", "l": NaN}\n{"t": "c", "l": 1}\n'},
        [*T, "--input", "."],
        r"train\.jsonl:2: the label is empty",
        2,
    ),
    (
        {"train.tsv": TSV.replace("x", "1").replace("y", "1e39") + "c\t2\nd\t3e38\n"},
        [*T, "--kind", "score", "--input", "."],
        r"train\.tsv:3: the score '1e39' is not a number of at most 3\.4e38",
        3,
    ),
    (
        {"train.jsonl": '{"t": "a", "l": 0}\n{"t": "b", "l": 1}\n{"t": "b"}\nnull\n'},
        [*T, "--input", "."],
        r"train\.jsonl:3: there is no 'l'",
        2,
    ),
    (
        {"train.jsonl": '{"t": "a", "l": 0}\n{"t": "b", "l": 1}\n{"t": "\\ud83d", "l": 1}\n'},
        [*T, "--input", "."],
        r"train\.jsonl:3: column 't' holds half of a surrogate pair",
        2,
    ),
    (
        {"train.jsonl": '{"t": "a", "l": 0}\n{"t": "b", "l": 1}\n{"t": ["a", "b"], "l": 1}\n'},
        [*T, "--input", "."],
        r"train\.jsonl:3: column 't' is .*, which is neither text nor a number",
        2,
    ),
    ({"train.jsonl": "no JSON\n"}, [*T, "--input", "."], r"train\.jsonl:1: not valid JSON", None),
    (
        {"train.json": '{"t": {"0": "a", "1": "b"}, "l": {"0": 1, "1": 2, "2": 1}}'},
        [*T, "--input", "."],
        r"train\.json:3: there is no 't'",
        2,
    ),
    (
        {"train.json": "[1, 2]"},
        [*T, "--input", "."],
        r"train\.json:1: this is not a JSON object",
        None,
    ),
    ({"train.json": '[{"t": "a", "l": 0},'}, [*T, "--input", "."], "train.json:1: not valid", None),
    ({"train.parquet": b"PAR1 not really"}, [*T, "--input", "."], "is not a parquet file", None),
    ({"train.tsv.gz": TSV}, [*T, "--input", "."], r"\.tsv\.gz is damaged, or not a \.gz", None),
    ({"train.tsv": TSV}, [*T, "--train"], "argument --train: expected at least one argument", None),
    ({"d/train.tsv": TSV}, [*T, "--train", "d"], "d is a directory; give a file", None),
    ({"a.tsv": TSV}, [*T, "--valid", "a.tsv"], "give --input FILE|DIR, or --train FILE", None),
    (
        {"train-0-of-3.tsv": TSV, "train-2-of-3.tsv": TSV},
        [*T, "--input", "."],
        "holds 2 of the 3 files of train",
        None,
    ),
    ({"train.tsv": TSV}, [*T, "--labels", "x,y,x", "--input", "."], "give each class once", None),
    (
        {"train.tsv": TSV + "c\tz\n"},
        [*T, "--labels", 'x,y,"p, q"', "--input", "."],
        r"train\.tsv:4: label 'z' is not one of x, y, p, q",
        2,
    ),
    ({"train.tsv": TSV}, [*T, "--labels", "x,y,", "--input", "."], "x,y,: a name is empty", None),
    (
        {"train.tsv": "t\tl\n" + tsv([["a", f"0.{i}"] for i in range(1, 62)])},
        [*T, "--input", "."],
        "61 of the 61 rows have a label that no other row has; .*: give --kind score",
        None,
    ),
    (
        {"a.tsv": "t\tl\n" + tsv([["a", f"x{i}"] for i in range(60)])},
        [*T, "--input", "a.tsv"],
        "60 of the 60 rows have a label that no other row has; name a column of classes",
        None,
    ),
    (
        {"train.tsv": SST2 + "c\t2\n"},
        ["glue/sst2", "--input", "."],
        r"train\.tsv:4: label '2' is not one of negative, positive",
        2,
    ),
    ({"train.tsv": SST2 + "c\t-1\n"}, ["glue/sst2", "--input", "."], r"train\.tsv:4: label '-1", 2),
    (
        {"train.tsv": SST2.replace("sentence", "text")},
        ["glue/sst2", "--input", "."],
        "has no column 'sentence'; it has 'text', 'label'",
        None,
    ),
    ({"train.tsv": SST2}, ["glue/sst2", "--input", "train.tsv"], "too few to be split", None),
    ({"train.tsv": SST2}, ["glue/mnli", "--train", "train.tsv"], "has no column 'sentence1'", None),
    (
        {"msr_paraphrase_train.txt": "Quality\n"},
        ["glue/mrpc", "--input", "."],
        "lacks dev_ids.tsv",
        None,
    ),
    ({"a.fa": FASTA + ">j x\nAC1T\n"}, ["dna", "--input", "a.fa"], r"a\.fa:82: '1' is not a l", 40),
    (
        {"a.fa": FASTA + ">j x\nACQT\n"},
        ["dna", "--input", "a.fa"],
        r"a\.fa:81: letters other than ACGTNRYSWKMBDHV: 'Q'",
        40,
    ),
    ({"a.fa": FASTA + ">j\nACGT\n"}, ["dna", "--input", "a.fa"], r"a\.fa:81: the label is em", 40),
    ({"a.fa": FASTA + ">j x\n"}, ["dna", "--input", "a.fa"], r"a\.fa:81: a record without", 40),
    (
        {"a.fa": FASTA + ">i3 x\nACGT\n"},
        ["dna", "--input", "a.fa"],
        r"a\.fa:81: an earlier row has the id 'i3' too",
        40,
    ),
    ({"a.fa": "ACGT\n" + FASTA}, ["dna", "--input", "a.fa"], r"a\.fa:1: text before the", None),
    ({"a.csv": CSV + "AC-T,0\n"}, ["dna", "--input", "a.csv"], r"a\.csv:42: letters .*: '-'", 40),
    ({"a.csv": CSV + ",0\n"}, ["dna", "--input", "a.csv"], r"a\.csv:42: the sequence is empty", 40),
    ({"a.csv": CSV.replace("label", "x")}, ["dna", "--input", "a.csv"], "give --label COL", None),
    (
        {"a.csv": CSV},
        ["dna", "--sequence", "sqeuence", "--input", "a.csv"],
        "no column 'sqeuence'.*did you mean 'sequence'",
        None,
    ),
    (
        {"a.csv": CSV.replace(",0", ",low")},
        ["protein/stability", "--input", "a.csv"],
        r"a\.csv:2: the score 'low' is not a number",
        20,
    ),
    ({"a.jsonl": JSONL + "[]\n"}, ["protein", "--input", "a.jsonl"], r"a\.jsonl:41: this is", 40),
    (
        {"x.fa": FASTA, "y.fa": FASTA},
        ["protein", "--input", ".", "--valid", "x.fa"],
        "holds one FASTA file per class; it cannot be combined with --valid",
        None,
    ),
    (
        {"a.fa": FASTA.replace(" x", " x test").replace(" y", " y test")},
        ["dna", "--input", "a.fa"],
        "no row is for training",
        None,
    ),
    (
        {"maestro.csv": "canonical_composer,split,midi_filename\nBach,all,a.mid\n"},
        ["music/maestro", "--input", "."],
        r"maestro\.csv:2: column 'split' is 'all'",
        None,
    ),
    (
        {"maestro.csv": "composer,split,midi_filename\n"},
        ["music/maestro", "--input", "."],
        "has no column 'canonical_composer'; .*did you mean 'composer'",
        None,
    ),
    (
        {"maestro.json": '{"split": {"0": "train"}}'},
        ["music/maestro", "--input", "."],
        "has no column 'canonical_composer'",
        None,
    ),
    ({"a.mid": b"MThd\xff"}, ["music/maestro", "--input", "a.mid"], "is not a table", None),
    ({"train.tsv": TSV}, ["glue/cola", "--input", "."], "has no column 'sentence'; it", None),
    ({"maestro.csv": "x\n"}, ["music/maestro", "--train", "maestro.csv"], "give --input", None),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_wrong_is_named(
    case: tuple[dict[str, str | bytes], list[str], str, int | None],
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is one line that names file and line, and nothing is written. --skip-bad goes on
    without those rows."""
    files, arguments, phrase, left = case
    raw = write(tmp_path / "raw", files)
    if "parquet" in str(files):
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(raw)
    with pytest.raises(BadInput, match=phrase) as caught:
        make(*arguments)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["raw"]
    capsys.readouterr()
    if left is None:
        with pytest.raises(BadInput):
            make(*arguments, "--skip-bad")
        assert os.listdir(tmp_path) == ["raw"]
        return
    store = make(*arguments, "--skip-bad")
    assert sum(store.split(split).rows for split in store.splits) == left
    skipped = store.meta["origin"]["skipped_rows"]
    err = capsys.readouterr().err
    assert skipped > 0
    assert f"{skipped} bad row{'s were' if skipped > 1 else ' was'} left out" in err


def test_a_damaged_parquet_file(make: Make, tmp_path: Path) -> None:
    place = tmp_path / "raw/train.parquet"
    in_form("parquet", [{"t": f"{i} {i * i}", "l": i % 2} for i in range(5000)], place)
    data = bytearray(place.read_bytes())
    data[100:4000] = bytes(3900)
    place.write_bytes(data)
    with pytest.raises(BadInput, match=r"train\.parquet is damaged: ") as caught:
        make(*T, "--input", place.parent)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["raw"]


def test_a_parquet_file_whose_text_is_not_utf_8(make: Make, tmp_path: Path) -> None:
    """Parquet's writer does not check texts. If the footer is not UTF-8, the whole file is
    refused."""
    place = tmp_path / "raw/train.parquet"
    place.parent.mkdir()
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pa.array([b"good", b"\xb3 bad", b"good", b"good"]).view(pa.string())
    parquet.write_table(pa.table({"t": texts, "l": [0, 1, 0, 1], "other": [1] * 4}), place)
    with pytest.raises(BadInput, match=r"train\.parquet:2: not valid UTF-8"):
        make(*T, "--input", place.parent)
    assert os.listdir(tmp_path) == ["raw"]
    store = make(*T, "--input", place.parent, "--skip-bad")
    assert sum(store.split(split).rows for split in store.splits) == 3
    place.write_bytes(place.read_bytes().replace(b"other", b"\xb3ther"))
    with pytest.raises(BadInput, match=r"train\.parquet is (damaged|not a parquet file)"):
        make(*T, "--input", place.parent, name="other")


def test_overwrite_spares_other_directories(make: Make, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.tsv": TSV})
    with pytest.raises(BadInput, match="was not written by this command"):
        make(*T, "--input", raw, "--overwrite", name="raw")
    assert (raw / "train.tsv").read_text() == TSV
    make(*T, "--input", raw)
    with pytest.raises(BadInput, match="store exists"):
        make(*T, "--input", raw)
    write(raw, {"train.tsv": TSV + "c\tx\n"})
    assert make(*T, "--input", raw, "--overwrite").split("train").rows == 3
    write(raw, {"train.tsv": TSV + "c\n"})
    with pytest.raises(BadInput, match="1 column"):
        make(*T, "--input", raw, "--overwrite")
    assert open_store(tmp_path / "store").split("train").rows == 3


# ------------------------------------------------------------------------------ end to end

LIVELY = ["optim.lr=5e-3", "batch.rows=16", "train.epochs=2", "optim.warmup=0.1"]


def learn(forks: Forks, store: Path, run: Path, *overrides: str) -> dict[str, Any]:
    """Train a tiny classifier and return its scores by split."""
    good(forks.run(*training(CLASSIFY, store, run, *LIVELY, *overrides)))
    kept_as_scored(run)
    return dict(read_json(run / "result.json")["metrics"])


def evaluated(forks: Forks, run: Path, *overrides: str) -> str:
    return good(forks.run("evaluate.py", run, *overrides, "system.threads=1")).out


def predicted(forks: Forks, run: Path, file: Path) -> list[list[str]]:
    """(label, probability) of each row of a raw file."""
    lines = evaluated(forks, run, f"input={file}").split("\n")[1:-1]
    return [line.split("\t")[:2] for line in lines]


def of_split(forks: Forks, run: Path, store: Path, split: str) -> list[list[str]]:
    """(label, probability) of each row of a store."""
    out = run / f"{split}.tsv"
    evaluated(forks, run, f"data={store}", f"split={split}", f"predictions={out}")
    return [line.split("\t")[:2] for line in out.read_text().split("\n")[1:-1]]


def test_mnli_end_to_end(forks: Forks, make: Make, tmp_path: Path) -> None:
    """Both validation sets are scored, and the unlabelled test sets are not. Raw files are read by
    the names of their columns."""
    files = {
        "train": (40, 1),
        "dev_matched": (9, 5),
        "dev_mismatched": (11, 5),
        "test_matched": (6, 0),
        "test_mismatched": (7, 0),
    }
    raw = write(
        tmp_path / "r",
        {f"{name}.tsv": mnli_file(rows, votes, name) for name, (rows, votes) in files.items()},
    )
    make("glue/mnli", "--input", raw)
    store, run = tmp_path / "store", tmp_path / "run"
    scores = learn(forks, store, run, "batch.max_tokens=60")
    assert list(scores) == ["valid", "valid_mismatched"]
    for split, file in (
        ("valid", "dev_matched"),
        ("valid_mismatched", "dev_mismatched"),
        ("test_mismatched", "test_mismatched"),
    ):
        if not split.startswith("test"):
            answers = of_split(forks, run, store, split)
            right = np.mean([a[0] == MNLI[i % 4] for i, a in enumerate(answers)])
            assert scores[split]["accuracy"] == pytest.approx(right)
            assert predicted(forks, run, raw / f"{file}.tsv") == answers
        assert len(predicted(forks, run, raw / f"{file}.tsv")) == files[file][0]


def test_cola_end_to_end(forks: Forks, make: Make, tmp_path: Path) -> None:
    """The training file has no header, and the test file has one."""
    rows = [
        ["gj04", str(i % 2), "*"[: i % 2], f"words {['good', 'bad'][i % 2]} {i}"] for i in range(60)
    ]
    raw = write(
        tmp_path / "CoLA",
        {
            "train.tsv": tsv(rows[:40]),
            "dev.tsv": tsv(rows[40:]),
            "test.tsv": "index\tsentence\n"
            + tsv([[str(i), r[3]] for i, r in enumerate(rows[40:])]),
        },
    )
    store = make("glue/cola", "--input", raw)
    assert store.meta["origin"]["columns"] == {
        "text": "sentence",
        "text_b": None,
        "label": "2",
        "task": "glue/cola",
        "options": {},
    }
    run = tmp_path / "run"
    scores = learn(forks, store.path, run)
    assert set(scores["valid"]) == {"loss", "accuracy", "f1", "mcc"}
    assert predicted(forks, run, raw / "test.tsv") == of_split(forks, run, store.path, "valid")


def test_sequences_end_to_end(forks: Forks, make: Make, tmp_path: Path) -> None:
    """Raw files of one column, with or without a header, in lower case, are cut as in training.

    Rows whose class is not in training count as wrong in all scores.
    """
    made = letters(8, 100, 24, "ACDEFGHIKLMNPQRSTVWY")
    train = "".join(f">i{i} {'xy'[i % 2]}\n{s}\n" for i, s in enumerate(made[:60]))
    test = "".join(f">i{i} {'xyz'[i % 3]}\n{s}\n" for i, s in enumerate(made[60:]))
    raw = write(
        tmp_path / "r",
        {
            "train.fasta": train,
            "valid.fasta": train.replace(">i", ">v"),
            "test.fasta": test,
            "plain.tsv": "\n".join(made[60:]).lower(),
            "headed.tsv": "id\tsequence\n"
            + "".join(f"{i}\t{s}\n" for i, s in enumerate(made[60:])),
        },
    )
    store = make("protein/localization", "--input", raw, "--longest", 11)
    assert store.labels == ["x", "y"]
    assert store.meta["origin"]["unseen"] == {"test": {"z": 13}}
    truth = labels(store, "test")
    assert Counter(truth) == {"x": 14, "y": 13, -2: 13}
    run = tmp_path / "run"
    scores = learn(forks, store.path, run)["test"]
    answers = of_split(forks, run, store.path, "test")
    for name in ("plain", "headed"):
        assert predicted(forks, run, raw / f"{name}.tsv") == answers
    given = [label for label, _ in answers]
    pairs = Counter(zip(given, truth, strict=True))
    right = pairs["x", "x"] + pairs["y", "y"]
    assert scores["accuracy"] == pytest.approx(right / 40)
    hits, claimed = pairs["y", "y"], given.count("y")
    assert scores["f1"] == pytest.approx(2 * hits / (claimed + truth.count("y")))
    # the Matthews correlation of several classes (Gorodkin 2004), from the counts
    classes: list[Any] = ["x", "y", -2]
    a = np.array([given.count(c) for c in classes], float)
    b = np.array([truth.count(c) for c in classes], float)
    spread = (40**2 - a @ a) * (40**2 - b @ b)
    expected = (right * 40 - a @ b) / np.sqrt(spread) if spread else 0
    assert scores["mcc"] == pytest.approx(expected)
    shown = evaluated(forks, run, f"data={store.path}", "split=test")
    assert f"test accuracy {right / 40:.4f}" in shown


def test_unseen_classes_are_reported(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are reported when the store is made, in its origin, and by `preprocess.py stats`."""
    raw = write(tmp_path / "r", {"train.tsv": TSV, "dev.tsv": TSV + "c\tz\nd\tz\ne\tw\n"})
    store = make(*T, "--input", raw)
    assert store.labels == ["x", "y"]
    assert labels(store, "valid") == ["x", "y", -2, -2, -2]
    assert store.meta["origin"]["unseen"] == {"valid": {"w": 1, "z": 2}}
    err = capsys.readouterr().err
    assert "warning: valid: rows whose class is not in training count as wrong: 'w' 1, 'z' 2" in err
    assert stats.describe_store(store)["splits"]["valid"]["labels"] == {
        "x": 1,
        "y": 1,
        "(not in training)": 3,
    }


def test_empty_texts_are_reported(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write(tmp_path / "r", {"train.tsv": f"{TSV} \tx\n\tx\n"})
    assert make(*T, "--input", raw).split("train").rows == 4
    line = f"warning: no text in 2 of the 4 rows; the first is {raw / 'train.tsv'}:4\n"
    assert line in capsys.readouterr().err


def test_music_end_to_end(forks: Forks, make: Make, tmp_path: Path) -> None:
    """Metrics count pieces, and the segments of a piece vote. A raw file may hold pitches."""
    files: dict[str, str | bytes] = {}
    rows = []
    for i in range(60):
        draw = np.random.default_rng(i)
        notes = draw.integers(40 + 3 * (i % 2), 80 + 3 * (i % 2), 10 * (1 + i % 5)).tolist()
        files[f"{i}.mid"] = midi(notes)
        split = "train" if i < 36 else "validation" if i < 48 else "test"
        rows.append(
            {"canonical_composer": "AB"[i % 2], "split": split, "midi_filename": f"{i}.mid"}
        )
    raw = write(tmp_path / "r", files)
    in_form("csv", rows, raw / "maestro.csv")
    store = make("music/maestro", "--input", raw, "--segment", 10)
    run = tmp_path / "run"
    scores = learn(forks, store.path, run, "batch.max_tokens=12")
    for split in ("valid", "test"):
        columns = store.split(split).columns
        answers = of_split(forks, run, store.path, split)
        votes: dict[int, list[tuple[str, float]]] = {}
        truth: dict[int, str] = {}
        for row, (label, chance) in enumerate(answers):
            group = int(columns["group"][row])
            votes.setdefault(group, []).append((label, float(chance)))
            truth[group] = labels(store, split)[row]
        right = 0
        for group, given in votes.items():
            count = {c: sum(label == c for label, _ in given) for c in "AB"}
            chances = {c: sum(p if label == c else 1 - p for label, p in given) for c in "AB"}
            right += max("AB", key=lambda c: (count[c], chances[c])) == truth[group]
        assert len(votes) == 12
        assert len(answers) > 30
        assert scores[split]["accuracy"] == pytest.approx(right / 12)
    file = tmp_path / "pitches.tsv"
    for head in ([], ["pitches"]):
        file.write_text("\n".join([*head, *texts(store, "test")]))
        assert predicted(forks, run, file) == of_split(forks, run, store.path, "test")


def test_scores_end_to_end(forks: Forks, make: Make, tmp_path: Path) -> None:
    """Hugging Face's STS-B has -1 in place of hidden test scores, which are not scored."""
    rows = [{"sentence1": f"a {i}", "sentence2": f"b {i % 7}", "label": i % 6} for i in range(40)]
    raw = tmp_path / "r"
    in_form("jsonl", rows, raw / "train.jsonl")
    in_form("jsonl", rows[:10], raw / "validation.jsonl")
    in_form("jsonl", [{**row, "label": -1.0} for row in rows[:5]], raw / "test.jsonl")
    store = make("glue/stsb", "--input", raw)
    run = tmp_path / "run"
    good(forks.run(*training(REGRESS, store.path, run, *LIVELY)))
    assert list(read_json(run / "result.json")["metrics"]) == ["valid"]
    file = tmp_path / "rows.tsv"
    file.write_text("\n".join(["sentence1\tsentence2", *(f"a {i}\tb {i % 7}" for i in range(10))]))
    lines = evaluated(forks, run, f"input={file}").split("\n")[1:-1]
    out = tmp_path / "p.tsv"
    evaluated(forks, run, f"data={store.path}", "split=valid", f"predictions={out}")
    assert [line.split("\t")[0] for line in lines] == [
        line.split("\t")[0] for line in out.read_text().split("\n")[1:-1]
    ]


@pytest.mark.parametrize("form", ["tsv", "csv", "jsonl", "fasta"])
def test_rows_are_not_held_in_memory(form: str, make: Make, tmp_path: Path) -> None:
    """A row costs a few bytes of memory, not the 400 of its text. The last row is bad, so that
    reading stops there. Garbage that Python has not yet collected adds up to 0.2 MB to a peak: the
    second file is long enough that this does not count."""
    peaks = []
    text = "ACGT" * 100
    for rows in (1000, 16000):
        file = tmp_path / f"{rows}.{form}"
        with file.open("w") as out:
            if form == "jsonl":
                out.writelines(f'{{"t": "{text}", "l": {i % 2}}}\n' for i in range(rows))
            elif form == "fasta":
                out.writelines(f">i{i} {'xy'[i % 2]}\n{text}\n" for i in range(rows))
            else:
                mark = {"tsv": "\t", "csv": ","}[form]
                out.write(f"t{mark}l\n")
                out.writelines(f"{i} {text}{mark}{i % 2}\n" for i in range(rows))
            out.write(">last x\n1" if form == "fasta" else "bad")
        tracemalloc.start()
        with pytest.raises(BadInput, match=f"{rows}\\.{form}:"):
            make(*(["dna"] if form == "fasta" else T), "--input", file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    per_row = 250 if form == "fasta" else 50  # a hash of the name, and 8 bytes for the text
    assert peaks[1] - peaks[0] < 15000 * per_row

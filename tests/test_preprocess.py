"""`preprocess.py` as a user runs it: each command's result, its bounds, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput, Failure, Interrupted
from xformer.data.store import Ragged, Store, open_store
from xformer.preprocess import cli
from xformer.preprocess.bad import BadRows
from xformer.preprocess.corpora import documents, pydocs, synthetic
from xformer.preprocess.corpora.documents import TextOptions, read_documents
from xformer.preprocess.tasks.tables import Form, RowTable
from xformer.preprocess.words import CachedEncoder

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared/data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data in ../shared is not there")
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Words, words, words: they repeat, don't they?",
    "In 1900 nobody counted 37,000 tokens a second.",
    "A row never crosses the end of its document.",
]


def run(*arguments: object, status: int = 0, folder: Path = ROOT) -> str:
    """Run the command, and return what it prints (on standard output, or as its error)."""
    command = [sys.executable, str(ROOT / "preprocess.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    if status == 0:
        return done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Run the command within this process, for tests of messages, which need no new process."""
    monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cli.main()


def rows(store: Store, split: str, column: str = "tokens") -> list[list[int]]:
    values = store.split(split).columns[column]
    assert isinstance(values, Ragged)
    return [values[i].tolist() for i in range(len(values))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a WordPiece, a BPE and an ACGT tokenizer, a store of the corpus, and
    small labelled files.
    """
    folder = tmp_path_factory.mktemp("base")
    (folder / "corpus.txt").write_text("\n\n".join(SENTENCES * 5) + "\n", encoding="utf-8")
    corpus = folder / "corpus.txt"
    for kind, size in (("wordpiece", 150), ("bpe", 330)):
        out = folder / kind
        run("tokenizer", "--kind", kind, "--input", corpus, "--vocab-size", size, "--output", out)
    run("tokenizer", "--kind", "symbols", "--alphabet", "ACGT", "--output", folder / "acgt")
    run(
        "text", "--input", corpus, "--tokenizer", folder / "wordpiece", "--output", folder / "store"
    )
    lines = [f"{SENTENCES[i % 4]} {i}\t{'ab'[i % 2]}\t{i / 10}" for i in range(200)]
    (folder / "t.tsv").write_text("text\tlabel\tscore\n" + "\n".join(lines) + "\n")
    (folder / "cut.csv").write_text("a good film,yes\nbad, very bad,no\n")
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text("\n \n\n")
    (folder / "packed.tar.gz").write_bytes(b"tar")
    os.mkfifo(folder / "pipe")
    (folder / "bad.txt").write_bytes(b"fine\nalso fine\nnot \xff fine\n")
    return folder


# ------------------------------------------------------------------------------ tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "symbols"])
def test_tokenizer(base, tmp_path, kind):
    size = 60 if kind == "unigram" else 330
    arguments = ["tokenizer", "--kind", kind, "--input", base / "corpus.txt", "--vocab-size", size]
    said = run(*arguments, "--output", tmp_path / "a")
    run(*arguments, "--output", tmp_path / "b")
    tokenizer = tokenizers.load_tokenizer(tmp_path / "a")
    assert f"{len(tokenizer):,} pieces" in said
    assert len(tokenizer) <= size
    assert tokenizer.fingerprint == tokenizers.load_tokenizer(tmp_path / "b").fingerprint
    ids = tokenizer.encode_batch([SENTENCES[0]])[0]
    assert len(ids) > 5
    assert tokenizer.special["unk"] not in ids
    cased = tokenizer.decode(ids)
    assert ("T" in cased) == (kind != "wordpiece")


def test_tokenizer_options(base, tmp_path):
    arguments = ["--input", base / "corpus.txt", "--vocab-size", 150, "--cased"]
    run("tokenizer", "--kind", "wordpiece", *arguments, "--output", tmp_path / "t")
    tokenizer = tokenizers.load_tokenizer(tmp_path / "t")
    assert tokenizer.special["unk"] not in tokenizer.encode_batch(["The A In"])[0]
    assert "T" in tokenizer.pieces
    assert tokenizers.load_tokenizer(base / "acgt").pieces[5:] == list("ACGT")


# ------------------------------------------------------------------------------ text


def expected(
    content: str, options: TextOptions, most: int, tokenizer: tokenizers.Tokenizer
) -> list[list[int]]:
    """The rows of a text, computed in the simplest way."""
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    lines = [line for line in lines if not (options.skip and options.skip.search(line))]
    documents = lines
    if not options.by_line:
        documents, held = [], []
        for line in [*lines, ""]:
            if line.strip():
                held.append(line)
            elif held:
                documents.append("\n".join(held))
                held = []
    pieces = []
    for ids in tokenizer.encode_batch(documents):
        pieces += [ids[i : i + most].tolist() for i in range(0, len(ids), most)]
    return pieces


CONTENT = (
    "One short document.\n\nA second one,\nof two lines\r\n and three.\n \t\n\n\n[1] a footnote\n"
    "\n[2] a footnote\nwith a document behind it, much longer than one row can be, I hope.\n\n last"
)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize("options", [[], ["--lines"], ["--skip-lines", r"^\[\d+\]"]])
def test_text_falls_into_documents_and_rows(base, tmp_path, kind, options):
    for name in ("t.txt", "v.txt"):
        (tmp_path / name).write_bytes(CONTENT.encode("utf-8-sig"))
    arguments = ["--tokenizer", base / kind, "--output", tmp_path / "s", "--max-tokens", 7]
    said = run(
        "text",
        "--input",
        tmp_path / "t.txt",
        "--valid",
        tmp_path / "v.txt",
        *arguments,
        *options,
        "--workers",
        1,
    )
    store = open_store(tmp_path / "s")
    skip = re.compile(options[1]) if options[:1] == ["--skip-lines"] else None
    wanted = expected(CONTENT, TextOptions("--lines" in options, skip), 7, store.tokenizer())
    assert rows(store, "train") == rows(store, "valid") == wanted
    assert max(map(len, wanted)) == 7
    assert min(map(len, wanted)) < 7
    assert f"train {len(wanted)} rows, {sum(map(len, wanted))} tokens" in said
    left = [line for line in CONTENT.split("\n") if not (skip and skip.search(line))]
    words = sum(len(line.split()) for line in left)
    assert store.meta["splits"]["train"]["words"] == store.split("valid").words == words
    assert f" tokens, {words} words\n" in run("stats", tmp_path / "s")
    origin = store.meta["origin"]
    assert origin["command"][:2] == ["preprocess.py", "text"]
    assert [source["file"] for source in origin["sources"]] == ["t.txt", "v.txt"]
    assert origin["sources"][0]["bytes"] == len(CONTENT.encode("utf-8-sig"))


def test_several_files_are_several_documents(base, tmp_path):
    for name, content in (("a", "one"), ("b", "two"), ("c", "three\n")):
        (tmp_path / name).write_text(content)
    run(
        "text",
        "--input",
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c",
        "--tokenizer",
        base / "bpe",
        "--output",
        tmp_path / "s",
    )
    store = open_store(tmp_path / "s")
    wanted = [ids.tolist() for ids in store.tokenizer().encode_batch(["one", "two", "three"])]
    assert rows(store, "train") == wanted


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_segments_of_a_document_have_the_ids_of_the_whole(base, tmp_path, monkeypatch, kind):
    """The buffers are tiny, so every document and line is read, cut and encoded in pieces."""
    if kind == "unigram":
        tokenizer = vocabularies.learn("unigram", SENTENCES * 5, 60)
    else:
        tokenizer = tokenizers.load_tokenizer(base / kind)
    generator = np.random.default_rng(0)
    words = ["a", "the", "Über", "naïve", "don't", "x,", "12", "(so)", "end.", "éé", "中文"]
    gaps = [" "] * 12 + ["\n", "\r\n", "\n\n", "  ", "\n  ", "\t", " \n \n"]
    parts = [str(generator.choice(words)) + str(generator.choice(gaps)) for _ in range(3000)]
    content = "".join(parts)
    (tmp_path / "t.txt").write_bytes(content.encode())
    for by_line in (False, True):
        options = TextOptions(by_line)
        wanted = expected(content, options, 10**9, tokenizer)
        for read, segment in ((7, 48), (64, 48), (1000, 100)):
            monkeypatch.setattr(documents, "READ", read)
            monkeypatch.setattr(documents, "SEGMENT", segment)
            seen: list[int] = []
            segments = read_documents([tmp_path / "t.txt"], options, seen.append)
            encoder, per_document, new = CachedEncoder(tokenizer), [], True
            for piece, ends in segments:
                assert len(piece) <= 5 * segment
                values = encoder.encode([piece])[0].tolist()
                if new:
                    per_document.append(values)
                else:
                    per_document[-1] += values
                new = ends
            assert [ids for ids in per_document if ids] == wanted
            assert sum(seen) == len(content.encode())


def test_memory_does_not_grow_with_one_huge_line(base, tmp_path):
    line = (" ".join(SENTENCES) + " ") * 40_000  # 7 MB
    (tmp_path / "t.txt").write_text(line)
    script = (
        "import resource, sys; from preprocess.cli import main; main();"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for name in (base / "corpus.txt", tmp_path / "t.txt"):
        arguments = [
            "text",
            "--input",
            name,
            "--tokenizer",
            base / "wordpiece",
            "--output",
            tmp_path / name.stem,
        ]
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 100  # MB; the words of 7 MB of text as a list take 120
    split = open_store(tmp_path / "t").split("train")
    once = len(tokenizers.load_tokenizer(base / "wordpiece").encode_batch([" ".join(SENTENCES)])[0])
    assert split.tokens == 40_000 * once
    assert split.rows == -(-split.tokens // 510)


# ------------------------------------------------------------------------------ task tsv


def test_task_from_one_file_is_split_without_duplicates(base, tmp_path):
    lines = (base / "t.tsv").read_text().splitlines()
    (tmp_path / "t.tsv").write_text("\n".join([*lines, *lines[1:101]]) + "\n")
    arguments = [
        "task",
        "tsv",
        "--input",
        tmp_path / "t.tsv",
        "--tokenizer",
        base / "bpe",
        "--text",
        "text",
        "--label",
        "label",
        "--output",
    ]
    run(*arguments, tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert (store.kind, store.metric, store.labels) == ("class", "accuracy", ["a", "b"])
    texts = {split: [tuple(row) for row in rows(store, split)] for split in store.splits}
    assert {split: len(its_rows) for split, its_rows in texts.items()} == pytest.approx(
        {"train": 270, "valid": 15, "test": 15}, abs=2
    )
    sets = [set(texts[split]) for split in texts]
    assert not sets[0] & sets[1] | sets[0] & sets[2] | sets[1] & sets[2]
    assert Counter(row for split in texts.values() for row in split) == Counter(
        tuple(ids.tolist())
        for line in [*lines[1:], *lines[1:101]]
        for ids in store.tokenizer().encode_batch([line.split("\t")[0]])
    )
    for split in store.splits:  # every row keeps its own label
        labels = store.split(split).columns["label"]
        assert labels.dtype == np.int64
        for row, label in zip(rows(store, split), labels, strict=True):
            number = int(store.tokenizer().decode(row).split()[-1])
            assert label == number % 2
    run(*arguments, tmp_path / "again")
    run(*arguments, tmp_path / "other", "--seed", 1)
    again, other = open_store(tmp_path / "again"), open_store(tmp_path / "other")
    assert rows(again, "test") == rows(store, "test") != rows(other, "test")
    assert other.meta["origin"]["seed"] == 1


def test_task_from_a_directory(base, tmp_path):
    """The files have a byte-order mark, raw quotes and text pairs; the test file has no labels;
    valid is called dev.
    """
    raw = tmp_path / "raw"
    raw.mkdir()
    head = "Quality\tone\ttwo"
    train = '1\tHe said "yes\tno quote" there\n0\tb\tc\n'
    (raw / "train.tsv").write_bytes(f"\ufeff{head}\r\n{train}".replace("\n", "\r\n").encode())
    (raw / "dev.tsv").write_text(f"{head}\n0\tx\ty\n")
    (raw / "test.tsv").write_text("one\ttwo\nu\tv\nw\t\n")
    (raw / "dev_ids.tsv").write_text("something else\n")
    run(
        "task",
        "tsv",
        "--input",
        raw,
        "--tokenizer",
        base / "bpe",
        "--text",
        "one",
        "--text-b",
        "two",
        "--label",
        "Quality",
        "--metric",
        "f1",
        "--output",
        tmp_path / "s",
    )
    store = open_store(tmp_path / "s")
    assert store.splits == ["train", "valid", "test"]
    assert (store.metric, store.labels) == ("f1", ["0", "1"])
    decode = store.tokenizer().decode
    pairs = zip(rows(store, "train"), rows(store, "train", "tokens_b"), strict=True)
    assert [(decode(one), decode(two)) for one, two in pairs] == [
        ('He said "yes', 'no quote" there'),
        ("b", "c"),
    ]
    assert store.split("train").columns["label"].tolist() == [1, 0]
    assert store.split("test").columns["label"].tolist() == [-1, -1]
    columns = store.meta["origin"]["columns"]
    assert {name: columns[name] for name in ("text", "text_b", "label")} == {
        "text": "one",
        "text_b": "two",
        "label": "Quality",
    }
    assert columns["task"] == "tsv"
    assert columns["options"]["metric"] == "f1"


def test_task_with_scores_in_a_quoted_csv(base, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.csv").write_text('5,"a, ""b""\nsecond line",1.5\n6,c,-2\n')
    (raw / "valid.csv").write_text("7,d,3e-1\n")
    (raw / "test.csv").write_text("8,d\n")
    run(
        "task",
        "tsv",
        "--input",
        raw,
        "--tokenizer",
        base / "bpe",
        "--no-header",
        "--text",
        2,
        "--label",
        3,
        "--kind",
        "score",
        "--output",
        tmp_path / "s",
    )
    store = open_store(tmp_path / "s")
    assert (store.kind, store.metric, store.labels) == ("score", "spearman", [])
    assert store.tokenizer().decode(rows(store, "train")[0]) == 'a, "b"\nsecond line'
    assert store.split("train").columns["label"].dtype == np.float32
    assert store.split("train").columns["label"].tolist() == [1.5, -2.0]
    assert np.isnan(store.split("test").columns["label"]).all()


def test_task_options(base, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.txt").write_text("'it''s; quoted';b\nplain;a\n")
    run(
        "task",
        "tsv",
        "--input",
        raw,
        "--tokenizer",
        base / "bpe",
        "--no-header",
        "--text",
        1,
        "--label",
        2,
        "--delimiter",
        "semicolon",
        "--quoting",
        "'",
        "--labels",
        "b,c,a",
        "--metric",
        "mcc",
        "--output",
        tmp_path / "s",
    )
    store = open_store(tmp_path / "s")
    assert store.tokenizer().decode(rows(store, "train")[0]) == "it's; quoted"
    assert store.labels == ["b", "c", "a"]
    assert store.split("train").columns["label"].tolist() == [0, 2]


def test_quotes_that_csv_wrote_between_tabs_are_noted(base, tmp_path, capsys, monkeypatch):
    """A .tsv is read without quotes, as GLUE's files must be. The note is printed once, and only if
    nobody chose."""
    raw = tmp_path / "raw"
    raw.mkdir()
    with (raw / "train.tsv").open("w", newline="") as out:
        writer = csv.writer(out, delimiter="\t")
        writer.writerows([["sentence", "label"], ["plain", "a"], ['he said "yes"', "b"]])
    line = ["task", "tsv", "--input", raw, "--tokenizer", base / "bpe", "--overwrite"]
    line += ["--text", "sentence", "--label", "label", "--output", tmp_path / "s"]
    for more, notes, text in (
        ([], 1, '"hesaid""yes"""'),
        (["--quoting", '"'], 0, 'hesaid"yes"'),
        (["--quoting", "none"], 0, '"hesaid""yes"""'),
    ):
        here(monkeypatch, *line, *more)
        note = "cells in quotes are read with their quotes (from line 3)"
        assert capsys.readouterr().err.count(note) == notes
        store = open_store(tmp_path / "s")
        words = store.tokenizer().decode(rows(store, "train")[1])
        assert "".join(words.split()) == text


# ------------------------------------------------------------------------------ task dna/splice


def test_splice(tmp_path):
    generator = np.random.default_rng(0)
    lines = []
    for i in range(100):
        sequence = "".join(generator.choice(list("ACGTDNRS"), 60))
        lines.append(f"{('EI', 'IE', 'N')[i % 3]},   NAME-{i},     {sequence}")
    (tmp_path / "splice.data").write_text("\n".join(lines) + "\n\n")
    run("task", "dna/splice", "--input", tmp_path, "--output", tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert store.labels == ["EI", "IE", "N"]
    assert store.tokenizer().pieces[5:] == list("ACGTDNRS")
    assert [store.split(split).rows for split in store.splits] == [90, 5, 5]
    assert store.meta["origin"]["columns"]["text"] == "sequence"
    known = {line.split(",")[2].strip(): line.split(",")[0] for line in lines}
    decode = store.tokenizer().decode
    for row, label in zip(rows(store, "test"), store.split("test").columns["label"], strict=True):
        assert known[decode(row)] == store.labels[label]


@real
def test_splice_as_it_is_published(tmp_path):
    run("task", "dna/splice", "--input", SHARED / "dna/uci_splice", "--output", tmp_path / "s")
    store = open_store(tmp_path / "s")
    counts: Counter[str] = Counter()
    sequences = {}
    for split in store.splits:
        counts.update(store.labels[i] for i in store.split(split).columns["label"])
        sequences[split] = {tuple(row) for row in rows(store, split)}
        assert all(len(row) == 60 for row in sequences[split])
        assert store.tokenizer().special["unk"] not in set().union(*sequences[split])
    assert counts == {"EI": 767, "IE": 768, "N": 1655}
    assert not sequences["train"] & (sequences["valid"] | sequences["test"])
    assert not sequences["valid"] & sequences["test"]
    assert abs(store.split("test").rows - 160) < 5


@real
def test_tasks_as_they_are_published(base, tmp_path):
    glue = SHARED / "glue"
    arguments = ["--tokenizer", base / "wordpiece", "--output", tmp_path / "s", "--overwrite"]
    run(
        "task",
        "tsv",
        "--input",
        glue / "MRPC",
        "--text",
        "#1 String",
        "--text-b",
        "#2 String",
        "--label",
        "Quality",
        "--metric",
        "f1",
        *arguments,
    )
    store = open_store(tmp_path / "s")
    assert [store.split(split).rows for split in store.splits] == [3668, 408, 1725]
    assert np.bincount(store.split("train").columns["label"]).tolist() == [1194, 2474]
    run(
        "task",
        "tsv",
        "--input",
        glue / "STS-B",
        "--text",
        "sentence1",
        "--text-b",
        "sentence2",
        "--label",
        "score",
        "--kind",
        "score",
        *arguments,
    )
    store = open_store(tmp_path / "s")
    assert [store.split(split).rows for split in store.splits] == [5749, 1500, 1379]
    scores = store.split("train").columns["label"]
    assert (scores.min(), scores.max()) == (0, 5)


# ------------------------------------------------------------------------------ stats, verify


def test_stats(base, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.tsv").write_text("s\tl\nACGT\tx\nAA\ty\nA\ty\nX\ty\n")
    (raw / "test.tsv").write_text("s\nCC\n")
    run(
        "task",
        "tsv",
        "--input",
        raw,
        "--tokenizer",
        base / "acgt",
        "--text",
        "s",
        "--label",
        "l",
        "--output",
        tmp_path / "s",
    )
    said = run("stats", tmp_path / "s", "--json", tmp_path / "f.json")
    about = json.loads((tmp_path / "f.json").read_text())["splits"]
    train = about["train"]
    assert train["lengths"]["tokens"] == {"mean": 2.0, "min": 1, "median": 1.5, "max": 4}
    assert (train["rows"], train["tokens"], train["distinct_ids"]) == (4, 8, 5)
    assert train["unknown_share"] == 1 / 8
    shares = np.array([4, 1, 1, 1]) / 7  # without [UNK]
    assert train["unigram_entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert train["unigram_perplexity"] == pytest.approx(np.exp(train["unigram_entropy"]))
    assert train["labels"] == {"x": 1, "y": 3}
    # each training count plus one, over 9 pieces, so that C has 2 of 16
    assert about["test"]["cross_entropy_under_train"] == pytest.approx(-np.log(2 / 16))
    assert about["test"]["labels"] == {"x": 0, "y": 0, "(none)": 1}
    assert "4 rows, 8 tokens" in said
    assert "12.500% unknown" in said


def test_verify(base, tmp_path):
    run(
        "text",
        "--input",
        base / "corpus.txt",
        "--tokenizer",
        base / "bpe",
        "--output",
        tmp_path / "s",
    )
    assert run("verify", tmp_path / "s") == "train/tokens.npy: ok\ntrain/tokens.offsets.npy: ok\n"
    file = tmp_path / "s/train/tokens.npy"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    said = run("verify", tmp_path / "s", status=1)
    assert "train/tokens.npy block 0" in said
    assert "offsets" not in said
    file.write_bytes(data[:-1])
    assert "not" in run("verify", tmp_path / "s", status=1)


# ------------------------------------------------------------------------------ pydocs


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pydocs") / "d"
    run("pydocs", "--output", folder)
    return folder


def test_pydocs(documentation, tmp_path):
    task = {}
    for split in ("train", "valid", "test"):
        lines = (documentation / f"task/{split}.tsv").read_text(encoding="utf-8").split("\n")
        assert lines[0] == "passage\tmodule"
        assert lines[-1] == ""
        task[split] = [tuple(line.split("\t")) for line in lines[1:-1]]
    assert len(task["train"]) >= 1500
    assert len(task["valid"]) >= 200
    assert len(task["test"]) >= 300
    classes = Counter(module for _, module in task["train"])
    assert 8 <= len(classes) <= 12
    assert min(classes.values()) >= 60
    assert max(classes.values()) <= 300
    for split in ("valid", "test"):
        assert {module for _, module in task[split]} == set(classes)
    own = re.compile(rf"\b({'|'.join(classes)})\b", re.IGNORECASE)
    for passage, _ in [row for rows_ in task.values() for row in rows_]:
        assert 15 <= len(passage.split()) <= 100
        assert not own.search(passage)

    everything = [passage.lower() for rows_ in task.values() for passage, _ in rows_]
    assert len(set(everything)) == len(everything)
    english = (documentation / "english.txt").read_text(encoding="utf-8")
    valid = (documentation / "english.valid.txt").read_text(encoding="utf-8")
    assert len(english.split()) > 150_000
    assert 0.02 < len(valid.split("\n\n")) / len(english.split("\n\n")) < 0.08
    assert not set(english.split("\n\n")) & set(valid.split("\n\n"))
    assert ">>>" not in english
    plain = " ".join(pydocs._bare_words(english))
    for passage, _ in task["valid"] + task["test"]:
        assert " ".join(pydocs._bare_words(passage)) not in plain


def test_pydocs_word_order(documentation):
    passages = {}
    for split in ("train", "valid", "test"):
        lines = (documentation / f"task/{split}.tsv").read_text(encoding="utf-8").split("\n")
        passages[split] = {" ".join(line.split("\t")[0].split()[:12]) for line in lines[1:-1]}
        lines = (documentation / f"order/{split}.tsv").read_text(encoding="utf-8").split("\n")
        assert (lines[0], lines[-1]) == ("words\torder", "")
        rows = [line.split("\t") for line in lines[1:-1]]
        assert [order for _, order in rows] == ["kept", "swapped"] * (len(rows) // 2)
        assert len(rows) > len(passages[split])  # few passages have too few plain words
        for (kept, _), (other, _) in zip(rows[::2], rows[1::2], strict=True):
            assert kept in passages[split]
            before, after = kept.split(), other.split()
            assert sorted(before) == sorted(after)
            moved = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
            assert len(moved) == 4
            for i, j in (moved[:2], moved[2:]):
                assert j == i + 1
                assert after[i : j + 1] == before[i : j + 1][::-1]
    assert not passages["train"] & passages["test"]


def test_only_plain_neighbours_are_swapped():
    assert pydocs.swapped(["The", "word,", "here", "is", "3", "so.", "Yes", "x"]) == []  # one pair
    words = ["one", "of", "the", "files", "that", "the", "caller", "gave", "is", "read"]
    before = list(words)
    assert pydocs.swapped(words) == pydocs.swapped(words) != []
    assert words == before


def test_pydocs_make_a_task(documentation, base, tmp_path):
    run(
        "task",
        "tsv",
        "--input",
        documentation / "task",
        "--tokenizer",
        base / "bpe",
        "--text",
        "passage",
        "--label",
        "module",
        "--output",
        tmp_path / "s",
    )
    assert open_store(tmp_path / "s").labels == sorted(pydocs.CLASSES)


def test_pydocs_keep_prose_alone():
    docstring = (
        "Return the *mean* of the `data`, as :class:`float` gives it.\n\n"
        "    x = 1; y = 2; z = foo(x, y)\n\n"
        "- This is a point about the\n  value of an ``int`` in it.\n\n"
        "The example is as follows:\n>>> mean([1, 2])\n1.5\n\n"
        "stmt ::= 'the' expr of the thing"
    )
    assert pydocs.prose(docstring) == [
        "Return the mean of the data, as float gives it.",
        "This is a point about the value of an int in it.",
        "The example is as follows:",
    ]


# ------------------------------------------------------------------------------ what is refused

TEXT = ["text", "--tokenizer", "wordpiece", "--output", "out", "--input"]
TSV = [
    "task",
    "tsv",
    "--tokenizer",
    "wordpiece",
    "--output",
    "out",
    "--text",
    "text",
    "--label",
    "label",
    "--input",
]
TOK = ["tokenizer", "--output", "out", "--vocab-size", "300", "--input", "corpus.txt", "--kind"]
NEST = ["synthetic", "nesting", "--output", "out", "--tokens"]

REFUSED = [
    (["txet"], "'txet' is not one of .* did you mean text"),
    ([], "required: COMMAND"),
    (["text", "--inptu", "x", *TEXT[1:], "corpus.txt"], "--inptu; did you mean --input"),
    ([*TEXT, "corpus.txt", "--max-length", "9"], "--max-length; did you mean --max-tokens"),
    ([*TEXT, "corpus.txt", "--text-column=x"], "--text-column=x; did you mean --field"),
    ([*TOK, "wordpeice"], "did you mean wordpiece"),
    ([*TOK, "bpe", "--vocab-size", "many"], "'many' is not a whole number"),
    ([*TOK, "bpe", "--vocab-size", "100"], "--vocab-size 100 is too small"),
    ([*TOK, "bpe", "--input", "blank.txt"], "blank.txt: no text found"),
    ([*TOK, "bpe", "--input", "bad.txt"], "bad.txt:3: not valid UTF-8"),
    ([*TOK, "wordpiece", "--input", "bad.txt"], "bad.txt:3: not valid UTF-8"),
    ([*TOK, "unigram", "--input", "bad.txt"], "bad.txt:3: not valid UTF-8"),
    ([*TOK, "unigram", "--vocab-size", "5000"], r"5000 is too large for this text; .* most \d+$"),
    ([*TOK, "unigram", "--vocab-size", "9"], r"9 is too small for this text; give at least \d+$"),
    ([*TOK, "bpe", "--vocab-size", "1_000_000_000_000"], "must be at most 16777216"),
    ([*TOK, "bpe", "--alphabet", "ab"], "--alphabet goes with --kind symbols"),
    (["tokenizer", "--kind", "bpe", "--output", "out"], "--input is required"),
    (["tokenizer", "--output", "out"], "--alphabet makes one of letters, and --from imports one"),
    (["tokenizer", "--alphabet", "", "--output", "out"], "an alphabet needs at least one letter"),
    ([*TOK, "bpe", "--output", "store", "--overwrite"], "store is a store, so it is not overwr"),
    ([*TEXT, "missing.txt"], "missing.txt does not exist"),
    ([*TEXT, "empty.txt"], "empty.txt is empty"),
    ([*TEXT, "pipe"], "pipe is a device or a pipe, which cannot be read twice"),
    ([*TEXT, "packed.tar.gz"], "packed.tar.gz is packed in a form that is not read; unpack it"),
    ([*TEXT, "wordpiece"], "wordpiece holds no non-empty file with a known extension"),
    ([*TEXT, "blank.txt"], "blank.txt: no text found, so train would be empty"),
    ([*TEXT, "corpus.txt", "--valid", "blank.txt"], "so valid would be empty"),
    ([*TEXT, "bad.txt"], "bad.txt:3: not valid UTF-8"),
    ([*TEXT, "corpus.txt", "--tokenizer", "nowhere"], "the tokenizer nowhere does not exist"),
    ([*TEXT, "corpus.txt", "--output", "store"], "store exists; .*--overwrite"),
    (
        [*TEXT, "corpus.txt", "--output", "bpe", "--overwrite"],
        "bpe was not written by this command",
    ),
    ([*TEXT, "corpus.txt", "--output", "corpus.txt/s"], "corpus.txt is a file"),
    ([*TEXT, "corpus.txt", "--max-tokens", "0"], "must be at least 1"),
    ([*TEXT, "corpus.txt", "--skip-lines", "("], "not a regular expression"),
    (["task", "tsw"], "'tsw' is not one of tsv, glue/cola, .*; did you mean tsv"),
    ([*TSV, "missing"], "missing does not exist"),
    ([*TSV, "empty.txt"], "empty.txt is empty"),
    ([*TSV, "wordpiece"], "holds no training file"),
    ([*TSV, "t.tsv", "--text", "txt"], "no column 'txt'; it has 'text', 'label', 'score'; did you"),
    ([*TSV, "t.tsv", "--no-header"], "a column is a number from 1, not 'text'"),
    (
        [*TSV, "t.tsv", "--no-header", "--text", "9", "--label", "1"],
        "3 columns; there is no column 9",
    ),
    (
        [*TSV, "cut.csv", "--no-header", "--text", "1", "--label", "2"],
        "cut.csv:2: 3 columns instead of 2; see --quoting",
    ),
    ([*TSV, "t.tsv", "--metric", "pearson"], "--metric pearson does not fit --kind class"),
    ([*TSV, "t.tsv", "--labels", "a,c"], r"t.tsv:3: label 'b' is not one of a, c"),
    ([*TSV, "t.tsv", "--delimiter", "::"], "'::' is not one character"),
    ([*TSV, "t.tsv", "--label", "text", "--kind", "score"], "must be different columns"),
    (
        [*TSV, "t.tsv", "--text", "score", "--label", "text", "--kind", "score"],
        "t.tsv:2: the score 'The quick",
    ),
    (["task", "tsv", *TSV[4:], "t.tsv"], "--tokenizer is required"),
    (["task", "dna/splice", "--input", "t.tsv", "--output", "out"], "t.tsv:1: not `class, name"),
    (["task", "dna/splice", "--input", "bpe", "--output", "out"], "neither splice.data nor"),
    ([*NEST, "0"], "must be at least 1"),
    ([*NEST, "9", "--push", "1"], "between 0 and 1"),
    ([*NEST, "9", "--vocab-size", "1_000_000_000_000"], "must be at most 16777216"),
    ([*NEST, "9", "--lengths", "9:3"], "LEAST <= MOST"),
    ([*NEST, "9", "--distinct", "40000"], "is too large: only 29995"),
    ([*NEST, "9", "--frequencies", "bpe"], "bpe is not a store"),
    ([*NEST, "9", "--frequencies", "store", "--vocab-size", "9"], "is less than the"),
    (["synthetic", "nested"], "did you mean nesting"),
    (["stats", "bpe"], "bpe is not a store"),
    (["verify", "bpe"], "bpe is not a store"),
    (["pydocs", "--output", "store"], "store exists"),
]


@pytest.mark.parametrize(("arguments", "phrase"), REFUSED, ids=[phrase for _, phrase in REFUSED])
def test_refused(base, monkeypatch, arguments, phrase):
    monkeypatch.chdir(base)
    before = sorted(os.listdir())
    with pytest.raises(BadInput, match=phrase) as caught:
        here(monkeypatch, *arguments)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ([*TEXT, "store/raw"], "store"),
        ([*TSV, "store/raw"], "store"),
        (["task", "squad", "--tokenizer", "wordpiece", "--train", "store/raw"], "store"),
        (["pairs", "store", "--kind", "next"], "store"),
        ([*NEST, "9", "--frequencies", "store"], "store"),
        ([*TOK, "bpe", "--input", "wordpiece/tokenizer_meta.json"], "wordpiece"),
    ],
)
def test_an_input_is_not_overwritten(base, monkeypatch, arguments, out):
    monkeypatch.chdir(base)
    raw = base / "store" / "raw"
    raw.write_text("text\tlabel\na\tx\nb\ty\n")
    with pytest.raises(BadInput, match=f"{out} is or contains the input .*; give another output"):
        here(monkeypatch, *arguments, "--output", out, "--overwrite")
    raw.unlink()


@pytest.mark.parametrize(
    ("files", "phrase"),
    [
        ({"train.tsv": "text\tlabel\na\tx\nb\n"}, "train.tsv:3: 1 column instead of 2"),
        ({"train.tsv": "text\tlabel\na\tx\tmore\n"}, "train.tsv:2: 3 columns instead of 2"),
        ({"train.tsv": "text\tlabel\na\t\n"}, "train.tsv:2: the label is empty"),
        ({"train.tsv": "text\tlabel\na\tx\n"}, "one class only, x"),
        ({"train.tsv": "text\tlabel\n"}, "train.tsv holds no example"),
        ({"train.csv": 'text,label\n"a,x\nb,y\n'}, "train.csv:3: unexpected end of data"),
        ({"dev.tsv": "text\na\n"}, "dev.tsv has no column 'label'"),
        ({"dev.tsv": "text\tlabel\na\tx\n", "valid.tsv": "text\tlabel\na\tx\n"}, "which is valid"),
        ({"train.csv": "text,label\n"}, "which is train"),
    ],
)
def test_refused_directories(base, monkeypatch, tmp_path, files, phrase):
    raw = tmp_path / "raw"
    raw.mkdir()
    if not (set(files) == {"train.csv"} and "end of data" in phrase):
        (raw / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    for name, content in files.items():
        (raw / name).write_text(content)
    arguments = ["--tokenizer", base / "bpe", "--text", "text", "--label", "label"]
    with pytest.raises(BadInput, match=phrase):
        here(monkeypatch, "task", "tsv", "--input", raw, *arguments, "--output", tmp_path / "out")
    assert os.listdir(tmp_path) == ["raw"]


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("EI, A, ACGX", "splice.data:2: letters other than ACGTDNRS: 'X'"),
        ("XX, A, ACGT", "splice.data:2: label 'XX' is not one of EI, IE, N"),
        ("EI, ACGT", "splice.data:2: not `class, name, sequence`"),
        ("EI, A,", "splice.data:2: the sequence is empty"),
    ],
)
def test_refused_splice(monkeypatch, tmp_path, line, phrase):
    (tmp_path / "splice.data").write_text(f"EI, A, ACGT\n{line}\n")
    with pytest.raises(BadInput, match=phrase):
        here(monkeypatch, "task", "dna/splice", "--input", tmp_path, "--output", tmp_path / "out")
    assert os.listdir(tmp_path) == ["splice.data"]


def test_a_split_that_cannot_be_drawn(base, monkeypatch, tmp_path):
    arguments = ["--tokenizer", base / "bpe", "--text", "text", "--label", "label", "--output", "o"]
    (tmp_path / "t.tsv").write_text("text\tlabel\n" + "a\tx\nb\ty\n" * 50)
    with pytest.raises(BadInput, match="2 different examples, too few to be split 90/5/5"):
        here(monkeypatch, "task", "tsv", "--input", tmp_path / "t.tsv", *arguments)
    files = [tmp_path / f"{name}.tsv" for name in "ab"]
    for file in files:
        file.write_text(f"text\tlabel\n{file.stem}\tx\n")
    with pytest.raises(BadInput, match=r"a.tsv and 1 other file: the training rows have"):
        here(monkeypatch, "task", "tsv", "--train", *files, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [[*TEXT, "t.tsv.txt"], [*TOK, "bpe", "--input", "t.tsv.txt"], [*TSV, "t.tsv.txt"]],
    ids=["text", "tokenizer", "task"],
)
def test_bad_rows_are_listed_if_the_command_fails(base, monkeypatch, capsys, arguments):
    """The bad rows may be the reason why the command fails."""
    monkeypatch.chdir(base)
    (base / "t.tsv.txt").write_bytes(b"text\tlabel\n\xff\tx\n" if "tsv" in arguments else b"\xff\n")
    with pytest.raises(BadInput, match=r"no text found|no example can be used"):
        here(monkeypatch, *arguments, "--skip-bad")
    assert "1 bad row was left out:\n  t.tsv.txt:" in capsys.readouterr().err


def test_a_path_may_begin_with_two_slashes(base, tmp_path):
    run(*TEXT, f"/{base}/corpus.txt", "--output", tmp_path / "s", folder=base)
    assert open_store(tmp_path / "s").meta["origin"]["sources"][0]["file"] == "corpus.txt"


def test_errors_reach_the_user_in_one_line_with_their_status(base):
    assert "bad.txt:3" in run(*TEXT, "bad.txt", status=2, folder=base)
    assert "exists" in run("pydocs", "--output", "store", status=2, folder=base)
    assert not [name for name in os.listdir(base) if "partial" in name]


def test_help_says_what_everything_is(monkeypatch, capsys):
    commands = ["tokenizer", "text", "stats", "verify", "pydocs"]
    names = [[name] for name in commands] + [["task", name] for name in cli.TASK_READERS]
    names += [["synthetic", name] for name in synthetic.GENERATORS] + [[]]
    for name in names:
        with pytest.raises(SystemExit) as caught:
            here(monkeypatch, *name, "--help")
        assert caught.value.code == 0
        said = capsys.readouterr().out
        assert "usage:" in said
        if name not in ([], ["verify"]):
            assert "default" in said


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupted_nothing_is_left(base, tmp_path, number, status):
    generator = np.random.default_rng(0)
    lines = (generator.integers(10**8, size=(2000, 10)).astype(str)).tolist()
    block = "\n".join(" ".join(line) for line in lines)
    with (tmp_path / "t.txt").open("w") as file:
        for i in range(200):  # new words in every block, so that it takes long enough
            file.write(block.replace("1", f"x{i}") + "\n")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out/s"
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "preprocess.py"),
            "text",
            "--input",
            str(tmp_path / "t.txt"),
            "--lines",
            "--tokenizer",
            str(base / "wordpiece"),
            "--output",
            str(output),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(600):
        if os.listdir(tmp_path / "out"):
            break
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == status, said
    assert said.count("\n") == 1
    assert not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_under_nohup_a_closed_terminal_is_ignored(before, monkeypatch):
    handled = []
    monkeypatch.setattr(sys, "argv", ["preprocess.py", "--help"])
    monkeypatch.setattr(signal, "getsignal", lambda _: before)
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    with pytest.raises(SystemExit):
        cli.main()
    assert handled == [signal.SIGTERM, signal.SIGHUP][: 1 + (before == signal.SIG_DFL)]


def test_statuses_of_errors():
    assert (BadInput.status, Failure.status) == (2, 1)
    assert Interrupted(signal.SIGTERM, "").status == 143


def test_reader_of_delimited_rows(tmp_path):
    (tmp_path / "t").write_text('a\t"b\n\n\x0bc\u2028d\te\n')
    table = RowTable(tmp_path / "t", Form("\t", None, header=False))
    assert list(table.rows(["1", "2"], BadRows(False))) == [
        (1, ["a", '"b']),
        (3, ["\x0bc\u2028d", "e"]),
    ]

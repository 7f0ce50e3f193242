"""Labels of words: the two published formats, the token that carries a label, batches, and metrics
against slow loops. Also a toy task that is learned, predicted and exported.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    NO_DROPOUT,
    Forks,
    good,
    kept_as_scored,
    refused,
    resamples_as_scored,
    training,
)
from toys import TOPICS, WORDS, Toys

from xformer.data import published, vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.store import (
    IGNORED,
    UNLABELLED,
    UNSEEN,
    Ragged,
    Split,
    Store,
    marks_entities,
    open_store,
)
from xformer.data.tokenizers import Tokenizer
from xformer.evaluate import _labels
from xformer.preprocess import cli
from xformer.preprocess.tasks.first_tokens import encode_words
from xformer.tasks import tag
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Predictions

TAG = "recipes/finetune/tag.toml"
Make = Callable[..., Store]


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A WordPiece tokenizer that splits words into several pieces."""
    texts = ["EU rejects German call to boycott British lamb . Peter Blackburn"] * 3
    letters = set("".join(texts).lower())
    return vocabularies.learn("wordpiece", texts, 48, True, letters)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pieces: Tokenizer) -> Make:
    """Write raw files, run `preprocess.py task ARGUMENTS` beside them and open the store."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(files: dict[str, str], *arguments: str) -> Store:
        raw = tmp_path / "raw"
        raw.mkdir(exist_ok=True)
        for name, text in files.items():
            (raw / name).write_text(text, encoding="utf-8")
        monkeypatch.chdir(raw)
        line = ["task", *arguments, "--output", str(tmp_path / "store")]
        if arguments[0] == "conll":
            (tmp_path / "tok").mkdir(exist_ok=True)
            pieces.save(tmp_path / "tok")
            line += ["--tokenizer", str(tmp_path / "tok")]
        monkeypatch.setattr(sys, "argv", ["preprocess.py", *line])
        cli.main()
        return open_store(tmp_path / "store")

    return run


def words(store: Store, split: str) -> list[list[tuple[str, str]]]:
    """(word, label) of every word of every row. The words are decoded from their pieces."""
    tokenizer, columns = store.tokenizer(), store.split(split).columns
    read = []
    for row in range(store.split(split).rows):
        ids, labels = columns["tokens"][row], columns["labels"][row]
        assert len(ids) == len(labels)
        starts = [*np.flatnonzero(labels != IGNORED), len(ids)]
        names = [
            store.labels[i] if i >= 0 else {-1: "none", -2: "unseen"}[i]
            for i in labels
            if i != IGNORED
        ]
        decoded = [tokenizer.decode(ids[a:b]) for a, b in pairwise(starts)]
        read.append(list(zip(decoded, names, strict=True)))
    return read


# ------------------------------------------------------------------------------ CoNLL's format

CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
Zürich JJ B-NP B-LOC

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER


"""
SENTENCES = [
    [("eu", "B-ORG"), ("rejects", "O"), ("[UNK]", "B-LOC")],
    [("peter", "B-PER"), ("blackburn", "I-PER")],
]


def test_classes_in_the_order_of_a_published_tagger(make: Make) -> None:
    given = "O,B-PER,I-PER,B-ORG,B-LOC"
    store = make({"train.txt": CONLL}, "conll", "--input", ".", "--labels", given)
    assert store.labels == given.split(",")
    assert words(store, "train")[1] == [("peter", "B-PER"), ("blackburn", "I-PER")]


def test_conll_2003(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    valid = "Zürich NNP B-NP B-MISC\nEU NNP B-NP B-ORG"  # a class that is not in training
    hidden = "British\nlamb\n\nPeter"  # no labels
    files = {"train.txt": CONLL, "dev.txt": valid, "test.txt": hidden}
    store = make(files, "conll", "--input", ".")
    assert (store.kind, store.metric) == ("tag", "entity_f1")
    assert store.labels == ["B-LOC", "B-ORG", "B-PER", "I-PER", "O"]
    assert words(store, "train") == SENTENCES
    assert words(store, "valid") == [[("[UNK]", "unseen"), ("eu", "B-ORG")]]
    assert words(store, "test") == [[("british", "none"), ("lamb", "none")], [("peter", "none")]]
    assert "valid: words whose class is not in training count as wrong: 'B-MISC' 1" in (
        capsys.readouterr().err
    )
    # only the first piece of a word has a label
    assert store.split("train").tokens > sum(map(len, SENTENCES))
    other = make({}, "conll", "--input", ".", "--label", "2", "--overwrite")
    assert words(other, "train")[1] == [("peter", "NNP"), ("blackburn", "NNP")]
    assert other.metric == "accuracy"


def test_conll_u(make: Make) -> None:
    text = (
        "# text = du pain\n1-2\tdu\t_\t_\n1\tEU\t_\tADP\n2\tlamb\t_\t_\n2.1\tx\t_\tX\n"
        "3\t#\t_\tSYM\n\n# next\n1\tcall\t_\tNOUN\n"
    )
    store = make(
        {"fr-ud-train.conllu": text}, "conll", "--input", ".", "--word", "2", "--label", "4"
    )
    assert words(store, "train") == [
        [("eu", "ADP"), ("lamb", "none"), ("[UNK]", "SYM")],
        [("call", "NOUN")],
    ]
    assert not marks_entities(store.labels)
    assert store.metric == "accuracy"


def test_white_space_around_words_and_labels_is_dropped(make: Make) -> None:
    store = make({"a.tsv": "EU\tO \n lamb\tB-X\n\ncall \tO\n"}, "conll", "--train", "a.tsv")
    assert words(store, "train") == [[("eu", "O"), ("lamb", "B-X")], [("call", "O")]]


TSV = "EU\tB-ORG\ncall\tO\n\nlamb\tO\n\n"
REFUSED: list[tuple[dict[str, str], list[str], str, bool]] = [
    ({"a.tsv": TSV + "x\n"}, ["--train", "a.tsv"], r"a\.tsv:6: 1 column instead of the 2", True),
    ({"a.tsv": TSV + "a b\tO\n"}, ["--train", "a.tsv"], r"a\.tsv:6: the word 'a b' is em", True),
    ({"a.tsv": TSV + "a\t\n"}, ["--train", "a.tsv"], r"a\.tsv:6: the label '' is empty", True),
    ({"a.tsv": TSV + "a\t_\n"}, ["--train", "a.tsv"], r"a\.tsv:6: the label is empty", True),
    ({"a.tsv": TSV}, ["--train", "a.tsv", "--label", "3"], "2 columns; .* no column 3", False),
    ({"a.tsv": TSV}, ["--train", "a.tsv", "--word", "3"], "2 columns; .* no column 3", False),
    ({"a.tsv": "a\nb\n"}, ["--train", "a.tsv"], "1 column; .* no column 2", False),
    ({"a.tsv": "a\tO\n"}, ["--train", "a.tsv"], "one class only, O", False),
    (
        {"a.tsv": TSV, "b.tsv": "a\n"},
        ["--train", "a.tsv", "--valid", "b.tsv"],
        "b.tsv has 1 colu",
        False,
    ),
    ({"a.tsv": TSV}, ["--input", "a.tsv"], "too few to be split 90/5/5", False),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_wrong_is_named(
    case: tuple[dict[str, str], list[str], str, bool], make: Make, tmp_path: Path
) -> None:
    files, arguments, phrase, skippable = case
    with pytest.raises(BadInput, match=phrase) as caught:
        make(files, "conll", *arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()
    if skippable:
        store = make(files, "conll", *arguments, "--skip-bad")
        assert store.split("train").rows == 2
        assert store.meta["origin"]["skipped_rows"] == 1


def test_a_sentence_with_a_bad_line_is_left_out(make: Make, tmp_path: Path) -> None:
    """Not only its line, as CoNLL 2002 in Latin-1 would lose a part of its words."""
    (tmp_path / "raw").mkdir()
    text = "\xfc\tO\na\tO\n\na\tO\n\xfc\tB-X\n\nb\tB-X\na\tO\n\n\xfc\tO\n\nb\tB-X\n\xfc\tO\n"
    (tmp_path / "raw" / "a.tsv").write_bytes(f"{text}\nb\tO\n".encode("latin-1"))
    store = make({}, "conll", "--train", "a.tsv", "--skip-bad")
    assert words(store, "train") == [[("b", "B-X"), ("a", "O")], [("b", "O")]]


# ------------------------------------------------------------------------------ FLIP's directories

FLIP = {
    "sequences.fasta": ">a-A\nMKV\nL\n>b-B\nACDE\n>c-C\nMM\n>d-D\nAC\n",
    "sampled.fasta": ">a-A SET=train VALIDATION=False\nHHCC\n>b-B SET=train VALIDATION=True\nEEHC\n"
    ">d-D SET=train VALIDATION=False\nEE\n>c-C SET=test VALIDATION=False\nCH\n",
    "mask.fasta": ">a-A\n1101\n>b-B\n1111\n>c-C\n00\n>d-D\n11\n",
}


def test_flip(make: Make, tmp_path: Path) -> None:
    store = make(FLIP, "protein/secondary", "--input", ".")
    assert store.labels == ["C", "E", "H"]
    assert words(store, "train") == [
        [("M", "H"), ("K", "H"), ("V", "none"), ("L", "C")],
        [("A", "E"), ("C", "E")],
    ]
    assert words(store, "valid") == [[("A", "E"), ("C", "E"), ("D", "H"), ("E", "C")]]
    assert words(store, "test") == [[("M", "none"), ("M", "none")]]
    assert store.split("train").columns["id"].text(1) == "d-D"
    (tmp_path / "raw/mask.fasta").unlink()
    bare = make({}, "protein/secondary", "--input", ".", "--overwrite")
    assert words(bare, "test") == [[("M", "C"), ("M", "H")]]


@pytest.mark.parametrize(
    ("file", "old", "new", "phrase"),
    [
        ("sequences", "MKV", "MK", r"sampled\.fasta:1: a-A has 3 amino acids, 4 labels; the"),
        ("mask", "1101", "11", "a-A has 4 amino acids, 4 labels, 2 marks in mask.fasta; the"),
        ("sequences", ">d-D", ">e", "d-D is not in sequences.fasta"),
        ("sequences", "MKV", "MK1", "a-A: letters other than .*: '1'"),
        ("sampled", "SET=test", "SET=best", r"sampled\.fasta:7: c-C: SET is 'best'"),
        ("sampled", "SET=test", "", "c-C: its header has neither SET=train nor SET=test"),
        ("sampled", ">a-A", "a-A", "sampled.fasta:1: text before the first header"),
        ("mask", "1101", "0000", "the label is empty"),
    ],
)
def test_bad_files_of_flip(file: str, old: str, new: str, phrase: str, make: Make) -> None:
    files = {**FLIP, f"{file}.fasta": FLIP[f"{file}.fasta"].replace(old, new)}
    with pytest.raises(BadInput, match=phrase):
        make(files, "protein/secondary", "--input", ".")


def test_flip_takes_only_a_directory(make: Make) -> None:
    with pytest.raises(BadInput, match="--train cannot be used here"):
        make(FLIP, "protein/secondary", "--train", "sampled.fasta")
    with pytest.raises(BadInput, match="give --input DIR with FLIP's"):
        make(FLIP, "protein/secondary", "--input", "sampled.fasta")


def test_flip_as_published(make: Make, shared: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(shared / "protein/flip/secondary_structure_splits.zip") as packed:
        texts = {
            name: packed.read(f"splits/{name}.fasta").decode()
            for name in ("sequences", "sampled", "mask")
        }
    # take every tenth protein
    few = {f"{name}.fasta": ">" + ">".join(text.split(">")[1::10]) for name, text in texts.items()}
    store = make(few, "protein/secondary", "--input", ".")
    wanted: dict[str, list[tuple[str, str, str]]] = {"train": [], "valid": [], "test": []}
    records = [[part.split("\n") for part in text.split(">")[1:]] for text in few.values()]
    for sequence, label, mask in zip(*records, strict=True):
        assert sequence[0] == mask[0] == label[0].split()[0]
        split = "test" if "SET=test" in label[0] else "valid" if "True" in label[0] else "train"
        wanted[split].append((sequence[1], label[1], mask[1]))
    for split, rows in wanted.items():
        tagged = words(store, split)
        assert ["".join(letter for letter, _ in row) for row in tagged] == [row[0] for row in rows]
        assert [[label for _, label in row] for row in tagged] == [
            ["none" if m == "0" else label for label, m in zip(*row[1:], strict=True)]
            for row in rows
        ]
    assert sum(map(len, wanted.values())) == 1116


# ------------------------------------------------------------------------------ words and tokens


def test_the_first_pieces_are_those_of_transformers(shared: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = published.import_tokenizer(shared / "vocabs/bert-base-uncased.vocab.txt")
    published.export_tokenizer(ours, tmp_path, 512)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    lines = (shared / "english_wikipedia/valid.txt").read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()][:200]
    encoded = encode_words(ours, texts)
    for text, (ids, first) in zip(texts, encoded, strict=True):
        given = theirs(text.split(), is_split_into_words=True, add_special_tokens=False)
        places = given.word_ids()
        starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1]]
        if len(starts) == len(text.split()):  # otherwise transformers gives some word no piece
            assert ids.tolist() == given["input_ids"]
            assert first.tolist() == starts
    assert np.mean([len(first) for _, first in encoded]) > 10


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "symbols", "separated"])
def test_every_word_has_a_token(kind: str) -> None:
    corpus = ["it's a test of the words été and naïve things"] * 9
    tokenizer = (
        vocabularies.symbols(corpus[0].split(), separated=True)
        if kind == "separated"
        else vocabularies.learn(kind, corpus, {"bpe": 290, "unigram": 26}.get(kind, 45))
    )
    texts = ["it's a \u200d été ", "", "  words\tof \u200b\u200b\n", "\u00ad", "ftx ﬁne 中文 a"]
    plain = tokenizer.encode_batch(texts)
    for text, (ids, first), bare in zip(texts, encode_words(tokenizer, texts), plain, strict=True):
        assert len(first) == len(text.split())
        assert (np.diff(first) > 0).all()
        unknown = tokenizer.special["unk"]
        assert [i for i in ids if i != unknown] == [i for i in bare if i != unknown]
        for word, start, end in zip(text.split(), first, [*first, len(ids)][1:], strict=True):
            alone = tokenizer.encode_batch([word])[0].tolist() or [unknown]
            if kind not in ("bpe", "unigram"):  # in these, pieces depend on the space before a word
                assert ids[start:end].tolist() == alone


def test_batches_hold_only_labelled_tokens(pieces: Tokenizer) -> None:
    draw = np.random.default_rng(3)
    lengths = draw.integers(0, 12, 30)
    offsets = np.cumsum([0, *lengths])
    labels = draw.choice([IGNORED, UNLABELLED, UNSEEN, 0, 1, 2], offsets[-1]).astype(np.int16)
    tokens = draw.integers(5, 40, offsets[-1]).astype(np.uint16)
    columns = {"tokens": Ragged(tokens, offsets), "labels": Ragged(labels, offsets)}
    assembler = Assembler(Split("x", 30, len(tokens), columns), pieces, 9)
    batch = assembler.batch(draw.permutation(30))
    assert batch.places is not None
    assert batch.targets is not None
    targets = dict(zip(batch.places.tolist(), batch.targets.tolist(), strict=True))
    expected = {}
    for row, start in zip(batch.rows, batch.cu_seqlens, strict=False):
        for i, label in enumerate(labels[offsets[row] : offsets[row + 1]][:7]):
            if label >= 0:
                expected[int(start) + 1 + i] = int(label)
    assert targets == expected
    assert len(targets) > 40


# ------------------------------------------------------------------------------------- metrics


def chunks_of(labels: list[str]) -> Iterator[tuple[int, int, str]]:
    """(first, last, kind) of the entities, by the rules of the shared task's script, written out
    here.
    """
    padded = ["O", *labels, "O"]
    start = 0
    for i, (before, label) in enumerate(pairwise(padded)):
        (old, _, kind), (new, _, its) = before.partition("-"), label.partition("-")
        begins = new in "BSU" or (new != "O" and (old in "OELSU" or kind != its))
        ends = old != "O" and (old in "ELSU" or new in "BSUO" or kind != its)
        if ends:
            yield start, i - 1, kind
        if begins:
            start = i


def test_entities() -> None:
    entities = tag.entities(["B-A", "I-A", "I-B", "O", "I-A", "B-A", "B-B", "I-B"])
    assert entities == {(0, 1, "A"), (2, 2, "B"), (4, 4, "A"), (5, 5, "A"), (6, 7, "B")}
    assert tag.entities(["O", "O"]) == tag.entities([]) == set()
    draw = np.random.default_rng(1)
    for marks in ("BI", "BIES", "BILU", "BMES"):
        names = ["O", *(f"{mark}-{kind}" for mark in marks for kind in "AB")]
        assert marks_entities(names)
        for _ in range(200):
            labels = [str(x) for x in draw.choice(names, 9)]
            assert tag.entities(labels) == set(chunks_of(labels))
    assert tag.entities(["S-A", "B-A", "E-A", "E-A"]) == {(0, 0, "A"), (1, 2, "A"), (3, 3, "A")}
    assert not marks_entities(["O", "X-A"])


def predictions(outputs: np.ndarray, split: Split, names: tuple[str, ...]) -> Predictions:
    return task_of(Head("tag", names)).predictions(outputs, split)


def test_scores_equal_slow_loops() -> None:
    draw = np.random.default_rng(5)
    names = ("B-A", "B-B", "I-A", "I-B", "O")
    lengths = draw.integers(0, 9, 40)
    offsets = np.cumsum([0, *lengths])
    gold = draw.choice([IGNORED, UNLABELLED, UNSEEN, *range(5)], offsets[-1]).astype(np.int16)
    said = draw.integers(-1, 5, offsets[-1])  # -1: the word was truncated
    losses = draw.random(offsets[-1]).astype(np.float32)
    split = Split("x", 40, len(gold), {"labels": Ragged(gold, offsets)})
    outputs = np.column_stack([said + 1, losses]).astype(np.float32)
    metrics = predictions(outputs, split, names).metrics()
    resamples_as_scored(predictions(outputs, split, names))
    scored = [i for i in range(len(gold)) if gold[i] not in (IGNORED, UNLABELLED) and said[i] >= 0]
    counted = _labels(task_of(Head("tag", names)), predictions(outputs, split, names))
    assert counted == {"labels": len(scored)}
    assert metrics["accuracy"] == np.mean([gold[i] == said[i] for i in scored])
    assert metrics["loss"] == pytest.approx(np.mean([losses[i] for i in scored if gold[i] >= 0]))
    each = []
    for k in range(5):
        both = sum(gold[i] == said[i] == k for i in scored)
        each.append(2 * both / sum(int(gold[i] == k) + int(said[i] == k) for i in scored))
    assert metrics["f1"] == pytest.approx(np.mean(each))
    right = total = 0
    for a, b in pairwise(offsets):
        row = [i for i in range(a, b) if i in scored]
        ours = set(chunks_of([names[said[i]] for i in row]))
        wanted = set(chunks_of([names[gold[i]] if gold[i] >= 0 else "I-?" for i in row]))
        right, total = right + len(ours & wanted), total + len(ours) + len(wanted)
    assert 0 < metrics["entity_f1"] == pytest.approx(2 * right / total)
    assert "entity_f1" not in predictions(outputs, split, ("a", "b", "c", "d", "e")).metrics()
    with pytest.raises(BadInput, match="the split 'x' has no labels to score against"):
        predictions(outputs * 0, split, names).metrics()


# ---------------------------------------------------------------------------------- end to end


def toy(draw: np.random.Generator, rows: int) -> list[list[tuple[str, str]]]:
    """Sentences in which the words of one topic are names and those of another are places."""
    named = {
        word: label
        for words, label in zip(TOPICS, ("B-NAME", "B-PLACE"), strict=False)
        for word in words
    }
    rows_of_words = (draw.choice(WORDS, draw.integers(3, 25)) for _ in range(rows))
    return [[(str(w), named.get(str(w), "O")) for w in words] for words in rows_of_words]


@pytest.fixture(scope="module")
def store(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tags")
    draw = np.random.default_rng(0)
    for split, rows in (("train", 300), ("valid", 40), ("test", 50)):
        blocks = ["\n".join("\t".join(pair) for pair in row) for row in toy(draw, rows)]
        (directory / f"{split}.conll").write_text("\n\n".join(blocks) + "\n")
    good(
        forks.run(
            "preprocess.py",
            "task",
            "conll",
            "--input",
            directory,
            "--tokenizer",
            data.tokenizer,
            "--output",
            directory / "store",
        )
    )
    return directory / "store"


def test_broken_tokens_are_those_of_their_row(store: Path) -> None:
    split = open_store(store).split("test")
    offsets = np.asarray(split.columns["tokens"].offsets)
    outputs = np.zeros((offsets[-1], 3), np.float32)
    tagging = task_of(Head("tag", ("O", "B-X", "I-X")))
    assert not tagging.broken(outputs, split).any()
    # the first token of one row and the last one of another
    outputs[offsets[7], 2], outputs[offsets[20] - 1, 0] = np.nan, np.inf
    assert np.flatnonzero(tagging.broken(outputs, split)).tolist() == [7, 19]


def test_a_toy_is_learnt_predicted_and_exported(forks: Forks, store: Path, tmp_path: Path) -> None:
    run, said = tmp_path / "run", tmp_path / "labels.txt"
    lively = ["batch.rows=16", "optim.lr=3e-3", "train.epochs=3"]
    done = good(forks.run(*training(TAG, store, run, *NO_DROPOUT, *lively)))
    cut = (
        "rows are longer than {} and are truncated; the longest needs 26 (the model takes up to 64)"
    )
    assert "WARNING: " in done.err
    assert cut.format("batch.max_tokens=20") in done.err
    kept_as_scored(run)
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert result["test"].keys() == {"loss", "accuracy", "f1", "entity_f1"}
    assert result["test"]["entity_f1"] > 0.97
    blocks = (store.parent / "test.conll").read_text().strip().split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    done = good(forks.run("evaluate.py", run, f"data={store}", f"predictions={said}"))
    assert f"test accuracy {result['test']['accuracy']:.4f}" in done.out
    assert cut.format("the checkpoint's batch.max_tokens=20") in done.err
    table = [line.split("\t") for line in said.read_text().splitlines()]
    assert table[0] == ["labels", "row", "gold"]
    lines = [labels.split() for labels, *_ in table[1:]]
    gold = [labels.split() for *_, labels in table[1:]]
    assert gold == [[pair[1] for pair in row] for row in rows]
    assert [len(line) for line in lines] == [len(row) for row in rows]
    pairs = [
        (label, pair[1])
        for line, row in zip(lines, rows, strict=True)
        for label, pair in zip(line, row, strict=True)
        if label != "_"
    ]
    assert np.mean([a == b for a, b in pairs]) == pytest.approx(result["test"]["accuracy"])
    # words beyond batch.max_tokens have no label
    assert [label == "_" for line in lines for label in line] == [
        i >= 18 for row in rows for i in range(len(row))
    ]
    ranks = good(forks.run("evaluate.py", run, f"data={store}", ranks=2))
    assert ranks.out == done.out
    # raw texts, and one that is empty
    raw = tmp_path / "raw.txt"
    raw.write_text("\n".join([*(" ".join(word for word, _ in row) for row in rows), "", "dan"]))
    done = good(forks.run("evaluate.py", run, f"input={raw}"))
    assert cut.format("the checkpoint's batch.max_tokens=20") in done.err
    read = list(csv.reader(io.StringIO(done.out), delimiter="\t"))
    assert read[0] == ["labels", "input"]
    assert [labels for labels, _ in read[1:]] == [labels for labels, *_ in table[1:]] + [
        "",
        "B-PLACE",
    ]
    transformers_agrees(forks, run, rows, lines, tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    refused(forks.run("evaluate.py", run, f"input={empty}"), "empty.txt is empty")


def transformers_agrees(
    forks: Forks, run: Path, rows: list[list[list[str]]], lines: list[list[str]], place: Path
) -> None:
    """Assert that transformers gives the same labels with the exported model, without any code of
    this project.
    """
    transformers = pytest.importorskip("transformers")
    good(forks.run("-m", "xformer.convert", "to-hf", run, place / "theirs"))
    auto = transformers.AutoModelForTokenClassification
    model = auto.from_pretrained(place / "theirs").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "theirs")
    for row, line in zip(rows, lines, strict=True):
        given = tokenizer(
            [word for word, _ in row],
            is_split_into_words=True,
            truncation=True,
            max_length=20,
            return_tensors="pt",
        )
        with torch.inference_mode():
            best = model(**given).logits[0].argmax(1)
        places = given.word_ids()
        classes = [
            model.config.id2label[int(best[places.index(i)])]
            for i in range(len(row))
            if i in places
        ]
        assert classes == [label for label in line if label != "_"]


def test_other_stores_are_refused(forks: Forks, data: Toys, store: Path, tmp_path: Path) -> None:
    refused(forks.run(*training(TAG, data.classes, tmp_path / "run")), "store of kind tag")
    classify = "recipes/finetune/classify.toml"
    refused(forks.run(*training(classify, store, tmp_path / "run")), "is of kind tag")
    refused(
        forks.run(*training(TAG, store, tmp_path / "run", "train.metric=mcc")),
        "which has loss, accuracy, f1, entity_f1",
    )
    assert not os.path.exists(tmp_path / "run")

"""How English-like vocabularies and stores are: the published numbers, and a plain loop over
rows.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import command, good, refused

from xformer.data import tokenizers, vocabularies
from xformer.data.display import Progress
from xformer.data.english import english_pieces
from xformer.data.errors import BadInput
from xformer.data.store import Store, open_store
from xformer.data.writing import create_store
from xformer.preprocess.vocabulary import english_like

SPECIAL = {piece: i for i, piece in enumerate(tokenizers.BERT_SPECIAL.values())}
PIECES = ["a", "##b", "Cd", "1", "##2", "é", "a1", "...", "##", "中"]  # the first three are English
TOKENIZER = vocabularies.wordpiece(
    {**SPECIAL, **{piece: 5 + i for i, piece in enumerate(PIECES)}}, lowercase=False
)


def store(path: Path, splits: dict[str, list[list[int]]], column: str = "tokens") -> Store:
    with create_store(path, TOKENIZER, {column: ""}, (column,)) as writer:
        for name, rows in splits.items():
            with writer.split(name) as split:
                values = np.array([i for row in rows for i in row], np.int64)
                split.append_ragged(column, values, np.array([len(row) for row in rows]))
        writer.finish("text", [], None, {})
    return open_store(path)


def plainly(rows: list[list[int]]) -> dict[str, int]:
    """The counts, computed by a plain loop."""
    counts = dict.fromkeys(("windows", "english_like", "disjoint", "disjoint_english_like"), 0)
    for row in rows:
        for start in range(len(row) - 9):
            many = sum(piece in (5, 6, 7) for piece in row[start : start + 10]) > 5
            counts["windows"] += 1
            counts["english_like"] += many
            if start % 10 == 0:
                counts["disjoint"] += 1
                counts["disjoint_english_like"] += many
    return counts


@pytest.mark.parametrize("block", [1, 7, 10, 64, 2**20])
def test_contexts_are_those_of_a_plain_loop(tmp_path, monkeypatch, block):
    monkeypatch.setattr(english_like, "BLOCK", block)
    generator = np.random.default_rng(block)
    lengths = [*generator.integers(0, 45, 60), 0, 0, 9, 10, 11, 20, 0]
    rows = [generator.choice(np.arange(5, 12), n).tolist() for n in lengths]
    opened = store(tmp_path / "s", {"train": rows, "valid": rows[:7]})
    for name, part in (("train", rows), ("valid", rows[:7])):
        counts = english_like.contexts(opened, name, Progress("", 1, "tokens"))
        assert counts == plainly(part)
        assert 0 < counts["english_like"] < counts["windows"]


def test_no_context_crosses_a_row(tmp_path):
    rows = [[5] * 9] * 50 + [[8] * 10] + [[5] * 5 + [8] * 5, [5] * 6 + [8] * 4]
    about = english_like.describe_contexts(
        store(tmp_path / "s", {"train": rows, "test": [[5] * 9]})
    )
    assert about["splits"]["train"] == {
        "windows": 3,
        "english_like": 1,
        "disjoint": 3,
        "disjoint_english_like": 1,
        "share": 1 / 3,
        "disjoint_share": 1 / 3,
    }
    assert about["splits"]["test"]["share"] is None
    short = store(tmp_path / "short", {"train": [[5] * 9] * 3})
    with pytest.raises(BadInput, match="short has no row of 10 pieces"):
        english_like.describe_contexts(short)


def test_contexts_leave_out_what_is_not_a_token(tmp_path):
    """A store of questions also has answers as text, whose bytes are no ids."""
    columns = {"tokens": "", "question.answers": "uint8"}
    with create_store(tmp_path / "s", TOKENIZER, columns, tuple(columns)) as writer:
        with writer.split("train") as split:
            for column in columns:
                split.append_ragged(column, np.full(12, 5), np.array([12]))
        writer.finish("text", [], None, {})
    opened = open_store(tmp_path / "s")
    assert english_like.contexts(opened, "train", Progress("", 1, "tokens"))["windows"] == 3


def test_english_like_pieces_of_every_kind():
    words = english_pieces(TOKENIZER)
    assert words == {5: ("a", True), 6: ("b", False), 7: ("Cd", True)}
    letters = [*tokenizers.ROBERTA_SPECIAL.values(), "a", "Ġa", "b", "ĠCd", "Ġ1", "é", "Ġ"]
    pairs = vocabularies.byte_bpe({piece: i for i, piece in enumerate(letters)}, [])
    assert english_pieces(pairs) == {
        5: ("a", False),
        6: ("a", True),
        7: ("b", False),
        8: ("Cd", True),
    }
    assert english_like.overlap(TOKENIZER, pairs) == {
        "pieces": [15, 12],
        "english_like": [3, 4],
        "shared": 3,
    }
    scores = [(p, -1.0) for p in [*tokenizers.ALBERT_SPECIAL.values(), "▁a", "b", "▁", "a▁"]]
    unigram = vocabularies.albert(scores, None, [], [])
    assert english_pieces(unigram) == {5: ("a", True), 6: ("b", False)}
    assert english_like.overlap(TOKENIZER, unigram)["shared"] == 2
    assert english_pieces(vocabularies.symbols("aé1")) == {5: ("a", True)}


def test_the_overlap_of_published_vocabularies(shared, tmp_path):
    """Zhang 2021, section 4.1: 26,503 of 30,522 pieces; table 2: 3,365 and 2,672 (ZH)."""
    names = [shared / f"vocabs/bert-base-{n}.vocab.txt" for n in ("uncased", "cased", "chinese")]
    uncased, cased, chinese = map(english_like.read_tokenizer, names)
    assert english_like.overlap(uncased, cased) == {
        "pieces": [30_522, 28_996],
        "english_like": [26_503, 26_015],
        "shared": 16_339,
    }
    uncased.save(tmp_path)
    again = english_like.read_tokenizer(tmp_path)
    assert english_like.overlap(again, chinese) == {
        "pieces": [30_522, 21_128],
        "english_like": [26_503, 3_365],
        "shared": 2_672,
    }


def test_the_commands(tmp_path):
    rows = [[5, 5, 5, 5, 5, 5, 8, 8, 8, 8, 8, 8]]
    store(tmp_path / "s", {"train": rows, "test": [[5]]})
    done = good(
        command("preprocess.py", "english-contexts", tmp_path / "s", "--json", tmp_path / "c.json")
    )
    assert done.out.splitlines()[1:] == [
        "train: 33.333% (1 of 3); without overlap 100.000% (1 of 1)",
        "test: no row of 10 pieces",
    ]
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["splits"]["train"]["disjoint_share"] == 1
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, "a", "b"]), encoding="utf-8")
    done = good(
        command(
            "preprocess.py",
            "vocab-overlap",
            tmp_path / "s",
            vocabulary,
            "--json",
            tmp_path / "o.json",
        )
    )
    assert [line.split()[-3:] for line in done.out.splitlines()[1:]] == [
        ["15", "3", "1"],
        ["7", "2", "1"],
    ]
    assert json.loads((tmp_path / "o.json").read_text())["shared"] == 1
    done = good(command("preprocess.py", "vocab-overlap", "micro/english", vocabulary))
    assert done.out.splitlines()[1].split()[:2] == ["english", "8,192"]
    refused(command("preprocess.py", "english-contexts", vocabulary), "is not a store")
    refused(command("preprocess.py", "vocab-overlap", vocabulary, tmp_path / "x"), "x does not")
    refused(
        command("preprocess.py", "vocab-overlap", vocabulary, vocabulary, "--json", tmp_path),
        "it is a directory; give a file",
    )

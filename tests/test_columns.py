"""The columns of a table can be named wherever a table is read: in tasks that know the names of
published files, and for the rows that `evaluate.py input=` predicts.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from xformer.data import tokenizers
from xformer.data.errors import BadInput
from xformer.data.store import Store, open_store
from xformer.evaluate import EvaluateConfig, parse_arguments
from xformer.preprocess import cli
from xformer.preprocess.tasks.predict import write_rows

TOKENIZER = "micro/english"
PARTS: dict[str, Any] = {
    "task": "tsv",
    "options": {"delimiter": None, "quoting": None, "no_header": False},
}


def table(path: Path, header: str, *rows: tuple[str, ...]) -> Path:
    """Write a table, as csv or as JSON lines."""
    names = header.split(",")
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    return path


def task(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: object) -> Store:
    """The store that `preprocess.py task ARGUMENTS` makes."""
    line = ["preprocess.py", "task", *arguments, "--output", output]
    monkeypatch.setattr(sys, "argv", [str(word) for word in line])
    cli.main()
    return open_store(output)


def decoded(store: Store, split: str, column: str = "tokens") -> list[str]:
    ids = store.split(split).columns[column]
    return [store.tokenizer().decode(ids[row]) for row in range(store.split(split).rows)]


def test_a_glue_task_with_columns_of_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [("one", "two", "0"), ("three", "four", "1"), ("five", "six", "1")]
    raw = table(tmp_path / "train.csv", "premise text,hypothesis,gold", *rows)
    line = ("glue/rte", "--train", raw, "--tokenizer", TOKENIZER)
    with pytest.raises(BadInput, match=r"has no column 'sentence1'; .*--text names another$"):
        task(monkeypatch, tmp_path / "s", *line)
    named = ("--text", "premise text", "--text-b", "hypothesis", "--label", "gold")
    store = task(monkeypatch, tmp_path / "s", *line, *named)
    assert decoded(store, "train") == ["one", "three", "five"]
    assert decoded(store, "train", "tokens_b") == ["two", "four", "six"]
    assert store.split("train").columns["label"].tolist() == [0, 1, 1]
    # rows to predict are read by the same names
    head = {"kind": "classify", "labels": store.labels, "pair": True, "max_tokens": 64}
    head["columns"] = store.meta["origin"]["columns"]
    write_rows(raw, head, store.tokenizer(), tmp_path / "p")
    assert decoded(open_store(tmp_path / "p"), "input", "tokens_b") == ["two", "four", "six"]
    with pytest.raises(BadInput, match="--text-b x: glue/cola has one text; leave it out"):
        task(monkeypatch, tmp_path / "t", "glue/cola", *line[1:], "--text-b", "x")


def test_a_table_of_pieces_with_columns_of_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = table(tmp_path / "mine.csv", "who,file", ("Bach", "a.mid"), ("Chopin", "b.mid"))
    line = ("music/maestro", "--input", raw)
    with pytest.raises(
        BadInput, match=r"no column 'canonical_composer'; .*; --composer names anot"
    ):
        task(monkeypatch, tmp_path / "s", *line)
    with pytest.raises(BadInput, match=r"no column 'midi_filename'; .*; --midi names another"):
        task(monkeypatch, tmp_path / "s", *line, "--composer", "who")
    with pytest.raises(BadInput, match=r"mine\.csv:2: a\.mid: there is no such file"):
        task(monkeypatch, tmp_path / "s", *line, "--composer", "who", "--midi", "file")


CLASSIFY: dict[str, Any] = {"kind": "classify", "labels": ["no", "yes"]}
# the checkpoint's head; the file's header, a row; columns=; the texts that are read
PREDICTED: dict[str, tuple[dict[str, Any], tuple[str, ...], list[str], list[str]]] = {
    "class": (
        CLASSIFY | {"columns": {**PARTS, "text": "sentence"}},
        ("id,review", "1", "good film"),
        ["review"],
        ["good film"],
    ),
    "pair": (
        CLASSIFY | {"pair": True, "columns": {**PARTS, "text": "a", "text_b": "b"}},
        ("second,first", "two", "one"),
        ["first", "second"],
        ["one", "two"],
    ),
    "glue": (
        CLASSIFY | {"columns": {"task": "glue/sst2", "text": "sentence"}},
        ("review,stars", "good film", "5"),
        ["review"],
        ["good film"],
    ),
    "tag": (
        {"kind": "tag", "labels": ["A", "B"], "columns": {"task": "conll", "text": "1"}},
        ("n,words", "1", "good film"),
        ["words"],
        ["good film"],
    ),
    "dna": (
        CLASSIFY | {"columns": {"task": "dna", "text": "sequence", "uppercase": True}},
        ("n,strand", "1", "acgt"),
        ["strand"],
        ["ACGT"],
    ),
    "choice": (
        {
            "kind": "choice",
            "pair": True,
            "columns": {
                "task": "choice",
                "options": {**PARTS["options"], "context": ["c"], "endings": ["x", "y"]},
            },
        },
        ("why,yes,no", "one", "two", "three"),
        ["why", "yes", "no"],
        ["one", "two"],
    ),
}


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize("name", PREDICTED)
def test_rows_to_predict_with_columns_of_other_names(
    name: str, ending: str, tmp_path: Path
) -> None:
    head, (header, *row), given, read = PREDICTED[name]
    record: dict[str, Any] = {"labels": [], "pair": False, "max_tokens": 64, **head}
    file = table(tmp_path / f"new.{ending}", header, tuple(row))
    tokenizer = tokenizers.load_tokenizer(TOKENIZER)
    if name != "tag":
        with pytest.raises(BadInput, match=r"columns= names other columns$"):
            write_rows(file, record, tokenizer, tmp_path / "s")
    write_rows(file, record, tokenizer, tmp_path / "s", given)
    columns = open_store(tmp_path / "s").split("input").columns
    texts = [columns[key].text(0) for key in ("input", "input_b") if key in columns]
    assert texts == read
    with pytest.raises(BadInput, match=f"columns= names {len(given) + 1} columns, but a row needs"):
        write_rows(file, record, tokenizer, tmp_path / "t", [*given, "extra"])
    with pytest.raises(BadInput, match="'absent'"):
        write_rows(file, record, tokenizer, tmp_path / "t", [*given[:-1], "absent"])


def test_questions_with_columns_of_other_names(tmp_path: Path) -> None:
    head = {"kind": "span", "labels": [], "pair": True, "max_tokens": 64, "columns": {}}
    file = table(tmp_path / "new.csv", "asked,passage", ("who?", "the king"))
    tokenizer = tokenizers.load_tokenizer(TOKENIZER)
    write_rows(file, head, tokenizer, tmp_path / "s", ["asked", "passage"])
    columns = open_store(tmp_path / "s").split("input").columns
    assert columns["context.text"].text(0) == "the king"
    assert columns["question.input"].text(0) == "who?"


def test_the_key_takes_one_column_or_several() -> None:
    def columns(text: str) -> tuple[str, ...]:
        return parse_arguments(["run", "input=x.csv", f"columns={text}"]).columns

    assert EvaluateConfig(input="x").columns == ()
    assert columns("review") == columns('["review"]') == ("review",)
    assert columns('["a", "b"]') == ("a", "b")
    assert columns("4") == ("4",)
    with pytest.raises(BadInput, match="columns= cannot be combined with data="):
        parse_arguments(["run", "data=x", "columns=a"])

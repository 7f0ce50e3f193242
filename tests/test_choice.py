"""`preprocess.py task choice`: each ending of a question is a row, and the rows of a question stay
together."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer.data import store as stores
from xformer.data import tokenizers, vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import checked_blocks, read_json, write_json
from xformer.data.joined import open_stores
from xformer.data.store import Store, open_store
from xformer.data.writing import create_store
from xformer.preprocess import cli
from xformer.preprocess.tasks import choice, predict

COLUMNS = ["sent1", "sent2", "ending0", "ending1", "ending2", "label"]
SWAG = [
    "--context",
    "sent1",
    "sent2",
    "--endings",
    "ending0",
    "ending1",
    "ending2",
    "--label",
    "label",
]
LIST = ["--context", "sent1", "--endings", "endings", "--label", "label"]
Make = Callable[..., Store]
Question = tuple[str, list[str], int]  # context, endings, number of the right one


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer, which decodes ids to exactly the text that was encoded."""
    place = tmp_path_factory.mktemp("bpe")
    words = ["the quick brown fox jumps over the lazy dog and does so again"] * 9
    vocabularies.learn("bpe", words, 280).save(place)
    return place


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run `preprocess.py ARGUMENTS`."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
        cli.main()

    return run


@pytest.fixture
def make(command: Callable[..., None], tmp_path: Path, bpe: Path) -> Make:
    """Run `task choice ARGUMENTS` into `tmp_path/NAME` and open the store."""

    def run(*arguments: object, name: str = "store") -> Store:
        command("task", "choice", *arguments, "--tokenizer", bpe, "--output", tmp_path / name)
        return open_store(tmp_path / name)

    return run


def rows_of(split: str, number: int) -> list[dict[str, str]]:
    """Questions in the columns of SWAG."""
    return [
        {
            "sent1": f"{split} {i}, she stood.",
            "sent2": "Then he",
            **{f"ending{j}": f"ended {split} {i} as {j}" for j in range(3)},
            "label": str(i * i % 3),
        }
        for i in range(number)
    ]


def expected(rows: Sequence[dict[str, str]]) -> list[Question]:
    """The questions that a store of such rows should hold."""
    return [
        (f"{r['sent1']} {r['sent2']}", [r[f"ending{j}"] for j in range(3)], int(r["label"] or -1))
        for r in rows
    ]


def lists(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The same questions with the endings in one column."""
    return [
        {
            "sent1": f"{r['sent1']} {r['sent2']}",
            "endings": [r[f"ending{j}"] for j in range(3)],
            "label": r["label"],
        }
        for r in rows
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's ending. In a delimited file lists become JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        with path.open("w", newline="") as file:
            if mark == ",":
                writer = csv.writer(file)
            else:
                writer = csv.writer(file, delimiter=mark, quoting=csv.QUOTE_NONE, quotechar=None)
            writer.writerow(list(rows[0]))
            for row in rows:
                cells = row.values()
                writer.writerow([json.dumps(c) if isinstance(c, list) else c for c in cells])
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(store: Store, split: str) -> list[Question]:
    """The questions of a split, after checking that the rows of each question agree."""
    part, n = store.split(split), store.choices
    assert part.together == n
    assert set(part.columns) >= {"tokens", "tokens_b", "label"}
    decode, columns = store.tokenizer().decode, part.columns
    labels = np.asarray(columns["label"])
    assert labels.dtype == np.int64
    read = []
    for start in range(0, part.rows, n):
        rows = range(start, start + n)
        contexts = {decode(columns["tokens"][row]) for row in rows}
        right = set(labels[start : start + n].tolist())
        assert len(contexts) == len(right) == 1
        read.append((contexts.pop(), [decode(columns["tokens_b"][r]) for r in rows], right.pop()))
    return read


@pytest.fixture
def swag(tmp_path: Path) -> Path:
    """A directory of three splits; the test questions have no label."""
    for split, number in (("train", 12), ("valid", 4), ("test", 3)):
        rows = rows_of(split, number)
        if split == "test":
            rows = [{**row, "label": ""} for row in rows]
        write(tmp_path / f"swag/{split}.csv", rows)
    return tmp_path / "swag"


# ------------------------------------------------------------------------------ reading


def test_a_store_row_by_row(make: Make, swag: Path) -> None:
    store = make("--input", swag, *SWAG)
    assert (store.kind, store.choices, store.labels, store.metric) == ("choice", 3, [], "accuracy")
    assert store.splits == ["train", "valid", "test"]
    assert questions(store, "train") == expected(rows_of("train", 12))
    assert questions(store, "valid") == expected(rows_of("valid", 4))
    assert questions(store, "test") == [(a, b, -1) for a, b, _ in expected(rows_of("test", 3))]
    assert [store.split(name).rows for name in store.splits] == [36, 12, 9]
    assert store.meta["choices"] == 3
    assert sorted(store.split("train").columns) == ["label", "tokens", "tokens_b"]
    assert store.meta["origin"]["columns"] == {
        "text": ["sent1", "sent2"],
        "text_b": ["ending0", "ending1", "ending2"],
        "label": "label",
        "task": "choice",
        "options": {
            "context": ["sent1", "sent2"],
            "endings": ["ending0", "ending1", "ending2"],
            "label": "label",
            "first": 0,
            "delimiter": None,
            "quoting": None,
            "no_header": False,
        },
    }
    assert store.damage() == ""


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet", "jsonl.gz"])
@pytest.mark.parametrize("listed", [False, True])
def test_every_format(make: Make, tmp_path: Path, form: str, listed: bool) -> None:
    rows: list[Any] = rows_of("it's", 9)
    path = write(tmp_path / f"train.{form.removesuffix('.gz')}", lists(rows) if listed else rows)
    if form.endswith(".gz"):
        path = tmp_path / f"train.{form}"
        path.write_bytes(gzip.compress((tmp_path / "train.jsonl").read_bytes()))
    store = make("--train", path, *(LIST if listed else SWAG))
    assert questions(store, "train") == expected(rows)


def test_without_a_header(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "copa.txt"
    path.write_text("it rained|wet|dry|A\nsun shone|wet|dry|b\n")
    numbers = ["--context", 1, "--endings", 2, 3, "--label", 4]
    store = make("--train", path, *numbers, "--no-header", "--delimiter", "|")
    assert questions(store, "train") == [
        ("it rained", ["wet", "dry"], 0),
        ("sun shone", ["wet", "dry"], 1),
    ]


@pytest.mark.parametrize(
    ("label", "first", "right"),
    [
        ("0", 0, 0),
        ("2", 0, 2),
        ("1", 1, 0),
        ("3", 1, 2),
        ("2.0", 0, 2),
        ("A", 0, 0),
        ("c", 1, 2),
        (
            "3",
            0,
            "label '3' names none of the 3 endings; it must be a number from 0 to 2, or a letter ",
        ),
        ("3", 0, "from A to C \\(from 1 with --first 1\\)"),
        (
            "0",
            1,
            "label '0' names none of the 3 endings; it must be a number from 1 to 3, or a letter",
        ),
        ("4", 1, "from 1 to 3, or a letter from A to C$"),
        ("D", 0, "label 'D' names none of the 3 endings"),
        ("-1", 0, "label '-1' names none of the 3 endings"),
        ("1.5", 0, "label '1.5' names none of the 3 endings"),
        ("\u0661", 0, "names none of the 3 endings"),
        ("ended", 0, "label 'ended' names none of the 3 endings"),
    ],
)
def test_labels(label: str, first: int, right: int | str) -> None:
    if isinstance(right, int):
        assert choice.ending_of(label, first, 3) == right
    else:
        with pytest.raises(ValueError, match=right):
            choice.ending_of(label, first, 3)


def test_labels_that_count_from_one(make: Make, tmp_path: Path) -> None:
    rows = [{**row, "label": str(int(row["label"]) + 1)} for row in rows_of("a", 6)]
    store = make("--train", write(tmp_path / "a.csv", rows), *SWAG, "--first", 1)
    assert questions(store, "train") == expected(rows_of("a", 6))


def test_parts_of_a_context(make: Make, tmp_path: Path) -> None:
    """An empty part of a context adds no space."""
    rows = [{**row, "sent2": "" if i else " "} for i, row in enumerate(rows_of("a", 2))]
    store = make("--train", write(tmp_path / "a.csv", rows), *SWAG)
    assert [context for context, *_ in questions(store, "train")] == [r["sent1"] for r in rows]


def test_missing_labels(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], swag: Path
) -> None:
    """Validation and test questions may lack labels, some of them or the whole column."""
    valid = [{**row, "label": "-1" if i else row["label"]} for i, row in enumerate(rows_of("v", 3))]
    test = [{k: v for k, v in row.items() if k != "label"} for row in rows_of("t", 2)]
    paths = [write(tmp_path / "v.jsonl", valid), write(tmp_path / "t.csv", test)]
    line = ["--train", swag / "train.csv", "--valid", paths[0], "--test", paths[1]]
    store = make(*line, *SWAG)
    assert [right for *_, right in questions(store, "valid")] == [0, -1, -1]
    assert [right for *_, right in questions(store, "test")] == [-1, -1]
    assert "2 of the 3 questions of valid have no label and are not scored" in (
        capsys.readouterr().err
    )
    for label, message in (
        ("", "the label is empty"),
        ("-1", "label '-1' names none of the 3 endings"),
    ):
        rows = [*rows_of("a", 2), {**rows_of("a", 1)[0], "label": label}]
        with pytest.raises(BadInput, match=f"a.csv:4: {message}"):
            make("--train", write(tmp_path / "a.csv", rows), *SWAG, name="x")


def test_drawn_splits_keep_questions_whole(make: Make, tmp_path: Path) -> None:
    """All rows of a question are in one split, and equal questions are in the same split."""
    rows = [*rows_of("a", 60), *rows_of("a", 7)]
    store = make("--input", write(tmp_path / "a.jsonl", lists(rows)), *LIST)
    splits = {name: questions(store, name) for name in store.splits}
    every = [question for split in splits.values() for question in split]
    assert sorted(every) == sorted(expected(rows))
    contexts = [{context for context, *_ in split} for split in splits.values()]
    assert sum(map(len, contexts)) == 60
    assert all(splits.values())
    with pytest.raises(BadInput, match="the task has no classes"):
        make("--input", tmp_path / "a.jsonl", *LIST, "--stratify", name="x")


def test_a_column_of_splits(make: Make, tmp_path: Path) -> None:
    rows = [{**row, "split": ("train", "dev")[i % 2]} for i, row in enumerate(rows_of("a", 8))]
    store = make("--input", write(tmp_path / "a.csv", rows), *SWAG)
    assert questions(store, "valid") == expected(rows[1::2])


# ------------------------------------------------------------------------------ bad input

LISTED: list[tuple[Any, str]] = [
    (["x", "y"], "'endings' lists 2 endings; the first question has 3, and all questions need"),
    (["x"], "'endings' lists 1 ending; give two or more"),
    ([], "'endings' lists 0 endings; give two or more"),
    (["x", " ", "z"], "item 2 of column 'endings' is empty; every question needs all its endings"),
    (["x", None, "z"], "'endings' lists null; every ending must be text"),
    (["x", ["y"], "z"], r"'endings' lists \[\"y\"\]; every ending must be text"),
    (["x", "\ud800", "z"], "'endings' holds half of a surrogate pair"),
    ("x, y, z", "'endings' is 'x, y, z', which is not a list; write "),
    (None, "'endings' is '', which is not a list"),
]


@pytest.mark.parametrize(("endings", "message"), LISTED)
def test_bad_lists(make: Make, tmp_path: Path, endings: Any, message: str) -> None:
    rows = lists(rows_of("a", 4))
    rows[2]["endings"] = endings
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(BadInput, match=f"a.jsonl:3: .*{message}"):
        make("--train", path, *LIST)
    store = make("--train", path, *LIST, "--skip-bad", name="skipped")
    assert questions(store, "train") == expected([rows_of("a", 4)[i] for i in (0, 1, 3)])
    assert store.meta["origin"]["skipped_rows"] == 1


def test_bad_rows_in_columns(make: Make, tmp_path: Path) -> None:
    for change, message in (
        ({"ending1": ""}, "column 'ending1' is empty; every question needs all its endings"),
        (
            {"label": "7"},
            "label '7' names none of the 3 endings; it must be a number from 0 to 2, or",
        ),
    ):
        rows = rows_of("a", 4)
        rows[1] |= change
        with pytest.raises(BadInput, match=f"a.csv:3: {message}"):
            make("--train", write(tmp_path / "a.csv", rows), *SWAG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "sent", *SWAG[3:]], "no column 'sent'; it has .*did you mean 'sent2'"),
        ([*SWAG[:-1], "sent1"], "--context, --endings and --label must be different columns"),
        (["--context", "sent1", "--endings", "sent2", *SWAG[-2:]], "is 'Then he', which is not a"),
        ([*SWAG, "--first", "2"], "2 is not allowed; it must be at most 1"),
        (SWAG[3:], "--context"),
    ],
)
def test_bad_options(make: Make, swag: Path, options: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make("--input", swag, *options)


# ------------------------------------------------------------------------------ the store


def tiny(path: Path, rows: int, choices: int, kind: str = "choice") -> Path:
    """A small store of `rows` rows that all have the label 0."""
    words = vocabularies.symbols("abcdefgh", separated=False)
    columns = {"tokens": "", "tokens_b": "", "label": "int64"}
    with create_store(path, words, columns, ["tokens", "tokens_b"]) as new:
        with new.split("train") as split:
            for column in ("tokens", "tokens_b"):
                split.append_ragged(column, np.full(rows, 6), np.ones(rows, np.int64))
            split.append("label", np.zeros(rows, np.int64))
        new.finish(kind, ["no", "yes"] if kind == "class" else [], "accuracy", {}, choices)
    return path


def test_other_kinds_have_single_rows(tmp_path: Path) -> None:
    store = open_store(tiny(tmp_path / "s", 4, 1, "class"))
    assert (store.choices, store.split("train").together) == (1, 1)
    assert "choices" not in store.meta


def test_an_incomplete_question_is_refused(tmp_path: Path) -> None:
    for rows, choices, kind in ((7, 3, "choice"), (6, 1, "choice"), (6, 3, "class")):
        with pytest.raises(ValueError, match=r"rows per question|question of 3 rows"):
            tiny(tmp_path / "s", rows, choices, kind)
    tiny(tmp_path / "s", 6, 3)
    meta = read_json(tmp_path / "s/store.json")
    (tmp_path / "s" / stores.SUMS).unlink()
    write_json(tmp_path / "s/store.json", meta | {"choices": 4})
    with pytest.raises(BadInput, match="holds 6 rows, which is not a multiple of the 4 endings"):
        open_store(tmp_path / "s")
    for wrong in (1, 0, -3, "3", None, True, 3.0):
        write_json(tmp_path / "s/store.json", meta | {"choices": wrong})
        with pytest.raises(BadInput, match=r"store\.json is damaged: .*choices is"):
            open_store(tmp_path / "s")
    write_json(tmp_path / "s/store.json", {k: v for k, v in meta.items() if k != "choices"})
    with pytest.raises(BadInput, match=r"store\.json is damaged: .*choices"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize(("label", "good"), [(-1, True), (2, True), (3, False), (-2, False)])
def test_labels_are_verified(tmp_path: Path, label: int, good: bool) -> None:
    """A label that is not the number of an ending is damage, even if the checksums agree."""
    store = open_store(tiny(tmp_path / "s", 6, 3))
    file = tmp_path / "s/train/label.npy"
    values = np.load(file)
    values[4] = label
    np.save(file, values)
    store = open_store(tmp_path / "s")
    checked = checked_blocks(file, store._validity("train/label.npy"))
    assert [valid for _, valid in checked] == [good]


def test_joined(tmp_path: Path, make: Make, swag: Path) -> None:
    first = make("--input", swag, *SWAG)
    more = write(tmp_path / "more.csv", rows_of("more", 5))
    second = make("--train", more, *SWAG, name="more")
    joined = open_stores([str(first.path), str(second.path)])
    assert joined.choices == 3
    assert joined.split("test").together == 3
    assert questions(joined, "train") == expected([*rows_of("train", 12), *rows_of("more", 5)])
    two = make("--train", more, *SWAG[:-3], *SWAG[-2:], "--skip-bad", name="two")
    assert two.choices == 2
    with pytest.raises(BadInput, match=r"they differ in the number of endings \(3; 2\)"):
        open_stores([str(first.path), str(two.path)])


def test_stats(
    command: Callable[..., None],
    make: Make,
    swag: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`stats` counts labels once per question, not once per row."""
    store = make("--input", swag, *SWAG)
    out, drawn = tmp_path / "s.json", tmp_path / "f.svg"
    capsys.readouterr()
    command("stats", store.path, "--json", out, "--figure", drawn)
    shown = capsys.readouterr().out
    assert "store: choice of 3, metric accuracy, vocabulary" in shown
    assert "train: 12 questions, 36 rows, " in shown
    assert "labels: ending 0 4, ending 1 8, ending 2 0" in shown
    report = read_json(out)
    assert (report["kind"], report["choices"]) == ("choice", 3)
    splits = report["splits"]
    assert [(splits[s]["questions"], splits[s]["rows"]) for s in splits] == [
        (12, 36),
        (4, 12),
        (3, 9),
    ]
    assert splits["train"]["labels"] == {"ending 0": 4, "ending 1": 8, "ending 2": 0}
    assert splits["test"]["labels"] == {"ending 0": 0, "ending 1": 0, "ending 2": 0, "(none)": 3}
    assert "<!-- Questions by label" in drawn.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------ predictions


def predicted(
    store: Store | None, path: Path, bpe: Path, output: Path, given: tuple[str, ...] = ()
) -> Store:
    """The store of a file's raw rows, for a checkpoint that was trained on `store`. If `store` is
    None, the checkpoint does not say its columns."""
    columns = None if store is None else store.meta["origin"]["columns"]
    head = {"kind": "choice", "labels": list[str](), "pair": True, "max_tokens": 64}
    shutil.rmtree(output, ignore_errors=True)
    head |= {"columns": columns}
    predict.write_rows(path, head, tokenizers.load_tokenizer(bpe), output, given)
    return open_store(output)


def shown(store: Store) -> list[Question]:
    """The questions of `input`, after checking that the texts are those of the tokens."""
    columns = store.split("input").columns
    for text, ids in (("input", "tokens"), ("input_b", "tokens_b")):
        rows = range(store.split("input").rows)
        texts = [columns[text].text(row) for row in rows]
        assert texts == [store.tokenizer().decode(columns[ids][row]) for row in rows]
    return questions(store, "input")


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("listed", [False, True])
def test_rows_to_predict(
    make: Make, swag: Path, tmp_path: Path, bpe: Path, form: str, listed: bool
) -> None:
    """A file of any format needs the columns of training, without the label. Each row keeps its
    question's `id`."""
    options, train = SWAG, swag / "train.csv"
    if listed:
        options, train = LIST, write(tmp_path / "list.jsonl", lists(rows_of("train", 5)))
    trained = make("--train", train, *options)
    raw: list[Any] = lists(rows_of("new", 4)) if listed else rows_of("new", 4)
    rows = [{"id": f"q{i}", **row} for i, row in enumerate(raw)]
    for row in rows:
        del row["label"]
    made = predicted(trained, write(tmp_path / f"new.{form}", rows), bpe, tmp_path / "new")
    assert (made.kind, made.choices, made.splits) == ("choice", 3, ["input"])
    assert shown(made) == [(a, b, -1) for a, b, _ in expected(rows_of("new", 4))]
    ids = made.split("input").columns["id"]
    assert [ids.text(row) for row in range(12)] == [f"q{i // 3}" for i in range(12)]


def test_rows_to_predict_without_a_header(
    make: Make, swag: Path, tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that holds only the texts needs no header. If the checkpoint does not say its columns,
    they are called `context` and `endings`."""
    trained = make("--input", swag, *SWAG)
    path = tmp_path / "new.tsv"
    path.write_text("she\tstood\tup\tdown\tstill\n")
    made = predicted(trained, path, bpe, tmp_path / "new")
    assert shown(made) == [("she stood", ["up", "down", "still"], -1)]
    assert "line 1 is read as a row" in capsys.readouterr().err
    path = write(tmp_path / "new.jsonl", [{"context": "she", "endings": ["up", "down"]}])
    made = predicted(None, path, bpe, tmp_path / "new")
    assert made.choices == 2
    assert shown(made) == [("she", ["up", "down"], -1)]


def test_columns_of_an_imported_head(make: Make, tmp_path: Path, bpe: Path) -> None:
    """It does not say its columns: the user names the context and then the endings."""
    path = write(tmp_path / "new.csv", [{"q": "she", "a": "up", "b": "down"}])
    made = predicted(None, path, bpe, tmp_path / "new", ("q", "a", "b"))
    assert shown(made) == [("she", ["up", "down"], -1)]
    with pytest.raises(BadInput, match="columns= names 1 column, but a row needs 2"):
        predicted(None, path, bpe, tmp_path / "new", ("q",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sent1,sent2,ending0,ending1\na,b,c,d\n", "new.csv:1: the header lacks the column 'endi"),
        (",".join(COLUMNS[:5]) + "\na,b,c,d,\n", "new.csv:2: column 'ending2' is empty; every"),
        (",".join(COLUMNS[:5]) + "\n", "has a header and no row"),
        (",".join(COLUMNS[:5]) + "\na,b,c\n", "new.csv:2: 3 columns instead of 5"),
    ],
)
def test_bad_rows_to_predict(
    make: Make, swag: Path, tmp_path: Path, bpe: Path, text: str, message: str
) -> None:
    trained = make("--input", swag, *SWAG)
    path = tmp_path / "new.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        predicted(trained, path, bpe, tmp_path / "new")

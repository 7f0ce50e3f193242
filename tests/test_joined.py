"""Several stores read as one, compared to a store that holds all their rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import looking
import numpy as np
import pytest
import test_squad
from helpers import CLASSIFY, SMOKE, Forks, good, refused, training
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import timeless_log
from toys import Toys

from xformer.analysis.examples import ExamplesConfig, open_examples
from xformer.analysis.subcommand import Subcommand, parse_arguments
from xformer.checkpoint import content_key, resolve
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.joined import Joined, Parts, open_stores
from xformer.data.store import Ragged, Split, Store, open_store
from xformer.data.vocabularies import symbols
from xformer.data.writing import create_store
from xformer.tasks.span import answer

tokenizer = test_squad.tokenizer  # a fixture


@dataclass(frozen=True)
class Pair:
    """Two stores, and one that holds the rows of both."""

    a: Path
    b: Path
    whole: Path

    @property
    def both(self) -> str:
        return json.dumps([str(self.a), str(self.b)])


@pytest.fixture(scope="module")
def stores(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Two stores of texts by document, and two of classes. Only the second of each has a split
    `test`.
    """
    place = tmp_path_factory.mktemp("joined")

    def preprocess(*words: str | Path) -> None:
        good(forks.run("preprocess.py", *words, "--tokenizer", data.tokenizer))

    def pair(name: str, command: Callable[[str, Path], list[str | Path]]) -> Pair:
        made = Pair(*(place / f"{name}-{part}" for part in ("a", "b", "whole")))
        for part, path in (("a", made.a), ("b", made.b), ("whole", made.whole)):
            preprocess(*command(part, path))
        return made

    for split in ("train", "valid"):
        documents = (data.raw / f"{split}.txt").read_text().split("\n\n")
        for part, some in (("a", documents[:25]), ("b", documents[25:])):
            (place / f"{split}-{part}.txt").write_text("\n\n".join(some))
        header, *lines = (data.raw / f"classes/{split}.tsv").read_text().splitlines()
        for part, rows in (("a", lines[:40]), ("b", lines[40:]), ("whole", lines)):
            (place / part).mkdir(exist_ok=True)
            (place / part / f"{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    for part in ("b", "whole"):
        (place / part / "test.tsv").write_text((data.raw / "classes/test.tsv").read_text())

    def texts(part: str, path: Path) -> list[str | Path]:
        parts = ["a", "b"] if part == "whole" else [part]
        files = {s: [place / f"{s}-{p}.txt" for p in parts] for s in ("train", "valid")}
        return [
            "text",
            "--documents",
            "--max-tokens",
            "9",
            "--input",
            *files["train"],
            "--valid",
            *files["valid"],
            "--output",
            path,
        ]

    def classes(part: str, path: Path) -> list[str | Path]:
        return [
            "task",
            "tsv",
            "--input",
            place / part,
            "--text",
            "text",
            "--label",
            "label",
            "--output",
            path,
        ]

    return {"text": pair("text", texts), "classes": pair("classes", classes)}


def equal(actual: Split, wanted: Split) -> None:
    """Assert that two splits hold the same."""
    assert (actual.name, actual.rows, actual.tokens) == (wanted.name, wanted.rows, wanted.tokens)
    assert list(actual.columns) == list(wanted.columns)
    for name, column in wanted.columns.items():
        other = actual.columns[name]
        assert len(other) == len(column)
        if isinstance(column, Ragged):
            assert np.array_equal(other.offsets, column.offsets), name
            assert other.offsets.dtype == column.offsets.dtype
            other, column = other.values, column.values
        assert other.dtype == column.dtype
        assert np.array_equal(np.asarray(other), np.asarray(column)), name


@pytest.mark.parametrize("kind", ["text", "classes"])
def test_two_stores_hold_what_one_does(stores: dict[str, Pair], kind: str) -> None:
    """The rows of the first store come before those of the second. A split that only one store has
    comes from that store.
    """
    pair = stores[kind]
    actual, whole = open_stores([str(pair.a), str(pair.b)]), open_store(pair.whole)
    assert actual.splits == whole.splits
    for name in ("kind", "labels", "metric", "fingerprint", "vocab_size"):
        assert getattr(actual, name) == getattr(whole, name)
    assert actual.tokenizer().fingerprint == whole.fingerprint
    for name in whole.splits:
        equal(actual.split(name), whole.split(name))
    assert actual.key not in {whole.key, open_store(pair.a).key, open_store(pair.b).key}
    turned = open_stores([str(pair.b), str(pair.a)])
    assert turned.key != actual.key
    with pytest.raises(BadInput, match=f"{pair.a} and {pair.b} has no split 'x'; it has train"):
        actual.split("x")


def test_one_store_is_opened_as_it_was(stores: dict[str, Pair]) -> None:
    path = str(stores["text"].a)
    for paths in (path, [path], (path,)):
        assert type(open_stores(paths)) is Store
        assert open_stores(paths).key == open_store(path).key


def test_ids_are_not_copied(stores: dict[str, Pair]) -> None:
    """The ids of joined stores are the memory maps of their files."""
    pair = stores["text"]
    parts = [open_store(pair.a), open_store(pair.b)]
    values = Joined(parts).split("train").columns["tokens"].values
    assert isinstance(values, Parts)
    for array, store in zip(values.arrays, parts, strict=True):
        assert np.shares_memory(array, store.split("train").columns["tokens"].values)


def test_three_stores_are_joined_in_order(tmp_path: Path) -> None:
    paths = [str(looking.store(tmp_path / f"s{seed}", seed)) for seed in range(3)]
    actual = open_stores(paths).split("valid").columns["tokens"]
    rows = [
        row.tolist()
        for path in paths
        for row in map(open_store(path).split("valid").columns["tokens"].__getitem__, range(13))
    ]
    assert [actual[i].tolist() for i in range(len(actual))] == rows


def test_answers_of_joined_questions_are_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Path
) -> None:
    """Tables with their own rows are joined too, and the row numbers that refer to them are
    moved."""
    paths = []
    words = ("1973", "cups", "ok")
    contexts = (test_squad.CONTEXT, "the cups, ok", "ok cups, and the cups")
    for name, word, context in zip("abc", words, contexts, strict=True):
        (tmp_path / name).mkdir()
        raw = test_squad.squad(test_squad.question(0, word, context.index(word)), context=context)
        options = ("--max-tokens", 60, "--stride", 25, "--max-question", 7)
        made = test_squad.make(monkeypatch, tmp_path / name, tokenizer, raw, *options)
        paths.append(str(made.path))
    store = open_stores(paths)
    split = store.split("train")
    assembler = Assembler(split, store.tokenizer(), 60)
    rows = [np.flatnonzero(split.columns["group"] == number) for number in (0, 1, 2)]
    assert sum(map(len, rows)) == split.rows
    for actual, word in zip(rows, words, strict=True):
        inside = [row for row in actual if split.columns["label"][row, 0] >= 0]
        assert inside
        for row in inside:
            assert answer(split, int(row), *split.columns["label"][row]) == word
            assert assembler.batch(np.array([row])).labels is not None


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4).filter(any),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_parts_do_what_one_array_does(lists: list[list[int]], data: st.DataObject) -> None:
    arrays = [np.array(one, np.uint16) for one in lists]
    parts, whole = Parts(arrays), np.concatenate(arrays)
    assert len(parts) == len(whole)
    assert parts.max(initial=3) == whole.max(initial=3)
    places = np.array(data.draw(st.lists(st.integers(-2, len(whole) + 2))), np.int64)
    assert np.array_equal(parts.take(places, mode="clip"), whole.take(places, mode="clip"))
    inside = places.clip(0, len(whole) - 1)
    assert np.array_equal(parts[inside], whole[inside])
    start, stop = (data.draw(st.integers(0, len(whole) + 1)) for _ in range(2))
    assert np.array_equal(parts[start:stop], whole[start:stop])
    assert parts[start:stop].dtype == parts.take(places).dtype == whole.dtype
    assert np.array_equal(np.asarray(parts), whole)


# ------------------------------------------------------------------------- training and after


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_on_two_stores_is_training_on_one(
    forks: Forks, stores: dict[str, Pair], tmp_path: Path, ranks: int
) -> None:
    """Weights, moments, log and scores are the same bit for bit."""
    pair, runs = stores["text"], [tmp_path / "one", tmp_path / "two"]
    for source, run in zip((str(pair.whole), pair.both), runs, strict=True):
        line = training(SMOKE, source, run, "train.steps=6", "fraction=0.5", "mapping=ids")
        good(forks.run(*line, ranks=ranks))
    one, two = (resolve(run) for run in runs)
    assert timeless_log(runs[0]) == timeless_log(runs[1])
    for name in ("model", "optimizer"):
        a, b = ((place / f"{name}.safetensors").read_bytes() for place in (one, two))
        assert a == b
    config = read_json(runs[1] / "config.json")
    assert config["config"]["data"] == [str(pair.a), str(pair.b)]
    assert config["identity"]["data"] == open_stores([str(pair.a), str(pair.b)]).key
    assert "is finished" in good(forks.run(*line, ranks=ranks)).err
    turned = json.dumps([str(pair.b), str(pair.a)])
    refused(forks.run(*[word.replace(pair.both, turned) for word in line]), "data=")


@pytest.mark.slow
def test_scores_of_two_stores_are_those_of_one(
    forks: Forks, stores: dict[str, Pair], tmp_path: Path
) -> None:
    pair, runs = stores["classes"], [tmp_path / "one", tmp_path / "two"]
    for source, run in zip((str(pair.whole), pair.both), runs, strict=True):
        line = training(CLASSIFY, source, run, "train.epochs=1")
        good(forks.run(*line))
    assert (
        read_json(runs[0] / "result.json")["metrics"]
        == (read_json(runs[1] / "result.json")["metrics"])
    )
    assert content_key(resolve(runs[0])) != content_key(resolve(runs[1]))  # their histories differ
    lines: list[tuple[str, str]] = []
    for source in (str(pair.whole), pair.both):
        out = tmp_path / f"{len(lines)}"
        done = good(
            forks.run(
                "evaluate.py",
                runs[0],
                f"data={source}",
                "split=valid",
                f"predictions={out}.tsv",
                f"out={out}.json",
            )
        )
        lines.append((done.out, (tmp_path / f"{out}.tsv").read_text()))
    assert lines[0] == lines[1]
    assert read_json(Path(f"{out}.json"))["data"] == [str(pair.a), str(pair.b)]
    verified = good(forks.run("-m", "xformer.study", "verify", runs[1]))
    assert "records of its log the same" in verified.out


def test_analyses_take_a_list_of_stores(tmp_path: Path) -> None:
    paths = [str(looking.store(tmp_path / name, seed)) for name, seed in (("a", 0), ("b", 1))]
    words = [
        str(looking.checkpoint(tmp_path / "c")),
        f"data={json.dumps(paths)}",
        f"out={tmp_path / 'o'}",
        "threads=1",
    ]
    paths_given, config = parse_arguments(Subcommand("attention", ExamplesConfig, ""), words)
    assert config.data == tuple(paths)
    examples = open_examples(config, paths_given)
    assert len(examples.rows) == 2 * looking.ROWS
    assert examples.describe()["data"]["store"] == " and ".join(paths)


def test_damage_of_the_second_store_is_noticed(
    forks: Forks, stores: dict[str, Pair], tmp_path: Path
) -> None:
    pair = stores["text"]
    copy = shutil.copytree(pair.b, tmp_path / "b")
    tokens = copy / "train/tokens.npy"
    damaged = bytearray(tokens.read_bytes())
    damaged[-2] ^= 1
    tokens.write_bytes(damaged)
    both = json.dumps([str(pair.a), str(copy)])
    line = training(SMOKE, both, tmp_path / "run", "train.steps=3")
    done = forks.run(*line)
    assert done.status == 1
    assert f"{tokens} is damaged in block 0" in done.err.splitlines()[-1]


# -------------------------------------------------------------------------------- what is refused


def test_stores_that_do_not_fit_are_refused(
    forks: Forks, data: Toys, stores: dict[str, Pair], tmp_path: Path
) -> None:
    """One line names both stores and the difference, before any file is written."""
    text, classes = stores["text"], stores["classes"]
    for paths, words in (
        ((text.a, classes.a), "they differ in kind (text; class)"),
        ((classes.a, data.pairs), "they differ in labels (no, yes; other, same)"),
        ((data.text, text.a), "they differ in columns (tokens ragged uint16; group int32,"),
        ((data.splice, classes.a), "cannot be read as one"),
    ):
        both = json.dumps([str(path) for path in paths])
        line = training(SMOKE, both, tmp_path / "run")
        refused(forks.run(*line), f"{paths[0]} and {paths[1]} cannot be read as one", words)
    same = f"{text.a}/."
    for other in (str(text.a), same):
        line = training(SMOKE, json.dumps([str(text.a), other]), tmp_path / "run")
        refused(forks.run(*line), str(text.a), "give")
    refused(
        forks.run(*training(SMOKE, json.dumps([str(text.a), "nowhere"]), tmp_path / "run")),
        "nowhere is not a store",
    )
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    a = looking.store(tmp_path / "a")
    other = symbols("abcdefgh", separated=False)
    with create_store(tmp_path / "b", other, {"tokens": ""}) as writer:
        with writer.split("valid") as split:
            split.append_ragged("tokens", np.array([6, 7]), np.array([2]))
        writer.finish("text", [], None, {})
    with pytest.raises(BadInput, match=rf"{a} and {tmp_path / 'b'} .* they differ in tokenizer"):
        open_stores([str(a), str(tmp_path / "b")])


def test_labels_are_compared_one_by_one(tmp_path: Path) -> None:
    """Two lists of labels that read the same when they are joined by commas are still different."""
    for name, labels in (("a", ["x, y", "z"]), ("b", ["x", "y, z"])):
        with create_store(tmp_path / name, symbols("ab"), {"tokens": "", "label": "int64"}) as new:
            with new.split("train") as split:
                split.append_ragged("tokens", np.array([6, 7]), np.array([1, 1]))
                split.append("label", np.arange(2) if name == "a" else np.arange(2)[::-1])
            new.finish("class", labels, "accuracy", {})
    with pytest.raises(BadInput, match="they differ in labels"):
        open_stores([str(tmp_path / "a"), str(tmp_path / "b")])

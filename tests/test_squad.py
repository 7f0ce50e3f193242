"""`preprocess.py task squad`: windows, labels, and answers turned back into their exact text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import command

from xformer.config import load
from xformer.data import tokenizers, vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.store import Split, Store, open_store
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.preprocess import cli
from xformer.recipe import Recipe
from xformer.tasks.span import answer

CONTEXT = (
    "\u00c9milie's caf\u00e9 (opened in 1973) sold 3,000 cups; the \u5317\u4eac branch did not. "
    * 6
)
WORDS = "abcdefghijklmnopqrstuvwxyz0123456789\u5317\u4eac.,;()'?"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer of single characters and a few words, so that answers may be parts of
    words.
    """
    pieces = [*tokenizers.BERT_SPECIAL.values(), *WORDS, *(f"##{c}" for c in WORDS), "cafe", "cups"]
    path = tmp_path_factory.mktemp("tokenizer")
    vocabularies.wordpiece({piece: i for i, piece in enumerate(pieces)}, lowercase=True).save(path)
    return path


def question(number: int, text: str | None, start: Any = -1, **more: Any) -> dict[str, Any]:
    start = CONTEXT.index(text) if text and start == -1 else start
    answers = [] if text is None else [{"text": text, "answer_start": start}]
    return {"id": f"q{number}", "question": f"what is {number}?", "answers": answers, **more}


def squad(*questions: dict[str, Any], context: Any = CONTEXT) -> dict[str, Any]:
    paragraphs = [{"context": context, "qas": list(questions)}]
    return {"version": "v2.0", "data": [{"title": "Caf\u00e9", "paragraphs": paragraphs}]}


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Path, value: Any, *options: object
) -> Store:
    raw = write(tmp_path / "raw.json", value)
    arguments = ["--train", raw, "--tokenizer", tokenizer, "--output", tmp_path / "s", *options]
    monkeypatch.setattr("sys.argv", ["preprocess.py", "task", "squad", *map(str, arguments)])
    cli.main()
    return open_store(tmp_path / "s")


def rows_of(split: Split, number: int) -> np.ndarray:
    return np.flatnonzero(split.columns["group"] == number)


def test_windows_cover_the_context_and_give_answers_back(monkeypatch, tmp_path, tokenizer):
    last = CONTEXT.rindex("branch did")
    store = make(
        monkeypatch,
        tmp_path,
        tokenizer,
        squad(
            question(0, "1973"),
            question(1, "branch did", last),
            question(2, None),
            question(3, "\u00c9milie's caf\u00e9 (opened"),
            question(4, "\u5317\u4eac"),
        ),
        "--max-tokens",
        60,
        "--stride",
        25,
        "--max-question",
        7,
    )
    assert (store.kind, store.metric) == ("span", "f1")
    split = store.split("train")
    context = store.tokenizer().encode_batch([CONTEXT])[0]
    assert split.columns["context.text"].text(0) == CONTEXT
    room = 60 - 7 - 3
    texts = ["1973", "branch did", "", "\u00c9milie's caf\u00e9 (opened", "\u5317\u4eac"]
    for number, text in enumerate(texts):
        rows = rows_of(split, number)
        starts = split.columns["window"][rows]
        assert starts.tolist() == list(range(0, len(context) - room + 25, 25))
        for row, start in zip(rows, starts, strict=True):
            assert split.columns["tokens_b"][row].tolist() == context[start : start + room].tolist()
            first, end = split.columns["label"][row]
            assert answer(split, row, first, end) == (text if first >= 0 else "")
        inside = split.columns["label"][rows][:, 0] >= 0
        assert inside.any() == bool(text)
    # the first occurrence is in the first window, the last one in the last
    assert split.columns["label"][rows_of(split, 0)][0, 0] >= 0
    assert split.columns["label"][rows_of(split, 1)][:-2].max() == -1
    assert split.columns["question.id"].text(3) == "q3"
    assert [json.loads(split.columns["question.answers"].text(i)) for i in range(5)] == [
        [text] if text else [] for text in texts
    ]
    rows = np.arange(split.rows)
    sizes = Assembler(split, store.tokenizer(), 60).sizes(rows)
    assert sizes.max() == 60  # nothing is truncated when a batch is built
    assert Assembler(split, store.tokenizer(), 60).truncation("batch.max_tokens=60", 512) == ""


def test_a_label_is_in_every_window_that_holds_the_answer(monkeypatch, tmp_path, tokenizer):
    start = CONTEXT.index("3,000", 150)
    value = squad(question(0, "3,000 cups", start))
    store = make(
        monkeypatch,
        tmp_path,
        tokenizer,
        value,
        "--max-tokens",
        80,
        "--stride",
        10,
        "--max-question",
        10,
    )
    split = store.split("train")
    starts, ends = (split.columns[f"context.{name}"][0] for name in ("starts", "ends"))
    held = 0
    for row in range(split.rows):
        window = split.columns["window"][row]
        n = len(split.columns["tokens_b"][row])
        whole = starts[window] <= start and ends[window + n - 1] >= start + len("3,000 cups")
        assert (split.columns["label"][row][0] >= 0) == whole
        held += whole
    assert held > 3


def test_hidden_and_several_answers(monkeypatch, tmp_path, tokenizer):
    several = question(0, "1973")
    several["answers"].append({"text": "in 1973", "answer_start": CONTEXT.index("in 1973")})
    hidden = question(1, None)
    del hidden["answers"]
    plausible = question(2, "1973", is_impossible=True)
    held_out = write(tmp_path / "held-out.json", squad(hidden, several))
    value = squad(several, plausible)
    store = make(monkeypatch, tmp_path, tokenizer, value, "--valid", held_out)
    for name, wanted in (
        ("train", [["1973", "in 1973"], []]),
        ("valid", [None, ["1973", "in 1973"]]),
    ):
        columns = store.split(name).columns
        assert [json.loads(columns["question.answers"].text(i)) for i in range(2)] == wanted
    split = store.split("train")
    assert split.columns["label"][rows_of(split, 1)].max() == -1


def test_a_run_needs_answers_to_validate_on(monkeypatch, tmp_path, tokenizer):
    """The error comes before the run's directory is made."""
    hidden = question(1, None)
    del hidden["answers"]
    held_out = write(tmp_path / "held-out.json", squad(hidden))
    make(monkeypatch, tmp_path, tokenizer, squad(question(0, "1973")), "--valid", held_out)
    given = [f"data={tmp_path / 's'}", f"run={tmp_path / 'run'}", "model.layers=1"]
    recipe = load(Recipe, ["finetune/squad", *given])
    with pytest.raises(BadInput, match="the split 'valid' has no labels, so the run cannot"):
        prepare(recipe, ALONE)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dev_sets_of_squad(shared, tmp_path):
    vocabulary = (shared / "vocabs/bert-base-uncased.vocab.txt").read_text(encoding="utf-8")
    pieces = {piece: i for i, piece in enumerate(vocabulary.splitlines())}
    (tmp_path / "tok").mkdir()
    vocabularies.wordpiece(pieces, lowercase=True).save(tmp_path / "tok")
    said = command(
        "preprocess.py",
        "task",
        "squad",
        "--train",
        shared / "squad/train-subset-1.json",
        "--valid",
        shared / "squad/dev-v2.0.rebuilt.json",
        "--tokenizer",
        tmp_path / "tok",
        "--output",
        tmp_path / "s",
    )
    assert "valid: 35 articles, 11,873 questions, 5,945 without an answer" in said.out
    split = open_store(tmp_path / "s").split("valid")
    columns = split.columns
    assert len(columns["question.id"]) == 11_873
    assert np.array_equal(np.unique(columns["group"]), np.arange(11_873))
    assert len(columns["context.text"]) == 1_204
    answers = [json.loads(columns["question.answers"].text(i)) for i in range(11_873)]
    assert sum(not texts for texts in answers) == 5_945
    exact, seen = 0, set()
    for row in np.flatnonzero(columns["label"][:, 0] >= 0):
        text = answer(split, int(row), *columns["label"][row])
        wanted = answers[columns["group"][row]][0]
        assert wanted in text  # tokens are never narrower than the answer
        if columns["group"][row] not in seen:
            exact += text == wanted
        seen.add(int(columns["group"][row]))
    assert len(seen) == 5_928  # every answer is whole in some window
    assert exact / len(seen) > 0.99


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (squad(question(0, "1973", 3)), r"raw.json:1: q0: the context has .* at 3, not '1973'"),
        (squad(question(0, "1973", 10**6)), "raw.json:1: q0: the context has ''"),
        (squad(question(0, "1973"), question(0, None)), "raw.json:2: an earlier question has"),
        ({"data": [{"title": "x"}]}, "not of SQuAD's form .* KeyError\\('paragraphs'\\)"),
        ([1], "not of SQuAD's form"),
        ({"data": ["x"]}, "not of SQuAD's form"),
        ({"data": [3]}, "not of SQuAD's form"),
        ({"data": []}, "raw.json holds no question that can be used"),
        (squad({"id": "q", "question": "?"}), "raw.json:1: q: it has no 'answers' to train on"),
        (squad(question(0, "1973", "x")), "not of SQuAD's form .*invalid literal .* 'x'"),
        (squad(question(0, "1973", 1e999)), "not of SQuAD's form .* infinity"),
        (squad(question(0, "1973", question=None)), "raw.json:1: 'q0': the question is 'None', w"),
        (squad(question(0, "1973", question="a\ud800")), ":1: 'q0': the question holds half of a"),
        (
            squad({**question(0, "1973"), "id": "\ud800"}),
            r":1: '\\ud800': the id holds half of a s",
        ),
        (squad(question(0, "1973"), context="1973\ud800"), ":1: 'q0': the context holds half of a"),
        (squad(question(0, "1973"), context=["1973"]), ":1: 'q0': the context is .* is not text"),
    ],
)
def test_refused(monkeypatch, tmp_path, tokenizer, value, phrase):
    with pytest.raises(BadInput, match=phrase):
        make(monkeypatch, tmp_path, tokenizer, value)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"]


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        (["--stride", 400], "--stride 400 would leave gaps: .* hold only 317; give --stride 158"),
        (["--max-tokens", 128, "--stride", 62], "hold only 61; give --stride 30$"),
        (["--valid", "missing.json"], "missing.json does not exist"),
        (["--input", "nowhere"], "nowhere does not exist"),
    ],
)
def test_refused_options(monkeypatch, tmp_path, tokenizer, options, phrase):
    with pytest.raises(BadInput, match=phrase):
        make(monkeypatch, tmp_path, tokenizer, squad(question(0, "1973")), *options)
    assert not (tmp_path / "s").exists()


def test_short_rows_have_a_stride_that_fits(monkeypatch, tmp_path, tokenizer):
    """Every token of the context is in a window, and neighbouring windows overlap by half."""
    value = squad(question(0, "1973"))
    store = make(monkeypatch, tmp_path, tokenizer, value, "--max-tokens", 128)
    starts = np.asarray(store.split("train").columns["window"])
    assert np.diff(starts).tolist() == [30] * (len(starts) - 1)
    assert store.meta["origin"]["squad"]["stride"] == 30
    assert Assembler(store.split("train"), store.tokenizer(), 128).longest() <= 128


def articles(count: int) -> dict[str, Any]:
    """One question on each article."""
    each = [squad(question(i, "1973"))["data"][0] | {"title": f"t{i}"} for i in range(count)]
    return {"data": each}


def of_single_file(monkeypatch, tmp_path, tokenizer, count, *options):
    raw = write(tmp_path / "single.json", articles(count))
    arguments = ["--input", raw, "--tokenizer", tokenizer, "--output", tmp_path / "s", *options]
    monkeypatch.setattr("sys.argv", ["preprocess.py", "task", "squad", *map(str, arguments)])
    cli.main()
    store = open_store(tmp_path / "s")
    by_split = {}
    for name in store.splits:
        column = store.split(name).columns["question.id"]
        by_split[name] = {column.text(i) for i in range(len(column))}
    return by_split, store


def test_a_single_file_is_split_by_article(monkeypatch, tmp_path, tokenizer):
    by_split, store = of_single_file(monkeypatch, tmp_path, tokenizer, 40)
    assert {name: len(ids) for name, ids in by_split.items()} == {
        "train": 36,
        "valid": 2,
        "test": 2,
    }
    assert set.union(*by_split.values()) == {f"q{i}" for i in range(40)}
    assert store.meta["origin"]["seed"] == 0
    again, _ = of_single_file(monkeypatch, tmp_path, tokenizer, 40, "--overwrite")
    other, _ = of_single_file(monkeypatch, tmp_path, tokenizer, 40, "--overwrite", "--seed", 1)
    assert again == by_split
    assert other != by_split
    test = ("--overwrite", "--test", write(tmp_path / "test.json", squad(question(0, "1973"))))
    given, _ = of_single_file(monkeypatch, tmp_path, tokenizer, 40, *test)
    assert {name: len(ids) for name, ids in given.items()} == {"train": 36, "valid": 4, "test": 1}
    few, _ = of_single_file(monkeypatch, tmp_path, tokenizer, 3, "--overwrite")
    assert {name: len(ids) for name, ids in few.items()} == {"train": 1, "valid": 1, "test": 1}


def test_a_single_article_is_split_by_context(monkeypatch, tmp_path, tokenizer, capsys):
    paragraphs = [
        squad(question(i, "1973"), context=f"{CONTEXT} {i}")["data"][0]["paragraphs"][0]
        for i in range(20)
    ]
    raw = write(tmp_path / "single.json", {"data": [{"paragraphs": paragraphs}]})
    arguments = ["--input", raw, "--tokenizer", tokenizer, "--output", tmp_path / "s"]
    monkeypatch.setattr("sys.argv", ["preprocess.py", "task", "squad", *map(str, arguments)])
    cli.main()
    store = open_store(tmp_path / "s")
    sizes = {n: len(store.split(n).columns["question.id"]) for n in store.splits}
    assert sizes == {"train": 18, "valid": 1, "test": 1}
    assert "has only 1 article, so its contexts are divided" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "options", "phrase"),
    [
        (2, [], r"has too few contexts to divide \(1\); give --train FILE and --valid FILE"),
        (3, ["--valid", "x"], "--valid cannot be combined with --input .*; give it as --train"),
    ],
)
def test_a_single_file_that_cannot_be_split(
    monkeypatch, tmp_path, tokenizer, count, options, phrase
):
    with pytest.raises(BadInput, match=phrase):
        of_single_file(monkeypatch, tmp_path, tokenizer, count, *options)
    assert not (tmp_path / "s").exists()


def test_bad_questions_are_skipped_and_counted(monkeypatch, tmp_path, tokenizer, capsys):
    value = squad(question(0, "1973", 3), question(1, "1973"), question(1, None))
    value["data"] += squad(context=[])["data"]  # without questions, so nothing to count
    store = make(monkeypatch, tmp_path, tokenizer, value, "--skip-bad")
    assert store.meta["origin"]["skipped_rows"] == 2
    assert "raw.json:1: q0" in capsys.readouterr().err
    assert len(store.split("train").columns["question.id"]) == 1
    assert store.split("train").columns["label"][0, 0] >= 0

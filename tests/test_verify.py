"""docs/verify.py computes the scores of answers and of labelled words again, as the package and
SQuAD's own script do. (tests/test_resampling.py checks it on whole directories.)
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import script
from test_spans import OFFICIAL, official

from xformer.predictions import write
from xformer.tasks.known import kind_of
from xformer.tasks.task import Head, Predictions, Questions


def again(predictions: Predictions, path: Path) -> dict[str, float]:
    """The scores that the script computes from the file of these predictions."""
    write(path, predictions, "key")
    with np.load(path) as file:
        scores: dict[str, float] = script("verify").scores(dict(file))
    return scores


def test_a_damaged_file_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "b.claims.json").write_text("[1]")
    (tmp_path / "c.results.csv").write_text("key,value\nx,1.0\n")
    assert script("verify").main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert [printed.count(f"{name} is damaged") for name in ("a.zip", "b.claims.json")] == [1, 1]
    assert "c.results.csv" in printed


def test_what_an_analysis_measured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its claims are computed again from its numbers, which are not computed themselves."""
    verify = script("verify")
    known: dict[tuple[str, ...], tuple[float, str]] = {}
    for i in range(3):
        with zipfile.ZipFile(tmp_path / f"{i}.zip", "w") as file:
            file.writestr("key", str(i))
            file.writestr("pwcca.json", json.dumps({"metrics": {"last": {"pwcca": 1 + i / 10}}}))
        assert verify.of_zip(tmp_path / f"{i}.zip", known) == []
    pairs = [[[1.0, str(i), "last", "pwcca"]] for i in range(3)]
    claim = {"text": "a", "part": "", "verdict": "holds", "tie": False, "margin": 0.0}
    claim |= {"pairs": pairs, "shown": "+1.10 ± 0.25", "digits": 2}
    claim |= verify.effect(claim, verify.pairs_of(claim, known))
    path = tmp_path / "x.claims.json"
    path.write_text(json.dumps({"claims": [claim]}))
    assert set(verify.of_claims(path, known)) == {verify.MEASURED}
    path.write_text(json.dumps({"claims": [claim | {"effect": 1.2}]}))
    assert verify.DIFFERS in verify.of_claims(path, known)
    table = tmp_path / "x.results.csv"
    table.write_text("key,split,metric,value\n0,last,pwcca,1.0\n9,last,pwcca,1.0\n")
    assert verify.of_table(table, known) == [verify.MEASURED, verify.DIFFERS]
    assert "x.results.csv: 1 scores: 9 not kept" in capsys.readouterr().out
    (tmp_path / "9.zip").touch()
    assert verify.of_table(table, known) == [verify.MEASURED, verify.UNKNOWN]
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as file:
        file.writestr("key", "flat")
        file.writestr("pwcca.json", json.dumps({"metrics": {"pwcca": 1.0}}))
    assert verify.read(verify.of_zip, tmp_path / "flat.zip", known) == [verify.DIFFERS]


def test_a_part_that_cannot_be_checked_leaves_the_verdict_open(tmp_path: Path) -> None:
    """The other part holds, which does not rule out that the claim fails."""
    verify = script("verify")
    known = {("k", "test", str(i)): (1 + i / 10, verify.AGREES) for i in range(3)}
    pairs = [[[1.0, "k", "test", str(i)]] for i in range(3)]
    claim = {"text": "a", "verdict": "fails", "tie": False, "margin": 0.0, "pairs": pairs}
    claim |= verify.effect(claim, verify.pairs_of(claim, known))
    lost = {**claim, "part": "high", "pairs": [[[1.0, "lost", "test", "0"]]]}
    path = tmp_path / "x.claims.json"
    path.write_text(json.dumps({"claims": [{**claim, "part": "low"}, lost]}))
    words = verify.of_claims(path, known)
    assert words == [verify.AGREES] * 3 + [verify.DIFFERS, verify.UNKNOWN]
    (tmp_path / "lost.zip").touch()  # kept without predictions
    words = verify.of_claims(path, known)
    assert words == [verify.AGREES] * 3 + [verify.UNKNOWN] * 2


@pytest.mark.parametrize("model", OFFICIAL)
def test_answers_score_as_by_the_official_script(model: str, shared: Path) -> None:
    scores = script("verify").squad(*official(shared, model))
    kinds = ("", "answerable_", "unanswerable_")
    values = [100 * scores[f"{kind}{name}"] for kind in kinds for name in ("exact_match", "f1")]
    assert values == pytest.approx(OFFICIAL[model], rel=1e-12)


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("unanswerable", [True, False])
def test_questions(threshold: float | None, unanswerable: bool, tmp_path: Path) -> None:
    """Several windows a question, questions that are not scored, equal margins, and windows without
    any span."""
    draw = np.random.default_rng(4)
    group = np.repeat(np.arange(60), draw.integers(1, 4, 60))
    numbers = {name: draw.integers(-3, 4, len(group)) / 2 for name in ("no_answer", "best", "loss")}
    numbers["best"][draw.random(len(group)) < 0.1] = -np.inf
    arrays: dict[str, np.ndarray] = {k: v.astype(np.float32) for k, v in numbers.items()}
    arrays |= {
        "row": np.arange(len(group)),
        "group": group,
        "label": np.zeros((len(group), 2), int),
    }
    arrays |= {"first": group * 0, "last": group * 0}
    kinds = ["the Cat sat.", "cat", "a dog", "Dog, and cat", "!", ""]
    right: list[list[str] | None] = [
        None if i % 9 == 0 else [str(x) for x in draw.choice(kinds[:4], draw.integers(1, 4))]
        for i in range(60)
    ]
    right = [[] if unanswerable and i % 4 == 1 else one for i, one in enumerate(right)]
    said = [str(x) for x in draw.choice(kinds, 60)]
    questions = Questions([str(i) for i in range(60)], said, right)
    task = kind_of("span", False)(Head("span", ()))
    made = Predictions(task, "valid", arrays, questions, threshold)
    expected = made.metrics()
    assert ("best_f1" in expected) == unanswerable
    assert again(made, tmp_path / "valid.npz") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "names",
    [
        ("B-A", "B-B", "I-A", "I-B", "O"),
        ("B-A", "E-A", "I-A", "O", "S-A"),
        ("N", "V", "A", "D", "P"),
    ],
)
def test_labels_of_words(names: tuple[str, ...], tmp_path: Path) -> None:
    """Rows of words, among them truncated ones, unlabelled ones and ones of an unseen class."""
    draw = np.random.default_rng(5)
    arrays: dict[str, np.ndarray] = {
        "row": np.sort(draw.integers(0, 40, 300)),
        "label": draw.integers(-2, 5, 300),
        "predicted": draw.integers(-1, 5, 300),
        "loss": draw.random(300).astype(np.float32),
    }
    made = Predictions(kind_of("tag", False)(Head("tag", names)), "test", arrays)
    expected = made.metrics()
    assert ("entity_f1" in expected) == ("O" in names)
    assert again(made, tmp_path / "test.npz") == pytest.approx(expected, rel=1e-12)

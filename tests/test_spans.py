"""Answers as spans. The best span and window are compared with slow loops, and SQuAD's metrics with
the official script. A toy SQuAD is learned and predicted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from helpers import (
    NO_DROPOUT,
    Forks,
    good,
    kept_as_scored,
    refused,
    resamples_as_scored,
    task,
    training,
)

from xformer.data.errors import BadInput
from xformer.data.store import LONGEST_ANSWER, Split, open_store
from xformer.predictions import read
from xformer.preprocess.tasks.squad import load
from xformer.tasks import span
from xformer.tasks.task import Predictions

SQUAD = "recipes/finetune/squad.toml"


# ------------------------------------------------------------------------------ spans, windows


@pytest.mark.parametrize("length", [5, 31, 64])
def test_the_best_span_equals_a_triple_loop(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    rows = 12
    logits = torch.randn(rows, length, 2, generator=generator)
    second = torch.randint(1, 4, (rows,), generator=generator)
    lengths = (torch.rand(rows, generator=generator) * (length - second)).ceil().long()
    lengths[0] = length - second[0]
    # the highest start and end are further apart than an answer may be
    logits[0, second[0], 0] = logits[0, length - 1, 1] = 50.0
    spans = span.best_spans(logits, second, lengths)
    for row in range(rows):
        best = (-np.inf, -1, -1)
        for first in range(int(lengths[row])):
            for last in range(first, min(int(lengths[row]), first + LONGEST_ANSWER)):
                start, end = logits[row, second[row] + first, 0], logits[row, second[row] + last, 1]
                best = max(best, (float(start + end), first, last))
        assert spans[row, 0] == logits[row, 0].sum()
        assert spans[row, 1] == pytest.approx(best[0], rel=1e-6)
        assert spans[row, 2:].tolist() == list(best[1:])


def test_an_empty_window_has_no_answer() -> None:
    spans = span.best_spans(torch.zeros(1, 4, 2), torch.tensor([3]), torch.tensor([0]))
    assert spans[0, 1] == -torch.inf
    assert spans[0, 2] < 0


def squad(rng: np.random.Generator, paragraphs: int, questions: int) -> dict[str, object]:
    """Questions of the form "Which word follows this one?" A word that is not in the context has no
    answer.
    """
    contexts = []
    for p in range(paragraphs):
        words = [str(word) for word in rng.permutation(toys.WORDS)]
        asked, context = words[:questions], " ".join(words[2:])
        qas = []
        for q, word in enumerate(asked):
            place = 0 if word not in words[2:] else context.index(word) + len(word) + 1
            text = context[place:].split()[0]
            answers = [{"text": text, "answer_start": place}] if place else []
            qas.append({"id": f"{p}-{q}", "question": word, "answers": answers})
        contexts.append({"context": context, "qas": qas})
    return {"version": "v2.0", "data": [{"title": "toy", "paragraphs": contexts}]}


@pytest.fixture(scope="module")
def store(forks: Forks, data: toys.Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy SQuAD whose contexts are cut into three windows each."""
    directory = tmp_path_factory.mktemp("squad")
    raw = squad(np.random.default_rng(1), 4, 5)
    (directory / "train.json").write_text(json.dumps(raw))
    hidden = squad(np.random.default_rng(2), 1, 3)
    for qa in hidden["data"][0]["paragraphs"][0]["qas"]:  # type: ignore[index]
        del qa["answers"]
    (directory / "test.json").write_text(json.dumps(hidden))
    good(
        forks.run(
            "preprocess.py",
            "task",
            "squad",
            "--train",
            directory / "train.json",
            "--valid",
            directory / "train.json",
            "--test",
            directory / "test.json",
            "--tokenizer",
            data.tokenizer,
            "--max-tokens",
            "20",
            "--stride",
            "5",
            "--max-question",
            "2",
            "--output",
            directory / "store",
        )
    )
    return directory / "store"


def slow_answers(outputs: np.ndarray, split: Split) -> tuple[list[str], list[float]]:
    """For each question, the best answer over its windows, and how much better "no answer"
    scores.
    """
    groups, texts, margins = split.columns["group"], [], []
    for group in range(int(np.max(groups)) + 1):
        best, null, text = -np.inf, np.inf, ""
        for row in range(split.rows):
            if groups[row] == group:
                null = min(null, outputs[row, 0])
                if outputs[row, 1] > best:
                    best = outputs[row, 1]
                    text = span.answer(split, row, int(outputs[row, 2]), int(outputs[row, 3]))
        texts.append(text)
        margins.append(null - best)
    return texts, margins


def random_outputs(split: Split, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = split.columns["tokens_b"].lengths(np.arange(split.rows))
    first = (rng.random(split.rows) * lengths).astype(int)
    last = np.minimum(first + rng.integers(0, 3, split.rows), lengths - 1)
    scores, losses = rng.normal(size=(split.rows, 2)), rng.random(split.rows)
    return np.column_stack([scores, first, last, losses]).astype(np.float32)


def predictions(outputs: np.ndarray, split: Split, threshold: float | None = None) -> Predictions:
    return task("span").predictions(outputs, split, threshold)


def test_windows_are_merged_by_question(store: Path) -> None:
    split = open_store(store).split("train")
    assert split.rows > 2 * 20
    for seed in range(5):
        outputs = random_outputs(split, seed)
        texts, margins = span.answers(outputs, split)
        slow = slow_answers(outputs, split)
        assert texts == slow[0]
        assert margins == pytest.approx(slow[1])
        by_question = span.by_question(outputs, split)
        wanted = ["" if m > 0 else t for t, m in zip(*slow, strict=True)]
        assert list(by_question.values()) == wanted
        assert list(by_question)[:6] == ["0-0", "0-1", "0-2", "0-3", "0-4", "1-0"]
        scores = predictions(outputs, split).metrics()
        golds = [g or [] for g in span.right_answers(split)]
        assert scores["exact_match"] == span.squad(wanted, golds)["exact_match"]


def test_a_window_without_an_answer_is_not_broken(store: Path) -> None:
    """Its best score is -inf. Any other number that is not finite is an error."""
    split = open_store(store).split("train")
    outputs = random_outputs(split, 0)
    outputs[3, span.BEST] = -np.inf
    assert not task("span").broken(outputs, split).any()
    for column, value in ((span.BEST, np.inf), (span.BEST, np.nan), (0, -np.inf), (4, np.nan)):
        bad = outputs.copy()
        bad[5, column] = value
        assert np.flatnonzero(task("span").broken(bad, split)).tolist() == [5]


def test_a_threshold_is_applied(store: Path) -> None:
    split = open_store(store).split("train")
    outputs = random_outputs(split, 7)
    texts, margins = slow_answers(outputs, split)
    golds = [g or [] for g in span.right_answers(split)]
    best = predictions(outputs, split).metrics()["best_threshold"]
    for threshold in (best, -99.0, 99.0, sorted(margins)[4]):
        wanted = ["" if m > threshold else t for t, m in zip(texts, margins, strict=True)]
        assert list(span.by_question(outputs, split, threshold).values()) == wanted
        loss = {"loss": outputs[:, 4].mean()}
        assert predictions(outputs, split, threshold).metrics() == pytest.approx(
            loss | span.squad(wanted, golds) | spans_best(texts, margins, golds)
        )
        resamples_as_scored(predictions(outputs, split, threshold))
    scores = predictions(outputs, split, best).metrics()
    assert scores["f1"] == pytest.approx(scores["best_f1"])
    # a threshold also works if the answers are not known; without one all questions are answered
    hidden = open_store(store).split("test")
    outputs = random_outputs(hidden, 7)
    _, margins = slow_answers(outputs, hidden)
    said = span.by_question(outputs, hidden, sorted(margins)[1]).values()
    assert [text == "" for text in said] == [m > sorted(margins)[1] for m in margins]
    assert "" not in span.by_question(outputs, hidden).values()


def spans_best(texts: list[str], margins: list[float], golds: list[list[str]]) -> dict[str, float]:
    return span.squad_with_threshold(texts, np.array(margins), golds)


def test_hidden_answers_are_not_scored(store: Path) -> None:
    split = open_store(store).split("test")
    with pytest.raises(BadInput, match="the split 'test' has no answers to score against"):
        predictions(random_outputs(split, 0), split).metrics()
    assert set(span.by_question(random_outputs(split, 0), split)) == {"0-0", "0-1", "0-2"}


def test_tables_and_losses_know_which_questions_have_answers(store: Path) -> None:
    split = open_store(store).split("train")
    outputs = random_outputs(split, 3)
    outputs[:, 0] = 99.0  # "no answer" wins everywhere, and some questions have none
    assert set(span.by_question(outputs, split).values()) == {""}
    columns = {**split.columns, "question.input": split.columns["question.id"]}
    assert set(task("span").table(outputs, replace(split, columns=columns))["answer"]) == {""}
    made = predictions(outputs, split)
    assert made.questions is not None
    right = [answers if i % 2 else None for i, answers in enumerate(made.questions.right)]
    half = replace(made, questions=replace(made.questions, right=right))
    windows = outputs[made.arrays["group"] % 2 == 1]
    assert half.metrics()["loss"] == pytest.approx(windows[:, 4].mean())


# ------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_threshold_equals_trying_all(ties: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 15))
        vocabulary = ["x", "y", "x y", "x y z", ""]
        answers = [str(word) for word in rng.choice(vocabulary, n)]
        wanted = [[str(rng.choice(vocabulary[:4]))] if rng.random() < 0.6 else [] for _ in range(n)]
        margin = rng.integers(-2, 3, n).astype(float) if ties else rng.normal(size=n)
        scores = span.squad_with_threshold(answers, margin, wanted)
        tried = []
        for threshold in [margin.min() - 1, *margin]:
            chosen = ["" if m > threshold else a for a, m in zip(answers, margin, strict=True)]
            tried.append(span.squad(chosen, wanted))
        assert scores["best_exact_match"] == pytest.approx(max(t["exact_match"] for t in tried))
        assert scores["best_f1"] == pytest.approx(max(t["f1"] for t in tried))
        at = scores["best_threshold"]
        chosen = ["" if m > at else a for a, m in zip(answers, margin, strict=True)]
        assert span.squad(chosen, wanted)["f1"] == pytest.approx(scores["best_f1"])


# the official script's EM and F1 in percent: of all questions, with an answer, without one
OFFICIAL = {
    "BERT": [
        78.74168280973637,
        81.77528052374727,
        74.10593792172739,
        80.18183293833516,
        83.36417157275021,
        83.36417157275021,
    ],
    "BiDAF": [
        65.70369746483618,
        67.8764892145134,
        61.42037786774629,
        65.77219238257676,
        69.97476871320437,
        69.97476871320437,
    ],
    "nlnet": [
        75.82750779078582,
        78.77776770381455,
        69.61875843454791,
        75.52773885752195,
        82.01850294365012,
        82.01850294365012,
    ],
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_metrics_equal_the_official_script(shared: Path, name: str) -> None:
    texts, wanted = official(shared, name)
    ours = span.squad(texts, wanted)
    kinds = ("", "answerable_", "unanswerable_")
    values = [100 * ours[f"{kind}{m}"] for kind in kinds for m in ("exact_match", "f1")]
    assert values == pytest.approx(OFFICIAL[name], rel=1e-12)


def official(shared: Path, name: str) -> tuple[list[str], list[list[str]]]:
    """The answers of a public model to dev-v2.0, and the correct answers."""
    data = json.loads((shared / "squad/dev-v2.0.rebuilt.json").read_text(encoding="utf-8"))["data"]
    file = next(
        f for f in (shared / "squad").glob("predictions*") if name.lower() in f.name.lower()
    )
    given = json.loads(file.read_text(encoding="utf-8"))
    asked = [qa for article in data for p in article["paragraphs"] for qa in p["qas"]]
    return [given[qa["id"]] for qa in asked], [[a["text"] for a in qa["answers"]] for qa in asked]


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.slow
def test_thresholds_equal_the_official_script(shared: Path, name: str) -> None:
    """The same as `evaluate-v2.0.py --na-prob-file`.

    A question above the threshold counts as not answered, which is correct if it has no answer. The
    best threshold comes from trying all.
    """
    texts, wanted = official(shared, name)
    rng = np.random.default_rng(3)
    # like a model's: mostly high if the question has no answer
    margin = np.array([(1.0 if text == "" else -1.0) for text in texts]) + rng.normal(size=11873)
    each = np.array([span.answer_scores(t, w) for t, w in zip(texts, wanted, strict=True)])
    none = np.array([float(not w) for w in wanted])
    for threshold in (0.0, -0.7, 1.5):
        scores = np.where(margin[:, None] > threshold, none[:, None], each)
        ours = span.squad(span.answered(texts, margin, wanted, threshold), wanted)
        assert [ours["exact_match"], ours["f1"]] == pytest.approx(scores.mean(0), rel=1e-12)
        for kind, which in (("answerable_", none == 0), ("unanswerable_", none == 1)):
            assert ours[f"{kind}f1"] == pytest.approx(scores[which, 1].mean(), rel=1e-12)
    everything = span.answered(texts, margin, wanted, 99.0)  # all margins are below this threshold
    assert 100 * span.squad(everything, wanted)["f1"] == pytest.approx(OFFICIAL[name][1])
    nothing = span.squad(span.answered(texts, margin, wanted, -99.0), wanted)
    assert nothing["exact_match"] == nothing["f1"] == pytest.approx(5945 / 11873)
    # the script's find_best_thresh, line by line
    current = best = none.sum()
    at = 0.0
    for i in np.argsort(margin, kind="stable"):
        current += each[i, 1] if wanted[i] else (-1 if texts[i] else 0)
        if current > best:
            best, at = current, margin[i]
    ours = span.squad_with_threshold(texts, margin, wanted)
    assert ours["best_f1"] == pytest.approx(best / 11873, rel=1e-12)
    assert ours["best_threshold"] == at
    best_answers = span.squad(span.answered(texts, margin, wanted, at), wanted)
    assert best_answers["f1"] == pytest.approx(ours["best_f1"], rel=1e-12)


# ---------------------------------------------------------------------------------- end to end


def test_windows_that_would_be_truncated_are_refused(
    forks: Forks, store: Path, data: toys.Toys, tmp_path: Path
) -> None:
    """They would lose their answers. A store is made as long as its model allows."""
    short = training(SQUAD, store, tmp_path / "run", "batch.max_tokens=17", "train.steps=1")
    words = "the longest window of train has 20 tokens, but rows have 17 here; make the store again"
    refused(forks.run(*short), words, "with --max-tokens 17")
    run = tmp_path / "run"
    good(forks.run(*training(SQUAD, store, run, "batch.max_tokens=20", "train.steps=1")))
    raw = store.parent / "train.json"
    line = ("preprocess.py", "task", "squad", "--train", raw, "--max-question", "4", "--output")
    long = good(forks.run(*line, tmp_path / "long", "--tokenizer", data.tokenizer))
    assert "takes no more" not in long.err
    made = good(forks.run(*line, tmp_path / "made", "--tokenizer", run))
    longest = json.loads((run / "config.json").read_text())["config"]["model"]["max_positions"]
    assert f"windows of {longest} tokens, because the model of {run} takes no more" in made.err
    options = open_store(tmp_path / "made").meta["origin"]["columns"]["options"]
    assert options["max_tokens"] == longest < 384
    words = "longest window of train has 26 tokens, but rows have 20 here"
    scored = good(forks.run("evaluate.py", run, f"data={tmp_path / 'made'}", "split=train"))
    assert f"{words}; make the store again with --max-tokens 20, or answers are lost" in scored.err


def test_json_lines_are_not_squad(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"id": 1}\n{"id": 2}\n')
    with pytest.raises(BadInput, match="several JSON values, such as JSON lines; SQuAD's files"):
        load(tmp_path / "train.json")


@pytest.mark.slow
def test_a_toy_squad_is_learnt_and_predicted(forks: Forks, store: Path, tmp_path: Path) -> None:
    run, said = tmp_path / "run", tmp_path / "answers.json"
    good(
        forks.run(
            *training(
                SQUAD,
                store,
                run,
                *NO_DROPOUT,
                "batch.rows=16",
                "optim.lr=3e-3",
                "train.epochs=200",
                "train.validate_every=1000",
            )
        )
    )
    kept_as_scored(run)
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert result["valid"]["exact_match"] == 1.0
    assert "test" not in result  # the test answers are hidden
    done = good(
        forks.run("evaluate.py", run, f"data={store}", "split=train", f"predictions={said}")
    )
    assert "train exact_match 1.0000" in done.out
    assert "train unanswerable_f1 1.0000" in done.out
    the_threshold_is_recorded(forks, run, store, tmp_path / "kept.npz")
    raw = json.loads((store.parent / "train.json").read_text())
    wanted = {
        qa["id"]: qa["answers"][0]["text"] if qa["answers"] else ""
        for p in raw["data"][0]["paragraphs"]
        for qa in p["qas"]
    }
    assert json.loads(said.read_text()) == wanted
    assert "" in wanted.values()
    assert answers_of_transformers(forks, run, raw, tmp_path) == wanted
    # above all margins every question is answered, and below all none
    for threshold, unanswerable in (("1e9", 0.0), ("-1e9", 1.0)):
        done = good(
            forks.run(
                "evaluate.py",
                run,
                f"data={store}",
                "split=train",
                f"predictions={said}",
                f"threshold={threshold}",
            )
        )
        assert f"train unanswerable_f1 {unanswerable:.4f}" in done.out
        assert ("" in json.loads(said.read_text()).values()) == bool(unanswerable)
    refused(forks.run("evaluate.py", run, f"data={store}"), "no answers to score against")
    refused(forks.run("evaluate.py", run, "input=x.tsv"), "x.tsv does not exist")


def the_threshold_is_recorded(forks: Forks, run: Path, store: Path, file: Path) -> None:
    for limit in ("-1e9", "1e9"):
        done = good(
            forks.run(
                "evaluate.py",
                run,
                f"data={store}",
                "split=valid",
                f"predictions={file}",
                f"threshold={limit}",
            )
        )
        kept = read(file)
        assert kept.threshold == float(limit)
        shown = [f"valid {name} {value:.4f}" for name, value in kept.metrics().items()]
        assert done.out.splitlines() == shown
    split = open_store(store).split("valid")
    assert np.array_equal(kept.arrays["label"], split.columns["label"])
    names = ("no_answer", "best", "first", "last", "loss")
    outputs = np.column_stack([kept.arrays[name] for name in names])
    assert kept.questions is not None
    assert kept.questions.right == span.right_answers(split)
    said = dict(zip(kept.questions.id, kept.questions.answer, strict=True))
    assert said == span.by_question(outputs, split, 1e9)


def answers_of_transformers(
    forks: Forks, run: Path, raw: dict[str, Any], directory: Path
) -> dict[str, str]:
    """The answers that transformers computes with the exported model, without any code of this
    project.
    """
    transformers = pytest.importorskip("transformers")
    good(forks.run("-m", "xformer.convert", "to-hf", run, directory / "theirs"))
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(directory / "theirs").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "theirs")
    answers = {}
    for paragraph in raw["data"][0]["paragraphs"]:
        for qa in paragraph["qas"]:
            # the windows of the store, which start at every fifth word
            best, null, text = -np.inf, np.inf, ""
            given = tokenizer(
                qa["question"],
                paragraph["context"],
                truncation="only_second",
                max_length=20,
                stride=11,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                return_tensors="pt",
                padding=True,
            )
            spans_of = given.pop("offset_mapping")
            given.pop("overflow_to_sample_mapping")
            with torch.inference_mode():
                outputs = model(**given)
            for i, (start, end) in enumerate(
                zip(outputs.start_logits, outputs.end_logits, strict=True)
            ):
                null = min(null, float(start[0] + end[0]))
                inside = [j for j, s in enumerate(given.sequence_ids(i)) if s == 1]
                for first in inside:
                    for last in (j for j in inside if j >= first):
                        if (value := float(start[first] + end[last])) > best:
                            begins, ends = int(spans_of[i, first, 0]), int(spans_of[i, last, 1])
                            best, text = value, paragraph["context"][begins:ends]
            answers[qa["id"]] = "" if null > best else text
    return answers


def test_other_stores_are_refused(forks: Forks, data: toys.Toys, tmp_path: Path) -> None:
    refused(forks.run(*training(SQUAD, data.classes, tmp_path / "run")), "store of kind span")

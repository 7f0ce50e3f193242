"""Masking of spans, and a share of masked tokens that changes during training."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import CLASSIFY, NO_DROPOUT, SMOKE, Forks, good, refused, training
from test_train import AT_STEP, log, same
from toys import Toys

from xformer.config import parse_overrides, validate
from xformer.data import masking
from xformer.data.capacity import Capacities
from xformer.data.files import read_json
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.rows import batches_of

V, MASK_ID = 1000, 4
ORDINARY = np.arange(10, V)


def masked(
    lengths: np.ndarray, probability: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of these lengths of token 9: their tokens after `mask_spans`, the places, the targets,
    and the position of each token in its row. The first and the last token are special."""
    ends = np.cumsum(lengths)
    tokens = np.full(ends[-1], 9, np.int32)
    positions = (np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)).astype(np.int32)
    tokens[positions == 0], tokens[ends[lengths > 0] - 1] = 2, 3
    special = np.arange(V) < 5
    keys = masking.row_keys(seed, np.zeros_like(lengths), np.arange(len(lengths)))
    places, targets = masking.mask_spans(
        tokens, positions, keys, lengths, special, MASK_ID, ORDINARY, probability
    )
    return tokens, places, targets, positions


@pytest.mark.parametrize("probability", [0.05, 0.15, 0.4, 0.9])
@pytest.mark.parametrize("length", [8, 128])
def test_each_token_of_a_row_is_chosen_with_the_probability(
    probability: float, length: int
) -> None:
    """Also the first and last ones, which fewer spans of the row could cover."""
    rows = 400_000 // length
    _, places, targets, positions = masked(np.full(rows, length), probability)
    counts = np.bincount(positions[places], minlength=length)
    assert counts[0] == counts[-1] == 0
    tolerance = 5 * np.sqrt(probability * (1 - probability) / rows)
    assert np.abs(counts[1:-1] / rows - probability).max() < tolerance
    assert (targets == 9).all()


def test_lengths_of_spans_are_those_of_spanbert() -> None:
    """Where spans are rare enough that they do not touch: the geometric distribution with p = 0.2,
    up to 10 tokens."""
    _, places, _, _ = masked(np.full(1500, 1000), 0.01)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    lengths = np.array([len(run) for run in runs])
    shares = np.bincount(lengths, minlength=11)[1:11] / len(lengths)
    ideal = 0.2 * 0.8 ** np.arange(10)
    assert np.abs(shares - ideal / ideal.sum()).max() < 0.02
    assert 3.7 < lengths.mean() < 4.1  # some touch


def test_the_number_of_tokens_in_spans_varies_more_than_that_of_single_tokens() -> None:
    """Compiled batches leave room for them (xformer.data.capacity)."""
    batches = [masked(np.full(64, 128), 0.15, seed) for seed in range(400)]
    counts = [len(places) for _, places, *_ in batches]
    binomial = np.sqrt(64 * 126 * 0.15 * 0.85)
    assert np.std(counts) / binomial == pytest.approx(masking.SPREAD, rel=0.1)
    room = Capacities(np.array([8192]), np.array([64]), 1, 128, 1, 0.15, masking.SPREAD).known[0]
    assert np.mean(np.array(counts) > room.places) < 0.01


def test_a_span_is_replaced_as_a_whole() -> None:
    tokens, places, _, _ = masked(np.full(3000, 100), 0.15)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    fates = np.array(
        [0 if tokens[run[0]] == MASK_ID else 1 + (tokens[run[0]] == 9) for run in runs]
    )
    for run, fate in zip(runs, fates, strict=True):
        now = tokens[run]
        assert (now == MASK_ID).all() if fate == 0 else (now != MASK_ID).all()
        assert fate != 2 or (now == 9).all()
    assert np.bincount(fates) / len(fates) == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    others = np.concatenate(
        [tokens[run] for run, fate in zip(runs, fates, strict=True) if fate == 1]
    )
    assert others.min() >= 10
    counts = np.histogram(others, bins=9, range=(10, V))[0]  # evenly from the vocabulary
    assert np.abs(counts / counts.mean() - 1).max() < 0.15
    firsts = np.array([tokens[run[0]] for run, fate in zip(runs, fates, strict=True) if fate == 1])
    counts = np.histogram(firsts, bins=5, range=(10, V))[0]
    assert np.abs(counts / counts.mean() - 1).max() < 0.25


def test_spans_depend_on_seed_epoch_row_and_position_alone() -> None:
    """Not on the other rows of the batch, and rows may be empty."""
    lengths = np.array([30, 0, 7, 128, 2, 50])
    tokens, places, _, _ = masked(lengths, 0.3)
    bounds = np.cumsum([0, *lengths])
    for row in np.flatnonzero(lengths):
        alone = np.zeros_like(lengths)
        alone[row] = lengths[row]
        part, chosen, _, _ = masked(alone, 0.3)
        begin, end = bounds[row : row + 2]
        assert np.array_equal(part, tokens[begin:end])
        assert np.array_equal(chosen + begin, places[(places >= begin) & (places < end)])
    assert not np.array_equal(masked(lengths, 0.3, seed=1)[1], places)


# ------------------------------------------------------------------------------------ training

SCHEDULE = ["masking.probability=0.6", "masking.final=0.1", "masking.spans=true"]
LINE = ["train.steps=24", "train.select=last", "train.log_every=1", "train.validate_every=100"]


def shares(run: Path, store: Toys) -> list[float]:
    """The share of the words that each step masks."""
    every = []
    for step in range(1, 25):
        batches = [batch for *_, batch in batches_of(run, step)[3]]
        words = sum(len(b.tokens) - 2 * (len(b.cu_seqlens) - 1) for b in batches)
        every.append(sum(len(b.places) for b in batches if b.places is not None) / words)
    return every


@pytest.mark.parametrize("more", [[], ["batch.tokens=150", "batch.accumulate=2"]])
@pytest.mark.slow
def test_the_share_of_masked_tokens_falls_and_a_run_resumes_in_it(
    forks: Forks, data: Toys, tmp_path: Path, more: list[str]
) -> None:
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    line = ["batch.rows=32", *LINE, *SCHEDULE, *more, "train.checkpoint_every=5"]
    good(forks.run(*training(SMOKE, data.text, runs[0], *line)))
    killer = AT_STEP.format(step=13, signal="SIGKILL", ranks="0")
    stopped = training(SMOKE, data.text, runs[1], *line)
    assert forks.run(*stopped, before=killer).status == -signal.SIGKILL
    good(forks.run(*stopped))
    same(runs[1], runs[0])
    actual = np.array(shares(runs[0], data))
    ideal = 0.6 - 0.5 * np.arange(24) / 24
    assert abs(actual[:6].mean() - ideal[:6].mean()) < 0.08
    assert abs(actual[-6:].mean() - ideal[-6:].mean()) < 0.08
    refused(
        forks.run(*training(SMOKE, data.text, runs[0], *line, "train.steps=30")),
        "a run with masking.final keeps its length",
    )


def neighbours(run: Path) -> float:
    """The share of a run's first masked tokens whose right neighbour is masked, too."""
    pairs = words = 0
    for step in range(1, 9):
        for *_, batch in batches_of(run, step)[3]:
            assert batch.places is not None
            masked = np.zeros(len(batch.tokens), bool)
            masked[batch.places] = True
            inside = batch.positions[1:] > 0
            inside[np.append(batch.cu_seqlens[1:-1] - 2, len(inside) - 1)] = False  # the last word
            pairs += int((masked[:-1] & masked[1:] & inside).sum())
            words += int((masked[:-1] & inside).sum())
    return pairs / words


def test_spans_reach_training(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Without them a token is masked as often as any other, whatever its neighbour is."""
    shares = {}
    for spans in ("false", "true"):
        run = tmp_path / spans
        more = ["masking.probability=0.3", f"masking.spans={spans}", "train.steps=8"]
        good(forks.run(*training(SMOKE, data.text, run, *LINE, *more)))
        shares[spans] = neighbours(run)
    assert shares["false"] == pytest.approx(0.3, abs=0.06)
    assert shares["true"] > 0.6


def test_two_ranks_mask_what_one_masks(forks: Forks, data: Toys, tmp_path: Path) -> None:
    events = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        good(
            forks.run(*training(SMOKE, data.text, run, *LINE, *SCHEDULE, *NO_DROPOUT), ranks=ranks)
        )
        events.append([e["loss"] for e in log(run) if e["event"] == "train"])
    assert events[0] == pytest.approx(events[1], abs=1e-5)


def test_the_share_of_masked_tokens_is_planned_for_the_whole_run(data: Toys) -> None:
    values = [f"data={data.text}", "run=-", "head=mlm", "batch.max_tokens=20", "batch.rows=8"]
    values += ["masking.probability=0.6", "masking.final=0.1", "train.steps=50"]
    plan = prepare(validate(Recipe, parse_overrides(Recipe, values)), ALONE).feed().masking
    assert plan is not None
    assert [plan.share(at) for at in (0, 200, 400, 500)] == pytest.approx([0.6, 0.35, 0.1, 0.1])


def test_validation_masks_as_without_spans_and_schedule(data: Toys) -> None:
    def batch(*settings: str) -> np.ndarray:
        values = [f"data={data.text}", "run=-", "head=mlm", "batch.max_tokens=20", *settings]
        setup = prepare(validate(Recipe, parse_overrides(Recipe, values)), ALONE)
        valid = setup.assembler("valid")
        return setup.task.evaluation_batch(valid, np.arange(40), 0).tokens

    plain = batch("masking.probability=0.3")
    assert np.array_equal(plain, batch("masking.probability=0.3", "masking.spans=true"))
    assert np.array_equal(plain, batch("masking.probability=0.3", "masking.final=0.1"))


def test_runs_of_before_continue_and_wrong_values_are_refused(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, "train.select=last")
    good(forks.run(*line, "train.steps=2"))
    text = (run / "config.json").read_text()
    assert read_json(run / "config.json")["identity"]["masking"].keys() == {
        "probability",
        "final",
        "spans",
        "pair_weight",
    }
    (run / "config.json").write_text(
        text.replace('"final": null,', "").replace('"spans": false,', "")
    )
    (run / "run_manifest.json").unlink()
    assert '"spans"' not in (run / "config.json").read_text()
    good(forks.run(*line, "train.steps=3"))
    refused(forks.run(*line, "masking.final=1.5"), "masking.final=1.5")
    pair = ["masking.pair_weight=1", "masking.final=0.2"]
    refused(
        forks.run(*line, *pair), "masking.final=0.2 cannot be combined with masking.pair_weight"
    )
    classes = training(CLASSIFY, data.classes, tmp_path / "classes", "train.epochs=0.2")
    said = "masking.spans needs head=mlm; head=classify masks no tokens"
    refused(forks.run(*classes, "masking.spans=true"), said)
    assert not (tmp_path / "classes").exists()

"""Mixtures of stores: which store each sample comes from, training, and what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import NO_DROPOUT, SMOKE, Forks, good, refused, training
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_train import AT_STEP, log, same
from toys import WORDS, Toys

from xformer.config import parse_overrides, validate
from xformer.data.files import read_json
from xformer.data.mixture import Mixture
from xformer.data.sampler import Stream
from xformer.data.store import open_store
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.rows import batches_of

# ------------------------------------------------------------------------------- the sequence


def stores_of(mixture: Mixture, examples: np.ndarray) -> np.ndarray:
    return mixture.bounds.searchsorted(examples, "right") - 1


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5))
@example([1, 1, 1, 1, 17])
@settings(max_examples=40, deadline=None)
def test_each_store_gives_its_share_at_any_time(weights: list[int]) -> None:
    """A store is never more than one row from its share of the time that has passed: half a row of
    rounding, half a row of spreading. The samples so far differ from that time by the sum over the
    stores.
    """
    mixture = Mixture([3000 + i for i in range(len(weights))], 1, 1.0, weights)
    owners = stores_of(mixture, mixture.at(np.arange(5000))[0])
    counts = np.cumsum(owners[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / sum(weights)
    worst = np.abs(counts - np.arange(1, 5001)[:, None] * shares).max(axis=0)
    assert np.all(worst <= (1 - shares) + shares * (len(weights) - 1) + 1e-9)


def test_shares_stay_exact_in_a_long_run() -> None:
    """A third is not a whole number of rows in a deck. The difference does not add up."""
    mixture = Mixture([10, 20, 30], 0, 1.0, [1, 1, 1])
    many = mixture.starts[-1] * 50
    assert np.array_equal(mixture.at(np.arange(many - 9, many))[0].shape, [9])
    assert np.abs(mixture.drawn[-1] - mixture.starts[-1] / 3).max() <= 1


@pytest.mark.parametrize("final", [(), (1, 4, 0)])
def test_a_sample_depends_on_its_number_alone(final: tuple[int, ...]) -> None:
    def fresh() -> Mixture:
        return Mixture([70, 9, 31], 3, 0.5, [5, 2, 3], final, 3000)

    whole = fresh().at(np.arange(5000))
    for begin, end in ((0, 1), (17, 18), (1020, 1100), (2999, 3001), (4000, 5000)):
        part = fresh().at(np.arange(begin, end))
        for actual, expected in zip(part, whole, strict=True):
            assert np.array_equal(actual, expected[begin:end])


def test_each_pass_over_a_store_reads_its_rows_once_in_a_new_order() -> None:
    mixture = Mixture([40, 7], 5, 1.0, [1, 1])
    examples, epochs = mixture.at(np.arange(400))
    owners = stores_of(mixture, examples)
    for store, rows in enumerate((range(40), range(40, 47))):
        of_store = examples[owners == store]
        passes = [of_store[i : i + len(rows)].tolist() for i in range(0, 150, len(rows))]
        whole = [one for one in passes if len(one) == len(rows)]
        assert all(sorted(one) == list(rows) for one in whole)
        assert len({tuple(one) for one in whole}) == len(whole)
        assert epochs[owners == store].tolist() == [k // len(rows) for k in range(len(of_store))]
    other = Mixture([40, 7], 6, 1.0, [1, 1]).at(np.arange(400))[0]
    assert (other != examples).any()


def test_a_fraction_is_taken_of_each_store() -> None:
    mixture = Mixture([100, 40], 0, 0.25, [1, 3])
    examples, _ = mixture.at(np.arange(400))
    owners = stores_of(mixture, examples)
    assert [len(set(examples[owners == store].tolist())) for store in (0, 1)] == [25, 10]
    assert mixture.per_epoch == 35


def test_weights_change_over_the_planned_samples() -> None:
    planned = 8000
    mixture = Mixture([100, 100], 0, 1.0, [9, 1], [1, 4], planned)
    owners = stores_of(mixture, mixture.at(np.arange(planned + 1000))[0])
    shares = np.mean(owners.reshape(-1, 500), 1)  # of the second store
    ideal = 0.1 + 0.7 * np.minimum((np.arange(len(shares)) + 0.5) * 500 / planned, 1)
    assert np.abs(shares - ideal).max() < 0.01
    none = Mixture([100, 100], 0, 1.0, [1, 0], [0, 1], planned)
    owners = stores_of(none, none.at(np.arange(planned + 1000))[0])
    assert owners[:20].sum() == 0
    assert owners[planned:].all()


def test_a_far_sample_is_as_quick_to_find_as_a_near_one() -> None:
    """Only the numbers of samples per deck are counted up to it, not the samples."""
    sizes = np.array([10, 20] * 50)
    stream = Stream(Mixture([60, 40], 0, 1.0, [3, 2]), 2**62, sizes.__getitem__, rows=8)
    far = 10**8 + 3
    rows, epochs, _ = stream.take(far)
    assert len(rows) == 8
    assert epochs.max() == (far + 8) * 2 // 5 // 40


# ------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def both(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A store of 300 rows, and one of 60."""
    more = tmp_path_factory.mktemp("mixture") / "more"
    words = ("--input", data.raw / "valid.txt", "--tokenizer", data.tokenizer)
    good(forks.run("preprocess.py", "text", *words, "--output", more))
    return [str(data.text), str(more)]


def mixed(both: list[str], run: Path, *settings: str) -> list[str]:
    common = ["train.log_every=1", "train.select=last", "train.validate_every=1000"]
    return training(SMOKE, json.dumps(both), run, *common, *settings)


def shares(both: list[str], samples: slice, *settings: str) -> np.ndarray:
    """The share of each store in some samples of a run of 30 steps of 8 rows."""
    shape = ["run=-", "head=mlm", "batch.rows=8", "batch.max_tokens=20", "train.steps=30"]
    values = [f"data={json.dumps(both)}", *shape, *settings]
    setup = prepare(validate(Recipe, parse_overrides(Recipe, values)), ALONE)
    assert isinstance(setup.samples, Mixture)
    rows = setup.samples.at(np.arange(240)[samples])[0]
    return np.bincount(stores_of(setup.samples, rows), minlength=2) / len(rows)


@pytest.mark.parametrize("temperature", [1, 2, 5])
def test_a_temperature_makes_stores_of_unlike_sizes_more_alike(
    both: list[str], temperature: int
) -> None:
    """A store of n rows has the weight n^(1 / temperature)."""
    weights = np.array([open_store(path).split("train").rows for path in both]) ** (1 / temperature)
    actual = shares(both, slice(None), f"mixture.temperature={temperature}")
    assert actual == pytest.approx(weights / weights.sum(), abs=0.01)


def test_weights_move_from_the_first_to_the_final_ones(both: list[str]) -> None:
    moving = ("mixture.weights=[3, 1]", "mixture.final=[0, 1]")
    assert shares(both, slice(0, 24), *moving) == pytest.approx([0.71, 0.29], abs=0.05)
    assert shares(both, slice(108, 132), *moving) == pytest.approx([0.375, 0.625], abs=0.05)
    assert shares(both, slice(-24, None), *moving) == pytest.approx([0.04, 0.96], abs=0.05)


SETTINGS = {
    "weights": ["mixture.weights=[3, 2]", "train.steps=30"],
    "tokens": ["mixture.temperature=2", "train.steps=30", "batch.tokens=100"],
    "final": ["mixture.weights=[3, 2]", "mixture.final=[0, 1]", "train.steps=30"],
    "epochs": [
        "mixture.weights=[1, 1]",
        "mixture.final=[1, 3]",
        "train.epochs=0.7",
        "train.steps=0",
        "batch.tokens=150",
        "batch.accumulate=2",
    ],
    "masking": [
        "mixture.weights=[1, 0]",
        "mixture.final=[0, 1]",
        "masking.probability=0.3",
        "masking.final=0.1",
        "train.steps=30",
        "batch.tokens=200",
    ],
}


# weights that stay are those of "tokens" too, and steps of so many rows those of "final"
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "weights"])
@pytest.mark.slow
def test_a_resumed_mixture_equals_one_that_never_stopped(
    forks: Forks, both: list[str], tmp_path: Path, name: str
) -> None:
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    lines = [mixed(both, run, "train.checkpoint_every=4", *SETTINGS[name]) for run in runs]
    good(forks.run(*lines[0]))
    # with train.epochs the bar counts samples
    step = batches_of(runs[0], 11)[2] if name == "epochs" else 11
    killer = AT_STEP.format(step=step, signal="SIGKILL", ranks="0")
    assert forks.run(*lines[1], before=killer).status == -signal.SIGKILL
    assert "from step 8" in good(forks.run(*lines[1])).err
    same(runs[1], runs[0])


def test_the_masking_ends_where_the_mixture_ends(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The rows of the second store are four times as long, so the rows at the beginning do not say
    how many rows the run has."""
    short, long = tmp_path / "short", tmp_path / "long"
    for store, words in ((short, 4), (long, 16)):
        text = store.with_suffix(".txt")
        text.write_text("\n\n".join(" ".join(WORDS[:words]) for _ in range(200)))
        tokenizer = ("--tokenizer", data.tokenizer, "--output")
        good(forks.run("preprocess.py", "text", "--input", text, *tokenizer, store))
    stores = f"data={json.dumps([str(short), str(long)])}"
    values = [stores, "run=-", "head=mlm", "train.select=last", *SETTINGS["masking"]]
    values += ["batch.tokens=2000", "batch.max_tokens=40"]
    setup = prepare(validate(Recipe, parse_overrides(Recipe, values)), ALONE)
    assert isinstance(setup.samples, Mixture)
    feed, identity = setup.feed(), setup.identity
    assert feed.masking is not None
    assert feed.masking.planned == setup.samples.planned
    assert identity["mixture"]["samples"] == identity["masking"]["samples"] == setup.schedule_end
    position = 0
    for _ in range(29):
        position = feed.take(position).end
    last = feed.take(position)
    # a step leaves some tokens unused, so the run ends a little before the planned sample
    assert 0.95 * setup.schedule_end < last.end <= setup.schedule_end
    assert last.given is not None
    assert last.given[0, 1] > 0.9 * last.given[0].sum()
    assert feed.masking.share(position) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", ["weights", "final"])
def test_the_log_says_what_each_store_gave(
    forks: Forks, both: list[str], tmp_path: Path, name: str
) -> None:
    """Compared with the rows of each step, which are computed again."""
    run = tmp_path / "run"
    done = good(forks.run(*mixed(both, run, *SETTINGS[name])))
    actual: list[dict[str, Any]] = [e["stores"] for e in log(run) if e["event"] == "train"]
    counts, tokens = np.zeros(2, int), np.zeros(2, int)
    for step in range(1, 31):
        (batch,) = [batch for *_, batch in batches_of(run, step)[3]]
        second = batch.rows >= 300
        sizes = np.diff(batch.cu_seqlens)
        for store, here in enumerate((~second, second)):
            counts[store] += here.sum()
            tokens[store] += sizes[here].sum()
        assert actual[step - 1] == {
            path: {
                "rows": counts[store],
                "tokens": tokens[store],
                "passes": round(counts[store] / rows, 4),
            }
            for store, (path, rows) in enumerate(zip(both, (300, 60), strict=True))
        }
    assert counts.sum() == 240
    if name == "weights":
        assert np.abs(counts - [144, 96]).max() <= 1
    else:  # from 2/5 to 1 of the rows
        assert np.abs(counts - [72, 168]).max() <= 3
    assert read_json(run / "result.json")["stores"] == actual[-1]
    share = f"({100 * counts[1] / 240:.3g} %), {tokens[1]:,} tokens, {counts[1] / 60:.3g} passes"
    assert f"{both[1]} gave {counts[1]} rows {share}" in done.err


def test_two_ranks_read_what_one_reads(forks: Forks, both: list[str], tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for ranks, run in enumerate(runs, 1):
        good(forks.run(*mixed(both, run, *NO_DROPOUT, *SETTINGS["final"]), ranks=ranks))
    for step in (1, 7, 30):
        rows = [
            sorted(row for *_, batch in batches_of(run, step)[3] for row in batch.rows.tolist())
            for run in runs
        ]
        assert rows[0] == rows[1]
    logs = [[e for e in log(run) if e["event"] == "train"] for run in runs]
    assert [e["stores"] for e in logs[0]] == [e["stores"] for e in logs[1]]
    losses = [[e["loss"] for e in each] for each in logs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_mixture_can_be_made_longer_if_its_weights_stay(
    forks: Forks, both: list[str], tmp_path: Path
) -> None:
    """If they change, every store's place in the longer run would be another."""
    long, short = tmp_path / "long", tmp_path / "short"
    constant = ["mixture.weights=[3, 2]", "optim.schedule=constant"]
    good(forks.run(*mixed(both, long, *constant, "train.steps=9")))
    good(forks.run(*mixed(both, short, *constant, "train.steps=5")))
    good(forks.run(*mixed(both, short, *constant, "train.steps=9")))
    events = [[e for e in log(run) if e["event"] == "train"] for run in (long, short)]
    assert [e["loss"] for e in events[0]] == [e["loss"] for e in events[1]]

    run = tmp_path / "changing"
    changing = [*constant, "mixture.final=[1, 9]"]
    good(forks.run(*mixed(both, run, *changing, "train.steps=5")))
    line = mixed(both, run, *changing, "train.steps=9")
    refused(
        forks.run(*line),
        "it was to end after 40 rows, and now after 72; a run with mixture.final keeps its length",
    )


def test_without_a_mixture_the_rows_are_joined_as_before(
    forks: Forks, both: list[str], tmp_path: Path
) -> None:
    """An old run, whose config.json has no mixture, continues."""
    run = tmp_path / "run"
    good(forks.run(*mixed(both, run, "train.steps=3")))
    config = read_json(run / "config.json")
    for part in (config["config"], config["identity"], config["starts"][0]["config"]):
        assert not part.pop("mixture")["weights"]
    (run / "config.json").write_text(json.dumps(config))
    (run / "run_manifest.json").unlink()
    good(forks.run(*mixed(both, run, "train.steps=4")))
    assert "stores" not in log(run)[-1]
    batch = batches_of(run, 4)[3][0][2]
    assert len(batch.rows) == 8


def test_what_does_not_fit_is_refused(
    forks: Forks, data: Toys, both: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    weights = "mixture.weights=[1, 1]"
    for settings_, words in (
        ([weights, "mixture.temperature=2"], "mixture.temperature=2 contradict each other"),
        (["mixture.final=[1, 1]"], "mixture.final needs mixture.weights"),
        (["mixture.weights=[1]"], "mixture.weights=[1.0]: data names 2 stores; give one weight"),
        (
            [weights, "mixture.final=[1, 1, 1]"],
            "mixture.final=[1.0, 1.0, 1.0]: data names 2 stores",
        ),
        (["mixture.weights=[0, 0]"], "mixture.weights: give at least one weight above 0"),
        (["mixture.weights=[1, -1]"], "mixture.weights.1=-1"),
        (["mixture.weights=[1e308, 1]"], "mixture.weights.0=1e+308"),
        (["mixture.temperature=1e-9"], "mixture.temperature=1e-09: give at least 0.1"),
        (["mixture.temperature=-1"], "mixture.temperature=-1"),
    ):
        refused(forks.run(*mixed(both, run, *settings_)), words)
    refused(forks.run(*training(SMOKE, data.text, run, weights)), "mixture needs several stores")
    assert not run.exists()
    assert open_store(both[1]).split("train").rows == 60

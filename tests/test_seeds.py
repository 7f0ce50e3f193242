"""`seed` sets all seeds of a run; `seed.weights`, `.order`, `.masks` and `.dropout` set one
each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CLASSIFY, ROOT, SMOKE, Forks, good, refused, training
from test_train import same
from toys import Toys

from xformer import config, tracing, train
from xformer.data.files import read_json
from xformer.parallel.feed import to_device
from xformer.parallel.processes import ALONE
from xformer.recipe import Recipe, Seeds
from xformer.study.plan import content_key, identity


def recipe(data: Toys, *overrides: str) -> Recipe:
    arguments = training(SMOKE, data.text, Path("run"), *overrides)[1:]
    return config.load(Recipe, [str(ROOT / arguments[0]), *arguments[1:]])


def draws(data: Toys, *overrides: str) -> dict[str, Any]:
    """What a run draws: fresh weights, rows, masked tokens of its first step, and dropped units."""
    job = train.prepare(recipe(data, *overrides), ALONE)
    step = job.feed().take(0)
    (batch,) = step.batches
    model = job.start.model()
    tracing.loss_of(job, model, to_device(batch, ALONE.device), 0, 0)
    return {
        "weights": torch.cat([value.flatten().float() for value in job.start.weights.values()]),
        "order": torch.from_numpy(batch.rows),
        "masks": torch.cat([torch.from_numpy(batch.tokens), torch.from_numpy(batch.places)]),
        "dropout": torch.initial_seed(),
    }


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("weights", {"weights"}),
        ("order", {"order", "masks"}),  # other rows have other masks
        ("masks", {"masks"}),
        ("dropout", {"dropout"}),
    ],
)
def test_one_seed_changes_one_thing(data: Toys, name: str, others: set[str]) -> None:
    plain, other = draws(data, "seed=3"), draws(data, "seed=3", f"seed.{name}=4")
    assert {key for key in plain if not equal(plain[key], other[key])} == others
    alone = draws(data, "seed=4")  # the same seed draws the same, whichever key gives it
    assert equal(other[name], alone[name]) or name == "masks"
    assert equal(draws(data, f"seed.{name}=4", "seed=3")[name], other[name])  # in any order


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_seed_is_what_it_was(data: Toys) -> None:
    """A plain seed gives the same config.json, identity and study key as in earlier versions."""
    plain = recipe(data, "seed=3")
    assert plain.model_dump(mode="json")["seed"] == 3
    assert plain == recipe(data, "seed.all=3")
    assert config.validate(Recipe, plain.model_dump(mode="json")) == plain
    own = recipe(data, "seed=3", "seed.order=5")
    assert own.model_dump(mode="json")["seed"] == {"all": 3, "order": 5}
    assert config.validate(Recipe, own.model_dump(mode="json")) == own
    assert content_key(identity(own)) != content_key(identity(plain))
    assert [Seeds(all=3, order=5).of(name) for name in ("order", "masks")] == [5, 3]


def test_a_run_with_seeds_apart_goes_on(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A run with separate seeds that is stopped and continued equals one that never stopped. Other
    seeds are refused.
    """
    steps = ["train.steps=6", "train.checkpoint_every=3", "seed=1", "seed.dropout=2"]
    runs = [tmp_path / "whole", tmp_path / "parts"]
    good(forks.run(*training(SMOKE, data.text, runs[0], *steps)))
    at_three = (
        "import os\nfrom xformer.monitor import Monitor\nplain = Monitor.advance\n"
        "def advance(self, done):\n    plain(self, done)\n    if done == 4: os._exit(9)\n"
        "Monitor.advance = advance\n"
    )
    assert forks.run(*training(SMOKE, data.text, runs[1], *steps), before=at_three).status == 9
    refused(forks.run(*training(SMOKE, data.text, runs[1], *steps[:3])), "seed")
    good(forks.run(*training(SMOKE, data.text, runs[1], *steps)))
    same(runs[1], runs[0])
    kept = read_json(runs[1] / "checkpoints/step_6/config.json")["history"][-1]
    assert kept["seed"] == {"all": 1, "dropout": 2}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("seed=x", ["seed='x'", "integer"]),
        ("seed=-1", ["seed=-1", "greater than or equal to 0"]),
        ("seed.order=1.5", ["seed.order=1.5", "integer"]),
        ("seed.ordr=1", ["unknown key seed.ordr", "did you mean seed.order?"]),
    ],
)
def test_a_wrong_seed_is_refused(
    forks: Forks, data: Toys, tmp_path: Path, setting: str, words: list[str]
) -> None:
    line = training(CLASSIFY, data.classes, tmp_path / "run", setting)
    refused(forks.run(*line), *words)
    assert not (tmp_path / "run").exists()

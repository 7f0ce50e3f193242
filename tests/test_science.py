"""Settings that follow the optimizer, and results that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import CLASSIFY, ROOT, SMOKE, Forks, good, refused, training
from toys import Toys

from xformer.config import load
from xformer.data.files import read_json
from xformer.optim import MOMENTS, OptimConfig
from xformer.study.plan import content_key, identity
from xformer.train import Recipe

TWO_STEPS = ["train.steps=2", "train.select=last"]

# ------------------------------------------------------------------ what follows the optimizer


def started(forks: Forks, data: Toys, run: Path, *overrides: str) -> str:
    """What the start of a short run prints."""
    return good(forks.run(*training(SMOKE, data.text, run, *TWO_STEPS, *overrides))).err


@pytest.mark.parametrize("name", MOMENTS)
def test_weight_decay_and_betas_follow_the_optimizer(
    name: str, forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The values that apply stand in config.json and in the first lines that a user sees."""
    said = started(forks, data, tmp_path / "run", f"optim.name={name}")
    decay = 0.01 if name == "adamw" else 0.0
    betas = [0.95, 0.98] if name == "novograd" else [0.9, 0.999]
    content = read_json(tmp_path / "run/config.json")
    for part in ("config", "identity"):
        assert content[part]["optim"]["weight_decay"] == decay
        assert content[part]["optim"]["betas"] == betas
    assert f"{name}: highest rate 0.001 (linear), weight decay {decay:g}\n" in said
    assert "L2" not in said


def test_a_typed_weight_decay_is_an_l2_term(forks: Forks, data: Toys, tmp_path: Path) -> None:
    said = started(forks, data, tmp_path / "adam", "optim.name=adam", "optim.weight_decay=0.01")
    assert "adam: highest rate 0.001 (linear), weight decay 0.01\n" in said
    assert said.count("optim.weight_decay=0.01 with adam is an L2 term") == 1
    assert read_json(tmp_path / "adam/config.json")["config"]["optim"]["weight_decay"] == 0.01
    for name in ("adamw", "novograd"):
        given = f"optim.name={name}", "optim.weight_decay=0.01"
        assert "L2" not in started(forks, data, tmp_path / name, *given)


def test_help_shows_both_defaults(forks: Forks) -> None:
    lines = good(forks.run("train.py", "--help")).out.splitlines()
    assert "  optim.weight_decay: float = 0.01 for adamw, 0.0 for all others" in lines
    assert "  optim.betas: [float, float] = [0.95, 0.98] for novograd, [0.9, 0.999] for all others" \
        in lines  # fmt: skip


def test_runs_from_before_continue(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """AdamW's runs always said 0.01. Adam's said so too: what they were made with must be typed."""
    for name, more in (("adamw", []), ("adam", ["optim.weight_decay=0.01"])):
        run = tmp_path / name
        line = training(SMOKE, data.text, run, "train.select=last", f"optim.name={name}")
        good(forks.run(*line, *more, "train.steps=2"))
        assert read_json(run / "config.json")["identity"]["optim"]["weight_decay"] == 0.01
        if more:
            refused(forks.run(*line, "train.steps=3"), "optim.weight_decay=0.01 is now 0.0")
        good(forks.run(*line, *more, "train.steps=3"))
        assert read_json(run / "result.json")["steps"] == 3


def test_finished_results_of_studies_stay_valid() -> None:
    """Keys from before the defaults followed the optimizer."""

    def key(*overrides: str) -> str:
        given = [str(ROOT / CLASSIFY), "data=x", "run=-", *overrides]
        return content_key(identity(load(Recipe, given)))

    assert key() == "0c29172d3cd22bb9"
    assert key("optim.name=adam", "optim.weight_decay=0") == "37a08a82bf4319ad"
    assert key("optim.name=adam") == "37a08a82bf4319ad"
    assert key("optim.name=adam", "optim.weight_decay=0.01") == "c67d5d4eaffcebf8"


def test_an_unknown_optimizer_is_named_first(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", "optim.name=adamm")
    refused(forks.run(*line), "optim.name='adamm'")


def test_settings_survive_json() -> None:
    for name in MOMENTS:
        config = OptimConfig.model_validate({"name": name})
        assert OptimConfig.model_validate(json.loads(config.model_dump_json())) == config

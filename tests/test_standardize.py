"""Scores that are learnt in units of their deviation from their mean (loss.standardize)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CLASSIFY, ROOT, Forks, good, kept_as_scored, refused, script, training
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import config as settings
from xformer.checkpoint import Checkpoint
from xformer.convert import hf
from xformer.data.batch import Batch
from xformer.data.files import read_json
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.parallel.processes import ALONE
from xformer.predictions import read
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.tasks.task import Head, Predictions
from xformer.texts import pack

REGRESS = "recipes/finetune/regress.toml"
FEW = ("train.epochs=8", "batch.rows=16", "optim.lr=4e-3", "system.precision=fp32")
SHIFT, FACTOR = 300.0, 50.0


@pytest.fixture(scope="module")
def stores(data: Toys, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The store of scores in three units: `far` from those of a new head, `equal` ones, and `z`:
    in deviations from their mean over the training rows."""
    place = tmp_path_factory.mktemp("standardize")
    scores = np.asarray(open_store(data.scores).split("train").columns["label"], np.float64)
    units = {
        "far": lambda score: SHIFT + FACTOR * score,
        "equal": lambda score: 7.0,
        "z": lambda score: (score - scores.mean()) / scores.std(),
    }
    for name, unit in units.items():
        (place / "raw" / name).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            header, *lines = (data.raw / f"scores/{split}.tsv").read_text().splitlines()
            rows = [line.split("\t") for line in lines]
            table = [header, *(f"{text}\t{float(unit(float(score)))!r}" for text, score in rows)]
            (place / "raw" / name / f"{split}.tsv").write_text("\n".join(table) + "\n")
        line = ["preprocess.py", "task", "tsv", "--input", place / "raw" / name, "--text", "text"]
        line += ["--label", "score", "--kind", "score", "--tokenizer", data.tokenizer]
        good(forks.run(*map(str, line), "--output", str(place / name)))
    return {name: place / name for name in units}


@pytest.fixture(scope="module")
def runs(
    stores: dict[str, Path], forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A run that learns the scores of `far` standardized, and one on `z` that does not."""
    place = tmp_path_factory.mktemp("runs")
    raw = "loss.standardize=false"
    good(forks.run(*training(REGRESS, stores["far"], place / "far", *FEW)))
    good(forks.run(*training(REGRESS, stores["z"], place / "z", *FEW, raw)))
    return {name: place / name for name in ("far", "z")}


def spread(store: Path) -> tuple[float, float]:
    """The mean and standard deviation of the training scores."""
    scores = np.asarray(open_store(store).split("train").columns["label"], np.float64)
    return float(scores.mean()), float(scores.std())


def test_the_scores_have_the_unit_of_the_labels(
    runs: dict[str, Path], stores: dict[str, Path], tmp_path: Path
) -> None:
    """The run learns what a run on standardized labels learns, with the same losses."""
    mean, deviation = spread(stores["far"])
    assert mean == pytest.approx(SHIFT, rel=0.2)
    ours, other = (read(runs[name] / "predictions/test.npz") for name in ("far", "z"))
    z = other.arrays["outputs"]
    assert np.ptp(z) > 0.1
    assert ours.arrays["outputs"] == pytest.approx(mean + deviation * z, abs=0.01)
    one, two = (read_json(runs[name] / "result.json")["metrics"]["test"] for name in ("far", "z"))
    assert one == pytest.approx(two, rel=1e-3)
    assert 0 < one["loss"] < 2
    kept_as_scored(runs["far"])
    with np.load(runs["far"] / "predictions/test.npz") as file:
        assert script("verify").scores(dict(file)) == pytest.approx(one, rel=1e-6)
    checkpoint = checkpoints.load(runs["far"])
    assert checkpoint.head is not None
    assert checkpoint.head.scale == (mean, deviation)
    assert "scale" not in read_json(checkpoints.resolve(runs["z"]) / "config.json")["head"]


def test_equal_and_few_scores(stores: dict[str, Path], tmp_path: Path) -> None:
    """If all scores are equal, the unit is 1. With `fraction` only the rows of the run count."""

    def head(store: str, *more: str) -> tuple[Head, list[str]]:
        line = [str(ROOT / REGRESS), f"data={stores[store]}", f"run={tmp_path / 'run'}", *more]
        setup = prepare(settings.load(Recipe, line), ALONE)
        assert setup.start.head is not None
        return setup.start.head, [note for note in setup.notes if "training scores" in note]

    assert head("equal")[0].scale == (7.0, 1.0)
    mean, deviation = spread(stores["far"])
    assert head("far")[1] == [
        f"the loss is in units of the variance of the training scores (mean {mean:.4g}, "
        f"standard deviation {deviation:.4g}): it is about 1 if each score is the mean"
    ]
    half = head("far", "fraction=0.5")[0].scale
    assert half != (mean, deviation)
    assert half == pytest.approx((mean, deviation), rel=0.2)
    raw, notes = head("far", "loss.standardize=false")
    assert raw.scale == Head("regress").scale
    assert notes == [
        f"warning: a new head's scores are near 0, but the training scores have mean {mean:.4g} "
        f"and standard deviation {deviation:.4g}; loss.standardize=true usually learns them sooner"
    ]
    assert head("z", "loss.standardize=false")[1] == []


@pytest.mark.parametrize("unit", [4e-21, 1e20])
def test_tiny_and_huge_units(unit: float, runs: dict[str, Path]) -> None:
    """The loss is right for labels whose squares overflow or vanish in float32."""
    checkpoint = checkpoints.load(runs["far"])
    scaled = checkpoint.with_head(Head("regress", scale=(5 * unit, unit)), 1)
    batch = pack(checkpoint.tokenizer, ["bam dan", "dan"], [5 * unit, 6 * unit])
    model = scaled.model()
    loss = model.loss(batch).total
    standard = (model.logits(batch).squeeze(1).double() / unit - torch.tensor([5.0, 6.0])).square()
    assert loss.item() == pytest.approx(standard.sum().item(), rel=1e-3)
    predictions = model_predictions(scaled, batch)
    assert predictions.metrics()["loss"] == pytest.approx(standard.mean().item(), rel=1e-3)


def model_predictions(checkpoint: Checkpoint, batch: Batch[torch.Tensor]) -> Predictions:
    outputs = checkpoint.model().logits(batch).detach().numpy()
    arrays = {"outputs": outputs, "label": np.asarray(batch.labels)}
    assert checkpoint.task is not None
    return Predictions(checkpoint.task, "valid", arrays)


def test_only_scores_are_standardized(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(CLASSIFY, data.classes, tmp_path / "run", "loss.standardize=true")
    words = ("loss.standardize: head=classify has no such setting", "or use head=regress")
    refused(forks.run(*line), *words)
    assert not (tmp_path / "run").exists()


def test_the_loss_is_a_share_of_the_variance(runs: dict[str, Path]) -> None:
    """Labels that are all the mean have the loss of the head's own output; bf16 does not round the
    scores, which are far from 0."""
    checkpoint = checkpoints.load(runs["far"])
    assert checkpoint.head is not None
    mean, deviation = checkpoint.head.scale
    model = checkpoint.model()
    batch = pack(checkpoint.tokenizer, ["bam dan", "dan dan dan"])
    scores = model.logits(batch)
    standard = (scores.squeeze(1) - mean) / deviation
    labelled = replace(batch, labels=torch.full((2,), mean))
    assert model.loss(labelled).total.item() == pytest.approx(
        standard.square().sum().item(), rel=1e-4
    )
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.logits(batch)
    assert rough.dtype == torch.float32
    assert (rough - scores).abs().max() < 0.05 * deviation


def test_the_export_gives_the_same_scores(runs: dict[str, Path], tmp_path: Path) -> None:
    """In transformers the unit is part of the last layer's weights."""
    transformers = pytest.importorskip("transformers")
    checkpoint = checkpoints.load(runs["far"])
    config = ModelConfig(
        vocab_size=checkpoint.config.vocab_size, layers=1, hidden=16, heads=2, intermediate=16
    )
    head = Head("regress", scale=(SHIFT, FACTOR))
    ours = checkpoints.fresh(config, checkpoint.tokenizer, 3).with_head(head, 4)
    hf.to_hf(ours, tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    batch = pack(ours.tokenizer, ["bam dan"])
    scores = ours.model().logits(batch)
    expected = theirs(input_ids=batch.tokens[None]).logits
    assert torch.allclose(scores, expected, atol=1e-3)
    assert scores.item() == pytest.approx(SHIFT, abs=FACTOR)
    back = hf.from_hf(tmp_path / "hf").checkpoint
    assert back.head is not None
    assert back.head.scale == Head("regress").scale
    assert torch.allclose(back.model().logits(batch), scores, atol=1e-3)

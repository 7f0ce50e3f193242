"""Numerical trouble in training. It is detected and traced; then the step is dropped or the run
ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NO_DROPOUT, SMOKE, Forks, good, training
from safetensors.torch import load_file
from test_train import AT_STEP, drawn_once, log, result, same
from torch import Tensor, nn
from toys import Toys

from xformer.config import load
from xformer.data.sampler import Samples
from xformer.guard import WINDOW, Guard
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Sums
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.run import State
from xformer.tasks.task import Loss
from xformer.tracing import BACKWARD, FORWARD, NOWHERE, WEIGHT, first_layer

STEPS = ["train.steps=15", "train.checkpoint_every=4", "train.log_every=2"]

# Python that makes a layer's output infinite whenever a batch of training holds a given row
BAD_ROW = """
import torch
from xformer import tracing
from xformer.parallel import feed
from xformer.tasks.task import Model
poisoned, loss, to_device = [], Model.loss, feed.to_device
def spy(batch, device):
    packed = to_device(batch, device)
    if {row} in batch.rows:
        poisoned.append(packed)
    return packed
feed.to_device = tracing.to_device = spy
def bad_loss(self, batch):
    if not any(batch is each for each in poisoned):
        return loss(self, batch)
    mlp = self.encoder.layers[1].mlp
    hook = mlp.register_forward_hook(lambda module, x, y: y * torch.inf, prepend=True)
    result = loss(self, batch)
    hook.remove()
    return result
Model.loss = bad_loss
"""
# Python that changes a step: `passes` computes its gradients, and `now[0]` is its number
LEARN = """
import torch
from xformer.parallel.replicas import Replicas
from xformer.setup import Setup
from xformer.tasks.task import Loss
seed_dropout, passes, now = Setup.seed_dropout, Replicas.forward_backward, [0]
def remember(setup, step, i):
    now[0] = step
    seed_dropout(setup, step, i)
Setup.seed_dropout = remember
"""
# a weight becomes NaN once, after the fifth step
BAD_WEIGHT = f"""{LEARN}
done = []
def spoil(self, *given):
    if now[0] == 5 and not done:
        done.append(5)
        with torch.no_grad():
            self.model.encoder.layers[0].mlp.up.weight[3, 5] = torch.nan
    return passes(self, *given)
Replicas.forward_backward = spoil
"""
# every loss after the fifth step is infinite
BAD_LOSSES = f"""{LEARN}
def spoil(self, *given):
    loss = passes(self, *given)
    return loss if now[0] < 5 else Loss(loss.total / 0, loss.count, loss.correct)
Replicas.forward_backward = spoil
"""


def guard(spike: float, seen: list[float] | None = None) -> Guard:
    return Guard(spike, State(statistics=seen or []), torch.device("cpu"))


def judged(one: Guard, loss: float, norm: float) -> bool:
    """Whether a step is dropped that has this gradient norm, and this loss over 2 tokens."""
    sums = Sums(torch.device("cpu"))
    sums.add(Loss(torch.tensor(2 * loss), 2, torch.tensor(1.0)))
    return float(one.judge(sums, torch.tensor(norm))) == 1.0


def test_a_guard_leaves_dropped_steps_out() -> None:
    one = guard(0.0)
    fates = [
        judged(one, 3.0, 1.0),
        judged(one, np.nan, 1.0),
        judged(one, 3.0, np.inf),
        judged(one, 4.0, 2.0),
    ]
    assert fates == [False, True, True, False]
    assert one.sums.tolist() == [14.0, 4.0, 2.0, 2.0]
    whats = [what for *_, what in one.read()]
    assert whats == ["", "the loss is not finite", "the norm of the gradient is not finite", ""]
    assert one.read() == []


def test_spikes_are_told_by_the_deviations_of_the_steps_before() -> None:
    """Mean and deviation equal numpy's over the first steps. No step is judged before there are
    WINDOW of them.
    """
    draw = np.random.default_rng(0)
    losses, norms = draw.normal(5, 0.5, WINDOW).tolist(), draw.normal(2, 0.1, WINDOW).tolist()
    one = guard(4.0)
    assert not any(judged(one, a, b) for a, b in zip([*losses[:-1], 50.0], norms, strict=True))
    one = guard(4.0)
    assert not any(judged(one, a, b) for a, b in zip(losses, norms, strict=True))
    n, *means, loss_variance, norm_variance = one.seen.tolist()
    assert n == WINDOW
    assert means == pytest.approx([np.mean(losses), np.mean(norms)], rel=1e-6)
    assert loss_variance == pytest.approx(np.var(losses), rel=1e-5)
    assert norm_variance == pytest.approx(np.var(norms), rel=1e-5)
    limit = means[0] + 4 * loss_variance**0.5
    assert judged(one, limit + 0.01, 2.0)
    assert judged(one, 5.0, 3.0)
    assert not judged(one, 0.0, 2.0)  # a low value is fine
    other = guard(4.0, one.seen.tolist())  # as if restored after a restart
    assert judged(one, limit + 0.1, 2.0) == judged(other, limit + 0.1, 2.0)
    assert "is far above its mean" in one.read()[WINDOW][-1]


class Deep(nn.Module):
    """Three layers, one of which can be made to fail in the forward or the backward pass."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Loss:
        self.seen += 1
        total = self.layers(x).sum()
        return Loss(total, 1, total.detach())


class Explode(torch.autograd.Function):
    """The identity, but with an infinite gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient / 0


def test_the_first_layer_is_named() -> None:
    model, inputs = Deep(), [torch.ones(1, 3), torch.full((1, 3), torch.inf)]
    assert first_layer(model, 2, lambda i: model(inputs[i])) == (
        FORWARD,
        1,
        "the output of layers.0",
    )
    assert model.seen == 0  # tracing leaves the buffers as they were
    stage, _, where = first_layer(model, 1, lambda i: model(inputs[0]))
    assert stage == NOWHERE
    assert "the largest gradient is that of layers." in where
    hook = model.layers[1].register_forward_hook(lambda module, i, output: Explode.apply(output))
    assert first_layer(model, 1, lambda i: model(inputs[0])) == (
        BACKWARD,
        0,
        "the gradient of the output of layers.0",
    )
    hook.remove()
    with torch.no_grad():
        model.get_parameter("layers.2.bias")[1] = torch.nan
    assert first_layer(model, 1, lambda i: model(inputs[0])) == (
        WEIGHT,
        0,
        "the weight layers.2.bias",
    )


# ---------------------------------------------------------------------------------- in training


def troubles(run: Path) -> list[dict[str, Any]]:
    return [record for record in log(run) if record["event"] == "trouble"]


def in_step(step: int) -> list[int]:
    """The rows in a step (from 1) of the toy text, with 8 rows a step and seed 0."""
    return Samples(300, 0).at(np.arange(8 * step - 8, 8 * step))[0].tolist()


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints/step_15/model.safetensors")


def test_a_bad_row_stops_or_is_skipped(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The row is in step 6. The run is killed after step 11, or stopped by the row, and continues
    from a checkpoint before step 6. It drops the same update again.
    """
    rows = sorted(in_step(6))
    bad = BAD_ROW.format(row=rows[3])
    runs = {name: tmp_path / name for name in ("stop", "skip", "killed")}
    lines = {
        name: training(SMOKE, data.text, run, *STEPS, "train.trouble=skip")
        for name, run in runs.items()
    }
    done = forks.run(*lines["stop"], "train.trouble=stop", before=bad)
    assert done.status == 1, done
    said = done.err.splitlines()[-1]
    for words in (
        "error: the loss is not finite at step 6: the output of encoder.layers.1.mlp, ",
        f"rows {rows[0]}, {rows[1]}, ",
        "train.trouble=skip",
    ):
        assert words in said, said
    assert troubles(runs["stop"])[-1]["step"] == log(runs["stop"])[-1]["step"] == 6
    seldom = "train.checkpoint_every=5"  # before step 6
    killer = AT_STEP.format(step=9, signal="SIGKILL", ranks="0")
    assert forks.run(*lines["killed"], seldom, before=bad + killer).status == -9
    for line in lines.values():
        good(forks.run(*line, before=bad))
    for run in runs.values():
        (actual,) = troubles(run)
        assert actual["rows"] == rows
        assert (actual["where"], actual["step"]) == ("the output of encoder.layers.1.mlp", 6)
        assert result(run)["dropped"] == 1
        assert all(np.isfinite(record.get("loss", 0)) for record in log(run))
        drawn_once(run)
    same(runs["stop"], runs["skip"])
    same(runs["killed"], runs["skip"])


def test_a_bad_weight_ends_a_run(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It ends the run under both policies. The run can continue from the checkpoint before."""
    good(forks.run(*training(SMOKE, data.text, tmp_path / "good", *STEPS)))
    for policy in ("stop", "skip"):
        line = training(SMOKE, data.text, tmp_path / policy, *STEPS, f"train.trouble={policy}")
        done = forks.run(*line, before=BAD_WEIGHT)
        assert done.status == 1
        said = done.err.splitlines()[-1]
        assert "at step 6: the weight encoder.layers.0.mlp.up.weight" in said, said
        assert "may hold the same bad value; dropping updates cannot repair a weight" in said, said
        assert "of the store" not in said, said
    assert "from step 4" in good(forks.run(*line)).err
    for name, weight in weights(tmp_path / "good").items():
        assert torch.equal(weights(tmp_path / "skip")[name], weight), name


def test_ten_dropped_updates_in_a_row_end_a_run(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", "train.steps=20", "train.trouble=skip")
    done = forks.run(*line, before=BAD_LOSSES)
    assert done.status == 1
    assert "at step 15: " in done.err.splitlines()[-1]
    end = "10 updates in a row were dropped; if the rows are good, lower optim.lr, now "
    assert end in done.err.splitlines()[-1]
    assert not (tmp_path / "run/result.json").exists()


def test_one_rank_in_trouble(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The row is on rank 1. All ranks drop the step, and train as one process would."""
    rows = in_step(6)
    recipe = load(Recipe, training(SMOKE, data.text, tmp_path / "run", *STEPS)[1:])
    feed = prepare(recipe, Ranks(1, 2, torch.device("cpu"))).feed()
    batch = feed.take(40).batches[0]
    assert batch.rows is not None
    theirs = sorted(batch.rows.tolist())
    assert set(theirs) < set(rows)
    bad = BAD_ROW.format(row=theirs[0])
    more = [*STEPS, *NO_DROPOUT, "train.trouble=skip"]
    for name, ranks in (("one", 1), ("two", 2)):
        line = training(SMOKE, data.text, tmp_path / name, *more)
        good(forks.run(*line, ranks=ranks, before=bad))
    (actual,) = troubles(tmp_path / "two")
    assert (actual["rank"], actual["rows"], actual["step"]) == (1, theirs, 6)
    assert actual["where"] == "the output of encoder.layers.1.mlp"
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, rtol=1e-4, atol=1e-5)


def test_a_spike_is_skipped(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """After WINDOW steps a loss is a thousand times as large.

    One run is stopped and continued before that, because the statistics are part of the checkpoint.
    """
    spike = f"""{LEARN}
def spiky(self, *given):
    loss = passes(self, *given)
    return Loss(loss.total * 1000, loss.count, loss.correct) if now[0] == 109 else loss
Replicas.forward_backward = spiky
"""
    wanted = [
        "train.steps=115",
        "train.spike=20",
        "train.trouble=skip",
        "batch.rows=2",
        "train.select=last",
        "train.validate_every=200",
    ]
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    lines = [training(SMOKE, data.text, run, *wanted) for run in runs]
    stop = AT_STEP.format(step=90, signal="SIGTERM", ranks="0")
    assert forks.run(*lines[1], before=spike + stop).status == 128 + 15
    for line in lines:
        good(forks.run(*line, before=spike))
    same(runs[1], runs[0])
    (actual,) = troubles(runs[0])
    assert actual["step"] == 110
    assert "is far above its mean" in actual["what"]
    assert len(actual["rows"]) == 2

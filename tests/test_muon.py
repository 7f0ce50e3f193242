"""Muon for the matrices of the layers, beside AdamW for all other weights."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMOKE, Forks, good, training
from test_train import AT_STEP, log, same
from torch import Tensor, nn
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import optim
from xformer.optim import OptimConfig, clip_and_step, gradient_norm

DECAY, RATE = 0.3, 0.01


class Stack(nn.Module):
    """Weights with the names of an encoder, so that each kind is there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"qkv": nn.Linear(6, 18), "up": nn.Linear(6, 10)})
        parts = {"word": nn.Embedding(11, 6), "layers": nn.ModuleList([layer])}
        self.encoder = nn.ModuleDict(parts)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self.encoder
        layer = parts["layers"][0]
        q, k, v = layer["qkv"](parts["word"](x)).chunk(3, -1)
        out: Tensor = self.head(torch.tanh(layer["up"](q * k.sigmoid() + v)))
        return out


MATRICES = ("encoder.layers.0.qkv.weight", "encoder.layers.0.up.weight")


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randint(11, (5,), generator=torch.Generator().manual_seed(step))
    total: Tensor = model(x).pow(2).sum() * 40
    return total


def take(optimizer: Any, model: nn.Module, steps: range, fate: float = 0.0) -> None:
    count = torch.tensor(5.0)
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, step) * (torch.nan if fate else 1.0)).backward()
        norm = gradient_norm(optimizer) / count
        clip_and_step(optimizer, RATE * (step + 1), count, norm, 2.0, torch.tensor(fate))


@pytest.fixture
def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def config() -> OptimConfig:
    return OptimConfig(name="muon", weight_decay=DECAY, betas=(0.8, 0.95))


def test_each_weight_has_the_step_of_its_optimizer(model: Stack) -> None:
    """Query, key and value are three matrices to Muon. The gradient is clipped as a whole."""
    theirs = copy.deepcopy(model)
    take(optim.build(model, config()), model, range(5))

    weights = dict(theirs.named_parameters())
    parts = [nn.Parameter(part.detach().clone()) for part in weights[MATRICES[0]].chunk(3)]
    matrices = [*parts, weights[MATRICES[1]]]
    muon = torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    others = [
        {"params": [w], "weight_decay": DECAY if w.ndim > 1 else 0.0}
        for name, w in weights.items()
        if name not in MATRICES
    ]
    adamw = torch.optim.AdamW(others, betas=(0.8, 0.95))
    for step in range(5):
        theirs.zero_grad()
        (loss_of(theirs, step) / 5).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)
        for part, gradient in zip(parts, gradient_of(weights[MATRICES[0]]).chunk(3), strict=True):
            part.grad = gradient
        both: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        for each in both:
            for group in each.param_groups:
                group["lr"] = RATE * (step + 1)
            each.step()
        with torch.no_grad():
            weights[MATRICES[0]].copy_(torch.cat(tuple(parts)))
    for name, weight in model.named_parameters():
        # Muon's products are in bf16: a last bit of the gradient can change its result
        tolerance = 2e-3 if name in MATRICES else 1e-4
        assert (weight - weights[name]).abs().max() < tolerance, name
    start = Stack()
    assert (weights[MATRICES[1]] - dict(start.named_parameters())[MATRICES[1]]).abs().max() > 0.05


def test_a_dropped_step_changes_nothing(model: Stack) -> None:
    optimizer = optim.build(model, config())
    for number, fate in enumerate((1.0, 0.0, 1.0)):
        before = {k: v.clone() for k, v in optim.state(optimizer)}
        before |= {k: v.clone() for k, v in model.state_dict().items()}
        take(optimizer, model, range(1), fate)
        after = {**dict(optim.state(optimizer)), **model.state_dict()}
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == (set() if fate else before.keys()), number
    assert float(dict(optim.state(optimizer))["step"]) == 1


def test_the_state_names_the_moments_and_continues_bit_for_bit(model: Stack) -> None:
    stopped = copy.deepcopy(model)
    take(optim.build(model, config()), model, range(6))
    optimizer = optim.build(stopped, config())
    take(optimizer, stopped, range(3))
    state = {name: tensor.clone() for name, tensor in optim.state(optimizer)}
    names = {name for name, _ in model.named_parameters()}
    assert state.keys() == {"step"} | {f"momentum_buffer.{name}" for name in MATRICES} | {
        f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names - {*MATRICES}
    }
    resumed = copy.deepcopy(stopped)
    optimizer = optim.build(resumed, config())
    optim.load_state(optimizer, state)
    take(optimizer, resumed, range(3, 6))
    for name, weight in resumed.named_parameters():
        assert torch.equal(weight, model.state_dict()[name]), name


@pytest.mark.parametrize("trained", [MATRICES, ("head.weight", "head.bias")])
def test_either_optimizer_may_have_no_weight(model: Stack, trained: tuple[str, ...]) -> None:
    before = copy.deepcopy(model.state_dict())
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)
    take(optim.build(model, config()), model, range(2))
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == set(trained)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """With dropout and clipping. The matrices of the layers have one moment, all others two."""
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    more = ["optim.name=muon", "train.steps=14", "train.checkpoint_every=4", "train.log_every=1"]
    lines = [training(SMOKE, data.text, run, *more, "optim.clip=0.5") for run in runs]
    good(forks.run(*lines[0]))
    killer = AT_STEP.format(step=10, signal="SIGKILL", ranks="0")
    assert forks.run(*lines[1], before=killer).status == -signal.SIGKILL
    good(forks.run(*lines[1]))
    same(runs[1], runs[0])
    state = checkpoints.load_tensors(runs[0] / "checkpoints/step_14/optimizer.safetensors")
    buffers = {n.partition(".")[2] for n in state if n.startswith("momentum_buffer.")}
    kinds = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert buffers == {f"encoder.layers.{i}.{kind}.weight" for i in (0, 1) for kind in kinds}
    assert float(state["step"]) == 14


def test_trouble_is_skipped_and_two_ranks_train(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A gradient that is not finite drops the update of its step, and the run goes on."""
    more = ["optim.name=muon", "train.steps=12", "train.log_every=1"]
    run = tmp_path / "run"
    broken = "import torch\nfrom xformer import guard\nplain = guard.Guard.judge\n"
    broken += "def judge(self, sums, norm):\n"
    broken += "    if self.state.step == 5: norm = norm * torch.nan\n"
    broken += "    return plain(self, sums, norm)\nguard.Guard.judge = judge\n"
    line = training(SMOKE, data.text, run, *more, "train.trouble=skip")
    assert "at step 6" in good(forks.run(*line, before=broken)).err
    assert [e["step"] for e in log(run) if e["event"] == "trouble"] == [6]
    losses = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        line = training(SMOKE, data.text, run, *more, "model.dropout=0")
        good(forks.run(*line, "model.attention_dropout=0", ranks=ranks))
        losses.append([e["loss"] for e in log(run) if e["event"] == "train"])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)  # bf16 in Muon; other optimizers: 1e-5

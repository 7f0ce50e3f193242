"""What a model costs: parameters by part, operations a token, measured speed, seconds to make.

    python -m xformer.analysis cost CHECKPOINT [CHECKPOINT ...] out=DIR
    python -m xformer.analysis cost ckpt/bert ckpt/distilbert ckpt/bert-first-6 head=classify \\
      rows=32 length=128 threads=2 out=figures

The first checkpoint is what the others are compared with (Zhang et al. 2021, section 6 and table
7). Speed is measured on this machine: passes over `rows` rows of `length` random tokens without
padding, forward in evaluation mode, and training steps with dropout, backward pass and AdamW; the
median of `repeats` after one that does not count, the checkpoints in turn.

Seconds to make: a checkpoint that another one of the command line became by operations on its
weights is made again in a temporary directory within `out`, from opening the first to the new one
lying on the disk, with checksums; of a run it is the seconds of its training, from result.json; of
any other the seconds to load it and to save a copy.

N rows, L tokens of a row.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import cost, optim
from xformer.analysis import figure
from xformer.analysis.command import Command, Names, Output, progress, publish
from xformer.analysis.examples import key_of, names_of
from xformer.checkpoint import Checkpoint
from xformer.config import validate
from xformer.data.batch import Batch, Workload
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import make_directory, read_run_json
from xformer.optim import OptimConfig
from xformer.parallel import processes
from xformer.parallel.processes import Ranks, SystemConfig, slow_precision
from xformer.surgery.operations import CLASSES, apply
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model

MASKING = 0.15  # share of the tokens that the head mlm is asked for


class CostConfig(Output):
    """What is measured."""

    names: Names = ()
    """What to call the checkpoints in the result, in their order; absent: the ends of their
    paths."""
    head: Literal["classify", "mlm"] = "classify"
    """The head that trains: two classes, or masked language modelling of 15 % of the tokens. It is
    fresh where the checkpoint has none."""
    rows: int = Field(16, ge=1)
    """Rows of a pass."""
    length: int = Field(128, ge=3)
    """Tokens of a row."""
    repeats: int = Field(5, ge=1)
    """Passes, and steps, of which the median counts."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the tokens and of fresh weights."""


COMMAND = Command("cost", CostConfig, __doc__ or "", 1, None)


def run(paths: list[str], config: CostConfig) -> None:
    """`python -m xformer.analysis cost CHECKPOINT ... key=value ...`"""
    names = names_of(paths, config.names)
    ranks = processes.start(SystemConfig(threads=config.threads))
    loaded = [checkpoints.load(path) for path in paths]
    for path, checkpoint in zip(paths, loaded, strict=True):
        _check(path, checkpoint, config)
    if warning := slow_precision(ranks.device, config.precision):
        say(warning.replace("system.", ""), error=True)
    out = Path(config.out)
    make_directory(out, "out=")
    heads = [_with_head(checkpoint, config) for checkpoint in loaded]
    counts = [count(head, config) for head in heads]
    taken = measure(heads, config, ranks)
    by_path = dict(zip(paths, loaded, strict=True))
    found = []
    for name, path, counted, each in zip(names, paths, counts, taken, strict=True):
        speed = {}
        for what, seconds in each.items():
            tokens = config.rows * config.length / statistics.median(seconds)
            base = config.rows * config.length / statistics.median(taken[0][what])
            flops = counted["flops_per_token"][what]
            speed[what] = {
                "seconds": seconds,
                "tokens_per_second": tokens,
                "gflops_per_second": tokens * flops / 1e9,
                "relative": tokens / base,
            }
        found.append(
            {
                "name": name,
                "path": path,
                "weights": key_of(path),
                **counted,
                "speed": speed,
                "made": seconds_to_make(path, by_path, out),
            }
        )
    batch = {
        "rows": config.rows,
        "length": config.length,
        "head": config.head,
        "precision": config.precision,
        "threads": torch.get_num_threads(),
        "device": ranks.device.type,
        "repeats": config.repeats,
    }
    line = "cost " + "; ".join(_words(one) for one in found)
    threads = figure.many(torch.get_num_threads(), "thread")
    line += f" ({config.rows} rows of {config.length} tokens, {threads})"
    metrics = {one["name"]: numbers(one) for one in found}
    publish(config, {"analysis": "cost", "batch": batch, "models": found}, draw, line, metrics)


def _check(path: str, checkpoint: Checkpoint, config: CostConfig) -> None:
    model = checkpoint.config
    if config.length > model.max_positions:
        raise BadInput(
            f"length={config.length}: {path} takes rows of {model.max_positions} at most"
        )
    if TASKS[config.head].predicts_masked and model.architecture != "transformer":
        raise BadInput(f"head=mlm: {path} is a {model.architecture}; give head=classify")
    for name, weight in checkpoint.weights.items():
        if not torch.isfinite(weight).all():
            raise BadInput(f"{path}: {name} holds NaN or infinity: damaged, or its run diverged")


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of one checkpoint that a table shows."""
    return {
        "parameters": found["parameters"]["total"],
        "mflops_per_token": found["flops_per_token"]["forward"] / 1e6,
        "forward_tokens_per_second": found["speed"]["forward"]["tokens_per_second"],
        "training_tokens_per_second": found["speed"]["training"]["tokens_per_second"],
        "seconds_to_make": found["made"]["seconds"],
    }


def _words(found: dict[str, Any]) -> str:
    speed = found["speed"]
    text = (
        f"{found['name']}: {found['parameters']['total'] / 1e6:.1f} M parameters, "
        f"{found['flops_per_token']['forward'] / 1e6:.1f} MFLOP a token, "
        f"{speed['forward']['tokens_per_second']:,.0f} tokens/s forward "
        f"({speed['forward']['relative']:.2f}x), "
        f"{speed['training']['tokens_per_second']:,.0f} in training "
        f"({speed['training']['relative']:.2f}x)"
    )
    return f"{text}, {found['made']['seconds']:.2f} s to make ({found['made']['how']})"


# ------------------------------------------------------------------------------- the measures


def _with_head(checkpoint: Checkpoint, config: CostConfig) -> Checkpoint:
    if type(checkpoint.task) is TASKS[config.head]:
        return checkpoint
    head = Head(config.head, ("0", "1") if TASKS[config.head].named_classes else ())
    return checkpoint.with_head(head, config.seed)[0]


def count(checkpoint: Checkpoint, config: CostConfig) -> dict[str, Any]:
    """Parameters by part and operations a token of a checkpoint with its head."""
    shape, task = checkpoint.config, checkpoint.task
    assert task is not None
    parts = cost.parameters(shape, task)
    work = Workload.even(config.rows, config.length, MASKING if task.predicts_masked else 0.0)
    return {
        "parameters": {"total": sum(parts.values()), **parts},
        "flops_per_token": {
            "forward": cost.forward_flops(shape, task, work) / work.tokens,
            "training": cost.training_flops(shape, task, work) / work.tokens,
        },
    }


def measure(
    heads: list[Checkpoint],
    config: CostConfig,
    ranks: Ranks,
) -> list[dict[str, list[float]]]:
    """Seconds of each forward pass and each training step of each checkpoint. They take turns, so
    that what else the machine does falls on all; a first round of them does not count."""
    models = [checkpoint.model().to(ranks.device) for checkpoint in heads]
    batches = [random_batch(checkpoint, config, ranks.device) for checkpoint in heads]
    optimizers = [optim.build(model, OptimConfig(lr=1e-5)) for model in models]
    taken: list[dict[str, list[float]]] = [{"forward": [], "training": []} for _ in models]
    rounds = range(config.repeats + 1)
    work = [(n, i, what) for n in rounds for what in taken[0] for i in range(len(models))]
    for number, i, what in progress(work, len(work), "passes"):
        begun = time.perf_counter()
        if what == "forward":
            forward(models[i], batches[i], config, ranks)
        else:
            step(models[i], batches[i], config, ranks, optimizers[i])
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        if number > 0:
            taken[i][what].append(time.perf_counter() - begun)
    return taken


def random_batch(checkpoint: Checkpoint, config: CostConfig, device: torch.device) -> Batch[Tensor]:
    """N rows of L random tokens, with labels or masked places for the head."""
    task = checkpoint.task
    assert task is not None
    N, L = config.rows, config.length
    draw = np.random.default_rng(config.seed)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    tokens = on_device(draw.integers(0, checkpoint.config.vocab_size, N * L))
    positions = torch.arange(L, device=device).repeat(N)
    labels = places = targets = None
    if task.predicts_masked:
        masked = np.sort(draw.choice(N * L, max(1, round(N * L * MASKING)), replace=False))
        places, targets = on_device(masked), tokens[on_device(masked)]
    else:
        labels = on_device(draw.integers(0, task.outputs, N))
    ends = torch.arange(N + 1, dtype=torch.int32, device=device) * L
    return Batch(
        tokens,
        positions,
        torch.zeros_like(positions),
        ends,
        L,
        labels,
        places,
        targets,
    )


@torch.no_grad()
def forward(model: Model, batch: Batch[Tensor], config: CostConfig, ranks: Ranks) -> None:
    """A forward pass up to the logits, in evaluation mode."""
    model.eval()
    with ranks.autocast(config.precision):
        model.logits(batch)


def step(
    model: Model,
    batch: Batch[Tensor],
    config: CostConfig,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
) -> None:
    """A training step: forward with dropout, backward, clip, AdamW."""
    model.train()
    optimizer.zero_grad()
    with ranks.autocast(config.precision):
        loss = model(batch)
    loss.total.backward()
    count = torch.tensor(float(loss.count), device=ranks.device)
    norm = optim.gradient_norm(optimizer) / count
    optim.clip_and_step(optimizer, 1e-5, count, norm, OptimConfig().clip)


# ----------------------------------------------------------------------------- seconds to make


def seconds_to_make(path: str, others: dict[str, Checkpoint], directory: Path) -> dict[str, Any]:
    """`seconds` and `how` the checkpoint at `path` is made: by the operations that made it from one
    of `others` {path: checkpoint}, among which it is itself, by training, or a copy."""
    if base := base_of(others[path], others):
        return _again(path, others, base, directory)
    result = Path(path) / "result.json"
    if result.is_file():
        return {"how": "training", "seconds": float(read_run_json(result)["seconds"])}
    return _again(path, others, path, directory)


def base_of(checkpoint: Checkpoint, others: dict[str, Checkpoint]) -> str | None:
    """The path of the checkpoint that became this one by operations alone, the latest of several
    such; None where there is none."""
    found = [
        (len(other.history), path)
        for path, other in others.items()
        if len(other.history) < len(checkpoint.history)
        and checkpoint.history[: len(other.history)] == other.history
        and all(r.get("op") in CLASSES for r in checkpoint.history[len(other.history) :])
    ]
    return max(found)[1] if found else None


def _again(path: str, others: dict[str, Checkpoint], base: str, directory: Path) -> dict[str, Any]:
    """Make the checkpoint from `base` again, and say how long that took and whether its weights
    are the same, bit for bit; from itself it is a copy."""
    records = [
        {k: v for k, v in record.items() if k != "sha256"}
        for record in others[path].history[len(others[base].history) :]
    ]
    operations = [validate(CLASSES[record["op"]], record) for record in records]
    temporary = Path(tempfile.mkdtemp(prefix=".cost-", dir=directory))
    try:
        begun = time.perf_counter()
        checkpoints.save(apply(checkpoints.load(base), operations), temporary / "made")
        taken = time.perf_counter() - begun
        same = key_of(str(temporary / "made")) == key_of(path)
    finally:
        shutil.rmtree(temporary)
    if not same:
        say(f"{path}: made again from {base}, its weights differ", error=True)
    how = ", ".join(map(_spelled, records)) or "copy"
    return {"how": how, "seconds": taken, "identical": same, "from": base}


def _spelled(record: dict[str, Any]) -> str:
    """keep_layers(first=6)"""
    arguments = ", ".join(f"{k}={v}" for k, v in record.items() if k != "op")
    return f"{record['op']}({arguments})" if arguments else str(record["op"])


# ----------------------------------------------------------------------------------- drawing


def draw(found: dict[str, Any], theme: figure.Theme) -> Any:
    """Bars of each checkpoint: parameters by part, operations, speed, seconds to make."""
    models, batch = found["models"], found["batch"]
    drawn, axes = figure.figure(11, 3.4 + 0.9 * len(models), 2, 2)
    places = np.arange(len(models))[::-1]
    names = [figure.short(m["name"]) for m in models]
    _parameters(axes[0, 0], models, places, theme)
    measures: Any = (
        (
            axes[0, 1],
            "million operations a token",
            "Operations",
            lambda m, what: m["flops_per_token"][what] / 1e6,
        ),
        (
            axes[1, 0],
            "tokens a second",
            "Speed",
            lambda m, what: m["speed"][what]["tokens_per_second"],
        ),
    )
    for panel, unit, title, value in measures:
        for i, what in enumerate(("forward", "training")):
            values = [value(m, what) for m in models]
            spots = places + 0.2 - 0.4 * i
            label = "forward pass" if what == "forward" else "training step"
            panel.barh(spots, values, 0.38, color=theme.colours[i], label=label)
            _say(panel, spots, values)
        panel.set(xlabel=unit, title=title)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    for panel in axes.flat:
        panel.set_yticks(places, names)
        panel.grid(axis="y", visible=False)
    panel = axes[1, 1]
    made = [m["made"]["seconds"] for m in models]
    panel.barh(places, made, 0.5, color=theme.colours[2])
    _say(panel, places, made)
    if min(made) > 0 and max(made) > 50 * min(made):
        panel.set_xscale("log")
        figure.plain_ticks(panel.xaxis)
    hows = [m["made"]["how"] for m in models]
    hows = [h if len(h) <= figure.LONGEST else f"{h[: figure.LONGEST - 1]}…" for h in hows]
    panel.set_yticks(places, [f"{n}\n{how}" for n, how in zip(names, hows, strict=True)])
    panel.set(xlabel="seconds", title="Time to make it")
    drawn.suptitle(
        f"{batch['rows']} rows of {batch['length']} tokens, head {batch['head']}, "
        f"{batch['precision']}, {batch['device'].upper()}, "
        f"{figure.many(batch['threads'], 'thread')}",
        fontsize=10.5,
    )
    return drawn


def _parameters(
    panel: Any, models: list[dict[str, Any]], places: np.ndarray, theme: figure.Theme
) -> None:
    parts = list(dict.fromkeys(p for m in models for p in m["parameters"] if p != "total"))
    left = np.zeros(len(models))
    for i, part in enumerate(parts):
        values = np.array([m["parameters"].get(part, 0) / 1e6 for m in models])
        panel.barh(
            places, values, 0.5, left=left, label=part, color=theme.colours[i % len(theme.colours)]
        )
        left += values
    _say(panel, places, list(left))
    panel.set(xlabel="millions", title="Parameters")
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _say(panel: Any, places: np.ndarray, values: list[float]) -> None:
    """The number at the end of each bar."""
    for place, value in zip(places, values, strict=True):
        digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
        said = panel.text(value, place, f" {value:,.{digits}f}", va="center", fontsize=8)
        said.set_in_layout(False)
    panel.margins(x=0.2)

"""What a model costs: parameters by part, FLOPs per token, measured speed, time to make it.

    python -m xformer.analysis cost CHECKPOINT [CHECKPOINT ...] out=DIR
    python -m xformer.analysis cost ckpt/bert ckpt/distilbert ckpt/bert-first-6 head=classify \\
      rows=32 length=128 threads=2 out=figures

The other checkpoints are compared with the first (Zhang 2021, section 6 and table 7).

Speed is measured on this machine, on `rows` rows of `length` random tokens without padding. A
forward pass runs in evaluation mode. A training step includes dropout, the backward pass and AdamW.
The checkpoints alternate, the first round is not counted, and the median of `repeats` rounds is
shown.

How the time to make a checkpoint is measured depends on its origin:
  - surgery on another checkpoint of the command: the operations are repeated in a temporary
    directory inside `out`, and timed from loading the old weights to saving the new ones
  - training, for a run: the seconds are read from its result.json
  - anything else: the checkpoint is loaded and a copy saved, and both are timed
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import optim
from xformer.analysis import drawing
from xformer.analysis.examples import key_of, names_of
from xformer.analysis.subcommand import NameList, Output, Subcommand, publish, with_progress
from xformer.checkpoint import Checkpoint
from xformer.cost import forward_flops, training_flops
from xformer.data import style
from xformer.data.batch import Batch, Workload
from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.files import make_directory, read_run_json
from xformer.freeze import freeze, weights_matching
from xformer.model.config import ModelConfig
from xformer.optim import OptimConfig
from xformer.parallel import processes
from xformer.parallel.precision import speed_note
from xformer.parallel.processes import Ranks, SystemConfig
from xformer.prepare import PROBED
from xformer.surgery.registry import OPERATIONS, apply, make_operation
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head, Model, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: N rows, L tokens of a row.

MASKING = 0.15  # share of the tokens that head=mlm predicts


class CostConfig(Output):
    """What is measured, and how."""

    names: NameList = ()
    """Names of the checkpoints in the result, in order, such as names=bert,scratch. Default: the
    shortest endings of their paths that are all different."""
    head: Literal["classify", "mlm"] = "classify"
    """The head that is measured: classify (two classes) or mlm (15 % of the tokens are masked). If
    the checkpoint lacks this head, a head is initialised at random."""
    rows: int = Field(16, ge=1)
    """Rows in a batch."""
    length: int = Field(128, ge=3)
    """Tokens in a row."""
    repeats: int = Field(5, ge=1)
    """How many times each forward pass and each training step is timed; the median is shown."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of the matrix products."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the tokens and of new weights."""


SUBCOMMAND = Subcommand("cost", CostConfig, __doc__ or "", 1, None)


def run(paths: list[str], config: CostConfig) -> None:
    """`python -m xformer.analysis cost CHECKPOINT ... key=value ...`"""
    names = names_of(paths, config.names)
    ranks = processes.start(SystemConfig(threads=config.threads))
    loaded = [checkpoints.load(path) for path in paths]
    for path, checkpoint in zip(paths, loaded, strict=True):
        _check(path, checkpoint, config)
    if warning := speed_note(ranks.device, config.precision):
        say(warning.replace("system.", ""), error=True)
    out = Path(config.out)
    make_directory(out, "out=")
    with_heads = [_with_head(checkpoint, config) for checkpoint in loaded]
    counts = [parameters_and_flops(checkpoint, config) for checkpoint in with_heads]
    timings = time_models(with_heads, config, ranks)
    by_path = dict(zip(paths, loaded, strict=True))
    models = [
        {
            "name": name,
            "path": path,
            "weights": key_of(path),
            **counted,
            "speed": _speed(timing, timings[0], counted["flops_per_token"], config),
            "made": seconds_to_make(path, by_path, out),
        }
        for name, path, counted, timing in zip(names, paths, counts, timings, strict=True)
    ]
    batch = {
        "rows": config.rows,
        "length": config.length,
        "head": config.head,
        "precision": config.precision,
        "threads": torch.get_num_threads(),
        "device": ranks.device.type,
        "repeats": config.repeats,
    }
    line = "cost " + "; ".join(_sentence(model) for model in models)
    threads = many(torch.get_num_threads(), "thread")
    line += f" ({config.rows} rows of {config.length} tokens, {threads})"
    metrics = {model["name"]: main_numbers(model) for model in models}
    publish(config, {"analysis": "cost", "batch": batch, "models": models}, draw, line, metrics)


def _check(path: str, checkpoint: Checkpoint, config: CostConfig) -> None:
    """Raise BadInput if the checkpoint cannot process the batches, or a weight is not finite."""
    model = checkpoint.config
    if config.length > model.max_positions:
        raise BadInput(
            f"length={config.length}: {path} takes rows of at most {model.max_positions} tokens; "
            "give a smaller length="
        )
    if TASKS[config.head].predicts_masked and model.architecture != "transformer":
        raise BadInput(f"head=mlm: {path} is a {model.architecture}; give head=classify")
    for name, weight in checkpoint.weights.items():
        if not torch.isfinite(weight).all():
            raise BadInput(
                f"{path}: {name} holds NaN or infinity: the file is damaged, or training diverged; "
                "give another checkpoint"
            )


def main_numbers(model: dict[str, Any]) -> dict[str, float]:
    """The numbers of one checkpoint that a study shows in its tables."""
    return {
        "parameters": model["parameters"]["total"],
        "mflops_per_token": model["flops_per_token"]["forward"] / 1e6,
        "forward_tokens_per_second": model["speed"]["forward"]["tokens_per_second"],
        "training_tokens_per_second": model["speed"]["training"]["tokens_per_second"],
        "seconds_to_make": model["made"]["seconds"],
    }


def _sentence(model: dict[str, Any]) -> str:
    speed = model["speed"]
    return (
        f"{model['name']}: {model['parameters']['total'] / 1e6:.1f} M parameters, "
        f"{model['flops_per_token']['forward'] / 1e6:.1f} MFLOPs per token, "
        f"{speed['forward']['tokens_per_second']:,.0f} tokens/s forward "
        f"({speed['forward']['relative']:.2f}x), "
        f"{speed['training']['tokens_per_second']:,.0f} in training "
        f"({speed['training']['relative']:.2f}x), "
        f"{model['made']['seconds']:.2f} s to make ({model['made']['how']})"
    )


# --------------------------------------------------------------------------- counts and speed


def _with_head(checkpoint: Checkpoint, config: CostConfig) -> Checkpoint:
    """The checkpoint with the head `config.head`: its own, or a newly initialised one."""
    if type(checkpoint.task) is TASKS[config.head]:
        return checkpoint
    head = Head(config.head, ("0", "1") if TASKS[config.head].named_classes else ())
    return checkpoint.with_head(head, config.seed)


def parameters(config: ModelConfig, task: Task | None = None) -> dict[str, int]:
    """The number of parameters of each part of a model with the heads of a task. Shared parameters
    are counted once.

    The parts are word embeddings, other embeddings, attention, feed-forward, norms, final norm,
    convolutions and heads. A part that a model lacks has no entry.
    """
    with torch.device("meta"):
        model = Model(config, task)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def _part(name: str) -> str:
    if name.startswith("encoder.embeddings"):
        return "word embeddings" if ".word." in name else "other embeddings"
    if name.startswith("encoder.layers"):
        inside = name.split(".")[3]  # encoder.layers.N.attention...
        return {"attention": "attention", "mlp": "feed-forward"}.get(inside, "norms")
    if name.startswith("encoder"):
        return "final norm"
    return "convolutions" if name.startswith("cnn") else "heads"


def parameters_and_flops(checkpoint: Checkpoint, config: CostConfig) -> dict[str, Any]:
    """Parameters by part, and FLOPs per token, of a checkpoint with its head."""
    shape, task = checkpoint.config, checkpoint.task
    assert task is not None
    parts = parameters(shape, task)
    work = Workload.even(config.rows, config.length, MASKING if task.predicts_masked else 0.0)
    return {
        "parameters": {"total": sum(parts.values()), **parts},
        "flops_per_token": {
            "forward": forward_flops(shape, task, work) / work.tokens,
            "training": training_flops(shape, task, work) / work.tokens,
        },
    }


Timing = dict[str, list[float]]  # {"forward": seconds of each pass, "training": of each step}


def time_models(with_heads: list[Checkpoint], config: CostConfig, ranks: Ranks) -> list[Timing]:
    """Time forward passes and training steps of each checkpoint.

    The checkpoints alternate, so that other work on the machine slows them all equally. The first
    round is not counted.
    """
    models = [checkpoint.model().to(ranks.device) for checkpoint in with_heads]
    for model, checkpoint in zip(models, with_heads, strict=True):
        if checkpoint.head is not None and checkpoint.head.layer is not None:
            freeze(model, weights_matching(checkpoint, PROBED))
    batches = [random_batch(checkpoint, config, ranks.device) for checkpoint in with_heads]
    optimizers = [optim.build(model, OptimConfig(lr=1e-5)) for model in models]
    timings: list[Timing] = [{"forward": [], "training": []} for _ in models]
    rounds = range(config.repeats + 1)
    turns = [(n, i, what) for n in rounds for what in timings[0] for i in range(len(models))]
    for number, i, what in with_progress(turns, len(turns), "passes"):
        begun = time.perf_counter()
        if what == "forward":
            forward_pass(models[i], batches[i], config, ranks)
        else:
            training_step(models[i], batches[i], config, ranks, optimizers[i])
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        if number > 0:
            timings[i][what].append(time.perf_counter() - begun)
    return timings


def _speed(timing: Timing, first: Timing, flops: dict[str, float], config: CostConfig) -> Any:
    """Tokens and FLOPs per second of one checkpoint, and its speed relative to the first one's."""
    tokens = config.rows * config.length
    speed = {}
    for what, seconds in timing.items():
        per_second = tokens / statistics.median(seconds)
        speed[what] = {
            "seconds": seconds,
            "tokens_per_second": per_second,
            "gflops_per_second": per_second * flops[what] / 1e9,
            "relative": per_second / (tokens / statistics.median(first[what])),
        }
    return speed


def random_batch(checkpoint: Checkpoint, config: CostConfig, device: torch.device) -> Batch[Tensor]:
    """N rows of L random tokens, with the labels or the masked places that the head needs."""
    task = checkpoint.task
    assert task is not None
    N, L = config.rows, config.length
    generator = np.random.default_rng(config.seed)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    tokens = on_device(generator.integers(0, checkpoint.config.vocab_size, N * L))
    positions = torch.arange(L, device=device).repeat(N)
    labels = places = targets = None
    if task.predicts_masked:
        masked = np.sort(generator.choice(N * L, max(1, round(N * L * MASKING)), replace=False))
        places, targets = on_device(masked), tokens[on_device(masked)]
    else:
        labels = on_device(generator.integers(0, task.outputs, N))
    ends = torch.arange(N + 1, dtype=torch.int32, device=device) * L
    return Batch(tokens, positions, torch.zeros_like(positions), ends, L, labels, places, targets)


@torch.no_grad()
def forward_pass(model: Model, batch: Batch[Tensor], config: CostConfig, ranks: Ranks) -> None:
    """A forward pass up to the logits, in evaluation mode."""
    model.eval()
    with ranks.autocast(config.precision):
        model.logits(batch)


def training_step(
    model: Model,
    batch: Batch[Tensor],
    config: CostConfig,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
) -> None:
    """A training step: forward pass with dropout, backward pass, clipping, AdamW."""
    model.train()
    optimizer.zero_grad()
    with ranks.autocast(config.precision):
        loss = model(batch)
    loss.total.backward()
    # no number is read from the device or copied to it: the host would wait, as in no real step
    count = torch.as_tensor(loss.count, dtype=torch.float32, device=ranks.device)
    norm, drop = optim.gradient_norm(optimizer) / count, torch.zeros_like(count)
    optim.clip_and_step(optimizer, 1e-5, count, norm, OptimConfig().clip, drop)


# ----------------------------------------------------------------------------- seconds to make


def seconds_to_make(path: str, by_path: dict[str, Checkpoint], directory: Path) -> dict[str, Any]:
    """How the checkpoint at `path` was made, and how many seconds that takes.

    `how` is "training", "copy", or the surgery operations that made it from another checkpoint in
    `by_path`. Copying and surgery are repeated in a temporary directory inside `directory`.
    """
    if base := base_of(by_path[path], by_path):
        return _make_again(path, by_path, base, directory)
    result = Path(path) / "result.json"
    if result.is_file():
        return {"how": "training", "seconds": float(read_run_json(result)["seconds"])}
    return _make_again(path, by_path, path, directory)


def base_of(checkpoint: Checkpoint, by_path: dict[str, Checkpoint]) -> str | None:
    """The path of the checkpoint from which this one was made by surgery alone, or None.

    If there are several, it is the one that needs the fewest operations.
    """
    bases = [
        (len(other.history), path)
        for path, other in by_path.items()
        if len(other.history) < len(checkpoint.history)
        and checkpoint.history[: len(other.history)] == other.history
        and all(r.get("op") in OPERATIONS for r in checkpoint.history[len(other.history) :])
    ]
    return max(bases)[1] if bases else None


def _make_again(
    path: str, by_path: dict[str, Checkpoint], base: str, directory: Path
) -> dict[str, Any]:
    """Make the checkpoint at `path` again from the one at `base`, measure the time, and compare the
    weights bit for bit. If `path` and `base` are the same, the checkpoint is copied."""
    records = [
        {k: v for k, v in record.items() if k != "sha256"}
        for record in by_path[path].history[len(by_path[base].history) :]
    ]
    operations = [make_operation(record["op"], record) for record in records]
    temporary = Path(tempfile.mkdtemp(prefix=".cost-", dir=directory))
    try:
        begun = time.perf_counter()
        checkpoints.save(apply(checkpoints.load(base), operations), temporary / "made")
        seconds = time.perf_counter() - begun
        # as they are loaded: those on disk may have 16 bits
        made, wanted = checkpoints.load(temporary / "made").weights, by_path[path].weights
        same = made.keys() == wanted.keys() and all(
            torch.equal(weight.view(torch.uint8), wanted[name].view(torch.uint8))
            for name, weight in made.items()
        )
    finally:
        shutil.rmtree(temporary)
    if not same:
        say(
            f"{path}: applying its operations to {base} again gave weights that differ from those "
            "on disk",
            error=True,
        )
    how = ", ".join(map(drawing.as_call, records)) or "copy"
    return {"how": how, "seconds": seconds, "identical": same, "from": base}


# ----------------------------------------------------------------------------------- drawing


def draw(result: dict[str, Any]) -> Figure:
    """Bars for each checkpoint: parameters by part, FLOPs, speed, seconds to make."""
    models, batch = result["models"], result["batch"]
    figure = style.new_figure(11, 3.4 + 0.9 * len(models))
    axes = figure.subplots(2, 2)
    places = np.arange(len(models))[::-1]
    names = [drawing.short(m["name"]) for m in models]
    _draw_parameters(axes[0, 0], models, places)
    measures: Any = (
        (
            axes[0, 1],
            "MFLOPs per token",
            "FLOPs",
            lambda m, what: m["flops_per_token"][what] / 1e6,
        ),
        (
            axes[1, 0],
            "tokens per second",
            "Speed",
            lambda m, what: m["speed"][what]["tokens_per_second"],
        ),
    )
    for panel, unit, title, value in measures:
        for i, what in enumerate(("forward", "training")):
            values = [value(m, what) for m in models]
            spots = places + 0.2 - 0.4 * i
            label = "forward pass" if what == "forward" else "training step"
            panel.barh(spots, values, 0.38, color=f"C{i}", label=label)
            _label_bars(panel, spots, values)
        panel.set(xlabel=unit, title=title)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    for panel in axes.flat:
        panel.set_yticks(places, names)
        panel.grid(axis="y", visible=False)
    panel = axes[1, 1]
    made = [m["made"]["seconds"] for m in models]
    panel.barh(places, made, 0.5, color="C2")
    _label_bars(panel, places, made)
    if min(made) > 0 and max(made) > 50 * min(made):
        panel.set_xscale("log")
        style.plain_ticks(panel.xaxis)
    labels = []
    for model, name in zip(models, names, strict=True):
        how = model["made"]["how"]
        if len(how) > drawing.NAME_LENGTH:
            how = f"{how[: drawing.NAME_LENGTH - 1]}…"
        labels.append(f"{name}\n{how}")
    panel.set_yticks(places, labels)
    panel.set(xlabel="seconds", title="Time to make")
    figure.suptitle(
        f"{batch['rows']} rows of {batch['length']} tokens, head {batch['head']}, "
        f"{batch['precision']}, {batch['device'].upper()}, "
        f"{many(batch['threads'], 'thread')}",
        fontsize=10.5,
    )
    return figure


def _draw_parameters(panel: Any, models: list[dict[str, Any]], places: np.ndarray) -> None:
    parts = list(dict.fromkeys(p for m in models for p in m["parameters"] if p != "total"))
    left = np.zeros(len(models))
    for i, part in enumerate(parts):
        values = np.array([m["parameters"].get(part, 0) / 1e6 for m in models])
        panel.barh(places, values, 0.5, left=left, label=part, color=f"C{i}")
        left += values
    _label_bars(panel, places, list(left))
    panel.set(xlabel="millions", title="Parameters")
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _label_bars(panel: Any, places: np.ndarray, values: list[float]) -> None:
    """Write the number at the end of each bar."""
    for place, value in zip(places, values, strict=True):
        if value >= 100:
            digits = 0
        elif value >= 10:
            digits = 1
        else:
            digits = 2 if value >= 0.1 else 3
        label = panel.text(value, place, f" {value:,.{digits}f}", va="center", fontsize=8)
        label.set_in_layout(False)
    panel.margins(x=0.2)

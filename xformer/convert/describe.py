"""Describe a checkpoint, a run or a Hugging Face directory on one screen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.convert import hf
from xformer.data.errors import BadInput
from xformer.data.files import installed, what_is
from xformer.data.tokenizers import Tokenizer
from xformer.model.config import ModelConfig

SHOWN = 5  # class names, and entries of the history, that are shown at most


@dataclass
class _Screen:
    """Lines of a title and a value; further values of a title go below the first."""

    lines: list[str] = field(default_factory=list)

    def add(self, title: str, *values: str) -> None:
        for i, value in enumerate(values):
            self.lines.append(f"{title if i == 0 else '':<12}{value}")


def describe(path: str | Path) -> list[str]:
    """The lines that describe a directory.

    Raises BadInput if it is not a checkpoint, a run or a Hugging Face directory, or if it is
    damaged.
    """
    path, screen = Path(path), _Screen()
    run = (path / "checkpoints").is_dir()
    if (path / "config.json").is_file() and not what_is(path) and not run:
        imported = hf.from_hf(path)
        screen.add("directory", f"{path}, a Hugging Face directory; import it with from-hf")
        screen.add("family", imported.family.name)
        _body(screen, imported.checkpoint)
        screen.add("tensors", *hf.import_report(imported)[1:])
        return screen.lines
    resolved = checkpoints.resolve(path)
    checkpoint = checkpoints.load(resolved)
    here = installed(path) == path
    by = f"selected by the run {path}" if here else "installed with the package"
    screen.add("checkpoint", f"{resolved}, {by}" if resolved != path else str(path))
    try:
        family = f"{hf.family_of(checkpoint).name}; to-hf exports it"
    except BadInput as error:
        family = f"none of Hugging Face's: {error}"
    screen.add("family", family)
    _body(screen, checkpoint)
    return screen.lines


def _body(screen: _Screen, checkpoint: Checkpoint) -> None:
    """Sizes, parameters, head, vocabulary and history."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if config.architecture == "hilbert_cnn":
        screen.add(
            "sizes",
            f"Hilbert-CNN on words of {config.kmer} letters, rows up to "
            f"{config.max_positions} tokens",
        )
    else:
        _sizes(screen, checkpoint)
    screen.add("parameters", *_parameters(checkpoint))
    screen.add("head", *_head(checkpoint))
    special = "  ".join(f"{tokenizer.pieces[i]} {i}" for i in sorted(tokenizer.special.values()))
    spare = config.vocab_size - len(tokenizer)
    screen.add(
        "vocabulary",
        f"{kind_of(tokenizer)}, {len(tokenizer):,} pieces"
        + (f", and {spare:,} embeddings without a piece" if spare else ""),
        special,
    )
    if checkpoint.source is not None:
        screen.add(
            "raw input",
            f"{kind_of(checkpoint.source)}, {len(checkpoint.source):,} pieces, mapped to the "
            "model's",
        )
    steps = [_record(record) for record in checkpoint.history]
    hidden = [f"... {len(steps) - SHOWN} more"] if len(steps) > SHOWN else []
    screen.add("history", *(hidden + steps[-SHOWN:] or ["none"]))


def kind_of(tokenizer: Tokenizer) -> str:
    """The kind of a tokenizer, in the words of `preprocess.py tokenizer`."""
    return "words" if tokenizer.symbols == "words" else tokenizer.kind


def _sizes(screen: _Screen, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    shared = " (one set of weights for all)" if config.shared_layers else ""
    segments = f"{config.token_types or 'no'} segment{'' if config.token_types == 1 else 's'}"
    screen.add(
        "sizes",
        f"{config.layers} layers{shared}, {config.hidden} wide, {config.heads} heads, MLP "
        f"{config.intermediate}, embeddings {config.width}",
        f"rows up to {config.max_positions} tokens, {segments}, {config.activation}"
        f"{' with gates' if config.gated else ''}, {config.norm}-LN with epsilon "
        f"{config.layer_norm_eps:g}",
        *_positions(config),
        f"dropout {config.dropout:g}, on attention {config.attention_dropout:g}, before a head "
        f"{config.before_head:g}",
    )


def _positions(config: ModelConfig) -> list[str]:
    """Rotary positions and windows in one line; nothing if the model has neither."""
    rotary = config.positions == "rotary"
    parts = [f"rotary positions with base {config.rotary_base:g}"] if rotary else []
    if config.window:
        local = f" and base {config.local_rotary_base:g}" if rotary else ""
        parts.append(
            f"a window of {config.window} tokens on each side{local} in all layers except one in "
            f"{config.global_every}"
        )
    return [", ".join(parts)] if parts else []


def _parameters(checkpoint: Checkpoint) -> list[str]:
    """The number of parameters of the model, and of each part."""
    parts: dict[str, int] = {}
    for name, weight in checkpoint.weights.items():
        part = name.split(".")[1 if name.startswith("encoder.") else 0]
        parts[part] = parts.get(part, 0) + weight.numel()
    layers = checkpoint.config.stored_layers
    in_each = parts.get("layers", 0) // layers
    alike = layers > 1 and checkpoint.config.first_norm
    each = f" ({in_each:,} in each of {layers})" if alike else ""
    shown = [f"{part} {size:,}{each if part == 'layers' else ''}" for part, size in parts.items()]
    return [f"{sum(parts.values()):,}", ", ".join(shown)]


def _head(checkpoint: Checkpoint) -> list[str]:
    head, parts = checkpoint.head, checkpoints.parts_of(checkpoint.weights)
    others = [f"also has: {', '.join(parts)}"] if parts else []
    if head is None:
        return ["none", *others]
    line = f"{head.kind}, rows of up to {head.max_tokens} tokens"
    if head.labels:
        more = ", ..." if len(head.labels) > SHOWN else ""
        line += f", {len(head.labels)} classes: {', '.join(head.labels[:SHOWN])}{more}"
    if head.layer is not None:
        line += f", reads layer {head.layer} (a probe)"
    elif checkpoint.task is not None and checkpoint.task.reads_pooled:
        line += ", reads the mean over tokens" if checkpoint.config.pooling == "mean" else ""
    texts = " of two texts" if head.pair else ""
    return [line + texts + (f", chosen by {head.metric}" if head.metric else ""), *others]


def _record(record: dict[str, Any]) -> str:
    """An entry of the history, with checksums cut short and tables left out."""
    shown = {k: v for k, v in record.items() if k != "op" and not isinstance(v, dict)}
    values = [f"{k}={str(v)[:12] if k == 'sha256' else v}" for k, v in shown.items()]
    return f"{record.get('op')} " + " ".join(values)[:160]

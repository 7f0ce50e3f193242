"""Train only the weights whose names match the patterns of `train.only`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from xformer.checkpoint import Checkpoint
from xformer.config import nearest
from xformer.data.errors import BadInput


def weights_matching(checkpoint: Checkpoint, patterns: Sequence[str]) -> set[str]:
    """The names of the weights that these patterns choose. Without patterns, all names.

    A pattern is the name of a weight or its beginning up to a dot, with or without "encoder.". It
    may contain `*` and `?`: "mlm_head", "embeddings.word", "layers.*.attention" (layers count from
    0). Raises BadInput that names the nearest beginning if no weight matches a pattern.
    """
    if not patterns:
        return set(checkpoint.weights)
    if checkpoint.config.architecture != "transformer":
        raise BadInput(
            "train.only: a Hilbert-CNN can only be trained as a whole, because the statistics of "
            "its batch norms would change under frozen weights; leave train.only out"
        )
    trained: set[str] = set()
    for pattern in patterns:
        matching = {name for name in checkpoint.weights if _matches(name, pattern)}
        if not matching:
            beginnings = sorted({b for name in checkpoint.weights for b in _beginnings(name)})
            parts = dict.fromkeys(_beginnings(name)[0] for name in checkpoint.weights)
            hint = nearest(pattern, beginnings) or f"; there are {', '.join(parts)}"
            raise BadInput(
                f"train.only={pattern!r} matches no weight{hint}; for example, "
                """train.only='["layers.0", "layers.1"]' trains two layers"""
            )
        trained |= matching
    return trained


def freeze(model: nn.Module, trained: set[str]) -> None:
    """Switch off the gradients of all weights except those with these names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def describe_frozen(checkpoint: Checkpoint, trained: set[str], fresh: Sequence[str]) -> list[str]:
    """Lines that say how many parameters are trained, and which parts are frozen although their
    weights are `fresh`; [] if all weights are trained."""
    sizes = {name: weight.numel() for name, weight in checkpoint.weights.items()}
    if len(trained) == len(sizes):
        return []
    count = sum(sizes[name] for name in trained)
    lines = [f"trains {count:,} of {sum(sizes.values()):,} parameters, the rest is frozen"]
    if lost := sorted({name.split(".")[0] for name in fresh if name not in trained}):
        lines.append(f"frozen by train.only although newly initialised: {', '.join(lost)}")
    return lines


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(beginning, pattern) for beginning in _beginnings(name, whole=True))


def _beginnings(name: str, whole: bool = False) -> list[str]:
    """The beginnings of a name up to each dot: "mlm_head" and "mlm_head.bias" for "mlm_head.bias".
    A leading "encoder." is removed first. With `whole`, the beginnings with it are returned too."""
    names = [name.removeprefix("encoder."), *([name] if whole else [])]
    return [b for each in names for b in accumulate(each.split("."), lambda a, b: f"{a}.{b}")]

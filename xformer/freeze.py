"""Training a part of the weights: which names the patterns of `train.only` choose."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from xformer.checkpoint import Checkpoint
from xformer.config import nearest
from xformer.data.errors import BadInput


def chosen(checkpoint: Checkpoint, patterns: Sequence[str]) -> set[str]:
    """The names of the weights that a training with these patterns changes; with none, of all.

    A pattern is a weight's name or the beginning of one up to a dot, with or without "encoder.",
    and may hold `*` and `?`: "mlm_head", "embeddings.word", "layers.*.attention" (names count
    layers from 0). Raises BadInput for one that no weight has, naming the nearest that there is.
    """
    if not patterns:
        return set(checkpoint.weights)
    if checkpoint.config.architecture != "transformer":
        raise BadInput(
            "train.only: a Hilbert-CNN trains as a whole, as the statistics of its "
            "batch norms would change under frozen weights"
        )
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in checkpoint.weights if _matches(name, pattern)}
        if not matching:
            beginnings = sorted({b for name in checkpoint.weights for b in _beginnings(name)})
            raise BadInput(
                f"train.only={pattern!r} is the name of no weight"
                f"{nearest(pattern, beginnings) or _parts(checkpoint)}"
            )
        found |= matching
    return found


def freeze(model: nn.Module, trained: set[str]) -> None:
    """Have gradients, and so changes, for the weights of these names alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def account(checkpoint: Checkpoint, trained: set[str], fresh: Sequence[str]) -> list[str]:
    """What is frozen, in words: nothing where all is trained."""
    sizes = {name: weight.numel() for name, weight in checkpoint.weights.items()}
    if len(trained) == len(sizes):
        return []
    some = sum(sizes[name] for name in trained)
    lines = [f"trains {some:,} of {sum(sizes.values()):,} parameters, the rest is frozen"]
    if lost := sorted({name.split(".")[0] for name in fresh if name not in trained}):
        lines.append(f"new weights that train.only leaves frozen: {', '.join(lost)}")
    return lines


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(beginning, pattern) for beginning in _beginnings(name, whole=True))


def _beginnings(name: str, whole: bool = False) -> list[str]:
    """ "mlm_head.bias" -> "mlm_head", "mlm_head.bias"; of the encoder's weights without
    "encoder.", and with `whole` with it too."""
    names = [name.removeprefix("encoder."), *([name] if whole else [])]
    return [b for each in names for b in accumulate(each.split("."), lambda a, b: f"{a}.{b}")]


def _parts(checkpoint: Checkpoint) -> str:
    parts = dict.fromkeys(_beginnings(name)[0] for name in checkpoint.weights)
    return f"; there are {', '.join(parts)}"

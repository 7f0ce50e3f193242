"""Operations on layers and heads. Layers and heads are numbered from 1, as the papers do.

C hidden size, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from xformer.checkpoint import Checkpoint, Distribution, initialise
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig
from xformer.surgery.draws import changed, redrawn, refuse_cnn

LAYERS = "encoder.layers."


def reverse_layers(checkpoint: Checkpoint) -> Checkpoint:
    """The layers in the opposite order (Zhang et al. 2021, section 3, table 1)."""
    return _arranged(checkpoint, range(separate(checkpoint.config), 0, -1))


def keep_layers(
    checkpoint: Checkpoint,
    first: int | None = None,
    every: int | None = None,
    layers: Sequence[int] | None = None,
) -> Checkpoint:
    """Some of the layers (Zhang et al. 2021, section 6, tables 7 and 8): the `first` ones, the
    first of `every` so many (2: the 1st, 3rd, 5th ..), or those that `layers` numbers.

    Raises BadInput unless one of the three is given, or where there is no such layer.
    """
    return _arranged(checkpoint, kept(checkpoint.config, first, every, layers))


def kept(
    config: ModelConfig, first: int | None, every: int | None, layers: Sequence[int] | None
) -> Sequence[int]:
    """The numbers of the layers that keep_layers keeps."""
    check_choice(first, every, layers)
    count = separate(config)
    if layers is None:
        name, value = ("first", first) if first is not None else ("every", every)
        assert value is not None
        if not 1 <= value <= count:
            raise BadInput(f"{name}={value}: the model has layers 1 to {count}")
        layers = range(1, value + 1) if name == "first" else range(1, count + 1, value)
    if not layers:
        raise BadInput("layers=[]: give one layer at least")
    for layer in layers:
        _check(layer, "layers", count)
    if list(layers) != sorted(set(layers)):
        raise BadInput(f"layers={list(layers)}: give each layer once, in rising order")
    return layers


def check_choice(*given: object) -> None:
    """Raise BadInput unless one of keep_layers' arguments is given, and only one."""
    if sum(value is not None for value in given) != 1:
        raise BadInput("keep_layers takes one of first, every and layers, and only one")


def reinit_last_layers(
    checkpoint: Checkpoint, from_layer: int, seed: int, distribution: Distribution = "truncated"
) -> Checkpoint:
    """Fresh values in the layers `from_layer` to the last (Huang et al. 2021, section 4.2).

    `from_layer` is the paper's k: of 12 layers 1 re-initialises all, 12 the last, 13 none.
    Embeddings, pooler and heads stay.
    """
    check_last(checkpoint.config, from_layer)
    names = [name for name in checkpoint.weights if _layer(name) >= from_layer]
    return redrawn(checkpoint, names, seed, distribution, "reinit_last_layers")


def check_last(config: ModelConfig, from_layer: int) -> None:
    """Raise BadInput unless there are layers to be the last, or none is meant."""
    none = separate(config) + 1
    if not 1 <= from_layer <= none:
        raise BadInput(
            f"from_layer={from_layer}: give 1 to {none}, where {none} re-initialises none"
        )


def reinit_head(
    checkpoint: Checkpoint,
    layer: int,
    head: int,
    seed: int,
    distribution: Distribution = "truncated",
) -> Checkpoint:
    """Fresh values in one attention head (Huang et al. 2021, section 4.3).

    A head is its D rows of query, key and value, their biases (0), and its D columns of the output
    projection. The output projection's bias belongs to no one head and stays.
    """
    check_head(checkpoint.config, layer, head)
    heads, C = checkpoint.config.heads, checkpoint.config.hidden
    D = C // heads
    attention = f"{LAYERS}{layer - 1}.attention."
    shapes = {
        "qkv.weight": (3, heads, D, C),
        "qkv.bias": (3, heads, D),
        "out.weight": (C, heads, D),
    }

    def one_head(name: str, weight: Tensor) -> Tensor:
        shape = shapes[name.removeprefix(attention)]
        fresh = initialise(name, weight.shape, checkpoint.config, seed, distribution, "reinit_head")
        made = weight.clone()
        made.view(shape)[:, head - 1] = fresh.view(shape)[:, head - 1]
        return made

    return changed(checkpoint, [attention + name for name in shapes], one_head)


def check_head(config: ModelConfig, layer: int, head: int) -> None:
    """Raise BadInput where there is no such head."""
    _check(layer, "layer", separate(config))
    if not 1 <= head <= config.heads:
        raise BadInput(f"head={head}: a layer has heads 1 to {config.heads}")


def separate(config: ModelConfig) -> int:
    """How many layers there are. Raises BadInput where they cannot be told apart."""
    refuse_cnn(config, "which has no such layers")
    if config.shared_layers:
        raise BadInput(
            "all layers of this model are one set of weights (ALBERT), so that none can "
            "be changed, moved or left out alone"
        )
    return config.layers


def _check(layer: int, name: str, count: int) -> None:
    if not 1 <= layer <= count:
        raise BadInput(f"{name}={layer}: the model has layers 1 to {count}")


def _layer(name: str) -> int:
    """The number of the layer that a weight belongs to, 0 for none."""
    return int(name.split(".")[2]) + 1 if name.startswith(LAYERS) else 0


def _arranged(checkpoint: Checkpoint, order: Sequence[int]) -> Checkpoint:
    """The layers of these numbers in this order, renamed: no weight is copied."""
    weights = {name: weight for name, weight in checkpoint.weights.items() if not _layer(name)}
    for place, layer in enumerate(order):
        prefix = f"{LAYERS}{layer - 1}."
        for name, weight in checkpoint.weights.items():
            if name.startswith(prefix):
                weights[f"{LAYERS}{place}.{name.removeprefix(prefix)}"] = weight
    config = checkpoint.config.model_copy(update={"layers": len(order)})
    return replace(checkpoint, config=config, weights=weights)

"""Operations on layers and attention heads. Both are numbered from 1, as in the papers.

C hidden size, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from xformer.checkpoint import Checkpoint, Distribution, initialise
from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig
from xformer.surgery.random_values import refuse_cnn, reinitialise, replace_weights
from xformer.surgery.registry import Seed, operation

LAYERS = "encoder.layers."


@operation
def reverse_layers(checkpoint: Checkpoint) -> Checkpoint:
    """Reverse the order of the layers (Zhang 2021, section 3, table 1)."""
    order = range(count_layers(checkpoint.config), 0, -1)
    check_order(checkpoint.config, order)
    return _with_layers(checkpoint, order)


def check_one_choice(**choices: object) -> None:
    """Raise BadInput unless exactly one argument of keep_layers is given."""
    given = sum(value is not None for value in choices.values())
    if given != 1:
        raise BadInput(f"keep_layers takes exactly one of first, every and layers, not {given}")


@partial(operation, check=check_one_choice)
def keep_layers(
    checkpoint: Checkpoint,
    first: int | None = None,
    every: int | None = None,
    layers: tuple[int, ...] | None = None,
) -> Checkpoint:
    """Keep some of the layers and drop the others (Zhang 2021, section 6, tables 7 and 8).

    Give exactly one of the three arguments. Layers are numbered from 1.

    Args:
        first: Keep this many layers, starting at the first.
        every: Keep the first of every N layers: 2 keeps the 1st, 3rd, 5th and so on.
        layers: Keep the layers with these numbers. Give them in ascending order.
    """
    return _with_layers(checkpoint, layers_to_keep(checkpoint.config, first, every, layers))


def layers_to_keep(
    config: ModelConfig, first: int | None, every: int | None, layers: Sequence[int] | None
) -> Sequence[int]:
    """The numbers of the layers that keep_layers keeps. Raises BadInput if a layer does not exist,
    or if `layers` is empty or not in ascending order."""
    count = count_layers(config)
    if first is not None:
        layers = range(1, _check_layer("first", first, count) + 1)
    elif every is not None:
        layers = range(1, count + 1, _check_layer("every", every, count))
    for layer in layers or ():
        _check_layer("layers", layer, count)
    if not layers or list(layers) != sorted(set(layers)):
        raise BadInput(
            f"layers={list(layers or ())}: give at least one layer, each once, in ascending order"
        )
    check_order(config, layers)
    return layers


def check_order(config: ModelConfig, order: Sequence[int]) -> None:
    """Raise BadInput unless these layers, in this order, can be a model's: each must have the
    window that it was trained with, and the first layer may be the one without a norm."""
    for place, layer in enumerate(order, 1):
        if config.has_window(layer - 1) != config.has_window(place - 1):
            has = "has a window" if config.has_window(layer - 1) else "attends to the whole row"
            raise BadInput(
                f"layer {layer} {has} and cannot become layer {place}: in this model one layer in "
                f"{config.global_every} attends to the whole row, from the first on; choose layers "
                "that keep their kind, or pre-train with model.global_every=1"
            )
        if not config.first_norm and (layer == 1) != (place == 1):
            raise BadInput(
                f"layer {layer} cannot become layer {place}: the first layer of this model, and "
                "no other, has no LayerNorm before attention; choose layers that begin with layer "
                "1, or pre-train with model.first_norm=true"
            )


@operation
def reinit_last_layers(
    checkpoint: Checkpoint,
    from_layer: int,
    seed: Seed = 0,
    distribution: Distribution = "truncated",
) -> Checkpoint:
    """Re-initialise the layers from `from_layer` to the last (Huang et al. 2021, section 4.2).

    Embeddings, pooler and heads keep their values.

    Args:
        from_layer: The first layer to re-initialise, k in the paper. In a model of 12 layers, 1
            re-initialises all of them, 12 only the last, and 13 none.
        seed: Seed of the random values (default: the run's seed.weights; without a run, --seed).
        distribution: Normal or truncated, as in clean.
    """
    check_from_layer(checkpoint.config, from_layer)
    names = [name for name in checkpoint.weights if _layer_of(name) >= from_layer]
    return reinitialise(checkpoint, names, seed, distribution, "reinit_last_layers")


def check_from_layer(config: ModelConfig, from_layer: int) -> None:
    """Raise BadInput unless `from_layer` is a layer of the model, or one more than the last."""
    largest = count_layers(config) + 1
    if not 1 <= from_layer <= largest:
        raise BadInput(
            f"from_layer={from_layer}: give 1 to {largest}; {largest} re-initialises none"
        )


@operation
def reinit_head(
    checkpoint: Checkpoint,
    layer: int,
    head: int,
    seed: Seed = 0,
    distribution: Distribution = "truncated",
) -> Checkpoint:
    """Re-initialise one attention head (Huang et al. 2021, section 4.3).

    A head consists of its rows of query, key and value, their biases (set to 0), and its columns of
    the output projection. The bias of the output projection is shared by all heads and is kept.

    Args:
        layer: The layer of the head, from 1.
        head: The number of the head within its layer, from 1.
        seed: Seed of the random values (default: the run's seed.weights; without a run, --seed).
        distribution: Normal or truncated, as in clean.
    """
    check_attention_head(checkpoint.config, layer, head)
    attention = f"{LAYERS}{layer - 1}.attention."
    # Each weight is viewed with the heads as its second dimension: qkv.weight as (3, H, D C),
    # qkv.bias as (3, H, D) and out.weight as (C, H, D). `leading` is the first dimension.
    leading = {"qkv.weight": 3, "qkv.bias": 3, "out.weight": checkpoint.config.hidden}

    def with_fresh_head(name: str, weight: Tensor) -> Tensor:
        shape = (leading[name.removeprefix(attention)], checkpoint.config.heads, -1)
        fresh = initialise(name, weight.shape, checkpoint.config, seed, distribution, "reinit_head")
        changed = weight.clone()
        changed.view(shape)[:, head - 1] = fresh.view(shape)[:, head - 1]
        return changed

    names = [attention + name for name in leading if attention + name in checkpoint.weights]
    return replace_weights(checkpoint, names, with_fresh_head)


def check_attention_head(config: ModelConfig, layer: int, head: int) -> None:
    """Raise BadInput if the model has no such layer, or a layer has no such head."""
    _check_layer("layer", layer, count_layers(config))
    if not 1 <= head <= config.heads:
        raise BadInput(f"head={head}: a layer has heads 1 to {config.heads}")


def count_layers(config: ModelConfig) -> int:
    """The number of layers. Raises BadInput if the model has no layers with weights of their own:
    a Hilbert-CNN, or an ALBERT."""
    refuse_cnn(config, "which has no such layers")
    if config.shared_layers:
        raise BadInput("all layers share one set of weights (ALBERT): none can be changed alone")
    return config.layers


def _check_layer(argument: str, layer: int, count: int) -> int:
    """Return `layer`. Raises BadInput if the model has no layer with this number."""
    if not 1 <= layer <= count:
        raise BadInput(f"{argument}={layer}: the model has layers 1 to {count}")
    return layer


def _layer_of(name: str) -> int:
    """The number of the layer that a weight belongs to; 0 if it belongs to none."""
    return int(name.split(".")[2]) + 1 if name.startswith(LAYERS) else 0


def _with_layers(checkpoint: Checkpoint, order: Sequence[int]) -> Checkpoint:
    """The checkpoint with these layers in this order. Weights are renamed, not copied. The contact
    head of an ESM-2, which reads the attention maps of all layers, is left out. Raises BadInput
    if the head is a probe of a layer that is gone."""
    weights = {
        name: weight
        for name, weight in checkpoint.weights.items()
        if not _layer_of(name) and not name.startswith("contact_head.")
    }
    for new_index, layer in enumerate(order):
        old_prefix, new_prefix = f"{LAYERS}{layer - 1}.", f"{LAYERS}{new_index}."
        for name, weight in checkpoint.weights.items():
            if name.startswith(old_prefix):
                weights[new_prefix + name.removeprefix(old_prefix)] = weight
    head = checkpoint.head
    if head is not None and head.layer is not None and head.layer > len(order):
        raise BadInput(
            f"the head is a probe of layer {head.layer}, but the result has "
            f"{many(len(order), 'layer')}; operate on the checkpoint without the head"
        )
    config = checkpoint.config.model_copy(update={"layers": len(order)})
    return replace(checkpoint, config=config, weights=weights)

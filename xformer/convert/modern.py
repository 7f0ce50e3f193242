"""What the tables of names do not say about ModernBERT and ESM-2: rotary positions and windows.

`meta` is the content of a config.json of Hugging Face.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint
from xformer.convert.names import ESM, MODERNBERT, Family
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig
from xformer.ops.rotary import frequencies
from xformer.tasks.task import Task

BASE, LOCAL_BASE = 160000.0, 10000.0  # ModernBERT's rotary bases, if its config names none
HEADS, DECODER = {"classifier_bias": False}, {"decoder_bias": True}  # ModernBERT's heads
PLACE = "encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
KINDS = ("full_attention", "sliding_attention")
POOLINGS = {"first": "cls", "mean": "mean"}  # our names and theirs
PRECISIONS = ("float32", "float16", "bfloat16")


def read_settings(family: Family, meta: dict[str, Any], layers: Any, file: Path) -> dict[str, Any]:
    """The values of the settings `family.free`, from config.json.

    Raises BadInput if the config has a setting with a value that is not supported.
    """
    _check_required(family.required, meta, file)
    if family is MODERNBERT:
        return _modernbert(meta, layers, file)
    return _esm(meta, file) if family is ESM else {}


def _check_required(required: dict[str, Any], meta: dict[str, Any], file: Path) -> None:
    """Raise BadInput unless the settings have the values that are required."""
    for key, only in required.items():
        # emb_layer_norm_before may be null, which means false
        if (value := meta.get(key, only)) != only and (value is not None or only):
            raise BadInput(f"{file}: {key}={value!r} is not supported; it must be {only!r}")


def _modernbert(meta: dict[str, Any], layers: Any, file: Path) -> dict[str, Any]:
    _check_equal(meta, "mlp_dropout", "embedding_dropout", 0.0, file)
    whole, local = (_base(meta, kind, file) for kind in KINDS)
    whole = whole or meta.get("global_rope_theta") or BASE
    # null means that both are equal
    local = local or meta.get("local_rope_theta", LOCAL_BASE) or whole
    every = _every(meta, layers, file)
    window = meta.get("local_attention", 128)
    if every > 1 and (not isinstance(window, int) or window < 2):
        raise BadInput(
            f"{file}: local_attention={window!r} is not supported; it must be a number of tokens, "
            "at least 2"
        )
    pooling = meta.get("classifier_pooling", "cls")
    if pooling not in POOLINGS.values():
        raise BadInput(
            f"{file}: classifier_pooling={pooling!r} is not supported; it must be 'cls' or 'mean'"
        )
    return {
        "pooling": "first" if pooling == "cls" else "mean",
        "rotary_base": whole,
        "local_rotary_base": local,
        "window": window // 2 if every > 1 else 0,
        "global_every": every,
    }


def _check_equal(meta: dict[str, Any], key: str, other: str, default: Any, file: Path) -> None:
    """Raise BadInput unless two settings have the same value."""
    if (value := meta.get(key, default)) != (wanted := meta.get(other, default)):
        raise BadInput(f"{file}: {key}={value!r} must be equal to {other}={wanted!r}")


def _base(meta: dict[str, Any], kind: str, file: Path) -> Any:
    """The rotary base of a kind of layers in `rope_parameters`; None if it is not there."""
    groups = meta.get("rope_parameters")
    given = groups.get(kind) if isinstance(groups, dict) else None
    given = given if isinstance(given, dict) else {}
    if (form := given.get("rope_type", "default")) != "default":
        raise BadInput(f"{file}: rope_type={form!r} is not supported; it must be 'default'")
    if (scaling := meta.get("rope_scaling")) is not None:
        raise BadInput(f"{file}: rope_scaling={scaling!r} is not supported; it must be null")
    return given.get("rope_theta")


def _every(meta: dict[str, Any], layers: Any, file: Path) -> int:
    """Every how many layers one attends to the whole row."""
    every, kinds = meta.get("global_attn_every_n_layers", 3), meta.get("layer_types")
    tried = [every] if kinds is None else [every, *range(1, len(kinds) + 1)]
    for number in tried:
        if not isinstance(number, int) or number < 1:
            raise BadInput(f"{file}: global_attn_every_n_layers={number!r} must be at least 1")
        # the lengths are compared first, because the config may claim any number of layers
        if kinds is None or (len(kinds) == layers and kinds == _kinds(number, layers)):
            return number
    raise BadInput(
        f"{file}: layer_types must name full_attention for every n-th layer from the first on, and "
        f"sliding_attention for the others, not {', '.join(map(str, kinds or ()))}"
    )


def _kinds(every: int, layers: int) -> list[str]:
    """The kind of each layer's attention, in their words."""
    return [KINDS[i % every > 0] for i in range(layers)]


def _esm(meta: dict[str, Any], file: Path) -> dict[str, Any]:
    if (form := meta.get("position_embedding_type", "absolute")) != "rotary":
        raise BadInput(
            f"{file}: position_embedding_type={form!r} is not supported; it must be 'rotary', as "
            "in ESM-2"
        )
    settings = {"rotary_base": meta.get("rope_theta", 10000.0)}
    if meta.get("token_dropout"):
        if meta.get("mask_token_id") is None:
            raise BadInput(f"{file}: token_dropout=True needs mask_token_id")
        settings["zeroed_token"] = meta["mask_token_id"]
    return settings


def check_head(task: Task, family: Family, meta: dict[str, Any], file: Path) -> None:
    """Raise BadInput if the settings of a ModernBERT's head are not supported."""
    if family is not MODERNBERT:
        return
    _check_required(HEADS | (DECODER if task.predicts_masked else {}), meta, file)
    _check_equal(meta, "classifier_activation", "hidden_activation", "gelu", file)


def their_settings(
    family: Family, config: ModelConfig, special: dict[str, int], activation: str
) -> dict[str, Any]:
    """The entries of config.json for the settings `family.free`, also in the words of earlier
    versions of transformers. `special` are the ids of special tokens, and `activation` is the name
    of the activation in their words."""
    written: dict[str, Any] = dict(family.required)
    if family is MODERNBERT:
        bases = config.rotary_base, config.local_rotary_base
        written |= HEADS | DECODER
        written |= {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base}
                for kind, base in zip(KINDS, bases, strict=True)
            },
            "global_rope_theta": config.rotary_base,
            "local_rope_theta": config.local_rotary_base,
            "local_attention": 2 * config.window or 128,
            "global_attn_every_n_layers": config.global_every,
            "layer_types": _kinds(config.global_every, config.layers),
            "mlp_dropout": config.dropout,
            "classifier_activation": activation,
            "classifier_pooling": POOLINGS[config.pooling],
            "cls_token_id": special["cls"],
            "sep_token_id": special["sep"],
        }
    if family is ESM:
        written |= {
            "position_embedding_type": "rotary",
            "rope_theta": config.rotary_base,
            "token_dropout": config.zeroed_token is not None,
            "mask_token_id": special["mask"],
        }
    return written


def take_frequencies(
    source: dict[str, Tensor], family: Family, config: ModelConfig, file: Path
) -> tuple[ModelConfig, dict[str, str]]:
    """Remove the rotary frequencies from the tensors of a file. Returns the config with the
    precision to which they are rounded, and the type of each tensor by name.

    Raises BadInput if they are not those of the config's base.
    """
    if not family.buffer:
        return config, {}
    names = [name for name in source if re.search(rf"\b{re.escape(family.buffer)}$", name)]
    given = {name: source.pop(name) for name in names}
    types = {name: str(values.dtype).removeprefix("torch.") for name, values in given.items()}
    size = config.hidden // config.heads
    for precision in PRECISIONS:
        wanted = frequencies(size, config.rotary_base, precision)
        if all(torch.equal(values.float(), wanted) for values in given.values()):
            return config.model_copy(update={"rotary_precision": precision}), types
    raise BadInput(
        f"{file}: {names[0]} does not hold the rotary frequencies of rope_theta="
        f"{config.rotary_base:g}"
    )


def frequency_tensors(family: Family, checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """The rotary frequencies under the names that they were imported with, or else once for each
    layer, if the family stores them."""
    config = checkpoint.config
    if not family.buffer:
        return {}
    types = {PLACE.format(layer): "float32" for layer in range(config.layers)}
    for record in checkpoint.history:
        types = record.get("frequencies", types)
    size = config.hidden // config.heads
    values = frequencies(size, config.rotary_base, config.rotary_precision)
    wide = any(weight.dtype == torch.float64 for weight in checkpoint.weights.values())
    tensors = {}
    for name, dtype in types.items():
        if dtype == "float64" and not wide:  # the weights were trained in float32 since the import
            dtype = "float32"
        if _is_in(name, config.layers):
            tensors[prefix + name] = values.to(getattr(torch, dtype))
    return tensors


def _is_in(name: str, layers: int) -> bool:
    """Whether a tensor belongs to none of the layers, or to one that the model has."""
    number = re.search(r"\.layer\.(\d+)\.", name)
    return number is None or int(number[1]) < layers

"""Checkpoints of the public PLUS repository (Min et al. 2019): PLUS-TFM, a transformer that was
pre-trained on protein by masked amino acids and by whether two sequences are of one family.

A checkpoint there is a bare table of tensors, without a config: all sizes are read off the tensors
but the number of heads. Its alphabet is the repository's own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint, check_weights, parts_of
from xformer.convert.hf import Imported, _take, _unpickle, _untie
from xformer.convert.names import PLUS, expand
from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum
from xformer.model.config import ModelConfig
from xformer.model.encoder import sinusoids
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Model

HEAD_SIZE = 64  # of the published model: 12 heads of 768


def from_plus(file: Path, heads: int | None = None, labels: tuple[str, ...] = ()) -> Imported:
    """Read a PLUS-TFM checkpoint (`.pt`, tensors only). `heads` is by default one for every 64 of
    the width.

    Its classifier of two classes becomes the pair head (same family); one with a single output a
    score head, one of more a class head with `labels`. Raises BadInput where the file is no such
    checkpoint, or the sizes contradict each other.
    """
    if not file.is_file():
        raise BadInput(f"{file} is not a file; give a PLUS-TFM checkpoint, such as PLUS-TFM.pt")
    source = {_modern(name): tensor for name, tensor in _unpickle(file).items()}
    try:
        config = _config(source, heads, file)
        outputs = len(source["cls.weight"].flatten(1)) if "cls.weight" in source else 0
    except (IndexError, ValueError) as error:  # tensors of other dimensions
        raise BadInput(f"{file} is not a PLUS-TFM checkpoint: {error}") from None
    tied = _untie(source, PLUS, file)
    table: dict[str, list[str]] = dict(PLUS.encoder)
    if config.positions == "sinusoidal":
        del table["encoder.embeddings.position.weight"]
    if outputs in (0, 2) and not labels:
        head = Head("mlm", max_tokens=config.max_positions)
        table |= PLUS.mlm | (PLUS.pair if outputs else {})
    elif outputs == 1:
        head = Head("regress", max_tokens=config.max_positions)
        table |= PLUS.classify
    else:
        labels = labels or tuple(f"LABEL_{i}" for i in range(outputs))
        if len(labels) != outputs:
            raise BadInput(f"{file} has {outputs} classes; --labels names {len(labels)}")
        head = Head("classify", labels, max_tokens=config.max_positions)
        table |= PLUS.classify
    weights, used = _take(expand(table, config.layers), source, file)
    left = sorted(name for name in source if name not in used and name != "embed.pos_embed.pe")
    with torch.device("meta"):
        shape = Model(config, task_of(head), parts_of(weights)).state_dict()
    check_weights(weights, shape, str(file))
    record = {"op": "from-plus", "file": file.name, "sha256": file_checksum(file)}
    checkpoint = Checkpoint(config, weights, vocabularies.plus(), head, (record,))
    return Imported(checkpoint, PLUS, len(used) + len(tied), tied, left, [])


def _modern(name: str) -> str:
    name = name.removeprefix("module.").removeprefix("transformer.")
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def _config(source: dict[str, Tensor], heads: int | None, file: Path) -> ModelConfig:
    needed = ("embed.tok_embed.weight", "blocks.0.pwff.fc1.weight", "decoder_bias")
    for name in needed:
        if name not in source:
            raise BadInput(f"{file} is not a PLUS-TFM checkpoint: it lacks {name}")
    vocabulary, hidden = source["embed.tok_embed.weight"].shape
    if vocabulary != len(vocabularies.plus()):
        raise BadInput(f"{file}: {vocabulary} tokens are not PLUS's {len(vocabularies.plus())}")
    numbers = (re.match(r"blocks\.(\d+)\.", name) for name in source)
    layers = 1 + max(int(number[1]) for number in numbers if number)
    fixed = "embed.pos_embed.pe" in source
    positions: Any = "embed.pos_embed.pe" if fixed else "embed.pos_embed.weight"
    if positions not in source:
        raise BadInput(f"{file} is not a PLUS-TFM checkpoint: it lacks {positions}")
    if fixed:
        table = source[positions].flatten(0, -2)
        if not torch.allclose(table, sinusoids(torch.arange(len(table)), hidden), atol=1e-4):
            raise BadInput(f"{file}: {positions} holds other numbers than sines and cosines")
    heads = heads or max(1, hidden // HEAD_SIZE)
    if hidden % heads:
        raise BadInput(f"{file} is {hidden} wide, no multiple of {heads} heads")
    return ModelConfig(
        vocab_size=vocabulary,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=source["blocks.0.pwff.fc1.weight"].size(0),
        max_positions=source[positions].size(-2),
        positions="sinusoidal" if fixed else "learned",
        norm_form="deviation",
        pooler="none",
    )

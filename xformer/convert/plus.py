"""Import checkpoints of the public PLUS repository (Min et al. 2019).

PLUS-TFM is a transformer that was pre-trained on protein sequences with two objectives: masked
amino acids, and whether two sequences are of the same family. A checkpoint is a bare table of
tensors without a config. All sizes but the number of heads are read from the tensors. The alphabet
is the repository's own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint
from xformer.convert.hf import (
    Imported,
    check_complete,
    drop_tied_copies,
    read_pickle,
    take_tensors,
)
from xformer.convert.names import PLUS, Table, expand
from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum
from xformer.model.config import ModelConfig
from xformer.model.encoder import sinusoids
from xformer.tasks.task import Head

HEAD_SIZE = 64  # of the published model: 12 heads, 768 wide


def from_plus(file: str | Path, heads: int | None = None, labels: tuple[str, ...] = ()) -> Imported:
    """Import a PLUS-TFM checkpoint (`.pt`, tensors only).

    `heads` is the number of attention heads, by default width / 64. A file without a classifier
    gets an MLM head. A classifier with two outputs becomes the pair head (same family or not)
    beside the MLM head, unless `labels` names two classes. One output becomes a score head, more
    outputs a class head with `labels` (default: LABEL_0, LABEL_1, ...). Raises BadInput if the file
    is not a PLUS-TFM checkpoint, if its sizes contradict each other, or if the number of `labels`
    is not that of the classes.
    """
    file = Path(file)
    if not file.is_file():
        raise BadInput(f"{file} is not a file; give a PLUS-TFM checkpoint, such as PLUS-TFM.pt")
    source = {_current_name(name): tensor for name, tensor in read_pickle(file).items()}
    try:
        config = _read_sizes(source, heads, file)
        outputs = len(source["cls.weight"].flatten(1)) if "cls.weight" in source else 0
    except (IndexError, ValueError) as error:  # a tensor has too few dimensions
        raise BadInput(f"{file} is not a PLUS-TFM checkpoint: {error}") from None
    tied = drop_tied_copies(source, PLUS, file)
    table: Table = dict(PLUS.encoder)
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
    weights, used = take_tensors(expand(table, config.layers), source, file)
    left = sorted(name for name in source if name not in used and name != "embed.pos_embed.pe")
    check_complete(weights, config, head, file)
    record = {"op": "from-plus", "file": file.name, "sha256": file_checksum(file)}
    checkpoint = Checkpoint(config, weights, vocabularies.plus(), head, (record,))
    return Imported(checkpoint, PLUS, len(used) + len(tied), tied, left, [])


def _current_name(name: str) -> str:
    """A tensor's name without the prefixes of its wrappers, and with .weight and .bias instead of
    TensorFlow's .gamma and .beta."""
    name = name.removeprefix("module.").removeprefix("transformer.")
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def _read_sizes(source: dict[str, Tensor], heads: int | None, file: Path) -> ModelConfig:
    """The config of a PLUS-TFM model, from the shapes of its tensors."""
    needed = ("embed.tok_embed.weight", "blocks.0.pwff.fc1.weight", "decoder_bias")
    for name in needed:
        if name not in source:
            raise BadInput(f"{file} is not a PLUS-TFM checkpoint: it lacks {name}")
    vocabulary, hidden = source["embed.tok_embed.weight"].shape
    if vocabulary != len(vocabularies.plus()):
        raise BadInput(
            f"{file} has a vocabulary of {vocabulary} tokens; that of PLUS-TFM has "
            f"{len(vocabularies.plus())}"
        )
    numbers = (re.match(r"blocks\.(\d+)\.", name) for name in source)
    layers = 1 + max(int(number[1]) for number in numbers if number)
    fixed = "embed.pos_embed.pe" in source
    positions: Any = "embed.pos_embed.pe" if fixed else "embed.pos_embed.weight"
    if positions not in source:
        raise BadInput(f"{file} is not a PLUS-TFM checkpoint: it lacks {positions}")
    if fixed:
        table = source[positions].flatten(0, -2)
        if not torch.allclose(table, sinusoids(torch.arange(len(table)), hidden), atol=1e-4):
            raise BadInput(f"{file}: {positions} does not hold sines and cosines")
    heads = heads or max(1, hidden // HEAD_SIZE)
    if hidden % heads:
        raise BadInput(f"{file} is {hidden} wide, which is not a multiple of {heads} heads")
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

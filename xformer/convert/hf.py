"""BERT checkpoints of Hugging Face: one table of names, `{}` standing for the layer.

Where three sources stand for one weight they are joined row by row (query, key, value).
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from xformer.checkpoint import Checkpoint, Head, check_weights, load_tensors
from xformer.data import published
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, read_json
from xformer.model.encoder import ModelConfig
from xformer.model.heads import Model

# ours -> theirs, without the prefix "bert." that some checkpoints have
ENCODER = {
    "encoder.embeddings.word.weight": ["embeddings.word_embeddings.weight"],
    "encoder.embeddings.position.weight": ["embeddings.position_embeddings.weight"],
    "encoder.embeddings.segment.weight": ["embeddings.token_type_embeddings.weight"],
    "encoder.embeddings.norm.*": ["embeddings.LayerNorm.*"],
    "encoder.layers.{}.attention.qkv.*": [
        "encoder.layer.{}.attention.self.query.*",
        "encoder.layer.{}.attention.self.key.*",
        "encoder.layer.{}.attention.self.value.*",
    ],
    "encoder.layers.{}.attention.out.*": ["encoder.layer.{}.attention.output.dense.*"],
    "encoder.layers.{}.attention_norm.*": ["encoder.layer.{}.attention.output.LayerNorm.*"],
    "encoder.layers.{}.mlp.up.*": ["encoder.layer.{}.intermediate.dense.*"],
    "encoder.layers.{}.mlp.down.*": ["encoder.layer.{}.output.dense.*"],
    "encoder.layers.{}.mlp_norm.*": ["encoder.layer.{}.output.LayerNorm.*"],
}
POOLER = {"pooler.*": ["pooler.dense.*"]}
MLM = {
    "mlm_head.dense.*": ["cls.predictions.transform.dense.*"],
    "mlm_head.norm.*": ["cls.predictions.transform.LayerNorm.*"],
    "mlm_head.bias": ["cls.predictions.bias"],
}
CLASSIFIER = {"task_head.*": ["classifier.*"]}
# copies of other tensors: (the copy, what it must equal)
TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "relu": "relu"}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A checkpoint, and the account of the source's tensors."""

    checkpoint: Checkpoint
    taken: int
    tied: list[str]  # copies of other tensors, checked equal
    left: list[str]  # what the source has and we have no place for
    lacking: list[str]  # heads that the source lacks


def from_hf(directory: Path) -> Imported:
    """Read a Hugging Face BERT directory: config.json, weights, WordPiece vocabulary.

    Weights come from model.safetensors, else pytorch_model.bin (tensors only: a pickle that asks
    for anything else is refused). Raises BadInput for another architecture, a missing tensor, one
    of another shape or type, NaN, or a vocabulary that does not fit the embeddings.
    """
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory; give one with config.json and weights")
    config, meta = _config(directory)
    file, source = _tensors(directory)
    names = [_modern(name) for name in source]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{file} holds {twice} twice, under an old name and a new one")
    source = dict(zip(names, source.values(), strict=True))
    tied = [copy for copy in TIED if copy in source]
    for copy in tied:
        if TIED[copy] not in source or not torch.equal(source[copy], source[TIED[copy]]):
            raise BadInput(
                f"{file}: {copy} differs from {TIED[copy]}; only tied decoders are known"
            )
        del source[copy]
    table, head, lacking = _heads(source, meta, config)
    wanted = _expand(table, config.layers)
    weights, used = _take(wanted, source, file)
    left = sorted(n for n in source if n not in used and not BUFFERS.fullmatch(n))
    with torch.device("meta"):
        shape = Model(config, head.kind if head else None, head.outputs if head else 0,
                      pooler="pooler.weight" in weights).state_dict()  # fmt: skip
    check_weights(weights, shape, str(file))
    tokenizer = published.read(directory)
    if tokenizer.kind != "wordpiece":
        raise BadInput(f"{directory}: the vocabulary is not BERT's WordPiece")
    if len(tokenizer) > config.vocab_size:
        raise BadInput(
            f"{directory}: the vocabulary has {len(tokenizer)} pieces, "
            f"the embeddings only {config.vocab_size}"
        )
    record = {"op": "from-hf", "file": file.name, "sha256": file_checksum(file)}
    checkpoint = Checkpoint(config, weights, tokenizer, head, (record,))
    return Imported(checkpoint, len(used) + len(tied), tied, left, lacking)


def _config(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    meta = read_json(directory / "config.json")
    kind = meta.get("model_type") if isinstance(meta, dict) else None
    if kind != "bert":
        raise BadInput(f"{directory / 'config.json'}: model_type {kind!r} is not known; bert is")
    if meta.get("position_embedding_type", "absolute") != "absolute" or meta.get("is_decoder"):
        raise BadInput(
            f"{directory / 'config.json'}: only encoders with absolute positions are known"
        )
    activation = meta.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise BadInput(f"{directory / 'config.json'}: hidden_act {activation!r} is none of {known}")
    try:
        config = ModelConfig(
            vocab_size=meta["vocab_size"],
            layers=meta["num_hidden_layers"],
            hidden=meta["hidden_size"],
            heads=meta["num_attention_heads"],
            intermediate=meta["intermediate_size"],
            max_positions=meta["max_position_embeddings"],
            token_types=meta.get("type_vocab_size", 2),
            layer_norm_eps=meta.get("layer_norm_eps", 1e-12),
            activation=ACTIVATIONS[activation],
            dropout=meta.get("hidden_dropout_prob", 0.1),
            attention_dropout=meta.get("attention_probs_dropout_prob", 0.1),
            initializer_range=meta.get("initializer_range", 0.02),
        )
    except KeyError as error:
        raise BadInput(f"{directory / 'config.json'} is not a BERT's: no {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = " ".join(map(str, (*first["loc"], first["msg"])))
        raise BadInput(f"{directory / 'config.json'} is not a BERT's: {reason}") from None
    return config, meta


def _tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    file = directory / "model.safetensors"
    if file.is_file():
        return file, load_tensors(file)
    file = directory / "pytorch_model.bin"
    if not file.is_file():
        raise BadInput(f"{directory} has neither model.safetensors nor pytorch_model.bin")
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # a damaged file fails anywhere: struct.error, IndexError, AssertionError ..
        raise BadInput(f"{file} is refused: it is damaged, or holds more than tensors") from None
    if isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        return file, tensors
    raise BadInput(f"{file} is not a table of tensors")


def _modern(name: str) -> str:
    """A tensor's name without prefix and with today's LayerNorm parameters."""
    name = name.removeprefix("bert.")
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def _heads(source: dict[str, Tensor], meta: dict[str, Any], config: ModelConfig
           ) -> tuple[dict[str, list[str]], Head | None, list[str]]:  # fmt: skip
    """The table of names for the parts the source has, its head, and the heads it lacks."""
    table, lacking = dict(ENCODER), []
    if "pooler.dense.weight" in source:
        table |= POOLER
    else:
        lacking.append("pooler")
    head = None
    if "classifier.weight" in source and "pooler.dense.weight" in source:
        names = meta.get("id2label") or {}
        count = source["classifier.weight"].size(0)
        labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
        regress = meta.get("problem_type") == "regression" or count == 1
        table |= CLASSIFIER
        head = Head("regress" if regress else "classify", () if regress else labels,
                    max_tokens=config.max_positions)  # fmt: skip
    if "cls.predictions.bias" in source and head is None:
        # an MLM checkpoint keeps its pooler for fine-tuning, but has no use for it
        table |= MLM
        head = Head("mlm", max_tokens=config.max_positions)
    elif "cls.predictions.bias" not in source:
        lacking.append("MLM head")
    return table, head, lacking


def _expand(table: dict[str, list[str]], layers: int) -> dict[str, list[str]]:
    """The table with every layer's number and both kinds of parameter written out."""
    full = {}
    for ours, theirs in table.items():
        for kind in ("weight", "bias") if ours.endswith("*") else ("",):
            for layer in range(layers) if "{}" in ours else (0,):
                full[ours.replace("*", kind).format(layer)] = [
                    t.replace("*", kind).format(layer) for t in theirs
                ]
    return full


def _take(wanted: dict[str, list[str]], source: dict[str, Tensor], file: Path
          ) -> tuple[dict[str, Tensor], set[str]]:  # fmt: skip
    weights, used = {}, set()
    for ours, theirs in wanted.items():
        parts = []
        for name in theirs:
            if name not in source:
                raise BadInput(f"{file} lacks the tensor {name}")
            tensor = source[name]
            if not tensor.is_floating_point():
                raise BadInput(f"{file}: {name} holds {tensor.dtype}, not floating-point numbers")
            if not torch.isfinite(tensor).all():
                raise BadInput(f"{file}: {name} holds NaN or infinity")
            parts.append(tensor.detach().float())
            used.add(name)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) > 1 or not shapes[0]:
            raise BadInput(f"{file}: {theirs[0]} and its fellows do not fit: {shapes}")
        weights[ours] = torch.cat(parts)
    return weights, used


def account(imported: Imported) -> str:
    """The lines that say what became of every tensor."""
    checkpoint = imported.checkpoint
    parameters = sum(w.numel() for w in checkpoint.weights.values())
    config = checkpoint.config
    lines = [
        f"BERT: {config.layers} layers, {config.hidden} wide, {config.heads} heads, "
        f"{parameters:,} parameters, {len(checkpoint.tokenizer):,} pieces",
        f"taken: {imported.taken} tensors",
    ]
    if imported.tied:
        lines.append(f"tied copies, equal to what they copy: {', '.join(imported.tied)}")
    lines.append(f"left over: {', '.join(imported.left) or 'none'}")
    if imported.lacking:
        lines.append(f"lacking in the source, new when trained: {', '.join(imported.lacking)}")
    return "\n".join(lines)

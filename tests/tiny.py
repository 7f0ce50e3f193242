"""Tiny models of transformers with awkward sizes, and batches in the form of either project.

T tokens in the batch, N sequences, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xformer.convert.names import FAMILIES, Family, Table, expand
from xformer.data import published, tokenizers, vocabularies
from xformer.data.batch import Batch
from xformer.data.files import write_json
from xformer.ops.attention import Layout

LAYERS, HEADS, HIDDEN, INNER, PIECES, LONGEST, EMBEDDING = 2, 3, 39, 53, 97, 17, 11
VOCABULARY = [*tokenizers.BERT_SPECIAL.values(), *(f"w{i}" for i in range(PIECES - 5))]
LETTERS = [chr(i) for i in range(33, 33 + PIECES - 5)]  # byte-level BPE keeps them as they are
LENGTHS = [1, 5, 5, 2, LONGEST, 3]
CLASSES = {
    "Bert": "bert",
    "Roberta": "roberta",
    "Albert": "albert",
    "DistilBert": "distilbert",
    "XLMRoberta": "xlm-roberta",
    "Camembert": "camembert",
    "ModernBert": "modernbert",
    "Esm": "esm",
}
# our settings of the newer families, for models of any size
MODERNBERT: dict[str, Any] = {
    "positions": "rotary",
    "rotary_base": 160000.0,
    "window": 3,
    "global_every": 2,
    "norm": "pre",
    "first_norm": False,
    "gated": True,
    "bias": False,
    "token_types": 0,
    "pooler": "norm",
}
ESM: dict[str, Any] = {
    "positions": "rotary",
    "rotary_precision": "float16",
    "zeroed_token": 4,
    "norm": "pre",
    "embedding_norm": False,
    "token_types": 0,
}
AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWCXBUZO.-"


def distance(actual: Tensor, expected: Tensor) -> float:
    """The relative error of `actual`. Both are taken as vectors."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def family_of(kind: str) -> Family:
    """The family to which a class of transformers belongs."""
    return FAMILIES[CLASSES[kind.partition("For")[0].removesuffix("Model")]]


def _settings(family: str) -> dict[str, Any]:
    if family == "distilbert":
        return {
            "vocab_size": PIECES,
            "dim": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": INNER,
            "max_position_embeddings": LONGEST,
        }
    actual: dict[str, Any] = {
        "vocab_size": PIECES,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "layer_norm_eps": 1e-2,
        "max_position_embeddings": LONGEST,
    }
    if family in ("modernbert", "esm"):  # heads of even size
        actual |= {"hidden_size": 36, "num_hidden_layers": 4}
    if family == "modernbert":
        del actual["layer_norm_eps"]
        special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
        actual |= special | {"norm_eps": 1e-2, "local_attention": 6, "cls_token_id": 2}
        actual |= {"sep_token_id": 3}
    if family == "esm":
        special = {"pad_token_id": 1, "mask_token_id": PIECES - 1}
        actual |= special | {"position_embedding_type": "rotary", "token_dropout": True}
        actual |= {"emb_layer_norm_before": False}
    if FAMILIES[family].form == "roberta":
        actual |= {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1, "pad_token_id": 1}
    if family == "albert":
        actual |= {"embedding_size": EMBEDDING, "num_hidden_layers": LAYERS + 1}
    return actual


def tiny(kind: str, directory: Path | None = None, **changes: Any) -> Any:
    """A model of transformers with random weights, saved with a vocabulary of its family."""
    transformers = pytest.importorskip("transformers")
    name = kind.partition("For")[0].removesuffix("Model")
    labels = 2 if kind.endswith(("QuestionAnswering", "PreTraining")) else 4
    settings = {"attn_implementation": "eager", "num_labels": labels, **_settings(CLASSES[name])}
    config = getattr(transformers, f"{name}Config")(**{**settings, **changes})
    model = getattr(transformers, kind)(config).eval()
    generator = seeded(3)
    for parameter, weight in model.named_parameters():
        norm = "norm" in parameter.lower() and parameter.endswith("weight")
        norm &= weight.ndim == 1
        weight.data = float(norm) + 0.3 * torch.randn(weight.shape, generator=generator)
    if directory is not None:
        model.save_pretrained(directory)
        if name == "Esm":
            _as_published(directory / "model.safetensors")
        write_vocabulary(CLASSES[name], directory)
    return model


def _as_published(file: Path) -> None:
    """Give the tensors of an ESM-2 the names that they have on the hub. transformers 5.23 writes
    names of TensorFlow, and the rotary frequencies once, for the layer "*"."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        layers = range(4) if ".*." in name else range(1)
        tensors |= {name.replace(".*.", f".{layer}."): tensor.clone() for layer in layers}
    save_file(tensors, file, metadata={"format": "pt"})


def write_vocabulary(family: str, directory: Path) -> None:
    """Write a vocabulary of PIECES pieces in the published format of the family."""
    if family == "roberta":
        pieces = [*tokenizers.ROBERTA_SPECIAL.values(), *LETTERS]
        write_json(directory / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
        (directory / "merges.txt").write_text("#version: 0.2\n")
    elif family in ("xlm-roberta", "camembert"):
        cls, pad, sep, unk, mask = tokenizers.ROBERTA_SPECIAL.values()
        first, last, ordinary = [cls, pad, sep, unk], [mask], LETTERS[1:]
        if family == "camembert":
            a, b, c = tokenizers.UNUSED
            first, ordinary = [a, pad, b, unk, c, cls, sep], LETTERS[4:]
        scores = [
            *((piece, 0.0) for piece in first),
            ("▁", -1.0),
            *((c, -2.0 - i / 7) for i, c in enumerate(ordinary)),
            *((piece, 0.0) for piece in last),
        ]
        published.export_tokenizer(
            vocabularies.xlm_roberta(scores, None), directory, LONGEST, False
        )
    elif family == "modernbert":
        byte_bpe().save(str(directory / "tokenizer.json"))
        names = {f"{role}_token": piece for role, piece in tokenizers.BERT_SPECIAL.items()}
        write_json(
            directory / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONGEST, **names},
        )
    elif family == "esm":
        cls, pad, eos, unk, mask = tokenizers.ESM_SPECIAL.values()
        pieces = [cls, pad, eos, unk, *AMINO_ACIDS, *(f"<null_{i}>" for i in range(PIECES - 32))]
        (directory / "vocab.txt").write_text("\n".join([*pieces, mask]), encoding="utf-8")
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "EsmTokenizer"})
    elif family == "albert":
        special = [(piece, 0.0) for piece in tokenizers.ALBERT_SPECIAL.values()]
        scores = [*special, ("▁", -1.0), *((c, -2.0 - i / 7) for i, c in enumerate(LETTERS[1:]))]
        published.export_tokenizer(vocabularies.albert(scores, None, [], []), directory, LONGEST)
    else:
        (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")


def byte_bpe() -> Any:
    """A tokenizer as ModernBERT's: special tokens and added words take turns after the pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    special = [*tokenizers.BERT_SPECIAL.values()]
    pieces = [*special, *LETTERS[:84], "Ġ", "Ã", "©", "Ġa", "Ã©"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("Ã", "©")]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(p, lstrip=p == "[MASK]", special=True) for p in special])
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    made.add_tokens([AddedToken("   ", normalized=True), AddedToken("[unused0]", normalized=True)])
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def random_batch(lengths: list[int] = LENGTHS, seed: int = 4, classes: int = 4) -> Batch[Tensor]:
    """A packed batch of random tokens and segments, with labels and a third of it masked."""
    total, generator = sum(lengths), seeded(seed)
    # no padding tokens: they have no gradient, and in RoBERTa no position
    tokens = torch.randint(2, PIECES, (total,), generator=generator)
    places = torch.randperm(total, generator=generator)[: total // 3 + 1].sort().values
    return Batch(
        tokens=tokens,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        segments=torch.randint(2, (total,), generator=generator),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        longest=max(lengths),
        labels=torch.randint(classes, (len(lengths),), generator=generator),
        places=places,
        targets=torch.randint(PIECES, places.shape, generator=generator),
    )


def lengths_of(batch: Batch[Tensor]) -> list[int]:
    """The length of every sequence."""
    return batch.cu_seqlens.diff().tolist()


def padded(batch: Batch[Tensor], family: str = "bert") -> dict[str, Tensor]:
    """The batch in transformers' padded form."""
    lengths = lengths_of(batch)
    given = {
        "input_ids": pad_sequence(batch.tokens.split(lengths), True, 7),
        "attention_mask": pad_sequence([torch.ones(n) for n in lengths], True),
    }
    if family in ("bert", "albert"):
        given["token_type_ids"] = pad_sequence(batch.segments.split(lengths), True, 1)
    return given


def packed(x: Tensor, batch: Batch[Tensor]) -> Tensor:
    """(N, L, ...) of transformers -> (T, ...), with the padding left out."""
    return torch.cat([row[:n] for row, n in zip(x, lengths_of(batch), strict=True)])


def in_our_names(
    theirs: dict[str, Tensor], family: Family, table: Table, layers: int
) -> dict[str, Tensor]:
    """Tensors of transformers' parameters under our names. Query, key and value are joined."""
    bare = {name.removeprefix(family.prefix): tensor for name, tensor in theirs.items()}
    names = expand(table, layers)
    if family.name == "modernbert":  # it has no biases, and no norm in the first layer
        names = {ours: parts for ours, parts in names.items() if set(parts) <= set(bare)}
    return {ours: torch.cat([bare[name] for name in names[ours]]) for ours in names}


def layout(bounds: Sequence[int] | np.ndarray) -> Layout:
    """The layout of a packed batch from the bounds of its sequences, (N + 1,) integers."""
    ends = np.array(bounds, np.int32)
    return Layout(torch.from_numpy(ends), int(np.diff(ends).max(initial=0)))

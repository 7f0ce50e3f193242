"""Compare PLUS-TFM checkpoints (Min et al. 2019) with the published formulas, one sequence at a
time.

L tokens of a sequence, C hidden size, H heads. The public code is not part of this project.
docs/results.md says how it compares on the same random checkpoints.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_model import distance
from torch import Tensor

from xformer.convert import plus
from xformer.data import tokenizers, vocabularies
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Split
from xformer.parallel.feed import to_device

C, H, INNER, LAYERS, LONGEST = 12, 3, 17, 2, 31
SEQUENCES = ["MKTAYIAKQROUBZX", "GG", "ACDEFGHIKLMNPQRSTVWY", "M"]


def tensors(classes: int | None = 2, learned: bool = False) -> dict[str, Tensor]:
    """A random checkpoint under the names of the public code."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.4 * torch.randn(shape, generator=generator)

    source = {"embed.tok_embed.weight": draw(25, C), "embed.seg_embed.weight": draw(2, C)}
    norms, linear = ["embed.norm"], dict[str, tuple[int, int]]()
    for i in range(LAYERS):
        norms += [f"blocks.{i}.norm1", f"blocks.{i}.norm2"]
        linear |= {f"blocks.{i}.attn.proj_{part}": (C, C) for part in "qkv"}
        linear |= {f"blocks.{i}.proj": (C, C), f"blocks.{i}.pwff.fc1": (INNER, C)}
        linear |= {f"blocks.{i}.pwff.fc2": (C, INNER)}
    for name in norms:
        source |= {f"{name}.gamma": 1 + draw(C), f"{name}.beta": draw(C)}
    for name, shape in linear.items():
        source |= {f"{name}.weight": draw(*shape), f"{name}.bias": draw(shape[0])}
    position = {"embed.pos_embed.weight": draw(LONGEST, C)}
    source |= position if learned else {"embed.pos_embed.pe": sinusoids()}
    source = {f"transformer.{name}": tensor for name, tensor in source.items()}
    source |= {"fc_lm.weight": draw(C, C), "fc_lm.bias": draw(C), "decoder_bias": draw(25)}
    source |= {"norm_lm.gamma": 1 + draw(C), "norm_lm.beta": draw(C)}
    source["decoder.weight"] = source["transformer.embed.tok_embed.weight"]
    if classes:
        source |= {"cls.weight": draw(classes, C), "cls.bias": draw(classes)}
    return source


def sinusoids() -> Tensor:
    table = [
        [(math.sin, math.cos)[i % 2](place / 10000 ** ((i - i % 2) / C)) for i in range(C)]
        for place in range(LONGEST)
    ]
    return torch.tensor(table)[None]


def norm(x: Tensor, name: str, w: dict[str, Tensor]) -> Tensor:
    deviation = ((x - x.mean(1, keepdim=True)) ** 2).sum(1, keepdim=True) / (C - 1)
    scaled = (x - x.mean(1, keepdim=True)) / (deviation.sqrt() + 1e-12).sqrt()
    return w[f"{name}.gamma"] * scaled + w[f"{name}.beta"]


def linear(x: Tensor, name: str, w: dict[str, Tensor]) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def reference(ids: list[int], w: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The hidden states (L, C), MLM logits (L, 25) and class logits of one sequence."""
    w = {name.removeprefix("transformer."): tensor for name, tensor in w.items()}
    L = len(ids)
    place = (
        w["embed.pos_embed.weight"]
        if "embed.pos_embed.weight" in w
        else (w["embed.pos_embed.pe"][0])
    )
    x = w["embed.tok_embed.weight"][ids] + place[:L] + w["embed.seg_embed.weight"][0]
    x = norm(x, "embed.norm", w)
    for i in range(LAYERS):
        q, k, v = (
            linear(x, f"blocks.{i}.attn.proj_{part}", w).view(L, H, C // H).transpose(0, 1)
            for part in "qkv"
        )
        shares = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(C // H), -1)
        y = (shares @ v).transpose(0, 1).reshape(L, C)
        x = norm(x + linear(y, f"blocks.{i}.proj", w), f"blocks.{i}.norm1", w)
        inner = gelu(linear(x, f"blocks.{i}.pwff.fc1", w))
        x = norm(x + linear(inner, f"blocks.{i}.pwff.fc2", w), f"blocks.{i}.norm2", w)
    logits = norm(gelu(linear(x, "fc_lm", w)), "norm_lm", w) @ w["decoder.weight"].T
    classes = linear(x[:1], "cls", w)[0] if "cls.weight" in w else None
    return x, logits + w["decoder_bias"], classes


def write(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "PLUS-TFM.pt")
    return tmp_path / "PLUS-TFM.pt"


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_an_imported_checkpoint_computes_the_published_formulas(
    tmp_path: Path, learned: bool, dtype: torch.dtype, most: float
) -> None:
    source = tensors(learned=learned)
    parallel = {f"module.{name}": tensor for name, tensor in source.items()}
    imported = plus.from_plus(write(tmp_path, parallel), heads=H)
    assert (imported.taken, imported.left) == (len(source) - (not learned), [])
    checkpoint = imported.checkpoint
    assert checkpoint.head is not None
    assert checkpoint.head.kind == "mlm"
    model = checkpoint.model().to(dtype)
    ids = checkpoint.tokenizer.encode_batch(SEQUENCES)
    offsets = np.cumsum([0, *map(len, ids)])
    split = Split("x", len(ids), 0, {"tokens": Ragged(np.concatenate(ids), offsets)})
    batch = Assembler(split, checkpoint.tokenizer, LONGEST).batch(np.arange(len(ids)))
    packed = to_device(batch, torch.device("cpu"))
    x = model.encoder(packed)
    assert model.mlm_head is not None
    assert model.pair_head is not None
    logits = model.mlm_head(x, model.encoder.embeddings.word.weight)
    classes = model.pair_head(model.pooled(x.index_select(0, packed.first)))
    wide = {name: tensor.to(dtype) for name, tensor in source.items()}
    most = most if learned else 1e-5  # sines and cosines are computed in single precision
    if not learned:  # the checkpoint stores the table in single precision
        wide["transformer.embed.pos_embed.pe"] = sinusoids().to(dtype)
    assert batch.rows is not None
    for i, row in enumerate(batch.rows):
        here = slice(*batch.cu_seqlens[i : i + 2])
        hidden, wanted, pair = reference([23, *ids[row].tolist(), 24], wide)
        assert distance(x[here], hidden) <= most
        assert distance(logits[here], wanted) <= most
        assert pair is not None
        assert distance(classes[i], pair) <= most


def test_the_alphabet_is_the_one_of_plus() -> None:
    tokenizer = vocabularies.plus()
    letters = "ARNDCQEGHILKMFPSTWYV"
    assert tokenizer.encode_batch([letters])[0].tolist() == list(range(1, 21))
    # O is read as K, U as C, and any other character as X
    assert tokenizer.encode_batch(["XOUBZ-*J"])[0].tolist() == [21, 12, 5, 21, 21, 21, 21, 21]
    assert (tokenizer.special["pad"], tokenizer.special["mask"], len(tokenizer)) == (0, 22, 25)
    assert (tokenizer.special["cls"], tokenizer.special["sep"], tokenizer.special["unk"]) == (
        23,
        24,
        21,
    )


def test_the_alphabet_is_saved(tmp_path: Path) -> None:
    vocabularies.plus().save(tmp_path)
    again = tokenizers.load_tokenizer(tmp_path)
    assert again.encode_batch(["OUX"])[0].tolist() == [12, 5, 21]
    assert again.fingerprint == vocabularies.plus().fingerprint


@pytest.mark.parametrize(
    ("classes", "kind", "labels"),
    [(1, "regress", ()), (3, "classify", ("LABEL_0", "LABEL_1", "LABEL_2")), (None, "mlm", ())],
)
def test_heads(tmp_path: Path, classes: int | None, kind: str, labels: tuple[str, ...]) -> None:
    head = plus.from_plus(write(tmp_path, tensors(classes)), heads=H).checkpoint.head
    assert head is not None
    assert (head.kind, head.labels) == (kind, labels)


def change(**changes: Any) -> dict[str, Any]:
    source = {**tensors(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in source.items() if value is not ...}


@pytest.mark.parametrize(
    ("source", "heads", "phrase"),
    [
        (change(decoder_bias=...), H, "not a PLUS-TFM checkpoint: it lacks decoder_bias"),
        (change(transformer__embed__tok_embed__weight=torch.ones(9, C)), H, "vocabulary of 9"),
        (change(transformer__embed__pos_embed__pe=...), H, "lacks embed.pos_embed.weight"),
        (change(transformer__blocks__1__proj__weight=...), H, "lacks the tensor blocks.1.proj"),
        (change(fc_lm__bias=torch.full((C,), math.nan)), H, "fc_lm.bias holds NaN"),
        (change(fc_lm__bias=torch.ones(5)), H, r"mlm_head.dense.bias is \(5,\)"),
        (change(decoder__weight=torch.ones(25, C)), H, "decoder.weight differs"),
        (tensors(), 5, "12 wide, which is not a multiple of 5 heads"),
        (change(transformer__embed__tok_embed__weight=torch.ones(25)), H, "not a PLUS-TFM check"),
        (change(cls__weight=torch.ones(2)), H, "not a PLUS-TFM checkpoint"),
        (change(transformer__embed__pos_embed__pe=torch.zeros(1, LONGEST, C)), H, "sines and cos"),
        ([1, 2], H, "not a state dict"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, source: Any, heads: int, phrase: str) -> None:
    with pytest.raises(BadInput, match=phrase):
        plus.from_plus(write(tmp_path, source), heads=heads)


def test_what_is_left_over_is_named(tmp_path: Path) -> None:
    source = change(transformer__blocks__x__foo=torch.ones(2))
    assert plus.from_plus(write(tmp_path, source), heads=H).left == ["blocks.x.foo"]

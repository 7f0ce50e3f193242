"""The transformer encoder of the BERT family, on packed tokens.

T tokens in the batch, N sequences, C hidden size, E embedding size, H heads, D = C / H, F inner
size of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from xformer.config import Settings
from xformer.data.batch import Batch
from xformer.model import native
from xformer.model.attention import (
    Backend,
    Layout,
    attention,
    drop,
    drop_add,
    explicit_attention,
    layout,
    new_seed,
    refuse_second_derivative,
    with_room,
)

FP32 = torch.float32
WIDEST = 8192  # a row that the fused LayerNorm of CUDA takes
# the settings that a transformer has no use for, and those that every architecture has
HILBERT_CNN = ("kmer", "letters")
COMMON = ("architecture", "vocab_size", "max_positions", "dropout", "head_dropout")


class ModelConfig(Settings):
    """Shape and behaviour of a model."""

    architecture: Literal["transformer", "hilbert_cnn"] = "transformer"
    """An encoder of BERT's family, or the convolutional network for DNA (Yin et al. 2018); the
    latter predicts classes and scores, and has of these keys only `kmer`, `letters`, `vocab_size`,
    `max_positions`, `head_dropout` and `dropout`."""
    kmer: int = Field(4, ge=1, le=6)
    """Letters that hilbert_cnn reads as one word; 4^kmer channels."""
    letters: tuple[int, ...] = ()
    """Ids of the letters that hilbert_cnn's words are made of; empty takes the tokenizer's A, C, G
    and T. A word with any other letter is all zero."""
    vocab_size: int = Field(0, ge=0, lt=2**31)
    """Pieces in the embedding table; 0 takes the tokenizer's."""
    layers: int = Field(12, ge=1)
    """Number of transformer layers."""
    hidden: int = Field(768, ge=1, lt=2**24)
    """Width of the hidden states."""
    embedding: int = Field(0, ge=0, lt=2**24)
    """Width of the embeddings, projected to `hidden` (ALBERT); 0 takes `hidden`, unprojected."""
    heads: int = Field(12, ge=1, lt=2**24)
    """Attention heads a layer; must divide `hidden`."""
    intermediate: int = Field(3072, ge=1, lt=2**24)
    """Inner width of the feed-forward part."""
    max_positions: int = Field(512, ge=1, lt=2**31)
    """Longest row in tokens, special ones included."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """A table of position vectors, or sines and cosines (Vaswani et al. 2017, section 3.5)."""
    first_position: int = Field(0, ge=0, lt=2**31)
    """Row of the position table that a row's first token takes (RoBERTa: 2)."""
    token_types: int = Field(2, ge=0, lt=2**31)
    """Segment embeddings: 2 tells the texts of a pair apart, 1 is the same for all (RoBERTa), 0
    has none (DistilBERT)."""
    shared_layers: bool = False
    """One set of weights for all layers (ALBERT)."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum (BERT) or before each part (pre-LN)."""
    norm_form: Literal["variance", "deviation"] = "variance"
    """What LayerNorm divides by the square root of: the variance, or the deviation (PLUS)."""
    layer_norm_eps: float = Field(1e-12, gt=0)
    """Epsilon of every LayerNorm."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward part and of the MLM head."""
    pooler: Literal["tanh", "relu", "none"] = "tanh"
    """Activation of the pooler, under a task head (DistilBERT: relu); none: heads see the first
    token as it is (PLUS)."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on embeddings and on the output of each part."""
    head_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout before a head of classes or scores; absent: `dropout`."""
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on attention probabilities."""
    dropout_form: Literal["bert", "roberta", "albert", "distilbert"] = "bert"
    """Where dropout falls. Each family's is as BERT's, but RoBERTa drops before the pooler of a
    head too, ALBERT not on the output of the feed-forward part (and before a head of pairs),
    DistilBERT not on that of attention, and before heads of spans and words by `dropout`."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of fresh weights."""

    @property
    def width(self) -> int:
        """Width of the embeddings, E."""
        return self.embedding or self.hidden

    @property
    def before_head(self) -> float:
        """Dropout before a head of classes or scores."""
        return self.dropout if self.head_dropout is None else self.head_dropout

    @property
    def stored_layers(self) -> int:
        """Layers that have weights of their own."""
        return 1 if self.shared_layers else self.layers

    @model_validator(mode="after")
    def _one_architecture(self) -> ModelConfig:
        cnn = self.architecture == "hilbert_cnn"
        for name, field in type(self).model_fields.items():
            known = name in COMMON or (name in HILBERT_CNN) == cnn
            if not known and getattr(self, name) != field.default:
                raise ValueError(
                    f"model.{name} has no meaning with model.architecture={self.architecture}"
                )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} is no multiple of model.heads={self.heads}"
            )
        return self


@dataclass(frozen=True)
class Packed:
    """A packed batch as tensors on a device; see xformer.data.batch.Batch."""

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    segments: Tensor  # (T,)
    layout: Layout
    labels: Tensor | None = None  # (N,), spans (N, 2)
    places: Tensor | None = None  # (M,)
    targets: Tensor | None = None  # (M,)

    @property
    def first(self) -> Tensor:
        """Where each sequence begins, (N,)."""
        return self.layout.cu_seqlens[:-1]


def to_device(batch: Batch, device: torch.device) -> Packed:
    """Move a batch to a device, on CUDA from pinned memory without waiting."""

    def move(array) -> Tensor | None:  # type: ignore[no-untyped-def]
        if array is None:
            return None
        tensor = torch.from_numpy(array)
        return (
            tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
        )

    tokens, positions, segments = (move(a) for a in (batch.tokens, batch.positions, batch.segments))
    assert tokens is not None
    assert positions is not None
    assert segments is not None
    return Packed(
        tokens,
        positions,
        segments,
        layout(batch.cu_seqlens, device),
        move(batch.labels),
        move(batch.places),
        move(batch.targets),
    )


def activate(x: Tensor, name: str) -> Tensor:
    """The activation a config names."""
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _table(rows: int, columns: int) -> nn.Embedding:
    # with a weight given, torch does not initialise it: that imports sympy and more, 1.5 s
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))


def fuses(x: Tensor) -> bool:
    """Whether the Triton kernel for residual, dropout and LayerNorm serves (T, C) of this kind."""
    return x.is_cuda and x.size(1) <= WIDEST and not native.watched()


class _AddNorm(torch.autograd.Function):
    """LayerNorm(z) and z = x + dropout(y) by a native kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float, rate: float
    ) -> tuple[Tensor, Tensor]:
        T, C = x.size()
        z, out, moments = torch.empty_like(x), torch.empty_like(x), x.new_empty(T, 2)
        ctx.rest = T, C, new_seed() if rate > 0.0 else 0, rate
        native.call(
            "add_norm", y.dtype, x, y, weight, bias, z, out, moments, T, C, eps, *ctx.rest[2:]
        )
        ctx.save_for_backward(z, moments, weight)
        ctx.type = y.dtype
        ctx.set_materialize_grads(False)
        return out, z

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_z: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the native LayerNorm has none: give the back end explicit")
        z, moments, weight = ctx.saved_tensors
        d_out = torch.zeros_like(z) if d_out is None else d_out.contiguous()
        d_z = d_z if d_z is None else d_z.contiguous()
        d_x, (d_weight, d_bias) = torch.empty_like(z), weight.new_empty(2, *weight.size())
        same = ctx.type == z.dtype and ctx.rest[-1] == 0.0
        d_y = d_x if same else torch.empty_like(z, dtype=ctx.type)
        native.call(
            "add_norm_backward",
            ctx.type,
            d_out,
            d_z,
            z,
            moments,
            weight,
            d_x,
            d_y,
            d_weight,
            d_bias,
            *ctx.rest,
        )
        return d_x, d_y, d_weight, d_bias, None, None


def add_norm(
    x: Tensor,
    y: Tensor,
    norm: nn.Module,
    rate: float,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """norm(z) and z = x + dropout(y), all (T, C); in one kernel, unless `plain` operations are
    asked for, which can be differentiated twice; or hooks wait for the norm."""
    plain = plain or bool(norm._forward_hooks)
    if not plain and isinstance(norm, nn.LayerNorm) and fuses(x):
        from xformer.model import norm_kernels

        seed = new_seed() if rate > 0.0 else 0
        return norm_kernels.add_norm(y, x, norm.weight, norm.bias, norm.eps, rate, seed)
    if (
        not plain
        and isinstance(norm, nn.LayerNorm)
        and x.dtype == norm.weight.dtype == FP32
        and (native.serves(x, y, norm.weight))
    ):
        out, z = _AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, rate)
        assert isinstance(out, Tensor)
        assert isinstance(z, Tensor)
        return out, z
    z = drop_add(x, y, rate, plain)
    return norm(z), z


class DeviationNorm(nn.Module):
    """LayerNorm as PLUS has it: it divides by the square root of the deviation (with N - 1), not of
    the variance (Min et al. 2019, public code)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(-1, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (deviation + self.eps).sqrt() + (
            self.bias
        )


def layer_norm(config: ModelConfig, width: int) -> nn.Module:
    """The LayerNorm that a config asks for, over `width` numbers."""
    form = DeviationNorm if config.norm_form == "deviation" else nn.LayerNorm
    return form(width, config.layer_norm_eps)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Positions (T,) -> (T, width), sines and cosines by turns (Vaswani et al. 2017, 3.5)."""
    even = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None] * torch.exp(even * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


class Embeddings(nn.Module):
    """Word, position and segment vectors, summed and normalised (also before pre-LN layers), then
    projected where they are narrower than the layers (Lan et al. 2020, section 3.1)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E = config.width
        self.word = _table(config.vocab_size, E)
        learned = config.positions == "learned"
        rows = config.first_position + config.max_positions
        self.position = _table(rows, E) if learned else None
        self.segment = _table(config.token_types, E) if config.token_types else None
        self.norm = layer_norm(config, E)
        self.projection = nn.Linear(E, config.hidden) if config.embedding else None
        self.first_position = config.first_position
        self.dropout = config.dropout

    def forward(self, batch: Packed) -> Tensor:
        x = self.word(batch.tokens)  # (T, E)
        places = batch.positions + self.first_position
        if self.position is not None:
            x = x + self.position(places)
        else:
            x = x + sinusoids(places, x.size(1)).to(x.dtype)
        if self.segment is not None:
            one = self.segment.num_embeddings == 1  # of no use to tell texts apart
            x = x + (self.segment.weight[0] if one else self.segment(batch.segments))
        x = drop(self.norm(x), self.dropout, self.training)
        return x if self.projection is None else self.projection(x)  # (T, C)


class SelfAttention(nn.Module):
    """Multi-head self-attention with one product for queries, keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.heads = config.heads
        self.dropout = config.attention_dropout

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        backend: Backend,
        places: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """x (T, C) -> (T, C), with `places` (P,) what leaves these tokens alone, (P, C); and with
        the back end "explicit" the maps, else none."""
        T, C = x.size()
        qkv = self.qkv(x).view(T, 3, self.heads, C // self.heads)
        dropout = self.dropout if self.training else 0.0
        maps: list[Tensor] = []
        if backend == "explicit":
            y, maps = explicit_attention(qkv, layout, dropout)
        else:
            y = attention(qkv, layout, dropout, backend)
        y = y.reshape(T, C)
        return self.out(y if places is None else y.index_select(0, places)), maps


class MLP(nn.Module):
    """The position-wise feed-forward part."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.up(x), self.activation))


class Layer(nn.Module):
    """Attention and MLP with their residuals; post-LN (BERT) or pre-LN (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = layer_norm(config, config.hidden)
        self.mlp = MLP(config)
        self.mlp_norm = layer_norm(config, config.hidden)
        self.pre_norm = config.norm == "pre"
        self.dropout = 0.0 if config.dropout_form == "distilbert" else config.dropout
        self.mlp_dropout = 0.0 if config.dropout_form == "albert" else config.dropout

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        backend: Backend,
        places: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """x (T, C) -> (T, C), or (P, C) at `places`, and the maps as of SelfAttention."""
        plain = backend == "explicit"
        rates = (self.dropout, self.mlp_dropout) if self.training else (0.0, 0.0)
        before = self.attention_norm(x) if self.pre_norm else x
        y, maps = self.attention(before, layout, backend, places)
        x = x if places is None else x.index_select(0, places)
        if self.pre_norm:
            normed, x = add_norm(x, y, self.mlp_norm, rates[0], plain)
            return drop_add(x, self.mlp(normed), rates[1], plain), maps
        x, _ = add_norm(x, y, self.attention_norm, rates[0], plain)
        x, _ = add_norm(x, self.mlp(x), self.mlp_norm, rates[1], plain)
        return x, maps


@dataclass(frozen=True)
class Inside:
    """What an encoder computed on the way: `hidden[0]` the embeddings, then one a layer, (T, C);
    `maps[layer][sequence]` is (H, L, L)."""

    hidden: list[Tensor]
    maps: list[list[Tensor]]


class Encoder(nn.Module):
    """The encoder of BERT (Devlin et al. 2019, section 3) and its relatives."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.stored_layers))
        pre_norm = config.norm == "pre"
        self.final_norm = layer_norm(config, config.hidden) if pre_norm else None

    def forward(
        self,
        batch: Packed,
        backend: Backend = "auto",
        places: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, (T, C); with `places` (P,) those of these tokens alone, (P, C),
        for which the last layer does no more than they need."""
        count = len(batch.tokens) if places is None else len(places)
        if backend not in ("varlen", "triton"):  # which take no rows behind the last sequence
            arrays = (batch.tokens, batch.positions, batch.segments)
            tokens, positions, segments = map(with_room, arrays)
            batch = replace(batch, tokens=tokens, positions=positions, segments=segments)
            places = None if places is None else with_room(places)
        x = self.embeddings(batch)
        last = self.config.layers - 1
        for i in range(self.config.layers):
            wanted = places if i == last else None
            x, _ = self.layers[i % len(self.layers)](x, batch.layout, backend, wanted)
        x = x if len(x) == count else x[:count]
        return x if self.final_norm is None else self.final_norm(x)

    def inside(self, batch: Packed, backend: Backend = "auto") -> Inside:
        """Every hidden state, and with the back end "explicit" every attention map."""
        x = self.embeddings(batch)
        hidden, all_maps = [x], []
        for i in range(self.config.layers):
            x, maps = self.layers[i % len(self.layers)](x, batch.layout, backend)
            hidden.append(x)
            all_maps.append(maps)
        if self.final_norm is not None:
            hidden[-1] = self.final_norm(x)
        return Inside(hidden, all_maps)

"""The transformer encoder of BERT and its relatives, up to ModernBERT and ESM-2, on packed tokens.

The sequences of a batch lie one after another, without padding between them.

T tokens in the batch, N sequences, P places (tokens whose hidden states are needed), C hidden size,
E embedding size, H heads, D = C / H, F inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from xformer.data.batch import Batch
from xformer.model.config import ModelConfig
from xformer.ops.add_norm import add_norm
from xformer.ops.attention import Layout, attention
from xformer.ops.cast_weights import cast_weights
from xformer.ops.dropout import dropout
from xformer.ops.padding import pad_rows
from xformer.ops.rotary import rotary, turns

Turns = tuple[Tensor, Tensor]  # see xformer.ops.rotary
MASKED = 0.15 * 0.8  # the share of mask tokens in the training of ESM-2


class Norm(nn.Module):
    """LayerNorm over the last dimension (Ba et al. 2016), in the form that the config names."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias else None
        self.eps = config.layer_norm_eps
        self.by_variance = config.norm_form == "variance"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        if self.by_variance:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        # PLUS divides by the square root of the standard deviation, and x.std divides by C - 1, not
        # by C (Min et al. 2019, public code).
        scale = (x.std(-1, keepdim=True) + self.eps).sqrt()
        x = self.weight * (x - x.mean(-1, keepdim=True)) / scale
        return x if self.bias is None else x + self.bias


class AddNorm(Norm):
    """The residual sum z = x + dropout(y), and its LayerNorm."""

    def __init__(self, config: ModelConfig, rate: float):
        super().__init__(config, config.hidden)
        self.rate = rate

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, y (T, C) -> LayerNorm(z) and z, (T, C) each."""
        rate = self.rate if self.training else 0.0
        if self.by_variance:
            return add_norm(x, y, self.weight, self.bias, self.eps, rate)
        z = x + dropout(y, rate)
        return super().forward(z), z


class Embeddings(nn.Module):
    """The sum of word, position and segment vectors, normalised unless `embedding_norm` is false.

    If the embeddings are narrower than the layers, they are projected (Lan et al. 2020, section
    3.1).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, rows = config.width, config.first_position + config.max_positions
        learned = config.positions == "learned"
        self.word = _table(config.vocab_size, E)
        self.position = _table(rows, E) if learned else None
        self.segment = _table(config.token_types, E) if config.token_types else None
        self.norm = Norm(config, E) if config.embedding_norm else None
        self.projection = nn.Linear(E, config.hidden) if config.embedding else None
        self.first_position, self.zeroed = config.first_position, config.zeroed_token
        self.sinusoidal = config.positions == "sinusoidal"
        self.dropout = 0.0 if config.dropout_form == "esm" else config.dropout

    def forward(self, batch: Batch[Tensor]) -> Tensor:
        """The batch's tokens as vectors, (T, C)."""
        x = self.word(batch.tokens)  # (T, E)
        if self.zeroed is not None:
            x = x * embedding_scale(batch, self.zeroed)[:, None]
        positions = batch.positions + self.first_position  # (T,)
        if self.position is not None:
            x = x + self.position(positions)
        elif self.sinusoidal:
            x = x + sinusoids(positions, x.size(1)).to(x.dtype)
        if self.segment is not None:
            same_for_all = self.segment.num_embeddings == 1  # RoBERTa
            x = x + (self.segment.weight[0] if same_for_all else self.segment(batch.segments))
        x = x if self.norm is None else self.norm(x)
        x = dropout(x, self.dropout if self.training else 0.0)
        return x if self.projection is None else self.projection(x)  # (T, C)


class Attention(nn.Module):
    """Multi-head self-attention; one matrix product gives queries, keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, config.bias)
        self.out = nn.Linear(config.hidden, config.hidden, config.bias)
        self.heads = config.heads
        self.dropout = config.attention_dropout

    def forward(
        self, x: Tensor, layout: Layout, places: Tensor | None, turn: Turns | None
    ) -> Tensor:
        """x (T, C) -> (T, C), or (P, C) for the tokens at `places` (P,). `turn` rotates queries and
        keys."""
        T, C = x.size()
        qkv = self.qkv(x).view(T, 3, self.heads, C // self.heads)  # (T, 3, H, D)
        qkv = qkv if turn is None else rotary(qkv, *turn)
        y = attention(qkv, layout, self.dropout if self.training else 0.0)  # (T, H, D)
        y = y.reshape(T, C)
        return self.out(y if places is None else y.index_select(0, places))  # (T, C) or (P, C)


class MLP(nn.Module):
    """The feed-forward network, applied to each token separately."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        halves = 2 if config.gated else 1
        self.up = nn.Linear(config.hidden, halves * config.intermediate, config.bias)
        self.down = nn.Linear(config.intermediate, config.hidden, config.bias)
        self.activation, self.gated = config.activation, config.gated
        self.dropout = config.dropout if config.dropout_form == "modernbert" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x (T, C) -> (T, C)."""
        if self.gated:
            x, gate = self.up(x).chunk(2, 1)  # (T, F) each
            x = activate(x, self.activation) * gate
        else:
            x = activate(self.up(x), self.activation)  # (T, F)
        return self.down(dropout(x, self.dropout if self.training else 0.0))  # (T, C)


class Layer(nn.Module):
    """Attention and MLP with their residuals; post-LN (BERT) or pre-LN (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        form, pre_norm = config.dropout_form, config.norm == "pre"
        after_attention = 0.0 if form == "distilbert" else config.dropout
        after_attention = config.attention_dropout if form == "modernbert" else after_attention
        after_mlp = 0.0 if form in ("albert", "modernbert") else config.dropout
        self.attention = Attention(config)
        self.attention_norm: nn.Module = nn.Identity()
        if not pre_norm:
            self.attention_norm = AddNorm(config, after_attention)
        elif number > 0 or config.first_norm:
            self.attention_norm = Norm(config, config.hidden)
        self.mlp = MLP(config)
        # A pre-LN layer adds the output of attention to the residual in mlp_norm.
        self.mlp_norm = AddNorm(config, after_attention if pre_norm else after_mlp)
        self.pre_norm, self.after_mlp = pre_norm, after_mlp

    def forward(
        self, x: Tensor, layout: Layout, places: Tensor | None = None, turn: Turns | None = None
    ) -> Tensor:
        """x (T, C) -> (T, C), or (P, C) for the tokens at `places` (P,)."""
        y = self.attention(self.attention_norm(x) if self.pre_norm else x, layout, places, turn)
        x = x if places is None else x.index_select(0, places)
        if self.pre_norm:
            normed, x = self.mlp_norm(x, y)
            return x + dropout(self.mlp(normed), self.after_mlp if self.training else 0.0)
        x, _ = self.attention_norm(x, y)
        x, _ = self.mlp_norm(x, self.mlp(x))
        return x


class Encoder(nn.Module):
    """The encoder of BERT (Devlin et al. 2019, section 3) and its relatives."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.stored_layers))
        self.final_norm = Norm(config, config.hidden) if config.norm == "pre" else None
        self.has_window = [int(config.has_window(i)) for i in range(config.layers)]

    def forward(
        self, batch: Batch[Tensor], places: Tensor | None = None, depth: int | None = None
    ) -> Tensor:
        """The last hidden states, (T, C), or (P, C) for the tokens at `places` (P,).

        With `places`, the last layer computes only these tokens after its attention. `depth` asks
        for the hidden states after this many layers; 0 is the output of the embeddings. Raises
        ValueError if the model has fewer layers, or if a row is longer than it accepts.
        """
        layers, most = self.config.layers, self.config.max_positions
        depth = layers if depth is None else depth
        if not 0 <= depth <= layers:
            raise ValueError(f"depth={depth} must be 0 (the embeddings) to {layers}, the layers")
        if batch.longest > most:
            raise ValueError(f"a row has {batch.longest} tokens, but the model takes {most}")
        count = len(batch.tokens if places is None else places)
        windows = (0, self.config.window)  # [0]: layers that attend to the whole row; [1]: others
        layouts = [Layout(batch.cu_seqlens, batch.longest, window) for window in windows]
        batch, places = _padded(batch), None if places is None else pad_rows(places)
        x = self.embeddings(batch)  # (T, C)
        rotations = self._rotations(batch.positions)
        # the weights of each layer, cast to bf16; empty in fp32
        weights = [cast_weights(layer) for layer, _ in zip(self.layers, range(depth), strict=False)]
        for i in range(depth):
            own = i % len(self.layers)  # ALBERT has one layer for all
            last, local = i == depth - 1, self.has_window[i]
            inputs = x, layouts[local], places if last else None, rotations[local]
            x = functional_call(self.layers[own], weights[own], inputs, tie_weights=False)
        if not depth and places is not None:
            x = x.index_select(0, places)
        x = x if len(x) == count else x[:count]  # without the padding
        if self.final_norm is None or depth < layers:
            return x
        return self.final_norm(x)

    def _rotations(self, positions: Tensor) -> list[Turns | None]:
        """The rotations in layers that attend to the whole row, and in layers with a window."""
        config = self.config
        if config.positions != "rotary":
            return [None, None]
        size, precision = config.hidden // config.heads, config.rotary_precision
        whole = turns(positions, size, config.rotary_base, precision)
        if not config.window or config.local_rotary_base == config.rotary_base:
            return [whole, whole]
        return [whole, turns(positions, size, config.local_rotary_base, precision)]


def _padded(batch: Batch[Tensor]) -> Batch[Tensor]:
    """The batch, padded by `pad_rows` after its last sequence."""
    tokens, positions, segments = map(pad_rows, (batch.tokens, batch.positions, batch.segments))
    if tokens is batch.tokens:
        return batch
    return replace(batch, tokens=tokens, positions=positions, segments=segments)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation that a config names."""
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def embedding_scale(batch: Batch[Tensor], zeroed: int) -> Tensor:
    """The factor of each token's embedding, (T,): 0 for the token `zeroed`. The others share one
    factor in a row, which keeps the sum of the row's factors at 0.88 of its length, the mean in the
    training of ESM-2 (Lin et al. 2023, public code)."""
    ends, token = batch.cu_seqlens, torch.arange(len(batch.tokens), device=batch.tokens.device)
    kept = batch.tokens != zeroed
    before = F.pad(kept.cumsum(0), (1, 0)).index_select(0, ends)  # (N + 1,)
    share = before.diff() / ends.diff().clamp(min=1)  # (N,)
    row = torch.searchsorted(ends[1:], token, right=True).clamp(max=len(ends) - 2)
    return torch.where(kept, (1 - MASKED) / share.index_select(0, row), 0.0)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Positions (T,) -> (T, width), alternating sines and cosines (Vaswani et al. 2017, 3.5)."""
    even = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None] * torch.exp(even * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


def _table(rows: int, columns: int) -> nn.Embedding:
    # With `_weight` PyTorch skips its own initialisation, which imports sympy and takes 1.5 s.
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))

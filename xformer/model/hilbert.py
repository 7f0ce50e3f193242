"""Hilbert-CNN: DNA as an image along a Hilbert curve, and residual convolutions on it (Yin et al.
2018; the DNA baseline of Kao & Lee 2021, table 5).

T tokens in the batch, N sequences, k letters in a word (a k-mer), C channels of an image of Y x X
cells. Layers, filters and norms are those of the authors' public code; the figure in the paper is
simplified. For 500 letters and two classes there are 963,460 parameters, 961,924 of them outside
the norms. The paper reports 961 K and does not say what it counts; presumably not the norms.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.data.batch import Batch
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer
from xformer.model.config import ModelConfig

FEATURES = 50  # width of the features that the task head reads
INNER = 4  # channels between the two convolutions of a residual branch
MOMENTUM = 0.65  # share of the newest batch in the running statistics
EPSILON = 1e-3  # added to a variance


def letters_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of A, C, G and T. Raises BadInput if one of them is not a token."""
    if missing := [letter for letter in "ACGT" if letter not in tokenizer.pieces]:
        raise BadInput(
            "model.architecture=hilbert_cnn reads the letters A C G T as tokens; the store's "
            f"tokenizer lacks {' '.join(missing)}; make the store with one of --kind symbols"
        )
    return tuple(tokenizer.pieces.index(letter) for letter in "ACGT")


@cache
def hilbert_curve(side: int) -> Tensor:
    """Row and column of each cell of a square in the order of the Hilbert curve, (side^2, 2).

    `side` is a power of two. The curve begins at (0, 0) and fills the upper half first.
    """
    if side == 1:
        return torch.zeros(1, 2, dtype=torch.long)
    half = side // 2
    quarter = hilbert_curve(half)
    return torch.cat(
        [
            quarter.flip(1),
            quarter + torch.tensor([0, half]),
            quarter + half,
            torch.tensor([side - 1, half - 1]) - quarter.flip(1),
        ]
    )


def image_size(words: int) -> tuple[int, int]:
    """(Y, X) of the smallest image for this many words: a square, or its upper half if that is
    enough (16 x 32 for the 497 words of 500 letters)."""
    bits = max(words - 1, 0).bit_length()
    side = 2 ** -(-bits // 2)
    return 2**bits // side, side


def image(batch: Batch[Tensor], letters: tuple[int, ...], k: int, size: tuple[int, int]) -> Tensor:
    """One-hot words on the curve, (N, len(letters)^k, Y, X), float32.

    Word i of a row consists of its letters i to i + k - 1. A word that contains anything but
    `letters` (an ambiguity letter, the separator of a pair) is all zero, and so are the cells after
    the last word. Special tokens take no cell. (The public code has no rule for other letters.)
    """
    codes = torch.full_like(batch.tokens, -1)  # (T,)
    for code, letter in enumerate(letters):
        codes = torch.where(batch.tokens == letter, code, codes)
    windows = F.pad(codes, (0, k - 1), value=-1).unfold(0, k, 1)  # (T, k)
    whole = (windows >= 0).all(1)  # (T,); a window into the next row contains special tokens
    words = torch.zeros_like(codes)  # (T,)
    for i in range(k):
        words = words * len(letters) + windows[:, i]
    sizes, (Y, X), C = batch.cu_seqlens.diff(), size, len(letters) ** k
    number = torch.arange(len(sizes), device=codes.device)
    # The host knows how many tokens there are. Without output_size it would wait for the device.
    rows = torch.repeat_interleave(number, sizes, output_size=len(codes))  # (T,)
    curve = _curve_on(X, codes.device)
    y, x = curve[(batch.positions - 1).clamp(0, len(curve) - 1)].unbind(1)  # (T,) each
    places = ((rows * C + words) * Y + y) * X + x
    # Words without a cell go to one extra place at the end, which is cut off.
    out = torch.zeros(len(sizes) * C * Y * X + 1, device=codes.device)
    # not `out[...] = 1.0`, which copies the number to the GPU and makes the host wait
    out.index_fill_(0, torch.where(whole, places, len(out) - 1), 1.0)
    return out[:-1].view(len(sizes), C, Y, X)


@cache
def _curve_on(side: int, device: torch.device) -> Tensor:
    """`hilbert_curve` on a device, copied there once."""
    return hilbert_curve(side).to(device)


class BatchNorm(nn.Module):
    """Normalises each channel over the batch, or in evaluation by running statistics (Ioffe &
    Szegedy 2015).

    The batch is a micro-batch of one rank. Unlike for the transformer, training therefore depends
    on `batch.accumulate` and on the number of ranks. The running statistics are buffers of the
    checkpoint. Every step averages them over the ranks (see Replicas.reduce), so that all ranks
    score the same model and a continued run is exact.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> the same shape."""
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        several = x.numel() > x.size(1)  # a single value has no variance: use the running one
        return F.batch_norm(x, *tensors, self.training and several, MOMENTUM, EPSILON)


class Convolution(nn.Conv2d):
    """A square convolution that keeps the image size. An even width reaches one cell further right
    and down than left and up."""

    def __init__(self, channels: int, filters: int, width: int):
        super().__init__(channels, filters, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> (N, filters, Y, X)."""
        less, more = (self.kernel_size[0] - 1) // 2, self.kernel_size[0] // 2
        return super().forward(F.pad(x, (less, more, less, more)))


class Branch(nn.Module):
    """Two convolutions beside a shortcut, which is a 1 x 1 convolution if the width changes."""

    def __init__(self, channels: int, filters: int, first: int, second: int):
        super().__init__()
        self.first = Convolution(channels, INNER, first)
        self.first_norm = BatchNorm(INNER)
        self.second = Convolution(INNER, filters, second)
        self.second_norm = BatchNorm(filters)
        self.shortcut = Convolution(channels, filters, 1) if channels != filters else None
        self.norm = BatchNorm(filters)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> (N, filters, Y, X)."""
        y = self.second_norm(self.second(F.elu(self.first_norm(self.first(x)))))
        return F.elu(self.norm(y + (x if self.shortcut is None else self.shortcut(x))))


class Block(nn.Module):
    """The paper's computational block: two branches and a shortcut, summed, then mixed."""

    def __init__(self, channels: int, filters: int, widths: tuple[int, int, int, int]):
        super().__init__()
        self.branches = nn.ModuleList(
            Branch(channels, filters, *pair) for pair in (widths[:2], widths[2:])
        )
        self.shortcut = Convolution(channels, filters, 1) if channels != filters else None
        self.mix = Convolution(filters, filters, 1)
        self.norm = BatchNorm(filters)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> (N, filters, Y, X)."""
        y = x if self.shortcut is None else self.shortcut(x)
        for branch in self.branches:
            y = y + branch(x)
        return F.elu(self.norm(self.mix(y)))


def _halved(x: Tensor) -> Tensor:
    """The means of 2 x 2 cells; at an odd edge, of the cells that exist."""
    return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)


class HilbertCNN(nn.Module):
    """From DNA letters to features, for a head of classes or scores (Yin et al. 2018).

    All images have the size of the longest possible row (`max_positions`), because the first dense
    layer needs a fixed size. `head_dropout` is applied before each of the three dense layers,
    including the task head.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.size = image_size(config.max_positions - 2 - config.kmer + 1)
        channels = (len(config.letters) or 4) ** config.kmer
        self.first = Convolution(channels, 64, 7)
        self.second = Convolution(64, 64, 5)
        self.norm = BatchNorm(64)
        self.blocks = nn.ModuleList(
            [
                Block(64, 32, (8, 4, 4, 3)),
                Block(32, 32, (2, 4, 4, 3)),
                Block(32, 32, (2, 2, 2, 2)),
                Block(32, 32, (3, 2, 2, 3)),
            ]
        )
        self.last_norm = BatchNorm(32)
        cells = math.prod(-(-length // 16) for length in self.size)  # halved four times
        self.dense = nn.Linear(32 * cells, 100)
        self.features = nn.Linear(100, FEATURES)

    def forward(self, batch: Batch[Tensor]) -> Tensor:
        """The features of each sequence, (N, FEATURES)."""
        x = image(batch, self.config.letters, self.config.kmer, self.size)  # (N, C, Y, X)
        x = x.to(self.first.weight.dtype)
        x = _halved(F.elu(self.norm(self.second(self.first(x)))))  # (N, 64, Y/2, X/2)
        x = _halved(self.blocks[0](x))  # (N, 32, Y/4, X/4)
        for block in self.blocks[1:]:
            x = block(x)
        x = _halved(F.elu(self.last_norm(_halved(x)))).flatten(1)  # (N, 32 * Y/16 * X/16)
        dropout = self.config.before_head
        x = F.elu(self.dense(F.dropout(x, dropout, self.training)))
        return F.elu(self.features(F.dropout(x, dropout, self.training)))


def initial_std(shape: torch.Size) -> float:
    """The standard deviation of a fresh weight of this shape.

    A convolution (filters, C, height, width) has sqrt(2 / (9 filters height width)), and a dense
    layer (outputs, inputs) sqrt(1 / inputs).
    """
    if len(shape) == 4:
        return math.sqrt(2.0 / (9 * shape[0] * shape[2] * shape[3]))
    return shape[1] ** -0.5

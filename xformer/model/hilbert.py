"""Hilbert-CNN: DNA laid on a Hilbert curve as an image, and residual convolutions on it (Yin et al.
2018; the DNA baseline of Kao & Lee 2021, table 5).

N sequences of T tokens in all, k letters a word (a k-mer), an image of Y x X cells with C channels.
Layers, filters and norms are those of the authors' public code, which the paper's figure
simplifies. For 500 letters and two classes it has 963,460 parameters, 961,924 of them outside the
norms. The paper says 961 K and not what of: that it counts so is our inference.
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

FEATURES = 50  # width of what the task head reads
INNER = 4  # channels between the two convolutions of a residual branch
MOMENTUM, EPSILON = 0.65, 1e-3  # share of the newest batch in the running statistics


def letters_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of A, C, G and T. Raises BadInput where one is no token of its own."""
    if missing := [letter for letter in "ACGT" if letter not in tokenizer.pieces]:
        raise BadInput(
            "model.architecture=hilbert_cnn reads the letters A C G T, each a token of its own; "
            f"the store's lacks {' '.join(missing)}; one of --kind symbols has them"
        )
    return tuple(tokenizer.pieces.index(letter) for letter in "ACGT")


@cache
def hilbert_curve(side: int) -> Tensor:
    """(side^2, 2): row and column of each cell in the order of the Hilbert curve through a square;
    `side` is a power of two. The curve begins at (0, 0), and half of it fills the upper half."""
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
    """(Y, X) of the smallest image for so many words: the square that the curve runs through, or
    its upper half where that holds them (16 x 32 for the 497 words of 500 letters)."""
    bits = max(words - 1, 0).bit_length()
    side = 2 ** -(-bits // 2)
    return 2**bits // side, side


def image(batch: Batch[Tensor], letters: tuple[int, ...], k: int, size: tuple[int, int]) -> Tensor:
    """One-hot words on the curve, (N, len(letters)^k, Y, X), float32.

    Word i of a row is its letters i to i + k - 1. A word that holds anything but `letters` (an
    ambiguity letter, the separator of a pair) is all zero, and so is the image behind the last
    word; the row's special tokens take no cell. (The public code has no rule for such letters.)
    """
    codes = torch.full_like(batch.tokens, -1)  # (T,)
    for code, letter in enumerate(letters):
        codes = torch.where(batch.tokens == letter, code, codes)
    windows = F.pad(codes, (0, k - 1), value=-1).unfold(0, k, 1)  # (T, k)
    whole = (windows >= 0).all(1)  # none reaches into the next row: it would hold special tokens
    words = torch.zeros_like(codes)
    for i in range(k):
        words = words * len(letters) + windows[:, i]
    sizes, (Y, X), C = batch.cu_seqlens.diff(), size, len(letters) ** k
    number = torch.arange(len(sizes), device=codes.device)
    # The host knows how many tokens there are. Without output_size it would wait for the device.
    rows = torch.repeat_interleave(number, sizes, output_size=len(codes))  # (T,)
    curve = _curve_on(X, codes.device)
    y, x = curve[(batch.positions - 1).clamp(0, len(curve) - 1)].unbind(1)  # (T,) each
    places = ((rows * C + words) * Y + y) * X + x
    # A word that has no cell goes to one more place at the end, which is cut off.
    out = torch.zeros(len(sizes) * C * Y * X + 1, device=codes.device)
    out[torch.where(whole, places, len(out) - 1)] = 1.0
    return out[:-1].view(len(sizes), C, Y, X)


@cache
def _curve_on(side: int, device: torch.device) -> Tensor:
    """`hilbert_curve` on a device, copied there once."""
    return hilbert_curve(side).to(device)


class BatchNorm(nn.Module):
    """Normalises each channel over its batch, and in evaluation by running statistics (Ioffe &
    Szegedy 2015).

    A batch is here what one rank computes at once, so training depends on how a step is cut: other
    `batch.accumulate` or other ranks are another run, as they are not for the transformer. The
    statistics are buffers of the checkpoint, and every step leaves on all ranks their mean over the
    ranks (see Replicas.reduce): each scores the same model, and resuming is exact.
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
        several = x.numel() > x.size(1)  # one value has no variance: then the running ones, too
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training and several,
            MOMENTUM,
            EPSILON,
        )


class Convolution(nn.Conv2d):
    """A square convolution that keeps the size; an even one reaches a cell further to the right and
    down than to the left and up."""

    def __init__(self, channels: int, filters: int, width: int):
        super().__init__(channels, filters, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> (N, filters, Y, X)."""
        less, more = (self.kernel_size[0] - 1) // 2, self.kernel_size[0] // 2
        return super().forward(F.pad(x, (less, more, less, more)))


class Branch(nn.Module):
    """Two convolutions beside a shortcut; a 1 x 1 convolution where its width changes."""

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
    """Two branches and a shortcut, summed and mixed: the paper's computational block."""

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
    """Means of 2 x 2 cells; at an odd edge of those there are."""
    return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)


class HilbertCNN(nn.Module):
    """DNA letters -> features, for a head of classes or scores (Yin et al. 2018).

    The image holds the longest row that the model takes (`max_positions`), so that every row's has
    the same size, on which the first dense layer depends. `head_dropout` stands before each of the
    three dense layers, the task head among them.
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
        left = math.prod(-(-length // 16) for length in self.size)  # halved four times
        self.dense = nn.Linear(32 * left, 100)
        self.features = nn.Linear(100, FEATURES)

    def forward(self, batch: Batch[Tensor]) -> Tensor:
        """The features of each sequence, (N, FEATURES)."""
        x = image(batch, self.config.letters, self.config.kmer, self.size)
        x = x.to(self.first.weight.dtype)
        x = _halved(F.elu(self.norm(self.second(self.first(x)))))
        x = _halved(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = block(x)
        x = _halved(F.elu(self.last_norm(_halved(x)))).flatten(1)
        dropout = self.config.before_head
        x = F.elu(self.dense(F.dropout(x, dropout, self.training)))
        return F.elu(self.features(F.dropout(x, dropout, self.training)))


def spread(shape: torch.Size) -> float:
    """Standard deviation of a fresh weight: of a convolution (filters, C, height, width) sqrt(2 /
    (9 filters height width)), of a dense layer (outputs, inputs) sqrt(1 / inputs)."""
    if len(shape) == 4:
        return math.sqrt(2.0 / (9 * shape[0] * shape[2] * shape[3]))
    return shape[1] ** -0.5

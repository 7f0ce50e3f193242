"""A tall matrix in constant memory: the triangular factor of its centred rows, chunk by chunk.

n rows (samples), d columns (neurons), r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE = 1e-6  # directions below this share of the largest singular value are dropped
FOLD = 8  # rows are folded in when there are so many times the columns


class Factor:
    """R of the QR decomposition of a centred matrix whose rows come in chunks (Demmel et al. 2012,
    TSQR), always float64.

    `R^T R` is the centred matrix's `X^T X`, and X = Q R with orthonormal Q that is never made. The
    means of old and new rows differ; one further row accounts for that, so that the result is that
    of centring all rows first, without forming `X^T X`, which would square the condition number.
    """

    def __init__(self, columns: int):
        self.columns, self.rows = columns, 0
        self._mean = torch.zeros(columns, dtype=torch.float64)
        self._r: Tensor | None = None
        self._waiting: list[Tensor] = []
        self._waiting_rows = 0

    def add(self, chunk: Tensor) -> None:
        """Take further rows, (n, d) of any float type. They are kept until there are enough."""
        if chunk.size(1) != self.columns:
            raise ValueError(f"a chunk has {chunk.size(1)} columns, not {self.columns}")
        self._waiting.append(chunk)
        self._waiting_rows += len(chunk)
        if self._waiting_rows >= FOLD * self.columns:
            self._fold()

    def _fold(self) -> None:
        if not self._waiting_rows:
            return
        block = torch.cat([chunk.to(torch.float64) for chunk in self._waiting])
        self._waiting, self._waiting_rows = [], 0
        old, new = self.rows, len(block)
        mean = block.mean(0)
        block -= mean
        shift = mean - self._mean.to(mean.device)
        if self._r is not None:
            between = shift * math.sqrt(old * new / (old + new))
            block = torch.cat([self._r, between[None], block])
        self._r = torch.linalg.qr(block, mode="r").R
        self._mean = self._mean.to(mean.device) + shift * (new / (old + new))
        self.rows = old + new

    def result(self) -> tuple[Tensor, Tensor]:
        """(R, (min(n, d), d); the mean, (d,)) of all rows so far."""
        self._fold()
        if self._r is None:
            raise ValueError("there are no rows")
        return self._r, self._mean


@dataclass(frozen=True)
class Basis:
    """A centred matrix X = U diag(scale) directions without the directions that are negligible;
    U (n, r) is orthonormal and not kept."""

    scale: Tensor  # (r,) singular values, falling
    directions: Tensor  # (r, d) orthonormal rows
    mean: Tensor  # (d,)
    rows: int

    @property
    def rank(self) -> int:
        return len(self.scale)

    @property
    def width(self) -> int:
        return self.directions.size(1)

    def coordinates(self, x: Tensor) -> Tensor:
        """Rows of U for these rows of the matrix: (n, d) -> (n, r) float64."""
        return (x.to(torch.float64) - self.mean) @ (self.directions / self.scale[:, None]).T


def basis(r: Tensor, mean: Tensor, rows: int) -> tuple[Basis, Tensor]:
    """The basis of X = Q r, (k, d), and U = Q u's inner factor u (k, rank).

    Raises ValueError if all columns are constant.
    """
    u, scale, directions = torch.linalg.svd(r, full_matrices=False)
    tiny = torch.finfo(torch.float64).eps * float(mean.norm()) * math.sqrt(rows)
    kept = int((scale > max(NEGLIGIBLE * float(scale[0]), tiny)).sum()) if len(scale) else 0
    if kept == 0:
        raise ValueError("all neurons are constant: there is nothing to correlate")
    return Basis(scale[:kept], directions[:kept], mean, rows), u[:, :kept]

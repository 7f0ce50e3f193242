"""The triangular factor of a tall, centred matrix, from chunks of rows and in constant memory.

n rows (samples), d columns (neurons), r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE = 1e-6  # directions below this share of the largest singular value are dropped
FOLD = 8  # a QR step is made when there are this many times as many rows as columns


class Factor:
    """R of the QR decomposition X = Q R of a centred matrix, from chunks of rows, in float64.

    (TSQR, Demmel et al. 2012.) The orthonormal Q is never formed. X^T X = R^T R is not formed
    either, because that would square the condition number. The means of old and new rows differ;
    one extra row accounts for the difference, so the result is the same as if all rows had been
    centred together.
    """

    def __init__(self, columns: int):
        self.columns, self.rows = columns, 0
        self._mean = torch.zeros(columns, dtype=torch.float64)
        self._r: Tensor | None = None
        self._waiting: list[Tensor] = []
        self._waiting_rows = 0

    def add(self, chunk: Tensor) -> None:
        """Add rows (n, d) of any float type. A copy is kept until there are enough for a QR step.

        Raises ValueError if the number of columns is wrong.
        """
        if chunk.size(1) != self.columns:
            raise ValueError(f"the chunk has {chunk.size(1)} columns; it must have {self.columns}")
        self._waiting.append(chunk.detach().to(torch.float64, copy=True))
        self._waiting_rows += len(chunk)
        if self._waiting_rows >= FOLD * self.columns:
            self._fold()

    def _fold(self) -> None:
        if not self._waiting_rows:
            return
        block = torch.cat(self._waiting)
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
        """R (min(n, d), d) and the mean (d,) of all rows so far.

        Raises ValueError if there are none.
        """
        self._fold()
        if self._r is None:
            raise ValueError("there are no rows to factor; add some first")
        return self._r, self._mean


@dataclass(frozen=True)
class Basis:
    """The singular value decomposition X = U diag(scale) directions of a centred matrix.

    Negligible directions are left out. U (n, r) is orthonormal and not stored.
    """

    scale: Tensor  # (r,) singular values, largest first
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
        """The rows of U that belong to rows x of the matrix: (n, d) -> (n, r) float64."""
        return (x.to(torch.float64) - self.mean) @ (self.directions / self.scale[:, None]).T


def basis(r: Tensor, mean: Tensor, rows: int) -> tuple[Basis, Tensor]:
    """The basis of X = Q r, from r (k, d), and u (k, rank), for which U = Q u.

    Raises ValueError if all columns are constant.
    """
    u, scale, directions = torch.linalg.svd(r, full_matrices=False)
    tiny = torch.finfo(torch.float64).eps * float(mean.norm()) * math.sqrt(rows)
    rank = int((scale > max(NEGLIGIBLE * float(scale[0]), tiny)).sum()) if len(scale) else 0
    if rank == 0:
        raise ValueError("all neurons are constant: there is nothing to correlate")
    return Basis(scale[:rank], directions[:rank], mean, rows), u[:, :rank]

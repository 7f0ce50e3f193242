"""How much attention goes to the matching bracket: for each layer the head with the largest share.

    xformer analyze capture RUN/trajectory/step_1000 data=NESTING what=attention out=F.h5
    python docs/partners.py F.h5 ...

In nested brackets (Chiang & Lee 2020, section 3) the token that opens a pair also closes it. A
share is the mean attention weight from a token to its partner, over all tokens that have one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np


def partners(tokens: Sequence[int]) -> list[int]:
    """The position of each token's partner, or -1 if it has none. A token that equals the last one
    that is still open closes its pair. Any other token opens a pair."""
    opened: list[int] = []
    partner_of = [-1] * len(tokens)
    for position, token in enumerate(tokens):
        if opened and tokens[opened[-1]] == token:
            partner = opened.pop()
            partner_of[partner], partner_of[position] = position, partner
        else:
            opened.append(position)
    return partner_of


def shares(path: str) -> dict[int, np.ndarray]:
    """By layer, the share of each head. The first and the last token of a row are special ones."""
    with h5py.File(path) as file:
        maps = {int(layer): dataset for layer, dataset in file["attention"].items()}
        sizes, starts, corners = file["sizes"][:], file["offsets"][:], file["attention_offsets"][:]
        tokens = file["tokens"][:]
        weights: dict[int, list[np.ndarray]] = {layer: [] for layer in maps}
        for size, start, corner in zip(sizes, starts[:-1], corners[:-1], strict=True):
            to = np.array(partners(tokens[start + 1 : start + size - 1].tolist()))
            here = np.flatnonzero(to >= 0)
            for layer, dataset in maps.items():
                square = dataset[corner : corner + size * size].reshape(size, size, -1)
                weights[layer].append(square[here + 1, to[here] + 1].astype(np.float64))
        return {layer: np.concatenate(rows).mean(0) for layer, rows in sorted(weights.items())}


def main(paths: Sequence[str]) -> None:
    """Print a line for each capture."""
    for path in paths:
        best = ", ".join(
            f"layer {layer} {heads.max():.3f}" for layer, heads in shares(path).items()
        )
        print(f"{path}: {best}")


if __name__ == "__main__":
    missing = [path for path in sys.argv[1:] if not Path(path).is_file()]
    if missing or not sys.argv[1:]:
        wrong = f"{missing[0]} does not exist" if missing else "give at least one F.h5"
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1:])

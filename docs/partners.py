"""How much attention goes to equal tokens, or to neighbours: for each layer the head with the
largest share.

    xformer analyze capture RUN/trajectory/step_1000 data=STORE what=attention out=F.h5
    python docs/partners.py F.h5 ...
    python docs/partners.py offset=-1 F.h5 ...

A share is the mean attention weight from a token to its partners, over all tokens that have one.

- In a row of one text, which must be nested brackets (Chiang & Lee 2020, section 3), the partner is
  the token that opens or closes the same pair.
- In a row of two texts the partners are the equal tokens of the other text.
- With offset=-1 the partner is the token before, with offset=1 the token after, and so on. A
  special token may be a partner, but has none.

`uniform` is the share of attention that is equal for all tokens of a row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np


def nested(tokens: Sequence[int]) -> np.ndarray:
    """Whether token j is the partner of token i, (T, T) bool, in nested brackets. A token that
    equals the last one that is still open closes its pair. Any other token opens a pair."""
    opened: list[int] = []
    partner = np.zeros((len(tokens), len(tokens)), bool)
    for position, token in enumerate(tokens):
        if opened and tokens[opened[-1]] == token:
            opener = opened.pop()
            partner[opener, position] = partner[position, opener] = True
        else:
            opened.append(position)
    return partner


def partners(row: np.ndarray) -> np.ndarray:
    """Whether token j of a row is a partner of token i, (T, T) bool. The first token and the
    separators are special, and have no partners. The last token is a separator."""
    separators = np.flatnonzero(row == row[-1])
    inner = np.setdiff1d(np.arange(1, len(row)), separators)
    partner = np.zeros((len(row), len(row)), bool)
    if len(separators) == 1:
        partner[np.ix_(inner, inner)] = nested(row[inner].tolist())
    else:
        second = inner > separators[0]
        others = second[:, None] != second[None]
        partner[np.ix_(inner, inner)] = others & (row[inner][:, None] == row[inner][None])
    return partner


def neighbours(row: np.ndarray, offset: int) -> np.ndarray:
    """Whether token j of a row is `offset` tokens after token i, (T, T) bool. The first token and
    the separators have no partner."""
    partner = np.eye(len(row), k=offset, dtype=bool)
    partner[0] = partner[row == row[-1]] = False
    return partner


def shares(path: str, offset: int = 0) -> tuple[dict[int, np.ndarray], float]:
    """By layer, the share of each head, and the share of uniform attention."""
    with h5py.File(path) as file:
        maps = {int(layer): dataset for layer, dataset in file["attention"].items()}
        sizes, starts, corners = file["sizes"][:], file["offsets"][:], file["attention_offsets"][:]
        tokens = file["tokens"][:]
        weights: dict[int, list[np.ndarray]] = {layer: [] for layer in maps}
        uniform: list[np.ndarray] = []
        for size, start, corner in zip(sizes, starts[:-1], corners[:-1], strict=True):
            row = tokens[start : start + size]
            partner = neighbours(row, offset) if offset else partners(row)
            here = partner.any(1)
            uniform.append(partner[here].mean(1))
            for layer, dataset in maps.items():
                square = dataset[corner : corner + size * size].reshape(size, size, -1)
                shared = np.einsum("ijh,ij->ih", square.astype(np.float64), partner)
                weights[layer].append(shared[here])
        means = {layer: np.concatenate(rows).mean(0) for layer, rows in sorted(weights.items())}
        return means, float(np.concatenate(uniform).mean())


def main(paths: Sequence[str], offset: int) -> None:
    """Print a line for each capture."""
    for path in paths:
        heads_of, uniform = shares(path, offset)
        best = ", ".join(f"layer {layer} {heads.max():.3f}" for layer, heads in heads_of.items())
        print(f"{path}: {best} (uniform {uniform:.3f})")


if __name__ == "__main__":
    given = [a.removeprefix("offset=") for a in sys.argv[1:] if a.startswith("offset=")]
    files = [a for a in sys.argv[1:] if not a.startswith("offset=")]
    if given and not re.fullmatch("-?[1-9][0-9]*", given[-1]):
        print(f"error: offset={given[-1]} is not -1, 1, -2, ...", file=sys.stderr)
        sys.exit(2)
    missing = [path for path in files if not Path(path).is_file()]
    if missing or not files:
        wrong = f"{missing[0]} does not exist" if missing else "give at least one F.h5"
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    main(files, int(given[-1]) if given else 0)

"""What STS-B's similarities can be predicted from without any fine-tuning, and what fine-tuned
encoders predict them from.

    python docs/stsb.py GLUE/STS-B/dev.tsv [CHECKPOINT | results/KEY.zip ...]

Prints Spearman's correlation, times 100, of the scores of the data set with

- the words in common: the number of distinct words that both sentences have, divided by the number
  that either has (Jaccard's index), in lower case;
- for each checkpoint, the cosine of the sentences' vectors (the mean over their tokens);
- for each kept run, its predictions. Beside it stands their correlation with the words in common.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from xformer import checkpoint as checkpoints


def shared(one: str, other: str) -> float:
    """The share of the words of two sentences that both have; 0 if neither has a word."""
    a, b = (set(re.findall(r"\w+", sentence.lower())) for sentence in (one, other))
    return len(a & b) / max(1, len(a | b))


def kept_predictions(run: str, scores: np.ndarray) -> np.ndarray:
    """The predictions (N,) of a kept run for the pairs with these scores. Raises ValueError if it
    was scored on others."""
    with zipfile.ZipFile(run) as parts:
        name = next(part for part in parts.namelist() if part.endswith("predictions/valid.npz"))
        kept = np.load(io.BytesIO(parts.read(name)))
    if len(kept["label"]) != len(scores) or np.abs(kept["label"] - scores).max() > 1e-3:
        raise ValueError(f"{run} was not scored on this file")
    return np.asarray(kept["outputs"][:, 0])


def spearman(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Spearman's correlation."""
    return float(stats.spearmanr(a, b)[0])


def correlations(path: Path, names: Sequence[str] = ()) -> dict[str, tuple[float, ...]]:
    """Spearman's correlations for a file of GLUE, whose last three columns are a pair and its
    score: with the scores, and for kept runs with the words in common."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    one, other, written = zip(*(line.split("\t")[-3:] for line in lines), strict=True)
    scores, words = np.array(list(map(float, written))), list(map(shared, one, other))
    every: dict[str, tuple[float, ...]] = {"words in common": (spearman(words, scores),)}
    for name in names:
        if name.endswith(".zip"):
            predicted = kept_predictions(name, scores)
            every[name] = spearman(predicted, scores), spearman(predicted, words)
        else:
            checkpoint = checkpoints.load(name)
            a, b = (checkpoint.encode(sentences, normalize=True) for sentences in (one, other))
            every[name] = (spearman((a * b).sum(1), scores),)
    return every


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        print("error: give the file dev.tsv of STS-B", file=sys.stderr)
        sys.exit(2)
    for name, values in correlations(Path(sys.argv[1]), sys.argv[2:]).items():
        with_words = "".join(
            f", with the words in common {100 * value:.1f}" for value in values[1:]
        )
        print(f"{100 * values[0]:.1f}  {name}{with_words}")

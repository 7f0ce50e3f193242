"""What STS-B's similarities can be predicted from without any fine-tuning, and what fine-tuned
encoders predict them from.

    python docs/stsb.py GLUE/STS-B/dev.tsv [CHECKPOINT | results/KEY.zip ...]

Prints Spearman's correlations, times 100. The first column is with the scores of the data set:

- of the words in common: the number of distinct words that both sentences have, divided by the
  number that either has (Jaccard's index), in lower case;
- of the same share if a word counts by its rarity, log(N / (1 + n)), where n of the N sentences in
  the train.tsv beside the file have it;
- of each checkpoint's cosine of the sentences' vectors (the mean over their tokens);
- of each kept run's predictions. Two more columns are their correlations with the two shares.
"""

from __future__ import annotations

import io
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from xformer import checkpoint as checkpoints

Numbers = Sequence[float] | np.ndarray


def words_of(sentence: str) -> set[str]:
    """The distinct words of a sentence, in lower case."""
    return set(re.findall(r"\w+", sentence.lower()))


def shared(one: str, other: str, weight: Callable[[str], float] = lambda word: 1.0) -> float:
    """The share of the words of two sentences that both have, by weight; 0 if neither has any."""
    a, b = words_of(one), words_of(other)
    either = sum(map(weight, sorted(a | b)))
    return sum(map(weight, sorted(a & b))) / either if either else 0.0


def rarity(sentences: Iterable[str]) -> Callable[[str], float]:
    """The weight of a word: log(N / (1 + n)), where n of the N sentences have it."""
    every = list(map(words_of, sentences))
    counts = Counter(word for words in every for word in words)
    return lambda word: math.log(len(every) / (1 + counts[word]))


def read(path: Path) -> tuple[list[str], list[str], np.ndarray]:
    """The pairs and scores of a file of GLUE. They are its last three columns."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    one, other, scores = zip(*(line.split("\t")[-3:] for line in lines), strict=True)
    return list(one), list(other), np.array(list(map(float, scores)))


def kept_predictions(run: str, scores: np.ndarray) -> np.ndarray:
    """The predictions (N,) of a kept run for the pairs with these scores. Raises ValueError if it
    was scored on others."""
    with zipfile.ZipFile(run) as parts:
        name = next(part for part in parts.namelist() if part.endswith("predictions/valid.npz"))
        kept = np.load(io.BytesIO(parts.read(name)))
    if len(kept["label"]) != len(scores) or np.abs(kept["label"] - scores).max() > 1e-3:
        raise ValueError(f"{run} was not scored on this file")
    return np.asarray(kept["outputs"][:, 0])


def spearman(a: Numbers, b: Numbers) -> float:
    """Spearman's correlation."""
    return float(stats.spearmanr(a, b)[0])


def correlations(path: Path, names: Sequence[str] = ()) -> dict[str, tuple[float, ...]]:
    """Spearman's correlations for a file of GLUE: with its scores, and of kept runs also with the
    two shares of words."""
    one, other, scores = read(path)
    train = read(path.with_name("train.tsv"))
    weight = rarity([*train[0], *train[1]])
    plain = list(map(shared, one, other))
    rare = [shared(a, b, weight) for a, b in zip(one, other, strict=True)]
    every: dict[str, tuple[float, ...]] = {
        "words in common": (spearman(plain, scores),),
        "words in common, by rarity": (spearman(rare, scores),),
    }
    for name in names:
        if name.endswith(".zip"):
            predicted = kept_predictions(name, scores)
            every[name] = tuple(spearman(predicted, with_) for with_ in (scores, plain, rare))
        else:
            checkpoint = checkpoints.load(name)
            a, b = (checkpoint.encode(sentences, normalize=True) for sentences in (one, other))
            every[name] = (spearman((a * b).sum(1), scores),)
    return every


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).with_name("train.tsv").is_file():
        print("error: give the file dev.tsv of STS-B, with train.tsv beside it", file=sys.stderr)
        sys.exit(2)
    for name, values in correlations(Path(sys.argv[1]), sys.argv[2:]).items():
        print("  ".join(f"{100 * value:5.1f}" for value in values), f" {name}")

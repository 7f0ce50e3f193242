"""What STS-B's similarities can be predicted from without any fine-tuning.

    python docs/stsb.py GLUE/STS-B/dev.tsv [CHECKPOINT ...]

Prints Spearman's correlation, times 100, of the scores of the data set with

- the number of distinct words that both sentences have, divided by the number that either has
  (Jaccard's index), in lower case;
- for each checkpoint, the cosine of the sentences' vectors (the mean over their tokens).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scipy import stats

from xformer import checkpoint as checkpoints


def shared(one: str, other: str) -> float:
    """The share of the words of two sentences that both have; 0 if neither has a word."""
    a, b = (set(re.findall(r"\w+", sentence.lower())) for sentence in (one, other))
    return len(a & b) / max(1, len(a | b))


def correlations(path: Path, names: Sequence[str] = ()) -> dict[str, float]:
    """Spearman's correlations for a file of GLUE, whose last three columns are a pair and its
    score."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    one, other, scores = zip(*(line.split("\t")[-3:] for line in lines), strict=True)
    predicted = {"words in common": list(map(shared, one, other))}
    for name in names:
        checkpoint = checkpoints.load(name)
        a, b = (checkpoint.encode(sentences, normalize=True) for sentences in (one, other))
        predicted[name] = (a * b).sum(1).tolist()
    gold = list(map(float, scores))
    return {name: float(stats.spearmanr(values, gold)[0]) for name, values in predicted.items()}


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        print("error: give the file dev.tsv of STS-B", file=sys.stderr)
        sys.exit(2)
    for name, value in correlations(Path(sys.argv[1]), sys.argv[2:]).items():
        print(f"{100 * value:.1f}  {name}")

"""How well the words that two sentences share predict their similarity: a baseline for STS-B.

    python docs/overlap.py GLUE/STS-B/dev.tsv

The score of a pair is the number of distinct words in both sentences, divided by the number in
either (Jaccard's index), in lower case. Nothing is trained. The line that is printed has Spearman's
correlation of these scores with those of the data set, times 100.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scipy import stats


def shared(one: str, other: str) -> float:
    """The share of the words of two sentences that both have; 0 if neither has a word."""
    a, b = (set(re.findall(r"\w+", sentence.lower())) for sentence in (one, other))
    return len(a & b) / max(1, len(a | b))


def correlation(path: Path) -> float:
    """Spearman's correlation for a file of GLUE, whose last three columns are a pair and its
    score."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t")[-3:] for line in lines]
    scores = [shared(one, other) for one, other, _ in rows]
    return float(stats.spearmanr(scores, [float(score) for *_, score in rows])[0])


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("error: give the file dev.tsv of STS-B", file=sys.stderr)
        sys.exit(2)
    print(f"{sys.argv[1]}: {100 * correlation(Path(sys.argv[1])):.1f}")

"""Whether decided claims stay on their side of the margin if test examples are drawn again, too.

    python docs/resampled.py                  # results/, two minutes
    python docs/resampled.py runs/kept

For each decided claim in *.claims.json it prints the multi-bootstrap's interval of the difference
(Sellam et al. 2022), from kept predictions. The interval has 95 %, and 90 % for a tie, as in two
one-sided tests. "same side" means that the interval and the difference are on the same side of the
margin, "crosses" that they are not. A claim has "no interval" if it has fewer than three seeds, or
if its numbers come from an analysis, which has no predictions. The exit status is 2 if the
directory has no claims.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xformer.predictions import read  # noqa: E402
from xformer.study.resampling import ENOUGH, resampled_score  # noqa: E402
from xformer.study.statistics import multibootstrap, seed_draws  # noqa: E402

SAME, CROSSES, NONE = "same side", "crosses", "no interval"


@cache
def resampled(run: Path, split: str, metric: str) -> np.ndarray | None:
    """A score of a kept run under resampled test examples, (B,). None if it has none."""
    name = f"predictions/{split}.npz"
    if not run.is_file():
        return None
    with zipfile.ZipFile(run) as parts, TemporaryDirectory() as scratch:
        if name not in parts.namelist():
            return None
        file = Path(scratch) / "predictions.npz"
        file.write_bytes(parts.read(name))
        drawn = resampled_score(read(file), metric)
    return None if isinstance(drawn, str) else drawn


def interval(directory: Path, part: dict[str, Any]) -> tuple[float, float] | None:
    """The interval of the difference in a part of a claim, if it has one."""
    seeds = []
    if len(part["pairs"]) < ENOUGH:
        return None
    for terms in part["pairs"]:
        drawn = [(weight, resampled(directory / f"{key}.zip", *of)) for weight, key, *of in terms]
        if any(scores is None for _, scores in drawn):
            return None
        seeds.append(sum(weight * scores for weight, scores in drawn if scores is not None))
    means = multibootstrap(np.array(seeds), seed_draws(len(seeds)))
    tail = 0.05 if part["tie"] else 0.025
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def side(part: dict[str, Any], low: float, high: float) -> str:
    """Whether an interval lies where the difference does: on its side of the margin."""
    margin, effect = part["margin"], part["effect"]
    if part["tie"]:
        inside = -margin < low and high < margin
        outside = low > margin or high < -margin
        return SAME if (inside if abs(effect) < margin else outside) else CROSSES
    return SAME if (low > margin if effect > margin else high < margin) else CROSSES


def decided(directory: Path) -> Iterator[tuple[str, str, str]]:
    """For each decided claim: SAME, CROSSES or NONE; its study and text; its intervals."""
    for path in sorted(directory.glob("*.claims.json")):
        records = json.loads(path.read_text(encoding="utf-8"))["claims"]
        for text, parts in groupby(records, key=lambda record: record["text"]):
            every = list(parts)
            if every[0]["verdict"] == "undecided":
                continue
            intervals = [interval(directory, part) for part in every]
            known = [(part, *both) for part, both in zip(every, intervals, strict=True) if both]
            states = {side(*one) for one in known}
            state = NONE if len(known) < len(every) else CROSSES if CROSSES in states else SAME
            ends = (
                f"{part['part']} {low:+.2f} to {high:+.2f}".lstrip() for part, low, high in known
            )
            yield state, f"{path.name.split('.')[0]}: {text}", "; ".join(ends)


def main(directory: Path) -> int:
    """The exit status."""
    if not any(directory.glob("*.claims.json")):
        print(f"error: {directory} has no *.claims.json; give a study's kept=DIRECTORY")
        return 2
    counts = Counter[str]()
    for state, claim, ends in decided(directory):
        counts[state] += 1
        print(f"{state:<12}  {ends:<16}  {claim}")
    print(", ".join(f"{counts[state]} {state}" for state in (SAME, CROSSES, NONE)))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__, end="")
    else:
        sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "results"))

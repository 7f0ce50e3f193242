"""Write the overview of all claims into docs/findings.md.

    python docs/overview.py

Its rows come from results/STUDY.claims.json, which the report of a study wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xformer.study.report import CLAIMS  # noqa: E402
from xformer.study.sections import GLANCE, at_a_glance  # noqa: E402

PAGE, KEPT = ROOT / "docs/findings.md", ROOT / "results"
BEGIN, END = "<!-- written by docs/overview.py -->\n", "<!-- end -->\n"
HEADERS = ("claim (MiniLM is sentence-tuned)", "verdict", *GLANCE, "study")


def rows_kept(directory: Path) -> Iterator[tuple[str, ...]]:
    """A row for each claim of the kept results. Raises ValueError if a file is of another
    version."""
    for path in sorted(directory.glob(f"*.{CLAIMS}")):
        study = path.name.removesuffix(f".{CLAIMS}")
        records = json.loads(path.read_text(encoding="utf-8")).get("claims", [])
        if not records or any("shown" not in record for record in records):
            raise ValueError(f"{path} is not of this version; run the study {study} again")
        for text, parts in groupby(records, key=lambda record: record["text"]):
            every = list(parts)
            state = every[0]["verdict"]
            verdict = state if state == "undecided" else f"**{state}**"
            yield text, verdict, *at_a_glance(every), f"`{study}`"


def page(text: str, directory: Path = KEPT) -> str:
    """The text of docs/findings.md with its overview written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    rows = list(rows_kept(directory))
    if not rows:
        raise ValueError(f"{directory} holds no *.{CLAIMS}")
    lines = [HEADERS, ["---"] * len(HEADERS), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    undecided = sum(verdict == "undecided" for _, verdict, *_ in rows)
    share = f"{undecided} of {len(rows)} claims are undecided ({undecided / len(rows):.0%})."
    return f"{before}{BEGIN}\n{share}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"error: {error}")

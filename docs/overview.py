"""Write the overview of all claims into docs/findings.md.

    python docs/overview.py

If the results of a study are kept, its rows come from results/STUDY.claims.json, which its report
wrote. If not, they come from the tables of claims further down in the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xformer.study.report import CLAIMS, GLANCE, at_a_glance  # noqa: E402

PAGE, KEPT = ROOT / "docs/findings.md", ROOT / "results"
BEGIN, END = "<!-- written by docs/overview.py -->\n", "<!-- end -->\n"
HEADERS = ("claim", "verdict", *GLANCE, "study", "kept result")
NUMBERS = {"one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The study and the text of each section of the page that begins with the name of a study."""
    for section in text.split("\n## ")[1:]:
        if named := re.search(r"\n`([\w-]+)`", section):
            yield named[1], section


def rows_kept(directory: Path) -> Iterator[tuple[str, ...]]:
    """A row for each claim of the kept results. Raises ValueError if a file is of an earlier
    version."""
    for path in sorted(directory.glob(f"*.{CLAIMS}")):
        records = json.loads(path.read_text(encoding="utf-8"))["claims"]
        if any("shown" not in record for record in records):
            study = path.name.removesuffix(f".{CLAIMS}")
            raise ValueError(f"{path} is of an earlier version; run the study {study} again")
        for text, parts in groupby(records, key=lambda record: record["text"]):
            every = list(parts)
            state = every[0]["verdict"]
            verdict = state if state == "undecided" else f"**{state}**"
            study = f"`{path.name.removesuffix(f'.{CLAIMS}')}`"
            yield text, verdict, *at_a_glance(every), study, f"results/{path.name}"


def rows_printed(text: str) -> Iterator[tuple[str, ...]]:
    """A row for each claim in the tables of the page."""
    for study, section in sections(text):
        seeds = re.search(rf"\b({'|'.join(NUMBERS)}) seeds?\b", section)
        if seeds is None:
            raise ValueError(f"{PAGE}: say in the section of {study} how many seeds it has")
        table = re.search(r"^\| claim \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
        for line in table[1].splitlines() if table else ():
            claim, verdict, difference = (cell.strip() for cell in line.strip("|").split("|"))
            effect = re.sub(r" \(p [^)]*\)", "", difference)
            others = ("-", NUMBERS[seeds[1]], "-", "exploratory", f"`{study}-mini`", "none")
            yield claim, verdict, effect, *others


def page(text: str, directory: Path = KEPT) -> str:
    """The text of docs/findings.md with its overview written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    kept = list(rows_kept(directory))
    studies = {row[-2] for row in kept}
    rows = kept + [row for row in rows_printed(after) if row[-2] not in studies]
    lines = [HEADERS, ["---"] * len(HEADERS), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"error: {error}")

"""Write the overview of all claims into docs/findings.md, and where the runs were made.

    python docs/overview.py

The rows come from results/STUDY.claims.json and STUDY.results.csv, which the report of a study
wrote, and from the settings of its kept runs.
"""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from xformer.study.report import CLAIMS  # noqa: E402
from xformer.study.sections import GLANCE, at_a_glance  # noqa: E402

PAGE, KEPT = ROOT / "docs/findings.md", ROOT / "results"
BEGIN, END = "<!-- written by docs/overview.py -->\n", "<!-- end -->\n"
MACHINES = "<!-- machines, written by docs/overview.py -->\n"
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


def machines_of(table: Path) -> Iterator[str]:
    """How many runs of a study were made in which precision on which processor."""
    with table.open(encoding="utf-8", newline="") as file:
        keys = {row["key"]: None for row in csv.DictReader(file) if row["value"]}
    machines = Counter[str]()
    for key in keys:
        kept = table.with_name(f"{key}.zip")
        if not kept.is_file():
            machines["not kept"] += 1
            continue
        with zipfile.ZipFile(kept) as file:
            if "config.json" not in file.namelist():  # an analysis
                machines["not recorded (analyses)"] += 1
                continue
            start = json.loads(file.read("config.json"))["starts"][-1]
        processor = start["environment"]["processor"]
        machines[f"{start['config']['system']['precision']}, {processor}"] += 1
    yield from (f"{count:,}: {machine}" for machine, count in machines.most_common())


def page(text: str, directory: Path = KEPT) -> str:
    """The text of docs/findings.md with its overview and its table of machines written anew."""
    rows = list(rows_kept(directory))
    if not rows:
        raise ValueError(f"{directory} holds no *.{CLAIMS}")
    undecided = sum(verdict == "undecided" for _, verdict, *_ in rows)
    share = f"{undecided} of {len(rows)} claims are undecided ({undecided / len(rows):.0%})."
    made = [
        (f"`{path.name.removesuffix('.results.csv')}`", "; ".join(machines_of(path)))
        for path in sorted(directory.glob("*.results.csv"))
    ]
    text = replaced(text, BEGIN, f"{share}\n\n{table(HEADERS, rows)}")
    return replaced(text, MACHINES, table(("study", "runs: precision, processor"), made))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replaced(text: str, begin: str, content: str) -> str:
    """A page with other content between `begin` and the next END."""
    before, rest = text.split(begin)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{content}\n{end}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"error: {error}")

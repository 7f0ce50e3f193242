"""docs/findings.md: its overview comes from the kept results and from its own tables, every study
in it says what is kept, and the kept results are whole and small.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers import ROOT, script

LARGEST = 40_000_000  # bytes of results/
PAGE = (ROOT / "docs/findings.md").read_text(encoding="utf-8")


def overview(text: str) -> list[list[str]]:
    table = text.split(script("overview").BEGIN)[1].split(script("overview").END)[0]
    rows = [line.strip("|").split("|") for line in table.strip().splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_overview_is_of_the_present_results_and_tables() -> None:
    assert script("overview").page(PAGE) == PAGE, "write it anew: python docs/overview.py"
    verdicts = [row[1].strip("*") for row in overview(PAGE)[2:]]
    assert set(verdicts) == {"holds", "fails", "undecided"}
    printed = [row[1].strip("*") for row in script("overview").rows_printed(PAGE)]
    said = re.search(
        r"Of the (\d+) claims in the sections below, (\d+) are undecided \((\d+) %\)", PAGE
    )
    assert said is not None
    numbers = len(printed), printed.count("undecided")
    assert tuple(map(int, said.groups())) == (*numbers, round(100 * numbers[1] / numbers[0]))


def test_every_study_of_the_findings_says_what_is_kept() -> None:
    studies = dict(script("overview").sections(PAGE))
    for section in PAGE.split("\n## ")[1:]:
        if (
            re.search(r"^\|.*\d.*\|$", section, re.MULTILINE)
            and script("overview").BEGIN not in section
        ):
            assert section in studies.values(), f"name the study: {section[:60]}"
    kept = {row[-2].strip("`"): row[-1] for row in overview(PAGE)[2:]}
    assert studies.keys() <= {name.rpartition("-")[0] for name in kept}  # without the scale
    for study, result in kept.items():
        path = ROOT / "results" / f"{study}.results.csv"
        assert path.is_file() == (result != "none")


def test_kept_results_are_whole_and_small() -> None:
    directory = ROOT / "results"
    assert sum(path.stat().st_size for path in directory.rglob("*")) < LARGEST
    for path in directory.glob("*.results.csv"):
        with path.open(encoding="utf-8") as file:
            keys = {row["key"] for row in csv.DictReader(file) if row["state"] == "done"}
        assert all((directory / f"{key}.zip").is_file() for key in keys), path
    for path in directory.glob("*.claims.json"):
        claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
        keys = {key for claim in claims for pair in claim["pairs"] for _, key, *_ in pair}
        assert all((directory / f"{key}.zip").is_file() for key in keys), path


def test_kept_claims_take_the_place_of_printed_ones(tmp_path: Path) -> None:
    part: dict[str, Any] = {
        "text": "a is better",
        "part": "low",
        "verdict": "holds",
        "registered": "0123abc of 2026",
    }
    part |= {"shown": "+1.2 ± 0.5", "published": -2, "digits": 1, "hours": 3.21}
    part |= {"pairs": [[], [], []]}
    parts = [part, {**part, "part": "high", "shown": "+4.0", "published": None}]
    path = tmp_path / "huang2021-heads-mini.claims.json"
    path.write_text(json.dumps({"claims": parts}))
    text = script("overview").page(PAGE, tmp_path)
    first = "| a is better | **holds** | low +1.2 ± 0.5; high +4.0 | low -2.0 | 3 | 3.2 | "
    first += "0123abc of 2026 | `huang2021-heads-mini` | results/huang2021-heads-mini.claims.json |"
    assert first in text
    assert sum("`huang2021-heads-mini`" in line for line in text.splitlines()) == 1
    assert "a head of the last layer costs less than one of layer 2 |" in text  # in its section
    del part["shown"]
    path.write_text(json.dumps({"claims": [part]}))
    with pytest.raises(ValueError, match="run the study huang2021-heads-mini again"):
        script("overview").page(PAGE, tmp_path)
    with pytest.raises(ValueError, match="say in the section of onset how many seeds it has"):
        list(script("overview").rows_printed("# Page\n## Onset\n\n`onset` has seeds\n"))


def test_attention_to_the_matching_bracket(tmp_path: Path) -> None:
    partners = script("partners")
    assert partners.partners([5, 6, 6, 5, 7]) == [3, 2, 1, 0, -1]
    assert partners.partners([5, 5, 5]) == [1, 0, -1]
    # two rows, with a special token at each end; head 1 of layer 1 reads the partner alone
    rows = [[2, 5, 6, 6, 5, 3], [2, 8, 8, 9, 3]]
    maps = []
    for row in rows:
        heads = np.full((len(row), len(row), 2), 1 / len(row), np.float16)
        heads[..., 1] = 0
        for i, j in enumerate(partners.partners(row[1:-1])):
            heads[i + 1, j + 1 if j >= 0 else 0, 1] = 1
        maps.append(heads.reshape(-1, 2))
    with h5py.File(tmp_path / "F.h5", "w") as file:
        file["attention/1"] = np.concatenate(maps)
        file["tokens"] = np.concatenate(rows)
        file["sizes"] = np.array([6, 5])
        file["offsets"] = np.array([0, 6, 11])
        file["attention_offsets"] = np.array([0, 36, 61])
    # four tokens of the first row have a partner, and two of the second
    shares = partners.shares(str(tmp_path / "F.h5"))[1]
    np.testing.assert_allclose(shares, [(4 / 6 + 2 / 5) / 6, 1], rtol=1e-3)

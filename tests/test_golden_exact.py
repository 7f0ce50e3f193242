"""The exact net: the code still makes what it made when the net was recorded.

Stores of every preprocess command, orders, masks, mappings and batches, and converted weights are
compared to the last bit. Runs, a checkpoint and a study that earlier code left are opened,
continued, evaluated and reported. tests/golden/exact/__main__.py says when to record anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from golden.exact.commands import run
from golden.exact.measure import KEPT, MADE, differences, measure, recorded
from golden.exact.stores import COMMANDS
from helpers import Forks

# not in the net: it needs a network; tests/test_reproduce.py knows the hash of what it writes
ELSEWHERE = {"fetch", "dialects", "join"}


@pytest.mark.parametrize("name", MADE)
def test_makes_what_was_recorded(name: str, tmp_path: Path) -> None:
    same(name, measure(name, tmp_path))


@pytest.mark.parametrize("name", KEPT)
def test_uses_what_was_kept(name: str, forks: Forks, tmp_path: Path) -> None:
    same(name, measure(name, tmp_path, forks))


def same(name: str, actual: Any) -> None:
    """Assert that one of the net's values is as recorded. If it is not, list the differences."""
    lines = differences(recorded(name), actual)
    assert not lines, "\n".join([f"{len(lines)} differences", *lines[:40]])


def test_every_command_is_in_the_net() -> None:
    lines = [words.split() for words in COMMANDS.values()]
    for group, known in (
        ("", {words[0] for words in lines} | ELSEWHERE),
        ("task", {words[1] for words in lines if words[0] == "task"}),
        ("synthetic", {words[1] for words in lines if words[0] == "synthetic"}),
    ):
        said = run("preprocess", *group.split(), "--help")
        named = set(re.findall(r"^ {4}(\w\S*)", said, re.MULTILINE))
        assert named == known, group

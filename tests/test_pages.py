"""The pages and notebooks for users of Python: their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/python.md, in order and in one namespace."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert names["half"].config.layers == 2
    assert names["vectors"].shape == (2, 256)
    assert names["hidden"].shape == (2, 4, 256)
    assert not names["hidden"][1, 3].any()
    assert names["answers"].tolist() == [1, 0]
    assert names["losses"]
    assert names["test"].metrics()["accuracy"] == 1.0

"""The pages and notebooks for users of Python: their code runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import QUIET, ROOT

from xformer import checkpoint
from xformer.surgery import registry

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/python.md, in order and in one namespace."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
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


def test_the_operation_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/howto/extend.md defines an operation. It works, is recorded, and has a help text."""
    monkeypatch.setattr(registry, "OPERATIONS", dict(registry.OPERATIONS))
    page = (ROOT / "docs/howto/extend.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    registry.OPERATIONS.pop("scale_embeddings", None)  # of a reader who follows the page
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, "docs/howto/extend.md", "exec"), names)
    english = checkpoint.load("micro/english")
    half = registry.apply(english, [registry.parse_operation("scale_embeddings(factor=0.5)")])
    word = "encoder.embeddings.word.weight"
    assert torch.equal(half.weights[word], english.weights[word] / 2)
    assert half.history[-1] == {"op": "scale_embeddings", "factor": 0.5}
    assert registry.in_words("scale_embeddings") == "multiply all word embeddings by a factor"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_results(path: Path) -> None:
    """A reader on the web sees the results of a complete run, and the file stays small."""
    assert path.stat().st_size < 150_000
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["inside", "surgery", "transfer"]


@pytest.mark.install
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
    for name, value in {**QUIET, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setitem(os.environ, name, value)
    book = nbformat.read(path, as_version=4)
    kept = [cell.get("outputs", []) for cell in book.cells]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=900, kernel_name="python3", resources=place).execute()
    for cell, before in zip(book.cells, kept, strict=True):
        pictures = [
            sum("image/png" in output.get("data", {}) for output in outputs)
            for outputs in (before, cell.get("outputs", []))
        ]
        assert pictures[0] == pictures[1], cell.source

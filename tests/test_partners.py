"""docs/partners.py: how much attention goes to the matching bracket."""

import importlib.util
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def partners() -> ModuleType:
    spec = importlib.util.spec_from_file_location("partners", ROOT / "docs/partners.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_partners_of_nested_brackets(partners: ModuleType) -> None:
    """The outer pair encloses two pairs of one token; the last token never closes."""
    assert partners.partners([7, 8, 8, 8, 8, 7, 9]) == [5, 2, 1, 4, 3, 0, -1]


def test_the_share_is_a_mean_over_tokens_with_partners(
    partners: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two heads, one attends uniformly, the other only to the partner of each token."""
    rows = [[CLS, 7, 8, 8, 7, 9, SEP], [CLS, 5, 5, 6, SEP]]
    sizes = list(map(len, rows))
    maps = []
    for row in rows:
        square = np.full((len(row), len(row), 2), 1 / len(row))
        square[..., 1] = 0
        for query, key in enumerate(partners.partners(row[1:-1])):
            if key >= 0:
                square[query + 1, key + 1, 1] = 1
        maps.append(square.reshape(-1, 2))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["attention/1"] = np.concatenate(maps)
        file["attention/2"] = np.concatenate(maps)[:, :1]
        file["sizes"], file["tokens"] = sizes, np.concatenate(rows)
        file["offsets"] = np.cumsum([0, *sizes])
        file["attention_offsets"] = np.cumsum([0, *(size**2 for size in sizes)])
    uniform = (4 / 7 + 2 / 5) / 6  # four tokens of the first row have a partner, two of the second
    assert partners.shares(str(tmp_path / "f.h5"))[1].tolist() == pytest.approx([uniform, 1])
    partners.main([str(tmp_path / "f.h5")])
    assert capsys.readouterr().out.endswith(f"layer 1 1.000, layer 2 {uniform:.3f}\n")

"""docs/partners.py: how much attention goes to the matching bracket, or to equal words."""

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
    row = np.array([CLS, 7, 8, 8, 8, 8, 7, 9, SEP])
    assert np.argwhere(partners.partners(row)).tolist() == [
        [1, 6],
        [2, 3],
        [3, 2],
        [4, 5],
        [5, 4],
        [6, 1],
    ]


def test_partners_of_two_texts_are_equal_tokens(partners: ModuleType) -> None:
    """A token may have several partners. Equal tokens of its own text are none."""
    row = np.array([CLS, 7, 7, 8, SEP, 9, 7, SEP])
    assert np.argwhere(partners.partners(row)).tolist() == [[1, 6], [2, 6], [6, 1], [6, 2]]


def test_the_share_is_a_mean_over_tokens_with_partners(
    partners: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two heads, one attends uniformly, the other only to the last partner of each token."""
    rows = [[CLS, 7, 7, 8, SEP, 9, 7, SEP], [CLS, 5, 5, 6, SEP]]
    sizes = list(map(len, rows))
    maps = []
    for row in rows:
        square = np.full((len(row), len(row), 2), 1 / len(row))
        square[..., 1] = 0
        for query, key in np.argwhere(partners.partners(np.array(row))):
            square[query, :, 1] = 0
            square[query, key, 1] = 1
        maps.append(square.reshape(-1, 2))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["attention/1"] = np.concatenate(maps)
        file["attention/2"] = np.concatenate(maps)[:, :1]
        file["sizes"], file["tokens"] = sizes, np.concatenate(rows)
        file["offsets"] = np.cumsum([0, *sizes])
        file["attention_offsets"] = np.cumsum([0, *(size**2 for size in sizes)])
    # three tokens of the first row have one, one and two partners of 8; two of the second one of 5
    uniform = (1 / 8 + 1 / 8 + 2 / 8 + 1 / 5 + 1 / 5) / 5
    heads_of, expected = partners.shares(str(tmp_path / "f.h5"))
    assert expected == pytest.approx(uniform)
    assert heads_of[1].tolist() == pytest.approx([uniform, 1])
    partners.main([str(tmp_path / "f.h5")])
    assert capsys.readouterr().out.endswith("layer 1 1.000, layer 2 0.180 (uniform 0.180)\n")

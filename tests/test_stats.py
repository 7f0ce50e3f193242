"""`preprocess.py stats` and `verify`: the numbers against plain counting, and the figure against
both.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer.data import display, files, store, vocabularies
from xformer.data.errors import BadInput, Failure
from xformer.data.store import Store, open_store
from xformer.data.writing import create_store
from xformer.preprocess import cli, stats, stats_figure

LABELS = ["cat", "dog", "a label so long that it is cut somewhere"]
SPLITS = {"train": 300, "valid": 40, "test": 20}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cli.main()


def write(path: Path, kind: str) -> tuple[Store, dict[str, dict[str, Any]]]:
    """Write a store of two texts and a label, with a ragged column that holds no ids. Also returns
    its rows.
    """
    generator = np.random.default_rng(0)
    words = vocabularies.symbols((f"w{i}" for i in range(95)), separated=True)
    rows: dict[str, dict[str, Any]] = {}
    columns = {"tokens": "", "tokens_b": "", "id": "uint16"}
    columns["label"] = "float32" if kind == "score" else "int64"
    texts = ("tokens", "tokens_b", "id")
    with create_store(path, words, columns, texts) as new:
        for name, number in SPLITS.items():
            rows[name] = {
                text: [
                    generator.zipf(1.5, n).clip(5, 99).tolist()
                    for n in generator.integers(text == "tokens", 30, number)
                ]
                for text in ("tokens", "tokens_b")
            }
            rows[name]["id"] = [[60_000] * int(n) for n in generator.integers(0, 9, number)]
            rows[name]["label"] = generator.integers(-2, 3, number).tolist()
            if kind == "score":
                rows[name]["label"] = [
                    1000 + x / 7 if x > -2 else np.nan for x in rows[name]["label"]
                ]
            with new.split(name) as split:
                for text in texts:
                    values = [i for row in rows[name][text] for i in row]
                    lengths = np.array([len(row) for row in rows[name][text]])
                    split.append_ragged(text, np.array(values), lengths)
                split.append("label", np.array(rows[name]["label"]))
        new.finish(kind, LABELS if kind == "class" else [], None, {})
    return open_store(path), rows


@pytest.mark.parametrize("block", [7, 2**22])
def test_numbers_are_those_of_plain_counting(tmp_path, monkeypatch, block):
    made, rows = write(tmp_path / "s", "class")
    monkeypatch.setattr(stats, "BLOCK", block)
    described = stats.describe_store(made)
    assert described["store"] == "s"
    for name, split in rows.items():
        texts = [split["tokens"], split["tokens_b"]]
        ids = Counter(i for text in texts for row in text for i in row)
        here = described["splits"][name]
        assert (here["rows"], here["tokens"]) == (SPLITS[name], ids.total())
        assert here["distinct_ids"] == len(ids)
        assert stats.id_counts(made, name).tolist() == [ids[i] for i in range(100)]
        assert set(here["lengths"]) == {"tokens", "tokens_b"}
        for text in ("tokens", "tokens_b"):
            lengths = [len(row) for row in split[text]]
            assert here["lengths"][text] == pytest.approx(
                {
                    "mean": np.mean(lengths),
                    "min": min(lengths),
                    "median": np.median(lengths),
                    "max": max(lengths),
                }
            )
        labels = Counter(split["label"])
        wanted = {label: labels[i] for i, label in enumerate(LABELS)}
        assert here["labels"] == wanted | {"(none)": labels[-1], "(not in training)": labels[-2]}
        both = Counter(len(a) + len(b) for a, b in zip(*texts, strict=True))
        assert stats.survey(made)[name].together == both


def test_scores_and_spans(tmp_path, monkeypatch):
    made, rows = write(tmp_path / "s", "score")
    monkeypatch.setattr(stats, "BLOCK", 7)
    described = stats.describe_store(made)["splits"]
    for name, split in rows.items():
        scores = np.array(split["label"], np.float32).astype(float)
        known = scores[~np.isnan(scores)]
        wanted = {"(none)": len(scores) - len(known), "mean": known.mean(), "std": known.std()}
        wanted |= {"min": known.min(), "max": known.max()}
        assert described[name]["labels"] == pytest.approx(wanted)
    made.kind = "span"
    spans = np.array([[3, 4], [-1, -1], [0, 0]] * 5)
    assert stats._labels(made, spans) == {"answered": 10, "(none)": 5}


# ------------------------------------------------------------------------------ the figure


@pytest.mark.parametrize("kind", ["class", "score"])
@pytest.mark.slow
def test_figure_of_a_store(tmp_path, monkeypatch, capsys, kind):
    write(tmp_path / "s", kind)
    for ending in ("png", "svg", "PDF"):
        command(monkeypatch, "stats", tmp_path / "s", "--figure", tmp_path / f"f.{ending}")
    assert "300 rows" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.PDF", "f.png", "f.svg", "s"]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "f.PDF").read_bytes().startswith(b"%PDF")
    text = (tmp_path / "f.svg").read_text(encoding="utf-8")  # which names each text in a comment
    assert "<!-- s: 360 rows," in text
    assert "tokens, vocabulary 100 -->" in text
    for phrase in ("tokens in a row", "rank of the id", "1 / rank (Zipf)", "valid, 40 rows"):
        assert f"<!-- {phrase} -->" in text
    assert ("<!-- (not in training) -->" in text) == (kind == "class")
    assert ("<!-- a label so long that it… -->" in text) == (kind == "class")


def test_ranks_are_sorted_counts_and_zipf_has_their_sum():
    from matplotlib.figure import Figure

    for number in (1, 2, 4, 30, 100):
        counts = np.random.default_rng(number).integers(1, 1000, number)
        axes: Any = Figure().add_subplot()
        stats_figure._draw_ranks(axes, "train", np.concatenate([[0, 0], counts, [0]]))
        drawn, guide = axes.get_lines()
        assert drawn.get_xdata().tolist() == list(range(1, number + 1))
        assert drawn.get_ydata().tolist() == sorted(counts.tolist(), reverse=True)
        assert np.sum(guide.get_ydata()) == pytest.approx(counts.sum())
        np.testing.assert_allclose(guide.get_ydata() * guide.get_xdata(), guide.get_ydata()[0])
        low, high = axes.get_ylim()
        assert low < min(*drawn.get_ydata(), *guide.get_ydata())
        assert high >= max(*drawn.get_ydata(), *guide.get_ydata())


@pytest.mark.parametrize(
    "lengths",
    [{500: 9}, {0: 3, 1: 2}, dict.fromkeys(range(90, 121), 5), {3: 900, 4: 800, 5000: 1}],
)
def test_every_row_is_in_one_bin(lengths):
    from matplotlib.figure import Figure

    values = sorted(lengths)
    bounds = stats_figure.edges(values[0], values[-1], values[len(values) // 2])
    assert len(bounds) <= stats_figure.BINS + 1
    assert bounds[0] < values[0]
    assert values[-1] < bounds[-1]
    assert not set(bounds.tolist()) & set(map(float, values))  # between whole numbers
    axes: Any = Figure().add_subplot()
    stats_figure._draw_lengths(axes, {"train": Counter(lengths), "test": Counter({values[0]: 1})})
    heights = [patch.get_data().values for patch in axes.patches if not patch.get_fill()]
    assert [sum(height) for height in heights] == [sum(lengths.values()), 1]
    assert axes.get_xscale() == ("log" if values[-1] == 5000 else "linear")


def test_many_classes_are_summed_up():
    from matplotlib.figure import Figure

    train = {f"class {i}": 1000 - i for i in range(100)}
    about = {
        "kind": "class",
        "splits": {
            "train": {"labels": train},
            "test": {"labels": {f"class {i}": 1 for i in range(100)}},
        },
    }
    shown = stats_figure._classes(about)
    assert shown == [f"class {i}" for i in range(stats_figure.CLASSES)]
    axes: Any = Figure().add_subplot()
    stats_figure._draw_classes(axes, about, shown)
    assert axes.get_yticklabels()[-1].get_text() == "76 others"
    widths = [patch.get_width() for patch in axes.patches]
    assert len(widths) == 2 * (stats_figure.CLASSES + 1)
    assert (sum(widths[:25]), sum(widths[25:])) == (sum(train.values()), 100)
    assert widths[24] == sum(1000 - i for i in range(24, 100))


@pytest.mark.parametrize(
    ("option", "file", "phrase"),
    [
        ("--figure", "nowhere/f.png", "f.png cannot be written: .*nowhere is not a directory"),
        ("--figure", "f.xyz", "f.xyz: no figure can have this ending; give .png, .pdf or .svg"),
        ("--figure", "f", "give .png, .pdf or .svg"),
        ("--figure", "s", "s cannot be written: it is a directory; give a file"),
        ("--json", "nowhere/f.json", "nowhere is not a directory"),
        ("--json", "s/store.json", "store.json belongs to a store"),
    ],
)
def test_refused(tmp_path, monkeypatch, capsys, option, file, phrase):
    write(tmp_path / "s", "class")
    with pytest.raises(BadInput, match=phrase) as caught:
        command(monkeypatch, "stats", tmp_path / "s", option, tmp_path / file)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_only_the_most_frequent_classes_are_printed(capsys):
    names = {f"class {i}": i for i in range(1000)}
    split = {"rows": 9, "tokens": 9, "lengths": {}, "labels": names}
    about = {"store": "s", "kind": "class", "metric": None, "vocab_size": 9}
    stats.say_description(about | {"splits": {"train": split}})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("  labels: class 999 999, class 998 998, ")
    assert line.endswith("class 976 976, and 976 rarer ones")


# ------------------------------------------------------------------------------ progress, verify


def test_progress_is_shown(tmp_path, monkeypatch, capsys):
    made, _ = write(tmp_path / "s", "class")
    monkeypatch.setattr(display, "EVERY", 0)
    command(monkeypatch, "stats", tmp_path / "s")
    tokens = sum(int(stats.id_counts(made, name).sum()) for name in SPLITS)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("counting: ")
    assert said[-1].startswith(f"counting: 100%, {tokens:,} of {tokens:,} tokens")
    command(monkeypatch, "verify", tmp_path / "s")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 * 7
    assert said[-1].startswith("verifying: 100%")


def test_verify_reports_a_block_before_it_reads_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 256)
    monkeypatch.setattr(store, "BLOCK", 256)
    made, _ = write(tmp_path / "s", "class")
    hashed = []

    class Digest:
        def __init__(self) -> None:
            self.inner = hashlib.new("sha256")
            hashed.append(0)

        def update(self, data: memoryview) -> None:
            self.inner.update(data)
            hashed[-1] += len(data)

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    monkeypatch.setattr(files.hashlib, "sha256", Digest)
    checked = made.verify()
    sizes = []
    for number in range(1, 6):
        _, _, good = next(checked)
        assert good
        sizes.append(256)
        assert hashed == sizes, number
    assert all(good for _, _, good in checked)
    total = sum(path.stat().st_size for path in (tmp_path / "s").glob("*/*.npy"))
    assert sum(hashed) == total


def test_verify_notices_that_the_store_is_replaced(tmp_path, monkeypatch):
    write(tmp_path / "s", "class")
    verify = Store.verify

    def replaced(self: Store) -> Iterator[tuple[str, int, bool]]:
        for number, block in enumerate(verify(self)):
            if number == 3:
                shutil.rmtree(tmp_path / "s")
                write(tmp_path / "s", "score")
            yield block

    monkeypatch.setattr(Store, "verify", replaced)
    with pytest.raises(Failure, match="s was replaced while it was checked; run again"):
        command(monkeypatch, "verify", tmp_path / "s")

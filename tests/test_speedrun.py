"""The time to a loss: all contenders get the same text, and one program scores them."""

import gzip
import sys
from pathlib import Path

import pytest
from helpers import Forks, good

from benchmarks import speedrun
from benchmarks.bench import Bench, Ended
from benchmarks.speedrun import Timed
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json

TINY = [
    "train.steps=3",
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.intermediate=64",
    "system.precision=fp32",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A few passages in place of the books and of Wikipedia."""
    passages = "\n\n".join(f"The {n}th of them sat on the mat, and slept." for n in range(80))
    for name in (*speedrun.TEXTS["train"], *speedrun.TEXTS["valid"]):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = passages.encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return tmp_path / "data"


@pytest.fixture
def forked(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each command as a fork, and says that it took a minute."""

    def quickly(arguments: list[str], threads: int) -> Ended:
        return Ended(good(forks.run(*arguments)).out, 60.0, 0.0)

    monkeypatch.setattr(speedrun, "command", quickly)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.speedrun", *arguments])
    speedrun.main()


@pytest.mark.slow
def test_both_recipes_run_and_are_scored_alike(
    data: Path, tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "speedrun.md"
    page.write_text(f"# Time\n\n{speedrun.BEGIN}\nold\n<!-- until here -->\nbelow\n")
    extra = [word for setting in TINY for word in ("--ours", setting)]
    call(
        monkeypatch,
        *("--data", str(data), "--output", str(tmp_path), "--only", "bert", "fast"),
        *("--seeds", "0", "1", *extra),
    )
    runs = read_json(tmp_path / "speedrun.json")["measured"]
    assert [(one["contender"], one["seed"], one["steps"]) for one in runs] == [
        ("bert", 0, 3),
        ("fast", 0, 3),
        ("bert", 1, 3),
        ("fast", 1, 3),
    ]
    assert all(8 < one["loss"] < 10 for one in runs)  # near the uniform loss of 8,192 pieces
    assert len({one["loss"] for one in runs}) == 4
    text = page.read_text()
    assert text.endswith("<!-- until here -->\nbelow\n")
    assert "old" not in text
    assert "| BERT's recipe here | 2 | 3 | 1.00 (1.00 to 1.00) |" in text


def test_the_loss_does_not_depend_on_the_masking_of_training(
    data: Path, tmp_path: Path, forked: None
) -> None:
    still = ("optim.lr=1e-30", "optim.weight_decay=0", *TINY)  # the weights stay as they are
    losses = []
    for share in ("0.15", "0.4"):
        bench = Bench(data, tmp_path / share, speedrun.FULL, threads=1)
        bench.folder.mkdir()
        path, _ = speedrun.ours(
            Bench(**{**vars(bench), "ours": (*still, f"masking.probability={share}")}),
            speedrun.BERT,
            seed=0,
        )
        losses.append(speedrun.loss(bench, path))
    assert losses[0] == losses[1]


def test_the_table_compares_means() -> None:
    runs = [
        Timed("trainer", 0, 100, 600.0, 6.2, 0.1),
        Timed("trainer", 1, 100, 720.0, 6.3, 0.1),
        Timed("fast", 0, 10, 60.0, 6.1, 0.1),
    ]
    lines = speedrun.table(runs)
    assert "| 2 | 100 | 11.00 (10.00 to 12.00) | 6.250 (6.200 to 6.300) | 0.100 | 1 |" in lines[2]
    assert lines[3].endswith(
        "| 1 | 10 | 1.00 (1.00 to 1.00) | 6.100 (6.100 to 6.100) | 0.100 | 11 |"
    )
    assert len(lines) == 4  # no row for a contender without runs
    worse = speedrun.table([*runs, Timed("bert", 0, 5, 9.0, speedrun.TARGET + 0.01, 0.1)])
    assert worse[3].endswith("| not reached |")


def test_bad_arguments_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"english_books/train.txt.gz does not exist; --data needs"):
        call(monkeypatch, "--data", str(tmp_path))
    monkeypatch.setattr(speedrun, "require", lambda *packages: None)
    with pytest.raises(BadInput, match=r"--ours masking\.probability=0\.4 does not reach the"):
        call(monkeypatch, "--data", str(data), "--ours", "masking.probability=0.4")
    with pytest.raises(BadInput, match="absent is not a directory; create it first"):
        call(
            monkeypatch,
            *("--data", str(data), "--only", "bert", "--output", str(tmp_path / "absent")),
        )
    with pytest.raises(BadInput, match=r"speedrun\.md has no place for the table; add the lines"):
        call(monkeypatch, *("--data", str(data), "--only", "bert", "--output", str(tmp_path)))
    (tmp_path / "speedrun.md").write_text(f"{speedrun.BEGIN}\n<!-- until here -->\n")
    write_json(tmp_path / "speedrun.json", {"machine": "another", "versions": "", "measured": []})
    with pytest.raises(BadInput, match="was measured with another, not"):
        call(monkeypatch, *("--data", str(data), "--only", "bert", "--output", str(tmp_path)))

"""Trajectories: the steps at which a run keeps its weights. Keeping them changes no result."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CLASSIFY, NO_DROPOUT, SMOKE, Forks, good, refused, training
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_reliability import FULL
from test_train import AT_STEP, same
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import config
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, read_json, write_json
from xformer.data.sampler import Samples, Stream
from xformer.data.store import open_store
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.run import Run
from xformer.study.plan import content_key, identity
from xformer.trajectory import LogSpaced, Milestone, Timeline, Trajectory, parse, steps_of

SHORT = [
    "train.steps=15",
    "train.checkpoint_every=4",
    "train.validate_every=6",
    "train.log_every=3",
]
MARKS = 'train.keep_at=[0, 3, 8, "500 tokens", "700 words", "15 steps"]'


def trajectory(run: Path) -> dict[str, bytes]:
    """The content of every file of a run's trajectory."""
    folder = run / "trajectory"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def kept(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run / "trajectory").iterdir())


# ------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("log", LogSpaced(None)),
        ("log:500", LogSpaced(500)),
        ([], ()),
        ([0, 100], (Milestone(0, "step", "0"), Milestone(100, "step", "100"))),
        (["2000 steps"], (Milestone(2000, "step", "2000 steps"),)),
        (["1 step"], (Milestone(1, "step", "1 step"),)),
        (["2.5k steps"], (Milestone(2500, "step", "2.5k steps"),)),
        (
            ("5M tokens", "1.25B tokens"),
            (
                Milestone(5 * 10**6, "token", "5M tokens"),
                Milestone(1_250_000_000, "token", "1.25B tokens"),
            ),
        ),
        (["1M words"], (Milestone(10**6, "word", "1M words"),)),
        (["0.3M words"], (Milestone(300_000, "word", "0.3M words"),)),
        (["10K words"], (Milestone(10_000, "word", "10K words"),)),
        ("10K words", (Milestone(10_000, "word", "10K words"),)),
        (100, (Milestone(100, "step", "100"),)),
    ],
)
def test_forms(value: Any, wanted: Any) -> None:
    assert parse(value) == wanted


@pytest.mark.parametrize("text", ["10K words", '["10K words"]', "100"])
def test_one_mark_needs_no_list(data: Toys, text: str) -> None:
    line = training(SMOKE, data.text, Path("run"), f"train.keep_at={text}")
    [mark] = parse(config.load(Recipe, line[1:]).train.keep_at)  # type: ignore[misc]
    assert mark in (Milestone(10_000, "word", "10K words"), Milestone(100, "step", "100"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("linear", "'linear'"),
        ("", "''"),
        ("log:0", "'log:0'"),
        ("log:1k", "'log:1k'"),
        ("1.5", "1.5"),
        ("1M letters", "'1M letters'"),
        ("true", "True"),
        ("[true]", "True"),
        ("[1.5]", "1.5"),
        ("[-1]", "-1"),
        ('["10"]', "'10'"),
        ('["5m tokens"]', "'5m tokens'"),
        ('["1M letters"]', "'1M letters'"),
        ('["-1M words"]', "'-1M words'"),
        ("[[1]]", "[1]"),
    ],
)
def test_other_forms_are_refused(data: Toys, text: str, shown: str) -> None:
    """The command refuses a bad keep_at in one line that names the value and shows the forms."""
    with pytest.raises(BadInput) as caught:
        config.load(Recipe, training(SMOKE, data.text, Path("run"), f"train.keep_at={text}")[1:])
    assert str(caught.value).startswith(f"train.keep_at={shown}: give ")
    assert '"1M words"' in str(caught.value)
    with pytest.raises(ValueError, match="give a whole number of words"):
        parse(["1.5 words"])


# ---------------------------------------------------------------------------------- counting


def timeline(
    steps: int,
    sizes: list[int],
    rows: int = 2,
    tokens: int = 0,
    epochs: float = 1.0,
    words: int | None = None,
) -> Timeline:
    """The timeline of a run over rows with these numbers of tokens, two of them special tokens."""
    each = np.array(sizes)
    end = 2**62 if steps else round(epochs * len(sizes))
    stream = Stream(Samples(len(sizes), 0), end, lambda r: each[r], rows, tokens)
    return Timeline(stream, steps, 2, int(each.sum()) - 2 * len(sizes), words, "STORE")


@pytest.mark.parametrize(
    ("steps", "keep_at", "wanted"),
    [
        (1000, "log", [0, 1, 2, 4, 8, 16, 32, *range(50, 1001, 50)]),
        (100, "log", [0, 1, 2, 4, *range(5, 101, 5)]),
        (30, "log", [0, 1, *range(2, 31)]),  # every 1.5 steps; see the test
        (5, "log", [0, 1, 2, 3, 4, 5]),
        (1, "log", [0, 1]),
        (1700, "log:500", [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 1000, 1500]),
        (8, "log:4", [0, 1, 2, 4, 8]),
        (3, "log:1", [0, 1, 2, 3]),
        (9, [9, 0, 4, 4], [0, 4, 9]),
        (9, [], []),
    ],
)
def test_marks_in_steps(steps: int, keep_at: Any, wanted: list[int]) -> None:
    if (steps, keep_at) == (30, "log"):
        wanted = [0, 1, *sorted({-(-3 * i // 2) for i in range(1, 21)})]
        assert wanted[:6] == [0, 1, 2, 3, 5, 6]
    assert sorted(steps_of(keep_at, timeline(steps, [5] * 6))) == wanted


def test_marks_in_tokens_and_words() -> None:
    """A step has 2 rows of 5 tokens, 3 of which are text. There are 6 words to 18 tokens of text.

    So after step n the run has seen 10 n tokens and 2 n words.
    """
    run = timeline(9, [5] * 6, words=6)
    for mark, step in (
        ("0 tokens", 0),
        ("1 token", 1),
        ("10 tokens", 1),
        ("11 tokens", 2),
        ("90 tokens", 9),
        ("0 words", 0),
        ("1 word", 1),
        ("2 words", 1),
        ("3 words", 2),
        ("0.018k words", 9),
    ):
        assert steps_of([mark], run) == {step}, mark
    assert steps_of(["31 tokens", 2, "5 words"], run) == {2, 3, 4}


def test_the_length_of_a_run_in_epochs() -> None:
    """2.5 epochs of 6 rows are 15 rows. These are 8 steps of two rows, or as many as batches of
    tokens need.
    """
    assert timeline(0, [5] * 6, epochs=2.5).length() == 8
    assert timeline(0, [5] * 6, tokens=14, epochs=2.5).length() == 8
    assert timeline(0, [5] * 6, tokens=15, epochs=2.5).length() == 5
    assert max(steps_of("log", timeline(0, [5] * 6, tokens=15, epochs=2.5))) == 5


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=40),
    st.lists(st.integers(0, 400), max_size=5),
    st.integers(0, 60),
)
def test_marks_are_those_of_going_step_by_step(
    sizes: list[int], marks: list[int], tokens: int
) -> None:
    """The computed marks equal a plain sum over the rows in their order."""
    run = timeline(0, sizes, 3, tokens, epochs=2)
    seen, position, wanted, totals = 0, 0, set(), [0]
    while position < 2 * len(sizes):
        rows = list(run.stream.take(position)[2])
        seen, position = seen + sum(rows), position + len(rows)
        totals.append(seen)
    assert totals[-1] == 2 * sum(sizes)
    for mark in marks:
        wanted.add(next((i for i, total in enumerate(totals) if total >= mark), None))
    if None in wanted:
        with pytest.raises(BadInput, match=f"the run ends at step {len(totals) - 1}, after "):
            steps_of([f"{mark} tokens" for mark in marks], run)
    else:
        assert steps_of([f"{mark} tokens" for mark in marks], run) == wanted


@pytest.mark.parametrize(
    ("keep_at", "said"),
    [
        ([10], "train.keep_at=10: the run ends at step 9, about 90 tokens"),
        (
            ["10 steps", "1 token"],
            "=10 steps: the run ends at step 9, after 90 tokens and 18 words",
        ),
        (["91 tokens"], "=91 tokens: the run ends at step 9, after 90 tokens and 18 words"),
        (["19 words"], "=19 words: the run ends at step 9"),
        (["9B words"], "=9B words: the run ends at step 9"),
        ("log:10", "train.keep_at=log:10: the run ends at step 9, about 90 tokens"),
    ],
)
def test_what_lies_beyond_the_end_is_refused(keep_at: Any, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        steps_of(keep_at, timeline(9, [5] * 6, words=6))
    assert said in str(caught.value)


# ------------------------------------------------------------------------------------- runs


def test_a_run_with_a_trajectory(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The run equals one that keeps nothing, bit for bit. It keeps complete checkpoints at the
    right steps, and announces their number in advance.
    """
    runs = [tmp_path / "plain", tmp_path / "kept"]
    lines = [training(SMOKE, data.text, run, *SHORT, "train.keep_last=9") for run in runs]
    good(forks.run(*lines[0]))
    done = good(forks.run(*lines[1], MARKS))
    same(*runs)
    assert not (runs[0] / "trajectory").exists()
    states = {step: read_json(runs[1] / f"checkpoints/step_{step}/state.json") for step in (4, 8)}
    steps = kept(runs[1])
    assert {0, 3, 8, 15} < set(steps)
    assert len(steps) == 6
    for step in steps:
        made = checkpoints.load(runs[1] / f"trajectory/step_{step}")
        record = made.history[-1]
        assert (record["op"], record["steps"]) == ("train", step)
        if step in states:
            assert record["tokens"] == states[step]["real_tokens"]
        assert {p.name for p in (runs[1] / f"trajectory/step_{step}").iterdir()} == {
            "config.json",
            "manifest.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_meta.json",
        }
    # its key equals that of the whole checkpoint, which holds the same weights
    for step in (8, 15):
        places = [runs[1] / folder / f"step_{step}" for folder in ("trajectory", "checkpoints")]
        assert checkpoints.content_key(places[0]) == checkpoints.content_key(places[1])
    begun = prepare(config.load(Recipe, lines[0][1:]), ALONE).start.weights
    first = load_file(runs[1] / "trajectory/step_0/model.safetensors")
    assert {k: v.tolist() for k, v in first.items()} == {k: v.tolist() for k, v in begun.items()}
    (said,) = [line for line in done.err.splitlines() if line.startswith("trajectory: ")]
    assert said.startswith("trajectory: 6 checkpoints of 0.1 MB, 0.")
    assert said.endswith(f" MB, in {runs[1] / 'trajectory'}")
    # their size was announced correctly
    told = prepare(config.load(Recipe, [*lines[1][1:], MARKS]), ALONE).trajectory.bytes
    size = sum(map(len, trajectory(runs[1]).values())) / 6
    assert told == pytest.approx(size, rel=0.05)
    # every tool can open one
    one = str(runs[1] / "trajectory/step_3")
    good(forks.run("evaluate.py", one, f"data={data.text}", "split=valid"))
    assert "train" in good(forks.run("-m", "xformer.convert", "inspect", one)).out
    good(forks.run(*training(SMOKE, data.text, tmp_path / "next", "train.steps=1", f"init={one}")))
    refused(
        forks.run("evaluate.py", str(runs[1] / "trajectory"), f"data={data.text}"),
        "several checkpoints",
        "step_3",
    )


def test_the_state_of_the_source_says_what_the_other_run_took(
    data: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name of the current directory nor that of a copied checkpoint says it. If the
    source is gone, its name has to."""
    folder, copy = tmp_path / "step_500", tmp_path / "copy"
    folder.mkdir()
    copy.mkdir()
    write_json(copy / "state.json", {"step": 8})
    line = training(SMOKE, data.text, tmp_path / "run", *SHORT, "train.keep_at=[2, 10]")[1:]

    def planned(*settings: str) -> tuple[set[int], set[int]]:
        recipe = config.load(Recipe, [*line, *settings])
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            kept = prepare(recipe, ALONE).trajectory
        return set(kept.steps), set(kept.of_other)

    assert planned() == ({2, 10}, set())
    assert planned(f"train.branch_from={copy}") == ({10}, {2})
    assert planned("train.branch_from=gone/step_8") == ({10}, {2})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_has_the_same_trajectory(
    forks: Forks, data: Toys, tmp_path: Path, ranks: int
) -> None:
    """It is the same bit for bit, with dropout. The run is killed between two marks and continued
    from an earlier checkpoint.

    Between the two it finds a complete mark, one that is half written, and marks that it has not
    reached.
    """
    runs = [tmp_path / "straight", tmp_path / "killed"]
    more = [*SHORT, MARKS]
    lines = [training(SMOKE, data.text, run, *more) for run in runs]
    reference = forks.start(*lines[0], ranks=ranks)
    kill = AT_STEP.format(step=10, signal="SIGKILL", ranks="01")
    assert forks.run(*lines[1], ranks=ranks, before=kill).status == -9
    assert {0, 3, 8} <= set(kept(runs[1]))
    written = [step for step in kept(runs[1]) if step > 8]
    folder = runs[1] / "trajectory"
    for name in ("step_12", ".step_15.1.partial", *(f"step_{step}" for step in written)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_bytes(b"half")
    done = good(forks.run(*lines[1], ranks=ranks))
    good(reference.wait())
    same(runs[1], runs[0])
    assert trajectory(runs[1]) == trajectory(runs[0])
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    left = len([step for step in kept(runs[0]) if step > 8])
    assert f"trajectory: {left} checkpoint" in done.err
    assert f"{folder}, after step 8" in done.err


def test_stopped_at_every_step(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A signal stops the run at a mark, before it and after it."""
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    lines = [training(SMOKE, data.text, run, *SHORT, "train.keep_at=log:4") for run in runs]
    good(forks.run(*lines[0]))
    assert kept(runs[0]) == [0, 1, 2, 4, 8, 12]
    for step in (1, 3, 5, 11, 13):  # the run stops one step after the signal
        stop = AT_STEP.format(step=step, signal="SIGTERM", ranks="0")
        assert forks.run(*lines[1], before=stop).status == 128 + signal.SIGTERM
    good(forks.run(*lines[1]))
    assert trajectory(runs[1]) == trajectory(runs[0])


def test_what_becomes_of_a_trajectory(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It is not pruned, and keep_state=false does not touch it.

    A run may continue with other marks. If it begins again without any, its trajectory is deleted.
    """
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT, "train.keep_last=1")
    good(forks.run(*line, "train.keep_at=[0, 2, 15]"))
    before = trajectory(run)
    assert kept(run) == [0, 2, 15]
    longer = [*line, "train.steps=18", "train.keep_at=[0, 3, 17]", "train.keep_state=false"]
    done = good(forks.run(*longer))
    assert kept(run) == [0, 2, 15, 17]
    assert trajectory(run).items() >= before.items()
    assert "trajectory lacks step 3: " in done.err
    assert len(list((run / "checkpoints").iterdir())) == 1
    good(forks.run(*line, "overwrite=true"))
    assert not (run / "trajectory").exists()


def test_a_full_disk(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """If it is known in advance that there is too little space, the run is refused and nothing
    changes.

    If the disk becomes full later, the run goes on, and its last lines say what is missing.
    """
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT, "train.keep_at=[0, 2, 3, 9]")
    little = (
        "import shutil\nfrom types import SimpleNamespace\n"
        "shutil.disk_usage = lambda path: SimpleNamespace(free={})\n"
    )
    done = forks.run(*line, before=little.format(300_000))
    refused(
        done,
        "train.keep_at needs 0.4 MB",
        str(run / "trajectory"),
        "4 checkpoints of 0.1 MB",
        "the disk has 0.3 MB free",
    )
    assert not run.exists()
    done = good(forks.run(*line, before=FULL.format(steps=["step_2", "step_3"])))
    assert kept(run) == [0, 9]
    assert "the trajectory checkpoint of step 2 was not written; older ones are kept" in done.err
    assert f"{run / 'trajectory'} lacks step 2, 3: writing failed" in done.err
    # what overwrite= will delete counts as free space; a refusal deletes nothing
    held = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    refused(forks.run(*line, "overwrite=true", before=little.format(-(10**9))), "make room")
    assert held == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    freed = "frees = [0, 10**9]\n" + little.format("frees.pop(0)")
    good(forks.run(*line, "overwrite=true", before=freed))
    assert kept(run) == [0, 2, 3, 9]


def test_marks_that_a_run_cannot_have(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """They are refused before a file is touched."""
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT)
    refused(forks.run(*line, "train.keep_at=[3, 16]"), "train.keep_at=16: the run ends at step 15")
    refused(forks.run(*line, 'train.keep_at=["1M tokens"]'), "=1M tokens: ", "step 15, after 1.")
    task = training(CLASSIFY, data.classes, run, *SHORT)
    refused(
        forks.run(*task, 'train.keep_at=["10 words"]'),
        str(data.classes),
        "has no word count",
        "make it again",
    )
    assert list(tmp_path.iterdir()) == []


def test_marks_in_a_run_are_those_of_its_log(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Two ranks train on epochs of a part of the rows, with steps measured in tokens.

    The first step that reaches a mark is kept, by the tokens and words that the run itself has
    seen.
    """
    run = tmp_path / "run"
    marks = 'train.keep_at=["900 tokens", "800 words"]'
    line = training(
        SMOKE,
        data.text,
        run,
        *NO_DROPOUT,
        "train.steps=0",
        "train.epochs=1.5",
        "fraction=0.5",
        "batch.tokens=90",
        "batch.accumulate=2",
        "train.checkpoint_every=1",
        "train.keep_last=1000",
        marks,
    )
    good(forks.run(*line, ranks=2))
    split = open_store(data.text).split("train")
    assert split.words is not None
    seen = {}
    for path in (run / "checkpoints").iterdir():
        state = read_json(path / "state.json")
        bare = state["real_tokens"] - 2 * state["position"]
        seen[state["step"]] = state["real_tokens"], bare * split.words / split.tokens
    assert len(seen) == len([step for step in seen if step]) > 20
    wanted = [
        min(step for step in seen if seen[step][i] >= mark) for i, mark in enumerate((900, 800))
    ]
    assert kept(run) == sorted(wanted)


# --------------------------------------------------------------------------- whose key it is


def test_keep_at_belongs_to_no_key(data: Toys, tmp_path: Path) -> None:
    recipes = [
        config.load(Recipe, training(SMOKE, data.text, tmp_path / "run", *more)[1:])
        for more in ([], ["train.keep_at=log"], ['train.keep_at=[1, "2 words"]'])
    ]
    assert len({content_key(identity(recipe)) for recipe in recipes}) == 1
    for recipe in recipes:
        again = config.validate(Recipe, recipe.model_dump(mode="json"))
        assert again == recipe
        content = {"identity": recipe.model_dump(mode="json"), "config": {}}
        run = Run(tmp_path / "run")
        run.open(content, False)
        write_json(tmp_path / "run/config.json", content)
        del run  # this releases its lock


def test_a_store_of_before_words_were_counted(data: Toys, tmp_path: Path) -> None:
    """A store of an older version opens, has the same key, and does not know its number of
    words.
    """
    old = shutil.copytree(data.text, tmp_path / "old")
    meta = read_json(old / "store.json")
    for split in meta["splits"].values():
        del split["words"]
    write_json(old / "store.json", meta)
    sums = read_json(old / "sums.json")
    sums["sha256"]["store.json"] = file_checksum(old / "store.json")
    write_json(old / "sums.json", sums)
    assert open_store(old).key == open_store(data.text).key
    assert open_store(old).split("train").words is None
    raw = (data.raw / "train.txt").read_text()
    assert open_store(data.text).split("train").words == len(raw.split())
    line = training(SMOKE, old, tmp_path / "run", *SHORT, 'train.keep_at=["10 words"]')
    with pytest.raises(BadInput, match="has no word count"):
        prepare(config.load(Recipe, line[1:]), ALONE)
    assert Trajectory().announcement(tmp_path, 0) == ""

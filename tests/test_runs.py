"""`xformer runs`: the list of runs, and the rows of a training step."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import CLASSIFY, NO_DROPOUT, ROOT, SMOKE, Forks, good, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import AT_STEP, log
from toys import Toys

from xformer.analysis.subcommand import _to_tensorboard
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json, write_json
from xformer.data.store import open_store
from xformer.monitor import ENDS
from xformer.rows import batches_of
from xformer.runs import CELL, RunSummary, differing, main, summary, table

# Python that writes each step's micro-batches to a file of this rank
KEEP = """
import json, os
from xformer.parallel.feed import Feed
plain = Feed.steps
def steps(self, position):
    for step, batches in plain(self, position):
        parts = [
            [None if value is None else value.tolist() for value in
             (b.rows, b.tokens, b.cu_seqlens, b.places, b.targets, b.labels)]
            for b in step.batches
        ]
        with open(f"{folder}/" + os.environ.get("RANK", "0"), "a") as file:
            file.write(json.dumps([step.end, parts]) + "\\n")
        yield step, batches
Feed.steps = steps
"""


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object
) -> list[str]:
    """The lines that `python -m xformer.runs WORDS` prints on standard output."""
    monkeypatch.setattr(sys, "argv", ["xformer runs", *map(str, words)])
    capsys.readouterr()
    main()
    return capsys.readouterr().out.splitlines()


# ------------------------------------------------------------------------------------- the list


@pytest.fixture(scope="module")
def runs(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs that ended in different ways."""
    folder = tmp_path_factory.mktemp("runs")
    steps = ["train.steps=9", "train.log_every=2", "train.validate_every=4"]

    def start(name: str, *more: str, step: int = 0, signal: str = "") -> int:
        before = AT_STEP.format(step=step, signal=signal, ranks="0") if signal else ""
        return forks.run(
            *training(SMOKE, data.text, folder / name, *steps, *more), before=before
        ).status

    assert start("b10", "optim.lr=2e-3", "train.log_every=3") == 0
    assert start("b9", "seed=1") == 0
    assert start("stopped", step=5, signal="SIGTERM") == 128 + 15
    assert start("killed", step=5, signal="SIGKILL") == -9
    assert start("failed", "optim.lr=1e30") == 1
    shutil.copytree(folder / "killed", folder / "running")
    (folder / "running.toml").write_text("# pretrain seed=0\nseed = 0\n")
    fine = training(CLASSIFY, data.classes, folder / "deeper/classes", "train.epochs=2")
    good(forks.run(*fine, f"init={folder / 'b9'}"))
    return folder


def test_each_run_has_its_state_steps_and_scores(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (runs / "running/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = printed(capsys, monkeypatch, runs, f"csv={tmp_path / 'runs.csv'}")
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    states = {name: (row["state"], row["step"], row["steps"]) for name, row in rows.items()}
    # sorted by their numbers; a run of a study is sorted by its name there
    assert list(states.items()) == [
        ("b9", ("finished", "9", "9")),
        ("b10", ("finished", "9", "9")),
        ("deeper/classes", ("finished", "75", "")),
        ("failed", ("failed", "2", "9")),
        ("killed", ("killed?", "4", "9")),
        ("running", ("running", "4", "9")),
        ("stopped", ("stopped", "6", "9")),
    ]
    assert rows["running"]["job"] == "pretrain seed=0"
    assert rows["deeper/classes"]["share"] == "1.0"
    for name in ("b9", "deeper/classes"):
        result = json.loads((runs / name / "result.json").read_text())
        for split, metrics in result["metrics"].items():
            for metric, value in metrics.items():
                assert float(rows[name][f"{split} {metric}"]) == value
        assert float(rows[name]["tokens/s"]) == result["real_tokens_per_second"]
    for name in ("stopped", "killed"):
        (validation,) = [r for r in log(runs / name) if r["event"] == "validation"]
        assert float(rows[name]["valid loss"]) == validation["loss"]
        assert rows[name]["test loss"] == ""
    assert rows["failed"]["why"].startswith("the loss is not finite at step 2: ")
    assert any(line.startswith("failed failed: the loss is not finite") for line in lines)
    # the settings that differ, and no others
    assert [rows[name]["seed"] for name in ("b9", "b10")] == ["1", "0"]
    assert [rows[name]["optim.lr"] for name in ("b10", "failed")] == ["0.002", "1e+30"]
    assert rows["deeper/classes"]["init"] == str(runs / "b9")
    unlike = {"data", "init", "head", "seed", "optim.lr", "optim.warmup", "train.log_every"}
    assert unlike <= rows["b9"].keys()
    assert not {"model.hidden", "batch.max_tokens", "optim.name"} & rows["b9"].keys()


def test_the_table_fits_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries = differing([summary(p.parent, p.parent.name) for p in runs.glob("b*/config.json")])
    for width in (60, 80, 120, 250):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = printed(capsys, monkeypatch, runs)
        end = next((i for i, line in enumerate(lines) if line.startswith("columns that")), 9)
        assert max(map(len, lines[:end])) <= width
        head = next(line.split() for line in lines if line.startswith("run "))
        assert "state" in head
        assert "loss" in head
        assert ("lr" in head) == (width > 80), (width, head)
        assert any("perplexity" in line for line in lines), "it is shown or named below"
        assert table(summaries, width)[2].startswith("b")
    # two pre-training runs: what they differ in fits beside their scores
    assert [set(run.settings) for run in summaries] == [{"seed", "optim.lr", "train.log_every"}] * 2
    assert table(summaries, 80)[1].split()[:5] == ["run", "state", "step", "seed", "lr"]
    # one score comes before all settings
    narrow = table(summaries, 36)
    assert narrow[1].split() == ["run", "state", "step", "seed", "loss"]
    assert "optim.lr" in " ".join(narrow[4:])


def test_a_pipe_gets_the_whole_table(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_terminal(_: int) -> None:
        raise OSError

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    lines = printed(capsys, monkeypatch, runs)
    assert not any(line.startswith("columns that") for line in lines)
    assert len(str(runs / "b9")) > CELL
    (row,) = [line for line in lines if line.startswith("deeper/classes")]
    assert str(runs / "b9") in row


def test_a_run_that_continues_has_no_end_in_its_log(
    forks: Forks, data: Toys, runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for name in ("stopped", "failed"):
        shutil.copytree(runs / name, run)
        assert [r["event"] for r in log(run) if r["event"] in ENDS] == [name]
        settings = ["train.steps=9", "train.log_every=2", "train.validate_every=4"]
        rate = "1e30" if name == "failed" else "1e-3"
        again = forks.run(*training(SMOKE, data.text, run, *settings, f"optim.lr={rate}"))
        assert again.status == (name == "failed"), again.err
        ends = [r["event"] for r in log(run) if r["event"] in ENDS]
        assert ends == (["failed"] if name == "failed" else ["end", "end"])
        shutil.rmtree(run)


def test_kept_results_with_a_removed_setting_are_listed(tmp_path: Path) -> None:
    """Eight of results/ were made when system.shard existed."""
    recipe = {"data": "d", "run": "r", "head": "mlm", "system": {"shard": "none"}}
    write_json(tmp_path / "config.json", {"identity": {}, "config": recipe, "starts": []})
    assert summary(tmp_path, "kept").state == "killed?"


def test_the_main_column_is_of_the_metric_that_selected(tmp_path: Path) -> None:
    """A task may have another one than its head."""
    recipe = {"data": "d", "run": "r", "head": "classify"}
    write_json(tmp_path / "config.json", {"identity": {}, "config": recipe, "metric": "mcc"})
    line = {"event": "validation", "step": 1, "time": 1.0, "accuracy": 0.9, "mcc": 0.5}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    run = summary(tmp_path, "cola")
    assert run.main == {"valid mcc"}
    assert [*run.scores] == ["valid mcc", "valid accuracy"]


def test_what_is_not_a_run_costs_a_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(runs / "b9", folder / "good")
    config = json.loads((folder / "good/config.json").read_text())
    config["config"]["no_such_setting"] = 1
    for name, text in (
        ("broken", "{"),
        ("checkpoint", '{"hidden_size": 128}'),
        ("list", "[1]"),
        ("newer", json.dumps(config)),
        ("odd", '{"identity": 1}'),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    shutil.copytree(runs / "b9", folder / "altered")
    (folder / "altered/result.json").write_text('{"metrics": {}}')
    (folder / "none").mkdir()
    (folder / "private").mkdir()
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(sys, "argv", ["xformer runs", str(folder)])
    main()
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines() if "finished" in line] == ["good"]
    skipped = {line.split(": ")[0].split("/")[-1]: line for line in err.splitlines()}
    bad = {"altered", "broken", "checkpoint", "list", "newer", "odd", "private"}
    assert skipped.keys() == bad
    for name, words in (
        ("altered", "result.json is damaged"),
        ("broken", "is not valid JSON"),
        ("checkpoint", "its config.json is not that of a run"),
        ("newer", "unknown key no_such_setting"),
        ("private", "Permission denied"),
    ):
        assert words in skipped[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{none}",), "there are no runs below"),
        (("{none}/more",), "more is not a directory; give one that has runs below it"),
        (("csv=a.csv",), "the first argument must be a directory of runs, not 'csv=a.csv'"),
        (("{runs}", "cvs=a"), "unknown key cvs; did you mean csv?"),
        (("{runs}", "csv={none}/a.txt"), "give a name that ends in .csv"),
        (("{runs}", "csv={none}/x/a.csv"), "x is not a directory; make it first"),
        (("rows", "{runs}", "step=1"), "is not a run: it lacks the config.json that"),
        (("{runs}", ""), " is a second directory; give one directory"),
        (("rows", "{runs}/b9"), "step must be given: step=..."),
        (("rows", "{runs}/b9", "3"), "'3' is not of the form key=value; write step=3"),
        (("rows", "{runs}/b9", "step=0"), "step=0: input should be greater than or equal to 1"),
        (("rows", "{runs}/b9", "step=10"), "step=10: {runs}/b9 ends at step 9"),
        (
            ("rows", "{runs}/b9", "step=1", "data={other}"),
            "data={other} is not the store that {runs}/b9 was trained on, which was {text}; ",
        ),
        (("row", "{runs}/b9", "step=1"), "row is not a directory of runs; did you mean rows?"),
        (("{runs}", "{none}"), "{none} is a second directory; give one directory, and every run"),
        (("rows", "{runs}/deeper/classes", "step=76"), "classes ends at step 75"),
    ],
)
def test_refusals(
    runs: Path,
    data: Toys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    places = {"runs": runs, "none": tmp_path, "other": data.classes, "text": data.text}
    arguments = [word.format(**places) for word in words]
    monkeypatch.setattr(sys, "argv", ["xformer runs", *arguments])
    with pytest.raises(BadInput) as error:
        main()
    assert message.format(**places) in str(error.value)


def test_settings_of_the_initial_checkpoint_are_not_compared() -> None:
    def run(**settings: str) -> RunSummary:
        return RunSummary("r", "", "finished", "", 1, 1, 1.0, settings, {}, set(), None)

    dropout = "model.dropout"
    fresh, tuned = run(init="", **{dropout: "0.1"}), run(init="a")
    assert [r.settings.keys() for r in differing([fresh, tuned])] == [{"init"}] * 2
    both = differing([tuned, run(init="a", **{dropout: "0"})])
    assert [r.settings for r in both] == [{dropout: ""}, {dropout: "0"}]


def test_analyses_stand_behind_the_curves_in_tensorboard(tmp_path: Path) -> None:
    """The figure and a text with the main numbers, but no curve of one point."""
    (tmp_path / "f.png").write_bytes((ROOT / "docs/demo.png").read_bytes())
    numbers = {"layer 1": {"distance": 0.25}}
    _to_tensorboard(tmp_path, "pwcca", tmp_path / "f.png", "two models", numbers)
    shown = EventAccumulator(str(tmp_path / "analysis/pwcca")).Reload()
    assert shown.Tags()["scalars"] == []
    assert shown.Tags()["images"] == ["view/pwcca"]
    text = shown.Tensors("pwcca/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("two models\n")
    assert "| layer 1 | distance | 0.25 |" in text


# ------------------------------------------------------------------------------ the rows of a step


def read(folder: Path, ranks: int) -> list[dict[int, Any]]:
    """What KEEP wrote: for each rank its micro-batches, by the sample after the step."""
    lines = [(folder / str(rank)).read_text().splitlines() for rank in range(ranks)]
    return [dict(map(json.loads, of_rank)) for of_rank in lines]


def recomputed(run: Path, step: int, ranks: int) -> tuple[int, list[list[Any]]]:
    """The sample after a step, and each rank's micro-batches, in the form in which KEEP writes."""
    _, _, end, batches = batches_of(run, step)
    parts: list[list[Any]] = [[] for _ in range(ranks)]
    for rank, number, b in batches:
        assert number == len(parts[rank])
        arrays = (b.rows, b.tokens, b.cu_seqlens, b.places, b.targets, b.labels)
        parts[rank].append([None if a is None else a.tolist() for a in arrays])
    return end, parts


@pytest.mark.parametrize("name", ["rows", "tokens", "mapped", "mixture"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_the_rows_of_a_step_are_those_that_the_run_read(
    forks: Forks, data: Toys, tmp_path: Path, name: str, ranks: int
) -> None:
    """Several epochs of one store, of two with a mapping, or of a mixture."""
    run, more = tmp_path / "run", tmp_path / "more"
    store: str = str(data.text)
    settings = {"rows": ["batch.accumulate=2"], "tokens": ["batch.tokens=200"]}.get(name, [])
    if name in ("mapped", "mixture"):
        words = ("--input", data.raw / "valid.txt", "--tokenizer", data.tokenizer)
        good(forks.run("preprocess.py", "text", *words, "--output", more))
        store = json.dumps([str(data.text), str(more)])
        settings = ["mapping=shift:9", "fraction=0.5", "batch.tokens=150", "seed.order=3"]
    if name == "mixture":
        settings = ["mixture.weights=[1, 1]", "mixture.final=[1, 4]", "batch.accumulate=2"]
    steps = ["train.steps=90", "train.select=last", "train.log_every=50"]
    line = training(SMOKE, store, run, *steps, *settings)
    good(forks.run(*line, ranks=ranks, before=KEEP.replace("{folder}", str(tmp_path), 1)))
    kept = read(tmp_path, ranks)
    ends = sorted(kept[0])
    assert len(ends) == 90
    for step in (1, 2, 37, 90):
        end, parts = recomputed(run, step, ranks)
        assert end == ends[step - 1]
        assert parts == [of_rank[end] for of_rank in kept]


def test_a_run_that_was_made_longer_has_the_rows_that_it_read(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The last step of an epoch is short, and the added epoch begins after it."""
    run = tmp_path / "run"
    before = KEEP.replace("{folder}", str(tmp_path), 1)
    line = training(CLASSIFY, data.classes, run, *NO_DROPOUT, "batch.rows=16")
    good(forks.run(*line, "train.epochs=1", before=before))
    good(forks.run(*line, "train.epochs=2", "batch.accumulate=2", before=before))
    (kept,) = read(tmp_path, 1)
    ends = sorted(kept)
    assert (len(ends), ends[18], ends[-1]) == (38, 300, 600)
    for step in (18, 19, 20, 38):
        end, parts = recomputed(run, step, 1)
        assert (end, parts) == (ends[step - 1], [kept[end]])
    assert len(recomputed(run, 20, 1)[1][0]) == 2


def test_a_step_is_printed_as_a_table(
    runs: Path, data: Toys, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, monkeypatch, "rows", runs / "b9", "step=3")
    rows = list(csv.DictReader(lines, delimiter="\t"))
    (batch,) = [batch for *_, batch in batches_of(runs / "b9", 3)[3]]
    assert [int(row["row"]) for row in rows] == batch.rows.tolist()
    split, tokenizer = open_store(data.text).split("train"), open_store(data.text).tokenizer()
    masked = 0
    for row in rows:
        words = row["input"].split()
        assert (words[0], words[-1]) == ("[CLS]", "[SEP]")
        for place, piece in (pair.split(":") for pair in row["masked"].split()):
            masked += words[int(place)] == "[MASK]"
            words[int(place)] = piece
        text = tokenizer.decode(split.columns["tokens"][int(row["row"])])
        assert " ".join(words[1:-1]) == text
    assert masked > 0

    lines = printed(capsys, monkeypatch, "rows", runs / "deeper/classes", "step=75")
    rows = list(csv.DictReader(lines, delimiter="\t"))
    assert len(rows) == 8
    for row in rows:
        assert row["label"] == ("no" if "bam" in row["input"].split() else "yes")


def test_a_run_without_a_list_of_starts_has_one(tmp_path: Path) -> None:
    """The first versions did not write `starts`."""
    content = {"config": {"seed": 1}, "identity": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_run_json(tmp_path / "config.json")["starts"] == [{**content, "step": 0}]

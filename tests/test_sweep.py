"""Sweeps: a study in one line, what it costs, and which settings it reports as the best. Also the
mistakes of a study file, and the file with which docs/studies.md opens.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, Forks, good, refused

from xformer.data.display import duration
from xformer.data.errors import BadInput
from xformer.study import sweep, timing
from xformer.study.__main__ import cost_lines
from xformer.study.claims import paired_test
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.local import Local
from xformer.study.plan import Job, Plan, to_do
from xformer.study.progress import StudyProgress
from xformer.study.reading import read_study
from xformer.study.report import build_report, render
from xformer.study.results import Results, sample_of

TINY = (
    "model.layers=1",
    "model.heads=2",
    "model.hidden=16",
    "model.intermediate=16",
    "batch.rows=16",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A store of sequences with two labels."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(200):
        letters = "".join(rng.choice(list("ACGT"), 12))
        rows.append(f"{letters}{['ACG', 'TTT'][i % 2]}\t{['no', 'yes'][i % 2]}")
    (folder / "x.tsv").write_text("sequence\tlabel\n" + "\n".join(rows) + "\n")
    task = ("preprocess.py", "task", "dna", "--input", folder / "x.tsv", "--output", folder / "dna")
    good(forks.run(*task))
    return folder / "dna"


def read(*arguments: str) -> sweep.Sweep:
    return sweep.read(["finetune/classify", *arguments])


def test_values_are_lists_ranges_or_one_value() -> None:
    values = read(
        'data=["x", "y,z"]',
        "init=a,b",
        "optim.lr=1e-4,5e-5",
        "seed=0..2,7",
        "optim.betas=[0.9,0.98]",
        "batch.rows=16",
    ).values
    assert values == {
        "data": [["x", "y,z"]],
        "init": ["a", "b"],
        "optim.lr": [1e-4, 5e-5],
        "seed": [0, 1, 2, 7],
        "optim.betas": [[0.9, 0.98]],
        "batch.rows": [16],
    }
    # commas within brackets do not separate values, also if the others have no quotes
    lists = read('data=["x", "y"],z,["x","z"]').values
    assert lists == {"data": [["x", "y"], "z", ["x", "z"]]}
    assert read("init=2026", "seed=0..4").values == {"init": ["2026"], "seed": [0, 1, 2, 3, 4]}
    assert read("mapping=none,symbols:0..1").values == {
        "mapping": ["none", "symbols:0", "symbols:1"]
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=4..0"], "seed=4..0: a range goes upwards"),
        (["data=a,,b"], "data=a,,b has an empty value"),
        (["seed=0,0"], "seed=0 is given twice; give each value once"),
        (["seed=0", "seed=1"], "seed= is given twice; give all its values at once: seed=A,B"),
        (["seed=0"], "nothing varies: give a key several values, such as optim.lr=1e-4,5e-5 or"),
        (["seed=0-2"], "seed=0-2 is not a number; write seed=0..2 or seed=0,1,2"),
        (["seed=0-40"], "seed=0-40 is not a number; write seed=0..40"),
        (["optim.lr=1e-5..1e-3"], "optim.lr=1e-5..1e-3: a range has whole numbers"),
        (["pair=init", "init=a,b"], "pair=init: name two or more keys, each once"),
        (["pair=init,data", "init=a,b"], "pair=init,data: data has no values; write data=A,B"),
        (
            ["pair=init,mapping", "init=a,b", "mapping=symbols:0..2"],
            "pair=init,mapping: the keys need equally many values, but they have init 2, mapping 3",
        ),
        (
            ["pair=init,data", "init=a,b,a", "data=c,d,c"],
            'init="a" with data="c" is given twice',
        ),
        (["optim.lrr=1,2"], "unknown key optim.lrr; did you mean optim.lr?"),
        (["run=a,b"], "run is set by the sweep"),
        (
            ["seed=0..200", "mapping=a,b", "optim.lr=" + ",".join(map(str, range(99)))],
            "39,798 runs",
        ),
        (["other", "seed=0..4"], "give one recipe"),
    ],
)
def test_a_wrong_sweep_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        read(*arguments)


def test_the_file_can_be_kept(tmp_path: Path) -> None:
    """It names paths once, and the same sweep does not write it again."""
    made = read("data=stores/a,other/a", "init=x", "optim.lr=1e-4,5e-5", "seed=0..1")
    path = tmp_path / "sweeps/mine.toml"
    made.write(path)
    first = path.stat().st_mtime_ns
    made.write(path)
    assert path.stat().st_mtime_ns == first
    study = read_study(path, "")
    assert {name: need.path for name, need in study.needs.items()} == {
        "a": "stores/a",
        "a-2": "other/a",
        "x": "x",
    }
    assert study.stages["run"].recipe == "finetune/classify"
    assert list(study.factors("run")["data"]) == ["a", "a-2"]
    path.write_text(path.read_text().replace("seed = [0, 1]", "seed = [0, 2]"))
    with pytest.raises(BadInput, match="holds something else; give another file with out="):
        made.write(path)


def test_a_path_with_letters_beyond_ascii_has_a_plain_name(tmp_path: Path) -> None:
    """TOML has no other names without quotes."""
    read("data=magasins/été", "seed=0..1").write(tmp_path / "mine.toml")
    needs = read_study(tmp_path / "mine.toml", "").needs
    assert {name: need.path for name, need in needs.items()} == {"-t-": "magasins/été"}


def test_the_checkpoint_of_a_branch_enters_the_key(store: Path, tmp_path: Path) -> None:
    """If it is made again with other weights, so are the runs that branch from it."""
    place = tmp_path / "long/checkpoints/step_8"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("old")
    wanted = read(f"data={store}", f"train.branch_from={place}", "optim.schedule=wsd", "seed=0..1")
    wanted.write(tmp_path / "branches.toml")

    def keys() -> set[str]:
        plan = Plan(read_study(tmp_path / "branches.toml", ""), tmp_path / "studies", {})
        recipes = [job.recipe for job in plan.jobs.values() if job.recipe is not None]
        assert [recipe["train"]["branch_from"] for recipe in recipes] == [str(place)] * 2
        return set(plan.jobs)

    old = keys()
    assert keys() == old
    (place / "model.safetensors").write_text("new weights")
    assert not keys() & old
    with pytest.raises(BadInput, match=r"train\.branch_from=none: none does not exist"):
        read(f"data={store}", "train.branch_from=none", "seed=0..1").check_paths()


def test_the_values_of_a_pair_are_taken_together(tmp_path: Path) -> None:
    """Each init has its own store and mapping. Only the pairs are combined with the seeds."""
    paths = ("pair=init,data,mapping", "init=stores/a,b", "data=c,c", "mapping=none,symbols:1")
    made = read("batch.rows=8", *paths, "seed=0..2")
    made.write(tmp_path / "mine.toml")
    study = read_study(tmp_path / "mine.toml", "")
    assert [study.settings("run", levels) for levels in study.combinations("run")] == [
        {"batch": {"rows": 8}, "init": init, "data": "{need.c}", "mapping": mapping, "seed": seed}
        for init, mapping in (("{need.a}", "none"), ("{need.b}", "symbols:1"))
        for seed in range(3)
    ]
    assert list(study.factors("run")) == ["init+data+mapping", "seed"]
    assert list(study.factors("run")["init+data+mapping"]) == ["a+c+none", "b+c+symbols:1"]


@pytest.mark.slow
def test_a_sweep_runs_and_reports(store: Path, tmp_path: Path, forks: Forks) -> None:
    output, file = tmp_path / "studies", tmp_path / "mine.toml"
    line: list[str | Path] = [
        "-m",
        "xformer.study",
        "sweep",
        ROOT / "recipes/finetune/classify.toml",
    ]
    line += [f"data={store}", "optim.lr=1e-3,1e-4", "seed=0..2", *TINY, "train.epochs=1"]
    line += [f"output={output}", "jobs=1"]
    other = output / "classify-lr-seed.toml"  # an earlier sweep of the same keys
    output.mkdir()
    other.write_text("title = 'other'")
    unnamed = good(
        forks.run(*line, "--dry-run", before="from xformer.study import timing; timing.LIMIT = 0.0")
    )
    assert "study   not written (--dry-run); out=FILE writes it" in unnamed.out
    assert other.read_text() == "title = 'other'"
    assert list(output.glob("*.toml")) == [other]
    line.append(f"out={file}")
    refused(forks.run(*line, "train.epoch=2"), "unknown key train.epoch")
    refused(forks.run(*line, "init=nowhere", "--dry-run"), "init=nowhere: nowhere does not exist")
    misspelt = [*line, "init=micro/englsh", "--dry-run"]
    refused(forks.run(*misspelt), "micro/englsh does not exist; did you mean micro/english?")
    refused(forks.run(*line, "batch.max_tokens=2,64"), "batch.max_tokens=2")
    assert not file.exists()
    patient = "from xformer.study import timing; timing.LIMIT = 120.0"  # for a busy machine
    listed = good(forks.run(*line, "--dry-run", before=patient))
    assert file.exists()
    assert not (output / "runs").exists()
    assert len(re.findall(r"to do +[1-9]\d* s  run optim.lr", listed.out)) == 6
    assert "?" not in listed.out
    assert re.search(r"6 jobs, 6 to do, about [\d.]+ (s|min) of work", listed.out)
    assert "measured by finished runs, or by a run's first steps on this machine" in listed.out
    done = good(forks.run(*line, before=patient))
    assert "Best on valid: optim.lr=" in done.out
    report = (output / "mine/report.md").read_text()
    assert len(re.findall(r"\| optim\.lr=0\.\d+ \|.*\(3\) \|", report)) == 2
    assert "published" not in report
    assert "paper" not in report
    assert (output / "mine/run.svg").is_file()
    again = good(forks.run(*line))
    assert "6 jobs, 0 to do, everything is done" in again.out


def plan_of(text: str, tmp_path: Path) -> Plan:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return Plan(read_study(path, ""), tmp_path / "studies", {})


def a_plan(store: Path, tmp_path: Path) -> Plan:
    made = read(f"data={store}", "optim.lr=1e-3,1e-4", "seed=0..2", *TINY)
    return plan_of(made.text(tmp_path), tmp_path)


def test_the_best_settings_come_first(store: Path, tmp_path: Path) -> None:
    """By the mean on valid, although another setting is better on test."""
    plan = a_plan(store, tmp_path)
    for run in plan.runs("run"):
        good_one = run.levels["optim.lr"] == "0.0001"
        valid = 0.5 + 0.1 * good_one + 0.01 * int(run.levels["seed"])
        metrics = {"test": {"accuracy": 0.9 - valid}, "valid": {"accuracy": valid}}
        run.path.mkdir(parents=True)
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 1.0}))
    results = Results(plan)
    text = render(build_report(results, {}, tmp_path / "studies/x"), "md")
    assert "Best on valid: optim.lr=0.0001 (valid 61.0 [58.5, 63.5] (3), test 29.0 [26.5" in text
    assert text.index("| optim.lr=0.0001 |") < text.index("| optim.lr=0.001 |")


def test_a_sweep_of_seeds_reports_all_runs(store: Path, tmp_path: Path) -> None:
    plan = plan_of(read(f"data={store}", "seed=0..1", *TINY).text(tmp_path), tmp_path)
    for run in plan.runs("run"):
        run.path.mkdir(parents=True)
        metrics = {"valid": {"accuracy": 0.5 + 0.1 * int(run.levels["seed"])}}
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 1.0}))
    text = render(build_report(Results(plan), {}, tmp_path / "studies/x"), "md")
    assert "Best on valid: all runs (valid 55.0 (50.0, 60.0))" in text
    assert "| all runs | 55.0 (50.0, 60.0) |" in text


def test_runs_of_one_seed_count_once(store: Path, tmp_path: Path) -> None:
    """Its orders are averaged first. Four orders of each seed do not make the interval narrower. A
    seed without all its runs is left out."""
    line = [f"data={store}", "seed=0..3", "seed.order=1,2,3,4", *TINY]
    plan = plan_of(read(*line).text(tmp_path), tmp_path)
    for run in plan.runs("run"):
        seed, order = int(run.levels["seed"]), int(run.levels["seed.order"])
        if (seed, order) == (3, 4):
            continue  # this run is not finished
        run.path.mkdir(parents=True)
        metrics = {"valid": {"accuracy": 0.495 + 0.01 * seed + 0.002 * order}}
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 1.0}))
    text = render(build_report(Results(plan), {}, tmp_path / "studies/x"), "md")
    assert "Best on valid: all runs (valid 51.0 [48.5, 53.5] (3))" in text  # of 50, 51 and 52


def test_a_number_with_three_levels_becomes_an_axis(store: Path, tmp_path: Path) -> None:
    """Such as the layer of a probe: the figure has its levels in order, and a line for each
    combination of the other settings. The table is still sorted by score."""
    line = [f"data={store}", "probe.layer=2,0,1", "optim.lr=1e-3,1e-4", "seed=0..2", *TINY]
    plan = plan_of(read(*line).text(tmp_path), tmp_path)
    for run in plan.runs("run"):
        layer, fast = int(run.levels["probe.layer"]), run.levels["optim.lr"] == "0.001"
        if (layer, fast) == (0, False):
            continue  # these runs are not finished
        valid = 0.5 + 0.1 * layer + 0.05 * fast + 0.01 * int(run.levels["seed"])
        run.path.mkdir(parents=True)
        metrics = {"valid": {"accuracy": valid}}
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 1.0}))
    report = build_report(Results(plan), {}, tmp_path / "studies/x")
    text = render(report, "md")
    assert "Best on valid: probe.layer=2, optim.lr=0.001 (valid 76.0" in text
    section = next(s for s in report.sections if s.figure is not None)
    assert section.figure is not None
    svg, words = section.figure.svg, "accuracy on valid, times 100"
    ticks = [svg.index(f">{level}</text>") for level in (0, 1, 2)]
    assert ticks == sorted(ticks)
    assert svg.index(">2</text>") < svg.index(">layer (0: the output") < svg.index(words)
    assert all(f">optim.lr={rate}</text>" in svg for rate in ("0.001", "0.0001"))
    assert "of three seeds or more, on valid" in section.figure.caption


def test_the_cost_is_timed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of a kind is timed, and its speed is kept; without a store there is a reason."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    plan, started = a_plan(store, tmp_path), list[Job]()
    costs, todo = Costs(Forecast(plan)), to_do(plan.jobs.values(), plan.wanted)
    assert "untimed: no run like it has been timed" in cost_lines(costs, todo, 2)[-1]

    class Here:
        slots, threads, devices = 1, 1, ()

        def choose(self, free: list[int], processes: int) -> list[int]:
            return free[:processes]

        def start(self, job: Job, slots: object) -> Ended:
            started.append(job)
            job.path.mkdir()
            speeds = [1.0, 1.0, 1.0, 1000.0, 1000.0]
            lines = [
                {"event": "train", "step": i, "time": i, "real_tokens_per_second": speed}
                for i, speed in enumerate(speeds)
            ]
            (job.path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
            return Ended()

    class Ended:
        exitcode = 0

        def kill(self) -> None: ...

        def join(self) -> None: ...

    plan.root.mkdir()
    for _ in range(2):
        costs = Costs(Forecast(plan))
        timing.measure(plan, costs, todo.values(), Here())  # type: ignore[arg-type]
    assert len(started) == 1
    assert not started[0].path.exists()
    job = next(iter(todo.values()))
    work = costs.work[job.key]
    assert work is not None
    # a forward pass is a third of a training step
    scored = work.scoring / work.operations * 3 * work.tokens
    assert costs.seconds(job) == pytest.approx(1 + (work.tokens + scored / 3) / 1000)
    assert (
        f"about {duration(6 * (costs.seconds(job) or 0))} of work" in cost_lines(costs, todo, 1)[0]
    )
    assert len(cost_lines(costs, todo, 1)) == 2
    monkeypatch.setattr("os.getloadavg", lambda: (3.94, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert cost_lines(costs, todo, 1)[2] == "other work is running: load 3.9 on 2 cores"
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0.0, 0.0))

    gone = plan_of(read("data=nowhere", "seed=0..1").text(tmp_path), tmp_path)
    lines = cost_lines(Costs(Forecast(gone)), to_do(gone.jobs.values(), gone.wanted), 1)
    assert lines == [
        "2 jobs, 2 to do, no time estimate",
        "no input: the time is known once the store and the initial model of the run exist "
        "(2 jobs)",
    ]


def test_the_time_left_is_unknown_until_a_run_logs_its_speed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guess could be far too short. The first estimate is made again after a minute."""
    plan = a_plan(store, tmp_path)
    runs = plan.runs("run")
    with StudyProgress(plan, slots=2, keep=lambda *_: "") as progress:

        def after_a_minute() -> str:
            progress.looked = time.monotonic() - 61.0
            progress.estimated -= 61.0
            progress.show({})
            return capsys.readouterr().err

        assert progress.left() is None
        runs[0].path.mkdir(parents=True)
        speeds = (10.0, 3000.0, 1000.0)
        steps = [
            {"event": "train", "step": step, "loss": 2.0, "real_tokens_per_second": speed}
            for step, speed in enumerate(speeds, 1)
        ]
        (runs[0].path / "log.jsonl").write_text("\n".join(map(json.dumps, steps)))
        assert "study: 0%, 0 of 6 jobs, " in (line := after_a_minute())
        work = progress.seconds[runs[0].key]
        assert work is not None
        assert work > 1
        assert f", {duration(3 * work)} left, step 3, loss 2, tokens/s 1,000" in line
        (runs[0].path / "log.jsonl").write_text("")
        assert "left" in after_a_minute()  # it is not estimated again so soon


@pytest.mark.parametrize(
    "rates", ["", ', "flops_per_second": [1]', ', "flops_per_second": {"a": {}}']
)
def test_damaged_timings_are_measured_again(rates: str, tmp_path: Path) -> None:
    plan = plan_of(read("data=nowhere", "seed=0..1").text(tmp_path), tmp_path)
    plan.root.mkdir(exist_ok=True)
    (plan.root / timing.FILE).write_text(f'{{"threads": 1{rates}}}\n')
    assert timing.measured(plan, Local(1, 1)) == {}


def test_probes_of_each_layer_are_timed_by_themselves(store: Path, tmp_path: Path) -> None:
    """A probe of the embeddings has hardly any matrix products, and its time can be told all the
    same."""
    plan = plan_of(read(f"data={store}", "probe.layer=0..2", *TINY).text(tmp_path), tmp_path)
    for run in plan.runs("run"):
        run.path.mkdir(parents=True)
        seconds = 1.0 + int(run.levels["probe.layer"])
        metrics = {"valid": {"accuracy": 0.5}}
        run.proof.write_text(json.dumps({"metrics": metrics, "seconds": seconds}))
    costs = Costs(Forecast(plan))
    every = [costs.work[run.key] for run in plan.runs("run")]
    assert len({work.kind for work in every if work is not None}) == 3
    expected = [costs.seconds(run) or 0 for run in plan.runs("run")]
    assert 0 < expected[0] < expected[1] < expected[2]


def test_two_scores_have_no_interval() -> None:
    assert sample_of([0.0, 40.0]).interval is None
    assert sample_of([0.0, 40.0]).words(1) == "20.0 (0.0, 40.0)"
    assert sample_of([0.0, 40.0, 20.0]).words(1) == "20.0 ± 20.0 (3)"
    two = paired_test([0.0, 40.0], [0.0, 0.0])
    assert two.half is None
    assert two.p is not None
    assert two.detectable(False) is not None


MISTAKES = """
titel = "x"
question = 3
[needs.data]
about = "x"
[stages.finetune]
recipe = "finetune/classify"
settings = { data = "{need.dat}", optim.lrr = 1 }
vary.seed = [0, 1]
vary.mapping = ["none", "sideways:{sed}"]
[[tables]]
name = "main"
title = "x"
stage = "finetune"
rows = "start"
columns = "seed"
where.mapping = "no"
"""


def test_all_mistakes_are_reported_at_once(tmp_path: Path, forks: Forks) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MISTAKES)
    ended = forks.run("-m", "xformer.study", path, "--dry-run")
    assert ended.status == 2
    lines = ended.err.splitlines()
    assert [line.removeprefix(f"error: {path}: ") for line in lines] == [
        "title must be given",
        "question=3: input should be a valid string",
        "unknown key titel; did you mean title?",
        "{need.dat}: there is no 'dat'; did you mean data?",
        "stages.finetune: unknown key optim.lrr; did you mean optim.lr?",
        "stages.finetune: 'sideways:{sed}': {sed} is not one of its factors: seed, mapping",
        "table main: there is no 'start'",
        "table main: there is no 'no'; did you mean none?",
    ]


def test_the_first_study_of_the_docs_plans(store: Path, tmp_path: Path, forks: Forks) -> None:
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    text = page.split("```toml\n")[1].split("```")[0]
    assert page.index("```toml") < 1000
    assert len(text.splitlines()) <= 15
    path = tmp_path / "rates.toml"
    path.write_text(text)
    line = ("-m", "xformer.study", path, "--dry-run", f"output={tmp_path / 'studies'}")
    listed = good(forks.run(*line, "needs.modules=nowhere"))
    assert "6 jobs, 6 to do, no time estimate" in listed.out
    assert "missing: modules: /" in listed.out
    assert "/nowhere does not exist" in listed.out

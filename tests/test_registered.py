"""Registered claims: the commit that first held them, the differences that their seeds can detect,
and runs at chance level.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_study import STUDY, data, finish, html_of, markdown_of, plan_of  # noqa: F401

from xformer.data.errors import BadInput
from xformer.study.claims import (
    Verdict,
    detectable,
    paired_test,
    registration_lines,
    verdicts,
)
from xformer.study.plan import Job
from xformer.study.reading import read_study
from xformer.study.registration import first_result, origins
from xformer.study.results import Results
from xformer.study.statistics import tie_power

REGISTRATION = """
[scales.mini.registration]
seeds.seed = 2
unit = "a fine-tuning"
extension = "none"
[scales.mini]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A study in a git repository of its own. It is not committed yet."""
    path = tmp_path / "repository" / "letters.toml"
    path.parent.mkdir()
    path.write_text(STUDY.replace("\n[scales.mini]\n", REGISTRATION))
    git(path, "init", "--quiet", "--initial-branch", "main")
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"none"', '"None."', "extension: to plan none, write \"none\", not 'None.'"),
        ('"none"', '" "', "extension: to plan none"),
        ("seed = 2", "seed = 0", "seeds.seed=0: input should be greater than 0"),
        ("seed = 2", "draw = 2", "registration.seeds: there is no 'draw'"),
    ],
)
def test_a_registration_that_says_something_else_is_refused(
    file: Path, old: str, new: str, words: str
) -> None:
    text = file.read_text()
    assert REGISTRATION.replace(old, new) != REGISTRATION
    file.write_text(text.replace(REGISTRATION, REGISTRATION.replace(old, new)))
    with pytest.raises(BadInput, match=re.escape(words)):
        read_study(file, "mini")


def git(file: Path, *arguments: str, when: int = 0) -> str:
    line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    dates = {"GIT_COMMITTER_DATE": f"@{when} +0000", "GIT_AUTHOR_DATE": f"@{when} +0000"}
    done = subprocess.run(
        line,
        cwd=file.parent,
        env={**dates, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(file: Path, when: int) -> str:
    git(file, "add", "--all")
    git(file, "commit", "--quiet", "--allow-empty", "--message", "x", when=when)
    return git(file, "rev-parse", "HEAD")


def test_the_commit_that_held_a_claim_first(file: Path) -> None:
    assert origins(file, "mini")[0][0].words(None) == "exploratory: not committed"
    first = commit(file, 1_000_000_000)
    file.write_text("# a comment\n" + file.read_text())
    commit(file, 1_000_000_100)
    origin = origins(file, "mini")[0][0]
    assert (origin.commit, origin.time) == (first, datetime.fromtimestamp(1_000_000_000, UTC))
    before, after = (datetime.fromtimestamp(1_000_000_000 + s, UTC) for s in (-60, 60))
    assert origin.words(after) == f"{first[:9]} of 2001-09-09 01:46"
    assert origin.words(before).startswith(f"exploratory: {first[:9]} of 2001-09-09 01:46, the")

    for old, new in (("helps at", "hurts at"), ('columns = "rate"', 'columns = "seed"')):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert origins(file, "mini")[0][0].time is None  # changed since the commit
        file.write_text(text)
    file.write_text(file.read_text().replace("seeds.seed = 2", "seeds.seed = 1"))
    second = commit(file, 1_000_000_200)
    assert origins(file, "mini")[0][0].commit == second

    def words(first: int) -> str:
        [(origin, runs)] = origins(file, "mini")
        return origin.words(datetime.fromtimestamp(first, UTC), runs)

    assert words(1_000_000_300) == f"{second[:9]} of 2001-09-09 01:50"
    text = file.read_text()
    file.write_text(text.replace("optim.lr = 1e-3", "optim.lr = 2e-3"))  # the runs' settings
    assert words(1_000_000_300).endswith("after the first result, and are not committed")
    third = commit(file, 1_000_000_400)
    assert words(1_000_000_300).endswith(f"after the first result, in {third[:9]}")
    assert words(1_000_000_500) == f"{second[:9]} of 2001-09-09 01:50"

    # neither does how often a run writes its checkpoints
    text = file.read_text()
    often = "settings.train.epochs = 1\nsettings.train.checkpoint_every = 7"
    file.write_text(text.replace("settings.train.epochs = 1", often))
    assert words(1_000_000_500) == f"{second[:9]} of 2001-09-09 01:50"
    file.write_text(text)

    # adding a level does not change the runs if the claim names its own levels of that factor
    text = file.read_text()
    file.write_text(text.replace("vary.rate.low", "vary.start.third = {}\nvary.rate.low"))
    commit(file, 1_000_000_600)
    assert words(1_000_000_500) == f"{second[:9]} of 2001-09-09 01:50"
    for old, new in (
        ("vary.rate.low", "vary.rate.third = {}\nvary.rate.low"),
        ("vary.start.scratch = {", "vary.start.scratch = { init = '',"),
    ):
        file.write_text(text.replace(old, new))
        changed = commit(file, 1_000_000_700)
        assert words(1_000_000_500).endswith(f"after the first result, in {changed[:9]}")

    # nor does another stage, for which these runs do not wait
    recipe = Path(__file__).parents[1] / "recipes/pretrain/smoke.toml"
    other = f"[stages.other]\nrecipe = '{recipe}'\nsettings.optim.lr = 1.0\n\n[[tables]]"
    file.write_text(text.replace("[[tables]]", other))
    commit(file, 1_000_000_800)
    file.write_text(file.read_text().replace("optim.lr = 1.0", "optim.lr = 2.0"))
    commit(file, 1_000_000_810)
    assert words(1_000_000_805) == f"{second[:9]} of 2001-09-09 01:50"

    # adding the seeds of a planned extension does not change them either; other seeds do
    for extension, ends in (("seeds 4 and 5", "02:01"), ("none", "in HEAD")):
        file.write_text(text.replace('extension = "none"', f'extension = "{extension}"'))
        commit(file, 1_000_000_900)
        file.write_text(file.read_text().replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2]"))
        changed = commit(file, 1_000_001_000)
        assert words(1_000_000_950).endswith(ends.replace("HEAD", changed[:9]))
    outside = file.parent.parent / "outside.toml"
    outside.write_text(file.read_text())
    assert origins(outside, "mini")[0][0].time is None


@pytest.mark.parametrize(
    ("place", "first", "added", "other"),
    [
        (
            "vary.seed = {}",
            "{ a.seed = 0 }",
            "{ a.seed = 0, b.seed = 1 }",
            "{ a.seed = 2, b.seed = 1 }",
        ),
        ("[scales.mini]\nlevels.seed = {}\n", "[0]", "[0, 1]", "[1]"),
        ("vary.seed = {}", "[0]", "[0, 1]\nwithout = [{ start = 'third', seed = 1 }]", "[1]"),
    ],
)
def test_added_seeds_of_a_planned_extension_change_no_settings(
    file: Path, place: str, first: str, added: str, other: str
) -> None:
    """As a group of settings, as a level of the scale, and left out at a level that the claim does
    not name. A registered seed that changes does change them."""
    text = file.read_text().replace("seeds.seed = 2", "seeds.seed = 1")
    text = text.replace('extension = "none"', 'extension = "a second seed"')
    text = text.replace("vary.rate.low", "vary.start.third = { init = '' }\nvary.rate.low")
    old = "vary.seed = [0, 1]" if place.startswith("vary") else "[scales.mini]\n"
    commits = []
    for when, seeds in enumerate((first, added, other), start=1_000_000_000):
        file.write_text(text.replace(old, place.replace("{}", seeds)))
        read_study(file, "mini")
        commits.append(commit(file, when))
        assert origins(file, "mini")[0][1].commit == commits[0 if seeds != other else 2]


def test_a_new_column_of_a_mean_changes_a_claim_about_it(file: Path) -> None:
    """Though both sides name the factor: the new level is a part of what they name."""
    text = file.read_text()
    for old, new in (
        ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]'),
        ('better.start = "pretrained"', 'better = { start = "pretrained", rate = "both" }'),
        ('than.start = "scratch"\n', 'than = { start = "scratch", rate = "both" }\n'),
        ('each = "rate"\n', ""),
        ("[scales.mini]\n", '[scales.mini]\nlevels.rate = ["low"]\n'),
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    commit(file, 1_000_000_000)
    file.write_text(text.replace('levels.rate = ["low"]', 'levels.rate = ["low", "high"]'))
    commit(file, 1_000_000_200)
    [(origin, runs)] = origins(file, "mini")
    words = origin.words(datetime.fromtimestamp(1_000_000_100, UTC), runs)
    assert "after the first result" in words


def test_odd_content_of_earlier_commits(file: Path) -> None:
    """Links out of the repository are not followed. A study that had another form has changed."""
    (file.parent / "data").symlink_to("/usr/share")
    text = file.read_text()
    file.write_text(text.replace("[made.letters]", "[[made]]").replace("[made.task]", "[[made]]"))
    commit(file, 1_000_000_000)
    file.write_text(text)
    (file.parent / "data").unlink()
    second = commit(file, 1_000_000_100)
    [(claim, runs)] = origins(file, "mini")
    assert runs.commit == second
    assert claim.time is not None
    file.write_text(text.replace('get = "write it"', 'get = "write it"\npath = "micro/english"'))
    third = commit(file, 1_000_000_200)
    assert origins(file, "mini")[0][1].commit == third  # the runs read something else


def test_a_side_branch_changes_nothing(file: Path) -> None:
    """A claim counts from the commit of the branch that holds it, whatever another branch did
    meanwhile."""
    text = file.read_text()
    file.unlink()
    (file.parent / "other.toml").write_text("")
    commit(file, 1_000_000_000)
    git(file, "branch", "side")
    file.write_text(text)
    first = commit(file, 1_000_000_100)
    git(file, "checkout", "--quiet", "side")
    (file.parent / "other.toml").write_text("# changed\n")
    commit(file, 1_000_000_200)
    git(file, "checkout", "--quiet", "main")
    git(file, "merge", "--quiet", "--no-edit", "side", when=1_000_000_300)
    [(claim, runs)] = origins(file, "mini")
    assert (claim.commit, runs.commit) == (first, first)
    shallow = file.parent.parent / "shallow"
    git(file, "clone", "--quiet", "--depth", "1", f"file://{file.parent}", str(shallow))
    words = origins(shallow / file.name, "mini")[0][0].words(None)
    assert words.startswith("at the latest ")


@pytest.mark.usefixtures("data")
def test_a_report_shows_margin_power_and_commit(file: Path, tmp_path: Path) -> None:
    first = commit(file, 1_000_000_000)
    plan = plan_of(file, tmp_path, data=str(tmp_path / "data"))
    finish(plan, lambda seed, start, rate: 0.5 + 0.01 * int(seed) * (start == "pretrained"))
    for run in plan.runs("finetune"):
        record = {"event": "end", "step": 1, "time": 1_000_000_500.0}
        (run.path / "log.jsonl").write_text(json.dumps(record))
    results = Results(plan)
    verdict = verdicts(results)[0]
    assert verdict.registered == f"{first[:9]} of 2001-09-09 01:46"
    text = markdown_of(results)
    assert "| seeds | hours | registered |" in text
    # two pairs that differ by 0 and 1 point
    wanted = detectable(2, tests=2) * np.std([0.0, 1.0], ddof=1)  # one test for each rate
    assert verdict.parts[0][1].detectable(False) == pytest.approx(wanted)
    detects = "distance from the margin that its seeds detect (power 0.8)"
    assert f"- {detects}: {wanted:.1f}, {wanted:.1f}\n" in text
    assert f"| < 0.1 | {first[:9]} of 2001" in text
    assert "Registered: paired t over seed; a seed is a fine-tuning; planned ext" in text
    directory = plan.root / "letters-mini"
    directory.mkdir()
    assert f"{first[:9]} of 2001-09-09 01:46" in html_of(results, {}, directory)

    # a pre-training may be older than the claim, but not a run of the table's stage
    def registered_if_older(job: Job) -> str:
        record = {"event": "end", "step": 1, "time": 900_000_000.0}
        (job.path / "log.jsonl").write_text(json.dumps(record))
        return verdicts(Results(plan))[0].registered

    pretrain, finetune = plan.runs("pretrain")[0], plan.runs("finetune")[-1]
    pretrain.path.mkdir(parents=True)
    pretrain.proof.write_text(json.dumps({"metrics": {}, "seconds": 2.0}))
    assert registered_if_older(pretrain) == verdict.registered
    assert registered_if_older(finetune).startswith("exploratory: ")

    # --dry-run says so, too, if the results are only kept
    there = registration_lines(plan)
    plan.kept = tmp_path / "kept"
    plan.kept.mkdir()
    for run in plan.runs("finetune"):
        with zipfile.ZipFile(plan.kept / f"{run.key}.zip", "w") as kept:
            kept.write(run.path / "log.jsonl", "log.jsonl")
        shutil.rmtree(run.path)
    assert registration_lines(plan) == there
    assert "the first result is of 1998-07-09 16:00" in there[2]


@pytest.mark.usefixtures("data")
def test_a_kept_result_may_be_older_than_its_run(file: Path, tmp_path: Path) -> None:
    """The run was made again here."""
    plan = plan_of(file, tmp_path, data=str(tmp_path / "data"))
    plan.kept = tmp_path
    finish(plan, lambda **_: 0.5)
    line = '{{"event": "end", "step": 1, "time": {}}}'
    for run in plan.runs("finetune"):
        (run.path / "log.jsonl").write_text(line.format(1_000_000_500))
        with zipfile.ZipFile(plan.kept / f"{run.key}.zip", "w") as kept:
            kept.writestr("log.jsonl", line.format(1_000_000_000))
    first = first_result(plan, plan.study.tables[0])
    assert first == datetime.fromtimestamp(1_000_000_000, UTC)


def test_a_claim_with_too_few_seeds_is_refused(file: Path) -> None:
    file.write_text(file.read_text().replace("seeds.seed = 2", "seeds.seed = 3"))
    with pytest.raises(
        BadInput, match=r"registration\.seeds\.seed=3, but pretrained, low has 2 levels"
    ):
        read_study(file, "mini")
    unknown, lacking = "registration.seeds: there is no 'draw'", "how many levels the factor 'seed'"
    for seeds, words in (("seeds.draw = 1", unknown), ("seeds = {}", lacking)):
        file.write_text(re.sub(r"^seeds\b.*", seeds, file.read_text(), flags=re.MULTILINE))
        with pytest.raises(BadInput, match=words):
            read_study(file, "mini")


@pytest.mark.usefixtures("data")
def test_a_registered_claim_waits_for_its_seeds(file: Path, tmp_path: Path) -> None:
    """It waits for all seeds of its scale: with fewer, each seed that ends would be another test.
    Two have failed at one rate, or one has. The other seeds would decide it."""
    text = file.read_text().replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3, 4]")
    gain = [0.1, 0.11, 0.12, 0.1, 0.13]
    states = {}
    for registered, failed in ((0, (2, 3)), (4, ()), (4, (2, 3)), (4, (3,))):
        asked = REGISTRATION.replace("seeds.seed = 2", f"seeds.seed = {registered}")
        file.write_text(text.replace(REGISTRATION, asked if registered else "\n[scales.mini]\n"))
        root = tmp_path / f"{registered} {len(failed)}"
        root.mkdir()
        plan = plan_of(file, root, data=str(tmp_path / "data"))

        def score(seed: str, start: str, rate: str, left_out: tuple[int, ...] = failed) -> Any:
            lost = int(seed) in left_out and (start, rate) == ("pretrained", "low")
            return None if lost else 0.5 + gain[int(seed)] * (start == "pretrained")

        finish(plan, score)
        verdict = verdicts(Results(plan))[0]
        states[registered, len(failed)] = verdict.state, verdict.needed
        early = f"{5 - len(failed)} of 5 planned seeds have all their scores: low +"
        assert (early in markdown_of(Results(plan))) == bool(failed)  # registered or not
    assert states == {
        (0, 2): ("holds", ""),
        (4, 0): ("holds", ""),
        (4, 2): ("undecided", "5, as planned"),
        (4, 1): ("undecided", "5, as planned"),
    }


@pytest.mark.usefixtures("data")
def test_an_extension_that_has_begun_waits_for_all_its_seeds(file: Path, tmp_path: Path) -> None:
    """Three seeds are registered, and the extension brings two. With one of the two there would be
    a third test, but p is corrected for two."""
    asked = REGISTRATION.replace("seeds.seed = 2", "seeds.seed = 3")
    text = file.read_text().replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3, 4]")
    gain = [0.1, 0.11, 0.12, 0.1, 0.13]
    states = {}
    for extension, scored in (("two seeds", 3), ("two seeds", 4), ("two seeds", 5), ("none", 4)):
        planned = asked.replace('extension = "none"', f'extension = "{extension}"')
        file.write_text(text.replace(REGISTRATION, planned))
        root = tmp_path / f"{extension} {scored}"
        root.mkdir()
        plan = plan_of(file, root, data=str(tmp_path / "data"))

        def score(seed: str, start: str, rate: str, scored: int = scored) -> Any:
            known = int(seed) < scored or start == "scratch"
            return 0.5 + gain[int(seed)] * (start == "pretrained") if known else None

        finish(plan, score)
        verdict = verdicts(Results(plan))[0]
        states[extension, scored] = verdict.state, verdict.needed
    assert states == {
        ("two seeds", 3): ("holds", ""),
        ("two seeds", 4): ("undecided", "5, as planned"),
        ("two seeds", 5): ("holds", ""),
        ("none", 4): ("undecided", "5, as planned"),
    }


@pytest.mark.usefixtures("data")
def test_an_extension_begins_with_one_level_of_a_claim(file: Path, tmp_path: Path) -> None:
    """One rate has the fourth seed, the other only the three that are registered."""
    asked = REGISTRATION.replace("seeds.seed = 2", "seeds.seed = 3").replace('"none"', '"two"')
    text = file.read_text().replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3, 4]")
    file.write_text(text.replace(REGISTRATION, asked))
    plan = plan_of(file, tmp_path, data=str(tmp_path / "data"))
    gain = [0.1, 0.11, 0.12, 0.1]

    def score(seed: str, start: str, rate: str) -> Any:
        known = int(seed) < (4 if rate == "low" else 3)
        return 0.5 + gain[int(seed)] * (start == "pretrained") if known else None

    finish(plan, score)
    (verdict,) = verdicts(Results(plan))
    assert (verdict.state, verdict.needed) == ("undecided", "5, as planned")


@pytest.mark.usefixtures("data")
def test_a_planned_extension_doubles_p_and_a_floor_decides_nothing(
    file: Path, tmp_path: Path
) -> None:
    scores = {"pretrained": [0.5, 0.52, 0.51, 0.53], "scratch": [0.4, 0.41, 0.43, 0.42]}
    text = file.read_text().replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3]")
    three: list[Verdict] = []
    for old, new in (
        ("x", "x"),
        ('"none"\n[scales', '"seeds 4 and 5"\n[scales'),
        ('columns = "rate"\n', 'columns = "rate"\nchance = { low = 0.6, high = 0.6 }\n'),
    ):
        file.write_text(text.replace(old, new))
        root = tmp_path / str(len(three))
        root.mkdir()
        plan = plan_of(file, root, data=str(tmp_path / "data"))
        finish(plan, lambda seed, start, rate: scores[start][int(seed)])
        three.append(verdicts(Results(plan))[0])
    once, twice, floor = three
    assert [p for *_, p in twice.parts] == pytest.approx([2 * p for *_, p in once.parts if p])
    assert (once.state, floor.state) == ("holds", "undecided")
    assert not floor.learnt


@pytest.mark.parametrize(("pairs", "effect"), [(3, 2.0), (5, 1.682), (10, 0.996), (34, 0.495)])
@pytest.mark.slow
def test_the_power_of_a_paired_t_test(pairs: int, effect: float) -> None:
    """By simulation: with that many pairs, the test detects the effect in four of five cases."""
    detected = detectable(pairs)
    rng = np.random.default_rng(pairs)
    samples = rng.normal(detected, 1.0, (4000, pairs))
    hits = np.mean([paired_test(list(s), [0.0] * pairs).p < 0.05 for s in samples])  # type: ignore[operator]
    assert hits == pytest.approx(0.8, abs=0.02)
    if pairs > 3:
        assert detected == pytest.approx(effect, abs=2e-3)
    assert detectable(1) == float("inf")


@pytest.mark.usefixtures("data")
def test_the_distance_that_a_tie_detects_is_of_one_sided_tests(file: Path, tmp_path: Path) -> None:
    """At that distance inside the margin, two one-sided tests show the tie in four of five
    cases."""
    text = file.read_text().replace('each = "rate"', "tie = true\nmargin = 0.5")
    file.write_text(text.replace("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3, 4]"))
    plan = plan_of(file, tmp_path, data=str(tmp_path / "data"))
    scores = [0.5, 0.6, 0.4, 0.7, 0.3]
    finish(plan, lambda seed, start, rate: scores[int(seed)] if start == "pretrained" else 0.5)
    (*_, line, _), deviation = registration_lines(plan), 100 * float(np.std(scores, ddof=1))
    planned = re.search(r"5 pairs detect a difference ([\d.]+) standard deviations", line)
    reported = re.search(r"its seeds detect \(power 0\.8\): ([\d.]+)\n", markdown_of(Results(plan)))
    assert planned
    assert reported
    for distance in (float(planned[1]), float(reported[1]) / deviation):
        assert tie_power(5, 50.0 - distance, 50.0) == pytest.approx(0.8, abs=0.005)


def test_two_pairs_and_many_tests_detect_only_a_huge_difference() -> None:
    """With one degree of freedom the quantile of t grows like the number of tests."""
    few, many = (detectable(2, tests) for tests in (10, 1000))
    assert 100 < few < 200
    assert many == pytest.approx(100 * few, rel=1e-3)


@pytest.mark.usefixtures("data")
def test_runs_at_chance_are_counted(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace('columns = "rate"\n', 'columns = "rate"\nchance.low = 0.6\n'))
    plan = plan_of(file, tmp_path, data=str(tmp_path / "data"))
    scores = {"0": 0.6, "1": 0.9}
    finish(plan, lambda seed, start, rate: scores[seed] if start == "pretrained" else 0.1)
    results = Results(plan)
    cells = results.cells(plan.study.tables[0])
    assert [[cell.at_chance for cell in row] for row in cells] == [[1, 0], [2, 0]]
    assert "75.0 (60.0, 90.0), 1 of 2 at chance" in markdown_of(results)
    file.write_text(file.read_text().replace("chance.low", "chance.lower"))
    with pytest.raises(BadInput, match=r"chance: there is no 'lower'.*did you mean low"):
        read_study(file, "mini")

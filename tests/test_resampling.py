"""What a report says beside the tests of a study: multi-bootstraps over seeds and test examples,
Holm over the study, ties, seeds that would decide, and where variance is from. docs/verify.py
computes the numbers again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import ROOT
from scipy import stats
from test_study import STUDY, data, finish, markdown_of, plan_of  # noqa: F401

from xformer.data.errors import BadInput
from xformer.predictions import write
from xformer.study.claims import ClaimPart, published_difference, tied_test, verdicts
from xformer.study.dotplot import THEIRS, draw
from xformer.study.plan import Job, Plan
from xformer.study.reading import read_study
from xformer.study.report import write_report
from xformer.study.resampling import EXAMPLES, Bootstrap, Shares, random_factors, variances
from xformer.study.results import Ledger, Results
from xformer.study.statistics import holm
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Predictions

ROWS = 120
SEEDS = ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3, 4]")
MEAN = ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]')
TIE = """
[[claims]]
text = "the rate does not matter"
table = "main"
better.rate = "low"
than.rate = "high"
tie = true
margin = 0.2
[scales.mini]"""


def study(tmp_path: Path, *pairs: tuple[str, str]) -> Path:
    text = STUDY
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "letters.toml"
    path.write_text(text)
    return path


def train(plan: Plan) -> None:
    """Write the predictions and scores of all runs of the stage finetune. Rows are harder at the
    low rate; seeds, and drawings within them, have good and bad days."""
    for run in plan.runs("finetune"):
        rng = np.random.default_rng([int(run.key[:8], 16)])
        levels = run.levels
        day = np.random.default_rng(int(levels["seed"])).normal(0, 0.06)
        chance = 0.62 + day + 0.2 * (levels["start"] == "pretrained")
        chance -= 0.5 * (np.arange(ROWS) % 3 == 0) * (levels["rate"] == "low")
        keep(run, rng.random(ROWS) < chance)


def keep(run: Job, right: np.ndarray) -> None:
    """What a run writes that has classified these test rows correctly."""
    label = np.arange(ROWS) // 2 % 2
    task = task_of(Head("classify", ("no", "yes")))
    said = np.where(right, label, 1 - label)
    outputs = np.eye(2, dtype=np.float32)[said]
    arrays: dict[str, np.ndarray] = {"row": np.arange(ROWS), "outputs": outputs, "label": label}
    predictions = Predictions(task, "test", arrays)
    write(run.path / "predictions/test.npz", predictions, "key")
    metrics = {"test": predictions.metrics()}
    result = {"metrics": metrics, "seconds": 2.0, "selected": "checkpoints/step_4"}
    run.proof.write_text(json.dumps(result))
    (run.path / "config.json").write_text("{}")
    (run.path / "checkpoints/step_4").mkdir(parents=True)
    (run.path / "checkpoints/step_4/model.safetensors").write_bytes(b"weights")
    (run.path / "checkpoints/step_4/manifest.json").write_text("{}")


@pytest.fixture
def trained(tmp_path: Path, data: Path) -> Results:  # noqa: F811
    path = study(tmp_path, SEEDS, MEAN, ("\n[scales.mini]", TIE))
    plan = plan_of(path, tmp_path, data=str(data))
    train(plan)
    return Results(plan)


def test_an_accuracy_is_above_chance_by_more_than_its_error(
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """Of 120 rows, 69 right ones are within 1.64 standard errors of a half, and 70 are not."""
    chance = 'columns = "rate"', 'columns = "rate"\nchance = { low = 0.5, high = 0.5 }'
    plan = plan_of(study(tmp_path, chance), tmp_path, data=str(data))
    for run in plan.runs("finetune"):
        keep(run, np.arange(ROWS) < 69 + (run.levels["start"] == "pretrained"))
    cells = Results(plan).cells(plan.study.tables[0])
    assert [[cell.at_chance for cell in row] for row in cells] == [[0, 0], [2, 2]]
    assert "1.64 standard errors" in markdown_of(Results(plan))


def test_the_interval_of_a_claim_is_that_of_its_authors_method(trained: Results) -> None:
    """Written out with loops: seeds and examples drawn with replacement, both models scored on the
    same seeds and examples."""
    table, shares = trained.study.tables[0], Shares(trained)
    pairs = shares.pairs(table, {"start": "pretrained"}, {"start": "scratch"})
    drawn = shares.bootstrap([*pairs.values()])
    assert isinstance(drawn, Bootstrap)
    right = {}
    for run in trained.plan.runs("finetune"):
        with np.load(run.path / "predictions/test.npz") as file:
            right[tuple(run.levels.values())] = file["outputs"].argmax(1) == file["label"]
    rng, differences = np.random.default_rng(0), []
    for _ in range(3000):
        rows, seeds = rng.integers(ROWS, size=ROWS), rng.integers(5, size=5)
        sides = {
            start: np.mean([right[str(s), start, rate][rows] for s in seeds for rate in RATES])
            for start in ("pretrained", "scratch")
        }
        differences.append(100 * (sides["pretrained"] - sides["scratch"]))
    assert drawn.interval == pytest.approx(np.quantile(differences, [0.025, 0.975]), abs=0.8)
    assert drawn.p == pytest.approx(2 / 1001, abs=0.004)
    text = markdown_of(trained)
    claim = verdicts(trained)[0]
    assert [level for level, *_ in claim.parts] == ["low", "high"]
    assert "- over seeds and test examples (multi-bootstrap): low +" in text
    assert "- p corrected over all claims (Holm): p " in text
    assert (
        f"Undecided: {sum(v.state == 'undecided' for v in verdicts(trained))} of 2 claims" in text
    )
    assert "| interval over seeds and test examples |" in text


RATES = ("low", "high")


def test_a_claim_has_a_picture(tmp_path: Path, trained: Results) -> None:
    """Every seed is a dot, and each has its place on the axis; so have the intervals, the margins
    of the tie, and the one difference that is published."""
    write_report(trained, {}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    for number, verdict in enumerate(verdicts(trained), start=1):
        text = (tmp_path / f"claim-{number}.svg").read_text()
        assert text in page
        assert f"](claim-{number}.svg)" in (tmp_path / "report.md").read_text()
        drawn = ElementTree.fromstring(text)
        texts = {one.text: float(one.get("x", "")) for one in drawn.iter(f"{SVG}text")}
        ticks = {float(t): x for t, x in texts.items() if t and t not in RATES}
        slope, start = np.polyfit([*ticks], [*ticks.values()], 1)
        dots = [float(dot.get("cx", "")) for dot in drawn.iter(f"{SVG}circle")]
        each = [value for _, one, _ in verdict.parts for value in one.each]
        assert (np.array(dots) - start) / slope == pytest.approx(each, abs=0.1)
        paths = [(one.get("d", ""), dict(one.attrib)) for one in drawn.iter(f"{SVG}path")]
        bars = [d[1:].split(" ")[0] for d, look in paths if look.get("stroke-width")]
        lows = [one.mean - (one.half or np.nan) for _, one, _ in verdict.parts]
        assert (np.array(bars, float) - start) / slope == pytest.approx(lows, abs=0.1)
        dashed = [float(d[1:].split(" ")[0]) for d, look in paths if "stroke-dasharray" in look]
        margins = [20, -20] if verdict.claim.tie else []
        assert (np.array(dashed) - start) / slope == pytest.approx(margins, abs=0.1)
        theirs = [float(d[1:].split(" ")[0]) for d, look in paths if look.get("fill") == THEIRS]
        assert theirs == pytest.approx([] if verdict.claim.tie else [ticks[0]], abs=0.1)
    low, high, tie = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert (low["published"], high["published"], tie["published"]) == (0.0, None, None)
    assert low["hours"] == high["hours"] == pytest.approx(20 * 2 / 3600)
    ((_, one, p),) = verdict.parts
    hostile = replace(verdict, parts=(ClaimPart("<script>'", one, p),))
    drawn = ElementTree.fromstring(draw(hostile, [None]))
    assert [one.text for one in drawn.iter(f"{SVG}text")][-1] == "<script>'"


SVG = "{http://www.w3.org/2000/svg}"


def test_a_report_says_why_an_interval_lacks(tmp_path: Path, trained: Results) -> None:
    shares, table = Shares(trained), trained.study.tables[0]
    sides = {"start": "pretrained"}, {"start": "scratch"}
    five = [*shares.pairs(table, *sides).values()]
    assert isinstance(shares.bootstrap(five), Bootstrap)
    assert shares.bootstrap(five[:2]) == "fewer than 3 seeds"
    of_loss = [*shares.pairs(table.model_copy(update={"metric": "loss"}), *sides).values()]
    assert shares.bootstrap(of_loss) == "loss is not computed for resampled examples"
    (trained.plan.runs("finetune")[0].path / "predictions/test.npz").unlink()
    text = markdown_of(Results(trained.plan))
    assert "no interval, no predictions of test are kept" in text
    assert text.count("| no predictions of test are kept |") == 2  # in a cell, and in a mean


def test_holm_goes_over_all_claims(trained: Results) -> None:
    every = verdicts(trained)
    ps = [difference.p for verdict in every for _, difference, _ in verdict.parts]
    assert len(ps) == 3  # two rates, and the tie
    adjusted = [p for verdict in every for p in verdict.overall]
    assert adjusted == pytest.approx(holm([p for p in ps if p is not None]))
    pairs = [(a, b) for one in every for a, (*_, b) in zip(one.overall, one.parts, strict=True)]
    assert all(a is not None and b is not None and a >= b for a, b in pairs)


def test_a_correction_over_the_study_can_leave_a_claim_undecided(
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """p is 0.04 in one claim and 0.5 in three others: the registered test decides the first, and
    the report says that the study as a whole would not."""
    claim = STUDY[STUDY.index("[[claims]]") : STUDY.index("[scales.mini]")]
    again = claim.replace('each = "rate"', "").replace("every rate", "a RATE rate")
    again = again.replace("than.start", "than.rate = 'RATE'\nbetter.rate = 'RATE'\nthan.start")
    others = "".join(again.replace("RATE", rate) for rate in ("low", "high"))
    path = study(tmp_path, SEEDS, (claim, others))
    plan = plan_of(path, tmp_path, data=str(data))
    noise = {"low": [0.0, 0.01, 0.02, 0.03, 0.04], "high": [-0.02, 0.02, -0.01, 0.01, 0.002]}
    lift = {"low": 0.002, "high": 0.0}
    finish(
        plan,
        lambda seed, start, rate: (
            0.5 + (noise[rate][int(seed)] + lift[rate] if start == "pretrained" else 0.0)
        ),
    )
    first, second = verdicts(Results(plan))
    p = stats.ttest_1samp([0.2, 1.2, 2.2, 3.2, 4.2], 0).pvalue
    assert 0.025 < p < 0.05
    assert first.overall == pytest.approx((2 * p,))
    assert (first.state, first.state_overall) == ("holds", "undecided")
    text = markdown_of(Results(plan))
    assert "Undecided: 1 of 2 claims that have data (50%)." in text
    assert "Otherwise it is undecided, which does not mean equal. Each dot" in text
    assert "With Holm's correction over all 2 tests of the study: 2." in text
    assert f"(Holm): p {2 * p:.3f} (undecided)\n" in text
    assert "(multi-bootstrap): no interval, no predictions of test are kept\n" in text
    assert (first.needed, second.needed) == ("", "more than 1,000")


@pytest.mark.parametrize(
    ("differences", "state"),
    [
        ([0.3, -0.2, 0.1, 0.4, -0.1], "holds"),
        ([2.5, 2.9, 2.2, 2.6, 2.8], "fails"),
        ([-2.5, -2.9, -2.2, -2.6, -2.8], "fails"),
        ([1.5, -1.2, 1.9, 0.2, -1.4], "undecided"),
        ([0.9, 1.4, 0.8, 1.1, 1.2], "undecided"),  # inside a wider margin, but not of this one
    ],
)
def test_a_tie(
    tmp_path: Path,
    data: Path,  # noqa: F811
    differences: list[float],
    state: str,
) -> None:
    path = study(tmp_path, SEEDS, ("\n[scales.mini]", TIE.replace("0.2", "0.01")))
    plan = plan_of(path, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + (differences[int(seed)] / 100) * (rate == "low"))
    verdict = verdicts(Results(plan))[1]
    assert verdict.state == state
    inside = abs(np.mean(differences)) < 1
    nearer = np.sign(np.mean(differences))
    one, other = (
        stats.ttest_1samp(differences, end, alternative=way).pvalue
        for end, way in ((-1, "greater"), (1, "less"))
    )
    expected = max(one, other) if inside else stats.ttest_1samp(differences, nearer).pvalue
    assert verdict.parts[0][2] == pytest.approx(expected)
    p = f": {expected:.3f}" if expected >= 0.0005 else " < 0.001"
    what = "of a tie within 1" if inside else f"against {nearer:g}"
    assert f"(p {what}{p})".replace("1 <", "1: <") in markdown_of(Results(plan))
    assert tied_test(differences, [0.0] * 5, 1.0).p == pytest.approx(expected)
    assert verdict.needed.isdigit() == (state == "undecided")


def test_a_tie_needs_a_margin(tmp_path: Path) -> None:
    path = study(tmp_path, ("\n[scales.mini]", TIE.replace("margin = 0.2", "")))
    with pytest.raises(BadInput, match="'the rate does not matter': a tie needs a margin above 0"):
        read_study(path, "mini")


def test_variance_is_split(tmp_path: Path, data: Path) -> None:  # noqa: F811
    """Pre-training seeds, fine-tuning seeds within them, the order of the data within those, and
    test examples."""
    seeds = [f"vary.seed.{i} = {{ seed.all = {i} }}" for i in range(3)]
    draws = [f"vary.draw.{name} = {{ seed.weights = {i} }}" for i, name in enumerate("ab")]
    lines = [*seeds, *draws, 'vary."seed.order" = [7, 8]']
    path = study(tmp_path, (SEEDS[0], "\n".join(lines)))
    plan = plan_of(path, tmp_path, data=str(data))
    assert random_factors(plan.study, "finetune") == {
        "seed": "seed.all",
        "draw": "seed.weights",
        "seed.order": "seed.order",
    }
    train(plan)
    results, table = Results(plan), plan.study.tables[0]
    parts = variances(results, Shares(results), table, "scratch", "high")
    scores = np.zeros((3, 2, 2))
    for run in plan.runs("finetune", {"start": "scratch", "rate": "high"}):
        place = (
            int(run.levels["seed"]),
            "ab".index(run.levels["draw"]),
            int(run.levels["seed.order"]) - 7,
        )
        scores[place] = 100 * results.metrics[run.key]["test"]["accuracy"]
    within = scores.var(2, ddof=1).mean()
    of_draws = scores.mean(2).var(1, ddof=1).mean()
    of_seeds = scores.mean((1, 2)).var(ddof=1)
    assert parts == pytest.approx(
        {
            "seed": of_seeds - of_draws / 2,
            "draw": of_draws - within / 2,
            "seed.order": within,
            EXAMPLES: parts[EXAMPLES],
        }
    )
    # at the high rate the rows are equally hard, so that they have no variance in common
    assert abs(parts[EXAMPLES]) < 1.2
    hard = variances(results, Shares(results), table, "scratch", "low")[EXAMPLES]
    common = 100**2 * 0.5**2 * (1 / 3) * (2 / 3) / ROWS
    assert hard == pytest.approx(common, abs=1.2)
    text = markdown_of(results)
    assert "## Where the variance comes from: Accuracy" in text
    assert "| seed (seed.all) | draw (seed.weights) | seed.order | test examples |" in text


def test_a_single_seed_with_all_its_runs_has_no_variances(
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    plan = plan_of(study(tmp_path, ("[0, 1]", '[0, 1]\nvary."seed.order" = [7, 8]')), tmp_path)
    at = {"start": "scratch", "rate": "high"}
    train(plan)
    results, table = Results(plan), plan.study.tables[0]
    assert variances(results, Shares(results), table, *at.values())
    missing = plan.runs("finetune", {**at, "seed": "1", "seed.order": "8"})
    shutil.rmtree(missing[0].path)
    results = Results(plan)
    assert variances(results, Shares(results), table, *at.values()) == {}


def test_a_seed_that_lacks_a_score_has_no_part_in_variances(
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """Its mean would be over fewer settings than that of the other seeds."""
    clips = "".join(f"\nvary.clip.{name} = {{ optim.clip = {i}.0 }}" for i, name in enumerate("ab"))
    plan = plan_of(study(tmp_path, (SEEDS[0], SEEDS[1] + clips)), tmp_path, data=str(data))

    def score(seed: str, clip: str, **_: str) -> float | None:
        return None if seed + clip == "4b" else 0.5 + 0.01 * int(seed) + 0.3 * (clip == "a")

    finish(plan, score)
    results, table = Results(plan), plan.study.tables[0]
    parts = variances(results, Shares(results), table, "scratch", "high")
    assert parts == pytest.approx({"seed": np.var([0, 1, 2, 3], ddof=1)})


def test_a_factor_without_settings_is_not_random(tmp_path: Path) -> None:
    """Such as one that names what is made. One that sets the order of the data is."""
    corpora = 'settings.data = "{made.{corpus}}"\nvary.corpus = { letters = {}, task = {} }'
    orders = f'{SEEDS[0]}\nvary."seed.order" = [7, 8]'
    path = study(tmp_path, ('settings.data = "{made.task}"', corpora), (SEEDS[0], orders))
    assert [*random_factors(read_study(path, "mini"), "finetune")] == ["seed", "seed.order"]


def test_a_table_of_deviations_has_no_published_difference(
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """The claim is about means, and the paper's table is not."""
    columns = 'columns = "rate"\n'
    plan = plan_of(study(tmp_path, (columns, f'{columns}show = "deviation"\n')), tmp_path)
    finish(plan, lambda seed, start, rate: 0.5)
    results = Results(plan)
    (verdict,) = verdicts(results)
    assert published_difference(results, verdict, "low") is None


def test_a_script_without_the_package_computes_the_numbers_again(
    tmp_path: Path, trained: Results
) -> None:
    plan = trained.plan
    plan.kept = tmp_path / "kept"
    ledger = Ledger(plan.kept, plan)
    for run in plan.runs("finetune"):
        ledger.keep(run, again=False)
    directory = tmp_path / "report"
    directory.mkdir()
    write_report(trained, {}, directory)
    assert (plan.kept / "report.claims.json").is_file()
    done = verify(plan.kept)
    assert done.returncode == 0, done.stdout
    # 20 runs with four scores; effect, half width, p and words of three tests; the verdicts of two
    # claims; results.csv
    assert done.stdout.endswith(
        f"{20 * 4 + 12 + 2 + 1} agrees, 0 measured, 0 DIFFERS, 0 not checked\n"
    )
    assert "pre-training helps at every rate: low: effect: " in done.stdout
    # a changed score and a changed effect are noticed
    path = sorted(plan.kept.glob("*.zip"))[0]
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    result = json.loads(members["result.json"])
    result["metrics"]["test"]["accuracy"] += 0.01
    members["result.json"] = json.dumps(result).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    done = verify(plan.kept)
    assert (done.returncode, done.stdout.count("\nDIFFERS")) == (1, 1)
    assert f"DIFFERS      {path.stem} test accuracy: " in done.stdout
    # the scores of a run without predictions are not taken for computed ones
    with zipfile.ZipFile(path, "w") as file:
        for name in ("key", "result.json"):
            file.writestr(name, members[name])
    done = verify(plan.kept)
    assert f"not checked  {path.stem} test accuracy: " in done.stdout
    assert f"measured     {path.stem}" not in done.stdout


@pytest.mark.slow
def test_what_a_page_prints_is_computed_again_too(
    tmp_path: Path, trained: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words and the verdict of a claim, a number that was deleted, a table, and files that were
    swapped."""
    plan = trained.plan
    plan.kept = tmp_path / "kept"
    ledger = Ledger(plan.kept, plan)
    for run in plan.runs("finetune"):
        ledger.keep(run, again=False)
    (tmp_path / "report").mkdir()
    write_report(trained, {}, tmp_path / "report")
    path = plan.kept / "report.claims.json"
    claims = json.loads(path.read_text())["claims"]
    other = {"holds": "fails", "fails": "holds", "undecided": "holds"}
    first, tie = claims[0], claims[-1]
    for number, changes, words in (
        (0, {"shown": f"{first['effect'] + 1:+.1f} ± {first['half']:.1f}"}, "low: +"),
        (0, {"shown": f"{first['effect']:+.1f} ± 0.0"}, "low: +"),
        (0, {"p": None}, "low: p: none, here "),
        (0, {"half": None}, "low: half: none, here "),
        (0, {"verdict": other[first["verdict"]]}, f"every rate: {other[first['verdict']]}"),
        (2, {"verdict": other[tie["verdict"]]}, f"does not matter: {other[tie['verdict']]}"),
    ):
        now = [{**one, **changes} if i == number else one for i, one in enumerate(claims)]
        path.write_text(json.dumps({"claims": now}))
        done = verify(plan.kept)
        assert (done.returncode, done.stdout.count("\nDIFFERS")) == (1, 1), (changes, done.stdout)
        line = done.stdout.split("\nDIFFERS      ")[1].splitlines()[0]
        assert line.startswith("report.claims: ")
        assert words in line
    path.write_text(json.dumps({"claims": claims}))
    table = plan.kept / "report.results.csv"
    text = table.read_text()
    start = text.index("test,accuracy,") + len("test,accuracy,")
    table.write_text(f"{text[:start]}1.{text[start:].partition('.')[2]}")
    assert verify(plan.kept).stdout.count("\nDIFFERS      report.results.csv ") == 1
    table.write_text(text)
    assert verify(plan.kept).returncode == 0
    # a report that lacks scores leaves those that are kept
    for run in plan.runs("finetune")[:2]:
        run.proof.rename(run.proof.with_suffix(".aside"))
    write_report(Results(plan), {}, tmp_path / "report")
    printed = "".join(capsys.readouterr())
    assert f"note: {table} and the claims beside it stay as they are" in printed
    assert "scores of 2 runs that this report lacks, such as finetune seed=0" in printed
    table.write_text(text.replace("finetune seed=", "finetune of seed="))  # of another plan
    write_report(Results(plan), {}, tmp_path / "report")
    assert f"{table} and the claims beside it stay as they are" in "".join(capsys.readouterr())
    table.write_text(text)
    for run in plan.runs("finetune")[:2]:
        run.proof.with_suffix(".aside").rename(run.proof)
    assert (table.read_text(), json.loads(path.read_text())["claims"]) == (text, claims)
    table.write_bytes(b"\xff\xfe")  # nothing that could be lost
    write_report(Results(plan), {}, tmp_path / "report")
    assert "stay as they are" not in "".join(capsys.readouterr())
    assert table.read_text().startswith("stage,run,")
    one, two = sorted(plan.kept.glob("*.zip"))[:2]
    one.write_bytes(two.read_bytes())
    said = f"DIFFERS      {one.name} holds the results of {two.stem}\n"
    assert said in verify(plan.kept).stdout


@pytest.mark.slow
def test_the_kept_results_of_this_repository_are_what_their_predictions_give() -> None:
    done = verify(ROOT / "results")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(" measured, 0 DIFFERS, 0 not checked\n")
    inside = "kao2021-inside-mini.claims: noise moves the pre-trained model's outputs less than"
    assert f"measured     {inside}" in done.stdout


def test_a_directory_without_kept_results_is_refused(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 2
    assert (
        done.stdout
        == f"error: {tmp_path} has no kept results (*.zip); give a study's kept=DIRECTORY\n"
    )


def verify(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run docs/verify.py where the package cannot be imported."""
    code = "import sys; sys.modules['xformer'] = None; import runpy; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    line = [sys.executable, "-c", code, str(ROOT / "docs/verify.py"), str(directory)]
    return subprocess.run(line, capture_output=True, text=True, cwd=directory, check=False)

"""Studies: what a file says, which runs it describes, how they are run, and what their scores
show.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fake_slurm
import looking
import numpy as np
import pytest
from helpers import PATIENCE, ROOT, Forks, command, good, refused, start
from markupsafe import escape
from plans import SCALES, planned
from pydantic import BaseModel
from scipy import stats

from xformer.config import read_recipe, toml_text
from xformer.data.errors import BadInput, Failure
from xformer.data.files import file_checksum, write_json
from xformer.run import in_use
from xformer.study import claims, headline, pool
from xformer.study.__main__ import execute, listing
from xformer.study.__main__ import main as study_main
from xformer.study.claims import holm, paired_test, published_difference, verdicts
from xformer.study.costs import Costs
from xformer.study.figures import curves_figure, table_figure
from xformer.study.forecast import Forecast
from xformer.study.launch import Outcome, last_words, line_of, log_of, prepare, warnings_of
from xformer.study.local import Local, this_machine
from xformer.study.plan import Digests, Job, Plan, to_do
from xformer.study.progress import StudyProgress, newest_numbers
from xformer.study.reading import PARTS, keys_text, read_study
from xformer.study.report import build_report, latex, render, write_report
from xformer.study.resampling import Shares
from xformer.study.results import (
    Cell,
    Ledger,
    Line,
    Panel,
    Results,
    sample_of,
    statistics_of,
    write_csv,
)
from xformer.study.sections import Entry, Grid, Section, drawing
from xformer.study.sides import Sides
from xformer.study.slurm import Slurm
from xformer.study.spec import Claim, Published, ScoreTable

STUDY = f"""
title = "Letters"
question = "Does pre-training on letters help to find TTT?"
paper = "Nobody 2026"

[needs.data]
about = "a directory of DNA"
get = "write it"

[made.letters]
command = ["preprocess.py", "text", "--lines", "--input", "{{need.data}}/train.txt", "--valid",
           "{{need.data}}/valid.txt", "--tokenizer", "{{made.task}}", "--output", "{{out}}"]

[made.task]
command = ["preprocess.py", "task", "dna", "--input", "{{need.data}}/x.tsv", "--output", "{{out}}"]

[stages.pretrain]
recipe = "{ROOT}/recipes/pretrain/smoke.toml"
settings.data = "{{made.letters}}"
settings.model = {{ hidden = 16, intermediate = 16, layers = 1 }}
settings.train = {{ steps = 4 }}
settings.system.precision = "fp32"

[stages.finetune]
recipe = "{ROOT}/recipes/finetune/classify.toml"
settings.data = "{{made.task}}"
settings.init = "{{stage.pretrain}}"
settings.train.epochs = 1
settings.system.precision = "fp32"
vary.seed = [0, 1]
vary.start.pretrained = {{}}
vary.start.scratch = {{ surgery = [{{ op = "clean" }}] }}
vary.rate.low = {{ optim.lr = 1e-5 }}
vary.rate.high = {{ optim.lr = 1e-3 }}

[[tables]]
name = "main"
title = "Accuracy"
stage = "finetune"
rows = "start"
columns = "rate"
[tables.published]
source = "Nobody 2026, table 1"
columns = ["low", "high"]
rows.pretrained = [50.0, 99.0]
rows.none = [50.0, ""]

[[claims]]
text = "pre-training helps at every rate"
table = "main"
better.start = "pretrained"
than.start = "scratch"
each = "rate"

[scales.mini]
like.scratch = "none"
[scales.paper]
stages.pretrain.settings.train.steps = 2000
"""


HEADLINE = """
[headline]
title = "Does it help to know letters?"
table = "main"
[headline.labels]
scratch = "from\\nscratch"
[[claims]]"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "letters.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(80):
        letters = rng.choice(list("ACGT"), 12)
        if i % 2:
            letters[3:6] = "T"
        rows.append("".join(letters))
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "train.txt").write_text("\n".join(rows[:60]))
    (directory / "valid.txt").write_text("\n".join(rows[60:]))
    labelled = [f"{row}\t{['no', 'yes'][i % 2]}\n" for i, row in enumerate(rows)]
    (directory / "x.tsv").write_text("sequence\tlabel\n" + "".join(labelled))
    return directory


def changed(file: Path, *pairs: tuple[str, str]) -> Path:
    text = file.read_text()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return file


def plan_of(file: Path, tmp_path: Path, scale: str = "mini", **needs: str) -> Plan:
    return Plan(read_study(file, scale), tmp_path / "studies", needs)


def markdown_of(results: Results) -> str:
    return render(build_report(results, {}, results.plan.root / "x"), "md")


def html_of(results: Results, outcomes: dict[str, Outcome], directory: Path) -> str:
    return render(build_report(results, outcomes, directory), "html")


def test_a_report_says_why_runs_were_made_again(
    file: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rate of half of the runs changes. The listing, the line before the runs and the report
    name the setting, and a later report still does."""
    monkeypatch.setattr(pool, "run_plan", lambda *_: {})
    registration = 'registration = { seeds.seed = 2, unit = "a run", extension = "none" }'
    changed(file, ("[scales.mini]", f"[scales.mini]\n{registration}"))
    report = tmp_path / "studies/letters-mini/report.html"
    report.parent.mkdir(parents=True)
    (report.parent / "results.csv").write_text("notes of\nthe user\n")  # it says nothing of runs

    def studied() -> tuple[str, str]:
        plan = plan_of(file, tmp_path, data=str(data))
        plan.kept = tmp_path / "kept"
        listed = listing(plan, Costs(Forecast(plan), {}))
        for run in plan.runs("finetune"):
            run.path.mkdir(parents=True, exist_ok=True)
            run.path.with_suffix(".toml").write_text(toml_text(run.recipe or {}))
        execute(plan, this_machine(1), Ledger(None, plan))
        for run in plan.runs("finetune"):
            write_json(run.proof, {"metrics": {"test": {"accuracy": 0.5}}, "seconds": 2.0})
        return listed, (plan.root / "letters-mini/report.md").read_text()

    listed, text = studied()
    assert "key changed" not in listed + text
    changed(file, ("1e-3", "1e-2"))
    capsys.readouterr()
    listed, text = studied()
    assert "4 runs again, key changed: optim.lr\n" in capsys.readouterr().out
    assert "finetune seed=0 start=scratch rate=high  (key changed: optim.lr)\n" in listed
    assert "# finetune seed=0 start=scratch rate=high, key changed: optim.lr\n" in text
    assert "rate=low, key" not in text
    assert "not committed; runs that were made again because their key changed: 4 |" in text
    report.with_name("again.json").unlink()  # the kept results know it, too
    changed(file, ('title = "Letters"', 'title = "Words"'))  # and another study has this name
    listed, text = studied()
    assert "key changed" not in listed
    assert "rate=high, key changed: optim.lr\n" in text
    assert "rate=high: done, key changed: optim.lr<" in report.read_text()
    note = f"note: {report.parent} holds the report 'Letters', which this one replaces\n"
    assert note in capsys.readouterr().out


def test_the_content_of_a_linked_directory_belongs_to_a_key(tmp_path: Path) -> None:
    given, real = tmp_path / "given", tmp_path / "real"
    for directory in (given, real):
        directory.mkdir()
        (directory / "a").write_text("1")
    (given / "link").symlink_to(real)
    (real / "back").symlink_to(given)  # goes round in circles
    digests = Digests(tmp_path / "digests.json")
    before = digests.of(given)
    (given / ".DS_Store").touch()  # macOS writes it when somebody looks at the directory
    assert digests.of(given) == before
    (real / "a").write_text("23")
    assert digests.of(given) != before


def test_a_file_with_the_same_size_and_time_of_modification_is_read_again(tmp_path: Path) -> None:
    """Files of an archive may share one time."""
    file = tmp_path / "train.csv"
    file.write_text("a,1")
    digests, old = Digests(tmp_path / "digests.json"), file.stat()
    before = digests.of(file)
    while file.stat().st_ctime_ns == old.st_ctime_ns:
        file.write_text("a,2")
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert digests.of(file) != before


def test_digests_are_written_if_they_change_and_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a study only takes longer. But a full disk is an error."""
    (tmp_path / "a").touch()
    digests = Digests(tmp_path / "digests.json")
    digests.of(tmp_path / "a")
    number = errno.EACCES

    def refused_(*_: object) -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as patched:
        patched.setattr("xformer.study.plan.write_json", refused_)
        digests.save()
        number = errno.ENOSPC
        with pytest.raises(OSError, match="no"):
            digests.save()
    digests.save()
    again = Digests(tmp_path / "digests.json")
    monkeypatch.setattr("xformer.study.plan.write_json", refused_)
    again.of(tmp_path / "a")
    again.save()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "(Permission denied), it is only printed; copy {root} to a directory"),
        (errno.ENOSPC, "(No space left on device), it is only printed; free some space"),
    ],
)
def test_a_report_that_cannot_be_written_is_printed(
    file: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    words: str,
) -> None:
    monkeypatch.setattr(pool, "run_plan", lambda *_: {})

    def refused_(*_: object) -> None:
        raise OSError(number, "no", "results.csv")

    monkeypatch.setattr("xformer.study.report.write_csv", refused_)
    plan = plan_of(file, tmp_path, data=str(data))
    for run in plan.runs("finetune"):
        run.path.mkdir(parents=True)
        write_json(run.proof, {"metrics": {"test": {"accuracy": 0.5}}, "seconds": 2.0})
    line = f"cannot be written into {plan.root / 'letters-mini'} {words.format(root=plan.root)}"
    with pytest.raises(Failure, match=re.escape(line)):
        execute(plan, this_machine(1), Ledger(None, plan))
    assert "| pretrained | 50.0 (50.0, 50.0)" in capsys.readouterr().out
    assert not list((plan.root / "letters-mini").iterdir())


NESTED = '[made.nested]\ncommand = ["-m", "xformer.study", "a.toml", "{out}"]\n'


def test_a_listing_shows_the_programs_of_others(file: Path, data: Path, tmp_path: Path) -> None:
    """With their arguments, each in one line. What is done already is not started."""
    command = """["-c", "import os\\nos.remove('a b')", "{out}"]"""
    changed(
        file,
        ("[made.task]", f"[made.other]\ncommand = {command}\n{NESTED}[made.task]"),
        ('"--input", "{need.data}/x.tsv"', '"--input", "{made.other}/{made.nested}/x.tsv"'),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    other = next(made for made in plan.jobs.values() if made.name == "made.other")
    text = listing(plan, Costs(Forecast(plan), {}))
    code = """'import os\\nos.remove('"'"'a b'"'"')'"""
    nested = next(made for made in plan.jobs.values() if made.name == "made.nested")
    programs = [f"  made.other: python -c {code} {other.path}"]
    programs += [f"  made.nested: python -m xformer.study a.toml {nested.path}"]
    header = "programs that are not xformer's, and other studies"
    assert "\n".join([header, *programs]) in text
    assert text.count("python") == len(programs)
    for made in (other, nested):
        made.path.mkdir(parents=True)
    plan = plan_of(file, tmp_path, data=str(data))
    assert "programs" not in listing(plan, Costs(Forecast(plan), {}))


# ------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[stages.pretrain]", "[stages.pretrained]", "there is no 'pretrain'"),
        ('stage = "finetune"', 'stage = "finetun"', "did you mean finetune?"),
        ('rows = "start"', 'rows = "begin"', "there is no 'begin'"),
        ("[50.0, 99.0]", "[50.0]", "'pretrained' has 1 numbers, but there are 2 columns"),
        ('than.start = "scratch"', 'than.start = "clean"', "there is no 'clean'"),
        (
            "[[claims]]",
            '[[curves]]\nname = "table-main"\ntitle = "Loss"\nstage = "finetune"\n'
            'panels = "rate"\nlines = "start"\n[[claims]]',
            "two figures of the report are written to 'table-main.svg'",
        ),
        (
            "vary.seed = [0, 1]",
            "vary.seed = [0]\nvary.speed.one = { optim.lr = 1.0 }",
            "speed and rate both set optim.lr",
        ),
        ('table = "main"', 'table = "other"', "there is no 'other'"),
        (
            'settings.init = "{stage.pretrain}"',
            'settings.init = "{stage.finetune}"',
            "stages.finetune is made from itself",
        ),
        ("settings.train.epochs = 1", "settings.train.epoch = 1", "unknown key train.epoch"),
        ('"{need.data}/x.tsv"', '"{need.dat}/x.tsv"', "there is no 'dat'"),
        ('"{need.data}/x.tsv"', '"{need.{start}}"', "there is no need 'pretrained'"),
        (
            "{stage.pretrain}",
            "{stage.{start}}",
            "there is no stage 'pretrained'; did you mean pretrain?",
        ),
        (
            'settings.init = "{stage.pretrain}"',
            'settings.init = "{stage.{of}}"\nvary.of.finetune = {}',
            "toml: finetune of=finetune seed=0 start=pretrained rate=low: stages.finetune is made",
        ),
        (
            "settings.train = { steps = 4 }",
            "settings.train = { steps = 4 }\nvary.depth.two = {}",
            "{stage.pretrain} varies by depth",
        ),
        ("[scales.mini]", "[scales.mini]\nlevels.start = ['clear']", "there is no 'clear'"),
        ('recipe = "' + str(ROOT) + '/recipes/pretrain/smoke.toml"', "", "a recipe or a command"),
        ('op = "clean"', 'op = "cleam"', "its op must be one of"),
        (
            "vary.seed = [0, 1]",
            "vary.seed = { a = {}, b = {} }",
            "stages.finetune.vary.seed: a and b have the same settings, so they are one run",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmetric = "loss"\nbest = "run"',
            "table main: best is the highest number, but of loss lower is better; leave it out",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmetric = "loss"\nchance.low = 0.5',
            "table main: chance.low: runs above a chance level have learnt, but of loss lower is",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmetric = { low = "loss", high = "f1" }\nmeans.x = ["low", "high"]',
            "table main: means.x averages scores and losses; give each kind a mean of its own",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nwhere.rate = "low"',
            "table main: where.rate: all levels of rate are shown; levels.rate chooses some",
        ),
        ('columns = "rate"', 'columns = "rate"\nwhere.seed = "0.0"', "no '0.0'; did you mean 0?"),
        (
            "[[claims]]",
            '[stages.look]\ncommand = ["-c", "1"]\n[[claims]]',
            "stages.look: its command needs {out}, the directory in which it writes result.json",
        ),
        (
            "[[claims]]",
            '[stages.look]\ncommand = ["-c", "{out}"]\nvary.x.y = {}\n[[curves]]\nname = "x"\n'
            'title = "x"\nstage = "look"\npanels = "x"\nlines = "x"\n[[claims]]',
            "curves x: stages.look runs a command, and commands write no log",
        ),
        (
            "[[claims]]",
            '[[curves]]\nname = "x"\ntitle = "x"\nstage = "finetune"\npanels = "rate"\n'
            'lines = "rate"\nvalidation = { low = "loss" }\n[[claims]]',
            "curves x: validation: all levels of rate share one panel; give one name for all",
        ),
        (
            "vary.seed = [0, 1]",
            "vary.seed = [0, 1]\n"
            "without = [{ seed = 0, start = 'scratch' }, { seed = 1, start = 'pretrained' }]",
            "every rate': no seed has both sides, so no two scores can be compared",
        ),
        # mistakes of form, in the terms of the file
        ('each = "rate"', 'eahc = "rate"', "[[claims]] number 1: unknown key eahc"),
        ('table = "main"', "", "[[claims]] number 1: table must be given"),
        ("[[claims]]", "[claims]", "write [[claims]], not [claims]"),
        (
            "vary.seed = [0, 1]",
            "vary.seed = 2",
            "vary.seed=2: give a list of values, or a group of levels",
        ),
        (
            "rate.low = { optim.lr = 1e-5 }",
            "rate.low = 1e-5",
            "low=1e-05: give a group of settings",
        ),
        (
            "[[claims]]",
            '[[headline]]\ntable = "x"\n[[claims]]',
            "write [headline], not [[headline]]",
        ),
        (
            'source = "Nobody',
            'sorce = "x"\nsource = "Nobody',
            "[[tables]] number 1: unknown key published.sorce; did you mean published.source?",
        ),
        (
            "[[claims]]",
            '[headline]\ntitle = "x"\ntable = "main"\ntitel = "x"\n[[claims]]',
            "[headline]: unknown key titel; did you mean title?",
        ),
        (
            'columns = "rate"',
            'columns = "metric"\nmetric = {}',
            "metric is empty; give metric.NAME=",
        ),
        ("vary.seed", "vray.seed", "[stages.finetune]: unknown key vray; did you mean vary?"),
        ("rows.none = [50.0, ", "rows.none = 50.0 #", "none=50.0: give a list, such as [50.0]"),
        (
            "vary.seed = [0, 1]",
            "settings.mapping = 'symbols:{sed}'",
            "'symbols:{sed}': {sed} is not one of its factors: start, rate",
        ),
        (
            "vary.seed = [0, 1]",
            "vary.a.one = { seed = 1 }\nvary.b.one = { seed.all = 2 }",
            "the factors a and b both set seed.all",
        ),
        (
            "vary.seed = [0, 1]",
            "vary.a.one = { data.fraction = 0.1 }",
            "stages.finetune: there is no setting data.fraction: data is a path or a list of paths",
        ),
        (
            'settings.data = "{made.task}"',
            "settings.data.store = '{made.task}'",
            "there is no setting data.store: data is a path or a list of paths",
        ),
        ('columns = "rate"', 'columns = "metric"', 'columns="metric" needs metric.NAME=METRIC'),
        (
            'columns = "rate"',
            'columns = "rate"\nmetric = "acuracy"',
            "will have no 'acuracy'; it has loss, accuracy, f1, mcc",
        ),
        ('columns = "rate"', 'columns = "start"', "rows and columns are both 'start'"),
        ('columns = ["low", "high"]', 'columns = ["low", "low"]', "two published columns"),
        ("[50.0, 99.0]", '[50.0, "n/a"]', "'n/a', which is not a number"),
        ('each = "rate"', 'each = "start"', "compares a level with itself"),
        ('than.start = "scratch"', 'than.start = "pretrained"', "compares a level with itself"),
        ('surgery = [{ op = "clean" }]', "", "both sides have the same runs"),
        ('each = "rate"', "margin = 2", "margin=2 must be a fraction: 2 points are 0.02"),
        ('columns = "rate"', 'columns = "rate"\nchance.low = 50', "50 points are 0.5"),
        (
            'better.start = "pretrained"\nthan.start = "scratch"\neach = "rate"',
            'better = { start = "pretrained", rate = "low" }\nthan.rate = "low"',
            "only one of better and than names start",
        ),
        (
            "[[claims]]",
            "[[curves]]\nname = 'x'\ntitle = 'x'\nstage = 'finetune'\nvalidation = 'acuracy'\n"
            "panels = 'rate'\nlines = 'start'\n[[claims]]",
            "curves x: finetune seed=0 start=pretrained rate=low will have no 'acuracy'",
        ),
        (
            "[[claims]]",
            "[[curves]]\nname = 'x'\ntitle = 'x'\nstage = 'finetune'\nvalue = 'lss'\n"
            "panels = 'rate'\nlines = 'start'\n[[claims]]",
            "curves x: finetune seed=0 start=pretrained rate=low will have no 'lss'; it has loss,",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmetric = "train.lss"',
            "table main: finetune seed=0 start=pretrained rate=low will have no 'lss'",
        ),
        (
            "[[claims]]",
            "[[claims]]\ntext = 'pre-training helps at every rate'\ntable = 'main'\n"
            "better.start = 'scratch'\nthan.start = 'pretrained'\n[[claims]]",
            "two claims have the text 'pre-training helps at every rate'",
        ),
        ("vary.seed = [0, 1]", "vary.split = [0, 1]", "results.csv has a column of this one"),
        (
            "[[claims]]",
            "[[tables]]\nname = 'main'\ntitle = 'x'\nstage = 'finetune'\n"
            "rows = 'start'\ncolumns = 'rate'\n[[claims]]",
            "two of the tables are named 'main'",
        ),
        (
            'columns = "rate"',
            'columns = "metric"\nmetric.loss = "train.loss"',
            "say which metric of table main",
        ),
        ('columns = "rate"', 'columns = "rate"\nmetric.low = "f1"', "metric.high must be given"),
        ('columns = "rate"', 'columns = "rate"\nwhere.seed = "2"', "there is no '2'"),
        ('columns = "rate"', 'columns = "rate"\nminus = "pretrian"', "did you mean pretrain?"),
        (
            "[[claims]]",
            "[[summaries]]\ntitle = 'x'\ntable = 'main'\nby = 'seed'\n[[claims]]",
            "there is no 'seed'",
        ),
        (
            "[[claims]]",
            "[[curves]]\nname = 'x'\ntitle = 'x'\nstage = 'finetune'\n"
            "panels = 'rate'\nlines = 'model'\n[[claims]]",
            "there is no 'model'",
        ),
        (
            "[[claims]]",
            "[[curves]]\nname = 'x'\ntitle = 'x'\nstage = 'finetune'\npanels = 'rate'\n"
            "lines = 'start'\nvalidation.hihg = 'accuracy'\n[[claims]]",
            "curves x: validation: there is no 'hihg'; did you mean high?",
        ),
        (
            "[[claims]]",
            "[[curves]]\nname = 'headline'\ntitle = 'x'\nstage = 'finetune'\n"
            f"panels = 'rate'\nlines = 'start'\n{HEADLINE}",
            "two figures of the report are written to 'headline.svg'",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmeans.both = ["low", "low"]',
            "table main: means.both names 'low' twice; leave one out",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmeans.both = ["low", "hihg"]',
            "table main: means.both: there is no 'hihg'; did you mean high?",
        ),
        (
            'columns = "rate"',
            'columns = "rate"\nmeans.low = ["low", "high"]',
            "table main: means.low: a column has this name",
        ),
        ("like.scratch", "like.scrach", "like: there is no 'scrach'; did you mean scratch?"),
        ("like.scratch", "like.'rate=scratch'", "like: there is no 'rate=scratch'"),
        (
            "[[claims]]",
            "[[summaries]]\ntitle = 'x'\ntable = 'main'\nby = 'start'\n[summaries.published]\n"
            "source = 'x'\ncolumns = ['maen']\nrows.none = [1.0]\n[[claims]]",
            "summary 'x': published.columns: there is no 'maen'; did you mean mean?",
        ),
        (
            "vary.seed = [0, 1]",
            'vary.seed = [0, 1]\nwithout = [{ sed = "0" }]',
            "finetune: without: there is no 'sed'; did you mean seed?",
        ),
        (
            "vary.seed = [0, 1]",
            'vary.seed = [0, 1]\nwithout = [{ seed = "2" }]',
            "finetune: without: there is no '2'",
        ),
        ("[[claims]]", HEADLINE.replace("main", "mian"), "headline: there is no 'mian'"),
        ("[[claims]]", HEADLINE.replace("scratch", "nothing"), "labels: there is no 'nothing'"),
        ("[[claims]]", f"{HEADLINE}".replace("[headline.l", "curves = 'x'\n[headline.l"), "no 'x'"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(
    file: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(words)) as error:
        plan_of(changed(file, (old, new)), tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "studies").exists()


def test_a_mean_of_columns_that_the_scale_lacks_is_refused(file: Path, tmp_path: Path) -> None:
    changed(
        file,
        ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]'),
        ("vary.rate.high", "vary.rate.middle = { optim.lr = 1e-4 }\nvary.rate.high"),
        ('than.start = "scratch"\neach = "rate"', 'than = { start = "scratch", rate = "both" }'),
        ('better.start = "pretrained"', 'better = { start = "pretrained", rate = "both" }'),
    )
    plan_of(file, tmp_path)
    changed(file, ("[scales.mini]", '[scales.mini]\nlevels.rate = ["middle"]'))
    with pytest.raises(BadInput, match="there is no 'both'"):
        plan_of(file, tmp_path)


def test_a_claim_about_scores_and_losses_is_refused(file: Path, tmp_path: Path) -> None:
    """On average over columns of both kinds. With `each` every column has a test of its own."""
    both = 'columns = "rate"', 'columns = "rate"\nmetric = { low = "loss", high = "f1" }'
    assert len(plan_of(changed(file, both), tmp_path).remarks()) == 1
    with pytest.raises(BadInput, match="averages scores and losses; make two claims of it"):
        plan_of(changed(file, ('each = "rate"', "")), tmp_path)


def test_seeds_that_share_a_run_at_one_level_are_refused(file: Path, tmp_path: Path) -> None:
    """Each pre-trained run starts from a pre-training of its own seed, but every run from scratch
    from that of the first."""
    changed(
        file,
        ("steps = 4 }", "steps = 4 }\nvary.seed = { a.seed = 0, b.seed = 1 }"),
        ("vary.seed = [0, 1]", "vary.seed = { a = {}, b = {} }"),
        ("scratch = {", 'scratch = { init = "{stage.pretrain(seed=a)}",'),
    )
    words = r"vary\.seed: a and b have the same settings, .* not two \(at scratch, low\)"
    with pytest.raises(BadInput, match=words):
        plan_of(file, tmp_path)
    plan_of(changed(file, ("(seed=a)", "")), tmp_path)


def test_stages_that_read_two_results_of_one_command_are_refused(tmp_path: Path) -> None:
    stage = '[stages.{0}]\ncommand = ["-c", "1", "{{out}}"]\nresult = "{0}.json"\n'
    file = tmp_path / "looks.toml"
    file.write_text('title = "Looks"\n' + stage.format("one") + stage.format("two"))
    words = r"two: it runs the same command as one, but .* \(two\.json; one\.json\)"
    with pytest.raises(BadInput, match=words):
        plan_of(file, tmp_path, "")
    plan_of(changed(file, ("two.json", "one.json")), tmp_path, "")


def test_levels_that_change_nothing_are_pointed_out(file: Path, tmp_path: Path) -> None:
    """A task whose store does not depend on its name gives equal columns. The listing, the line
    before the runs and the report say so."""
    plan = plan_of(changed(file, ("optim.lr = 1e-3", "optim.lr = 1e-5")), tmp_path)
    (line,) = plan.remarks()
    assert line == (
        "stages.finetune: rate=low and rate=high are the same runs, because these levels have the "
        "same settings"
    )


def test_a_claim_about_a_loss_is_pointed_out(file: Path, tmp_path: Path) -> None:
    """The side with the higher number is `better`, whatever the number means."""
    plan = plan_of(
        changed(file, ('columns = "rate"', 'columns = "rate"\nmetric = "loss"')), tmp_path
    )
    (line,) = plan.remarks()
    assert line == (
        "in the claim 'pre-training helps at every rate' lower numbers are better. The claim holds "
        "if its side `better` (start=pretrained) has the higher numbers"
    )


def test_doubts_about_published_numbers_are_pointed_out(file: Path, tmp_path: Path) -> None:
    """A misspelt name, whose numbers no cell would show, and fractions beside percent."""
    pairs = [("rows.pretrained", "rows.pretraind"), ("[50.0, 99.0]", "[0.5, 0.99]")]
    plan = plan_of(changed(file, *pairs, ("[50.0, ", "[0.5, ")), tmp_path)
    assert plan.remarks() == [
        "table main: no cell shows the published 'pretraind'; if it belongs to pretrained, say "
        'like."pretrained" = "pretraind"',
        "table main: no published number is above 0.99, but the table shows percent",
    ]


def test_a_claim_skips_levels_that_are_left_out(file: Path, data: Path, tmp_path: Path) -> None:
    """At a level of `each` without any run, nothing is registered and nothing is missing."""
    registration = 'registration = { seeds.seed = 2, unit = "a run", extension = "none" }'
    left_out = 'vary.seed = [0, 1]\nwithout = [{ rate = "low" }]'
    changed(
        file, ("[scales.mini]", f"[scales.mini]\n{registration}"), ("vary.seed = [0, 1]", left_out)
    )
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + (0.1 + 0.01 * int(seed)) * (start != "scratch"))
    (verdict,) = verdicts(Results(plan))
    assert verdict.levels == ("high",)
    assert not verdict.early


def test_the_keys_of_a_study_file_are_listed() -> None:
    """Every key has a description."""
    text = keys_text()
    parts: list[type[BaseModel]] = [*PARTS.values(), Published]
    for part in parts:
        for name, field in part.model_fields.items():
            assert field.description, name
            assert f"\n    {name}: " in text
    assert "\n[[claims]]: A statement to test" in text


def test_an_unknown_scale_names_those_there_are(file: Path) -> None:
    with pytest.raises(BadInput, match="no scale 'tiny'; it has mini, paper"):
        read_study(file, "tiny")
    with pytest.raises(
        BadInput, match=r"^the study file .*/zzz does not exist; there are studies/"
    ):
        read_study(file.with_name("zzz"), "mini")


def test_a_recipe_is_written_as_it_was_read(tmp_path: Path) -> None:
    values = {"run": 'a "b" \\ é\n', "surgery": [{"op": "clean"}], "x": {"a.b": 1e-4, "c": True}}
    (tmp_path / "x.toml").write_text(toml_text(values))
    assert read_recipe(tmp_path / "x.toml") == values


# ------------------------------------------------------------------------------------ the runs


def test_each_run_once_in_an_order_that_works(file: Path, data: Path, tmp_path: Path) -> None:
    plan = plan_of(file, tmp_path, data=str(data))
    jobs = list(plan.jobs.values())
    names = [job.name for job in jobs]
    assert names[:3] == ["made.task", "made.letters", "pretrain"]
    assert len(jobs) == 3 + 2 * 2 * 2
    before: set[str] = set()
    for job in jobs:
        assert set(job.waits) <= before, job.name
        before.add(job.key)
    run = next(w for w in jobs if w.levels == {"seed": "1", "start": "scratch", "rate": "high"})
    assert run.recipe is not None
    assert (run.recipe["seed"], run.recipe["optim"]["lr"]) == (1, 1e-3)
    assert run.recipe["surgery"] == [{"op": "clean"}]
    assert run.recipe["init"] == str(jobs[2].path)


def test_the_key_is_the_content(file: Path, data: Path, tmp_path: Path) -> None:
    def keys(**needs: str) -> dict[str, str]:
        return {w.name: w.key for w in plan_of(file, tmp_path, **needs).jobs.values()}

    first = keys(data=str(data))
    moved = data.rename(tmp_path / "moved")
    assert keys(data=str(moved)) == first  # the path is not part of the content
    changed(
        file,
        (
            "settings.train.epochs = 1",
            "settings.train.epochs = 1\nsettings.train.log_every = 3\nsettings.system.threads = 1",
        ),
    )
    assert keys(data=str(moved)) == first
    changed(file, ("vary.seed = [0, 1]", "vary.seed = [1, 2]"))
    other = keys(data=str(moved))
    assert {n: k for n, k in other.items() if "seed=2" not in n}.items() <= first.items()
    (moved / "x.tsv").write_text((moved / "x.tsv").read_text() + "ACGTACGTACGT\tno\n")
    assert not set(keys(data=str(moved)).values()) & set(first.values())


def test_what_is_made_may_depend_on_levels(file: Path, data: Path, tmp_path: Path) -> None:
    changed(
        file,
        ('settings.data = "{made.task}"', 'settings.data = "{made.{start}}"'),
        (
            "[stages.pretrain]",
            """[made.pretrained]
command = ["preprocess.py", "{rate}", "{out}"]
[made.scratch]
same = "task"
[stages.pretrain]""",
        ),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    made = [job for job in plan.jobs.values() if not job.stage]
    assert [job.command[1] for job in made if job.name == "made.pretrained"] == ["low", "high"]
    scratch = next(r for r in plan.runs("finetune") if r.levels["start"] == "scratch")
    assert scratch.recipe is not None
    task = next(job for job in made if job.name == "made.task")
    assert scratch.recipe["data"] == str(task.path)
    assert task.key in scratch.waits
    changed(file, ('same = "task"', 'same = "scratch"'))
    with pytest.raises(BadInput, match=r"made\.scratch is made from itself"):
        plan_of(file, tmp_path, data=str(data))
    changed(file, ('same = "scratch"', 'same = "tusk"'))
    with pytest.raises(BadInput, match=r"there is no made\.tusk; did you mean task"):
        plan_of(file, tmp_path, data=str(data))


def test_a_stage_at_another_level(file: Path, data: Path, tmp_path: Path) -> None:
    changed(
        file,
        (
            "settings.train = { steps = 4 }",
            "settings.train = { steps = 4 }\nvary.start.pretrained = {}\nvary.seed = [0, 1]",
        ),
        ('settings.init = "{stage.pretrain}"\n', ""),
        (
            "vary.start.pretrained = {}\nvary.start.scratch = {",
            'vary.start.pretrained = { init = "{stage.pretrain}" }\nvary.start.scratch = '
            '{ init = "{stage.pretrain(start=pretrained)}",',
        ),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    by_key = {job.key: job for job in plan.jobs.values()}
    for run in plan.runs("finetune"):
        start = next(by_key[key] for key in run.waits if by_key[key].stage == "pretrain")
        assert start.levels == {"start": "pretrained", "seed": run.levels["seed"]}
    changed(file, ("(start=pretrained)", "(start=scratch)"))
    with pytest.raises(BadInput, match=r"pretrain\.vary\.start has no level 'scratch'"):
        plan_of(file, tmp_path, data=str(data))


def test_combinations_are_left_out(file: Path, tmp_path: Path) -> None:
    new = 'vary.seed = [0, 1]\nwithout = [{ start = "scratch", rate = "low" }]'
    changed(file, ("vary.seed = [0, 1]", new))
    runs = plan_of(file, tmp_path).runs("finetune")
    assert len(runs) == 6
    assert all(run.missing == ("data",) for run in runs)


def test_the_sides_of_a_claim_are_averaged_over_the_same_levels(file: Path) -> None:
    left_out = 'without = [{ start = "scratch", rate = "high" }]'
    changed(file, ("vary.seed = [0, 1]", f"vary.seed = [0, 1]\n{left_out}"))
    read_study(file, "mini")  # the claim is about each rate; at the high one nothing is compared
    changed(file, ('each = "rate"', ""))
    with pytest.raises(BadInput, match="only one of better and than has runs at rate=high, so"):
        read_study(file, "mini")
    changed(file, (left_out, 'without = [{ start = "scratch", seed = "1" }]'))
    read_study(file, "mini")  # only seed 0 is compared


def test_a_run_of_several_processes(file: Path, data: Path, tmp_path: Path) -> None:
    """torchrun starts it. It has a key of its own and takes one slot per process."""
    alone = plan_of(file, tmp_path, data=str(data)).runs("pretrain")[0]
    changed(
        file,
        ('settings.data = "{made.letters}"', 'processes = 2\nsettings.data = "{made.letters}"'),
    )
    both = plan_of(file, tmp_path, data=str(data)).runs("pretrain")[0]
    assert (alone.processes, both.processes) == (1, 2)
    assert alone.key != both.key
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    recipe = str(both.path.with_suffix(".toml"))
    assert both.command == (*launcher, "-m", "xformer.train", recipe)

    jobs = [job(tmp_path, name, "") for name in ("one", "two", "three")]
    jobs[1] = replace(jobs[1], processes=2)
    executor, script = Slow(), iter(["one", "two", "three"])
    running = []

    def ended(_: object) -> None:
        running.append(sorted(executor.running))
        if name := next(script, ""):
            executor.end(name)

    pool.run_jobs(jobs, executor, ended, lambda _: None, 0)
    assert running[:3] == [["one"], ["two"], ["three"]]


@pytest.mark.parametrize(
    ("start", "operations", "words"),
    [
        (
            "{stage.pretrain}",
            '{ op = "reinit_head", layer = 2, head = 1 }',
            "reinit_head: layer=2: the model has layers 1 to 1",
        ),
        (
            "{made.half}",
            '{ op = "reinit_head", layer = 2, head = 4 }',
            "reinit_head: head=4: a layer has heads 1 to 3",
        ),
        (
            "{made.half}",
            '{ op = "keep_layers", first = 1 }, { op = "keep_layers", every = 2 }',
            "keep_layers: every=2: the model has layers 1 to 1",
        ),
        ("{made.hf}", '{ op = "reinit_last_layers", from_layer = 6 }', "give 1 to 5"),
        (
            "{need.checkpoint}",
            '{ op = "keep_layers", layers = [3] }',
            "layers=3: the model has layers 1 to 2",
        ),
        ("{need.albert}", '{ op = "reverse_layers" }', "(ALBERT)"),
    ],
)
def test_operations_on_what_is_not_there_are_refused_before_any_run(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: str,
    operations: str,
    words: str,
) -> None:
    """The shape is known from the recipe of a run that is not made yet, from a checkpoint, or from
    what is imported.
    """
    needs = ["checkpoint", "hf", "albert"]
    made = """
[made.hf]
command = ["-m", "xformer.convert", "from-hf", "{need.hf}", "{out}"]
[made.half]
command = ["-m", "xformer.surgery", "{made.hf}", "{out}", "keep_layers(first=2)", "--seed", "1"]
"""
    made += "".join(f'[needs.{name}]\nabout = "x"\nget = "x"\n' for name in needs)
    changed(
        file,
        ("[stages.pretrain]", f"{made}\n[stages.pretrain]"),
        (
            'settings.init = "{stage.pretrain}"',
            f'settings.init = "{start}"\nsettings.mapping = "symbols:0"',
        ),
        ('{ op = "clean" }', operations),
    )
    looking.checkpoint(tmp_path / "checkpoint")
    looking.checkpoint(tmp_path / "albert", shared_layers=True)
    (tmp_path / "hf").mkdir()
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 6,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "max_position_embeddings": 9,
        "vocab_size": 9,
    }
    write_json(tmp_path / "hf/config.json", {"model_type": "bert", **sizes})
    given = [f"needs.{name}={tmp_path / name}" for name in needs]
    line = [str(file), "scale=mini", "--dry-run", f"output={tmp_path / 'studies'}"]
    monkeypatch.setattr("sys.argv", ["xformer.study", *line, *given])
    with pytest.raises(BadInput, match=re.escape(words)) as error:
        study_main()
    assert re.search(r"letters\.toml: finetune seed=0 start=scratch rate=low: ", str(error.value))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "studies").exists()
    # nothing is known about a missing checkpoint
    monkeypatch.setattr("sys.argv", ["xformer.study", *line])
    if "need" in start or "made" in start:
        study_main()


# ----------------------------------------------------------------------------------- the queue


def job(tmp_path: Path, name: str, code: str, *waits: str, **more: Any) -> Job:
    """A job that runs a line of Python, in which P is the file that proves its end, and D the
    directory for other files. P lies elsewhere until the end."""
    path = tmp_path / name
    code = f"from pathlib import Path; P, D = Path({str(path)!r}), Path({str(tmp_path)!r}); {code}"
    return Job(name, name, path, path, ("-c", code), waits, **more)


@pytest.mark.slow
def test_no_result_is_kept_of_data_that_changed(file: Path, data: Path, tmp_path: Path) -> None:
    """The first job overwrites what both read. Neither leaves a result, and the next call plans
    other keys."""
    plan = plan_of(file, tmp_path, data=str(data))
    known = {run.key for run in plan.runs("pretrain")}
    reads = plan.jobs[plan.runs("pretrain")[0].waits[0]].reads
    assert [path for path, _ in reads] == [data / "train.txt", data / "valid.txt"]
    first = job(tmp_path, "first", f"P.touch(); open({str(data / 'valid.txt')!r}, 'w').write('A')")
    jobs = [replace(one, reads=reads) for one in (first, job(tmp_path, "second", "P.touch()"))]
    outcomes = pool.run_jobs(
        jobs, Local(1, 1), lambda _: None, lambda _: None, 0.01, stale=plan.stale
    )
    why = f"{data / 'valid.txt'} has changed since the study began; run the same command again"
    assert [(one.state, one.why) for one in outcomes.values()] == [("failed", why)] * 2
    assert not any(job.proof.exists() for job in jobs)
    assert plan.stale(jobs[0]) == why
    assert not known & {run.key for run in plan_of(file, tmp_path, data=str(data)).runs("pretrain")}
    (data / "valid.txt").unlink()
    assert not plan.stale(jobs[0])  # what is gone was read before, or its absence is an error


def test_a_failure_stops_only_what_waits_for_it(tmp_path: Path) -> None:
    there = job(tmp_path, "there", "1/0")
    there.proof.touch()
    jobs = [
        there,
        job(tmp_path, "good", "P.touch()", "there"),
        job(tmp_path, "bad", "print('first'); raise ValueError('no luck')"),
        job(tmp_path, "after", "P.touch()", "bad"),
        job(tmp_path, "last", "P.touch()", "after"),
        job(tmp_path, "empty", "pass"),
        job(tmp_path, "poor", "P.touch()", missing=("bert",)),
        job(tmp_path, "other", "P.touch()", "good"),
    ]
    prepared: list[str] = []
    local = Local(2, 1)
    outcomes = pool.run_jobs(jobs, local, lambda _: None, lambda w: prepared.append(w.name), 0.01)
    states = {key: outcome.state for key, outcome in outcomes.items()}
    assert states == {
        "there": "there",
        "good": "done",
        "bad": "failed",
        "after": "not run",
        "last": "not run",
        "empty": "failed",
        "poor": "not run",
        "other": "done",
    }
    assert sorted(prepared) == ["bad", "empty", "good", "other"]
    assert outcomes["bad"].why.splitlines()[-1] == "ValueError: no luck"
    assert "wrote no" in outcomes["empty"].why
    assert (outcomes["after"].why, outcomes["poor"].why) == (
        "waits for bad",
        "needs.bert is missing",
    )


def test_what_can_never_run_does_not_start(tmp_path: Path) -> None:
    """Later fine-tunings rank before earlier ones, and slots are free when the first run fails."""
    jobs = [
        replace(job(tmp_path, name, "", *waits), stage="x", recipe={})
        for name, *waits in (["a"], ["b", "a"], ["c", "b"], ["d", "c"])
    ]
    executor = Slow()

    def changed(_: object) -> None:
        for name in [*executor.running]:
            executor.end(name, made=False)

    outcomes = pool.run_jobs(jobs, executor, changed, lambda _: None, 0)
    assert executor.started == ["a"]
    states = [(outcomes[key].state, outcomes[key].why) for key in "bcd"]
    assert states == [("not run", f"waits for {key}") for key in "abc"]


def test_what_a_command_warns_of_is_in_the_report(
    file: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that does not know the text makes rows of one token, and scores at chance. Its
    warning is shown when the command ends, and stands in each report."""
    plan = plan_of(file, tmp_path, data=str(data))
    made = [job for job in plan.jobs.values() if job.recipe is None]
    assert "warning" not in markdown_of(Results(plan))
    (data / "train.txt").write_text("we read\nwords here\n")
    plan = plan_of(file, tmp_path, data=str(data))
    plan.jobs = {key: job for key, job in plan.jobs.items() if job.recipe is None}
    plan.wanted = set(plan.jobs)
    outcomes = pool.run_plan(plan, Local(1, 1), lambda *_: "")
    assert [outcome.state for outcome in outcomes.values()] == ["done"] * len(made)
    words = "warning: the tokenizer does not know 100 % of the tokens of train"
    assert f"    {words}" in capsys.readouterr().err
    text = markdown_of(Results(plan_of(file, tmp_path, data=str(data))))
    assert f"made.letters, which pretrain reads: {words}" in text


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ("", 3, "it exited with status 3 and printed nothing"),
        ("step 1\n", -9, "step 1\nit was ended by signal 9 (Killed)"),  # memory ran out
        ("step 1\n", 0, "step 1\nit exited with status 0 but wrote no {proof}"),
        ("no luck\n", 1, "no luck"),
    ],
)
def test_a_failed_job_has_a_reason(tmp_path: Path, log: str, status: int, words: str) -> None:
    failed = job(tmp_path, "failed", "pass")
    log_of(failed).write_text(log)
    assert last_words(failed, status) == words.format(proof=failed.proof)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_job_that_cannot_say_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its log is empty because the disk is full."""

    def full(_: int) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr("os.fsync", full)
    (why,) = last_words(job(tmp_path, "failed", "pass"), 1).splitlines()
    reason = f"because the disk is full ({os.strerror(number).lower()}: {tmp_path}); free some"
    assert reason in why
    monkeypatch.undo()
    assert "full" not in last_words(job(tmp_path, "failed", "pass"), 1)
    assert not list(tmp_path.iterdir())


def test_no_more_run_at_once_than_there_are_slots(tmp_path: Path) -> None:
    code = "import time; on = D / f'{P.name}.on'; on.touch(); time.sleep(.3); n = len(list("
    code += "D.glob('*.on'))); P.write_text(str(n)); on.unlink()"
    jobs = [job(tmp_path, f"w{i}", code) for i in range(6)]
    pool.run_jobs(jobs, Local(2, 1), lambda _: None, lambda _: None, 0.01)
    counts = [int(w.proof.read_text()) for w in jobs]
    assert max(counts) == 2


def test_an_interruption_stops_what_runs(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: (P.touch(), sys.exit(0)));"
    slow = job(tmp_path, "slow", f"{code} (D / 'slow.on').touch(); time.sleep(60)")

    def stop(_: dict[str, Outcome]) -> None:
        if slow.path.with_suffix(".on").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run_jobs([slow], Local(1, 1), stop, lambda _: None, 0.01)
    assert slow.proof.exists()  # it was asked to stop, and had time to save


INTERRUPTED = """
import os, signal, sys, time
def stop(*_):
    (D / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if (D / "saved").exists():
    P.touch()
else:
    text = str(os.getppid())
    (D / "new").write_text(text)
    (D / "new").rename(D / "begun")
    time.sleep(120)
"""
PLAIN = """
import time
if (D / "on").exists():
    P.touch()
else:
    (D / "on").touch()
    time.sleep(120)
"""


class Slow:
    """An executor whose jobs run until the test ends them, or until they are asked to stop."""

    slots = 2

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running: dict[str, Slow.Handle] = {}

    class Handle:
        def __init__(self, job: Job):
            self.job, self.ended, self.asked = job, False, 0

        @property
        def exitcode(self) -> int | None:
            return (143 if self.asked else 0) if self.ended else None

        def terminate(self) -> None:
            self.asked += 1

        def join(self) -> None:
            assert self.asked

    def choose(self, free: Sequence[int], processes: int) -> Sequence[int]:
        return Local(self.slots, 1).choose(free, processes)

    def start(self, job: Job, slots: Sequence[int]) -> Slow.Handle:
        self.started.append(job.name)
        self.running[job.name] = self.Handle(job)
        return self.running[job.name]

    def end(self, name: str, made: bool = True) -> None:
        handle = self.running.pop(name)
        if made:
            handle.job.proof.touch()
        handle.ended = True


def test_what_stands_first_in_the_plan_starts_first(tmp_path: Path) -> None:
    """When a pre-training ends, its fine-tuning runs start before the next pre-training."""
    jobs = [
        job(tmp_path, "a", ""),
        job(tmp_path, "a1", "", "a"),
        job(tmp_path, "a2", "", "a"),
        job(tmp_path, "b", ""),
        job(tmp_path, "b1", "", "b"),
        job(tmp_path, "b2", "", "b"),
        job(tmp_path, "c", ""),
        job(tmp_path, "c1", "", "c"),
    ]
    executor = Slow()
    script = iter(["a", "b", "a1", "a2", "b1", "c", "b2", "c1"])

    def changed(_: object) -> None:
        if name := next(script, ""):
            executor.end(name)

    pool.run_jobs(jobs, executor, changed, lambda _: None, 0)
    assert executor.started == ["a", "b", "a1", "a2", "b1", "b2", "c", "c1"]


def test_a_run_that_a_killed_study_left_is_waited_for(tmp_path: Path) -> None:
    """The run took its lock after the queue had looked, so the second start fails. The queue then
    keeps waiting.
    """
    run = replace(job(tmp_path, "run", ""), recipe={})
    run = replace(run, proof=tmp_path / "run/result.json")
    run.path.mkdir()
    executor, orphan, steps = Slow(), (run.path / ".lock").open("w"), iter(range(100))

    def changed(outcomes: dict[str, Outcome]) -> None:
        match next(steps):
            case 0:
                fcntl.flock(orphan, fcntl.LOCK_EX)
                executor.end("run", made=False)
            case 2:
                assert not outcomes
                run.proof.touch()  # the orphaned process finishes the job
                (run.path / "checkpoints/step_1").mkdir(parents=True)
                (run.path / "checkpoints/step_1/manifest.json").touch()
                orphan.close()

    outcomes = pool.run_jobs([run], executor, changed, lambda _: None, 0)
    assert outcomes["run"].state == "there"
    assert executor.started == ["run"]


def test_a_copied_run_is_refused(file: Path, data: Path, tmp_path: Path) -> None:
    plan = plan_of(file, tmp_path, data=str(data))
    one, two = plan.runs("finetune")[:2]
    one.path.mkdir(parents=True)
    config = {"config": {"run": str(one.path), "system": {"precision": "fp32"}}}
    write_json(one.path / "config.json", config)
    plan_of(file, tmp_path, data=str(data))
    shutil.copytree(one.path, two.path)
    with pytest.raises(BadInput, match=f"{two.key} holds the run {one.key}: it was copied"):
        plan_of(file, tmp_path, data=str(data))


def test_fine_tunings_go_before_the_next_pre_training(tmp_path: Path) -> None:
    """This also holds if the plan lists them last. A store comes before all pre-trainings."""
    store = job(tmp_path, "store", "")
    runs = [job(tmp_path, "a", ""), job(tmp_path, "b", "", "store"), job(tmp_path, "c", "")]
    runs += [job(tmp_path, f"{name}1", "", name) for name in "abc"]
    jobs = [runs[0], store, *runs[1:]]
    jobs = [one if one is store else replace(one, stage="x") for one in jobs]
    executor = Slow()
    script = iter(["store", "a", "a1", "b", "b1", "c", "c1"])

    def changed(_: object) -> None:
        if name := next(script, ""):
            executor.end(name)

    pool.run_jobs(jobs, executor, changed, lambda _: None, 0)
    assert executor.started == ["store", "a", "b", "a1", "c", "b1", "c1"]


def test_a_pause_stops_what_runs_and_loses_nothing(tmp_path: Path) -> None:
    pause = tmp_path / "PAUSE"
    pause.touch()
    run = replace(job(tmp_path, "run", ""), recipe={})
    run = replace(run, proof=tmp_path / "run/result.json")
    jobs = [run, job(tmp_path, "made", ""), job(tmp_path, "next", "")]
    executor, told = Slow(), []  # type: ignore[var-annotated]
    steps = iter(range(100))

    def changed(outcomes: dict[str, Outcome]) -> None:
        match next(steps):
            case 1:
                assert executor.started == []
                pause.unlink()
            case 2:
                assert executor.started == ["run", "made"]
                pause.touch()
            case 3 | 4:  # asked to stop once, and waited for
                assert [handle.asked for handle in executor.running.values()] == [1, 1]
            case 5:
                executor.end("run", made=False)
                executor.end("made", made=False)
            case 7:
                assert not outcomes
                assert len(told) == 3
                pause.unlink()
            case 8:
                assert executor.started == ["run", "made"] * 2  # before jobs that came later
                run.proof.parent.mkdir()
                executor.end("run")
                executor.end("made")
            case 9:
                executor.end("next")

    outcomes = pool.run_jobs(
        jobs, executor, changed, lambda _: None, 0, pause=pause, tell=told.append
    )
    assert {outcome.state for outcome in outcomes.values()} == {"done"}
    assert told == [
        f"paused: nothing was running; remove {pause} to continue",
        "resumed",
        "paused: runs stopped with a checkpoint: 1, commands to be restarted: 1; "
        f"remove {pause} to continue",
        "resumed",
    ]


def test_a_pause_reaches_processes(tmp_path: Path) -> None:
    """Processes get SIGTERM, as a user's command does, and are started again later."""
    pause = tmp_path / "PAUSE"
    long, plain = job(tmp_path, "long", INTERRUPTED), job(tmp_path, "plain", PLAIN)
    told: list[str] = []

    def changed(_: object) -> None:
        if not told and all((tmp_path / name).exists() for name in ("begun", "on")):
            pause.touch()
        elif told:
            pause.unlink(missing_ok=True)

    outcomes = pool.run_jobs(
        [long, plain],
        Local(2, 1),
        changed,
        lambda _: None,
        0.01,
        pause=pause,
        tell=told.append,
    )
    assert {outcome.state for outcome in outcomes.values()} == {"done"}
    assert (tmp_path / "saved").exists()
    assert told[0].startswith("paused: runs stopped with a checkpoint: 0, commands to be ")


def test_only_what_is_needed_is_made(tmp_path: Path) -> None:
    """A job that no other job waits for is not made. A job of which only the result is left is made
    again if another job waits for it.
    """

    def run(name: str, *waits: str) -> Job:
        path = tmp_path / name
        return Job(name, name, path, path / "result.json", (), waits, stage="s", recipe={})

    jobs = [
        job(tmp_path, "store", ""),
        run("a", "store"),
        run("a1", "a", "store"),
        run("b", "store"),
        run("b1", "b"),
        run("b2", "b"),
    ]
    wanted = ["a1", "b1", "b2"]
    assert list(to_do(jobs, wanted)) == ["store", "a", "a1", "b", "b1", "b2"]
    for name in ("a1", "b", "b1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").touch()
    assert list(to_do(jobs, wanted)) == ["store", "b", "b2"]  # b has no weights
    assert list(to_do(jobs, wanted, kept={"b2"})) == []
    weights = tmp_path / "b/checkpoints/step_4"
    weights.mkdir(parents=True)
    (weights / "manifest.json").touch()
    assert list(to_do(jobs, wanted)) == ["b2"]
    executor = Slow()
    outcomes = pool.run_jobs(
        jobs,
        executor,
        lambda _: executor.end("b2", made=False) if executor.running else None,
        lambda _: None,
        0,
        wanted=wanted,
    )
    assert {key: outcome.state for key, outcome in outcomes.items()} == {
        "store": "not needed",
        "a": "not needed",
        "a1": "there",
        "b": "there",
        "b1": "there",
        "b2": "failed",
    }


def test_jobs_are_forks_of_a_process_that_computes_nothing(tmp_path: Path) -> None:
    """That process has one thread and no CUDA context. A command sees the usual arguments and
    environment.
    """
    code = (
        "import json, os, signal, sys; early = 'xformer.train' in sys.modules; import torch;"
        "P.write_text(json.dumps([early, len(os.listdir('/proc/self/task')), "
        "torch.cuda.is_initialized(), torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], "
        "os.environ['OF_ONE'], list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),"
        "sys.argv, sys.stdin.read()]))"
    )
    shows = job(tmp_path, "shows", "")
    seen = tmp_path / "seen.py"
    seen.write_text(f"from pathlib import Path; P = Path({str(shows.proof)!r}); {code}")
    shows = replace(shows, command=(str(seen),))
    script = tmp_path / "door.py"
    script.write_text("import sys; print(sys.argv, __name__, sys.path[0]); sys.exit('wrong')")
    door = replace(job(tmp_path, "door", ""), command=(str(script), "x=1"))
    module = replace(job(tmp_path, "module", ""), command=("-m", "xformer.surgery"))
    os.environ["OF_ONE"] = "1"
    try:
        handles = [Local(1, 1).start(one, [0]) for one in (shows, door, module)]
    finally:
        del os.environ["OF_ONE"]
    for handle in handles:
        handle.join()
    assert [handle.exitcode for handle in handles] == [0, 1, 2]
    told = [True, 1, False, 1, "1", "1", [], [str(seen)], ""]
    assert json.loads(shows.proof.read_text()) == told
    assert (tmp_path / "door.log").read_text().splitlines() == [
        f"['{script}', 'x=1'] __main__ {tmp_path}",
        "wrong",
    ]
    assert (tmp_path / "module.log").read_text().startswith("error: ")


# ---------------------------------------------------------------------------------- the ledger


def with_weights(run: Job, weights: bytes = b"weights") -> None:
    """Write the files that training leaves in a run. Its scores are those that `finish` wrote."""
    selected = run.path / "checkpoints/step_4"
    selected.mkdir(parents=True)
    (selected / "model.safetensors").write_bytes(weights)
    (selected / "manifest.json").write_text("{}")
    result = json.loads(run.proof.read_text())
    write_json(run.proof, {**result, "selected": "checkpoints/step_4"})
    write_json(run.path / "config.json", {"config": {}, "identity": {}})
    sums = {name: file_checksum(run.path / name) for name in ("result.json", "config.json")}
    write_json(run.path / "run_manifest.json", {"sha256": sums})
    (run.path / "log.jsonl").write_text(
        '{"event": "train", "step": 1, "loss": 2.5}\n{"event": "train", "step": 4, "loss": 1.5}\n'
    )
    (run.path / "predictions").mkdir()
    (run.path / "predictions/valid.npz").write_bytes(b"some")


def a_ledger(file: Path, data: Path, tmp_path: Path) -> tuple[Plan, Path]:
    """A study whose fine-tuning runs are all done and kept."""
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + 0.1 * int(seed) + 0.01 * len(start))
    ledger = Ledger(tmp_path / "kept", plan)
    for run in plan.runs("finetune"):
        with_weights(run)
        assert ledger.keep(run, again=False) == ""
    return plan, tmp_path / "kept"


def test_results_survive_the_directory_of_runs(file: Path, data: Path, tmp_path: Path) -> None:
    plan, kept = a_ledger(file, data, tmp_path)
    other = Ledger(tmp_path / "other", plan)
    for run in plan.runs("finetune"):
        other.keep(run, again=False)
    for path in kept.iterdir():  # the same content makes the same file
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()
        names = zipfile.ZipFile(path).namelist()
        assert names == [
            "config.json",
            "key",
            "log.jsonl",
            "model.sha256",
            "predictions/valid.npz",
            "result.json",
            "run_manifest.json",
        ]

        assert str(tmp_path).encode() not in zipfile.ZipFile(path).read("config.json")

    def report() -> tuple[str, str, str]:
        again = plan_of(file, tmp_path, data=str(data))
        results = Results(again)
        (plan.root / "x").mkdir()
        write_csv(plan.root / "x/x.csv", results, {})
        table = (plan.root / "x/x.csv").read_text()
        return table, markdown_of(results), html_of(results, {}, plan.root / "x")

    before = report()
    shutil.rmtree(plan.root)
    again = plan_of(file, tmp_path, data=str(data))
    ledger = Ledger(kept, again)
    assert set(ledger.results) == again.wanted
    text = listing(again, Costs(Forecast(again), ledger.results), ledger.results)
    assert "11 jobs, 0 to do, everything is done" in text
    assert not plan.root.exists()  # a dry run writes nothing
    run, empty, *_ = again.runs("finetune")
    (run.path / "checkpoints").mkdir(parents=True)  # a run that has begun here goes on
    empty.path.mkdir()
    ledger = Ledger(kept, again)
    assert run.key not in ledger.results
    ledger.unpack()
    assert not run.done
    shutil.rmtree(run.path)
    both = Ledger(kept, again), Ledger(kept, again)  # of two studies that begin at once
    both[0].unpack()
    both[1].unpack()
    assert report() == before
    assert all(run.done and not run.whole for run in again.runs("finetune"))
    assert not to_do(again.jobs.values(), again.wanted)
    Ledger(tmp_path / "third", again).keep(run, again=False)  # this also works for an unpacked run
    assert file_checksum(tmp_path / f"third/{run.key}.zip") == file_checksum(
        kept / f"{run.key}.zip"
    )


def test_a_run_without_weights_is_made_again(file: Path, data: Path, tmp_path: Path) -> None:
    plan, kept = a_ledger(file, data, tmp_path)
    shutil.rmtree(plan.root)
    ledger = Ledger(kept, plan)
    ledger.unpack()
    run = plan.runs("finetune")[0]
    assert run.done
    prepare(run)
    assert not run.path.exists()  # training needs an absent directory
    assert (
        sorted(p.name for p in run.path.parent.glob(f"*{run.key}*"))
        == [run.key, f"{run.key}.toml"][1:]
    )
    finish_one = {"metrics": {"test": {"accuracy": 0.5}}, "seconds": 2.0}
    run.path.mkdir()
    write_json(run.proof, finish_one)
    with_weights(run)
    before = (kept / f"{run.key}.zip").read_bytes()
    zip_ = kept / f"{run.key}.zip"
    line = ledger.keep(run, again=True)
    assert line == f"{run.name}: made again, with the weights that {zip_} records"
    (run.path / "checkpoints/step_4/model.safetensors").write_bytes(b"others")
    line = ledger.keep(run, again=True)
    assert f"{run.name}: made again, with other weights than {zip_} records: " in line
    assert (kept / f"{run.key}.zip").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "is damaged"),
        ("flip", "is damaged"),
        ("empty", "is damaged"),
        ("../x", "a file of the name '../x'"),
        ("/x", "a file of the name '/x'"),
        ("a/../../x", "a file of the name"),
        (".lock", "a file of the name '.lock'"),
        ("a\\b", "a file of the name"),
        ("no result", "it holds no result.json"),
        ("another", "it holds the job "),
        ("no log", "it holds no log.jsonl"),
        ("edited", "its config.json is not as the run wrote it"),
    ],
)
def test_a_damaged_file_of_a_ledger_is_named(
    file: Path, data: Path, tmp_path: Path, damage: str, words: str
) -> None:
    plan, kept = a_ledger(file, data, tmp_path)
    shutil.rmtree(plan.root)
    path = sorted(kept.iterdir())[2]
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-30])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flip":
        content[60] ^= 255
        path.write_bytes(content)
    elif damage == "another":
        path.write_bytes(sorted(kept.iterdir())[1].read_bytes())
    elif damage in ("no log", "edited"):
        with zipfile.ZipFile(path) as whole:
            members = {name: whole.read(name) for name in whole.namelist()}
        members |= {"config.json": b"{}"} if damage == "edited" else {}
        sums = {"config.json": "0" * 64} if damage == "edited" else {"log.jsonl": "0" * 64}
        members["run_manifest.json"] = json.dumps({"sha256": sums}).encode()
        members.pop("log.jsonl")
        with zipfile.ZipFile(path, "w") as changed_:
            for name, value in members.items():
                changed_.writestr(name, value)
    else:
        with zipfile.ZipFile(path, "w") as changed_:
            changed_.writestr("config.json" if damage == "no result" else damage, "x")
    with pytest.raises(BadInput, match=re.escape(words)) as error:
        Ledger(kept, plan)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not plan.root.exists()


def test_a_kill_leaves_no_half_of_a_kept_run(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, kept = a_ledger(file, data, tmp_path)
    shutil.rmtree(plan.root)
    write = Path.write_bytes

    def dies(path: Path, content: Any) -> int:
        if path.name == "result.json":
            raise KeyboardInterrupt
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", dies)
    with pytest.raises(KeyboardInterrupt):
        Ledger(kept, plan).unpack()
    assert not list((plan.root / "runs").iterdir())
    monkeypatch.undo()
    Ledger(kept, plan).unpack()
    assert all(run.done for run in plan.runs("finetune"))


def test_only_pictures_that_the_report_shows_are_kept(
    file: Path, data: Path, tmp_path: Path
) -> None:
    """Of the runs at a picture's levels the report shows the first that is finished."""
    stage = """
[stages.look]
command = ["-c", "1", "{seed}", "{side}", "{out}"]
result = "look.json"
vary.seed = [0, 1]
vary.side.left = {}
vary.side.right = {}
[[pictures]]
name = "look"
title = "Look"
stage = "look"
file = "look.svg"
where = { side = "right" }
[[tables]]"""
    file.write_text(STUDY.replace("[[tables]]", stage, 1))
    plan = plan_of(file, tmp_path, data=str(data))
    ledger = Ledger(tmp_path / "kept", plan)
    for job in plan.runs("look"):
        job.path.mkdir(parents=True)
        job.proof.write_text('{"metrics": {}}')
    (plan.runs("look")[0].path / "look.svg").write_text("<svg/>")  # at another level
    for job in plan.runs("look", {"side": "right"}):
        (job.path / "look.svg").write_text("<svg/>")
    for job in plan.jobs.values():  # as a study keeps them
        if job.stage == "look":
            ledger.keep(job, again=False)
    with_picture = [
        (job.levels["seed"], job.levels["side"])
        for job in plan.runs("look")
        if "look.svg" in zipfile.ZipFile(tmp_path / f"kept/{job.key}.zip").namelist()
    ]
    assert with_picture == [("0", "right")]


def test_what_a_command_left_is_kept(file: Path, data: Path, tmp_path: Path) -> None:
    """Its result and the pictures that the study shows are kept. If another job needs more, the
    command runs again."""
    file.write_text(
        STUDY.replace(
            "[[tables]]",
            """
[stages.look]
command = ["-c", "1", "{made.task}", "{out}"]
result = "look.json"
[stages.more]
command = ["-c", "2", "{stage.look}", "{out}"]
[[pictures]]
name = "look"
title = "Look"
stage = "look"
file = "look.svg"
[[pictures]]
name = "more"
title = "More"
stage = "more"
file = "x.svg"
[[tables]]""",
            1,
        )
    )
    plan = plan_of(file, tmp_path, data=str(data))
    (look,), (more,) = plan.runs("look"), plan.runs("more")
    look.path.mkdir(parents=True)
    look.proof.write_text('{"metrics": {}}')
    os.utime(look.proof, (1_000_000_000,) * 2)
    for name in ("look.svg", "look-dark.svg", "large.h5"):
        (look.path / name).write_text("<svg/>")
    assert look.whole
    log_of(look).write_text("a line\nwarning: too few rows\n")
    Ledger(tmp_path / "kept", plan).keep(look, again=False)
    shutil.rmtree(plan.root)
    Ledger(tmp_path / "kept", plan).unpack()
    assert warnings_of(look) == ["warning: too few rows"]
    assert sorted(path.name for path in look.path.iterdir() if path.name[0] != ".") == [
        "ended.txt",
        "key",
        "look-dark.svg",
        "look.json",
        "look.svg",
        "warnings.txt",
    ]
    assert look.done
    assert look.proof.stat().st_mtime == 1_000_000_000
    assert not look.whole
    assert look.key in to_do(plan.jobs.values(), [more.key])
    prepare(look)
    assert not list(look.path.iterdir())


def test_the_time_left_is_known_without_a_store(file: Path, data: Path, tmp_path: Path) -> None:
    """It is estimated from finished runs of the same stage, here or in a ledger."""
    plan, kept = a_ledger(file, data, tmp_path)
    shutil.rmtree(plan.root)
    changed(file, ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2]"))
    more = plan_of(file, tmp_path, data=str(data))
    ledger = Ledger(kept, more)
    assert Costs(Forecast(more)).seconds(more.runs("finetune")[-1]) is None
    costs = Costs(Forecast(more), ledger.results)
    new = [run for run in more.runs("finetune") if run.levels["seed"] == "2"]
    assert [costs.seconds(run) for run in new] == [3.0] * 4
    text = listing(more, costs, ledger.results, 2)
    assert "about 12 s of work for 4 of them, 6 s with 2 at once" in text
    assert len(re.findall("to do", text)) == 1 + 3 + 4
    assert len(re.findall("  there  ", text)) == 8


def test_a_long_job_does_not_use_up_the_time_of_the_others(file: Path, tmp_path: Path) -> None:
    with StudyProgress(plan_of(file, tmp_path), slots=1, keep=lambda *_: "") as progress:
        progress.seconds = dict.fromkeys(list(progress.open)[:3], 100.0)
        progress.ended = time.monotonic() - 60.0
        assert progress.left() == pytest.approx(240.0, abs=5.0)
        progress.ended = time.monotonic() - 1000.0
        assert progress.left() == pytest.approx(200.0)
        progress.looked, progress.estimated = time.monotonic() - 61.0, time.monotonic() - 301.0
        progress.show({})  # estimated again, from the costs of the plan
        assert progress.seconds.keys() == progress.open.keys()


@pytest.mark.slow
def test_a_study_that_is_killed_loses_nothing(
    forks: Forks, file: Path, data: Path, tmp_path: Path
) -> None:
    """First only the study is killed, and its run goes on. Then all its processes are killed."""
    changed(
        file,
        ("vary.seed = [0, 1]", "vary.seed = [0]"),
        ("steps = 4 }", "steps = 60, checkpoint_every = 10, log_every = 10 }"),
        ("[scales.mini]", "[scales.mini]\nlevels.rate = ['low']"),
    )
    line = [
        "-m",
        "xformer.study",
        str(file),
        "scale=mini",
        f"needs.data={data}",
        "jobs=2",
        f"output={tmp_path / 'studies'}",
        f"kept={tmp_path / 'kept'}",
    ]
    plan = plan_of(file, tmp_path, data=str(data))
    checkpoints = plan.runs("pretrain")[0].path / "checkpoints"
    for number, kill in enumerate((os.kill, os.killpg), 1):
        fork = forks.start(*line, before="import os; os.setsid()")
        while not any(int(path.name[5:]) > 20 * number for path in checkpoints.glob("step_*")):
            time.sleep(0.01)
        kill(fork.pids[0], signal.SIGKILL)
        assert fork.wait().status == -signal.SIGKILL
    good(forks.run(*line))
    for path in (tmp_path / "kept").glob("*.zip"):
        kept = zipfile.ZipFile(path)
        run = tmp_path / "whole" / path.stem  # one that was never stopped
        good(forks.run("train.py", tmp_path / f"studies/runs/{path.stem}.toml", f"run={run}"))
        scores = (
            json.loads(text)["metrics"]
            for text in (kept.read("result.json"), (run / "result.json").read_text())
        )
        assert next(scores) == next(scores)
        digest, name = kept.read("model.sha256").decode().split()
        assert file_checksum(run / name) == digest
    assert len(list((tmp_path / "kept").glob("*.zip"))) == 3


# ------------------------------------------------------------------------------- the statistics


def test_paired_differences_are_scipys() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(1, 1, 7), rng.normal(0, 1, 7)
    difference = paired_test(list(a), list(b), 0.25)
    theirs = stats.ttest_1samp(a - b, 0.25)
    assert difference.mean == pytest.approx((a - b).mean())
    assert difference.p == pytest.approx(theirs.pvalue)
    low, high = stats.ttest_1samp(a - b, 0).confidence_interval(0.95)
    assert difference.half is not None
    ends = (difference.mean - difference.half, difference.mean + difference.half)
    assert ends == pytest.approx((low, high))
    assert paired_test([2.0], [1.0]).p is None
    assert paired_test([2.0, 3.0], [1.0, 2.0]).p is None  # without any spread there is no test
    assert paired_test([80.1, 80.3], [80.0, 80.2], -3.0).p is None


def test_holm_steps_down() -> None:
    # written out by Holm's rule: 3 * .01, then 2 * .03, then max of that and 1 * .04
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_summary_shows_all_there_is() -> None:
    few = [0.5, 0.7, 0.9, 0.6]
    assert (sample_of(few).mean, sample_of(few).median) == pytest.approx((0.675, 0.65))
    for scores in (few, [*few, 0.4, 0.8, 0.65, 0.55, 0.3]):
        sample = sample_of(scores)
        assert sample.deviation == pytest.approx(np.std(scores, ddof=1))
        student = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
        assert sample.interval == pytest.approx(student)
    assert sample_of([0.5]).deviation is None
    assert sample_of([0.5, 0.5, 0.5]).interval is None


# ----------------------------------------------------------------------------------- the report


def finish(plan: Plan, accuracy: Any) -> None:
    """Write results for all runs of the stage finetune, as training would."""
    for run in plan.runs("finetune"):
        score = accuracy(**run.levels)
        if score is not None:
            run.path.mkdir(parents=True)
            metrics = {"test": {"accuracy": score, "f1": 0.0}}
            run.proof.write_text(json.dumps({"metrics": metrics, "seconds": 2.0}))


def test_tables_and_verdicts(file: Path, data: Path, tmp_path: Path) -> None:
    changed(file, ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3]"))

    def accuracy(seed: str, start: str, rate: str) -> float:
        noise = 0.001 * int(seed) * (2 if rate == "low" else 1)
        return 0.5 + noise + (0.1 + noise if start == "pretrained" else 0.0)

    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, accuracy)
    results = Results(plan)
    cells = results.cells(plan.study.tables[0])
    assert [[cell.column for cell in row] for row in cells] == [["low", "high"]] * 2
    low = cells[0][0]
    assert low.sample is not None
    assert low.sample.scores == pytest.approx((60.0, 60.4, 60.8, 61.2))
    assert (low.published, low.difference) == pytest.approx((50.0, 10.6))
    # "scratch" is compared with the paper's "none"
    assert [cell.published for cell in cells[1]] == [50.0, None]
    verdict = verdicts(results)[0]
    assert verdict.state == "holds"
    assert [part[0] for part in verdict.parts] == ["low", "high"]
    ps = [
        paired_test(*pair).p
        for pair in (
            ([60.0, 60.4, 60.8, 61.2], [50.0, 50.2, 50.4, 50.6]),
            ([60.0, 60.2, 60.4, 60.6], [50.0, 50.1, 50.2, 50.3]),
        )
    ]
    assert [part[2] for part in verdict.parts] == pytest.approx(holm([p for p in ps if p]))

    text = markdown_of(results)
    assert "| pretrained | 60.6 ± 0.5 (4)<br>50 (+10.6) | 60.3 ± 0.3 (4)<br>99 (-38.7) |" in text
    assert "| pre-training helps at every rate | **holds** | low +10.3 ± 0.4" in text
    write_csv(tmp_path / "x.csv", results, {})
    with (tmp_path / "x.csv").open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["stage"] == "finetune"]
    assert len(rows) == 2 * 16
    assert {"seed", "start", "rate", "key", "split", "metric", "value"} < set(rows[0])


def test_a_run_that_two_stages_share_is_listed_under_both(
    file: Path, data: Path, tmp_path: Path
) -> None:
    text = file.read_text()
    stage = text[text.index("[stages.finetune]") : text.index("[[tables]]")]
    stage = stage.replace("finetune]", "twin]")
    stage = stage.replace("vary.seed = [0, 1]", "vary.draw.1 = { seed = 1 }")
    table = text[text.index("[[tables]]") : text.index("[tables.published]")]
    table = table.replace("main", "other").replace('"finetune"', '"twin"')
    plan = plan_of(changed(file, ("[[claims]]", f"{stage}{table}[[claims]]")), tmp_path)
    shared = {job.key for job in plan.runs("finetune", {"seed": "1"})}
    assert shared == {job.key for job in plan.runs("twin", {"draw": "1"})}
    finish(plan, lambda seed, start, rate: 0.5)
    write_csv(tmp_path / "x.csv", Results(plan), {})
    with (tmp_path / "x.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["key"] in shared]
    assert Counter((row["stage"], row["seed"], row["draw"]) for row in rows) == {
        ("finetune", "1", ""): 8,
        ("twin", "", "1"): 8,
    }
    assert {row["run"] for row in rows} > {"twin draw=1 start=scratch rate=low"}


def test_claims_that_are_removed_leave_nothing(file: Path, data: Path, tmp_path: Path) -> None:
    """Neither beside the report nor in the kept results."""
    for there in (True, False):
        plan = plan_of(file, tmp_path, data=str(data))
        plan.kept, directory = tmp_path / "kept", plan.root / "letters-mini"
        directory.mkdir(parents=True, exist_ok=True)
        if there:
            finish(plan, lambda seed, start, rate: 0.5 + 0.1 * int(seed))
        write_report(Results(plan), {}, directory)
        kept = plan.kept / "letters-mini.claims.json"
        assert [(directory / "claims.json").exists(), kept.exists()] == [there, there]
        file.write_text(re.sub(r"\[\[claims\]\].*?\n\n", "", file.read_text(), flags=re.DOTALL))


def test_the_headline_is_a_picture_and_a_few_lines(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the first column: every score, the mean and its interval, and the verdicts."""
    tested: list[str] = []
    test = claims._verdict

    def counted(results: Results, claim: Claim, table: ScoreTable) -> claims.Verdict:
        tested.append(claim.text)
        return test(results, claim, table)

    monkeypatch.setattr(claims, "_verdict", counted)
    curves = "[[curves]]\nname = 'loss'\ntitle = 'The loss'\nstage = 'finetune'\n"
    curves += "panels = 'rate'\nlines = 'rate'\nvalidation = 'accuracy'\n"
    named = HEADLINE.replace("[headline.labels]", "curves = 'loss'\n[headline.labels]")
    changed(file, ("[[claims]]", curves + named))
    plan = plan_of(file, tmp_path, data=str(data))
    directory = plan.root / "letters-mini"
    directory.mkdir(parents=True)
    assert "In one picture" not in markdown_of(Results(plan))  # as long as no run is finished
    for ending in ("png", "svg", "pdf"):
        (directory / f"headline.{ending}").write_bytes(b"of earlier runs")
    assert "\n  no scores yet\n" in write_report(Results(plan), {}, directory)
    assert not [*directory.glob("headline.*")]
    finish(plan, lambda seed, start, rate: 0.5 + 0.1 * (start == "pretrained") + 0.01 * int(seed))
    for run in plan.runs("finetune"):
        log = [{"event": "train", "step": i, "loss": 2.0 - i} for i in (0, 1)]
        log.append({"event": "validation", "step": 1, "accuracy": 0.7})
        (run.path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
    tested.clear()
    printed = write_report(Results(plan), {}, directory)
    assert len(tested) == 1  # looking up the commits of claims takes seconds
    assert printed.splitlines() == [
        "Does it help to know letters? accuracy on test, rate low, mean and 95% interval:",
        "  pretrained                                    60.5  (60.0, 61.0; 2 seeds)",
        "  from scratch                                  50.5  (50.0, 51.0; 2 seeds)",
        "Claims of the study, by paired t tests over seeds:",
        "  undecided  pre-training helps at every rate: low +10.0 (seeds: +10.0, +10.0) (no "
        "spread); high +10.0 (seeds: +10.0, +10.0) (no spread)",
    ]
    assert "by rate" not in (directory / "loss.svg").read_text()  # one panel needs no name
    for name in ("loss.pdf", "headline.pdf", "table-main.pdf"):
        assert (directory / name).read_bytes().startswith(b"%PDF"), name
    assert (directory / "headline.png").stat().st_size > 10_000
    svg = (directory / "headline.svg").read_text()
    for words in ("Does it help to know letters?", "scratch", "pretrained", "The loss", "60.5"):
        assert words in svg, words
    assert svg.count('<use xlink:href="#') >= 4  # a dot for each score
    text = (directory / "report.md").read_text()
    assert text.index("In one picture") < text.index("claims")
    plan.runs("finetune", {"seed": "1", "start": "scratch"})[0].proof.unlink()
    assert plan.study.headline is not None
    left, right = headline.draw(Results(plan), plan.study.headline).axes
    assert left.get_ylabel() == "loss and accuracy"
    labels = [f"{kind} {rate}" for kind in ("training", "validation") for rate in ("low", "high")]
    assert [line.get_label() for line in left.lines] == labels
    assert "dots: 1 or 2 seeds" in right.get_xlabel()


MORE = """
[stages.base]
recipe = "{ROOT}/recipes/finetune/classify.toml"
settings.data = "{made.task}"
settings.init = "{stage.pretrain}"
vary.seed = [0, 1]

[[tables]]
name = "gain"
title = "Gain"
stage = "finetune"
rows = "start"
columns = "rate"
minus = "base"
percent = false
means.both = ["low", "high"]
where.seed = "1"
[[tables]]
name = "spread"
title = "Spread"
stage = "finetune"
rows = "start"
columns = "rate"
show = "deviation"
[[tables]]
name = "losses"
title = "Losses"
stage = "finetune"
rows = "start"
columns = "metric"
metric = { training = "train.loss", test = "test.accuracy" }
percent = false

[[summaries]]
title = "Of the gains"
table = "gain"
by = "start"
[summaries.published]
source = "Nobody 2026"
columns = ["count", "mean"]
rows.none = [2.0, -0.125]

[[curves]]
name = "loss"
title = "The loss"
stage = "finetune"
panels = "rate"
lines = "start"
validation = "accuracy"

[[claims]]
text = "pre-training ends at a lower loss"
table = "losses"
better = { start = "scratch", metric = "training" }
than = { start = "pretrained", metric = "training" }

[scales.mini]"""


def test_differences_deviations_means_summaries_and_curves(
    file: Path, data: Path, tmp_path: Path
) -> None:
    changed(file, ("\n[scales.mini]", MORE.replace("{ROOT}", str(ROOT))))
    plan = plan_of(file, tmp_path, data=str(data))
    scores = {"pretrained": {"low": 0.75, "high": 0.5}, "scratch": {"low": 0.25, "high": 0.25}}
    finish(plan, lambda seed, start, rate: scores[start][rate] + 0.25 * int(seed))
    for run in plan.runs("base"):
        run.path.mkdir()
        content = {"metrics": {"accuracy": 0.5 + 0.125 * int(run.levels["seed"])}, "split": "test"}
        run.proof.write_text(json.dumps(content))
    for run in plan.runs("finetune") + plan.runs("base"):
        loss = 1.0 + (run.levels.get("start") == "scratch") + 0.5 * int(run.levels["seed"])
        lines = [
            {"event": "train", "step": 5, "loss": 3.0},
            {"event": "validation", "step": 5, "accuracy": 0.5},
            {"event": "train", "step": 10, "loss": loss},
        ]
        (run.path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    results = Results(plan)
    tables = {table.name: results.cells(table) for table in plan.study.tables}
    gains = [[cell.value for cell in row] for row in tables["gain"]]  # minus 0.625 at seed 1
    assert gains == [[0.375, 0.125, 0.25], [-0.125, -0.125, -0.125]]
    assert tables["spread"][0][0].value == pytest.approx(np.std([75, 100], ddof=1))
    assert [[cell.value for cell in row] for row in tables["losses"]] == [
        [1.25, 0.75],
        [2.25, 0.375],
    ]
    last = verdicts(results)[-1]
    assert last.state == "undecided"  # both seeds differ by the same amount, so there is no spread
    assert "+1.000" in markdown_of(results)
    statistics = results.statistics(plan.study.summaries[0])
    assert list(statistics["pretrained"].values()) == pytest.approx(
        [2, 0.25, np.std([0.375, 0.125], ddof=1), 0.125, 0.1875, 0.25, 0.3125, 0.375]
    )
    panels = results.panels(plan.study.curves[0])
    assert [(panel.name, panel.value) for panel in panels] == [
        ("low", "loss"),
        ("high", "loss"),
        ("low", "validation accuracy"),
        ("high", "validation accuracy"),
    ]
    line = panels[0].lines[1]
    assert (line.name, line.runs, line.x, line.mean) == ("scratch", 2, [5.0, 10.0], [3.0, 2.25])
    directory = plan.root / "letters-mini"
    directory.mkdir()
    text = html_of(results, {}, directory)
    assert text.count("<svg") >= 3 + 1 + 8  # for the tables of means, the curves, and each run
    assert "published -0.125" in text
    assert "the split test, unless the metric names another: mean" in text
    assert re.search(r"\| scratch \| 2<br>2 \| \S+<br>-0.125 \| [\d.]+ \|", markdown_of(results))


@pytest.mark.usefixtures("data")
def test_rows_that_are_numbers_become_the_axis_of_a_tables_figure(
    file: Path, tmp_path: Path
) -> None:
    """The report shows the figure, which is a file of its own. Two numbers do not make an axis."""
    changed(
        file,
        ("vary.rate.low", "vary.rate.10"),
        ("vary.rate.high", "vary.rate.20"),
        ('rows = "start"\ncolumns = "rate"', 'rows = "rate"\ncolumns = "start"'),
        ('rows.pretrained = [50.0, 99.0]\nrows.none = [50.0, ""]', "rows.10 = [50.0, 40.0]"),
        ('columns = ["low", "high"]', 'columns = ["pretrained", "none"]'),
    )
    for levels, across, group in ((3, "rate", "scratch"), (2, "start", "20")):
        if levels == 3:
            changed(file, ("vary.rate.20", "vary.rate.40 = { optim.lr = 1e-4 }\nvary.rate.20"))
        else:
            changed(file, ("vary.rate.40 = { optim.lr = 1e-4 }\n", ""))
        plan = plan_of(file, tmp_path / str(levels), data=str(tmp_path / "data"))
        finish(plan, lambda seed, start, rate: 0.5 + 0.01 * int(rate) * (start == "pretrained"))
        directory = plan.root / "letters-mini"
        directory.mkdir()
        write_report(Results(plan), {}, directory)
        assert "![Accuracy](table-main.svg)" in (directory / "report.md").read_text()
        drawing = ElementTree.parse(directory / "table-main.svg")
        every = drawing.iter("{http://www.w3.org/2000/svg}text")
        texts = ["".join(text.itertext()).strip() for text in every]
        assert across in texts  # the label of the axis
        assert texts.index(across) < texts.index(group)  # the legend comes last


def test_huangs_summaries_are_of_huangs_differences() -> None:
    """Figures 7 to 10 give statistics of the differences in figures 5 and 6, up to rounding.

    Two numbers of figure 10 do not agree: the count, and one misprinted cell.
    """
    study = read_study(ROOT / "recipes/studies/huang2021-heads.toml", "paper")
    tables = {table.name: table.published for table in study.tables}
    for summary in study.summaries:
        cells, wanted = tables[summary.table], summary.published
        assert cells is not None
        assert wanted is not None
        far = []
        for level in wanted.rows:
            numbers = [
                float(x)
                for x in (
                    cells.rows[level]
                    if summary.by == "layer"
                    else [row[cells.columns.index(level)] for row in cells.rows.values()]
                )
            ]
            for name, value in statistics_of(numbers).items():
                number = wanted.number(level, name)
                assert value is not None
                assert number is not None
                if abs(value - number) > 0.0016:
                    far.append((level, name))
        assert len(far) <= 2, (summary.title, far)


def test_studies_share_runs(tmp_path: Path) -> None:
    def keys(name: str) -> dict[str, str]:
        plan = plan_of(ROOT / f"recipes/studies/{name}.toml", tmp_path)
        return {job.key: job.levels.get("fraction", "") for job in plan.jobs.values() if job.stage}

    whole, part = keys("kao2021-figure2"), keys("kao2021-one-percent")
    assert {part[key] for key in part.keys() & whole.keys()} == {"all"}
    assert {part[key] for key in part.keys() - whole.keys()} <= {"one", "all"}


def test_stages_of_one_study_share_runs(file: Path, data: Path, tmp_path: Path) -> None:
    """A run that two stages ask for is made once. It counts in both, at the levels of each."""
    more = (
        f'[stages.again]\nrecipe = "{ROOT}/recipes/finetune/classify.toml"\n'
        'settings = {data = "{made.task}", init = "{stage.pretrain}", train = {epochs = 1}, '
        'optim = {lr = 1e-5}, system = {precision = "fp32"}}\n'
        "vary.seed = [0, 1]\nvary.what.same = {}\n"
        '[[tables]]\nname = "again"\ntitle = "Again"\nstage = "again"\nrows = "what"\n'
        'columns = "seed"\n[[tables]]'
    )
    text = file.read_text()
    file.write_text(text.replace("[[tables]]", more, 1))
    plan = plan_of(file, tmp_path, data=str(data))
    runs, again = plan.runs("finetune"), plan.runs("again")
    low = {run.key for run in runs if run.levels["start"] + run.levels["rate"] == "pretrainedlow"}
    assert {run.key for run in again} == low
    assert [run.levels for run in again] == [{"seed": s, "what": "same"} for s in ("0", "1")]
    finish(plan, lambda seed, start, rate: 0.5 + 0.1 * int(seed))
    results = Results(plan)
    assert [cell.value for cell in results.cells(plan.study.tables[0])[0]] == [50.0, 60.0]
    # a run is wanted only if one of its names has all levels
    more = more.replace("vary.what.same", "vary.start.other").replace(
        'rows = "what"', 'rows = "start"'
    )
    file.write_text(text.replace("[[tables]]", more, 1))
    plan = plan_of(file, tmp_path, data=str(data))
    plan.restrict({"start": ["pretrained"], "rate": ["high"], "seed": ["0"]})
    wanted = {"start": "pretrained", "rate": "high", "seed": "0"}
    assert plan.wanted & {run.key for run in plan.runs("finetune", wanted)}
    assert not plan.wanted & low


def test_a_part_of_a_study_is_run(file: Path, data: Path, tmp_path: Path) -> None:
    plan = plan_of(file, tmp_path, data=str(data))
    plan.restrict({"start": ["scratch"], "seed": ["1"]})
    todo = to_do(plan.jobs.values(), plan.wanted)
    assert {job.name for job in todo.values() if job.stage == "finetune"} == {
        f"finetune seed=1 start=scratch rate={rate}" for rate in ("low", "high")
    }
    assert any(job.stage == "pretrain" for job in todo.values())  # they wait for it
    for only, words in (
        ({"begin": ["x"]}, "only.begin: .* has no such factor"),
        ({"start": ["scratched"]}, "only.start=scratched: its levels are pretrained, scratch"),
        ({"start": []}, r"only.start=\[\] leaves nothing to run"),
        ({"rate": ["low"], "seed": ["7"]}, "only.seed=7: its levels are 0, 1"),
        (
            {"start": ["[pretrained,scratch]"]},
            r"only\.start=\[pretrained,scratch\].*; for several, write",
        ),
    ):
        with pytest.raises(BadInput, match=words):
            plan.restrict(only)


def test_a_need_may_be_installed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """micro/NAME is the checkpoint in the package, unless such a path exists."""
    changed(file, ('get = "write it"', 'get = "write it"\npath = "micro/letters"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xformer.data.files.PACKAGE", tmp_path / "package")
    assert "data" in plan_of(file, tmp_path).missing()
    (tmp_path / "package/micro/letters").mkdir(parents=True)
    for name in ("train.txt", "valid.txt", "x.tsv"):
        (tmp_path / "package/micro/letters" / name).write_text("ACGT")
    plan = plan_of(file, tmp_path)
    assert not plan.missing()
    made = next(job for job in plan.jobs.values() if job.name == "made.letters")
    assert f"{tmp_path}/package/micro/letters/train.txt" in made.command


def test_a_need_may_be_a_glob(file: Path, data: Path, tmp_path: Path) -> None:
    """Its directory must exist. The content of the directory belongs to the key."""
    changed(file, ("{need.data}/train.txt", "{need.data}/t*.txt"))
    assert "made.letters" in {w.name for w in plan_of(file, tmp_path).jobs.values() if w.missing}
    keys = []
    for _ in range(2):
        plan = plan_of(file, tmp_path, data=str(data))
        made = next(job for job in plan.jobs.values() if job.name == "made.letters")
        assert not made.missing
        assert f"{data}/t*.txt" in made.command
        keys.append(made.key)
        (data / "tail.txt").write_text("ACGT")
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [
        (0.2, 0.0, "undecided"),
        (0.2, -0.2, "fails"),
        (0.2, None, "undecided"),
        (-0.2, None, "undecided"),
    ],
)
def test_a_claim_may_fail_or_stay_open(
    file: Path, data: Path, tmp_path: Path, low: float, high: float | None, state: str
) -> None:
    changed(file, ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3]"))
    plan = plan_of(file, tmp_path, data=str(data))

    def accuracy(seed: str, start: str, rate: str) -> float | None:
        gain = high if rate == "high" else low
        if gain is None:
            return None  # the runs of one rate are not finished yet
        wobble = 0.01 * (-1) ** int(seed)
        return 0.5 + (gain + wobble if start == "pretrained" else 0.0)

    finish(plan, accuracy)
    verdict = verdicts(Results(plan))[0]
    assert verdict.state == state
    if high is None:  # more seeds of the other rate would decide nothing
        assert verdict.needed == ""


def test_a_claim_may_compare_what_its_table_leaves_out(
    file: Path, data: Path, tmp_path: Path
) -> None:
    """The levels of a claim's sides take the place of the table's `where`."""
    changed(
        file,
        ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2, 3]"),
        (
            'rows = "start"\ncolumns = "rate"',
            'rows = "rate"\ncolumns = "metric"\nmetric.x = "accuracy"\nwhere.start = "pretrained"',
        ),
        ('better.start = "pretrained"', 'better = { start = "pretrained", metric = "x" }'),
        ('than.start = "scratch"', 'than = { start = "scratch", metric = "x" }'),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + 0.01 * int(seed) * (1 + (start != "scratch")))
    means = [difference.mean for _, difference, _ in verdicts(Results(plan))[0].parts]
    assert means == pytest.approx([1.5, 1.5])


def test_a_claim_may_name_a_mean_of_columns(file: Path, data: Path, tmp_path: Path) -> None:
    """Every column has the same weight, however many runs it has. A seed counts if it has them
    all."""
    draws = "vary.draw = { a = {}, b = { optim.warmup = 1 } }"
    changed(
        file,
        ("vary.seed = [0, 1]", f"vary.seed = [0, 1, 2, 3]\n{draws}"),
        ("vary.rate.low", 'without = [{ rate = "high", draw = "b" }]\nvary.rate.low'),
        ("vary.rate.high", "vary.rate.middle = { optim.lr = 1e-4 }\nvary.rate.high"),
        ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]'),
        ('rows.none = [50.0, ""]', "rows.none = [40.0, 79.0]"),
        ('better.start = "pretrained"', 'better = { start = "pretrained", rate = "both" }'),
        ('than.start = "scratch"\neach = "rate"', 'than = { start = "scratch", rate = "both" }'),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    gains = {"low": 0.1, "high": 0.2, "middle": 0.4}

    def accuracy(seed: str, start: str, rate: str, draw: str) -> float | None:
        if seed == "3" and rate == "high":
            return None
        return 0.3 + (gains[rate] + 0.01 * int(seed)) * (start == "pretrained")

    finish(plan, accuracy)
    results = Results(plan)
    (verdict,) = verdicts(results)
    ((_, difference, _),) = verdict.parts
    assert difference.each == pytest.approx([15, 16, 17])
    assert published_difference(results, verdict, "") == pytest.approx((50 + 99 - 40 - 79) / 2)
    table = verdict.table
    printed = {"columns": ("both",), "rows": {"pretrained": (75.0,), "none": (60.0,)}}
    alone = table.model_copy(update={"published": Published(source="x", **printed)})
    assert published_difference(results, replace(verdict, table=alone), "") == 15
    cells = results.cells(plan.study.tables[0])
    assert [cell.column for cell in cells[0]] == ["low", "middle", "high", "both"]
    assert cells[0][3].sample is not None
    assert cells[0][3].sample.scores == pytest.approx((45, 46, 47))
    shares = Shares(results)
    pairs = shares.pairs(verdict.table, *verdict.claim.sides())
    terms = [shares.terms(pair) for pair in pairs.values()]
    assert all(sum(weight for weight, *_ in of_seed) == pytest.approx(0) for of_seed in terms)
    assert sorted(abs(weight) for weight, *_ in terms[0]) == [25] * 4 + [50] * 2


def test_a_claim_may_name_a_mean_of_metrics(file: Path, data: Path, tmp_path: Path) -> None:
    changed(
        file,
        ("vary.seed = [0, 1]", "vary.seed = [0, 1, 2]"),
        (
            'columns = "rate"',
            'columns = "metric"\nmetric = { x = "accuracy", y = "accuracy", z = "f1" }\n'
            'means.both = ["x", "y"]',
        ),
        ('better.start = "pretrained"', 'better = { start = "pretrained", metric = "both" }'),
        ('than.start = "scratch"', 'than = { start = "scratch", metric = "both" }'),
        ('columns = ["low", "high"]', 'columns = ["x", "y"]'),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + 0.01 * int(seed) * (1 + (start == "pretrained")))
    (verdict,) = verdicts(Results(plan))
    assert [part.difference.each for part in verdict.parts] == [pytest.approx([0, 1, 2])] * 2
    assert Sides(Forecast(plan)).words(verdict.claim) == "surgery (none; clean)"


def test_both_sides_of_a_claim_name_the_same_mean(file: Path, tmp_path: Path) -> None:
    changed(
        file,
        ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]'),
        ('better.start = "pretrained"', 'better = { start = "pretrained", rate = "both" }'),
        ('than.start = "scratch"\neach = "rate"', 'than = { start = "scratch", rate = "low" }'),
    )
    with pytest.raises(BadInput, match="the same mean of columns, not both and low"):
        plan_of(file, tmp_path)


def test_a_claim_of_a_mean_needs_the_seeds_of_each_column(file: Path, tmp_path: Path) -> None:
    changed(
        file,
        ("vary.seed = [0, 1]", 'vary.seed = [0, 1]\nwithout = [{ rate = "high", seed = "1" }]'),
        ('columns = "rate"', 'columns = "rate"\nmeans.both = ["low", "high"]'),
        ('better.start = "pretrained"', 'better = { start = "pretrained", rate = "both" }'),
        ('than.start = "scratch"\neach = "rate"', 'than = { start = "scratch", rate = "both" }'),
        (
            "[scales.mini]",
            "[scales.mini.registration]\nseeds.seed = 2\nunit = 'a run'\nextension = 'none'\n"
            "[scales.mini]",
        ),
    )
    with pytest.raises(BadInput, match=r"registration\.seeds\.seed=2, but .* has 1 levels of it"):
        plan_of(file, tmp_path)


def test_a_seed_is_one_replicate(file: Path, data: Path, tmp_path: Path) -> None:
    """Three levels of another factor do not add pairs, in claims, cells and means."""
    depths = "".join(f"\nvary.depth.{x} = {{ optim.warmup = {i} }}" for i, x in enumerate("abc"))
    changed(file, ("vary.seed = [0, 1]", f"vary.seed = [0, 1]{depths}"), ('each = "rate"', ""))
    plan = plan_of(file, tmp_path, data=str(data))
    gain = {
        ("0", "a"): 0.1,
        ("0", "b"): 0.2,
        ("0", "c"): 0.3,
        ("1", "a"): 0.3,
        ("1", "b"): 0.3,
        ("1", "c"): 0.6,
    }
    finish(
        plan,
        lambda seed, start, depth, **_: 0.3 + (gain[seed, depth] if start == "pretrained" else 0.0),
    )
    results = Results(plan)
    difference = verdicts(results)[0].parts[0][1]
    assert difference.p == pytest.approx(stats.ttest_rel([50, 70], [30, 30]).pvalue)
    cell = results.cells(plan.study.tables[0])[0][0]
    assert cell.sample is not None
    assert cell.sample.scores == pytest.approx((50.0, 70.0))
    assert len(cell.runs) == 6
    assert "(number of seeds)" in markdown_of(results)


def test_every_place_in_a_string_is_filled(file: Path, data: Path, tmp_path: Path) -> None:
    """Places may follow other text, and may have a path below a need. The job waits for all of
    them."""
    (data / "sub").mkdir()
    changed(
        file,
        (
            "[[tables]]",
            """[stages.look]
command = ["-c", "1", "data={need.data}/sub", "{made.task}:{made.letters}", "{out}"]
[[pictures]]
name = "p"
title = "p"
stage = "look"
file = "p.svg"
[[tables]]""",
        ),
    )
    plan = plan_of(file, tmp_path, data=str(data))
    (look,) = plan.runs("look")
    made = {
        name: next(w for w in plan.jobs.values() if w.name == f"made.{name}")
        for name in ("task", "letters")
    }
    assert look.command[2] == f"data={data}/sub"
    assert look.command[3] == f"{made['task'].path}:{made['letters'].path}"
    assert set(look.waits) == {job.key for job in made.values()}
    assert not look.missing
    (data / "sub").rmdir()
    (look,) = plan_of(file, tmp_path, data=str(data)).runs("look")
    assert look.missing == ("data",)


def test_a_run_that_another_process_has_is_waited_for(tmp_path: Path) -> None:
    """Such a process belongs to a second study, or to one that was killed and left its runs
    behind."""
    job_ = job(tmp_path, "shared", "1/0")
    shared = replace(job_, path=tmp_path / "run", proof=tmp_path / "run/result.json")
    shared.path.mkdir()
    code = (
        "import fcntl, sys, time; lock = open(sys.argv[1] + '/.lock', 'w');"
        "fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); time.sleep(0.5);"
        "open(sys.argv[1] + '/result.json', 'w').write('{}')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(shared.path)], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert in_use(shared.path)
        outcomes = pool.run_jobs([shared], Local(1, 1), lambda _: None, lambda _: None, 0.01)
    assert outcomes["shared"].state == "there"
    assert not in_use(shared.path)


def test_on_macos_a_job_is_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xformer.study.local.FORKS", False)
    monkeypatch.setattr(
        "xformer.study.local._start_server", lambda _: pytest.fail("there is no server")
    )
    threads = job(tmp_path, "threads", "import os; P.write_text(os.environ['OMP_NUM_THREADS'])")
    handle = Local(1, 3).start(threads, [0])
    handle.join(PATIENCE)
    assert (handle.exitcode, threads.proof.read_text()) == (0, "3")
    fails = job(tmp_path, "fails", "print('why'); raise SystemExit(4)")
    handle = Local(1, 1).start(fails, [0])
    handle.join(PATIENCE)
    assert (handle.exitcode, log_of(fails).read_text()) == (4, "why\n")


def test_gpus_are_those_that_the_process_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert this_machine(0).slots == 2
    local, seen = this_machine(4), []
    for slot in range(4):
        shows = job(
            tmp_path, f"w{slot}", "import os; P.write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
        )
        handle = local.start(shows, [slot])
        handle.join()
        seen.append(shows.proof.read_text())
    assert seen == ["6", "7", "6", "7"]
    assert local.choose([0, 2], 2) == ()  # two processes need two GPUs
    assert local.choose([0, 1, 2], 2) == [0, 1]
    assert local.choose([2, 3], 1) == [2]
    assert local.choose([1], 3) == ()
    assert len(local.choose([1, 2], 3)) == 2  # training says that a rank lacks its GPU
    assert Local(4, 1).choose([0, 2], 2) == [0, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("digests.json", "[]", ""),  # if this file is damaged, only time is lost
        ("digests.json", "{", ""),
        ("result.json", "{}", "has no metrics; delete it"),
        ("result.json", "[]", "has no metrics; delete it"),
        ("result.json", '{"metrics": {}}', "does not say how many seconds"),
    ],
)
def test_damaged_files_of_a_study(
    forks: Forks, file: Path, data: Path, tmp_path: Path, name: str, content: str, words: str
) -> None:
    root = tmp_path / "studies"
    plan = plan_of(file, tmp_path, data=str(data))
    store = plan.runs("pretrain")[0]
    place = store.path if name == "result.json" else root
    place.mkdir(parents=True)
    letters = next(w for w in plan.jobs.values() if w.name == "made.letters")
    letters.path.mkdir(parents=True)
    (letters.path / "store.json").write_text(
        '{"splits": {"train": {"rows": 9, "tokens": 99}}, "tokenizer": {"vocab_size": 9}}'
    )
    (place / name).write_text(content)
    line = [
        "-m",
        "xformer.study",
        str(file),
        "scale=mini",
        f"output={root}",
        f"needs.data={data}",
        "--dry-run",
    ]
    done = forks.run(*line)
    if words:
        refused(done, words)
    else:
        assert "jobs" in good(done).out
    assert (place / name).read_text() == content  # a dry run writes nothing


def test_the_best_stands_beside_the_mean(file: Path, data: Path, tmp_path: Path) -> None:
    """The best value is that of the scored runs, or of all their validations."""
    best = 'columns = "rate"\nsplit = "valid"\nbest = "{}"'
    changed(file, ('columns = "rate"', best.format("epoch")))
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda **_: 0.5)
    for run in plan.runs("finetune"):
        score = 0.5 + 0.1 * int(run.levels["seed"])
        write_json(run.proof, {"metrics": {"valid": {"accuracy": score}}})
        lines = [
            json.dumps({"event": "validation", "step": i, "accuracy": score + 0.02 * i})
            for i in (1, 2, 0)
        ]
        (run.path / "log.jsonl").write_text("\n".join(lines))
    results = Results(plan)
    cell = results.cells(plan.study.tables[0])[0][0]
    assert cell.value == pytest.approx(55.0)
    assert cell.best == pytest.approx(64.0)
    text = markdown_of(results)
    assert "(number of seeds), best validation of any run; then the number" in text
    assert "| pretrained | 55.0 (50.0, 60.0), best 64.0<br>50 (+5.0) |" in text
    changed(file, (best.format("epoch"), best.format("run")))
    study = read_study(file, "mini")
    again = Results(Plan(study, plan.root, {"data": str(data)}))
    assert again.cells(study.tables[0])[0][0].best == pytest.approx(60.0)
    assert "(number of seeds), best run; then the number" in markdown_of(again)
    (plan.runs("finetune")[0].path / "log.jsonl").write_text(
        '{"event": "validation", "step": 1, "accuracy": NaN}'
    )
    with pytest.raises(BadInput, match=r"log\.jsonl: accuracy of a validation is not finite"):
        results.cells(plan.study.tables[0])


def test_a_legend_names_the_factors_that_scores_are_averaged_over(
    file: Path, data: Path, tmp_path: Path
) -> None:
    """Not those with one level per cell: a factor that follows the rows, and a fixed one."""
    plan = plan_of(file, tmp_path, data=str(data))
    assert "each score is a mean over" not in markdown_of(Results(plan))
    changed(
        file,
        (
            "vary.rate.low =",
            "vary.draw.a = { optim.clip = 1.0 }\n"
            "vary.draw.b = { optim.clip = 2.0 }\n"
            "vary.rate.low =",
        ),
    )
    words = "mean ± standard deviation (number of seeds); each score is a mean over draw; then"
    assert words in markdown_of(Results(plan_of(file, tmp_path, data=str(data))))
    changed(file, ('columns = "rate"', 'columns = "rate"\nwhere.draw = "a"'))
    changed(file, ('each = "rate"', 'each = "rate"\nbetter.draw = "a"\nthan.draw = "a"'))
    assert "each score is a mean over" not in markdown_of(
        Results(plan_of(file, tmp_path, data=str(data)))
    )


def test_a_metric_may_be_the_mean_of_two_splits(file: Path, data: Path, tmp_path: Path) -> None:
    changed(file, ('columns = "rate"', 'columns = "rate"\nmetric = "valid+other.accuracy"'))
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda **_: 0.5)
    for run in plan.runs("finetune"):
        splits = {"valid": {"accuracy": 0.5}, "other": {"accuracy": 0.7}}
        write_json(run.proof, {"metrics": splits})
    results = Results(plan)
    assert results.cells(plan.study.tables[0])[0][0].value == pytest.approx(60.0)
    text = html_of(results, {}, plan.root / "x")
    for words in ("100 times the accuracy on the split valid+other:", "accuracy on valid+other, "):
        assert words in text, words
    write_json(plan.runs("finetune")[0].proof, {"metrics": {"valid": {"accuracy": 0.5}}})
    with pytest.raises(BadInput, match=r"has no other\.accuracy; it has valid\.accuracy"):
        Results(plan).cells(plan.study.tables[0])


def test_a_report_spells_commands_as_the_user_does(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a checkout there is no train.py."""
    changed(file, ("[scales.mini]", "[scales.mini]\nnotes = ['See `preprocess.py task dna`.']"))
    results = Results(plan_of(file, tmp_path, data=str(data)))
    assert "\npython train.py " in markdown_of(results)
    monkeypatch.setattr(sys, "argv", ["xformer study"])
    text = markdown_of(results)
    assert "See `xformer preprocess task dna`." in text
    assert "python" not in text
    for name in ("preprocess task", "train"):
        assert f"\nxformer {name} " in text, name


def test_a_score_that_is_not_finite_is_named(file: Path, data: Path, tmp_path: Path) -> None:
    """Otherwise a table would show it, or fail on it."""
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, **_: float("nan") if seed == "1" else 0.5)
    words = r"result\.json: test\.accuracy of finetune seed=1 start=pretrained rate=low is nan"
    with pytest.raises(BadInput, match=words):
        Results(plan)


def test_only_logged_numbers_that_are_shown_must_be_finite(
    file: Path, data: Path, tmp_path: Path
) -> None:
    """The last line of a log may hold the norm of a gradient that was dropped."""
    changed(file, ('columns = "rate"', 'columns = "rate"\nmetric = "train.loss"'))
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda **_: 0.5)
    line = {"event": "train", "step": 1, "loss": 1.5, "grad_norm": float("inf")}
    for run in plan.runs("finetune"):
        (run.path / "log.jsonl").write_text(f"{json.dumps(line)}\n")
    assert "| pretrained | 150" in markdown_of(Results(plan))
    (run.path / "log.jsonl").write_text(f"{json.dumps({**line, 'loss': float('inf')})}\n")
    with pytest.raises(BadInput, match=r"log\.jsonl: train\.loss of finetune .* is inf"):
        Results(plan)


def test_a_metric_that_is_not_there_is_named(file: Path, data: Path, tmp_path: Path) -> None:
    changed(file, ('columns = "rate"', 'columns = "rate"\nmetric = "mcc"'))
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda **_: 0.5)
    results = Results(plan)
    with pytest.raises(BadInput, match=r"no test\.mcc; it has test\.accuracy, test\.f1"):
        results.cells(plan.study.tables[0])


HOSTILE = "<script>document.title = 'taken'</script>\" onload=\"x"


def a_page(file: Path, data: Path, tmp_path: Path) -> tuple[Plan, Path]:
    """report.html of the study, with scores that rise with the seed and the learning rate."""
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + 0.01 * len(start) + 0.1 * (rate == "high"))
    jobs = list(plan.jobs.values())
    outcomes = {jobs[2].key: Outcome(jobs[2], "failed", why=HOSTILE)}
    directory = plan.root / "letters-mini"
    directory.mkdir()
    path = directory / "report.html"
    path.write_text(html_of(Results(plan), outcomes, directory))
    return plan, path


def test_the_page_needs_nothing_and_escapes_all(file: Path, data: Path, tmp_path: Path) -> None:
    title = HOSTILE.replace('"', '\\"')
    changed(
        file,
        ('title = "Letters"', f'title = "{title}"'),
        ('title = "Accuracy"', f'title = "{title}"'),
        ("vary.start.pretrained", f'vary.start."{title}"'),
        ('"pretrained"', f'"{title}"'),
    )
    plan, path = a_page(file, data, tmp_path)
    assert "&lt;script&gt;" in path.read_text().partition("Not done")[2][:3000]
    for i, run in enumerate(plan.runs("finetune")):
        lines = ['{"event": "train", "step": "<script>", "loss": 1}'] * 3
        lines = [*lines, "[" * 10_000] if i else lines
        (run.path / "log.jsonl").write_text("\n".join(lines))
    path.write_text(html_of(Results(plan), {}, path.parent))
    text = path.read_text()
    assert f"<td>{escape(HOSTILE)}" in text  # in the name of a row, and below in that of a run
    assert re.search(rf"<summary>[^<]*{re.escape(str(escape(HOSTILE)))}", text)
    assert text.count("<script>") == 1  # only the page's own script
    assert "&lt;script&gt;document.title" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "@import" not in text


def in_chromium(path: Path, script: str, fragment: str = "") -> str:
    """The page as Chromium shows it after it has run `script`."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    copy = path.with_name("copy.html")
    copy.write_text(path.read_text() + f"<script>{script}</script>")
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync"
    )
    ended = subprocess.run(
        [
            chromium,
            *quiet.split(),
            f"--user-data-dir={path.parent / 'chromium'}",
            "--dump-dom",
            f"file://{copy}{fragment}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.stdout


def test_the_page_in_a_browser(file: Path, data: Path, tmp_path: Path) -> None:
    plan, path = a_page(file, data, tmp_path)
    run = plan.runs("finetune")[0]
    click = "document.querySelectorAll('table')[1].querySelectorAll('th')[2].click();"
    wide = "document.body.append('width ' + (document.documentElement.scrollWidth <= innerWidth))"
    dom = in_chromium(path, click + wide, f"#run-{run.key}")
    # following a link opens its run
    assert re.search(rf'<details id="run-{run.key}" open="">', dom)
    assert "width true" in dom
    rows = re.findall(r"<tr><td>(pretrained|scratch)</td>", dom)
    assert rows == ["pretrained", "scratch"]  # falling: pretrained has the higher score
    dom = in_chromium(path, click + click)
    assert re.findall(r"<tr><td>(pretrained|scratch)</td>", dom) == ["scratch", "pretrained"]


# --------------------------------------------------------------------------------- the command


def test_what_a_command_draws_is_shown(file: Path, data: Path, tmp_path: Path) -> None:
    """Settings become arguments of a command. Its figure is shown in the report, but scripts in the
    figure do not run.
    """
    file.write_text(
        STUDY.replace(
            "[[tables]]",
            """
[stages.look]
command = ["-m", "xformer.analysis", "pwcca", "{first}", "data={made.task}", "out={out}"]
result = "pwcca.json"
settings = { layers = "last", first = "{stage.pretrain}" }
vary.pair.own = { mapping_b = "none", examples = 3 }
[[pictures]]
name = "look"
title = "What was drawn"
stage = "look"
file = "pwcca.svg"
where.pair = "own"
[[tables]]""",
            1,
        )
    )
    plan = plan_of(file, tmp_path, data=str(data))
    (job,) = plan.runs("look")
    pretrained = next(w for w in plan.jobs.values() if w.stage == "pretrain")
    assert job.waits[0] == pretrained.key
    assert job.command[3:4] == (str(pretrained.path),)
    assert job.command[5:] == (f"out={job.path}", "layers=last", "mapping_b=none", "examples=3")
    other = file.read_text().replace("examples = 3", "examples = 4")
    file.write_text(other)
    assert plan_of(file, tmp_path, data=str(data)).runs("look")[0].key != job.key
    finish(plan, lambda **levels: 0.5)
    job.path.mkdir()
    made = f"xformer.analysis pwcca {pretrained.path} out={job.path}"
    job.proof.write_text(json.dumps({"metrics": {"last": {"pwcca": 0.5}}, "made": made}))
    results = Results(plan)
    assert "No finished run has drawn pwcca.svg." in markdown_of(results)
    svg = "<svg><script>alert(1)</script></svg>"
    for name in ("pwcca.svg", "pwcca-dark.svg"):
        (job.path / name).write_text(svg)
    shown = html_of(results, {}, tmp_path)
    assert "What was drawn" in shown
    assert "alert(1)" not in shown
    assert shown.count("data:image/svg+xml;base64,") == 2
    assert "![What was drawn](look.svg)" in markdown_of(results)
    Ledger(tmp_path / "kept", plan).keep(job, again=False)
    kept = json.loads(zipfile.ZipFile(tmp_path / f"kept/{job.key}.zip").read("pwcca.json"))
    names = f"OUTPUT/runs/{pretrained.key} out=OUTPUT/runs/{job.key}"
    assert kept["made"] == f"xformer.analysis pwcca {names}"  # without this machine's directories


@pytest.mark.slow
def test_a_whole_study(forks: Forks, file: Path, data: Path, tmp_path: Path) -> None:
    root = tmp_path / "studies"
    arguments: list[str | Path] = [
        "-m",
        "xformer.study",
        file,
        "scale=mini",
        f"output={root}",
        "jobs=2",
        f"kept={tmp_path / 'kept'}",
    ]
    listed = good(forks.run(*arguments, "--dry-run"))
    assert "missing: data: a directory of DNA; write it; then needs.data=PATH" in listed.out
    assert not root.exists()
    refused(forks.run(*arguments), "nothing can run", "needs.data=PATH")
    refused(forks.run(*arguments, "needs.dat=x"), "has no such need")
    changed(
        file,
        ("vary.seed = [0, 1]", "vary.seed = [0]"),
        ("[scales.mini]", "[scales.mini]\nlevels.rate = ['low']"),
    )
    done = good(command(*arguments, f"needs.data={data}"))
    assert "[5/5]" in done.err
    report = (root / "letters-mini/report.md").read_text()
    assert report in done.out
    assert "**undecided**" in report

    # finished runs are not repeated, and those that are not kept yet are added to the kept results;
    # another seed adds its own runs
    first = min((tmp_path / "kept").glob("*.zip"))
    first.unlink()
    changed(
        file,
        ("vary.seed = [0]", "vary.seed = [0, 1]\nwithout = [{ seed = '1', start = 'scratch' }]"),
    )
    logs = {p: p.stat().st_mtime_ns for p in root.glob("runs/*/log.jsonl")}
    again = good(forks.run(*arguments, f"needs.data={data}"))
    assert len([line for line in again.err.splitlines() if ": done, " in line]) == 1
    assert first.exists()
    assert logs == {p: p.stat().st_mtime_ns for p in logs}
    assert len(list(root.glob("runs/*/log.jsonl"))) == len(logs) + 1
    plan = Plan(read_study(file, "mini"), root, {"data": str(data)})
    costs = Costs(Forecast(plan))
    assert all((costs.seconds(run) or 0) > 1 for run in plan.runs("finetune"))

    # on another machine everything comes from the kept results
    old = root.rename(tmp_path / "old")
    good(forks.run(*arguments, f"needs.data={data}"))
    for path in (old / "letters-mini").iterdir():
        assert path.read_bytes() == (root / "letters-mini" / path.name).read_bytes()
    assert not (root / "made").exists()


STOPS = """
import os, signal, sys, time
saved = D / f"{P.name}.saved"
def stop(*_):
    saved.touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if saved.exists():
    P.touch()
else:
    (D / f"{P.name}.new").write_text(os.environ["SLURM_JOB_ID"])
    (D / f"{P.name}.new").rename(D / f"{P.name}.begun")
    time.sleep(120)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of an imitated cluster whose commands are found first."""
    for name, value in fake_slurm.install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("xformer.study.slurm.LISTED", 0.1)
    monkeypatch.setattr("xformer.study.slurm.LOST", 0.5)
    return tmp_path / "slurm/jobs"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the imitated cluster is tried on Linux only")
def test_jobs_of_a_cluster(cluster: Path, tmp_path: Path) -> None:
    """Output goes to the job's log. Jobs that reach their time limit or are preempted continue, one
    that is cancelled fails, and one that the study stops waits again.
    """
    pytest.importorskip("submitit")
    jobs = [
        job(tmp_path, "good", "print('said'); P.touch()"),
        job(tmp_path, "bad", "raise ValueError('no luck')"),
        job(tmp_path, "after", "P.touch()", "good"),
        *(job(tmp_path, name, STOPS) for name in ("long", "preempted", "cancelled", "paused")),
    ]
    pause, met = tmp_path / "PAUSE", set[str]()

    def interrupt(_: object) -> None:
        for begun in tmp_path.glob("*.begun"):
            number = begun.read_text()
            if begun.stem == "paused" and len(met) < 3:
                continue  # a pause would stop the other three too
            if begun.stem == "long":
                os.killpg(int((cluster / number).read_text()), signal.SIGUSR2)
            elif begun.stem == "preempted":
                fake_slurm.preempt(cluster, number)
            elif begun.stem == "cancelled":
                fake_slurm.kill(cluster, number)
            elif not pause.exists():
                pause.touch()
                continue
            elif not (tmp_path / "paused.saved").exists():
                continue
            else:
                pause.unlink()
            met.add(begun.stem)
            begun.unlink()

    executor = Slurm(tmp_path, {"timeout_min": 30})
    outcomes = pool.run_jobs(jobs, executor, interrupt, lambda _: None, 0.05, pause=pause)
    states = {key: outcome.state for key, outcome in outcomes.items()}
    ended_well = dict.fromkeys(("good", "after", "long", "preempted", "paused"), "done")
    assert states == {**ended_well, "bad": "failed", "cancelled": "failed"}
    assert outcomes["bad"].why.splitlines()[-1] == "ValueError: no luck"
    assert (tmp_path / "good.log").read_text() == "said\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the imitated cluster is tried on Linux only")
def test_jobs_of_a_killed_study_are_waited_for(cluster: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    wait = "import time; time.sleep(3); print('end')"
    one, other = job(tmp_path, "one", wait), job(tmp_path, "other", "print('end')")
    first = Slurm(tmp_path, {"timeout_min": 30}).start(one, [0])
    again = Slurm(tmp_path, {"timeout_min": 30})
    handles = [first, again.start(one, [0]), again.start(other, [0])]
    assert [handle.submitted.job_id for handle in handles] == ["1", "1", "2"]
    while None in [handle.exitcode for handle in handles]:
        time.sleep(0.1)
    assert [handle.exitcode for handle in handles] == [0, 0, 0]
    assert (tmp_path / "one.log").read_text() == "end\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the imitated cluster is tried on Linux only")
def test_what_is_asked_of_a_cluster(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores, GPUs and memory are those of each process. What sbatch refuses is one line."""
    pytest.importorskip("submitit")
    options: dict[str, bool | int | float | str] = {
        "timeout_min": 30,
        "cpus_per_task": 3,
        "gpus_per_node": 1,
        "mem_gb": 4,
        "exclusive": True,
        "account": "me",
    }
    tell = "import os; P.write_text(os.environ['OMP_NUM_THREADS'])"
    jobs = [job(tmp_path, "one", tell), job(tmp_path, "four", tell, processes=4)]
    pool.run_jobs(jobs, Slurm(tmp_path, options), lambda _: None, lambda _: None, 0.05)
    for number, times in enumerate((1, 4), 1):
        script = (cluster / f"{number}.script").read_text()
        asked = set(re.findall("^#SBATCH --(.*)", script, re.MULTILINE))
        assert asked > {f"cpus-per-task={3 * times}", f"gpus-per-node={times}", "account=me"}
        assert asked > {f"mem={4 * times}GB", "time=30", "requeue", "exclusive"}
        assert jobs[number - 1].path.read_text() == "3"
    executor = Slurm(tmp_path, {"timeout_min": 30, "exclusive": False})
    handle = executor.start(job(tmp_path, "late", STOPS), [0])
    monkeypatch.setattr(
        "xformer.study.slurm.LISTED", 1000.0
    )  # the newest list is older than this job
    monkeypatch.setattr("xformer.study.slurm.LOST", -999.9)
    time.sleep(0.3)
    assert handle.exitcode is None
    script = (cluster / f"{handle.submitted.job_id}.script").read_text()
    assert "exclusive" not in script
    handle.terminate()
    assert handle.submitted.job_id not in executor._left().values()
    executor = Slurm(tmp_path, {"timeout_min": 30, "partition": "wrong"})
    with pytest.raises(BadInput, match="refused 'last': invalid partition specified: wrong"):
        pool.run_jobs([job(tmp_path, "last", "")], executor, lambda _: None, lambda _: None)


class Bomb:
    """Its pickle runs code when it is read."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.skipif(sys.platform != "linux", reason="the imitated cluster is tried on Linux only")
def test_a_study_reads_no_pickles(cluster: Path, tmp_path: Path) -> None:
    """It reads neither the jobs of an earlier call nor their results as pickles. A damaged file
    of a job is ignored."""
    pytest.importorskip("submitit")
    folder, bomb = tmp_path / "slurm", pickle.dumps(Bomb(tmp_path / "exploded"))
    executor = Slurm(tmp_path, {"timeout_min": 30})
    assert folder.stat().st_mode & 0o777 == 0o700
    one = job(tmp_path, "one", "import time; time.sleep(120)")
    handle = executor.start(one, [0])
    pickled = handle.submitted.paths.submitted_pickle
    while not log_of(one).exists():
        time.sleep(0.05)  # until the job itself has read its pickle
    pickled.write_bytes(bomb)
    key = (line_of(one), log_of(one))
    assert Slurm(tmp_path, {"timeout_min": 30}).left == {key: "1"}
    handle.submitted.paths.result_pickle.write_bytes(bomb)
    assert handle.exitcode == 1
    for damaged in ("[", "[1, 2]", "5", "{}"):
        pickled.with_suffix(".json").write_text(damaged)
        assert not Slurm(tmp_path, {"timeout_min": 30}).left
    handle.terminate()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the imitated cluster is tried on Linux only")
def test_a_folder_of_jobs_that_others_can_write_is_refused(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    folder = tmp_path / "slurm"
    folder.chmod(0o777)
    Slurm(tmp_path, {"timeout_min": 30})
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", lambda *_: None)  # as on some file systems
        with pytest.raises(BadInput, match=f"write into {folder}, .* type chmod 700 {folder}"):
            Slurm(tmp_path, {"timeout_min": 30})
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(BadInput, match=f"{folder} belongs to another user.* give another output="):
        Slurm(tmp_path, {"timeout_min": 30})


def test_a_machine_with_half_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="there is no srun on this machine; use executor=local"):
        Slurm(tmp_path / "out", {"timeout_min": 30})


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="this machine has Slurm")
def test_slurm_is_missed_by_name(forks: Forks, file: Path, data: Path, tmp_path: Path) -> None:
    ended = forks.run(
        "-m",
        "xformer.study",
        file,
        "scale=mini",
        "executor=slurm",
        "slurm.timeout_min=9",
        f"output={tmp_path / 's'}",
        f"needs.data={data}",
    )
    refused(ended, "executor=local")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slurm.partition=gpu"], r"slurm\.partition needs executor=slurm"),
        (["executor=slurm", "slurm.timeout-min=9"], r"write slurm\.timeout_min"),
        (["executor=slurm", "slurm.partition=gpu"], r"such as slurm\.timeout_min=600"),
        (["executor=slurm", "slurm.time=1:00"], r"slurm\.timeout_min=MINUTES is the time limit"),
        (["executor=slurm", "slurm.timeout_min=1.5"], "a whole number above 0"),
        (["executor=slurm", "slurm.timeout_min=9", "slurm.nodes=2"], "nodes cannot be set"),
    ],
)
def test_arguments_of_the_other_executor_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    line = [str(file), "scale=mini", "--dry-run", f"output={tmp_path / 'studies'}", *arguments]
    monkeypatch.setattr("sys.argv", ["xformer.study", *line])
    with pytest.raises(BadInput, match=words):
        study_main()


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=lambda part: getattr(part, "stem", part))
@pytest.mark.slow
def test_every_study_resolves(path: Path, scale: str) -> None:
    plan = planned(path, scale)
    assert plan.jobs
    if scale == "mini":
        assert sum(bool(job.stage) for job in plan.jobs.values()) <= 60


def test_a_study_tells_of_the_training_that_runs(tmp_path: Path) -> None:
    """It shows the newest line of the newest log, even while that line is being written."""

    def job(name: str) -> Job:
        return Job(name, name, tmp_path / name, tmp_path / name, ())

    jobs = [job("old"), job("new"), job("command")]
    assert newest_numbers(jobs) == {}
    line = {"event": "train", "step": 10, "loss": 2.5, "real_tokens_per_second": 900.0}
    for name, step in (("old", 10), ("new", 20)):
        (tmp_path / name).mkdir()
        text = json.dumps({**line, "step": step}) + "\n"
        (tmp_path / name / "log.jsonl").write_text(text + '{"event": "validation"}\n')
    os.utime(tmp_path / "old/log.jsonl", (1, 1))
    assert newest_numbers(jobs) == {"step": 20, "loss": 2.5, "tokens/s": 900.0}
    (tmp_path / "new/log.jsonl").write_text('{"event": "train", "st')
    assert newest_numbers(jobs) == {}


def test_a_table_of_a_level_that_a_scale_leaves_out_is_not_shown(file: Path) -> None:
    """Also if the level is a number in a plain list."""
    changed(
        file,
        ('columns = "rate"', 'columns = "rate"\nwhere.seed = 0'),
        ("[scales.mini]", "[scales.mini]\nclaims = []\nlevels.seed = [1]"),
    )
    assert read_study(file, "mini").tables == ()
    assert [table.name for table in read_study(file, "paper").tables] == ["main"]


def test_a_report_without_published_numbers_does_not_speak_of_them(
    file: Path, data: Path, tmp_path: Path
) -> None:
    numbers = STUDY[STUDY.index("[tables.published]") : STUDY.index("[[claims]]")]
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda seed, start, rate: 0.5 + 0.1 * (start == "pretrained"))
    assert "published" in markdown_of(Results(plan))
    changed(file, (numbers, ""), ('like.scratch = "none"', ""))
    plan = plan_of(file, tmp_path, data=str(data))
    assert "published" not in markdown_of(Results(plan))


def test_a_table_in_latex() -> None:
    first = [Entry("re_emb & 50% {a}"), Entry("-1.5 ± 0.2 (3)", published="2 (-3.5)"), Entry("-")]
    rows = [first, [Entry("a-b\\~^$#"), Entry("60.0"), Entry("MRPC-1")]]
    rows += [[Entry("[0.7, 0.3]"), Entry("*"), Entry("x\n<1|")]]
    grid = Grid(["model", "cola", "mrpc"], rows)
    lines = latex(Section("Main &\n1", "Of `valid`.", "main", grid=grid)).splitlines()
    assert lines == [
        "% Main & 1",
        "% Of `valid`.",
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"model & cola & mrpc \\",
        r"\midrule",
        r"re\_emb \& 50\% \{a\} & $-$1.5 $\pm$ 0.2 (3) & - \\",
        r"\quad published & 2 ($-$3.5) &  \\",
        r"a-b\textbackslash{}\textasciitilde{}\textasciicircum{}\$\# & 60.0 & MRPC-1 \\",
        r"{[}0.7, 0.3] & {*} & x $<$1\textbar{} \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


@pytest.mark.parametrize("kind", ["curves", "table"])
def test_a_legend_is_not_cut(kind: str) -> None:
    """Seven lines in one panel, or seven rows of one column: every name begins and ends within the
    picture."""
    names = [f"line {i}" for i in range(7)]
    lines = tuple(Line(name, 1, [0, 1], [1.0, 0.5], [0.0, 0.0]) for name in names)
    table = ScoreTable(name="x", title="x", stage="s", rows="a", columns="b")
    rows = [[Cell(name, "c", (), sample_of([1.0, 2.0]), None)] for name in names]
    draw = {
        "curves": partial(curves_figure, [Panel("task", "loss", lines)]),
        "table": partial(table_figure, table, rows, ["c"]),
    }
    svg = ElementTree.fromstring(drawing("loss", draw[kind]).svg)
    width = float(svg.attrib["viewBox"].split()[2])
    texts = svg.iter("{http://www.w3.org/2000/svg}text")
    left = {"".join(text.itertext()).strip(): float(text.attrib["x"]) for text in texts}
    assert all(0 < left[name] < width - 25 for name in names)  # a name is 24 points wide


def test_legends_show_names_that_begin_with_an_underscore() -> None:
    line = Line("_small $b$", 1, [0, 1], [1.0, 0.5], [0.0, 0.0])
    table = ScoreTable(name="x", title="x", stage="s", rows="a", columns="b")
    cell = Cell(line.name, "c", (), sample_of([1.0, 2.0]), None)
    for draw in (
        partial(curves_figure, [Panel("task", "loss", (line,))]),
        partial(table_figure, table, [[cell]], "c"),
    ):
        assert "> _small $b$</text>" in drawing("x", draw).svg


@pytest.mark.slow
def test_half_of_an_output_is_not_a_result(tmp_path: Path) -> None:
    """Of a command that is not ours: it fails, or a pause or SIGKILL ends it. Its child goes on."""
    how = tmp_path / "how"
    (tmp_path / "child.py").write_text(
        "import pathlib, sys, time\n"
        "out, how = map(pathlib.Path, sys.argv[1:])\n"
        "out.mkdir()\n"
        "(out / 'a').touch()\n"
        "if how.read_text() == 'fail':\n"
        "    sys.exit('no space left')\n"
        "while how.read_text() == 'wait':\n"
        "    (out / 'growing').write_text(str(time.time()))\n"
        "(out / 'growing').unlink(missing_ok=True)\n"
        "(out / 'b').touch()\n"
    )
    (tmp_path / "make.py").write_text(
        "import subprocess, sys\n"
        f"line = [sys.executable, {str(tmp_path / 'child.py')!r}, sys.argv[1], {str(how)!r}]\n"
        "sys.exit(subprocess.run(line).returncode)\n"
    )
    (tmp_path / "count.py").write_text(
        "import json, pathlib, sys\n"
        "count = len(list(pathlib.Path(sys.argv[1]).iterdir()))\n"
        "result = {'metrics': {'test': {'files': count}}}\n"
        "(pathlib.Path(sys.argv[2]) / 'result.json').write_text(json.dumps(result))\n"
    )
    (tmp_path / "s.toml").write_text(
        'title = "files"\n[needs]\nmake = { about = "a", path = "make.py" }\n'
        'count = { about = "b", path = "count.py" }\n'
        '[made.raw]\ncommand = ["{need.make}", "{out}"]\n'
        '[stages.count]\ncommand = ["{need.count}", "{made.raw}", "{out}"]\nvary.x.a = {}\n'
    )
    output = tmp_path / "out"
    line = ["-m", "xformer.study", str(tmp_path / "s.toml"), f"output={output}", "jobs=1"]

    def made() -> list[str]:  # without places in which a child still writes
        names = (path.name.partition("-")[0] for path in output.glob("made/*"))
        return sorted(name for name in names if name == "raw")

    def begun(study: Any) -> bool:
        assert study.poll() is None
        time.sleep(0.05)
        return any(output.glob("made/.raw-*.making/*/a"))

    how.write_text("fail")
    done = command(*line, cwd=tmp_path)
    assert done.status == 1
    assert "no space left" in done.err
    assert made() == ["raw"]  # its log alone
    how.write_text("wait")
    study = start(*line, cwd=tmp_path)
    while not begun(study):
        pass
    (output / "PAUSE").touch()
    assert study.stderr is not None
    while "paused" not in (said := study.stderr.readline()):
        assert said
    assert made() == ["raw"]
    (output / "PAUSE").unlink()
    while not begun(study):
        pass
    study.kill()
    study.communicate()
    how.write_text("go")  # also for the children that are left
    good(command(*line, cwd=tmp_path))
    assert made() == ["raw", "raw"]
    (result,) = output.glob("runs/*/result.json")
    assert json.loads(result.read_text())["metrics"]["test"]["files"] == 2

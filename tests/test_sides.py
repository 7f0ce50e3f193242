"""In which settings the sides of a claim differ, and what a study says of itself before it runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import test_study
from helpers import ROOT, Forks, command, good, refused
from test_study import changed, finish, markdown_of, plan_of

from xformer.data.errors import BadInput
from xformer.study import pool
from xformer.study.__main__ import execute, planned
from xformer.study.__main__ import main as study_main
from xformer.study.forecast import Forecast
from xformer.study.local import Local
from xformer.study.plan import Plan
from xformer.study.results import Ledger, Results
from xformer.study.sides import Sides

file, data = test_study.file, test_study.data  # fixtures: the study "Letters"
MASKS = """
vary.masks.few = { masking.probability = 0.05 }
vary.masks.many = { masking.probability = 0.2, model.dropout = 0.0 }
[stages.finetune]"""
LOSSES = """
[[tables]]
name = "losses"
title = "Losses"
stage = "pretrain"
rows = "masks"
columns = "metric"
metric = { loss = "valid.loss" }
percent = false

[[claims]]
text = "many masks lower the loss"
table = "losses"
better = { masks = "few", metric = "loss" }
than = { masks = "many", metric = "loss" }

[[claims]]
text = "many masks help"
table = "main"
better.masks = "many"
than.masks = "few"

[scales.mini]"""

TYPO = "[scales.mini.stages.finetun]\nvary.seed = [0]"


def of(plan: Plan) -> Sides:
    return Sides(Forecast(plan))


def words(plan: Plan) -> dict[str, str]:
    return {claim.text: of(plan).words(claim) for claim in plan.study.claims}


def masked(file: Path) -> Path:
    """The pre-training has two levels, and the fine-tuning differs by what it inherits."""
    levels = "vary.masks = { few = {}, many = {} }\nvary.rate.low"
    return changed(
        file,
        ("\n[stages.finetune]", MASKS),
        ("vary.rate.low", levels),
        ("[scales.mini]", LOSSES),
    )


def test_the_sides_of_a_claim_differ_in_what_their_runs_start_from(
    file: Path, data: Path, tmp_path: Path
) -> None:
    plan = plan_of(masked(file), tmp_path, data=str(data))
    assert words(plan) == {
        "pre-training helps at every rate": "surgery (none; clean)",
        "many masks lower the loss": "model.dropout (0.1; 0), masking.probability (0.05; 0.2)",
        # dropout is not typed in the fine-tuning, but comes from the checkpoint
        "many masks help": "model.dropout (0; 0.1), pretrain: masking.probability (0.2; 0.05)",
    }
    assert [line for line in of(plan).remarks() if "lower the loss" in line] == [
        "the sides of the claim 'many masks lower the loss' differ in masking.probability. So they "
        "predict other tokens, and the better score need not be the better model"
    ]
    assert len([*of(plan).remarks()]) == 1  # the others compare no losses of masked tokens
    assert "- its sides differ in: surgery (none; clean)\n" in markdown_of(Results(plan))


def test_what_one_side_alone_starts_from_is_one_word(file: Path, tmp_path: Path) -> None:
    changed(file, ('{ op = "clean" }', '{ op = "reinit_head", layer = 1, head = 2 }'))
    changed(file, ("scratch = { surgery", 'scratch = { init = "micro/english", surgery'))
    changed(file, ('settings.init = "{stage.pretrain}"\n', ""))
    changed(file, ("pretrained = {}", 'pretrained.init = "{stage.pretrain}"'))
    (own,) = words(plan_of(file, tmp_path)).values()
    names = [name.partition(" ")[0] for name in own.split(", ")]
    assert own.startswith("init (pretrain; micro/english), ")
    assert "surgery (none; reinit_head(layer=1, head=2))" in own
    assert {"model.hidden", "model.layers", "pretrain"} <= set(names)
    assert "pretrain:" not in own


def test_a_need_in_the_current_directory_gives_other_paths_no_name(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(file, ("scratch = { surgery", 'scratch = { init = "micro/english", surgery'))
    changed(file, ('settings.init = "{stage.pretrain}"\n', ""))
    changed(file, ("pretrained = {}", 'pretrained.init = "{stage.pretrain}"'))
    monkeypatch.chdir(data)
    (own,) = words(plan_of(file, tmp_path, data=".")).values()
    assert own.startswith("init (pretrain; micro/english), ")


def test_more_settings_of_a_group_are_named_without_values(file: Path, tmp_path: Path) -> None:
    model = (
        "model.hidden = 32, model.layers = 2, model.max_positions = 99, model.intermediate = 8, "
    )
    own = f"vary.form.a = {{}}\nvary.form.b = {{ {model} model.dropout = 0.3 }}\n[stages.finetune]"
    changed(file, ("\n[stages.finetune]", own))
    changed(file, ("vary.rate.low", "vary.form = { a = {}, b = {} }\nvary.rate.low"))
    changed(file, ('start = "pretrained"', 'form = "a"'), ('start = "scratch"', 'form = "b"'))
    (own,) = words(plan_of(file, tmp_path)).values()
    names = ("layers", "hidden", "intermediate", "max_positions", "dropout")
    assert own == ", ".join(f"model.{name}" for name in names)


def test_a_claim_compares_one_metric(file: Path, tmp_path: Path) -> None:
    changed(
        file, ('columns = "rate"', 'columns = "metric"\nmetric = { a = "accuracy", b = "mcc" }')
    )
    sides = 'better = {{ start = "pretrained", metric = "a" }}\nthan = {{ start = "scratch", {} }}'
    old = 'better.start = "pretrained"\nthan.start = "scratch"\neach = "rate"'
    changed(file, (old, sides.format('metric = "a"')))
    plan_of(file, tmp_path)
    changed(file, ('"scratch", metric = "a"', '"scratch", metric = "b"'))
    with pytest.raises(BadInput, match="compares accuracy with mcc; compare one metric"):
        plan_of(file, tmp_path)


def test_a_stage_that_nothing_shows_is_named(file: Path, tmp_path: Path) -> None:
    other = f'[stages.other]\nrecipe = "{ROOT}/recipes/pretrain/smoke.toml"\n[[tables]]'
    changed(
        file, ("[[tables]]", f'{other.replace("[[tables]]", "")}settings.data = "x"\n[[tables]]')
    )
    line = "not run, because no table, curve or picture needs them: other"
    plan = plan_of(file, tmp_path)
    assert line in plan.remarks()
    file.write_text("while the runs went on, somebody edited [")
    assert line in plan.remarks()


def test_a_list_of_levels_that_are_no_key_is_refused(file: Path, tmp_path: Path) -> None:
    changed(file, ("vary.seed = [0, 1]", "vary.seed = [0, 1]\nvary.step = [0, 20]"))
    words = r"vary\.step: a list has values of a key, and recipes have no 'step'; levels without"
    with pytest.raises(BadInput, match=words):
        plan_of(file, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"{made.task}"\nsettings.init', '"{make.task}"\nsettings.init', "paths are {need.X}, "),
        (
            '"{made.task}"\nsettings.init',
            '"{need.task}"\nsettings.init',
            "did you mean {made.task}",
        ),
        ("[scales.paper]", f"{TYPO}\n[scales.paper]", "give either a recipe or a command; did you"),
        (
            "[scales.mini]",
            '[scales.mini]\nlevels.start = ["scratch"]',
            "levels.start leaves out 'pretrained'",
        ),
    ],
)
def test_a_wrong_name_has_a_hint(
    file: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    changed(file, (old, new))
    with pytest.raises(BadInput) as error:
        plan_of(file, tmp_path)
    assert words in str(error.value)


def test_a_note_tells_of_weights_that_were_kept_at_other_steps(file: Path, tmp_path: Path) -> None:
    look = """
[stages.look]
command = ["-m", "xformer.analysis", "blimp", "{stage.pretrain}", "data=x", "out={out}"]
result = "blimp.json"
[[pictures]]
name = "x"
title = "x"
stage = "look"
file = "blimp.svg"
[scales.mini]"""
    changed(file, ("[scales.mini]", look))
    kept = "settings.train = { steps = 4, keep_at = [2] }"
    changed(file, ("settings.train = { steps = 4 }", kept))
    plan = plan_of(file, tmp_path)
    (run,), (seen,) = plan.runs("pretrain"), plan.runs("look")
    run.path.mkdir(parents=True)
    seen.path.mkdir(parents=True)
    seen.proof.touch()
    config = {"run": f"x/{run.key}", "train.keep_at": [2]}
    (run.path / "config.json").write_text(json.dumps({"config": config}))
    assert not [line for line in plan_of(file, tmp_path).remarks() if "keep_at" in line]
    changed(file, ("keep_at = [2]", "keep_at = [2, 3]"))
    again = plan_of(file, tmp_path)
    assert again.runs("look")[0].key == seen.key
    no_trajectory = Path(str(file).replace("letters", "other"))
    no_trajectory.write_text(file.read_text().replace('"blimp", ', '"attention", "a", '))
    other = plan_of(no_trajectory, tmp_path)
    other.runs("look")[0].path.mkdir(parents=True)
    other.runs("look")[0].proof.touch()
    assert not [line for line in other.remarks() if "keep_at" in line]
    assert [line for line in again.remarks() if "keep_at" in line] == [
        "look has read pretrain, which was made with train.keep_at=[2], now [2, 3]; delete "
        f"{seen.path} and {run.path} to make both again"
    ]


def test_a_path_that_is_typed_must_exist(file: Path, tmp_path: Path, forks: Forks) -> None:
    line = ["-m", "xformer.study", file, "scale=mini", f"output={tmp_path / 's'}"]
    ended = forks.run(*map(str, line), f"needs.data={tmp_path / 'dtaa'}")
    refused(ended, f"needs.data={tmp_path / 'dtaa'}: ", "there is no such file")
    assert not (tmp_path / "s").exists()
    # a part of the data may be missing: the study may be restricted to runs that do not read it
    plan, _ = planned([str(file), "scale=mini", f"needs.data={tmp_path}"])
    assert list(plan.missing()) == ["data"]


def test_a_score_that_a_finished_run_lacks_is_refused(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table shows the F1 of a claim's side that it does not show itself."""
    changed(file, ("each = ", "margin = 0.0\neach = "))
    plan = plan_of(file, tmp_path, data=str(data))
    finish(plan, lambda **_: 0.5)
    Results(plan).check()
    run = plan.runs("finetune")[3]
    run.proof.write_text(json.dumps({"metrics": {"valid": {"accuracy": 0.5}}, "seconds": 2.0}))
    for results in (Results(plan), Results(plan, [run])):
        with pytest.raises(BadInput, match=r"has no test\.accuracy; it has valid\.accuracy"):
            results.check()
    Results(plan, plan.runs("finetune")[:3]).check()
    line = ["study", str(file), "scale=mini", f"output={plan.root}", f"needs.data={data}"]
    monkeypatch.setattr(sys, "argv", [*line, "--dry-run"])
    with pytest.raises(BadInput, match=r"has no test\.accuracy"):
        study_main()


def test_stores_that_are_made_differently_at_each_level_differ(file: Path, tmp_path: Path) -> None:
    changed(file, ('"{need.data}/x.tsv", "--output"', '"{need.data}/{start}.tsv", "--output"'))
    changed(file, ('"{made.task}", "--output"', '"micro/english", "--output"'))
    (own,) = words(plan_of(file, tmp_path)).values()
    first, second = re.fullmatch(r"data \((.*); (.*)\), surgery \(none; clean\)", own).groups()  # type: ignore[union-attr]
    assert first != second
    assert first.startswith("made.task ")


def test_the_words_of_a_command_are_compared(file: Path, tmp_path: Path) -> None:
    """A stage in between is a command, and another command reads two of its levels."""
    more = """
[stages.cut]
command = ["-m", "xformer.surgery", "{stage.pretrain}", "{out}/m", "{how}"]
result = "m/manifest.json"
vary.how = { reverse_layers = {}, clean = {} }
[stages.seen]
command = ["mine.py", "{stage.cut}/m", "--depth", "{depth}", "data={made.letters}", "{out}/r.json"]
result = "r.json"
vary.how = { reverse_layers = {}, clean = {} }
vary.depth = { 1 = {}, 2 = {} }
[[tables]]
name = "seen"
title = "x"
stage = "seen"
rows = "how"
columns = "depth"
metric = "x.y"
[[claims]]
text = "deeper"
table = "seen"
better.depth = "1"
than.depth = "2"
[[claims]]
text = "cut"
table = "seen"
better.how = "clean"
than.how = "reverse_layers"
[scales.mini]"""
    plan = plan_of(changed(file, ("[scales.mini]", more)), tmp_path)
    own = words(plan)
    assert own["deeper"] == "command (mine.py cut/m --depth 1; mine.py cut/m --depth 2)"
    assert own["cut"].startswith("cut: command (-m xformer.surgery pretrain ")


def test_a_remark_is_about_scores_of_masked_tokens(file: Path, data: Path, tmp_path: Path) -> None:
    changed(masked(file), ('"valid.loss"', '"train.real_tokens_per_second"'))
    assert not [*of(plan_of(file, tmp_path, data=str(data))).remarks()]


@pytest.mark.parametrize("program", ['"-m", "mine"', '"tools/mine.py"', '"{need.data}/mine.py"'])
def test_a_program_of_ones_own_is_not_judged(file: Path, tmp_path: Path, program: str) -> None:
    own = f"""
[stages.mine]
command = [{program}, "{{stage.pretrain}}/predictions/test.npz", "{{out}}"]
result = "r.json"
[[pictures]]
name = "x"
title = "x"
stage = "mine"
file = "x.svg"
[scales.mini]"""
    Forecast(plan_of(changed(file, ("[scales.mini]", own)), tmp_path)).check()


def test_two_numbers_of_an_analysis_may_be_compared(file: Path, tmp_path: Path) -> None:
    own = """
[stages.look]
command = ["mine.py", "{stage.pretrain}", "{out}"]
settings.model = "x"
vary.size = { 1 = { rows = 1 }, 2 = { rows = 2 } }
[[tables]]
name = "look"
title = "x"
stage = "look"
rows = "size"
columns = "metric"
metric = { pwcca = "last.pwcca", chance = "last.chance" }
[[claims]]
text = "more than chance"
table = "look"
better.metric = "pwcca"
than.metric = "chance"
[scales.mini]"""
    plan = plan_of(changed(file, ("[scales.mini]", own)), tmp_path)
    assert words(plan)["more than chance"] == "metric (pwcca; chance)"


def test_stages_that_wait_for_one_another_are_refused(file: Path, tmp_path: Path) -> None:
    """Nothing is shown, so every stage that no other one waits for would be run."""
    text, ring = (
        file.read_text(),
        '[stages.look]\ncommand = ["mine.py", "{stage.pretrain}", "{out}"]',
    )
    pretrain = text[: text.index("[stages.finetune]")]
    file.write_text(f"{pretrain}\n{ring}\n[scales.mini]")
    changed(file, ('settings.data = "{made.letters}"', 'settings.data = "{stage.look}"'))
    with pytest.raises(BadInput, match="its stages wait for one another: pretrain, look"):
        plan_of(file, tmp_path)


def test_the_first_run_without_a_score_ends_the_study(
    file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(file, tmp_path, data=str(data))
    run = plan.runs("finetune")[0]

    def train(_: Plan, executor: object, ended: Any, *__: object) -> None:
        run.path.mkdir(parents=True)
        run.proof.write_text(json.dumps({"metrics": {"valid": {"f1": 0.5}}, "seconds": 2.0}))
        ended(run, True)

    monkeypatch.setattr(pool, "run_plan", train)
    with pytest.raises(BadInput, match=r"has no test\.accuracy; it has valid\.f1"):
        execute(plan, Local(1, 1), Ledger(None, plan))


@pytest.mark.slow
def test_a_split_without_labels_is_refused_once_its_store_is_made(
    file: Path, data: Path, tmp_path: Path
) -> None:
    for name in ("train.tsv", "valid.tsv"):
        (data / name).write_text((data / "x.tsv").read_text())
    (data / "test.tsv").write_text("sequence\nACGT\nCCGT\n")
    changed(file, ("{need.data}/x.tsv", "{need.data}"))
    for name in ("x.tsv", "train.txt", "valid.txt"):
        (data / name).rename(tmp_path / name)
    changed(file, ("{need.data}/train.txt", f"{tmp_path}/train.txt"))
    changed(file, ("{need.data}/valid.txt", f"{tmp_path}/valid.txt"))
    line = ["-m", "xformer.study", file, "scale=mini", f"output={tmp_path / 's'}", "jobs=1"]
    ended = command(*map(str, line), f"needs.data={data}")
    assert "made.task: done" in ended.err
    assert "no scores on 'test', which has no labels in made.task" in ended.err.splitlines()[-1]
    assert not list((tmp_path / "s/runs").glob("*/result.json"))
    changed(file, ('columns = "rate"\n', 'columns = "rate"\nsplit = "valid"\n'))
    good(command(*map(str, line), f"needs.data={data}"))

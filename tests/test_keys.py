"""What names a run: keys of studies' runs do not change."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from helpers import CLASSIFY, ROOT, SMOKE, Forks, good, refused, training
from toys import Toys

from xformer.config import parse_overrides, validate
from xformer.data.errors import BadInput
from xformer.data.files import RUN_MANIFEST, read_json, write_json
from xformer.recipe import Recipe
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.launch import prepare
from xformer.study.plan import ADDED_LATER, Plan, content_key, identity
from xformer.study.reading import read_study

# Computed by the code before `fraction` and lists of stores (revision adafa31). If a key changes,
# every result under it is lost to users. Add the new field to plan.ADDED_LATER instead of changing
# these.
KEYS = {
    "head=mlm": "e10903387d2aa032",
    "head=mlm train.log_every=7 train.keep_state=false system.threads=2": "e10903387d2aa032",
    "head=mlm system.precision=fp32": "e10903387d2aa032",
    "head=classify init=i fraction=0.1": "d7b9f225bfd4a94b",
    "head=classify init=i seed=3": "273bfb7caac03a8b",
    "head=mlm seed=1 seed.order=2": "58275c5786c3f1c4",
    "head=regress init=i optim.lr=2e-5 optim.warmup=0.1 batch.rows=16 train.epochs=2": (
        "d84804491c52183e"
    ),
    'head=classify init=i surgery=[{op="clean"}] train.select=last': "358990dcfb6dc263",
    "head=classify init=i mapping=symbols:0 optim.name=adam optim.clip=0": "c922fbcf43fb2c0d",
    "head=mlm model.layers=4 model.hidden=256 model.heads=4 model.intermediate=1024 "
    "train.steps=100": "b3a79b823d657dcb",
    "head=classify model.architecture=hilbert_cnn": "a6df2a2c9f076ad0",
    "head=mlm train.trouble=skip train.spike=6": "8f9e8dde96ad66ed",
    "head=classify init=i loss.class_weights=balanced": "066749d01e748b3a",  # before standardize
    "head=classify init=i loss.label_smoothing=0.1": "b657a0e6620874a5",
    'head=mlm masking.pair_weight=1 batch.tokens=4096 train.only=["mlm_head"]': "5170f58ce4993f0c",
}


def recipe(line: str, data: str = "d") -> Recipe:
    """A recipe in fp32, which was the default when the keys were computed."""
    settings = [f"data={data}", "run=-", "system.precision=fp32", *line.split()]
    return validate(Recipe, parse_overrides(Recipe, settings))


def key(line: str, data: str = "d") -> str:
    return content_key(identity(recipe(line, data)))


@pytest.mark.parametrize("line", KEYS)
def test_keys_stay(line: str) -> None:
    assert key(line) == KEYS[line]
    assert key(line, '["d"]') == KEYS[line]


def test_what_is_new_enters_the_key_if_it_is_not_the_default() -> None:
    lines = ["head=mlm", "head=mlm system.precision=bf16", "head=mlm train.spike=6"]
    stores = ["d", "e", '["d", "e"]', '["e", "d"]']
    assert len({key(line, data) for line in lines for data in stores}) == 12
    assert identity(recipe(lines[1]))["precision"] == "bf16"
    assert "precision" not in identity(recipe(lines[0]))
    assert (
        not {name.rpartition(".")[2] for name in ADDED_LATER}
        & identity(recipe("head=mlm"))["train"].keys()
    )


# ------------------------------------------------------------------------- studies of such runs


STUDY = """
title = "One run"
question = "Is it taken?"
paper = "Nobody 2026"
[stages.train]
recipe = "{recipe}"
settings.data = "{data}"
settings.model = {{ layers = 1, hidden = 16, heads = 2, intermediate = 16 }}
settings.train.epochs = 1
settings.system.precision = "{precision}"
vary.seed = [0]
vary.share.all = {{}}
vary.share.half = {{ fraction = 0.5 }}
[[tables]]
name = "main"
title = "Accuracy"
stage = "train"
rows = "share"
columns = "seed"
[scales.mini]
"""


def test_a_finished_study_is_reported_again(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Nothing runs again and the numbers are the same. Another precision is another run, which is
    never mistaken for the existing one."""
    file, root = tmp_path / "one.toml", tmp_path / "studies"
    line: list[str | Path] = ["-m", "xformer.study", file, "scale=mini", f"output={root}", "jobs=1"]

    def write(precision: str) -> None:
        file.write_text(
            STUDY.format(recipe=ROOT / CLASSIFY, data=data.classes, precision=precision)
        )

    write("fp32")
    plan = Plan(read_study(file, "mini"), root, {})
    for job in plan.jobs.values():
        prepare(job)
        good(forks.run(*job.command))
    good(forks.run(*line))
    report = (root / "one-mini/report.md").read_text()
    runs = [job.path for job in plan.jobs.values()]
    for run in runs:
        (run / RUN_MANIFEST).unlink()  # a run that begins again deletes it and writes a new one
    assert "Accuracy" in good(forks.run(*line)).out
    assert (root / "one-mini/report.md").read_text() == report
    assert not any((run / RUN_MANIFEST).exists() for run in runs)

    keys = set(plan.jobs)
    write("bf16")
    assert not keys & set(Plan(read_study(file, "mini"), root, {}).jobs)

    # an old run in bf16, from when fp32 and bf16 had the same key
    write("fp32")
    content = read_json(runs[0] / "config.json")
    content["config"]["system"]["precision"] = "bf16"
    write_json(runs[0] / "config.json", content)
    words = (f"{runs[0]} was made with system.precision=bf16", "asks for fp32; delete that directo")
    refused(forks.run(*line), str(file), *words)
    refused(forks.run(*line, "dry_run=true"), "or give another output=")
    content["config"]["system"]["precision"] = "fp32"
    content["starts"] = [
        {"step": 0, **content},
        {"step": 1, "config": {"system": {"precision": "bf16"}}},
    ]
    write_json(runs[0] / "config.json", content)
    refused(forks.run(*line), *words)  # a part of the run was in bf16
    write_json(runs[0] / "config.json", {"identity": {}, "starts": 7})
    with pytest.raises(BadInput, match=r"config\.json is damaged: it holds no recipe"):
        Plan(read_study(file, "mini"), root, {})
    shutil.rmtree(runs[0])
    assert len(Plan(read_study(file, "mini"), root, {}).jobs) == 2


def test_dropout_from_a_checkpoint_is_not_taken_for_the_default(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """A run takes its dropout from the checkpoint of init=, unless the user types it. The two have
    one key if the typed one is the default, so a study refuses to mix them. Earlier versions
    recorded the default for both."""
    start, root, file = tmp_path / "start", tmp_path / "studies", tmp_path / "one.toml"
    good(forks.run(*training(SMOKE, data.text, start, "train.steps=2", "model.dropout=0")))
    shape = "settings.model = { layers = 1, hidden = 16, heads = 2, intermediate = 16 }"
    study = STUDY.format(recipe=ROOT / CLASSIFY, data=data.classes, precision="fp32")
    study = study.replace(
        shape, f'settings.init = "{start}"\nsettings.batch.max_tokens = 64'
    ).replace("vary.share.half", "# ")

    def plan(typed: str = "") -> Plan:
        file.write_text(study.replace("vary.seed", f"{typed}\nvary.seed"))
        planned = Plan(read_study(file, "mini"), root, {})
        Forecast(planned).check()
        return planned

    (job,) = plan().jobs.values()
    prepare(job)
    good(forks.run(*job.command))
    content = read_json(job.path / "config.json")
    assert content["config"]["model"]["dropout"] == content["identity"]["model"]["dropout"] == 0
    for part in (content["config"], content["identity"], content["starts"][0]["config"]):
        part["model"]["dropout"] = 0.1  # as earlier versions recorded it
    (job.path / RUN_MANIFEST).unlink()  # it has the checksum of config.json
    as_recorded = (content, read_json(job.path / "config.json"))
    assert "is finished" in good(forks.run(*job.command)).err
    assert "is finished" in good(forks.run(*job.command, "model.dropout=0")).err
    refused(forks.run(*job.command, "model.dropout=0.1"), "model.dropout=0.0 is now 0.1")
    for recorded in as_recorded:
        write_json(job.path / "config.json", recorded)
        assert plan().jobs.keys() == {job.key}
        with pytest.raises(
            BadInput, match=r"made with model.dropout=0.0, the study asks for 0.1; giv"
        ):
            plan("settings.model.dropout = 0.1")
    assert plan("settings.model.dropout = 0.0").jobs.keys().isdisjoint({job.key})
    assert plan("settings.model.attention_dropout = 0.2").jobs.keys().isdisjoint({job.key})
    twins = (
        r"share=typed seed=0 and train share=all seed=0 would be one run, with model.dropout=0.1 "
        r"and 0.0.*; type model.dropout=0.0 for train share=all"
    )
    with pytest.raises(BadInput, match=twins):
        plan("vary.share.typed = { model = { dropout = 0.1 } }")
    same = plan('vary.share.typed = { model = { dropout_form = "bert" } }')  # as it is anyway
    assert same.jobs.keys() == {job.key}
    assert len(plan("vary.share.typed = { model = { dropout = 0.2 } }").jobs) == 2

    # without a checkpoint only a recorded dropout that is not the default is certain
    (job.path / "result.json").unlink()
    shutil.rmtree(job.path / "checkpoints")
    with pytest.raises(BadInput, match=r"made with model.dropout=0.0, the study"):
        plan("settings.model.dropout = 0.1")
    write_json(job.path / "config.json", as_recorded[0])
    assert plan("settings.model.dropout = 0.1").jobs.keys() == {job.key}


def test_a_forecast_knows_the_checkpoints_of_the_package(data: Toys, tmp_path: Path) -> None:
    """init=micro/english names a checkpoint of the package, not a path."""
    file = tmp_path / "one.toml"
    study = STUDY.format(recipe=ROOT / CLASSIFY, data=data.classes, precision="fp32")
    shape = "settings.model = { layers = 1, hidden = 16, heads = 2, intermediate = 16 }"
    file.write_text(study.replace(shape, 'settings.init = "micro/english"'))
    plan = Plan(read_study(file, "mini"), tmp_path / "studies", {})
    start = Forecast(plan).start(next(iter(plan.jobs.values())))
    assert start is not None
    assert (start.hidden, start.dropout) == (256, 0)


def test_a_study_takes_a_list_of_stores(data: Toys, tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    text = STUDY.format(recipe=ROOT / CLASSIFY, data="DATA", precision="fp32")

    def plan(*paths: Path) -> Plan:
        given = json.dumps([str(path) for path in paths])
        file.write_text(text.replace('"DATA"', given))
        return Plan(read_study(file, "mini"), tmp_path / "studies", {})

    copy = shutil.copytree(data.classes, tmp_path / "copy")
    (copy / "notes.txt").write_text("so that it is not the same store twice")
    one, both = plan(data.classes), plan(data.classes, copy)
    assert not set(one.jobs) & set(both.jobs)
    job = next(iter(both.jobs.values()))
    assert job.recipe is not None
    assert job.recipe["data"] == [str(data.classes), str(copy)]
    Forecast(both).check()
    costs = [Costs(Forecast(plan)) for plan in (one, both)]
    work = [next(iter(cost.work.values())) for cost in costs]
    assert work[0] is not None
    assert work[1] is not None
    assert work[1].operations == pytest.approx(2 * work[0].operations)
    unlike = plan(data.classes, data.text)
    with pytest.raises(BadInput, match=r"cannot be read as one: they differ in kind \(class; text"):
        Forecast(unlike).check()
    foreign = plan(data.classes, data.splice)
    with pytest.raises(BadInput, match="cannot be read as one: they differ in tokenizer"):
        Forecast(foreign).check()
    unknown = Costs(Forecast(plan(data.classes, tmp_path / "none")))
    assert unknown.seconds(next(iter(both.jobs.values()))) is None


def test_a_typed_path_is_known_by_its_content(data: Toys, tmp_path: Path) -> None:
    """Not by its name: if something else lies there, the run is another one."""
    file = tmp_path / "one.toml"
    text = STUDY.format(recipe=ROOT / CLASSIFY, data=data.classes, precision="fp32")
    file.write_text(
        text.replace(
            "vary.seed",
            'settings.init = "START"\n'
            'settings.surgery = [{ op = "transplant", source = "OTHER" }, { op = "clean" }]\n'
            'settings.train.branch_from = "BRANCH"\n'
            "vary.seed",
        )
        .replace("START", str(tmp_path / "start"))
        .replace("OTHER", str(tmp_path / "other"))
        .replace("BRANCH", str(tmp_path / "branch"))
    )

    def keys() -> set[str]:
        return set(Plan(read_study(file, "mini"), tmp_path / "studies", {}).jobs)

    known = [keys()]
    for name in ("start", "other", "branch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        known.append(keys())
        assert keys() == known[-1]
        (tmp_path / name / "weights").write_text("changed")
        known.append(keys())
    assert not any(a & b for a, b in combinations(known, 2))

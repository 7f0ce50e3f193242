"""The precision that `auto` stands for, who keeps it, and what is said about slow ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CLASSIFY, ROOT, SMOKE, Forks, good, refused, training
from test_keys import KEYS
from test_train import AT_STEP
from toys import Toys

from benchmarks import precision as benchmark
from xformer import checkpoint as checkpoints
from xformer import config as settings
from xformer import cost
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json
from xformer.ops import native
from xformer.parallel import precision
from xformer.parallel.processes import ALONE
from xformer.prepare import with_precision
from xformer.recipe import Recipe
from xformer.study.__main__ import listing
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.plan import Plan, content_key, identity
from xformer.study.reading import read_study
from xformer.study.report import build_report
from xformer.study.results import Results

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MACHINE = "from xformer.parallel import precision; precision.instructions = lambda: {has!r}; "
WITH, WITHOUT = MACHINE.format(has={"avx512_bf16"}), MACHINE.format(has=set())
AUTO = ["system.precision=auto", "train.steps=6", "train.log_every=2", "train.checkpoint_every=3"]
STOP = AT_STEP.format(step=4, signal="SIGTERM", ranks="0")


@pytest.fixture(params=["bf16", "fp32"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The precision that is fast on this machine, with bf16 instructions and without."""
    has = {"avx512_bf16"} if request.param == "bf16" else set()
    monkeypatch.setattr(precision, "instructions", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return str(request.param)


# ------------------------------------------------------------------------------------ the device


@pytest.mark.parametrize(
    ("line", "reason", "silent"),
    [
        ("flags\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile", "has amx_bf16", True),
        ("flags\t: fpu avx512f avx512_bf16", "has avx512_bf16", True),
        ("flags\t: fpu avx2 avx512f", "", False),
        ("Features\t: asimd bf16 svebf16", "", True),  # ARM's were never measured
        ("", "", False),
    ],
)
def test_processors_on_which_bf16_is_fast(
    line: str, reason: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "processor_lines", lambda *kinds: [line] if line else [])
    assert precision.reason_for_bf16(CPU) == (f"this processor {reason}" if reason else "")
    assert (precision.speed_note(CPU, "bf16") == "") is silent
    assert precision.speed_note(CPU, "fp32") == ""


def test_gpus_and_their_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(precision, "times_slower", lambda device: 9.34)
    assert precision.reason_for_bf16(CUDA) == "this GPU has tensor cores for bf16"
    assert precision.fast_here() == "bf16"
    assert precision.speed_note(CUDA, "bf16") == precision.speed_note(CUDA, "fp32", True) == ""
    assert precision.speed_note(CUDA, "fp32") == (
        "precision fp32 is slow here: a large matrix product takes 9.3 times as long as in bf16; "
        "set system.precision=bf16, or system.tf32=true"
    )
    capability = (7, 5)
    assert precision.fast_here() == "fp32"
    assert precision.speed_note(CUDA, "fp32") == ""
    assert "this GPU has no bf16 instructions" in precision.speed_note(CUDA, "bf16")


def test_products_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "SIDE", 64)
    assert precision.times_slower(CPU) > 0


# ---------------------------------------------------------------------------------------- TF32


@pytest.fixture
def flags() -> Iterator[None]:
    """PyTorch's flags are restored afterwards."""
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    backends: Any = torch.backends
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "none"


@pytest.mark.usefixtures("flags")
def test_tf32_sets_all_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for wanted in (True, False, True):
        precision.use_tf32(CUDA, wanted)
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is wanted
        assert (torch.get_float32_matmul_precision() == "high") is wanted
        assert torch.backends.cudnn.allow_tf32 is wanted
    backends: Any = torch.backends
    backends.fp32_precision = "tf32"  # as another program may
    precision.use_tf32(CUDA, False)
    for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        assert part.fp32_precision == "ieee"
    capability = (7, 5)
    precision.use_tf32(CUDA, False)
    with pytest.raises(BadInput, match=r"system\.tf32=true: this GPU has no TF32"):
        precision.use_tf32(CUDA, True)


def test_tf32_is_refused_where_it_does_nothing(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", "system.tf32=true")
    if not torch.cuda.is_available():
        refused(forks.run(*line), "system.tf32=true", "only CUDA has TF32; leave it out")
    refused(forks.run(*line, "system.precision=bf16"), "needs system.precision=fp32, not bf16")
    refused(forks.run(*line, "system.precision=auto"), "needs system.precision=fp32, not auto")
    assert not (tmp_path / "run").exists()


def test_tf32_is_another_run_and_another_peak() -> None:
    plain, tf32 = (recipe(*more) for more in ([], ["system.tf32=true"]))
    assert content_key(identity(plain)) != content_key(identity(tf32))
    assert "tf32" not in identity(plain)
    a100 = {name: cost.peak_flops("NVIDIA A100-SXM4", name) for name in ("fp32", "tf32", "bf16")}
    assert a100 == {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}


# ------------------------------------------------------------------------------------------ runs


def recipe(*lines: str) -> Recipe:
    line = ["head=mlm", "data=d", "run=-", "system.precision=fp32", *lines]
    return settings.validate(Recipe, settings.parse_overrides(Recipe, line))


def test_auto_is_settled_once(fast: str) -> None:
    auto, explicit = recipe("system.precision=auto"), recipe("system.precision=bf16")
    made, line = with_precision(auto, ALONE)
    assert made.system.precision == fast
    assert line.startswith(f"precision {fast} (system.precision=auto: ")
    assert made.model_copy(update={"system": auto.system}) == auto
    assert with_precision(explicit, ALONE) == (explicit, "precision bf16")
    assert settings.validate(Recipe, {"data": "d", "run": "r", "head": "mlm"}).system == auto.system
    with pytest.raises(BadInput, match="must be 'fp32' or 'bf16'"):
        ALONE.autocast("auto")


def test_a_run_keeps_its_precision_elsewhere(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It is recorded, printed, and kept where the other precision would be faster."""
    for name, here, there in (("bf16", WITH, WITHOUT), ("fp32", WITHOUT, WITH)):
        run, whole = tmp_path / name, tmp_path / f"whole-{name}"
        line = training(SMOKE, data.text, run, *AUTO)
        begun = forks.run(*line, before=here + STOP)
        assert begun.status == 143, begun
        assert f"precision {name} (system.precision=auto: " in begun.err
        done = good(forks.run(*line, before=there))
        kept = f"precision {name} (system.precision=auto: as before, because a run keeps its"
        assert kept in done.err
        assert "since the last start" not in done.err
        slow = "this processor has no bf16 instructions: system.precision=fp32 is faster here"
        assert (slow in done.err) is (name == "bf16")
        content = read_json(run / "config.json")
        assert content["config"]["system"]["precision"] == name
        assert len(content["starts"]) == 1
        good(forks.run(*training(SMOKE, data.text, whole, *AUTO), before=here))
        weights = [(x / "checkpoints/step_6/model.safetensors").read_bytes() for x in (run, whole)]
        assert weights[0] == weights[1]
        trained = checkpoints.load(run).history[-1]
        assert trained.get("precision", "fp32") == name
    good(forks.run(*line, "overwrite=true", before=WITH))  # a new run
    assert read_json(run / "config.json")["config"]["system"]["precision"] == "bf16"


def test_runs_of_before_have_fp32(fast: str, tmp_path: Path) -> None:
    for config in ({}, {"system": {"threads": 1}}, {"system": {"precision": "fp32"}}, 7):
        write_json(tmp_path / "config.json", {"identity": {}, "config": config})
        made, _ = with_precision(recipe("system.precision=auto", f"run={tmp_path}"), ALONE)
        assert made.system.precision == "fp32"
    overwritten = recipe("system.precision=auto", f"run={tmp_path}", "overwrite=true")
    assert with_precision(overwritten, ALONE)[0].system.precision == fast


def test_a_rank_without_bf16_decides(forks: Forks, data: Toys, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *AUTO)
    mixed = f"import os\nif os.environ['RANK'] == '0': {WITH}\nelse: {WITHOUT}"
    assert "precision fp32 (" in good(forks.run(*line, ranks=2, before=mixed)).err
    assert read_json(run / "config.json")["config"]["system"]["precision"] == "fp32"


def test_evaluation_has_the_precision_of_training(forks: Forks, data: Toys, tmp_path: Path) -> None:
    for name, machine in (("bf16", WITH), ("fp32", WITHOUT)):
        run, out = tmp_path / name, tmp_path / "out.json"
        good(forks.run(*training(SMOKE, data.text, run, *AUTO), before=machine))
        line: list[str | Path] = [
            "evaluate.py",
            run,
            f"data={data.text}",
            "split=valid",
            f"out={out}",
        ]
        for elsewhere in (WITH, WITHOUT):
            done = good(forks.run(*line, "system.threads=1", before=elsewhere))
            assert f"precision {name} (as in training)" in done.err
            assert read_json(out)["precision"] == name
            assert read_json(out)["metrics"] == read_json(run / "result.json")["metrics"]["valid"]
    fresh = checkpoints.load(tmp_path / "fp32")
    foreign = tmp_path / "foreign"  # imported, and never trained here
    checkpoints.save(replace(fresh, history=()), foreign)
    for name, machine in (("bf16", WITH), ("fp32", WITHOUT)):
        done = good(forks.run("evaluate.py", foreign, f"data={data.text}", before=machine))
        assert f"precision {name} (" in done.err


# --------------------------------------------------------------------------------------- studies

STUDY = """
title = "Two stages"
question = "Which key?"
paper = "Nobody 2026"
[stages.first]
recipe = "{smoke}"
settings.data = "{data}"
settings.train.steps = 2
settings.system.threads = 1
[stages.second]
recipe = "{classify}"
settings.data = "{data}"
settings.init = "{{stage.first}}"
vary.seed = [0]
vary.start.first = {{}}
[[tables]]
name = "main"
title = "Accuracy"
stage = "second"
rows = "start"
columns = "seed"
[scales.mini]
"""


def jobs(file: Path, root: Path, kept: Path | None = None) -> list[tuple[str, str]]:
    """(key, precision) of the two runs."""
    made = Plan(read_study(file, "mini"), root, {}, kept).jobs.values()
    return [(job.key, job.recipe["system"]["precision"]) for job in made if job.recipe]


def test_a_key_has_the_settled_precision(fast: str, data: Toys, tmp_path: Path) -> None:
    """auto has the key of the precision that it stands for. That of fp32 is as it always was. A run
    that was begun with the other precision, or is kept, goes on with that."""
    file, root, kept = tmp_path / "two.toml", tmp_path / "studies", tmp_path / "kept"
    text = STUDY.format(smoke=ROOT / SMOKE, classify=ROOT / CLASSIFY, data=data.text)

    def explicit(name: str) -> list[tuple[str, str]]:
        line = 'settings.data = "'
        file.write_text(text.replace(line, f'settings.system.precision = "{name}"\n{line}'))
        return jobs(file, root)

    keys = {name: explicit(name) for name in ("fp32", "bf16")}
    assert not set(keys["fp32"]) & set(keys["bf16"])
    file.write_text(text)
    assert jobs(file, root) == keys[fast]
    assert content_key(identity(recipe())) == KEYS["head=mlm"]

    other = "fp32" if fast == "bf16" else "bf16"
    key = keys[other][0][0]
    begun = root / "runs" / key
    write_json_in(begun / "config.json", {"config": {"run": str(begun), "system": {}}})
    here = jobs(file, root)
    assert here[0] == keys[other][0]
    assert here[1][1] == fast  # the second starts from the first, and nothing is there yet
    shutil.rmtree(begun)
    kept.mkdir()
    (kept / f"{key}.zip").touch()
    assert jobs(file, root, kept)[0] == keys[other][0]
    assert jobs(file, root) == keys[fast]


def test_a_table_of_both_precisions_says_so(fast: str, data: Toys, tmp_path: Path) -> None:
    """A seed that is added on another machine has another precision, and the report notes it. A
    study that compares precisions chose them, and has no such note."""
    file, root = tmp_path / "two.toml", tmp_path / "studies"
    text = STUDY.format(smoke=ROOT / SMOKE, classify=ROOT / CLASSIFY, data=data.text)
    text = text.replace("vary.seed = [0]", "vary.seed = [0, 1]")

    def planned(text: str) -> Plan:
        file.write_text(text)
        return Plan(read_study(file, "mini"), root, {}, None)

    assert planned(text).remarks() == []
    other = "fp32" if fast == "bf16" else "bf16"
    chosen = text.replace("vary.start", f'settings.system.precision = "{other}"\nvary.start')
    key = planned(chosen).runs("second", {"seed": "0"})[0].key
    begun = root / "runs" / key
    system = {"precision": other}
    write_json_in(begun / "config.json", {"config": {"run": str(begun), "system": system}})
    plan = planned(text)
    (line,) = plan.remarks()
    assert line.startswith("the runs of the stage second are partly in bf16 and partly in fp32")
    assert line.endswith(
        'base = this study\'s file, and stages.second.settings.system.precision = "fp32"'
    )
    own = tmp_path / "own.toml"
    own.write_text(f'base = "two.toml"\n{line.rpartition(", and ")[2]}\n')
    assert Plan(read_study(own, "mini"), root, {}, None).remarks() == []
    assert f"note: {line}" in listing(plan, Costs(Forecast(plan), {})).splitlines()
    assert f"{line}." in build_report(Results(plan), {}, root).notes
    assert planned(chosen).remarks() == []


def test_a_study_in_emulated_bf16_says_so(
    data: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "two.toml"
    text = STUDY.format(smoke=ROOT / SMOKE, classify=ROOT / CLASSIFY, data=data.text)

    def said(chosen: str, *instructions: str) -> list[str]:
        file.write_text(
            text.replace("vary.start", f'settings.system.precision = "{chosen}"\nvary.start')
        )
        monkeypatch.setattr(precision, "instructions", lambda: set(instructions))
        plan = Plan(read_study(file, "mini"), tmp_path / "studies", {}, None)
        lines = listing(plan, Costs(Forecast(plan), {})).splitlines()
        return [line for line in lines if ", but this processor has no bf16" in line]

    (line,) = said("bf16")
    assert line.startswith(
        "note: bf16 is set for 1 run, but this processor has no bf16 instructions: "
    )
    assert said("bf16", "avx512_bf16") == said("fp32") == []


def write_json_in(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------------ the measurements


def test_the_picture_and_its_numbers(tmp_path: Path) -> None:
    """From made-up curves: bf16 lies 0.01 above fp32, seed 1 lies 0.2 above seed 0."""
    runs = {
        f"{name} seed {seed}": {
            "score": 1.0,
            "loss": [(10 * i, 2.0 - 0.1 * i + up + 0.2 * seed) for i in range(1, 9)],
        }
        for name, up in (("fp32", 0.0), ("bf16", 0.01))
        for seed in benchmark.SEEDS
    }
    apart = benchmark.differences(runs)
    assert apart == {"between precisions": 0.01, "between seeds": 0.2}
    panels = {title: {"metric": "loss", "runs": runs, **apart} for title in benchmark.CURVES}
    with benchmark.style.colours(benchmark.style.LIGHT):
        benchmark.style.write(benchmark.draw(panels), tmp_path / "precision.png")
    assert (tmp_path / "precision.png").stat().st_size > 10_000


@pytest.mark.parametrize("case", [*benchmark.CURVES.values(), *benchmark.SPEED.values()])
def test_every_recipe_of_the_benchmark_is_read(case: benchmark.Case) -> None:
    read = settings.load(Recipe, [*case.recipe, "data=d", "run=r", "system.precision=bf16"])
    assert read.system.precision == "bf16"


def test_contestants_take_turns() -> None:
    order: list[str] = []
    work = {name: [lambda name=name: order.append(name)] for name in ("a", "b")}
    took = benchmark.by_turns(work, 3)  # type: ignore[arg-type]
    assert "".join(order) == "baabba"
    assert {name: len(seconds) for name, seconds in took.items()} == {"a": 3, "b": 3}


def test_the_page_has_the_numbers_of_the_files() -> None:
    page = (ROOT / "docs/precision.md").read_text()
    speed = read_json(ROOT / "docs/precision-speed.json")["cases"]
    panels = read_json(ROOT / "docs/precision-curves.json")["panels"]
    assert speed.keys() == benchmark.SPEED.keys()
    assert panels.keys() == benchmark.CURVES.keys()
    for line in (*benchmark.speed_lines(speed), *benchmark.curve_lines(panels)):
        assert line in page.splitlines()
    assert re.search(r"!\[.+\]\(figures/precision\.png\)", page)
    assert (ROOT / "docs/figures/precision.png").stat().st_size < 150_000

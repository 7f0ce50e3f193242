"""Compiled training: batches of fixed shapes, and what torch.compile makes of the model.

The tests compile with the back end "eager", which traces the model as inductor does, but runs
PyTorch's own operations. Two models are compiled by inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device.compiled_steps import COMPILED
from helpers import CLASSIFY, NO_DROPOUT, SMOKE, Forks, good, refused, training
from test_scale import SHORT, close
from tiny import ESM, MODERNBERT
from torch import Tensor
from toys import Toys

from benchmarks import fake_cuda
from benchmarks.steps import CNN, SHAPE, TASKS
from xformer import train
from xformer.config import load
from xformer.data.batch import Batch
from xformer.data.capacity import Capacities, least_filler
from xformer.data.errors import BadInput
from xformer.data.masking import MaskSchedule
from xformer.data.sampler import Samples, Stream
from xformer.model.config import ModelConfig
from xformer.parallel import compiled
from xformer.parallel.compiled import compile_mode, compile_parts, not_compiled
from xformer.parallel.feed import SHAPES, Feed, to_device
from xformer.parallel.processes import ALONE, Ranks, TrainingSystem
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.tasks.task import Model, Task

LONGEST = 16
NO_RATES = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
EAGER = "from xformer.parallel import compiled; compiled.BACKEND = 'eager'"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile with PyTorch's own operations. The list gets the size of each program."""
    sizes: list[int] = []

    def backend(program: Any, _: Any) -> Callable[..., Any]:
        sizes.append(len(program.graph.nodes))
        forward: Callable[..., Any] = program.forward
        return forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return sizes


def batch_of(task: Task, rows: int, seed: int = 0) -> Batch[np.ndarray]:
    """A batch of rows of 4 to LONGEST tokens, sorted by length, as the assembler makes it."""
    draw = np.random.default_rng([seed, rows])
    rows *= 2 if task.name == "choice" else 1
    sizes = np.sort(draw.integers(4, LONGEST + 1, rows))
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    T = int(ends[-1])
    places = np.sort(draw.choice(T, T // 4, replace=False))
    labels = draw.integers(0, 2, rows)
    if task.name == "span":
        labels = draw.integers(0, 4, (rows, 2))
    if task.name == "regress":
        labels = draw.normal(size=rows).astype(np.float32)
    return Batch(
        tokens=draw.integers(5, SHAPE["vocab_size"], T).astype(np.int32),
        positions=(np.arange(T) - np.repeat(ends[:-1], sizes)).astype(np.int32),
        segments=np.zeros(T, np.int32),
        cu_seqlens=ends,
        longest=int(sizes.max()),
        labels=labels,
        places=places,
        targets=draw.integers(0, 3 if task.name == "tag" else SHAPE["vocab_size"], len(places)),
        rows=np.arange(rows),
        together=2 if task.name == "choice" else 1,
    )


def capacities_for(task: Task, batches: list[Batch[np.ndarray]], most: int = 3) -> Capacities:
    tokens = np.array([len(batch.tokens) for batch in batches])
    rows = np.array([len(batch.cu_seqlens) - 1 for batch in batches])
    masked = 1.0 if task.name == "tag" else 0.25
    return Capacities(tokens, rows, most, LONGEST, batches[0].together, masked)


def model_of(task: Task, **changes: Any) -> Model:
    torch.manual_seed(0)
    model = Model(ModelConfig(**(SHAPE | changes)), task).train()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.05)
    return model


def step(model: Model, batch: Batch[np.ndarray]) -> tuple[list[float], Tensor]:
    """The loss, its count and the right predictions, and the gradient."""
    model.zero_grad()
    loss = model(to_device(batch, CPU))
    loss.total.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    values = [loss.total.item(), float(loss.count), loss.correct.item()]
    return values, torch.cat([gradient.flatten() for gradient in gradients])


def same_step(ours: tuple[list[float], Tensor], expected: tuple[list[float], Tensor]) -> None:
    assert ours[0] == pytest.approx(expected[0], rel=2e-6)
    difference = (ours[1] - expected[1]).norm() / expected[1].norm()
    assert difference < 2e-5


# ------------------------------------------------------------------------------- the capacities


@pytest.mark.parametrize("most", [1, 2, 3, 20])
def test_the_chosen_levels_need_the_least_filler(most: int) -> None:
    sizes = np.random.default_rng(most).integers(10, 60, 12)
    values = sorted(set(sizes.tolist()))

    def filler(levels: list[int]) -> int:
        return sum(min(level for level in levels if level >= size) - size for size in sizes)

    ours = least_filler(sizes, most)
    assert len(ours) == min(most, len(values))
    others = combinations(values, min(most, len(values)))
    assert filler(ours) == min(filler([*c]) for c in others if c[-1] == values[-1])


def test_a_filled_batch_has_the_shape_of_a_capacity() -> None:
    task = TASKS["mlm"]
    batches = [batch_of(task, rows) for rows in (8, 9, 30, 31)]
    capacities = capacities_for(task, batches, most=2)
    known = capacities.known
    for batch in batches:
        filled = capacities.fill(batch)
        T, N = len(batch.tokens), len(batch.cu_seqlens) - 1
        assert filled.places is not None
        shape = len(filled.tokens), len(filled.cu_seqlens) - 1, len(filled.places)
        assert shape in [(c.tokens, c.rows, c.places) for c in known]
        assert filled.longest == LONGEST
        for name in ("tokens", "positions", "segments"):
            np.testing.assert_array_equal(getattr(filled, name)[:T], getattr(batch, name))
            assert getattr(filled, name).dtype == np.int32
        sizes = np.diff(filled.cu_seqlens)
        np.testing.assert_array_equal(sizes[:N], np.diff(batch.cu_seqlens))
        assert filled.cu_seqlens[-1] == len(filled.tokens)
        assert (sizes >= 0).all()
        assert sizes.max() <= LONGEST
        assert (filled.first < len(filled.tokens)).all()  # also of empty rows
        starts = np.repeat(filled.cu_seqlens[:-1], sizes)
        np.testing.assert_array_equal(filled.positions, np.arange(len(filled.tokens)) - starts)
        np.testing.assert_array_equal(filled.rows, batch.rows)


def test_a_batch_beyond_all_capacities_gets_a_larger_one() -> None:
    """No masked place is left out. A batch is filled as if no other had come before it, because a
    continued run has not seen the others."""
    task = TASKS["mlm"]
    capacities = capacities_for(task, [batch_of(task, 8)])
    known = list(capacities.known)
    shapes: dict[int, tuple[int, int, int]] = {}
    for rows in (40, 10, 20, 30, 40):
        large = batch_of(task, rows)
        assert large.places is not None
        filled = capacities.fill(large)
        assert filled.places is not None
        assert filled.targets is not None
        assert (filled.targets >= 0).sum() == len(large.places)
        shape = len(filled.tokens), len(filled.cu_seqlens) - 1, len(filled.places)
        assert shapes.setdefault(rows, shape) == shape
        alone = capacities_for(task, [batch_of(task, 8)]).fill(large)
        assert len(alone.tokens) == len(filled.tokens)
        assert len(filled.tokens) < 2 * len(large.tokens)
    assert capacities.known == known


@pytest.mark.parametrize("masked", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("together", [1, 4])
def test_the_smallest_capacity_can_grow(masked: float, together: int) -> None:
    """Up to 16 tokens, 1 row and 16 places, of which a twentieth is less than one."""
    small = Capacities(np.array([4]), np.array([together]), 1, 512, together, masked)
    larger = [*islice(small.beyond(), 20)]
    for before, after in pairwise([*small.known, *larger]):
        assert after.tokens >= before.tokens
        assert after.rows % together == 0
    assert larger[-1].tokens > 2**16
    assert larger[-1].rows > 2**12
    assert larger[-1].places > 2**12 or not masked


class Lengths:
    """An assembler of rows whose lengths are drawn, without any tokens."""

    def __init__(self, lengths: np.ndarray, longest: int):
        self.lengths, self.max_tokens, self.extra = lengths, longest, 2
        self.labels_words = False
        self.split: Any = type("Split", (), {"together": 1})

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return self.lengths[rows]


@pytest.mark.parametrize(
    ("rows", "tokens", "limit"), [(32, 0, 0.06), (16, 0, 0.06), (1, 2**13, 0.03)]
)
@pytest.mark.parametrize("spread", [0.3, 0.6])
def test_little_of_a_batch_is_filler(rows: int, tokens: int, limit: float, spread: float) -> None:
    """Over 1,000 steps of rows whose lengths vary as those of sentences do."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(3.3, spread, 20_000)), 5, 128).astype(int)
    assembler: Any = Lengths(lengths, 128)
    stream = Stream(Samples(len(lengths), 0), 2**62, assembler.sizes, rows, tokens)
    feed = Feed(assembler, stream, ALONE, fixed=True)
    assert feed.capacities is not None
    assert len(feed.capacities.known) == (1 if tokens else SHAPES)
    position, real, whole = 0, 0, 0
    shapes = set()
    for _ in range(1000):
        examples, _, sizes = stream.take(position)
        position += len(examples)
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        T = int(ends[-1])
        nothing = np.zeros(T, np.int32)
        filled = feed.capacities.fill(Batch(nothing, nothing, nothing, ends, 128, rows=examples))
        real, whole = real + T, whole + len(filled.tokens)
        shapes.add(len(filled.tokens))
    assert 1 - real / whole < limit
    assert len(shapes) <= (1 if tokens else SHAPES + 2)


def test_a_rank_that_never_has_rows_has_a_capacity() -> None:
    """The other rank gets the only row of every step."""
    lengths = np.full(20, 9)
    assembler: Any = Lengths(lengths, 128)
    for rank in range(2):
        stream = Stream(Samples(len(lengths), 0), 20, assembler.sizes, 1)
        masking = MaskSchedule(0, 0.15, 0.15)
        feed = Feed(assembler, stream, Ranks(rank, 2, CPU), masking=masking, fixed=True)
        assert feed.capacities is not None
        assert [c.tokens for c in feed.capacities.known] == [16]


# ------------------------------------------------------------------------------ compiled models


@pytest.mark.parametrize(
    ("name", "what"),
    [*((name, what) for name in TASKS for what in ("none", "layers")), ("mlm", "whole")],
)
@pytest.mark.slow
def test_filler_and_compiling_change_no_task(
    name: str, what: str, traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, count, right predictions and gradient. The whole loss has no graph break."""
    task = TASKS[name]
    batches = [batch_of(task, rows) for rows in (8, 11, 12)]
    capacities = capacities_for(task, batches)
    model = model_of(task, **NO_RATES)
    expected = [step(model, batch) for batch in batches]
    if what == "whole":  # a user may compile the loss too
        model.compile(fullgraph=True, dynamic=False, backend=compiled.BACKEND)
    else:
        compile_parts(
            model, what, ALONE, lambda: to_device(capacities.fill(batches[0]), CPU), "fp32"
        )
    for batch, before in zip(batches, expected, strict=True):
        same_step(step(model, capacities.fill(batch)), before)
    assert bool(traced) == (what != "none")


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({"norm": "pre"}, 3),
        ({"shared_layers": True, "embedding": 32}, 3),
        ({"positions": "sinusoidal"}, 3),
        ({"norm_form": "deviation", "token_types": 0}, 3),
        ({"layers": 5}, 3),
        (ESM, 3),
        # the first layer has no norm, and layers with a window have a program of their own
        ({**MODERNBERT, "layers": 7}, 5),
    ],
)
@pytest.mark.slow
def test_families_compile_without_breaks(
    changes: dict[str, Any], programs: int, traced: list[int]
) -> None:
    """However many layers a model has, there are few programs for each shape: the embeddings, a
    layer, and the last layer, which computes only the masked tokens after its attention."""
    task = TASKS["mlm"]
    batch = batch_of(task, 8)
    capacities = capacities_for(task, [batch])
    model = model_of(task, **NO_RATES, **changes)
    expected = step(model, batch)
    filled = capacities.fill(batch)
    assert compile_parts(model, "layers", ALONE, lambda: to_device(filled, CPU), "fp32") == ""
    same_step(step(model, filled), expected)
    assert len(traced) == programs


@pytest.mark.slow
def test_a_thousand_mixed_batches_compile_nothing_more(traced: list[int]) -> None:
    """With dropout, whose seed changes in every step."""
    task = TASKS["classify"]
    model = model_of(task, layers=1, hidden=16, heads=2, intermediate=16)
    batches = [batch_of(task, 24, seed) for seed in range(1000)]
    capacities = capacities_for(task, batches, most=SHAPES)
    compile_parts(
        model, "layers", ALONE, lambda: to_device(capacities.fill(batches[0]), CPU), "fp32"
    )
    seen = set()
    warm = 0
    for batch in batches:
        filled = capacities.fill(batch)
        if len(filled.tokens) not in seen:
            seen.add(len(filled.tokens))
            model(to_device(filled, CPU)).total.backward()
            warm = len(traced)
        else:
            model(to_device(filled, CPU))
            assert len(traced) == warm
    assert 4 <= len(seen) <= SHAPES
    assert len(traced) == 2 * len(seen)


def test_dropout_differs_from_step_to_step(traced: list[int]) -> None:
    task = TASKS["mlm"]
    model = model_of(task)
    batch = capacities_for(task, [batch_of(task, 8)]).fill(batch_of(task, 8))
    compile_parts(model, "layers", ALONE, lambda: to_device(batch, CPU), "fp32")
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(step(model, batch)[0][0])
    assert losses[0] == losses[2] != losses[1]
    with torch.no_grad():
        assert model(to_device(batch, CPU)).total != model(to_device(batch, CPU)).total


@pytest.mark.slow
def test_inductor_compiles_two_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name, changes in (("mlm", {"layers": 1}), ("classify", {"layers": 1, "norm": "pre"})):
        task = TASKS[name]
        model = model_of(task, **(NO_RATES | changes))
        batch = batch_of(task, 8)
        filled = capacities_for(task, [batch]).fill(batch)
        expected = step(model, batch)
        failure = compile_parts(model, "layers", ALONE, lambda f=filled: to_device(f, CPU), "fp32")  # type: ignore[misc]
        assert failure == ""
        same_step(step(model, filled), expected)
    assert any(tmp_path.rglob("*.so"))


def test_without_a_compiler_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no gcc\nsecond line\nSet TORCHDYNAMO_VERBOSE=1 for more")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    model, batch = model_of(TASKS["mlm"]), batch_of(TASKS["mlm"], 8)
    failure = compile_parts(model, "layers", ALONE, lambda: to_device(batch, CPU), "fp32")
    assert "no gcc second line" in failure
    assert "TORCHDYNAMO_VERBOSE" not in failure
    assert batch.places is not None
    assert step(model, batch)[0][1] == len(batch.places)
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(("rank", "prefix"), [(0, ""), (1, "rank 1: ")])
def test_every_rank_reports_that_it_has_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, prefix: str
) -> None:
    """The monitor of another rank than 0 prints nothing."""
    recipe = SimpleNamespace(system=SimpleNamespace(precision="fp32"))
    setup: Any = SimpleNamespace(ranks=Ranks(rank, 2, CPU), recipe=recipe, compiling="layers")
    feed: Any = SimpleNamespace(sample=lambda: to_device(batch_of(TASKS["mlm"], 8), CPU))
    lines: list[str] = []
    monitor: Any = SimpleNamespace(say=lines.append if rank == 0 else None)
    monkeypatch.setattr(compiled, "BACKEND", lambda *_: None)  # it gives no code
    train._compile(model_of(TASKS["mlm"]), setup, feed, monitor)
    [line] = lines or capsys.readouterr().err.splitlines()
    assert line.startswith(f"{prefix}torch.compile fails here (")
    assert line.endswith("): the model runs without it")


def test_scoring_does_not_use_compiled_code(traced: list[int]) -> None:
    """Its batches have many shapes."""
    task = TASKS["classify"]
    model = model_of(task, **NO_RATES)
    batch = capacities_for(task, [batch_of(task, 8)]).fill(batch_of(task, 8))
    compile_parts(model, "layers", ALONE, lambda: to_device(batch, CPU), "fp32")
    before = len(traced)
    with not_compiled():
        model(to_device(batch_of(task, 5), CPU))
    assert len(traced) == before
    model(to_device(batch_of(task, 5), CPU))
    assert len(traced) > before


# ------------------------------------------------------------------------------------- the runs


def test_what_is_compiled() -> None:
    def decided(
        asked: Any, device: str, ranks: int = 1, config: Any = SHAPE, pays: bool = True
    ) -> str:
        system = TrainingSystem(compile=asked)
        where = Ranks(0, ranks, torch.device(device))
        return compile_mode(system, where, ModelConfig(**config), lambda: pays)

    assert decided("auto", "cpu") == "none"
    assert decided("auto", "cuda") == "both"
    assert decided("auto", "cuda", pays=False) == "graphs"
    assert decided("auto", "cuda", 8) == "none"
    assert decided("auto", "cuda", config=CNN) == "none"
    assert decided("graphs", "cuda") == "graphs"
    assert decided("layers", "cpu") == "layers"
    with pytest.raises(BadInput, match="needs a transformer"):
        decided("layers", "cuda", config=CNN)
    for asked in ("graphs", "both"):
        assert decided(asked, "cuda", 2) == asked
        with pytest.raises(BadInput, match=f"{asked} needs a GPU; give layers or none"):
            decided(asked, "cpu")


def test_a_compiler_is_for_long_runs_with_one_shape(
    data: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting `auto`, decided by the first micro-batches of the run."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    def decided(recipe: str, store: Path, *settings: str) -> str:
        _, *line = training(recipe, store, tmp_path / "run", *settings)
        setup = prepare(load(Recipe, line), ALONE)
        assert setup.compiling == "none"
        on_gpu = replace(setup, ranks=Ranks(0, 1, torch.device("cuda")))
        return on_gpu.compiling

    assert decided(SMOKE, data.text, "batch.tokens=4096", "batch.max_tokens=16") == "both"
    assert decided(SMOKE, data.text, "batch.rows=2") == "graphs"
    assert decided(CLASSIFY, data.classes, "batch.tokens=4096", "batch.max_tokens=16") == "graphs"


@pytest.mark.slow
def test_a_compiled_run_gives_the_same_model(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """On one rank and on two, with accumulated gradients, scored at the end."""
    runs = {
        "plain": (1, "system.compile=none"),
        "compiled": (1, "system.compile=layers"),
        "ranks": (2, "system.compile=layers"),
    }
    for name, (ranks, setting) in runs.items():
        line = training(SMOKE, data.text, tmp_path / name, *SHORT, *NO_DROPOUT, setting)
        done = good(forks.run(*line, "batch.accumulate=2", ranks=ranks, before=EAGER))
        assert ("torch.compile: layers" in done.err) == (name != "plain")
    for name in ("compiled", "ranks"):
        close(tmp_path / name, tmp_path / "plain")


def test_a_change_of_what_is_compiled_is_announced(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Filler changes what dropout draws. On the CPU auto and none are the same."""
    line = training(SMOKE, data.text, tmp_path / "run", "train.validate_every=50")
    for steps, setting, change in (
        (2, "layers", ""),
        (4, "auto", "since the last start: system.compile layers -> none; results may not be"),
        (6, "none", ""),
    ):
        settings = f"train.steps={steps}", f"system.compile={setting}"
        err = good(forks.run(*line, *settings, before=EAGER)).err
        assert ("since the last start" in err) is bool(change)
        assert change in err


def test_a_setting_that_does_not_fit_is_one_line(forks: Forks, data: Toys, tmp_path: Path) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", *SHORT, "system.compile=graphs")
    refused(forks.run(*line), "system.compile=graphs needs a GPU; give layers")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------- a fake device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has a CUDA device")
@pytest.mark.slow
def test_every_step_compiles_for_cuda_without_breaks(tmp_path: Path) -> None:
    """The whole loss as one program, with the attention kernels of CUDA in it."""
    process = fake_cuda.start("fake_device.compiled_steps", tmp_path)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines.keys() == COMPILED.keys()
    flash, efficient = (
        "1 program, _flash_attention_forward",
        "1 program, _efficient_attention_forward",
    )
    assert lines["mlm, bf16"] == flash
    assert lines["no dropout"] == efficient
    assert lines.pop("class weights") == "2 programs"  # the first one copies them to the device
    for name, line in lines.items():
        assert line.startswith("1 program"), (name, line)

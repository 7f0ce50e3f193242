"""Losses of short trainings against recorded ones: every task, family and optimizer.

The recorded numbers hold the behaviour of training fixed while its code is rewritten. Each case is
20 steps of the real loop in fp32 without dropout. Data and initial weights come from numbers that
are committed (tests/golden/losses.npz, drawn once by numpy), so that no generator of a later numpy
or torch can change them. The recorded losses are in tests/golden/losses.json.

    python tests/test_golden_losses.py                   # records all cases anew
    python tests/test_golden_losses.py 'adam*' tag       # records these cases and keeps the others

Recording needs a reason that the commit message gives: a case was added or removed, or a published
formula was implemented wrongly and is now right. A faster kernel, a new version of torch, another
processor or a rewritten loop are no reasons: they must reproduce the numbers that are here.

Dropout is tested below by its statistics, in the whole model as the loop trains it. The tests of
single operations are in test_ops.py, and those of the seeds of steps, micro-batches and ranks in
test_train.py.
"""

from __future__ import annotations

import fnmatch
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Forks, good
from torch import Tensor, nn

from xformer.checkpoint import Checkpoint
from xformer.config import load
from xformer.data import vocabularies
from xformer.data.writing import create_store
from xformer.ops import native
from xformer.parallel.processes import ALONE
from xformer.recipe import Recipe
from xformer.train import train

GOLDEN = Path(__file__).parent / "golden"
NUMBERS, LOSSES = GOLDEN / "losses.npz", GOLDEN / "losses.json"

# Relative bounds of the first FEW steps and of the rest. Other kernels and another instruction set
# change a loss by up to 1.1e-6 in the first steps and 1.6e-6 later. They change the norm by up to
# 2.9e-5, because it sums up to a million squares in fp32 and rounding depends on their order.
FEW, STEPS = 5, 20
LOSS = (1e-5, 1e-3)
NORM = (1e-4, 1e-3)

ROWS, PIECES, LONGEST = 96, 64, 24  # of a store; LONGEST includes special tokens
TABLE = 2**15  # words of a large table, of which few rows have a gradient in a step
BASE = {
    "seed": 7,
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "model.intermediate": 64,
    "model.max_positions": LONGEST,
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "batch.rows": 8,
    "batch.max_tokens": LONGEST,
    "optim.lr": 2e-3,
    "optim.warmup": 4,
    "optim.weight_decay": 0.3,
    "optim.clip": 0.5,
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.select": "last",
    "train.keep_state": "false",
    "system.threads": 1,
    "system.precision": "fp32",
}

Case = tuple[str, dict[str, Any]]  # the store, and settings over those of BASE

# ------------------------------------------------------------------------------------ the cases

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {
        "first_position": 2,
        "token_types": 1,
        "layer_norm_eps": 1e-5,
        "dropout_form": "roberta",
    },
    "albert": {
        "shared_layers": "true",
        "embedding": 16,
        "activation": "gelu_tanh",
        "dropout_form": "albert",
    },
    "distilbert": {"token_types": 0, "pooler": "relu", "dropout_form": "distilbert"},
    "plus": {"norm_form": "deviation", "pooler": "none"},
    "plus-scratch": {"positions": "sinusoidal", "pooler": "none"},
    "pre-ln": {"norm": "pre", "activation": "relu", "layer_norm_eps": 1e-2},
}
# the peak learning rate of each optimizer, and its other settings
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2e-3},
    "adam": {"lr": 2e-3, "weight_decay": 0.01, "eps": 1e-4},
    "adagrad": {"lr": 1e-2, "weight_decay": 0.01},
    "adamax": {"lr": 2e-3, "weight_decay": 0.01, "betas": "[0.8, 0.95]"},
    "radam": {"lr": 2e-3, "weight_decay": 0.01},
    "novograd": {"lr": 5e-3, "weight_decay": 0.01},
}
HILBERT = {
    "model.architecture": "hilbert_cnn",
    "model.kmer": 2,
    "model.head_dropout": 0,
    "optim.name": "adam",
    "optim.lr": 1e-4,
    "optim.eps": 1e-3,
    "optim.weight_decay": 1e-3,
    **{f"model.{name}": None for name in ("layers", "hidden", "heads", "intermediate")},
    "model.attention_dropout": None,
}


def _cases() -> dict[str, Case]:
    """Every value of each axis alone, and those combinations that take a path of their own through
    the code.
    """
    both = {"head": "mlm", "masking.pair_weight": 1.0}
    words = {"model.vocab_size": TABLE}
    actual: dict[str, Case] = {
        "mlm": ("text", {"head": "mlm"}),
        "classify": ("classes", {"head": "classify"}),
        "regress": ("scores", {"head": "regress"}),
        "span": ("spans", {"head": "span"}),
        "tag": ("tags", {"head": "tag"}),
        "hilbert classify": ("dna", {"head": "classify", **HILBERT}),
        "hilbert regress": ("dna scores", {"head": "regress", **HILBERT}),
    }
    for family, settings in FAMILIES.items():
        model = {f"model.{name}": value for name, value in settings.items()}
        actual[f"{family} mlm and pairs"] = ("pairs", both | model)
        actual[f"{family} classify pairs"] = ("pairs", {"head": "classify"} | model)
    for name, settings in OPTIMIZERS.items():
        optim = {f"optim.{key}": value for key, value in {"name": name, **settings}.items()}
        if name != "adamw":  # adamw trains all the cases above
            actual[f"{name} mlm"] = ("text", {"head": "mlm"} | optim)
        # only the table's rows of the words in a batch have a gradient
        actual[f"{name} many words"] = ("classes", {"head": "classify"} | words | optim)
    more: dict[str, Case] = {
        # the table is tied to the decoder, so all its rows have a gradient
        "mlm, many words": ("text", {"head": "mlm"} | words),
        "mlm, many words, accumulated": ("text", {"head": "mlm", "batch.accumulate": 2} | words),
        "accumulated": ("text", {"head": "mlm", "batch.accumulate": 2}),
        "adam many words, accumulated": (
            "classes",
            {"head": "classify", "optim.name": "adam", "batch.accumulate": 2} | words,
        ),
        "by tokens": ("text", {"head": "mlm", "batch.tokens": 100}),
        "words alone": ("text", {"head": "mlm", "train.only": '["embeddings.word", "mlm_head"]'}),
        # with a large eps the step is proportional to the gradient, so clipping has an effect
        "large eps, cosine": (
            "text",
            {"head": "mlm", "optim.eps": 0.1, "optim.lr": 0.1, "optim.schedule": "cosine"},
        ),
        "no clipping, constant": (
            "classes",
            {"head": "classify", "optim.clip": 0, "optim.schedule": "constant"},
        ),
    }
    return actual | more


CASES = _cases()
# These run with both kernels. No optimizer knows which kernels made the gradients, and the
# convolutional network, which names its optimizer too, uses none of the operations.
BY_KERNELS = [case for case, (_, settings) in CASES.items() if "optim.name" not in settings]
# these also run on two ranks; the reduction is the same for all cases
BY_TWO = ["mlm", "classify"]

# ------------------------------------------------------------------------- weights, data, a run


@cache
def numbers() -> tuple[np.ndarray, np.ndarray]:
    """The committed draws: of the normal distribution, float32, and of 0 to 65,535, int64.

    Both lengths are primes, so that no two rows of a matrix are equal.
    """
    with np.load(NUMBERS) as file:
        return file["normal"].astype(np.float32), file["uniform"].astype(np.int64)


def take(pool: np.ndarray, what: str, count: int) -> np.ndarray:
    """`count` of the numbers. What they are for (`what`) decides where they begin."""
    start = zlib.crc32(what.encode()) % len(pool)
    return np.resize(np.roll(pool, -start), count)


def drawn(name: str, shape: torch.Size) -> Tensor:
    """An initial weight. Norms and biases differ from those of a fresh model, so that errors in
    them show.
    """
    values = take(numbers()[0], name, shape.numel()).reshape(shape)
    *_, owner, kind = ("", *name.split("."))
    if kind in ("bias", "running_mean"):
        values = 0.1 * values
    elif owner.endswith("norm"):
        values = 1 + 0.1 * values
    elif "embeddings" in name and "projection" not in name:
        values = 0.1 * values
    else:
        values = values / np.float32(math.sqrt(np.prod(shape[1:])))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def with_drawn_weights(original: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], Any]:
    """`Checkpoint.model` of a checkpoint in which every weight is the committed one."""

    def model(self: Checkpoint) -> Any:
        weights = {name: drawn(name, weight.shape) for name, weight in self.weights.items()}
        return original(replace(self, weights=weights))

    return model


def draw_weights() -> None:
    """Make every model of this process begin with the committed weights."""
    Checkpoint.model = with_drawn_weights(Checkpoint.model)  # type: ignore


def make_store(path: Path, least: int = 3) -> Path:
    """Write the store that a path is named after: ROWS rows of `least` tokens to as many as fit."""
    name = path.name
    pair = name in ("pairs", "spans")
    pieces = [f"w{i}" for i in range(PIECES - 5)]
    letters = vocabularies.symbols("ACGTN")
    known = letters if name.startswith("dna") else vocabularies.symbols(pieces, separated=True)
    special, pool = 5, numbers()[1]

    def below(what: str, limit: int | np.ndarray, count: int = ROWS) -> np.ndarray:
        return take(pool, f"{name} {what}", count) % limit

    most = (LONGEST - 3) // 2 if pair else LONGEST - 2
    columns, ragged, lengths = {"tokens": ""}, ["tokens"], {}
    for text in ("tokens", "tokens_b") if pair else ("tokens",):
        lengths[text] = least + below(f"length of {text}", most + 1 - least)
        columns[text] = ""
        ragged = list(columns)
    first = below("first", lengths["tokens_b"]) if name == "spans" else None
    labels: dict[str, tuple[str, str, np.ndarray, tuple[str, ...]]] = {
        "classes": ("class", "int64", below("label", 3), ("a", "b", "c")),
        "dna": ("class", "int64", below("label", 3), ("a", "b", "c")),
        "pairs": ("class", "int64", below("label", 2), ("no", "yes")),
        "scores": ("score", "float32", below("label", 1000) / 250 - 2, ()),
        "dna scores": ("score", "float32", below("label", 1000) / 250 - 2, ()),
    }
    kind, dtype, label, classes = labels.get(name, ("text", "", np.zeros(0), ()))
    if first is not None:
        last = first + below("last", lengths["tokens_b"] - first)
        kind, dtype, label = "span", "(2,)i4", np.stack([first, last], 1)
        label[::7] = -1  # questions without an answer
    if kind != "text":
        columns["label"] = dtype
    if name == "tags":
        kind, classes = "tag", ("O", "B-X", "I-X", "B-Y")
        columns["labels"], ragged = "int16", [*ragged, "labels"]
    with create_store(path, known, columns, ragged) as store:
        with store.split("train") as split:
            for text, sizes in lengths.items():
                total = int(sizes.sum())
                values = special + below(text, len(known) - special, total)
                split.append_ragged(text, values, sizes)
                if name == "tags":
                    tags = below("label", 5, total)
                    split.append_ragged("labels", np.where(tags == 4, -100, tags), sizes)
            if "label" in columns:
                split.append("label", label)
        store.finish(kind, classes, None, {})
    return path


def settings(case: str, stores: Path, run: Path) -> list[str]:
    """The key=value arguments of a case. Its store is made if it does not exist."""
    store, own = CASES[case]
    if not (stores / store).exists():
        make_store(stores / store)
    return arguments({**BASE, **own, "data": stores / store, "run": run})


def arguments(values: dict[str, Any]) -> list[str]:
    """Settings as key=value arguments. None means the default."""
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def record_of(run: Path) -> dict[str, list[float]]:
    """The loss and the gradient norm of every step of a run."""
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    return {"loss": [s["loss"] for s in steps], "norm": [s["grad_norm"] for s in steps]}


def run_case(case: str, stores: Path, run: Path) -> dict[str, list[float]]:
    """Train a case in this process."""
    train(load(Recipe, settings(case, stores, run), recipe=False), ALONE)
    return record_of(run)


def recorded() -> dict[str, dict[str, list[float]]]:
    """The recorded numbers by case."""
    actual: dict[str, dict[str, list[float]]] = json.loads(LOSSES.read_text(encoding="utf-8"))
    return actual


def differences(actual: list[float], expected: list[float]) -> np.ndarray:
    """Relative differences by step."""
    return np.abs(np.array(actual) / np.array(expected) - 1)


def complaints(case: str, actual: dict[str, list[float]]) -> list[str]:
    """A line if the loss differs from what is recorded, and one if the gradient norm does."""
    lines = []
    for name, bounds in (("loss", LOSS), ("norm", NORM)):
        off = differences(actual[name], recorded()[case][name])
        bound = np.where(np.arange(STEPS) < FEW, *bounds)
        if (bad := np.flatnonzero(~(off <= bound))).size:
            step = bad[0]
            lines.append(
                f"{case}: the {name} of step {step + 1} is {actual[name][step]:.8g}, recorded is "
                f"{recorded()[case][name][step]:.8g}: {off[step]:.1e} apart, {bound[step]:.0e} is "
                f"allowed; largest of all steps {off.max():.1e}"
            )
    return lines


# ------------------------------------------------------------------------------------ the tests


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads do not speed up tiny products, and they would change the order of the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the cases' stores, which are made when a case needs them."""
    return tmp_path_factory.mktemp("stores")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", BY_KERNELS)
def test_losses_are_those_recorded(
    case: str, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "model", with_drawn_weights(Checkpoint.model))
    assert not complaints(case, run_case(case, stores, tmp_path / "run"))


@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_KERNELS])
@pytest.mark.slow
def test_losses_of_each_optimizer_are_those_recorded(
    case: str, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "model", with_drawn_weights(Checkpoint.model))
    assert not complaints(case, run_case(case, stores, tmp_path / "run"))


@pytest.mark.parametrize("case", BY_TWO)
def test_losses_of_two_ranks_are_those_recorded(
    case: str, stores: Path, forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "empty.toml").touch()
    recipe = str(tmp_path / "empty.toml")
    line = ["train.py", recipe, *settings(case, stores, tmp_path / "run")]
    before = "import sys; sys.path.insert(0, 'tests'); import test_golden_losses as golden"
    good(forks.run(*line, ranks=2, before=f"{before}; golden.draw_weights()"))
    assert not complaints(case, record_of(tmp_path / "run"))


# --------------------------------------------------------------------------------------- dropout


class Watcher:
    """Notes which elements the dropout of a model keeps, in every forward pass of its training.

    A dropped element has no gradient at the input of dropout. For attention every query and key is
    made 0, and every value the unit vector of its position, so that a row of the output is the row
    of probabilities after dropout. All rows of the batch have `length` tokens.
    """

    def __init__(self, model: nn.Module, length: int, heads: int):
        self.length, self.heads = length, heads
        self.inputs: list[Tensor] = []  # of dropout; their gradients show what was kept
        self.maps: list[Tensor] = []  # True where a probability was kept, (N, H, L, L)
        for name, module in model.named_modules():
            if name.endswith(("embeddings.norm", "attention.out", "mlp.down")):
                module.register_forward_hook(self._note)
            if name.endswith("attention.qkv"):
                module.register_forward_hook(self._replace)
            if name.endswith("attention.out"):
                module.register_forward_pre_hook(self._look)

    def _note(self, module: nn.Module, given: Any, out: Tensor) -> None:
        out.retain_grad()
        self.inputs.append(out)

    def _replace(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        made = torch.zeros_like(out).view(len(out), 3, self.heads, -1)
        rows = torch.arange(len(out))
        made[rows, 2, :, rows % self.length] = 1.0
        return made.view_as(out) + 0.0 * out

    def _look(self, module: nn.Module, given: tuple[Tensor]) -> None:
        rows = given[0].detach().view(-1, self.length, self.heads, given[0].size(1) // self.heads)
        self.maps.append(rows[..., : self.length].transpose(1, 2) != 0)

    def kept(self) -> list[Tensor]:
        """True where an element of a hidden state was kept, (T, C) each."""
        return [x.grad != 0 for x in self.inputs if x.grad is not None]


def look_independent(masks: list[Tensor], rate: float, axes: int) -> None:
    """Assert that each mask drops this share, and that masks are not correlated.

    Neither two masks nor neighbours along their last `axes` may be correlated. Every bound is 5
    standard deviations: under a given seed, one of 1,000 correct programs fails by chance. Longer
    masks are cut to the shortest.
    """
    least = min(map(len, masks))
    values = torch.stack([mask[:least].double() for mask in masks]) - (1 - rate)
    count, variance = values[0].numel(), rate * (1 - rate)
    assert float(values.flatten(1).mean(1).abs().max()) < 5 * math.sqrt(variance / count)
    assert abs(float(values.mean())) < 5 * math.sqrt(variance / values.numel())
    bound = 5 * variance
    for one, two in combinations(range(len(masks)), 2):
        correlated = float((values[one] * values[two]).mean())
        assert abs(correlated) < bound / math.sqrt(count), f"masks {one} and {two}"
    for axis in range(-axes, 0):
        size = values.size(axis)
        here, there = values.narrow(axis, 0, size - 1), values.narrow(axis, 1, size - 1)
        assert abs(float((here * there).mean())) < bound / math.sqrt(here.numel()), axis


@pytest.mark.usefixtures("kernels")
def test_dropout_is_independent_by_position_layer_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two micro-batches through three layers."""
    length, heads, passes = 23, 2, 6
    store = make_store(tmp_path / "spans", least=10)
    watchers: list[Watcher] = []
    original = Checkpoint.model

    def model(self: Checkpoint) -> Any:
        made = original(self)
        watchers.append(Watcher(made, length, heads))
        return made

    monkeypatch.setattr(Checkpoint, "model", model)
    own = {
        "head": "span",
        "model.layers": 3,
        "model.hidden": 64,
        "model.dropout": 0.1,
        "model.attention_dropout": 0.2,
        "batch.rows": 32,
        "batch.accumulate": 2,
        "train.steps": 3,
    }
    line = arguments({**BASE, **own, "data": store, "run": tmp_path / "run"})
    train(load(Recipe, line, recipe=False), ALONE)
    (watcher,) = watchers
    hidden, maps = watcher.kept(), watcher.maps
    assert [mask.size(1) for mask in hidden] == [64] * 7 * passes
    assert [mask.shape[1:] for mask in maps] == [(heads, length, length)] * 3 * passes
    assert min(map(len, maps)) >= 15  # rows of a micro-batch
    look_independent(hidden, 0.1, axes=2)
    look_independent(maps, 0.2, axes=3)


@pytest.mark.usefixtures("kernels")
def test_two_runs_with_dropout_are_equal_bit_for_bit(stores: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        own = {"model.dropout": 0.1, "model.attention_dropout": 0.1, "seed.dropout": seed}
        line = [*settings("accumulated", stores, tmp_path / name), *arguments(own)]
        train(load(Recipe, line, recipe=False), ALONE)
        weights.append(
            (tmp_path / name / f"checkpoints/step_{STEPS}/model.safetensors").read_bytes()
        )
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


# ------------------------------------------------------------------------------------- recording


def main(patterns: list[str]) -> None:
    """Record the cases whose names match one of the patterns. Only PyTorch's own kernels are
    used.
    """
    if not NUMBERS.exists():
        draw = np.random.Generator(np.random.PCG64(23))
        normal = draw.standard_normal(16_381).astype(np.float16)
        NUMBERS.parent.mkdir(exist_ok=True)
        np.savez(NUMBERS, normal=normal, uniform=draw.integers(2**16, size=8_191, dtype=np.uint16))
    torch.set_num_threads(1)
    native.absent = native.OFF
    draw_weights()
    actual = recorded() if LOSSES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if any(fnmatch.fnmatch(case, pattern) for pattern in patterns or ["*"]):
                made = run_case(case, Path(folder), Path(folder) / f"run of {case}")
                actual[case] = {k: [float(f"{v:.8g}") for v in made[k]] for k in made}
                print(f"{case}: loss {made['loss'][0]:.4f} to {made['loss'][-1]:.4f}", flush=True)
    lines = [f"{json.dumps(case)}: {json.dumps(actual[case])}" for case in CASES if case in actual]
    LOSSES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

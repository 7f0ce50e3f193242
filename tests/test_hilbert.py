"""Hilbert-CNN: the curve, the image, the network against a slow one, and the promises of
training.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Done, Forks, good, refused
from test_train import AT_STEP, same
from torch import Tensor
from toys import Toys

from benchmarks.steps import CASES
from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint, Head
from xformer.config import load
from xformer.convert.describe import describe
from xformer.data.batch import Batch
from xformer.data.files import read_json
from xformer.data.rows import write_store
from xformer.data.store import open_store
from xformer.data.vocabularies import symbols
from xformer.model.config import ModelConfig
from xformer.model.hilbert import (
    BatchNorm,
    Branch,
    hilbert_curve,
    image,
    image_size,
    initial_std,
)
from xformer.parallel.feed import to_device
from xformer.parallel.processes import ALONE
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.tasks.task import Model

LETTERS = "ACGTDNRS"
TOKENIZER = symbols(LETTERS)
BASES = tuple(TOKENIZER.pieces.index(letter) for letter in "ACGT")
ROWS = ["ACGTTGCA" * 7, "AC", "GATTACA", "ACGNTTGACSRA", "", "T" * 60]
RECIPE = "recipes/finetune/hilbert-cnn.toml"
SMALL = ["model.kmer=2", "batch.rows=20", "system.threads=1", "system.precision=fp32"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The products are too small for two threads, which would only wait for each other on busy
    cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh(kmer: int = 2, longest: int = 62, outputs: int = 3, **settings: float) -> Checkpoint:
    """A network with fresh weights and a head for classes."""
    config = ModelConfig.model_validate(
        {"architecture": "hilbert_cnn", "kmer": kmer, "max_positions": longest, **settings}
    )
    head = Head("classify", labels=tuple("abcdefgh"[:outputs]))
    return checkpoints.fresh(config, TOKENIZER, 1).with_head(head, 1)


def pack(rows: list[str], seconds: list[str] | None = None) -> Batch[Tensor]:
    """Rows of letters, and of a second text, as a packed batch."""
    special, tokens = TOKENIZER.special, []
    for i, row in enumerate(rows):
        ids = [TOKENIZER.pieces.index(letter) for letter in row]
        ids = [special["cls"], *ids, special["sep"]]
        if seconds is not None:
            ids += [*(TOKENIZER.pieces.index(letter) for letter in seconds[i]), special["sep"]]
        tokens.append(np.array(ids, np.int64))
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    flat = np.concatenate(tokens)
    positions = np.concatenate([np.arange(len(t)) for t in tokens])
    labels = np.arange(len(rows)) % 3
    longest = max(map(len, tokens))
    batch = Batch(flat, positions, np.zeros_like(flat), ends, longest, labels, rows=labels)
    return to_device(batch, torch.device("cpu"))


def lively(model: Model) -> Model:
    """The model with random scales, shifts and running statistics, so that the norms have an
    effect.
    """
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BatchNorm):
                for tensor in (module.weight, module.running_var):
                    tensor.copy_(torch.rand(len(tensor), generator=draw) + 0.5)
                for tensor in (module.bias, module.running_mean):
                    tensor.copy_(torch.randn(len(tensor), generator=draw))
    return model


# ------------------------------------------------------------------------------ curve, image


def place(index: int, side: int) -> tuple[int, int]:
    """Where the curve is at a step, computed from the bits of its number (two per level, lowest
    first).
    """
    row = column = 0
    for level in range(side.bit_length() - 1):
        down, right = (index >> 1) & 1, (index ^ (index >> 1)) & 1
        if not right:
            if down:
                row, column = 2**level - 1 - row, 2**level - 1 - column
            row, column = column, row
        row, column, index = row + (down << level), column + (right << level), index >> 2
    return row, column


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 32, 64])
def test_the_curve_visits_all_cells_through_neighbours(side: int) -> None:
    curve = hilbert_curve(side)
    assert [tuple(cell) for cell in curve.tolist()] == [place(i, side) for i in range(side**2)]
    assert {tuple(cell) for cell in curve.tolist()} == set(np.ndindex(side, side))
    assert (curve.diff(dim=0).abs().sum(1) == 1).all()
    # its first half fills the upper half
    assert (curve[: side**2 // 2, 0] < max(side // 2, 1)).all()


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (3, (2, 2)),
        (57, (8, 8)),
        (65, (8, 16)),
        (497, (16, 32)),
        (513, (32, 32)),
    ],
)
def test_the_image_is_the_smallest(words: int, size: tuple[int, int]) -> None:
    assert image_size(words) == size


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("pairs", [False, True])
def test_the_image_is_one_hot_words_on_the_curve(k: int, pairs: bool) -> None:
    seconds = ["GT", "ACGT", "N", "", "CCC", ""] if pairs else None
    actual = image(pack(ROWS, seconds), BASES, k, (8, 8))
    wanted = np.zeros((len(ROWS), 4**k, 8, 8))
    for n, row in enumerate(ROWS):
        text = row if seconds is None else f"{row}|{seconds[n]}"
        for i in range(len(text) - k + 1):
            word = text[i : i + k]
            if set(word) <= set("ACGT"):
                wanted[n, int("".join(str("ACGT".index(x)) for x in word), 4), *place(i, 8)] = 1
    assert np.array_equal(actual.numpy(), wanted)
    assert actual.dtype == torch.float32


# ------------------------------------------------------------------------------- the network


def test_the_network_has_the_parameters_of_its_widths() -> None:
    """For 500 letters and two classes (the chromatin tasks of Yin et al. 2018), counted by hand
    from the widths. Without the scales and shifts of the norms they are 961 thousand, as published;
    the paper does not say what it counts."""
    weights = fresh(4, 502, 2).model()
    counts: dict[str, int] = {}
    for name, parameter in weights.named_parameters():
        owner = name.split(".")[-2]
        part = "norms" if owner.endswith("norm") else ".".join(name.split(".")[:3])
        counts[part] = counts.get(part, 0) + parameter.numel()

    def branch(channels: int, filters: int, first: int, second: int) -> int:
        shortcut = channels * filters if channels != filters else 0
        return 4 * channels * first**2 + 4 * filters * second**2 + shortcut

    assert counts == {
        "cnn.first.weight": 7 * 7 * 256 * 64,
        "cnn.second.weight": 5 * 5 * 64 * 64,
        "cnn.blocks.0": branch(64, 32, 8, 4) + branch(64, 32, 4, 3) + 64 * 32 + 32 * 32,
        "cnn.blocks.1": branch(32, 32, 2, 4) + branch(32, 32, 4, 3) + 32 * 32,
        "cnn.blocks.2": 2 * branch(32, 32, 2, 2) + 32 * 32,
        "cnn.blocks.3": branch(32, 32, 3, 2) + branch(32, 32, 2, 3) + 32 * 32,
        "cnn.dense.weight": 64 * 100,
        "cnn.dense.bias": 100,
        "cnn.features.weight": 100 * 50,
        "cnn.features.bias": 50,
        "task_head.weight": 50 * 2,
        "task_head.bias": 2,
        "norms": 2 * (64 + 4 * (4 + 32 + 32 + 4 + 32 + 32 + 32) + 32),
    }
    total = sum(counts.values())
    assert (total - counts["norms"], total) == (961_924, 963_460)
    splice = fresh(4, 62, 3).model()
    assert sum(p.numel() for p in splice.parameters()) == 960_311


def slow_forward(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The network in evaluation mode, from its definition: (N, C, Y, X) -> logits, float64."""

    def convolution(x: np.ndarray, name: str) -> np.ndarray:
        w = weights[f"{name}.weight"]
        before = (w.shape[2] - 1) // 2
        wide = np.pad(x, ((0, 0), (0, 0), (before, w.shape[2]), (before, w.shape[2])))
        height, width = x.shape[2:]
        return np.asarray(
            sum(
                np.einsum("nchw,fc->nfhw", wide[:, :, i : i + height, j : j + width], w[:, :, i, j])
                for i in range(w.shape[2])
                for j in range(w.shape[3])
            )
        )

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean, var, scale, shift = (
            weights[f"{name}.{kind}"][:, None, None]
            for kind in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / np.sqrt(var + 1e-3) * scale + shift

    def elu(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))

    def halved(x: np.ndarray) -> np.ndarray:
        height, width = (-(-n // 2) for n in x.shape[2:])
        cells = [
            [x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((2, 3)) for j in range(width)]
            for i in range(height)
        ]
        return np.array(cells).transpose(2, 3, 0, 1)

    def shortcut(x: np.ndarray, name: str) -> np.ndarray:
        return convolution(x, f"{name}.shortcut") if f"{name}.shortcut.weight" in weights else x

    def branch(x: np.ndarray, name: str) -> np.ndarray:
        y = elu(norm(convolution(x, f"{name}.first"), f"{name}.first_norm"))
        y = norm(convolution(y, f"{name}.second"), f"{name}.second_norm")
        return elu(norm(y + shortcut(x, name), f"{name}.norm"))

    def block(x: np.ndarray, name: str) -> np.ndarray:
        both = branch(x, f"{name}.branches.0") + branch(x, f"{name}.branches.1")
        return elu(norm(convolution(both + shortcut(x, name), f"{name}.mix"), f"{name}.norm"))

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = halved(elu(norm(convolution(convolution(x, "cnn.first"), "cnn.second"), "cnn.norm")))
    x = halved(block(x, "cnn.blocks.0"))
    for i in (1, 2, 3):
        x = block(x, f"cnn.blocks.{i}")
    x = halved(elu(norm(halved(x), "cnn.last_norm"))).reshape(len(x), -1)
    return dense(elu(dense(elu(dense(x, "cnn.dense")), "cnn.features")), "task_head")


@pytest.mark.parametrize("longest", [3, 31, 62, 131])
def test_the_network_is_the_one_described(longest: int) -> None:
    """On images of 2, 32, 64 and 128 cells, square or not."""
    model = lively(fresh(2, longest).model())
    rows = [row[: longest - 2] for row in ROWS]
    actual = model.logits(pack(rows)).detach().numpy()
    assert model.cnn is not None
    pixels = image(pack(rows), BASES, 2, model.cnn.size).numpy()
    weights = {name: w.double().numpy() for name, w in model.state_dict().items()}
    wanted = slow_forward(weights, pixels.astype(np.float64))
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(actual, wanted, atol=2e-5)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = lively(fresh().model()).double()
    together = model.logits(pack(ROWS)).detach()
    apart = torch.cat([model.logits(pack([row])).detach() for row in ROWS])
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)
    assert (together[0] - together[1:]).abs().amax(1).min() > 1e-5


@pytest.mark.parametrize("training", [False, True])
def test_the_gradient_is_the_slope_of_the_loss(training: bool) -> None:
    model = lively(fresh(1, 18, head_dropout=0.0).model()).double().train(training)
    batch = pack([row[:16] for row in ROWS])
    _loss(model, batch).backward()
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        direction = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        direction *= 1e-5 / direction.norm()
        sides = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign)
                sides.append(float(_loss(model, batch)))
                parameter.sub_(direction, alpha=sign)
        slope = float((parameter.grad * direction).sum())
        assert (sides[0] - sides[1]) / 2 == pytest.approx(slope, rel=1e-3, abs=1e-11), name


def test_a_score_is_one_number_a_row() -> None:
    start = fresh(1).with_head(Head("regress"), 2)
    batch = replace(pack(ROWS), labels=torch.linspace(-1, 1, len(ROWS)))
    model = start.model().requires_grad_(False)
    loss, outputs = model.loss(batch), model.logits(batch)
    assert outputs.shape == (len(ROWS), 1)
    assert batch.labels is not None
    assert float(loss.total) == pytest.approx(float(((outputs[:, 0] - batch.labels) ** 2).sum()))


def _loss(model: Model, batch: Batch[Tensor]) -> Tensor:
    """The loss in double precision (Model.loss rounds logits to single)."""
    assert batch.labels is not None
    return F.cross_entropy(model.logits(batch), batch.labels, reduction="sum")


def test_batch_norm_keeps_running_statistics() -> None:
    norm, x = BatchNorm(3).train(), torch.randn(4, 3, 2, 5) * 2 + 1
    y = norm(x)
    values = x.transpose(0, 1).flatten(1)
    mean, var = values.mean(1, keepdim=True), values.var(1, correction=0, keepdim=True)
    centred = (values - mean) / (var + 1e-3).sqrt()
    torch.testing.assert_close(y.transpose(0, 1).flatten(1), centred, atol=1e-5, rtol=0)
    torch.testing.assert_close(norm.running_mean, 0.65 * values.mean(1))
    torch.testing.assert_close(norm.running_var, 0.35 + 0.65 * values.var(1))
    before = norm.running_var.clone()
    alone = norm(
        torch.ones(1, 3, 1, 1)
    )  # no variance: it uses the running statistics and leaves them unchanged
    wanted = (1 - norm.running_mean) / (before + 1e-3).sqrt()
    torch.testing.assert_close(alone.flatten(), wanted)
    assert torch.equal(norm.running_var, before)


def test_one_rank_does_not_average_its_running_statistics() -> None:
    """It would be 60 more kernels in each step on a GPU."""
    replicas = CASES["Hilbert-CNN"].trainer("cpu").model
    sums, before = replicas.begin(), [buffer._version for buffer in replicas.buffers]
    replicas.reduce(sums)
    assert [buffer._version for buffer in replicas.buffers] == before


def test_fresh_weights_have_the_published_spread() -> None:
    weights = fresh(4, 502, 2).weights
    assert weights["cnn.first.weight"].std() == pytest.approx((2 / 9 / (49 * 64)) ** 0.5, rel=0.01)
    assert weights["cnn.dense.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    assert initial_std(torch.Size((32, 4, 3, 3))) == (2 / 9 / (9 * 32)) ** 0.5
    for name, weight in weights.items():
        if "norm." in name:
            one = name.endswith(("norm.weight", "running_var"))
            assert torch.equal(weight, torch.full_like(weight, float(one))), name
    assert isinstance(fresh().model().get_submodule("cnn.blocks.0.branches.1"), Branch)


# ---------------------------------------------------------------------------------- the loop


def line(data: Path, run: Path, *overrides: str) -> list[str]:
    return ["train.py", RECIPE, f"data={data}", f"run={run}", *SMALL, *overrides]


@pytest.fixture(scope="module")
def learned(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the toy splice task, in which the middle six of sixty letters decide the class."""
    run = tmp_path_factory.mktemp("hilbert") / "run"
    good(forks.run(*line(data.splice, run, "train.epochs=8", "train.select=last")))
    return run


def evaluate(forks: Forks, run: Path, *overrides: str, ranks: int = 1) -> Done:
    return forks.run("evaluate.py", run, *overrides, "system.threads=1", ranks=ranks)


@pytest.mark.slow
def test_it_learns_and_is_scored_as_it_was_trained(
    learned: Path, forks: Forks, data: Toys, tmp_path: Path
) -> None:
    metrics = read_json(learned / "result.json")["metrics"]
    assert metrics["test"]["accuracy"] >= 0.9
    fitted = good(evaluate(forks, learned, f"data={data.splice}", "split=train"))
    assert float(fitted.out.split("accuracy ")[1].split()[0]) >= 0.99
    for ranks in (1, 2):
        done = good(evaluate(forks, learned, f"data={data.splice}", ranks=ranks))
        shown = [f"test {metric} {value:.4f}" for metric, value in metrics["test"].items()]
        assert done.out.splitlines() == shown


def test_raw_rows_are_predicted(learned: Path, forks: Forks, tmp_path: Path) -> None:
    motifs = {"EI": "AGGTAA", "IE": "TTTCAG", "N": "CCCCCC"}
    rows = ["ACGTN" * 5 + f"acg{motif}" + "TGCA" * 6 + "GT" for motif in motifs.values()]
    (tmp_path / "rows.tsv").write_text("sequence\n" + "\n".join(rows) + "\n")
    done = good(evaluate(forks, learned, f"input={tmp_path / 'rows.tsv'}"))
    assert [row.split("\t")[0] for row in done.out.splitlines()[1:]] == list(motifs)


VARIANTS: dict[str, tuple[int, list[str]]] = {
    "accumulate, bf16, dropout": (
        1,
        ["batch.accumulate=2", "system.precision=bf16", "model.head_dropout=0.3"],
    ),
    "two ranks": (2, []),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_resumed_equals_never_stopped(
    variant: str, forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """This includes the running statistics, in which a stop must leave no trace."""
    ranks, overrides = VARIANTS[variant]
    short = ["train.steps=6", "train.checkpoint_every=2", "train.validate_every=3", *overrides]
    straight, stopped = (line(data.splice, tmp_path / n, *short) for n in ("straight", "stopped"))
    reference = forks.start(*straight, ranks=ranks)
    one = AT_STEP.format(step=2, signal="SIGTERM", ranks=ranks - 1)
    assert forks.run(*stopped, ranks=ranks, before=one).status == 128 + signal.SIGTERM
    killer = AT_STEP.format(step=5, signal="SIGKILL", ranks="01")
    assert forks.run(*stopped, ranks=ranks, before=killer).status in (-signal.SIGKILL, 1)
    good(forks.run(*stopped, ranks=ranks))
    good(reference.wait())
    same(tmp_path / "stopped", tmp_path / "straight")
    end = checkpoints.load(tmp_path / "stopped/checkpoints/step_6").weights
    assert (end["cnn.norm.running_mean"] != 0).all()


def test_ranks_share_their_running_statistics(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """After each step all ranks hold the mean of the statistics of their rows."""
    spy = """
from xformer.parallel.replicas import Replicas
original = Replicas.reduce
def reduce(self, sums):
    print(*self.buffers[0].tolist())
    count = original(self, sums)
    print(*self.buffers[0].tolist())
    return count
Replicas.reduce = reduce
"""
    fork = forks.start(*line(data.splice, tmp_path / "run", "train.steps=3"), ranks=2, before=spy)
    good(fork.wait())
    texts = [Path(out).read_text().splitlines() for out, _ in fork.outputs]
    actual = np.array([[[float(v) for v in row.split()] for row in text] for text in texts])
    assert actual.shape == (2, 6, 64)
    assert np.array_equal(actual[0, 1::2], actual[1, 1::2])
    np.testing.assert_allclose(actual[0, 1::2], actual[:, ::2].mean(0), rtol=1e-5, atol=1e-7)
    assert (actual[0, ::2] != actual[1, ::2]).any(1).all()


def test_proteins_are_not_dna(data: Toys, tmp_path: Path) -> None:
    """A, C, G and T are amino acids, too. A store of DNA may have been made with the tokenizer of
    ESM-2, so this is a warning."""
    proteins = symbols("ACDEFGHIKLMNPQRSTVWY")
    rows = [("ACGT" * 3, "ab"[i % 2]) for i in range(8)]
    write_store(tmp_path / "s", proteins, {"train": rows}, ["a", "b"])
    job = prepare(
        load(Recipe, line(tmp_path / "s", tmp_path / "run", "train.select=last")[1:]), ALONE
    )
    assert any("hilbert_cnn reads A C G T alone" in note for note in job.notes)
    job = prepare(load(Recipe, line(data.splice, tmp_path / "run")[1:]), ALONE)
    assert not any("hilbert_cnn reads" in note for note in job.notes)


REFUSED: dict[str, tuple[str, list[str], list[str]]] = {
    "head": ("splice", ["head=mlm"], ["head=mlm", "hilbert_cnn predicts only classes and scores"]),
    "shape": ("splice", ["model.layers=3"], ["model.layers", "architecture=hilbert_cnn"]),
    "range": ("splice", ["model.initializer_range=0.1"], ["model.initializer_range"]),
    "other": (
        "splice",
        ["model.architecture=transformer", "model.kmer=3"],
        ["model.kmer cannot be set with model.architecture=transformer"],
    ),
    "words": ("classes", [], ["reads the letters A C G T", "tokenizer lacks A C G T", "symbols"]),
    "surgery": ("splice", ['surgery=[{op = "clean_embeddings"}]'], ["no word embeddings"]),
    "length": ("splice", ["batch.max_tokens=63"], ["batch.max_tokens=63: the model takes 62"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_one_line(
    case: str, forks: Forks, data: Toys, tmp_path: Path
) -> None:
    store, overrides, words = REFUSED[case]
    refused(forks.run(*line(getattr(data, store), tmp_path / "run", *overrides)), *words)
    assert not (tmp_path / "run").exists()


def test_a_run_is_a_start_like_any(learned: Path, forks: Forks, data: Toys, tmp_path: Path) -> None:
    """`init` takes the trunk with its statistics and gives it a fresh head. `clean` gives a fresh
    network.
    """
    for name, extra in (("on", []), ("clean", ['surgery=[{op = "clean"}]'])):
        good(
            forks.run(
                *line(
                    data.splice,
                    tmp_path / name,
                    f"init={learned}",
                    "train.steps=1",
                    "optim.lr=1e-12",
                    *extra,
                )
            )
        )
    old, on, clean = (
        checkpoints.load(p).weights for p in (learned, tmp_path / "on", tmp_path / "clean")
    )
    name = "cnn.blocks.2.mix.weight"
    torch.testing.assert_close(on[name], old[name], atol=1e-9, rtol=0)
    assert (on["task_head.weight"] - old["task_head.weight"]).abs().max() > 1e-3
    assert (clean[name] - old[name]).abs().max() > 1e-3
    twin = checkpoints.fresh(
        checkpoints.load(learned).config, open_store(data.splice).tokenizer(), 0
    )
    torch.testing.assert_close(clean[name], twin.weights[name], atol=1e-9, rtol=0)


def test_inspect_shows_the_network(tmp_path: Path) -> None:
    checkpoints.save(fresh(2, 62, 3), tmp_path / "c")
    said = "\n".join(describe(tmp_path / "c"))
    assert "Hilbert-CNN on words of 2 letters, rows up to 62 tokens" in said
    assert "none of Hugging Face's: no family of Hugging Face has model.architecture" in said

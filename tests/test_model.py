"""Attention, pre-LN, checkpoints, surgery and optimizers, compared with `torch.optim` and with code
written out here. The model families are compared with `transformers` in test_families.py.

T tokens in the batch, N sequences, H heads, D size of a head, L length, C hidden size.
"""

import copy
import errno
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    HEADS,
    HIDDEN,
    INNER,
    LENGTHS,
    LONGEST,
    PIECES,
    distance,
    layout,
    random_batch,
    seeded,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xformer import checkpoint as checkpoints
from xformer import optim, surgery
from xformer.analysis.examples import inside
from xformer.checkpoint import Checkpoint, Head
from xformer.data import vocabularies
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, read_json, write_json
from xformer.model.config import ModelConfig
from xformer.ops.attention import attention, probabilities
from xformer.optim import OptimConfig, clip_and_step, gradient_norm, learning_rate
from xformer.run import Run
from xformer.tasks.task import Model

# ---------------------------------------------------------------------------------- attention


def projections(lengths: list[int], size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """q, k and v, (T, 3, H, D)."""
    made = torch.randn(3, sum(lengths), HEADS, size, generator=seeded(1), dtype=dtype)
    return made.transpose(0, 1).contiguous().requires_grad_()


def padded_attention(qkv: Tensor, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Attention the usual way: sequences padded to the longest, padding masked out."""
    q, k, v = (pad_sequence(x.split(lengths), True).transpose(1, 2) for x in qkv.unbind(1))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (N, L)
    scores = torch.einsum("nhid,nhjd->nhij", q, k) / math.sqrt(q.size(3))
    weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(3)
    maps = [w[:, :length, :length] for w, length in zip(weights, lengths, strict=True)]
    return (weights @ v).transpose(1, 2)[real], maps


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("lengths", [[1], [7, 1, 7, 7, 13, 1], [3, 3, 3, 3], [19, 2]])
def test_attention_equals_the_padded_one(lengths: list[int]) -> None:
    given, same = projections(lengths, 8), projections(lengths, 8)
    actual = attention(given, layout(np.cumsum([0, *lengths])))
    expected, _ = padded_attention(same, lengths)
    assert distance(actual, expected) <= 1e-6
    direction = torch.randn(expected.shape, generator=seeded(2))
    (gradient,) = torch.autograd.grad(actual, given, direction)
    (wanted,) = torch.autograd.grad(expected, same, direction)
    for i, name in enumerate("qkv"):
        # q and k of a sequence of one token have a gradient of 0
        error = float((gradient - wanted)[:, i].norm())
        assert error <= 1e-6 * float(direction.norm()), name


def test_the_maps_are_those_of_padded_attention() -> None:
    qkv = projections(LENGTHS, 5)
    actual, _ = probabilities(qkv, layout(np.cumsum([0, *LENGTHS])))
    _, expected = padded_attention(qkv, LENGTHS)
    assert actual.shape == (len(LENGTHS), HEADS, LONGEST, LONGEST)
    for one, n, wanted in zip(actual, LENGTHS, expected, strict=True):
        torch.testing.assert_close(one[:, :n, :n], wanted)


# ------------------------------------------------------------------------------------ pre-LN


def test_pre_ln_equals_the_block_written_out() -> None:
    # Xiong et al. 2020, figure 1 (b): x + f(LN(x)), and a last LayerNorm
    config = ModelConfig(
        vocab_size=PIECES,
        layers=2,
        hidden=HIDDEN,
        heads=HEADS,
        intermediate=INNER,
        norm="pre",
        max_positions=LONGEST,
        layer_norm_eps=1e-2,
    )
    model = Model(config, None).eval()
    for i, weight in enumerate(model.parameters()):
        weight.data = torch.randn(weight.shape, generator=seeded(i)) * 0.3
    w = dict(model.state_dict())
    batch = random_batch([4, 1])

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / (x.pow(2).mean(1, keepdim=True) + 1e-2).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    parts = []
    e = "encoder.embeddings"
    for tokens, segments in zip(
        batch.tokens.split([4, 1]), batch.segments.split([4, 1]), strict=True
    ):
        x = w[f"{e}.word.weight"][tokens] + w[f"{e}.position.weight"][: len(tokens)]
        x = norm(x + w[f"{e}.segment.weight"][segments], f"{e}.norm")
        states = [x]
        for i in range(2):
            layer = f"encoder.layers.{i}"
            qkv = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv")
            q, k, v = (y.view(-1, HEADS, HIDDEN // HEADS).transpose(0, 1) for y in qkv.chunk(3, 1))
            weights = (q @ k.transpose(1, 2) / math.sqrt(HIDDEN // HEADS)).softmax(2)
            attended = (weights @ v).transpose(0, 1).reshape(-1, HIDDEN)
            x = x + linear(attended, f"{layer}.attention.out")
            inner = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            x = x + linear(inner, f"{layer}.mlp.down")
            states.append(x)
        states[-1] = norm(x, "encoder.final_norm")
        parts.append(states)
    states = inside(model.encoder, batch).hidden
    for actual, *expected in zip(states, *parts, strict=True):
        assert distance(actual, torch.cat(expected)) <= 1e-5
    assert torch.equal(states[-1], model.encoder(batch))


# -------------------------------------------------------------------------------- checkpoints

LETTERS = vocabularies.symbols("ACGT")
SMALL = ModelConfig(layers=2, hidden=12, heads=3, intermediate=10, max_positions=9)
CLASSES = Head("classify", ("EI", "IE", "N"), "accuracy", max_tokens=9, columns={"text": "dna"})


@pytest.fixture
def trained() -> Checkpoint:
    """A checkpoint with all possible parts."""
    made = checkpoints.fresh(SMALL, LETTERS, seed=1).with_head(CLASSES, seed=2)
    source = vocabularies.symbols("xyz")
    mapping = np.array([0, 1, 2, 3, 4, 7, 5, 8])
    return replace(made, source=source, mapping=mapping, history=({"op": "fresh", "seed": 1},))


@pytest.fixture
def saved(trained: Checkpoint, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    optimizer = {"exp_avg.x": torch.ones(3), "step": torch.tensor(4.0)}
    checkpoints.save(trained, path, optimizer=optimizer, state={"step": 4})
    return path


def same_weights(one: Checkpoint, two: Checkpoint) -> bool:
    """Whether both have the same names, and bit for bit the same values."""
    names = set(one.weights)
    equal = (torch.equal(one.weights[n], two.weights[n]) for n in names & set(two.weights))
    return names == set(two.weights) and all(equal)


def test_a_checkpoint_comes_back_as_it_was_saved(trained: Checkpoint, saved: Path) -> None:
    actual = checkpoints.load(saved)
    assert same_weights(actual, trained)
    assert actual.config == trained.config
    assert actual.head == CLASSES
    assert actual.history == trained.history
    assert actual.tokenizer.fingerprint == LETTERS.fingerprint
    assert actual.source is not None
    assert trained.source is not None
    assert actual.source.fingerprint == trained.source.fingerprint
    assert np.array_equal(np.array(actual.mapping), np.array(trained.mapping))
    optimizer = checkpoints.load_tensors(saved / "optimizer.safetensors")
    assert float(optimizer["step"]) == 4
    assert read_json(saved / "state.json") == {"step": 4}
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_tensors_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        'é."x"': torch.randn(700, 999, generator=draw).t(),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
        "step": torch.tensor([2**40]),
        "double": torch.zeros(5, dtype=torch.double),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    tensors["same"] = tensors["half"]
    checkpoints.save_tensors(tensors, tmp_path / "x")
    back = checkpoints.load_tensors(tmp_path / "x")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name], tensor)
    (tmp_path / "plain").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_model_is_a_copy_of_its_checkpoint(trained: Checkpoint) -> None:
    model = trained.model()
    assert not model.training
    assert all(torch.equal(w, trained.weights[n]) for n, w in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.zero_()
    assert float(trained.weights["task_head.weight"].abs().sum()) > 0


def test_one_damaged_byte_is_found_and_named(saved: Path) -> None:
    files = [f for f in saved.rglob("*") if f.is_file() and f.name != "manifest.json"]
    assert len(files) == 7
    for file in files:
        content = file.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(BadInput, match=f"{file} is damaged"):
                checkpoints.load(saved)
        file.write_bytes(content)
    checkpoints.load(saved)
    manifest = saved / "manifest.json"
    content = manifest.read_bytes()
    for place in range(0, len(content), 23):
        damaged = bytearray(content)
        damaged[place] ^= 1
        manifest.write_bytes(damaged)
        with pytest.raises(BadInput, match=str(saved)):
            checkpoints.load(saved)
    nothing: list[Any] = [[], {}, {"sha256": {}}, {"sha256": []}]
    for empty in nothing:
        write_json(manifest, empty)
        with pytest.raises(BadInput, match=f"{manifest} is damaged"):
            checkpoints.load(saved)


@pytest.mark.parametrize("name", ["../other", "input/../../other", "/other"])
def test_a_manifest_names_no_file_outside(name: str, saved: Path) -> None:
    sums = read_json(saved / "manifest.json")["sha256"]
    write_json(saved / "manifest.json", {"sha256": {**sums, name: "0" * 64}})
    with pytest.raises(BadInput, match=f"it lists {name}, which is outside its directory"):
        checkpoints.load(saved)


def test_a_file_system_without_modes(
    trained: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuses)
    checkpoints.save(trained, tmp_path / "checkpoint")
    assert same_weights(checkpoints.load(tmp_path / "checkpoint"), trained)


def test_a_missing_file_is_named(saved: Path) -> None:
    for file in [f for f in saved.rglob("*") if f.is_file() and f.name != "manifest.json"]:
        away = file.rename(saved.parent / "away")
        with pytest.raises(BadInput, match=f"its manifest lists {file}, which is missing"):
            checkpoints.load(saved)
        away.rename(file)
    (saved / "manifest.json").unlink()
    with pytest.raises(BadInput, match=f"{saved} is not a checkpoint"):
        checkpoints.load(saved)
    with pytest.raises(BadInput, match="nowhere does not exist"):
        checkpoints.load(saved.parent / "nowhere")


def with_model(meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The content of config.json with other settings of the model."""
    return {**meta, "model": {**meta["model"], **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: {**meta, "format": 2}, "is not of format 1, which this version requires"),
        (lambda meta: [meta], "is not of format 1"),
        (
            lambda meta: {**meta, "model": {"width": 3}},
            "is damaged, or a newer version wrote it: unknown key model.width",
        ),
        (lambda meta: {**meta, "model": None}, "is damaged: "),
        (
            lambda meta: {**meta, "head": {"kind": "mlm", "new": 1}},
            "is damaged, or a newer version wrote it: unknown key head.new",
        ),
        (lambda meta: with_model(meta, layers=None), "damaged: model.layers=None: input should be"),
        (lambda meta: with_model(meta, layers=10**9), "model.layers=1000000000: input should be l"),
        (
            lambda meta: with_model(meta, heads=7),
            "model.hidden=12 is not a multiple of model.heads",
        ),
        (lambda meta: {**meta, "head": "mlm"}, "is damaged: "),
        (lambda meta: {k: v for k, v in meta.items() if k != "history"}, "damaged: KeyError"),
        (lambda meta: {**meta, "history": [["op"]]}, "its history is not a list of operations"),
        (lambda meta: {**meta, "history": {"op": "fresh"}}, "its history is not a list of operat"),
        (lambda meta: {**meta, "head": {"kind": "dance"}}, "this version has no head 'dance'"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    file = saved / "config.json"
    write_json(file, change(read_json(file)))
    with pytest.raises(BadInput, match=re.escape(words)) as error:
        checkpoints.load(saved, verified=True)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert "http" not in str(error.value)


def test_an_existing_checkpoint_is_kept_unless_told_otherwise(
    trained: Checkpoint, saved: Path
) -> None:
    before = file_checksum(saved / "manifest.json")
    with pytest.raises(BadInput, match="exists"):
        checkpoints.save(trained, saved)
    assert file_checksum(saved / "manifest.json") == before
    other = surgery.clean(trained, seed=9)
    checkpoints.save(other, saved, overwrite=True)
    assert same_weights(checkpoints.load(saved), other)
    assert not (saved / "state.json").exists()
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_a_save_that_fails_leaves_nothing_and_keeps_the_old_one(
    trained: Checkpoint, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(checkpoints, "write_json", full)
    for path in (saved, saved.parent / "new"):
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(altered(trained), path, overwrite=True)
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]
    assert same_weights(checkpoints.load(saved), trained)


def test_a_finished_run_means_the_checkpoint_it_selected(saved: Path, trained: Checkpoint) -> None:
    run = saved.parent / "run"
    (run / "checkpoints").mkdir(parents=True)
    saved.rename(run / "checkpoints/step_4")
    with pytest.raises(BadInput, match="is not finished; name one of its checkpoints: step_4"):
        checkpoints.load(run)
    write_json(run / "result.json", {"selected": "checkpoints/step_4"})
    assert same_weights(checkpoints.load(run), trained)


@pytest.mark.parametrize("name", ["../victim/checkpoints/step_4", "checkpoints/../step_4", "."])
def test_a_run_that_selects_the_checkpoint_of_another_is_refused(
    name: str, saved: Path, trained: Checkpoint
) -> None:
    """`train.keep_state=false` would delete the state of the other run."""
    other, run = (saved.parent / name / "checkpoints/step_4" for name in ("victim", "run"))
    checkpoints.save(trained, other, state={})
    checkpoints.save(trained, run, state={})
    write_json(saved.parent / "run/result.json", {"selected": name})
    with pytest.raises(BadInput, match=r"result.json is damaged: it names no selected checkpoint"):
        Run(saved.parent / "run").forget_state()
    assert (other / "state.json").is_file()


def test_weights_that_contradict_the_config_are_named(trained: Checkpoint) -> None:
    weights = trained.weights
    name = "encoder.layers.1.mlp.up.weight"
    lacking = {n: w for n, w in weights.items() if n != name}
    with pytest.raises(BadInput, match=f"lacks the weight {name}, \\(10, 12\\)"):
        replace(trained, weights=lacking).model()
    with pytest.raises(
        BadInput, match=f"{name} is \\(12, 10\\), but its config needs \\(10, 12\\)"
    ):
        replace(trained, weights={**weights, name: weights[name].T}).model()
    with pytest.raises(BadInput, match="its config does not know: extra"):
        replace(trained, weights={**weights, "extra": torch.ones(1)}).model()


POOLER = {"pooler.weight", "pooler.bias"}
TASK = {"task_head.weight", "task_head.bias"}
MLM = {
    "mlm_head.dense.weight",
    "mlm_head.dense.bias",
    "mlm_head.norm.weight",
    "mlm_head.norm.bias",
    "mlm_head.bias",
}


@pytest.mark.parametrize(
    ("old", "new", "fresh", "dropped"),
    [
        (None, CLASSES, POOLER | TASK, set()),
        (None, Head("mlm"), MLM, set()),
        (Head("mlm"), CLASSES, POOLER | TASK, MLM),
        (Head("mlm"), Head("regress"), POOLER | TASK, MLM),
        (CLASSES, replace(CLASSES, max_tokens=5, mapping="ids"), TASK, TASK),
        (CLASSES, replace(CLASSES, labels=("N", "EI", "IE")), TASK, TASK),
        (CLASSES, replace(CLASSES, labels=("a", "b")), TASK, TASK),
        (CLASSES, Head("regress"), TASK, TASK),
        (CLASSES, Head("mlm"), MLM, POOLER | TASK),
        (Head("regress"), Head("regress"), TASK, TASK),
        (Head("mlm"), Head("mlm"), set(), set()),
    ],
)
def test_another_head_keeps_what_fits(
    old: Head | None, new: Head, fresh: set[str], dropped: set[str]
) -> None:
    before = checkpoints.fresh(SMALL, LETTERS, seed=1)
    if old is not None:
        before = before.with_head(old, seed=2)
    after = before.with_head(new, seed=3)
    made_fresh, left_out = checkpoints.changed_weights(before, after)
    assert after.head == new
    assert set(made_fresh) == fresh
    assert set(left_out) == dropped
    assert set(after.weights) == set(before.weights) - dropped | fresh
    after.model()
    for name, weight in after.weights.items():
        wanted = checkpoints.initialise(name, weight.shape, SMALL, 3)
        assert torch.equal(weight, wanted if name in fresh else before.weights[name]), name


def test_fresh_weights_do_not_depend_on_their_neighbours() -> None:
    small = checkpoints.fresh(SMALL, LETTERS, seed=1)
    deep = checkpoints.fresh(SMALL.model_copy(update={"layers": 5}), LETTERS, seed=1)
    assert set(small.weights) < set(deep.weights)
    assert all(torch.equal(w, deep.weights[name]) for name, w in small.weights.items())
    for name, weight in reversed(small.weights.items()):
        assert torch.equal(weight, checkpoints.initialise(name, weight.shape, SMALL, 1)), name
    ups = [deep.weights[f"encoder.layers.{i}.mlp.up.weight"] for i in range(5)]
    assert len(torch.stack(ups).unique(dim=0)) == 5


def test_fresh_weights_are_as_published() -> None:
    # N(0, initializer_range^2), LayerNorm 1, biases 0 (Devlin et al. 2019; K section 3.1)
    config = ModelConfig(
        layers=1, hidden=120, heads=2, intermediate=300, max_positions=200, initializer_range=0.05
    )
    made = checkpoints.fresh(config, LETTERS, seed=1).with_head(Head("mlm"), seed=1)
    matrices = []
    for name, weight in made.weights.items():
        if name.endswith("norm.weight"):
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
        else:
            matrices.append(weight.flatten())
    values = torch.cat(matrices) / 0.05
    assert abs(float(values.mean())) < 5 / math.sqrt(len(values))
    assert abs(float(values.std()) - 1) < 5 / math.sqrt(2 * len(values))
    beyond = float((values.abs() > 2).float().mean())
    assert abs(beyond - 0.0455) < 5 * math.sqrt(0.0455 / len(values))
    qkv, up = "encoder.layers.0.attention.qkv.weight", "encoder.layers.0.mlp.up.weight"
    pair = torch.stack([made.weights[qkv][:300].flatten(), made.weights[up].flatten()])
    assert abs(float(pair.corrcoef()[0, 1])) < 5 / math.sqrt(pair.size(1))
    other = checkpoints.fresh(config, LETTERS, seed=2)
    assert not torch.equal(other.weights[qkv], made.weights[qkv])


def test_a_vocabulary_must_fit_its_embeddings() -> None:
    made = checkpoints.fresh(SMALL, LETTERS, seed=1)
    assert made.config.vocab_size == 9
    wide = checkpoints.fresh(SMALL.model_copy(update={"vocab_size": 20}), LETTERS, seed=1)
    assert wide.weights["encoder.embeddings.word.weight"].shape == (20, 12)
    with pytest.raises(BadInput, match=r"model\.vocab_size=8 is below the tokenizer's 9"):
        checkpoints.fresh(SMALL.model_copy(update={"vocab_size": 8}), LETTERS, seed=1)


# ------------------------------------------------------------------------------------ surgery


def altered(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as after training: every weight has changed."""
    return replace(checkpoint, weights={n: w + 0.5 for n, w in checkpoint.weights.items()})


def test_the_clean_twin_is_the_same_but_for_its_weights(trained: Checkpoint) -> None:
    before = altered(trained)
    twin = surgery.clean(before, seed=6)
    assert twin.config == before.config
    assert twin.head == before.head
    shapes = {n: w.shape for n, w in before.weights.items()}
    assert {n: w.shape for n, w in twin.weights.items()} == shapes
    record = {"op": "clean", "seed": 6, "distribution": "normal"}
    assert twin.history == (*before.history, record)
    scratch = checkpoints.fresh(SMALL, LETTERS, seed=6).with_head(CLASSES, seed=6)
    assert same_weights(twin, scratch)
    assert same_weights(before, altered(trained))  # the original is untouched


# ---------------------------------------------------------------------------------- optimizer


class Little(nn.Module):
    """Matrices, an embedding, biases and a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.word = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.word(x)))))


class Bare(nn.Module):
    """One matrix or two vectors: only the group with weight decay, or only the other."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(w * float(x.sum())).sin().sum() for w in self.weights]).sum()[None]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """A summed loss over 5 examples."""
    x = torch.randint(11, (5,), generator=seeded(step))
    return model(x).pow(2).sum() * 40


def steps_of(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    clip: float,
    steps: range,
    rate: float = 0.01,
) -> list[float]:
    """Make the steps of a run, each with its own learning rate, and return the gradient norms."""
    norms, count = [], torch.tensor(5.0)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = gradient_norm(optimizer) / count
        clip_and_step(optimizer, rate * (step + 1), count, norm, clip, torch.tensor(0.0))
        norms.append(float(norm))
    return norms


class NovoGrad(torch.optim.Optimizer):
    """Ginsburg et al. 2019, algorithm 1, as printed. Each parameter is a layer, and v is a
    scalar.
    """

    def __init__(self, groups: Any, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                g, d, state = w.grad, group["weight_decay"], self.state[w]
                norm = float((g * g).sum())
                if not state:
                    state["v"], old = norm, torch.zeros_like(w)
                else:
                    state["v"] = self.betas[1] * state["v"] + (1 - self.betas[1]) * norm
                    old = self.betas[0] * state["m"]
                state["m"] = old + (g / (math.sqrt(state["v"]) + self.eps) + d * w.data)
                w.data = w.data - group["lr"] * state["m"]


KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "novograd": NovoGrad,
    "adagrad": lambda groups, betas, eps: torch.optim.Adagrad(groups, eps=eps),
}


@pytest.mark.parametrize("clip", [0.0, 2.0])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "make", [Little, lambda: Bare((70,), (3,), (2,)), lambda: Bare((5, 4), (3, 2))]
)
def test_optimizers_equal_torch_and_the_paper(
    make: Callable[[], nn.Module], name: Any, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is a sum, and our step divides its gradient by the count."""
    monkeypatch.setattr(optim, "PIECE", 3)
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    config = OptimConfig(name=name, weight_decay=0.3, clip=clip, betas=(0.8, 0.95), eps=1e-7)
    groups = [
        {"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in theirs.parameters()
    ]
    rate = 1e-6 if name == "radam" else 0.01  # its first steps follow the plain gradient
    reference = KINDS[name](groups, betas=(0.8, 0.95), eps=1e-7)
    norms = []
    for step in range(6):
        reference.zero_grad()
        (loss_of(theirs, step) / 5).backward()
        largest = clip or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), largest)))
        for group in reference.param_groups:
            group["lr"] = rate * (step + 1)
        reference.step()
    actual = steps_of(optim.build(ours, config), ours, clip, range(6), rate)
    assert actual == pytest.approx(norms, rel=3e-5)  # torch's own differ by 1e-5 from fp64
    assert not clip or max(norms) > clip
    for (parameter, weight), expected in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert distance(weight, expected) <= 1e-6, parameter


@pytest.mark.parametrize("name", KINDS)
def test_a_dropped_step_changes_nothing(name: Any) -> None:
    """Weights, moments and the step count stay, even in the first step, or if the gradient is not
    finite.
    """
    torch.manual_seed(0)
    model = Little()
    optimizer = optim.build(model, OptimConfig(name=name, weight_decay=0.1))
    count, norm = torch.tensor(5.0), torch.tensor(1.0)
    for fate in (1.0, 0.0, 1.0):
        before = {k: v.clone() for k, v in optim.state(optimizer)}
        before |= {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.zero_grad()
        (loss_of(model, 0) * (torch.nan if fate else 1.0)).backward()
        clip_and_step(optimizer, 0.01, count, norm, 1.0, torch.tensor(fate))
        after = {**dict(optim.state(optimizer)), **model.state_dict()}
        assert all(torch.equal(before[k], after[k]) for k in before) == bool(fate)
    assert float(dict(optim.state(optimizer))["step"]) == 1


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    """A single sum in fp32 would be off by 1e-4."""
    model = nn.Linear(2000, 3000, bias=False)
    model.weight.grad = torch.randn(3000, 2000, generator=seeded(0))
    actual = gradient_norm(torch.optim.SGD(model.parameters()))
    assert float(actual) == pytest.approx(float(model.weight.grad.double().norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("adamw", ("exp_avg", "exp_avg_sq")),
        ("novograd", ("exp_avg", "exp_avg_sq")),
        ("adagrad", ("sum",)),
        ("adamax", ("exp_avg", "exp_inf")),
        ("radam", ("exp_avg", "exp_avg_sq")),
    ],
)
def test_an_optimizer_continues_bit_for_bit(name: Any, moments: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    config = OptimConfig(name=name, weight_decay=0.1)
    whole, stopped = Little(), Little()
    stopped.load_state_dict(whole.state_dict())
    steps_of(optim.build(whole, config), whole, 0.5, range(6))
    optimizer = optim.build(stopped, config)
    steps_of(optimizer, stopped, 0.5, range(3))
    state = {name: tensor.clone() for name, tensor in optim.state(optimizer)}
    assert set(state) == {"step"} | {
        f"{moment}.{name}" for moment in moments for name in whole.state_dict()
    }
    assert all(state[f"{moments[0]}.{n}"].shape == w.shape for n, w in whole.state_dict().items())

    resumed = Little()
    resumed.load_state_dict(stopped.state_dict())
    optimizer = optim.build(resumed, config)
    optim.load_state(optimizer, state)
    steps_of(optimizer, resumed, 0.5, range(3, 6))
    for name, weight in resumed.named_parameters():
        assert torch.equal(weight, whole.state_dict()[name]), name


def test_another_models_optimizer_state_is_refused() -> None:
    state = dict(optim.state(optim.build(Little(), OptimConfig())))
    other = optim.build(Bare((2, 2)), OptimConfig())
    with pytest.raises(BadInput, match="belongs to another model"):
        optim.load_state(other, state)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, *((1 + math.cos(math.pi * i / 8)) / 2 for i in range(8))]),
    ],
)
def test_schedules_after_a_warm_up_of_a_fifth(schedule: Any, expected: list[float]) -> None:
    """The warm-up is a share of the run or a number of steps, and a step may be counted as 8
    samples."""
    config = OptimConfig(lr=0.02, schedule=schedule, warmup=0.2)
    rates = [learning_rate(config, i, i + 1, 10) for i in range(10)]
    assert rates == pytest.approx([0.02 * e for e in expected], rel=1e-9)
    in_steps = config.model_copy(update={"warmup": 2.0})
    assert [learning_rate(in_steps, i, i + 1, 10) for i in range(10)] == rates
    assert [learning_rate(in_steps, 8 * i, 8 * i + 8, 80, 8) for i in range(10)] == rates


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_without_a_warm_up_and_beyond_the_end(schedule: Any) -> None:
    config = OptimConfig(lr=0.02, schedule=schedule)
    assert learning_rate(config, 0, 1, 10) == 0.02
    assert learning_rate(config, 10, 11, 10) == 0.0
    assert learning_rate(config, 13, 14, 10) == 0.0
    all_of_it = config.model_copy(update={"warmup": 10.0})
    assert learning_rate(all_of_it, 9, 10, 10) == pytest.approx(0.02)

"""What a program that uses the package may rely on: order, state, and errors instead of wrong
results."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xformer import checkpoint, surgery
from xformer.analysis.gradients import inner_products
from xformer.analysis.pwcca import grid, pwcca
from xformer.checkpoint import Checkpoint
from xformer.config import load
from xformer.convert.hf import to_hf
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.memory import split_of
from xformer.data.outputs import check_writable
from xformer.data.rows import write_store
from xformer.data.store import open_store
from xformer.minimal_pairs import Pair, score_pairs
from xformer.parallel.processes import ALONE
from xformer.recipe import Recipe
from xformer.run import Run, in_use
from xformer.scoring import outputs_of
from xformer.study.statistics import holm, multibootstrap, tie_test, two_sided
from xformer.tasks.task import Head, Loss, to_device
from xformer.texts import pack, vectors_of
from xformer.train import train

LONG_FIRST = ["A sentence that is much longer than the others here.", "One.", "Two words."]
CLASSES = Head("classify", labels=("a", "b", "c"), max_tokens=32)


@pytest.fixture(scope="module")
def english() -> Checkpoint:
    return checkpoint.load("micro/english")


@pytest.fixture(scope="module")
def classes(english: Checkpoint) -> Checkpoint:
    return english.with_head(CLASSES)


# ------------------------------------------------------------------------------- order and batches


def test_packed_texts_stay_in_order(classes: Checkpoint) -> None:
    model = classes.model()
    batch = pack(classes.tokenizer, LONG_FIRST)
    assert batch.rows.tolist() == [0, 1, 2]
    alone = torch.cat([model.logits(pack(classes.tokenizer, [text])) for text in LONG_FIRST])
    assert torch.allclose(model.logits(batch), alone, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_a_batch_says_where_its_rows_are(english: Checkpoint) -> None:
    host = Assembler(split_of(english.tokenizer, LONG_FIRST), english.tokenizer, 32)
    batch = to_device(host.batch(np.arange(3)), torch.device("cpu"))
    assert batch.rows.tolist() == [1, 2, 0]  # sorted by length


def test_mapped_ids_are_packed(english: Checkpoint) -> None:
    mapping = np.random.default_rng(0).permutation(len(english.tokenizer))
    mapped = replace(english, source=english.tokenizer, mapping=mapping)
    batch = pack(english.tokenizer, ["a text"], source=mapped.source, mapping=mapping)
    plain = pack(english.tokenizer, ["a text"])
    assert batch.tokens[1:-1].tolist() == mapping[plain.tokens[1:-1]].tolist()
    assert batch.tokens[[0, -1]].tolist() == plain.tokens[[0, -1]].tolist()


def test_a_batch_without_masked_tokens_changes_nothing(english: Checkpoint) -> None:
    model = english.model().train()
    batch = pack(english.tokenizer, ["a"], masking=1e-12)
    assert batch.places is not None
    assert not len(batch.places)
    loss = model(batch).mean
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert Loss(torch.tensor(3.0), 2, torch.tensor(0.0)).mean == 1.5


def test_ignored_labels_do_not_count(classes: Checkpoint) -> None:
    labels = torch.tensor([2, -100, 1])
    for mode in (False, True):
        model = classes.model().train(mode)
        loss = model(pack(classes.tokenizer, LONG_FIRST, labels))
        logits = model.logits(pack(classes.tokenizer, LONG_FIRST))
        expected = torch.nn.functional.cross_entropy(logits, labels)
        assert torch.allclose(loss.mean, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_losses_in_float64(english: Checkpoint, kind: str) -> None:
    head = CLASSES if kind == "classify" else Head("regress")
    model = english.with_head(replace(head, class_weights=())).model().double()
    labels = [0, 1, 2] if kind == "classify" else [0.5, 1.5, 2.5]
    loss = model(pack(english.tokenizer, LONG_FIRST, labels))
    assert loss.total.dtype == torch.float64
    probe = english.with_head(replace(head, layer=2)).model().double()
    assert probe.logits(pack(english.tokenizer, LONG_FIRST)).dtype == torch.float64


# ------------------------------------------------------------------------------- state


def modes(model: torch.nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_modes_of_modules_are_kept(classes: Checkpoint, monkeypatch: Any) -> None:
    model = classes.model().train()
    model.encoder.eval()
    before = modes(model)
    vectors_of(model, classes.tokenizer, ["a"])
    rows = Assembler(split_of(classes.tokenizer, ["a"]), classes.tokenizer, 32)
    outputs_of(model, rows, ALONE, "fp32", "outputs")
    assert modes(model) == before

    def interrupt(*_: Any, **__: Any) -> None:
        assert not model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(model.encoder, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        vectors_of(model, classes.tokenizer, ["a"])
    assert modes(model) == before


def test_gradients_of_the_caller_are_kept(classes: Checkpoint) -> None:
    model = classes.model()
    frozen = model.get_parameter("encoder.layers.0.mlp.up.weight")
    trained = model.get_parameter("task_head.weight")
    frozen.requires_grad_(False)
    trained.grad = torch.ones_like(trained)
    batch = pack(classes.tokenizer, LONG_FIRST, [0, 1, 2])
    assert inner_products(model, batch).shape == (3, 3)
    assert not frozen.requires_grad
    assert frozen.grad is None
    assert trained.grad is not None
    assert (trained.grad == 1).all()
    with pytest.raises(ValueError, match="is in training mode"):
        inner_products(model.train(), batch)


def test_the_default_type_does_not_change_weights(english: Checkpoint) -> None:
    wanted = english.with_head(CLASSES, seed=3).weights["task_head.weight"]
    torch.set_default_dtype(torch.float64)
    try:
        weight = english.with_head(CLASSES, seed=3).weights["task_head.weight"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, wanted)


# ------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("write", [checkpoint.save, to_hf])
def test_only_its_own_kind_is_overwritten(
    english: Checkpoint, tmp_path: Path, write: Callable[..., Any]
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "manifest.json").write_text("{}")
    store = tmp_path / "store"
    write_store(store, english.tokenizer, {"train": ["a"]})
    step = tmp_path / "step_5"
    step.mkdir()
    (step / "thesis.txt").write_text("text")
    for path in (notes, store, step):
        before = sorted(path.rglob("*"))
        with pytest.raises(BadInput, match="so it is not overwritten; give another path"):
            write(english, path, overwrite=True)
        assert sorted(path.rglob("*")) == before
    for _ in range(2):
        write(english, tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    write(english, tmp_path / "empty", overwrite=True)
    other = to_hf if write is checkpoint.save else checkpoint.save
    with pytest.raises(BadInput, match="so it is not overwritten"):
        other(english, tmp_path / "mine", overwrite=True)


def test_wrapped_models_give_their_weights(classes: Checkpoint) -> None:
    model = classes.model()
    with torch.no_grad():
        model.task_head.bias.fill_(3.0)
    for wrapped in (torch.compile(model, backend="eager"), torch.nn.DataParallel(model)):
        weights = classes.with_weights(wrapped).weights  # type: ignore[arg-type]
        assert weights.keys() == classes.weights.keys()
        assert (weights["task_head.bias"] == 3).all()
    with torch.no_grad():
        model.task_head.bias[0] = torch.nan
    with pytest.raises(BadInput, match=r"task_head.bias is not finite: the training diverged"):
        classes.with_weights(model)


def test_values_are_shown_in_one_line(classes: Checkpoint, tmp_path: Path) -> None:
    assert (
        repr(classes)
        == "Checkpoint(transformer, 4 layers of 256, 5,356,547 parameters, head classify)"
    )
    assert repr(classes.tokenizer) == "Tokenizer(wordpiece, 8,192 pieces)"
    write_store(tmp_path / "s", classes.tokenizer, {"train": ["a text", "b"], "valid": ["c"]})
    store = open_store(tmp_path / "s")
    assert repr(store) == f"Store('{tmp_path / 's'}', kind text, rows: train 2, valid 1)"
    split = store.split("train")
    assert repr(split) == "Split('train', 2 rows, 3 tokens, columns tokens)"
    assert repr(split.columns["tokens"]) == "Ragged(2 rows, 3 values of uint16)"
    assert classes == classes
    assert classes != replace(classes)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (Head("clasify"), "there is no head 'clasify'; give one of mlm, classify, regress"),
        (Head("classify"), "the head classify needs labels="),
        (Head("tag"), "the head tag needs labels="),
        (Head("span", layer=1), "probe.layer=1 needs one of the heads classify, regress, tag"),
        (Head("classify", ("a", "a")), r"labels=\['a', 'a'\]: a class is named twice"),
        (replace(CLASSES, metric="auc"), "metric='auc' is none of loss, accuracy, f1, mcc"),
        (replace(CLASSES, max_tokens=2), "max_tokens=2: a row has at least 3 tokens"),
        (Head("regress", scale=(0.0, 0.0)), r"scale=\(0.0, 0.0\): the second number must"),
        (replace(CLASSES, layer=-1), r"probe.layer=-1: the model has 4 layers; give 0"),
        (replace(CLASSES, layer=5), r"probe.layer=5: the model has 4 layers; give 0"),
    ],
)
def test_heads_that_are_refused(english: Checkpoint, head: Head, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        english.with_head(head)


def test_masked_words_of_a_labelled_store(english: Checkpoint) -> None:
    """The head of such a run has the metric of the store, which it does not use."""
    assert english.with_head(Head("mlm", metric="spearman")).head is not None


# ------------------------------------------------------------------------------- errors


def test_what_a_batch_lacks(classes: Checkpoint, english: Checkpoint) -> None:
    batch = pack(english.tokenizer, ["a"])
    with pytest.raises(ValueError, match=r"has no masked tokens \(`pack` needs masking=0.15\)"):
        english.model()(batch)
    for start in (classes, english.with_head(Head("regress"))):
        with pytest.raises(ValueError, match="the batch has no labels, which the loss"):
            start.model()(batch)
    with pytest.raises(BadInput, match="the labels are scores, but this head needs the numbers"):
        classes.model()(pack(english.tokenizer, ["a"], [1.0]))
    for labels in ([[0.2, 0.8]], ["a"], [None]):
        with pytest.raises(BadInput, match="labels must be one number for each row"):
            pack(english.tokenizer, ["a"], labels)
    with pytest.raises(BadInput, match="give a list of texts"):
        english.tokenizer.encode_batch("abc")
    with pytest.raises(BadInput, match=r"labels=\[1, 0\]: give the names of the classes"):
        write_store("none", english.tokenizer, {"train": [("a", 0)]}, [1, 0])  # type: ignore[list-item]


def test_answers_and_pairs_have_heads(english: Checkpoint) -> None:
    texts, contexts = ["who ?", "what ?"], ["the man sat", "the cat sat"]
    batch = pack(english.tokenizer, texts, [[0, 1], [1, 1]], texts_b=contexts)
    assert batch.labels is not None
    assert batch.labels.tolist() == [[4, 5], [5, 5]]
    assert english.with_head(Head("span", pair=True)).model()(batch).count == 2
    pairs = english.with_head(Head("mlm", pair=True, pair_scale=1.0)).model()
    assert torch.isfinite(
        pairs(pack(english.tokenizer, texts, [0, 1], texts_b=contexts, masking=0.3)).mean
    )


def test_rows_and_layers_that_the_model_lacks(english: Checkpoint) -> None:
    model = english.model()
    with pytest.raises(ValueError, match="a row has 202 tokens, but the model takes 128"):
        model.encoder(pack(english.tokenizer, ["a " * 200], max_tokens=1000))
    for depth in (-1, 5):
        with pytest.raises(ValueError, match=re.escape(f"depth={depth} must be 0")):
            model.encoder(pack(english.tokenizer, ["a"]), depth=depth)


class Frame:
    """Becomes an array when numpy asks for one, as a table of pandas does."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.astype(dtype or float)


def test_similarities_of_arrays_of_any_kind() -> None:
    x = np.random.default_rng(0).normal(size=(300, 5))
    y = x @ np.random.default_rng(1).normal(size=(5, 4)) + 0.1
    wanted = pwcca(x, y)
    fixed = x.copy()
    fixed.flags.writeable = False
    for given in (
        Frame(x),
        fixed,
        x[::-1][::-1],
        torch.tensor(x, requires_grad=True),
    ):
        assert pwcca(given, y) == wanted
    assert pwcca(x[::-1], y[::-1]) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="variant='mean' must be one of definition, svcca"):
        pwcca(x, y, "mean")  # type: ignore[arg-type]


def test_a_grid_needs_two_passes() -> None:
    x = torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = (([x[i : i + 20]], [x[i : i + 20].flip(1)]) for i in range(0, 400, 20))
    with pytest.raises(ValueError, match="had 400 samples and the second 0: `stream` must"):
        grid(lambda: once)
    buffer = torch.empty(20, 6, dtype=torch.float64)

    def reused() -> Any:
        for i in range(0, 400, 20):
            buffer.copy_(x[i : i + 20])
            yield [buffer], [buffer]

    assert grid(reused)[0][0].pwcca == pytest.approx(1.0)


def test_statistics_refuse_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="a resampled mean is NaN"):
        two_sided(np.full(10, np.nan))
    with pytest.raises(ValueError, match="a p-value is NaN"):
        holm([0.01, np.nan, 0.02])
    with pytest.raises(ValueError, match="`drawn` is for 5 seeds, but there are 7"):
        multibootstrap(np.zeros((7, 10)), np.zeros((10, 5), int))
    assert [tie_test([x] * 3, 1.0) for x in (0.9, 1.0, -1.0, 2.0)] == [0.0, 1.0, 1.0, 1.0]
    assert np.isnan(tie_test([0.001], 0.01))


def test_a_misspelt_likelihood(english: Checkpoint) -> None:
    pairs = [Pair("a word", "word a", "order", "order")]
    with pytest.raises(BadInput, match="pll='word_l2r' must be one of word-l2r, original"):
        score_pairs(english, pairs, "word_l2r", ALONE, "fp32")  # type: ignore[arg-type]


def test_where_a_run_cannot_be_trained(tmp_path: Path) -> None:
    recipe = load(Recipe, ["finetune/classify", "data=none", f"run={tmp_path / 'run'}"])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BadInput, match=r"inside torch.autocast"),
    ):
        train(recipe)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, pytest.raises(BadInput, match=r"inside torch.no_grad or torch.inference"):
            train(recipe)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(BadInput, match="with another default type than float32"):
            train(recipe)
    finally:
        torch.set_default_dtype(torch.float32)
    errors: list[BadInput] = []

    def elsewhere() -> None:
        try:
            train(recipe)
        except BadInput as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "outside the main thread" in str(errors[0])
    assert not (tmp_path / "run").exists()


def test_a_run_continues_where_an_error_ended_it(
    classes: Checkpoint, tmp_path: Path, monkeypatch: Any
) -> None:
    """The error keeps the frames of the first call, as in a notebook."""
    rows = [("a word", 0), ("word a", 1)] * 4
    write_store(tmp_path / "s", classes.tokenizer, {"train": rows}, ["x", "y"])
    settings = ["train.steps=2", "batch.rows=4", "batch.max_tokens=8", "train.select=last"]
    given = [f"data={tmp_path / 's'}", f"run={tmp_path / 'run'}", "init=micro/english"]
    recipe = load(Recipe, ["finetune/classify", *given, *settings])

    def failing(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("xformer.train.clip_and_step", failing)
    with pytest.raises(RuntimeError, match="a mistake") as error:
        train(recipe)
    monkeypatch.undo()
    train(recipe)
    assert read_json(tmp_path / "run/result.json")["steps"] == 2
    assert error.traceback


def test_a_run_stays_locked_while_it_writes(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.open({}, overwrite=False)
    run.writing = Future()
    run.close()
    assert in_use(run.path)
    run.writing.set_result(None)
    assert not in_use(run.path)
    run.close()  # once more does nothing


def test_what_is_no_checkpoint(classes: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"keep_layers takes a checkpoint, such as .*, not a str"):
        surgery.keep_layers("micro/english", first=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"keep_layers: .*'frist'; its arguments are checkpoint, "):
        surgery.keep_layers(classes, frist=2)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match=r"save takes a checkpoint, not a Model; START.with_weights"):
        checkpoint.save(classes.model(), tmp_path / "c")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"give a list of arguments: \['pretrain/smoke', ...\]"):
        load(Recipe, "pretrain/smoke")  # type: ignore[arg-type]


def test_a_home_directory_is_not_made_here(classes: Checkpoint) -> None:
    for write in (
        lambda: checkpoint.save(classes, "~/c"),
        lambda: write_store("~/s", classes.tokenizer, {"train": ["a"]}),
        lambda: Run(Path("~/r")).open({}, overwrite=False),
        lambda: check_writable(Path("~/o")),
    ):
        with pytest.raises(BadInput, match=r"~/.: the shell has not replaced ~; give the whole"):
            write()
    assert not Path("~").exists()


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("xformer.data.outputs.os.access", lambda *_: False)
    with pytest.raises(BadInput, match=f"you may not write into {tmp_path}; give another file"):
        check_writable(tmp_path / "scores.json")

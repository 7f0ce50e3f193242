"""Multiple choice from training to export, and the settings of the loss of classes."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import CLASSIFY, ROOT, Forks, good, refused, task, training
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.utils.rnn import pad_sequence

from xformer import checkpoint as checkpoints
from xformer import config as settings
from xformer.convert import hf
from xformer.data.batch import Assembler, Batch
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.parallel.feed import to_device
from xformer.parallel.processes import ALONE
from xformer.predictions import read
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.tasks.classify import balanced
from xformer.tasks.task import Head, Model

CHOICE = "recipes/finetune/choice.toml"
SOUNDS = {"cat": "meow", "dog": "woof", "bird": "tweet", "fish": "blub", "cow": "moo"}
ENDINGS = ["--context", "sentence", "--endings", "a", "b", "c", "--label", "label"]


def questions(count: int, seed: int) -> list[list[str]]:
    """Questions of the form "Which sound does an animal make?" with endings of different
    lengths.
    """
    draw, rows = random.Random(seed), []
    for _ in range(count):
        animals = draw.sample(list(SOUNDS), 3)
        endings = [SOUNDS[animal] + " loud" * draw.randrange(4) for animal in animals]
        right = draw.randrange(3)
        rows.append([f"the {animals[right]} says", *endings, str(right)])
    return rows


@pytest.fixture(scope="module")
def choices(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of questions."""
    place = tmp_path_factory.mktemp("choices")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "says", "loud"]
    (place / "vocab.txt").write_text("\n".join([*words, *SOUNDS, *SOUNDS.values()]) + "\n")
    line = ["preprocess.py", "tokenizer", "--from", place / "vocab.txt"]
    good(forks.run(*map(str, line), "--output", str(place / "tokenizer")))
    files = []
    for seed, (split, count) in enumerate((("train", 1200), ("valid", 60), ("test", 30))):
        with (place / f"{split}.csv").open("w", newline="") as file:
            table = [["sentence", "a", "b", "c", "label"], *questions(count, seed)]
            csv.writer(file).writerows(table)
        files += [f"--{split}", str(place / f"{split}.csv")]
    out = ["--tokenizer", str(place / "tokenizer"), "--output", str(place / "store")]
    good(forks.run("preprocess.py", "task", "choice", *files, *ENDINGS, *out))
    return place / "store"


@pytest.fixture(scope="module")
def chosen(forks: Forks, choices: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt the sounds."""
    run = tmp_path_factory.mktemp("chosen") / "run"
    more = ["model.hidden=64", "model.intermediate=128", "train.epochs=6", "batch.rows=16"]
    good(forks.run(*training(CHOICE, choices, run, *more)))
    return run


def test_the_task_is_learnt_and_scored(chosen: Path, choices: Path) -> None:
    scores = read_json(chosen / "result.json")["metrics"]
    assert scores["test"]["accuracy"] > 0.9  # chance is a third
    predictions = read(chosen / "predictions/test.npz")
    split = open_store(choices).split("test")
    logits = predictions.arrays["outputs"].reshape(30, 3)
    labels = np.asarray(split.columns["label"]).reshape(30, 3)[:, 0]
    expected = F.cross_entropy(torch.tensor(logits, dtype=torch.float64), torch.tensor(labels))
    assert scores["test"]["loss"] == pytest.approx(expected.item(), rel=1e-9)
    assert scores["test"]["accuracy"] == (logits.argmax(1) == labels).mean()
    assert predictions.arrays["group"].tolist() == np.repeat(np.arange(30), 3).tolist()


def test_two_ranks_score_as_one(forks: Forks, chosen: Path, choices: Path, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        line = ["evaluate.py", str(chosen), f"data={choices}", "split=valid", f"out={out}"]
        good(forks.run(*line, "system.threads=1", ranks=ranks))
        results.append(read_json(out)["metrics"])
    assert results[0] == results[1]


def test_new_questions_are_answered(forks: Forks, chosen: Path, tmp_path: Path) -> None:
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["sentence", "a", "b", "c"], ["the cow says", "meow", "moo loud", "woof"]]
        )
    line = ["evaluate.py", str(chosen), f"input={tmp_path / 'new.csv'}", "system.threads=1"]
    lines = good(forks.run(*line)).out.splitlines()
    assert lines[0] == "ending\tprobability\tinput\tchosen"
    ending, probability, context, text = lines[1].split("\t")
    assert (ending, context, text) == ("1", "the cow says", "moo loud")
    assert float(probability) > 0.5
    done = forks.run(*line, f"out={tmp_path / 'x.json'}")
    refused(done, "x.json: predictions are a table; give a name that ends in .tsv")


def test_a_batch_keeps_questions_whole(choices: Path) -> None:
    store = open_store(choices)
    assembler = Assembler(store.split("train"), store.tokenizer(), 16)
    assert assembler.examples == 1200
    examples = np.random.default_rng(0).permutation(1200)[:40]
    parts = assembler.batches(examples, [25, 15])
    for part, of_part in zip(parts, (examples[:25], examples[25:]), strict=True):
        rows = part.rows.reshape(-1, 3)
        assert (rows == rows[:, :1] // 3 * 3 + np.arange(3)).all()
        assert sorted(rows[:, 0] // 3) == sorted(of_part)
        assert part.longest == np.diff(part.cu_seqlens).max()
        labels = np.asarray(part.labels).reshape(-1, 3)
        assert (labels == labels[:, :1]).all()
    sizes = assembler.sizes(examples)
    each = assembler.sizes(np.arange(1200))
    assert sizes.tolist() == each[examples].tolist()
    assert sum(len(part.tokens) for part in parts) == sizes.sum()


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "DistilBert"])
def test_equals_transformers_in_both_directions(name: str, chosen: Path, tmp_path: Path) -> None:
    """transformers gives the same logits and loss, and the round trip gives the same weights."""
    transformers = pytest.importorskip("transformers")
    shapes = {
        "Bert": {},
        "Roberta": {"first_position": 1, "dropout_form": "roberta"},
        "Albert": {"shared_layers": True, "embedding": 8, "dropout_form": "albert"},
        "DistilBert": {"token_types": 0, "pooler": "relu", "dropout_form": "distilbert"},
    }
    trained = checkpoints.load(chosen)
    config = ModelConfig(
        vocab_size=trained.config.vocab_size,
        layers=2,
        hidden=16,
        heads=2,
        intermediate=32,
        max_positions=40,
        activation="gelu",
        layer_norm_eps=1e-12,
        **shapes[name],
    )
    start = checkpoints.fresh(config, trained.tokenizer, 3)
    ours = start.with_head(Head("choice", max_tokens=40), 4)
    family = hf.to_hf(ours, tmp_path / "hf")
    written = read_json(tmp_path / "hf/config.json")["architectures"]
    assert written == [f"{family.model}ForMultipleChoice"] == [f"{name}ForMultipleChoice"]
    theirs = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(5, config.vocab_size, (60,), generator=torch.Generator().manual_seed(1))
    sizes = [9, 11, 10, 12, 12, 6]
    ends = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32)
    positions = torch.cat([torch.arange(size) for size in sizes])
    segments = torch.zeros(60, dtype=torch.long)
    labels = torch.tensor([2, 2, 2, 0, 0, 0])
    batch = Batch(tokens, positions, segments, ends, 12, labels, together=3)
    model = ours.model()
    pad = trained.tokenizer.special["pad"]
    given = {
        "input_ids": pad_sequence(tokens.split(sizes), True, pad).view(2, 3, 12),
        "attention_mask": pad_sequence([torch.ones(n) for n in sizes], True).view(2, 3, 12),
    }
    expected = theirs(**given, labels=labels[::3])
    assert torch.allclose(model.logits(batch).view(2, 3), expected.logits, atol=1e-6)
    assert torch.allclose(model.loss(batch).total / 2, expected.loss, atol=1e-6)
    back = hf.from_hf(tmp_path / "hf").checkpoint
    assert back.head is not None
    assert back.head.kind == "choice"
    assert back.weights.keys() == ours.weights.keys()
    assert all(torch.equal(back.weights[key], weight) for key, weight in ours.weights.items())


# ----------------------------------------------------------------- settings of the loss of classes


def batch_of_classes(labels: list[int]) -> Batch[torch.Tensor]:
    count = len(labels)
    tokens = torch.randint(5, 90, (4 * count,), generator=torch.Generator().manual_seed(2))
    return Batch(
        tokens,
        torch.arange(4).repeat(count),
        torch.zeros_like(tokens),
        torch.arange(count + 1, dtype=torch.int32) * 4,
        4,
        torch.tensor(labels),
    )


def test_smoothing_and_weights_are_those_of_torch() -> None:
    config = ModelConfig(
        vocab_size=97, layers=1, hidden=16, heads=2, intermediate=32, dropout=0, attention_dropout=0
    )
    weights = (0.5, 2.0, 1.0)
    kind = task("classify", 3, smoothing=0.2, class_weights=weights)
    torch.manual_seed(0)
    model = Model(config, kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    batch = batch_of_classes([0, 1, 2, 1, 1])
    logits, labels = model.logits(batch), batch.labels
    assert labels is not None
    expected = F.cross_entropy(
        logits, labels, torch.tensor(weights), reduction="sum", label_smoothing=0.2
    )
    loss = model.train().loss(batch)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.count == 5
    plain = F.cross_entropy(logits, labels, reduction="sum")
    assert model.eval().loss(batch).total.item() == pytest.approx(plain.item(), rel=1e-6)
    assert abs(plain.item() - expected.item()) > 0.1


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.random.default_rng(1).choice(4, 300, p=[0.7, 0.1, 0.15, 0.05])
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    assert balanced(labels, 4) == pytest.approx(expected)
    assert balanced(np.array([0, 0, 2]), 4) == (0.75, 0, 1.5, 0)  # two classes without rows


def load(*more: str) -> Recipe:
    return settings.load(Recipe, [str(ROOT / CLASSIFY), *more])


def job(*more: str) -> Head:
    head = prepare(load(*more), ALONE).start.head
    assert head is not None
    return head


@pytest.mark.slow
def test_the_settings_reach_the_head(data, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    given = [f"data={data.classes}", f"run={tmp_path / 'run'}", "batch.max_tokens=16"]
    store = open_store(data.classes)
    labels = np.asarray(store.split("train").columns["label"])
    assert job(*given, "loss.class_weights=balanced").class_weights == balanced(
        labels, len(store.labels)
    )
    assert job(*given, "loss.label_smoothing=0.1").smoothing == 0.1
    ones = json.dumps([1.5] * len(store.labels))
    assert job(*given, f"loss.class_weights={ones}").class_weights == (1.5,) * len(store.labels)
    with pytest.raises(BadInput, match=r"loss\.class_weights has 1 weights; .* has the classes"):
        job(*given, "loss.class_weights=[1.5]")
    for wrong in ("auto", "[1, -3]", "3"):
        with pytest.raises(BadInput, match=r"give balanced, or a list with one number per class"):
            job(*given, f"loss.class_weights={wrong}")
    with pytest.raises(BadInput, match=r"loss\.label_smoothing: head=mlm has no such setting"):
        job(*given, "head=mlm", "loss.label_smoothing=0.1")
    with pytest.raises(BadInput, match="and not all 0"):
        job(*given, "loss.class_weights=[0]")
    half = prepare(load(*given, "fraction=0.5"), ALONE).samples
    assert half.per_epoch == len(labels) // 2
    rows, _ = half.at(np.arange(half.per_epoch))
    weights = balanced(labels[rows], len(store.labels))
    assert job(*given, "loss.class_weights=balanced", "fraction=0.5").class_weights == weights


def test_a_head_without_the_settings_is_written_as_before(chosen: Path) -> None:
    written = read_json(checkpoints.resolve(chosen) / "config.json")["head"]
    assert not {"smoothing", "class_weights"} & written.keys()
    moved = to_device(batch_on_host(), torch.device("cpu"))
    assert isinstance(moved.rows, np.ndarray)  # row numbers stay on the host


def batch_on_host() -> Batch[np.ndarray]:
    ends = np.array([0, 2], np.int32)
    return Batch(np.zeros(2, np.int32), np.arange(2), np.zeros(2), ends, 2, rows=np.zeros(1))


# ------------------------------------------------------------------ examples of several rows


@pytest.mark.slow
def test_analyses_look_at_each_ending(
    forks: Forks, chosen: Path, choices: Path, tmp_path: Path
) -> None:
    data = [f"data={choices}", "split=valid", "threads=1"]
    line = [
        "-m",
        "xformer.analysis",
        "attention",
        str(chosen),
        str(chosen),
        *data,
        f"out={tmp_path / 'a'}",
    ]
    ended = subprocess.run(
        [sys.executable, *line, "examples=150"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr  # 180 rows of 60 questions
    line = ["-m", "xformer.analysis", "gradients", str(chosen), *data, f"out={tmp_path / 'g'}"]
    ended = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "is of kind 'choice': the loss of a row depends on other rows" in ended.stderr


def test_a_step_holds_at_least_one_question(forks: Forks, choices: Path, tmp_path: Path) -> None:
    line = training(CHOICE, choices, tmp_path / "run", "batch.tokens=40")
    refused(forks.run(*line), "batch.tokens=40 is too small for one question: 3 rows")


def test_the_work_of_a_step_counts_rows(choices: Path, tmp_path: Path) -> None:
    recipe = [str(ROOT / CHOICE), f"data={choices}", f"run={tmp_path}", "batch.max_tokens=16"]
    job = prepare(settings.load(Recipe, recipe), ALONE)
    step = job.feed().take(0)
    sizes = np.diff(step.batches[0].cu_seqlens).astype(int)
    assert (step.end, step.work.rows) == (16, 48)
    assert (step.work.tokens, step.work.squares) == (sizes.sum(), (sizes**2).sum())


def test_a_metric_that_scoring_will_not_give(data, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recipe = settings.load(
        Recipe,
        [
            str(ROOT / "recipes/pretrain/smoke.toml"),
            f"data={data.text}",
            f"run={tmp_path / 'run'}",
            "train.metric=pair_loss",
        ],
    )
    with pytest.raises(BadInput, match=r"which has loss, accuracy, perplexity$"):
        prepare(recipe, ALONE)

"""Probes of one layer of a frozen encoder, and heads that read the mean over tokens."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CLASSIFY, NO_DROPOUT, REGRESS, Done, Forks, good, refused, training
from tiny import random_batch
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import cost, surgery
from xformer.analysis.examples import inside
from xformer.convert import hf
from xformer.convert.describe import describe
from xformer.data.batch import Workload
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.model.config import ModelConfig
from xformer.study.plan import content_key, identity
from xformer.tasks.known import task_of
from xformer.tasks.task import Head
from xformer.texts import pack

TINY = ModelConfig(layers=2, hidden=16, heads=2, intermediate=24, vocab_size=97, max_positions=20)


def probe(layer: int | None, kind: str = "classify", norm: str = "post") -> checkpoints.Checkpoint:
    """A random checkpoint with this probe. The layers of the default initialisation hardly differ,
    so that larger weights are drawn."""
    english = checkpoints.load("micro/english")
    config = TINY.model_copy(update={"vocab_size": 8192, "norm": norm})
    plain = checkpoints.fresh(config, english.tokenizer, 0)
    weights = {name: 5 * w if "norm" not in name else w for name, w in plain.weights.items()}
    head = Head(kind, ("a", "b", "c") if kind != "regress" else (), layer=layer)
    return replace(plain, weights=weights).with_head(head)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_head_reads_its_layer(layer: int, norm: str) -> None:
    """The mean over tokens for a class, and each labelled token for words."""
    batch = random_batch()
    for kind in ("classify", "tag"):
        checkpoint = probe(layer, kind, norm)
        model = checkpoint.model()
        states = inside(model.encoder, batch).hidden[layer]
        if kind == "classify":
            parts = states.split(batch.cu_seqlens.diff().tolist())
            states = torch.stack([part.mean(0) for part in parts])
        else:
            assert batch.places is not None
            states = states[batch.places]
        weights = checkpoint.weights
        expected = states @ weights["task_head.weight"].T + weights["task_head.bias"]
        assert torch.allclose(model.logits(batch), expected, atol=1e-5)
        assert "pooler.weight" not in weights


def test_layers_above_are_not_computed() -> None:
    """Neither in the model nor in the count of its operations."""
    model, batch = probe(1).model(), random_batch()
    model.encoder.layers[1].forward = None  # type: ignore[assignment]
    assert model.logits(batch).isfinite().all()
    work = Workload.even(4, 10)
    counts = [
        cost.forward_flops(TINY, task_of(Head("classify", ("a", "b", "c"), layer=layer)), work)
        for layer in (0, 1, 2)
    ]
    C, F, T = 16, 24, 40
    one = 8 * C * C * T + 4 * C * work.squares + 4 * C * F * T
    assert counts == [n * one + 2 * C * 3 * 4 for n in (0, 1, 2)]


def test_a_probe_trains_its_head_alone(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """It learns, is scored and described, and continues after its checkpoints were saved."""
    run, fast = tmp_path / "run", ["train.epochs=8", "optim.lr=0.05", "optim.weight_decay=0"]
    line = ["probe.layer=0", *NO_DROPOUT, *fast]
    start = f"init={learned['text']}"
    done = good(forks.run(*training(CLASSIFY, data.classes, run, start, *line)))
    before, after = checkpoints.load(learned["text"]), checkpoints.load(run)
    count = 2 * before.config.hidden + 2
    assert f"trains {count} of " in done.err
    for name, weight in after.weights.items():
        if name.startswith("encoder."):
            assert torch.equal(weight, before.weights[name]), name
    assert sorted(n for n in after.weights if not n.startswith("encoder.")) == [
        "task_head.bias",
        "task_head.weight",
    ]
    # layer 0 knows which words a text has, so that the mean over tokens shows the word "bam"
    assert read_json(run / "result.json")["metrics"]["valid"]["accuracy"] > 0.7
    scored = good(forks.run("evaluate.py", run, f"data={data.classes}", "split=valid"))
    assert f"accuracy {read_json(run / 'result.json')['metrics']['valid']['accuracy']:.4f}" in (
        scored.out
    )
    assert "reads layer 0 (a probe)" in "\n".join(map(str, describe(run)))
    with pytest.raises(BadInput, match="its head is a probe of layer 0"):
        hf.to_hf(after, tmp_path / "hf")


def test_a_probe_of_scores(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    line = [
        f"init={learned['text']}",
        "probe.layer=1",
        *NO_DROPOUT,
        "train.epochs=6",
        "optim.lr=0.02",
    ]
    good(forks.run(*training(REGRESS, data.scores, tmp_path / "run", *line)))
    assert read_json(tmp_path / "run/result.json")["metrics"]["valid"]["spearman"] > 0.5


def test_wrong_probes_cost_one_line(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    def run(store: Path, *more: str) -> Done:
        return forks.run(*training(CLASSIFY, store, tmp_path / "run", *more))

    english = f"init={learned['text']}"
    refused(
        run(data.classes, english, "probe.layer=5"),
        "the model has 2 layers; give 0 (the embeddings) to 2",
    )
    refused(
        run(data.classes, english, "probe.layer=1", 'train.only=["layers.0"]'),
        "probe.layer=1 trains only the head, but train.only=['layers.0']",
    )
    refused(
        run(data.text, english, "head=mlm", "probe.layer=1"),
        "probe.layer=1 needs one of the heads classify, regress, tag, choice",
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match="a probe of layer 2, but the result has 1 layer;"):
        surgery.keep_layers(probe(2), first=1).model()


def test_a_run_may_read_means(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """The head reads what `encode` gives, through the pooler, if the checkpoint says so."""
    first = checkpoints.load(learned["text"])
    config = first.config.model_copy(update={"pooling": "mean"})
    checkpoints.save(replace(first, config=config), tmp_path / "mean")
    run, line = tmp_path / "run", [f"init={tmp_path / 'mean'}", *NO_DROPOUT, "train.epochs=0.2"]
    good(forks.run(*training(CLASSIFY, data.classes, run, *line)))
    kept = checkpoints.load(run)
    assert kept.config.pooling == "mean"
    texts = ["bam foo", "a"]
    weights, vectors = kept.weights, torch.from_numpy(kept.encode(texts))
    pooled = torch.tanh(vectors @ weights["pooler.weight"].T + weights["pooler.bias"])
    expected = pooled @ weights["task_head.weight"].T + weights["task_head.bias"]
    model = kept.model()
    for text, wanted in zip(texts, expected, strict=True):
        assert torch.allclose(model.logits(pack(kept.tokenizer, [text]))[0], wanted, atol=1e-5)
    good(forks.run("evaluate.py", run, f"data={data.classes}", "split=valid"))
    assert ", reads the mean over tokens" in "\n".join(map(str, describe(run)))
    said = r"model\.pooling=mean is not bert's, which needs first"
    with pytest.raises(BadInput, match=said):
        hf.to_hf(kept, tmp_path / "hf")

    other = training(CLASSIFY, data.classes, tmp_path / "other", *line, "model.pooling=first")
    said = "model.pooling=first: the checkpoint given as init has mean; leave model.pooling out"
    refused(forks.run(*other), said)
    assert not (tmp_path / "other").exists()


def test_files_and_keys_of_other_runs_stay() -> None:
    """The setting is written, and enters the key of a run, only if it is given."""
    from test_keys import KEYS, key, recipe

    line = "head=classify init=i seed=3"
    assert key(line) == KEYS[line]
    keys = {content_key(identity(recipe(f"{line} probe.layer={n}"))) for n in (0, 1)}
    assert len(keys | {KEYS[line]}) == 3
    plain, *heads = (asdict(Head("classify", layer=layer)) for layer in (None, None, 0, 2))
    records = [checkpoints._record(h, plain, checkpoints.NEWER_OF_HEADS) for h in heads]
    assert [record.get("layer") for record in records] == [None, 0, 2]
    assert "layer" not in records[0]


def test_vectors_are_means(forks: Forks) -> None:
    """`encode` uses the same mean as a probe."""
    english = checkpoints.load("micro/english")
    vector = english.encode("The cat sat.")
    model, tokenizer = english.model(), english.tokenizer
    ids = [tokenizer.special["cls"], *tokenizer.encode_batch(["The cat sat."])[0].tolist()]
    states = model(torch.tensor([[*ids, tokenizer.special["sep"]]]))[0]
    assert np.allclose(vector, states.mean(0).detach().numpy(), atol=1e-5)

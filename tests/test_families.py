"""Compare BERT, RoBERTa, ALBERT, DistilBERT, ModernBERT and ESM-2 with `transformers`: embeddings,
outputs and gradients.

`python -m benchmarks.parity` prints the largest errors as a table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CASES,
    FAMILIES,
    HEADS,
    LACKING,
    LIMITS,
    SHAPES,
    class_of,
    labels_of,
    parity,
    their_labels,
    their_logits,
    trajectory,
)
from tiny import HIDDEN, LENGTHS, LONGEST, distance, family_of, padded, random_batch, tiny

from xformer.convert import hf
from xformer.model.encoder import Encoder
from xformer.ops import native


def limit(name: str, dtype: torch.dtype) -> float:
    """The largest error. transformers rotates queries and keys in fp32 in any case."""
    return 1e-5 if name in ("ModernBert", "Esm") else LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "fp64"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_everything_equals_transformers(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for error, value in parity(name, kind, dtype, LENGTHS, tmp_path).items():
        assert value <= limit(name, dtype), error


@pytest.mark.parametrize("lengths", SHAPES, ids=["one", "longest", "some", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_of_any_length_equal_padded_ones(
    name: str, lengths: list[int], tmp_path: Path
) -> None:
    for error, value in parity(name, "classify", torch.float64, lengths, tmp_path).items():
        assert value <= limit(name, torch.float64), error


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("Bert", "hidden_act", "gelu_new"),
        ("Bert", "hidden_act", "relu"),
        ("Albert", "hidden_act", "gelu"),
        ("DistilBert", "activation", "relu"),
        ("Roberta", "pad_token_id", 4),
        ("Albert", "embedding_size", HIDDEN),
        ("ModernBert", "local_attention", 2),
        ("ModernBert", "global_attn_every_n_layers", 1),
        ("ModernBert", "global_attn_every_n_layers", 2),
        ("ModernBert", "global_rope_theta", 500.0),
        ("ModernBert", "local_rope_theta", 100.0),
        ("ModernBert", "hidden_activation", "gelu_pytorch_tanh"),
        ("Esm", "rope_theta", 500.0),
        ("Esm", "token_dropout", False),
    ],
)
def test_options_of_a_config_are_obeyed(name: str, option: str, value: Any, tmp_path: Path) -> None:
    more = {"max_position_embeddings": LONGEST + 5} if option == "pad_token_id" else {}
    if option == "hidden_activation":
        more = {"classifier_activation": value}
    changes = {option: value, **more}
    errors = parity(name, "mlm", torch.float64, [LONGEST, 3], tmp_path, **changes)
    assert max(errors.values()) <= limit(name, torch.float64), errors
    # the option makes a difference
    one, two = (tiny(f"{name}ForMaskedLM", **given) for given in (changes, more))
    batch = padded(random_batch([LONGEST, 3]), family_of(f"{name}Model").name)
    assert distance(one(**batch).logits, two(**batch).logits) > 1e-4


@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_heads_of_rows_may_read_the_mean_over_tokens(kind: str, tmp_path: Path) -> None:
    change = {"classifier_pooling": "mean"}
    errors = parity("ModernBert", kind, torch.float32, LENGTHS, tmp_path / "mean", **change)
    assert max(errors.values()) <= 1e-5, errors
    # it makes a difference
    batch = random_batch(LENGTHS)
    parity("ModernBert", kind, torch.float32, LENGTHS, tmp_path / "first")
    one, two = (hf.from_hf(tmp_path / name).checkpoint.model() for name in ("mean", "first"))
    assert distance(one.logits(batch), two.logits(batch)) > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_sums_with_counts(name: str, tmp_path: Path) -> None:
    for kind in HEADS:
        if (name, kind) in LACKING:
            continue
        one = {"num_labels": 1} if kind == "regress" else {}
        theirs = tiny(class_of(name, kind), tmp_path / kind, **one)
        family = family_of(class_of(name, kind))
        ours = hf.from_hf(tmp_path / kind).checkpoint.model()
        assert ours.task is not None
        assert ours.task.name == kind
        # sequences of equal length, so that no padding enters the loss of spans
        batch = random_batch([LONGEST] * 4)
        batch = replace(batch, labels=labels_of(batch, kind))
        batch = replace(batch, targets=batch.labels) if kind == "tag" else batch
        expected = theirs(**padded(batch, family.name), **their_labels(batch, kind, family))
        loss, logits = ours.loss(batch), ours.logits(batch)
        assert distance(loss.total / loss.count, expected.loss) <= 1e-5
        assert batch.places is not None
        assert loss.count == (len(batch.places) if kind in ("mlm", "tag") else 4)
        assert distance(logits, their_logits(expected, batch, kind)) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_right_predictions_are_counted(name: str, tmp_path: Path) -> None:
    for kind in ("mlm", "classify", "span", "tag"):
        if (name, kind) in LACKING:
            continue
        theirs = tiny(class_of(name, kind), tmp_path / kind)
        ours = hf.from_hf(tmp_path / kind).checkpoint.model()
        batch = random_batch([LONGEST] * 4)
        batch = replace(batch, labels=labels_of(batch, kind))
        family = family_of(class_of(name, kind))
        expected = theirs(**padded(batch, family.name))
        if kind in ("mlm", "tag"):
            likeliest = their_logits(expected, batch, kind).argmax(1)
            half = torch.arange(len(likeliest)) % 2 == 0
            assert batch.targets is not None
            targets = torch.where(half, likeliest, (likeliest + 1) % expected.logits.size(-1))
            batch = replace(batch, targets=targets)
        else:
            likeliest = (
                expected.logits.argmax(1)
                if kind == "classify"
                else torch.stack(
                    [expected.start_logits.argmax(1), expected.end_logits.argmax(1)], 1
                )
            )
            half = torch.tensor([True, False, True, True])
            wrong = (likeliest + 1) % (4 if kind == "classify" else LONGEST)
            if kind == "span":  # a span is right only if its end is right too
                wrong[:, 0] = likeliest[:, 0]
                half = half[:, None]
            batch = replace(batch, labels=torch.where(half, likeliest, wrong))
        loss = ours.loss(batch)
        assert int(loss.correct) == int(half.sum())


@pytest.mark.parametrize(
    ("name", "kind"),
    [case for case in CASES if case[1] in ("mlm", "classify", "span", "tag")],
)
def test_dropout_is_applied_where_transformers_applies_it(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "absent", native.OFF)

    # ours are replaced by torch's random numbers, whose order is the same with one sequence
    def drawn(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rate = next(value for value in rest if isinstance(value, float))
        return x * torch.empty_like(x).bernoulli_(1 - rate) / (1 - rate)

    monkeypatch.setattr("xformer.ops.dropout.new_seed", lambda: torch.tensor(0))
    monkeypatch.setattr("xformer.ops.dropout.plain", drawn)
    monkeypatch.setattr("xformer.ops.attention._dropped", drawn)
    # the same for every token, although the head reads only the first token's hidden states
    every = Encoder.forward

    def forward(
        self: Encoder, batch: Any, places: torch.Tensor | None = None, depth: int | None = None
    ) -> torch.Tensor:
        x = every(self, batch, depth=depth)
        return x if places is None else x[places]

    monkeypatch.setattr(Encoder, "forward", forward)
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    head = "classifier_dropout_prob" if name == "Albert" else "classifier_dropout"
    if name == "ModernBert":
        rates = {"embedding_dropout": 0.3, "mlp_dropout": 0.3, "attention_dropout": 0.2}
    if name == "DistilBert":
        rates, head = {"dropout": 0.3, "attention_dropout": 0.2}, "seq_classif_dropout"
        rates["qa_dropout"] = 0.3  # equal to `dropout`, which our model uses in its place
    theirs = tiny(class_of(name, kind), tmp_path, **rates, **{head: 0.4}).train()
    ours = hf.from_hf(tmp_path).checkpoint.model().train()
    batch = replace(random_batch([LONGEST]), places=torch.arange(LONGEST))
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        output = theirs(**padded(batch, family_of(f"{name}Model").name))
        expected = their_logits(output, batch, kind)
        torch.manual_seed(seed)
        outputs.append(ours.logits(batch))
        assert distance(outputs[-1], expected) <= 1e-5
    assert distance(outputs[0], outputs[1]) > 0.1
    ours.eval()
    assert torch.equal(ours.logits(batch), ours.logits(batch))


@pytest.mark.parametrize("kind", ["classify", "mlm"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fine_tuning_follows_transformers(name: str, kind: str, tmp_path: Path) -> None:
    for error, value in trajectory(name, kind, tmp_path).items():
        assert value <= 1e-5, error

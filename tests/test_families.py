"""BERT, RoBERTa, ALBERT and DistilBERT against `transformers`: what goes in, what comes out, and
every gradient. `python tests/test_families.py` prints the largest errors as a table."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import (
    HIDDEN,
    LENGTHS,
    LONGEST,
    distance,
    family_of,
    in_our_names,
    packed,
    padded,
    random_batch,
    seeded,
    tiny,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xformer.convert import hf
from xformer.convert.names import Family, Table
from xformer.model import heads
from xformer.model.encoder import Packed
from xformer.model.heads import Model
from xformer.optim import FlatOptimizer, OptimConfig, learning_rate

FAMILIES = ["Bert", "Roberta", "Albert", "DistilBert"]
HEADS = {"mlm": "MaskedLM", "classify": "SequenceClassification",
         "regress": "SequenceClassification", "span": "QuestionAnswering",
         "tag": "TokenClassification"}  # fmt: skip
CASES = [(name, kind) for name in FAMILIES for kind in HEADS]
CASES += [("Bert", "pair"), ("Albert", "pair")]
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
# only one sequence; only the longest; as they come; every length
SHAPES = [[1], [LONGEST], LENGTHS, list(range(1, LONGEST + 1))]


def class_of(name: str, kind: str) -> str:
    return f"{name}For{HEADS.get(kind, 'PreTraining')}"


def labels_of(batch: Packed, kind: str) -> Tensor:
    """Labels that fit the kind of head; a span begins before it ends, or is 0, 0."""
    assert batch.places is not None
    sizes = torch.tensor(batch.layout.lengths)
    if kind == "span":
        places = torch.rand(len(sizes), 2, generator=seeded(6)).sort(1).values * sizes[:, None]
        places[::3] = 0  # no answer
        return places.long()
    if kind == "regress":
        return torch.randn(len(sizes), generator=seeded(5))
    if kind == "tag":
        return batch.places % 4  # of the words at those places
    return torch.randint(2 if kind == "pair" else 4, sizes.shape, generator=seeded(5))


def masked_labels(batch: Packed) -> Tensor:
    """(N, L): what was masked, -100 elsewhere."""
    assert batch.places is not None
    assert batch.targets is not None
    labels = torch.full(batch.tokens.shape, -100).index_put((batch.places,), batch.targets)
    return pad_sequence(labels.split(list(batch.layout.lengths)), True, -100)


def their_labels(batch: Packed, kind: str, family: Family) -> dict[str, Tensor]:
    assert batch.labels is not None
    if kind == "span":
        return {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
    if kind in ("mlm", "pair"):
        pair = {"bert": "next_sentence_label", "albert": "sentence_order_label"}
        more = {pair[family.name]: batch.labels} if kind == "pair" else {}
        return {"labels": masked_labels(batch), **more}
    if kind == "tag":
        return {"labels": masked_labels(replace(batch, targets=batch.labels))}
    return {"labels": batch.labels}


def our_loss(model: Model, batch: Packed, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The mean loss in the model's own precision, the logits, and those of the pair head."""
    assert batch.labels is not None
    logits = model.logits(batch)
    if kind in ("mlm", "pair"):
        assert batch.targets is not None
        loss = F.cross_entropy(logits, batch.targets)
        if kind == "mlm":
            return loss, logits, None
        assert model.pair_head is not None
        pair = model.pair_head(model.pooled(model.encoder(batch), batch))
        return loss + F.cross_entropy(pair, batch.labels), logits, pair
    if kind == "span":
        return F.cross_entropy(heads.padded(logits, batch), batch.labels), logits, None
    if kind == "regress":
        return F.mse_loss(logits[:, 0], batch.labels.to(logits.dtype)), logits, None
    return F.cross_entropy(logits, batch.labels), logits, None


def one_by_one(batch: Packed) -> list[Packed]:
    """The batch as batches of one sequence."""
    assert batch.labels is not None
    lengths = list(batch.layout.lengths)
    parts = zip(batch.tokens.split(lengths), batch.segments.split(lengths), batch.labels,
                strict=True)  # fmt: skip
    return [
        replace(random_batch([len(tokens)]), tokens=tokens, segments=segments, labels=label[None])
        for tokens, segments, label in parts
    ]


def their_loss(theirs: Any, batch: Packed, kind: str, family: Family, whole: Any) -> Tensor:
    """Their loss; of spans the mean of every sequence's own, as theirs would have the padding
    after a shorter one compete with its tokens."""
    if kind != "span":
        return whole.loss
    losses = [
        theirs(**padded(one, family.name), **their_labels(one, kind, family)).loss
        for one in one_by_one(batch)
    ]
    return torch.stack(losses).mean()


def parity(name: str, kind: str, dtype: torch.dtype, lengths: list[int], directory: Path,
           **changes: Any) -> dict[str, float]:  # fmt: skip
    """The largest relative error of every quantity."""
    if kind == "regress":
        changes["num_labels"] = 1
    theirs = tiny(class_of(name, kind), directory, **changes).to(dtype)
    family = family_of(class_of(name, kind))
    imported = hf.from_hf(directory)
    assert imported.left == []
    ours = imported.checkpoint.model().to(dtype)
    batch = random_batch(lengths)
    batch = replace(batch, labels=labels_of(batch, kind))
    targets = their_labels(batch, kind, family)
    if kind == "regress":
        targets = {"labels": targets["labels"].to(dtype)}
    expected = theirs(**padded(batch, family.name), **targets, output_hidden_states=True,
                      output_attentions=True)  # fmt: skip
    errors: dict[str, float] = {}
    loss, logits, pair = our_loss(ours, batch, kind)
    errors["loss"] = distance(loss, wanted := their_loss(theirs, batch, kind, family, expected))
    errors["logits"] = distance(logits, their_logits(expected, batch, kind))
    if pair is not None:
        found = expected.get("seq_relationship_logits", expected.get("sop_logits"))
        errors["logits"] = max(errors["logits"], distance(pair, found))
    inside = ours.encoder.inside(batch, "explicit")
    hidden = zip(inside.hidden, expected.hidden_states, strict=True)
    errors["hidden states"] = max(distance(h, packed(t, batch)) for h, t in hidden)
    fused = ours.encoder.inside(batch, "auto").hidden
    errors["fused"] = max(distance(h, x) for h, x in zip(fused, inside.hidden, strict=True))
    errors["maps"] = max(
        distance(m, t[:, :n, :n])
        for of_layer, theirs_of_layer in zip(inside.maps, expected.attentions, strict=True)
        for n, m, t in zip(lengths, of_layer, theirs_of_layer, strict=True)
    )
    loss.backward()
    wanted.backward()
    errors["gradients"] = gradient_error(ours, theirs, family, table_of(family, ours))
    return errors


def their_logits(expected: Any, batch: Packed, kind: str) -> Tensor:
    if kind in ("mlm", "pair", "tag"):
        logits = expected.prediction_logits if kind == "pair" else expected.logits
        return packed(logits, batch)[batch.places]
    if kind == "span":
        return packed(torch.stack([expected.start_logits, expected.end_logits], 2), batch)
    return expected.logits


def table_of(family: Family, model: Model) -> Table:
    """The names of all that a model has."""
    table = dict(family.encoder)
    if model.kind in ("classify", "regress"):
        return table | family.pooler | family.classify
    table |= family.pooler if model.pooler is not None else {}
    table |= family.pair if model.pair_head is not None else {}
    return table | {"mlm": family.mlm, "span": family.span, "tag": family.tag}[str(model.kind)]


def gradient_error(model: Model, theirs: Any, family: Family, table: Table) -> float:
    parameters = theirs.named_parameters(remove_duplicate=False)
    given = {name: p.grad for name, p in parameters if p.grad is not None}
    expected = in_our_names(given, family, table)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected) == set(dict(model.named_parameters()))
    if model.kind == "span":  # the same added to all logits changes nothing: 0 but for rounding
        scale = float(found["task_head.weight"].norm())
        last = model.config.stored_layers - 1
        alone = [] if model.config.shared_layers else [f"encoder.layers.{last}.mlp_norm.bias"]
        for name in ("task_head.bias", *alone):
            assert float((found.pop(name) - expected.pop(name)).norm()) <= 1e-6 * scale, name
    return max(distance(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "fp64"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_everything_equals_transformers(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for error, value in parity(name, kind, dtype, LENGTHS, tmp_path).items():
        assert value <= LIMITS[dtype], error


@pytest.mark.parametrize("lengths", SHAPES, ids=["one", "longest", "some", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_of_any_length_equal_padded_ones(
    name: str, lengths: list[int], tmp_path: Path
) -> None:
    for error, value in parity(name, "classify", torch.float64, lengths, tmp_path).items():
        assert value <= 1e-10, error


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("Bert", "hidden_act", "gelu_new"), ("Bert", "hidden_act", "relu"),
     ("Albert", "hidden_act", "gelu"), ("DistilBert", "activation", "relu"),
     ("Roberta", "pad_token_id", 4), ("Albert", "embedding_size", HIDDEN)],
)  # fmt: skip
def test_options_of_a_config_are_obeyed(name: str, option: str, value: Any, tmp_path: Path) -> None:
    more = {"max_position_embeddings": LONGEST + 5} if option == "pad_token_id" else {}
    found = parity(name, "mlm", torch.float64, [LONGEST, 3], tmp_path, **{option: value}, **more)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_sums_with_counts(name: str, tmp_path: Path) -> None:
    for kind in HEADS:
        one = {"num_labels": 1} if kind == "regress" else {}
        theirs = tiny(class_of(name, kind), tmp_path / kind, **one)
        family = family_of(class_of(name, kind))
        ours = hf.from_hf(tmp_path / kind).checkpoint.model()
        assert ours.kind == kind
        # sequences of one length: their loss of spans has no padding in it
        batch = random_batch([LONGEST] * 4)
        batch = replace(batch, labels=labels_of(batch, kind))
        batch = replace(batch, targets=batch.labels) if kind == "tag" else batch
        expected = theirs(**padded(batch, family.name), **their_labels(batch, kind, family))
        loss, logits = ours.loss(batch)
        assert distance(loss.total / loss.count, expected.loss) <= 1e-5
        assert batch.places is not None
        assert loss.count == (len(batch.places) if kind in ("mlm", "tag") else 4)
        assert distance(logits, their_logits(expected, batch, kind)) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_right_predictions_are_counted(name: str, tmp_path: Path) -> None:
    for kind in ("mlm", "classify", "span", "tag"):
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
            likeliest = expected.logits.argmax(1) if kind == "classify" else torch.stack(
                [expected.start_logits.argmax(1), expected.end_logits.argmax(1)], 1)  # fmt: skip
            half = torch.tensor([True, False, True, True])
            wrong = (likeliest + 1) % (4 if kind == "classify" else LONGEST)
            if kind == "span":  # the right beginning alone is no right span
                wrong[:, 0] = likeliest[:, 0]
                half = half[:, None]
            batch = replace(batch, labels=torch.where(half, likeliest, wrong))
        loss, _ = ours.loss(batch)
        assert int(loss.correct) == int(half.sum())


@pytest.mark.parametrize("kind", ["mlm", "classify", "span", "tag"])
@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_falls_where_transformers_drops(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one sequence: torch's random numbers, put for ours, are drawn in the same order
    monkeypatch.setattr(
        "xformer.model.attention.kept",
        lambda size, rate, dtype: torch.empty(size, dtype=dtype).bernoulli_(1 - rate),
    )
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    head = "classifier_dropout_prob" if name == "Albert" else "classifier_dropout"
    if name == "DistilBert":
        rates, head = {"dropout": 0.3, "attention_dropout": 0.2}, "seq_classif_dropout"
        rates["qa_dropout"] = 0.3  # as `dropout`, which we take for it
    theirs = tiny(class_of(name, kind), tmp_path, **rates, **{head: 0.4}).train()
    ours = hf.from_hf(tmp_path).checkpoint.model().train()
    batch = replace(random_batch([LONGEST]), places=torch.arange(LONGEST))
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found = theirs(**padded(batch, family_of(f"{name}Model").name))
        expected = their_logits(found, batch, kind)
        torch.manual_seed(seed)
        outputs.append(ours.logits(batch))
        assert distance(outputs[-1], expected) <= 1e-5
    assert distance(outputs[0], outputs[1]) > 0.1
    ours.eval()
    assert torch.equal(ours.logits(batch), ours.logits(batch))


NO_DROPOUT = {
    "DistilBert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Albert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
               "classifier_dropout_prob": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_fine_tuning_takes_the_path_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    off = NO_DROPOUT.get(name, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    theirs = tiny(f"{name}ForSequenceClassification", tmp_path, **off).train()
    family = family_of(f"{name}Model")
    ours = hf.from_hf(tmp_path).checkpoint.model().train()
    config = OptimConfig(lr=1e-3, weight_decay=0.1, clip=8.0, eps=1e-6)
    # biases and LayerNorm are vectors
    groups: list[Any] = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1]},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.1, eps=config.eps)
    schedule = transformers.get_linear_schedule_with_warmup(adamw, 0, 5)
    flat = FlatOptimizer(ours, config)
    for step in range(5):
        batch = random_batch([5, 17, 17, 1 + step, 9], seed=step)
        flat.zero()
        loss, _ = ours.loss(batch)
        loss.total.backward()
        flat.step(
            torch.tensor(float(loss.count)), learning_rate(config, step / 5, (step + 1) / 5, 0.0)
        )
        adamw.zero_grad()
        expected = theirs(**padded(batch, family.name), labels=batch.labels).loss
        expected.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        adamw.step()
        schedule.step()
        assert distance(loss.total / loss.count, expected) <= 1e-5, step
    end = in_our_names(dict(theirs.named_parameters()), family, table_of(family, ours))
    start = hf.from_hf(tmp_path).checkpoint.weights
    for parameter, weight in ours.named_parameters():
        if parameter.endswith("qkv.bias"):
            # the key's part has the gradient 0 but for rounding, which Adam magnifies
            weight.data[HIDDEN : 2 * HIDDEN] = end[parameter][HIDDEN : 2 * HIDDEN]
        assert distance(weight, end[parameter]) <= 1e-5, parameter
        assert distance(weight, start[parameter]) > 1e-3, parameter


def table() -> str:
    """The largest error of every quantity over the heads of each family, as Markdown."""
    names = ["loss", "logits", "hidden states", "maps", "gradients"]
    lines = [f"| family | precision | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name in FAMILIES:
        for dtype in LIMITS:
            worst = dict.fromkeys(names, 0.0)
            for kind in (kind for family, kind in CASES if family == name):
                for lengths in SHAPES if kind == "classify" else SHAPES[2:]:
                    with tempfile.TemporaryDirectory() as directory:
                        found = parity(name, kind, dtype, lengths, Path(directory))
                    worst = {n: max(worst[n], found[n]) for n in names}
            values = " | ".join(f"{value:.1e}" for value in worst.values())
            lines.append(f"| {name} | {str(dtype).removeprefix('torch.')} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")

"""Compare tiny random models of transformers with what this project imports from them.

T tokens in the batch, N sequences, L length, C hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
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
    lengths_of,
    packed,
    padded,
    random_batch,
    seeded,
    tiny,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xformer import optim
from xformer.analysis.examples import inside
from xformer.checkpoint import Checkpoint
from xformer.convert import hf
from xformer.convert.names import Family, Table
from xformer.data.batch import Assembler, Batch
from xformer.data.store import Ragged, Split
from xformer.ops.native import only_plain
from xformer.optim import OptimConfig, learning_rate
from xformer.parallel.feed import to_device
from xformer.tasks import span
from xformer.tasks.task import Model

FAMILIES = ["Bert", "Roberta", "Albert", "DistilBert", "ModernBert", "Esm"]
HEADS = {
    "mlm": "MaskedLM",
    "classify": "SequenceClassification",
    "regress": "SequenceClassification",
    "span": "QuestionAnswering",
    "tag": "TokenClassification",
}
LACKING = [("Esm", "span")]  # heads that transformers does not have
CASES = [(name, kind) for name in FAMILIES for kind in HEADS if (name, kind) not in LACKING]
CASES += [("Bert", "pair"), ("Albert", "pair")]
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
# only one sequence; only the longest; as they come; every length
SHAPES = [[1], [LONGEST], LENGTHS, list(range(1, LONGEST + 1))]


def class_of(name: str, kind: str) -> str:
    return f"{name}For{HEADS.get(kind, 'PreTraining')}"


def trainable(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the contact head of ESM-2, which nothing trains."""
    kept = {n: w for n, w in checkpoint.weights.items() if not n.startswith("contact_head")}
    return replace(checkpoint, weights=kept)


def labels_of(batch: Batch[Tensor], kind: str) -> Tensor:
    """Labels for a kind of head. A span begins before it ends, or is 0, 0."""
    assert batch.places is not None
    sizes = batch.cu_seqlens.diff()
    if kind == "span":
        places = torch.rand(len(sizes), 2, generator=seeded(6)).sort(1).values * sizes[:, None]
        places[::3] = 0  # 0, 0 means that there is no answer
        return places.long()
    if kind == "regress":
        return torch.randn(len(sizes), generator=seeded(5))
    if kind == "tag":
        return batch.places % 4  # labels of the words at those places
    return torch.randint(2 if kind == "pair" else 4, sizes.shape, generator=seeded(5))


def masked_labels(batch: Batch[Tensor]) -> Tensor:
    """The labels that transformers expects for MLM: the ids of masked tokens, and -100 elsewhere,
    (N, L).
    """
    assert batch.places is not None
    assert batch.targets is not None
    labels = torch.full(batch.tokens.shape, -100).index_put((batch.places,), batch.targets)
    return pad_sequence(labels.split(lengths_of(batch)), True, -100)


def their_labels(batch: Batch[Tensor], kind: str, family: Family) -> dict[str, Tensor]:
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


def our_loss(model: Model, batch: Batch[Tensor], kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The mean loss in the model's own precision, the logits, and those of the pair head."""
    assert batch.labels is not None
    logits = model.logits(batch)
    if kind in ("mlm", "pair"):
        assert batch.targets is not None
        loss = F.cross_entropy(logits, batch.targets)
        if kind == "mlm":
            return loss, logits, None
        assert model.pair_head is not None
        pair = model.pair_head(model.pooled(model.encoder(batch, places=batch.first)))
        return loss + F.cross_entropy(pair, batch.labels), logits, pair
    if kind == "span":
        return F.cross_entropy(span.as_rows(logits, batch), batch.labels), logits, None
    if kind == "regress":
        return F.mse_loss(logits[:, 0], batch.labels.to(logits.dtype)), logits, None
    return F.cross_entropy(logits, batch.labels), logits, None


def one_by_one(batch: Batch[Tensor]) -> list[Batch[Tensor]]:
    """Split the batch into batches of one sequence each."""
    assert batch.labels is not None
    lengths = lengths_of(batch)
    parts = zip(
        batch.tokens.split(lengths), batch.segments.split(lengths), batch.labels, strict=True
    )
    return [
        replace(random_batch([len(tokens)]), tokens=tokens, segments=segments, labels=label[None])
        for tokens, segments, label in parts
    ]


def their_loss(theirs: Any, batch: Batch[Tensor], kind: str, family: Family, whole: Any) -> Tensor:
    """The loss of the transformers model.

    For spans it is the mean over sequences that are run one at a time: in a padded batch, their
    softmax would give probability to the padding of the shorter sequences.
    """
    if kind != "span":
        return whole.loss
    losses = [
        theirs(**padded(one, family.name), **their_labels(one, kind, family)).loss
        for one in one_by_one(batch)
    ]
    return torch.stack(losses).mean()


def precisions(name: str) -> list[torch.dtype]:
    """The types in which transformers can run a family. The softmax of its ModernBERT is in fp32
    and gives NaN at padding if the model is in fp64."""
    return [torch.float32] if name == "ModernBert" else list(LIMITS)


def parity(
    name: str, kind: str, dtype: torch.dtype, lengths: list[int], directory: Path, **changes: Any
) -> dict[str, float]:
    """The largest relative error of every quantity."""
    dtype = dtype if dtype in precisions(name) else torch.float32
    if kind == "regress":
        changes["num_labels"] = 1
    theirs = tiny(class_of(name, kind), directory, **changes).to(dtype)
    family = family_of(class_of(name, kind))
    imported = hf.from_hf(directory)
    assert imported.left == []
    ours = trainable(imported.checkpoint).model().to(dtype)
    batch = random_batch(lengths)
    batch = replace(batch, labels=labels_of(batch, kind))
    targets = their_labels(batch, kind, family)
    if kind == "regress":
        targets = {"labels": targets["labels"].to(dtype)}
    expected = theirs(
        **padded(batch, family.name), **targets, output_hidden_states=True, output_attentions=True
    )
    errors: dict[str, float] = {}
    loss, logits, pair = our_loss(ours, batch, kind)
    errors["loss"] = distance(loss, wanted := their_loss(theirs, batch, kind, family, expected))
    errors["logits"] = distance(logits, their_logits(expected, batch, kind))
    if pair is not None:
        their_pair = expected.get("seq_relationship_logits", expected.get("sop_logits"))
        errors["logits"] = max(errors["logits"], distance(pair, their_pair))
    with only_plain():
        written = inside(ours.encoder, batch, maps=True)
    states = zip(written.hidden, expected.hidden_states, strict=True)
    hidden = [distance(h, packed(t, batch)) for h, t in states]
    errors["embeddings"], errors["hidden states"] = hidden[0], max(hidden)
    fused = inside(ours.encoder, batch).hidden
    errors["fused"] = max(distance(h, x) for h, x in zip(fused, written.hidden, strict=True))
    errors["maps"] = max(
        distance(m, t[:, :n, :n])
        for of_layer, theirs_of_layer in zip(written.maps, expected.attentions, strict=True)
        for n, m, t in zip(lengths, of_layer, theirs_of_layer, strict=True)
    )
    loss.backward()
    wanted.backward()
    errors["gradients"] = gradient_error(ours, theirs, family, table_of(family, ours))
    return errors


SENTENCES = [
    "Masked language modelling needs no labels.",
    'A protein\'s sequence of amino acids ("MKTAYIAKQR") folds in milliseconds!',
    "Yes.",
    "Café, naïve, Zürich: 3,141 pieces of 97 words -- or was it 99?",
    "It is what it is, and what it is not it is not, as far as anyone who reads this can tell; "
    "so the row is long, longer than its fellows, and packed behind them without any padding.",
]


def real_parity(directory: Path, dtype: torch.dtype) -> dict[str, float]:
    """The largest relative errors of a real encoder on SENTENCES.

    The loss is the squared distance of the pooled first token from 1.
    """
    transformers = pytest.importorskip("transformers")
    given = transformers.AutoTokenizer.from_pretrained(directory)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    bert = transformers.BertModel.from_pretrained(directory, attn_implementation="eager")
    theirs = bert.eval().to(dtype)
    expected = theirs(**given, output_hidden_states=True, output_attentions=True)
    checkpoint = hf.from_hf(directory).checkpoint
    ours = checkpoint.model().to(dtype)
    ids = checkpoint.tokenizer.encode_batch(SENTENCES)
    columns = {"tokens": Ragged(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))}
    plain = Assembler(Split("x", len(ids), 0, columns), checkpoint.tokenizer, 512)
    on_host = plain.batch(np.arange(len(ids)))
    assert on_host.rows is not None
    batch, order = to_device(on_host, torch.device("cpu")), on_host.rows.tolist()
    with only_plain():
        written = inside(ours.encoder, batch, maps=True)
    states = zip(written.hidden, expected.hidden_states, strict=True)
    hidden = [distance(h, packed(t[order], batch)) for h, t in states]
    errors = {"embeddings": hidden[0], "hidden states": max(hidden)}
    errors["maps"] = max(
        distance(m, t[i, :, :n, :n])
        for of_layer, theirs_of_layer in zip(written.maps, expected.attentions, strict=True)
        for i, n, m, t in zip(order, lengths_of(batch), of_layer, repeat(theirs_of_layer))
    )
    pooled = ours.pooled(ours.encoder(batch, places=batch.first))
    errors["logits"] = distance(pooled, expected.pooler_output[order])
    loss, wanted = ((x - 1).square().sum() for x in (pooled, expected.pooler_output))
    errors["loss"] = distance(loss, wanted)
    loss.backward()
    wanted.backward()
    family = family_of("BertModel")
    errors["gradients"] = gradient_error(ours, theirs, family, family.encoder | family.pooler)
    return errors


def their_logits(expected: Any, batch: Batch[Tensor], kind: str) -> Tensor:
    if kind in ("mlm", "pair", "tag"):
        logits = expected.prediction_logits if kind == "pair" else expected.logits
        return packed(logits, batch)[batch.places]
    if kind == "span":
        return packed(torch.stack([expected.start_logits, expected.end_logits], 2), batch)
    return expected.logits


def table_of(family: Family, model: Model) -> Table:
    """The names of all weights of a model."""
    table = dict(family.encoder)
    assert model.task is not None
    kind = model.task.name
    if kind in ("classify", "regress"):
        return table | family.pooler | family.classify
    table |= family.pooler if model.pooler is not None else {}
    table |= family.pair if model.pair_head is not None else {}
    return table | {"mlm": family.mlm, "span": family.span, "tag": family.tag}[kind]


def gradient_error(model: Model, theirs: Any, family: Family, table: Table) -> float:
    parameters = theirs.named_parameters(remove_duplicate=False)
    given = {name: p.grad for name, p in parameters if p.grad is not None}
    expected = in_our_names(given, family, table, model.config.stored_layers)
    actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(actual) == set(expected) == set(dict(model.named_parameters()))
    spans = model.task is not None and model.task.name == "span"
    if spans:  # a constant added to all logits changes nothing, so its gradient is only rounding
        scale = float(actual["task_head.weight"].norm())
        last = model.config.stored_layers - 1
        alone = [] if model.config.shared_layers else [f"encoder.layers.{last}.mlp_norm.bias"]
        for name in filter(actual.__contains__, ("task_head.bias", *alone)):
            assert float((actual.pop(name) - expected.pop(name)).norm()) <= 1e-6 * scale, name
    return max(distance(actual[name], expected[name]) for name in actual)


NO_DROPOUT = {
    "ModernBert": {},  # its config has no dropout
    "DistilBert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Albert": {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    },
}


def trajectory(name: str, kind: str, directory: Path) -> dict[str, float]:
    """The largest relative errors of the loss and of the final weights over five steps of
    fine-tuning, by AdamW with weight decay, clipping and a falling learning rate.
    """
    transformers = pytest.importorskip("transformers")
    off = NO_DROPOUT.get(name, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    theirs = tiny(class_of(name, kind), directory, **off).train()
    family = family_of(f"{name}Model")
    ours = trainable(hf.from_hf(directory).checkpoint).model().train()
    config = OptimConfig(lr=1e-3, weight_decay=0.1, clip=8.0, eps=1e-6)
    # vectors (biases and LayerNorm) have no weight decay
    groups: list[Any] = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1]},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.1, eps=config.eps)
    schedule = transformers.get_linear_schedule_with_warmup(adamw, 0, 5)
    optimizer = optim.build(ours, config)
    worst = 0.0
    for step in range(5):
        batch = random_batch([5, 17, 17, 1 + step, 9], seed=step)
        optimizer.zero_grad()
        loss = ours(batch)
        loss.total.backward()
        count, rate = float(loss.count), learning_rate(config, step, step + 1, 5)
        norm = optim.gradient_norm(optimizer) / count
        optim.clip_and_step(
            optimizer, rate, torch.tensor(count), norm, config.clip, torch.zeros(())
        )
        adamw.zero_grad()
        expected = theirs(**padded(batch, family.name), **their_labels(batch, kind, family)).loss
        expected.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        adamw.step()
        schedule.step()
        worst = max(worst, distance(loss.total / loss.count, expected))
    parameters = theirs.named_parameters(remove_duplicate=False)
    table = table_of(family, ours)
    end = in_our_names(dict(parameters), family, table, ours.config.stored_layers)
    start = hf.from_hf(directory).checkpoint.weights
    errors = []
    for parameter, weight in ours.named_parameters():
        if parameter.endswith("qkv.bias"):
            # the gradient of the key's bias is 0 except for rounding, which Adam magnifies
            weight.data[HIDDEN : 2 * HIDDEN] = end[parameter][HIDDEN : 2 * HIDDEN]
        errors.append(distance(weight, end[parameter]))
        assert distance(weight, start[parameter]) > 1e-3, parameter
    return {"loss": worst, "weights": max(errors)}

"""Predictions: fill the masks of a text, say what a model makes of rows."""

from __future__ import annotations

import numpy as np
import torch

from xformer import metrics, spans, tags
from xformer.checkpoint import Checkpoint, Head
from xformer.data.batch import Assembler, Batch, chunks
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Split
from xformer.distributed import ALONE, Ranks
from xformer.model.heads import padded
from xformer.packed import to_device

TEXTS = ("input", "input_b", "id")  # columns of texts that stand beside predictions
Table = dict[str, list[str]]  # columns of a table by name


def fill_mask(
    checkpoint: Checkpoint, text: str, top: int, ranks: Ranks = ALONE, precision: str = "fp32"
) -> list[list[tuple[float, str]]]:
    """For each mask token in `text` the `top` likeliest pieces as (probability, piece).

    Raises BadInput without an MLM head or a mask token, or if the text is too long, and Failure
    where the model's outputs are not finite.
    """
    head, tokenizer = checkpoint.head, checkpoint.tokenizer
    if head is None or head.kind != "mlm":
        raise BadInput("this checkpoint has no MLM head, so it cannot fill a mask")
    mask_token = tokenizer.pieces[tokenizer.special["mask"]]
    parts = text.split(mask_token)
    if len(parts) == 1:
        raise BadInput(f"the text has no mask token: put {mask_token} where a word is wanted")
    if tokenizer.mask_takes_space:  # RoBERTa
        parts = [*(part.rstrip() for part in parts[:-1]), parts[-1]]
    ids = [tokenizer.special["cls"]]
    for i, encoded in enumerate(tokenizer.encode_batch(parts)):
        ids += ([tokenizer.special["mask"]] if i else []) + encoded.tolist()
    ids.append(tokenizer.special["sep"])
    if len(ids) > checkpoint.config.max_positions:
        raise BadInput(
            f"the text is {len(ids)} tokens; the model takes {checkpoint.config.max_positions}"
        )
    tokens = np.array(ids, np.int64)
    places = np.flatnonzero(tokens == tokenizer.special["mask"])
    length = np.array([0, len(ids)], np.int32)
    row = np.zeros(1, np.int64)
    batch = Batch(tokens, np.arange(len(ids)), np.zeros_like(tokens), length, row, places=places)
    model = checkpoint.model().to(ranks.device)
    with torch.no_grad(), ranks.autocast(precision):
        logits = model.logits(to_device(batch, ranks.device)).float().cpu()
    metrics.check_finite(logits.numpy(), "the text: the model's outputs at the masks")
    likely = torch.softmax(logits, 1)[:, : len(tokenizer)]  # rows beyond have no piece
    best = likely.topk(min(top, likely.size(1)))
    return [
        [(float(p), tokenizer.pieces[int(i)]) for p, i in zip(*pair, strict=True)]
        for pair in zip(best.values, best.indices, strict=True)
    ]


def outputs(
    checkpoint: Checkpoint, assembler: Assembler, ranks: Ranks = ALONE, precision: str = "fp32"
) -> np.ndarray:
    """What the model says of a split without labels: (N, K) logits or (N, 1) scores by row, (N, 4)
    of spans as `spans.best_spans` has them, (S, 2) of tokens as `tags.outcome` has them.

    Raises Failure that names the rows whose outputs are not finite.
    """
    head, split = checkpoint.head, assembler.split
    assert head is not None
    width = {"span": 4, "tag": tags.WIDTH}.get(head.kind, head.outputs)
    found = np.zeros((split.tokens if head.kind == "tag" else split.rows, width), np.float32)
    model = checkpoint.model().to(ranks.device)
    with torch.no_grad(), ranks.autocast(precision):
        for part in chunks(assembler, split.rows):
            batch = assembler.batch(part)
            packed = to_device(batch, ranks.device)
            if head.kind == "tag":
                places, values = tags.outcome(model, packed, batch, assembler)
                found[places.cpu().numpy()] = values.float().cpu().numpy()
                continue
            values = model.logits(packed).float()
            if head.kind == "span":
                b = torch.from_numpy(assembler.lengths(batch.rows)[1]).to(ranks.device)
                second = packed.layout.cu_seqlens.diff() - 1 - b
                values = spans.best_spans(padded(values, packed), second, b)
            found[batch.rows] = values.cpu().numpy()
    bad = not_finite(head, found, split)
    metrics.check_finite(np.where(bad, np.nan, 0.0), "the input: outputs")
    return found


def not_finite(head: Head, found: np.ndarray, split: Split) -> np.ndarray:
    """Which rows have outputs that are not finite numbers, (rows,)."""
    if head.kind == "tag":
        return tags.broken(found, np.asarray(split.columns["tokens"].offsets))
    if head.kind == "span":  # a window without any text has no span: its score is -inf
        broken = np.isnan(found[:, 1]) | np.isposinf(found[:, 1])
        return broken | ~np.isfinite(np.delete(found, 1, 1)).all(1)
    return ~np.isfinite(found).all(1)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """softmax over the last axis, (N, K)."""
    exponent = np.exp(logits - logits.max(1, keepdims=True))
    return exponent / exponent.sum(1, keepdims=True)


def predictions(head: Head, found: np.ndarray, split: Split, threshold: float | None = None) -> str:
    """A tab-separated table of what `outputs` found: a header, and a line for each row of the
    split. Rows that were read to be predicted have a line for each piece or question instead.

    The first columns are the label and its probability, the score, the labels of the words, or the
    answer and how far "no answer" lies above it. Then come the texts as they were read (`input`,
    `input_b`) or the number of the row, and the row's `id` if it has one.
    """
    columns = split.columns
    if head.kind == "span":
        return as_table(_answers(found, split, threshold))
    if "input" in columns and "group" in columns and head.kind == "classify":
        return as_table(_votes(head, found, split))
    if head.kind == "classify":
        table = _labels(head, probabilities(found))
    elif head.kind == "regress":
        table = {"score": [f"{score:.4f}" for score in found[:, 0]]}
    else:
        table = {"labels": tags.words(found, split, head.labels)}
    if "input" not in columns:
        table["row"] = [str(row) for row in range(split.rows)]
    table |= {name: _texts(columns[name]) for name in TEXTS if name in columns}
    return as_table(table)


def _labels(head: Head, chances: np.ndarray, best: np.ndarray | None = None) -> Table:
    """The likeliest class of each row, or the `best` as given, and its probability."""
    best = chances.argmax(1) if best is None else best
    return {
        "label": [head.labels[i] for i in best],
        "probability": [f"{chance:.4f}" for chance in chances[np.arange(len(best)), best]],
    }


def _votes(head: Head, found: np.ndarray, split: Split) -> Table:
    """A line for each group, for whose class its rows vote, as evaluation scores groups; the
    probability is the mean over the rows."""
    groups, chances = np.asarray(split.columns["group"]), probabilities(found)
    best = metrics.vote(np.log(np.maximum(chances, 1e-30)), groups).argmax(1)
    table = _labels(head, metrics.mean_by_group(chances, groups), best)
    _, first, counts = np.unique(groups, return_index=True, return_counts=True)
    ids = split.columns["id"]
    return table | {"rows": [str(n) for n in counts], "id": [ids.text(int(row)) for row in first]}


def _answers(found: np.ndarray, split: Split, threshold: float | None) -> Table:
    texts, margin = spans.answers(found, split)
    limit = float("inf") if threshold is None else threshold
    return {
        "answer": metrics.answered(texts, margin, limit),
        "no_answer": [f"{value:.4f}" for value in margin],
        "input": _texts(split.columns["question.input"]),
        "id": _texts(split.columns["question.id"]),
    }


def _texts(column: Ragged) -> list[str]:
    return [column.text(row) for row in range(len(column))]


def as_table(columns: Table) -> str:
    """Columns as tab-separated lines under a header, which csv and pandas read back unchanged."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "".join("\t".join(map(_cell, row)) + "\n" for row in rows)


def _cell(text: str) -> str:
    """A text as one cell: in quotes if it is empty, or holds a tab, a line end or a quote."""
    if text and not any(mark in text for mark in '\t\n\r"'):
        return text
    return '"' + text.replace('"', '""') + '"'

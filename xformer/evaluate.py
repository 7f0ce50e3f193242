"""Scores of a model on a split, and the command that prints them."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.evaluate`: before torch is imported
    from xformer.start import as_command

    as_command("evaluate")

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from pydantic import Field

from xformer import checkpoint as checkpoints
from xformer import distributed, metrics, predict, provenance, spans, tags
from xformer.checkpoint import Checkpoint, Head
from xformer.config import MaybePaths, Settings, help_text, parse_overrides, validate
from xformer.data import mapping
from xformer.data.batch import Assembler, Batch, chunks, ragged_arange
from xformer.data.errors import BadInput, put, say, typed
from xformer.data.files import write_text
from xformer.data.joined import open_stores
from xformer.data.store import UNSEEN, Split, Store, open_store
from xformer.data.tokenizers import Tokenizer
from xformer.distributed import Ranks, SystemConfig
from xformer.model.heads import HeadKind, Loss, Model, padded
from xformer.ops import native
from xformer.packed import to_device
from xformer.predictions import FOLDER, Predictions, small, write
from xformer.run import is_run

# writes a file's rows as the split `input` of a new store: path, head, tokenizer, store
Read = Callable[[Path, dict[str, Any], Tokenizer, Path], None]
MLM_WIDTH = 5  # numbers kept of every row for an MLM head: see `_by_row`
SPAN_WIDTH = 5  # of every window for a span head: see `spans.kept`
MASKING_SEED = 0  # one set of validation masks for all runs, so that their losses compare


# what each form of the command may be given besides
FORMS = {
    "data": ("split", "out", "predictions", "threshold", "mapping", "system"),
    "text": ("top", "system"),
    "input": ("out", "threshold", "system"),
}


class EvaluateConfig(Settings):
    """What to evaluate; give data, text or input."""

    data: MaybePaths = None
    """A store to score the checkpoint on, or a list of stores, whose rows are joined."""
    split: str = "test"
    """Which split of it."""
    out: str | None = None
    """Write the scores as JSON to this file; with `input` the predictions."""
    predictions: str | None = None
    """Write a tab-separated table to this file, with a header and a line for each row of the split;
    for span heads JSON from each question's id to its answer. A name that ends in .npz gets every
    row's outputs and labels instead, which xformer.predictions reads."""
    threshold: float | None = None
    """For span heads: leave a question unanswered where "no answer" scores higher than its best
    span by more than this, such as the best_threshold that scoring the split valid prints; absent:
    0 where the split has questions without an answer, else answer all."""
    text: str | None = None
    """A text with mask tokens, such as 'The [MASK] sat.': print the likeliest fillings."""
    top: int = Field(5, ge=1)
    """How many fillings to print."""
    input: str | None = None
    """Raw rows to predict, in any form that preprocess.py reads for the checkpoint's task: FASTA,
    csv, tsv, JSON lines, parquet, MIDI, SQuAD, CoNLL's columns. Labels may be missing. A file of
    just the texts needs no header."""
    mapping: str | None = None
    """What the store's ids mean to the model; absent: as in training."""
    system: SystemConfig = SystemConfig()
    """Execution."""


@dataclass(frozen=True)
class Scores:
    """`metrics` by name; `outputs` (N, K) logits or scores by row, numbers of each word for tags;
    `predictions` as they are kept in files, from which the metrics are computed."""

    metrics: dict[str, float]
    outputs: np.ndarray
    predictions: Predictions


@torch.no_grad()
def score(
    model: Model,
    assembler: Assembler,
    head: Head,
    ranks: Ranks,
    precision: str,
    threshold: float | None = None,
) -> Scores:
    """Metrics of a model on a split. Every rank takes its share and gets the whole result.

    Rows are cut into the same chunks on any number of ranks, and metrics are computed from the
    gathered outputs alone. Labels of -1 or NaN are not scored. Raises BadInput if no row has a
    label, and Failure that names split and rows if the model's outputs or its loss are not finite.
    """
    was_training = model.training
    model.eval()
    rows = assembler.split.rows
    width = {"mlm": MLM_WIDTH, "span": SPAN_WIDTH, "tag": tags.WIDTH}.get(head.kind, head.outputs)
    judged = assembler.split.tokens if head.kind == "tag" else rows
    outputs = torch.zeros(judged, width, device=ranks.device)  # of other ranks' rows zero

    def build(part: np.ndarray) -> Batch:
        if head.kind != "mlm":
            return assembler.batch(part)
        return assembler.masked_batch(part, np.zeros_like(part), MASKING_SEED, head.masking)

    parts = list(chunks(assembler, rows))
    for part in parts[ranks.rank :: ranks.world_size]:
        batch = build(part)
        packed = to_device(batch, ranks.device)
        places = torch.from_numpy(batch.rows).to(ranks.device)
        with ranks.autocast(precision):
            if head.kind in ("mlm", "span"):
                loss, logits = model.loss(packed)
            elif head.kind == "tag":
                places, logits = tags.outcome(model, packed, batch, assembler)
            else:
                logits = model.logits(packed).float()
        if head.kind == "mlm":
            logits = _by_row(loss, batch)
        elif head.kind == "span":
            assert loss.each is not None
            b = torch.from_numpy(assembler.lengths(batch.rows)[1]).to(ranks.device)
            second = packed.layout.cu_seqlens.diff() - 1 - b
            best = spans.best_spans(padded(logits, packed), second, b)
            logits = torch.cat([best, loss.each[:, :1]], 1)
        outputs[places] = logits
    model.train(was_training)
    every = ranks.sum(outputs).cpu().numpy()
    bad = predict.not_finite(head, every, assembler.split)
    what = f"the split {assembler.split.name!r}: outputs"
    metrics.check_finite(np.where(bad, np.nan, 0.0), what)
    found = _kept(every, assembler.split, head, threshold)
    return Scores(found.metrics(), every, found)


def _by_row(loss: Loss, batch: Batch) -> torch.Tensor:
    """MLM_WIDTH numbers of each row of a batch, (N, MLM_WIDTH): the loss summed over its masked
    tokens, how many they are, how many of them are right, and the logits of the pair head or 0."""
    assert loss.each is not None
    assert batch.places is not None
    counts = np.diff(np.searchsorted(batch.places, batch.cu_seqlens))
    row = np.repeat(np.arange(len(counts)), counts)
    within = ragged_arange(np.zeros_like(counts), counts)
    # a sum along an axis: CUDA adds into places in no order
    each = loss.each.new_zeros(len(counts), max(1, int(counts.max())), 2)
    places = [torch.from_numpy(index).to(each.device) for index in (row, within)]
    each[places[0], places[1]] = loss.each
    sums = each.sum(1)
    masked = torch.from_numpy(counts).to(sums)[:, None]
    pairs = torch.zeros_like(sums) if loss.pairs is None else loss.pairs
    return torch.cat([sums[:, :1], masked, sums[:, 1:], pairs], 1)


def _kept(
    outputs: np.ndarray, split: Split, head: Head, threshold: float | None = None
) -> Predictions:
    """The outputs of all rows of a split, as `score` has them, as predictions are kept."""
    if head.kind == "span":
        return spans.kept(outputs, split, threshold)
    if head.kind == "tag":
        return tags.kept(outputs, split, head.labels)
    arrays, columns = {"row": np.arange(split.rows)}, split.columns
    if head.kind == "mlm":
        arrays |= {
            "loss": outputs[:, 0],
            "masked": outputs[:, 1].astype(np.int64),
            "correct": outputs[:, 2].astype(np.int64),
        }
    if head.kind != "mlm" or head.pair_scale:
        pairs = 3 if head.kind == "mlm" else 0
        arrays |= {"outputs": outputs[:, pairs:], "label": np.asarray(columns["label"])}
    if head.kind != "mlm" and "group" in columns:
        arrays["group"] = np.asarray(columns["group"])
    arrays = {name: small(values) for name, values in arrays.items()}
    return Predictions(head.kind, split.name, head.labels, arrays)


def assembler_for(checkpoint: Checkpoint, store: Store, split: str, spec: str | None) -> Assembler:
    """The assembler that feeds a store's split to a trained checkpoint.

    `spec` overrides the mapping the checkpoint was trained with. Raises BadInput where the store
    does not fit the checkpoint's head or tokenizer.
    """
    head = checkpoint.head
    if head is None:
        door = typed("train.py")
        raise BadInput(f"this checkpoint has no head to score: fine-tune it with {door} first")
    check_task(store, head)
    if spec is None and checkpoint.source is not None:  # the very array of training
        if store.fingerprint != checkpoint.source.fingerprint:
            raise BadInput(
                f"{store.name} was made with another tokenizer than the data this checkpoint was "
                "trained on; make it anew with that one, or give mapping="
            )
        array = checkpoint.mapping
    else:
        size = checkpoint.config.vocab_size
        array = mapping.build(spec or head.mapping, store, checkpoint.tokenizer, size)
    return Assembler(store.split(split), checkpoint.tokenizer, head.max_tokens, array)


def check_kind(kind: str, head: HeadKind, store: object) -> None:
    """Raise BadInput unless a store of a kind holds what a head predicts; `store` names it."""
    kinds = {
        "mlm": ("text", "class", "score", "span", "tag"),
        "classify": ("class",),
        "regress": ("score",),
        "span": ("span",),
        "tag": ("tag",),
    }
    if kind not in kinds[head]:
        wants = " or ".join(kinds[head])
        raise BadInput(f"head={head} needs a store of kind {wants}; {store} is {kind}")


def check_task(store: Store, head: Head) -> None:
    """Raise BadInput unless the store holds what the head predicts."""
    check_kind(store.kind, head.kind, store.name)
    if (head.kind in ("classify", "tag") or head.pair_scale) and tuple(store.labels) != head.labels:
        unknown = sorted(set(store.labels) - set(head.labels))
        what = (
            f"labels outside the checkpoint's classes: {', '.join(unknown)}"
            if unknown
            else (f"other classes than the checkpoint's: {', '.join(store.labels)}")
        )
        raise BadInput(f"{store.name} has {what}; the checkpoint knows {', '.join(head.labels)}")


# -------------------------------------------------------------------------------- the command


def main(read: Read | None = None) -> None:
    """`python evaluate.py CHECKPOINT key=value ...`; `read` reads the rows of `input=`."""
    arguments = sys.argv[1:]
    if any(a in ("-h", "--help") for a in arguments):
        say(*help_text(EvaluateConfig).split("\n"))
        return
    with distributed.group():
        config = _config(arguments)
        checkpoint = checkpoints.load(arguments[0])
        ranks = distributed.start(config.system)
        provenance.refuse_unlike_ranks(ranks)
        slow = distributed.slow_precision(ranks.device, config.system.precision)
        for note in filter(None, (slow, native.note(ranks.device))):
            if ranks.rank == 0:
                say(note, error=True)
        if config.data is not None:
            _score_split(checkpoint, config, arguments[0], ranks)
        elif ranks.rank == 0 and config.text is not None:
            _fill_masks(checkpoint, config, ranks)
        elif ranks.rank == 0:
            _predict_file(checkpoint, config, ranks, read)


def _config(arguments: list[str]) -> EvaluateConfig:
    if not arguments or "=" in arguments[0]:
        raise BadInput("the first argument must be a checkpoint or a run, such as runs/english")
    values = parse_overrides(EvaluateConfig, arguments[1:])
    config = validate(EvaluateConfig, values)
    if sum(x is not None for x in (config.data, config.text, config.input)) != 1:
        raise BadInput("give one of data=STORE, text='...' and input=FILE")
    form = next(name for name in FORMS if getattr(config, name) is not None)
    given = set(values) - set(FORMS[form]) - {form}
    if given:
        raise BadInput(
            f"{given.pop()}= cannot be combined with {form}=. With {form}= you can set "
            f"{', '.join(FORMS[form])}"
        )
    if config.out and config.predictions and Path(config.out) == Path(config.predictions):
        raise BadInput(f"out= and predictions= are both {config.out}; give each a file of its own")
    for output in (config.out, config.predictions):
        if output and not Path(output).absolute().parent.is_dir():
            raise BadInput(f"{output} cannot be written: {Path(output).parent} is no directory")
        folder = Path(output or "").absolute().parent
        if folder.name == FOLDER and is_run(folder.parent / "config.json"):
            raise BadInput(f"{output} cannot be written: {folder} holds what a run wrote itself")
        if output and Path(output).is_dir():
            raise BadInput(f"{output} cannot be written: it is a directory")
    return config


def _fill_masks(checkpoint: Checkpoint, config: EvaluateConfig, ranks: Ranks) -> None:
    precision = config.system.precision
    found = predict.fill_mask(checkpoint, str(config.text), config.top, ranks, precision)
    for i, filling in enumerate(found, 1):
        say(f"mask {i}: " + "  ".join(f"{piece} {p:.3f}" for p, piece in filling))


def _score_split(checkpoint: Checkpoint, config: EvaluateConfig, name: str, ranks: Ranks) -> None:
    assert config.data is not None
    store = open_stores(config.data)
    assembler = assembler_for(checkpoint, store, config.split, config.mapping)
    head = checkpoint.head
    assert head is not None
    if config.predictions and head.kind == "mlm" and not _wants_arrays(config):
        raise BadInput(
            f"predictions={config.predictions}: an MLM head has no table; give a name that ends in "
            ".npz for the loss of every row"
        )
    if config.threshold is not None and head.kind != "span":
        raise BadInput(f"threshold= is for span heads; this checkpoint's head is {head.kind}")
    model = checkpoint.model().to(ranks.device)
    with store.blamed():
        scores = score(model, assembler, head, ranks, config.system.precision, config.threshold)
    if ranks.rank != 0:
        return
    _say_truncated(checkpoint, assembler)
    labels = np.asarray(assembler.split.columns.get("label", ()))
    if head.kind == "classify" and (unseen := int((labels == UNSEEN).sum())):
        say(
            f"{unseen:,} of {len(labels):,} rows are of classes that training has not: they "
            "count as wrong",
            error=True,
        )
    for metric, value in scores.metrics.items():
        say(f"{config.split} {metric} {value:.4f}")
    if config.out:
        result = {
            "checkpoint": name,
            "data": config.data,
            "split": config.split,
            "rows": assembler.split.rows,
            "metrics": scores.metrics,
        }
        write_text(Path(config.out), json.dumps(result, indent=1) + "\n")
    if config.predictions and _wants_arrays(config):
        write(Path(config.predictions), scores.predictions, store.key)
    elif config.predictions and head.kind == "span":
        answers = spans.predictions(scores.outputs, assembler.split, config.threshold)
        write_text(Path(config.predictions), json.dumps(answers, ensure_ascii=False) + "\n")
    elif config.predictions:
        lines = predict.predictions(head, scores.outputs, assembler.split)
        write_text(Path(config.predictions), lines)


def _wants_arrays(config: EvaluateConfig) -> bool:
    return config.predictions is not None and config.predictions.lower().endswith(".npz")


def _say_truncated(checkpoint: Checkpoint, assembler: Assembler) -> None:
    """Say on standard error how many rows lose tokens."""
    limit = f"the checkpoint's batch.max_tokens={assembler.max_tokens}"
    if note := assembler.truncation(limit, checkpoint.config.max_positions):
        say(note, error=True)


def _predict_file(
    checkpoint: Checkpoint, config: EvaluateConfig, ranks: Ranks, read: Read | None
) -> None:
    head, precision = checkpoint.head, config.system.precision
    if head is None or head.kind == "mlm":
        raise BadInput("input= needs a checkpoint with a class, score, span or tag head")
    if config.threshold is not None and head.kind != "span":
        raise BadInput(f"threshold= is for span heads; this checkpoint's head is {head.kind}")
    if read is None:
        raise ValueError("input= needs `read`, the readers of raw rows")
    with TemporaryDirectory(prefix="xformer-") as directory:
        store, tokenizer = Path(directory) / "rows", checkpoint.source or checkpoint.tokenizer
        read(Path(str(config.input)), asdict(head), tokenizer, store)
        split = open_store(store).split("input")
        assembler = Assembler(split, checkpoint.tokenizer, head.max_tokens, checkpoint.mapping)
        _say_truncated(checkpoint, assembler)
        outputs = predict.outputs(checkpoint, assembler, ranks, precision)
        lines = predict.predictions(head, outputs, split, config.threshold)
    if config.out:
        write_text(Path(config.out), lines)
    else:
        put(lines)

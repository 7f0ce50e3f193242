"""Predictions without a store: fill the masks of a text, predict raw rows of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from xformer import metrics
from xformer.checkpoint import Checkpoint, Head
from xformer.data.batch import Assembler, Batch, chunks
from xformer.data.errors import BadInput, say
from xformer.data.store import Ragged, Split
from xformer.distributed import ALONE, Ranks
from xformer.model.encoder import to_device


def fill_mask(checkpoint: Checkpoint, text: str, top: int, ranks: Ranks = ALONE,
              precision: str = "fp32") -> list[list[tuple[float, str]]]:  # fmt: skip
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


def predict_rows(checkpoint: Checkpoint, texts: list[list[str]], ranks: Ranks = ALONE,
                 precision: str = "fp32") -> np.ndarray:  # fmt: skip
    """Outputs (N, K) for raw rows of one or two texts each: probabilities, or (N, 1) scores.

    Raises Failure that names the rows where they are not finite.
    """
    head = checkpoint.head
    assert head is not None
    source = checkpoint.source or checkpoint.tokenizer
    columns: dict[str, Ragged | np.ndarray] = {}
    for name, column in zip(("tokens", "tokens_b"), zip(*texts, strict=True), strict=False):
        column = tuple(_prepared(text, head.columns or {}) for text in column)
        encoded = source.encode_batch(column)
        offsets = np.concatenate([[0], np.cumsum([len(e) for e in encoded])])
        columns[name] = Ragged(np.concatenate(encoded), offsets)
    split = Split("input", len(texts), 0, columns)
    assembler = Assembler(split, checkpoint.tokenizer, head.max_tokens, checkpoint.mapping)
    model = checkpoint.model().to(ranks.device)
    outputs = np.zeros((len(texts), head.outputs), np.float32)
    with torch.no_grad(), ranks.autocast(precision):
        for part in chunks(assembler, len(texts)):
            batch = assembler.batch(part)
            logits = model.logits(to_device(batch, ranks.device))
            outputs[batch.rows] = logits.float().cpu().numpy()
    metrics.check_finite(outputs, "the input: outputs")
    return probabilities(outputs) if head.kind == "classify" else outputs


def _prepared(text: str, columns: dict[str, Any]) -> str:
    """A raw text as its task's rows were prepared: capital letters, both ends of a long one."""
    if columns.get("uppercase"):
        text = text.strip().upper()
    longest = columns.get("longest")
    if longest and len(text) > longest:
        head = -(-longest // 2)
        return text[:head] + text[head - longest :]
    return text


def read_texts(path: Path) -> list[str]:
    """The lines of a file. Raises BadInput where it is absent, empty or not UTF-8."""
    try:
        content = path.read_bytes()
        lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; give a file of rows") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}:{line} is not UTF-8") from None
    if not any(lines):
        raise BadInput(f"{path} is empty")
    return lines[:-1] if lines[-1] == "" else lines


def read_rows(path: Path, head: Head) -> list[list[str]]:
    """The raw texts of a tab-separated file, one or two a row.

    The columns are those the task was made from where a header names them (of sequences also
    `sequence`, as FASTA names no columns); else the file must have exactly as many columns as
    there are texts. Raises BadInput naming file and line.
    """
    wanted = 2 if head.pair else 1
    if path.suffix.lower() == ".csv":
        raise BadInput(f"{path}: rows to predict are separated by tabs; give a .tsv file")
    columns = head.columns or {}
    names = [str(columns.get("text")), str(columns.get("text_b"))][:wanted]
    rows = [(i, line.split("\t")) for i, line in enumerate(read_texts(path), 1)]
    rows = [(i, row) for i, row in rows if row != [""]]  # as the task's rows were read
    header = [name.strip() for name in rows[0][1]]
    letters = bool(columns.get("uppercase"))
    if letters and names[0] not in header and "sequence" in header:
        names = ["sequence"]
    named = set(names) <= set(header)
    if not named and len(header) != wanted:
        raise BadInput(
            f"{path}:1: its header lacks the column {' or '.join(names)}; without a header each "
            f"row must hold just {wanted} column{'s' * (wanted > 1)}, this one has {len(header)}"
        )
    if not named and not names[0].isdigit() and not letters:
        say(f"{path} has no header {' '.join(names)!r}: line 1 is a row too", error=True)
    where = [header.index(name) for name in names] if named else list(range(wanted))
    texts = []
    for number, row in rows[1:] if named else rows:
        if len(row) <= max(where):
            raise BadInput(f"{path}:{number} has {len(row)} columns; {max(where) + 1} are needed")
        texts.append([row[i] for i in where])
    if not texts:
        raise BadInput(f"{path} has a header and no row")
    return texts


def probabilities(logits: np.ndarray) -> np.ndarray:
    """softmax over the last axis, (N, K)."""
    exponent = np.exp(logits - logits.max(1, keepdims=True))
    return exponent / exponent.sum(1, keepdims=True)


def as_lines(head: Head, outputs: np.ndarray, inputs: list[list[str]], title: str = "input") -> str:
    """A tab-separated table: the label and its probability, or the score, and the input."""
    lines = [f"label\tprobability\t{title}" if head.kind == "classify" else f"score\t{title}"]
    for output, texts in zip(outputs, inputs, strict=True):
        shown = [f"{output[0]:.4f}"]
        if head.kind == "classify":
            shown = [head.labels[int(output.argmax())], f"{output.max():.4f}"]
        lines.append("\t".join([*shown, *texts]))
    return "\n".join(lines) + "\n"

"""An artificial language whose best possible loss is known, and a labelled task in it.

Three dialects share the same 32 words. In each dialect every word has a successor, which follows it
with probability 0.85. Otherwise a random word follows. A model that knows all successors can infer
the dialect from the rest of the passage, and then guess a masked word from its neighbours.

    DIR/vocab.txt                  the words, as BERT's vocabulary
    DIR/text.txt, text.valid.txt   passages for pre-training, one per paragraph
    DIR/task/{train,valid,test}.tsv    `passage<TAB>dialect`: other passages, labelled
    DIR/best.json                  the best possible loss and accuracy on text.valid.txt

The files are the same on every machine and with every version of Python and numpy, because all
choices are integers from xformer.data.hashing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from xformer.data import masking
from xformer.data.display import say
from xformer.data.files import atomic_directory
from xformer.data.hashing import hash_each, key
from xformer.data.outputs import check_directory

from ..arguments import add_output

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = [first + vowel for first in "bdgklmst" for vowel in "aeio"]
W = len(WORDS)
DIALECTS = ("north", "south", "east")
LENGTHS = (12, 20)  # words in a passage: the least and the most
FOLLOWS = 0.85  # the probability that a word's successor follows it
MASKING = 0.15  # for best.json: the share of the words to predict, as in BERT
SIZES = {"text": 24_000, "text.valid": 400, "train": 800, "valid": 400, "test": 400}
SEED = 2019


def successors() -> np.ndarray:
    """The word that follows each word in each dialect, (3, 32)."""
    of_each = (hash_each(key(SEED, k), np.arange(W)) for k in range(len(DIALECTS)))
    return np.stack([np.argsort(numbers) for numbers in of_each])


def passages(name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The passages of a file, each an array of words, and the dialect of each."""
    number, (least, most) = SIZES[name], LENGTHS
    draws = hash_each(key(SEED, 100 + list(SIZES).index(name)), np.arange(number * (most + 1) * 2))
    draws = (draws >> np.uint64(33)).astype(np.int64).reshape(2, most + 1, number)
    lengths = least + draws[0, -1] % (most - least + 1)
    dialect = np.arange(number) % len(DIALECTS)
    follows, table = draws[0] < FOLLOWS * 2**31, successors()
    words = draws[1] % W  # any word, until it is replaced by a successor
    for t in range(1, most):
        words[t] = np.where(follows[t], table[dialect, words[t - 1]], words[t])
    return [words[:n, row] for row, n in enumerate(lengths)], dialect


# --------------------------------------------------------------------------- what can be known


def best(rows: list[np.ndarray]) -> dict[str, float]:
    """Loss in nats and accuracy of the best possible predictions of masked words.

    The words are masked as in training. Each prediction is the exact posterior over words, from the
    forward-backward algorithm (Rabiner 1989) in each dialect, weighted by how well the dialect
    explains the rest of the passage.
    """
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    true, seen = np.concatenate(rows), np.concatenate(rows).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    row_keys = masking.row_keys(SEED, np.zeros(len(rows), np.int64), np.arange(len(rows)))
    special, ordinary = np.zeros(W + 1, bool), np.arange(W, dtype=np.int32)
    places, _ = masking.mask(seen, positions, row_keys, lengths, special, W, ordinary, MASKING)
    posterior = np.empty((len(true), W))
    for n in np.unique(lengths):
        where = starts[:-1][lengths == n][:, None] + np.arange(n)  # (N, n)
        posterior[where] = _posterior(seen[where])
    posterior = posterior[places]
    chances = posterior[np.arange(len(places)), true[places]]
    return {
        "loss": float(-np.log(chances).mean()),
        "accuracy": float((posterior.argmax(1) == true[places]).mean()),
    }


def _posterior(seen: np.ndarray) -> np.ndarray:
    """The probability of each word at each place, (N, n, W), given that the place was chosen for
    prediction.

    `seen` (N, n) are the words of N passages after masking; W is the mask.
    """
    same = seen[..., None] == np.arange(W)  # (N, n, W)
    masked = (seen == W)[..., None]
    chosen = 0.8 * masked + 0.1 * same + 0.1 / W * ~masked
    any_place = MASKING * chosen + (1 - MASKING) * same
    N, n = seen.shape
    log_weights = np.empty((len(DIALECTS), N, n, W))
    for k, table in enumerate(successors()):
        before = np.full((N, n, W), 1.0 / W)  # P(word, seen words before it), scaled
        after = np.ones((N, n, W))  # P(seen words after it | word), scaled
        scale_before, scale_after = np.zeros((N, n)), np.zeros((N, n))
        comes_from = np.argsort(table)
        for t in range(1, n):
            known = before[:, t - 1] * any_place[:, t - 1]
            step = FOLLOWS * known[:, comes_from] + (1 - FOLLOWS) / W * known.sum(1, keepdims=True)
            total = step.sum(1, keepdims=True)
            before[:, t] = step / total
            scale_before[:, t] = scale_before[:, t - 1] + np.log(total[:, 0])
        for t in range(n - 2, -1, -1):
            known = after[:, t + 1] * any_place[:, t + 1]
            step = FOLLOWS * known[:, table] + (1 - FOLLOWS) / W * known.sum(1, keepdims=True)
            total = step.sum(1, keepdims=True)
            after[:, t] = step / total
            scale_after[:, t] = scale_after[:, t + 1] + np.log(total[:, 0])
        scale = (scale_before + scale_after)[..., None]
        log_weights[k] = np.log(before * after * chosen) + scale
    weights = np.exp(log_weights - log_weights.max((0, 3))[None, ..., None]).sum(0)
    return weights / weights.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------- writing


def write(directory: Path) -> dict[str, float]:
    """Write the files into a directory and return what is in best.json."""
    (directory / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n", encoding="utf-8")
    for name in ("text", "text.valid"):
        texts = [" ".join(WORDS[word] for word in row) for row in passages(name)[0]]
        (directory / f"{name}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    (directory / "task").mkdir()
    for name in ("train", "valid", "test"):
        lines = ["passage\tdialect"]
        for row, dialect in zip(*passages(name), strict=True):
            lines.append(f"{' '.join(WORDS[word] for word in row)}\t{DIALECTS[dialect]}")
        text = "\n".join(lines) + "\n"
        (directory / "task" / f"{name}.tsv").write_text(text, encoding="utf-8")
    reached = best(passages("text.valid")[0])
    content = json.dumps({"masking": MASKING, **reached}, indent=1) + "\n"
    (directory / "best.json").write_text(content, encoding="utf-8")
    return reached


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dialects`."""
    add_output(parser, "DIR")


def run(arguments: argparse.Namespace) -> None:
    """Write the text and the task."""
    check_directory(arguments.output, arguments.overwrite, ("best.json",))
    started = time.monotonic()
    with atomic_directory(arguments.output, arguments.overwrite) as directory:
        reached = write(directory)
    say(
        f"{arguments.output}: {SIZES['text']:,} passages; the best possible loss is "
        f"{reached['loss']:.3f} nats, the best accuracy {reached['accuracy']:.3f}, "
        f"{time.monotonic() - started:.1f} s"
    )

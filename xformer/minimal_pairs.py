"""Minimal pairs: does a masked language model prefer the acceptable sentence of each pair?

    {"sentence_good": "The cats sleep.", "sentence_bad": "The cats sleeps.",
     "UID": "a paradigm", "linguistics_term": "its phenomenon"}

Each line of a file has this form, as in BLiMP (Warstadt et al. 2020). The score of a sentence is
its pseudo-log-likelihood (PLL): each token is masked in turn, and the log-probabilities of the true
tokens are added up. There are two variants:

    original   one token is masked at a time (Salazar et al. 2020)
    word-l2r   the tokens that follow in the same word are masked too, so that no piece of a rare
               word is predicted from the rest of the word (Kauf & Ivanova 2023)

A pair is correct if the acceptable sentence has the higher score. A tie counts as wrong.

S sentences, L tokens of a sentence without special tokens, N masked copies in a batch.
"""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.checkpoint import Checkpoint
from xformer.data.batch import CHUNK, Batch
from xformer.data.display import Progress, one_line, say
from xformer.data.errors import BadInput
from xformer.data.tokenizers import Tokenizer
from xformer.parallel.compiled import not_compiled
from xformer.parallel.feed import made_ahead
from xformer.parallel.processes import Ranks
from xformer.tasks.task import Model, check_finite, to_device

PLL = Literal["word-l2r", "original"]
# BLiMP's files call the phenomenon of two paradigms s-selection; its paper counts them as argument
# structure.
RENAMED = {"s-selection": "argument_structure"}
Accuracies = dict[str, dict[str, float]]  # name -> {"pairs": ..., "accuracy": ...}


@dataclass(frozen=True)
class Pair:
    """An acceptable sentence and its minimally different, unacceptable twin."""

    good: str
    bad: str
    paradigm: str
    phenomenon: str


@dataclass(frozen=True)
class PairScores:
    """The PLL of both sentences of each pair, (number of pairs,) float64 each."""

    pairs: Sequence[Pair]
    good: np.ndarray
    bad: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        """Whether the acceptable sentence of each pair has the higher score."""
        return self.good > self.bad

    @property
    def ties(self) -> int:
        """How many pairs have two equal scores."""
        return int((self.good == self.bad).sum())

    @property
    def accuracy(self) -> float:
        """The share of correct pairs. If all paradigms have equally many pairs, as in BLiMP, it is
        also the mean over paradigms."""
        return float(self.correct.mean())

    def by(self, what: Literal["phenomenon", "paradigm"]) -> Accuracies:
        """The number of pairs and the accuracy of each phenomenon or paradigm, sorted by name."""
        names = np.array([getattr(pair, what) for pair in self.pairs])
        each = {str(name): self.correct[names == name] for name in np.unique(names)}
        return {
            name: {"pairs": len(some), "accuracy": float(some.mean())}
            for name, some in each.items()
        }

    def table(self) -> list[tuple[str, str, int, float]]:
        """Rows (phenomenon, paradigm, pairs, accuracy). Each phenomenon has a row with an empty
        paradigm, followed by the rows of its paradigms."""
        rows = []
        for phenomenon, whole in self.by("phenomenon").items():
            rows.append((phenomenon, "", int(whole["pairs"]), whole["accuracy"]))
            inside = [i for i, pair in enumerate(self.pairs) if pair.phenomenon == phenomenon]
            pairs = [self.pairs[i] for i in inside]
            of_phenomenon = PairScores(pairs, self.good[inside], self.bad[inside])
            for name, part in of_phenomenon.by("paradigm").items():
                rows.append((phenomenon, name, int(part["pairs"]), part["accuracy"]))
        return rows

    def summary(self) -> dict[str, Any]:
        """The accuracies as a value for JSON."""
        return {
            "pairs": len(self.pairs),
            "ties": self.ties,
            "accuracy": self.accuracy,
            "phenomena": self.by("phenomenon"),
            "paradigms": self.by("paradigm"),
        }

    def columns(self) -> dict[str, list[str]]:
        """A table with a line for each pair."""
        return {
            "paradigm": [pair.paradigm for pair in self.pairs],
            "phenomenon": [pair.phenomenon for pair in self.pairs],
            "good": [pair.good for pair in self.pairs],
            "bad": [pair.bad for pair in self.pairs],
            "pll_good": [f"{score:.6f}" for score in self.good],
            "pll_bad": [f"{score:.6f}" for score in self.bad],
            "correct": [str(int(correct)) for correct in self.correct],
        }


# -------------------------------------------------------------------------------------- reading


def read_pairs(path: str | Path, per_paradigm: int = 0) -> list[Pair]:
    """The pairs of a file of JSON lines, or of all such files (.jsonl) in a zip archive or in a
    directory and its subdirectories. With `per_paradigm`, only the first pairs of each paradigm,
    this many.

    Raises BadInput if a file cannot be read, if a line is not a pair, or if there are no pairs.
    """
    pairs: list[Pair] = []
    seen: Counter[str] = Counter()
    for name, text in _files(Path(path)):
        # not `splitlines`, because a text may contain the Unicode line separator U+2028
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                pair = _pair(line, Path(name).stem, f"{name}, line {number}")
                seen[pair.paradigm] += 1
                if not per_paradigm or seen[pair.paradigm] <= per_paradigm:
                    pairs.append(pair)
    if not pairs:
        raise BadInput(
            f"{path} holds no pairs; give a .jsonl file, or a directory or zip archive of them"
        )
    return pairs


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each file of pairs, sorted by name."""
    try:
        if path.is_dir():
            below = [file for file in path.rglob("*.jsonl") if "__MACOSX" not in file.parts]
            if not below:
                raise BadInput(
                    f"{path} holds no .jsonl file, nor do its subdirectories; give the directory "
                    "to which BLiMP.zip was unpacked, or the archive itself"
                )
            for file in sorted(below):
                yield str(file), file.read_text(encoding="utf-8-sig")
        elif path.suffix == ".zip" or zipfile.is_zipfile(path):
            yield from _unpacked(path)
        else:
            yield str(path), path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text in UTF-8 ({error.reason})") from None


def _unpacked(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the content of each file of pairs in a zip archive, sorted by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [name for name in archive.namelist() if name.endswith(".jsonl")]
            for name in sorted(name for name in inside if not name.startswith("__MACOSX")):
                yield f"{path}/{name}", archive.read(name).decode("utf-8-sig")
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError):
        raise BadInput(
            f"{path} is a damaged, incomplete or encrypted zip archive; get it again"
        ) from None


def _pair(line: str, paradigm: str, where: str) -> Pair:
    """The pair in a line of a file. `paradigm` is its paradigm if the line names none."""
    try:
        value = json.loads(line)
        good, bad = value["sentence_good"], value["sentence_bad"]
        f"{good}{bad}".encode()  # half of a surrogate pair raises ValueError
    except (ValueError, RecursionError, KeyError, TypeError):
        good = bad = None
    if not (isinstance(good, str) and isinstance(bad, str) and good.strip() and bad.strip()):
        raise BadInput(f"{where}: not JSON with two texts, sentence_good and sentence_bad")
    paradigm = value.get("UID", paradigm)
    phenomenon = value.get("linguistics_term", paradigm)
    if not (isinstance(paradigm, str) and isinstance(phenomenon, str)):
        raise BadInput(f"{where}: UID and linguistics_term must be texts")
    return Pair(good, bad, paradigm, RENAMED.get(phenomenon, phenomenon))


# -------------------------------------------------------------------------------------- scoring


def score_pairs(
    checkpoint: Checkpoint,
    pairs: Sequence[Pair],
    pll: PLL,
    ranks: Ranks,
    precision: str,
    tokenizer: Tokenizer | None = None,
) -> PairScores:
    """The scores of both sentences of each pair. If a `tokenizer` is given, its ids are used as
    the model's ids.

    Raises BadInput, as `sentences_of` does, if the checkpoint cannot score these sentences.
    """
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    blocks, place = sentences_of(checkpoint, texts, pll, tokenizer)
    scores = pseudo_log_likelihoods(checkpoint, blocks, ranks, precision)[place]
    return PairScores(pairs, scores[::2], scores[1::2])


@dataclass(frozen=True)
class Sentences:
    """Different sentences of the same length, with special tokens at both ends.

    Tokens with the same number in `words` (S, L) are pieces of one word. `mask` is the id of the
    mask token.
    """

    tokens: np.ndarray  # (S, L + 2) int32
    words: np.ndarray  # (S, L) int32
    mask: int

    @property
    def copies(self) -> int:
        """The number of masked copies: each token of each sentence is predicted from one."""
        return int(self.words.size)

    def masked(self, numbers: np.ndarray) -> Batch[np.ndarray]:
        """A batch of the masked copies with these numbers (N,). In copy L s + i of sentence s,
        token i is masked. The `places` of the batch are these tokens, one in each copy."""
        (_, L), N = self.words.shape, len(numbers)
        sentence, target = numbers // L, numbers % L  # (N,)
        tokens, words = self.tokens[sentence], self.words[sentence]  # copies of these rows
        first = target[:, None]  # (N, 1)
        same_word = words == np.take_along_axis(words, first, 1)
        hidden = same_word & (np.arange(L) >= first)  # (N, L)
        true = tokens[np.arange(N), 1 + target].astype(np.int64)
        tokens[:, 1:-1][hidden] = self.mask
        return Batch(
            tokens.ravel(),
            np.tile(np.arange(L + 2, dtype=np.int32), N),
            np.zeros(tokens.size, np.int32),
            np.arange(N + 1, dtype=np.int32) * np.int32(L + 2),
            L + 2,
            places=np.arange(N) * (L + 2) + 1 + target,
            targets=true,
        )


def sentences_of(
    checkpoint: Checkpoint, texts: Sequence[str], pll: PLL, tokenizer: Tokenizer | None
) -> tuple[list[Sentences], np.ndarray]:
    """Encode texts. Returns blocks of different sentences, the shortest first, and for each text
    the number of its sentence, (number of texts,). Sentences are numbered through all blocks.

    The ids of `tokenizer` are used as the model's ids. Without it, texts are read as in training.
    Raises BadInput if the checkpoint has no MLM head, if a sentence is too long, if most tokens are
    unknown, or if the tokenizer lacks the word boundaries that `pll` needs.
    """
    if checkpoint.task is None or not checkpoint.task.predicts_masked:
        raise BadInput("minimal pairs need a checkpoint with an MLM head; this one has none")
    reads = tokenizer or checkpoint.source or checkpoint.tokenizer
    encoded = _encoded(reads, texts, pll)
    _check_known(reads, [ids for ids, _ in encoded])
    _check_lengths(checkpoint, texts, encoded)
    if tokenizer is None and checkpoint.mapping is not None:
        encoded = [(checkpoint.mapping[ids], words) for ids, words in encoded]
    elif len(reads) > checkpoint.config.vocab_size:
        raise BadInput(
            f"the tokenizer has {len(reads):,} pieces, more than the model's "
            f"{checkpoint.config.vocab_size:,}; give one that has at most as many"
        )
    keys = [(ids.tobytes(), words.tobytes()) for ids, words in encoded]
    different = dict(zip(keys, encoded, strict=True))
    ordered = sorted(different, key=lambda key: len(different[key][0]))
    number = {key: i for i, key in enumerate(ordered)}
    special, blocks = checkpoint.tokenizer.special, []
    for _, block in groupby((different[key] for key in ordered), lambda pair: len(pair[0])):
        ids, words = (np.stack(column).astype(np.int32) for column in zip(*block, strict=True))
        cls, sep = (np.full((len(ids), 1), special[name], np.int32) for name in ("cls", "sep"))
        tokens = np.concatenate([cls, ids, sep], 1)
        blocks.append(Sentences(tokens, words, special["mask"]))
    return blocks, np.array([number[key] for key in keys])


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], pll: PLL
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each text and the number of each token's word. With pll=original every token is a
    word. Raises BadInput if there is no such `pll`, or if the tokenizer has no words."""
    if pll not in get_args(PLL):
        raise BadInput(f"pll={pll!r} must be one of {', '.join(get_args(PLL))}")
    if pll == "original":
        return [(ids, np.arange(len(ids))) for ids in tokenizer.encode_batch(texts)]
    try:
        return tokenizer.encode_with_words(texts)
    except BadInput as error:
        raise BadInput(
            f"pll=word-l2r needs words, but {error}; give pll=original, or the tokenizer of the "
            "sentences' language as tokenizer="
        ) from None


def _check_known(tokenizer: Tokenizer, encoded: Sequence[np.ndarray]) -> None:
    """Raise BadInput if most tokens are unknown. If some are, say how many."""
    ids = np.concatenate(encoded)
    unknown = int((ids == tokenizer.special["unk"]).sum())
    line = f"{unknown:,} of the sentences' {len(ids):,} tokens are unknown to the tokenizer"
    if 2 * unknown > len(ids):
        raise BadInput(
            f"{line}; give the tokenizer of their language as tokenizer=, such as "
            "tokenizer=micro/english"
        )
    if unknown:
        say(line, error=True)


def _check_lengths(
    checkpoint: Checkpoint, texts: Sequence[str], encoded: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Raise BadInput if a sentence has no tokens, or too many for the model."""
    lengths = np.array([len(ids) for ids, _ in encoded])
    longest, most = int(lengths.argmax()), checkpoint.config.max_positions
    if not lengths.min():
        raise BadInput(f"the sentence {texts[int(lengths.argmin())]!r} has no tokens")
    if lengths[longest] + 2 > most:
        raise BadInput(
            f"the sentence {one_line(repr(texts[longest]), 80)} has {lengths[longest] + 2} tokens, "
            f"special tokens included, but the model takes {most}; leave it out"
        )


@torch.no_grad()
def pseudo_log_likelihoods(
    checkpoint: Checkpoint, blocks: Sequence[Sentences], ranks: Ranks, precision: str
) -> np.ndarray:
    """The PLL of every sentence of the blocks, (number of sentences,) float64.

    Masked copies of many sentences share a batch of about CHUNK tokens, without padding. Every rank
    computes a part of the batches, and all return the whole result. Raises Failure if a score is
    not finite.
    """
    model = checkpoint.model().to(ranks.device)
    ends = np.cumsum([0, *(block.copies for block in blocks)])
    total = int(ends[-1])
    # of the true token of each masked copy; 0 for the copies that other ranks compute
    log_probabilities = torch.zeros(total, dtype=torch.float64, device=ranks.device)
    parts = [
        (begin + first, block, np.arange(first, min(first + step, block.copies)))
        for begin, block in zip(ends[:-1].tolist(), blocks, strict=True)
        for step in [max(1, CHUNK // block.tokens.shape[1])]
        for first in range(0, block.copies, step)
    ]

    def batches(part: Any) -> tuple[int, Batch[Tensor]]:
        begin, block, copies = part
        return begin, to_device(block.masked(copies), ranks.device)

    mine = parts[ranks.rank :: ranks.world_size]
    tokens = sum(len(copies) * block.tokens.shape[1] for _, block, copies in mine)
    with Progress("scoring pairs", tokens, "tokens", active=ranks.rank == 0) as progress:
        for begin, batch in made_ahead(map(batches, mine), ranks.device):
            part = _log_probabilities(model, batch, ranks, precision)
            log_probabilities[begin : begin + len(part)] = part.double()
            progress.advance(len(batch.tokens))
    every = ranks.sum(log_probabilities).cpu().numpy()
    lengths = np.concatenate([np.full(len(b.words), b.words.shape[1]) for b in blocks])
    scores = np.add.reduceat(every, np.cumsum(lengths) - lengths)
    check_finite(scores, "the scores of the sentences")
    return scores


def _log_probabilities(model: Model, batch: Batch[Tensor], ranks: Ranks, precision: str) -> Tensor:
    """The log-probability of the true token at each masked place, (N,). The product with the
    vocabulary is always in fp32: logits in bf16 have a precision of about 0.05."""
    assert batch.targets is not None
    with ranks.autocast(precision), not_compiled():
        x = model.encoder(batch, places=batch.places)
    logits = model.mlm_head(x.float(), model.encoder.embeddings.word.weight)
    return -F.cross_entropy(logits, batch.targets, reduction="none")

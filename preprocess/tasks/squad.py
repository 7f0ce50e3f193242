"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018): rows of a question and a window of its context.

A context that does not fit beside its question is cut into windows that overlap, each a row; the
rows of a question are one `group`. The label is the first and the last token of the answer in the
window, both counted from 0 and included, or -1, -1 where the window does not hold the whole answer
(Devlin et al. 2019, section 4.2 and 4.3). Beside the rows lie two tables: `question` (id, number of
its context, all its answers as a JSON list, `null` where they are not known) and `context` (its
text, and the characters at which every token starts and ends), so that `xformer.data.spans.answer`
gives an answer back as the exact text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.data import tokenizers
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, origin
from ..arguments import check_output_directory as check_output
from ..arguments import say_written as summarise
from ..arguments import whole_number as number
from ..bad import BadRows
from ..binarize import check_files, sources

ABOUT = "SQuAD 1.1 and 2.0: questions and overlapping windows of their contexts."
BLOCK = 64  # contexts encoded at once
COLUMNS = {
    "tokens": "",
    "tokens_b": "",
    "label": "(2,)i4",
    "group": "int64",
    "window": "int32",  # where the row's window begins, in tokens of the context
    "question.id": "uint8",
    "question.context": "int64",
    "question.answers": "uint8",
    "context.text": "uint8",
    "context.starts": "int32",
    "context.ends": "int32",
}
RAGGED = [
    "tokens",
    "tokens_b",
    "question.id",
    "question.answers",
    "context.text",
    "context.starts",
    "context.ends",
]


class Question(NamedTuple):
    """One question: its answers (text, first character), none if it has none, None if unknown."""

    id: str
    text: str
    answers: list[tuple[str, int]] | None


@dataclass
class Counts:
    """What is told at the end."""

    questions: int = 0
    answerable: int = 0
    exact: int = 0  # answerable ones whose tokens give back the very text
    windows: int = 0
    articles: set[str] = field(default_factory=set)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task squad`."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        metavar="DIR",
        help="A directory that holds one file train*.json and one dev*.json (the split valid).",
    )
    for split in ("train", "valid", "test"):
        add(
            f"--{split}",
            type=Path,
            metavar="FILE",
            help=f"The file of the split {split} (default: what --input holds).",
        )
    add(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint.",
    )
    add(
        "--max-tokens",
        type=number(8),
        default=384,
        metavar="N",
        help="Tokens in a row at most, "
        "special ones included: train with batch.max_tokens=N (default: %(default)s).",
    )
    add(
        "--stride",
        type=number(1),
        default=128,
        metavar="N",
        help="Tokens from the beginning of a window to that of the next (default: %(default)s).",
    )
    add(
        "--max-question",
        type=number(1),
        default=64,
        metavar="N",
        help="Tokens of a question; longer ones are cut (default: %(default)s).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out questions that cannot be read, list and "
        "count them (default: the first one ends the command).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Encode SQuAD into a store."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    files = _files(arguments)
    tokenizer = tokenizers.load(arguments.tokenizer)
    extra = 2 + tokenizer.pair_separators
    room = arguments.max_tokens - arguments.max_question - extra
    if room < 1:
        raise BadInput(
            f"--max-tokens {arguments.max_tokens} leaves no room beside a question of "
            f"{arguments.max_question} tokens; raise it, or lower --max-question"
        )
    if arguments.stride > room:
        raise BadInput(
            f"--stride {arguments.stride} would leave gaps: beside a question of "
            f"{arguments.max_question} tokens a window may hold only {room}"
        )
    started = time.monotonic()
    bad = BadRows(arguments.skip_bad)
    with create_store(arguments.output, tokenizer, COLUMNS, RAGGED, arguments.overwrite) as store:
        counts = {}
        for name, path in files.items():
            paragraphs = list(read_articles(path, bad, name == "train"))
            if not any(questions for *_, questions in paragraphs):
                bad.report()
                raise BadInput(f"{path} holds no question that can be used")
            with store.split(name) as split:
                counts[name] = Writer(split, tokenizer, arguments, bad).write(paragraphs)
        options = {key: getattr(arguments, key) for key in ("max_tokens", "stride", "max_question")}
        columns = {
            "text": "question",
            "text_b": "context",
            "label": "answers",
            "task": "squad",
            "options": options,
        }
        record = origin() | {
            "sources": sources([*files.values()]),
            "columns": columns,
            "squad": options,
        }
        store.finish("span", [], "f1", record | bad.as_origin())
        written = store.splits
    bad.report()
    for name, found in counts.items():
        say(
            f"{name}: {len(found.articles):,} articles, {found.questions:,} questions, "
            f"{found.questions - found.answerable:,} without an answer, {found.answerable:,} with "
            f"one, of which tokens give {found.exact:,} back exactly"
        )
    summarise(arguments.output, written, started, sum(p.stat().st_size for p in files.values()))


def _files(arguments: argparse.Namespace) -> dict[str, Path]:
    found = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    directory: Path | None = arguments.input
    if directory is not None and not directory.is_dir():
        raise BadInput(f"{directory} is no directory; give one, or --train FILE")
    for name, pattern in (("train", "train*.json"), ("valid", "dev*.json")):
        if directory is not None and found[name] is None:
            there = sorted(directory.glob(pattern))
            if len(there) != 1:
                names = ", ".join(path.name for path in there) or "nothing"
                raise BadInput(f"{directory} holds {names} as {pattern}; give --{name} FILE")
            found[name] = there[0]
    files = {name: path for name, path in found.items() if path is not None}
    if not files:
        raise BadInput("give --input DIR, or --train, --valid or --test FILE")
    check_files(files.values())
    return files


def read_articles(
    path: Path, bad: BadRows, training: bool
) -> Iterator[tuple[str, str, list[Question]]]:
    """(title, context, its questions) of every paragraph. A bad question is named by its number,
    counted from 1; in `training` one without a word about its answers is bad. Raises
    BadInput where the file is not of SQuAD's form."""
    data = read_json(path)
    try:
        paragraphs = [
            (str(article["title"]), paragraph)
            for article in data["data"]
            for paragraph in article["paragraphs"]
        ]
        ids: set[str] = set()
        count = 0
        for title, paragraph in paragraphs:
            context, questions = paragraph["context"], []
            for qa in paragraph["qas"]:
                count += 1
                question, reason = _question(qa, context, ids)
                if training and question.answers is None:
                    reason = f"{question.id}: there are no 'answers' to train on"
                if reason:
                    bad(path, count, reason)
                else:
                    questions.append(question)
            yield title, context, questions
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is not of SQuAD's form (data, paragraphs, qas): {error!r}"
        ) from None


def is_squad(data: Any) -> bool:
    """Whether a JSON value is of SQuAD's form: an object with a list of articles."""
    return isinstance(data, dict) and isinstance(data.get("data"), list)


def _question(qa: dict[str, Any], context: str, ids: set[str]) -> tuple[Question, str]:
    """A question, and what is wrong with it."""
    answers = qa.get("answers")
    if qa.get("is_impossible"):
        answers = []
    found = None if answers is None else [(a["text"], int(a["answer_start"])) for a in answers]
    question = Question(str(qa["id"]), qa["question"], found)
    if question.id in ids:
        return question, f"an earlier question has the id {question.id!r} too"
    ids.add(question.id)
    for text, start in found or []:
        there = context[start : start + len(text)] if start >= 0 else ""
        if not text or there != text:
            return question, f"{question.id}: the context has {there!r} at {start}, not {text!r}"
    return question, ""


def token_span(starts: np.ndarray, ends: np.ndarray, first: int, end: int) -> tuple[int, int]:
    """The first and last token, both included, that overlap the characters `first` to `end` (not
    included); -1, -1 where none does. `starts`, `ends`: each token's characters, (n,)."""
    inside = np.flatnonzero((ends > first) & (starts < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


class Writer:
    """Writes one split."""

    def __init__(
        self, split: SplitWriter, tokenizer: Tokenizer, arguments: argparse.Namespace, bad: BadRows
    ):
        self.split, self.tokenizer, self.arguments, self.bad = split, tokenizer, arguments, bad
        self.counts = Counts()
        self.contexts = 0

    def write(self, paragraphs: list[tuple[str, str, list[Question]]]) -> Counts:
        """Write the rows of all questions: (title, context, its questions) of every paragraph."""
        with Progress(
            f"encoding {self.split.directory.name}", len(paragraphs), "contexts"
        ) as shown:
            for start in range(0, len(paragraphs), BLOCK):
                block = paragraphs[start : start + BLOCK]
                self._block(block)
                shown.advance(len(block))
        return self.counts

    def _block(self, block: list[tuple[str, str, list[Question]]]) -> None:
        contexts = self.tokenizer.encode_with_offsets([context for _, context, _ in block])
        questions = self.tokenizer.encode_batch([q.text for *_, asked in block for q in asked])
        encoded = iter(questions)
        for (title, text, asked), (ids, starts, ends) in zip(block, contexts, strict=True):
            self.counts.articles.add(title)
            for question in asked:
                span = (-1, -1)
                if question.answers:
                    answer, first = question.answers[0]
                    span = token_span(starts, ends, first, first + len(answer))
                    self.counts.answerable += 1
                    given = text[starts[span[0]] : ends[span[1]]] if span[0] >= 0 else ""
                    self.counts.exact += given == answer
                self._windows(next(encoded)[: self.arguments.max_question], ids, span)
                self.counts.questions += 1
            self.split.append_texts("question.id", [q.id for q in asked])
            if "question.input" in self.split.offsets:
                self.split.append_texts("question.input", [q.text for q in asked])
            self.split.append("question.context", np.full(len(asked), self.contexts))
            self.split.append_texts("question.answers", [_answers(q) for q in asked])
            self.split.append_texts("context.text", [text])
            for name, values in (("starts", starts), ("ends", ends)):
                self.split.append_ragged(f"context.{name}", values, np.array([len(values)]))
            self.contexts += 1

    def _windows(self, question: np.ndarray, context: np.ndarray, span: tuple[int, int]) -> None:
        extra = 2 + self.tokenizer.pair_separators
        room = self.arguments.max_tokens - len(question) - extra
        last = max(len(context) - room, 0)  # the last window needs to begin no later
        starts = np.arange(0, last + self.arguments.stride, self.arguments.stride)
        windows = [context[start : start + room] for start in starts]
        inside = (span[0] >= starts) & (span[1] < starts + room) & (span[0] >= 0)
        label = np.where(inside[:, None], np.array(span) - starts[:, None], -1)
        n = len(starts)
        self.split.append_ragged("tokens", np.tile(question, n), np.full(n, len(question)))
        lengths = np.array([len(window) for window in windows])
        self.split.append_ragged("tokens_b", np.concatenate(windows), lengths)
        self.split.append("label", label)
        self.split.append("group", np.full(n, self.counts.questions))
        self.split.append("window", starts)
        self.counts.windows += n


def _answers(question: Question) -> str:
    if question.answers is None:
        return "null"
    return json.dumps([text for text, _ in question.answers], ensure_ascii=False)

"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018): rows of a question and a window of its context.

A context that is too long for one row is cut into overlapping windows, each of which is a row. The
rows of a question are one `group`. The label is the first and the last token of the answer within
the window, counted from 0, or -1, -1 if the window does not hold the whole answer (Devlin et al.
2019, sections 4.2 and 4.3).

The store has two more tables. `question` holds its id, the number of its context, and its answers
as a JSON list (`null` if they are not known). `context` holds its text, and the characters at which
every token starts and ends; `xformer.tasks.span.answer` turns them into the exact text of an
answer.
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
from xformer.data.arguments import whole_number
from xformer.data.display import Progress, many, say
from xformer.data.errors import BadInput
from xformer.data.outputs import check_directory
from xformer.data.store import LONGEST_ANSWER, ORDER
from xformer.data.tokenizers import HALF, Tokenizer
from xformer.data.writing import SplitWriter, create_store

from ..arguments import add_output, add_tokenizer, command_origin, say_written
from ..bad import BadRows
from ..binarize import check_exists, check_files, read_lines, sources
from ..corpora.text import longest_row
from .drawing import SHARES, VALID_SHARE

ABOUT = "SQuAD 1.1 and 2.0: questions and overlapping windows of their contexts."
BLOCK = 64  # contexts encoded at once
LONGEST, STRIDE = 384, 128  # Devlin et al. 2019
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
    """One question. An answer is (text, its first character in the context)."""

    id: str
    text: str
    answers: list[tuple[str, int]] | None  # [] if it has no answer, None if that is not known


class WindowOptions(NamedTuple):
    """How contexts are cut into windows; see the options of the same names."""

    max_tokens: int
    stride: int
    max_question: int


Paragraph = tuple[str, str, list[Question]]  # title of the article, context, questions


@dataclass
class Counts:
    """What the command reports for a split at the end."""

    questions: int = 0
    answerable: int = 0
    exact: int = 0  # answerable questions whose tokens give back exactly the answer's text
    cut: int = 0  # questions that are longer than --max-question
    lost: int = 0  # answerable questions whose answer is in no window
    long: int = 0  # answerable questions whose answer has more than LONGEST_ANSWER tokens
    articles: set[str] = field(default_factory=set)

    def warnings(self, max_question: int) -> Iterator[str]:
        """A line for each kind of question that is not read whole."""
        if self.cut:
            share = f"{self.cut:,} of the {self.questions:,} questions"
            yield f"{share} {'was' if self.cut == 1 else 'were'} cut to {max_question} tokens"
        if self.lost:
            share = f"{self.lost:,} of the {self.answerable:,} answers"
            verb = "is" if self.lost == 1 else "are"
            yield f"{share} {verb} in no window: no model can learn or find them"
        if self.long:
            share = f"{self.long:,} of the {self.answerable:,} answers"
            verb = "has" if self.long == 1 else "have"
            yield f"{share} {verb} more than {LONGEST_ANSWER} tokens, the most that is predicted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `task squad`."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        metavar="FILE|DIR",
        help="A directory that holds one file train*.json and one file dev*.json, which is the "
        "split valid. The articles of a single file are divided 90/5/5 into train, valid and test, "
        "or 90/10 if --test is given.",
    )
    for split in ("train", "valid", "test"):
        add(
            f"--{split}",
            type=Path,
            metavar="FILE",
            help=f"The file of the split {split} (default: "
            f"{'no such split' if split == 'test' else 'the one in the directory --input'}).",
        )
    add_tokenizer(parser)
    add(
        "--max-tokens",
        type=whole_number(8),
        metavar="N",
        help="The maximum row length in tokens, special tokens included. Train with "
        f"batch.max_tokens=N (default: {LONGEST}, or less if the tokenizer is a checkpoint whose "
        "model takes less).",
    )
    add(
        "--stride",
        type=whole_number(1),
        metavar="N",
        help="Tokens from the start of one window to the start of the next (default: "
        f"{STRIDE}, or half a window if the windows are shorter than that).",
    )
    add(
        "--max-question",
        type=whole_number(1),
        default=64,
        metavar="N",
        help="The maximum length of a question in tokens; longer ones are truncated (default: "
        "%(default)s).",
    )
    add(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="The seed of the random division of a single file (default: %(default)s).",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="Leave out questions that cannot be used (such as one whose answer is not in its "
        "context), and list and count them (default: stop at the first).",
    )
    add_output(parser, "STORE")


def run(arguments: argparse.Namespace) -> None:
    """Encode SQuAD into a store."""
    files = _files(arguments)
    check_directory(arguments.output, arguments.overwrite, ("store.json",), *files.values())
    tokenizer = tokenizers.load_tokenizer(arguments.tokenizer)
    options = _window_options(arguments, tokenizer)
    started = time.monotonic()
    with (
        BadRows(arguments.skip_bad) as bad,
        create_store(arguments.output, tokenizer, COLUMNS, RAGGED, arguments.overwrite) as store,
    ):
        counts = {}
        for name, paragraphs in _by_split(files, bad, arguments.seed).items():
            with store.split(name) as split:
                counts[name] = WindowWriter(split, tokenizer, options).write(paragraphs)
        columns = {
            "text": "question",
            "text_b": "context",
            "label": "answers",
            "task": "squad",
            "options": options._asdict(),
        }
        record = command_origin() | {
            "sources": sources([*files.values()]),
            **({"seed": arguments.seed} if "" in files else {}),
            "columns": columns,
            "squad": options._asdict(),
        }
        store.finish("span", [], "f1", record | bad.as_origin())
        written = store.splits
    for name, count in counts.items():
        say(
            f"{name}: {many(len(count.articles), 'article')}, {many(count.questions, 'question')}, "
            f"{count.questions - count.answerable:,} without an answer, {count.answerable:,} with "
            f"one; the tokens of {count.exact:,} answers reproduce the exact text"
        )
        for line in count.warnings(options.max_question):
            say(f"warning: {name}: {line}", error=True)
    say_written(arguments.output, written, started, sum(p.stat().st_size for p in files.values()))


def _window_options(arguments: argparse.Namespace, tokenizer: Tokenizer) -> WindowOptions:
    """The options of the windows, by default as far as the tokenizer's model allows. Raises
    BadInput if a window has no room, or if windows leave gaps."""
    most, max_question = arguments.max_tokens, arguments.max_question
    if most is None:
        most = min(LONGEST, longest_row(arguments.tokenizer) or LONGEST)
        max_question = min(max_question, most // 2)
        if most < LONGEST:
            rows = f"windows of {most} tokens, because the model of {arguments.tokenizer} takes no"
            say(f"{rows} more (--max-tokens changes this)", error=True)
    room = most - max_question - (2 + tokenizer.pair_separators)
    if room < 1:
        raise BadInput(
            f"--max-tokens {most} leaves no room beside a question of {max_question} tokens; raise "
            "it, or lower --max-question"
        )
    stride = arguments.stride or (STRIDE if room >= STRIDE else max(1, room // 2))
    if stride > room:
        raise BadInput(
            f"--stride {stride} would leave gaps: beside a question of {max_question} tokens a "
            f"window may hold only {room}; give --stride {max(1, room // 2)}"
        )
    return WindowOptions(most, stride, max_question)


def _by_split(files: dict[str, Path], bad: BadRows, seed: int) -> dict[str, list[Paragraph]]:
    """split -> its paragraphs. The articles of a file without a split are divided at random."""
    splits: dict[str, list[Paragraph]] = {}
    for name, path in files.items():
        paragraphs = list(read_articles(path, bad, name in ("", "train")))
        if not any(questions for *_, questions in paragraphs):
            raise BadInput(f"{path} holds no question that can be used")
        if name:
            splits[name] = paragraphs
        else:
            shares = {"valid": VALID_SHARE} if "test" in files else SHARES
            splits |= _divided(path, paragraphs, shares, seed)
    return {name: splits[name] for name in ORDER if name in splits}


def _divided(
    path: Path, paragraphs: list[Paragraph], shares: dict[str, float], seed: int
) -> dict[str, list[Paragraph]]:
    """split -> its paragraphs. Each split in `shares` gets this share of the articles, but at least
    one, and train gets the rest. If there are too few articles, the contexts are divided instead.
    Raises BadInput if there are too few of these as well."""
    usable = [paragraph for paragraph in paragraphs if paragraph[2]]
    units = [title for title, *_ in usable]
    if (articles := len(set(units))) <= len(shares):
        units = [context for _, context, _ in usable]
        if len(set(units)) <= len(shares):
            raise BadInput(
                f"{path} has too few contexts to divide ({len(set(units))}); give --train FILE and "
                "--valid FILE"
            )
        noun = "article" if articles == 1 else "articles"
        line = f"note: {path} has only {articles} {noun}, so its contexts are divided"
        say(f"{line}, not its articles", error=True)
    drawn = np.random.default_rng(seed).permutation(sorted(set(units))).tolist()
    split_of: dict[str, str] = {}
    for name, share in shares.items():
        count = max(1, round(share * (len(drawn) + len(split_of))))
        split_of |= dict.fromkeys(drawn[:count], name)
        drawn = drawn[count:]
    splits: dict[str, list[Paragraph]] = {}
    for unit, paragraph in zip(units, usable, strict=True):
        splits.setdefault(split_of.get(unit, "train"), []).append(paragraph)
    return splits


def _files(arguments: argparse.Namespace) -> dict[str, Path]:
    """split -> file, by the options or by the names in the directory --input. The split of a file
    --input is ""."""
    options = {name: getattr(arguments, name) for name in ("train", "valid", "test")}
    directory: Path | None = arguments.input
    if directory is not None and directory.is_file():
        if other := next((name for name in ("train", "valid") if options[name]), ""):
            raise BadInput(
                f"--{other} cannot be combined with --input {directory}, which is a file; give it "
                f"as --train {directory}"
            )
        options, directory = {"": directory, "test": options["test"]}, None
    if directory is not None:
        check_exists(directory)
    for name, pattern in (("train", "train*.json"), ("valid", "dev*.json")):
        if directory is not None and options[name] is None:
            matches = sorted(directory.glob(pattern))
            if len(matches) != 1:
                names = ", ".join(path.name for path in matches) or "no file"
                raise BadInput(
                    f"{directory} holds {names} matching {pattern}, but must hold one; give "
                    f"--{name} FILE"
                )
            options[name] = matches[0]
    files = {name: path for name, path in options.items() if path is not None}
    if not files:
        raise BadInput("give --input DIR, or --train, --valid or --test FILE")
    check_files(files.values())
    return files


def read_articles(path: Path, bad: BadRows, training: bool) -> Iterator[Paragraph]:
    """Yield (title of the article, context, questions) of every paragraph.

    Questions that cannot be used go to `bad`, with their number, counted from 1, in place of a line
    number. With `training`, questions whose answers are not known are among them. Raises BadInput
    if the file is not in SQuAD's form.
    """
    data = load(path)
    try:
        paragraphs = [
            (str(article.get("title", "")), paragraph)
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
                    reason = f"{question.id}: it has no 'answers' to train on"
                if reason:
                    bad(path, count, reason)
                else:
                    questions.append(question)
            if not _text_fault("context", context):
                yield title, context, questions
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadInput(
            f"{path} is not of SQuAD's form (data, paragraphs, qas): {error!r}"
        ) from None


def load(path: Path) -> Any:
    """The JSON value that a file holds, which may be compressed. Raises BadInput if it is not one
    value.
    """
    try:
        return json.loads("\n".join(line for _, line in read_lines(path)))
    except (ValueError, RecursionError) as error:
        if "Extra data" in str(error):
            raise BadInput(
                f"{path} has several JSON values, such as JSON lines; SQuAD's files are one object "
                "with a list `data` of articles, and their paragraphs and qas"
            ) from None
        raise BadInput(f"{path} is not valid JSON: {error}") from None


def is_squad(data: Any) -> bool:
    """Whether a JSON value is in SQuAD's form: an object with a list `data` of articles."""
    return isinstance(data, dict) and isinstance(data.get("data"), list)


def _question(qa: dict[str, Any], context: str, ids: set[str]) -> tuple[Question, str]:
    """A question, and what is wrong with it ("" if nothing is). Its id is added to `ids`, which
    holds the ids of earlier questions.
    """
    answers = [] if qa.get("is_impossible") else qa.get("answers")
    if answers is not None:
        answers = [(answer["text"], int(answer["answer_start"])) for answer in answers]
    question = Question(str(qa["id"]), qa["question"], answers)
    if question.id in ids:
        return question, f"an earlier question has the id {question.id!r} too"
    ids.add(question.id)
    for what, value in (("id", question.id), ("question", question.text), ("context", context)):
        if fault := _text_fault(what, value):
            return question, f"{question.id!r}: {fault}"
    for text, start in answers or []:
        actual = context[start : start + len(text)] if start >= 0 else ""
        if not text or actual != text:
            return question, f"{question.id}: the context has {actual!r} at {start}, not {text!r}"
    return question, ""


def _text_fault(what: str, value: Any) -> str:
    """Why a value of the file cannot be used as text; "" if it can."""
    if not isinstance(value, str):
        return f"the {what} is {str(value)[:40]!r}, which is not text"
    return f"the {what} holds half of a surrogate pair" if HALF.search(value) else ""


def token_span(starts: np.ndarray, ends: np.ndarray, first: int, end: int) -> tuple[int, int]:
    """The first and the last token that overlap a stretch of characters; -1, -1 if none does.

    The stretch goes from `first` up to, not including, `end`. `starts` (n,) is the first
    character of each token, and `ends` (n,) the one after its last character.
    """
    inside = np.flatnonzero((ends > first) & (starts < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


class WindowWriter:
    """Writes one split."""

    def __init__(self, split: SplitWriter, tokenizer: Tokenizer, options: WindowOptions):
        self.split, self.tokenizer, self.options = split, tokenizer, options
        self.counts = Counts()
        self.contexts = 0  # written so far

    def write(self, paragraphs: list[Paragraph]) -> Counts:
        """Write all paragraphs, as `read_articles` gives them."""
        label = f"encoding {self.split.directory.name}"
        with Progress(label, len(paragraphs), "contexts") as progress:
            for start in range(0, len(paragraphs), BLOCK):
                block = paragraphs[start : start + BLOCK]
                self._block(block)
                progress.advance(len(block))
        return self.counts

    def _block(self, block: list[Paragraph]) -> None:
        """Encode and write some paragraphs, all with one call of the tokenizer."""
        contexts = self.tokenizer.encode_with_offsets([context for _, context, _ in block])
        texts = [question.text for *_, questions in block for question in questions]
        encoded = iter(self.tokenizer.encode_batch(texts))
        for (title, text, questions), (ids, starts, ends) in zip(block, contexts, strict=True):
            self.counts.articles.add(title)
            unknown = ids == self.tokenizer.special["unk"]
            self.split.count_characters(len(text), int((ends - starts)[unknown].sum()))
            for question in questions:
                span = (-1, -1)
                if question.answers:
                    answer, first = question.answers[0]  # dev files give several
                    span = token_span(starts, ends, first, first + len(answer))
                    self.counts.answerable += 1
                    self.counts.long += span[1] - span[0] >= LONGEST_ANSWER
                    covered = text[starts[span[0]] : ends[span[1]]] if span[0] >= 0 else ""
                    self.counts.exact += covered == answer
                tokens = next(encoded)
                self.counts.cut += len(tokens) > self.options.max_question
                whole = self._windows(tokens[: self.options.max_question], ids, span)
                self.counts.lost += bool(question.answers) and not whole
                self.counts.questions += 1
            self.split.append_texts("question.id", [q.id for q in questions])
            if "question.input" in self.split.offsets:
                self.split.append_texts("question.input", [q.text for q in questions])
            self.split.append("question.context", np.full(len(questions), self.contexts))
            self.split.append_texts("question.answers", [_answers(q) for q in questions])
            self.split.append_texts("context.text", [text])
            for name, values in (("starts", starts), ("ends", ends)):
                self.split.append_ragged(f"context.{name}", values, np.array([len(values)]))
            self.contexts += 1

    def _windows(self, question: np.ndarray, context: np.ndarray, span: tuple[int, int]) -> bool:
        """Write the rows of a question, and return whether one of them holds the whole answer.
        `span` is the answer's first and last token in the context."""
        special = 2 + self.tokenizer.pair_separators
        room = self.options.max_tokens - len(question) - special
        last = max(len(context) - room, 0)  # a window that starts here reaches the context's end
        starts = np.arange(0, last + self.options.stride, self.options.stride)
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
        return bool(inside.any())


def _answers(question: Question) -> str:
    """A question's answers as JSON."""
    if question.answers is None:
        return "null"
    return json.dumps([text for text, _ in question.answers], ensure_ascii=False)

"""`tokenizer`: learn a vocabulary from raw text, or bring in a published one, as a directory."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from xformer.data import published, tokenizers, vocabularies
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory

from ..arguments import add_output, check_output_directory, expression, whole_number
from ..bad import BadRows
from ..corpora import inputs
from ..corpora.documents import TextOptions, read_documents


def learn(
    kind: str, paths: list[Path], vocab_size: int, lowercase: bool, options: TextOptions
) -> tokenizers.Tokenizer:
    """A vocabulary of `vocab_size` pieces from the files' documents, read as a stream.

    Raises BadInput for what cannot be read, for files without text, and where the text cannot
    give that many pieces.
    """
    total = sum(path.stat().st_size for path in paths)
    characters: set[str] = set()
    if kind == "wordpiece":  # without them its trainer's choice among equals is random
        with Progress("looking for characters", total, "B") as shown:
            for text, _ in read_documents(paths, options, shown.advance):
                characters.update(text)
    with Progress("reading", total, "B") as shown:
        return _Training(kind, paths, vocab_size, lowercase, characters, options, shown).result()


class _Training(threading.Thread):
    """Trains in a thread, so that Ctrl-C ends it at once: the libraries do not listen meanwhile."""

    def __init__(
        self,
        kind: str,
        paths: list[Path],
        vocab_size: int,
        lowercase: bool,
        characters: set[str],
        options: TextOptions,
        shown: Progress,
    ):
        super().__init__(daemon=True)
        self.paths, self.options, self.shown = paths, options, shown
        self.arguments = (kind, self._texts(), vocab_size, lowercase, characters)
        self.problems: list[Exception] = []  # in the order they arose: the first is the cause
        self.learned: tokenizers.Tokenizer | None = None
        self.stopped, self.parked = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.learned = vocabularies.train(*self.arguments)
        except Exception as error:
            self.problems.append(error)

    def _texts(self) -> Iterator[str]:
        """The files' texts; what goes wrong is kept, as the libraries that read them reword it."""
        found = False
        try:
            for text, _ in read_documents(self.paths, self.options, self.shown.advance):
                if self.stopped.is_set():
                    self.parked.set()
                    threading.Event().wait()  # for the end of the process
                if text and not text.isspace():
                    found = True
                    yield text
        except (BadInput, OSError) as error:
            self.problems.append(error)
        if not found:
            names = inputs.first_names(self.paths)
            self.problems.append(BadInput(f"{names}: there is no text in it"))

    def result(self) -> tokenizers.Tokenizer:
        self.start()
        try:
            while self.is_alive():
                self.join(0.1)
        except BaseException:
            self.stopped.set()
            self.parked.wait(0.5)  # a native thread that meets a dying interpreter aborts it
            raise
        if self.problems or self.learned is None:
            raise self.problems[0]
        return self.learned


def save(tokenizer: tokenizers.Tokenizer, output: Path, overwrite: bool) -> None:
    """Write the tokenizer's directory, whole or not at all."""
    with atomic_directory(output, overwrite) as directory:
        tokenizer.save(directory)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tokenizer`."""
    add = parser.add_argument
    add(
        "--kind",
        choices=tokenizers.KINDS,
        help="What to learn. wordpiece: BERT's; bpe: RoBERTa's "
        "byte-level pairs; unigram: SentencePiece; symbols: one id a character.",
    )
    add(
        "--input",
        nargs="+",
        metavar="FILE|DIR|GLOB",
        default=[],
        help="Raw text in UTF-8: files, "
        "directories (all their files with known endings), or quoted globs such as "
        "'text/**/*.txt'.",
    )
    inputs.add_arguments(parser)
    add(
        "--skip-lines",
        type=expression,
        metavar="REGEX",
        help="Leave out lines in which this "
        r"expression is found, such as '^\[\d+\]' for footnotes (default: none).",
    )
    add(
        "--vocab-size",
        type=whole_number(6),
        metavar="N",
        help="Pieces in the vocabulary, the five "
        "special tokens included; a small text may give fewer.",
    )
    add(
        "--from",
        type=Path,
        metavar="PATH",
        dest="source",
        help="Learn nothing: bring in a "
        "published vocabulary, either a Hugging Face directory or one of its files: BERT's "
        "vocab.txt, RoBERTa's or GPT-2's vocab.json beside merges.txt, ALBERT's spiece.model, or a "
        "tokenizer.json. A name may go before the file's, as in gpt2.vocab.json. GPT-2's gets "
        "RoBERTa's five special tokens at its end.",
    )
    add(
        "--cased",
        action="store_true",
        help="Keep upper case and accents in wordpiece (default: "
        "lower-cased; the other kinds are always cased). With --from it concerns BERT's and "
        "ALBERT's (which strips accents in any case) where no tokenizer_config.json and no "
        "tokenizer.json beside the file says do_lower_case.",
    )
    add(
        "--alphabet",
        metavar="LETTERS",
        help="The letters of a symbols tokenizer, in the order of "
        "their ids; then neither --input nor --vocab-size is needed.",
    )
    add_output(parser, "TOK")


def run(arguments: argparse.Namespace) -> None:
    """Learn a vocabulary, write down an alphabet, or bring in a published vocabulary."""
    kind, output = arguments.kind, arguments.output
    check_output_directory(
        output, arguments.overwrite, tokenizers.META, ("store.json", "config.json")
    )
    started = time.monotonic()
    note = ""
    if arguments.source is not None:
        for option in ("kind", "input", "vocab_size", "alphabet"):
            if getattr(arguments, option):
                raise BadInput(f"--{option.replace('_', '-')} is for learning; --from learns not")
        tokenizer = published.read(arguments.source, arguments.cased)
        note = _unreachable(tokenizer)
    elif kind is None:
        raise BadInput("--kind is required to learn a vocabulary, or --from to bring one in")
    elif arguments.alphabet is not None:
        if kind != "symbols":
            raise BadInput(f"--alphabet goes with --kind symbols, not {kind}")
        if arguments.input:
            raise BadInput("give either --alphabet or --input, not both")
        if len(set(arguments.alphabet)) < len(arguments.alphabet):
            raise BadInput(f"--alphabet {arguments.alphabet} holds a letter twice")
        tokenizer = vocabularies.symbols(arguments.alphabet)
    else:
        for option in ("input", "vocab_size"):
            if not getattr(arguments, option):
                raise BadInput(f"--{option.replace('_', '-')} is required for --kind {kind}")
        files = inputs.find_files(arguments.input, arguments.format)
        inputs.check_distinct({"--input": files})
        bad = BadRows(arguments.skip_bad)
        options = TextOptions(
            skip=arguments.skip_lines, format=arguments.format, json_field=arguments.field, bad=bad
        )
        tokenizer = learn(kind, files, arguments.vocab_size, not arguments.cased, options)
        bad.report()
        if kind != "symbols" and len(tokenizer) < arguments.vocab_size:
            note = " (the text holds no more)"
    save(tokenizer, output, arguments.overwrite)
    what = f"{tokenizer.kind} tokenizer of {len(tokenizer):,} pieces{note}"
    say(f"{output}: {what}, {time.monotonic() - started:.1f} s")


def _unreachable(tokenizer: tokenizers.Tokenizer) -> str:
    """A remark where a vocabulary of cased text is used on lower-cased text."""
    special = set(tokenizer.special.values())
    capitals = {
        i: piece.strip("#▁")
        for i, piece in enumerate(tokenizer.pieces)
        if re.search("[A-Z]", piece) and i not in special
    }
    used = {i for ids in tokenizer.encode_batch([*capitals.values()]) for i in ids.tolist()}
    if len(capitals) < 0.01 * len(tokenizer) or used & set(capitals):
        return ""
    return f" (lower-cased: the {len(capitals):,} with capitals are never used; see --cased)"

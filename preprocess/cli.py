"""The sub-commands of `preprocess.py`: their arguments, the checks before any work, the summary."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from preprocess import dna, pydocs, stats, synthetic, tasks, text, tsv, vocabulary
from preprocess.binarize import check_files
from xformer.data import tokenizers
from xformer.data.errors import BadInput, Interrupted
from xformer.data.files import refuse_existing, write_json
from xformer.data.store import open_store


class Reader(NamedTuple):
    """A task's format: its own options, how it is read, and one sentence about it."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    read: Callable[[argparse.Namespace], tasks.Task]
    about: str


TASKS = {
    "tsv": Reader(
        tsv.add_arguments, tsv.read, "Any delimited file with columns of text, label or score."
    ),
    "dna/splice": Reader(
        dna.add_arguments, dna.read, "The UCI splice-junction file: 60 letters, EI, IE or N."
    ),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line that suggests the nearest valid choice."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            valid = re.sub(r"'", "", wrong[2])
            near = get_close_matches(wrong[1], valid.split(", "), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            where = message[: wrong.start()].removeprefix("argument ")
            message = f"{where}{wrong[1]!r} is none of {valid}{hint}"
        elif wrong := re.match(r"unrecognized arguments: (\S+)", message):
            options = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(wrong[1].split("=")[0], options, 1, 0.5)
            message += f"; did you mean {near[0]}?" if near else f" (see {self.prog} --help)"
        raise BadInput(message)


def number(least: int, most: int = 2**62) -> Callable[[str], int]:
    """An argument type: a whole number between `least` and `most`, `_` and `,` allowed in it."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"{value} is not allowed; it must be {bound}")
        return value

    return parse


def expression(text: str) -> re.Pattern[str]:
    """An argument type: a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def main() -> None:
    """Parse the command line and do what it says. Raises BadInput, Failure, Interrupted."""
    signal.signal(signal.SIGTERM, _stop)
    parser = make_parser()
    arguments, unknown = parser.parse_known_args()
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {unknown[0]}")
    arguments.do(arguments)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal_number, "stopped; nothing was written")


def make_parser() -> Parser:
    """The parser of all sub-commands; `do` is the function that a command line stands for."""
    parser = Parser(prog="preprocess.py", description="Turn raw files into stores for training.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_tokenizer,
        _add_text,
        _add_task,
        _add_synthetic,
        _add_stats,
        _add_verify,
        _add_pydocs,
    ):
        add(commands)
    return parser


def _command(
    commands: Any, name: str, do: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(do=do, parser=parser)
    return parser


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar=what,
        help="The directory to write. It appears whole, or not at all.")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
        help="Replace the output if it exists (default: refuse).")  # fmt: skip


# -------------------------------------------------------------------------------- tokenizer


def _add_tokenizer(commands: Any) -> None:
    parser = _command(commands, "tokenizer", do_tokenizer, "Learn a vocabulary from text.")
    add = parser.add_argument
    add("--kind", choices=tokenizers.KINDS, required=True, help="wordpiece: BERT's; bpe: RoBERTa's "
        "byte-level pairs; unigram: SentencePiece; symbols: one id a character.")  # fmt: skip
    add("--input", type=Path, nargs="+", metavar="FILE", default=[],
        help="Raw text in UTF-8.")  # fmt: skip
    add("--vocab-size", type=number(6), metavar="N", help="Pieces in the vocabulary, the five "
        "special tokens included; a small text may give fewer.")  # fmt: skip
    add("--cased", action="store_true", help="Keep upper case and accents in wordpiece (default: "
        "lower-cased; the other kinds are always cased).")  # fmt: skip
    add("--alphabet", metavar="LETTERS", help="The letters of a symbols tokenizer, in the order of "
        "their ids; then neither --input nor --vocab-size is needed.")  # fmt: skip
    _add_output(parser, "TOK")


def do_tokenizer(arguments: argparse.Namespace) -> None:
    """Learn a vocabulary, or write down an alphabet."""
    kind, output = arguments.kind, arguments.output
    check_output(output, arguments.overwrite, tokenizers.META, ("store.json", "config.json"))
    started = time.monotonic()
    if arguments.alphabet is not None:
        if kind != "symbols":
            raise BadInput(f"--alphabet goes with --kind symbols, not {kind}")
        if arguments.input:
            raise BadInput("give either --alphabet or --input, not both")
        tokenizer = tokenizers.symbols(arguments.alphabet)
    else:
        for option in ("input", "vocab_size"):
            if not getattr(arguments, option):
                raise BadInput(f"--{option.replace('_', '-')} is required for --kind {kind}")
        check_files(arguments.input)
        tokenizer = vocabulary.learn(
            kind, arguments.input, arguments.vocab_size, lowercase=not arguments.cased
        )
    vocabulary.save(tokenizer, output, arguments.overwrite)
    fewer = arguments.vocab_size and kind != "symbols" and len(tokenizer) < arguments.vocab_size
    note = " (the text holds no more)" if fewer else ""
    seconds = time.monotonic() - started
    print(f"{output}: {kind} tokenizer of {len(tokenizer):,} pieces{note}, {seconds:.1f} s")


# -------------------------------------------------------------------------------- text


def _add_text(commands: Any) -> None:
    parser = _command(commands, "text", do_text, "Encode plain text into a store for pre-training.")
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE",
        help="Raw text in UTF-8, for the split train.")  # fmt: skip
    for split in ("valid", "test"):
        add(f"--{split}", type=Path, nargs="+", default=[], metavar="FILE",
            help=f"Raw text for the split {split} (default: no such split).")  # fmt: skip
    add("--tokenizer", type=Path, required=True, metavar="TOK",
        help="The directory of a tokenizer, a store or a checkpoint.")  # fmt: skip
    add("--max-tokens", type=number(1), default=510, metavar="N", help="Tokens in a row at most; "
        "longer documents are cut into several rows (default: %(default)s).")  # fmt: skip
    add("--lines", action="store_true", help="Every line is a document (default: documents are "
        "separated by blank lines).")  # fmt: skip
    add("--skip-lines", type=expression, metavar="REGEX", help="Leave out lines in which this "
        r"expression is found, such as '^\[\d+\]' for footnotes (default: none).")  # fmt: skip
    add("--workers", type=number(1, 4096), metavar="N",
        help="Threads that encode (default: all cores).")  # fmt: skip
    _add_output(parser, "STORE")


def do_text(arguments: argparse.Namespace) -> None:
    """Encode text files into a store."""
    splits = {"train": arguments.input, "valid": arguments.valid, "test": arguments.test}
    splits = {name: paths for name, paths in splits.items() if paths}
    files = [path for paths in splits.values() for path in paths]
    check_output(arguments.output, arguments.overwrite, "store.json")
    check_files(files)
    if arguments.workers:  # read by the tokenizers' thread pool when it starts
        os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    tokenizer = tokenizers.load(arguments.tokenizer)
    options = text.TextOptions(arguments.lines, arguments.skip_lines)
    started = time.monotonic()
    written = text.write_store(
        arguments.output, splits, tokenizer, options, arguments.max_tokens, origin(),
        arguments.overwrite,
    )  # fmt: skip
    size = sum(path.stat().st_size for path in files)
    summarise(arguments.output, written, started, size)


# -------------------------------------------------------------------------------- task


def _add_task(commands: Any) -> None:
    about = "Encode labelled examples into a store for fine-tuning."
    parser = commands.add_parser("task", help=about, description=about)
    names = parser.add_subparsers(metavar="NAME", required=True)
    for name, reader in TASKS.items():
        task = _command(names, name, do_task, reader.about)
        task.set_defaults(reader=reader)
        task.add_argument("--input", type=Path, required=True, metavar="FILE|DIR",
            help="The raw file, or a directory that holds the train, valid (or dev) and test "
            "files. A single file is split 90/5/5.")  # fmt: skip
        task.add_argument("--tokenizer", type=Path, metavar="TOK", help="The directory of a "
            "tokenizer, a store or a checkpoint (default: the alphabet of the task, if "
            "it has one).")  # fmt: skip
        task.add_argument("--seed", type=number(0), default=0, metavar="N",
            help="Draws the splits of a single file (default: %(default)s).")  # fmt: skip
        reader.add_arguments(task)
        _add_output(task, "STORE")


def do_task(arguments: argparse.Namespace) -> None:
    """Encode a labelled task into a store."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    if not arguments.input.exists():
        raise BadInput(f"{arguments.input} does not exist")
    task = arguments.reader.read(arguments)
    tokenizer = tokenizers.load(arguments.tokenizer) if arguments.tokenizer else task.tokenizer
    if tokenizer is None:
        raise BadInput("--tokenizer is required for this task: it has no alphabet of its own")
    started = time.monotonic()
    written = tasks.write_task(
        task, arguments.output, tokenizer, arguments.seed, origin(), arguments.overwrite
    )
    size = sum(path.stat().st_size for path in task.files)
    summarise(arguments.output, written, started, size)


# -------------------------------------------------------------------------------- synthetic


def _add_synthetic(commands: Any) -> None:
    about = "Make an artificial corpus, straight into a store."
    parser = commands.add_parser("synthetic", help=about, description=about)
    names = parser.add_subparsers(metavar="GENERATOR", required=True)
    abouts = {
        "uniform": "Tokens drawn one by one, all alike.",
        "zipf": "Tokens drawn one by one by frequency: a store's, or 1 / rank.",
        "nesting": "A stack grammar: nested pairs of equal tokens.",
        "flat": "Pairs of equal tokens that need not nest.",
    }
    for name, sentence in abouts.items():
        made = _command(names, name, do_synthetic, sentence)
        made.set_defaults(generator=name, frequencies=None, push=0.4)
        add = made.add_argument
        add("--tokens", type=number(1), required=True, metavar="N",
            help="Tokens of the split train; a twentieth more makes the split valid.")  # fmt: skip
        add("--lengths", type=length_range, default=(90, 120), metavar="LEAST:MOST",
            help="Tokens in a sequence, drawn evenly (default: 90:120).")  # fmt: skip
        add("--vocab-size", type=number(6), metavar="N", help="Ids of the vocabulary, five special "
            "ones included (default: that of --frequencies, or 30000).")  # fmt: skip
        add("--distinct", type=number(1), metavar="N", help="Different tokens that occur; the most "
            "frequent, else the first (default: all).")  # fmt: skip
        add("--seed", type=number(0), default=0, metavar="N",
            help="Draws the corpus (default: %(default)s).")  # fmt: skip
        if name != "uniform":
            add("--frequencies", type=Path, metavar="STORE", help="Draw tokens as often as they "
                "occur in this store, never its special ones (default: "
                f"{'1 / rank' if name == 'zipf' else 'all alike'}).")  # fmt: skip
        if name in ("nesting", "flat"):
            add("--push", type=share, default=0.4, metavar="P", help="The probability that a step "
                "opens a pair (default: %(default)s).")  # fmt: skip
        _add_output(made, "STORE")


def length_range(text: str) -> tuple[int, int]:
    """An argument type: LEAST:MOST, or one length."""
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEAST:MOST, such as 90:120") from None
    if not 1 <= found[0] <= found[1] <= 2**14:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 <= LEAST <= MOST <= {2**14}")
    return found


def share(text: str) -> float:
    """An argument type: a number above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def do_synthetic(arguments: argparse.Namespace) -> None:
    """Make an artificial corpus."""
    check_output(arguments.output, arguments.overwrite, "store.json")
    frequencies = open_store(arguments.frequencies) if arguments.frequencies else None
    corpus = synthetic.Corpus(
        arguments.generator, arguments.tokens, arguments.lengths, arguments.seed,
        arguments.distinct, arguments.push,
    )  # fmt: skip
    started = time.monotonic()
    written = synthetic.write_store(
        arguments.output, corpus, arguments.vocab_size, frequencies, origin(), arguments.overwrite
    )
    summarise(arguments.output, written, started)


# -------------------------------------------------------------------------------- stats, verify


def _add_stats(commands: Any) -> None:
    about = "Count what is in a store: rows, tokens, lengths, ids, entropies in nats, labels."
    parser = _command(commands, "stats", do_stats, about)
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")
    parser.add_argument("--json", type=Path, metavar="FILE",
        help="Also write the numbers to this file (default: the screen alone).")  # fmt: skip


def do_stats(arguments: argparse.Namespace) -> None:
    """Print, and perhaps write, a store's description."""
    if arguments.json is not None and arguments.json.is_dir():
        raise BadInput(f"{arguments.json} is a directory; give a file")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise BadInput(f"{arguments.json.parent} does not exist")
    found = stats.describe(open_store(arguments.store))
    stats.show(found)
    if arguments.json is not None:
        write_json(arguments.json, found)


def _add_verify(commands: Any) -> None:
    about = "Check every block of a store's files against its checksum."
    parser = _command(commands, "verify", do_verify, about)
    parser.add_argument("store", type=Path, metavar="STORE", help="The store's directory.")


def do_verify(arguments: argparse.Namespace) -> None:
    """Verify a store."""
    stats.verify(arguments.store)


# -------------------------------------------------------------------------------- pydocs


def _add_pydocs(commands: Any) -> None:
    about = "Write English text and a labelled task read from this Python's own documentation."
    parser = _command(commands, "pydocs", do_pydocs, about)
    _add_output(parser, "DIR")


def do_pydocs(arguments: argparse.Namespace) -> None:
    """Write the demonstration's raw files."""
    check_output(arguments.output, arguments.overwrite, "english.txt")
    started = time.monotonic()
    counts = pydocs.write(arguments.output, arguments.overwrite)
    found = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"{arguments.output}: {found}, {time.monotonic() - started:.1f} s")


# -------------------------------------------------------------------------------- shared


def check_output(path: Path, overwrite: bool, mark: str, foreign: tuple[str, ...] = ()) -> None:
    """Raise BadInput if `path` may not be written: it exists without --overwrite, or it is not a
    directory of the same kind (one that holds `mark` and nothing named in `foreign`)."""
    refuse_existing(path, overwrite)
    if path.exists() and (
        not (path / mark).is_file() or any((path / name).exists() for name in foreign)
    ):
        raise BadInput(f"{path} is something else than this command writes: it is not overwritten")


def origin() -> dict[str, Any]:
    """Where a store comes from: the command line, as it was typed."""
    return {"command": ["preprocess.py", *sys.argv[1:]]}


def summarise(
    output: Path, splits: dict[str, dict[str, Any]], started: float, size: int = 0
) -> None:
    """Print the one line that says what was written, and how fast (`size`: bytes read)."""
    seconds = max(time.monotonic() - started, 1e-9)
    parts = [f"{name} {split['rows']:,} rows, {split['tokens']:,} tokens"
             for name, split in splits.items()]  # fmt: skip
    tokens = sum(split["tokens"] for split in splits.values())
    rate = (
        f"{size / 1e6 / seconds:.1f} MB/s" if size else f"{tokens / 1e6 / seconds:.1f} M tokens/s"
    )
    print(f"{output}: {'; '.join(parts)}; {seconds:.1f} s, {rate}")

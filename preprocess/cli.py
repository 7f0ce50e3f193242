"""The sub-commands of `preprocess.py`: which module does what a command line says.

A command's module has `add_arguments(parser)` and `run(arguments)`; a task's has
`add_arguments(parser)` and `read(arguments) -> Task`.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from xformer.data.errors import Interrupted, typed

from . import stats
from .arguments import Parser
from .corpora import pydocs, synthetic, text
from .fetch import data_sets
from .tasks import (
    choice,
    dna,
    glue,
    labelled,
    music,
    pairs,
    protein,
    sequences,
    squad,
    tags,
    tsv,
)
from .vocabulary import english_like, tokenizer

Add = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], None]


class Command(NamedTuple):
    """A sub-command: its options, what it does, and one sentence about it."""

    add_arguments: Add
    run: Run
    about: str


class Reader(NamedTuple):
    """A task's format: its own options, how it is read, and one sentence about it."""

    add_arguments: Add
    read: Callable[[argparse.Namespace], labelled.Task]
    about: str


COMMANDS = {
    "fetch": Command(
        data_sets.add_arguments,
        data_sets.run,
        "Download a public data set from its publisher, checked against its SHA-256.",
    ),
    "tokenizer": Command(
        tokenizer.add_arguments,
        tokenizer.run,
        "Learn a vocabulary from text, or bring in a published one.",
    ),
    "text": Command(
        text.add_arguments, text.run, "Encode plain text into a store for pre-training."
    ),
    "pairs": Command(pairs.add_arguments, pairs.run, pairs.ABOUT),
    "stats": Command(
        stats.add_arguments,
        stats.run,
        "Count what is in a store: rows, tokens, lengths, ids, entropies in nats, labels.",
    ),
    "verify": Command(
        stats.add_verify_arguments,
        stats.run_verify,
        "Check every block of a store's files against its checksum.",
    ),
    "vocab-overlap": Command(
        english_like.add_overlap_arguments,
        english_like.run_overlap,
        "Count the English-like pieces of two vocabularies, and those that both have.",
    ),
    "english-contexts": Command(
        english_like.add_contexts_arguments,
        english_like.run_contexts,
        "Measure how much of a store is English-like.",
    ),
    "pydocs": Command(
        pydocs.add_arguments,
        pydocs.run,
        "Write English text and a labelled task read from this Python's own documentation.",
    ),
}
TASKS = {
    "tsv": Reader(
        tsv.add_arguments,
        tsv.read,
        "Any delimited file, JSON lines or parquet with columns of text, label or score.",
    ),
    **{
        name: Reader(glue.add_arguments, partial(glue.read, name=name), task.about)
        for name, task in glue.TASKS.items()
    },
    "dna/splice": Reader(
        dna.add_arguments, dna.read, "The UCI splice-junction file: 60 letters, EI, IE or N."
    ),
    **{
        name: Reader(
            partial(sequences.add_arguments, form=form),
            partial(sequences.read, form=form),
            (dna.ABOUTS | protein.ABOUTS)[name],
        )
        for name, form in (dna.TASKS | protein.TASKS).items()
    },
    "music/maestro": Reader(music.add_arguments, music.read, music.ABOUT),
    "choice": Reader(choice.add_arguments, choice.read, choice.ABOUT),
    "conll": Reader(tags.add_conll_arguments, tags.read_conll, tags.ABOUTS["conll"]),
    **{
        name: Reader(tags.add_flip_arguments, tags.read_flip, tags.ABOUTS[name])
        for name in ("protein/secondary", "protein/conservation")
    },
}


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
    parser = Parser(
        prog=typed("python preprocess.py"), description="Turn raw files into stores for training."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        _add(commands, name, *command)
    about = "Encode labelled examples into a store for fine-tuning."
    names = commands.add_parser("task", help=about, description=about).add_subparsers(
        metavar="NAME", required=True
    )
    for name, reader in TASKS.items():
        add = partial(labelled.add_arguments, add_own=reader.add_arguments)
        _add(names, name, add, partial(labelled.run, name, reader.read), reader.about)
    _add(names, "squad", squad.add_arguments, squad.run, squad.ABOUT)
    about = "Make an artificial corpus, straight into a store."
    names = commands.add_parser("synthetic", help=about, description=about).add_subparsers(
        metavar="GENERATOR", required=True
    )
    for name, about in synthetic.ABOUTS.items():
        _add(names, name, partial(synthetic.add_arguments, name=name), synthetic.run, about)
    return parser


def _add(commands: Any, name: str, add_arguments: Add, run: Run, about: str) -> None:
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(do=run, parser=parser)
    add_arguments(parser)

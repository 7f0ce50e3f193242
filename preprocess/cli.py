"""The sub-commands of `preprocess.py`, and the module behind each of them.

A command's module has `add_arguments(parser)` and `run(arguments)`. A task's module has
`add_arguments(parser)` and `read(arguments) -> TaskSource`.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from xformer.data.arguments import CommandParser
from xformer.data.errors import Interrupted, typed

from . import join, stats
from .arguments import no_options
from .corpora import dialects, pydocs, synthetic, text
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

AddArguments = Callable[[argparse.ArgumentParser], None]


class SubCommand(NamedTuple):
    """A sub-command or a task: a function that adds its own options, one that runs the command or
    reads the files of the task, and its description."""

    add_arguments: AddArguments
    run: Callable[[argparse.Namespace], Any]
    about: str


SUB_COMMANDS = {
    "fetch": SubCommand(
        data_sets.add_arguments,
        data_sets.run,
        "Download a public data set from its publisher and check its SHA-256.",
    ),
    "tokenizer": SubCommand(
        tokenizer.add_arguments,
        tokenizer.run,
        "Train a tokenizer on text, or import a published one.",
    ),
    "text": SubCommand(
        text.add_arguments, text.run, "Encode text, Java or FASTA into a store for pre-training."
    ),
    "join": SubCommand(join.add_arguments, join.run, join.ABOUT),
    "pairs": SubCommand(pairs.add_arguments, pairs.run, pairs.ABOUT),
    "stats": SubCommand(
        stats.add_arguments,
        stats.run,
        "Describe a store: rows, tokens, lengths, ids, entropies in nats, labels.",
    ),
    "verify": SubCommand(
        stats.add_verify_arguments,
        stats.run_verify,
        "Check every block of a store's files against its checksum.",
    ),
    "vocab-overlap": SubCommand(
        english_like.add_overlap_arguments,
        english_like.run_overlap,
        "Count the English-like pieces (letters A to Z only) of two vocabularies, and how many "
        "occur in both.",
    ),
    "english-contexts": SubCommand(
        english_like.add_contexts_arguments,
        english_like.run_contexts,
        "Count the contexts of a store that consist mostly of English-like pieces.",
    ),
    "pydocs": SubCommand(
        pydocs.add_arguments,
        pydocs.run,
        "Write English text and a labelled task made from this Python's own documentation.",
    ),
    "dialects": SubCommand(
        dialects.add_arguments,
        dialects.run,
        "Write text in an artificial language whose best possible loss is known, and a labelled "
        "task in it.",
    ),
}
TASK_READERS = {
    "tsv": SubCommand(
        tsv.add_arguments,
        tsv.read,
        "Any delimited, JSON lines or parquet file with text columns and a label or score column.",
    ),
    **{
        name: SubCommand(glue.add_arguments, partial(glue.read, name=name), task.about)
        for name, task in glue.GLUE_TASKS.items()
    },
    "dna/splice": SubCommand(
        no_options,
        dna.read,
        "UCI's splice-junction file: do 60 letters have a donor, an acceptor or no site?",
    ),
    **{
        name: SubCommand(
            partial(sequences.add_arguments, form=form),
            partial(sequences.read, form=form),
            form.about,
        )
        for name, form in (dna.DNA_TASKS | protein.PROTEIN_TASKS).items()
    },
    "music/maestro": SubCommand(music.add_arguments, music.read, music.ABOUT),
    "choice": SubCommand(choice.add_arguments, choice.read, choice.ABOUT),
    "conll": SubCommand(tags.add_conll_arguments, tags.read_conll, tags.ABOUTS["conll"]),
    **{
        name: SubCommand(no_options, tags.read_flip, tags.ABOUTS[name])
        for name in ("protein/secondary", "protein/conservation")
    },
}


def main() -> None:
    """Parse the command line and run its sub-command.

    Raises BadInput for a wrong argument or input file, Failure if something else goes wrong, and
    Interrupted on SIGTERM, and on SIGHUP if the terminal is closed. SIGHUP stays ignored under
    nohup.
    """
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _stop)
    parser = make_parser()
    arguments = parser.parse_args()
    arguments.do(arguments)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal_number, "stopped; the output was not written")


def make_parser() -> CommandParser:
    """The parser of all sub-commands. The parsed attribute `do` is the function to call."""
    parser = CommandParser(
        prog=typed("python preprocess.py"), description="Turn raw files into stores for training."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in SUB_COMMANDS.items():
        _add(commands, name, *command)
    about = "Encode labelled examples into a store for fine-tuning."
    names = commands.add_parser("task", help=about, description=about).add_subparsers(
        metavar="NAME", required=True
    )
    for name, reader in TASK_READERS.items():
        add = partial(labelled.add_arguments, add_own=reader.add_arguments)
        _add(names, name, add, partial(labelled.run, name, reader.run), reader.about)
    _add(names, "squad", squad.add_arguments, squad.run, squad.ABOUT)
    about = "Generate an artificial corpus and write it into a store."
    names = commands.add_parser("synthetic", help=about, description=about).add_subparsers(
        metavar="GENERATOR", required=True
    )
    for name, about in synthetic.ABOUTS.items():
        _add(names, name, partial(synthetic.add_arguments, name=name), synthetic.run, about)
    return parser


def _add(
    commands: Any,
    name: str,
    add_arguments: AddArguments,
    run: Callable[[argparse.Namespace], None],
    about: str,
) -> None:
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(do=run)
    add_arguments(parser)

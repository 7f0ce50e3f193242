"""The command `xformer`, which pip installs, with its sub-commands.

`python -m xformer` is the same command. The usage texts here repeat the docstrings of train.py and
evaluate.py, which are not installed.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from xformer.config import find_recipe, nearest, recipes
from xformer.data.display import columns, put, say
from xformer.data.errors import DISTRIBUTION, BadInput, typed
from xformer.data.files import usable_cores
from xformer.start import run

TRAIN = r"""Pre-train or fine-tune a model, as a recipe says.

    # one process
    xformer train pretrain/mini data=stores/english run=runs/english
    # two processes on this machine
    torchrun --standalone --nproc-per-node 2 -m xformer.train pretrain/mini \
        data=stores/english run=runs/english
    # two machines; on the second with --node-rank 1
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 8 -m xformer.train ...
    # fine-tune the result, and its from-scratch baseline (twin)
    xformer train finetune/classify data=stores/cola init=runs/english run=runs/cola
    xformer train finetune/classify data=stores/cola init=runs/english \
        surgery='[{op="clean"}]' run=runs/cola-scratch

A recipe is a TOML file, or the name of one that comes with the package; `xformer recipes` lists
them. To resume a stopped run exactly where it left off, repeat the command. A value is parsed as
TOML, or taken as a string if it is not TOML. data='["stores/a", "stores/b"]' joins two stores.
"""
EVALUATE = """Score a checkpoint, fill masks, or predict raw rows.

    xformer evaluate runs/cola data=stores/cola split=test out=scores.json
    xformer evaluate runs/cola data=stores/cola split=valid predictions=rows.tsv
    xformer evaluate runs/english text='The [MASK] sat on the mat.' top=10
    xformer evaluate runs/cola input=sentences.csv out=predictions.tsv
    xformer evaluate runs/english blimp=BLiMP.zip pairs=100 out=blimp.json

The first argument is the directory of a checkpoint or of a finished run. A run stands for the
checkpoint that train.select chose. Give exactly one of data=, text=, input= and blimp=.
"""
ENCODE = """Turn texts into vectors, one vector per text.

    xformer encode micro/english input=sentences.txt out=vectors.npy
    xformer encode runs/cola input=reviews.csv column=review out=vectors.h5 normalize=true
    xformer encode ckpt/bert input=reviews.jsonl pooling=first out=vectors.tsv

The first argument is the directory of a checkpoint or of a finished run. Texts are packed without
padding, so batch_tokens= changes the speed and not the vectors. From Python, the same vectors are
xformer.checkpoint.load(CHECKPOINT).encode(texts).
"""
RECIPES = """List the recipes that come with the package, or print one.

    xformer recipes
    xformer recipes show finetune/classify
    xformer recipes show finetune/classify > mine.toml

Commands accept a recipe's name instead of a file: `xformer train finetune/classify ...`, `xformer
study kao2021-figure2 ...`. If a file with that path exists, the file is used. A recipe may refer to
other recipes by relative paths; `show` replaces the paths by names, so that a copy works anywhere.
"""


# commands of a sub-command -> the sub-command, for users who leave it out
BELOW = {
    **dict.fromkeys(("sweep", "verify", "reproduce"), "study"),
    **dict.fromkeys(("from-hf", "to-hf", "inspect"), "convert"),
    **dict.fromkeys(("fetch", "stats", "task", "text", "tokenizer"), "preprocess"),
    "rows": "runs",
    "show": "recipes",
}


class Command(NamedTuple):
    """A sub-command: a sentence about it, and its main function, which imports the modules that it
    needs."""

    about: str
    main: Callable[[], None]


def main() -> None:
    """`xformer NAME ...`; never returns."""
    run(_dispatch)


def _dispatch() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        say(*_help().split("\n"))
        return
    if name == "--version":
        say(f"xformer {version(DISTRIBUTION)}", *_about())
        return
    if name not in COMMANDS:
        near = nearest(name, list(COMMANDS)) or f"; there are {', '.join(COMMANDS)}"
        near = f"; write xformer {BELOW[name]} {name}" if name in BELOW else near
        raise BadInput(f"xformer has no command {name!r}{near}")
    sys.argv = [f"xformer {name}", *rest]  # `typed` reads this, and config.json records it
    COMMANDS[name].main()


def _about() -> list[str]:
    """Lines about this installation, for a report of an error."""
    try:
        import torch

        from xformer import provenance
        from xformer.ops import native
    except (ImportError, OSError) as error:  # preprocess needs no torch
        return [f"torch cannot be imported: {error}"]
    versions = provenance.versions()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return [
        f"Python {versions['python']}, torch {versions['torch']}, NumPy {versions['numpy']}",
        f"{provenance.processor_model()}, {usable_cores()} cores; {cuda}",
        native.cpu_kernels() + (f": {native.absent}" if native.absent else ""),
        f"revision: {provenance.revision()}",
        f"package: {Path(__file__).parent}",
    ]


def _help() -> str:
    lines = ["Pre-train, modify, fine-tune and analyse BERT-family encoders.", ""]
    lines += [f"    xformer {name:<12}{command.about}" for name, command in COMMANDS.items()]
    end = "`xformer NAME --help` explains a command. `xformer --version` prints the version."
    return "\n".join([*lines, "", end])


def _train() -> None:
    from xformer.train import main

    _explain(TRAIN)
    main()


def _evaluate() -> None:
    from xformer.evaluate import main
    from xformer.preprocess.tasks.predict import write_rows

    _explain(EVALUATE)
    main(write_rows)


def _encode() -> None:
    from xformer.encode import main
    from xformer.preprocess.tasks.predict import read_texts

    _explain(ENCODE)
    main(read_texts)


def _program(name: str) -> Callable[[], None]:
    """A function that imports the module xformer.NAME and calls its main function."""

    def main() -> None:
        module = import_module(f"xformer.{name}")
        _explain(module.__doc__)
        module.main()

    return main


def _explain(usage: str | None) -> None:
    """Make --help begin with this text, by making it the docstring of the running program."""
    sys.modules["__main__"].__doc__ = usage


def _recipes() -> None:
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        say(*RECIPES.strip().split("\n"))
    elif not arguments:
        say(*(_line(name, path) for name, path in recipes().items()))
    elif arguments[0] != "show" or len(arguments) != 2:
        raise BadInput("write `xformer recipes`, or `xformer recipes show NAME`")
    elif (name := arguments[1]) in recipes():
        put(portable(recipes()[name]))
    else:
        near = nearest(name, list(recipes())) or "; `xformer recipes` lists them"
        raise BadInput(f"no recipe is named {name!r}{near}")


def _line(name: str, path: Path) -> str:
    """A line with a recipe's name and its first comment. A terminal shows only its beginning."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    words = comment[0].replace("#", " ") if comment else ""
    width = max(columns() - 36, 20)
    short = textwrap.shorten(typed(words), width, placeholder=" ...", break_on_hyphens=False)
    return f"{name:<36}{short}"


def portable(path: Path) -> str:
    """The text of a recipe that comes with the package, for a user of the command `xformer`. Names
    replace the relative paths of other recipes, and comments spell commands as that user does."""
    names = {file.resolve(): name for name, file in recipes().items()}

    def by_name(match: re.Match[str]) -> str:
        return f'{match[1]}"{names[find_recipe(match[2], path.parent).resolve()]}"'

    references = r'^((?:base|recipe) *= *)"(.*?)"'
    text = re.sub(references, by_name, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"^#.*", lambda comment: typed(comment[0]), text, flags=re.MULTILINE)


COMMANDS = {
    "preprocess": Command("Turn raw files into stores for training.", _program("preprocess.cli")),
    "train": Command("Pre-train or fine-tune a model, as a recipe says.", _train),
    "evaluate": Command("Score a checkpoint, fill masks, or predict raw rows.", _evaluate),
    "encode": Command("Turn texts into vectors, one vector per text.", _encode),
    "convert": Command(
        "Import and export Hugging Face checkpoints, and describe a checkpoint.",
        _program("convert.__main__"),
    ),
    "surgery": Command("Modify the weights of a checkpoint.", _program("surgery.__main__")),
    "analyze": Command(
        "Analyse checkpoints: PWCCA, attention, Jacobians, gradients and more.",
        _program("analysis.__main__"),
    ),
    "study": Command(
        "Train many runs as a study, and compare them with published numbers.",
        _program("study.__main__"),
    ),
    "runs": Command(
        "List and compare runs, or print the rows of a training step.", _program("runs")
    ),
    "recipes": Command("List the recipes that come with the package, or print one.", _recipes),
}


if __name__ == "__main__":
    main()

"""Analyse checkpoints: similarity of representations, attention, Jacobians, gradients and more.

    python -m xformer.analysis pwcca CHECKPOINT CHECKPOINT data=STORE out=DIR
    python -m xformer.analysis capture CHECKPOINT data=STORE what=hidden,attention out=F.h5
    python -m xformer.analysis draw DIR/pwcca.json

{commands}
    draw          the figures of an earlier result once more, from its JSON file

`python -m xformer.analysis NAME --help` explains an analysis and shows every key with its default.

A CHECKPOINT is the directory of a checkpoint or of a finished run. For a run, the checkpoint that
train.select chose is used. Every analysis except capture writes its result as JSON, draws figures
of it (SVG and PNG for light and dark pages, PDF for a paper), and prints a one-line summary.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from xformer.config import nearest
from xformer.data.display import say
from xformer.data.errors import BadInput, typed
from xformer.start import run

# the name of each module, and what it measures
MODULES = {
    "pwcca": "how similar the layers of two models are: PWCCA, SVCCA, CCA, linear CKA",
    "attention": "distances between the attention maps of two models, with heads matched",
    "jacobian": "dynamical isometry: singular values of d(last hidden) / d(word embeddings)",
    "gradients": "gradient confusion: cosines between the gradients of different examples",
    "perturbation": "how much outputs change when noise is added to the parameters",
    "cost": "parameters by part, FLOPs per token, measured speed, time to make a checkpoint",
    "blimp": "accuracy on minimal pairs, by step for runs that kept their checkpoints",
    "curves": "loss curves of runs: mean and standard deviation over seeds",
    "capture": "hidden states and attention maps, written to an HDF5 file",
}


def main() -> None:
    """`python -m xformer.analysis NAME ...`"""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"    {name:<14}{text}" for name, text in MODULES.items())
        say(*typed((__doc__ or "").strip()).format(commands=lines).split("\n"))
        return
    name, *rest = arguments
    if name == "draw":
        _redraw(rest)
        return
    module = module_of(name)
    from xformer.analysis.subcommand import parse_arguments

    module.run(*parse_arguments(module.SUBCOMMAND, rest))


def module_of(name: str) -> Any:
    """The module of an analysis. Raises BadInput if there is none of this name."""
    if name not in MODULES:
        near = nearest(name, list(MODULES)) or f"; there are {', '.join(MODULES)} and draw"
        raise BadInput(f"unknown analysis {name!r}{near}")
    return import_module(f"xformer.analysis.{name}")


def _redraw(paths: list[str]) -> None:
    """Draw the figures of earlier results again, next to their JSON files."""
    from xformer.data import style
    from xformer.data.files import read_json

    if not paths or paths[0] in ("-h", "--help"):
        say(
            typed("python -m xformer.analysis draw FILE.json [FILE.json ...]"),
            "",
            "Draw the figures of earlier results again, next to their JSON files. The analysis is",
            "not repeated.",
        )
        return
    for path in map(Path, paths):
        if path.is_dir():
            here = (path / f"{name}.json" for name in MODULES)
            file = next((f for f in here if f.is_file()), path / "pwcca.json")
            raise BadInput(f"{path} is a directory; give a JSON file in it, such as {file}")
        result = read_json(path)
        if not isinstance(result, dict) or result.get("analysis") not in MODULES:
            raise BadInput(
                f"{path} is not the result of an analysis; give a JSON file that an analysis wrote"
            )
        module = import_module(f"xformer.analysis.{result['analysis']}")
        try:
            draw = partial(module.draw, result)
            figures = style.write_light_and_dark(draw, path.parent, path.stem)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is not a complete result of {result['analysis']} ({error!r}); "
                "run the analysis again"
            ) from None
        for figure in figures:
            say(str(figure))


if __name__ == "__main__":
    run(main)

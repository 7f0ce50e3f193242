"""Look inside checkpoints: similarity of representations, attention, Jacobians, gradients.

    python -m xformer.analysis pwcca CHECKPOINT CHECKPOINT data=STORE out=DIR
    python -m xformer.analysis capture CHECKPOINT data=STORE what=hidden,attention out=F.h5
    python -m xformer.analysis draw DIR/pwcca.json

{commands}

Each writes its result as JSON and the figures drawn from it, as SVG and PNG, light and dark, and
prints one line. `python -m xformer.analysis NAME --help` shows every key with its default. A
CHECKPOINT may be a run: then the checkpoint that train.select chose.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from xformer.config import nearest
from xformer.data.display import say
from xformer.data.errors import BadInput, typed
from xformer.start import run

# by name: the module, and what it shows
MODULES = {
    "pwcca": "how alike the layers of two models are: PWCCA, SVCCA, CCA, linear CKA",
    "attention": "how far apart the attention heads of two models look, matched by layer",
    "jacobian": "dynamical isometry: singular values of d(last hidden) / d(word embeddings)",
    "gradients": "gradient confusion: cosines between the gradients of different examples",
    "perturbation": "how far outputs move when noise is added to the parameters",
    "cost": "parameters by part, operations a token, measured speed, seconds to make",
    "curves": "loss curves of runs, mean and band over seeds",
    "capture": "hidden states and attention maps as HDF5",
}


def main() -> None:
    """`python -m xformer.analysis NAME ...`"""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"    {name:<14}{text}" for name, text in MODULES.items())
        say(*typed((__doc__ or "").strip()).format(commands=listed).split("\n"))
        return
    name, *rest = arguments
    if name == "draw":
        _draw(rest)
        return
    if name not in MODULES:
        near = nearest(name, list(MODULES)) or f"; there are {', '.join(MODULES)} and draw"
        raise BadInput(f"unknown analysis {name!r}{near}")
    from xformer.analysis.command import parse

    module = import_module(f"xformer.analysis.{name}")
    module.run(*parse(module.COMMAND, rest))


def _draw(paths: list[str]) -> None:
    """Draw the figures of results anew, beside them."""
    from xformer.data import style
    from xformer.data.files import read_json

    if not paths or paths[0] in ("-h", "--help"):
        program = typed("python -m xformer.analysis")
        say(f"{program} draw FILE.json ...", "", "Draw results anew, beside them.")
        return
    for path in map(Path, paths):
        found = read_json(path)
        if not isinstance(found, dict) or found.get("analysis") not in MODULES:
            raise BadInput(f"{path} is no result of an analysis")
        module = import_module(f"xformer.analysis.{found['analysis']}")
        try:
            draw = partial(module.draw, found)
            pictures = style.write_light_and_dark(draw, path.parent, path.stem)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"{path} is no whole result of {found['analysis']}: {error!r}") from None
        for picture in pictures:
            say(str(picture))


if __name__ == "__main__":
    run(main)

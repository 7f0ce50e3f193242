"""Record the exact net anew, and print what changed.

    PYTHONPATH=.:tests python -m golden.exact                 # everything that the tests compare
    PYTHONPATH=.:tests python -m golden.exact stores arrays   # some of it
    PYTHONPATH=.:tests python -m golden.exact --artefacts     # sources.zip and kept.zip first

Record anew after a format, a key or a default was changed on purpose. Then docs/log.md and
CHANGELOG.md tell of the change, old files are still read or refused in one clear line, and every
printed line follows from the change. Also record anew after adding an input to a test. Then only
lines about that input are printed.

Do not record anew after a change that should change nothing, such as moving code, using another
library or optimizer, or making something faster. A difference is then a mistake in the change.
Never record anew because a test fails for an unknown reason.

The artefacts are old on purpose, because they stand for what users have on disk. Make them anew
only if the project decides to stop reading such old files, and docs/formats.md says so. To cover a
new format, add an artefact of it and keep the old ones.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from helpers import Forks

from golden.exact import kept, sources
from golden.exact.measure import KEPT, MADE, differences, measure, recorded, write


def main() -> None:
    """Record the named parts of the net, or all."""
    names, known = [word for word in sys.argv[1:] if word != "--artefacts"], [*MADE, *KEPT]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: {unknown[0]} is none of {', '.join(known)}")
    with tempfile.TemporaryDirectory() as scratch, Forks(Path(scratch)) as forks:
        if "--artefacts" in sys.argv[1:]:
            _artefacts(forks, Path(scratch))
        for name in names or known:
            (place := Path(scratch) / name).mkdir()
            new = measure(name, place, forks)
            changed = differences(recorded(name), new)
            write(name, new)
            print(f"{name}: {len(changed)} changed", *changed, sep="\n  ")


def _artefacts(forks: Forks, scratch: Path) -> None:
    for name in ("sources", "kept"):
        (scratch / name).mkdir()
    sources.make(scratch / "sources")
    sources.pack(scratch / "sources", sources.ARCHIVE)
    kept.record(forks, scratch / "kept", scratch / "sources")
    sources.pack(scratch / "kept", kept.ARCHIVE)


if __name__ == "__main__":
    main()

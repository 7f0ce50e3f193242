"""A bridge: in a checkout, the modules of this package are in the folder preprocess/ beside
xformer/. In an installed package they are here, and setup.py leaves this file out."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "preprocess")]

"""In a checkout the modules of this package lie in the folder preprocess/ beside xformer/. An
installed package holds them here, and setup.py leaves this file out."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "preprocess")]

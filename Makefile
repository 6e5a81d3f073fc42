# Everything a newcomer or a contributor needs. Each target builds .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: run test check format bench docs clean

run: $(READY)  ## the main job: meta-train a few-shot learner on MNIST-1D and test it
	$(BIN)/metanudge train mnist1d

test: $(TOOLS)  ## the whole test suite
	$(PYTEST)

check: $(TOOLS)  ## format, lint, types, tests and the examples in the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

format: $(TOOLS)  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed and memory beside other libraries (pip install -e '.[rivals]' adds them), and the cost of drawing episodes
	$(BIN)/python benchmarks/episodes.py --out runs/bench
	$(BIN)/metanudge bench

docs: $(TOOLS)  ## run every example in the docstrings and in the README
	$(BIN)/python -m pytest --doctest-modules src tests/test_readme.py -q

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"metanudge needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Set PYTHON=python3.11 (or newer).")'
	@echo "Setting up $(VENV): a minute or so, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 numpy
	$(PIP) -e .
	@touch $@

$(TOOLS): $(READY)
	$(PIP) -e '.[dev]'
	@touch $@

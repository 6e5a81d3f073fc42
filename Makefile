# Everything a newcomer or a contributor needs. Each target builds .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
SITE := $(VENV)/.site
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile
# Every version is pinned, also those of whatever pip builds in an environment of its own: older pips read the first there, newer ones the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# The arithmetic of a plain CPU. Each setting reaches kernels that the others do not: torch's own loops (softmax, normalisation, sigmoid),
# MKL's matrix products (and with them convolutions in float64), oneDNN's convolutions in float32. So one run under all three is one under each.
PLAIN_CPU := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
SEED ?= 1
# These failed on some CPUs when their tolerances came from one.
BRITTLE := tests/bilevel/test_hypergradient.py tests/accel/test_chain.py tests/test_tuning.py \
	-k 'test_every_solver or test_equals_the_general_path or test_every_kind or test_an_ulp'

.PHONY: run test test-all test-numerics test-brittle check check-hf format bench docs docs-full clean

run: $(READY)  ## the main job: meta-train a few-shot learner on MNIST-1D and test it
	$(BIN)/metanudge train mnist1d

test: $(TOOLS)  ## the test suite, but for what takes long
	$(PYTEST) -m "not thorough"

test-all: $(TOOLS)  ## the whole test suite
	$(PYTEST)

test-numerics: $(TOOLS)  ## what compares to tolerances of rounding: plain CPU, θ changed by an ulp (SEED=2: otherwise), one thread
	$(PLAIN_CPU) $(PYTEST) -m "numerical and not thorough" --perturb $(SEED) --threads 1

test-brittle: $(TOOLS)  ## tests that once were brittle, with 20 changes of θ by an ulp
	for seed in $$(seq 20); do $(PYTEST) -q --perturb $$seed $(BRITTLE) || exit 1; done

check: $(TOOLS)  ## format, lint, types, documentation, tests with every example in it, and the numerical tests on a plain CPU
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) docs
	$(MAKE) test-numerics
	$(MAKE) test

check-hf: $(TOOLS)  ## every model of Hugging Face × whole or LoRA × estimator, with cosines in few bits; `make test` takes a dozen of them
	METANUDGE_HF=all $(PYTEST) tests/hf -rP

format: $(TOOLS)  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed and memory beside other libraries (pip install -e 'lab[rivals]' adds them), and the cost of drawing episodes
	$(BIN)/python benchmarks/episodes.py --out runs/bench
	$(BIN)/metanudge bench

docs: $(SITE)  ## the documentation, without a network: docs/_build/html/index.html
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs docs/_build/html

docs-full: $(SITE)  ## run every tutorial at full size, keep what it prints and draws, and build the documentation with it
	$(BIN)/python docs/record.py
	$(MAKE) docs

clean:
	rm -rf $(VENV) runs docs/_build .pytest_cache .mypy_cache .ruff_cache

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"metanudge needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Set PYTHON=python3.11 (or newer).")'
	@echo "Setting up $(VENV): a minute or so, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) -e . -e lab
	@touch $@

$(TOOLS): $(READY)
	$(PIP) -e '.[dev]' -e lab hatchling editables  # the last two so that a test sees whether all they need is pinned
	@touch $@

$(SITE): $(TOOLS)
	$(PIP) -e '.[docs]'
	@touch $@

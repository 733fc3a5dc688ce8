# Two commands: `make recommend` and `make test`. Both set up what they need in .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

AT_ONCE ?= 3

export OMP_NUM_THREADS ?= 1

.PHONY: install recommend test test-slow test-gpu lint benchmarks clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

recommend: install
	$(BIN)/trainplan recommend --run

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# At once: one more than two cores, since tests wait for the processes that they start, and some only sleep. Those that
# measure time have the machine to themselves.
# What `make lint` runs is among the tests (tests/test_lint.py).
test: install
	$(BIN)/python -m pytest -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" tests

test-slow: install
	$(BIN)/python -m pytest -m "slow and not gpu" tests

# Nothing is installed here: a GPU machine brings its own torch (2.11 to 2.13) and the other libraries.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests --junitxml=$${OUT:-.}/test-gpu.xml

# What a quiet machine needs about ten minutes for; docs/accuracy.md has the results of two machines.
benchmarks: install
	$(BIN)/python benchmarks/clock.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/accuracy.py --out trainplan-run-benchmarks/accuracy.json

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info

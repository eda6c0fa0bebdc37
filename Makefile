# make run    the main job: filtered training of a small Llama on real text, beside a regular run
# make test   style, types and tests
# Both make .venv on first use. PYTHON picks the interpreter, TORCH the build of torch, JOBS how many
# tests run at once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# A test computes in one thread. Files stay whole, since the tests of one share what is slow to make.
JOBS ?= --numprocesses 2 --dist loadfile

.PHONY: run test slow clean

run: .venv/ready
	$(BIN)/collider train quickstart

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest $(JOBS)

slow: .venv/ready
	$(BIN)/pytest --slow

# torch first and pinned: a ranged requirement would pull a CUDA build of several gigabytes.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info

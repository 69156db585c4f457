# `make help` lists the targets. Everything runs in .venv, which `make setup` builds.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup
RUST := $(shell find rust -name "*.rs" -o -name Cargo.toml) Cargo.toml Cargo.lock
UV := $(BIN)/uv

.PHONY: help setup build test test-rust loom lint fmt types stubs bench wheel soak clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## virtual environment with all dependencies, the package installed editable

$(STAMP): pyproject.toml constraints.txt $(RUST)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	$(UV) pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

build: ## rebuild the Rust extension in place
	$(BIN)/maturin develop --uv --quiet --locked

test: setup test-rust ## all tests: Rust, then Python
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q --ignore tests/gpu -n auto --maxprocesses 4 --dist worksteal
	$(BIN)/python -m pytest -q tests/gpu  # alone: some take most of a GPU, or its time

test-rust: ## Rust unit and property tests
	if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --locked --workspace; \
	else cargo test --locked --workspace; fi

loom: ## exhaustive interleavings of the small concurrent parts
	RUSTFLAGS="--cfg loom" cargo test --locked -p headrace-core -p headrace-device --profile loom --target-dir target-loom --lib loom

lint: ## rustfmt, clippy, ruff
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check python tests
	$(BIN)/ruff format --check python tests

fmt: ## format everything
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet python tests || true
	$(BIN)/ruff format python tests

types: ## mypy --strict
	$(BIN)/python -m mypy

stubs: ## the stub file against the built module
	$(BIN)/python -m mypy.stubtest headrace._core

bench: setup ## benchmark the default model on this machine
	$(BIN)/headrace bench batch

wheel: ## build the wheel, import it in a clean environment without torch, CUDA or CuPy
	rm -rf target/wheel-check && mkdir -p target/wheel-check
	$(BIN)/maturin build --quiet --locked --release --out target/wheel-check
	$(PYTHON) -m venv target/wheel-check/venv
	target/wheel-check/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps target/wheel-check/*.whl
	target/wheel-check/venv/bin/python -m pip install --quiet --disable-pip-version-check numpy
	cd target/wheel-check && venv/bin/python ../../tests/check_wheel.py

soak: ## the long random runs (hours of operations, not of waiting)
	cargo test --locked --release --workspace -- --ignored
	HEADRACE_SOAK=1 HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -q -m soak --timeout 3600

clean: ## remove what was built
	rm -rf target target-loom $(VENV) .pytest_cache .mypy_cache .ruff_cache

# make demo and make test each do all of their own set-up on a machine that has only Python 3.11+
# and a C++ compiler. Set-up is repeated only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
# Worker processes for the tests: one more than cores, because tests of several ranks and processes
# wait; at most eight (a compiling worker takes over 1 GB).
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
# More arguments for pytest, e.g. make test PYTEST_ARGS="-k nvfp4 -x"
PYTEST_ARGS ?=
# Arguments for the benchmarks, e.g. make bench BENCH_ARGS="--quick --peers torchao,compressed-tensors"
BENCH_ARGS ?=
# Arguments for the scripts, e.g. make wheel WHEEL_ARGS="--target linux-aarch64"
WHEEL_ARGS ?=
RELEASE_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread a process: tests run in parallel already, and spinning OpenMP threads stall tiny
# operators by milliseconds. Inductor compiles in the process that asks, without a pool of its own.
QUIET_CORES := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1
# The tests start hundreds of processes. Each compiles all modules again if a variable of the shell
# forbids Python to write its bytecode; an empty variable allows it.
BYTECODE := PYTHONDONTWRITEBYTECODE=

CPP_FOLDERS = $(foreach folder,src src/attention src/ops,qtensor/kernels/cpu/$(folder)) qtensor/cutlass_gemm benchmarks tests/helpers
CPP_SOURCES = $(wildcard $(foreach folder,$(CPP_FOLDERS),$(folder)/*.h $(folder)/*.cpp))

.DEFAULT_GOAL := help
.PHONY: help demo test test-project test-all lint format docs docs-check check-kernels bench overhead wheel release clean

help:
	@echo "make demo        install into $(VENV) and run the main job on real weights"
	@echo "make test        install into $(VENV) and run the default tier of the tests"
	@echo "make test-project  run the checks of the project itself: documents, benchmarks, rules"
	@echo "make test-all    run all tests: the default tier and the wide tier (tests/helpers/nightly.py)"
	@echo "make lint        ruff, import-linter, mypy, codespell, clang-format"
	@echo "make format      let ruff and clang-format rewrite the files"
	@echo "make docs        the documentation site, in site/; a broken link or a missing docstring fails"
	@echo "make docs-check  are the generated documents up to date?"
	@echo "make check-kernels  nvcc's front end over every GEMM (minutes; CHECK_ARGS=\"--arch sm_90a\")"
	@echo "make bench       speed beside peers: all benchmarks, and the plot (BENCH_ARGS=--quick: 3 minutes)"
	@echo "make wheel       a wheel for this platform with the CPU kernels compiled, in dist/"
	@echo "make release     VERSION=0.1.0: the sdist and all wheels, checked, in dist/release/; uploads nothing"
	@echo "make overhead    host overhead beside torchao alone"
	@echo "make clean       remove $(VENV), build output and caches"

demo: $(VENV)/.demo.stamp
	OMP_WAIT_POLICY=passive $(BIN)/qtensor demo

PYTEST := $(QUIET_CORES) $(BYTECODE) $(BIN)/python -m pytest -q -n $(JOBS) --maxprocesses 8 --dist worksteal

test: $(VENV)/.dev.stamp
	$(PYTEST) -m "not nightly and not project" $(PYTEST_ARGS)

test-project: $(VENV)/.dev.stamp
	$(PYTEST) -m "project and not nightly" $(PYTEST_ARGS)

test-all: $(VENV)/.dev.stamp
	$(PYTEST) $(PYTEST_ARGS)

lint: $(VENV)/.dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(VENV)/.dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

# The variable silences an advertisement of mkdocs-material for its successor.
docs: $(VENV)/.dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html, or run: python3 -m http.server --directory site  (for the search)"

docs-check: $(VENV)/.dev.stamp
	$(BIN)/python docs/generate_op_matrix.py --check

check-kernels: $(VENV)/.dev.stamp
	$(BIN)/python scripts/check_kernels.py $(CHECK_ARGS)

bench: $(VENV)/.bench.stamp
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

overhead: $(VENV)/.bench.stamp
	$(QUIET_CORES) $(BIN)/python -m benchmarks.overhead

wheel: $(VENV)/.demo.stamp
	$(BIN)/python scripts/build_wheel.py $(WHEEL_ARGS)

release: $(VENV)/.release.stamp
	$(BIN)/python scripts/release.py $(VERSION) $(RELEASE_ARGS)

clean:
	rm -rf $(VENV) build dist site torch_qtensor.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find qtensor tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "qtensor needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Editable, so that a change in qtensor/ is seen without another install.
$(VENV)/.demo.stamp: pyproject.toml constraints.txt | $(VENV)/.venv.stamp
	$(INSTALL) -e '.[demo]'
	@touch $@

# Holds everything that the demo needs, too.
$(VENV)/.dev.stamp: pyproject.toml constraints.txt | $(VENV)/.venv.stamp
	$(INSTALL) -e '.[dev,cli,demo]'
	@touch $@ $(VENV)/.demo.stamp

$(VENV)/.bench.stamp: pyproject.toml constraints.txt | $(VENV)/.venv.stamp
	$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.release.stamp: pyproject.toml constraints.txt | $(VENV)/.venv.stamp
	$(INSTALL) -e '.[release]'
	@touch $@

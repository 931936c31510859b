# Run `make` or `make help` for the list of targets.
PYTHON ?= python3
VENV := .venv
DEMO_VENV := .venv-demo
BIN := $(VENV)/bin
DEMO_BIN := $(DEMO_VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
WORKERS ?= 2
GPU_WORKERS ?= 16
SANITIZE_PARTS ?= 4
ARCH ?= sm_90

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types unit docs wheel bench table aot gpu sanitize clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: $(DEMO_VENV)/.ready ## Check this machine, then train a small language model on NumPy alone
	$(DEMO_BIN)/gradplan verify --quick
	$(DEMO_BIN)/python examples/char_lm.py --out loss.png

test: lint types unit ## Everything CI runs: ruff, strict types, the whole test suite

# Every option of every kind in place of a share of them, the command line's own grid, and the
# examples at their full size, their pictures in build/.
test-all: lint types docs ## The whole: also what `make test` samples, the site, verify, the examples
	$(BIN)/python -m pytest -n $(WORKERS) --complete
	$(BIN)/gradplan verify --jobs $(WORKERS)
	for example in $(filter-out %/shared.py,$(wildcard examples/*.py)); do \
	  $(BIN)/python $$example --out build/$$(basename $$example .py).png || exit 1; \
	done

lint: $(VENV)/.ready ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready ## mypy in strict mode
	$(BIN)/mypy

unit: $(VENV)/.ready ## The tests alone
	$(BIN)/python -m pytest -n $(WORKERS)

docs: $(VENV)/.ready ## Build the documentation into site/, warnings as errors; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: $(VENV)/.ready ## Build the wheel into dist/
	$(BIN)/python -m hatchling build -t wheel

bench: $(VENV)/.ready ## Side by side with PyTorch on this CPU
	$(BIN)/python benchmarks/cpu.py

table: $(VENV)/.ready ## Write the README's table from benchmarks/results
	$(BIN)/gradplan bench --table $(wildcard benchmarks/results/*.json)

aot: $(VENV)/.ready ## Compile every GPU kernel variant for sm_80, sm_90 and sm_100; needs no GPU
	$(BIN)/python -m gradplan.backends.gpu.aot

# On a GPU machine torch and Triton often belong to the system's Python: PYTHON, not the environment.
gpu: ## The tests that need a GPU
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -n $(GPU_WORKERS)

# All tools at once, each in parts: below the sanitizer it is the host that takes the time.
sanitize: ## compute-sanitizer over a reduced grid: memory, races, uninitialised reads; needs a GPU
	PYTHONPATH=src $(PYTHON) tools/sanitize.py --compile $(ARCH)
	PYTHONPATH=src $(PYTHON) tools/sanitize.py --parts $(SANITIZE_PARTS) \
	  $(if $(SANITIZE_S),--stop-after $(SANITIZE_S))

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(DEMO_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[bench]'
	@touch $@

clean: ## Remove environments and caches
	rm -rf $(VENV) $(DEMO_VENV) .pytest_cache .mypy_cache .ruff_cache build dist site *.png

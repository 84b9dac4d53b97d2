# Thin: an environment is set up once, then each target is one call. `make` alone lists them.
#
# LAB_ARGS, TEST_ARGS and BUILD_ARGS are passed on; BENCH names some of the benchmarks. PYTHON is
# another Python, PIP_ARGS goes to pip (another index, say), COURSE_VENV is where to set up.

PYTHON ?= python3
COURSE_VENV ?= .venv
BENCH ?= $(wildcard benchmarks/*.py)
BIN := $(COURSE_VENV)/bin
# .venv is 1.8 GiB with a CPU build of torch; pip unpacks and caches as much again on the way.
MIN_FREE_GIB ?= 4

.PHONY: help setup lab test build bench lock
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' Makefile

lab: $(COURSE_VENV)/.ready ## open the course in JupyterLab
	@$(BIN)/course lab $(LAB_ARGS)

setup: $(COURSE_VENV)/.ready ## only set up the environment

test: $(COURSE_VENV)/.ready-dev ## run all the tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(TEST_ARGS)

build: $(COURSE_VENV)/.ready ## build the notebooks from solutions/*.py
	@$(BIN)/course build $(BUILD_ARGS)

bench: $(COURSE_VENV)/.ready ## measure the figures in the README
	@for file in $(BENCH); do echo "$$file"; $(BIN)/python "$$file" || exit; done

# A stamp is written last: an interrupted set-up starts again, a finished one is not repeated.
$(COURSE_VENV)/.ready: pyproject.toml requirements.lock
	$(call set-up,.)
	@touch $@

$(COURSE_VENV)/.ready-dev: pyproject.toml requirements.lock
	$(call set-up,'.[dev]')
	@touch $(COURSE_VENV)/.ready $@

define set-up
@command -v $(PYTHON) > /dev/null || { echo "No '$(PYTHON)' on this machine: install Python 3.11 or newer, or name one with PYTHON=/path/to/python." >&2; exit 2; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1), and the course needs Python 3.11 or newer: install one, or name it with PYTHON=/path/to/python." >&2; exit 2; }
@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "'$(PYTHON)' cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt install python3-venv), then repeat the command." >&2; exit 2; }
@free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); test "$$free" -ge $(MIN_FREE_GIB) || { echo "Only $$free GiB of disk are free here, and the set-up needs $(MIN_FREE_GIB): free some, or move the course to another disk." >&2; exit 2; }
@echo "Setting up $(COURSE_VENV), once: this takes a few minutes."
@$(PYTHON) -m venv $(COURSE_VENV)
@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c requirements.lock -e $(1) || { echo "The set-up stopped, with $$(df -Pk . | awk 'NR == 2 {print int($$4 / 1024)}') MiB of disk free: see pip's last lines, then repeat the command; it goes on from there." >&2; exit 2; }
endef

lock: ## resolve every pin anew, in an environment of its own, into requirements.lock
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install $(PIP_ARGS) '.[dev,peers]'
	@{ echo "# Every pin, of the course and of its extras dev and peers. Made by: make lock"; \
	   echo "# pip reads it as constraints (-c): what a platform does not need is not installed there."; \
	   build/lock/bin/python -m pip freeze --all --exclude pip --exclude sharded-training-course \
	   | awk -F== '{gsub(/[-_.]+/, "-", $$1); sub(/\+.*/, "", $$2); print tolower($$1) "==" $$2}' \
	   | grep -v -E '^(cuda|nvidia|triton)' | LC_ALL=C sort; } > build/requirements.lock
	@mv build/requirements.lock requirements.lock
	@rm -rf build/lock

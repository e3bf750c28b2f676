# The commands people type. `make lab` and `make test` install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PIP := $(BIN)/pip --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: help lab lab-down test lint unit lab-suite bench lock clean

help:
	@echo "make lab       boot two virtual servers and deploy them"
	@echo "make lab-down  stop them"
	@echo "make test      everything that CI runs"
	@echo "make lint      style, types and import rules"
	@echo "make unit      tests that need no virtual server"
	@echo "make bench     how fast the agent of the running lab repairs, beside the same by hand"
	@echo "make lock      pin the dependencies again, by hash"

lab: $(STAMP)
	@$(BIN)/python -m lab up
	@$(BIN)/pyinfra -y inventories/lab.py deploy.py
	@$(BIN)/python -m lab status --ready

lab-down: $(STAMP)
	@$(BIN)/python -m lab down

test: lint unit lab-suite

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest tests/unit tests/sim tests/contract
	# By itself: pyinfra makes greenlets of all threads (gevent), and one that hangs in a read would hang them all.
	$(BIN)/pytest tests/deploy

lab-suite: $(STAMP)
	$(BIN)/pytest tests/lab

bench: $(STAMP)
	@$(BIN)/python -m bench.drift
	@$(BIN)/python -m bench.observe
	@$(BIN)/python -m bench.scale
	@$(BIN)/python -m bench.storm
	@$(BIN)/python -m bench.idle
	@$(BIN)/python -m bench.repair

lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra control --extra test --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/control.txt
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --python-version 3.10 --universal \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/node.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# ensurepip is what Debian's python3 lacks without python3-venv.
$(STAMP): requirements/control.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "installing python3-venv"; $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qqy python3-venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the control host's Python packages"
	@$(PIP) install --require-hashes -r requirements/control.txt
	@touch $@

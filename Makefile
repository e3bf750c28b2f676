# The commands people type. `make lab` and `make test` install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PIP := $(BIN)/pip --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: help check lab lab-cluster lab-down test lint unit lab-suite cluster-suite campaign molecule bench lock clean

help:
	@echo "make lab       boot two virtual servers and deploy them"
	@echo "make lab-cluster  the same as nodes of a real Kubernetes cluster, built from source at first"
	@echo "make lab-down  stop them"
	@echo "make check     style, types, import rules, unit and simulation tests: the loop while you work"
	@echo "make test      everything that CI runs"
	@echo "make lint      style, types and import rules"
	@echo "make unit      tests that need no virtual server"
	@echo "make campaign  long tests on virtual servers: faults, soak, kernel upgrades (hours)"
	@echo "make molecule  boot, deploy, deploy again (nothing changes), check, discard: the scenario of molecule/"
	@echo "make bench     how fast the agent of the running lab repairs, beside the same by hand"
	@echo "make lock      pin the dependencies again, by hash"

lab: $(STAMP)
	@$(BIN)/python -m lab up
	@$(BIN)/pyinfra -y inventories/lab.py deploy.py
	@$(BIN)/python -m lab status --ready

lab-cluster: $(STAMP)
	@$(BIN)/python -m lab up
	@$(BIN)/python -m lab cluster up
	@$(BIN)/pyinfra -y inventories/lab_cluster.py deploy.py
	@$(BIN)/python -m lab cluster join

lab-down: $(STAMP)
	@$(BIN)/python -m lab down

check: lint
	$(BIN)/pytest -q --numprocesses=logical --dist=worksteal tests/unit tests/sim

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
	$(BIN)/pytest -m "not campaign" tests/lab

cluster-suite: $(STAMP)
	$(BIN)/pytest -m "not campaign" tests/cluster

campaign: $(STAMP)
	$(BIN)/pytest -m campaign tests/lab tests/cluster

# Its playbooks call python, pyinfra and ansible by their names.
molecule: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/molecule test

bench: $(STAMP)
	@$(BIN)/python -m bench.drift
	@$(BIN)/python -m bench.observe
	@$(BIN)/python -m bench.scale
	@$(BIN)/python -m bench.storm
	@$(BIN)/python -m bench.idle
	@$(BIN)/python -m bench.repair
	@$(BIN)/python -m bench.deploy
	@$(BIN)/python -m bench.creation

lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra control --extra test --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/control.txt
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --python-version 3.10 --universal \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/node.txt

clean:
	rm -rf $(VENV) trackbed.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# ensurepip is what Debian's python3 lacks without python3-venv.
$(STAMP): requirements/control.txt pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "installing python3-venv"; $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qqy python3-venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the control host's Python packages"
	@$(PIP) install --require-hashes -r requirements/control.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

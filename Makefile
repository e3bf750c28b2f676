# The commands people type. `make lab` and `make test` install what they need.

# The control host's, if Trackbed runs on it. Rocky Linux 9 has a newer one beside it.
PYTHON ?= $(or $(shell for each in python3 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$each && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PIP := $(BIN)/pip --quiet --disable-pip-version-check
CONTROL := $(VENV)/.control
STAMP := $(VENV)/.installed
CAMPAIGN := campaign.xml
# The last result of each suite, for `make release`.
RESULTS := .results
# The tests start hundreds of Python processes: without compiled files each of them would compile the project again.
unexport PYTHONDONTWRITEBYTECODE
# Three processes a CPU, because many tests wait for the agent's own time limits.
PARALLEL := --numprocesses=$(shell expr 3 \* $$(nproc)) --maxprocesses=32 --dist=worksteal

.PHONY: help control chaos soak check lab lab-cluster lab-down test lint quick unit lab-suite cluster-suite campaign fuzz pythons audit sbom release molecule bench lock clean mutants docs

define HELP
To use it
  make lab          boot two virtual servers, and deploy to them
  make lab-cluster  the same, as nodes of a Kubernetes cluster that is built from source
  make lab-down     stop them
  make control      the control host's environment in .venv, for your own servers
To change it
  make check        style, types, import rules, quick tests: the loop while you work
  make test         everything that CI runs: lint, unit, lab-suite
  make docs         the documentation site, in site/; a broken link fails
  make lock         pin the newest versions of the dependencies, by hash
  make release      whether this commit can be released: what is missing first
Longer tests
  make cluster-suite, molecule        tests on the lab's cluster; molecule's scenario
  make pythons, audit, sbom           each Python from 3.10; known vulnerabilities (network); bill of materials
  make bench, mutants                 how fast it is; faults in the code that no test notices
  make fuzz SECONDS=60 SEED=1         every parser of foreign input
  make chaos, soak, campaign          random faults; eight hours of drift; drivers and upgrades (hours each)
endef
export HELP

help:
	@echo "$$HELP"

control: $(CONTROL)
	@$(BIN)/trackbed --version

lab: $(STAMP)
	@$(BIN)/python -m lab up
	@$(BIN)/pyinfra -y inventories/lab.py deploy.py || { $(BIN)/python -m lab status --ready; \
		echo "the deploy failed: its errors, above, say of each node what to do; then \`make lab\` goes on from here"; exit 1; } >&2
	@$(BIN)/python -m lab status --ready

lab-cluster: $(STAMP)
	@$(BIN)/python -m lab up
	@$(BIN)/python -m lab cluster up
	@$(BIN)/pyinfra -y inventories/lab_cluster.py deploy.py
	@$(BIN)/python -m lab cluster join
	@$(BIN)/pyinfra -y inventories/lab_cluster.py deploys/token.py

lab-down: $(STAMP)
	@$(BIN)/python -m lab down

check: lint quick

quick: $(STAMP)
	$(BIN)/pytest -q $(PARALLEL) -m "not slow" tests/unit tests/sim

test: lint unit lab-suite

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.shellcheck

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

unit: $(STAMP)
	$(BIN)/pytest --junitxml=$(RESULTS)/unit.xml $(PARALLEL) tests/unit tests/sim
	$(BIN)/pytest --junitxml=$(RESULTS)/contract.xml tests/contract
	# Many of its tests start pyinfra, which needs a CPU of its own.
	$(BIN)/pytest --junitxml=$(RESULTS)/deploy.xml --numprocesses=$(shell nproc) --dist=worksteal tests/deploy tests/zoo

lab-suite: $(STAMP)
	$(BIN)/pytest --junitxml=$(RESULTS)/lab.xml -m "not campaign" tests/lab

cluster-suite: $(STAMP)
	$(BIN)/pytest --junitxml=$(RESULTS)/cluster.xml -m "not campaign" tests/cluster

campaign: $(STAMP)
	$(MAKE) fuzz SECONDS=3600
	$(BIN)/pytest -m campaign --junitxml=$(CAMPAIGN) tests/lab tests/cluster; \
		result=$$?; $(BIN)/python -m handbook.campaign $(CAMPAIGN) && exit $$result

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos

soak: $(STAMP)
	$(BIN)/python -m tests.soak

# atheris is compiled code for some machines and Pythons only, so nothing but this needs it.
SECONDS ?= 60
SEED ?= 1
fuzz: $(STAMP)
	@$(PIP) install --require-hashes -r requirements/fuzz.txt
	@$(BIN)/python -m tests.fuzz all --seconds $(SECONDS) --seed $(SEED)

pythons: $(STAMP)
	@$(BIN)/python -m tests.pythons

audit: $(STAMP)
	$(BIN)/pip-audit --strict --disable-pip --require-hashes $(addprefix -r ,$(wildcard requirements/*.txt))

sbom: $(STAMP)
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible -o sbom.json requirements/node.txt

release: $(STAMP)
	@$(BIN)/python -m tests.release

# After an hour it is interrupted (124). The next call goes on from there.
mutants: $(STAMP)
	timeout --signal=INT 1h $(BIN)/mutmut run || test $$? = 124
	$(BIN)/python -m bench.mutants

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
	@$(BIN)/python -m bench.readiness
	@$(BIN)/python -m bench.boot
	@$(BIN)/python -m bench.deploy
	@$(BIN)/python -m bench.creation

lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra control --python-version 3.10 --universal \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/control.txt
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra control --extra test --python-version 3.11 \
		--constraint requirements/control.txt \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/test.txt
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --python-version 3.10 --universal \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/node.txt
	$(BIN)/uv pip compile --quiet --upgrade --group pull --python-version 3.10 --universal \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/pull.txt
	echo "atheris>=3" | $(BIN)/uv pip compile --quiet --upgrade - --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header -o requirements/fuzz.txt

clean:
	rm -rf $(VENV) site mutants $(CAMPAIGN) $(RESULTS) trackbed.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# ensurepip is what Debian's python3 lacks without python3-venv. pip is the last that venv makes: without it, it was interrupted.
$(CONTROL): requirements/control.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is missing or older than Python 3.10; install a newer one (Rocky Linux 9: dnf install python3.12)"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "installing python3-venv"; $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qqy python3-venv; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the control host's Python packages"
	@$(PIP) install --require-hashes -r requirements/control.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMP): requirements/test.txt $(CONTROL)
	@echo "installing the tests' Python packages"
	@$(PIP) install --require-hashes -r requirements/test.txt
	@touch $@

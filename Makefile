# `make demo` trains a model from a fresh checkout. It needs Python 3.11 with venv, g++ and make. Everything else is
# installed into .venv, which you need not activate. With Python 3.13, the newest versions go into .venv-current, and
# with Python 3.10, the oldest go into .venv-oldest.

PYTHON ?= python3.11
# The Python of each set of versions: constraints.txt, constraints-current.txt and constraints-oldest.txt.
PYTHON_OF := 3.11
PYTHON_OF-current := 3.13
PYTHON_OF-oldest := 3.10
# The set for this version of Python; if there is none, the pinned set, whose name is empty.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
SET := $(strip $(foreach set,-current -oldest,$(if $(filter $(PYTHON_OF$(set)),$(VERSION)),$(set))))
VENV := .venv$(SET)
CONSTRAINTS := constraints$(SET).txt
BIN := $(VENV)/bin
# Completed steps are recorded in the environment itself, so that removing it removes the records, too.
VENV_MADE := $(VENV)/.made
FIRST_PACKAGES := $(VENV)/.first-packages-installed
FIRST_RING := $(VENV)/.first-ring-trained
DEMO_PACKAGES := $(VENV)/.demo-packages-installed
PACKAGES_INSTALLED := $(VENV)/.packages-installed
HOROVOD_INSTALLED := $(VENV)/.horovod-installed
HOROVOD_FOR_DEMO := $(VENV)/.horovod-for-demo-installed
PEERS_INSTALLED := $(VENV)/.peers-installed
DOCS_PACKAGES := $(VENV)/.docs-packages-installed
RELEASE_PACKAGES := $(VENV)/.release-packages-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PANEL := extension/sparkring/views/panel
PANEL_PACKAGES := $(PANEL)/node_modules/.package-lock.json
# Build isolation is off, so that the package is built with the setuptools that is already in the environment.
INSTALL := $(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable
# pip compiles the packages that it installs, but not the sources of an editable one. Where Python may not write
# bytecode, every rank would compile them again.
COMPILE := $(BIN)/python -m compileall -q extension

# Triton comes with PyTorch's CUDA builds, and only GPUs need it. A process that imports Triton after TensorFlow 2.21
# crashes.
REMOVE_TRITON := $(if $(SET),$(PIP) uninstall --quiet --yes triton)
# mypy needs a newer typing_extensions than TensorFlow 2.13 allows, so `make check` is for the other sets.
EXTRAS := all,$(if $(filter -oldest,$(SET)),test,dev)

# watch.py LOG TITLE COMMAND… runs the command, and shows how long it takes or, if it fails, the lines of its log that
# say why.
WATCH := extension/sparkring/tools/watch.py

# Tests often wait for a process to start or end, so three workers keep two cores busy. WORKERS=… sets another number.
WORKERS := 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Two pips at a time would corrupt the environment, so -j is ignored.
.NOTPARALLEL:
.PHONY: help demo test test-all test-quick test-versions test-current test-oldest test-gpu check panel lab bench \
	bench-sets docs docs-site notebooks release env env-current env-oldest clean

help:
	@printf '%-18s %s\n' 'make demo' 'set everything up, train a small model, run notebooks/quickstart.ipynb, show the results'
	@printf '%-18s %s\n' 'make test' 'set everything up and test every behaviour: in kernels, a browser, local Spark, a cluster'
	@printf '%-18s %s\n' 'make test-all' 'run all tests: before a release, and after a change to what only this target tests'
	@printf '%-18s %s\n' 'make test-quick' 'run only the fast tests that need no kernel, browser or Spark'
	@printf '%-18s %s\n' 'make test-current' 'run the same tests as make test-all with the newest versions, on Python 3.13'
	@printf '%-18s %s\n' 'make test-versions' 'run the tests whose outcome can depend on the versions (PYTHON=… selects the set)'
	@printf '%-18s %s\n' 'make test-oldest' 'run the same tests as make test-versions with the oldest versions, on Python 3.10'
	@printf '%-18s %s\n' 'make test-gpu' 'build Horovod with NCCL and run the checks that need an NVIDIA GPU (PYTHON=… has PyTorch)'
	@printf '%-18s %s\n' 'make check' 'check style, types and import rules'
	@printf '%-18s %s\n' 'make panel' 'bundle the scripts and style sheet of the panel (needs node and npm)'
	@printf '%-18s %s\n' 'make lab' 'open JupyterLab on notebooks/'
	@printf '%-18s %s\n' 'make bench' 'compare sparkring with similar tools'
	@printf '%-18s %s\n' 'make bench-sets' 'run some benchmarks with the pinned and the newest versions'
	@printf '%-18s %s\n' 'make docs' 'rewrite docs/reference.md from the code'
	@printf '%-18s %s\n' 'make docs-site' 'build the documentation with the notebooks as web pages, in build/site (Python 3.11)'
	@printf '%-18s %s\n' 'make notebooks' 'run all notebooks and save them with their outputs'
	@printf '%-18s %s\n' 'make release' 'build and check the distributions, and print the version’s notes (REPOSITORY=… is needed; publishes nothing)'
	@printf '%-18s %s\n' 'make env' 'only set up the environment (PYTHON=… selects the Python: 3.11, 3.13 or 3.10)'
	@printf '%-18s %s\n' 'make env-current' 'set up the newest versions in .venv-current, on Python 3.13'
	@printf '%-18s %s\n' 'make env-oldest' 'set up the oldest versions in .venv-oldest, on Python 3.10'
	@printf '%-18s %s\n' 'make clean' 'remove files left by runs and tools (rm -r .venv .venv-* removes the environments)'

env: $(PACKAGES_INSTALLED) $(HOROVOD_INSTALLED)

# Building Horovod takes most of the time, so everything else comes first.
# The notebook's section on Horovod runs again if Horovod was not there when the whole notebook ran.
demo: $(FIRST_RING) quickstart $(HOROVOD_FOR_DEMO)
	@test $(HOROVOD_FOR_DEMO) -ot build/quickstart/outcome.json || $(BIN)/python notebooks/run_demo.py --tag horovod

.PHONY: quickstart
quickstart: $(DEMO_PACKAGES)
	@$(BIN)/python notebooks/run_demo.py
	@test -e $(HOROVOD_FOR_DEMO) || printf '\n%s\n%s\n\n' 'You can stop here with Ctrl-C: all but Horovod is ready.' \
		'Otherwise, Horovod is built now, which takes a few minutes, and runs the same net.'

# Left out are tests that are marked with `extended`: by five rules, which are in CONTRIBUTING.md.
test: env
	@$(PYTEST) tests -m 'not extended'

test-all: env
	@$(PYTEST) tests --pictures --hypothesis-profile thorough

test-quick: env
	@$(PYTEST) tests -m 'not (browser or kernel or cluster or spark or driver or slow)'

# The tests whose outcome can differ between sets: all tests in one process or in a kernel; tests in local ranks that
# are marked with `standalone`, because the launcher matters to them; and all tests that are marked with `versions`.
# Tests that take a long time, need Spark or a browser, or are extended run only if they are marked with `versions`.
TEST_VERSIONS := (not (browser or cluster or spark or driver or slow or ring) or (ring and standalone and not slow)) and not extended or versions
test-versions: env
	@$(PYTEST) tests -m '$(TEST_VERSIONS)'

# The targets below select a set by its name, and use the Python of this set unless the user sets PYTHON.
WITH = --no-print-directory SET=$(1) PYTHON=$(if $(filter file,$(origin PYTHON)),python$(PYTHON_OF$(1)),$(PYTHON))
env-current:
	@$(MAKE) $(call WITH,-current) env

env-oldest:
	@$(MAKE) $(call WITH,-oldest) env

test-current:
	@$(MAKE) $(call WITH,-current) test-all

test-oldest:
	@$(MAKE) $(call WITH,-oldest) test-versions

# The checks use the PyTorch that the machine has, with any Python from 3.10, so they have an environment of their own.
test-gpu:
	@$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) tests/with_gpu/run.py

check: $(PACKAGES_INSTALLED)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory check-panel; \
		else echo 'npm is not installed, so the panel’s bundle is not checked here; the tests check its digest.'; fi

.PHONY: check-panel
check-panel: $(PANEL_PACKAGES)
	@$(BIN)/python -m sparkring.views.page_constants
	@npm --prefix $(PANEL) run --silent check
	@npm --prefix $(PANEL) run --silent test

panel: $(PANEL_PACKAGES)
	@npm --prefix $(PANEL) run --silent build

$(PANEL_PACKAGES): $(PANEL)/package-lock.json
	@npm --prefix $(PANEL) ci --silent
	@touch $@

lab: env
	@$(BIN)/python -m jupyterlab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

bench: env $(PEERS_INSTALLED)
	@$(BIN)/python benchmarks/run.py

bench-sets: env env-current
	@.venv/bin/python benchmarks/run.py --sets --runs 3

docs: $(PACKAGES_INSTALLED)
	@$(BIN)/python docs/write_reference.py

# Warnings are errors, so a link that leads nowhere ends the build.
docs-site: $(DOCS_PACKAGES)
	@rm -rf build/site
	@$(BIN)/python -m sphinx --quiet --conf-dir docs --doctree-dir build/doctrees --fail-on-warning . build/site
	@echo 'The site is ready: open build/site/index.html in a browser.'

notebooks: env
	@$(BIN)/python notebooks/write_outputs.py

# The wheel is built from the source distribution, so this also checks that the latter is complete. What is committed is
# built, from a copy in which the README's links lead to the repository.
release: $(RELEASE_PACKAGES)
	@test -n '$(REPOSITORY)' || { \
		echo 'Say where the repository is: make release REPOSITORY=https://github.com/owner/sparkring' >&2; exit 1; }
	@rm -rf build/release dist && mkdir -p build/release
	@git archive HEAD | tar -x -C build/release
	@$(BIN)/python docs/for_an_index.py build/release '$(REPOSITORY)'
	@$(BIN)/python -m build --no-isolation --outdir dist build/release >$(VENV)/release.log 2>&1 || { tail -20 $(VENV)/release.log >&2; exit 1; }
	@$(BIN)/python -m twine check --strict dist/*
	@version=$$($(BIN)/python -c 'import sparkring; print(sparkring.__version__)'); \
		awk -v version=$$version '/^## / { on = $$2 == version } on { print; any = 1 } END { exit !any }' CHANGELOG.md || { \
		echo "CHANGELOG.md has no section for version $$version." >&2; exit 1; }

clean:
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path './.venv*' -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints -o -name spark-warehouse \
		-o -name metastore_db \) -prune -exec rm -rf {} +
	@find . -path './.venv*' -prune -o -name derby.log -exec rm -f {} +

$(VENV_MADE):
	@test "$(VERSION)" = "$(PYTHON_OF$(SET))" || { \
		echo "$(PYTHON) is not a Python $(PYTHON_OF$(SET)), which $(VENV) needs: install it, or select one with make PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) comes without venv: install it (Debian and Ubuntu: apt-get install python3-venv), then run make again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(WATCH) $(VENV)/pip.log 'Making $(VENV)' $(PIP) install --constraint $(CONSTRAINTS) --upgrade pip setuptools wheel
	@touch $@

SETUP := $(CONSTRAINTS) setup.cfg pyproject.toml

$(FIRST_PACKAGES): $(VENV_MADE) $(SETUP)
	@$(BIN)/python $(WATCH) $(VENV)/first-packages.log 'Installing PyTorch and sparkring' $(INSTALL) '.[torch]' scikit-learn
	@$(COMPILE)
	@touch $@

$(FIRST_RING): $(FIRST_PACKAGES)
	@$(BIN)/python notebooks/first_ring.py
	@touch $@

$(DEMO_PACKAGES): $(VENV_MADE) $(SETUP)
	@$(BIN)/python $(WATCH) $(VENV)/demo-packages.log 'Installing Spark and what the demo needs' $(INSTALL) '.[demo]'
	@$(REMOVE_TRITON)
	@$(COMPILE)
	@touch $@

# This installs all packages, including those of the first ring and the demo, so the steps that install only those are
# also marked as completed.
$(PACKAGES_INSTALLED): $(VENV_MADE) $(SETUP)
	@$(BIN)/python $(WATCH) $(VENV)/packages.log 'Installing sparkring and the packages that it works with (4 GB on disk)' \
		$(INSTALL) '.[$(EXTRAS)]'
	@# tf_keras is Keras 2 for Horovod. It requires the package tensorflow, which would overwrite
	@# tensorflow-cpu, so it is installed without its dependencies.
	@$(if $(filter -current,$(SET)),$(PIP) install --quiet --constraint $(CONSTRAINTS) --no-deps tf_keras)
	@$(REMOVE_TRITON)
	@$(COMPILE)
	@touch $(FIRST_PACKAGES) $(DEMO_PACKAGES) $@

$(PEERS_INSTALLED): $(PACKAGES_INSTALLED)
	@$(BIN)/python $(WATCH) $(VENV)/peers.log 'Installing the tools that sparkring is compared with' $(INSTALL) '.[bench]'
	@touch $@

$(DOCS_PACKAGES): $(VENV_MADE) $(SETUP)
	@$(BIN)/python $(WATCH) $(VENV)/docs-packages.log 'Installing what builds the site of the documentation' $(INSTALL) '.[docs]'
	@touch $@

$(RELEASE_PACKAGES): $(VENV_MADE) $(SETUP)
	@$(BIN)/python $(WATCH) $(VENV)/release-packages.log 'Installing what builds a release' $(INSTALL) '.[release]'
	@touch $@

# Horovod is built for the frameworks that are installed: for the demo, PyTorch; for everything else, TensorFlow, too.
$(HOROVOD_FOR_DEMO): $(DEMO_PACKAGES)
	@$(BIN)/sparkring-build-horovod --install
	@touch $@

$(HOROVOD_INSTALLED): $(PACKAGES_INSTALLED) extension/sparkring/tools/build_horovod.py $(wildcard extension/sparkring/tools/horovod_build/*.py)
	@$(BIN)/sparkring-build-horovod --install
	@touch $(HOROVOD_FOR_DEMO) $@

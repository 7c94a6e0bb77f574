# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PINNED := pyproject.toml constraints.txt deploy/requirements.py deploy/cuda12.txt deploy/cuda13.txt
COMMA := ,
# Processes that test side by side. Most tests start others themselves: more workers want more than a core each.
WORKERS ?= 2
MINUTES ?= 30

# Which CUDA torch and DALI are for: 12, 13, 12+13 (DALI for 12, torch for 13), or CPU=1 for a torch without CUDA.
# The choice is made with the environment, and later commands follow it: docs/how-to/install.md.
CUDA ?=
CPU ?=
# PyPI has no CPU-only torch for x86-64 Linux: it comes from PyTorch's own index, or a mirror of it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# An environment that does not say its choice is from before there was one.
MADE := $(or $(shell cat $(VENV)/.cuda 2>/dev/null),$(if $(wildcard $(VENV)/.installed-*),12+13))
CHOICE := $(or $(if $(filter-out 0,$(CPU)),none,$(CUDA)),$(MADE),12)
# GB on the disk, measured for `make demo`; the packages of the tests are 0.6 GB more.
SIZE := $(if $(filter none,$(CHOICE)),2.2,$(if $(filter 12,$(CHOICE)),8.8,$(if $(filter 13,$(CHOICE)),6.7,7.1)))
ifeq ($(filter 12 13 12+13 none,$(CHOICE)),)
  $(error CUDA must be 12, 13 or 12+13, got '$(CUDA)'; CPU=1 is for a torch without CUDA)
endif
ifneq ($(filter-out $(CHOICE),$(MADE)),)
  $(error $(VENV) was made for CUDA=$(MADE), not CUDA=$(CHOICE): 'make clean' first, or name another environment with VENV=)
endif

# Programs of the system that some tests run, and Debian's packages of them: a browser opens our pages, jpegtran makes
# photos baseline. Tests whose program is not there are skipped.
SYSTEM_PROGRAMS := chromium chromedriver jpegtran
SYSTEM_PACKAGES := chromium chromium-driver libjpeg-turbo-progs

# Object stores that some tests talk to, by Go and npm, for the tests alone: an S3 server and Microsoft's emulator of Azure.
SERVERS := .servers
VERSITYGW := github.com/versity/versitygw/cmd/versitygw@v1.8.0
AZURITE := azurite@3.37.0

.PHONY: test-servers system-tools demo test nightly real integrations integrations-composer fuzz models check reference constraints figures clean

demo: $(VENV)/.installed-demo  ## the main job, end to end, on real photos
	$(BIN)/dali-pipes demo

# A file's tests stay together, with what they share. Files in their order: the many short ones come last, and no worker
# is left alone with a long one.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Examples of docstrings and pages are a run of their own; peers whose packages are not here have no examples to run.
test: $(VENV)/.installed-dev  ## what a change must pass
	$(PYTEST) -m 'not nightly' --ignore tests/docs
	$(PYTEST) --doctest-modules --doctest-ignore-import-errors dali_pipes prep bench examples --ignore examples/trainers tests/docs

nightly: test integrations integrations-composer models fuzz  ## all there is; models and fuzz for MINUTES each
	$(PYTEST) -m nightly

integrations: $(VENV)/.installed-integrations  ## other people's trainers, on 1 and 2 processes
	REQUIRE_TRAINERS=1 $(PYTEST) -m 'not nightly' tests/trainers

integrations-composer: .venv-composer/.installed  ## MosaicML Composer, which wants an older torch
	.venv-composer/bin/python -m pytest tests/trainers/test_composer.py

# Ends well in any case: what is missing costs the tests that want it, and no others.
system-tools:  ## chromium and jpegtran by apt, where that is possible; some 0.4 GB
	@missing=; for program in $(SYSTEM_PROGRAMS); do command -v $$program > /dev/null || missing="$$missing $$program"; done; \
	skipped="tests that want$$missing are skipped"; \
	if [ -z "$$missing" ]; then echo 'there already: $(SYSTEM_PROGRAMS)'; \
	elif ! command -v apt-get > /dev/null; then echo "no apt-get: install$$missing by yourself; until then $$skipped"; \
	elif [ "$$(id -u)" != 0 ]; then echo "not root: sudo make system-tools; until then $$skipped"; \
	elif apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SYSTEM_PACKAGES); \
	then echo 'installed: $(SYSTEM_PACKAGES)'; \
	else echo "apt-get failed, see above: $$skipped"; fi

# Ends well in any case, as system-tools.
test-servers:  ## an S3 server by Go and an Azure server by npm into .servers; some 0.5 GB and three minutes
	@if [ -x $(SERVERS)/bin/versitygw ]; then echo 'there already: versitygw'; \
	elif ! command -v go > /dev/null; then echo 'no go: tests that want an S3 server are skipped'; \
	elif GOBIN="$(CURDIR)/$(SERVERS)/bin" go install $(VERSITYGW); then echo 'installed: $(VERSITYGW)'; \
	else echo 'go install failed, see above: tests that want an S3 server are skipped'; fi
	@if [ -x $(SERVERS)/node_modules/.bin/azurite-blob ]; then echo 'there already: azurite'; \
	elif ! command -v npm > /dev/null; then echo 'no npm: tests that want an Azure server are skipped'; \
	elif npm install --silent --no-audit --no-fund --no-save --prefix $(SERVERS) $(AZURITE); then echo 'installed: $(AZURITE)'; \
	else echo 'npm install failed, see above: tests that want an Azure server are skipped'; fi

real: $(VENV)/.installed-dev  ## image, compose, pods and Slurm on real engines; by root with apt, some 40 GB and 40 minutes
	REAL=1 $(BIN)/python -m pytest --timeout 7200 tests/real

fuzz: $(VENV)/.installed-dev  ## broken files and messages, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

models: $(VENV)/.installed-dev  ## random draws against independent models of what the documents promise, for MINUTES
	$(BIN)/python -m tests.models --minutes $(MINUTES)

check: $(VENV)/.installed-dev  ## format, lint, types, by pre-commit; git add new files first
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

reference: $(VENV)/.installed-dev  ## docs/reference from docstrings and --help; pictures
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_pictures.py

# Peers that want older versions of what we have are in an environment of their own, and so is torch; the rest comes from
# $(VENV).
PEERS := litdata,mosaic,energon,s3torchconnector
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
figures: .venv-figures/.installed test-servers  ## the figures of README and docs anew, at this commit, of the photos in PETS; three to six hours on a quiet machine
	.venv-figures/bin/python docs/make_figures.py --pets "$(PETS)"

.venv-figures/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv .venv-figures
	($(BIN)/python $(SITE); echo '$(CURDIR)') > "$$(.venv-figures/bin/python $(SITE))/behind.pth"
	$(BIN)/python deploy/requirements.py --cuda $(CHOICE) --extras $(PEERS) > .venv-figures/requirements.txt
	grep -E '^torch(vision)?==' constraints.txt >> .venv-figures/requirements.txt  # the newest, also where CUDA=12 has an older one
	.venv-figures/bin/python -m pip install --disable-pip-version-check --quiet --requirement .venv-figures/requirements.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "error: Python 3.11 to 3.13 needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); pass PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

REACH = $(BIN)/python -m pip index versions torch --index-url $(TORCH_CPU_INDEX) --retries 1
NO_REACH = error: CPU=1 takes torch from $(TORCH_CPU_INDEX), which does not answer. Name a mirror with TORCH_CPU_INDEX=URL, or \
  take the build for CUDA (9 GB), which runs without a GPU, too: make clean; make $(MAKECMDGOALS)

# What the choice takes, by pip with its progress, then this checkout. Without --no-deps it would bring its own DALI.
define install
	@echo 'Installs at least $(SIZE) GB into $(VENV): CUDA=$(CHOICE), extras $(1).'
	@$(if $(filter none,$(CHOICE)),,echo 'Most of it is torch with its CUDA libraries; without a GPU, CPU=1 makes it 2.2 GB: make $(MAKECMDGOALS) CPU=1')
	@$(BIN)/python deploy/requirements.py --cuda $(CHOICE) --extras $(1) > $(VENV)/requirements.txt
	@$(BIN)/python deploy/requirements.py --cuda $(CHOICE) --pins > $(VENV)/pins.txt
	@$(if $(filter none,$(CHOICE)),$(REACH) > /dev/null 2>&1 || { echo '$(NO_REACH)'; exit 1; })
	$(if $(filter none,$(CHOICE)),$(PIP) --no-deps --index-url $(TORCH_CPU_INDEX) -c $(VENV)/pins.txt torch torchvision)
	@$(if $(filter none,$(CHOICE)),echo none > $(VENV)/.cuda)
	$(PIP) -c $(VENV)/pins.txt -r $(VENV)/requirements.txt
	@echo $(CHOICE) > $(VENV)/.cuda
	$(PIP) --quiet --no-deps --editable .
	@touch $@
endef

$(VENV)/.installed-demo: $(PINNED) | $(BIN)/python
	$(call install,demo$(COMMA)bench)

$(VENV)/.installed-dev: $(PINNED) | $(BIN)/python
	$(call install,dev)
	@touch $(VENV)/.installed-demo

$(VENV)/.installed-integrations: $(PINNED) | $(BIN)/python
	$(call install,dev$(COMMA)integrations)
	@touch $(VENV)/.installed-dev $(VENV)/.installed-demo

.venv-composer/.installed: tests/trainers/composer.txt
	$(PYTHON) -m venv .venv-composer
	.venv-composer/bin/python -m pip install --quiet --requirement tests/trainers/composer.txt
	.venv-composer/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

UV := uv pip compile --quiet --no-emit-index-url --no-header --no-annotate --python-version 3.11
EXTRAS := dev integrations kuberay

constraints:  ## pin the newest versions that fit, with markers for each Python, and their hashes; needs uv
	$(UV) pyproject.toml $(EXTRAS:%=--extra %) --universal --upgrade -o constraints.txt
	$(UV) constraints.txt deploy/cuda13.txt --universal --no-deps --generate-hashes -o deploy/hashes.txt
	$(PYTHON) deploy/requirements.py --cuda 12 --pins | $(UV) deploy/cuda12.txt -c - --python-platform x86_64-manylinux_2_28 \
	  --generate-hashes >> deploy/hashes.txt

clean:
	rm -rf $(VENV) .venv-composer .venv-figures .figures demo-out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

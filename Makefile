# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that test side by side. Most tests start others themselves: more workers want more than a core each.
WORKERS ?= 2
MINUTES ?= 30

.PHONY: demo test fuzz check reference constraints clean

demo: $(VENV)/.installed-demo  ## the main job, end to end, on real photos
	$(BIN)/dali-pipes demo

# A file's tests stay together, with what they share. Files in their order: the many short ones come last, and no worker
# is left alone with a long one.
test: $(VENV)/.installed-dev  ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

fuzz: $(VENV)/.installed-dev  ## broken files and messages, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

check: $(VENV)/.installed-dev  ## format, lint, types: what pre-commit runs on each commit
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

reference: $(VENV)/.installed-dev  ## docs/reference from docstrings and --help; pictures
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_pictures.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "error: Python 3.11 to 3.13 needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); pass PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,bench]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed-demo

constraints:  ## pin the newest versions that fit, with markers for each Python; needs uv
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
	  --no-emit-index-url --no-header --no-annotate -o constraints.txt

clean:
	rm -rf $(VENV) demo-out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make quickstart and make test each work alone on a fresh machine with Python 3.11 or newer, make and git.
# PYTHON names the interpreter, PIP_ARGS is passed to pip (for example --index-url for a CUDA build of torch).
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PAGES := quickstart
SHIPPED = $(shell $(BIN)/python -m graphtune.data)

.PHONY: help quickstart test test-browser lint clean

help:
	@echo "make quickstart   install, sweep a tiny model on the CPU, recommend for an 80 GB card"
	@echo "make test         install and run the tests that need no GPU and no browser"
	@echo "make test-browser look at the pages in headless Chromium (needs chromium and chromedriver)"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove .venv and the quickstart pages"

quickstart: $(VENV)/installed-run
	$(BIN)/graphtune sweep recipes/quickstart.yaml --device cpu --out $(PAGES)/cpu --fresh
	$(BIN)/graphtune recommend $(SHIPPED) --gpu-mem 80
	$(BIN)/graphtune report $(SHIPPED) -o $(PAGES)/llama-3.1-8b-nvidia-h200.html
	@echo
	@echo "The CPU sweep (a check of the machinery, not advice): $(PAGES)/cpu/report.html"
	@echo "Llama 3.1 8B as measured on an H200:                  $(PAGES)/llama-3.1-8b-nvidia-h200.html"

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not gpu and not browser"

test-browser: $(VENV)/installed-browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

lint: $(VENV)/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(PAGES)

# One virtual environment; a stamp per set of extras, so that nothing is installed twice.
EXTRAS_run :=
EXTRAS_test := [test]
EXTRAS_dev := [test,dev]
EXTRAS_browser := [test,browser]

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphtune needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.$(EXTRAS_$*)'
	@touch $@

# Each target sets up .venv on first use: PYTHON=python3.12 make test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint clean

help:
	@echo "make demo   write some Shakespeare with the GPT-2 that ships in this repository"
	@echo "make test   run the tests"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove $(VENV) and build/"

demo: $(VENV)/.ready
	$(BIN)/gptile generate "ROMEO:" --max-new-tokens 120 --seed 1

# One thread a process: the processes share the cores.
test: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

# mypy sees the package as it installs, under the name gptile.
lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/mypy -p gptile

clean:
	rm -rf $(VENV) build

$(VENV)/.ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(VENV)/.ready-test: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[test]'
	touch $@

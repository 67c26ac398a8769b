# make demo: train a small DeepSeek-style model on a 2x4 grid on this machine's CPU
# make test: lint, types and the test suite
# make bench: the scale and speed benchmarks and the cluster lab (the lab needs root)

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

# the first Python of at least 3.12 that really starts (a pyenv shim may exist and not)
PYTHON := $(shell for python in python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := .venv/bin
# releases of Megatron beside the installed one, for the smoke tests
OTHER_MEGATRON := 0.17.1 0.18.2

demo: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/cpu_deepseek.sh

test: lint $(OTHER_MEGATRON:%=.wheels/%/ready)
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/placement_scale.py
	$(BIN)/python benchmarks/model_speed.py
	$(BIN)/python benchmarks/grid_placement.py
	$(BIN)/python benchmarks/dispatcher_lab.py moe

.venv/ready: pyproject.toml constraints.txt
ifeq ($(PYTHON),)
	@echo "piper_megatron needs Python 3.12 or newer with venv; install it (Debian: apt install" \
	"python3 python3-venv, or pyenv install 3.12) so that python3.12, python3.13 or python3 runs it" >&2
	@exit 1
endif
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev]'
	touch $@

.wheels/%/ready: .venv/ready
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) megatron-core==$*
	touch $@

clean:
	rm -rf .venv .wheels out

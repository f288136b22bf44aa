# make demo, make test: both set up .venv first. MODEL=/path/to/checkpoint, PYTHON=python3.12, ARGS="-k norm" are yours.

PYTHON ?= python3
KERNELS ?= $(patsubst %/build.toml,%,$(wildcard */build.toml))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
comma := ,
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# kernels with bytecode beside them are not published; elsewhere it is written, or each process would compile torch anew
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode $(BIN)/python -m pytest
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

# the newest supported release of transformers, which takes releases of kernels that the index may not have
NEXT := transformers==5.24.0

.PHONY: help demo test test-slow test-distributed test-next test-variants test-faults benchmark estimate lint build docs site publish release clean

help:
	@echo "make demo        run models with kernels and compare them with their originals [MODEL=/path/to/checkpoint ARGS=--trust-remote-code]"
	@echo "make test        before a change lands: the tests [ARGS=tests/integration/swaps/loss]"
	@echo "make test-slow   before a release: all of them, with those on several devices and those that take minutes [ARGS=...]"
	@echo "make test-distributed   after sharding, heads or linear layers changed: the tests on several devices, one by one"
	@echo "make test-next   before a release: make test and make test-distributed with the newest transformers; says what was not run"
	@echo "make test-variants   before a kernel is published: each strict variant on the releases that it names [PAIRS=\"2.6.0 2.8.0=2.8.0.post5\"]"
	@echo "make test-faults   after tests of kernels changed: plant faults of one per cent, and say which test sees which [ARGS=RMSNorm]"
	@echo "make benchmark   how long the host is busy with forwards, imports, models and commands, ours and others'"
	@echo "make estimate    fit the estimate of time to what others measured, and say how far it is off [REPORT=times.json]"
	@echo "make lint        ruff, mypy and the order of imports"
	@echo "make build       write the build/ folders of the kernel repositories anew"
	@echo "make docs        write the generated parts of the documents anew"
	@echo "make site        all pages in both languages, and a reference of the public names, as HTML into site/html"
	@echo "make publish     publish the kernel repositories to the Hub [KERNELS=RMSNorm ARGS=--dry-run]"
	@echo "make release     build the package twice, and try both files in empty environments [PYTHONS=\"python3.10 python3.12\"]"
	@echo "make clean       remove .venv"

demo: build
	@$(BIN)/kernels-ext-npu demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(READY)
	$(PYTEST) $(PARALLEL) -m "not long and not distributed" $(ARGS)

test-slow: $(READY)
	$(PYTEST) $(PARALLEL) $(ARGS)

# one test after the other: each starts processes that run in parallel
test-distributed: $(READY)
	$(PYTEST) -m "not long" tests/distributed $(ARGS)

# a copy of .venv with $(NEXT), which takes kernels from 0.18.2 on and peft from 0.22: there kernels 0.17.2 and peft
# 0.21.2 are let in
test-next: $(READY) $(VENV)-next/ready
	$(subst $(VENV),$(VENV)-next,$(PYTEST)) $(PARALLEL) -m "not long and not distributed" $(ARGS)
	$(if $(ARGS),,$(subst $(VENV),$(VENV)-next,$(PYTEST)) -m "not long" tests/distributed)
	@echo "Not run with $(NEXT):"
	@echo "  kernels 0.18 and peft 0.22, which it wants: the index has neither; kernels 0.17.2 and peft 0.21.2 were let in"
	@echo "  kernels from the Hub: mappings of fla version 2 and mamba version 5"
	@echo "  llama4 with pictures: its forward in transformers 5.24.0 raises, with kernels and without"
	@echo "  of expert parallelism, DeepGEMM's exchange, which is for CUDA"
	@echo "  what test-slow and test-variants run beside this$(if $(ARGS),$(comma) and all that is not among $(ARGS))"

$(VENV)-next/ready: $(READY) Makefile
	rm -rf $(VENV)-next
	cp -al $(VENV) $(VENV)-next
	$(VENV)-next/bin/python -m pip install -q --disable-pip-version-check --no-deps $(NEXT)
	cd $(VENV)-next/lib/python3*/site-packages/transformers && \
		sed -i 's/^KERNELS_MIN_VERSION = .*/KERNELS_MIN_VERSION = "0.17.2"/' utils/import_utils.py && \
		sed -i 's/^MIN_PEFT_VERSION = .*/MIN_PEFT_VERSION = "0.21.2"/' integrations/peft.py
	@touch $@

# aarch64 wheels, under qemu where this machine is another one; they stay in a cache
test-variants: $(READY)
	@$(BIN)/python scripts/prove.py --pairs "$(PAIRS)" $(ARGS)

# in a copy of the tree; some ten seconds a fault
test-faults: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode $(BIN)/python scripts/faults.py $(ARGS)

# from the root: it shares its models with the tests
benchmark: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python scripts/benchmark.py

# with a report of a card: REPORT=times.json
estimate: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/scripts $(BIN)/python scripts/estimate.py $(if $(REPORT),--report $(REPORT))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(subst $() ,:,$(wildcard */torch-ext)) $(BIN)/lint-imports

build: $(READY)
	@$(BIN)/python scripts/build.py

docs: $(READY) $(VENV)-next/ready
	@$(BIN)/python scripts/docs.py
	@$(VENV)-next/bin/python scripts/docs.py

site: $(READY)
	@$(BIN)/sphinx-build -qW -c docs -d site/doctrees . site/html
	@echo "wrote site/html/index.html"

publish: build
	@for kernel in $(KERNELS); do $(BIN)/python scripts/publish.py $$kernel $(ARGS) || exit; done

release: $(READY)
	@$(BIN)/python scripts/release.py --pythons "$(or $(PYTHONS),$(PYTHON))" $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-next

# Where the index at hand has no CPU build of torch, PyTorch's own has.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 15) else "Python 3.10 to 3.14 is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, torch_npu, transformers and tools into $(VENV): some minutes and 2 GB"
	@$(BIN)/pip install -q --disable-pip-version-check "$$(grep '^torch==' requirements.txt)" 2>/dev/null || \
		$(BIN)/pip install -q --disable-pip-version-check "$$(grep '^torch==' requirements.txt)" --index-url $(TORCH_CPU_INDEX)
	$(BIN)/pip install -q --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

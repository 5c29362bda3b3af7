# Every target makes its own environment in .venv; nothing else has to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
NEEDED := .venv/.needed
BASE := .venv/.base
READY := .venv/.ready
DOCS := .venv/.docs
TORCH := .venv/.torch
# One version of each package for all Pythons and platforms where that is possible, so that others install what was tested.
RESOLVE = $(BIN)/uv pip compile --quiet --upgrade --universal --fork-strategy fewest --python-version 3.11 \
	--generate-hashes --no-config --default-index https://pypi.org/simple --custom-compile-command "make lock"
# uv installs the same files in a tenth of pip's time. pip does it where uv does not reach the registry: uv does not read
# the settings of pip, in which a mirror may be named.
INSTALL = $(BIN)/uv pip install --quiet --no-config --python $(1) $(2) || $(1) -m pip install $(PIP) $(2)
PIP := --quiet --disable-pip-version-check
# The tests of a file stay together, as they share what they set up.
WORKERS = -n $(1) --dist loadfile --no-loadscope-reorder
# The tests compile their programs with less optimisation than users do (tests/conftest.py). These files run with XLA's own
# settings, because what they compare to the last bits is promised to users: the golden trace, and a federation and a cluster
# with the loop and the simulation.
USERS := $(patsubst %,tests/test_%.py,flare ray golden example)
OTHERS := tests $(USERS:%=--ignore=%)
# Tests start many processes, and each would compile all of our modules again if no bytecode were kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-torch examples check lint coverage bench claims pictures docs docs-check notebooks walk lock
.PHONY: package clean

demo: $(BASE)  ## train on non-i.i.d. MNIST with FBO-AggITD; results in runs/demo
	$(BIN)/fedbilevel run demo --out runs/demo --overwrite --or-digits

# Both parts run at the same time, as the first one waits for the processes of federations and clusters half of the time.
# What it says is shown at the end. The second part has a third worker, as it starts processes and waits for them, too.
test: $(READY)  ## all tests
	@XLA_FLAGS= $(BIN)/python -m pytest $(call WORKERS,2) $(USERS) > .venv/users.log 2>&1 & users=$$!; \
		trap "kill $$users" INT TERM; $(BIN)/python -m pytest $(call WORKERS,3) $(OTHERS); others=$$?; \
		wait $$users; users=$$?; cat .venv/users.log; exit $$((users + others))

test-fast: $(READY)  ## the tests without those that start federations and clusters, for daily work
	$(BIN)/python -m pytest $(call WORKERS,3) -m "not slow"

test-torch: $(TORCH)  ## the tests of PyTorch problems, which are skipped where PyTorch is not installed
	$(BIN)/python -m pytest $(call WORKERS,2) $(wildcard tests/test_torch_*.py)

examples: $(READY)  ## the scripts of examples/ with checks of their numbers; figures in runs/examples
	$(BIN)/python -m pytest examples

check: lint coverage  ## ruff, mypy strict, and the tests with their coverage

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(READY)
	XLA_FLAGS= $(BIN)/python -m pytest $(call WORKERS,3) --cov --cov-report= $(USERS)
	$(BIN)/python -m pytest $(call WORKERS,3) --cov --cov-append --cov-report=term --cov-fail-under=90 $(OTHERS)

bench: $(READY)  ## one outer iteration beside its floor, and beside PyTorch where that is installed
	$(BIN)/fedbilevel bench --out runs/bench

claims: $(READY)  ## what docs/claims.md claims, by its commands; CLAIMS=--quick for the tests alone
	$(BIN)/python benchmarks/claims.py $(CLAIMS)

pictures: $(BASE)  ## the pictures of the site that are made from the code, into docs/pictures
	$(BIN)/python website/pictures.py

docs: $(DOCS)  ## the site, in site/index.html; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-check: docs  ## the site in headless Chromium: widths, schemes, search, and that no request leaves it
	$(BIN)/python website/browse.py --shots runs/pages

notebooks: $(DOCS)  ## execute notebooks/*.py, and write them with their outputs as .ipynb
	$(BIN)/python website/notebooks.py

walk: package $(READY)  ## go through the tutorials by copy and paste, the first ones with nothing but the wheel installed
	dist/env/bin/python website/walk.py docs/start.md docs/learn/own-problem.md docs/learn/hypergradient.md
	$(BIN)/python website/walk.py docs/learn/choosing.md docs/learn/trust.md docs/howto/recipes.md docs/learn/federation.md

lock: $(READY)  ## resolve requirements/*.txt again: exact versions, and the SHA-256 of all of their files
	$(RESOLVE) --extra dev pyproject.toml requirements/build.in --output-file requirements/dev.txt
	$(RESOLVE) pyproject.toml --constraint requirements/dev.txt --output-file requirements/base.txt
	$(RESOLVE) --extra flare --extra privacy pyproject.toml --constraint requirements/dev.txt --output-file requirements/flare.txt
	$(RESOLVE) --extra docs pyproject.toml --constraint requirements/dev.txt --output-file requirements/docs.txt
	$(RESOLVE) requirements/build.in --constraint requirements/dev.txt --output-file requirements/build.txt

package: $(BASE)  ## build wheel and sdist into dist, and try the wheel in an environment with nothing else in it
	rm -rf dist && FEDBILEVEL_PURE=1 $(BIN)/hatchling build --directory dist
	$(PYTHON) -m venv dist/env
	$(call INSTALL,dist/env/bin/python,--require-hashes --no-deps --requirement requirements/base.txt)
	$(call INSTALL,dist/env/bin/python,--no-deps --no-index dist/fedbilevel-*.whl)
	cd dist && env/bin/python -m pip check && env/bin/fedbilevel run demo --set data.name=digits --set stop.rounds=50 --out demo

clean:
	rm -rf .venv runs dist site

# The locks are complete, so nothing is resolved (--no-deps): pip would look at newer releases for a requirement with extras,
# such as coverage[toml], and refuse them as not pinned. `pip check` tells whether a package is missing.
# The demo needs the base installation only: no Ray, no FLARE and no tools for tests.
$(NEEDED): pyproject.toml requirements/build.txt requirements/base.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedbilevel needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP) --require-hashes --no-deps --only-binary :all: --requirement requirements/build.txt
	$(call INSTALL,$(BIN)/python,--require-hashes --no-build-isolation --no-deps --requirement requirements/base.txt)
	@touch $@

# An installation compiles the files of C, so it is done again when one of them changes.
$(BASE): $(NEEDED) hatch_build.py $(wildcard src/fedbilevel/native/*.[ch])
	$(call INSTALL,$(BIN)/python,--no-deps --no-build-isolation --no-index --editable .)
	@touch $@

$(READY): $(BASE) examples/momentum/pyproject.toml requirements/dev.txt
	$(call INSTALL,$(BIN)/python,--require-hashes --no-build-isolation --no-deps --requirement requirements/dev.txt)
	$(call INSTALL,$(BIN)/python,--no-deps --no-build-isolation --no-index --editable examples/momentum)
	$(BIN)/python -m pip check || $(BIN)/python -m pip show --quiet torch
	@touch $@

# PyTorch is in no lock, because the newest build of a registry for Linux brings gigabytes of CUDA with it. pip looks where
# it is told to, also in folders of this machine. Without it everything else is tested. It brings sympy, which wants an older
# mpmath than the locks have; so after it `pip check` has something to say, and pip settles it here. torchax converts modules
# to JAX; it is small, and is asked for here because it is of use with PyTorch only.
$(TORCH): $(READY)
	@$(BIN)/python -m pip install $(PIP) 'torch==2.13.0' \
		&& { $(BIN)/python -m pip install $(PIP) --no-deps 'torchax==0.0.14.dev20261026' \
			|| echo "torchax cannot be had here: the tests of conversion are skipped"; } \
		&& touch $@ || echo "PyTorch 2.13.0 cannot be had here: the tests of PyTorch problems are skipped"

$(DOCS): $(BASE) requirements/docs.txt
	$(call INSTALL,$(BIN)/python,--require-hashes --no-build-isolation --no-deps --requirement requirements/docs.txt)
	@touch $@

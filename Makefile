# `make demo` and `make test` are all that a fresh machine needs: both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# of test-spark
SPARK ?= 3.5.7
SPARK_VENV := .venv-spark-$(SPARK)

JDK_HELP := Spark needs a JDK (or JRE) 17 or newer; Spark 4 itself names 17 and 21. Install one: \
	Debian, Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install java-17-openjdk-headless; \
	macOS: brew install openjdk@17. If it is not on the PATH, set JAVA_HOME.

.DEFAULT_GOAL := help
.PHONY: help setup demo stack demo-stack test test-spark faults bench bench-peers soak docs lint audit licenses clean jdk

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Create .venv and install the project into it, with what its tests need

$(INSTALLED): PACKAGES = '.[dev]'
$(SPARK_VENV)/.installed: PACKAGES = '.[test]' 'pyspark==$(SPARK)'

# Again only when pyproject.toml changes.
$(INSTALLED) $(SPARK_VENV)/.installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON). Install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and rowdelta needs Python 3.11 or newer. Install one, or name one" \
			"that is there: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module. Debian, Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing rowdelta and what it needs into $(@D); Spark alone is 450 MB, so the first time takes minutes"
	$(@D)/bin/python -m pip install --disable-pip-version-check --editable $(PACKAGES)
	@touch $@

jdk:
	@java=java; test -z "$$JAVA_HOME" || java="$$JAVA_HOME/bin/java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1); \
	if test -z "$$version"; then \
		echo "No Java found ($$java does not run). $(JDK_HELP)" >&2; exit 1; \
	elif test "$$version" -lt 17; then \
		echo "$$java is version $$version. $(JDK_HELP)" >&2; exit 1; \
	fi

demo: jdk setup ## A shop's changelog into Iceberg tables, with proof; in ./demo, no server needed
	$(BIN)/rowdelta demo --folder demo

stack: jdk setup ## Fetch what the servers of tests and demo-stack need, once: jars, Spark's packages
	$(BIN)/python -m tests.stack.prepare

demo-stack: jdk setup ## Postgres, MariaDB, Debezium, Kafka, S3 and a catalog without Docker; a bank's rows arrive in tables
	$(BIN)/python -m tests.stack.demo

# In three processes, each with a Spark of its own: two leave a third of two cores idle, since many tests wait.
TESTS = --numprocesses 3 --dist worksteal

test: jdk setup lint ## The whole suite, after lint
	$(BIN)/python -m pytest $(TESTS)

# Without what only other parts of the suite need, such as the engines of test_readers.py and a browser's driver: that is
# most of `dev`.
test-spark: jdk $(SPARK_VENV)/.installed ## A part of the suite on another Spark, such as SPARK=4.1.1
	$(SPARK_VENV)/bin/python -m pytest -m versions --ignore tests/sink/test_readers.py \
		--ignore tests/stack/test_replay.py --ignore tests/watch/test_page.py $(TESTS)

faults: jdk setup ## The tests of faults, with 50 kills; writes what they saw into docs/faults.md
	ROWDELTA_KILLS=50 $(BIN)/python -m pytest -m fault --write-faults

bench: jdk setup ## The benchmarks: rowdelta and MERGE INTO (Iceberg, Delta), mode append, decoding, the key index, many tables, the start
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.bench --only 'Delta|position v3, unpartitioned$$'
	$(BIN)/python -m benchmarks.bench --inserts-only --only '(append|position) v2, unpartitioned$$' --batches 10
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.keyindex
	$(BIN)/python -m benchmarks.many_tables --cases 1:1 300:300 --rows 10
	$(BIN)/python -m benchmarks.start

bench-peers: jdk setup ## rowdelta, MERGE INTO and Flink on the same changelogs, with what readers pay; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.peers

soak: jdk setup ## Ten thousand micro-batches with kills into three tables; writes docs/soak.md
	$(BIN)/python -m benchmarks.soak

# What mkdocs-material says of other tools is no warning about these pages.
docs: setup ## The pages under docs/ as a site in ./site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: setup ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

audit: setup ## Known vulnerabilities of the installed packages, where their list can be reached
	.ci/audit $(BIN)/python

licenses: setup ## Write docs/licenses.md: what is installed with rowdelta, and under which licenses
	$(BIN)/python -m tests.licenses

clean: ## Remove what the targets made, .venv* included; ./demo only if `rowdelta demo` made it
	rm -rf $(VENV) .venv-spark-* .venv-audit build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .services spark-warehouse site
	@test ! -f demo/.rowdelta-demo || rm -rf demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

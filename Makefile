# `make demo` and `make test` are all that a fresh machine needs: each installs what it needs into .venv first.

PYTHON ?= python3
# another Spark has an environment of its own
SPARK ?= 4.1.1
VENV := .venv$(addprefix -spark-,$(filter-out 4.1.1,$(SPARK)))
BIN := $(VENV)/bin

JDK_HELP := Spark needs a JDK (or JRE) 17 or newer; Spark 4 itself names 17 and 21. Install one: \
	Debian, Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install java-17-openjdk-headless; \
	macOS: brew install openjdk@17. If it is not on the PATH, set JAVA_HOME.

.DEFAULT_GOAL := help
# an extra of pyproject.toml, for .ci/run
.with-%: $(VENV)/.with-% ;

.PHONY: help setup demo demo-database stack demo-stack test test-all test-nightly versions faults bench bench-peers soak soak-day docs lint audit licenses clean jdk

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.with-test ## Create .venv and install the project into it, with what `make test` needs

# Again only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
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
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing rowdelta and what it needs into $(VENV); Spark alone is 450 MB, so the first time takes minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --editable . pyspark==$(SPARK)
	@touch $@

# with an extra of pyproject.toml
$(VENV)/.with-%: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[$*]' pyspark==$(SPARK)
	@touch $@

jdk:
	@java=java; test -z "$$JAVA_HOME" || java="$$JAVA_HOME/bin/java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1); \
	if test -z "$$version"; then \
		echo "No Java found ($$java does not run). $(JDK_HELP)" >&2; exit 1; \
	elif test "$$version" -lt 17; then \
		echo "$$java is version $$version. $(JDK_HELP)" >&2; exit 1; \
	fi

demo: jdk $(VENV)/.installed ## A shop's changelog into Iceberg tables, with proof; in ./demo, no server needed
	$(BIN)/rowdelta demo --folder demo

stack: jdk setup ## Fetch what the servers of tests and demo-stack need, once: jars, Spark's packages
	$(BIN)/python -m tests.stack.prepare

demo-database: jdk setup ## A Postgres under load is mirrored into Iceberg and Delta, with proof; no Kafka, no Docker
	$(BIN)/python -m tests.stack.demo_database

demo-stack: jdk setup ## Postgres, MariaDB, Debezium, Kafka, S3 and a catalog without Docker; a bank's rows arrive in tables
	$(BIN)/python -m tests.stack.demo

# In three processes, each with a Spark of its own: two leave a third of two cores idle, since many tests wait.
# A failure is shown at once: a run that is stopped from outside says what failed until then.
TESTS = --numprocesses 3 --dist worksteal --instafail
PYTEST = $(BIN)/python -m pytest $(TESTS)
# CI's: what to do about tests that failed
AGAIN ?=

test: jdk setup ## The whole promise once: formats, writers, key index, and a row's way through Spark, Kafka and real tables
	$(PYTEST) --tier test $(AGAIN)

test-all: jdk $(VENV)/.with-dev lint ## The rest: all combinations, processes, faults, servers, readers, a story on the oldest Spark
	$(PYTEST) --tier all $(AGAIN)
	$(MAKE) versions SPARK=3.5.7

test-nightly: jdk $(VENV)/.with-dev ## What takes long, and what a change of certain files alone can break (CONTRIBUTING.md)
	ROWDELTA_KILLS=50 $(PYTEST) --tier nightly $(AGAIN)
	$(MAKE) versions SPARK=3.5.7 VERSIONS=versions
	$(MAKE) versions SPARK=4.0.2 VERSIONS=versions
	$(MAKE) versions SPARK=4.2.0 VERSIONS='versions tests/delta'

# Without what only other parts of the suite need, such as the engines of test_readers.py.
VERSIONS = versions --tier test
versions: jdk setup ## Tests on another Spark, such as SPARK=4.0.2
	$(PYTEST) -m $(VERSIONS) $(AGAIN)

faults: jdk $(VENV)/.with-dev ## The tests of faults, with 50 kills; writes what they saw into docs/faults.md
	ROWDELTA_KILLS=50 $(BIN)/python -m pytest -m fault --write-faults

bench: jdk $(VENV)/.with-dev ## The benchmarks: rowdelta and MERGE INTO (Iceberg, Delta), mode append, order and history, decoding, the key index, many tables, the start
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.bench --only 'Delta|position v3, unpartitioned$$'
	$(BIN)/python -m benchmarks.bench --inserts-only --only '(append|position) v2, unpartitioned$$' --batches 10
	$(BIN)/python -m benchmarks.versions --rows 2000000 10000000
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.keyindex
	$(BIN)/python -m benchmarks.many_tables --cases 1:1 300:300 --rows 10
	$(BIN)/python -m benchmarks.start

bench-peers: jdk $(VENV)/.with-dev ## rowdelta, MERGE INTO and Flink on the same changelogs, with what readers pay; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.peers --scale large --only '(skewed|uniform), not'

soak: jdk $(VENV)/.with-dev ## Ten thousand micro-batches with kills into three tables; writes docs/soak.md
	$(BIN)/python -m benchmarks.soak

soak-day: jdk $(VENV)/.with-dev ## A day of changes at an even pace into two tables that others read; writes docs/htap.md
	$(BIN)/python -m benchmarks.htap --seconds 86400

# What mkdocs-material says of other tools is no warning about these pages.
docs: $(VENV)/.with-dev ## The pages under docs/ as a site in ./site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.with-dev ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

audit: setup ## Known vulnerabilities of the installed packages, where their list can be reached
	.ci/audit $(BIN)/python

licenses: $(VENV)/.with-dev ## Write docs/licenses.md: what is installed with rowdelta, and under which licenses
	$(BIN)/python -m tests.test_licenses

clean: ## Remove what the targets made, .venv* included; ./demo and ./demo-database only if a demo made them
	rm -rf $(VENV) .venv-spark-* .venv-audit build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .services spark-warehouse site
	@for made in demo demo-database; do test ! -f $$made/.rowdelta-demo || rm -rf $$made; done
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

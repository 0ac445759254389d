# Every target sets up what it needs: a clean machine with git, Python (3.11 to 3.13), make and apt is enough.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := check
.PHONY: demo playground test check lint bench cover lock clean venv

BIN := .venv/bin

# Where it is set, every Airflow process compiles its modules anew: 2 to 3 s each.
unexport PYTHONDONTWRITEBYTECODE

# Suites against a real Slurm may not be skipped where Slurm can be installed: on CI, and where we are root and have apt.
ifneq (,$(filter true,$(CI))$(shell [ "$$(id -u)" = 0 ] && command -v apt-get))
REQUIRE := PROFSCHED_REQUIRE=slurm,airflow
endif

venv: ## the environment, from the lock
	@tools/bootstrap.sh

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house_rules
	$(BIN)/python -m tools.policy_reference --check

check: lint ## what a change must pass, without a cluster; under two minutes
	$(BIN)/pytest tests/unit

test: lint ## everything, on real clusters
	$(REQUIRE) $(BIN)/pytest tests

cover: venv ## branches of core, held at 100 %
	$(BIN)/pytest tests/unit --cov --cov-report=
	$(BIN)/coverage report --include='airflow_profsched/core/*' --fail-under=100

demo: venv ## a preempted training and an inference, on a Slurm of their own
	$(BIN)/python -m throwaway.demo

playground: venv ## the same Slurm and Airflow, kept up to try things out (docs/tutorial/first-dag.md)
	$(BIN)/python -m throwaway.playground

bench: venv ## writes benchmarks/results.json
	$(BIN)/python -m benchmarks

lock: venv ## pins the newest versions anew, as plain name==version lines
	$(BIN)/uv pip compile pyproject.toml requirements/dev.in --upgrade -q --no-annotate --no-header --no-emit-index-url \
		--python $(BIN)/python | grep -E '^[a-z0-9.-]+==[^ ;]+$$' > requirements/airflow-3.3.lock.new
	mv requirements/airflow-3.3.lock.new requirements/airflow-3.3.lock
	@tools/bootstrap.sh

clean: ## what make made in this checkout
	rm -rf .venv demo build dist htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

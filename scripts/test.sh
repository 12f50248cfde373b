#!/usr/bin/env bash
# Installs what is needed into .venv (made if absent), then runs ruff, mypy and pytest. Works from any directory.
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"

#!/usr/bin/env bash
# Installs what is needed into .venv (made if absent), then runs ruff, mypy and pytest, the last in two processes. Works
# from any directory.
#   scripts/test.sh [pytest arguments]     # -n 0: in one process, as --pdb and -s want it
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
. scripts/environment.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest -n 2 --dist worksteal --durations 10 "$@"

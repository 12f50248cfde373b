#!/usr/bin/env bash
# Installs what is needed into .venv (made if absent), then runs ruff, mypy and pytest, the last in two processes. Works
# from any directory.
#   scripts/test.sh [pytest arguments]           # -n 0: in one process, as --pdb and -s want it
#   scripts/test.sh --lowest [pytest arguments]  # pytest alone, in .venv-lowest: the lowest versions that are allowed
if [ "${1:-}" = --lowest ]; then
  lowest=yes
  shift
fi
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
. scripts/environment.sh

if [ -z "$lowest" ]; then  # versions of ruff format alike no more than versions of mypy know PyTorch's types alike
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
fi
"$venv/bin/python" -m pytest -n 2 --dist worksteal --durations 10 "$@"

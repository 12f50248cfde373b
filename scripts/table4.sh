#!/usr/bin/env bash
# Table 4: each method of Table 1 over six P_K, 46 runs; --short: 16 epochs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py table4 "$@"

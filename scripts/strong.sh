#!/usr/bin/env bash
# Three losses of Table 1 with 36 epochs, weight decay and averaged weights, 6 runs: not the paper's protocol.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py strong "$@"

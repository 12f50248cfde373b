#!/usr/bin/env bash
# Table 1's network in 16 epochs with other settings than the published ones, and with wrong labels, 30 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py scratch "$@"

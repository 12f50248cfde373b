#!/usr/bin/env bash
# Five epochs of a published row by the official loss, in mode sm and in fp32, 8 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py implementation "$@"

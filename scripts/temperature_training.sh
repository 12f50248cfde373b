#!/usr/bin/env bash
# Networks from scratch over inverse temperatures, 6 epochs, 122 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py temperature_training "$@"

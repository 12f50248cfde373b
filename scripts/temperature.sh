#!/usr/bin/env bash
# Linear classifiers over inverse temperatures, 55 commands: scripts/temperature.sh cifar100.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py temperature "$@"

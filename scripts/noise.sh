#!/usr/bin/env bash
# Losses compared on wrong labels: scripts/noise.sh heads.pt --human CIFAR-100_human.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py noise "$@"

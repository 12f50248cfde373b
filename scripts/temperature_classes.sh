#!/usr/bin/env bash
# The same with other numbers of classes and scores: scripts/temperature_classes.sh of_10.pt cifar100.pt of_1000.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py temperature_classes "$@"

#!/usr/bin/env bash
# Table 1: ResNet-18 from scratch on CIFAR-100, 20 runs; --short: 16 epochs, 30 runs. Flags: scripts/study.py --help.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py table1 "$@"

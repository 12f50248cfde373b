#!/usr/bin/env bash
# ResNet-18 from scratch with labels by people: scripts/noise_scratch.sh CIFAR-100_human.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py noise_scratch "$@"

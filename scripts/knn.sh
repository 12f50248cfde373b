#!/usr/bin/env bash
# The nearest-neighbour classifier with each relaxation: scripts/knn.sh [mnist fashion_mnist cifar10 digits FILE.pt ...]
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py knn "$@"

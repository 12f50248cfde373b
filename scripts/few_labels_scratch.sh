#!/usr/bin/env bash
# ResNet-18 on 5,000 images of CIFAR-100: scripts/few_labels_scratch.sh
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py few_labels_scratch "$@"

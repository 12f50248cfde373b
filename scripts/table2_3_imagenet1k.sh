#!/usr/bin/env bash
# Tables 2 and 3, ImageNet-1K: linear classifiers on published embeddings (11 GB), 20 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py table2_3_imagenet1k "$@"

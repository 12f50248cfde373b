#!/usr/bin/env bash
# Tables 2 and 3, ImageNet-21K-P: linear classifiers on published embeddings (50 GB), 20 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py table2_3_imagenet21k "$@"

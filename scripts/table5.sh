#!/usr/bin/env bash
# Table 5: linear classifiers on embeddings of two networks (11 and 14 GB), 12 runs.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py table5 "$@"

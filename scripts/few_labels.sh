#!/usr/bin/env bash
# Linear classifiers with few labels a class: scripts/few_labels.sh heads.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py few_labels "$@"

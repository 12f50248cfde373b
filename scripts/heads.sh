#!/usr/bin/env bash
# Linear classifiers on embeddings with chosen settings: scripts/heads.sh heads.pt [--methods all] [--name NAME]
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py heads "$@"

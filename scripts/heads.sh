#!/usr/bin/env bash
# Linear classifiers on embeddings with chosen settings: scripts/heads.sh trials longer finals -d heads.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/heads.py "$@"

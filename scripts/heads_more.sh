#!/usr/bin/env bash
# 30 more trials around the best of scripts/heads.sh, and ten seeds: scripts/heads_more.sh heads.pt [--name NAME]
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py heads_more "$@"

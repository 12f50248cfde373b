#!/usr/bin/env bash
# Losses compared on your own embeddings, each tuned: scripts/own_features.sh own.pt [--losses gce lapsum] [--num_valid N]
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py own_features "$@"

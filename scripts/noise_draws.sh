#!/usr/bin/env bash
# Wrong labels in six draws of each noise: scripts/noise_draws.sh heads.pt --human CIFAR-100_human.pt
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
exec .venv/bin/python scripts/study.py noise_draws "$@"

#!/usr/bin/env bash
# The rows that readers ask for first, in that order: Table 1 short, seeds 0 and 1 (what --short means: table1.sh);
# Table 4 short, seed 0, where rows that Table 1 has are recorded without training again; Table 1 short, seed 2; strong.sh,
# seed 0; the published 200 epochs of two rows; strong.sh, seed 1. At the lowest priority, so that it can run for days
# beside other work. Works from any directory; paths in arguments are relative to the repository.
#   scripts/evidence.sh --jobs 1 --threads 1 --data_dir FOLDER      # arguments as in table1.sh; a row per core without
#   scripts/evidence.sh --status                                    # where each row stands
# Ctrl-C, SIGTERM and kill -9 stop it at any moment, and the same call continues; SIGSTOP and SIGCONT hold it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || . scripts/environment.sh

rows() {
  local short1 short4 strong published
  short1=$(scripts/table1.sh --short --dry-run)
  short4=$(scripts/table4.sh --short --dry-run)
  strong=$(scripts/strong.sh --dry-run)
  published=$(scripts/table1.sh --dry-run)
  grep -- "--seed 0 " <<< "$short1"
  grep -- "--seed 1 " <<< "$short1"
  grep -- "--seed 0 " <<< "$short4"
  grep -- "--seed 2 " <<< "$short1"
  grep -- "--seed 0 " <<< "$strong"
  grep -- "--method softmax_cross_entropy .*--seed 0 " <<< "$published"
  grep -- "--method splitter_selection .*--p_k .2 .2 .2 .2 .2 --seed 0 " <<< "$published"
  grep -- "--seed 1 " <<< "$strong"
}
exec nice -n 19 .venv/bin/python scripts/launch.py --name evidence --row-per-core "$@" < <(rows)

#!/usr/bin/env bash
# The rows that readers ask for first, in that order: the published 200 epochs (softmax and splitter_selection [.2 x5],
# seeds 2, 1 and 0, whose first epochs results/table1_epochs.csv has; softmax with label smoothing; SoftSort [.2 x5],
# SinkhornSort k = 5, the rest of Table 1), in bf16 where there is no GPU; then scratch.sh, Table 1 short (what --short
# means: table1.sh), Table 4 short, seed 0, where rows that Table 1 has are recorded without training again; strong.sh.
# At the lowest priority, so that it can run for days beside other work. Works from any directory; paths in arguments are
# relative to the repository.
#   scripts/evidence.sh --jobs 1 --threads 1 --data_dir FOLDER      # arguments as in table1.sh; a row per core without
#   scripts/evidence.sh --status                                    # where each row stands
# Ctrl-C, SIGTERM and kill -9 stop it at any moment, and the same call continues; SIGSTOP and SIGCONT hold it.
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

rows() {
  local published short1 softmax splitter
  published=$(scripts/table1.sh --dry-run $(nvidia-smi -L > /dev/null 2>&1 || echo "--precision bf16") | grep -- "--seed ")
  short1=$(scripts/table1.sh --short --dry-run)
  softmax="--method softmax_cross_entropy " splitter="--method splitter_selection .*--p_k .2 .2 .2 .2 .2 "
  first() { grep -e "$1.*--seed 0 " <<< "$published" | sed "s/--seed 0 /--seed $2 /"; }
  {
    for seed in 2 1 0; do
      first "$softmax" $seed
      first "$splitter" $seed
    done
    # A sceptic's cross-entropy: what label smoothing does to it over so many epochs.
    first "$softmax" 0 | sed "s/table1.csv/table1_smoothing.csv --label_smoothing .1/"
    first "--method softsort .*--p_k .2 .2 .2 .2 .2 " 0
    first "--method sinkhorn_sort .*--p_k 0. 0. 0. 0. 1. " 0
    echo "$published"
  } | awk '!seen[$0]++'
  scripts/scratch.sh --dry-run | grep -- "--seed "
  for seed in 0 1 2; do grep -- "--seed $seed " <<< "$short1"; done
  scripts/table4.sh --short --dry-run | grep -- "--seed 0 "
  scripts/strong.sh --dry-run | grep -- "--seed "
}
exec nice -n 19 .venv/bin/python scripts/launch.py --name evidence --row-per-core "$@" < <(rows)

#!/usr/bin/env bash
# The runs of a sweep as a Slurm job array: give a name, sbatch's flags, and the command lines on standard input.
#   scripts/table1.sh --dry-run | scripts/slurm.sh table1 --partition gpu --gpus-per-task 1 --time 4:00:00 [--wait]
# Logs: results/logs/NAME/slurm-RUN.log, which scripts/table1.sh --status reads, too. At its time limit, and after a node's
# end, a run is queued again and continues. The status of a task is that of its run. Recorded runs skip themselves: the
# same call again runs what is left.
set -euo pipefail
if [ "${1:-}" = --task ]; then  # a task of the array; whether an array's variables are set says nothing, jobs inherit them
  export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
  command=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$2")
  echo "=== $(date -u +%FT%TZ) task $SLURM_ARRAY_TASK_ID"
  echo "\$ $command"
  queued_again=
  trap 'queued_again=yes; scontrol requeue "$SLURM_JOB_ID"' USR1
  bash -euo pipefail -c "$command" &  # which may end in a comment
  status=0
  wait $! || status=$?
  [ -n "$queued_again" ] || printf '\n=== exit status %s\n' "$status"  # on a line of its own
  exit "$status"
fi
[[ ${1:-} =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] || { echo "error: name the sweep first, as in slurm.sh table1" >&2; exit 2; }
command -v sbatch > /dev/null || { echo "error: there is no sbatch here: call this where Slurm is, or scripts/launch.py without it" >&2; exit 2; }
CDPATH= cd -- "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
logs=$PWD/results/logs/$1 && mkdir -p "$logs" && commands=$(mktemp -p "$logs")
tr -d '\r' | grep -v '^[[:space:]]*\(#\|$\)' > "$commands" || { echo "error: there is no command line on standard input" >&2; exit 2; }
exec sbatch --job-name="$1" --array="1-$(wc -l < "$commands")" --output="$logs/slurm-%a.log" --open-mode=append --requeue \
  --signal=B:USR1@60 "${@:2}" "$PWD/scripts/slurm.sh" --task "$commands"

#!/usr/bin/env bash
# The rows of a sweep as a Slurm job array: give it a name, sbatch's flags, and the rows on standard input.
#   scripts/table1.sh --dry-run | scripts/slurm.sh table1 --partition gpu --gpus-per-task 1 --time 4:00:00 [--wait]
# Logs: results/logs/<name>/slurm-<row>.log. Slurm sends USR1 a minute before the time limit: the row leaves a checkpoint,
# and its task is requeued, as after a node's end. A failed row is tried once more. Recorded rows skip themselves, so that
# the same call again runs what is left. The repository must be on a file system that the nodes share.
if [ -z "$SLURM_ARRAY_TASK_ID" ]; then
  . "$(dirname "${BASH_SOURCE[0]}")/help.sh"
  [[ $1 =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] || { echo "error: name the sweep first, as in slurm.sh table1; got '$1'" >&2; exit 2; }
  command -v sbatch > /dev/null || { echo "error: sbatch is not on PATH: call this where jobs are submitted" >&2; exit 2; }
  cd "$(dirname "${BASH_SOURCE[0]}")/.." && logs=$PWD/results/logs/$1 && mkdir -p "$logs" && rows=$(mktemp -p "$logs")
  grep -v '^ *\(#\|$\)' > "$rows" || { echo "error: there is no row on standard input" >&2; exit 2; }
  exec sbatch --job-name="$1" --array="1-$(wc -l < "$rows")" --output="$logs/slurm-%a.log" --open-mode=append --requeue \
    --signal=B:USR1@60 "${@:2}" "$PWD/scripts/slurm.sh" "$rows"
fi
command=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1") why=""
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
export MKL_NUM_THREADS=$OMP_NUM_THREADS
trap 'why=requeue; kill -TERM $row' USR1
trap 'why=ended; kill -TERM $row' TERM
for attempt in 1 2; do
  printf '=== %s attempt %s of 2, job %s\n$ %s\n' "$(date -u +%FT%TZ)" $attempt "$SLURM_JOB_ID" "$command"
  eval "$command &"
  row=$!
  wait $row
  status=$?
  while kill -0 $row 2> /dev/null; do wait $row; status=$?; done # a signal ended only the wait
  [ $status != 0 ] && [ -z "$why" ] || break
done
if [ "$why" = requeue ] && [ $status != 0 ]; then scontrol requeue "$SLURM_JOB_ID" && exit; fi
echo "=== exit status $status"
exit $status

#!/usr/bin/env bash
# The published rows on one GPU that is at hand for half an hour, perhaps on a machine without network or our packages.
#   scripts/gpu.sh pack ../shared/data          # here: packages and CIFAR-100 to data/downloads/gpu, in parts of 50 MB
#   scripts/gpu.sh unpack                       # there: makes .venv beside that machine's PyTorch, and the data
#   scripts/gpu.sh check                        # what only a GPU shows: losses, kernels, compiled networks
#   scripts/gpu.sh rows 5                     # evidence.sh's rows, five at a time under MPS, on after this returns
#   scripts/gpu.sh collect 500 $OUT             # after 500 s, or when all are done: rows and histories to a folder, one file
#   scripts/gpu.sh times $OUT                   # alone: a step with each loss
# Arguments of rows are train_cifar100.py's and the launcher's; --n_epochs 1 --limit_train 512 tries it on a CPU.
folder=data/downloads/gpu stage=${1:-none}
if [ "$stage" = unpack ]; then
  set -euo pipefail
  cd "$(dirname "${BASH_SOURCE[0]}")/.."  # begin.sh would make another .venv
else
  . "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
fi
shift $(($# > 0))
case $stage in
  pack)
    mkdir -p $folder/site
    .venv/bin/python -m pip install --quiet --target $folder/site boto3 pandas pydantic requests tqdm hypothesis pytest
    rm -r $folder/site/numpy*  # that machine has one, which its PyTorch and Numba know
    tar -C $folder -cf - site | xz -T0 | split -b 50M - $folder/site.
    tar -C "${1:?give the folder that holds cifar-100-python}" -chf - cifar-100-python | xz -T0 | split -b 50M - $folder/cifar.
    rm -r $folder/site && ls -l $folder
    ;;
  unpack)
    "${PYTHON:-python3}" -m venv --without-pip --system-site-packages .venv
    cat $folder/site.* | tar -C $folder -xJf -
    for part in .venv/lib/python*/site-packages; do printf '%s\n' "$PWD/$folder/site" "$PWD" > "$part/gpu.pth"; done
    cat $folder/cifar.* | tar -C data/downloads -xJf -
    ;;
  check)
    .venv/bin/python -m pytest -q tests/topk_losses/test_on_cuda.py tests/topk_losses/test_kernels.py \
      tests/experiments/test_commands.py "$@"
    ;;
  rows)
    jobs=${1:?give the number of rows at a time}
    shift
    nvidia-cuda-mps-control -d 2> /dev/null || echo "without MPS: rows take turns on the GPU" >&2
    nohup setsid scripts/evidence.sh --jobs "$jobs" --per-gpu "$jobs" --data_dir data/downloads "$@" > $folder/rows.log 2>&1 &
    ;;
  collect)
    end=$((SECONDS + ${1:?give seconds})) out=${2:?give a folder}
    while [ $SECONDS -lt $end ] && pgrep -f "scripts/[l]aunch.py --name evidence" > /dev/null; do sleep 5; done
    mkdir -p "$out"
    find results/runs -maxdepth 2 -name '*.csv' -o -name '*.json' | tar -czf "$out/rows.tar.gz" -T - results/*.csv $folder/rows.log
    tail -n 3 $folder/rows.log
    ;;
  times)
    for precision in bf16 fp32; do
      .venv/bin/python benchmarks/training_step.py --precision $precision --output "${1:?give a folder}/training_step_$precision.csv"
    done
    ;;
  *) echo "stage must be pack, unpack, check, rows, collect or times, got $stage (--help)" >&2 && exit 2 ;;
esac

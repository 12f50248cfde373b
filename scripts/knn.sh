#!/usr/bin/env bash
# The nearest-neighbour classifier with every relaxed top-k of the library, both losses, and its baselines, three seeds,
# on each data set: rows of experiments/train_knn.py, added to results/knn.csv. On the images a row takes a GPU; digits
# and embeddings run anywhere. Works from any directory; paths in arguments are relative to the repository.
#   scripts/knn.sh                                   # mnist, fashion_mnist and cifar10, 200 epochs
#   scripts/knn.sh digits --n_epochs 10              # data sets first: names, or stores of embeddings
#   scripts/knn.sh own.pt --dry-run            # flags as in table1.sh
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"

sets=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do sets+=("$1") && shift; done
[ ${#sets[@]} -gt 0 ] || sets=(mnist fashion_mnist cifar10)
relaxations=$(.venv/bin/python -c "from topk_losses import RELAXATIONS; print(*RELAXATIONS)")
rows() {
  for data in "${sets[@]}"; do
    for seed in 0 1 2; do
      case $data in
        mnist | fashion_mnist | cifar10 | cifar100 | digits) from="--dataset $data" ;;
        *) from="--data_path $(printf %q "$data")" ;;
      esac
      row() { echo ".venv/bin/python experiments/train_knn.py $from --method $* --seed $seed --results results/knn.csv"; }
      row inputs
      row pca
      row softmax_cross_entropy
      row softmax_cross_entropy --prediction network
      for loss in mass log_mass; do
        for method in $relaxations "soft_topk --sorted"; do
          row "$method" --loss $loss
        done
      done
    done
  done
}
exec .venv/bin/python scripts/launch.py --name knn --row-per-core "$@" < <(rows)

#!/usr/bin/env bash
# Tables 2 and 3, ImageNet-21K-P: a new linear head on embeddings of ResNeXt-101 32x48d WSL, each loss at its published
# settings, two seeds: 20 rows, added to results/table2_3_imagenet21k.csv. Arguments as in table1.sh. The embeddings (50
# GB) are best there before:
#   .venv/bin/python -m data.download wsl-32x48d-224-21k
. "$(dirname "${BASH_SOURCE[0]}")/begin.sh"
. scripts/published.sh

name=table2_3_imagenet21k
finetune=".venv/bin/python experiments/finetune_imagenet21k.py -d wsl-32x48d-224-21k --m 50 --nloglr 4 --n_epochs 40"
exec .venv/bin/python scripts/launch.py --name $name "$@" < <(published "$finetune" .5 1. "0. 0. 0. 0. 1." ".5 0. 0. 0. .5")

"""Tables 2 and 3: linear classifiers on frozen ImageNet-21K-P embeddings (10,450 classes).

    python experiments/finetune_imagenet21k.py --method splitter_selection --p_k .5 0 0 0 .5

As finetune_imagenet.py, with other data, m 50, learning rate 10^-4, 40 epochs, and a random 100,000 rows that validate.
Rows go to results/imagenet21k.csv.
"""

import sys
from functools import partial

from experiments.common import door
from experiments.finetune_imagenet import Protocol, main

IMAGENET_21K = Protocol(
    "wsl-32x48d-224-21k", "imagenet21k.csv", 10_450, m=50, nloglr=4.0, n_epochs=40, num_valid=100_000
)

if __name__ == "__main__":
    sys.exit(door.call(partial(main, protocol=IMAGENET_21K)))

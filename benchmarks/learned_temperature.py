"""Accuracy of heads whose inverse temperature is constant, follows the logits ("auto"), or is learned with them.

    python benchmarks/learned_temperature.py -d cifar100.pt
    python benchmarks/learned_temperature.py -d cifar100.pt --methods lml --p_k .5 0 0 0 .5 --seeds 0

A linear head on a file of embeddings, trained as scripts/temperature.sh does: the last epoch's test accuracies, mean
over the seeds. Learned, log beta is a parameter of the same optimizer, which begins at the method's default, as the
constant does. Writes --output (default results/benchmarks/learned_temperature.csv).
"""

import statistics
import sys

import torch
from torch import Tensor

from benchmarks.runner import Table, parser
from data.download import download
from data.embeddings import load_embeddings
from experiments.common.processes import keep_freed_memory
from models.heads import head
from topk_losses import METHODS, make_loss

BATCH, N_EPOCHS, LR = 500, 5, 4e-3
P_KS = ([0.2] * 5, [0.5, 0, 0, 0, 0.5], [0, 0, 0, 0, 1.0])


def train(data: dict[str, tuple[Tensor, Tensor]], method: str, p_k: list[float], kind: str, seed: int) -> list[float]:
    """Test top-1 and top-5 in percent after the last epoch, and the inverse temperature then."""
    (inputs, labels), (test_inputs, test_labels) = data["train"], data["test"]
    torch.manual_seed(seed)
    num_classes, start = int(labels.max()) + 1, METHODS[method].inverse_temperature
    model = head(inputs.shape[1], num_classes).to(inputs.device)
    log_beta = torch.nn.Parameter(torch.tensor(float(start), device=inputs.device).log())
    loss_fn = make_loss(method, p_k, num_classes, inverse_temperature="auto" if kind == "auto" else None)
    loss_fn = loss_fn.to(inputs.device)
    optimizer = torch.optim.Adam([*model.parameters(), *([log_beta] if kind == "learned" else [])], LR)
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(len(labels), device=labels.device).split(BATCH):
            if kind == "learned":
                loss_fn.inverse_temperature = log_beta.exp()
            optimizer.zero_grad()
            loss_fn(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        top = model(test_inputs).topk(5, dim=1).indices == test_labels.unsqueeze(1)  # (rows, 5)
        accuracies = [100 * top[:, :k].any(1).double().mean().item() for k in (1, 5)]
    ended_at = loss_fn.auto.value() if kind == "auto" else log_beta.detach().exp()
    return [*accuracies, ended_at.item()]


def main() -> int:
    """Run the benchmark; return the exit status."""
    flags = parser(__doc__, "learned_temperature.csv")
    flags.add_argument("-d", "--data_path", required=True, help="a file of embeddings")
    following = [name for name, method in METHODS.items() if method.spread and not method.stochastic]
    flags.add_argument("--methods", nargs="+", choices=following, default=following)
    flags.add_argument("--p_k", nargs="+", type=float, help="one P_K; three without it")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = flags.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    try:
        embeddings = load_embeddings(download(arguments.data_path))
        if arguments.p_k:
            make_loss(arguments.methods[0], arguments.p_k, embeddings.num_classes)
    except ValueError as error:
        flags.error(str(error))
    data = {}
    for name in ("train", "test"):
        split = embeddings[name]
        data[name] = (split.embeddings.float().to(arguments.device), split.labels.to(arguments.device))
    table = Table(arguments)
    for method in arguments.methods:
        for p_k in [arguments.p_k] if arguments.p_k else P_KS:
            if not p_k[0] and getattr(METHODS[method].operator, "has_zeros", False):
                continue  # where its mask is zero there is no gradient
            for kind in ("default", "auto", "learned"):
                runs = [train(data, method, p_k, kind, seed) for seed in arguments.seeds]
                found = dict(zip(("top1", "top5", "ended_at"), map(statistics.fmean, zip(*runs))))
                shown = " ".join(f"{p:g}" for p in p_k)
                table.add(method=method, p_k=shown, inverse_temperature=kind, **found, seeds=len(runs))
    return table.write()


if __name__ == "__main__":
    sys.exit(main())

"""Slow, obvious float64 oracles: each operator by its textbook definition, n x n where the library avoids it.

`permutation_matrix` has them by the name of their method: of logits (batch, n) the rows of the relaxed permutation
matrix, row 0 = rank 1. It takes them from the whole matrix, `ROWS`, or from masks P(rank <= k), `MASKS`.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

from topk_losses import bitonic, odd_even, splitter_selection

NETWORKS = {"odd_even": odd_even, "bitonic": bitonic, "splitter_selection": splitter_selection}


def hard_permutation(logits: Tensor) -> Tensor:
    """(batch, n, n): row r is the one-hot of the class at rank r + 1."""
    order = logits.argsort(dim=1, descending=True, stable=True)
    return torch.nn.functional.one_hot(order, logits.shape[1]).double()


def neuralsort(logits: Tensor, inverse_temperature: float) -> Tensor:
    """Grover et al. 2019, equation 5: softmax(((n + 1 - 2i) s - A 1) / tau)."""
    s = logits.double()
    n = s.shape[1]
    A = (s.unsqueeze(2) - s.unsqueeze(1)).abs()  # (batch, n, n)
    i = torch.arange(1, n + 1, dtype=torch.float64)
    z = (n + 1 - 2 * i).view(1, n, 1) * s.unsqueeze(1) - A.sum(2).unsqueeze(1)
    return (z * inverse_temperature).softmax(2)


def softsort(logits: Tensor, inverse_temperature: float) -> Tensor:
    """Prillo and Eisenschlos 2020, equation 4: softmax(-|sort(s) - s| / tau)."""
    s = logits.double()
    ordered = s.sort(dim=1, descending=True).values
    distance = (ordered.unsqueeze(2) - s.unsqueeze(1)).abs()
    return (-distance * inverse_temperature).softmax(2)


def sigmoid_family(distribution: str, v: Tensor, d: Tensor, beta: float, art_lambda: float) -> Tensor:
    """The six cumulative distribution functions at v = beta d, written out case by case."""
    if distribution == "logistic":
        return 1 / (1 + torch.exp(-v))
    if distribution == "logistic_phi":
        return 1 / (1 + torch.exp(-v / (d.abs() + 1e-10) ** art_lambda))
    if distribution == "gaussian":
        return 0.5 * (1 + torch.erf(v / math.sqrt(2)))
    if distribution == "reciprocal":
        return 0.5 * (v / (2 + v.abs()) + 1)
    if distribution == "cauchy":
        return torch.atan(v) / math.pi + 0.5
    if distribution == "optimal":
        low = -1 / (16 * v)
        high = 1 - 1 / (16 * v)
        return torch.where(v < -0.25, low, torch.where(v > 0.25, high, v + 0.5))
    raise AssertionError(distribution)


def network(logits: Tensor, layers, distribution: str, beta: float, art_lambda: float) -> Tensor:
    """Product of dense n x n layer matrices, P = L_t ... L_1, rows turned so that row 0 is rank 1."""
    x = logits.double()
    batch, n = x.shape
    P = torch.eye(n, dtype=torch.float64).expand(batch, n, n)
    for layer in layers:
        L = torch.eye(n, dtype=torch.float64).repeat(batch, 1, 1)
        for lo, hi in layer:
            d = x[:, hi] - x[:, lo]
            alpha = sigmoid_family(distribution, beta * d, d, beta, art_lambda)
            for row, weight_lo in ((lo, alpha), (hi, 1 - alpha)):
                L[:, row] = 0
                L[:, row, lo] = weight_lo
                L[:, row, hi] = 1 - weight_lo
        x = (L @ x.unsqueeze(2)).squeeze(2)
        P = L @ P
    return P.flip(1)


def whitened(scores: Tensor) -> Tensor:
    """topk_losses.transport.whiten_and_squash of one sample (n,), term by term."""
    highest = max(scores.tolist())
    depths = [min(highest - score, 1e18) for score in scores.tolist()]
    weights = [float(depth < 1e18) for depth in depths]

    def mean_of(values: list[float]) -> float:
        return sum(w * value for w, value in zip(weights, values)) / sum(weights)

    for _ in range(4):
        unit = max(3 * mean_of(depths), 0.1)
        weights = [1.0 if depth <= unit else (unit / depth) ** 4 for depth in depths]
    mean = mean_of(depths)
    unit = max(3 * mean, 0.1)
    std = math.sqrt(mean_of([(depth - mean) ** 2 for depth in depths]) + 0.1**2)
    squashed = []
    for depth in depths:
        if depth > unit:
            depth = unit * (1 + math.log(depth / unit) / 4)
        squashed.append(1 / (1 + math.exp((depth - mean) / std)))
    return torch.tensor(squashed, dtype=torch.float64)


def sinkhorn(
    logits: Tensor, points: Tensor, sizes: Tensor, inverse_temperature: float, iterations: int = 50_000
) -> Tensor:
    """n times the entropic transport plan by plain Sinkhorn iterations: (batch, A, n)."""
    x = torch.stack([whitened(row) for row in logits.double()])  # (batch, n)
    n = x.shape[1]
    minus_cost = -inverse_temperature * (points.double().view(1, -1, 1) - x.unsqueeze(1)) ** 2  # (batch, A, n)
    log_mass = (sizes.double() / n).log().view(1, -1, 1)
    f = torch.zeros_like(x).unsqueeze(1)
    for iteration in range(iterations):
        g = log_mass - (minus_cost + f).logsumexp(2, keepdim=True)
        before = f
        f = -math.log(n) - (minus_cost + g).logsumexp(1, keepdim=True)
        if iteration % 50 == 0 and (f - before).abs().max() < 1e-13:
            break
    return n * (minus_cost + f + g).exp()


def sinkhorn_sort(logits: Tensor, inverse_temperature: float) -> Tensor:
    """Cuturi et al. 2019: a target point for each rank."""
    n = logits.shape[1]
    return sinkhorn(logits, torch.linspace(1, 0, n), torch.ones(n), inverse_temperature)


def soft_topk_mask(logits: Tensor, k: int, inverse_temperature: float) -> Tensor:
    """Xie et al. 2020: a target point for the k highest, and one for the others."""
    n = logits.shape[1]
    if k == n:
        return torch.ones(logits.shape, dtype=torch.float64)
    return sinkhorn(logits, torch.tensor([1.0, 0.0]), torch.tensor([k, n - k]), inverse_temperature)[:, 0]


THRESHOLD_FUNCTIONS = {
    "lml": lambda t: 1 / (1 + torch.exp(-t)),
    "lapsum": lambda t: torch.where(t < 0, torch.exp(t.clamp(max=0)) / 2, 1 - torch.exp(-t.clamp(min=0)) / 2),
    "sparse_topk": lambda t: t.clamp(0, 1),
    "sparse_topk 4/3": lambda t: t.clamp(0, 1) ** 3,
    "capped_softmax": lambda t: torch.exp(t.clamp(max=0)),
}


def threshold_mask(logits: Tensor, k: float, inverse_temperature: float, method: str) -> Tensor:
    """f(beta s - theta) (batch, n) with theta by 200 steps of bisection; k a number in (0, n]."""
    f = THRESHOLD_FUNCTIONS[method]
    z = logits.double() * inverse_temperature
    low = z.amin(1, keepdim=True) - 100.0
    high = z.amax(1, keepdim=True) + 100.0
    for _ in range(200):
        middle = (low + high) / 2
        above = f(z - middle).sum(1, keepdim=True) > k
        low = torch.where(above, middle, low)
        high = torch.where(above, high, middle)
    return f(z - high) if k < logits.shape[1] else torch.ones_like(z)


def subset_mask(logits: Tensor, k: int, inverse_temperature: float) -> Tensor:
    """P(i in S), (batch, n), by a sum over all k-subsets S, each with weight exp of its scores."""
    n = logits.shape[1]
    subsets = torch.tensor(list(itertools.combinations(range(n), k)))  # (subsets, k)
    weights = (logits.double()[:, subsets].sum(2) * inverse_temperature).softmax(1)  # (batch, subsets)
    return weights @ torch.zeros(len(subsets), n, dtype=torch.float64).scatter(1, subsets, 1.0)


def df_topk_mask(logits: Tensor, k: int, inverse_temperature: float) -> Tensor:
    """sigmoid(beta (s - t)), t the middle of the k-th and the (k+1)-th largest score."""
    following = torch.nn.functional.pad(logits.double(), (0, 1), value=-math.inf)
    t = following.sort(dim=1, descending=True).values[:, k - 1 : k + 1].mean(1, keepdim=True)
    return torch.sigmoid(inverse_temperature * (logits.double() - t))


def recall_mask(logits: Tensor, k: int, inverse_temperature: float) -> Tensor:
    """sigmoid(k - r), r the soft rank by the other classes."""
    masks = torch.empty(logits.shape, dtype=torch.float64)
    for b, row in enumerate(logits.double()):
        for i, own in enumerate(row):
            others = torch.cat([row[:i], row[i + 1 :]])
            masks[b, i] = torch.sigmoid(k - 1 - torch.sigmoid(inverse_temperature * (others - own)).sum())
    return masks


ROWS = {"neuralsort": neuralsort, "softsort": softsort, "sinkhorn_sort": sinkhorn_sort}
MASKS = {
    "soft_topk": soft_topk_mask,
    "subset_topk": subset_mask,
    "df_topk": df_topk_mask,
    "recall_surrogate": recall_mask,
    **{name: functools.partial(threshold_mask, method=name) for name in THRESHOLD_FUNCTIONS},
}


def permutation_matrix(
    method: str, logits: Tensor, k: int, inverse_temperature: float, distribution: str = "logistic_phi"
) -> Tensor:
    """The first k rows of P, (batch, k, n), of a method; a network with art_lambda .5."""
    if method in NETWORKS:
        layers = NETWORKS[method](logits.shape[1], k).layers
        return network(logits, layers, distribution, inverse_temperature, 0.5)[:, :k]
    if method in ROWS:
        return ROWS[method](logits, inverse_temperature)[:, :k]
    masks = [MASKS[method](logits, r, inverse_temperature) for r in range(1, k + 1)]
    return torch.stack(masks, dim=1).diff(dim=1, prepend=torch.zeros_like(masks[0]).unsqueeze(1))


def topk_cross_entropy(
    P: Tensor, scores: Tensor, labels: Tensor, p_k: Tensor, top1_mode: str, guarded: bool = True
) -> Tensor:
    """The loss per sample from the full P (batch, >= K, n), in loops over the batch and over k as the paper writes it.

    p_k (batch, K). The epsilon is that of the official code, which exact logarithms do without; it is for probabilities
    of at most 1, which columns of NeuralSort and SoftSort may exceed.
    """
    losses = []
    for b, y in enumerate(labels.tolist()):
        softmax_y = scores[b].double().softmax(0)[y]
        total = torch.zeros((), dtype=torch.float64)
        first = 0 if top1_mode == "sort" else 1
        for k in range(first, p_k.shape[1]):
            total = total + p_k[b, k] * sum(P[b, r, y] for r in range(k + 1))
        if top1_mode == "sm":
            total = total + p_k[b, 0] * softmax_y
        loss = -torch.log(total.clamp(max=1) * (1 - 2e-7) + 1e-7 if guarded else total)
        if top1_mode == "smce":
            # P_K(1) = 1 leaves nothing to sort
            loss = -p_k[b, 0] * torch.log(softmax_y) + (1 - p_k[b, 0]) * (loss if p_k[b, 0] < 1 else 0)
        losses.append(loss)
    return torch.stack(losses)


def top_m(scores: Tensor, label: int, m: int) -> list[int]:
    """Classes kept for one sample (n,): the true one, then the m - 1 largest others in falling order."""
    others = [j for j in scores.argsort(descending=True, stable=True).tolist() if j != label]
    return [label, *others[: m - 1]]


def truncated_entropy(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Lapin et al. 2016, (batch,): log(1 + sum of exp(s_j - s_y)) over the other classes but the k - 1 highest."""
    losses = []
    for row, y in zip(logits.double(), labels.tolist()):
        left = top_m(row, y, len(row))[k:]  # the true class comes first
        losses.append(torch.cat([torch.zeros(1), row[left] - row[y]]).logsumexp(0))
    return torch.stack(losses)


def ldr_kl(logits: Tensor, labels: Tensor, inverse_temperature: float, margin: float) -> Tensor:
    """Zhu, Ying and Yang 2023, (batch,); n counts the classes that are not masked out."""
    s = logits.double()
    n = (logits > -math.inf).sum(1)
    margins = margin * (torch.arange(logits.shape[1]) != labels.unsqueeze(1))
    exponents = inverse_temperature * (s - s.gather(1, labels.unsqueeze(1)) + margins)
    return (exponents.logsumexp(1) - n.double().log()) / inverse_temperature


def _reverse(log_p: Tensor, y: int, A: float) -> Tensor:
    return -A * (1 - log_p[y].exp())


# Losses of log p of the classes that are not masked out (n,) and the true class.
ROBUST = {
    "softmax_cross_entropy": lambda log_p, y: -log_p[y],
    "forward_correction": lambda log_p, y, noise_rate: (
        -((1 - noise_rate) * log_p.exp()[y] + noise_rate / len(log_p)).log()
    ),
    "forward_correction by T": lambda log_p, y, T: -(log_p.exp() @ T[:, y]).log(),
    "generalized_cross_entropy": lambda log_p, y, q: (1 - (q * log_p[y]).exp()) / q,
    "symmetric_cross_entropy": lambda log_p, y, alpha, beta, A: -alpha * log_p[y] + beta * _reverse(log_p, y, A),
    "nce_rce": lambda log_p, y, alpha, beta, A: alpha * log_p[y] / log_p.sum() + beta * _reverse(log_p, y, A),
    "phuber_cross_entropy": lambda log_p, y, tau: (
        -log_p[y] if log_p[y].exp() > 1 / tau else 1 - tau * log_p[y].exp() + math.log(tau)
    ),
}


def robust(logits: Tensor, labels: Tensor, method: str, **settings) -> Tensor:
    """A loss of ROBUST, (batch,)."""
    losses = []
    for row, y in zip(logits.double(), labels.tolist()):
        live = (row > -math.inf).nonzero().flatten().tolist()
        own = {name: value[live][:, live] if name == "T" else value for name, value in settings.items()}
        losses.append(ROBUST[method](row[live].log_softmax(0), live.index(y), **own))
    return torch.stack(losses)


def smooth_topk(logits: Tensor, labels: Tensor, k: int, tau: float, alpha: float = 1.0) -> Tensor:
    """Berrada et al. 2018, (batch,): tau softplus((alpha + (kth - s_y) / k) / tau), as SmoothTopKLoss.

    kth = k tau (log e_k - log e_{k-1}) of the others, by e_j <- e_j + x_i e_{j-1} in log space.
    """
    other = torch.arange(logits.shape[1]) != labels.unsqueeze(1)  # (batch, n)
    z = logits.double()[other].view(len(logits), -1) / (k * tau)
    log_e = torch.full((len(z), k + 1), -1e300, dtype=torch.float64)
    log_e[:, 0] = 0
    for i in range(z.shape[1]):
        log_e = torch.cat([log_e[:, :1], torch.logaddexp(log_e[:, 1:], log_e[:, :-1] + z[:, i : i + 1])], 1)
    kth = k * tau * (log_e[:, k] - log_e[:, k - 1])
    true = logits.double().gather(1, labels.unsqueeze(1)).squeeze(1)
    return tau * torch.nn.functional.softplus((alpha + (kth - true) / k) / tau, threshold=700)


def hard_topk_hinge(logits: Tensor, labels: Tensor, k: int, alpha: float = 1.0) -> Tensor:
    """The hard top-k SVM as the official code writes it, (batch,): two means over largest scores."""
    losses = []
    for scores, label in zip(logits, labels.tolist()):
        others = torch.cat([scores[:label], scores[label + 1 :]])
        without = (others + alpha).topk(k).values.mean()
        losses.append(torch.relu(without - (others.topk(k - 1).values.sum() + scores[label]) / k))
    return torch.stack(losses)

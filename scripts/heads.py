"""Train linear classifiers on embeddings with each method: trials, more epochs for the best, then ten other seeds.

    scripts/heads.sh trials longer finals -d heads.pt --jobs 2      # launcher flags, too; --methods all: every method
    scripts/heads.sh more finals -d heads.pt --around results/heads_trials.csv --trials results/heads_more_trials.csv \\
        --results results/heads_more.csv

trials: each setting of a method with four learning rates, 5 epochs. longer: the best of them, 22 epochs. more: 30
trials around the best of --around, and 30 of a loss without order. finals: of each arm the trial with the highest
validation top-1 + top-5, ten other seeds, to --results. An arm is a method, or the loss without order. table3: nine
trials of each row of the paper's Table 3, 6 epochs; with --per_p_k an arm is such a row, a method with one P_K
(scripts/tiny_imagenet.sh). table3_more: six trials around the best of --around, 12 epochs with more weight decay.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from scripts.launch import launch
from scripts.reporting.runs import best_trial, read_runs
from scripts.sweeps import PAPER_P_KS, as_flags, one_pass
from topk_losses import METHODS
from topk_losses.methods import SINGLE_K, TOP1

RATES = (0.0005, 0.001, 0.002, 0.004)
SHORT, LONG = 5, 22  # epochs
SEEDS = range(1, 11)  # seeds of the finals; that of a trial is 0
P_KS = (".5 0 0 0 .5", ".2 .2 .2 .2 .2", "0 0 0 0 1")
SETTINGS = ("p_k", "m", "inverse_temperature", "label_smoothing", "weight_decay", "margin")
SOFTMAX_SETTINGS = [{}, {"label_smoothing": 0.1}, {"weight_decay": 0.1}, {"weight_decay": 1.0}]
LDR_KL_SETTINGS = [{"inverse_temperature": b, "margin": c} for b, c in product((0.5, 1, 2), (0, 1)) if b != 1 or c]
MORE_RATES, MORE_DECAYS = (0.00025, 0.0005, 0.001), ({}, {"weight_decay": 1.0})
MORE_SMOOTHING = (0, 0.1, 0.2, 0.4, 0.6)
MORE_MARGINS = ((0.25, 1), (0.5, 1), (0.5, 2), (1, 1), (1, 2))  # with their inverse temperatures
SOFTER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # inverse temperatures, in units of the default
# -log(share softmax + (1 - share) 5 / 100): at this inverse temperature lapsum gives each class the indicator k / n.
LEVEL = METHODS["lapsum"].inverse_temperature / 1024
SHARES = (0.95, 0.8, 0.5, 0.3, 0.15)
# The rows of Table 3, in the paper's order: two losses of one k, and each relaxed method with each of PAPER_P_KS.
TABLE3_METHODS = ("softmax_cross_entropy", "smooth_hard_topk")
TABLE3_METHODS += ("neuralsort", "softsort", "sinkhorn_sort", "splitter_selection")
TABLE3_EPOCHS, TABLE3_RATES, TABLE3_FACTORS = 6, (0.001, 0.002, 0.004), (1 / 4, 1, 4)
TABLE3_LONGER, TABLE3_SMALLER, TABLE3_DECAYS = 12, (0.0005, 0.001), (1.0, 3.0, 10.0)
KNOWN = [name for name in METHODS if name != "imbalanced_noised_topk"]  # noised_topk where classes are alike
STAGES = ("trials", "longer", "more", "table3", "table3_more", "finals")


def settings_of(method: str) -> list[dict[str, object]]:
    """Return the settings of a method that are tried first, as flags."""
    if method in TOP1:
        return [{"p_k": "1", **setting} for setting in (LDR_KL_SETTINGS if method == "ldr_kl" else SOFTMAX_SETTINGS)]
    spec = METHODS[method]
    temperatures = [{"inverse_temperature": spec.inverse_temperature}] if spec.inverse_temperature else [{}]
    temperatures += [{"inverse_temperature": "auto"}] if spec.spread else []
    if method in SINGLE_K:
        return [{"p_k": P_KS[2], **temperature} for temperature in temperatures]
    # Indicators with zeros need the softmax's part. The time of sinkhorn_sort grows with the cube of m.
    p_ks = P_KS[:2] if getattr(spec.operator, "has_zeros", False) else P_KS
    scores = (16, 50 if method == "sinkhorn_sort" else 100)
    return [{"p_k": p_k, "m": m, **temperature} for p_k, m, temperature in product(p_ks, scores, temperatures)]


def settings_around(method: str, chosen: dict[str, object]) -> list[dict[str, object]]:
    """Return five settings around the best one, as flags; for lapsum also five of the loss without order."""
    if method == "ldr_kl":
        return [{"p_k": "1", "inverse_temperature": beta, "margin": c} for beta, c in MORE_MARGINS]
    if method in TOP1:
        return [{"p_k": "1", **({"label_smoothing": smoothing} if smoothing else {})} for smoothing in MORE_SMOOTHING]
    kept, default = {name: chosen[name] for name in ("p_k", "m")}, METHODS[method].inverse_temperature
    without = [{"p_k": f"{share} 0 0 0 {1 - share:g}", "m": 100, "inverse_temperature": LEVEL} for share in SHARES]
    return [{**kept, "inverse_temperature": default * by} for by in SOFTER] + without * (method == "lapsum")


def settings_of_table3(method: str) -> list[dict[str, object]]:
    """Return three settings of each row of Table 3 that is of the method, as flags; m is the paper's, 16.

    Cross-entropy has no inverse temperature: it has label smoothing and weight decay in its place.
    """
    if method in TOP1:
        return [{"p_k": "1", **setting} for setting in ({}, {"label_smoothing": 0.1}, {"weight_decay": 1.0})]
    p_ks = PAPER_P_KS[:1] if method in SINGLE_K else PAPER_P_KS
    betas = [factor * METHODS[method].inverse_temperature for factor in TABLE3_FACTORS]
    return [{"p_k": p_k, "inverse_temperature": beta} for p_k, beta in product(p_ks, betas)]


def read_trials(path: Path, per_p_k: bool = False) -> pd.DataFrame:
    """Read trials, the arm of each in a column: its method, with per_p_k and its P_K."""
    trials = read_runs(path)
    if per_p_k:
        return trials.assign(arm=trials["method"] + " " + trials["p_k"])
    without_order = (trials["method"] == "lapsum") & (pd.to_numeric(trials["inverse_temperature"], "coerce") == LEVEL)
    return trials.assign(arm=trials["method"].mask(without_order, "without_order"))


def best(trials: pd.DataFrame, arm: str) -> tuple[dict[str, object], int]:
    """Return the settings, with lr, and the epochs of an arm's best trial by validation. Raises ValueError."""
    found = trials[trials["arm"] == arm]
    if found.empty:
        raise ValueError(f"there is no trial of {arm}: run the stage trials first")
    trial = best_trial(found)
    return {name: trial[name] for name in (*SETTINGS, "lr") if trial.get(name)}, int(trial["n_epochs"])


def trials_of(stage: str, method: str, known: pd.DataFrame) -> tuple[list[dict[str, object]], int]:
    """Return the settings that a stage tries with a method, and their epochs. known: earlier trials."""
    if stage == "trials":
        return [{**setting, "lr": lr} for setting, lr in product(settings_of(method), RATES)], SHORT
    if stage == "table3":
        settings = product(settings_of_table3(method), TABLE3_RATES)
        return [{**setting, "lr": lr} for setting, lr in settings], TABLE3_EPOCHS
    if stage == "longer":
        chosen, _ = best(known[known["n_epochs"] == str(SHORT)], method)
        return [{**chosen, "lr": lr} for lr in RATES], LONG
    chosen, _ = best(known, method)
    if stage == "more":
        settings = product(settings_around(method, chosen), MORE_DECAYS, MORE_RATES)
        return [{**setting, **decay, "lr": lr} for setting, decay, lr in settings], LONG
    settings = product(TABLE3_SMALLER, TABLE3_DECAYS)
    return [{**chosen, "lr": lr, "weight_decay": decay} for lr, decay in settings], TABLE3_LONGER


def finals_of(method: str, known: pd.DataFrame) -> tuple[list[dict[str, object]], int]:
    """Return the settings of the best trial of each arm of a method, and their epochs. Raises ValueError."""
    arms = list(known.loc[known["method"] == method, "arm"].unique()) or [method]
    settings, epochs = zip(*(best(known, arm) for arm in arms))
    if len(set(epochs)) > 1:
        raise ValueError(f"the best trials of {', '.join(arms)} have {epochs} epochs; give each its --methods")
    return list(settings), epochs[0]


def commands(stage: str, args: argparse.Namespace) -> list[str]:
    """Return a command per method, which trains its classifiers in one pass. Raises ValueError."""
    known, methods = pd.DataFrame(), KNOWN if "all" in args.methods else args.methods
    if stage not in ("trials", "table3"):
        source = args.around if stage in ("more", "table3_more") else args.trials
        if not source.is_file():
            raise ValueError(f"{stage} needs the trials in {source}, which is not there")
        known = read_trials(source, args.per_p_k)
    if stage == "more":  # a loss of a single k has no relaxed matrix to be softer
        methods = [method for method in methods if method not in SINGLE_K]
    lines = []
    for method in methods:
        settings, n_epochs = finals_of(method, known) if stage == "finals" else trials_of(stage, method, known)
        heads = [as_flags({"method": method, **setting}) for setting in settings]
        seeds, results = (SEEDS, args.results) if stage == "finals" else ([0], args.trials)
        flags = {"n_epochs": n_epochs, "batch_size": 500, "num_valid": args.num_valid or "", "eval_freq": 100000}
        flags |= {"seeds": " ".join(map(str, seeds)), "results": shlex.quote(str(results))}
        lines.append(one_pass(heads, f"{as_flags(flags)} -d {shlex.quote(args.data_path)}"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run stages one after another; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    usage = "%(prog)s stages ... -d FILE [options]"
    parser = argparse.ArgumentParser("heads.py", usage, "Other flags: launch.py --help.", allow_abbrev=False)
    parser.add_argument("stages", nargs="+", choices=STAGES, help="stages, run one after another")
    parser.add_argument("-d", "--data_path", required=True, help="file of embeddings, or a published name")
    message = "file of trials (default: %(default)s)"
    parser.add_argument("--trials", type=Path, default="results/heads_trials.csv", help=message)
    message = "trials around which the stage more has its own (default: %(default)s)"
    parser.add_argument("--around", type=Path, default="results/heads_trials.csv", help=message)
    message = "file of the finals (default: %(default)s)"
    parser.add_argument("--results", type=Path, default="results/heads.csv", help=message)
    parser.add_argument("--per_p_k", action="store_true", help="choose a trial for each P_K of a method")
    message = "rows that validate, 0 for the data's own (default: 5000)"
    parser.add_argument("--num_valid", type=int, default=5000, help=message)
    four = ["softmax_cross_entropy", "ldr_kl", "lapsum", "splitter_selection"]
    message = f"methods, or all (default: {', '.join(four)})"
    parser.add_argument("--methods", nargs="+", choices=["all", *KNOWN], metavar="METHOD", default=four, help=message)
    args, flags = parser.parse_known_args(words)
    if not Path(args.data_path).exists() and ("/" in args.data_path or Path(args.data_path).suffix):
        parser.error(f"there is no file {args.data_path}")
    if args.results in (args.trials, args.around):
        parser.error(f"--results {args.results} must not be a file of trials")
    for number, stage in enumerate(args.stages):
        if number and {"--dry-run", "--status"} & set(flags):
            print(f"# {stage}: known when {args.stages[number - 1]} has run")
            continue
        try:
            lines = commands(stage, args)
        except (ValueError, KeyError) as error:
            parser.error(str(error))
        if status := launch(lines, ["--name", f"heads_{stage}", "--run-per-core", *flags]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

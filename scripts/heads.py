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
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import pandas as pd

from scripts.launch import launch
from scripts.reporting.runs import best_trial, read_runs
from scripts.sweeps import CHOSEN, PAPER_P_KS, as_flags, finals_of, most_scores, one_pass, p_ks_of
from topk_losses import METHODS
from topk_losses.methods import SINGLE_K, TOP1

Settings = dict[str, object]
EPOCHS = {"trials": 5, "longer": 22, "more": 22, "table3": 6, "table3_more": 12}
STAGES = (*EPOCHS, "finals")
RATES = (0.0005, 0.001, 0.002, 0.004)
MORE_MARGINS = ((0.25, 1), (0.5, 1), (0.5, 2), (1, 1), (1, 2))  # with their inverse temperatures
SOFTER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # inverse temperatures, in units of the default
# -log(share softmax + (1 - share) 5 / 100): at this inverse temperature lapsum gives each class the indicator k / n.
LEVEL = METHODS["lapsum"].inverse_temperature / 1024
SHARES = (0.95, 0.8, 0.5, 0.3, 0.15)
KNOWN = [name for name in METHODS if name != "imbalanced_noised_topk"]  # noised_topk where classes are alike


def grid(settings: Iterable[Settings], **values: Iterable[object]) -> list[Settings]:
    """Return each setting with each combination of further values, as flags; an empty one is left out."""
    return [{**first, **dict(zip(values, more))} for first, *more in product(settings, *values.values())]


def settings_of(method: str) -> list[Settings]:
    """Return the settings of a method that are tried first."""
    if method == "ldr_kl":
        return [{"p_k": "1", "inverse_temperature": b, "margin": c} for b in (0.5, 1, 2) for c in (0, 1) if b != 1 or c]
    if method in TOP1:
        more = ({}, {"label_smoothing": 0.1}, {"weight_decay": 0.1}, {"weight_decay": 1.0})
        return [{"p_k": "1", **settings} for settings in more]
    spec = METHODS[method]
    betas = [spec.inverse_temperature or "", *(["auto"] if spec.spread else [])]
    scores = ("",) if method in SINGLE_K else (16, most_scores(method))
    return grid([{}], p_k=p_ks_of(method), m=scores, inverse_temperature=betas)


def settings_around(method: str, chosen: Settings) -> list[Settings]:
    """Return five settings around the best one; for lapsum also five of the loss without order."""
    if method == "ldr_kl":
        return [{"p_k": "1", "inverse_temperature": beta, "margin": c} for beta, c in MORE_MARGINS]
    if method in TOP1:
        return grid([{"p_k": "1"}], label_smoothing=("", 0.1, 0.2, 0.4, 0.6))
    betas = [METHODS[method].inverse_temperature * factor for factor in SOFTER]
    softer = grid([{"p_k": chosen["p_k"], "m": chosen["m"]}], inverse_temperature=betas)
    if method != "lapsum":
        return softer
    p_ks = [f"{share} 0 0 0 {1 - share:g}" for share in SHARES]
    return softer + grid([{}], p_k=p_ks, m=[100], inverse_temperature=[LEVEL])


def settings_of_table3(method: str) -> list[Settings]:
    """Return three settings of each row of Table 3 that is of the method; m is the paper's, 16.

    Cross-entropy has no inverse temperature: it has label smoothing and weight decay in its place.
    """
    if method in TOP1:
        return [{"p_k": "1", **settings} for settings in ({}, {"label_smoothing": 0.1}, {"weight_decay": 1.0})]
    p_ks = PAPER_P_KS[:1] if method in SINGLE_K else PAPER_P_KS
    return grid([{}], p_k=p_ks, inverse_temperature=[METHODS[method].inverse_temperature * by for by in (1 / 4, 1, 4)])


def read_trials(path: Path, per_p_k: bool = False) -> pd.DataFrame:
    """Read trials, the arm of each in a column: its method, with per_p_k and its P_K."""
    trials = read_runs(path)
    if per_p_k:
        return trials.assign(arm=trials["method"] + " " + trials["p_k"])
    without_order = (trials["method"] == "lapsum") & (pd.to_numeric(trials["inverse_temperature"], "coerce") == LEVEL)
    return trials.assign(arm=trials["method"].mask(without_order, "without_order"))


def best(trials: pd.DataFrame, arm: str) -> pd.Series:
    """Return an arm's best trial by validation, without what is no setting but its epochs. Raises ValueError."""
    found = trials[trials["arm"] == arm]
    if found.empty:
        raise ValueError(f"there is no trial of {arm}: run the stage trials first")
    return best_trial(found).reindex([*CHOSEN, "n_epochs"], fill_value="")


def trials_of(stage: str, method: str, known: pd.DataFrame) -> list[Settings]:
    """Return the settings that a stage tries with a method. known: earlier trials."""
    if stage == "trials":
        return grid(settings_of(method), lr=RATES)
    if stage == "table3":
        return grid(settings_of_table3(method), lr=(0.001, 0.002, 0.004))
    if stage == "longer":
        known = known[known["n_epochs"] == str(EPOCHS["trials"])]
    chosen = best(known, method)[list(CHOSEN)].to_dict()
    if stage == "longer":
        return grid([chosen], lr=RATES)
    if stage == "more":
        return grid(settings_around(method, chosen), weight_decay=("", 1.0), lr=(0.00025, 0.0005, 0.001))
    return grid([chosen], lr=(0.0005, 0.001), weight_decay=(1.0, 3.0, 10.0))


def commands(stage: str, args: argparse.Namespace) -> list[str]:
    """Return the commands of a stage, each of which trains classifiers in one pass. Raises ValueError."""
    known, methods, lines = pd.DataFrame(), KNOWN if "all" in args.methods else args.methods, []
    if stage not in ("trials", "table3"):
        source = args.around if stage in ("more", "table3_more") else args.trials
        if not source.is_file():
            raise ValueError(f"{stage} needs the trials in {source}, which is not there")
        known = read_trials(source, args.per_p_k)
    results = args.results if stage == "finals" else args.trials
    flags = as_flags({"batch_size": 500, "num_valid": args.num_valid or "", "eval_freq": 100000, "results": results})
    flags += f" -d {shlex.quote(args.data_path)}"
    for method in methods:
        if stage == "finals":
            arms = known.loc[known["method"] == method, "arm"].unique()
            lines += finals_of([best(known, arm) for arm in (arms if len(arms) else [method])], flags)
        elif stage != "more" or method not in SINGLE_K:  # a loss of a single k has no relaxed matrix to be softer
            heads = [as_flags({"method": method, **settings}) for settings in trials_of(stage, method, known)]
            lines.append(one_pass(heads, f"--n_epochs {EPOCHS[stage]} --seeds 0 {flags}"))
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
    files = [args.results, args.trials, Path(args.data_path)]
    files += [args.around] if {"more", "table3_more"} & set(args.stages) else []
    if len({file.resolve() for file in files}) < len(files):
        parser.error("--results, --trials, the --around of a stage more and the embeddings must be different files")
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

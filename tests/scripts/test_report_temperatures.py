"""The best temperatures: chosen by validation alone, shown beside the default; what is refused; the figures."""

from scripts import report
from tests.scripts.test_report_beam_search import lines_of, reported

SETTING = {
    **{"num_classes": "100", "train_images": "90", "valid_images": "10", "n_epochs": "5", "batch_size": "30"},
    **{"lr": "0.004", "device_name": "a processor", "torch_version": "2", "m": "100", "last_test_logit_std": "2.0"},
    "last_inverse_temperature": "",
}
HALF, FIVE = "0.5 0 0 0 0.5", "0 0 0 0 1"
ANNEALED = "0.1:5: 40.00 / 60.00"


def row(method: str, p_k: str, beta: str, seed: int, valid: tuple[float, float], test: tuple[float, float]):
    measured = {"valid_top1": valid[0], "valid_top5": valid[1], "test_top1": test[0], "test_top5": test[1]}
    shown = {name: str(value) for name, value in measured.items()}
    return {**SETTING, "method": method, "p_k": p_k, "inverse_temperature": beta, "seed": str(seed), **shown}


ROWS = [
    row("softmax_cross_entropy", "1", "", 0, (0.5, 0.8), (0.51, 0.81)),
    # 1 has the better top-1 on validation, .5 the better top-5; the test accuracies must not matter
    *(row("lml", p_k, "1", seed, (0.6, 0.7), (0.3, 0.9)) for p_k in (HALF, FIVE) for seed in (0, 1)),
    *(row("lml", p_k, "0.5", 0, (0.4, 0.8), (0.9, 0.3)) for p_k in (HALF, FIVE)),
    *(row("lml", p_k, "0.5", 1, (0.4, 0.8), (0.8, 0.4)) for p_k in (HALF, FIVE)),
    *(row("lml", p_k, "4", seed, (0.1, 0.1), (1.0, 1.0)) for p_k in (HALF, FIVE) for seed in (0, 1)),
    *({**row("lml", HALF, "auto", seed, (1.0, 1.0), (0.2, 0.7)), "last_inverse_temperature": "3"} for seed in (0, 1)),
    {**row("lml", HALF, "0.1:5", 0, (0.7, 0.7), (0.4, 0.6)), "last_inverse_temperature": "4.9"},
    {**row("lml", HALF, "5:0.1", 0, (0.6, 0.6), (1.0, 1.0)), "last_inverse_temperature": "0.2"},
    {**row("lml", HALF, "1", 0, (0.6, 0.7), (0.3, 0.5)), "m": "16"},
]


def test_validation_chooses_and_test_reports(write, capsys):
    text = reported(write(*ROWS, name="t.csv"), "--temperatures", capsys=capsys)
    assert text.startswith("t.csv: linear heads on embeddings of 100 classes (90 training rows, 10 validate), 5 epochs")
    lines = lines_of(text, "| lml")
    # (.6 + .7) / 2 against (.4 + .8) / 2; top-5 alone: half of it. The default is .25, which was not tried.
    half, five, mean = "[.5, 0, 0, 0, .5]", "[0, 0, 0, 0, 1]", ["30.00 ± 0.00", "90.00 ± 0.00"]
    assert lines == [
        [half, "lml", "1 (4x)", "2", *mean, "", "20.00 / 70.00", "3", ANNEALED, "2"],
        [half, "lml, m = 16", "1 (4x, the least)", "2", "30.00", "50.00", "", "", "", "", "1"],
        [five, "lml", "0.5 (2x, the least)", "1", "85.00 ± 7.07", "35.00 ± 7.07", "", "", "", "", "2"],
    ]
    expected = ["[1]", "softmax_cross_entropy", "—", "", "51.00", "81.00", "51.00 / 81.00", "", "", "", "1"]
    assert lines_of(text, "| softmax") == [expected]


def test_rows_of_other_settings_or_scripts_are_refused(write, capsys):
    other = write(*ROWS, {**ROWS[-1], "n_epochs": "9"})
    assert report.main([str(other), "--temperatures"]) == 2
    assert "mixes n_epochs 5 and 9" in capsys.readouterr().err
    assert report.main([str(write({"seed": "0"})), "--temperatures"]) == 2
    assert "r.csv has no column method" in capsys.readouterr().err


def test_a_figure_for_each_p_k_with_temperatures(write, tmp_path, capsys):
    reported(write(*ROWS), "--temperatures", "--figures", str(tmp_path / "figures"), capsys=capsys)
    drawn = sorted(path.name for path in (tmp_path / "figures").glob("*.png"))
    assert drawn == ["r_.5_0_0_0_.5.png", "r_0_0_0_0_1.png"]


def test_whole_networks_have_no_spread(write, tmp_path, capsys):
    rows = [{**row("lml", FIVE, beta, 0, (0.5, 0.5), (0.25, 0.75)), "model": "resnet18"} for beta in ("1", "2")]
    for each in rows:
        del each["last_test_logit_std"]
    results = write(*rows, name="networks.csv")
    text = reported(results, "--temperatures", "--figures", str(tmp_path / "figures"), capsys=capsys)
    assert text.startswith("networks.csv: resnet18 (90 training rows")
    (line,) = lines_of(text, "| lml")
    assert line[:6] == ["[0, 0, 0, 0, 1]", "lml", "1 (4x, the least)", "", "25.00", "75.00"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"networks_0_0_0_0_1.{kind}" for kind in ("png", "svg")
    }

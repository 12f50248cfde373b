"""Files of embeddings with other labels replace nothing that is read; the labels themselves: test_noise.py."""

import pytest

from scripts import relabel


@pytest.mark.parametrize(
    "flags",
    [
        "x.pt --human human.pt --output human.pt",
        "x_true.pt --label_noise .2 --output x.pt",
        "x.pt --num_classes 9 --output ./x.pt",
    ],
)
def test_no_output_is_an_input(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x.pt", "x_true.pt", "human.pt"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match="2"):
        relabel.main(flags.split())
    assert "which is read" in capsys.readouterr().err

"""Files of embeddings with other labels replace nothing that is read; the labels themselves: test_noise.py."""

import pytest
import torch

from data.embeddings import load_embeddings
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


@pytest.fixture
def named(tmp_path):
    """A file of embeddings of ten classes, its tensors named as some published ones are."""
    generator = torch.Generator().manual_seed(0)
    content = {}
    for name, rows in (("train", 400), ("val", 100), ("clean", 80), ("valid", 80)):
        content[f"imagenet_{name}_embeddings"] = torch.randn(rows, 6, generator=generator)
        content[f"imagenet_{name}_labels"] = torch.arange(rows) % 10
    content["ids"] = torch.arange(400)
    return tmp_path / "named.pt", content


@pytest.mark.parametrize("num_classes", [1, 100])
def test_the_classes_change_in_every_split_whatever_its_name_in_the_file(named, num_classes):
    path, content = named
    torch.save(content, path)
    output = path.with_name("new.pt")
    assert relabel.main([str(path), "--num_classes", str(num_classes), "--output", str(output)]) == 0
    old = load_embeddings(path)
    new = load_embeddings(output)
    assert new.splits.keys() == old.splits.keys() == {"train", "valid", "test", "clean"}
    for name, split in new.splits.items():
        before = old[name].labels
        assert torch.equal(split.inputs, old[name].inputs)
        if num_classes == 1:
            assert torch.equal(split.labels, before // 10)
        else:
            assert torch.equal(split.labels // 10, before)
            assert len(split.labels.unique()) > 10


def test_files_of_other_labels_are_written_again(named):
    """A call that was killed has written the matrices and not yet the embeddings."""
    path, content = named
    del content["imagenet_clean_embeddings"], content["imagenet_clean_labels"]
    torch.save(content, path)
    words = [str(path), "--label_noise", "0.2", "--output", str(path.with_name("noisy.pt"))]
    assert relabel.main(words) == 0
    assert relabel.is_written(words)
    for name in ("true", "estimated"):
        matrix = path.with_name(f"noisy_{name}.pt")
        right = torch.load(matrix)
        torch.save(right.roll(1, 0), matrix)
        assert not relabel.is_written(words)
        torch.save(right, matrix)
        assert relabel.is_written(words)
    changed = dict(content)
    changed["imagenet_train_embeddings"] = changed["imagenet_train_embeddings"].flip(0)
    torch.save(changed, path)
    assert not relabel.is_written(words)

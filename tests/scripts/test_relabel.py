"""Files of embeddings with other labels replace nothing that is read; the labels themselves: test_noise.py."""

import shlex

import pytest
import torch
from filelock import FileLock, Timeout

from data.embeddings import load_embeddings
from data.points import points_of_embeddings
from experiments import finetune_imagenet, train_knn
from scripts import relabel
from tests.experiments import scripts


def is_written(words):
    return relabel.is_written(relabel.parse_arguments(words))


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


@pytest.fixture
def right(named):
    """The same on disk, with right labels alone."""
    path, content = named
    del content["imagenet_clean_embeddings"], content["imagenet_clean_labels"]
    torch.save(content, path)
    return path


def outputs_of(path):
    """What a call wrote beside a file, without its lock."""
    return sorted(file for file in path.parent.iterdir() if file not in (path, path.with_name("new.pt.lock")))


def call_for(path, flags):
    """The words of a call that writes new.pt beside a file."""
    return [str(path), *flags.split(), "--output", str(path.with_name("new.pt"))]


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


def test_files_of_other_labels_are_written_again(right):
    """A call that was killed has written the matrices and not yet the embeddings."""
    words = call_for(right, "--label_noise 0.2")
    assert relabel.main(words) == 0
    assert is_written(words)
    for name in ("true", "estimated"):
        matrix = right.with_name(f"new_{name}.pt")
        written = torch.load(matrix)
        torch.save(written.roll(1, 0), matrix)
        assert not is_written(words)
        torch.save(written, matrix)
        assert is_written(words)
    content = torch.load(right)
    content["imagenet_train_embeddings"] = content["imagenet_train_embeddings"].flip(0)
    torch.save(content, right)
    assert not is_written(words)


OTHER_FLAGS = {
    "--label_noise 0.2": ["--label_noise 0.3", "--label_noise 0.2 --among 10", "--label_noise 0.2 --draw 1"],
    "--num_classes 100": ["--num_classes 1"],
}


@pytest.mark.parametrize("flags", OTHER_FLAGS)
def test_no_file_that_is_there_is_replaced_and_a_second_call_changes_nothing(flags, right, capsys):
    words = call_for(right, flags)
    assert relabel.main(words) == 0
    outputs = outputs_of(right)
    assert set(capsys.readouterr().out.split()) == {"wrote", *map(str, outputs)}
    before = [file.read_bytes() for file in outputs]
    assert relabel.main(words) == 0
    assert capsys.readouterr().out.count("is there already") == len(outputs)
    for other in OTHER_FLAGS[flags]:
        with pytest.raises(ValueError, match=r"new.*is there, with other content"):
            relabel.main(call_for(right, other))
    assert [file.read_bytes() for file in outputs] == before


@pytest.mark.parametrize("flags", OTHER_FLAGS)
def test_a_file_of_the_user_is_not_replaced_and_nothing_is_written_beside_it(flags, right):
    words = call_for(right, flags)
    assert relabel.main(words) == 0
    outputs = outputs_of(right)
    for file in outputs:
        for each in outputs:
            each.unlink(missing_ok=True)
        file.write_text("of the user")
        with pytest.raises(ValueError, match=f"{file.name} is .*: delete or rename it"):
            relabel.main(words)
        assert [each.name for each in outputs if each.exists()] == [file.name]
        assert file.read_text() == "of the user"


@pytest.mark.parametrize("flags", OTHER_FLAGS)
def test_no_other_call_writes_from_the_check_to_the_last_file(flags, right, monkeypatch):
    """Else the embeddings of one call may lie beside the matrices of another."""
    held = []

    def while_locked(function):
        def call(*words):
            with pytest.raises(Timeout):
                FileLock(f"{right.with_name('new.pt')}.lock").acquire(timeout=0)
            held.append(function.__name__)
            return function(*words)

        return call

    for function in (relabel.has_wrong_labels, relabel.check_same, relabel.save_torch_file):
        monkeypatch.setattr(relabel, function.__name__, while_locked(function))
    words = call_for(right, flags)
    assert relabel.main(words) == 0
    written = len(held)
    assert held == ["save_torch_file"] * written
    assert relabel.main(words) == 0
    assert held[written:] == ["check_same"] * written
    other = relabel.parse_arguments(call_for(right, "--label_noise 0.3"))
    if "--label_noise" in flags:
        relabel.write(other, replaces=True)
        assert held[2 * written :] == ["has_wrong_labels", *["save_torch_file"] * written]
        relabel.write(other, replaces=True)  # as where another call had just written it
        assert len(held) == 3 * written + 1


def test_an_output_in_no_folder_is_refused_and_none_is_made(right):
    with pytest.raises(OSError, match="there is no folder"):
        relabel.main([str(right), "--label_noise", "0.2", "--output", str(right.parent / "none" / "new.pt")])
    assert not (right.parent / "none").exists()


@pytest.mark.parametrize("more", ["--noisy_valid", "--num_valid 50"])
def test_a_file_with_another_split_is_another_file(right, more):
    content = torch.load(right)
    del content["imagenet_valid_embeddings"], content["imagenet_valid_labels"]
    torch.save(content, right)
    words = call_for(right, "--label_noise 0.2 --num_valid 100")
    assert relabel.main(words) == 0
    with pytest.raises(ValueError, match=r"new.*is there, with other content"):
        relabel.main([*words, *more.split()])


def test_a_call_goes_on_where_one_was_killed(right):
    """It had written a matrix, and not yet the embeddings."""
    words = call_for(right, "--label_noise 0.2")
    assert relabel.main(words) == 0
    for name in ("new.pt", "new_estimated.pt"):
        right.with_name(name).unlink()
    assert relabel.main(words) == 0
    assert is_written(words)


def test_labels_by_people_of_another_draw_have_another_matrix(tmp_path):
    path = scripts.embeddings(tmp_path / "right.pt")
    labels = load_embeddings(path)["train"].labels
    people = {"clean_label": labels.numpy(), "noisy_label": labels.roll(1).numpy()}
    torch.save(people, tmp_path / "people.pt")
    words = [str(path), "--human", str(tmp_path / "people.pt"), "--num_valid", "20"]
    for draw in ("0", "1"):
        call_of_draw = [*words, "--draw", draw, "--output", str(tmp_path / f"new{draw}.pt")]
        assert relabel.main(call_of_draw) == 0
        assert is_written(call_of_draw)
        assert not is_written([*call_of_draw, "--draw", "2"])


HEADS = "--batch_size 25 --n_epochs 1 --eval_freq 0 --lr .01 --method softmax_cross_entropy"
KNN = "--method softsort --batch_size 20 --num_candidates 20 --n_epochs 1 --dim 4 --k 3"
OTHER_SPLITS = [
    (finetune_imagenet, f"{HEADS} --num_valid 20 --split_seed 1"),
    (finetune_imagenet, f"{HEADS} --num_valid 19"),
    (finetune_imagenet, f"{HEADS} --num_valid 20 --limit_train 100"),
    (finetune_imagenet, HEADS),
    (train_knn, KNN),
]


def noisy_file(folder, *words):
    """A file of 130 training rows with wrong labels, which validates on 20 with right ones."""
    path = scripts.embeddings(folder / "right.pt")
    output = folder / f"noisy{len([*folder.iterdir()])}.pt"
    words = [str(path), "--label_noise", "1", "--among", "8", *words, "--output", str(output)]
    assert relabel.main(words) == 0
    return output, words


def call(script, path, flags):
    words = f"-d {path} {flags} --device cpu --threads 1 --results {path.parent / 'r.csv'}"
    return script.main(shlex.split(words))


@pytest.mark.parametrize(("script", "flags"), OTHER_SPLITS)
def test_a_run_that_would_validate_on_wrong_labels_is_refused(script, flags, tmp_path):
    path, _ = noisy_file(tmp_path, "--num_valid", "20")
    with pytest.raises(ValueError, match="right labels at the rows that validate with --num_valid 20 --split_seed 0"):
        call(script, path, flags)
    assert not (tmp_path / "r.csv").exists()


def test_runs_with_the_split_of_the_file_and_files_that_do_not_say_so_are_as_they_were(tmp_path):
    path, words = noisy_file(tmp_path, "--num_valid", "20")
    assert call(finetune_imagenet, path, f"{HEADS} --num_valid 20") == 0
    assert not is_written([*words, "--num_valid", "21"])  # right elsewhere
    path, _ = noisy_file(tmp_path, "--num_valid", "13")
    points_of_embeddings(load_embeddings(path))  # a tenth, by seed 0
    with pytest.raises(ValueError, match="right labels"):
        points_of_embeddings(load_embeddings(path), seed=1)
    path, words = noisy_file(tmp_path, "--num_valid", "20", "--noisy_valid")
    assert is_written(words)
    assert not is_written([*words, "--num_valid", "21"])  # other rows validate
    assert call(finetune_imagenet, path, HEADS) == 0
    content = torch.load(noisy_file(tmp_path, "--num_valid", "20")[0])
    del content["info"]["right_rows"]
    torch.save(content, path)
    assert call(finetune_imagenet, path, f"{HEADS} --split_seed 1") == 0


@pytest.mark.parametrize("draw", ["-1", "1.5", "x"])
def test_a_draw_is_a_seed_as_others_are(draw, right, capsys):
    with pytest.raises(SystemExit, match="2"):
        relabel.main([str(right), "--label_noise", "0.2", f"--draw={draw}", "--output", str(right.with_name("new.pt"))])
    assert "--draw" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flags", ["", "--num_valid 130", "--noisy_valid"])
def test_a_validation_split_of_all_rows_is_refused_by_its_flag(flags, tmp_path):
    """5000 without the flag."""
    path = scripts.embeddings(tmp_path / "right.pt")
    number = flags.partition("--num_valid ")[2] or "5000"
    words = f"{path} --label_noise 1 --among 8 {flags} --output {tmp_path / 'new.pt'}"
    with pytest.raises(ValueError, match=f"--num_valid {number} leaves none of the 130 rows to train: give fewer"):
        relabel.main(words.split())
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize("flag", ["--among 5", "--draw 0", "--noisy_valid", "--num_valid 5000"])
def test_flags_of_wrong_labels_are_refused_where_none_is_made(flag, named, capsys):
    path, content = named
    torch.save(content, path)
    with pytest.raises(SystemExit, match="2"):
        relabel.main([str(path), "--num_classes", "100", *flag.split(), "--output", str(path.with_name("new.pt"))])
    assert f"{flag.split()[0]} is of --label_noise" in capsys.readouterr().err


@pytest.mark.parametrize(("classes", "wanted"), [(15, 1), (25, 2)])
def test_a_number_of_classes_that_is_no_tenth_is_refused(classes, wanted, named):
    path, content = named
    content = {name: part for name, part in content.items() if "clean" not in name and "valid" not in name}
    content["imagenet_train_labels"] = torch.arange(400) % classes
    torch.save(content | {"info": {"num_classes": classes}}, path)
    with pytest.raises(ValueError, match="must be a tenth"):
        relabel.main([str(path), "--num_classes", str(wanted), "--output", str(path.with_name("new.pt"))])
    assert not path.with_name("new.pt").exists()


def test_a_class_that_does_not_train_is_divided_in_no_split(named):
    path, content = named
    content["imagenet_train_labels"] = torch.arange(400) % 9
    torch.save(content | {"info": {"num_classes": 10}}, path)
    words = [str(path), "--output", str(path.with_name("new.pt")), "--num_classes"]
    with pytest.raises(ValueError, match="has rows of class 9 and train has none"):
        relabel.main([*words, "100"])
    assert relabel.main([*words, "1"]) == 0

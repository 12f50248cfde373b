"""The commit of a row is one of the repository in which the code lies, or none."""

import subprocess

import pytest

from experiments.common import provenance


def git(folder, *words):
    author = ("-c", "user.name=someone", "-c", "user.email=someone@localhost")
    done = subprocess.run(["git", "-C", folder, *author, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The project, unpacked in a folder of another repository that has a commit."""
    folder = tmp_path / "other" / "project"
    folder.mkdir(parents=True)
    git(tmp_path / "other", "init", "--quiet")
    (folder / "code.py").write_text("1")
    git(tmp_path / "other", "add", "--all")
    git(tmp_path / "other", "commit", "--quiet", "--message", "Other")
    monkeypatch.setattr(provenance, "ROOT", folder.resolve())
    return folder


def test_the_commit_of_another_repository_does_not_count(project):
    assert git(project, "rev-parse", "HEAD")
    assert provenance.git_commit() == ""


def test_the_project_has_its_own_commit_and_says_what_changed(project):
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "Own")
    commit = git(project, "rev-parse", "HEAD")
    assert provenance.git_commit() == commit
    (project / "code.py").write_text("2, which is longer")
    assert provenance.git_commit() == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("earlier", "later", "expected"), [("a", "a", "a"), ("a", "b", "a+b"), ("a+b", "b", "a+b"), ("", "b", "b")]
)
def test_commits_are_joined_each_once(earlier, later, expected):
    assert provenance.joined(earlier, later) == expected

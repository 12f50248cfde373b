"""What the documentation takes from the repository when it is built."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reporting import site

ROOT = Path(__file__).parents[2]


def test_links_out_of_docs_become_links_within_the_site():
    text = "[a](../../results/README.md#paper) ![b](../figures/b.svg) [c](https://c.org) [d](#d) [e](../../README.md)"
    assert site.with_site_links(text, "docs/findings/heads.md") == (
        "[a](../results/README.md#paper) ![b](../figures/b.svg) [c](https://c.org) [d](#d) [e](../index.md)"
    )
    assert site.with_site_links("[a](docs/api.md) [b](LICENSE)", "README.md") == "[a](api.md) [b](LICENSE)"
    assert {"CHANGELOG.md", "results/README.md", "LICENSE"} <= site.linked_files(ROOT / "README.md")


@pytest.mark.docs("latex2mathml")
def test_formulas_become_mathml():
    html = site.mathml(
        '<p>a <span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[\nx^2\n\\]</div>'
    )
    assert html.count("<math") == 2
    assert 'display="block"' in html
    assert "arithmatex" not in html
    with pytest.raises(ValueError, match=r"latex2mathml does not know.*\\arg \\min"):
        site.mathml('<span class="arithmatex">\\(\\arg \\min_x f\\)</span>')


@pytest.mark.docs("mkdocs")
@pytest.mark.parametrize("planted", ["", "[a](../nowhere.md)", "[a](#nowhere)", "![a](figures/nowhere.svg)"])
def test_a_broken_link_or_a_missing_picture_fails_the_build(planted, tmp_path):
    """The command of scripts/docs.sh, on a copy of what it reads."""
    for folder in ("docs", "results", "benchmarks", "reporting", "topk_losses"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "logs"))
    for file in [path for path in ROOT.iterdir() if path.suffix in (".md", ".yml", ".cff") or path.name == "LICENSE"]:
        shutil.copy(file, tmp_path)
    with (tmp_path / "docs" / "speed.md").open("a") as page:
        page.write(f"\n{planted}\n")
    (line,) = re.findall(r"^.*mkdocs build.*$", (ROOT / "scripts" / "docs.sh").read_text(), re.MULTILINE)
    command = line.replace(".venv-docs/bin/python", sys.executable)
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode != 0, "nowhere" in done.stderr) == (bool(planted), bool(planted)), done.stderr


def test_each_file_with_tests_of_the_documentation_s_packages_is_run_by_its_script():
    marked = set()
    for path in ROOT.glob("tests/**/test_*.py"):
        if "mark.docs" + "(" in path.read_text(encoding="utf-8"):
            marked.add(path.relative_to(ROOT).as_posix())
    (line,) = re.findall(r"^.*pytest -m docs (.*)$", (ROOT / "scripts" / "docs.sh").read_text(), re.MULTILINE)
    assert set(line.split()) == marked


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == {page for page in listed if (ROOT / "docs" / page).exists()}

"""What the documentation takes from the repository when it is built."""

import re
from pathlib import Path

import pytest

from scripts.reporting import site
from topk_losses import METHODS

ROOT = Path(__file__).parents[2]


def test_links_out_of_docs_become_links_within_the_site():
    text = "[a](../../results/README.md#paper) ![b](../figures/b.svg) [c](https://c.org) [d](#d) [e](../../README.md)"
    assert site.with_site_links(text, "docs/findings/heads.md") == (
        "[a](../results/README.md#paper) ![b](../figures/b.svg) [c](https://c.org) [d](#d) [e](../index.md)"
    )
    assert site.with_site_links("[a](docs/api.md) [b](LICENSE)", "README.md") == "[a](api.md) [b](LICENSE)"
    assert {"CHANGELOG.md", "results/README.md", "LICENSE"} <= site.linked_files(ROOT / "README.md")


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml", reason="scripts/docs.sh installs it")
    html = site.mathml(
        '<p>a <span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[\nx^2\n\\]</div>'
    )
    assert html.count("<math") == 2
    assert 'display="block"' in html
    assert "arithmatex" not in html
    with pytest.raises(ValueError, match=r"latex2mathml does not know.*\\arg \\min"):
        site.mathml('<span class="arithmatex">\\(\\arg \\min_x f\\)</span>')


def test_docstrings_are_shown_as_they_are_written():
    pytest.importorskip("griffe", reason="scripts/docs.sh installs it")
    from scripts.reporting.plain_docstrings import escaped

    assert escaped("    p_k: log sum_{k>=2} `a_b` s_[i]") == "    p_k: log sum\\_{k&gt;=2} `a_b` s\\_\\[i\\]"
    assert escaped("    weight, p_k: > 0") == "    weight, p_k: &gt; 0"


def test_every_method_has_a_page_with_its_figure_and_a_line_in_the_table_to_choose_by():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "methods").glob("*.md"))
    table = (ROOT / "docs" / "which-loss.md").read_text(encoding="utf-8")
    for method in METHODS:
        assert f"(../figures/{method}.svg)" in pages, method
        assert f"`{method}`" in table, method


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == {page for page in listed if (ROOT / "docs" / page).exists()}

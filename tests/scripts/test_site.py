"""What the documentation takes from the repository when it is built."""

import re
from pathlib import Path

import pytest

from scripts.reporting import site
from scripts.reporting.runs import ReportError
from topk_losses import METHODS

ROOT = Path(__file__).parents[2]


def marks_of(page: Path) -> list[re.Match[str]]:
    return list(site.MARK.finditer(page.read_text(encoding="utf-8")))


def test_results_that_have_not_run_stand_beside_the_published_ones(tmp_path):
    """The same mark before the sweep has begun, and when one of its rows is there."""
    mark = "# Table 1\n\n[results](../../results/table1_short.csv)\n"
    before = site.expand(mark, lambda name: False, root=tmp_path)
    assert "Ours (table1_short.csv): not run." in before
    assert before.count(" not run |") == 2 * 10  # the rows of the paper, top-1 and top-5
    assert "62.00" in before
    lines = (ROOT / "results" / "table1_short.csv").read_text().splitlines(keepends=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table1_short.csv").write_text("".join(lines[:2]))
    after = site.expand(mark, lambda name: name == "table1_short_accuracy.svg", "../", tmp_path)
    assert after.count(" not run |") == 2 * 9
    assert re.findall(r"!\[.*\]\((.*)\)", after) == ["../figures/table1_short_accuracy.svg"]


def test_a_broken_results_file_stops_the_build(tmp_path):
    (tmp_path / "table1.csv").write_text("run_id,p_k\na,1\n")
    with pytest.raises(ReportError, match="method among them"):
        site.expand("[results](table1.csv)", lambda name: False, root=tmp_path)
    with pytest.raises(ReportError, match="there is no file"):
        site.expand("[paired](mine.csv)", lambda name: False, root=tmp_path)


def test_an_included_file_loses_its_title_and_finds_its_figures():
    text = site.expand("[include](../benchmarks/README.md)", lambda name: False)
    assert not re.search(r"^# ", text, re.MULTILINE)
    assert "(figures/cost_over_size.svg)" in text
    assert "[benchmark" not in text
    told, _, table = text.partition("`transport.csv`: ")[2].partition("\n\n")
    assert told == "k 5, device AMD EPYC, threads 2, torch 2.14.1+cu130."
    assert re.match(r"\| method +\| +batch \| +n \|", table.lstrip())


@pytest.mark.parametrize(
    ("page", "numbers_of_lines"),
    [("findings/temperature-study", [15, 15, 18, 3, 3]), ("knn", [36, 36]), ("beam_search", [4 + 4 + 4] * 2)],
)
def test_every_table_of_a_page_has_its_lines(page, numbers_of_lines):
    tables = [site.expand(mark[0], lambda name: False) for mark in marks_of(ROOT / "docs" / f"{page}.md")]
    assert [len(re.findall(r"^\| \w", table, re.MULTILINE)) for table in tables] == [
        number + table.count("\n|:-") for number, table in zip(numbers_of_lines, tables)
    ]


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
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))


def test_where_pages_are_read_without_being_built_a_mark_is_a_link_to_its_file():
    pages = [ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/**/*.md")]
    links = [page.parent / mark[0].rpartition("(")[2].rstrip(")") for page in pages for mark in marks_of(page)]
    assert len(links) > 25
    assert [link for link in links if not link.is_file()] == []
    alone = [line for page in pages for line in re.findall(r"^\[.*\]\(\S+csv\)$", page.read_text(), re.MULTILINE)]
    assert len(alone) == sum(link.suffix == ".csv" for link in links)  # a misspelt mark would stay a link

"""The pages: their generated parts are those that scripts/pages.py makes."""

import re

import pytest

import topk_losses
from scripts import pages
from scripts.reporting.runs import ReportError


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_generated_parts_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert pages.rewritten(text) == text, "scripts/pages.py writes it again"


def test_a_changed_table_is_named_and_written_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(pages, "pages", lambda: [tmp_path / "page.md"])
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n<!-- begin columns -->\n\nan old table\n\n<!-- end -->\n\nThe rest.\n")
    assert (pages.main(["--check"]), "an old table" in page.read_text()) == (1, True)
    assert "page.md would change" in capsys.readouterr().err
    assert (pages.main([]), "an old table" in page.read_text(), pages.main(["--check"])) == (0, False, 0)
    assert page.read_text().endswith("<!-- end -->\n\nThe rest.\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin tables a.csv -->\n<!-- end -->", "one of results, published"),
        ("<!-- begin columns -->\n", "needs an <!-- end -->"),
        ("<!-- begin epochs none.csv -->\n<!-- end -->", "no file"),
    ],
)
def test_what_a_page_cannot_have(text, message):
    with pytest.raises(ReportError, match=message):
        pages.rewritten(text)


def test_the_api_page_has_every_export():
    text = (pages.ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: topk_losses\.(\w+)$|^\| `([A-Z\d_]+)` \|", text, re.MULTILINE)
    assert {"".join(names) for names in shown} >= {*topk_losses.__all__}

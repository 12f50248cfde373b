"""The pages: their tables and figures are those of scripts/pages.py, prose has no other numbers, links lead on."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from scripts import pages

PAGES = [*pages.pages(), *(pages.ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+(?![\w]|\.\d)")
CONSTANTS = {  # settings, and published or withdrawn values; those of the README: tests/test_claims.py
    "README.md": "3.10 2.11 0.24 0.61 0.55",
    "results/README.md": "0.1 0.00024",
    "docs/differences.md": "0.01 0.1 0.001",
    "docs/faq.md": "0.1 0.125 0.25",
    "docs/findings.md": "2403.19625 0.5 0.8 0.25 0.4 64.53 88.51",
    "docs/findings/from-scratch.md": "0.73 1.42",
    "docs/integrations.md": "0.1",
    "docs/knn.md": "0.9",
    "docs/own-images.md": "1.2",
    "docs/reproduce.md": "0.001",
    "docs/which-loss.md": "0.1 0.125",
    "docs/temperature.md": "0.05 0.1 0.125 0.2 0.5",
    "docs/guides/wrong-labels.md": "2.14",
    "docs/methods/networks.md": "3.3",
    "benchmarks/README.md": "3.12",
}
SVG = "{http://www.w3.org/2000/svg}"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(pages.ROOT).as_posix())


def read(path):
    return path.read_text(encoding="utf-8")


@by_page
def test_generated_parts_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert pages.rewritten(text, page.parent) == text, "scripts/pages.py writes it again"


@by_page
def test_a_decimal_number_in_prose_stands_in_a_table_of_its_page_or_in_one_that_it_links_to(page):
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(pages.ROOT).as_posix()
    linked = re.findall(r"\]\(([^)#]*(?:results/tables/[^)#]+|docs/reproduce\.md))", text)
    tables = [page.parent / target for target in linked]
    made = "".join(part[0] for source in [text, *map(read, tables)] for part in pages.PART.finditer(source))
    made += CONSTANTS.get(name, "")
    known = [float(number) for number in re.findall(r"\d*\.?\d+", made.replace(",", ""))]
    prose = re.sub(r"\]\([^)]*\)", "]", CODE.sub("", pages.PART.sub("", text)))
    typed = NUMBER.findall(prose) if name != "CHANGELOG.md" else []
    assert [n for n in typed if not any(round(value, len(n.partition(".")[2])) == float(n) for value in known)] == []


def anchors(page):
    """The addresses of a page's headings, where GitHub and the documentation's site make the same one."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()) for title in titles]
    on_github = [title.replace(" ", "-") for title in plain]
    return {address for address in on_github if address == re.sub("-+", "-", address)}


@by_page
def test_links_lead_to_files_and_headings(page):
    for target, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{target}#{anchor}"


def drawing(path):
    """The texts of a figure, and where its marks lie in their axes; not its numeric ticks, which matplotlib chooses."""
    root = ElementTree.parse(path).getroot()
    for parent in list(root.iter()):
        for child in list(parent):
            is_tick = re.match("[xy]tick_", child.get("id", ""))
            if child.tag == f"{SVG}defs" or (is_tick and not re.search("[^\\s\\d.−]", "".join(child.itertext()))):
                parent.remove(child)
    words = ["".join(text.itertext()).split() for text in root.iter(f"{SVG}text")]
    groups = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("axes_")]
    return words, [place for group in groups for place in places(group)]


def places(axes):
    """The points of each mark of one panel, in shares of the panel's width and height."""
    edges = points(axes.find(f"{SVG}g/{SVG}path"))
    low = edges.min(0)
    high = edges.max(0)
    found = []
    for group in axes:
        if not group.get("id").startswith(("matplotlib.axis", "legend")):
            marks = [mark for mark in group.iter() if mark.tag in (f"{SVG}path", f"{SVG}use")]
            found += [(points(mark) - low) / (high - low) for mark in marks]
    return found


def points(mark):
    """(points, 2) of a path, or of a marker that is used at a place."""
    text = mark.get("d") or f"{mark.get('x')} {mark.get('y')}"
    return np.array(re.findall(r"-?\d+(?:\.\d+)?", text), float).reshape(-1, 2)


def distance(places, line, share=1.0):
    """How far from a line through points this share of the places lies, without those outside of the panel."""
    places = places[((places >= 0) & (places <= 1)).all(1)]
    if len(places) == 0:
        return 0.0
    if len(line) == 0:
        return math.inf
    steps = np.append(line[1:], line[-1:], axis=0) - line  # (points, 2)
    offsets = places[:, None] - line  # (places, points, 2)
    shares = (offsets * steps).sum(2) / np.maximum((steps**2).sum(1), 1e-12)
    offsets = offsets - shares.clip(0, 1)[..., None] * steps
    return np.quantile(np.sqrt((offsets**2).sum(2)).min(1), share)


plain_savefig = Figure.savefig


def save_and_measure(figure, *args, **kwargs):
    """Nothing of a figure lies outside of it, where it would be cut."""
    plain_savefig(figure, *args, **kwargs)
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1) > -0.05  # inches


# SoftSort jumps where two scores are equal, and whether they are is a matter of rounding.
SHARES = {"softsort": 0.9}


@pytest.mark.parametrize("draw", [pages.draw_method_figures, pages.draw_result_figures])
def test_figures_are_those_of_the_results(draw, tmp_path, monkeypatch):
    """Compared as lines: which points of a line can go without its look is for matplotlib to say."""
    compared = [name for name, method in pages.METHODS.items() if not method.stochastic]
    monkeypatch.setattr(pages, "METHODS", compared)  # noise costs seconds, and differs between versions
    monkeypatch.setattr(Figure, "savefig", save_and_measure)
    for path in draw(tmp_path):
        words, marks = drawing(pages.FIGURES / path.name)
        new_words, new_marks = drawing(path)
        assert words == new_words, f"{path.name}: scripts/pages.py --figures draws it again"
        assert len(marks) == len(new_marks) > 0, path.name
        share = SHARES.get(path.stem, 1.0)
        for mark, new in zip(marks, new_marks):
            assert max(distance(mark, new, share), distance(new, mark, share)) < 0.005, path.name


def test_a_changed_table_is_named_and_written_again(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr(pages, "pages", lambda: [page])
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page.write_text("# A page\n\n<!-- begin columns -->\n\nan old table\n\n<!-- end -->\n")
    assert (pages.main(["--check"]), "an old table" in page.read_text()) == (1, True)
    assert "page.md would change" in capsys.readouterr().err
    assert (pages.main([]), "an old table" in page.read_text(), pages.main(["--check"])) == (0, False, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- begin tables a.csv -->\n<!-- end -->", "one of results, published"),
        ("<!-- begin columns -->\n", "needs an <!-- end -->"),
        ("<!-- begin results none.csv -->\n<!-- end -->", "no file"),
    ],
)
def test_errors_of_pages(text, message):
    with pytest.raises((ValueError, OSError), match=message):
        pages.rewritten(text)

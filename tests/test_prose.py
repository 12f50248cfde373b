"""The hand-written prose of all Markdown pages: how much it is, and how long its sentences are.

Prose is what is left without generated parts, tables, captions, code, formulas, headings and lines that only point
elsewhere. A code span or a formula counts as one word.
"""

import re
import subprocess
from pathlib import Path

import pytest

from scripts.pages import PART

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    ROOT / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
)
MOST_WORDS = 15_000
LONGEST = 25
SHORT = 6  # words that a sentence should have
SHARE_OF_SHORT = 0.08
OTHER = (
    re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"^ *[#|].*$", re.MULTILINE),  # headings, tables
    re.compile(r"^\*[^*].*?[^*]\*$(?=\n\n|\n?\Z)", re.MULTILINE | re.DOTALL),  # captions
    re.compile(r"^!\[.*?\]\(.*?\)$", re.MULTILINE),
    re.compile(r"<summary>.*?</summary>|<[^>]+>"),
    re.compile(r"\*\*(When to use\.|\w+[.:]?)\*\*"),  # labels
    re.compile(r"^(Paper|API|Source): .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL),
    re.compile(r"^(\S+ ){0,4}\S+:$", re.MULTILINE),  # what introduces a block in a few words
)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ONLY_LINKS = re.compile(r"[^\w]*(Evidence for )?(LINK[^\w]*(and )?)+")
END = re.compile(r"(?<=[.?!])[)\"]? +(?=[\"([]?[A-Z0-9])")


def prose(text: str) -> str:
    text = PART.sub("\n\n", text)
    for pattern in OTHER:
        text = pattern.sub("\n\n", text)
    return text


def sentences(text: str) -> list[str]:
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?= *[-*] | *\d+\. )", prose(text)):
        line = re.sub(r"^([-*]|\d+\.) ", "", " ".join(paragraph.split()))
        line = re.sub(r"`[^`]*`|\$[^$]+\$", "Code", line).replace("**", "")
        if ONLY_LINKS.fullmatch(LINK.sub("LINK", line)):
            continue
        line = re.sub(r"\b(et al|e\.g|i\.e|vs)\.", r"\1", line)
        for sentence in END.split(line):
            if not ONLY_LINKS.fullmatch(LINK.sub("LINK", sentence)) and words(LINK.sub(r"\1", sentence)):
                found.append(LINK.sub(r"\1", sentence))
    return found


def words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][^\s/–—]*", sentence))


BY_PAGE = {page: sentences(page.read_text(encoding="utf-8")) for page in PAGES}


def test_the_prose_ends():
    assert sum(words(sentence) for found in BY_PAGE.values() for sentence in found) <= MOST_WORDS


def test_few_sentences_are_clipped():
    every = [sentence for found in BY_PAGE.values() for sentence in found]
    assert sum(words(sentence) < SHORT for sentence in every) < SHARE_OF_SHORT * len(every)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_is_too_long(page):
    assert [sentence for sentence in BY_PAGE[page] if words(sentence) > LONGEST] == []


FINDINGS = [ROOT / "docs" / name for name in ("findings.md", "knn.md", "speed.md", "beam_search.md")]
FINDINGS += sorted(ROOT.glob("docs/findings/*.md"))


@pytest.mark.parametrize("page", FINDINGS, ids=lambda page: page.stem)
def test_a_page_of_findings_opens_with_its_table_and_leaves_the_others_to_the_record(page):
    text = page.read_text(encoding="utf-8")
    opening = text.partition("\n## ")[0]
    assert PART.search(opening)
    assert len(PART.findall(text)) <= 2
    assert "results/tables/" in text


def test_the_changelog_ends():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 500

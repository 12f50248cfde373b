"""Hooks of mkdocs.yml: links that leave docs/, and formulas as MathML.

On GitHub a page of docs/ may link to any file of the repository. The built site takes these files in: the page
results/README.md has the same address there, the README is the home page, and a CSV file can be downloaded.
"""

import os.path
import re
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = "README.md"
TARGET = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def address(path: str) -> str:
    """A file's path within the site, given its path in the repository."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def with_site_links(text: str, page: str) -> str:
    """The Markdown of a page with its links as they are within the site. page: its path in the repository."""

    def rewritten(target: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(page), target[1]))
        return os.path.relpath(address(path), os.path.dirname(address(page)))

    return TARGET.sub(rewritten, text)


def linked_files(page: Path) -> set[str]:
    """The files outside docs/ that a page links to, and those that these link to."""
    found: set[str] = set()
    waiting = [page]
    while waiting:
        page = waiting.pop()
        for target in TARGET.findall(page.read_text(encoding="utf-8")):
            path = Path(os.path.normpath(page.parent / target))
            name = os.path.relpath(path, ROOT)
            if path.is_file() and not name.startswith(("docs/", "..")) and name not in found:
                found.add(name)
                waiting += [path] if path.suffix == ".md" else []
    return found


def mathml(html: str) -> str:
    """A page's HTML with its formulas as MathML. Raises ValueError for a command that the converter leaves."""
    from latex2mathml.converter import convert

    def converted(found: re.Match[str]) -> str:
        tag, opening, latex = found.groups()
        formula = convert(unescape(latex).strip(), display="block" if opening == "[" else "inline")
        if "\\" in formula:
            raise ValueError(f"latex2mathml does not know a command of this formula: {latex.strip()}")
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(converted, html)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the README and the files that pages link to outside docs/."""
    from mkdocs.structure.files import File

    pages = [ROOT / HOME, *(Path(file.abs_src_path) for file in files.documentation_pages())]
    for name in sorted({HOME, *(name for page in pages for name in linked_files(page))}):
        files.append(File.generated(config, address(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """mkdocs: make the links of a page those of the site."""
    return with_site_links(text, os.path.relpath(page.file.abs_src_path, ROOT))


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs: formulas become MathML."""
    return mathml(html)

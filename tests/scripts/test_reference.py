"""The reference pages: a section of one form for each method, and help texts that are read alike."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from reporting import reference
from topk_losses import METHODS

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path for folder in ("experiments", "benchmarks", "scripts", "data") for path in ROOT.glob(f"{folder}/*.py")
)
SCRIPTS = [str(path.relative_to(ROOT)) for path in PROGRAMS if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_a_section_of_the_template(method):
    page, _, _ = reference.sections()[method].partition("#")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"\n## {method}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    parts = ["\nPaper: ", "](https://", "\n$$", "\n**When to use.** ", f"<!-- begin parameters {method} -->"]
    parts += ["\n```python\n", f"](../figures/{method}.svg)"]
    if method == "softmax_cross_entropy":
        parts.remove("](https://")
    places = [section.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_a_phrase_that_ends_with_its_default(script):
    parser = reference.parser_of(script)
    for flag in parser._actions:
        if flag.choices:
            assert parser.format_help().count("{" + ",".join(map(str, flag.choices)) + "}") < 2
        text = (flag.help or "") % vars(flag)
        assert text, flag.option_strings
        assert not re.match(r"(a|the|of|for|with|by) ", text)
        assert str(ROOT) not in text
        default = re.fullmatch(r"(?:.*\()?default: (.*?)\)?", text)
        assert default or "default" not in text
        if isinstance(flag.default, (int, float)) and not isinstance(flag.default, bool):
            assert default[1] == f"{flag.default:g}" or not re.match(r"[\d.]+$", default[1])


def test_no_warning_stands_above_the_usage():
    command = [sys.executable, "benchmarks/losses.py", "--help"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert run.stdout.startswith("usage: ")
    assert run.stderr == ""


def test_docstrings_are_shown_as_they_are_written():
    assert reference.escaped("p_k: log sum_{k>=2} `a_b` s_[i]") == "p\\_k: log sum\\_{k&gt;=2} `a_b` s\\_\\[i\\]"
    parts = reference.described("What it is.\n\nArgs:\n    a, b: two\n        numbers.\n    c: one.\n\nMore.")
    assert parts[""].split() == ["What", "it", "is.", "More."]
    assert reference.items(parts["Args"]) == {"a, b": "two numbers.", "c": "one."}


def test_a_colon_in_the_description_of_a_parameter_begins_no_other():
    section = "    tau: temperature, the closer to the\n        hard hinge: it is another.\n    alpha, beta: margins.\n"
    assert reference.items(section) == {
        "tau": "temperature, the closer to the hard hinge: it is another.",
        "alpha, beta": "margins.",
    }

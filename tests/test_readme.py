"""The README's Python runs as it stands: its fenced blocks, and the calls that the sentences below a block name."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parent.parent / "README.md"
FENCE = re.compile(r"^```(\w*)$", re.MULTILINE)
CONTINUES = re.compile(r"^#.*\b(continued|continues|as above)\b", re.IGNORECASE)


def blocks(text: str) -> list[tuple[int, str, str]]:
    """Each ```python block: the line where its code begins, the code, and the prose up to the next heading or fence."""
    fences = list(FENCE.finditer(text))
    assert len(fences) % 2 == 0, "a fence is left open"
    found = []
    for opening, closing, after in zip(fences[::2], fences[1::2], [*fences[2::2], None]):
        if opening[1] == "python":
            prose = text[closing.end() : after and after.start()].partition("\n#")[0]
            found.append((text[: opening.end()].count("\n") + 2, text[opening.end() + 1 : closing.start()], prose))
    return found


def calls_in(prose: str) -> list[str]:
    """The inline code that is a call with all its arguments, so without `...`, of an attribute: `a.b(c)`."""
    calls = []
    for code in re.findall(r"`([^`]+)`", prose):
        try:
            tree = ast.parse(code, mode="eval").body
        except SyntaxError:
            continue
        whole = not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and whole:
            calls.append(code)
    return calls


def a_training() -> dict[str, object]:
    """What a block may take for granted: the names of the reader's own training, with 1000 classes."""
    torch.manual_seed(0)
    model = nn.Linear(12, 1000)
    images, labels = torch.randn(8, 12), torch.randint(1000, (8,))
    return {"model": model, "images": images, "labels": labels, "logits": model(images).detach()}


def run(code: str, line: int, namespace: dict[str, object]) -> None:
    """Execute code that stands at `line` of the README; a failure names the README's line."""
    try:
        exec(compile("\n" * (line - 1) + code, str(README), "exec"), namespace)
    except Exception as error:
        trace, at = error.__traceback__, line
        while trace:
            at = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(README) else at
            trace = trace.tb_next
        at = error.lineno if isinstance(error, SyntaxError) and error.filename == str(README) else at
        pytest.fail(f"{README.name}, line {at}: {type(error).__name__}: {error}", pytrace=False)


def namespace_of(index: int) -> dict[str, object]:
    """What block `index` finds: a training, and what the blocks before it made where its first line continues them."""
    if index == 0 or not CONTINUES.match(BLOCKS[index][1]):
        return a_training()
    namespace = namespace_of(index - 1)
    line, code, _ = BLOCKS[index - 1]
    run(code, line, namespace)
    return namespace


BLOCKS = blocks(README.read_text(encoding="utf-8"))
CALLS = [(index, call) for index, (_, _, prose) in enumerate(BLOCKS) for call in calls_in(prose)]


def test_there_is_a_block():
    assert BLOCKS


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=[f"line{line}" for line, _, _ in BLOCKS])
def test_a_block_runs(index):
    line, code, _ = BLOCKS[index]
    run(code, line, namespace_of(index))


@pytest.mark.parametrize(("index", "call"), CALLS)
def test_a_call_in_the_sentences_below_a_block_runs(index, call):
    line, code, prose = BLOCKS[index]
    namespace = namespace_of(index)
    run(code, line, namespace)
    below = line + code.count("\n") + 1 + prose[: prose.index(f"`{call}`")].count("\n")
    run(call, below - 1, namespace)


def test_a_failure_names_the_line_of_the_readme():
    ((line, code, _),) = blocks("# A title\n\n```python\nvalue = 1\nvalue.nothing\n```\nand text\n")
    assert line == 4
    with pytest.raises(pytest.fail.Exception, match=r"README\.md, line 5: AttributeError"):
        run(code, line, {})

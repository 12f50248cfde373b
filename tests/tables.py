"""Tables of reports, read back."""


def table_of(text: str) -> list[dict[str, str]]:
    """The lines of the first table of a report."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]

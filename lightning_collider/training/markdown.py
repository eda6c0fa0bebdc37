"""Tables in Markdown that read well in a terminal too."""


def markdown_table(rows: list[list[str]]) -> str:
    """A table whose first row is its head, padded; columns behind the first stand to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in (rows[0], rule, *rows[1:])
    ]
    return "\n".join(lines)

"""Runs the cells of a notebook in order, and writes them with their outputs as a page in the book.

usage: run_notebook.py NOTEBOOK FOLDER     writes FOLDER/NAME.md, and pictures as FOLDER/NAME-1.svg, …
"""

import ast
import contextlib
import io
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from candle_gpt2 import Picture

NOTE = """

<!-- Made of examples/notebooks/{name}.ipynb: WRITE_NOTEBOOKS=1 python -m pytest python/tests/test_notebooks.py -->

*This page is a notebook, [`examples/notebooks/{name}.ipynb`](../../../examples/notebooks/{name}.ipynb), run on the built-in model.*
"""


def run(source: str, cell: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Runs a cell. Returns its output, and the value of its last line if that is an expression."""
    # Makes tracebacks show the source line.
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    tree = ast.parse(source, cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, cell, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), cell, "eval"), names)
    return printed.getvalue(), value


def page(notebook: Path, folder: Path) -> Iterator[str]:
    """Yields the parts of the page, each a paragraph or a block."""
    names: dict[str, Any] = {"__name__": "__main__"}
    pictures = 0
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            title, rest = source.split("\n", 1) if number == 0 else ("", source)
            yield title + NOTE.format(name=notebook.stem) + rest if title else rest
            continue
        yield f"```python\n{source}\n```"
        printed, value = run(source, f"{notebook.name}, cell {number}", names)
        if isinstance(value, Picture):
            pictures += 1
            file = f"{notebook.stem}-{pictures}.svg"
            (folder / file).write_text(value.svg(), encoding="utf-8")
            value = f"![{value.title}](../pictures/notebooks/{file})\n\n*{value.title[0].upper()}{value.title[1:]}.*"
        elif value is not None:
            printed, value = f"{printed}{value!r}\n", None
        if printed:
            yield f"```text\n{printed}```"
        if value is not None:
            yield value


def main() -> None:
    notebook, folder = map(Path, sys.argv[1:])
    (folder / f"{notebook.stem}.md").write_text("\n\n".join(page(notebook, folder)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Notebooks are written as text, notebooks/*.py, where `# %%` begins a cell: `make notebooks` executes them.

A review then shows lines of text and no outputs. Each becomes an .ipynb beside it, with its outputs, and the last
figure of each is kept for the page of the site (docs/pictures/notebook-NAME.png).
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
PICTURES = ROOT / "docs" / "pictures"
MARK = re.compile(r"^# %%(.*)$", re.MULTILINE)


class Cell(NamedTuple):
    """Some text or some code."""

    text: str
    is_code: bool


def sources() -> list[Path]:
    """The notebooks, as text."""
    return [FOLDER / f"{name}.py" for name in ("quick_start", "own_problem", "comparing_methods", "what_it_buys")]


def cells(source: str) -> Iterator[Cell]:
    """The cells of a notebook that is written as text."""
    _, *parts = MARK.split(source)
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if "[markdown]" in kind:
            yield Cell(re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE), False)
        else:
            yield Cell(text.strip(), True)


def page(source: Path) -> str:
    """The page of the site for a notebook: its text, its code, and the figure that it drew last."""
    parts, drawn = [], PICTURES / f"notebook-{source.stem}.png"
    for cell in cells(source.read_text()):
        parts.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if cell.is_code and "plt.show()" in cell.text and drawn.exists():
            parts.append(f"![What this draws](../pictures/{drawn.name})")
    here = f"[notebooks/{source.name}](../../notebooks/{source.name})"
    note = f"*This notebook is {here}; `make notebooks` executes it.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def execute(source: Path) -> Any:
    """The notebook with its outputs. An error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.v4.new_notebook()
    for i, cell in enumerate(cells(source.read_text())):
        new = nbformat.v4.new_code_cell if cell.is_code else nbformat.v4.new_markdown_cell
        made.cells.append(new(cell.text, id=f"cell-{i}"))
    with tempfile.TemporaryDirectory() as place:
        NotebookClient(made, timeout=600, resources={"metadata": {"path": place}}).execute()
    return made


def figures(made: Any) -> Iterator[bytes]:
    """The pictures among the outputs of a notebook."""
    for cell in made.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output["data"]["image/png"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--pictures", action="store_true", help="keep the figures for the site")
    given = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "error::DeprecationWarning:fedbilevel")
    import nbformat

    for source in sources():
        if given.names and source.stem not in given.names:
            continue
        started = time.monotonic()
        made = execute(source)
        drawn = list(figures(made))
        if not drawn:
            raise SystemExit(f"{source.name} has drawn nothing")
        nbformat.write(made, source.with_suffix(".ipynb"))
        if given.pictures:
            (PICTURES / f"notebook-{source.stem}.png").write_bytes(drawn[-1])
        print(f"{source.name}: {len(drawn)} figures, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""`make_project(name, folder)` writes a project of a user's own, which runs as it is.

The files of the project are beside this module. Their names end with `-tpl`, so that no tool takes them for
modules of this library. `{{name}}` and `{{python}}` in them stand for the project and for the interpreter that has
this library.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from ..errors import RunFolderError, SettingsError, shown
from ..files import results_folder, storing

ENDING = "-tpl"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def make_project(name: str, folder: Path) -> list[Path]:
    """Write the files of a new project into a folder that does not exist yet, or is empty, and return them."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"NAME = {shown(name)} is wrong: use letters, digits, - and _, and begin with a letter; "
            "name a folder elsewhere with --out"
        )
    results_folder(folder, "--out")
    if any(folder.iterdir()):
        raise RunFolderError(f"{folder} has files already; choose another NAME, or another folder with --out")
    words = {"{{name}}": name, "{{python}}": sys.executable.replace("$", "$$")}  # `$` begins a variable of Make
    written = []
    for template in files(__name__).iterdir():
        if template.name.endswith(ENDING):
            text = template.read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(word, value)
            file = folder / template.name.removesuffix(ENDING)
            with storing(folder):
                file.write_text(text, encoding="utf-8")
            written.append(file)
    return sorted(written)

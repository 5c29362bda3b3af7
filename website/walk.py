"""Go through pages as a person would who copies every block and pastes it: `make walk`.

    python website/walk.py docs/start.md ...

Each page begins in an empty folder. Its blocks are run in their order, with the interpreter and the commands of
the environment that runs this script: Python in one session for a page, commands by a shell. Lines that install
something or call the Makefile are left out, because the environment was made by these. The first block that fails
ends everything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DONE_BEFORE = ("pip install", "make ")
NEEDS_MORE = ("fedbilevel leaderboard",)  # files of the reader's own


def commands(text: str) -> str:
    """The lines of a block that are run."""
    return "".join(line for line in text.splitlines(True) if not line.startswith((*DONE_BEFORE, *NEEDS_MORE)))


def walk(page: Path) -> int:
    """Run the blocks of a page, and return how many there were."""
    session: dict[str, Any] = {"__name__": "__main__"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    count = 0
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(text, f"{page.name}, block {count}", "exec"), session)
        elif language in ("", "sh", "bash") and commands(text).strip():
            subprocess.run(["bash", "-euc", commands(text)], check=True, env={**os.environ, "PATH": path})
        else:
            continue
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        page, home, started = page.resolve(), Path.cwd(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            count = walk(page)
            os.chdir(home)
        print(f"{page.name}: {count} blocks run, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

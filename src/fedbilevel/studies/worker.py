"""A process that does runs one after another, so that only the first of them pays for the start of Python and JAX.

`python -m fedbilevel.studies.worker` reads lines of JSON from its standard input, each with the file of a spec and
a run folder. It answers each on its standard output when the run has ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..errors import FedBilevelError
from ..run import run
from ..runtime import forget_peak, forget_programs, peak_memory, prepare_runtime
from ..spec import load_spec


def main() -> None:
    """Do the runs that the standard input names, until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a problem of the user's prints is not an answer
    prepare_runtime()
    for line in sys.stdin:
        file, folder = json.loads(line)
        forget_peak()
        complaint = _complaint(file, Path(folder))
        forget_programs()
        answers.write(json.dumps({"complaint": complaint, "megabytes": peak_memory()}) + "\n")


def _complaint(file: str, folder: Path) -> str | None:
    """Do a run, or continue it; return why it failed, or None."""
    try:
        run(load_spec(file), folder, resume=True)
    except FedBilevelError as error:
        return f"error: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()

"""The commands for runs that are in their folders: `show`, `watch`, `export` and `compare`."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
import typer

from ..errors import SettingsError
from ..files import results_folder, storing, write_whole
from ..record import glance
from ..report import (
    Compared,
    ledger_table,
    outcome_table,
    run_page,
    settings_table,
    study_table,
    text_curve,
    write_comparison,
)
from ..run import SavedRun, load_run
from ..watch import Watch
from .shared import out, say

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
PAGE_ONLY = ("about", "status", "MB up", "MB down")  # columns for which a terminal has no room
STANDS = {
    "finished": "finished",
    "failed": "FAILED",
    "under way": "UNDER WAY: what follows is from its last evaluation",
    "interrupted": "INTERRUPTED: what follows is from its last evaluation; it goes on with --resume",
}


def show_command(folder: Folder) -> None:
    """Show the settings, the results, the ledger and the curve of a run, also of one that is under way."""
    run = load_run(folder)
    summary = run.summary
    say(f"{folder}: {STANDS[run.status]}")
    if "failure" in summary and run.status == "failed":
        say(f"it ended because: {summary['failure']}")
    out.print(settings_table(run.settings))
    if not run.history:
        say("there is no evaluation yet")
        return
    last, accuracy = run.history[-1], summary["accuracy"]
    say(
        f"{last['iteration']:,} outer iterations, {last['rounds']:,} rounds, {last['seconds']:.1f} s of training, "
        f"{last['bytes_up'] / 1e6:,.1f} MB up and {last['bytes_down'] / 1e6:,.1f} MB down"
    )
    if accuracy["last"] is not None:
        say(f"test accuracy: {accuracy['last']:.2%} at the end, {accuracy['best']:.2%} at best")
        out.print(outcome_table(summary))
    if "epsilon" in last:
        say(f"privacy: epsilon = {'infinite' if last['epsilon'] is None else format(last['epsilon'], '.3g')}")
    if curve := text_curve(run.history):
        say(curve)
    if summary["ledger"]:
        out.print(ledger_table(summary))
    picture = folder / "curve.png"
    say(f"curve: {picture}" if picture.exists() else "curve.png is drawn at the end of the run")


def watch_command(
    folder: Folder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on loopback; 0 is any that is free.")] = 0,
    file: Annotated[Path | None, typer.Option("--out", help="Write the page to this file, and end.")] = None,
) -> None:
    """Serve a page about a run, on this machine only; it follows the run while it goes on."""
    look = glance(folder)
    if file is not None:
        if file.is_dir():
            raise SettingsError(f"--out {file} is a folder; name a file")
        results_folder(file.parent, "--out")
        with storing(file.parent):
            write_whole(file, run_page(look, time.time()).encode(), file.with_name(f".{file.name}.tmp"))
        say(f"{file}: the run as it is now")
        return
    watch = Watch(folder, port)
    say(f"{folder}: {watch.address}")
    say("The address has a token in it: whoever has it can see the run, from this machine. Ctrl-C ends this.")
    with suppress(KeyboardInterrupt):
        watch.serve()


def export_command(
    folder: Folder,
    to: Annotated[str, typer.Option(help="npz, which NumPy reads, or safetensors.")] = "npz",
    file: Annotated[Path | None, typer.Option("--out", help="The file; default: beside the run folder.")] = None,
) -> None:
    """Write the trained x and y to a file, by the names of their parts and as flat vectors."""
    if to not in ("npz", "safetensors"):
        raise SettingsError(f"--to {to} is wrong: use npz or safetensors")
    run = load_run(folder)
    arrays = run.arrays()
    place = folder.resolve().with_name(f"{folder.resolve().name}.{to}") if file is None else file
    if place.is_dir():
        raise SettingsError(f"--out {place} is a folder; name a file")
    results_folder(place.parent, "--out")
    with storing(place.parent):
        write_whole(place, _packed(run, arrays, to), place.with_name(f".{place.name}.tmp"))
    for name, array in arrays.items():
        say(f"{name}: {array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}")
    if run.problem is None:
        say("a run of objects has flat x and y; fb.load_run(folder, problem=problem).arrays() names their parts")
    say(f"{place}: x and y after outer iteration {run.iteration}")


def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    folder: Annotated[Path, typer.Option("--out", help="Where compare.html and compare.png go.")],
    measure: Annotated[
        str | None, typer.Option(help="A number of the histories; default: accuracy, else norm or loss.")
    ] = None,
) -> None:
    """Draw the curves of several runs against rounds, bytes, seconds and iterations, with a table."""
    runs = [load_run(each) for each in folders]
    for run in runs:
        if not run.history:
            raise SettingsError(f"{run.folder} has no evaluation yet; compare it later")
    labels = _labels(folders)
    compared = [
        Compared(label, _about(run), run.status, run.history, run.summary, tomli_w.dumps(run.settings))
        for label, run in zip(labels, runs, strict=True)
    ]
    results_folder(folder, "--out")
    with storing(folder):
        rows = write_comparison(folder, compared, measure)
    out.print(study_table(f"{len(rows)} runs", [{k: v for k, v in r.items() if k not in PAGE_ONLY} for r in rows]))
    say(f"page: {folder / 'compare.html'}    picture: {folder / 'compare.png'}")


def _packed(run: SavedRun, arrays: dict[str, np.ndarray], to: str) -> bytes:
    """The arrays as the content of a file. Neither format has a pickle in it."""
    if to == "npz":
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        return stream.getvalue()
    from safetensors.numpy import save

    about = {"run": run.folder.resolve().name, "iteration": str(run.iteration)}
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, about))


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of one length, that tell the runs apart; a run may be given once only."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise SettingsError("a run is given twice; name each run folder once")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            break
    return labels


def _about(run: SavedRun) -> str:
    """The algorithm and the number of clients."""
    algorithm, data = run.settings.get("algorithm"), run.settings.get("data")
    own: Any = algorithm if isinstance(algorithm, dict) else {}
    clients = data.get("clients") if isinstance(data, dict) else None
    return f"{own.get('class') or own.get('name')}, {clients} clients"

"""The run folder: what a run writes, so that it can be read, compared and resumed.

    spec.toml                the settings as resolved
    history.jsonl            a line an evaluation
    checkpoint.safetensors   the state, with its place in the run and the ledger in the header
    summary.json             rounds, bytes and seconds to each accuracy, and the ledger
    environment.json         versions and machine
    curve.png                accuracy against rounds
    federation.json          on a real federation: its sites, and every job that it took

Every file but the history is written under a temporary name and renamed. The history is only appended to; on
resuming it is cut back to the checkpoint. No pickle is read or written.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .errors import CheckpointError, RunFolderError
from .spec import Spec

LEVELS = ("0.80", "0.85", "0.90", "0.95")
FILES = (
    "spec.toml",
    "history.jsonl",
    "checkpoint.safetensors",
    "summary.json",
    "environment.json",
    "curve.png",
)
FEDERATION = "federation.json"  # only a run on a real federation has it
TEMPORARY = tuple(f".{name}.tmp" for name in (*FILES, FEDERATION))


class Checkpoint(NamedTuple):
    """Where a run is: the arrays of its state, and what else it needs to go on."""

    arrays: dict[str, np.ndarray]
    iteration: int
    ledger: dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """A run folder on disk."""

    path: Path

    def open(self, spec: Spec, *, resume: bool, overwrite: bool) -> Checkpoint | None:
        """Make the folder ready for a run of this spec; return the checkpoint to go on from, if any.

        Refuses a folder that holds something else, or a run that nobody asked to resume.
        """
        checkpoint = None
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"--out {self.path} is a file; name a folder")
        if self.path.is_dir() and any(p.name not in TEMPORARY for p in self.path.iterdir()):
            if not self.file("spec.toml").exists():
                raise RunFolderError(f"--out {self.path} is not empty and holds no run; choose another folder")
            if resume:
                self._same_spec(spec)
                checkpoint = self.checkpoint(spec)
            elif overwrite:
                self._clear()
            else:
                raise RunFolderError(
                    f"--out {self.path} holds another run; choose another folder, --resume to go on with it, "
                    "or --overwrite to start again"
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write("spec.toml", spec.to_toml())  # first: a folder with it is a run, whatever happens next
            reached = -1 if checkpoint is None else checkpoint.iteration
            self.write_history(r for r in self.history() if r["iteration"] <= reached)
            self.write_json("environment.json", environment())
        except OSError as error:
            raise RunFolderError(f"--out {self.path} cannot be written: {error.strerror}") from None
        return checkpoint

    def file(self, name: str) -> Path:
        return self.path / name

    def write(self, name: str, content: str | bytes) -> None:
        """Write under a temporary name and rename: a reader sees the old file or the new one."""
        temporary = self.file(f".{name}.tmp")  # one of TEMPORARY
        data = content.encode() if isinstance(content, str) else content
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.file(name))

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2) + "\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line to the history."""
        with self.file("history.jsonl").open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def write_history(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put these lines in the place of the history."""
        self.write("history.jsonl", "".join(json.dumps(r) + "\n" for r in list(records)))

    def history(self) -> list[dict[str, Any]]:
        """The whole lines of the history."""
        path = self.file("history.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.file("summary.json").read_text()))

    def environment(self) -> dict[str, Any]:
        return dict(json.loads(self.file("environment.json").read_text()))

    def save(self, spec: Spec, checkpoint: Checkpoint) -> None:
        header = {
            "spec": spec.digest,
            "iteration": str(checkpoint.iteration),
            "ledger": json.dumps(checkpoint.ledger),
        }
        self.write("checkpoint.safetensors", save(checkpoint.arrays, header))

    def checkpoint(self, spec: Spec) -> Checkpoint | None:
        """The saved checkpoint; None when the run did not get that far."""
        path = self.file("checkpoint.safetensors")
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest, iteration, ledger = header["spec"], int(header["iteration"]), json.loads(header["ledger"])
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); delete it to start this run again") from None
        if digest != spec.digest:
            raise RunFolderError(f"{path} is a checkpoint of another spec; choose another --out, or --overwrite")
        return Checkpoint(arrays, iteration, ledger)

    def _same_spec(self, spec: Spec) -> None:
        """Refuse to go on with other settings than the run was started with; only `stop` may change."""
        try:
            old = tomllib.loads(self.file("spec.toml").read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.file('spec.toml')} cannot be read: {error}") from None
        before, now = _flat(old), _flat(spec.to_mapping())
        changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
        changed = [k for k in changed if not k.startswith("stop.")]
        if changed:
            first = f"{changed[0]} was {before.get(changed[0])} and is {now.get(changed[0])}"
            raise RunFolderError(
                f"--out {self.path} holds a run of another spec ({first}); only stop may change on resuming; "
                "choose another folder, or --overwrite"
            )

    def _clear(self) -> None:
        """Take out what runs write; the spec last, so that a folder cleared by half is still a run's."""
        shutil.rmtree(self.file("tensorboard"), ignore_errors=True)
        for name in reversed((*FILES, FEDERATION, *TEMPORARY)):
            self.file(name).unlink(missing_ok=True)


def summarise(history: list[dict[str, Any]], ledger: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The summary of a run from its history and its ledger."""
    last = history[-1]
    reached = {level: _first_at(history, float(level)) for level in LEVELS}
    accuracies = np.asarray([r["test_accuracy"] for r in history if r["test_accuracy"] is not None])
    tail = accuracies[-100:]
    return {
        "rounds": last["rounds"],
        "iterations": last["iteration"],
        "rounds_to": {level: r and r["rounds"] for level, r in reached.items()},
        "bytes_to": {level: r and r["bytes_up"] + r["bytes_down"] for level, r in reached.items()},
        "seconds_to": {level: r and r["seconds"] for level, r in reached.items()},
        "accuracy": {
            "last": number(tail[-1:].mean()) if len(tail) else None,
            "best": number(accuracies.max()) if len(tail) else None,
            "mean_last_100": number(tail.mean()) if len(tail) else None,
            "std_last_100": number(tail.std()) if len(tail) else None,
        },
        "ledger": ledger["steps"],
        "probes": ledger["probes"],
        "rejected": ledger["rejected"],
        **more,
    }


def environment() -> dict[str, Any]:
    """What a reader needs to know of where a run was made."""
    packages = ("fedbilevel", "jax", "jaxlib", "numpy", "equinox", "optax")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "revision": _revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def _revision() -> str | None:
    """The git revision of the library's checkout, when it runs from one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _first_at(history: Iterable[dict[str, Any]], accuracy: float) -> dict[str, Any] | None:
    return next((r for r in history if (r["test_accuracy"] or 0.0) >= accuracy), None)


def number(value: Any) -> float | None:
    """A float with the digits that a float32 surely has, for files; None if it is not finite, as JSON has none."""
    return float(f"{float(value):.6g}") if math.isfinite(float(value)) else None


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat

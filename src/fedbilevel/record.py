"""The run folder: what a run writes, so that it can be read, compared and resumed.

    spec.toml                the settings as resolved
    history.jsonl            a line an evaluation
    checkpoint.safetensors   the state, with its place in the run and the ledger in the header
    checkpoint.1.safetensors, checkpoint.2.safetensors   the two before it
    summary.json             rounds, bytes and seconds to each accuracy, and the ledger
    environment.json         versions and machine
    curve.png                accuracy against rounds
    federation.json          on a real federation: its sites, and every job that it took

Every file but the history is written under a temporary name and renamed. The history is only appended to; on
resuming it is cut back to the checkpoint. A checkpoint carries the SHA-256 of its own arrays and of the history
up to it, and both are compared on resuming. A run locks its folder. No pickle is read or written, and no name in a
file is used as a path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .divergence import Restart
from .errors import CheckpointError, RunFolderError, StorageError
from .spec import Spec

LEVELS = ("0.80", "0.85", "0.90", "0.95")
CHECKPOINTS = ("checkpoint.safetensors", "checkpoint.1.safetensors", "checkpoint.2.safetensors")  # newest first
FILES = (
    "spec.toml",
    "history.jsonl",
    CHECKPOINTS[0],
    "summary.json",
    "environment.json",
    "curve.png",
)
LOCK = ".lock"
FEDERATION = "federation.json"  # only a run on a real federation has it
SOMETIMES = (*CHECKPOINTS[1:], FEDERATION)
TEMPORARY = tuple(f".{name}.tmp" for name in (*FILES, *SOMETIMES))


class Checkpoint(NamedTuple):
    """Where a run is: the arrays of its state, and what else it needs to go on."""

    arrays: dict[str, np.ndarray]
    iteration: int
    ledger: dict[str, Any]
    restarts: tuple[Restart, ...] = ()


@final
class RunFolder:
    """A run folder on disk. Whoever opens it has it alone until `close`, or until the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._history = _History(1)

    def open(self, spec: Spec, *, resume: bool, overwrite: bool) -> Checkpoint | None:
        """Make the folder ready for a run of this spec; return the checkpoint to go on from, if any.

        Refuses a folder that holds something else, or a run that nobody asked to resume, or one that goes on.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"--out {self.path} is a file; name a folder")
        if self._used() and not self.file("spec.toml").exists():
            raise RunFolderError(f"--out {self.path} is not empty and holds no run; choose another folder")
        checkpoint = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            if self._used() and resume:
                self._same_spec(spec)
                checkpoint = self.checkpoint(spec)
            elif self._used() and overwrite:
                self._clear()
            elif self._used():
                raise RunFolderError(
                    f"--out {self.path} holds another run; choose another folder, --resume to go on with it, "
                    "or --overwrite to start again"
                )
            self._write("spec.toml", spec.to_toml())  # first: a folder with it is a run, whatever happens next
            reached = -1 if checkpoint is None else checkpoint.iteration
            kept = [r for r in self.history() if r["iteration"] <= reached]
            self._write("history.jsonl", _lines(kept))
            self._history = _History(spec.evaluate.every, kept)
            self._write("environment.json", _json(environment()))
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"--out {self.path} cannot be written: {error.strerror}; choose a folder that can"
            ) from None
        except BaseException:
            self.close()
            raise
        return checkpoint

    def close(self) -> None:
        """Let others have the folder. The file of the lock stays: who deletes it could lock another one."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        """Lock the folder; the system takes the lock back when the process ends, however it does."""
        if self._lock is not None:
            return
        stream = self.file(LOCK).open("a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            stream.close()
            raise RunFolderError(
                f"--out {self.path} is in use by another run (process {owner}); "
                "wait for its end or choose another folder"
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        self._lock = stream

    def _used(self) -> bool:
        return self.path.is_dir() and any(p.name not in (LOCK, *TEMPORARY) for p in self.path.iterdir())

    def file(self, name: str) -> Path:
        return self.path / name

    def write(self, name: str, content: str | bytes) -> None:
        """Write under a temporary name and rename: a reader sees the old file or the new one."""
        try:
            self._write(name, content)
        except OSError as error:
            raise self._failed(name, error) from None

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, _json(value))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line to the history."""
        try:
            with self.file("history.jsonl").open("a") as stream:
                stream.write(_lines([record]))
        except OSError as error:
            raise self._failed("history.jsonl", error) from None
        self._history.add(record)

    def write_history(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put these lines in the place of the history."""
        lines = list(records)
        self.write("history.jsonl", _lines(lines))
        self._history = _History(self._history.every, lines)

    def _write(self, name: str, content: str | bytes) -> None:
        temporary = self.file(f".{name}.tmp")  # one of TEMPORARY
        data = content.encode() if isinstance(content, str) else content
        try:
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.file(name))
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # half a file only takes room
            raise

    def _failed(self, name: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.file(name)} could not be written: {error.strerror}; what was written before is whole: "
            "remedy that and go on with --resume"
        )

    def history(self) -> list[dict[str, Any]]:
        """The whole lines of the history."""
        path = self.file("history.jsonl")
        try:
            lines = path.read_text().split("\n") if path.exists() else [""]
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not as it was written ({error}); put it back, or --overwrite to start again"
            ) from None

    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.file("summary.json").read_text()))

    def environment(self) -> dict[str, Any]:
        return dict(json.loads(self.file("environment.json").read_text()))

    def save(self, spec: Spec, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; the two before it are kept. At no moment is there none."""
        header = {
            "spec": spec.digest,
            "iteration": str(checkpoint.iteration),
            "ledger": json.dumps(checkpoint.ledger),
            "restarts": json.dumps(checkpoint.restarts),
            "history": self._history.digest,
        }
        header["sha256"] = _digest(checkpoint.arrays, header)
        try:
            with self.file("history.jsonl").open("a") as stream:
                os.fsync(stream.fileno())  # the lines that the checkpoint vouches for
            newest, second, third = map(self.file, CHECKPOINTS)
            if second.exists():
                second.replace(third)
            if newest.exists():
                spare = self.file(f".{second.name}.tmp")
                spare.unlink(missing_ok=True)
                spare.hardlink_to(newest)
                spare.replace(second)
            self._write(newest.name, save(checkpoint.arrays, header))
        except OSError as error:
            raise self._failed("checkpoint.safetensors", error) from None

    def checkpoint(self, spec: Spec) -> Checkpoint | None:
        """The newest checkpoint that is there; None when the run did not get that far."""
        path = next((p for p in map(self.file, CHECKPOINTS) if p.exists()), None)
        if path is None:
            return None
        rest = [p.name for p in map(self.file, CHECKPOINTS) if p.exists() and p != path]
        remedy = (
            f"delete it to go on from {rest[0]}, the one before" if rest else "delete it to start this run again"
        )
        try:
            with safe_open(path, framework="numpy") as file:
                header = dict(file.metadata() or {})
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            vouched, sound = header.pop("sha256"), _digest(arrays, header)
            iteration, of_spec, of_history = int(header["iteration"]), header["spec"], header["history"]
            ledger, again = json.loads(header["ledger"]), json.loads(header["restarts"])
            restarts = tuple(Restart(*each) for each in again)
        except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); {remedy}") from None
        if vouched != sound:
            raise CheckpointError(f"{path} is not as it was written: its SHA-256 differs; {remedy}")
        if of_spec != spec.digest:
            raise CheckpointError(f"{path} is a checkpoint of another spec; {remedy}")
        history = [r for r in self.history() if r["iteration"] <= iteration]
        if of_history != _History(spec.evaluate.every, history).digest:
            raise CheckpointError(
                f"{self.file('history.jsonl')} is not as it was written: up to iteration {iteration} it differs "
                f"from what {path.name} vouches for; put it back, or --overwrite to start again"
            )
        return Checkpoint(arrays, iteration, ledger, restarts)

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
        for name in reversed((*FILES, *SOMETIMES, *TEMPORARY)):
            self.file(name).unlink(missing_ok=True)


@final
class _History:
    """A running SHA-256 of a history.

    Lines off the schedule are left out: the last word of a budget is taken back when a larger one goes on.
    """

    def __init__(self, every: int, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.every, self._sum = every, hashlib.sha256()
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        if record["iteration"] % self.every == 0:
            self._sum.update(_lines([record]).encode())

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def _digest(arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> str:
    """The SHA-256 of everything in a checkpoint."""
    made = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, a in sorted(arrays.items()):
        made.update(f"{name} {a.dtype} {a.shape}\n".encode() + np.ascontiguousarray(a).tobytes())
    return made.hexdigest()


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
        **{key: ledger[key] for key in ("injected", "left_out") if ledger.get(key)},
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

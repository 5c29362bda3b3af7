"""The run folder: what a run writes, so that it can be read, compared and resumed.

    spec.toml                the settings, with the defaults filled in
    history.jsonl            one line for each evaluation
    checkpoint.safetensors   the state, with its place in the run and the ledger in the header
    checkpoint.1.safetensors, checkpoint.2.safetensors   the two before it
    summary.json             rounds, bytes and seconds to each accuracy, and the ledger
    environment.json         versions and machine
    curve.png                accuracy against rounds
    report.html              the run on one page, as `fedbilevel watch` shows it while it goes on
    federation.json          on a real federation: its sites, and every job that it took
    sources.json             the SHA-256 of modules that the spec names, and changes that were accepted

Every file is written under a temporary name and renamed, so that a reader sees the old file or the new one, and
never a part of one. Only the history is appended to in place; when a run is resumed, its history is cut back to
the checkpoint. A checkpoint carries the SHA-256 of its own arrays and of the history up to it, and both are
compared when the run is resumed. A run locks its folder. No pickle is read or written, and this room uses no name
in a file as a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, final

from ..errors import CheckpointError, RunFolderError, StorageError
from ..files import check_place, make_folder, rename, write_whole
from ..reading import Unreadable, parse_json, read_bytes, read_json, read_toml
from ._checkpoint import Checkpoint, Seal, decode, encode
from ._environment import environment
from ._lock import is_locked, take_lock
from ._plan import Plan
from ._shapes import Environment, Evaluation, Federation, Form, Sources, Summary, checked

CHECKPOINTS = ("checkpoint.safetensors", "checkpoint.1.safetensors", "checkpoint.2.safetensors")  # newest first
FILES = (
    "spec.toml",
    "history.jsonl",
    CHECKPOINTS[0],
    "summary.json",
    "environment.json",
    "curve.png",
)
FOLDERS = ("tensorboard", "mlflow", "wandb", "clients")  # the folders of logs and of clients' states
LOCK = ".lock"
FEDERATION = "federation.json"  # only a run on a real federation has it
BOOKS = "privacy.jsonl"  # only a private run has it
SOURCES = "sources.json"  # only a run whose spec names code by its address has it
REPORT = "report.html"  # not if the run was told to draw nothing
SOMETIMES = (*CHECKPOINTS[1:], FEDERATION, BOOKS, SOURCES, REPORT)
TEMPORARY = tuple(f".{name}.tmp" for name in (*FILES, *SOMETIMES))


@final
class RunFolder:
    """A run folder on disk.

    The process that opens it has it to itself until it calls `close`, or until the process ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._history = _History(1)

    def open(self, plan: Plan, *, resume: bool, overwrite: bool, accept_change: bool = False) -> Checkpoint | None:
        """Make the folder ready for a run of this plan, and return the checkpoint to continue from, or None.

        Raises `RunFolderError` if the folder holds something other than a run, holds a run and neither `resume`
        nor `overwrite` is set, is in use by another process, or if a module of the spec has another source than
        when the run was begun and `accept_change` is not set.
        """
        check_place(self.path, "--out")
        if self._used() and not self.file("spec.toml").exists():
            raise RunFolderError(f"--out {self.path} is not empty and holds no run; choose another folder")
        checkpoint, changes = None, list[dict[str, Any]]()
        try:
            make_folder(self.path)
            self._take()
            if self._used() and resume:
                self._check_unchanged(plan)
                checkpoint = self.checkpoint(plan)
                changes = self._changes(plan, accept_change, 0 if checkpoint is None else checkpoint.iteration)
            elif self._used() and overwrite:
                self._clear()
            elif self._used():
                raise RunFolderError(
                    f"--out {self.path} holds another run; choose another folder, --resume to go on with it, "
                    "or --overwrite to start again"
                )
            # The spec comes first: a folder that has it holds a run, whatever happens next.
            self._write("spec.toml", plan.to_toml())
            if plan.sources or changes:
                self._write(SOURCES, _json({"sources": dict(plan.sources), "changes": changes}))
            reached = -1 if checkpoint is None else checkpoint.iteration
            kept = [r for r in self.history() if r["iteration"] <= reached]
            self._write("history.jsonl", _lines(kept))
            self._history = _History(plan.every, kept)
            self._write("environment.json", _json({**environment(), "iteration": max(reached, 0)}))
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
        """Release the folder.

        The lock file stays. If it were deleted, a process that had opened it before and one that makes it anew
        would lock two different files, and both would have the folder.
        """
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        """Lock the folder. The system releases the lock when the process ends, even if it is killed."""
        if self._lock is not None:
            return
        stream = self.file(LOCK).open("a+")
        if not take_lock(stream.fileno()):
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            stream.close()
            raise RunFolderError(
                f"--out {self.path} is in use by another run (process {owner}); "
                "wait for its end or choose another folder"
            )
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        self._lock = stream

    def _used(self) -> bool:
        return self.path.is_dir() and any(p.name not in (LOCK, *TEMPORARY) for p in self.path.iterdir())

    def file(self, name: str) -> Path:
        """The path of a file in the folder."""
        return self.path / name

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file under a temporary name and rename it, so that a reader sees the old file or the new one."""
        try:
            self._write(name, content)
        except OSError as error:
            raise self._failed(name, error) from None

    def write_json(self, name: str, value: Any) -> None:
        """Write a file of JSON."""
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
        """Replace the history by these lines."""
        lines = list(records)
        self.write("history.jsonl", _lines(lines))
        self._history = _History(self._history.every, lines)

    def _write(self, name: str, content: str | bytes) -> None:
        temporary = self.file(f".{name}.tmp")  # one of TEMPORARY
        write_whole(self.file(name), content.encode() if isinstance(content, str) else content, temporary)

    def _failed(self, name: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.file(name)} could not be written: {error.strerror}; earlier files are intact: "
            "fix this and continue with --resume"
        )

    def history(self) -> list[dict[str, Any]]:
        """The lines of the history, without a last line that is only half written."""
        path = self.file("history.jsonl")
        if not path.exists():
            return []
        records: list[dict[str, Any]] = []
        where = "it"
        try:
            for line in read_bytes(path).split(b"\n")[:-1]:
                where = f"line {len(records) + 1}"
                records.append(checked(parse_json(line), Evaluation))
        except Unreadable as error:
            raise CheckpointError(
                f"{path} is not as it was written ({where} {error}); put it back, or --overwrite to start again"
            ) from None
        return records

    def summary(self) -> dict[str, Any]:
        """What summary.json says."""
        return self._read("summary.json", Summary, "delete it, and the run goes on from its last checkpoint")

    def environment(self) -> dict[str, Any]:
        """What environment.json says."""
        return self._read("environment.json", Environment, "delete the folder, and the run is done again")

    def federation(self) -> dict[str, Any] | None:
        """What federation.json says, or None if the folder has no such file."""
        if not self.file(FEDERATION).exists():
            return None
        return self._read(FEDERATION, Federation, "put it back, or --overwrite to start again")

    def _read(self, name: str, form: type[Form], remedy: str) -> dict[str, Any]:
        """A file of JSON in this form, or an error with a remedy."""
        try:
            return checked(read_json(self.file(name)), form)
        except Unreadable as error:
            raise CheckpointError(f"{self.file(name)} is not as it was written (it {error}); {remedy}") from None

    def save(self, plan: Plan, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and keep the two before it. The folder has a checkpoint at every moment."""
        content = encode(checkpoint, Seal(plan.digest, self._history.digest))
        try:
            with self.file("history.jsonl").open("a") as stream:
                os.fsync(stream.fileno())  # the checkpoint vouches for these lines
            newest, second, third = map(self.file, CHECKPOINTS)
            if second.exists():
                rename(second, third)
            if newest.exists():
                spare = self.file(f".{second.name}.tmp")
                spare.unlink(missing_ok=True)
                spare.hardlink_to(newest)
                rename(spare, second)
            self._write(newest.name, content)
        except OSError as error:
            raise self._failed("checkpoint.safetensors", error) from None

    def checkpoint(self, plan: Plan) -> Checkpoint | None:
        """The newest checkpoint in the folder, or None if the run has not written one yet."""
        return self.newest(plan.every, plan.digest)

    def newest(self, every: int, digest: str | None) -> Checkpoint | None:
        """The newest checkpoint, with `every` outer iterations between two evaluations.

        It must be of the plan with this digest. None compares no plan, for a reader that has no plan.
        """
        present = [path for path in map(self.file, CHECKPOINTS) if path.exists()]
        if not present:
            return None
        path, *older = present
        remedy = "delete it to start this run again"
        if older:
            remedy = f"delete it to go on from {older[0].name}, the one before"
        try:
            checkpoint, seal = decode(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {remedy}") from None
        if digest is not None and seal.plan != digest:
            raise CheckpointError(f"{path} is a checkpoint of another spec; {remedy}")
        history = [r for r in self.history() if r["iteration"] <= checkpoint.iteration]
        if seal.history != _History(every, history).digest:
            raise CheckpointError(
                f"{self.file('history.jsonl')} is not as it was written: up to iteration {checkpoint.iteration} "
                f"it differs from what {path.name} vouches for; put it back, or --overwrite to start again"
            )
        return checkpoint

    def settings(self) -> dict[str, Any]:
        """What spec.toml says."""
        path = self.file("spec.toml")
        try:
            return read_toml(path)
        except Unreadable as error:
            raise RunFolderError(f"{path} {error}; put it back, or --overwrite to start again") from None

    def in_use(self) -> bool:
        """Whether a process has the folder at this moment: its run is under way."""
        try:
            with self.file(LOCK).open() as stream:
                return is_locked(stream.fileno())
        except OSError:
            return False  # there is no lock file, or the folder can only be read

    def _check_unchanged(self, plan: Plan) -> None:
        """Raise if the settings differ from those that the run was started with; only `stop` may change."""
        change = plan.change_since(self.settings())
        if change is not None:
            raise RunFolderError(
                f"--out {self.path} holds a run of another spec ({change}); only stop may change on resuming; "
                "choose another folder, or --overwrite"
            )

    def _changes(self, plan: Plan, accepted: bool, iteration: int) -> list[dict[str, Any]]:
        """All changes of sources that were accepted in this run. Raises if there is a new one that is not."""
        if not self.file(SOURCES).exists():
            return []  # the spec names no code, or an older version has begun the run
        written = self._read(SOURCES, Sources, "put it back, or --overwrite to start again")
        changes: list[dict[str, Any]] = written["changes"]
        for setting, before in written["sources"].items():
            after = plan.sources.get(setting)
            if after == before:
                continue
            if not accepted:
                raise RunFolderError(
                    f"--out {self.path}: the module of {setting} has changed since the run was begun (SHA-256 "
                    f"{before[:16]}, now {(after or 'unknown')[:16]}); put it back, or --accept-change to go on"
                )
            changes.append({"setting": setting, "before": before, "after": after, "iteration": iteration})
        return changes

    def _clear(self) -> None:
        """Delete what runs write. The spec goes last, so that a folder cleared by half still counts as a run."""
        for folder in FOLDERS:
            shutil.rmtree(self.file(folder), ignore_errors=True)
        for name in reversed((*FILES, *SOMETIMES, *TEMPORARY)):
            self.file(name).unlink(missing_ok=True)


@final
class _History:
    """A running SHA-256 of a history.

    Only evaluations on the schedule count. The evaluation at the end of a budget may be off the schedule, and it
    is removed again when the run continues with a larger budget.
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

"""The states that clients keep beside their data: the `Own` fields that their steps returned.

A client's state is dated by the clock of the call that made it. A call at clock t is given the newest state from
before t. So a client that is asked twice in one round starts from the same state both times, and so does a run
that goes back to a checkpoint. Each client has at most three dated states: the one that the last checkpoint
continues from, the one before the newest, and the newest. A durable store belongs to a site, and a site does not
decide where a run continues. It therefore has all states since the last checkpoint that it was told of.

Clients that kept nothing take no space, so a million registered clients cost nothing. When the states exceed a
limit in memory, those of the clients asked longest ago are moved to files. A file never changes after it was
written, so a checkpoint only has to name the files of its states (`save`), and a resumed run reads them (`load`).
A durable store writes every state to its file at once, and finds the files again when it is created anew.
"""

from __future__ import annotations

import base64
import tempfile
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ._statefile import State, read_state, write_state

MIB = 2**20
CHECKPOINTS = 3  # as many as a run folder keeps
MOST = 256  # A durable store has at most this many dated states of a client, even if no checkpoint settles them.


@dataclass
class _Dated:
    """One state of a client: in memory, in a file, or both."""

    clock: int
    state: State | None
    digest: str | None = None  # the digest of the file, if there is a file


class ClientStates:
    """The dated states of clients.

    limit     MiB of states in memory; states beyond it are moved to files
    folder    the folder of the files (default: a temporary folder)
    durable   whether every state is written to its file at once, and existing files are read as states
    """

    def __init__(self, *, limit: int = 1024, folder: Path | None = None, durable: bool = False) -> None:
        self._limit, self._folder, self._durable = limit * MIB, folder, durable
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._clients: OrderedDict[int, list[_Dated]] = OrderedDict()  # the client asked last comes last
        self._resident = 0
        self._saved: deque[dict[int, tuple[int, str]]] = deque(maxlen=CHECKPOINTS)
        if durable and folder is not None and folder.is_dir():
            self._find()

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[int]:
        """The clients that have kept something."""
        return iter(list(self._clients))

    @property
    def resident(self) -> int:
        """Bytes of states in memory."""
        return self._resident

    def latest(self, client: int, clock: int) -> int | None:
        """The clock of the newest state of a client from before a clock, if there is one."""
        dated = self._before(client, clock)
        return None if dated is None else dated.clock

    def read(self, client: int, clock: int) -> State:
        """The newest state of a client from before a clock; empty if there is no state."""
        dated = self._before(client, clock)
        if dated is None:
            return {}
        self._clients.move_to_end(client)
        if dated.state is None:
            dated.state = self._load(client, dated)
            self._resident += _nbytes(dated.state)
            self._spill(client)
        return dated.state

    def write(self, client: int, clock: int, state: State, settled: int) -> None:
        """Keep a state from a call at a clock. `settled` is the clock of the last checkpoint.

        The fields of the state replace those of the previous state; all other fields stay as they were.
        """
        before = self._before(client, clock)
        merged = {**self.read(client, clock), **{name: _on_host(leaves) for name, leaves in state.items()}}
        new = _Dated(clock, merged)
        dated = self._clients.setdefault(client, [])
        safe = next((d for d in reversed(dated) if d.clock < min(settled, clock)), None)
        kept = [d for d in dated if d is safe or d is before]
        if self._durable:  # the run may continue from any checkpoint since the settled one
            oldest = clock if safe is None else safe.clock
            kept = [d for d in dated if oldest <= d.clock < clock or d is before][-MOST:]
        for old in dated:
            if not any(old is d for d in kept):
                self._drop(client, old)
        self._clients[client] = [*kept, new]
        self._clients.move_to_end(client)
        self._resident += _nbytes(merged)
        if self._durable:
            self._store(client, new)
        self._spill(client)

    def place(self, folder: Path) -> None:
        """Set the folder of the files, before any file is written."""
        self._folder = folder

    def save(self, clock: int) -> dict[str, str]:
        """Write all states to files, and name each client's state from before a clock, for `load`."""
        manifest: dict[int, tuple[int, str]] = {}
        for client in list(self._clients):
            dated = self._before(client, clock)
            if dated is not None:
                manifest[client] = dated.clock, self._store(client, dated)
        gone = self._saved[0] if len(self._saved) == CHECKPOINTS else {}
        self._saved.append(manifest)
        for client, (old, _) in gone.items():
            if not self._named(client, old) and all(d.clock != old for d in self._clients.get(client, [])):
                self._file(client, old).unlink(missing_ok=True)
        return {str(client): f"{old} {digest}" for client, (old, digest) in manifest.items()}

    def load(self, manifest: Mapping[str, str]) -> None:
        """Continue from the states that a checkpoint names. Their files are read on demand."""
        self._clients.clear()
        self._resident = 0
        named: dict[int, tuple[int, str]] = {}
        for client, entry in manifest.items():
            clock, _, digest = entry.partition(" ")
            named[int(client)] = int(clock), digest
            self._clients[int(client)] = [_Dated(int(clock), None, digest)]
        self._saved.append(named)  # the checkpoint still exists, so its files stay

    def packed(self) -> dict[str, str]:
        """The files of the states by name, in Base64, for another process that cannot read the files."""
        packed = {}
        for client, dated in self._clients.items():
            for each in dated:
                self._load(client, each)  # refuses a file that is damaged or missing, by name
                file = self._file(client, each.clock)
                packed[file.name] = base64.b64encode(file.read_bytes()).decode()
        return packed

    def unpack(self, files: Mapping[str, str]) -> None:
        """Write the files that another process has packed."""
        for name, content in files.items():
            (self._where() / name).write_bytes(base64.b64decode(content))

    def clear(self) -> None:
        """Forget everything, and delete the files of a temporary folder."""
        self._clients.clear()
        self._resident = 0
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _before(self, client: int, clock: int) -> _Dated | None:
        return next((d for d in reversed(self._clients.get(client, [])) if d.clock < clock), None)

    def _named(self, client: int, clock: int) -> bool:
        """Whether a checkpoint that still exists names this state."""
        return any(manifest.get(client, (None,))[0] == clock for manifest in self._saved)

    def _spill(self, spared: int) -> None:
        """Move states to files until the rest fits the limit; the state of the client at work stays in memory."""
        for client in list(self._clients):
            if self._resident <= self._limit:
                return
            if client == spared:
                continue
            for dated in self._clients[client]:
                if dated.state is not None:
                    self._store(client, dated)
                    self._resident -= _nbytes(dated.state)
                    dated.state = None

    def _drop(self, client: int, dated: _Dated) -> None:
        if dated.state is not None:
            self._resident -= _nbytes(dated.state)
        if dated.digest is not None and not self._named(client, dated.clock):
            self._file(client, dated.clock).unlink(missing_ok=True)

    def _where(self) -> Path:
        if self._folder is not None:
            return self._folder
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedbilevel-clients-")
        return Path(self._temporary.name)

    def _file(self, client: int, clock: int) -> Path:
        return self._where() / f"{client}-{clock}.safetensors"

    def _store(self, client: int, dated: _Dated) -> str:
        """Write a state to its file, unless it is there, and return the digest of the state."""
        if dated.digest is None:
            assert dated.state is not None
            dated.digest = write_state(self._file(client, dated.clock), dated.state, client)
        return dated.digest

    def _load(self, client: int, dated: _Dated) -> State:
        state, dated.digest = read_state(self._file(client, dated.clock), dated.digest, client)
        return state

    def _find(self) -> None:
        """Find the states whose files exist. A file that cannot be read is treated as lost and deleted."""
        assert self._folder is not None
        found = []
        for file in self._folder.glob("*.safetensors"):
            number, _, date = file.stem.partition("-")
            if number.isdigit() and date.isdigit():
                found.append((int(number), int(date)))
        for client, clock in sorted(found):
            dated = _Dated(clock, None)
            try:
                dated.state = self._load(client, dated)
            except CheckpointError:
                self._file(client, clock).unlink(missing_ok=True)
                continue
            self._resident += _nbytes(dated.state)
            self._clients.setdefault(client, []).append(dated)


def _on_host(leaves: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(leaf) for leaf in leaves)


def _nbytes(state: State) -> int:
    return sum(leaf.nbytes for leaves in state.values() for leaf in leaves)

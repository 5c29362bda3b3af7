"""Every new name of a file is written down at once: a rename alone may be lost when the power fails."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel import load_spec
from fedbilevel.data._cache import digest, obtain
from fedbilevel.data._origins import Installed
from fedbilevel.record import CHECKPOINTS, Checkpoint, RunFolder

LEDGER: dict[str, Any] = {"steps": {}, "probes": {}, "rejected": {}}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is renamed and what is synced, in order."""
    noted: list[str] = []
    replace, sync = os.replace, os.fsync

    def renaming(old: Any, new: Any, **more: Any) -> None:
        noted.append(f"rename {Path(new).name} in {Path(new).parent}")
        replace(old, new, **more)

    def syncing(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        noted.append(f"sync {'folder' if place.is_dir() else 'file'} {place}")
        sync(descriptor)

    monkeypatch.setattr(os, "replace", renaming)
    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "fsync", syncing)
    return noted


def unsynced(events: list[str]) -> list[str]:
    """The renames after which the folder was not synced at once."""
    return [
        event
        for event, then in zip(events, [*events[1:], "the end"], strict=True)
        if event.startswith("rename") and then != f"sync folder {event.partition(' in ')[2]}"
    ]


def test_every_rename_of_a_checkpoint_is_written_down(tmp_path: Path, events: list[str]) -> None:
    plan = load_spec("demo", {"problem.name": "quadratic"}).plan
    folder = RunFolder(tmp_path / "run")
    with closing(folder):
        folder.open(plan, resume=False, overwrite=False)
        for iteration in range(4):
            folder.save(plan, Checkpoint({"x": np.zeros(3, np.float32)}, iteration, LEDGER))
    renamed = [event.split()[1] for event in events if event.startswith("rename")]
    assert [renamed.count(name) for name in CHECKPOINTS] == [4, 3, 2]
    assert unsynced(events) == []


def test_every_file_of_a_data_set_is_written_down(tmp_path: Path, events: list[str]) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "rows").write_bytes(b"rows")
    obtain("tiny", {"rows": digest(b"rows")}, [Installed(str(tmp_path / "share"))], tmp_path / "cache")
    assert (tmp_path / "cache" / "rows").read_bytes() == b"rows"
    assert [event for event in events if "rename rows" in event] and unsynced(events) == []
    before = events.index(f"rename rows in {tmp_path / 'cache'}")
    assert "sync file" in events[before - 1], "its content is there before its name"

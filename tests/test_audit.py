"""The audit file of a site: every line is linked to the one before, and a change in the middle shows."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedbilevel as fb
from fedbilevel import cli
from fedbilevel.engines.flare import Audit, verify_audit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def write(file: Path, count: int, start: int = 0) -> None:
    audit = Audit(file)
    for number in range(start, start + count):
        audit.write(what="step", number=number)


def entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_line_has_the_digest_of_the_line_before(file: Path) -> None:
    write(file, 3)
    write(file, 2, start=3)  # as after a restart
    lines = file.read_bytes().splitlines()
    assert [entry["what"] for entry in entries(file)] == ["begin", *["step"] * 5]
    for before, line in itertools.pairwise(lines):
        assert json.loads(line)["before"] == sha256(before).hexdigest()
    verdict = verify_audit(file)
    assert verdict.broken is None and verdict.lines == 6 and verdict.last == sha256(lines[-1]).hexdigest()


@pytest.mark.parametrize("place", [0, 1, 3, 4])
@pytest.mark.parametrize("how", ["changed", "removed", "doubled", "added"])
def test_a_line_that_was_changed_removed_or_added_shows_where_it_was(file: Path, place: int, how: str) -> None:
    write(file, 5)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[place : place + 1] = {
        "changed": [lines[place].replace(b"time", b"tide")],
        "removed": [],
        "doubled": [lines[place]] * 2,
        "added": [lines[place], b"{}\n"],
    }[how]
    file.write_bytes(b"".join(lines))
    shows = place + (1 if how == "removed" else 2)
    broken = verify_audit(file).broken
    assert broken is not None and broken.startswith(f"line {shows} "), broken


def test_two_lines_that_change_places_show(file: Path) -> None:
    write(file, 5)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    file.write_bytes(b"".join(lines))
    assert (verify_audit(file).broken or "").startswith("line 3 ")


def test_a_change_while_the_site_runs_shows_too(file: Path) -> None:
    """The site links its next line to what it wrote, not to what it finds."""
    audit = Audit(file)
    audit.write(what="step", number=1)
    file.write_bytes(file.read_bytes().replace(b'"number": 1', b'"number": 7'))
    audit.write(what="step", number=2)
    assert (verify_audit(file).broken or "").startswith("line 3 ")


def test_half_a_line_after_a_crash_stays_and_the_chain_goes_on(file: Path) -> None:
    write(file, 3)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert verify_audit(file).torn and verify_audit(file).broken is None
    write(file, 2, start=3)
    assert file.read_bytes().startswith(whole[:-9] + b"\n")
    assert verify_audit(file).broken is None and not verify_audit(file).torn
    lines = file.read_bytes().splitlines(keepends=True)
    for place in (2, 3):  # the line before the half one, and the half one itself
        file.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
        assert verify_audit(file).broken is not None


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_from_before_the_chain_goes_on_and_is_sealed_as_a_whole(file: Path, end: str) -> None:
    old = '{"time": 1.0, "step": "gradients"}\n{"time": 2.0, "step": "losses"}' + end
    file.write_text(old)
    assert verify_audit(file).broken is None
    write(file, 2)
    verdict = verify_audit(file)
    assert verdict.broken is None and verdict.unlinked == 2 and verdict.lines == 5
    file.write_text(file.read_text().replace("gradients", "nothing"))
    assert (verify_audit(file).broken or "").startswith("line 3 ")


def test_a_chain_cannot_be_begun_anew_in_the_middle(file: Path) -> None:
    write(file, 2)
    with file.open("a") as stream:
        stream.write('{"what": "note"}\n')  # a line without a link, so that the next writer would begin again
    write(file, 2)
    assert (verify_audit(file).broken or "").startswith("line 4 ")


def _many(file: Path, start: int) -> None:
    write(file, 50, start)


@pytest.mark.slow
def test_processes_that_write_at_the_same_time_make_one_chain(file: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_many, args=(file, 100 * i)) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = entries(file)
    assert len(found) == 101 and verify_audit(file).broken is None
    assert sorted(e["number"] for e in found[1:]) == [*range(50), *range(100, 150)]


def test_the_command_tells_whether_the_chain_holds_and_whether_a_noted_line_is_there(file: Path) -> None:
    def told(*more: str) -> Any:
        return CliRunner().invoke(cli.app, ["audit", str(file), *more])

    write(file, 4)
    noted = verify_audit(file).last
    good = told("--noted", noted)
    assert good.exit_code == 0 and "5 lines, the chain holds" in good.output and noted in good.output
    write(file, 1, start=4)
    assert told("--noted", noted).exit_code == 0, "also when lines came after it"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]))
    assert told().exit_code == 0, "a removed end does not show in the file alone"
    assert "no line has the digest" in str(told("--noted", noted).exception)
    file.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert isinstance(told().exception, fb.FedBilevelError) and "line 3 " in str(told().exception)
    assert "cannot be read" in str(CliRunner().invoke(cli.app, ["audit", "/nowhere"]).exception)

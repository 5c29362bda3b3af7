"""What clients keep: dated states, files beyond the limit, manifests of checkpoints, and a store that lasts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines._statefile import State
from fedbilevel.engines._states import CHECKPOINTS, MOST, ClientStates

ALWAYS = 10**9  # a clock after all others


def state(value: float, size: int = 4) -> State:
    return {"v": (np.full(size, value, np.float32),)}


def value(states: ClientStates, client: int, clock: int) -> float | None:
    """The number that was kept last before a clock."""
    found = states.read(client, clock)
    return float(found["v"][0][0]) if found else None


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def same(one: State, other: State) -> bool:
    """Whether two states have the same fields, shapes, types and bits."""

    def described(leaf: Any) -> tuple[Any, ...]:
        return leaf.dtype, leaf.shape, leaf.tobytes()

    return one.keys() == other.keys() and all(
        list(map(described, one[name])) == list(map(described, other[name])) for name in one
    )


# ----------------------------------------------------------------------------------------------------------- dates


def test_a_client_asked_twice_in_one_round_starts_from_the_same_state() -> None:
    states = ClientStates()
    states.write(3, 0, state(1.0), settled=0)
    assert value(states, 3, 1) == 1.0
    states.write(3, 1, state(2.0), settled=0)
    assert value(states, 3, 1) == 1.0, "asked again at the same clock"
    states.write(3, 1, state(2.5), settled=0)
    assert value(states, 3, 1) == 1.0 and value(states, 3, 2) == 2.5, "the later answer stands"
    assert states.latest(3, 2) == 1 and states.latest(3, 1) == 0 and states.latest(3, 0) is None


def test_a_client_that_never_kept_anything_has_nothing() -> None:
    states = ClientStates()
    assert states.read(7, ALWAYS) == {} and states.latest(7, ALWAYS) is None and len(states) == 0


def test_fields_that_a_step_does_not_return_stay_as_they_were() -> None:
    states = ClientStates()
    states.write(0, 0, {**state(1.0), "w": (np.ones(2, np.float32), np.int32(5))}, settled=0)
    states.write(0, 1, state(2.0), settled=0)
    assert value(states, 0, 2) == 2.0 and states.read(0, 2)["w"][1] == 5


def test_a_run_that_goes_back_reads_the_state_from_before_it() -> None:
    states = ClientStates()
    for clock in range(10):
        states.write(0, clock, state(clock), settled=6)
    assert value(states, 0, 6) == 5.0, "what a run that is resumed at the checkpoint of clock 6 goes on from"
    states.write(0, 6, state(60.0), settled=6)
    assert value(states, 0, 7) == 60.0 and value(states, 0, ALWAYS) == 60.0, "what came later is gone"
    assert value(states, 0, 6) == 5.0, "it can go back again"


def test_the_state_of_the_last_checkpoint_survives_any_number_of_later_calls() -> None:
    states = ClientStates()
    for clock in range(0, 500, 5):
        states.write(0, clock, state(clock), settled=12)
    assert value(states, 0, 12) == 10.0


def test_a_client_has_at_most_three_dated_states() -> None:
    states = ClientStates()
    for clock in range(40):
        states.write(0, clock, state(clock), settled=clock - clock % 7)
        assert states.resident <= 3 * 16
    assert [states.latest(0, clock) for clock in (40, 39, 38, 35, 34)] == [39, 38, 34, 34, None]


def test_a_durable_store_has_all_states_since_the_checkpoint_that_it_was_told_of(tmp_path: Path) -> None:
    """A site does not decide where a run goes on from: any checkpoint since the settled one may be it."""
    states = ClientStates(folder=tmp_path, durable=True)
    for clock in range(40):
        states.write(0, clock, state(clock), settled=clock - clock % 7)
    assert files(tmp_path) == {f"0-{clock}.safetensors" for clock in range(34, 40)}
    for clock in range(40, 400):
        states.write(0, clock, state(clock), settled=35)
    assert len(files(tmp_path)) <= MOST + 1, "also when nothing is settled any more"


@pytest.mark.slow
def test_a_million_registered_clients_cost_nothing() -> None:
    states = ClientStates()
    tracemalloc.start()
    for client in range(1_000_000):
        assert states.latest(client, ALWAYS) is None
    assert all(states.read(client, ALWAYS) == {} for client in range(0, 1_000_000, 100))
    states.write(999_999, 0, state(1.0), settled=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(states) == 1 and states.resident == 16 and peak < 100_000
    assert list(states.save(1)) == ["999999"]
    states.clear()


# ----------------------------------------------------------------------------------------------------------- files


WEIRD: State = {
    "number": (np.float32(0.1), np.int32(-7), np.bool_(True)),
    "nothing yet": (np.zeros((0, 3), np.float32),),
    "matrix": (np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), np.arange(8)[::2]),
    "edges": (np.asarray([np.nan, -0.0, np.inf, 1e-45], np.float32), np.arange(3, dtype=np.uint8)),
    "half": (np.arange(3, dtype=np.float16), np.asarray(jnp.asarray([1.5, -2.0], jnp.bfloat16))),
    "many": tuple(np.full(1, i, np.float32) for i in range(12)),
}


def test_beyond_the_limit_states_go_to_files_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    states = ClientStates(limit=1, folder=tmp_path / "clients")
    big = {client: np.random.default_rng(client).normal(size=2**16).astype(np.float32) for client in range(12)}
    kept = {client: {"v": (array,), **WEIRD} for client, array in big.items()}  # a quarter of a MiB each
    for client, each in kept.items():
        states.write(client, 0, each, settled=0)
        assert states.resident <= 2**20
    assert len(files(tmp_path / "clients")) == 12 - 3 and len(states) == 12
    for client in (0, 11, 5, 0):
        assert same(states.read(client, 1), in_memory(kept[client]))
        assert states.resident <= 2**20


def in_memory(each: State) -> State:
    """The same state as one that never left the memory."""
    states = ClientStates()
    states.write(0, 0, each, settled=0)
    return states.read(0, 1)


def test_the_states_of_those_asked_longest_ago_go_first(tmp_path: Path) -> None:
    states = ClientStates(limit=1, folder=tmp_path)
    for client in range(3):
        states.write(client, 0, state(client, 2**16), settled=0)
    states.read(0, 1)
    for client in (3, 4):
        states.write(client, 0, state(client, 2**16), settled=0)
    assert files(tmp_path) == {"1-0.safetensors"}


def test_without_a_folder_files_are_temporary_and_go_with_the_store() -> None:
    states = ClientStates(limit=1)
    for client in range(6):
        states.write(client, 0, state(client, 2**16), settled=0)
    place = states._where()
    assert len(files(place)) == 2 and value(states, 0, 1) == 0.0
    states.clear()
    assert not place.exists() and len(states) == 0 and states.resident == 0


def test_a_state_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    states = ClientStates(folder=tmp_path / "file" / "clients", durable=True)
    with pytest.raises(fb.StorageError, match=r"^the state of client 2 could not be written to .*2-0.safetensors"):
        states.write(2, 0, state(1.0), settled=0)


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_names_the_states_from_before_it_and_another_store_goes_on_from_them(tmp_path: Path) -> None:
    states = ClientStates(folder=tmp_path)
    for client in (2, 4):
        states.write(client, 0, state(client), settled=0)
    states.write(4, 5, {**state(40.0), **WEIRD}, settled=0)
    manifest = states.save(5)
    assert {client: entry.split()[0] for client, entry in manifest.items()} == {"2": "0", "4": "0"}
    later = states.save(6)
    assert later["2"] == manifest["2"] and later["4"].split()[0] == "5"

    resumed = ClientStates(folder=tmp_path)
    resumed.load(later)
    assert len(resumed) == 2 and resumed.resident == 0, "nothing is read before it is asked for"
    assert same(resumed.read(4, 6), states.read(4, 6)) and value(resumed, 2, 6) == 2.0
    resumed.load(manifest)
    assert value(resumed, 4, ALWAYS) == 4.0


def test_a_store_that_loads_forgets_what_it_had(tmp_path: Path) -> None:
    states = ClientStates(folder=tmp_path)
    states.write(0, 0, state(1.0), settled=0)
    manifest = states.save(1)
    states.write(0, 1, state(2.0), settled=1)
    states.write(9, 1, state(3.0), settled=1)
    states.load(manifest)
    assert value(states, 0, ALWAYS) == 1.0 and value(states, 9, ALWAYS) is None and len(states) == 1


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_changed_byte_in_a_file_is_refused(tmp_path: Path, place: int) -> None:
    states = ClientStates(folder=tmp_path)
    states.write(6, 3, state(1.0), settled=0)
    manifest = states.save(4)
    file = tmp_path / "6-3.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    resumed = ClientStates(folder=tmp_path)
    resumed.load(manifest)
    with pytest.raises(fb.CheckpointError, match=r"^the state of client 6 in .*6-3.safetensors cannot be read"):
        resumed.read(6, 4)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    states = ClientStates(folder=tmp_path)
    states.write(6, 3, state(1.0), settled=0)
    manifest = states.save(4)
    (tmp_path / "6-3.safetensors").unlink()
    resumed = ClientStates(folder=tmp_path)
    resumed.load(manifest)
    with pytest.raises(fb.CheckpointError, match=r"6-3.safetensors cannot be read .*put it back"):
        resumed.read(6, 4)


def test_the_files_of_the_three_newest_checkpoints_are_kept_and_those_of_older_ones_deleted(
    tmp_path: Path,
) -> None:
    states, manifests, settled = ClientStates(folder=tmp_path), list[dict[str, str]](), 0
    states.write(1, 0, state(100.0), settled=0)  # asked once, and named by all checkpoints
    for clock in range(1, 30):
        states.write(0, clock, state(clock), settled=settled)
        if clock % 5 == 0:
            manifests.append(states.save(clock + 1))
            settled = clock + 1
    assert len(manifests) == 5 and CHECKPOINTS == 3
    assert {"0-15.safetensors", "0-20.safetensors", "0-25.safetensors", "1-0.safetensors"} == files(tmp_path)
    for manifest, clock in zip(manifests[-3:], (15, 20, 25), strict=True):
        resumed = ClientStates(folder=tmp_path)
        resumed.load(manifest)
        assert value(resumed, 0, ALWAYS) == clock and value(resumed, 1, ALWAYS) == 100.0


def test_a_resumed_run_deletes_the_files_that_its_checkpoints_do_not_name_any_more(tmp_path: Path) -> None:
    states = ClientStates(folder=tmp_path)
    states.write(0, 0, state(0.0), settled=0)
    manifest = states.save(1)
    resumed = ClientStates(folder=tmp_path)
    resumed.load(manifest)
    for clock in (1, 2):
        resumed.write(0, clock, state(clock), settled=clock)
        resumed.save(clock + 1)
        assert "0-0.safetensors" in files(tmp_path), "a checkpoint names it"
    resumed.write(0, 3, state(3.0), settled=3)
    resumed.save(4)
    assert files(tmp_path) == {f"0-{clock}.safetensors" for clock in (1, 2, 3)}


# -------------------------------------------------------------------------------------------- a store that lasts


def test_a_durable_store_is_found_again_after_a_restart(tmp_path: Path) -> None:
    states = ClientStates(folder=tmp_path / "run", durable=True)
    for clock in range(6):
        states.write(0, clock, {**state(clock), **WEIRD}, settled=3)
    again = ClientStates(folder=tmp_path / "run", durable=True)
    for clock in range(8):
        assert again.latest(0, clock) == states.latest(0, clock)
        assert same(again.read(0, clock), states.read(0, clock))
    assert again.resident == states.resident
    again.write(0, 3, state(30.0), settled=3)
    assert value(ClientStates(folder=tmp_path / "run", durable=True), 0, ALWAYS) == 30.0


def test_a_store_that_is_not_durable_finds_nothing(tmp_path: Path) -> None:
    ClientStates(folder=tmp_path, durable=True).write(0, 0, state(1.0), settled=0)
    assert len(ClientStates(folder=tmp_path)) == 0


def cut(content: bytes) -> bytes:
    return content[:-1]


def emptied(content: bytes) -> bytes:
    return b""


def changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [cut, emptied, changed])
def test_a_damaged_file_of_a_durable_store_counts_as_lost(tmp_path: Path, damage: Any) -> None:
    states = ClientStates(folder=tmp_path, durable=True)
    for clock in range(4):
        states.write(0, clock, state(clock), settled=2)
    (tmp_path / "notes.txt").write_text("not ours")
    file = tmp_path / "0-3.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    again = ClientStates(folder=tmp_path, durable=True)
    assert again.latest(0, ALWAYS) == 2 and value(again, 0, ALWAYS) == 2.0
    assert not file.exists() and (tmp_path / "notes.txt").exists()

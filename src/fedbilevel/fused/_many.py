"""Many runs of a method at once.

The runs differ in numbers of the method, which are values of the program, and in their seeds. Runs with the same
seed make the same choices and draw the same cohorts and rows. They are on one track, and what is drawn for a track
is drawn once. Tracks differ in the choices of the server (AggITD's Q), and so in their instructions. As runs do
not depend on one another, their instructions are merged into one sequence in which a track does those that are its
own: instructions that are the same at the same place of an iteration are done by several tracks at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import FedBilevelError, StepError
from ..federation import Federation
from ._blocks import AHEAD, DRAWS, LONGEST, Blocks, Planned, Recorded
from ._books import Books
from ._program import COHORT, PLACE, Given, ManyBlock


class Lane(NamedTuple):
    """A run at the start of a block: its federation, its state, its numbers of the method, and its iterations."""

    fed: Federation
    state: Any
    numbers: Mapping[str, float]
    iteration: int


class Track(NamedTuple):
    """Runs with the same seed at the same place, and how many iterations they are to do."""

    lanes: Sequence[Lane]
    iterations: int


class Arrived(NamedTuple):
    """A run at the end of a block.

    iterations   how many it has done; fewer than it was to do if a reply of the next one is not finite
    before       the state before the last of them, and `notes` what was noted in it
    """

    state: Any
    before: Any
    notes: dict[str, Any]
    iterations: int


class Merged(NamedTuple):
    """The instructions of one iteration of several tracks in one sequence.

    rows     the instructions
    wanted   which tracks do them
    own      for each of these tracks, the place of the instruction in its own iteration
    """

    rows: np.ndarray
    wanted: np.ndarray
    own: np.ndarray


class ManyBlocks:
    """Runs outer iterations of many runs of a method in blocks.

    devices   the devices over which the runs are spread
    """

    def __init__(self, blocks: Blocks, devices: Sequence[Any]) -> None:
        self._blocks, self._devices = blocks, list(devices)
        self._merged: dict[Any, Merged] = {}
        self._placed: dict[Any, tuple[Given, Given]] = {}
        self.shape = (0, 0)  # the tracks of the program, and the runs of a track
        self.seconds = (0.0, 0.0)  # of the last block: in all, and for compiling

    def rounds_ahead(self, fed: Federation, count: int) -> list[int]:
        """The rounds of each of the next iterations of a run."""
        self._blocks.begin(fed)
        return [*self._blocks.rounds_ahead(count)]

    def needed(self, tracks: Sequence[Track]) -> tuple[int, int]:
        """The least tracks of a program, and runs of a track, for these runs. The devices share them evenly."""
        rows, runs, devices = len(tracks), max(len(track.lanes) for track in tracks), len(self._devices)
        if runs >= devices:
            runs += -runs % devices
        elif rows >= devices:
            rows += -rows % devices
        return rows, runs

    @property
    def bytes_of_a_run(self) -> int:
        """About how many bytes a run needs while it computes."""
        return self._blocks.bytes_of_a_run()

    def advance(self, tracks: Sequence[Track], left: int | None) -> list[list[Arrived]]:
        """Do outer iterations of all runs, and book them. `left` are left of the longest run."""
        start, blocks = time.perf_counter(), self._blocks
        plans = list[list[Planned]]()
        for track in tracks:
            blocks.begin(track.lanes[0].fed)
            if not blocks.begun:  # the choices of the next iterations are made known to the first program
                blocks.plan(AHEAD if left is None else min(AHEAD, max(left, track.iterations)))
            plans.append(blocks.plan(track.iterations))
        books = [Books() for _ in tracks]
        longest, (rows, runs) = max(map(len, plans)), self.shape
        size = blocks.part(longest, LONGEST, DRAWS // rows)
        mesh = self._mesh()
        outcome = blocks.program.start_many(self._stacked(tracks))
        compiled = blocks.program.seconds
        try:
            for first in range(0, longest, size):
                block = self._block(tracks, [plan[first : first + size] for plan in plans], size, books)
                outcome = blocks.program.run_many(self._given(mesh), outcome, block, mesh)
            made: Any = jax.device_get(outcome)
        except FedBilevelError:
            raise
        except Exception as error:
            raise StepError(f"a block of {rows * runs} runs: {type(error).__name__}: {error}") from error
        compiling = blocks.program.seconds - compiled
        self.seconds = time.perf_counter() - start, compiling
        share = (self.seconds[0] - compiling) / sum(len(track.lanes) for track in tracks)
        return [
            [
                self._arrived(made, (row, run), lane, plans[row], books[row], share)
                for run, lane in enumerate(track.lanes)
            ]
            for row, track in enumerate(tracks)
        ]

    def _arrived(
        self, made: Any, at: tuple[int, int], lane: Lane, plan: list[Planned], books: Books, seconds: float
    ) -> Arrived:
        count = int(made.ended[at])
        books.book(lane.fed.ledger, count, seconds)
        leaves = len(jax.tree.leaves(lane.state))
        new, before = (
            self._blocks.state_of([leaf[at] for leaf in part[:leaves]]) for part in (made.state, made.before)
        )
        names = plan[count - 1].recorded.tape.notes if count else ()
        return Arrived(new, before, {name: made.notes[name][at] for name in names}, count)

    def _stacked(self, tracks: Sequence[Track]) -> tuple[Any, ...]:
        """The states and the numbers of all runs, with two leading axes. Surplus places have a run once more."""
        names = self._blocks.names
        rows, runs = self.shape
        grid = []
        for row in range(rows):
            lanes = tracks[min(row, len(tracks) - 1)].lanes
            grid.append([lanes[min(run, len(lanes) - 1)] for run in range(runs)])

        def leaves(lane: Lane) -> list[Any]:
            numbers = (np.float32(lane.numbers[name]) for name in names)
            return [*jax.tree.leaves(lane.state), *numbers, *self._blocks.clock(lane.iteration)]

        each = [[leaves(lane) for lane in row] for row in grid]
        return tuple(
            np.stack([np.stack([np.asarray(own[i]) for own in row]) for row in each])
            for i in range(len(each[0][0]))
        )

    def _mesh(self) -> Mesh | None:
        devices, (rows, runs) = np.asarray(self._devices), self.shape
        if len(devices) == 1:
            return None
        if runs % len(devices) == 0:
            return Mesh(devices, ("runs",))
        return Mesh(devices, ("tracks",)) if rows % len(devices) == 0 else None

    def _given(self, mesh: Mesh | None) -> Given:
        """What the clients have, on all devices."""
        own = self._blocks.given()
        if mesh is None:
            return own
        if mesh not in self._placed or self._placed[mesh][0] is not own:
            there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            self._placed[mesh] = own, jax.device_put(own, there)
        return self._placed[mesh][1]

    def _block(
        self, tracks: Sequence[Track], plans: Sequence[list[Planned]], size: int, books: Sequence[Books]
    ) -> ManyBlock:
        """The merged instructions of some iterations, and everything that is drawn for them."""
        blocks, (rows, _) = self._blocks, self.shape
        singles = []
        for track, plan, own in zip(tracks, plans, books, strict=True):
            blocks.begin(track.lanes[0].fed)
            singles.append(blocks.block(plan, size, own))
        code, places, wanted = list[Any](), list[Any](), list[Any]()
        starts = [0] * len(plans)
        for number in range(max(map(len, plans))):
            alike = [plan[number].recorded if number < len(plan) else None for plan in plans]
            merged = self._merge(alike)
            code.append(merged.rows)
            wanted.append(merged.wanted)
            there = np.zeros((len(merged.rows), len(plans), 2), np.int32)
            for at, (single, recorded) in enumerate(zip(singles, alike, strict=True)):
                if recorded is not None:
                    own_rows = single.code[starts[at] + merged.own[:, at]]
                    there[:, at] = np.where(merged.wanted[:, at, None], own_rows[:, [COHORT, PLACE]], 0)
                    starts[at] += len(recorded.code)
            places.append(there)
        every, masked = self._longest()
        masked = (masked and len(plans) > 1) or len({len(plan) for plan in plans}) > 1
        capacity = size * (every if masked else max(len(r.code) for r in blocks.known()))
        length = sum(map(len, code))
        capacity = max(capacity, length)

        def whole(parts: list[Any], columns: int | None) -> np.ndarray:
            joined = np.concatenate(parts)
            if columns is not None and joined.shape[1] < columns:  # surplus tracks do what the last one does
                joined = np.concatenate([joined, np.repeat(joined[:, -1:], columns - joined.shape[1], 1)], axis=1)
            made = np.zeros((capacity, *joined.shape[1:]), joined.dtype)
            made[: len(joined)] = joined
            return made

        def stacked(*arrays: np.ndarray) -> np.ndarray:
            return np.stack([*arrays, *[arrays[-1]] * (rows - len(arrays))])

        drawn = jax.tree.map(stacked, *[(single.cohorts, single.moving) for single in singles])
        done = whole(wanted, rows) if masked else None
        return ManyBlock(np.int32(length), whole(code, None), whole(places, rows), done, *drawn)

    def _merge(self, alike: Sequence[Recorded | None]) -> Merged:
        """The instructions of one iteration of some tracks in one sequence; None is a track that has ended.

        The track that is furthest behind comes next, and with it all tracks whose next instruction is the same.
        """
        width = self._blocks.program.longest
        key = width, tuple(map(id, alike))
        if key in self._merged:
            return self._merged[key]
        tapes = [() if r is None else _instructions(r, width) for r in alike]
        at, rows, wanted, own = [0] * len(tapes), list[Any](), list[Any](), list[Any]()
        while True:
            behind = [i for i, tape in enumerate(tapes) if at[i] < len(tape)]
            if not behind:
                break
            first = min(behind, key=lambda i: at[i])
            row = tapes[first][at[first]]
            those = [i for i in behind if at[i] == at[first] and tapes[i][at[i]] == row]
            rows.append(row)
            wanted.append([i in those for i in range(len(tapes))])
            own.append([min(at[i], max(len(tapes[i]) - 1, 0)) for i in range(len(tapes))])
            for i in those:
                at[i] += 1
        made = Merged(np.asarray(rows, np.int32), np.asarray(wanted), np.asarray(own))
        self._merged[key] = made
        return made

    def _longest(self) -> tuple[int, bool]:
        """The most instructions of an iteration of merged tracks, and whether tracks can differ in them."""
        merged = self._merge(self._blocks.known())
        return len(merged.rows), not merged.wanted.all()


def _instructions(recorded: Recorded, width: int) -> tuple[tuple[int, ...], ...]:
    """The instructions of an iteration, as values that can be compared."""
    code = np.zeros((len(recorded.code), width), np.int32)
    code[:, : recorded.code.shape[1]] = recorded.code
    return tuple(tuple(row) for row in code.tolist())


def traceable(engine: Any, algorithm: Any, fed: Federation, state: Any, names: Sequence[str]) -> Blocks:
    """What runs a method in blocks with these numbers as values. Raise `SettingsError` if that is not possible."""
    blocks = Blocks(engine, algorithm, fed, state, names)
    blocks.plan(1)
    return blocks

"""The PyTorch rivals of the benchmark do what our simulation does, on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fedbilevel import Federation, Simulation  # noqa: E402
from fedbilevel.bench.cases import EPOCHS, Case  # noqa: E402
from fedbilevel.bench.rivals import Plan, Rival, counts, draw_plan, flat_from, state_from  # noqa: E402
from fedbilevel.bench.rivals_func import func_iterate, torch_func  # noqa: E402
from fedbilevel.bench.rivals_loop import loop_iterate, torch_loop  # noqa: E402
from fedbilevel.engines import Call, Replies  # noqa: E402
from fedbilevel.engines._work import prepare  # noqa: E402
from fedbilevel.rng import generator  # noqa: E402

# 14 lower rows: the last minibatch of a pass is short.
SMALL: Any = dict(lower=14, upper=10, cohort=3, registered=5)
CASES = [
    Case("mlp-tau5", tau=5, N=1, **SMALL),
    Case("mlp-tau1-N2", tau=1, N=2, **SMALL),
    Case("cnn-28", "cnn", tau=3, N=1, **SMALL),
    Case("cnn-32", "cnn", (32, 32, 3), tau=2, N=1, **SMALL),
]


class Recorder:
    """A simulation that keeps the calls it was given."""

    def __init__(self, case: Case) -> None:
        self.problem, self.clients = case.problem, case.clients()
        self._engine = Simulation(self.problem, self.clients)
        self.capabilities = self._engine.capabilities
        self.calls: list[Call] = []

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        return self._engine.replies(call)

    def close(self) -> None:
        self._engine.close()

    def plan(self) -> Plan:
        """What the calls drew, as a rival takes it."""
        sources = [call.constants["source"] for call in self.calls if call.step.name == "gradients"]
        rounds = [call for call in self.calls if call.step.name == "lower_steps"]
        clients, size = self.calls[0].clients, self.clients.capacity
        draws = [[prepare(call, self.problem, c, size, size)["zeta"].draws for c in clients] for call in rounds]
        index = torch.from_numpy(np.stack([[d.index for d in each] for each in draws])).long()
        counts = tuple(int(n) for n in draws[0][0].weight.sum(axis=1))
        return Plan(clients, index, counts, sources.index(True))


def seeds(N: int) -> list[int]:
    """For each Q the first seed whose first outer iteration draws it."""
    drawn = [int(generator(seed, "Q", 0).integers(N + 1)) for seed in range(50)]
    return [drawn.index(Q) for Q in range(N + 1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_outer_iteration_of_each_rival_is_ours_on_the_same_samples_for_every_q(case: Case) -> None:
    engine = Recorder(case)
    begin = case.algorithm.init(case.problem)
    x, y = (np.asarray(v) for v in begin)
    rivals = {"loop": loop_iterate(case), "func": func_iterate(case)}
    for Q, seed in enumerate(seeds(case.N)):
        engine.calls.clear()
        end = case.algorithm.step(Federation(engine, seed=seed), begin)
        plan = engine.plan()
        assert plan.Q == Q and 4 in plan.counts and plan.counts == counts(case)
        for name, iterate in rivals.items():
            got = flat_from(case, iterate(state_from(case, x, y), plan))
            for start, value, wanted in zip((x, y), got, end, strict=True):
                # Of the way gone, not of the vector: x moves 0.0003 of itself, of which float32 blurs 0.0002.
                error = np.linalg.norm(value - wanted) / np.linalg.norm(wanted - start)
                assert error < 5e-4, f"{name}, Q = {Q}: {error}"


@pytest.mark.parametrize("make", [torch_loop, torch_func], ids=["loop", "func"])
def test_a_rival_goes_on_from_call_to_call_with_other_samples(make: Callable[[Case], Rival]) -> None:
    rival = make(CASES[0])
    states = [rival.state]
    for _ in range(2):
        rival()
        states.append(rival.state)
    for before, after in pairwise(states):
        assert all(torch.isfinite(v).all() for group in after for v in group)
        assert all(
            not torch.equal(a, b) for pair in zip(before, after, strict=True) for a, b in zip(*pair, strict=True)
        )


def test_a_drawn_plan_visits_every_row_once_a_pass() -> None:
    case = CASES[1]
    plan = draw_plan(case, torch.Generator().manual_seed(0))
    assert len(set(plan.clients)) == case.cohort and set(plan.clients) <= set(range(case.registered))
    passes = plan.index.view(case.N, case.cohort, EPOCHS, -1)[..., : case.lower]
    assert torch.equal(passes.sort().values, torch.arange(case.lower).expand_as(passes))
    assert len(torch.unique(passes.flatten(0, 2), dim=0)) == case.N * case.cohort * EPOCHS
    again = torch.Generator().manual_seed(0)
    assert {draw_plan(case, again).Q for _ in range(30)} == {0, 1, 2}


def test_flat_vectors_survive_the_way_to_a_state_and_back() -> None:
    case = CASES[3]
    x, y = (np.arange(v.size, dtype=np.float32) for v in case.algorithm.init(case.problem))
    back = flat_from(case, state_from(case, x, y))
    assert all(np.array_equal(a, b) for a, b in zip((x, y), back, strict=True))

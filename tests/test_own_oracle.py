"""A problem with an oracle of its own: derivatives in closed form, by NumPy, which JAX cannot trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.oracle import Arrays, Kept, recall
from fedbilevel.problem import Flat, Over
from fedbilevel.problems import QuadraticTask

METHODS: dict[str, Any] = {
    "svrg": fb.AggITD(N=2, alpha=0.1, beta=0.1, lam=0.3, participation=1.0, lower_steps=3, batch_zeta_local=4),
    "sgd": fb.AggITD(N=2, lam=0.3, participation=1.0, lower_solver="sgd", lower_steps=2, upper_steps=2, batch_u=4),
    "fednest": fb.FedNest(N=1, T=3, lam=0.3, participation=1.0, lower_steps=2),
    "simfbo": fb.SimFBO(alpha=0.1, beta=0.1, tau=2, participation=1.0),
    "fed-f2sa": fb.FedF2SA(alpha=0.1, beta=0.1, nu=0.1, participation=1.0),
}


class ClosedForm:
    """The derivatives of one client of the quadratic, written down by hand."""

    def __init__(self, held: Mapping[str, Any], data: Arrays, kept: Mapping[str, Kept]) -> None:
        assert all(isinstance(vector, np.ndarray) for vector in held.values()), "the step is not traced"
        self._held, self._kept = held, kept
        self._lower, self._upper = data.lower.inputs, data.upper.inputs

    @property
    def x(self) -> Any:
        return self._held["x"]

    @property
    def y(self) -> Any:
        return self._held["y"]

    def held(self, name: str) -> Any:
        return self._held[name]

    def own(self, name: str, default: Any) -> Any:
        return recall(self._kept, name, default)

    def _mean(self, rows: Any, draw: fb.Draw) -> Any:
        if draw.index is None:
            return rows.mean(0)
        return np.tensordot(draw.weight, rows[draw.index], 1) / draw.weight.sum()

    def _upper_gradient(self, y: Any, xi: fb.Draw, at: Any) -> Any:
        z = np.concatenate([self.x if at is None else at, y])
        return self._upper["J"][0] @ z + self._mean(self._upper["c"], xi)

    def f(self, y: Any, xi: fb.Draw, at: Any = None) -> Any:
        z = np.concatenate([self.x if at is None else at, y])
        return np.float32(0.5 * z @ self._upper["J"][0] @ z + self._mean(self._upper["c"], xi) @ z)

    def g(self, y: Any, zeta: fb.Draw, at: Any = None) -> Any:
        x = self.x if at is None else at
        linear = self._lower["B"][0] @ x + self._mean(self._lower["b"], zeta)
        return np.float32(0.5 * y @ self._lower["A"][0] @ y + linear @ y)

    def f_x(self, y: Any, xi: fb.Draw, at: Any = None) -> Any:
        return self._upper_gradient(y, xi, at)[: len(self.x)]

    def f_y(self, y: Any, xi: fb.Draw, at: Any = None) -> Any:
        return self._upper_gradient(y, xi, at)[len(self.x) :]

    def g_y(self, y: Any, zeta: fb.Draw, at: Any = None) -> Any:
        x = self.x if at is None else at
        return self._lower["A"][0] @ y + self._lower["B"][0] @ x + self._mean(self._lower["b"], zeta)

    def g_yy(self, y: Any, v: Any, u: fb.Draw, at: Any = None) -> Any:
        return self._lower["A"][0] @ v

    def g_xy(self, y: Any, v: Any, chi: fb.Draw, at: Any = None) -> Any:
        return self._lower["B"][0].T @ v

    def g_x(self, y: Any, zeta: fb.Draw, at: Any = None) -> Any:
        return self._lower["B"][0].T @ y


class ByHand:
    """The quadratic problem without JAX."""

    traceable: ClassVar[bool] = False
    chances: ClassVar[None] = None
    over: ClassVar[Over] = "vmap"

    def __init__(self, p: int, q: int) -> None:
        self.size_x, self.size_y = p, q
        self.flat_x, self.flat_y = Flat(jnp.zeros(p), lambda v: v), Flat(jnp.zeros(q), lambda v: v)

    def remember(self, x: Any, data: Arrays) -> None:
        return None

    def oracle(
        self, held: Mapping[str, Any], data: Arrays, memory: Any = None, kept: Mapping[str, Kept] | None = None
    ) -> fb.Oracle:
        return ClosedForm(held, data, kept or {})


@pytest.mark.parametrize("name", METHODS)
def test_the_unchanged_algorithms_run_on_it_and_agree_with_jax(name: str, quadratic: QuadraticTask) -> None:
    by_hand = ByHand(quadratic.problem.size_x, quadratic.problem.size_y)
    runs = [
        fb.train(problem, quadratic.clients, METHODS[name], engine="loop", stop={"iterations": 4})
        for problem in (by_hand, quadratic.problem)
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(runs[0].y, runs[1].y, rtol=1e-4, atol=1e-5)
    for found, expected in zip(runs[0].history, runs[1].history, strict=True):
        assert found["upper_loss"] == pytest.approx(expected["upper_loss"], rel=1e-4)
        assert found["lower_loss"] == pytest.approx(expected["lower_loss"], rel=1e-4)


@pytest.mark.parametrize("engine", ["simulation", "fused"])
def test_an_engine_that_traces_refuses_it_and_names_the_one_to_use(engine: str, quadratic: QuadraticTask) -> None:
    with pytest.raises(fb.SettingsError, match="JAX cannot trace its oracle; use 'loop'"):
        fb.train(ByHand(10, 8), quadratic.clients, METHODS["svrg"], engine=engine, stop={"rounds": 7})


@pytest.mark.parametrize("engine", [None, "auto"])
def test_a_run_chooses_the_loop_for_it_and_says_so(engine: str | None, quadratic: QuadraticTask) -> None:
    problem = ByHand(quadratic.problem.size_x, quadratic.problem.size_y)
    result = fb.train(problem, quadratic.clients, METHODS["simfbo"], engine=engine, stop={"iterations": 1})
    assert result.summary["engine"] == {"name": "loop", "why": "JAX cannot trace the oracle of this problem"}

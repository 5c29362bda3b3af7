"""`fedbilevel.check` passes what is right, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import ClientData, ClientSize, LazyClients, ListedClients, Part, Problem, check
from fedbilevel.batch import Batch
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask

DERIVATIVES = ["f_x", "f_y", "g_y", "g_yy", "g_xy", "g_yy symmetric"]


def data() -> ClientData:
    g = np.random.default_rng(0)
    parts = (
        Part(g.normal(size=(rows, 3)).astype(np.float32), g.normal(size=rows).astype("f4")) for rows in (6, 4)
    )
    return ClientData(*parts)


def problem(
    mean: Callable[[Batch, Any], Any] = Batch.mean, curve: Any = jnp.sinh, mix: Callable[[Any], Any] = lambda x: x
) -> Problem:
    """A smooth regression whose parts can be spoilt one by one."""

    def lower(x: Any, y: Any, batch: Batch) -> Any:
        return mean(batch, (batch.inputs @ (y * jnp.exp(mix(x))) - batch.targets) ** 2) + jnp.sum(curve(y) ** 2)

    def upper(x: Any, y: Any, batch: Batch) -> Any:
        return batch.mean((batch.inputs @ (y + jnp.sin(x)) - batch.targets) ** 2)

    return Problem(jnp.asarray([0.1, -0.2, 0.3]), jnp.asarray([0.5, 0.4, -0.6]), lower, upper)


def wrong(report: Any) -> list[str]:
    return [f.name for f in report.findings if not f.ok]


def test_the_quadratic_passes_and_the_report_prints_a_table(quadratic: QuadraticTask) -> None:
    report = check(quadratic.problem, quadratic.clients, client=3)
    assert report.ok, str(report)
    assert [f.name for f in report.findings] == [*DERIVATIVES, "blind to padding"]
    text = str(report)
    assert all(word in text for word in (*DERIVATIVES, "relative error", "allowed", "ok")) and "WRONG" not in text


def test_the_small_digits_problem_passes_with_its_embedding(digits: Task) -> None:
    report = check(digits.problem, digits.clients)
    assert report.ok, str(report)
    assert "stored embedding" in [f.name for f in report.findings]


def test_a_right_problem_of_ones_own_passes() -> None:
    report = check(problem(), data())
    assert report.ok and max(f.error for f in report.findings) < 1e-3, str(report)


def test_a_loss_that_averages_over_padding_is_found() -> None:
    report = check(problem(mean=lambda batch, values: jnp.mean(values)), data())
    assert wrong(report) == ["blind to padding"] and not report.ok
    assert "WRONG" in str(report)


@jax.custom_jvp
def _sinh(v: Any) -> Any:
    return jnp.sinh(v)


@_sinh.defjvp
def _wrong_rule(primals: Any, tangents: Any) -> Any:
    return _sinh(primals[0]), 1.3 * jnp.cosh(primals[0]) * tangents[0]


def test_a_wrong_derivative_rule_of_the_lower_loss_is_found_where_it_matters() -> None:
    names = wrong(check(problem(curve=_sinh), data()))
    assert {"g_y", "g_yy"} <= set(names) and not {"f_x", "f_y", "g_xy", "blind to padding"} & set(names)


def test_a_stopped_gradient_is_found_in_the_mixed_derivative_alone() -> None:
    assert wrong(check(problem(mix=jax.lax.stop_gradient), data())) == ["g_xy"]


def test_a_derivative_that_is_not_finite_is_wrong() -> None:
    # the derivative of sqrt at zero: 0 * inf
    report = check(problem(curve=lambda y: jnp.sqrt(0.0 * y)), data())
    assert {"g_y", "g_yy"} <= set(wrong(report)) and not report.ok


def test_a_mistake_that_only_one_client_shows_is_found_and_the_client_is_named() -> None:
    """The rule of the derivative is wrong for negative targets, which client 2 alone has."""
    right = data()
    positive = right._replace(lower=right.lower._replace(targets=np.abs(right.lower.targets)))
    negative = right._replace(lower=right.lower._replace(targets=-np.abs(right.lower.targets)))

    def lower(x: Any, y: Any, batch: Batch) -> Any:
        odd = jnp.where(batch.targets < 0, jax.lax.stop_gradient(jnp.sum(y)), 0.0)
        return batch.mean((batch.inputs @ (y * jnp.exp(x)) - batch.targets) ** 2 + odd)

    whole = problem()
    broken = Problem(whole.x, whole.y, lower, whole.upper)
    report = check(broken, ListedClients([positive, positive, negative, positive]))
    assert wrong(report) == ["g_y"] and {f.client for f in report.findings if not f.ok} == {2}
    assert "fedbilevel.check, all 4 clients" in str(report)
    assert check(broken, ListedClients([positive, positive, negative, positive]), client=1).ok


def test_of_many_clients_twenty_are_used_and_named() -> None:
    rows, loaded = data(), list[int]()

    def make(client: int) -> ClientData:
        loaded.append(client)
        return rows

    report = check(problem(), LazyClients(10**6, ClientSize(6, 4), make))
    assert report.ok and len(report.clients) == 20 == len(set(loaded)) and report.clients[-1] == 999_999
    assert "20 of 1,000,000 clients: 0, 52631," in " ".join(str(report).split())

"""The paper's constants against fractions worked out here, and its bounds against measurement."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fedbilevel.algorithms import AggITD
from fedbilevel.algorithms.local import State
from fedbilevel.engines import Simulation
from fedbilevel.errors import SettingsError
from fedbilevel.federation import Federation
from fedbilevel.problems import Quadratic
from fedbilevel.studies import theory as study
from fedbilevel.studies.theory._convergence import dense_descent, federated_descent
from fedbilevel.studies.theory._sampling import (
    Case,
    Dials,
    compare,
    hard_case,
    lower_map,
    products,
    random_case,
    sample,
    wide,
)
from fedbilevel.theory import Entry, Given, Theory
from fedbilevel.theory._declare import constant

F = Fraction
SIMPLE = Given(mu=1, L_g=2, L_f=3, M=5, rho=7, sigma_f=2, sigma_g=3)


@pytest.fixture
def simple() -> Theory:
    """mu=1, L_g=2, L_f=3, M=5, rho=7; N=2, lam=1/2, beta=1/16, K=100, alpha_bar=1e-9."""
    return Theory(SIMPLE, N=2, lam=0.5, K=100, alpha_bar=1e-9, beta=1 / 16)


def test_every_constant_is_what_fractions_give(simple: Theory) -> None:
    # Lemma 4, by hand: L_yx = (7+14)/1 + 2(7+14)/1; M_f = 3 + 6 + 5(7+14); L_f' = 3 + 2(3+114) + 105
    L_y, L_yx, M_f, L_fp = F(2), F(63), F(114), F(342)
    eta, decay = F(57), F(31, 32) ** 2  # 1 - βμ/2 = 31/32
    a1N = 4 * 3 * decay * (F(49) * 2 + 4 * F(49) * 16)
    a2N, a3N = F(2 * 3) * (1 + F(1, 4)) * 2, 3 * 3 * decay * 2
    sigma_h2 = F(1, 2) * 3 * 4 * 25
    D_h2 = 12 * 25 + 4 * sigma_h2
    abar1 = 1 / (8 * L_fp + 16 * M_f * L_y + 8 * M_f * L_yx / (eta * L_y))
    abar2 = 1 / (324 * M_f**2 + 6 * M_f)
    source = 328 * F(49) * 25 + 6 * F(9)
    bbar = M_f * L_y * abar2 / 2 + 11 * M_f * L_y + eta * L_yx * D_h2 * abar2
    bbar += (6 + abar2 / 3) * 3 * F(1, 2) * L_y * 4 / M_f * source
    abar3 = 2 * F(1, 12) / (2 * bbar)  # min{1, 1/2, 1/12}
    alpha = F(10) ** -10
    gamma = M_f * L_y * alpha
    b1 = 4 * L_y**2 * alpha**2 + L_y**2 * alpha**2 / (4 * gamma) + 2 * L_yx * alpha**2 / eta
    b2 = 1 + 4 * gamma + eta * L_yx * D_h2 * alpha**2 / 2
    b3 = 4 * alpha**2 * L_y**2 + 2 * L_yx * alpha**2 / eta
    c0 = 2 * L_fp + 4 * M_f * L_y + 2 * L_yx * M_f / (eta * L_y)
    c1 = F(1, 4) + 4 * L_fp + 8 * M_f * L_y + 4 * L_yx * M_f / (eta * L_y)
    inner = 2 * abar2 * F(1, 4) * 4 * 25 * 49 * L_y / (2 * M_f) * a2N
    inner += abar2 * F(1, 2) * 9 * 4 * 3 * L_y / M_f
    bracket = 1 + (12 + 2 * abar2 / 3) * inner + M_f * L_y * abar2**2 / 4 + 11 * abar2 * M_f * L_y / 2
    bracket += eta * L_yx * D_h2 * abar2**2 / 2
    c3 = 25 * M_f / L_y * bracket * bbar**2 / 2
    c3_used = 25 * M_f / L_y * bracket * 2 * F(1, 16) ** 2 / alpha**2
    expected: dict[str, Any] = dict(
        kappa_g=2, L_y=L_y, L_yx=L_yx, M_f=M_f, L_f_prime=L_fp, eta=eta, alpha_1N=a1N, alpha_2N=a2N, alpha_3N=a3N,
        sigma_h2=sigma_h2, D_h2=D_h2, alpha_bar_1=abar1, alpha_bar_2=abar2, alpha_bar_3=abar3, beta_bar=bbar,
        alpha_k=alpha, beta_low=F(1, 20), beta_high=F(1, 12), beta_k=F(1, 16), b_1=b1, b_2=b2, b_3=b3,
        c_0=c0, c_1=c1, c_2=c1 + F(1, 4), c_3=c3, c_3_at_beta=c3_used,
    )  # fmt: skip
    for name, value in expected.items():
        assert getattr(simple, name) == pytest.approx(float(value), rel=1e-12), name
    assert len(expected) == len(list(simple.entries()))


def test_the_terms_of_the_bounds_are_what_fractions_give(simple: Theory) -> None:
    bias = simple.bias_bound(2.0)
    a1N, a2N, a3N = F(simple.alpha_1N), F(15), F(simple.alpha_3N)
    expected = [
        4 * F(1, 4) * 4 * 25 * a1N * 2,
        4 * F(1, 4) * 9 * 4 * a3N * 2,
        F(4 * 4 * 25) * F(1, 2) ** 6,
        400 * F(1, 4) * F(1, 256) * 4 * 25 * 9 * 49 * a2N,
        200 * F(1, 2) * F(1, 256) * 9 * 9 * 4 * 6,
    ]
    assert list(bias) == pytest.approx([float(e) for e in expected])
    assert bias.total == pytest.approx(float(sum(expected))) and bias.dominant == "start_hessian"
    bound = simple.convergence_bound(3.0)
    slow = F(10) ** -10  # ᾱ / √K
    expected = [
        4 * 3 / (F(min(simple.alpha_bar_1, simple.alpha_bar_2, simple.alpha_bar_3)) * 100),
        4 * 3 / (F(10) ** -9 * 10),
        4 * F(simple.c_0) * 25 * slow,
        4 * F(simple.c_1) * 150 * slow,
        4 * F(simple.c_2) * 4 * slow,
        4 * F(simple.c_3) * 9 * slow,
        F(8 * 4 * 25) * F(1, 2) ** 6 * (3 + F(10) ** -10 / 6),
    ]
    assert list(bound) == pytest.approx([float(e) for e in expected])
    assert bound.total == pytest.approx(sum(bound)) and bound.dominant == "tuned"
    used = simple.convergence_bound(3.0, at_beta=True)
    assert used.noise_g == pytest.approx(4 * simple.c_3_at_beta * 9e-10) and used[:5] == bound[:5]


def test_the_number_of_iterations_meets_the_bound() -> None:
    theory = Theory(SIMPLE._replace(sigma_g=0.1), N=20, lam=0.5, alpha_bar=1e-6)
    K = math.ceil(theory.iterations(2.0, 0.5))
    at = [dataclasses.replace(theory, K=k).convergence_bound(2.0).total for k in (K, K // 2)]
    assert at[0] <= 0.5 < at[1]
    assert theory.iterations(2.0, 0.5, truncation=False) < theory.iterations(2.0, 0.5)
    assert Theory(SIMPLE, N=1, lam=0.5).iterations(2.0, 1.0) == math.inf


def test_every_entry_has_symbol_formula_and_place(simple: Theory) -> None:
    for entry in simple.entries():
        assert entry.symbol and entry.formula and entry.place and math.isfinite(entry.value)
    symbols = [e.symbol for e in simple.entries()]
    assert len(set(symbols)) == len(symbols)


def test_a_constant_is_its_declaration_on_the_class_and_a_number_on_an_object(simple: Theory) -> None:
    assert (Theory.L_f_prime.symbol, Theory.L_f_prime.place) == ("L_f'", "Lemma 4")
    assert Theory.L_y.entry(simple) == Entry("L_y", 2.0, "L_g / μ", "Lemma 4") == list(simple.entries())[1]


def test_a_constant_is_computed_once() -> None:
    computed = []

    class Circle:
        @constant(symbol="A", formula="πr²", place="Elements XII, Proposition 2")
        def area(self) -> float:
            computed.append(self)
            return math.pi

    circle = Circle()
    assert circle.area == circle.area == Circle.area.entry(circle).value == math.pi
    assert computed == [circle]


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize(("mu", "lam"), [(1.0, 1.0), (0.01, 1.0), (0.1, 0.02)])
def test_everything_is_finite_and_the_interval_of_beta_is_not_empty(
    rho: float, sigma: float, mu: float, lam: float
) -> None:
    given = Given(mu, 1.0, 1.0, 1.0, rho, sigma, sigma)
    for N, K in ((1, 1), (50, 10**6)):
        theory = Theory(given, N, lam, K)
        assert all(math.isfinite(e.value) and e.value >= 0 for e in theory.entries())
        assert theory.beta_low <= theory.beta_high
        assert all(math.isfinite(v) and v >= 0 for v in (*theory.bias_bound(1.0), *theory.convergence_bound(1.0)))
        # the step sizes do what the theorem's proof asks of them
        gain = theory.alpha_k / 2 - 2 * theory.alpha_k**2 * theory.L_f_prime - theory.M_f / theory.L_y * theory.b_1
        assert gain >= -1e-15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lam=0.6), "lam = 0.6 is wrong.*1/L_g"),
        (dict(lam=0.0), "lam"),
        (dict(beta=0.2), "beta = 0.2 is wrong.*0.08333"),
        (dict(N=0), "N = 0"),
        (dict(alpha_bar=-1.0), "alpha_bar"),
        (dict(given=SIMPLE._replace(mu=3)), "mu = 3 is wrong.*L_g"),
        (dict(given=SIMPLE._replace(L_f=0)), "L_f"),
        (dict(given=SIMPLE._replace(M=math.nan)), "M = nan"),
    ],
)
def test_settings_outside_the_theory_are_refused(simple: Theory, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        dataclasses.replace(simple, **change)


def test_the_theorem_refuses_a_beta_below_its_interval_but_the_propositions_do_not(simple: Theory) -> None:
    low = dataclasses.replace(simple, beta=0.01)
    assert low.bias_bound(1.0).total > 0
    with pytest.raises(SettingsError, match=r"beta = 0.01 is wrong.*\[0.05, 0.08333\]"):
        low.convergence_bound(1.0)


def test_constants_grow_and_step_sizes_shrink_with_the_condition_number() -> None:
    def at(kappa: float) -> Theory:
        return Theory(Given(1 / kappa, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), N=10, lam=0.5, beta=0.1)

    theories = [at(k) for k in (1.5, 4.0, 20.0, 100.0)]
    for name in ("L_y", "L_yx", "M_f", "L_f_prime", "sigma_h2", "D_h2", "beta_bar", "c_0", "c_1", "c_2", "c_3"):
        values = [getattr(t, name) for t in theories]
        assert values == sorted(values) and values[0] < values[-1], name
    for name in ("alpha_bar_1", "alpha_bar_2", "alpha_bar_3", "alpha_k"):
        values = [getattr(t, name) for t in theories]
        assert values == sorted(values, reverse=True) and values[0] > values[-1], name
    truncations = [dataclasses.replace(theories[2], N=N).bias_bound(1.0).truncation for N in (1, 5, 50)]
    assert truncations == sorted(truncations, reverse=True)


@pytest.mark.slow
def test_dense_arithmetic_is_the_federations() -> None:
    """y^N and p for every Q, and x after One-Round-Upper; the rows of the local steps are noisy and cancel."""
    task = Quadratic(size_x=3, size_y=2, condition=4.0, heterogeneity=2.0, noise=1.0).make(clients=3, seed=5)
    still = dataclasses.replace(task, b=task.b.mean(1, keepdims=True), c=task.c.mean(1, keepdims=True))
    dials = Dials(N=2, lam=0.4, beta=0.15, tau=3, alpha=0.3)
    x, y = np.array([0.5, -1.0, 2.0]), np.array([1.0, -2.0])
    case = Case(still, x, y, dials)
    drawn = sample(case, 1, seed=0)
    expected = products(case, drawn, noisy=True)[0]
    algorithm = AggITD(
        N=2, lam=0.4, beta=0.15, alpha=0.3, participation=1.0, lower_steps=3, upper_steps=3, share_steps=True,
        batch_zeta_local=1, batch_xi_local=1,
    )  # fmt: skip
    fed = Federation(Simulation(task.problem, task.clients))
    _, B, _, J, c = wide(still)
    direct = J.mean(0)[:3] @ np.concatenate([x, drawn.y[0, -1]]) + c.mean((0, 1))[:3]
    for Q in range(3):
        fed.hold(x=jnp.asarray(x, jnp.float32))
        end, p = algorithm.estimate(fed, jnp.asarray(y, jnp.float32), Q)
        np.testing.assert_allclose(end, drawn.y[0, -1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(p, expected[Q], rtol=1e-5, atol=1e-5)
        moved = x - lower_map(J[:, :3, :3], dials.alpha, dials.tau) @ (direct - expected[Q] @ B.mean(0))
        there = State(jnp.asarray(x, jnp.float32), end)
        np.testing.assert_allclose(algorithm.improve(fed, there, p).x, moved, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_dense_runs_are_the_federations_within_noise() -> None:
    task = study.gentle_task()
    theory = Theory(task.constants(1.0), N=1, lam=0.5, K=30)
    dense = dense_descent(task, theory, 2, 30, seeds=16)
    own = federated_descent(task, Simulation(task.problem, task.clients), theory, 2, 30)
    assert own.means[0] == pytest.approx(dense.means.mean(), abs=6 * dense.means.std() + 1e-6)
    assert 0 < own.radius < 2 * dense.radius


@pytest.mark.parametrize("seed", range(100, 108))
def test_measured_bias_and_variance_lie_below_the_bounds(seed: int) -> None:
    rows, theory = compare(random_case(seed), trials=60, seed=seed)
    assert [row.name for row in rows] == ["bias", "variance", "upper", "lower"]
    for row in rows:
        assert 0 < row.measured <= row.bound, row
        assert row.ratio <= 1
    assert theory.given.rho == 0.0 and theory.L_yx == 0.0


def test_the_hard_case_comes_within_a_factor_of_the_bounds() -> None:
    for N in (5, 200):
        ratios = {row.name: row.ratio for row in compare(hard_case(N))[0]}
        assert 0.2 < ratios["bias"] <= 0.25
    assert 0.4 < ratios["variance"] <= 0.5


def test_the_orders_of_the_corollary_are_the_fitted_exponents() -> None:
    orders = study.order_study()
    for symbol, claimed in orders["claimed"].items():
        if claimed is not None:
            tolerance = 0.3 if "log" in symbol else 0.05
            assert orders["fitted"][symbol] == pytest.approx(claimed, abs=tolerance), symbol
    # what the corollary leaves out: with N = κ the truncation does not fall, whatever K is
    assert orders["truncation_at_N_kappa"] == sorted(orders["truncation_at_N_kappa"])


def test_the_table_shows_every_constant(simple: Theory) -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(study.theory_table(SIMPLE, 2, 0.5, K=100, alpha_bar=1e-9, beta=1 / 16, tau=4))
    text = console.export_text()
    assert all(entry.symbol in text for entry in simple.entries())
    assert "D_h²" in text and "900" in text and "0.01562" in text  # β / τ


@pytest.mark.slow
def test_the_study_writes_its_figures_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict(dense=0.1, federated=None, bound=10.0, bound_at_beta=20.0, alpha=0.1, beta=0.1, dominant="start")
    stub = dict(
        rows=[row | dict(K=k) for k in (10, 20, 40, 80)], start=1.0, N=2, lam=0.5,
        slope_measured=-0.5, slope_bound=-0.5, looseness=[100.0],
    )  # fmt: skip
    monkeypatch.setattr(study, "convergence_study", lambda quick: stub)
    result = study.run_theory(tmp_path, quick=True)
    assert all(ratio <= 1 for ratio in result["estimator"]["worst"].values())
    names = {p.name for p in tmp_path.iterdir()}
    figures = {
        f"theory-{f}.{kind}" for f in ("estimator", "lemmas", "convergence", "orders") for kind in ("png", "svg")
    }
    assert names == figures | {"theory.json", "theory.md"}
    assert "NO" not in (tmp_path / "theory.md").read_text()

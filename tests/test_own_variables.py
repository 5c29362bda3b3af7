"""Variables that belong to a client or a row: their derivative, their rows, who moves them, and that they stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import fedbilevel as fb
from fedbilevel._probes import losses
from fedbilevel.engines.flare import Flare, Site
from fedbilevel.own import KEPT, OwnPart
from fedbilevel.privacy import CohortUploads, Privacy, local_epsilon, spent_epsilon
from fedbilevel.steps import client_step
from own_variables import alone
from wires import Wires

ROWS, D, RIDGE = (5, 7, 6), 3, 0.2
OWN = {"rows": fb.PerRow("lower", 0.5), "shift": jnp.asarray(0.1)}


def lower(x: Any, y: Array, b: fb.Batch) -> Array:
    """Ridge regression with a weight for each row."""
    residual = b.inputs @ y - b.targets
    return b.mean(jax.nn.sigmoid(b.own["rows"][b.ids]) * residual**2) + RIDGE * jnp.sum(y**2)


def upper(x: Any, y: Array, b: fb.Batch) -> Array:
    """The loss on validation rows, whose targets each client corrects by its own shift."""
    return b.mean((b.inputs @ y - b.targets - b.own["shift"]) ** 2) + (0.0 if x is None else jnp.sum((x - y) ** 2))


def rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = rng.normal(size=(count, D)).astype(np.float32)
    return inputs, (inputs.sum(1) + rng.normal(size=count)).astype(np.float32)


@pytest.fixture(scope="module")
def clients() -> fb.ListedClients:
    rng = np.random.default_rng(0)
    return fb.clients_from([(rows(rng, count), rows(rng, 4)) for count in ROWS])


@pytest.fixture(scope="module")
def problem() -> fb.Problem:
    return fb.Problem(None, jnp.zeros(D), lower, upper, own=OWN)


@pytest.fixture(scope="module")
def loop(problem: fb.Problem, clients: fb.ListedClients) -> fb.Loop:
    """All tests use its compiled programs; a run begins without what clients have kept in an earlier one."""
    return fb.Loop(problem, clients)


def method(**settings: Any) -> fb.AggITD:
    full = dict(N=1, alpha=0.1, beta=0.1, lam=0.1, lower_steps=2, batch_zeta_local=3, participation=2)
    return fb.AggITD(**{**full, **settings})


def own_of(result: fb.Result) -> list[list[np.ndarray]]:
    assert result.own is not None
    return [[np.asarray(own["rows"]), np.asarray(own["shift"])] for own in result.own.values()]


def exact(clients: fb.ListedClients, rows_of: list[np.ndarray], shifts: np.ndarray) -> tuple[float, np.ndarray]:
    """F(w) = 1/m Σ f_i(y*(w)) and y*(w), in float64."""
    A, c = 2 * RIDGE * np.eye(D), np.zeros(D)
    for data, own in zip(clients.data, rows_of, strict=True):
        inputs, targets = (np.asarray(a, np.float64) for a in data.lower)
        weights = 2 / (1 + np.exp(-own)) / len(own) / len(ROWS)
        A, c = A + inputs.T @ (weights[:, None] * inputs), c + inputs.T @ (weights * targets)
    y = np.linalg.solve(A, c)
    each = [
        np.mean((np.asarray(data.upper.inputs, np.float64) @ y - data.upper.targets - shift) ** 2)
        for data, shift in zip(clients.data, shifts, strict=True)
    ]
    return float(np.mean(each)), y


def differences(value: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    steps = 1e-5 * np.eye(at.size)
    return np.asarray([(value(at + s) - value(at - s)) / 2e-5 for s in steps])


@pytest.mark.parametrize(
    "algorithm",
    [
        fb.AggITD(N=80, lam=0.2, estimator="summed", beta=1e-3, own_step=0.5, participation=1.0, lower_steps=1),
        fb.FedNest(
            N=1, T=80, lam=0.2, estimator="summed", beta=1e-3, own_step=0.5, participation=1.0, lower_steps=1
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_clients_step_along_the_exact_derivative_of_the_upper_loss(
    problem: fb.Problem, clients: fb.ListedClients, algorithm: Any
) -> None:
    """w_i - s m ∂F/∂w_i, with ∂F/∂w_i by differences of the exact solution. Full batches, from y*."""
    start, shifts = [np.full(count, 0.5) for count in ROWS], np.full(len(ROWS), 0.1)
    y = exact(clients, start, shifts)[1]
    problem = fb.Problem(None, jnp.asarray(y, jnp.float32), lower, upper, own=OWN)
    method = type(algorithm)(**{**vars(algorithm), "batch_zeta_local": "full"})
    found = own_of(fb.train(problem, clients, method, stop={"iterations": 1}))
    ends = np.cumsum(ROWS)[:-1]
    by_row = differences(lambda w: exact(clients, np.split(w, ends), shifts)[0], np.concatenate(start))
    by_shift = differences(lambda w: exact(clients, start, w)[0], shifts)
    moved = (np.concatenate([row for row, _ in found]) - 0.5) / -0.5 / len(ROWS)
    np.testing.assert_allclose(moved, by_row, rtol=1e-3, atol=2e-6)
    assert np.abs(by_row).max() > 1e-3, "the differences say something"
    shifted = (np.asarray([shift for _, shift in found]) - 0.1) / -0.5 / len(ROWS)
    np.testing.assert_allclose(shifted, by_shift, rtol=1e-3)


# ------------------------------------------------------------------------------------------------- the ids of rows


@pytest.mark.parametrize("engine", [fb.Loop, fb.Simulation])
@pytest.mark.parametrize("size", [None, 4, 50], ids=["all rows", "some", "more than there are"])
def test_a_row_has_its_place_as_its_id_in_every_minibatch(engine: Any, size: int | None) -> None:
    """The inputs are the places, and the loss is zero only if the ids are these, whatever rows are drawn."""

    def distance(x: Any, y: Any, b: fb.Batch) -> Array:
        return b.mean((b.inputs - b.ids) ** 2) + 0 * y

    problem = fb.Problem(jnp.zeros(()), jnp.zeros(()), distance, distance)
    places = [
        (np.arange(lower, dtype=np.float32), np.arange(upper, dtype=np.float32))
        for lower, upper in ((5, 9), (7, 3))
    ]
    made = engine(problem, fb.clients_from(places))
    for seed in range(3):
        xi, zeta = fb.Sample("upper", size), fb.Sample("lower", size)
        found = fb.Federation(made, seed=seed).probe(losses, x=jnp.zeros(1), y=jnp.zeros(1), xi=xi, zeta=zeta)
        assert float(found.lower) == float(found.upper) == 0.0


# ------------------------------------------------------------------------------------------------------- who moves


def test_only_the_cohort_moves(problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop) -> None:
    found = own_of(fb.train(problem, clients, method(participation=1), stop={"iterations": 1}, engine=loop))
    assert sum(bool(np.any(own != 0.5)) for own, _ in found) == 1, "one client was asked"
    assert [len(own) for own, _ in found] == list(ROWS), "without padding"


@pytest.mark.slow
def test_engines_agree_with_an_x_that_is_shared_and_on_minibatches(clients: fb.ListedClients) -> None:
    problem = fb.Problem(jnp.ones(D), jnp.zeros(D), lower, upper, own=OWN)
    algorithm = method(batch_xi=3, batch_chi=4, estimator="summed")
    loop, simulation = (
        fb.train(problem, clients, algorithm, stop={"iterations": 3}, engine=engine)
        for engine in ("loop", "simulation")
    )
    for one, other in zip(own_of(loop), own_of(simulation), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(loop.x, simulation.x, atol=1e-6)
    assert float(np.abs(loop.x - 1).max()) > 1e-3, "x has moved too"


def test_a_client_that_is_asked_again_in_a_round_moves_once(
    problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop
) -> None:
    """Half of the replies are lost and asked for again: the variables are those of a run without faults."""
    run = partial(fb.train, problem, clients, method(participation=3), stop={"iterations": 3}, engine=loop)
    calm = run()
    faulty = run(chaos={"drop": 0.5}, federation={"retries": 30})
    assert faulty.summary["ledger"]["own_hypergradient"]["retries"] > 0
    for one, other in zip(own_of(calm), own_of(faulty), strict=True):
        assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def test_without_a_step_of_their_own_variables_take_that_of_x(
    problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop
) -> None:
    run = partial(fb.train, problem, clients, stop={"iterations": 1}, engine=loop)
    plain, same = (own_of(run(method(**steps))) for steps in ({"alpha": 0.3}, {"alpha": 0.7, "own_step": 0.3}))
    assert all(a[0].tolist() == b[0].tolist() for a, b in zip(plain, same, strict=True))


# ------------------------------------------------------------------------------------------------ nothing is sent


def test_bytes_do_not_depend_on_the_own_variables(clients: fb.ListedClients) -> None:
    def plain(x: Any, y: Array, b: fb.Batch) -> Array:
        return b.mean((b.inputs @ y - b.targets) ** 2) + jnp.sum((x - y) ** 2)

    def weighed(x: Any, y: Array, b: fb.Batch) -> Array:
        return plain(x, y, b) + jnp.sum(b.own**2)

    books, algorithm = [], method(estimator="summed")
    for own in (None, jnp.ones(10), jnp.ones(100_000)):
        problem = fb.Problem(jnp.ones(D), jnp.zeros(D), plain if own is None else weighed, plain, own=own)
        fed = fb.Federation(fb.Loop(problem, clients))
        algorithm.step(fed, algorithm.init(problem, 3))
        books.append((fed.ledger.rounds, fed.ledger.bytes_up, fed.ledger.bytes_down))
    assert books[0] == books[1] == books[2]


@pytest.mark.slow
def test_the_benchmark_of_many_rows_has_the_same_bytes_with_and_without_weights() -> None:
    plain, own = (alone(case, clients=3, rows=20, iterations=1) for case in ("none", "own"))
    assert plain["bytes"] == own["bytes"] > 0 and plain["rounds"] == own["rounds"] == 13
    assert 0.5 < own["auc"] <= 1.0


def test_without_a_shared_x_nothing_of_x_is_sent_and_its_round_is_left_out(
    problem: fb.Problem, loop: fb.Loop
) -> None:
    loop.capabilities.states.clear()  # type: ignore[union-attr]
    fed, algorithm = fb.Federation(loop), method(participation=1.0)
    state = algorithm.step(fed, algorithm.init(problem, 3))
    assert state.x.size == 0 and problem.flat_x.restore(state.x) is None
    assert fed.ledger.rounds == 2 * algorithm.N + 2 and "upper_steps" not in fed.ledger.steps
    account = fed.ledger.steps["own_hypergradient"]
    assert account.bytes_up == 0 and account.bytes_down == 3 * D * 4, "only p goes down"
    assert fed.own is not None and float(np.abs(fed.own[1]["rows"] - 0.5).max()) > 0


def test_an_empty_x_is_no_upload_of_a_private_run_and_clients_that_remember_are_not_amplified(
    problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop
) -> None:
    privacy, algorithm = {"mode": "central", "noise": 20.0}, method(estimator="summed", participation=1)
    result = fb.train(problem, clients, algorithm, stop={"iterations": 1}, privacy=privacy, engine=loop)
    assert [entry["vectors"] for entry in result.summary["privacy"]["uploads"]] == [4], "q, z, y, and z"
    assert result.summary["privacy"]["epsilon"] == pytest.approx(local_epsilon(4, 20.0, 1e-5), rel=1e-4)
    assert spent_epsilon(Privacy(mode="central", noise=20.0), {CohortUploads(1, 4): 1}, 3) < 0.5, "amplified"


# -------------------------------------------------------------------------------------------------- kept and found


def test_a_resumed_run_goes_on_with_the_variables_and_load_run_finds_them(
    problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop, tmp_path: Path
) -> None:
    train = partial(fb.train, problem, clients, method(participation=1), engine=loop)
    train(stop={"iterations": 2}, out=tmp_path)
    resumed = train(stop={"iterations": 4}, out=tmp_path, resume=True)
    whole = train(stop={"iterations": 4})
    assert resumed.own is not None and whole.own is not None
    for client, own in whole.own.items():
        assert resumed.own[client]["rows"].tolist() == own["rows"].tolist()
    saved = fb.load_run(tmp_path, problem=problem)
    assert saved.own.keys() == {i for i, own in whole.own.items() if np.any(own["rows"] != 0.5)}
    for client, own in saved.own.items():
        assert own["rows"].tolist() == whole.own[client]["rows"].tolist() and own["shift"].shape == ()
    with pytest.raises(fb.SettingsError, match=r"own needs its problem: load_run\(folder, problem=problem\)"):
        _ = fb.load_run(tmp_path).own


def test_variables_of_other_rows_are_refused(problem: fb.Problem, clients: fb.ListedClients) -> None:
    states = fb.ClientStates()
    states.write(0, -1, {KEPT: (np.zeros(4, np.float32), np.float32(0), np.zeros(2, np.int32))}, 0)
    fed = fb.Federation(fb.Loop(problem, clients, states=states))
    with pytest.raises(fb.StepError, match="client 0 has kept 5 own variables, and its rows now need 8; go on"):
        method(participation=1.0).step(fed, method().init(problem, 3))


def test_sites_keep_the_variables_in_their_folder_and_a_later_job_goes_on(
    problem: fb.Problem, clients: fb.ListedClients, loop: fb.Loop, tmp_path: Path
) -> None:
    names, algorithm, ledger = ("a", "b", "c"), method(participation=1.0), fb.Ledger()
    loop.capabilities.states.clear()  # type: ignore[union-attr]
    here = fb.Federation(loop, seed=1)
    there = one = algorithm.init(problem, 3)
    sites = {n: Site(problem, clients.load(i), states=tmp_path / n) for i, n in enumerate(names)}
    for job in range(2):  # another job of the same run says hello to the sites again
        remote = fb.Federation(Flare(problem, names, Wires(sites), run="run"), seed=1, ledger=ledger)
        there, one = algorithm.step(remote, there), algorithm.step(here, one)
        assert remote.own is None and not ledger.forgotten, f"job {job}"
    np.testing.assert_allclose(there.y, one.y, atol=1e-6)
    assert problem.own_part is not None and here.own is not None
    for i, name in enumerate(names):
        store = fb.ClientStates(folder=tmp_path / name / "run", durable=True)
        own = problem.own_part.unpadded(store.read(i, ledger.clock)[KEPT])
        np.testing.assert_allclose(own["rows"], here.own[i]["rows"], atol=1e-6)
        assert len(own["rows"]) == ROWS[i]


def test_a_run_that_diverges_blames_the_step_of_the_own_variables(clients: fb.ListedClients) -> None:
    """The curvature is measured where the run went well, and the clients' variables are those from then."""

    def wild(x: Any, y: Array, b: fb.Batch) -> Array:
        return b.mean(jnp.exp(b.own[b.ids]) * (b.inputs @ y - b.targets) ** 2)

    def plain(x: Any, y: Array, b: fb.Batch) -> Array:
        return b.mean((b.inputs @ y - b.targets) ** 2)

    problem = fb.Problem(None, jnp.zeros(D), wild, plain, own=fb.PerRow("lower"))
    with pytest.raises(fb.Diverged, match=r"algorithm.own_step = 100000 is likely too large: try 50000, or"):
        fb.train(problem, clients, method(own_step=1e5, participation=3), stop={"iterations": 9}, engine="loop")


# ------------------------------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(fb.Gossip(), "gossip"), (fb.MADSBO(), "ma-dsbo"), (fb.LFedNest(), "lfednest"), (fb.NaiveITD(), "naive-itd")],
)
def test_methods_that_do_not_move_them_are_refused(
    problem: fb.Problem, clients: fb.ListedClients, algorithm: Any, name: str
) -> None:
    with pytest.raises(
        fb.SettingsError, match=f"algorithm.name = '{name}' is wrong: .* use fbo-aggitd or fednest"
    ):
        fb.train(problem, clients, algorithm, stop={"iterations": 1})


def test_an_automatic_alpha_does_not_move_them(problem: fb.Problem, clients: fb.ListedClients) -> None:
    with pytest.raises(fb.SettingsError, match=r"algorithm.own_step is missing: .* give own_step a number"):
        fb.train(problem, clients, method(alpha="auto"), stop={"iterations": 1})


class Sent(NamedTuple):
    w: fb.W


@client_step
def send(c: fb.OwnOracle) -> Sent:
    return Sent(c.w)


def test_what_makes_no_sense_is_refused(clients: fb.ListedClients) -> None:
    def plain(x: Any, y: Array, b: fb.Batch) -> Array:
        return b.mean((b.inputs @ y - b.targets) ** 2)

    problem = fb.Problem(jnp.ones(1), jnp.zeros(D), plain, plain)
    with pytest.raises(fb.SettingsError, match=r"algorithm.own_step = 0.1 is wrong: .* have no own variables"):
        fb.train(problem, clients, method(own_step=0.1), stop={"iterations": 1})
    with pytest.raises(fb.SettingsError, match="PerRow has part = 'middle'; use 'lower' or 'upper'"):
        fb.PerRow("middle")  # type: ignore[arg-type]
    with pytest.raises(
        fb.SettingsError, match="own has no variable, but is of type str; give jnp arrays, or PerRow"
    ):
        fb.Problem(None, jnp.zeros(D), plain, plain, own="weights")
    with pytest.raises(fb.SettingsError, match="own has a number that is not finite"):
        fb.Problem(None, jnp.zeros(D), plain, plain, own=fb.PerRow("lower", np.inf))
    with pytest.raises(fb.SettingsError, match="x has no floating-point array"):
        fb.Problem(None, jnp.zeros(D), plain, plain)
    with pytest.raises(
        fb.SettingsError, match=r"field w of its reply has the client's own .*annotate it with Own\[W\]"
    ):
        _ = send.reply


def test_check_compares_their_derivatives_and_finds_a_loss_that_reads_the_padding(
    clients: fb.ListedClients,
) -> None:
    def careless(x: Any, y: Array, b: fb.Batch) -> Array:
        return lower(x, y, b) + jnp.mean(b.own["rows"]) * jnp.sum(y)

    found = fb.check(fb.Problem(None, jnp.zeros(D), careless, upper, own=OWN), clients, client=1).findings
    names = ["f_y", "g_y", "g_yy", "g_yy symmetric", "f_w", "g_wy", "blind to padding"]
    assert [finding.name for finding in found] == names, "there is no x"
    assert [finding.name for finding in found if not finding.ok] == ["blind to padding"]


def test_the_vector_of_own_variables_is_split_joined_and_cut() -> None:
    part = OwnPart({"a": fb.PerRow("upper", np.asarray([1.0, 2.0])), "b": jnp.ones(2), "c": fb.PerRow("lower")})
    small, wide = fb.ClientSize(2, 1), fb.ClientSize(3, 2)
    assert part.size(small) == 6 and part.start(small).tolist() == [1, 2, 1, 1, 0, 0]
    w = np.arange(6, dtype=np.float32)
    wider = part.resized(w, small, wide)
    assert wider.tolist() == [0, 1, 1, 2, 2, 3, 4, 5, 0]
    assert part.resized(wider, wide, small).tolist() == w.tolist()
    kept = part.kept(wider, wide, np.asarray(small, np.int32))
    assert np.asarray(part.joined(kept)).tolist() == wider.tolist()
    own = part.unpadded(kept)
    assert own["a"].tolist() == [[0, 1]] and own["c"].tolist() == [4, 5]

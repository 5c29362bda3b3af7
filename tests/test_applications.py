"""The problems of applications: what is wrong in their data, what their measures say, and their closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data import DataSettings
from fedbilevel.problem import Finding
from fedbilevel.problems import Cleaning, ClientWeights, Fair, Imbalance, Mixtures, Penalties
from fedbilevel.problems._checked import CheckedRows, area_under_curve, principal_components
from fedbilevel.problems.cleaning import recovered
from fedbilevel.problems.mixtures import changed
from fedbilevel.problems.weights import permutation
from fedbilevel.report import draw_finding, draw_worst, ranked

CLIENTS = 10
DIGITS = DataSettings(name="digits", clients=CLIENTS, partition="iid")
SMALL: dict[str, Any] = dict(components=20, rows=40, checked=6)
TINY = {f"problem.{name}": value for name, value in SMALL.items()}


def trained(task: fb.Task, method: Any, iterations: int) -> fb.Result:
    stop, evaluate = {"iterations": iterations}, {"every": iterations}
    how: dict[str, Any] = dict(stop=stop, evaluate=evaluate, measure=task.measure, engine="fused")
    return fb.train(task.problem, task.clients, method, **how)


def rows_of(task: fb.Task, client: int) -> Any:
    return task.clients.load(client).lower


def all_rows(part: Any) -> fb.Batch:
    return fb.Batch(part.inputs, part.targets, jnp.ones(part.rows), part.inputs, ids=jnp.arange(part.rows))


def test_weights_tell_bad_clients_from_good_ones_and_come_close_to_the_oracle() -> None:
    task, oracle = (ClientWeights(**SMALL, start=start).task(DIGITS, 0) for start in ("equal", "oracle"))
    start = task.measure(task.problem.flat_x.vector, task.problem.flat_y.vector)
    assert start["auc"] == 0.5 and start["weight_good"] == start["weight_bad"] == 0.5
    found = trained(task, fb.FedSOBA(alpha=30.0, beta=0.5, participation=1.0), 150).history[-1]
    assert found["auc"] == 1.0 and found["weight_good"] > 0.7 and found["weight_bad"] < 0.2
    plain = fb.FedAvg(control="lower-only", beta=0.5, participation=1.0)
    alike, known = (trained(each, plain, 150).history[-1] for each in (task, oracle))
    assert known["auc"] == 1.0 and known["weight_bad"] < 1e-4
    assert found["test_accuracy"] > alike["test_accuracy"] + 0.02
    assert found["test_accuracy"] > known["test_accuracy"] - 0.02


def test_principal_components_are_found_once_for_the_same_rows_and_are_those_of_the_covariance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of a process load a data set each, and the decomposition of CIFAR-10 takes seconds."""
    solved: list[int] = []
    eigh = np.linalg.eigh

    def counted(matrix: Any) -> Any:
        solved.append(len(matrix))
        return eigh(matrix)

    monkeypatch.setattr("fedbilevel.problems._checked._COMPONENTS", {})
    monkeypatch.setattr("numpy.linalg.eigh", counted)
    first, again, half = (
        DataSettings(name="digits", normalisation=how).dataset for how in ("usual", "usual", "half")
    )
    assert first is not again
    turn, same = principal_components(first, 5), principal_components(again, 5)
    assert turn is same and len(solved) == 1
    rows = first.train_inputs[np.arange(len(first.train_targets))]
    found = turn(rows).astype(float)
    assert np.abs(found.mean(0)).max() < 1e-4 and np.mean(found**2) == pytest.approx(1.0, rel=1e-4)
    _, sizes, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    expected = (rows - rows.mean(0)) @ directions[:5].T
    assert np.linalg.matrix_rank(np.hstack([found, expected]), tol=1e-2) == 5, "the same subspace"
    assert np.all(np.diff(found.var(0)) < 0) and found.var(0).sum() < sizes.sum()
    principal_components(half, 5)
    assert len(solved) == 2, "other rows have other components"


def test_clipped_weights_stay_between_zero_and_one_and_follow_a_client_that_turns_bad() -> None:
    """A sigmoid is flat where a client is trusted, so the same clients are trusted for longer there."""
    left, good = dict[str, float](), dict[str, float]()
    kinds: tuple[tuple[Any, float], ...] = (
        ("clipped", 5.0),
        ("sigmoid", 80.0),
    )  # the first steps are equally long
    for weights, alpha in kinds:
        phases = [ClientWeights(**SMALL, bad=bad, weights=weights).task(DIGITS, 0) for bad in (0.0, 0.5)]
        method = fb.FedSOBA(alpha=alpha, beta=0.5, participation=1.0)
        state = method.init(phases[0].problem, CLIENTS)
        for task, rounds in zip(phases, (60, 20), strict=True):
            fed = fb.Federation(fb.Simulation(task.problem, task.clients, devices=1))
            for _ in range(rounds):
                state = method.step(fed, state)
        found = phases[1].measure(state.x, state.y)
        left[weights], good[weights] = float(found["weight_bad"]), float(found["weight_good"])
    assert 0.0 <= left["clipped"] < 0.1 and 0.9 < good["clipped"] <= 1.0
    assert left["sigmoid"] > 0.3
    oracle = ClientWeights(**SMALL, weights="clipped", start="oracle").task(DIGITS, 0)
    told = oracle.measure(oracle.problem.flat_x.vector, oracle.problem.flat_y.vector)
    assert told["auc"] == told["weight_good"] == 1.0 and told["weight_bad"] == 0.0


def test_a_larger_share_of_bad_clients_only_adds_some() -> None:
    """So clients can turn bad one after another: benchmarks/drifting_clients.py relies on it."""
    tasks = [ClientWeights(**SMALL, bad=bad).task(DIGITS, 3) for bad in (0.0, 0.2, 0.5)]
    labels = [[rows_of(task, client).targets for client in range(CLIENTS)] for task in tasks]
    few, many = ([not np.array_equal(a, b) for a, b in zip(labels[0], each, strict=True)] for each in labels[1:])
    assert sum(few) == 2 and sum(many) == 5 and all(b for a, b in zip(few, many, strict=True) if a)
    for client in np.flatnonzero(few):
        np.testing.assert_array_equal(labels[1][client], labels[2][client])  # wrong in the same way


def test_a_network_may_be_the_lower_level() -> None:
    task = ClientWeights(**SMALL, model="mlp", hidden=16, weights="clipped").task(DIGITS, 0)
    found = trained(task, fb.FedSOBA(alpha=5.0, beta=0.5, participation=1.0), 80).history[-1]
    assert found["auc"] == 1.0
    with pytest.raises(fb.SettingsError, match="images of at least 9 x 9, not 8 x 8; use mlp"):
        ClientWeights(**SMALL, model="cnn").task(DIGITS, 0)


def test_a_classifier_that_is_measured_in_blocks_of_rows_has_the_figures_of_all_rows_at_once() -> None:
    learner = CheckedRows(model="cnn").learner(144, (12, 12, 1), 3, 0)
    assert learner.block is not None
    key = jax.random.key(1)
    rows = jax.random.normal(key, (3 * learner.block + 5, 144))  # the last block is not full
    batch = fb.Batch(rows, jax.random.randint(key, (len(rows),), 0, 3), jnp.ones(len(rows)), None)
    blocks = learner.metrics(learner.start, rows, batch)
    whole = learner._replace(block=None).metrics(learner.start, rows, batch)
    assert float(blocks["test_accuracy"]) == float(whole["test_accuracy"])
    np.testing.assert_allclose(blocks["test_loss"], whole["test_loss"], rtol=1e-6)


def test_without_the_implicit_part_no_weight_moves() -> None:
    task = ClientWeights(**SMALL).task(DIGITS, 0)
    control = fb.FedAvg(control="first-order", alpha=30.0, beta=0.5, participation=1.0)
    assert not np.any(trained(task, control, 5).x)


@pytest.mark.parametrize("fault", ["random-labels", "permuted-labels", "inverted", "nothing"])
def test_only_bad_clients_have_wrong_rows(fault: Any) -> None:
    made = {bad: ClientWeights(**SMALL, bad=bad, fault=fault).task(DIGITS, 0) for bad in (0.0, 0.3)}
    changed = []
    for client in range(CLIENTS):
        right, now = (rows_of(task, client) for task in made.values())
        same = [np.array_equal(right.inputs[k], now.inputs[k]) for k in ("features", "counts")]
        changed.append(not (all(same) and np.array_equal(right.targets, now.targets)))
    assert sum(changed) == 3
    checked = [np.array_equal(*(t.clients.load(i).upper.targets for t in made.values())) for i in range(CLIENTS)]
    assert all(checked)


def test_free_riders_teach_nothing() -> None:
    task = ClientWeights(**SMALL, bad=1.0, fault="nothing", decay=0.0).task(DIGITS, 0)
    result = trained(task, fb.FedAvg(control="lower-only", beta=0.5, participation=1.0), 2)
    assert not np.any(result.y.layers[0].weight) and "auc" not in result.history[-1]


def test_a_permutation_of_labels_leaves_none_in_its_place() -> None:
    for seed in range(5):
        made = permutation(10, seed)
        assert sorted(made) == list(range(10)) and np.all(made != np.arange(10))


@pytest.mark.parametrize("settings", [ClientWeights(**SMALL), Cleaning(**SMALL)])
def test_controls_train_on_the_checked_rows_or_on_both(settings: Any) -> None:
    def rows(train_on: str) -> int:
        task = type(settings)(**SMALL, train_on=train_on).task(DIGITS, 0)
        weighs = rows_of(task, 1).inputs["weighs"]
        assert np.sum(weighs == 0) == (0 if train_on == "unchecked" else SMALL["checked"])
        return len(weighs)

    assert [rows(kind) for kind in ("unchecked", "checked", "both")] == [40, 6, 46]


def test_cleaning_finds_wrong_rows() -> None:
    task = Cleaning(**SMALL, wrong=0.4).task(DIGITS, 0)
    assert task.problem.size_x == CLIENTS * SMALL["rows"]
    found = trained(task, fb.FedSOBA(alpha=800.0, beta=0.5, participation=1.0), 150).history[-1]
    assert found["auc"] > 0.85 and found["precision"] > 0.7 and found["recall"] > 0.6
    known = Cleaning(**SMALL, wrong=0.4, start="oracle").task(DIGITS, 0)
    best = known.measure(known.problem.flat_x.vector, known.problem.flat_y.vector)
    assert best["auc"] == best["precision"] == best["recall"] == 1.0


def test_a_small_net_of_the_loss_finds_wrong_rows_and_a_classifier_of_checked_rows_is_a_control() -> None:
    net: Any = Cleaning(**SMALL, wrong=0.5, weights="net").task(DIGITS, 0)
    assert net.problem.size_x == 25  # so few cannot overfit the checked rows
    start = net.measure(net.problem.flat_x.vector, net.problem.flat_y.vector)
    assert start["auc"] == 0.5 and start["recall"] == 0.0
    found = trained(net, fb.FedSOBA(alpha=3.0, beta=0.5, participation=1.0), 100)
    assert found.history[-1]["auc"] > 0.9 and found.history[-1]["precision"] > 0.85
    agreed = Cleaning(**SMALL, wrong=0.5, start="agreed").task(DIGITS, 0)
    told = agreed.measure(agreed.problem.flat_x.vector, agreed.problem.flat_y.vector)
    assert told["recall"] > 0.9 and 0.7 < told["precision"] < 1.0


def test_the_worst_rows_are_drawn_as_pictures_with_what_was_said_of_them(tmp_path: Path) -> None:
    task: Any = Cleaning(**SMALL, wrong=0.5, start="oracle").task(DIGITS, 0)
    found = task.finding(task.problem.flat_x.vector, task.problem.flat_y.vector)
    row = int(np.argmin(found.values))
    picture = found.picture(row)
    assert picture.image.shape == (8, 8, 1) and picture.image.min() == 0 and picture.image.max() == 1
    client, place = divmod(row, SMALL["rows"])
    said = int(rows_of(task, client).targets[place])
    assert found.kinds[row] == "wrong label" and picture.title.startswith(f"said: {said}, is: ")
    draw_worst(found, tmp_path / "worst.png", "a title")
    assert (tmp_path / "worst.png").stat().st_size > 5000


def test_weights_that_clients_own_move_as_those_in_x_and_are_not_sent() -> None:
    steps: dict[str, Any] = dict(beta=0.5, lam=0.5, N=2, lower_steps=1, batch_zeta_local="full", participation=1.0)
    tasks = {kind: Cleaning(**SMALL, weights=kind).task(DIGITS, 0) for kind in ("own", "shared")}
    alphas = {"own": 4.0, "shared": 4.0 * CLIENTS}  # an own weight is moved along m ∂F/∂w
    y, sent = {}, {}
    for kind, task in tasks.items():
        method = fb.AggITD(**steps, alpha=alphas[kind], estimator="summed")
        fed = fb.Federation(fb.Loop(task.problem, task.clients), seed=0)
        state = method.init(task.problem, CLIENTS)
        for _ in range(3):
            state = method.step(fed, state)
        y[kind], sent[kind] = np.asarray(state.y), fed.ledger.bytes_up
    np.testing.assert_allclose(y["own"], y["shared"], atol=2e-6)
    assert sent["own"] < sent["shared"] - 3 * CLIENTS * 4 * tasks["shared"].problem.size_x


def test_a_weight_for_a_label_counts_for_the_rows_that_claim_it() -> None:
    task: Any = Cleaning(**SMALL, weights="class", decay=0.0).task(DIGITS, 0)
    batch = all_rows(rows_of(task, 0))
    only_three = jnp.full(10, -12.0).at[3].set(12.0)
    loss = task.problem.loss("lower", only_three, task.problem.flat_y.vector, batch)
    assert loss == pytest.approx(
        np.mean(batch.targets == 3) * np.log(10), rel=1e-3
    )  # at y = 0 every row has log 10


def test_the_measures_of_recovery_are_as_counted_by_hand() -> None:
    scores, good = np.array([0.1, 0.4, 0.4, 0.9, 0.2]), np.array([False, True, False, True, False])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[good] for b in scores[~good]]
    assert area_under_curve(scores, good) == pytest.approx(np.mean(pairs))
    assert np.isnan(area_under_curve(scores, np.ones(5, bool)))
    found = recovered(np.array([True, True, False, False]), np.array([True, False, True, False]))
    assert found == {"precision": 0.5, "recall": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        Penalties(table="diabetes"),
        Penalties(table="breast-cancer"),
        Penalties(table="generated", groups=4),
        Penalties(table="breast-cancer", loss="logistic"),
        Penalties(table="generated", loss="logistic", groups=3),
    ],
)
def test_the_hypergradient_of_penalties_agrees_with_differences_of_the_outer_loss(settings: Penalties) -> None:
    made = settings.make(clients=3, seed=0)
    x, e = np.random.default_rng(0).normal(size=made.problem.size_x), 1e-4
    slopes = [(made.outer_loss(x + e * d) - made.outer_loss(x - e * d)) / (2 * e) for d in np.eye(len(x))]
    np.testing.assert_allclose(made.hypergradient(x), slopes, atol=1e-8)
    assert made.smallest <= min(made.outer_loss(x), made.outer_loss(0 * x))


def test_penalties_of_scikit_learn_are_a_control_that_stays_where_it_is() -> None:
    task = Penalties(start="ridge-cv").task(DataSettings(name="generated", clients=3), 0)
    stays = fb.FedAvg(control="upper-only", alpha=1.0, participation=1.0)
    found = trained(task, stays, 2)
    np.testing.assert_array_equal(found.y, task.problem.flat_y.vector)
    assert found.history[-1]["test_error"] == found.history[-1]["refit_error"] < 0.7
    assert np.any(np.asarray(found.y)) and not np.any(found.x)


def test_the_losses_of_penalties_are_those_of_the_closed_form() -> None:
    made = Penalties(table="generated", rows=60, features=6).make(clients=3, seed=0)
    g = np.random.default_rng(1)
    x, y = g.normal(size=made.features), g.normal(size=made.features)

    def mean(level: str) -> Any:
        parts = [getattr(data, level) for data in made.clients.data]
        losses = [made.problem.loss(level, jnp.asarray(x), jnp.asarray(y), all_rows(part)) for part in parts]
        return np.mean(losses)

    assert mean("upper") == pytest.approx(made.upper.loss(y), rel=1e-5)
    assert mean("lower") == pytest.approx(made.lower.loss(y) + 0.5 * np.sum(np.exp(x) * y**2), rel=1e-5)
    assert made.measure(jnp.asarray(x), jnp.asarray(made.solution(x)))["lower_gap"] < 1e-6


def test_a_method_comes_closer_to_the_best_penalties() -> None:
    made = Penalties(table="generated", rows=60, features=6).make(clients=3, seed=0)
    task, method = (
        fb.Task(made.problem, made.clients, made.measure),
        fb.FedSOBA(alpha=1.0, beta=0.2, participation=1.0),
    )
    first, *_, last = trained(task, method, 300).history
    assert 0 <= last["gap"] < 0.3 * first["gap"]


def test_too_many_rows_clients_or_components_are_refused_by_name() -> None:
    for wrong, message in (
        (lambda: ClientWeights(rows=100_000).task(DIGITS, 0), "problem.rows = 100000 is too much: client 0 has"),
        (lambda: Cleaning(components=65).task(DIGITS, 0), "problem.components = 65 is too much: a row has 64"),
        (lambda: Penalties().make(clients=1000, seed=0), "data.clients = 1000 is too many for 442 rows"),
    ):
        with pytest.raises(fb.SettingsError, match=message):
            wrong()


def test_a_finding_is_ranked_and_drawn_whether_things_are_few_or_many(tmp_path: Path) -> None:
    found = Finding("client", "weight", [0.2, 0.9, 0.2], ["bad", "good", "bad"])
    assert ranked(found).splitlines() == ["rank,client,weight,kind", "1,1,0.9,good", "2,0,0.2,bad", "3,2,0.2,bad"]
    named = Finding("class", "shift", [1.0, 2.0], names=["a", "b"])
    assert ranked(named).splitlines() == ["rank,class,shift,name", "1,1,2,b", "2,0,1,a"]
    draw_finding(named, tmp_path / "named.png", "a title")
    for count in (3, 100, 1000):
        values = np.linspace(0, 1, count).tolist()
        draw_finding(Finding("row", "weight", values), tmp_path / f"{count}.png", "a title")
        assert (tmp_path / f"{count}.png").stat().st_size > 1000


def test_penalties_are_shown_with_the_names_and_kinds_of_features() -> None:
    """x is the natural logarithm of a penalty."""
    task = Penalties(table="diabetes", useless=2).make(clients=2, seed=0)
    found = task.finding(jnp.log(10.0) * jnp.arange(12), jnp.zeros(12))
    np.testing.assert_allclose(found.values, np.arange(12), atol=1e-5)
    assert found.names[2] == "bmi" and [*found.names[-2:]] == ["noise 1", "noise 2"]
    assert [*found.kinds[9:]] == ["of the table", "of no use", "of no use"]
    generated = Penalties(table="generated", features=4).make(clients=2, seed=0)
    assert generated.kinds == ("of use", "of use", "of no use", "of no use") and not generated.names


def test_a_run_leaves_its_finding_in_its_folder(tmp_path: Path) -> None:
    spec = fb.load_spec("client-weights", {"data.name": "digits", "data.clients": 10, "stop.rounds": 3, **TINY})
    fb.run(spec, tmp_path / "run")
    lines = (tmp_path / "run" / "finding.csv").read_text().splitlines()
    assert len(lines) == 11 and lines[0] == "rank,client,weight,kind"
    assert (tmp_path / "run" / "finding.png").exists()


def test_without_v_a_minimax_problem_has_the_closed_form_of_fednest_as_its_solution() -> None:
    """f_i = -½||y||² - b_iᵀy + yᵀA_i x + λ/2||x||² has y* = Āx - b̄ and F = ½||Āx - b̄||² + λ/2||x||²."""
    g, d, penalty = np.random.default_rng(0), 4, 0.1
    parts = [
        {"A": g.normal(size=(1, d, d)).astype(np.float32), "b": g.normal(size=(1, d)).astype(np.float32)}
        for _ in range(5)
    ]
    A, b = (np.mean([part[name][0] for part in parts], axis=0) for name in ("A", "b"))

    def loss(x: Any, y: Any, batch: fb.Batch) -> Any:
        coupled = jnp.einsum("i,rij,j->r", y, batch.inputs["A"], x) - batch.inputs["b"] @ y
        return batch.mean(coupled) - 0.5 * y @ y + 0.5 * penalty * x @ x

    problem = fb.minimax(jnp.ones(d), jnp.zeros(d), loss)
    clients = fb.clients_from([(part, part) for part in parts])
    how: dict[str, Any] = dict(stop={"rounds": 3000}, evaluate={"every": 3000}, engine="fused")
    found, full = (
        fb.train(problem, clients, fb.FedSOBA(alpha=0.2, beta=0.5, participation=1.0, minimax=without), **how)
        for without in (True, False)
    )
    best = np.linalg.solve(A.T @ A + penalty * np.eye(d), A.T @ b)
    np.testing.assert_allclose(found.x, best, atol=1e-4)
    np.testing.assert_allclose(found.y, A @ best - b, atol=1e-4)
    np.testing.assert_allclose(full.x, best, atol=1e-4)
    sent = [result.history[-1]["bytes_up"] for result in (found, full)]
    assert sent[0] / sent[1] == 2 * d / (3 * d)  # p + q numbers instead of p + 2q
    method = fb.FedSOBA(alpha=0.2, beta=0.5, participation=1.0)
    fed, state = fb.Federation(fb.Simulation(problem, clients, devices=1)), method.init(problem, 5)
    sizes = []
    for _ in range(300):
        state = method.step(fed, state)
        sizes.append(float(jnp.linalg.norm(state.v)))
    assert sizes[-1] < 1e-3 * max(sizes)  # the v that a method need not estimate goes to zero


def test_fair_weights_solve_the_inner_problem() -> None:
    task: Any = Fair(components=10, strength=2.0).task(
        DataSettings(name="digits", clients=4, partition="shards"), 0
    )
    batches = [all_rows(rows_of(task, client)) for client in range(4)]
    x, ones = task.problem.flat_x.vector + 0.1, jnp.ones(4)
    losses = np.array([float(task.problem.loss("upper", x, ones, batch)) for batch in batches])
    best = jnp.asarray(1 + (losses - losses.mean()) / 2.0)  # all positive, so the simplex is only a mean
    slope = sum(jax.grad(lambda u, b=batch: task.problem.loss("lower", x, u, b))(best) for batch in batches)
    np.testing.assert_allclose(slope - slope.mean(), 0.0, atol=1e-5)


def test_formulas_for_rare_classes_weigh_or_shift_by_the_frequency() -> None:
    few: dict[str, Any] = dict(most=64, ratio=16.0, judging=4, components=10, decay=0.0)
    tasks: Any = {
        kind: Imbalance(**few, loss=kind).task(DIGITS, 0) for kind in ("plain", "inverse", "adjusted", "tuned")
    }
    labels = np.concatenate([rows_of(tasks["plain"], i).targets for i in range(CLIENTS)])
    counts = np.bincount(labels, minlength=10)
    assert counts[0] == 64 and counts[-1] == 4 and np.all(np.diff(counts) <= 0)
    batch, start = all_rows(rows_of(tasks["plain"], 0)), tasks["plain"].problem.flat_y.vector
    x = tasks["plain"].problem.flat_x.vector
    found = {kind: float(task.problem.loss("lower", x, start, batch)) for kind, task in tasks.items()}
    shares = counts / counts.sum()
    assert found["plain"] == pytest.approx(np.log(10), rel=1e-5) == found["tuned"]
    assert found["inverse"] == pytest.approx(np.log(10) * np.mean(0.1 / shares[batch.targets]), rel=1e-4)
    assert found["adjusted"] == pytest.approx(-np.mean(np.log(shares[batch.targets])), rel=1e-4)


def test_weights_of_domains_go_to_the_target() -> None:
    task: Any = Mixtures(**SMALL).task(DIGITS, 0)
    found = trained(task, fb.FedSOBA(alpha=10.0, beta=0.5, participation=1.0), 60).history[-1]
    plain = trained(task, fb.FedAvg(control="lower-only", beta=0.5, participation=1.0), 60).history[-1]
    assert found["weight_turned"] > 3.0 and found["weight_noise"] < 0.5
    assert found["test_accuracy"] > plain["test_accuracy"] + 0.1


def test_domains_change_pixels_as_their_names_say() -> None:
    image = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
    np.testing.assert_array_equal(changed(image, "upside-down")[0, :, :, 0], [[5, 4, 3], [2, 1, 0]])
    np.testing.assert_array_equal(changed(image, "inverted")[0, :, :, 0], [[5, 4, 3], [2, 1, 0]])
    np.testing.assert_array_equal(changed(image, "turned")[0, :, :, 0], [[2, 5], [1, 4], [0, 3]])
    np.testing.assert_array_equal(changed(image, "noise"), image)

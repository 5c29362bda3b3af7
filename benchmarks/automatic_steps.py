"""Step sizes that are "auto", on six problems: beside the exact minimum, and beside a grid of 24 points.

    python benchmarks/automatic_steps.py --out results/steps                  # auto on every problem
    python benchmarks/automatic_steps.py --out results/steps --grid           # and the 24 points of the grid
    python benchmarks/automatic_steps.py --out results/steps --grid-memory    # and the grid with a memory
    python benchmarks/automatic_steps.py --out results/steps --problem ridge  # one problem; may be repeated
    python benchmarks/automatic_steps.py --out results/steps --held-out       # problems on which nothing was tuned

Every run is a JSON file in the folder, and one that is there is not done again, so the program can be stopped and
started. It ends with the table of docs/steps.md: the rounds to the target, with those that the measurement took.

The target is a gap of the upper loss f(x, y*(x)) to its minimum, which is computed with exact lower solutions by
L-BFGS. The grid has, for the same method, four alphas, three betas and two lengths N. Its alphas are powers of ten
around the range that is good for the problem, so it is not made to be bad. A point that has used as many rounds as
the best point so far is ended there. This is cheaper and does not change the smallest number of rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import fedbilevel as fb

Vector = np.ndarray
FAST = dict(participation=1.0, lower_solver="sgd", lower_steps=1, batch_zeta_local="full")


@dataclass(frozen=True)
class Case:
    """A problem, the method that is tried on it, and what counts as solved.

    measure   the gap of the upper loss to its minimum at x, and other figures; without local data in `auto`
    target    the gap at which a run has arrived
    rounds    the budget
    alphas, betas, lengths   the grid
    """

    problem: fb.Problem
    clients: Any
    method: dict[str, Any]
    measure: Callable[[Any, Any], dict[str, Any]]
    target: float
    rounds: int
    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    lengths: tuple[int, ...]

    @cached_property
    def engine(self) -> fb.Simulation:
        """The engine of all runs, whose programs are compiled once."""
        return fb.Simulation(self.problem, self.clients)


def halves(inputs: Vector, targets: Vector, clients: int, seed: int = 0) -> list[Any]:
    """The rows of each client, half of them for the lower and half for the upper loss."""
    order = np.random.default_rng(seed).permutation(len(targets))
    parts = [(inputs[rows], targets[rows]) for rows in np.array_split(order, 2 * clients)]
    return [(parts[2 * i], parts[2 * i + 1]) for i in range(clients)]


def exact(rows: list[Any], lower: Any, upper: Any, size_y: int, start: Vector, low: float, high: float) -> Any:
    """F(x) = f(x, y*(x)) with exact lower solutions in float64, and its minimum in the box by L-BFGS."""
    data = [[tuple(jnp.asarray(a) for a in part) for part in client] for client in rows]

    def mean(loss: Any, level: int) -> Any:
        return lambda x, y: sum(loss(x, y, *client[level]) for client in data) / len(data)

    g, f = mean(lower, 0), mean(upper, 1)
    g_y, g_yy = jax.jit(jax.grad(g, 1)), jax.jit(jax.hessian(g, 1))
    f_all = jax.jit(jax.value_and_grad(f, (0, 1)))
    mixed = jax.jit(lambda x, y, p: jax.grad(lambda z: jax.grad(g, 1)(z, y) @ p)(x))
    last = np.zeros(size_y)

    def value(x: Vector) -> tuple[float, Vector]:
        nonlocal last
        y = last
        for _ in range(50):
            q = np.asarray(g_y(x, y))
            if np.linalg.norm(q) < 1e-9:
                break
            y = y - np.linalg.solve(np.asarray(g_yy(x, y)), q)
        last = y
        found, (d, r) = f_all(x, y)
        p = np.linalg.solve(np.asarray(g_yy(x, y)), np.asarray(r))
        return float(found), np.asarray(d) - np.asarray(mixed(x, y, p))

    how = dict(bounds=[(low, high)] * start.size, method="L-BFGS-B", options=dict(maxiter=2000, ftol=1e-13))
    return value, float(minimize(value, start, jac=True, **how).fun)


def penalised(
    name: str, rows: list[Any], fit: Any, p: int, q: int, penalty: Any, low: float, high: float, **more: Any
) -> Case:
    """A case whose lower loss is a fit and a penalty, and whose upper loss is the fit on other rows."""

    def lower(x: Any, y: Any, inputs: Any, targets: Any) -> Any:
        return fit(y, inputs, targets).mean() + penalty(x, y)

    def upper(x: Any, y: Any, inputs: Any, targets: Any) -> Any:
        return fit(y, inputs, targets).mean()

    with jax.enable_x64(True):
        value, best = exact(rows, lower, upper, q, np.zeros(p), low, high)
    print(f"{name}: the minimum of the upper loss is {best:.6f}")

    def measure(x: Any, y: Any) -> dict[str, Any]:
        with jax.enable_x64(True):
            return {"gap": value(np.asarray(x, np.float64))[0] - best}

    problem = fb.Problem(
        x=jnp.zeros(p),
        y=jnp.zeros(q),
        lower=lambda x, y, b: b.mean(fit(y, b.inputs, b.targets)) + penalty(x, y),
        upper=lambda x, y, b: b.mean(fit(y, b.inputs, b.targets)),
        feasible_x=fb.Box(low, high),
    )
    return Case(problem=problem, clients=fb.clients_from(rows), measure=measure, **more)


def squares(y: Any, inputs: Any, targets: Any) -> Any:
    return (inputs @ y - targets) ** 2


def logistic(y: Any, inputs: Any, targets: Any) -> Any:
    return jnp.logaddexp(0.0, -targets * (inputs @ y[:-1] + y[-1]))


def quadratic(condition: float, heterogeneity: float, share: float, seed: int = 0) -> Case:
    made = fb.Quadratic(condition=condition, heterogeneity=heterogeneity).make(5, seed)
    at = made.stationary_point

    def value(x: Vector) -> float:
        z = np.concatenate([x, made.solution(x)])
        J, c = made.J.astype(np.float64).mean(0), made.c.astype(np.float64).mean((0, 1))
        return float(0.5 * z @ J @ z + z @ c)

    return Case(
        problem=made.problem,
        clients=made.clients,
        method=dict(FAST, estimator="cg"),
        measure=lambda x, y: {"gap": value(np.asarray(x, np.float64)) - value(at)},
        target=share * (value(np.zeros(made.size_x)) - value(at)),
        rounds=1000,
        alphas=(0.003, 0.03, 0.3, 1.0),
        betas=(0.1, 0.3, 1.0),
        lengths=(2, 8),
    )


def ridge_one() -> Case:
    g = np.random.default_rng(0)
    rows = []
    for noise in (0.5, 1.0, 2.0, 3.0):
        a = [g.normal(size=(10, 20)), g.normal(size=(40, 20))]
        rows.append([(x, x @ np.linspace(0.0, 0.5, 20) + noise * g.normal(size=len(x))) for x in a])
    return penalised(
        "ridge-one",
        rows,
        squares,
        1,
        20,
        lambda x, y: jnp.exp(x[0] - 4) * jnp.sum(y**2),
        -4.0,
        8.0,
        method=dict(FAST, estimator="cg"),
        target=1e-3,
        rounds=600,
        alphas=(0.01, 0.1, 1.0, 10.0),
        betas=(0.01, 0.03, 0.1),
        lengths=(2, 8),
    )


def ridge(seed: int = 0) -> Case:
    from sklearn.datasets import load_diabetes

    a, t = load_diabetes(return_X_y=True)
    a, t = (a - a.mean(0)) / a.std(0), (t - t.mean()) / t.std()
    return penalised(
        "ridge" if seed == 0 else "ridge-split",
        halves(a, t, 5, seed),
        squares,
        10,
        10,
        lambda x, y: jnp.sum(jnp.exp(x) * y**2),
        -8.0,
        3.0,
        method=dict(FAST, estimator="cg", cg_tolerance=0.01),
        target=1e-3,
        rounds=600,
        alphas=(1.0, 10.0, 100.0, 1000.0),
        betas=(0.01, 0.03, 0.1),
        lengths=(2, 8),
    )


def cancer(name: str = "cancer", low: float = -5.0, test_size: float | None = None) -> Case:
    """Logistic regression with one client: on halves of the rows, or on a split of scikit-learn's."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    a, t = load_breast_cancer(return_X_y=True)
    a, t = (a - a.mean(0)) / a.std(0), 2.0 * t - 1.0
    rows = halves(a, t, 1)
    if test_size is not None:
        below, above, t_below, t_above = train_test_split(a, t, test_size=test_size, random_state=0)
        rows = [((below, t_below), (above, t_above))]
    return penalised(
        name,
        rows,
        logistic,
        30,
        31,
        lambda x, y: jnp.sum(jnp.exp(x) * y[:-1] ** 2),
        low,
        1.0,
        method=dict(FAST, estimator="cg", cg_tolerance=0.03),
        target=2e-3,
        rounds=3000,
        alphas=(1.0, 10.0, 100.0, 1000.0),
        betas=(0.1, 0.3, 1.0),
        lengths=(2, 8),
    )


def weights() -> Case:
    """Ten clients with digits, three of them with random labels; x has the logarithm of each client's weight."""
    from sklearn.datasets import load_digits

    a, t = load_digits(return_X_y=True)
    g, order = np.random.default_rng(0), np.random.default_rng(1).permutation(len(t))
    a, t = (a / 16.0)[order], t[order]
    test, rows = (a[:400], t[:400]), []
    for client, chosen in enumerate(np.array_split(np.arange(400, len(t)), 10)):
        clean, held = np.array_split(chosen, 2)
        labels = g.integers(10, size=len(clean)) if client < 3 else t[clean]
        one_hot = np.eye(10)[client % 10] * np.ones((len(clean), 1))
        other = one_hot[:1].repeat(len(held), 0)
        rows.append([(np.hstack([a[clean], one_hot]), labels), (np.hstack([a[held], other]), t[held])])

    def fit(y: Any, b: Any) -> Any:
        scores = b.inputs[:, :64] @ y["w"] + y["b"]
        return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, b.targets[:, None], 1)[:, 0]

    problem = fb.Problem(
        x=jnp.zeros(10),
        y={"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
        lower=lambda x, y, b: b.mean(jnp.exp(b.inputs[:, 64:] @ x) * fit(y, b)) + 0.01 * jnp.sum(y["w"] ** 2),
        upper=lambda x, y, b: b.mean(fit(y, b)),
        feasible_x=fb.Box(-6.0, 2.0),
    )
    data = fb.clients_from([tuple((i.astype(np.float32), o) for i, o in client) for client in rows])

    def accuracy(y: Any) -> float:
        w = problem.flat_y.restore(y)
        return float(np.mean(np.argmax(test[0] @ np.asarray(w["w"]) + np.asarray(w["b"]), 1) == test[1]))

    return Case(
        problem=problem,
        clients=data,
        method=dict(FAST, estimator="cg", cg_tolerance=0.03),
        measure=lambda x, y: {"accuracy": accuracy(y), "gap": oracle() - accuracy(y)},
        target=0.005,
        rounds=600,
        alphas=(1.0, 10.0, 100.0, 1000.0),
        betas=(0.1, 0.3, 1.0),
        lengths=(2, 8),
    )


@cache
def oracle() -> float:
    """The accuracy of the same model, trained on the clients whose labels are right, by L-BFGS."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    a, t = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(t))
    a, t = (a / 16.0)[order], t[order]
    clean = np.concatenate([np.array_split(c, 2)[0] for c in np.array_split(np.arange(400, len(t)), 10)[3:]])
    model = LogisticRegression(C=1 / (0.02 * len(clean)), max_iter=2000).fit(a[clean], t[clean])
    return float(model.score(a[:400], t[:400]))


CASES: dict[str, Callable[[], Case]] = {
    "quadratic": lambda: quadratic(10.0, 1.0, 1e-3),
    "quadratic-alike": lambda: quadratic(30.0, 0.0, 0.03),
    "ridge-one": ridge_one,
    "ridge": ridge,
    "cancer": cancer,
    "weights": weights,
}

HELD_OUT: dict[str, Callable[[], Case]] = {
    "quadratic-1": lambda: quadratic(10.0, 1.0, 1e-3, seed=1),
    "quadratic-2": lambda: quadratic(30.0, 0.0, 1e-3, seed=2),
    "quadratic-3": lambda: quadratic(100.0, 0.5, 1e-3, seed=3),
    "ridge-split": lambda: ridge(seed=1),
    "cancer-split": lambda: cancer("cancer-split", test_size=0.25),
}
FURTHER: dict[str, Callable[[], Case]] = {
    "cancer-wide": lambda: cancer("cancer-wide", low=-8.0),
    "cancer-split-wide": lambda: cancer("cancer-split-wide", low=-8.0, test_size=0.25),
    "cancer-fifth-wide": lambda: cancer("cancer-fifth-wide", low=-8.0, test_size=0.2),
}
ALL = CASES | HELD_OUT | FURTHER


def points(case: Case) -> dict[str, dict[str, Any]]:
    """The grid: the settings of its points by name."""
    return {
        f"alpha={a:g} beta={b:g} N={n}": dict(alpha=a, beta=b, N=n)
        for a, b, n in itertools.product(reversed(case.alphas), case.betas, case.lengths)
    }


AUTO = dict(alpha="auto", beta="auto", N="auto", memory="auto")
MEMORY = 40  # what "auto" takes for vectors of this size


def done(file: Path, case: Case, settings: dict[str, Any], most: float = math.inf) -> dict[str, Any]:
    """The outcome of one run, from its file or by running it. It ends at the target, or after `most` rounds."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def below(gap: float | None) -> bool:
        return gap is not None and gap < case.target

    def arrived(progress: fb.Progress) -> bool:
        return below(progress.record["gap"]) or progress.rounds >= most

    made: dict[str, Any]
    try:
        method = fb.AggITD(**case.method, **settings)
        how: dict[str, Any] = dict(stop={"rounds": case.rounds}, measure=case.measure, observers=[arrived])
        result = fb.train(case.problem, case.clients, method, engine=case.engine, **how)
        last = result.history[-1]
        there = below(last["gap"])
        made = {
            "rounds": last["rounds"] if there else None,
            "gap": last["gap"],
            "steps": result.summary.get("steps"),
        }
        made |= {"iterations": last["iteration"], "restarts": len(result.summary.get("restarts", []))}
    except fb.FedBilevelError as error:
        made = {"rounds": None, "gap": None, "failure": str(error)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=2) + "\n")
    return made


def best_of(folder: Path, name: str, case: Case, more: dict[str, Any]) -> int | None:
    """The fewest rounds of the points of a grid; None if none of them arrives."""
    best: int | None = None
    for place, (point, settings) in enumerate(points(case).items(), start=1):
        found = done(folder / f"{place:02}.json", case, settings | more, math.inf if best is None else best)
        print(
            f"{name}: {folder.name} {place}/24 {point}: {found['rounds']} rounds, gap {found['gap']}", flush=True
        )
        if found["rounds"] is not None:
            best = min(best or found["rounds"], found["rounds"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--grid-memory", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--problem", action="append", choices=list(ALL))
    given = parser.parse_args()
    grids = {"grid": {}} if given.grid else {}
    grids |= {"grid-memory": {"memory": MEMORY}} if given.grid_memory else {}
    table = [
        "| problem | target | auto: rounds | of these measuring | gap at the end | " + " | ".join(grids) + " |"
    ]
    table.append("|---" * (5 + len(grids)) + "|")
    for name in given.problem or (HELD_OUT if given.held_out else CASES):
        case = ALL[name]()
        auto = done(given.out / name / "auto.json", case, AUTO)
        print(f"{name}: auto {auto['rounds']} rounds, gap {auto['gap']}", flush=True)
        best = {grid: best_of(given.out / name / grid, name, case, more) for grid, more in grids.items()}
        cost = (auto.get("steps") or {}).get("rounds")
        shown = "".join(f" {rounds} |" for rounds in best.values())
        table.append(f"| {name} | {case.target:.3g} | {auto['rounds']} | {cost} | {auto['gap']} |{shown}")
    print("\n".join(table))


if __name__ == "__main__":
    main()

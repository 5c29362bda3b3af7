"""Communication graphs of methods without a server, and their mixing matrices.

A mixing matrix W is symmetric and doubly stochastic, and w_ij > 0 only for neighbours and i = j. Except on the
complete graph, where w_ij = 1/m, the weights are those of Metropolis, with d_i the number of i's neighbours:

    w_ij = 1 / (1 + max(d_i, d_j))    for neighbours i ≠ j        w_ii = 1 - Σ_{j≠i} w_ij

One exchange v_i ← Σ_j w_ij v_j keeps the mean, and multiplies sqrt(mean_i ||v_i - v̄||²) by at most 1 - gap, where
gap = 1 - max(|λ_2|, |λ_m|) is the spectral gap of W: (2/3)(1 - cos(2π/m)) for a ring of m ≥ 3, 1 when complete.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from pydantic import Field

from .. import rng
from ..errors import SettingsError
from ..schedules import Scheduled
from ..settings import about, settings
from ..steps import PerClient
from ..stepsizes import Moves

Graph = Literal["ring", "torus", "erdos-renyi", "complete"]
Matrix = np.ndarray
TRIES = 200


def grid(agents: int) -> tuple[int, int]:
    """The grid of r x c = agents with 2 ≤ r ≤ c that is closest to a square."""
    rows = next((r for r in range(int(agents**0.5), 1, -1) if agents % r == 0), None)
    if rows is None:
        fits = [n for n in range(4, agents + 8) if any(n % r == 0 for r in range(2, int(n**0.5) + 1))]
        near = sorted(fits, key=lambda n: abs(n - agents))[:2]
        raise SettingsError(
            f"graph = 'torus' is wrong: {agents} agents do not fill a grid; use {min(near)} or {max(near)} "
            "agents, or graph = 'ring'"
        )
    return rows, agents // rows


def neighbours(graph: Graph, agents: int, edge_probability: float = 0.3, seed: int = 0) -> Matrix:
    """The adjacency matrix, of booleans: symmetric, connected, with a diagonal of False."""
    if graph == "ring":
        near = _linked(agents, [(i, (i + 1) % agents) for i in range(agents)])
    elif graph == "torus":
        rows, columns = grid(agents)
        places = [(i, j) for i in range(rows) for j in range(columns)]
        right = [(i * columns + j, i * columns + (j + 1) % columns) for i, j in places]
        down = [(i * columns + j, (i + 1) % rows * columns + j) for i, j in places]
        near = _linked(agents, right + down)
    elif graph == "complete":
        near = ~np.eye(agents, dtype=bool)
    else:
        near = _random(agents, edge_probability, seed)
    return near


def connected(near: Matrix) -> bool:
    """Whether every agent can be reached from the first."""
    reached = np.zeros(len(near), bool)
    reached[0] = True
    for _ in range(len(near)):
        reached |= near[reached].any(axis=0)
    return bool(reached.all())


def mixing_matrix(graph: Graph, agents: int, edge_probability: float = 0.3, seed: int = 0) -> Matrix:
    """W: 1/m everywhere on the complete graph, Metropolis weights on the others."""
    return _mixing_matrix(graph, agents, edge_probability, seed).copy()


@lru_cache(maxsize=16)
def _mixing_matrix(graph: Graph, agents: int, edge_probability: float, seed: int) -> Matrix:
    if graph == "complete":
        return np.full((agents, agents), 1 / agents)
    near = neighbours(graph, agents, edge_probability, seed)
    degree = near.sum(axis=1)
    W = np.where(near, 1 / (1 + np.maximum(degree[:, None], degree[None, :])), 0.0)
    return W + np.diag(1 - W.sum(axis=1))


def spectral_gap(W: Matrix) -> float:
    """1 - the second largest modulus of an eigenvalue of W; 1 for a single agent."""
    return float(1 - np.linalg.norm(W - 1 / len(W), 2))


AGENTS = 10_000  # the largest number of agents; W then has 800 MB


@settings
class Network(Scheduled):
    """The settings of a communication graph, and what algorithms on a graph have in common.

    An algorithm's state has `xs` and `ys`, with one row for each agent, and their means `x` and `y`. Before the
    first step all agents are equal, and one row may stand for all of them.
    """

    needs_server: ClassVar[bool] = False

    graph: Annotated[Graph, about("the links of agents: ring, torus (2-d), erdos-renyi or complete")] = "ring"
    edge_probability: Annotated[
        Annotated[float, Field(gt=0, le=1)], about("erdos-renyi: the probability of a link")
    ] = 0.3
    graph_seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**32)], about("erdos-renyi: the seed of the graph, separate from the run's")
    ] = 0

    def weights(self, agents: int) -> Matrix:
        """The mixing matrix W; raises `SettingsError` if the graph does not fit the number of agents."""
        if agents > AGENTS:
            raise SettingsError(
                f"graph = {self.graph!r} is wrong for {agents} clients: W has a row and a column for each; "
                f"use at most {AGENTS:,}, or an algorithm with a server"
            )
        return mixing_matrix(self.graph, agents, self.edge_probability, self.graph_seed)

    def limit(self, moves: Moves, clients: int) -> float | None:
        """Of a lower step: y ← W y - s H y is stable for s L below 1 + λ_min(W), 2 without mixing."""
        if moves is not Moves.LOWER:
            return moves.value
        return float(1 + np.linalg.eigvalsh(self.weights(clients))[0])

    def describe(self, agents: int) -> str:
        """The graph in one line: links, neighbours and spectral gap."""
        W = self.weights(agents)
        degree = np.count_nonzero(W - np.diag(np.diag(W)), axis=1)
        each = f"{degree.min()}" if degree.min() == degree.max() else f"{degree.min()} to {degree.max()}"
        return (
            f"{self.graph} of {agents} agents: {degree.sum() // 2} links, {each} neighbours each, "
            f"spectral gap {spectral_gap(W):.4g}"
        )

    def report(self, state: Any) -> dict[str, float]:
        """sqrt(mean_i ||v_i - v̄||²) for the agents' x and y."""
        return {"disagreement": disagreement(state.xs), "disagreement_y": disagreement(state.ys)}


def disagreement(rows: Array) -> float:
    """sqrt(mean_i ||v_i - v̄||²) over the rows v_i"""
    return float(jnp.sqrt(jnp.mean(jnp.sum((rows - jnp.mean(rows, axis=0)) ** 2, axis=1))))


def own(rows: Array) -> PerClient:
    """The rows as arguments of a client step: row i for agent i."""
    return PerClient(rows if isinstance(rows, Tracer) else np.asarray(rows))


def spread(rows: Array, agents: int) -> Array:
    """One row for each agent; a single row is repeated."""
    return jnp.broadcast_to(rows, (agents, *rows.shape[1:]))


def _linked(agents: int, links: list[tuple[int, int]]) -> Matrix:
    near = np.zeros((agents, agents), bool)
    for i, j in links:
        near[i, j] = near[j, i] = i != j
    return near


def _random(agents: int, edge_probability: float, seed: int) -> Matrix:
    """Draw each link with the same probability, again and again until the graph is connected."""
    for attempt in range(TRIES):
        drawn = rng.generator(seed, "graph", attempt).random((agents, agents)) < edge_probability
        near: Matrix = np.triu(drawn, 1)
        near = near | near.T
        if connected(near):
            return near
    raise SettingsError(
        f"edge_probability = {edge_probability} is wrong: none of {TRIES} graphs of {agents} agents was "
        f"connected; use more than ln(m)/m = {np.log(agents) / agents:.2g}, or graph = 'ring'"
    )

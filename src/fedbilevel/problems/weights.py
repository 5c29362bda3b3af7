"""Client weights: which clients help? A weight for each client is judged by rows that were checked.

    min_x 1/m Σ_i CE_i(y*(x); checked rows)
    subject to  y*(x) = argmin_y 1/m Σ_i w_i(x) CE_i(y; unchecked rows) + decay/2 ||y||²

w_i(x) = sigmoid(x_i), m softmax(x)_i, or x_i itself with 0 ≤ x_i ≤ 1. The unchecked rows of some clients are
wrong, and nobody knows of which clients. x has one number for each client, so a few checked rows are enough, and x
itself is the answer that a person looks at.

The derivative of the outer loss by x_i goes only through y*(x), and is 1/m times a number of the order of one. So
a method that has only the direct part ∇_x f cannot move x at all, and step sizes are of the order of m.

A sigmoid is flat where a client is trusted or distrusted, so its weight hardly moves again. Where clients may turn
bad later, x_i itself is the better weight: its derivative does not vanish, and x is projected on its box.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients, Part, lower_only
from ..errors import SettingsError
from ..feasible import Box
from ..problem import Finding, Problem, Task, task_with_test
from ..settings import about, settings
from ._checked import CERTAIN, CheckedRows, Dealt, Rows, area_under_curve, chosen_share, known, part

Fault = Literal["random-labels", "permuted-labels", "inverted", "nothing"]
GOOD = "nothing is wrong"
IN_WORDS: dict[Fault, str] = {
    "random-labels": "random labels",
    "permuted-labels": "permuted labels",
    "inverted": "inverted inputs",
    "nothing": "free riders",
}


@settings
class ClientWeights(CheckedRows):
    """Client weights: a weight for each client is x, a classifier y."""

    bad: Annotated[float, Field(ge=0, le=1), about("share of the clients whose unchecked rows are wrong")] = 0.5
    fault: Annotated[
        Fault,
        about(
            "what is wrong there: random-labels; permuted-labels (one permutation for all bad clients); inverted "
            "(inputs times -1); nothing (free riders, whose rows count as nothing)"
        ),
    ] = "random-labels"
    checked_at: Annotated[
        Literal["clients", "server"],
        about("who has the checked rows: each client its own, or the server all of them, which it never sends"),
    ] = "clients"
    weights: Annotated[
        Literal["sigmoid", "softmax", "clipped"],
        about(
            "the weight of client i: sigmoid(x_i); m softmax(x)_i; or clipped: x_i itself, between 0 and 1, which "
            "can still change when a client that was good turns bad; its step sizes are a tenth of sigmoid's"
        ),
    ] = "sigmoid"
    start: Annotated[
        Literal["equal", "oracle"],
        about("equal: all weights alike; oracle: one for good clients and zero for bad ones, which is a control"),
    ] = "equal"

    makes_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.checked_at == "server" and self.train_on != "unchecked":
            raise SettingsError(
                f"problem.checked_at = 'server' is wrong with problem.train_on = {self.train_on!r}: clients "
                "cannot train on rows that they do not have; use checked_at = 'clients' for this control"
            )

    def task(self, data: DataSettings, seed: int) -> Task:
        """Deal the rows, make those of the bad clients wrong, and measure how well x tells them apart."""
        dealt = self.deal(data, seed)
        bad = chosen_share(data.clients, self.bad, seed, "bad clients")
        clients = ListedClients([self._client(i, dealt, bool(bad[i]), seed) for i in range(data.clients)])
        columns = dict(client=np.int32(0), weighs=np.float32(0), counts=np.float32(1))
        test, valid = part(dealt.test, **columns), None if dealt.valid is None else part(dealt.valid, **columns)
        made = task_with_test(self._problem(dealt, bad, seed), clients, test, valid)

        def measure(x: Array, y: Array) -> Mapping[str, Any]:
            weights = np.asarray(self.weight(x))
            found = {"auc": area_under_curve(weights, ~bad)}
            for name, those, furthest in (("good", weights[~bad], np.min), ("bad", weights[bad], np.max)):
                found[f"weight_{name}"] = float(those.mean()) if those.size else float("nan")
                found[f"furthest_{name}"] = float(furthest(those)) if those.size else float("nan")
            return {**made.measure(x, y), **known(found)}

        def finding(x: Array, y: Array) -> Finding:
            kinds = [IN_WORDS[self.fault] if each else GOOD for each in bad]
            return Finding("client", "weight", np.asarray(self.weight(x)).tolist(), kinds)

        return made._replace(measure=measure, finding=finding)

    def weight(self, x: Array) -> Array:
        """The weights of all clients."""
        if self.weights == "clipped":
            return x
        return jax.nn.sigmoid(x) if self.weights == "sigmoid" else x.size * jax.nn.softmax(x)

    def _start(self, bad: npt.NDArray[np.bool_]) -> Array:
        """The x whose weights are all alike, or those of the oracle."""
        clipped = self.weights == "clipped"
        if self.start == "equal":
            return jnp.full(len(bad), 0.5) if clipped else jnp.zeros(len(bad))
        return jnp.where(bad, *((0.0, 1.0) if clipped else (-CERTAIN, CERTAIN)))

    def _problem(self, dealt: Dealt, bad: npt.NDArray[np.bool_], seed: int) -> Problem:
        learner = self.learner(dealt.test.inputs.shape[1], dealt.shape, dealt.classes, seed)

        def losses(y: Any, batch: Batch) -> Array:
            return learner.losses(y, batch.inputs["features"], batch.targets)

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            weighs, counts = batch.inputs["weighs"], batch.inputs["counts"]
            weights = counts * jnp.where(weighs > 0, self.weight(x)[batch.inputs["client"]], 1.0)
            return batch.mean(weights * losses(y, batch)) + self.penalty(y)

        return Problem(
            x=self._start(bad),
            y=learner.start,
            lower=lower,
            upper=lambda x, y, batch: batch.mean(losses(y, batch)),
            metrics=lambda x, y, batch: learner.metrics(y, batch.inputs["features"], batch),
            predict=lambda x, y, inputs: learner.scores(y, inputs["features"]),
            over="map" if self.model == "cnn" else "vmap",
            server=self._server(dealt),
            feasible_x=Box(low=0.0, high=1.0) if self.weights == "clipped" else None,
        )

    def _server(self, dealt: Dealt) -> Part | None:
        """The checked rows, if the server has them."""
        if self.checked_at == "clients":
            return None
        rows = Rows(*(np.concatenate(each) for each in zip(*dealt.checked, strict=True)))
        return part(rows, client=np.int32(0), weighs=np.float32(0), counts=np.float32(1))

    def _client(self, client: int, dealt: Dealt, bad: bool, seed: int) -> ClientData:
        unchecked, checked = dealt.unchecked[client], dealt.checked[client]
        counts = np.float32(not (bad and self.fault == "nothing"))
        if bad:
            unchecked = self._wrong(unchecked, dealt.classes, seed, client)
        number = np.int32(client)
        judging = part(checked, client=number, weighs=np.float32(0), counts=np.float32(1))
        if self.train_on == "checked":
            return ClientData(judging, judging)
        if self.train_on == "unchecked":
            own = part(unchecked, client=number, weighs=np.float32(1), counts=counts)
            return lower_only(own) if self.checked_at == "server" else ClientData(own, judging)
        both = unchecked.and_those_of(checked)
        first = np.arange(len(both.labels)) < len(unchecked.labels)
        columns = dict(weighs=first.astype(np.float32), counts=np.where(first, counts, 1).astype(np.float32))
        return ClientData(part(both, client=number, **columns), judging)

    def _wrong(self, rows: Rows, classes: int, seed: int, client: int) -> Rows:
        """The rows of a bad client. Random labels may be right by chance."""
        if self.fault == "random-labels":
            labels = rng.generator(seed, "wrong labels", client).integers(classes, size=len(rows.labels))
            return rows._replace(labels=labels.astype(np.int32))
        if self.fault == "permuted-labels":
            return rows._replace(labels=permutation(classes, seed)[rows.labels])
        return rows._replace(inputs=-rows.inputs) if self.fault == "inverted" else rows


def permutation(classes: int, seed: int) -> npt.NDArray[np.int32]:
    """A permutation of the labels that leaves none in its place."""
    order = rng.generator(seed, "permuted labels").permutation(classes)
    made = np.empty(classes, np.int32)
    made[order] = np.roll(order, 1)
    return made

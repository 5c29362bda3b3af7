"""Hyper-cleaning: which rows are wrong? A weight for each row, or for each label, is judged by checked rows.

    min_x 1/m Σ_i CE_i(y*(x); checked rows)
    subject to  y*(x) = argmin_y 1/m Σ_i mean_r σ(x_ir) CE(y; row r of client i) + decay/2 ||y||²

A share of the labels was replaced by other ones. There are as many weights as unchecked rows, so they can overfit
the checked rows: a classifier of the checked rows alone is the control that belongs beside it.

A row's weight belongs to its client. With `weights = "own"` the client has it and never sends it (see
`Problem.own`). With `weights = "shared"` the weights of all rows are x. Every method can move them then, and every
client is sent them.
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
from ..data import ClientData, DataSettings, ListedClients
from ..own import PerRow
from ..problem import Finding, Problem, Task, task_with_test
from ..settings import about, settings
from ._checked import CERTAIN, CheckedRows, Dealt, Rows, area_under_curve, known, part


@settings
class Cleaning(CheckedRows):
    """Hyper-cleaning: a weight for each row or class is x, a classifier y."""

    wrong: Annotated[float, Field(ge=0, le=1), about("share of the unchecked labels that are replaced")] = 0.5
    weights: Annotated[
        Literal["own", "shared", "class"],
        about(
            "a weight for each row, which its client has and never sends (own) or which is in x (shared); "
            "class: a weight in x for each label that a row may claim"
        ),
    ] = "shared"
    start: Annotated[
        Literal["equal", "oracle"],
        about("shared. equal: all weights are 1/2; oracle: one for right rows and zero for wrong ones, a control"),
    ] = "equal"

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Deal the rows, replace some labels, and measure how well the weights in x tell wrong rows."""
        dealt = self.deal(data, seed)
        noisy = [self._replaced(rows, dealt.classes, seed, i) for i, rows in enumerate(dealt.unchecked)]
        right = np.concatenate([a.labels == b.labels for a, b in zip(noisy, dealt.unchecked, strict=True)])
        clients = ListedClients([self._client(i, noisy[i], dealt.checked[i]) for i in range(data.clients)])
        columns = dict(row=np.int32(0), weighs=np.float32(0))
        test, valid = part(dealt.test, **columns), None if dealt.valid is None else part(dealt.valid, **columns)
        made = task_with_test(self._problem(dealt, right, seed), clients, test, valid)
        if self.weights != "shared":
            return made

        def measure(x: Array, y: Array) -> Mapping[str, Any]:
            found = recovered(np.asarray(x) < 0, ~right)
            found["auc"] = area_under_curve(np.asarray(x), right)
            return {**made.measure(x, y), **known(found)}

        def finding(x: Array, y: Array) -> Finding:
            kinds = np.where(right, "right label", "wrong label").tolist()
            return Finding("row", "weight", np.asarray(jax.nn.sigmoid(x)).tolist(), kinds)

        return made._replace(measure=measure, finding=finding)

    def _problem(self, dealt: Dealt, right: npt.NDArray[np.bool_], seed: int) -> Problem:
        learner = self.learner(dealt.test.inputs.shape[1], dealt.shape, dealt.classes, seed)
        starts = {
            "own": None,
            "class": jnp.zeros(dealt.classes),
            "shared": jnp.zeros(len(right)) if self.start == "equal" else jnp.where(right, CERTAIN, -CERTAIN),
        }

        def losses(y: Any, batch: Batch) -> Array:
            return learner.losses(y, batch.inputs["features"], batch.targets)

        def logits(x: Any, batch: Batch) -> Array:
            if self.weights == "own":
                return batch.own[batch.ids]
            return x[batch.inputs["row"] if self.weights == "shared" else batch.targets]

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            weights = jnp.where(batch.inputs["weighs"] > 0, jax.nn.sigmoid(logits(x, batch)), 1.0)
            return batch.mean(weights * losses(y, batch)) + self.penalty(y)

        return Problem(
            x=starts[self.weights],
            y=learner.start,
            own=PerRow("lower") if self.weights == "own" else None,
            lower=lower,
            upper=lambda x, y, batch: batch.mean(losses(y, batch)),
            metrics=lambda x, y, batch: learner.metrics(y, batch.inputs["features"], batch),
            predict=lambda x, y, inputs: learner.scores(y, inputs["features"]),
            over="map" if self.model == "cnn" else "vmap",
        )

    def _client(self, client: int, noisy: Rows, checked: Rows) -> ClientData:
        count = len(noisy.labels)
        numbers = (client * self.rows + np.arange(count)).astype(np.int32)
        judging = part(checked, row=np.int32(0), weighs=np.float32(0))
        if self.train_on == "checked":
            return ClientData(judging, judging)
        if self.train_on == "unchecked":
            return ClientData(part(noisy, row=numbers, weighs=np.float32(1)), judging)
        both = noisy.and_those_of(checked)
        beyond = np.zeros(len(both.labels) - count, np.int32)
        columns = dict(row=np.append(numbers, beyond), weighs=np.append(np.ones(count), beyond).astype(np.float32))
        return ClientData(part(both, **columns), judging)

    def _replaced(self, rows: Rows, classes: int, seed: int, client: int) -> Rows:
        """The rows with a share of their labels replaced, each by another one."""
        g = rng.generator(seed, "replaced labels", client)
        those = g.random(len(rows.labels)) < self.wrong
        other = (rows.labels + g.integers(1, classes, len(rows.labels))) % classes
        return rows._replace(labels=np.where(those, other, rows.labels).astype(np.int32))


def recovered(suspected: npt.NDArray[np.bool_], wrong: npt.NDArray[np.bool_]) -> dict[str, float]:
    """The share of suspected rows that are wrong, and of wrong rows that are suspected; NaN if there are none."""
    both = float(np.sum(suspected & wrong))
    return {
        "precision": both / suspected.sum() if suspected.any() else float("nan"),
        "recall": both / wrong.sum() if wrong.any() else float("nan"),
    }

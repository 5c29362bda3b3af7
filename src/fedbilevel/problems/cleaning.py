"""Hyper-cleaning: which rows are wrong? Weights of rows, of labels or by a small net are judged by checked rows.

    min_x 1/m Σ_i CE_i(y*(x); checked rows)
    subject to  y*(x) = argmin_y 1/m Σ_i mean_r σ(x_ir) CE(y; row r of client i) + decay/2 ||y||²

A share of the labels was replaced by other ones. There are as many weights as unchecked rows, so they can overfit
the checked rows: a classifier of the checked rows alone is the control that belongs beside it.

Few weights cannot overfit: a weight for each label, or a small network that gives a row's weight from the loss of
the row under a classifier of the checked rows (after Shu et al., "Meta-Weight-Net", NeurIPS 2019, where it is the
loss under the classifier in training; here it is known before the run, so the lower loss stays convex in y).

A row's weight belongs to its client. With `weights = "own"` the client has it and never sends it (see
`Problem.own`). With `weights = "shared"` the weights of all rows are x. Every method can move them then, and every
client is sent them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients
from ..own import PerRow
from ..problem import Finding, Picture, Problem, Task, task_with_test
from ..settings import about, settings
from ._checked import CERTAIN, CheckedRows, Dealt, Rows, area_under_curve, checked_scores, known, part

HIDDEN = 8  # units of the network that gives weights


class Hints(NamedTuple):
    """Of every unchecked row: its standardised loss under a classifier of checked rows, and if labels agree."""

    losses: npt.NDArray[np.float32]
    agreed: npt.NDArray[np.bool_]


class Labelled(NamedTuple):
    """The numbers, labels and hints of rows."""

    row: npt.NDArray[np.intp]
    label: npt.NDArray[np.int32]
    hint: npt.NDArray[np.float32]


@settings
class Cleaning(CheckedRows):
    """Hyper-cleaning: a weight for each row or class is x, a classifier y."""

    wrong: Annotated[float, Field(ge=0, le=1), about("share of the unchecked labels that are replaced")] = 0.5
    weights: Annotated[
        Literal["own", "shared", "class", "net"],
        about(
            "a weight for each row, which its client has and never sends (own) or which is in x (shared); "
            "class: a weight in x for each label that a row may claim; net: x is a small network, which gives the "
            "weight of a row from its loss under a classifier of the checked rows"
        ),
    ] = "shared"
    start: Annotated[
        Literal["equal", "agreed", "oracle"],
        about(
            "shared. equal: all weights are 1/2. Two controls are agreed: one for rows to which a classifier of "
            "the checked rows gives their label too, and else zero; and oracle: one for right rows, and else zero"
        ),
    ] = "equal"

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Deal the rows, replace some labels, and measure how well the weights in x tell wrong rows."""
        dealt = self.deal(data, seed)
        noisy = [self._replaced(rows, dealt.classes, seed, i) for i, rows in enumerate(dealt.unchecked)]
        right = np.concatenate([a.labels == b.labels for a, b in zip(noisy, dealt.unchecked, strict=True)])
        hints = self._hints(dealt, noisy)
        clients = ListedClients([self._client(i, noisy[i], dealt.checked[i], hints) for i in range(data.clients)])
        columns = dict(row=np.int32(0), weighs=np.float32(0), hint=np.float32(0))
        test, valid = part(dealt.test, **columns), None if dealt.valid is None else part(dealt.valid, **columns)
        made = task_with_test(self._problem(dealt, right, hints, seed), clients, test, valid)
        if self.weights == "own":
            return made
        every = Labelled(np.arange(len(right)), np.concatenate([rows.labels for rows in noisy]), hints.losses)

        def logits(x: Array) -> npt.NDArray[np.float32]:
            return np.asarray(self.logits(made.problem.flat_x.restore(x), *every))

        def measure(x: Array, y: Array) -> Mapping[str, Any]:
            found = recovered(logits(x) < 0, ~right)
            found["auc"] = area_under_curve(logits(x), right)
            return {**made.measure(x, y), **known(found)}

        def finding(x: Array, y: Array) -> Finding:
            kinds = np.where(right, "right label", "wrong label").tolist()
            numbers, truth = np.concatenate(dealt.numbers), np.concatenate([r.labels for r in dealt.unchecked])

            def picture(row: int) -> Picture:
                told, true = int(every.label[row]), int(truth[row])
                title = f"said: {told}" if told == true else f"said: {told}, is: {true}"
                return Picture(dealt.picture(int(numbers[row])), title)

            weights = np.asarray(jax.nn.sigmoid(logits(x)))
            return Finding("row", "weight", weights.tolist(), kinds, picture)

        return made._replace(measure=measure, finding=finding)

    def logits(self, x: Any, row: Any, label: Any, hint: Any) -> Array:
        """The logits of the weights of rows, from their numbers, labels and hints."""
        if self.weights == "net":
            hidden = jnp.tanh(jnp.asarray(hint)[..., None] * x["slope"] + x["shift"])
            return hidden @ x["out"] + x["bias"]
        return jnp.asarray(x)[row if self.weights == "shared" else label]

    def _hints(self, dealt: Dealt, noisy: list[Rows]) -> Hints:
        """What a classifier of the checked rows says of all unchecked rows, if the settings need it."""
        count = sum(len(rows.labels) for rows in noisy)
        if self.weights != "net" and self.start != "agreed":
            return Hints(np.zeros(count, np.float32), np.zeros(count, bool))
        scores = np.concatenate(checked_scores(dealt, self.decay))
        labels = np.concatenate([rows.labels for rows in noisy])
        losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(scores), labels))
        return Hints((losses - losses.mean()) / losses.std(), scores.argmax(-1) == labels)

    def _starts(self, dealt: Dealt, right: npt.NDArray[np.bool_], hints: Hints) -> Any:
        """The initial x."""
        if self.weights == "own":
            return None
        if self.weights == "class":
            return jnp.zeros(dealt.classes)
        if self.weights == "net":
            places = np.linspace(-2.0, 2.0, HIDDEN)
            return dict(
                slope=jnp.full(HIDDEN, 2.0),
                shift=jnp.asarray(-2.0 * places),
                out=jnp.zeros(HIDDEN),
                bias=jnp.zeros(()),
            )
        known_as = {"equal": np.zeros(len(right)), "agreed": hints.agreed, "oracle": right}[self.start]
        return jnp.zeros(len(right)) if self.start == "equal" else jnp.where(known_as, CERTAIN, -CERTAIN)

    def _problem(self, dealt: Dealt, right: npt.NDArray[np.bool_], hints: Hints, seed: int) -> Problem:
        learner = self.learner(dealt.test.inputs.shape[1], dealt.shape, dealt.classes, seed)

        def losses(y: Any, batch: Batch) -> Array:
            return learner.losses(y, batch.inputs["features"], batch.targets)

        def logits(x: Any, batch: Batch) -> Array:
            if self.weights == "own":
                return batch.own[batch.ids]
            return self.logits(x, batch.inputs["row"], batch.targets, batch.inputs["hint"])

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            weights = jnp.where(batch.inputs["weighs"] > 0, jax.nn.sigmoid(logits(x, batch)), 1.0)
            return batch.mean(weights * losses(y, batch)) + self.penalty(y)

        return Problem(
            x=self._starts(dealt, right, hints),
            y=learner.start,
            own=PerRow("lower") if self.weights == "own" else None,
            lower=lower,
            upper=lambda x, y, batch: batch.mean(losses(y, batch)),
            metrics=lambda x, y, batch: learner.metrics(y, batch.inputs["features"], batch),
            predict=lambda x, y, inputs: learner.scores(y, inputs["features"]),
            over="map" if self.model == "cnn" else "vmap",
        )

    def _client(self, client: int, noisy: Rows, checked: Rows, hints: Hints) -> ClientData:
        count = len(noisy.labels)
        numbers = (client * self.rows + np.arange(count)).astype(np.int32)
        judging = part(checked, row=np.int32(0), weighs=np.float32(0), hint=np.float32(0))
        if self.train_on == "checked":
            return ClientData(judging, judging)
        own = dict(row=numbers, weighs=np.ones(count, np.float32), hint=hints.losses[numbers].astype(np.float32))
        if self.train_on == "unchecked":
            return ClientData(part(noisy, **own), judging)
        both = noisy.and_those_of(checked)
        beyond = len(both.labels) - count
        return ClientData(part(both, **{name: np.pad(value, (0, beyond)) for name, value in own.items()}), judging)

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

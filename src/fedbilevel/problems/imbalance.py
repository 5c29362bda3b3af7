"""Class imbalance: the loss itself is tuned, by a factor and a shift for the score of every class.

    min_x 1/m Σ_i CE_i(y*(x); judging rows)
    subject to  y*(x) = argmin_y 1/m Σ_i CE_i(2 σ(Δ) ∘ scores(y) + l; training rows) + decay/2 ||y||²

with x = (Δ, l), as in AutoBalance (Li et al., NeurIPS 2021) and in the experiments of FedNest. The training rows
have a long tail: the most frequent class has `ratio` times the rows of the rarest. The judging rows, and those on
which settings are chosen, have as many rows of every class.

Two controls need no search: weights of the inverse frequency of a class, and logit adjustment (Menon et al., ICLR
2021), which adds the logarithm of the frequency to the scores in training. A third trains on the judging rows too.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients
from ..errors import SettingsError
from ..problem import Finding, Problem, Task, task_with_test
from ..settings import Count, about, settings
from ._checked import CheckedRows, Rows, part


@settings
class Imbalance:
    """Class imbalance: a factor and a shift for every class are x, a classifier y."""

    most: Annotated[Count, about("training rows of the most frequent class, over all clients")] = 1000
    ratio: Annotated[float, Field(ge=1), about("rows of the most frequent class for one of the rarest")] = 100.0
    judging: Annotated[Count, about("judging rows of every class, over all clients")] = 20
    valid: Annotated[int, Field(ge=0), about("rows of every class for the choice of settings: valid_accuracy")] = 0
    loss: Annotated[
        Literal["tuned", "plain", "inverse", "adjusted"],
        about(
            "tuned: by x. Controls: plain; inverse: weights of the inverse frequency; adjusted: logit adjustment"
        ),
    ] = "tuned"
    train_on: Annotated[
        Literal["training", "both"], about("both: the judging rows are among the training rows, as a control")
    ] = "training"
    components: Annotated[
        int, Field(ge=0, le=10**4), about("principal components that are the inputs; 0: the pixels")
    ] = 60
    decay: Annotated[float, Field(ge=0), about("weight of the ridge 1/2 ||y||² of the lower loss")] = 0.001

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Draw the rows of every class, and deal them to the clients at random."""
        like, dataset = CheckedRows(components=self.components, decay=self.decay), data.dataset
        inputs, test = like.inputs(dataset)
        g = rng.generator(seed, "imbalance")
        training, judging, valid = list[Any](), list[Any](), list[Any]()
        counts = [round(self.most * self.ratio ** (-k / (dataset.classes - 1))) for k in range(dataset.classes)]
        for label, count in enumerate(counts):
            own = g.permutation(np.flatnonzero(dataset.train_targets == label))
            if len(own) < count + self.judging + self.valid:
                raise SettingsError(
                    f"problem.most = {self.most} is too much: {count} + {self.judging} + {self.valid} rows of "
                    f"the class {label} are wanted, and there are {len(own)}; use fewer"
                )
            ends = np.cumsum([count, self.judging, self.valid])
            for rows, taken in zip((training, judging, valid), np.split(own[: ends[-1]], ends[:-1]), strict=True):
                rows.append(taken)

        def those(numbers: Any) -> Rows:
            return Rows(inputs(numbers), dataset.train_targets[numbers])

        lower, upper = (
            np.array_split(g.permutation(np.concatenate(a)), data.clients) for a in (training, judging)
        )
        if self.train_on == "both":
            lower = [np.concatenate(pair) for pair in zip(lower, upper, strict=True)]
            counts = [count + self.judging for count in counts]
        clients = ListedClients(
            [ClientData(part(those(a)), part(those(b))) for a, b in zip(lower, upper, strict=True)]
        )
        problem = self._problem(like, test.shape[1], dataset, np.asarray(counts) / sum(counts), seed)
        right = part(those(np.concatenate(valid))) if self.valid else None
        made = task_with_test(problem, clients, part(Rows(test, dataset.test_targets)), right)

        def finding(x: Array, y: Array) -> Finding:
            shifts = np.asarray(problem.flat_x.restore(x)["shift"]).tolist()
            return Finding(
                "class", "shift", shifts, names=[f"{i}: {count:,} rows" for i, count in enumerate(counts)]
            )

        return made._replace(finding=finding)

    def _problem(self, like: CheckedRows, width: int, dataset: Any, shares: np.ndarray, seed: int) -> Problem:
        learner, classes = like.learner(width, dataset.shape, dataset.classes, seed), dataset.classes
        logs = jnp.asarray(np.log(shares), jnp.float32)
        weights = jnp.asarray(1 / (classes * shares), jnp.float32)  # their mean over the training rows is one

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            scores = learner.scores(y, batch.inputs["features"])
            if self.loss == "tuned":
                scores = 2 * jax.nn.sigmoid(x["factor"]) * scores + x["shift"]
            if self.loss == "adjusted":
                scores = scores + logs
            losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), batch.targets[:, None], 1)[:, 0]
            own = weights[batch.targets] if self.loss == "inverse" else 1.0
            return batch.mean(own * losses) + like.penalty(y)

        return Problem(
            x={"factor": jnp.zeros(classes), "shift": jnp.zeros(classes)},
            y=learner.start,
            lower=lower,
            upper=lambda x, y, batch: batch.mean(learner.losses(y, batch.inputs["features"], batch.targets)),
            metrics=lambda x, y, batch: learner.metrics(y, batch.inputs["features"], batch),
            predict=lambda x, y, rows: learner.scores(y, rows["features"]),
        )

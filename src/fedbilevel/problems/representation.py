"""Hyper-representation: the body of a network is trained on validation rows, its head on training rows.

min_x 1/m Σ_i CE(head(y*; body(x; ·)))    subject to    y* = argmin_y 1/m Σ_i CE(head(y; body(x; ·))) + R(y)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from pydantic import Field

from ..data import DataSettings, Part
from ..models import TwoHalves, mlp
from ..problem import Batch, Problem, PyTree, Task, task_with_test
from ..settings import Count, about, settings

Regulariser = Literal["norm", "ridge"]


def norm(y: PyTree) -> Array:
    """Σ ||w|| over the arrays of y, not squared: what the released code of the baseline adds to the loss.

    The tiny constant under the root keeps the derivative finite at zero.
    """
    return sum((jnp.sqrt(jnp.sum(w**2) + 1e-12) for w in jax.tree.leaves(y)), jnp.zeros(()))


def ridge(y: PyTree) -> Array:
    """1/2 Σ ||w||²: makes the lower problem strongly convex, as the theory asks."""
    return 0.5 * sum((jnp.sum(w**2) for w in jax.tree.leaves(y)), jnp.zeros(()))


REGULARISERS = {"norm": norm, "ridge": ridge}


def representation_problem(model: TwoHalves, decay: float, regulariser: Regulariser) -> Problem:
    """The hyper-representation problem of a network in two halves."""
    penalty = REGULARISERS[regulariser]

    def cross_entropy(head: Any, batch: Batch) -> Array:
        scores = head(batch.features)
        return batch.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets))

    def metrics(body: Any, head: Any, batch: Batch) -> Mapping[str, Array]:
        right = jnp.argmax(head(batch.features), axis=-1) == batch.targets
        return {
            "test_accuracy": batch.mean(right.astype(jnp.float32)),
            "test_loss": cross_entropy(head, batch),
        }

    return Problem(
        x=model.body,
        y=model.head,
        embed=lambda body, inputs: body(inputs),
        lower=lambda body, head, batch: cross_entropy(head, batch) + decay * penalty(head),
        upper=lambda body, head, batch: cross_entropy(head, batch),
        metrics=metrics,
    )


@settings
class HyperRepresentation:
    """Hyper-representation with an MLP: the hidden layer is x, the output layer y."""

    hidden: Annotated[Count, about("hidden units; 200 gives the paper's 157,000 and 2,010 parameters")] = 200
    decay: Annotated[float, Field(ge=0), about("weight of the regulariser of the head")] = 0.05
    regulariser: Annotated[
        Regulariser,
        about("norm: not squared, as in the paper's experiments; ridge: squared, strongly convex"),
    ] = "norm"

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Load and split the data, and start the network from the seed."""
        dataset, clients = data.load(seed)
        model = mlp(dataset.train_inputs.shape[1], self.hidden, dataset.classes, key=jax.random.key(seed))
        problem = representation_problem(model, self.decay, self.regulariser)
        return task_with_test(problem, clients, Part(dataset.test_inputs, dataset.test_targets))

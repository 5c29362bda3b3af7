"""Hyper-representation: the body of a network is trained on validation rows, its head on training rows.

min_x 1/m Σ_i CE(head(y*; body(x; ·)))    subject to    y* = argmin_y 1/m Σ_i CE(head(y; body(x; ·))) + R(y)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from pydantic import Field

from ..batch import Batch
from ..data import Dataset, DataSettings, Part
from ..heads import Regulariser, is_layer, norm, ridge, softmax
from ..models import ModelName, TwoHalves, cnn, mlp
from ..problem import Measure, Over, Problem, PyTree, Task, task_with_test
from ..settings import Size, about, settings
from ..steps import Chances

BLOCK = 10_000  # the training rows that are measured at a time


def dropped(features: Array, rate: float, key: Array | None) -> Array:
    """The features with dropout, as in training: each is zero with this probability, and 1 / (1 - rate) as large.

    The features are behind a ReLU. Dropout in front of it, as in the baseline's released code, gives the same.
    """
    if key is None or rate == 0:
        return features
    kept = jax.random.bernoulli(key, 1 - rate, features.shape)
    return jnp.where(kept, features / (1 - rate), 0.0)


def representation_problem(
    model: TwoHalves,
    decay: float,
    regulariser: Regulariser,
    smoothing: float = 1e-3,
    over: Over = "vmap",
    dropout: float = 0.0,
    chances: Chances = "derivative",
) -> Problem:
    """The hyper-representation problem of a network in two halves.

    A head of one layer has closed forms (`heads.softmax`). With more layers or with dropout JAX differentiates.
    Its `predict` gives the scores of the classes, one row for each row of inputs: their argmax is the label, and
    their softmax the probabilities.
    """

    def penalty(head: PyTree) -> Array:
        return ridge(head) if regulariser == "ridge" else norm(head, smoothing)

    def cross_entropy(head: Any, batch: Batch) -> Array:
        scores = head(dropped(batch.features, dropout, batch.key))
        return batch.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets))

    def regularised(body: Any, head: Any, batch: Batch) -> Array:
        return cross_entropy(head, batch) + decay * penalty(head)

    closed = is_layer(model.head) and dropout == 0

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
        lower=softmax(decay, regulariser, smoothing) if closed else regularised,
        upper=softmax() if closed else lambda body, head, batch: cross_entropy(head, batch),
        metrics=metrics,
        over=over,
        chances=chances if dropout > 0 else None,
        predict=lambda body, head, inputs: head(body(inputs)),
    )


def training_measure(problem: Problem, dataset: Dataset) -> Measure:
    """Accuracy and loss on all training rows of a data set. The rows are made when it is first called."""
    device, compiled = jax.local_devices()[0], jax.jit(problem.measure)

    @cache
    def blocks() -> list[Part]:
        cuts = [slice(first, first + BLOCK) for first in range(0, len(dataset.train_targets), BLOCK)]
        return [jax.device_put(Part(dataset.train_inputs[c], dataset.train_targets[c]), device) for c in cuts]

    def measure(x: Array, y: Array) -> Mapping[str, Array]:
        x, y = jax.device_put((x, y), device)
        parts = [(part.rows / len(dataset.train_targets), compiled(x, y, part)) for part in blocks()]
        return {
            name: sum((share * found[own] for share, found in parts), jnp.zeros(()))
            for name, own in {"train_accuracy": "test_accuracy", "train_loss": "test_loss"}.items()
        }

    return measure


@settings
class HyperRepresentation:
    """Hyper-representation: the body of a network is x, its head y."""

    model: Annotated[ModelName, about("mlp: one hidden layer; cnn: LeNet, for 28 x 28 or 32 x 32 pixels")] = "mlp"
    hidden: Annotated[Size, about("mlp: hidden units; 200 gives 157,000 and 2,010 parameters on MNIST")] = 200
    head_layers: Annotated[Literal[1, 2], about("cnn: how many of the last layers form the head")] = 2
    decay: Annotated[float, Field(ge=0), about("weight of the regulariser of the head")] = 0.05
    regulariser: Annotated[
        Regulariser,
        about("norm: not squared, as in the paper's experiments; ridge: squared, strongly convex"),
    ] = "norm"
    smoothing: Annotated[
        float, Field(ge=0), about("norm: s in sqrt(||w||² + s²); bounds the curvature at zero; 0: the norm itself")
    ] = 1e-3
    dropout: Annotated[
        float, Field(ge=0, lt=1), about("probability that a feature is dropped in training; 0: no dropout")
    ] = 0.0
    dropout_masks: Annotated[
        Chances, about("dropout: a mask for every derivative, as in the baseline's code, or one for every step")
    ] = "derivative"

    makes_data: ClassVar[bool] = False

    def task(self, data: DataSettings, seed: int) -> Task:
        """Load and split the data, and start the network from the seed."""
        dataset, clients = data.load(seed)
        problem = self.remote(dataset.shape, dataset.classes, seed)
        task = task_with_test(problem, clients, Part(dataset.test_inputs, dataset.test_targets))
        return task._replace(measure_train=training_measure(problem, dataset))

    def without_clients(self, data: DataSettings, seed: int) -> Problem:
        """The problem of `task` alone. Data are loaded only if the table of data sets lacks their shape."""
        return self.remote(data.shape, data.classes, seed)

    def remote(self, shape: tuple[int, int, int], classes: int, seed: int = 0) -> Problem:
        """The problem without clients, for images of this shape: what a site needs beside its own rows."""
        key = jax.random.key(seed)
        if self.model == "mlp":
            model = mlp(math.prod(shape), self.hidden, classes, key=key)
        else:
            model = cnn(shape, classes, head_layers=self.head_layers, key=key)
        over: Over = "vmap" if self.model == "mlp" else "map"
        return representation_problem(
            model, self.decay, self.regulariser, self.smoothing, over, self.dropout, self.dropout_masks
        )

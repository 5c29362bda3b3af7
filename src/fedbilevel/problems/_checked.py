"""Clients whose rows may be wrong, beside a few rows that were checked: what client weights and cleaning share.

A client has unchecked rows, some of which are wrong, and a few checked rows, which are right. A classifier y is
trained on the unchecked rows, each with a weight, and the weights serve the loss on the checked rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import Dataset, DataSettings, Part
from ..errors import SettingsError
from ..files import arrays_digest
from ..heads import ridge
from ..models import Dense, SmallBody, in_blocks, mlp, small_cnn
from ..settings import Count, Size, about, settings

PyTree = Any
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]
CHECKED_STEPS = 500  # gradient steps of the classifier of checked rows
CERTAIN = 12.0  # a logit whose weight is one or zero up to 1e-5


class Learner(NamedTuple):
    """A classifier: its initial parameters, and the scores of the classes for rows of inputs.

    Measurements score `block` rows at a time, or all of them if it is None. Derivatives are of all rows at once.
    """

    start: PyTree
    scores: Callable[[PyTree, Array], Array]
    block: int | None = None

    def losses(self, y: PyTree, inputs: Array, targets: Array) -> Array:
        """The cross entropy of each row."""
        return optax.softmax_cross_entropy_with_integer_labels(self.scores(y, inputs), targets)

    def metrics(self, y: PyTree, inputs: Array, batch: Batch) -> dict[str, Array]:
        """Accuracy and cross entropy on test rows."""

        def score(rows: Array) -> Array:
            return self.scores(y, rows)

        scores = score(inputs) if self.block is None else in_blocks(score, inputs, self.block)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets)
        right = (scores.argmax(-1) == batch.targets).astype(np.float32)
        return {"test_accuracy": batch.mean(right), "test_loss": batch.mean(losses)}


class Rows(NamedTuple):
    """Inputs and labels, with one row for each."""

    inputs: Floats
    labels: Labels

    def of(self, numbers: Any) -> Rows:
        return Rows(self.inputs[numbers], self.labels[numbers])

    def and_those_of(self, other: Rows) -> Rows:
        return Rows(*(np.concatenate(both) for both in zip(self, other, strict=True)))


class Dealt(NamedTuple):
    """The rows of every client with their true labels, the test rows, and those by which settings are chosen.

    `numbers` are the places of a client's unchecked rows in the data set, and `further` those of its checked rows
    and then of its rows for the choice of settings; `picture` gives the image at a place.
    """

    unchecked: list[Rows]
    checked: list[Rows]
    test: Rows
    valid: Rows | None
    classes: int
    shape: tuple[int, int, int]
    numbers: list[npt.NDArray[np.intp]]
    further: list[npt.NDArray[np.intp]]
    picture: Callable[[int], Floats]


@settings
class CheckedRows:
    """The classifier, and how many rows a client has."""

    model: Annotated[
        Literal["linear", "mlp", "cnn"],
        about("the classifier y: linear (softmax regression), mlp (one hidden layer), or cnn (two convolutions)"),
    ] = "linear"
    hidden: Annotated[Size, about("mlp: hidden units")] = 100
    components: Annotated[
        int,
        Field(ge=0, le=10**4),
        about("linear, mlp: principal components of the training inputs that are used as inputs; 0: the pixels"),
    ] = 60
    rows: Annotated[Count, about("unchecked rows of a client")] = 50
    checked: Annotated[Count, about("checked rows of a client, which are right")] = 3
    valid: Annotated[
        int,
        Field(ge=0),
        about("further right rows, which nobody trains on: valid_accuracy is measured there, to choose settings"),
    ] = 0
    train_on: Annotated[
        Literal["unchecked", "checked", "both"],
        about(
            "the rows of the lower loss; checked and both are controls, in which checked rows have the weight 1"
        ),
    ] = "unchecked"
    decay: Annotated[float, Field(ge=0), about("weight of the ridge 1/2 ||y||² of the lower loss")] = 0.01

    def learner(self, width: int, shape: tuple[int, int, int], classes: int, seed: int) -> Learner:
        """The classifier for inputs of this width. A linear one starts at zero, the others at random."""
        key = jax.random.key(seed)
        if self.model == "linear":
            layer = Dense((width, classes), activate_last=False, key=key)
            return Learner(jax.tree.map(lambda a: 0 * a, layer), lambda y, rows: y(rows))
        if self.model == "mlp":
            made = mlp(width, self.hidden, classes, key=key)
        else:
            made = small_cnn(shape, classes, key=key)
        return Learner(
            tuple(made),
            lambda y, rows: y[1](y[0](rows)),
            made.body.block if isinstance(made.body, SmallBody) else None,
        )

    def deal(self, data: DataSettings, seed: int) -> Dealt:
        """The first rows of every client's two parts, as `data` splits them, with true labels."""
        dataset, parts = data.split(seed)
        inputs, test = self.inputs(dataset)

        def first(kind: str, own: npt.NDArray[np.intp], count: int, client: int) -> Rows:
            if len(own) < count:
                raise SettingsError(
                    f"problem.{kind} = {count} is too much: client {client} has {len(own)} such rows; use fewer "
                    "clients or rows, or another data.train_share"
                )
            return Rows(inputs(own[:count]), dataset.train_targets[own[:count]])

        unchecked, checked, valid, numbers = [], [], list[Rows](), []
        further = list[npt.NDArray[np.intp]]()
        for client, count in enumerate(_shares(self.valid, data.clients)):
            own, cut = parts.rows(client), parts.size(client).lower
            unchecked.append(first("rows", own[:cut], self.rows, client))
            numbers.append(own[: self.rows])
            further.append(own[cut : cut + self.checked + count])
            checked.append(first("checked", own[cut:], self.checked, client))
            if count:
                valid.append(first("valid", own[cut + self.checked :], count, client))
        others = Rows(*(np.concatenate(each) for each in zip(*valid, strict=True))) if self.valid else None
        right, shape = Rows(test, dataset.test_targets), dataset.shape

        def picture(number: int) -> Floats:
            pixels = dataset.train_inputs[np.array([number])][0].reshape(shape)
            return np.asarray((pixels - pixels.min()) / max(np.ptp(pixels), 1e-6), np.float32)

        return Dealt(unchecked, checked, right, others, dataset.classes, shape, numbers, further, picture)

    def inputs(self, dataset: Dataset) -> tuple[Callable[[Any], Floats], Floats]:
        """The inputs of training rows by their numbers, and those of all test rows."""
        if self.model == "cnn" or self.components == 0:
            return lambda rows: dataset.train_inputs[rows], dataset.test_inputs
        most = math.prod(dataset.shape)
        if self.components > most:
            raise SettingsError(
                f"problem.components = {self.components} is too much: a row has {most} numbers; use at most these"
            )
        turn = principal_components(dataset, self.components)
        return lambda rows: turn(dataset.train_inputs[rows]), turn(dataset.test_inputs)

    def penalty(self, y: PyTree) -> Array:
        return self.decay * ridge(y)


def checked_scores(dealt: Dealt, decay: float) -> list[Floats]:
    """What a softmax regression on the checked rows of all clients says of every client's unchecked rows.

    A federation would train it by plain rounds before the bilevel run, on rows that it has anyway.
    """
    rows = Rows(*(np.concatenate(each) for each in zip(*dealt.checked, strict=True)))
    inputs, labels = jnp.asarray(rows.inputs.reshape(len(rows.labels), -1)), jnp.asarray(rows.labels)

    def loss(y: PyTree) -> Array:
        errors = optax.softmax_cross_entropy_with_integer_labels(inputs @ y["weight"] + y["bias"], labels)
        return errors.mean() + decay * ridge(y)

    start = {"weight": jnp.zeros((inputs.shape[1], dealt.classes)), "bias": jnp.zeros(dealt.classes)}
    step = 1.0 / (0.5 * float(jnp.linalg.norm(inputs, 2) ** 2 / len(labels)) + 0.5 + decay)  # 1 / L

    @jax.jit
    def solved(y: PyTree) -> PyTree:
        move = jax.grad(loss)
        return jax.lax.fori_loop(
            0, CHECKED_STEPS, lambda _, y: jax.tree.map(lambda a, g: a - step * g, y, move(y)), y
        )

    y = jax.tree.map(np.asarray, solved(start))
    return [r.inputs.reshape(len(r.labels), -1) @ y["weight"] + y["bias"] for r in dealt.unchecked]


@dataclass(frozen=True)
class Components:
    """The mean of rows, the directions in which they differ most, and the size of what they have there."""

    mean: npt.NDArray[np.float64]
    basis: npt.NDArray[np.float64]
    scale: np.float64

    def __call__(self, rows: Floats) -> Floats:
        return np.asarray((rows - self.mean) @ self.basis / self.scale, np.float32)


_COMPONENTS: dict[tuple[str, int], Components] = {}  # by the digest of the rows, for all runs of this process


def principal_components(dataset: Dataset, count: int) -> Callable[[Floats], Floats]:
    """The map of inputs to their first principal components, scaled to a mean square of one.

    They are those of up to 10,000 training rows. That is a preparation that every client is given, as pixels are
    normalised by a mean that every client is given. For CIFAR-10 it takes seconds, so it is done once.
    """
    rows = dataset.train_inputs[np.arange(min(10_000, len(dataset.train_targets)))]
    key = arrays_digest({"rows": rows}), count
    if key not in _COMPONENTS:
        table = rows.astype(np.float64)
        mean = table.mean(0)
        values, vectors = np.linalg.eigh(np.cov(table - mean, rowvar=False))
        basis = vectors[:, np.argsort(values)[::-1][:count]]
        _COMPONENTS[key] = Components(mean, basis, np.sqrt(((table - mean) @ basis).var(0).mean()))
    return _COMPONENTS[key]


def _shares(total: int, count: int) -> list[int]:
    """A number in parts that differ by at most one."""
    return [total // count + (place < total % count) for place in range(count)]


def chosen_share(count: int, share: float, seed: int, purpose: str) -> npt.NDArray[np.bool_]:
    """True for this share of `count` things, drawn at random."""
    chosen = np.zeros(count, bool)
    chosen[rng.generator(seed, purpose).permutation(count)[: round(share * count)]] = True
    return chosen


def area_under_curve(scores: npt.ArrayLike, positive: npt.NDArray[np.bool_]) -> float:
    """The probability that a positive one has a higher score than another one; ties count half.

    It is 1 if scores tell the two apart without an error, and 0.5 if they say nothing. NaN if one kind is missing.
    """
    values = np.asarray(scores, np.float64)
    ups, downs = values[positive], values[~positive]
    if not len(ups) or not len(downs):
        return math.nan
    places = np.sort(downs)
    below, upto = (np.searchsorted(places, ups, side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(downs))


def known(figures: dict[str, float]) -> dict[str, float]:
    """The figures that are numbers. A share of nothing is NaN, and is left out."""
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def halved_metrics(scores: Array, batch: Batch, halved: bool) -> dict[str, Array]:
    """Accuracy and loss on a client's test rows: all, or every second, and valid_accuracy on the others."""
    right = (scores.argmax(-1) == batch.targets).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets)
    if not halved:
        return {"test_accuracy": batch.mean(right), "test_loss": batch.mean(losses)}
    assert batch.ids is not None
    odd, even = (batch._replace(weights=batch.weights * (batch.ids % 2 == half)) for half in (1, 0))
    return {"test_accuracy": odd.mean(right), "test_loss": odd.mean(losses), "valid_accuracy": even.mean(right)}


def part(rows: Rows, **columns: npt.ArrayLike) -> Part:
    """The rows as data of a client, with further columns beside the features."""
    made = {name: np.broadcast_to(value, len(rows.labels)) for name, value in columns.items()}
    return Part({"features": rows.inputs, **made}, rows.labels)

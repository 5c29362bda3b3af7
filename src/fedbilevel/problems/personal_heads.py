"""Personal heads: all clients share the body of a network, and each has a head of its own.

    min_x 1/m Σ_i CE_i(head(y_i*; body(x; ·)))    subject to    y_i* = argmin_y CE_i(head(y; body(x; ·))) + R(y)

with the validation rows of client i above and its training rows below. The heads never leave the clients. Every
client has test rows of its own, with labels in the shares of its training rows, and the metrics are measured there
with the client's own head. `data.partition = "classes"` gives clients a few classes each, as in FedRep (Collins et
al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021), whose alternation of body
and heads is `local-lower` with `implicit = false`.

The regulariser is squared, so that every head is unique. Heads start at zero, whatever the seed is.

`heads` makes the controls: one head for all clients (FedAvg), the same with a head that every client fine-tunes
before it is measured, and clients that share nothing. `newcomers` are clients that take no part in training. Each
brings a few rows, trains a head on them, and is measured as `new_accuracy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from ..batch import Batch
from ..data import ClientData, DataSettings, Drawn, ListedClients, Part, own_tests
from ..errors import SettingsError
from ..models import ModelName, mlp
from ..problem import Finding, Problem, Task
from ..settings import Count, Positive, Size, about, settings
from ._checked import halved_metrics, principal_components
from .representation import HyperRepresentation, representation_problem


class Stacked(NamedTuple):
    """Rows of several clients: arrays of clients x rows, and weights that are zero for padding."""

    inputs: Any
    targets: Any
    weights: Any


@settings
class PersonalHeads:
    """Personal heads: the body of a network is x, and every client has its own head."""

    model: Annotated[ModelName, about("mlp: one hidden layer; cnn: LeNet, for 28 x 28 or 32 x 32 pixels")] = "mlp"
    hidden: Annotated[Size, about("mlp: hidden units, the features that all clients share")] = 200
    decay: Annotated[float, Field(gt=0), about("weight of the squared norm of a head")] = 0.01
    heads: Annotated[
        Literal["own", "shared", "tuned", "alone"],
        about(
            "own: every client has a head. Three controls, the first two for fedavg: shared: one head for all; "
            "tuned: the same, and clients fine-tune it before they are measured; alone: clients share nothing"
        ),
    ] = "own"
    components: Annotated[
        int, Field(ge=0, le=10**4), about("mlp: principal components that are the inputs; 0: the pixels")
    ] = 0
    rows: Annotated[int, Field(ge=0), about("rows of a client that are used, over both levels; 0: all")] = 0
    valid: Annotated[
        bool, about("every second test row of a client is for the choice of settings: valid_accuracy")
    ] = False
    newcomers: Annotated[
        int, Field(ge=0), about("further clients, who take no part and train a head at the end")
    ] = 0
    newcomer_rows: Annotated[Count, about("the training rows of a newcomer")] = 20
    tuning_steps: Annotated[Count, about("gradient steps on the head of newcomers, and of clients if tuned")] = 50
    tuning_step: Annotated[Positive, about("the size of these steps")] = 0.1

    makes_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.components and self.model != "mlp":
            raise SettingsError(
                f"problem.components = {self.components} is wrong with problem.model = {self.model!r}, which "
                "needs images; use 0, or the model mlp"
            )

    def task(self, data: DataSettings, seed: int) -> Task:
        """Load and split the data, and start the body from the seed."""
        if self == dataclasses.replace(PersonalHeads(), model=self.model, hidden=self.hidden, decay=self.decay):
            dataset, clients = data.load(seed, own_test=True)
            return Task(self.remote(dataset.shape, dataset.classes, seed), clients)
        everyone, shape, classes = self._dealt(data, seed)
        problem = self.remote(shape, classes, seed)
        if self.heads in ("shared", "tuned"):
            problem = dataclasses.replace(problem, lower_is="global")
        taking, later = everyone[: data.clients], everyone[data.clients :]
        measures = list[Callable[[Array, Array], Mapping[str, Array]]]()
        few = [each._replace(lower=_first(each.lower, self.newcomer_rows)) for each in later]
        told = None if self.heads == "alone" else self._finding(problem, taking, few)
        if few:
            measures.append(self._measure(problem, few, "new", tune=self.heads != "shared"))
        if self.heads == "tuned":
            measures.append(self._measure(problem, taking, "test", tune=True))
            taking = [each._replace(test=None) for each in taking]
        return Task(
            problem,
            ListedClients(taking),
            lambda x, y: {k: v for each in measures for k, v in each(x, y).items()},
            finding=told,
        )

    def without_clients(self, data: DataSettings, seed: int) -> Problem:
        """The problem of `task` alone. Data are loaded only if the table of data sets lacks their shape."""
        return self.remote(data.shape, data.classes, seed)

    def remote(self, shape: tuple[int, int, int], classes: int, seed: int = 0) -> Problem:
        """The problem without clients, for images of this shape: what a site needs beside its own rows."""
        if self.components:
            model = mlp(self.components, self.hidden, classes, key=jax.random.key(seed))
            problem = representation_problem(model, self.decay, "ridge")
        else:
            alike = HyperRepresentation(
                model=self.model, hidden=self.hidden, head_layers=1, decay=self.decay, regulariser="ridge"
            )
            problem = alike.remote(shape, classes, seed)
        zero = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else leaf, problem.y)
        made = dataclasses.replace(problem, y=zero, lower_is="local")
        if self.valid:
            made = dataclasses.replace(
                made, metrics=lambda body, head, batch: halved_metrics(head(batch.features), batch, True)
            )
        return self._alone(made) if self.heads == "alone" else made

    def _alone(self, problem: Problem) -> Problem:
        """The problem in which a client's y is its whole network. x has one number, which no loss reads."""
        embed = problem.embed
        assert embed is not None

        def on_features(loss: Any) -> Any:
            return lambda x, y, batch: loss(y[0], y[1], batch._replace(features=embed(y[0], batch.inputs)))

        return dataclasses.replace(
            problem,
            x=jnp.zeros(1),
            y=(problem.x, problem.y),
            embed=None,
            lower=on_features(problem.lower),
            upper=on_features(problem.upper),
            metrics=on_features(problem.metrics),
            predict=None,
        )

    def _dealt(self, data: DataSettings, seed: int) -> tuple[list[ClientData], tuple[int, int, int], int]:
        """The data of the clients, and of the newcomers after them."""
        dataset, parts = dataclasses.replace(data, clients=data.clients + self.newcomers).split(seed)
        if isinstance(parts, Drawn):
            raise SettingsError(
                "data.partition = 'drawn' is wrong: its clients have no test rows of their own; use classes"
            )
        turn: Any = principal_components(dataset, self.components) if self.components else lambda rows: rows
        labels = [dataset.train_targets[parts.rows(client)] for client in range(parts.clients)]
        tests = own_tests(dataset.test_targets, labels, seed)
        made = []
        for client in range(parts.clients):
            lower, upper = parts.lower[client], parts.upper[client]
            if self.rows:
                cut = round(self.rows * len(lower) / (len(lower) + len(upper)))
                lower, upper = lower[:cut], upper[: self.rows - cut]
                if len(lower) + len(upper) < self.rows:
                    raise SettingsError(
                        f"problem.rows = {self.rows} is too much: client {client} has {len(lower) + len(upper)}; "
                        "use fewer clients or rows"
                    )
            below, above = (Part(turn(dataset.train_inputs[r]), dataset.train_targets[r]) for r in (lower, upper))
            own = tests[client]
            made.append(ClientData(below, above, Part(turn(dataset.test_inputs[own]), dataset.test_targets[own])))
        return made, dataset.shape, dataset.classes

    def _measure(
        self, problem: Problem, clients: list[ClientData], name: str, tune: bool
    ) -> Callable[[Array, Array], Mapping[str, Array]]:
        """The means over clients of their metrics, and the worst of them; see `_each`."""
        each = self._each(problem, clients, tune)

        def measure(x: Array, y: Array) -> dict[str, Array]:
            found = each(x, y)
            if name == "new":
                return {"new_accuracy": found["test_accuracy"].mean()}
            worst = {f"worst_{key}": value.min() for key, value in found.items() if key.endswith("accuracy")}
            return {key: value.mean() for key, value in found.items()} | worst

        return measure

    def _finding(
        self, problem: Problem, taking: list[ClientData], few: list[ClientData]
    ) -> Callable[[Array, Array], Finding]:
        """How well the body serves every client, those who took part and newcomers, with a head of its own."""

        def finding(x: Array, y: Array) -> Finding:
            groups = [those for those in (taking, few) if those]
            values = [self._each(problem, g, tune=self.heads != "shared")(x, y)["test_accuracy"] for g in groups]
            kinds = ["took part"] * len(taking) + [f"newcomer with {self.newcomer_rows} rows"] * len(few)
            return Finding("client", "test accuracy", np.concatenate(values).tolist(), kinds if few else ())

        return finding

    def _each(
        self, problem: Problem, clients: list[ClientData], tune: bool
    ) -> Callable[[Array, Array], Mapping[str, Array]]:
        """Measures every client with the head that it trains from y on its lower rows, or with y itself.

        The server does it here because this is a simulation: nothing of it would be sent.
        """
        lower, test = (
            _stacked([c.lower for c in clients]),
            _stacked([c.test for c in clients if c.test is not None]),
        )
        step = self.tuning_step

        def one(x: Array, y: Array, rows: Stacked, tests: Stacked) -> Mapping[str, Array]:
            batch = Batch(rows.inputs, rows.targets, rows.weights, problem.features(x, rows.inputs))
            if tune:
                slope = jax.grad(lambda y: problem.loss("lower", x, y, batch))
                y = jax.lax.fori_loop(0, self.tuning_steps, lambda _, y: y - step * slope(y), y)
            ids = jnp.arange(tests.weights.shape[0])
            features = problem.features(x, tests.inputs)
            return problem.measured(x, y, Batch(tests.inputs, tests.targets, tests.weights, features, ids=ids))

        all_of_them = jax.jit(jax.vmap(one, (None, None, 0, 0)))
        return lambda x, y: all_of_them(x, y, lower, test)


def _first(part: Part, count: int) -> Part:
    if part.rows < count:
        raise SettingsError(f"problem.newcomer_rows = {count} is too much: a client has {part.rows} lower rows")
    return jax.tree.map(lambda a: a[:count], part)


def _stacked(parts: list[Part]) -> Stacked:
    """The rows of several clients as arrays, padded to the most rows of any."""
    most = max(part.rows for part in parts)

    def padded(a: np.ndarray) -> np.ndarray:
        return np.pad(a, ((0, most - len(a)), *((0, 0) for _ in a.shape[1:])))

    return Stacked(
        np.stack([padded(np.asarray(part.inputs)) for part in parts]),
        np.stack([padded(np.asarray(part.targets)) for part in parts]),
        np.stack([padded(np.ones(part.rows, np.float32)) for part in parts]),
    )

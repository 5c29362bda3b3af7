"""A bilevel problem: two losses over two groups of parameters.

    min_x  f(x, y*(x)) = 1/m Σ_i f_i(x, y*(x))    subject to    y*(x) = argmin_y 1/m Σ_i g_i(x, y)

If the lower level is local, every client has a solution of its own instead:

    min_x  1/m Σ_i f_i(x, y_i*(x))                subject to    y_i*(x) = argmin_y g_i(x, y)

A user gives two pytrees of initial parameters and two functions. Outside of a `Problem` both groups are flat
float32 vectors, so that algorithms are written with + - * and every message is a handful of vectors.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import keystr, tree_map_with_path

from ._derivatives import JaxOracle, Memory, remember
from .batch import Batch
from .data import ClientData, Clients, Part
from .errors import FedBilevelWarning, SettingsError
from .feasible import Projection, Regions, region, start_within
from .heads import OnVectors, Softmax
from .oracle import Arrays, Kept, Oracle
from .own import OwnPart
from .steps import Chances

PyTree = Any


Over = Literal["vmap", "map"]
LowerIs = Literal["global", "local"]
Loss = Callable[[Any, Any, Batch], Array]
Measure = Callable[[Array, Array], Mapping[str, Array]]


class Flat(NamedTuple):
    """A group of parameters as one float32 vector, and the function that restores the pytree."""

    vector: Array
    restore: Callable[[Array], PyTree]


def flatten(tree: PyTree, name: str) -> Flat:
    """Ravel the floating-point arrays of a pytree; its other leaves do not change.

    Python numbers and integer arrays are parameters too, unless they belong to an Equinox module, where they are
    constants. Nobody means that a number beside the arrays is not trained, so it is taken, with a warning.
    """
    taken = list[str]()

    def parameter(path: Any, leaf: Any) -> Any:
        whole = eqx.is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
        if whole or type(leaf) is float:
            what = f"an array of {leaf.dtype}" if hasattr(leaf, "dtype") else f"the {type(leaf).__name__} {leaf!r}"
            taken.append(f"{name}{keystr(path)} is {what}")
            return jnp.asarray(leaf, jnp.float32)
        return leaf

    tree = tree_map_with_path(parameter, tree, is_leaf=lambda node: isinstance(node, eqx.Module))
    parameters, rest = eqx.partition(tree, eqx.is_inexact_array)
    if not jax.tree.leaves(parameters):
        raise SettingsError(
            f"{name} has no floating-point array, but is of type {type(tree).__name__}; "
            "give its parameters as jnp arrays"
        )
    parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parameters)
    vector, unravel = ravel_pytree(parameters)
    if not np.isfinite(vector).all():
        raise SettingsError(f"{name} has a number that is not finite; start from finite parameters")
    if taken:
        text = f"{'; '.join(taken)}, and is taken as float32; write jnp.float32 or jnp.zeros(...) to say so"
        warnings.warn(text, FedBilevelWarning, stacklevel=6)
    return Flat(vector, lambda v: eqx.combine(unravel(v), rest))


class BilevelProblem(Protocol):
    """What engines and algorithms need of a problem. `Problem` implements it, and so may another library.

    traceable   whether JAX can trace its oracle, and so compile and batch the clients' steps
    over        the best way for a simulation to serve clients
    chances     whether the losses are random, and for how long their choices stay the same (see `Problem`)

    It may also have `regions` (feasible sets), `own_part` (variables of clients) and `lower_is` ("local" if every
    client has a lower solution of its own). A problem that lacks them has none, and one lower level for all. A
    problem that JAX cannot trace may be `Native`, `Measured`, `Fitting`, `Batchable` and `Constants`, too.
    """

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace the oracle."""

    @property
    def chances(self) -> Chances | None:
        """For how long the random choices of the losses stay the same; None if the losses are not random."""

    @property
    def over(self) -> Over:
        """The best way for a simulation to serve clients."""

    @property
    def flat_x(self) -> Flat:
        """The initial x as a flat vector, and the function that restores the user's structure."""

    @property
    def flat_y(self) -> Flat:
        """The same for the initial y."""

    @property
    def size_x(self) -> int:
        """The number of parameters in x."""

    @property
    def size_y(self) -> int:
        """The number of parameters in y."""

    def remember(self, x: Array, data: Arrays) -> Any:
        """The values that a client computes once when it is given a new x to hold, or None."""

    def oracle(
        self, held: Mapping[str, Array], data: Arrays, memory: Any = None, kept: Mapping[str, Kept] | None = None
    ) -> Oracle:
        """The oracle of one client, with the vectors that it holds, its memory and its kept states."""


@runtime_checkable
class Native(Protocol):
    """A problem whose steps compute with the arrays of another library. Otherwise they compute with NumPy's."""

    def to_native(self, values: PyTree) -> PyTree:
        """NumPy arrays as what a step is given: arrays of the library, and single numbers as Python's."""

    def from_native(self, values: PyTree) -> PyTree:
        """What a step returns, as NumPy arrays."""


@runtime_checkable
class Measured(Protocol):
    """A problem that measures its own metrics on rows, and can say whether its functions fit the data."""

    @property
    def metrics(self) -> Any: ...

    @property
    def predict(self) -> Any: ...

    def measure(self, x: Array, y: Array, test: Part) -> Mapping[str, Any]:
        """The metrics at flat vectors on all of the rows."""


@runtime_checkable
class Fitting(Protocol):
    """A problem that JAX cannot trace, and that tries its functions on data by itself."""

    def check_fit(self, data: ClientData, test: Part | None = None) -> None:
        """Raise unless the losses fit the data of a client, and the metrics fit the test rows."""

    def metric_names(self, test: Part) -> tuple[str, ...]:
        """The names of the metrics; raises unless they fit the rows and are single numbers."""

    def wide_loss(self, level: str, data: Arrays) -> Callable[[Any, Any], float]:
        """A loss on all rows in float64, as a function of the flat vectors x and y."""


@runtime_checkable
class Batchable(Protocol):
    """A problem that JAX cannot trace, and that has an engine of its own which batches clients."""

    def batched(self, clients: Clients, memory_limit: int) -> Any:
        """The engine for these clients."""


@runtime_checkable
class Constants(Protocol):
    """A problem with numbers that are not trained and must be the same at all sites, such as frozen weights."""

    @property
    def constants_digest(self) -> str | None:
        """A digest of these numbers; None if there are none."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Two losses over two groups of parameters.

    x, y     initial upper and lower parameters: any pytrees, including Equinox modules
    lower    lower(x, y, batch) -> g_i, the loss that y solves, on a client's lower rows
    upper    upper(x, y, batch) -> f_i, the loss that x serves, on a client's upper rows. If y is a linear layer
             under a softmax, give both as `heads.softmax(...)`, which has its derivatives in closed form
    embed    embed(x, inputs) -> features, which do not depend on y. The losses then read `batch.features`, which
             is computed once in an outer iteration
    metrics  metrics(x, y, batch) -> numbers by name, measured on test rows
    over     the best way for a simulation to serve clients: "vmap" (batched) or "map" (in turn; for convolutions
             on a CPU)
    chances  None if the losses are not random. Otherwise they read `batch.key`, for example for a mask of dropout:
             "derivative" gives every derivative a key of its own, and "step" one key to all derivatives of a
             draw, so that both gradients of an SVRG step have the same mask. The key is None in measurements
    predict  predict(x, y, inputs) -> what the trained parameters say about rows of inputs, for use after the run
    feasible_x, feasible_y   the sets that the server keeps x and y in: `Box`, `Simplex`, `Ball`, or a function
             that projects a pytree. The start is projected
    own      initial upper variables that every client has for itself, beside the x that all share: a pytree of
             arrays and of `PerRow`, which has a variable for each row. They stay with the client and are never
             sent. The losses read them as `batch.own`. With own variables, x may be None: nothing is shared then
    server   upper rows that only the server has. The upper loss is then taken there, on these rows, and clients
             have lower losses alone (`lower_only` makes their data). A site of a real federation, which does not
             have the rows, gives "elsewhere"
    lower_is   "global": all clients share one y, which solves the mean of the lower losses. "local": every client
             has its own y_i, which solves its own lower loss and stays with it; y is where each of them starts
    """

    x: PyTree
    y: PyTree
    lower: Loss
    upper: Loss
    embed: Callable[[Any, Any], PyTree] | None = None
    metrics: Callable[[Any, Any, Batch], Mapping[str, Array]] | None = None
    over: Over = "vmap"
    chances: Chances | None = None
    predict: Callable[[Any, Any, PyTree], PyTree] | None = None
    feasible_x: Projection | None = None
    feasible_y: Projection | None = None
    own: PyTree = None
    lower_is: LowerIs = "global"
    server: Part | Literal["elsewhere"] | None = None

    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "embed", "metrics"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in ("lower", "upper")):
                raise SettingsError(f"{name} is of type {type(value).__name__}; give a function")
        if self.lower_is not in get_args(LowerIs):
            raise SettingsError(f"lower_is = {self.lower_is!r} is wrong; use 'global' or 'local'")
        if self.lower_is == "local" and self.feasible_y is not None:
            raise SettingsError(
                "feasible_y is wrong with lower_is = 'local': only the server projects, and it never sees a "
                "client's y; put the constraint into the lower loss, for example by another parametrisation"
            )
        if self.server is not None and not isinstance(self.server, Part) and self.server != "elsewhere":
            raise SettingsError(
                f"server is of type {type(self.server).__name__}; give a Part of rows, or 'elsewhere'"
            )
        if self.lower_is == "local" and self.server is not None:
            raise SettingsError(
                "server is wrong with lower_is = 'local': the server never sees a client's y, so it cannot take "
                "the upper loss there; give the upper rows to clients"
            )
        _ = self.flat_x, self.flat_y, self.own_part  # raises if they are no parameters
        for loss in (self.lower, self.upper):
            if isinstance(loss, Softmax):
                loss.check(self.flat_y.restore(self.flat_y.vector))
        _ = self.at_clients  # made here, because a program that is traced cannot look at the start

    def __getstate__(self) -> dict[str, Any]:
        """What another process is sent: the fields. What is computed from them cannot always be sent."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def flat_x(self) -> Flat:
        """The initial x as a flat vector in its feasible set, and the function that restores its structure."""
        if self.x is None and self.own is not None:
            return Flat(jnp.zeros(0, jnp.float32), lambda v: None)
        flat = flatten(self.x, "x")
        return flat._replace(vector=start_within(self.feasible_x, *flat, "feasible_x"))

    @cached_property
    def flat_y(self) -> Flat:
        """The same for the initial y."""
        flat = flatten(self.y, "y")
        return flat._replace(vector=start_within(self.feasible_y, *flat, "feasible_y"))

    @cached_property
    def regions(self) -> Regions:
        """The feasible sets for flat vectors."""
        return Regions(region(self.feasible_x, self.flat_x.restore), region(self.feasible_y, self.flat_y.restore))

    @cached_property
    def own_part(self) -> OwnPart | None:
        """The variables that each client has for itself, or None."""
        return None if self.own is None else OwnPart(self.own)

    @property
    def size_x(self) -> int:
        """p, the number of upper parameters."""
        return int(self.flat_x.vector.size)

    @property
    def size_y(self) -> int:
        """q, the number of lower parameters."""
        return int(self.flat_y.vector.size)

    def features(self, x: Array, inputs: PyTree) -> PyTree:
        """embed(x, inputs) for a flat x; the inputs themselves when the problem has no `embed`."""
        return inputs if self.embed is None else self.embed(self.flat_x.restore(x), inputs)

    def remember(self, x: Array, data: Arrays) -> Memory | None:
        """The features of all rows at x, and the pullback of `embed`; None when the problem has no `embed`."""
        return remember(self, x, data)

    def oracle(
        self, held: Mapping[str, Array], data: Arrays, memory: Any = None, kept: Mapping[str, Kept] | None = None
    ) -> Oracle:
        """The oracle of one client: derivatives of the losses by JAX."""
        return JaxOracle(self.at_clients, held, data, memory, kept)

    @cached_property
    def at_clients(self) -> Problem:
        """The problem of a client: without the upper loss if the upper rows are at the server."""
        return self if self.server is None else dataclasses.replace(self, upper=nothing, server=None)

    def loss(self, level: str, x: Array, y: Array, batch: Batch) -> Array:
        """The lower or upper loss at flat vectors."""
        function = self.lower if level == "lower" else self.upper
        return function(self.flat_x.restore(x), self.flat_y.restore(y), batch)

    def head(self, level: str) -> OnVectors | None:
        """The lower or upper loss as a head with closed forms at flat vectors; None for any other loss."""
        function = self.lower if level == "lower" else self.upper
        return OnVectors(function, self.flat_y.restore) if isinstance(function, Softmax) else None

    def measure(self, x: Array, y: Array, test: Part) -> Mapping[str, Array]:
        """`metrics` at flat vectors on all of `test`."""
        if self.metrics is None:
            return {}
        weights, ids = jnp.ones(test.rows, jnp.float32), jnp.arange(test.rows)
        features = self.features(x, test.inputs)
        return self.measured(x, y, Batch(test.inputs, test.targets, weights, features, ids=ids))

    def measured(self, x: Array, y: Array, batch: Batch) -> Mapping[str, Array]:
        """`metrics` at flat vectors on a batch."""
        return {} if self.metrics is None else self.metrics(self.flat_x.restore(x), self.flat_y.restore(y), batch)


def minimax(x: PyTree, y: PyTree, loss: Loss, **more: Any) -> Problem:
    """The problem  min_x max_y 1/m Σ_i f_i(x, y): the lower loss is -f. `more` are further fields of a `Problem`.

    f has to be strongly concave in y, and both parts of a client's data are the same rows. Then ∇_y f = 0 at
    y*(x), so the implicit part of the hypergradient is zero, and a method need not estimate it:
    `FedSOBA(minimax=True)`.
    """
    return Problem(x, y, lower=lambda x, y, batch: -loss(x, y, batch), upper=loss, **more)


def nothing(x: Any, y: Any, batch: Batch) -> Array:
    """A loss that is zero everywhere."""
    return jnp.zeros(())


def lower_kind(problem: BilevelProblem) -> LowerIs:
    """Whether clients share the lower level or each has its own; a problem that does not say so shares it."""
    kind: LowerIs = getattr(problem, "lower_is", "global")
    return kind


def constants_of(problem: BilevelProblem) -> str | None:
    """A digest of the numbers of a problem that are not trained; None if it has none."""
    return problem.constants_digest if isinstance(problem, Constants) else None


class Picture(NamedTuple):
    """An image of height x width x colours, with numbers from 0 to 1, and what is written above it."""

    image: np.ndarray
    title: str


class Finding(NamedTuple):
    """What a trained x says about many things of one kind, for a person to look at.

    thing   what they are, such as "client"
    what    what each of them has, such as "weight"
    values  the number of each
    kinds   the kind of each if the truth is known, as it is in a simulation; otherwise empty
    picture   the picture of a thing by its number, if things are images; None otherwise
    names   the name of each, if it has one; otherwise empty
    """

    thing: str
    what: str
    values: Sequence[float]
    kinds: Sequence[str] = ()
    picture: Callable[[int], Picture] | None = None
    names: Sequence[str] = ()


class Task(NamedTuple):
    """The task of a run: a problem, the clients that hold its data, and a measure of the state.

    measure        measure(x, y) gives numbers by name, such as the accuracy on test rows. It is computed at the
                   server and costs the clients nothing
    measure_train  the same on training rows, for `evaluate.train`; None where the server has no such rows
    finding        finding(x, y) says what x means for clients, rows or other things; None if there are none
    closed         the closed forms of the problem, such as a `QuadraticTask`, if it has any
    """

    problem: BilevelProblem
    clients: Clients
    measure: Measure = lambda x, y: {}
    measure_train: Measure | None = None
    finding: Callable[[Array, Array], Finding] | None = None
    closed: Any = None


def task_with_test(problem: BilevelProblem, clients: Clients, test: Part, valid: Part | None = None) -> Task:
    """A task measured by the problem's metrics on rows kept at the server.

    `valid` has rows for the choice of settings, which no client has: their `test_accuracy` is `valid_accuracy`.
    """
    if not isinstance(problem, Measured):
        raise SettingsError("test rows need the metrics of a Problem; give measure(x, y) instead")
    if not problem.traceable:
        own = problem.measure
        return Task(problem, clients, lambda x, y: _both(own, x, y, test, valid))
    device = jax.local_devices()[0]  # Only one device measures; several would each measure everything.
    parts = {"test_": test} if valid is None else {"test_": test, "valid_": valid}
    rows, measured = jax.device_put(parts, device), problem.measure

    @jax.jit
    def compiled(x: Array, y: Array, rows: Mapping[str, Part]) -> dict[str, Any]:
        return _both(measured, x, y, rows["test_"], rows.get("valid_"))

    return Task(problem, clients, lambda x, y: compiled(*jax.device_put((x, y), device), rows))


def _both(measure: Callable[..., Mapping[str, Any]], x: Array, y: Array, test: Part, valid: Part | None) -> Any:
    """The metrics on test rows, and on rows for the choice of settings if there are any."""
    found = dict(measure(x, y, test))
    if valid is not None:
        found |= {"valid_" + name.removeprefix("test_"): value for name, value in measure(x, y, valid).items()}
    return found

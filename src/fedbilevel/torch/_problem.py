"""A bilevel problem whose two groups of parameters are PyTorch modules."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from .._derivatives import JaxOracle
from .._derivatives import remember as remember_by_jax
from ..data import ClientData, Clients, Part
from ..engines import Engine
from ..errors import SettingsError
from ..oracle import Arrays, Kept
from ..problem import Flat, LowerIs, Over
from ._agreement import check_agreement, check_means, check_metrics
from ._batched import Batched
from ._convert import Converted
from ._oracle import TorchOracle, remember, rows_of
from ._parameters import Parameters, Rows, check_apart, computing, digest, from_native, tensor, to_native, tree_map
from ._probing import is_light, measured_names, probe

PyTree = Any


@dataclass(frozen=True, eq=False)
class TorchProblem:
    """Two losses over two modules.

    x, y     upper and lower modules. Their parameters with `requires_grad` are trained, from the values they have;
             buffers and frozen parameters stay as they are. The modules given here are copied, and not changed
    lower    lower(x, y, rows) -> g_i, the loss that y solves: one number, such as a mean over the rows
    upper    upper(x, y, rows) -> f_i, the loss that x serves
    embed    embed(x, inputs) -> features, row by row, which do not depend on y. The losses then read
             `rows.features`, which is computed once in an outer iteration
    metrics  metrics(x, y, rows) -> numbers by name, measured on test rows
    predict  predict(x, y, inputs) -> what the trained modules say about rows of inputs, for use after the run
    lower_is   "global": all clients share one y. "local": every client has its own y_i, which stays with it
    convert  whether the functions are converted to JAX by torchax, so that the engines of JAX run them, which is
             faster. The losses then have to be means over rows, plus terms without rows. What cannot be converted
             is refused, at the latest when a run starts

    The losses are given the modules with the values at which they are taken, and have to use those. They are given
    only real rows (`Rows`), as float32 and int64 tensors, so an ordinary mean over rows is right. `lower` must be
    twice differentiable in y; `embed` needs first derivatives only.
    """

    x: nn.Module
    y: nn.Module
    lower: Callable[[Any, Any, Rows], Tensor]
    upper: Callable[[Any, Any, Rows], Tensor]
    embed: Callable[[Any, Any], PyTree] | None = None
    metrics: Callable[[Any, Any, Rows], Mapping[str, Any]] | None = None
    predict: Callable[[Any, Any, PyTree], PyTree] | None = None
    lower_is: LowerIs = "global"
    convert: bool = False

    chances: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "embed", "metrics", "predict"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name in ("lower", "upper")):
                raise SettingsError(f"{name} is of type {type(value).__name__}; give a function")
        if self.lower_is not in get_args(LowerIs):
            raise SettingsError(f"lower_is = {self.lower_is!r} is wrong; use 'global' or 'local'")
        _ = self.body, self.head
        check_apart(self.x, self.y)
        if self.body.device != self.head.device:
            raise SettingsError(
                f"x is on {self.body.device} and y on {self.head.device}; move both modules to one device"
            )
        _ = self.converted

    def __getstate__(self) -> dict[str, Any]:
        """What another process is sent: the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def body(self) -> Parameters:
        """The parameters of x."""
        return Parameters(self.x, "x")

    @cached_property
    def head(self) -> Parameters:
        """The parameters of y."""
        return Parameters(self.y, "y")

    @cached_property
    def converted(self) -> Converted | None:
        """The functions as functions of JAX; None unless they are to be converted."""
        return Converted(self, self.flat_y) if self.convert else None

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace the oracle: if the functions are converted to JAX."""
        return self.convert

    @property
    def over(self) -> Over:
        """The best way for a simulation to serve clients."""
        return "map" if self.converted is None else self.converted.over

    @cached_property
    def flat_x(self) -> Flat:
        """The initial x as a flat vector, and the function that makes a module of a vector."""
        return _flat(self.body)

    @cached_property
    def flat_y(self) -> Flat:
        """The same for the initial y."""
        return _flat(self.head)

    @property
    def size_x(self) -> int:
        """p, the number of upper parameters."""
        return self.body.size

    @property
    def size_y(self) -> int:
        """q, the number of lower parameters."""
        return self.head.size

    @property
    def constants_digest(self) -> str | None:
        """A digest of buffers and frozen parameters, which must be the same at all sites; None without any."""
        return digest(x=self.body, y=self.head)

    @cached_property
    def _found(self) -> dict[str, bool]:
        """What was found out about the functions when they were first given rows."""
        return {}

    @property
    def stores(self) -> bool:
        """Whether the graph of `embed` is kept for a held x: if it takes at most four times the inputs."""
        return self._found.get("light", True)

    def to_native(self, values: PyTree) -> PyTree:
        """NumPy arrays as tensors, and single numbers as Python's."""
        return to_native(values, self.body.device)

    def from_native(self, values: PyTree) -> PyTree:
        """What a step returns, as NumPy arrays."""
        return from_native(values)

    def remember(self, x: Any, data: Arrays) -> Any:
        """The data as tensors, and the features of all rows at x; the features alone if JAX computes."""
        if self.converted is not None:
            return remember_by_jax(self.converted, x, data)
        if self.embed is not None and "light" not in self._found:
            self._found["light"] = is_light(self, self.tensors_of(data.lower)[0])
        return remember(self, x, data)

    def oracle(
        self, held: Mapping[str, Any], data: Arrays, memory: Any = None, kept: Mapping[str, Kept] | None = None
    ) -> Any:
        """The oracle of one client: derivatives of the losses by PyTorch, or by JAX if they are converted."""
        if self.converted is not None:
            return JaxOracle(self.converted, held, data, memory, kept)
        return TorchOracle(self, held, data, memory, kept)

    def batched(self, clients: Clients, memory_limit: int) -> Engine:
        """The engine that batches the clients of a cohort by `torch.func.vmap`."""
        return Batched(self, clients, memory_limit=memory_limit)

    def function(self, level: str) -> Callable[..., Any]:
        """The lower or upper loss."""
        return self.lower if level == "lower" else self.upper

    def tensors_of(self, part: Any) -> tuple[PyTree, PyTree]:
        """The inputs and targets of a part as tensors, without padding."""
        count = int(part.rows)

        def one(a: Any) -> Tensor:
            return tensor(a[:count], self.head.device)

        return jax.tree.map(one, part.inputs), jax.tree.map(one, part.targets)

    def measured(self, rows: Rows) -> Mapping[str, Any]:
        """The metrics on rows, where the modules are."""
        return {} if self.metrics is None else self.metrics(self.body.module, self.head.module, rows)

    def measure(self, x: Any, y: Any, test: Part) -> Mapping[str, Any]:
        """The metrics at flat vectors on all of `test`, with the features of a block of rows at a time."""
        if self.metrics is None:
            return {}
        if self.converted is not None:
            return self.converted.measure(x, y, *test)
        inputs, targets = self.tensors_of(test)
        at = [self.to_native(np.asarray(v)) for v in (x, y)]
        with torch.no_grad(), computing((self.body, self.body.parts(at[0])), (self.head, self.head.parts(at[1]))):
            return {name: float(value) for name, value in self.measured(rows_of(self, inputs, targets)).items()}

    def check_fit(self, data: ClientData, test: Part | None = None) -> None:
        """Raise unless the functions fit the data and are ones that can be trained, tried on a few rows."""
        for name, part in (("lower", data.lower), ("upper", data.upper)):
            probe(self, name, self.tensors_of(part))
        for rows in (test, data.test):
            if rows is not None:
                self.metric_names(rows)
        if self.converted is not None:
            self._check_conversion(self.converted, data, test)

    def _check_conversion(self, converted: Converted, data: ClientData, test: Part | None) -> None:
        """Raise unless the converted functions are those of PyTorch, tried on a few rows."""
        check_means(self, "lower", data.lower)
        check_means(self, "upper", data.upper)
        check_agreement(self, converted, data)
        if data.test is not None:
            self._check_metrics(converted, data.test, padded=True)
        if test is not None:
            self._check_metrics(converted, test, padded=False)

    def _check_metrics(self, converted: Converted, test: Part, padded: bool) -> None:
        """The same for the metrics; those on rows with padding have to be means over rows."""
        if self.metrics is None:
            return
        if padded:
            check_means(self, "metrics", test)
        check_metrics(self, converted, test)

    def metric_names(self, test: Part) -> tuple[str, ...]:
        """The names of the metrics; raises unless they fit the rows and are single numbers."""
        return () if self.metrics is None else measured_names(self, self.tensors_of(test))

    def wide_loss(self, level: str, data: Arrays) -> Callable[[Any, Any], float]:
        """A loss on all rows in float64, as a function of the flat vectors x and y."""
        body, head = (copy.deepcopy(group) for group in (self.body, self.head))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # a scripted module looks for gradients that are not there
            body.module.double()
            head.module.double()
        inputs, targets = (
            tree_map(lambda a: a.double() if a.is_floating_point() else a, tree)
            for tree in self.tensors_of(getattr(data, level))
        )
        ids = torch.arange(int(getattr(data, level).rows))

        def loss(x: Any, y: Any) -> float:
            vectors = [torch.from_numpy(np.array(v, np.float64)).to(self.head.device) for v in (x, y)]
            with torch.no_grad(), computing((body, body.parts(vectors[0])), (head, head.parts(vectors[1]))):
                features = inputs if self.embed is None else self.embed(body.module, inputs)
                return float(self.function(level)(body.module, head.module, Rows(inputs, targets, features, ids)))

        return loss


def _flat(group: Parameters) -> Flat:
    """The initial parameters, which may first be asked for within a program but do not depend on it."""
    with jax.ensure_compile_time_eval():
        return Flat(jnp.asarray(group.vector), group.trained)

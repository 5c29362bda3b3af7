"""A client's derivatives by PyTorch, on flat float32 tensors.

    f_x = ∇_x f_i    f_y = ∇_y f_i    g_y = ∇_y g_i    g_yy v = ∇²_y g_i v    g_xy v = ∇_x∇_y g_i v

With `embed`, the features of all rows at the held x are computed once, with their graph unless that takes too much
memory. All y-derivatives use the features. g_xy v is a double backward through the loss as a function of features
and y, and then one ordinary backward through `embed`. So a body never needs second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch
from torch import Tensor
from torch.autograd import grad

from ..errors import StepError
from ..oracle import Arrays, Directions, Kept, recall
from ..steps import Draw, PartName, Stream
from ._parameters import Parameters, Rows, computing, tensors, tree_map

PyTree = Any
Pullback = Callable[[Sequence[Tensor | None]], Tensor]


class Losses(Protocol):
    """What the oracle needs of a problem."""

    @property
    def body(self) -> Parameters: ...

    @property
    def head(self) -> Parameters: ...

    @property
    def embed(self) -> Any: ...

    @property
    def metrics(self) -> Any: ...

    @property
    def stores(self) -> bool:
        """Whether the graph of `embed` is kept for a held x."""

    def tensors_of(self, part: Any) -> tuple[PyTree, PyTree]:
        """The inputs and targets of a part as tensors, without padding."""

    def function(self, level: str) -> Callable[..., Any]:
        """The loss of a level, as the user wrote it."""

    def measured(self, rows: Rows) -> Mapping[str, Any]:
        """The metrics on rows, where the modules are."""


class Stored(NamedTuple):
    """A part of a client's data as tensors, and its features at the held x: detached, and with their graph."""

    inputs: PyTree
    targets: PyTree
    features: PyTree
    graph: PyTree


class Memory(NamedTuple):
    """What a client computes once for a new x. `leaves` are the beginning of the graphs."""

    lower: Stored
    upper: Stored
    leaves: list[Tensor]


def remember(problem: Losses, x: Tensor, data: Arrays) -> Memory:
    """The data as tensors, and the features at x."""
    leaves = problem.body.leaves(x)
    return Memory(_stored(problem, leaves, data.lower), _stored(problem, leaves, data.upper), leaves)


def _stored(problem: Losses, leaves: list[Tensor], part: Any) -> Stored:
    inputs, targets = problem.tensors_of(part)
    if problem.embed is None:
        return Stored(inputs, targets, inputs, None)
    with computing((problem.body, leaves)), torch.set_grad_enabled(problem.stores):
        graph = problem.embed(problem.body.module, inputs)
    features = tree_map(torch.Tensor.detach, graph)
    return Stored(inputs, targets, features, graph if problem.stores else None)


class LowerGradient:
    """∇_y g_i of a client as a function, and the local steps along it without a vector put together in between."""

    def __init__(self, oracle: TorchOracle) -> None:
        self._oracle = oracle

    def __call__(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """∇_y g_i(x, y; ζ)"""
        return self._oracle.gradient_y("lower", y, zeta, at)

    def svrg(self, anchor: Tensor, q: Tensor, step: float, stream: Stream) -> Tensor:
        """The steps of `steps.svrg`."""
        c, v = self._oracle, anchor.clone()
        if stream.active[0]:
            v -= step * q
        mine, first = c.head.leaves(v), c.head.leaves(anchor)
        full = stream.draws.index is None
        correction = q - self(anchor, stream.draws) if full else None

        def direction(loss: Callable[[list[Tensor]], Tensor]) -> Tensor:
            here = c.head.flat(_grad(loss(mine), mine), mine)
            if correction is not None:
                return here + correction
            return here - c.head.flat(_grad(loss(first), first), first) + q

        return self._walked(v, step, stream, direction, 1)

    def sgd(self, start: Tensor, step: float, stream: Stream) -> Tensor:
        """The steps of `steps.sgd`."""
        c, v = self._oracle, start.clone()
        mine = c.head.leaves(v)
        return self._walked(v, step, stream, lambda loss: c.head.flat(_grad(loss(mine), mine), mine), 0)

    def _walked(
        self, v: Tensor, step: float, stream: Stream, direction: Callable[..., Tensor], begin: int
    ) -> Tensor:
        """Move v, whose parts the leaves are, along the directions on the draws of a stream."""
        c, function, modules = self._oracle, self._oracle.problem.function("lower"), self._oracle.modules
        every = c.every("lower", stream.draws)
        with computing((c.body, c.body.parts(c.x)), (c.head, c.head.parts(v))):
            for i in (np.flatnonzero(stream.active[begin:]) + begin).tolist():
                rows = every(i)

                def loss(leaves: list[Tensor], rows: Rows = rows) -> Tensor:
                    c.head.put(leaves)
                    return function(*modules, rows)

                v -= step * direction(loss)
        return v


class TensorOracle:
    """What the two oracles of PyTorch share: a client's vectors, and what is made of single products."""

    hessian: Callable[..., Callable[[Any], Any]]
    g_xy: Callable[..., Tensor]

    def __init__(self, head: Parameters, held: Mapping[str, Tensor], kept: Mapping[str, Kept] | None) -> None:
        self.head, self._held, self._kept = head, held, kept or {}

    @property
    def x(self) -> Tensor:
        return self._held["x"]

    @property
    def y(self) -> Tensor:
        return self._held["y"]

    @property
    def y_start(self) -> Tensor:
        return torch.from_numpy(self.head.vector).to(self.head.device)

    def held(self, name: str) -> Tensor:
        """A vector that the server gave the client to hold, by its name."""
        return self._held[name]

    def own(self, name: str, default: PyTree) -> PyTree:
        """The `Own` field of this name that an earlier step returned, or the default if there is none yet."""
        return recall(self._kept, name, default)

    def g_yy(self, y: Tensor, v: Tensor, u: Draw, at: Tensor | None = None) -> Tensor:
        """∇²_y g_i(x, y; u) v"""
        return self.hessian(y, u, at)(v)

    def hessian_matrices(self, y: Tensor, u: Stream, at: Tensor | None = None) -> Tensor:
        """∇²_y g_i(x, y; u) as a matrix, stacked over the draws of u; on all rows there is one."""
        draws = u.draws
        each = [draws] if draws.index is None else [draw_at(draws, i) for i in range(len(u.active))]
        unit = torch.eye(self.head.size, device=y.device)
        return torch.stack([torch.stack([*map(self.hessian(y, rows, at), unit)]) for rows in each])

    def mixed_matrix(self, y: Tensor, chi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x∇_y g_i(x, y; χ) as a matrix, with a row for each component of x."""
        unit = torch.eye(self.head.size, device=y.device)
        return torch.stack([self.g_xy(y, e, chi, at) for e in unit], dim=1)

    def _at(self, at: Tensor | None) -> Tensor:
        return self.x if at is None else at


class TorchOracle(TensorOracle):
    """The derivatives of one client's losses at the vectors that it holds, by PyTorch.

    Stored features are used if the x of a derivative is the held `c.x` itself.
    """

    def __init__(
        self,
        problem: Losses,
        held: Mapping[str, Tensor],
        data: Arrays,
        memory: Any,
        kept: Mapping[str, Kept] | None,
    ) -> None:
        super().__init__(problem.head, held, kept)
        self.problem, self._data, self._memory, self.body = problem, data, memory, problem.body
        self.modules = problem.body.module, problem.head.module
        self.g_y = LowerGradient(self)
        self._tensors: dict[str, tuple[PyTree, PyTree]] = {}

    def f(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """f_i(x, y; ξ)"""
        return self._value("upper", y, xi, at)

    def g(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """g_i(x, y; ζ)"""
        return self._value("lower", y, zeta, at)

    def f_y(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_y f_i(x, y; ξ)"""
        return self.gradient_y("upper", y, xi, at)

    def f_x(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x f_i(x, y; ξ)"""
        return self._gradient_x("upper", y, xi, at)

    def g_x(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x g_i(x, y; ζ)"""
        return self._gradient_x("lower", y, zeta, at)

    def g_xy(self, y: Tensor, v: Tensor, chi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x ⟨∇_y g_i(x, y; χ), v⟩"""
        direct, features, pullback, rows = self._with_pullback("lower", chi, at)
        leaves = self.head.leaves(y)
        with self._computing(direct, leaves):
            g_y = _grad(self._loss("lower", rows), leaves, create_graph=True)
            found = _grad(_dot(g_y, self.head.parts(v)), direct + features)
        return pullback(found)

    def directions(self, y: Tensor, v: Tensor, zeta: Draw, xi: Draw, at: Tensor | None = None) -> Directions:
        """f_x - g_xy v, g_y and g_yy v - f_y, with one pass through `embed` for each part."""
        direct, features, pullback, rows = self._with_pullback("upper", xi, at)
        leaves = self.head.leaves(y)
        with self._computing(direct, leaves):
            found = _grad(self._loss("upper", rows), leaves + direct + features)
        f_y, f_x = self.head.flat(found[: len(leaves)], leaves), pullback(found[len(leaves) :])
        direct, features, pullback, rows = self._with_pullback("lower", zeta, at)
        with self._computing(direct, leaves):
            g_y = _grad(self._loss("lower", rows), leaves, create_graph=True)
            found = _grad(_dot(g_y, self.head.parts(v)), leaves + direct + features)
        g_yy, g_xy = self.head.flat(found[: len(leaves)], leaves), pullback(found[len(leaves) :])
        return Directions(f_x - g_xy, self.head.flat(g_y, leaves).detach(), g_yy - f_y)

    def hessian(self, y: Tensor, u: Draw, at: Tensor | None = None) -> Callable[[Any], Any]:
        """The function v ↦ ∇²_y g_i(x, y; u) v, with one forward pass for all products."""
        x, leaves, rows = self.body.parts(self._at(at)), self.head.leaves(y), self._rows("lower", u, at)
        with self._computing(x, leaves):
            g_y = _grad(self._loss("lower", rows), leaves, create_graph=True)

        def product(v: Tensor) -> Tensor:
            with self._computing(x, leaves):
                found = _grad(_dot(g_y, self.head.parts(v)), leaves, retain_graph=True)
            return self.head.flat(found, leaves)

        return product

    def metrics(self, y: Tensor, names: tuple[str, ...], at: Tensor | None = None) -> Tensor:
        """The problem's metrics of these names at (x, y), on all test rows of the client."""
        if self._data.test is None:
            raise StepError(
                "the client has no test rows, so it cannot measure metrics; give ClientData a test part"
            )
        inputs, targets = self.problem.tensors_of(self._data.test)
        with (
            torch.no_grad(),
            computing((self.body, self.body.parts(self._at(at))), (self.head, self.head.parts(y))),
        ):
            found = self.problem.measured(rows_of(self.problem, inputs, targets))
        return torch.stack([torch.as_tensor(found[name], dtype=torch.float32) for name in names])

    def gradient_y(self, part: PartName, y: Tensor, rows: Draw, at: Tensor | None) -> Tensor:
        """The gradient of a loss by y."""
        leaves, own = self.head.leaves(y), self._rows(part, rows, at)
        with self._computing(self.body.parts(self._at(at)), leaves):
            return self.head.flat(_grad(self._loss(part, own), leaves), leaves)

    def every(self, part: PartName, draws: Draw) -> Callable[[int], Rows]:
        """The rows of the draw of each number, at the held x."""
        if draws.index is None:
            whole = self._rows(part, draws, None)
            return lambda i: whole
        index, counts = self._index(draws.index), np.count_nonzero(draws.weight, axis=-1)
        size = draws.index.shape[-1]
        inputs, targets = self._all(part)
        stored = None if self._memory is None else getattr(self._memory, part).features

        def rows(i: int) -> Rows:
            ids = index[i] if counts[i] == size else index[i, : counts[i]]
            own, features = _take(inputs, ids), None if stored is None else _take(stored, ids)
            if features is None:
                features = self._embedded(own, self.x)
            return Rows(own, _take(targets, ids), features, ids)

        return rows

    def _stored(self, at: Tensor | None) -> bool:
        return self._memory is not None and (at is None or at is self._held.get("x"))

    def _index(self, index: Any) -> Tensor:
        return torch.from_numpy(index).to(self.head.device) if isinstance(index, np.ndarray) else index

    def _all(self, part: PartName) -> tuple[PyTree, PyTree]:
        """The inputs and targets of a part."""
        if self._memory is not None:
            stored: Stored = getattr(self._memory, part)
            return stored.inputs, stored.targets
        if part not in self._tensors:
            self._tensors[part] = self.problem.tensors_of(getattr(self._data, part))
        return self._tensors[part]

    def _drawn(self, part: PartName, draw: Draw) -> Rows:
        """The rows of a draw, with their inputs in the place of features."""
        inputs, targets = self._all(part)
        if draw.index is None:
            count = len(tensors(inputs)[0])
            return Rows(inputs, targets, inputs, torch.arange(count, device=self.head.device))
        ids = self._index(draw.index)[: np.count_nonzero(draw.weight)]
        inputs = _take(inputs, ids)
        return Rows(inputs, _take(targets, ids), inputs, ids)

    def _rows(self, part: PartName, draw: Draw, at: Tensor | None) -> Rows:
        """The rows of a draw with their features at x, which have no graph."""
        rows = self._drawn(part, draw)
        if self.problem.embed is None:
            return rows
        if self._stored(at):
            features = getattr(self._memory, part).features
            return rows._replace(features=features if draw.index is None else _take(features, rows.ids))
        return rows._replace(features=self._embedded(rows.inputs, self._at(at)))

    def _embedded(self, inputs: PyTree, x: Tensor) -> PyTree:
        """The features of inputs, without a graph."""
        if self.problem.embed is None:
            return inputs
        with torch.no_grad(), computing((self.body, self.body.parts(x))):
            return self.problem.embed(self.body.module, inputs)

    def _with_pullback(
        self, part: PartName, draw: Draw, at: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], Pullback, Rows]:
        """Leaves for x and for the features, the function from gradients by both to that by x, and the rows."""
        x, rows = self._at(at), self._drawn(part, draw)
        direct = self.body.leaves(x)
        if self.problem.embed is None:
            return direct, [], lambda found: self.body.flat(found, direct), rows
        stored = getattr(self._memory, part).graph if self._stored(at) and draw.index is None else None
        if stored is not None:
            begin, graph = self._memory.leaves, stored
        else:
            begin = self.body.leaves(x)
            with computing((self.body, begin)):
                graph = self.problem.embed(self.body.module, rows.inputs)
        features = tree_map(_leaf, graph)
        ends = [(a, b) for a, b in zip(tensors(graph), tensors(features), strict=True) if b.requires_grad]

        def pullback(found: Sequence[Tensor | None]) -> Tensor:
            straight = self.body.flat(found[: len(direct)], direct)
            used = [(a, g) for (a, _), g in zip(ends, found[len(direct) :], strict=True) if g is not None]
            if not used:
                return straight
            outputs, cotangents = zip(*used, strict=True)
            with computing((self.body, begin)):
                through = grad(outputs, begin, cotangents, retain_graph=stored is not None, allow_unused=True)
            return straight + self.body.flat(through, begin)

        return direct, [b for _, b in ends], pullback, rows._replace(features=features)

    def _gradient_x(self, part: PartName, y: Tensor, draw: Draw, at: Tensor | None) -> Tensor:
        direct, features, pullback, rows = self._with_pullback(part, draw, at)
        with self._computing(direct, self.head.parts(y)):
            found = _grad(self._loss(part, rows), direct + features)
        return pullback(found)

    def _value(self, part: PartName, y: Tensor, draw: Draw, at: Tensor | None) -> Tensor:
        rows = self._rows(part, draw, at)
        with torch.no_grad(), self._computing(self.body.parts(self._at(at)), self.head.parts(y)):
            return self._loss(part, rows)

    def _computing(self, x: list[Tensor], y: list[Tensor]) -> AbstractContextManager[None]:
        """Let both modules compute with tensors, also in the backward pass: it may do the forward pass again."""
        return computing((self.body, x), (self.head, y))

    def _loss(self, part: PartName, rows: Rows) -> Tensor:
        made: Tensor = self.problem.function(part)(*self.modules, rows)
        return made


def rows_of(problem: Losses, inputs: PyTree, targets: PyTree, block: int = 1024) -> Rows:
    """All rows of a part with their features, which are computed block by block, where the modules are."""
    count = len(tensors(inputs)[0])
    features = inputs
    if problem.embed is not None:
        cuts = [tree_map(itemgetter(slice(i, i + block)), inputs) for i in range(0, count, block)]
        made = [problem.embed(problem.body.module, cut) for cut in cuts]
        features = made[0] if len(made) == 1 else jax.tree.map(lambda *a: torch.cat(a), *made)
    return Rows(inputs, targets, features, torch.arange(count, device=problem.head.device))


def draw_at(draws: Draw, i: int) -> Draw:
    """One draw of a stream."""
    return Draw(draws.index[i], draws.weight[i])


def _leaf(a: Tensor) -> Tensor:
    a = a.detach()
    return a.requires_grad_() if a.is_floating_point() else a


def _take(tree: PyTree, ids: Tensor) -> PyTree:
    return tree_map(lambda a: a.index_select(0, ids), tree)


def _grad(loss: Tensor, leaves: Sequence[Tensor], **how: bool) -> tuple[Tensor | None, ...]:
    """The gradients of a number; None for leaves on which it does not depend."""
    if not loss.requires_grad:
        return (None,) * len(leaves)
    return grad(loss, leaves, allow_unused=True, **how)


def _dot(found: Sequence[Tensor | None], v: Sequence[Tensor]) -> Tensor:
    return sum((torch.sum(a * b) for a, b in zip(found, v, strict=True) if a is not None), torch.zeros(()))

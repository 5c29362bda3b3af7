"""An engine that batches the clients of a cohort by `torch.func.vmap`.

A step is run once for all clients that have equal numbers of rows and draws; rows are never padded. So clients of
unequal sizes are served in several groups. Inside of `vmap` the derivatives are those of `torch.func`. A function
of the user that `vmap` cannot batch, such as one that looks at values or changes tensors in place, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from ..data import Clients
from ..engines import Call, Capabilities, ClientStates, Replies, load_unpadded, perform, prepare, recalled
from ..errors import FedBilevelError, SettingsError, one_line
from ..oracle import Kept
from ..steps import Draw, PartName, Stream
from ._oracle import Losses, TensorOracle
from ._parameters import Rows, computing, from_native, tensors, to_native, tree_map

PyTree = Any
ALL = Draw(None, None)


class Functions:
    """The losses and `embed` as functions of flat vectors."""

    def __init__(self, problem: Losses) -> None:
        self.problem, self.body, self.head = problem, problem.body, problem.head

    def embed(self, x: Tensor, inputs: PyTree) -> PyTree:
        """The features of inputs at x."""
        if self.problem.embed is None:
            return inputs
        with computing((self.body, self.body.parts(x))):
            return self.problem.embed(self.body.module, inputs)

    def loss(self, level: str, x: Tensor, y: Tensor, rows: Rows) -> Tensor:
        """The loss of a level on rows."""
        with computing((self.body, self.body.parts(x)), (self.head, self.head.parts(y))):
            made: Tensor = self.problem.function(level)(self.body.module, self.head.module, rows)
        return made


class LowerGradient:
    """∇_y g_i as a function, with both gradients of an SVRG step as one."""

    def __init__(self, oracle: FuncOracle) -> None:
        self._oracle = oracle

    def __call__(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """∇_y g_i(x, y; ζ)"""
        return self._oracle.gradient_y("lower", y, zeta, at)

    def svrg(self, anchor: Tensor, q: Tensor, step: float, stream: Stream) -> Tensor | None:
        """The steps of `steps.svrg` on minibatches."""
        if stream.draws.index is None:
            return None
        c, v = self._oracle, anchor - step * q if stream.active[0] else anchor
        for i in np.flatnonzero(stream.active[1:]) + 1:
            rows = c.rows("lower", Draw(stream.draws.index[i], stream.draws.weight[i]), None)

            def both(v: Tensor, a: Tensor, rows: Rows = rows) -> Tensor:
                return c.loss("lower", c.x, v, rows) + c.loss("lower", c.x, a, rows)

            here, there = grad(both, (0, 1))(v, anchor)
            v = v - step * (here - there + q)
        return v

    def sgd(self, start: Tensor, step: float, stream: Stream) -> None:
        """No faster way than one gradient after the other is known."""
        return None


class FuncOracle(TensorOracle):
    """The derivatives of one client's losses by `torch.func`, inside of a `vmap` over clients."""

    def __init__(
        self, functions: Functions, held: Mapping[str, Tensor], data: Any, features: Any, kept: Mapping[str, Kept]
    ) -> None:
        super().__init__(functions.head, held, kept)
        self._functions, self._data, self._features, self.loss = functions, data, features, functions.loss
        self.g_y = LowerGradient(self)

    def f(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """f_i(x, y; ξ)"""
        return self.loss("upper", self._at(at), y, self.rows("upper", xi, at))

    def g(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """g_i(x, y; ζ)"""
        return self.loss("lower", self._at(at), y, self.rows("lower", zeta, at))

    def f_y(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_y f_i(x, y; ξ)"""
        return self.gradient_y("upper", y, xi, at)

    def hessian(self, y: Tensor, u: Draw, at: Tensor | None = None) -> Callable[[Any], Any]:
        """The function v ↦ ∇²_y g_i(x, y; u) v, with one forward pass for all products."""
        x, rows = self._at(at), self.rows("lower", u, at)
        pullback = vjp(grad(lambda w: self.loss("lower", x, w, rows)), y)[1]
        return lambda v: pullback(v)[0]

    def f_x(self, y: Tensor, xi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x f_i(x, y; ξ)"""
        return self._gradient_x("upper", xi, at, lambda x, rows: self.loss("upper", x, y, rows))

    def g_x(self, y: Tensor, zeta: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x g_i(x, y; ζ)"""
        return self._gradient_x("lower", zeta, at, lambda x, rows: self.loss("lower", x, y, rows))

    def g_xy(self, y: Tensor, v: Tensor, chi: Draw, at: Tensor | None = None) -> Tensor:
        """∇_x ⟨∇_y g_i(x, y; χ), v⟩"""

        def slope(x: Tensor, rows: Rows) -> Tensor:
            return torch.sum(grad(lambda w: self.loss("lower", x, w, rows))(y) * v)

        return self._gradient_x("lower", chi, at, slope)

    def metrics(self, y: Tensor, names: tuple[str, ...], at: Tensor | None = None) -> Tensor:
        """Metrics are measured by the loop."""
        raise SettingsError("federation.engine = 'batched' measures no metrics of clients; use 'loop'")

    def gradient_y(self, part: PartName, y: Tensor, rows: Draw, at: Tensor | None) -> Tensor:
        """The gradient of a loss by y."""
        x, own = self._at(at), self.rows(part, rows, at)
        return grad(lambda w: self.loss(part, x, w, own))(y)

    def _drawn(self, part: PartName, draw: Draw) -> Rows:
        inputs, targets = self._data[part]
        if draw.index is None:
            count = len(tensors(inputs)[0])
            return Rows(inputs, targets, inputs, torch.arange(count, device=self.head.device))
        ids = draw.index[: np.count_nonzero(draw.weight)]
        inputs = _take(inputs, ids)
        return Rows(inputs, _take(targets, ids), inputs, ids)

    def rows(self, part: PartName, draw: Draw, at: Tensor | None) -> Rows:
        """The rows of a draw with their features at x."""
        rows = self._drawn(part, draw)
        if self._functions.problem.embed is None:
            return rows
        if self._features is not None and (at is None or at is self._held.get("x")):
            features = self._features[part]
            return rows._replace(features=features if draw.index is None else _take(features, rows.ids))
        return rows._replace(features=self._functions.embed(self._at(at), rows.inputs))

    def _gradient_x(self, part: PartName, draw: Draw, at: Tensor | None, function: Any) -> Tensor:
        x, rows = self._at(at), self._drawn(part, draw)
        if self._functions.problem.embed is None:
            return grad(lambda v: function(v, rows))(x)
        features, pullback = vjp(lambda v: self._functions.embed(v, rows.inputs), x)
        direct, through = grad(lambda v, f: function(v, rows._replace(features=f)), (0, 1))(x, features)
        return direct + pullback(through)[0]


class _Adapter(NamedTuple):
    """What `perform` asks for an oracle."""

    functions: Functions

    def oracle(self, held: Any, data: Any, memory: Any = None, kept: Any = None) -> Any:
        return FuncOracle(self.functions, held, data, memory, kept or {})


class Member(NamedTuple):
    """A client of a call: its data, its draws, what it has kept, and the arguments of its own."""

    client: int
    data: dict[str, Any]
    draws: dict[str, Any]
    kept: dict[str, Kept]
    rows: dict[str, np.ndarray]

    @property
    def kind(self) -> Any:
        """What has to be equal for clients that are batched together."""
        shapes = tuple(tuple(t.shape) for t in tensors(self.data))
        drawn = tuple((name, _still(each)) for name, each in sorted(self.draws.items()))
        return shapes, drawn, tuple((name, bool(each.known)) for name, each in sorted(self.kept.items()))


class Batched:
    """Runs the clients of a cohort as one batch, by `torch.func.vmap`.

    memory_limit   MiB of data that are stacked for one batch; a larger cohort is split
    """

    def __init__(self, problem: Any, clients: Clients, *, memory_limit: int = 1024) -> None:
        self.problem, self.clients = problem, clients
        self._states, self._limit = ClientStates(limit=memory_limit), memory_limit * 2**20
        self.capabilities = Capabilities(states=self._states)
        self._functions = Functions(problem)
        self._stacked: dict[tuple[int, ...], Any] = {}
        self._features: dict[tuple[int, ...], tuple[int, Any]] = {}
        if min(clients.capacity) > 0:
            self._try()

    def replies(self, call: Call) -> Iterator[Replies]:
        groups: dict[Any, list[Member]] = {}
        for client in call.clients:
            member = self._member(call, client)
            groups.setdefault(member.kind, []).append(member)
        found: dict[int, Any] = {}
        for members in groups.values():
            size = max(1, int(self._limit // max(1, sum(t.nbytes for t in tensors(members[0].data)))))
            for start in range(0, len(members), size):
                found |= self._serve(call, members[start : start + size])
        self._stacked = {key: self._stacked[key] for key in list(self._stacked)[-len(groups) :]}
        replies = [found[client] for client in call.clients]
        yield Replies(clients=call.clients, reply=jax.tree.map(lambda *a: np.stack(a), *replies))

    def close(self) -> None:
        self._stacked.clear()
        self._features.clear()
        self._states.clear()

    def _member(self, call: Call, client: int) -> Member:
        size = self.clients.size(client)
        arrays = load_unpadded(self.clients, client)
        data = {part: self.problem.tensors_of(getattr(arrays, part)) for part in ("lower", "upper")}
        draws = prepare(call, self.problem, client, size, size)
        kept = recalled(call, self.problem, self._states, client, size)
        rows = {name: np.asarray(each.values[client], np.float32) for name, each in call.rows.items()}
        return Member(client, data, draws, kept, rows)

    def _serve(self, call: Call, members: list[Member]) -> dict[int, Any]:
        """The replies of clients of one kind, by client; what they keep is kept."""
        clients, first = tuple(m.client for m in members), members[0]
        if clients not in self._stacked:
            self._stacked[clients] = jax.tree.map(lambda *a: torch.stack(a), *(m.data for m in members))
        data = self._stacked[clients]
        features = self._embedded(call, clients, data)
        vectors, arrays = (self._native(tree) for tree in (call.vectors, call.arrays))
        each = jax.tree.map(
            lambda *a: torch.from_numpy(np.stack(a)),
            *((m.rows, {n: k.leaves for n, k in m.kept.items()}, _moving(m.draws)) for m in members),
        )
        leaves, tree = jax.tree.flatten((data, features, each))
        made: list[Any] = []

        def one(*own: Tensor) -> tuple[Tensor, ...]:
            data, features, (rows, kept, moving) = jax.tree.unflatten(tree, own)
            known = {name: Kept(bool(first.kept[name].known), leaves) for name, leaves in kept.items()}
            draws = {n: _joined(each, moving[n]) for n, each in first.draws.items()}
            adapter: Any = _Adapter(self._functions)
            reply = perform(adapter, call, vectors, arrays, rows, draws, known, data, features)
            values, structure = jax.tree.flatten(reply)
            made.append(structure)
            return tuple(torch.as_tensor(v, dtype=torch.float32) for v in values)

        try:
            values = vmap(one)(*leaves)
        except FedBilevelError:
            raise
        except Exception as error:
            raise _refusal(error, f"{call}") from error
        reply, own = jax.tree.unflatten(made[-1], [from_native(v) for v in values])
        found = {}
        for i, client in enumerate(clients):
            if own:
                state = jax.tree.map(lambda a, i=i: a[i], own)
                self._states.write(client, call.clock, state, call.settled)
            found[client] = jax.tree.map(lambda a, i=i: a[i], reply)
        return found

    def _native(self, values: Any) -> Any:
        return to_native(jax.tree.map(np.asarray, values), self.problem.body.device)

    def _embedded(self, call: Call, clients: tuple[int, ...], data: Any) -> Any:
        """The features of the rows of a group at the held x, which depend on nothing else."""
        if "x" not in call.held or self.problem.embed is None:
            return None
        version, x = call.held["x"].version, call.held["x"].value
        if self._features.get(clients, (None,))[0] != version:
            self._features = {c: f for c, f in self._features.items() if f[0] == version}
            vector, made = self._native(x), dict[str, Any]()
            for part, (inputs, _) in data.items():
                count, rows = tensors(inputs)[0].shape[:2]
                with torch.no_grad():
                    flat = self._functions.embed(vector, tree_map(lambda a: a.flatten(0, 1), inputs))
                made[part] = tree_map(partial(_unflatten, (count, rows)), flat)
            self._features[clients] = version, made
        return self._features[clients][1]

    def _try(self) -> None:
        """Raise if `vmap` cannot batch the losses, found by the derivatives of two copies of a client."""
        arrays = load_unpadded(self.clients, 0)
        few = {part: self.problem.tensors_of(getattr(arrays, part)) for part in ("lower", "upper")}
        data = tree_map(lambda a: torch.stack([a[:2], a[:2]]), few)
        x, y = (
            torch.from_numpy(group.vector).to(group.device) for group in (self.problem.body, self.problem.head)
        )
        leaves, tree = jax.tree.flatten(data)

        def one(*own: Tensor) -> tuple[Tensor, ...]:
            c = FuncOracle(self._functions, {"x": x, "y": y}, jax.tree.unflatten(tree, own), None, {})
            return c.f_x(y, ALL), c.g_yy(y, y, ALL), c.g_xy(y, y, ALL)

        try:
            vmap(one)(*leaves)
        except FedBilevelError:
            raise
        except Exception as error:
            raise _refusal(error, "the start") from error


def _refusal(error: Exception, where: str) -> SettingsError:
    why = one_line((str(error).strip().splitlines() or [type(error).__name__])[0], 200).rstrip(".")
    return SettingsError(
        f"federation.engine = 'batched' is wrong for this problem: torch.func.vmap cannot batch it "
        f"({where}: {why}); use 'loop'"
    )


def _still(drawn: Any) -> Any:
    """What clients of one batch have in common of a draw."""
    if isinstance(drawn, Stream):
        return drawn.active.tobytes(), _still(drawn.draws)
    return None if drawn.index is None else (drawn.index.shape, np.count_nonzero(drawn.weight, axis=-1).tobytes())


def _moving(draws: dict[str, Any]) -> dict[str, Any]:
    """The places of the rows, which differ from client to client."""
    return {name: (each.draws if isinstance(each, Stream) else each).index for name, each in draws.items()}


def _joined(drawn: Any, index: Any) -> Any:
    """A draw with the places of another client."""
    return (
        drawn._replace(draws=_joined(drawn.draws, index))
        if isinstance(drawn, Stream)
        else drawn._replace(index=index)
    )


def _unflatten(shape: tuple[int, int], a: Tensor) -> Tensor:
    return a.unflatten(0, shape)


def _take(tree: PyTree, ids: Tensor) -> PyTree:
    return tree_map(lambda a: a[ids], tree)

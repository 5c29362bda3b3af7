"""The trainable parameters of a module as one flat float32 vector, and rows of data as tensors.

A module is evaluated at other values by putting tensors in the places of its parameters for the time of a call.
That is what `torch.func.functional_call` does for a forward pass; here it also holds for a loss that looks at
`module.parameters()`, and it costs a few assignments. A parameter that is used in several places (tied weights)
is one part of the vector.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from ..errors import SettingsError, one_line
from ..files import arrays_digest

PyTree = Any


class Rows(NamedTuple):
    """Rows of data as a loss sees them. They are never padded, so an ordinary mean over them is right.

    `features` is `embed(x, inputs)`, or `inputs` when the problem has no `embed`. `ids` are the places of the rows
    among the client's rows of this part.
    """

    inputs: PyTree
    targets: PyTree
    features: PyTree
    ids: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows, as losses for JAX write it."""
        return values.mean()


class Parameters:
    """The trainable parameters of a module of the user, in a copy that nobody else changes."""

    def __init__(self, module: Any, name: str) -> None:
        if not isinstance(module, nn.Module):
            raise SettingsError(
                f"{name} is of type {type(module).__name__}; give an nn.Module, and put single parameters into "
                "one, for example into an nn.ParameterList"
            )
        check_module(module, name)
        try:
            self.module = copy.deepcopy(module)
        except Exception as error:
            raise SettingsError(
                f"{name} is a {type(module).__name__} that cannot be copied: {one_line(str(error), 150)}; give a "
                "module that copy.deepcopy can copy, before it has computed anything"
            ) from None
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not named:
            raise SettingsError(
                f"{name} is a {type(module).__name__} without a parameter to train; give one whose requires_grad "
                "is True"
            )
        self.names, self._parameters = [n for n, _ in named], [p for _, p in named]
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise SettingsError(
                f"{name} has parameters on {sorted(map(str, devices))}; move the module to one device"
            )
        (self.device,) = devices
        self._shapes = [p.shape for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        places = {id(p): list[tuple[Any, str]]() for p in self._parameters}
        for owner in self.module.modules():
            for key, p in owner._parameters.items():
                if id(p) in places:
                    places[id(p)].append((owner._parameters, key))
        self._places = self._found(places)
        self.vector = np.concatenate([p.detach().cpu().numpy().ravel() for p in self._parameters])
        if not np.isfinite(self.vector).all():
            raise SettingsError(f"{name} has a parameter that is not finite; start from finite parameters")

    def _found(self, places: dict[int, list[tuple[Any, str]]]) -> list[tuple[int, Any, str]]:
        """Where each parameter stands. A scripted module makes new objects, so it is looked for by its name."""
        if all(places.values()):
            return [(i, *each) for i, p in enumerate(self._parameters) for each in places[id(p)]]
        found = []
        for i, path in enumerate(self.names):
            owner, _, key = path.rpartition(".")
            found.append((i, self.module.get_submodule(owner)._parameters, key))
        return found

    @property
    def size(self) -> int:
        """The number of trainable numbers."""
        return len(self.vector)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """A flat vector as tensors of the parameters' shapes, which share its memory and its graph."""
        cut = vector.split(self._sizes) if len(self._sizes) > 1 else (vector,)
        return [part.view(shape) for part, shape in zip(cut, self._shapes, strict=True)]

    def cut(self, vector: Any) -> list[Any]:
        """The same for a vector of another library."""
        ends = np.cumsum(self._sizes)
        return [
            vector[end - size : end].reshape(tuple(shape))
            for end, size, shape in zip(ends, self._sizes, self._shapes, strict=True)
        ]

    def leaves(self, vector: Tensor) -> list[Tensor]:
        """The same as the beginning of a graph, by which derivatives are taken."""
        return [part.detach().requires_grad_() for part in self.parts(vector)]

    def flat(self, parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
        """Tensors as a flat vector; None is a part on which nothing depends."""
        return torch.cat(
            [
                (torch.zeros_like(as_) if part is None else part).reshape(-1)
                for part, as_ in zip(parts, like, strict=True)
            ]
        )

    def put(self, parts: Sequence[Tensor]) -> None:
        """Let the module compute with these tensors, until `take_back`."""
        for i, place, key in self._places:
            place[key] = parts[i]

    def take_back(self) -> None:
        """Let the module compute with its own parameters again."""
        self.put(self._parameters)

    def trained(self, vector: Any) -> nn.Module:
        """A module of the user's kind with the numbers of a flat vector."""
        made = copy.deepcopy(self)
        values = made.parts(torch.from_numpy(np.array(vector, np.float32)).to(self.device))
        with torch.no_grad():
            for parameter, value in zip(made._parameters, values, strict=True):
                parameter.copy_(value)
        return made.module

    def __deepcopy__(self, memo: Any) -> Parameters:
        return Parameters(self.module, "the module")

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """What the module computes with and is not trained: buffers and frozen parameters, by name."""
        yield from self.module.named_buffers()
        yield from ((n, p) for n, p in self.module.named_parameters() if not p.requires_grad)


@contextmanager
def computing(*given: tuple[Parameters, Sequence[Tensor]]) -> Iterator[None]:
    """Let modules compute with other tensors within a block."""
    try:
        for parameters, parts in given:
            parameters.put(parts)
        yield
    finally:
        for parameters, _ in given:
            parameters.take_back()


def check_module(module: nn.Module, name: str) -> None:
    """Raise for what cannot be trained here; the message names the submodule or parameter, and the remedy."""
    for path, each in module.named_modules():
        where, kind = f"{name}.{path}" if path else name, type(each).__name__
        if isinstance(each, _BatchNorm) and each.training:
            raise SettingsError(
                f"{where} is a {kind} in train mode, which mixes rows and changes its buffers; call "
                f"{name}.eval(), or use GroupNorm"
            )
        if isinstance(each, _BatchNorm) and not each.track_running_stats:
            raise SettingsError(
                f"{where} is a {kind} without running statistics, which mixes rows; use track_running_stats=True "
                "in eval mode, or GroupNorm"
            )
        share = each.p if isinstance(each, _DropoutNd) else getattr(each, "dropout", 0.0)
        if each.training and isinstance(share, float | int) and share > 0:
            raise SettingsError(
                f"{where} is a {kind} with dropout {share:g} in train mode, which is random; call {name}.eval(), "
                "or set it to zero"
            )
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise SettingsError(f"{where} is a {kind} with sparse gradients; make it with sparse=False")
    for path, parameter in module.named_parameters():
        where = f"{name}.{path}"
        if is_lazy(parameter):
            raise SettingsError(
                f"{where} belongs to a lazy module, which has no shape yet; call the module on a few rows first"
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise SettingsError(f"{where} is {_short(parameter.dtype)}; call {name}.float()")


def check_apart(x: nn.Module, y: nn.Module) -> None:
    """Raise if a parameter belongs to both modules."""
    names = {id(p): n for n, p in x.named_parameters()}
    for name, parameter in y.named_parameters():
        if id(parameter) in names and parameter.requires_grad:
            raise SettingsError(
                f"y.{name} and x.{names[id(parameter)]} are the same parameter; give it to one of the two levels, "
                "and copy or freeze it in the other"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(a: Any, device: torch.device) -> Tensor:
    """Rows as PyTorch's losses expect them: float32, or int64 for whole numbers above eight bits."""
    a = np.asarray(a)
    kind = {"f": np.dtype(np.float32), "i": np.dtype(np.int64), "u": np.dtype(np.int64)}.get(a.dtype.kind, a.dtype)
    if a.dtype != kind and a.dtype != np.uint8:
        a = a.astype(kind)
    elif not a.flags.writeable:  # PyTorch has no tensors that cannot be written to
        a = a.copy()
    return torch.from_numpy(a).to(device)


def to_native(values: PyTree, device: torch.device) -> PyTree:
    """NumPy arrays as tensors, and single numbers as Python's."""

    def one(a: Any) -> Any:
        return a.item() if a.ndim == 0 else torch.from_numpy(a if a.flags.writeable else a.copy()).to(device)

    return jax.tree.map(one, values)


def from_native(values: PyTree) -> PyTree:
    """Tensors and numbers as NumPy arrays of float32."""

    def one(a: Any) -> Any:
        made = a.detach().cpu().numpy() if isinstance(a, Tensor) else np.asarray(a)
        return made.astype(np.float32) if made.dtype == np.float64 else made

    return jax.tree.map(one, values)


def digest(**groups: Parameters) -> str | None:
    """A digest of all numbers that are not trained; None if there are none."""
    found = {f"{level}.{name}": value for level, group in groups.items() for name, value in group.constants()}
    plain = {name: value.detach().cpu().contiguous().reshape(-1) for name, value in found.items()}
    return (
        arrays_digest({name: value.view(torch.uint8).numpy() for name, value in plain.items()}) if found else None
    )


def tree_map(function: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """A function on every tensor of a tuple, list or dict of tensors."""
    return function(tree) if isinstance(tree, Tensor) else jax.tree.map(function, tree)


def tensors(tree: PyTree) -> list[Tensor]:
    """The tensors of a tuple, list or dict."""
    return [tree] if isinstance(tree, Tensor) else jax.tree.leaves(tree)

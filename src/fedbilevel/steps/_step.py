"""Client steps: pure module-level functions that take the client's oracle and arrays and return a NamedTuple.

A step is registered under its name, so that an engine in another process can find it. The annotations of its
parameters say what is done with the arguments of a round:

    Array, float      sent to the clients and traced; another value does not compile the step again
    Draw, Stream      drawn by each client from its own rows, as a `Sample`, `Samples` or `Epochs` describes
    anything else     a constant (a flag, a count, None) that chooses the program
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from jax import Array

from ..errors import SettingsError, UnknownName
from ._replies import ReplyField, Role, reply_fields
from ._samples import Draw, Stream

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...], covariant=True)


class Use(Enum):
    """What is done with an argument of a round."""

    TRACED = "traced"
    DRAWN = "drawn"
    CONSTANT = "constant"


@dataclass(frozen=True, eq=False)
class Step(Generic[P, R]):
    """A registered client step. It is called like the function that it wraps."""

    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The short name, under which the ledger books it."""
        return self.function.__name__

    @property
    def address(self) -> str:
        """The full name, under which another process finds it."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @cached_property
    def reply_type(self) -> Any:
        """The NamedTuple that the step returns."""
        return get_type_hints(self.function).get("return")

    @cached_property
    def reply(self) -> dict[str, ReplyField]:
        """The fields of the reply, and what each of them is."""
        return reply_fields(self.name, self.reply_type)

    @cached_property
    def sent(self) -> dict[str, ReplyField]:
        """The fields that travel to the server."""
        return {name: field for name, field in self.reply.items() if field.role is not Role.OWN}

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The fields that stay with the client."""
        return tuple(name for name in self.reply if name not in self.sent)

    def use(self, name: str) -> Use:
        """What is done with an argument of this name."""
        if name in self._uses:
            return self._uses[name]
        if self._others is not None:
            return self._others
        raise SettingsError(f"step {self.name} has no argument {name}; it takes {', '.join(self._uses) or 'none'}")

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise if an argument that the step needs is missing."""
        missing = [name for name in self._needed if name not in arguments]
        if missing:
            raise SettingsError(f"step {self.name} needs {', '.join(missing)} too")

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())[1:]  # the first is the oracle

    @cached_property
    def _uses(self) -> dict[str, Use]:
        named = (p for p in self._parameters if p.kind is not p.VAR_KEYWORD)
        return {p.name: self._annotated(p.name) for p in named}

    @cached_property
    def _others(self) -> Use | None:
        """What is done with arguments that a step takes as **arguments."""
        return next((self._annotated(p.name) for p in self._parameters if p.kind is p.VAR_KEYWORD), None)

    @cached_property
    def _needed(self) -> tuple[str, ...]:
        return tuple(
            p.name
            for p in self._parameters
            if p.kind is not p.VAR_KEYWORD and p.default is inspect.Parameter.empty
        )

    def _annotated(self, name: str) -> Use:
        hint = get_type_hints(self.function).get(name)
        if hint is None or hint is Any:
            raise SettingsError(
                f"step {self.name}: argument {name} has no annotation; write Array (or float) for what is sent, "
                "Draw or Stream for samples, and int, bool or str for what chooses the program"
            )
        alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        plain = {get_args(a)[0] if get_origin(a) is Annotated else a for a in alternatives}
        if plain & {Draw, Stream}:
            return Use.DRAWN
        return Use.TRACED if plain & {Array, float} else Use.CONSTANT


_registry: dict[str, Step[Any, Any]] = {}


def client_step(function: Callable[P, R]) -> Step[P, R]:
    """Register a pure module-level function as a client step."""
    step = Step(function)
    _registry[step.address] = step
    return step


def find_step(address: str) -> Step[Any, Any]:
    """The step registered at an address such as `fedbilevel.algorithms.aggitd:gradients`."""
    if address not in _registry:
        raise UnknownName("client step", address, _registry)
    return _registry[address]

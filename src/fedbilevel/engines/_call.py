"""One call to the clients of a cohort, as an engine sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ..errors import SettingsError
from ..rng import Address, Kind
from ..steps import Descriptor, PerClient, Role, Step, Use


class Held(NamedTuple):
    """A vector that clients keep: its version, and which of the cohort do not have it yet."""

    version: int
    value: Array
    missing: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A step for the clients of a cohort.

    address     where the samples of the call are drawn
    arrays      are sent down, and may change from call to call
    constants   choose the program
    rows        have a value for each registered client, of which each is sent its own
    attempt     counts how often these clients were asked before in the same round
    clock       counts the calls of the algorithm so far; it dates what clients keep
    settled     the clock of the last checkpoint: what clients kept before it is what a resumed run goes on from
    kept        the clock of what each client is known to have kept last, where clients keep it elsewhere
    """

    step: Step[Any, Any]
    address: Address
    clients: tuple[int, ...]
    held: Mapping[str, Held] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, PerClient] = field(default_factory=dict)
    samples: Mapping[str, Descriptor] = field(default_factory=dict)
    attempt: int = 0
    clock: int = 0
    settled: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """What the call is for."""
        return self.address.kind

    @property
    def keeps(self) -> bool:
        """Whether clients keep what the step returns as their own. A measurement leaves no trace."""
        return self.kind is not Kind.PROBE and bool(self.step.kept)

    def again(self, clients: tuple[int, ...], attempt: int) -> Call:
        """The same call to those clients only, who are sent again what they should hold."""
        held = {
            name: h._replace(missing=tuple(c for c in clients if c in h.missing)) for name, h in self.held.items()
        }
        return dataclasses.replace(self, clients=clients, held=held, attempt=attempt)

    @property
    def vectors(self) -> dict[str, Array]:
        """The held vectors by name."""
        return {name: held.value for name, held in self.held.items()}

    @property
    def before(self) -> dict[str, Array]:
        """The vectors that `Next` fields of the reply are the new values of.

        What a client contributes to such a field is the difference to the vector. A vector that was given as None
        is not among them.
        """
        given = {**self.arrays, **self.vectors}
        following = [name for name, field in self.step.sent.items() if field.role is Role.NEXT]
        unknown = [name for name in following if name not in given and name not in self.constants]
        if unknown:
            raise SettingsError(
                f"step {self.step.name}: {unknown[0]} of its reply is the next value of a vector that the clients "
                f"were not given; hold or send {unknown[0]}, or annotate the field without Next"
            )
        return {name: given[name] for name in following if name in given}

    @property
    def program(self) -> tuple[Any, ...]:
        """What the compiled program of this call depends on, shapes aside."""
        return self.step, tuple(sorted(self.constants.items())), self.keeps

    def __str__(self) -> str:
        return f"{self.step.name}, {self.address}"


def make_call(
    step: Step[Any, Any], address: Address, clients: Sequence[int], arguments: Mapping[str, Any], **more: Any
) -> Call:
    """A call whose arguments are sorted by what the step's annotations say of them."""
    arrays: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    rows: dict[str, PerClient] = {}
    samples: dict[str, Descriptor] = {}
    step.check(arguments)
    for name, value in arguments.items():
        use = step.use(name)
        if isinstance(value, Descriptor) is not (use is Use.DRAWN):
            wanted = "a Sample, Samples or Epochs" if use is Use.DRAWN else "no sample"
            raise SettingsError(f"step {step.name}: {name} takes {wanted}, not {value!r}")
        if isinstance(value, Descriptor):
            samples[name] = value
        elif isinstance(value, PerClient):
            rows[name] = value
        elif use is Use.TRACED and value is not None:
            arrays[name] = value if isinstance(value, Array | np.ndarray | np.generic) else _number(value)
        else:
            constants[name] = tuple(value) if isinstance(value, list) else value
    return Call(
        step=step,
        address=address,
        clients=tuple(clients),
        arrays=arrays,
        constants=constants,
        rows=rows,
        samples=samples,
        **more,
    )


def _number(value: Any) -> np.generic | np.ndarray:
    """A number as an array: float32, or int32 for a whole number."""
    made = np.asarray(value)
    return made.astype(np.float32 if made.dtype.kind == "f" else np.int32)[()]


def payload(tree: Any) -> int:
    """Payload bytes: vectors count, numbers do not."""
    return sum(a.nbytes for a in jax.tree.leaves(tree) if np.ndim(a))

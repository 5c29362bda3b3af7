"""One call to the clients of a cohort, as an engine sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import SettingsError
from ..rng import Address, Kind
from ..steps import Descriptor, Epochs, PerClient, Role, Samples, Step, Use


class Held(NamedTuple):
    """A vector that clients hold: its version, and the clients of the cohort that do not have it yet."""

    version: int
    value: Array
    missing: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A step for the clients of a cohort.

    address     the address at which the samples of the call are drawn
    arrays      the arrays that are sent down; they may change from call to call
    constants   the values that choose the program
    rows        the arrays with one value for each registered client; each client is sent its own
    attempt     how often these clients were asked before in the same round
    drawn       the number of rounds when the cohort was drawn; calls of one cohort have the same
    clock       the number of the algorithm's calls so far; it dates the states that clients keep
    settled     the clock of the last checkpoint; a resumed run continues from the states kept before it
    kept        for clients that keep their state elsewhere, the clock of the last state each is known to have kept
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
    drawn: int = 0
    clock: int = 0
    settled: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """The purpose of the call."""
        return self.address.kind

    @property
    def keeps(self) -> bool:
        """Whether clients keep the `Own` fields that the step returns. A measurement leaves no trace."""
        return self.kind is not Kind.PROBE and bool(self.step.kept)

    @property
    def even(self) -> bool:
        """Whether every client makes the same number of draws, which the server then knows."""
        samples = self.samples.values()
        return not any(isinstance(d, Epochs) or isinstance(getattr(d, "count", 1), PerClient) for d in samples)

    def again(self, clients: tuple[int, ...], attempt: int) -> Call:
        """The same call to these clients only. The vectors that they should hold are sent again."""
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
        """The vectors whose new values are the `Next` fields of the reply.

        A client's contribution to such a field is the difference to the vector. Vectors that were given as None
        are excluded.
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

    @cached_property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes and types of vectors, arrays and rows, the constants, and the samples without their counts."""
        rows = ((name, each.values) for name, each in self.rows.items())
        return (
            tuple((name, np.shape(h.value), _type(h.value)) for name, h in self.held.items()),
            tuple((name, np.shape(a), _type(a)) for name, a in self.arrays.items()),
            tuple((name, np.shape(v[next(iter(v))] if isinstance(v, dict) else v[0])) for name, v in rows),
            tuple(self.constants.items()),
            tuple((name, _short(descriptor)) for name, descriptor in self.samples.items()),
        )

    @property
    def program(self) -> tuple[Any, ...]:
        """Everything that the compiled program of this call depends on, apart from shapes."""
        return self.step, tuple(sorted(self.constants.items())), self.keeps

    def __str__(self) -> str:
        return f"{self.step.name}, {self.address}"


def make_call(
    step: Step[Any, Any], address: Address, clients: Sequence[int], arguments: Mapping[str, Any], **more: Any
) -> Call:
    """Make a call, with its arguments sorted by the step's annotations."""
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


def _type(value: Any) -> Any:
    """The type that an array has within a program."""
    known = getattr(value, "dtype", None)
    return known if known == np.float32 else jnp.result_type(value)


def _short(descriptor: Descriptor) -> Descriptor:
    """The descriptor with one step for every client: the number of steps does not matter for shapes."""
    if isinstance(descriptor, Samples) and isinstance(descriptor.count, PerClient):
        return Samples(descriptor.part, descriptor.size, 1)
    return descriptor


def payload(tree: Any) -> int:
    """The number of payload bytes. Vectors count, single numbers do not."""
    return sum(a.nbytes for a in jax.tree.leaves(tree) if np.ndim(a))

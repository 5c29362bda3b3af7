"""The optimiser of x at the server: any of Optax, by its name and arguments or as the object itself.

Hypergradient methods give the server a direction h, and by default it steps along it with the step size α. An
optimiser makes its own step of h instead, as FedOpt does (Reddi et al., "Adaptive Federated Optimization", ICLR
2021). It makes one step in an outer iteration, so a schedule counts outer iterations.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from ..errors import SettingsError, shown
from ..names import PYTHON, locate, users_code
from ..problem import BilevelProblem, Problem
from ..settings import about, from_mapping, settings, suggestion

WHERE = "algorithm.upper"
# These are made of more than a direction, or have a state that a checkpoint cannot hold.
LEFT_OUT = {
    "lbfgs": "its line search needs values of the loss, which would be further rounds",
    "polyak_sgd": "it needs the value of the loss",
    "noisy_sgd": "its state has a random key; use privacy.mode for noise",
}
Memory = Any  # the state of an optimiser: a pytree


@settings
class Optimiser:
    """An optimiser of Optax, by its name and arguments."""

    name: Annotated[str, about("the name of a function of optax, or python")]
    arguments: Annotated[dict[str, Any], about("its arguments; a schedule is a table with a name")] = (
        dataclasses.field(default_factory=dict)
    )

    rest: ClassVar[str] = "arguments"

    def __post_init__(self) -> None:
        tried = jnp.zeros(2)
        with users_code(f"{WHERE} = {shown({'name': self.name, **self.arguments})} is wrong: Optax raises "):
            _ = jax.eval_shape(partial(_first_update, self.transformation), tried)

    @property
    def learning_rate(self) -> Any:
        """Its learning rate: a number, the table of a schedule, or None."""
        return self.arguments.get("learning_rate")

    def having(self, name: str, value: Any) -> Optimiser:
        """The optimiser with another value of an argument."""
        return dataclasses.replace(self, arguments=self.arguments | {name: value})

    @cached_property
    def transformation(self) -> Any:
        """What Optax makes of it. With the name "python", a function of the user's makes it."""
        if self.name == PYTHON:
            values = dict(self.arguments)
            if "function" not in values:
                raise SettingsError(
                    f"{WHERE}.function is missing, and {WHERE}.name is 'python'; set it to module:function"
                )
            made = locate(values.pop("function"), f"{WHERE}.function")(**values)
            if not isinstance(made, optax.GradientTransformation):
                raise SettingsError(
                    f"{WHERE}.function = {shown(self.arguments['function'])} is wrong: it returns an object of "
                    f"type {type(made).__name__}; return an optax.GradientTransformation"
                )
            return made
        if self.name in LEFT_OUT:
            raise SettingsError(f"{WHERE}.name = {shown(self.name)} is wrong: {LEFT_OUT[self.name]}; use adam")
        return _make(_optimisers(), self.name, self.arguments, WHERE)


def chosen(given: Any) -> Any:
    """The optimiser that a setting stands for: a table, a name, or an `optax.GradientTransformation` itself."""
    if given is None or isinstance(given, Optimiser | optax.GradientTransformation):
        return given
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{WHERE} = {shown(given)} is wrong: give a table such as {{ name = 'adam', learning_rate = 0.01 }}, "
            "or an optax.GradientTransformation"
        )
    if "name" not in given:
        raise SettingsError(f"{WHERE}.name is missing; name an optimiser of Optax, such as adam")
    return from_mapping(Optimiser, given, WHERE)


def first_memory(optimiser: Any, problem: BilevelProblem) -> Memory:
    """The state of an optimiser before the first outer iteration."""
    start, used = _tree(problem, problem.flat_x.vector), _transformation(optimiser)
    with users_code(f"{WHERE} is wrong: for the x of this problem it raises "):
        memory = jax.jit(used.init)(start)
        _ = jax.eval_shape(partial(_first_update, used), start)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(memory)):
        raise SettingsError(f"{WHERE} is wrong: its state has a random key, which a checkpoint cannot hold")
    return memory


def advance(optimiser: Any, problem: BilevelProblem, g: Array, memory: Memory, x: Array) -> tuple[Array, Memory]:
    """The next x along the direction g, and the next state. The optimiser is given the user's pytrees."""
    after, memory = _advance(_transformation(optimiser), _tree(problem, g), memory, _tree(problem, x))
    return ravel_pytree(after)[0].astype(x.dtype), memory


def _transformation(optimiser: Any) -> Any:
    return optimiser.transformation if isinstance(optimiser, Optimiser) else optimiser


def _tree(problem: BilevelProblem, vector: Array) -> Any:
    """The parameters in the user's structure, which masks and layer-wise optimisers refer to.

    A problem of another library may restore what is not JAX's. Its x stays a flat vector.
    """
    restored = problem.flat_x.restore(vector) if isinstance(problem, Problem) else vector
    return eqx.filter(restored, eqx.is_inexact_array)


@partial(jax.jit, static_argnums=0)
def _advance(used: Any, g: Any, memory: Memory, x: Any) -> tuple[Any, Memory]:
    updates, memory = used.update(g, memory, x)
    return optax.apply_updates(x, updates), memory


def _first_update(used: Any, x: Any) -> Any:
    return optax.apply_updates(x, used.update(x, used.init(x), x)[0])


@cache
def _optimisers() -> dict[str, Callable[..., Any]]:
    """The optimisers of the installed Optax: its functions that take a learning rate."""
    found: dict[str, Callable[..., Any]] = {}
    for name, made in vars(optax).items():
        if name.startswith(("_", "scale_by")) or name in LEFT_OUT or not inspect.isfunction(made):
            continue
        if "learning_rate" in inspect.signature(made).parameters:
            found[name] = made
    return found


@cache
def _schedules() -> dict[str, Callable[..., Any]]:
    """The schedules of the installed Optax."""
    more = ("exponential_decay", "join_schedules")
    made = vars(optax.schedules).items()
    return {name: f for name, f in made if inspect.isfunction(f) and (name.endswith("schedule") or name in more)}


def _make(table: Mapping[str, Callable[..., Any]], name: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """What a function of Optax returns; names, arguments and their numbers are checked before."""
    if not isinstance(name, str) or name not in table:
        raise SettingsError(f"{where}.name = {shown(name)} is wrong: {suggestion(str(name), sorted(table))}")
    known = inspect.signature(table[name]).parameters
    for key, value in arguments.items():
        if key not in known:
            raise SettingsError(f"{where}.{key} is not an argument of {name}; {suggestion(key, [*known])}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        allowed = isinstance(value, Mapping | jax.core.Tracer) or (number and 0 < value < float("inf"))
        if key == "learning_rate" and not allowed:
            raise SettingsError(
                f"{where}.{key} = {shown(value)} is wrong: use a number above zero, or the table of a schedule"
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise SettingsError(f"{where}.{key} is missing; {name} needs it")
    return table[name](**{key: _value(value, f"{where}.{key}") for key, value in arguments.items()})


def _value(given: Any, where: str) -> Any:
    """An argument as Optax takes it: a table with a name is a schedule, and keys of digits are whole numbers."""
    if isinstance(given, list | tuple):
        return [_value(each, where) for each in given]
    if not isinstance(given, Mapping):
        return given
    if "name" in given:
        rest = {key: value for key, value in given.items() if key != "name"}
        return _make(_schedules(), given["name"], rest, where)
    return {int(key) if str(key).isdecimal() else key: _value(value, where) for key, value in given.items()}

"""The simulation spread over a Ray cluster: the extra `fedbilevel[ray]`.

The cohort is cut into contiguous parts, one for each actor, a long-lived process with a `Simulation` of its
own. Parts have one size, the last filled up with its last client, so nothing compiles twice. Replies come back
stacked, in the order of the cohort, so the federation checks each client's as it does everywhere, and adds the
parts in a fixed order: with one actor the numbers are bit for bit those of `Simulation`.

Held vectors go to Ray's object store once a version, and from there once to each node. A step is pure and an
actor's state is data only, so an actor or a node that dies is replaced and asked again, and the numbers stay.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..data.clients import Clients
from ..errors import FedBilevelError, SettingsError, StepError
from ..problem import Over, Problem
from ..runtime import cache_programs, keep_memory
from ..steps import Descriptor, PerClient, find_step
from .base import Call, Held, Replies
from .simulation import Simulation

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise SettingsError("engine ray needs an extra: pip install 'fedbilevel[ray]'") from None

PAUSE = 0.2  # seconds before a part is asked for again


class Part(NamedTuple):
    """What an actor is asked for: a call on its part of the cohort, without the arrays.

    `clients` is filled up to the common size; the first `asked` of them are really asked.
    """

    step: str
    address: tuple[int | str, ...]
    clients: tuple[int, ...]
    asked: int
    versions: tuple[tuple[str, int], ...]
    constants: Mapping[str, Any]
    samples: Mapping[str, Descriptor]


class Worker:
    """An actor: a simulation of whichever clients it is asked for."""

    def __init__(self, settings: Mapping[str, Any], cpu_devices: int) -> None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
        keep_memory()
        cache_programs()
        self._settings = settings
        self._simulation: Simulation | None = None

    def reply(self, task: list[Any], part: Part, down: tuple[Any, Any], *held: Any) -> dict[str, Any]:
        """As `answer`. The task comes with every call, as an actor that was made again has to read it again."""
        return answer(self._prepared(task), part, down, held)

    def prepare(self, task: list[Any]) -> None:
        """Be ready before the first round, and fail early."""
        self._prepared(task)

    def _prepared(self, task: list[Any]) -> Simulation:
        if self._simulation is None:
            problem, clients = ray.get(task[0])
            self._simulation = Simulation(problem, clients, **self._settings)
        return self._simulation

    def whereabouts(self) -> tuple[str, int]:
        """The node and the process."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()


def answer(simulation: Simulation, part: Part, down: tuple[Any, Any], held: tuple[Any, ...]) -> dict[str, Any]:
    """The fields of the replies of the clients really asked, stacked."""
    arrays, own = down
    importlib.import_module(part.step.partition(":")[0])
    shelf = {name: Held(version, value, ()) for (name, version), value in zip(part.versions, held, strict=True)}
    step = find_step(part.step)
    call = Call(step, part.address, part.clients, shelf, arrays, part.constants, own, part.samples)
    chunks = [replies.reply._asdict() for replies in simulation.replies(call)]
    return {
        name: None if value is None else np.concatenate([np.asarray(c[name]) for c in chunks])[: part.asked]
        for name, value in chunks[0].items()
    }


class Ray:
    """Spreads a cohort over long-lived actors of a Ray cluster, each of them a `Simulation` of its part.

    actors    how many processes; the numbers depend on it in the last digits, and on nothing else of the cluster
    address   host:port of the head of a cluster, or "local" for one of this process' own; what $RAY_ADDRESS says
              when left out, else local. A process that is connected already stays with its cluster
    timeout   seconds after which an actor's part of a round is given up, counted and named
    over, memory_limit, devices: as for `Simulation`, for each actor
    """

    def __init__(
        self,
        problem: Problem,
        clients: Clients,
        *,
        actors: int = 2,
        address: str | None = None,
        timeout: float = 600.0,
        over: Over | None = None,
        memory_limit: int = 1024,
        devices: int | None = None,
    ) -> None:
        if actors < 1:
            raise SettingsError(f"actors = {actors} is wrong: use at least 1")
        self.problem, self.clients, self._timeout = problem, clients, timeout
        _connect(address or os.environ.get("RAY_ADDRESS") or "local")
        settings = dict(over=over, memory_limit=memory_limit, devices=devices)
        see = jax.config.values["jax_num_cpu_devices"]  # an actor's JAX is to see as many as this process' does
        places = placement_group([{"CPU": 1}] * actors, strategy="SPREAD")
        make = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(Worker)
        fresh = dataclasses.replace(problem)  # without what it has cached, which does not travel
        self._task = ray.put((fresh, clients))
        self.actors = [
            make.options(scheduling_strategy=PlacementGroupSchedulingStrategy(places, i)).remote(settings, see)
            for i in range(actors)
        ]
        self._places = places
        self._held: dict[str, tuple[int, Any]] = {}
        try:
            ray.get([actor.prepare.remote([self._task]) for actor in self.actors], timeout=timeout)
        except GetTimeoutError:
            raise SettingsError(
                f"actors = {actors} is wrong: the cluster has not started them within {timeout:g} s; "
                "use fewer, or add nodes"
            ) from None
        except RayTaskError as error:
            raise (
                error.cause if isinstance(error.cause, FedBilevelError) else StepError(str(error.cause))
            ) from None
        except RayError as error:
            raise StepError(f"an actor cannot start: {str(error).strip().splitlines()[-1]}") from error

    def replies(self, call: Call) -> Iterator[Replies]:
        check_found(call.step.address)
        own = {name: PerClient(_host(each.values)) for name, each in call.own.items()}
        arrays = {name: _host(value) for name, value in call.arrays.items()}
        down, sent = ray.put((arrays, own)), message_bytes((arrays, own))
        sent += sum(message_bytes(_host(h.value)) for name, h in call.held.items() if self._lacks(name, h))
        held = [self._shelve(name, value) for name, value in call.held.items()]
        parts = list(self._parts(call))

        def ask(i: int) -> Any:
            return self.actors[i].reply.remote([self._task], parts[i], down, *held)

        running = [ask(i) for i in range(len(parts))]
        limit = time.monotonic() + self._timeout
        for i, part in enumerate(parts):
            asked, size = part.clients[: part.asked], sent + message_bytes(part)
            while True:
                try:
                    fields = ray.get(running[i], timeout=max(0.1, limit - time.monotonic()))
                    yield Replies(asked, call.step.reply_type(**fields), wire=(message_bytes(fields), size))
                    break
                except RayTaskError as error:
                    if isinstance(error.cause, FedBilevelError):
                        raise error.cause from None
                    raise StepError(f"{call}: {type(error.cause).__name__}: {error.cause}") from error
                except GetTimeoutError:
                    late = dict.fromkeys(asked, f"no reply within {self._timeout:g} s")
                    yield Replies((), None, late, (0, size))
                    break
                except RayError:  # an actor that is being made again, or a reply lost with its node
                    time.sleep(PAUSE)
                    running[i] = ask(i)

    def close(self) -> None:
        """End the actors; they also end with this process."""
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self._places)

    def whereabouts(self) -> list[tuple[str, int]]:
        """The node and the process of each actor."""
        asked = [actor.whereabouts.remote() for actor in self.actors]
        return list(ray.get(asked, timeout=self._timeout))

    def _parts(self, call: Call) -> Iterator[Part]:
        size = -(-len(call.clients) // len(self.actors))
        versions = tuple((name, held.version) for name, held in call.held.items())
        for start in range(0, len(call.clients), size):
            asked = call.clients[start : start + size]
            full = asked + asked[-1:] * (size - len(asked))
            yield Part(call.step.address, call.address, full, len(asked), versions, call.constants, call.samples)

    def _lacks(self, name: str, held: Held) -> bool:
        return self._held.get(name, (None,))[0] != held.version

    def _shelve(self, name: str, held: Held) -> Any:
        """The reference of a held vector; put into the object store once a version."""
        if self._lacks(name, held):
            self._held[name] = held.version, ray.put(_host(held.value))
        return self._held[name][1]


def message_bytes(value: Any) -> int:
    """The bytes of a value as Ray sends it, a pickle with the arrays beside it. No array is copied for it."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    return len(head) + sum(memoryview(array).nbytes for array in arrays)


def check_found(step: str) -> None:
    """Raise if actors cannot find a step by its name."""
    if step.startswith("__main__:"):
        raise SettingsError(
            f"step {step.partition(':')[2]} is defined in the main script, where actors cannot find it; "
            "move it to a module of its own"
        )


def _connect(address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"address = {address!r} is wrong: {error}; use host:port of a running head, or local"
        ) from None


def _host(value: Any) -> Any:
    """A device's array as NumPy's; anything else as it is."""
    return np.asarray(value) if hasattr(value, "shape") else value

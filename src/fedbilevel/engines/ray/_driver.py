"""The driver: cuts a cohort into parts, asks the actors, and keeps what clients keep."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...data import Clients
from ...errors import FedBilevelError, SettingsError, StepError
from ...problem import BilevelProblem, Over
from ...steps import PerClient
from .._base import Capabilities
from .._call import Call, Held
from .._replies import Fault, Reason, Replies
from .._states import ClientStates
from .._work import recalls
from ._actor import Part, Worker
from ._extra import ray

PAUSE = 0.2  # seconds before a part is asked for again


class Ray:
    """Spreads a cohort over long-lived actors of a Ray cluster, each of them a `Simulation` of its part.

    actors    the number of processes; the last digits of the results depend on it, but on nothing else of the
              cluster
    address   host:port of the head of a cluster, or "local" for a cluster of this process' own (default: the value
              of $RAY_ADDRESS, or else local). A process that is already connected stays with its cluster
    timeout   seconds after which an actor's part of a round is given up; its clients are then reported as absent
    over, memory_limit, devices: as for `Simulation`, for each actor
    """

    def __init__(
        self,
        problem: BilevelProblem,
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
        self._states = ClientStates(limit=memory_limit)
        self.capabilities = Capabilities(states=self._states)
        _connect(address or os.environ.get("RAY_ADDRESS") or "local")
        settings = dict(over=over, memory_limit=memory_limit, devices=devices)
        see = jax.config.values["jax_num_cpu_devices"]  # an actor's JAX sees as many as this process'
        places = ray.util.placement_group([{"CPU": 1}] * actors, strategy="SPREAD")
        make = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(Worker)
        fresh: Any = problem
        if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
            fresh = dataclasses.replace(fresh)  # without its caches, which cannot be sent
        self._task = ray.put((fresh, clients))
        at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self.actors = [
            make.options(scheduling_strategy=at(places, i)).remote(settings, see) for i in range(actors)
        ]
        self._places = places
        self._held: dict[str, tuple[int, Any]] = {}
        try:
            ray.get([actor.prepare.remote([self._task]) for actor in self.actors], timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise SettingsError(
                f"actors = {actors} is wrong: the cluster has not started them within {timeout:g} s; "
                "use fewer, or add nodes"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise (
                error.cause if isinstance(error.cause, FedBilevelError) else StepError(str(error.cause))
            ) from None
        except ray.exceptions.RayError as error:
            raise StepError(f"an actor cannot start: {str(error).strip().splitlines()[-1]}") from error

    def replies(self, call: Call) -> Iterator[Replies]:
        check_found(call.step.address)
        rows = {name: PerClient(_host(each.values)) for name, each in call.rows.items()}
        arrays = {name: _host(value) for name, value in call.arrays.items()}
        down, sent = ray.put((arrays, rows)), message_bytes((arrays, rows))
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
                    fields, kept = ray.get(running[i], timeout=max(0.1, limit - time.monotonic()))
                    for client, state in kept.items():
                        self._states.write(client, call.clock, state, call.settled)
                    reply = call.step.reply_type(**fields)
                    yield Replies(clients=asked, reply=reply, wire=(message_bytes(fields), size))
                    break
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, FedBilevelError):
                        raise error.cause from None
                    raise StepError(f"{call}: {type(error.cause).__name__}: {error.cause}") from error
                except ray.exceptions.GetTimeoutError:
                    late = Reason(Fault.ABSENT, f"no reply within {self._timeout:g} s")
                    yield Replies(refused=dict.fromkeys(asked, late), wire=(0, size))
                    break
                except ray.exceptions.RayError:  # the actor is being replaced, or the reply was lost with its node
                    time.sleep(PAUSE)
                    running[i] = ask(i)

    def close(self) -> None:
        """End the actors; they also end with this process."""
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._places)
        self._states.clear()

    def whereabouts(self) -> list[tuple[str, int]]:
        """The node and the process of each actor."""
        asked = [actor.whereabouts.remote() for actor in self.actors]
        return list(ray.get(asked, timeout=self._timeout))

    def _parts(self, call: Call) -> Iterator[Part]:
        size = -(-len(call.clients) // len(self.actors))
        versions = tuple((name, held.version) for name, held in call.held.items())
        needed = recalls(call, self.problem) or call.keeps
        for start in range(0, len(call.clients), size):
            asked = call.clients[start : start + size]
            full = asked + asked[-1:] * (size - len(asked))
            states = {c: self._states.read(c, call.clock) for c in asked} if needed else {}
            states = {client: state for client, state in states.items() if state}
            chosen = call.constants, call.samples
            yield Part(call.step.address, call.address, full, len(asked), versions, *chosen, states)

    def _lacks(self, name: str, held: Held) -> bool:
        return self._held.get(name, (None,))[0] != held.version

    def _shelve(self, name: str, held: Held) -> Any:
        """The reference of a held vector. Each version is put into the object store once."""
        if self._lacks(name, held):
            self._held[name] = held.version, ray.put(_host(held.value))
        return self._held[name][1]


def message_bytes(value: Any) -> int:
    """The number of bytes that Ray sends for a value: a pickle with the arrays beside it. No array is copied."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    return len(head) + sum(memoryview(array).nbytes for array in arrays)


def check_found(step: str) -> None:
    """Raise if actors cannot find a step by its name."""
    if step.startswith("__main__:"):
        raise SettingsError(
            f"step {step.partition(':')[2]} is defined in the main script, where actors cannot find it; "
            "move it to a module that they can import"
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
    """A JAX array as a NumPy array; any other value unchanged."""
    return np.asarray(value) if hasattr(value, "shape") else value

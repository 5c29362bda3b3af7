"""The engines that a spec can name, with their settings."""

from __future__ import annotations

from typing import Annotated, Any

from ..data import Clients
from ..errors import SettingsError
from ..names import Names
from ..problem import Batchable, BilevelProblem, Over
from ..settings import Count, Positive, about, settings
from ._base import Engine
from .fused import Fused
from .loop import Loop
from .simulation import Simulation


@settings
class SimulationSettings:
    """All clients of a cohort in one program."""

    over: Annotated[
        Over | None, about("vmap (clients batched) or map (in turn); default: what suits the problem")
    ] = None
    memory_limit: Annotated[Count, about("MiB for a cohort's data and work; a larger cohort is split")] = 1024
    devices: Annotated[Count | None, about("devices to spread clients over; default: all")] = None

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The engine for these clients."""
        return Simulation(problem, clients, over=self.over, memory_limit=self.memory_limit, devices=self.devices)


@settings
class FusedSettings:
    """All rounds of many outer iterations in one program, for small problems; see docs/engines.md."""

    over: Annotated[
        Over | None, about("vmap (clients batched) or map (in turn); default: what suits the problem")
    ] = None
    memory_limit: Annotated[Count, about("MiB for the data of all clients; a problem with more is refused")] = 1024
    single: Annotated[
        bool | None, about("compile a single function, for small operations; default: by the size of the data")
    ] = None

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The engine for these clients."""
        return Fused(problem, clients, over=self.over, memory_limit=self.memory_limit, single=self.single)


@settings
class AutoSettings:
    """Fused for small problems, if nothing in the run needs single rounds, and else the simulation."""

    over: Annotated[
        Over | None, about("vmap (clients batched) or map (in turn); default: what suits the problem")
    ] = None
    memory_limit: Annotated[Count, about("MiB for the data of clients, as the chosen engine has it")] = 1024

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The simulation, for whoever has single rounds; a run chooses."""
        return Simulation(problem, clients, over=self.over, memory_limit=self.memory_limit)


@settings
class LoopSettings:
    """One client at a time, for debugging and for problems that JAX cannot trace."""

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The engine for these clients."""
        return Loop(problem, clients)


@settings
class BatchedSettings:
    """The clients of a cohort batched by PyTorch's vmap, for problems of PyTorch modules."""

    memory_limit: Annotated[Count, about("MiB of data in one batch; a larger cohort is split")] = 1024

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The engine for these clients, which the problem makes."""
        if not isinstance(problem, Batchable):
            raise SettingsError(
                "federation.engine = 'batched' is wrong for this problem: it is for PyTorch modules "
                "(TorchProblem); use 'simulation'"
            )
        made: Engine = problem.batched(clients, self.memory_limit)
        return made


@settings
class RaySettings:
    """The simulation spread over a Ray cluster."""

    actors: Annotated[Count, about("processes to spread clients over")] = 2
    address: Annotated[
        str | None, about("host:port of a cluster's head, or local; default: $RAY_ADDRESS, or local")
    ] = None
    timeout: Annotated[Positive, about("seconds after which an actor's part of a round is given up")] = 600.0
    over: Annotated[
        Over | None, about("vmap (clients batched) or map (in turn); default: what suits the problem")
    ] = None
    memory_limit: Annotated[Count, about("MiB for an actor's data and work; a larger part is split")] = 1024
    devices: Annotated[Count | None, about("devices of an actor to spread clients over; default: all")] = None

    def build(self, problem: BilevelProblem, clients: Clients) -> Engine:
        """The engine for these clients, with its actors started."""
        from .ray import Ray  # Ray is an extra, and is imported only when it is used.

        return Ray(
            problem,
            clients,
            actors=self.actors,
            address=self.address,
            timeout=self.timeout,
            over=self.over,
            memory_limit=self.memory_limit,
            devices=self.devices,
        )


ENGINES: Names[type[Any]] = Names(
    "engines",
    "federation.engine.name",
    {
        "simulation": SimulationSettings,
        "fused": FusedSettings,
        "auto": AutoSettings,
        "loop": LoopSettings,
        "batched": BatchedSettings,
        "ray": RaySettings,
    },
    needs=("build",),
)

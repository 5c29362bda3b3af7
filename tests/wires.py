"""A transport without a network: sites in this process, whose replies a test may spoil."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fedbilevel as fb
from fedbilevel.engines.flare import Flare, Site
from fedbilevel.engines.flare.server import Delivery


class Wires:
    """Sites in this process; a test may spoil what goes up or down."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self.down: dict[str, list[int]] = {name: [] for name in sites}
        self.seen: list[bytes] = []
        self.spoil: Callable[[str, bytes], Any] = lambda name, reply: reply
        self.dead: set[str] = set()
        self.why = "unreachable"

    def __call__(self, requests: Mapping[str, bytes], timeout: float, /) -> Delivery:
        replies, failures = {}, {}
        for name, request in requests.items():
            self.down[name].append(len(request))
            if name in self.dead:
                failures[name] = self.why
            else:
                replies[name] = self.spoil(name, self.sites[name].answer(request))
                self.seen += [request, replies[name]]
        return Delivery(replies, failures)


def in_process_sites(problem: fb.BilevelProblem, clients: fb.Clients, *, modules: Sequence[str] = ()) -> fb.Engine:
    """A federation whose sites are in this process, with real messages between them and the server."""
    names = [f"site-{i}" for i in range(clients.count)]
    sites = {name: Site(problem, clients.load(i), modules=modules) for i, name in enumerate(names)}

    return Flare(problem, names, Wires(sites))

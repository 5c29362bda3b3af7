"""The server's side: it turns a call into a request to each site of the cohort, and checks the replies."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...data import ClientData, ClientSize
from ...errors import SettingsError, StepError
from ...problem import BilevelProblem
from .._base import Capabilities
from .._call import Call
from .._expected import expect
from .._replies import Fault, Reason, Replies
from .wire import HEADER_LIMIT, LIMIT, Malformed, descriptor_to_json, pack, unpack


class Delivery(NamedTuple):
    """The outcome of requests: the replies by site, and the reasons for the sites that did not reply."""

    replies: Mapping[str, Any]
    failures: Mapping[str, str]


class Transport(Protocol):
    """Carries bytes to the sites and back, to all sites at the same time."""

    def __call__(self, requests: Mapping[str, bytes], timeout: float, /) -> Delivery: ...


class RemoteClients:
    """The sites as clients. The server knows their number and sizes, but not their data."""

    def __init__(self, sizes: Sequence[ClientSize | None]) -> None:
        self._sizes = [size or ClientSize(0, 0) for size in sizes]

    @property
    def count(self) -> int:
        return len(self._sizes)

    @property
    def capacity(self) -> ClientSize:
        return ClientSize(*(max(size[part] for size in self._sizes) for part in (0, 1)))

    def size(self, client: int) -> ClientSize:
        return self._sizes[client]

    def load(self, client: int) -> ClientData:
        raise SettingsError(f"the data of site {client} are at the site; they cannot be loaded at the server")


class Flare:
    """Runs a cohort of remote sites.

    sites    the names of all registered sites; client i of the federation is site i, whether it is up or not
    send     carries the bytes
    timeout  seconds that a site has for a step
    noise    the noise multiplier of local privacy, if it is on; every site adds this noise itself
    run      the name of the run, by which a site finds its states; a job that continues a run has the same name
    spec     the digest of the run's spec, which a site may want to know before it takes part
    safe     returns the clock of the checkpoint from which the run would continue if the server were lost
             (default: the checkpoint that the federation has settled)
    """

    def __init__(
        self,
        problem: BilevelProblem,
        sites: Sequence[str],
        send: Transport,
        *,
        timeout: float = 600.0,
        noise: float | None = None,
        run: str | None = None,
        spec: str | None = None,
        safe: Callable[[], int] | None = None,
    ) -> None:
        self.problem, self.sites = problem, tuple(sites)
        self.capabilities = Capabilities(states=None, local_work=False, adds_noise=noise is not None)
        self._noise, self._run, self._spec = noise, run or secrets.token_hex(8), spec
        self._safe = safe
        self._send, self._timeout = send, timeout
        self._session, self._number = secrets.token_hex(8), 0
        self.lost: dict[str, str] = {}  # the sites not reached in the last call, with the reason
        self.pids: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.clients = RemoteClients(self._greet())

    def _greet(self) -> list[ClientSize | None]:
        """Begin a session with every site that is up; sites with a different problem are refused."""
        sizes = [self.problem.size_x, self.problem.size_y]
        header = {"kind": "hello", "round": 0, "session": self._session, "run": self._run}
        header |= {"sizes": sizes, "noise": self._noise, "spec": self._spec}
        delivery = self._send(dict.fromkeys(self.sites, pack(header, {})), self._timeout)
        self.refused = dict(delivery.failures)
        found: dict[str, ClientSize] = {}
        for site, reply in delivery.replies.items():
            try:
                message = unpack(reply, HEADER_LIMIT)
                if message.header.get("kind") != "welcome":
                    raise Malformed(str(message.header.get("reason", "no welcome"))[:500])
                lower, upper = (int(n) for n in message.get("rows", list))
                found[site], self.pids[site] = ClientSize(lower, upper), message.get("pid", int)
            except (Malformed, ValueError, TypeError) as error:
                self.refused[site] = str(error)
        if not found:
            reasons = "; ".join(f"{site}: {why}" for site, why in self.refused.items())
            raise StepError(f"no site takes part: {reasons}")
        return [found.get(site) for site in self.sites]

    def replies(self, call: Call) -> Iterator[Replies]:
        self._number += 1
        number = self._number
        up = {c: self.sites[c] for c in call.clients if self.sites[c] not in self.refused}
        vectors = {f"held.{name}": held.value for name, held in call.held.items()}

        def request(client: int, names: set[str]) -> bytes:
            down = {name: np.asarray(v) for name, v in vectors.items() if name.removeprefix("held.") in names}
            down |= {f"array.{name}": np.asarray(value) for name, value in call.arrays.items()}
            rows = {f"row.{n}": np.asarray(each.values[client], np.float32) for n, each in call.rows.items()}
            return pack(self._header(call, client, number), down | rows)

        lacking = {c: {name for name, held in call.held.items() if c in held.missing} for c in up}
        requests = {site: request(c, lacking[c]) for c, site in up.items()}
        delivery = self._send(requests, self._timeout)
        sent = {site: len(data) for site, data in requests.items()}
        replies, failures = dict(delivery.replies), dict(delivery.failures)

        again: dict[str, bytes] = {}
        for c, site in up.items():  # a site that lost a vector is sent it again, once
            names = _lost(replies.get(site), number)
            if names:
                again[site] = request(c, set(names) | lacking[c])
        if again:
            second = self._send(again, self._timeout)
            replies |= second.replies
            failures |= second.failures
            for site, data in again.items():
                sent[site] += len(data)

        self.lost = {site: why for site, why in failures.items() if site in sent}
        limit = HEADER_LIMIT + 4 * self._largest(call)
        for client in call.clients:
            site = self.sites[client]
            if site in self.refused or site in failures or site not in replies:
                why = self.refused.get(site) or failures.get(site, "no reply")
                absent = Reason(Fault.ABSENT, f"{site}: {why}")
                yield Replies(refused={client: absent}, wire=(0, sent.get(site, 0)))
                continue
            got = len(replies[site]) if isinstance(replies[site], bytes) else 0
            wire = got, sent[site]
            try:
                reply, forgot = self._checked(call, replies[site], number, limit)
            except Malformed as error:
                yield Replies(refused={client: Reason(Fault.FAILED, f"{site}: {error}")}, wire=wire)
            else:
                yield Replies(clients=(client,), reply=reply, wire=wire, forgot=(client,) if forgot else ())

    def close(self) -> None:
        """Do nothing: the engine holds no resources, and sites end with their job."""

    def _header(self, call: Call, client: int, number: int) -> dict[str, Any]:
        return {
            "kind": "step",
            "round": number,
            "session": self._session,
            "step": call.step.address,
            "address": [call.address.seed, call.address.kind.value, call.address.place],
            "clock": call.clock,
            "settled": call.settled if self._safe is None else min(call.settled, self._safe()),
            "kept": call.kept.get(client),
            "client": client,
            "held": {name: held.version for name, held in call.held.items()},
            "constants": dict(call.constants),
            "samples": {name: descriptor_to_json(d) for name, d in call.samples.items()},
        }

    def _largest(self, call: Call) -> int:
        """The largest number of values that a reply to this call may have."""
        return min(sum(map(math.prod, expect(call, self.problem).fields.values())), LIMIT // 4)

    def _checked(self, call: Call, data: Any, number: int, limit: int) -> tuple[Any, bool]:
        """The reply as the step's NamedTuple, with a first axis of one, and whether the site has lost its state.

        The federation checks the shapes.
        """
        message = unpack(data, limit)
        kind = message.header.get("kind")
        if message.header.get("round") != number:
            raise Malformed(f"a reply to round {message.header.get('round')} instead of {number}")
        if kind == "error":
            raise Malformed(f"{call.step.name}: {str(message.header.get('reason'))[:500]}")
        if kind != "reply" or message.header.get("step") != call.step.address:
            raise Malformed(f"a {kind} of {message.header.get('step')} instead of a reply of {call.step.address}")
        unknown = message.vectors.keys() - call.step.sent.keys()
        if unknown:
            raise Malformed(f"fields {sorted(unknown)}, which {call.step.name} does not have")
        fields = {n: message.vectors[n][None] if n in message.vectors else None for n in call.step.reply}
        return call.step.reply_type(**fields), message.header.get("forgot") is True


def _lost(reply: Any, number: int) -> list[str]:
    """The names of the vectors that a site reports as lost."""
    try:
        message = unpack(reply)
        if message.header.get("kind") == "lost" and message.header.get("round") == number:
            return [str(name) for name in message.get("names", list)]
    except Malformed:
        pass
    return []

"""The server's side: it turns a call into a request to each site of the cohort, and checks the replies."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...data import ClientData, ClientSize
from ...errors import SettingsError, StepError
from ...problem import BilevelProblem, constants_of
from ...steps import place_of
from .._base import MAX_ROWS, Capabilities
from .._call import Call
from .._expected import expect
from .._replies import Fault, Reason, Replies
from .wire import HEADER_LIMIT, LIMIT, Malformed, Message, Trouble, descriptor_to_json, pack, unpack, whole

SAYS = {  # what the ledger counts by when a site answers with an error
    Trouble.REQUEST.value: "the site cannot use the request",
    Trouble.REFUSED.value: "the site refuses the request",
    Trouble.FAILED.value: "the step failed at the site",
}
MAX_PID = 2**32  # the largest number of a process on the systems that we know of


UNKNOWN = ClientSize(0, 0)  # of a site that does not take part, or does not tell


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
        self._sizes = [size or UNKNOWN for size in sizes]

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

    sites     the names of all registered sites; client i of the federation is site i, whether it is up or not
    send      carries the bytes
    timeout   seconds that a site has for a step
    noise     the noise multiplier of local privacy, if it is on; every site adds this noise itself
    run       the name of the run, by which a site finds its states; a job that continues a run has the same name
    spec      the digest of the run's spec, which a site may want to know before it takes part
    safe      returns the clock of the checkpoint from which the run would continue if the server were lost
              (default: the checkpoint that the federation has settled)
    max_rows  the most rows of a part that a site may claim; a site that claims more does not take part
    bound     is told before each request how many bytes a reply can have, so that the transport can refuse more
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
        max_rows: int = MAX_ROWS,
        bound: Callable[[int], Any] = lambda largest: None,
    ) -> None:
        self.problem, self.sites = problem, tuple(sites)
        self.capabilities = Capabilities(states=None, local_work=False, adds_noise=noise is not None)
        self._noise, self._run, self._spec = noise, run or secrets.token_hex(8), spec
        self._safe, self._max_rows = safe, max_rows
        self._send, self._timeout, self._bound = send, timeout, bound
        self._session, self._number = secrets.token_hex(8), 0
        self.lost: dict[str, str] = {}  # the sites not reached in the last call, with the reason
        self.pids: dict[str, int] = {}
        self._refused: dict[str, Reason] = {}
        self.clients = RemoteClients(self._greet())

    @property
    def refused(self) -> dict[str, str]:
        """The sites that do not take part, with the reason: the site's own if it gave one."""
        return {site: why.said or why.text for site, why in self._refused.items()}

    def _greet(self) -> list[ClientSize | None]:
        """Begin a session with every site that is up; sites with a different problem are refused."""
        sizes = [self.problem.size_x, self.problem.size_y]
        header = {"kind": "hello", "round": 0, "session": self._session, "run": self._run}
        header |= {"sizes": sizes, "noise": self._noise, "spec": self._spec}
        constants = constants_of(self.problem)
        header |= {} if constants is None else {"constants": constants}
        self._bound(HEADER_LIMIT)
        delivery = self._send(dict.fromkeys(self.sites, pack(header, {})), self._timeout)
        self._refused = {site: _absent(why) for site, why in delivery.failures.items()}
        found: dict[str, ClientSize] = {}
        for site, data in delivery.replies.items():
            message = _read(data, 0, HEADER_LIMIT)
            try:
                if isinstance(message, Message):
                    size, pid = _welcomed(message, self._max_rows)
                    constants = _agreed(constants, message.header.get("constants"))
                    found[site], self.pids[site] = size, pid
                else:
                    self._refused[site] = message
            except Malformed as error:
                self._refused[site] = Reason(Fault.MALFORMED, str(error))
        if not found:
            reasons = "; ".join(f"{site}: {why}" for site, why in self.refused.items())
            raise StepError(f"no site takes part: {reasons}")
        return [found.get(site) for site in self.sites]

    def replies(self, call: Call) -> Iterator[Replies]:
        self._number += 1
        number = self._number
        limit = HEADER_LIMIT + 4 * self._largest(call)
        self._bound(limit)
        up = {c: self.sites[c] for c in call.clients if self.sites[c] not in self._refused}
        vectors = {f"held.{name}": held.value for name, held in call.held.items()}

        def request(client: int, names: set[str]) -> bytes:
            down = {name: np.asarray(v) for name, v in vectors.items() if name.removeprefix("held.") in names}
            down |= {f"array.{name}": np.asarray(value) for name, value in call.arrays.items()}
            rows = {f"row.{n}": np.asarray(each.values[client], np.float32) for n, each in call.rows.items()}
            return pack(self._header(call, client, number), down | rows)

        answers: dict[str, Message | Reason] = {}
        got, sent = dict.fromkeys(self.sites, 0), dict.fromkeys(self.sites, 0)
        self.lost = {}

        def exchange(requests: Mapping[str, bytes]) -> None:
            delivery = self._send(requests, self._timeout)
            for site, data in requests.items():
                reply = delivery.replies.get(site)
                sent[site] += len(data)
                got[site] = len(reply) if isinstance(reply, bytes) else 0
                if site in delivery.failures or site not in delivery.replies:
                    absent = answers[site] = _absent(delivery.failures.get(site, ""))
                    self.lost[site] = absent.said or absent.text
                else:
                    answers[site] = _read(reply, number, limit)

        lacking = {c: {name for name, held in call.held.items() if c in held.missing} for c in up}
        exchange({site: request(c, lacking[c]) for c, site in up.items()})
        again = {c: _lost(answers[site], call) for c, site in up.items()}
        if any(again.values()):  # a site that lost a vector is sent it again, once
            exchange({up[c]: request(c, names | lacking[c]) for c, names in again.items() if names})

        for client in call.clients:
            site = self.sites[client]
            answer = answers.get(site) or dataclasses.replace(self._refused[site], fault=Fault.ABSENT)
            reply = self._checked(call, answer) if isinstance(answer, Message) else answer
            wire = got[site], sent[site]
            if isinstance(reply, Reason):
                why = dataclasses.replace(reply, text=f"{site}: {reply.text}")
                yield Replies(refused={client: why}, wire=wire)
            else:
                forgot = isinstance(answer, Message) and answer.header.get("forgot") is True
                yield Replies(clients=(client,), reply=reply, wire=wire, forgot=(client,) if forgot else ())

    def close(self) -> None:
        """Do nothing: the engine holds no resources, and sites end with their job."""

    def _header(self, call: Call, client: int, number: int) -> dict[str, Any]:
        return {
            "kind": "step",
            "round": number,
            "session": self._session,
            "step": call.step.address,
            "address": [call.address.kind.value, call.address.place],
            "keys": {
                name: call.address.at(place_of(d)).key(name, client).hex() for name, d in call.samples.items()
            },
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

    def _checked(self, call: Call, message: Message) -> Any:
        """The reply as the step's NamedTuple, with a first axis of one, or the reason why it is not one.

        The federation checks the shapes.
        """
        kind, step = message.header.get("kind"), call.step
        if kind == "lost":
            again = "again" if _lost(message, call) else "that it does not hold"
            return Reason(Fault.MALFORMED, f"the site reports a lost vector {again}")
        if kind != "reply" or message.header.get("step") != step.address:
            return Reason(Fault.MALFORMED, f"not a reply of {step.address}")
        unknown = message.vectors.keys() - step.sent.keys()
        if unknown:
            return Reason(Fault.MISFIT, f"fields {sorted(unknown)}, which {step.name} does not have")
        return step.reply_type(
            **{n: message.vectors[n][None] if n in message.vectors else None for n in step.reply}
        )


def _absent(why: str) -> Reason:
    """The reason for a site that did not answer. What the transport says of it may come from the site."""
    return Reason(Fault.ABSENT, "no reply", said=why)


def _read(data: Any, number: int, limit: int) -> Message | Reason:
    """The message of a site if it answers the request of this number, or the reason why it cannot be used."""
    try:
        message = unpack(data, limit)
        if message.header.get("kind") == "error":
            code, said = message.header.get("code"), message.header.get("reason")
            text = SAYS.get(code if isinstance(code, str) else "", "the site reports an error")
            return Reason(Fault.FAILED, text, said=said if isinstance(said, str) else "")
        if message.get("round", int) != number:
            return Reason(Fault.STALE, "a reply to another round")
        return message
    except Malformed as error:
        return Reason(Fault.MALFORMED, str(error))


def _welcomed(message: Message, max_rows: int) -> tuple[ClientSize, int]:
    """The numbers of rows and the process of a site that takes part."""
    rows, pid = message.header.get("rows"), message.header.get("pid")
    if message.header.get("kind") != "welcome" or message.vectors:
        raise Malformed("not a welcome")
    if not whole(pid, 1, MAX_PID):
        raise Malformed(f"its process is not a whole number from 1 to {MAX_PID}")
    if rows is None:  # a private site does not tell
        return UNKNOWN, pid
    if not isinstance(rows, list) or len(rows) != 2 or not all(type(n) is int and n > 0 for n in rows):
        raise Malformed("its numbers of rows are not two positive whole numbers")
    if max(rows) > max_rows:
        raise Malformed(
            f"it claims more rows than federation.max_rows = {max_rows}; set it higher if that is right"
        )
    return ClientSize(*rows), pid


def _agreed(known: str | None, told: Any) -> str | None:
    """The digest of the numbers that are not trained, which is that of the first site that has such numbers."""
    if told is None or known is None:
        return known if told is None else str(told)[:64]
    if told != known:
        raise Malformed(
            "its buffers or frozen weights are not those of the other sites; give all sites the same weights"
        )
    return known


def _lost(answer: Message | Reason, call: Call) -> set[str]:
    """The held vectors that a site reports as lost; none if it reports anything else."""
    names = answer.header.get("names") if isinstance(answer, Message) else None
    if not isinstance(answer, Message) or answer.header.get("kind") != "lost" or not isinstance(names, list):
        return set()
    held = all(isinstance(name, str) and name in call.held for name in names)
    return set(names) if held else set()

"""A site's side: private data, the vectors it holds, and answers to the server's requests.

A request asks for one step by its name. Only steps of this library and of modules that the site itself allows
are run. The site holds the vectors that the server gave it, and asks for them again if it has lost them. The
client's own state is in files of the site, with one folder for each run. If the server knows of a state that the
site has lost, the site says so and starts afresh. A request that comes twice gets the same answer; a request that
is older than the last one is refused. So is what the site's own policy does not allow.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...data import ClientData, ClientSize
from ...errors import FedBilevelError, Refused, one_line
from ...problem import BilevelProblem, constants_of
from ...rng import KEY_SIZE, Address, Keys, Kind
from ...steps import PerClient, Step, find_step
from .._base import Engine
from .._call import Call, Held
from .._replies import SHOWN
from .._states import ClientStates
from .._work import recalls
from ..loop import Loop
from ._audit import Audit
from ._policy import Guard, SitePolicy
from .wire import LIMIT, Malformed, Message, Trouble, descriptor_from_json, descriptor_to_json, pack, unpack


class OwnData:
    """The site's data as those of one client, whatever its number at the server. Nothing is padded."""

    def __init__(self, data: ClientData) -> None:
        self._data = data
        self.capacity = ClientSize(data.lower.rows, data.upper.rows)
        self.test_rows = 0 if data.test is None else data.test.rows
        self.count = 1

    def size(self, client: int) -> ClientSize:
        return self.capacity

    def load(self, client: int) -> ClientData:
        return self._data


MakeEngine = Callable[[BilevelProblem, OwnData, ClientStates], Engine]


class Site:
    """Answers requests with private data.

    modules   the modules whose steps are allowed, beside this library's
    limit     the largest request, in bytes
    audit     a file that gets a line for each hello, for each step before it is run, and for each refusal
    policy    what the site refuses, whatever the server asks (default: nothing)
    folder    has the count of requests, if the policy limits it (default: they are counted in memory only)
    noise     the multiplier of the noise that the site's engine adds, if it adds any
    engine    makes the engine for a run from the problem, the data and the store of states (default: a `Loop`)
    states    the folder of the states, with a folder for each run (default: states are in memory only)
    """

    def __init__(
        self,
        problem: BilevelProblem,
        data: ClientData,
        *,
        modules: Sequence[str] = (),
        limit: int = LIMIT,
        audit: Path | None = None,
        policy: SitePolicy | None = None,
        folder: Path | None = None,
        noise: float | None = None,
        engine: MakeEngine = lambda problem, clients, states: Loop(problem, clients, states=states),
        states: Path | None = None,
    ) -> None:
        self._audit, self._noise = None if audit is None else Audit(audit), noise
        self._guard = Guard(policy or SitePolicy(), folder)
        self._problem, self._size, self._limit = problem, ClientSize(data.lower.rows, data.upper.rows), limit
        self._modules = ("fedbilevel", *modules)
        self._make, self._folder = engine, states
        self._data = OwnData(jax.tree.map(np.asarray, data))
        self._run: str | None = None
        self._engine, self._states = self._opened("")
        self._lock = threading.Lock()  # A call that timed out may still be running when the next one comes.
        self._session: str | None = None
        self._shelf: dict[str, tuple[int, np.ndarray]] = {}
        self._last: tuple[int, bytes] = (-1, b"")

    def answer(self, request: Any, caller: str = "server") -> bytes:
        """The reply to a request. An error is also a reply, with a code and a short reason; nothing is raised."""
        with self._lock:
            number, step = -1, None
            try:
                message = unpack(request, self._limit)
                step = message.header.get("step")
                number = message.get("round", int)
                return self._answer(message, number, caller)
            except Malformed as error:
                trouble, reason = Trouble.REQUEST, str(error)
            except Refused as error:
                trouble, reason = Trouble.REFUSED, str(error)
            except FedBilevelError as error:
                trouble, reason = Trouble.FAILED, str(error)
            except (Exception, SystemExit) as error:  # a module of the site may end its process when imported
                trouble, reason = Trouble.FAILED, f"{type(error).__name__}: {error}"
            reason = one_line(reason, SHOWN)
            self.note(caller, reason, number=number, step=one_line(step, SHOWN) if isinstance(step, str) else None)
            if trouble is Trouble.FAILED and self._noise is not None:  # what an exception says may be the data
                reason = "the site is private, and does not tell why"
            return pack({"kind": "error", "round": number, "code": trouble.value, "reason": reason}, {})

    def _answer(self, message: Message, number: int, caller: str) -> bytes:
        if message.header.get("kind") == "hello":
            return self._hello(message, number, caller)
        if message.header.get("kind") != "step":
            raise Malformed("the request is neither a hello nor a step")
        if message.get("session", str) != self._session:
            raise Malformed("the session is another one; say hello first")
        if number < self._last[0] or (number == self._last[0] and not self._last[1]):
            raise Malformed(f"round {number} is over, {self._last[0]} was the last")
        if number == self._last[0]:
            return self._last[1]
        lost = self._shelve(message)
        if lost:  # this is not the answer yet: the server repeats the round with the lost vectors
            return pack({"kind": "lost", "round": number, "names": lost}, {})
        self._last = number, self._work(message, number, caller)
        return self._last[1]

    def note(self, caller: str, reason: str, **more: Any) -> None:
        """Write a refusal into the audit file. It is a refusal also where it cannot be written."""
        if self._audit is not None:
            with contextlib.suppress(OSError):
                self._audit.write(what="refused", caller=caller, **more, reason=reason)

    def _hello(self, message: Message, number: int, caller: str) -> bytes:
        """Begin a new session, in which nothing is held. The numbers of parameters must be the server's."""
        spec = message.header.get("spec")
        self._guard.admit(spec)
        ours, theirs = [self._problem.size_x, self._problem.size_y], message.get("sizes", list)
        if ours != theirs:
            raise Malformed(
                f"the site's problem has {ours} parameters of x and y, the server's has {theirs}; "
                "make the site's [problem] that of the spec"
            )
        constants, wanted = constants_of(self._problem), message.header.get("constants")
        if constants is not None and wanted is not None and constants != wanted:
            raise Malformed(
                "the site's buffers or frozen weights are not the server's; give both the same weights, for "
                "example from one file"
            )
        if message.vectors:
            raise Malformed("a hello has no vectors")
        asked = message.header.get("noise")
        if asked is not None and not (type(asked) in (int, float) and asked > 0):
            raise Malformed("the noise of the run is not a positive number")
        if asked is not None and (self._noise is None or not self._noise >= asked):
            raise Malformed(
                f"the run promises local privacy with noise {asked}, this site adds {self._noise or 'none'}; "
                "set it in [privacy] of the site's TOML, or remove privacy.mode"
            )
        run, session = message.get("run", str), message.get("session", str)
        if not run.isalnum() or not run.isascii() or len(run) > 64:
            raise Malformed("the name of the run is not valid")
        if self._audit is not None:
            told = {"spec": spec, "noise": asked} if isinstance(spec, str | None) else {"noise": asked}
            self._audit.write(what="hello", caller=caller, run=run, **told)
        if run != self._run:
            self._engine.close()
            self._run, (self._engine, self._states) = run, self._opened(run)
        self._session, self._shelf, self._last = session, {}, (number, b"")
        rows = list(self._size) if self._noise is None else None  # a private site tells nothing without noise
        more = {} if constants is None else {"constants": constants}
        return pack({"kind": "welcome", "round": number, "rows": rows, "pid": os.getpid(), **more}, {})

    def _opened(self, run: str) -> tuple[Engine, ClientStates]:
        """The engine for a run, with the states that the site has kept for it."""
        if self._folder is None or not run:
            states = ClientStates()
        else:
            states = ClientStates(folder=self._folder / run, durable=True)
        return self._make(self._problem, self._data, states), states

    def _shelve(self, message: Message) -> list[str]:
        """Keep the vectors that are sent to be held, and return the names of those that are missing."""
        versions = message.get("held", dict)
        for name, version in versions.items():
            sent = message.vectors.get(f"held.{name}")
            if sent is not None:
                self._shelf[name] = version, sent
        return [name for name, version in versions.items() if self._shelf.get(name, (None,))[0] != version]

    def _work(self, message: Message, number: int, caller: str) -> bytes:
        call = self._call(message, message.get("held", dict))
        self._guard.permit(call, {**call.arrays, **call.constants, **call.rows}, self._size)
        if self._audit is not None:
            samples = {name: descriptor_to_json(sample) for name, sample in call.samples.items()}
            asked = {"number": number, "round": str(call.address), "step": call.step.name, "samples": samples}
            self._audit.write(what="step", caller=caller, **asked, down=list(message.vectors))
        forgot = self._forgot(call, message.header.get("kept"))
        (replies,) = self._engine.replies(call)
        fields = {name: value for name, value in replies.reply._asdict().items() if value is not None}
        vectors = {name: np.asarray(value)[0] for name, value in fields.items()}
        header: dict[str, Any] = {"kind": "reply", "round": number, "step": call.step.address}
        return pack(header | ({"forgot": True} if forgot else {}), vectors)

    def _forgot(self, call: Call, kept: Any) -> bool:
        """Whether the step needs a state that the server knows of and the site has lost."""
        if not isinstance(kept, int) or not recalls(call, self._problem):
            return False
        found = self._states.latest(call.clients[0], call.clock)
        return kept < call.clock and (found is None or found < kept)

    def _call(self, message: Message, versions: dict[str, int]) -> Call:
        client, vectors = message.get("client", int), message.vectors
        samples = {name: descriptor_from_json(v) for name, v in message.get("samples", dict).items()}
        constants = {name: _constant(value) for name, value in message.get("constants", dict).items()}
        return Call(
            step=self._step(message.get("step", str)),
            address=_address(message.get("address", list), {n: message.get("keys", dict).get(n) for n in samples}),
            clients=(client,),
            clock=message.get("clock", int),
            settled=message.get("settled", int),
            held={name: Held(version, self._shelf[name][1], ()) for name, version in versions.items()},  # type: ignore[arg-type]
            arrays={n.removeprefix("array."): v for n, v in vectors.items() if n.startswith("array.")},
            constants=constants,
            rows={
                n.removeprefix("row."): PerClient({client: v}) for n, v in vectors.items() if n.startswith("row.")
            },
            samples=samples,
        )

    def _step(self, address: str) -> Step[Any, Any]:
        module = address.partition(":")[0]
        if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in self._modules):
            raise Malformed(f"step {address} is not of a module that this site allows: {', '.join(self._modules)}")
        try:
            importlib.import_module(module)
        except ImportError:
            raise Malformed(f"step {address} is unknown here: there is no module {module}") from None
        return find_step(address)


def _constant(value: Any) -> Any:
    """A constant of a step. A list of words is a tuple, so that it can choose a program."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    if isinstance(value, dict | list):
        raise Malformed("a constant is not a number, a word, a list of words, true, false or null")
    return value


def _address(value: list[Any], keys: dict[str, Any]) -> Address:
    """The address of a call's draws. Requests are for rounds and probes only; local work needs no message."""
    kinds = {kind.value: kind for kind in (Kind.ROUND, Kind.PROBE)}
    match value:
        case [str(kind), int(place)] if kind in kinds:
            return Address(Keys({name: _key(name, key) for name, key in keys.items()}), kinds[kind], place)
    raise Malformed(f"an address is described as {str(value)[:80]}")


def _key(name: str, value: Any) -> bytes:
    try:
        key = bytes.fromhex(value)
    except (TypeError, ValueError):
        key = b""
    if len(key) != KEY_SIZE:
        raise Malformed(f"the key of the draws for {name[:40]!r} is not {KEY_SIZE} bytes")
    return key

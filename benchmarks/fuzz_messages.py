"""Messages at random: each is read or refused by name, at the server and at a site.

    python benchmarks/fuzz_messages.py --count 100000

Valid messages of all kinds are mutated: bytes are flipped, cut, repeated and swapped, fields of the header are
replaced by other types, extreme numbers and deep nests, vectors are described differently, and rounds and
sessions are those of others. `--count` is the number of messages in each direction. The same seed makes the same
messages.

A message that is neither accepted nor refused has escaped: it raised, ended a round of honest sites, made a site
run what was not asked for, or left text that cannot be printed. It is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedbilevel import Federation, Policies, Reason
from fedbilevel._probes import losses
from fedbilevel.algorithms.local import lower_gradient, lower_sgd
from fedbilevel.engines import Call, Loop, Replies
from fedbilevel.engines.flare import Flare, Site, pack, unpack
from fedbilevel.engines.flare.server import Delivery
from fedbilevel.engines.flare.wire import MAGIC, PREFIX
from fedbilevel.ledger import Ledger
from fedbilevel.problems import Quadratic, QuadraticTask
from fedbilevel.runtime import prepare_runtime
from fedbilevel.steps import PerClient, Sample, Samples

Header = dict[str, Any]
ESCAPED = "ESCAPED"
STEPS = (lower_gradient, lower_sgd, losses)  # a direction, the next value of a vector, and two numbers
VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "\x1b[2J\x07", "\ud800", "\u202e", "q" * 5000, "__class__", "../../etc",
    "fedbilevel:x",
    -1, 0, 1, 2, 7, 8, 64, 1.5, -0.0, 1e308, 2**20, 2**31, 2**53, -(2**63), 2**64, 10**39, 10**60,
    [], {}, [[]], [1, 2], [True], ["x"] * 300, {"a": {"b": {}}}, {"kind": "reply"}, {"name": "q"},
)  # fmt: skip
TOKENS = (  # JSON, or nearly, that `json.dumps` does not write
    "NaN", "-Infinity", "1e999", "-1e999", "9" * 5000, "9" * 41, "[" * 20 + "]" * 20, "[" * 30000 + "]" * 30000,
    '{"a":' * 30000 + "1" + "}" * 30000, '{"a": 1, "a": 2}', "[1,]", "tru", '"\\ud800"', '"\\u0000"', "01", "--1",
    "",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------- mutations


def joined(text: bytes, body: bytes) -> bytes:
    return PREFIX.pack(MAGIC, len(text)) + text + body


def split(message: bytes) -> tuple[Header, bytes]:
    _, length = PREFIX.unpack_from(message)
    return json.loads(message[PREFIX.size : PREFIX.size + length]), message[PREFIX.size + length :]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every field of nested JSON values, as its container and its key."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def value(draw: random.Random) -> Any:
    """Any value; a copy, because the mutations after it may change it."""
    return copy.deepcopy(draw.choice(VALUES))


def change_field(header: Header, draw: random.Random) -> None:
    """Replace, delete, add or repeat a field anywhere in the header."""
    where, key = draw.choice(list(places(header)))
    match draw.randrange(6):
        case 0:
            del where[key]
        case 1:
            other, from_key = draw.choice(list(places(header)))
            if key in where if isinstance(where, dict) else key < len(where):
                where[key] = copy.deepcopy(other[from_key])
        case 2 if isinstance(where, dict):
            where[draw.choice(("names", "forgot", "rows", "reason", "code", "x", "vectors"))] = value(draw)
        case 3:
            where[key] = f"@@{draw.randrange(len(TOKENS))}@@"
        case _:
            where[key] = value(draw)


def describe_differently(header: Header, draw: random.Random) -> None:
    """Give a vector another name, type or shape, or list the vectors differently."""
    vectors = header["vectors"]
    if not vectors or draw.random() < 0.2:
        vectors.append(
            {"name": draw.choice(("q", "w", "held.x", "array.a", "")), "dtype": "float32", "shape": [0]}
        )
        return
    entry = draw.choice(vectors)
    match draw.randrange(5):
        case 0:
            entry["name"] = draw.choice(
                ("q", "z", "x", "held.x", "held.y", "array.q", "row.q", "q.q", "Q" * 101, "\x00")
            )
        case 1:
            entry["dtype"] = draw.choice(("float64", "int32", "float16", "O", "<f4", "float32 "))
        case 2:
            entry["shape"] = draw.choice(
                ([], [0], [4, 2], [2, 4], [1, 8], [9], [7], [8, 1, 1, 1, 1], [2**30] * 4, [0, *[2**30] * 3])
            )
        case 3:
            vectors.append(dict(entry))
        case _:
            draw.shuffle(vectors)


def belong_elsewhere(header: Header, draw: random.Random) -> None:
    """Give the header the round, the session, the kind or the step of another message."""
    key = draw.choice(("round", "session", "kind", "step", "run", "client", "clock"))
    kinds = ("hello", "welcome", "step", "reply", "lost", "error", "Reply")
    steps = (losses.address, lower_gradient.address, "fedbilevel.algorithms.aggitd:gradients", "os:system")
    numbers = (-1, 0, header["round"] - 1 if isinstance(header.get("round"), int) else 3, 10**6)
    choices = {"kind": kinds, "step": steps, "session": ("t", ""), "run": ("r", "../r", "R" * 65)}
    header[key] = draw.choice(choices.get(key, numbers))


def spoil_bytes(message: bytes, draw: random.Random, other: bytes) -> bytes:
    """Flip, cut, repeat or exchange bytes."""
    data = bytearray(message)
    at, length = draw.randrange(len(data)), draw.randint(1, 32)
    match draw.randrange(7):
        case 0:
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = data[at : at + length] * draw.randint(1, 9)
        case 4:
            data[at : at + length] = draw.randbytes(length)
        case 5:
            data[4:8] = draw.choice((0, 1, len(data), 2**20, 2**20 + 1, 2**32 - 1)).to_bytes(4, "little")
        case _:
            data[at:] = other[at:] if draw.random() < 0.5 else other
    return bytes(data)


def with_other_vectors(header: Header, draw: random.Random) -> bytes:
    """The message with vectors of other lengths, types or values, which the header describes rightly."""
    vectors: dict[str, Any] = {}
    for entry in header["vectors"]:
        size = draw.choice((entry["shape"], entry["shape"], [draw.randrange(20)], [2, 4], []))
        entries = draw.choice((0.5, 0.5, -1e14, 1e20, np.nan, np.inf))
        name = draw.choice((*[entry["name"]] * 4, "w"))
        vectors[name] = np.full(size, entries, draw.choice((np.float32, np.float32, np.float64)))
    return pack({key: field for key, field in header.items() if key != "vectors"}, vectors)


def mutated(message: bytes, draw: random.Random, other: bytes) -> Any:
    """The message with one to three changes; one in two hundred is left as it is, and some are not even bytes."""
    if draw.random() < 0.005:
        return message
    if draw.random() < 0.005:
        return draw.choice((None, "", {}, 7, [message], bytearray(message), memoryview(message)))
    if draw.random() < 0.1:
        return with_other_vectors(split(message)[0], draw)
    if draw.random() < 0.75:
        header, body = split(message)
        for _ in range(draw.randint(1, 3)):
            how = draw.choice((change_field, change_field, describe_differently, belong_elsewhere))
            if (
                isinstance(header.get("vectors"), list)
                and header
                and all(isinstance(v, dict) for v in header["vectors"])
            ):
                how(header, draw)
        text = json.dumps(header)
        for number, token in enumerate(TOKENS):
            text = text.replace(f'"@@{number}@@"', token)
        if draw.random() < 0.05:
            text = "{" + text[1:-1] + ", " + text[1:]  # every key twice
        message = joined(text.encode(), body)
    if draw.random() < 0.4:
        message = spoil_bytes(message, draw, other)
    return message


# ------------------------------------------------------------------------------------------------ to the server


class Tally(Ledger):
    """Books that remember the last reason in full."""

    last: tuple[int, Reason] | None = None

    def reject(self, client: int, step: str, reason: Reason) -> None:
        self.last = client, reason
        super().reject(client, step, reason)


class ServerFuzz:
    """A server with an honest site and one whose messages are mutated."""

    kinds = ("welcome", "reply", "lost", "error")

    def __init__(self, task: QuadraticTask) -> None:
        self.problem = task.problem
        self._sites = {name: Site(task.problem, task.clients.load(i)) for i, name in enumerate("ab")}
        self._said: dict[str, bytes] = {}  # valid replies, by the step that they answer
        self._spoil: Callable[[bytes], Any] = lambda reply: reply
        self._lose = False
        self._fed = self._federation()
        for step in STEPS:
            self._step(step)

    def _federation(self) -> Federation:
        made = Federation(Flare(self.problem, "ab", self._send), policies=Policies(strikes=None), ledger=Tally())
        made.hold(x=jnp.ones(self.problem.size_x), y=jnp.ones(self.problem.size_y))
        return made

    def _send(self, requests: Mapping[str, bytes], timeout: float, /) -> Delivery:
        """Deliver what the sites once answered to the same step, with the round of the request."""
        replies: dict[str, Any] = {}
        for name, request in requests.items():
            asked = unpack(request).header
            key = f"{name} {asked.get('step')}"
            if key not in self._said:
                self._said[key] = self._sites[name].answer(request)
            header, body = split(self._said[key])
            replies[name] = joined(json.dumps(header | {"round": asked["round"]}).encode(), body)
            if name == "b" and self._lose:
                replies[name] = pack({"kind": "lost", "round": asked["round"], "names": ["x", "y"]}, {})
                self._lose = False
        replies["b"] = self._spoil(replies["b"]) if "b" in replies else None
        return Delivery({name: reply for name, reply in replies.items() if name in requests}, {})

    def _step(self, step: Any) -> Any:
        if step is losses:
            given: Any = {"x": jnp.ones(self.problem.size_x), "y": jnp.ones(self.problem.size_y)}
            return self._fed.probe(losses, **given, xi=Sample("upper"), zeta=Sample("lower"))
        if step is lower_sgd:
            zeta = Samples("lower", 4, PerClient((2, 3)))
            return self._fed.round(lower_sgd, beta=0.1, shared=True, zeta=zeta)
        return self._fed.round(lower_gradient, zeta=Sample("lower"))

    def one(self, draw: random.Random) -> str:
        """Send one mutated message; return what became of it."""
        kind = draw.choice(self.kinds)
        step, other = draw.choice(STEPS), self._said[f"b {draw.choice(STEPS).address}"]
        sent: list[bytes] = []

        def spoil(reply: bytes) -> Any:
            if sent:
                return reply  # one mutated message at a time
            sent.append(b"")
            if kind == "error":
                header, _ = split(reply)
                reply = pack({"kind": "error", "round": header["round"], "code": "failed", "reason": "why"}, {})
            return mutated(reply, draw, other)

        self._spoil = spoil
        try:
            return self._welcome() if kind == "welcome" else self._reply(step, lost=kind == "lost")
        finally:
            self._spoil, self._lose = lambda reply: reply, False

    def _welcome(self) -> str:
        engine = Flare(self.problem, "ab", self._send)
        assert "a" not in engine.refused and engine.clients.count == 2
        assert all(text.isprintable() and len(text) <= 120 for text in engine.refused.values())
        assert all(0 < pid < 2**32 for pid in engine.pids.values())
        assert all(0 <= n <= 10**7 for c in (0, 1) for n in engine.clients.size(c))
        return engine._refused["b"].fault.value if "b" in engine.refused else "accepted"

    def _reply(self, step: Any, lost: bool) -> str:
        books = self._fed.ledger
        assert isinstance(books, Tally)
        books.last, self._lose = None, lost
        value = self._step(step)
        assert all(np.isfinite(np.asarray(v)).all() for v in value if v is not None)
        if books.last is None:
            return "accepted"
        client, reason = books.last
        assert client == 1 and all(t.isprintable() and len(t) <= 120 for t in (reason.text, reason.said))
        assert len(books.rejected) <= 64
        return reason.fault.value


# --------------------------------------------------------------------------------------------------- to a site


class Watched:
    """A loop that notes the calls that it runs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.problem, self.clients, self.capabilities = loop.problem, loop.clients, loop.capabilities
        self.calls: list[Call] = []

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        yield from self._loop.replies(call)

    def close(self) -> None:
        self._loop.close()


class SiteFuzz:
    """A site that is sent mutated requests."""

    kinds = ("hello", "step")

    def __init__(self, task: QuadraticTask) -> None:
        self._engines: list[Watched] = []

        def make(problem: Any, clients: Any, states: Any) -> Watched:
            self._engines[:] = [Watched(Loop(problem, clients, states=states))]
            return self._engines[0]

        self._site = Site(task.problem, task.clients.load(0), engine=make)
        p, q = task.problem.size_x, task.problem.size_y
        hello = {"kind": "hello", "round": 0, "session": "s", "run": "r", "sizes": [p, q], "noise": None}
        header = {"kind": "step", "round": 1, "session": "s", "address": ["round", 0], "clock": 0, "settled": 0}
        keys = {name: bytes(range(16)).hex() for name in ("zeta", "xi")}
        header |= {"kept": None, "client": 0, "constants": {}, "keys": keys}
        x, y = np.ones(p, np.float32), np.ones(q, np.float32)
        draws = {"kind": "sample", "part": "lower", "size": 4}
        held, xy = {"held": {"x": 1, "y": 2}}, {"held.x": x, "held.y": y}
        first = header | held | {"step": lower_gradient.address, "samples": {"zeta": draws}}
        second = header | held | {"step": lower_sgd.address, "constants": {"shared": True}}
        second |= {"samples": {"zeta": {"kind": "samples", "part": "lower", "size": 4, "count": [2, 3]}}}
        third = header | {"step": losses.address, "held": {}}
        third |= {"samples": {"zeta": draws, "xi": {"kind": "sample", "part": "upper"}}}
        self._hello = pack(hello, {})
        self._steps = (
            pack(first, xy),
            pack(second, xy | {"array.beta": np.float32(0.1)}),
            pack(third, {"array.x": x, "array.y": y}),
        )
        self.one(random.Random(0))

    def one(self, draw: random.Random) -> str:
        """Send one mutated request; return what became of it."""
        assert unpack(self._site.answer(self._hello)).header["kind"] == "welcome", "the site is stuck"
        valid = self._hello if draw.random() < 0.3 else draw.choice(self._steps)
        request = mutated(valid, draw, draw.choice(self._steps))
        calls = self._engines[0].calls
        calls.clear()
        reply = self._site.answer(request)
        self._check_run(
            request, [*calls, *self._engines[0].calls] if calls is not self._engines[0].calls else calls
        )
        header = unpack(reply).header
        if header["kind"] == "error":
            assert header["reason"].isprintable() and len(header["reason"]) <= 120 and len(reply) < 1000
            return str(header["code"])
        assert header["kind"] in ("welcome", "reply", "lost")
        return "accepted"

    def _check_run(self, request: Any, calls: list[Call]) -> None:
        """At most one step was run, and it is the one that the request asks for, in this session."""
        if not calls:
            return
        (call,), (header, _) = calls, split(request)
        asked = header["kind"], header["session"], header["step"], header["client"], header["clock"]
        assert asked == ("step", "s", call.step.address, call.clients[0], call.clock) and header["round"] > 0


# ------------------------------------------------------------------------------------------------------- all of it


def fuzz(direction: str, count: int, seed: int, say: Callable[[str], Any] = lambda text: None) -> Counter[str]:
    """Send mutated messages in one direction; return the number of each outcome."""
    task = Quadratic().make(clients=2, seed=0)
    target: ServerFuzz | SiteFuzz = ServerFuzz(task) if direction == "to the server" else SiteFuzz(task)
    outcome: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(count):
        try:
            outcome[target.one(random.Random(f"{direction} {seed} {number}"))] += 1
        except Exception:
            outcome[ESCAPED] += 1
            say(f"{direction}, seed {seed}, message {number}:\n{traceback.format_exc()[-1500:]}\n")
        if number % 1000 == 999:
            say(f"{direction}: {number + 1} of {count}, {time.monotonic() - started:.0f} s, {dict(outcome)}\n")
    return outcome


DIRECTIONS = ("to the server", "to a site")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="messages in each direction")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_runtime()
    table = Table(title=f"{arguments.count} mutated messages in each direction, seed {arguments.seed}")
    for column in ("direction", "outcome", "messages"):
        table.add_column(column, justify="right" if column == "messages" else "left")
    escaped = 0
    for direction in DIRECTIONS:
        outcome = fuzz(direction, arguments.count, arguments.seed, sys.stderr.write)
        escaped += outcome[ESCAPED]
        for name in ("accepted", *sorted(outcome.keys() - {"accepted", ESCAPED}), ESCAPED):
            refused = "" if name in ("accepted", ESCAPED) else "refused: "
            table.add_row(direction, refused + name, f"{outcome[name]:,}")
    Console(width=100).print(table)
    raise SystemExit(1 if escaped else 0)


if __name__ == "__main__":
    main()

"""Requests that are not what a server should send: a site answers each with an error, and runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import Watching
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.engines import Call, Loop, Replies
from fedbilevel.engines.flare import Site, pack, unpack
from fedbilevel.engines.flare.wire import MAGIC, PREFIX
from fedbilevel.problems import QuadraticTask

DIGITS = b"9" * 5000


@pytest.fixture(scope="module")
def engines() -> list[Watching]:
    return []


@pytest.fixture(scope="module")
def site(quadratic: QuadraticTask, engines: list[Watching]) -> Site:
    def make(problem: Any, clients: Any, states: Any) -> Watching:
        engines.append(Watching(Loop(problem, clients, states=states)))
        return engines[-1]

    return Site(quadratic.problem, quadratic.clients.load(0), engine=make)


HELLO: dict[str, Any] = {
    "kind": "hello", "round": 0, "session": "s", "run": "r", "sizes": [10, 8], "noise": None, "vectors": [],
}  # fmt: skip
STEP: dict[str, Any] = {
    "kind": "step",
    "round": 1,
    "session": "s",
    "step": lower_gradient.address,
    "address": ["round", 0],
    "keys": {"zeta": bytes(range(16)).hex()},
    "clock": 0,
    "settled": 0,
    "kept": None,
    "client": 0,
    "held": {"x": 1, "y": 2},
    "constants": {},
    "samples": {"zeta": {"kind": "sample", "part": "lower", "size": 4}},
    "vectors": [
        {"name": "held.x", "dtype": "float32", "shape": [10]},
        {"name": "held.y", "dtype": "float32", "shape": [8]},
    ],
}
BODY = np.ones(18, np.float32).tobytes()


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text)) + text + body


def patched(old: bytes, new: bytes) -> bytes:
    text = json.dumps(STEP).encode()
    assert old in text
    return raw(text.replace(old, new, 1), BODY)


def sample(**fields: Any) -> bytes:
    return raw(STEP | {"samples": {"zeta": {"kind": "sample", "part": "lower", **fields}}}, BODY)


REQUESTS: dict[str, bytes] = {
    "nothing": b"",
    "a step of another kind": raw(STEP | {"kind": "reply"}, BODY),
    "a step without a kind": raw({k: v for k, v in STEP.items() if k != "kind"}, BODY),
    "a step whose kind is a list": raw(STEP | {"kind": ["step"]}, BODY),
    "a step in the round of the greeting": raw(STEP | {"round": 0}, BODY),
    "a step in a round before": raw(STEP | {"round": -5}, BODY),
    "a step in a round that is true": raw(STEP | {"round": True}, BODY),
    "a list nested 100000 times": patched(b'"kind"', b'"deep": ' + b"[" * 10**5 + b"]" * 10**5 + b', "kind"'),
    "a number of 5000 digits": patched(b'"clock": 0', b'"clock": ' + DIGITS),
    "a clock of 4000 digits": patched(b'"clock": 0', b'"clock": ' + DIGITS[:4000]),
    "NaN": patched(b'"kept": null', b'"kept": NaN'),
    "a key that comes twice": patched(b'"client": 0', b'"client": 1, "client": 0'),
    "an empty shape whose product overflows": raw(
        STEP | {"held": {}, "vectors": [{"name": "array.a", "dtype": "float32", "shape": [0, *[2**30] * 3]}]}
    ),
    "a type that is a list": raw(STEP | {"vectors": [{"name": "held.x", "dtype": [], "shape": [18]}]}, BODY),
    "a sample of a negative size": sample(size=-3),
    "a sample of a size that is true": sample(size=True),
    "a sample of a fraction": sample(size=2.5),
    "a sample larger than a memory": sample(size=2**28),
    "a sample of an unknown kind": sample(kind=[]),
    "a sample with another field": sample(rows=[0, 1]),
    "constants that are lists": raw(STEP | {"constants": {"a": [[]]}}, BODY),
    "a lone surrogate": raw(STEP | {"step": "fedbilevel:\ud800"}, BODY),
    "a module with a zero byte": raw(STEP | {"step": "fedbilevel.\x00:a"}, BODY),
    "a greeting with 100000 sizes": raw(HELLO | {"sizes": [1] * 10**5}),
    "a greeting with a vector": raw(HELLO | {"vectors": [{"name": "a", "dtype": "float32", "shape": [18]}]}, BODY),
    "a greeting whose noise is a list": raw(HELLO | {"noise": []}),
    "a greeting whose noise is negative": raw(HELLO | {"noise": -1}),
    "a greeting whose run is too long for a file": raw(HELLO | {"run": "\u6f22" * 64}),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_request_that_is_not_valid_gets_an_error_and_runs_nothing(
    what: str, site: Site, engines: list[Watching]
) -> None:
    assert unpack(site.answer(raw(HELLO))).header["kind"] == "welcome"
    before = sum(len(engine.calls) for engine in engines)
    reply = site.answer(REQUESTS[what])
    header = unpack(reply).header
    assert header["kind"] == "error" and isinstance(header["reason"], str)
    assert len(reply) < 1500 and header["reason"].isprintable()
    assert sum(len(engine.calls) for engine in engines) == before
    assert unpack(site.answer(raw(STEP, BODY))).header["kind"] == "reply", "the site goes on"
    assert sum(len(engine.calls) for engine in engines) == before + 1


def test_a_module_that_ends_its_process_is_an_error_and_the_site_goes_on(
    quadratic: QuadraticTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(quadratic.problem, quadratic.clients.load(0), modules=["module_that_leaves"])
    site.answer(raw(HELLO))
    answer = unpack(site.answer(raw(STEP | {"step": "module_that_leaves:step"}, BODY)))
    assert answer.header["kind"] == "error"


def test_what_a_site_says_of_an_exception_is_short_and_printable(quadratic: QuadraticTask) -> None:
    class Broken(Watching):
        def replies(self, call: Call) -> Iterator[Replies]:
            raise ValueError("\x1b[2J" + "x" * 10**6)

    def make(problem: Any, clients: Any, states: Any) -> Watching:
        return Broken(Loop(problem, clients, states=states))

    site = Site(quadratic.problem, quadratic.clients.load(0), engine=make)
    site.answer(raw(HELLO))
    reply = site.answer(pack({k: v for k, v in STEP.items() if k != "vectors"}, {
        "held.x": np.ones(10, np.float32), "held.y": np.ones(8, np.float32),
    }))  # fmt: skip
    reason = unpack(reply).header["reason"]
    assert len(reply) < 1500 and reason.isprintable() and "ValueError" in reason

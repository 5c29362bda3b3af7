"""The limit on what FLARE receives for a job, at FLARE's own receiver of replies and without a network."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.engines.flare import Flare, Site
from fedbilevel.engines.flare.wire import HEADER_LIMIT
from fedbilevel.problems import QuadraticTask
from fedbilevel.steps import Sample
from wires import Wires

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.defs import CellChannel
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler, BlobStreamer
from nvflare.fuel.f3.streaming.byte_receiver import ByteReceiver
from nvflare.fuel.f3.streaming.stream_types import Stream, StreamFuture

from fedbilevel.federate import app
from fedbilevel.federate.limits import ROOM, bound_replies


class Declared(Stream):  # type: ignore[misc]
    """A stream that says how large it is, and has nothing to read."""

    def __init__(self, size: int) -> None:
        super().__init__(size, {})

    def read(self, chunk_size: int) -> bytes:
        return b""


@pytest.fixture
def cell() -> Any:
    """What FLARE's cell has of a receiver of replies."""
    receiver = ByteReceiver(SimpleNamespace(register_request_cb=lambda **_: None))
    BlobStreamer(None, receiver).register_blob_callback(CellChannel.RETURN_ONLY, "*", lambda future: None)
    return SimpleNamespace(byte_receiver=receiver)


def received(cell: Any, size: int) -> BaseException | None:
    """The error of a reply that says that it has this size, if it is refused before it is received."""
    handler: BlobHandler = cell.byte_receiver.registry.find(CellChannel.RETURN_ONLY, "*").cb.__self__
    future = StreamFuture(1)
    handler.handle_blob_cb(future, Declared(size), False)
    return future.error


def test_a_reply_that_says_that_it_is_larger_than_a_step_returns_is_refused_before_it_is_allocated(
    cell: Any,
) -> None:
    assert bound_replies(cell, 1000)
    tracemalloc.start()
    try:
        error = received(cell, 2**31)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert "exceeds configured limit" in str(error)
    assert "exceeds configured limit" in str(received(cell, ROOM + 1001))
    assert "exceeds" not in str(received(cell, ROOM + 1000))


def test_a_cell_of_another_make_keeps_its_own_limit(cell: Any) -> None:
    assert not bound_replies(SimpleNamespace(), 1000)
    cell.byte_receiver.registry.find(CellChannel.RETURN_ONLY, "*").cb = print
    assert not bound_replies(cell, 1000)


def test_the_engine_says_how_large_a_reply_can_be_before_it_sends_a_request(quadratic: QuadraticTask) -> None:
    told: list[int] = []
    wires = Wires({"a": Site(quadratic.problem, quadratic.clients.load(0))})
    fed = fb.Federation(Flare(quadratic.problem, ["a"], wires, bound=told.append))
    assert told == [HEADER_LIMIT], "the greeting has no vectors"
    fed.hold(x=jnp.ones(10), y=jnp.ones(8))
    fed.round(lower_gradient, zeta=Sample("lower"))
    assert told == [HEADER_LIMIT, HEADER_LIMIT + 4 * 8]


def test_a_failure_without_a_word_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE hands out the exception of a site's process, whose text may be empty."""

    class Queue(dict[str, bytes]):
        failures: ClassVar = {"a": ValueError()}

    proxy = SimpleNamespace(handle=lambda request, sealed: Queue())
    clients = SimpleNamespace(clients=[SimpleNamespace(name="a")], get_clients=lambda names: lambda **_: proxy)
    monkeypatch.setattr(app, "collab", clients)
    keys = {"a": "key", "b": "another"}
    assert app.deliver(keys, {"a": b"", "b": b""}, 5.0).failures == {"a": "ValueError", "b": "not in this job"}

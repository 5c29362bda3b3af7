"""A server on loopback for the page of one run.

Whoever can reach a port of this machine may ask: other users, and pages of other sites in the user's own browser.
So the page has an address that nobody can guess, and a request is answered only

- if its address begins with the token, which is compared in constant time;
- if its Host is this server. A page of another site whose name points here (DNS rebinding) sends that name;
- if its Origin, where a browser tells one, is this server, and a browser that tells who asks (Sec-Fetch-Site) says
  that the page itself or its user does;
- if it is a GET of the page or of what the page asks for. Nothing in a request names a file.

There is one request for a connection, with limits on its time and on the number of connections.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, final

from ..errors import FedBilevelError, SettingsError
from ..record import glance
from ..report import live_page, missing_main, page_policy, run_main

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
CONNECTIONS = 32  # at the same time; more are closed at once
SILENCE = 5.0  # seconds without a byte of a request
PATIENCE = 15.0  # seconds for a whole request and its answer
FRESH = 1.0  # seconds for which a look at the folder is shown again
TOKEN = 32  # bytes


@final
class Watch:
    """The live page of a run folder, at `address` until it is closed.

    folder   the run folder; it may be written, replaced or deleted meanwhile, and is only read
    port     the port on loopback; 0 is any that is free
    clock    the time of day, in seconds since 1970
    """

    def __init__(self, folder: Path, port: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._looks = _Looks(folder, clock)
        self.token = secrets.token_urlsafe(TOKEN)
        try:
            self._server = _Server((LOOPBACK, port), partial(_Request, self.token, self._looks))
        except OSError as error:
            raise SettingsError(
                f"--port {port} cannot be used: {error.strerror}; use another one, or 0 for any"
            ) from None

    @property
    def port(self) -> int:
        """The port on loopback."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address of the page. Whoever has it can see the run, from this machine."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until `close` is called in another thread, or until an interrupt."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """End `serve`, and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Watch:
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class _Looks:
    """What the page shows. The folder is looked at again at most once a second, however many ask."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.name, self._folder, self._clock = folder.resolve().name, folder, clock
        self._lock, self._main, self._taken = threading.Lock(), "", -FRESH

    def main(self) -> str:
        with self._lock:
            if time.monotonic() >= self._taken + FRESH:
                self._main, self._taken = self._look(), time.monotonic()
            return self._main

    def _look(self) -> str:
        try:
            return run_main(glance(self._folder), self._clock())
        except FedBilevelError as error:
            return missing_main(str(error))
        except Exception as error:  # whatever the files say, the page stays, and shows them when they are well
            return missing_main(f"the run cannot be shown ({type(error).__name__}); see fedbilevel show")


class _Server(ThreadingTCPServer):
    """Sockets and threads. It is no `HTTPServer`, because that asks a name server for the name of this machine."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, place: tuple[str, int], handler: Any) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(place, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection; without it the connection is closed."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and make room for another connection."""
        end = threading.Timer(PATIENCE, _hang_up, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a connection that breaks is the affair of whoever broke it."""


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):  # it may have ended meanwhile
        request.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """One request."""

    server_version, sys_version = "fedbilevel", ""  # no version of anything is told
    timeout = SILENCE

    def __init__(self, token: str, looks: _Looks, *arguments: Any) -> None:
        self._token, self._looks = token, looks
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer with the page, or with what its script asks for."""
        asked = self._asked()
        if asked == "":
            self._answer(HTTPStatus.OK, live_page(self._looks.name, self._looks.main()))
        elif asked == "now":
            self._answer(HTTPStatus.OK, self._looks.main())
        else:
            status = HTTPStatus.FORBIDDEN if asked is None else HTTPStatus.NOT_FOUND
            self._answer(status, f"<!DOCTYPE html><title>{status.phrase}</title>{status.phrase}")

    def _asked(self) -> str | None:
        """What comes after the token in the address; None if this is nobody who may ask."""
        port = self.connection.getsockname()[1]
        hosts = {f"{name}:{port}" for name in NAMES}
        if len(given := self.headers.get_all("Host", [])) != 1 or given[0].lower() not in hosts:
            return None
        if any(origin.lower() not in {f"http://{host}" for host in hosts} for origin in self._all("Origin")):
            return None
        if any(site not in ("same-origin", "none") for site in self._all("Sec-Fetch-Site")):
            return None
        start, token, *rest = self.path.split("/", 2)
        if start or not hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            return None
        return rest[0] if rest else None

    def _all(self, header: str) -> list[str]:
        return self.headers.get_all(header, [])

    def _answer(self, status: HTTPStatus, text: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing: addresses have the token in them."""


_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{page_policy(live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

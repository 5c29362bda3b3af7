"""Look at the built site in headless Chromium: `make docs-check`.

Every page is opened from the folder at the width of a phone and of a desk, light and dark. It is an error if a
page asks for anything that is not a file of the site, if its script raises, if it is wider than the window, if a
formula is not drawn, or if the search does not find a word. With `--shots FOLDER` pictures of some pages are kept,
for people to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (400, 1280)
SCHEMES = {"light": "default", "dark": "slate"}  # and what the theme calls them
# Without a window, and without what the browser itself would ask its maker for.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-quic", "--disable-sync", "--disable-background-networking", "--disable-component-update"),
)
WIDER = """
[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
    && !e.closest('.md-typeset__scrollwrap, pre, math, .md-nav')
    && !e.closest('p')?.querySelector('img[src$=".svg"]'))
    .map(e => e.tagName + ': ' + e.textContent.slice(0, 40)).slice(0, 3)
"""
RAW = """
[...document.querySelectorAll('article p, article li, article td, article th, article h1, article h2')]
    .map(e => {
        const text = e.cloneNode(true);
        text.querySelectorAll('code, pre').forEach(each => each.remove());
        return text.textContent;
    })
    .map(text => text.match(/.{0,20}([$][^$\\s][^$]*[$]|[\\\\][a-z]{2,}).{0,20}/)?.[0])
    .filter(found => found).slice(0, 3)
"""
SEARCH = """
(async () => {
    const field = document.querySelector('[data-md-component=search-query]');
    const open = document.querySelector('[data-md-toggle=search]');
    if (!open.checked) open.click();
    field.focus(); field.value = 'WORD';
    field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
    for (let i = 0; i < 100; i++) {
        const found = [...document.querySelectorAll('.md-search-result__item a')].map(a => a.getAttribute('href'));
        if (found.length) return found;
        await new Promise(r => setTimeout(r, 100));
    }
    return [];
})()
"""


class Browser:
    """A page of Chromium, by its debugging protocol."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = False

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. What happens meanwhile is noted."""
        number = next(self._ids)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            if "result" in (message := await self._next(number)):
                return message["result"]

    async def _next(self, number: int | None = None) -> dict[str, Any]:
        text = await asyncio.wait_for(self._socket.read_message(), 60)
        if text is None:
            raise SystemExit("Chromium has ended")
        message: dict[str, Any] = json.loads(text)
        if message.get("id") == number and "error" in message:
            raise SystemExit(f"Chromium refuses: {message['error']}")
        self._note(message.get("method"), message.get("params", {}))
        return message if message.get("id") == number else {}

    def _note(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    async def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self.loaded = False
        await self.call("Page.navigate", url=address)
        while not self.loaded:
            await self._next()

    async def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        given = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise SystemExit(f"{script.strip()[:60]}: {given['exceptionDetails']['exception']['description']}")
        return given["result"].get("value")

    async def look(self, width: int, scheme: str) -> None:
        """Take a width and a colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def shot(self, file: Path, whole: bool = False) -> None:
        """A picture of the page: of its first screen, or of the whole of it."""
        given = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(given["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser with a home of its own, for the duration of a block."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("there is no Chromium on the PATH; install it, for example apt-get install chromium")
    with tempfile.TemporaryDirectory() as home:
        command = [program, *QUIET, "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            told = Path(home) / "DevToolsActivePort"
            for _ in range(300):
                if told.exists() and len(lines := told.read_text().splitlines()) == 2:
                    break
                time.sleep(0.1)
            place = f"ws://127.0.0.1:{lines[0]}"
            whole = Browser(await websocket_connect(place + lines[1]))
            targets = (await whole.call("Target.getTargets"))["targetInfos"]
            target = next(each["targetId"] for each in targets if each["type"] == "page")
            page = Browser(await websocket_connect(f"{place}/devtools/page/{target}", max_message_size=1 << 28))
            for room in ("Page", "Network", "Runtime", "Log"):
                await page.call(f"{room}.enable")
            yield page
        finally:
            process.terminate()
            process.wait()


async def check(site: Path, shots: Path | None, kept: list[str]) -> list[str]:
    """What is wrong with the pages of a site, one line for each fault."""
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    faults: list[str] = []
    async with browser() as page:
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            await page.look(width, scheme)
            for path in pages:
                name = path.relative_to(site).as_posix()
                await page.open(path.as_uri())
                if await page.value("document.body.dataset.mdColorScheme") != SCHEMES[scheme]:
                    faults.append(f"{name} is not {scheme}")
                faults += [
                    f"{name} at {width}: {text!r} is wider than the page" for text in await page.value(WIDER)
                ]
                faults += [f"{name}: {text!r} has a formula that is not drawn" for text in await page.value(RAW)]
                if shots is not None and name in kept:
                    await page.shot(shots / f"{name.replace('/', '-')[:-5]}-{width}-{scheme}.png")
        for word, expected in {
            "hypergradient": "learn/hypergradient.html",
            "TrimmedMean": "reference/api.html",
        }.items():
            await page.open((site / "index.html").as_uri())
            found = await page.value(SEARCH.replace("WORD", word))
            if not any(expected in address for address in found):
                faults.append(f"a search for {word} finds {found[:5]}, and not {expected}")
        inside = (site.as_uri(), "data:", "about:", "blob:")
        faults += [f"a request leaves the site: {url}" for url in set(page.requests) if not url.startswith(inside)]
        faults += [f"in the console: {text}" for text in set(page.errors)]
    print(f"{len(pages)} pages, each at {WIDTHS} pixels, {' and '.join(SCHEMES)}: {len(faults)} faults")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / "site")
    parser.add_argument("--shots", type=Path, help="a folder for pictures")
    parser.add_argument("--pages", nargs="*", default=["index.html", "start.html", "reference/api.html"])
    chosen = parser.parse_args()
    faults = asyncio.run(check(chosen.site.resolve(), chosen.shots, chosen.pages))
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()

"""A site's own policy: which requests it answers, whatever the server asks.

    [policy]                                 in the site's TOML; whatever is not set is not limited
    steps = ["lower_*", "my_pkg.steps:*"]    names of steps, or module:name, with * for anything
    smallest_batch = 32                      refuse to use fewer rows at once than this
    requests_per_hour = 600                  steps within any hour, probes too
    requests_in_all = 50000                  steps in all runs together, probes too
    until = 2027-06-30                       the last day, or a date and time
    specs = ["0123456789abcdef"]             digests of the specs of the runs in which the site takes part

Requests are counted in `policy.json` beside the TOML, so a restart begins no new count.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from ...data import ClientSize
from ...errors import Refused, SettingsError
from ...files import write_whole
from ...settings import Count, about, settings
from ...steps import Descriptor, Epochs, Use
from .._call import Call

COUNTED, LOCK = "policy.json", "policy.lock"
HOUR = 3600.0
clock = time.time


@settings
class SitePolicy:
    """The section [policy] of a site's TOML."""

    steps: Annotated[tuple[str, ...] | None, about("steps, or module:name, with * for anything")] = None
    smallest_batch: Annotated[Count | None, about("the fewest rows that are used at once")] = None
    requests_per_hour: Annotated[Count | None, about("the most steps within any hour, probes too")] = None
    requests_in_all: Annotated[Count | None, about("the most steps in all runs together, probes too")] = None
    until: Annotated[
        datetime.datetime | datetime.date | None,
        about("the last day, or the moment after which nothing is answered"),
    ] = None
    specs: Annotated[tuple[str, ...] | None, about("digests of the specs that are allowed")] = None


class Guard:
    """Enforces a policy. It raises `Refused` for what the policy refuses.

    folder  has the count of requests (default: they are counted in memory only)
    """

    def __init__(self, policy: SitePolicy, folder: Path | None) -> None:
        self._policy, self._folder = policy, folder
        self._requests, self._recent = 0, list[float]()

    def admit(self, spec: Any) -> None:
        """Whether a run may begin a session."""
        self._in_time()
        if self._policy.specs is not None and spec not in self._policy.specs:
            named = repr(spec[:80] if isinstance(spec, str) else None)
            raise Refused(f"the policy of this site does not allow the spec {named}; add it to policy.specs")

    def permit(self, call: Call, given: Mapping[str, Any], size: ClientSize) -> None:
        """Whether a step may be run, which is then counted. `given` has the arguments that are not samples."""
        self._in_time()
        name, address = call.step.name, call.step.address
        patterns = self._policy.steps
        if patterns is not None and not any(fnmatchcase(address if ":" in p else name, p) for p in patterns):
            raise Refused(f"the policy of this site does not allow {address}; it allows {', '.join(patterns)}")
        self._rows(call, given, size)
        if self._policy.requests_per_hour is not None or self._policy.requests_in_all is not None:
            self._count()

    def _in_time(self) -> None:
        until, now = self._policy.until, datetime.datetime.fromtimestamp(clock()).astimezone()
        if isinstance(until, datetime.datetime):
            over = now > until.astimezone()  # without an offset it is the site's own time
        else:
            over = until is not None and now.date() > until
        if over:
            raise Refused(f"this site answers no more: policy.until has passed, it was {until}")

    def _rows(self, call: Call, given: Mapping[str, Any], size: ClientSize) -> None:
        fewest = self._policy.smallest_batch
        if fewest is None:
            return
        for name, value in given.items():
            if value is not None and call.step.use(name) is Use.DRAWN:
                raise Refused(f"{name} of {call.step.name} is drawn by the site, and the server may not give it")
        for name, sample in call.samples.items():
            if _fewest_rows(sample, size.lower if sample.part == "lower" else size.upper) < fewest:
                raise Refused(
                    f"{name} of {call.step.name} would use too few rows at once; policy.smallest_batch is {fewest}"
                )

    def _count(self) -> None:
        """Count a request before it is answered, and refuse it if there were too many."""
        if self._folder is None:
            self._charge()
            return
        with (self._folder / LOCK).open("a") as lock:  # a site may take part in two runs at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self._folder / COUNTED
            self._requests, self._recent = _read(file)
            self._charge()
            content = json.dumps({"requests": self._requests, "recent": self._recent}).encode()
            write_whole(file, content, self._folder / f"{COUNTED}.new")

    def _charge(self) -> None:
        now, hourly, most = clock(), self._policy.requests_per_hour, self._policy.requests_in_all
        recent = [moment for moment in self._recent if moment > now - HOUR]
        if most is not None and self._requests >= most:
            raise Refused(f"this site answers no more: policy.requests_in_all is {most}")
        if hourly is not None and len(recent) >= hourly:
            wait = min(recent) + HOUR - now
            raise Refused(
                f"too many requests: policy.requests_per_hour is {hourly}; ask again in {wait:.0f} seconds"
            )
        self._requests += 1
        self._recent = [*recent, now] if hourly is not None else []


def _fewest_rows(sample: Descriptor, rows: int) -> int:
    """The number of rows in the smallest batch of a sample. A size that is no number of rows counts as none."""
    if sample.size is None:
        return rows
    if type(sample.size) is not int or sample.size < 1:
        return 0
    size = min(sample.size, rows)
    short = rows % size if isinstance(sample, Epochs) and size else 0  # the last batch of a pass
    return short or size


def _read(file: Path) -> tuple[int, list[float]]:
    if not file.exists():
        return 0, []
    try:
        found = json.loads(file.read_text())
        return int(found["requests"]), [float(moment) for moment in found["recent"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingsError(f"{file} is damaged: it counts the requests that were answered; restore it") from None

"""The page of one run: how it goes, how long it takes, how its clients are, and what it has cost.

`fedbilevel watch` serves it while the run goes on, and a run that is over has it as report.html. Every text that
comes from the folder is shortened and escaped, and the page may load nothing and run no script but its own, which
the policy names by its digest. The file has no script at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from ..errors import one_line
from ..record import REPORT, Glance, RunFolder, better, direction, flat_settings, glance
from ._figures import LOGARITHMIC
from ._health import Clinic, State, clinic_of
from ._html import html_table
from ._measure import LABELS, measured, metric_text
from ._pace import Pace, in_words, pace_of
from ._plot import line_plot

NAMES = {"under way": "Under way", "finished": "Finished", "failed": "Failed", "interrupted": "Interrupted"}
CHARTS = 9  # small curves; other metrics are in the history
PATIENTS = 50  # rows of clients that are not well
RECOVERED = 5  # rows of clients that are well again
CELLS = 400  # with more clients, no cell is drawn for each
REASONS = 30  # rows of rejected replies
SETTINGS = 300  # rows of settings
PRIVATE = "epsilon"


# The page ---------------------------------------------------------------------------------------------


def run_page(look: Glance, now: float) -> str:
    """The page as a file, which stands for itself."""
    return _page(look.folder.name, run_main(look, now), live=False)


def write_run_page(folder: RunFolder) -> None:
    """Write the page of a run that is over into its folder, which may still be locked by its process."""
    folder.write(REPORT, run_page(glance(folder.path, in_use=False), time.time()))


def live_page(name: str, main: str) -> str:
    """The page as it is served: its script asks for `now` beside it, and shows what it gets."""
    return _page(name, main, live=True)


def _page(name: str, main: str, live: bool) -> str:
    style, script = _assets()
    own = f"<script>{script}</script>" if live else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{page_policy(live)}">
<meta name="referrer" content="no-referrer">
<title>{_text(name, 80)} - fedbilevel</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main>{main}</main><p id="link" class="note" role="status"></p>{own}</body></html>
"""


def page_policy(live: bool) -> str:
    """What the page may do: its own style, and if it is live its own script, which may ask its own server."""
    style, script = (f"'sha256-{_digest(text)}'" for text in _assets())
    more = f"; script-src {script}; connect-src 'self'" if live else ""
    return f"default-src 'none'; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'{more}"


@cache
def _assets() -> tuple[str, str]:
    """The style and the script."""
    folder = resources.files("fedbilevel.report")
    names = ("board.css", "run.css", "run.js")
    look, own, script = ((folder / name).read_text(encoding="utf-8") for name in names)
    return look + own, script


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def missing_main(reason: str) -> str:
    """What the page shows when there is no run to show."""
    return f'<h1>Nothing to show</h1><p class="notice bad">{_text(reason)}</p>'


# Its parts --------------------------------------------------------------------------------------------


def run_main(look: Glance, now: float) -> str:
    """The content of the page at this time of day, in seconds since 1970."""
    pace, clinic, metric = pace_of(look, now), clinic_of(look), _main_metric(look)
    parts = [
        _head(look, pace, metric),
        _tiles(look, pace, clinic, metric),
        _notices(look, pace),
        _main_curve(look, metric),
        _other_curves(look, metric),
        _clients(clinic, look),
        _rejected(look),
        _ledger(look),
        _privacy(look),
        _jobs(look, now),
        _details(look),
    ]
    return "\n".join(part for part in parts if part)


def _head(look: Glance, pace: Pace, metric: str | None) -> str:
    status = NAMES[look.status]
    value = _last(look, metric)
    short = [status if pace.share is None or look.status != "under way" else f"{pace.share:.0%}"]
    short += [metric_text(metric, value)] if metric is not None and value is not None else []
    title = _text(f"{', '.join(short)} - {look.folder.name}", 120)
    badge = f'<span class="badge {look.status.replace(" ", "-")}">{status}</span>'
    return (
        f'<header data-title="{title}"><h1>{_text(look.folder.name, 80)} {badge}</h1>'
        f'<p class="remark">{_text(_about(look))}</p></header>'
    )


def _about(look: Glance) -> str:
    """The run in one line."""

    def of(section: str, *names: str) -> Any:
        values = look.settings.get(section)
        found = [values.get(name) for name in names] if isinstance(values, Mapping) else []
        return next((each for each in found if each is not None), None)

    problem = of("problem", "name", "class", "function")
    data = ", ".join(str(each) for each in (of("data", "name"), of("data", "partition")) if each is not None)
    parts = [str(of("algorithm", "class", "name") or "a method")]
    parts += [f"on {problem}"] if problem else []
    parts += [f"({data})"] if data and problem != "quadratic" else []
    engine = of("federation", "engine")
    if look.federation is not None:
        engine = f"NVIDIA FLARE, {len(look.federation['sites'])} sites"
    elif isinstance(engine, Mapping):
        engine = engine.get("name")
    seed = look.settings.get("seed")
    ends = [f"engine: {engine}" if engine else "", "" if seed is None else f"seed {seed}"]
    return ", ".join([" ".join(parts), *(end for end in ends if end)])


def _tiles(look: Glance, pace: Pace, clinic: Clinic, metric: str | None) -> str:
    """What a person wants to see first."""
    tiles = [_going(look, metric), _time(look, pace), _people(look, clinic)]
    if (spent := _epsilon(look)) is not None:
        note = f"for all data of one client, after {look.history[-1]['rounds']:,} rounds"
        tiles.append(_tile("Privacy spent", f"epsilon {spent}", note))
    bar = ""
    if pace.share is not None:
        bar = (
            f'<progress max="1" value="{pace.share:.4f}" aria-label="share of the budget"></progress>'
            f'<p class="note">{pace.share:.0%} of the budget: {_text(pace.told)}</p>'
        )
    return f'<section class="tiles">{"".join(tiles)}</section>{bar}'


def _tile(name: str, value: str, note: str, mood: str = "") -> str:
    return f'<div class="tile {mood}"><h2>{name}</h2><p class="value">{value}</p><p class="note">{note}</p></div>'


def _going(look: Glance, metric: str | None) -> str:
    value = _last(look, metric)
    if metric is None or value is None:
        return _tile("How it goes", "no value yet", "The first evaluation is still to come.")
    best, at = _best(look, metric)
    told = f"best {metric_text(metric, best)} after {at:,} rounds"
    change = _change(look, metric)
    return _tile(_text(_label(metric), 60), metric_text(metric, value), f"{told}{change}")


def _change(look: Glance, metric: str) -> str:
    """How the last tenth of the evaluations compares with the tenth before, in words."""
    values = [value for record in look.history if (value := _finite(record.get(metric))) is not None]
    count = max(len(values) // 10, 1)
    if len(values) < 2 * count + 2:
        return ""
    now, before = (sum(part) / count for part in (values[-count:], values[-2 * count : -count]))
    span = "the evaluation before" if count == 1 else f"the {count} evaluations before"
    if abs(now - before) <= 1e-3 * max(abs(now), abs(before)):
        return f"; the same as {span}"
    word = "better" if better(now, before, direction(metric)) else "worse"
    if metric.endswith("accuracy"):
        points = f"{100 * abs(now - before):.2g}"
        return f"; {word} than {span} by {points} point{'' if points == '1' else 's'}"
    return f"; {word} than {span} ({metric_text(metric, before)})"


def _time(look: Glance, pace: Pace) -> str:
    last = look.history[-1] if look.history else None
    trained = "" if last is None else f"{in_words(_finite(last['seconds']) or 0.0)} of training"
    if look.status != "under way":
        took = "" if last is None else in_words(_finite(last["seconds"]) or 0.0)
        done = "" if last is None else f"{last['iteration']:,} outer iterations, {last['rounds']:,} rounds"
        return _tile("Time of training", took or "none", done)
    if last is None:
        return _tile("Time left", "starting", "Data are loaded and programs compiled.")
    ago = "" if pace.ago is None else f"; last evaluation {in_words(pace.ago)} ago"
    passed = trained
    if pace.passed is not None:  # since this process was started, which may have resumed the run
        resumed = pace.passed < (_finite(last["seconds"]) or 0.0)
        so_far = f"{in_words(pace.passed)} {'since it was resumed' if resumed else 'so far'}"
        passed = f"{trained}, {so_far}" if resumed else f"{so_far}, {trained}"
    if pace.left is None:
        return _tile("Time left", "not known yet", f"{passed}{ago}")
    value = f"{'at most ' if pace.at_most else 'about '}{in_words(pace.left)}"
    return _tile("Time left", value, f"{passed}{ago}", "bad" if pace.quiet is not None else "")


def _people(look: Glance, clinic: Clinic) -> str:
    word = "Sites" if look.federation is not None else "Clients"
    known = "" if clinic.count is None else f"of {clinic.count:,}"
    refused = sum(each.refused for each in clinic.patients)
    replies = "reply" if refused == 1 else "replies"
    note = f"{refused:,} rejected {replies} so far" if refused else "no reply was rejected"
    if clinic.ill:
        return _tile(word, f"{clinic.ill:,} {known} {'is' if clinic.ill == 1 else 'are'} ill", note, "bad")
    if clinic.faltering:
        return _tile(word, f"{clinic.faltering:,} {known} faltering", note, "warn")
    count = "" if clinic.count is None else f"{clinic.count:,} {word.lower()}; "
    if _unheard(look):
        return _tile(word, "not heard of yet", f"{count}no reply so far has been noted")
    return _tile(word, "all well", f"{count}{note}", "good")


def _unheard(look: Glance) -> bool:
    """Whether nobody can say yet how the clients are, because the run only begins."""
    return not look.history and look.status == "under way"


def _notices(look: Glance, pace: Pace) -> str:
    """What has to be said before anything else."""
    notices: list[tuple[str, str]] = []
    summary = look.summary or {}
    if summary.get("failure") is not None:
        notices.append(("bad", f"The run ended because: {summary['failure']}"))
    if look.status == "interrupted":
        notices.append(("warn", "No process has this run at the moment; it goes on with --resume."))
    if pace.quiet is not None:
        notices.append(("bad", f"There was no evaluation for {in_words(pace.quiet)}, far longer than usual."))
    notices += _between_jobs(look)
    restarts = look.history[-1].get("restarts") if look.history else None
    if restarts:
        notices.append(
            ("warn", f"The run diverged and went back with a smaller step size, {restarts} times so far.")
        )
    told = summary.get("notes")
    notices += [("", f"Note: {note}") for note in (told if isinstance(told, list) else [])[:10]]
    notices += [("warn", f"{trouble}; it is left out here.") for trouble in look.troubles]
    if not look.whole:
        notices.append(("", f"The history is long: the curves show {len(look.history):,} of its evaluations."))
    return "".join(f'<p class="notice {mood}">{_text(text)}</p>' for mood, text in notices)


def _between_jobs(look: Glance) -> list[tuple[str, str]]:
    """That a job of the federation failed and another is to follow, as long as that one has not begun."""
    jobs = [] if look.federation is None or look.status != "under way" else look.federation["jobs"]
    begun = _finite(jobs[-1].get("started")) if jobs else None
    if begun is None or jobs[-1].get("sites") is not None or (look.written is not None and look.written > begun):
        return []
    if len(jobs) == 1:
        return [("", "The run waits for its sites to be up.")]
    why = jobs[-2].get("reason") or "no reason is known"
    return [("warn", f"Job {len(jobs) - 1} failed. Job {len(jobs)} waits for the sites to be up. Why: {why}")]


# Curves -----------------------------------------------------------------------------------------------


def _main_metric(look: Glance) -> str | None:
    """The metric that the run is about: as its settings say, else the best known of those that there are."""
    there = measured(look.history)
    asked = [
        values.get("metric")
        for section in ("stop", "evaluate")
        if isinstance(values := look.settings.get(section), Mapping)
    ]
    return next((name for name in (*asked, *LABELS, *there) if name in there), None)


def _label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " "))


def _plot(look: Glance, metric: str, height: int, axis: bool) -> str:
    values = [(record["rounds"], _finite(record.get(metric))) for record in look.history]
    last = _last(look, metric)
    name = one_line(_label(metric), 60)
    told = f"{name} against communication rounds" + ("" if last is None else f", now {metric_text(metric, last)}")
    shares = metric.endswith("accuracy")
    return line_plot(values, label=told, height=height, percent=shares, log=metric in LOGARITHMIC, axis=axis)


def _main_curve(look: Glance, metric: str | None) -> str:
    if metric is None:
        return ""
    label = f"{_text(_label(metric), 60)} <small>against communication rounds</small>"
    return f"<section><h2>{label}</h2>{_plot(look, metric, 300, True)}</section>"


def _other_curves(look: Glance, metric: str | None) -> str:
    others = [name for name in measured(look.history) if name not in (metric, PRIVATE, "restarts")]
    if not others:
        return ""
    figures = ""
    for name in others[:CHARTS]:
        last = _last(look, name)
        value = "" if last is None else f" <b>{metric_text(name, last)}</b>"
        caption = f"<figcaption>{_text(_label(name), 40)}{value}</figcaption>"
        figures += f"<figure>{caption}{_plot(look, name, 110, False)}</figure>"
    more = len(others) - CHARTS
    left = f'<p class="note">{more:,} more metrics are in history.jsonl.</p>' if more > 0 else ""
    return f'<section><h2>Other measurements</h2><div class="figures">{figures}</div>{left}</section>'


# Clients ----------------------------------------------------------------------------------------------


def _clients(clinic: Clinic, look: Glance) -> str:
    heading = "Sites" if look.federation is not None else "Clients"
    if _unheard(look):
        return ""
    cells = _cells(clinic, look)
    ill = [each for each in clinic.patients if each.state is not State.RECOVERED][:PATIENTS]
    shown = ill + [each for each in clinic.patients if each.state is State.RECOVERED][:RECOVERED]
    rows = [
        {
            heading[:-1].lower(): each.name,
            "how it is": each.state.value,
            "rejected": each.refused,
            "why": each.why,
            "details": each.said,
        }
        for each in shown
    ]
    if not cells and not rows:
        return ""
    if not any(each.said for each in shown):
        rows = [{key: value for key, value in row.items() if key != "details"} for row in rows]
    more = len(clinic.patients) - len(shown)
    left = f'<p class="note">{more:,} more clients had replies rejected.</p>' if more > 0 else ""
    told = _as_of(look) if rows else ""
    nobody = f'<p class="note">No reply of any {heading[:-1].lower()} was rejected.</p>'
    table = html_table(rows) if rows else nobody
    return f"<section><h2>{heading}</h2>{cells}{table}{left}{told}</section>"


def _cells(clinic: Clinic, look: Glance) -> str:
    """A cell for each client, if they are few enough."""
    if clinic.count is None or clinic.count > CELLS:
        return ""
    states = {each.client: each.state for each in clinic.patients}
    sites = [] if look.federation is None else look.federation["sites"]
    items = ""
    for client in range(clinic.count):
        state = states.get(str(client), State.WELL)
        name = sites[client] if sites else str(client)
        told = f"{one_line(name, 40)}: {state.value}"
        text = f"{_text(name, 40)} <i>{state.value}</i>" if sites else ""
        items += f'<li class="{state.name.lower()}" title="{html.escape(told)}">{text}</li>'
    counts = Counter(states.values())
    counts[State.WELL] = clinic.count - sum(counts.values())
    key = "".join(
        f'<span><i class="{state.name.lower()}"></i>{state.value} {counts[state]:,}</span>'
        for state in State
        if counts[state] > 0
    )
    return f'<ul class="cells{" named" if sites else ""}">{items}</ul><p class="key note">{key}</p>'


def _rejected(look: Glance) -> str:
    """Rejected replies by step and reason; clients are in the table of clients."""
    rows = []
    for step, clients in look.books.get("rejected", {}).items():
        counts: Counter[str] = Counter()
        who: Counter[str] = Counter()
        for reasons in clients.values():
            counts.update(reasons)
            who.update(dict.fromkeys(reasons, 1))
        rows += [(count, step, reason, who[reason]) for reason, count in counts.items()]
    if not rows:
        return ""
    rows.sort(key=lambda row: (-row[0], row[1:3]))
    table = [
        {"reason": one_line(reason, 160), "step": one_line(step, 60), "replies": count, "of clients": clients}
        for count, step, reason, clients in rows[:REASONS]
    ]
    left = f'<p class="note">{len(rows) - REASONS:,} more reasons.</p>' if len(rows) > REASONS else ""
    return f"<section><h2>Rejected replies</h2>{html_table(table)}{left}{_as_of(look)}</section>"


# Costs ------------------------------------------------------------------------------------------------


def _ledger(look: Glance) -> str:
    """Rounds and bytes by step, with a line for all."""
    steps = look.books.get("steps", {})
    if not steps:
        return ""
    accounts = [(one_line(name, 60), account) for name, account in steps.items()]

    def row(name: str, several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        def total(key: str) -> float:
            return _total(several, key)

        made: dict[str, Any] = {"step": name, "rounds": int(total("rounds"))}
        made |= {"MB up": f"{total('bytes_up') / 1e6:,.1f}", "MB down": f"{total('bytes_down') / 1e6:,.1f}"}
        return made | {"seconds": f"{total('seconds'):,.1f}", "rejected": int(total("rejected"))}

    rows = [row(name, [account]) for name, account in accounts[:REASONS]]
    rows.append(row("all", [account for _, account in accounts]))
    told = []
    if look.at:
        told.append(f"{_total(steps.values(), 'rounds') / look.at:.4g} rounds per outer iteration.")
    up, down = (_total(steps.values(), key) / 1e6 for key in ("wire_up", "wire_down"))
    if up or down:
        told.append(f"With the headers of messages: {up:,.1f} MB up and {down:,.1f} MB down.")
    more = f'<p class="note">{" ".join(told)}</p>' if told else ""
    return f'<section><h2>Ledger</h2><div class="ledger">{html_table(rows)}</div>{more}{_as_of(look)}</section>'


def _total(accounts: Iterable[Mapping[str, Any]], key: str) -> float:
    return sum(_finite(account.get(key)) or 0.0 for account in accounts)


def _as_of(look: Glance) -> str:
    """From when the books are, if evaluations have been made since."""
    if look.at is None or not look.history or look.history[-1]["iteration"] <= look.at:
        return ""
    return f'<p class="note">As of the last checkpoint, after outer iteration {look.at:,}.</p>'


def _privacy(look: Glance) -> str:
    """The epsilon that is spent, and what it is spent with."""
    settings, told = look.settings.get("privacy"), _epsilon(look)
    if told is None or not isinstance(settings, Mapping):
        return ""
    parts = [f"{name} = {settings[name]}" for name in ("mode", "noise", "delta", "clip") if name in settings]
    return (
        f"<section><h2>Privacy spent <small>epsilon against communication rounds</small></h2>"
        f"{_plot(look, PRIVATE, 160, True)}"
        f'<p class="note">Epsilon is {told} for all data of one client, with {_text(", ".join(parts))}. '
        f"Below one, the result tells little about a client; above ten, hardly anything is promised.</p></section>"
    )


def _epsilon(look: Glance) -> str | None:
    """The epsilon that is spent so far, in words; None for a run without privacy."""
    there = [record[PRIVATE] for record in look.history if PRIVATE in record]
    if not there:
        return None
    value = _finite(there[-1])
    return "infinite" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _jobs(look: Glance, now: float) -> str:
    """The jobs that a run on a real federation has taken."""
    jobs = [] if look.federation is None else look.federation["jobs"]
    rows = []
    for number, job in enumerate(jobs[-REASONS:], max(len(jobs) - REASONS, 0) + 1):
        if job.get("finished") is True:
            outcome = "finished"
        else:
            going = look.status == "under way" and number == len(jobs)
            outcome = one_line(str(job.get("reason", "")), 160) or ("under way" if going else "not finished")
        sites = job.get("sites")
        told = ", ".join(one_line(str(site), 40) for site in sites[:20]) if isinstance(sites, list) else "-"
        took, started = _finite(job.get("seconds")), _finite(job.get("started"))
        if took is None and started is not None and outcome == "under way":
            took = max(now - started, 0.0)
        start = job.get("from_iteration", "-")
        rows.append(
            {
                "job": number,
                "from iteration": one_line(str(start), 20),
                "sites": told,
                "took": "-" if took is None else in_words(took),
                "outcome": outcome,
            }
        )
    return f"<section><h2>Jobs of the federation</h2>{html_table(rows)}</section>" if rows else ""


def _details(look: Glance) -> str:
    settings = [(name, str(value)) for name, value in flat_settings(look.settings).items()]
    environment = [(str(name), str(value)) for name, value in flat_settings(look.environment).items()]
    parts = (("settings", "Settings", settings), ("environment", "Environment", environment))
    return "".join(_folded(key, name, rows) for key, name, rows in parts if rows)


def _folded(key: str, name: str, rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    table = html_table(
        [{"name": one_line(key, 80), "value": one_line(value, 200)} for key, value in rows[:SETTINGS]]
    )
    left = f'<p class="note">{len(rows) - SETTINGS:,} more.</p>' if len(rows) > SETTINGS else ""
    return f'<details id="{key}"><summary>{name}</summary>{table}{left}</details>'


# Values -----------------------------------------------------------------------------------------------


def _text(text: str, longest: int = 300) -> str:
    """A text of any origin, as a line that can stand in the page."""
    return html.escape(one_line(text, longest))


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _last(look: Glance, metric: str | None) -> float | None:
    """The newest value of a metric."""
    if metric is None:
        return None
    return next((value for r in reversed(look.history) if (value := _finite(r.get(metric))) is not None), None)


def _best(look: Glance, metric: str) -> tuple[float, int]:
    """The best value of a metric, and the rounds after which it was measured."""
    found = [(value, r["rounds"]) for r in look.history if (value := _finite(r.get(metric))) is not None]
    return (max if direction(metric) == "max" else min)(found, key=lambda each: each[0])

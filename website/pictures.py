"""The pictures of the site that are made from the code itself: `make pictures` writes them into docs/pictures.

iteration.svg      one outer iteration of FBO-AggITD, round by round, from a trace of a run; it moves
architecture.svg   the rooms of the library from top to bottom, with the names that each kind of thing has
labels.png         which client has which labels, for each way to split data
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
STYLE = """
svg { --paper: #ffffff; --ink: #1d2129; --soft: #5c6370; --line: #c9ced8; --box: #eef1f7;
  --down: #1f5582; --up: #b6452c; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #23262f; --ink: #e6e8ec; --soft: #a4abb8; --line: #4a5060; --box: #2f333f;
    --down: #7db4e6; --up: #f09a80; }
}
text { font: 14px system-ui, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); font-size: 12.5px; }
.title { font-weight: 600; }
.code { font: 12.5px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.paper { fill: var(--paper); stroke: var(--line); }
.box { fill: var(--box); stroke: var(--line); }
"""

# One outer iteration --------------------------------------------------------------------------------------

SECONDS = 3.2  # of a round
ABSENT = 3  # the client that is not in the cohort of this iteration
CLIENTS = (90, 210, 330, 450)  # their middles
SERVER, DEVICES = (270, 78), 300  # the middle of the server, and the height of the clients
SPREAD = 64  # between packets at the server
LIST = 560  # where the list of rounds begins
MOVES = """
.round { opacity: 0; animation: shown TOTALs steps(1, end) infinite; }
.now { fill: var(--box); opacity: 0; animation: shown TOTALs steps(1, end) infinite; }
.packet { animation: TOTALs linear infinite; }
.down { fill: var(--down); animation-name: down; }
.up { fill: var(--up); animation-name: up; }
.work { opacity: 0; animation: works TOTALs steps(1, end) infinite; }
.mean { opacity: 0; animation: averages TOTALs steps(1, end) infinite; }
@keyframes shown { 0% { opacity: 1 } END% { opacity: 0 } 100% { opacity: 0 } }
@keyframes works { 0% { opacity: 0 } WORK% { opacity: 1 } BACK% { opacity: 0 } 100% { opacity: 0 } }
@keyframes averages { 0% { opacity: 0 } HOME% { opacity: 1 } END% { opacity: 0 } 100% { opacity: 0 } }
@keyframes down { 0% { opacity: 1; transform: none } WORK% { opacity: 1; transform: var(--way) }
  GONE%, 100% { opacity: 0; transform: var(--way) } }
@keyframes up { 0%, WORK% { opacity: 0; transform: none } BACK% { opacity: 1; transform: none }
  HOME%, END% { opacity: 1; transform: var(--way) } 100% { opacity: 0; transform: var(--way) } }
@media (prefers-reduced-motion: reduce) { .round, .now, .packet, .work, .mean { animation: none } }
"""


def rounds() -> list[dict[str, Any]]:
    """The rounds of one outer iteration of FBO-AggITD, as figure 1 has them: a trace of a run on a quadratic."""
    from fedbilevel.studies.exchanges import iteration_of
    from fedbilevel.studies.study import load_study

    study = load_study("figure1-exchanges")
    run = next(each for each in study.runs if "AggITD" in each.label)
    return iteration_of(run, run.spec(0), study.iteration)[1]


def iteration(traced: Sequence[dict[str, Any]]) -> str:
    """The picture of these rounds."""
    total, share = SECONDS * len(traced), 100 / len(traced)
    places = {"TOTAL": total, "END": share, "HOME": 0.9 * share, "BACK": 0.6 * share, "GONE": 0.36 * share}
    moves = MOVES
    for word, value in {**places, "WORK": 0.35 * share}.items():
        moves = moves.replace(word, f"{value:.2f}")
    delays = "\n".join(f".t{i}, .t{i} * {{ animation-delay: {i * SECONDS:.1f}s }}" for i in range(len(traced)))
    height = 96 + 40 * len(traced)
    parts = [*_stage(), *_table(traced)]
    for i, one in enumerate(traced):
        parts += [f'<g class="round t{i}">', *_one(one), "</g>"]
    say = f"One outer iteration of FBO-AggITD in {len(traced)} rounds: the server sends, the clients reply"
    return _svg(980, max(height, 390), STYLE + moves + delays, parts, say)


def _stage() -> Iterator[str]:
    yield f'<rect class="box" x="{SERVER[0] - 70}" y="{SERVER[1] - 26}" width="140" height="44" rx="6"/>'
    yield _text(SERVER[0], SERVER[1] + 1, "server", "title", "middle")
    for i, x in enumerate(CLIENTS):
        faint = ' opacity="0.35"' if i == ABSENT else ""
        if i != ABSENT:
            yield f'<path d="M{SERVER[0]} {SERVER[1] + 18} L{x} {DEVICES - 22}" stroke="var(--line)"/>'
        yield f'<g{faint}><rect class="box" x="{x - 48}" y="{DEVICES - 22}" width="96" height="42" rx="6"/>'
        yield _text(x, DEVICES + 4, f"client {i + 1}", "", "middle") + "</g>"
    yield _text(CLIENTS[ABSENT], DEVICES + 40, "not asked this time", "soft", "middle")


def _table(traced: Sequence[dict[str, Any]]) -> Iterator[str]:
    formula = f"2N+3 with N = {(len(traced) - 3) // 2}"
    yield _text(LIST, 44, f"One outer iteration: {len(traced)} rounds, {formula}", "title")
    for i, one in enumerate(traced):
        y = 62 + 42 * i
        yield f'<rect class="now t{i}" x="{LIST - 10}" y="{y}" width="410" height="38" rx="5"/>'
        yield _text(LIST, y + 24, str(i + 1), "title")
        yield _text(LIST + 26, y + 17, f"{one['client']}", "")
        yield _text(LIST + 26, y + 32, f"↓ {_pretty(one['down'])}   ↑ {_pretty(one['up'])}", "soft")


def _one(one: dict[str, Any]) -> Iterator[str]:
    """What moves in a round."""
    for i, x in enumerate(CLIENTS):
        if i == ABSENT:
            continue
        start = SERVER[0] + SPREAD * (i - 1)
        dx, dy = x - start, DEVICES - 34 - (SERVER[1] + 30)
        down, up = _pretty(one["down"]), _pretty(one["up"])
        yield _packet("down", start, SERVER[1] + 30, dx, dy, down)
        yield _packet("up", x, DEVICES - 34, -dx, -dy, up)
    yield f'<g class="work">{_text(SERVER[0] - 60, DEVICES + 66, one["client"], "title", "middle")}</g>'
    back = _pretty(one["up"])
    yield f'<g class="mean">{_text(SERVER[0], SERVER[1] - 40, f"the mean: {back}", "title", "middle")}</g>'


def _packet(way: str, x: float, y: float, dx: float, dy: float, label: str) -> str:
    wide = 16 + 7.5 * len(label)
    box = f'<rect x="{x - wide / 2:.0f}" y="{y - 11}" width="{wide:.0f}" height="22" rx="11"/>'
    word = f'<text x="{x}" y="{y + 5}" text-anchor="middle" style="fill: var(--paper)">{escape(label)}</text>'
    return f'<g class="packet {way}" style="--way: translate({dx}px, {dy}px)">{box}{word}</g>'


def _pretty(labels: str) -> str:
    """`y^1, z^1` as text."""
    signs = str.maketrans("0123456789+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺")
    return ", ".join(a + b.translate(signs) for a, _, b in (each.partition("^") for each in labels.split(", ")))


# The rooms ------------------------------------------------------------------------------------------------


class Shelf(NamedTuple):
    """Rooms that are beside each other, and what they are for."""

    title: str
    about: str


SHELVES = {  # by the first room of each; the others follow in the order in which tests/test_structure.py has them
    "cli": Shelf("Commands", "what is typed, and studies"),
    "run": Shelf("A run", "budget, records, advice"),
    "algorithms": Shelf("Methods", "one paper, one file"),
    "fused": Shelf("A round", "the only place that counts"),
    "layers": Shelf("Around engines", "noise, attacks, faults, rules"),
    "engines": Shelf("Engines", "one call is one round"),
    "problems": Shelf("Problems", "two losses, two pytrees"),
    "steps": Shelf("Steps and data", "what clients do, and have"),
    "settings": Shelf("Foundations", ""),
}


def rooms() -> list[str]:
    """The public rooms from top to bottom, from the test that walks the imports."""
    tree = ast.parse((ROOT / "tests" / "test_structure.py").read_text())
    found = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "ROOMS")
    return [room for room in ast.literal_eval(found) if not room.startswith("_")]


def shelves() -> list[tuple[Shelf, list[str]]]:
    """Every shelf with its rooms."""
    found: list[tuple[Shelf, list[str]]] = []
    for room in rooms():
        if room in SHELVES:
            found.append((SHELVES[room], []))
        found[-1][1].append(room)
    return found


WIDTH, MARGIN, BAND = 980, 16, 210


def named() -> dict[str, list[str]]:
    """The names that a room has in its table, for rooms with one."""
    from fedbilevel.aggregate import AGGREGATORS
    from fedbilevel.algorithms import ALGORITHMS
    from fedbilevel.engines import ENGINES
    from fedbilevel.problems import PROBLEMS

    tables = {"algorithms": ALGORITHMS, "engines": ENGINES, "problems": PROBLEMS, "aggregate": AGGREGATORS}

    def ours(table: Any) -> list[str]:
        return [name for name in table if table[name].__module__.startswith("fedbilevel.")]

    return {room: ours(table) for room, table in tables.items()} | {
        "federate": ["NVIDIA FLARE"],
        "engines": [*ours(ENGINES), "flare"],
    }


def architecture(names: dict[str, list[str]]) -> str:
    """The rooms from top to bottom, each with its names."""
    parts, y = [], MARGIN
    for shelf, inside in shelves():
        boxes = [(room, True) for room in inside]
        boxes += [(name, False) for room in inside for name in names.get(room, ())]
        rows = list(_flow(boxes, WIDTH - BAND - 3 * MARGIN))
        tall = max(54, 14 + 30 * len(rows))
        wide = WIDTH - 2 * MARGIN
        parts.append(f'<rect class="paper" x="{MARGIN}" y="{y}" width="{wide}" height="{tall}" rx="6"/>')
        parts += [_text(2 * MARGIN, y + 24, shelf.title, "title"), _text(2 * MARGIN, y + 42, shelf.about, "soft")]
        for i, row in enumerate(rows):
            for x, wide, word, is_room in row:
                look = "box" if is_room else "paper"
                at = BAND + x, y + 10 + 30 * i
                parts.append(f'<rect class="{look}" x="{at[0]}" y="{at[1]}" width="{wide}" height="24" rx="4"/>')
                parts.append(_text(at[0] + wide / 2, at[1] + 16.5, word, "code" if is_room else "soft", "middle"))
        y += tall + 8
    key = "Imports point downwards only; a test walks them. Grey: a room of the library. White: a name in a spec."
    parts.append(_text(2 * MARGIN, y + 14, key, "soft"))
    return _svg(WIDTH, y + 26, STYLE, parts, "The rooms of the library, from commands at the top to foundations")


def _flow(boxes: Sequence[tuple[str, bool]], width: float) -> Iterator[list[tuple[int, int, str, bool]]]:
    """Boxes in rows, like words."""
    row: list[tuple[int, int, str, bool]] = []
    x = 0
    for word, is_room in boxes:
        wide = int(18 + 7.6 * len(word))
        if row and x + wide > width:
            yield row
            row, x = [], 0
        row.append((x, wide, word, is_room))
        x += wide + 7
    yield row


# Labels ---------------------------------------------------------------------------------------------------

SPLITS = {"iid": "iid", "shards": "shards", "classes": "classes", "dirichlet": "dirichlet (0.5)"}


def draw_labels(file: Path) -> None:
    """The labels of twenty clients, for each way to split the embedded digits."""
    from matplotlib.figure import Figure

    import fedbilevel as fb
    from fedbilevel.data import label_counts

    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for place, axes in zip(SPLITS, figure.subplots(1, len(SPLITS), sharey=True), strict=True):
        spec = fb.load_spec("demo", {"data.name": "digits", "data.clients": 20, "data.partition": place})
        dataset, parts = spec.data.split(spec.seed)
        counts = label_counts(dataset.train_targets, parts, dataset.classes)
        bottom = counts[:, 0] * 0
        for label in range(dataset.classes):
            axes.bar(range(len(counts)), counts[:, label], 0.9, bottom, color=f"C{label}", label=str(label))
            bottom = bottom + counts[:, label]
        axes.set_title(SPLITS[place], loc="left", fontsize=10)
        axes.set_xlabel("client")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("rows")
    handles, words = axes.get_legend_handles_labels()
    figure.legend(handles, words, title="digit", loc="outside right center", fontsize=8, title_fontsize=8)
    figure.savefig(file, dpi=130, metadata={"Software": None})


# All of them ----------------------------------------------------------------------------------------------


def _text(x: float, y: float, words: str, look: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: float, height: float, style: str, parts: Sequence[str], say: str) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{escape(say)}</title><style>{style}</style>\n"
        f'<rect class="paper" width="{width:g}" height="{height:g}" rx="8"/>\n{inside}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "iteration.svg").write_text(iteration(rounds()))
    (out / "architecture.svg").write_text(architecture(named()))
    draw_labels(out / "labels.png")


if __name__ == "__main__":
    main()

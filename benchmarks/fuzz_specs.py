"""Specs at random: each is run for one outer iteration on digits, or refused with a field named.

    python benchmarks/fuzz_specs.py --count 10000

A spec is the small one below with up to seven fields changed: to a value that its type allows, or to anything.
What is neither run nor refused by an error of this library would reach a user as a traceback; it is printed, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import traceback
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any

from fedbilevel import run
from fedbilevel.errors import FedBilevelError, SettingsError
from fedbilevel.runtime import prepare_runtime
from fedbilevel.spec import load_spec
from fedbilevel.spec._sections import FederationSettings
from fedbilevel.spec._spec import CHOSEN, ORDER, SECTIONS

# Each table of a spec that has a name, with the classes to choose from.
NAMED = {**CHOSEN, **{f"federation.{field}": table for field, table in FederationSettings.choices.items()}}
BASE: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 6,
    "problem.hidden": 4,
    "stop.rounds": None,
    "stop.iterations": 1,
    "evaluate.clients": 2,
}
SMALL = {"algorithm.participation": 3, "algorithm.lower_steps": 2, "algorithm.upper_steps": 1}
WILD: tuple[Any, ...] = (
    None,
    True,
    "",
    "many",
    "full",
    -1,
    0,
    0.0,
    -0.5,
    1.5,
    float("nan"),
    float("inf"),
    1e30,
    2**70,
    [],
    [1, 2],
    {},
)


def fields() -> dict[str, list[tuple[str, Any]]]:
    """The settings by section, or by table and name, each with its type."""
    tables = {section: {"": cls} for section, cls in SECTIONS.items()} | {k: dict(v) for k, v in NAMED.items()}
    return {
        f"{section}:{name}": [
            (f"{section}.{f.name}", hint)
            for f in dataclasses.fields(cls)
            for hint in [typing.get_type_hints(cls)[f.name]]
        ]
        for section, table in tables.items()
        for name, cls in table.items()
    }


def plausible(hint: Any, draw: random.Random) -> Any:
    """A value of this type, small."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return plausible(inner[0], draw)
    if origin in (typing.Union, types.UnionType):
        return plausible(draw.choice(inner), draw)
    if origin is typing.Literal:
        return draw.choice(inner)
    if origin is tuple:
        return [draw.randint(1, 3) for _ in range(draw.choice((1, 3, 6)))]
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        return draw.choice((1, 2, 3, 5, 7, 12))
    if hint is float:
        return draw.choice((0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 3.0))
    if hint is str:
        return draw.choice(("digits", "local", "x"))
    return None


def changes(seed: int, known: dict[str, list[tuple[str, Any]]]) -> dict[str, Any]:
    """What a fuzzed spec changes."""
    draw = random.Random(seed)
    named = {table: draw.choice(list(classes)) for table, classes in NAMED.items()}
    if draw.random() < 0.5:  # several methods take no other aggregator than the mean
        named["federation.aggregator"] = "mean"
    if named["federation.engine"] == "ray":
        named["federation.engine"] = "loop"  # it would start a cluster
    made: dict[str, Any] = {f"{section}.name": name for section, name in named.items()} | BASE
    own = {key for key, _ in known[f"algorithm:{named['algorithm']}"]}
    made |= {key: value for key, value in SMALL.items() if key in own}
    if named["problem"] != "hyper-representation":
        made.pop("problem.hidden")
    tables = [f"{table}:{named.get(table, '')}" for table in (*ORDER, *(t for t in NAMED if t not in ORDER))]
    pool = [field for table in tables for field in known[table]]
    wild = draw.choice((0.0, *[0.6] * 4, *[0.8] * 5))  # a tenth of the specs has values of the right type only
    for _ in range(draw.randint(0, 4) if wild == 0 else draw.randint(2, 7)):
        key, hint = draw.choice(pool)
        made[key] = draw.choice(WILD) if draw.random() < wild else plausible(hint, draw)
    if draw.random() < 0.05:
        made[
            draw.choice(
                ("algorithm.alhpa", "stop", "nowhere.x", "data.", "federation.engine.x", "federation.engine")
            )
        ] = 1
    made["stop.iterations"] = 1
    if made.get("data.name") not in (None, "digits", "generated"):
        made["data.name"] = draw.choice(("digits", "digit", 5))  # others would be fetched
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first spec")
    arguments = parser.parse_args()
    prepare_runtime()
    known, outcome = fields(), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        for seed in range(arguments.first, arguments.first + arguments.count):
            changed = changes(seed, known)
            try:
                spec = load_spec("paper", changed)
                run(spec, Path(place) / "run", overwrite=True)
                outcome["run"] += 1
            except SettingsError as error:
                named = any(word in str(error) for word in (*ORDER, "nowhere"))
                outcome["refused" if named else "refused, no field"] += 1
                if not named:
                    print(f"seed {seed}: {error}")
            except FedBilevelError as error:
                outcome[f"ended with one line ({type(error).__name__})"] += 1
            except Exception:
                outcome["TRACEBACK"] += 1
                print(f"seed {seed}: {changed}\n{traceback.format_exc()[-1500:]}")
            if sys.stderr.isatty() or seed % 500 == 499:
                print(f"\r{seed + 1 - arguments.first} of {arguments.count}: {dict(outcome)}", file=sys.stderr)
    print(dict(outcome))
    raise SystemExit(1 if outcome["TRACEBACK"] or outcome["refused, no field"] else 0)


if __name__ == "__main__":
    main()

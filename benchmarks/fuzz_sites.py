"""Sites at random: each TOML and its files are loaded, or refused with one line.

    python benchmarks/fuzz_sites.py --count 1000

Valid sites with rows in an .npz, in a folder of .npy files and in a .csv are mutated: settings are replaced by
other types and extreme values, removed or added, and bytes of the TOML and of the files are flipped, cut and
repeated. The same seed makes the same sites. A site is accepted if it loads and answers a greeting. What is
neither accepted nor refused by an error of this library would reach a user as a traceback; it is printed, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel.data import ClientData, Part
from fedbilevel.engines.flare import pack, unpack
from fedbilevel.errors import FedBilevelError
from fedbilevel.federate import load_site
from fedbilevel.federate.sitefile import write_rows
from fedbilevel.runtime import prepare_runtime
from fuzz_messages import spoil_bytes

ESCAPED = "ESCAPED"
ROWS = ClientData(
    Part(np.arange(8, dtype=np.float32).reshape(4, 2), np.asarray([0, 1, 0, 1], np.int32)),
    Part(np.asarray([[8, 9]], np.float32), np.asarray([0], np.int32)),
)
PROBLEM = {"name": "hyper-representation", "hidden": 3, "shape": [2, 1, 1], "classes": 2}
DATA: dict[str, dict[str, Any]] = {
    "npz": {"npz": "rows.npz"},
    "folder": {"folder": "rows"},
    "csv": {"csv": "rows.csv", "inputs": ["a", "b"], "targets": "label", "upper_share": 0.2, "target_type": "int"},
}
VALUES: tuple[Any, ...] = (
    True, "", "x", "\x00", "..", "/", ".", "rows", "rows.csv", "q" * 5000, "os:getcwd", "os:path", "builtins:dict",
    -1, 0, 1, 2, 3, 7, 1.5, -0.5, 1e308, float("nan"), float("inf"), 2**31, 2**40, -(2**63), 2**62,
    [], {}, [1, 2], [-1, 2, 1], [2**40, 2**40, 1], [2, 1], [0, 0, 0], ["a"], ["a", 3], [[]], {"a": {}},
)  # fmt: skip
KEYS = (
    "npz",
    "csv",
    "folder",
    "python",
    "privacy",
    "noise",
    "steps",
    "audit",
    "shape",
    "classes",
    "name",
    "upper_share",
    "x",
)
CELLS = ("", "x", "nan", "inf", "1e999", "-1e40", "9" * 400, '"', "\x00", "\n", ",", ",,,,", "é", "1_0", "0x10")


def change_settings(site: dict[str, Any], draw: random.Random) -> None:
    """Replace, remove or add a setting."""
    section = draw.choice((site, *(part for part in site.values() if isinstance(part, dict))))
    if draw.random() < 0.25 or not section:
        section[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
        return
    key = draw.choice(list(section))
    if draw.random() < 0.2:
        del section[key]
    else:
        section[key] = copy.deepcopy(draw.choice(VALUES))


def odd_array(draw: random.Random) -> np.ndarray:
    """An array that rows should not be."""
    return draw.choice(
        (
            np.asarray(3.0), np.zeros((0, 2)), np.zeros((4, 0)), np.full((4, 2), np.nan),
            np.asarray([["a", "b"]] * 4),
            np.zeros((4, 2), complex), np.zeros(4, bool), np.zeros((4, 2), [("a", "f4")]), np.zeros((2, 2, 2, 2)),
            np.full((4, 2), 2**63 - 1), np.zeros((4, 2), "datetime64[s]"), np.zeros((3, 2)),
            np.zeros((4, 2), np.float16),
        )
    )  # fmt: skip


def write_site(folder: Path, draw: random.Random) -> Path:
    """Write a site that is valid, and mutate its TOML, its files, or both."""
    kind = draw.choice(list(DATA))
    write_rows(folder / "rows.npz", ROWS)
    (folder / "rows").mkdir()
    for part, rows in ROWS.parts.items():
        np.save(folder / "rows" / f"{part}.inputs.npy", rows.inputs)
        np.save(folder / "rows" / f"{part}.targets.npy", rows.targets)
    table = [["name", "b", "label", "a"], *(["x", f"{2 * i + 1}", f"{i % 2}", f"{2 * i}"] for i in range(5))]
    site: dict[str, Any] = {"steps": [], "audit": "audit.jsonl"}
    site |= {"data": copy.deepcopy(DATA[kind]), "problem": copy.deepcopy(PROBLEM)}
    if draw.random() < 0.1:
        site["problem"] = {"name": "quadratic"}
    if draw.random() < 0.3:
        site["privacy"] = {"noise": 1.0}
    if draw.random() < 0.7:
        for _ in range(draw.randint(1, 3)):
            change_settings(site, draw)
    text = tomli_w.dumps(site).encode(errors="replace")
    if draw.random() < 0.15:
        text = spoil_bytes(text or b"x", draw, b"0")
    (folder / "site.toml").write_bytes(text)
    if draw.random() < 0.2:
        table[draw.randrange(len(table))][draw.randrange(4)] = draw.choice(CELLS)
    (folder / "rows.csv").write_text("\n".join(",".join(row) for row in table))
    if draw.random() < 0.5:
        files = [folder / "rows.npz", folder / "rows.csv", *sorted((folder / "rows").iterdir())]
        own = {"npz": files[:1], "csv": files[1:2], "folder": files[2:]}[kind]
        file = draw.choice(own)
        if file.suffix == ".npy" and draw.random() < 0.5:
            np.save(file, odd_array(draw))
        elif file.suffix == ".npz" and draw.random() < 0.5:
            arrays = {f"{part}.{field}": getattr(getattr(ROWS, part), field) for part in ("lower", "upper")
                      for field in ("inputs", "targets")}  # fmt: skip
            arrays[draw.choice((*arrays, "other", "lower.inputs.a"))] = odd_array(draw)
            np.savez(file, **arrays)
        else:
            file.write_bytes(spoil_bytes(file.read_bytes() or b"x", draw, b"0"))
    return folder / "site.toml"


def one(file: Path) -> str:
    """Load a site and greet it; return what became of it."""
    try:
        site = load_site(file)
        hello = {"kind": "hello", "round": 0, "session": "s", "run": "r", "noise": None}
        sizes = [site.problem.size_x, site.problem.size_y]
        assert unpack(site.site().answer(pack(hello | {"sizes": sizes}, {}))).header["kind"] == "welcome"
    except FedBilevelError as error:
        assert str(error) and "\n" not in str(error).strip(), f"not one line: {error}"
        return f"refused ({type(error).__name__})"
    return "accepted"


def fuzz(count: int, seed: int, folder: Path, say: Callable[[str], Any] = lambda text: None) -> Counter[str]:
    """Load mutated sites; return the number of each outcome."""
    outcome: Counter[str] = Counter()
    for number in range(count):
        place = folder / "site"
        place.mkdir()
        try:
            file = write_site(place, random.Random(f"{seed} {number}"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy warns of a cast that overflows
                outcome[one(file)] += 1
        except Exception:
            outcome[ESCAPED] += 1
            content = (place / "site.toml").read_bytes()
            say(f"seed {seed}, site {number}:\n{content[:600]!r}\n{traceback.format_exc()[-1500:]}\n")
        shutil.rmtree(place)
        if number % 200 == 199:
            say(f"{number + 1} of {count}: {dict(outcome)}\n")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_runtime()
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(arguments.count, arguments.seed, Path(folder), sys.stderr.write)
    print(dict(outcome))
    raise SystemExit(1 if outcome[ESCAPED] else 0)


if __name__ == "__main__":
    main()

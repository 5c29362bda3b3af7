"""A site's TOML: it names the site's data and its problem.

    [data]                                   one of:
    npz = "rows.npz"                         arrays lower.inputs, lower.targets, upper.inputs, upper.targets,
                                             and test.inputs, test.targets if the site has test rows of its own
    folder = "rows"                          the same as rows/lower.inputs.npy, ...
    csv = "rows.csv"                         inputs = ["age", "dose"], targets = "outcome", upper_share = 0.2
    python = "my_site:load"                  a function that returns (lower, upper); further keys are its arguments

    [problem]                                one of:
    name = "hyper-representation"            the spec's settings, and shape = [28, 28, 1], classes = 10
    python = "my_problem:make"               a function that returns a Problem; further keys are its arguments

    [privacy]                                optional: clip what leaves the site, and add noise to it
    noise = 1.0                              see layers/_ownnoise.py

    [policy]                                 optional: what the site refuses, whatever the server asks
    smallest_batch = 32                      see engines/flare/_policy.py

    steps = ["my_problem"]                   modules whose client steps may be run here, beside this library's
    audit = "audit.jsonl"                    log what is asked and refused, one line for each (default: no log)

(TOML requires `steps` and `audit` to stand above the sections.)

Paths, and modules that are not installed, are looked up in the folder of the TOML.
"""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from pydantic import Field

from ..data import ClientData, Clients, Part, clients_from
from ..engines import ClientStates, Engine, Loop
from ..engines.flare import Site, SitePolicy
from ..errors import SettingsError, UnknownName, one_line, shown
from ..layers import OwnNoise, SitePrivacy
from ..names import locate, users_code
from ..problem import BilevelProblem, Fitting, Problem, Task
from ..problems import PROBLEMS
from ..reading import Unreadable, read_toml
from ..settings import Size, about, from_mapping, settings

PARTS = ("lower", "upper")
STATES = "states"  # the folder beside the TOML where the site's steps keep their state
OPTIONAL = ("privacy", "policy")
KEYS = ("data", "problem", *OPTIONAL, "steps", "audit")
LARGEST = 10**6  # numbers in the input of a problem of images


@settings
class OwnValues:
    """What stands above the sections of a site's TOML."""

    steps: Annotated[tuple[str, ...], about("modules whose client steps may be run here")] = ()
    audit: Annotated[str | None, Field(pattern=r"^[^\x00]+$"), about("a file for the server's requests")] = None


@settings
class Images:
    """What a problem of images needs beside its settings."""

    shape: Annotated[tuple[Size, Size, Size], about("height, width and channels")]
    classes: Annotated[Size, about("the number of labels")]


@dataclass(frozen=True)
class LoadedSite:
    """What a site brings: problem, rows, the modules of its steps, and its audit file, privacy and policy."""

    problem: BilevelProblem
    data: ClientData
    modules: tuple[str, ...]
    audit: Path | None
    privacy: SitePrivacy | None
    policy: SitePolicy | None
    folder: Path

    def site(self) -> Site:
        """The site, ready to answer."""

        def engine(problem: BilevelProblem, clients: Clients, states: ClientStates) -> Engine:
            made = Loop(problem, clients, states=states)
            return made if self.privacy is None else OwnNoise(made, self.privacy, self.folder)

        return Site(
            self.problem,
            self.data,
            modules=self.modules,
            audit=self.audit,
            policy=self.policy,
            folder=self.folder,
            noise=None if self.privacy is None else self.privacy.noise,
            engine=engine,
            states=self.folder / STATES,
        )


def load_site(path: Path) -> LoadedSite:
    """Read a site's TOML, and the data and the problem that it names."""
    try:
        raw = read_toml(path)
    except Unreadable as error:
        raise SettingsError(f"site {path} {error}; give the TOML file of a site, as in docs/federate.md") from None
    for key in raw:
        if key not in KEYS:
            raise SettingsError(f"{key} is not a setting of a site; use {', '.join(KEYS)}")
    for section in ("data", "problem", *(name for name in OPTIONAL if name in raw)):
        if not isinstance(raw.get(section), dict):
            raise SettingsError(f"site {path} has no [{section}]")
    folder = path.resolve().parent
    problem, data = _problem(raw["problem"], folder), _data(raw["data"], folder)
    own = from_mapping(OwnValues, {k: raw[k] for k in ("steps", "audit") if k in raw}, "site")
    audit = None if own.audit is None else folder / own.audit
    privacy = from_mapping(SitePrivacy, raw["privacy"], "privacy") if "privacy" in raw else None
    policy = from_mapping(SitePolicy, raw["policy"], "policy") if "policy" in raw else None
    return LoadedSite(problem, data, own.steps, audit, privacy, policy, folder)


def write_rows(path: Path, data: ClientData) -> None:
    """Write a client's rows as the .npz file that `[data] npz` reads."""
    arrays: dict[str, Any] = {}
    for name, part in data.parts.items():
        for kind, tree in part._asdict().items():
            if isinstance(tree, dict):
                arrays |= {f"{name}.{kind}.{key}": leaf for key, leaf in tree.items()}
            elif tree is not None:
                arrays[f"{name}.{kind}"] = tree
    np.savez(path, **arrays)


def _problem(section: Mapping[str, Any], folder: Path) -> Any:
    values = dict(section)
    if "python" in values:
        address = values.pop("python")
        function = locate(address, "problem.python", folder)
        with users_code(f"problem.python = {shown(address)} is wrong: it raises "):
            made = function(**values)
        found = made.problem if isinstance(made, Task) else made
        if not isinstance(found, Problem | Fitting):
            raise SettingsError(
                f"problem.python = {shown(address)} is wrong: it returns {type(made).__name__}; return a Problem"
            )
        return found
    name = values.pop("name", None)
    known = [n for n, cls in PROBLEMS.items() if hasattr(cls, "remote")]
    if name not in known:
        raise UnknownName("problem.name =", str(name), known)
    given: dict[str, Any] = {k: values.pop(k) for k in ("shape", "classes") if k in values}
    chosen: Any = from_mapping(PROBLEMS[name], values, "problem")
    if len(given) == 2:
        images = from_mapping(Images, given, "problem")
        if math.prod(images.shape) > LARGEST:
            raise SettingsError(
                f"problem.shape = {list(images.shape)} is wrong: it has more than {LARGEST:,} numbers; use less"
            )
        given = {"shape": images.shape, "classes": images.classes}
    try:
        return chosen.remote(**given)
    except TypeError:
        raise SettingsError(
            f"problem {name} needs other keys beside its settings; hyper-representation needs shape and classes"
        ) from None


def _data(section: Mapping[str, Any], folder: Path) -> ClientData:
    kinds = [kind for kind in READERS if kind in section]
    if len(kinds) != 1:
        raise SettingsError(f"[data] names {len(kinds)} sources; give exactly one of: {', '.join(READERS)}")
    (kind,) = kinds
    rest = {k: v for k, v in section.items() if k != kind}
    wrong = f"data.{kind} = {shown(section[kind])} is wrong"
    if not isinstance(section[kind], str):
        raise SettingsError(f"{wrong}: give a text")
    try:
        inspect.signature(READERS[kind]).bind(section[kind], folder, **rest)
    except TypeError as error:
        raise SettingsError(f"[data] {kind}: {error}") from None
    try:
        data = READERS[kind](section[kind], folder, **rest)
    except SettingsError:
        raise
    except Exception as error:  # NumPy and zipfile raise errors of many kinds for a file that is damaged
        raise SettingsError(f"{wrong}: {one_line(str(error) or type(error).__name__)}") from None
    for name, part in data.parts.items():
        counts = {len(leaf) for leaf in jax.tree.leaves(part)}
        if len(counts) != 1 or counts == {0}:
            raise SettingsError(f"{wrong}: its {name} rows are {sorted(counts)}")
    return data


def _npz(value: str, folder: Path) -> ClientData:
    with (folder / value).open("rb") as stream:  # NumPy would leave a damaged file open
        file: Any = np.load(stream, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it is one array; write all arrays into one file by numpy.savez")
        return _assembled({name: file[name] for name in file.files})


def _folder(value: str, folder: Path) -> ClientData:
    files = sorted((folder / value).glob("*.npy"))
    return _assembled({file.stem: np.load(file, allow_pickle=False) for file in files})


def _assembled(arrays: Mapping[str, np.ndarray]) -> ClientData:
    def tree(prefix: str) -> Any:
        if prefix in arrays:
            return _narrow(arrays[prefix])
        found = {k.removeprefix(f"{prefix}."): _narrow(a) for k, a in arrays.items() if k.startswith(f"{prefix}.")}
        return found or None

    found = {part: tree(f"{part}.inputs") for part in ClientData._fields}
    for part in PARTS:
        if found[part] is None:
            raise ValueError(f"there is no array {part}.inputs among {sorted(arrays)}")
    there = {part: inputs for part, inputs in found.items() if inputs is not None}
    return ClientData(**{part: Part(inputs, tree(f"{part}.targets")) for part, inputs in there.items()})


def _csv(
    value: str,
    folder: Path,
    inputs: list[str],
    targets: str,
    upper_share: float = 0.2,
    target_type: str = "float",
) -> ClientData:
    """Read columns by name; the last `upper_share` of the rows is for the upper loss."""
    if not isinstance(inputs, list) or not inputs or not all(isinstance(column, str) for column in inputs):
        raise ValueError(f"inputs = {shown(inputs)}; give a list of columns")
    if not isinstance(targets, str):
        raise ValueError(f"targets = {shown(targets)}; give the name of a column")
    if not isinstance(upper_share, float) or not 0 < upper_share < 1:
        raise ValueError(f"upper_share = {shown(upper_share)}; give a number between 0 and 1")
    if target_type not in ("int", "float"):
        raise ValueError(f"target_type is {target_type!r}; use int or float")
    with (folder / value).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    missing = [column for column in (*inputs, targets) if not rows or column not in rows[0]]
    if missing:
        raise ValueError(f"it has no rows, or no columns {missing}")
    a = np.asarray([[float(row[column]) for column in inputs] for row in rows], np.float32)
    b = np.asarray([float(row[targets]) for row in rows]).astype(np.int32 if target_type == "int" else np.float32)
    cut = len(rows) - max(1, round(upper_share * len(rows)))
    return ClientData(Part(a[:cut], b[:cut]), Part(a[cut:], b[cut:]))


def _python(value: str, folder: Path, **arguments: Any) -> ClientData:
    function = locate(value, "data.python", folder)
    with users_code(f"data.python = {shown(value)} is wrong: it raises "):
        made = function(**arguments)
    data = made if isinstance(made, ClientData) else clients_from([made]).load(0)
    return jax.tree.map(_narrow, data)


def _narrow(array: Any) -> np.ndarray:
    """The array as float32 or int32, which this library uses everywhere; it has to hold numbers, in rows."""
    array = np.asarray(array)
    if array.ndim == 0:
        raise ValueError("an array is a single number; give it a row for each sample")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"an array has the type {array.dtype}; give whole or real numbers")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int32) if array.dtype.kind in "iu" and array.dtype != np.uint8 else array


READERS: dict[str, Callable[..., ClientData]] = {"npz": _npz, "folder": _folder, "csv": _csv, "python": _python}

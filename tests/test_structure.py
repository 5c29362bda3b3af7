"""The shape of the library: rooms, who counts, what is exported, documentation."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbilevel

SOURCE = Path(fedbilevel.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# Top to bottom. A room may use those below it and itself, never one above.
ROOMS = [
    "__main__",
    "cli",
    "templates",
    "bench",
    "federate",
    "leaderboard",
    "studies",
    "watch",
    "run",
    "advisor",
    "loggers",
    "report",
    "spec",
    "record",
    "_divergence",
    "check",
    "theory",
    "algorithms",
    "_probes",
    "fused",
    "agents",
    "federation",
    "_collection",
    "_server",
    "ledger",
    "policies",
    "layers",
    "privacy",
    "aggregate",
    "torch",
    "engines",
    "problems",
    "models",
    "_fitting",
    "problem",
    "feasible",
    "_derivatives",
    "heads",
    "oracle",
    "own",
    "batch",
    "steps",
    "native",
    "data",
    "schedules",
    "settings",
    "stepsizes",
    "trials",
    "names",
    "files",
    "reading",
    "processes",
    "rng",
    "runtime",
    "errors",
]

# What a user needs to extend the library, and to say what kind of thing is given or returned.
NEEDED = {
    *("Agents", "BilevelProblem", "Call", "Capabilities", "ClientStates", "Diverged", "Draw", "Engine", "Fault"),
    *("Inverse", "Moves", "Next", "Observer", "Oracle", "Own", "Policies", "Progress", "Reason", "Replies"),
    *("Stream", "about", "settings", "train"),
}
ALIASES = {"W", "X", "Y", "Scalar", "Next", "Own"}  # annotations, which cannot have a docstring


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def relative_name(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def rooms_used(file: Path, text: str) -> Iterator[str]:
    """The rooms that a file imports, however it spells the import."""
    package = ["fedbilevel", *file.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(text)):
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "fedbilevel":
                yield name[1] if len(name) > 1 else "the package itself"


def test_the_walk_sees_every_spelling_of_an_import() -> None:
    text = (
        "from . import rng\nfrom ..data.clients import Part\nimport fedbilevel.run\nfrom fedbilevel import steps\n"
    )
    text += "import numpy.linalg\ndef f():\n    from ..errors import StepError\n"
    found = list(rooms_used(SOURCE / "engines" / "loop.py", text))
    assert found == ["engines", "data", "run", "steps", "errors"]


@pytest.mark.parametrize("file", [f for f in FILES if f != SOURCE / "__init__.py"], ids=relative_name)
def test_dependencies_point_downwards_only(file: Path) -> None:
    own = room(file)
    assert own in ROOMS, f"{own} is a new room: give it its place in ROOMS"
    upwards = [used for used in rooms_used(file, file.read_text()) if used != own and used not in below(own)]
    assert upwards == [], f"{own} uses {upwards}, which are not below it"


def below(own: str) -> list[str]:
    return ROOMS[ROOMS.index(own) + 1 :]


def private(path: list[str]) -> bool:
    """Whether a dotted path goes through a private module of a room."""
    return any(part.startswith("_") and not part.startswith("__") for part in path[2:])


@pytest.mark.parametrize("file", FILES, ids=relative_name)
def test_a_room_is_entered_by_its_door_only(file: Path) -> None:
    """What a room shows is in its `__init__`; its modules with an underscore are nobody else's."""
    package = ["fedbilevel", *file.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            path = base + (node.module.split(".") if node.module else [])
            foreign = path[:1] == ["fedbilevel"] and path[1:2] != package[1:2]
            assert not (foreign and private(path)), f"line {node.lineno} goes into {'.'.join(path)}"


def test_engines_never_import_an_algorithm_or_the_federation() -> None:
    used = {name for file in FILES if room(file) == "engines" for name in rooms_used(file, file.read_text())}
    assert used and not used & {"algorithms", "agents", "federation", "collection", "probes", "run", "spec"}


COUNTED = {"rounds", "bytes_up", "bytes_down", "rejected"}


def books(text: str) -> list[int]:
    """The lines that set a count of an account: `account.rounds += 1`, also `account.rounds = 1`."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        lines += [t.lineno for t in targets if isinstance(t, ast.Attribute) and t.attr in COUNTED]
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Account":
            lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_a_start_imports_no_extra_and_nothing_that_draws() -> None:
    late = ("dp_accounting", "matplotlib", "mlflow", "nvflare", "psutil", "ray", "tensorboardX", "torch", "wandb")
    script = f"import sys, fedbilevel.cli; print([m for m in {late} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_federation_counts_rounds_and_bytes() -> None:
    assert books("ledger.steps['a'].rounds += 1\nx = 1\na.bytes_up = 3\nAccount(rounds=2)\n") == [1, 3, 4]
    counting = {relative_name(file): books(file.read_text()) for file in FILES}
    for name in ("federation.py", "_collection.py", "agents.py", "fused/_books.py"):
        assert counting.pop(name), f"{name} books nothing any more: take it out of this list"
    assert len(counting.pop("ledger.py")) == 1, "the way back from JSON"
    assert {name: lines for name, lines in counting.items() if lines} == {}


def imported_names() -> list[str]:
    """The names that the package takes from its modules."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    return [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_the_package_exports_exactly_what_it_imports() -> None:
    assert sorted(fedbilevel.__all__) == sorted(imported_names())
    assert len(set(fedbilevel.__all__)) == len(fedbilevel.__all__)


def test_the_package_has_every_name_that_an_extension_needs() -> None:
    assert set(fedbilevel.__all__) >= NEEDED


@pytest.mark.parametrize("name", sorted(set(imported_names()) - ALIASES))
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    thing = getattr(fedbilevel, name)
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text and text.strip()
    assert not text.startswith(f"{name}("), "the docstring is the one that a dataclass or NamedTuple makes itself"


@pytest.mark.parametrize("file", FILES, ids=relative_name)
def test_a_file_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())), "a module has a docstring"

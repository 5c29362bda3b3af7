"""The names that a spec may use, and the objects that they stand for.

Each kind of object (algorithms, problems, data sets, engines, aggregators) has one table. Everything else about
the names is derived from it: what a spec accepts, what an error suggests, what `--print-spec` lists. An installed
package adds names by entry points in the group `fedbilevel.KIND`. An object without a name can be given by its
address, `module:attribute`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from .errors import FedBilevelError, SettingsError, UnknownName, one_line, shown

T = TypeVar("T")
PYTHON = "python"  # the name with which a spec gives an address instead


class Names(Mapping[str, T]):
    """The objects of one kind by name: those of this library, and those that installed packages add.

    kind     the plural under which packages add to it, as in the group `fedbilevel.algorithms`
    where    the field of a spec that holds the name, for error messages
    known    the objects of this library
    needs    the attributes that an object of this kind has to have
    """

    def __init__(self, kind: str, where: str, known: Mapping[str, T], needs: tuple[str, ...] = ()) -> None:
        self.kind, self.where, self.needs, self._known = kind, where, needs, dict(known)

    def __getitem__(self, name: str) -> T:
        if name in self._known:
            return self._known[name]
        added = self._added().get(name)
        if added is None:
            raise UnknownName(f"{self.where} =", name, [*self, PYTHON])
        wrong = f"{self.where} = {name!r} is wrong"
        with users_code(f"{wrong}: the package that adds it fails to load {added.value} (", ")"):
            made: T = added.load()
        return made

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from (name for name in self._added() if name not in self._known)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._added()

    def _added(self) -> dict[str, EntryPoint]:
        return _installed(entry_points, f"fedbilevel.{self.kind}", tuple(sys.path))


@lru_cache(maxsize=32)
def _installed(
    find: Callable[..., Iterable[EntryPoint]], group: str, path: tuple[str, ...]
) -> dict[str, EntryPoint]:
    """The entry points of a group. To find them, Python reads files of all installed packages, in 30 ms."""
    return {entry.name: entry for entry in find(group=group)}


def lacking(table: Names[Any], cls: type[Any]) -> list[str]:
    """The attributes that a class would need to be of a table's kind, and does not have."""
    return [name for name in table.needs if not any(name in vars(base) for base in cls.__mro__)]


def locate(address: Any, where: str, folder: Path | None = None) -> Any:
    """The object at `module:attribute`. The module may be in `folder` (default: the working folder)."""
    if not isinstance(address, str):
        raise SettingsError(f"{where} = {shown(address)} is wrong: write module:attribute")
    module, _, name = address.partition(":")
    wrong = f"{where} = {shown(address)} is wrong"
    place = str((folder or Path.cwd()).resolve())
    if place not in sys.path:
        sys.path.append(place)
    try:
        with users_code(f"{wrong}: its module cannot be imported (", ")"):
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
    except SettingsError as error:
        cause = error.__cause__
        absent = isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}.")
        if absent or not module or (isinstance(cause, AttributeError) and module in sys.modules):
            raise SettingsError(
                f"{wrong}: {one_line(str(cause))}; write module:attribute, of a module that can be imported"
            ) from None
        raise
    if not callable(found):
        raise SettingsError(f"{wrong}: it is not a function or a class; name one")
    return found


def source_digest(address: str) -> str | None:
    """The SHA-256 of the source file of the module of an address, or None if it has no such file."""
    module = address.partition(":")[0]
    place = str(Path.cwd().resolve())
    if place not in sys.path:
        sys.path.append(place)
    try:
        found = sys.modules[module].__spec__ if module in sys.modules else importlib.util.find_spec(module)
        file = None if found is None or not found.has_location else found.origin
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except Exception:  # whoever uses the address will say what is wrong with it
        return None


@contextmanager
def users_code(before: str, after: str = "") -> Iterator[None]:
    """Turn whatever the code of others raises into a `SettingsError`, and name the place in that code.

    before, after   what the message says around the error: the field, its value, and what was called

    Errors of this library and interrupts are left as they are, and so is a lack of memory, which a run reports.
    """
    try:
        yield
    except (FedBilevelError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # also SystemExit, which would end the process without a word
        told = one_line(f"{type(error).__name__}: {error}")
        raise SettingsError(f"{before}{told}{after}; correct it{_place(error)}") from error


def _place(error: BaseException) -> str:
    """The last line of the user's own files that led to an error, as in " (my_problem.py, line 7)"."""
    installed = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")), "<")
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(installed)]
    if not own or isinstance(error, SyntaxError):  # the message of a SyntaxError has its place
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def address_of(thing: Any) -> str:
    """The address of a class or a function, as `locate` takes it."""
    return f"{thing.__module__}:{thing.__qualname__}"

"""The names that a spec may use, and the objects that they stand for.

Each kind of object (algorithms, problems, data sets, engines, aggregators) has one table. Everything else about
the names is derived from it: what a spec accepts, what an error suggests, what `--print-spec` lists. An installed
package adds names by entry points in the group `fedbilevel.KIND`. An object without a name can be given by its
address, `module:attribute`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from .errors import SettingsError, UnknownName, one_line, shown

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
        try:
            made: T = added.load()
        except Exception as error:
            raise SettingsError(
                f"{self.where} = {name!r} is wrong: the package that adds it fails to load {added.value} "
                f"({type(error).__name__}: {error})"
            ) from error
        return made

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from (name for name in self._added() if name not in self._known)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._added()

    def _added(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=f"fedbilevel.{self.kind}")}


def lacking(table: Names[Any], cls: type[Any]) -> list[str]:
    """The attributes that a class would need to be of a table's kind, and does not have."""
    return [name for name in table.needs if not any(name in vars(base) for base in cls.__mro__)]


def locate(address: Any, where: str, folder: Path | None = None) -> Any:
    """The object at `module:attribute`. The module may be in `folder` (default: the working folder)."""
    if not isinstance(address, str):
        raise SettingsError(f"{where} = {shown(address)} is wrong: write module:attribute")
    module, _, name = address.partition(":")
    place = str((folder or Path.cwd()).resolve())
    if place not in sys.path:
        sys.path.append(place)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{where} = {shown(address)} is wrong: {one_line(str(error))}; "
            "write module:attribute, of a module that can be imported"
        ) from None
    if not callable(found):
        raise SettingsError(f"{where} = {shown(address)} is wrong: it is not a function or a class")
    return found


def address_of(thing: Any) -> str:
    """The address of a class or a function, as `locate` takes it."""
    return f"{thing.__module__}:{thing.__qualname__}"

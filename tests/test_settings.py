"""Settings classes: checked fields, and errors that name field, value and remedy."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from fedbilevel.errors import SettingsError
from fedbilevel.settings import Count, Positive, about, from_mapping, meanings, settings, suggestion, to_mapping


@settings
class Oven:
    """An oven."""

    heat: Annotated[Positive, about("degrees")] = 180.0
    trays: Annotated[Count, about("how many")] = 2
    fan: Annotated[bool, about("whether it blows")] = False
    mode: Annotated[Literal["top", "bottom"], about("where from")] = "top"
    minutes: Annotated[Count | tuple[Count, ...] | None, about("for each tray")] = None
    share: Annotated[float, about("any finite number")] = 0.5


def test_defaults_hold_and_a_made_object_cannot_be_changed() -> None:
    oven: Any = Oven()
    assert (oven.heat, oven.trays, oven.fan, oven.mode, oven.minutes) == (180.0, 2, False, "top", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.heat = 200.0


def test_fields_are_given_by_name_only() -> None:
    make: Any = Oven
    with pytest.raises(SettingsError):
        make(200.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heat": -3}, "heat = -3 is wrong: input should be greater than 0"),
        ({"heat": float("nan")}, "heat = nan is wrong: input should be a finite number"),
        ({"heat": float("inf")}, "heat = inf is wrong: input should be a finite number"),
        ({"share": float("inf")}, "share = inf is wrong: input should be a finite number"),
        ({"heat": "hot"}, "heat = 'hot' is wrong: input should be a valid number"),
        ({"heat": True}, "heat = True is wrong: input should be a valid number"),
        ({"trays": 0}, "trays = 0 is wrong: input should be greater than or equal to 1"),
        ({"trays": 1.5}, "trays = 1.5 is wrong: input should be a valid integer"),
        ({"trays": "5"}, "trays = '5' is wrong: input should be a valid integer"),
        ({"trays": True}, "trays = True is wrong: input should be a valid integer"),
        ({"trays": [1]}, "trays = [1] is wrong: input should be a valid integer"),
        ({"fan": 1}, "fan = 1 is wrong: input should be a valid boolean"),
        ({"mode": "left"}, "mode = 'left' is wrong: input should be 'top' or 'bottom'"),
        ({"Heat": 3}, "Heat is not a setting; did you mean heat?"),
        ({"zzz": 3}, "zzz is not a setting; use one of: heat, trays, fan, mode, minutes, share"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as by_call:
        Oven(**values)
    assert str(by_call.value) == f"Oven.{message}"
    with pytest.raises(SettingsError) as by_mapping:
        from_mapping(Oven, values, "kitchen")
    assert str(by_mapping.value) == f"kitchen.{message}"


def test_every_wrong_field_is_named_once() -> None:
    with pytest.raises(SettingsError) as caught:
        from_mapping(Oven, {"trays": 0, "heat": 0, "minutes": "long"}, "kitchen")
    text = str(caught.value)
    assert [text.count(f"kitchen.{name}") for name in ("heat", "trays", "minutes")] == [1, 1, 1]


def test_lists_become_tuples_and_numpy_numbers_become_pythons() -> None:
    make: Any = Oven
    oven = make(minutes=[3, 4], trays=np.int64(2), heat=np.float32(0.5), fan=np.bool_(True))
    assert (oven.minutes, oven.trays, oven.heat, oven.fan) == ((3, 4), 2, 0.5, True)
    assert (type(oven.trays), type(oven.heat), type(oven.fan)) == (int, float, bool)
    hash(oven)


def test_a_mapping_and_back_gives_the_same_object_and_leaves_none_out() -> None:
    assert "minutes" not in to_mapping(Oven())
    oven = Oven(minutes=(3, 4), heat=7)
    assert to_mapping(oven)["minutes"] == [3, 4]
    assert from_mapping(Oven, to_mapping(oven), "kitchen") == oven


def test_meanings_are_the_descriptions_beside_the_fields() -> None:
    assert meanings(Oven)["minutes"] == "for each tray"
    assert list(meanings(Oven).values()) == [
        "degrees",
        "how many",
        "whether it blows",
        "where from",
        "for each tray",
        "any finite number",
    ]


def test_a_suggestion_is_the_nearest_name_or_else_all_names() -> None:
    assert suggestion("algoritm", ["problem", "algorithm"]) == "did you mean algorithm?"
    assert suggestion("n", ["N", "alpha"]) == "did you mean N?"
    assert suggestion("qqq", ["N", "alpha"]) == "use one of: N, alpha"

"""The pictures of the site: made from what the code has, and up to date where that is cheap to see."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pictures
from test_structure import ROOMS

ROOT = Path(__file__).parent.parent


def test_the_moving_picture_has_the_rounds_of_the_traced_iteration() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "figure1-exchanges.json").read_text())
    traced = [row for row in rows if "AggITD" in row["algorithm"]]
    assert len(traced) == 2 * 2 + 3
    made = pictures.iteration(traced)
    assert made == (ROOT / "docs" / "pictures" / "iteration.svg").read_text(), "run make pictures"
    ElementTree.fromstring(made)


def test_the_diagram_has_every_public_room_once_and_every_method() -> None:
    shelves = pictures.shelves()
    assert [room for _, inside in shelves for room in inside] == [room for room in ROOMS if room[0] != "_"]
    assert len(shelves) == len(pictures.SHELVES), "a room that begins a shelf has another name now"
    made = pictures.architecture(pictures.named())
    words = {element.text for element in ElementTree.fromstring(made).iter() if element.tag.endswith("text")}
    assert {"fbo-aggitd", "fedsoba", "simulation", "flare", "median", "client-weights"} <= words

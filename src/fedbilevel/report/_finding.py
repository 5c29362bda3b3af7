"""What a run has found out about clients, rows or other things: a ranked table, and a picture."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ..problem import Finding
from . import canvas
from ._figures import FAINT, INK, MARK

COLOURS = (INK, MARK, "#4d8a57", "#8a6d1f", "#6b4d8a")
WORST = 4, 10  # rows and columns of pictures
LONG = 8  # things whose names have room beside each other
FEW, MANY = 40, 300  # things that are drawn as bars with their numbers, and as points; more are counted


def ranked(found: Finding) -> str:
    """The things with their values as CSV, the largest first."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    also = {"name": found.names, "kind": found.kinds}
    rows.writerow(["rank", found.thing, found.what, *(name for name, texts in also.items() if texts)])
    for place, i in enumerate(_order(found), 1):
        rows.writerow([place, i, f"{found.values[i]:.6g}", *(texts[i] for texts in also.values() if texts)])
    return stream.getvalue()


def draw_finding(found: Finding, path: Path, title: str) -> None:
    """Draw the values in a colour for each kind: the largest first, or counted if there are many."""
    figure = canvas.figure(7, 3.6, w_pad=0.12, h_pad=0.08)
    axes = figure.add_subplot()
    order = _order(found)
    values = np.asarray(found.values, float)[order]
    kinds = np.asarray(found.kinds or [""] * len(values))[order]
    names = list(dict.fromkeys(kinds.tolist()))
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    if len(values) > MANY:
        apart = [values[kinds == name] for name in names]
        axes.hist(apart, bins=20, color=colours, label=names)
        axes.set(xlabel=found.what, ylabel=_plural(found))
    else:
        for colour, name in zip(colours, names, strict=True):
            at = np.flatnonzero(kinds == name)
            if len(values) <= FEW:
                axes.bar(at, values[at], color=colour, label=name)
            else:
                axes.scatter(at, values[at], s=9, color=colour, label=name, linewidth=0)
        axes.axhline(0, color=FAINT, linewidth=1, zorder=0)
        axes.set(ylabel=found.what, xlabel=f"{_plural(found)}, from the largest {found.what} to the smallest")
        if len(values) <= FEW:
            texts, long = [found.names[i] if found.names else str(i) for i in order], len(values) > LONG
            leaning: dict[str, Any] = (
                dict(rotation=60, ha="right", rotation_mode="anchor") if found.names and long else {}
            )
            axes.set_xticks(range(len(values)), texts, fontsize=8 if found.names else 7, **leaning)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if found.kinds:
        axes.legend(frameon=False, title="what is true of them", title_fontsize=8, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_worst(found: Finding, path: Path, title: str) -> None:
    """Draw the things with the smallest values as pictures, each in the colour of its kind."""
    assert found.picture is not None, "the things have pictures"
    worst = _order(found)[::-1][: WORST[0] * WORST[1]]
    figure = canvas.figure(9.5, 1.3 * WORST[0] + 0.6, w_pad=0.02, h_pad=0.04)
    names = list(dict.fromkeys(found.kinds[i] for i in _order(found)[::-1])) if found.kinds else []
    for axes, i in zip(figure.subplots(*WORST).flat, worst, strict=False):
        picture = found.picture(i)
        colour = COLOURS[names.index(found.kinds[i]) % len(COLOURS)] if names else INK
        axes.imshow(picture.image.squeeze(), cmap="gray", interpolation="nearest")
        axes.set_title(picture.title, fontsize=7.5, color=colour, pad=3)
        for edge in axes.spines.values():
            edge.set(color=colour, linewidth=1.6)
        axes.set(xticks=[], yticks=[])
    for axes in figure.axes[len(worst) :]:
        axes.set_visible(False)
    counted = Counter(found.kinds[i] for i in worst) if found.kinds else Counter[str]()
    truth = "; ".join(f"{count} have a {kind}" for kind, count in counted.items())
    told = f"{title}: the {len(worst)} {_plural(found)} with the smallest {found.what}" + (
        f"\n{truth}" if truth else ""
    )
    figure.suptitle(told, x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, dpi=130)


def _plural(found: Finding) -> str:
    return found.thing + ("es" if found.thing.endswith("s") else "s")


def _order(found: Finding) -> list[int]:
    """The places of the things, the largest value first; among equals, the first one first."""
    return [int(i) for i in np.argsort(-np.asarray(found.values, float), kind="stable")]

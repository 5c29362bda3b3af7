"""A curve in characters, for a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._measure import ACCURACY, LABELS, measured, points, shared_measure

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille dots by row and column


def text_curve(history: list[dict[str, Any]], width: int = 60, height: int = 10) -> str:
    """A measurement against rounds in Braille characters of two by four dots; empty with fewer than two values.

    It is the test accuracy, from 0 % to 100 %, if there is one. Otherwise it is the norm of the hypergradient, the
    upper loss, or another number, between its extremes; a line above the curve says which.
    """
    if not measured(history):
        return ""
    name = shared_measure([history])
    found = [(record["rounds"], value) for record, value in points(history, name)]
    if len(found) < 2 or found[-1][0] == 0:
        return ""
    rounds, values = np.asarray(found, float).T
    low, high = (0.0, 1.0) if name == ACCURACY else (float(values.min()), float(values.max()))
    levels = (np.interp(np.linspace(0, rounds[-1], 2 * width), rounds, values) - low) / ((high - low) or 1.0)
    rows = np.clip(np.round((1 - levels) * (4 * height - 1)), 0, 4 * height - 1).astype(int)
    cells = np.zeros((height, width), int)
    for column, row in enumerate(rows):
        before = rows[max(column - 1, 0)]
        for r in range(min(row, before), max(row, before) + 1):  # joins the dots of a steep stretch
            cells[r // 4, column // 2] |= DOTS[r % 4][column % 2]
    lines = ["".join(chr(0x2800 + c) if c else " " for c in line) for line in cells]
    share = [1 - i / height for i in range(height)]
    texts = [f"{s:.0%}" if name == ACCURACY else f"{low + s * (high - low):.4g}" for s in (*share, 0.0)]
    wide = max(4, *(len(text) for text in texts[::5]))
    labels = [f"{texts[i]:>{wide}} ┤" if i % 5 == 0 else f"{'':{wide}} │" for i in range(height)]
    axis = f"{texts[-1]:>{wide}} └" + "─" * width
    foot = f"{'':{wide}}  0" + f"{rounds[-1]:,.0f} rounds".rjust(width - 1)
    title = [] if name == ACCURACY else [LABELS.get(name, name)]
    return "\n".join([*title, *(a + b for a, b in zip(labels, lines, strict=True)), axis, foot])

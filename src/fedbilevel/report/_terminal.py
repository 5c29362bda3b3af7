"""A curve in characters, for the end of a run in a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille dots by row and column


def text_curve(history: list[dict[str, Any]], width: int = 60, height: int = 10) -> str:
    """Test accuracy against rounds in Braille characters of two by four dots; empty without accuracies."""
    points = [(r["rounds"], r["test_accuracy"]) for r in history if r["test_accuracy"] is not None]
    if len(points) < 2 or points[-1][0] == 0:
        return ""
    rounds, values = np.asarray(points, float).T
    columns = np.linspace(0, rounds[-1], 2 * width)
    levels = np.interp(columns, rounds, values)
    rows = np.clip(np.round((1 - levels) * (4 * height - 1)), 0, 4 * height - 1).astype(int)
    cells = np.zeros((height, width), int)
    for column, row in enumerate(rows):
        before = rows[max(column - 1, 0)]
        for r in range(min(row, before), max(row, before) + 1):  # joins the dots of a steep stretch
            cells[r // 4, column // 2] |= DOTS[r % 4][column % 2]
    lines = ["".join(chr(0x2800 + c) if c else " " for c in line) for line in cells]
    labels = [f"{1 - i / height:>4.0%} ┤" if i % 5 == 0 else "     │" for i in range(height)]
    axis = "  0% └" + "─" * width
    foot = "      0" + f"{rounds[-1]:,.0f} rounds".rjust(width - 1)
    return "\n".join([*(a + b for a, b in zip(labels, lines, strict=True)), axis, foot])

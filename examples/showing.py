"""What the examples share: the folder for their figure, rows as one, and several ways beside each other."""

import argparse
from pathlib import Path

import numpy as np


def folder(name):
    """The folder of `--out`, by default runs/examples/NAME."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "examples", name), help="the folder for the figure"
    )
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    return out


def together(parts):
    """The inputs and targets of several parts as one pair."""
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def tell(what, values, best=max):
    """Print a number for each way, the best one first; the first line says which ways are ahead of ours.

    Ours is the first of the ways.
    """
    ranked = sorted(values, key=values.get, reverse=best is max)
    ours = next(iter(values))
    ahead = " and ".join(f"'{name}'" for name in ranked[: ranked.index(ours)])
    print(f"{what}: '{ours}' is behind {ahead or 'nothing'}")
    for name in ranked:
        print(f"  {values[name]:8.4f}  {name}")


def bars(axes, title, values, shown="{:.1%}"):
    """Draw a bar for each way, the first one, which is ours, in blue."""
    drawn = axes.barh(list(values), list(values.values()), color=["tab:blue", *["silver"] * (len(values) - 1)])
    axes.bar_label(drawn, [shown.format(value) for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 1.2 * max(values.values())), xticks=[])
    axes.spines[["top", "right", "bottom"]].set_visible(False)

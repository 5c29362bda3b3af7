"""Tables of runs, made from records only."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def ledger_table(summary: dict[str, Any]) -> Table:
    """Rounds, payload and seconds by step, with a line for all of them."""
    table = Table(title="Ledger: one row a kind of round", title_justify="left")
    table.add_column("step")
    for column in ("rounds", "MB up", "MB down", "seconds", "rejected"):
        table.add_column(column, justify="right")
    steps = summary["ledger"]

    def row(name: str, accounts: list[dict[str, Any]]) -> list[str]:
        total = {k: sum(a[k] for a in accounts) for k in accounts[0]}
        return [
            name,
            f"{total['rounds']:,}",
            f"{total['bytes_up'] / 1e6:,.1f}",
            f"{total['bytes_down'] / 1e6:,.1f}",
            f"{total['seconds']:,.1f}",
            f"{total['rejected']:,}",
        ]

    for name, account in steps.items():
        table.add_row(*row(name, [account]))
    if steps:
        table.add_section()
        table.add_row(*row("all", list(steps.values())))
    return table


def outcome_table(summary: dict[str, Any]) -> Table:
    """Rounds, payload and seconds to each accuracy."""
    table = Table(title="What it took to reach an accuracy", title_justify="left")
    for column in ("accuracy", "rounds", "MB up + down", "seconds"):
        table.add_column(column, justify="right")
    for level, rounds in summary["rounds_to"].items():
        if rounds is None:
            table.add_row(f"{float(level):.0%}", "not reached", "", "")
        else:
            size, seconds = summary["bytes_to"][level], summary["seconds_to"][level]
            table.add_row(f"{float(level):.0%}", f"{rounds:,}", f"{size / 1e6:,.1f}", f"{seconds:,.1f}")
    return table

"""One self-contained HTML page without scripts or requests, readable at any width."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._tables import cells

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 0 auto; max-width: 62rem;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 3rem; border-top: 1px solid #d8dde3;
  padding-top: 1.5rem; }
p, li { max-width: 46rem; } .short { color: #b5482a; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #e6e9ed; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } th { background: #f4f6f8; }
img { max-width: 100%; height: auto; } code, pre { background: #f4f6f8; border-radius: 4px; padding: .1rem .3rem; }
pre { padding: .6rem .8rem; overflow-x: auto; } details { margin: .8rem 0; } nav a { margin-right: 1rem; }
"""


@dataclass(frozen=True)
class Section:
    """A study in the report: its remarks, rows, picture, the command that reruns it, and one run's ledger."""

    name: str
    title: str
    remarks: str
    rows: list[dict[str, Any]]
    picture: Path | None
    command: str
    ledger_of: str
    summary: dict[str, Any]


def write_report(path: Path, sections: list[Section], environment: dict[str, Any], runs: str) -> None:
    """Write the page; pictures are embedded."""
    links = "".join(f'<a href="#{s.name}">{html.escape(s.name)}</a> ' for s in sections)
    facts = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(_plain(value))}</td></tr>"
        for key, value in environment.items()
    )
    body = "\n".join(_section(s) for s in sections)
    path.write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedbilevel: the paper, reproduced</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>fedbilevel: the paper's tables and figures, ours beside theirs</h1>
<p>Xiao and Ji, <cite>Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
Differentiation</cite>, ICML 2023. The paper's values were read off its figures (±1 point) or taken from its
tables. Runs: {html.escape(runs)}.</p><nav>{links}</nav>
{body}
<h2 id="environment">Environment</h2><div class="scroll"><table>{facts}</table></div>
</body></html>
""",
        encoding="utf-8",
    )


def _section(s: Section) -> str:
    picture = ""
    if s.picture is not None:
        data = base64.b64encode(s.picture.read_bytes()).decode()
        alt = f"{s.title}. " + " ".join(_sentence(row) for row in s.rows)
        picture = f'<p><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></p>'
    mark = ' class="short"' if "SHORT" in s.remarks else ""
    accounts = [{"step": name, **account} for name, account in s.summary["ledger"].items()]
    return f"""<section><h2 id="{s.name}">{html.escape(s.title)}</h2><p{mark}>{html.escape(s.remarks)}</p>
{picture}{html_table(s.rows)}
<p>Run it again: <code>{html.escape(s.command)}</code></p>
<details><summary>Ledger of one run ({html.escape(s.ledger_of)})</summary>{html_table(accounts)}</details>
</section>"""


def html_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table that scrolls when it is too wide for the page."""
    header, lines = cells(rows)
    columns = zip(*lines, strict=True) if lines else [()] * len(header)
    kinds = [_class(column[0]) if column and len(set(map(_class, column))) == 1 else "" for column in columns]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(header, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{_class(text)}>{html.escape(text)}</td>" for text in line) + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(text: str) -> str:
    return ' class="number"' if text[:1].isdigit() else ""


def _sentence(row: dict[str, Any]) -> str:
    name = row.get("run", row.get("algorithm"))
    place = f" ({row['panel']})" if "panel" in row else ""
    if "step" in row:
        return f"{name}, round {row['round']}: {row['down']} down, {row['client']}, {row['up']} up."
    if "accuracy" in row:
        at = row["at"] if isinstance(row["at"], str | None) else f"{row['at']:.3g}"
        return f"{name}{place}{'' if at is None else f' at {at}'}: test accuracy {row['accuracy']:.1%}."
    return f"{name}{place}: final test accuracy {row['final']:.1%}." if "final" in row else f"{name}."


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)

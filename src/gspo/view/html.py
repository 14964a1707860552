"""What the reports have in common: the look of a page that opens anywhere, and its tables.

In: words and numbers. Out: HTML. `view.report` and `lab.report` call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root{--ink:#1d2733;--soft:#5b6770;--line:#dfe4e8;--seen:#1d7a46;--not:#7a6212;--opp:#a52a3d}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;color:var(--ink);margin:0 auto;max-width:1020px;padding:28px 24px 80px}
h1{font-size:25px;margin:0 0 4px}h2{font-size:20px;margin:52px 0 4px;padding-top:14px;border-top:2px solid var(--ink)}
h3{font-size:15px;margin:26px 0 2px}p{margin:6px 0 10px}.soft,small{color:var(--soft)}a{color:#1f6fb4}
code{font:12.5px ui-monospace,"DejaVu Sans Mono",monospace;background:#f2f4f6;padding:1px 4px;border-radius:3px;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:13px;margin:8px 0 14px}th{font-weight:600;text-align:left;border-bottom:1.5px solid var(--ink);padding:4px 8px 4px 0;vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:4px 8px 4px 0;vertical-align:top;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(2,1fr);gap:6px 22px}.charts svg{width:100%;height:auto}
svg text{font:11px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}svg .title{font-size:12.5px;font-weight:600;fill:var(--ink)}svg .grid{stroke:#e8ecef}
.legend{margin:4px 0 2px;font-size:13px}.legend span{margin-right:18px;white-space:nowrap}.key{width:30px;height:8px;margin-right:6px;vertical-align:middle}
details{margin:8px 0}summary{cursor:pointer}.wide{overflow-x:auto}
@media(max-width:720px){.charts{grid-template-columns:1fr}}
"""


def document(title: str, body: str, style: str = "") -> str:
    """A whole page that needs no network; `style` is laid over the common one."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def prose(text: str) -> str:
    """Words between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{cells}</table></div>'

"""A report as one self-contained HTML page: no network, a light and a dark theme."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from stablenum._support.outside_text import in_html
from stablenum.diagnosis.report.sections import Sections

__all__ = ["as_html", "framed", "listed", "page", "preformatted", "sealed_head"]

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #60646c; --line: #d9dce1;
  --box: #f5f6f8; --bad: #c0272d; --good: #18794e; --mark: #fdeceb; --link: #0b63b5; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e8eb; --soft: #9ba1a8;
  --line: #33373d; --box: #1f2227; --bad: #ff8a80; --good: #5fd39a; --mark: #3a2224; --link: #7cb8f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: .8rem; letter-spacing: .06em; text-transform: uppercase; color: var(--soft);
  margin: 1.9rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
code, pre, td.what, td.within, td.place { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: .88rem; }
pre { margin: .6rem 0; padding: .7rem .9rem; background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
pre.bad { background: var(--mark); border-color: var(--bad); border-left-width: 4px; }
pre .line { color: var(--soft); user-select: none; }
.place { color: var(--link); }
.subtitle, .soft { color: var(--soft); }
.cause { display: inline-block; padding: .05rem .55rem; border: 1px solid var(--bad); border-radius: 1rem;
  color: var(--bad); font-size: .9rem; font-weight: 600; margin-right: .5rem; }
.ok { color: var(--good); border-color: var(--good); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
td, th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
tr.bad td.counts { color: var(--bad); font-weight: 600; }
ul { margin: .4rem 0; padding-left: 1.2rem; }
footer { margin-top: 2.5rem; padding-top: .7rem; border-top: 1px solid var(--line); color: var(--soft);
  font-size: .85rem; }
"""


def as_html(s: Sections, *, ok: bool, framework: str, seconds: float | None) -> str:
    """Return the whole page; everything that comes from the user's code is escaped."""
    title = "Nothing wrong" if ok else s.title or f"Cause: {s.cause}"
    body = [_head(s, ok=ok), *([] if ok else [_values(s), _cause(s), _remedy(s), _frames(s)])]
    body += [listed("Later", s.others), listed("Notes", s.notes), _foot(framework, seconds)]
    return page(title, body)


def sealed_head(script: str, style: str) -> str:
    """Return styles, and a policy that lets the page load nothing and run only its own script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<style>{style}</style>"
    )


def page(title: str, body: Sequence[str], *, head: str = "") -> str:
    """Return a page with this title and these parts, which are already escaped, and more for its head."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{in_html(title)}</title>",
            f"<style>{STYLE}</style>{head}</head><body>",
            *(part for part in body if part),
            "</body></html>\n",
        ]
    )


def _head(s: Sections, *, ok: bool) -> str:
    if ok:
        return (
            f'<h1>Nothing wrong</h1><p><span class="cause ok">{in_html(s.cause)}</span>{in_html(s.what)}</p>'
        )
    if not s.title:
        return f"<h1>{in_html(s.what)}</h1>"
    title = s.title.removeprefix(f"{s.place}: ") if s.place else s.title
    subtitle = " &middot; ".join(f"{in_html(k)} <code>{in_html(v)}</code>" for k, v in s.details)
    parts = [f"<h1>{in_html(title)}</h1>"]
    if s.place is not None:
        inside = f" in <code>{in_html(s.place.function)}</code>" if s.place.function else ""
        parts.append(f'<p><code class="place">{in_html(str(s.place))}</code>{inside}</p>')
        if s.source:
            lines = [_line(n, text, here=n == s.place.line) for n, text in s.source]
            parts.append(f'<pre class="bad">{"".join(lines)}</pre>')
        elif s.place.code:
            line = f'<span class="line">{s.place.line}  </span>'
            parts.append(f'<pre class="bad">{line}{in_html(s.place.code)}</pre>')
    return "\n".join([*parts, f'<p class="subtitle">{subtitle}</p>' if subtitle else ""])


def _line(number: int, text: str, *, here: bool) -> str:
    shown = f"<strong>{in_html(text)}</strong>" if here else in_html(text)
    return f'<span class="line">{number}  </span>{shown}\n'


def _values(s: Sections) -> str:
    if not s.rows:
        return ""
    rows = []
    for row in s.rows:
        bad = ' class="bad"' if "NaN" in row.counts or "inf" in row.counts else ""
        cells = {"which": row.which, "what": row.what, "within": row.within, "counts": row.counts}
        rows.append(
            f"<tr{bad}>" + "".join(f'<td class="{k}">{in_html(v)}</td>' for k, v in cells.items()) + "</tr>"
        )
    head = "<tr><th></th><th>tensor</th><th>finite elements</th><th>contains</th></tr>"
    return "\n".join(['<h2>Values</h2><div class="scroll"><table>', head, *rows, "</table></div>"])


def _cause(s: Sections) -> str:
    cause = f'<p><span class="cause">{in_html(s.cause)}</span>{in_html(s.what)}</p>'
    return f"<h2>Cause</h2>\n{cause}\n{_items(s.facts)}"


def _remedy(s: Sections) -> str:
    code = f"<pre>{in_html(chr(10).join(s.code))}</pre>" if s.code else ""
    tried = f'<p class="soft">{in_html(s.tried)}</p>' if s.tried else ""
    return f"<h2>Remedy</h2>\n<p>{in_html(s.remedy)}</p>\n{code}{tried}"


def _frames(s: Sections) -> str:
    if not s.frames:
        return ""
    rows = [
        f'<tr><td class="place">{in_html(str(f))}</td><td class="soft">{in_html(f.function)}</td>'
        f"<td><code>{in_html(f.code)}</code></td></tr>"
        for f in s.frames
    ]
    return "\n".join(['<h2>Called from</h2><div class="scroll"><table>', *rows, "</table></div>"])


def listed(title: str, texts: tuple[str, ...]) -> str:
    """Return a heading and a list of texts, which are escaped; nothing if there are none."""
    return f"<h2>{title}</h2>\n{_items(texts)}" if texts else ""


def _items(texts: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{in_html(text)}</li>' for text in texts)}</ul>" if texts else ""


def _foot(framework: str, seconds: float | None) -> str:
    took = f", in {seconds:.1f} s" if seconds is not None else ""
    return f"<footer>stablenum, replayed in {in_html(framework)}{took}.</footer>"


def framed(page: str) -> str:
    """Return a page in an iframe for notebooks, so that its style does not affect them.

    The frame is as high as the page; where no script may run, it can be dragged to that height.
    """
    style = "width: 100%; height: 48rem; border: 0; resize: vertical; overflow: auto"
    shown = page  # texts from outside in it are escaped already
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        shown = shown.replace(character, f"&{name};")
    fit = "this.style.height = this.contentDocument.documentElement.scrollHeight + 8 + 'px'"
    return f'<iframe srcdoc="{shown}" style="{style}" onload="{fit}"></iframe>'


def preformatted(text: str) -> str:
    """Return a text for notebooks, as it is."""
    return f'<pre style="white-space: pre-wrap">{in_html(text)}</pre>'

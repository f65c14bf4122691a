"""A profile as one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

from html import escape

from frostline.report.figures import digits, number, percent, plain
from frostline.report.picture import KINDS, ink, strip, time_bar
from frostline.report.section import Section, titled
from frostline.report.sections import sections
from frostline.report.style import STYLE
from frostline.report.summary import cost, headline, setting
from frostline.report.timeline import draw
from frostline.report.times import parts, reconciliation, warning
from frostline.results import Profile

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser's own guard: whatever a name may smuggle in, nothing is loaded and nothing runs."""


def page(profile: Profile) -> str:
    """The whole page.

    >>> from frostline.results import Machine, Steps, Verdict
    >>> made = Profile(
    ...     "python <train>.py", "SGD.step", Steps(60.8, 60.1, 61.5, 50), None, (),
    ...     Verdict("unclear", "Too few steps."), Machine("cpu", 2, "2.11", "3.12"),
    ... )
    >>> found = page(made)
    >>> found[:15], "python &lt;train&gt;.py" in found, "<script" in found
    ('<!doctype html>', True, False)
    """
    title = f"{profile.verdict.kind}: {profile.command}"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_said(title)}</title><style>{STYLE}</style>",
    ]
    body = [_verdict(profile), _times(profile), _timeline(profile), _strip(profile)]
    body += [_section(section) for section in sections(profile)]
    body.append(_foot(profile))
    inside = "\n".join(filter(None, body))
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head><body>\n{inside}\n</body></html>\n'


def _said(text: object) -> str:
    return escape(plain(text))


def _verdict(profile: Profile) -> str:
    found = profile.verdict
    evidence = "".join(f"<li>{_said(each)}</li>" for each in found.evidence)
    tiles = "".join(
        f"<div><dt>{_said(label)}</dt><dd>{_said(figure)}</dd></div>" for label, figure in headline(profile)
    )
    mood = {"compute-bound": "good", "unclear": "open"}.get(found.kind, "bad")
    return (
        f'<header class="{mood}"><h1>{_said(found.kind)}</h1><p class="verdict">{_said(found.text)}</p>'
        + (f"<ul>{evidence}</ul>" if evidence else "")
        + f'</header><dl class="tiles">{tiles}</dl>'
        + f'<p class="faint">{_said(setting(profile))}<br><code>{_said(profile.command)}</code></p>'
    )


def _times(profile: Profile) -> str:
    found = parts(profile)
    if not found:
        return ""
    places = digits(max(abs(part.row.ms) for part in found))
    rows = "".join(
        f'<tr><td><i class="{"hatched" if part.overlap else ink(part.row.kind)}"></i>'
        f"{_said(part.row.name)}</td>"
        f'<td class="right">{number(part.row.ms, places)}</td>'
        f'<td class="right">{"–" if part.share is None else percent(part.share)}</td>'
        f"<td>{_said(part.note)}</td></tr>"
        for part in found
    )
    head = '<tr><th></th><th class="right">ms</th><th class="right">share</th><th></th></tr>'
    alarm = f'<p class="alarm"><b>Warning.</b> {_said(warning(profile))}</p>' if warning(profile) else ""
    return (
        f"<section><h2>Where the step goes</h2>{time_bar(profile)}"
        f'<div class="scroll"><table class="legend">{head}{rows}</table></div>'
        f"<p>The {_said(reconciliation(profile))}.</p>{alarm}</section>"
    )


def _timeline(profile: Profile) -> str:
    """Magnified by radio buttons and style alone: the picture's lengths are percentages."""
    drawn = draw(profile.timeline)
    if not drawn:
        return ""
    zoom = "".join(
        f'<input type="radio" name="zoom" id="zoom{n}"{" checked" if n == 1 else ""}>'
        f'<label for="zoom{n}">{n}×</label>'
        for n in (1, 3, 10)
    )
    shown = {span.kind for span in profile.timeline}
    keys = [kind for kind in KINDS if kind in shown] + (["other"] if shown - {*KINDS} else [])
    legend = "".join(f'<span><i class="{ink(kind)}"></i>{kind}</span>' for kind in dict.fromkeys(keys))
    steps = len({span.step for span in profile.timeline})
    what = "One step" if steps == 1 else f"{steps} steps"
    return (
        f'<section><h2>{what} over time</h2><div class="zoom"><span class="faint">magnify</span>{zoom}'
        f'<div class="scroll"><div class="canvas">{drawn}</div></div></div>'
        f'<p class="keys faint">{legend}</p></section>'
    )


def _strip(profile: Profile) -> str:
    drawn = strip(profile.wall)
    if not drawn:
        return ""
    said = "A dot is a step of pass A; the line is their mean, the band its 95 % interval."
    return f'<section><h2>How steady the steps are</h2>{drawn}<p class="faint">{said}</p></section>'


def _section(section: Section) -> str:
    table = _table(section) if section.columns else _list(section)
    more = f'<p class="faint">{_said(section.more)}</p>' if section.more else ""
    return f'<section><h2>{_said(section.title)}</h2><div class="scroll">{table}</div>{more}</section>'


def _table(section: Section) -> str:
    used = [k for k in range(len(section.columns)) if any(row[k] for row in section.rows)]
    side = [' class="right"' if name in section.right else "" for name in section.columns]
    head = "".join(f"<th{side[k]}>{_said(section.columns[k])}</th>" for k in used)
    rows = "".join(
        "<tr>" + "".join(f"<td{side[k]}>{_said(row[k])}</td>" for k in used) + "</tr>" for row in section.rows
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _list(section: Section) -> str:
    items = "".join(
        f'<li><b class="lead">{_said(lead)}</b>'
        f"<div><b>{_said(titled(title, text))}</b> {_said(text)}</div></li>"
        for lead, title, text in section.rows
    )
    return f'<ul class="list">{items}</ul>'


def _foot(profile: Profile) -> str:
    notes = "".join(f"<li>{_said(note)}</li>" for note in profile.notes)
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return (
        f"<section><h2>Notes</h2><ul>{notes}</ul></section>" if notes else ""
    ) + f'<p class="faint">{_said(cost(profile))} {_said(versions)}</p>'

"""The page's style sheet: light and dark, from a telephone's width to a desk's."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --faint: #63636d; --line: #d9d9df; --ground: #fff;
  --soft: #f3f4f7; --good: #2c7a4b; --bad: #b3401f; --open: #8a6d1d; --total: #9aa0ac;
  --dot: #2f6fb2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ec; --faint: #a6a6b0; --line: #3a3a42; --ground: #121216; --soft: #1d1d23;
    --good: #6cc492; --bad: #f08a63; --open: #dcb95a; --total: #5d6370; --dot: #7cc0ff } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1100px; margin: 0 auto; padding: 24px; overflow-wrap: anywhere }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 4px } h2 { font-size: 18px; margin: 34px 0 8px }
header { border-left: 5px solid; padding-left: 16px } header ul { margin: 8px 0 0; padding-left: 20px }
header.good { border-color: var(--good) } header.good h1 { color: var(--good) }
header.bad { border-color: var(--bad) } header.bad h1 { color: var(--bad) }
header.open { border-color: var(--open) } header.open h1 { color: var(--open) }
.verdict { font-size: 18px; margin: 0 } .faint { color: var(--faint); font-size: 14px }
.alarm { border: 1px solid var(--bad); border-left-width: 5px; padding: 8px 14px }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 20px 0 8px }
.tiles div { background: var(--soft); border-radius: 6px; padding: 8px 14px }
dt { color: var(--faint); font-size: 13px } dd { margin: 0; font-size: 17px; font-weight: 600 }
.scroll { overflow-x: auto } code { font-size: 13px }
table { border-collapse: collapse; font-size: 15px;
  font-variant-numeric: tabular-nums; overflow-wrap: normal }
th { font-weight: 500; font-size: 13px; color: var(--faint); text-align: left; white-space: nowrap }
th, td { padding: 3px 18px 3px 0; vertical-align: top; border-bottom: 1px solid var(--line) }
td:first-child { overflow-wrap: anywhere; min-width: 150px } .right { text-align: right; white-space: nowrap }
ul.list { list-style: none; margin: 0; padding: 0 }
ul.list li { display: flex; gap: 16px; padding: 4px 0; border-bottom: 1px solid var(--line) }
.lead { flex: 0 0 124px; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 7px }
.keys span { margin-right: 16px; white-space: nowrap }
svg { display: block } svg.bar, svg.strip, svg.timeline { width: 100% }
svg text { font: 13px system-ui, sans-serif; fill: var(--faint) }
svg text.on { font-size: 12px; fill: #fff } svg svg rect { stroke: var(--ground); stroke-width: .8 }
.total { fill: var(--total) } .band { fill: var(--total); opacity: .35 } rect.hatched { fill: url(#hatch) }
.whisker { stroke: var(--ink); stroke-width: 3 }
.merged { opacity: .6 } .mean { stroke: var(--ink) } .grid { stroke: var(--line) }
circle { fill: var(--dot); opacity: .8 }
.zoom label { margin: 0 12px 0 4px } .zoom input { margin-left: 10px }
.canvas { min-width: 860px } #zoom3:checked ~ .scroll .canvas { width: 300% }
#zoom10:checked ~ .scroll .canvas { width: 1000% }
@media (max-width: 560px) { body { padding: 14px } h1 { font-size: 25px } ul.list li { display: block }
  .lead { margin-right: 8px } .lead:empty { display: none }
  td:last-child { min-width: 130px } ul.list div { display: inline } }
"""

_INKS = {
    "data": "#c2571a", "prepare": "#a03a9a", "decode": "#9a6b00", "copy": "#8a5fb5", "forward": "#2f6fb2",
    "backward": "#1f4f86", "optimizer": "#2e7d5b", "zero_grad": "#5a8f3c", "clip": "#3f8f8f",
    "sync": "#b5304e", "save": "#7a5a48", "other": "#6d717c",
}  # fmt: skip
"""White letters stand on each of them, in light and in dark."""

STYLE += "".join(f".k-{kind} {{ fill: {ink}; background: {ink} }}\n" for kind, ink in _INKS.items())

_STRIPES = "repeating-linear-gradient(45deg, var(--total) 0 2px, transparent 2px 5px)"
STYLE += f"i.hatched {{ background: {_STRIPES} }}\n"

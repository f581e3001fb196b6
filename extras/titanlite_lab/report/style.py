"""CSS and JavaScript of the report page."""

from __future__ import annotations

STYLE = """
:root { --ink: #1d2733; --faint: #6b7785; --line: #e6e9ed; --paper: #ffffff; --card: #f7f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e9ee; --faint: #98a3af; --line: #323a44; --paper: #14181d; --card: #1c2229 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
main { max-width: 68rem; margin: auto; padding: 1rem }
h1 { font-size: 1.4rem; margin: .2rem 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
h3 { font-size: .95rem; margin: .8rem 0 .2rem; color: var(--faint); font-weight: 600 }
p, figcaption small { color: var(--faint); font-size: .85rem; margin: .3rem 0 }
figure { margin: 1.4rem 0; min-width: 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  column-gap: 1.5rem }
.charts figure:first-child { grid-column: 1 / -1 }
.charts figure:first-child .plot { height: 20rem }
figcaption { font-weight: 600 }
.plot { position: relative; height: 15rem; margin: .3rem .6rem 1.6rem 3.4rem; touch-action: pan-y }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible }
.plot i { position: absolute; font-style: normal; font-size: .75rem; color: var(--faint) }
.plot i.y { right: calc(100% + .4rem); transform: translateY(50%) }
.plot i.x { top: calc(100% + .2rem); transform: translateX(-50%) }
.plot .mark { position: absolute; top: 0; bottom: 0; width: .8rem; margin-left: -.4rem; z-index: 1 }
.plot .mark::before { content: ""; position: absolute; left: 50%; top: 0; bottom: 0;
  border-left: 1px dashed; border-color: inherit; opacity: .5 }
.plot .mark::after { content: ""; position: absolute; left: calc(50% - .25rem); top: -.5rem;
  width: 0; border: .28rem solid transparent; border-top-color: inherit }
path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round;
  stroke-linecap: round }
path.faint { stroke-width: 1; opacity: .35 }
path.dashed { stroke-dasharray: 5 3 }
.grid line { stroke: var(--line); vector-effect: non-scaling-stroke }
.legend span { display: inline-block; margin-right: 1rem; font-size: .82rem }
.legend span::before { content: ""; display: inline-block; width: .7rem; height: .7rem;
  border-radius: 2px; margin-right: .35rem; background: var(--c) }
.tip { position: absolute; z-index: 2; top: .2rem; padding: .3rem .5rem; border-radius: 4px;
  background: var(--ink); color: var(--paper); font-size: .78rem; pointer-events: none;
  white-space: nowrap }
.hair { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--faint);
  pointer-events: none }
.bar { display: flex; height: 1.2rem; border-radius: 4px; overflow: hidden; margin: .3rem 0 }
.bar i { display: block; min-width: 1px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
td { overflow-wrap: anywhere; min-width: 3rem }
.advice { list-style: none; padding: 0 }
.advice li { background: var(--card); border-left: 4px solid #c48a00; padding: .5rem .8rem;
  margin: .4rem 0; border-radius: 4px }
.advice li.problem { border-color: #d1495b }
.advice span { color: var(--faint) }
summary { cursor: pointer }
.bars .row { display: flex; gap: .6rem; align-items: center; margin: .15rem 0; font-size: .82rem }
.bars .row > span { flex: 0 0 9.5rem; text-align: right; overflow-wrap: anywhere }
.bars .row > div { flex: 1; min-width: 0 }
.bars i { display: inline-block; height: .7rem; border-radius: 2px }
.bars b { font-weight: normal; color: var(--faint); margin-left: .35rem }
.bars b::after { content: "\\A"; white-space: pre }
.figures td + td, .figures th + th { text-align: right; white-space: nowrap }
.figures td:first-child { overflow-wrap: normal }
.rule { margin: .35rem 0 }
.rule summary span { overflow-wrap: anywhere }
.rule summary small { color: var(--faint) }
.rule summary i { display: block; height: .4rem; min-width: 1px; border-radius: 2px;
  margin-top: .15rem }
.samples { list-style: none; padding: 0; margin: .3rem 0 }
.samples li { background: var(--card); padding: .4rem .6rem; margin: .4rem 0; border-radius: 4px }
.samples pre { margin: .2rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 12rem; overflow-y: auto; font-size: .8rem }
.samples small { color: var(--faint); overflow-wrap: anywhere }
@media (max-width: 30rem) { .bars .row > span { flex-basis: 6rem } }
"""

SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const lines = JSON.parse(plot.dataset.points);
  const tip = document.createElement("div"), hair = document.createElement("div");
  tip.className = "tip"; hair.className = "hair";
  const hide = () => { tip.remove(); hair.remove(); };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const rows = [];
    let place = null, step = null;
    for (const [label, colour, points] of lines) {
      let best = null;
      for (const point of points)
        if (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
      if (best === null) continue;
      if (place === null) { place = best[0]; step = best[1]; }
      rows.push(`${label}: ${best[2]}`);
    }
    if (place === null) return hide();
    tip.textContent = "";
    for (const row of [`step ${step}`, ...rows]) {
      const line = document.createElement("div");
      line.textContent = row;
      tip.append(line);
    }
    hair.style.left = `${100 * place}%`;
    tip.style.left = place < 0.5 ? `calc(${100 * place}% + .6rem)` : "";
    tip.style.right = place < 0.5 ? "" : `calc(${100 * (1 - place)}% + .6rem)`;
    plot.append(hair, tip);
  });
}
"""

"""Draw race.svg, the picture in the README: validation loss over training time, from the logs of two records.
    python records/guide/race.py          writes race.svg beside this file; needs no package
Each line is one seed. Dashed lines are models that count tokens: the entropy of the validation tokens, as the logs have
it, and the Witten-Bell trigram model of record 01, which data/ngram.py computes."""
from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRIGRAM_NATS = 2.806                     # rounded
GROUPS = (                               # class in the picture, label, logs
    ("plain", "pocket", "2026-11-23_10_Pocket"),
    ("tables", "pocket_tables", "2026-11-23_11_PocketTables"))
WIDTH, HEIGHT = 780, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 590, 40, 310
MOST_SECONDS, LEAST_NATS, MOST_NATS = 150, 1.75, 5.25                         # runs begin above, at 7.61

STYLE = """
.paper { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 13px sans-serif }
.grid { stroke: #d8dee4 } .counted { stroke: #59636e; stroke-dasharray: 6 4 }
.plain { stroke: #0969da } .tables { stroke: #bc4c00 } polyline { fill: none; stroke-width: 2 }
circle.plain { fill: #0969da } circle.tables { fill: #bc4c00 } text.plain { fill: #0969da; stroke: none }
text.tables { fill: #bc4c00; stroke: none }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .grid { stroke: #30363d } .counted { stroke: #9198a1 }
.plain { stroke: #58a6ff } .tables { stroke: #f0883e } circle.plain { fill: #58a6ff } circle.tables { fill: #f0883e }
text.plain { fill: #58a6ff } text.tables { fill: #f0883e } }
"""


def validations(log: Path) -> list[tuple[float, float]]:
    """Return (training seconds, nats) of each validation of a run."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["train_time_ms"] / 1000, line["val_loss"]) for line in lines if line["type"] == "val"]


def unigram_nats(log: Path) -> float:
    first = next(line for line in log.read_text().splitlines() if '"val"' in line)
    return json.loads(first)["unigram_nats"]


def across(seconds: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * seconds / MOST_SECONDS, 1)


def down(nats: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * (nats - LEAST_NATS) / (MOST_NATS - LEAST_NATS), 1)


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def axes() -> list[str]:
    drawn = []
    for nats in (2, 2.5, 3, 3.5, 4, 4.5, 5):
        drawn += [line("grid", LEFT, down(nats), RIGHT, down(nats)),
                  text(LEFT - 8, down(nats) + 4, f"{nats:.1f}", anchor="end")]
    for seconds in range(0, MOST_SECONDS + 1, 30):
        drawn += [line("grid", across(seconds), TOP, across(seconds), BOTTOM),
                  text(across(seconds), BOTTOM + 18, seconds, anchor="middle")]
    drawn.append(text(LEFT, 26, "validation loss in nats per token; three seeds each, on two cores of an AMD EPYC"))
    drawn.append(text(RIGHT, BOTTOM + 36, "training time in seconds", anchor="end"))
    return drawn


def draw() -> str:
    """Return the picture."""
    logs = {kind: sorted(HERE.parent.glob(f"{record}/logs/*/log.jsonl")) for kind, _, record in GROUPS}
    drawn = axes()
    for nats, words in ((unigram_nats(logs["plain"][0]), "unigram entropy"), (TRIGRAM_NATS, "trigram model")):
        drawn += [line("counted", LEFT, down(nats), RIGHT, down(nats)),
                  text(RIGHT + 8, down(nats) + 4, f"{words}: {nats:.3f}")]
    for kind, label, _ in GROUPS:
        last = []
        for log in logs[kind]:
            points = validations(log)
            last.append(points[-1][1])
            path = " ".join(f"{across(seconds)},{down(nats)}" for seconds, nats in points)
            drawn.append(f'<polyline class="{kind}" points="{path}" clip-path="url(#frame)"/>')
            drawn += [f'<circle class="{kind}" cx="{across(seconds)}" cy="{down(nats)}" r="3"/>'
                      for seconds, nats in points[1:]]
        mean = sum(last) / len(last)
        drawn.append(text(RIGHT + 8, down(mean) + 4, f"{label}: {mean:.3f}", kind))
    body = "\n".join(drawn)
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'aria-label="Loss over time">\n<style>{STYLE}</style>\n'
            f'<clipPath id="frame">{frame}</clipPath>\n'
            f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="6"/>\n{body}\n</svg>\n')


if __name__ == "__main__":
    (HERE / "race.svg").write_text(draw())
    print(f"{HERE / 'race.svg'}", file=sys.stderr)

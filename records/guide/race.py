"""Draw race.svg, the plot in the README: validation loss over training time, from the logs of two records.

    python records/guide/race.py          writes race.svg next to this file; needs no packages

Each line is one seed. Dashed lines are models that count tokens: the entropy of the validation tokens, read from the
logs, and the Witten-Bell trigram model of record 01, which data/ngram.py computes.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tools import compressed, files      # noqa: E402

TRIGRAM_NATS = 2.806                     # nats per token, rounded
GROUPS = (                               # CSS class, label, record with the logs
    ("plain", "pocket", "2026-11-23_10_Pocket"),
    ("tables", "pocket_tables", "2026-11-23_11_PocketTables"))
WIDTH = 780                              # pixels; LEFT to BOTTOM are the edges of the frame
HEIGHT = 360
LEFT = 56
RIGHT = 590
TOP = 40
BOTTOM = 310
MOST_SECONDS = 150
LEAST_NATS = 1.75
MOST_NATS = 5.25                         # runs start above the frame, at 7.61

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
    """Return (training seconds, nats per token) of each validation of a run."""
    lines = [json.loads(line) for line in compressed.read_bytes(log).splitlines()]
    return [(line["train_time_ms"] / 1000, line["val_loss"]) for line in lines if line["type"] == "val"]

def unigram_nats(log: Path) -> float:
    """Return the entropy of the validation tokens that the first validation of a log states."""
    first = next(line for line in compressed.read_bytes(log).splitlines() if b'"val"' in line)
    return json.loads(first)["unigram_nats"]

def across(seconds: float) -> float:
    """Return the x coordinate of a time."""
    return round(LEFT + (RIGHT - LEFT) * seconds / MOST_SECONDS, 1)

def down(nats: float) -> float:
    """Return the y coordinate of a loss."""
    return round(BOTTOM - (BOTTOM - TOP) * (nats - LEAST_NATS) / (MOST_NATS - LEAST_NATS), 1)

def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an SVG line of a CSS class."""
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'

def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return an SVG text; `kind` is its CSS class."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

def note(words: str, nats: float, kind: str = "") -> str:
    """Return a label to the right of the frame, at the height of a loss."""
    return text(RIGHT + 8, down(nats) + 4, f"{words}: {nats:.3f}", kind)

def axes() -> list[str]:
    """Return the grid lines, their labels and the titles."""
    drawn = []
    for nats in (2, 2.5, 3, 3.5, 4, 4.5, 5):
        y = down(nats)
        drawn.append(line("grid", LEFT, y, RIGHT, y))
        drawn.append(text(LEFT - 8, y + 4, f"{nats:.1f}", anchor="end"))
    for seconds in range(0, MOST_SECONDS + 1, 30):
        x = across(seconds)
        drawn.append(line("grid", x, TOP, x, BOTTOM))
        drawn.append(text(x, BOTTOM + 18, str(seconds), anchor="middle"))
    drawn.append(text(LEFT, 26, "validation loss in nats per token; three seeds each, on two cores of an AMD EPYC"))
    drawn.append(text(RIGHT, BOTTOM + 36, "training time in seconds", anchor="end"))
    return drawn

def curve(kind: str, points: list[tuple[float, float]]) -> list[str]:
    """Return the line of one run, with a dot at each validation but the first."""
    xys = [(across(seconds), down(nats)) for seconds, nats in points]
    path = " ".join(f"{x},{y}" for x, y in xys)
    drawn = [f'<polyline class="{kind}" points="{path}" clip-path="url(#frame)"/>']
    for x, y in xys[1:]:
        drawn.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"/>')
    return drawn

def draw() -> str:
    """Return the SVG file."""
    logs = {}
    for kind, _, record in GROUPS:
        logs[kind] = [run / "log.jsonl" for run in sorted(HERE.parent.glob(f"{record}/logs/*/"))]
    drawn = axes()
    counted = {"unigram entropy": unigram_nats(logs["plain"][0]), "trigram model": TRIGRAM_NATS}
    for words, nats in counted.items():
        y = down(nats)
        drawn.append(line("counted", LEFT, y, RIGHT, y))
        drawn.append(note(words, nats))
    for kind, label, _ in GROUPS:
        runs = [validations(log) for log in logs[kind]]
        for points in runs:
            drawn += curve(kind, points)
        last = [points[-1][1] for points in runs]
        drawn.append(note(label, sum(last) / len(last), kind))

    body = "\n".join(drawn)
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    paper = f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="6"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return f'{head}\n<style>{STYLE}</style>\n<clipPath id="frame">{frame}</clipPath>\n{paper}\n{body}\n</svg>\n'


if __name__ == "__main__":
    files.write_bytes(HERE / "race.svg", draw().encode())
    print(f"{HERE / 'race.svg'}", file=sys.stderr)

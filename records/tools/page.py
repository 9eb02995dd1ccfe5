"""The page of a record, generated from its result.json: the answer and the plot, then tables and all runs, folded.

A page has three parts: the head is generated, the middle is written by hand, and the rest is generated.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools import report
from tools.files import counted
from tools.read import Facts
from tools.report import markdown
from tools.statistics import ALPHA, student_t

HAND_MARK = "<!-- what follows is written by hand -->\n\n"
MARK = "<!-- end of what is written by hand; what follows is made from the logs -->\n\n"
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d+)_(\w{1,60})")         # date, number and name of a record
SOURCE, PAGE, RESULT, PLOT, DIFF = "train_gpt.py", "README.md", "result.json", "loss.svg", "source.diff"
RATIO = "{ratio:#.3g} ({low:#.3g} to {high:#.3g})"            # ratio of times, with its 99 % interval
MOST_COMPARED, MOST_SETTINGS = 5, 12   # rows of a table that is not folded
SHORT_S = 0.5                          # a phase that is always shorter is left out
MOST_CHARACTERS = 40                   # of a setting
PART = "warm-up of "                   # phases of this prefix are contained in "warm-up"

def split(page: str) -> tuple[str, str]:
    """Split a page into what is generated and what is written by hand."""
    above, mark, below = page.partition(MARK)
    head, hand_mark, by_hand = above.partition(HAND_MARK)
    return (head + mark + below, by_hand) if hand_mark else (mark + below, above)

def join(generated: str, by_hand: str) -> str:
    head, mark, below = generated.partition(MARK)
    return f"{head}{HAND_MARK}{by_hand}{mark}{below}"

def generate(result: Facts, sides: dict[str, report.Side], parent: Facts, diff: str) -> str:
    """Generate both parts of a page, without the text between them. parent: result.json of the parent, or {}."""
    rows = compared(result)
    columns = "compared with | time, ratio (99 %) | pairs | loss, difference (99 %) | verdict"
    parts = ["## Numbers", markdown(columns, rows[:MOST_COMPARED])]
    others = markdown(columns, rows[MOST_COMPARED:])
    parts.append(folded(f"The other {len(rows) - MOST_COMPARED} comparisons", others))
    columns = "group | n | loss | sd | s | sd | steps | MiB | off the clock, s: mean (most)"
    parts.append(markdown(columns, [group_row(result, name) for name in result["stated"]["groups"]]))
    rows = [[line["folder"], line["outcome"], line["cause"]] for line in result["unfinished"]]
    parts.append(markdown("started, but not counted | outcome | cause", rows))
    parts += changed_settings(result, parent, diff)
    parts.append(folded("What differs between the groups", group_settings(result, sides)))
    parts.append(folded("Every run", run_table(result)))
    return head(result) + MARK + "\n\n".join(filter(None, parts)) + "\n"

def head(result: Facts) -> str:
    """Return the first part of a page: the answer as its title, the loss, what the record is, and the plot."""
    stated = result["stated"]
    main = result["groups"][stated["main"]]
    n, mean, sd = main["loss"].values()
    whose = f" of {stated['main']}" * bool(stated["main"])
    loss = f"Loss{whose} {mean:.4f} (n = {n}"
    if sd is not None:
        loss += f", sd {sd:.4f}"
    if result["target"] and main["p"]:
        loss += f", below {result['target']:.2f} with p {main['p']:.2g}"
    groups = result["groups"].values()
    if stated["kind"] == "entry":
        groups = [main]                                   # the others are of other records
    num_counted = sum(group["runs"] for group in groups)
    num_started = sum(group["started"] for group in groups)
    what = stated["kind"].capitalize()
    if stated["kind"] == "entry":
        what += f" of track `{stated['track']}`, class {result['class']}"
    if "idea" in stated:
        what += f": {stated['idea']}"
    compared_losses = sum(found["loss"] is not None for found in result["verdicts"].values())
    chosen = f", not corrected for the choice of one of {compared_losses} comparisons" * (compared_losses > 1)
    links = [f"[Source]({SOURCE})", *log_links(result["runs"]), f"[all numbers]({RESULT})"]
    if stated["parent"]:
        links.insert(1, f"[parent](../{stated['parent']}/{PAGE})")
    return (f"# {stated['number']} {stated['name']}: {answer(result)}\n\n"
            f"{loss}); {num_counted} of {num_started} started runs count. "
            f"The title has 99 % intervals{chosen}.\n"
            f"{what}. {result['machine']['hardware']}, {stated['date']}.\n"
            f"{', '.join(links)}.\n\n"
            f"![Validation and training loss over tokens and over time]({PLOT})\n\n")

def log_links(names: Iterable[str]) -> list[str]:
    """Return links to the logs of runs, in the record and in other ones. names: of the runs, as in result.json."""
    known = [FOLDER.match(name) for name in names]
    homes = {record[0]: record[2] for record in known if record}
    elsewhere = [f"[logs in {number}](../{home}/logs)" for home, number in sorted(homes.items())]
    return ["[logs](logs)"] * (None in known) + elsewhere

def folded(title: str, content: str) -> str:
    return content and f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"

def ratio_of(comparison: Facts) -> str | None:
    """Format the ratio of times with its interval; None if the sides were not interleaved."""
    if "ratio" in comparison:
        return RATIO.format_map(comparison)
    share = comparison["share"]
    if share is None:
        return None
    return RATIO.format(ratio=1 + share["mean"], low=1 + share["low"], high=1 + share["high"])

def loss_of(comparison: Facts) -> str | None:
    """Format the difference of losses with its interval; None if a loss is unknown."""
    test = comparison["loss"]
    if test is None:
        return None
    if test["p"] is None:
        return f"{test['mean']:+.4f}"
    return f"{test['mean']:+.4f} ({test['low']:+.4f} to {test['high']:+.4f})"

def answer(result: Facts) -> str:
    """Return what the record shows: ratios to base and parent, a comparison, or the mean loss."""
    stated = result["stated"]
    ratios = result.get("in_turn", {})
    if ratios:
        parts = [ratio_of(ratios["base"]).replace(" (", " of the base's time (", 1)]
        number = ratios["parent"]["record"].split("_")[1]
        if ratios["parent"]["record"] != ratios["base"]["record"]:
            parts.append(ratio_of(ratios["parent"]).replace(" (", f" of {number}'s (", 1))
        return ", ".join(parts)

    base = stated["base"]
    candidates = [(found["verdict"] != "faster", found["loss"]["mean"], name)
                  for name, found in result["verdicts"].items() if found["loss"]]
    if candidates:
        *_, name = min(candidates)
        best = result["verdicts"][name]
        if best["share"] and not best["verdict"].endswith(" loss"):
            return f"{name} takes {ratio_of(best)} of {base}'s time"
        few = f" (lowest loss of {len(candidates)})" * (len(candidates) > 1)
        return f"{name}{few} - {base}: loss {loss_of(best)}"

    group = result["groups"][stated["main"]]
    n, mean, sd = group["loss"].values()
    loss = f"loss {mean:.3f}"
    if n > 1:
        half = student_t(ALPHA / 2, n - 1) * sd / math.sqrt(n)
        loss += f" ({mean - half:.3f} to {mean + half:.3f})"
    return f"{loss} in {group['time']['mean']:.1f} s"

def compared(result: Facts) -> list[list[Any]]:
    """Return a row per comparison: of an entry with its opponents, or of groups with the base group, by loss."""
    rows = []
    for role, ratio in result.get("in_turn", {}).items():
        name = f"{role} [{ratio['record']}](../{ratio['record']}/{PAGE})"
        rows.append([name, ratio_of(ratio), ratio["pairs"], loss_of(ratio), ratio["word"]])
    base = result["stated"]["base"]
    by_loss = sorted(result["verdicts"], key=lambda name: result["groups"][name]["loss"]["mean"] or math.inf)
    for name in by_loss:
        found = result["verdicts"][name]
        rows.append([f"{name} with {base}", ratio_of(found), found["pairs"] or None, loss_of(found), found["verdict"]])
    return rows

def runs_of(result: Facts, name: str) -> list[Facts]:
    return [result["runs"][run] for run in result["stated"]["groups"][name]]

def label(result: Facts, name: str) -> str:
    """Return the name of a group; in a chain that of its record, which has the number of the group."""
    records = [ratio["record"] for ratio in result.get("in_turn", {}).values()]
    names = {"": f"{result['stated']['number']} {result['stated']['name']}"}
    names |= {record.split("_")[1]: " ".join(record.split("_")[1:]) for record in records}
    return names.get(name, name)

def without_parts(untimed_s: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the phases that no other phase contains."""
    return {phase: seconds for phase, seconds in untimed_s.items() if not phase.startswith(PART)}

def group_row(result: Facts, name: str) -> list[Any]:
    """Return the row of a group: losses, times, steps, memory, and the phases that are not timed."""
    group = result["groups"][name]
    runs = runs_of(result, name)
    phases: dict[str, list[float]] = {}
    for run in runs:
        for phase, seconds in without_parts(run["untimed_s"]).items():
            phases.setdefault(phase, []).append(seconds)
    off = [f"{phase} {sum(times) / len(runs):.1f} ({max(times):.1f})" for phase, times in phases.items()
           if max(times) >= SHORT_S]
    steps = [run["steps"] for run in runs]
    ends = dict.fromkeys((min(steps), max(steps)))
    n = group["loss"]["n"]
    if group["started"] != group["runs"]:
        n = f"{n} ({group['runs']} of {group['started']} started)"
    row = [label(result, name), n]
    for key in ("loss", "time"):
        row += [group[key]["mean"], group[key]["sd"]]
    return [*row, " to ".join(map(str, ends)), group["memory"]["mean"], ", ".join(off)]

def run_table(result: Facts) -> str:
    """Return the table of all runs."""
    rows = []
    for name in result["stated"]["groups"]:
        rows += [[label(result, name), run["seed"], f"{run['loss']:.4f}", run["seconds"]]
                 for run in runs_of(result, name)]
    return markdown("group | seed | loss | training s", rows)

def changed_settings(result: Facts, parent: Facts, diff: str) -> Iterator[str]:
    """Yield how many settings and lines of source differ from the parent's, and a table of the settings."""
    if not parent:
        return
    name = f"{parent['stated']['number']} {parent['stated']['name']}"
    rows: list[list[str]] = []
    for key, (old, new) in result["changed"].items():
        if old != new:
            rows += map(clipped, report.rows_of_change(key, old, new))
    lines = f"{counted(changed_lines(diff), 'line')} of source"
    yield f"**Changes from {name}:** {counted(len(rows), 'setting')}, [{lines}]({DIFF})."
    table = markdown(f"setting | {name} | this", rows)
    if len(rows) > MOST_SETTINGS:
        table = folded("Changed settings", table)
    yield table

def changed_lines(diff: str) -> int:
    """Return the number of lines that a diff adds or removes. Its first two lines are names of files."""
    return sum(line[:1] in ("+", "-") for line in diff.splitlines()[2:])

def group_settings(result: Facts, sides: dict[str, report.Side]) -> str:
    """Return a table of what each group of a comparison states differently from the base group; "" for an entry."""
    base = sides.get(result["stated"]["base"])
    rows: list[list[str]] = []
    for name, side in sides.items():
        if base and side is not base:
            rows += [[name, *clipped(row)] for row in report.differing_rows(base, side)]
    return markdown(f"group | what | {result['stated']['base']} | group's", rows)

def clipped(row: Sequence[Any]) -> list[str]:
    """Return the cells of a row as text, cut to MOST_CHARACTERS; a missing value is an empty cell."""
    cells = []
    for value in row:
        cell = report.as_text(value) * (value is not None)
        if len(cell) > MOST_CHARACTERS:
            cell = f"{cell[:MOST_CHARACTERS - 3]}..."
        cells.append(cell)
    return cells

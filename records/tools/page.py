"""The page of a record, generated from its result.json: the answer and the plot, then tables and all runs, folded.

A page has three parts: the head is generated, the middle is written by hand, and the rest is generated.
"""
from __future__ import annotations

import math
import re
from typing import Any

from tools import report
from tools.read import Facts
from tools.report import markdown
from tools.statistics import band

HAND_MARK = "<!-- what follows is written by hand -->\n\n"
MARK = "<!-- end of what is written by hand; what follows is made from the logs -->\n\n"
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d+)_(\w{1,60})")         # date, number and name of a record
SOURCE, PAGE, RESULT, PLOT, DIFF = "train_gpt.py", "README.md", "result.json", "loss.svg", "source.diff"
RATIO = "{ratio:#.3g} ({low:#.3g} to {high:#.3g})"            # ratio of times, with its 99 % interval
MOST_COMPARED = 5                      # rows of a table that is not folded
SHORT_S = 0.5                          # a phase that is always shorter is left out
PART = "warm-up of "                   # phases of this prefix are contained in "warm-up"

def split(page: str) -> tuple[str, str]:
    """Split a page into what is generated and what is written by hand."""
    above, mark, below = page.partition(MARK)
    head, hand_mark, by_hand = above.partition(HAND_MARK)
    return (head + mark + below, by_hand) if hand_mark else (mark + below, above)

def join(generated: str, by_hand: str) -> str:
    head, mark, below = generated.partition(MARK)
    return f"{head}{HAND_MARK}{by_hand}{mark}{below}"

def generate(result: Facts, sides: dict[str, report.Side]) -> str:
    """Generate both parts of a page, without the text between them."""
    stated = result["stated"]
    rows = compared(result)
    columns = "compared with | time, ratio (99 %) | pairs | loss, difference (99 %) | verdict"
    parts = ["## Numbers", markdown(columns, rows[:MOST_COMPARED])]
    parts.append(folded(f"The other {len(rows) - MOST_COMPARED} comparisons", markdown(columns, rows[MOST_COMPARED:])))
    columns = "group | n | loss | sd | s | sd | steps | MiB | off the clock, s: mean (most)"
    parts.append(markdown(columns, [group_row(result, name) for name in stated["groups"]]))
    rows = [[line["folder"], line["outcome"], line["cause"]] for line in result["unfinished"]]
    parts.append(markdown("started, but not counted | outcome | cause", rows))
    base = sides.get(stated["base"])
    rows = [[name, change] for name, side in sides.items() if base for change in report.differing(base, side)]
    parts.append(folded("What differs between the groups", markdown(f"group | {stated['base']} -> group", rows)))
    rows = [[label(result, name), run["seed"], f"{run['loss']:.4f}", run["seconds"]]
            for name in stated["groups"] for run in runs_of(result, name)]
    parts.append(folded("Every run", markdown("group | seed | loss | training s", rows)))
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
    what = stated["kind"].capitalize()
    groups = result["groups"].values()
    if stated["kind"] == "entry":
        what += f" of track `{stated['track']}`, class {result['class']}"
        groups = [main]                                   # the others are of other records
    if "idea" in stated:
        what += f": {stated['idea']}"
    num_counted = sum(group["runs"] for group in groups)
    num_started = sum(group["started"] for group in groups)
    num_compared = sum(found["loss"] is not None for found in result["verdicts"].values())
    chosen = f", not corrected for the choice of one of {num_compared} comparisons" * (num_compared > 1)
    homes = {FOLDER.match(name) for name in result["runs"]} - {None}
    homes = sorted({(home[2], home[0]) for home in homes})
    links = [f"[Source]({SOURCE})"]
    if stated["parent"]:
        links += [f"[parent](../{stated['parent']}/{PAGE})", f"[changes of the source]({DIFF})"]
    links += ["[logs](logs)"] * any(not FOLDER.match(name) for name in result["runs"])
    links += [f"[logs in {number}](../{home}/logs)" for number, home in homes]
    return (f"# {stated['number']} {stated['name']}: {answer(result)}\n\n"
            f"{loss}); {num_counted} of {num_started} started runs count. "
            f"The title has 99 % intervals{chosen}.\n"
            f"{what}. {result['machine']['hardware']}, {stated['date']}.\n"
            f"{', '.join(links)}, [all numbers]({RESULT}).\n\n"
            f"![Validation and training loss over tokens and over time]({PLOT})\n\n")

def folded(title: str, content: str) -> str:
    return content and f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"

def ratio_of(comparison: Facts) -> str | None:
    """Format the ratio of times with its interval; None if the sides were not interleaved."""
    share = comparison["share"]
    if share is None:
        return None
    return RATIO.format(ratio=1 + share["mean"], low=1 + share["low"], high=1 + share["high"])

def loss_of(comparison: Facts) -> str | None:
    """Format the difference of losses with its interval; None if a loss is unknown."""
    test = comparison["loss"]
    if test is None or test["p"] is None:
        return test and f"{test['mean']:+.4f}"
    return f"{test['mean']:+.4f} ({test['low']:+.4f} to {test['high']:+.4f})"

def answer(result: Facts) -> str:
    """Return what the record shows: ratios to base and parent, a comparison, or the mean loss."""
    stated = result["stated"]
    if result.get("in_turn"):
        base, parent = (result["in_turn"][role] for role in ("base", "parent"))
        number = parent["record"].split("_")[1]
        parts = [RATIO.format_map(base).replace(" (", " of the base's time (")]
        if parent["record"] != base["record"]:
            parts.append(RATIO.format_map(parent).replace(" (", f" of {number}'s ("))
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
    loss = f"loss {group['loss']['mean']:.3f}"
    interval = band(group["losses"], runs=math.inf)
    if interval:
        loss += f" ({interval[0]:.3f} to {interval[1]:.3f})"
    return f"{loss} in {group['time']['mean']:.1f} s"

def compared(result: Facts) -> list[list[Any]]:
    """Return a row per comparison: of an entry with its opponents, or of groups with the base group, by loss."""
    rows = []
    for role, ratio in result.get("in_turn", {}).items():
        name = f"{role} [{ratio['record']}](../{ratio['record']}/{PAGE})"
        rows.append([name, RATIO.format_map(ratio), ratio["pairs"], loss_of(ratio), ratio["word"]])
    by_loss = sorted(result["verdicts"], key=lambda name: result["groups"][name]["loss"]["mean"] or math.inf)
    for name in by_loss:
        found = result["verdicts"][name]
        rows.append([f"{name} with {result['stated']['base']}", ratio_of(found), found["pairs"] or None, loss_of(found),
                     found["verdict"]])
    return rows

def runs_of(result: Facts, name: str) -> list[Facts]:
    return [result["runs"][run] for run in result["stated"]["groups"][name]]

def label(result: Facts, name: str) -> str:
    """Return the name of a group; in a chain that of its record, which has the number of the group."""
    records = [ratio["record"] for ratio in result.get("in_turn", {}).values()]
    names = {record.split("_")[1]: " ".join(record.split("_")[1:]) for record in records}
    return names.get(name, name or f"{result['stated']['number']} {result['stated']['name']}")

def group_row(result: Facts, name: str) -> list[Any]:
    """Return the row of a group: losses, times, steps, memory, and the phases that are not timed."""
    group = result["groups"][name]
    runs = runs_of(result, name)
    off = []
    for phase in dict.fromkeys(phase for run in runs for phase in run["untimed_s"] if not phase.startswith(PART)):
        times = [run["untimed_s"].get(phase, 0.0) for run in runs]
        if max(times) >= SHORT_S:
            off.append(f"{phase} {sum(times) / len(runs):.1f} ({max(times):.1f})")
    steps = [run["steps"] for run in runs]
    ends = dict.fromkeys((min(steps), max(steps)))
    n = group["loss"]["n"]
    if group["started"] != group["runs"]:
        n = f"{n} ({group['runs']} of {group['started']} started)"
    return [label(result, name), n, *list(group["loss"].values())[1:], *list(group["time"].values())[1:],
            " to ".join(map(str, ends)), group["memory"]["mean"], ", ".join(off)]

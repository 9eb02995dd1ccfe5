"""The page of a record, generated from its result.json: the answer and the plot, then tables and all runs, folded.

A page has three parts: the head is generated, the middle is written by hand, and the rest is generated.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tools import report
from tools.read import Facts
from tools.report import markdown
from tools.statistics import ALPHA, student_t

HAND_MARK = "<!-- what follows is written by hand -->\n\n"
MARK = "<!-- end of what is written by hand; what follows is made from the logs -->\n\n"
SOURCE, PAGE, RESULT, PLOT, DIFF = "train_gpt.py", "README.md", "result.json", "loss.svg", "source.diff"
RATIO = "{ratio:#.3g} ({low:#.3g} to {high:#.3g})"            # ratio of times, with its 99 % interval
MOST_COMPARED, MOST_SETTINGS = 5, 12   # rows of a table that is not folded
MOST_ACROSS = 4                        # groups that are columns of the table of runs; more groups are its rows
SHORT_S = 0.5                          # a phase that is always shorter is left out
PART = "warm-up of "                   # phases of this prefix are contained in "warm-up"

def split(page: str) -> tuple[str, str]:
    """Split a page into what is generated and what is written by hand.

    Without the first mark, all text above the second one counts as written by hand.
    """
    above, mark, below = page.partition(MARK)
    head, hand_mark, by_hand = above.partition(HAND_MARK)
    return (head + mark + below, by_hand) if hand_mark else (mark + below, above)

def join(generated: str, by_hand: str) -> str:
    """Put the text that is written by hand between both generated parts."""
    head, mark, below = generated.partition(MARK)
    return f"{head}{HAND_MARK}{by_hand}{mark}{below}"

def generate(result: Facts, sides: dict[str, report.Side], parent: Facts, diff: str) -> str:
    """Generate both parts of a page, without the text between them.

    parent: result.json of the parent, or {}. diff: the difference of the sources, "" without a parent.
    """
    stated = result["stated"]
    main = result["groups"][stated["main"]]
    what = stated["kind"].capitalize()
    if stated["kind"] == "entry":
        what += f" of track `{stated['track']}`, class {result['class']}"
    what += f": {stated['idea']}" if "idea" in stated else ""
    loss = main["loss"]
    started = main["started"], main["time"]["n"]
    if stated["kind"] != "entry":
        started = sum(group["started"] for group in result["groups"].values()), len(result["runs"])
    proven = f", below {result['target']:.2f} with p {main['p']:.2g}" if result["target"] and main["p"] else ""
    named = f" of {stated['main']}" if stated["main"] else ""
    links = [f"[Source]({SOURCE})", "[logs](logs)", f"[all numbers]({RESULT})"]
    if stated["parent"]:
        links.insert(1, f"[parent](../{stated['parent']}/{PAGE})")
    head = [f"# {stated['number']} {stated['name']}: {answer(result)}",
            f"Loss{named} {loss['mean']:.4f} (sd {loss['sd'] or math.nan:.4f}, n = {loss['n']}{proven}); "
            f"{started[1]} of {started[0]} started runs count. The title has 99 % intervals.\n"
            f"{what}. {result['machine']['hardware']}, {stated['date']}.\n{', '.join(links)}.",
            f"![Validation and training loss over training time]({PLOT})"]
    rows = compared(result)
    columns = "compared with | time, ratio (99 %) | pairs | loss, difference (99 %) | verdict"
    tables = ["## Numbers", markdown(columns, rows[:MOST_COMPARED])]
    others = markdown(columns, rows[MOST_COMPARED:])
    tables.append(folded(f"The other {len(rows) - MOST_COMPARED} comparisons", others))
    columns = "group | n | loss | sd | s | sd | steps | MiB | off the clock, s: mean (most)"
    tables.append(markdown(columns, [group_row(result, name) for name in stated["groups"]]))
    tables += settings(result, sides, parent, diff)
    what = "Every run: loss, training s" + " (a pair has one seed)" * (len(sides) > 1)
    tables.append(folded(what, run_table(result)))
    tables.append(folded("Facts from the logs", markdown("fact | value", [*facts(result)])))
    rows = [[line["folder"], line["outcome"], line["cause"]] for line in result["unfinished"]]
    tables.append(folded("Runs that did not finish", markdown("run | outcome | cause", rows)))
    return "\n\n".join(head) + "\n\n" + MARK + "\n\n".join(filter(None, tables)) + "\n"

def folded(title: str, content: str) -> str:
    """Fold a table; "" for none."""
    return content and f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"

def ratio_of(comparison: Facts) -> str | None:
    """Format the ratio of times with its interval; None if the sides were not interleaved."""
    if "ratio" in comparison:
        return RATIO.format_map(comparison)
    share = comparison["share"]
    if not share:
        return None
    return RATIO.format(ratio=1 + share["mean"], low=1 + share["low"], high=1 + share["high"])

def loss_of(comparison: Facts) -> str | None:
    """Format the difference of losses with its interval."""
    test = comparison["loss"]
    if not test or test["p"] is None:
        return test and f"{test['mean']:+.4f}"
    return f"{test['mean']:+.4f} ({test['low']:+.4f} to {test['high']:+.4f})"

def answer(result: Facts) -> str:
    """Return what the record shows: ratios to base and parent, a comparison, or the mean loss."""
    ratios = result.get("in_turn", {})
    parts = []
    for role in ("base", "parent"):
        if role in ratios and (role == "base" or ratios[role]["record"] != ratios["base"]["record"]):
            whose = "the base's time" if role == "base" else f"{ratios[role]['record'].split('_')[1]}'s"
            parts.append(ratio_of(ratios[role]).replace(" (", f" of {whose} (", 1))
    if parts:
        return ", ".join(parts)
    stated = result["stated"]
    others = [(name, stated["base"], found) for name, found in result["verdicts"].items() if found["loss"]]
    others += [(f"B of {name}", "A", found) for name, found in other_benches(result).items()]
    if others:
        name, base, best = min(others, key=lambda item: (item[2]["verdict"] != "faster", item[2]["loss"]["mean"]))
        if best["share"] and not best["verdict"].endswith(" loss"):
            return f"{name} takes {ratio_of(best)} of {base}'s time"
        few = f" (lowest loss of {len(others)})" * (len(others) > 1)
        return f"{name}{few} less {base}: loss {loss_of(best)}"
    group = result["groups"][stated["main"]]
    n, mean, sd = group["loss"].values()
    half = student_t(ALPHA / 2, n - 1) * sd / math.sqrt(n) if n > 1 else math.nan
    return f"loss {mean:.3f} ({mean - half:.3f} to {mean + half:.3f}) in {group['time']['mean']:.1f} s"

def other_benches(result: Facts) -> Facts:
    """Return the benches of an earlier form of records that have other numbers than the comparisons of the groups."""
    known = [found["share"] for found in result["verdicts"].values()]
    return {name: found for name, found in result["bench"].items() if found["share"] not in known}

def compared(result: Facts) -> list[list[Any]]:
    """Return a row per comparison: of an entry of a chain with its opponents, or of groups with the base group."""
    rows = []
    for role, ratio in result.get("in_turn", {}).items():
        name = f"{role} [{ratio['record']}](../{ratio['record']}/{PAGE})"
        rows.append([name, ratio_of(ratio), ratio["pairs"], loss_of(ratio), ratio["word"]])
    verdicts = sorted(result["verdicts"].items(), key=lambda item: (item[1]["loss"] or {"mean": math.inf})["mean"])
    benches = [(f"[{name}]({name})", found) for name, found in other_benches(result).items()]
    for name, found in [*verdicts, *benches]:
        rows.append([f"{name} with {result['stated']['base']}" if name in result["groups"] else name,
                     ratio_of(found), found["pairs"] or None, loss_of(found), found["verdict"]])
    return rows

def runs_of(result: Facts, name: str) -> list[Facts]:
    """Return the results of the runs of a group."""
    return [result["runs"][run] for run in result["stated"]["groups"][name]]

def label(result: Facts, name: str) -> str:
    """Return the name of a group; in a chain that of its record, which has the number of the group."""
    records = [ratio["record"] for ratio in result.get("in_turn", {}).values()]
    names = {"": f"{result['stated']['number']} {result['stated']['name']}"}
    names |= {record.split("_")[1]: " ".join(record.split("_")[1:]) for record in records}
    return names.get(name, name)

def untimed(run: Facts) -> dict[str, float]:
    """Return the seconds of the phases of a run that are not timed, without those that another one contains."""
    return {phase: seconds for phase, seconds in run["untimed_s"].items() if not phase.startswith(PART)}

def group_row(result: Facts, name: str) -> list[Any]:
    """Return the row of a group: losses, times, memory, and the phases that are not timed."""
    group = result["groups"][name]
    runs = runs_of(result, name)
    phases: dict[str, list[float]] = {}
    for run in runs:
        for phase, seconds in untimed(run).items():
            phases.setdefault(phase, []).append(seconds)
    off = [f"{phase} {sum(times) / len(runs):.1f} ({max(times):.1f})" for phase, times in phases.items()
           if max(times) >= SHORT_S]
    steps = sorted({run["steps"] for run in runs})
    return [label(result, name), group["loss"]["n"], group["loss"]["mean"], group["loss"]["sd"], group["time"]["mean"],
            group["time"]["sd"], " to ".join(map(str, dict.fromkeys([steps[0], steps[-1]]))),
            group["memory"]["mean"], ", ".join(off)]

def run_table(result: Facts) -> str:
    """Return the table of all runs: a row per seed and a column per group, or the other way round for many groups."""
    cells: dict[tuple[str, str], str] = {}
    seeds: dict[str, None] = {}                           # an ordered set
    groups = list(result["stated"]["groups"])
    for name in groups:
        for run in runs_of(result, name):
            seed = str(run["seed"])
            while (seed, name) in cells:
                seed += " again"
            seeds[seed] = None
            seconds = "no time" if run["seconds"] is None else f"{run['seconds']:.5g}"
            cells[seed, name] = f"{run['loss']:.4f}, {seconds}"
    if len(groups) <= MOST_ACROSS:
        head = " | ".join(["seed", *(label(result, name) for name in groups)])
        return markdown(head, [[seed, *(cells.get((seed, name), "") for name in groups)] for seed in seeds])
    head = " | ".join(["group", *(f"seed {seed}" for seed in seeds)])
    return markdown(head, [[label(result, name), *(cells.get((seed, name), "") for seed in seeds)] for name in groups])

def settings(result: Facts, sides: dict[str, report.Side], parent: Facts, diff: str) -> Iterator[str]:
    """Yield which settings differ from the parent's, and those of each group of a comparison from the base group's."""
    if parent:
        stated = parent["stated"]
        number = f"{stated['number']} {stated['name']}"
        changes = [(key, *pair) for key, pair in result["changed"].items() if pair[0] != pair[1]]
        rows = [row for change in changes for row in report.rows_of_change(*change)]
        yield f"**Changes from {number}:** {len(rows)} settings, [{changed_lines(diff)} lines of source]({DIFF})."
        words = markdown(f"setting | {number} | this", [clipped(row) for row in rows])
        yield words if len(rows) <= MOST_SETTINGS else folded("Changed settings", words)
    rows = []
    base = sides.get(result["stated"]["base"])
    for name, side in sides.items():
        if base and side is not base:
            rows += [[name, *clipped(row)] for row in report.differing_rows(base, side)]
    base_name = result["stated"]["base"]
    yield folded("What differs between the groups", markdown(f"group | what | {base_name} | group's", rows))

def changed_lines(diff: str) -> int:
    """Return the number of lines that a diff adds or removes. Its first two lines are names of files."""
    return sum(line[:1] in ("+", "-") for line in diff.splitlines()[2:])

def clipped(row: Sequence[Any]) -> list[str]:
    """Return the cells of a row as text, none longer than 40 characters; a missing value is an empty cell."""
    cells = ["" if cell is None else report.as_text(cell) for cell in row]
    return [cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in cells]

def facts(result: Facts) -> Iterator[list[str]]:
    """Yield the facts of a record, one in a row, with marks on those that are stated but not logged."""
    stated = result["stated"]["entry"]
    runs = runs_of(result, result["stated"]["main"])
    mean = {"bits_per_byte": None, "of_unigram_entropy": None}
    for key in mean:
        values = [run[key] for run in runs if run[key] is not None]
        mean[key] = sum(values) / len(values) if values else None
    mean = {key: value and round(value, 4) for key, value in mean.items()}
    for key, fact in (result["entry"] | stated | result["machine"] | mean).items():
        for inner, value in fact.items() if isinstance(fact, dict) else [("", fact)]:
            if value is not None:
                shown = f"{value:,}" if isinstance(value, int) else str(value)
                yield [f"{key}, {inner}" if inner else key, shown + " (stated, not logged)" * (key in stated)]

"""The page of a record, generated from its result.json: the answer and the plot, then tables and all runs, folded.

A page has three parts: the head is generated, the middle is written by hand, and the rest is generated.
"""
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
RATIO = "{:#.3g} ({:#.3g} to {:#.3g})"                        # ratio of times, with its 99 % interval
SHORT_S = 0.5                          # a phase that is always shorter is left out
PART = "warm-up of "                   # phases of this prefix are contained in "warm-up"

def split(page: str) -> tuple[str, str]:
    above, mark, below = page.partition(MARK)
    head, hand_mark, by_hand = above.partition(HAND_MARK)
    return (head + mark + below, by_hand) if hand_mark else (mark + below, above)

def join(generated: str, by_hand: str) -> str:
    head, mark, below = generated.partition(MARK)
    return f"{head}{HAND_MARK}{by_hand}{mark}{below}"

def generate(result: Facts, sides: dict[str, report.Side]) -> str:
    stated = result["stated"]
    columns = "compared with | time, ratio (99 %) | pairs | loss, difference (99 %) | verdict"
    parts = ["## Numbers", markdown(columns, compared(result))]
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
    stated = result["stated"]
    main = result["groups"][stated["main"]]
    n, mean, sd = main["loss"].values()
    whose = f" of {stated['main']}" * bool(stated["main"])
    spread = "" if sd is None else f", sd {sd:.4f}"
    proof = f", below {result['target']:.2f} with p {main['p']:.2g}" if result["target"] and main["p"] else ""
    what = stated["kind"].capitalize()
    groups = result["groups"].values()
    if stated["kind"] == "entry":
        what += f" of track `{stated['track']}`, class {result['class']}"
        groups = [main]                                   # the others are of other records
    elif all(result["machine"].get(name) for name in ("preset", "tokens", "val_tokens")):
        what += " on preset `{preset}`, {tokens:,} training and {val_tokens:,} validation tokens".format(
            **result["machine"])
    if stated.get("idea"):
        what += f": {stated['idea']}"
    counts = [sum(group[key] for group in groups) for key in ("runs", "started")]
    num_compared = sum(found["loss"] is not None for found in result["verdicts"].values() if "record" not in found)
    chosen = f", not corrected for the choice of one of {num_compared} comparisons" * (num_compared > 1)
    links = [f"[Source]({SOURCE})"]
    if stated["parent"]:
        links += [f"[parent](../{stated['parent']}/{PAGE})", f"[changes of the source]({DIFF})"]
    diffs = [name for name in result["files"] if name.startswith("sources/")]
    if stated["kind"] == "comparison" and len(diffs) == 1:
        links.append(f"[changes of the other group]({diffs[0]})")
    homes = {FOLDER.match(name) for name in result["runs"]}
    links += ["[logs](logs)"] * (None in homes)
    links += sorted({f"[logs in {home[2]}](../{home[0]}/logs)" for home in homes - {None}})
    return (f"# {stated['number']} {stated['name']}: {answer(result)}\n\n"
            f"Loss{whose} {mean:.4f} (n = {n}{spread}{proof}); {counts[0]} of {counts[1]} started runs count. "
            f"The title has 99 % intervals{chosen}.\n"
            f"{what}. {result['machine']['hardware']}, {stated['date']}.\n"
            f"{', '.join(links)}, [all numbers]({RESULT}).\n\n"
            f"![Validation and training loss over tokens and over time]({PLOT})\n\n")

def folded(title: str, content: str) -> str:
    return content and f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"

def ratio_of(comparison: Facts) -> str | None:
    share = comparison["share"]
    return share and RATIO.format(*(1 + share[key] for key in ("mean", "low", "high")))

def ratios(result: Facts) -> list[str]:
    """Return an entry's time relative to its parent's and to the base's; one if these are one."""
    return [ratio_of(found) for found in result["verdicts"].values() if "record" in found]

def loss_of(comparison: Facts) -> str | None:
    test = comparison["loss"]
    interval = " ({low:+.4f} to {high:+.4f})".format(**test) if test and test["p"] is not None else ""
    return test and f"{test['mean']:+.4f}{interval}"

def answer(result: Facts) -> str:
    """Return what the record shows: ratios to base and parent, a comparison, or the mean loss."""
    stated = result["stated"]
    parts = ratios(result)
    if parts:
        words = [parts[-1].replace(" (", " of the base's time (")]
        if len(parts) > 1:
            words.append(parts[0].replace(" (", f" of {stated['parent'].split('_')[1]}'s ("))
        return ", ".join(words)
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
    interval = band(group["losses"], runs=math.inf)
    limits = " ({:.3f} to {:.3f})".format(*interval) if interval else ""
    return f"loss {group['loss']['mean']:.3f}{limits} in {group['time']['mean']:.1f} s"

def compared(result: Facts) -> list[list[Any]]:
    """Return a row per comparison: of an entry with its opponents, or of groups with the base group, by loss."""
    base = result["stated"]["base"]
    names = list(result["verdicts"])
    if base is not None:
        names.sort(key=lambda name: result["groups"][name]["loss"]["mean"] or math.inf)
    rows = []
    for name in names:
        found = result["verdicts"][name]
        what = f"{name} with {base}"
        if "record" in found:
            role = "parent" if found["record"] == result["stated"]["parent"] else "base"
            what = f"{role} [{found['record']}](../{found['record']}/{PAGE})"
        rows.append([what, ratio_of(found), found["pairs"] or None, loss_of(found), found["verdict"]])
    return rows

def runs_of(result: Facts, name: str) -> list[Facts]:
    return [result["runs"][run] for run in result["stated"]["groups"][name]]

def label(result: Facts, name: str) -> str:
    """Return the name of a group; in a chain that of its record, which has the number of the group."""
    record = result["verdicts"].get(name, {}).get("record")
    if record:
        return " ".join(record.split("_")[1:])
    return name or f"{result['stated']['number']} {result['stated']['name']}"

def group_row(result: Facts, name: str) -> list[Any]:
    group = result["groups"][name]
    runs = runs_of(result, name)
    off = []
    for phase in dict.fromkeys(phase for run in runs for phase in run["untimed_s"] if not phase.startswith(PART)):
        times = [run["untimed_s"].get(phase, 0.0) for run in runs]
        if max(times) >= SHORT_S:
            off.append(f"{phase} {sum(times) / len(runs):.1f} ({max(times):.1f})")
    steps = [run["steps"] for run in runs]
    ends = dict.fromkeys((min(steps), max(steps)))
    n, *loss = group["loss"].values()
    _, *time = group["time"].values()
    if group["started"] != group["runs"]:
        n = f"{n} ({group['runs']} of {group['started']} started)"
    return [label(result, name), n, *loss, *time, " to ".join(map(str, ends)), group["memory"]["mean"], ", ".join(off)]

"""The generated part of a record's README, from its result.json alone."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tools import ablate, compare, prediction
from tools.ablate import aligned, interval
from tools.layout import DIFF, LOG, PLOT, SOURCE, predicts

BRIEF = 60                         # characters of a changed number that a table shows
SHOWN = "seed", "loss", "bits_per_byte", "of_unigram_entropy", "seconds", "steps", "tokens", "memory_mib"


def page(result: dict[str, Any]) -> str:
    if predicts(result["stated"]):
        said = prediction.page(result)
    else:
        said = page_of_runs(result)
    updates = changes(result)
    if updates:
        said += f"\n{updates}\n"
    return said


def page_of_runs(result: dict[str, Any]) -> str:
    parts = [head(result["stated"], result["class"])]
    for table in (pools, arms, tests, runs):
        parts.append(table(result))
    for name, pool in result["groups"].items():
        parts.append(lists(name, pool))
    if result["stated"]["kind"] != "ablation":
        parts.append(f"![validation loss over steps and over training time]({PLOT})")
        parts.append(aligned("table | group | MB sent, all ranks | of dense | MB kept by rank 0", traffic(result)))
    for table in (facts, settings, unfinished):
        parts.append(table(result))
    return "\n\n".join(filter(None, parts)) + "\n"


def head(stated: dict[str, Any], its_class: str | None) -> str:
    what = stated["kind"].capitalize()
    if stated["kind"] == "entry":
        what += f" of track `{stated['track']}`, class {its_class}"
    said = (f"## Numbers\n\n{what}, {stated['date']}: [source]({SOURCE}), [logs](logs), "
            "[all numbers](result.json).")
    parent = stated["parent"]
    if parent:
        said += f" Parent: [{parent}](../{parent}/README.md), [difference of the source]({DIFF})."
    return said


def pools(result: dict[str, Any]) -> str:
    rows = []
    for name, pool in result["groups"].items():
        row = [name or "all", len(pool["times"]), len(pool["losses"])]
        for key in ("loss", "seconds"):
            row += [pool[key]["mean"], pool[key]["sd"]]
        rows.append([*row, pool["p"]])
    return aligned("group | runs | seeds | final loss | sd | training s | sd | p, mean below the target", rows)


def tests(result: dict[str, Any]) -> str:
    """Verdicts on groups, and on benches that the record keeps."""
    base = result["stated"]["base"]
    rows = []
    for name, report in result["verdicts"].items():
        rows.append(verdict_row(name, base, report))
    for name, report in result["bench"].items():
        rows.append(verdict_row(f"[{name}]({name}): B", f"A, {report['pairs']} pairs", report))
    return aligned("B | against A | verdict | loss, B - A (99 %) | s, B - A (99 %) | reason", rows)


def verdict_row(b: str, a: str, report: dict[str, Any]) -> list[str]:
    return [b, a, f"**{report['verdict']}**", ends(report["loss"]), ends(report["time"]), report["reason"]]


def ends(test: dict[str, Any] | None) -> str:
    """Mean, low and high of a test."""
    if not test:
        return interval(None)
    return interval([test["mean"], test["low"], test["high"]])


def arms(result: dict[str, Any]) -> str:
    rows = []
    for name, arm in result["arms"].items():
        patch = f"sources/{name}.diff"
        label = name
        if patch in result["files"]:
            label = f"[{name}]({patch})"
        measures = [interval(arm.get(key)) for key in ablate.MEASURES]
        flags = ", ".join(f"{key}={flag}" for key, (_, flag) in arm["changed"].items())
        rows.append([label, len(result["groups"][name]["losses"]), *measures, flags])
    return aligned("without | seeds | loss | ms per step, % | MiB | MB sent | by flags", rows)


def runs(result: dict[str, Any]) -> str:
    rows = []
    for name, run in result["runs"].items():
        folder = name.split("/")[-1]
        untimed = ", ".join(f"{phase} {s:.1f}" for phase, s in run["untimed_s"].items())
        rows.append([f"[{folder}](logs/{name}/{LOG})", *(run[key] for key in SHOWN), untimed])
    return aligned(f"run | {' | '.join(SHOWN)} | untimed s", rows)


def lists(name: str, pool: dict[str, Any]) -> str:
    """Losses and times in the form of the public records."""
    losses = [round(x, 6) for x in pool["losses"]]
    times = [round(x, 3) for x in pool["times"]]
    title = f"{name}:\n\n" if name else ""
    return f"{title}```\nlosses = {losses}\ntimes = {times}\n```"


def traffic(result: dict[str, Any]) -> Iterator[list[Any]]:
    """Means over the runs of a group, by table and group."""
    any_run = next(iter(result["runs"].values()))
    for table in any_run["comms"]:
        for name, members in result["stated"]["groups"].items():
            its_runs = [result["runs"][run]["comms"][table] for run in members]
            sent = compare.mean(run["bytes_sent"] for run in its_runs)
            dense = compare.mean(run["bytes_dense"] for run in its_runs)
            kept = compare.mean(run["memory_bytes"] for run in its_runs)
            share = sent / dense if dense else None
            yield [table, name, f"{sent / 1e6:.1f}", share, f"{kept / 1e6:.1f}"]


def facts(result: dict[str, Any]) -> str:
    by_hand = result["stated"]["entry"]
    rows = []
    every = result["entry"] | by_hand | result["machine"]
    for key, fact in every.items():
        if fact is not None:
            origin = "stated, not logged" if key in by_hand else "log"
            rows.append([key, json.dumps(fact), origin])
    return aligned("fact | value | from", rows)


def settings(result: dict[str, Any]) -> str:
    rows = []
    for key, pair in result["changed"].items():
        rows.append([key, *map(json.dumps, pair)])
    return aligned("setting | parent | here", rows)


def unfinished(result: dict[str, Any]) -> str:
    rows = []
    for end in result["unfinished"]:
        rows.append([end.get("folder"), end.get("outcome"), end.get("cause")])
    return aligned("unfinished run | outcome | cause", rows)


def changes(result: dict[str, Any]) -> str:
    """What `new --update` changed since the record was first committed; "" for nothing."""
    rows = []
    for update in result.get("changes", []):
        since = f"`{update['since']}` of {update['date']}"
        for name, (old, new) in update["numbers"].items():
            rows.append([since, name, brief(old), brief(new)])
        if update["more"]:
            rows.append([since, f"and {update['more']} more in {', '.join(update['parts'])}", "", ""])
    if not rows:
        return ""
    return "## Changed by updates\n\n" + aligned("since commit | what | was | is", rows)


def brief(value: Any) -> str:
    """A number or text of result.json for a cell of a table."""
    if value is None:
        return "nothing"
    said = json.dumps(value).replace("|", "\\|")
    if len(said) > BRIEF:
        return said[:BRIEF] + " ..."
    return said

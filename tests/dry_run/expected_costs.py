"""The ledger: what a step of each stage launches, moves, sends, keeps and waits for, and its price.

    {"card", "flags", "attention", "steps": {stage: {parity: how many}}, "worlds": {number of GPUs: WORLD}, ...}
    WORLD  {"graphs": {title: nodes}, "host_waits": {line: times}, "failures": [...], "phases": {name: PHASE}}
    PHASE  {"sums": AMOUNTS, "lines": {name: AMOUNTS, kind, ms}, "price": {attention: ms by part},
            "at_peak": {buffers by shape and maker: [number, bytes]}}
    AMOUNTS  launches, bytes, flops by kind of arithmetic, collectives, collective_bytes, host_waits

It is made of timelines (price.py). The file keeps the largest lines and buffers of a phase, and the others as one.
"""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .price import (OTHERS, RATES, Card, PriceError, Step, Streams, compressed, cycle_of, grown, items_of, line_name,
                    load, price_steps, stages_of, tokens_at_once)

FORMAT = 4
ALWAYS = ("launches", "bytes", "collectives", "collective_bytes", "host_waits")
LARGEST_LINES, LARGEST_BUFFERS = 8, 3    # of a phase, in the file
MOST_GROWTH = 0.02
CULPRITS = 3
ALLOWED_WAITS = {                        # in the timed loop, by line, and why
    "Clock.start: self.comm.synchronize()": "the clock starts and stops after what the device has done",
    "Clock.stop: self.comm.synchronize()": "the same",
    "Log.flush: self.comm.wait_for(copied)": "the loss of a step one cycle back, which is there",
}


# ---- From timelines
def summary_of(timelines: dict[str, Any]) -> dict[str, Any]:
    """The ledger with all its lines, and without prices."""
    kernels = timelines["kernels"]
    worlds = {}
    for number, walked in timelines["worlds"].items():
        phases = {}
        for name, phase in walked["phases"].items():
            items = list(items_of(walked, phase["timeline"]))
            sums = dict(peak_bytes=phase["peak_bytes"], micro_batches=items.count(["mark", "forward"]))
            if items:
                sums |= sums_of(items, kernels)
            phases[name] = dict(sums=sums, price={}, lines=lines_of(items, kernels), at_peak=phase["at_peak"])
        worlds[number] = {key: walked[key] for key in ("graphs", "host_waits", "failures")} | dict(phases=phases)
    compiled = [kernel for kernel in kernels.values() if "spills" in kernel]
    facts = {key: timelines[key] for key in ("torch", "triton", "card", "flags", "steps", "source_sha256")}
    return facts | dict(
        format=FORMAT, worlds=worlds, attention=[], rates_sha256=hashlib.sha256(RATES.read_bytes()).hexdigest(),
        kernels_compiled=dict(number=len(compiled), spilling=sum(kernel["spills"] > 0 for kernel in compiled),
                              most_registers=max((kernel["registers"] for kernel in compiled), default=0)))

def add_prices(ledger: dict[str, Any], timelines: dict[str, Any], rates: dict[str, Any]) -> None:
    """Of each phase with each kind of attention; of its lines with the first kind."""
    card = Card(rates, timelines["card"])
    for number, world in ledger["worlds"].items():
        for attention in card.attention:
            for name, step in played(timelines, number, card, attention).items():
                phase = world["phases"][name]
                phase["price"][attention] = {part: round(ms, 6) for part, ms in step.parts.items() if ms}
                if attention != card.attention[0]:
                    continue
                for (line, kind), ms in step.lines.items():
                    facts = phase["lines"].setdefault(line, dict(kind=kind))
                    facts["ms"] = round(facts.get("ms", 0.0) + ms, 6)
    ledger["attention"] = card.attention

def played(timelines: dict[str, Any], world: str, card: Card, attention: str) -> dict[str, Step]:
    """What each phase takes: steps in their cycle, what is no step alone."""
    steps = {}
    for stage in stages_of(timelines, world):
        cycle = cycle_of(timelines, world, stage)
        for parity, step in price_steps(timelines, card, world, attention, stage).items():
            steps[cycle[parity]] = step
    for name in timelines["worlds"][world]["phases"].keys() - steps.keys():
        steps[name] = Streams(timelines, world, card, attention).play(name)
    return steps

def sums_of(items: list[list], kernels: dict[str, Any]) -> dict[str, int]:
    return dict.fromkeys(ALWAYS, 0) | added(lines_of(items, kernels).values())

def added(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    sums = Counter()
    for line in lines:
        sums.update({measure: amount for measure, amount in line.items() if measure != "kind"})
    return dict(sums)

def lines_of(items: list[list], kernels: dict[str, Any]) -> dict[str, dict]:
    """What is launched, sent and waited for, by name."""
    tokens = tokens_at_once(items, kernels)
    lines = {}
    for kind, *rest in items:
        if kind == "run":
            key, count = rest
            kernel = kernels[key]
            name = line_name(kernel, tokens)
            kind = kernel["kind"]
            amounts = dict(launches=count, bytes=count * kernel["bytes"])
            if kernel.get("flops"):
                amounts[f"flops {kernel['dtype'] if kind == 'product' else kind}"] = count * kernel["flops"]
        elif kind == "collective":
            _, collective, size, dtype, _ = rest
            name = f"{collective} of {dtype}"
            amounts = dict(collectives=1, collective_bytes=size)
        elif kind == "host_wait":
            name, = rest
            amounts = dict(host_waits=1)
        else:
            continue
        line = lines.setdefault(name, dict(kind=kind))
        for measure, amount in amounts.items():
            line[measure] = line.get(measure, 0) + amount
    return lines


# ---- The file: an entry a line
def kept(ledger: dict[str, Any]) -> dict[str, Any]:
    """The ledger with the largest launches and buffers of each phase, and all that speaks to other ranks or waits."""
    worlds = {}
    for number, world in ledger["worlds"].items():
        phases = {}
        for name, phase in world["phases"].items():
            launches = [line for line, facts in phase["lines"].items() if "launches" in facts]
            launches.sort(key=lambda line: (-phase["lines"][line].get("ms", 0.0), -phase["lines"][line]["bytes"]))
            buffers = sorted(phase["at_peak"], key=lambda buffer: -phase["at_peak"][buffer][1])
            phases[name] = phase | dict(lines=joined(phase["lines"], launches[LARGEST_LINES:]),
                                        at_peak=joined(phase["at_peak"], buffers[LARGEST_BUFFERS:]))
        worlds[number] = world | dict(phases=phases)
    return ledger | dict(worlds=worlds)

def joined(entries: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    """The entries, those that are dropped as one."""
    found = {name: entry for name, entry in entries.items() if name not in dropped}
    others = [entries[name] for name in dropped]
    if others and isinstance(others[0], list):
        found[OTHERS] = [sum(column) for column in zip(*others)]
    elif others:
        sums = added(others)
        found[OTHERS] = sums | dict(kind="", ms=round(sums.get("ms", 0.0), 6))
    return found

def written(value: Any, indent: str = "") -> str:
    """Sorted JSON; an object that holds others has a line for each."""
    if not isinstance(value, dict) or not any(isinstance(x, (dict, list)) for x in value.values()):
        return json.dumps(value, sort_keys=True)
    rows = [f"{indent} {json.dumps(key)}: {written(value[key], indent + ' ')}" for key in sorted(value)]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"

def ledger_in(path: Path) -> dict[str, Any] | None:
    """None if there is no file. Raises PriceError for one that is not a ledger."""
    if not compressed.stored(path).exists():
        return None
    ledger = load(path)
    if ledger.get("format") != FORMAT:
        raise PriceError(f"{path}", f"format {ledger.get('format')}", f"a ledger of format {FORMAT}",
                         "name another; --update makes one where there is none")
    return ledger


# ---- Comparison
def report(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Print what changed, in what both have rehearsed. Returns, and does not print, what grew by more than it may."""
    too_much = []
    for number, world in new["worlds"].items():
        before = old["worlds"].get(number, dict(phases={}, graphs={}))
        for name in [name for name in world["phases"] if name in before["phases"]]:
            was, now = before["phases"][name], world["phases"][name]
            for what in sorted(was["sums"].keys() | now["sums"].keys()):
                a, b = was["sums"].get(what, 0), now["sums"].get(what, 0)
                if a == b:
                    continue
                share = f"{b / a - 1:+.1%}" if a else "new"
                change = f"W = {number}, {name}: {what} {amount_of(a, what)} -> {amount_of(b, what)} ({share})"
                if b > a * (1 + MOST_GROWTH):
                    too_much.append("\n    ".join([f"growth: {change}", *culprits_of(was, now, what)]))
                else:
                    print(change)
        titles = [title for title, graph in world["graphs"].items() if before["graphs"].get(title) != graph]
        if titles:
            print(f"W = {number}: other graphs: {'; '.join(titles)}")
    return too_much

def culprits_of(was: dict[str, Any], now: dict[str, Any], what: str) -> list[str]:
    """The lines or buffers that grew most; what the ledger did not keep by name counts as its others."""
    if what == "peak_bytes":
        before, after = [{name: size for name, (_, size) in phase["at_peak"].items()} for phase in (was, now)]
    else:
        before, after = [{name: line.get(what, 0) for name, line in phase["lines"].items()} for phase in (was, now)]
    more = grown(before, after)
    found = [f"{name} +{amount_of(size, what)}" for name, size in more.most_common(CULPRITS) if size > 0]
    if more[OTHERS] > 0:
        unnamed = Counter({name: size for name, size in after.items() if name not in before})
        largest = ", ".join(name for name, _ in unnamed.most_common(CULPRITS))
        found.append(f"({OTHERS}: no lines of the ledger; their largest are now {largest})")
    return found

def amount_of(number: float, what: str) -> str:
    if "bytes" in what:
        return f"{number / 1e6:,.1f} MB"
    if what.startswith("flops"):
        return f"{number / 1e9:,.1f} GFLOP"
    return f"{number:,}"

def forbidden(ledger: dict[str, Any]) -> list[str]:
    """What no update accepts."""
    found = []
    for number, world in ledger["worlds"].items():
        found += [f"W = {number}: {x['kind']}: {x['where']}: {x['found']}" for x in world["failures"]]
        for line, count in world["host_waits"].items():
            if line not in ALLOWED_WAITS:
                found.append(f"W = {number}: host wait: {line}: {count} times in the timed loop")
    return found

"""The ledger: what a step of each stage launches, moves, sends, keeps and waits for, and its price, on some hundred lines.

    {"card", "flags", "steps": {stage: {parity: how many a run has}}, "worlds": {number of GPUs: WORLD}, ...}
    WORLD  {"graphs": {title: [hash, nodes]}, "host_waits": {line: times}, "failures": [...], "phases": {name: PHASE}}
    PHASE  {"sums": AMOUNTS, "lines": {name: AMOUNTS, kind, ms}, "price": {attention: ms by part},
            "at_peak": {buffers by shape and maker: [number, bytes]}}
    AMOUNTS  launches, bytes, flops by kind of arithmetic, collectives, collective_bytes, host_waits

It is made of timelines (price.py). The file keeps the largest lines and buffers of a phase, and the others as one.
"""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .price import (OTHERS, RATES, Card, PriceError, Step, Streams, check_facts, grown, items_of, line_name,
                    load, price_steps, stages_of, tokens_at_once)

FORMAT = 3
FACTS = {"card", "flags", "steps", "worlds"}                  # without which nothing can be compared
ALWAYS = ("launches", "bytes", "collectives", "collective_bytes", "host_waits")
LARGEST_LINES, LARGEST_BUFFERS = 8, 3    # of a phase, in the file
MOST_GROWTH = 0.02
CULPRITS = 3
ALLOWED_WAITS = {                        # in the timed loop, by line, and why
    "Clock.start: self.fabric.synchronize()": "the clock starts and stops after what the device has done",
    "Clock.stop: self.fabric.synchronize()": "the same",
    "Log.flush: copied.synchronize()": "the loss of a step one cycle back, which is there",
}


# ---- From timelines
def summary_of(timelines: dict[str, Any], rates: dict[str, Any] | None, card: str = "") -> dict[str, Any]:
    """The ledger with all its lines; without rates it has no prices."""
    worlds = {}
    target = Card(rates, card or timelines["card"]) if rates else None
    for number, walked in timelines["worlds"].items():
        steps = played(timelines, number, target)
        phases = {}
        for name, phase in walked["phases"].items():
            by_attention = {attention: found[name] for attention, found in steps.items()}
            phases[name] = summary_of_phase(timelines, number, phase, by_attention)
        facts = {key: walked.get(key, {}) for key in ("graphs", "host_waits", "failures")}
        worlds[number] = dict(facts, phases=phases)
    facts = {key: timelines.get(key) for key in ("torch", "triton", "card", "flags", "steps", "source_sha256")}
    return dict(facts, format=FORMAT, rates_sha256=hashlib.sha256(RATES.read_bytes()).hexdigest(), worlds=worlds)


def played(timelines: dict[str, Any], world: str, card: Card | None) -> dict[str, dict[str, Step]]:
    """By kind of attention: what each phase takes, steps in their cycle and what is no step alone."""
    found = {}
    for attention in card.attention if card else ():
        steps = {}
        for stage in stages_of(timelines, world):
            for parity, step in price_steps(timelines, world, card, attention, stage).items():
                steps[f"{stage} {parity} step"] = step
        for name in timelines["worlds"][world]["phases"]:
            if name not in steps:
                steps[name] = Streams(timelines, world, card, attention).play(name)
        found[attention] = steps
    return found


def summary_of_phase(timelines: dict[str, Any], world: str, phase: dict[str, Any], steps: dict[str, Step]) -> dict:
    items = list(items_of(timelines["worlds"][world], phase["timeline"]))
    lines = lines_of(items, timelines["kernels"])
    sums = sums_of(items, timelines["kernels"]) if items else {}
    sums["peak_bytes"] = phase["peak_bytes"]
    sums["micro_batches"] = items.count(["mark", "forward"])
    for step in list(steps.values())[:1]:                     # with the first kind of attention
        for (name, kind), ms in step.lines.items():
            lines.setdefault(label_of(name, kind), dict(kind=kind))["ms"] = round(ms, 6)
    prices = {}
    for attention, step in steps.items():
        prices[attention] = {part: round(ms, 6) for part, ms in step.parts.items() if ms}
    return dict(sums=sums, price=prices, lines=lines, at_peak=phase["at_peak"])


def sums_of(items: list[list], kernels: dict[str, Any]) -> dict[str, int]:
    sums = Counter(dict.fromkeys(ALWAYS, 0))
    for line in lines_of(items, kernels).values():
        sums.update({measure: amount for measure, amount in line.items() if measure != "kind"})
    return dict(sums)


def lines_of(items: list[list], kernels: dict[str, Any]) -> dict[str, dict]:
    """What is launched, sent and waited for, by name."""
    tokens = tokens_at_once(items, kernels)
    lines = {}
    for what, *rest in items:
        if what == "run":
            key, count = rest
            kernel = kernels[key]
            name, kind = label_of(line_name(kernel, tokens), kernel["kind"]), kernel["kind"]
            amounts = Counter(launches=count, bytes=count * kernel.get("bytes", 0))
            if kernel.get("flops"):
                arithmetic = kind if kind == "attention" else kernel["dtype"]
                amounts[f"flops {arithmetic}"] = count * kernel["flops"]
        elif what == "collective":
            _, collective, size, dtype, _ = rest
            name, kind = f"{collective} of {dtype}", "collective"
            amounts = Counter(collectives=1, collective_bytes=size)
        elif what == "host_wait":
            name, kind = rest[0], "host wait"
            amounts = Counter(host_waits=1)
        else:
            continue
        line = lines.setdefault(name, dict(kind=kind))
        for measure, amount in amounts.items():
            line[measure] = line.get(measure, 0) + amount
    return lines


def label_of(name: str, kind: str) -> str:
    """A copy between host and card has the name of one on the card."""
    return f"{name}, to or from the host" if kind == "copy" else name


# ---- The file: an entry a line
def kept(ledger: dict[str, Any]) -> dict[str, Any]:
    """The ledger with the largest lines and buffers of each phase, the other lines as one."""
    worlds = {}
    for number, world in ledger["worlds"].items():
        phases = {}
        for name, phase in world["phases"].items():
            phases[name] = dict(phase, lines=kept_lines(phase["lines"]), at_peak=kept_buffers(phase["at_peak"]))
        worlds[number] = dict(world, phases=phases)
    return dict(ledger, worlds=worlds)


def kept_lines(lines: dict[str, dict]) -> dict[str, dict]:
    """The dearest, and all that speaks to other ranks or waits."""
    by_size = sorted(lines, key=lambda name: (-lines[name].get("ms", 0.0), -lines[name].get("bytes", 0)))
    of_card = [name for name in by_size if "launches" in lines[name]]
    dropped = of_card[LARGEST_LINES:]
    found = {name: line for name, line in lines.items() if name not in dropped}
    others = Counter()
    for name in dropped:
        others.update({measure: amount for measure, amount in lines[name].items() if measure != "kind"})
    if dropped:
        found[OTHERS] = dict(others, kind="", ms=round(others["ms"], 6))
    return found


def kept_buffers(buffers: dict[str, list[int]]) -> dict[str, list[int]]:
    by_size = sorted(buffers.items(), key=lambda item: -item[1][1])
    found = dict(by_size[:LARGEST_BUFFERS])
    if len(by_size) > LARGEST_BUFFERS:
        found[OTHERS] = [sum(column) for column in zip(*(facts for _, facts in by_size[LARGEST_BUFFERS:]))]
    return found


def written(value: Any, indent: str = "") -> str:
    """Sorted JSON; an object that holds others has a line for each."""
    inside = value.values() if isinstance(value, dict) else ()
    if not any(isinstance(x, (dict, list)) for x in inside):
        return json.dumps(value, sort_keys=True)
    rows = [f"{indent} {json.dumps(key)}: {written(value[key], indent + ' ')}" for key in sorted(value)]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def ledger_in(path: Path) -> dict[str, Any] | None:
    """None if there is no file. Raises PriceError for one that is not a ledger."""
    if not path.exists():
        return None
    ledger = load(path)
    check_facts(f"{path}", ledger, FACTS)
    if ledger.get("format") != FORMAT:
        raise PriceError(f"{path}", f"format {ledger.get('format')}", f"a ledger of format {FORMAT}",
                         "name another; --update makes one where there is none")
    return ledger


# ---- Comparison
class Difference(NamedTuple):
    place: str                           # world and phase
    what: str
    before: int
    now: int
    culprits: list[str]                  # whose share grew most

    def __str__(self) -> str:
        share = f"{self.now / self.before - 1:+.1%}" if self.before else "new"
        change = f"{amount_of(self.before, self.what)} -> {amount_of(self.now, self.what)} ({share})"
        return "\n    ".join([f"{self.place}: {self.what} {change}", *self.culprits])


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Difference]:
    """Every sum that changed, in what both have rehearsed."""
    for number, world in new["worlds"].items():
        before = old["worlds"].get(number, dict(phases={}))
        for name, phase in world["phases"].items():
            was = before["phases"].get(name)
            if was is None:
                continue
            for what in sorted(was["sums"].keys() | phase["sums"].keys()):
                a, b = was["sums"].get(what, 0), phase["sums"].get(what, 0)
                if a != b:
                    culprits = culprits_of(was, phase, what) if b > a else []
                    yield Difference(f"W = {number}, {name}", what, a, b, culprits)


def culprits_of(was: dict[str, Any], now: dict[str, Any], what: str) -> list[str]:
    """The lines or buffers that grew most; what the ledger did not keep by name counts as its others."""
    before, after = shares(was, what), shares(now, what)
    more = grown(before, after)
    found = []
    for name, size in more.most_common(CULPRITS):
        if size > 0:
            found.append(f"{name} +{amount_of(size, what)}")
    if more[OTHERS] > 0:
        unnamed = Counter({name: size for name, size in after.items() if name not in before})
        largest = ", ".join(name for name, _ in unnamed.most_common(CULPRITS))
        found.append(f"({OTHERS}: no lines of the ledger; their largest are now {largest})")
    return found


def shares(phase: dict[str, Any], what: str) -> dict[str, float]:
    """Who has which share of a sum."""
    if what == "peak_bytes":
        return {name: size for name, (_, size) in phase["at_peak"].items()}
    return {name: line.get(what, 0) for name, line in phase["lines"].items()}


def amount_of(number: float, what: str) -> str:
    if "bytes" in what:
        return f"{number / 1e6:,.1f} MB"
    if what.startswith("flops"):
        return f"{number / 1e9:,.1f} GFLOP"
    return f"{number:,}"


def report(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Print what changed. Returns, and does not print, what grew by more than it may."""
    too_much = []
    for found in differences(old, new):
        if found.now > found.before * (1 + MOST_GROWTH):
            too_much.append(f"growth: {found}")
        else:
            print(found)
    for number, world in new["worlds"].items():
        known = old["worlds"].get(number, {}).get("graphs", {})
        titles = [title for title, graph in world["graphs"].items() if known.get(title) != graph]
        if titles:
            print(f"W = {number}: other graphs: {'; '.join(titles)}")
    return too_much


def forbidden(ledger: dict[str, Any]) -> list[str]:
    """What no update accepts."""
    found = []
    for number, world in ledger["worlds"].items():
        found += [f"W = {number}: {x['kind']}: {x['where']}: {x['found']}" for x in world["failures"]]
        for line, count in world["host_waits"].items():
            if line not in ALLOWED_WAITS:
                found.append(f"W = {number}: host wait: {line}: {count} times in the timed loop")
    return found

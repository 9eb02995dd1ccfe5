"""The ledger: what a step of each stage launches, moves, sends, keeps and waits for, and its price.

    {"card", "flags", "attention", "steps": {stage: {parity: how many}}, "worlds": {number of GPUs: WORLD}, ...}
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

from .price import (OTHERS, RATES, Card, PriceError, Step, Streams, check_facts, cycle_of, grown, items_of, line_name,
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
        for parity, step in price_steps(timelines, world, card, attention, stage).items():
            steps[cycle[parity]] = step
    for name in timelines["worlds"][world]["phases"].keys() - steps.keys():
        steps[name] = Streams(timelines, world, card, attention).play(name)
    return steps


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
            name = line_name(kernel, tokens)
            kind = kernel["kind"]
            amounts = dict(launches=count, bytes=count * kernel["bytes"])
            if kernel.get("flops"):
                amounts[f"flops {kernel['dtype'] if kind == 'product' else kind}"] = count * kernel["flops"]
        elif what == "collective":
            _, collective, size, dtype, _ = rest
            name = f"{collective} of {dtype}"
            kind = what
            amounts = dict(collectives=1, collective_bytes=size)
        elif what == "host_wait":
            name, = rest
            kind = what
            amounts = dict(host_waits=1)
        else:
            continue
        line = lines.setdefault(name, dict(kind=kind))
        for measure, amount in amounts.items():
            line[measure] = line.get(measure, 0) + amount
    return lines


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
    of_card = [name for name in lines if "launches" in lines[name]]
    of_card.sort(key=lambda name: (-lines[name].get("ms", 0.0), -lines[name].get("bytes", 0)))
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
    if not isinstance(value, dict) or not any(isinstance(x, (dict, list)) for x in value.values()):
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
                    yield Difference(f"W = {number}, {name}", what, a, b, culprits_of(was, phase, what))


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

"""The expected costs: what a step of each stage launches, moves, sends, stores and waits for, and its price.

    {"card", "flags", "attention", "steps": {stage: {parity: count}}, "worlds": {world size: WORLD}, ...}
    WORLD  {"graphs": {title: nodes}, "host_waits": {line: count}, "failures": [...], "phases": {name: PHASE}}
    PHASE  {"sums": AMOUNTS, "lines": {name: AMOUNTS, kind, ms}, "price": {attention: ms by part},
            "at_peak": {buffers by shape and first launch: [count, bytes]}}
    AMOUNTS  launches, bytes, flops by kind of arithmetic, collectives, collective_bytes, host_waits

The expected costs are computed from timelines (price.py). The file has the largest lines and buffers of a phase by
name, and the sum of all others.
"""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .price import OTHERS, RATES, Card, Step, Streams, line_name, list_stages, micro_batch_tokens, price_steps

FORMAT = 4
ALWAYS_PRESENT = ("launches", "bytes", "collectives", "collective_bytes", "host_waits")
MAX_LINES, MAX_BUFFERS = 8, 3            # per phase, in the file
MAX_GROWTH = 0.02
MAX_NAMED = 3
ALLOWED_WAITS = {                        # in the timed loop, by line, with the reason
    "Clock.start: self.comm.synchronize()": "the clock starts and stops when the device has finished its work",
    "Clock.stop: self.comm.synchronize()": "the clock starts and stops when the device has finished its work",
    "Log.flush: copied.synchronize()": "the loss of a step one cycle earlier, which is already computed",
}


# ---- From timelines
def summarize(timelines: dict[str, Any]) -> dict[str, Any]:
    """Compute the expected costs from timelines, with all lines and without prices."""
    kernels = timelines["kernels"]
    by_world_size = {}
    for world_size, walk in timelines["worlds"].items():
        phases = {}
        for name, phase in walk["phases"].items():
            items = phase["timeline"]
            sums = dict(peak_bytes=phase["peak_bytes"], micro_batches=items.count(["mark", "forward"]))
            lines = group_by_line(items, kernels)
            if items:
                sums |= dict.fromkeys(ALWAYS_PRESENT, 0) | add_amounts(lines.values())
            phases[name] = dict(sums=sums, price={}, lines=lines, at_peak=phase["at_peak"])
        facts = {key: walk[key] for key in ("graphs", "host_waits", "failures")}
        by_world_size[world_size] = facts | dict(phases=phases)
    compiled = [kernel for kernel in kernels.values() if "spills" in kernel]
    facts = {key: timelines[key] for key in ("torch", "triton", "card", "flags", "steps", "source_sha256")}
    return facts | dict(
        format=FORMAT, worlds=by_world_size, attention=[],
        rates_sha256=hashlib.sha256(RATES.read_bytes()).hexdigest(),
        kernels_compiled=dict(number=len(compiled), spilling=sum(kernel["spills"] > 0 for kernel in compiled),
                              most_registers=max((kernel["registers"] for kernel in compiled), default=0)))

def add_prices(costs: dict[str, Any], timelines: dict[str, Any], rates: dict[str, Any]) -> None:
    """Add the price of each phase with each kind of attention, and the prices of its lines with the first kind."""
    card = Card(rates, timelines["card"])
    for world_size, world in costs["worlds"].items():
        for attention in card.attention:
            for name, step in simulate_phases(timelines, world_size, card, attention).items():
                phase = world["phases"][name]
                phase["price"][attention] = {part: round(ms, 6) for part, ms in step.parts.items() if ms}
                if attention != card.attention[0]:
                    continue
                for (line, kind), ms in step.lines.items():
                    facts = phase["lines"].setdefault(line, dict(kind=kind))
                    facts["ms"] = round(facts.get("ms", 0.0) + ms, 6)
    costs["attention"] = card.attention

def simulate_phases(timelines: dict[str, Any], world_size: str, card: Card, attention: str) -> dict[str, Step]:
    """Simulate every phase: steps in their cycle, other phases separately."""
    steps = {}
    phases = timelines["worlds"][world_size]["phases"]
    for stage in list_stages(phases):
        steps |= price_steps(timelines, card, world_size, attention, stage)
    for name in phases.keys() - steps.keys():
        steps[name] = Streams(timelines, world_size, card, attention).simulate(name)
    return steps

def add_amounts(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    sums = Counter()
    for line in lines:
        sums.update({measure: amount for measure, amount in line.items() if measure != "kind"})
    return dict(sums)

def group_by_line(items: list[list], kernels: dict[str, Any]) -> dict[str, dict]:
    tokens = micro_batch_tokens(items, kernels)
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


# ---- The file, with one line per entry
def compact(costs: dict[str, Any]) -> dict[str, Any]:
    """Keep the largest launches and buffers of each phase by name, and all collectives and waits."""
    by_world_size = {}
    for world_size, world in costs["worlds"].items():
        phases = {}
        for name, phase in world["phases"].items():
            launches = [line for line, facts in phase["lines"].items() if "launches" in facts]
            launches.sort(key=lambda line: (-phase["lines"][line].get("ms", 0.0), -phase["lines"][line]["bytes"]))
            buffers = sorted(phase["at_peak"], key=lambda buffer: -phase["at_peak"][buffer][1])
            phases[name] = phase | dict(lines=merge_entries(phase["lines"], launches[MAX_LINES:]),
                                        at_peak=merge_entries(phase["at_peak"], buffers[MAX_BUFFERS:]))
        by_world_size[world_size] = world | dict(phases=phases)
    return costs | dict(worlds=by_world_size)

def merge_entries(entries: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    merged = {name: entry for name, entry in entries.items() if name not in dropped}
    others = [entries[name] for name in dropped]
    if others and isinstance(others[0], list):
        merged[OTHERS] = [sum(column) for column in zip(*others)]
    elif others:
        sums = add_amounts(others)
        merged[OTHERS] = sums | dict(kind="", ms=round(sums.get("ms", 0.0), 6))
    return merged

def format_json(value: Any, indent: str = "") -> str:
    """Format as sorted JSON, with one line for each object inside an object."""
    if not isinstance(value, dict) or not any(isinstance(x, (dict, list)) for x in value.values()):
        return json.dumps(value, sort_keys=True)
    entries = [f"{indent} {json.dumps(key)}: {format_json(value[key], indent + ' ')}" for key in sorted(value)]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


# ---- Comparison
def growth_beyond_limit(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """List the growth beyond MAX_GROWTH, and print all other changes. Compares the phases that both have."""
    too_much = []
    for world_size, world in after["worlds"].items():
        world_before = before["worlds"].get(world_size, dict(phases={}, graphs={}))
        for name in [name for name in world["phases"] if name in world_before["phases"]]:
            phase_before, phase = world_before["phases"][name], world["phases"][name]
            for measure in sorted(phase_before["sums"].keys() | phase["sums"].keys()):
                old, new = phase_before["sums"].get(measure, 0), phase["sums"].get(measure, 0)
                if old == new:
                    continue
                relative = f"{new / old - 1:+.1%}" if old else "new"
                amounts = f"{format_amount(old, measure)} -> {format_amount(new, measure)}"
                change = f"W = {world_size}, {name}: {measure} {amounts} ({relative})"
                if new > old * (1 + MAX_GROWTH):
                    too_much.append("\n    ".join([f"growth: {change}", *largest_growth(phase_before, phase, measure)]))
                else:
                    print(change)
        titles = [title for title, graph in world["graphs"].items() if world_before["graphs"].get(title) != graph]
        if titles:
            print(f"W = {world_size}: changed graphs: {'; '.join(titles)}")
    return too_much

def largest_growth(phase_before: dict[str, Any], phase_after: dict[str, Any], measure: str) -> list[str]:
    phases = (phase_before, phase_after)
    if measure == "peak_bytes":
        before, after = [{name: size for name, (_, size) in phase["at_peak"].items()} for phase in phases]
    else:
        before, after = [{name: line.get(measure, 0) for name, line in phase["lines"].items()} for phase in phases]
    growth = Counter()
    for name, amount in after.items():                        # a line that `before` does not name is one of its others
        growth[name if name in before or OTHERS not in before else OTHERS] += amount
    growth.subtract(before)
    return [f"{name} +{format_amount(size, measure)}" for name, size in growth.most_common(MAX_NAMED) if size > 0]

def format_amount(amount: float, measure: str) -> str:
    if "bytes" in measure:
        return f"{amount / 1e6:,.1f} MB"
    if measure.startswith("flops"):
        return f"{amount / 1e9:,.1f} GFLOP"
    return f"{amount:,}"

def find_failures(costs: dict[str, Any]) -> list[str]:
    """List what --update never accepts: failures of the walks, and host waits that are not allowed."""
    failures = []
    for world_size, world in costs["worlds"].items():
        for failure in world["failures"]:
            failures.append(f"W = {world_size}: {failure['kind']}: {failure['where']}: {failure['found']}")
        for line, count in world["host_waits"].items():
            if line not in ALLOWED_WAITS:
                failures.append(f"W = {world_size}: host wait: {line}: {count} times in the timed loop")
    return failures

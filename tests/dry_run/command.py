"""Run the trainer on fake CUDA tensors, and compare its launches, traffic, memory and waits with the expected costs.

README.md explains the flags, what makes the dry run fail, and how to accept growth. Exit status: 0 success; 1 if a
check or a walk failed; 2 if the request cannot be met. The environment variable DRY_RUN_CACHE names a folder in which
compiled kernels are stored for the next call. The expected costs:

    {"card", "attention", "rates_sha256", "steps": {stage: {parity: count}}, "worlds": {world size: WORLD}}
    WORLD  {"graphs": {title: nodes}, "kernels", "host_waits": {line: count}, "failures", "phases": {name: PHASE}}
    PHASE  {"sums": AMOUNTS and peak_bytes, "lines": {name: AMOUNTS}, "price": {attention: ms by part}}
    AMOUNTS  launches, bytes, flops by kind of arithmetic, collectives, collective_bytes
"""
import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import price

TESTS = Path(__file__).resolve().parent.parent
TORCH_VERSION, TRITON_VERSION = "2.13.0", "3.7.1"  # fake_cuda.py depends on their internals
MAX_GROWTH = 0.02
MAX_NAMED, MAX_LINES = 3, 12              # lines of a phase: in a message, and in the file
ALLOWED_WAITS = {                        # in the timed loop, by line, with the reason
    "Clock.start: self.comm.synchronize()": "the clock starts and stops when the device has finished its work",
    "Clock.stop: self.comm.synchronize()": "the clock starts and stops when the device has finished its work",
    "Log.flush: wait_for_sums()": "the loss of a step one cycle earlier, which is already computed",
}

def unsupported_reason() -> str:
    """Return why the dry run cannot run here; "" if it can."""
    for package, supported in (("torch", f"{TORCH_VERSION}+cpu"), ("triton", TRITON_VERSION)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != supported:
            return f"{package} is {found}; fake_cuda.py replaces internals of {supported}, the wheel to install"
    if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which("c++"):
        return "no C++ compiler: install g++, or set CXX"
    return ""


# ---- From walks to costs
def run_walks(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run walk.py once for each world size, in parallel processes; return the results by world size."""
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS))
        environment.setdefault("DRY_RUN_CACHE", folder)
        processes = []
        for world_size in args.gpus:
            command = [sys.executable, "-m", "dry_run.walk", f"{folder}/{world_size}.json", world_size, args.card,
                       ",".join(args.stages), *args.flags]
            processes.append(subprocess.Popen(command, env=environment))
        if any([process.wait() for process in processes]):
            sys.exit("a walk failed")
        return {world_size: price.load(Path(folder, f"{world_size}.json")) for world_size in args.gpus}

def summarize(walk: dict[str, Any], world_size: str, card: price.Card) -> dict[str, Any]:
    """Return the costs of a walk: of each phase the sums, the lines and the price with each kind of attention."""
    phases = {}
    for name, phase in walk["phases"].items():
        sums = Counter(peak_bytes=phase["peak_bytes"])
        lines = group_by_line(phase["timeline"], walk["kernels"])
        for amounts in lines.values():
            sums.update(amounts)
        phases[name] = dict(sums=sums, lines=lines, price={})
    for attention in card.attention:
        for name, parts in price.price_phases(walk, world_size, card, attention).items():
            phases[name]["price"][attention] = {part: round(ms, 6) for part, ms in parts.items() if ms}
    kernels = sum("spills" in kernel for kernel in walk["kernels"].values())
    return dict(graphs=walk["graphs"], kernels=kernels, host_waits=walk["host_waits"], failures=walk["failures"],
                phases=phases)

def group_by_line(timeline: list[list], kernels: dict[str, Any]) -> dict[str, Counter]:
    lines = {}
    for kind, *rest in timeline:
        if kind == "run":
            key, count = rest
            kernel = kernels[key]
            name = kernel["name"]
            amounts = dict(launches=count, bytes=count * kernel["bytes"])
            if kernel["kind"] == "product":
                name = "{name} {dtype} ({batch}, {m}, {n}, {k})".format(**kernel)
            if kernel.get("flops"):
                amounts[f"flops {kernel.get('dtype', kernel['kind'])}"] = count * kernel["flops"]
        elif kind == "collective":
            _, collective, size, dtype = rest
            name = f"{collective} of {dtype}"
            amounts = dict(collectives=1, collective_bytes=size)
        else:
            continue
        lines.setdefault(name, Counter()).update(amounts)
    return lines


def largest_lines(lines: dict[str, Counter]) -> dict[str, Counter]:
    names = sorted(lines, key=lambda name: -max(lines[name]["bytes"], lines[name]["collective_bytes"]))
    return {name: lines[name] for name in names[:MAX_LINES]}


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

def largest_growth(before: dict[str, Any], after: dict[str, Any], measure: str) -> list[str]:
    """Name the lines of a phase that grew most. Lines that the file does not name are its others."""
    growth = Counter()
    for name, line in after["lines"].items():
        growth[name if name in before["lines"] else "others"] += line.get(measure, 0)
    named = {name: line.get(measure, 0) for name, line in before["lines"].items()}
    growth.subtract(named | dict(others=before["sums"].get(measure, 0) - sum(named.values())))
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
        failures += [f"W = {world_size}: {failure}" for failure in world["failures"]]
        for line, count in world["host_waits"].items():
            if line not in ALLOWED_WAITS:
                failures.append(f"W = {world_size}: host wait: {line}: {count} times in the timed loop")
    return failures


# ---- Output
def summary_lines(costs: dict[str, Any]) -> Iterator[str]:
    for world_size, world in costs["worlds"].items():
        yield f"W = {world_size}: {len(world['graphs'])} graphs, {world['kernels']} kernels compiled"
        for name, phase in world["phases"].items():
            sums = phase["sums"]
            if not sums["launches"]:
                continue
            flops = [f"{sums[measure] / 1e12:.2f} {measure.removeprefix('flops ')}" for measure in sorted(sums)
                     if measure.startswith("flops ")]
            yield (f"  {name:24}{sums['launches']:6} launches {sums['bytes'] / 1e9:8.1f} GB  "
                   f"TFLOP {' + '.join(flops) or 0}; peak {sums['peak_bytes'] / 2**20:,.0f} MiB, "
                   f"{sums['collectives']} collectives of {sums['collective_bytes'] / 1e6:,.0f} MB")

def format_json(value: Any, indent: str = "") -> str:
    """Format as sorted JSON, with one line for each object inside an object."""
    if not isinstance(value, dict) or not any(isinstance(x, (dict, list)) for x in value.values()):
        return json.dumps(value, sort_keys=True)
    entries = [f"{indent} {json.dumps(key)}: {format_json(value[key], indent + ' ')}" for key in sorted(value)]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


# ---- The command
def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    numbers = functools.partial(str.split, sep=",")
    parser = argparse.ArgumentParser("dry_run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="8,1", type=numbers, help="world sizes [%(default)s]")
    parser.add_argument("--card", default="H100", choices=sorted(price.load(price.RATES)["cards"]),
                        help="GPU to compile for [%(default)s]")
    parser.add_argument("--stages", default=[], type=numbers,
                        help="lower only the graphs of these stages, for example 1,2 [all]")
    parser.add_argument("--update", action="store_true", help="write the expected costs and print the differences")
    parser.add_argument("flags", nargs="*", help="flags of train_gpt.py, after --")
    args = parser.parse_args(argv)
    if args.update and len(argv) > 1:
        parser.error("--update takes no other flag: the expected costs are those of all walks of an H100")
    return args

def main(argv: Sequence[str]) -> int:
    reason = unsupported_reason()
    if reason:
        print(f"the dry run cannot run here: {reason}")
        return 2
    args = parse_args(argv)
    card = price.Card(price.load(price.RATES), args.card)
    walks = run_walks(args)
    steps = walks[args.gpus[0]]["steps"]                      # those of the whole run, equal in all walks
    worlds = {world_size: summarize(walk, world_size, card) for world_size, walk in walks.items()}
    for world in worlds.values() if args.stages else ():      # the last validation that is lowered is an earlier one
        world["phases"].pop("validation final", None)
    costs = dict(card=args.card, attention=card.attention, steps=steps, worlds=worlds,
                 rates_sha256=hashlib.sha256(price.RATES.read_bytes()).hexdigest())
    before = price.load(price.EXPECTED_COSTS)
    if before["card"] != args.card:
        print(f"nothing to compare with: {price.EXPECTED_COSTS.name} has no costs of {args.card}")
        before["worlds"] = {}
    print("\n".join(summary_lines(costs)))
    failures = find_failures(costs)
    growth = growth_beyond_limit(before, costs) if before["worlds"] else []
    print(price.format_prediction(costs) + "\n" + price.format_difference(before, costs))
    if args.update and not failures:
        print("\n".join(growth))
        for phase in [phase for world in worlds.values() for phase in world["phases"].values()]:
            phase["lines"] = largest_lines(phase["lines"])
        price.EXPECTED_COSTS.write_text(format_json(costs) + "\n", "utf-8")
        return 0
    print("\n".join(f"FAILED  {failure}" for failure in failures + growth))
    return 1 if failures + growth else 0

"""Rehearse a run on GPUs that are not there: what it launches, moves, keeps and waits for, and what a change adds.

    python tests/rehearse.py [--gpus=8,1] [--card=H100] [--stages=1,2,3,4] [--update] [--quick] [-- flags of train_gpt.py]

The trainer's own run() is walked on fake CUDA tensors, for each number of GPUs in a process of its own; every graph is
lowered and every kernel compiled to machine code for the card. What comes out is the ledger, tests/rehearsal.json:
without flags it is compared with the committed one, and --update writes it anew and prints the difference. It ends
with status 1 on a failure: a graph that breaks or is compiled again in the race, a kernel that spills, a wait for the
device in the timed loop that ALLOWED_WAITS does not name, a buffer of (tokens, vocabulary) in f32 or as large as a
table, growth beyond 2 %. --update accepts growth, and nothing else.
"""
from __future__ import annotations

import argparse
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

HERE = Path(__file__).resolve().parent
LEDGER = HERE / "rehearsal.json"
FORMAT = 1
TORCH, TRITON = "2.13.0", "3.7.1"        # whose internals phantom.py knows
MOST_GROWTH = 0.02
UNTOLD = {"set-up", "warm-up", "checkpoint"}          # phases off the clock, of which sums are kept and no timeline
LONGEST_REPEATED = 24                    # launches of the loss of one chunk of a validation
ALLOWED_WAITS = {                        # in the timed loop, and why
    "Clock.start": "the clock starts and stops behind what the device has done",
    "Clock.stop": "the same",
    "Log.flush": "the loss of a step one cycle back, which is there",
    "GPT.set_rotary": "at a stage's first step: 32 numbers from the host",
}


def why_not() -> str:
    """What keeps the rehearsal from running here; empty: nothing."""
    if sys.platform != "linux":
        return f"made for Linux, not {sys.platform}"
    if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which("c++"):
        return "no C++ compiler: install g++, or name one in CXX"
    for package, known in (("torch", TORCH), ("triton", TRITON)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"no {package}: pip install {package}=={known}"
        if found.partition("+")[0] != known:
            return f"{package} {found}: its internals are known of {known} only"
    if not importlib.metadata.version("torch").endswith("+cpu") and os.path.exists("/proc/driver/nvidia/version"):
        return "a machine with a GPU: its driver holds the places that the rehearsal fills"
    return ""


# ---- The ledger of one number of GPUs, from what walk.py has found
def segments_of(timeline: list[list]) -> list[list[list]]:
    """The timeline, cut in front of every mark."""
    parts: list[list[list]] = [[]]
    for item in timeline:
        if item[0] == "mark":
            parts.append([])
        parts[-1].append(item)
    return [part for part in parts if part]


def folded(names: list[list]) -> list[list]:
    """The items, with repetitions of up to LONGEST_REPEATED neighbours as ["repeat", times, neighbours]."""
    out: list[list] = []
    at = 0
    while at < len(names):
        times, length = 1, 1
        for width in range(1, LONGEST_REPEATED + 1):
            count = 1
            while names[at + count * width:at + (count + 1) * width] == names[at:at + width]:
                count += 1
            if count > 1 and count * width > times * length:
                times, length = count, width
        neighbours = names[at:at + length]
        out += [["repeat", times, neighbours]] if times > 1 else neighbours
        at += times * length
    return out


def world_of(walked: dict[str, Any]) -> dict[str, Any]:
    """A world of the ledger: equal segments of timelines once, and sums over each phase."""
    segments: dict[str, list] = {}
    name_of: dict[str, str] = {}                 # of a segment, by its content
    phases = {}
    for title, phase in walked["phases"].items():
        names = []
        parts = [] if title in UNTOLD else segments_of(phase["timeline"])
        for part in parts:
            part = folded(part)
            content = json.dumps(part)
            if content not in name_of:
                mark = part[0][1] if part[0][0] == "mark" else "start"
                name_of[content] = unused(f"{title}: {mark}", segments)
                segments[name_of[content]] = part
            names.append(["segment", name_of[content]])
        sums = sums_of(walked["kernels"], phase["timeline"])
        phases[title] = dict(timeline=folded(names), peak_bytes=phase["peak_bytes"],
                             saved_bytes=phase["saved_bytes"], **sums)
    facts = {name: walked[name] for name in ("graphs", "owned_bytes", "host_waits", "failures")}
    return dict(facts, phases=phases, segments=segments)


def unused(name: str, taken: dict) -> str:
    number = 2
    free = name
    while free in taken:
        free = f"{name} ({number})"
        number += 1
    return free


def sums_of(kernels: dict[str, dict], timeline: list[list]) -> dict[str, Any]:
    launches = size = collectives = collective_bytes = waits = 0
    flops: Counter = Counter()
    for kind, *rest in timeline:
        if kind == "run":
            key, count = rest
            kernel = kernels[key]
            launches += count
            size += count * kernel.get("bytes", 0)
            if kernel.get("flops"):
                flops[kernel["kind"] if kernel["kind"] == "attention" else kernel["dtype"]] += count * kernel["flops"]
        elif kind == "collective":
            collectives += 1
            collective_bytes += rest[2]
        elif kind == "host_wait":
            waits += 1
    return dict(launches=launches, bytes=size, flops=dict(flops), collectives=collectives,
                collective_bytes=collective_bytes, host_waits=waits)


def expand(world: dict[str, Any], timeline: list[list]) -> Iterator[list]:
    """A timeline's items, segments and repetitions written out."""
    for item in timeline:
        if item[0] == "segment":
            yield from expand(world, world["segments"][item[1]])
        elif item[0] == "repeat":
            for _ in range(item[1]):
                yield from expand(world, item[2])
        else:
            yield item


# ---- The file: a line for each kernel, graph and launch, so that differences can be read
OPENED = dict(kernels=1, worlds=2, graphs=1, host_waits=1, phases=2, segments=2)       # levels of brackets on own lines


def written(value: Any, levels: int = 1, indent: str = "") -> str:
    """Sorted JSON with that many levels of brackets opened."""
    if levels == 0 or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, sort_keys=True)
    inner = indent + " "
    if isinstance(value, list):
        rows = [inner + json.dumps(item) for item in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    rows = []
    for key in sorted(value):
        text = written(value[key], OPENED.get(key, levels - 1), inner)
        rows.append(f"{inner}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


# ---- Comparison
def totals_by_name(ledger: dict[str, Any], world: dict[str, Any], phase: dict[str, Any]) -> dict[str, Counter]:
    """Launches and bytes of a phase by readable name of the kernel."""
    totals: dict[str, Counter] = {}
    for kind, *rest in expand(world, phase["timeline"]):
        if kind != "run":
            continue
        key, count = rest
        kernel = ledger["kernels"][key]
        name = kernel["name"]
        if kernel["kind"] == "product":
            name = f"{name} {kernel['m']} x {kernel['n']} x {kernel['k']}"
        found = totals.setdefault(name, Counter())
        found["launches"] += count
        found["bytes"] += count * kernel.get("bytes", 0)
        found["flops"] += count * kernel.get("flops", 0)
    return totals


def numbers_of(facts: dict[str, Any]) -> dict[str, int]:
    """What may not grow, by name."""
    numbers = {}
    for name, value in facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[name] = value
        elif name == "flops":
            numbers |= {f"flops {dtype}": count for dtype, count in value.items()}
    return numbers


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """(world and phase, what, before, now) of every number that changed."""
    for world, found in new["worlds"].items():
        before = old["worlds"].get(world)
        if before is None:
            continue
        pairs = {"all": (before, found)}
        for phase in sorted(before["phases"].keys() | found["phases"].keys()):
            pairs[phase] = (before["phases"].get(phase, {}), found["phases"].get(phase, {}))
        for phase, (was, now) in pairs.items():
            numbers_before, numbers_now = numbers_of(was), numbers_of(now)
            for what in sorted(numbers_before.keys() | numbers_now.keys()):
                a, b = numbers_before.get(what, 0), numbers_now.get(what, 0)
                if a != b:
                    yield f"W = {world}, {phase}", what, a, b


def culprits(old: dict[str, Any], new: dict[str, Any], place: str, what: str) -> list[str]:
    """The kernels whose share of a number grew most, in words."""
    world, _, phase = place.removeprefix("W = ").partition(", ")
    measure = what.partition(" ")[0]
    if measure not in ("launches", "bytes", "flops") or phase == "all":
        return []
    sides = []
    for ledger in (old, new):
        of_world = ledger["worlds"][world]
        sides.append(totals_by_name(ledger, of_world, of_world["phases"].get(phase, dict(timeline=[]))))
    before, now = sides
    grown = []
    for name, found in now.items():
        growth = found[measure] - before.get(name, Counter())[measure]
        if growth > 0:
            grown.append((growth, name))
    return [f"{name} +{amount(growth, measure)}" for growth, name in sorted(grown, reverse=True)[:3]]


def amount(number: int, what: str) -> str:
    if "bytes" in what:
        return f"{number / 1e6:,.1f} MB"
    if what.startswith("flops"):
        return f"{number / 1e9:,.1f} GFLOP"
    return f"{number:,}"


def report(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Print what changed. Returns what grew by more than it may."""
    too_much = []
    for place, what, before, now in differences(old, new):
        share = f"{now / before - 1:+.1%}" if before else "new"
        line = f"{place}: {what} {amount(before, what)} -> {amount(now, what)} ({share})"
        if now > before:
            line += "".join(f"\n    {culprit}" for culprit in culprits(old, new, place, what))
        print(line)
        if now > before * (1 + MOST_GROWTH):
            too_much.append(line)
    for world, found in new["worlds"].items():
        before = old["worlds"].get(world, dict(graphs={}))["graphs"]
        changed = [name for name, graph in found["graphs"].items() if before.get(name, {}).get("hash") != graph["hash"]]
        if changed:
            print(f"W = {world}: other graphs: {'; '.join(changed)}")
    return too_much


def forbidden(new: dict[str, Any]) -> list[str]:
    """What --update does not accept either."""
    found = []
    for number, world in new["worlds"].items():
        place = f"W = {number}"
        found += [f"{place}: {x['kind']}: {x['where']}: {x['found']}" for x in world["failures"]]
        for line, count in world["host_waits"].items():
            if line.partition(":")[0] not in ALLOWED_WAITS:
                found.append(f"{place}: host wait: {line}: {count} times in the timed loop")
    return found


# ---- The command
def walk_all(worlds: Sequence[int], card: str, flags: Sequence[str], graphs: str = "lower",
             more: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
    """What walk.py finds for each number of GPUs, in processes side by side."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment.setdefault("REHEARSAL_CACHE", folder)
        processes = {}
        for world in worlds:
            command = [sys.executable, str(HERE / "walk.py"), f"--world={world}", f"--card={card}",
                       f"--graphs={graphs}", f"--out={folder}/{world}.json", *more, "--", *flags]
            processes[world] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        found = {}
        for world, process in processes.items():
            status = process.wait()
            result = Path(folder, f"{world}.json")
            if status != 0 or not result.exists():
                found[world] = dict(error=f"the walk at W = {world} ended with status {status}; its last lines say why")
            else:
                found[world] = json.loads(result.read_text())
        return found


def ledger_of(walked: dict[int, dict[str, Any]], card: str, flags: Sequence[str]) -> dict[str, Any]:
    kernels: dict[str, dict] = {}
    worlds = {}
    for world, found in walked.items():
        ledger = world_of(found)
        worlds[str(world)] = ledger
        for phase in ledger["phases"].values():
            for kind, *rest in expand(ledger, phase["timeline"]):
                if kind == "run":
                    kernels.setdefault(rest[0], found["kernels"][rest[0]])
    return dict(format=FORMAT, torch=TORCH, triton=TRITON, card=card, flags=list(flags), kernels=kernels, worlds=worlds)


def summary(ledger: dict[str, Any]) -> Iterator[str]:
    for number, world in ledger["worlds"].items():
        yield f"W = {number}: {len(world['graphs'])} graphs, {world['owned_bytes'] / 2**20:,.0f} MiB kept"
        for name, phase in world["phases"].items():
            if not phase["launches"]:
                continue
            flops = " + ".join(f"{count / 1e12:.2f} {kind}" for kind, count in sorted(phase["flops"].items()))
            yield (f"  {name:24}{phase['launches']:6} launches {phase['bytes'] / 1e9:8.1f} GB  TFLOP {flops or 0}; "
                   f"peak {phase['peak_bytes'] / 2**20:,.0f} MiB, saved {phase['saved_bytes'] / 2**20:,.0f} MiB, "
                   f"{phase['collectives']} collectives of {phase['collective_bytes'] / 1e6:,.0f} MB")
    kinds = Counter(kernel["kind"] for kernel in ledger["kernels"].values())
    spilled = sum(kernel.get("spills", 0) > 0 for kernel in ledger["kernels"].values())
    most = max((kernel.get("registers", 0) for kernel in ledger["kernels"].values()), default=0)
    yield f"{kinds['generated'] + kinds['triton']} kernels compiled, {spilled} spill, at most {most} registers"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rehearse.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="8,1", help="numbers of GPUs [%(default)s]")
    parser.add_argument("--card", default="H100", choices=("H100", "H200", "B200", "A100", "4090"))
    parser.add_argument("--stages", default="", help="lower the graphs of these only, such as 1,2 [all]")
    parser.add_argument("--update", action="store_true", help="write the ledger anew and print the difference")
    parser.add_argument("--ledger", default=str(LEDGER), help="to compare with, and to update")
    parser.add_argument("--out", default="", help="file for the ledger of this rehearsal")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    reason = why_not()
    if reason:
        print(f"the rehearsal is skipped: {reason}")
        return 0
    wanted = parse(argv)
    worlds = [int(number) for number in wanted.gpus.split(",")]
    more = [f"--stages={wanted.stages}"] if wanted.stages else []
    walked = walk_all(worlds, wanted.card, wanted.flags, more=more)
    errors = {world: found["error"] for world, found in walked.items() if "error" in found}
    for world, error in errors.items():
        print(f"W = {world} on {wanted.card}:\n{error}")
    if errors:
        return 1

    new = ledger_of(walked, wanted.card, wanted.flags)
    print("\n".join(summary(new)))
    if wanted.out:
        Path(wanted.out).write_text(written(new) + "\n")
    wrong = forbidden(new)
    path = Path(wanted.ledger)
    grown = []
    if path.exists():
        grown = report(json.loads(path.read_text()), new)
    if wanted.update and not wrong:
        path.write_text(written(new) + "\n")
        grown = []
    for line in wrong + [f"growth: {line}" for line in grown]:
        print(f"FAILED  {line}")
    return 1 if wrong or grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

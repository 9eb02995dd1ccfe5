"""Rehearse a run on GPUs that are not there: what it launches, moves, keeps and waits for, and what a change adds.

    python tests/rehearse.py [--gpus=8,1] [--card=H100] [--stages=1,2] [--update] [-- flags of train_gpt.py]
    python tests/rehearse.py --quick           the walk without graphs, and whether the first stage's graph is the same

The trainer's own train() is walked on fake CUDA tensors, for each number of GPUs in its own process; every graph is
lowered and every kernel compiled to machine code for the card. What comes out is the ledger, tests/rehearsal.json:
without flags it is compared with the committed one, and --update writes it anew and prints the difference. It ends
with status 1 on a failure: a graph that breaks or is compiled again in the race, a kernel that spills as it is
launched, a wait for the device in the timed loop that ALLOWED_WAITS does not name, a buffer of (tokens, vocabulary) in
f32, as large as a table, or in a backward as large as a gradient that has its place, growth beyond 2 %. --update
accepts growth, and nothing else. Status 2: a request that cannot be met.
REHEARSAL_CACHE names a folder that keeps what was compiled for the next call.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import price

HERE = Path(__file__).resolve().parent
LEDGER = HERE / "rehearsal.json"
TRAINER = HERE.parent / "train_gpt.py"
TORCH, TRITON = "2.13.0", "3.7.1"        # whose internals phantom.py knows
MOST_GROWTH = 0.02
UNTOLD = {"set-up", "warm-up", "checkpoint"}          # off the clock: of these, only memory is kept
EAGER = "eager"                          # in the place of a world: eight ranks, only the first stage's graph is traced
BAD_REQUEST = 2                          # status: nothing was walked
LINES_OF_LOG = 30                        # shown where a walk fails
LONGEST_REPEATED = 24, 400               # launches of the loss of one chunk of a validation, of one batch of it
ALLOWED_WAITS = {                        # in the timed loop, by line, and why
    "Clock.start: self.fabric.synchronize()": "the clock starts and stops after what the device has done",
    "Clock.stop: self.fabric.synchronize()": "the same",
    "Log.flush: copied.synchronize()": "the loss of a step one cycle back, which is there",
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
    if not importlib.metadata.version("torch").endswith("+cpu"):
        return "torch is built for a GPU, and holds the places that the rehearsal fills: install its CPU wheel"
    return ""


# ---- The ledger of one number of GPUs, from what walk.py has found
def segments_of(timeline: list[list]) -> list[list[list]]:
    """The timeline, cut before every mark."""
    parts: list[list[list]] = [[]]
    for item in timeline:
        if item[0] == "mark":
            parts.append([])
        parts[-1].append(item)
    return [part for part in parts if part]


def folded(items: list[list]) -> list[list]:
    """The items, with repetitions of neighbours as ["repeat", times, neighbours], short ones first."""
    for longest in LONGEST_REPEATED:
        items = folded_once(items, longest)
    return items


def folded_once(names: list[list], longest: int) -> list[list]:
    out: list[list] = []
    at = 0
    while at < len(names):
        times, length = 1, 1
        for width in range(1, longest + 1):
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
    off_the_clock = {}
    for title, phase in walked["phases"].items():
        memory = {name: phase[name] for name in ("peak_bytes", "at_peak", "saved_bytes", "saved")}
        if title in UNTOLD:
            off_the_clock[title] = memory
            continue
        names = []
        for part in segments_of(phase["timeline"]):
            part = folded(part)
            content = json.dumps(part)
            if content not in name_of:
                mark = part[0][1] if part[0][0] == "mark" else "start"
                name_of[content] = unused(f"{title}: {mark}", segments)
                segments[name_of[content]] = part
            names.append(["segment", name_of[content]])
        phases[title] = dict(timeline=folded(names), **sums_of(walked["kernels"], phase["timeline"]), **memory)
    facts = {name: walked[name] for name in ("graphs", "owned", "owned_bytes", "host_waits", "failures")}
    return dict(facts, phases=phases, off_the_clock=off_the_clock, segments=segments)


def eager_of(walked: dict[str, Any]) -> dict[str, Any]:
    """What a walk without graphs says as well: who is spoken to and waited for."""
    phases = {}
    for title, phase in walked["phases"].items():
        if title in UNTOLD:
            continue
        timeline = [item for item in phase["timeline"] if item[0] in ("collective", "host_wait")]
        sums = sums_of(walked["kernels"], timeline)
        numbers = {name: sums[name] for name in ("collectives", "collective_bytes", "host_waits")}
        phases[title] = dict(numbers, timeline=folded(timeline))
    facts = {name: walked[name] for name in ("graphs", "owned", "owned_bytes", "host_waits", "failures")}
    return dict(facts, phases=phases)


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
                flops[arithmetic_of(kernel)] += count * kernel["flops"]
        elif kind == "collective":
            collectives += 1
            collective_bytes += rest[2]
        elif kind == "host_wait":
            waits += 1
    return dict(launches=launches, bytes=size, flops=dict(flops), collectives=collectives,
                collective_bytes=collective_bytes, host_waits=waits)


def arithmetic_of(kernel: dict[str, Any]) -> str:
    """The kind of its flops."""
    return kernel["kind"] if kernel["kind"] == "attention" else kernel["dtype"]


expand = price.items_of


# ---- The file, to read
FACTS = {"card", "flags", "kernels", "worlds"}                # without which nothing can be compared


def ledger_in(path: Path) -> dict[str, Any] | None:
    """None if there is no file. Raises PriceError for one that is not a ledger."""
    if not path.exists():
        return None
    ledger = price.load(path)
    price.check_facts(f"{path}", ledger, FACTS)
    return ledger


# ---- and to write: a line for each kernel, graph and launch, so that differences can be read
OPENED = dict(kernels=1, worlds=2, eager=1, steps=1, graphs=1, host_waits=1, owned=1, phases=2, off_the_clock=2,
              segments=2, at_peak=1, saved=1)                 # levels of brackets on lines of their own


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
def worlds_of(ledger: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By what a reader calls them."""
    worlds = {f"W = {number}": world for number, world in ledger["worlds"].items()}
    if EAGER in ledger:
        worlds["W = 8 without graphs"] = ledger[EAGER]
    return worlds


BUFFERS = dict(peak_bytes="at_peak", saved_bytes="saved", owned_bytes="owned")         # what these numbers consist of


def shares(ledger: dict[str, Any], world: dict[str, Any], facts: dict[str, Any], what: str) -> Counter:
    """Who has which share of a number: kernels, buffers, collectives, lines. facts: a phase, or the world."""
    if what in BUFFERS:
        return Counter({name: size for name, (_, size) in facts.get(BUFFERS[what], {}).items()})
    measure, _, arithmetic = what.partition(" ")
    found: Counter = Counter()
    for kind, *rest in expand(world, facts.get("timeline", [])):
        if kind == "run" and measure in ("launches", "bytes", "flops"):
            key, count = rest
            kernel = ledger["kernels"][key]
            if arithmetic and not (kernel.get("flops") and arithmetic_of(kernel) == arithmetic):
                continue
            each = 1 if measure == "launches" else kernel.get(measure, 0)
            found[name_of_kernel(kernel)] += count * each
        elif kind == "collective" and measure.startswith("collective"):
            _, name, size, dtype, _ = rest
            found[f"{name} of {dtype}"] += size if measure == "collective_bytes" else 1
        elif kind == "host_wait" and measure == "host_waits":
            found[rest[0]] += 1
    return found


def name_of_kernel(kernel: dict[str, Any]) -> str:
    if kernel["kind"] == "product":
        return f"{kernel['name']} {kernel['m']} x {kernel['n']} x {kernel['k']}"
    return kernel["name"]


def numbers_of(facts: dict[str, Any]) -> dict[str, int]:
    """What may not grow, by name."""
    numbers = {}
    for name, value in facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[name] = value
        elif name == "flops":
            numbers |= {f"flops {dtype}": count for dtype, count in value.items()}
    return numbers


class Difference(NamedTuple):
    place: str                           # world and phase
    what: str
    before: int
    now: int
    culprits: list[str]                  # whose share grew most

    def __str__(self) -> str:
        share = f"{self.now / self.before - 1:+.1%}" if self.before else "new"
        change = f"{amount(self.before, self.what)} -> {amount(self.now, self.what)} ({share})"
        return "\n    ".join([f"{self.place}: {self.what} {change}", *self.culprits])


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Difference]:
    """Every number that changed, in what both have rehearsed."""
    known = worlds_of(old)
    for name, world in worlds_of(new).items():
        before = known.get(name)
        if before is None:
            continue
        pairs = {name: (before, world)}
        for phase, facts in world["phases"].items():
            pairs[f"{name}, {phase}"] = (before["phases"].get(phase, {}), facts)
        for place, (was, now) in pairs.items():
            numbers_before, numbers_now = numbers_of(was), numbers_of(now)
            for what in sorted(numbers_before.keys() | numbers_now.keys()):
                a, b = numbers_before.get(what, 0), numbers_now.get(what, 0)
                if a != b:
                    grown = shares(new, world, now, what) - shares(old, before, was, what)
                    most = [f"{who} +{amount(size, what)}" for who, size in grown.most_common(3)]
                    yield Difference(place, what, a, b, most if b > a else [])


def amount(number: int, what: str) -> str:
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
    for name, titles in changed_graphs(old, new).items():
        print(f"{name}: other graphs: {'; '.join(titles)}")
    return too_much


def changed_graphs(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    known = worlds_of(old)
    changed = {}
    for name, world in worlds_of(new).items():
        before = known.get(name, dict(graphs={}))["graphs"]
        titles = [title for title, graph in world["graphs"].items() if before.get(title) != graph]
        if titles:
            changed[name] = titles
    return changed


def forbidden(new: dict[str, Any]) -> list[str]:
    """What --update does not accept either."""
    found = []
    for name, world in worlds_of(new).items():
        found += [f"{name}: {x['kind']}: {x['where']}: {x['found']}" for x in world["failures"]]
        for line, count in world["host_waits"].items():
            if line not in ALLOWED_WAITS:
                found.append(f"{name}: host wait: {line}: {count} times in the timed loop")
    return found


# ---- What it may cost in time: a prediction
def prices(old: dict[str, Any] | None, new: dict[str, Any]) -> str:
    """Predicted times with the dearest lines, and how they differ from those of the ledger it is compared with."""
    try:
        rates = price.load(price.RATES)
        now = price.price(new, rates)
        page = price.text(now)
    except price.PriceError as error:                         # a card without a rate for what it is asked
        return f"no price: {error}"
    if old is None or old["card"] != new["card"]:
        return page
    try:
        before = price.price(old, rates)
    except price.PriceError as error:                         # a ledger of another format
        return f"{page}\nno price of the ledger before: {error}"
    return page + "\n" + price.difference(before, now)


# ---- The command
def jobs_of(worlds: Sequence[str], card: str, stages: str) -> dict[str, list[str]]:
    """Arguments of walk.py for each world, and for the walk without graphs."""
    jobs = {world: [f"--world={world}", f"--card={card}", f"--stages={stages}"] for world in worlds}
    if not stages and "8" in worlds:
        jobs[EAGER] = ["--world=8", f"--card={card}", "--graphs=quick"]
    return jobs


def walk_all(jobs: dict[str, list[str]], flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What walk.py finds with each of these arguments, in processes side by side."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment.setdefault("REHEARSAL_CACHE", folder)
        processes = {}
        for name, arguments in jobs.items():
            command = [sys.executable, str(HERE / "walk.py"), f"--out={folder}/{name}.json", *arguments, "--", *flags]
            with open(f"{folder}/{name}.log", "w") as log:
                processes[name] = subprocess.Popen(command, env=environment, stderr=log)
        return {name: found_by(process, Path(folder, name)) for name, process in processes.items()}


def found_by(process: subprocess.Popen, path: Path) -> dict[str, Any]:
    status = process.wait()
    result, log = path.with_suffix(".json"), path.with_suffix(".log")
    last_lines = "\n".join(log.read_text().splitlines()[-LINES_OF_LOG:])
    if status != 0 or not result.exists():
        return dict(error=f"the walk ended with status {status}:\n{last_lines}")
    found = json.loads(result.read_text())
    if "ended_by" in found:
        print(f"The walk ended before its end:\n{last_lines}")
    return found


def ledger_of(walked: dict[str, dict[str, Any]], card: str, flags: Sequence[str]) -> dict[str, Any]:
    kernels: dict[str, dict] = {}
    worlds = {}
    ledger = dict(format=price.FORMAT, torch=TORCH, triton=TRITON, card=card, flags=list(flags), kernels=kernels,
                  worlds=worlds, source_sha256=hashlib.sha256(TRAINER.read_bytes()).hexdigest())
    for name, found in walked.items():
        ledger["steps"] = found["steps"]                      # of the run: the same in all walks
        if name == EAGER:
            ledger[EAGER] = eager_of(found)
            continue
        found = dict(found, kernels=found["kernels"] | kernels)               # Inductor may count one in two ways
        worlds[name] = world_of(found)
        for phase in worlds[name]["phases"].values():
            for kind, *rest in expand(worlds[name], phase["timeline"]):
                if kind == "run":
                    kernels.setdefault(rest[0], found["kernels"][rest[0]])
    return ledger


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
    others = []
    for kernel in ledger["kernels"].values():
        others += kernel.get("others", ())
    spilling = [other["spills"] for other in others if other["spills"]]
    yield (f"{len(others)} other configurations of them, which a card may choose: {len(spilling)} spill, at most "
           f"{max(spilling, default=0)} bytes")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rehearse.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="8,1", type=gpus_wanted, help="numbers of GPUs [%(default)s]")
    parser.add_argument("--card", default="H100", choices=("H100", "H200", "B200", "A100", "4090"))
    parser.add_argument("--stages", default="", type=stages_wanted,
                        help="lower the graphs of these only, such as 1,2 [all]")
    parser.add_argument("--quick", action="store_true", help="walk without graphs, lower what changed")
    parser.add_argument("--update", action="store_true", help="write the ledger anew and print the difference")
    parser.add_argument("--ledger", default=str(LEDGER), help="to compare with, and to update")
    parser.add_argument("--out", default="", help="file for the ledger of this rehearsal")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, after --")
    wanted = parser.parse_args(argv)
    if wanted.quick and (wanted.update or wanted.stages):
        parser.error("--quick compares the first stage and no more: leave it out")
    return wanted


def gpus_wanted(text: str) -> list[str]:
    found = text.split(",")
    for world in found:
        if not re.fullmatch(r"[1-9]\d*", world):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers of GPUs, such as 8,1")
    return found


def stages_wanted(text: str) -> str:
    if not re.fullmatch(r"([1-9]\d*(,[1-9]\d*)*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of stages, such as 1,2")
    return text


def rehearse(wanted: argparse.Namespace, jobs: dict[str, list[str]]) -> dict[str, Any] | None:
    """The ledger of these walks; none if one of them could not be made, which is said."""
    walked = walk_all(jobs, wanted.flags)
    errors = {name: found["error"] for name, found in walked.items() if "error" in found}
    for name, error in errors.items():
        print(f"{name} on {wanted.card}:\n{error}")
    return None if errors else ledger_of(walked, wanted.card, wanted.flags)


def ended(failures: Sequence[str]) -> int:
    for failure in failures:
        print(f"FAILED  {failure}")
    return 1 if failures else 0


def quick(wanted: argparse.Namespace, old: dict[str, Any] | None) -> int:
    """The part of every test run."""
    if old is None or old["card"] != wanted.card:
        print(f"nothing to compare with: {wanted.ledger} has no {wanted.card}; --update makes a ledger")
        return BAD_REQUEST
    new = rehearse(wanted, {EAGER: jobs_of("8", wanted.card, "")[EAGER]})
    if new is None:
        return 1
    failures = forbidden(new) + report(old, new)
    if not failures and changed_graphs(old, new):
        lowered = rehearse(wanted, {"8": ["--world=8", f"--card={wanted.card}", "--stages=1", "--first-stage"]})
        if lowered is None:
            return 1
        failures = forbidden(lowered) + report(old, lowered)
        print("--update writes the whole difference into the ledger")
    return ended(failures)


def lost_by_update(wanted: argparse.Namespace, old: dict[str, Any]) -> bool:
    """Whether the ledger would hold less, or something else, than it does."""
    fewer = wanted.stages or not set(old["worlds"]) <= set(wanted.gpus)
    other = (wanted.card, wanted.flags) != (old["card"], old["flags"])
    return bool(fewer or other)


def main(argv: Sequence[str]) -> int:
    reason = why_not()
    if reason:
        print(f"the rehearsal is skipped: {reason}")
        return 0
    wanted = parse(argv)
    path = Path(wanted.ledger)
    try:
        old = ledger_in(path)
    except price.PriceError as error:
        print(error)
        return BAD_REQUEST
    if wanted.update and old is not None and lost_by_update(wanted, old):
        flags = " ".join(old["flags"]) or "no flags"
        kept = f"{old['card']}, W = {' and '.join(old['worlds'])}, all stages, {flags}"
        print(f"--update would lose what the ledger has: it is of {kept}; another --ledger=FILE holds others")
        return BAD_REQUEST
    if wanted.quick:
        return quick(wanted, old)

    new = rehearse(wanted, jobs_of(wanted.gpus, wanted.card, wanted.stages))
    if new is None:
        return 1
    print("\n".join(summary(new)))
    if wanted.out:
        Path(wanted.out).write_text(written(new) + "\n")
    failures = forbidden(new)
    if old is None or old["card"] != new["card"]:
        print(f"compared with nothing: {path.name} has no {new['card']}")
        grown = []
    else:
        grown = report(old, new)
    print(prices(old, new))
    if wanted.update and not failures:
        print("\n".join(grown))
        path.write_text(written(new) + "\n")
        return 0
    return ended(failures + grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

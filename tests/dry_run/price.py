"""Predict the time of each step and of a run from timelines and a table of rates. Needs no GPU and no torch.

Kernels run one after another on one stream and collectives on another. The first stream waits for the second where the
trainer waits. A kernel takes as long as the slowest of the resources it uses: arithmetic, bytes, special functions,
instructions. The expected costs store the time of each phase; `python tests/price.py` prints what a run takes then.
"""
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EXPECTED_COSTS, RATES = Path(__file__).with_name("expected_costs.json"), Path(__file__).with_name("rates.json")
PARTS = ("products", "memory-bound kernels", "attention", "exposed communication", "launches")
PART_OF_KIND = dict(product="products", attention="attention")          # all other kernels move memory
ATTENTION = ("FA2", "FA3")
PARITIES = ("even", "odd")
WARP = 32                                # threads
TILE = 128                               # queries, and keys, of an attention tile

def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))

def executed_tiles(bounds: Sequence[int], window: int) -> int:
    """Count the tiles that an attention kernel computes: causal, within documents and a window."""
    visited = 0
    for start, end in zip(bounds, bounds[1:]):
        for first in range(0, end - start, TILE):
            last = min(first + TILE, end - start) - 1
            visited += last // TILE - max(first - window, 0) // TILE + 1
    return visited


# ---- Rates
class Card:
    """The rates that a GPU is assumed to achieve, per second."""
    def __init__(self, rates: dict[str, Any], name: str) -> None:
        self.rates = {kind: rate["peak"] * rate["share"] for kind, rate in rates["cards"][name]["rates"].items()}
        # In s: the floor of a launch, the latency of a link. Factors: slack, on the time of every kernel; fused_pass,
        # the remaining fraction of a memory pass that a matmul fuses.
        self.fixed = {key: fact["value"] for key, fact in rates["fixed"].items()}
        self.attention = [kind for kind in ATTENTION if kind in self.rates]

    def seconds(self, kind: str, amount: float) -> float:
        return amount / self.rates[kind] if amount else 0.0

def resource_seconds(kernel: dict[str, Any], card: Card, attention: str) -> dict[str, float]:
    """Return the seconds of one launch by resource; they are used in parallel, so the largest value counts."""
    memory = "memory"
    if kernel["kind"] == "copy":                                              # between host and device
        memory = "host_link"
    elif "YBLOCK" in kernel.get("block", ()):  # a tiled kernel, which reads and writes in two orders
        memory = "transposing"
    seconds = {memory: card.seconds(memory, kernel["bytes"])}
    if kernel["kind"] == "attention":
        seconds[attention] = card.seconds(attention, kernel["flops"])
    elif kernel["kind"] == "product":
        precision = "float8" if kernel["dtype"].startswith("float8") else kernel["dtype"]
        # The epilogue of the matmul replaces a pass over memory.
        spared = card.seconds("memory", kernel.get("fused_bytes", 0))
        seconds[precision] = card.seconds(precision, kernel["flops"]) + card.fixed["fused_pass"] * spared
    elif "instructions" in kernel:
        warps = kernel["programs"] * kernel["warps"]
        seconds["special"] = card.seconds("special", warps * WARP * issued_per_warp(kernel, "special"))
        seconds["issue"] = card.seconds("issue", warps * issued_per_warp(kernel, "instructions"))
    return seconds

def issued_per_warp(kernel: dict[str, Any], counter: str) -> int:
    """Count what one warp issues: the machine code once, and the body of each loop for every further iteration."""
    total = kernel[counter]
    for loop in kernel.get("loops", ()):
        total += loop[counter] * (loop.get("trips", 1) - 1)
    return total


# ---- The timeline
class Streams:
    """Simulates a compute stream and a stream of collectives. Times are in s since the first step."""
    def __init__(self, walk: dict[str, Any], world_size: str, card: Card, attention: str) -> None:
        self.walk = walk
        self.ranks = int(world_size)
        self.card = card
        self.attention = attention
        self.compute_end = 0.0                                                # end of the last kernel
        self.link_end = 0.0                                                   # end of the last collective
        self.collective_ends = {}                                             # id -> end of a collective
        self.parts = Counter()                                                # ms of the current step

    def simulate(self, phase: str) -> Counter:
        self.parts = Counter()
        self.collective_ends = {f"before {label}": end for label, end in self.collective_ends.items()}
        for kind, *item in self.walk["phases"][phase]["timeline"]:
            if kind == "run":
                self.launch(*item)
            elif kind == "collective":
                self.start_collective(*item)
            elif kind == "wait":
                label, = item                                 # an index, or `before` and its index in the previous step
                exposed = self.collective_ends.get(label, 0.0) - self.compute_end
                self.add_time("exposed communication", max(0.0, exposed))
        return self.parts

    def launch(self, label: str, count: int) -> None:
        kernel = self.walk["kernels"][label]
        seconds = resource_seconds(kernel, self.card, self.attention)
        work = self.card.fixed["slack"] * max(seconds.values())
        below_floor = max(0.0, self.card.fixed["launch_floor"] - work)
        self.add_time(PART_OF_KIND.get(kernel["kind"], "memory-bound kernels"), count * work)
        self.add_time("launches", count * below_floor)

    def add_time(self, part: str, seconds: float) -> None:
        self.parts[part] += 1000 * seconds
        self.compute_end += seconds

    def start_collective(self, label: int, name: str, size: int, _: str) -> None:
        """Start a collective after all earlier kernels and all earlier collectives have ended."""
        passes = 2 if name.startswith("all_reduce") else 1  # reduce-scatter, then all-gather
        bytes_sent = passes * size * (self.ranks - 1) / self.ranks
        start = max(self.link_end, self.compute_end)
        self.link_end = start + self.card.fixed["link_latency"] + self.card.seconds("link", bytes_sent)
        self.collective_ends[label] = self.link_end

def price_phases(walk: dict[str, Any], world_size: str, card: Card, attention: str) -> dict[str, Counter]:
    """Return the ms of each phase by part. Steps follow a cycle of their stage, other phases follow nothing."""
    priced = {}
    for stage in list_stages(walk["phases"]):
        streams = Streams(walk, world_size, card, attention)
        cycle = cycle_phases(walk["phases"], stage).values()
        for name in (*cycle, *cycle):                         # the second time counts
            priced[name] = streams.simulate(name)
    for name in walk["phases"].keys() - priced.keys():
        priced[name] = Streams(walk, world_size, card, attention).simulate(name)
    return priced


# ---- The prediction
def cycle_phases(phases: dict[str, Any], stage: str) -> dict[str, str]:
    names = {parity: f"{stage} {parity} step" for parity in PARITIES}
    return {parity: name for parity, name in names.items() if name in phases}

def list_stages(phases: dict[str, Any]) -> list[str]:
    names = [re.fullmatch(r"(stage \d+) (even|odd) step", name) for name in phases]
    return sorted({match[1] for match in names if match})

def mean_step(costs: dict[str, Any], world_size: str, attention: str, stage: str) -> tuple[int, dict]:
    """Return how many steps of a stage a run has, and the ms of their mean by part."""
    phases = costs["worlds"][world_size]["phases"]
    counts = {name: costs["steps"][stage][parity] for parity, name in cycle_phases(phases, stage).items()}
    steps = sum(counts.values())
    parts = dict.fromkeys(PARTS, 0.0)
    for name, count in counts.items():
        for part, ms in phases[name]["price"][attention].items():
            parts[part] += count / max(1, steps) * ms
    return steps, parts

def stage_times(costs: dict[str, Any], world_size: str, attention: str, stages: Iterable[str],
                parts: Sequence[str] = PARTS) -> list[float]:
    """Return the ms of these parts in the mean step of each stage, and the s of these stages in a run."""
    times = []
    seconds = 0.0
    for stage in stages:
        steps, ms = mean_step(costs, world_size, attention, stage)
        times.append(sum(ms[part] for part in parts))
        seconds += steps * times[-1] / 1000
    return [*times, seconds]


# ---- Output
def format_table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head]
    for row in rows:
        lines.append([f"{value:.2f}" if isinstance(value, float) else str(value) for value in row])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

def format_prediction(costs: dict[str, Any]) -> str:
    pages = [f"Prediction for {costs['card']}, from the dry run and the table of rates: not measured."]
    for world_size in sorted(costs["worlds"], key=int, reverse=True):
        stages = list_stages(costs["worlds"][world_size]["phases"])
        rows = []
        for attention in costs["attention"]:
            of_stages = functools.partial(stage_times, costs, world_size, attention, stages)
            rows += [[f"{attention}, {part}", *of_stages([part])] for part in PARTS]
            rows.append([f"{attention}, mean step", *of_stages()])
        pages += [f"World size {world_size}, predicted:", format_table(["ms", *stages, "s per run"], rows)]
    return "\n\n".join(pages) + "\n"

def format_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Format both predictions and their difference, for the world sizes and stages of both."""
    pages = []
    for world_size in [world_size for world_size in new["worlds"] if world_size in old["worlds"]]:
        old_stages, stages = (list_stages(costs["worlds"][world_size]["phases"]) for costs in (old, new))
        stages = [stage for stage in stages if stage in old_stages]
        rows = []
        for attention in new["attention"]:
            before, now = (stage_times(costs, world_size, attention, stages) for costs in (old, new))
            rows += [[f"{attention}, before", *before], [f"{attention}, now", *now],
                     [f"{attention}, more", *(f"{b - a:+.2f}" for a, b in zip(before, now))]]
        pages += [f"World size {world_size}, predicted before and now:",
                  format_table(["ms per mean step", *stages, "s per run in these"], rows)]
    return "\n\n".join(pages) + "\n"

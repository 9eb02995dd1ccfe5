"""Predict the time of each step and of a run from timelines and a table of rates. Needs no GPU and no torch.

    python tests/price.py [FILE] [--measured=logs/RUN]

Kernels run one after another on one stream and collectives on another. The first stream waits for the second where the
trainer waits. A kernel takes as long as the slowest of the resources it uses: arithmetic, bytes, special functions,
instructions. FILE has either expected costs with stored prices [the committed ones], or timelines. `dry_run.py --out`
writes timelines, and records 04 and 06 contain some. --measured adds the times of a real run.
"""
from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))
from tools import files                  # noqa: E402

EXPECTED_COSTS, RATES = Path(__file__).with_name("expected_costs.json"), Path(__file__).with_name("rates.json")
FORMAT = 2                               # timeline format
PARTS = ("products", "memory-bound kernels", "attention", "exposed communication", "launches")
PART_OF_KIND = dict(product="products", attention="attention")          # all other kernels move memory
OTHERS = "others"                        # the sum of the lines that expected costs do not name
ATTENTION = ("FA2", "FA3")
PARITIES = ("even", "odd")
WARP = 32                                # threads
# Steps that measurements exclude at the start and at the end of a stage, because the host runs ahead there.
SETTLING_STEPS, LEAVING_STEPS = 20, 5
TILE = 128                               # queries, and keys, of an attention tile

class PriceError(Exception):
    """One sentence that says what is wrong, and what would work."""

def load(path: Path) -> dict[str, Any]:
    """Load a JSON file that may be compressed (NAME or NAME.gz)."""
    try:
        return json.loads(files.read_bytes(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise PriceError(f"{path} must be expected costs or timelines of the dry run: {error}") from None

def executed_tiles(bounds: Sequence[int], window: int) -> int:
    """Count the tiles that an attention kernel with 128 x 128 blocks computes: causal, within documents and a window.
    """
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
        self.name = name
        self.rates = {kind: rate["peak"] * rate["share"] for kind, rate in rates["cards"][name]["rates"].items()}
        fixed = {key: fact["value"] for key, fact in rates["fixed"].items()}
        self.launch_floor = fixed["launch_floor"]                             # s
        self.link_latency = fixed["link_latency"]                             # s
        self.slack = fixed["slack"]                                           # factor on the time of every kernel
        self.fused_pass = fixed.get("fused_pass", 0.0)  # remaining fraction of a memory pass that a matmul fuses
        self.attention = [kind for kind in ATTENTION if kind in self.rates]

    def seconds(self, kind: str, amount: float) -> float:
        if not amount:
            return 0.0
        if kind not in self.rates:
            raise PriceError(f"rates.json has no rate of {kind!r} for {self.name}: add it, or repeat the dry run with "
                             f"--card={self.name}")
        return amount / self.rates[kind]

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
        seconds[precision] = card.seconds(precision, kernel["flops"]) + card.fused_pass * spared
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
@dataclass
class Step:
    """The time of one step in ms: total, by part, and by line."""
    ms: float = 0.0
    parts: Counter = field(default_factory=Counter)
    lines: Counter = field(default_factory=Counter)

def expand_timeline(walk: dict[str, Any], timeline: Iterable[list]) -> Iterator[list]:
    """Yield the items of a timeline with segments and repetitions expanded. walk: the entry of one world size."""
    for item in timeline:
        if item[0] == "segment":
            yield from expand_timeline(walk, walk["segments"][item[1]])
        elif item[0] == "repeat":
            for _ in range(item[1]):
                yield from expand_timeline(walk, item[2])
        else:
            yield item

class Streams:
    """Simulates a compute stream and a stream of collectives. Times are in s since the first step."""
    def __init__(self, timelines: dict[str, Any], world_size: str, card: Card, attention: str) -> None:
        self.kernels = timelines["kernels"]
        self.walk = timelines["worlds"][world_size]
        self.ranks = int(world_size)
        self.card = card
        self.attention = attention
        self.compute_end = 0.0                                                # end of the last kernel
        self.link_end = 0.0                                                   # end of the last collective
        self.collective_ends = {}                                             # id -> end and name of a collective
        self.step = Step()

    def simulate(self, phase: str) -> Step:
        start = self.compute_end
        self.step = Step()
        self.collective_ends = {f"before {label}": end for label, end in self.collective_ends.items()}
        items = list(expand_timeline(self.walk, self.walk["phases"][phase]["timeline"]))
        self.micro_batch_tokens = micro_batch_tokens(items, self.kernels)
        for kind, *item in items:
            if kind == "run":
                self.launch(*item)
            elif kind == "collective":
                self.start_collective(*item)
            elif kind == "wait":
                self.wait(item[0])
        self.step.ms = 1000 * (self.compute_end - start)
        return self.step

    def launch(self, label: str, count: int) -> None:
        kernel = self.kernels[label]
        seconds = resource_seconds(kernel, self.card, self.attention)
        work = self.card.slack * max(seconds.values())
        below_floor = max(0.0, self.card.launch_floor - work)
        self.add_time(PART_OF_KIND.get(kernel["kind"], "memory-bound kernels"), count * work)
        self.add_time("launches", count * below_floor)
        name = line_name(kernel, self.micro_batch_tokens)
        self.step.lines[name, kernel["kind"]] += 1000 * count * (work + below_floor)

    def add_time(self, part: str, seconds: float) -> None:
        self.step.parts[part] += 1000 * seconds
        self.compute_end += seconds

    def start_collective(self, label: int, name: str, size: int, *_: str) -> None:
        """Start a collective after all earlier kernels and all earlier collectives have ended."""
        passes = 2 if name.startswith("all_reduce") else 1  # reduce-scatter, then all-gather
        bytes_sent = passes * size * (self.ranks - 1) / self.ranks
        start = max(self.link_end, self.compute_end)
        self.link_end = start + self.card.link_latency + self.card.seconds("link", bytes_sent)
        self.collective_ends[label] = self.link_end, name

    def wait(self, label: int | str) -> None:
        """Wait for a collective. label: its index, or `before` and its index in the previous step."""
        end, name = self.collective_ends.get(label, (0.0, ""))
        exposed = end - self.compute_end
        if exposed > 0:
            self.add_time("exposed communication", exposed)
            self.step.lines[f"wait for {name}", "collective"] += 1000 * exposed

def micro_batch_tokens(items: Iterable[list], kernels: dict[str, Any]) -> int:
    """Return the number of tokens of a micro-batch: the fewest positions in an attention call; 0 if unknown."""
    token_counts = set()
    for kind, *item in items:
        if kind == "run" and kernels[item[0]]["kind"] == "attention":
            token_counts.add(kernels[item[0]]["tokens"])
    return min(token_counts, default=0)

def line_name(kernel: dict[str, Any], tokens: int) -> str:
    """Return the name of a kernel's line, equal in all stages: matmuls have T for the tokens of a micro-batch."""
    if kernel["kind"] != "product":
        return kernel["name"]
    sizes = ["T" if kernel[axis] == tokens else str(kernel[axis]) for axis in ("m", "n", "k")]
    repeated = f"{kernel['batch']} x " if kernel["batch"] > 1 else ""
    return f"{kernel['name']} {kernel['dtype']} {repeated}({', '.join(sizes)})"


# ---- The prediction
def price(timelines: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """Predict by world size and kind of attention the time of each stage (ms per step) and of the run (s)."""
    if timelines.get("format") != FORMAT:
        raise PriceError(f"these timelines have format {timelines.get('format')}, not {FORMAT}: repeat the dry run "
                         "with --out=FILE")
    card = Card(rates, timelines["card"])
    return build_prediction(timelines, card.attention, functools.partial(price_steps, timelines, card))

def stored_prediction(costs: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction that is stored in expected costs."""

    def get_steps(world_size: str, attention: str, stage: str) -> dict[str, Step]:
        steps = {}
        for parity, name in cycle_phases(costs, world_size, stage).items():
            parts = Counter(costs["worlds"][world_size]["phases"][name]["price"][attention])
            steps[parity] = Step(sum(parts.values()), parts)
        return steps
    return build_prediction(costs, costs["attention"], get_steps)

def build_prediction(timelines: dict[str, Any], attentions: list[str], get_steps: Callable) -> dict[str, Any]:
    """Build a prediction from get_steps(world_size, attention, stage), which returns an even and an odd step."""
    by_world_size = {}
    for world_size in sorted(timelines["worlds"], key=int, reverse=True):
        by_world_size[world_size] = {}
        for attention in attentions:
            stages = {}
            for stage in list_stages(timelines, world_size):
                counts = timelines["steps"].get(stage, {})
                stages[stage] = average_steps(get_steps(world_size, attention, stage), counts)
            by_world_size[world_size][attention] = dict(stages=stages) | sum_run(stages)
    return dict(card=timelines["card"], worlds=by_world_size)

def price_steps(timelines: dict[str, Any], card: Card, world_size: str, attention: str, stage: str) -> dict[str, Step]:
    """Simulate one cycle of a stage, then an even and an odd step to return. Steps without a timeline are omitted."""
    streams = Streams(timelines, world_size, card, attention)
    cycle = cycle_phases(timelines, world_size, stage)
    for name in cycle.values():
        streams.simulate(name)
    return {parity: streams.simulate(name) for parity, name in cycle.items()}

def cycle_phases(timelines: dict[str, Any], world_size: str, stage: str) -> dict[str, str]:
    names = {parity: f"{stage} {parity} step" for parity in PARITIES}
    return {parity: name for parity, name in names.items() if name in timelines["worlds"][world_size]["phases"]}

def list_stages(timelines: dict[str, Any], world_size: str) -> list[str]:
    """List the stages that have a timeline, in order."""
    names = [re.fullmatch(r"(stage \d+) (even|odd) step", name) for name in timelines["worlds"][world_size]["phases"]]
    return sorted({match[1] for match in names if match})

def average_steps(steps: dict[str, Step], counts: dict[str, int]) -> dict[str, Any]:
    """Return the even and the odd step of a stage, and their mean weighted by how often the run takes each."""
    counts = {parity: counts.get(parity, 0) for parity in steps}
    total = sum(counts.values())
    mean = Step()
    for parity, step in steps.items():
        fraction = counts[parity] / total if total else 1 / len(steps)
        mean.ms += fraction * step.ms
        for part, ms in step.parts.items():
            mean.parts[part] += fraction * ms
    by_parity = {parity: dict(ms=step.ms, parts=dict(step.parts)) for parity, step in steps.items()}
    return dict(steps=total, **by_parity, mean=dict(ms=mean.ms, parts={part: mean.parts[part] for part in PARTS}))

def sum_run(stages: dict[str, Any]) -> dict[str, Any]:
    """Sum the steps of a run, in s: the total, and by part."""
    total = 0.0
    parts = dict.fromkeys(PARTS, 0.0)
    for found in stages.values():
        ksteps = found["steps"] / 1000
        total += ksteps * found["mean"]["ms"]
        for part, ms in found["mean"]["parts"].items():
            parts[part] += ksteps * ms
    return dict(run_s=total, run_parts_s=parts)


# ---- Output
def format_table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    lines = [head.split(" | ")]
    for row in rows:
        lines.append([format_cell(value) for value in row])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

def format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)

def format_prediction(prediction: dict[str, Any]) -> str:
    pages = [f"Prediction for {prediction['card']}, from the dry run and the table of rates: not measured."]
    for world_size, by_attention in prediction["worlds"].items():
        stages = next(iter(by_attention.values()))["stages"]
        columns = " | ".join([*stages, "s per run"])
        rows = []
        for attention, found in by_attention.items():
            for step in (*PARITIES, "mean"):
                times = [stage.get(step, {}).get("ms") for stage in found["stages"].values()]
                rows.append([f"{attention}, {step} step", *times, found["run_s"] if step == "mean" else None])
        pages += [f"World size {world_size}, predicted:", format_table(f"ms | {columns}", rows)]

        for attention, found in by_attention.items():
            rows = []
            for part, seconds in found["run_parts_s"].items():
                times = [stage["mean"]["parts"][part] for stage in found["stages"].values()]
                rows.append([part, *times, seconds])
            pages += [f"Where the time goes with {attention}, ms per mean step, predicted:",
                      format_table(f"ms | {columns}", rows)]
    return "\n\n".join(pages) + "\n"


# ---- The cost of a change
def format_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Format both predictions and their difference, for the world sizes, kinds of attention and stages of both."""
    pages = []
    for world_size in [world_size for world_size in new["worlds"] if world_size in old["worlds"]]:
        rows = []
        stages = []
        for attention, found in new["worlds"][world_size].items():
            old_found = old["worlds"][world_size].get(attention)
            if not old_found:
                continue
            stages = [stage for stage in found["stages"] if stage in old_found["stages"]]
            before, now = (stage_and_run_times(run, stages) for run in (old_found, found))
            rows += [[f"{attention}, before", *before], [f"{attention}, now", *now],
                     [f"{attention}, more", *(f"{b - a:+.2f}" for a, b in zip(before, now))]]
        pages += [f"World size {world_size}, predicted before and now:",
                  format_table(" | ".join(["ms per mean step", *stages, "s per run in these"]), rows)]
    return "\n\n".join(pages) + "\n"

def stage_and_run_times(found: dict[str, Any], stages: list[str]) -> list[float]:
    """Return the ms of the mean step of each stage, and the s of these stages in a run."""
    times = [found["stages"][stage]["mean"]["ms"] for stage in stages]
    return [*times, sum(found["stages"][stage]["steps"] * ms for stage, ms in zip(stages, times)) / 1000]


# ---- Measured runs
def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one type in the log of a run."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [event for event in events if event["type"] == kind]

def measured_stages(folder: Path) -> dict[str, float | None]:
    """Return the mean ms per step of each stage of a run; None for a stage that its log has no times of."""
    header, = events_of(folder, "header")
    ms_after = {0: 0.0} | {event["step"]: event["train_time_ms"] for event in events_of(folder, "step")}
    found = {}
    for number, span in enumerate(stage_spans(header["config"], max(ms_after)), 1):
        first = span.start + min(SETTLING_STEPS, len(span) // 4)
        last = span.stop - min(LEAVING_STEPS, len(span) // 8)
        found[f"stage {number}"] = None
        if first < last and first in ms_after and last in ms_after:
            found[f"stage {number}"] = (ms_after[last] - ms_after[first]) / (last - first)
    return found

def stage_spans(config: dict[str, Any], steps: int) -> list[range]:
    """Compute the steps of each stage of a run by the rule of Schedule, which this tool does not import."""
    stages, scheduled = len(config["stages"]), config["num_scheduled_steps"]
    bounds = [round(scheduled * i / (stages - 1)) for i in range(stages)]
    bounds = [min(bound, steps) for bound in (*bounds, scheduled + config["num_extension_steps"])]
    return [range(*pair) for pair in zip(bounds, bounds[1:])]

def format_measured(folder: Path, prediction: dict[str, Any]) -> str:
    """Format the times of a training run next to the prediction for the same number of GPUs."""
    try:
        header, = events_of(folder, "header")
        measured = measured_stages(folder)
        world = prediction["worlds"][str(header["world_size"])]
    except (OSError, ValueError, LookupError) as error:
        raise PriceError(f"{folder} must be the directory of a run with a world size of the dry run: "
                         f"{type(error).__name__}: {error}") from None
    rows = []
    for attention, found in world.items():
        for stage, ms in measured.items():
            predicted = found["stages"].get(stage, {}).get("mean", {}).get("ms")
            rows.append([attention, stage, predicted, ms, ms / predicted if ms and predicted else None])
    title = f"A measured run (attention: {header['attention']}) next to the prediction, ms per step:"
    return f"{title}\n\n{format_table('with | of | predicted | measured | measured / predicted', rows)}\n"


# ---- The command
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("price", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=EXPECTED_COSTS,
                        help="expected costs, or timelines [the committed expected costs]")
    parser.add_argument("--measured", type=Path, help="the directory of a run")
    args = parser.parse_args(argv)
    try:
        content = load(args.file)
        prediction = price(content, load(RATES)) if "kernels" in content else stored_prediction(content)
        print(format_prediction(prediction))
        if args.measured:
            print(format_measured(args.measured, prediction))
    except PriceError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

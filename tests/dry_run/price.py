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
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))
from tools import files                  # noqa: E402

EXPECTED_COSTS, RATES = Path(__file__).with_name("expected_costs.json"), Path(__file__).with_name("rates.json")
FORMAT = 2                               # timeline format
PARTS = ("products", "memory-bound kernels", "attention", "exposed communication", "launches")
PART_OF_KIND = {"product": "products", "attention": "attention", "collective": "exposed communication", "": ""}
OTHERS = "others"                        # the sum of the lines that expected costs do not name
ATTENTION = ("FA2", "FA3")
PARITIES = ("even", "odd")
WARP = 32                                # threads
SHOWN_LINES = 10                         # per table
# Steps that measurements exclude at the start and at the end of a stage, because the host runs ahead there.
SETTLING_STEPS, LEAVING_STEPS = 20, 5
MIN_SHOWN_CHANGE_S = 0.005               # per run; smaller changes of a line are not shown

class PriceError(Exception):
    """An error that says what was found, what was expected, and how to fix it."""
    def __init__(self, what: str, found: object, expected: object, hint: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  hint:     {hint}")

def load(path: Path) -> dict[str, Any]:
    """Load the object of a JSON file that may be compressed (NAME or NAME.gz). Raises PriceError."""
    try:
        content = json.loads(files.read_bytes(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise PriceError(f"{path}", found=error, expected="a JSON file",
                         hint="give another file; python tests/dry_run.py --update writes expected costs") from None
    if not isinstance(content, dict):
        raise PriceError(f"{path}", found=f"a {type(content).__name__}", expected="a JSON object",
                         hint="give another file")
    return content


# ---- Rates
class Card:
    """The rates that a GPU is assumed to achieve, per second."""
    def __init__(self, rates: dict[str, Any], name: str) -> None:
        if name not in rates["cards"]:
            known = ", ".join(rates["cards"])
            raise PriceError("unknown card", found=name, expected=f"one of {known}",
                             hint="add it to tests/dry_run/rates.json")
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
            raise PriceError(f"rate of {kind!r} on {self.name}", found="not in tests/dry_run/rates.json",
                             expected="a rate for everything in the timelines",
                             hint=f"make timelines for this card: python tests/dry_run.py --card={self.name}")
        return amount / self.rates[kind]

def resource_seconds(kernel: dict[str, Any], card: Card, attention: str) -> dict[str, float]:
    """Return the seconds of one launch by resource. Resources are used in parallel, so the largest value counts."""
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
        self.add_time(part_of_kind(kernel["kind"]), count * work)
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

def part_of_kind(kind: str) -> str:
    """Return the part of the time that a kind of kernel belongs to. All kinds that are not listed move memory."""
    return PART_OF_KIND.get(kind, "memory-bound kernels")

def micro_batch_tokens(items: Iterable[list], kernels: dict[str, Any]) -> int:
    """Return the number of tokens of a micro-batch; 0 if unknown.

    It is the smallest number of positions in an attention call, because paired heads have two positions per token.
    """
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
        raise PriceError("timelines", found=f"format {timelines.get('format')}", expected=FORMAT,
                         hint="python tests/dry_run.py --out=FILE writes them")
    card = Card(rates, timelines["card"])
    return build_prediction(timelines, card.attention, functools.partial(price_steps, timelines, card))

def stored_prediction(costs: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction that is stored in expected costs. It has only the lines of the first kind of attention."""

    def get_steps(world_size: str, attention: str, stage: str) -> dict[str, Step]:
        steps = {}
        for parity, name in cycle_phases(costs, world_size, stage).items():
            phase = costs["worlds"][world_size]["phases"][name]
            parts = Counter(phase["price"][attention])
            lines = Counter()
            if attention == costs["attention"][0]:
                for line, facts in phase["lines"].items():
                    lines[line, facts["kind"]] = facts.get("ms", 0.0)
            steps[parity] = Step(sum(parts.values()), parts, lines)
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
    by_parity = {parity: dict(ms=step.ms, parts=dict(step.parts)) for parity, step in steps.items()}
    mean = Step()
    for parity, step in steps.items():
        fraction = counts[parity] / total if total else 1 / len(steps)
        mean.ms += fraction * step.ms
        for part, ms in step.parts.items():
            mean.parts[part] += fraction * ms
        for line, ms in step.lines.items():
            mean.lines[line] += fraction * ms
    parts = {part: mean.parts[part] for part in PARTS}
    lines = [[name, part_of_kind(kind), ms] for (name, kind), ms in mean.lines.most_common() if ms]
    return dict(steps=total, **by_parity, mean=dict(ms=mean.ms, parts=parts), lines=lines)

def sum_run(stages: dict[str, Any]) -> dict[str, Any]:
    """Sum the steps of a run, in s: the total, by part, and the most expensive lines."""
    total = 0.0
    parts = dict.fromkeys(PARTS, 0.0)
    seconds = Counter()
    by_stage = defaultdict(dict)
    for stage, found in stages.items():
        ksteps = found["steps"] / 1000
        total += ksteps * found["mean"]["ms"]
        for part, ms in found["mean"]["parts"].items():
            parts[part] += ksteps * ms
        for name, part, ms in found["lines"]:
            seconds[name, part] += ksteps * ms
            by_stage[name, part][stage] = ms
    lines = []
    seconds.pop((OTHERS, ""), None)
    for (name, part), s in seconds.most_common(SHOWN_LINES):
        lines.append(dict(name=name, part=part, s=s, ms=by_stage[name, part]))
    return dict(run_s=total, run_parts_s=parts, most_expensive=lines)


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
        first, *_ = by_attention
        columns = " | ".join([*by_attention[first]["stages"], "s per run"])
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

        rows = []
        for line in by_attention[first]["most_expensive"]:
            times = [line["ms"].get(stage) for stage in by_attention[first]["stages"]]
            rows.append([line["name"], line["part"], *times, line["s"]])
        pages += [f"The {SHOWN_LINES} most expensive lines with {first}, predicted:",
                  format_table(f"line | part | {columns}", rows)]
    return "\n\n".join(pages) + "\n"


# ---- The cost of a change
def format_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Format two predictions side by side, for the world sizes, kinds of attention and stages that both have."""
    pages = []
    for world_size in [world_size for world_size in new["worlds"] if world_size in old["worlds"]]:
        old_world, new_world = old["worlds"][world_size], new["worlds"][world_size]
        first, *others = [attention for attention in new_world if attention in old_world]
        stages = [stage for stage in new_world[first]["stages"] if stage in old_world[first]["stages"]]
        rows = []
        for attention in (first, *others):
            times = [stage_and_run_times(prediction[attention], stages) for prediction in (old_world, new_world)]
            rows += [[f"{attention}, before", *times[0]], [f"{attention}, now", *times[1]]]
            rows.append([f"{attention}, more", *(f"{round(b - a, 2) + 0:+.2f}" for a, b in zip(*times))])
        changed = changed_lines(old_world[first], new_world[first], stages)
        pages += [f"World size {world_size}, predicted before and now:",
                  format_table(" | ".join(["ms per mean step", *stages, "s per run in these"]), rows),
                  f"The {SHOWN_LINES} lines that changed most with {first}, predicted:",
                  format_table("line | part | more s per run in these", changed)]
    return "\n\n".join(pages) + "\n"

def stage_and_run_times(found: dict[str, Any], stages: list[str]) -> list[float]:
    """Return the ms of the mean step of each stage, and the s of these stages in a run."""
    times = [found["stages"][stage]["mean"]["ms"] for stage in stages]
    return [*times, sum(found["stages"][stage]["steps"] * ms for stage, ms in zip(stages, times)) / 1000]

def changed_lines(old: dict[str, Any], new: dict[str, Any], stages: list[str]) -> list[list]:
    """List [line, part, additional s per run]. If a fusion changed, one line disappears and another one appears."""
    growth = Counter()
    parts = {}
    for stage in stages:
        seconds = Counter(), Counter()
        for found, by_line in zip((old, new), seconds):
            for name, part, ms in found["stages"][stage]["lines"]:
                by_line[name] += found["stages"][stage]["steps"] * ms / 1000
                parts[name] = part
        growth.update(growth_by_line(*seconds))
    shown = [name for name in growth if abs(growth[name]) >= MIN_SHOWN_CHANGE_S]
    shown.sort(key=lambda name: (-abs(growth[name]), name))
    return [[name, parts.get(name, ""), f"{growth[name]:+.2f}"] for name in shown[:SHOWN_LINES]]

def growth_by_line(old: dict[str, float], new: dict[str, float]) -> Counter:
    """Return the growth of each line. A line that `old` does not name is counted as one of its others."""
    growth = Counter()
    for name, amount in new.items():
        growth[name if name in old or OTHERS not in old else OTHERS] += amount
    growth.subtract(old)
    return growth


# ---- Comparison with a measured run
def format_measured_run(path: Path, costs: dict[str, Any], prediction: dict[str, Any]) -> str:
    """Format the times in the log of a training run next to the prediction for the same number of GPUs."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))
    from tools import read
    try:
        run, = read.read_file(path / "log.jsonl" if path.is_dir() else path)
    except (read.NotALog, OSError, ValueError) as error:
        raise PriceError(f"{path}", found=error, expected="the log of one run",
                         hint="give log.jsonl of a run directory") from None
    counts = [sum(parities.values()) for parities in costs["steps"].values()]
    spans = stage_spans(run.facts.get("config", {}), run.total)
    if not spans and run.total == sum(counts):                                # a text log without settings
        ends = list(itertools.accumulate(counts, initial=0))
        spans = [range(*pair) for pair in zip(ends, ends[1:])]
    if len(spans) != len(counts):
        raise PriceError(f"stages of {path}", found=f"{len(spans)} in {run.total} steps",
                         expected=f"{len(counts)}, as in the dry run",
                         hint="give the log.jsonl of such a run, or repeat the dry run with the flags of this one")
    world_size = f"{run.facts.get('world_size')}"
    if world_size not in prediction["worlds"]:
        raise PriceError(f"world size of {path}", found=world_size,
                         expected=f"one of {', '.join(prediction['worlds'])}",
                         hint=f"python tests/dry_run.py --gpus={world_size}")

    seconds_after = {0: 0.0}             # number of finished steps -> s
    seconds_after.update((done, seconds) for done, seconds, _ in run.steps if seconds is not None)
    rows = []
    for attention, by_attention in prediction["worlds"][world_size].items():
        run_ms = 0.0
        for stage, span in zip(costs["steps"], spans):
            predicted_ms = by_attention["stages"].get(stage, {}).get("mean", {}).get("ms")
            run_ms += len(span) * (predicted_ms or 0.0)
            rows.append([attention, f"{stage}, ms a step", predicted_ms, measured_ms(span, seconds_after)])
        rows.append([attention, f"{run.total} steps, s", run_ms / 1000, run.seconds])
    for row in rows:
        row.append(row[-1] / row[-2] if row[-1] and row[-2] else None)
    title = f"World size {world_size}, a measured run (attention: {run.facts.get('attention')}) next to the prediction:"
    if run.void:
        title += f" its times do not count ({run.void})"
    return f"{title}\n\n{format_table('with | of | predicted | measured | measured / predicted', rows)}\n"

def stage_spans(config: dict[str, Any], steps: int | None) -> list[range]:
    """Compute the steps of each stage of a run from its settings; [] if the settings do not determine them."""
    # The rule is that of Schedule in train_gpt.py, which this tool does not import: all stages but the last get an
    # equal fraction of the scheduled steps. With --time_budget, the clock determines where a stage begins.
    stages = config.get("stages") or ()
    scheduled = config.get("num_scheduled_steps")
    if steps is None or not scheduled or len(stages) < 2 or config.get("time_budget"):
        return []
    bounds = [round(scheduled * i / (len(stages) - 1)) for i in range(len(stages))]
    bounds = [min(bound, steps) for bound in (*bounds, scheduled + config["num_extension_steps"])]
    return [range(*pair) for pair in zip(bounds, bounds[1:])]

def measured_ms(span: range, seconds_after: dict[int, float]) -> float | None:
    """Compute the mean ms of a step inside a stage; None if the log has no times there."""
    if not span:
        return None
    first = span.start + min(SETTLING_STEPS, len(span) // 4)
    last = span.stop - min(LEAVING_STEPS, len(span) // 8)
    if first not in seconds_after or last not in seconds_after:
        return None
    return 1000 * (seconds_after[last] - seconds_after[first]) / (last - first)


# ---- The command
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("price", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=EXPECTED_COSTS,
                        help="expected costs, or timelines [the committed expected costs]")
    parser.add_argument("--measured", type=Path, help="a run directory, or its log.jsonl")
    args = parser.parse_args(argv)
    try:
        content = load(args.file)
        prediction = price(content, load(RATES)) if "kernels" in content else stored_prediction(content)
        print(format_prediction(prediction))
        if args.measured:
            print(format_measured_run(args.measured, content, prediction))
    except PriceError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

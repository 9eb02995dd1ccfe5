"""A measured run beside the prediction that the ledger keeps: times by stage of a log, lines of a profiler's trace.

    python tests/price.py [LEDGER] [--card=H100] [--measured=LOG|TRACE] [--world=8]

LEDGER: the committed one, or what `rehearse.py --out` wrote, which can be priced for another card. LOG: log.jsonl or its
run directory. TRACE: trace_rank0.json.gz, which --profile leaves. Without --measured: the prediction alone.
"""
from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ledger import summary_of
from .price import LEDGER, OTHERS, PARITIES, RATES, PriceError, kept_prediction, load, price, table, text

RECORDS = Path(__file__).resolve().parents[2] / "records"
SETTLING_STEPS, LEAVING_STEPS = 20, 5    # of a stage's two ends, left out of a measured mean: the host runs ahead
GROUPS = (                               # of kernels that a trace names otherwise than a ledger: in this order
    ("exposed communication", re.compile("nccl")),
    ("attention backward", re.compile("(flash|fmha|attention).*(bwd|backward)", re.I)),
    ("attention forward", re.compile("flash|fmha|attention", re.I)),
    ("products", re.compile("gemm|nvjet|cutlass|xmma|cublas|splitK", re.I)))
NAMED_KINDS = ("generated", "triton")    # whose names a trace has, too


# ---- A log
def spans_of_stages(ledger: dict[str, Any]) -> dict[str, range]:
    """The steps of a run by stage."""
    spans = {}
    first = 0
    for stage, parities in ledger["steps"].items():
        count = sum(parities.values())
        spans[stage] = range(first, first + count)
        first += count
    return spans


def measured_log(path: Path, ledger: dict[str, Any]) -> dict[str, Any]:
    """ms a step by stage, and s of the run, from the log of a training run: this trainer's or a relative's."""
    sys.path.insert(0, str(RECORDS))
    from tools import logs
    try:
        run, = logs.read_file(path)
    except (logs.NotALog, OSError, ValueError) as error:
        raise PriceError(f"{path}", error, "the log of one run",
                         "give log.jsonl of a run directory") from None
    spans = spans_of_stages(ledger)
    steps = sum(map(len, spans.values()))
    if run.total != steps:
        raise PriceError(f"steps of {path}", run.total, f"{steps}, as the ledger's run has",
                         "rehearse with the flags of that run")

    seconds_after = {0: 0.0}             # by number of steps done
    seconds_after.update((done, seconds) for done, seconds, _ in run.steps if seconds is not None)
    found = {stage: measured_stage(span, seconds_after) for stage, span in spans.items()}
    return dict(stages=found, run_s=run.seconds, void=run.void,
                attention=run.facts.get("attention"), world=run.facts.get("world_size"))


def measured_stage(span: range, seconds_after: dict[int, float]) -> dict[str, float]:
    """Mean ms of even, odd and all steps inside a stage; nothing of what the log does not have."""
    settling = min(SETTLING_STEPS, len(span) // 4)
    leaving = min(LEAVING_STEPS, len(span) // 8)
    times = defaultdict(list)
    for step in span[settling:len(span) - leaving]:
        if step in seconds_after and step + 1 in seconds_after:
            ms = 1000 * (seconds_after[step + 1] - seconds_after[step])
            times[PARITIES[step % 2]].append(ms)
            times["mean"].append(ms)
    return {kind: sum(ms) / len(ms) for kind, ms in times.items()}


def log_page(prediction: dict[str, Any], world: str, measured: dict[str, Any]) -> str:
    """A log's times beside those predicted for this world."""
    rows = []
    for attention, found in prediction["worlds"][world].items():
        for stage, steps in found["stages"].items():
            for kind in (*PARITIES, "mean"):
                predicted = steps.get(kind, {}).get("ms")
                ms = measured["stages"][stage].get(kind)
                rows.append([attention, stage, kind, *beside(predicted, ms)])
        rows.append([attention, "run, s", "", *beside(found["run_s"], measured["run_s"])])
    page = table("with | stage | step | predicted ms | measured ms | measured / predicted", rows)
    title = f"World size {world}, a measured run (attention: {measured['attention']}) beside the prediction:"
    if measured["void"]:
        title += f" its times do not count ({measured['void']})"
    return f"{title}\n\n{page}\n"


def beside(predicted: float | None, measured: float | None) -> list[float | None]:
    ratio = None
    if predicted and measured:
        ratio = measured / predicted
    return [predicted, measured, ratio]


# ---- A trace
@dataclass
class Trace:
    """Kernels of a profiler's trace of some steps: (name, start, end) in us."""

    steps: list[int]
    kernels: list[tuple[str, float, float]]


def read_trace(path: Path) -> Trace:
    """Of one rank. The numbers of the steps are those of the profiler: the trainer's, in a run that was not resumed."""
    steps = set()
    kernels = []
    for event in load(path).get("traceEvents", ()):
        name = event.get("name", "")
        if match := re.fullmatch(r"ProfilerStep#(\d+)", name):
            steps.add(int(match[1]))
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((name, event["ts"], event["ts"] + event["dur"]))
    if not steps or not kernels:
        raise PriceError(f"trace {path}", f"{len(steps)} steps and {len(kernels)} kernels of a GPU",
                         "some of both", "train with --profile=a:b on a GPU and give trace_rank0.json.gz")
    return Trace(sorted(steps), kernels)


def group_of(name: str, known: Iterable[str]) -> str:
    """The line that a measured kernel is set beside: its own name if the ledger keeps it, else its group's."""
    named = re.sub(r"_\d+$", "", name)                                        # Inductor's number of it in its graph
    if named in known:
        return named
    for group, pattern in GROUPS:
        if pattern.search(name):
            return group
    return OTHERS


def measured_lines(trace: Trace, known: Iterable[str]) -> Counter:
    """ms a step by line; of collectives the time in which they run and nothing else does."""
    lines = Counter()
    collectives, computing = [], []
    for name, start, end in trace.kernels:
        group = group_of(name, known)
        if group == "exposed communication":
            collectives.append((start, end))
        else:
            computing.append((start, end))
            lines[group] += (end - start) / 1000 / len(trace.steps)
    exposed = covered(collectives + computing) - covered(computing)
    lines["exposed communication"] = exposed / 1000 / len(trace.steps)
    return lines


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what (start, end) spans cover together."""
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def beside_trace(trace: Trace, ledger: dict[str, Any], world: str, attention: str) -> list[list]:
    """[line, predicted ms a step, measured ms a step, ratio], dearest first, for the steps of a trace.

    Products are one line, and so is what the ledger does not keep by name.
    """
    spans = spans_of_stages(ledger)
    phases = ledger["worlds"][world]["phases"]
    predicted = Counter()
    known = set()
    for number in trace.steps:
        stage = next((stage for stage, span in spans.items() if number in span), None)
        name = f"{stage} {PARITIES[number % 2]} step"
        if name not in phases:
            raise PriceError("step of the trace", number, f"one of {spans}", "rehearse with the flags of that run")
        for line, ms in lines_of_trace(phases[name], attention).items():
            predicted[line] += ms / len(trace.steps)
        known |= {line for line, facts in phases[name]["lines"].items() if facts.get("kind") in NAMED_KINDS}

    measured = measured_lines(trace, known)
    rows = [[line, *beside(predicted.get(line), measured.get(line))] for line in {*predicted, *measured}]
    return sorted(rows, key=lambda row: (-max(row[1] or 0.0, row[2] or 0.0), row[0]))


def lines_of_trace(phase: dict[str, Any], attention: str) -> Counter:
    """Predicted ms of a step, by the lines that a trace can tell apart."""
    parts = phase["price"][attention]
    found = Counter(products=parts.get("products", 0.0))
    found["exposed communication"] = parts.get("exposed communication", 0.0)
    first = next(iter(phase["price"]))
    faster = parts.get("attention", 0.0) / (phase["price"][first].get("attention", 0.0) or 1.0)
    for name, line in phase["lines"].items():
        if line["kind"] == "attention":
            found["attention " + name.removeprefix("attention_")] += faster * line["ms"]
        elif line["kind"] in NAMED_KINDS:
            found[name] += line["ms"]
    found[OTHERS] = sum(parts.values()) - sum(found.values())
    return found


# ---- The command
def measured_page(path: Path, ledger: dict[str, Any], prediction: dict[str, Any], world: str) -> str:
    """A log or a trace beside the prediction."""
    if path.is_dir():
        path = path / "log.jsonl"
    if path.suffix not in (".json", ".gz"):
        measured = measured_log(path, ledger)
        ranks = measured["world"]
        if ranks is not None and str(ranks) != world:
            raise PriceError(f"world size of {path}", ranks, world, f"--world={ranks}")
        return log_page(prediction, world, measured)
    trace = read_trace(path)
    pages = []
    for attention in prediction["worlds"][world]:
        rows = beside_trace(trace, ledger, world, attention)
        pages.append(f"World size {world}, steps {trace.steps} of a trace beside what is predicted with "
                     f"{attention}:")
        pages.append(table("line | predicted ms | measured ms | measured / predicted", rows))
    return "\n\n".join(pages) + "\n"


def priced_ledger(path: Path, card: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ledger and its prediction: the one that it keeps, or one made of timelines, which any card may have."""
    found = load(path)
    if "kernels" in found:
        rates = load(RATES)
        return summary_of(found, rates, card), price(found, rates, card)
    prediction = kept_prediction(found)
    if card not in ("", found["card"]):
        raise PriceError(f"prices of {path.name}", found["card"], card,
                         f"rehearse for it: python tests/rehearse.py --card={card}")
    return found, prediction


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("price", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ledger", nargs="?", type=Path, default=LEDGER)
    parser.add_argument("--card", default="", help="[that of the ledger]")
    parser.add_argument("--measured", type=Path, help="log.jsonl or its run directory, or trace_rank0.json.gz")
    parser.add_argument("--world", default="8", help="world size of what was measured [8]")
    args = parser.parse_args(argv)
    try:
        ledger, prediction = priced_ledger(args.ledger, args.card)
        print(text(prediction))
        if args.measured:
            if args.world not in ledger["worlds"]:
                walked = ", ".join(ledger["worlds"])
                raise PriceError("--world", args.world, f"one of {walked}", "give another")
            print(measured_page(args.measured, ledger, prediction, args.world))
    except PriceError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

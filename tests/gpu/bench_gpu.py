"""The day with a GPU: check every operation, time it, time whole steps, set them beside what was predicted.

    python tests/gpu/bench_gpu.py [--out=FOLDER] [--limit=460] [--only=kernels,steps] [--seed=N]
    python tests/gpu/bench_gpu.py --device=cpu          the same lines at tiny sizes: no time says anything of a GPU

Operations: fresh random inputs, errors against f64 in memory full of NaN, ms against the card's ceiling, plain PyTorch
and torch.compile. Steps: the preset `record` in its stages, on the tokens of DATA=SHARDS or of a formula. What is over
the limit of seconds is left out aloud. FOLDER holds bench.json and a trace of each stage. Status: 0, or 1 if a check
failed, or 2 without a GPU. No time is judged.
"""
from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gpu_cases
import gpu_steps
import torch
from rehearsal import price

import train_gpt as tg

KERNELS_SHARE = 0.45                     # of the limit, at most, if steps are to follow
STAGE_S = 45.0                           # what a stage takes at least on a card, most of it compiling
L2_BYTES = 256 << 20                     # written between two timings: more than any card's cache


class Report:
    """Lines for people, figures for programs, and the time that is left."""
    def __init__(self, folder: Path, limit: float) -> None:
        self.folder = folder
        self.limit = limit
        self.began = time.monotonic()
        self.figures: dict[str, Any] = dict(kernels=[], stages=[], wrong=[], left_out=[])
        folder.mkdir(parents=True, exist_ok=True)

    def allows(self, seconds: float, what: str, share: float = 1.0) -> bool:
        """Whether that much time is left; what has to be left out is said."""
        spent = time.monotonic() - self.began
        if spent + seconds < share * self.limit:
            return True
        self.figures["left_out"].append(what)
        print(f"left out for lack of time: {what}", flush=True)
        return False

    def fail(self, what: str) -> None:
        self.figures["wrong"].append(what)
        print(f"  WRONG: {what}", flush=True)

    def save(self) -> None:
        """After each section: what a later one breaks is not lost."""
        (self.folder / "bench.json").write_text(json.dumps(self.figures, indent=1) + "\n")


# ---- Operations
def time_ways(case: gpu_cases.Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """ms of every way on a cold cache, in turn, so that a warmer card is warmer for all. The first round does not
    count. Operations that change an input do so again and again: their time does not depend on the numbers."""
    flushed = torch.empty(L2_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    watches = {way: gpu_steps.Stopwatch(device) for way in case.ways}
    for _ in range(rounds + 1):
        for way, call in case.ways.items():
            copies = [x.clone() for x in case.inputs]
            flushed.zero_()                                   # which also lets the host run ahead of the device
            watches[way].time(functools.partial(call, *copies))
    return {way: gpu_steps.spread(watch.read()[1:]) for way, watch in watches.items()}


def peaks_of(name: str) -> dict[str, float]:
    """What a card can do at most, a second, by kind of work; nothing for a name that the rates do not hold."""
    for card, facts in price.load(price.RATES)["cards"].items():
        if card in name:
            return {kind: rate["peak"] for kind, rate in facts["rates"].items()}
    return {}


def shares(case: gpu_cases.Case, ms: float, peaks: dict[str, float]) -> dict[str, float]:
    """How much of the card's bandwidth and of its products the least work of a case makes in that time, 0 to 1."""
    if not peaks or ms <= 0:
        return {}
    seconds = ms / 1000
    return dict(bandwidth=case.moved / seconds / peaks["memory"], products=case.flops / seconds / peaks[case.dtype])


def bench_case(name: str, lab: gpu_cases.Lab, rounds: int, peaks: dict[str, float]) -> dict[str, Any]:
    case = gpu_cases.CASES[name](lab)
    found = gpu_cases.check(name, case, lab)
    times = time_ways(case, lab.device, rounds)
    first = next(iter(times.values()))
    return found | dict(times=times, moved=case.moved, flops=case.flops, shares=shares(case, first["ms"], peaks))


def kernel_line(found: dict[str, Any]) -> str:
    times = ", ".join(f"{way} {time['ms']:.3f} ({time['least']:.3f} to {time['most']:.3f})"
                      for way, time in found["times"].items())
    ceiling = ", ".join(f"{share:.0%} of {what}" for what, share in found["shares"].items())
    worst = max(map(max, found["errors"].values()))
    return f"{found['name']:25}{found['kernel']:15}ms: {times}; {ceiling or 'no ceiling known'}; error {worst:.1e}"


def bench_kernels(lab: gpu_cases.Lab, report: Report, args: argparse.Namespace, peaks: dict[str, float]) -> None:
    print(f"\nOperations at {lab.sizes}: median ms, forward and backward, and of the ceiling what the least work makes of "
          "the first\ntime; the largest error against f64\n", flush=True)
    share = KERNELS_SHARE if "steps" in args.only else 1.0
    longest = 0.0
    for name in gpu_cases.CASES:
        if name in gpu_cases.FP8_CASES and not lab.has_fp8:
            continue
        if not report.allows(longest, name, share):
            continue
        began = time.monotonic()
        gc.collect()                                          # gigabytes of the case before
        try:
            found = bench_case(name, lab, args.rounds, peaks)
        except Exception as error:                            # one that fails leaves the others alone
            report.fail(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        longest = max(longest, time.monotonic() - began)
        report.figures["kernels"].append(found)
        print(kernel_line(found), flush=True)
        for wrong in found["wrong"]:
            report.fail(wrong)
    report.save()


# ---- Steps
def predictions(attention: str) -> dict[str, float]:
    """ms of a step by stage, of one H100 with the kind of attention whose rate is the nearest."""
    kind = "FA3" if attention.startswith(("FA3", "FA4")) else "FA2"
    stages = price.kept_prediction(price.load(price.LEDGER))["worlds"]["1"][kind]["stages"]
    return {name: stage["mean"]["ms"] for name, stage in stages.items()}


def stage_line(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{step['ms']:.2f} ({step['least']:.2f} to {step['most']:.2f})" for step in found["of_cycle"])
    return (f"stage {found['stage'] + 1}, {found['tokens']:,} tokens a step: {found['ms_per_step']:.2f} ms, in a cycle "
            f"{steps}; predicted {found['predicted_ms']}; {found['tokens_per_s']:,.0f} tokens/s\n"
            f"  first cycle {found['first_cycle_s']:.1f} s, {found['graphs']} graphs, {found['new_graphs']} later; peak "
            f"{found['peak_mib']:,} MiB, estimated {found['estimate_mib']:,}; loss {found['first_loss']:.3f} -> "
            f"{found['last_loss']:.3f}\n{found['profile']}")


def bench_steps(run: gpu_steps.Started, report: Report, args: argparse.Namespace) -> None:
    predicted = {}
    if run.fabric.on_cuda:
        predicted = predictions(run.figures["attention"])
    print(f"\nWhole steps: {run.figures}\npredicted: for one H100, by tests/rehearse.py\n", flush=True)
    report.figures["run"] = run.figures
    for stage in range(len(run.cfg.stages) - 1):              # the extension is like the last of them
        if not report.allows(STAGE_S * run.fabric.on_cuda, f"stage {stage + 1}"):
            continue
        trace = report.folder / f"trace_stage{stage + 1}.json.gz"
        found = gpu_steps.measure_stage(run, stage, args.cycles, trace)
        found["predicted_ms"] = predicted.get(f"stage {stage + 1}")
        report.figures["stages"].append(found)
        print(stage_line(found), flush=True)
        if found["new_graphs"]:
            report.fail(f"stage {stage + 1}: {found['new_graphs']} graphs compiled after the first two cycles")
        report.save()
    if report.allows(STAGE_S * run.fabric.on_cuda, "evaluation"):
        report.figures["evaluation"] = gpu_steps.measure_evaluation(run)
        print(f"evaluation: {report.figures['evaluation']}", flush=True)


# ---- The command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    out = ROOT / f"logs/bench-gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=out, help="[logs/bench-gpu-TIME]")
    parser.add_argument("--limit", type=float, default=460.0, help="seconds [%(default)s]")
    parser.add_argument("--only", choices=("kernels", "steps", "kernels,steps"), default="kernels,steps")
    parser.add_argument("--rounds", type=int, default=15, help="timings of an operation [%(default)s]")
    parser.add_argument("--cycles", type=int, default=6, help="timed cycles of a stage [%(default)s]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="[a new one]")
    parser.add_argument("--backend", default="", help="of torch.compile [inductor; on a CPU nothing compiles]")
    args = parser.parse_args(argv)
    if min(args.rounds, args.cycles) < 1:
        parser.error("--rounds and --cycles: at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.device_count():
        print(f"bench_gpu\n  found:    torch {torch.__version__}, which sees no CUDA device\n"
              "  expected: an NVIDIA GPU and torch for CUDA\n"
              "  do:       --device=cpu runs the same lines at tiny sizes, which measures nothing", file=sys.stderr)
        return 2
    fabric = tg.Fabric(torch.device(args.device, 0))
    fabric.enter_thread()
    report = Report(args.out, args.limit)
    card = tg.hardware(fabric)
    peaks = peaks_of(card)
    facts = dict(hardware=card, torch=torch.__version__, triton=tg.version_of("triton"), cuda=torch.version.cuda,
                 seed=args.seed, peaks=peaks, source_sha256=tg.file_sha256(Path(tg.__file__)))
    report.figures.update(facts)
    print(facts, flush=True)

    if "kernels" in args.only:
        lab = gpu_cases.Lab(fabric, seed=args.seed, backend=args.backend)
        bench_kernels(lab, report, args, peaks)
    if "steps" in args.only:
        try:
            run = gpu_steps.open_run(fabric)
        except tg.RunError as error:                          # the preset does not fit here: a result, too
            print(f"\n{error}")
            report.figures["refused"] = str(error)
        else:
            bench_steps(run, report, args)
    report.save()
    print(f"\n{time.monotonic() - report.began:.0f} s, written to {report.folder}; wrong: {report.figures['wrong']}, left out: "
          f"{report.figures['left_out']}")
    return 1 if report.figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

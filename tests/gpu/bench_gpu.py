"""The day with a GPU: check every operation, time it, time whole steps, set them beside what was predicted.

    python tests/gpu/bench_gpu.py [--out=FOLDER] [--limit=460] [--only=kernels,steps,profile] [--seed=N]
    python tests/gpu/bench_gpu.py --device=cpu          the same lines at tiny sizes, which tests this file

Fresh random inputs, f64 references and memory full of NaN for each operation; then ms against the card's ceiling, plain
PyTorch and torch.compile; then the record preset in its three stages on real tokens if they are there. What is
over the limit of seconds is left out aloud. FOLDER holds bench.txt, bench.json and a trace of each stage. Status: 0, or
1 if a check failed, or 2 without a GPU. No time is judged.
"""
from __future__ import annotations

import argparse
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

import train_gpt as tg

SECTIONS = ("kernels", "steps", "profile")                           # the last: of steps, by kernel
KERNELS_SHARE = 0.45                     # of the limit, at most, if steps are to follow
STAGE_S = 45.0                           # what a stage takes at least on a card, most of it compiling
ROUNDS, CYCLES = 15, 6                   # timings of each way; timed cycles of a stage
TINY_ROUNDS, TINY_CYCLES = 2, 1
DEAREST = 25                             # kernels of a profile that the text shows; the JSON has all
FORMULA_TOKENS = 8_000_000


class Report:
    """Lines for people, on the screen and in bench.txt, and the figures behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.left_out: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.txt").write_text("")

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        with open(self.folder / "bench.txt", "a") as file:
            file.write(line + "\n")

    def fail(self, what: str) -> None:
        self.wrong.append(what)
        self.say(f"  WRONG: {what}")

    def leave_out(self, what: str) -> None:
        self.left_out.append(what)
        self.say(f"  left out for lack of time: {what}")

    def save(self) -> None:
        """After each section: what a later one breaks is not lost."""
        content = dict(self.figures, wrong=self.wrong, left_out=self.left_out)
        (self.folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")


class Limit:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self.began

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        return self.spent() + seconds < share * self.seconds


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ------ Kernels -------------------------------------------------------------------------------------------------------

HEAD = f"{'operation':31}{'trainer by':18}{'ms (least to most)':27}{'plain':>9}{'compile':>9}{'bytes':>8}{'flops':>8}" \
       f"{'error of bound':>16}"


def number(value: float | None, width: int, digits: int = 3) -> str:
    if value is None:
        return "-".rjust(width)
    return f"{value:{width}.{digits}f}"


def percent(share: float | None, width: int) -> str:
    if share is None:
        return "-".rjust(width)
    return f"{100 * share:{width - 2}.0f} %"


def kernel_line(found: dict[str, Any]) -> str:
    """The trainer's way, or plain PyTorch where nothing is compiled."""
    times = found["times"]
    way = next(iter(times))
    own = times[way]
    plain = times.get(gpu_cases.PLAIN, {}).get("ms")
    compiled = times.get(gpu_cases.COMPILED, {}).get("ms")
    worst = 0.0
    for errors in found["errors"].values():
        for error, bound in zip(errors, found["bounds"], strict=True):
            worst = max(worst, error / bound)
    kernel = found["kernel"] if way == gpu_cases.TRAINER else "(not compiled)"
    span = f"{own['ms']:.3f} ({own['least']:.3f} to {own['most']:.3f})"
    return (f"{found['name']:31}{kernel:18}{span:27}{number(plain, 9)}{number(compiled, 9)}"
            f"{percent(found['shares'].get('bandwidth'), 8)}{percent(found['shares'].get('products'), 8)}"
            f"{percent(worst, 16)}")


def bench_case(lab: gpu_cases.Lab, make: Any, rounds: int, peaks: dict[str, float]) -> dict[str, Any]:
    case = make(lab)
    found = gpu_cases.check(case, lab.device)
    times = gpu_cases.time_ways(case, lab.device, rounds)
    first = next(iter(times.values()))
    return found | dict(times=times, moved=case.moved, flops=case.flops,
                        shares=gpu_cases.shares(case, first["ms"], peaks))


def bench_kernels(lab: gpu_cases.Lab, report: Report, limit: Limit, share: float, rounds: int,
                  peaks: dict[str, float]) -> None:
    report.say(f"\nOperations at {lab.sizes}\n")
    report.say(f"ms: median of {rounds} rounds in turn, on a cold cache, forward and backward. bytes, flops: share of "
               "the card's ceiling that the least\npossible work makes in the first time. error: the largest over all "
               "ways, in units of its bound, against f64.\n")
    report.say(HEAD)
    rows = report.figures.setdefault("kernels", [])
    longest = 0.0
    for make in gpu_cases.makers(lab):
        if not limit.allows(longest, share):
            report.leave_out(make.__name__)
            continue
        began = limit.spent()
        if lab.fabric.on_cuda:
            gc.collect()                                                      # gigabytes of the case before
        try:
            found = bench_case(lab, make, rounds, peaks)
        except Exception as error:                                            # one that fails leaves the others alone
            report.fail(f"{make.__name__}: {words_of(error)}")
            continue
        longest = max(longest, limit.spent() - began)
        rows.append(found)
        report.say(kernel_line(found))
        for wrong in found["wrong"]:
            report.fail(wrong)
    unpoisoned = [row["name"] for row in rows if not all(row["poisoned"].values())]
    if unpoisoned:
        report.say(f"\nnot in poisoned memory: {', '.join(unpoisoned)}")


# ------ Steps ---------------------------------------------------------------------------------------------------------

def rated(attention: str) -> str:
    """The kind of attention whose rate is the nearest; FA4 has none of its own."""
    return "FA3" if attention.startswith(("FA3", "FA4")) else "FA2"


def predictions(attention: str) -> tuple[dict[str, Any], str]:
    """Of one rank, by stage, in ms a step; and in words, where they are from or why there are none."""
    try:
        from rehearsal import price
        ledger = price.load(price.LEDGER)
        stages = price.kept_prediction(ledger)["worlds"]["1"][rated(attention)]["stages"]
        return stages, f"by tests/rehearse.py for one {ledger['card']} with {rated(attention)}"
    except Exception as error:                                                # the figures do not wait for a prediction
        return {}, f"no prediction: {words_of(error)}"


def stage_lines(found: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    even = found["even"]
    odd = found["odd"]
    ms = found["ms_per_step"]
    lines = [f"stage {found['stage'] + 1}, {found['tokens']:,} tokens a step: {ms:.2f} ms, even {even['ms']:.2f} "
             f"({even['least']:.2f} to {even['most']:.2f}), odd {odd['ms']:.2f} ({odd['least']:.2f} to "
             f"{odd['most']:.2f})",
             f"  {found['tokens_per_s']:,.0f} tokens/s, {found['tflop']:.2f} TFLOP a step by the model, MFU "
             f"{percent(found.get('mfu'), 0)}; first cycle {found['first_cycle_s']:.1f} s, {found['graphs']} graphs, "
             f"{found['new_graphs']} later",
             f"  peak memory {found['peak_mib']:,} MiB, estimated {found['estimate_mib']:,}; loss "
             f"{found['first_loss']:.3f} -> {found['last_loss']:.3f}"]
    if predicted:
        mean = predicted["mean"]["ms"]
        ratio = f"{ms / mean:.3f}" if mean else "-"
        lines.append(f"  predicted: {mean:.2f} ms a step, even {predicted['even']['ms']:.2f}, odd "
                     f"{predicted['odd']['ms']:.2f}; measured / predicted {ratio}")
    return lines


def profile_lines(profile: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    if not profile:
        return []
    lines = [f"  profile, {sum(row['ms'] for row in profile['rows']):.2f} ms a step in what it saw:"]
    for row in profile["rows"][:DEAREST]:
        lines.append(f"    {row['ms']:9.3f} ms {row['calls']:7.1f} x  {row['name'][:90]}")
    dearest = sorted(predicted.get("lines", ()), key=lambda line: -line[-1])[:DEAREST]
    if dearest:
        lines.append("  predicted, ms a step of these lines:")
    for name, _, ms in dearest:
        lines.append(f"    {ms:9.3f} ms            {name[:90]}")
    return lines


def bench_steps(run: gpu_steps.Started, report: Report, limit: Limit, args: argparse.Namespace) -> None:
    on_cuda = run.fabric.on_cuda
    predicted, source = predictions(run.figures["attention"])
    report.say(f"\nWhole steps of the preset {run.figures['preset']}: {run.figures}\npredicted: {source}\n")
    report.figures["steps"] = dict(run.figures, predicted_by=source, stages=[])
    for stage in args.stages:
        if on_cuda and not limit.allows(STAGE_S):
            report.leave_out(f"stage {stage + 1}")
            continue
        trace = None
        profiled = "profile" in args.only
        if on_cuda and profiled:
            trace = report.folder / f"trace_stage{stage + 1}.json.gz"
        if not on_cuda and stage > 0:
            profiled = False                                                  # a CPU takes seconds to read its events
        found = gpu_steps.measure_stage(run, stage, args.cycles, profiled, trace)
        found["predicted"] = predicted.get(f"stage {stage + 1}", {})
        report.figures["steps"]["stages"].append(found)
        for line in [*stage_lines(found, found["predicted"]), *profile_lines(found["profile"], found["predicted"])]:
            report.say(line)
        if found["new_graphs"]:
            report.fail(f"stage {stage + 1}: {found['new_graphs']} graphs compiled after the first two cycles")
        report.save()
    bench_evaluation(run, report, limit)


def bench_evaluation(run: gpu_steps.Started, report: Report, limit: Limit) -> None:
    if run.fabric.on_cuda and not limit.allows(STAGE_S):
        report.leave_out("evaluation")
        return
    found = gpu_steps.measure_evaluation(run)
    report.figures["steps"]["evaluation"] = found
    report.say(f"evaluation: {found['s_per_block']:.3f} s for {found['tokens']:,} tokens, the first time "
               f"{found['first_s']:.1f} s; peak memory {found['peak_mib']:,} MiB")


# ------ The command ---------------------------------------------------------------------------------------------------

def parse(argv: Sequence[str]) -> argparse.Namespace:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / f"logs/bench-gpu-{stamp}", help="[logs/bench-gpu-TIME]")
    parser.add_argument("--limit", type=float, default=460.0, help="seconds [460]")
    parser.add_argument("--only", default=",".join(SECTIONS), help="[kernels,steps,profile]")
    parser.add_argument("--stages", default="1,2,3", help="whose steps are timed [1,2,3]")
    parser.add_argument("--rounds", type=int, default=None, help=f"timings of an operation [{ROUNDS}]")
    parser.add_argument("--cycles", type=int, default=None, help=f"timed cycles of a stage [{CYCLES}]")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs [a new one]")
    parser.add_argument("--backend", default=None, help="of torch.compile [inductor; on a CPU none]")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    unknown = set(args.only) - set(SECTIONS)
    if unknown:
        parser.error(f"--only={','.join(unknown)}: one or more of {','.join(SECTIONS)}")
    if args.only == ["profile"]:
        parser.error("--only=profile: a profile is one of steps, so --only=steps,profile")
    known = [str(number) for number in range(1, len(tg.STAGES) + 1)]
    if not set(args.stages.split(",")) <= set(known):
        parser.error(f"--stages={args.stages}: some of {','.join(known)}")
    args.stages = [int(stage) - 1 for stage in args.stages.split(",")]
    for name in ("rounds", "cycles"):
        given = getattr(args, name)
        if given is not None and given < 1:
            parser.error(f"--{name}={given}: at least 1")
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    tiny = args.device == "cpu"
    if args.rounds is None:
        args.rounds = TINY_ROUNDS if tiny else ROUNDS
    if args.cycles is None:
        args.cycles = TINY_CYCLES if tiny else CYCLES
    return args


def without_gpu() -> str:
    found = f"torch {torch.__version__}, which sees no CUDA device"
    return (f"bench_gpu\n  found:    {found}\n  expected: an NVIDIA GPU and torch for CUDA\n"
            "  do:       --device=cpu runs the same lines at tiny sizes, which tests this file and measures nothing")


def open_or_refuse(fabric: tg.Fabric, report: Report) -> gpu_steps.Started | None:
    """The run whose steps are timed. None: the preset does not fit here, which is a result, too."""
    try:
        if fabric.on_cuda:
            return gpu_steps.open_run("record", fabric, FORMULA_TOKENS, tg.GPT2_VOCAB)
        return gpu_steps.open_run("tiny", fabric, 60_000, 512)
    except tg.RunError as error:
        report.say(f"\n{error}")
        report.figures["steps"] = dict(refused=str(error))
        return None


def bench(args: argparse.Namespace, fabric: tg.Fabric, report: Report) -> None:
    on_cuda = fabric.on_cuda
    limit = Limit(args.limit)
    sizes = gpu_cases.TINY
    backend = args.backend
    card = "CPU"
    if on_cuda:
        properties = torch.cuda.get_device_properties(fabric.device)
        sizes = gpu_cases.sizes_of(properties.total_memory)
        backend = backend or "inductor"
        card = properties.name
    peaks = gpu_cases.peaks_of(card)
    facts = dict(card=card, device=fabric.device.type, hardware=tg.hardware(fabric), seed=args.seed,
                 sizes=sizes._asdict(), peaks=peaks, torch=torch.__version__, triton=tg.version_of("triton"),
                 cuda=torch.version.cuda, source_sha256=tg.file_sha256(Path(tg.__file__)))
    report.figures.update(facts)
    report.say(f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}; inputs of seed {args.seed}")
    if not on_cuda:
        report.say("On a CPU this checks the bench itself: no time below says anything of a GPU.")
    elif not peaks:
        report.say(f"tests/rehearsal/rates.json has no rates of {card}: no shares of its ceiling")

    if "kernels" in args.only:
        lab = gpu_cases.Lab(fabric, sizes, args.seed, backend)
        share = KERNELS_SHARE if "steps" in args.only else 1.0
        bench_kernels(lab, report, limit, share, args.rounds, peaks)
        report.save()
    if "steps" in args.only:
        run = open_or_refuse(fabric, report)
        if run is not None:
            bench_steps(run, report, limit, args)
    report.figures["seconds"] = limit.spent()
    report.say(f"\n{limit.spent():.0f} s; wrong: {len(report.wrong)}, left out: {len(report.left_out)}")
    report.save()


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(without_gpu(), file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    if args.device == "cpu":
        device = torch.device("cpu")
        torch.set_num_threads(1)                                              # tiny tensors pay for no threads
    fabric = tg.Fabric(device)
    fabric.enter_thread()
    report = Report(args.out)
    bench(args, fabric, report)
    for wrong in report.wrong:
        report.say(f"WRONG: {wrong}")
    report.say(f"written to {report.folder}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

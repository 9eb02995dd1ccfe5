"""The day with a GPU: check every operation, time it, time whole steps, set them beside what was predicted.

    python tests/gpu/bench_gpu.py [--out=FOLDER] [--only=kernels] [--seed=N]
    python tests/gpu/bench_gpu.py --device=cpu          the same lines at tiny sizes: no time says anything of a GPU

Operations: fresh random inputs, errors against f64 in memory full of NaN, ms beside plain PyTorch and torch.compile.
Steps: the preset `record` in its stages, on the tokens of DATA=SHARDS or of a formula. FOLDER has bench.json, whole
after each line that is printed. Status: 0, or 1 if a check failed, or 2 without a GPU. No time is judged.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gpu_cases
import torch
import torch._dynamo.utils
from rehearsal import price

import train_gpt as tg

L2_BYTES = 256 << 20                     # more than any card's cache
FLUSHES = 8                              # of it before a call: the host runs ahead meanwhile
FORMULA = f"formula:{tg.GPT2_VOCAB}:{tg.GPT2_DOCUMENT_START}:8000000:1"
SETTLING = 2                             # cycles before those that count; in the first, graphs compile

class Report:
    """Lines for people, and figures for programs: what a later section breaks is not lost."""
    def __init__(self, folder: Path) -> None:
        self.path = folder / "bench.json"
        self.figures: dict[str, Any] = dict(kernels=[], stages=[], wrong=[])
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, found: dict[str, Any], wrong: Sequence[str] = ()) -> None:
        """To a list of the figures, or as one of them."""
        if isinstance(self.figures.get(name), list):
            self.figures[name].append(found)
        else:
            self.figures[name] = found
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        for line in wrong:
            print(f"  WRONG: {line}", flush=True)
        self.figures["wrong"] += wrong
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")


# ---- Operations
def ms_of(call: Callable, inputs: list[torch.Tensor], flushed: torch.Tensor) -> float:
    """One call on a cold cache: between events of the device, or by the clock where there is none."""
    copies = [x.clone() for x in inputs]
    if not flushed.is_cuda:
        began = time.perf_counter()
        call(*copies)
        return 1000 * (time.perf_counter() - began)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(FLUSHES):
        flushed.zero_()
    before.record()
    call(*copies)
    after.record()
    after.synchronize()
    return before.elapsed_time(after)

def time_ways(case: gpu_cases.Case, device: torch.device, rounds: int) -> dict[str, str]:
    """Median, least and most ms of every way, in turn, so that a warmer card is warmer for all of them."""
    flushed = torch.empty(L2_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    times = {way: [] for way in case.ways}
    for _ in range(rounds + 1):
        for way, call in case.ways.items():
            times[way].append(ms_of(call, case.inputs, flushed))
    spreads = {}
    for way, (_, *ms) in times.items():                       # the first round does not count
        spreads[way] = f"{statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f}) ms"
    return spreads

def bench_kernels(lab: gpu_cases.Lab, rounds: int, report: Report) -> None:
    report.add("sizes", lab.sizes._asdict())
    for name in lab.cases():
        gc.collect()                                          # gigabytes of the case before
        try:
            case = gpu_cases.CASES[name](lab)
            found = gpu_cases.check(name, case, lab)
            found["times"] = time_ways(case, lab.device, rounds)
        except Exception as error:                            # one that fails leaves the others alone
            words = " ".join(str(error).split())
            found = dict(name=name, wrong=[f"{name}: {type(error).__name__}: {words[:300]}"])
        report.add("kernels", found, found["wrong"])


# ---- Steps
def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]

def mean_loss(losses: tg.Losses) -> float:
    return float(losses.slot_sums.sum()) / losses.tokens

class Run:
    """What a run of `record`, on a CPU of `tiny`, makes before its warm-up: engine, loader, schedule."""
    def __init__(self, fabric: tg.Fabric) -> None:
        """Raises RunError if it does not fit. DATA names shards to train on, say of real tokens."""
        began = time.perf_counter()
        name = "record" if fabric.on_cuda else "tiny"
        cfg = tg.Config(preset=name, **tg.PRESETS[name], epochs=0)
        if fabric.on_cuda:
            gc.collect()
            torch.cuda.empty_cache()                          # what is cached does not count as free
            cfg = replace(cfg, train_files=os.environ.get("DATA", FORMULA), val_files=FORMULA)
        tg.check_config(cfg)
        self.fabric = fabric
        self.headers = tg.find_shards(cfg.train_files)
        self.val_headers = tg.find_shards(cfg.val_files)
        cfg = tg.resolve(replace(cfg, val_tokens=cfg.val_batch_tokens), self.headers, self.val_headers)

        precision = tg.head_precision(cfg, fabric)
        kernel, attention = tg.choose_attention(cfg, fabric)
        slots_at_once, estimate = tg.fit_memory(cfg, fabric, kernel)
        self.cfg = cfg
        self.schedule = tg.Schedule(cfg)
        self.engine = tg.Engine(cfg, fabric, kernel, precision, slots_at_once)
        fabric.synchronize()
        self.figures = dict(preset=name, attention=attention, head=precision, tokens=cfg.train_files,
                            slots_at_once=slots_at_once, micro_batches=cfg.num_slots // slots_at_once,
                            estimate_mib=estimate.total() >> 20, set_up_s=time.perf_counter() - began)

    def timed(self, call: Callable, *args: Any) -> tuple[Any, float, int]:
        """What a call returns; seconds until the device is done; the most MiB meanwhile, 0 where nobody counts."""
        if self.fabric.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.fabric.device)
        began = time.perf_counter()
        found = call(*args)
        self.fabric.synchronize()
        peak = torch.cuda.max_memory_allocated(self.fabric.device) >> 20 if self.fabric.on_cuda else 0
        return found, time.perf_counter() - began, peak

    def steps(self, stage: int, cycles: int) -> Iterator[tg.Losses]:
        """Take the steps of a stage: its first cycle, which may untie, then the second one again and again."""
        cycle = self.schedule.cycle
        first = self.schedule.starts[stage] // cycle * cycle
        starts = [first] + (cycles - 1) * [first + cycle]
        of_cycles = [[self.schedule.at(step) for step in range(start, start + cycle)] for start in starts]
        loader = tg.Loader(self.cfg, self.fabric, self.headers)
        with contextlib.closing(loader):
            loader.start(of_cycles[0])
            for of_cycle, following in zip(of_cycles, [*of_cycles[1:], []]):
                loader.advance(following)
                for values in of_cycle:
                    yield tg.train_step(self.engine, loader, values)

    def measure_stage(self, stage: int, cycles: int) -> dict[str, Any]:
        """Seconds of the first cycle, in which the graphs compile; then ms of a step, memory, graphs."""
        cycle = self.schedule.cycle
        before = graphs()
        steps = self.steps(stage, SETTLING + cycles)

        def take(count: int) -> list[tg.Losses]:
            return list(itertools.islice(steps, count * cycle))

        first, first_s, _ = self.timed(take, 1)
        take(SETTLING - 1)
        compiled = graphs()
        last, seconds, peak = self.timed(take, cycles)
        steps.close()

        row = self.cfg.stages[stage]
        only = replace(self.cfg, stages=(row, row), val_batch_tokens=16 * self.cfg.num_slots)
        estimate = tg.memory_estimate(only, self.fabric, self.engine.model.attention, self.engine.slots_at_once)
        each = seconds / len(last)
        return dict(stage=stage, tokens=row.batch_tokens, ms_per_step=1000 * each,
                    tokens_per_s=row.batch_tokens / each, first_cycle_s=first_s, graphs=compiled - before,
                    new_graphs=graphs() - compiled, estimate_mib=estimate.total() >> 20, peak_mib=peak,
                    first_loss=mean_loss(first[0]), last_loss=mean_loss(last[-1]))

    def measure_evaluation(self) -> dict[str, Any]:
        """One block of validation tokens, twice: the first time compiles."""
        end = self.schedule.at(self.schedule.end_step)
        data = tg.ValidationSet(self.cfg, self.fabric, self.val_headers)
        self.engine.evaluate(data.batches(end), end)
        before = graphs()
        loss, seconds, peak = self.timed(self.engine.evaluate, data.batches(end), end)
        return dict(s_per_block=seconds, tokens=self.cfg.val_batch_tokens, loss=loss, peak_mib=peak,
                    new_graphs=graphs() - before)

def predictions(attention: str) -> dict[str, float]:
    """ms of a step by stage, of one H100 with the kind of attention whose rate is the nearest."""
    kind = "FA3" if attention.startswith(("FA3", "FA4")) else "FA2"
    stages = price.kept_prediction(price.load(price.LEDGER))["worlds"]["1"][kind]["stages"]
    return {name: stage["mean"]["ms"] for name, stage in stages.items()}

def bench_steps(run: Run, args: argparse.Namespace, report: Report) -> None:
    report.add("run", run.figures)
    predicted = predictions(run.figures["attention"])
    for stage in range(args.stages):
        found = run.measure_stage(stage, args.cycles)
        found["predicted_ms_per_step_of_an_h100"] = predicted.get(f"stage {stage + 1}")
        late = f"stage {stage + 1}: {found['new_graphs']} graphs compiled after the first two cycles"
        report.add("stages", found, [late] if found["new_graphs"] else [])
    report.add("evaluation", run.measure_evaluation())


# ---- The command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    out = ROOT / f"logs/bench-gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=out, help="[logs/bench-gpu-TIME]")
    parser.add_argument("--only", choices=("kernels", "steps"), help="[both]")
    parser.add_argument("--rounds", type=int, default=15, help="timings of an operation [%(default)s]")
    parser.add_argument("--stages", type=int, default=3, help="whose steps are timed, from the first on [%(default)s]")
    parser.add_argument("--cycles", type=int, default=6, help="timed cycles of a stage [%(default)s]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="[a new one]")
    parser.add_argument("--backend", default="", help="of torch.compile [inductor; on a CPU nothing compiles]")
    args = parser.parse_args(argv)
    if min(args.rounds, args.cycles) < 1:
        parser.error("--rounds and --cycles: at least 1")
    return args

def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.device_count():
        print(f"bench_gpu\n  found:    torch {torch.__version__}, which sees no CUDA device\n"
              "  expected: an NVIDIA GPU and torch for CUDA\n"
              "  do:       --device=cpu runs the same lines at tiny sizes, which measures nothing", file=sys.stderr)
        return 2
    fabric = tg.Fabric(torch.device(args.device, 0))
    fabric.enter_thread()
    report = Report(args.out)
    report.add("machine", dict(hardware=tg.hardware(fabric), torch=torch.__version__, cuda=torch.version.cuda,
                               triton=tg.version_of("triton"), seed=args.seed,
                               source_sha256=tg.file_sha256(Path(tg.__file__))))
    if args.only != "steps":
        bench_kernels(gpu_cases.Lab(fabric, seed=args.seed, backend=args.backend), args.rounds, report)
    if args.only != "kernels":
        try:
            run = Run(fabric)
        except tg.RunError as error:                          # the preset does not fit here: a result, too
            report.add("refused", dict(error=str(error)))
        else:
            bench_steps(run, args, report)
    print(f"written to {report.path}")
    return 1 if report.figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

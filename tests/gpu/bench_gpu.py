"""Check every operation of the trainer on this device against float64, and time it.

    python tests/gpu/bench_gpu.py [--out=FOLDER] [--rounds=N] [--seed=N]
    python tests/gpu/bench_gpu.py --device=cpu          the same code at tiny sizes; its times do not predict a GPU's

Inputs are fresh random numbers in memory full of NaN; times are compared with plain PyTorch and torch.compile.
FOLDER/bench.json is complete after each printed line. Exit status: 0, 1 if a check failed, 2 without a GPU. Times are
not judged. `Run` takes training steps of a preset without the training loop, for test_gpu.py and day_probes.py.
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

import gpu_cases  # noqa: I001  it sets torch's allocator
import torch
import torch._dynamo.utils

import train_gpt as tg

L2_BYTES = 256 << 20                     # more than any card's cache
FLUSHES = 8                              # of it before a call: the host runs ahead meanwhile
FORMULA = f"formula:{tg.GPT2_VOCAB}:{tg.GPT2_DOCUMENT_START}:8000000:1"
SETTLING = 2                             # cycles before those that count; in the first, graphs compile

class Report:
    """Lines for people, and figures for programs: what a later section breaks is not lost."""
    def __init__(self, folder: Path) -> None:
        self.path = folder / "bench.json"
        self.figures: dict[str, Any] = dict(kernels=[], left_out=[], wrong=[])
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

def large_head(lab: gpu_cases.Lab) -> gpu_cases.Lab | str:
    """Return a lab whose micro-batch gives more than 2^32 logits, or why this device cannot have it."""
    tokens, most = max(gpu_cases.LARGE_HEADS.items())
    if not lab.fabric.on_cuda:
        return gpu_cases.Lab(lab.fabric, lab.sizes._replace(T=2 * lab.sizes.T), backend=lab.backend)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < most:
        return f"the head at {tokens:,} tokens takes {most / 1e9:.0f} GB; {free / 1e9:.0f} GB are free"
    return gpu_cases.Lab(lab.fabric, gpu_cases.RECORD._replace(T=tokens))

def bench_kernels(lab: gpu_cases.Lab, rounds: int, report: Report) -> None:
    report.add("sizes", lab.sizes._asdict())
    cases = [(name, name, lab) for name in lab.cases()]
    large = large_head(lab)
    if isinstance(large, str):
        report.add("left_out", dict(reason=large))
    else:
        name = "head, fp8" if lab.has_fp8 else "head, plain"
        cases.append((f"{name}, {large.sizes.T} tokens", name, large))
    for title, name, sized in cases:
        gc.collect()                                          # gigabytes of the case before
        try:
            case = gpu_cases.CASES[name](sized)
            found = gpu_cases.check(title, case, sized)
            found["times"] = time_ways(case, sized.device, rounds)
        except Exception as error:                            # one that fails leaves the others alone
            words = " ".join(str(error).split())
            found = dict(name=title, wrong=[f"{title}: {type(error).__name__}: {words[:300]}"])
        report.add("kernels", found, found["wrong"])


# ---- Steps
def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]

def mean_loss(losses: tg.Losses) -> float:
    return float(losses.slot_sums.sum()) / losses.tokens

class Run:
    """What a run of `record`, on a CPU of `tiny`, makes before its warm-up: executor, loader, schedule."""
    def __init__(self, fabric: tg.Fabric, **changes: Any) -> None:
        """changes: of settings; without train_files a GPU trains on a formula's tokens. Raises RunError if the preset
        does not fit in memory."""
        began = time.perf_counter()
        name = "record" if fabric.on_cuda else "tiny"
        cfg = tg.Config(preset=name, **tg.PRESETS[name], epochs=0)
        if fabric.on_cuda:
            gc.collect()
            torch.cuda.empty_cache()                          # cached memory does not count as free
            cfg = replace(cfg, train_files=FORMULA, val_files=FORMULA)
        cfg = replace(cfg, **changes)
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
        self.executor = tg.Executor(cfg, fabric, kernel, precision, slots_at_once)
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
        loader = tg.Loader(self.cfg, self.fabric, self.headers, of_cycles, self.executor.exchange_ahead)
        with contextlib.closing(loader):
            loader.start()
            for values in sum(of_cycles, []):
                yield tg.train_step(self.executor, loader, values)

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
        estimate = tg.memory_estimate(only, self.fabric, self.executor.model.attention, self.executor.slots_at_once)
        each = seconds / len(last)
        return dict(stage=stage, tokens=row.batch_tokens, ms_per_step=1000 * each,
                    tokens_per_s=row.batch_tokens / each, first_cycle_s=first_s, graphs=compiled - before,
                    new_graphs=graphs() - compiled, estimate_mib=estimate.total() >> 20, peak_mib=peak,
                    first_loss=mean_loss(first[0]), last_loss=mean_loss(last[-1]))

    def measure_evaluation(self) -> dict[str, Any]:
        """One block of validation tokens, twice: the first time compiles."""
        end = self.schedule.at(self.schedule.end_step)
        data = tg.ValidationSet(self.cfg, self.fabric, self.val_headers)
        self.executor.evaluate(data.batches(end), end)
        before = graphs()
        loss, seconds, peak = self.timed(self.executor.evaluate, data.batches(end), end)
        return dict(s_per_block=seconds, tokens=self.cfg.val_batch_tokens, loss=loss, peak_mib=peak,
                    new_graphs=graphs() - before)


# ---- The command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    out = ROOT / f"logs/bench-gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=out, help="[logs/bench-gpu-TIME]")
    parser.add_argument("--rounds", type=int, default=15, help="timings of an operation [%(default)s]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="[a new one]")
    parser.add_argument("--backend", default="", help="of torch.compile [inductor; on a CPU nothing compiles]")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
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
    bench_kernels(gpu_cases.Lab(fabric, seed=args.seed, backend=args.backend), args.rounds, report)
    print(f"written to {report.path}")
    return 1 if report.figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

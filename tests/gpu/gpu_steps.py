"""A run of the trainer on one device, held at each stage: how long a step takes, what it keeps, what it compiles.

Everything is the trainer's own: executor, loader, schedule. On a CPU the same lines run the tiny preset.
"""
from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train_gpt as tg

FORMULA_TOKENS = 8_000_000
SETTLING = 2                             # cycles before those that count; in the first, graphs compile
DEAREST = 25                             # lines of a profile


class Started(NamedTuple):
    """A run up to where its warm-up would start."""
    cfg: tg.Config
    fabric: tg.Fabric
    schedule: tg.Schedule
    executor: tg.Executor
    headers: list
    val_headers: list
    figures: dict[str, Any]


def graphs() -> int:
    """How many were compiled so far in this process."""
    import torch._dynamo.utils
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def open_run(fabric: tg.Fabric) -> Started:
    """Everything that a run of `record`, on a CPU of `tiny`, does before its warm-up. Raises RunError if it does not
    fit. DATA names shards of training tokens, say of real ones; without it they are of a formula."""
    began = time.perf_counter()
    name = "tiny"
    cfg = tg.Config(**tg.PRESETS[name], epochs=0)
    if fabric.on_cuda:
        gc.collect()
        torch.cuda.empty_cache()                              # what is cached does not count as free
        name = "record"
        vocabulary = f"{tg.GPT2_VOCAB}:{tg.GPT2_DOCUMENT_START}"
        formula = f"formula:{vocabulary}:{FORMULA_TOKENS}:1"
        cfg = tg.Config(**tg.PRESETS[name], epochs=0)
        cfg = replace(cfg, train_files=os.environ.get("DATA", formula), val_files=formula)
    tg.check_config(cfg)
    headers = tg.find_shards(cfg.train_files)
    val_headers = tg.find_shards(cfg.val_files)
    cfg = tg.resolve(replace(cfg, val_tokens=cfg.val_batch_tokens), headers, val_headers)

    precision = tg.head_precision(cfg, fabric)
    kernel, attention = tg.choose_attention(name, cfg, fabric)
    slots_at_once, estimate = tg.fit_memory(cfg, fabric, kernel)
    executor = tg.Executor(cfg, fabric, kernel, precision, slots_at_once)
    fabric.synchronize()
    figures = dict(preset=name, attention=attention, head=precision, tokens=cfg.train_files,
                   slots_at_once=slots_at_once, micro_batches=cfg.num_slots // slots_at_once,
                   estimate_mib=estimate.total() >> 20, set_up_s=time.perf_counter() - began)
    return Started(cfg, fabric, tg.Schedule(cfg), executor, headers, val_headers, figures)


class NoLog:
    """What the warm-up tells of its phases, told to nobody."""
    def phase(self, _: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


def warm_up(run: Started) -> dict[str, Any]:
    """The race's own, whole: every graph of the run, evaluations too."""
    before = graphs()
    began = time.perf_counter()
    tg.warm_up(run.cfg, run.fabric, run.executor, NoLog())
    run.fabric.synchronize()
    return dict(warm_up_s=time.perf_counter() - began, graphs=graphs() - before)


def peak_mib(fabric: tg.Fabric, call: Callable, *args: Any) -> tuple[Any, int]:
    """What a call returns, and the most that tensors took meanwhile; 0 where nobody counts."""
    if not fabric.on_cuda:
        return call(*args), 0
    torch.cuda.reset_peak_memory_stats(fabric.device)
    found = call(*args)
    return found, torch.cuda.max_memory_allocated(fabric.device) >> 20


# ---- Times
class Stopwatch:
    """Times of calls, in ms: between events of the device, or by the clock where there is none."""
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple] = []

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, call: Callable[[], object]) -> None:
        before = self.mark()
        call()
        self.spans.append((before, self.mark()))

    def read(self) -> list[float]:
        """ms of the calls so far."""
        if self.device.type != "cuda":
            return [1000 * (after - before) for before, after in self.spans]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in self.spans]


def spread(ms: Sequence[float]) -> dict[str, float]:
    return dict(ms=statistics.median(ms), least=min(ms), most=max(ms), n=len(ms))


# ---- Stages
class Steps:
    """The steps of a stage, taken one after the other: its first cycle, which may untie, then the second one again
    and again."""
    def __init__(self, run: Started, stage: int, cycles: int) -> None:
        self.run = run
        cycle = run.schedule.cycle
        first = run.schedule.starts[stage] // cycle * cycle
        starts = [first] + (cycles - 1) * [first + cycle]
        of_cycles = [[run.schedule.at(step) for step in range(start, start + cycle)] for start in starts]
        self.values = iter(sum(of_cycles, []))
        self.loader = tg.Loader(run.cfg, run.fabric, run.headers, of_cycles)
        self.loader.start()
        self.losses: list[tg.Losses] = []

    def step(self) -> None:
        self.losses.append(tg.train_step(self.run.executor, self.loader, next(self.values)))

    def timed(self, count: int) -> list[float]:
        """ms of each, on the device, which nobody waits for in between."""
        watch = Stopwatch(self.run.fabric.device)
        for _ in range(count):
            watch.time(self.step)
        return watch.read()

    def profiled(self, count: int, trace: Path) -> str:
        """Where the time of some steps went, the dearest first. trace: a file for all that was seen."""
        with torch.profiler.profile() as profile:
            for _ in range(count):
                self.step()
            self.run.fabric.synchronize()
        profile.export_chrome_trace(str(trace))
        sort_by = f"self_{self.run.fabric.device.type}_time_total"
        return profile.key_averages().table(sort_by, DEAREST, max_name_column_width=90)

    def mean_loss(self, at: int) -> float:
        losses = self.losses[at]
        return float(losses.slot_sums.sum()) / losses.tokens


def measure_stage(run: Started, stage: int, cycles: int, trace: Path | None = None) -> dict[str, Any]:
    """Seconds of the first cycle, in which the graphs compile; then ms of a step, memory, graphs; with a file for its
    trace, a profile of one cycle."""
    cycle = run.schedule.cycle
    before = graphs()
    steps = Steps(run, stage, SETTLING + cycles + 1)
    first_ms = steps.timed(cycle)
    steps.timed((SETTLING - 1) * cycle)
    compiled = graphs()
    ms, peak = peak_mib(run.fabric, steps.timed, cycles * cycle)
    profile = steps.profiled(cycle, trace) if trace else ""
    steps.loader.close()

    tokens = run.cfg.stages[stage].batch_tokens
    mean = statistics.mean(ms)
    return dict(stage=stage, tokens=tokens, first_cycle_s=sum(first_ms) / 1000, graphs=compiled - before,
                new_graphs=graphs() - compiled, of_cycle=[spread(ms[at::cycle]) for at in range(cycle)], ms_per_step=mean,
                tokens_per_s=1000 * tokens / mean, estimate_mib=estimate_mib(run, stage), peak_mib=peak,
                first_loss=steps.mean_loss(0), last_loss=steps.mean_loss(-1), profile=profile)


def estimate_mib(run: Started, stage: int) -> int:
    """What the trainer expects if the run had this stage only."""
    row = run.cfg.stages[stage]
    only = replace(run.cfg, stages=(row, row), val_batch_tokens=16 * run.cfg.num_slots)
    return tg.memory_estimate(only, run.fabric, run.executor.model.attention, run.executor.slots_at_once).total() >> 20


def measure_evaluation(run: Started) -> dict[str, Any]:
    """One block of validation tokens, twice: the first time compiles."""
    end = run.schedule.at(run.schedule.end_step)
    data = tg.ValidationSet(run.cfg, run.fabric, run.val_headers)
    began = time.perf_counter()
    run.executor.evaluate(data.batches(end), end)
    first_s = time.perf_counter() - began
    before = graphs()
    began = time.perf_counter()
    loss, peak = peak_mib(run.fabric, run.executor.evaluate, data.batches(end), end)
    return dict(first_s=first_s, s_per_block=time.perf_counter() - began, tokens=run.cfg.val_batch_tokens, loss=loss,
                peak_mib=peak, new_graphs=graphs() - before)

"""A run of the trainer on one device, held still at each stage: how long a step takes, how much it keeps, what it runs.

Everything is the trainer's own: executor, loader, schedule. On a CPU the same lines run the tiny preset.
"""
from __future__ import annotations

import contextlib
import gc
import glob
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cases import Stopwatch, peaks_of, seen_keys, spread
from torch import Tensor

import train_gpt as tg

ROOT = Path(__file__).resolve().parents[2]
REAL_TOKENS = "../shared/data/measure_{part}_*.bin"                           # DATA=... names others
BACKWARD_OF_PRODUCTS = 3                 # forward and backward together, in forward passes
BACKWARD_OF_ATTENTION = 3.5              # its backward computes the scores again


class Started(NamedTuple):
    """A run up to where its warm-up would start."""

    cfg: tg.Config
    fabric: tg.Fabric
    schedule: tg.Schedule
    executor: tg.Executor
    kernel: Callable
    headers: list
    val_headers: list
    figures: dict[str, Any]


def graphs() -> int:
    """That were compiled so far in this process."""
    import torch._dynamo.utils
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tokens_of(part: str, vocab: int, count: int) -> str:
    """Shards of real tokens where there are some for this vocabulary, else tokens of a formula."""
    pattern = os.environ.get("DATA", str(ROOT / REAL_TOKENS)).format(part=part)
    if vocab == tg.GPT2_VOCAB and glob.glob(pattern):
        return pattern
    return f"formula:{vocab}:{vocab - 1}:{count}:1"


def open_run(name: str, fabric: tg.Fabric, tokens: int, vocab: int, **changes: Any) -> Started:
    """Everything that a run does before its warm-up. Raises RunError if it does not fit."""
    began = time.perf_counter()
    gc.collect()
    if fabric.on_cuda:
        torch.cuda.empty_cache()                                              # what is cached does not count as free
    cfg = tg.Config(**tg.PRESETS[name] | changes)
    cfg = replace(cfg, train_files=tokens_of("train", vocab, tokens), val_files=tokens_of("val", vocab, tokens))
    tg.check_config(cfg)
    headers = tg.find_shards(cfg.train_files)
    val_headers = tg.find_shards(cfg.val_files)
    cfg = tg.resolve(replace(cfg, val_tokens=cfg.val_batch_tokens, epochs=0), headers, val_headers)

    precision = tg.head_precision(cfg, fabric)
    kernel, attention = tg.choose_attention(name, cfg, fabric)
    slots_at_once, estimate = tg.fit_memory(cfg, fabric, kernel)
    executor = tg.Executor(cfg, fabric, kernel, precision, slots_at_once)
    fabric.synchronize()
    estimate_mib = {part: size >> 20 for part, size in estimate.items()}
    figures = dict(preset=name, hardware=tg.hardware(fabric), torch=torch.__version__, attention=attention,
                   head=precision, tokens=cfg.train_files, slots_at_once=slots_at_once,
                   micro_batches=cfg.num_slots // slots_at_once, estimate_mib=estimate_mib,
                   set_up_s=time.perf_counter() - began)
    return Started(cfg, fabric, tg.Schedule(cfg), executor, kernel, headers, val_headers, figures)


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


def parted(run: Started) -> bool:
    """Whether head and embedding are two by now: then the embedding has moments of its own, the head's at first."""
    return bool(run.executor.optimizer.state["embed"]["v"].any())


def reset_peak(fabric: tg.Fabric) -> None:
    if fabric.on_cuda:
        torch.cuda.reset_peak_memory_stats(fabric.device)


def peak_mib(fabric: tg.Fabric) -> int:
    """Of tensors since the last reset; 0 where nobody counts."""
    if not fabric.on_cuda:
        return 0
    return torch.cuda.max_memory_allocated(fabric.device) >> 20


# ------ The model's work ----------------------------------------------------------------------------------------------

def product_flops(cfg: tg.Config) -> int:
    """Of a token, forward and backward: every matrix of the model once, the head among them."""
    weights = 0
    for row in tg.parameter_table(cfg):
        if row.optimizer == "normuon" or row.label == "lm_head":
            weights += torch.Size(row.shape).numel()
    return BACKWARD_OF_PRODUCTS * 2 * weights


def attention_flops(cfg: tg.Config, values: tg.Values, bounds: list[int]) -> float:
    """Of one slot, forward and backward, on the pairs of query and key that the mask leaves; bounds: cu_seqlens."""
    twice = [2 * bound for bound in bounds]
    total = 0.0
    for layer in tg.LAYERS:
        if layer.attention == "none":
            continue
        window = values.long_window if layer.window == "long" else values.short_window
        if layer.attention == "paired":
            pairs = cfg.num_heads // 2 * seen_keys(twice, window)
        else:
            pairs = cfg.num_heads * seen_keys(bounds, window)
        total += BACKWARD_OF_ATTENTION * 4 * cfg.head_dim * pairs
    return total


def model_flops(cfg: tg.Config, values: tg.Values, cu_seqlens: Tensor) -> float:
    """Of this rank's slots of a step; cu_seqlens as in its batch."""
    tokens = len(cu_seqlens) * values.slot_tokens
    total = tokens * product_flops(cfg)
    for slot in cu_seqlens.tolist():
        total += attention_flops(cfg, values, slot)
    return total


# ------ Stages --------------------------------------------------------------------------------------------------------

class Watched:
    """A loader that remembers the documents of each batch it gave."""

    def __init__(self, loader: tg.Loader) -> None:
        self.loader = loader
        self.plans_ahead = loader.plans_ahead
        self.cu_seqlens: list[Tensor] = []

    def next(self, values: tg.Values) -> tg.Batch:
        batch = self.loader.next(values)
        self.cu_seqlens.append(batch.cu_seqlens)
        return batch


CYCLE = 2                                # steps, an even and an odd one, in every preset


def cycle_values(run: Started, stage: int, cycles: int) -> list[list[tg.Values]]:
    """The first cycle of a stage, which may untie, and the second one again and again."""
    first = run.schedule.starts[stage] // CYCLE * CYCLE
    firsts = [first] + (cycles - 1) * [first + CYCLE]
    return [[run.schedule.at(step) for step in (even, even + 1)] for even in firsts]


class Steps:
    """The steps of a stage, taken one after the other: bare, timed, or under the profiler."""

    def __init__(self, run: Started, cycles: list[list[tg.Values]]) -> None:
        self.run = run
        self.values = [values for cycle in cycles for values in cycle]
        self.loader = tg.Loader(run.cfg, run.fabric, run.headers, cycles)
        self.loader.start()
        self.watched = Watched(self.loader)
        self.losses: list[tg.Losses] = []

    def step(self) -> tg.Values:
        values = self.values[len(self.losses)]
        self.losses.append(tg.train_step(self.run.executor, self.watched, values))
        return values

    def bare(self, count: int) -> float:
        """Seconds until the device is done with them."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self.run.fabric.synchronize()
        return time.perf_counter() - began

    def timed(self, count: int) -> list[float]:
        """ms of each, on the device, which nobody waits for in between."""
        watch = Stopwatch(self.run.fabric.device)
        for _ in range(count):
            before = watch.mark()
            self.step()
            watch.spans.append((before, watch.mark()))
        return watch.read()

    def profiled(self, count: int, trace: Path | None) -> dict[str, Any]:
        """Where the time of some steps went, ms a step. trace: a file for all that was seen, as a run names it."""
        on_cuda = self.run.fabric.on_cuda
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(count):
                number = self.values[len(self.losses)].step
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    self.step()
            self.run.fabric.synchronize()
        if trace is not None:
            profile.export_chrome_trace(str(trace))
        return dict(rows=rows_of_profile(profile.events(), count, on_cuda))

    def mean_losses(self) -> list[float]:
        return [float(loss.slot_sums.sum()) / loss.tokens for loss in self.losses]

    def mean_flops(self, first: int) -> float:
        """Of the model in a step on this rank, from the given one on."""
        work = []
        for values, cu_seqlens in zip(self.values[first:], self.watched.cu_seqlens[first:]):
            work.append(model_flops(self.run.cfg, values, cu_seqlens))
        return statistics.mean(work)


def rows_of_profile(events: list, steps: int, on_cuda: bool) -> list[dict[str, Any]]:
    """By kernel on a GPU, by operation on a CPU, the dearest first: calls and ms a step."""
    calls = Counter()
    us = Counter()
    for event in events:
        if event.device_type.name != ("CUDA" if on_cuda else "CPU") or event.is_user_annotation:
            continue
        if event.name.startswith("ProfilerStep"):
            continue
        calls[event.name] += 1
        us[event.name] += event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
    return [dict(name=name, calls=calls[name] / steps, ms=total / steps / 1000) for name, total in us.most_common()]


def measure_stage(run: Started, stage: int, cycles: int, profiled: bool = True,
                  trace: Path | None = None) -> dict[str, Any]:
    """Seconds of the first cycle, in which the graphs compile; then ms of even and odd steps, memory, kernels."""
    row = run.cfg.stages[stage]
    before = graphs()
    steps = Steps(run, cycle_values(run, stage, cycles + 2 + profiled))       # 2 before, one for the profile
    first_cycle_s = steps.bare(CYCLE)
    steps.bare(CYCLE)
    compiled = graphs()
    reset_peak(run.fabric)
    ms = steps.timed(cycles * CYCLE)
    peak = peak_mib(run.fabric)
    profile = {}
    if profiled:
        profile = steps.profiled(CYCLE if run.fabric.on_cuda else 1, trace)
    steps.loader.close()

    losses = steps.mean_losses()
    return dict(stage=stage, tokens=row.batch_tokens, first_cycle_s=first_cycle_s, graphs=compiled - before,
                new_graphs=graphs() - compiled, **step_figures(run, ms, steps.mean_flops(2 * CYCLE)),
                tokens_per_s=1000 * row.batch_tokens / max(statistics.mean(ms), 1e-9),
                estimate_mib=estimate_mib(run, stage), peak_mib=peak, first_loss=losses[0], last_loss=losses[-1],
                profile=profile)


def step_figures(run: Started, ms: list[float], flops: float) -> dict[str, Any]:
    """Of steps that alternate, even and odd; flops: of the model in one of them on this rank."""
    even = spread(ms[0::2])
    odd = spread(ms[1::2])
    figures = dict(even=even, odd=odd, ms_per_step=(even["ms"] + odd["ms"]) / 2, tflop=flops / 1e12)
    if run.fabric.on_cuda:
        peaks = peaks_of(torch.cuda.get_device_name(run.fabric.device))
        if peaks and figures["ms_per_step"] > 0:
            figures["mfu"] = flops / (figures["ms_per_step"] / 1000) / peaks["bfloat16"]
    return figures


def estimate_mib(run: Started, stage: int) -> int:
    """What the trainer expects if the run had this stage only."""
    row = run.cfg.stages[stage]
    only = replace(run.cfg, stages=(row, row), val_batch_tokens=16 * run.cfg.num_slots)
    return sum(tg.memory_estimate(only, run.fabric, run.kernel, run.executor.slots_at_once).values()) >> 20


def measure_evaluation(run: Started) -> dict[str, Any]:
    """One block of validation tokens, twice: the first time compiles."""
    end = run.schedule.at(run.schedule.end_step)
    data = tg.ValidationSet(run.cfg, run.fabric, run.val_headers)
    began = time.perf_counter()
    run.executor.evaluate(data.batches(end), end)
    first_s = time.perf_counter() - began
    before = graphs()
    reset_peak(run.fabric)
    began = time.perf_counter()
    loss = run.executor.evaluate(data.batches(end), end)
    return dict(first_s=first_s, s_per_block=time.perf_counter() - began, tokens=run.cfg.val_batch_tokens, loss=loss,
                estimate_mib=sum(run.figures["estimate_mib"].values()), peak_mib=peak_mib(run.fabric),
                new_graphs=graphs() - before)

"""A run of the trainer on one device, held at each stage: how long a step takes, what it keeps, what it compiles.

Everything is the trainer's own: executor, loader, schedule. On a CPU the same lines run the tiny preset.
"""
from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import train_gpt as tg

FORMULA = f"formula:{tg.GPT2_VOCAB}:{tg.GPT2_DOCUMENT_START}:8000000:1"
SETTLING = 2                             # cycles before those that count; in the first, graphs compile


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
    name = "record" if fabric.on_cuda else "tiny"
    cfg = tg.Config(**tg.PRESETS[name], epochs=0)
    if fabric.on_cuda:
        gc.collect()
        torch.cuda.empty_cache()                              # what is cached does not count as free
        cfg = replace(cfg, train_files=os.environ.get("DATA", FORMULA), val_files=FORMULA)
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


def peak_mib(fabric: tg.Fabric, call: Callable, *args: Any) -> tuple[Any, int]:
    """What a call returns, and the most that tensors took meanwhile; 0 where nobody counts."""
    if not fabric.on_cuda:
        return call(*args), 0
    torch.cuda.reset_peak_memory_stats(fabric.device)
    found = call(*args)
    return found, torch.cuda.max_memory_allocated(fabric.device) >> 20


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

    def seconds(self, count: int) -> float:
        """Until the device is done with them."""
        began = time.perf_counter()
        for _ in range(count):
            self.losses.append(tg.train_step(self.run.executor, self.loader, next(self.values)))
        self.run.fabric.synchronize()
        return time.perf_counter() - began

    def mean_loss(self, at: int) -> float:
        losses = self.losses[at]
        return float(losses.slot_sums.sum()) / losses.tokens


def measure_stage(run: Started, stage: int, cycles: int) -> dict[str, Any]:
    """Seconds of the first cycle, in which the graphs compile; then ms of a step, memory, graphs."""
    cycle = run.schedule.cycle
    before = graphs()
    steps = Steps(run, stage, SETTLING + cycles)
    first_s = steps.seconds(cycle)
    steps.seconds((SETTLING - 1) * cycle)
    compiled = graphs()
    seconds, peak = peak_mib(run.fabric, steps.seconds, cycles * cycle)
    steps.loader.close()

    tokens = run.cfg.stages[stage].batch_tokens
    each = seconds / (cycles * cycle)
    return dict(stage=stage, tokens=tokens, ms_per_step=1000 * each, tokens_per_s=tokens / each, first_cycle_s=first_s,
                graphs=compiled - before, new_graphs=graphs() - compiled, estimate_mib=estimate_mib(run, stage),
                peak_mib=peak, first_loss=steps.mean_loss(0), last_loss=steps.mean_loss(-1))


def estimate_mib(run: Started, stage: int) -> int:
    """What the trainer expects if the run had this stage only."""
    row = run.cfg.stages[stage]
    only = replace(run.cfg, stages=(row, row), val_batch_tokens=16 * run.cfg.num_slots)
    return tg.memory_estimate(only, run.fabric, run.executor.model.attention, run.executor.slots_at_once).total() >> 20


def measure_evaluation(run: Started) -> dict[str, Any]:
    """One block of validation tokens, twice: the first time compiles."""
    end = run.schedule.at(run.schedule.end_step)
    data = tg.ValidationSet(run.cfg, run.fabric, run.val_headers)
    run.executor.evaluate(data.batches(end), end)
    before = graphs()
    began = time.perf_counter()
    loss, peak = peak_mib(run.fabric, run.executor.evaluate, data.batches(end), end)
    return dict(s_per_block=time.perf_counter() - began, tokens=run.cfg.val_batch_tokens, loss=loss, peak_mib=peak,
                new_graphs=graphs() - before)

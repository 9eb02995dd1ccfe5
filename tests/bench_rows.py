"""Measure the time and traffic of row plans and tables at the sizes of recipe A. Prints tables and checks nothing.

    python tests/bench_rows.py bytes    rows and bytes at 8 ranks, load of owners, and time to plan
    python tests/bench_rows.py scale    10 million rows compared with 250 thousand on 4 gloo ranks, interleaved
    python tests/bench_rows.py rowwise  n-gram tables in host memory: 10^8 rows compared with 10^6, interleaved

Tokens are read from the GPT-2 shards that the environment variable DATA names (default
data/fineweb10B/fineweb_train_*.bin). If there are none, the tokens of preset pocket are used. Their vocabulary is
smaller, so the fractions of bytes are larger.
"""
from __future__ import annotations

import contextlib
import functools
import glob
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import plan_of
from pytest import MonkeyPatch

import train_gpt as tg

RANKS = 8
WIDTH = 768
ROW_BYTES = 2 * WIDTH                                                # bf16
ID_BYTES = 4                                                         # i32
STAGES = range(3)                                                    # the extension has the sizes of the third stage

def token_files() -> str:
    pattern = os.environ.get("DATA", str(ROOT / "data/fineweb10B/fineweb_train_*.bin"))
    return pattern if glob.glob(pattern) else str(ROOT / "data/pocket/pocket_train_*.bin")

def print_row(*cells: Any) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")

def print_head(*names: str) -> None:
    print_row(*names)
    print("|" + "---|" * len(names))


# ---- Rows that a run's plans request ---------------------------------------------------------------------------------
def plan_cycles(stage: int, rank: int, max_cycles: int) -> tuple[list[dict[str, tg.RowPlan]], dict[str, list[float]]]:
    """Plan a rank's cycles of two steps in a stage of preset record, until max_cycles or the end of the tokens.

    Return the plans of each cycle, and for each table the ms to plan the rows of each cycle. The ranks exchange no
    requests.
    """
    headers = tg.read_shard_headers(token_files())
    cfg = tg.resolve_sizes(replace(tg.Config(), train_files=token_files(), adam_every=2), headers, headers)
    schedule = tg.Schedule(cfg)
    step_cfg = replace(schedule.at(schedule.stage_starts[stage]), tied=False)  # the embedding is looked up as a table
    cycles = [[replace(step_cfg, step=step) for step in (first, first + 1)] for first in range(0, 2 * max_cycles, 2)]
    plans = []
    times_ms = defaultdict(list)

    plan_rows = tg.plan_rows

    def timed_plan(table: tg.TableSpec, *rest: Any) -> tuple[tg.RowPlan, list[np.ndarray]]:
        start = time.perf_counter()
        planned = plan_rows(table, *rest)
        times_ms[table.label].append(1000 * (time.perf_counter() - start))
        return planned

    with MonkeyPatch.context() as patch:
        patch.setattr(tg, "plan_rows", timed_plan)
        patch.setattr(tg, "exchange_row_requests", lambda *_: None)
        loader = tg.Loader(cfg, tg.Communicator(torch.device("cpu"), rank, RANKS), headers, cycles)
        with contextlib.closing(loader), contextlib.suppress(tg.OutOfData):
            loader.start()
            for _ in range(2 * max_cycles):
                plans.append(loader.next().plans)
    return plans[::2], times_ms

class Traffic(NamedTuple):
    """Means of one table over all cycles."""
    rows: float                                                      # unique rows that a rank looks up
    megabytes: float                                                 # sent by a rank: ids, rows and gradients
    sparse: float                                                    # relative to dense mode
    busiest: float                                                   # load of the busiest owner, relative to the mean
    plan_ms: float                                                   # without hashing

def measure_traffic(stage: int, max_cycles: int) -> dict[str, Traffic]:
    """Measure the traffic of each table."""
    by_rank, times_ms = zip(*(plan_cycles(stage, rank, max_cycles) for rank in range(RANKS)))
    found = {}
    for label, plan in by_rank[0][0].items():
        counts = np.array([[plans[label].fetch_counts for plans in plans_of_rank] for plans_of_rank in by_rank])
        counts = counts.swapaxes(0, 1)                               # (cycle, reader, owner)
        between_ranks = counts * (1 - np.eye(RANKS, dtype=int))
        sent = between_ranks.sum(2) * (ID_BYTES + ROW_BYTES) + between_ranks.sum(1) * ROW_BYTES
        dense = 2 * (RANKS - 1) * plan.shard_rows * ROW_BYTES
        served = counts.sum(1)
        plan_ms = np.median(times_ms[0][label])
        found[label] = Traffic(counts.sum(2).mean(), 1e-6 * sent.mean(), sent.mean() / dense,
                               (served.max(1) / served.mean(1)).mean(), plan_ms)
    return found

def print_bytes() -> None:
    print(f"{token_files()}\n{RANKS} ranks, rows of {WIDTH} bf16; means over all cycles, dense = 1\n")
    print_head("table", "stage", "rows of a rank", "MB sent per rank", "sparse", "busiest owner", "plan ms")
    for stage in STAGES:
        for label, traffic in measure_traffic(stage, max_cycles=1000).items():
            print_row(label, stage + 1, *(f"{figure:,.{3 if figure < 1000 else 0}f}" for figure in traffic))


# ---- Large tables compared with small ones ---------------------------------------------------------------------------
ROUNDS, DROPPED = 12, 2                                              # the first rounds touch memory for the first time

class TimedTable:
    """Runs cycles of one table and times each phase."""
    phases = ("plan and exchange", "fetch", "reduce gradients", "update")

    def __init__(self, spec: tg.TableSpec, comm: tg.Communicator, width: int, max_lookups: int) -> None:
        cfg = tg.Config(**tg.PRESETS["tiny"] | dict(model_dim=width))
        self.spec = spec
        self.comm = comm
        self.moments = []
        parameter_spec = tg.ParameterSpec(spec.label, (spec.num_rows, width), None, table=spec)
        if spec.rowwise:
            self.table = tg.RowwiseTable(parameter_spec, cfg, comm, max_lookups)
        else:
            shard = torch.zeros(spec.shard_rows(comm.world_size), width)
            self.table = tg.ExchangedTable(parameter_spec, cfg, comm, shard, max_lookups, head=None)
            self.moments = [torch.zeros_like(shard), torch.zeros_like(shard)]
        self.update_num = 0

    def run_cycle(self, ids: np.ndarray) -> np.ndarray:
        """Run one cycle; return the ns per row of each phase."""
        table = self.table
        self.update_num += 1
        times = [time.perf_counter()]
        plan, _ = plan_of(self.spec, self.comm, [ids[None]])
        if self.comm.world_size > 1:     # otherwise `plan_of` does it
            tg.exchange_row_requests(self.comm, None, [self.spec], {self.spec.label: plan})
        times.append(time.perf_counter())
        table.rows_for_forward(plan)
        times.append(time.perf_counter())
        table.row_grads[:len(plan.rows_to_fetch)] = 1.0
        table.launch_reduce()
        grad, = table.reduced_grads()
        times.append(time.perf_counter())
        step_size, decay = tg.cpu_scalar(1e-3), tg.cpu_scalar(0.0)
        due, = table.to_update()
        if self.spec.rowwise:
            update_num = torch.tensor(self.update_num, dtype=torch.int32)
            tg.rowwise_update(*due, grad, 1 / 8, update_num, 0.95, 1e-10, step_size, decay)
        else:
            tg.adam_update(due, grad, *self.moments, 1.0, (0.75, 0.95), 1e-10, step_size, decay)
        table.launch_gather()
        times.append(time.perf_counter())
        table.zero_grad()
        return 1e9 * np.diff(times) / len(plan.rows_to_fetch)

def compare(rank: int, world: int, store: str, rowwise: bool, sizes: tuple[int, int], width: int, ids: int) -> None:
    """Run cycles of two tables alternately. Each table looks up the same uniformly drawn rows in every second cycle."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    comm = tg.Communicator(torch.device("cpu"), rank, world)
    sides = {}
    lookups = {}
    for rows in sizes:
        spec = tg.TableSpec("a_embed", rows, 1, None, rowwise=rowwise)
        sides[rows] = TimedTable(spec, comm, width, ids)
        lookups[rows] = np.random.default_rng(rank).integers(0, rows, (2, ids), dtype=np.int32)
    found = {rows: [] for rows in sizes}
    for round_idx in range(ROUNDS):
        for rows in sizes[::(-1) ** round_idx]:
            comm.all_gather(rows)        # barrier
            found[rows].append(sides[rows].run_cycle(lookups[rows][round_idx % 2]))
    comm.all_gather(rank)
    if rank == 0:
        print(f"{world} ranks, width {width}, {ids:,} lookups per rank and cycle; medians of {ROUNDS - DROPPED} "
              f"interleaved rounds\n")
        print_head("ns per fetched row", *TimedTable.phases, "all")
        medians = []
        for rows, times in found.items():
            times = times[DROPPED:]
            medians.append(np.append(np.median(times, axis=0), np.median(np.sum(times, axis=1))))
            print_row(f"{rows:,} rows", *(f"{x:,.0f}" for x in medians[-1]))
        print_row("ratio", *(f"{x:.2f}" for x in medians[1] / medians[0]))
    if world > 1:
        dist.destroy_process_group()

def print_scale() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (4, f"{folder}/store", False, (250_000, 10_000_000), 8, 32_768), 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHES = dict(bytes=print_bytes, scale=print_scale,
                   rowwise=functools.partial(compare, 0, 1, "", True, (10**6, 10**8), 96, 98_304))
    if unknown := set(sys.argv[1:]) - BENCHES.keys():
        sys.exit(f"{__doc__}\nunknown: {' '.join(sorted(unknown))}; expected: {', '.join(BENCHES)}")
    for name in sys.argv[1:] or BENCHES:
        BENCHES[name]()
        print()

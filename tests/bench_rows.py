"""What the row plans cost and move, at recipe A's sizes. Prints tables; asserts nothing.

    python tests/bench_rows.py bytes      bytes at 8 ranks on real tokens, and how busy the owners are
    python tests/bench_rows.py plans      plan time per cycle, and how much of it the training thread waits for
    python tests/bench_rows.py scale      10 million rows against 250 thousand on 4 gloo ranks, interleaved

Tokens are the GPT-2 shards that DATA names (default ../shared/data/measure_train_*.bin), else the pocket preset's.
"""
from __future__ import annotations

import functools
import glob
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import train_gpt as tg
from common import plan_of, planner_of

RANKS = 8
WIDTH, WIRE_BYTES, ID_BYTES = 768, 2, 4                              # bf16 rows, i32 ids
TABLES = ("bigram_embed", "value_embed", "embed")
STAGES = range(3)                                                    # the extension has the sizes of the third


def tokens() -> str:
    pattern = os.environ.get("DATA", str(ROOT / "../shared/data/measure_train_*.bin"))
    return pattern if glob.glob(pattern) else str(ROOT / "data/pocket/pocket_train_*.bin")


def cycles(stage: int, rank: int, world: int = RANKS, most: int = 1 << 30, **settings) -> Iterator[list[tg.Batch]]:
    """Batches of one rank's cycles in a stage of the record preset with these settings, as long as the tokens last."""
    headers = tg.find_shards(tokens())
    cfg = tg.resolve(replace(tg.Config(), train_files=tokens(), **settings), headers, headers)
    values = tg.Schedule(cfg).at(tg.Schedule(cfg).starts[stage])
    values = replace(values, tied=False)                             # the embedding's rows as after the two have parted
    steps = [replace(values, step=step) for step in range(2 * min(most, 1000))]
    cycles = [steps[first:first + 2] for first in range(0, len(steps), 2)]
    loader = tg.Loader(cfg, tg.Fabric(torch.device("cpu"), rank, world), headers, cycles)
    loader.start()
    try:
        for step in range(0, len(steps), 2):
            yield [loader.next(steps[step]), loader.next(steps[step + 1])]
    except tg.DataError:
        return
    finally:
        loader.close()


def counted(stage: int, most: int = 1 << 30, world: int = RANKS) -> dict[str, np.ndarray]:
    """(cycles, reader, owner) rows of each table."""
    found: dict[str, list] = {label: [] for label in TABLES}
    for rank in range(world):
        plans = [batch.plans for batch, _ in cycles(stage, rank, world, most)]
        for label in TABLES:
            found[label].append([plan[label].send_counts for plan in plans])
    return {label: np.array(counts).swapaxes(0, 1) for label, counts in found.items()}


def shares(counts: np.ndarray, rows: int) -> dict[str, float]:
    """Mean bytes sent per rank and cycle over those of the dense scheme, and the busiest owner over the mean owner."""
    world = counts.shape[1]
    row_bytes, slice_rows = WIDTH * WIRE_BYTES, -(-rows // world)
    dense = 2 * (world - 1) * slice_rows * row_bytes
    others = counts * (1 - np.eye(world, dtype=int))                 # what goes to another rank
    ids = others.sum(2) * ID_BYTES
    gradients, fetched = others.sum(2) * row_bytes, others.sum(1) * row_bytes
    asked_of_owner = counts.sum(1)                                   # (cycles, owner), over all readers
    both_ways = (ids + gradients + fetched).mean()
    return dict(rows=counts.sum(2).mean(), share=counts.sum(2).mean() / rows, MB=1e-6 * both_ways,
                sparse=both_ways / dense,
                busiest=(asked_of_owner.max(1) / asked_of_owner.mean(1)).mean())


def table_rows() -> dict[str, int]:
    headers = tg.find_shards(tokens())
    return {table.label: table.rows for table in tg.row_tables(tg.resolve(tg.Config(), headers, headers))}


def bytes_table() -> None:
    print(f"{tokens()}\n{RANKS} ranks, rows of {WIDTH} bf16; bytes sent per rank and cycle, dense = 1\n")
    head = ("table", "stage", "cycles", "rows", "of table", "sparse MB", "sparse", "busiest owner")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for stage in STAGES:
        for label, counts in counted(stage).items():
            s = shares(counts, table_rows()[label])
            print(f"| {label} | {stage + 1} | {len(counts)} | {s['rows']:,.0f} | {100 * s['share']:.1f} % "
                  f"| {s['MB']:.1f} | {s['sparse']:.4f} | {s['busiest']:.3f} |")


def plan_times(most: int = 30, step_s: float = 0.05) -> None:
    """The loader's thread beside a training thread that computes nothing and sleeps, as if it waited for a device."""
    print(f"{tokens()}\nms per cycle, median (10th to 90th percentile) of {most} cycles, rank 0 of {RANKS}\n")
    print("| stage | " + " | ".join(TABLES) + " | all plans | training thread waits |\n|" + "---|" * (len(TABLES) + 3))
    for stage in STAGES:
        times, waits = {label: [] for label in TABLES}, []
        source = cycles(stage, 0, most=most)
        while True:
            began = time.perf_counter()
            batches = next(source, None)
            if batches is None:
                break
            waits.append(1000 * (time.perf_counter() - began))
            for label in TABLES:
                times[label].append(batches[0].plans[label].plan_ms)
            time.sleep(2 * step_s)
        rows = [times[label][1:] for label in TABLES]
        rows += [[sum(x) for x in zip(*rows)], waits[2:]]
        cells = (f"{statistics.median(x):.2f} ({np.percentile(x, 10):.2f} to {np.percentile(x, 90):.2f})" for x in rows)
        print(f"| {stage + 1} | " + " | ".join(cells) + " |")


SCALE_RANKS, SCALE_ROWS, SCALE_WIDTH, SCALE_IDS, SCALE_ROUNDS = 4, (250_000, 10_000_000), 8, 32_768, 12


def scale_rank(rank: int, store: str) -> None:
    """One rank of the comparison: plan, exchange, fetch, return and update of both tables in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SCALE_RANKS)
    fabric = tg.Fabric(torch.device("cpu"), rank, SCALE_RANKS)
    exchange = functools.partial(tg.exchange_plans, fabric, None, "float32")
    found, sides = {rows: [] for rows in SCALE_ROWS}, {}
    for rows in SCALE_ROWS:
        spec = tg.Table("bigram_embed", rows, 1, None)
        shard = torch.zeros(-(-rows // SCALE_RANKS), SCALE_WIDTH)
        table = tg.RowTable(spec, tg.Config(), fabric, shard, SCALE_IDS, tg.no_wait)
        sides[rows] = planner_of(tg.Config(), fabric, spec), table, torch.zeros_like(shard), torch.zeros_like(shard)
    numbers = np.random.default_rng(rank)
    for round_ in range(SCALE_ROUNDS):
        for rows in SCALE_ROWS if round_ % 2 else SCALE_ROWS[::-1]:
            planner, table, m, v = sides[rows]
            ids = [numbers.integers(0, rows, (1, SCALE_IDS), dtype=np.int32)]
            dist.barrier()
            times = [time.perf_counter()]
            plan, _ = plan_of(planner, table.table, ids, cycle=round_)
            exchange({"bigram_embed": plan})
            times.append(time.perf_counter())
            gathered = table.shard[plan.requested_rows]
            times.append(time.perf_counter())
            table.rows_for_forward(plan, None)
            grad, merge = table.return_gradients()
            merge()
            times.append(time.perf_counter())
            tg.adam_update(table.shard, grad, m, v, 1.0, (0.75, 0.95), 1e-10, torch.tensor(1e-3), torch.tensor(0.0))
            times.append(time.perf_counter())
            table.clear()
            n = len(plan.my_rows)
            found[rows].append([*(1e9 * np.diff(times) / n), (plan.sent + plan.received) / (2 * n - sum(
                (plan.send_counts[rank], plan.recv_counts[rank]))), n, len(gathered)])
    dist.barrier()
    if rank == 0:
        head = ("plan and exchange", "owner's gather", "rows both ways", "dense Adam", "bytes", "rows", "asked")
        middle = {rows: np.median(found[rows][2:], axis=0) for rows in SCALE_ROWS}
        print(f"{SCALE_RANKS} ranks, width {SCALE_WIDTH}, {SCALE_IDS} ids per rank and cycle, uniform; median of "
              f"{SCALE_ROUNDS - 2} interleaved rounds; ns per touched row, bytes per row that travels\n")
        print("| | " + " | ".join(head[:-2]) + " |\n|" + "---|" * (len(head) - 1))
        for rows in SCALE_ROWS:
            cells = " | ".join(f"{x:.1f}" for x in middle[rows][:5])
            print(f"| {rows:,} rows ({middle[rows][5]:,.0f} touched) | {cells} |")
        ratio = middle[SCALE_ROWS[1]] / middle[SCALE_ROWS[0]]
        print("| ratio | " + " | ".join(f"{x:.2f}" for x in ratio[:5]) + " |")
    dist.destroy_process_group()


def scale() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(scale_rank, (f"{folder}/store",), SCALE_RANKS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ("bytes", "plans", "scale"):
        dict(bytes=bytes_table, plans=plan_times, scale=scale)[name]()
        print()

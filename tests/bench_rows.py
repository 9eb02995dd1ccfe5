"""Count the rows and bytes of row plans, and the load of owners, at 8 ranks and the sizes of recipe A.

    python tests/bench_rows.py

Tokens are read from the GPT-2 shards that the environment variable DATA names (default
data/fineweb10B/fineweb_train_*.bin). If there are none, the tokens of preset pocket are used. Their vocabulary is
smaller, so the fractions of bytes are larger.
"""
import contextlib
import glob
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from pytest import MonkeyPatch

import train_gpt as tg

RANKS = 8
ROW_BYTES = 2 * 768                                                  # bf16
ID_BYTES = 4                                                         # i32

def token_files() -> str:
    pattern = os.environ.get("DATA", str(ROOT / "data/fineweb10B/fineweb_train_*.bin"))
    return pattern if glob.glob(pattern) else str(ROOT / "data/pocket/pocket_train_*.bin")

def plan_cycles(stage: int, rank: int) -> list[dict[str, tg.RowPlan]]:
    """Plan a rank's cycles of two steps in a stage of preset record, until the end of the tokens, without exchanges."""
    headers = tg.read_shard_headers(token_files())
    cfg = tg.resolve_sizes(replace(tg.Config(), train_files=token_files(), adam_every=2), headers, headers)
    schedule = tg.Schedule(cfg)
    step_cfg = replace(schedule.at(schedule.stage_starts[stage]), tied=False)  # the embedding is looked up as a table
    cycles = ([replace(step_cfg, step=step) for step in (first, first + 1)] for first in itertools.count(0, 2))
    plans = []
    loader = tg.Loader(cfg, tg.Communicator(torch.device("cpu"), rank, RANKS), headers, cycles)
    with MonkeyPatch.context() as patch, contextlib.closing(loader), contextlib.suppress(tg.OutOfData):
        patch.setattr(tg, "exchange_row_requests", lambda *_: None)
        loader.start()
        while True:
            plans.append(loader.next().plans)
    return plans[::2]

def print_row(*cells: Any) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")

def print_traffic(stage: int) -> None:
    by_rank = [plan_cycles(stage, rank) for rank in range(RANKS)]
    for label, plan in by_rank[0][0].items():
        counts = np.array([[plans[label].fetch_counts for plans in plans_of_rank] for plans_of_rank in by_rank])
        counts = counts.swapaxes(0, 1)                               # (cycle, reader, owner)
        between_ranks = counts * (1 - np.eye(RANKS, dtype=int))
        sent = between_ranks.sum(2) * (ID_BYTES + ROW_BYTES) + between_ranks.sum(1) * ROW_BYTES
        dense = 2 * (RANKS - 1) * plan.table.shard_rows(RANKS) * ROW_BYTES
        served = counts.sum(1)
        busiest = (served.max(1) / served.mean(1)).mean()
        figures = counts.sum(2).mean(), 1e-6 * sent.mean(), sent.mean() / dense, busiest
        print_row(label, stage + 1, *(f"{figure:,.{3 if figure < 1000 else 0}f}" for figure in figures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{token_files()}\n{RANKS} ranks, bf16 rows of {ROW_BYTES} bytes; means over all cycles, dense = 1\n")
    print_row("table", "stage", "rows of a rank", "MB sent per rank", "sparse", "busiest owner")
    print("|" + "---|" * 6)
    for number in range(3):                                          # the extension has the sizes of the third stage
        print_traffic(number)

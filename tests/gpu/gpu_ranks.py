"""What ranks on several GPUs must be able to do together, one process per GPU; for test_gpus2.py.

    python tests/gpu/gpu_ranks.py FOLDER [--device=cuda|cpu] [--world=2]

Each case has a process group of its own, made by the trainer: NCCL on GPUs; the same lines run over gloo on a CPU. In
FOLDER/found.json stands of each case what is wrong, by rank, an empty list if nothing is; or stack traces.
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import preset
from ranks import COMM_TIMEOUT, Rank, Ranks
from torch import Tensor

import train_gpt as tg

WIDTH = 96
IDS = 64                                 # rows that a rank reads in a cycle
DTYPES = (torch.bfloat16, torch.float32, torch.int32)

Wrong = dict[str, list[str]]


def fabric_of(rank: Rank, device: str) -> tg.Fabric:
    return rank.fabric(tg.Config(device=device, num_slots=rank.world, comm_timeout=COMM_TIMEOUT))


def rows_for(sender: int, receiver: int, counts: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Rows that nobody else sends to anybody: small whole numbers, exact in every dtype."""
    count = counts[sender][receiver]
    first = 16 * sender + 4 * receiver
    return (torch.arange(count * WIDTH).view(count, WIDTH) % 7 + first).to(dtype)


def exchange(fabric: tg.Fabric, counts: list[list[int]], dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Launch counts[sender][receiver] rows from each to each. Returns the work, what arrives and what should."""
    me = fabric.rank
    everyone = range(fabric.world)
    leaving = torch.cat([rows_for(me, receiver, counts, dtype) for receiver in everyone]).to(fabric.device)
    expected = torch.cat([rows_for(sender, me, counts, dtype) for sender in everyone])
    arriving = torch.full(expected.shape, 99, dtype=dtype, device=fabric.device)
    counts_in = [counts[sender][me] for sender in everyone]
    work = dist.all_to_all_single(arriving, leaving, counts_in, counts[me], async_op=True)
    return work, arriving, expected


def lists(rank: Rank, device: str) -> Wrong:
    """Uneven lists, some of them empty; none at all; one rank that neither sends nor gets. All under way at once."""
    fabric = fabric_of(rank, device)
    W = fabric.world
    uneven = [[0] * W for _ in range(W)]
    none = [[0] * W for _ in range(W)]
    idle = [[0] * W for _ in range(W)]
    for sender, receiver in itertools.product(range(W), range(W)):
        uneven[sender][receiver] = 50 * ((2 * sender + 3 * receiver) % 4)
        if sender > 0 and receiver > 0:
            idle[sender][receiver] = 5
    wrong = []
    for dtype in DTYPES:
        under_way = [exchange(fabric, counts, dtype) for counts in (uneven, none, idle, uneven)]
        for number, (work, arriving, expected) in enumerate(under_way):
            work.wait()
            if not arriving.cpu().equal(expected):
                wrong.append(f"exchange {number} of {dtype}")
    return dict(wrong=wrong)


def gather_in_place(rank: Rank, device: str) -> Wrong:
    """Each rank's slice of a bank is a view of the bank that is gathered into."""
    fabric = fabric_of(rank, device)
    size = 3
    bank = torch.full((size * fabric.world, WIDTH), 99.0, dtype=torch.bfloat16, device=fabric.device)
    mine = bank[size * fabric.rank:size * (fabric.rank + 1)]
    mine.fill_(fabric.rank + 1)
    dist.all_gather_into_tensor(bank, mine, async_op=True).wait()
    ranks = torch.arange(1.0, fabric.world + 1).repeat_interleave(size)
    wrong = []
    if not bank.float().cpu().equal(ranks[:, None].expand(-1, WIDTH)):
        wrong.append("the bank after the gather")
    return dict(wrong=wrong)


def reduce_slices(rank: Rank, device: str) -> Wrong:
    """A sum over ranks, of which each gets its slice; then one that all get."""
    fabric = fabric_of(rank, device)
    W = fabric.world
    numbers = torch.arange(2.0 * W, device=fabric.device)
    units = (fabric.rank + 1) * numbers[:, None].expand(-1, WIDTH)
    arriving = torch.full((2, WIDTH), 99.0, device=fabric.device)
    dist.reduce_scatter_tensor(arriving, units.contiguous(), async_op=True).wait()
    factor = W * (W + 1) / 2
    mine = slice(2 * fabric.rank, 2 * fabric.rank + 2)
    expected = factor * numbers[mine, None].expand(-1, WIDTH).cpu()
    wrong = []
    if not arriving.cpu().equal(expected):
        wrong.append("reduce_scatter_tensor")
    small = torch.full((5,), fabric.rank + 1.0, device=fabric.device)
    dist.all_reduce(small, async_op=True).wait()
    if not small.cpu().equal(torch.full((5,), factor)):
        wrong.append("all_reduce")
    return dict(wrong=wrong)


def ids_of(rank: int, cycle: int, rows: int) -> np.ndarray:
    """Tokens of a cycle as rows of a table: many; all of one owner; the same row again and again on all ranks but 0."""
    numbers = np.random.default_rng([rank, cycle])
    if cycle == 1:
        return np.full((1, IDS), 2, np.int32)
    if cycle == 2 and rank > 0:
        return np.full((1, IDS), 5, np.int32)
    return numbers.integers(0, rows, (1, IDS), dtype=np.int32)


def table_of(fabric: tg.Fabric, cfg: tg.Config, table: tg.Table) -> tuple[tg.RowTable, Tensor]:
    """This rank's part of a table whose rows can be told apart, and the whole of it on the host."""
    W = fabric.world
    whole = (torch.arange(table.rows) % 251.0)[:, None].expand(-1, WIDTH)
    mine = torch.zeros(-(-table.rows // W), WIDTH)
    of_this_rank = whole[fabric.rank::W]
    mine[:len(of_this_rank)] = of_this_rank
    parameter = torch.nn.Parameter(mine.to(fabric.device))
    return tg.RowTable(table, cfg, fabric, parameter, IDS, tg.no_wait), whole


def times_read(fabric: tg.Fabric, cycle: int, rows: int) -> Tensor:
    """How often all ranks together read each row of this rank's slice, (C, WIDTH)."""
    W = fabric.world
    reads = torch.zeros(W * -(-rows // W))
    for reader in range(W):
        ids = torch.from_numpy(ids_of(reader, cycle, rows))
        reads += torch.bincount(ids.flatten(), minlength=len(reads))
    return reads[fabric.rank::W][:, None].expand(-1, WIDTH)


def rows_there_and_back(rank: Rank, device: str) -> Wrong:
    """Plans, the fetch of rows and the return of their gradients, by room 6, against the whole table."""
    fabric = fabric_of(rank, device)
    cfg = preset("tiny", num_slots=fabric.world, device=device, num_heads=6, model_dim=WIDTH)
    table = tg.row_tables(cfg)[0]._replace(ids=np.asarray)                    # what it is asked for are rows
    rows, whole = table_of(fabric, cfg, table)
    planner = tg.Planner(cfg, fabric)
    schedule = tg.Schedule(cfg)
    wrong = []
    for cycle in range(4):
        ids = ids_of(fabric.rank, cycle, table.rows)
        batch = SimpleNamespace(tokens=ids, rows={})
        plan = planner.plan(table, "test", schedule.at(table.cadence * cycle), [batch])
        tg.exchange_plans(fabric, fabric.plan_group, cfg.dtype, {table.label: plan})
        cache, row_grads = rows.rows_for_forward(plan, rows.shard)
        place = torch.as_tensor(batch.rows[table.label]).long().to(fabric.device)
        if not cache.detach()[place].cpu().equal(whole[ids]):
            wrong.append(f"rows that arrived in cycle {cycle}")

        ones = torch.ones(IDS, WIDTH, device=fabric.device)
        row_grads.index_put_((place.flatten(),), ones, accumulate=True)
        grad, wait = rows.return_gradients()
        wait()
        if not grad.cpu().equal(times_read(fabric, cycle, table.rows)):
            wrong.append(f"gradients of cycle {cycle}")
        rows.clear()
    return dict(wrong=wrong)


CASES = dict(lists=lists, gather_in_place=gather_in_place, reduce_slices=reduce_slices,
             rows_there_and_back=rows_there_and_back)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("gpu_ranks", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args(argv)
    found, ranks = {}, Ranks(args.folder)                                     # this process has opened no device
    for name, case in CASES.items():
        try:
            found[name] = ranks(args.world, case, device=args.device)
        except pytest.fail.Exception as error:
            found[name] = str(error)
    (args.folder / "found.json").write_text(json.dumps(found))



if __name__ == "__main__":
    main(sys.argv[1:])

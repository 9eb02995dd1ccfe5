"""Section 9: exchanged tables equal a dense table on one rank, bit by bit; `add_rows`.

The functions with an argument `rank` run on each of W ranks. The tests after them check what the ranks returned.
"""
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from common import compile_for_gpu, needs_triton, owned_rows, plan_of, run_interpreted
from forked_ranks import Rank
from reference import merge_shards
from table_harness import PATTERNS, WIDTH, Trial, differences, drive, late_rows
from torch import Tensor

import train_gpt as tg

MODES = ("sparse", "dense")
ROWWISE = "rowwise"
KINDS = (*MODES, ROWWISE)                # exchanged tables: dense ones by --row_comms, and n-gram tables


# ---- Intervals of tables ---------------------------------------------------------------------------------------------
def make_trials(world_size: int) -> list[Trial]:
    """Return trials of each pattern, in both modes and dtypes and for several table sizes; fewer for W > 2."""
    sizes = (53, 48, 5, 1, 97, 2)
    trials = []
    for i, (mode, dtype) in enumerate(itertools.product(MODES, ("float32", "bfloat16"))):
        tables = [(pattern, sizes[(k + i) % len(sizes)]) for k, pattern in enumerate(PATTERNS)]
        trials.append(Trial(tuple(tables), mode, dtype=dtype, updates=5 + i))
    return trials if world_size <= 2 else trials[::3]

def run_trials(rank: Rank) -> list[dict[str, Any]]:
    comm = rank.comm()
    return [drive(comm, trial) for trial in make_trials(rank.world)]

@pytest.mark.recipe
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 8], ids="W{}".format)
def test_Table__equals_the_dense_model(ranks, world_size) -> None:
    by_rank = ranks(world_size, run_trials)
    for i, trial in enumerate(make_trials(world_size)):
        assert differences(trial, [found[i] for found in by_rank]) == [], trial


# ---- One table -------------------------------------------------------------------------------------------------------
by_kind = pytest.mark.parametrize("world_size, kind", [*itertools.product((1, 2), KINDS)])

NUM_ROWS = 20

class TableUnderTest:
    """A table of random rows, one of KINDS, with the operations of a training step."""
    def __init__(self, comm: tg.Communicator, kind: str) -> None:
        self.comm = comm
        self.kind = kind
        mode = kind if kind in MODES else "sparse"
        cfg = tg.Config(**tg.PRESETS["tiny"] | dict(model_dim=WIDTH, row_comms=mode))
        self.table_spec = tg.TableSpec("bigram_embed", NUM_ROWS, 1, None, rowwise=kind == ROWWISE)
        spec = tg.ParameterSpec("bigram_embed", (NUM_ROWS, WIDTH), None, table=self.table_spec)
        shard = owned_rows(torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)), comm)
        if kind in MODES:
            self.table = tg.Table(spec, cfg, comm, shard, 40, head=None)
        else:
            self.table = tg.RowwiseTable(spec, cfg, comm, 40)
            self.table.state.rows.copy_(shard)

    def plan(self, rows: Sequence[int]) -> tg.RowPlan:
        """Plan these global rows. Collective."""
        comm, spec = self.comm, self.table_spec
        plan, _ = plan_of(spec, comm, [np.asarray([rows], np.int32)], fetch_all=self.kind == "dense")
        if comm.world_size > 1:
            tg.exchange_row_requests(comm, comm.loader_group, {spec.label: plan})
        return plan

    def add(self, plan: tg.RowPlan, rows: Sequence[int], grad: Tensor) -> None:
        """Look up the rows of the plan, and add gradients to some global rows."""
        _, row_grads = self.table.rows_for_forward(plan)
        index = torch.as_tensor(rows)
        world_size = self.comm.world_size
        row_keys = index % world_size * self.table_spec.shard_rows(world_size) + index // world_size
        index = torch.searchsorted(plan.rows_to_fetch, row_keys)
        tg.add_rows(row_grads, index.int(), grad)

    def reduced_grads(self) -> np.ndarray:
        """Launch the reduction; return a copy of the reduced gradients of this rank. Collective."""
        self.table.launch_reduce()
        grad, = self.table.reduced_grads()
        return grad.numpy().copy()

    def expected_rows(self, plan: tg.RowPlan) -> Tensor:
        """Return the current values of the rows of the plan. Collective."""
        by_owner = self.comm.all_gather(self.table.shard.clone())
        return torch.cat(by_owner)[plan.rows_to_fetch]

def two_intervals(rank: Rank, kind: str) -> tuple[str, float]:
    """Add gradients of two intervals without an update in between; return the error, and the sum of the gradients."""
    under_test = TableUnderTest(rank.comm(), kind)
    ones = torch.ones(2, WIDTH)
    first = under_test.plan([3, 4])
    second = under_test.plan([9, 10])
    under_test.add(first, [3, 4], ones)
    error = ""
    try:
        under_test.add(second, [9, 10], ones)
    except AssertionError as refusal:
        error = str(refusal)
    return error, float(under_test.reduced_grads().sum())

@by_kind
def test_rows_for_forward__a_batch_of_the_next_interval_is_refused(ranks, world_size, kind) -> None:
    """And the gradients of the first interval stay."""
    by_rank = ranks(world_size, two_intervals, kind=kind)
    assert all("call optim_step before the next interval" in error for error, _ in by_rank)
    assert sum(total for _, total in by_rank) == 2 * WIDTH * world_size

SITUATIONS = ("cached", "under way", "evaluated", "updated")

def lookups_in(rank: Rank, kind: str) -> dict[str, bool]:
    """Return whether lookups read the correct rows in each of SITUATIONS."""
    found = {}
    comm = rank.comm()
    with late_rows():
        under_test = TableUnderTest(comm, kind)
        table = under_test.table
        first = under_test.plan(range(3, 17))
        second = under_test.plan((0, 1, 18, 19))

        def is_right(plan: tg.RowPlan) -> bool:
            cache, _ = table.rows_for_forward(plan)
            return cache[:len(plan.rows_to_fetch)].equal(under_test.expected_rows(plan))

        for before in ("cached", "under way"):
            table.reset()
            table.fetch(first)
            if before == "cached":
                table.rows_for_forward(first)
                table.grads_plan = None
            found[before] = is_right(second)

        under_test.add(second, [0, 19], torch.ones(2, WIDTH))
        found["evaluated"] = table.fetch_for_eval(first).equal(under_test.expected_rows(first)) and is_right(second)
        total = sum(comm.all_gather(float(under_test.reduced_grads().sum())))
        found["evaluated"] &= total == 2 * WIDTH * comm.world_size

        with torch.no_grad():
            table.shard.add_(1)
        table.zero_grad()
        found["updated"] = is_right(second)
    return found

@by_kind
@pytest.mark.parametrize("situation", SITUATIONS)
def test_rows_for_forward__reads_the_current_rows_of_the_plan(ranks, world_size, kind, situation) -> None:
    """Rows of another plan are cached or under way; an evaluation or an update has come in between.

    An evaluation in the middle of an interval changes neither cached rows nor gradients.
    """
    assert all(found[situation] for found in ranks(world_size, lookups_in, kind=kind))

def addends(rank: int) -> Tensor:
    """Return gradients of this rank, whose f32 sum over ranks depends on the order."""
    scale = torch.tensor([1e-4, 1.0, 1e3])[rank % 3]
    return scale * torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))

def rank_order(rank: Rank) -> np.ndarray:
    """Add the gradients of all ranks; return the reduced gradients of this rank's shard."""
    under_test = TableUnderTest(rank.comm(), "sparse")
    under_test.add(under_test.plan(range(20)), range(20), addends(rank.rank))
    return under_test.reduced_grads()

def test_reduced_grads__are_added_in_the_order_of_ranks(ranks) -> None:
    """The order begins with rank 0 for every owner, not with the owner."""
    def total(order: Sequence[int]) -> np.ndarray:
        return functools.reduce(np.add, [addends(rank).numpy() for rank in order])

    got = merge_shards(ranks(3, rank_order), NUM_ROWS)
    np.testing.assert_array_equal(got, total((0, 1, 2)))
    assert not np.array_equal(got, total((2, 1, 0))), "the sum of these values must depend on the order"


# ---- add_rows --------------------------------------------------------------------------------------------------------
BLOCK_ROWS, CHUNK = 4, 6                 # fewer than the lookups of one row, so that they cross blocks and chunks

def launch(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """Launch the kernel on sorted rows, and then on its sums of chunks, as `add_rows` does."""
    rows, order = index.sort(stable=True)
    width = grad.shape[1]
    later_chunk_sums = torch.zeros(-(-len(rows) // CHUNK), width)
    chunks = rows[::CHUNK].contiguous(), torch.arange(len(later_chunk_sums)), later_chunk_sums
    for lookups, chunk in (((rows, order, grad), CHUNK), (chunks, 1 << 30)):
        tg.triton_jit(tg.add_rows_kernel)[(len(lookups[0]),)](
            row_grads, *lookups, later_chunk_sums, len(lookups[0]), width, chunk, BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_D=1 << (width - 1).bit_length())

def interpret() -> None:
    """Compare with exact sums: 11 lookups of one row over three chunks, the first and last row, and one without any."""
    index = torch.tensor([12, 3, 3, 0, 3, 7, 3, 3, 12, 3, 3, 3, 3, 0, 3, 3, 9], dtype=torch.int32)
    for width, dtype in itertools.product((1, 24), (torch.float32, torch.bfloat16)):
        generator = torch.Generator().manual_seed(width)
        row_grads = torch.randint(-8, 9, (13, width), generator=generator).float()
        grad = torch.randint(-8, 9, (len(index), width), generator=generator).to(dtype)
        row_grads[5] = torch.nan                              # this row is not looked up
        expected = row_grads.double().index_add(0, index.long(), grad.double())
        launch(row_grads, index, grad)
        torch.testing.assert_close(row_grads.double(), expected, rtol=0, atol=0, equal_nan=True)

@needs_triton
def test_add_rows_kernel__interpreted() -> None:
    run_interpreted("import test_rows; test_rows.interpret()")

@needs_triton
def test_add_rows_kernel__compiles_without_a_gpu() -> None:
    """Nothing is spilled. Offsets have 64 bits: the row index is extended before it is multiplied."""
    types = dict(row_grads="*fp32", rows="*i32", order="*i64", grad="*bf16", later_chunk_sums="*fp32",
                 num_lookups="i32", D="i32")
    constants = dict(CHUNK=tg.ADD_ROWS_CHUNK, BLOCK_ROWS=tg.ADD_ROWS_BLOCK, BLOCK_D=1024)
    ttir = compile_for_gpu(90, tg.add_rows_kernel, types, constants, num_warps=4).asm["ttir"]
    widened = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", ttir)
    assert widened and re.search(rf"arith.muli .*{widened[1]}\b.* : i64", ttir), ttir
    assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", ttir), "an i32 multiplication"

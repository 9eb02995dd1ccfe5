"""Section 9: exchanged tables equal a dense table on one rank, bit by bit; row requests, byte totals, `add_rows`.

The functions with an argument `rank` run on each of W ranks. The tests after them check what the ranks returned.
"""
from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from common import compile_for_gpu, needs_triton, owned_rows, plan_of, run_interpreted, small
from forked_ranks import Rank, Ranks
from reference import merge_shards
from table_harness import PATTERNS, WIDTH, Trial, differences, drive, late_rows
from torch import Tensor

import train_gpt as tg

MODES = ("sparse", "dense")
ROWWISE = "rowwise"
KINDS = (*MODES, ROWWISE)                # exchanged tables: dense ones by --row_comms, and n-gram tables
ITEM_BYTES = dict(float32=4, bfloat16=2)
SLOW = pytest.param(4, marks=pytest.mark.slow)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, SLOW, 8], ids="W{}".format)


# ---- Cycles of tables ------------------------------------------------------------------------------------------------
def make_trials(world_size: int) -> list[Trial]:
    """Return trials of each pattern, in both modes and dtypes and for several table sizes; fewer for W > 2."""
    sizes = (53, 48, 5, 1, 97, 2)
    trials = []
    for i, (mode, dtype) in enumerate(itertools.product(MODES, ITEM_BYTES)):
        tables = [(pattern, sizes[(k + i) % len(sizes)]) for k, pattern in enumerate(PATTERNS)]
        trials.append(Trial(tuple(tables), mode, dtype=dtype, updates=5 + i))
    return trials if world_size <= 2 else trials[::3]

def run_trials(rank: Rank) -> list[dict[str, Any]]:
    """Run all trials on this rank."""
    comm = rank.comm()
    return [drive(comm, trial) for trial in make_trials(rank.world)]

@world_sizes
def test_ExchangedTable__equals_the_dense_model(ranks, world_size) -> None:
    """Rows, gradients and updates of each trial equal those of a dense model. With one rank, tables are LocalTables."""
    by_rank = ranks(world_size, run_trials)
    for i, trial in enumerate(make_trials(world_size)):
        assert differences(trial, [found[i] for found in by_rank]) == [], trial

def counted_bytes(by_rank: list[dict], label: str, rank: int, row_bytes: int) -> Counter:
    """Count the bytes that a rank sends and receives for one table, from the rows that every rank fetched.

    A reader sends 4 bytes per row to the row's owner, which returns the row. The gradient of the row follows.
    """
    world_size = len(by_rank)
    count = Counter(bytes_sent=0, bytes_received=0)
    for reader, found in enumerate(by_rank):
        for rows_to_fetch, _ in found[label]["cycles"]:
            shard_rows = -(-int(label.rsplit(" ", 1)[1]) // world_size)
            for owner in rows_to_fetch // shard_rows:
                if owner == reader:
                    continue
                if reader == rank:
                    count.update(bytes_sent=4 + row_bytes, bytes_received=row_bytes)
                if owner == rank:
                    count.update(bytes_sent=row_bytes, bytes_received=4 + row_bytes)
    return count

@world_sizes
def test_ExchangedTable__byte_totals_of_each_table(ranks, world_size) -> None:
    """The totals equal a count of rows, and their sum over all tables equals the bytes of all collectives."""
    by_rank = ranks(world_size, run_trials)
    for i, trial in enumerate(make_trials(world_size)):
        of_ranks = [result[i] for result in by_rank]
        row_bytes = WIDTH * ITEM_BYTES[trial.dtype]
        for rank, tables in enumerate(of_ranks):
            total = Counter(sent=0, received=0)
            for (label, result), (_, rows) in zip(tables.items(), trial.tables, strict=True):
                totals = result["table_bytes"]
                dense = trial.updates * 2 * (world_size - 1) * -(-rows // world_size) * row_bytes
                expected = dict(bytes_dense=dense, **counted_bytes(of_ranks, label, rank, row_bytes))
                assert totals == expected, f"{label} on rank {rank} in {trial}"
                total.update(sent=totals["bytes_sent"], received=totals["bytes_received"])
            assert result["bytes"] == total, "sum over all tables"

def both_tables(rank: Rank, trial: Trial) -> list[dict[str, Any]]:
    """Run a trial with LocalTables, and with ExchangedTables."""
    comm = rank.comm()
    return [drive(comm, trial, in_place) for in_place in (True, False)]

@pytest.mark.parametrize("mode", MODES)
def test_LocalTable__has_the_bits_of_an_exchanged_table(ranks, mode) -> None:
    """With one rank in float64, both have the same rows in each cycle, the same shard and the same moments."""
    trial = Trial(tuple((pattern, 53) for pattern in PATTERNS), mode)
    (local, exchanged), = ranks(1, both_tables, trial=trial)
    for label in local:
        for (_, rows), (rows_to_fetch, fetched_rows) in zip(
                local[label]["cycles"], exchanged[label]["cycles"], strict=True):
            np.testing.assert_array_equal(rows[rows_to_fetch], fetched_rows, label)
        for name in ("rows", "m", "v"):
            assert local[label][name].tobytes() == exchanged[label][name].tobytes(), f"{label}: {name}"
        assert not any(local[label]["table_bytes"].values()) and not any(exchanged[label]["table_bytes"].values())


# ---- One table -------------------------------------------------------------------------------------------------------
LOCAL = "read in place"                  # a LocalTable

def kinds_with(world_size: int) -> tuple[str, ...]:
    """Return the kinds of tables that a trainer with this many ranks has.

    With one rank, all tables but row-wise ones are LocalTables.
    """
    return (LOCAL, ROWWISE) if world_size == 1 else KINDS

def by_world_size_and_kind(without: str = "") -> pytest.MarkDecorator:
    """Parametrize a test by the number of ranks and the kind of table, except one kind."""
    cases = [(world_size, kind) for world_size in (1, 2) for kind in kinds_with(world_size) if kind != without]
    return pytest.mark.parametrize("world_size, kind", cases + [pytest.param(4, kind, marks=pytest.mark.slow)
                                                                for kind in KINDS])

def run_each_kind(rank: Rank, case: Callable[[tg.Communicator, str], Any], without: str = "") -> dict[str, Any]:
    """Return case(comm, kind) for each kind of table, except one."""
    comm = rank.comm()
    return {kind: case(comm, kind) for kind in kinds_with(comm.world_size) if kind != without}

class TableUnderTest:
    """A table of random rows, a LocalTable or one of KINDS, with the operations of a training step."""
    def __init__(self, comm: tg.Communicator, kind: str, rows: int = 20, head: Tensor | None = None,
                 **settings: Any) -> None:
        self.comm = comm
        self.kind = kind
        initial_rows = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        mode = kind if kind in MODES else "sparse"
        settings = dict(model_dim=WIDTH, dtype="float32", row_comms=mode) | settings
        cfg = tg.Config(**tg.PRESETS["tiny"] | settings)
        self.table_spec = tg.TableSpec("bigram_embed", rows, 1, None, rowwise=kind == ROWWISE)
        spec = tg.ParameterSpec("bigram_embed", (rows, WIDTH), None, table=self.table_spec)
        shard = owned_rows(initial_rows, comm).to(getattr(torch, cfg.dtype))
        if kind == LOCAL:
            self.table = tg.LocalTable(spec, torch.nn.Parameter(shard), trains=True)
        elif kind in MODES:
            self.table = tg.ExchangedTable(spec, cfg, comm, shard, 40, head)
        else:
            self.table = tg.RowwiseTable(spec, cfg, comm, 40)
            self.table.state.rows.copy_(shard)

    def plan(self, rows: Sequence[int], tied: bool = False) -> tg.RowPlan | None:
        """Plan these global rows; return None for a LocalTable. Collective."""
        if self.kind == LOCAL:
            return None
        comm, spec = self.comm, self.table_spec
        fetch_all = self.kind == "dense" and not tied
        plan, _ = plan_of(spec, comm, [np.asarray([rows], np.int32)], tied, fetch_all)
        if comm.world_size > 1:
            tg.exchange_row_requests(comm, comm.loader_group, [spec], {spec.label: plan})
        return plan

    def add(self, plan: tg.RowPlan | None, rows: Sequence[int], grad: Tensor) -> None:
        """Look up the rows of the plan, and add gradients to some global rows."""
        _, row_grads = self.table.rows_for_forward(plan)
        index = torch.as_tensor(rows)
        if plan is not None:
            world_size = self.comm.world_size
            index = torch.searchsorted(plan.rows_to_fetch, index % world_size * plan.shard_rows + index // world_size)
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

def two_cycles(comm: tg.Communicator, kind: str) -> tuple[str, float]:
    """Add gradients of two cycles without an update in between; return the error, and the sum of the gradients."""
    under_test = TableUnderTest(comm, kind)
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

@by_world_size_and_kind()
def test_rows_for_forward__batches_of_two_cycles_add_up_only_in_a_local_table(ranks, world_size, kind) -> None:
    """A LocalTable accumulates both. Other tables refuse the second, and retain the gradients of the first."""
    totals = []
    for found in ranks(world_size, run_each_kind, case=two_cycles):
        error, total = found[kind]
        totals.append(total)
        assert ("call optim_step before the next cycle" in error) == (kind != LOCAL)
    assert sum(totals) == (4 if kind == LOCAL else 2) * WIDTH * world_size

def refetch_case(comm: tg.Communicator, kind: str) -> dict[str, bool]:
    """Return whether lookups read the correct rows in four situations.

    The rows of another plan are cached or are being fetched, an evaluation has fetched rows, or an update has changed
    rows.
    """
    found = {}
    with late_rows(comm.rank):
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
                table.pending_plan = None
            found[before] = is_right(second)

        grad = torch.ones(2, WIDTH)
        under_test.add(second, [0, 19], grad)
        found["evaluated"] = table.fetch_for_eval(first).equal(under_test.expected_rows(first)) and is_right(second)
        total = sum(comm.all_gather(float(under_test.reduced_grads().sum())))
        found["evaluated"] &= total == 2 * WIDTH * comm.world_size

        with torch.no_grad():
            table.shard.add_(1)
        table.zero_grad()
        found["updated"] = is_right(second)
    return found

def refetched(ranks: Ranks, world_size: int, kind: str) -> list[dict[str, bool]]:
    """Return the results of refetch_case for one kind of table, by rank."""
    return [found[kind] for found in ranks(world_size, run_each_kind, case=refetch_case, without=LOCAL)]

@by_world_size_and_kind(without=LOCAL)
@pytest.mark.parametrize("before", ["cached", "under way"])
def test_rows_for_forward__fetches_a_plan_other_than_the_prefetched_one(ranks, world_size, kind, before) -> None:
    """A fetch waits for the previous one, because late rows of that one overwrite the cache."""
    assert all(found[before] for found in refetched(ranks, world_size, kind))

@by_world_size_and_kind(without=LOCAL)
def test_fetch_for_eval__changes_nothing_in_the_middle_of_a_cycle(ranks, world_size, kind) -> None:
    """It reads the current rows, and changes neither cached rows nor accumulated gradients."""
    assert all(found["evaluated"] for found in refetched(ranks, world_size, kind))

@by_world_size_and_kind(without=LOCAL)
def test_zero_grad__the_same_plan_is_fetched_again_after_an_update(ranks, world_size, kind) -> None:
    """The cached rows are those from before the update."""
    assert all(found["updated"] for found in refetched(ranks, world_size, kind))

def reset_case(comm: tg.Communicator, kind: str) -> list[np.ndarray]:
    """Return gradients after a reset in the middle of a cycle, while rows are being fetched, and without a reset.

    The buffers must keep their addresses.
    """
    def addresses() -> list[int]:
        table = under_test.table
        buffers = [table.weight, table.grad] if kind == LOCAL else [table.shard, table.cache, table.row_grads]
        return [x.data_ptr() for x in buffers]

    grad = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    found = []
    for disturbed in (True, False):
        under_test = TableUnderTest(comm, kind)
        before = addresses()
        if disturbed:
            under_test.add(under_test.plan([3, 4, 5]), [3, 4], torch.ones(2, WIDTH))
            under_test.reduced_grads()
            if kind != LOCAL:
                under_test.table.fetch(under_test.plan([8, 9]))
            under_test.table.reset()
            assert not under_test.table.has_gradient()
        under_test.add(under_test.plan([7, 12]), [7, 12], grad)
        found.append(under_test.reduced_grads())
        assert addresses() == before, "a buffer was reallocated"
    return found

@by_world_size_and_kind()
def test_reset__in_the_middle_of_a_cycle_leaves_no_trace(ranks, world_size, kind) -> None:
    """After a reset, a cycle has the same gradients as in a new table."""
    by_rank = [found[kind] for found in ranks(world_size, run_each_kind, case=reset_case)]
    assert any(disturbed.any() for disturbed, _ in by_rank)
    for disturbed, undisturbed in by_rank:
        assert disturbed.tobytes() == undisturbed.tobytes()

def counts_by_call(comm: tg.Communicator, kind: str) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Return after each call on a table: its name, the byte totals, and the bytes in the table's collectives."""
    found = []
    transferred = Counter()              # bytes sent and received, and number of collectives, without evaluations
    with late_rows(comm.rank) as exchange:
        under_test = TableUnderTest(comm, kind)
        table = under_test.table

        def call(name: str, *args: Any, counts: bool = True, requests: tg.RowPlan | None = None) -> None:
            before = exchange.bytes.copy()
            if requests is not None:     # `exchange_row_requests` has sent them
                rank = comm.rank
                transferred.update(sent=4 * (sum(requests.fetch_counts) - requests.fetch_counts[rank]),
                             received=4 * (sum(requests.serve_counts) - requests.serve_counts[rank]))
            getattr(table, name)(*args)
            moved_bytes = {way: exchange.bytes[way] - before[way] for way in ("sent", "received")}
            if counts:
                transferred.update(moved_bytes, collectives=int(any(moved_bytes.values())))
            found.append((name, dict(table.bytes), dict(transferred)))

        # Ranks look up unequal numbers of rows, so that bytes sent and received differ.
        first = under_test.plan([3 + k % (14 - 3 * comm.rank) for k in range(14)])
        second = under_test.plan([19 - k % (6 - comm.rank) for k in range(6)])
        evaluated = under_test.plan(range(20))
        call("fetch", first, requests=first)
        call("fetch", first)
        call("rows_for_forward", first)
        call("rows_for_forward", first)
        call("fetch_for_eval", evaluated, counts=False)
        call("rows_for_forward", first)                       # the evaluation has not changed the cache
        call("launch_reduce")
        call("reduced_grads")
        call("zero_grad")
        call("fetch", second, requests=second)
        call("rows_for_forward", second)                      # then the cycle is interrupted
        transferred.clear()
        call("reset", counts=False)
    return found

@by_world_size_and_kind(without=LOCAL)
def test_ExchangedTable__counts_the_bytes_of_an_all_to_all_when_it_is_launched(ranks, world_size, kind) -> None:
    """Each all-to-all of training counts once; those of evaluations do not. Requests count when their rows are fetched.
    """
    for rank, found in enumerate(ranks(world_size, run_each_kind, case=counts_by_call, without=LOCAL)):
        shard_bytes = -(-20 // world_size) * WIDTH * ITEM_BYTES["float32"]
        for name, totals, transferred in found[kind]:
            expected = dict(bytes_sent=transferred.get("sent", 0), bytes_received=transferred.get("received", 0),
                            bytes_dense=transferred.get("collectives", 0) * (world_size - 1) * shard_bytes)
            assert {key: totals.get(key, 0) for key in expected} == expected, (name, rank)
        sent = [totals["bytes_sent"] for _, totals, _ in found[kind]]
        assert (world_size == 1) == (not any(sent)) and sent[-1] == 0
        received = [totals["bytes_received"] for _, totals, _ in found[kind]]
        assert (sent == received) == (world_size == 1 or kind == "dense")

def addends(rank: int) -> Tensor:
    """Return gradients of this rank, whose f32 sum over ranks depends on the order."""
    scale = torch.tensor([1e-4, 1.0, 1e3])[rank % 3]
    return scale * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(rank))

def rank_order(rank: Rank) -> np.ndarray:
    """Add the gradients of all ranks; return the reduced gradients of this rank's shard."""
    under_test = TableUnderTest(rank.comm(), "sparse")
    under_test.add(under_test.plan(range(20)), range(20), addends(rank.rank))
    return under_test.reduced_grads()

@pytest.mark.parametrize("world_size", [3, SLOW], ids="W{}".format)
def test_reduced_grads__are_added_in_the_order_of_ranks(ranks, world_size) -> None:
    """The order begins with rank 0 for every owner, not with the owner."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [addends(rank).numpy() for rank in ranks])

    got = merge_shards(ranks(world_size, rank_order), 20)
    np.testing.assert_array_equal(got, total(range(world_size)))
    assert not np.array_equal(got, total(range(world_size)[::-1])), "the sum of these values must depend on the order"

def tied_gradients(rank: Rank, kind: str) -> tuple[Tensor, Tensor, bool]:
    """Return the rows that lookups read while tied, the head's gradient, and whether the table has no gradient left."""
    head = torch.arange(20.0 * WIDTH).view(WIDTH, 20)
    under_test = TableUnderTest(rank.comm(), kind, head=head)
    if kind == LOCAL:
        under_test.table.weight.data.copy_(head.t())  # as `Optimizer.step` does
    plan = under_test.plan([5, 2, 19, 5], tied=True)
    rows, row_grads = under_test.table.rows_for_forward(plan)
    lookups = rows[[2, 5, 19]] if plan is None else rows[torch.argsort(plan.head_column_ids)]
    under_test.add(plan, [5, 2, 19, 5], torch.arange(4.0 * WIDTH).view(4, WIDTH) + rank.rank)
    head_grad = torch.ones(WIDTH, 20) / rank.world
    under_test.table.add_grads_to_head(head_grad)
    return lookups[:3].detach(), head_grad, not row_grads.any() and not under_test.table.has_gradient()

def test_add_grads_to_head__exchanged_and_local_tables_are_equal(ranks) -> None:
    """Lookups read the columns of the head, and their gradients are added to its gradient."""
    (lookups, head_grad, cleared), = ranks(1, tied_gradients, kind=LOCAL)
    assert cleared
    exchanged = ranks(2, tied_gradients, kind="sparse")
    for exchanged_lookups, _, cleared in exchanged:
        assert exchanged_lookups.equal(lookups) and cleared
    extra = torch.zeros(WIDTH, 20)
    extra[:, [2, 19]] = 1.0
    extra[:, 5] = 2.0                                         # the second rank adds 1 to each of 4 gradients
    assert (exchanged[0][1] + exchanged[1][1]).equal(2 * head_grad - 1 + extra)


# ---- Plans that differ between ranks ---------------------------------------------------------------------------------
def build(comm: tg.Communicator, step: int = 2, tied: bool = True, seq_len: int = 16,
          **settings: Any) -> dict[str, tg.RowPlan]:
    """Build the batch of one step from tokens of this rank; return its plans."""
    cfg = small(**settings)
    tokens = np.random.default_rng(comm.rank).integers(0, 59, seq_len + 1).astype(np.uint16)
    seq = tg.PackedSeq(tokens, np.asarray([0, seq_len], np.int32))
    step_cfg = replace(tg.Schedule(cfg).at(step), tied=tied)
    batch, = tg.build_batches(cfg, comm, comm.loader_group, [step_cfg], [[seq]])
    return batch.plans

def requests(rank: Rank) -> list[tuple[str, list[int], list[int], list[int], list[int]]]:
    """Return for each plan: table, local rows to fetch, rows of each owner, local rows to serve, rows of each rank."""
    plans = build(rank.comm(), tied=False)
    return [(label, (plan.rows_to_fetch % plan.shard_rows).tolist(), plan.fetch_counts, plan.rows_to_serve.tolist(),
             plan.serve_counts) for label, plan in plans.items()]

def test_exchange_row_requests__owners_serve_what_other_ranks_fetch(ranks) -> None:
    """An owner serves to each rank, in rank order, the rows that this rank fetches from it."""
    for plans in zip(*ranks(3, requests), strict=True):       # of each rank, for one table
        for owner, (label, _, _, rows_to_serve, serve_counts) in enumerate(plans):
            parts = [np.split(rows, np.cumsum(counts)[:-1])[owner].tolist() for _, rows, counts, *_ in plans]
            assert any(parts), label
            assert (rows_to_serve, serve_counts) == (sum(parts, []), [*map(len, parts)]), label


# ---- add_rows --------------------------------------------------------------------------------------------------------
BLOCK_ROWS = 4                           # fewer than the lookups of one row, so that they cross blocks

def launch(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """Launch the kernel on sorted rows, as `add_rows` does."""
    rows, order = index.sort(stable=True)
    num_lookups, width = grad.shape
    power_of_two = 1 << (width - 1).bit_length()
    kernel = tg.triton_jit(tg.add_rows_kernel)[(num_lookups,)]
    kernel(row_grads, rows, order, grad, num_lookups, width, BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=power_of_two)

def beyond_2_to_31(add: Callable[[Tensor, Tensor, Tensor], None]) -> list[float]:
    """Add to three rows of a buffer with more than 2^31 elements; return their values.

    The system allocates only the pages that are written.
    """
    rows = 2**31 // 24 + 3
    row_grads = torch.empty(rows, 24)
    assert row_grads.numel() > 2**31
    touched = torch.tensor([0, rows - 2, rows - 1])
    row_grads[touched] = 1.0
    grad = torch.arange(5.0)[:, None].expand(5, 24)
    add(row_grads, touched[[2, 0, 1, 2, 2]].int(), grad.contiguous())
    return row_grads[touched].unique(dim=1).flatten().tolist()

def interpret() -> dict[str, list]:
    """Return the largest error and the number of unexpected NaNs, by width and dtype.

    TRITON_INTERPRET=1 must be set before the import.
    """
    found = {}
    index = torch.tensor([12, 3, 3, 0, 3, 7, 3, 3, 12, 3, 3, 3, 3, 0, 3, 3, 9], dtype=torch.int32)
    for width, dtype in itertools.product((1, 5, 16, 24), (torch.float32, torch.bfloat16)):
        generator = torch.Generator().manual_seed(width)
        row_grads = torch.randint(-8, 9, (13, width), generator=generator).float()
        grad = torch.randint(-8, 9, (len(index), width), generator=generator).to(dtype)
        row_grads[5] = torch.nan  # this row is not looked up
        expected = row_grads.double().index_add(0, index.long(), grad.double())
        launch(row_grads, index, grad)
        error = float(row_grads.sub(expected).nan_to_num().abs().max())
        found[f"{width} {dtype}"] = [error, int(row_grads.isnan().sum()) - width]
    return found | dict(large=[beyond_2_to_31(add) for add in (launch, tg.add_rows)])

@needs_triton
def test_add_rows_kernel__interpreted() -> None:
    """The sums are exact.

    The cases have 11 lookups of one row in blocks of 4, lookups of the first and the last row, widths below the block
    size, and a buffer of more than 2^31 elements.
    """
    found = json.loads(run_interpreted("import json, test_rows; print(json.dumps(test_rows.interpret()))"))
    assert found.pop("large") == [[2.0, 3.0, 8.0]] * 2
    assert list(found.values()) == [[0.0, 0]] * 8

def compile_ahead(rank: Rank, capability: int) -> dict[str, Any]:
    """Compile the kernel with an empty Triton cache; return its code."""
    os.environ["TRITON_CACHE_DIR"] = str(rank.folder)
    types = dict(row_grads="*fp32", rows="*i32", order="*i64", grad="*bf16", num_lookups="i32", D="i32")
    constants = dict(BLOCK_ROWS=tg.ADD_ROWS_BLOCK, BLOCK_D=1024)
    compiled_kernel = compile_for_gpu(capability, tg.add_rows_kernel, types, constants, num_warps=4)
    return {name: compiled_kernel.asm[name] for name in ("ptx", "ttir", "cubin")}

@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_add_rows_kernel__compiles_without_a_gpu(ranks, capability) -> None:
    """Offsets have 64 bits: the row index is extended before it is multiplied."""
    compiled_kernel, = ranks(1, compile_ahead, capability=capability)
    assert f".target sm_{capability}" in compiled_kernel["ptx"] and compiled_kernel["cubin"]
    widened = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", compiled_kernel["ttir"])
    ttir = compiled_kernel["ttir"]
    assert widened and re.search(rf"arith.muli .*{widened[1]}\b.* : i64", ttir), ttir
    assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", ttir), "an i32 multiplication"

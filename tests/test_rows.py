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
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import compile_for_gpu, load_chunks, needs_triton, owned_rows, plan_of, run_interpreted
from pytest import MonkeyPatch
from forked_ranks import Rank, Ranks
from reference import merge_shards
from table_harness import PATTERNS, WIDTH, StagedStore, Trial, differences, drive, late_rows
from torch import Tensor

import train_gpt as tg

MODES = ("sparse", "dense")
# Kinds of exchanged tables: a value of --row_comms, or the location of a row-wise table.
KINDS = (*MODES, *tg.ROW_STORES)
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
def test_zero_grad__byte_totals_of_each_table(ranks, world_size) -> None:
    """The totals equal a count of rows, and their sum over all tables equals the bytes of all collectives."""
    by_rank = ranks(world_size, run_trials)
    for i, trial in enumerate(make_trials(world_size)):
        of_ranks = [result[i] for result in by_rank]
        row_bytes = WIDTH * ITEM_BYTES[trial.dtype]
        for rank, tables in enumerate(of_ranks):
            total = Counter(sent=0, received=0)
            for (label, result), (_, rows) in zip(tables.items(), trial.tables, strict=True):
                totals = result["byte_totals"]
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
        assert not any(local[label]["byte_totals"].values()) and not any(exchanged[label]["byte_totals"].values())


# ---- One table -------------------------------------------------------------------------------------------------------
LOCAL = "read in place"                  # a LocalTable

def kinds_with(world_size: int) -> tuple[str, ...]:
    """Return the kinds of tables that a trainer with this many ranks has.

    With one rank, all tables but row-wise ones are LocalTables.
    """
    return (LOCAL, *tg.ROW_STORES) if world_size == 1 else KINDS

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
        self.spec = tg.TableSpec("bigram_embed", rows, 1, None, rowwise=kind in tg.ROW_STORES, location=kind)
        shard = owned_rows(initial_rows, comm).to(getattr(torch, cfg.dtype))
        if kind == LOCAL:
            self.table = tg.LocalTable(torch.nn.Parameter(shard))
        elif kind in MODES:
            self.table = tg.ExchangedTable(self.spec, cfg, comm, torch.nn.Parameter(shard), 40, head)
        else:
            self.table = tg.RowwiseTable(self.spec, cfg, comm, 40)
            all_local_rows = torch.arange(len(shard))
            state = tg.RowState(shard, torch.ones(len(shard), dtype=tg.accum_dtype(shard.dtype)),
                                torch.ones(len(shard), dtype=torch.int32))
            load_chunks(self.table.store, [(all_local_rows, state)])

    def plan(self, rows: Sequence[int], cycle: int = 0, tied: bool = False) -> tg.RowPlan | None:
        """Plan these global rows; return None for a LocalTable. Collective."""
        if self.kind == LOCAL:
            return None
        comm, spec = self.comm, self.spec
        fetch_all = self.kind == "dense" and not tied
        plan, _ = plan_of(spec, comm, [np.asarray([rows], np.int32)], tied, fetch_all, cycle=cycle)
        if comm.world_size > 1:
            tg.exchange_row_requests(comm, comm.loader_group, "float32", [spec], {spec.label: plan})
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
        return self.table.reduced_grads().numpy().copy()

    def all_rows(self) -> Tensor:
        """Return the rows of every owner's shard, (owner, local row, feature). Collective."""
        if self.table.store is not None:
            self.table.store.wait_for_writes()
        return torch.stack(self.comm.all_gather(self.table.shard.clone()))

    def expected_rows(self, plan: tg.RowPlan) -> Tensor:
        """Return the current values of the rows of the plan. Collective."""
        return self.all_rows()[plan.rows_to_fetch // plan.shard_rows, plan.rows_to_fetch % plan.shard_rows]

def error_text(call: Callable[[], object]) -> str:
    """Return the message of the RunError that a call raises, or an empty string."""
    try:
        call()
    except tg.RunError as error:
        return str(error)
    return ""

def debug_rows_case(comm: tg.Communicator, kind: str) -> tuple[bool, str]:
    """Return whether exactly the unplanned rows are NaN, and the error for a gradient of an unplanned row.

    In dense mode a plan contains all rows.
    """
    under_test = TableUnderTest(comm, kind, debug_rows=1)
    plan = under_test.plan([3, 3, 7])
    cache, row_grads = under_test.table.rows_for_forward(plan)
    planned = 20 if kind == "dense" else 2
    poisoned = bool(cache[planned:].isnan().all()) and not cache[:planned].isnan().any()
    row_grads[-1] += 1
    under_test.reduced_grads()
    return poisoned, error_text(under_test.table.zero_grad)

@by_world_size_and_kind(without=LOCAL)
def test_zero_grad__debug_rows_refuses_gradients_of_unplanned_rows(ranks, world_size, kind) -> None:
    """With --debug_rows, unplanned rows are NaN, and a gradient of one is an error."""
    for found in ranks(world_size, run_each_kind, case=debug_rows_case, without=LOCAL):
        poisoned, error = found[kind]
        assert poisoned and ("in rows that were not planned" in error) == (kind != "dense")

def two_cycles(comm: tg.Communicator, kind: str) -> tuple[str, float]:
    """Add gradients of two cycles without an update in between; return the error, and the sum of the gradients."""
    under_test = TableUnderTest(comm, kind)
    ones = torch.ones(2, WIDTH)
    first = under_test.plan([3, 4], cycle=3)
    second = under_test.plan([9, 10], cycle=9)
    under_test.add(first, [3, 4], ones)
    error = error_text(lambda: under_test.add(second, [9, 10], ones))
    return error, float(under_test.reduced_grads().sum())

@by_world_size_and_kind()
def test_rows_for_forward__batches_of_two_cycles_add_up_only_in_a_local_table(ranks, world_size, kind) -> None:
    """A LocalTable accumulates both. Other tables refuse the second, and retain the gradients of the first."""
    totals = []
    for found in ranks(world_size, run_each_kind, case=two_cycles):
        error, total = found[kind]
        totals.append(total)
        if kind == LOCAL:
            assert not error
        else:
            assert "gradients of bigram_embed from another cycle" in error
            assert "'cycle': 3" in error and "'cycle': 9" in error
    assert sum(totals) == (4 if kind == LOCAL else 2) * WIDTH * world_size

def refetch_case(comm: tg.Communicator, kind: str) -> dict[str, bool]:
    """Return whether lookups read the correct rows in four situations.

    The rows of another plan are cached or are being fetched, an evaluation has fetched rows, or an update has changed
    rows.
    """
    found = {}
    with late_rows(comm.rank), MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        under_test = TableUnderTest(comm, kind)
        table = under_test.table
        first = under_test.plan(range(3, 17))
        second = under_test.plan((0, 1, 18, 19), cycle=1)

        def is_right(plan: tg.RowPlan) -> bool:
            cache, _ = table.rows_for_forward(plan)
            return cache[:len(plan.rows_to_fetch)].equal(under_test.expected_rows(plan))

        for before in ("cached", "under way"):
            table.reset()
            table.prefetch(first)
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
            if table.store is None:
                table.shard.add_(1)
            else:
                table.row_state.rows.add_(1)
                table.store.write_back(second, table.row_state)
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
        buffers = [table.grad] if kind == LOCAL else [table.cache, table.row_grads]
        return [x.data_ptr() for x in (table.shard, *buffers)]

    grad = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    found = []
    for disturbed in (True, False):
        under_test = TableUnderTest(comm, kind)
        before = addresses()
        if disturbed:
            under_test.add(under_test.plan([3, 4, 5]), [3, 4], torch.ones(2, WIDTH))
            under_test.reduced_grads()
            if kind != LOCAL:
                under_test.table.fetch(under_test.plan([8, 9], cycle=1))
            under_test.table.reset()
            assert not under_test.table.has_grads
        under_test.add(under_test.plan([7, 12], cycle=2), [7, 12], grad)
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
    with late_rows(comm.rank) as exchange, MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        under_test = TableUnderTest(comm, kind)
        table = under_test.table

        def train_plan(rows: Sequence[int], cycle: int) -> tg.RowPlan:
            plan = under_test.plan(rows, cycle)
            plan.tag["purpose"] = "train"
            return plan

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
            found.append((name, dict(table.byte_totals), dict(transferred)))

        # Ranks look up unequal numbers of rows, so that bytes sent and received differ.
        first = train_plan([3 + k % (14 - 3 * comm.rank) for k in range(14)], cycle=0)
        second = train_plan([19 - k % (6 - comm.rank) for k in range(6)], cycle=1)
        evaluated = under_test.plan(range(20))
        call("prefetch", first)
        call("fetch", first, requests=first)
        call("fetch", first)
        call("rows_for_forward", first)
        call("rows_for_forward", first)
        call("fetch_for_eval", evaluated, counts=False)
        call("rows_for_forward", first)                       # the evaluation has not changed the cache
        call("prefetch", second)
        call("launch_reduce")
        call("reduced_grads")
        if table.store is not None:
            table.store.write_back(first, table.row_state)
        call("zero_grad")
        call("fetch", second, requests=second)
        call("rows_for_forward", second)                      # then the cycle is interrupted
        table.reset()
        transferred.clear()
        call("zero_grad" if table.has_grads else "reset")
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
    return lookups[:3].detach(), head_grad, not row_grads.any() and not under_test.table.has_grads

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


# ---- Plans that differ between ranks, and invalid requests -----------------------------------------------------------
def every_second_row(comm: tg.Communicator, labels: Sequence[str], tied: bool = False,
                     **tag: Any) -> tuple[list[tg.TableSpec], dict[str, tg.RowPlan]]:
    """Plan every second row of each owner's shard; return the tables and the plans."""
    specs = [tg.TableSpec(label, 60, 1, None) for label in labels]
    rows = np.flatnonzero(np.arange(60) // comm.world_size % 2 == 0).astype(np.int32)[None]
    tag = dict(purpose="train", cycle=3, tokens=64) | tag
    return specs, {spec.label: plan_of(spec, comm, [rows], tied, **tag)[0] for spec in specs}

OTHER = dict(same={}, cycle=dict(cycle=4), purpose=dict(purpose="validation"), tokens=dict(tokens=65),
             dtype=dict(dtype="bfloat16"), table=dict(labels=("two", "one")), tied=dict(tied=True))

def swap_case(comm: tg.Communicator, name: str) -> str:
    """Run two exchanges in another order on the last rank; return the error.

    Their sizes are equal, except those of a tied plan.
    """
    def send(dtype: str = "float32", labels: Sequence[str] = ("one", "two"), **how: Any) -> None:
        specs, plans = every_second_row(comm, labels, **how)
        tg.exchange_row_requests(comm, comm.loader_group, dtype, specs, plans)

    def send_both() -> None:
        pair = [{}, OTHER[name]]
        for settings in (pair[::-1] if comm.rank == comm.world_size - 1 else pair):
            send(**settings)
    return error_text(send_both)

def swaps(rank: Rank) -> dict[str, str]:
    """Return the error of every swap."""
    comm = rank.comm()
    return {name: swap_case(comm, name) for name in OTHER}

@pytest.mark.parametrize("name", OTHER)
def test_exchange_row_requests__refuses_plans_that_differ_between_ranks(ranks, name) -> None:
    """The last rank swaps two exchanges. Every rank raises an error that contains both values."""
    for rank, errors in enumerate(ranks(3, swaps)):
        error = errors[name]
        if name == "same":
            assert not error
            continue
        assert f"row plans of ranks {2 if rank < 2 else 0} and {rank} differ\n" in error
        values = [re.search(rf"  {line}: .*?'{name}': ([^,}}]+)", error)[1] for line in ("found", "expected")]
        assert values[0] != values[1]

def fewer_tables(rank: Rank) -> str:
    """Exchange requests for two tables, on the last rank for one; return the error."""
    comm = rank.comm()
    labels = ("one",) if rank.rank == rank.world - 1 else ("one", "two")
    specs, plans = every_second_row(comm, labels)
    return error_text(functools.partial(tg.exchange_row_requests, comm, comm.loader_group, "float32", specs, plans))

def test_exchange_row_requests__refuses_different_numbers_of_tables(ranks) -> None:
    """Every rank raises the error, not only the last one."""
    for rank, error in enumerate(ranks(3, fewer_tables)):
        assert f"row plans of ranks {2 if rank < 2 else 0} and {rank} differ\n" in error

def bad_request(comm: tg.Communicator, name: str) -> tuple[str, list[int], list[int]]:
    """Change the request that rank 0 sends to the last rank; return the error, and the rows and counts to serve."""
    call = dist.all_to_all_single
    specs, plans = every_second_row(comm, ("table",))
    plan = plans["table"]
    first = sum(plan.fetch_counts[:comm.world_size - 1])
    local_rows = (plan.rows_to_fetch % plan.shard_rows)[first:].tolist()
    a, b, *others = local_rows
    bad = {"sound": local_rows, "too large": [*local_rows[:-1], plan.shard_rows],
           "largest": [*local_rows[:-1], 2**31 - 1], "negative": [-1, b, *others], "lowest": [-2**31, b, *others],
           "unsorted": [b, a, *others], "duplicate": [a, a, *others]}

    def corrupt(out: Tensor, x: Tensor, *splits: list[int], **kwargs: Any) -> Any:
        assert x[first:].tolist() == local_rows, "this is not the message with the requests"
        x[first:] = torch.tensor(bad[name], dtype=torch.int32)
        return call(out, x, *splits, **kwargs)

    with MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(dist, "all_to_all_single", corrupt)
        error = error_text(lambda: tg.exchange_row_requests(comm, comm.loader_group, "float32", specs, plans))
    return error, plan.rows_to_serve.tolist(), plan.serve_counts

BAD_REQUESTS = ("too large", "largest", "negative", "lowest", "unsorted", "duplicate")

def bad_requests(rank: Rank) -> dict[str, tuple[str, list[int], list[int]]]:
    """Return the results of bad_request for all requests."""
    comm = rank.comm()
    return {name: bad_request(comm, name) for name in ("sound", *BAD_REQUESTS)}

@pytest.mark.parametrize("name", ["sound", *BAD_REQUESTS])
def test_exchange_row_requests__refuses_invalid_rows(ranks, name) -> None:
    """Only the rank that receives the invalid request raises. A valid request has the planned rows and counts."""
    *others, last = [found[name] for found in ranks(3, bad_requests)]
    assert [error for error, *_ in others] == ["", ""]
    assert ("invalid rows of table requested by rank 0" in last[0]) == (name != "sound")
    if name == "sound":
        for _, rows_to_serve, serve_counts in (*others, last):
            assert (rows_to_serve, serve_counts) == ([*range(0, 20, 2)] * 3, [10] * 3)


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

"""Room 5: exchanged tables have the bits of one rank with whole tables; row requests, byte totals, `add_rows`.

The functions with an argument `rank` are what each of W ranks does; the tests after them look at what the ranks found.
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
from common import compile_for_gpu, needs_triton, owned_rows, plan_of, run_interpreted
from pytest import MonkeyPatch
from forked_ranks import Rank, Ranks
from reference import merge_shards
from table_harness import PATTERNS, WIDTH, StagedStore, Trial, differences, drive, late_rows
from torch import Tensor

import train_gpt as tg

MODES = ("sparse", "dense")
KINDS = (*MODES, *tg.ROW_STORES)         # of tables: how a dense one exchanges rows, or the store of a row-wise one
ELEMENT = dict(float32=4, bfloat16=2)    # bytes
SLOW = pytest.param(4, marks=pytest.mark.slow)
worlds = pytest.mark.parametrize("world", [1, 2, 3, SLOW, 8], ids="W{}".format)


# ---- Cycles of tables ------------------------------------------------------------------------------------------------
def trials(world: int) -> list[Trial]:
    """Each pattern in both modes, both dtypes, and on tables of several sizes; half as many for many ranks."""
    sizes = (53, 48, 5, 1, 97, 2)
    found = []
    for turn, (mode, dtype) in enumerate(itertools.product(MODES, ELEMENT)):
        tables = [(pattern, sizes[(k + turn) % len(sizes)]) for k, pattern in enumerate(PATTERNS)]
        found.append(Trial(tuple(tables), mode, dtype=dtype, updates=5 + turn))
    return found if world <= 2 else found[::3]

def cycles(rank: Rank) -> list[dict]:
    comm = rank.comm()
    return [drive(comm, trial) for trial in trials(rank.world)]

@worlds
def test_ExchangedTable__rows_are_those_of_a_dense_run(ranks, world):
    """With one rank, tables are read in place."""
    by_rank = ranks(world, cycles)
    for number, trial in enumerate(trials(world)):
        assert differences(trial, [found[number] for found in by_rank]) == [], trial

def counted_bytes(by_rank: list[dict], label: str, rank: int, row_bytes: int) -> Counter:
    """Count the bytes that a rank sends and receives for one table, from the rows that every rank fetched.

    A reader sends 4 bytes per row to the row's owner, which returns the row. The gradient of the row follows.
    """
    world = len(by_rank)
    count = Counter(bytes_sent=0, bytes_received=0)
    for reader, found in enumerate(by_rank):
        for rows_to_fetch, _ in found[label]["cycles"]:
            shard_rows = -(-int(label.rsplit(" ", 1)[1]) // world)
            for owner in rows_to_fetch // shard_rows:
                if owner == reader:
                    continue
                if reader == rank:
                    count.update(bytes_sent=4 + row_bytes, bytes_received=row_bytes)
                if owner == rank:
                    count.update(bytes_sent=row_bytes, bytes_received=4 + row_bytes)
    return count

@worlds
def test_zero_grad__byte_totals_of_each_table(ranks, world):
    """They equal a count by row, and their sum equals the bytes of all collectives."""
    by_rank = ranks(world, cycles)
    for number, trial in enumerate(trials(world)):
        of_ranks = [found[number] for found in by_rank]
        row_bytes = WIDTH * ELEMENT[trial.dtype]
        for rank, tables in enumerate(of_ranks):
            total = Counter(sent=0, received=0)
            for (label, found), (_, rows) in zip(tables.items(), trial.tables, strict=True):
                totals = found["byte_totals"]
                dense = trial.updates * 2 * (world - 1) * -(-rows // world) * row_bytes
                expected = dict(bytes_dense=dense, **counted_bytes(of_ranks, label, rank, row_bytes))
                assert totals == expected, f"{label} on rank {rank} in {trial}"
                total.update(sent=totals["bytes_sent"], received=totals["bytes_received"])
            assert found["bytes"] == total, "of all tables"

def both_tables(rank: Rank, trial: Trial) -> list[dict]:
    comm = rank.comm()
    return [drive(comm, trial, in_place) for in_place in (True, False)]

@pytest.mark.parametrize("mode", MODES)
def test_LocalTable__has_the_bits_of_an_exchanged_one(ranks, mode):
    """Both with one rank in float64: rows of each cycle, shard and moments."""
    trial = Trial(tuple((pattern, 53) for pattern in PATTERNS), mode)
    (local, exchanged), = ranks(1, both_tables, trial=trial)
    for label in local:
        for (_, rows), (fetched, read) in zip(local[label]["cycles"], exchanged[label]["cycles"], strict=True):
            np.testing.assert_array_equal(rows[fetched], read, label)
        for name in ("rows", "m", "v"):
            assert local[label][name].tobytes() == exchanged[label][name].tobytes(), f"{label}: {name}"
        assert not any(local[label]["byte_totals"].values()) and not any(exchanged[label]["byte_totals"].values())


# ---- One table -------------------------------------------------------------------------------------------------------
IN_PLACE = "read in place"
def kinds_of(world: int) -> tuple[str, ...]:
    """With one rank the trainer has no ExchangedTable that is not row-wise."""
    return (IN_PLACE, *tg.ROW_STORES) if world == 1 else KINDS

def by_world(without: str = "") -> pytest.MarkDecorator:
    """Parametrize a test by number of ranks and kind of table, all kinds but one."""
    cases = [(world, kind) for world in (1, 2) for kind in kinds_of(world) if kind != without]
    return pytest.mark.parametrize("world, kind", cases + [pytest.param(4, kind, marks=pytest.mark.slow)
                                                           for kind in KINDS])

def of_each_kind(rank: Rank, case: Callable[[tg.Communicator, str], Any], without: str = "") -> dict[str, Any]:
    """Return case(fabric, kind) of each kind of table."""
    comm = rank.comm()
    return {kind: case(comm, kind) for kind in kinds_of(comm.world_size) if kind != without}

class OneTable:
    """A table of random rows, of one of the KINDS or read in place, with what a step does to it."""
    def __init__(self, comm: tg.Communicator, kind: str, rows: int = 20, head: Tensor | None = None, **settings: Any):
        self.comm = comm
        self.kind = kind
        values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        mode = kind if kind in MODES else "sparse"
        settings = dict(model_dim=WIDTH, dtype="float32", row_comms=mode) | settings
        cfg = tg.Config(**tg.PRESETS["tiny"] | settings)
        self.spec = tg.TableSpec("bigram_embed", rows, 1, None, rowwise=kind in tg.ROW_STORES, location=kind)
        shard = owned_rows(values, comm).to(getattr(torch, cfg.dtype))
        if kind == IN_PLACE:
            self.table = tg.LocalTable(torch.nn.Parameter(shard))
        elif kind in MODES:
            self.table = tg.ExchangedTable(self.spec, cfg, comm, torch.nn.Parameter(shard), 40, head)
        else:
            self.table = tg.RowwiseTable(self.spec, cfg, comm, 40)
            everything = torch.arange(len(shard))
            state = tg.RowState(shard, torch.ones(len(shard), dtype=tg.accum_dtype(shard.dtype)),
                                torch.ones(len(shard), dtype=torch.int32))
            self.table.store.load([(everything, state)])

    def plan(self, rows: Sequence[int], cycle: int = 0, tied: bool = False) -> tg.RowPlan | None:
        """Plan these global rows; None if the table is read in place. Collective."""
        if self.kind == IN_PLACE:
            return None
        comm, spec = self.comm, self.spec
        fetch_all = self.kind == "dense" and not tied
        plan, _ = plan_of(spec, comm, [np.asarray([rows], np.int32)], tied, fetch_all, cycle=cycle)
        if comm.world_size > 1:
            tg.exchange_row_requests(comm, comm.loader_group, "float32", [spec], {spec.label: plan})
        return plan

    def add(self, plan: tg.RowPlan | None, rows: Sequence[int], grad: Tensor) -> None:
        """Look up the rows of the plan, and add gradients of some global rows."""
        _, row_grads = self.table.rows_for_forward(plan)
        index = torch.as_tensor(rows)
        if plan is not None:
            world = self.comm.world_size
            index = torch.searchsorted(plan.rows_to_fetch, index % world * plan.shard_rows + index // world)
        tg.add_rows(row_grads, index.int(), grad)

    def reduced(self) -> np.ndarray:
        self.table.launch_reduce()
        return self.table.reduced_grads().numpy().copy()

    def all_rows(self) -> Tensor:
        """Return the rows of every owner's shard, (owner, local row, feature). Collective."""
        if self.table.store is not None:
            self.table.store.wait_for_writes()
        return torch.stack(self.comm.all_gather(self.table.shard.clone()))

    def wanted(self, plan: tg.RowPlan) -> Tensor:
        """Return the current values of the rows of the plan. Collective."""
        return self.all_rows()[plan.rows_to_fetch // plan.shard_rows, plan.rows_to_fetch % plan.shard_rows]

def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except tg.RunError as error:
        return str(error)
    return ""

def debugged(comm: tg.Communicator, kind: str) -> tuple[bool, str]:
    """Return whether rows of no plan are NaN, and the error for a gradient of one. In dense mode a plan has all."""
    one = OneTable(comm, kind, debug_rows=1)
    plan = one.plan([3, 3, 7])
    cache, row_grads = one.table.rows_for_forward(plan)
    planned = 20 if kind == "dense" else 2
    poisoned = bool(cache[planned:].isnan().all()) and not cache[:planned].isnan().any()
    row_grads[-1] += 1
    one.reduced()
    return poisoned, error_of(one.table.zero_grad)

@by_world(without=IN_PLACE)
def test_zero_grad__a_gradient_in_rows_of_no_plan(ranks, world, kind):
    """With --debug_rows it is an error."""
    for found in ranks(world, of_each_kind, case=debugged, without=IN_PLACE):
        poisoned, error = found[kind]
        assert poisoned and ("in rows that were not planned" in error) == (kind != "dense")

def two_cycles(comm: tg.Communicator, kind: str) -> tuple[str, float]:
    one = OneTable(comm, kind)
    ones = torch.ones(2, WIDTH)
    first = one.plan([3, 4], cycle=3)
    second = one.plan([9, 10], cycle=9)
    one.add(first, [3, 4], ones)
    error = error_of(lambda: one.add(second, [9, 10], ones))
    return error, float(one.reduced().sum())

@by_world()
def test_rows_for_forward__batches_of_two_cycles(ranks, world, kind):
    """Their gradients add up if the table is read in place. Else the second is refused, and the first ones remain."""
    totals = []
    for found in ranks(world, of_each_kind, case=two_cycles):
        error, total = found[kind]
        totals.append(total)
        if kind == IN_PLACE:
            assert not error
        else:
            assert "gradients of bigram_embed from another cycle" in error
            assert "'cycle': 3" in error and "'cycle': 9" in error
    assert sum(totals) == (4 if kind == IN_PLACE else 2) * WIDTH * world

def refetch(comm: tg.Communicator, kind: str) -> dict[str, bool]:
    """Rows of one plan are cached, or under way, when those of another are asked for: are they the right ones?"""
    found = {}
    with late_rows(comm.rank), MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        one = OneTable(comm, kind)
        table = one.table
        first = one.plan(range(3, 17))
        second = one.plan((0, 1, 18, 19), cycle=1)

        def is_right(plan: tg.RowPlan) -> bool:
            cache, _ = table.rows_for_forward(plan)
            return cache[:len(plan.rows_to_fetch)].equal(one.wanted(plan))

        for before in ("cached", "under way"):
            table.reset()
            table.prefetch(first)
            table.fetch(first)
            if before == "cached":
                table.rows_for_forward(first)
                table.pending_plan = None
            found[before] = is_right(second)

        grad = torch.ones(2, WIDTH)
        one.add(second, [0, 19], grad)
        found["evaluated"] = table.fetch_for_eval(first).equal(one.wanted(first)) and is_right(second)
        total = sum(comm.all_gather(float(one.reduced().sum())))
        found["evaluated"] &= total == 2 * WIDTH * comm.world_size

        with torch.no_grad():
            if table.store is None:
                table.shard.add_(1)
            else:
                table.active.rows.add_(1)
                table.store.write_back(second, table.active)
        table.zero_grad()
        found["updated"] = is_right(second)
    return found

def refetched(ranks: Ranks, world: int, kind: str) -> list[dict[str, bool]]:
    return [found[kind] for found in ranks(world, of_each_kind, case=refetch, without=IN_PLACE)]

@by_world(without=IN_PLACE)
@pytest.mark.parametrize("before", ["cached", "under way"])
def test_rows_for_forward__another_plan_than_the_one_fetched_ahead(ranks, world, kind, before):
    """A fetch waits for the one before it, whose rows would otherwise overwrite its own."""
    assert all(found[before] for found in refetched(ranks, world, kind))

@by_world(without=IN_PLACE)
def test_fetch_for_eval__in_the_middle_of_a_cycle(ranks, world, kind):
    """It reads the current rows, and changes neither what is cached nor what has been added."""
    assert all(found["evaluated"] for found in refetched(ranks, world, kind))

@by_world(without=IN_PLACE)
def test_zero_grad__the_same_plan_again_after_an_update(ranks, world, kind):
    """Its rows are fetched again: those in the cache are the ones before the update."""
    assert all(found["updated"] for found in refetched(ranks, world, kind))

def reset(comm: tg.Communicator, kind: str) -> list[np.ndarray]:
    """Gradients after a reset in mid-cycle, with rows under way, and from the start."""
    def addresses() -> list[int]:
        table = one.table
        buffers = [table.grad] if kind == IN_PLACE else [table.cache, table.row_grads]
        return [x.data_ptr() for x in (table.shard, *buffers)]

    grad = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    found = []
    for disturbed in (True, False):
        one = OneTable(comm, kind)
        before = addresses()
        if disturbed:
            one.add(one.plan([3, 4, 5]), [3, 4], torch.ones(2, WIDTH))
            one.reduced()
            if kind != IN_PLACE:
                one.table.fetch(one.plan([8, 9], cycle=1))
            one.table.reset()
            assert not one.table.has_grads
        one.add(one.plan([7, 12], cycle=2), [7, 12], grad)
        found.append(one.reduced())
        assert addresses() == before, "moved"
    return found

@by_world()
def test_reset__in_the_middle_of_a_cycle(ranks, world, kind):
    by_rank = [found[kind] for found in ranks(world, of_each_kind, case=reset)]
    assert any(disturbed.any() for disturbed, _ in by_rank)
    for disturbed, undisturbed in by_rank:
        assert disturbed.tobytes() == undisturbed.tobytes()

def counts_by_call(comm: tg.Communicator, kind: str) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Return after each call on a table: its name, the byte totals, and what the table's collectives were given."""
    found = []
    given = Counter()                    # sent, received and the number of collectives, without those of evaluations
    with late_rows(comm.rank) as exchange, MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        one = OneTable(comm, kind)
        table = one.table

        def train_plan(rows: Sequence[int], cycle: int) -> tg.RowPlan:
            plan = one.plan(rows, cycle)
            plan.tag["purpose"] = "train"
            return plan

        def call(name: str, *args: Any, counts: bool = True, requests: tg.RowPlan | None = None) -> None:
            before = exchange.bytes.copy()
            if requests is not None:     # they were sent before, by `exchange_row_requests`
                rank = comm.rank
                given.update(sent=4 * (sum(requests.fetch_counts) - requests.fetch_counts[rank]),
                             received=4 * (sum(requests.serve_counts) - requests.serve_counts[rank]))
            getattr(table, name)(*args)
            moved = {way: exchange.bytes[way] - before[way] for way in ("sent", "received")}
            if counts:
                given.update(moved, collectives=int(any(moved.values())))
            found.append((name, dict(table.byte_totals), dict(given)))

        # Ranks look up unequal numbers of rows, so that bytes sent and received differ.
        first = train_plan([3 + k % (14 - 3 * comm.rank) for k in range(14)], cycle=0)
        second = train_plan([19 - k % (6 - comm.rank) for k in range(6)], cycle=1)
        evaluated = one.plan(range(20))
        call("prefetch", first)
        call("fetch", first, requests=first)
        call("fetch", first)
        call("rows_for_forward", first)
        call("rows_for_forward", first)
        call("fetch_for_eval", evaluated, counts=False)
        call("rows_for_forward", first)                       # an evaluation leaves the cache as it was
        call("prefetch", second)
        call("launch_reduce")
        call("reduced_grads")
        if table.store is not None:
            table.store.write_back(first, table.active)
        call("zero_grad")
        call("fetch", second, requests=second)
        call("rows_for_forward", second)                      # the cycle is cut short
        table.reset()
        given.clear()
        call("zero_grad" if table.has_grads else "reset")
    return found

@by_world(without=IN_PLACE)
def test_byte_totals__count_an_all_to_all_when_it_is_launched(ranks, world, kind):
    """Of training only, and each once. Requests count with the fetch of their rows."""
    for rank, found in enumerate(ranks(world, of_each_kind, case=counts_by_call, without=IN_PLACE)):
        shard_bytes = -(-20 // world) * WIDTH * ELEMENT["float32"]
        for name, totals, given in found[kind]:
            expected = dict(bytes_sent=given.get("sent", 0), bytes_received=given.get("received", 0),
                            bytes_dense=given.get("collectives", 0) * (world - 1) * shard_bytes)
            assert {key: totals.get(key, 0) for key in expected} == expected, (name, rank)
        sent = [totals["bytes_sent"] for _, totals, _ in found[kind]]
        assert (world == 1) == (not any(sent)) and sent[-1] == 0
        received = [totals["bytes_received"] for _, totals, _ in found[kind]]
        assert (sent == received) == (world == 1 or kind == "dense")

def addends(rank: int) -> Tensor:
    """Gradients whose sum in f32 depends on the order."""
    scale = torch.tensor([1e-4, 1.0, 1e3])[rank % 3]
    return scale * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(rank))

def rank_order(rank: Rank) -> np.ndarray:
    one = OneTable(rank.comm(), "sparse")
    one.add(one.plan(range(20)), range(20), addends(rank.rank))
    return one.reduced()

@pytest.mark.parametrize("world", [3, SLOW], ids="W{}".format)
def test_reduced_grads__added_in_the_order_of_ranks(ranks, world):
    """Rank 0 first; the owner's gradients have no precedence."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [addends(rank).numpy() for rank in ranks])

    got = merge_shards(ranks(world, rank_order), 20)
    np.testing.assert_array_equal(got, total(range(world)))
    assert not np.array_equal(got, total(range(world)[::-1])), "this test cannot tell"

def tied_gradients(rank: Rank, kind: str) -> tuple[Tensor, Tensor, bool]:
    """Return the rows that lookups read while tied, the head's gradient, and whether the table's is gone."""
    head = torch.arange(20.0 * WIDTH).view(WIDTH, 20)
    one = OneTable(rank.comm(), kind, head=head)
    if kind == IN_PLACE:
        one.table.weight.data.copy_(head.t())                 # as `Optimizer.step` does
    plan = one.plan([5, 2, 19, 5], tied=True)
    rows, row_grads = one.table.rows_for_forward(plan)
    read = rows[[2, 5, 19]] if plan is None else rows[torch.argsort(plan.head_columns)]
    one.add(plan, [5, 2, 19, 5], torch.arange(4.0 * WIDTH).view(4, WIDTH) + rank.rank)
    head_grad = torch.ones(WIDTH, 20) / rank.world
    one.table.add_grads_to_head(head_grad)
    return read[:3].detach(), head_grad, not row_grads.any() and not one.table.has_grads

def test_add_grads_to_head__of_an_exchanged_table_and_of_one_read_in_place(ranks):
    (read, head_grad, cleared), = ranks(1, tied_gradients, kind=IN_PLACE)
    assert cleared
    exchanged = ranks(2, tied_gradients, kind="sparse")
    for theirs, _, cleared in exchanged:
        assert theirs.equal(read) and cleared
    extra = torch.zeros(WIDTH, 20)
    extra[:, [2, 19]] = 1.0
    extra[:, 5] = 2.0                                         # the second rank adds 1 to each of 4 gradients
    assert (exchanged[0][1] + exchanged[1][1]).equal(2 * head_grad - 1 + extra)


# ---- Plans that ranks disagree about, requests that are wrong --------------------------------------------------------
def every_second_row(comm: tg.Communicator, labels: Sequence[str], tied: bool = False,
                     **tag: Any) -> tuple[list[tg.TableSpec], dict[str, tg.RowPlan]]:
    """Plan every second row of each owner's shard. Returns the tables too."""
    specs = [tg.TableSpec(label, 60, 1, None) for label in labels]
    rows = np.flatnonzero(np.arange(60) // comm.world_size % 2 == 0).astype(np.int32)[None]
    tag = dict(purpose="train", cycle=3, tokens=64) | tag
    return specs, {spec.label: plan_of(spec, comm, [rows], tied, **tag)[0] for spec in specs}

OTHER = dict(same={}, cycle=dict(cycle=4), purpose=dict(purpose="validation"), tokens=dict(tokens=65),
             dtype=dict(dtype="bfloat16"), table=dict(labels=("two", "one")), tied=dict(tied=True))

def swapped(comm: tg.Communicator, name: str) -> str:
    """Two exchanges of the same sizes (but for a tied one), in another order on the last rank."""
    def send(dtype: str = "float32", labels: Sequence[str] = ("one", "two"), **how: Any) -> None:
        specs, plans = every_second_row(comm, labels, **how)
        tg.exchange_row_requests(comm, comm.loader_group, dtype, specs, plans)

    def send_both() -> None:
        pair = [{}, OTHER[name]]
        for settings in (pair[::-1] if comm.rank == comm.world_size - 1 else pair):
            send(**settings)
    return error_of(send_both)

def swaps(rank: Rank) -> dict[str, str]:
    comm = rank.comm()
    return {name: swapped(comm, name) for name in OTHER}

@pytest.mark.parametrize("name", OTHER)
def test_exchange_row_requests__ranks_disagree(ranks, name):
    """They swap two exchanges. Every rank raises an error with both values."""
    for rank, errors in enumerate(ranks(3, swaps)):
        error = errors[name]
        if name == "same":
            assert not error
            continue
        assert f"row plans of ranks {2 if rank < 2 else 0} and {rank} differ\n" in error
        values = [re.search(rf"  {line}: .*?'{name}': ([^,}}]+)", error)[1] for line in ("found", "expected")]
        assert values[0] != values[1]

def fewer_tables(rank: Rank) -> str:
    comm = rank.comm()
    labels = ("one",) if rank.rank == rank.world - 1 else ("one", "two")
    specs, plans = every_second_row(comm, labels)
    return error_of(functools.partial(tg.exchange_row_requests, comm, comm.loader_group, "float32", specs, plans))

def test_exchange_row_requests__ranks_disagree_on_the_number_of_tables(ranks):
    for rank, error in enumerate(ranks(3, fewer_tables)):
        assert f"row plans of ranks {2 if rank < 2 else 0} and {rank} differ\n" in error

def bad_request(comm: tg.Communicator, name: str) -> tuple[str, list[int], list[int]]:
    """The last rank receives another request from rank 0 than rank 0 planned. Returns the error, and what it serves."""
    call = dist.all_to_all_single
    specs, plans = every_second_row(comm, ("table",))
    plan = plans["table"]
    first = sum(plan.fetch_counts[:comm.world_size - 1])
    local_rows = (plan.rows_to_fetch % plan.shard_rows)[first:].tolist()
    a, b, *others = local_rows
    bad = {"sound": local_rows, "too large": [*local_rows[:-1], plan.shard_rows],
           "largest": [*local_rows[:-1], 2**31 - 1], "negative": [-1, b, *others], "lowest": [-2**31, b, *others],
           "unsorted": [b, a, *others], "duplicate": [a, a, *others]}

    def corrupt(out, x, *splits, **kwargs):
        assert x[first:].tolist() == local_rows, "another message than this case expects"
        x[first:] = torch.tensor(bad[name], dtype=torch.int32)
        return call(out, x, *splits, **kwargs)

    with MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(dist, "all_to_all_single", corrupt)
        error = error_of(lambda: tg.exchange_row_requests(comm, comm.loader_group, "float32", specs, plans))
    return error, plan.rows_to_serve.tolist(), plan.serve_counts

BAD_REQUESTS = ("too large", "largest", "negative", "lowest", "unsorted", "duplicate")

def bad_requests(rank: Rank) -> dict[str, tuple[str, list[int], list[int]]]:
    comm = rank.comm()
    return {name: bad_request(comm, name) for name in ("sound", *BAD_REQUESTS)}

@pytest.mark.parametrize("name", ["sound", *BAD_REQUESTS])
def test_exchange_row_requests__rows_that_no_shard_has(ranks, name):
    *others, last = [found[name] for found in ranks(3, bad_requests)]
    assert [error for error, *_ in others] == ["", ""]
    assert ("invalid rows of table requested by rank 0" in last[0]) == (name != "sound")
    if name == "sound":
        for _, rows_to_serve, serve_counts in (*others, last):
            assert (rows_to_serve, serve_counts) == ([*range(0, 20, 2)] * 3, [10] * 3)


# ---- add_rows --------------------------------------------------------------------------------------------------------
LINES = 4                                # less than a row has: its lines cross blocks

def launch(sums: Tensor, index: Tensor, grad: Tensor) -> None:
    rows, order = index.sort(stable=True)
    num_lookups, width = grad.shape
    power_of_two = 1 << (width - 1).bit_length()
    kernel = tg.triton_jit(tg.add_rows_kernel)[(num_lookups,)]
    kernel(sums, rows, order, grad, num_lookups, width, BLOCK_ROWS=LINES, BLOCK_D=power_of_two)

def beyond_2_to_31(add: Callable) -> list[float]:
    """Sums of three rows in a buffer of which the system keeps the pages that were written, and no more."""
    rows = 2**31 // 24 + 3
    sums = torch.empty(rows, 24)
    assert sums.numel() > 2**31
    touched = torch.tensor([0, rows - 2, rows - 1])
    sums[touched] = 1.0
    grad = torch.arange(5.0)[:, None].expand(5, 24)
    add(sums, touched[[2, 0, 1, 2, 2]].int(), grad.contiguous())
    return sums[touched].unique(dim=1).flatten().tolist()

def interpret() -> dict:
    """Return the largest error and how many NaN, by width and type. TRITON_INTERPRET=1 was set before the import."""
    found = {}
    index = torch.tensor([12, 3, 3, 0, 3, 7, 3, 3, 12, 3, 3, 3, 3, 0, 3, 3, 9], dtype=torch.int32)
    for width, dtype in itertools.product((1, 5, 16, 24), (torch.float32, torch.bfloat16)):
        generator = torch.Generator().manual_seed(width)
        sums = torch.randint(-8, 9, (13, width), generator=generator).float()
        grad = torch.randint(-8, 9, (len(index), width), generator=generator).to(dtype)
        sums[5] = torch.nan                                                   # of a row that no line is for
        want = sums.double().index_add(0, index.long(), grad.double())
        launch(sums, index, grad)
        error = float(sums.sub(want).nan_to_num().abs().max())
        found[f"{width} {dtype}"] = [error, int(sums.isnan().sum()) - width]
    return found | dict(large=[beyond_2_to_31(add) for add in (launch, tg.add_rows)])

@needs_triton
def test_add_rows__kernel_in_interpreter():
    """11 lines of a row in blocks of 4, the first and the last row, widths that fill no block, 2^31 elements."""
    found = json.loads(run_interpreted("import json, test_rows; print(json.dumps(test_rows.interpret()))"))
    assert found.pop("large") == [[2.0, 3.0, 8.0]] * 2
    assert list(found.values()) == [[0.0, 0]] * 8

def compile_ahead(rank: Rank, capability: int) -> dict[str, Any]:
    os.environ["TRITON_CACHE_DIR"] = str(rank.folder)
    types = dict(row_grads="*fp32", rows="*i32", order="*i64", grad="*bf16", num_lookups="i32", D="i32")
    constants = dict(BLOCK_ROWS=tg.ADD_ROWS_BLOCK, BLOCK_D=1024)
    made = compile_for_gpu(capability, tg.add_rows_kernel, types, constants, num_warps=4)
    return {name: made.asm[name] for name in ("ptx", "ttir", "cubin")}

@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_add_rows__kernel_compiles_ahead(ranks, capability):
    """Addresses have 64 bits: the row is widened before it is multiplied."""
    made, = ranks(1, compile_ahead, capability=capability)
    assert f".target sm_{capability}" in made["ptx"] and made["cubin"]
    wide = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", made["ttir"])
    assert wide and re.search(rf"arith.muli .*{wide[1]}\b.* : i64", made["ttir"]), made["ttir"]
    assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", made["ttir"]), "a product in 32 bits"

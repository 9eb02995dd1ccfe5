"""Row-wise tables and their stores, compared with a naive dense model, for several numbers of ranks, in both locations.

The functions with an argument `rank` run on each of W ranks. The tests after them check what the ranks returned. Copies
of the host store take a random time in these runs, and overwrite their staging buffers.
"""
from __future__ import annotations

import contextlib
import copy
import itertools
import math
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (exact_array, expect_error, few_layers, fill_randomly, load_chunks, make_comm, make_engine, plan_of,
                    preset, started_loader, steps_of, tensors_of)
from pytest import MonkeyPatch
from forked_ranks import Rank
from reference import ngram_rows, merge_shards
from table_harness import PAIRS, PATTERNS, TRIPLES, StagedStore, Trial, differences, drive
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg

SLOW = pytest.param(4, marks=pytest.mark.slow)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, SLOW, 8], ids="W{}".format)
LOCATIONS = ("device", "host")
locations = pytest.mark.parametrize("location", LOCATIONS)
update_intervals = pytest.mark.parametrize("update_every", [2, 4])


# ---- Row-wise tables without a model ---------------------------------------------------------------------------------
SIZES = (53, 97, 31, 40, 29, 3)          # numbers of rows; 3 is less than some W
FEW_TABLES = (("uniform", 53), ("uniform", 5), ("looked up again", 64), ("every other update", 40),
              ("odd sequences empty", 53))

def make_trial(location: str, update_every: int, world_size: int) -> Trial:
    """Return a trial in float64; the slowest trials have few patterns."""
    tables = tuple((pattern, SIZES[i % len(SIZES)]) for i, pattern in enumerate(PATTERNS))
    slow = world_size > 2 and update_every > 2
    return Trial(FEW_TABLES if slow else tables, location=location, update_every=update_every)

def run_trial(rank: Rank, trial: Trial) -> dict[str, dict[str, Any]]:
    """Run the trial on this rank."""
    return drive(rank.comm(), trial)

@world_sizes
@locations
@update_intervals
def test_rowwise_update__of_requested_rows_equals_the_dense_model(ranks, world_size, location, update_every) -> None:
    """Updating only the requested rows gives the results of updating the whole table."""
    trial = make_trial(location, update_every, world_size)
    assert differences(trial, ranks(world_size, run_trial, trial=trial)) == []

@world_sizes
@update_intervals
def test_HostRowStore__has_the_bits_of_the_device_store(ranks, world_size, update_every) -> None:
    """A host store gives the bits of a device store.

    Its copies are late and use staging buffers that are overwritten. During a copy, the shard has no valid rows.
    """
    trials = [make_trial(location, update_every, world_size) for location in LOCATIONS]
    device, host = (ranks(world_size, run_trial, trial=trial) for trial in trials)
    for device_results, host_results in zip(device, host, strict=True):
        for label, name in itertools.product(device_results, ("rows", "v", "last", "touched")):
            assert device_results[label][name].tobytes() == host_results[label][name].tobytes(), f"{label}: {name}"

@world_sizes
@locations
def test_zero_grad__byte_totals_of_row_stores(ranks, world_size, location) -> None:
    """Every update copies the rows that any rank looked up between the owner's host memory and its device."""
    trial = make_trial(location, 2, world_size)
    by_rank = ranks(world_size, run_trial, trial=trial)
    row_bytes = by_rank[0]["uniform of 53"]["rows"][0].nbytes + 8 + 4
    for rank, results in enumerate(by_rank):
        for label, table_results in results.items():
            shard_rows = len(table_results["last"])
            num_copied = 0
            for cycle_by_rank in zip(*(other[label]["cycles"] for other in by_rank), strict=True):
                looked_up = np.unique(np.concatenate([rows_to_fetch for rows_to_fetch, _ in cycle_by_rank]))
                num_copied += np.count_nonzero(looked_up // shard_rows == rank)
            totals = table_results["byte_totals"]
            expected = num_copied * row_bytes if location == "host" else 0
            assert (totals.get("bytes_up", 0), totals.get("bytes_down", 0)) == (expected, expected), label

@locations
def test_rowwise_update__in_bf16_to_the_bit(ranks, location) -> None:
    """One rank and two ranks give the same bits in bf16, because all sums are exact in these trials."""
    trial = Trial(FEW_TABLES, location=location, dtype="bfloat16")
    one_rank, two_ranks = (ranks(world_size, run_trial, trial=trial) for world_size in (1, 2))
    assert differences(trial, one_rank) == []
    for (label, found), name in itertools.product(one_rank[0].items(), ("rows", "v", "last")):
        num_rows = len(found["last"])
        merged = merge_shards([results[label][name] for results in two_ranks], num_rows)
        assert found[name].tobytes() == merged.tobytes(), f"{label}: {name}"

@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rowwise_update__compiled_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend) -> None:
    """The compiled update gives the bits of eager code in bf16, with one graph for any number of rows.

    Sums of squares of these gradients are exact in any order.
    """
    backend_counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=backend_counter, dynamic=False, fullgraph=True)
    update_num = torch.tensor(7, dtype=torch.int32)
    frame_counts = []
    for num_rows in (37, 90):
        generator = torch.Generator().manual_seed(num_rows)
        rows = torch.randn(num_rows, 32, generator=generator)
        grad = torch.randint(-8, 9, (num_rows, 32), generator=generator) / 8
        last = torch.randint(0, 7, (num_rows,), generator=generator, dtype=torch.int32)
        results = []
        for update in (tg.rowwise_update, compiled):
            args = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone()]
            for x in args:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *active, grad_copy = args
            update(*active, grad_copy, 1 / 8, update_num, 0.95, 1e-10, tg.cpu_scalar(0.3), tg.cpu_scalar(0.01))
            results.append(active)
        eager_active, compiled_active = results
        assert all(x.equal(y) for x, y in zip(eager_active, compiled_active))
        assert not eager_active[0].equal(rows.bfloat16())
        frame_counts.append(backend_counter.frame_count)      # includes retracing
    assert frame_counts[1] == frame_counts[0] > 0


# ---- Row stores -----------------------------------------------------------------------------------------------------
NUM_ROWS, NUM_FEATURES = 10, 3
ROW_BYTES = NUM_FEATURES * 8 + 8 + 4     # f64 weights, second moment, last update (i32)

def make_store(store_type: type = tg.HostRowStore, comm: tg.Communicator | None = None, timeout_s: float = 60.0) -> Any:
    """Build a store of 10 rows with 3 f64 weights. timeout_s: the communicator's timeout."""
    cfg = replace(preset(), dtype="float64", model_dim=NUM_FEATURES)
    comm = comm or make_comm()
    comm.timeout = timeout_s
    return store_type(make_spec(NUM_ROWS, "host"), cfg, comm)

def make_spec(num_rows: int, location: str) -> tg.TableSpec:
    """Return the spec of a row-wise table."""
    return tg.TableSpec("a", num_rows, 1, None, rowwise=True, location=location)

def make_plans(*rows_by_update: Sequence[int], num_rows: int = NUM_ROWS) -> list[tg.RowPlan]:
    """Plan updates of these rows; each update looks up each of its rows once."""
    spec = make_spec(num_rows, "host")
    return [plan_of(spec, make_comm(), [np.asarray([rows], np.int32)])[0] for rows in rows_by_update]

def update(store: tg.DeviceRowStore, plan: tg.RowPlan, addend: float = 1.0, update_num: int = 1) -> None:
    """Add to the rows of the plan, as an update does between `read_rows` and `write_back`."""
    active = store.read_rows(plan)
    active.rows.add_(addend)
    active.v.add_(addend / 2)
    active.last.fill_(update_num)
    store.write_back(plan, active)

@pytest.mark.parametrize("prefetched", [True, False])
def test_read_rows__includes_changes_of_the_previous_update(prefetched) -> None:
    """Rows have the changes of the previous update, also if they were prefetched before it."""
    store = make_store(StagedStore)
    requests = [[5], [0, 1, 2], [1, 2, 3], [], [2, 3, 4], [3, 4, 9], [9, 0, 3]]
    plans = make_plans(*requests)
    for plan, next_plan in itertools.zip_longest(plans, plans[1:]):
        active = store.read_rows(plan)
        if prefetched and next_plan:
            store.prefetch(next_plan)                         # before the update, like `train_step`
        active.rows.add_(1)
        store.write_back(plan, active)
    store.wait_for_writes()
    assert store.shard.rows[:, 0].tolist() == [2, 2, 3, 4, 2, 1, 0, 0, 0, 2]
    copied_bytes = sum(map(len, requests)) * ROW_BYTES
    assert store.traffic == dict(bytes_up=copied_bytes, bytes_down=copied_bytes)

def test_read_rows__frees_prefetched_rows() -> None:
    """`read_rows` frees the prefetched rows.

    Otherwise they would use memory in addition to their copy with the changes of the previous update.
    """
    store = make_store()
    first, second = make_plans([1, 2], [2, 3])
    store.read_rows(first)
    store.prefetch(second)
    fetched, _ = store.prefetched[1].result(timeout=60)
    rows_ref = weakref.ref(fetched.rows)
    del fetched
    store.worker.submit(int).result(timeout=60)               # wait until the worker has dropped its references
    store.read_rows(second)
    assert rows_ref() is None

def test_invalidate__later_reads_return_the_shard() -> None:
    """A step that is repeated after discard_grads reads its rows again, without the changes that were not stored."""
    store = make_store()
    first, second = make_plans([1, 2], [2, 3])
    update(store, first)
    active = store.read_rows(first)
    store.prefetch(second)
    active.rows.add_(10)
    store.invalidate()
    assert not any(store.traffic.values())
    assert store.read_rows(second).rows[:, 0].tolist() == [1, 0]
    update(store, first)
    assert store.read_rows(second).rows[:, 0].tolist() == [2, 0]

class FailingOnceStore(tg.HostRowStore):
    """A host store that fails when it stores rows for the first time."""
    def _store(self, *args: Any) -> None:
        self._store = super()._store
        raise MemoryError("no staging")

NEXT_CALLS = ("wait_for_writes", "read_rows", "write_back", "read_weights", "touched_rows", "touched_state",
              "invalidate", "load")

def call_next(store: tg.HostRowStore, name: str, plan: tg.RowPlan) -> None:
    """Call the method of this name."""
    if name in ("prefetch", "read_rows"):
        getattr(store, name)(plan)
    elif name == "write_back":
        store.write_back(plan, store.shard.index_select(plan.rows_to_update))
    elif name == "read_weights":
        store.read_weights(torch.tensor([1]))
    elif name == "touched_state":
        list(store.touched_state())
    elif name == "load":
        load_chunks(store, [])
    else:
        getattr(store, name)()

@pytest.mark.parametrize("name, prefetched", [
    *((name, False) for name in NEXT_CALLS),
    *((name, True) for name in (*NEXT_CALLS, "prefetch") if name != "write_back")])       # write_back follows read_rows
def test_HostRowStore__an_error_of_its_worker_is_raised_by_the_next_call(name, prefetched) -> None:
    """The next call raises the error, whichever method it is.

    The worker stores rows together with the next prefetch, or when another call waits for them.
    """
    store = make_store(FailingOnceStore)
    first, second, third = make_plans([1, 2], [3, 4], [5])
    update(store, first)
    if prefetched:
        store.prefetch(second)
    with pytest.raises(MemoryError):
        call_next(store, name, third)

@pytest.mark.parametrize("name", ["wait_for_writes", "touched_rows"])
def test_HostRowStore__rows_that_could_not_be_stored_are_not_forgotten(name) -> None:
    """The next call raises the error again, or stores the rows.

    This matters because `write_checkpoint` continues after an error.
    """
    store = make_store(FailingOnceStore)
    plan, = make_plans([1, 2])
    update(store, plan)
    with pytest.raises(MemoryError):
        call_next(store, name, plan)
    with contextlib.suppress(MemoryError):
        assert store.read_weights(torch.tensor([1, 2])).tolist() == [[1, 1, 1], [1, 1, 1]]

class SlowStore(tg.HostRowStore):
    """A host store with slow copies."""
    def _copy_to_device(self, *args: Any) -> tuple[tg.RowState, Any]:
        time.sleep(0.2)
        return super()._copy_to_device(*args)

    def _store(self, *args: Any) -> None:
        time.sleep(0.1)
        super()._store(*args)

@pytest.mark.parametrize("prefetched", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("reader", ["read_weights", "touched_state", "wait_for_writes", "load", "invalidate"])
def test_HostRowStore__a_reader_of_the_shard_waits_for_the_worker(reader, prefetched) -> None:
    """Every method that reads the shard first waits until the worker has stored the last update."""
    store = make_store(SlowStore)
    first, second = make_plans([1, 2], [2, 5])
    update(store, first)
    if prefetched:
        store.prefetch(second)
    if reader == "read_weights":
        rows = store.read_weights(torch.tensor([1, 2]))
    elif reader == "touched_state":
        (_, state), = store.touched_state()
        rows = state.rows
    elif reader == "load":
        load_chunks(store, [(torch.tensor([2]), tg.RowState(*(x[:1] + 7 for x in store.shard)))])
        rows = store.shard.rows[[1, 2]] + torch.tensor([[1], [-6]])           # adds to 0 and 7
    else:
        getattr(store, reader)()
        rows = store.shard.rows[[1, 2]]
    assert rows.tolist() == [[1, 1, 1], [1, 1, 1]]

def test_read_rows__may_be_late_while_other_ranks_compile() -> None:
    """A timeout that is raised after the start applies to the worker.

    The worker waits for the GPU, which may wait for other ranks while they compile.
    """
    store = make_store(SlowStore, timeout_s=0.01)
    plan, = make_plans([5])
    store.comm.set_timeout(60.0)
    assert len(store.read_rows(plan).rows) == 1

@pytest.mark.parametrize("name", [*NEXT_CALLS, "prefetch"])
def test_HostRowStore__no_call_waits_longer_than_the_timeout(name) -> None:
    """While the worker is stuck in a copy, every call raises RunError after the timeout."""
    released = threading.Event()

    class StuckStore(tg.HostRowStore):
        def _store(self, *args: Any) -> None:
            released.wait(60)
            super()._store(*args)

    store = make_store(StuckStore)
    first, second, third = make_plans([1, 2], [3], [4])
    update(store, first)
    if name == "prefetch":
        store.prefetch(second)
    store.comm.timeout = 0.1                                  # from now on, because the update waits for the worker
    try:
        with expect_error(tg.RunError, "copying table rows", "host memory", "no result after 0.1 s"):
            call_next(store, name, third)
    finally:
        released.set()

def resident_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

@pytest.mark.skipif(sys.platform != "linux", reason="other systems may allocate the memory of the whole table")
@locations
def test_ROW_STORES__memory_grows_only_with_touched_rows(location) -> None:
    """Two updates of a table of 10^8 rows, listing its touched rows, and a load need less than 64 MiB.

    The table has more than 2^31 elements.
    """
    num_rows, num_features = 10**8, 24
    before_mib = resident_mib()
    cfg = replace(preset(), model_dim=num_features)
    store = tg.ROW_STORES[location](make_spec(num_rows, location), cfg, make_comm())
    last = num_rows - 1
    plans = make_plans([0, 5, num_rows // 2, last - 1], [5, last - 1, last], [5, last], num_rows=num_rows)
    for update_num, plan in enumerate(plans[:2], 1):
        update(store, plan, update_num, update_num)
    chunks = list(store.touched_state())
    local_rows = torch.cat([local_rows for local_rows, _ in chunks])
    state = tg.RowState(*(torch.cat(tensors) for tensors in zip(*(state for _, state in chunks))))
    assert local_rows.tolist() == [0, 5, num_rows // 2, num_rows - 2, num_rows - 1]
    assert state.rows.unique(dim=1).flatten().tolist() == [1, 3, 1, 3, 2]
    assert state.v.tolist() == [0.5, 1.5, 0.5, 1.5, 1]
    assert state.last.tolist() == [1, 2, 1, 2, 2]

    load_chunks(store, [(local_rows[2:], state.index_select(torch.tensor([2, 3, 4])))])
    touched_rows = torch.cat([local_rows for local_rows, _ in store.touched_state()])
    assert touched_rows.tolist() == local_rows[2:].tolist()
    assert not store.read_weights(torch.tensor([0, 5])).any()
    assert store.read_rows(plans[2]).rows.sum(dim=1).tolist() == [0, 2 * num_features]    # the load reset row 5
    assert resident_mib() < before_mib + 64


# ---- Random sequences of calls: both stores behave the same ----------------------------------------------------------
NUM_SEQUENCES, CALLS_PER_SEQUENCE = 400, 40
CALL_WEIGHTS = dict(prefetch=5, read_rows=6, change=6, write_back=6, read_weights=1, touched_state=1, wait_for_writes=1,
                    invalidate=1, load=1)

class QuickStore(StagedStore):
    most_delay_s = 0.0003

class StorePair:
    """A device store and a host store that receive the same calls, in orders that a trainer may use.

    Every call compares what the stores return. With `compare_all`, it also waits for the worker, and compares all rows
    and counts. Without it, calls happen while the worker is active.
    """
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.compare_all = seed % 2 == 0
        self.device = make_store(tg.DeviceRowStore)
        self.host = make_store(QuickStore)
        self.copied_bytes = dict(bytes_up=0, bytes_down=0)    # bytes the host store copied since it was invalidated
        self.plan: tg.RowPlan | None = None                   # read, but not written back
        self.active: list[tg.RowState] = []                   # active rows of both stores
        self.changed = False
        self.prefetched_plan: tg.RowPlan | None = None
        self.last_plan: tg.RowPlan | None = None
        self.stale_plan: tg.RowPlan | None = None             # prefetched before the current update
        self.dropped_plan: tg.RowPlan | None = None           # prefetched when the stores were invalidated
        self.saved_states: list[list[tuple[Tensor, tg.RowState]]] = [[]]
        self.num_updates = 0
        self.situations: set[str] = set()                     # checked at the end, so that none is missed

    def run(self) -> None:
        """Make random calls, and compare the stores after each."""
        names = list(CALL_WEIGHTS)
        weights = np.array(list(CALL_WEIGHTS.values())) / sum(CALL_WEIGHTS.values())
        for name in self.rng.choice(names, CALLS_PER_SEQUENCE, p=weights):
            if self.is_allowed(name):
                getattr(self, name)()
                self.compare()
        self.compare_all = True
        self.wait_for_writes()
        self.compare()

    def is_allowed(self, name: str) -> bool:
        """Return whether the call may be next: changed rows are written back or dropped before rows are read again."""
        if name in ("change", "write_back"):
            return self.plan is not None and (name == "write_back") == self.changed
        return name != "read_rows" or not self.changed

    def choose_plan(self) -> tg.RowPlan:
        """Return a new plan, or one that was used or prefetched recently.

        A step may be repeated after discard_grads, with a plan that the stores have seen.
        """
        plans = self.prefetched_plan, self.prefetched_plan, self.last_plan, self.dropped_plan
        known_plans = [plan for plan in plans if plan is not None]
        if known_plans and self.rng.random() < 0.6:
            return known_plans[self.rng.integers(len(known_plans))]
        rows = self.rng.choice(NUM_ROWS, self.rng.integers(0, 7), replace=False)
        return make_plans(rows)[0]

    def prefetch(self) -> None:
        plan = self.choose_plan()
        if self.prefetched_plan not in (None, plan):
            self.situations.add("a plan is prefetched, and then not read")
        self.prefetched_plan = plan
        self.stale_plan = self.prefetched_plan if self.plan is not None else None
        for store in (self.device, self.host):
            store.prefetch(self.prefetched_plan)

    def read_rows(self) -> None:
        plan = self.choose_plan()
        if plan is not self.prefetched_plan:
            unprefetched = self.prefetched_plan is None
            self.situations.add("rows are read without a prefetch" if unprefetched else "another plan is read")
        elif plan is self.stale_plan and self.last_plan is not None:
            changed_rows = set(plan.rows_to_update.tolist()) & set(self.last_plan.rows_to_update.tolist())
            situation = "prefetched rows are older than an update" if changed_rows else "prefetched rows are current"
            self.situations.add(situation)
        if plan is self.dropped_plan:
            self.situations.add("dropped rows are read again")
        if self.plan is not None:
            self.situations.add("rows are read twice without an update")
        self.active = [store.read_rows(plan) for store in (self.device, self.host)]
        self.copied_bytes["bytes_up"] += len(plan.rows_to_update) * ROW_BYTES
        same_state(*self.active)
        self.plan = self.last_plan = plan
        self.prefetched_plan = self.stale_plan = self.dropped_plan = None
        self.changed = False

    def change(self) -> None:
        self.num_updates += 1
        addend = torch.from_numpy(self.rng.standard_normal((len(self.active[0].v), NUM_FEATURES)))
        for active in self.active:
            active.rows.add_(addend)
            active.v.add_(addend[:, 0].square())
            active.last.fill_(self.num_updates)
        self.changed = True

    def write_back(self) -> None:
        for store, active in zip((self.device, self.host), self.active):
            store.write_back(self.plan, active)
        self.copied_bytes["bytes_down"] += len(self.plan.rows_to_update) * ROW_BYTES
        self.plan = None
        self.changed = False

    def read_weights(self) -> None:
        rows = torch.from_numpy(self.rng.integers(0, NUM_ROWS, 4))
        read = [store.read_weights(rows) for store in (self.device, self.host)]
        assert read[0].equal(read[1])

    def touched_state(self) -> None:
        chunks = [list(store.touched_state()) for store in (self.device, self.host)]
        for (rows, state), (host_rows, host_state) in zip(*chunks, strict=True):
            assert rows.equal(host_rows)
            same_state(state, host_state)
        self.saved_states.append(copy.deepcopy(chunks[1]))

    def wait_for_writes(self) -> None:
        for store in (self.device, self.host):
            store.wait_for_writes()
        assert self.host.pending_write is None
        same_state(self.device.shard, self.host.shard)

    def invalidate(self) -> None:
        for store in (self.device, self.host):
            store.invalidate()
        self.reset()

    def load(self) -> None:
        chunks = self.saved_states[self.rng.integers(len(self.saved_states))]
        for store in (self.device, self.host):
            load_chunks(store, chunks)
        self.reset()

    def reset(self) -> None:
        """Forget active and prefetched rows, as invalidated stores do."""
        if self.changed:
            self.situations.add("a change is dropped")
        if self.prefetched_plan is not None:
            self.situations.add("prefetched rows are dropped")
        self.copied_bytes = dict.fromkeys(self.copied_bytes, 0)
        self.dropped_plan = self.prefetched_plan
        self.plan = self.prefetched_plan = self.stale_plan = self.last_plan = None
        self.active = []
        self.changed = False

    def compare(self) -> None:
        """Compare the active rows; with `compare_all` also all rows, as if the host store had stored all changes."""
        if self.active:
            same_state(*self.active)
        if not self.compare_all:
            return
        self.host.worker.submit(int).result(timeout=60)
        host_shard = tg.RowState(*(x.clone() for x in self.host.shard))
        if self.host.pending_write is not None:
            local_rows, state, _ = self.host.pending_write
            host_shard.index_copy_(local_rows, state)
        same_state(self.device.shard, host_shard)
        assert {name: self.host.traffic[name] for name in self.copied_bytes} == self.copied_bytes
        assert not any(self.device.traffic.values())

def same_state(expected: tg.RowState, found: tg.RowState) -> None:
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True)), (expected, found)

def test_HostRowStore__random_sequences_of_calls_equal_the_device_store() -> None:
    """Both stores behave the same in random sequences of calls, which reach every kind of situation."""
    situations: set[str] = set()
    for seed in range(NUM_SEQUENCES):
        pair = StorePair(seed)
        try:
            pair.run()
        except AssertionError as error:
            raise AssertionError(f"sequence {seed}") from error
        situations |= pair.situations
    assert len(situations) == 9, f"some situations never occur; these do: {sorted(situations)}"


# ---- The CUDA branch of the host store, on fake streams --------------------------------------------------------------
class BackwardRunning(AssertionError):
    """An operation waited for the running backward pass."""

class Stream:
    """A fake stream whose operations run as late as possible: when a thread or another stream waits for them."""
    def __init__(self, device: torch.device | None = None) -> None:
        self.operations: list[Callable[[], object]] = []
        self.done = 0
        self.lock = threading.RLock()

    def record_event(self) -> Event:
        return Event(self, len(self.operations))

    def wait_event(self, event: Event) -> None:
        self.operations.append(event.complete)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

@dataclass
class Event:
    stream: Stream
    position: int

    def complete(self) -> None:
        """Run the operations of the stream before this event."""
        with self.stream.lock:
            while self.stream.done < self.position:
                self.stream.operations[self.stream.done]()
                self.stream.done += 1

    def synchronize(self) -> None:
        """Wait in a thread; only the worker may."""
        assert threading.current_thread().name.startswith("row-store"), "the main thread waits for the GPU"
        self.complete()

class ComputeStream(Stream):
    """The main thread's stream. Its operations run immediately, except for a backward pass, which runs until `end`."""
    running = False

    def backward(self) -> None:
        self.running = True
        self.operations.append(self.check_ended)

    def check_ended(self) -> None:
        if self.running:
            raise BackwardRunning

    def end(self) -> None:
        self.running = False

    def wait_event(self, event: Event) -> None:
        event.complete()

class CudaStore(tg.HostRowStore):
    """A host store with unpinned buffers that start as NaN, and a worker that can be paused."""
    def __init__(self, *args: Any) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        super().__init__(*args)

    def _pinned_buffers(self, n: int) -> tg.RowState:
        return tg.RowState(*(filler_like(x[:1].expand(n, *x.shape[1:])) for x in self.shard))

    def _copy_to_device(self, *args: Any) -> tuple[tg.RowState, Any]:
        assert self.go_on.wait(60)
        return super()._copy_to_device(*args)

def filler_like(x: Tensor) -> Tensor:
    """Return a tensor of NaN or -1."""
    return torch.full(x.shape, math.nan if x.is_floating_point() else -1, dtype=x.dtype)

class FakeCuda:
    """A host store that treats the CPU as a GPU. Copies become operations of the current stream of their thread."""
    def __init__(self, patch: MonkeyPatch) -> None:
        self.compute = ComputeStream()
        self.thread = threading.local()
        self.used_by: set[tuple[int, Stream]] = set()         # (address of a tensor, stream that uses it)
        self.thread_names: list[str] = []                     # threads that called set_thread_device
        self.original_copy, self.original_to = torch.Tensor.copy_, torch.Tensor.to
        for name, replacement in dict(Stream=Stream, current_stream=self.current_stream, stream=self.use).items():
            patch.setattr(torch.cuda, name, replacement)

        def late_copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            return self.launch(x, source) if non_blocking and self.streams() else self.original_copy(x, source)

        def late_to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self.launch(filler_like(x), x) if self.streams() else self.original_to(x, *args, **kwargs)

        def record_stream(x: Tensor, stream: Stream) -> None:
            self.used_by.add((x.data_ptr(), stream))

        for name, replacement in dict(copy_=late_copy, to=late_to, record_stream=record_stream).items():
            patch.setattr(torch.Tensor, name, replacement)
        comm = SimpleNamespace(device=torch.device("cpu"), on_cuda=True, world_size=1, rank=0,
                               set_thread_device=self.enter,
                               wait_for=lambda event: event.synchronize())
        self.store = make_store(CudaStore, comm)
        all_rows = torch.arange(NUM_ROWS)
        weights = all_rows.double()[:, None].expand(NUM_ROWS, NUM_FEATURES)
        state = tg.RowState(weights, all_rows.double(), all_rows.int())
        load_chunks(self.store, [(all_rows, state)])

    def current_stream(self, device: torch.device) -> Stream:
        return self.compute

    def streams(self) -> list[Stream]:
        return getattr(self.thread, "streams", [])

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.thread.streams = [stream]
        yield
        self.thread.streams = []

    def launch(self, out: Tensor, source: Tensor) -> Tensor:
        def run() -> None:
            self.original_copy(out, source)
        stream, = self.streams()
        stream.operations.append(run)
        return out

    def enter(self) -> None:
        self.thread_names.append(threading.current_thread().name)

@pytest.fixture
def fake_cuda(monkeypatch: MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)

def first_column(state: tg.RowState) -> list[float]:
    """Return the weight of each row, whose features are all equal."""
    assert state.rows.eq(state.rows[:, :1]).all()
    return state.rows[:, 0].tolist()

def test_prefetch__waits_for_no_running_backward_pass(fake_cuda) -> None:
    """A prefetch does not wait for a running backward pass, and no call of the main thread waits for the GPU.

    A write-back waits for the backward pass, on a separate stream.
    """
    store = fake_cuda.store
    first, second, third = make_plans([1, 2], [2, 3], [3, 4])
    update(store, first, addend=10)
    active = store.read_rows(second)
    assert first_column(active) == [12, 3]
    fake_cuda.compute.backward()

    store.prefetch(third)
    fetched, copied = store.prefetched[1].result(timeout=60)
    assert fetched.rows.isnan().all() and fetched.last.eq(-1).all(), "copied too early"
    copied.complete()
    assert first_column(fetched) == [3, 4]
    active.rows.add_(100)                                     # launched after the backward pass
    store.write_back(second, active)
    _, on_host, copied = store.pending_write
    with pytest.raises(BackwardRunning):
        copied.complete()
    assert on_host.rows.isnan().all()
    assert first_column(store.read_rows(third)) == [103, 4]

    fake_cuda.compute.end()
    store.worker.submit(store._store, *store.pending_write).result(timeout=60)
    assert first_column(store.shard) == [0, 11, 112, 103, 4, 5, 6, 7, 8, 9]
    assert fake_cuda.thread_names == ["row-store_0"]

def test_prefetch__is_not_queued_behind_a_write_back(fake_cuda) -> None:
    """A late worker does not copy rows after the write-back of the current update.

    The main thread launches the update and its write-back before the prefetch starts.
    """
    store = fake_cuda.store
    first, second = make_plans([1, 2], [2, 3])
    active = store.read_rows(first)
    store.go_on.clear()
    store.prefetch(second)
    fake_cuda.compute.backward()
    active.rows.add_(10)
    store.write_back(first, active)
    store.go_on.set()
    fetched, copied = store.prefetched[1].result(timeout=60)
    copied.complete()
    assert first_column(fetched) == [2, 3]
    assert first_column(store.read_rows(second)) == [12, 3]

def test_write_back__does_not_reuse_buffers_of_the_previous_one(fake_cuda) -> None:
    """A write-back uses other buffers if the worker has not yet stored the rows of the previous update."""
    store = fake_cuda.store
    first, second, third = make_plans([1, 2], [2, 3], [3, 1])
    active = store.read_rows(first)
    store.prefetch(second)
    active.rows.add_(10)
    store.write_back(first, active)
    active = store.read_rows(second)
    store.go_on.clear()
    store.prefetch(third)                                     # stores the first update when the worker continues
    active.rows.add_(100)
    store.write_back(second, active)
    store.pending_write[2].complete()
    store.go_on.set()
    assert first_column(store.read_rows(third)) == [11, 103]
    store.wait_for_writes()
    assert first_column(store.shard) == [0, 11, 112, 103, 4, 5, 6, 7, 8, 9]

def test_write_back__waits_for_a_previous_one_that_no_prefetch_has_stored(fake_cuda) -> None:
    """Two write-backs without a prefetch in between are both stored."""
    store = fake_cuda.store
    first, second = make_plans([1, 2], [2, 3])
    for plan, addend in ((first, 10), (second, 100)):
        store.write_back(plan, tg.RowState(*(x + addend for x in store.shard.index_select(plan.rows_to_update))))
    store.wait_for_writes()
    assert first_column(store.shard) == [0, 11, 102, 103, 4, 5, 6, 7, 8, 9]

def test_HostRowStore__tells_the_allocator_which_streams_use_a_tensor(fake_cuda) -> None:
    """Tensors are recorded on the streams that use them.

    Otherwise the allocator would reuse their memory before they are copied.
    """
    store = fake_cuda.store
    first, second = make_plans([1, 2], [2, 3])
    update(store, first)
    store.prefetch(second)
    fetched, _ = store.prefetched[1].result(timeout=60)
    active = store.read_rows(second)
    store.write_back(second, active)
    for x in fetched:
        assert (x.data_ptr(), fake_cuda.compute) in fake_cuda.used_by
    for x in active:
        assert (x.data_ptr(), store.to_host_stream) in fake_cuda.used_by


# ---- Snapshots of engines --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def few_layers_and_staging() -> Iterator[None]:
    """Use a small model, and a host store that overwrites its staging buffers to expose errors."""
    with few_layers(), MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        yield

def train(engine: tg.Engine, steps: int) -> dict[str, bytes]:
    """Train for a number of steps; return the state."""
    with started_loader(engine.cfg, engine.comm, steps) as (loader, step_cfgs):
        for step_cfg in steps_of(loader, step_cfgs):
            tg.train_step(engine, loader, step_cfg)
    return state_bytes(engine)

def state_bytes(engine: tg.Engine) -> dict[str, bytes]:
    """Return all state as bytes."""
    return {name: exact_array(x).tobytes() for name, x in tensors_of(engine).items()}

def tables_engine(location: str, **changes: Any) -> tg.Engine:
    """Build an engine with two n-gram tables, updated every 2 and 4 steps; the second one has 200,000 rows."""
    trigrams = replace(TRIPLES, rows=200_000, location=location, update_every=4)
    cfg = preset(tables=(replace(PAIRS, location=location), trigrams), num_scheduled_steps=6, **changes)
    return tg.Engine(cfg, make_comm(), tg.attention_reference, "plain")

@locations
def test_snapshot__has_touched_rows_and_restores_every_bit(location) -> None:
    """A snapshot copies only touched rows, and restoring it restores every bit.

    It can be restored repeatedly, and training continues with the same bits.
    """
    with few_layers_and_staging():
        engine = tables_engine(location)
        restore_start = engine.snapshot()
        start = state_bytes(engine)
        first = train(engine, 5)                            # ends within a cycle
        (local_rows, state), = engine.tables["trigram_embed"].store.touched_state()
        assert 0 < len(local_rows) == len(state.rows) <= 4 * max(stage.batch_tokens for stage in engine.cfg.stages)
        restore = engine.snapshot()

        restore()
        at_snapshot = state_bytes(engine)
        second = train(engine, 5)
        assert second["trigram_embed.rows"] != at_snapshot["trigram_embed.rows"]
        restore()
        assert state_bytes(engine) == at_snapshot
        assert train(engine, 5) == second

        restore_start()
        assert state_bytes(engine) == start and not list(engine.tables["trigram_embed"].store.touched_state())
        assert train(engine, 5) == first
        # The traffic counts only the run since the restore. Its one update copied its rows in both directions. The rows
        # of the cycle that has begun were only copied to the device.
        traffic = engine.traffic_totals()["trigram_embed"]
        next_rows = engine.tables["trigram_embed"].pending_plan.rows_to_update
        assert len(next_rows) > 0
        row_bytes = 4 * engine.cfg.model_dim + 4 + 4
        num_copied = len(local_rows) + len(next_rows), len(local_rows)
        expected = [row_bytes * count * (location == "host") for count in num_copied]
        assert [traffic["bytes_up"], traffic["bytes_down"]] == expected

@locations
def test_reseed__a_second_run_equals_a_separate_run(location) -> None:
    """The second of two runs gives the bits of a separate run with its seed, also in bf16.

    No table contains anything of the first run.
    """
    with few_layers_and_staging():
        two_runs, separate = (tables_engine(location, dtype="bfloat16", seed=seed) for seed in (4, 5))
        restore = two_runs.snapshot()
        first = train(two_runs, 6)
        restore()
        two_runs.reseed(5)
        second = train(two_runs, 6)
        assert second == train(separate, 6)
        assert first["trigram_embed.rows"] != second["trigram_embed.rows"]


# ---- The model ------------------------------------------------------------------------------------------------------
def test_sign_vectors__are_signs_from_a_constant_seed() -> None:
    """Sign vectors are random signs, the same in each call, and the last one is all ones."""
    signs = tg.sign_vectors(24)
    assert signs.shape == (tg.NUM_SIGN_VECTORS + 1, 24)
    assert signs.abs().eq(1).all() and signs[-1].eq(1).all()
    assert abs(float(signs[:-1].double().mean())) < 0.01
    assert len(signs[:-1].unique(dim=0)) > 0.99 * tg.NUM_SIGN_VECTORS
    assert signs.equal(tg.sign_vectors(24))

GATED_LAYER = 2                          # a paired layer with a value embedding; its gate does not read the row
TABLE_ROWS = 61
TRIGRAM_FACTORS, TRIGRAM_SIGN_FACTORS = (17351, 60961, 45259), (58699, 39779, 26801)

def dense_rows(tokens: np.ndarray, weights: Tensor, signs: int) -> Tensor:
    """Compute what the table adds at each position, by operations that autograd supports."""
    rows = F.embedding(torch.from_numpy(np.stack([ngram_rows(x, TRIGRAM_FACTORS, TABLE_ROWS) for x in tokens])),
                       weights)
    if signs:
        vectors = [ngram_rows(x, TRIGRAM_SIGN_FACTORS, tg.NUM_SIGN_VECTORS + 1) for x in tokens]
        rows = rows * tg.sign_vectors(weights.shape[1])[np.stack(vectors)]
    return rows

def losses_and_gradients(engine: tg.Engine) -> tuple[list[Tensor], tg.Batch]:
    """Return loss sums, gradient of the head and validation loss of the first batch; and that batch."""
    cfg = engine.cfg
    with started_loader(cfg, engine.comm, 1) as (loader, step_cfgs):
        step_cfg, = steps_of(loader, step_cfgs)
        batch = loader.next(step_cfg)
    seq_sums = engine.forward_backward(batch, step_cfg).seq_sums
    loss = torch.tensor(engine.evaluate([batch], step_cfg))
    return [seq_sums, engine.model.lm_head.main_grad, loss], batch

@pytest.mark.parametrize("layer", [None, GATED_LAYER], ids=["residual stream", "value stream"])
@pytest.mark.parametrize("signs", [0, 1], ids=["no signs", "signs"])
def test_GPT__uses_an_ngram_table_like_a_dense_one(monkeypatch, layer, signs) -> None:
    """Losses and gradients are those of a model without n-gram tables to which the rows are added by autograd.

    The rows are added to the bigram rows of every layer, or to the value embedding of one layer.
    """
    ngram = tg.NgramTable("trigram_embed", 3, TABLE_ROWS, signs=signs, layer=layer)
    engine = make_engine(preset(tables=(ngram,), dtype="float64"))
    fill_randomly(engine.model)
    label, idx = "value_embed", tg.LAYERS[GATED_LAYER].value_embed
    gates = engine.model.ve_gate_bank.data
    if layer is None:                                         # use the coefficients of the bigram table
        label, idx = "bigram_embed", 0
        sizes = engine.model.scalar_sizes
        scalars = dict(zip(sizes, engine.model.scalars.data.split(list(sizes.values()))))
        scalars[ngram.label].copy_(scalars["bigram"])
    else:                                                     # use the gate of the layer's value embedding
        gates[-1] = gates[idx]
    table = engine.tables[ngram.label]
    weights = torch.randn(table.store.shard.rows.shape, generator=torch.Generator().manual_seed(1)).double()
    table.store.shard.rows.copy_(weights)
    results, batch = losses_and_gradients(engine)
    grad = torch.zeros_like(weights)
    planned_rows = batch.plans[ngram.label].rows_to_fetch
    grad[planned_rows] = table.row_grads[:len(planned_rows)]

    plain_engine = make_engine(preset(dtype="float64"))
    for name, p in plain_engine.model.named_parameters():     # without what the table appended
        p.data.copy_(engine.model.get_parameter(name).detach()[:len(p)])
    weights.requires_grad_()
    lookup = tg.GPT.lookup

    def lookup_with_table(self: tg.GPT, table_label: str, batch: tg.Batch, row_buffers: dict) -> list[Tensor]:
        rows = lookup(self, table_label, batch, row_buffers)
        if table_label == label:
            rows[idx] = rows[idx] + dense_rows(batch.tokens.numpy(), weights, signs)
        return rows
    monkeypatch.setattr(tg.GPT, "lookup", lookup_with_table)
    expected_results, _ = losses_and_gradients(plain_engine)
    for x, expected in zip([*results, grad], [*expected_results, weights.grad]):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(x, expected, rtol=1e-10, atol=1e-12)

"""Row-wise tables and their stores: against a naive dense model, at any number of ranks, in either location.

The functions with an argument `rank` are what each of W ranks does; the tests after them look at what the ranks found.
Copies of the host store take a random time in these runs, and overwrite their staging buffers.
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
from common import (exact_array, expect_error, few_layers, fill_randomly, make_comm, make_engine, plan_of, preset,
                    started_loader, steps_of, tensors_of)
from pytest import MonkeyPatch
from forked_ranks import Rank
from reference import ngram_rows, merge_shards
from table_harness import PAIRS, PATTERNS, TRIPLES, StagedStore, Trial, differences, drive
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg

SLOW = pytest.param(4, marks=pytest.mark.slow)
worlds = pytest.mark.parametrize("world", [1, 2, SLOW, 8], ids="W{}".format)
STORES = ("device", "host")
stores = pytest.mark.parametrize("location", STORES)
update_intervals = pytest.mark.parametrize("update_every", [2, 4])


# ---- Row-wise tables alone -------------------------------------------------------------------------------------------
SIZES = (53, 97, 31, 40, 29, 3)          # rows; the last are fewer than ranks
FEW = (("uniform", 53), ("uniform", 5), ("looked up again", 64), ("every other update", 40),
       ("odd sequences empty", 53))

def trial_of(location: str, update_every: int, world: int) -> Trial:
    """Return a trial in float64; the slowest ones have few patterns."""
    tables = tuple((pattern, SIZES[k % len(SIZES)]) for k, pattern in enumerate(PATTERNS))
    return Trial(FEW if world > 2 and update_every > 2 else tables, location=location, update_every=update_every)

def updates(rank: Rank, trial: Trial) -> dict[str, dict]:
    return drive(rank.comm(), trial)

@worlds
@stores
@update_intervals
def test_rowwise_update__of_requested_rows_equals_the_dense_model(ranks, world, location, update_every) -> None:
    trial = trial_of(location, update_every, world)
    assert differences(trial, ranks(world, updates, trial=trial)) == []

@worlds
@update_intervals
def test_HostRowStore__has_the_bits_of_the_device_store(ranks, world, update_every) -> None:
    """Rows from the host are late, are copied through staging that is overwritten, and exist nowhere else meanwhile."""
    device, host = (ranks(world, updates, trial=trial_of(location, update_every, world)) for location in STORES)
    for mine, theirs in zip(device, host, strict=True):
        for label, name in itertools.product(mine, ("rows", "v", "last", "touched")):
            assert mine[label][name].tobytes() == theirs[label][name].tobytes(), f"{label}: {name}"

@worlds
@stores
def test_zero_grad__byte_totals_of_row_stores(ranks, world, location) -> None:
    """Every update copies the rows that any rank looked up from the owner's host memory and back."""
    trial = trial_of(location, 2, world)
    by_rank = ranks(world, updates, trial=trial)
    row_bytes = by_rank[0]["uniform of 53"]["rows"][0].nbytes + 8 + 4
    for rank, found in enumerate(by_rank):
        for label, of_table in found.items():
            shard_rows = len(of_table["last"])
            copied = 0
            for of_ranks in zip(*(other[label]["cycles"] for other in by_rank), strict=True):
                looked_up = np.unique(np.concatenate([rows_to_fetch for rows_to_fetch, _ in of_ranks]))
                copied += np.count_nonzero(looked_up // shard_rows == rank)
            totals = of_table["byte_totals"]
            expected = copied * row_bytes if location == "host" else 0
            assert (totals.get("bytes_up", 0), totals.get("bytes_down", 0)) == (expected, expected), label

@stores
def test_rowwise_update__in_bf16_to_the_bit(ranks, location) -> None:
    """All sums are exact here, so that one rank and two ranks have the same bits."""
    trial = Trial(FEW, location=location, dtype="bfloat16")
    one, two = (ranks(world, updates, trial=trial) for world in (1, 2))
    assert differences(trial, one) == []
    for (label, alone), name in itertools.product(one[0].items(), ("rows", "v", "last")):
        rows = len(alone["last"])
        together = merge_shards([of_rank[label][name] for of_rank in two], rows)
        assert alone[name].tobytes() == together.tobytes(), f"{label}: {name}"

@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rowwise_update__compiled_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend) -> None:
    """In bf16. Sums of squares of these gradients are exact in any order."""
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=graphs, dynamic=False, fullgraph=True)
    update_num = torch.tensor(7, dtype=torch.int32)
    counts = []
    for count in (37, 90):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, 32, generator=generator)
        grad = torch.randint(-8, 9, (count, 32), generator=generator) / 8
        last = torch.randint(0, 7, (count,), generator=generator, dtype=torch.int32)
        results = []
        for update in (tg.rowwise_update, compiled):
            given = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone()]
            for x in given:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *active, g = given
            update(*active, g, 1 / 8, update_num, 0.95, 1e-10, tg.cpu_scalar(0.3), tg.cpu_scalar(0.01))
            results.append(active)
        eager, by_graph = results
        assert all(x.equal(y) for x, y in zip(eager, by_graph)) and not eager[0].equal(rows.bfloat16())
        counts.append(graphs.frame_count)                     # retracing counts too
    assert counts[1] == counts[0] > 0


# ---- Row stores -----------------------------------------------------------------------------------------------------
ROWS, FEATURES = 10, 3
ROW_BYTES = FEATURES * 8 + 8 + 4         # of f64 weights, second moment and last update

def store_of(kind: type = tg.HostRowStore, where: tg.Communicator | None = None, timeout_s: float = 60.0) -> Any:
    """Build a store of ten rows of three f64 weights. timeout_s: the timeout in force."""
    cfg = replace(preset(), dtype="float64", model_dim=FEATURES)
    where = where or make_comm()
    where.timeout = timeout_s
    return kind(spec_of(ROWS, "host"), cfg, where)

def spec_of(rows: int, location: str) -> tg.TableSpec:
    return tg.TableSpec("a", rows, 1, None, rowwise=True, location=location)

def plans_of(*rows_by_update: Sequence[int], rows: int = ROWS) -> list[tg.RowPlan]:
    """Plan updates of these rows; an update reads each of them once."""
    spec = spec_of(rows, "host")
    return [plan_of(spec, make_comm(), [np.asarray([rows], np.int32)])[0] for rows in rows_by_update]

def update(store: tg.DeviceRowStore, plan: tg.RowPlan, by: float = 1.0, number: int = 1) -> None:
    """Add to the rows of the plan, as an update does between `read_rows` and `write_back`."""
    active = store.read_rows(plan)
    active.rows.add_(by)
    active.v.add_(by / 2)
    active.last.fill_(number)
    store.write_back(plan, active)

@pytest.mark.parametrize("prefetched", [True, False])
def test_read_rows__includes_changes_of_the_previous_update(prefetched) -> None:
    store = store_of(StagedStore)
    requests = [[5], [0, 1, 2], [1, 2, 3], [], [2, 3, 4], [3, 4, 9], [9, 0, 3]]
    plans = plans_of(*requests)
    for plan, following in itertools.zip_longest(plans, plans[1:]):
        active = store.read_rows(plan)
        if prefetched and following:
            store.prefetch(following)                         # before the update, as `train_step` does
        active.rows.add_(1)
        store.write_back(plan, active)
    store.wait_for_writes()
    assert store.shard.rows[:, 0].tolist() == [2, 2, 3, 4, 2, 1, 0, 0, 0, 2]
    copied = sum(map(len, requests)) * ROW_BYTES
    assert store.traffic == dict(bytes_up=copied, bytes_down=copied)

def test_read_rows__frees_prefetched_rows() -> None:
    """Else both the prefetched rows and their copy with the changes of the update before would take memory."""
    store = store_of()
    first, second = plans_of([1, 2], [2, 3])
    store.read_rows(first)
    store.prefetch(second)
    coming, _ = store.prefetched[1].result(timeout=60)
    rows = weakref.ref(coming.rows)
    del coming
    store.worker.submit(int).result(timeout=60)               # so that the worker has dropped its references
    store.read_rows(second)
    assert rows() is None

def test_invalidate__later_reads_return_the_shard() -> None:
    """A step that is repeated after drop_gradients reads its rows again, without the changes that were not stored."""
    store = store_of()
    first, second = plans_of([1, 2], [2, 3])
    update(store, first)
    active = store.read_rows(first)
    store.prefetch(second)
    active.rows.add_(10)
    store.invalidate()
    assert not any(store.traffic.values())
    assert store.read_rows(second).rows[:, 0].tolist() == [1, 0]
    update(store, first)
    assert store.read_rows(second).rows[:, 0].tolist() == [2, 0]

class FailingOnce(tg.HostRowStore):
    def _store(self, *args):
        self._store = super()._store
        raise MemoryError("no staging")

NEXT_CALLS = ("wait_for_writes", "read_rows", "write_back", "read_weights", "touched_rows", "touched_state",
              "invalidate", "load")

def call_next(store: tg.HostRowStore, name: str, plan: tg.RowPlan) -> None:
    if name in ("prefetch", "read_rows"):
        getattr(store, name)(plan)
    elif name == "write_back":
        store.write_back(plan, store.shard.index_select(plan.rows_to_update))
    elif name == "read_weights":
        store.read_weights(torch.tensor([1]))
    elif name == "touched_state":
        list(store.touched_state())
    elif name == "load":
        store.load([])
    else:
        getattr(store, name)()

@pytest.mark.parametrize("name, prefetched", [
    *((name, False) for name in NEXT_CALLS),
    *((name, True) for name in (*NEXT_CALLS, "prefetch") if name != "write_back")])       # it comes after read_rows
def test_HostRowStore__an_error_of_its_worker_is_raised_by_the_next_call(name, prefetched) -> None:
    """The worker stores rows together with the next prefetch, or when another call waits for them."""
    store = store_of(FailingOnce)
    first, second, third = plans_of([1, 2], [3, 4], [5])
    update(store, first)
    if prefetched:
        store.prefetch(second)
    with pytest.raises(MemoryError):
        call_next(store, name, third)

@pytest.mark.parametrize("name", ["wait_for_writes", "touched_rows"])
def test_HostRowStore__rows_that_could_not_be_stored_are_not_forgotten(name) -> None:
    """`write_checkpoint` goes on after an error. Either the next call raises it again, or it stores the rows."""
    store = store_of(FailingOnce)
    plan, = plans_of([1, 2])
    update(store, plan)
    with pytest.raises(MemoryError):
        call_next(store, name, plan)
    with contextlib.suppress(MemoryError):
        assert store.read_weights(torch.tensor([1, 2])).tolist() == [[1, 1, 1], [1, 1, 1]]

class Slow(tg.HostRowStore):
    def _copy_to_device(self, *args):
        time.sleep(0.2)
        return super()._copy_to_device(*args)

    def _store(self, *args):
        time.sleep(0.1)
        super()._store(*args)

@pytest.mark.parametrize("prefetched", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("reader", ["read_weights", "touched_state", "wait_for_writes", "load", "invalidate"])
def test_HostRowStore__a_reader_of_the_shard_waits_for_the_worker(reader, prefetched) -> None:
    store = store_of(Slow)
    first, second = plans_of([1, 2], [2, 5])
    update(store, first)
    if prefetched:
        store.prefetch(second)
    if reader == "read_weights":
        rows = store.read_weights(torch.tensor([1, 2]))
    elif reader == "touched_state":
        (_, state), = store.touched_state()
        rows = state.rows
    elif reader == "load":
        store.load([(torch.tensor([2]), tg.RowState(*(x[:1] + 7 for x in store.shard)))])
        rows = store.shard.rows[[1, 2]] + torch.tensor([[1], [-6]])           # 0 and 7
    else:
        getattr(store, reader)()
        rows = store.shard.rows[[1, 2]]
    assert rows.tolist() == [[1, 1, 1], [1, 1, 1]]

def test_read_rows__may_be_late_while_other_ranks_compile() -> None:
    """The worker waits for the GPU, which may wait for other ranks. A longer timeout may be set after the start."""
    store = store_of(Slow, timeout_s=0.01)
    plan, = plans_of([5])
    store.comm.set_timeout(60.0)
    assert len(store.read_rows(plan).rows) == 1

@pytest.mark.parametrize("name", [*NEXT_CALLS, "prefetch"])
def test_HostRowStore__no_call_waits_longer_than_the_timeout(name) -> None:
    """The worker is stuck in a copy. No wait is a hang."""
    released = threading.Event()

    class Stuck(tg.HostRowStore):
        def _store(self, *args):
            released.wait(60)
            super()._store(*args)

    store = store_of(Stuck, timeout_s=0.1)
    first, second, third = plans_of([1, 2], [3], [4])
    update(store, first)
    if name == "prefetch":
        store.prefetch(second)
    try:
        with expect_error(tg.RunError, "copying table rows", "host memory", "no result after 0.1 s"):
            call_next(store, name, third)
    finally:
        released.set()

def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a table takes its whole memory")
@stores
def test_ROW_STORES__memory_grows_only_with_touched_rows(location) -> None:
    """Beyond 2^31 elements, too; updates, the touched rows and a load."""
    rows, width = 10**8, 24
    before = resident_mib()
    store = tg.ROW_STORES[location](spec_of(rows, location), replace(preset(), model_dim=width), make_comm())
    plans = plans_of([0, 5, rows // 2, rows - 2], [5, rows - 2, rows - 1], [5, rows - 1], rows=rows)
    for number, plan in enumerate(plans[:2], 1):
        update(store, plan, number, number)
    chunks = list(store.touched_state())
    local_rows = torch.cat([local_rows for local_rows, _ in chunks])
    state = tg.RowState(*(torch.cat(parts) for parts in zip(*(state for _, state in chunks))))
    assert local_rows.tolist() == [0, 5, rows // 2, rows - 2, rows - 1]
    assert state.rows.unique(dim=1).flatten().tolist() == [1, 3, 1, 3, 2]
    assert state.v.tolist() == [0.5, 1.5, 0.5, 1.5, 1]
    assert state.last.tolist() == [1, 2, 1, 2, 2]

    store.load([(local_rows[2:], state.index_select(torch.tensor([2, 3, 4])))])
    found = torch.cat([local_rows for local_rows, _ in store.touched_state()])
    assert found.tolist() == local_rows[2:].tolist()
    assert not store.read_weights(torch.tensor([0, 5])).any()
    assert store.read_rows(plans[2]).rows.sum(dim=1).tolist() == [0, 2 * width]           # both in the last update
    assert resident_mib() < before + 64


# ---- Random sequences of calls: the host store is the device store ---------------------------------------------------
SEQUENCES, CALLS = 400, 40
CHANCES = dict(prefetch=5, read_rows=6, change=6, write_back=6, read_weights=1, touched_state=1, wait_for_writes=1,
               invalidate=1, load=1)

class QuickStore(StagedStore):
    most_delay_s = 0.0003

class StorePair:
    """A device store and a host store that get the same calls, in orders in which a trainer may make them.

    Every call compares what the stores return. With `looks`, it also compares all rows and counts, for which the
    worker has to finish; without it, calls meet the worker at work.
    """
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.looks = seed % 2 == 0
        self.device = store_of(tg.DeviceRowStore)
        self.host = store_of(QuickStore)
        self.copied = dict(bytes_up=0, bytes_down=0)          # by the host store since it was invalidated
        self.plan: tg.RowPlan | None = None                   # read, and not written back
        self.active: list[tg.RowState] = []                   # its rows, of both stores
        self.changed = False
        self.prefetched: tg.RowPlan | None = None
        self.last_plan: tg.RowPlan | None = None
        self.stale: tg.RowPlan | None = None                  # prefetched before the update that is being made
        self.dropped: tg.RowPlan | None = None                # prefetched when the stores were invalidated
        self.saved: list[list[tuple[Tensor, tg.RowState]]] = [[]]
        self.updates = 0
        self.seen: set[str] = set()                           # kinds of situations, so that none is missed

    def run(self) -> None:
        names = list(CHANCES)
        weights = np.array(list(CHANCES.values())) / sum(CHANCES.values())
        for name in self.rng.choice(names, CALLS, p=weights):
            if self.allowed(name):
                getattr(self, name)()
                self.compare()
        self.looks = True
        self.wait_for_writes()
        self.compare()

    def allowed(self, name: str) -> bool:
        """A change is followed by its write-back, or dropped; nothing is read for the next update in between."""
        if name in ("change", "write_back"):
            return self.plan is not None and (name == "write_back") == self.changed
        return name != "read_rows" or not self.changed

    def some_plan(self) -> tg.RowPlan:
        """Return a new plan, or one that was just used or prefetched: a step is repeated after drop_gradients, too."""
        known = [plan for plan in (self.prefetched, self.prefetched, self.last_plan, self.dropped) if plan is not None]
        if known and self.rng.random() < 0.6:
            return known[self.rng.integers(len(known))]
        rows = self.rng.choice(ROWS, self.rng.integers(0, 7), replace=False)
        return plans_of(rows)[0]

    def prefetch(self) -> None:
        plan = self.some_plan()
        if self.prefetched not in (None, plan):
            self.seen.add("a plan is prefetched, and then not read")
        self.prefetched = plan
        self.stale = self.prefetched if self.plan is not None else None
        for store in (self.device, self.host):
            store.prefetch(self.prefetched)

    def read_rows(self) -> None:
        plan = self.some_plan()
        if plan is not self.prefetched:
            self.seen.add("rows are read without a prefetch" if self.prefetched is None else "another plan is read")
        elif plan is self.stale and self.last_plan is not None:
            common = set(plan.rows_to_update.tolist()) & set(self.last_plan.rows_to_update.tolist())
            self.seen.add("prefetched rows are older than an update" if common else "prefetched rows are current")
        if plan is self.dropped:
            self.seen.add("dropped rows are read again")
        if self.plan is not None:
            self.seen.add("rows are read twice without an update")
        self.active = [store.read_rows(plan) for store in (self.device, self.host)]
        self.copied["bytes_up"] += len(plan.rows_to_update) * ROW_BYTES
        same_state(*self.active)
        self.plan = self.last_plan = plan
        self.prefetched = self.stale = self.dropped = None
        self.changed = False

    def change(self) -> None:
        self.updates += 1
        addend = torch.from_numpy(self.rng.standard_normal((len(self.active[0].v), FEATURES)))
        for active in self.active:
            active.rows.add_(addend)
            active.v.add_(addend[:, 0].square())
            active.last.fill_(self.updates)
        self.changed = True

    def write_back(self) -> None:
        for store, active in zip((self.device, self.host), self.active):
            store.write_back(self.plan, active)
        self.copied["bytes_down"] += len(self.plan.rows_to_update) * ROW_BYTES
        self.plan = None
        self.changed = False

    def read_weights(self) -> None:
        rows = torch.from_numpy(self.rng.integers(0, ROWS, 4))
        read = [store.read_weights(rows) for store in (self.device, self.host)]
        assert read[0].equal(read[1])

    def touched_state(self) -> None:
        chunks = [list(store.touched_state()) for store in (self.device, self.host)]
        for (rows, state), (host_rows, host_state) in zip(*chunks, strict=True):
            assert rows.equal(host_rows)
            same_state(state, host_state)
        self.saved.append(copy.deepcopy(chunks[1]))

    def wait_for_writes(self) -> None:
        for store in (self.device, self.host):
            store.wait_for_writes()
        assert self.host.unstored is None
        same_state(self.device.shard, self.host.shard)

    def invalidate(self) -> None:
        for store in (self.device, self.host):
            store.invalidate()
        self.forget()

    def load(self) -> None:
        chunks = self.saved[self.rng.integers(len(self.saved))]
        for store in (self.device, self.host):
            store.load(chunks)
        self.forget()

    def forget(self) -> None:
        """An invalid store has no active and no prefetched rows."""
        if self.changed:
            self.seen.add("a change is dropped")
        if self.prefetched is not None:
            self.seen.add("prefetched rows are dropped")
        self.copied = dict.fromkeys(self.copied, 0)
        self.dropped = self.prefetched
        self.plan = self.prefetched = self.stale = self.last_plan = None
        self.active = []
        self.changed = False

    def compare(self) -> None:
        """Compare the active rows; and with `looks` all rows, as if what is to be stored were stored."""
        if self.active:
            same_state(*self.active)
        if not self.looks:
            return
        self.host.worker.submit(int).result(timeout=60)
        stored = tg.RowState(*(x.clone() for x in self.host.shard))
        if self.host.unstored is not None:
            local_rows, state, _ = self.host.unstored
            stored.index_copy_(local_rows, state)
        same_state(self.device.shard, stored)
        assert {name: self.host.traffic[name] for name in self.copied} == self.copied
        assert not any(self.device.traffic.values())

def same_state(expected: tg.RowState, found: tg.RowState) -> None:
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True)), (expected, found)

def test_HostRowStore__random_sequences_of_calls_equal_the_device_store() -> None:
    seen: set[str] = set()
    for seed in range(SEQUENCES):
        pair = StorePair(seed)
        try:
            pair.run()
        except AssertionError as error:
            raise AssertionError(f"sequence {seed}") from error
        seen |= pair.seen
    assert len(seen) == 9, f"situations that no sequence meets, beside {sorted(seen)}"


# ---- The CUDA branch of the host store, on streams that stand in -----------------------------------------------------
class Busy(AssertionError):
    """An operation waits for the running backward pass."""

class Stream:
    """Operations that run when a thread or another stream waits for them: as late as on a GPU that is far behind."""
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
        """Run the stream up to this event."""
        with self.stream.lock:
            while self.stream.done < self.position:
                self.stream.operations[self.stream.done]()
                self.stream.done += 1

    def synchronize(self) -> None:
        """Let a thread wait: only the worker may."""
        assert threading.current_thread().name.startswith("row-store"), "the main thread waits for the GPU"
        self.complete()

class ComputeStream(Stream):
    """The stream of the main thread. Its operations run at once, except a backward pass, which lasts until `end`."""
    running = False

    def backward(self) -> None:
        self.running = True
        self.operations.append(self.check_ended)

    def check_ended(self) -> None:
        if self.running:
            raise Busy

    def end(self) -> None:
        self.running = False

    def wait_event(self, event: Event) -> None:
        event.complete()

class CudaStore(tg.HostRowStore):
    """The host store with buffers that are not pinned and start as NaN, and with a worker that can be held up."""
    def __init__(self, *args: Any) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        super().__init__(*args)

    def _pinned_buffers(self, n: int) -> tg.RowState:
        return tg.RowState(*(nonsense_like(x[:1].expand(n, *x.shape[1:])) for x in self.shard))

    def _copy_to_device(self, *args: Any) -> tuple[tg.RowState, Any]:
        assert self.go_on.wait(60)
        return super()._copy_to_device(*args)

def nonsense_like(x: Tensor) -> Tensor:
    return torch.full(x.shape, math.nan if x.is_floating_point() else -1, dtype=x.dtype)

class StandInCuda:
    """A host store that takes the CPU for a GPU. Copies are operations of the stream that its thread uses."""
    def __init__(self, patch: MonkeyPatch) -> None:
        self.compute = ComputeStream()
        self.thread = threading.local()
        self.used: set[tuple[int, Stream]] = set()            # address of a tensor, and a stream that uses it
        self.entered: list[str] = []                          # names of threads
        self.copy, self.to = torch.Tensor.copy_, torch.Tensor.to
        for name, stand_in in dict(Stream=Stream, current_stream=self.current_stream, stream=self.use).items():
            patch.setattr(torch.cuda, name, stand_in)

        def late_copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            return self.launch(x, source) if non_blocking and self.streams() else self.copy(x, source)

        def late_to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self.launch(nonsense_like(x), x) if self.streams() else self.to(x, *args, **kwargs)

        def record_stream(x: Tensor, stream: Stream) -> None:
            self.used.add((x.data_ptr(), stream))

        for name, stand_in in dict(copy_=late_copy, to=late_to, record_stream=record_stream).items():
            patch.setattr(torch.Tensor, name, stand_in)
        where = SimpleNamespace(device=torch.device("cpu"), on_cuda=True, world_size=1, rank=0,
                                set_thread_device=self.enter,
                                wait_for=lambda event: event.synchronize())
        self.store = store_of(CudaStore, where)
        everything = torch.arange(ROWS)
        state = tg.RowState(everything.double()[:, None].expand(ROWS, FEATURES), everything.double(), everything.int())
        self.store.load([(everything, state)])

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
            self.copy(out, source)
        stream, = self.streams()
        stream.operations.append(run)
        return out

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

@pytest.fixture
def cuda(monkeypatch) -> StandInCuda:
    return StandInCuda(monkeypatch)

def weights_of(state: tg.RowState) -> list[float]:
    assert state.rows.eq(state.rows[:, :1]).all()
    return state.rows[:, 0].tolist()

def test_prefetch__waits_for_no_running_backward_pass(cuda) -> None:
    """And no call of the main thread waits for the GPU. A write-back does, on a stream of its own."""
    store = cuda.store
    first, second, third = plans_of([1, 2], [2, 3], [3, 4])
    update(store, first, by=10)
    active = store.read_rows(second)
    assert weights_of(active) == [12, 3]
    cuda.compute.backward()

    store.prefetch(third)
    coming, copied = store.prefetched[1].result(timeout=60)
    assert coming.rows.isnan().all() and coming.last.eq(-1).all(), "copied before it has to be"
    copied.complete()
    assert weights_of(coming) == [3, 4]
    active.rows.add_(100)                                     # launched behind the backward pass
    store.write_back(second, active)
    _, on_host, copied = store.unstored
    with pytest.raises(Busy):
        copied.complete()
    assert on_host.rows.isnan().all()
    assert weights_of(store.read_rows(third)) == [103, 4]

    cuda.compute.end()
    store.worker.submit(store._store, *store.unstored).result(timeout=60)
    assert weights_of(store.shard) == [0, 11, 112, 103, 4, 5, 6, 7, 8, 9]
    assert cuda.entered == ["row-store_0"]

def test_prefetch__is_not_queued_behind_a_write_back(cuda) -> None:
    """The worker is late: the main thread has launched the update and its write-back before the prefetch starts."""
    store = cuda.store
    first, second = plans_of([1, 2], [2, 3])
    active = store.read_rows(first)
    store.go_on.clear()
    store.prefetch(second)
    cuda.compute.backward()
    active.rows.add_(10)
    store.write_back(first, active)
    store.go_on.set()
    coming, copied = store.prefetched[1].result(timeout=60)
    copied.complete()
    assert weights_of(coming) == [2, 3]
    assert weights_of(store.read_rows(second)) == [12, 3]

def test_write_back__does_not_reuse_buffers_of_the_previous_one(cuda) -> None:
    """Rows of the update before are on the host, but the worker has not stored them yet."""
    store = cuda.store
    first, second, third = plans_of([1, 2], [2, 3], [3, 1])
    active = store.read_rows(first)
    store.prefetch(second)
    active.rows.add_(10)
    store.write_back(first, active)
    active = store.read_rows(second)
    store.go_on.clear()
    store.prefetch(third)                                     # stores the first update, once the worker goes on
    active.rows.add_(100)
    store.write_back(second, active)
    store.unstored[2].complete()
    store.go_on.set()
    assert weights_of(store.read_rows(third)) == [11, 103]
    store.wait_for_writes()
    assert weights_of(store.shard) == [0, 11, 112, 103, 4, 5, 6, 7, 8, 9]

def test_write_back__waits_for_a_previous_one_that_no_prefetch_has_stored(cuda) -> None:
    store = cuda.store
    first, second = plans_of([1, 2], [2, 3])
    for plan, by in ((first, 10), (second, 100)):
        store.write_back(plan, tg.RowState(*(x + by for x in store.shard.index_select(plan.rows_to_update))))
    store.wait_for_writes()
    assert weights_of(store.shard) == [0, 11, 102, 103, 4, 5, 6, 7, 8, 9]

def test_HostRowStore__tells_the_allocator_which_streams_use_a_tensor(cuda) -> None:
    """Else the memory of rows would be used again before they are copied."""
    store = cuda.store
    first, second = plans_of([1, 2], [2, 3])
    update(store, first)
    store.prefetch(second)
    coming, _ = store.prefetched[1].result(timeout=60)
    active = store.read_rows(second)
    store.write_back(second, active)
    for x in coming:
        assert (x.data_ptr(), cuda.compute) in cuda.used
    for x in active:
        assert (x.data_ptr(), store.to_host_stream) in cuda.used


# ---- Snapshots of engines --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def few_layers_and_staging() -> Iterator[None]:
    """A small model, and a host store that hides no fault."""
    with few_layers(), MonkeyPatch.context() as patch:
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        yield

def trained(engine: tg.Engine, steps: int) -> dict[str, bytes]:
    with started_loader(engine.cfg, engine.comm, steps) as (loader, plan):
        for values in steps_of(loader, plan):
            tg.train_step(engine, loader, values)
    return all_bytes(engine)

def all_bytes(engine: tg.Engine) -> dict[str, bytes]:
    return {name: exact_array(x).tobytes() for name, x in tensors_of(engine).items()}

def tables_engine(location: str, **changes) -> tg.Engine:
    """Two tables, the second with many rows, with updates after 2 and after 4 steps."""
    many = replace(TRIPLES, rows=200_000, location=location, update_every=4)
    cfg = preset(tables=(replace(PAIRS, location=location), many), num_scheduled_steps=6, **changes)
    return tg.Engine(cfg, make_comm(), tg.attention_reference, "plain")

@stores
def test_snapshot__has_touched_rows_and_restores_every_bit(location) -> None:
    with few_layers_and_staging():
        engine = tables_engine(location)
        restore_start = engine.snapshot()
        start = all_bytes(engine)
        once = trained(engine, 5)                           # in the middle of a cycle
        (local_rows, state), = engine.tables["trigram_embed"].store.touched_state()
        assert 0 < len(local_rows) == len(state.rows) <= 4 * max(stage.batch_tokens for stage in engine.cfg.stages)
        restore = engine.snapshot()

        restore()
        before = all_bytes(engine)
        again = trained(engine, 5)
        assert again["trigram_embed.rows"] != before["trigram_embed.rows"]
        restore()
        assert all_bytes(engine) == before
        assert trained(engine, 5) == again

        restore_start()
        assert all_bytes(engine) == start and not list(engine.tables["trigram_embed"].store.touched_state())
        assert trained(engine, 5) == once
        # Of this run alone: rows of its one update are copied both ways, and those of the cycle that has begun only to
        # the device.
        traffic = engine.traffic_totals()["trigram_embed"]
        begun = engine.tables["trigram_embed"].pending_plan.rows_to_update
        assert len(begun) > 0
        row_bytes = 4 * engine.cfg.model_dim + 4 + 4
        copied = len(local_rows) + len(begun), len(local_rows)
        expected = [row_bytes * count * (location == "host") for count in copied]
        assert [traffic["bytes_up"], traffic["bytes_down"]] == expected

@stores
def test_reseed__a_second_run_equals_a_separate_run(location) -> None:
    """Also in bf16. Nothing of the first run is left in a table."""
    with few_layers_and_staging():
        both, alone = (tables_engine(location, dtype="bfloat16", seed=seed) for seed in (4, 5))
        restore = both.snapshot()
        first = trained(both, 6)
        restore()
        both.reseed(5)
        second = trained(both, 6)
        assert second == trained(alone, 6)
        assert first["trigram_embed.rows"] != second["trigram_embed.rows"]


# ---- The model ------------------------------------------------------------------------------------------------------
def test_sign_vectors__are_signs_from_a_constant_seed() -> None:
    signs = tg.sign_vectors(24)
    assert signs.shape == (tg.NUM_SIGN_VECTORS + 1, 24)
    assert signs.abs().eq(1).all() and signs[-1].eq(1).all()
    assert abs(float(signs[:-1].double().mean())) < 0.01
    assert len(signs[:-1].unique(dim=0)) > 0.99 * tg.NUM_SIGN_VECTORS
    assert signs.equal(tg.sign_vectors(24))

GATED = 2                                # a paired layer that has a value table: its gate does not look at the row
TABLE_ROWS = 61
TRIGRAM_FACTORS, TRIGRAM_SIGN_FACTORS = (17351, 60961, 45259), (58699, 39779, 26801)

def dense_rows(tokens: np.ndarray, weights: Tensor, signs: int) -> Tensor:
    """Return what the table adds at each position, for autograd."""
    added = F.embedding(torch.from_numpy(np.stack([ngram_rows(x, TRIGRAM_FACTORS, TABLE_ROWS) for x in tokens])),
                        weights)
    if signs:
        vectors = [ngram_rows(x, TRIGRAM_SIGN_FACTORS, tg.NUM_SIGN_VECTORS + 1) for x in tokens]
        added = added * tg.sign_vectors(weights.shape[1])[np.stack(vectors)]
    return added

def losses_and_gradients(engine: tg.Engine) -> tuple[list[Tensor], tg.Batch]:
    """Slot sums, the gradient of the head, and a validation loss on the first batch; and that batch."""
    cfg = engine.cfg
    with started_loader(cfg, engine.comm, 1) as (loader, steps):
        values, = steps_of(loader, steps)
        batch = loader.next(values)
    sums = engine.forward_backward(batch, values).seq_sums
    loss = torch.tensor(engine.evaluate([batch], values))
    return [sums, engine.model.lm_head.main_grad, loss], batch

@pytest.mark.parametrize("place", [None, GATED], ids=["residual stream", "value stream"])
@pytest.mark.parametrize("signs", [0, 1], ids=["no signs", "signs"])
def test_GPT__uses_an_ngram_table_like_a_dense_one(monkeypatch, place, signs) -> None:
    """The same comes of recipe A with the table's rows added to its bigram rows, or to a layer's value rows."""
    line = tg.NgramTable("trigram_embed", 3, TABLE_ROWS, signs=signs, layer=place)
    engine = make_engine(preset(tables=(line,), dtype="float64"))
    fill_randomly(engine.model)
    label, at = "value_embed", tg.LAYERS[GATED].value_embed
    gates = engine.model.ve_gate_bank.data
    if place is None:                                         # the weight in each layer that recipe A's bigrams have
        label, at = "bigram_embed", 0
        sizes = engine.model.scalar_sizes
        scalars = dict(zip(sizes, engine.model.scalars.data.split(list(sizes.values()))))
        scalars[line.label].copy_(scalars["bigram"])
    else:                                                     # the gates of that layer's value table
        gates[-1] = gates[at]
    table = engine.tables[line.label]
    weights = torch.randn(table.store.shard.rows.shape, generator=torch.Generator().manual_seed(1)).double()
    table.store.shard.rows.copy_(weights)
    found, batch = losses_and_gradients(engine)
    grad = torch.zeros_like(weights)
    rows = batch.plans[line.label].rows_to_fetch
    grad[rows] = table.row_grads[:len(rows)]

    plain = make_engine(preset(dtype="float64"))
    for name, p in plain.model.named_parameters():            # without what is appended for the table
        p.data.copy_(engine.model.get_parameter(name).detach()[:len(p)])
    weights.requires_grad_()
    lookup = tg.GPT.lookup

    def with_the_table(self, of_table, batch, row_buffers):
        read = lookup(self, of_table, batch, row_buffers)
        if of_table == label:
            read[at] = read[at] + dense_rows(batch.tokens.numpy(), weights, signs)
        return read
    monkeypatch.setattr(tg.GPT, "lookup", with_the_table)
    direct, _ = losses_and_gradients(plain)
    for x, want in zip([*found, grad], [*direct, weights.grad]):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)

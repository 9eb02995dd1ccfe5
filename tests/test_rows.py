"""Room 6: rows travel both ways, and every bit is that of a dense run on one rank.

What ranks do stands before the tests of it; they are forks (ranks.py) that meet over gloo. Gradients are small
integers, exact in every type and order, and depend on the sign of the row that was read: what is stale, lost or doubled
changes bits.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ROOT, exact_array, fabric, few_layers, grad_of, owned, plan_of, planner_of, set_grad
from pytest import MonkeyPatch
from ranks import COMM_TIMEOUT, Rank
from reference import cut, physical, put_together, row_lists
from torch import Tensor

import train_gpt as tg

MODES, TYPES = ("sparse", "dense"), ("float32", "bfloat16")
ELEMENT = dict(float32=4, bfloat16=2)    # bytes
SLOW = pytest.param(4, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, 3, SLOW, 8], ids="W{}".format)
modes = pytest.mark.parametrize("mode", MODES)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="no triton package: its body cannot be translated here")


# ---- Which rows are read, and gradients that depend on what was read -------------------------------------------------

SLOTS, WIDTH, STEPS = 8, 5, 2            # slots of a step, features, steps of a cycle
BETAS, EPS = (0.75, 0.95), 1e-10
ONE_OWNER = 24                           # its multiples are the first rank's at each number of ranks
PATTERNS: dict[str, Callable[..., Any]] = {          # rows of a table, cycle, step, slot, generator -> rows read
    "uniform": lambda R, cycle, step, slot, rng: rng.integers(0, R, 8),
    "skewed": lambda R, cycle, step, slot, rng: np.minimum(rng.pareto(0.7, 8), R - 1),
    "odd slots empty": lambda R, cycle, step, slot, rng: rng.integers(0, R, 8 * (slot % 2 == 0)),
    "one slot only": lambda R, cycle, step, slot, rng: rng.integers(0, R, 8 * (slot == 0)),
    "nothing at times": lambda R, cycle, step, slot, rng: rng.integers(0, R, 8 * (cycle % 2)),
    "nothing ever": lambda R, cycle, step, slot, rng: [],
    "alike on all": lambda R, cycle, step, slot, rng: (np.arange(5) * 7 + cycle) % R,
    "all rows": lambda R, cycle, step, slot, rng: rng.permutation(R),
    "one owner": lambda R, cycle, step, slot, rng: ONE_OWNER * rng.integers(0, -(-R // ONE_OWNER), 6),
    "first and last": lambda R, cycle, step, slot, rng: [0, R - 1, 0],
    "one row": lambda R, cycle, step, slot, rng: [min(3, R - 1)] * 4,
    "growing": lambda R, cycle, step, slot, rng: rng.integers(0, R, (0, 3, 12, 1, 9)[cycle] + step),
    "once": lambda R, cycle, step, slot, rng: rng.integers(0, R // 2, 8 * (cycle == 0)) + slot % 2,
}


@dataclass(frozen=True)
class Run:
    """Cycles on some tables at once: their patterns and rows."""
    tables: tuple[tuple[str, int], ...]
    mode: str
    dtype: str
    parts: int                           # calls of add_rows in a step
    cycles: int = 5
    zeros: bool = False                  # initial values
    debug: int = 0


def all_runs(world: int) -> list[Run]:
    """Each pattern with 1, 2 or 4 parts of a step. Up to two ranks in each mode and type, on tables of two sizes each;
    for more ranks, which cost more, in sparse mode with both types, in dense mode with one."""
    names, sizes, runs = [name for name in PATTERNS if name != "once"], (53, 48, 5, 1, 97, 2), []
    for turn, (mode, dtype) in enumerate((mode, dtype) for mode in MODES for dtype in TYPES):
        for group, shift in itertools.product(range(len(names) // 3), (0, 1)):
            one_size, one_type = (group + turn) % 2 == shift, TYPES[(turn // 2 + group) % 2] == dtype
            if world <= 2 or (one_size and (mode == "sparse" or one_type)):
                tables = tuple((name, sizes[(2 * k + group + 3 * shift) % len(sizes)])
                               for k, name in enumerate(names[3 * group:3 * group + 3]))
                runs.append(Run(tables, mode, dtype, (1, 2, 4)[(turn + group + shift) % 3]))
    return runs + [Run((("once", 40), ("once", 31)), mode, "float32", 1, cycles=12, zeros=True)
                   for mode in (MODES if world <= 2 else ("sparse",))]


def reads(pattern: str, rows: int, cycle: int, step: int, slot: int) -> np.ndarray:
    rng = np.random.default_rng([zlib.crc32(pattern.encode()), rows, cycle, step, slot])
    return np.asarray(PATTERNS[pattern](rows, cycle, step, slot, rng)).astype(np.int32)


def gradient(cycle: int, step: int, slot: int, read: np.ndarray) -> np.ndarray:
    """Of the lines of a slot, -2 to 2: a stale row has another one, and sums are exact in every type and order."""
    line, column = np.indices(read.shape)
    return (3 * line + 5 * step + 7 * slot + 11 * cycle + 2 * column) % 3 - 1 + np.sign(read)


def initial(rows: int, dtype: str, zeros: bool) -> Tensor:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return (torch.zeros_like(values) if zeros else values).to(getattr(torch, dtype))


def adam(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, cycle: int) -> None:
    """Large steps: signs of rows change."""
    step_size, decay = torch.tensor(0.3 / (cycle + 1), dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64)
    tg.adam_update(p, grad, m, v, 1 / SLOTS, BETAS, EPS, step_size, decay)


@functools.cache
def dense_run(pattern: str, rows: int, dtype: str, cycles: int, zeros: bool) -> tuple[list[np.ndarray], ...]:
    """One rank, whole tables. Returns the table before each cycle and after the last, and m and v."""
    table, m, v = initial(rows, dtype, zeros), torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)
    tables = [exact_array(table)]
    for cycle in range(cycles):
        grad, most = np.zeros((rows, WIDTH), np.float32), np.zeros((rows, WIDTH))
        for step, slot in itertools.product(range(STEPS), range(SLOTS)):
            read = reads(pattern, rows, cycle, step, slot)
            lines = gradient(cycle, step, slot, tables[-1][read])
            np.add.at(grad, read, lines)
            np.add.at(most, read, np.abs(lines))
        assert most.max() <= 256, "bf16 would round"
        adam(table, torch.from_numpy(grad), m, v, cycle)
        tables.append(exact_array(table))
    return tables, m.numpy(), v.numpy()


# ---- The exchange alone ----------------------------------------------------------------------------------------------

@contextlib.contextmanager
def bytes_seen(rank: int) -> Iterator[dict[str, int]]:
    """What goes into and comes out of exchanges of lists, without what a rank sends to itself."""
    seen, call = dict(sent=0, received=0), dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], **kwargs: Any) -> Any:
        for key, tensor, splits in (("sent", x, in_splits), ("received", out, out_splits)):
            if sum(splits):
                assert tensor.nbytes % sum(splits) == 0, (tensor.shape, splits)
                seen[key] += tensor.nbytes // sum(splits) * (sum(splits) - splits[rank])
        return call(out, x, out_splits, in_splits, **kwargs)

    with MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        yield seen


class After:
    """A handle whose wait does something more."""
    def __init__(self, work: Any, then: Callable[[], object]) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()


@contextlib.contextmanager
def fault(name: str, fabric: tg.Fabric, tables: dict[str, tg.RowTable]) -> Iterator[None]:
    """Something that a right comparison notices (and "overwritten after", which must change nothing)."""
    call, fetch, plan_rows = dist.all_to_all_single, tg.RowTable.fetch, tg.Planner.plan
    with MonkeyPatch.context() as patch:
        def no_fetch(self, plan, head):
            if plan.tag["cycle"] == 0:
                fetch(self, plan, head)
            self.cached = plan

        def all_to_all(out, x, *splits, **kwargs):
            rows = x.is_floating_point()                                      # not the lists of a plan
            if name == "overwritten before" and rows:
                x.fill_(torch.nan)
            work = call(out, x, *splits, **kwargs)
            if name == "overwritten after" and rows:
                return After(work, lambda: x.fill_(torch.nan))
            returned = rows and any(table.row_grads.data_ptr() == x.data_ptr() for table in tables.values())
            if name == "list dropped" and returned and fabric.rank == fabric.world - 1:
                return After(work, lambda: out[:splits[0][0]].zero_())
            return work

        def row_missing(self, *args):
            plan = plan_rows(self, *args)
            if len(plan.my_rows):
                plan.send_counts[int(plan.my_rows[-1]) // plan.shard_size] -= 1
                plan.my_rows = plan.my_rows[:-1]
            return plan

        if name == "fetch left out":
            patch.setattr(tg.RowTable, "fetch", no_fetch)
        if name == "row missing":
            patch.setattr(tg.Planner, "plan", row_missing)
        patch.setattr(dist, "all_to_all_single", all_to_all)
        yield


def row_table(fabric: tg.Fabric, cfg: tg.Config, rows: int = 20, width: int = WIDTH, most: int = 40) -> tg.RowTable:
    """A dense-Adam table of its own, with random rows."""
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    return tg.RowTable(tg.Table("bigram_embed", rows, 1, None), cfg, fabric, torch.nn.Parameter(owned(values, fabric)),
                       most, tg.no_wait)


def tiny(**changes: Any) -> tg.Config:
    return tg.Config(**tg.PRESETS["tiny"] | changes)


def drive(fabric: tg.Fabric, run: Run, broken: str = "") -> list[dict[str, Any]]:
    """The exchange alone. Returns for each table what this rank saw and holds."""
    W, me, labels = fabric.world, fabric.rank, [f"table {k}" for k in range(len(run.tables))]
    cfg = tiny(row_comms=run.mode, dtype=run.dtype, debug_rows=run.debug)
    slots = range(me, SLOTS, W)
    mine = {label: [[[reads(*pattern, cycle, step, slot) for slot in slots] for step in range(STEPS)]
                    for cycle in range(run.cycles)] for label, pattern in zip(labels, run.tables)}
    specs = tuple(tg.Table(label, rows, 1, None) for label, (_, rows) in zip(labels, run.tables))
    tables, moments, accounts = {}, {}, []
    for spec in specs:
        p = owned(initial(spec.rows, run.dtype, run.zeros), fabric)
        most = max(sum(len(x) for step in steps for x in step) for steps in mine[spec.label])
        tables[spec.label] = tg.RowTable(spec, cfg, fabric, torch.nn.Parameter(p), most,
                                         lambda **line: accounts.append(line))
        moments[spec.label] = [torch.zeros(p.shape) for _ in "mv"]
    found = [dict(cycles=[]) for _ in labels]
    planner = planner_of(cfg, fabric, *specs)
    with bytes_seen(me) as seen, fault(broken, fabric, tables):
        def made(cycle: int) -> tuple[dict[str, tg.TablePlan], dict[str, list[np.ndarray]]]:
            plans, index = {}, {}
            for spec in specs:
                lines = [np.concatenate(step)[None] for step in mine[spec.label][cycle]]
                plan, places = plan_of(planner, spec, lines, purpose="train", cycle=cycle, tokens=SLOTS)
                plans[spec.label], index[spec.label] = plan, [x[0] for x in places]
            if W > 1:
                tg.exchange_plans(fabric, fabric.plan_group, run.dtype, plans)
            return plans, index

        ahead = made(0)
        for cycle in range(run.cycles):
            (plans, index), ahead = ahead, made(cycle + 1) if cycle + 1 < run.cycles else None
            for k, label in enumerate(labels):
                plan = plans[label]
                cache, row_grads = tables[label].rows_for_forward(plan, None)
                places = plan.my_rows if tables[label].alone else slice(len(plan.my_rows))
                what = dict(my_rows=plan.my_rows.numpy(), send_counts=plan.send_counts, recv_counts=plan.recv_counts,
                            requested_rows=plan.requested_rows.numpy(), index=index[label], read=[],
                            fetched=exact_array(cache[places]))
                if run.debug and not tables[label].alone:
                    what["poisoned"] = bool(cache[len(plan.my_rows):].isnan().all())
                for step in range(STEPS):
                    places = torch.from_numpy(index[label][step])
                    read = exact_array(F.embedding(places, cache))
                    borders = np.cumsum([0] + [len(x) for x in mine[label][cycle][step]])
                    lines = [gradient(cycle, step, slot, read[a:b])
                             for slot, a, b in zip(slots, borders, borders[1:])]
                    grad = torch.from_numpy(np.concatenate(lines)).to(getattr(torch, run.dtype))
                    for at, part in zip(places.tensor_split(run.parts), grad.tensor_split(run.parts)):
                        tg.add_rows(row_grads, at, part)
                    what["read"].append(read)
                found[k]["cycles"].append(what)
            returned = [tables[label].return_gradients() for label in labels]
            for label, (grad, wait) in reversed(list(zip(labels, returned))):
                wait()
                table, early = tables[label], broken == "fetched early" and ahead
                if early:
                    table.fetch(ahead[0][label], None)
                adam(table.shard, grad, *moments[label], cycle)
                table.clear()
                if early:
                    table.cached = ahead[0][label]
                elif ahead:
                    table.fetch(ahead[0][label], None)
    for label, what in zip(labels, found):
        what.update(shard=exact_array(tables[label].shard), m=moments[label][0].numpy(), v=moments[label][1].numpy(),
                    accounts=[x for x in accounts if x["table"] == label], seen=seen)
    return found


def exchange(rank: Rank) -> list:
    fabric = rank.fabric()
    return [drive(fabric, run) for run in all_runs(rank.world)]


def rows_of(rank: int, world: int, run: Run, table: int, cycle: int) -> list[np.ndarray]:
    """Logical rows that a rank reads in each step."""
    return [np.concatenate([reads(*run.tables[table], cycle, step, slot) for slot in range(rank, SLOTS, world)])
            for step in range(STEPS)]


def differences(found: list[dict], rank: int, world: int, run: Run) -> list[str]:
    """What a rank saw and holds and should not, table by table."""
    wrong = []
    for k, ((pattern, rows), got) in enumerate(zip(run.tables, found)):
        tables, m, v = dense_run(pattern, rows, run.dtype, run.cycles, run.zeros)

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.dtype != want.dtype or not np.array_equal(x, want):
                wrong.append(f"{pattern} of {rows}: {name}")

        for cycle, (seen, before) in enumerate(zip(got["cycles"], tables)):
            physical = np.concatenate(cut(before, world))      # with zeros where there is no row
            compare(f"rows fetched in cycle {cycle}", seen["fetched"], physical[seen["my_rows"]])
            for step, read in enumerate(rows_of(rank, world, run, k, cycle)):
                compare(f"rows read in cycle {cycle}", seen["read"][step], before[read])
        for name, want in (("shard", tables[-1]), ("m", m), ("v", v)):
            compare(name, got[name], cut(want, world)[rank])
    return wrong


@worlds
def test_RowTable__rows_are_those_of_a_dense_run(ranks, world):
    found = ranks(world, exchange)
    for number, run in enumerate(all_runs(world)):
        for rank in range(world):
            assert differences(found[rank][number], rank, world, run) == [], f"{run} on rank {rank}"


def reference_plan(run: Run, table: int, cycle: int, world: int) -> tuple[list, list, list]:
    """By rank: its list, how many rows of each owner are in it, what each reader requests of it. Dense: all rows."""
    _, rows = run.tables[table]
    read = [np.concatenate(rows_of(rank, world, run, table, cycle)) for rank in range(world)]
    lists, pieces = row_lists(read, rows)
    if run.mode == "dense" and world > 1:
        size = -(-rows // world)
        lists = [list(range(world * size))] * world
        pieces = [[list(range(size))] * world] * world
    return lists, [list(map(len, of_rank)) for of_rank in pieces], [list(x) for x in zip(*pieces)]


@worlds
def test_Planner__lists_are_those_of_a_slow_search(ranks, world):
    """Lists, counts, where a read is found, and what owners learn."""
    found = ranks(world, exchange)
    for number, run in enumerate(all_runs(world)):
        for (k, (_, rows)), cycle in itertools.product(enumerate(run.tables), range(run.cycles)):
            lists, counts, requests = reference_plan(run, k, cycle, world)
            for rank in range(world):
                seen = found[rank][number][k]["cycles"][cycle]
                assert seen["my_rows"].tolist() == lists[rank] and seen["my_rows"].dtype == np.int64
                assert seen["send_counts"] == counts[rank]
                assert seen["requested_rows"].tolist() == list(itertools.chain(*requests[rank]))
                assert seen["recv_counts"] == list(map(len, requests[rank]))
                index = np.concatenate(seen["index"])
                places = seen["my_rows"][index] if world > 1 else index
                read = np.concatenate(rows_of(rank, world, run, k, cycle)).tolist()
                assert places.tolist() == [physical(row, world, rows) for row in read]


@worlds
def test_RowTable__accounts_are_what_collectives_were_given(ranks, world):
    """Accounts of tables and cycles against the formulas of the exchange, and against what collectives were given."""
    found = ranks(world, exchange)
    for number, run in enumerate(all_runs(world)):
        for rank in range(world):
            row_bytes, sums = ELEMENT[run.dtype] * WIDTH, dict(bytes_sent=0, bytes_received=0)
            for k, (_, rows) in enumerate(run.tables):
                accounts, size = found[rank][number][k]["accounts"], -(-rows // world)
                assert len(accounts) == run.cycles
                for cycle, (account, seen) in enumerate(zip(accounts, found[rank][number][k]["cycles"])):
                    requested, asked = (sum(seen[name]) - seen[name][rank] for name in ("send_counts", "recv_counts"))
                    # The list goes out, its rows come in, their gradients go out; and the same for the others' lists.
                    sent = (4 + row_bytes) * requested + row_bytes * asked
                    received = (4 + row_bytes) * asked + row_bytes * requested
                    assert account.pop("plan_ms") >= 0
                    assert account == dict(
                        purpose="train", cycle=cycle, tokens=SLOTS, table=f"table {k}", mode=run.mode,
                        rows=len(seen["my_rows"]), reads=sum(map(len, seen["index"])), bytes_sent=sent,
                        bytes_received=received, bytes_dense=2 * (world - 1) * size * row_bytes)
                    sums = {key: sums[key] + account[key] for key in sums}
            assert found[rank][number][0]["seen"] == dict(sent=sums["bytes_sent"], received=sums["bytes_received"])


@worlds
def test_RowTable__untouched_rows_go_on_as_dense_ones(ranks, world):
    """Rows read once move on without gradients, exactly as dense; rows never read stay 0, to the bit."""
    runs = all_runs(world)
    for number, run in enumerate(runs):
        if run.zeros:
            for rank, found in enumerate(ranks(world, exchange)):
                assert differences(found[number], rank, world, run) == []
            for k, (pattern, rows) in enumerate(run.tables):
                tables, _, _ = dense_run(pattern, rows, run.dtype, run.cycles, True)
                shards = [found[number][k]["shard"] for found in ranks(world, exchange)]
                got = put_together(shards, rows)
                touched = np.zeros(rows, bool)
                for rank in range(world):
                    touched[np.concatenate(rows_of(rank, world, run, k, 0))] = True
                    assert not any(map(len, rows_of(rank, world, run, k, 1)))
                assert 0 < touched.sum() < rows and not got[~touched].tobytes().strip(b"\0")
                assert all((tables[cycle + 1] != tables[cycle])[touched].any() for cycle in range(run.cycles))
    assert any(run.zeros for run in runs)


FAULTY = Run((("uniform", 53), ("skewed", 48), ("all rows", 7)), "sparse", "float32", 2)
FAULTS = ("fetch left out", "fetched early", "list dropped", "row missing", "overwritten after", "overwritten before")


def faults(rank: Rank) -> dict:
    fabric = rank.fabric()
    found = {name: drive(fabric, FAULTY, name) for name in ("", *FAULTS)}
    try:
        drive(fabric, replace(FAULTY, debug=1), "row missing")
    except tg.RunError as error:
        found["row missing, debug"] = str(error)
    return found


@pytest.mark.parametrize("world", (2, SLOW), ids="W{}".format)
@pytest.mark.parametrize("name", ("fetch left out", "fetched early", "list dropped", "row missing"))
def test_RowTable__stale_rows_are_noticed(ranks, world, name):
    """Controls: the comparison must fail, and for what is stale in the first cycle in which anything can be."""
    by_rank = ranks(world, faults)
    assert [differences(found[""], rank, world, FAULTY) for rank, found in enumerate(by_rank)] == [[]] * world
    wrong = [text for rank, found in enumerate(by_rank) for text in differences(found[name], rank, world, FAULTY)]
    assert wrong
    if name in ("fetch left out", "fetched early"):
        assert any("rows fetched in cycle 1" in text for text in wrong)
        assert any("rows read in cycle 1" in text for text in wrong)
        assert not any("cycle 0" in text for text in wrong)
    if name == "row missing":
        assert all("in rows of no plan" in found["row missing, debug"] for found in by_rank)


@pytest.mark.parametrize("world", (2, SLOW), ids="W{}".format)
def test_RowTable__buffers_are_read_until_they_were_waited_for(ranks, world):
    """NaN in every buffer of rows as soon as it was waited for changes nothing; a moment earlier it would."""
    for rank, found in enumerate(ranks(world, faults)):
        assert differences(found["overwritten after"], rank, world, FAULTY) == []
        assert differences(found["overwritten before"], rank, world, FAULTY) != []


# ---- One table -------------------------------------------------------------------------------------------------------

def hand_made(table: tg.RowTable, rows: Sequence[int], cycle: int = 0) -> tg.TablePlan:
    """A plan of this rank for these rows, exchanged."""
    fabric = table.fabric
    planner = planner_of(tiny(row_comms=table.mode), fabric, table.table)
    plan, _ = plan_of(planner, table.table, [np.asarray([rows], np.int32)], cycle=cycle)
    if fabric.world > 1:
        tg.exchange_plans(fabric, fabric.plan_group, "float32", {table.table.label: plan})
    return plan


def add_at(table: tg.RowTable, plan: tg.TablePlan, row_grads: Tensor, rows: Sequence[int], grad: Tensor) -> None:
    """Add lines of a gradient to logical rows of a plan."""
    W, rows = table.fabric.world, torch.as_tensor(rows)
    physical = rows % W * plan.shard_size + rows // W
    places = physical if table.alone else torch.searchsorted(plan.my_rows, physical)
    tg.add_rows(row_grads, places.int(), grad)


def debug(rank: Rank) -> dict:
    """A sound run under --debug_rows, and what a gradient outside of the plan says."""
    fabric, found = rank.fabric(), {}
    for mode in MODES:
        found[mode] = drive(fabric, replace(FAULTY, mode=mode, debug=1))
        table = row_table(fabric, tiny(row_comms=mode, debug_rows=1))
        _, row_grads = table.rows_for_forward(hand_made(table, [3, 3, 7]), None)
        row_grads[-1] += 1
        try:
            table.return_gradients()[1]()
            table.clear()
        except tg.RunError as error:
            found[f"{mode}, outside"] = str(error)
    return found


@pytest.mark.parametrize("world", (1, 2, 3), ids="W{}".format)
@modes
def test_debug_rows__poison_and_rows_of_no_plan(ranks, world, mode):
    """A sound run passes; rows that were not fetched are NaN; a gradient of a row outside of the plan ends the run."""
    run = replace(FAULTY, mode=mode, debug=1)
    for rank, found in enumerate(ranks(world, debug)):
        assert differences(found[mode], rank, world, run) == []
        poisoned = [seen["poisoned"] for table in found[mode] for seen in table["cycles"] if "poisoned" in seen]
        assert len(poisoned) == (world > 1) * len(run.tables) * run.cycles and all(poisoned)
        if mode == "sparse" or world == 1:                                    # else a plan has every row
            assert "in rows of no plan" in found[f"{mode}, outside"]


def two_cycles(rank: Rank) -> dict:
    """Batches of two cycles before one update: what is returned in the end, or what is said."""
    fabric, found = rank.fabric(), {}
    for mode in MODES:
        table = row_table(fabric, tiny(row_comms=mode))
        plans = [hand_made(table, [row, row + 1], cycle=row) for row in (3, 9)]
        try:
            for plan, row in zip(plans, (3, 9)):
                _, row_grads = table.rows_for_forward(plan, None)
                add_at(table, plan, row_grads, [row, row + 1], torch.ones(2, WIDTH))
            grad, wait = table.return_gradients()
            wait()
            found[mode] = float(grad.sum())
        except tg.RunError as error:
            found[mode] = str(error)
    return found


@pytest.mark.parametrize("world", (1, 2), ids="W{}".format)
@modes
def test_rows_for_forward__batches_of_two_cycles(ranks, world, mode):
    """Their gradients add up on one rank; on several it is said that they do not. Nothing is lost in silence."""
    for found in ranks(world, two_cycles):
        assert found[mode] == 4 * WIDTH if world == 1 else "gradients of bigram_embed" in found[mode]


def refetch(rank: Rank) -> dict:
    """Rows of one plan are cached, or on their way, when those of another are asked for: are they the right ones?"""
    fabric, found = rank.fabric(), {}
    for mode in MODES:
        table = row_table(fabric, tiny(row_comms=mode), 4000, most=4000)
        first, second = (hand_made(table, span, cycle=len(span)) for span in (range(3000), range(3500, 3600)))

        def is_right(cache: Tensor, plan: tg.TablePlan) -> bool:
            read = cache[plan.my_rows if table.alone else slice(len(plan.my_rows))]
            every = torch.stack(fabric.gather(table.shard))                   # (owner, place)
            physical = plan.my_rows
            return bool(read.equal(every[physical // plan.shard_size, physical % plan.shard_size]))

        for before in ("cached", "on their way"):
            table.reset()
            table.fetch(first, None)
            if before == "cached":
                table.rows_for_forward(first, None)
                table.pending.clear()
            cache, _ = table.rows_for_forward(second, None)
            time.sleep(0.02)                                                  # what comes late would come now
            found[mode, before] = is_right(cache, second)

        table.return_gradients()[1]()
        table.clear()
        with torch.no_grad():
            table.shard.add_(1)
        found[mode, "updated"] = is_right(table.rows_for_forward(second, None)[0], second)
    return found


@pytest.mark.parametrize("world", (1, 2, SLOW), ids="W{}".format)
@modes
def test_rows_for_forward__another_plan_than_the_one_fetched_ahead(ranks, world, mode):
    """The cache is of the plan that is asked for, and no rows that come late are among them."""
    for found in ranks(world, refetch):
        assert found[mode, "cached"] and found[mode, "on their way"]


@pytest.mark.parametrize("world", (1, 2, SLOW), ids="W{}".format)
@modes
def test_clear__the_same_plan_again_after_an_update(ranks, world, mode):
    """Its rows are fetched again: those in the cache are the ones before the update."""
    assert all(found[mode, "updated"] for found in ranks(world, refetch))


def reset(rank: Rank) -> dict:
    """Gradients after a reset in the middle of a cycle, with rows on their way, and from the start."""
    fabric, found = rank.fabric(), {}
    for mode, disturbed in itertools.product(MODES, (True, False)):
        table = row_table(fabric, tiny(row_comms=mode))
        buffers = [x.data_ptr() for x in (table.shard, table.cache, table.row_grads, table.grad)]
        if disturbed:
            plan = hand_made(table, [3, 4, 5])
            _, row_grads = table.rows_for_forward(plan, None)
            add_at(table, plan, row_grads, [3, 4], torch.ones(2, WIDTH))
            table.return_gradients()[1]()
            table.fetch(hand_made(table, [8, 9], cycle=1), None)
            table.reset()
        plan = hand_made(table, [7, 12], cycle=2)
        cache, row_grads = table.rows_for_forward(plan, None)
        read = cache[plan.my_rows if table.alone else slice(len(plan.my_rows))].detach()
        add_at(table, plan, row_grads, [7, 12], read[-2:])
        grad, wait = table.return_gradients()
        wait()
        found[mode, disturbed] = grad.numpy().copy()
        assert buffers == [x.data_ptr() for x in (table.shard, table.cache, table.row_grads, table.grad)], "moved"
    return found


@pytest.mark.parametrize("world", (1, 2), ids="W{}".format)
@modes
def test_reset__in_the_middle_of_a_cycle(ranks, world, mode):
    for found in ranks(world, reset):
        assert found[mode, True].any() and found[mode, True].tobytes() == found[mode, False].tobytes()


def addends(rank: int) -> Tensor:
    """Numbers of which no two orders have the same sum in f32."""
    scale = torch.tensor([1e-4, 1.0, 1e3])[rank % 3]
    return scale * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(rank))


def rank_order(rank: Rank) -> np.ndarray:
    """Gradients of all ranks for all rows, by shard."""
    table = row_table(rank.fabric(), tiny())
    plan = hand_made(table, range(20))
    _, row_grads = table.rows_for_forward(plan, None)
    add_at(table, plan, row_grads, range(20), addends(rank.rank))
    grad, wait = table.return_gradients()
    wait()
    return grad.numpy().copy()


@pytest.mark.parametrize("world", (3, SLOW), ids="W{}".format)
def test_return_gradients__added_in_the_order_of_ranks(ranks, world):
    """Numbers whose sum depends on the order: rank 0 first, the owner's own at its place."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [addends(rank).numpy() for rank in ranks])

    got = put_together(ranks(world, rank_order), 20)
    np.testing.assert_array_equal(got, total(range(world)))
    assert not np.array_equal(got, total(range(world)[::-1])), "this test cannot tell"


# ---- Plans that ranks disagree about, lists that are wrong -----------------------------------------------------------

def every_second_row(fabric: tg.Fabric, labels: tuple[str, ...], **tag: Any) -> dict[str, tg.TablePlan]:
    """Plans of this rank for every second row of each owner's shard."""
    specs = [tg.Table(label, 60, 1, None) for label in labels]
    rows = np.flatnonzero(np.arange(60) // fabric.world % 2 == 0).astype(np.int32)[None]
    planner = planner_of(tg.Config(), fabric, *specs)
    tag = dict(purpose="train", cycle=3, tokens=64) | tag
    return {spec.label: plan_of(planner, spec, [rows], **tag)[0] for spec in specs}


def error_of(*calls: Callable[[], object]) -> str | None:
    try:
        for call in calls:
            call()
    except tg.RunError as error:
        return str(error)


def swapped(rank: Rank) -> dict:
    """Two exchanges of the same sizes, in another order on the last rank."""
    fabric, found = rank.fabric(), {}

    def send(dtype: str = "float32", labels: tuple[str, ...] = ("one", "two"), **tag: Any) -> Callable[[], None]:
        plans = every_second_row(fabric, labels, **tag)
        return functools.partial(tg.exchange_plans, fabric, fabric.plan_group, dtype, plans)

    pairs = dict(cycle=[send(), send(cycle=4)], purpose=[send(), send(purpose="validation")],
                 tokens=[send(), send(tokens=65)], dtype=[send(), send("bfloat16")],
                 table=[send(), send(labels=("two", "one"))])
    for name, pair in pairs.items():
        found[name] = error_of(*(pair[::-1] if rank.rank == rank.world - 1 else pair))
    return found | dict(same=error_of(send(), send(cycle=4)))


@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", ("cycle", "purpose", "tokens", "dtype", "table"))
def test_exchange_plans__ranks_swap_two_exchanges(ranks, world, name):
    """Of the same sizes, the other way round on the last rank: every rank says so, with both values."""
    for rank, found in enumerate(ranks(world, swapped)):
        assert found["same"] is None
        assert re.search(rf"row plans of ranks {world - 1 if rank < world - 1 else 0} and {rank}\n", found[name])
        values = [re.search(rf"  {line}: .*?'{name}': ([^,}}]+)", found[name])[1] for line in ("found", "expected")]
        assert values[0] != values[1]


BAD = {                                  # what becomes of the places that rank 0 requests of the last rank
    "sound": lambda x, size: x, "too large": lambda x, size: [*x[:-1], size], "negative": lambda x, size: [-1, *x[1:]],
    "unsorted": lambda x, size: [x[1], x[0], *x[2:]], "duplicate": lambda x, size: [x[0], x[0], *x[2:]]}


def bad_ids(rank: Rank) -> dict:
    fabric, found, call = rank.fabric(), {}, dist.all_to_all_single
    for name, change in BAD.items():
        plans = every_second_row(fabric, ("table",))
        plan, target = plans["table"], rank.world - 1
        first = sum(plan.send_counts[:target])
        places = (plan.my_rows % plan.shard_size)[first:].tolist()
        bad = change(places, plan.shard_size)

        def corrupt(out, x, *splits, **kwargs):
            assert x[first:].tolist() == places, "another message than this case knows"
            x[first:] = torch.tensor(bad, dtype=torch.int32)
            return call(out, x, *splits, **kwargs)

        with MonkeyPatch.context() as patch:
            if rank.rank == 0:
                patch.setattr(dist, "all_to_all_single", corrupt)
            found[name] = error_of(lambda: tg.exchange_plans(fabric, fabric.plan_group, "float32", plans))
    return found


@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", list(BAD))
def test_exchange_plans__a_list_that_no_plan_can_hold(ranks, world, name):
    *others, last = [found[name] for found in ranks(world, bad_ids)]
    assert others == [None] * (world - 1)
    assert last is None if name == "sound" else "rows of table that rank 0 requests" in last


def test_plan__no_rows_at_all():
    table = tg.Table("a", 20, 1, None)
    for world in (1, 2):
        plan, (index,) = plan_of(planner_of(tg.Config(), fabric(0, world), table), table, [np.zeros((0, 4), np.int32)])
        assert (len(plan.my_rows), plan.send_counts, index.shape) == (0, [0] * world, (0, 4))


# ---- Executors of a small model --------------------------------------------------------------------------------------

MODEL_SLOTS, SPLIT_STEP, MODEL_STEPS = 24, 3, 8
ROW_LABELS = ("embed", "lm_head", "bigram_embed", "value_embed")


def small_config(**changes: Any) -> tg.Config:
    """Tables of 513 and 1026 rows and of 61: nothing that a number of ranks divides. 16 or 32 tokens a slot."""
    batches = [tokens * MODEL_SLOTS for tokens in (16, 16, 32, 32)]
    stages = tuple(stage._replace(batch_tokens=tokens) for stage, tokens in zip(tg.STAGES, batches))
    fields = dict(num_slots=MODEL_SLOTS, stages=stages, val_batch_tokens=16 * MODEL_SLOTS, val_tokens=32 * MODEL_SLOTS,
                  dtype="float64", num_heads=2, head_dim=8, model_dim=16, padded_vocab=513, bigram_rows=61,
                  num_scheduled_steps=3, num_extension_steps=MODEL_STEPS - 3, device="cpu", comm_timeout=COMM_TIMEOUT)
    cfg = tg.Config(**tg.PRESETS["tiny"] | fields | changes)
    headers = tg.find_shards(cfg.train_files)
    return tg.resolve(cfg, headers, headers)


@contextlib.contextmanager
def small_run(fabric: tg.Fabric, cfg: tg.Config, steps: int = MODEL_STEPS
              ) -> Iterator[tuple[tg.Executor, tg.Loader, list[tg.Values]]]:
    """An executor with weights that leave no term at zero, and a started loader."""
    with few_layers():
        executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
        plan = [tg.Schedule(cfg).at(step) for step in range(steps)]
        for label, p in executor.model.named_parameters():
            rows = {table.label: table.rows for table in executor.planner.tables}.get(label, len(p))
            generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
            values = torch.randn(rows, *p.shape[1:], generator=generator)
            mine = owned(values, fabric) if label in executor.tables else values
            p.data.add_(0.2 * mine.to(p.dtype))
        if fabric.world == 1:
            executor.model.embed.data.copy_(executor.model.lm_head.t())
        cycles = [plan[first:first + 2] for first in range(0, steps, 2)]
        loader = tg.Loader(cfg, fabric, tg.find_shards(cfg.train_files), cycles, executor.exchange_ahead)
        loader.start()
        try:
            yield executor, loader, plan
        finally:
            loader.close()


def everything(executor: tg.Executor, step: int, labels: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Weights before a step in logical order on rank 0, moments as they lie."""
    weights = executor.whole_weights(tg.Schedule(executor.cfg).at(step))
    found = {label: exact_array(weights[label]) for label in labels if weights[label] is not None}
    return found | {f"{label}.{name}": exact_array(executor.optimizer.state[label][name])
                    for label in labels for name in "mv"}


def split(rank: Rank) -> dict:
    """Eight steps by hand, with integers for gradients: right after the split, and four steps later."""
    fabric, found = rank.fabric(small_config()), {}
    for mode in MODES:
        cfg = small_config(row_comms=mode, dtype="float32")
        with small_run(fabric, cfg) as (executor, loader, plan):
            assert [values.step for values in plan if values.untie] == [SPLIT_STEP]
            slots = range(rank.rank, MODEL_SLOTS, rank.world)
            for values in plan:
                batch = loader.next(values)
                for label, table in executor.tables.items():
                    cache, row_grads = table.rows_for_forward(batch.plans[label], executor.model.lm_head)
                    index = batch.rows[label].reshape(len(slots), -1)
                    lines = [gradient(0, values.step, slot, exact_array(cache[at.long()]))
                             for slot, at in zip(slots, index)]
                    tg.add_rows(row_grads, index, torch.from_numpy(np.stack(lines)).float())
                for label, p in executor.model.named_parameters():
                    if label not in executor.tables:
                        generator = torch.Generator().manual_seed(zlib.crc32(f"{values.step}/{label}".encode()))
                        whole = torch.randint(-2, 3, (MODEL_SLOTS, *p.shape), generator=generator)
                        mine = whole[rank.rank::rank.world].sum(dim=0).to(p.dtype)
                        so_far = grad_of(executor.optimizer, label)
                        set_grad(executor.optimizer, label, mine if so_far is None else so_far + mine)
                executor.optim_step(values, loader.plans_ahead)
                if values.step in (SPLIT_STEP, MODEL_STEPS - 1):
                    found[mode, values.step] = everything(executor, values.step + 1, ROW_LABELS)
    return found


@pytest.mark.parametrize("world", (1, 2, 3, SLOW), ids="W{}".format)
@modes
def test_untie__moments_of_the_head_become_those_of_rows(ranks, world, mode):
    """Moments of the head become moments of rows; before, at and after the split all bits are those of one rank."""
    alone, = ranks(1, split)
    by_rank = ranks(world, split)
    for step in (SPLIT_STEP, MODEL_STEPS - 1):
        want, got = alone[mode, step], [found[mode, step] for found in by_rank]
        for label in ROW_LABELS:
            np.testing.assert_array_equal(got[0][label], want[label], f"{label} after step {step}")
            for name in "mv":
                parts = [x[f"{label}.{name}"] for x in got]
                whole = (np.concatenate(parts) if label == "lm_head" else
                         put_together(parts, len(want[label])))
                np.testing.assert_array_equal(whole, want[f"{label}.{name}"], f"{label}.{name} after step {step}")
    same, later = alone[mode, SPLIT_STEP], alone[mode, MODEL_STEPS - 1]
    for ending in ("", ".m", ".v"):
        np.testing.assert_array_equal(same[f"embed{ending}"], same[f"lm_head{ending}"].T)
        assert same[f"embed{ending}"].any() and not np.array_equal(later[f"embed{ending}"], later[f"lm_head{ending}"].T)


def evaluation(rank: Rank) -> dict:
    """Real steps with evaluations and a next token at starts and in middles of cycles, and without."""
    fabric, found = rank.fabric(small_config()), {}
    for mode in MODES if rank.world <= 2 else MODES[:1]:
        for looks in ((), (0, 2, 3, 6)):
            cfg, seen = small_config(row_comms=mode, debug_rows=1), []
            with small_run(fabric, cfg) as (executor, loader, plan):
                validation = tg.ValidationSet(cfg, fabric, tg.find_shards(cfg.val_files), executor.exchange)
                for values in plan:
                    batch = loader.next(values)
                    if values.step in looks:
                        seen.append(executor.evaluate(validation.batches(values), values))
                        seen.append(float(executor.next_logits([511, 3, 9, 3], values).sum()))
                    executor.forward_backward(batch, values)
                    executor.optim_step(values, loader.plans_ahead)
                found[mode, len(looks)] = everything(executor, MODEL_STEPS, ROW_LABELS) | dict(
                    seen=seen, traffic=executor.traffic())
    return found


@pytest.mark.parametrize("world, mode", [*itertools.product((1, 2), MODES),
                                         pytest.param(4, "sparse", marks=pytest.mark.all)])
def test_evaluate__between_cycles(ranks, world, mode):
    """Looks at starts and in middles of cycles change no bit, and see what one rank sees."""
    alone, = ranks(1, evaluation)
    for found in ranks(world, evaluation):
        without, looked = found[mode, 0], found[mode, 4]
        assert without.keys() == looked.keys()
        for key in without.keys() - {"seen", "traffic"}:
            assert without[key].tobytes() == looked[key].tobytes(), key
        assert without["traffic"] == looked["traffic"]
        assert len(looked["seen"]) == 8
        np.testing.assert_allclose(looked["seen"], alone["dense", 4]["seen"], rtol=1e-10)
        for label in ROW_LABELS:
            if label in looked:
                np.testing.assert_allclose(looked[label], alone["dense", 4][label], rtol=1e-8, atol=1e-10)


# ---- add_rows --------------------------------------------------------------------------------------------------------

LINES = 4                                # less than a row has: its lines cross blocks


def test_add_rows__beyond_2_to_31():
    """On a buffer of which the system keeps the pages that were written, and no more."""
    rows = 2**31 // 24 + 3
    sums, touched = torch.empty(rows, 24), torch.tensor([0, rows - 2, rows - 1])
    assert sums.numel() > 2**31
    sums[touched] = 1.0
    tg.add_rows(sums, touched[[2, 0, 1, 2, 2]].int(), torch.arange(5.0)[:, None].expand(5, 24))
    assert sums[touched].unique(dim=1).flatten().tolist() == [2.0, 3.0, 8.0]


def lines_of_rows(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """sums (13, D), index with 11 lines of one row and the first and the last row, small integers as gradients."""
    generator = torch.Generator().manual_seed(width)
    index = torch.tensor([12, 3, 3, 0, 3, 7, 3, 3, 12, 3, 3, 3, 3, 0, 3, 3, 9], dtype=torch.int32)
    sums, grad = (torch.randint(-8, 9, (count, width), generator=generator).float() for count in (13, len(index)))
    sums[5] = torch.nan                                                       # of a row that no line is for
    return sums, index, grad


def launch(sums: Tensor, index: Tensor, grad: Tensor) -> None:
    rows, order = index.sort(stable=True)
    tg.jitted(tg.add_rows_kernel)[(len(index),)](sums, rows, order, grad, len(index), grad.shape[1], LINES=LINES,
                                                 WIDTH=1 << (grad.shape[1] - 1).bit_length())


def interpret() -> dict:
    """With TRITON_INTERPRET=1 before triton is imported.

    small: what is wrong, by width; large: rows behind 2^31 elements.
    """
    found = dict(small={}, bf16={})
    for width in (1, 5, 16, 24):
        sums, index, grad = lines_of_rows(width)
        for key, x in (("small", grad), ("bf16", grad.bfloat16())):
            want = sums.double().index_add(0, index.long(), x.double())
            launch(got := sums.clone(), index, x)
            found[key][width] = float(got.sub(want)[~want.isnan()].abs().max()), int(got.isnan().sum())
    rows = 2**31 // 24 + 3
    sums = torch.empty(rows, 24)                                              # pages come with the first write
    touched = torch.tensor([0, rows - 2, rows - 1])
    sums[touched] = 1.0
    launch(sums, touched[[2, 0, 1, 2, 2]].int(), torch.arange(5.0)[:, None].expand(5, 24).contiguous())
    return found | dict(large=sums[touched].unique(dim=1).flatten().tolist())


@needs_triton
def test_add_rows__kernel_in_interpreter():
    """11 lines of a row in blocks of 4, the first and the last row, widths that fill no block, 2^31 elements."""
    program = "import conftest, json, test_rows; print(json.dumps(test_rows.interpret()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT / "tests",
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["small"] == found["bf16"] == {width: [0.0, int(width)] for width in ("1", "5", "16", "24")}
    assert found["large"] == [2.0, 3.0, 8.0]


def compile_ahead(rank: Rank) -> dict:
    """PTX and the intermediate form for two generations of GPUs."""
    os.environ["TRITON_CACHE_DIR"] = str(rank.folder)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, found = tg.jitted(tg.add_rows_kernel), {}
    for grad, capability in (("*bf16", 80), ("*fp32", 90)):
        signature = dict(row_grads="*fp32", rows="*i32", order="*i64", grad=grad, count="i32", width="i32",
                         LINES="constexpr", WIDTH="constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs={(6,): tg.ADD_ROWS_LINES, (7,): 1024})
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=4))
        found[f"{capability} {grad}"] = dict(ptx=done.asm["ptx"], ttir=done.asm["ttir"], cubin=len(done.asm["cubin"]))
    return found


@needs_triton
def test_add_rows__kernel_compiles_ahead(ranks):
    """For compute capabilities 80 and 90, with 64-bit addresses: the row is widened before it is multiplied."""
    found, = ranks(1, compile_ahead)
    assert {key.split()[0] for key in found} == {"80", "90"}
    for key, made in found.items():
        assert f".target sm_{key[:2]}" in made["ptx"] and made["cubin"] > 0
        wide = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", made["ttir"])
        assert wide and re.search(rf"arith.muli .*{wide[1]}\b.* : i64", made["ttir"]), made["ttir"]
        assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", made["ttir"]), "a product in 32 bits"

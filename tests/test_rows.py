"""Room 6: rows travel both ways, and every bit is that of one rank with whole tables.

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
from common import compiled_for, interpreted, needs_triton, owned, plan_of, planner_of, resources
from pytest import MonkeyPatch
from ranks import Rank
from reference import put_together
from row_cycles import PATTERNS, WIDTH, Trial, differences, drive, late_rows
from torch import Tensor

import train_gpt as tg

MODES = ("sparse", "dense")
ELEMENT = dict(float32=4, bfloat16=2)    # bytes
ID_BYTES = 4                             # of a row in a list
SLOW = pytest.param(4, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, 3, SLOW, 8], ids="W{}".format)
few_worlds = pytest.mark.parametrize("world", [1, 2, SLOW], ids="W{}".format)
modes = pytest.mark.parametrize("mode", MODES)


# ---- Cycles of tables ------------------------------------------------------------------------------------------------
def trials(world: int) -> list[Trial]:
    """Each pattern in both modes, both types, and on tables of several sizes; half as many for many ranks."""
    sizes = (53, 48, 5, 1, 97, 2)
    found = []
    for turn, (mode, dtype) in enumerate(itertools.product(MODES, ELEMENT)):
        tables = [(pattern, sizes[(k + turn) % len(sizes)]) for k, pattern in enumerate(PATTERNS)]
        found.append(Trial(tuple(tables), mode, dtype=dtype, updates=5 + turn))
    return found if world <= 2 else found[::3]

def cycles(rank: Rank) -> list[dict]:
    fabric = rank.fabric()
    return [drive(fabric, trial) for trial in trials(rank.world)]

@worlds
def test_RowTable__rows_are_those_of_a_dense_run(ranks, world):
    by_rank = ranks(world, cycles)
    for number, trial in enumerate(trials(world)):
        assert differences(trial, [found[number] for found in by_rank]) == [], trial

def rows_by_owner(of_ranks: list[dict], label: str, size: int) -> np.ndarray:
    """How many rows of its list each rank fetches of each owner, over all cycles: (reader, owner)."""
    world = len(of_ranks)
    lists = [np.concatenate([my_rows for my_rows, _ in found[label]["cycles"]]) for found in of_ranks]
    return np.stack([np.bincount(rows // size, minlength=world) for rows in lists])

@worlds
def test_traffic__is_what_collectives_were_given(ranks, world) -> None:
    """The list goes out, its rows come in, their gradients go out; and the same for the lists of others. By table it is
    counted from the lists of rows, and over all tables where the collective is called."""
    by_rank = ranks(world, cycles)
    for number, trial in enumerate(trials(world)):
        of_ranks = [found[number] for found in by_rank]
        row_bytes = WIDTH * ELEMENT[trial.dtype]
        totals = [Counter(sent=0, received=0) for _ in of_ranks]
        for label, (_, rows) in zip(of_ranks[0], trial.tables, strict=True):
            size = -(-rows // world)
            counts = rows_by_owner(of_ranks, label, size)
            for rank, (found, total) in enumerate(zip(of_ranks, totals)):
                asks = counts[rank].sum() - counts[rank, rank]
                is_asked = counts[:, rank].sum() - counts[rank, rank]
                moved = dict(bytes_sent=asks * (ID_BYTES + row_bytes) + is_asked * row_bytes,
                             bytes_received=is_asked * (ID_BYTES + row_bytes) + asks * row_bytes,
                             bytes_dense=2 * (world - 1) * size * row_bytes * trial.updates)
                assert found[label]["traffic"] == moved, label
                total.update(sent=moved["bytes_sent"], received=moved["bytes_received"])
        for found, total in zip(of_ranks, totals):
            assert all(of_table["bytes"] == total for of_table in found.values()), "of all tables"


# ---- One table -------------------------------------------------------------------------------------------------------
def row_table(fabric: tg.Fabric, rows: int = 20, **settings: Any) -> tg.RowTable:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    cfg = tg.Config(**tg.PRESETS["tiny"] | settings)
    shard = torch.nn.Parameter(owned(values, fabric))
    return tg.RowTable(tg.Table("bigram_embed", rows, 1, None), cfg, fabric, shard, 40)

def plan_for(table: tg.RowTable, rows: Sequence[int], cycle: int = 0) -> tg.TablePlan:
    fabric = table.fabric
    cfg = tg.Config(**tg.PRESETS["tiny"] | dict(row_comms=table.mode))
    read = np.asarray([rows], np.int32)
    plan, _ = plan_of(planner_of(cfg, fabric, table.table), table.table, [read], cycle=cycle)
    if fabric.world > 1:
        tg.exchange_plans(fabric, fabric.plan_group, "float32", {table.table.label: plan})
    return plan

def add_at(table: tg.RowTable, plan: tg.TablePlan, rows: Sequence[int], grad: Tensor) -> None:
    """Look the plan's rows up, and add lines of a gradient to some of them."""
    _, row_grads = table.rows_for_forward(plan)
    world = table.fabric.world
    rows = torch.as_tensor(rows)
    places = rows % world * plan.shard_size + rows // world
    if not table.alone:
        places = torch.searchsorted(plan.my_rows, places)
    tg.add_rows(row_grads, places.int(), grad)

def returned(table: tg.RowTable) -> np.ndarray:
    grad, wait = table.return_gradients()
    wait()
    return grad.numpy().copy()

def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except tg.RunError as error:
        return str(error)
    return ""

def debugged(rank: Rank, mode: str) -> tuple[bool, str]:
    """Return whether rows of no plan are NaN, and the error for a gradient of one."""
    table = row_table(rank.fabric(), row_comms=mode, debug_rows=1)
    plan = plan_for(table, [3, 3, 7])
    cache, row_grads = table.rows_for_forward(plan)
    poisoned = table.alone or bool(cache[len(plan.my_rows):].isnan().all())
    row_grads[-1] += 1
    returned(table)
    return poisoned, error_of(table.clear)

@pytest.mark.parametrize("world, mode", [(1, "dense"), (2, "sparse"), (3, "sparse")])
def test_debug_rows__a_gradient_in_rows_of_no_plan(ranks, world, mode):
    for poisoned, error in ranks(world, debugged, mode=mode):
        assert poisoned and "in rows of no plan" in error

def two_cycles(rank: Rank, mode: str) -> tuple[str, float]:
    table = row_table(rank.fabric(), row_comms=mode)
    ones = torch.ones(2, WIDTH)
    first = plan_for(table, [3, 4], cycle=3)
    second = plan_for(table, [9, 10], cycle=9)
    add_at(table, first, [3, 4], ones)
    error = error_of(lambda: add_at(table, second, [9, 10], ones))
    return error, float(returned(table).sum())

@pytest.mark.parametrize("world", [1, 2], ids="W{}".format)
@modes
def test_rows_for_forward__batches_of_two_cycles(ranks, world, mode):
    """Their gradients add up on one rank; on several it is said that they do not. Nothing is lost in silence."""
    for error, total in ranks(world, two_cycles, mode=mode):
        assert total == 4 * WIDTH if world == 1 else "gradients of bigram_embed" in error

def refetch(rank: Rank, mode: str) -> dict[str, bool]:
    """Rows of one plan are cached, or under way, when those of another are asked for: are they the right ones?"""
    fabric = rank.fabric()
    found = {}
    with late_rows(rank.rank):
        table = row_table(fabric, row_comms=mode)
        first = plan_for(table, range(3, 17))
        second = plan_for(table, (0, 1, 18, 19), cycle=1)

        def is_right(plan: tg.TablePlan) -> bool:
            cache, _ = table.rows_for_forward(plan)
            rows = cache[plan.my_rows if table.alone else slice(len(plan.my_rows))]
            every = torch.stack(fabric.gather(table.shard))                   # (owner, place)
            return rows.equal(every[plan.my_rows // plan.shard_size, plan.my_rows % plan.shard_size])

        for before in ("cached", "under way"):
            table.reset()
            table.fetch(first)
            if before == "cached":
                table.rows_for_forward(first)
                table.pending.clear()
            found[before] = is_right(second)
        returned(table)
        table.clear()
        with torch.no_grad():
            table.shard.add_(1)
        found["updated"] = is_right(second)
    return found

@few_worlds
@modes
@pytest.mark.parametrize("before", ["cached", "under way"])
def test_rows_for_forward__another_plan_than_the_one_fetched_ahead(ranks, world, mode, before):
    """A fetch waits for the one before it, whose rows would come late, over its own."""
    assert all(found[before] for found in ranks(world, refetch, mode=mode))

@few_worlds
@modes
def test_clear__the_same_plan_again_after_an_update(ranks, world, mode):
    """Its rows are fetched again: those in the cache are the ones before the update."""
    assert all(found["updated"] for found in ranks(world, refetch, mode=mode))

def reset(rank: Rank, mode: str) -> list[np.ndarray]:
    """Gradients after a reset in mid-cycle, with rows under way, and from the start."""
    def addresses() -> list[int]:
        return [x.data_ptr() for x in (table.shard, table.cache, table.row_grads, table.grad)]

    fabric = rank.fabric()
    grad = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    found = []
    for disturbed in (True, False):
        table = row_table(fabric, row_comms=mode)
        before = addresses()
        if disturbed:
            add_at(table, plan_for(table, [3, 4, 5]), [3, 4], torch.ones(2, WIDTH))
            returned(table)
            table.fetch(plan_for(table, [8, 9], cycle=1))
            table.reset()
        add_at(table, plan_for(table, [7, 12], cycle=2), [7, 12], grad)
        found.append(returned(table))
        assert addresses() == before, "moved"
    return found

@pytest.mark.parametrize("world", [1, 2], ids="W{}".format)
@modes
def test_reset__in_the_middle_of_a_cycle(ranks, world, mode):
    for disturbed, undisturbed in ranks(world, reset, mode=mode):
        assert disturbed.any() and disturbed.tobytes() == undisturbed.tobytes()

def addends(rank: int) -> Tensor:
    """Numbers of which no two orders have the same sum in f32."""
    scale = torch.tensor([1e-4, 1.0, 1e3])[rank % 3]
    return scale * torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(rank))

def rank_order(rank: Rank) -> np.ndarray:
    table = row_table(rank.fabric())
    add_at(table, plan_for(table, range(20)), range(20), addends(rank.rank))
    return returned(table)

@pytest.mark.parametrize("world", [3, SLOW], ids="W{}".format)
def test_return_gradients__added_in_the_order_of_ranks(ranks, world):
    """Rank 0 first, the owner's own at its place."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [addends(rank).numpy() for rank in ranks])

    got = put_together(ranks(world, rank_order), 20)
    np.testing.assert_array_equal(got, total(range(world)))
    assert not np.array_equal(got, total(range(world)[::-1])), "this test cannot tell"


# ---- Plans that ranks disagree about, lists that are wrong -----------------------------------------------------------
def every_second_row(fabric: tg.Fabric, labels: Sequence[str], **tag: Any) -> dict[str, tg.TablePlan]:
    """Plans of this rank for every second row of each owner's shard."""
    specs = [tg.Table(label, 60, 1, None) for label in labels]
    rows = np.flatnonzero(np.arange(60) // fabric.world % 2 == 0).astype(np.int32)[None]
    planner = planner_of(tg.Config(), fabric, *specs)
    tag = dict(purpose="train", cycle=3, tokens=64) | tag
    return {spec.label: plan_of(planner, spec, [rows], **tag)[0] for spec in specs}

OTHER = dict(same={}, cycle=dict(cycle=4), purpose=dict(purpose="validation"), tokens=dict(tokens=65),
             dtype=dict(dtype="bfloat16"), table=dict(labels=("two", "one")))

def swapped(rank: Rank, name: str) -> str:
    """Two exchanges of the same sizes, in another order on the last rank."""
    fabric = rank.fabric()

    def send(dtype: str = "float32", labels: Sequence[str] = ("one", "two"), **tag: Any) -> None:
        plans = every_second_row(fabric, labels, **tag)
        tg.exchange_plans(fabric, fabric.plan_group, dtype, plans)

    def send_both() -> None:
        pair = [{}, OTHER[name]]
        for settings in (pair[::-1] if rank.rank == rank.world - 1 else pair):
            send(**settings)
    return error_of(send_both)

@pytest.mark.parametrize("name", OTHER)
def test_exchange_plans__ranks_swap_two_exchanges(ranks, name):
    """Every rank says so, with both values."""
    for rank, error in enumerate(ranks(3, swapped, name=name)):
        if name == "same":
            assert not error
            continue
        assert f"row plans of ranks {2 if rank < 2 else 0} and {rank}\n" in error
        values = [re.search(rf"  {line}: .*?'{name}': ([^,}}]+)", error)[1] for line in ("found", "expected")]
        assert values[0] != values[1]

def bad_list(rank: Rank, name: str) -> str:
    """The last rank gets another list from rank 0 than that of its plan."""
    fabric = rank.fabric()
    call = dist.all_to_all_single
    plans = every_second_row(fabric, ("table",))
    plan = plans["table"]
    first = sum(plan.send_counts[:rank.world - 1])
    places = (plan.my_rows % plan.shard_size)[first:].tolist()
    a, b, *others = places
    bad = {"sound": places, "too large": [*places[:-1], plan.shard_size], "negative": [-1, b, *others],
           "unsorted": [b, a, *others], "duplicate": [a, a, *others]}

    def corrupt(out, x, *splits, **kwargs):
        assert x[first:].tolist() == places, "another message than this case knows"
        x[first:] = torch.tensor(bad[name], dtype=torch.int32)
        return call(out, x, *splits, **kwargs)

    with MonkeyPatch.context() as patch:
        if rank.rank == 0:
            patch.setattr(dist, "all_to_all_single", corrupt)
        return error_of(lambda: tg.exchange_plans(fabric, fabric.plan_group, "float32", plans))

@pytest.mark.parametrize("name", ["sound", "too large", "negative", "unsorted", "duplicate"])
def test_exchange_plans__a_list_that_no_plan_can_hold(ranks, name):
    *others, last = ranks(3, bad_list, name=name)
    assert others == ["", ""]
    assert ("rows of table that rank 0 requests" in last) == (name != "sound")


# ---- add_rows --------------------------------------------------------------------------------------------------------
LINES = 4                                # less than a row has: its lines cross blocks

def launch(sums: Tensor, index: Tensor, grad: Tensor, lines: int = LINES) -> None:
    rows, order = index.sort(stable=True)
    count, width = grad.shape
    power_of_two = 1 << (width - 1).bit_length()
    kernel = tg.jitted(tg.add_rows_kernel)[(count,)]
    kernel(sums, rows, order, grad, count, width, LINES=lines, WIDTH=power_of_two)

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
    return found | dict(large=[beyond_2_to_31(add) for add in (launch, tg.add_rows)], long=long_lists())

def long_lists() -> list[float]:
    """Sums of rows whose lists end before, at and behind the end of a round, with the lines of the trainer: relative
    errors against float64 of rounded numbers and of integers."""
    lines = tg.ADD_ROWS_LINES
    counts = [1, lines - 1, lines, lines + 1, 2 * lines - 1, 2 * lines, 2 * lines + 1, 0, 40 * lines + 3]
    index = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    errors = []
    for make in (torch.randn, functools.partial(torch.randint, -8, 9)):
        generator = torch.Generator().manual_seed(1)
        sums = make((len(counts), 24), generator=generator).float()
        grad = make((len(index), 24), generator=generator).float()
        want = sums.double().index_add(0, index.long(), grad.double())
        launch(sums, index, grad, tg.ADD_ROWS_LINES)
        errors.append(float((sums - want).norm() / want.norm()))
    return errors

@needs_triton
def test_add_rows__kernel_in_interpreter():
    """11 lines of a row in blocks of 4, the first and the last row, widths that fill no block, 2^31 elements; lists of
    up to 643 lines."""
    found = json.loads(interpreted("import json, test_rows; print(json.dumps(test_rows.interpret()))"))
    assert found.pop("large") == [[2.0, 3.0, 8.0]] * 2
    rounded, exact = found.pop("long")
    assert rounded < 1e-6 and exact == 0
    assert list(found.values()) == [[0.0, 0]] * 8

def compile_ahead(rank: Rank, capability: int, dtype: str) -> dict[str, Any]:
    os.environ["TRITON_CACHE_DIR"] = str(rank.folder)
    types = dict(row_grads="*fp32", rows="*i32", order="*i64", grad=f"*{dtype}", count="i32", width="i32")
    constants = dict(LINES=tg.ADD_ROWS_LINES, WIDTH=1024)
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 2, 3, 5)}    # addresses, and the width of the recipe
    made = compiled_for(capability, tg.add_rows_kernel, types, constants, aligned, num_warps=4)
    cubin = rank.folder / "add_rows.cubin"
    cubin.write_bytes(made.asm["cubin"])
    return {name: made.asm[name] for name in ("ptx", "ttir")} | resources(cubin)

@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_add_rows__kernel_compiles_ahead(ranks, capability, dtype):
    """Addresses have 64 bits: the row is widened before it is multiplied. Nothing spills, and 8 programs fit at once,
    for most have few lines or none; loads of lines are 16 bytes wide."""
    made, = ranks(1, compile_ahead, capability=capability, dtype=dtype)
    assert f".target sm_{capability}" in made["ptx"] and made["STACK"] == made["LOCAL"] == 0
    assert 8 * made["REG"] * 4 * 32 <= 65_536
    assert len(re.findall(r"ld\.global\.v4", made["ptx"])) >= tg.ADD_ROWS_LINES * 1024 * 2 // (128 * 16)
    wide = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", made["ttir"])
    assert wide and re.search(rf"arith.muli .*{wide[1]}\b.* : i64", made["ttir"]), made["ttir"]
    assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", made["ttir"]), "a product in 32 bits"

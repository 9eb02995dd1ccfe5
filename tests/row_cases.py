"""What the ranks do for test_rows.py: one process per rank goes through all cases and leaves what it found in files.

    python tests/row_cases.py FOLDER [--all]                 worlds over gloo
    python tests/row_cases.py FOLDER interpret|compile       the Triton body of add_rows, without a GPU

A case returns whatever can be pickled, to FOLDER/w<ranks>/<case>.<rank>.pickle; its stack trace, if it fails, is in
<case>.<rank>.error. Nothing is judged here.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor

import train_gpt as tg
from common import grad_of, owned, plan_of, planner_of, set_grad
from rank_cases import COMM_TIMEOUT, SLOW_WORLD, Rank, few_layers, one_rank

WORLDS = (1, 2, 3, SLOW_WORLD, 8)
LATE_IMPORTS = ("torch._dynamo", "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes")
WORLD_DEADLINE = 120                     # s for all cases of a world; then a rank says where it is
MODES, TYPES = ("sparse", "dense"), ("float32", "bfloat16")

# ----------------------------------------------------------------------------------------------------------------------
# The exchange alone: which rows are read, and gradients that depend on what was read
# ----------------------------------------------------------------------------------------------------------------------

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


def exact_array(x: Tensor) -> np.ndarray:
    """numpy has no bf16; f32 holds every bf16 number."""
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().clone().numpy()


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

# ----------------------------------------------------------------------------------------------------------------------
# Plans that ranks disagree about, lists that are wrong
# ----------------------------------------------------------------------------------------------------------------------

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


BAD = {                                  # what becomes of the places that rank 0 requests of the last rank
    "sound": lambda x, size: x, "too large": lambda x, size: [*x[:-1], size], "negative": lambda x, size: [-1, *x[1:]],
    "unsorted": lambda x, size: [x[1], x[0], *x[2:]], "duplicate": lambda x, size: [x[0], x[0], *x[2:]],
    "another row": lambda x, size: [*x[:-1], x[-1] + 1], "checksum": lambda x, size: x}


def bad_ids(rank: Rank) -> dict:
    """The announced sum is that of the bad list, but for "another row", which only the sum betrays, and "checksum"."""
    fabric, found, call, gather = rank.fabric(), {}, dist.all_to_all_single, dist.all_gather_object
    for name, change in BAD.items():
        plans = every_second_row(fabric, ("table",))
        plan, target = plans["table"], rank.world - 1
        first = sum(plan.send_counts[:target])
        places = (plan.my_rows % plan.shard_size)[first:].tolist()
        bad = change(places, plan.shard_size)

        def announce(everyone, said, **kwargs):
            common, ((*facts, (count, last)),) = said
            if name != "another row":
                last = sum(bad) + (name == "checksum")
            gather(everyone, (common, [[*facts, (count, last)]]), **kwargs)

        def corrupt(out, x, *splits, **kwargs):
            assert x[first:].tolist() == places, "another message than this case knows"
            x[first:] = torch.tensor(bad, dtype=torch.int32)
            return call(out, x, *splits, **kwargs)

        with MonkeyPatch.context() as patch:
            if rank.rank == 0:
                patch.setattr(dist, "all_to_all_single", corrupt)
                patch.setattr(dist, "all_gather_object", announce)
            found[name] = error_of(lambda: tg.exchange_plans(fabric, fabric.plan_group, "float32", plans))
    return found


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


def refetch(rank: Rank) -> dict:
    """Rows of one plan are cached, or on their way, when those of another are asked for: are they the right ones?"""
    fabric, found = rank.fabric(), {}
    for mode in MODES:
        table = row_table(fabric, tiny(row_comms=mode), 4000, most=4000)
        first, second = (hand_made(table, span, cycle=len(span)) for span in (range(3000), range(3500, 3600)))
        for before in ("cached", "on their way"):
            table.reset()
            table.fetch(first, None)
            if before == "cached":
                table.rows_for_forward(first, None)
                table.pending.clear()
            cache, _ = table.rows_for_forward(second, None)
            time.sleep(0.02)                                                  # what comes late would come now
            read = cache[second.my_rows if table.alone else slice(len(second.my_rows))]
            every = torch.stack(fabric.gather(table.shard))                   # (owner, place)
            physical = second.my_rows
            found[mode, before] = bool(read.equal(every[physical // second.shard_size, physical % second.shard_size]))
    return found


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

# ----------------------------------------------------------------------------------------------------------------------
# Executors of a small model
# ----------------------------------------------------------------------------------------------------------------------

MODEL_SLOTS, SPLIT_STEP, MODEL_STEPS = 24, 3, 8


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


ROW_LABELS = ("embed", "lm_head", "bigram_embed", "value_embed")


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


def graphs(fabric: tg.Fabric, cfg: tg.Config, steps: int, evaluate: bool) -> dict:
    """Graphs after each step of a compiled run, all in the first stage; evaluate: once in each cycle."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    found = dict(graphs=[], losses=[], grads=[])
    with MonkeyPatch.context() as patch:
        call = torch.compile                                                  # not the optimizer: it has no rows

        def compile_model(function: Callable, **options: Any) -> Callable:
            of_model = isinstance(getattr(function, "__self__", None), tg.GPT)
            return call(function, backend="aot_eager", **options) if of_model else function

        patch.setattr(torch, "compile", compile_model)
        with small_run(fabric, cfg, steps) as (executor, loader, plan):
            validation = tg.ValidationSet(cfg, fabric, tg.find_shards(cfg.val_files), executor.exchange)
            for values in plan:
                batch = loader.next(values)
                if evaluate and values.adam_step:
                    executor.evaluate(validation.batches(values), values)
                found["losses"].append(exact_array(executor.forward_backward(batch, values).slot_sums))
                found["grads"].append([label for label in executor.tables
                                       if executor.model.get_parameter(label).grad is not None])
                executor.optim_step(values, loader.plans_ahead)
                found["graphs"].append(counters["stats"]["unique_graphs"])
    return found


def compiled(rank: Rank) -> dict:
    stay = dict(num_scheduled_steps=30, num_extension_steps=2)
    fabric = rank.fabric(small_config(**stay))
    return {compile: graphs(fabric, small_config(compile=compile, **stay), 6, rank.world > 1) for compile in (0, 1)}


CASES = {                                # name -> numbers of ranks, what to do
    "exchange": (WORLDS, exchange),
    "faults": ((2, 4), faults),
    "debug": ((1, 2, 3), debug),
    "reset": ((1, 2), reset),
    "rank_order": ((3, 4), rank_order),
    "two_cycles": ((1, 2), two_cycles),
    "refetch": ((1, 2, 4), refetch),
    "swapped": ((2, 3), swapped),
    "bad_ids": ((2, 3), bad_ids),
    "split": ((1, 2, 3, 4), split),
    "evaluation": ((1, 2, 4), evaluation),
}
SLOW_CASES = {"compiled": ((2,), compiled)}                                   # with --all; one rank: test_executor.py

# ----------------------------------------------------------------------------------------------------------------------
# The Triton body without a GPU
# ----------------------------------------------------------------------------------------------------------------------

LINES = 4                                # less than a row has: its lines cross blocks


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
    """With TRITON_INTERPRET=1. small: what is wrong, by width; large: rows behind 2^31 elements."""
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


def compile_ahead() -> dict:
    """PTX and the intermediate form for two generations of GPUs."""
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

# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------

def keep(place: Rank, found: Any) -> None:
    (place.folder / f"{place.case}.{place.rank}.pickle").write_bytes(pickle.dumps(found))


def run_world(world: int, folder: Path, table: dict[str, tuple]) -> list:
    """Start the ranks, which go through the cases of a table that are for this world."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    cases = {name: case for name, (worlds, case) in table.items() if world in worlds}
    place = folder / f"w{world}"
    place.mkdir()
    ranks = [context.Process(target=one_rank, args=(rank, world, place, cases, WORLD_DEADLINE, keep))
             for rank in range(world)]
    for process in ranks:
        process.start()
    return ranks


def run_worlds(folder: Path, groups: list[tuple[int, ...]], table: dict[str, tuple]) -> None:
    """One group of worlds after the other; for table_cases.py too."""
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()                          # spares each rank's collector a look at it all, and copies of the pages
    for together in groups:
        for process in [process for world in together for process in run_world(world, folder, table)]:
            process.join()


def main(folder: Path, slow: bool) -> None:
    groups, table = [(8,), (2, 1), (3,)], CASES
    if slow:
        groups.append((SLOW_WORLD,))
        table = CASES | SLOW_CASES
    run_worlds(folder, groups, table)


if __name__ == "__main__":
    place, what = Path(sys.argv[1]).resolve(), sys.argv[2:]
    if what and what != ["--all"]:
        (place / f"{what[0]}.json").write_text(json.dumps(dict(interpret=interpret, compile=compile_ahead)[what[0]]()))
    else:
        main(place, slow=bool(what))

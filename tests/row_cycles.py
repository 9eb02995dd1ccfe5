"""Cycles of tables without a model: plans, exchange, lookups, gradients and updates as a run makes them, on W ranks.

Gradients are small integers that depend on the sign of the row that was read. Their sums are exact in every type and
order, and what is stale, lost or doubled changes bits. Rows travel, and come from the host, as late as they may.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import exact_array, owned, plan_of, planner_of
from pytest import MonkeyPatch
from reference import NaiveTable, cut
from torch import Tensor

import train_gpt as tg

SLOTS, WIDTH = 8, 5                      # slots of a step, features
LR_MUL, WD_MUL, WEIGHT_DECAY, EPS = 2.0, 3.0, 0.25, 1e-3
BETA1 = 0.75
ONE_OWNER = 24                           # its multiples are the first rank's at each number of ranks
# Relative and absolute, of row-wise updates. In bf16 only where p - u cancels: torch's root of f32 is not numpy's.
TOLERANCE = dict(float64=(1e-12, 1e-12), bfloat16=(0.0, 1e-7))
PAIRS = tg.NgramTable("more_bigram_embed", 2, 97)
TRIPLES = tg.NgramTable("trigram_embed", 3, 301, signs=1)
Found = dict[str, Any]


# ---- What is late ----------------------------------------------------------------------------------------------------
class Exchange:
    """Stands for dist.all_to_all_single. What arrives is NaN until it was waited for, and what left is NaN after that;
    rows that nobody has waited for arrive after those of the next exchange."""
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.exchange = dist.all_to_all_single
        self.bytes = Counter(sent=0, received=0)                              # to and from other ranks
        self.under_way: list[Late] = []

    def __call__(self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], **kwargs: Any) -> Any:
        for name, tensor, splits in (("sent", x, in_splits), ("received", out, out_splits)):
            if sum(splits):
                self.bytes[name] += tensor.nbytes // sum(splits) * (sum(splits) - splits[self.rank])
        if not x.is_floating_point():                                         # lists of a plan
            return self.exchange(out, x, out_splits, in_splits, **kwargs)
        arriving = torch.empty_like(out)
        work = self.exchange(arriving, x, out_splits, in_splits, **kwargs)
        out.fill_(math.nan)
        late = Late(self, work, arriving, out, x)
        self.under_way.append(late)
        return late

@dataclass(eq=False)
class Late:
    exchange: Exchange
    work: Any
    arriving: Tensor
    out: Tensor
    left: Tensor

    def wait(self) -> None:
        under_way = self.exchange.under_way
        if self in under_way:
            forgotten = under_way[:under_way.index(self)]
            for late in (self, *forgotten):
                late.work.wait()
                late.out.copy_(late.arriving)
                under_way.remove(late)
        self.left.fill_(math.nan)

@contextlib.contextmanager
def late_rows(rank: int) -> Iterator[Exchange]:
    with MonkeyPatch.context() as patch:
        exchange = Exchange(rank)
        patch.setattr(dist, "all_to_all_single", exchange)
        patch.setitem(tg.HOMES, "host", EmptyingHome)
        yield exchange

def taken(state: tg.RowState) -> tg.RowState:
    """A copy; whoever still reads the state itself will be noticed."""
    copy = tg.RowState(*(x.clone() for x in state))
    for x, nonsense in zip(state, (math.nan, math.nan, -1)):
        x.fill_(nonsense)
    return copy

class StagedHome(tg.HostRowStore):
    """Each transfer is late by chance, and goes through staging of its own, which is spoiled after it."""
    empties = False                      # rows that came up are spoiled at home, too, until they are back

    def _bring_up(self, places: Tensor) -> tuple[tg.RowState, Any]:
        time.sleep(random.uniform(0, 0.002))
        staging, done = super()._bring_up(places)
        arrived = taken(staging)
        if self.empties:
            self.stored.put(places, staging)
        return arrived, done

    def _bring_down(self, places: Tensor, changed: tg.RowState, computed: Any) -> None:
        time.sleep(random.uniform(0, 0.002))
        staging = tg.RowState(*(x.clone() for x in changed))
        super()._bring_down(places, staging, computed)
        taken(staging)

class EmptyingHome(StagedHome):
    empties = True


# ---- What is read, and the gradients ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trial:
    tables: tuple[tuple[str, int], ...]  # pattern of reads, rows
    mode: str = "sparse"                 # of dense-Adam tables
    home: str = ""                       # of row-wise tables; "": tables have dense Adam
    dtype: str = "float64"
    cadence: int = 2
    rounding: str = "nearest"
    updates: int = 7

    @property
    def beta2(self) -> float:
        return 0.5 if self.dtype == "bfloat16" else 0.9                       # powers of 0.5 are exact

@functools.cache
def rows_by_pattern(rows: int, update: int, step: int, slot: int) -> dict[str, np.ndarray]:
    """Logical rows that a slot reads of a table in a step, i32."""
    rng = np.random.default_rng([rows, update, step, slot])
    some = rng.integers(0, rows, 8)
    lower = some // 2
    found = {
        "uniform": some,
        "zero gradients": some,
        "skewed": np.minimum(rng.pareto(0.7, 8), rows - 1),
        "odd slots empty": some[8 * (slot % 2):],
        "one slot only": some[:8 * (slot == 0)],
        "nothing at times": some[:8 * (update % 3 > 0)],
        "nothing ever": some[:0],
        "alike on all": (np.arange(5) * 7 + update) % rows,
        "all rows": rng.permutation(rows),
        "one owner": ONE_OWNER * rng.integers(0, -(-rows // ONE_OWNER), 6),
        "first and last": np.array([0, rows - 1, 0]),
        "growing": some[:(0, 3, 8, 1, 6)[update % 5] + step],
        "come back": lower + rows // 2 * (update not in (0, 6)),
        "every other update": np.minimum(2 * lower + update % 2, rows - 1),
        "once": lower[:8 * (update == 0)],
    }
    return {pattern: x.astype(np.int32) for pattern, x in found.items()}

PATTERNS = tuple(rows_by_pattern(2, 0, 0, 0))

def reads(pattern: str, rows: int, *at: int) -> np.ndarray:
    return rows_by_pattern(rows, *at)[pattern]

def gradient(pattern: str, update: int, step: int, slot: int, asked: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Return integers from -2 to 2 for the rows asked for, whose values were read."""
    line, column = np.indices(read.shape)
    grad = (3 * line + 5 * step + 7 * slot + 11 * update + 2 * column) % 3 - 1 + np.sign(read)
    if pattern == "zero gradients":
        grad = grad * (asked % 2)[:, None]
    return grad.astype(read.dtype)

def learning_rate(update: int) -> float:
    """Large: signs of rows change."""
    return 0.15 / (1 + update % 3)

def initial(trial: Trial, pattern: str, rows: int) -> Tensor:
    """Zeros of row-wise tables, and where a row may never be read."""
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    if trial.home or pattern == "once":
        values.zero_()
    return values.to(getattr(torch, trial.dtype))


# ---- The trainer -----------------------------------------------------------------------------------------------------
class TableOptimizer(tg.Optimizer):
    """The trainer's optimizer with nothing but tables."""
    def __init__(self, cfg: tg.Config, fabric: tg.Fabric, trial: Trial, tables: dict[str, tg.RowTable]) -> None:
        self.cfg = cfg
        self.fabric = fabric
        self.tables = tables
        self.model = SimpleNamespace(lm_head=None)
        self.grad_scale = 1 / SLOTS
        self.seed = cfg.seed
        self.adam_update = tg.adam_update
        self.rowwise_update = tg.rowwise_update
        self.state = {}
        self.reduce_order = self.update_order = tuple(tables)
        self.entries = {}
        for label, table in tables.items():
            rule = "rowwise" if trial.home else "adam"
            betas = BETA1 * (not trial.home), trial.beta2
            row = tg.Parameter(label, (table.table.rows, WIDTH), None, rule, lr_mul=LR_MUL, wd_mul=WD_MUL, betas=betas,
                               rows=table.table)
            self.entries[label] = tg.TableGroup(self, row, table)

class Cycles:
    """A trial on one rank: plans a cycle ahead as the loader makes them, and steps as the executor makes them."""
    def __init__(self, fabric: tg.Fabric, trial: Trial) -> None:
        self.fabric = fabric
        self.trial = trial
        self.slots = range(fabric.rank, SLOTS, fabric.world)
        settings = dict(dtype=trial.dtype, model_dim=WIDTH, num_slots=SLOTS, adam_eps=EPS, row_comms=trial.mode,
                        adam_weight_decay=WEIGHT_DECAY, debug_rows=1)
        cfg = tg.Config(**tg.PRESETS["tiny"] | settings)
        self.patterns, self.tables = {}, {}
        for pattern, rows in trial.tables:
            label = f"{pattern} of {rows}"
            self.patterns[label] = pattern, rows
            spec = tg.Table(label, rows, 1, None, rowwise=bool(trial.home), home=trial.home or "device",
                            cadence=trial.cadence, rounding=trial.rounding)
            shard = None
            if not trial.home:
                shard = torch.nn.Parameter(owned(initial(trial, pattern, rows), fabric))
            most_tokens = SLOTS * trial.cadence * max(8, rows)
            self.tables[label] = tg.RowTable(spec, cfg, fabric, shard, most_tokens)
        self.planner = planner_of(cfg, fabric, *(table.table for table in self.tables.values()))
        self.optimizer = TableOptimizer(cfg, fabric, trial, self.tables)
        self.made: dict[int, tuple] = {}

    def plans(self, update: int) -> tuple[dict[str, tg.RowPlan], dict[str, list[np.ndarray]]]:
        """Return the plans of a cycle, made once, and where each lookup finds its row."""
        if update in self.made:
            return self.made[update]
        plans, places = {}, {}
        for label, pattern in self.patterns.items():
            lines = []
            for step in range(self.trial.cadence):
                of_slots = [reads(*pattern, update, step, slot) for slot in self.slots]
                lines.append(np.concatenate(of_slots)[None])
            plans[label], places[label] = plan_of(self.planner, self.tables[label].table, lines, purpose="train",
                                                  cycle=update, tokens=SLOTS)
        if self.fabric.world > 1:
            tg.exchange_row_requests(self.fabric, self.fabric.plan_group, self.trial.dtype, plans)
        for label, plan in plans.items():
            self.tables[label].prepare(plan)
        self.made[update] = plans, places
        return self.made[update]

    def look_up(self, label: str, update: int, step: int) -> None:
        plans, places = self.plans(update)
        cache, row_grads = self.tables[label].rows_for_forward(plans[label])
        index = torch.from_numpy(places[label][step][0])
        asked = [reads(*self.patterns[label], update, step, slot) for slot in self.slots]
        read = np.split(exact_array(cache[index.long()]), np.cumsum([len(rows) for rows in asked])[:-1])
        lines = [gradient(self.patterns[label][0], update, step, slot, *pair)
                 for slot, *pair in zip(self.slots, asked, read)]
        grad = torch.from_numpy(np.concatenate(lines)).to(cache.dtype)
        for part in (slice(3), slice(3, None)):               # calls add up
            tg.add_rows(row_grads, index[part], grad[part])

    def run(self) -> dict[str, Found]:
        """Return by table the lists and rows fetched in each cycle, and this rank's shard and state at the end."""
        trial = self.trial
        found = {label: dict(cycles=[]) for label in self.tables}
        for update in range(trial.updates):
            plans, places = self.plans(update)
            if update % 2 == 0:                               # before the first rows of this cycle are taken, too
                for ahead in range(update + 1, min(update + 3, trial.updates)):
                    self.plans(ahead)

            def plans_ahead(ahead: int = update + 1) -> dict[str, tg.RowPlan] | None:
                return self.plans(ahead)[0] if ahead < trial.updates else None
            for label, table in self.tables.items():
                plan = plans[label]
                cache, _ = table.rows_for_forward(plan)
                fetched = cache[plan.rows_to_fetch if table.alone else slice(len(plan.rows_to_fetch))]
                found[label]["cycles"].append((plan.rows_to_fetch.numpy(), exact_array(fetched)))
            for step in range(trial.cadence):
                for label, table in self.tables.items():
                    self.look_up(label, update, step)
                    table.traffic()                           # asking changes no count
                at = SimpleNamespace(step=update * trial.cadence + step, adam_lr=learning_rate(update), tied=False,
                                     untie=False)
                self.optimizer.step(at, plans_ahead)
        for label, table in self.tables.items():
            found[label] |= self.state(label, table)
            found[label]["traffic"] = table.traffic()
        return found

    def state(self, label: str, table: tg.RowTable) -> Found:
        if table.home is None:
            state = self.optimizer.state[label] | dict(rows=table.shard)
            return {name: exact_array(x) for name, x in state.items()}
        table.home.settle()
        touched = [places for places, _ in table.home.touched()]
        state = {name: exact_array(x) for name, x in table.home.stored._asdict().items()}
        return state | dict(touched=np.concatenate([np.zeros(0, int), *touched]))

def drive(fabric: tg.Fabric, trial: Trial) -> dict[str, Found]:
    with late_rows(fabric.rank) as exchange:
        found = Cycles(fabric, trial).run()
    return {label: of_table | dict(bytes=dict(exchange.bytes)) for label, of_table in found.items()}


# ---- Slow but right --------------------------------------------------------------------------------------------------
@functools.cache
def naive_run(trial: Trial, pattern: str, rows: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """One rank, whole tables. Returns the rows before each update, and everything after the last."""
    p = initial(trial, pattern, rows)
    m = torch.zeros(rows, WIDTH, dtype=tg.accum_dtype(p.dtype))
    v = torch.zeros_like(m)
    exact = np.float64 if trial.dtype == "float64" else np.float32
    bf16 = trial.rounding if trial.dtype == "bfloat16" else ""
    naive = NaiveTable(f"{pattern} of {rows}", rows, WIDTH, trial.beta2, EPS, exact, bf16)
    before = []
    for update in range(trial.updates):
        before.append(naive.p.copy() if trial.home else exact_array(p))
        asked = np.zeros(rows, bool)
        grad = np.zeros((rows, WIDTH), exact)
        most = np.zeros((rows, WIDTH))
        for step, slot in itertools.product(range(trial.cadence), range(SLOTS)):
            read = reads(pattern, rows, update, step, slot)
            lines = gradient(pattern, update, step, slot, read, before[-1][read])
            asked[read] = True
            np.add.at(grad, read, lines)
            np.add.at(most, read, np.abs(lines))
        assert most.max() <= 256, "bf16 would round"
        lr = LR_MUL * learning_rate(update)
        if trial.home:
            naive.update(asked, [grad], SLOTS, lr, WEIGHT_DECAY * WD_MUL)
            continue
        number = update + 1
        step_size = lr * (math.sqrt(1 - trial.beta2**number) / (1 - BETA1**number))
        decay = lr * lr * WEIGHT_DECAY * WD_MUL
        tg.adam_update(p, torch.from_numpy(grad), m, v, 1 / SLOTS, (BETA1, trial.beta2), EPS,
                       tg.cpu_scalar(step_size), tg.cpu_scalar(decay))
    if trial.home:
        missed = naive.updates - naive.last
        return before, dict(rows=naive.p, v=naive.v, last=naive.last, missed=missed)
    return before, dict(rows=exact_array(p), m=m.numpy(), v=v.numpy())

def differences(trial: Trial, by_rank: list[dict[str, Found]]) -> list[str]:
    """Name what ranks fetched, or hold at the end, and should not; dense Adam to the bit."""
    world = len(by_rank)
    relative, absolute = TOLERANCE[trial.dtype] if trial.home else (0, 0)
    wrong = []
    for (pattern, rows), (rank, found) in itertools.product(trial.tables, enumerate(by_rank)):
        label = f"{pattern} of {rows}"
        before, end = naive_run(trial, pattern, rows)
        got = found[label]

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.shape != want.shape or not np.allclose(x, want, relative, absolute):
                wrong.append(f"{label}: {name} on rank {rank}")

        for update, ((rows_to_fetch, fetched), table) in enumerate(zip(got["cycles"], before, strict=True)):
            shards = np.concatenate(cut(table, world))         # with zeros where there is no row
            compare(f"rows fetched for update {update}", fetched, shards[rows_to_fetch])
        shard = {name: cut(x, world)[rank] for name, x in end.items()}
        if trial.home:
            shard["touched"] = np.flatnonzero(shard["last"])
            got = got | dict(v=got["v"] * trial.beta2 ** shard.pop("missed"))         # the trainer catches up later
        for name, x in shard.items():
            compare(name, got[name], x)
    return wrong

"""What the ranks do for test_tables.py: one process per rank goes through all cases and leaves what it found in files.

    python tests/table_cases.py FOLDER [--all]

Nothing is judged here.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from pytest import MonkeyPatch
from torch import Tensor

import train_gpt as tg
from rank_cases import Found, Rank, few_layers, whole_run
from row_cases import exact_array, run_worlds

add_rows = tg.add_rows                   # the right one, whatever a mistake makes of the trainer's
WORLDS = (1, 2, 8)
SLOW_WORLD = 4                           # with --all
HOMES, CADENCES = ("device", "host"), (2, 4)

# ----------------------------------------------------------------------------------------------------------------------
# A host home that hides no fault
# ----------------------------------------------------------------------------------------------------------------------

def spoil(live: tg.Live) -> None:
    """Whoever still reads it will be noticed."""
    live.rows.fill_(math.nan)
    live.v.fill_(math.nan)
    live.last.fill_(-1)


class StagedHome(tg.HostHome):
    """Every transfer is late, by chance, and goes through staging of its own, which is spoiled behind it."""

    empties = False                      # rows that came up are spoiled at home, too, until they are back
    longest_delay = 0.001                # s

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.delays = random.Random(self.fabric.rank)

    def _wait_by_chance(self) -> None:
        time.sleep(self.delays.uniform(0, self.longest_delay))

    def _bring_up(self, places: Tensor) -> tuple[tg.Live, Any]:
        self._wait_by_chance()
        staging, done = super()._bring_up(places)
        arrived = copy_of(staging)
        spoil(staging)
        if self.empties:
            self.stored.put(places, staging)
        self._wait_by_chance()
        return arrived, done

    def _bring_down(self, places: Tensor, live: tg.Live, computed: Any) -> None:
        self._wait_by_chance()
        staging = copy_of(live)
        super()._bring_down(places, staging, computed)
        spoil(staging)
        self._wait_by_chance()


class EmptyingHome(StagedHome):
    empties = True


def copy_of(live: tg.Live) -> tg.Live:
    return tg.Live(*(x.clone() for x in live))

# ----------------------------------------------------------------------------------------------------------------------
# EventTable alone: which rows are read, and gradients that depend on what was read
# ----------------------------------------------------------------------------------------------------------------------

SLOTS, WIDTH, EVENTS = 8, 4, 7           # slots of a step, features, events
ZEROS = functools.partial(tg.constant, [0.0])
LR_MUL, WD_MUL, WEIGHT_DECAY, EPS = 2.0, 3.0, 0.25, 1e-3
BETA2 = dict(float64=0.9, float32=0.9, bfloat16=0.5)          # 0.5: its powers are exact, in each order


def uniform(rows, event, slot, rng):
    return rng.integers(0, rows, 8)


def many_reads(rows, event, slot, rng):
    return rng.integers(0, rows, 12)


def skewed(rows, event, slot, rng):
    return np.minimum(rng.pareto(0.7, 8), rows - 1)


def alike_on_all(rows, event, slot, rng):
    return (np.arange(5) * 7 + event) % rows


def come_back(rows, event, slot, rng):
    """The first rows in two events that lie far apart."""
    some = rng.integers(0, rows // 2, 6)
    return some if event in (0, EVENTS - 1) else rows // 2 + some


def every_other_event(rows, event, slot, rng):
    """Each event has the rows of the one before the last, and none of the last."""
    return rng.integers(0, rows // 2, 8) * 2 + event % 2


def nothing_at_times(rows, event, slot, rng):
    return rng.integers(0, rows, 8 * (event % 3 > 0))


def nothing_ever(rows, event, slot, rng):
    return []


def odd_slots_empty(rows, event, slot, rng):
    return rng.integers(0, rows, 8 * (slot % 2 == 0))


def all_rows(rows, event, slot, rng):
    return rng.permutation(rows)


PATTERNS: dict[str, tuple[int, Callable]] = {        # rows of the table; (rows, event, slot, generator) -> rows read
    "uniform": (53, uniform), "collisions": (5, many_reads), "skewed": (97, skewed), "alike on all": (48, alike_on_all),
    "zero gradients": (53, uniform), "come back": (64, come_back), "every other event": (40, every_other_event),
    "nothing at times": (31, nothing_at_times), "nothing ever": (7, nothing_ever),
    "odd slots empty": (53, odd_slots_empty), "all rows": (29, all_rows), "fewer rows than ranks": (3, uniform)}

FEW_PATTERNS = ("uniform", "collisions", "come back", "every other event", "odd slots empty")


@dataclass(frozen=True)
class Trial:
    """Events on a table for each pattern."""
    home: str
    cadence: int = 2
    dtype: str = "float64"
    rounding: str = "nearest"
    patterns: tuple[str, ...] = tuple(PATTERNS)
    mistake: str = ""
    turn: int = 0                        # to try the same again

    @property
    def beta2(self) -> float:
        return BETA2[self.dtype]


@functools.cache
def reads(pattern: str, event: int, step: int, slot: int) -> np.ndarray:
    """Logical rows that a slot reads in a step."""
    rows, choose = PATTERNS[pattern]
    rng = np.random.default_rng([zlib.crc32(pattern.encode()), event, step, slot])
    return np.asarray(choose(rows, event, slot, rng)).astype(np.int32)


def gradient(trial: Trial, pattern: str, event: int, step: int, slot: int, read: np.ndarray) -> np.ndarray:
    """Of a slot's lines, which have these values. Small integers for bf16: their sums are exact in every order."""
    line, column = np.indices(read.shape)
    whole = (3 * line + 5 * step + 7 * slot + 11 * event + 2 * column) % 3 - 1
    if trial.dtype == "bfloat16":
        lines = whole + np.sign(read)
    else:
        lines = 0.37 * whole + 0.2 * read
    if pattern == "zero gradients":
        asked = reads(pattern, event, step, slot)
        lines = lines * (asked % 2)[:, None]
    return lines.astype(read.dtype)


def learning_rate(event: int) -> float:
    return 0.1 / (1 + event % 3)


MISTAKES: dict[str, Callable] = {}       # name -> (patch, optimizer, trial), from here to the end of this part


def mistake(name: str) -> Callable:
    def keep_it(change: Callable) -> Callable:
        MISTAKES[name] = change
        return change
    return keep_it


@mistake("v decayed by touch")
def by_touch(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = optimizer.rowwise_update

    def update(rows, v, last, grad, share, event, *rest):
        last.copy_(event - 1)
        right(rows, v, last, grad, share, event, *rest)
    optimizer.rowwise_update = update


@mistake("scale per rank")
def per_rank(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    slots_of_a_rank = SLOTS // optimizer.world
    optimizer.share = 1 / slots_of_a_rank


@mistake("last writer wins")
def last_wins(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    def overwrite(sums: Tensor, index: Tensor, grad: Tensor) -> None:
        for place, line in zip(index.tolist(), grad):
            sums[place] = line
    patch.setattr(tg, "add_rows", overwrite)


@mistake("one event too few")
def late_count(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = optimizer._next_update
    forgotten = set()

    def next_update(row: tg.Parameter, values: tg.Values) -> tuple:
        found = right(row, values)
        if row.label not in forgotten:
            optimizer.adam_steps[row.label] -= 1
        forgotten.add(row.label)
        return found
    optimizer._next_update = next_update


@mistake("untouched rows decayed")
def all_decayed(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.EventTable.updated

    def updated(self) -> None:
        self.home.settle()
        self.home.stored.rows.mul_(1 - 1e-3)
        right(self)
    patch.setattr(tg.EventTable, "updated", updated)


@mistake("untouched v decayed twice")
def v_decayed(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.EventTable.updated

    def updated(self) -> None:
        self.home.settle()
        self.home.stored.v.mul_(trial.beta2)
        right(self)
    patch.setattr(tg.EventTable, "updated", updated)


@mistake("write-back lost")
def lost(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.HostHome.put
    counts = {}

    def put(self, event, live) -> None:
        counts[self] = counts.get(self, 0) + 1
        if counts[self] != 3:
            right(self, event, live)
    patch.setattr(tg.HostHome, "put", put)


@mistake("upload before write-back")
def overtaken(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    """Rows go down on a thread of their own, slowly."""
    downward = ThreadPoolExecutor(1)

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        tg.HostHome._bring_down(*arguments)

    def put(self, event, live) -> None:
        self.going = [downward.submit(slowly, self, event.places, live, None)]
    patch.setattr(tg.HostHome, "put", put)


@mistake("eps inside the root")
def inside_root(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    def update(rows, v, last, grad, share, event, beta2, eps, step_size, decay, chance):
        g = grad * share
        missed = beta2**(event - last).double()
        v.copy_(v * missed + (1 - beta2) * g.square().mean(dim=1))
        last.copy_(event.expand_as(last))
        u = step_size * g / (v + eps).sqrt()[:, None]
        rows.sub_(u + rows * (u * rows > 0) * decay)
    optimizer.rowwise_update = update


OF_THE_HOST_HOME = ("write-back lost", "upload before write-back")            # the other home has nothing like it


def optimizer_of(cfg: tg.Config, fabric: tg.Fabric, trial: Trial, tables: dict[str, tg.EventTable]) -> SimpleNamespace:
    """What Optimizer._update_rowwise needs of an optimizer."""
    rowwise = {}
    for label, table in tables.items():
        rowwise[label] = tg.Parameter(label, (table.table.rows, WIDTH), ZEROS, "rowwise", True, LR_MUL, WD_MUL,
                                      (0.0, trial.beta2), rows=table.table)
    optimizer = SimpleNamespace(cfg=cfg, world=fabric.world, rowwise=rowwise, tables=tables, share=1 / SLOTS,
                                adam_steps=dict.fromkeys(tables, 0), rowwise_update=tg.rowwise_update,
                                seed=cfg.seed)
    optimizer._next_update = MethodType(tg.Optimizer._next_update, optimizer)
    return optimizer


class Driver:
    """A trial on one rank: a plan a cycle ahead as the loader makes it, and steps as the executor makes them."""

    def __init__(self, fabric: tg.Fabric, trial: Trial, patch: MonkeyPatch) -> None:
        self.fabric = fabric
        self.trial = trial
        self.slots = range(fabric.rank, SLOTS, fabric.world)
        cfg = tg.Config(**tg.PRESETS["tiny"] | dict(
            dtype=trial.dtype, model_dim=WIDTH, num_slots=SLOTS, adam_eps=EPS, adam_weight_decay=WEIGHT_DECAY,
            debug_rows=1))
        specs = []
        for pattern in trial.patterns:
            rows, _ = PATTERNS[pattern]
            specs.append(tg.Table(pattern, rows, 1, None, home=trial.home, rule="rowwise", cadence=trial.cadence,
                                  rounding=trial.rounding))
        patch.setattr(tg, "row_tables", lambda cfg: tuple(specs))
        patch.setitem(tg.HOMES, "host", EmptyingHome)
        self.planner = tg.Planner(cfg, fabric)
        self.tables = {}
        for spec in specs:
            most_tokens = SLOTS * trial.cadence * 64
            self.tables[spec.label] = tg.EventTable(spec, cfg, fabric, self.planner.sizes[spec.label], most_tokens,
                                                    tg.no_report)
        self.optimizer = optimizer_of(cfg, fabric, trial, self.tables)
        if trial.mistake:
            MISTAKES[trial.mistake](patch, self.optimizer, trial)

    def plan(self, event: int) -> tuple[dict[str, tg.TablePlan], dict[str, list[np.ndarray]]]:
        tag, plans, places = dict(purpose="train", cycle=event, tokens=SLOTS), {}, {}
        for pattern in self.trial.patterns:
            lines = []
            for step in range(self.trial.cadence):
                of_slots = [reads(pattern, event, step, slot) for slot in self.slots]
                lines.append(np.concatenate(of_slots))
            plans[pattern], places[pattern] = self.planner.plan(pattern, tag, False, lines)
        if self.fabric.world > 1:
            tg.exchange_plans(self.fabric, self.fabric.plan_group, self.trial.dtype, plans)
        for label, plan in plans.items():
            self.tables[label].prepare(plan)
            plan.change_lists(torch.as_tensor)
        return plans, places

    def step(self, pattern: str, event: int, step: int, plan: tg.TablePlan, places: np.ndarray) -> None:
        """Read rows, and add a gradient that depends on them."""
        cache, sums = self.tables[pattern].ready(plan, None)
        read = exact_array(cache[torch.from_numpy(places).long()])
        first = 0
        lines = []
        for slot in self.slots:
            count = len(reads(pattern, event, step, slot))
            lines.append(gradient(self.trial, pattern, event, step, slot, read[first:first + count]))
            first += count
        grad = torch.from_numpy(np.concatenate(lines)).to(cache.dtype)
        add_rows(sums, torch.from_numpy(places), grad)

    def event(self, event: int, ahead: Callable) -> None:
        """In the order of Optimizer.step: all gradients set off, then table by table the update and the next rows."""
        values = SimpleNamespace(adam_lr=learning_rate(event))
        returned = {label: table.return_gradients() for label, table in self.tables.items()}
        for label, (grad, wait) in returned.items():
            wait()
            tg.Optimizer._update_rowwise(self.optimizer, label, grad, values)
            self.tables[label].clear()
            if event + 1 < EVENTS:
                plans, _ = ahead()
                self.tables[label].fetch(plans[label], None)

    def run(self) -> dict[str, Any]:
        found = {pattern: dict(fetched=[]) for pattern in self.trial.patterns}
        made = {0: self.plan(0)}
        for event in range(EVENTS):
            plans, places = made[event]
            if event % 2 == 0 and event + 1 < EVENTS:
                made[event + 1] = self.plan(event + 1)        # before the first rows of this cycle were taken, too
            for pattern, plan in plans.items():
                cache, _ = self.tables[pattern].ready(plan, None)
                found[pattern]["fetched"].append((plan.rows_i_read.numpy(), exact_array(cache[:len(plan.rows_i_read)])))
            for step, pattern in itertools.product(range(self.trial.cadence), self.trial.patterns):
                self.step(pattern, event, step, plans[pattern], places[pattern][step])

            def ahead(event: int = event) -> tuple:
                if event + 1 not in made:
                    made[event + 1] = self.plan(event + 1)
                return made[event + 1]
            self.event(event, ahead)
        for pattern, table in self.tables.items():
            table.home.settle()
            touched = [places for places, _ in table.home.touched()]
            rows, v, last = map(exact_array, table.home.stored)
            found[pattern] |= dict(p=rows, v=v, last=last, touched=np.concatenate([np.zeros(0, int), *touched]))
        return found


def drive(fabric: tg.Fabric, trial: Trial) -> dict[str, Any]:
    with MonkeyPatch.context() as patch:
        return Driver(fabric, trial, patch).run()


def exact_trial(home: str, cadence: int, world: int, turn: int = 0) -> Trial:
    """In float64; what costs most has few patterns."""
    patterns = tuple(PATTERNS)
    if turn or (world > 2 and cadence > 2):
        patterns = FEW_PATTERNS
    return Trial(home, cadence, patterns=patterns, turn=turn)


def single_trial() -> Trial:
    return Trial("device", dtype="float32", patterns=FEW_PATTERNS)


def bf16_trial(home: str, rounding: str) -> Trial:
    return Trial(home, dtype="bfloat16", rounding=rounding, patterns=FEW_PATTERNS)


def trials(world: int) -> list[Trial]:
    found = [exact_trial(home, cadence, world) for home in HOMES for cadence in CADENCES]
    if world <= 2:
        found.append(single_trial())
        found += [exact_trial(home, CADENCES[0], world, turn) for home in HOMES for turn in (1, 2)]
        for home, rounding in itertools.product(HOMES, ("nearest", "stochastic")):
            found.append(bf16_trial(home, rounding))
    return found


def alone(rank: Rank) -> dict[str, Any]:
    fabric = rank.fabric()
    return {str(trial): drive(fabric, trial) for trial in trials(rank.world)}


def faulty(home: str, mistake: str) -> Trial:
    return Trial(home, patterns=("uniform", "come back", "every other event"), mistake=mistake)


def name_of(trial: Trial) -> str:
    return f"{trial.home}, {trial.mistake or 'none'}"


def mistaken_trials() -> list[Trial]:
    found = []
    for home, name in itertools.product(HOMES, ("", *MISTAKES)):
        if home == "host" or name not in OF_THE_HOST_HOME:
            found.append(faulty(home, name))
    return found


def mistakes(rank: Rank) -> dict[str, Any]:
    fabric = rank.fabric()
    return {str(trial): drive(fabric, trial) for trial in mistaken_trials()}

# ----------------------------------------------------------------------------------------------------------------------
# Whole runs
# ----------------------------------------------------------------------------------------------------------------------

PAIRS, TRIPLES, *_ = tg.NGRAM_TABLES
ALL_RUNS = dict(dtype="float64", more_bigram_rows=97, trigram_rows=301, val_every=3, num_scheduled_steps=6,
                num_extension_steps=3, max_steps=7, sample_tokens=0)
RUNS = {                                 # name -> table of n-gram tables, fields
    "residual": ((PAIRS, TRIPLES), dict(table_signs=1)),
    "streams": ((replace(PAIRS, cadence=4), replace(TRIPLES, enters=2)),
                dict(table_signs=1, row_comms="sparse_scatter", slots_per_micro_batch=2)),
    "cadence_4": ((PAIRS, replace(TRIPLES, enters=0)), dict(table_cadence=4, row_comms="dense", max_steps=9)),
}


@contextlib.contextmanager
def few_layers_and(tables: tuple[tg.Ngrams, ...]) -> Iterator[None]:
    """A small model with these tables of n-grams, and a host home that hides no fault."""
    with few_layers(), MonkeyPatch.context() as patch:
        patch.setattr(tg, "NGRAM_TABLES", tables)
        patch.setitem(tg.HOMES, "host", StagedHome)
        yield


def tiny_run(rank: Rank, name: str, home: str) -> Found:
    """Evaluations in the middle of a cycle, split and stages, several micro-batches, a last cycle that ends early."""
    tables, changes = RUNS[name]
    warm = name == "residual"
    with few_layers_and(tables):
        return whole_run(rank, warm, table_home=home, **ALL_RUNS | changes)


# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------

CASES = {                                # name -> numbers of ranks, what to do
    "alone": (WORLDS, alone),
    "mistakes": ((2,), mistakes),
    **{f"{name}_{home}": ((1, 2), functools.partial(tiny_run, name=name, home=home))
       for name in RUNS for home in HOMES},
}
SLOW_CASES = {                           # with --all
    "alone": ((SLOW_WORLD, *WORLDS), alone),
    **{f"{name}_{home}": ((1, 2, 4, 8), functools.partial(tiny_run, name=name, home=home))
       for name in RUNS for home in HOMES},
}

if __name__ == "__main__":
    place, slow = Path(sys.argv[1]).resolve(), "--all" in sys.argv[2:]
    groups = [(8,), (2, 1)]
    if slow:
        groups.append((SLOW_WORLD,))
    run_worlds(place, groups, CASES | SLOW_CASES if slow else CASES)

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
from common import plan_of, planner_of
from rank_cases import COMM_TIMEOUT, Rank, few_layers
from row_cases import exact_array, run_worlds

add_rows = tg.add_rows                   # the right one, whatever a mistake makes of the trainer's
WORLDS = (1, 2, 8)
SLOW_WORLD = 4                           # with --all
HOMES, CADENCES = ("device", "host"), (2, 4)

# ----------------------------------------------------------------------------------------------------------------------
# A host home that hides no fault
# ----------------------------------------------------------------------------------------------------------------------

def spoil(state: tg.RowState) -> None:
    """Whoever still reads it will be noticed."""
    state.rows.fill_(math.nan)
    state.v.fill_(math.nan)
    state.last.fill_(-1)


class StagedHome(tg.HostHome):
    """Every transfer is late, by chance, and goes through staging of its own, which is spoiled after it."""

    empties = False                      # rows that came up are spoiled at home, too, until they are back
    longest_delay = 0.001                # s

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.delays = random.Random(self.fabric.rank)

    def _wait_by_chance(self) -> None:
        time.sleep(self.delays.uniform(0, self.longest_delay))

    def _bring_up(self, places: Tensor) -> tuple[tg.RowState, Any]:
        self._wait_by_chance()
        staging, done = super()._bring_up(places)
        arrived = copy_of(staging)
        spoil(staging)
        if self.empties:
            self.stored.put(places, staging)
        self._wait_by_chance()
        return arrived, done

    def _bring_down(self, places: Tensor, changed: tg.RowState, computed: Any) -> None:
        self._wait_by_chance()
        staging = copy_of(changed)
        super()._bring_down(places, staging, computed)
        spoil(staging)
        self._wait_by_chance()


class EmptyingHome(StagedHome):
    empties = True


def copy_of(state: tg.RowState) -> tg.RowState:
    return tg.RowState(*(x.clone() for x in state))

# ----------------------------------------------------------------------------------------------------------------------
# Row-wise tables alone: which rows are read, and gradients that depend on what was read
# ----------------------------------------------------------------------------------------------------------------------

SLOTS, WIDTH, UPDATES = 8, 4, 7          # slots of a step, features, updates
LR_MUL, WD_MUL, WEIGHT_DECAY, EPS = 2.0, 3.0, 0.25, 1e-3
BETA2 = dict(float64=0.9, float32=0.9, bfloat16=0.5)          # 0.5: its powers are exact, in each order


def uniform(rows, update, slot, rng):
    return rng.integers(0, rows, 8)


def many_reads(rows, update, slot, rng):
    return rng.integers(0, rows, 12)


def skewed(rows, update, slot, rng):
    return np.minimum(rng.pareto(0.7, 8), rows - 1)


def alike_on_all(rows, update, slot, rng):
    return (np.arange(5) * 7 + update) % rows


def come_back(rows, update, slot, rng):
    """The first rows in two updates that lie far apart."""
    some = rng.integers(0, rows // 2, 6)
    return some if update in (0, UPDATES - 1) else rows // 2 + some


def every_other_update(rows, update, slot, rng):
    """Each update has the rows of the one before the last, and none of the last."""
    return rng.integers(0, rows // 2, 8) * 2 + update % 2


def nothing_at_times(rows, update, slot, rng):
    return rng.integers(0, rows, 8 * (update % 3 > 0))


def nothing_ever(rows, update, slot, rng):
    return []


def odd_slots_empty(rows, update, slot, rng):
    return rng.integers(0, rows, 8 * (slot % 2 == 0))


def all_rows(rows, update, slot, rng):
    return rng.permutation(rows)


PATTERNS: dict[str, tuple[int, Callable]] = {        # rows of the table; (rows, update, slot, generator) -> rows read
    "uniform": (53, uniform), "collisions": (5, many_reads), "skewed": (97, skewed), "alike on all": (48, alike_on_all),
    "zero gradients": (53, uniform), "come back": (64, come_back), "every other update": (40, every_other_update),
    "nothing at times": (31, nothing_at_times), "nothing ever": (7, nothing_ever),
    "odd slots empty": (53, odd_slots_empty), "all rows": (29, all_rows), "fewer rows than ranks": (3, uniform)}

FEW_PATTERNS = ("uniform", "collisions", "come back", "every other update", "odd slots empty")


@dataclass(frozen=True)
class Trial:
    """Updates of a table for each pattern."""
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
def reads(pattern: str, update: int, step: int, slot: int) -> np.ndarray:
    """Logical rows that a slot reads in a step."""
    rows, choose = PATTERNS[pattern]
    rng = np.random.default_rng([zlib.crc32(pattern.encode()), update, step, slot])
    return np.asarray(choose(rows, update, slot, rng)).astype(np.int32)


def gradient(trial: Trial, pattern: str, update: int, step: int, slot: int, read: np.ndarray) -> np.ndarray:
    """Of a slot's lines, which have these values. Small integers for bf16: their sums are exact in every order."""
    line, column = np.indices(read.shape)
    whole = (3 * line + 5 * step + 7 * slot + 11 * update + 2 * column) % 3 - 1
    if trial.dtype == "bfloat16":
        lines = whole + np.sign(read)
    else:
        lines = 0.37 * whole + 0.2 * read
    if pattern == "zero gradients":
        asked = reads(pattern, update, step, slot)
        lines = lines * (asked % 2)[:, None]
    return lines.astype(read.dtype)


def learning_rate(update: int) -> float:
    return 0.1 / (1 + update % 3)


MISTAKES: dict[str, Callable] = {}       # name -> (patch, optimizer, trial), from here to the end of this part


def mistake(name: str) -> Callable:
    def keep_it(change: Callable) -> Callable:
        MISTAKES[name] = change
        return change
    return keep_it


@mistake("v decayed by touch")
def by_touch(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    def update(rows, v, last, grad, grad_scale, number, *rest):
        last.copy_(number - 1)
        tg.rowwise_update(rows, v, last, grad, grad_scale, number, *rest)
    optimizer.rowwise_update = update


@mistake("scale per rank")
def per_rank(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    slots_of_a_rank = SLOTS // optimizer.fabric.world
    optimizer.grad_scale = 1 / slots_of_a_rank


@mistake("last writer wins")
def last_wins(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    def overwrite(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
        for place, line in zip(index.tolist(), grad):
            row_grads[place] = line
    patch.setattr(tg, "add_rows", overwrite)


@mistake("one update too few")
def late_count(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = optimizer.adam_numbers

    def numbers(row: tg.Parameter, values: SimpleNamespace) -> tuple:
        late = max(trial.cadence - 1, values.step - trial.cadence)
        return right(row, SimpleNamespace(adam_lr=values.adam_lr, step=late))
    optimizer.adam_numbers = numbers


@mistake("untouched rows decayed")
def all_decayed(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.RowTable.updated

    def updated(self) -> None:
        self.home.settle()
        self.home.stored.rows.mul_(1 - 1e-3)
        right(self)
    patch.setattr(tg.RowTable, "updated", updated)


@mistake("untouched v decayed twice")
def v_decayed(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.RowTable.updated

    def updated(self) -> None:
        self.home.settle()
        self.home.stored.v.mul_(trial.beta2)
        right(self)
    patch.setattr(tg.RowTable, "updated", updated)


@mistake("write-back lost")
def lost(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    right = tg.HostHome.put
    counts = {}

    def put(self, update, changed) -> None:
        counts[self] = counts.get(self, 0) + 1
        if counts[self] != 3:
            right(self, update, changed)
    patch.setattr(tg.HostHome, "put", put)


@mistake("upload before write-back")
def overtaken(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    """Rows go down on a thread of their own, slowly."""
    downward = ThreadPoolExecutor(1)

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        tg.HostHome._bring_down(*arguments)

    def put(self, update, changed) -> None:
        self.writeback = downward.submit(slowly, self, update.places, changed, None)
    patch.setattr(tg.HostHome, "put", put)


@mistake("eps inside the root")
def inside_root(patch: MonkeyPatch, optimizer: SimpleNamespace, trial: Trial) -> None:
    def update(rows, v, last, grad, grad_scale, number, beta2, eps, step_size, decay, bits):
        g = grad * grad_scale
        missed = beta2**(number - last).double()
        v.copy_(v * missed + (1 - beta2) * g.square().mean(dim=1))
        last.copy_(number.expand_as(last))
        u = step_size * g / (v + eps).sqrt()[:, None]
        rows.sub_(u + rows * (u * rows > 0) * decay)
    optimizer.rowwise_update = update


OF_THE_HOST_HOME = ("write-back lost", "upload before write-back")            # the other home has nothing like it


def optimizer_of(cfg: tg.Config, fabric: tg.Fabric) -> SimpleNamespace:
    """What TableEntry.update needs of an optimizer."""
    optimizer = SimpleNamespace(cfg=cfg, fabric=fabric, grad_scale=1 / SLOTS, seed=cfg.seed,
                                rowwise_update=tg.rowwise_update)
    optimizer.adam_numbers = MethodType(tg.Optimizer.adam_numbers, optimizer)
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
            specs.append(tg.Table(pattern, rows, 1, None, is_rowwise=True, home=trial.home, cadence=trial.cadence,
                                  rounding=trial.rounding))
        patch.setitem(tg.HOMES, "host", EmptyingHome)
        self.planner = planner_of(cfg, fabric, *specs)
        self.optimizer = optimizer_of(cfg, fabric)
        self.tables, self.entries = {}, {}
        for spec in specs:
            most_tokens = SLOTS * trial.cadence * 64
            self.tables[spec.label] = tg.RowTable(spec, cfg, fabric, None, most_tokens, tg.no_wait)
            row = tg.Parameter(spec.label, (spec.rows, WIDTH), None, "rowwise", True, LR_MUL, WD_MUL,
                               (0.0, trial.beta2), rows=spec)
            self.entries[spec.label] = tg.TableEntry(self.optimizer, row, self.tables[spec.label])
        if trial.mistake:
            MISTAKES[trial.mistake](patch, self.optimizer, trial)

    def plan(self, update: int) -> tuple[dict[str, tg.TablePlan], dict[str, list[np.ndarray]]]:
        plans, places = {}, {}
        for spec in self.planner.tables:
            lines = []
            for step in range(self.trial.cadence):
                of_slots = [reads(spec.label, update, step, slot) for slot in self.slots]
                lines.append(np.concatenate(of_slots)[None])
            plans[spec.label], places[spec.label] = plan_of(self.planner, spec, lines, cycle=update, tokens=SLOTS)
        if self.fabric.world > 1:
            tg.exchange_plans(self.fabric, self.fabric.plan_group, self.trial.dtype, plans)
        for label, plan in plans.items():
            self.tables[label].prepare(plan)
        return plans, places

    def step(self, pattern: str, update: int, step: int, plan: tg.TablePlan, places: np.ndarray) -> None:
        """Read rows, and add a gradient that depends on them."""
        cache, row_grads = self.tables[pattern].rows_for_forward(plan, None)
        places = torch.from_numpy(places[0])
        read = exact_array(cache[places.long()])
        first = 0
        lines = []
        for slot in self.slots:
            count = len(reads(pattern, update, step, slot))
            lines.append(gradient(self.trial, pattern, update, step, slot, read[first:first + count]))
            first += count
        grad = torch.from_numpy(np.concatenate(lines)).to(cache.dtype)
        add_rows(row_grads, places, grad)

    def update(self, update: int, ahead: Callable) -> None:
        """In the order of Optimizer.step: all gradients set off, then table by table the update and the next rows."""
        values = SimpleNamespace(adam_lr=learning_rate(update), step=(update + 1) * self.trial.cadence - 1)
        for entry in self.entries.values():
            entry.reduce()
        for label, entry in self.entries.items():
            entry.wait()
            entry.update(values)
            entry.clear()
            if update + 1 < UPDATES:
                plans, _ = ahead()
                self.tables[label].fetch(plans[label], None)

    def run(self) -> dict[str, Any]:
        found = {pattern: dict(fetched=[]) for pattern in self.trial.patterns}
        made = {0: self.plan(0)}
        for update in range(UPDATES):
            plans, places = made[update]
            if update % 2 == 0 and update + 1 < UPDATES:
                made[update + 1] = self.plan(update + 1)      # before the first rows of this cycle were taken, too
            for pattern, plan in plans.items():
                cache, _ = self.tables[pattern].rows_for_forward(plan, None)
                found[pattern]["fetched"].append((plan.my_rows.numpy(), exact_array(cache[:len(plan.my_rows)])))
            for step, pattern in itertools.product(range(self.trial.cadence), self.trial.patterns):
                self.step(pattern, update, step, plans[pattern], places[pattern][step])

            def ahead(update: int = update) -> tuple:
                if update + 1 not in made:
                    made[update + 1] = self.plan(update + 1)
                return made[update + 1]
            self.update(update, ahead)
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
    return Trial(home, patterns=("uniform", "come back", "every other update"), mistake=mistake)


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

PAIRS = tg.NgramTable("more_bigram_embed", 2, 97)
TRIPLES = tg.NgramTable("trigram_embed", 3, 301, signs=1)
ALL_RUNS = dict(dtype="float64", val_every=3, num_scheduled_steps=6, num_extension_steps=3, max_steps=7,
                sample_tokens=0, run_dir="unused", device="cpu", comm_timeout=COMM_TIMEOUT)
RUNS = {                                 # name -> n-gram tables, fields
    "residual": ((PAIRS, TRIPLES), dict(val_every=2)),
    "layers": ((PAIRS._replace(cadence=4), TRIPLES._replace(place=2)), dict(slots_per_micro_batch=2)),
    "cadence_4": ((PAIRS._replace(cadence=4), TRIPLES._replace(cadence=4, place=0)),
                  dict(row_comms="dense", max_steps=9)),
}


@contextlib.contextmanager
def few_layers_and_staging() -> Iterator[None]:
    """A small model, and a host home that hides no fault."""
    with few_layers(), MonkeyPatch.context() as patch:
        patch.setitem(tg.HOMES, "host", StagedHome)
        yield


def rows_and_state(executor: tg.Executor) -> dict[str, np.ndarray]:
    """What this rank keeps of n-gram tables."""
    found = {}
    for label, table in executor.tables.items():
        if table.home is not None:
            table.home.settle()
            found |= {f"{label}.{name}": exact_array(x) for name, x in table.home.stored._asdict().items()}
    return found


def tiny_run(rank: Rank, name: str, home: str) -> dict[str, Any]:
    """Evaluations in the middle of a cycle, the end of tying and stages, micro-batches, a last cycle that ends early.

    The run before it on the same executor, of other steps, is to leave no trace: a snapshot is taken, and restored.
    """
    tables, changes = RUNS[name]
    with few_layers_and_staging():
        cfg = tg.Config(**tg.PRESETS["tiny"] | ALL_RUNS | changes)
        cfg = replace(cfg, tables=tuple(table._replace(home=home) for table in tables))
        tg.check_config(cfg)
        fabric = rank.fabric(cfg)
        headers = tg.find_shards(cfg.train_files)
        cfg = tg.resolve(cfg, headers, headers)
        executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain", cfg.slots_per_micro_batch)
        validation = tg.ValidationSet(cfg, fabric, tg.find_shards(cfg.val_files), executor.exchange)
        schedule = tg.Schedule(cfg)

        def train(steps: int) -> tuple[list, list]:
            values = list(map(schedule.at, range(steps)))
            cycles = [values[first:first + schedule.cycle] for first in range(0, steps, schedule.cycle)]
            loader = tg.Loader(cfg, fabric, headers, cycles, executor.exchange_ahead)
            loader.start()
            sums, losses = [], []
            for at in values:
                if at.validate:
                    losses.append(executor.evaluate(validation.batches(at), at))
                sums.append(exact_array(tg.train_step(executor, loader, at).slot_sums))
            loader.close()
            return sums, [*losses, executor.evaluate(validation.batches(schedule.at(steps)), schedule.at(steps))]

        before = rows_and_state(executor)
        restore = executor.snapshot()
        train(schedule.cycle)
        touched = sum(x.any() for x in rows_and_state(executor).values())
        restore()
        left = [key for key, x in rows_and_state(executor).items() if x.tobytes() != before[key].tobytes()]
        sums, losses = train(schedule.end_step)
        weights = {f"weight.{label}": exact_array(p) for label, p in executor.model.named_parameters()}
        return weights | rows_and_state(executor) | dict(
            slot_sums=np.stack(sums), validation_losses=np.array(losses), touched_before=touched, left=left)


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

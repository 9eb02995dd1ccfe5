"""Tables of n-grams under the row-wise rule: against a naive dense model, at any number of ranks, from either home.

What ranks do stands before the tests of it; they are forks (ranks.py) that meet over gloo. The host home of these runs
is the trainer's with staging that is late by chance and spoiled.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
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

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import exact_array, fabric, few_layers, fill_randomly, plan_of, planner_of, preset
from common import executor as make_executor
from pytest import MonkeyPatch
from ranks import COMM_TIMEOUT, Rank, Ranks
from reference import NaiveTable, ngram_rows, physical, put_together
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg

SLOW = pytest.param(4, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, SLOW, 8], ids="W{}".format)
add_rows = tg.add_rows                   # the right one, whatever a mistake makes of the trainer's
HOMES, CADENCES = ("device", "host"), (2, 4)
homes = pytest.mark.parametrize("home", HOMES)
# Relative and absolute. In bf16 bits are equal but where p - u cancels: torch's square root of f32 is not numpy's.
TOLERANCE = dict(float64=(1e-12, 1e-12), float32=(2e-5, 2e-5), bfloat16=(0.0, 1e-7))
STATE = ("p", "v", "last", "touched")

# ---- A host home that hides no fault ---------------------------------------------------------------------------------

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

# ---- Row-wise tables alone: which rows are read, and gradients that depend on what was read --------------------------

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
            row = tg.Parameter(spec.label, (spec.rows, WIDTH), None, "rowwise", LR_MUL, WD_MUL,
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


def naive_table(trial: Trial, pattern: str) -> NaiveTable:
    rows, _ = PATTERNS[pattern]
    if trial.dtype == "bfloat16":
        return NaiveTable(pattern, rows, WIDTH, trial.beta2, EPS, np.float32, bf16=trial.rounding)
    return NaiveTable(pattern, rows, WIDTH, trial.beta2, EPS, np.dtype(trial.dtype).type)


@functools.cache
def naive_run(trial: Trial, pattern: str, world: int) -> tuple[NaiveTable, list[np.ndarray]]:
    """The table after the last update, and its weights before each."""
    table = naive_table(trial, pattern)
    before = []
    for update in range(UPDATES):
        before.append(table.p.copy())
        asked = np.zeros(table.rows, bool)
        sums = [np.zeros_like(table.p) for _ in range(world)]
        for step, slot in itertools.product(range(trial.cadence), range(SLOTS)):
            read = reads(pattern, update, step, slot)
            asked[read] = True
            lines = gradient(trial, pattern, update, step, slot, table.p[read])
            np.add.at(sums[slot % world], read, lines)
        if trial.dtype == "bfloat16":
            assert np.abs(sums).sum(axis=0).max() <= 256, "bf16 would round"
        lr = LR_MUL * learning_rate(update)
        table.update(asked, sums, SLOTS, lr, WEIGHT_DECAY * WD_MUL)
    return table, before


def of_all(found: list[dict], pattern: str, name: str) -> np.ndarray:
    """In logical order, of all ranks."""
    rows, _ = PATTERNS[pattern]
    return put_together([of_rank[pattern][name] for of_rank in found], rows)


def differences(trial: Trial, found: list[dict]) -> list[str]:
    """Where a trial is not what the naive model says. found: by rank."""
    world, wrong = len(found), []
    for pattern in trial.patterns:
        naive, before = naive_run(trial, pattern, world)
        relative, absolute = TOLERANCE[trial.dtype]

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.shape != want.shape or not np.allclose(x, want, rtol=relative, atol=absolute):
                wrong.append(f"{pattern}: {name}")

        for rank, update in itertools.product(range(world), range(UPDATES)):
            listed, rows = found[rank][pattern]["fetched"][update]
            size = -(-naive.rows // world)
            logical = listed % size * world + listed // size
            compare(f"rows fetched for update {update + 1}", rows, before[update][logical])
        last = of_all(found, pattern, "last")
        caught_up = trial.beta2 ** (naive.updates - last)      # what v has missed since
        compare("weights", of_all(found, pattern, "p"), naive.p)
        compare("last updates", last, naive.last)
        compare("second moments", of_all(found, pattern, "v") * caught_up, naive.v)
        for rank in range(world):
            mine = naive.last[rank::world]
            compare("touched rows", found[rank][pattern]["touched"], np.flatnonzero(mine))
    return wrong


def trial_of(ranks: Ranks, world: int, trial: Trial, case: Callable = alone) -> list[dict]:
    return [of_rank[str(trial)] for of_rank in ranks(world, case)]


def assert_same_bits(one: list[dict], other: list[dict]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for pattern, name in itertools.product(mine, STATE):
            assert mine[pattern][name].tobytes() == theirs[pattern][name].tobytes(), f"{pattern}: {name}"


@worlds
@homes
@pytest.mark.parametrize("cadence", CADENCES)
def test_updates_are_those_of_the_dense_model(ranks, world, home, cadence):
    trial = exact_trial(home, cadence, world)
    assert differences(trial, trial_of(ranks, world, trial)) == []


@worlds
@pytest.mark.parametrize("cadence", CADENCES)
def test_homes_have_the_same_bits(ranks, world, cadence):
    """What comes from the host is late, passes through staging that is spoiled, and is nowhere else meanwhile."""
    device, host = (trial_of(ranks, world, exact_trial(home, cadence, world)) for home in HOMES)
    assert_same_bits(device, host)


@pytest.mark.parametrize("world", (1, 2))
@homes
def test_updates_repeat_to_the_bit(ranks, world, home):
    first, second = (trial_of(ranks, world, exact_trial(home, 2, world, turn)) for turn in (1, 2))
    assert_same_bits(first, second)


@pytest.mark.parametrize("world", (1, 2))
def test_updates_in_single_precision(ranks, world):
    trial = single_trial()
    assert differences(trial, trial_of(ranks, world, trial)) == []


@homes
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
def test_updates_in_bf16_to_the_bit(ranks, home, rounding):
    """All sums are exact here, so that one rank and two ranks have the same bits."""
    trial = bf16_trial(home, rounding)
    one, two = (trial_of(ranks, world, trial) for world in (1, 2))
    assert differences(trial, one) == []
    assert differences(trial, two) == []
    for pattern, name in itertools.product(trial.patterns, ("p", "v", "last")):
        assert of_all(one, pattern, name).tobytes() == of_all(two, pattern, name).tobytes(), f"{pattern}: {name}"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
def test_a_compiled_update_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend):
    """bf16, rounded by chance: whole numbers that wrap, in what a compiler makes of them.

    Squares of these gradients sum up exactly, in whatever order.
    """
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=graphs, dynamic=False, fullgraph=True)
    number, step_size, decay = torch.tensor(7, dtype=torch.int32), tg.cpu_scalar(0.3), tg.cpu_scalar(0.01)
    counts = []
    for count in (37, 90):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, 32, generator=generator)
        grad = torch.randint(-8, 9, (count, 32), generator=generator) / 8
        last = torch.randint(0, 7, (count,), generator=generator, dtype=torch.int32)
        bits = tg.row_bits(0, "a_embed", torch.arange(count), number)
        results = []
        for update in (tg.rowwise_update, compiled):
            mine = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone(), bits.clone()]
            for x in mine:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *live, g, b = mine
            update(*live, g, 1 / 8, number, 0.95, 1e-10, step_size, decay, b)
            results.append(live)
        eager, by_graph = results
        assert all(x.equal(y) for x, y in zip(eager, by_graph)) and not eager[0].equal(rows.bfloat16())
        counts.append(graphs.frame_count)                     # a trace that begins again counts, too
    first, second = counts
    assert second == first > 0


def test_roundings_differ():
    """Or the test above could not tell them apart."""
    nearest, by_chance = (naive_run(bf16_trial("device", rounding), "uniform", 1)[0].p
                          for rounding in ("nearest", "stochastic"))
    assert not np.array_equal(nearest, by_chance)


@pytest.mark.parametrize("trial", mistaken_trials(), ids=name_of)
def test_mistakes_are_noticed(ranks, trial):
    wrong = differences(trial, trial_of(ranks, 2, trial, mistakes))
    assert (wrong != []) == (trial.mistake != "")


# ---- Whole runs ------------------------------------------------------------------------------------------------------

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


all_runs = pytest.mark.parametrize("name", RUNS)
run_worlds = pytest.mark.parametrize("world", [1, 2, SLOW, pytest.param(8, marks=pytest.mark.all)], ids="W{}".format)


@all_runs
@run_worlds
def test_runs_from_either_home_have_the_same_bits(ranks, name, world):
    device, host = (ranks(world, tiny_run, name=name, home=home) for home in HOMES)
    for mine, theirs in zip(device, host, strict=True):
        assert mine.keys() == theirs.keys()
        for key, x in mine.items():
            if isinstance(x, np.ndarray):
                assert x.tobytes() == theirs[key].tobytes(), key


@all_runs
@run_worlds
def test_runs_are_the_same_at_any_number_of_ranks(ranks, name, world):
    alone, = ranks(1, tiny_run, name=name, home="device")
    by_rank = ranks(world, tiny_run, name=name, home="device")
    for found in by_rank:
        np.testing.assert_allclose(found["validation_losses"], alone["validation_losses"], rtol=1e-9)
    for rank, found in enumerate(by_rank):
        np.testing.assert_allclose(found["slot_sums"], alone["slot_sums"][:, rank::world], rtol=1e-9)
    for line, part in itertools.product((PAIRS, TRIPLES), ("rows", "v", "last")):
        shards = [found[f"{line.label}.{part}"] for found in by_rank]
        want = alone[f"{line.label}.{part}"]
        np.testing.assert_allclose(put_together(shards, line.rows), want, rtol=1e-8, atol=1e-10)
        assert want.any()


def test_cadences_of_the_runs(ranks):
    """Updates are counted by table; the last cycle, which is not whole, has none."""
    counts = {}
    for name in RUNS:
        alone, = ranks(1, tiny_run, name=name, home="device")
        counts[name] = [alone[f"{line.label}.last"].max() for line in (PAIRS, TRIPLES)]
    assert counts == dict(residual=[3, 3], layers=[1, 3], cadence_4=[2, 2])


@pytest.mark.parametrize("world", (1, 2))
@homes
def test_a_run_that_is_taken_back_leaves_no_row_touched(ranks, world, home):
    for found in ranks(world, tiny_run, name="residual", home=home):
        assert found["touched_before"] and found["left"] == []


# ---- Ids, signs, plans ----------------------------------------------------------------------------------------------

MOST_ROWS = 2**31 - 1
EXTREME_TOKENS = (0, 1, 2, 50_256, 65_534, 2**16, 2**31 - 1, -1, -2**31, 2**30, 48271)


@pytest.mark.parametrize("rows", (2, 3, 97, 10**8, MOST_ROWS))
@pytest.mark.parametrize("order", tg.NGRAM_FACTORS)
def test_ids_are_those_of_the_reference(order, rows):
    """Also where a product passes 32 bits, and where the xor is negative."""
    tokens = np.random.default_rng(rows).choice(EXTREME_TOKENS, (3, 40)).astype(np.int32)
    table = tg.row_tables(preset(tables=(tg.NgramTable("a_embed", order, rows, signs=1),)))[-1]
    factors_and_counts = zip(tg.NGRAM_FACTORS[order], (rows, tg.SIGN_VECTORS + 1))
    for found, (factors, count) in zip((table.ids, table.signs), factors_and_counts):
        want = [ngram_rows(slot, factors, count) for slot in tokens]
        np.testing.assert_array_equal(found(tokens), want)
        assert found(tokens).dtype == np.int32
        assert (found(tokens)[:, :order - 1] == count - 1).all()


def test_no_factor_is_shared():
    """Signs by the hash of the row would be alike for n-grams that share a row."""
    factors = [factor for of_rows, of_signs in tg.NGRAM_FACTORS.values() for factor in (*of_rows, *of_signs)]
    assert len(set(factors)) == len(factors)
    assert all(factor % 2 == 1 for factor in factors)


def test_vectors_of_signs():
    signs = tg.sign_vectors(24)
    assert signs.shape == (tg.SIGN_VECTORS + 1, 24)
    assert signs.abs().eq(1).all() and signs[-1].eq(1).all()
    assert abs(float(signs[:-1].double().mean())) < 0.01
    assert len(signs[:-1].unique(dim=0)) > 0.99 * tg.SIGN_VECTORS
    assert signs.equal(tg.sign_vectors(24)), "drawn from a constant seed"


@pytest.mark.parametrize("values", ([], [5], [0, 0, 0], [2**31 - 1, 0, 2**31, 2**32 - 1, 0],
                                    np.random.default_rng(0).integers(0, 300, 1000)), ids=len)
def test_distinct_values(values):
    """Physical rows of the largest table pass 2^31 where a number of ranks does not divide it."""
    values = np.asarray(values, np.int64)
    found, which = tg.distinct_with_places(values)
    want, inverse = np.unique(values, return_inverse=True)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(which, inverse)
    assert found.dtype == which.dtype == np.int64


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("is_rowwise", (False, True), ids=("dense Adam", "row-wise"))
def test_plans_of_the_largest_table(is_rowwise, world):
    """Nothing is as large as the table; where the last shards are not full, physical rows pass 2^31."""
    table = tg.Table("large", MOST_ROWS, 1, None, is_rowwise=is_rowwise)
    planner = planner_of(preset(), fabric(1 % world, world), table)
    some = np.random.default_rng(world).integers(0, MOST_ROWS, 200)
    ends = np.arange(MOST_ROWS - 2 * world, MOST_ROWS)
    read = np.concatenate((some, ends, some[:50], [0])).astype(np.int32)
    plan, (places,) = plan_of(planner, table, [read[None]])
    found_at = [physical(int(row), world, MOST_ROWS) for row in read]
    assert plan.my_rows.tolist() == sorted(set(found_at))
    found = places[0] if world == 1 and not is_rowwise else plan.my_rows[places[0]]
    assert found.tolist() == found_at
    owners = np.bincount([row % world for row in set(read.tolist())], minlength=world)
    assert plan.send_counts == owners.tolist()
    assert plan.reads == len(read)


# ---- Homes ----------------------------------------------------------------------------------------------------------

def host_home(kind: type = tg.HostHome, **changes) -> tg.HostHome:
    """Of ten rows of three f64 numbers."""
    cfg = replace(preset(), dtype="float64", model_dim=3, **changes)
    return kind(tg.Table("a", 10, 1, None, is_rowwise=True, home="host"), cfg, fabric())


def test_only_fresh_rows_come_up_however_far_ahead_updates_are_prepared():
    """A table with a cadence of 2 in a cycle of 4 has two updates prepared at once."""
    home = host_home()
    requests = [np.array(rows) for rows in ([5], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 9], [9, 0, 3])]
    row_bytes = 3 * 8 + 8 + 4
    came_up = []
    updates = [home.prepare(requests[0])]
    for number in range(len(requests)):
        if number % 2 == 0:                                   # both of a cycle, before the last of this is taken
            updates += map(home.prepare, requests[number + 1:number + 3])
        update = updates[number]
        live = home.take(update)
        live.rows.add_(1)
        home.put(update, live)
        home.settle()
        came_up.append(home.traffic["bytes_up"] // row_bytes)
        home.traffic["bytes_up"] = 0
    assert home.stored.rows[:, 0].tolist() == [2, 2, 3, 4, 2, 1, 0, 0, 0, 2]
    assert sum(came_up) == 1 + 3 + 1 + 1 + 1 + 1


def test_HostHome__after_a_reset_updates_that_were_prepared_find_their_rows():
    """As for a step that is repeated after drop_gradients."""
    home = host_home()
    first, second = (home.prepare(np.array(rows)) for rows in ([1, 2], [2, 3]))
    home.take(first)
    home.invalidate()
    live = home.take(first)
    third = home.prepare(np.array([2, 3]))                    # as the first after the reset, with no rows to keep
    live.rows.add_(1)
    home.put(first, live)
    assert home.take(third).rows[:, 0].tolist() == [1, 0]
    assert home.take(second).rows[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("seen_by", ["settle", "put"])
def test_HostHome__rows_that_did_not_get_home_are_missed_next(seen_by):
    class Failing(tg.HostHome):
        def _bring_down(self, places, changed, computed):
            raise MemoryError("no staging")

    home = host_home(Failing)
    first, second = (home.prepare(np.array(rows)) for rows in ([1, 2], [3, 4]))
    live = home.take(first)
    home.put(first, live)
    with pytest.raises(MemoryError):
        if seen_by == "put":
            home.put(second, live)
        else:
            home.settle()


def test_whoever_reads_a_home_waits_for_rows_on_their_way_there():
    class Slow(tg.HostHome):
        def _bring_down(self, places, changed, computed):
            time.sleep(0.1)
            super()._bring_down(places, changed, computed)

    def rows_of(home):
        return home.read(torch.tensor([1, 2]))

    def touched_of(home):
        return next(home.touched())[1].rows

    for read in (rows_of, touched_of):
        home = host_home(Slow)
        update = home.prepare(np.array([1, 2]))
        live = home.take(update)
        live.rows.add_(1)
        live.last.fill_(1)
        home.put(update, live)
        assert read(home).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_rows_may_come_up_late_while_other_ranks_compile():
    """After rows that go down only when the GPU has heard from the others."""
    class Late(tg.HostHome):
        def _bring_up(self, places):
            time.sleep(0.2)
            return super()._bring_up(places)

    home = host_home(Late, comm_timeout=0.1)
    update = home.prepare(np.array([5]))
    assert len(home.take(update).rows) == 1


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a table takes its whole memory")
@homes
def test_a_table_of_a_hundred_million_rows_takes_memory_for_those_it_has_touched(home):
    """Beyond 2^31 elements, too; an update, a look at what was touched and a reset."""
    rows, width = 10**8, 24
    assert rows * width > 2**31
    before = resident_mib()
    table = tg.Table("a", rows, 1, None, is_rowwise=True, home=home)
    kept = tg.HOMES[home](table, replace(preset(), model_dim=width), fabric())
    requests = [np.array(places) for places in ([0, 5, rows // 2, rows - 2], [5, rows - 2, rows - 1])]
    updates = list(map(kept.prepare, requests))
    for number, update in enumerate(updates, 1):
        live = kept.take(update)
        live.rows.add_(number)
        live.v.add_(0.5)
        live.last.fill_(number)
        kept.put(update, live)
    pieces = list(kept.touched())
    places = torch.cat([places_of_piece for places_of_piece, _ in pieces])
    live = tg.RowState(*(torch.cat(parts) for parts in zip(*(state for _, state in pieces))))
    assert places.tolist() == [0, 5, rows // 2, rows - 2, rows - 1]
    assert live.rows.unique(dim=1).flatten().tolist() == [1, 3, 1, 3, 2]
    assert live.v.tolist() == [0.5, 1, 0.5, 1, 0.5]
    assert live.last.tolist() == [1, 2, 1, 2, 2]
    assert kept.read(torch.tensor([rows - 2, 6])).sum(dim=1).tolist() == [3 * width, 0]

    kept.load([(places[2:], live.at(torch.tensor([2, 3, 4])))])
    found = torch.cat([places for places, _ in kept.touched()])
    assert found.tolist() == places[2:].tolist()
    assert not kept.read(torch.tensor([0, 5])).any()
    taken = kept.take(kept.prepare(np.array([5, rows - 1])))          # two that the last update has had
    assert taken.rows.sum(dim=1).tolist() == [0, 2 * width]
    assert resident_mib() < before + 64


def trained(executor: tg.Executor, steps: int) -> dict[str, bytes]:
    """These steps from the start of the data, and then every byte that a run may change."""
    cfg = executor.cfg
    plan = [tg.Schedule(cfg).at(step) for step in range(steps)]
    cycles = [plan[first:first + 4] for first in range(0, steps, 4)]
    loader = tg.Loader(cfg, executor.fabric, tg.find_shards(cfg.train_files), cycles, executor.exchange_ahead)
    loader.start()
    for values in plan:
        tg.train_step(executor, loader, values)
    loader.close()
    return all_bytes(executor)


def all_bytes(executor: tg.Executor) -> dict[str, bytes]:
    arrays = {name: exact_array(x) for name, x in executor.state_tensors().items()} | rows_and_state(executor)
    grads = {f"{label}.grads": exact_array(table.row_grads) for label, table in executor.tables.items()}
    return {name: x.tobytes() for name, x in (arrays | grads).items()}


def tables_executor(home: str, **changes) -> tg.Executor:
    """Two tables, the second of many rows, with updates after 2 and after 4 steps."""
    many = TRIPLES._replace(rows=200_000, home=home, cadence=4, rounding="stochastic")
    cfg = preset(tables=(PAIRS._replace(home=home), many), num_scheduled_steps=6, **changes)
    return tg.Executor(cfg, fabric(), tg.attention_reference, "plain")


@homes
def test_a_snapshot_has_touched_rows_and_gives_every_bit_back(home):
    with few_layers_and_staging():
        executor = tables_executor(home)
        restore_start = executor.snapshot()
        start = all_bytes(executor)
        once = trained(executor, 5)                           # in the middle of a cycle
        (places, state), = executor.tables["trigram_embed"].home.touched()
        assert 0 < len(places) == len(state.rows) <= 4 * executor.cfg.stages[1].batch_tokens
        restore = executor.snapshot()

        restore()
        before = all_bytes(executor)
        again = trained(executor, 4)
        restore()
        assert all_bytes(executor) == before
        assert trained(executor, 4) == again

        restore_start()
        assert all_bytes(executor) == start and not list(executor.tables["trigram_embed"].home.touched())
        assert trained(executor, 5) == once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@homes
def test_the_second_of_two_runs_is_a_run_of_its_own(home, dtype):
    """In bf16 rows are rounded by bits of the second run's seed."""
    with few_layers_and_staging():
        both, alone = (tables_executor(home, dtype=dtype, seed=seed) for seed in (4, 5))
        restore = both.snapshot()
        first = trained(both, 6)
        restore()
        both.set_seed(5)
        second = trained(both, 6)
        assert second == trained(alone, 6)
        assert first["trigram_embed.rows"] != second["trigram_embed.rows"]


def test_traffic_is_what_training_moved_and_nothing_of_what_was_taken_back():
    """A run that ends inside a cycle, at one rank: each update brings its rows down, and the first brings all up. The
    rows of the last cycle, which has no update, are not counted."""
    accounts = []
    with few_layers_and_staging():
        cfg = preset(tables=(TRIPLES._replace(home="host"),))
        executor = tg.Executor(cfg, fabric(), tg.attention_reference, "plain",
                               report=lambda **line: accounts.append(line))
        restore = executor.snapshot()
        trained(executor, 4)
        restore()
        accounts.clear()
        trained(executor, 5)
        moved = executor.traffic()[TRIPLES.label]
    lines = [line for line in accounts if line["table"] == TRIPLES.label]
    row_bytes = cfg.model_dim * 4 + 4 + 4
    trained_rows = [line["rows"] for line in lines]
    assert len(lines) == 2 and {line["purpose"] for line in lines} == {"train"}
    assert moved["bytes_down"] == row_bytes * sum(trained_rows)
    assert row_bytes * trained_rows[0] <= moved["bytes_up"] < row_bytes * sum(trained_rows)


# ---- The model ------------------------------------------------------------------------------------------------------

GATED = 2                                # a paired layer that has a value table: its gate does not look at the row
TABLE_ROWS = 61
SMALL_TABLE = TRIPLES._replace(rows=TABLE_ROWS, signs=0)


def one_batch(executor: tg.Executor) -> tuple[tg.Batch, tg.Values]:
    cfg = executor.cfg
    values = tg.Schedule(cfg).at(0)
    loader = tg.Loader(cfg, executor.fabric, tg.find_shards(cfg.train_files), [[values]], executor.exchange_ahead)
    loader.start()
    batch = loader.next(values)
    loader.close()
    return batch, values


def scalars(model: tg.GPT, name: str) -> Tensor:
    """The view of packed scalars by their name."""
    return dict(zip(model.scalar_sizes, model.scalars.data.split(list(model.scalar_sizes.values()))))[name]


def dense_rows(batch: tg.Batch, weights: Tensor, signs: int) -> Tensor:
    """What the table adds at each position, for autograd."""
    rows = np.stack([ngram_rows(slot, (17351, 60961, 45259), TABLE_ROWS) for slot in batch.tokens.numpy()])
    added = F.embedding(torch.from_numpy(rows), weights)
    if signs:
        vectors = [ngram_rows(slot, (58699, 39779, 26801), 8193) for slot in batch.tokens.numpy()]
        added = added * tg.sign_vectors(weights.shape[1])[np.stack(vectors)]
    return added


def model_and_direct(monkeypatch: pytest.MonkeyPatch, line: tg.NgramTable) -> tuple[list, list]:
    """Losses, gradients of the table and of the head, and a validation loss: by the trainer, and by recipe A with the
    table's rows added to its bigram rows, or to a layer's value rows."""
    executor = make_executor(preset(tables=(line,), dtype="float64"))
    fill_randomly(executor.model)
    if line.place is None:                                    # the weight in each layer that recipe A's bigrams have
        scalars(executor.model, line.label).copy_(scalars(executor.model, "bigram"))
    else:                                                     # the gates of that layer's value table
        gates = executor.model.ve_gate_bank.data
        gates[-1] = gates[tg.LAYERS[GATED].value]
    table = executor.tables[line.label]
    weights = torch.randn(table.home.stored.rows.shape, generator=torch.Generator().manual_seed(1)).double()
    table.home.stored.rows.copy_(weights)
    batch, values = one_batch(executor)
    found = executor.forward_backward(batch, values).slot_sums
    grad = torch.zeros_like(weights)
    rows = batch.plans[line.label].my_rows
    grad[rows] = table.row_grads[:len(rows)]
    loss = torch.tensor(executor.evaluate([batch], values))

    plain = make_executor(preset(dtype="float64"))
    for label, p in plain.model.named_parameters():           # without what is appended for the table
        p.data.copy_(executor.model.get_parameter(label).detach()[:len(p)])
    weights.requires_grad_()
    label, place = ("bigram_embed", 0) if line.place is None else ("value_embed", tg.LAYERS[GATED].value)
    rows_of = tg.GPT.rows_of

    def with_the_table(self, of_table, batch, row_buffers):
        read = rows_of(self, of_table, batch, row_buffers)
        if of_table == label:
            read[place] = read[place] + dense_rows(batch, weights, line.signs)
        return read
    monkeypatch.setattr(tg.GPT, "rows_of", with_the_table)
    batch, values = one_batch(plain)
    direct = plain.forward_backward(batch, values).slot_sums
    direct_loss = torch.tensor(plain.evaluate([batch], values))
    return ([found, grad, executor.model.lm_head.main_grad, loss],
            [direct, weights.grad, plain.model.lm_head.main_grad, direct_loss])


@pytest.mark.parametrize("place", (None, GATED), ids=("residual stream", "value stream"))
@pytest.mark.parametrize("signs", (0, 1), ids=("no signs", "signs"))
def test_the_model_reads_the_table_as_a_dense_one(monkeypatch, place, signs):
    found, direct = model_and_direct(monkeypatch, SMALL_TABLE._replace(place=place, signs=signs))
    for x, want in zip(found, direct):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)


def test_signs_from_the_hash_of_the_row_are_noticed(monkeypatch):
    factors, _ = tg.NGRAM_FACTORS[3]
    monkeypatch.setitem(tg.NGRAM_FACTORS, 3, (factors, factors))
    found, direct = model_and_direct(monkeypatch, SMALL_TABLE._replace(signs=1))
    assert not torch.allclose(found[0], direct[0], rtol=1e-6)


@pytest.mark.parametrize("place", (None, GATED), ids=("residual stream", "value stream"))
def test_signs_that_evaluation_leaves_out_are_noticed(monkeypatch, place):
    inputs = tg.GPT.inputs

    def without_signs(self, *arguments):
        ngrams = self.ngrams
        if not torch.is_grad_enabled():
            self.ngrams = [line._replace(signs=0) for line in ngrams]
        try:
            return inputs(self, *arguments)
        finally:
            self.ngrams = ngrams
    monkeypatch.setattr(tg.GPT, "inputs", without_signs)
    *found, loss = model_and_direct(monkeypatch, SMALL_TABLE._replace(place=place, signs=1))[0]
    monkeypatch.undo()
    *direct, direct_loss = model_and_direct(monkeypatch, SMALL_TABLE._replace(place=place, signs=1))[1]
    assert torch.allclose(found[0], direct[0], rtol=1e-10) and not torch.allclose(loss, direct_loss, rtol=1e-6)

"""Tables of n-grams under the row-wise rule: against a naive dense model, at any number of ranks, from either home.

table_cases.py is started once and runs every case in real processes over gloo; tables_reference.py knows no ranks, no
plans and no homes. The host home of these runs is the trainer's with staging that is late by chance and spoiled.
"""
from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import rows_reference
import table_cases as cases
from table_cases import CADENCES, HOMES, SLOTS, WIDTH, Trial
from tables_reference import NaiveTable
from test_rows import Results, start

import train_gpt as tg

SLOW = pytest.param(cases.SLOW_WORLD, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, SLOW, 8], ids="W{}".format)
homes = pytest.mark.parametrize("home", HOMES)
# Relative and absolute. In bf16 bits are equal but where p - u cancels: torch's square root of f32 is not numpy's.
TOLERANCE = dict(float64=(1e-12, 1e-12), float32=(2e-5, 2e-5), bfloat16=(0.0, 1e-7))
STATE = ("p", "v", "last", "touched")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    folder = tmp_path_factory.mktemp("tables")
    start(folder, *["--all"] * request.config.getoption("--all"), script="table_cases.py")
    return Results(folder)


# ---- EventTable alone -----------------------------------------------------------------------------------------------

def naive_table(trial: Trial, pattern: str) -> NaiveTable:
    rows, _ = cases.PATTERNS[pattern]
    if trial.dtype == "bfloat16":
        return NaiveTable(pattern, rows, WIDTH, trial.beta2, cases.EPS, np.float32, bf16=trial.rounding)
    return NaiveTable(pattern, rows, WIDTH, trial.beta2, cases.EPS, np.dtype(trial.dtype).type)


@functools.cache
def naive_run(trial: Trial, pattern: str, world: int) -> tuple[NaiveTable, list[np.ndarray]]:
    """The table behind the last event, and its weights before each."""
    table = naive_table(trial, pattern)
    before = []
    for event in range(cases.EVENTS):
        before.append(table.p.copy())
        asked = np.zeros(table.rows, bool)
        sums = [np.zeros_like(table.p) for _ in range(world)]
        for step, slot in itertools.product(range(trial.cadence), range(SLOTS)):
            read = cases.reads(pattern, event, step, slot)
            asked[read] = True
            lines = cases.gradient(trial, pattern, event, step, slot, table.p[read])
            np.add.at(sums[slot % world], read, lines)
        if trial.dtype == "bfloat16":
            assert np.abs(sums).sum(axis=0).max() <= 256, "bf16 would round"
        lr = cases.LR_MUL * cases.learning_rate(event)
        table.event(asked, sums, SLOTS, lr, cases.WEIGHT_DECAY * cases.WD_MUL)
    return table, before


def whole(found: list[dict], pattern: str, name: str) -> np.ndarray:
    """In logical order, of all ranks."""
    rows, _ = cases.PATTERNS[pattern]
    return rows_reference.whole([of_rank[pattern][name] for of_rank in found], rows)


def differences(trial: Trial, found: list[dict]) -> list[str]:
    """Where a trial is not what the naive model says. found: by rank."""
    world, wrong = len(found), []
    for pattern in trial.patterns:
        naive, before = naive_run(trial, pattern, world)
        relative, absolute = TOLERANCE[trial.dtype]

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.shape != want.shape or not np.allclose(x, want, rtol=relative, atol=absolute):
                wrong.append(f"{pattern}: {name}")

        for rank, event in itertools.product(range(world), range(cases.EVENTS)):
            listed, rows = found[rank][pattern]["fetched"][event]
            size = -(-naive.rows // world)
            compare(f"rows fetched for event {event + 1}", rows, before[event][listed % size * world + listed // size])
        last = whole(found, pattern, "last")
        caught_up = trial.beta2 ** (naive.events - last)      # what v has missed since
        compare("weights", whole(found, pattern, "p"), naive.p)
        compare("last events", last, naive.last)
        compare("second moments", whole(found, pattern, "v") * caught_up, naive.v)
        for rank in range(world):
            mine = naive.last[rank::world]
            compare("touched rows", found[rank][pattern]["touched"], np.flatnonzero(mine))
    return wrong


def trial_of(results: Results, world: int, trial: Trial, case: str = "alone") -> list[dict]:
    return [of_rank[str(trial)] for of_rank in results.ranks(case, world)]


def assert_same_bits(one: list[dict], other: list[dict]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for pattern, name in itertools.product(mine, STATE):
            assert mine[pattern][name].tobytes() == theirs[pattern][name].tobytes(), f"{pattern}: {name}"


@worlds
@homes
@pytest.mark.parametrize("cadence", CADENCES)
def test_events_are_those_of_the_dense_model(results, world, home, cadence):
    trial = cases.exact_trial(home, cadence, world)
    assert differences(trial, trial_of(results, world, trial)) == []


@worlds
@pytest.mark.parametrize("cadence", CADENCES)
def test_homes_have_the_same_bits(results, world, cadence):
    """Though what comes from the host is late, passes through spoiled staging, and is nowhere else meanwhile."""
    device, host = (trial_of(results, world, cases.exact_trial(home, cadence, world)) for home in HOMES)
    assert_same_bits(device, host)


@pytest.mark.parametrize("world", (1, 2))
@homes
def test_events_repeat_to_the_bit(results, world, home):
    first, second = (trial_of(results, world, cases.exact_trial(home, 2, world, turn)) for turn in (1, 2))
    assert_same_bits(first, second)


@pytest.mark.parametrize("world", (1, 2))
def test_events_in_single_precision(results, world):
    trial = cases.single_trial()
    assert differences(trial, trial_of(results, world, trial)) == []


@homes
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
def test_events_in_bf16_to_the_bit(results, home, rounding):
    """All sums are exact here, so that one rank and two ranks have the same bits."""
    trial = cases.bf16_trial(home, rounding)
    one, two = (trial_of(results, world, trial) for world in (1, 2))
    assert differences(trial, one) == []
    assert differences(trial, two) == []
    for pattern, name in itertools.product(trial.patterns, ("p", "v", "last")):
        assert whole(one, pattern, name).tobytes() == whole(two, pattern, name).tobytes(), f"{pattern}: {name}"


def test_roundings_differ():
    """Or the test above could not tell them apart."""
    nearest, by_chance = (naive_run(cases.bf16_trial("device", rounding), "uniform", 1)[0].p
                          for rounding in ("nearest", "stochastic"))
    assert not np.array_equal(nearest, by_chance)


@pytest.mark.parametrize("trial", cases.mistaken_trials(), ids=lambda trial: f"{trial.home}, {trial.mistake or 'none'}")
def test_mistakes_are_noticed(results, trial):
    wrong = differences(trial, trial_of(results, 2, trial, "mistakes"))
    assert (wrong != []) == (trial.mistake != "")


# ---- Whole runs -----------------------------------------------------------------------------------------------------

runs = pytest.mark.parametrize("name", cases.RUNS)
run_worlds = pytest.mark.parametrize("world", [1, 2, SLOW, pytest.param(8, marks=pytest.mark.all)], ids="W{}".format)
ROWS_OF_RUNS = dict(more_bigram_embed=cases.ALL_RUNS["more_bigram_rows"], trigram_embed=cases.ALL_RUNS["trigram_rows"])


@runs
@run_worlds
def test_runs_from_either_home_have_the_same_bits(results, name, world):
    device, host = (results.ranks(f"{name}_{home}", world) for home in HOMES)
    for mine, theirs in zip(device, host, strict=True):
        assert mine.keys() == theirs.keys()
        for key, x in mine.items():
            if isinstance(x, np.ndarray):
                assert x.tobytes() == theirs[key].tobytes(), key
        assert mine["final"] == theirs["final"]
        assert mine["adam_steps"] == theirs["adam_steps"]


@runs
@run_worlds
def test_runs_are_the_same_at_any_number_of_ranks(results, name, world):
    alone, = results.ranks(f"{name}_device", 1)
    ranks = results.ranks(f"{name}_device", world)
    assert alone["validation_steps"] == ranks[0]["validation_steps"]
    np.testing.assert_allclose(ranks[0]["validation_losses"], alone["validation_losses"], rtol=1e-9)
    for label, rows in ROWS_OF_RUNS.items():
        for part in ("", ".v", ".last"):
            slices = [found[f"slice.{label}{part}"] for found in ranks]
            want = alone[f"slice.{label}{part}"]
            np.testing.assert_allclose(rows_reference.whole(slices, rows), want, rtol=1e-8, atol=1e-10)
        assert alone[f"slice.{label}"].any()


def test_cadences_of_the_runs(results):
    """Events are counted by table; the last cycle, which is not whole, has none."""
    counts = {}
    for name in cases.RUNS:
        alone, = results.ranks(f"{name}_device", 1)
        counts[name] = [alone["adam_steps"][label] for label in ROWS_OF_RUNS]
    assert counts == dict(residual=[3, 3], streams=[1, 3], cadence_4=[2, 2])


@pytest.mark.parametrize("world", (1, 2))
@homes
def test_warm_up_leaves_no_row_touched(results, world, home):
    for found in results.ranks(f"residual_{home}", world):
        assert found["warm_up_steps"] > 0 and found["left_by_warm_up"] == []
        for label in ROWS_OF_RUNS:
            assert not found[f"initial.{label}"].any() and not found[f"initial.{label}.last"].any()

"""Tables of n-grams under the row-wise rule: against a naive dense model, at any number of ranks, from either home.

table_cases.py is started once and runs every case in real processes over gloo; tables_reference.py knows no ranks, no
plans and no homes. The host home of these runs is the trainer's with staging that is late by chance and spoiled.
"""
from __future__ import annotations

import functools
import itertools
import json
import mmap
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rows_reference
import table_cases as cases
import torch
import torch.nn.functional as F
from common import RECIPE_PARAMETERS, fabric, fill_randomly, losses, preset, run
from rank_cases import state_bytes
from table_cases import CADENCES, HOMES, PAIRS, SLOTS, TRIPLES, WIDTH, Trial, few_layers_and
from tables_reference import NaiveTable, ngram_rows
from test_rows import Results, start
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
def test_a_compiled_event_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend):
    """bf16, rounded by chance: whole numbers that wrap, in what a compiler makes of them.

    Squares of these gradients sum up exactly, in whatever order.
    """
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=graphs, dynamic=False, fullgraph=True)
    event, step_size, decay = torch.tensor(7, dtype=torch.int32), tg.cpu_scalar(0.3), tg.cpu_scalar(0.01)
    counts = []
    for count in (37, 90):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, 32, generator=generator)
        grad = torch.randint(-8, 9, (count, 32), generator=generator) / 8
        last = torch.randint(0, 7, (count,), generator=generator, dtype=torch.int32)
        chance = tg.chance_of_rows(tg.signed_crc32("seed"), torch.arange(count), event)
        results = []
        for update in (tg.rowwise_update, compiled):
            mine = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone(), chance.clone()]
            for x in mine:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *live, g, c = mine
            update(*live, g, 1 / 8, event, 0.95, 1e-10, step_size, decay, c)
            results.append(live)
        eager, by_graph = results
        assert all(x.equal(y) for x, y in zip(eager, by_graph)) and not eager[0].equal(rows.bfloat16())
        counts.append(graphs.frame_count)                     # a trace that begins again counts, too
    first, second = counts
    assert second == first > 0


def test_roundings_differ():
    """Or the test above could not tell them apart."""
    nearest, by_chance = (naive_run(cases.bf16_trial("device", rounding), "uniform", 1)[0].p
                          for rounding in ("nearest", "stochastic"))
    assert not np.array_equal(nearest, by_chance)


@pytest.mark.parametrize("trial", cases.mistaken_trials(), ids=cases.name_of)
def test_mistakes_are_noticed(results, trial):
    wrong = differences(trial, trial_of(results, 2, trial, "mistakes"))
    assert (wrong != []) == (trial.mistake != "")


# ---- Whole runs -----------------------------------------------------------------------------------------------------

all_runs = pytest.mark.parametrize("name", cases.RUNS)
run_worlds = pytest.mark.parametrize("world", [1, 2, SLOW, pytest.param(8, marks=pytest.mark.all)], ids="W{}".format)
ROWS_OF_RUNS = dict(more_bigram_embed=cases.ALL_RUNS["more_bigram_rows"],
                    trigram_embed=cases.ALL_RUNS["trigram_rows"])


@all_runs
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


@all_runs
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


# ---- Ids, signs, plans ----------------------------------------------------------------------------------------------

MOST_ROWS = 2**31 - 1
EXTREME_TOKENS = (0, 1, 2, 50_256, 65_534, 2**16, 2**31 - 1, -1, -2**31, 2**30, 48271)


@pytest.mark.parametrize("rows", (2, 3, 97, 10**8, MOST_ROWS))
@pytest.mark.parametrize("line", (PAIRS, TRIPLES), ids=("pairs", "triples"))
def test_ids_are_those_of_the_reference(line, rows):
    """Also where a product passes 32 bits, and where the xor is negative."""
    tokens = np.random.default_rng(rows).choice(EXTREME_TOKENS, (3, 40)).astype(np.int32)
    table = tg.ngram_table(replace(line, rows=rows, signs=1))
    for found, factors, count in ((table.ids, line.hash, rows), (table.signs, line.sign_hash, tg.SIGN_VECTORS + 1)):
        want = [ngram_rows(slot, factors, count) for slot in tokens]
        np.testing.assert_array_equal(found(tokens), want)
        assert found(tokens).dtype == np.int32
        assert (found(tokens)[:, :len(factors) - 1] == count - 1).all()


def test_no_factor_is_shared():
    """Signs by the hash of the row would be alike for n-grams that share a row."""
    factors = [factor for line in tg.NGRAM_TABLES for factor in (*line.hash, *line.sign_hash)]
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


@pytest.mark.parametrize("world", (1, 5, 8))
def test_plans_of_the_largest_table(monkeypatch, world):
    """Nothing is as large as the table; places are right behind 2^31 elements."""
    table = tg.Table("large", MOST_ROWS, 1, None, rule="rowwise")
    monkeypatch.setattr(tg, "row_tables", lambda cfg: (table,))
    planner = tg.Planner(preset(), fabric(1 % world, world))
    some = np.random.default_rng(world).integers(0, MOST_ROWS, 200)
    ends = np.arange(MOST_ROWS - 2 * world, MOST_ROWS)
    read = np.concatenate((some, ends, some[:50], [0])).astype(np.int32)
    plan, (places,) = planner.plan("large", dict(purpose="test", cycle=0, tokens=0), False, [read])
    physical = [rows_reference.physical(int(row), world, MOST_ROWS) for row in read]
    assert plan.rows_i_read.tolist() == sorted(set(physical))
    assert plan.rows_i_read[places].tolist() == physical
    owners = np.bincount([row % world for row in set(read.tolist())], minlength=world)
    assert plan.counts_by_owner == owners.tolist()
    assert plan.reads == len(read)


# ---- Homes ----------------------------------------------------------------------------------------------------------

def events_of(asked: Iterable[list[int]]) -> list[tg.EventRows]:
    """One after the other."""
    made = [None]
    for rows in asked:
        made.append(tg.event_rows(np.array(rows), made[-1], fabric()))
    return made[1:]


def test_only_fresh_rows_come_up_however_far_ahead_events_are_prepared():
    """A table with a cadence of 2 in a cycle of 4 has two events prepared at once."""
    home = tg.HostHome((10, 3), torch.float64, preset(), fabric())
    events = events_of([[5], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 9], [9, 0, 3]])
    row_bytes = 3 * 8 + 8 + 4
    came_up = []
    home.prepare(events[0])
    for number, event in enumerate(events):
        if number % 2 == 0:                                   # both of a cycle, before the last of this is taken
            for prepared in events[number + 1:number + 3]:
                home.prepare(prepared)
        live = home.take(event)
        live.rows.add_(1)
        home.put(event, live)
        home.settle()
        came_up.append(home.moved()["bytes_up"] // row_bytes)
    assert home.stored.rows[:, 0].tolist() == [2, 2, 3, 4, 2, 1, 0, 0, 0, 2]
    assert sum(came_up) == 1 + 3 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("seen_by", ["settle", "put"])
def test_rows_that_did_not_get_home_are_missed_however_late_they_fail(seen_by):
    """The next rows have been put by then."""
    both_are_put = threading.Event()
    gone = []

    class FailingOnce(tg.HostHome):
        def _bring_down(self, places, live, computed):
            both_are_put.wait()
            gone.append(places)
            if len(gone) == 1:
                raise MemoryError("no staging")
            super()._bring_down(places, live, computed)

    home = FailingOnce((10, 3), torch.float64, preset(), fabric())
    first, second = events_of([[1, 2], [3, 4]])
    live = home.take(first)
    home.put(first, live)
    home.put(second, live)
    both_are_put.set()
    with pytest.raises(MemoryError):
        if seen_by == "put":
            home.mover.submit(int).result()                   # behind both
            home.put(second, live)
        else:
            home.settle()


def test_rows_may_come_up_late_while_other_ranks_compile():
    """Behind rows that go down only when the GPU has heard from the others."""
    class Late(tg.HostHome):
        def _bring_up(self, places):
            time.sleep(0.2)
            return super()._bring_up(places)

    home = Late((10, 3), torch.float64, replace(preset(), comm_timeout=0.1), fabric())
    event, = events_of([[5]])
    assert len(home.take(event).rows) == 1


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a table takes its whole memory")
@homes
def test_a_table_of_a_hundred_million_rows_takes_memory_for_those_it_has_touched(home):
    """Behind 2^31 elements, too; an event, a look at what was touched and a reset."""
    rows, width = 10**8, 24
    assert rows * width > 2**31
    before = resident_mib()
    kept = tg.HOMES[home]((rows, width), torch.float32, preset(), fabric())
    events = events_of([[0, 5, rows // 2, rows - 2], [5, rows - 2, rows - 1]])
    for event in events:
        kept.prepare(event)
    for number, event in enumerate(events, 1):
        live = kept.take(event)
        live.rows.add_(number)
        live.v.add_(0.5)
        live.last.fill_(number)
        kept.put(event, live)
    pieces = list(kept.touched())
    places = torch.cat([places_of_piece for places_of_piece, _ in pieces])
    live = tg.Live(*(torch.cat(parts) for parts in zip(*(live_of_piece for _, live_of_piece in pieces))))
    assert places.tolist() == [0, 5, rows // 2, rows - 2, rows - 1]
    assert live.rows.unique(dim=1).flatten().tolist() == [1, 3, 1, 3, 2]
    assert live.v.tolist() == [0.5, 1, 0.5, 1, 0.5]
    assert live.last.tolist() == [1, 2, 1, 2, 2]
    assert kept.read(torch.tensor([rows - 2, 6])).sum(dim=1).tolist() == [3 * width, 0]

    kept.load([(places[2:], live.at(torch.tensor([2, 3, 4])))])
    found = torch.cat(list(kept.touched_places()))
    assert found.tolist() == places[2:].tolist()
    assert not kept.read(torch.tensor([0, 5])).any()
    assert resident_mib() < before + 64


def trained(executor: tg.Executor, steps: int) -> bytes:
    """These steps from the start of the data, and then every byte that a run may change."""
    cfg = executor.cfg
    plan = [tg.Schedule(cfg).at(step) for step in range(steps)]
    loader = tg.Loader(cfg, executor.fabric, tg.find_shards(cfg.train_files), plan, executor.exchange_ahead)
    loader.start()
    for values in plan:
        executor.forward_backward(loader.next(values), values)
        executor.optim_step(values, loader.plans_ahead)
    loader.close()
    return state_bytes(executor)


@homes
def test_a_snapshot_has_touched_rows_and_gives_every_bit_back(home):
    with few_layers_and((PAIRS, TRIPLES)):
        cfg = preset(trigram_rows=200_000, table_home=home, num_scheduled_steps=6)
        executor = tg.Executor(cfg, fabric(), tg.attention_reference, "plain")
        untouched = executor.snapshot()
        once = trained(executor, 3)                           # in the middle of a cycle
        saved = executor.snapshot()
        (places, live), = saved.touched["trigram_embed"]
        asked_at_most = 2 * cfg.stages[0].batch_tokens
        assert 0 < len(places) == len(live.rows) <= asked_at_most
        assert untouched.touched["trigram_embed"] == []

        executor.restore(saved)
        before = state_bytes(executor)
        again = trained(executor, 4)
        executor.restore(saved)
        assert state_bytes(executor) == before
        assert trained(executor, 4) == again

        executor.restore(untouched)
        assert executor.touched_rows() == dict(trigram_embed=0)
        assert trained(executor, 3) == once


@pytest.mark.parametrize("how", [(), ("--dtype=bfloat16", "--table_rounding=stochastic")], ids=["f32", "by chance"])
@homes
def test_the_second_of_two_runs_is_a_run_of_its_own(tmp_path, home, how):
    flags = (f"--table_home={home}", "--trigram_rows=301", "--table_cadence=4", "--max_steps=5", "--sample_tokens=0",
             "--val_every=3", *how)
    with few_layers_and((PAIRS, TRIPLES)):
        both = run(tmp_path / "both", "--runs=2", "--seed=4", *flags)
        alone = run(tmp_path / "alone", "--seed=5", *flags)
    assert (both.status, alone.status) == (0, 0), both.err + alone.err
    assert losses(both.folder / "seed_5") == losses(alone.folder)
    assert losses(both.folder / "seed_4") != losses(alone.folder)


def test_the_ledger_has_what_training_moved_and_nothing_of_the_warm_up(tmp_path):
    """A run that ends inside a cycle, at one rank: each event brings its rows down, and the first brings all up."""
    flags = ("--table_home=host", "--table_cadence=2", "--max_steps=5", "--sample_tokens=0", "--val_every=3")
    with few_layers_and((PAIRS, replace(TRIPLES, rows=301))):
        assert run(tmp_path, *flags).status == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    plans = [line for line in log if line["type"] == "comms" and line["table"] == TRIPLES.label]
    trained = [line["rows"] for line in plans if line["purpose"] == "train"]
    row_bytes = preset().model_dim * 4 + 4 + 4
    moved = log[-1]["comms"][TRIPLES.label]
    assert len(trained) == 3
    assert moved["bytes_down"] == row_bytes * sum(trained[:2])
    assert row_bytes * trained[0] <= moved["bytes_up"] < row_bytes * sum(trained)


# ---- The model ------------------------------------------------------------------------------------------------------

GATED = 2                                # a paired layer that has a value table: its gate does not look at the row
TABLE_ROWS = 61


def one_batch(executor: tg.Executor) -> tuple[tg.Batch, tg.Values]:
    cfg = executor.cfg
    values = tg.Schedule(cfg).at(0)
    loader = tg.Loader(cfg, executor.fabric, tg.find_shards(cfg.train_files), [values], executor.exchange_ahead)
    loader.start()
    batch = loader.next(values)
    loader.close()
    return batch, values


def with_the_weights_of(executor: tg.Executor, other: tg.Executor) -> None:
    """Both without the table's own scalars and gate, which are appended."""
    for label, p in executor.model.named_parameters():
        whole_of_other = other.model.get_parameter(label).detach()
        p.data.copy_(whole_of_other[:len(p)])


def alike_shares(executor: tg.Executor) -> None:
    """The table enters each layer with the weight that recipe A's bigrams, or its value table there, have."""
    model = executor.model
    scalars = dict(zip(model.scalar_sizes, model.scalars.split(list(model.scalar_sizes.values()))))
    if any(line.enters is not None for line in executor.model.ngrams):
        gates = executor.model.ve_gate_bank.data
        gates[-1] = gates[tg.LAYERS[GATED].value]
    else:
        scalars["trigram_embed"].data.copy_(scalars["bigram"].data)


def dense_rows(batch: tg.Batch, weights: Tensor, signs: int) -> Tensor:
    """What the table adds at each position, for autograd."""
    rows = np.stack([ngram_rows(slot, (17351, 60961, 45259), TABLE_ROWS) for slot in batch.tokens.numpy()])
    added = F.embedding(torch.from_numpy(rows), weights)
    if signs:
        vectors = [ngram_rows(slot, (58699, 39779, 26801), 8193) for slot in batch.tokens.numpy()]
        added = added * tg.sign_vectors(weights.shape[1])[np.stack(vectors)]
    return added


def model_and_direct(monkeypatch: pytest.MonkeyPatch, line: tg.Ngrams, signs: int) -> tuple[list, list]:
    """Losses, gradient of the table and of the head: by the trainer, and by recipe A with the table's rows added to
    its bigram rows, or to a layer's value rows."""
    fields = dict(dtype="float64", table_signs=signs)
    monkeypatch.setattr(tg, "NGRAM_TABLES", (line,))
    executor = tg.Executor(preset(trigram_rows=TABLE_ROWS, **fields), fabric(), tg.attention_reference, "plain")
    fill_randomly(executor.model)
    alike_shares(executor)
    table = executor.tables["trigram_embed"]
    weights = torch.randn(table.home.stored.rows.shape, generator=torch.Generator().manual_seed(1)).double()
    table.home.stored.rows.copy_(weights)
    batch, values = one_batch(executor)
    found = executor.forward_backward(batch, values).slot_sums
    grad = torch.zeros_like(weights)
    rows = batch.plans["trigram_embed"].rows_i_read
    grad[rows] = table.sums[:len(rows)]

    plain = tg.Executor(preset(**fields), fabric(), tg.attention_reference, "plain")
    with_the_weights_of(plain, executor)
    weights.requires_grad_()
    enters = ("value_embed", tg.LAYERS[GATED].value) if line.enters else ("bigram_embed", 0)
    rows_of = tg.GPT.rows_of

    def with_the_table(self, label, index, sources):
        read = rows_of(self, label, index, sources)
        if label == enters[0]:
            read[enters[1]] = read[enters[1]] + dense_rows(batch, weights, signs)
        return read
    monkeypatch.setattr(tg.GPT, "rows_of", with_the_table)
    batch, values = one_batch(plain)
    direct = plain.forward_backward(batch, values).slot_sums
    return ([found, grad, executor.model.lm_head.main_grad], [direct, weights.grad, plain.model.lm_head.main_grad])


@pytest.mark.parametrize("enters", (None, GATED), ids=("residual stream", "value stream"))
@pytest.mark.parametrize("signs", (0, 1), ids=("no signs", "signs"))
def test_the_model_reads_the_table_as_a_dense_one(monkeypatch, enters, signs):
    found, direct = model_and_direct(monkeypatch, replace(TRIPLES, enters=enters), signs)
    for x, want in zip(found, direct):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)


def test_signs_from_the_hash_of_the_row_are_noticed(monkeypatch):
    line = replace(TRIPLES, sign_hash=TRIPLES.hash)
    found, direct = model_and_direct(monkeypatch, line, signs=1)
    assert not torch.allclose(found[0], direct[0], rtol=1e-6)


@pytest.mark.parametrize("name", ("record", "pocket", "tiny"))
def test_without_tables_there_is_recipe_a(name):
    table = tg.parameter_table(preset(name, vocab_size=50_257, document_start=50_256))
    recipe = {label: optimizer for label, _, optimizer, *_ in RECIPE_PARAMETERS}
    assert {row.label: row.optimizer for row in table} == recipe
    shapes = {row.label: row.shape for row in table}
    assert shapes["scalars"] == (47,)
    assert shapes["ve_gate_bank"][0] == tg.NUM_VALUE_TABLES


def test_another_table_is_one_line(monkeypatch, tmp_path):
    """Header, exchange, events and traffic know it from there."""
    line = tg.Ngrams("fivegram_embed", (17351, 60961, 45259, 52361, 39373), rows=211)
    monkeypatch.setattr(tg, "NGRAM_TABLES", (*tg.NGRAM_TABLES, line))
    flags = ("--trigram_rows=97", "--sample_tokens=0", "--checkpoint_every=2")
    done = run(tmp_path / "whole", *flags, "--max_steps=4", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    header, = done.of("header")
    result, = done.of("result")
    assert header["table_rows"]["fivegram_embed"] == 211
    assert header["table_bytes"] == 4 * 32 * sum(header["table_rows"].values())
    assert header["table_home"]["fivegram_embed"] == "device"
    assert 100 < result["touched_rows"]["fivegram_embed"] <= 211
    assert "fivegram_embed" in result["comms"]

    first = run(tmp_path / "first", *flags, "--max_steps=3")
    rest = run(tmp_path / "rest", f"--resume={first.folder}", "--max_steps=4")
    assert (first.status, rest.status) == (0, 0), first.err + rest.err
    assert losses(rest.folder) == losses(done.folder)
    assert run(tmp_path / "sample", f"--sample={tmp_path / 'save'}", "--sample_tokens=4").status == 0
    for folder in (done.folder, tmp_path / "save"):
        assert any(folder.rglob("rows-*-fivegram_embed-*.pt"))
    larger = preset(fourgram_rows=1000)
    with_it, without = (tg.host_bytes(cfg, fabric()) for cfg in (larger, replace(larger, fourgram_rows=0)))
    assert without > 0 and with_it > without, "its 211 rows are in the estimate without a flag"

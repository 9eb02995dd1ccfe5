"""Tables of n-grams under the row-wise rule: against a naive dense model, at any number of ranks, from either home.

The functions with an argument `rank` are what each of W ranks does; the tests after them look at what the ranks found.
The host home of these runs is the trainer's with staging that is late by chance and spoiled.
"""
from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import exact_array, fabric, few_layers, fill_randomly, preset, started_loader, tensors_of
from common import executor as make_executor
from pytest import MonkeyPatch
from ranks import Rank
from reference import ngram_rows, put_together
from row_cycles import PAIRS, PATTERNS, TRIPLES, StagedHome, Trial, differences, drive, naive_run
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg

SLOW = pytest.param(4, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, SLOW, 8], ids="W{}".format)
HOMES = ("device", "host")
homes = pytest.mark.parametrize("home", HOMES)
cadences = pytest.mark.parametrize("cadence", [2, 4])


# ---- Row-wise tables alone -------------------------------------------------------------------------------------------
SIZES = (53, 97, 31, 40, 29, 3)          # rows; the last are fewer than ranks
FEW = (("uniform", 53), ("uniform", 5), ("come back", 64), ("every other update", 40), ("odd slots empty", 53))

def trial_of(home: str, cadence: int, world: int) -> Trial:
    """Return a trial in float64; what costs most has few patterns."""
    tables = tuple((pattern, SIZES[k % len(SIZES)]) for k, pattern in enumerate(PATTERNS))
    return Trial(FEW if world > 2 and cadence > 2 else tables, home=home, cadence=cadence)

def rounded(home: str, rounding: str) -> Trial:
    return Trial(FEW, home=home, dtype="bfloat16", rounding=rounding)

def updates(rank: Rank, trial: Trial) -> dict[str, dict]:
    return drive(rank.fabric(), trial)

@worlds
@homes
@cadences
def test_updates__are_those_of_the_dense_model(ranks, world, home, cadence):
    trial = trial_of(home, cadence, world)
    assert differences(trial, ranks(world, updates, trial=trial)) == []

@worlds
@cadences
def test_HOMES__have_the_same_bits(ranks, world, cadence):
    """What comes from the host is late, passes through staging that is spoiled, and is nowhere else meanwhile."""
    device, host = (ranks(world, updates, trial=trial_of(home, cadence, world)) for home in HOMES)
    for mine, theirs in zip(device, host, strict=True):
        for label, name in itertools.product(mine, ("rows", "v", "last", "touched")):
            assert mine[label][name].tobytes() == theirs[label][name].tobytes(), f"{label}: {name}"

@homes
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_updates__in_bf16_to_the_bit(ranks, home, rounding):
    """All sums are exact here, so that one rank and two ranks have the same bits; but the two roundings have not."""
    trial = rounded(home, rounding)
    one, two = (ranks(world, updates, trial=trial) for world in (1, 2))
    assert differences(trial, one) == []
    for (label, alone), name in itertools.product(one[0].items(), ("rows", "v", "last")):
        rows = len(alone["last"])
        together = put_together([of_rank[label][name] for of_rank in two], rows)
        assert alone[name].tobytes() == together.tobytes(), f"{label}: {name}"
    kinds = [naive_run(rounded(home, kind), "uniform", 53)[1]["rows"] for kind in ("nearest", "stochastic")]
    assert not np.array_equal(*kinds)

@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
def test_rowwise_update__compiled_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend):
    """bf16, rounded by chance: whole numbers that wrap, in what a compiler makes of them. Squares of these gradients
    sum up exactly, in whatever order."""
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=graphs, dynamic=False, fullgraph=True)
    number = torch.tensor(7, dtype=torch.int32)
    counts = []
    for count in (37, 90):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, 32, generator=generator)
        grad = torch.randint(-8, 9, (count, 32), generator=generator) / 8
        last = torch.randint(0, 7, (count,), generator=generator, dtype=torch.int32)
        bits = tg.row_bits(0, "a_embed", torch.arange(count), number)
        results = []
        for update in (tg.rowwise_update, compiled):
            given = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone(), bits.clone()]
            for x in given:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *live, g, b = given
            update(*live, g, 1 / 8, number, 0.95, 1e-10, tg.cpu_scalar(0.3), tg.cpu_scalar(0.01), b)
            results.append(live)
        eager, by_graph = results
        assert all(x.equal(y) for x, y in zip(eager, by_graph)) and not eager[0].equal(rows.bfloat16())
        counts.append(graphs.frame_count)                     # a trace that begins again counts, too
    assert counts[1] == counts[0] > 0


# ---- Homes ----------------------------------------------------------------------------------------------------------
def host_home(kind: type = tg.HostHome, **changes) -> tg.HostHome:
    """Make a home of ten rows of three f64 numbers."""
    cfg = replace(preset(), dtype="float64", model_dim=3, **changes)
    return kind(tg.Table("a", 10, 1, None, is_rowwise=True, home="host"), cfg, fabric())

def prepared(home: tg.HostHome, *requests: list[int]) -> list[tg.RowUpdate]:
    return [home.prepare(np.array(rows)) for rows in requests]

def test_prepare__only_fresh_rows_come_up_however_far_ahead():
    """A table with a cadence of 2 in a cycle of 4 has two updates prepared at once."""
    home = host_home()
    requests = [[5], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 9], [9, 0, 3]]
    updates = prepared(home, requests[0])
    came_up = 0
    for number in range(len(requests)):
        if number % 2 == 0:                                   # both of a cycle, before the last of this is taken
            updates += prepared(home, *requests[number + 1:number + 3])
        live = home.take(updates[number])
        live.rows.add_(1)
        home.put(updates[number], live)
        home.settle()
        came_up += home.traffic["bytes_up"]
        home.traffic["bytes_up"] = 0
    assert home.stored.rows[:, 0].tolist() == [2, 2, 3, 4, 2, 1, 0, 0, 0, 2]
    assert came_up == (1 + 3 + 1 + 1 + 1 + 1) * (3 * 8 + 8 + 4)

def test_invalidate__updates_that_were_prepared_before_find_their_rows():
    """A step that is repeated after drop_gradients takes them again."""
    home = host_home()
    first, second = prepared(home, [1, 2], [2, 3])
    home.take(first)
    home.invalidate()
    live = home.take(first)
    third, = prepared(home, [2, 3])                           # as the first after the reset, with no rows to keep
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
    first, second = prepared(home, [1, 2], [3, 4])
    live = home.take(first)
    home.put(first, live)
    with pytest.raises(MemoryError):
        if seen_by == "put":
            home.put(second, live)
        else:
            home.settle()

class Slow(tg.HostHome):
    def _bring_up(self, places):
        time.sleep(0.2)
        return super()._bring_up(places)

    def _bring_down(self, places, changed, computed):
        time.sleep(0.1)
        super()._bring_down(places, changed, computed)

@pytest.mark.parametrize("reader", ["read", "touched"])
def test_HostHome__whoever_reads_it_waits_for_rows_on_their_way_there(reader):
    home = host_home(Slow)
    update, = prepared(home, [1, 2])
    live = home.take(update)
    live.rows.add_(1)
    live.last.fill_(1)
    home.put(update, live)
    rows = home.read(torch.tensor([1, 2])) if reader == "read" else next(home.touched())[1].rows
    assert rows.tolist() == [[1, 1, 1], [1, 1, 1]]

def test_take__rows_may_come_up_late_while_other_ranks_compile(monkeypatch):
    """They follow rows that go down only when the GPU has heard from the others."""
    monkeypatch.setattr(tg, "LONG_PATIENCE", 10 * tg.LONG_PATIENCE)           # for a busy machine
    home = host_home(Slow, comm_timeout=0.1)
    update, = prepared(home, [5])
    assert len(home.take(update).rows) == 1

def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a table takes its whole memory")
@homes
def test_HOMES__a_hundred_million_rows_take_memory_for_those_that_are_touched(home):
    """Beyond 2^31 elements, too; updates, a look at what was touched and a load."""
    rows, width = 10**8, 24
    before = resident_mib()
    table = tg.Table("a", rows, 1, None, is_rowwise=True, home=home)
    kept = tg.HOMES[home](table, replace(preset(), model_dim=width), fabric())
    updates = prepared(kept, [0, 5, rows // 2, rows - 2], [5, rows - 2, rows - 1])
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

    kept.load([(places[2:], live.at(torch.tensor([2, 3, 4])))])
    found = torch.cat([places for places, _ in kept.touched()])
    assert found.tolist() == places[2:].tolist()
    assert not kept.read(torch.tensor([0, 5])).any()
    update, = prepared(kept, [5, rows - 1])                   # two that the last update has had
    assert kept.take(update).rows.sum(dim=1).tolist() == [0, 2 * width]
    assert resident_mib() < before + 64


# ---- Snapshots of executors ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def few_layers_and_staging() -> Iterator[None]:
    """A small model, and a host home that hides no fault."""
    with few_layers(), MonkeyPatch.context() as patch:
        patch.setitem(tg.HOMES, "host", StagedHome)
        yield

def trained(executor: tg.Executor, steps: int) -> dict[str, bytes]:
    with started_loader(executor.cfg, executor.fabric, steps, executor.exchange_ahead) as (loader, plan):
        for values in plan:
            tg.train_step(executor, loader, values)
    return all_bytes(executor)

def all_bytes(executor: tg.Executor) -> dict[str, bytes]:
    return {name: exact_array(x).tobytes() for name, x in tensors_of(executor).items()}

def tables_executor(home: str, **changes) -> tg.Executor:
    """Two tables, the second of many rows, with updates after 2 and after 4 steps."""
    many = TRIPLES._replace(rows=200_000, home=home, cadence=4, rounding="stochastic")
    cfg = preset(tables=(PAIRS._replace(home=home), many), num_scheduled_steps=6, **changes)
    return tg.Executor(cfg, fabric(), tg.attention_reference, "plain")

@homes
def test_snapshot__has_touched_rows_and_restore_gives_every_bit_back(home):
    with few_layers_and_staging():
        executor = tables_executor(home)
        restore_start = executor.snapshot()
        start = all_bytes(executor)
        once = trained(executor, 5)                           # in the middle of a cycle
        (places, state), = executor.tables["trigram_embed"].home.touched()
        assert 0 < len(places) == len(state.rows) <= 4 * max(stage.batch_tokens for stage in executor.cfg.stages)
        restore = executor.snapshot()

        restore()
        before = all_bytes(executor)
        again = trained(executor, 5)
        assert again["trigram_embed.rows"] != before["trigram_embed.rows"]
        restore()
        assert all_bytes(executor) == before
        assert trained(executor, 5) == again

        restore_start()
        assert all_bytes(executor) == start and not list(executor.tables["trigram_embed"].home.touched())
        assert trained(executor, 5) == once
        # Of this run alone: the rows of an update come up and go down, and those of the cycle that has begun come up,
        # as far as they are not on the device yet.
        traffic = executor.traffic()["trigram_embed"]
        begun, = executor.tables["trigram_embed"].pending
        row_bytes = 4 * executor.cfg.model_dim + 4 + 4
        rows = len(np.union1d(places, begun.my_rows)), len(places)
        assert rows[0] > rows[1]
        moved = [row_bytes * count * (home == "host") for count in rows]
        assert [traffic["bytes_up"], traffic["bytes_down"]] == moved

@homes
def test_set_seed__the_second_of_two_runs_is_a_run_of_its_own(home):
    """Rows are rounded by bits of the second run's seed."""
    with few_layers_and_staging():
        both, alone = (tables_executor(home, dtype="bfloat16", seed=seed) for seed in (4, 5))
        restore = both.snapshot()
        first = trained(both, 6)
        restore()
        both.set_seed(5)
        second = trained(both, 6)
        assert second == trained(alone, 6)
        assert first["trigram_embed.rows"] != second["trigram_embed.rows"]


# ---- The model ------------------------------------------------------------------------------------------------------
def test_sign_vectors__are_signs_from_a_constant_seed():
    signs = tg.sign_vectors(24)
    assert signs.shape == (tg.SIGN_VECTORS + 1, 24)
    assert signs.abs().eq(1).all() and signs[-1].eq(1).all()
    assert abs(float(signs[:-1].double().mean())) < 0.01
    assert len(signs[:-1].unique(dim=0)) > 0.99 * tg.SIGN_VECTORS
    assert signs.equal(tg.sign_vectors(24))

GATED = 2                                # a paired layer that has a value table: its gate does not look at the row
TABLE_ROWS = 61
TRIGRAM_FACTORS, TRIGRAM_SIGN_FACTORS = (17351, 60961, 45259), (58699, 39779, 26801)

def dense_rows(tokens: np.ndarray, weights: Tensor, signs: int) -> Tensor:
    """Return what the table adds at each position, for autograd."""
    added = F.embedding(torch.from_numpy(np.stack([ngram_rows(x, TRIGRAM_FACTORS, TABLE_ROWS) for x in tokens])),
                        weights)
    if signs:
        vectors = [ngram_rows(x, TRIGRAM_SIGN_FACTORS, tg.SIGN_VECTORS + 1) for x in tokens]
        added = added * tg.sign_vectors(weights.shape[1])[np.stack(vectors)]
    return added

def losses_and_gradients(executor: tg.Executor) -> tuple[list[Tensor], tg.Batch]:
    """Slot sums, the gradient of the head, and a validation loss on the first batch; and that batch."""
    cfg = executor.cfg
    values = tg.Schedule(cfg).at(0)
    loader = tg.Loader(cfg, executor.fabric, tg.find_shards(cfg.train_files), [[values]], executor.exchange_ahead)
    with contextlib.closing(loader):
        loader.start()
        batch = loader.next(values)
    sums = executor.forward_backward(batch, values).slot_sums
    loss = torch.tensor(executor.evaluate([batch], values))
    return [sums, executor.model.lm_head.main_grad, loss], batch

@pytest.mark.parametrize("place", [None, GATED], ids=["residual stream", "value stream"])
@pytest.mark.parametrize("signs", [0, 1], ids=["no signs", "signs"])
def test_GPT__reads_the_table_as_a_dense_one(monkeypatch, place, signs):
    """The same comes of recipe A with the table's rows added to its bigram rows, or to a layer's value rows."""
    line = tg.NgramTable("trigram_embed", 3, TABLE_ROWS, signs=signs, place=place)
    executor = make_executor(preset(tables=(line,), dtype="float64"))
    fill_randomly(executor.model)
    label, at = "value_embed", tg.LAYERS[GATED].value
    gates = executor.model.ve_gate_bank.data
    if place is None:                                         # the weight in each layer that recipe A's bigrams have
        label, at = "bigram_embed", 0
        sizes = executor.model.scalar_sizes
        scalars = dict(zip(sizes, executor.model.scalars.data.split(list(sizes.values()))))
        scalars[line.label].copy_(scalars["bigram"])
    else:                                                     # the gates of that layer's value table
        gates[-1] = gates[at]
    table = executor.tables[line.label]
    weights = torch.randn(table.home.stored.rows.shape, generator=torch.Generator().manual_seed(1)).double()
    table.home.stored.rows.copy_(weights)
    found, batch = losses_and_gradients(executor)
    grad = torch.zeros_like(weights)
    rows = batch.plans[line.label].my_rows
    grad[rows] = table.row_grads[:len(rows)]

    plain = make_executor(preset(dtype="float64"))
    for name, p in plain.model.named_parameters():            # without what is appended for the table
        p.data.copy_(executor.model.get_parameter(name).detach()[:len(p)])
    weights.requires_grad_()
    rows_of = tg.GPT.rows_of

    def with_the_table(self, of_table, batch, row_buffers):
        read = rows_of(self, of_table, batch, row_buffers)
        if of_table == label:
            read[at] = read[at] + dense_rows(batch.tokens.numpy(), weights, signs)
        return read
    monkeypatch.setattr(tg.GPT, "rows_of", with_the_table)
    direct, _ = losses_and_gradients(plain)
    for x, want in zip([*found, grad], [*direct, weights.grad]):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)

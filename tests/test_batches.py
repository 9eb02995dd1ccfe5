"""Section 6: the stream of batches and its row plans against plain loops, the loader thread, the validation set.

Each rank is built without the others: no request is exchanged. The exchange itself is in test_rows.py.
"""
import base64
import contextlib
import itertools
import math
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from common import (batches_of, expect_error, global_rows_of, make_comm, make_engine, noop, preset, random_stream,
                    started_loader, steps_of, write_shard)
from reference import bigram_rows, ngram_rows

import train_gpt as tg

# More rows than a cycle looks up.
TABLES = (tg.NgramTable("a_embed", 3, 5000, signs=1), tg.NgramTable("b_embed", 2, 3000, layer=1, location="host"))

@pytest.fixture(autouse=True)
def no_other_rank(monkeypatch):
    """What a rank serves is what it fetches itself, as `plan_rows` leaves it."""
    monkeypatch.setattr(tg, "_all_to_all_requests", noop)

def write_shards(folder, *counts: int) -> list[list[int]]:
    streams = [random_stream(seed, count, 50, 3).tolist() for seed, count in enumerate(counts)]
    for k, stream in enumerate(streams):
        write_shard(folder / f"train_{k}.bin", stream, 50, 3)
    return streams

def started(folder, rank: int = 0, world: int = 1, steps: int = 12, **changes):
    """A loader of the tiny preset at work, and its steps. A cycle has two steps unless given."""
    fields = dict(vocab_size=50, bos_id=3, max_doc_len=12, adam_every=2) | changes
    cfg = preset(train_files=f"{folder}/train_*.bin", **fields)
    return started_loader(cfg, make_comm(rank, world), steps)

def read_all(*where, **changes) -> list[tg.Batch]:
    with started(*where, **changes) as (loader, values):
        return list(batches_of(loader, values))


# ---- The stream of batches -------------------------------------------------------------------------------------------
def slow_block(tokens: list[int], start_token: int, doc: int, slots: int, length: int, longest: int):
    """Recipe 5.2 word by word: (pieces of each slot, next document), or None where the documents run out."""
    starts = [at for at, token in enumerate(tokens) if token == start_token]
    block = []
    for _ in range(slots):
        pieces = []
        have = 0
        while have <= length:
            if doc == len(starts):
                return None
            after = starts[doc + 1] if doc + 1 < len(starts) else len(tokens)
            end = min(after, starts[doc] + longest, starts[doc] + length - have + 1)
            pieces.append((starts[doc], end))
            have += end - starts[doc]
            doc += 1
        block.append(pieces)
    return block, doc

def slow_slot(tokens: list[int], pieces: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """n + 1 tokens of a slot, and where its documents end in the inputs."""
    bounds = [0]
    for start, end in pieces:
        bounds.append(bounds[-1] + end - start)
    bounds[-1] -= 1
    return [token for start, end in pieces for token in tokens[start:end]], bounds

def slow_stream(streams, values, slots=8):
    """(tokens, bounds) of all slots of each step: a block that does not fit starts the next shard."""
    shard = 0
    doc = 0
    steps = []
    for v in values:
        while (found := slow_block(streams[shard], 3, doc, slots, v.seq_len, 12)) is None:
            shard += 1
            doc = 0
        block, doc = found
        steps.append([slow_slot(streams[shard], pieces) for pieces in block])
    return steps

def check_batches(batches, steps) -> None:
    for step, (batch, want) in enumerate(zip(batches, steps, strict=True)):
        assert batch.step == step
        assert batch.tokens.tolist() == [tokens[:-1] for tokens, _ in want]
        assert batch.targets.tolist() == [tokens[1:] for tokens, _ in want]
        columns = max(len(bounds) for _, bounds in want)
        length = batch.tokens.shape[1]
        assert batch.cu_seqlens.tolist() == [bounds + [length] * (columns - len(bounds)) for _, bounds in want]
        assert batch.targets.dtype == torch.int64
        others = [batch.tokens, batch.cu_seqlens, *batch.row_index.values(), *batch.sign_ids.values()]
        assert {x.dtype for x in others} == {torch.int32}

def check_plans(batches: list[tg.Batch], cfg: tg.Config, purpose: str, tied: bool, world: int) -> None:
    """Batches of one cycle share plans, in which all that they look up is found. With one rank, only row-wise tables
    have plans: the others are read in place."""
    first = batches[0]
    tokens = sum(batch.tokens.shape[1] for batch in batches)                  # the same on all ranks
    tag = dict(purpose=purpose, cycle=first.step // tg.Schedule(cfg).cycle_steps, tokens=tokens)
    planned = {table.label for table in cfg.tables} | (set(tg.BUILTIN_TABLES) if world > 1 else set())
    assert all(batch.plans == first.plans for batch in batches) and first.plans.keys() == planned
    for label, plan in first.plans.items():
        assert plan.tag == tag and plan.tied == (tied and label == "embed")
    value_starts = [[k * cfg.padded_vocab] for k in range(tg.NUM_VALUE_EMBEDS)]
    for batch in batches:
        tokens = batch.tokens.numpy()
        bigrams = [bigram_rows(slot, cfg.bigram_rows) for slot in tokens]
        looked_up = dict(bigram_embed=bigrams, embed=tokens, value_embed=tokens[:, None] + value_starts)
        signs = {}
        for table in cfg.tables:
            factors, sign_factors = tg.NGRAM_FACTORS[table.order]
            looked_up[table.label] = [ngram_rows(slot, factors, table.rows) for slot in tokens]
            if table.signs:
                signs[table.label] = [ngram_rows(slot, sign_factors, tg.NUM_SIGN_VECTORS + 1) for slot in tokens]
        assert batch.row_index.keys() == looked_up.keys() and batch.sign_ids.keys() == signs.keys()
        for label, rows in looked_up.items():
            np.testing.assert_array_equal(global_rows_of(batch, label), rows, label)
        for label, ids in signs.items():
            np.testing.assert_array_equal(batch.sign_ids[label], ids, label)

SCHEDULED = 3 * (len(tg.TINY["stages"]) - 1)                         # stages of three steps; and half a last cycle:
ODD = dict(steps=SCHEDULED + 3 + SCHEDULED % 2, epochs=0, num_scheduled_steps=SCHEDULED, num_extension_steps=4)

@pytest.mark.recipe
@pytest.mark.parametrize("counts, passes, world, changes", [
    ((1500, 300, 2600, 4000), 1, 1, {}),                             # the second shard is too small for a block
    ((2000, 6000), 1, 2, {}), ((2000, 6000), 1, 8, dict(adam_every=1)),
    ((2000, 6000), 1, 1, dict(tables=TABLES)), ((2000, 6000), 1, 2, dict(tables=TABLES)),
    ((1200, 1100), 2, 1, dict(epochs=2, steps=8, num_extension_steps=30)),
    ((1200, 1100), 6, 1, dict(epochs=0, num_extension_steps=30)), ((2000, 8000), 1, 2, ODD)])
def test_next__the_stream_equals_a_plain_loop(tmp_path, counts, passes, world, changes):
    """Slot s goes to rank s mod world. A stage may change inside a cycle, and the last cycle may be a part of one."""
    streams = write_shards(tmp_path, *counts)
    for rank in range(world):
        with started(tmp_path, rank, world, **changes) as (loader, values):
            batches = list(batches_of(loader, values))
        check_batches(batches, [x[rank::world] for x in slow_stream(streams * passes, values)])
        every = tg.Schedule(loader.cfg).cycle_steps
        for first in range(0, len(values), every):
            check_plans(batches[first:first + every], loader.cfg, "train", values[first].tied, world)
        for label in batches[0].plans:
            assert len({id(batch.plans[label]) for batch in batches}) == math.ceil(len(values) / every), label

def test_skip__the_stream_of_a_resumed_run_goes_on_where_it_was(tmp_path):
    """Also where the steps that are skipped end within the first shard, or at the start of another."""
    write_shards(tmp_path, 1500, 300, 2600, 4000)
    want = read_all(tmp_path)
    for done in (2, 6, 10):
        with started(tmp_path) as (other, values):
            loader = tg.Loader(other.cfg, make_comm(), other.headers)
            with contextlib.closing(loader):
                loader.skip(values[:done])
                loader.start(values[done:done + 2])
                for found, batch in zip(batches_of(loader, values[done:]), want[done:], strict=True):
                    assert found.step == batch.step and found.tokens.equal(batch.tokens)
                    assert found.cu_seqlens.equal(batch.cu_seqlens)

def too_short(streams, values) -> bool:
    with contextlib.suppress(IndexError):
        return not slow_stream(streams, values)
    return True

@pytest.mark.parametrize("world", [1, 2, 8])
def test_advance__data_that_end(tmp_path, world):
    """Every rank trains the same whole cycles. At their end `next_plans` returns {} and `advance` raises the reason."""
    streams = write_shards(tmp_path, 1200, 1100)
    for rank in range(world):
        with started(tmp_path, rank, world, tables=TABLES) as (loader, values):
            enough = next(n for n in range(12) if too_short(streams, values[:n + 1]))
            cycle = enough // 2 * 2
            for v in itertools.islice(steps_of(loader, values), cycle):
                loader.next(v)
                assert bool(loader.next_plans()) == (v.step < cycle - 1)
            for _ in range(2):
                assert loader.next_plans() == {}
                with expect_error(tg.OutOfData, "training data ended", "2 shards", "train_*.bin",
                                  f"enough for {enough} steps", "--max_steps", "--epochs=0"):
                    loader.advance([])

def test_start__shards_without_room_for_a_block(tmp_path):
    write_shards(tmp_path, 100, 100)
    with expect_error(tg.OutOfData, "2 shards", "larger shards", "8 x 17 tokens in one"):
        with started(tmp_path, epochs=0):
            pass


# ---- The loader thread -----------------------------------------------------------------------------------------------
def test_next__tokens_do_not_depend_on_timing(tmp_path, monkeypatch):
    """Disk, packer and reader of the batches are slow by chance."""
    write_shards(tmp_path, 1500, 300, 2600, 4000)
    want = read_all(tmp_path)
    delays = random.Random(0)

    def slowed(call):
        def slow(*arguments):
            time.sleep(delays.choice((0, 0.02)))
            return call(*arguments)
        return slow
    for name in ("load_shard", "pack_batch"):
        monkeypatch.setattr(tg, name, slowed(getattr(tg, name)))
    monkeypatch.setattr(tg.Loader, "next", slowed(tg.Loader.next))
    for found, batch in zip(read_all(tmp_path), want, strict=True):
        assert found.tokens.equal(batch.tokens) and found.cu_seqlens.equal(batch.cu_seqlens)

def test_Loader__is_exactly_one_cycle_and_one_shard_ahead(tmp_path, monkeypatch):
    write_shards(tmp_path, 9000, 1500, 1500)
    threads = []
    read = []
    load = tg.load_shard
    pack_sequence = tg.pack_sequence

    def seen_load(header):
        read.append(header.name[-5])
        return load(header)

    def seen_make_slot(*arguments):
        threads.append(threading.current_thread())
        return pack_sequence(*arguments)
    monkeypatch.setattr(tg, "load_shard", seen_load)
    monkeypatch.setattr(tg, "pack_sequence", seen_make_slot)
    with started(tmp_path, steps=5) as (loader, values):
        assert len(threads) == 8 * 2, "`start` has waited for the first cycle"
        for step, ahead in zip(steps_of(loader, values), (4, 4, 5, 5, 5), strict=True):
            loader.next(step)
            loader.next_cycle.result()                               # until the work that was asked for is done
            assert len(threads) == 8 * ahead
        assert len(set(threads) - {threading.main_thread()}) == 1, "off the training thread"
        loader.reader.submit(int).result()                           # it is done with what it was given
        assert read == ["0", "1"]

def test_next__a_step_that_is_not_the_next_one_is_refused(tmp_path):
    write_shards(tmp_path, 4000)
    with started(tmp_path) as (loader, values):
        loader.advance(values[2:4])
        with pytest.raises(AssertionError, match="step 1 is not the next one of the loader"):
            loader.next(values[1])

@pytest.mark.parametrize("where, call, error", [
    ("load_shard", 2, tg.DataError), ("load_shard", 2, None), ("pack_batch", 4, None),
    ("exchange_row_requests", 2, tg.ConfigError), ("exchange_row_requests", 2, None)])
def test_next_plans__what_goes_wrong_in_the_thread(tmp_path, monkeypatch, where, call, error):
    """Damage, ranks that disagree, or no answer (None), on the way to the second cycle. Only one rank may have the
    error, and it is not the end of the data. No rank may start to send that cycle's rows, so `next_plans` raises it
    at the end of the first cycle, and so does `advance`."""
    write_shards(tmp_path, 400, 4000)
    calls = []
    release = threading.Event()
    right = getattr(tg, where)

    def wrong(*arguments):
        calls.append(where)
        if len(calls) < call:
            return right(*arguments)
        if error is None:
            release.wait(10)
        raise (error or tg.DataError)("waiting", "a", "b", "c")

    monkeypatch.setattr(tg, where, wrong)
    with started(tmp_path, 0, 2) as (loader, values):
        steps = steps_of(loader, values)
        loader.next(next(steps))
        loader.cfg = replace(loader.cfg, comm_timeout=60.0 if error else 0.05)
        assert loader.next_plans(), "this cycle's, without waiting for the next one"
        loader.next(next(steps))
        said = "waiting" if error else "no result after 0.05 s"
        with expect_error(error or tg.RunError, said):
            loader.next_plans()
        with expect_error(error or tg.RunError, said):
            loader.advance([])
        release.set()

@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("tables", [(), (tg.NgramTable("a_embed", 3, 100, update_every=4),)], ids=["dense", "row-wise"])
def test_next_plans__those_of_the_next_step_as_the_exchange_filled_them_in(tmp_path, monkeypatch, every, tables):
    """Within a cycle those of its next step. The loader thread exchanges each Adam cycle once, in order."""
    write_shards(tmp_path, 8000)
    exchanged = []
    exchange = tg.exchange_row_requests

    def seen(where, group, dtype, specs, plans):
        assert threading.current_thread() != threading.main_thread()
        assert group == "the loader's group"
        exchanged.append(plans)
        exchange(where, group, dtype, specs, plans)

    monkeypatch.setattr(tg, "exchange_row_requests", seen)
    words = dict(vocab_size=50, bos_id=3)
    cfg = preset(train_files=f"{tmp_path}/train_*.bin", adam_every=every, tables=tables, **words)
    where = replace(make_comm(1, 2), loader_group="the loader's group")
    found = []
    with started_loader(cfg, where, 9) as (loader, values):
        for batch in batches_of(loader, values):
            ahead = loader.next_plans()
            assert ahead == loader.next_plans(), "asking changes nothing"
            found.append((batch.plans, ahead))
    plans = [of_step for of_step, _ in found]
    assert [ahead for _, ahead in found] == [*plans[1:], {}]
    assert len(exchanged) == math.ceil(9 / every)
    for step, of_step in enumerate(plans):
        assert of_step["embed"] is exchanged[step // every]["embed"]
        assert of_step["embed"].tag["cycle"] == step // every
        for table in tables:
            first = step // table.update_every * table.update_every // every
            assert of_step[table.label] is exchanged[first][table.label]

NO_CONCERN = (tg.Clock, tg.Log, tg.Schedule, tg.Engine, tg.Optimizer, tg.GPT, tg.LocalTable, tg.ExchangedTable,
              tg.RowwiseTable, tg.DeviceRowStore, tg.HostRowStore)

def section_starts() -> list[int]:
    lines = Path(tg.__file__).read_text("utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if line.startswith("# ======")]

def calls_of_thread(name: str, calls: set[tuple[int, str]]) -> None:
    """Record from now on what new threads whose name begins so call: (section, function) of the trainer, or
    (0, module.function) of a builtin that trainer code calls."""
    starts = section_starts()

    def note(frame: FrameType, event: str, builtin: object) -> None:
        if frame.f_code.co_filename != tg.__file__ or not threading.current_thread().name.startswith(name):
            return
        if event == "call":
            section = sum(start <= frame.f_code.co_firstlineno for start in starts)
            calls.add((section, frame.f_code.co_qualname))
        elif event == "c_call":
            calls.add((0, f"{builtin.__module__}.{builtin.__qualname__}"))
    threading.setprofile(note)

def test_Loader__its_thread_calls_no_clock_engine_or_table():
    """Only sections 3, 5 and 6 and the communicator. Training with n-gram tables in device and in host memory."""
    cfg = preset(tables=TABLES)
    ex = make_engine(cfg)
    calls = set()
    calls_of_thread("loader", calls)
    try:
        with started_loader(cfg, make_comm(), 6) as (loader, values):
            for v in steps_of(loader, values):
                tg.train_step(ex, loader, v)
    finally:
        threading.setprofile(None)
    assert {(3, "pack_batch"), (5, "exchange_row_requests"), (6, "Loader._build_cycle")} <= calls, "what it traces"
    assert (0, "numpy.empty") in calls, "builtins, too"
    allowed = {"Communicator.pinned", "Communicator.set_thread_device", "Communicator.on_cuda"}
    assert {name for section, name in calls if section == 1} <= allowed
    assert {section for section, _ in calls} == {0, 1, 3, 5, 6}
    owners = {name.partition(".")[0] for section, name in calls if section}
    assert not owners & {cls.__name__ for cls in NO_CONCERN}
    assert not [name for section, name in calls if section == 0 and name.startswith("time.")]


# ---- Row plans of batches --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_build_batches__a_plan_serves_the_steps_until_its_table_is_updated(tmp_path, every, world):
    write_shards(tmp_path, 8000)
    cadences = (1, 2, 4) if every == 1 else (2, 4)
    tables = tuple(tg.NgramTable(f"of_{cadence}_embed", 3, 100, update_every=cadence) for cadence in cadences)
    batches = read_all(tmp_path, 0, world, steps=8, tables=tables, adam_every=every)
    for table in tg.table_specs(preset(tables=tables, adam_every=every)):
        if world == 1 and not table.rowwise:
            assert not any(table.label in batch.plans for batch in batches)
            continue
        plans = [batch.plans[table.label] for batch in batches]
        assert [plan.tag["cycle"] for plan in plans] == [step // table.update_every for step in range(8)], table.label
        assert len(set(map(id, plans))) == 8 // table.update_every
        for plan, batch in zip(plans, batches):
            of_plan = [other for other in batches if other.plans[table.label] is plan]
            assert plan.tag["tokens"] == sum(other.tokens.shape[1] for other in of_plan)

@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_build_batches__dense_plans_fetch_every_row_of_a_dense_table(tmp_path, mode, world):
    """But for an embedding that is tied, whose rows are read from the head, and for row-wise tables."""
    write_shards(tmp_path, 8000)
    schedule = tg.Schedule(preset(adam_every=2))
    steps = (schedule.untie_step + 1) // 2 * 2 + 2
    batches = read_all(tmp_path, 1 % world, world, steps=steps, tables=TABLES, row_comms=mode)
    for batch in (batches[0], batches[-1]):
        tied = batch.step <= schedule.untie_step
        for table in tg.table_specs(preset(vocab_size=50, bos_id=3, tables=TABLES, adam_every=2)):
            if table.label not in batch.plans:
                assert world == 1 and not table.rowwise
                continue
            plan = batch.plans[table.label]
            every_row = mode == "dense" and not table.rowwise and not (tied and table.label == "embed")
            rows = world * math.ceil(table.num_rows / world)
            assert (plan.rows_to_fetch.tolist() == list(range(rows))) == every_row, (table.label, batch.step)
            assert plan.tied == (tied and table.label == "embed")


# ---- The validation set ----------------------------------------------------------------------------------------------
def validation_config(folder, stream, tokens: int, vocab_size: int = 50, bos_id: int = 3, **changes):
    words = dict(vocab_size=vocab_size, bos_id=bos_id)
    write_shard(folder / "v.bin", stream, **words)
    cfg = preset(val_files=f"{folder}/*.bin", val_batch_tokens=128, val_tokens=tokens, **words, **changes)
    return cfg, tg.read_shard_headers(cfg.val_files)

@pytest.mark.parametrize("after, tied", [(0, True), (1, False)])
def test_ValidationSet__batches_of_blocks_with_plans_of_their_own(tmp_path, monkeypatch, after, tied):
    """The slots of each block are dealt to ranks round-robin. The loader's group is not used, because the loader thread
    may exchange requests at the same time."""
    groups = []
    exchange = tg.exchange_row_requests

    def seen(where, group, *rest):
        groups.append(group)
        exchange(where, group, *rest)

    monkeypatch.setattr(tg, "exchange_row_requests", seen)
    cfg, headers = validation_config(tmp_path, random_stream(0, 400, 50, 3), 256, tables=TABLES)
    schedule = tg.Schedule(cfg)
    values = schedule.at(schedule.untie_step + after)
    whole = [batch.tokens for batch in tg.ValidationSet(cfg, make_comm(), headers).batches(values)]
    assert [tuple(tokens.shape) for tokens in whole] == [(8, 16), (8, 16)]
    for rank, world in ((0, 1), (0, 4), (3, 4)):
        where = replace(make_comm(rank, world), loader_group="the loader's group")
        batches = tg.ValidationSet(cfg, where, headers).batches(values)
        for batch, tokens in zip(batches, whole, strict=True):
            assert batch.tokens.equal(tokens[rank::world])
            check_plans([batch], cfg, "validation", tied, world)
    assert set(groups) == {None}

def test_text_metrics__unigram_entropy_and_bits_per_byte(tmp_path, monkeypatch):
    stream = random_stream(1, 300, 5, 4)
    pieces = [b"a", b"bc", b"\xff\x00", b"defg"]
    lines = [f"{base64.b64encode(piece).decode()} {token}" for token, piece in enumerate(pieces)]
    cfg, headers = validation_config(tmp_path, stream, 256, 5, 4)
    assert tg.ValidationSet(cfg, make_comm(), headers).text_metrics(1.0) == {}, "nothing is claimed without the bytes"
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    counts = Counter(stream[1:257].tolist())                         # targets: the inputs shifted by one
    nats = -sum(c / 256 * math.log(c / 256) for c in counts.values())
    bytes_in_all = sum(len(pieces[token]) * c for token, c in counts.items() if token != 4)
    found = tg.ValidationSet(cfg, make_comm(), headers).text_metrics(1.5)
    assert found == pytest.approx(dict(val_bpb=1.5 * 256 / math.log(2) / bytes_in_all, unigram_nats=nats), rel=1e-12)
    monkeypatch.chdir(tmp_path)              # the name of a formula looks like a file beside that vocab.txt
    formula = preset()
    assert tg.ValidationSet(formula, make_comm(), tg.read_shard_headers(formula.val_files)).text_metrics(1.0) == {}

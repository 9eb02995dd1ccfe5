"""Room 3: shards, packing, hashes, loader and plans against plain loops; every kind of bad data is named."""
import base64
import contextlib
import errno
import hashlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import (PATIENCE, fabric, logical_rows, plan_of, planner_of, preset, random_stream, refused,
                    started_loader, write_shard)
from reference import bigram_rows, ngram_rows

import train_gpt as tg

MOST_ROWS = 2**31 - 1

# ---- hashes ---------------------------------------------------------------------------------------------------------
RECIPE_TOKENS = (50256, 464, 262, 13, 50256, 50256, 198)
RECIPE_ROWS = [251519, 204580, 71483, 2667, 204913, 35060, 14985]             # of 251,520 (recipe 11.1)
EXTREME_TOKENS = (0, 1, 2, 50_256, 65_534, 2**16, 2**31 - 1, -1, -2**31, 2**30, 48271)

@pytest.mark.recipe
def test_bigram_hash__is_32_bit_arithmetic_that_wraps():
    def hashed(tokens, rows: int) -> list[int]:
        return tg.bigram_hash(np.array(tokens, np.int32), rows).tolist()
    assert hashed(RECIPE_TOKENS, 251_520) == RECIPE_ROWS
    assert hashed((7, *RECIPE_TOKENS[1:]), 251_520) == RECIPE_ROWS, "the token at 0 does not matter at 1"
    for rows in (2, 640, 251_520, MOST_ROWS):
        tokens = np.random.default_rng(rows).integers(0, 65536, 400)
        assert hashed(tokens, rows) == bigram_rows(tokens, rows).tolist()

@pytest.mark.parametrize("rows", [2, 97, MOST_ROWS])
@pytest.mark.parametrize("order", list(tg.NGRAM_FACTORS))
def test_row_tables__rows_and_signs_of_ngrams(order, rows):
    """Also where a product passes 32 bits, and where the xor is negative."""
    line = tg.NgramTable("a_embed", order, rows, signs=1, home="host", cadence=4, rounding="stochastic")
    *recipe, table = tg.row_tables(preset(tables=(line,), adam_every=1))
    assert [(x.label, x.is_rowwise, x.cadence) for x in recipe] == [(label, False, 1) for label in tg.RECIPE_TABLES]
    assert (table.rows, table.reads, table.tied, table.is_rowwise) == (rows, 1, False, True)
    assert (table.home, table.cadence, table.rounding) == ("host", 4, "stochastic")
    assert tg.row_tables(preset(tables=(line._replace(signs=0),)))[-1].signs is None

    tokens = np.random.default_rng(rows).choice(EXTREME_TOKENS, (3, 40)).astype(np.int32)
    factors, sign_factors = tg.NGRAM_FACTORS[order]
    for call, constants, count in ((table.ids, factors, rows), (table.signs, sign_factors, tg.SIGN_VECTORS + 1)):
        found = call(tokens)
        np.testing.assert_array_equal(found, [ngram_rows(slot, constants, count) for slot in tokens])
        assert found.dtype == np.int32 and (found[:, :order - 1] == count - 1).all()

def test_NGRAM_FACTORS__none_is_shared():
    """Signs by the hash of the row would be alike for n-grams that share a row."""
    factors = [factor for of_rows, of_signs in tg.NGRAM_FACTORS.values() for factor in (*of_rows, *of_signs)]
    assert len(set(factors)) == len(factors)


# ---- packing and validation slots -----------------------------------------------------------------------------------
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

@pytest.mark.recipe
@pytest.mark.parametrize("sizes, slots, length", [((200,), 2, 16), ((65, 66, 67, 33), 2, 16), ((97, 98), 1, 32)])
def test_validation_slots__equal_a_plain_loop(sizes, slots, length):
    """A block needs its tokens, one more as the last target, and by the peer's rule another one; else: next shard."""
    streams = [random_stream(seed, count, 20, 3) for seed, count in enumerate(sizes)]
    want = []
    for stream in streams:
        position = 0
        while len(stream) - position >= slots * length + 2:
            for s in range(slots):
                tokens = stream[position + s * length:position + (s + 1) * length + 1].tolist()
                borders = [at for at, token in enumerate(tokens[:-1]) if token == 3]
                want.append((tokens, [0, *borders, length]))
            position += slots * length
    shards = [tg.Shard(stream.astype(np.uint16), 3) for stream in streams]
    got = [(slot.tokens.tolist(), slot.cu_seqlens.tolist()) for slot in tg.validation_slots(shards, slots, length, 3)]
    assert got == want

def validation_config(folder, stream, tokens: int, vocab_size: int = 50, document_start: int = 3):
    words = dict(vocab_size=vocab_size, document_start=document_start)
    write_shard(folder / "v.bin", stream, **words)
    cfg = preset(val_files=f"{folder}/*.bin", val_batch_tokens=128, val_tokens=tokens, **words)
    return cfg, tg.find_shards(cfg.val_files)

def test_text_losses__unigram_entropy_and_bits_per_byte(tmp_path, monkeypatch):
    stream = random_stream(1, 300, 5, 4)
    pieces = [b"a", b"bc", b"\xff\x00", b"defg"]
    lines = [f"{base64.b64encode(piece).decode()} {token}" for token, piece in enumerate(pieces)]
    cfg, headers = validation_config(tmp_path, stream, 256, 5, 4)
    assert tg.ValidationSet(cfg, fabric(), headers).text_losses(1.0) == {}, "nothing is claimed without the bytes"
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    counts = Counter(stream[1:257].tolist())                         # targets: the inputs shifted by one
    nats = -sum(c / 256 * math.log(c / 256) for c in counts.values())
    bytes_in_all = sum(len(pieces[token]) * c for token, c in counts.items() if token != 4)
    found = tg.ValidationSet(cfg, fabric(), headers).text_losses(1.5)
    assert found == pytest.approx(dict(val_bpb=1.5 * 256 / math.log(2) / bytes_in_all, unigram_nats=nats), rel=1e-12)
    monkeypatch.chdir(tmp_path)              # the name of a formula looks like a file beside that vocab.txt
    formula = preset()
    assert tg.ValidationSet(formula, fabric(), tg.find_shards(formula.val_files)).text_losses(1.0) == {}


# ---- loader ---------------------------------------------------------------------------------------------------------
def write_shards(folder, *counts: int) -> list[list[int]]:
    streams = [random_stream(seed, count, 50, 3).tolist() for seed, count in enumerate(counts)]
    for k, stream in enumerate(streams):
        write_shard(folder / f"train_{k}.bin", stream, 50, 3)
    return streams

def started(folder, rank=0, world=1, steps=12, exchange=None, **changes):
    """A loader of the tiny preset at work, and its steps. Adam, so a cycle, is of two steps unless given."""
    fields = dict(vocab_size=50, document_start=3, max_doc_len=12, adam_every=2) | changes
    cfg = preset(train_files=f"{folder}/train_*.bin", **fields)
    return started_loader(cfg, fabric(rank, world), steps, exchange)

def read_all(*where, **changes) -> list[tg.Batch]:
    with started(*where, **changes) as (loader, values):
        return [loader.next(v) for v in values]

def slow_stream(streams, values, slots=8):
    """(tokens, bounds) of all slots of each step: a block that does not fit starts the next shard."""
    shard = 0
    doc = 0
    steps = []
    for v in values:
        while (found := slow_block(streams[shard], 3, doc, slots, v.slot_tokens, 12)) is None:
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
        types = [x.dtype for x in (batch.tokens, batch.targets, batch.cu_seqlens, *batch.rows.values())]
        assert types == [torch.int32, torch.int64, *[torch.int32] * 4]

def check_plans(batches: list[tg.Batch], cfg: tg.Config, purpose: str, tied: bool) -> None:
    """Batches of one cycle share plans, in which all that they read is found."""
    first = batches[0]
    tokens = sum(batch.tokens.shape[1] for batch in batches)                  # alike on all ranks
    tag = dict(purpose=purpose, cycle=first.step // tg.Schedule(cfg).cycle, tokens=tokens)
    assert all(batch.plans == first.plans for batch in batches) and first.plans.keys() == set(tg.RECIPE_TABLES)
    value_starts = [[k * cfg.padded_vocab] for k in range(tg.NUM_VALUE_TABLES)]
    for label, plan in first.plans.items():
        assert plan.tag == tag and plan.tied == (tied and label == "embed")
        for batch in batches:
            tokens = batch.tokens.numpy()
            bigrams = [bigram_rows(slot, cfg.bigram_rows) for slot in tokens]
            read = dict(bigram_embed=bigrams, embed=tokens, value_embed=tokens[:, None] + value_starts)
            np.testing.assert_array_equal(logical_rows(batch, label), read[label])

SCHEDULED = 3 * (len(tg.TINY["stages"]) - 1)                         # stages of three steps; and half a last cycle:
ODD = dict(steps=SCHEDULED + 3 + SCHEDULED % 2, epochs=0, num_scheduled_steps=SCHEDULED, num_extension_steps=4)

@pytest.mark.recipe
@pytest.mark.parametrize("counts, passes, world, changes", [
    ((1500, 300, 2600, 4000), 1, 1, {}),                             # the second shard is too small for a block
    ((2000, 6000), 1, 2, {}), ((2000, 6000), 1, 8, dict(adam_every=1)),
    ((1200, 1100), 2, 1, dict(epochs=2, steps=8, num_extension_steps=30)),
    ((1200, 1100), 6, 1, dict(epochs=0, num_extension_steps=30)), ((2000, 8000), 1, 2, ODD)])
def test_next__the_stream_equals_a_plain_loop(tmp_path, counts, passes, world, changes):
    """Slot s goes to rank s mod world. A stage may change inside a cycle, and the last cycle may be a part of one."""
    streams = write_shards(tmp_path, *counts)
    for rank in range(world):
        with started(tmp_path, rank, world, **changes) as (loader, values):
            batches = [loader.next(v) for v in values]
        check_batches(batches, [x[rank::world] for x in slow_stream(streams * passes, values)])
        every = tg.Schedule(loader.cfg).cycle
        for first in range(0, len(values), every):
            check_plans(batches[first:first + every], loader.cfg, "train", values[first].tied)
        plans = {tuple(map(id, batch.plans.values())) for batch in batches}
        assert len(plans) == math.ceil(len(values) / every)

@pytest.mark.parametrize("world", [1, 2, 8])
def test_next__data_that_end(tmp_path, world):
    """Every rank trains the same whole cycles; `plans_ahead` has none for the next one, and `next` says why."""
    streams = write_shards(tmp_path, 1200, 1100)
    for rank in range(world):
        with started(tmp_path, rank, world) as (loader, values):
            enough = next(n for n in range(12) if too_short(streams, values[:n + 1]))
            cycle = enough // 2 * 2
            for v in values[:cycle]:
                assert loader.plans_ahead() is not None or v.step == cycle - 1
                loader.next(v)
            assert loader.plans_ahead() is None
            with refused(tg.DataEnded, "training data ended", "2 shards", "train_*.bin", f"enough for {enough} steps",
                         "--max_steps", "--epochs=0"):
                loader.next(values[cycle])

def too_short(streams, values) -> bool:
    with contextlib.suppress(IndexError):
        return not slow_stream(streams, values)
    return True

def test_next__shards_without_room_for_a_block(tmp_path):
    write_shards(tmp_path, 100, 100)
    with started(tmp_path, epochs=0) as (loader, values):
        with refused(tg.DataEnded, "2 shards", "larger shards", f"8 x {values[0].slot_tokens + 1} tokens in one"):
            loader.next(values[0])

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
    for name in ("load_shard", "pack_block"):
        monkeypatch.setattr(tg, name, slowed(getattr(tg, name)))
    monkeypatch.setattr(tg.Loader, "next", slowed(tg.Loader.next))
    for found, batch in zip(read_all(tmp_path), want, strict=True):
        assert found.tokens.equal(batch.tokens) and found.cu_seqlens.equal(batch.cu_seqlens)

def test_Loader__is_exactly_one_cycle_and_one_shard_ahead(tmp_path, monkeypatch):
    write_shards(tmp_path, 9000, 1500, 1500)
    threads = []
    read = []
    load = tg.load_shard
    make_slot = tg.make_slot

    def seen_load(header):
        read.append(header.name[-5])
        return load(header)

    def seen_make_slot(*arguments):
        threads.append(threading.current_thread())
        return make_slot(*arguments)
    monkeypatch.setattr(tg, "load_shard", seen_load)
    monkeypatch.setattr(tg, "make_slot", seen_make_slot)
    with started(tmp_path, steps=5) as (loader, values):
        for step, ahead in enumerate((4, 4, 5, 5, 5)):
            loader.next(values[step])
            loader.wait()                                            # until the work that was asked for is done
            assert len(threads) == 8 * ahead
        assert len(set(threads) - {threading.main_thread()}) == 1, "off the training thread"
        loader.reader.submit(int).result(PATIENCE)                           # it is done with what it was given
        assert read == ["0", "1"]

@pytest.mark.parametrize("where, call, error", [
    ("load_shard", 2, tg.DataError), ("load_shard", 2, None), ("pack_block", 4, None), ("exchange", 2, tg.ConfigError),
    ("exchange", 2, None)])
def test_next__what_goes_wrong_in_the_thread(tmp_path, monkeypatch, where, call, error):
    """Damage, ranks that disagree, or no answer (None), on the way to the second cycle. It may be one rank's alone, and
    is not the end of the data: nobody may begin to send that cycle's rows, so it surfaces in plans_ahead at once, and
    in next."""
    write_shards(tmp_path, 400, 4000)
    calls = []
    release = threading.Event()
    right = getattr(tg, where, tg.do_nothing)

    def wrong(*arguments):
        calls.append(where)
        if len(calls) < call:
            return right(*arguments) if where != "exchange" else None
        if error is None:
            release.wait(PATIENCE)
        raise (error or tg.DataError)("waiting", "a", "b", "c")

    exchange = None
    if where == "exchange":
        exchange = wrong
    else:
        monkeypatch.setattr(tg, where, wrong)
    with started(tmp_path, 0, 2, exchange=exchange) as (loader, values):
        loader.next(values[0])
        loader.cfg = replace(loader.cfg, comm_timeout=60.0 if error else 0.05)
        said = "waiting" if error else "nothing after 0.05 s"
        with refused(error or tg.RunError, said):
            loader.plans_ahead()
        loader.next(values[1])
        with refused(error or tg.RunError, said):
            loader.next(values[2])
        release.set()

@pytest.mark.recipe
def test_formula_tokens__are_the_same_everywhere_and_full_of_documents():
    tokens = tg.formula_tokens(1, 40_000, 512, 511)
    assert tokens.dtype == np.uint16 and tokens.max() == 511 and tokens[0] == 511
    assert tokens[:8].tolist() == tg.formula_tokens(1, 8, 512, 511).tolist()
    assert not np.array_equal(tokens, tg.formula_tokens(2, 40_000, 512, 511))
    assert 28 < 40_000 / np.sum(tokens == 511) < 36                  # documents of 32 tokens on average
    assert len(np.unique(tokens)) > 256


# ---- row plans ------------------------------------------------------------------------------------------------------
def slow_plan(rows: set[int], count: int, world: int) -> tuple[list[int], list[int]]:
    """(physical rows, how many of each owner): row r is the r div W-th of rank r mod W, shards are equally long."""
    size = math.ceil(count / world)
    owners = [sorted(row for row in rows if row % world == owner) for owner in range(world)]
    physical = []
    for owner, mine in enumerate(owners):
        physical += [owner * size + row // world for row in mine]
    return physical, list(map(len, owners))

def patterns(R: int) -> list[list[np.ndarray]]:
    """Rows of a table of R that the steps of a cycle read: none, the ends, those of one owner, some, all but one."""
    rng = np.random.default_rng(R)
    found = [
        [np.zeros((0, 4))],
        [np.zeros((2, 7)), np.array([[R - 1, 0]])],
        [np.arange(max(0, R - 20), R)[None]],
        [rng.integers(0, -(-R // 24), (2, 11)) * 24],
    ]
    found.append([rng.integers(0, R, size) for size in ((3, 2, 5), (3, 8))])
    if R < 1000:
        found.append([rng.permutation(R - 1)[None], rng.integers(0, R, (2, R))])
    return [[rows.astype(np.int32) for rows in steps] for steps in found]

@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("world", [1, 2, 7, 8])
@pytest.mark.parametrize("count", [3, 7, 101, 640, MOST_ROWS])
def test_plan__equals_plain_sets(count, world, mode):
    """Tables that W divides or does not, of fewer rows than ranks, and the largest, whose physical rows pass 2^31."""
    if mode == "dense" and count == MOST_ROWS:                       # no plan lists all of them
        return
    size = math.ceil(count / world)
    for is_rowwise, tied in ((False, False), (False, True), (True, False)):
        table = tg.Table("bigram_embed", count, 1, None, tied=tied, is_rowwise=is_rowwise)
        planner = planner_of(preset(row_comms=mode), fabric(world - 1, world), table)
        for rows in patterns(count):
            plan, found = plan_of(planner, table, rows, tied)
            read = np.concatenate([x.ravel() for x in rows]).astype(int)
            ids, counts = slow_plan(set(read.tolist()), count, world)
            if mode == "dense" and world > 1 and not tied and not is_rowwise:
                ids = list(range(world * size))
                counts = [size] * world
            assert plan.my_rows.tolist() == plan.requested_rows.tolist() == ids == sorted(set(ids))
            assert plan.send_counts == plan.recv_counts == counts and plan.my_rows.dtype == torch.int64
            assert (plan.shard_size, plan.tied, plan.moved) == (size, tied, {}), "nothing has moved yet"
            if tied:
                assert plan.head_columns.tolist() == [row % size * world + row // size for row in ids]
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, np.dtype(np.int32)) for x in rows]
            places = np.concatenate([x.ravel() for x in found])
            if world == 1 and not is_rowwise:
                assert places.tolist() == read.tolist(), "they are read where they stand"
            else:
                assert plan.my_rows[places].tolist() == (read % world * size + read // world).tolist()

def test_batches__a_plan_serves_the_steps_of_its_tables_cadence(tmp_path):
    write_shards(tmp_path, 8000)
    tables = tuple(tg.NgramTable(f"of_{cadence}_embed", 3, 100, cadence=cadence) for cadence in (1, 2, 4))
    batches = read_all(tmp_path, steps=8, tables=tables, adam_every=1)
    for table in tg.row_tables(preset(tables=tables, adam_every=1)):
        plans = [batch.plans[table.label] for batch in batches]
        assert [plan.tag["cycle"] for plan in plans] == [step // table.cadence for step in range(8)], table.label
        assert len(set(map(id, plans))) == 8 // table.cadence

@pytest.mark.parametrize("after, tied", [(0, True), (1, False)])
def test_batches__of_the_validation_set(tmp_path, after, tied):
    """Each block has plans of its own, and its slots are dealt to ranks in turn."""
    cfg, headers = validation_config(tmp_path, random_stream(0, 400, 50, 3), 256)
    schedule = tg.Schedule(cfg)
    values = schedule.at(schedule.untie_step + after)
    whole = [batch.tokens for batch in tg.ValidationSet(cfg, fabric(), headers).batches(values)]
    assert [tuple(tokens.shape) for tokens in whole] == [(8, 16), (8, 16)]
    for rank, world in ((0, 1), (0, 4), (3, 4)):
        batches = tg.ValidationSet(cfg, fabric(rank, world), headers).batches(values)
        for batch, tokens in zip(batches, whole, strict=True):
            assert batch.tokens.equal(tokens[rank::world])
            check_plans([batch], cfg, "validation", tied)

@pytest.mark.parametrize("every", [1, 2])
def test_plans_ahead__what_the_exchange_filled_in_for_the_next_cycle(tmp_path, every):
    """The exchange meets each cycle once, in order, on the loader thread; at the end there are no plans."""
    write_shards(tmp_path, 4000)
    seen = []

    def exchange(plans):
        assert threading.current_thread() != threading.main_thread()
        seen.append(plans)

    with started(tmp_path, 1, 2, steps=5, exchange=exchange, adam_every=every) as (loader, values):
        for v in values:
            cycle = v.step // every
            assert loader.next(v).plans == seen[cycle]
            ahead = loader.plans_ahead()
            assert ahead is loader.plans_ahead(), "asked for once for each table"
            assert ahead == (seen[cycle + 1] if cycle < 4 // every else None)
    assert [plans["embed"].tag["cycle"] for plans in seen] == list(range(math.ceil(5 / every)))


# ---- bad data -------------------------------------------------------------------------------------------------------
GOOD = [3, 1, 2, 3, 4, 5] * 20
BAD_FILES = {                                # how the file is made, bytes cut off -> what the message must hold
    "version": (dict(version=2), 0, "20240520, 2, 120", "data/README.md"),
    "cut": (dict(), 10, f"{1024 + 240 - 10} bytes", "120", "fetch or write it again"),
    "longer": (dict(count=100), 0, f"{1024 + 240} bytes", "20240520, 1, 100"),
    "no header": (dict(), 500, "764 bytes", "1024 bytes"),
    "no tokens": (dict(count=0), 0, "20240520, 1, 0"),
    "a token too high": (dict(vocab_size=5), 0, "tokens up to 5", "below the vocabulary size 5"),
    "no document start": (dict(vocab_size=9, document_start=8), 0, "0 of them document starts", "token 8"),
    "GPT-2 that is none": (dict(vocab_size=0, document_start=0), 0, "0 of them document starts", "50256"),
}

@pytest.mark.parametrize("kind", BAD_FILES)
def test_scan_shards__a_damaged_one(tmp_path, kind):
    header, cut, *parts = BAD_FILES[kind]
    write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    path = write_shard(tmp_path / "b.bin", GOOD, **dict(vocab_size=6, document_start=3) | header)
    os.truncate(path, path.stat().st_size - cut)
    with refused(tg.DataError, "b.bin", *parts):
        tg.scan_shards(tg.find_shards(f"{tmp_path}/*.bin"))

def test_load_shard__a_file_that_shrinks_after_the_start(tmp_path):
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    header, = tg.find_shards(str(path))
    os.truncate(path, path.stat().st_size - 20)
    with refused(tg.DataError, "a.bin", "110 tokens", "120"):
        tg.load_shard(header)

def test_find_shards__header_words_and_name_order(tmp_path, monkeypatch):
    """Words 3 and 4 name the vocabulary, and 0 means GPT-2; a file system may list names in any order."""
    first = str(write_shard(tmp_path / "a_10.bin", GOOD, 6, 3))
    second = str(write_shard(tmp_path / "a_2.bin", GOOD, 0, 0))
    monkeypatch.setattr(tg.glob, "glob", lambda pattern: [second, first])
    assert tg.find_shards("any") == [(first, 120, 6, 3), (second, 120, 50_257, 50_256)]

@pytest.mark.parametrize("name, parts", [
    ("{}/train_*.bin", ("train_1.bin as a shard", "no such file")), ("{}/pipe", ("pipe as a shard", "no regular one")),
    ("{}/none_*.bin", ("none_*.bin as", "no such file", "cached_fineweb10B.py", "--train_files=")),
    ("formula:512:511:100:0", ("formula:512", "VOCAB:DOCUMENT_START:TOKENS:SHARDS"))])
def test_find_shards__whatever_matches_has_to_be_a_shard(tmp_path, name, parts):
    """A broken link passed over in silence would be training on less than was asked for."""
    write_shard(tmp_path / "train_0.bin", GOOD, 6, 3)
    (tmp_path / "train_1.bin").symlink_to("gone.bin")
    os.mkfifo(tmp_path / "pipe")
    with refused(tg.DataError, *parts):
        tg.find_shards(name.format(tmp_path))

def test_find_shards__brackets_in_a_folders_name_mean_themselves(tmp_path, monkeypatch):
    """Where the folder exists; a pattern with brackets that no folder has is a pattern."""
    odd = tmp_path / "my [data] *"
    odd.mkdir()
    for path in (odd / "train_0.bin", odd / "train_[1].bin", tmp_path / "train_3.bin"):
        write_shard(path, GOOD, 6, 3)
    monkeypatch.chdir(tmp_path)
    for pattern, names in ((f"{odd}/train_*.bin", [f"{odd}/train_0.bin", f"{odd}/train_[1].bin"]),
                           (f"{odd}/train_[1].bin", [f"{odd}/train_[1].bin"]), ("train_[1-5].bin", ["train_3.bin"])):
        assert [header.name for header in tg.find_shards(pattern)] == names

def shards(*sizes: int, vocab=(512, 511)) -> list[tg.ShardHeader]:
    return [tg.ShardHeader(f"shard_{k}.bin", size, *vocab) for k, size in enumerate(sizes)]

def test_resolve__the_header_decides_the_sizes():
    gpt2 = shards(1, vocab=(50_257, 50_256))
    cfg = tg.resolve(tg.Config(**tg.PRESETS["pocket"]), gpt2, gpt2)
    assert (cfg.vocab_size, cfg.document_start, cfg.padded_vocab, cfg.bigram_rows) == (50_257, 50_256, 50_304, 251_520)

@pytest.mark.parametrize("changes, val_vocab, kind, parts", [
    (dict(vocab_size=500), (512, 511), tg.ConfigError, ("--vocab_size", "500", "512", "shard_0.bin", "leave the flag")),
    (dict(document_start=0), (512, 511), tg.ConfigError, ("--document_start", "found:    0", "511", "shard_0.bin")),
    (dict(padded_vocab=511), (512, 511), tg.ConfigError, ("--padded_vocab", "511", "512")),
    (dict(), (512, 510), tg.DataError, ("different vocabularies", "(512, 510)", "(512, 511)", "one data set"))])
def test_resolve__contradictions(changes, val_vocab, kind, parts):
    cfg = tg.Config(**tg.PRESETS["tiny"] | changes)
    other = shards(10, vocab=val_vocab)
    with refused(kind, *parts):
        tg.resolve(cfg, shards(10), other)
    if kind == tg.DataError:
        with refused(kind, *parts):
            tg.resolve(cfg, shards(10) + other, shards(10))

def test_check_enough_data__training_tokens():
    """A step reads the tokens of its slots and one more of each; a shard has room for the largest step reached."""
    cfg = preset()
    values = list(map(tg.Schedule(cfg).at, range(cfg.num_scheduled_steps + cfg.num_extension_steps)))
    steps = [cfg.num_slots * (v.slot_tokens + 1) for v in values]
    need = sum(steps)
    largest = max(steps)

    def check(*have: int, **changes) -> None:
        changed = replace(cfg, **changes)
        tg.check_enough_data(changed, tg.Schedule(changed), shards(*have), shards(10**9))

    check(need)
    check(need // 4 + 1, need // 4 + 1, epochs=2)
    check(largest, epochs=0)
    check(steps[0], max_steps=1)
    check(largest, time_budget=9.0)
    for have, epochs in ((need - 1, 1), (need // 4 - 1, 4), (1, 1)):
        with refused(tg.DataError, "too few training tokens", "--epochs=0", f"{have * epochs} in 1 shards",
                     f"{need} for {len(steps)} steps", "cached_fineweb10B.py"):
            check(have, epochs=epochs)
    fits = (largest - 1 - cfg.num_slots) // 128 * 128
    with refused(tg.DataError, "too small", f"{largest} for", f"at most {fits} tokens"):
        check(largest - 1, epochs=0)

def test_check_enough_data__validation_tokens(tmp_path):
    cfg, headers = validation_config(tmp_path, random_stream(0, 200, 50, 3), 256)
    with refused(tg.DataError, "too few validation tokens", "128", "256", "--val_tokens=128 --val_batch_tokens=128"):
        tg.check_enough_data(cfg, tg.Schedule(cfg), shards(10**9), headers)
    short = replace(cfg, val_tokens=1024, val_batch_tokens=512)
    with refused(tg.DataError, "--val_tokens=384 --val_batch_tokens=384", "130 tokens in a shard"):
        tg.check_enough_data(short, tg.Schedule(short), shards(10**9), shards(100, 400, 258))

def test_bounded__its_own_timeout_and_that_of_the_work():
    cfg = preset(comm_timeout=1.0)
    with refused(tg.RunError, "waiting", "nothing after 1.0 s", "--comm_timeout"):
        tg.bounded(Future(), cfg, "waiting")
    failed = Future()
    failed.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out", "a shard"))
    with pytest.raises(TimeoutError, match="a shard"):
        tg.bounded(failed, cfg, "waiting")

@pytest.mark.parametrize("text, said", [
    ("YQ== 0\nYQ==", 1), ("YQ== 0\n%%% 1", 1), ("YQ== 0\nYQ== x", 1), ("\xff 0", 0),
    ("YQ== 0\nYQ== 1\nYQ== 2", 3), ("YQ== 0\nYQ== 1\nYQ== 2\nYQ== 3\nYQ== 4", 5)])
def test_read_vocabulary__each_id_but_the_document_start_has_its_bytes(tmp_path, text, said):
    """A hole among the 5 tokens, of which 3 is the document start, would be counted as no bytes."""
    cfg = preset(vocab_size=5, document_start=3)
    assert tg.read_vocabulary(tmp_path, cfg) is None
    (tmp_path / "vocab.txt").write_bytes(text.encode("latin-1"))
    with refused(tg.DataError, "vocab.txt", f"{said} tokens before", "all of 5", "document start 3", "remove the file"):
        tg.read_vocabulary(tmp_path, cfg)


# ---- scan and manifest ----------------------------------------------------------------------------------------------
def write_manifest(folder, shard: bytes, vocab: bytes) -> None:
    """Write one as a data tool does, that claims these contents."""
    entries = {}
    for name, content in (("a.bin", shard), ("vocab.txt", vocab)):
        entries[name] = dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(dict(format=1, files=entries)))

def test_scan_shards__the_hash_is_that_of_names_and_contents(tmp_path):
    """Every byte of every shard counts, in order; names may be any bytes."""
    names = b"a.bin", b"b.bin", b"\xff.bin"
    want = hashlib.sha256()
    for name in names:
        path = write_shard(tmp_path / os.fsdecode(name), GOOD, 6, 3)
        want.update(name + path.read_bytes())
    want.update(b"formula:6:3:100:1#0")
    headers = [tg.read_header(tmp_path / os.fsdecode(name)) for name in names]
    assert tg.scan_shards(headers + tg.find_shards("formula:6:3:100:1")) == want.hexdigest()

def test_check_manifest__a_file_has_to_match_it(tmp_path):
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    headers = tg.find_shards(str(path))
    pieces = b"".join(b"YQ== %d\n" % token for token in range(6) if token != 3)
    (tmp_path / "vocab.txt").write_bytes(pieces)
    write_manifest(tmp_path, path.read_bytes(), pieces)
    write_shard(tmp_path / "own.bin", GOOD, 6, 3)
    assert tg.scan_shards(headers + tg.find_shards(f"{tmp_path}/own.bin")), "files that it does not name are fine"
    cfg = preset(vocab_size=6, document_start=3)
    assert len(tg.read_vocabulary(tmp_path, cfg)) == 6

    write_manifest(tmp_path, path.read_bytes()[:-1] + b"\1", pieces[:-1])
    with refused(tg.DataError, "a.bin: content", "manifest.json", "mixture"):
        tg.scan_shards(headers)
    with refused(tg.DataError, "vocab.txt: content", "manifest.json", "mixture"):
        tg.read_vocabulary(tmp_path, cfg)
    (tmp_path / "manifest.json.part").touch()
    with refused(tg.DataError, "manifest.json.part", "run that tool again"):
        tg.scan_shards(headers)

@pytest.mark.parametrize("text", ["", "[]", '{"format": 3, "files": {}}', '{"format": 1, "files": {"a.bin": {}}}'])
def test_read_manifest__any_content_ends_in_words(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with refused(tg.DataError, "manifest.json as a manifest", "format 1", "remove this"):
        tg.read_manifest(tmp_path)

def test_open_data__shards_that_are_trained_on_and_validated_with_are_named(tmp_path, capsys):
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", random_stream(0, 20_000, 512, 511), 512, 511)
    (tmp_path / "link").symlink_to("b.bin")
    shared = preset(train_files=f"{tmp_path}/*.bin", val_files=f"{tmp_path}/link", max_steps=2)
    for cfg, said in ((shared, f"at least: {tmp_path}/b.bin"), (preset(), "")):
        tg.open_data(cfg, fabric(), b"source")
        out = capsys.readouterr().out
        assert said in out and bool(said) == bool(out)

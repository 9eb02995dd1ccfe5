"""Room 3: shards, packing, hash and loader against plain loops; every kind of bad data is named."""
import base64
import contextlib
import functools
import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import fabric, plan_of, planner_of, preset, random_stream, refused, write_shard

import train_gpt as tg

# ---- hash -----------------------------------------------------------------------------------------------------------

# previous, current, row of the table of 251,520 rows (recipe 11.1)
RECIPE_HASH = [
    (0, 0, 0), (0, 1, 36313), (1, 0, 27191), (1, 1, 59374), (11, 13, 238680), (13, 11, 228504), (198, 198, 142188),
    (464, 262, 71483), (262, 464, 70649), (31373, 995, 112356), (995, 31373, 144786), (50256, 0, 8169),
    (50256, 1, 37794), (50256, 464, 19030), (50256, 50256, 35060), (0, 50256, 175783), (50255, 50256, 244156),
    (50256, 50255, 127707), (50303, 50303, 145005), (59139, 0, 87582), (0, 65535, 122344), (65535, 65535, 166056)]
RECIPE_HASH_AT_1 = {0: 193815, 1: 159838, 262: 73104, 464: 204580, 50255: 32011, 50256: 5862}
ROWS = 251_520


def wrapped(x: int) -> int:
    """Two's complement in 32 bits."""
    return (x + 2**31) % 2**32 - 2**31


def slow_hash(tokens: list[int], rows: int) -> list[int]:
    out = [rows - 1]
    for t in range(1, len(tokens)):
        previous = tokens[t - 1] if t > 1 else rows - 1
        out.append((wrapped(36313 * tokens[t]) ^ wrapped(27191 * previous)) % (rows - 1))
    return out


def hashed(*tokens: int, rows: int = ROWS) -> list[int]:
    return tg.bigram_hash(np.array(tokens, np.int32), rows).tolist()


@pytest.mark.recipe
def test_hash_has_the_values_of_the_recipe():
    assert hashed(50256, 464, 262, 13, 50256, 50256, 198) == [251519, 204580, 71483, 2667, 204913, 35060, 14985]
    for previous, current, row in RECIPE_HASH:
        assert hashed(0, previous, current)[2] == row, (previous, current)
    for current, row in RECIPE_HASH_AT_1.items():
        assert hashed(50256, current)[1] == hashed(7, current)[1] == row, "the token at 0 does not matter at 1"


@pytest.mark.parametrize("rows", [2, 640, 251_520, 2**31 - 1])
def test_hash_is_32_bit_arithmetic_that_wraps(rows):
    tokens = np.random.default_rng(rows).integers(0, 65536, 400).tolist()
    assert hashed(*tokens, rows=rows) == slow_hash(tokens, rows)


# ---- packing --------------------------------------------------------------------------------------------------------

SHARD_11_3 = [9, 1, 2, 3, 9, 4, 9, 5, 6, 7, 8, 1, 2, 3, 9, 1, 1, 9, 2, 2, 2, 2, 9, 3, 3, 3, 3, 3, 3, 3, 3, 3, 9, 4, 4]
CASES_11_3 = [  # slots, tokens, longest document; inputs, targets and bounds of each slot, then the next document
    (2, 8, 5,
     [("9 1 2 3 9 4 9 5", "1 2 3 9 4 9 5 6", "0 4 6 8"), ("9 1 1 9 2 2 2 2", "1 1 9 2 2 2 2 9", "0 3 8 8")], 6),
    (2, 6, 3, [("9 1 2 9 4 9", "1 2 9 4 9 5", "0 3 5 6"), ("9 1 1 9 2 2", "1 1 9 2 2 9", "0 3 6 6")], 6),
    (3, 4, 3, [("9 1 2 9", "1 2 9 4", "0 3 4"), ("9 5 6 9", "5 6 9 1", "0 3 4"), ("9 2 2 9", "2 2 9 3", "0 3 4")], 6),
]


def slow_block(tokens: list[int], start_token: int, doc: int, slots: int, length: int, longest: int):
    """Recipe 5.2 word by word: (pieces of each slot, next document), or None where the documents run out."""
    starts = [at for at, token in enumerate(tokens) if token == start_token]
    block = []
    for _ in range(slots):
        pieces, have = [], 0
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
@pytest.mark.parametrize("slots, length, longest, want, next_doc", CASES_11_3)
def test_packing_of_the_recipe(slots, length, longest, want, next_doc):
    shard = tg.Shard(np.array(SHARD_11_3, np.uint16), 9)
    packed, doc = tg.pack_block(shard, 0, slots, length, longest)
    for (starts, ends), (inputs, targets, bounds) in zip(packed, want, strict=True):
        slot = tg.make_slot(shard, starts, ends)
        assert slot.tokens[:-1].tolist() == [int(x) for x in inputs.split()]
        assert slot.tokens[1:].tolist() == [int(x) for x in targets.split()]
        assert slot.cu_seqlens.tolist() == [int(x) for x in bounds.split()]
    assert doc == next_doc
    assert tg.pack_block(shard, doc, 1, length, longest) is None, "what is left is lost with the shard"


@pytest.mark.parametrize("seed", range(12))
def test_packing_equals_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    stream = random_stream(seed, 900, 20, 7, mean=(1, 3, 9, 40)[seed % 4])
    shard, tokens = tg.Shard(stream.astype(np.uint16), 7), stream.tolist()
    doc, slots = 0, int(rng.integers(1, 5))
    while True:                                                      # sizes change on the way, as between stages
        length, longest = int(rng.integers(4, 40)), int(rng.integers(2, 30))
        want = slow_block(tokens, 7, doc, slots, length, longest)
        got = tg.pack_block(shard, doc, slots, length, longest)
        if want is None:
            assert got is None
            break
        assert got[1] == want[1]
        for (starts, ends), pieces in zip(got[0], want[0], strict=True):
            assert list(zip(starts, ends)) == pieces
            slot = tg.make_slot(shard, starts, ends)
            assert (slot.tokens.tolist(), slot.cu_seqlens.tolist()) == slow_slot(tokens, pieces)
        doc = want[1]


# ---- validation -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sizes, slots, length", [
    ((200,), 2, 16), ((65, 66, 67, 33), 2, 16), ((34, 33), 2, 16), ((97, 98), 1, 32), ((10,), 1, 16)])
def test_validation_slots_equal_a_plain_loop(sizes, slots, length):
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


def validation_config(tmp_path, stream, tokens: int, **header):
    write_shard(tmp_path / "v.bin", stream, **header)
    cfg = preset(val_files=f"{tmp_path}/*.bin", val_batch_tokens=128, val_tokens=tokens, **header)
    return cfg, tg.find_shards(cfg.val_files)


def test_validation_batches_are_dealt_in_blocks(tmp_path):
    cfg, headers = validation_config(tmp_path, random_stream(0, 300, 50, 3), 256, vocab_size=50, document_start=3)
    values = tg.Schedule(cfg).at(0)
    whole = [batch.tokens for batch in tg.ValidationSet(cfg, fabric(), headers).batches(values)]
    assert [tuple(tokens.shape) for tokens in whole] == [(8, 16), (8, 16)]
    for rank in range(4):
        part = [batch.tokens for batch in tg.ValidationSet(cfg, fabric(rank, 4), headers).batches(values)]
        assert all(mine.equal(tokens[rank::4]) for mine, tokens in zip(part, whole, strict=True))


def test_unigram_entropy_and_bits_per_byte(tmp_path):
    stream = random_stream(1, 300, 5, 4)
    pieces = [b"a", b"bc", b"\xff\x00", b"defg"]
    lines = [f"{base64.b64encode(piece).decode()} {token}" for token, piece in enumerate(pieces)]
    cfg, headers = validation_config(tmp_path, stream, 256, vocab_size=5, document_start=4)
    assert tg.ValidationSet(cfg, fabric(), headers).text_losses(1.0) == {}, "nothing is claimed without the bytes"
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    counts = Counter(stream[1:257].tolist())                         # targets: the inputs shifted by one
    nats = -sum(c / 256 * math.log(c / 256) for c in counts.values())
    bytes_in_all = sum(len(pieces[token]) * c for token, c in counts.items() if token != 4)
    found = tg.ValidationSet(cfg, fabric(), headers).text_losses(1.5)
    assert found == pytest.approx(dict(val_bpb=1.5 * 256 / math.log(2) / bytes_in_all, unigram_nats=nats), rel=1e-12)


# ---- loader ---------------------------------------------------------------------------------------------------------

def write_shards(tmp_path, *counts: int) -> list[list[int]]:
    """Shards of random documents of at most 12 tokens' use; returns their tokens."""
    streams = [random_stream(seed, count, 50, 3).tolist() for seed, count in enumerate(counts)]
    for k, stream in enumerate(streams):
        write_shard(tmp_path / f"train_{k:06d}.bin", stream, 50, 3)
    return streams


def make_loader(tmp_path, rank=0, world=1, steps=12, exchange=None, **changes):
    cfg = preset(train_files=f"{tmp_path}/train_*.bin", vocab_size=50, document_start=3, max_doc_len=12, **changes)
    values = [tg.Schedule(cfg).at(step) for step in range(steps)]
    cycles = [values[first:first + 2] for first in range(0, steps, 2)]
    return tg.Loader(cfg, fabric(rank, world), tg.find_shards(cfg.train_files), cycles, exchange), values


def read_all(loader, values) -> list[tg.Batch]:
    loader.start()
    batches = [loader.next(v) for v in values]
    loader.close()
    return batches


def slow_stream(streams, values, slots=8):
    """(tokens, bounds) of all slots of each step: a block that does not fit starts the next shard."""
    shard, doc, steps = 0, 0, []
    for v in values:
        while (found := slow_block(streams[shard], 3, doc, slots, v.slot_tokens, 12)) is None:
            shard, doc = shard + 1, 0
        block, doc = found
        steps.append([slow_slot(streams[shard], pieces) for pieces in block])
    return steps


def logical(batch, label, x):
    """Logical rows as nested lists: a batch has places in its plan's list, but a single rank rows as they are."""
    plan, world = batch.plans[label], len(batch.plans[label].send_counts)
    if world == 1:
        return x.tolist()
    physical = plan.my_rows[x.long()]
    return (physical % plan.shard_size * world + physical // plan.shard_size).tolist()


def check_batches(batches, steps):
    for step, (batch, want) in enumerate(zip(batches, steps, strict=True)):
        assert batch.step == step
        assert batch.tokens.tolist() == [tokens[:-1] for tokens, _ in want]
        assert batch.targets.tolist() == [tokens[1:] for tokens, _ in want]
        assert {label: logical(batch, label, x) for label, x in batch.rows.items()} == dict(
            bigram_embed=[slow_hash(tokens[:-1], 640) for tokens, _ in want],
            value_embed=[[[k * 128 + token for token in tokens[:-1]] for k in range(5)] for tokens, _ in want],
            embed=[tokens[:-1] for tokens, _ in want]), "the vocabulary of 50 is padded to 128"
        columns, length = max(len(bounds) for _, bounds in want), batch.tokens.shape[1]
        assert batch.cu_seqlens.tolist() == [bounds + [length] * (columns - len(bounds)) for _, bounds in want]
        types = [x.dtype for x in (batch.tokens, batch.targets, batch.cu_seqlens, *batch.rows.values())]
        assert types == [torch.int32, torch.int64, *[torch.int32] * 4]
        lists = [x for plan in batch.plans.values() for x in (plan.my_rows, plan.requested_rows)]
        assert all(x.dtype == torch.int64 for x in lists)


@pytest.mark.parametrize("counts", [(9000,), (1500, 300, 2600, 4000)])     # the second shard is too small for a block
def test_loader_stream_equals_a_plain_loop(tmp_path, counts):
    streams = write_shards(tmp_path, *counts)
    loader, values = make_loader(tmp_path)
    check_batches(read_all(loader, values), slow_stream(streams, values))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_slot_s_goes_to_rank_s_mod_world(tmp_path, world):
    streams = write_shards(tmp_path, 2000, 6000)
    for rank in range(world):
        loader, values = make_loader(tmp_path, rank, world)
        check_batches(read_all(loader, values), [step[rank::world] for step in slow_stream(streams, values)])


@pytest.mark.parametrize("epochs, passes", [(2, 2), (0, 6)])
def test_epochs_go_through_the_shards_again(tmp_path, epochs, passes):
    streams = write_shards(tmp_path, 1200, 1100)
    loader, values = make_loader(tmp_path, epochs=epochs, steps=8 if epochs else 12, num_extension_steps=30)
    check_batches(read_all(loader, values), slow_stream(streams * passes, values))


@pytest.mark.parametrize("world", [1, 2, 8])
def test_loader__data_that_end(tmp_path, world):
    """Every rank trains the same whole cycles; `plans_ahead` has none for the next one, and `next` says why."""
    streams = write_shards(tmp_path, 1200, 1100)
    for rank in range(world):
        loader, values = make_loader(tmp_path, rank, world)
        enough = next(n for n in range(12) if too_short(streams, values[:n + 1]))
        cycle = enough // 2 * 2
        loader.start()
        for v in values[:cycle]:
            assert loader.plans_ahead() is not None or v.step == cycle - 1
            loader.next(v)
        assert loader.plans_ahead() is None
        refused(tg.DataEnded, lambda: loader.next(values[cycle]), "training data ended", "2 shards", "train_*.bin",
                f"enough for {enough} steps", f"--max_steps={enough}", "--epochs=0")
        loader.close()


def too_short(streams, values) -> bool:
    with contextlib.suppress(IndexError):
        return not slow_stream(streams, values)
    return True


def test_shards_without_room_for_a_block_end_the_cycle(tmp_path):
    write_shards(tmp_path, 100, 100)
    loader, values = make_loader(tmp_path, epochs=0)
    loader.start()
    refused(tg.DataEnded, lambda: loader.next(values[0]), "2 shards", "8 x 17 tokens in one shard", "larger shards")
    loader.close()


def test_tokens_do_not_depend_on_timing(tmp_path, monkeypatch):
    """The same bits with a slow disk, a slow packer, and a slow reader of the batches."""
    streams = write_shards(tmp_path, 1500, 300, 2600, 4000)
    load, make = tg.load_shard, tg.Loader._make_cycle

    def slow_load(header):
        time.sleep(0.05)
        return load(header)

    def slow_make(self):
        time.sleep(0.01 * (self.doc % 3))
        return make(self)

    for name, target, slow in (("load_shard", tg, slow_load), ("_make_cycle", tg.Loader, slow_make)):
        monkeypatch.setattr(target, name, slow)
    loader, values = make_loader(tmp_path)
    loader.start()
    batches = []
    for v in values:
        batches.append(loader.next(v))
        time.sleep(0.01 * (v.step % 2))
    loader.close()
    check_batches(batches, slow_stream(streams, values))


def test_loader_is_exactly_one_cycle_ahead(tmp_path, monkeypatch):
    write_shards(tmp_path, 9000)
    built, block = [], tg.Loader._block
    monkeypatch.setattr(tg.Loader, "_block", lambda self, values: (
        built.append((values.step, threading.current_thread())) or block(self, values)))
    loader, values = make_loader(tmp_path, steps=5)
    assert not built
    loader.start()
    for step, ahead in enumerate((4, 4, 5, 5, 5)):
        loader.next(values[step])
        loader.wait()                                                # until the work that was asked for is done
        assert [step for step, _ in built] == list(range(ahead))
    assert len({thread for _, thread in built} - {threading.main_thread()}) == 1, "off the training thread"
    loader.close()


def test_shards_are_read_one_ahead_and_only_when_needed(tmp_path, monkeypatch):
    write_shards(tmp_path, 1500, 1500, 1500, 1500)
    read, load = [], tg.load_shard
    monkeypatch.setattr(tg, "load_shard", lambda header: read.append(header.name[-5]) or load(header))
    loader, values = make_loader(tmp_path, steps=2)
    assert not read
    loader.start()
    loader.wait()
    loader.reader.submit(int).result()                               # the reader is done with what it was given
    assert read == ["0", "1"]
    loader.close()


def test_an_error_in_the_thread_surfaces_in_next(tmp_path):
    streams = write_shards(tmp_path, 1500, 4000)
    streams[1][77] = 50                                              # not an id of a vocabulary of 50
    write_shard(tmp_path / "train_000001.bin", streams[1], 50, 3)
    loader, values = make_loader(tmp_path)
    loader.start()
    loader.next(values[0])
    refused(tg.DataError, lambda: [loader.next(v) for v in values[1:]], "train_000001.bin",
            "tokens up to 50", "below the vocabulary size 50")
    loader.close()


@pytest.mark.parametrize("where", ["load_shard", "pack_block"])
def test_a_stuck_thread_is_an_error_after_the_timeout(tmp_path, monkeypatch, where):
    write_shards(tmp_path, 9000)
    release = threading.Event()
    monkeypatch.setattr(tg, where, lambda *_: release.wait(10))
    loader, values = make_loader(tmp_path)
    loader.cfg = replace(loader.cfg, comm_timeout=0.05)
    loader.start()
    refused(tg.RunError, lambda: loader.next(values[0]), "nothing after 0.05 s", "--comm_timeout")
    release.set()
    loader.close()


def test_formula_tokens_are_the_same_everywhere_and_full_of_documents():
    tokens = tg.formula_tokens(1, 40_000, 512, 511)
    assert tokens.dtype == np.uint16 and tokens.max() == 511 and tokens[0] == 511
    assert tokens[:8].tolist() == tg.formula_tokens(1, 8, 512, 511).tolist()
    assert not np.array_equal(tokens, tg.formula_tokens(2, 40_000, 512, 511))
    assert 28 < 40_000 / np.sum(tokens == 511) < 36                  # documents of 32 tokens on average
    assert len(np.unique(tokens)) > 256
    assert np.array_equal(tg.formula_tokens(0, 100, 300, 0) == 0, tg.formula_tokens(0, 100, 300, 299) == 299)


def test_each_data_value_of_the_schedule_matters(tmp_path):
    write_shards(tmp_path, 9000)

    def first(**changes):
        loader, values = make_loader(tmp_path, steps=1)
        loader.cycles = iter([[replace(values[0], **changes)]])
        return read_all(loader, values)[0]

    assert first().tokens.shape == (8, 16) and first(slot_tokens=32).tokens.shape == (8, 32)


# ---- row plans ------------------------------------------------------------------------------------------------------

def slow_plan(rows: set[int], count: int, world: int) -> tuple[list[int], list[int]]:
    """(physical rows, how many of each owner): row r is the r div W-th of rank r mod W, slices are equally long."""
    size = math.ceil(count / world)
    owners = [sorted(row for row in rows if row % world == owner) for owner in range(world)]
    return [k * size + row // world for k, owner in enumerate(owners) for row in owner], list(map(len, owners))


PATTERNS = {                                 # rows of a table of R that two steps read
    "first": lambda rng, R: [np.zeros((2, 7)), np.zeros((2, 9))],
    "last": lambda rng, R: [np.full((2, 7), R - 1), np.full((1, 9), R - 1)],
    "both ends": lambda rng, R: [np.array([[0, R - 1, 0]]), np.array([[R - 1, R - 1]])],
    "all": lambda rng, R: [rng.permutation(R)[None], rng.permutation(R)[None]],
    "all but one": lambda rng, R: [rng.permutation(R - 1)[None]],
    "one owner": lambda rng, R: [rng.integers(0, -(-R // 24), (2, 11)) * 24],
    "few": lambda rng, R: [rng.integers(0, R, (3, 2, 5)), rng.integers(0, R, (3, 2, 8))],
    "many": lambda rng, R: [rng.integers(0, R, (2, 4 * R)), rng.integers(0, R, (2, R))],
    "skewed": lambda rng, R: [(R * rng.random((4, 3, 60))**6).astype(int)],
}


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_plans_equal_plain_sets(world, mode):
    """Tables that W divides or does not, and of fewer rows than ranks; one planner for many plans, as in a run."""
    for count in (2, 3, 7, 24, 101, 640):
        rng, kept = np.random.default_rng(count), []
        table = tg.Table("bigram_embed", count, 1, None, tied=True)
        planner, size = planner_of(preset(row_comms=mode), fabric(world - 1, world), table), math.ceil(count / world)
        for name, pattern in PATTERNS.items():
            rows = [x.astype(np.int32) for x in pattern(rng, count)]
            before = [x.copy() for x in rows]
            read = {row for x in rows for row in x.ravel().tolist()}
            for tied in (False, True):
                plan, found = plan_of(planner, table, rows, tied)
                ids, counts = slow_plan(read, count, world)
                if mode == "dense" and world > 1 and not tied:
                    ids, counts = list(range(world * size)), [size] * world
                assert plan.my_rows.tolist() == plan.requested_rows.tolist() == ids == sorted(set(ids)), (name, count)
                assert plan.send_counts == plan.recv_counts == counts and plan.my_rows.dtype == torch.int64
                assert (plan.shard_size, plan.tied, plan.sent, plan.received) == (size, tied, 0, 0)
                assert plan.plan_ms >= 0 and plan.reads == sum(x.size for x in rows)
                if tied:
                    assert plan.head_columns.tolist() == sorted(read, key=lambda row: (row % world, row))
                for x, old, places in zip(rows, before, found, strict=True):
                    assert np.array_equal(x, old), "the rows that were asked about are as they were"
                    physical = [slow_plan({row}, count, world)[0][0] for row in x.ravel().tolist()]
                    want = [ids.index(p) for p in physical] if world > 1 else physical
                    assert places.shape == x.shape and places.dtype == np.int32
                    assert places.ravel().tolist() == want, name
                kept.append((plan, ids, found, [places.copy() for places in found]))
        for plan, ids, found, places in kept:
            unchanged = plan.my_rows.tolist() == ids and all(map(np.array_equal, found, places))
            assert unchanged, "no plan changes an older one"


def check_plans(batches: list[tg.Batch], cfg: tg.Config, world: int, purpose: str, tied: bool) -> None:
    """Batches of one cycle share plans of all they read."""
    first, length = batches[0], sum(batch.tokens.shape[1] for batch in batches)
    for label, count in (("bigram_embed", cfg.bigram_rows), ("value_embed", 5 * cfg.padded_vocab),
                         ("embed", cfg.padded_vocab)):
        plan, rows = first.plans[label], set()
        assert all(batch.plans == first.plans for batch in batches)
        for batch in batches:                                        # logical rows from the tokens of the batch
            for slot in batch.tokens.tolist():
                rows |= dict(bigram_embed=set(slow_hash(slot, count)), embed=set(slot),
                             value_embed={k * cfg.padded_vocab + token for k in range(5) for token in slot})[label]
            assert [logical(batch, label, batch.rows[label][s]) for s in range(len(batch.tokens))] == [
                dict(bigram_embed=slow_hash(slot, count), embed=slot, value_embed=[
                    [k * cfg.padded_vocab + token for token in slot] for k in range(5)])[label]
                for slot in batch.tokens.tolist()]
        assert (plan.my_rows.tolist(), plan.send_counts) == slow_plan(rows, count, world)
        assert plan.tag == dict(purpose=purpose, cycle=first.step // 2, tokens=length), "alike on all ranks"
        assert plan.tied == (tied and label == "embed")
        assert plan.requested_rows.tolist() == plan.my_rows.tolist(), "there is nobody to ask"
        if plan.tied:
            assert plan.head_columns.tolist() == sorted(rows, key=lambda row: (row % world, row))


@pytest.mark.parametrize("rank, world", [(0, 1), (1, 2), (3, 4), (7, 8)])
def test_plans_of_a_stage_change_inside_a_cycle_and_of_a_half_last_cycle(tmp_path, rank, world):
    """Stages of the tiny preset begin at 0, 3, 6 and 9: cycles (2, 3) and (8, 9) are mixed. Step 12 is alone."""
    write_shards(tmp_path, 2000, 6000)
    loader, values = make_loader(tmp_path, rank, world, steps=13, num_extension_steps=4)
    batches = read_all(loader, values)
    sizes = [batch.tokens.shape[1] for batch in batches]
    assert sizes == [16] * 3 + [32] * 3 + [48] * 7
    for cycle in range(7):
        tied = cycle <= 3                                            # head and embedding part after step 7
        check_plans(batches[2 * cycle:2 * cycle + 2], loader.cfg, world, "train", tied)
    assert [batch.plans["embed"].tag["tokens"] for batch in batches[2:4] + batches[12:]] == [48, 48, 48]
    plans = [batch.plans for batch in batches]
    cycles = {tuple(map(id, x.values())) for x in plans}                      # the plans of each, whatever holds them
    assert len(cycles) == 7 and all(plans[k] == plans[k + 1] for k in range(0, 12, 2))


def test_validation_has_plans_of_its_own_for_each_block(tmp_path):
    cfg, headers = validation_config(tmp_path, random_stream(0, 400, 50, 3), 256, vocab_size=50, document_start=3)
    for step, tied in ((5, True), (12, False)):
        for rank, world in ((0, 1), (3, 4)):
            batches = list(tg.ValidationSet(cfg, fabric(rank, world), headers).batches(tg.Schedule(cfg).at(step)))
            assert len(batches) == 2
            for batch in batches:
                check_plans([batch], cfg, world, "validation", tied)


def test_a_part_of_a_batch_keeps_its_step_and_its_plans(tmp_path):
    write_shards(tmp_path, 2000)
    loader, values = make_loader(tmp_path, steps=2)
    batch = read_all(loader, values)[1]
    part = batch.map(lambda x: x[2:5])
    assert part.step == 1 and part.plans is batch.plans
    for name in ("tokens", "targets", "cu_seqlens"):
        assert getattr(part, name).equal(getattr(batch, name)[2:5]), name
    assert part.rows.keys() == batch.rows.keys()
    assert all(x.equal(batch.rows[label][2:5]) for label, x in part.rows.items())


def test_the_exchange_meets_each_cycle_once_in_order_on_the_loader_thread(tmp_path):
    """It sees the plans of all tables before anyone else, and what it fills in is what the batches hold."""
    write_shards(tmp_path, 4000)
    seen = []

    def exchange(plans):
        seen.append((plans, threading.current_thread()))
        for label, plan in plans.items():
            plan.requested_rows, plan.recv_counts = torch.tensor([len(seen), len(label)]), [1, 1]

    loader, values = make_loader(tmp_path, 1, 2, steps=5, exchange=exchange)
    batches = read_all(loader, values)
    assert [plans["embed"].tag["cycle"] for plans, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread in seen} - {threading.main_thread()}) == 1
    for batch in batches:
        assert batch.plans == seen[batch.step // 2][0] and set(batch.plans) == {"bigram_embed", "value_embed", "embed"}
        for label, plan in batch.plans.items():
            assert plan.requested_rows.equal(torch.tensor([batch.step // 2 + 1, len(label)]))
            assert plan.recv_counts == [1, 1]


def test_plans_ahead_are_those_of_the_next_cycle_and_none_at_the_end(tmp_path):
    write_shards(tmp_path, 4000)
    loader, values = make_loader(tmp_path, steps=5)
    loader.start()
    ahead = [loader.plans_ahead()]
    batches = []
    for v in values:
        batches.append(loader.next(v))
        ahead.append(loader.plans_ahead())
        assert loader.plans_ahead() is ahead[-1], "asked for once for each table"
    loader.close()
    assert ahead[0] is batches[0].plans
    for step, plans in enumerate(ahead[1:]):
        assert plans is (batches[2 * (step // 2) + 2].plans if step < 4 else None)


@pytest.mark.parametrize("error", [tg.ConfigError, tg.RunError])
def test_other_errors_of_the_cycle_ahead_surface_in_plans_ahead(tmp_path, error):
    """Ranks that disagree about the next cycle must not begin to send its rows."""
    write_shards(tmp_path, 4000)

    def exchange(plans):
        if plans["embed"].tag["cycle"] == 1:
            raise error("row plans", "a", "b", "c")

    loader, values = make_loader(tmp_path, steps=6, exchange=exchange)
    loader.start()
    loader.next(values[0])
    refused(error, loader.plans_ahead, "row plans")
    loader.next(values[1])
    refused(error, lambda: loader.next(values[2]), "row plans")
    loader.close()


def test_plans_ahead_that_do_not_come_are_an_error_after_the_timeout(tmp_path):
    write_shards(tmp_path, 4000)
    release = threading.Event()
    loader, values = make_loader(tmp_path, steps=6, exchange=lambda plans: (
        plans["embed"].tag["cycle"] == 1 and release.wait(10)))
    loader.start()
    loader.next(values[0])
    loader.cfg = replace(loader.cfg, comm_timeout=0.05)
    refused(tg.RunError, loader.plans_ahead, "nothing after 0.05 s", "--comm_timeout")
    release.set()
    loader.close()


def slow_ngrams(tokens: list[int], factors: tuple, modulus: int, none: int) -> list[int]:
    out = []
    for at in range(len(tokens)):
        mixed = 0
        for back, factor in enumerate(factors):
            mixed ^= wrapped(factor * tokens[at - back]) if at >= back else 0
        out.append(mixed % modulus if at >= len(factors) - 1 else none)
    return out


@pytest.mark.parametrize("order", [2, 3, 4])
def test_row_tables__rows_and_signs_of_ngrams(order):
    table = tg.NgramTable("a_embed", order, 1000, signs=1, home="host", cadence=4, rounding="stochastic")
    *recipe, found = tg.row_tables(preset(tables=(table,), adam_every=1))
    assert [(x.label, x.is_rowwise, x.cadence) for x in recipe] == [
        ("bigram_embed", False, 1), ("value_embed", False, 1), ("embed", False, 1)]
    assert (found.rows, found.reads, found.tied, found.is_rowwise) == (1000, 1, False, True)
    assert (found.home, found.cadence, found.rounding) == ("host", 4, "stochastic")
    tokens = np.random.default_rng(order).integers(0, 65536, (2, 200)).astype(np.int32)
    before = tokens.copy()
    for call, factors, modulus, none in ((found.ids, tg.NGRAM_FACTORS[order][0], 999, 999),
                                         (found.signs, tg.NGRAM_FACTORS[order][1], 8192, 8192)):
        assert call(tokens).dtype == np.int32
        assert call(tokens).tolist() == [slow_ngrams(slot, factors, modulus, none) for slot in tokens.tolist()]
    assert np.array_equal(tokens, before)
    assert tg.row_tables(preset(tables=(table._replace(signs=0),)))[-1].signs is None


def test_tables_are_rows_of_the_parameter_table():
    cfg = preset("record", 50_257, 50_256)
    found = {table.label: table for table in tg.row_tables(cfg)}
    for label, count, reads, tied in (("bigram_embed", 251_520, 1, False), ("value_embed", 5 * 50_304, 5, False),
                                      ("embed", 50_304, 1, True)):
        table, tokens = found.pop(label), np.array([[7, 50_256, 0, 3], [1, 1, 1, 1]], np.int32)
        assert (table.rows, table.reads, table.tied, table.cadence) == (count, reads, tied, cfg.adam_every)
        ids = table.ids(tokens)
        assert ids.dtype == np.int32 and ids.size == reads * tokens.size and 0 <= ids.min() and ids.max() < count
        parameter = next(row for row in tg.parameter_table(cfg) if row.label == label)
        assert parameter.rows[:3] == table[:3] and parameter.shape == (count, 768)
    assert not found


# ---- bad data -------------------------------------------------------------------------------------------------------

GOOD = [3, 1, 2, 3, 4, 5] * 20
BAD_FILES = {                                # how the file is made -> what the message must hold
    "magic": (dict(magic=1), None, ("a.bin", "begin with 1, 1", "20240520", "data/README.md")),
    "version": (dict(version=2), None, ("a.bin", "20240520, 2, 120")),
    "cut": (dict(), -10, ("a.bin", f"{1024 + 240 - 10} bytes", "120", "fetch or write it again")),
    "longer": (dict(count=100), None, ("a.bin", f"{1024 + 240} bytes", "20240520, 1, 100")),
    "no header": (dict(), -500, ("a.bin", "764 bytes", "1024 bytes")),
    "empty": (dict(), -5000, ("a.bin", "0 bytes that begin with 0, 0, 0", "1024 bytes")),
    "no tokens": (dict(count=0), None, ("a.bin", "20240520, 1, 0")),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_damaged_header_is_refused(tmp_path, kind):
    header, cut, parts = BAD_FILES[kind]
    path = write_shard(tmp_path / "a.bin", GOOD, **dict(vocab_size=6, document_start=3) | header)
    if cut:
        path.write_bytes(path.read_bytes()[:cut])
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/*.bin"), *parts)


@pytest.mark.parametrize("tokens, header, parts", [
    (GOOD, (5, 3), ("a.bin", "tokens up to 5", "below the vocabulary size 5")),
    (GOOD, (9, 8), ("a.bin", "0 of them document starts", "token 8")),
])
def test_bad_tokens_are_refused(tmp_path, tokens, header, parts):
    write_shard(tmp_path / "a.bin", tokens, *header)
    refused(tg.DataError, lambda: tg.load_shard(tg.find_shards(f"{tmp_path}/a.bin")[0]), *parts)


def test_a_file_that_shrinks_after_the_start_is_refused(tmp_path):
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    headers = tg.find_shards(str(path))
    path.write_bytes(path.read_bytes()[:-20])
    refused(tg.DataError, lambda: tg.load_shard(headers[0]), "a.bin", "110 tokens", "120")


def test_header_words_3_and_4_name_the_vocabulary_and_0_means_gpt2(tmp_path):
    for k, words in enumerate([(6, 3), (0, 0)]):
        write_shard(tmp_path / f"{k}.bin", GOOD, *words)
    assert [header[1:4] for header in tg.find_shards(f"{tmp_path}/*.bin")] == [(120, 6, 3), (120, 50_257, 50_256)]


def test_shards_are_taken_in_name_order(tmp_path, monkeypatch):
    names = ["a_10.bin", "a_2.bin", "b.bin"]
    for name in names:
        write_shard(tmp_path / name, GOOD, 6, 3)
    found = [str(tmp_path / name) for name in (names[2], names[0], names[1])]
    monkeypatch.setattr(tg.glob, "glob", lambda pattern: found)      # as a file system may list them
    assert [header.name for header in tg.find_shards("any")] == [str(tmp_path / name) for name in names]


def test_no_shards(tmp_path):
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/none_*.bin"), "none_*.bin", "no such file",
            "cached_fineweb10B.py", "pocket.py", "--train_files=")


ROOMY = [tg.ShardHeader("shard", 10**9, 512, 511)]                     # as many tokens as anybody needs


def shards(*sizes: int, vocab=(512, 511)) -> list[tg.ShardHeader]:
    return [tg.ShardHeader(f"shard_{k}.bin", size, *vocab) for k, size in enumerate(sizes)]


def test_the_header_decides_the_sizes():
    gpt2 = shards(1, vocab=(50_257, 50_256))
    cfg = tg.resolve(tg.Config(**tg.PRESETS["pocket"]), gpt2, gpt2)
    assert (cfg.vocab_size, cfg.document_start, cfg.padded_vocab, cfg.bigram_rows) == (50_257, 50_256, 50_304, 251_520)
    given = replace(cfg, padded_vocab=50_400, bigram_rows=1000)
    assert tg.resolve(given, gpt2, gpt2) == given


@pytest.mark.parametrize("changes, val_vocab, kind, parts", [
    (dict(vocab_size=500), (512, 511), "ConfigError", ("--vocab_size", "500", "512", "shard_0.bin", "leave the flag")),
    (dict(document_start=0), (512, 511), "ConfigError", ("--document_start", "found:    0", "511", "shard_0.bin")),
    (dict(padded_vocab=511), (512, 511), "ConfigError", ("--padded_vocab", "511", "512")),
    (dict(), (512, 510), "DataError", ("different vocabularies", "(512, 510)", "(512, 511)", "one data set")),
    (dict(), (600, 511), "DataError", ("different vocabularies", "(600, 511)", "(512, 511)")),
])
def test_contradictions_are_refused(changes, val_vocab, kind, parts):
    cfg = tg.Config(**tg.PRESETS["tiny"] | changes)
    refused(getattr(tg, kind), lambda: tg.resolve(cfg, shards(10), shards(10, vocab=val_vocab)), *parts)
    if kind == "DataError":
        refused(tg.DataError, lambda: tg.resolve(cfg, shards(10) + shards(10, vocab=val_vocab), shards(10)), *parts)


@pytest.mark.parametrize("have, epochs", [(8 * 17 * 3 - 1, 1), (100, 4), (8 * 17 * 3 + 8 * 33, 1), (1, 1)])
def test_too_few_tokens_are_known_before_the_start(have, epochs):
    """Steps of 8 x 17 tokens in stage 0 (three steps), 8 x 33 in stage 1."""
    cfg = preset(epochs=epochs)
    refused(tg.DataError, lambda: tg.check_enough_data(cfg, tg.Schedule(cfg), shards(have), ROOMY),
            "too few training tokens",
            f"{have * epochs} in 1 shards", f"{8 * (3 * 17 + 3 * 33 + 6 * 49)} for 12 steps", "--epochs=0",
            "cached_fineweb10B.py")


def test_enough_tokens_pass():
    need = 8 * (3 * 17 + 3 * 33 + 6 * 49)                            # steps x (tokens of a slot + 1), by stage
    for changes, have in ((dict(), [need]), (dict(epochs=2), [need // 4 + 1] * 2), (dict(epochs=0), [8 * 49]),
                          (dict(max_steps=1), [8 * 17]), (dict(time_budget=9.0), [8 * 49])):
        cfg = preset(**changes)
        tg.check_enough_data(cfg, tg.Schedule(cfg), shards(*have), ROOMY)


def test_check_enough_data__too_few_validation_tokens(tmp_path):
    cfg, headers = validation_config(tmp_path, random_stream(0, 200, 50, 3), 256, vocab_size=50, document_start=3)
    check = functools.partial(tg.check_enough_data, cfg, tg.Schedule(cfg), ROOMY)
    refused(tg.DataError, lambda: check(headers), "too few validation tokens", "128", "256", "--val_tokens=128")
    write_shard(tmp_path / "v.bin", GOOD, 50, 3)
    refused(tg.DataError, lambda: check(tg.find_shards(cfg.val_files)), "found:    0", "--val_batch_tokens")


@pytest.mark.parametrize("line", ["YQ==", "%%% 1", "YQ== x", "YQ== 1 2", "YQ=="])
def test_a_broken_line_of_the_vocabulary_is_refused(tmp_path, line):
    cfg, _ = validation_config(tmp_path, GOOD, 256, vocab_size=50, document_start=3)
    (tmp_path / "vocab.txt").write_text(f"YQ== 0\n{line}\n")
    refused(tg.DataError, lambda: tg.read_vocabulary(tmp_path, cfg), "vocab.txt",
            "1 tokens before a line that is none", "remove the file")


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 4, 5), (0, 1, 2, 3, 4), (0, 1, 2, -1)])
def test_a_vocabulary_of_other_ids_is_refused(tmp_path, ids):
    """Each id but the document start, 3 of 5, has its bytes: a hole would be counted as no bytes."""
    (tmp_path / "vocab.txt").write_text("\n".join(f"YQ== {token}" for token in ids))
    cfg = preset(vocab_size=5, document_start=3)
    refused(tg.DataError, lambda: tg.read_vocabulary(tmp_path, cfg), "vocab.txt", f"{len(ids)} tokens", "all of 5",
            "document start 3")


# ---- files that somebody else names ---------------------------------------------------------------------------------

def test_brackets_in_a_folders_name_mean_themselves(tmp_path, monkeypatch):
    """Where the folder exists; a pattern with brackets that no folder has is a pattern."""
    odd = tmp_path / "my [data] *"
    (odd / "deep?er").mkdir(parents=True)
    for path in (odd / "train_0.bin", odd / "train_[1].bin", odd / "deep?er/train_2.bin", tmp_path / "train_3.bin"):
        write_shard(path, GOOD, 6, 3)

    def names(pattern) -> list[str]:
        return [header.name for header in tg.find_shards(str(pattern))]

    assert names(odd / "train_*.bin") == [f"{odd}/train_0.bin", f"{odd}/train_[1].bin"]
    assert names(odd / "train_[1].bin") == [f"{odd}/train_[1].bin"], "a file of just this name"
    assert names(odd / "train_[0].bin") == [f"{odd}/train_0.bin"], "no file of this name: a pattern"
    assert names(odd / "deep?er/train_[2].bin") == [f"{odd}/deep?er/train_2.bin"]
    assert names(tmp_path / "train_[1-5].bin") == [f"{tmp_path}/train_3.bin"]
    monkeypatch.chdir(tmp_path)
    assert names("train_*.bin") == names("./train_*.bin") == ["train_3.bin"]
    assert names("my [data] */train_*.bin") == ["my [data] */train_0.bin", "my [data] */train_[1].bin"]


def test_whatever_matches_has_to_be_a_shard(tmp_path):
    """A broken link passed over in silence would be training on less than was asked for."""
    write_shard(tmp_path / "train_0.bin", GOOD, 6, 3)
    (tmp_path / "train_1.bin").symlink_to("gone.bin")
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/train_*.bin"), "train_1.bin as a shard", "no such file")
    refused(tg.DataError, lambda: tg.find_shards(str(tmp_path)), f"{tmp_path} as a shard", "no regular one")
    os.mkfifo(tmp_path / "pipe")
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/pipe"), "pipe as a shard", "no regular one")


def test_read_vocabulary__none_there(tmp_path):
    assert tg.read_vocabulary(tmp_path, preset()) is None


def test_a_formula_has_no_vocabulary(tmp_path, monkeypatch):
    """Its name looks like a file of the current folder, whose vocab.txt says nothing about it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.txt").write_text("junk")
    cfg = preset()
    assert tg.ValidationSet(cfg, fabric(), tg.find_shards(cfg.val_files)).vocabulary is None


# ---- scan -----------------------------------------------------------------------------------------------------------

def manifest(folder, **files) -> None:
    """A manifest as a data tool writes it; files: name with _ for . -> content that it claims."""
    entries = {name.replace("_bin", ".bin").replace("_txt", ".txt"):
               dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    (folder / "manifest.json").write_text(json.dumps(dict(format=1, files=entries)))


def test_the_scan_looks_at_every_shard(tmp_path):
    """Its hash is that of names and contents; the last shard of all is looked at, too."""
    paths = [write_shard(tmp_path / f"{name}.bin", GOOD, 6, 3) for name in "abc"]
    formula = tg.find_shards("formula:6:3:100:1")
    want = hashlib.sha256()
    for path in paths:
        want.update(path.name.encode() + path.read_bytes())
    want.update(b"formula:6:3:100:1#0")
    assert tg.scan_shards(tg.find_shards(f"{tmp_path}/*.bin") + formula) == want.hexdigest()
    for tokens, parts in (([*GOOD, 6], ("121 tokens up to 6",)),
                          ([1] * 120, ("0 of them document starts",))):
        write_shard(paths[-1], tokens, 6, 3)
        refused(tg.DataError, lambda: tg.scan_shards(tg.find_shards(f"{tmp_path}/*.bin")), "c.bin", *parts)


def test_names_of_shards_may_be_any_bytes(tmp_path):
    name = b"\xff.bin"
    path = write_shard(tmp_path / os.fsdecode(name), GOOD, 6, 3)
    want = hashlib.sha256(name + path.read_bytes()).hexdigest()
    assert tg.scan_shards(tg.find_shards(str(path))) == want


def test_a_manifest_that_was_never_whole(tmp_path):
    headers = [tg.read_header(write_shard(tmp_path / "a.bin", GOOD, 6, 3))]
    (tmp_path / "manifest.json.part").touch()
    refused(tg.DataError, lambda: tg.scan_shards(headers), "manifest.json.part", "run that tool again")


def test_a_file_has_to_match_the_manifest_beside_it(tmp_path):
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    headers = tg.find_shards(str(path))
    pieces = b"".join(b"YQ== %d\n" % token for token in range(6) if token != 3)
    (tmp_path / "vocab.txt").write_bytes(pieces)
    manifest(tmp_path, a_bin=path.read_bytes(), vocab_txt=pieces)
    write_shard(tmp_path / "own.bin", GOOD, 6, 3)
    assert tg.scan_shards(headers + tg.find_shards(f"{tmp_path}/own.bin")), "files that it does not name are fine"
    cfg = preset(vocab_size=6, document_start=3)
    assert len(tg.read_vocabulary(tmp_path, cfg)) == 6

    manifest(tmp_path, a_bin=path.read_bytes()[:-1] + b"\1", vocab_txt=pieces[:-1])
    refused(tg.DataError, lambda: tg.scan_shards(headers), "a.bin: content", "manifest.json", "mixture")
    refused(tg.DataError, lambda: tg.read_vocabulary(tmp_path, cfg), "vocab.txt: content", "manifest.json", "mixture")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3, "files": {}}', '{"format": 1, "files": []}',
                                  '{"format": 1, "files": {"a.bin": 3}}', '{"format": 1, "files": {"a.bin": {}}}'])
def test_a_manifest_of_any_content_ends_in_words(tmp_path, text):
    headers = [tg.read_header(write_shard(tmp_path / "a.bin", GOOD, 6, 3))]
    (tmp_path / "manifest.json").write_text(text)
    refused(tg.DataError, lambda: tg.scan_shards(headers), "manifest.json as a manifest", "format 1",
            "remove this file")


def test_open_data__shards_that_are_trained_on_and_validated_with_are_named(tmp_path, capsys):
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", random_stream(0, 20_000, 512, 511), 512, 511)
    (tmp_path / "link").symlink_to("b.bin")
    shared = preset(train_files=f"{tmp_path}/*.bin", val_files=f"{tmp_path}/link", max_steps=2)
    for cfg, said in ((shared, f"{tmp_path}/b.bin, 1 such shards"), (preset(), "")):
        tg.open_data(cfg, fabric(), b"source")
        out = capsys.readouterr().out
        assert said in out and bool(said) == bool(out)


# ---- many steps -----------------------------------------------------------------------------------------------------

def test_millions_of_steps_are_not_listed(tmp_path):
    """The loader asks for one cycle of steps at a time, and the check counts by stage."""
    cfg = preset(epochs=0, num_scheduled_steps=9_999_997)
    schedule, asked = tg.Schedule(cfg), []

    def steps():
        for step in range(schedule.end_step):
            asked.append(step)
            yield schedule.at(step)

    def cycles():
        every = steps()
        while True:
            yield [next(every), next(every)]

    headers = tg.find_shards(cfg.train_files)
    began = time.perf_counter()
    tg.check_enough_data(cfg, schedule, headers, ROOMY)
    refused(tg.DataError, lambda: tg.check_enough_data(replace(cfg, epochs=1), schedule, headers, ROOMY),
            f"{2 * 40_000} in 2 shards", "for 10000000 steps")
    loader = tg.Loader(cfg, fabric(), headers, cycles())
    loader.start()
    loader.next(schedule.at(0))
    loader.wait()
    loader.close()
    assert asked == [0, 1, 2, 3] and time.perf_counter() - began < 5


def test_shards_without_room_for_a_step_are_known_before_the_start():
    """The largest stage that is reached decides; shards of 8 x 33 tokens have no room for the third stage."""
    cfg, room = preset(epochs=0), shards(8 * 33)
    tg.check_enough_data(replace(cfg, max_steps=6), tg.Schedule(replace(cfg, max_steps=6)), room, ROOMY)
    refused(tg.DataError, lambda: tg.check_enough_data(cfg, tg.Schedule(cfg), room, ROOMY),
            "too small", f"{8 * 49} for")


def test_a_damaged_shard_is_not_the_end_of_the_data(tmp_path):
    """It may be one rank's alone: the others would wait for this one's rows, so it surfaces at once."""
    write_shards(tmp_path, 400, 4000)
    loader, values = make_loader(tmp_path, 0, 2)
    (tmp_path / "train_000001.bin").write_bytes((tmp_path / "train_000001.bin").read_bytes()[:-100])
    loader.start()
    loader.next(values[0])
    refused(tg.DataError, loader.plans_ahead, "train_000001.bin: content", "3950 tokens")
    loader.close()

"""Section 10: the stream of batches and its row plans against plain loops, the loader thread, the validation set.

Each rank is built without the others and exchanges no requests. The exchange itself is in test_rows.py.
"""
import base64
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import expect_error, global_rows_of, make_comm, preset, random_stream, started_loader, write_shard
from reference import bigram_rows, ngram_rows

import train_gpt as tg

MAX_DOC_LEN = 12                         # BOS is 3 in all shards
# Tables with more rows than a cycle looks up.
TABLES = (tg.NgramTable("a_embed", 3, 5000), tg.NgramTable("b_embed", 2, 3000))

@pytest.fixture(autouse=True)
def no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange requests as a single rank. As after `plan_rows`, a rank then serves the rows that it fetches."""
    exchange = tg.exchange_row_requests
    monkeypatch.setattr(tg, "exchange_row_requests", lambda _, *args: exchange(make_comm(), *args))

def write_shards(folder: Path, *counts: int) -> list[list[int]]:
    streams = [random_stream(seed, count, 50, 3).tolist() for seed, count in enumerate(counts)]
    for i, stream in enumerate(streams):
        write_shard(folder / f"train_{i}.bin", stream, 50, 3)
    return streams

def start_loader(folder: Path, rank: int = 0, world_size: int = 1, steps: int = 12,
                 **changes: Any) -> AbstractContextManager[tuple[tg.Loader, list[tg.StepConfig]]]:
    """Start a loader of preset tiny, and return it with its step configs. A cycle has two steps by default."""
    settings = dict(vocab_size=50, bos_id=3, max_doc_len=MAX_DOC_LEN, adam_every=2) | changes
    cfg = preset(train_files=f"{folder}/train_*.bin", **settings)
    return started_loader(cfg, make_comm(rank, world_size), steps)

def read_all(folder: Path, *args: int, **changes: Any) -> list[tg.Batch]:
    with start_loader(folder, *args, **changes) as (loader, step_cfgs):
        return [loader.next() for _ in step_cfgs]


# ---- The stream of batches -------------------------------------------------------------------------------------------
PackedTokens = tuple[list[int], list[int]]   # T + 1 tokens, document bounds in the inputs

def naive_batch(tokens: list[int], doc: int, num_seqs: int, seq_len: int) -> tuple[list[PackedTokens], int] | None:
    """Pack the documents from number `doc` on exactly as RECIPE 5.2 describes it.

    Returns the sequences and the index of the next document, or None if the shard has too few documents.
    """
    starts = [i for i, token in enumerate(tokens) if token == 3]
    seqs = []
    for _ in range(num_seqs):
        seq = []
        bounds = [0]
        while len(seq) <= seq_len:
            if doc == len(starts):
                return None
            next_start = starts[doc + 1] if doc + 1 < len(starts) else len(tokens)
            end = min(next_start, starts[doc] + MAX_DOC_LEN, starts[doc] + seq_len - len(seq) + 1)
            seq = seq + tokens[starts[doc]:end]
            bounds.append(len(seq))
            doc += 1
        bounds[-1] -= 1                      # the last token is no input
        seqs.append((seq, bounds))
    return seqs, doc

def naive_pieces(tokens: list[int]) -> PackedTokens:
    """Return the tokens of a sequence of a later epoch, and the bounds of its pieces: BOS, or MAX_DOC_LEN tokens."""
    bounds = [0]
    for i, token in enumerate(tokens):
        if i > 0 and (token == 3 or i - bounds[-1] == MAX_DOC_LEN):
            bounds.append(i)
    bounds.append(len(tokens) - 1)
    return tokens, bounds

def naive_stream(streams: list[list[int]], step_cfgs: list[tg.StepConfig], epochs: int = 1,
                 num_seqs: int = 8) -> list[list[PackedTokens]]:
    """Return all sequences of each step.

    In the first epoch, a batch that does not fit into the rest of a shard starts the next shard. Later epochs are one
    stream of tokens, in which sequences share their last target and first input.
    """
    shard = 0
    doc = 0
    later = [token for stream in streams * (epochs - 1) for token in stream]
    seqs_by_step = []
    for step_cfg in step_cfgs:
        seq_len = step_cfg.seq_len
        packed = None
        while packed is None and shard < len(streams):
            packed = naive_batch(streams[shard], doc, num_seqs, seq_len)
            if packed is None:
                shard += 1
                doc = 0
        if packed is not None:
            seqs, doc = packed
            seqs_by_step.append(seqs)
            continue
        if len(later) <= num_seqs * seq_len:
            raise IndexError("the data has too few tokens")
        seqs_by_step.append([])
        for _ in range(num_seqs):
            seqs_by_step[-1].append(naive_pieces(later[:seq_len + 1]))
            later = later[seq_len:]
    return seqs_by_step

def check_batches(batches: list[tg.Batch], seqs_by_step: list[list[PackedTokens]]) -> None:
    for step, (batch, expected) in enumerate(zip(batches, seqs_by_step, strict=True)):
        assert batch.tokens.tolist() == [tokens[:-1] for tokens, _ in expected]
        assert batch.targets.tolist() == [tokens[1:] for tokens, _ in expected]
        num_bounds = max(len(bounds) for _, bounds in expected)
        T = batch.tokens.shape[1]
        assert batch.cu_seqlens.tolist() == [bounds + [T] * (num_bounds - len(bounds)) for _, bounds in expected]
        assert batch.targets.dtype == torch.int64
        i32_tensors = [batch.tokens, batch.cu_seqlens, *batch.lookup_rows.values()]
        assert {x.dtype for x in i32_tensors} == {torch.int32}

def check_plans(batches: list[tg.Batch], cfg: tg.Config, tied: bool) -> None:
    """Check that the batches of one cycle share plans that contain all their lookups."""
    first = batches[0]
    labels = {table.label for table in tg.table_specs(cfg)}
    assert all(batch.plans == first.plans for batch in batches) and first.plans.keys() == labels
    for label, plan in first.plans.items():
        assert plan.tied == (tied and label == "embed")
    value_starts = [[k * cfg.padded_vocab] for k in range(tg.NUM_VALUE_EMBEDS)]
    for batch in batches:
        tokens = batch.tokens.numpy()
        bigrams = [bigram_rows(seq, cfg.bigram_rows) for seq in tokens]
        expected_rows = dict(bigram_embed=bigrams, embed=tokens, value_embed=tokens[:, None] + value_starts)
        for table in cfg.tables:
            factors = tg.NGRAM_FACTORS[table.order]
            expected_rows[table.label] = [ngram_rows(seq, factors, table.rows) for seq in tokens]
        assert batch.lookup_rows.keys() == expected_rows.keys()
        for label, rows in expected_rows.items():
            np.testing.assert_array_equal(global_rows_of(batch, label), rows, label)

SCHEDULED = 3 * (len(tg.TINY["stages"]) - 1)                         # every stage has three steps
PARTIAL_CYCLE = dict(steps=SCHEDULED + 3 + SCHEDULED % 2, epochs=0, num_scheduled_steps=SCHEDULED,
                     num_extension_steps=4)

@pytest.mark.recipe
@pytest.mark.parametrize("counts, passes, world_size, changes", [
    ((1500, 300, 2600, 4000), 1, 1, {}),                             # the second shard is too small for a batch
    ((2000, 6000), 1, 2, {}), ((2000, 6000), 1, 8, dict(adam_every=1)),
    ((2000, 6000), 1, 1, dict(tables=TABLES)), ((2000, 6000), 1, 2, dict(tables=TABLES)),
    ((1200, 1100), 2, 1, dict(epochs=2, steps=8, num_extension_steps=30)),
    ((1200, 1100), 6, 1, dict(epochs=0, num_extension_steps=30)), ((2000, 8000), 1, 2, PARTIAL_CYCLE)])
def test_next__the_stream_equals_a_plain_loop(tmp_path, counts, passes, world_size, changes) -> None:
    """Rank r receives sequences r, r + W, ... of each step.

    A stage may change within a cycle, and the last cycle may be incomplete.
    """
    streams = write_shards(tmp_path, *counts)
    for rank in range(world_size):
        with start_loader(tmp_path, rank, world_size, **changes) as (loader, step_cfgs):
            batches = [loader.next() for _ in step_cfgs]
        check_batches(batches, [seqs[rank::world_size] for seqs in naive_stream(streams, step_cfgs, passes)])
        steps_per_cycle = tg.Schedule(loader.cfg).steps_per_cycle
        for first in range(0, len(step_cfgs), steps_per_cycle):
            check_plans(batches[first:first + steps_per_cycle], loader.cfg, step_cfgs[first].tied)
        for label in batches[0].plans:
            assert len({id(batch.plans[label]) for batch in batches}) == -(-len(step_cfgs) // steps_per_cycle), label


# ---- The loader thread -----------------------------------------------------------------------------------------------
def test_next__tokens_do_not_depend_on_timing(tmp_path, monkeypatch) -> None:
    write_shards(tmp_path, 1500, 300, 2600, 4000)
    expected = read_all(tmp_path)
    delays = random.Random(0)

    def slowed(function: Callable) -> Callable:
        def slow(*args: Any) -> Any:
            time.sleep(delays.choice((0, 0.02)))
            return function(*args)
        return slow
    for name in ("load_shard", "pack_truncated"):
        monkeypatch.setattr(tg, name, slowed(getattr(tg, name)))
    monkeypatch.setattr(tg.Loader, "next", slowed(tg.Loader.next))
    for batch, expected_batch in zip(read_all(tmp_path), expected, strict=True):
        assert batch.tokens.equal(expected_batch.tokens) and batch.cu_seqlens.equal(expected_batch.cu_seqlens)

def test_Loader__is_exactly_one_cycle_and_one_shard_ahead(tmp_path, monkeypatch) -> None:
    write_shards(tmp_path, 9000, 1500, 1500)
    threads = []
    shards_read = []
    load_shard = tg.load_shard
    pack_sequence = tg.pack_sequence

    def recording_load(header: tg.ShardHeader) -> tg.TokenShard:
        shards_read.append(header.name[-5])
        return load_shard(header)

    def recording_pack(*args: Any) -> tg.PackedSeq:
        threads.append(threading.current_thread())
        return pack_sequence(*args)
    monkeypatch.setattr(tg, "load_shard", recording_load)
    monkeypatch.setattr(tg, "pack_sequence", recording_pack)
    with start_loader(tmp_path, steps=5) as (loader, step_cfgs):
        assert len(threads) == 8 * 2, "`start` waits for the first cycle"
        for steps_packed in (4, 4, 5, 5, 5):
            loader.next()
            loader.next_batches.result()                             # wait until the requested cycle is built
            assert len(threads) == 8 * steps_packed
        assert len(set(threads) - {threading.main_thread()}) == 1, "only on the loader thread"
        loader.reader.submit(int).result()                           # wait for the reader thread
        assert shards_read == ["0", "1"]

@pytest.mark.parametrize("function_name, failing_call, error", [
    ("pack_sequence", 20, tg.ConfigError), ("load_shard", 2, None), ("pack_truncated", 4, None),
    ("exchange_row_requests", 2, tg.ConfigError), ("exchange_row_requests", 2, None)])
def test_next_step_plans__raises_errors_of_the_loader_thread(tmp_path, monkeypatch, function_name, failing_call,
                                                        error) -> None:
    """An error while the second cycle is built is raised at the end of the first one, before its rows are sent.

    The errors are damaged data, disagreement between ranks, and a function that does not return (None).
    """
    write_shards(tmp_path, 400, 4000)
    calls = []
    release = threading.Event()
    function = getattr(tg, function_name)

    def failing(*args: Any) -> Any:
        calls.append(function_name)
        if len(calls) < failing_call:
            return function(*args)
        if error is None:
            release.wait(60)
        raise tg.ConfigError("waiting")

    monkeypatch.setattr(tg, function_name, failing)
    with start_loader(tmp_path, 0, 2) as (loader, _):
        loader.next()
        loader.comm = replace(loader.comm, timeout=60.0 if error else 0.05)
        assert loader.next_step_plans(), "plans of the current cycle, without waiting for the next one"
        loader.next()
        expected_text = "waiting" if error else "no result after 0.05 s"
        with expect_error(error or tg.TrainerError, expected_text):
            loader.next_step_plans()
        with expect_error(error or tg.TrainerError, expected_text):
            loader.next()
        release.set()

@pytest.mark.parametrize("adam_every", [1, 2])
def test_next_step_plans__are_those_of_the_next_step_after_their_exchange(tmp_path, monkeypatch, adam_every) -> None:
    """The loader thread exchanges the requests of each Adam interval once, in order."""
    write_shards(tmp_path, 8000)
    exchanged = []
    exchange = tg.exchange_row_requests

    def recording(comm: tg.Communicator, process_group: Any, plans: dict) -> None:
        assert threading.current_thread() != threading.main_thread()
        assert process_group == "the loader's group"
        exchanged.append(plans)
        exchange(comm, process_group, plans)

    monkeypatch.setattr(tg, "exchange_row_requests", recording)
    table = tg.NgramTable("a_embed", 3, 100, update_every=4)
    cfg = preset(train_files=f"{tmp_path}/train_*.bin", adam_every=adam_every, tables=(table,), vocab_size=50, bos_id=3)
    comm = replace(make_comm(1, 2), loader_group="the loader's group")
    plans_and_next = []
    with started_loader(cfg, comm, 9) as (loader, step_cfgs):
        for _ in step_cfgs:
            batch = loader.next()
            next_step_plans = loader.next_step_plans()
            assert next_step_plans == loader.next_step_plans(), "a second call returns the same plans"
            plans_and_next.append((batch.plans, next_step_plans))
    plans = [step_plans for step_plans, _ in plans_and_next]
    assert [next_step_plans for _, next_step_plans in plans_and_next] == [*plans[1:], {}]
    assert len(exchanged) == math.ceil(9 / adam_every)
    for step, step_plans in enumerate(plans):
        assert step_plans["embed"] is exchanged[step // adam_every]["embed"]
        assert step_plans["a_embed"] is exchanged[step // 4 * 4 // adam_every]["a_embed"]


# ---- The validation set ----------------------------------------------------------------------------------------------
def validation_config(folder: Path, stream: np.ndarray, tokens: int, vocab_size: int = 50, bos_id: int = 3,
                      **changes: Any) -> tuple[tg.Config, list[tg.ShardHeader]]:
    sizes = dict(vocab_size=vocab_size, bos_id=bos_id)
    write_shard(folder / "v.bin", stream, **sizes)
    cfg = preset(val_files=f"{folder}/*.bin", val_batch_tokens=128, val_tokens=tokens, **sizes, **changes)
    return cfg, tg.read_shard_headers(cfg.val_files)

@pytest.mark.parametrize("after, tied", [(0, True), (1, False)])
def test_ValidationSet__batches_and_their_plans(tmp_path, monkeypatch, after, tied) -> None:
    """The sequences of each batch are distributed over ranks round-robin.

    The loader's process group is not used, because the loader thread may exchange requests at the same time.
    """
    groups = []
    exchange = tg.exchange_row_requests

    def recording(comm: tg.Communicator, process_group: Any, *args: Any) -> None:
        groups.append(process_group)
        exchange(comm, process_group, *args)

    monkeypatch.setattr(tg, "exchange_row_requests", recording)
    cfg, headers = validation_config(tmp_path, random_stream(0, 400, 50, 3), 256, tables=TABLES)
    schedule = tg.Schedule(cfg)
    step_cfg = schedule.at(schedule.last_tied_step + after)
    all_tokens = [batch.tokens for batch in tg.ValidationSet(cfg, make_comm(), headers).batches(step_cfg)]
    assert [tuple(tokens.shape) for tokens in all_tokens] == [(8, 16), (8, 16)]
    for rank, world_size in ((0, 1), (0, 4), (3, 4)):
        comm = replace(make_comm(rank, world_size), loader_group="the loader's group")
        batches = tg.ValidationSet(cfg, comm, headers).batches(step_cfg)
        for batch, tokens in zip(batches, all_tokens, strict=True):
            assert batch.tokens.equal(tokens[rank::world_size])
            check_plans([batch], cfg, tied)
    assert set(groups) == {None}

def test_text_metrics__unigram_entropy_and_bits_per_byte(tmp_path, monkeypatch) -> None:
    stream = random_stream(1, 300, 5, 4)
    token_bytes = [b"a", b"bc", b"\xff\x00", b"defg"]
    lines = [f"{base64.b64encode(bytes_).decode()} {token}" for token, bytes_ in enumerate(token_bytes)]
    cfg, headers = validation_config(tmp_path, stream, 256, 5, 4)
    assert tg.ValidationSet(cfg, make_comm(), headers).text_metrics(1.0) == {}, "no metrics without the bytes of tokens"
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    counts = Counter(stream[1:257].tolist())                         # targets are the inputs shifted by one
    nats = -sum(count / 256 * math.log(count / 256) for count in counts.values())
    total_bytes = sum(len(token_bytes[token]) * count for token, count in counts.items() if token != 4)
    found = tg.ValidationSet(cfg, make_comm(), headers).text_metrics(1.5)
    assert found == pytest.approx(dict(val_bpb=1.5 * 256 / math.log(2) / total_bytes, unigram_nats=nats), rel=1e-12)
    monkeypatch.chdir(tmp_path)              # the name of synthetic data looks like a file next to vocab.txt
    synthetic = preset()
    assert tg.ValidationSet(synthetic, make_comm(), tg.read_shard_headers(synthetic.val_files)).text_metrics(1.0) == {}

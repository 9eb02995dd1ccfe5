"""Section 8: shards and packing against plain loops, errors that name bad data; hashes (section 3), row plans (9)."""
import hashlib
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from common import expect_error, make_comm, plan_of, preset, random_stream, write_shard
from reference import ngram_rows

import train_gpt as tg

MOST_ROWS = 2**31 - 1


# ---- packing and validation sequences -------------------------------------------------------------------------------
@pytest.mark.recipe
@pytest.mark.parametrize("sizes, num_seqs, seq_len", [((200,), 2, 16), ((65, 66, 67, 33), 2, 16), ((97, 98), 1, 32)])
def test_validation_sequences__equal_a_plain_loop(sizes, num_seqs, seq_len) -> None:
    """A batch needs its tokens, one more for the last target, and one more by modded-nanogpt's rule, in one shard."""
    streams = [random_stream(seed, count, 20, 3) for seed, count in enumerate(sizes)]
    want = []
    for stream in streams:
        position = 0
        while len(stream) - position >= num_seqs * seq_len + 2:
            for s in range(num_seqs):
                tokens = stream[position + s * seq_len:position + (s + 1) * seq_len + 1].tolist()
                bounds = [at for at, token in enumerate(tokens[:-1]) if token == 3]
                want.append((tokens, sorted({0, *bounds, seq_len})))
            position += num_seqs * seq_len
    shards = [tg.TokenShard(stream.astype(np.uint16), 3) for stream in streams]
    seqs = tg.validation_sequences(shards, num_seqs, seq_len)
    got = [(seq.tokens.tolist(), sorted(set(seq.cu_seqlens.tolist()))) for seq in seqs]     # without empty documents
    assert got == want

@pytest.mark.recipe
def test_synthetic_tokens__are_reproducible_and_contain_documents() -> None:
    tokens = tg.synthetic_tokens(1, 40_000, 512, 511)
    assert tokens.dtype == np.uint16 and tokens.max() == 511 and tokens[0] == 511
    assert tokens[:8].tolist() == tg.synthetic_tokens(1, 8, 512, 511).tolist()
    assert not np.array_equal(tokens, tg.synthetic_tokens(2, 40_000, 512, 511))
    assert 28 < 40_000 / np.sum(tokens == 511) < 36                  # expected: 32 tokens per document
    assert len(np.unique(tokens)) > 256


# ---- bad data -------------------------------------------------------------------------------------------------------
GOOD = [3, 1, 2, 3, 4, 5] * 20
BAD_FILES = {                                # case -> (arguments of write_shard, bytes cut off, *words in the message)
    "version": (dict(version=2), 0, "20240520, 2, 120", "write it again"),
    "cut": (dict(), 10, f"{1024 + 240 - 10:,} bytes", "120", "download or write it again"),
    "longer": (dict(count=100), 0, f"{1024 + 240:,} bytes", "20240520, 1, 100"),
    "no header": (dict(), 500, "764 bytes", "1,024 + 2 n bytes"),
    "empty": (dict(count=0), 240, "20240520, 1, 0", "20240520, 1, n"),
    "a token id too high": (dict(vocab_size=5), 0, "up to 5", "below 5"),
    "no BOS": (dict(vocab_size=9, bos_id=8), 0, "and a BOS (8)"),
    "not GPT-2 tokens": (dict(vocab_size=0, bos_id=0), 0, "and a BOS (50256)"),
}

@pytest.mark.parametrize("case", BAD_FILES)
def test_hash_shards__refuses_a_damaged_shard(tmp_path, case) -> None:
    header, cut, *parts = BAD_FILES[case]
    write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    path = write_shard(tmp_path / "b.bin", GOOD, **dict(vocab_size=6, bos_id=3) | header)
    os.truncate(path, path.stat().st_size - cut)
    with expect_error(tg.ConfigError, "b.bin", *parts):
        tg.hash_shards(tg.read_shard_headers(f"{tmp_path}/*.bin"))

def test_hash_shards__of_names_and_contents(tmp_path) -> None:
    names = b"a.bin", b"b.bin", b"\xff.bin"
    want = hashlib.sha256()
    for name in names:
        path = write_shard(tmp_path / os.fsdecode(name), GOOD, 6, 3)
        want.update(name + path.read_bytes())
    want.update(b"formula:6:3:100:1#0")
    headers = [tg.read_shard_header(tmp_path / os.fsdecode(name)) for name in names]
    assert tg.hash_shards(headers + tg.read_shard_headers("formula:6:3:100:1")) == want.hexdigest()

def test_read_shard_headers__header_words_and_name_order(tmp_path, monkeypatch) -> None:
    """Vocabulary size and BOS id, where 0 means GPT-2. Shards are sorted by name, in whatever order they are listed."""
    first = str(write_shard(tmp_path / "a_10.bin", GOOD, 6, 3))
    second = str(write_shard(tmp_path / "a_2.bin", GOOD, 0, 0))
    monkeypatch.setattr(tg.glob, "glob", lambda pattern: [second, first])
    assert tg.read_shard_headers("any") == [(first, 120, 6, 3), (second, 120, 50_257, 50_256)]

@pytest.mark.parametrize("name, parts", [
    ("{}/train_*.bin", ("no data shard", "train_1.bin")), ("{}/pipe", ("no data shard", "pipe")),
    ("{}/none_*.bin", ("none_*.bin", "cached_fineweb10B.py", "--train_files")),
    ("formula:512:511:100:0", ("formula:512", "VOCAB_SIZE:BOS_ID:TOKENS_PER_SHARD:SHARDS")),
    ("formula:512:511:0:1", ("formula:512", "VOCAB_SIZE:BOS_ID:TOKENS_PER_SHARD:SHARDS"))])
def test_read_shard_headers__every_match_must_be_a_shard(tmp_path, name, parts) -> None:
    """A broken link or a pipe is an error: skipping it silently means training on less data than requested."""
    write_shard(tmp_path / "train_0.bin", GOOD, 6, 3)
    (tmp_path / "train_1.bin").symlink_to("gone.bin")
    os.mkfifo(tmp_path / "pipe")
    with expect_error(tg.ConfigError, *parts):
        tg.read_shard_headers(name.format(tmp_path))

@pytest.mark.parametrize("changes, val_vocab, parts", [
    (dict(vocab_size=500), (512, 511), ("--vocab_size", "512", "omit both")),
    (dict(bos_id=0), (512, 511), ("--bos_id", "511", "omit both")),
    (dict(padded_vocab=511), (512, 511), ("--padded_vocab=511", "512")),
    (dict(), (512, 510), ("shard.bin", "(512, 510)", "(512, 511)", "one data set"))])
def test_resolve_sizes__the_header_decides_and_contradictions_are_refused(changes, val_vocab, parts) -> None:
    headers = [[tg.ShardHeader("shard.bin", 10, *vocab)] for vocab in ((50_257, 50_256), (512, 511), val_vocab)]
    cfg = tg.resolve_sizes(tg.Config(**tg.PRESETS["pocket"]), headers[0], headers[0])
    assert (cfg.vocab_size, cfg.bos_id, cfg.padded_vocab, cfg.bigram_rows) == (50_257, 50_256, 50_304, 251_520)
    with expect_error(tg.ConfigError, *parts):
        tg.resolve_sizes(tg.Config(**tg.PRESETS["tiny"] | changes), *headers[1:])

def open_data(**changes: Any) -> tuple[tg.Config, list[tg.ShardHeader], list[tg.ShardHeader], dict[str, str]]:
    return tg.open_data(tg.make_config(dict(preset="tiny") | changes), make_comm(), b"source")

def test_open_data__refuses_too_few_training_tokens_for_the_schedule() -> None:
    """`epochs` and `max_steps` change what is needed."""
    schedule = tg.Schedule(preset())
    needed = sum(8 * schedule.at(step).seq_len for step in range(12))
    for epochs, tokens in ((1, needed), (3, -(-needed // 3))):
        open_data(train_files=f"formula:512:511:{tokens}:1", epochs=epochs)
        with expect_error(tg.ConfigError, f"{needed:,} tokens", "--epochs=0", "--max_steps="):
            open_data(train_files=f"formula:512:511:{tokens - 1}:1", epochs=epochs)
    for changes in (dict(epochs=0), dict(max_steps=11)):
        open_data(train_files=f"formula:512:511:{needed - 1}:1", **changes)

def test_open_data__suggests_validation_tokens_that_fit() -> None:
    """The flags of the message are accepted. Two tokens of a shard are no input."""
    settings = dict(val_files="formula:512:511:387:1", val_batch_tokens=512, val_tokens=1024)
    with expect_error(tg.ConfigError, "--val_tokens=128 --val_batch_tokens=128"):
        open_data(**settings)
    cfg = open_data(**settings | dict(val_tokens=128, val_batch_tokens=128))[0]
    assert tg.ValidationSet(cfg, make_comm(), tg.read_shard_headers(cfg.val_files)).seqs

@pytest.mark.parametrize("text, word", [
    ("YQ==", "base64 id"), ("%%% 1", "base64 id"), ("\xff 0", "base64 id"), ("", "BOS (3)"),
    ("YQ== 5\nYQ== 4", "BOS (3)")])
def test_read_token_bytes__every_id_except_bos_needs_bytes(tmp_path, text, word) -> None:
    """Of 5 tokens, all except BOS (3) need bytes: a missing token is otherwise counted as 0 bytes."""
    cfg = preset(vocab_size=5, bos_id=3)
    assert tg.read_token_bytes(tmp_path, cfg) is None
    path = tmp_path / "vocab.txt"
    path.write_text("YQ== 0\nYWI= 1\nYWJj 2\nYQ== 4")
    assert tg.read_token_bytes(tmp_path, cfg) == [b"a", b"ab", b"abc", b"", b"a"]
    path.write_bytes(f"YQ== 0\nYQ== 1\nYQ== 2\n{text}".encode("latin-1"))
    with expect_error(tg.ConfigError, "vocab.txt", word):
        tg.read_token_bytes(tmp_path, cfg)


# ---- section 3: hashes ----------------------------------------------------------------------------------------------
EXTREME_TOKENS = (0, 1, 2, 50_256, 65_534, 2**16, 2**31 - 1, -1, -2**31, 2**30, 48271)

@pytest.mark.parametrize("rows", [2, 97, MOST_ROWS])
@pytest.mark.parametrize("order", list(tg.NGRAM_FACTORS))
def test_table_specs__rows_of_ngrams(order, rows) -> None:
    """The hashes are right also where a product exceeds 32 bits, and where the xor is negative."""
    cfg = preset(tables=(tg.NgramTable("a_embed", order, rows, update_every=4),), adam_every=1)
    *recipe, table = tg.table_specs(cfg)
    assert {(x.rowwise, x.update_every) for x in recipe} == {(False, 1)}
    assert (table.num_rows, table.lookups_per_token, table.rowwise, table.update_every) == (rows, 1, True, 4)
    tokens = np.random.default_rng(rows).choice(EXTREME_TOKENS, (3, 40)).astype(np.int32)
    found = table.row_ids(tokens)
    np.testing.assert_array_equal(found, [ngram_rows(seq, tg.NGRAM_FACTORS[order], rows) for seq in tokens])
    assert found.dtype == np.int32 and (found[:, :order - 1] == rows - 1).all()


# ---- section 9: row plans -------------------------------------------------------------------------------------------
def plain_plan(rows: set[int], num_rows: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return the rows, numbered by owner, and the number of rows of each: row r is local row r // W of rank r % W."""
    shard_rows = math.ceil(num_rows / world_size)
    by_owner, counts = [], []
    for owner in range(world_size):
        owned = sorted(row for row in rows if row % world_size == owner)
        by_owner += [owner * shard_rows + row // world_size for row in owned]
        counts.append(len(owned))
    return by_owner, counts

def row_patterns(R: int) -> list[list[np.ndarray]]:
    """Rows of a table of R that the steps of a cycle look up: none, the ends, one owner's, some, all but one."""
    rng = np.random.default_rng(R)
    patterns = [[np.zeros((0, 4))], [np.zeros((2, 7)), np.array([[R - 1, 0]])],
                [rng.integers(0, -(-R // 24), (2, 11)) * 24],
                [rng.integers(0, R, (3, 2, 5)), rng.integers(0, R, (3, 8))]]
    if R < 1000:
        patterns.append([rng.permutation(R - 1)[None], rng.integers(0, R, (2, R))])
    return [[rows.astype(np.int32) for rows in steps] for steps in patterns]

@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("num_rows, fetch_all", [
    (3, False), (101, False), (640, False), (MOST_ROWS, False), (3, True), (101, True), (640, True)])
def test_plan_rows__equals_plain_sets(num_rows, world_size, fetch_all) -> None:
    """Table sizes: multiples of W and others, less than W, and the largest one, whose rows by owner exceed 2^31."""
    shard_rows = math.ceil(num_rows / world_size)
    table = tg.TableSpec("bigram_embed", num_rows, 1, None, rowwise=not fetch_all)
    for tied in (False, True):
        for rows in row_patterns(num_rows):
            plan, found = plan_of(table, make_comm(world_size - 1, world_size), rows, tied, fetch_all)
            lookups = np.concatenate([x.ravel() for x in rows]).astype(int)
            ids, counts = plain_plan(set(lookups.tolist()), num_rows, world_size)
            if fetch_all:
                ids = list(range(world_size * shard_rows))
                counts = [shard_rows] * world_size
            assert plan.rows_to_fetch.tolist() == ids == sorted(set(ids))
            assert plan.fetch_counts == plan.serve_counts == counts and plan.rows_to_fetch.dtype == torch.int64
            assert (plan.table, plan.tied) == (table, tied)
            token_ids = [row % shard_rows * world_size + row // shard_rows for row in ids]
            assert plan.rows_to_serve.tolist() == (token_ids if tied else ids)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, np.dtype(np.int32)) for x in rows]
            index = np.concatenate([x.ravel() for x in found])
            rows_by_owner = lookups % world_size * shard_rows + lookups // world_size
            assert plan.rows_to_fetch[index].tolist() == rows_by_owner.tolist()
            if world_size == 1 and table.rowwise:
                assert plan.rows_to_update.tolist() == sorted(set(lookups.tolist()))
                assert plan.rows_to_update[plan.update_index].equal(plan.rows_to_serve)

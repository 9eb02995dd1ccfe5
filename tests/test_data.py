"""Data: shards, packing and manifests against plain loops, and errors that name bad data. Rows: hashes and row plans.

test_batches.py tests the loader and the validation set, which use both; test_rows.py tests the rows of several ranks.
"""
import contextlib
import errno
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from common import expect_error, make_comm, plan_of, preset, random_stream, write_shard
from reference import bigram_rows, ngram_rows

import train_gpt as tg

MOST_ROWS = 2**31 - 1

# ---- packing and validation sequences -------------------------------------------------------------------------------
@pytest.mark.recipe
@pytest.mark.parametrize("sizes, num_seqs, seq_len", [((200,), 2, 16), ((65, 66, 67, 33), 2, 16), ((97, 98), 1, 32)])
def test_validation_sequences__equal_a_plain_loop(sizes, num_seqs, seq_len) -> None:
    """A batch needs its tokens, one more for the last target, and one more by modded-nanogpt's rule.

    A shard that has fewer tokens left is followed by the next shard.
    """
    streams = [random_stream(seed, count, 20, 3) for seed, count in enumerate(sizes)]
    want = []
    for stream in streams:
        position = 0
        while len(stream) - position >= num_seqs * seq_len + 2:
            for s in range(num_seqs):
                tokens = stream[position + s * seq_len:position + (s + 1) * seq_len + 1].tolist()
                bounds = [at for at, token in enumerate(tokens[:-1]) if token == 3]
                want.append((tokens, [0, *bounds, seq_len]))
            position += num_seqs * seq_len
    shards = [tg.TokenShard(stream.astype(np.uint16), 3) for stream in streams]
    seqs = tg.validation_sequences(shards, num_seqs, seq_len, 3)
    got = [(seq.tokens.tolist(), seq.cu_seqlens.tolist()) for seq in seqs]
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
    "version": (dict(version=2), 0, "20240520, 2, 120", "data/README.md"),
    "cut": (dict(), 10, f"{1024 + 240 - 10:,} bytes", "120", "download or write it again"),
    "longer": (dict(count=100), 0, f"{1024 + 240:,} bytes", "20240520, 1, 100"),
    "no header": (dict(), 500, "764 bytes", "1,024 bytes"),
    "no tokens": (dict(count=0), 0, "20240520, 1, 0"),
    "empty": (dict(count=0), 240, "20240520, 1, 0", "number of tokens, at least 1"),
    "a token id too high": (dict(vocab_size=5), 0, "ids up to 5", "below the vocabulary size 5"),
    "no BOS": (dict(vocab_size=9, bos_id=8), 0, "BOS tokens: 0", "token 8"),
    "not GPT-2 tokens": (dict(vocab_size=0, bos_id=0), 0, "BOS tokens: 0", "50256"),
}

def test_load_shard__the_warm_up_repeats_ngrams() -> None:
    """Three tokens often occur again 8 tokens later. In synthetic training data they do not."""
    def repeats(name: str) -> int:
        tokens = tg.load_shard(tg.ShardHeader(name, 40_000, 2048, 2047)).tokens
        earlier, later = (np.lib.stride_tricks.sliding_window_view(x, 3) for x in (tokens[:-8], tokens[8:]))
        return int((earlier == later).all(axis=1).sum())

    assert repeats("formula:2048:2047:40000:1#0") < 10 < 3000 < repeats(tg.WARM_UP_SHARD)

@pytest.mark.parametrize("case", BAD_FILES)
def test_verify_shards__a_damaged_shard(tmp_path, case) -> None:
    header, cut, *parts = BAD_FILES[case]
    write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    path = write_shard(tmp_path / "b.bin", GOOD, **dict(vocab_size=6, bos_id=3) | header)
    os.truncate(path, path.stat().st_size - cut)
    with expect_error(tg.DataError, "b.bin", *parts):
        tg.verify_shards(tg.read_shard_headers(f"{tmp_path}/*.bin"))

def test_load_shard__a_file_that_shrinks_after_the_start(tmp_path) -> None:
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    header, = tg.read_shard_headers(str(path))
    os.truncate(path, path.stat().st_size - 20)
    with expect_error(tg.DataError, "a.bin", "110 tokens", "120"):
        tg.load_shard(header)

def test_read_shard_headers__header_words_and_name_order(tmp_path, monkeypatch) -> None:
    """Words 3 and 4 are vocabulary size and BOS id, where 0 means GPT-2. Shards are sorted by name.

    A file system may list names in any order.
    """
    first = str(write_shard(tmp_path / "a_10.bin", GOOD, 6, 3))
    second = str(write_shard(tmp_path / "a_2.bin", GOOD, 0, 0))
    monkeypatch.setattr(tg.glob, "glob", lambda pattern: [second, first])
    assert tg.read_shard_headers("any") == [(first, 120, 6, 3), (second, 120, 50_257, 50_256)]

@pytest.mark.parametrize("name, parts", [
    ("{}/train_*.bin", ("data shard", "train_1.bin", "no regular file")),
    ("{}/pipe", ("data shard", "pipe", "no regular file")),
    ("{}/none_*.bin", ("none_*.bin", "no regular file", "cached_fineweb10B.py", "--train_files")),
    ("formula:512:511:100:0", ("formula:512", "VOCAB_SIZE:BOS_ID:TOKENS:SHARDS")),
    ("formula:512:511:0:1", ("formula:512", "at least 1 token"))])
def test_read_shard_headers__every_match_must_be_a_shard(tmp_path, name, parts) -> None:
    """A broken link or a pipe is an error: skipping it silently means training on less data than requested."""
    write_shard(tmp_path / "train_0.bin", GOOD, 6, 3)
    (tmp_path / "train_1.bin").symlink_to("gone.bin")
    os.mkfifo(tmp_path / "pipe")
    with expect_error(tg.DataError, *parts):
        tg.read_shard_headers(name.format(tmp_path))

def test_read_shard_headers__brackets_in_a_directory_name_are_literal(tmp_path, monkeypatch) -> None:
    """Brackets are literal if the directory exists. Otherwise they are part of the pattern."""
    odd = tmp_path / "my [data] *"
    odd.mkdir()
    for path in (odd / "train_0.bin", odd / "train_[1].bin", tmp_path / "train_3.bin"):
        write_shard(path, GOOD, 6, 3)
    monkeypatch.chdir(tmp_path)
    for pattern, names in ((f"{odd}/train_*.bin", [f"{odd}/train_0.bin", f"{odd}/train_[1].bin"]),
                           (f"{odd}/train_[1].bin", [f"{odd}/train_[1].bin"]), ("train_[1-5].bin", ["train_3.bin"])):
        assert [header.name for header in tg.read_shard_headers(pattern)] == names

def shard_headers(*sizes: int, vocab: tuple[int, int] = (512, 511)) -> list[tg.ShardHeader]:
    return [tg.ShardHeader(f"shard_{i}.bin", size, *vocab) for i, size in enumerate(sizes)]

def test_resolve_sizes__the_header_decides_the_sizes() -> None:
    gpt2 = shard_headers(1, vocab=(50_257, 50_256))
    cfg = tg.resolve_sizes(tg.Config(**tg.PRESETS["pocket"]), gpt2, gpt2)
    assert (cfg.vocab_size, cfg.bos_id, cfg.padded_vocab, cfg.bigram_rows) == (50_257, 50_256, 50_304, 251_520)

@pytest.mark.parametrize("changes, val_vocab, error, parts", [
    (dict(vocab_size=500), (512, 511), tg.ConfigError, ("--vocab_size", "500", "512", "shard_0.bin", "omit --vocab")),
    (dict(bos_id=0), (512, 511), tg.ConfigError, ("--bos_id", "found:    0", "511", "shard_0.bin")),
    (dict(padded_vocab=511), (512, 511), tg.ConfigError, ("--padded_vocab", "511", "512")),
    (dict(), (512, 510), tg.DataError, ("different vocabularies", "(512, 510)", "(512, 511)", "one data set"))])
def test_resolve_sizes__contradictions(changes, val_vocab, error, parts) -> None:
    cfg = tg.Config(**tg.PRESETS["tiny"] | changes)
    other = shard_headers(10, vocab=val_vocab)
    with expect_error(error, *parts):
        tg.resolve_sizes(cfg, shard_headers(10), other)
    if error == tg.DataError:
        with expect_error(error, *parts):
            tg.resolve_sizes(cfg, shard_headers(10) + other, shard_headers(10))

def test_resolve_sizes__refuses_a_vocabulary_of_one_token() -> None:
    """The warm-up needs another token than BOS. Earlier, it divided by zero."""
    for vocab in ((1, 0), (0, 0), (2, 2)):
        with expect_error(tg.DataError, "shard_0.bin: vocabulary", f"vocabulary size {vocab[0]}", "from 2 to 65,536"):
            tg.resolve_sizes(tg.Config(**tg.PRESETS["tiny"]), *2 * [shard_headers(10, vocab=vocab)])
    tg.resolve_sizes(tg.Config(**tg.PRESETS["tiny"]), *2 * [shard_headers(10, vocab=(2, 1))])

def test_check_enough_data__suggests_no_batch_of_0_tokens() -> None:
    """If the text is too short for any batch, the hint is to add text."""
    cfg = preset()
    with expect_error(tg.DataError, "training shards are too small") as caught:
        tg.check_enough_data(cfg, tg.Schedule(cfg), shard_headers(20), shard_headers(10**9))
    assert str(caught.value).endswith("use larger shards")
    with expect_error(tg.DataError, "too few validation tokens") as caught:
        tg.check_enough_data(cfg, tg.Schedule(cfg), shard_headers(10**9), shard_headers(20))
    assert "--val_tokens=" not in str(caught.value).splitlines()[-1]

def test_verify_shards__an_error_while_reading_names_the_file(tmp_path, monkeypatch) -> None:
    """An error of read() has no file name, unlike an error of open(). The remedy depends on the cause."""
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with expect_error(tg.DataError, str(path), "Input/output error", "a disk that works"):
        tg.verify_shards(tg.read_shard_headers(str(path)))

@pytest.mark.parametrize("vocab_size, accepted", [(2**16, True), (2**16 + 1, False), (100_257, False)])
def test_resolve_sizes__a_vocabulary_beyond_16_bits_is_refused(vocab_size, accepted) -> None:
    """The largest token id of a shard is 65,535; a larger one would be stored modulo 65,536."""
    headers = shard_headers(10, vocab=(vocab_size, vocab_size - 1))
    cfg = tg.Config(**tg.PRESETS["tiny"])
    if accepted:
        assert tg.resolve_sizes(cfg, headers, headers).bos_id == 2**16 - 1
        return
    with expect_error(tg.DataError, "vocabulary", str(vocab_size), "65,536"):
        tg.resolve_sizes(cfg, headers, headers)

def test_check_enough_data__a_shard_contains_the_largest_step_used() -> None:
    """A step reads the tokens of its sequences, and one more for each."""
    cfg = preset()
    schedule = tg.Schedule(cfg)
    steps = [cfg.seqs_per_step * (schedule.at(step).seq_len + 1) for step in range(schedule.end_step)]
    largest = max(steps)

    def check(tokens: int, **changes: Any) -> None:
        changed = replace(cfg, **changes)
        tg.check_enough_data(changed, tg.Schedule(changed), shard_headers(tokens), shard_headers(10**9))

    check(largest)
    check(steps[0], max_steps=1)
    check(largest, time_budget=9.0)
    fits = (largest - 1 - cfg.seqs_per_step) // 128 * 128
    with expect_error(tg.DataError, "too small", f"{largest:,} tokens in one shard", f"at most {fits}"):
        check(largest - 1, epochs=0)
    with expect_error(tg.DataError, "too small", "use larger shards") as caught:
        check(100, epochs=0)
    assert "--stages" not in str(caught.value), "no batch fits"

def test_count_packed_tokens__the_data_end_before_the_schedule(tmp_path) -> None:
    """The documents have enough tokens, but truncating them leaves 4 x 10 tokens per shard."""
    tokens = 20 * [3, *range(4, 43)]
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", np.array(tokens), 50, 3)
    cfg = preset(train_files=f"{tmp_path}/*.bin", vocab_size=50, bos_id=3, max_doc_len=10)
    headers = tg.read_shard_headers(cfg.train_files)
    step_tokens = cfg.seqs_per_step * (tg.Schedule(cfg).at(0).seq_len + 1)
    whole_steps = 2 * (20 * 10 // step_tokens)
    assert 0 < whole_steps < cfg.num_scheduled_steps
    with expect_error(tg.OutOfData, "training data ended", f"ends before step {whole_steps},", "--epochs=0",
                      f"--max_steps={whole_steps}", "at most 10 of each document", "cached_fineweb10B.py"):
        tg.count_packed_tokens(cfg, tg.Schedule(cfg), headers)
    empty = replace(cfg, max_doc_len=2)                       # not even one step: --max_steps=0 means no limit
    with expect_error(tg.OutOfData, "ends before step 0,", "data/cached_fineweb10B.py N)") as caught:
        tg.count_packed_tokens(empty, tg.Schedule(empty), headers)
    assert "max_steps" not in str(caught.value)
    short = replace(cfg, max_steps=whole_steps)
    assert tg.count_packed_tokens(short, tg.Schedule(short), headers) == (whole_steps * step_tokens, 0)
    repeated = replace(cfg, epochs=0)
    first_epoch, later_epochs = tg.count_packed_tokens(repeated, tg.Schedule(repeated), headers)
    assert first_epoch == whole_steps * step_tokens
    steps = [tg.Schedule(cfg).at(step) for step in range(whole_steps, tg.Schedule(cfg).end_step)]
    assert later_epochs == sum(cfg.seqs_per_step * step_cfg.seq_len for step_cfg in steps)

class OddIsBos:
    """A BOS id that every odd token equals, so that a test can give all tokens different ids."""
    __array_ufunc__ = None

    def __eq__(self, tokens: object) -> Any:
        return tokens % 2 == 1

DOC_LENGTHS = {                          # of each shard
    "256": [57 * [256] + [166]], "192": [80 * [192]], "one document": [[15_000]], "short": [5000 * [3]],
    "random": [np.random.default_rng(0).geometric(1 / 300, 60).tolist()],
    "several shards, some too small for a step": [57 * [256], [400], [90, 11], 30 * [500], [1000]]}

@pytest.mark.parametrize("name", DOC_LENGTHS)
@pytest.mark.parametrize("preset_name", ["pocket", "tiny"])
def test_Packer__three_epochs_read_every_token(preset_name, name) -> None:
    """No token is read more than three times as often as the median, and pieces have at most max_doc_len tokens."""
    cfg = replace(preset(preset_name), bos_id=OddIsBos())
    shards, num_tokens = [], 0
    for lengths in DOC_LENGTHS[name]:
        tokens = 2 * np.arange(num_tokens, num_tokens + sum(lengths))
        tokens[np.cumsum([0, *lengths[:-1]])] += 1
        shards.append(tg.TokenShard(tokens, cfg.bos_id))
        num_tokens += sum(lengths)
    schedule = tg.Schedule(cfg)
    counts_by_epoch = np.zeros((4, num_tokens), int)
    packer = tg.Packer(replace(cfg, epochs=4), shards, iter)
    with contextlib.suppress(tg.OutOfData):
        while True:
            step_cfg = schedule.at(schedule.end_step - 1)                     # the longest sequences
            shard, seqs = packer.next(step_cfg)
            for starts, ends in seqs:
                seq = tg.pack_sequence(shard, starts, ends)
                assert len(seq.tokens) == step_cfg.seq_len + 1 and np.diff(seq.cu_seqlens).max() <= cfg.max_doc_len
                np.add.at(counts_by_epoch[packer.epoch], seq.tokens[:-1] // 2, 1)
    counts = counts_by_epoch[:3].sum(axis=0)
    assert counts.min() > 0 and counts_by_epoch.sum(axis=0).min() > 0
    assert counts.max() <= 3 * np.median(counts)

def test_check_enough_data__validation_tokens(tmp_path) -> None:
    path = write_shard(tmp_path / "v.bin", random_stream(0, 200, 50, 3), 50, 3)
    cfg = preset(val_files=str(path), vocab_size=50, bos_id=3, val_batch_tokens=128, val_tokens=256)
    headers = tg.read_shard_headers(cfg.val_files)
    with expect_error(tg.DataError, "too few validation tokens", "128", "256",
                      "--val_tokens=128 --val_batch_tokens=128"):
        tg.check_enough_data(cfg, tg.Schedule(cfg), shard_headers(10**9), headers)
    short = replace(cfg, val_tokens=1024, val_batch_tokens=512)
    with expect_error(tg.DataError, "--val_tokens=384 --val_batch_tokens=384", "at least 130 tokens"):
        tg.check_enough_data(short, tg.Schedule(short), shard_headers(10**9), shard_headers(100, 400, 258))
    with expect_error(tg.DataError, "too few validation tokens", "in shards of at least 130 tokens") as caught:
        tg.check_enough_data(short, tg.Schedule(short), shard_headers(10**9), shard_headers(100, 129))
    assert "--val_tokens=" not in str(caught.value), "0 tokens would fail"

@pytest.mark.parametrize("text, num_tokens", [
    ("YQ== 0\nYQ==", 1), ("YQ== 0\n%%% 1", 1), ("YQ== 0\nYQ== x", 1), ("\xff 0", 0),
    ("YQ== 0\nYQ== 1\nYQ== 2", 3), ("YQ== 0\nYQ== 1\nYQ== 2\nYQ== 3\nYQ== 4", 5),
    ("YQ== 0\nYQ== 1\nYQ== 2\nYQ== 4\nno token", 4), ("YQ== 0\nYQ== 1\nYQ== 2\nYQ== 4\nYg== 0", 4)])
def test_read_token_bytes__every_id_except_bos_needs_bytes(tmp_path, text, num_tokens) -> None:
    """Of 5 tokens, all except BOS (3) need bytes: a missing token is otherwise counted as 0 bytes."""
    cfg = preset(vocab_size=5, bos_id=3)
    assert tg.read_token_bytes(tmp_path, cfg) is None
    (tmp_path / "vocab.txt").write_bytes(text.encode("latin-1"))
    before = f"{num_tokens} tokens before"
    with expect_error(tg.DataError, "vocab.txt", before, "each of the 5", "BOS (3)", "remove the file"):
        tg.read_token_bytes(tmp_path, cfg)


# ---- verification and manifest --------------------------------------------------------------------------------------
def write_manifest(directory: Path, shard: bytes, vocab: bytes) -> None:
    """Write a manifest for these contents, as the data tools do."""
    entries = {}
    for name, content in (("a.bin", shard), ("vocab.txt", vocab)):
        entries[name] = dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (directory / "manifest.json").write_text(json.dumps(dict(format=1, files=entries)))

def test_verify_shards__hashes_names_and_contents(tmp_path) -> None:
    """The hash covers every byte of every shard, in order, and the names, which may be any bytes."""
    names = b"a.bin", b"b.bin", b"\xff.bin"
    want = hashlib.sha256()
    for name in names:
        path = write_shard(tmp_path / os.fsdecode(name), GOOD, 6, 3)
        want.update(name + path.read_bytes())
    want.update(b"formula:6:3:100:1#0")
    headers = [tg.read_shard_header(tmp_path / os.fsdecode(name)) for name in names]
    assert tg.verify_shards(headers + tg.read_shard_headers("formula:6:3:100:1")) == want.hexdigest()

def test_check_manifest__a_file_must_match_it(tmp_path) -> None:
    path = write_shard(tmp_path / "a.bin", GOOD, 6, 3)
    headers = tg.read_shard_headers(str(path))
    vocab = b"".join(b"YQ== %d\n" % token for token in range(6) if token != 3)
    (tmp_path / "vocab.txt").write_bytes(vocab)
    write_manifest(tmp_path, path.read_bytes(), vocab)
    write_shard(tmp_path / "own.bin", GOOD, 6, 3)
    unlisted = tg.read_shard_headers(f"{tmp_path}/own.bin")
    assert tg.verify_shards(headers + unlisted), "the manifest need not name every file"
    cfg = preset(vocab_size=6, bos_id=3)
    assert len(tg.read_token_bytes(tmp_path, cfg)) == 6

    write_manifest(tmp_path, path.read_bytes()[:-1] + b"\1", vocab[:-1])
    with expect_error(tg.DataError, "a.bin: content", "manifest.json", "belongs to another"):
        tg.verify_shards(headers)
    with expect_error(tg.DataError, "vocab.txt: content", "manifest.json", "belongs to another"):
        tg.read_token_bytes(tmp_path, cfg)

@pytest.mark.parametrize("text", ["", "[]", '{"format": 3, "files": {}}', '{"format": 1, "files": {"a.bin": {}}}'])
def test_read_manifest__invalid_content_is_a_data_error(tmp_path, text) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with expect_error(tg.DataError, f"manifest {tmp_path}/manifest.json", "format 1", "remove this"):
        tg.read_manifest(tmp_path)

def test_open_data__warns_about_shards_for_training_and_validation(tmp_path, capsys) -> None:
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", random_stream(0, 20_000, 512, 511), 512, 511)
    (tmp_path / "link").symlink_to("b.bin")
    shared = preset(train_files=f"{tmp_path}/*.bin", val_files=f"{tmp_path}/link", max_steps=2)
    for cfg, warning, share in ((shared, f"overlap, at least in {tmp_path}/b.bin", "the run reads 0.7% of the 40,000"),
                                (preset(), "", "the run reads 4.4% of the 80,000 training tokens")):
        tg.open_data(cfg, make_comm(), b"source")
        out = capsys.readouterr().out
        assert warning in out and bool(warning) == ("warning" in out) and share in out


# ---- section 3: hashes ----------------------------------------------------------------------------------------------
RECIPE_TOKENS = (50256, 464, 262, 13, 50256, 50256, 198)
RECIPE_ROWS = [251519, 204580, 71483, 2667, 204913, 35060, 14985]             # with 251,520 rows (RECIPE 11.1)
EXTREME_TOKENS = (0, 1, 2, 50_256, 65_534, 2**16, 2**31 - 1, -1, -2**31, 2**30, 48271)

@pytest.mark.recipe
def test_bigram_hash__is_32_bit_arithmetic_that_wraps() -> None:
    def hashed(tokens: Sequence[int], rows: int) -> list[int]:
        return tg.bigram_hash(np.array(tokens, np.int32), rows).tolist()
    assert hashed(RECIPE_TOKENS, 251_520) == RECIPE_ROWS
    assert hashed((7, *RECIPE_TOKENS[1:]), 251_520) == RECIPE_ROWS, "the row at position 1 does not depend on token 0"
    for rows in (2, 640, 251_520, MOST_ROWS):
        tokens = np.random.default_rng(rows).integers(0, 65536, 400)
        assert hashed(tokens, rows) == bigram_rows(tokens, rows).tolist()

@pytest.mark.parametrize("rows", [2, 97, MOST_ROWS])
@pytest.mark.parametrize("order", list(tg.NGRAM_FACTORS))
def test_table_specs__rows_and_signs_of_ngrams(order, rows) -> None:
    """The hashes are right also where a product exceeds 32 bits, and where the xor is negative."""
    ngram_table = tg.NgramTable("a_embed", order, rows, signs=1, location="host", update_every=4)
    cfg = preset(tables=(ngram_table,), adam_every=1)
    *recipe, table = tg.table_specs(cfg)
    assert [(x.label, x.rowwise, x.update_every) for x in recipe] == [(label, False, 1) for label in tg.BUILTIN_TABLES]
    assert [x.tied_to_head for x in recipe] == [False, False, True]
    assert [x.num_rows for x in recipe] == [cfg.bigram_rows, tg.NUM_VALUE_EMBEDS * cfg.padded_vocab, cfg.padded_vocab]
    assert [x.lookups_per_token for x in recipe] == [1, tg.NUM_VALUE_EMBEDS, 1]
    assert (table.num_rows, table.lookups_per_token, table.tied_to_head, table.rowwise) == (rows, 1, False, True)
    assert (table.location, table.update_every) == ("host", 4)
    assert tg.table_specs(preset(tables=(replace(ngram_table, signs=0),)))[-1].sign_ids is None

    tokens = np.random.default_rng(rows).choice(EXTREME_TOKENS, (3, 40)).astype(np.int32)
    factors, sign_factors = tg.NGRAM_FACTORS[order]
    cases = (table.row_ids, factors, rows), (table.sign_ids, sign_factors, tg.NUM_SIGN_VECTORS + 1)
    for call, constants, count in cases:
        found = call(tokens)
        np.testing.assert_array_equal(found, [ngram_rows(seq, constants, count) for seq in tokens])
        assert found.dtype == np.int32 and (found[:, :order - 1] == count - 1).all()

def test_NGRAM_FACTORS__all_are_different() -> None:
    """With the factors of the row hash, signs could not distinguish n-grams that have the same row."""
    factors = [factor for row_factors, sign_factors in tg.NGRAM_FACTORS.values()
               for factor in (*row_factors, *sign_factors)]
    assert len(set(factors)) == len(factors)


# ---- section 9: row plans -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ids", [
    [], [7], [2**32 - 1, 0, 2**32 - 1], [5] * 9, np.random.default_rng(0).integers(0, 40, 300),
    np.random.default_rng(1).integers(0, 2**32, 300)], ids=["none", "one", "ends", "repeated", "few", "many"])
def test_unique_with_inverse__equals_numpy(ids) -> None:
    ids = np.array(ids, np.int64)
    for found, want in zip(tg.unique_with_inverse(ids), np.unique(ids, return_inverse=True), strict=True):
        assert found.tolist() == want.tolist() and found.dtype == np.int64

def plain_plan(rows: set[int], num_rows: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return the rows, numbered by owner, and the number of rows of each owner.

    Row r is local row r // W of rank r % W. All shards have the same length.
    """
    shard_rows = math.ceil(num_rows / world_size)
    owners = [sorted(row for row in rows if row % world_size == owner) for owner in range(world_size)]
    by_owner = []
    for owner, owned in enumerate(owners):
        by_owner += [owner * shard_rows + row // world_size for row in owned]
    return by_owner, list(map(len, owners))

def row_patterns(R: int) -> list[list[np.ndarray]]:
    """Build the rows that the steps of a cycle look up, by case: none, the ends, one owner's, some, all but one.

    R: rows of the table.
    """
    rng = np.random.default_rng(R)
    patterns = [
        [np.zeros((0, 4))],
        [np.zeros((2, 7)), np.array([[R - 1, 0]])],
        [np.arange(max(0, R - 20), R)[None]],
        [rng.integers(0, -(-R // 24), (2, 11)) * 24],
    ]
    patterns.append([rng.integers(0, R, size) for size in ((3, 2, 5), (3, 8))])
    if R < 1000:
        patterns.append([rng.permutation(R - 1)[None], rng.integers(0, R, (2, R))])
    return [[rows.astype(np.int32) for rows in steps] for steps in patterns]

@pytest.mark.parametrize("fetch_all", [False, True], ids=["rows looked up", "all rows"])
@pytest.mark.parametrize("world_size", [1, 2, 7, 8])
@pytest.mark.parametrize("num_rows", [3, 7, 101, 640, MOST_ROWS])
def test_plan_rows__equals_plain_sets(num_rows, world_size, fetch_all) -> None:
    """Table sizes: multiples of W and others, less than W, and the largest one, whose rows by owner exceed 2^31."""
    # A plan with all rows of the largest table is too large.
    if fetch_all and num_rows == MOST_ROWS:
        return
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
            assert plan.rows_to_fetch.tolist() == plan.rows_to_serve.tolist() == ids == sorted(set(ids))
            assert plan.fetch_counts == plan.serve_counts == counts and plan.rows_to_fetch.dtype == torch.int64
            assert (plan.shard_rows, plan.tied) == (shard_rows, tied)
            if tied:
                token_ids = [row % shard_rows * world_size + row // shard_rows for row in ids]
                assert plan.head_column_ids.tolist() == token_ids
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, np.dtype(np.int32)) for x in rows]
            index = np.concatenate([x.ravel() for x in found])
            rows_by_owner = lookups % world_size * shard_rows + lookups // world_size
            assert plan.rows_to_fetch[index].tolist() == rows_by_owner.tolist()
            if world_size == 1 and table.rowwise:
                assert plan.rows_to_update.tolist() == sorted(set(lookups.tolist()))
                assert plan.rows_to_update[plan.serve_to_update].equal(plan.rows_to_serve)

@pytest.mark.parametrize("purpose, sent, received", [("train", 50, 10), ("validation", 0, 0)])
def test_count_bytes__excludes_what_a_rank_sends_to_itself(purpose, sent, received) -> None:
    """Rank 0 sends 5 items of 10 bytes to rank 1 and receives 1. Only training is counted."""
    table = object.__new__(tg.ExchangedTable)
    table.comm, table.byte_totals = make_comm(0, 2), Counter()
    plan = SimpleNamespace(tag=dict(purpose=purpose))
    table._count_bytes(plan, 10, recv_counts=[3, 1], send_counts=[3, 5])
    assert (table.byte_totals["bytes_sent"], table.byte_totals["bytes_received"]) == (sent, received)

"""Room 3: shards, packing, hash and loader against plain loops; every kind of bad data is named."""
import base64
import contextlib
import math
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from common import fabric, preset, random_stream, refused, write_shard

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


def make_loader(tmp_path, rank=0, world=1, steps=12, **changes):
    cfg = preset(train_files=f"{tmp_path}/train_*.bin", vocab_size=50, document_start=3, max_doc_len=12, **changes)
    values = [tg.Schedule(cfg).at(step) for step in range(steps)]
    return tg.Loader(cfg, fabric(rank, world), tg.find_shards(cfg.train_files), values), values


def read_all(loader, values) -> list[tg.Batch]:
    loader.start()
    batches = [loader.next(v) for v in values]
    loader.close()
    return batches


def slow_stream(streams, values, slots=8):
    """(tokens, bounds) of all slots of each step: a block that does not fit starts the next shard."""
    shard, doc, steps = 0, 0, []
    for v in values:
        while (found := slow_block(streams[shard], 3, doc, slots, v.slot_tokens, v.max_doc_len)) is None:
            shard, doc = shard + 1, 0
        block, doc = found
        steps.append([slow_slot(streams[shard], pieces) for pieces in block])
    return steps


def check_batches(batches, steps):
    for step, (batch, want) in enumerate(zip(batches, steps, strict=True)):
        assert batch.step == step
        assert batch.tokens.tolist() == [tokens[:-1] for tokens, _ in want]
        assert batch.targets.tolist() == [tokens[1:] for tokens, _ in want]
        assert batch.bigram_rows.tolist() == [slow_hash(tokens[:-1], 640) for tokens, _ in want]
        columns, length = max(len(bounds) for _, bounds in want), batch.tokens.shape[1]
        assert batch.cu_seqlens.tolist() == [bounds + [length] * (columns - len(bounds)) for _, bounds in want]
        assert [x.dtype for x in batch[1:]] == [tg.torch.int32, tg.torch.int64, tg.torch.int32, tg.torch.int32]


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


def test_the_end_of_the_data_is_an_error_with_a_way_out(tmp_path):
    streams = write_shards(tmp_path, 1200, 1100)
    loader, values = make_loader(tmp_path)
    enough = next(n for n in range(12) if too_short(streams, values[:n + 1]))
    loader.start()
    refused(tg.DataError, lambda: [loader.next(v) for v in values], "training data ended", "2 shards", "train_*.bin",
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
    refused(tg.DataError, lambda: loader.next(values[0]), "too small", "none of 2", "8 x 17", "larger shards")
    loader.close()


def test_tokens_do_not_depend_on_timing(tmp_path, monkeypatch):
    """The same bits with a slow disk, a slow packer, and a slow reader of the batches."""
    streams = write_shards(tmp_path, 1500, 300, 2600, 4000)
    load, make = tg.load_shard, tg.Loader._make

    def slow_load(header):
        time.sleep(0.05)
        return load(header)

    def slow_make(self, values):
        time.sleep(0.01 * (values.step % 3))
        return make(self, values)

    for name, target, slow in (("load_shard", tg, slow_load), ("_make", tg.Loader, slow_make)):
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
    built, make = [], tg.Loader._make
    monkeypatch.setattr(tg.Loader, "_make", lambda self, values: (
        built.append((values.step, threading.current_thread())) or make(self, values)))
    loader, values = make_loader(tmp_path, steps=5)
    assert not built
    loader.start()
    for step, ahead in enumerate((4, 4, 5, 5, 5)):
        loader.next(values[step])
        if loader.ahead:
            loader.wait()                                            # until the work that was asked for is done
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
    refused(tg.DataError, lambda: [loader.next(v) for v in values[1:]], "train_000001.bin", "50",
            f"byte {1024 + 2 * 77}", "header word 3")
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
    assert not first().tokens.equal(first(max_doc_len=4).tokens)


# ---- bad data -------------------------------------------------------------------------------------------------------

GOOD = [3, 1, 2, 3, 4, 5] * 20
BAD_FILES = {                                # how the file is made -> what the message must hold
    "magic": (dict(magic=1), None, ("a.bin", "byte 0", "[1, 1]", "20240520", "data/README.md")),
    "version": (dict(version=2), None, ("a.bin", "[20240520, 2]", "1 (version)")),
    "cut": (dict(), -10, ("a.bin", f"{1024 + 240 - 10} bytes", f"{1024 + 240} bytes", "fetch it again")),
    "longer": (dict(count=100), None, ("a.bin", f"{1024 + 240} bytes", f"{1024 + 200} bytes")),
    "no header": (dict(), -500, ("a.bin", "764 bytes", "1024 bytes")),
    "empty": (dict(), -5000, ("a.bin", "0 bytes", "1024 bytes")),
    "no tokens": (dict(count=0), None, ("a.bin", "length", "word 2")),
    "start beyond vocabulary": (dict(document_start=6), None, ("a.bin", "words 3 and 4", "document start 6", "6")),
    "vocabulary too large": (dict(vocab_size=70_000), None, ("a.bin", "70000", "65535")),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_damaged_header_is_refused(tmp_path, kind):
    header, cut, parts = BAD_FILES[kind]
    path = write_shard(tmp_path / "a.bin", GOOD, **dict(vocab_size=6, document_start=3) | header)
    if cut:
        path.write_bytes(path.read_bytes()[:cut])
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/*.bin"), *parts)


@pytest.mark.parametrize("tokens, header, parts", [
    (GOOD, (5, 3), ("a.bin", "token 5", f"byte {1024 + 10}", "found:    5", "below the vocabulary size 5")),
    (GOOD, (9, 8), ("a.bin", "no document start", "token 8")),
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
    assert [header[1:] for header in tg.find_shards(f"{tmp_path}/*.bin")] == [(120, 6, 3), (120, 50_257, 50_256)]


def test_shards_are_taken_in_name_order(tmp_path, monkeypatch):
    names = ["a_10.bin", "a_2.bin", "b.bin"]
    for name in names:
        write_shard(tmp_path / name, GOOD, 6, 3)
    found = [str(tmp_path / name) for name in (names[2], names[0], names[1])]
    monkeypatch.setattr(tg.glob, "glob", lambda pattern: found)      # as a file system may list them
    assert [header.name for header in tg.find_shards("any")] == [str(tmp_path / name) for name in names]


def test_no_shards(tmp_path):
    refused(tg.DataError, lambda: tg.find_shards(f"{tmp_path}/none_*.bin"), "no shards", "none_*.bin",
            "cached_fineweb10B.py", "pocket.py", "--train_files=")


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


@pytest.mark.parametrize("have, epochs, steps", [
    (8 * 17 * 3 - 1, 1, 2), (100, 4, 2), (8 * 17 * 3 + 8 * 33, 1, 4), (1, 1, 0)])
def test_too_few_tokens_are_known_before_the_start(have, epochs, steps):
    """Steps of 8 x 17 tokens in stage 0 (three steps), 8 x 33 in stage 1."""
    cfg = preset(epochs=epochs)
    refused(tg.DataError, lambda: tg.check_enough_data(cfg, tg.Schedule(cfg), shards(have)), "too few training tokens",
            f"{have * epochs} in 1 shards", f": {steps} steps", "for 12 steps", "--epochs=0", "cached_fineweb10B.py")


def test_enough_tokens_pass():
    need = 8 * (3 * 17 + 3 * 33 + 6 * 49)                            # steps x (tokens of a slot + 1), by stage
    for changes, have in ((dict(), [need]), (dict(epochs=2), [need // 4 + 1] * 2), (dict(epochs=0), [1]),
                          (dict(max_steps=1), [8 * 17])):
        cfg = preset(**changes)
        tg.check_enough_data(cfg, tg.Schedule(cfg), shards(*have))


def test_too_few_validation_tokens(tmp_path):
    cfg, headers = validation_config(tmp_path, random_stream(0, 200, 50, 3), 256, vocab_size=50, document_start=3)
    refused(tg.DataError, lambda: tg.ValidationSet(cfg, fabric(), headers), "too few validation tokens", "128", "256",
            "--val_tokens=128")
    write_shard(tmp_path / "v.bin", GOOD, 50, 3)
    refused(tg.DataError, lambda: tg.ValidationSet(cfg, fabric(), tg.find_shards(cfg.val_files)), "found:    0",
            "--val_batch_tokens")


@pytest.mark.parametrize("line", ["YQ==", "%%% 1", "YQ== x", "YQ== 1 2"])
def test_a_broken_line_of_the_vocabulary_is_refused(tmp_path, line):
    _, headers = validation_config(tmp_path, GOOD, 256, vocab_size=50, document_start=3)
    (tmp_path / "vocab.txt").write_text(f"YQ== 0\n{line}\n")
    refused(tg.DataError, lambda: tg.read_vocabulary(headers[0]), "vocab.txt", "line 2", line, "remove the file")


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 4, 5), (0, 1, 2, 3, 4), (0, 1, 2, -1)])
def test_a_vocabulary_of_other_ids_is_refused(tmp_path, ids):
    """Each id but the document start, 3 of 5, has its bytes: a hole would be counted as no bytes."""
    write_shard(tmp_path / "v.bin", GOOD, 5, 3)
    (tmp_path / "vocab.txt").write_text("\n".join(f"YQ== {token}" for token in ids))
    headers = tg.find_shards(f"{tmp_path}/v.bin")
    refused(tg.DataError, lambda: tg.read_vocabulary(headers[0]), "vocab.txt", "document start 3", f"{len(ids)} of 5")

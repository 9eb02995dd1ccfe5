"""data/ngram.py: its results equal those of plain counting, and bad shards and requests are refused."""
import json
import math
from collections import Counter

import numpy as np
import pytest
from common import write_shard
from data_common import failure

import ngram                                                  # noqa: E402

def slow_probability(train: list[int], history: tuple, token: int, vocab_size: int) -> float:
    """Compute a Witten-Bell probability from its definition, with one pass over `train` per history."""
    n = len(history)
    lower = slow_probability(train, history[1:], token, vocab_size) if n else 1 / vocab_size
    after = Counter(train[i + n] for i in range(len(train) - n) if tuple(train[i:i + n]) == history)
    total, kinds = sum(after.values()), len(after)
    return (after[token] + kinds * lower) / (total + kinds) if total else lower

@pytest.mark.parametrize("train_len, val_len, vocab_size", [(120, 60, 7), (40, 50, 50_257), (2, 3, 5), (3, 2, 5)])
def test_witten_bell__equals_plain_counting(train_len, val_len, vocab_size) -> None:
    rng = np.random.default_rng(train_len)
    steps = rng.geometric(0.3, train_len + val_len) * (vocab_size // 6 + 1)       # skewed; the largest id occurs
    train, val = np.split(np.minimum(steps, vocab_size) - 1, [train_len])
    slow = [slow_probability(train.tolist(), tuple(val[max(0, t - 2):t].tolist()), int(val[t]), vocab_size)
            for t in range(1, val_len)]
    np.testing.assert_allclose(ngram.witten_bell(train, val, vocab_size), slow, rtol=1e-12)     # both compute in f64

def test_main__a_stream_over_shards(tmp_path, capsys) -> None:
    """The shards are read as one stream in name order, and --train_tokens and --val_tokens are counted in it."""
    rng = np.random.default_rng(1)
    train, val = rng.integers(0, 7, 90), rng.integers(0, 7, 50)
    for i, part in enumerate(np.split(train, [20, 60])):
        write_shard(tmp_path / f"train_{i}.bin", part, 7)
    write_shard(tmp_path / "val[1].bin", val, 7)
    ngram.main([f"--train={tmp_path}/train_*.bin", f"--val={tmp_path}/val[1].bin", "--train_tokens=70",
                "--val_tokens=40"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = Counter(val[1:41].tolist()).values()
    assert math.isclose(result["unigram_nats"], -sum(c / 40 * math.log(c / 40) for c in counts))
    assert math.isclose(result["trigram_nats"], -np.log(ngram.witten_bell(train[:70], val[:41], 7)).mean())
    assert (result["train_tokens"], result["val_tokens"], result["vocab_size"]) == (70, 40, 7)

def test_find_shards__brackets_in_the_name_of_a_folder_are_literal(tmp_path) -> None:
    """As for the trainer. Earlier, `my s` matched `my [set]`, so that the baseline was of other data."""
    for name, vocab_size in (("my s", 7), ("my [set]", 9)):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "x.bin", [0, 1, 2], vocab_size)
    for pattern, vocab_size in (("my [set]/*.bin", 9), ("m[xy] s/*.bin", 7)):
        assert ngram.read_stream(f"{tmp_path}/{pattern}", None)[1] == vocab_size

@pytest.mark.parametrize("change, message", [
    (dict(magic=1), "it has magic number 1, version 1 instead of 20240520, 1"), (dict(version=2), "version 2 instead"),
    (dict(count=11), "1,044 bytes, 1,046 with the 11 tokens"), (dict(count=0), "the 0 tokens of its header"),
    (dict(vocab_size=6), "token id 6, but 6 tokens")])
def test_read_stream__a_bad_shard(tmp_path, change, message) -> None:
    tokens = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    write_shard(tmp_path / "bad.bin", tokens, **dict(vocab_size=7) | change)
    assert message in failure(ngram, f"--train={tmp_path}/*.bin", f"--val={tmp_path}/*.bin")

def test_read_stream__wrong_requests(tmp_path) -> None:
    """Too many tokens, missing or damaged files, and shards of different vocabularies are refused."""
    good, other, gpt2 = (write_shard(tmp_path / f"{size}.bin", [0, 1, 2], size) for size in (7, 9, 0))
    (tmp_path / "short.bin").write_bytes(b"\0" * 10)
    for val, count, message in ((good, 4, "request 2 to 3"), (tmp_path / "none.bin", 1, "or a pattern in quotes"),
                                (tmp_path / "short.bin", 1, "magic number 0"), (other, 1, "vocabulary size 9"),
                                (gpt2, 1, "vocabulary size 50257"), (tmp_path / "[79].bin", 1, "sizes [7, 9]"),
                                (tmp_path, 1, "not a regular file")):
        assert message in failure(ngram, f"--train={good}", f"--val={val}", f"--val_tokens={count}")

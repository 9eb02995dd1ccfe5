"""data/ngram.py against counting in plain Python, and its messages about shards that cannot be read."""
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


sys.path.insert(0, str(ROOT / "data"))                        # the tools import shard_files.py beside them

import ngram                                                  # noqa: E402


def write_shard(path: Path, tokens, vocab_size=7, magic=20240520, version=1, count=None) -> str:
    header = np.zeros(256, "<i4")
    header[:4] = magic, version, len(tokens) if count is None else count, vocab_size
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return str(path)


def slow_probability(train: list[int], history: tuple, token: int, vocab_size: int) -> float:
    """Witten-Bell from its definition: looks through all of `train` for every history."""
    n = len(history)
    lower = slow_probability(train, history[1:], token, vocab_size) if n else 1 / vocab_size
    after = Counter(train[i + n] for i in range(len(train) - n) if tuple(train[i:i + n]) == history)
    total, kinds = sum(after.values()), len(after)
    return (after[token] + kinds * lower) / (total + kinds) if total else lower


@pytest.mark.parametrize("train_len, val_len, vocab_size", [(120, 60, 7), (40, 50, 50_257), (2, 3, 5), (3, 2, 5)])
def test_trigram_model_equals_plain_counting(train_len, val_len, vocab_size):
    rng = np.random.default_rng(train_len)
    steps = rng.geometric(0.3, train_len + val_len) * (vocab_size // 6 + 1)       # skewed; the last id occurs
    train, val = np.split(np.minimum(steps, vocab_size) - 1, [train_len])
    slow = [slow_probability(train.tolist(), tuple(val[max(0, t - 2):t].tolist()), int(val[t]), vocab_size)
            for t in range(1, val_len)]
    np.testing.assert_allclose(ngram.witten_bell(train, val, vocab_size), slow, rtol=1e-12)     # float64 both


def test_probabilities_of_all_tokens_sum_to_one():
    train = np.random.default_rng(0).integers(0, 6, 80)
    for history in ([0, 1], [5, 5], [6, 6]):     # 6 was never seen
        p = [ngram.witten_bell(train, np.array([*history, token]), 7)[-1] for token in range(7)]
        assert math.isclose(sum(p), 1, rel_tol=1e-12)


def test_command_reads_a_stream_over_shards(tmp_path, capsys):
    rng = np.random.default_rng(1)
    train, val = rng.integers(0, 7, 90), rng.integers(0, 7, 50)
    for i, part in enumerate(np.split(train, [20, 60])):
        write_shard(tmp_path / f"train_{i}.bin", part)
    ngram.main(["--train", f"{tmp_path}/train_*.bin", "--val", write_shard(tmp_path / "val.bin", val),
                "--train_tokens", "70", "--val_tokens", "40"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = Counter(val[1:41].tolist()).values()
    assert math.isclose(result["unigram_nats"], -sum(c / 40 * math.log(c / 40) for c in counts))
    assert math.isclose(result["trigram_nats"], -np.log(ngram.witten_bell(train[:70], val[:41], 7)).mean())
    assert math.isclose(result["ratio"], result["trigram_nats"] / result["unigram_nats"])
    assert (result["train_tokens"], result["val_tokens"], result["vocab_size"]) == (70, 40, 7)


def test_header_without_vocabulary_size_means_gpt2(tmp_path):
    assert ngram.read_shard(write_shard(tmp_path / "a.bin", [1, 50_256], vocab_size=0))[1] == 50_257


@pytest.mark.parametrize("change, message", [
    (dict(magic=1), r"found header \[1, 1\], expected \[20240520, 1\]"),
    (dict(version=2), r"found header \[20240520, 2\], expected \[20240520, 1\]"),
    (dict(count=11), "found 20 bytes of tokens, expected 22"),
    (dict(vocab_size=6), "found token id 6, expected below 6"),
])
def test_unreadable_shard_is_named(tmp_path, change, message):
    path = write_shard(tmp_path / "bad.bin", [0, 1, 2, 3, 4, 5, 6, 0, 1, 2], **change)
    with pytest.raises(ngram.DataError, match=f"bad.bin.*{message}"):
        ngram.read_stream(path, None)


def test_wrong_requests_are_explained(tmp_path):
    good = write_shard(tmp_path / "a.bin", [0, 1, 2])
    write_shard(tmp_path / "b.bin", [0, 1, 2], vocab_size=9)
    (tmp_path / "short.bin").write_bytes(b"\0" * 100)
    with pytest.raises(ngram.DataError, match=r"found 3 tokens, asked for 4.*ask for 2 to 3"):
        ngram.read_stream(good, 4)
    with pytest.raises(ngram.DataError, match=r"found vocabulary sizes \[7, 9\], expected one"):
        ngram.read_stream(f"{tmp_path}/[ab].bin", None)
    with pytest.raises(ngram.DataError, match=r"1,024 bytes"):
        ngram.read_stream(f"{tmp_path}/short.bin", None)
    with pytest.raises(SystemExit, match=r"found no file for '.*none.bin'.*data/pocket.py"):
        ngram.main(["--train", good, "--val", f"{tmp_path}/none.bin"])
    with pytest.raises(SystemExit, match="found vocabulary sizes 7 in --train and 9 in --val"):
        ngram.main(["--train", good, "--val", f"{tmp_path}/b.bin"])

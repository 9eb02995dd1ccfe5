"""What counting reaches on a set of shards: the entropy of the validation tokens and the loss of a trigram model.

    python data/ngram.py --train 'data/pocket/pocket_train_*.bin' --val 'data/pocket/pocket_val_*.bin' \
                            --train_tokens 600000 --val_tokens 65536

A trained model should be clearly below both figures: below the unigram entropy by knowing any context at all, below the
trigram model by knowing more than the two tokens before. The last line printed is one JSON object.
"""
from __future__ import annotations

import argparse
import glob
import json
import sys

import numpy as np

HEADER_WORDS, MAGIC, VERSION = 256, 20240520, 1
GPT2_VOCAB_SIZE = 50_257                     # header word 3 is 0 in shards made before it had a meaning


class DataError(Exception):
    """Shards that cannot be read; the message says what was found, what was expected, and what to do."""


def read_shard(path: str) -> tuple[np.ndarray, int]:
    """The tokens of one shard (memory map, uint16) and its vocabulary size."""
    header = np.fromfile(path, "<i4", HEADER_WORDS)
    if len(header) < HEADER_WORDS or header[0] != MAGIC or header[1] != VERSION:
        raise DataError(f"{path}: found header {header[:2].tolist()}, expected [{MAGIC}, {VERSION}] and 1,024 bytes; "
                        f"give a token shard or make this one again")
    body = np.memmap(path, np.uint8, "r")[4 * HEADER_WORDS:]
    if len(body) != 2 * header[2]:
        raise DataError(f"{path}: found {len(body):,} bytes of tokens, expected {2 * int(header[2]):,} "
                        f"(header: {header[2]:,} tokens); make the file again")
    return body.view("<u2"), int(header[3]) or GPT2_VOCAB_SIZE


def read_stream(pattern: str, count: int | None) -> tuple[np.ndarray, int]:
    """The first `count` tokens (None: all) of the shards in name order, as int64, and the vocabulary size."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise DataError(f"found no file for {pattern!r}, expected token shards; run: python data/pocket.py")
    shards, sizes = zip(*map(read_shard, paths))
    if len(set(sizes)) > 1:
        raise DataError(f"{pattern!r}: found vocabulary sizes {sorted(set(sizes))}, expected one; narrow the pattern")
    have, parts = sum(map(len, shards)), []
    need = have if count is None else count
    if have < need or need < 2:
        raise DataError(f"{pattern!r}: found {have:,} tokens, asked for {need:,}, expected at least 2; "
                        f"ask for 2 to {have:,} or add shards")
    for shard in shards:
        parts.append(shard[:need].astype(np.int64))
        need -= len(parts[-1])
    tokens = np.concatenate(parts)
    if tokens.max() >= sizes[0]:
        raise DataError(f"{pattern!r}: found token id {tokens.max()}, expected below {sizes[0]}; make the shards again")
    return tokens, sizes[0]


def unigram_entropy(targets: np.ndarray) -> float:
    """Entropy in nats of the tokens' own frequencies: the best loss of a model that knows nothing but them."""
    counts = np.unique(targets, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] == wanted, 0 where there is no such key; `keys` ascending."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def witten_bell(train: np.ndarray, val: np.ndarray, vocab_size: int) -> np.ndarray:
    """Probability of val[1:], each from the two tokens before it; counts come from `train` alone.

    p(w | h) = (count(h w) + kinds(h) * p(w | h less its oldest token)) / (count(h) + kinds(h)), where kinds(h) is the
    number of different tokens seen after h. A history never seen leaves p as it is. Below the unigram: 1 / vocab_size.
    """
    p = np.full(len(val) - 1, 1.0 / vocab_size)
    train_key, val_key = train, val              # one number per n-gram: its last token + vocab_size * (its history)
    for length in range(min(3, len(train), len(val))):                    # length of the history
        if length:
            train_key = train_key[1:] + vocab_size**length * train[:-length]
            val_key = val_key[1:] + vocab_size**length * val[:-length]
        grams, counts = np.unique(train_key, return_counts=True)
        histories, first, kinds = np.unique(grams // vocab_size, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)                               # count(h) of each history
        part = p[max(length - 1, 0):]            # the first target has one token before it, so no trigram history
        wanted = val_key[-len(part):]
        kinds_h, count_h = (lookup(histories, of, wanted // vocab_size) for of in (kinds, totals))
        mixed = (lookup(grams, counts, wanted) + kinds_h * part) / np.maximum(count_h + kinds_h, 1)
        part[:] = np.where(count_h > 0, mixed, part)
    return p


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True, help="pattern of the training shards, in quotes")
    parser.add_argument("--val", required=True, help="pattern of the validation shards, in quotes")
    parser.add_argument("--train_tokens", type=int, help="count the first N training tokens (default: all)")
    parser.add_argument("--val_tokens", type=int, help="score validation tokens 1 to M (default: all but token 0)")
    args = parser.parse_args(argv)
    try:
        train, vocab_size = read_stream(args.train, args.train_tokens)
        val, val_vocab_size = read_stream(args.val, args.val_tokens and args.val_tokens + 1)
        if vocab_size != val_vocab_size:
            raise DataError(f"found vocabulary sizes {vocab_size} in --train and {val_vocab_size} in --val, "
                            f"expected the same; use shards of one data set")
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    entropy = unigram_entropy(val[1:])
    loss = float(-np.log(witten_bell(train, val, vocab_size)).mean())
    print(f"{len(train):,} training tokens, {len(val) - 1:,} validation tokens, vocabulary of {vocab_size:,}")
    print(f"unigram entropy of the validation tokens  {entropy:.4f} nats per token")
    print(f"Witten-Bell trigram model                 {loss:.4f} nats per token, {loss / entropy:.4f} of the entropy")
    print(json.dumps({"train_tokens": len(train), "val_tokens": len(val) - 1, "vocab_size": vocab_size,
                      "unigram_nats": entropy, "trigram_nats": loss, "ratio": loss / entropy}))


if __name__ == "__main__":
    main()

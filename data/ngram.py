"""Compute two baselines of token shards: the unigram entropy and the loss of a Witten-Bell trigram model.

    python data/ngram.py --train 'data/pocket/pocket_train_*.bin' --val 'data/pocket/pocket_val_*.bin' \
                         --train_tokens 600000 --val_tokens 65536

The loss of a trained model should be lower than both. A model that uses any context has a lower loss than the unigram
entropy. A model that uses more than the previous two tokens can have a lower loss than the trigram model. The last
line of the output is one JSON object.
"""
import argparse
import glob
import json
import os
import sys
from pathlib import Path

import numpy as np

from shard_files import HEADER_BYTES, check, check_content, escape_folder, print_result, read_header, run_main

def find_shards(pattern: str) -> list[Path]:
    """List the files that match a pattern, in name order. Brackets are taken as the trainer takes them."""
    names = sorted(glob.glob(escape_folder(pattern)))
    if not names and os.path.lexists(pattern):
        names = [pattern]
    check(names, f"{pattern} matches no file: give a token shard, or a pattern in quotes")
    return [Path(name) for name in names]

def read_stream(pattern: str, count: int | None) -> tuple[np.ndarray, int]:
    """Read the first `count` tokens (None: all) of the matching shards: tokens (n,) i64, and the vocabulary size."""
    paths = find_shards(pattern)
    headers = [read_header(path) for path in paths]
    sizes = sorted({vocab_size for _, vocab_size in headers})
    check(len(sizes) == 1, f"{pattern} matches shards with vocabulary sizes {sizes}: narrow the pattern")
    available = sum(tokens for tokens, _ in headers)
    wanted = available if count is None else count
    check(2 <= wanted <= available, f"{wanted:,} tokens of {pattern} are requested: request 2 to {available:,}")
    parts = []
    for path in paths:
        if wanted > 0:
            check_content(path)
            part = np.fromfile(path, "<u2", wanted, offset=HEADER_BYTES)
            parts.append(part)
            wanted -= len(part)
    tokens = np.concatenate(parts).astype(np.int64)
    check(tokens.max() < sizes[0], f"{pattern} has token id {tokens.max()}, but {sizes[0]} tokens in the vocabulary: "
          "create the shards again")
    return tokens, sizes[0]

def ngram_keys(tokens: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Number all n-grams of a length: an n-gram's last token + vocab_size * the key of its history.

    tokens (n,) i64 -> (n - length + 1,) i64, in the order of the last tokens.
    """
    num_ngrams = len(tokens) - length + 1
    keys = np.zeros(num_ngrams, np.int64)
    for i in range(length):                  # from the oldest token of every n-gram to the last one
        keys = keys * vocab_size + tokens[i:i + num_ngrams]
    return keys

def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Look up `wanted` in the ascending `keys`. Returns values[i] where keys[i] == wanted, else 0."""
    index = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)

def witten_bell(train: np.ndarray, val: np.ndarray, vocab_size: int) -> np.ndarray:
    """Compute the probability of each token of val[1:] given the two tokens before it, with counts of `train` only.

    p(w | h) = (count(h w) + distinct(h) * p(w | h without its oldest token)) / (count(h) + distinct(h)), where
    distinct(h) is the number of different tokens that follow h in `train`. If a history h does not occur in `train`,
    its p is that without the oldest token. The unigram model is interpolated with 1 / vocab_size.
    train (n,) i64, val (m,) i64 -> (m - 1,) f64.
    """
    p = np.full(len(val) - 1, 1.0 / vocab_size)
    max_length = min(3, len(train), len(val))
    for length in range(1, max_length + 1):
        train_keys = ngram_keys(train, length, vocab_size)
        ngrams, ngram_counts = np.unique(train_keys, return_counts=True)
        # `ngrams` is sorted, so the n-grams of one history are neighbors.
        histories, first, distinct = np.unique(ngrams // vocab_size, return_index=True, return_counts=True)
        history_counts = np.add.reduceat(ngram_counts, first)

        # val[1], the first target, has only one token before it, and therefore no trigram history.
        first_target = max(length - 1, 1)
        shorter_p = p[first_target - 1:]
        target_keys = ngram_keys(val, length, vocab_size)[-len(shorter_p):]
        target_histories = target_keys // vocab_size
        count_hw = lookup(ngrams, ngram_counts, target_keys)
        count_h = lookup(histories, history_counts, target_histories)
        distinct_h = lookup(histories, distinct, target_histories)
        numerator = count_hw + distinct_h * shorter_p
        denominator = count_h + distinct_h
        np.divide(numerator, denominator, out=shorter_p, where=count_h > 0)   # changes p
    return p

def unigram_entropy(tokens: np.ndarray) -> float:
    """Compute the entropy of the token frequencies in nats: the lowest loss of a model without context."""
    counts = np.unique(tokens, return_counts=True)[1]
    frequencies = counts / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True, help="training shards, a pattern in quotes")
    parser.add_argument("--val", required=True, help="validation shards, a pattern in quotes")
    parser.add_argument("--train_tokens", type=int, help="training tokens to count, from the first on [all]")
    parser.add_argument("--val_tokens", type=int, help="validation tokens to score, from the second on [all]")
    args = parser.parse_args(argv)
    train, vocab_size = read_stream(args.train, args.train_tokens)
    val_count = None if args.val_tokens is None else args.val_tokens + 1
    val, val_vocab_size = read_stream(args.val, val_count)
    check(vocab_size == val_vocab_size, f"{args.val} has vocabulary size {val_vocab_size}, --train {vocab_size}: use "
          "shards of one data set")

    targets = val[1:]                        # val[0] is only the context of val[1]
    entropy = unigram_entropy(targets)
    probabilities = witten_bell(train, val, vocab_size)
    loss = float(-np.log(probabilities).mean())
    result = {"train_tokens": len(train), "val_tokens": len(targets), "vocab_size": vocab_size,
              "unigram_nats": entropy, "trigram_nats": loss}
    print_result(f"{len(train):,} training tokens, {len(targets):,} validation tokens, vocabulary of {vocab_size:,}",
        f"unigram entropy of the validation tokens  {entropy:.4f} nats per token",
        f"Witten-Bell trigram model                 {loss:.4f} nats per token",
        json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_main(main))

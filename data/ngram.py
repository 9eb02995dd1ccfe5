"""What counting reaches on token shards: the entropy of the tokens, the loss of a trigram model.

    python data/ngram.py --train 'data/pocket/pocket_train_*.bin' --val 'data/pocket/pocket_val_*.bin' \
                         --train_tokens 600000 --val_tokens 65536

A trained model should be clearly below both figures: below the unigram entropy by knowing any context at all, below the
trigram model by knowing more than the two tokens before. The last line printed is one JSON object.
"""
from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from shard_files import (HEADER_BYTES, DataError, as_program, check_content, errors_in_words, find_shards, read_header,
                         read_manifest, say)

HISTORY = 2                                  # tokens before the one that is predicted


def read_stream(pattern: str, count: int | None) -> tuple[np.ndarray, int]:
    """The first `count` tokens (None: all) of the shards, as int64, and the vocabulary size. Raises DataError."""
    paths = find_shards(pattern)
    manifests = {path.parent: read_manifest(path.parent) for path in paths}
    headers = [read_header(path) for path in paths]
    sizes = sorted({vocab_size for _, vocab_size in headers})
    if len(sizes) > 1:
        raise DataError(f"{pattern!r}: found vocabulary sizes {sizes}, expected one; narrow the pattern")
    vocab_size = sizes[0]
    have = sum(tokens for tokens, _ in headers)
    wanted = have
    if count is not None:
        wanted = count
    if have < wanted or wanted < 2:
        raise DataError(f"{pattern!r}: found {have:,} tokens, asked for {wanted:,}, expected at least 2; ask for 2 to "
                        f"{have:,} or add shards")

    parts = []
    for path in paths:
        if wanted > 0:
            check_content(path, manifests[path.parent])
            parts.append(np.fromfile(path, "<u2", wanted, offset=HEADER_BYTES))
            wanted -= len(parts[-1])
    tokens = np.concatenate(parts).astype(np.int64)
    if tokens.max() >= vocab_size:
        raise DataError(f"{pattern!r}: found token id {tokens.max()}, expected below {vocab_size}; make the shards "
                        f"again")
    return tokens, vocab_size


def unigram_entropy(targets: np.ndarray) -> float:
    """Entropy in nats of the tokens' own frequencies: the best loss if nothing else is known."""
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
    train_key = train                        # a number per n-gram: its last token + vocab_size * (its history)
    val_key = val
    for length in range(min(HISTORY, len(train) - 1, len(val) - 1) + 1):      # of the history
        if length:
            oldest = vocab_size**length
            train_key = train_key[1:] + oldest * train[:-length]
            val_key = val_key[1:] + oldest * val[:-length]

        grams, gram_counts = np.unique(train_key, return_counts=True)
        histories, first, kinds = np.unique(grams // vocab_size, return_index=True, return_counts=True)
        totals = np.add.reduceat(gram_counts, first)          # count(h) of each history

        part = p[max(length - 1, 0):]        # the first target has one token before it, so no trigram history
        wanted = val_key[-len(part):]
        wanted_history = wanted // vocab_size
        count_hw = lookup(grams, gram_counts, wanted)
        count_h = lookup(histories, totals, wanted_history)
        kinds_h = lookup(histories, kinds, wanted_history)
        mixed = (count_hw + kinds_h * part) / np.maximum(count_h + kinds_h, 1)
        part[:] = np.where(count_h > 0, mixed, part)
    return p


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True, help="pattern of the training shards, in quotes")
    parser.add_argument("--val", required=True, help="pattern of the validation shards, in quotes")
    parser.add_argument("--train_tokens", type=int, help="count the first N training tokens (default: all)")
    parser.add_argument("--val_tokens", type=int, help="score validation tokens 1 to M (default: all but token 0)")
    args = parser.parse_args(argv)
    with errors_in_words():
        train, vocab_size = read_stream(args.train, args.train_tokens)
        val_count = None if args.val_tokens is None else args.val_tokens + 1
        val, val_vocab_size = read_stream(args.val, val_count)
        if vocab_size != val_vocab_size:
            raise DataError(f"found vocabulary sizes {vocab_size} in --train and {val_vocab_size} in --val, expected "
                            f"the same; use shards of one data set")

        entropy = unigram_entropy(val[1:])
        loss = float(-np.log(witten_bell(train, val, vocab_size)).mean())
        scored = len(val) - 1
        ratio = None                         # the same token everywhere
        share = ""
        if entropy > 0:
            ratio = loss / entropy
            share = f", {ratio:.4f} of the entropy"
        result = {"train_tokens": len(train), "val_tokens": scored, "vocab_size": vocab_size,
                  "unigram_nats": entropy, "trigram_nats": loss, "ratio": ratio}
        say(f"{len(train):,} training tokens, {scored:,} validation tokens, vocabulary of {vocab_size:,}",
            f"unigram entropy of the validation tokens  {entropy:.4f} nats per token",
            f"Witten-Bell trigram model                 {loss:.4f} nats per token{share}",
            json.dumps(result))


if __name__ == "__main__":
    sys.exit(as_program(main))

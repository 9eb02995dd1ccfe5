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
import sys
from pathlib import Path

import numpy as np

from shard_files import (HEADER_BYTES, check, check_content, exit_on_error, print_result, read_header, run_main,
                         unreadable_folders)

def read_stream(pattern: str, count: int | None) -> tuple[np.ndarray, int]:
    """Read the first `count` tokens (None: all) of the shards that match a pattern.

    Returns tokens (n,) i64, with the shards in name order, and the vocabulary size. Raises DataError if there are no
    shards or too few tokens, if the vocabulary sizes of the shards differ, or if a token id is too large.
    """
    names = glob.glob(pattern) or glob.glob(pattern.replace("[", "[[]"))       # a name may contain brackets
    check(names, pattern, found="no file", expected="token shards",
          hint="give a file, or a pattern in quotes (see --help)")
    unreadable = unreadable_folders(pattern)
    check(not unreadable, pattern, found=f"unreadable folders: {[*map(str, unreadable)]}",
          expected="folders that can be read", hint="narrow the pattern, or fix the permissions")
    paths = [Path(name) for name in sorted(names)]
    headers = [read_header(path) for path in paths]
    sizes = sorted({vocab_size for _, vocab_size in headers})
    check(len(sizes) == 1, pattern, found=f"vocabulary sizes {sizes}", expected="one vocabulary size",
          hint="narrow the pattern")
    have = sum(tokens for tokens, _ in headers)
    wanted = have if count is None else count
    check(2 <= wanted <= have, pattern, found=f"{have:,} tokens, of which {wanted:,} are requested",
          expected="at least 2 requested tokens, and that many in the shards",
          hint=f"request 2 to {have:,} tokens, or add shards")
    parts = []
    for path in paths:
        if wanted > 0:
            check_content(path)
            parts.append(np.fromfile(path, "<u2", wanted, offset=HEADER_BYTES))
            wanted -= len(parts[-1])
    tokens = np.concatenate(parts).astype(np.int64)
    check(tokens.max() < sizes[0], pattern, found=f"token id {tokens.max()}", expected=f"ids below {sizes[0]}",
          hint="create the shards again")
    return tokens, sizes[0]

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
    # The key of an n-gram is its last token + vocab_size * the key of its history.
    train_key = train
    val_key = val
    for length in range(min(2, len(train) - 1, len(val) - 1) + 1):
        if length:
            oldest = vocab_size**length
            train_key = train_key[1:] + oldest * train[:-length]
            val_key = val_key[1:] + oldest * val[:-length]

        grams, gram_counts = np.unique(train_key, return_counts=True)
        histories, first, distinct = np.unique(grams // vocab_size, return_index=True, return_counts=True)
        totals = np.add.reduceat(gram_counts, first)          # count(h) of each history

        # The first token of val[1:] has only one token before it, and therefore no trigram history.
        p_known = p[max(length - 1, 0):]
        wanted = val_key[-len(p_known):]
        wanted_history = wanted // vocab_size
        count_hw = lookup(grams, gram_counts, wanted)
        count_h = lookup(histories, totals, wanted_history)
        distinct_h = lookup(histories, distinct, wanted_history)
        interpolated = (count_hw + distinct_h * p_known) / np.maximum(count_h + distinct_h, 1)
        p_known[:] = np.where(count_h > 0, interpolated, p_known)
    return p

@exit_on_error()
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
    check(vocab_size == val_vocab_size, args.val, found=f"vocabulary size {val_vocab_size}",
          expected=f"{vocab_size}, as in --train", hint="use shards of one data set")

    frequencies = np.unique(val[1:], return_counts=True)[1] / (len(val) - 1)
    entropy = float(-(frequencies * np.log(frequencies)).sum())  # the lowest loss of a model without context
    loss = float(-np.log(witten_bell(train, val, vocab_size)).mean())
    result = {"train_tokens": len(train), "val_tokens": len(val) - 1, "vocab_size": vocab_size,
              "unigram_nats": entropy, "trigram_nats": loss}
    print_result(f"{len(train):,} training tokens, {len(val) - 1:,} validation tokens, vocabulary of {vocab_size:,}",
        f"unigram entropy of the validation tokens  {entropy:.4f} nats per token",
        f"Witten-Bell trigram model                 {loss:.4f} nats per token",
        json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_main(main))

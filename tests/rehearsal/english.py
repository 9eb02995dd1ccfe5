"""Shards of tokens whose statistics are those of English text."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .counts import tg


def english_like(count: int, seed: int) -> np.ndarray:
    """Tokens whose documents and repetitions are like those of English text.

    Documents: lognormal, as measured on 40,000 pages. Tokens come in pairs from a stock of pairs and fresh: that
    gives as many distinct tokens and neighbours as text has, within 5 % from 16,384 to 98,304 tokens.
    """
    rng = np.random.default_rng(seed)
    by_rank = zipf(tg.GPT2_VOCAB - 1, 0.874, 4.1)
    by_pair = zipf(31_000, 1.15, 6.4)

    def drawn(cumulative: np.ndarray, size: Any) -> np.ndarray:
        return np.searchsorted(cumulative, rng.random(size)).clip(0, len(cumulative) - 1)

    stock = drawn(by_rank, (len(by_pair), 2))
    tokens = stock[drawn(by_pair, count // 2)]
    fresh = rng.random(count // 2) < 0.156
    tokens[fresh] = drawn(by_rank, (int(fresh.sum()), 2))
    tokens = tokens.ravel()

    lengths = document_lengths(rng, count // 50)
    starts = np.cumsum(lengths) - lengths[0]
    tokens[starts[starts < len(tokens)]] = tg.GPT2_DOCUMENT_START
    return tokens.astype("<u2")


def document_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(rng.normal(6.15, 0.88, count)).astype(np.int64) + 2


def kept_share(max_doc_len: int) -> float:
    """Of such tokens, those that are left where documents are cut to this length."""
    lengths = document_lengths(np.random.default_rng(0), 10_000)
    return np.minimum(lengths, max_doc_len).sum() / lengths.sum()


def zipf(count: int, exponent: float, shift: float) -> np.ndarray:
    """Cumulative shares of ranks, each proportional to (rank + shift)^-exponent."""
    shares = (np.arange(1, count + 1) + shift) ** -exponent
    return np.cumsum(shares / shares.sum())


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())

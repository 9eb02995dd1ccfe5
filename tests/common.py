"""What several room tests share: small configurations, shards on disk, batches, weights that leave no term at zero."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as tg

ROOT = Path(__file__).resolve().parent.parent
# label, shape in the record preset, optimizer, multipliers of rate and decay, betas (recipe 2.1, 3.5; MLP unpadded)
RECIPE_PARAMETERS = [
    ("attn", (10, 3072, 768), "normuon", None, None, None),
    ("mlp", (11, 2, 3072, 768), "normuon", None, None, None),
    ("scalars", (47,), "adam", 5, 0, (0.9, 0.99)),
    ("smear_gate", (1, 12), "adam", 0.01, 0, (0.9, 0.99)),
    ("skip_gate", (1, 12), "adam", 0.05, 0, (0.9, 0.99)),
    ("attn_gate_bank", (10, 6, 12), "adam", 1, 1, (0.9, 0.99)),
    ("ve_gate_bank", (5, 6, 12), "adam", 1, 1, (0.9, 0.99)),
    ("x0_lambdas", (11,), "adam", 5, 0, (0.65, 0.95)),
    ("bigram_embed", (251_520, 768), "adam", 75, 5, (0.75, 0.95)),
    ("value_embed", (251_520, 768), "adam", 75, 5, (0.75, 0.95)),
    ("lm_head", (768, 50_304), "adam", 1, 150, (0.5, 0.95)),
    ("embed", (50_304, 768), "adam", 1, 150, (0.5, 0.95)),
]


def fabric(rank: int = 0, world: int = 1) -> tg.Fabric:
    """A rank of a world without a process group: enough for all that communicates nothing."""
    return tg.Fabric(torch.device("cpu"), rank, world)


def preset(name: str = "tiny", vocab_size: int = 512, document_start: int = 511, **changes) -> tg.Config:
    """A checked preset with the sizes filled in that a shard's header would decide."""
    cfg = tg.Config(**tg.PRESETS[name] | changes)
    tg.check_config(cfg)
    header = [tg.ShardHeader("shard", 1, vocab_size, document_start)]
    return tg.resolve(cfg, header, header)


def small(**changes) -> tg.Config:
    """float64, 4 heads of 8 (two heads in a paired sequence), 64 tokens of vocabulary, slots of 16 tokens or more."""
    fields = dict(num_heads=4, head_dim=8, model_dim=32, dtype="float64", window_block=3, max_doc_len=12)
    return preset(vocab_size=60, document_start=59, **fields | changes)


def write_shard(path: Path, tokens, vocab_size: int = 0, document_start: int = 0, magic: int = 20240520,
                version: int = 1, count: int | None = None) -> Path:
    """A shard as the format says; words 3 and 4 stay 0 unless given, as in files that mean GPT-2."""
    header = np.zeros(256, "<i4")
    header[:5] = magic, version, len(tokens) if count is None else count, vocab_size, document_start
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def random_stream(seed: int, count: int, vocab_size: int, document_start: int, mean: int = 6) -> np.ndarray:
    """Tokens in random documents, the first at 0; some documents are a single token."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, count)
    tokens[tokens == document_start] = (document_start + 1) % vocab_size
    tokens[(rng.random(count) < 1 / mean) | (np.arange(count) == 0)] = document_start
    return tokens


def random_batch(cfg: tg.Config, seed: int, slots: int, length: int, step: int = 0) -> tg.Batch:
    """Slots of random tokens in documents of at most max_doc_len, and random rows of the bigram table."""
    rng, bounds = np.random.default_rng(seed), []
    for _ in range(slots):
        ends = [0]
        while ends[-1] < length:
            ends.append(min(length, ends[-1] + int(rng.integers(1, cfg.max_doc_len + 1))))
        bounds.append(ends)
    columns = max(map(len, bounds))
    tokens = torch.from_numpy(rng.integers(0, cfg.vocab_size, (slots, length + 1)))
    rows = torch.from_numpy(rng.integers(0, cfg.bigram_rows, (slots, length)))
    padded = torch.tensor([ends + [length] * (columns - len(ends)) for ends in bounds])
    return tg.Batch(step, tokens[:, :-1].int(), tokens[:, 1:].contiguous(), rows.int(), padded.int())


@torch.no_grad()
def fill_randomly(model: tg.GPT, seed: int = 0) -> None:
    """Weights under which every term of the forward pass counts: gates open, no table at zero, no two scalars alike."""
    generator = torch.Generator().manual_seed(seed)
    for label, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        spread = dict(attn=0.3, mlp=0.15, scalars=0.3, bigram_embed=0.3, value_embed=0.5, lm_head=0.5).get(label, 0.7)
        p.copy_(noise * spread + (0.6 if label == "scalars" else 0.0))


def executor(cfg: tg.Config, world: int = 1, rank: int = 0, precision: str = "plain") -> tg.Executor:
    return tg.Executor(cfg, fabric(rank, world), tg.attention_reference, precision)


def check_error(error: tg.TrainerError, *parts: str) -> None:
    """The message says what was found, what was expected, what to do, in this order, and holds all the parts."""
    first, *lines = str(error).split("\n")
    assert first and [line.split(":")[0] for line in lines[:3]] == ["  found", "  expected", "  do"], str(error)
    assert all(line.partition(":")[2].strip() for line in lines[:3]), f"an empty part in: {error}"
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def refused(kind: type, call, *parts: str) -> str:
    """Call, expect an error of exactly this kind with these parts, and return its message."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    check_error(caught.value, *parts)
    return str(caught.value)

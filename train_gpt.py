"""Train a small GPT against the clock: recipe A of the NanoGPT speedrun in one file.

    ./run.sh                                                   set-up, data, training, result and a sample
    torchrun --standalone --nproc_per_node=8 train_gpt.py      8 GPUs, preset `record`
    python train_gpt.py --preset=pocket                        one process, on a CPU about two minutes; see --help
The mathematics is that of modded-nanogpt right after pull request #221 (record 71, 2026-02-15); credits in README.md.

Floor plan. A room uses only rooms above it, and nothing happens at import.
    1 Config      errors, layer table, stage table, table of n-gram tables, settings, presets, flags, Fabric
    2 Schedule    pure functions of the step: everything a step needs, in one `Values`
    3 Data        shards, packing, bigram hash, the loader thread, validation batches
    4 Kernels     references in PyTorch: norm, rotation, attention, MLP, head loss, symmetric products; main_grad
    5 Model       parameter table and GPT
    6 Rows        the exchange of embedding rows between ranks
    7 Optimizer   NorMuon, Adam, tie and split, orders of communication
    8 Executor    forward_backward, optim_step, evaluate, snapshot and restore, files
    9 Race        warm-up, time budget, profile, clock, log, validation, sample
   10 Main        flags, process group, device, run
Letters                                                        [value in the record preset]
    W ranks                       L layers [11]                V vocabulary, padded [50,304]
    S slots in a step [8]         D model width [768]          R rows of a table [251,520]
    B slots in a micro-batch      H heads [6]                  E width of one head [128]
    T tokens in one slot          F MLP width [3,072]          G tokens predicted per position [3, 2, 1 by stage]
    M matrices in a bank          N rows of a product, B * T   C rows of an owner's slice of a table
A slot is one of S equal, independent shares of a step's tokens and the unit of data parallelism: slot s belongs to rank
s mod W. A cycle is two steps, an even and an odd one; Adam updates on the odd one. Tables of n-grams may have a cycle
of four; the update of such a table is an event. A bank is several matrices in one parameter. The objective of a step is
J = (1/S) * sum over slots of the slot's summed loss, at every W."""
from __future__ import annotations

import os
import signal


def end_quietly(*_: object) -> None:
    """Ctrl-C during the imports, which take seconds: there is nothing yet to tell or to close."""
    os._exit(130)


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")      # waiting threads that spin: 10 times slower beside busy cores
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)        # until `main` begins

import argparse
import base64
import bisect
import contextlib
import ctypes
import difflib
import errno
import functools
import gc
import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import mmap
import operator
import platform
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from dataclasses import Field, asdict, astuple, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"packages\n  found:    {error}\n  expected: torch and numpy, as in requirements.txt\n"
             "  do:       use ./run.sh, which installs what is missing and takes the same flags")

# ====== Room 1: Config ================================================================================================
class TrainerError(Exception):
    """What was found, what was expected, and what to do about it."""

    def __init__(self, what: str, found: object, expected: object, do: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  do:       {do}")
        self.what = what
        self.found = found
        self.expected = expected
        self.do = do


class ConfigError(TrainerError):
    """A setting that cannot work."""


class DataError(TrainerError):
    """Shards that are missing, damaged or too few."""


class FabricError(TrainerError):
    """Ranks or devices that do not fit the run."""


class RunError(TrainerError):
    """Something that went wrong in a run: loss, memory, disk, a stuck thread."""


KINDS_OF_FILE = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device"}


def reason_of(error: OSError | ValueError) -> str:
    """Why the system or Python would not do something with a file, in words."""
    return getattr(error, "strerror", None) or str(error)


def regular_file(path: Path, what: str) -> Path:
    """The path, if a regular file is there; what: its role in the message. Raises DataError.

    For every file whose name somebody else chose, before it is opened: opening a named pipe waits for a writer.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path
        found = KINDS_OF_FILE.get(stat.S_IFMT(mode), "something else")
    except (OSError, ValueError) as error:                                    # ValueError: a null byte in the name
        found = reason_of(error)
        if path.is_symlink():
            found = f"a link to {os.readlink(path)}: {found}"
    raise DataError(f"{path} as {what}", found, "a regular file", "name another file, or write this one again")


MOST_TEXT = 1 << 26                      # bytes of a configuration, manifest or vocabulary: that of GPT-2 takes 1 MB
MOST_LOG = 1 << 32                       # bytes of a log.jsonl: 10^7 steps take 1.3 GB


def read_bounded(path: Path, what: str, most: int = MOST_TEXT) -> bytes:
    """Content of a file whose name somebody else chose; what: its role in the message. Raises DataError."""
    try:
        size = regular_file(path, what).stat().st_size
        if size <= most:
            return path.read_bytes()
        found = f"{size} bytes"
    except OSError as error:
        found = reason_of(error)
    raise DataError(f"{path} as {what}", found, f"a file that can be read, of at most {most} bytes",
                    "name another file, or write this one again")


@dataclass(frozen=True)
class Layer:
    """One layer of the model. Moving a feature to another layer is moving a word."""

    attention: str               # "plain", "paired" (heads j and j + H/2 share one sequence of 2T positions) or "none"
    window: str = "short"        # attention reach: "short" or "long"
    value: int | None = None     # value table added to the attention values
    key_shift: bool = False      # the unrotated half of the keys comes from the token before (key offset)
    keep_as: str = ""            # name under which the layer's output is kept
    add: str = ""                # kept stream added, gated, in front of the layer


SKIP, BACKOUT = "skip", "backout"
LAYERS = (                                                                    # depth (recipe 2.2)
    Layer("paired", "short"),                                                 #  0
    Layer("plain", "short", value=0),                                         #  1
    Layer("paired", "short", value=1),                                        #  2
    Layer("plain", "long", key_shift=True, keep_as=SKIP),                     #  3
    Layer("plain", "short"),                                                  #  4
    Layer("paired", "short"),                                                 #  5
    Layer("none", add=SKIP),                                                  #  6: MLP only
    Layer("plain", "short", keep_as=BACKOUT),                                 #  7: subtracted again before the head
    Layer("plain", "short", value=2),                                         #  8
    Layer("paired", "short", value=3),                                        #  9
    Layer("plain", "long", value=4, key_shift=True))                          # 10
ATTENTION_LAYERS = tuple(depth for depth, layer in enumerate(LAYERS) if layer.attention != "none")
NUM_VALUE_TABLES = sum(layer.value is not None for layer in LAYERS)


def check_layers(layers: Sequence[Layer]) -> None:
    """Raise ConfigError for a layer table that cannot work. A kept stream that nothing takes is no mistake."""
    kept: list[str] = []                 # by the layers above
    for depth, layer in enumerate(layers):
        place = f"LAYERS, layer {depth}"
        check_layer(layer, place)
        if layer.add and layer.add not in kept:
            raise ConfigError(place, f"add={layer.add!r}", f"a stream that a layer above keeps: {kept}",
                              f"keep_as={layer.add!r} in a layer above it")
        if layer.keep_as in kept:
            raise ConfigError(place, f"keep_as={layer.keep_as!r}", "a name that no layer above keeps",
                              "keep each stream once, or give this one another name")
        if layer.keep_as:
            kept.append(layer.keep_as)

    if BACKOUT not in kept:
        raise ConfigError("LAYERS", f"streams kept: {kept}", f"one layer with keep_as={BACKOUT!r}, which is "
                          "subtracted in front of the head", f"keep_as={BACKOUT!r} in one layer")
    if all(layer.attention == "none" for layer in layers):
        raise ConfigError("LAYERS", "no layer with attention", "one or more", "attention 'plain' in a layer")
    values = [layer.value for layer in layers if layer.value is not None]
    missing = [table for table in range(len(values)) if table not in values]
    if missing:
        raise ConfigError("LAYERS", f"value tables {values}", f"each of 0 to {len(values) - 1} once",
                          f"number the layers that have one through; missing: {missing}")


def check_layer(layer: Layer, place: str) -> None:
    """Words that exist, and features only where they have an effect. Raises ConfigError."""
    kinds = ("plain", "paired", "none")
    if layer.attention not in kinds:
        raise ConfigError(place, f"attention {layer.attention!r}", f"one of {kinds}", nearest(layer.attention, kinds))
    windows = ("short", "long")
    if layer.window not in windows:
        raise ConfigError(place, f"window {layer.window!r}", f"one of {windows}", nearest(layer.window, windows))
    if layer.attention == "none" and layer.value is not None:
        raise ConfigError(place, f"value={layer.value} without attention", "a layer with attention, to whose values "
                          "the table is added", "move the value table to another layer")
    if layer.key_shift and layer.attention != "plain":
        raise ConfigError(place, f"key_shift with attention {layer.attention!r}", "key_shift in plain layers only",
                          "move key_shift to a plain layer")


@dataclass(frozen=True)
class Stage:
    """One stage of the run. Windows are in blocks; weights of the predicted tokens move linearly over the stage."""

    batch_tokens: int
    short_window: int
    long_window: int
    lr_mul: float
    mtp_start: tuple[float, ...]
    mtp_end: tuple[float, ...]


STAGES = (                                                                    # recipe 4; the last is the extension
    Stage(131_072, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262_144, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393_216, 5, 11, 1.73, (1.0,), (1.0,)),
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)))


@dataclass(frozen=True)
class Ngrams:
    """One table of hashed n-grams. Adding a table is adding a line to NGRAM_TABLES.

    Columns that are None have the value of the flag --table_<column>, alike for all tables.
    """

    label: str
    hash: tuple[int, ...]                # an odd factor for each token of the n-gram, newest first
    rows: int | str                      # R, or the setting that has it; 0: there is no such table
    sign_hash: tuple[int, ...] = ()      # of the vector of signs that a row is multiplied by
    enters: int | None = None            # a layer, whose attention values get its rows; None: the residual stream
    signs: int | None = None             # 1: with signs
    home: str | None = None              # where owners keep rows: "device" or "host"
    rule: str | None = None              # "rowwise": an event moves the rows that were asked for; "adam": all rows
    cadence: int | None = None           # steps between events
    rounding: str | None = None          # of bf16 rows: "nearest" or "stochastic"
    lr_mul: float | None = None          # of Adam's learning rate
    wd_mul: float | None = None          # of Adam's weight decay
    beta2: float | None = None           # decay of the second moment in an event


# Factors of record 92 for two and three tokens (its train_gpt.py), those of a fourth are ours; recipe A's own table of
# bigrams is none of these.
NGRAM_TABLES = (
    Ngrams("more_bigram_embed", (36313, 27191), rows="more_bigram_rows", sign_hash=(48271, 30011)),
    Ngrams("trigram_embed", (17351, 60961, 45259), rows="trigram_rows", sign_hash=(58699, 39779, 26801)),
    Ngrams("fourgram_embed", (50411, 22787, 64951, 38327), rows="fourgram_rows",
           sign_hash=(43399, 56783, 20297, 61403)))


def knob(group: str, default: Any, unit: str, about: str, choices: tuple = ()) -> Any:
    metadata = dict(group=group, unit=unit, about=about, choices=choices)
    return field(default=default, metadata=metadata)


_data = functools.partial(knob, "data")
_model = functools.partial(knob, "model")
_schedule = functools.partial(knob, "schedule")
_optim = functools.partial(knob, "optimizer")
_run = functools.partial(knob, "run")
_table = functools.partial(knob, "tables of n-grams")


ATTENTION_KERNELS = ("auto", "FA4", "FA3", "varlen", "reference")             # packages, torch's own, plain PyTorch


@dataclass(frozen=True)
class Config:
    """Everything a run may vary. One field is one flag; a preset overrides fields and nothing else."""

    train_files: str = _data("data/fineweb10B/fineweb_train_*.bin", "pattern", "training shards, taken in name order")
    val_files: str = _data("data/fineweb10B/fineweb_val_*.bin", "pattern", "validation shards")
    val_tokens: int = _data(10_485_760, "tokens", "validation tokens, a multiple of val_batch_tokens")
    val_batch_tokens: int = _data(2_097_152, "tokens", "one block of num_slots validation slots")
    max_doc_len: int = _data(2048, "tokens", "a document gives at most its first max_doc_len tokens")
    epochs: int = _data(1, "passes", "over the training shards; 0: cycle without end")
    num_slots: int = _data(8, "slots", "equal shares of a step; the ranks divide it; changing it changes the packing")
    vocab_size: int = _data(0, "tokens", "0: from the shard header")
    padded_vocab: int = _data(0, "tokens", "columns of the head; 0: the next multiple of 128")
    document_start: int = _data(-1, "id", "first token of every document; -1: from the shard header")
    bigram_rows: int = _data(0, "rows", "hash table of token pairs; 0: 5 x padded_vocab; the last row: no pair")
    model_dim: int = _model(768, "features", "width D = num_heads x head_dim")
    num_heads: int = _model(6, "heads", "an even number: paired layers join heads j and j + H/2")
    head_dim: int = _model(128, "features", "a multiple of 4, at least 8; half of it rotates")
    attn_scale: float = _model(0.1, "1", "softmax scale before YaRN; queries and keys are normalised")
    dtype: str = _model("bfloat16", "type", "weights and activations", ("bfloat16", "float32", "float64"))
    attention: str = _model("auto", "kernel", "auto: the fastest that is right", ATTENTION_KERNELS)
    head: str = _model("auto", "precision", "of training logits; auto: best", ("auto", "fp8", "emulated", "plain"))
    num_scheduled_steps: int = _schedule(1507, "steps", "split evenly over all stages but the last")
    num_extension_steps: int = _schedule(40, "steps", "last stage, at the lowest learning rate")
    stages: tuple = _schedule(STAGES, "table", "rows 'batch_tokens short long lr_mul mtp_start mtp_end' joined by ';'")
    window_block: int = _schedule(128, "tokens", "unit of the windows in the stage table")
    final_long_window: int = _schedule(20, "blocks", "long window of the final validation")
    split_stage: int = _schedule(2, "stage", "head and embedding part at its first odd step")
    cooldown_frac: float = _schedule(0.55, "share", "of the scheduled steps, at their end, with a falling rate")
    lr_floor: float = _schedule(0.1, "1", "learning rate factor at the end of the cooldown")
    val_every: int = _schedule(250, "steps", "between validations; 0: only the final one")
    normuon_lr: float = _optim(0.023, "1", "attention and MLP banks")
    normuon_beta2: float = _optim(0.95, "1", "decay of the second moment per row")
    normuon_weight_decay: float = _optim(1.2, "1", "cautious, times lr^2")
    momentum_min: float = _optim(0.85, "1", "NorMuon momentum at both ends")
    momentum_max: float = _optim(0.95, "1", "NorMuon momentum in between")
    momentum_warmup_steps: int = _optim(-1, "steps", "-1: 300 at 1,547 steps, in proportion else")
    momentum_cooldown_steps: int = _optim(-1, "steps", "-1: 50 at 1,547 steps, in proportion else")
    adam_lr: float = _optim(0.008, "1", "everything else; multipliers stand in the parameter table")
    adam_weight_decay: float = _optim(0.005, "1", "cautious, times (lr x multiplier)^2")
    adam_eps: float = _optim(1e-10, "1", "added to the uncorrected root of the second moment")
    more_bigram_rows: int = _table(0, "rows", "second table of token pairs, beside recipe A's; 0: none")
    trigram_rows: int = _table(0, "rows", "table of token triples; 0: none")
    fourgram_rows: int = _table(0, "rows", "table of four tokens in a row; 0: none")
    table_rule: str = _table("rowwise", "rule", "what an update moves: rows asked for, or all", ("rowwise", "adam"))
    table_home: str = _table("device", "place", "where owners keep rowwise tables", ("device", "host"))
    table_cadence: int = _table(2, "steps", "between updates of rowwise tables", (2, 4))
    table_signs: int = _table(0, "0|1", "multiply rows by hashed vectors of +-1, which tell collisions apart", (0, 1))
    table_rounding: str = _table("nearest", "way", "of bf16 rows behind an update", ("nearest", "stochastic"))
    table_lr_mul: float = _table(37.5, "1", "of adam_lr")
    table_wd_mul: float = _table(5.0, "1", "of adam_weight_decay")
    table_beta2: float = _table(0.95, "1", "decay of the second moment in an update")
    seed: int = _run(0, "integer", "initial values; each parameter draws from (seed, label)")
    device: str = _run("auto", "device", "auto: cuda if there is one", ("auto", "cpu", "cuda"))
    compile: int = _run(-1, "0|1", "torch.compile; -1: on CUDA only", (-1, 0, 1))
    row_comms: str = _run("sparse", "mode", "how table rows travel to ranks", ("dense", "sparse_scatter", "sparse"))
    debug_rows: int = _run(0, "0|1", "poison rows not fetched, look for gradients of rows not planned", (0, 1))
    slots_per_micro_batch: int = _run(0, "slots", "side by side in the model; 0: all that the device's memory fits")
    max_steps: int = _run(0, "steps", "stop early, then validate; 0: the whole schedule")
    time_budget: float = _run(0.0, "s", "of training to fill on this machine: scales the schedule; 0: steps as set")
    runs: int = _run(1, "runs", "in one process after one warm-up, with seeds seed, seed + 1, ...")
    target_loss: float = _run(3.28, "nats", "against which several runs are tested; 0: none")
    run_dir: str = _run("", "folder", "of the logs; empty: logs/<run id>")
    checkpoint_every: int = _run(0, "steps", "between checkpoints, at even steps; the last two are kept; 0: none")
    resume: str = _run("", "folder", "run directory whose last checkpoint is gone on from, with its flags")
    profile: str = _run("", "a:b", "trace steps a to b - 1 on every rank; the time of such a run does not count")
    comm_timeout: float = _run(60.0, "s", "longest wait for another rank or for the loader thread")
    sample_tokens: int = _run(96, "tokens", "generated after the run, or by --sample; 0: none")
    save: str = _run("", "folder", "for the final weights, their config and the bytes of the tokens; empty: none")
    sample: str = _run("", "folder", "generate from the weights that --save left there instead of training")
    prompt: str = _run("", "text", "what a sample goes on from")
    ranks: str = _run("", "file", "GPT-2 ranks in tiktoken's text format, plain or .gz: samples without network")


RECORD = dict(device="cuda")
POCKET = dict(
    train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin",
    val_tokens=65_536, val_batch_tokens=8_192, max_doc_len=256,
    model_dim=96, head_dim=16, attn_scale=12.8 / 16, dtype="float32", head="plain", compile=0,
    stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 256) for stage in STAGES),
    window_block=8, num_scheduled_steps=520, num_extension_steps=20, val_every=180, target_loss=0.0)
PRESETS: dict[str, dict[str, Any]] = dict(
    record=RECORD,
    record_tables=RECORD | dict(
        more_bigram_rows=21_000_000, trigram_rows=21_000_000, table_signs=1, table_lr_mul=70.0),
    pocket=POCKET,
    pocket_tables=POCKET | dict(trigram_rows=100_000, fourgram_rows=100_000),
    tiny=dict(
        train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1",
        val_tokens=1024, val_batch_tokens=512, max_doc_len=24,
        model_dim=32, num_heads=2, head_dim=16, attn_scale=12.8 / 16, dtype="float32", head="plain", compile=0,
        stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 1024) for stage in STAGES),
        window_block=4, num_scheduled_steps=9, num_extension_steps=3, val_every=5, target_loss=0.0,
        sample_tokens=8))
RECORD_STEPS, RECORD_RAMP_UP, RECORD_RAMP_DOWN = 1547, 300, 50                # recipe 4
GPT2_VOCAB, GPT2_DOCUMENT_START = 50_257, 50_256
MAX_VOCAB = 65_535                       # token ids are stored as u16
GATE_INPUTS = 12                         # features that a gate reads
FP8_UNIT = 16                            # sizes in an fp8 product are multiples of it
SLOT_UNIT = FP8_UNIT                     # tokens: a slot is a multiple of it, on every device
CYCLE = 2                                # steps of one Adam update, whose gradients add up
LEAST_NGRAM_ROWS = 2                     # one for n-grams, one for places that have none
MAX_STEPS = 10**7
MAX_STAGE_FACTOR = 1000                  # of a stage's learning rate, and of a predicted token's weight

# Smallest and largest values of numbers; others go from 0 to below 2^31.
LEAST = dict(
    num_slots=1, max_doc_len=2, window_block=1, final_long_window=1, comm_timeout=1, document_start=-1, compile=-1,
    momentum_warmup_steps=-1, momentum_cooldown_steps=-1, runs=1)
MOST = dict(
    num_scheduled_steps=MAX_STEPS, num_extension_steps=MAX_STEPS, runs=10**4, time_budget=30 * 24 * 3600,
    num_slots=1 << 16, model_dim=1 << 16, num_heads=1 << 12, head_dim=1 << 14,
    vocab_size=MAX_VOCAB, document_start=MAX_VOCAB - 1, cooldown_frac=1, normuon_beta2=1, momentum_max=1, table_beta2=1)

NOT_MATHEMATICS = {
    "device", "compile", "slots_per_micro_batch", "seed", "run_dir", "comm_timeout", "sample_tokens", "save", "sample",
    "prompt", "ranks", "val_every", "max_steps", "train_files", "val_files", "epochs", "row_comms", "debug_rows",
    "runs", "target_loss", "checkpoint_every", "resume", "profile", "attention", "table_home"}
NOT_INHERITED = {"run_dir", "runs", "resume", "save", "sample", "prompt", "ranks"}    # by --resume: facts of one run
MAY_CHANGE = NOT_MATHEMATICS - {"seed"}                                               # on --resume
PATH_UNITS = {"folder", "file", "pattern"}                                            # ~ is expanded in these
MEND_SETTINGS = "take the file of another run, or make it again with this trainer"


def parse_stage(row: str) -> Stage:
    """'batch_tokens short long lr_mul mtp_start mtp_end' -> Stage. Raises ValueError."""
    batch_tokens, short_window, long_window, lr_mul, mtp_start, mtp_end = row.split()
    return Stage(
        int(batch_tokens), int(short_window), int(long_window), float(lr_mul),
        parse_weights(mtp_start), parse_weights(mtp_end))


def parse_weights(text: str) -> tuple[float, ...]:
    return tuple(float(weight) for weight in text.split(","))


def stage_text(stage: Stage) -> str:
    """A stage as it is written in a row of --stages."""
    words = []
    for value in astuple(stage):
        numbers = value if isinstance(value, tuple) else (value,)
        words.append(",".join(str(number) for number in numbers))
    return " ".join(words)


def flag_text(value: Any) -> str:
    """A field's value as it is written behind its flag."""
    if not isinstance(value, tuple):
        return str(value)
    return ";".join(stage_text(stage) for stage in value)


def shown(value: object) -> str:
    """A value that somebody gave, as Python writes it; of a long one, its beginning."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    if len(text) <= 300:
        return text
    return f"{text[:60]}... ({len(text)} characters)"


def nearest(name: str, known: Iterable) -> str:
    names = [str(other) for other in known]
    close = difflib.get_close_matches(name, names, 3, 0.4)
    return "nearest: " + (", ".join(close) or "--help")


def parse_value(knob_field: Field, text: str) -> Any:
    """Text of a flag -> value of its field. Raises ConfigError."""
    name = knob_field.name
    kind = type(knob_field.default)
    unit = knob_field.metadata["unit"]
    choices = knob_field.metadata["choices"]
    try:
        if kind is tuple:
            value = tuple(parse_stage(row) for row in text.split(";"))
        else:
            value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--{name}", shown(text), f"{kind.__name__}, {unit}: {knob_field.metadata['about']}",
            f"for example --{name}={flag_text(knob_field.default)}") from None

    if choices and value not in choices:
        expected = f"one of {list(choices)}"
        raise ConfigError(f"--{name}", shown(text), expected, nearest(text, choices))
    if unit in PATH_UNITS:
        value = os.path.expanduser(value)
        if value.startswith("~"):
            raise ConfigError(f"--{name}", shown(text), "~ or ~USER of this machine in front",
                              "name an existing user, or write ./~ for a name that begins so")
    return value


def number_text(value: Any) -> str:
    if type(value) not in (int, float):                                       # a bool is an int to isinstance
        raise ValueError(f"{type(value).__name__} instead of a number")
    return str(value)


def stage_from_json(row: Any) -> str:
    """A stage as `asdict` and JSON wrote it -> text of its row. Raises ValueError."""
    names = list(Stage.__dataclass_fields__)
    if not isinstance(row, dict) or set(row) != set(names):
        raise ValueError(f"a stage that is not {', '.join(names)}")
    words = []
    for name in names:
        numbers = row[name] if isinstance(row[name], list) else [row[name]]
        words.append(",".join(number_text(number) for number in numbers))
    return " ".join(words)


def text_from_json(knob_field: Field, value: Any) -> str:
    """A value that a JSON file gives for a field -> text of its flag. Raises ValueError if it is of another type."""
    kind = type(knob_field.default)
    if isinstance(value, str):
        return value
    if kind in (int, float):
        return number_text(value)
    if kind is tuple and isinstance(value, list):
        return ";".join(stage_from_json(row) for row in value)
    raise ValueError(f"{type(value).__name__} instead of {kind.__name__}")


def values_from_json(settings: Any, source: str) -> dict[str, Any]:
    """{field: value} of an untrusted file -> the same, parsed as flags are. Raises DataError.

    source: the file's name, for messages.
    """
    knobs = Config.__dataclass_fields__
    if not isinstance(settings, dict):
        raise DataError(source, type(settings).__name__, "an object {field: value}", MEND_SETTINGS)

    values = {}
    for name, value in settings.items():
        if name not in knobs:
            raise DataError(f"{source}: {shown(name)}", "unknown", "a setting of this trainer", MEND_SETTINGS)
        knob_field = knobs[name]
        try:
            values[name] = parse_value(knob_field, text_from_json(knob_field, value))
        except ConfigError as error:                                          # the text does not parse
            raise DataError(f"{source}: {name}", error.found, error.expected, MEND_SETTINGS) from None
        except ValueError as error:                                           # there is no text
            expected = f"{knob_field.metadata['unit']}: {knob_field.metadata['about']}"
            raise DataError(f"{source}: {name}", error, expected, MEND_SETTINGS) from None
    return values


def config_from_json(settings: Any, source: str) -> Config:
    """An untrusted config.json, parsed -> Config, by way of the flags' parser and checks.

    source: the file's name, for messages. Raises DataError.
    """
    cfg = Config(**values_from_json(settings, source))
    try:
        check_config(cfg)
    except ConfigError as error:
        raise DataError(f"{source}: {error.what}", error.found, error.expected, MEND_SETTINGS) from None
    return cfg


def earlier_run(folder: Path) -> tuple[str, dict[str, Any]]:
    """Preset and flags of the run that logged to this folder, but those of it alone. Raises DataError."""
    log = folder / "log.jsonl"
    content = read_bounded(log, "the log of the run to resume", MOST_LOG)
    expected = "a run directory, whose log.jsonl begins with a header: preset and changed flags"
    do = "name the folder that holds log.jsonl and checkpoints"

    starts = ('{"type": "header"', '{"type": "resumed"')
    try:
        lines = content.decode().splitlines()
        headers = [line for line in lines if line.startswith(starts)]
        if not headers:
            raise DataError(f"--resume={folder}", "log.jsonl without a header", expected, do)
        header = json.loads(headers[-1])
        preset = header["preset"]
        changed = {name: text for name, text in header["changed"].items()
                   if name not in NOT_INHERITED}
        if "slots_at_once" in header:                                         # also where the machine had chosen them
            changed["slots_per_micro_batch"] = header["slots_at_once"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        found = f"log.jsonl: {type(error).__name__}: {error}"
        raise DataError(f"--resume={folder}", found, expected, do) from None

    if preset not in list(PRESETS):                                           # a list: what was read may have no hash
        raise DataError(f"{log}: preset", shown(preset), list(PRESETS), "resume with the trainer of that run")
    return preset, values_from_json(changed, str(log))


def flag_parser(preset: str) -> argparse.ArgumentParser:
    """One flag for each field; the help shows the preset's values as defaults."""
    parser = argparse.ArgumentParser(
        "train_gpt.py", usage="%(prog)s [--preset=NAME] [--field=value ...]",
        epilog="exit status: 0 done, 1 the run failed, 2 a bad setting or bad data, 129 hung up, "
               "130 interrupted, 143 ended",
        allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this, with the values of --preset")
    parser.add_argument("--preset", metavar="NAME", help=f"{', '.join(PRESETS)} [{preset}]")
    parser.add_argument("words", nargs="?", metavar="PROMPT", help="the same as --prompt=PROMPT")

    defaults = vars(Config(**PRESETS[preset]))
    groups: dict[str, Any] = {}
    for knob_field in fields(Config):
        meta = knob_field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        about = f"{meta['about']} [{flag_text(defaults[knob_field.name])}]"
        groups[meta["group"]].add_argument(f"--{knob_field.name}", metavar=meta["unit"], help=about)
    return parser


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Texts of the flags, None where one is not given. --help prints and exits. Raises ConfigError."""
    try:
        flags, unknown = flag_parser("record").parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("flags", error, "--field=value", "see --help") from None

    if flags.preset not in (None, *PRESETS):
        raise ConfigError(
            "unknown preset", shown(flags.preset), list(PRESETS), nearest(flags.preset, PRESETS))
    if flags.help:
        printed = Console().say(flag_parser(flags.preset or "record").format_help().rstrip())
        sys.exit(0 if printed else 1)                                         # argparse would not tell
    if unknown and flags.sample is not None and not unknown[0].startswith("-"):
        raise ConfigError("two prompts", shown([flags.words, *unknown]), "one", "write it in quotes")
    if unknown:
        known = [f"--{name}" for name in ("preset", *Config.__dataclass_fields__)]
        near = nearest(unknown[0].partition("=")[0], known)
        raise ConfigError(
            "unknown flag", shown(unknown[0]), "--field=value with a field that exists", near)
    return flags


def parse_flags(argv: Sequence[str]) -> tuple[str, Config]:
    """Flags -> (preset name, Config). Raises ConfigError, DataError; --help prints the fields by group and exits."""
    flags = read_flags(argv)
    given = {}
    for knob_field in fields(Config):
        text = getattr(flags, knob_field.name)
        if text is not None:
            given[knob_field.name] = parse_value(knob_field, text)
    for name in ("resume", "sample"):                                         # --resume=$FOLDER without a FOLDER
        need(given.get(name) != "", f"--{name}", "an empty name", "a folder",
             f"--{name}=FOLDER, or leave the flag out")

    if flags.words is not None:
        need("sample" in given, "a word without a flag", shown(flags.words), "--field=value",
             "a prompt needs --sample=DIR")
        given["prompt"] = flags.words

    preset = flags.preset or "record"
    if "sample" in given:
        need("resume" not in given, "--resume", given.get("resume"), "no --resume with --sample", "leave one out")
        check_sample_flags(given)
        cfg = Config(**given)
    elif "resume" in given:
        preset, earlier = earlier_run(Path(given["resume"]))
        check_resume_flags(flags.preset, given, preset, earlier)
        cfg = Config(**PRESETS[preset] | earlier | given)
    else:
        cfg = Config(**PRESETS[preset] | given)
    check_config(cfg)
    return preset, cfg


def check_sample_flags(given: dict[str, Any]) -> None:
    """Raise ConfigError for a flag that saved weights have decided."""
    expected = f"no flag of the model: {given['sample']}/config.json says what was trained"
    for name, value in given.items():
        need(name in NOT_MATHEMATICS, f"--{name} with --sample", flag_text(value), expected,
             f"leave --{name} out")


def check_resume_flags(
        preset: str | None, given: dict[str, Any], earlier_preset: str, earlier: dict[str, Any]) -> None:
    """Raise ConfigError where a flag contradicts the run that is resumed."""
    source = f"--resume={given['resume']}"
    if preset not in (None, earlier_preset):
        raise ConfigError(
            f"--preset with {source}", preset, f"{earlier_preset}, the preset of that run",
            "leave --preset out: a resumed run has the flags of the earlier one")

    before = vars(Config(**PRESETS[earlier_preset] | earlier))
    may_change = ", ".join(sorted(MAY_CHANGE - NOT_INHERITED))
    for name, value in given.items():
        need(name in MAY_CHANGE or value == before[name], f"--{name} with {source}", flag_text(value),
             f"{flag_text(before[name])}, as in that run", f"leave --{name} out; these may change: {may_change}")


def need(ok: bool, what: str, found: object, expected: str, do: str) -> None:
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(what, found, expected, do)


def check_config(cfg: Config) -> None:
    """Raise ConfigError for settings that cannot work, with the nearest ones that do."""
    check_layers(LAYERS)
    check_ranges(cfg)
    check_model_sizes(cfg)
    check_token_counts(cfg)
    check_stages(cfg)
    check_ngram_tables(cfg)

    need(cfg.momentum_min <= cfg.momentum_max, "--momentum_min", cfg.momentum_min,
         f"0 to {cfg.momentum_max}", f"--momentum_min={cfg.momentum_max}")
    if cfg.resume or cfg.save:
        need(cfg.runs == 1, "--runs", cfg.runs, "one run for --resume or --save", "--runs=1")
    if profile_range(cfg) is not None:
        need(cfg.checkpoint_every == 0, "--profile with --checkpoint_every",
             f"{cfg.profile} and {cfg.checkpoint_every}",
             "one of them: the time of a profiled run does not count", "add --checkpoint_every=0")


def ngram_tables(cfg: Config) -> tuple[Ngrams, ...]:
    """The tables of n-grams that this run has, every column filled in."""
    columns = ("signs", "home", "rule", "cadence", "rounding", "lr_mul", "wd_mul", "beta2")
    tables = []
    for line in NGRAM_TABLES:
        rows = getattr(cfg, line.rows) if isinstance(line.rows, str) else line.rows
        if rows == 0:
            continue
        filled_in = {name: getattr(cfg, f"table_{name}") for name in columns if getattr(line, name) is None}
        tables.append(replace(line, rows=rows, **filled_in))
    return tuple(tables)


def run_cycle(cfg: Config) -> int:
    """Steps of the run's cycle, the largest of all cadences: plans and checkpoints come at its multiples."""
    return max([CYCLE, *(table.cadence for table in ngram_tables(cfg))])


def rows_set_to(label: str, rows: int) -> str:
    """How the rows of a table are set: by a flag, or in its line; empty: the vocabulary decides."""
    if label == "bigram_embed":
        return f"--bigram_rows={rows}"
    for line in NGRAM_TABLES:
        if line.label == label:
            return f"--{line.rows}={rows}" if isinstance(line.rows, str) else f"rows={rows} in NGRAM_TABLES"
    return ""


def check_ngram_lines(cfg: Config) -> None:
    """Raise ConfigError for lines of the table of n-gram tables that make no table."""
    labels = [line.label for line in NGRAM_TABLES]
    for line in NGRAM_TABLES:
        place = f"NGRAM_TABLES, {line.label}"
        need(labels.count(line.label) == 1, place, "two lines with that label", "a label for each", "another label")
        need(re.fullmatch(r"\w+_embed", line.label, re.ASCII), place, f"label {line.label!r}",
             "letters, digits and _ with _embed at the end: it names files, and an attribute of the model",
             "another label")
        need(isinstance(line.rows, int) or hasattr(cfg, line.rows), place, f"rows={line.rows!r}",
             "a number, or the name of a setting", "a field of Config with that name")
        for name in ("signs", "home", "rule", "cadence", "rounding"):
            found = getattr(line, name)
            choices = Config.__dataclass_fields__[f"table_{name}"].metadata["choices"]
            need(found is None or found in choices, place, f"{name}={found!r}", f"one of {choices}",
                 f"another {name}, or None for that of --table_{name}")


def check_ngram_tables(cfg: Config) -> None:
    """Raise ConfigError for tables of n-grams that cannot work."""
    check_ngram_lines(cfg)
    for table in ngram_tables(cfg):
        place = f"NGRAM_TABLES, {table.label}"
        need(LEAST_NGRAM_ROWS <= table.rows < 2**31, f"rows of {table.label}", table.rows,
             f"0, or {LEAST_NGRAM_ROWS} and more, below 2^31: the last one means that there is no n-gram",
             rows_set_to(table.label, LEAST_NGRAM_ROWS))
        factors = (*table.hash, *table.sign_hash)
        usable = all(factor % 2 == 1 and 0 < factor < 2**31 for factor in factors)
        need(len(table.hash) >= 1 and usable, place, f"factors {table.hash} and {table.sign_hash}",
             "odd numbers below 2^31", "an even factor loses bits of the token: take another")
        need(not table.signs or len(table.sign_hash) == len(table.hash), place,
             f"signs with {len(table.sign_hash)} factors for their hash", f"one for each of {len(table.hash)} tokens",
             f"sign_hash=(...) with {len(table.hash)} factors, or signs=0")
        need(table.rule == "rowwise" or (table.home, table.cadence) == ("device", CYCLE), f"rule of {table.label}",
             f"adam with home {table.home} and cadence {table.cadence}", f"home device and cadence {CYCLE}, for Adam "
             "moves every row at every update", "--table_rule=rowwise, or the other two as they are by default")
        if table.enters is not None:
            at = table.enters
            need(at in ATTENTION_LAYERS, place, f"enters={at}", f"a layer with attention, one of {ATTENTION_LAYERS}",
                 "another layer, or None for the residual stream")


def check_ranges(cfg: Config) -> None:
    """Every number within its bounds."""
    for name, value in vars(cfg).items():
        if isinstance(value, (str, tuple)):
            continue
        least = LEAST.get(name, 0)
        if name in MOST:
            need(value <= MOST[name], f"--{name}", value, f"{least} to {MOST[name]}", f"--{name}={MOST[name]}")
        need(least <= value < 2**31, f"--{name}", value, f"{least} or more, below 2^31",
             f"--{name}={least}")


def check_model_sizes(cfg: Config) -> None:
    H = cfg.num_heads
    need(H >= 2 and H % 2 == 0, "--num_heads", H, "an even number, since paired layers join two heads",
         f"--num_heads={max(2, H - 1)} or --num_heads={max(2, H + 1)}")

    E = cfg.head_dim
    below = max(8, E // 4 * 4)
    above = max(8, (E + 3) // 4 * 4)
    need(E >= 8 and E % 4 == 0, "--head_dim", E, "a multiple of 4, at least 8",
         f"--head_dim={below} or --head_dim={above}")

    D = cfg.model_dim
    need(D >= GATE_INPUTS and D == H * E, "--model_dim", D,
         f"num_heads x head_dim = {H} x {E}, at least {GATE_INPUTS}", f"--model_dim={H * E}")


def check_token_counts(cfg: Config) -> None:
    """Batches are whole slots, a slot is whole units, and validation is whole batches."""
    block = SLOT_UNIT * cfg.num_slots
    sizes = [("stages", stage.batch_tokens, block) for stage in cfg.stages]
    sizes.append(("val_batch_tokens", cfg.val_batch_tokens, block))
    sizes.append(("val_tokens", cfg.val_tokens, cfg.val_batch_tokens))
    for name, tokens, unit in sizes:
        below = max(unit, tokens // unit * unit)
        above = max(unit, -(-tokens // unit) * unit)
        near = f"{below} or {above} tokens" if below < above else f"{below} tokens"
        need(tokens > 0 and tokens % unit == 0, f"--{name}", f"{tokens} tokens",
             f"a multiple of {unit} ({SLOT_UNIT} x num_slots, or a validation batch)", near)


def check_stages(cfg: Config) -> None:
    """The stage table, and the numbers of steps that it needs."""
    scheduled = len(cfg.stages) - 1
    need(scheduled >= 1, "--stages", f"{len(cfg.stages)} row",
         "at least two, the last for the extension", "see STAGES")
    for stage in cfg.stages:
        need(stage_can_work(stage), "--stages", shown(flag_text((stage,))),
             "below 2^31 tokens; 1 <= short < long window; equally many token weights >= 0 at the ends; "
             f"these and the rate's multiplier at most {MAX_STAGE_FACTOR}", "see STAGES")

    steps = cfg.num_scheduled_steps
    need(steps >= scheduled, "--num_scheduled_steps", steps,
         f"one step or more for each of {scheduled} stages", f"--num_scheduled_steps={scheduled}")
    total = steps + cfg.num_extension_steps
    need(total <= MAX_STEPS, "--num_scheduled_steps and --num_extension_steps",
         f"{total} steps together", f"at most {MAX_STEPS}", "take fewer")
    need(cfg.split_stage <= scheduled, "--split_stage", cfg.split_stage, f"0 to {scheduled}",
         f"--split_stage={scheduled}")


def stage_can_work(stage: Stage) -> bool:
    factors = [stage.lr_mul, *stage.mtp_start, *stage.mtp_end]
    if not all(0 <= factor <= MAX_STAGE_FACTOR for factor in factors):
        return False
    if len(stage.mtp_start) == 0 or len(stage.mtp_start) != len(stage.mtp_end):
        return False
    return stage.batch_tokens < 2**31 and 1 <= stage.short_window < stage.long_window < 2**31


def profile_range(cfg: Config) -> tuple[int, int] | None:
    """First step of --profile=a:b and the one behind its last; None without the flag. Raises ConfigError."""
    if not cfg.profile:
        return None
    steps = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", cfg.profile)
    if steps is None or int(steps[1]) >= int(steps[2]):
        raise ConfigError(
            "--profile", shown(cfg.profile), "a:b for steps a to b - 1, with a < b", "--profile=100:104")
    return int(steps[1]), int(steps[2])


class Console:
    """Standard output. Escapes what it cannot encode; says on stderr, once, that it takes no more lines."""

    def __init__(self) -> None:
        self.lost = ""                   # why the last line that was lost could not be printed; empty: all were

    def say(self, text: str) -> bool:
        """Print a line and return whether it arrived."""
        out = sys.stdout
        try:
            if out is None:
                raise OSError(errno.EBADF, "it is closed")
            encoding = out.encoding or "utf-8"
            printable = text.encode(encoding, "backslashreplace").decode(encoding)
            out.write(printable + "\n")                                       # one write, so that no line is half there
            out.flush()
            return True
        except (OSError, ValueError) as error:                                # full, gone, or closed
            reason = reason_of(error)

        if not self.lost:
            with contextlib.suppress(OSError, ValueError):
                print(f"standard output takes no lines: {reason}", file=sys.stderr, flush=True)
        self.lost = reason
        return False


@dataclass(frozen=True)
class Fabric:
    """The one object that knows ranks and devices. Passed on, never global."""

    device: torch.device
    rank: int = 0
    world: int = 1
    plan_group: Any = None               # of row plans, on the CPU: the loader thread's own, so that no order can clash
    processes: tuple[tuple[str, int], ...] = ()      # host and process id of every rank, once they have met
    console: Console = field(default_factory=Console, compare=False)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def set_timeout(self, seconds: float) -> None:
        """The longest wait of the group of all ranks, and of the group of plans."""
        if self.world == 1:
            return
        for group in (None, self.plan_group):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def host_tensor(self, x: np.ndarray | Tensor) -> Tensor:
        """The array as a tensor; beside a GPU it is pinned: torch uses a block again after its last copy."""
        tensor = torch.as_tensor(x)
        if self.on_cuda:
            tensor = tensor.pin_memory()
        return tensor

    def enter_thread(self) -> None:
        """CUDA's current device is a thread's own: without this, pinning memory would open GPU 0 from every rank."""
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def say(self, text: str) -> bool:
        """Print on rank 0. Returns whether it arrived; a console that is gone or full does not end the run."""
        if self.rank != 0:
            return True
        return self.console.say(text)

    def of_all(self, fact: Any) -> list:
        """This fact of every rank, rank by rank."""
        everyone: list = [fact] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, fact)
        return everyone

    def check_agreement(self, facts: dict[str, str]) -> None:
        """Raise FabricError on every rank if any rank was started with other facts."""
        everyone = self.of_all(facts)
        names = dict.fromkeys(itertools.chain(*everyone))                     # of any rank, each once, in order
        for rank, theirs in enumerate(everyone):
            for name in names:
                expected = everyone[0].get(name)
                found = theirs.get(name)
                if found != expected:
                    raise FabricError(
                        f"ranks disagree about {name}", f"{expected} on rank 0, {found} on rank {rank}",
                        "one value", "start every rank with the same flags, data and source")

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """A TrainerError that stops a rank inside is raised behind it on every rank, so that none waits for that one.

        Every rank comes here, and inside there is nothing that waits for another rank.
        """
        failure = None
        try:
            yield
        except TrainerError as error:
            failure = (type(error), error.what, str(error.found), str(error.expected), error.do)
        for rank, theirs in enumerate(self.of_all(failure)):
            if theirs is None:
                continue
            kind, what, found, expected, do = theirs
            if self.world > 1:
                what = f"{what}, on rank {rank}"
            raise kind(what, found, expected, do)

    def gone(self) -> list[str]:
        """Ranks of this host whose process has ended, in words for a message."""
        if not self.processes:
            return []
        here, _ = self.processes[self.rank]
        return [f"rank {rank} (process {pid} on this host)"
                for rank, (host, pid) in enumerate(self.processes) if host == here and has_ended(pid)]

    @property
    def ranks_here(self) -> int:
        """Ranks on this host, whose memory they share."""
        if not self.processes:
            return 1
        here, _ = self.processes[self.rank]
        return sum(host == here for host, _ in self.processes)

    def total_memory(self) -> float:
        """Bytes of the GPU, whoever uses them; a CPU's memory serves everybody, and what is free counts."""
        if self.on_cuda:
            return torch.cuda.mem_get_info(self.device)[1]
        return self.free_memory()

    def free_memory(self) -> float:
        """Bytes that are free for this process now; infinite where the system does not say."""
        if self.on_cuda:
            return torch.cuda.mem_get_info(self.device)[0]
        return self.free_host_memory()

    def free_host_memory(self) -> float:
        """Bytes that all ranks of this host may still take now; infinite where the system does not say."""
        free = math.inf
        with contextlib.suppress(OSError, TypeError):
            kibibytes = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]
            free = 1024 * int(kibibytes)
        return min(free, left_in_control_groups())


def left_in_control_groups(process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float:
    """Bytes that a container or batch system still grants this process; infinite where none limits it.

    MemAvailable is the whole machine's, whatever a container was given. A limit stands at the process's own control
    group (version 2) or at any above it.
    """
    with contextlib.suppress(OSError):
        own = re.search(r"^0::/(.*)$", Path(process).read_text(), re.MULTILINE)
        if own:
            group = Path(root) / own[1]
            return min(left_in_control_group(place) for place in (group, *group.parents) if place.is_relative_to(root))
    return math.inf


def left_in_control_group(group: Path) -> float:
    """Bytes between use and limit of one control group; infinite where it has no limit, or is none.

    Pages of files that the kernel may drop at once count as left, as they do in MemAvailable.
    """
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        droppable = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)[1]
    except (OSError, ValueError, TypeError):                                  # `max`: no limit
        return math.inf
    return max(0, limit - used + int(droppable))


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or a zombie: dead, and its parent has not looked yet."""
    try:
        os.kill(pid, 0)
        facts = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return True
    except OSError:                                                           # another user's; a system without /proc
        return False
    state = facts.rpartition(")")[2].split()[0]                               # behind the name, which may hold anything
    return state in "ZX"


# ====== Room 2: Schedule ==============================================================================================
class Rotary(NamedTuple):
    """Rotation of queries and keys in one stage."""

    frequencies: tuple[float, ...]       # E/4 angles per position; the other half of the head does not rotate
    attn_scale: float                    # softmax scale, grown by YaRN


@dataclass(frozen=True)
class Values:
    """Everything the schedule says for one step."""

    step: int
    stage: int
    slot_tokens: int
    max_doc_len: int
    val_slot_tokens: int
    short_window: int                    # tokens; a query sees that many keys before its own, and its own
    long_window: int
    mtp_weights: tuple[float, ...]       # of the 1st, 2nd, ... next token, not normalised
    rotary: Rotary
    lr_factor: float
    normuon_lr: float
    adam_lr: float
    momentum: float
    adam_step: bool                      # odd step: Adam consumes the gradients of the cycle
    tied: bool                           # this step's forward reads the head, transposed, for its embedding
    split: bool                          # after this step's update, head and embedding part
    validate: bool                       # validation comes before the training part of this step


ROTARY_BASE = 1024.0
YARN_ALPHA, YARN_BETA = 1.0, 32.0        # full turns inside the old window: below alpha stretched, above beta kept
YARN_SCALE_GROWTH = 0.2                  # of the softmax scale, times the logarithm of the windows' ratio


def base_frequencies(head_dim: int) -> tuple[float, ...]:
    """E/4 frequencies from 1 down to 1/1024 (half-truncated rotary, recipe 2.4)."""
    count = head_dim // 4
    return tuple(ROTARY_BASE ** (-i / (count - 1)) for i in range(count))


def yarn(rotary: Rotary, old: int, new: int) -> Rotary:
    """Stretch low frequencies as the long window grows from old to new tokens (arXiv 2309.00071; recipe 2.4)."""
    slowest = old / new                                                       # a low frequency: as many turns as before
    frequencies = []
    for frequency in rotary.frequencies:
        turns = old * frequency / (2 * math.pi)
        keep = min(max((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0.0), 1.0)
        factor = slowest + keep * (1 - slowest)
        frequencies.append(frequency * factor)
    growth = YARN_SCALE_GROWTH * math.log(new / old) + 1
    return Rotary(tuple(frequencies), rotary.attn_scale * growth)


class Fit(NamedTuple):
    """A new length for a run in progress, so that it ends with --time_budget."""

    step: int                            # done then, whole cycles; the cycle ahead is prepared and stays as it was
    ms: float                            # training time until then
    total_steps: int                     # of the whole run, from then on


class Leg(NamedTuple):
    """Steps that go evenly through the plan, up to the next leg or the end."""

    first: int                           # step
    total_steps: int                     # of a run that goes on like this
    pace: float                          # planned steps a step


class Schedule:
    """Pure functions of the step, recipe 4. `at(total_steps)` is the final validation, with the widest window.

    Each step has a place in the plan that the settings make. Without fits it is the step itself; behind a fit the rest
    of the plan is gone through faster or slower. Stages and rates go by the place, Adam and validation by the step.
    """

    def __init__(self, cfg: Config, fits: Sequence[Fit] = ()) -> None:
        self.cfg = cfg
        self.cycle = run_cycle(cfg)
        self.fits = tuple(fits)
        self.planned_steps = cfg.num_scheduled_steps + cfg.num_extension_steps
        self.legs = [Leg(0, self.planned_steps, 1)]
        for fit in self.fits:
            first = fit.step + self.cycle
            planned_left = self.planned_steps - self.place(first)
            steps_left = max(1, fit.total_steps - first)                      # 0: a fit may end the run there
            self.legs.append(Leg(first, fit.total_steps, planned_left / steps_left))

        self.total_steps = self.legs[-1].total_steps
        self.end_step = self.total_steps                                      # the first that is not trained
        if cfg.max_steps:
            self.end_step = min(cfg.max_steps, self.total_steps)

        scheduled = len(cfg.stages) - 1
        ends = [round(cfg.num_scheduled_steps * (k + 1) / scheduled) for k in range(scheduled)]
        self.planned_starts = (0, *ends)
        self.planned_ends = (*ends, self.planned_steps)
        self.stage_starts = tuple(self.first_step_at(place) for place in self.planned_starts)
        self.stage_ends = (*self.stage_starts[1:], self.total_steps)
        self.split_step = self.stage_starts[cfg.split_stage] | 1              # the odd step: Adam has just updated
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))

        self.rotary = [Rotary(base_frequencies(cfg.head_dim), cfg.attn_scale)]
        for old, new in zip(cfg.stages, cfg.stages[1:]):
            old_window = old.long_window * cfg.window_block
            new_window = new.long_window * cfg.window_block
            self.rotary.append(yarn(self.rotary[-1], old_window, new_window))

    def place(self, step: int) -> float:
        """How far a step is in the plan, in planned steps. Fits that come later change no bit of it."""
        leg = next(leg for leg in reversed(self.legs) if leg.first <= step)
        return self.planned_steps - (leg.total_steps - step) * leg.pace

    def first_step_at(self, place: float) -> int:
        """The first step at this place of the plan or behind it."""
        return bisect.bisect_left(range(self.total_steps), place, key=self.place)

    def steps_by_stage(self, start: int, end: int) -> list[int]:
        """How many of the steps from start to end - 1 are in each stage."""
        counts = []
        for stage_start, stage_end in zip(self.stage_starts, self.stage_ends):
            first = max(start, stage_start)
            last = min(end, stage_end)
            counts.append(max(0, last - first))
        return counts

    def stage_at(self, step: int) -> int:
        """The final validation belongs to the last stage."""
        step = min(step, self.total_steps - 1)
        return next(k for k, end in enumerate(self.stage_ends) if step < end)

    def lr_factor_at(self, step: int) -> float:
        """The stage's multiplier, then linear from the cooldown's start to the floor; no warm-up."""
        factor = self.cfg.stages[self.stage_at(step)].lr_mul
        place = self.place(step)
        if place < self.cooldown_start:
            return factor
        cooldown_steps = max(1, self.cfg.num_scheduled_steps - self.cooldown_start)
        done = min(1.0, (place - self.cooldown_start) / cooldown_steps)
        return factor * (1 - done) + self.cfg.lr_floor * done

    def momentum_at(self, step: int) -> float:
        """Up over the first steps of the plan, down over the last; the ramps grow with it unless set."""
        cfg = self.cfg
        up = cfg.momentum_warmup_steps
        if up < 0:
            up = round(RECORD_RAMP_UP * self.planned_steps / RECORD_STEPS)
        down = cfg.momentum_cooldown_steps
        if down < 0:
            down = round(RECORD_RAMP_DOWN * self.planned_steps / RECORD_STEPS)

        rise = cfg.momentum_max - cfg.momentum_min
        place = self.place(step)
        if place < up:
            return cfg.momentum_min + rise * place / up
        steps_down = place - self.planned_steps + down
        if steps_down > 0:
            return cfg.momentum_max - rise * steps_down / down
        return cfg.momentum_max

    def mtp_weights_at(self, step: int) -> tuple[float, ...]:
        """Weights of the next tokens, linear in the position inside the stage, which never reaches 1."""
        k = self.stage_at(step)
        stage = self.cfg.stages[k]
        stage_steps = max(1, self.planned_ends[k] - self.planned_starts[k])
        position = (self.place(step) - self.planned_starts[k]) / stage_steps
        ramps = zip(stage.mtp_start, stage.mtp_end)
        return tuple(first + (last - first) * position for first, last in ramps)

    def at(self, step: int) -> Values:
        cfg = self.cfg
        k = self.stage_at(step)
        stage = cfg.stages[k]
        long_window = stage.long_window
        if step == self.total_steps:
            long_window = cfg.final_long_window                               # grown without YaRN
        factor = self.lr_factor_at(step)
        return Values(
            step=step,
            stage=k,
            slot_tokens=stage.batch_tokens // cfg.num_slots,
            max_doc_len=cfg.max_doc_len,
            val_slot_tokens=cfg.val_batch_tokens // cfg.num_slots,
            short_window=stage.short_window * cfg.window_block,
            long_window=long_window * cfg.window_block,
            mtp_weights=self.mtp_weights_at(step),
            rotary=self.rotary[k],
            lr_factor=factor,
            normuon_lr=cfg.normuon_lr * factor,
            adam_lr=cfg.adam_lr * factor,
            momentum=self.momentum_at(step),
            adam_step=step % CYCLE == CYCLE - 1,
            tied=step <= self.split_step,
            split=step == self.split_step,
            validate=step == self.next_validation(step))

    def next_validation(self, step: int) -> float:
        """The first step from this one on with a validation in front of it; infinite if only the end has one."""
        every = self.cfg.val_every
        if every == 0:
            return math.inf
        validations_before = -(-step // every)                                # rounded up
        return validations_before * every

    def warm_up_steps(self) -> list[int]:
        """Whole cycles around the start of every stage: each graph of the run, tied and split, occurs in them."""
        steps = set()
        for start in self.stage_starts:
            cycle_start = start - start % self.cycle
            steps.update(range(cycle_start, cycle_start + 2 * self.cycle))
        return sorted(step for step in steps if step < self.end_step)


def check_profile(schedule: Schedule, first: int) -> None:
    """Raise ConfigError if a run from step `first` on cannot trace the steps of --profile.

    Not its first step: the profiler warms up in the one before. Not its last: the step behind ends the trace.
    """
    asked = profile_range(schedule.cfg)
    if asked is None:
        return
    start, end = asked
    last = schedule.end_step
    if first < start < end < last and schedule.next_validation(start) >= end:
        return

    expected = f"{first} < a < b < {last}, only training in it"
    if schedule.cfg.val_every:
        expected += f": the loss is validated in front of every step that {schedule.cfg.val_every} divides"
    possible = first + 1
    if schedule.next_validation(possible) == possible:
        possible += 1
    possible_end = min(possible + 4, schedule.next_validation(possible), last - 1)
    do = "take more steps, or --val_every=0"
    if possible < possible_end:
        do = f"for example --profile={possible}:{possible_end}"
    raise ConfigError("--profile", schedule.cfg.profile, expected, do)


# ====== Room 3: Data ==================================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # recipe 1.2; table in data/README.md
TOKEN_BYTES = 2                          # little-endian u16
MANIFEST = "manifest.json"               # hashes of the files beside it, written last; table in data/README.md
MANIFEST_FORMAT = 1
VOCABULARY = "vocab.txt"                 # bytes of the tokens of the files beside it
HASH_CURRENT, HASH_PREVIOUS = 36313, 27191                                    # recipe 2.5
SIGN_VECTORS = 8192                      # of random signs; one more has +1 alone
BITMAP_ROWS = 16                         # per read of a cycle: in smaller tables a bitmap beats sorting the reads
LONG_PATIENCE = 10                       # ranks may be that many timeouts apart while they compile, or one writes files
FORMULA = "formula:"                     # formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS, tokens without a file
FORMULA_TOKENS = 2**28                   # at most in one shard: half a GiB, 2.7 times a shard of FineWeb
FORMULA_PIECE = 2**20                    # tokens made at once: the arithmetic takes 8 bytes for each
FORMULA_MIX = 0x9E3779B97F4A7C15         # 2^64 over the golden ratio: products of neighbours look unrelated at the top
FORMULA_DOCUMENT = 32                    # tokens, on average


class FileIdentity(NamedTuple):
    """What differs once a file is written again or replaced."""

    size: int                            # bytes
    written_ns: int                      # time of the last writing, which can be put back
    inode: int
    changed_ns: int                      # of a change of any kind, a new link or other rights too; nobody puts it back


class ShardHeader(NamedTuple):
    """One shard: a file, or a formula that makes its tokens."""

    name: str
    tokens: int
    vocab_size: int
    document_start: int
    identity: FileIdentity | None = None     # of the file as it was found

    @property
    def is_formula(self) -> bool:
        return self.name.startswith(FORMULA)

    @property
    def vocabulary(self) -> tuple[int, int]:
        return self.vocab_size, self.document_start


class Shard:
    """Tokens of one shard in memory, (tokens,) u16, and where its documents start."""

    def __init__(self, tokens: np.ndarray, document_start: int) -> None:
        self.tokens = tokens
        self.doc_starts = np.flatnonzero(tokens == document_start)
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))
        self._tokens_before: dict[int, np.ndarray] = {}                       # by max_doc_len

    def tokens_before(self, max_doc_len: int) -> np.ndarray:
        """(documents + 1,) i64: tokens before each document, and before the end, if all are cut to max_doc_len."""
        if max_doc_len not in self._tokens_before:
            lengths = np.minimum(self.doc_lengths, max_doc_len)
            self._tokens_before[max_doc_len] = np.concatenate([[0], np.cumsum(lengths)])
        return self._tokens_before[max_doc_len]


class Slot(NamedTuple):
    """One slot of T tokens on the host."""

    tokens: np.ndarray                   # (T + 1,) u16: inputs are the first T, targets the last T
    cu_seqlens: np.ndarray               # (documents + 1,) i32: 0, then the end of each document in the inputs, last T;
                                         # the first or last document may be empty


def formula_tokens(seed: int, count: int, vocab_size: int, document_start: int) -> np.ndarray:
    """(count,) u16 tokens, alike everywhere: for the tiny preset and the warm-up.

    A token follows from its position and the seed alone. The first document starts at 0.
    """
    tokens = np.empty(count, np.uint16)
    for first in range(0, count, FORMULA_PIECE):
        piece = tokens[first:first + FORMULA_PIECE]
        position = np.arange(first, first + len(piece), dtype=np.uint64) + np.uint64(seed << 32)
        mixed = position * np.uint64(FORMULA_MIX) >> np.uint64(40)            # 24 bits, of a product that wraps
        drawn = mixed * mixed // np.uint64(7) % np.uint64(vocab_size - 1)
        drawn += drawn >= document_start                                      # any token but the document start
        piece[:] = drawn
        piece[mixed % np.uint64(FORMULA_DOCUMENT) == 0] = document_start
    tokens[:1] = document_start
    return tokens


def formula_shards(formula: str) -> list[ShardHeader]:
    """Shards of formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS. Raises DataError."""
    try:
        vocab, start, tokens, shards = map(int, formula.removeprefix(FORMULA).split(":"))
        sound = 2 <= vocab <= MAX_VOCAB and 0 <= start < vocab
        sound = sound and 1 <= tokens <= FORMULA_TOKENS and 1 <= shards < 2**16
    except ValueError:
        sound = False
    if not sound:
        raise DataError("formula", formula,
                        "formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS with DOCUMENT_START < VOCAB <= "
                        f"{MAX_VOCAB}, at most {FORMULA_TOKENS} TOKENS in each of at most "
                        f"{2**16 - 1} SHARDS",
                        "for example formula:512:511:40000:2")
    return [ShardHeader(f"{formula}#{seed}", tokens, vocab, start) for seed in range(shards)]


def file_identity(path: Path) -> FileIdentity:
    found = path.stat()
    return FileIdentity(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def read_header(path: Path) -> ShardHeader:
    """Read and check the first 1,024 bytes and the length of a shard. Raises DataError."""
    identity = file_identity(regular_file(path, "a shard"))
    size = identity.size
    words = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    whole = len(words) == HEADER_BYTES // 4
    if not whole or words[0] != SHARD_MAGIC or words[1] != SHARD_VERSION:
        raise DataError(f"{path}: header at byte 0",
                        f"{size} bytes, first words {words[:2].tolist()}",
                        f"{HEADER_BYTES} bytes that begin with {SHARD_MAGIC} (magic) and "
                        f"{SHARD_VERSION} (version)",
                        "fetch or write the file again; the format is in data/README.md")

    count, vocab, start = words[2:5].tolist()
    right_size = HEADER_BYTES + TOKEN_BYTES * count
    if count <= 0 or size != right_size:
        raise DataError(f"{path}: length", f"{size} bytes",
                        f"{HEADER_BYTES} + {TOKEN_BYTES} x {count} (tokens in header word 2) = "
                        f"{right_size} bytes",
                        "the file is cut or still being written; fetch it again")

    if vocab == 0:                                                            # old shards leave both words 0
        vocab, start = GPT2_VOCAB, GPT2_DOCUMENT_START
    if not 0 <= start < vocab <= MAX_VOCAB:
        raise DataError(f"{path}: header words 3 and 4",
                        f"vocabulary {vocab}, document start {start}",
                        f"0 <= document start < vocabulary <= {MAX_VOCAB}",
                        "write the shards again")
    return ShardHeader(str(path), count, vocab, start, identity)


def matching_files(pattern: str) -> list[Path]:
    """What a pattern matches, in name order.

    A file or folder that has just this name is meant before a pattern is: brackets in the name of
    a folder mean themselves wherever that folder exists.
    """
    path = Path(pattern)
    if os.path.lexists(pattern):
        return [path]
    if not path.name:
        return []

    folder = path.parent
    while not os.path.isdir(folder):                                          # ends at "." or "/"
        folder = folder.parent
    below = str(path.relative_to(folder))
    names = glob.glob(os.path.join(glob.escape(str(folder)), below))
    return [Path(name) for name in sorted(names)]


def find_shards(pattern: str) -> list[ShardHeader]:
    """Headers of all shards of a pattern in name order, checked. Raises DataError.

    Whatever matches has to be a shard: to pass over a broken link in silence would train on less.
    """
    if pattern.startswith(FORMULA):
        return formula_shards(pattern)
    if os.path.isdir(pattern):
        raise DataError(f"{pattern} as shards", "a directory", "a pattern that matches files",
                        f"name the files in it, for example '{Path(pattern) / '*_train_*.bin'}'")

    paths = matching_files(pattern)
    if not paths:
        raise DataError("no shards",
                        f"no file matches {pattern!r} in {os.getcwd()}",
                        "a .bin shard",
                        "python data/pocket.py or python data/cached_fineweb10B.py 9, "
                        "or give --train_files= and --val_files=")
    return [read_header(path) for path in paths]


class Written(NamedTuple):
    """What a manifest says of a file."""

    size: int                            # bytes
    sha256: str


def read_manifest(folder: Path) -> dict[str, Written]:
    """What a folder's manifest says of each file that it names; {} without one. Raises DataError."""
    path = folder / MANIFEST
    unfinished = folder / f"{MANIFEST}.part"
    if os.path.lexists(unfinished):
        raise DataError(f"{unfinished}", "a tool was stopped while it gave the files their names",
                        "files that belong together", "run that tool again, then this")
    if not os.path.lexists(path):
        return {}
    content = read_bounded(path, "a manifest")
    try:
        manifest = json.loads(content)
        if manifest["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {manifest['format']}")
        files = manifest["files"].items()
        return {name: Written(facts["bytes"], facts["sha256"]) for name, facts in files}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} as a manifest", f"{type(error).__name__}: {error}",
                        f"format {MANIFEST_FORMAT}, as data/README.md has it",
                        "write the folder again, or remove this file if those beside it are sound"
                        ) from None


def check_manifest(path: Path, content: bytes | np.ndarray) -> None:
    """Raise DataError if the manifest beside a file says that it had another content."""
    written = read_manifest(path.parent).get(path.name)
    if written is None:
        return
    found = hashlib.sha256(content).hexdigest()
    if found != written.sha256:
        raise DataError(f"{path}: content",
                        f"sha256 {found}",
                        f"{written.sha256}, says {MANIFEST} beside it",
                        "the file is damaged, or a mixture of two data sets: write the data again, "
                        f"or remove {MANIFEST} if this content is meant")


def checked_shard(header: ShardHeader, tokens: np.ndarray) -> Shard:
    """The tokens as a shard, after a look at every one of them. Raises DataError."""
    name = header.name
    if len(tokens) != header.tokens:
        raise DataError(f"{name}: changed while in use",
                        f"{len(tokens)} tokens",
                        f"{header.tokens} as before",
                        "let nobody write to it, and start again")
    if tokens.max() >= header.vocab_size:
        at = int(np.argmax(tokens >= header.vocab_size))
        raise DataError(f"{name}: token {at} at byte {HEADER_BYTES + TOKEN_BYTES * at}", tokens[at],
                        f"an id below the vocabulary size {header.vocab_size}",
                        "write the shard with the right header word 3")

    shard = Shard(tokens, header.document_start)
    if len(shard.doc_starts) == 0:
        raise DataError(f"{name}: documents",
                        "no document start in the whole shard",
                        f"token {header.document_start} in front of every document",
                        "write the shard again")
    return shard


def load_shard(header: ShardHeader) -> Shard:
    """Read a shard, or make the tokens of its formula. Raises DataError."""
    if header.is_formula:
        seed = int(header.name.rpartition("#")[2])
        tokens = formula_tokens(seed, header.tokens, *header.vocabulary)
    else:
        tokens = np.fromfile(header.name, "<u2", header.tokens, offset=HEADER_BYTES)
    return checked_shard(header, tokens)


def scan_shards(headers: Sequence[ShardHeader]) -> str:
    """Look at every token of every shard before anything is built on them. Raises DataError.

    Returns the hash of all names and contents, in order. The name of a formula says everything.
    """
    digest = hashlib.sha256()
    for header in headers:
        path = Path(header.name)
        digest.update(path.name.encode("utf-8", "surrogateescape"))          # a name may be any bytes
        if not header.is_formula:
            content = np.fromfile(path, "<u2")
            digest.update(content)
            check_manifest(path, content)
            checked_shard(header, content[HEADER_BYTES // TOKEN_BYTES:])
    return digest.hexdigest()


def changed_shards(headers: Sequence[ShardHeader], sha256: str) -> list[str]:
    """Names of the shards that are not as they were found: written again, replaced or gone.

    sha256: what `scan_shards` gave. All are read once more if one of them has been touched in a way that may have left
    its content alone.
    """
    changed = []
    touched = []
    for header in headers:
        if header.is_formula:
            continue
        before = header.identity
        try:
            identity = file_identity(Path(header.name))
        except OSError:
            changed.append(header.name)
            continue
        if identity._replace(changed_ns=before.changed_ns) != before:
            changed.append(header.name)
        elif identity != before:
            touched.append(header.name)

    if touched and not changed:
        try:
            same = scan_shards(headers) == sha256
        except (DataError, OSError):
            same = False
        if not same:
            changed = touched
    return changed


def shared_shards(train: Sequence[ShardHeader], val: Sequence[ShardHeader]) -> list[str]:
    """Names of the training shards that are validated with, too, links followed."""
    validated = {os.path.realpath(header.name) for header in val}
    return [header.name for header in train if os.path.realpath(header.name) in validated]


def resolve(cfg: Config, train: list[ShardHeader], val: list[ShardHeader]) -> Config:
    """Fill in the sizes that the shard headers decide.

    Raises DataError or ConfigError where they are contradicted.
    """
    first = train[0]
    for other in train + val:
        if other.vocabulary != first.vocabulary:
            raise DataError("shards of different vocabularies",
                            f"{other.vocabulary} in {other.name}",
                            f"(vocabulary, document start) {first.vocabulary} as in {first.name}",
                            "give one data set only")

    vocab_size, document_start = first.vocabulary
    facts = (("vocab_size", 0, vocab_size), ("document_start", -1, document_start))
    for flag, unset, stored in facts:
        given = getattr(cfg, flag)
        if given not in (unset, stored):
            raise ConfigError(f"--{flag}", given, f"{stored}, header of {first.name}",
                              "leave the flag out")

    padded = cfg.padded_vocab
    if padded == 0:
        padded = -(-vocab_size // 128) * 128
    if padded < vocab_size:
        raise ConfigError("--padded_vocab", padded, f"at least the vocabulary size {vocab_size}",
                          "--padded_vocab=0")

    bigram_rows = cfg.bigram_rows
    if bigram_rows == 0:
        bigram_rows = 5 * padded
    bigram_rows = max(2, bigram_rows)                                         # one for pairs, one for no pair
    return replace(cfg, vocab_size=vocab_size, document_start=document_start, padded_vocab=padded,
                   bigram_rows=bigram_rows)


def check_enough_data(cfg: Config, schedule: Schedule, train: list[ShardHeader]) -> None:
    """Raise DataError before anything is built if the shards cannot last.

    What is needed at least: packing drops ends of documents, and the rest of a shard that is too
    little for a block.
    """
    needs = []                                       # (steps, tokens of a step) of each stage that is reached
    for stage, steps in zip(cfg.stages, schedule.steps_by_stage(0, schedule.end_step)):
        if steps > 0:
            needs.append((steps, stage.batch_tokens + cfg.num_slots))         # a slot has one more, its last target

    needed = sum(steps * step_tokens for steps, step_tokens in needs)
    have = cfg.epochs * sum(header.tokens for header in train)
    if cfg.epochs > 0 and needed > have:
        possible = steps_within(have, needs)
        raise DataError("too few training tokens",
                        f"{have} in {len(train)} shards of {cfg.train_files!r}: {possible} steps",
                        f"{needed} for {schedule.end_step} steps",
                        "fetch more shards (FineWeb: python data/cached_fineweb10B.py N), take "
                        "fewer steps (--num_scheduled_steps), or cycle with --epochs=0")

    largest_step = max(step_tokens for _, step_tokens in needs)
    if largest_step > max(header.tokens for header in train):
        raise too_small(cfg, train, largest_step // cfg.num_slots)


def steps_within(tokens: int, needs: list[tuple[int, int]]) -> int:
    """How many steps so many tokens last, for stages of (steps, tokens of a step)."""
    done = 0
    for steps, step_tokens in needs:
        fitting = min(steps, tokens // step_tokens)
        done += fitting
        tokens -= fitting * step_tokens
        if fitting < steps:
            break
    return done


def too_small(cfg: Config, train: list[ShardHeader], read_by_slot: int) -> DataError:
    """The error where no shard has room for a block of slots, which has to lie in one.

    read_by_slot: tokens, the last target among them.
    """
    return DataError("training shards are too small",
                     f"none of {len(train)} holds {cfg.num_slots} x {read_by_slot} tokens, "
                     f"at most {cfg.max_doc_len} of each document",
                     "documents for one step in a shard",
                     "larger shards, or smaller batches in --stages")


def check_enough_validation(cfg: Config, val: list[ShardHeader]) -> None:
    """Raise DataError if the shards hold fewer whole blocks than val_tokens asks for."""
    blocks = sum(len(validation_blocks(header.tokens, cfg.val_batch_tokens)) for header in val)
    found = blocks * cfg.val_batch_tokens
    if found < cfg.val_tokens:
        do = f"--val_tokens={found}"
        if found == 0:
            do = "a smaller --val_batch_tokens, and --val_tokens a multiple of it"
        raise DataError("too few validation tokens", f"{found} in blocks of {cfg.val_files!r}",
                        cfg.val_tokens, do)


def pack_block(shard: Shard, first_doc: int, num_slots: int, slot_tokens: int,
               max_doc_len: int) -> tuple[list, int] | None:
    """Deal documents to the slots of a block in stream order (recipe 5.2, 11.3).

    Each slot takes documents, cut to max_doc_len, until it has slot_tokens + 1 tokens; the last one
    is cut to fit and its rest is lost: the next slot begins with a fresh document. Returns (slots,
    next document), a slot being (starts, ends) of pieces, or None where the shard ends before the
    block does.
    """
    tokens_before = shard.tokens_before(max_doc_len)
    slots = []
    doc = first_doc
    for _ in range(num_slots):
        slot_end = tokens_before[doc] + slot_tokens + 1
        next_doc = int(np.searchsorted(tokens_before, slot_end))              # the first that starts there or later
        if next_doc == len(tokens_before):
            return None

        starts = shard.doc_starts[doc:next_doc]
        ends = starts + np.diff(tokens_before[doc:next_doc + 1])
        ends[-1] -= tokens_before[next_doc] - slot_end
        slots.append((starts, ends))
        doc = next_doc
    return slots, doc


def make_slot(shard: Shard, starts: np.ndarray, ends: np.ndarray) -> Slot:
    """The pieces from starts to ends of a shard's tokens, one behind the other."""
    pieces = [shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                                       # the last token is a target only
    return Slot(np.concatenate(pieces), cu_seqlens.astype(np.int32))


def validation_blocks(shard_tokens: int, block_tokens: int) -> range:
    """Where the blocks of a shard begin.

    A block needs one more token than its own, the last target, and by the peer's rule another one.
    """
    return range(0, shard_tokens - block_tokens - 1, block_tokens)


def validation_slots(shards: Iterable[Shard], num_slots: int, slot_tokens: int,
                     document_start: int) -> Iterator[Slot]:
    """Consecutive slots in whole blocks of num_slots (recipe 1.3, 5.2).

    They are not aligned to documents, and no document is cut short.
    """
    block_tokens = num_slots * slot_tokens
    for shard in shards:
        for block in validation_blocks(len(shard.tokens), block_tokens):
            for start in range(block, block + block_tokens, slot_tokens):
                tokens = shard.tokens[start:start + slot_tokens + 1]
                borders = np.flatnonzero(tokens[:-1] == document_start)
                cu_seqlens = np.concatenate([[0], borders, [slot_tokens]])
                yield Slot(tokens, cu_seqlens.astype(np.int32))


def bigram_hash(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Row of each (previous, current) token pair of slots (recipe 2.5).

    (..., T) i32 -> (..., T) i32 in [0, rows), in 32-bit arithmetic that wraps:
        row = ((36313 * current) xor (27191 * previous)) mod (rows - 1)
    The last row means: no pair, and stands at position 0. Two quirks are part of the published
    losses: pairs cross documents, and position 1 takes the number of that row for its previous
    token, because the peer overwrites position 0 before it multiplies.
    """
    no_pair = rows - 1
    previous = np.empty_like(tokens)
    previous[..., 2:] = tokens[..., 1:-1]
    previous[..., :2] = no_pair

    mixed = (tokens * np.int32(HASH_CURRENT)) ^ (previous * np.int32(HASH_PREVIOUS))
    modulus = np.int32(rows - 1)
    hashed = mixed - mixed // modulus * modulus                               # numpy has vector code for //, none for %
    hashed[..., 0] = no_pair
    return hashed


def ngram_hash(tokens: np.ndarray, factors: Sequence[int], modulus: int, none: int) -> np.ndarray:
    """A number for the n-gram that ends at each position of a slot, (..., T) i32 -> (..., T) i32 below modulus.

    The xor of token x factor, factors from the newest token backwards, in 32-bit arithmetic that wraps; floor modulo.
    `none` stands at the first n - 1 positions. N-grams cross documents, as recipe A's bigrams do.
    """
    mixed = tokens * np.int32(factors[0])
    for back, factor in enumerate(factors[1:], 1):
        mixed[..., back:] ^= tokens[..., :-back] * np.int32(factor)
    hashed = mixed - mixed // np.int32(modulus) * np.int32(modulus)
    hashed[..., :len(factors) - 1] = none
    return hashed


class Table(NamedTuple):
    """An embedding of which a step reads few rows (design 4.1).

    These are further columns of its row in the parameter table.
    """

    label: str
    rows: int                            # R
    reads: int                           # rows that a token reads
    ids: Callable[[np.ndarray], np.ndarray]      # tokens (b, T) i32 -> logical rows (b, T) or (b, reads, T) i32
    tied: bool = False                   # to the head until the split
    home: str = "device"                 # where an owner keeps its rows
    rule: str = "adam"                   # what updates them: all rows of a slice, or "rowwise" those asked for
    cadence: int = CYCLE                 # steps between updates
    rounding: str = "nearest"            # of bf16 rows behind an update of rule "rowwise"
    signs: Callable[[np.ndarray], np.ndarray] | None = None       # tokens (b, T) i32 -> vectors of signs (b, T) i32

    @property
    def is_rowwise(self) -> bool:
        return self.rule == "rowwise"


def ngram_table(ngrams: Ngrams) -> Table:
    """A line of the table of n-gram tables, with the functions that its factors stand for."""
    def rows_of(tokens: np.ndarray) -> np.ndarray:
        return ngram_hash(tokens, ngrams.hash, ngrams.rows - 1, none=ngrams.rows - 1)

    def signs_of(tokens: np.ndarray) -> np.ndarray:
        return ngram_hash(tokens, ngrams.sign_hash, SIGN_VECTORS, none=SIGN_VECTORS)

    return Table(ngrams.label, ngrams.rows, 1, rows_of, home=ngrams.home, rule=ngrams.rule, cadence=ngrams.cadence,
                 rounding=ngrams.rounding, signs=signs_of if ngrams.signs else None)


def row_tables(cfg: Config) -> tuple[Table, ...]:
    """The tables, with the functions that say which rows a token reads."""
    V = cfg.padded_vocab
    first_rows = V * np.arange(NUM_VALUE_TABLES, dtype=np.int32)[:, None]     # value tables stand one below the other

    def pair_rows(tokens: np.ndarray) -> np.ndarray:
        return bigram_hash(tokens, cfg.bigram_rows)

    def value_rows(tokens: np.ndarray) -> np.ndarray:
        return tokens[:, None] + first_rows

    def own_rows(tokens: np.ndarray) -> np.ndarray:
        return tokens

    return (Table("bigram_embed", cfg.bigram_rows, 1, pair_rows),
            Table("value_embed", NUM_VALUE_TABLES * V, NUM_VALUE_TABLES, value_rows),
            Table("embed", V, 1, own_rows, tied=True),
            *map(ngram_table, ngram_tables(cfg)))


@dataclass(eq=False)
class EventRows:
    """The rows of this rank's slice that ranks ask for in a cycle, each once: what an event of rule "rowwise" moves.

    Rows that the cycle before asked for, too, are on the device, and will be newer there than at home.
    """

    places: Tensor                       # (u,) i64 in the slice, ascending
    of_asked: Tensor                     # (asked,) i64: which of them each row is that a reader asks for
    follows: EventRows | None            # those of the cycle before; None: there is none
    fresh: Tensor                        # (f,) i64: which of the places the cycle before has not
    kept: Tensor                         # (u - f,) i64: which it has, too,
    kept_from: Tensor                    # (u - f,) i64: and which of its places they are there


def distinct_with_places(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) integers below 2^32 -> each once, ascending, (u,) i64, and which of them each value is, (n,) i64.

    One sort of 64-bit words, the value above its place: several times as fast as numpy's unique with its inverse.
    Unsigned, for physical rows of the largest tables may pass 2^31.
    """
    count = len(values)
    words = np.sort(values.astype(np.uint64) << np.uint64(32) | np.arange(count, dtype=np.uint64))
    ordered = (words >> np.uint64(32)).astype(np.int64)
    is_new = np.ones(count, bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    which = np.empty(count, np.int64)
    which[words & np.uint64(0xFFFFFFFF)] = np.cumsum(is_new) - 1
    return ordered[is_new], which


def event_rows(asked: np.ndarray, before: EventRows | None, fabric: Fabric) -> EventRows:
    """The rows of an event, from the places that readers ask for, reader by reader, and the event before it."""
    places, of_asked = distinct_with_places(asked)
    in_both = np.zeros(len(places), bool)
    at = np.zeros(len(places), np.int64)
    if before is not None and len(before.places) > 0:
        places_before = before.places.numpy()
        at = np.searchsorted(places_before, places).clip(max=len(places_before) - 1)
        in_both = places_before[at] == places
    lists = (places, of_asked, np.flatnonzero(~in_both), np.flatnonzero(in_both), at[in_both])
    places, of_asked, fresh, kept, kept_from = map(fabric.host_tensor, lists)
    return EventRows(places, of_asked, before, fresh, kept, kept_from)


@dataclass(eq=False)
class TablePlan:
    """Which rows of a table this rank reads in a cycle, and which of its own all ranks ask for.

    Row r is the r div W-th of rank r mod W, since frequent tokens have neighbouring ids; physical
    order: by owner. The lists of rows are numpy arrays until `change_lists` makes tensors of them.
    """

    tag: dict[str, Any]                  # purpose, cycle, tokens (of a slot over the cycle): alike on all ranks
    size: int                            # rows of every slice: R / W, rounded up
    rows_i_read: Any                     # (n,) i64, physical, ascending: list of the fetch and of the gradients' return
    counts_by_owner: list[int]           # how many of them each owner has
    rows_asked_of_me: Any                # i64 places in this rank's slice, reader by reader
    counts_by_reader: list[int]          # how many of them each reader asks for
    head_columns: Any                    # (n,) i64: the same rows in the head, which every rank has, if tied; else None
    plan_ms: float                       # time of `Planner.plan`
    reads: int = 0                       # of rows, with repetitions
    event: EventRows | None = None       # of rule "rowwise": what the owner updates, once somebody has asked room 6
    sent: int = 0                        # bytes to and from other ranks, counted where a collective is called
    received: int = 0

    @property
    def tied(self) -> bool:
        """Read from the head: nothing travels."""
        return self.head_columns is not None

    def change_lists(self, change: Callable) -> None:
        """Put change(list) in the place of each list of rows: a tensor, pinned, on the device."""
        self.rows_i_read = change(self.rows_i_read)
        self.rows_asked_of_me = change(self.rows_asked_of_me)
        if self.tied:
            self.head_columns = change(self.head_columns)


class Batch(NamedTuple):
    """This rank's slots of one step, b of them."""

    step: int
    plans: dict[str, TablePlan]          # by table, shared by the steps of a cycle
    tokens: Tensor                       # (b, T) i32
    targets: Tensor                      # (b, T) i64: the next token
    cu_seqlens: Tensor                   # (b, K) i32: 0, document ends, then T as often as needed to fill K columns
    rows: dict[str, Tensor]              # by table, shaped like its ids: places in the plan's list, or physical rows
    signs: dict[str, Tensor] = {}        # by table that has signs, (b, T) i32: vectors of them

    def map(self, change: Callable) -> Batch:
        """The batch with change(tensor) in the place of each tensor."""
        rows = {label: change(x) for label, x in self.rows.items()}
        signs = {label: change(x) for label, x in self.signs.items()}
        return self._replace(tokens=change(self.tokens), targets=change(self.targets),
                             cu_seqlens=change(self.cu_seqlens), rows=rows, signs=signs)

    def to(self, device: torch.device) -> Batch:
        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)
        return self.map(moved)


def keeps_rows_by_list(table: Table, cfg: Config, fabric: Fabric) -> bool:
    """Whether a rank has room for a plan's rows only, in the order of its list; else for all, in physical order."""
    return table.is_rowwise or (cfg.row_comms == "sparse" and fabric.world > 1)


class Planner:
    """Makes the batches of a cycle and their row plans.

    Pure, but for the exchange with other ranks.
    """

    def __init__(self, cfg: Config, fabric: Fabric, exchange: Callable | None = None) -> None:
        """exchange fills in what ranks ask of each other; else a plan is this rank's side alone."""
        W = fabric.world
        self.fabric = fabric
        self.exchange = exchange
        self.tables = row_tables(cfg)
        self.listed = {}                 # by table: batches hold places in a list, not physical rows
        for table in self.tables:
            self.listed[table.label] = keeps_rows_by_list(table, cfg, fabric)

        self.sizes = {table.label: -(-table.rows // W) for table in self.tables}      # rows of every slice
        self.seen = {}                   # by table, for each physical row: a mark, False again after each plan
        self.place_in_list = {}          # by table, for each physical row: of the last list that had it
        for table in self.tables:
            if table.is_rowwise:                                              # nothing is as large as it
                continue
            rows = W * self.sizes[table.label]
            self.seen[table.label] = np.zeros(rows, bool)
            self.place_in_list[table.label] = np.zeros(rows, np.int32)

    def batches(self, purpose: str, steps: Sequence[Values],
                slots: Sequence[list[Slot]]) -> list[Batch]:
        """A batch for each step of a cycle and its slots."""
        tokens = []                      # by step: (b, T + 1) u16
        for slots_of_step in slots:
            tokens.append(np.stack([slot.tokens for slot in slots_of_step]))
        inputs = [x[:, :-1].astype(np.int32) for x in tokens]
        plans: list[dict[str, TablePlan]] = []       # of each step: the same until some table's cycle ends
        rows: list[dict[str, np.ndarray]] = [{} for _ in steps]
        current: dict[str, TablePlan] = {}
        for first in range(0, len(steps), CYCLE):
            begun = self._begin_plans(purpose, steps, inputs, first, rows)
            if self.exchange:
                self.exchange(begun)
            for plan in begun.values():
                plan.change_lists(self.fabric.host_tensor)
            current = current | begun
            plans += [current] * CYCLE

        batches = []
        for at, values in enumerate(steps):
            signs = {table.label: table.signs(inputs[at]) for table in self.tables if table.signs}
            batch = Batch(values.step, plans[at], inputs[at], tokens[at][:, 1:].astype(np.int64),
                          stacked_borders(slots[at]), rows[at], signs)
            batches.append(batch.map(self.fabric.host_tensor))
        return batches

    def _begin_plans(self, purpose: str, steps: Sequence[Values], inputs: list[np.ndarray], first: int,
                     rows: list[dict]) -> dict[str, TablePlan]:
        """The plans, by table, that begin at steps[first]. What stands for their rows goes to each of their steps."""
        begun = {}
        for table in self.tables:
            if first % table.cadence != 0:
                continue
            ends = min(first + table.cadence, len(steps))
            of_cycle = range(first, ends)
            logical_rows = [table.ids(inputs[at]) for at in of_cycle]
            cycle_tokens = sum(inputs[at].shape[1] for at in of_cycle)
            tag = dict(purpose=purpose, cycle=steps[first].step // table.cadence, tokens=cycle_tokens)
            tied = table.tied and steps[first].tied                           # they part between cycles
            plan, rows_of_steps = self.plan(table.label, tag, tied, logical_rows)
            begun[table.label] = plan
            for at, rows_of_step in zip(of_cycle, rows_of_steps):
                rows[at][table.label] = rows_of_step
        return begun

    def plan(self, label: str, tag: dict, tied: bool,
             rows: list[np.ndarray]) -> tuple[TablePlan, list[np.ndarray]]:
        """The plan for these logical rows, an array for each step, and what stands for each in a batch."""
        began = time.perf_counter()
        W = self.fabric.world
        size = self.sizes[label]
        logical = np.concatenate([x.ravel() for x in rows])
        place_in_slice = logical // W
        owner = logical - place_in_slice * W                                  # logical mod W, with vector code
        if W * size > np.iinfo(np.int32).max:                                 # the places behind the last row, too
            owner = owner.astype(np.int64)
        physical = owner * size + place_in_slice

        if label not in self.seen:
            rows_i_read, which = distinct_with_places(physical)
            batch_rows = which.astype(np.int32)
        else:
            rows_i_read = self._distinct(label, physical)
            batch_rows = physical
            if self.listed[label]:
                place_in_list = self.place_in_list[label]
                place_in_list[rows_i_read] = np.arange(len(rows_i_read), dtype=np.int32)
                batch_rows = place_in_list.take(physical)

        slice_borders = size * np.arange(W + 1)
        counts_by_owner = np.diff(np.searchsorted(rows_i_read, slice_borders)).tolist()
        head_columns = None
        if tied:
            head_columns = rows_i_read % size * W + rows_i_read // size       # logical again
        plan_ms = 1000 * (time.perf_counter() - began)

        # A single rank asks itself; with several, the exchange puts in what the readers ask for.
        plan = TablePlan(tag, size, rows_i_read, counts_by_owner,
                         rows_asked_of_me=rows_i_read, counts_by_reader=counts_by_owner,
                         head_columns=head_columns, plan_ms=plan_ms, reads=len(logical))
        parts = np.split(batch_rows, np.cumsum([x.size for x in rows[:-1]]))
        return plan, [part.reshape(x.shape) for part, x in zip(parts, rows)]

    def _distinct(self, label: str, physical: np.ndarray) -> np.ndarray:
        """(n,) i64: each of the rows once, in ascending order."""
        seen = self.seen[label]
        if len(seen) < BITMAP_ROWS * len(physical):
            seen[physical] = True
            rows = np.flatnonzero(seen)
            seen[rows] = False
            return rows

        rows = np.sort(physical)                                              # a bitmap costs by the size of the table
        is_new = np.append(True, rows[1:] != rows[:-1])
        return rows[is_new[:len(rows)]].astype(np.int64)                      # there may be none


def stacked_borders(slots: list[Slot]) -> np.ndarray:
    """(b, K) i32: the cu_seqlens of slots, the shorter ones filled up with their last value."""
    columns = max(len(slot.cu_seqlens) for slot in slots)
    lines = []
    for slot in slots:
        missing = columns - len(slot.cu_seqlens)
        lines.append(np.pad(slot.cu_seqlens, (0, missing), "edge"))
    return np.stack(lines)


def bounded(future: Future, cfg: Config, what: str) -> Any:
    """Result of a thread's work; its exception surfaces here, and the wait has an end."""
    try:
        return future.result(timeout=cfg.comm_timeout)
    except FutureTimeout:
        raise RunError(what, f"nothing after {cfg.comm_timeout} s", "an answer by then",
                       "look at disk and other ranks, or give a longer --comm_timeout") from None


class Loader:
    """Batches of the given steps, made on a background thread exactly one cycle ahead.

    Taking a cycle starts the work on the next, so what a batch holds never depends on timing. The
    stream of slots is the same at every W: a block of slots that does not fit into a shard starts
    the next one, which a second thread reads ahead. The steps are asked for one cycle at a time:
    there may be millions of them.
    """

    def __init__(self, cfg: Config, fabric: Fabric, headers: list[ShardHeader],
                 steps: Iterable[Values], exchange: Callable | None = None,
                 purpose: str = "train") -> None:
        self.cfg = cfg
        self.fabric = fabric
        self.headers = headers
        self.purpose = purpose
        self.planner = Planner(cfg, fabric, exchange)
        self.steps = iter(steps)
        self.worker = ThreadPoolExecutor(1, "loader", initializer=fabric.enter_thread)
        self.reader = ThreadPoolExecutor(1, "shard-reader")

        self.shards = self._shards_being_read()
        self.upcoming: Future | None = None          # the shard behind the one in use
        self.shard: Shard | None = None              # in use, from document doc on
        self.doc = 0
        self.tokens_passed = 0                       # in shards that were in use before
        self.tokens_taken = 0                        # into blocks, without the last targets
        self.data_ended = False                      # no shard holds another block, on any rank
        self.ahead: Future | None = None             # batches of the next cycle
        self.ready: list[Batch] = []                 # what is left of this one
        self.plans_in_use: dict[str, TablePlan] = {}

    def skip(self, steps: Iterable[Values]) -> None:
        """Pass over what the steps of an earlier run have read."""
        self.upcoming = next(self.shards)
        for values in steps:
            self._block(values)

    def start(self) -> None:
        """Begin to read. Called when the clock starts, for reading and packing are on it."""
        if self.upcoming is None:                                             # else `skip` has begun
            self.upcoming = next(self.shards, None)
        self._prepare_next()

    def wait(self) -> None:
        """Until the next cycle is made. What went wrong in the thread is raised here."""
        if self.ahead is not None:
            bounded(self.ahead, self.cfg, "waiting for the loader thread")

    def next(self, values: Values) -> Batch:
        """The batch of this step, on the device."""
        if not self.ready:
            self.wait()
            self.ready = self.ahead.result()
            self._prepare_next()
        batch = self.ready.pop(0)
        self.plans_in_use = batch.plans
        assert batch.step == values.step, f"loader at step {batch.step}, run at {values.step}"
        return batch.to(self.fabric.device)

    def plans_ahead(self) -> dict[str, TablePlan] | None:
        """The next row plans behind those in use, or None: there are none, or `next` will say why.

        Data that end do so on every rank, so all of them may finish their cycle first. Whatever
        else goes wrong may have happened on this rank alone, and the others would wait for its
        rows: it surfaces here.
        """
        for batch in self.ready:
            if batch.plans is not self.plans_in_use:          # a table's cycle may be shorter than the run's
                return batch.plans
        try:
            self.wait()
        except DataError:
            if self.data_ended or self.fabric.world == 1:
                return None
            raise
        if self.ahead is None:
            return None
        first_batch = self.ahead.result()[0]
        return first_batch.plans

    def tokens_left(self) -> float:
        """About how many more tokens the shards give to blocks: of their rest the same share as until now.

        A block less, for the last shard may end inside one. Infinite where the shards are read again and again.
        """
        if self.cfg.epochs == 0:
            return math.inf
        self.wait()
        passed = self.tokens_passed + int(self.shard.doc_lengths[:self.doc].sum())
        of_all_passes = self.cfg.epochs * sum(header.tokens for header in self.headers)
        largest_block = max(stage.batch_tokens for stage in self.cfg.stages)
        return (of_all_passes - passed) * self.tokens_taken / passed - largest_block

    def close(self) -> None:
        for pool in (self.worker, self.reader):
            pool.shutdown(wait=False, cancel_futures=True)

    def _shards_being_read(self) -> Iterator[Future]:
        """All shards of all passes; each is given to the reader when it is asked for."""
        passes = range(self.cfg.epochs)
        if self.cfg.epochs == 0:
            passes = itertools.count()
        for _ in passes:
            for header in self.headers:
                yield self.reader.submit(load_shard, header)

    def _prepare_next(self) -> None:
        cycle = list(itertools.islice(self.steps, run_cycle(self.cfg)))
        self.ahead = None
        if cycle:
            self.ahead = self.worker.submit(self._make, cycle)

    def _make(self, cycle: Sequence[Values]) -> list[Batch]:
        """Batches of this rank for the steps of a cycle; runs on the worker thread."""
        my_slots = []
        for values in cycle:
            shard, block = self._block(values)
            mine = block[self.fabric.rank::self.fabric.world]
            my_slots.append([make_slot(shard, starts, ends) for starts, ends in mine])
        return self.planner.batches(self.purpose, cycle, my_slots)

    def _block(self, values: Values) -> tuple[Shard, list]:
        """The next block of slots: its shard, and (starts, ends) of the pieces of each slot."""
        slot_tokens = values.slot_tokens
        # What is left of the shard in use, each shard once, and the one that was in use as a whole.
        for _ in range(len(self.headers) + 2):
            if self.shard is not None:
                packed = pack_block(self.shard, self.doc, self.cfg.num_slots, slot_tokens,
                                    values.max_doc_len)
                if packed is not None:
                    slots, self.doc = packed
                    self.tokens_taken += self.cfg.num_slots * slot_tokens
                    return self.shard, slots

            if self.upcoming is None:
                if values.step == 0:
                    break                                                     # to cycle through them would not help
                self.data_ended = True
                raise DataError("training data ended",
                                f"{len(self.headers)} shards of {self.cfg.train_files!r}: "
                                f"enough for {values.step} steps",
                                "more shards, or fewer steps",
                                f"fetch more shards, stop at --max_steps={values.step}, "
                                "or cycle with --epochs=0")
            if self.shard is not None:
                self.tokens_passed += len(self.shard.tokens)
            self.shard = bounded(self.upcoming, self.cfg, "reading a shard")
            self.doc = 0
            self.upcoming = next(self.shards, None)
        self.data_ended = True
        raise too_small(self.cfg, self.headers, slot_tokens + 1)


class ValidationSet:
    """The validation slots in memory, and what is known of their text."""

    def __init__(self, cfg: Config, fabric: Fabric, headers: list[ShardHeader],
                 exchange: Callable | None = None, purpose: str = "validation") -> None:
        self.cfg = cfg
        self.fabric = fabric
        self.purpose = purpose
        self.planner = Planner(cfg, fabric, exchange)

        check_enough_validation(cfg, headers)
        slot_tokens = cfg.val_batch_tokens // cfg.num_slots
        shards = (load_shard(header) for header in headers)                   # read only as far as they are needed
        slots = validation_slots(shards, cfg.num_slots, slot_tokens, cfg.document_start)
        self.slots = list(itertools.islice(slots, cfg.val_tokens // slot_tokens))

        targets = np.concatenate([slot.tokens[1:] for slot in self.slots])
        counts = np.bincount(targets, minlength=cfg.vocab_size)
        shares = counts[counts > 0] / len(targets)
        self.unigram_nats = float(-(shares * np.log(shares)).sum())           # entropy of the targets' own distribution
        self.vocabulary = read_vocabulary(headers[0])
        self.bytes_per_token = None
        if self.vocabulary is not None:
            lengths = [len(piece) for piece in self.vocabulary]
            self.bytes_per_token = float(np.dot(counts, lengths) / len(targets))

    def text_losses(self, loss: float) -> dict[str, float]:
        """Bits per byte of a loss in nats per token, and the unigram entropy.

        Nothing is claimed where the tokens' bytes are not known.
        """
        if self.bytes_per_token is None:
            return {}
        bits_per_token = loss / math.log(2)
        return dict(val_bpb=bits_per_token / self.bytes_per_token, unigram_nats=self.unigram_nats)

    def batches(self, values: Values) -> Iterator[Batch]:
        """This rank's slots, one block at a time."""
        for first in range(0, len(self.slots), self.cfg.num_slots):
            block = self.slots[first:first + self.cfg.num_slots]
            mine = block[self.fabric.rank::self.fabric.world]
            batch, = self.planner.batches(self.purpose, [values], [mine])
            yield batch.to(self.fabric.device)


def read_vocabulary(header: ShardHeader) -> list[bytes] | None:
    """Bytes of each token from vocab.txt beside a shard, or None. Raises DataError."""
    path = Path(header.name).parent / VOCABULARY
    if header.is_formula or not os.path.lexists(path):
        return None
    content = read_bounded(path, "the bytes of the tokens")
    check_manifest(path, content)
    return parsed_vocabulary(path, content, header.vocab_size, header.document_start)


def parsed_vocabulary(path: Path, content: bytes, vocab_size: int, document_start: int) -> list[bytes]:
    """Bytes of each token from the content of a vocab.txt; path is for the message. Raises DataError.

    A line of the file is "base64 id"; the document start has no line and no bytes.
    """
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            piece, token = line.split()
            pieces[int(token)] = base64.b64decode(piece, validate=True)
        except ValueError:
            raise DataError(f"{path}: line {number}", repr(line[:60]),
                            "base64 bytes, a space, an id",
                            "write the data again, or remove the file: "
                            "bits per byte are then not printed") from None

    ids = range(vocab_size)
    complete = len(pieces) == len(ids) - 1 and all(token in ids for token in pieces)
    if not complete or document_start in pieces:
        raise DataError(f"{path}: ids", f"{len(pieces)} of {vocab_size}",
                        f"all but the document start {document_start}, and no others",
                        "write the data again, or remove the file")
    return [pieces.get(token, b"") for token in ids]


# ====== Room 4: Kernels ===============================================================================================
# References in PyTorch specify each operation on every device; a Triton body stands beside the one it must match.
RMS_EPS = 2.0**-23                       # what the peer's bf16 run uses, here in every dtype
FP8_MAX = 448.0                          # largest e4m3 number
FP8_Y_SCALE = 100 / FP8_MAX              # the three scales of the head: recipe 2.8
FP8_W_SCALE = 1.6 / FP8_MAX
FP8_GRAD_SCALE = 0.75 / FP8_MAX
SHORTEST_BLOCK = 32                      # of queries: shorter ones would cost more in calls than they spare
ADD_ROWS_LINES = 8                       # gradient lines that a program adds at once
SIGN_SEED = 92                           # of the vectors of signs; any number would do
LOGITS_AT_ONCE = 1 << 19                 # in passes of a CPU: they and what is made of them stay in its cache
LOGIT_CAP, LOGIT_SHIFT, LOGIT_WIDTH = 23.0, 5.0, 7.5                          # z = 23 sigmoid((logit + 5) / 7.5)

tl: Any = None                           # triton.language, from the first launch on: only a GPU needs the package


@functools.cache
def jitted(kernel: Callable) -> Any:
    """Return the kernel as Triton compiles it; its body finds `tl` among the names of this file."""
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(kernel)


def custom_op(name: str, *mutates: str) -> Callable:
    """Register a function as a torch custom op; `mutates` names the arguments that it changes in place.

    Compiled graphs hold the op, which is the call's `op`. Eager code calls the body directly and without
    gradients: going through the op would cost 90 microseconds a call.
    """
    def decorate(body: Callable) -> Callable:
        op = torch.library.custom_op(name, body, mutates_args=mutates)

        @functools.wraps(body)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return op(*args)
            with torch.no_grad():
                return body(*args)

        call.op = op
        return call
    return decorate


def first_order(backward: Callable) -> Callable:
    """Refuse create_graph=True: weight gradients are written where autograd does not see them. Raises RunError.

    torch's once_differentiable would take a gradient for a constant where what comes from the loss is one.
    """
    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RunError("a backward", "create_graph=True", "gradients of the first order",
                           "leave it out, or write the function with torch's own operations")
        return backward(ctx, *grads)
    return call


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of accumulators and optimizer state for weights of this dtype: f32, but f64 in an f64 run."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, no gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMS_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (2i, 2i + 1) of the first half of a head by -angle; x (..., E).

    cos and sin (..., E), the sine negated for the second neighbour, the angle 0 in the other half: as wide as a head,
    they cost fewer passes than its parts would.
    """
    neighbours_swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + neighbours_swapped * sin


# ---- Attention
@dataclass(frozen=True)
class AttentionSpan:
    """How far attention looks. Compiled code is made anew for each value of a field that it reads.

    numbers  (3,) f64 on the CPU, the fields: an input of compiled code, which serves any
    """

    max_len: int                         # upper bound of a document's length, in positions
    window: int                          # keys before its own that a query sees at most
    scale: float                         # of the softmax

    def __post_init__(self) -> None:
        numbers = torch.tensor((self.max_len, self.window, self.scale), dtype=torch.float64, device="cpu")
        object.__setattr__(self, "numbers", numbers)          # frozen, so that they never differ from the fields


def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, span: AttentionSpan) -> Tensor:
    """Causal softmax attention inside documents.

    q, k, v     (N, H, E) any float dtype
    cu_seqlens  (C,) i32  ascends from 0 to N, empty documents allowed
    Returns (N, H, E). Cost N * window on any device.
    """
    # With blocks as long as its window, a query sees keys of its own block and of the one before, and no others.
    count, heads, width = q.shape
    keys_back = min(span.window, span.max_len - 1)
    block = min(count, max(keys_back, SHORTEST_BLOCK))
    blocks = -(-count // block)
    fill = blocks * block - count
    queries = F.pad(q, (0, 0, 0, 0, 0, fill)).view(blocks, block, heads, width)
    k_blocks = F.pad(k, (0, 0, 0, 0, block, fill)).view(blocks + 1, block, heads, width)
    v_blocks = F.pad(v, (0, 0, 0, 0, block, fill)).view(blocks + 1, block, heads, width)
    keys = torch.cat((k_blocks[:-1], k_blocks[1:]), dim=1)                    # (blocks, 2 * block, H, E)
    values = torch.cat((v_blocks[:-1], v_blocks[1:]), dim=1)

    # Block 0 has zeros before it: their positions are negative, which index some document and are masked.
    positions = torch.arange(blocks * block, device=q.device)
    document = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    query_at = positions.view(blocks, block, 1)
    key_at = query_at[:, :1] + torch.arange(-block, block, device=q.device)   # (blocks, 1, 2 * block)
    in_window = (key_at <= query_at) & (key_at >= query_at - span.window)
    same_document = document[key_at] == document[query_at]
    seen = (key_at >= 0) & in_window & same_document

    heads_first = [x.transpose(1, 2) for x in (queries, keys, values)]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None], scale=span.scale)
    return out.transpose(1, 2).reshape(blocks * block, heads, width)[:count]


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, span: AttentionSpan) -> Tensor:
    """The same by torch's variable-length kernel (FA2, FA3, FA4): CUDA, bf16 or f16."""
    return Varlen.apply(q, k, v, cu_seqlens, span.numbers)


class Varlen(torch.autograd.Function):
    """torch's varlen attention with window, max length and scale as graph inputs: changing them recompiles nothing."""

    # Through torch's public `varlen_attn` they would be constants, and each stage would have graphs of its own.

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: Tensor) -> Tensor:
        out, logsumexp, generator = varlen(q, k, v, cu_seqlens, numbers)
        ctx.save_for_backward(q, k, v, cu_seqlens, numbers, out, logsumexp, generator)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *varlen_backward(grad, *ctx.saved_tensors), None, None


def torchs_varlen() -> Any:
    """Return torch's operations, which its module registers."""
    importlib.import_module("torch.nn.attention.varlen")
    return torch.ops.torch_attn


def varlen_arguments(cu_seqlens: Tensor, numbers: Tensor) -> dict[str, Any]:
    """Arguments of torch's operations by name. The numbers are on the CPU: reading them waits for nothing."""
    max_len, window, scale = numbers.tolist()
    window_size = [int(window), 0]                            # before and after a query; its left one is inclusive too
    return dict(cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=int(max_len), max_k=int(max_len), is_causal=False,
                scale=scale, window_size=window_size)


@custom_op("train_gpt::varlen")
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, and for the backward: log-sum-exp, state of a generator)"""
    return torchs_varlen()._varlen_attn(q, k, v, **varlen_arguments(cu_seqlens, numbers))


@varlen.op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    any_length = 1
    return torchs_varlen()._varlen_attn(q, k, v, cu_seqlens, cu_seqlens, any_length, any_length)


@custom_op("train_gpt::varlen_backward")
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: Tensor,
                    out: Tensor, logsumexp: Tensor, generator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    arguments = varlen_arguments(cu_seqlens, numbers)
    return torchs_varlen()._varlen_attn_backward(grad, q, k, v, out, logsumexp, rng_state=generator, **arguments)


@varlen_backward.op.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# ---- Products with weights that have a main_grad: the gradient adds up there, and autograd gets None (design 5).
FLAG = "grad_added_to_main_grad"         # set True on a weight that has it, after a write; its hooks see a dummy


class WeightPart(NamedTuple):
    """One matrix of a weight, and where its gradient goes.

    A fork gives a weight (R, C) of its own a main_grad in three lines,
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.writes = torch.zeros(1, dtype=torch.int64)
        y = linear(x, as_part(weight))
    reads it where it updates, and clears it by weight.writes.zero_().
    """

    weight: Tensor                       # the parameter
    matrix: Tensor                       # (R, C), all of it, or a view of a part
    main_grad: Tensor | None = None      # (R, C), the same part of the buffer; None: autograd keeps the gradient
    number: int = 0                      # of the part: its place in weight.writes, (parts,) i64 on the CPU
    delayed: list | None = None          # queue of products that wait for `flush`; the trainer itself delays nothing


def as_part(weight: Tensor, delayed: list | None = None) -> WeightPart:
    """A weight (R, C) that is one matrix; matrices of a bank: bank_parts."""
    return WeightPart(weight, weight, getattr(weight, "main_grad", None), 0, delayed)


def bank_parts(bank: Tensor, heights: tuple[int, ...]) -> list[list[WeightPart]]:
    """By layer, the matrices of a bank (L, ..., C) that stand below each other; heights: of one layer's matrices."""
    shape = (len(bank), sum(heights), bank.shape[-1])
    layers = bank.view(shape).unbind()   # here and not in each layer: where autograd keeps it, one gradient per bank
    main_grad = getattr(bank, "main_grad", None)
    if main_grad is not None:
        main_grad = main_grad.view(shape)                                     # an error unless it is one block
    by_layer = []
    numbers = itertools.count()
    for depth, layer in enumerate(layers):
        wgrads = itertools.repeat(None) if main_grad is None else main_grad[depth].split(heights)
        by_layer.append([WeightPart(bank, *part) for part in zip(layer.split(heights), wgrads, numbers)])
    return by_layer


@custom_op("train_gpt::wgrad_accumulate", "main_grad", "writes")
def wgrad_accumulate(main_grad: Tensor, writes: Tensor, number: int, a: Tensor, b: Tensor | None) -> None:
    """main_grad (+)= a^T b: the first write of a part since its clear overwrites whatever stands there.

    main_grad  (R, C) one matrix of a buffer: f32, f64, or the dtype of a and b; in this dtype it adds
    writes     (parts,) i64 on the CPU: writes of each part since the clear, counted here
    a, b       (N, R), (N, C); b None: a is the product itself, (R, C)
    The count is read on the CPU, so that first and further writes are one graph.
    """
    beta = min(int(writes[number]), 1)                                        # 0: what stands there is not read
    writes[number] += 1
    dtype = main_grad.dtype
    if b is None and beta == 0:
        main_grad.copy_(a)
    elif b is None:
        main_grad.add_(a)
    elif a.dtype == dtype:
        main_grad.addmm_(a.t(), b, beta=beta)
    elif a.is_cuda:                                                           # no copy: the product itself adds in f32
        torch.addmm(main_grad, a.t(), b, out_dtype=dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(a.t().to(dtype), b.to(dtype), beta=beta)


def accumulate_wgrad(part: WeightPart, a: Tensor, b: Tensor | None) -> Tensor | None:
    """Put a^T b, or a if b is None, where the gradient of a part belongs. Returns what backward gives autograd."""
    if part.delayed is not None:
        part.delayed.append((part, a, b, versions_of(a, b)))
    elif part.main_grad is None:
        return a if b is None else a.t() @ b
    else:
        wgrad_accumulate(part.main_grad, part.weight.writes, part.number, a, b)
    # Autograd never gets main_grad or a view of it, for it may keep what it gets as .grad and add to it: so None,
    # or for a weight with FLAG a dummy of its own, so that hooks run.
    if part.main_grad is None or not hasattr(part.weight, FLAG):
        return None
    setattr(part.weight, FLAG, True)
    return torch.zeros_like(part.matrix)


def versions_of(*factors: Tensor | None) -> list[int]:
    """Torch's counts of the changes in place of each factor that is there."""
    return [x._version for x in factors if x is not None]


@torch.no_grad()
def flush(delayed: list) -> None:
    """Compute the delayed gradients in the order of their backwards, into main_grad or else into .grad.

    Raises RunError, before anything is written, if a factor was changed since its backward.
    """
    for part, a, b, versions in delayed:
        if versions_of(a, b) != versions:
            raise RunError(f"a delayed gradient of a weight {tuple(part.matrix.shape)}",
                           "an input or a gradient of the product that was changed in place after its backward",
                           "the values that the backward had", "flush before the change, or change a copy")
    for part, a, b, _ in delayed:
        if part.main_grad is not None:
            wgrad_accumulate(part.main_grad, part.weight.writes, part.number, a, b)
        else:
            wgrad = a if b is None else a.t() @ b
            part.matrix.grad = wgrad if part.matrix.grad is None else part.matrix.grad + wgrad
    delayed.clear()


def wgrad_product(a: Tensor, b: Tensor, main_grad: Tensor | None) -> Tensor:
    """a^T b in the wider dtype of factors and main_grad: an f32 sum of products rounded to bf16 would gain little."""
    dtype = a.dtype if main_grad is None else torch.promote_types(a.dtype, main_grad.dtype)
    if a.dtype == dtype:
        return a.t() @ b
    if a.is_cuda:
        return torch.mm(a.t(), b, out_dtype=dtype)
    return a.t().to(dtype) @ b.to(dtype)


class LinearFunction(torch.autograd.Function):
    """x (scale matrix)^T; scale () or None is learnt too, and the matrix's gradient goes where its part says."""

    @staticmethod
    def forward(ctx, x, scale, matrix, part):
        ctx.save_for_backward(x, scale, matrix)
        ctx.part = part
        weight = matrix if scale is None else scale * matrix
        return F.linear(x, weight)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        x, scale, matrix = ctx.saved_tensors
        weight = matrix if scale is None else scale * matrix
        grad_x = grad @ weight
        a, b = grad.flatten(0, -2), x.flatten(0, -2)
        grad_scale = grad_matrix = None
        if scale is not None:
            product = wgrad_product(a, b, ctx.part.main_grad)                 # a scratch of one matrix
            grad_scale = (product * matrix).sum()
            a, b = scale * product, None
        if ctx.needs_input_grad[2]:                                           # not of a frozen one
            grad_matrix = accumulate_wgrad(ctx.part, a, b)
        return grad_x, grad_scale, grad_matrix, None


def linear(x: Tensor, part: WeightPart, scale: Tensor | None = None) -> Tensor:
    """x (scale matrix)^T, (..., C) -> (..., R)."""
    return LinearFunction.apply(x, scale, part.matrix, part)


# ---- relu^2 MLP: of all that lies between its products only the squares are kept, for their root is max(pre, 0).
# By compute capability: a tile that keeps its sums in registers, and loads under way, forward and backward: as many as
# shared memory takes, some of which the squares need.
RELU_SQ_TILES = {
    (8, 0): (dict(ROWS=128, COLUMNS=128, DEPTH=64, num_warps=8), (3, 3)),
    (9, 0): (dict(ROWS=128, COLUMNS=256, DEPTH=64, num_warps=8), (4, 3)),
    (10, 0): (dict(ROWS=128, COLUMNS=256, DEPTH=64, num_warps=8), (4, 3)),
}
DESCRIBED_BYTES = 16                     # that divide each line of an array with a descriptor

def relu_sq_kernel(x, w, squares, out, count, columns, depth, BACKWARD: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """out = max(x w^T, 0)^2; BACKWARD: 2 (x w^T) sqrt(squares).

    x (count, depth), w (columns, depth), out and squares (count, columns)
    A program goes from tile to tile and loads for the next one while it stores: in two halves, which leaves
    shared memory to the loads. Descriptors count in 64 bits and end at the edges: beyond, they read 0.
    """
    HALF: tl.constexpr = COLUMNS // 2
    x_lines = tl.make_tensor_descriptor(x, [count, depth], [depth, 1], [ROWS, DEPTH])
    w_lines = tl.make_tensor_descriptor(w, [columns, depth], [depth, 1], [COLUMNS, DEPTH])
    squares_lines = tl.make_tensor_descriptor(squares, [count, columns], [columns, 1], [ROWS, HALF])
    out_lines = tl.make_tensor_descriptor(out, [count, columns], [columns, 1], [ROWS, HALF])
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row = tile // across * ROWS
        column = tile % across * COLUMNS
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for at in range(0, depth, DEPTH):
            x_tile = x_lines.load([row, at])
            w_tile = w_lines.load([column, at])
            product = tl.dot(x_tile, w_tile.T, product)
        halves = tl.split(product.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        for half in tl.static_range(2):
            place = column + half * HALF
            if BACKWARD:
                root = tl.sqrt(squares_lines.load([row, place]).to(tl.float32))
                result = 2 * halves[half] * root
            else:
                positive = tl.maximum(halves[half], 0)
                result = positive * positive
            out_lines.store([row, place], result.to(out_lines.dtype))


@torch.library.custom_op("train_gpt::relu_sq", mutates_args=())
def relu_sq(x: Tensor, w: Tensor, squares: Tensor | None) -> Tensor:
    """relu_sq_kernel, where it fits: max(x w^T, 0)^2, or with squares (N, F) its BACKWARD. x (N, K), w (F, K)."""
    triton = importlib.import_module("triton")
    device = x.device
    card = torch.cuda.get_device_properties(device)
    tile, stages = RELU_SQ_TILES[card.major, card.minor]
    count, depth = x.shape
    columns = len(w)
    out = x.new_empty(count, columns)
    backward = squares is not None
    if not backward:
        squares = out                                                         # which forward does not read

    def room_for_descriptors(size: int, alignment: int, stream: int) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    # Capture device, not x: Triton keeps the allocator, which would keep x alive. It is one for each thread, and
    # autograd has a thread of its own.
    triton.set_allocator(room_for_descriptors)
    tiles = triton.cdiv(count, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])
    programs = min(tiles, card.multi_processor_count)
    launch = jitted(relu_sq_kernel)[(programs,)]
    launch(x.contiguous(), w.contiguous(), squares.contiguous(), out, count, columns, depth,
           BACKWARD=backward, num_stages=stages[backward], **tile)
    return out


@relu_sq.register_fake
def _(x: Tensor, w: Tensor, squares: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w))


def fits_relu_sq(x: Tensor, w: Tensor) -> bool:
    """True if relu_sq supports this device, dtype and shape of x (N, K) and w (F, K)."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    for length in (x.shape[1], len(w)):
        if length * x.element_size() % DESCRIBED_BYTES:
            return False
    card = torch.cuda.get_device_properties(x.device)         # which compilers take for a constant
    return (card.major, card.minor) in RELU_SQ_TILES


class ReluSqMLP(torch.autograd.Function):
    """max(n up^T, 0)^2 down; the matrices' gradients go where their parts say."""

    @staticmethod
    def forward(ctx, n, up_matrix, down_matrix, up, down):
        x = n.flatten(0, -2)
        if fits_relu_sq(x, up_matrix):
            squares = relu_sq(x, up_matrix, None)
        else:
            squares = F.linear(x, up_matrix).relu_().square_()
        ctx.save_for_backward(n, squares, up_matrix, down_matrix)
        ctx.up = up
        ctx.down = down
        return (squares @ down_matrix).view_as(n)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        n, squares, up_matrix, down_matrix = ctx.saved_tensors
        grad_y = grad.flatten(0, -2)
        if fits_relu_sq(grad_y, down_matrix):
            grad_pre = relu_sq(grad_y, down_matrix, squares)
        else:
            # The root of 0 takes MKL eight times as long as that of the smallest number, whose root is then taken off.
            smallest = torch.finfo(squares.dtype).tiny
            roots = squares.clamp_min(smallest).sqrt_().sub_(smallest**0.5)
            grad_pre = F.linear(2 * grad_y, down_matrix).mul_(roots)

        # A frozen matrix gets no gradient, and nothing is written to its main_grad.
        grad_n = (grad_pre @ up_matrix).view_as(n)
        grad_up = grad_down = None
        if ctx.needs_input_grad[1]:
            grad_up = accumulate_wgrad(ctx.up, grad_pre, n.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            grad_down = accumulate_wgrad(ctx.down, squares, grad_y)
        return grad_n, grad_up, grad_down, None, None


def relu_sq_mlp(n: Tensor, up: WeightPart, down: WeightPart) -> Tensor:
    """max(n up^T, 0)^2 down. n (..., D), up and down (F, D) as stored (recipe 2.7)."""
    return ReluSqMLP.apply(n, up.matrix, down.matrix, up, down)


# ---- Head and loss
def softcap(logits: Tensor) -> Tensor:
    """Logits between 0 and LOGIT_CAP, any shape and float dtype."""
    return LOGIT_CAP * (logits + LOGIT_SHIFT).mul_(1 / LOGIT_WIDTH).sigmoid_()


def row_chunks(logits: Tensor, *arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split arrays (N, ...), first the logits (N, V), by rows; into one chunk where a compiler fuses the passes."""
    rows = len(logits)
    if not logits.is_cuda and not torch.compiler.is_compiling():
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
    return zip(*(x.split(rows) for x in (logits, *arrays)))


def next_token_losses(y: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Evaluation: -log softmax(softcap(y w))[target], no fp8. y (N, D), w (D, V), targets (N,) -> (N,) f32 or f64."""
    losses = []
    for logits, ids in row_chunks(y @ w, targets[:, None]):
        z = softcap(logits.to(accum_dtype(y.dtype)))
        # No term of the sum overflows, for z lies below LOGIT_CAP: one sweep does, without the rows' largest.
        lse = (z - LOGIT_CAP).exp().sum(dim=-1).log() + LOGIT_CAP
        losses.append(lse - z.gather(1, ids)[:, 0])
    return torch.cat(losses)


def mtp_targets(targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T), (G,) -> ids (N, G) i64 of the next G tokens and their weights (N, G), 0 beyond the slot's end."""
    slots, length = targets.shape
    position = torch.arange(length, device=targets.device)
    ahead = position[:, None] + torch.arange(len(weights), device=targets.device)         # (T, G)
    inside = ahead < length
    next_ids = targets[:, torch.where(inside, ahead, 0)]                      # (B, T, G)
    token_weights = (inside * weights).expand(slots, -1, -1)
    return next_ids.flatten(0, 1), token_weights.flatten(0, 1)


def subtract_one_hot(grad: Tensor, ids: Tensor, token_weights: Tensor) -> Tensor:
    """grad (N, V), less token_weights[k] at ids[k] for each k. In place where nothing compiles it."""
    columns = torch.arange(grad.shape[1], dtype=torch.int32, device=grad.device)
    for column, weight in zip(ids.split(1, dim=1), token_weights.split(1, dim=1)):
        if torch.compiler.is_compiling():                                     # comparisons fuse, a scatter would not
            grad = grad - weight * (columns == column.int())                  # in 32 bits: half the instructions
        else:
            grad.scatter_add_(1, column, -weight)                             # one by one: a row may have an id twice
    return grad


def losses_with_gradient(logits: Tensor, ids: Tensor, token_weights: Tensor, grad: Tensor, factor: float) -> Tensor:
    """logits (N, V), ids and token_weights (N, G) -> sum over k of token_weights[k] * -log softmax(z)[ids[k]], (N,).

    Overwrites grad (N, V), which may be the logits, with factor * LOGIT_WIDTH * dloss/dlogits, computed here because
    the softmax is already available.
    """
    losses = []
    for block, block_ids, block_weights, out in row_chunks(logits, ids, token_weights, grad):
        z = softcap(block.to(token_weights.dtype))
        probability = z.softmax(dim=-1)                                       # above 1e-10 / V, for z is below 23
        nats = -probability.gather(1, block_ids).log()
        losses.append((block_weights * nats).sum(dim=1))
        scaled = factor * block_weights                                       # (N, G): no pass over (N, V) for it
        grad_z = subtract_one_hot(probability.mul_(scaled.sum(dim=1, keepdim=True)), block_ids, scaled)
        slope = torch.addcmul(z, z, z, value=-1 / LOGIT_CAP)                  # z - z^2 / 23: LOGIT_WIDTH dz by dlogit
        torch.mul(grad_z, slope, out=out)
    return torch.cat(losses)


def e4m3(x: Tensor, scale: float) -> Tensor:
    """x / scale, divided in f32 and rounded once; beyond the range it saturates on every version and device."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def f32_scale(value: float, like: Tensor) -> Tensor:
    """A scale rounded to f32 first, held in f64, so that products of scales are rounded once."""
    return torch.full((), value, dtype=torch.float32, device=like.device).double()


def fp8_product(a: Tensor, b: Tensor, scale: Tensor, native: bool, out_dtype: torch.dtype,
                fast: bool = False) -> Tensor:
    """a @ b * scale of fp8 matrices, scale () f64.

    native: the device's fp8 product; else one in out_dtype, which holds fp8 exactly. fast: a shorter accumulator
    """
    if not native:
        return a.to(out_dtype) @ b.to(out_dtype) * scale.to(out_dtype)
    b_in_columns = b.t().contiguous().t()                                     # as the device wants it
    one = torch.ones((), device=a.device)
    by_tensor = F.ScalingType.TensorWise
    return F.scaled_mm(a, b_in_columns, scale.float(), by_tensor, one, by_tensor, output_dtype=out_dtype,
                       use_fast_accum=fast)


class HeadLoss(torch.autograd.Function):
    """Softcapped cross-entropy of the next G tokens, with the head's product inside (recipe 2.8).

    y (N, D), w (D, V), targets (B, T) i64 with B * T = N, weights (G,). Returns each position's loss, (N,) f32 or f64:
        sum over k < G with t + k < T of weights[k] * (lse_t - z_t[targets[t + k]]),  z = 23 sigmoid((y w + 5) / 7.5).
    Targets cross documents and stop at the slot's end; all V columns are in the softmax. With precision "fp8" or
    "emulated", y and w are e4m3 and the gradient of the logits is e5m2 under the scale loss_weight * 0.75 / 448: the
    seed of the backward, loss_weight, moves the scale, never the payload. Any other factor of a position is in the
    payload for w's gradient, and exact for y's.
    """

    @staticmethod
    def forward(ctx, y, w, targets, weights, loss_weight, precision, logits_dtype, part):
        ctx.part = part
        ctx.precision = precision
        ctx.accum_dtype = accum_dtype(y.dtype)
        # What waits for the backward is the gradient of the logits, in their place or, in fp8, in half their bytes.
        if precision == "plain":
            logits = grad = y @ w
            factor = 1.0                                                      # LOGIT_WIDTH is the backward's
        else:
            native = precision == "fp8"
            product_dtype = logits_dtype if native else ctx.accum_dtype
            scale = f32_scale(FP8_Y_SCALE, y) * f32_scale(FP8_W_SCALE, y)
            y = e4m3(y, FP8_Y_SCALE)
            w = e4m3(w, FP8_W_SCALE)
            logits = fp8_product(y, w, scale, native, product_dtype, fast=True).to(logits_dtype)
            grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
            factor = 1 / (LOGIT_WIDTH * FP8_GRAD_SCALE)

        next_ids, token_weights = mtp_targets(targets, weights.to(ctx.accum_dtype))
        losses = losses_with_gradient(logits, next_ids, token_weights, grad, factor)
        ctx.save_for_backward(y, w, grad, loss_weight)
        return losses

    @staticmethod
    @first_order
    def backward(ctx, grad_losses):
        y, w, grad, loss_weight = ctx.saved_tensors
        grad_w = None                                                         # of a frozen head
        if ctx.precision == "plain":
            factor = (grad_losses / LOGIT_WIDTH).to(y.dtype)[:, None]         # each position's own
            grad_y = factor * (grad @ w.t())
            if ctx.needs_input_grad[1]:
                grad_w = accumulate_wgrad(ctx.part, factor * y, grad)
            return grad_y, grad_w, None, None, None, None, None, None

        # The trainer's own factor is 1 in every position. A loss_weight of 0 makes gradients of 0, not of 0 / 0.
        factor = torch.where(loss_weight == 0, 0, grad_losses / loss_weight)[:, None]
        scale = loss_weight.double() * f32_scale(FP8_GRAD_SCALE, y)
        native = ctx.precision == "fp8"
        dtype_y = torch.bfloat16 if native else ctx.accum_dtype
        grad_y = factor.to(dtype_y) * fp8_product(grad, w.t(), scale * f32_scale(FP8_W_SCALE, y), native, dtype_y)
        if ctx.needs_input_grad[1]:
            payload = (factor * grad.to(factor.dtype)).to(grad.dtype)         # part of the copy into columns
            y_in_rows = y.t().contiguous()
            product = fp8_product(y_in_rows, payload, scale * f32_scale(FP8_Y_SCALE, y), native, ctx.accum_dtype)
            grad_w = accumulate_wgrad(ctx.part, product, None)                # it cannot add: a scratch
        return grad_y, grad_w, None, None, None, None, None, None


# ---- Rows of tables
def sign_vectors(width: int) -> Tensor:
    """(SIGN_VECTORS + 1, width) of +1 and -1, drawn from a constant seed, alike for all tables; +1 in the last."""
    generator = torch.Generator().manual_seed(SIGN_SEED)
    drawn = torch.randint(2, (SIGN_VECTORS, width), generator=generator)
    return torch.cat((2 * drawn - 1, torch.ones(1, width, dtype=drawn.dtype)))


def add_rows_kernel(row_grads, rows, order, grad, count, width, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """row_grads[rows[i]] += grad[order[i]] for each i < count; rows ascend, so that those of one row are neighbours.

    One program for each i: that of a row's first line adds all lines of the row, LINES at a time; the others end.
    """
    first = tl.program_id(0)
    row = tl.load(rows + first)
    row_before = tl.load(rows + first - 1, mask=first > 0, other=-1)          # none is -1
    if row != row_before:
        column = tl.arange(0, WIDTH)
        inside = column < width
        target = row_grads + row.to(tl.int64) * width + column                # tables pass 2^31 elements
        total = tl.load(target, mask=inside, other=0)
        at = first
        more = 1
        while more == 1:
            line = at + tl.arange(0, LINES)
            same = tl.load(rows + line, mask=line < count, other=-1) == row
            start = tl.load(order + line, mask=same, other=0) * width
            places = grad + start[:, None] + column[None, :]
            wanted = same[:, None] & inside[None, :]
            part = tl.load(places, mask=wanted, other=0).to(total.dtype)
            total += tl.sum(part, axis=0)
            at = at + LINES
            more = tl.min(same.to(tl.int32), axis=0)                          # all of them: the row may go on
        tl.store(target, total, mask=inside)


@custom_op("train_gpt::add_rows", "row_grads")
def add_rows(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """row_grads[index[i]] += grad[i] in a fixed order.

    row_grads (P, D) f32 or f64, index (...) i32 or i64, grad (..., D)
    """
    index = index.flatten()
    grad = grad.flatten(0, -2)
    if not grad.is_cuda:
        row_grads.index_add_(0, index.long(), grad.to(row_grads.dtype))
        return

    rows, order = index.sort(stable=True)                                     # a row's lines stay in their order
    count, width = grad.shape
    launch = jitted(add_rows_kernel)[(count,)]
    sizes = dict(LINES=ADD_ROWS_LINES, WIDTH=1 << (width - 1).bit_length())   # the next power of 2
    launch(row_grads, rows, order, grad.contiguous(), count, width, **sizes)


class RowLookup(torch.autograd.Function):
    """source[index]. Its gradient adds up in row_grads; autograd gets None, and no dense gradient exists (design 5)."""

    @staticmethod
    def forward(ctx, source, index, row_grads):
        ctx.save_for_backward(index)
        ctx.row_grads = row_grads
        return F.embedding(index, source)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        add_rows(ctx.row_grads, index, grad)
        return None, None, None


# ====== Room 5: Model =================================================================================================
class Parameter(NamedTuple):
    """One row of the parameter table: all about a parameter but its place in the forward pass."""

    label: str
    shape: tuple[int, ...]
    init: Callable[[torch.Generator, tuple[int, ...]], Tensor]                # draws f32, in logical order
    optimizer: str                       # "normuon" for banks of matrices, "adam", or "rowwise": room 6 keeps its rows
    sharded: bool                        # updated by the owners of its rows or matrices, or by every rank alike
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    parts: tuple[int, ...] = ()          # heights of a layer's matrices in its main_grad; (): autograd's gradient
    full_precision: bool = False         # f32 where the weights are bf16
    rows: Table | None = None            # of an embedding whose rows travel one by one


SCALARS = {                              # name -> initial value of each of the packed scalars (recipe 2.6)
    "residual": (1.1,) * len(LAYERS),
    "attention": (0.5, 1.0) * len(LAYERS),                                    # of q, k, v and of the output
    "bigram": (0.1,) * len(LAYERS),
    "smear": (0.0,),
    "backout": (0.5,),
    "skip": (-1.5,),
}
NGRAM_MIX = 0.1                          # initial share of a table of n-grams in the residual stream of each layer
MLP_FACTOR = 4                           # F / D
UP_AND_DOWN = 2                          # matrices of one MLP
QKVO = 4                                 # matrices of one attention layer, below each other
QKV = 3                                  # of them, those before the attention


def normal(std: float, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator) * std


def uniform(bound: float, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def up_uniform(bound: float, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values of the MLP bank. Its down matrices are zero, so that every MLP starts as nothing."""
    layers, _, *rest = shape
    up = uniform(bound, generator, (layers, 1, *rest))
    return torch.cat((up, torch.zeros_like(up)), dim=1)


def constant(values: Sequence[float], _: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return these values, or the one value everywhere."""
    return torch.tensor(values).expand(shape)


def scalar_values(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Initial values of the packed scalars by name, n-gram tables that enter the residual stream after recipe A's."""
    streams = {line.label: (NGRAM_MIX,) * len(LAYERS) for line in ngram_tables(cfg) if line.enters is None}
    return SCALARS | streams


def parameter_table(cfg: Config) -> tuple[Parameter, ...]:
    """Label, shape, initial value, optimizer, multipliers (recipe 2.1, 2.6, 3.5)."""
    # The sizes that shapes are made of.
    D, H, V = cfg.model_dim, cfg.num_heads, cfg.padded_vocab
    L, A, inside = len(LAYERS), len(ATTENTION_LAYERS), MLP_FACTOR * cfg.model_dim
    ngrams = ngram_tables(cfg)
    value_gates = NUM_VALUE_TABLES + sum(line.enters is not None for line in ngrams)
    bigrams, values, embed, *ngram_rows = row_tables(cfg)
    scalars = sum(scalar_values(cfg).values(), ())

    # What several rows of the table have in common.
    zeros = functools.partial(constant, [0.0])
    bound = 3**0.5 * 0.5 * D**-0.5                                            # a standard deviation of 0.5 / sqrt(D)
    bank = dict(optimizer="normuon", sharded=True)
    small = dict(optimizer="adam", sharded=False)
    exact = dict(**small, lr_mul=5, wd_mul=0, full_precision=True)
    table = dict(optimizer="adam", sharded=True, lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    head = dict(optimizer="adam", sharded=True, lr_mul=1, wd_mul=150, betas=(0.5, 0.95))
    by_recipe = (
        Parameter("attn", (A, QKVO * D, D), functools.partial(uniform, bound), **bank, parts=(QKV * D, D)),
        Parameter("mlp", (L, UP_AND_DOWN, inside, D), functools.partial(up_uniform, bound), **bank,
                  parts=(inside, inside)),
        Parameter("scalars", (len(scalars),), functools.partial(constant, scalars), **exact),
        Parameter("x0_lambdas", (L,), zeros, **exact, betas=(0.65, 0.95)),
        Parameter("smear_gate", (1, GATE_INPUTS), zeros, **small, lr_mul=0.01, wd_mul=0),
        Parameter("skip_gate", (1, GATE_INPUTS), zeros, **small, lr_mul=0.05, wd_mul=0),
        Parameter("attn_gate_bank", (A, H, GATE_INPUTS), zeros, **small),
        Parameter("ve_gate_bank", (value_gates, H, GATE_INPUTS), zeros, **small),
        Parameter("bigram_embed", (bigrams.rows, D), zeros, **table, rows=bigrams),
        Parameter("value_embed", (values.rows, D), functools.partial(normal, 0.01), **table, rows=values),
        Parameter("lm_head", (D, V), functools.partial(normal, 0.005), **head, parts=(D,)),
        Parameter("embed", (embed.rows, D), zeros, **head, rows=embed),       # lm_head^T while they are tied
    )
    by_ngram = []
    for line, rows in zip(ngrams, ngram_rows):
        beta1 = 0.75 if line.rule == "adam" else 0.0                          # rule rowwise has no first moment
        by_ngram.append(Parameter(line.label, (line.rows, D), zeros, line.rule, True, line.lr_mul, line.wd_mul,
                                  (beta1, line.beta2), rows=rows))
    return (*by_recipe, *by_ngram)


AttentionSpans = dict[tuple[str, str], AttentionSpan]                         # by attention and window of a layer


def spans_of(short: int, long: int, max_len: int, scale: float) -> AttentionSpans:
    """Spans of every kind of layer; windows in positions, max_len in tokens, of which paired layers make two each."""
    spans = {}
    for attention, per_token in (("plain", 1), ("paired", 2)):
        for name, window in (("short", short), ("long", long)):
            spans[attention, name] = AttentionSpan(per_token * max_len, window, scale)
    return spans


class GPT(nn.Module):
    """Recipe A, section 2. Knows shapes, not ranks. Parameters carry the labels of the parameter table."""

    def __init__(self, cfg: Config, attention: Callable, rotary_len: int, shard_rows: dict[str, int]) -> None:
        """rotary_len: the longest slot in tokens. shard_rows: rows that this rank keeps, by label of a table."""
        super().__init__()
        self.heads = cfg.num_heads
        self.head_dim = cfg.head_dim
        self.attention = attention
        # Rows of row-wise tables are no parameters: room 6 keeps them and hands them to `losses` as row buffers.
        self.table = {row.label: row for row in parameter_table(cfg) if row.optimizer != "rowwise"}
        self.scalar_sizes = {name: len(values) for name, values in scalar_values(cfg).items()}
        self.ngrams = ngram_tables(cfg)

        dtype = getattr(torch, cfg.dtype)
        for label, row in self.table.items():
            rows, *rest = row.shape
            row_dtype = accum_dtype(dtype) if row.full_precision else dtype
            weight = torch.empty((shard_rows.get(label, rows), *rest), dtype=row_dtype)
            self.register_parameter(label, nn.Parameter(weight))

        if any(line.signs for line in self.ngrams):
            self.register_buffer("sign_vectors", sign_vectors(cfg.model_dim).to(dtype), persistent=False)
        for name in ("rotary_cos", "rotary_sin"):                             # paired layers have 2T positions
            self.register_buffer(name, torch.zeros(2 * rotary_len, cfg.head_dim, dtype=dtype), persistent=False)
        self.turning: dict[tuple[float, ...], Tensor] = {}    # angle per position of each channel, by frequencies

    @torch.no_grad()
    def set_initial_values(self, seed: int, shard: Callable[[str, Tensor], Tensor]) -> None:
        """Draw all parameters, each label from its own generator, whose seed comes from (seed, label).

        All but f32 rows pass through bf16: the same numbers in any dtype.
        shard: (label, whole parameter) -> the part that is here
        """
        for label, row in self.table.items():
            digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
            own_seed = int.from_bytes(digest[:8], "little", signed=True)
            generator = torch.Generator().manual_seed(own_seed)
            drawn = shard(label, row.init(generator, row.shape))
            if not row.full_precision:
                drawn = drawn.bfloat16()
            self.get_parameter(label).copy_(drawn)
        self.embed.copy_(shard("embed", self.lm_head.t()))

    @torch.no_grad()
    def set_rotary(self, frequencies: tuple[float, ...]) -> None:
        """Refill cos and sin of position * frequency in place; angles in f32 (f64 in an f64 run)."""
        dtype = accum_dtype(self.rotary_cos.dtype)
        device = self.rotary_cos.device
        # Frequencies come from the host once, in the warm-up: a copy at the first step of a stage would wait.
        if frequencies not in self.turning:
            per_position = torch.tensor(frequencies, dtype=dtype, device=device)
            # Neighbours turn by the same angle, negated for the second; the other half of the channels by 0.
            neighbours = torch.stack((per_position, -per_position), dim=-1).flatten()
            self.turning[frequencies] = F.pad(neighbours, (0, len(neighbours)))
        positions = torch.arange(len(self.rotary_cos), dtype=dtype, device=device)
        angles = torch.outer(positions, self.turning[frequencies])
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())

    def losses(self, batch: Batch, weights: Tensor, loss_weight: Tensor, spans: AttentionSpans, precision: str,
               row_buffers: dict) -> Tensor:
        """Loss of each position, (B, T); weights (G,) of the next tokens, loss_weight () seeds the backward."""
        y = self.hidden(batch, spans, row_buffers).flatten(0, 1)
        in_bf16 = precision != "plain" and y.dtype != torch.float64
        logits_dtype = torch.bfloat16 if in_bf16 else y.dtype
        losses = HeadLoss.apply(
            y, self.lm_head, batch.targets, weights, loss_weight, precision, logits_dtype, as_part(self.lm_head))
        return losses.view(batch.targets.shape)

    def hidden(self, batch: Batch, spans: AttentionSpans, row_buffers: dict) -> Tensor:
        """The normalised stream that enters the head, (B, T, D).

        row_buffers: label of a table -> (rows to read, f32 or f64 sums of their gradients or None)
        """
        # All that the layers share is taken apart once: each access would cost the backward a pass of its own.
        scalars = dict(zip(self.scalar_sizes, self.scalars.split(list(self.scalar_sizes.values()))))
        residual = scalars["residual"].unbind()
        attention_scales = scalars["attention"].unbind()
        x0_lambdas = self.x0_lambdas.unbind()
        attn = bank_parts(self.attn, self.table["attn"].parts)
        mlp = bank_parts(self.mlp, self.table["mlp"].parts)

        # The slots of a micro-batch form one sequence, so bounds of documents count on from slot to slot.
        slots, length = batch.tokens.shape
        starts = torch.arange(slots, device=batch.tokens.device, dtype=torch.int32) * length
        cu_seqlens = (batch.cu_seqlens + starts[:, None]).flatten()           # what fills a row is the next one's start

        x0, streams, values = self.inputs(batch, scalars, row_buffers)
        x = x0
        kept: dict[str, Tensor] = {}             # name -> stream after the layer that keeps it
        for depth, layer in enumerate(LAYERS):
            # A kept stream joins before the mix, which scales it too.
            if layer.add:
                gate = 2 * gate_of(x0[..., :GATE_INPUTS], self.skip_gate)
                x = x + torch.sigmoid(scalars["skip"]).type_as(x) * gate * kept[layer.add]
            x = residual[depth] * x + x0_lambdas[depth] * x0
            for shares, rows in streams:
                x = x + shares[depth] * rows

            # A gate per head can close what attention found before it joins the stream.
            if layer.attention != "none":
                at = ATTENTION_LAYERS.index(depth)                            # its place in the banks of attention
                w_qkv, w_out = attn[at]
                scale_in, scale_out = attention_scales[2 * depth:2 * depth + 2]
                n = rms_norm(x)
                qkv = linear(n, w_qkv, scale_in)
                span = spans[layer.attention, layer.window]
                y = self.attend(layer, n, qkv, values.get(depth, ()), cu_seqlens, span)
                y = y * gate_of(n[..., :GATE_INPUTS], self.attn_gate_bank[at])[..., None]
                x = x + linear(y.flatten(2), w_out, scale_out)

            x = x + relu_sq_mlp(rms_norm(x), *mlp[depth])
            if layer.keep_as:
                kept[layer.keep_as] = x

        # A learnt share of what an earlier layer kept is taken back: the head sees what the later ones found.
        return rms_norm(x - scalars["backout"].type_as(x) * kept[BACKOUT])

    def inputs(self, batch: Batch, scalars: dict[str, Tensor], row_buffers: dict) -> tuple[Tensor, list, dict]:
        """Read the tables: all that enters the layers, rows (B, T, D) each.

        x0       the normalised embedding, where the residual stream begins
        streams  (share by layer, rows) of what every layer mixes in: bigrams, then tables of n-grams
        values   depth -> [(place of the gate, rows)] of what joins the attention values of a layer
        """
        # Each token's embedding gets a gated share of the one before it in the slot, over documents.
        e, = self.rows_of("embed", batch, row_buffers)
        gate = scalars["smear"].type_as(e) * gate_of(e[:, 1:, :GATE_INPUTS], self.smear_gate)
        smeared = torch.cat((e[:, :1], e[:, 1:] + gate * e[:, :-1]), dim=1)
        x0 = rms_norm(smeared)
        streams = [(scalars["bigram"].unbind(), *self.rows_of("bigram_embed", batch, row_buffers))]
        value_rows = self.rows_of("value_embed", batch, row_buffers)
        values: dict[int, list] = {}
        for depth, layer in enumerate(LAYERS):
            if layer.value is not None:
                values[depth] = [(layer.value, value_rows[layer.value])]

        # Gates of n-gram tables come after those of the value tables, in the order of the tables.
        gate = NUM_VALUE_TABLES
        for line in self.ngrams:
            rows, = self.rows_of(line.label, batch, row_buffers)
            if line.signs:
                rows = rows * F.embedding(batch.signs[line.label], self.sign_vectors)
            if line.enters is None:
                streams.append((scalars[line.label].unbind(), rows))
            else:
                values.setdefault(line.enters, []).append((gate, rows))
                gate += 1
        return x0, streams, values

    def rows_of(self, label: str, batch: Batch, row_buffers: dict) -> list[Tensor]:
        """Rows of a table by the batch's index (B, T) or (B, reads, T), one (B, T, D) per read."""
        index = batch.rows[label]
        # A lookup for each read: its gradient goes to the row gradients as it comes up, and is stacked with no other.
        planes = index.unbind(1) if index.dim() == 3 else [index]
        rows, row_grads = row_buffers[label]
        return [RowLookup.apply(rows, plane, row_grads) for plane in planes]

    def attend(self, layer: Layer, n: Tensor, qkv: Tensor, value_rows: Sequence[tuple[int, Tensor]],
               cu_seqlens: Tensor, span: AttentionSpan) -> Tensor:
        """Attention of one layer before its gate and output matrix, qkv (B, T, 3D) of n (B, T, D) -> (B, T, H, E).

        value_rows: (place of the gate, rows (B, T, D)) that join the values. Positions count in the slot (recipe 2.4).
        """
        slots, length, _ = n.shape
        q, k, v = qkv.view(slots, length, QKV, self.heads, self.head_dim).unbind(2)
        q = rms_norm(q)
        k = rms_norm(k)
        # A gate from 0 to 2 for each head's rows. Plain layers look at the row too, paired ones do not.
        for place, rows in value_rows:
            features = n[..., :GATE_INPUTS]
            if layer.attention == "plain":
                half = GATE_INPUTS // 2
                features = torch.cat((n[..., :half], rows[..., :half]), dim=-1)
            gate = 2 * gate_of(features, self.ve_gate_bank[place])
            v = v + gate[..., None] * rows.view(v.shape)
        if layer.attention == "paired":
            return self.attend_paired(q, k, v, cu_seqlens, span)

        cos = self.rotary_cos[:length, None]                                  # (T, 1, E), for every head
        sin = self.rotary_sin[:length, None]
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        # The half of a key that does not rotate is that of the token before, in its document or not.
        if layer.key_shift:
            turning, still = k.chunk(2, dim=-1)
            shifted = torch.cat((still[:, :1], still[:, :-1]), dim=1)         # a slot's first token keeps its own
            k = torch.cat((turning, shifted), dim=-1)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return self.attention(*flat, cu_seqlens, span).view(v.shape)

    def attend_paired(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, span: AttentionSpan) -> Tensor:
        """q, k, v (B, T, H, E) -> (B, T, H, E); heads j and j + H/2 of token t stand at 2t and 2t + 1 of one sequence.

        The angles follow another pairing, even heads at 2t and odd heads at 2t + 1: the peer assigns them before it
        regroups, and its published losses contain that (recipe 9.1). The span counts positions.
        """
        slots, length, heads, width = q.shape
        positions = 2 * length
        cos = self.rotary_cos[:positions].view(length, 1, 2, -1)              # of the places 2t and 2t + 1
        sin = self.rotary_sin[:positions].view(length, 1, 2, -1)
        neighbours = (slots, length, heads // 2, 2, width)
        q = rotate(q.view(neighbours), cos, sin)
        k = rotate(k.view(neighbours), cos, sin)

        sequence = (slots * positions, heads // 2, width)                     # the lower half of the heads, the upper
        flat = [x.reshape(sequence) for x in (q, k, v)]
        return self.attention(*flat, 2 * cu_seqlens, span).view(slots, length, heads, width)


def gate_of(features: Tensor, weight: Tensor) -> Tensor:
    """Shares between 0 and 1: features (..., GATE_INPUTS), weight (heads, GATE_INPUTS) -> (..., heads)."""
    return torch.sigmoid(F.linear(features, weight))


# ====== Room 6: Rows ==================================================================================================
# A plan's rows_i_read serve both directions: owner to reader in front of a cycle, reader to owner behind it (design 4).
LIST_FACTS = ("purpose", "cycle", "tokens", "dtype", "table", "rows", "checksum")         # i64 words ahead of a list
ROWS, CHECKSUM = -2, -1                  # of one list alone; the facts in front of them are alike on all ranks


def exchange_plans(fabric: Fabric, group: Any, dtype: str, plans: dict[str, TablePlan]) -> None:
    """Tell every owner which of its rows this rank reads, and learn what all ranks ask of this one.

    The facts of all lists travel in one collective, the lists themselves in another. Raises
    FabricError where ranks disagree.
    """
    W = fabric.world
    words = [common_words(label, plan, dtype) for label, plan in plans.items()]
    facts, leaving = facts_and_lists(W, words, list(plans.values()))
    my_facts = torch.tensor(facts).view(W, len(plans), len(LIST_FACTS))       # (owner, table, fact)
    their_facts = torch.empty_like(my_facts)                                  # (reader, table, fact)
    dist.all_to_all_single(their_facts, my_facts, group=group)
    check_agreement_of_plans(fabric, words, my_facts, their_facts)

    counts_i_ask = my_facts[:, :, ROWS]                                       # (owner, table)
    counts_asked_of_me = their_facts[:, :, ROWS]                              # (reader, table)
    arriving = torch.empty(int(counts_asked_of_me.sum()), dtype=torch.int32)
    dist.all_to_all_single(arriving, torch.cat(leaving), counts_asked_of_me.sum(1).tolist(),
                           counts_i_ask.sum(1).tolist(), group=group)

    lists = arriving.split(counts_asked_of_me.flatten().tolist())             # reader by reader, and by table in each
    for table, (label, plan) in enumerate(plans.items()):
        lists_by_reader = lists[table::len(plans)]
        for reader, places in enumerate(lists_by_reader):
            check_asked_places(label, plan, reader, places, their_facts[reader, table, CHECKSUM])
        if not plan.tied:
            plan.rows_asked_of_me = torch.cat(lists_by_reader).long()
            plan.counts_by_reader = [len(places) for places in lists_by_reader]
            count_list_bytes(fabric, plan, my_facts.element_size(), arriving.element_size())


def common_words(label: str, plan: TablePlan, dtype: str) -> list[int | str]:
    """The facts of a table's lists that have to be alike on all ranks, in the order of LIST_FACTS."""
    source = f"{label} of the head" if plan.tied else label
    words = dict(plan.tag, dtype=dtype, table=source)
    return [words[name] for name in LIST_FACTS[:ROWS]]


def facts_and_lists(world: int, words: list[list[int | str]],
                    plans: list[TablePlan]) -> tuple[list[list[int]], list[Tensor]]:
    """What this rank says of its lists, and the lists: owner by owner, and table by table for each."""
    lists_by_table = [places_by_owner(plan) for plan in plans]                # and by owner in each
    facts, lists = [], []
    for owner in range(world):
        for words_of_table, lists_of_table in zip(words, lists_by_table):
            places = lists_of_table[owner]
            common = [as_number(word) for word in words_of_table]
            facts.append([*common, len(places), int(places.sum())])
            lists.append(places)
    return facts, lists


def places_by_owner(plan: TablePlan) -> Sequence[Tensor]:
    """The rows that this rank reads as i32 places in the slices of their owners, a list for each owner."""
    if plan.tied:                                                             # nothing is asked of anyone
        nothing = torch.empty(0, dtype=torch.int32)
        return [nothing] * len(plan.counts_by_owner)
    places = (plan.rows_i_read % plan.size).astype(np.int32)
    return torch.from_numpy(places).split(plan.counts_by_owner)


def as_number(word: int | str) -> int:
    """Text travels as its checksum."""
    return word if isinstance(word, int) else zlib.crc32(word.encode())


def check_agreement_of_plans(fabric: Fabric, words: list[list[int | str]], my_facts: Tensor,
                             their_facts: Tensor) -> None:
    """Raise FabricError if another rank is at another cycle, or has other tokens, dtypes or tables."""
    unequal = (their_facts != my_facts)[:, :, :ROWS].nonzero().tolist()
    if unequal:
        reader, table, fact = unequal[0]
        name = LIST_FACTS[fact]
        there = int(their_facts[reader, table, fact])
        here = words[table][fact]
        raise FabricError(f"row plans of ranks {reader} and {fabric.rank}", {name: there}, {name: here},
                          "use the same flags")


def check_asked_places(label: str, plan: TablePlan, reader: int, places: Tensor, checksum: Tensor) -> None:
    """Raise FabricError unless a reader's list is one that a plan can hold, and the one it announced."""
    if len(places) == 0:
        return
    inside = places[0] >= 0 and places[-1] < plan.size
    ascending = (places.diff() >= 1).all()
    if not inside or not ascending or places.sum() != checksum:
        raise FabricError(f"rows of {label} that rank {reader} asks for",
                          f"{len(places)} from {places[0]} to {places[-1]}",
                          f"ascending places below {plan.size}, as announced", "report it: a plan is wrong")


def count_list_bytes(fabric: Fabric, plan: TablePlan, fact_bytes: int, place_bytes: int) -> None:
    """Note what the exchange of a plan has cost: the facts and the lists of all ranks but this one."""
    of_facts = (fabric.world - 1) * len(LIST_FACTS) * fact_bytes
    asked_elsewhere = len(plan.rows_i_read) - plan.counts_by_owner[fabric.rank]
    asked_from_elsewhere = len(plan.rows_asked_of_me) - plan.counts_by_reader[fabric.rank]
    plan.sent += of_facts + asked_elsewhere * place_bytes
    plan.received += of_facts + asked_from_elsewhere * place_bytes


def row_bytes(rows: Tensor) -> int:
    """Bytes of one row of (count, D), also where count is 0."""
    return rows.shape[1] * rows.element_size()


def already_here() -> None:
    """The wait for what needs none."""


# Bytes are counted where a collective is launched: what goes to other ranks and comes from them.
def launch_lists(fabric: Fabric, plan: TablePlan, out: Tensor, rows: Tensor, counts_in: list[int],
                 counts_out: list[int]) -> Any:
    """Launch a list of rows from each rank to each, empty ones too. Counts of rows are by rank."""
    me = fabric.rank
    plan.received += (sum(counts_in) - counts_in[me]) * row_bytes(out)
    plan.sent += (sum(counts_out) - counts_out[me]) * row_bytes(rows)
    return dist.all_to_all_single(out, rows, counts_in, counts_out, async_op=True)


def inside_another_cycle(table: Table, opened: TablePlan, plan: TablePlan) -> RunError:
    return RunError(f"gradients of {table.label}", f"of {opened.tag}, now {plan.tag}", "batches of one cycle",
                    "optim_step on its last step first")


class TableRows:
    """One table on one rank: the slice it owns, a cache of the rows it reads, the gradients of both.

    sparse: cache and sums hold the plan's rows, in its order. sparse_scatter: they hold all rows, in
    physical order, but only the plan's gradients travel. dense: they hold all rows, and all
    gradients travel. One rank: the cache is the table, and the sums are its gradient.
    """

    def __init__(self, table: Table, cfg: Config, fabric: Fabric, mine: Tensor, most_tokens: int,
                 report: Callable) -> None:
        """mine (C, D): the slice, a parameter. most_tokens: read by a rank in a cycle; the buffers never grow.

        report(**account) is called when the account of a plan is closed.
        """
        self.table = table
        self.fabric = fabric
        self.report = report
        self.mode = cfg.row_comms
        self.debug = cfg.debug_rows
        self.listed = keeps_rows_by_list(table, cfg, fabric)                  # cache and sums in the plan's order

        size, width = mine.shape
        exact = accum_dtype(mine.dtype)
        self.mine = mine
        self.grad = mine.new_zeros(size, width, dtype=exact)                  # of the slice, summed over ranks
        if fabric.world == 1:
            self.cache = mine
            self.sums = self.grad
        else:
            count = fabric.world * size
            if self.listed:
                count = min(count, most_tokens * table.reads)
            self.cache = mine.new_zeros(count, width).requires_grad_()
            self.sums = self.grad.new_zeros(count, width)                     # of the rows in the cache, on this rank
        self.fetching = None                                                  # work that fills the cache, if under way
        self.reset()

    def reset(self) -> None:
        """Nothing cached, no gradients, no bytes counted."""
        self._settle()
        self.cached = None                                                    # the plan whose rows are in the cache
        self.open_plans = []                                                  # with gradients in the sums; one if W > 1
        self.totals = dict(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.sums.zero_()
        self.grad.zero_()

    def _settle(self) -> None:
        """Wait for what is on its way into the cache."""
        if self.fetching is not None:
            self.fetching.wait()
        self.fetching = None

    def _in_cache(self, plan: TablePlan) -> Tensor | slice:
        """Index of the plan's rows in the cache and in the sums."""
        if self.listed:
            return slice(len(plan.rows_i_read))
        return plan.rows_i_read

    def _launch_slices(self, plan: TablePlan, collective: Callable, out: Tensor, rows: Tensor) -> Any:
        """Launch a whole slice to, and from, each other rank."""
        rows_of_others = (self.fabric.world - 1) * len(self.mine)
        plan.received += rows_of_others * row_bytes(out)
        plan.sent += rows_of_others * row_bytes(rows)
        return collective(out, rows, async_op=True)

    @torch.no_grad()
    def _bring(self, plan: TablePlan, out: Tensor, head: Tensor) -> Any:
        """Launch the plan's rows into `out`, or all rows where there is no list; tied ones are columns of the head.

        Returns the work to wait for, or None where there is none. The plan's lists move to the device.
        """
        def on_device(rows: Tensor) -> Tensor:
            return rows.to(self.mine.device, non_blocking=True)

        plan.change_lists(on_device)
        if self.fabric.world == 1:
            return None
        if self.debug:
            out.fill_(math.nan)                                               # rows of no plan are not to be read
        if plan.tied:
            out[self._in_cache(plan)] = head.t()[plan.head_columns]
            return None
        if not self.listed:
            return self._launch_slices(plan, dist.all_gather_into_tensor, out, self.mine.detach())
        arriving = out[self._in_cache(plan)]
        leaving = self.mine[plan.rows_asked_of_me]
        return launch_lists(self.fabric, plan, arriving, leaving, plan.counts_by_owner, plan.counts_by_reader)

    def fetch(self, plan: TablePlan, head: Tensor) -> None:
        """Launch the rows of a cycle into the cache: after the owners' update, never before."""
        self._settle()
        self.cached = plan
        self.fetching = self._bring(plan, self.cache.detach(), head)

    def ready(self, plan: TablePlan, head: Tensor) -> tuple[Tensor, Tensor]:
        """The cache with the plan's rows, and the sums for their gradients.

        Raises RunError inside another cycle.
        """
        if plan not in self.open_plans:
            if self.open_plans and self.fabric.world > 1:
                raise inside_another_cycle(self.table, self.open_plans[0], plan)
            self.open_plans.append(plan)
        if self.cached is not plan:
            self.fetch(plan, head)
        self._settle()
        return self.cache, self.sums

    def read(self, plan: TablePlan, head: Tensor) -> tuple[Tensor, None]:
        """Rows for another reader than training, in a tensor of their own, and None for sums: no gradients come."""
        out = self.mine
        if self.fabric.world > 1:
            count = len(plan.rows_i_read) if self.listed else len(self.cache)
            out = self.mine.new_empty(count, self.mine.shape[1])
        work = self._bring(plan, out, head)
        if work is not None:
            work.wait()
        self.account(plan)
        return out, None

    def return_gradients(self) -> tuple[Tensor, Callable[[], None]]:
        """Launch gradients to their owners.

        Returns the gradient of the slice, whole after the wait that comes with it.
        """
        if self.fabric.world == 1:
            return self.grad, already_here
        plan, = self.open_plans
        if self.mode == "dense":
            return self.grad, self._return_slices(plan)
        return self.grad, self._return_lists(plan)

    def _return_slices(self, plan: TablePlan) -> Callable[[], None]:
        """Launch the gradients of all rows. Returns the wait that leaves their sum over ranks in self.grad."""
        rows = self.sums.to(self.mine.dtype)                                  # on the wire: the type of the weights
        arrived = rows.new_empty(self.grad.shape)
        work = self._launch_slices(plan, dist.reduce_scatter_tensor, arrived, rows)

        def take_sum() -> None:
            work.wait()
            self.grad.copy_(arrived)

        return take_sum

    def _return_lists(self, plan: TablePlan) -> Callable[[], None]:
        """Launch the gradients of the plan's rows. Returns the wait that adds them to self.grad in rank order."""
        rows = self.sums[self._in_cache(plan)].to(self.mine.dtype)            # on the wire: the type of the weights
        arrived = rows.new_empty(len(plan.rows_asked_of_me), rows.shape[1])
        work = launch_lists(self.fabric, plan, arrived, rows, plan.counts_by_reader, plan.counts_by_owner)

        def add_in_rank_order() -> None:
            work.wait()
            add_rows(self.grad, plan.rows_asked_of_me, arrived)               # reader by reader

        return add_in_rank_order

    def add_to_head(self, head_grad: Tensor) -> None:
        """While tied: this rank's gradients join those of the head, (D, V)."""
        for plan in self.open_plans:
            index = self._in_cache(plan)
            head_grad[:, plan.head_columns] += self.sums[index].t().to(head_grad.dtype)
            self.sums[index] = 0                                              # rows of several plans count once
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the open plans, row by row, and what is cached."""
        for plan in self.open_plans:
            self.sums[self._in_cache(plan)] = 0
            if self.fabric.world > 1 and not plan.tied:
                self._clear_slice(plan)
            self.account(plan, dense_passes=2)                                # rows out, gradients back
        self.open_plans = []
        self.cached = None
        if self.debug and (self.sums.any() or self.grad.any()):
            raise RunError(f"gradients of {self.table.label}", "some in rows of no plan", "none", "report it")

    def _clear_slice(self, plan: TablePlan) -> None:
        if self.mode == "dense":
            self.grad.zero_()
        else:
            self.grad[plan.rows_asked_of_me] = 0

    def account(self, plan: TablePlan, dense_passes: int = 0) -> None:
        """Close the account of a plan. dense_passes: how often training in dense mode would have sent the table."""
        purpose = plan.tag["purpose"]
        if plan.tied or purpose not in ("train", "validation"):
            return
        bytes_dense = dense_passes * (self.fabric.world - 1) * self.mine.nbytes
        moved = dict(bytes_sent=plan.sent, bytes_received=plan.received, bytes_dense=bytes_dense)
        self.report(**plan.tag, table=self.table.label, mode=self.mode, rows=len(plan.rows_i_read), **moved,
                    plan_ms=round(plan.plan_ms, 3))
        if purpose == "train":
            for key, count in moved.items():
                self.totals[key] += count


    def memory_bytes(self, moments: Iterable[Tensor]) -> int:
        """Of all that this rank keeps of the table, with these moments."""
        kept = (self.mine, self.cache, self.grad, self.sums, *moments)
        sizes = {x.data_ptr(): x.nbytes for x in kept}                        # some may be the same
        return sum(sizes.values())


# ---- Tables of rule "rowwise": any number of rows, of which an event touches those that were asked for (tables.md).
class Live(NamedTuple):
    """Rows of an owner's slice with their state, as many as the n places that they were asked for by."""

    rows: Tensor                         # (n, D)
    v: Tensor                            # (n,) f32 or f64: second moment
    last: Tensor                         # (n,) i32: the event that touched the row last; 0: none

    def at(self, places: Tensor) -> Live:
        return Live(*(x.index_select(0, places) for x in self))

    def put(self, places: Tensor, live: Live) -> None:
        for mine, x in zip(self, live):
            mine.index_copy_(0, places, x)

    def to(self, device: torch.device) -> Live:
        return Live(*(x.to(device, non_blocking=True) for x in self))


MAP_NORESERVE = 0x4000                   # of Linux on x86 and ARM; Python has the name since 3.13
PIECE_ROWS = 1 << 14                     # rows of a rank that are copied, or sent to another rank for a file, at a time
PIECE_BYTES = 1 << 27                    # of the rows and their state in one file
SCANNED_ROWS = 1 << 22                   # that are looked at together for those that were touched


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host that take memory page by page, when they are first written.

    An anonymous mapping that reserves nothing, with small pages: a plain one of 38 GB is refused on a machine of 24,
    and a row in a huge page would take 2 MB. Raises RunError.
    """
    count = math.prod(shape)
    if count == 0 or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    size = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
        with contextlib.suppress(OSError):                    # a system without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise RunError("memory for a table", reason_of(error), f"an address space with {size / 2**30:.1f} GiB to map",
                       "fewer rows, more ranks, or a larger limit (ulimit -v)") from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class DeviceHome:
    """Rows and state of an owner's slice beside the model."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, cfg: Config, fabric: Fabric) -> None:
        """shape (C, D) of the slice."""
        self.device = fabric.device
        zeros = untouched_zeros
        if fabric.on_cuda:
            zeros = functools.partial(torch.zeros, device=fabric.device)
        rows = zeros(shape, dtype=dtype)
        v = zeros(shape[:1], dtype=accum_dtype(dtype))
        last = zeros(shape[:1], dtype=torch.int32)
        self.stored = Live(rows, v, last)

    def _on_device(self, places: Tensor) -> Tensor:
        return places.to(self.device, non_blocking=True)

    def prepare(self, event: EventRows) -> None:
        """The loader knows what the next cycle asks for."""

    def take(self, event: EventRows) -> Live:
        """The rows of an event, as the one before left them."""
        event.follows = None                                  # else each would keep all before it
        return self.stored.at(self._on_device(event.places))

    def put(self, event: EventRows, live: Live) -> None:
        """What an event has made of its rows."""
        self.stored.put(self._on_device(event.places), live)

    def read(self, places: Tensor) -> Tensor:
        """Rows for a reader that changes none, on the device."""
        return self.stored.rows.index_select(0, self._on_device(places))

    def settle(self) -> None:
        """Until everything that was put is there."""

    def moved(self) -> dict[str, float]:
        """Bytes to the device and back since the last call, and the time of the thread that moved them."""
        return dict(bytes_up=0, bytes_down=0, thread_ms=0.0)

    def forget(self) -> None:
        """All that was taken is out of date."""

    def touched_places(self, most_rows: int = PIECE_ROWS) -> Iterator[Tensor]:
        """Places of the rows that some event has touched, in pieces (n,) i64, ascending."""
        self.settle()
        found = [torch.empty(0, dtype=torch.int64, device=self.stored.last.device)]
        for first in range(0, len(self.stored.last), SCANNED_ROWS):
            at = self.stored.last[first:first + SCANNED_ROWS].nonzero().flatten()
            found.append(first + at)
        for places in torch.cat(found).split(most_rows):
            if len(places) > 0:                               # one piece of nothing, if there is nothing
                yield places

    def touched(self, most_rows: int = PIECE_ROWS) -> Iterator[tuple[Tensor, Live]]:
        """The rows that some event has touched, in pieces: their places (n,) i64, and copies, on the host."""
        for places in self.touched_places(most_rows):
            copies = self.stored.at(places)
            yield places.cpu(), Live(*(x.cpu() for x in copies))              # waits for them

    @torch.no_grad()
    def load(self, pieces: Iterable[tuple[Tensor, Live]]) -> None:
        """In the place of all rows: those of the pieces as `touched` gave them, and zeros. Only touched rows change."""
        self.settle()
        for places, live in self.touched():
            nothing = Live(*map(torch.zeros_like, live))
            self.stored.put(places.to(self.stored.last.device), nothing.to(self.stored.last.device))
        for places, live in pieces:
            self.stored.put(places.to(self.stored.last.device), live.to(self.stored.last.device))
        self.forget()


class HostHome(DeviceHome):
    """Rows and state of an owner's slice in pageable host memory; those of a cycle travel to the device and back.

    While a cycle runs, the rows that only the next one asks for come up, and those of the last event go down; the rows
    of both cycles stay on the device. One thread does all of it in the order in which it was asked, so that a row that
    comes up has been brought down before. Copies on a GPU have a stream of their own.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, cfg: Config, fabric: Fabric) -> None:
        # The thread waits for events on the GPU, and these for other ranks, which may still compile.
        self.cfg = replace(cfg, comm_timeout=LONG_PATIENCE * cfg.comm_timeout)
        self.fabric = fabric
        self.stream = torch.cuda.Stream(fabric.device) if fabric.on_cuda else None
        on_host = replace(fabric, device=torch.device("cpu"))
        super().__init__(shape, dtype, cfg, on_host)
        self.device = fabric.device
        self.mover = ThreadPoolExecutor(1, "table-home", initializer=fabric.enter_thread)
        self.lock = threading.Lock()     # prepare is called by the loader thread, and the mover counts
        self.counts = super().moved()
        self.live: Live | None = None    # on the device: rows of the event in `taken`
        self.taken: EventRows | None = None
        self.waiting: dict[EventRows, EventRows] = {}  # prepared, by the event to come that each follows
        self.coming: dict[EventRows, Future] = {}    # fresh rows of an event
        self.going: list[Future] = []                # what was put and may not be down yet, oldest first

    def prepare(self, event: EventRows) -> None:
        with self.lock:
            if event.follows is self.taken:
                self._start_upload(event)
            else:
                self.waiting[event.follows] = event           # what went before that event is not down yet

    def _start_upload(self, event: EventRows) -> None:
        places = event.places[event.fresh]
        self.coming[event] = self.mover.submit(self._bring_up, places)

    def _bring_up(self, places: Tensor) -> tuple[Live, Any]:
        """On the thread: rows on the device, and the event behind their copy."""
        began = time.perf_counter()
        staging = self._room_for(len(places))
        for x, out in zip(self.stored, staging):
            torch.index_select(x, 0, places, out=out)
        done = None
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                staging = staging.to(self.device)
                done = torch.cuda.Event()
                done.record()
        self._count("bytes_up", staging, began)
        return staging, done

    def _room_for(self, count: int) -> Live:
        """Host memory that rows stop in on their way; beside a GPU it is pinned."""
        pinned = self.stream is not None
        return Live(*(torch.empty(count, *x.shape[1:], dtype=x.dtype, pin_memory=pinned) for x in self.stored))

    def _count(self, direction: str, moved: Live, began: float) -> None:
        with self.lock:
            self.counts[direction] += sum(x.nbytes for x in moved)
            self.counts["thread_ms"] += 1000 * (time.perf_counter() - began)

    def moved(self) -> dict[str, float]:
        with self.lock:
            counts = self.counts
            self.counts = super().moved()
        return counts

    def _arrived(self, coming: Future) -> Live:
        """What `_bring_up` gives, for the stream that computes."""
        live, done = bounded(coming, self.cfg, "waiting for rows of a table from the host")
        if done is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(done)
            for x in live:
                x.record_stream(computing)
        return live

    def take(self, event: EventRows) -> Live:
        with self.lock:
            coming = self.coming.pop(event, None)
            known = coming is not None and event.follows is self.taken
        if not known:                                         # of a plan that nobody prepared, or in another order
            everything = self.mover.submit(self._bring_up, event.places)
            live = self._arrived(everything)
        elif self.live is None:
            live = self._arrived(coming)
        else:
            live = self._joined(event, self._arrived(coming))
        with self.lock:
            self.live = live
            self.taken = event
            event.follows = None                              # else each would keep all before it
            next_event = self.waiting.pop(event, None)
            if next_event is not None:
                self._start_upload(next_event)
        return live

    def _joined(self, event: EventRows, fresh: Live) -> Live:
        """Fresh rows from the host, and those that the event before has left on the device."""
        to_fresh, to_kept, kept_from = map(self._on_device, (event.fresh, event.kept, event.kept_from))
        kept = self.live.at(kept_from)
        count = len(event.places)
        live = Live(*(x.new_empty(count, *x.shape[1:]) for x in fresh))
        live.put(to_fresh, fresh)
        live.put(to_kept, kept)
        return live

    def put(self, event: EventRows, live: Live) -> None:
        computed = None
        if self.stream is not None:
            computed = torch.cuda.Event()
            computed.record()
        self._check_mover()
        going = self.mover.submit(self._bring_down, event.places, live, computed)
        self.going.append(going)

    def _bring_down(self, places: Tensor, live: Live, computed: Any) -> None:
        """On the thread: rows and their state to where they are kept, once the event is through with them."""
        on_its_way = contextlib.nullcontext()
        if self.stream is not None:
            computed.synchronize()                            # the GPU's time for the step is not this thread's
            on_its_way = torch.cuda.stream(self.stream)
        began = time.perf_counter()
        staging = self._room_for(len(places))
        with on_its_way:
            for x, out in zip(live, staging):
                out.copy_(x, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        self.stored.put(places, staging)
        self._count("bytes_down", staging, began)

    def _check_mover(self) -> None:
        """Raise here what went wrong with rows that were put."""
        while self.going and self.going[0].done():            # the thread goes by their order
            self.going[0].result()
            self.going.pop(0)

    def read(self, places: Tensor) -> Tensor:
        self.settle()
        rows = self.stored.rows.index_select(0, places.cpu())
        return self._on_device(self.fabric.host_tensor(rows))

    def settle(self) -> None:
        while self.going:
            bounded(self.going[0], self.cfg, "waiting for rows of a table on their way to the host")
            self.going.pop(0)

    def forget(self) -> None:
        self.settle()
        with self.lock:
            self.live = self.taken = None
            self.waiting.clear()
            self.coming.clear()


HOMES = dict(device=DeviceHome, host=HostHome)


class EventTable:
    """One table of rule "rowwise" on one rank: its slice at home, a cache of the rows it reads, their gradients.

    For others it does what TableRows does, in mode sparse whatever the mode, and at one rank too.
    """

    def __init__(self, table: Table, cfg: Config, fabric: Fabric, size: int, most_tokens: int,
                 report: Callable) -> None:
        """size: rows of the slice. The rest as for TableRows."""
        self.table = table
        self.fabric = fabric
        self.report = report
        self.debug = cfg.debug_rows
        dtype = getattr(torch, cfg.dtype)
        self.home = HOMES[table.home]((size, cfg.model_dim), dtype, cfg, fabric)
        count = min(fabric.world * size, most_tokens * table.reads)
        on_device = dict(device=fabric.device)
        self.cache = torch.zeros(count, cfg.model_dim, dtype=dtype, **on_device).requires_grad_()
        self.sums = torch.zeros(count, cfg.model_dim, dtype=accum_dtype(dtype), **on_device)
        self.prepared: EventRows | None = None                # the last that the loader has made
        self.fetching = None
        self.reset()

    def reset(self) -> None:
        """Nothing cached, no gradients, no bytes counted. The rows at home stay."""
        self._settle()
        self.home.forget()
        self.home.moved()                                     # forgets them
        self.prepared = None
        self.cached = None
        self.live: Live | None = None                         # the rows that the next event updates
        self.open_plans: list[TablePlan] = []
        self.totals = dict(bytes_sent=0, bytes_received=0, bytes_dense=0, bytes_up=0, bytes_down=0)
        self.sums.zero_()

    @property
    def mine(self) -> Tensor:
        """(C, D): the slice, at home."""
        return self.home.stored.rows

    def _settle(self) -> None:
        if self.fetching is not None:
            self.fetching.wait()
        self.fetching = None

    def prepare(self, plan: TablePlan) -> None:
        """What an event will update, and the start of its way to the device: on the loader thread, a cycle ahead."""
        before = self.prepared if self.table.home == "host" else None         # on the device nothing is fresh
        plan.event = event_rows(np.asarray(plan.rows_asked_of_me), before, self.fabric)
        self.prepared = plan.event
        self.home.prepare(plan.event)

    def _launch(self, plan: TablePlan, out: Tensor, rows: Tensor, counts_in: list[int],
                counts_out: list[int]) -> Any:
        """Launch a list of rows from each rank to each. One rank has its own already, and None to wait for."""
        if self.fabric.world == 1:
            out.copy_(rows)
            return None
        return launch_lists(self.fabric, plan, out, rows, counts_in, counts_out)

    @torch.no_grad()
    def fetch(self, plan: TablePlan, head: Tensor) -> None:
        """Launch the rows of a cycle into the cache: after the owners' update, never before."""
        self._settle()
        if plan.event is None:
            plan.event = event_rows(plan.rows_asked_of_me.cpu().numpy(), None, self.fabric)
        self.live = self.home.take(plan.event)
        self.cached = plan
        if self.debug:
            self.cache.detach().fill_(math.nan)               # rows of no plan are not to be read
        arriving = self.cache.detach()[:len(plan.rows_i_read)]
        leaving = self.live.rows.index_select(0, self.of_asked(plan))
        self.fetching = self._launch(plan, arriving, leaving, plan.counts_by_owner, plan.counts_by_reader)

    def of_asked(self, plan: TablePlan) -> Tensor:
        return plan.event.of_asked.to(self.fabric.device, non_blocking=True)

    def ready(self, plan: TablePlan, head: Tensor) -> tuple[Tensor, Tensor]:
        """The cache with the plan's rows, and the sums for their gradients. Raises RunError inside another cycle."""
        if plan not in self.open_plans:
            if self.open_plans:
                raise inside_another_cycle(self.table, self.open_plans[0], plan)
            self.open_plans.append(plan)
        if self.cached is not plan:
            self.fetch(plan, head)
        self._settle()
        return self.cache, self.sums

    @torch.no_grad()
    def read(self, plan: TablePlan, head: Tensor) -> tuple[Tensor, None]:
        """Rows for another reader than training, in a tensor of their own: neither cache nor counts notice."""
        leaving = self.home.read(plan.rows_asked_of_me)
        out = leaving.new_empty(len(plan.rows_i_read), leaving.shape[1])
        work = self._launch(plan, out, leaving, plan.counts_by_owner, plan.counts_by_reader)
        if work is not None:
            work.wait()
        self.account(plan)
        return out, None

    @torch.no_grad()
    def return_gradients(self) -> tuple[Tensor, Callable[[], None]]:
        """Launch gradients to their owners.

        Returns the gradient of the event's rows (u, D), whole after the wait that comes with it.
        """
        plan, = self.open_plans
        rows = self.sums[:len(plan.rows_i_read)].to(self.cache.dtype)         # on the wire: the type of the weights
        arrived = rows.new_empty(len(plan.rows_asked_of_me), rows.shape[1])
        work = self._launch(plan, arrived, rows, plan.counts_by_reader, plan.counts_by_owner)
        grad = self.sums.new_zeros(len(plan.event.places), rows.shape[1])

        def add_in_rank_order() -> None:
            if work is not None:
                work.wait()
            add_rows(grad, self.of_asked(plan), arrived)      # reader by reader

        return grad, add_in_rank_order

    def logical_rows(self) -> Tensor:
        """(u,) i64 on the device: numbers of the live rows in the whole table, alike at any number of ranks."""
        plan, = self.open_plans
        places = plan.event.places.to(self.fabric.device, non_blocking=True)
        return places * self.fabric.world + self.fabric.rank

    def touched(self) -> Iterator[tuple[Tensor, Live]]:
        """Rows of this rank that some event has touched, as much as a file holds at a time.

        Their numbers (n,) i64 in the whole table, ascending, and copies, on the host.
        """
        bytes_per_row = sum(x[:1].nbytes for x in self.home.stored)
        most_rows = max(1, PIECE_BYTES // bytes_per_row)
        for places, live in self.home.touched(most_rows):
            yield places * self.fabric.world + self.fabric.rank, live

    @torch.no_grad()
    def load(self, pieces: Iterable[tuple[Tensor, Live]]) -> None:
        """In the place of all rows: those of the pieces, by their numbers in the whole table, that this rank owns."""
        self.home.load(map(self._owned_part, pieces))

    def _owned_part(self, piece: tuple[Tensor, Live]) -> tuple[Tensor, Live]:
        """Places of the rows of a piece that are this rank's, and these rows in the types of the table."""
        ids, live = piece
        at = (ids % self.fabric.world == self.fabric.rank).nonzero().flatten()
        columns = [x.to(stored.dtype) for x, stored in zip(live.at(at), self.home.stored)]
        return ids[at] // self.fabric.world, Live(*columns)

    def updated(self) -> None:
        """The event has changed the live rows: they go home."""
        plan, = self.open_plans
        self.home.put(plan.event, self.live)

    def clear(self) -> None:
        """Forget the gradients of the open plan, and what is cached."""
        for plan in self.open_plans:
            self.sums[:len(plan.rows_i_read)] = 0
            self.account(plan, dense_passes=2)                # rows out, gradients back
        self.open_plans = []
        self.cached = None
        self.live = None                                      # makes room for those of the next event
        if self.debug and self.sums.any():
            raise RunError(f"gradients of {self.table.label}", "some in rows of no plan", "none", "report it")

    def account(self, plan: TablePlan, dense_passes: int = 0) -> None:
        """Close the account of a plan, as TableRows does."""
        purpose = plan.tag["purpose"]
        if purpose not in ("train", "validation"):
            return
        bytes_dense = dense_passes * (self.fabric.world - 1) * self.mine.nbytes
        moved = dict(bytes_sent=plan.sent, bytes_received=plan.received, bytes_dense=bytes_dense)
        here = {}
        if purpose == "train":
            here = self.home.moved()
            here["thread_ms"] = round(here["thread_ms"], 3)
        self.report(**plan.tag, table=self.table.label, mode="sparse", rows=len(plan.rows_i_read), reads=plan.reads,
                    **moved, **here, plan_ms=round(plan.plan_ms, 3))
        if purpose == "train":
            for key in self.totals:
                self.totals[key] += (moved | here)[key]

    def account_rest(self) -> None:
        """What was moved behind the last account joins the sums of the run: rows of the last event go home."""
        self.home.settle()
        rest = self.home.moved()
        for key in ("bytes_up", "bytes_down"):
            self.totals[key] += rest[key]

    def memory_bytes(self, moments: Iterable[Tensor]) -> int:
        """Of all that this rank keeps of the table; of a host home's rows none."""
        kept = [self.cache, self.sums, *moments]
        if self.table.home == "device":
            kept += self.home.stored
        return sum(x.nbytes for x in kept)


# ====== Room 7: Optimizer =============================================================================================
# Launch order of the reductions, and order of the updates with their gathers: NorMuon first, so that the gradients of
# Adam's entries travel while it computes.
SMALL = "small"                          # what every rank updates alike: one sum over ranks for all of it
REDUCE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", SMALL)
UPDATE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", SMALL)
POLAR_EXPRESS = (                        # (a, b, c) of each step (arXiv 2505.16932, recipe 3.1)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
DOWN_LR_MUL = 2.0                        # down matrices of the MLP, on top of the factor of their shape


def polar_express(x: Tensor) -> Tensor:
    """Nearly the polar factor of each matrix, (M, r, c): singular values go to 0.86 .. 1.14. Same dtype in and out."""
    norm = x.norm(dim=(-2, -1), keepdim=True)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT                                                              # the smaller of the two Gram matrices
    x = x / (1.02 * norm + 1e-6)                                              # a margin of 2 % (recipe 3.1)
    for a, b, c in POLAR_EXPRESS:                                             # x -> (a + b G + c G^2) x, G = x x^T
        gram = x @ x.mT
        higher_terms = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, higher_terms, x, beta=a)
    if tall:
        x = x.mT
    return x


def matrix_shape(label: str, bank: Sequence[int]) -> tuple[int, int]:
    """Height and width of the matrices in a bank of this shape; those of attention are square, below each other."""
    height, width = bank[-2:]
    if label == "attn":
        height = width
    return height, width


def evened_axis(matrices: Sequence[int]) -> int:
    """The axis over which NorMuon takes the mean of squares: along each row, or each column of wide matrices."""
    height, width = matrices[-2:]
    return -1 if height >= width else -2


def second_shape(matrices: Sequence[int]) -> tuple[int, ...]:
    """Shape of NorMuon's second moments of matrices of this shape: one number for each mean of squares."""
    shape = list(matrices)
    shape[evened_axis(matrices)] = 1
    return tuple(shape)


def normuon_direction(grad: Tensor, momentum: Tensor, second: Tensor, mu: Tensor, beta2: float,
                      polar_dtype: torch.dtype) -> Tensor:
    """Orthogonalised Nesterov momentum, evened out per row at an unchanged Frobenius norm (arXiv 2510.05491).

    grad, momentum (M, r, c); second (M, r, 1), or (M, 1, c) of wide matrices. momentum and second
    change in place.
    """
    momentum.add_((grad - momentum) * (1 - mu))
    nesterov = grad * (1 - mu) + momentum * mu
    o = polar_express(nesterov.to(polar_dtype)).to(grad.dtype)

    axis = evened_axis(grad.shape)
    mean_square = o.square().mean(dim=axis, keepdim=True)                     # shaped like second
    second.lerp_(mean_square, 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()

    count = grad.shape[axis]                                                  # numbers in each mean
    norm = (count * mean_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scaled_square = mean_square * scale.square()
    scaled_norm = (count * scaled_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    factor = scale * norm / scaled_norm.clamp_min(1e-10)
    return o * factor.to(polar_dtype).to(grad.dtype)                          # rounded, recipe 3.1


def cautious_descent(p: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> Tensor:
    """p - p [update p >= 0] decay lr - update lr, in that order: decay only where it agrees with the update."""
    agrees = update * p >= 0
    return p - p * agrees * decay * lr - update * lr


def with_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """bf16 weight and the 16 bits below it (i16 words) -> the f32 weight (recipe 3.2)."""
    upper = p.view(torch.int16).int() << 16
    lower = mantissa.int() & 0xFFFF                                           # without its sign
    return (upper | lower).view(torch.float32)


def split_mantissa(exact: Tensor, p: Tensor, mantissa: Tensor) -> None:
    """f32 weight -> bf16 weight and its lower 16 bits, in place: truncated, never rounded."""
    words = exact.view(torch.int32)
    p.copy_((words >> 16).to(torch.int16).view(torch.bfloat16))
    mantissa.copy_((words & 0xFFFF).to(torch.int16))


def normuon_update(p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum: Tensor, second: Tensor, share: float,
                   mu: Tensor, lr: Tensor, lr_muls: Tensor, decay: Tensor, beta2: float) -> None:
    """One NorMuon step on matrices p (M, r, c) in place.

    lr_muls (M, 1, 1); decay () = weight decay x lr (); share: what a plain sum over slots is
    multiplied by. With a mantissa, p is the upper half of each weight.
    """
    grad = grad.to(momentum.dtype) * share
    update = normuon_direction(grad, momentum, second, mu, beta2, p.dtype)
    rates = lr_muls * lr
    if mantissa is None:
        p.copy_(cautious_descent(p, update, rates, decay))
    else:
        exact = with_mantissa(p, mantissa)
        split_mantissa(cautious_descent(exact, update, rates, decay), p, mantissa)


def adam_update(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, share: float, betas: tuple[float, float], eps: float,
                step_size: Tensor, decay: Tensor) -> None:
    """One dense Adam step in place (recipe 3.4): eps joins the uncorrected root, decay acts where the update agrees."""
    grad = grad.to(m.dtype) * share
    beta1, beta2 = betas
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square(), 1 - beta2)
    update = m / (v.sqrt() + eps) * step_size
    exact = p.to(m.dtype)
    agrees = update * exact > 0
    p.copy_(exact - (update + exact * agrees * decay))


def rowwise_update(rows: Tensor, v: Tensor, last: Tensor, grad: Tensor, share: float, event: Tensor, beta2: float,
                   eps: float, step_size: Tensor, decay: Tensor, chance: Tensor | None) -> None:
    """One event of rule "rowwise" on the rows that were asked for, in place (tables.md 2): one second moment per row.

    rows (u, D), v (u,), last (u,) i32, grad (u, D) a plain sum over slots and ranks; event (): its number, from 1;
    step_size = lr sqrt(1 - beta2^event), decay = lr^2 x weight decay, (); chance (u,) i32 of `chance_of_rows` rounds
    bf16 rows by chance, None to the nearest. v of rows that stood still is caught up on: the same as if each event had
    multiplied it by beta2.
    """
    grad = grad * share
    missed = torch.pow(beta2, (event - last).double())        # f64, rounded once
    v.copy_(v * missed.to(v.dtype) + (1 - beta2) * grad.square().mean(dim=1))
    last.copy_(event.expand_as(last))
    update = grad / (v.sqrt() + eps)[:, None] * step_size
    exact = rows.to(grad.dtype)
    agrees = update * exact > 0
    moved = exact - (update + exact * agrees * decay)
    if chance is not None:
        moved = rounded_by_chance(moved, chance)
    rows.copy_(moved)


def rounded_by_chance(x: Tensor, chance: Tensor) -> Tensor:
    """f32 (u, D) -> f32 that bf16 holds exactly: up with the probability of the bits that are cut; chance (u,) i32.

    What is drawn for an element follows from (seed, label, logical row, event, column) alone: ranks do not matter.
    """
    column = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    drawn = mixed_bits(chance[:, None] ^ column) & 0xFFFF
    bits = x.view(torch.int32) + drawn
    return (bits & -0x10000).view(torch.float32)


def chance_of_rows(start: int, rows: Tensor, event: Tensor) -> Tensor:
    """(u,) i32 from a table's start, logical rows (u,) i64, and the number of the event () i32."""
    row = mixed_bits(rows.int() ^ start)
    return mixed_bits(row ^ event)


def mixed_bits(x: Tensor) -> Tensor:
    """i32 -> i32 that look unrelated to it: the finaliser "lowbias32" (Chris Wellons), in arithmetic that wraps."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D                 # & : a shift of negative numbers copies the sign
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)


def signed_crc32(text: str) -> int:
    """Checksum of a text as an i32."""
    checksum = zlib.crc32(text.encode())
    return checksum - (checksum >> 31 << 32)


def no_plans() -> None:
    """For steps whose next cycle is not planned ahead."""


def has_several_micro_batches(cfg: Config, world: int, slots_at_once: int) -> bool:
    """Whether a rank takes the slots of a step in several micro-batches."""
    return slots_at_once * world < cfg.num_slots


def writes_often(row: Parameter, several_micro_batches: bool) -> bool:
    """Whether a rank adds to a gradient several times between clears: for micro-batches, or both steps of a cycle."""
    return several_micro_batches or row.optimizer == "adam"


class Optimizer:
    """NorMuon on banks at every step, Adam on the rest at odd steps; who updates what, and in which order it travels.

    Units are what ranks share out: matrices of a bank, rows of any other sharded parameter. Rank r
    updates the r-th of W equal slices of the units and holds moments for that slice alone. Such
    weights and their gradients are stored with zeros behind them, up to W whole slices, so that
    collectives work in place; nothing else sees the zeros. Small parameters are updated by every
    rank alike. Tables are slices already, and room 6 moves their rows.
    """

    def __init__(self, cfg: Config, fabric: Fabric, model: GPT, compiled: Callable,
                 tables: dict[str, TableRows], several_micro_batches: bool = False) -> None:
        """compiled: what a function of tensors goes through. tables: what room 6 keeps, by label.

        several_micro_batches: in a step of this rank.
        """
        self.cfg = cfg
        self.fabric = fabric
        self.tables = tables
        self.parameters = model.table
        self.weights = {label: model.get_parameter(label) for label in self.parameters}
        # Labels that ranks share out here. A table is sharded, too, but a rank has its slice of it only.
        self.cut = {label for label, row in self.parameters.items() if row.sharded and label not in tables}
        self.small = [label for label, row in self.parameters.items() if not row.sharded]
        self.rowwise = {row.label: row for row in parameter_table(cfg) if row.optimizer == "rowwise"}
        entries = [*self.cut, *tables, SMALL]
        ngrams = [table.label for table in ngram_tables(cfg)]
        self.reduce_order = with_ngrams(REDUCE_ORDER, ngrams)
        self.update_order = with_ngrams(UPDATE_ORDER, ngrams)
        assert sorted(self.reduce_order) == sorted(self.update_order) == sorted(entries), "every entry once in both"
        self.share = 1 / cfg.num_slots   # of a slot in J; gradients are plain sums over slots
        self.seed = cfg.seed             # of the run

        self.stored = {}                 # by label that ranks share out: units of the weight, zeros behind them
        self.slice_size = {}             # by label: units of every rank's slice
        self.mine = {}                   # by label: this rank's slice, a view of the parameter
        self.state = {}                  # by label: moments of this slice, and mantissa words, by name
        self.lr_muls = {}                # by label of a bank: (M, 1, 1), a factor for each matrix of the slice
        self.adam_steps = dict.fromkeys(self.rowwise, 0)      # by label: updates, or events, so far
        for label, row in self.parameters.items():
            units = self.units(label, self.weights[label].data)
            sharers = fabric.world if label in self.cut else 1
            self.slice_size[label] = -(-len(units) // sharers)
            if label in self.cut:
                stored = self._room_for(label, units.dtype)
                stored[:len(units)] = units
                self.weights[label].data = self._parameter_in(label, stored)
                self.stored[label] = stored
                units = stored[:len(units)]
            self.mine[label] = self.slice_of(label, units)
            self.state[label] = self._zero_state(label)
            if row.optimizer == "normuon":
                self.lr_muls[label] = self._matrix_lr_muls(label)
            if row.optimizer == "adam":
                self.adam_steps[label] = 0
        self.normuon_update = compiled(normuon_update)
        self.adam_update = compiled(adam_update)
        self.rowwise_update = compiled(rowwise_update)

        exact = accum_dtype(getattr(torch, cfg.dtype))
        sizes = [self.weights[label].numel() for label in self.small]
        self.small_grad = torch.zeros(sum(sizes), dtype=exact, device=fabric.device)
        self.small_parts = dict(zip(self.small, self.small_grad.split(sizes)))
        self.gradients = {}              # by label that owns a main_grad: its units, zeros behind them
        self.wire = {}                   # by label: the same in the type that travels
        self.passes = {}                 # by label: backward passes since the clear; None: no call so far
        self._own_main_grads(several_micro_batches)

    def _own_main_grads(self, several_micro_batches: bool) -> None:
        """Give the weights of the parameter table that own a main_grad their buffers, for good.

        They are f32 (f64) where a rank writes more than once between clears, else of the weight's
        type; calls in pieces, which nobody could foresee, add in that type too. What travels has
        the weight's type.
        """
        for label, row in self.parameters.items():
            if not row.parts:
                continue
            weight = self.weights[label]
            dtype = weight.dtype
            if writes_often(row, several_micro_batches):
                dtype = accum_dtype(dtype)
            buffer = self._room_for(label, dtype)
            layers = len(weight) if row.optimizer == "normuon" else 1
            weight.main_grad = self._parameter_in(label, buffer)
            weight.writes = torch.zeros(layers * len(row.parts), dtype=torch.int64)
            self.gradients[label] = buffer
            self.wire[label] = buffer
            if dtype != weight.dtype and self.fabric.world > 1:
                self.wire[label] = self._room_for(label, weight.dtype)
            self.passes[label] = None

    def _room_for(self, label: str, dtype: torch.dtype) -> Tensor:
        """Zeros for the slices of all ranks, also where there are fewer units."""
        shape = self.units(label, self.weights[label]).shape
        count = self.slice_size[label] * self.fabric.world
        return torch.zeros(count, *shape[1:], dtype=dtype, device=self.fabric.device)

    def _parameter_in(self, label: str, stored: Tensor) -> Tensor:
        """View of stored units without the zeros behind them, in the parameter's shape."""
        weight = self.weights[label]
        count = len(self.units(label, weight))
        return stored[:count].view(weight.shape)

    def units(self, label: str, x: Tensor) -> Tensor:
        """View of a parameter or its gradient along the axis that ranks share out; attention matrices are square."""
        if self.parameters[label].optimizer != "normuon":
            return x
        return x.view(-1, *matrix_shape(label, x.shape))

    def stored_slice(self, label: str, stored: Tensor) -> Tensor:
        """This rank's part of stored units, with the zeros that fill it up."""
        size = self.slice_size[label]
        first = self.fabric.rank * size
        return stored[first:first + size]

    def slice_of(self, label: str, units: Tensor) -> Tensor:
        """This rank's part of what ranks share out, else all of it."""
        size = self.slice_size[label]
        first = self.fabric.rank * size if label in self.cut else 0
        return units[first:first + size]

    def _zero_state(self, label: str) -> dict[str, Tensor]:
        """What the updates of a parameter remember, at the start."""
        mine = self.mine[label]
        exact = dict(dtype=accum_dtype(mine.dtype), device=self.fabric.device)
        if self.parameters[label].optimizer == "adam":
            return dict(m=torch.zeros(mine.shape, **exact), v=torch.zeros(mine.shape, **exact))
        second = torch.zeros(second_shape(mine.shape), **exact)
        state = dict(momentum=torch.zeros(mine.shape, **exact), second=second)
        if mine.dtype == torch.bfloat16:
            state["mantissa"] = torch.zeros(mine.shape, dtype=torch.int16, device=self.fabric.device)
        return state

    def _matrix_lr_muls(self, label: str) -> Tensor:
        """(M, 1, 1): root of a tall matrix's aspect ratio, and twice that for the down matrices of the MLP."""
        mine = self.mine[label]
        of_shape = max(1.0, mine.shape[-2] / mine.shape[-1]) ** 0.5
        muls = torch.full((len(mine), 1, 1), of_shape, dtype=self.state[label]["momentum"].dtype)
        if label == "mlp":
            number_in_bank = self.fabric.rank * self.slice_size[label] + torch.arange(len(mine))
            muls[number_in_bank % UP_AND_DOWN == 1] *= DOWN_LR_MUL            # up, down, up, down, ...
        return muls.to(mine.device)

    def gradient(self, label: str) -> Tensor | None:
        """This rank's gradient so far of a parameter that is no table, in its shape; None: there is none."""
        weight = self.weights[label]
        if label not in self.gradients:
            return weight.grad
        return None if self.passes[label] is None else weight.main_grad

    def count_pass(self) -> None:
        """A backward pass starts: each part of a main_grad is to be written once more."""
        for label, passes in self.passes.items():
            self.passes[label] = (passes or 0) + 1

    def add_zeros(self) -> None:
        """Begin a gradient where there is none: a rank with nothing to add still joins what all ranks reduce."""
        for label in self.small:
            p = self.weights[label]
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for label, passes in self.passes.items():                             # the sums of a table are always there
            self.passes[label] = passes or 0

    def clear(self, labels: Iterable[str]) -> None:
        """Forget gradients. A main_grad keeps what it holds: the next write is the first."""
        for label in labels:
            if label in self.rowwise:                                         # its table has cleared them
                continue
            weight = self.weights[label]
            weight.grad = None
            if label in self.gradients:
                weight.writes.zero_()
                self.passes[label] = None

    @torch.no_grad()
    def step(self, values: Values, plans_ahead: Callable = no_plans) -> None:
        """Reduce, update and gather what this step updates, then clear its gradients; the others keep theirs.

        plans_ahead() gives the plans of the next cycle, or None; its rows set off as soon as
        their owners have updated them. Raises RunError without a gradient.
        """
        active = self._active(values)
        self.check_written(active)
        for label in active:
            if self.passes.get(label) == 0:                                   # calls of weight 0 only
                self.weights[label].main_grad.zero_()
        head = self.weights["lm_head"]
        tied_update = values.adam_step and values.tied
        if tied_update:                                                       # one parameter so far, so one gradient
            self.tables["embed"].add_to_head(head.main_grad)
            active.remove("embed")

        entries = {SMALL if label in self.small else label for label in active}
        reduced = {}                                                          # gradient and its wait, until it is used
        for entry in self.reduce_order:
            if entry in entries:
                reduced[entry] = self._reduce(entry)
        waits = []
        for entry in self.update_order:
            if entry in entries:
                grad, wait = reduced.pop(entry)
                wait()
                waits.append(self._update_and_gather(entry, grad, values, plans_ahead))
        for wait in waits:                                                    # all gathers are under way by now
            wait()

        if tied_update and self.fabric.world == 1:                            # else its rows are read from the head
            self.weights["embed"].copy_(head.t())
        self.clear(active)
        if values.split:
            self._split()

    def _active(self, values: Values) -> set[str]:
        """Labels of what this step updates. Raises RunError if one has no gradient."""
        active, missing = set(), []
        for label, row in self.parameters.items():
            if row.optimizer == "adam" and not values.adam_step:
                continue
            active.add(label)
            if label in self.tables:
                has_gradient = len(self.tables[label].open_plans) > 0
            else:
                has_gradient = self.gradient(label) is not None
            if not has_gradient:
                missing.append(label)
        for label, row in self.rowwise.items():
            if (values.step + 1) % row.rows.cadence != 0:
                continue
            active.add(label)
            if not self.tables[label].open_plans:
                missing.append(label)
        if missing:
            raise RunError("optim_step", f"no gradient of {sorted(missing)}", "one of each", "forward_backward first")
        return active

    def check_written(self, labels: Iterable[str]) -> None:
        """Raise RunError unless every backward pass wrote each part of each main_grad once."""
        for label in sorted(labels):
            passes = self.passes.get(label)
            if passes is None:
                continue
            written = self.weights[label].writes
            if not written.eq(passes).all():
                raise RunError(f"main_grad of {label}", f"written {written.tolist()} times, part by part",
                               f"{passes} times each, once in every backward pass since the last update",
                               "a micro-batch was lost or ran twice: drop_gradients, and repeat the step")

    def _reduce(self, entry: str) -> tuple[Tensor, Callable[[], object]]:
        """Launch the sum over ranks. Returns the gradient of what this rank updates, and a wait for it."""
        if entry in self.tables:
            return self.tables[entry].return_gradients()
        several = self.fabric.world > 1
        if entry == SMALL:
            for label, part in self.small_parts.items():
                part.copy_(self.weights[label].grad.flatten())
            wait = dist.all_reduce(self.small_grad, async_op=True).wait if several else already_here
            return self.small_grad, wait

        grad = self.gradients[entry]
        wait = already_here
        if several:
            wire = self.wire[entry]
            if wire is not grad:
                wire.copy_(grad)
            grad = self.stored_slice(entry, wire)
            wait = dist.reduce_scatter_tensor(grad, wire, async_op=True).wait
        return grad[:len(self.mine[entry])], wait

    def _update_and_gather(self, entry: str, grad: Tensor, values: Values,
                           plans_ahead: Callable) -> Callable[[], object]:
        """Update what this rank owns of an entry, and launch what the others need of it. Returns the wait for that."""
        if entry == SMALL:
            for label, part in self.small_parts.items():
                self._update_with_adam(label, part.view_as(self.weights[label]), values)
            return already_here

        if entry in self.rowwise:
            self._update_rowwise(entry, grad, values)
        elif self.parameters[entry].optimizer == "adam":                      # counted on every rank alike
            self._update_with_adam(entry, grad, values)
        elif len(self.mine[entry]) > 0:
            self._update_with_normuon(entry, grad, values)
        if entry in self.tables:
            self._end_cycle(entry, plans_ahead)
        if self.fabric.world == 1 or entry in self.tables:
            return already_here
        stored = self.stored[entry]
        mine = self.stored_slice(entry, stored)
        return dist.all_gather_into_tensor(stored, mine, async_op=True).wait

    def _next_update(self, row: Parameter, values: Values) -> tuple[int, Tensor, Tensor]:
        """Count an update by Adam or by rule rowwise: its number, step size and decay."""
        self.adam_steps[row.label] += 1
        count = self.adam_steps[row.label]
        beta1, beta2 = row.betas
        lr = values.adam_lr * row.lr_mul
        corrected = math.sqrt(1 - beta2**count) / (1 - beta1**count)
        decay = lr * lr * self.cfg.adam_weight_decay * row.wd_mul             # quadratic in the schedule (recipe 3.3)
        return count, cpu_scalar(lr * corrected), cpu_scalar(decay)

    def _update_with_adam(self, label: str, grad: Tensor, values: Values) -> None:
        row = self.parameters[label]
        state = self.state[label]
        _, step_size, decay = self._next_update(row, values)
        self.adam_update(self.mine[label], grad, state["m"], state["v"], self.share, row.betas, self.cfg.adam_eps,
                         step_size, decay)

    def _update_rowwise(self, label: str, grad: Tensor, values: Values) -> None:
        cfg = self.cfg
        row = self.rowwise[label]
        table = self.tables[label]
        _, beta2 = row.betas
        count, step_size, decay = self._next_update(row, values)
        event = torch.full((), count, dtype=torch.int32, device=grad.device)  # made there: a copy would wait
        chance = None
        if table.table.rounding == "stochastic" and table.live.rows.dtype == torch.bfloat16:
            start = signed_crc32(f"{self.seed}/{label}")
            chance = chance_of_rows(start, table.logical_rows(), event)
        if self.rowwise_update is not rowwise_update:         # compiled: one graph for any number of rows
            by_row = [x for x in (*table.live, grad, chance) if x is not None]
            for x in by_row:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        self.rowwise_update(*table.live, grad, self.share, event, beta2, cfg.adam_eps, step_size, decay, chance)
        table.updated()

    def _update_with_normuon(self, label: str, grad: Tensor, values: Values) -> None:
        cfg = self.cfg
        state = self.state[label]
        mu = cpu_scalar(values.momentum)
        lr = cpu_scalar(values.normuon_lr)
        decay = cpu_scalar(values.normuon_lr * cfg.normuon_weight_decay)      # times the rate again in the update
        self.normuon_update(self.mine[label], state.get("mantissa"), grad, state["momentum"], state["second"],
                            self.share, mu, lr, self.lr_muls[label], decay, cfg.normuon_beta2)

    def _end_cycle(self, label: str, plans_ahead: Callable) -> None:
        """Clear a table's gradients, and launch the rows of the next cycle: they are waited for at the first lookup."""
        table = self.tables[label]
        table.clear()
        plans = plans_ahead()
        if plans is not None:
            table.fetch(plans[label], self.weights["lm_head"])

    def _split(self) -> None:
        """From here on head and embedding are two parameters; the embedding starts with the head's moments."""
        W = self.fabric.world
        mine = self.mine["embed"]
        self.adam_steps["embed"] = self.adam_steps["lm_head"]
        for name, moments in self.state["embed"].items():                     # owned along V, the head's along D
            of_head = filled(self.state["lm_head"][name], self.slice_size["lm_head"])
            leaving = columns_by_owner(of_head, W, len(mine))                 # (owner, rows of my head slice, C)
            arrived = leaving
            if W > 1:
                arrived = torch.empty_like(leaving)
                dist.all_to_all_single(arrived, leaving)
            columns = arrived.flatten(0, 1)[:self.cfg.model_dim]              # (D, C), without what filled the head
            moments.copy_(columns.t())
        my_columns = columns_by_owner(self.weights["lm_head"], W, len(mine))[self.fabric.rank]
        mine.copy_(my_columns.t())


def with_ngrams(order: Sequence[str], labels: Sequence[str]) -> list[str]:
    """An order of communication with the tables of n-grams in front of what every rank updates."""
    at = order.index(SMALL)
    return [*order[:at], *labels, *order[at:]]


def columns_by_owner(columns: Tensor, world: int, count: int) -> Tensor:
    """(d, V) -> (world, d, count): the columns of each owner, every world-th, filled up with zeros."""
    even = F.pad(columns, (0, world * count - columns.shape[1]))
    return even.unflatten(1, (count, world)).permute(2, 0, 1).contiguous()


def filled(units: Tensor, count: int) -> Tensor:
    """`count` units: the same tensor if it has them, else a copy with zeros behind."""
    missing = count - len(units)
    if missing == 0:
        return units.contiguous()
    return torch.cat((units, units.new_zeros(missing, *units.shape[1:])))


def cpu_scalar(value: float) -> Tensor:
    """A number that changes every step as a tensor, so that compiled updates need no new graph."""
    return torch.tensor(value, dtype=torch.float64)


# ====== Room 8: Executor ==============================================================================================
EVAL_ROWS = 8192                         # rows of validation logits at a time: evaluation never decides the memory
MEMORY_SHARE = 0.9                       # of a device: the rest is for its driver, NCCL, the allocator, the compiler
FREE_SHARE = 0.95                        # of what is free on a GPU, whose driver has its part by then
# Numbers of a step at its largest, when the head's backward begins; of compiled code as tests/rehearsal.json has them.
SAVED_ROWS = 17                          # of width D, per token and layer: 183 in 11 layers, and statistics in f32
SAVED_ROWS_REFERENCE = 26                # the same of a layer in plain PyTorch
LOGIT_COPIES = 2                         # logits and their gradient, which in fp8 stands there in rows and in columns
LOGIT_COPIES_REFERENCE = 6               # the same in plain PyTorch, in f32
EVAL_KEPT_ROWS = 16                      # of width D, per token, in evaluation: 15 and what is read of tables
EVAL_KEPT_ROWS_REFERENCE = 24            # the same in plain PyTorch
EVAL_LOGIT_COPIES = 1                    # logits in evaluation
EVAL_LOGIT_COPIES_REFERENCE = 4          # the same in plain PyTorch, in f32
PAGE_BYTES = 4096                        # that a mapping takes at a time, when they are first written
PAGES_OF_A_TABLE = 512                   # that one page of the page table stands for
ON_HOST = "tables on the host"           # name of a part of the estimate: no memory of a GPU
ADAM_BYTES = 22                          # that a dense update moves per element (tables.md 1): bf16 weight read and
                                         # written 2 + 2, its gradient read 2, two f32 moments 8 + 8
MOST_ADAM_BYTES = 32 * 10**9             # of a rank's slice in one dense update, about 10 ms on an H100
RECOMPILE_LIMIT = 64


class Losses(NamedTuple):
    """Unscaled loss of one forward_backward on this rank; on the device, nothing waited for."""

    slot_sums: Tensor                    # (b,) f32 or f64: sum over the slot's positions
    tokens: int


class Snapshot(NamedTuple):
    """Copies on the host of all that a run changes."""

    tensors: dict[str, Tensor]
    cpu_rng: Tensor
    cuda_rng: Tensor | None
    rotary: Rotary | None
    adam_steps: dict[str, int]
    touched: dict[str, list[tuple[Tensor, Live]]]    # rows of rowwise tables: places and copies, in pieces


def no_report(**account: Any) -> None:
    """For tables whose bytes nobody counts."""


def will_compile(cfg: Config, fabric: Fabric) -> bool:
    """Whether model and updates are compiled: on a GPU, unless --compile says otherwise."""
    return cfg.compile == 1 or (cfg.compile == -1 and fabric.on_cuda)


class Evaluator:
    """Runs slots through a model that it never changes: all that a sample needs."""

    trains = False                       # without gradients, tables need no sums for them

    def __init__(self, cfg: Config, fabric: Fabric, attention: Callable, slots_at_once: int = 0,
                 report: Callable = no_report) -> None:
        """Builds the model.

        slots_at_once: 0 for all of this rank's; report(**account) is called for each table and cycle.
        """
        self.cfg = cfg
        self.fabric = fabric
        self.rotary: Rotary | None = None                     # of which the model holds the angles
        self.exact = accum_dtype(getattr(torch, cfg.dtype))
        self.slots_at_once = slots_at_once or cfg.num_slots // fabric.world

        self.exchange = None                                  # of row plans, in the calling thread
        self.exchange_ahead = None                            # the same in the loader thread, for training
        rowwise = any(table.is_rowwise for table in row_tables(cfg))
        if (cfg.row_comms != "dense" or rowwise) and fabric.world > 1:
            group_of_all = None
            self.exchange = functools.partial(exchange_plans, fabric, group_of_all, cfg.dtype)
            self.exchange_ahead = functools.partial(exchange_plans, fabric, fabric.plan_group, cfg.dtype)
        if rowwise:
            self.exchange_ahead = functools.partial(self._exchange_and_prepare, self.exchange_ahead)
        self.planner = Planner(cfg, fabric, self.exchange)

        largest_batch = max(stage.batch_tokens for stage in cfg.stages)
        longest_slot = max(cfg.val_batch_tokens, largest_batch) // cfg.num_slots
        self.model = GPT(cfg, attention, longest_slot, self.planner.sizes)
        self.model.set_initial_values(cfg.seed, self.kept)
        self.model.to(fabric.device)

        self.tables = {}
        for table in self.planner.tables:
            most_tokens = table.cadence * largest_batch // fabric.world
            if table.is_rowwise:
                size = self.planner.sizes[table.label]
                tokens_of_gradients = most_tokens if self.trains else 0
                self.tables[table.label] = EventTable(table, cfg, fabric, size, tokens_of_gradients, report)
            else:
                mine = self.model.get_parameter(table.label)
                self.tables[table.label] = TableRows(table, cfg, fabric, mine, most_tokens, report)

        self.compiling = will_compile(cfg, fabric)
        if self.compiling:                                    # graphs: by shapes, and by spans of the reference
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.model_hidden = self.compiled(self.model.hidden)
        self.next_token_losses = self.compiled(next_token_losses)

    def rowwise_tables(self) -> dict[str, EventTable]:
        return {label: table for label, table in self.tables.items() if table.table.is_rowwise}

    def _exchange_and_prepare(self, exchange: Callable | None, plans: dict[str, TablePlan]) -> None:
        """Exchange plans, if there are others; then rowwise tables know what the next event will update."""
        if exchange is not None:
            exchange(plans)
        for label, plan in plans.items():
            if self.tables[label].table.is_rowwise:
                self.tables[label].prepare(plan)

    def compiled(self, call: Callable) -> Callable:
        """The call as a compiled graph, or as it is where nothing is compiled."""
        if not self.compiling:
            return call
        return torch.compile(call, dynamic=False, fullgraph=True)

    def kept(self, label: str, whole: Tensor) -> Tensor:
        """What this rank keeps of a whole parameter: of a table every W-th row, else all of it."""
        rows = self.planner.sizes.get(label)
        if rows is None:
            return whole
        return filled(whole[self.fabric.rank::self.fabric.world], rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], values: Values) -> float:
        """Mean loss per token (nats) over all ranks' batches.

        Of the next token only, without fp8, and with documents uncut.
        """
        self._set_rotary(values)
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        tokens = 0
        for batch in batches:
            spans = self._spans(values, batch.tokens.shape[1])
            sources = self._sources(batch)
            for part in self._micro_batches(batch):
                rows = self.model_hidden(part, spans, sources).flatten(0, 1)
                targets = part.targets.flatten()
                for y, target in zip(rows.split(EVAL_ROWS), targets.split(EVAL_ROWS)):
                    losses = self.next_token_losses(y, self.model.lm_head, target)
                    total += losses.sum(dtype=torch.float64)
            tokens += batch.targets.numel() * self.fabric.world
        return sum(self.fabric.of_all(float(total))) / tokens

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int], values: Values) -> Tensor:
        """Softcapped logits (V,) of the token that follows. Every rank calls it.

        Of a longer context the last val_slot_tokens count.
        """
        self._set_rotary(values)
        context = tokens[-values.val_slot_tokens:]
        length = -(-len(context) // SLOT_UNIT) * SLOT_UNIT
        padded = np.zeros(length + 1, np.uint16)              # nothing looks at later positions
        padded[:len(context)] = context
        slot = Slot(padded, np.asarray([0, length], np.int32))
        batch, = self.planner.batches("sample", [values], [[slot]])
        batch = batch.to(self.fabric.device)

        stream = self.model.hidden(batch, self._spans(values, length), self._sources(batch))
        logits = stream[0, len(context) - 1] @ self.model.lm_head
        return softcap(logits.to(self.exact))

    def _sources(self, batch: Batch) -> dict:
        """Rows that no one trains on, in tensors of their own."""
        sources = {}
        for label, table in self.tables.items():
            sources[label] = table.read(batch.plans[label], self.model.lm_head)
        if self.compiling:
            for label, (rows, _) in sources.items():
                if self.fabric.world > 1 or self.tables[label].table.is_rowwise:
                    torch._dynamo.maybe_mark_dynamic(rows, 0)
        return sources

    def _spans(self, values: Values, longest: int) -> AttentionSpans:
        """longest: upper bound of a document's length in tokens."""
        return spans_of(values.short_window, values.long_window, longest, values.rotary.attn_scale)

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """The batch in parts of slots_at_once."""
        for first in range(0, len(batch.tokens), self.slots_at_once):
            slots = slice(first, first + self.slots_at_once)
            part = batch.map(operator.itemgetter(slots))
            if self.compiling:                                # any number of documents, one graph
                torch._dynamo.maybe_mark_dynamic(part.cu_seqlens, 1)
            yield part

    def _set_rotary(self, values: Values) -> None:
        if values.rotary != self.rotary:
            self.model.set_rotary(values.rotary.frequencies)
            self.rotary = values.rotary


class Executor(Evaluator):
    """Trains the model on slots. Knows no step numbers beyond `values`, and no logs."""

    trains = True

    def __init__(self, cfg: Config, fabric: Fabric, attention: Callable, precision: str,
                 slots_at_once: int = 0, report: Callable = no_report) -> None:
        """precision: "plain", "fp8" or "emulated" head."""
        super().__init__(cfg, fabric, attention, slots_at_once, report)
        self.precision = precision
        self.model_losses = self.compiled(self.model.losses)
        several_micro_batches = has_several_micro_batches(cfg, fabric.world, self.slots_at_once)
        self.optimizer = Optimizer(
            cfg, fabric, self.model, self.compiled, self.tables, several_micro_batches)

    def forward_backward(self, batch: Batch, values: Values, loss_weight: float = 1.0) -> Losses:
        """Add loss_weight * d(sum of this rank's slot losses) to the gradients.

        Calls add up until optim_step. No reduction over ranks, no division, no waiting for the
        device. A weight of 0 adds zeros: this rank still takes part in the update.
        """
        self._set_rotary(values)
        sources = {}
        for label, table in self.tables.items():
            sources[label] = table.ready(batch.plans[label], self.model.lm_head)
        weights = torch.stack([self._scalar(weight) for weight in values.mtp_weights])
        backward_seed = self._scalar(loss_weight)
        spans = self._spans(values, min(values.max_doc_len, batch.tokens.shape[1]))

        sums = []
        for part in self._micro_batches(batch):
            losses = self.model_losses(part, weights, backward_seed, spans, self.precision, sources)
            slot_sums = losses.sum(dim=1)
            if loss_weight:
                self.optimizer.count_pass()
                slot_sums.sum().backward(backward_seed)
            sums.append(slot_sums.detach())
        if not loss_weight:
            self.optimizer.add_zeros()
        return Losses(torch.cat(sums), batch.tokens.numel())

    def _scalar(self, value: float) -> Tensor:
        """() on the device, made there: a copy from the host would wait."""
        return torch.full((), value, dtype=self.exact, device=self.fabric.device)

    def optim_step(self, values: Values, plans_ahead: Callable = no_plans) -> None:
        """Update what this step updates with the gradients so far, and clear these.

        plans_ahead: gives the plans of the next cycle.
        """
        self.optimizer.step(values, plans_ahead)

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that a run changes, by name: weights, rotary tables, moments, mantissas."""
        tensors = {name: p.data for name, p in self.model.named_parameters()}
        tensors.update(self.model.named_buffers())
        for label, state in self.optimizer.state.items():
            for name, x in state.items():
                tensors[f"{label}.{name}"] = x
        return tensors

    def snapshot(self) -> Snapshot:
        """All that a run changes, for `restore`."""
        tensors = {name: x.to("cpu", copy=True) for name, x in self.state_tensors().items()}
        cuda_rng = None
        if self.fabric.on_cuda:
            cuda_rng = torch.cuda.get_rng_state(self.fabric.device)
        adam_steps = dict(self.optimizer.adam_steps)
        touched = {label: list(table.home.touched()) for label, table in self.rowwise_tables().items()}
        return Snapshot(tensors, torch.get_rng_state(), cuda_rng, self.rotary, adam_steps, touched)

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Back to the snapshot bit by bit, in place.

        Every tensor keeps its address, so that nothing recompiles.
        """
        for name, x in self.state_tensors().items():
            x.copy_(saved.tensors[name])
        for label, table in self.rowwise_tables().items():
            table.home.load(saved.touched[label])
        self.rotary = saved.rotary
        self.optimizer.adam_steps = dict(saved.adam_steps)
        self.drop_gradients()
        torch.set_rng_state(saved.cpu_rng)
        if saved.cuda_rng is not None:
            torch.cuda.set_rng_state(saved.cuda_rng, self.fabric.device)

    def set_seed(self, seed: int) -> None:
        """Of another run in this process: its initial values, and the chances of its roundings."""
        self.model.set_initial_values(seed, self.kept)
        self.optimizer.seed = seed

    def drop_gradients(self) -> None:
        self.optimizer.clear(self.optimizer.weights)
        for table in self.tables.values():
            table.reset()

    def _whole(self, label: str, mine: Tensor) -> Tensor | None:
        """Slices of a moment as one, in logical order, on the host of rank 0. Every rank calls it."""
        mine = mine.detach()
        if label in self.tables:
            return self._whole_table(label, mine)
        if label not in self.optimizer.cut:
            return mine.cpu()
        slices = self.fabric.of_all(mine.cpu())
        return torch.cat(slices) if self.fabric.rank == 0 else None

    def _whole_table(self, label: str, mine: Tensor) -> Tensor | None:
        """Row r of the whole is row r div W of rank r mod W."""
        pieces = []
        for piece in mine.split(PIECE_ROWS):                  # not all of it in one message
            of_ranks = self.fabric.of_all(piece.cpu())
            if self.fabric.rank == 0:
                pieces.append(torch.stack(of_ranks, dim=1).flatten(0, 1))
        if self.fabric.rank != 0:
            return None
        rows = self.tables[label].table.rows                  # behind them is padding
        return torch.cat(pieces)[:rows]

    def weights(self, values: Values) -> dict[str, Tensor]:
        """All weights on the host of rank 0, in logical shapes and order. Every rank calls it.

        values: of the next step, or of the end; they say whether the embedding is still the head.
        """
        weights = {}
        for row in self.model.table.values():                 # all but rowwise tables, whose touched rows are saved
            p = self.model.get_parameter(row.label).detach()
            if row.label in self.tables:
                weights[row.label] = self._whole_table(row.label, p)
            else:
                weights[row.label] = p.to("cpu", copy=True)   # every rank has all of it, and maybe padding behind
        if values.tied:
            weights["embed"] = weights["lm_head"].t().contiguous()
        return weights

    def whole_state(self, values: Values) -> dict[str, Any]:
        """What a checkpoint in front of the step of these values holds besides pieces of tables: the same at every W.

        Between cycles, and on rank 0; every rank calls it.
        """
        moments = {}
        for label, state in self.optimizer.state.items():
            for name, x in state.items():
                moments[f"{label}.{name}"] = self._whole(label, x)
        return dict(weights=self.weights(values), moments=moments, tied=values.tied,
                    adam_steps=dict(self.optimizer.adam_steps))

    @torch.no_grad()
    def load_state(self, saved: dict[str, Any]) -> None:
        """This rank's part of what whole_state gave, in place. Rows of rowwise tables: see `load_tables`."""
        optimizer = self.optimizer
        for label, state in optimizer.state.items():
            weight = saved["weights"][label]
            optimizer.weights[label].copy_(self.kept(label, weight))
            for name, x in state.items():
                moment = saved["moments"][f"{label}.{name}"]
                x.copy_(optimizer.slice_of(label, self.kept(label, moment)))
        optimizer.adam_steps = dict(saved["adam_steps"])
        self.drop_gradients()

    def traffic(self) -> dict[str, dict[str, int]]:
        """By table: bytes that training moved over all ranks, and memory on this one.

        Every rank calls it, once, at the end.
        """
        result = {}
        for label, table in self.tables.items():
            for plan in table.open_plans:                     # of a cycle that the run ended in the middle of
                table.account(plan, dense_passes=1)           # no gradients went back
            if table.table.is_rowwise:
                table.account_rest()
            result[label] = dict.fromkeys(table.totals, 0)
            for totals in self.fabric.of_all(table.totals):
                for key, count in totals.items():
                    result[label][key] += count

            moments = self.optimizer.state.get(label, {}).values()
            result[label]["memory_bytes"] = table.memory_bytes(moments)
        return result

    def touched_rows(self) -> dict[str, int]:
        """By rowwise table: rows that some event has touched, on all ranks. Every rank calls it."""
        counts = {}
        for label, table in self.rowwise_tables().items():
            mine = sum(len(places) for places in table.home.touched_places())
            counts[label] = sum(self.fabric.of_all(mine))
        return counts


# ---- Memory: an estimate before anything is built
def stored_bytes(cfg: Config, world: int, slots_at_once: int) -> dict[str, int]:
    """Bytes of weights, gradients (with what travels of them) and moments on one rank, by the parameter table.

    Of all but tables of rule "rowwise".
    """
    dtype = getattr(torch, cfg.dtype)
    exact_bytes = accum_dtype(dtype).itemsize
    mantissa_bytes = torch.int16.itemsize if dtype == torch.bfloat16 else 0
    longest = max(stage.batch_tokens for stage in cfg.stages) // cfg.num_slots
    numbers_read = math.inf                                   # of a table, in a cycle, if a token reads one row
    if cfg.row_comms == "sparse":
        tokens_of_a_cycle = CYCLE * longest * cfg.num_slots // world
        numbers_read = tokens_of_a_cycle * cfg.model_dim

    several_micro_batches = has_several_micro_batches(cfg, world, slots_at_once)
    weights = gradients = moments = 0
    for row in parameter_table(cfg):
        if row.optimizer == "rowwise":                        # `rowwise_bytes` has it
            continue
        count = math.prod(row.shape)
        held = count
        if row.rows and world > 1:                            # slice and cache
            held = count // world + min(count, numbers_read * row.rows.reads)
        weight_bytes = exact_bytes if row.full_precision else dtype.itemsize
        gradient_bytes = exact_bytes if row.rows else weight_bytes
        if not row.sharded:                                   # beside autograd's, one in the buffer that all ranks sum
            gradient_bytes += exact_bytes
        if row.parts and writes_often(row, several_micro_batches):
            gradient_bytes = exact_bytes
            if world > 1 and exact_bytes != weight_bytes:     # and a copy to send
                gradient_bytes += weight_bytes
        if row.optimizer == "adam":
            state_bytes = 2 * exact_bytes
        else:
            state_bytes = exact_bytes + mantissa_bytes
        sharers = world if row.sharded else 1

        weights += held * weight_bytes
        gradients += held * gradient_bytes
        moments += count * state_bytes // sharers
    return dict(weights=weights, gradients=gradients, moments=moments)


def tokens_of_run(cfg: Config) -> int:
    """In all steps of training and of the warm-up; a table of n-grams is asked for a row for each of them."""
    schedule = Schedule(cfg)
    counts = schedule.steps_by_stage(0, schedule.end_step)
    tokens = sum(count * stage.batch_tokens for count, stage in zip(counts, cfg.stages))
    for step in schedule.warm_up_steps():
        tokens += cfg.stages[schedule.stage_at(step)].batch_tokens
    return tokens


def touched_bytes(count: int, item_bytes: int, touched: int) -> int:
    """Of a mapping of `count` items: bytes of the pages that are written if so many are, and of the page table."""
    whole = count * item_bytes
    across_a_border = item_bytes - math.gcd(item_bytes, PAGE_BYTES)           # some items lie in two pages: on average
    written = min(whole, touched * (PAGE_BYTES + across_a_border))
    tables = min(whole // (PAGE_BYTES * PAGES_OF_A_TABLE), touched)
    return written + tables * PAGE_BYTES


def asked_and_live(table: Table, cfg: Config, world: int) -> tuple[int, int]:
    """Most rows of a cycle that a rank asks for, and that an owner is asked for: both are spread evenly."""
    size = -(-table.rows // world)
    tokens_of_a_cycle = table.cadence * max(stage.batch_tokens for stage in cfg.stages)
    asked = tokens_of_a_cycle // world * table.reads
    return min(world * size, asked), min(size, asked)


def rowwise_bytes(row: Parameter, cfg: Config, fabric: Fabric) -> dict[str, int]:
    """Bytes that a table of rule "rowwise" keeps on one rank, by part of the estimate.

    On a CPU both homes are mappings of host memory, which take no more than the rows that the run touches.
    """
    table = row.rows
    dtype = getattr(torch, cfg.dtype)
    exact_bytes = accum_dtype(dtype).itemsize
    row_bytes = cfg.model_dim * dtype.itemsize
    last_bytes = torch.int32.itemsize
    size = -(-table.rows // fabric.world)

    asked, live = asked_and_live(table, cfg, fabric.world)
    sets = 2 if table.home == "host" else 1                                   # the rows of a cycle, and of the next
    cache = asked * row_bytes
    sums = asked * cfg.model_dim * exact_bytes
    live_rows = sets * live * row_bytes
    live_state = sets * live * (exact_bytes + last_bytes)
    on_device = dict(weights=cache + live_rows, gradients=sums, moments=live_state)

    if fabric.on_cuda and table.home == "device":
        on_device["weights"] += size * row_bytes
        on_device["moments"] += size * (exact_bytes + last_bytes)
        return on_device
    touched = min(size, -(-tokens_of_run(cfg) * table.reads // fabric.world))
    staging = 0
    if fabric.on_cuda:                                        # pinned, up and down, each in up to twice its size
        staging = 2 * 2 * live * (row_bytes + exact_bytes + last_bytes)
    return on_device | {ON_HOST: mapped_bytes(cfg, size, touched) + staging}


def mapped_bytes(cfg: Config, size: int, touched: int) -> int:
    """Of the mappings of an owner's rows, their second moments and last events, of which so many are touched."""
    dtype = getattr(torch, cfg.dtype)
    of_a_row = cfg.model_dim * dtype.itemsize, accum_dtype(dtype).itemsize, torch.int32.itemsize
    return sum(touched_bytes(size, item_bytes, touched) for item_bytes in of_a_row)


def event_bytes(row: Parameter, cfg: Config, world: int) -> int:
    """Bytes that a table of rule "rowwise" needs around an event, beside what it keeps.

    Gradients that are sent, those that arrive and their sums; then the rows of the next event, and what leaves of them.
    """
    dtype = getattr(torch, cfg.dtype)
    row_bytes = cfg.model_dim * dtype.itemsize
    asked, live = asked_and_live(row.rows, cfg, world)
    sums = live * cfg.model_dim * accum_dtype(dtype).itemsize
    return 3 * asked * row_bytes + live * row_bytes + sums


def working_bytes(cfg: Config, compiled: bool, slots_at_once: int) -> int:
    """Bytes of a step's activations and logits at the largest, by a model.

    compiled: attention and head are kernels.
    """
    dtype = getattr(torch, cfg.dtype)
    exact_bytes = accum_dtype(dtype).itemsize
    row_bytes = cfg.model_dim * dtype.itemsize
    if compiled:
        saved_rows, kept_rows = SAVED_ROWS, EVAL_KEPT_ROWS
        logit_bytes = LOGIT_COPIES * dtype.itemsize
        eval_logit_bytes = EVAL_LOGIT_COPIES * dtype.itemsize
    else:
        saved_rows, kept_rows = SAVED_ROWS_REFERENCE, EVAL_KEPT_ROWS_REFERENCE
        logit_bytes = LOGIT_COPIES_REFERENCE * exact_bytes
        eval_logit_bytes = EVAL_LOGIT_COPIES_REFERENCE * exact_bytes

    longest = max(stage.batch_tokens for stage in cfg.stages) // cfg.num_slots
    token_bytes = len(LAYERS) * saved_rows * row_bytes + cfg.padded_vocab * logit_bytes
    training = slots_at_once * longest * token_bytes

    tokens = slots_at_once * cfg.val_batch_tokens // cfg.num_slots
    logits = min(tokens, EVAL_ROWS) * cfg.padded_vocab * eval_logit_bytes
    evaluating = max(tokens * kept_rows * row_bytes, tokens * row_bytes + logits)
    return max(training, evaluating)


def memory_estimate(cfg: Config, fabric: Fabric, kernel: Callable,
                    slots_at_once: int) -> dict[str, int]:
    """Bytes of each part of a run at its largest, by name."""
    parts = Counter(stored_bytes(cfg, fabric.world, slots_at_once))
    for row in parameter_table(cfg):
        if row.optimizer == "rowwise":
            parts.update(rowwise_bytes(row, cfg, fabric))
    working = working_bytes(cfg, kernel is attention_varlen, slots_at_once)
    updating = sum(event_bytes(row, cfg, fabric.world) for row in parameter_table(cfg) if row.optimizer == "rowwise")
    return dict(parts) | dict(working=max(working, updating))


def fit_memory(cfg: Config, fabric: Fabric, kernel: Callable) -> tuple[int, dict[str, int]]:
    """Slots that go through the model together, and the estimate of what that takes.

    On a GPU they follow from the card, not from what others use of it now: a run is the same each time.
    Raises RunError with choices that would fit, and ConfigError.
    """
    local = cfg.num_slots // fabric.world
    memory = min(fabric.of_all(fabric.total_memory()))
    check_dense_updates(cfg, fabric.world, MOST_ADAM_BYTES)
    room = MEMORY_SHARE * memory
    if cfg.slots_per_micro_batch:
        choices = [min(cfg.slots_per_micro_batch, local)]
    else:
        choices = [m for m in range(local, 0, -1) if local % m == 0]

    first_fit = next((m for m in choices if needed_bytes(cfg, fabric, kernel, m) <= room), 0)
    chosen = min(fabric.of_all(first_fit))
    estimate = memory_estimate(cfg, fabric, kernel, chosen or choices[-1])
    parts = ", ".join(f"{part} {size / 2**30:.1f} GiB" for part, size in estimate.items())
    if not chosen:
        raise RunError("memory", f"{room / 2**30:.1f} GiB to use", f"room for {parts}",
                       ways_out(cfg, fabric, kernel, choices[-1], room))
    check_dense_updates(cfg, fabric.world, memory)
    check_host_memory(cfg, fabric)

    if fabric.on_cuda:
        free = FREE_SHARE * min(fabric.of_all(fabric.free_memory()))
        if needed_bytes(cfg, fabric, kernel, chosen) > free:
            raise RunError("memory", f"{free / 2**30:.1f} GiB of the GPU's free", f"room for {parts}",
                           f"end what else uses the GPU; or {ways_out(cfg, fabric, kernel, choices[-1], free)}")
    return chosen, estimate


def needed_bytes(cfg: Config, fabric: Fabric, kernel: Callable, slots_at_once: int) -> int:
    """Bytes of the device. A CPU's are those of the host."""
    estimate = memory_estimate(cfg, fabric, kernel, slots_at_once)
    if fabric.on_cuda:
        estimate.pop(ON_HOST, 0)
    return sum(estimate.values())


def host_bytes(cfg: Config, fabric: Fabric) -> int:
    """Bytes of tables in host memory, of one rank."""
    rows = [row for row in parameter_table(cfg) if row.optimizer == "rowwise"]
    return sum(rowwise_bytes(row, cfg, fabric).get(ON_HOST, 0) for row in rows)


def check_dense_updates(cfg: Config, world: int, most_bytes: float) -> None:
    """Raise ConfigError for a table of which an update of all rows moves more than so many bytes on a rank."""
    bytes_of_a_row = ADAM_BYTES * cfg.model_dim
    for row in parameter_table(cfg):
        if row.rows is None or row.optimizer != "adam":
            continue
        size = -(-row.rows.rows // world)
        moved = size * bytes_of_a_row
        if moved <= most_bytes:
            continue
        ways = ["more ranks"]
        if row.label in {line.label for line in NGRAM_TABLES}:
            ways.append("--table_rule=rowwise")
        most_rows = int(most_bytes // bytes_of_a_row) * world
        ways.append(rows_set_to(row.label, most_rows))
        raise ConfigError(
            f"rule adam of {row.label}",
            f"{moved / 1e9:.1f} GB, {ADAM_BYTES} bytes for each element of an owner's {size} rows, in every update",
            f"at most {most_bytes / 1e9:.1f} GB", ", or ".join(filter(None, ways)))


def room_on_host(fabric: Fabric) -> float:
    """Bytes for the tables of one rank in host memory, on the host that has the least."""
    mine = MEMORY_SHARE * fabric.free_host_memory() / fabric.ranks_here
    return min(fabric.of_all(mine))


def check_host_memory(cfg: Config, fabric: Fabric) -> None:
    """Raise RunError where the rows that the run can touch do not fit into the memory of the host."""
    needed = host_bytes(cfg, fabric)
    if needed == 0:
        return
    room = room_on_host(fabric)
    if needed > room:
        def fits(choice: Config) -> bool:
            return host_bytes(choice, fabric) <= room

        ways = [*smaller_tables(cfg, fits), "fewer steps", "more hosts"]
        raise RunError(ON_HOST, f"{room / 2**30:.1f} GiB for each rank",
                       f"{needed / 2**30:.1f} GiB: pages of the rows that {tokens_of_run(cfg)} tokens can touch, and "
                       "of their state", ", or ".join(ways))


def ways_out(cfg: Config, fabric: Fabric, kernel: Callable, slots_at_once: int, room: float) -> str:
    """Flags that fit into so many bytes of the device."""
    on_host = math.inf
    if ngram_tables(cfg):
        on_host = room_on_host(fabric)

    def fits(choice: Config) -> bool:
        return needed_bytes(choice, fabric, kernel, slots_at_once) <= room and host_bytes(choice, fabric) <= on_host

    return ", or ".join([*smaller_tables(cfg, fits), smaller_batches(cfg, fabric, kernel, room)])


def smaller_tables(cfg: Config, fits: Callable[[Config], bool]) -> list[str]:
    """Flags of tables of n-grams with which a run fits, each alone: another rule, another home, the most rows."""
    ways = []
    if ngram_tables(cfg):
        for setting, value in (("table_rule", "rowwise"), ("table_home", "host")):
            choice = replace(cfg, **{setting: value})
            if choice != cfg and choice.table_rule == "rowwise" and fits(choice):
                ways.append(f"--{setting}={value}")

    settings = [line.rows for line in NGRAM_TABLES if isinstance(line.rows, str) and getattr(cfg, line.rows) > 0]
    alone = [fewer_rows(cfg, [setting], fits) for setting in settings]
    if not any(alone):                                        # then all of them together
        alone = [fewer_rows(cfg, settings, fits)]
    return ways + [flags for flags in alone if flags]


def fewer_rows(cfg: Config, settings: Sequence[str], fits: Callable[[Config], bool]) -> str:
    """Flags of the most rows with which a run fits, the same for all these settings; empty: none are few enough."""
    def limited(rows: int) -> dict[str, int]:
        return {setting: min(rows, getattr(cfg, setting)) for setting in settings}

    def too_many(rows: int) -> bool:
        return not fits(replace(cfg, **limited(rows)))

    largest = max((getattr(cfg, setting) for setting in settings), default=0)
    most = bisect.bisect_left(range(largest), True, key=too_many) - 1
    if most < LEAST_NGRAM_ROWS:
        return ""
    return " ".join(f"--{setting}={rows}" for setting, rows in limited(most).items())


def smaller_batches(cfg: Config, fabric: Fabric, kernel: Callable, room: float) -> str:
    """Flags that fit into so many bytes, or what else there is to do."""
    batches = [cfg.val_batch_tokens, *(stage.batch_tokens for stage in cfg.stages)]
    most_slots = math.gcd(*batches) // SLOT_UNIT
    for slots in range(cfg.num_slots, most_slots + 1, cfg.num_slots):
        choice = replace(cfg, num_slots=slots)
        if most_slots % slots == 0 and needed_bytes(choice, fabric, kernel, 1) <= room:
            return f"--num_slots={slots} --slots_per_micro_batch=1"
    return "more ranks, a larger device"


# ---- Files: a save to sample from, checkpoints to go on from. Nothing in a file is trusted.
TABLES = "tables.json"                   # constants of the tables of n-grams in a save, and the files with their rows
SAVED_FILES = (VOCABULARY, "weights.pt", TABLES, "config.json")
TABLE_CONSTANTS = ("label", "rows", "hash", "sign_hash", "signs", "enters")   # columns of NGRAM_TABLES
PIECES = "rows-*.pt"                     # rows of a table of rule "rowwise", as named by `Piece`
CLOCK_TICK = 1e-9                        # s; no step is shorter
KEPT_CHECKPOINTS = 2
NEW_CHECKPOINT = "new.pt"                # a checkpoint whose hash is not known yet


class TensorKind(NamedTuple):
    """What is known of a tensor before it is read from a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape} {dtype}"


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_of(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(f"{path.name}.part")


def take_lock(file: BinaryIO | int, shared: bool = False) -> bool:
    """Lock an open file or folder until its process closes it or ends. False if another one has it locked.

    shared: with whoever shares it too, and waiting for whoever does not, who will not be long.
    """
    try:
        import fcntl
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except (ImportError, OSError):       # Windows; a file system without locks
        pass
    return True


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove what killed runs left behind. What a live one is writing is locked, and stays."""
    for path in paths:
        with contextlib.suppress(OSError):                    # not there, or not ours to remove
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            with open(path, "rb") as file:
                abandoned = take_lock(file)
            if abandoned:
                path.unlink()


def remove_files(paths: Iterable[Path]) -> None:
    """Remove what is there and can be removed."""
    for path in paths:
        with contextlib.suppress(OSError):                    # a folder, say: it is in nobody's way
            path.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the system refuses inside is raised as a RunError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RunError(f"writing {path}", reason_of(error), "room, and the right to write there",
                       "free some, or name another folder") from None


def save_tensors(content: Any, file: BinaryIO) -> None:
    """torch.save, but what stopped the writing is raised as it was.

    torch makes a RuntimeError of its own of whatever happens below its writer, even of a signal.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None


def write_part(path: Path, content: Any) -> dict[str, Any]:
    """Write the part of a file, whole and flushed; giving it its name is left to the caller.

    content: bytes, or what torch.save takes. Returns the file's entry in a manifest.
    Raises RunError; then nothing stays.
    """
    part = part_of(path)
    try:
        with writing(path):
            part.unlink(missing_ok=True)
            with open(part, "x+b") as file:                   # x: never through somebody's link
                take_lock(file)
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    save_tensors(content, file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256")
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            part.unlink()
        raise
    return dict(bytes=size, sha256=digest.hexdigest())


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A handle of a folder. Raises OSError, on Windows always."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def flush_names(folder: Path) -> None:
    """Make new names in a folder outlast a power failure, where the system can."""
    with contextlib.suppress(OSError), opened(folder) as handle:
        os.fsync(handle)


class Piece(NamedTuple):
    """What the name of a file with rows of a table says: ids, rows and, in a checkpoint, their state."""

    step: int                            # that the run had done
    label: str                           # of the table
    rank: int                            # that owned the rows, of so many:
    world: int
    number: int                          # among the pieces of that rank
    sha256: str                          # of the content; empty while it is not written

    def __str__(self) -> str:
        """The file's name, but what it ends with."""
        name = f"rows-{self.step:07d}-{self.label}-{self.rank}of{self.world}-{self.number:04d}"
        return f"{name}-{self.sha256}" if self.sha256 else name

    @classmethod
    def named(cls, name: Any) -> Piece | None:
        """What a name says; None: it is not a piece's."""
        form = r"rows-(\d{7})-(\w+)-(\d{1,6})of(\d{1,6})-(\d{4,9})-([0-9a-f]{64})\.pt"
        found = re.fullmatch(form, name, re.ASCII) if isinstance(name, str) else None
        if found is None:
            return None
        step, label, rank, world, number, sha256 = found.groups()
        return cls(int(step), label, int(rank), int(world), int(number), sha256)


@contextlib.contextmanager
def pieces_without_a_name(folder: Path) -> Iterator[None]:
    """Inside, nobody takes what is written to the folder for leftovers. The folder is made. Raises RunError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as open_inside:
        with contextlib.suppress(OSError):                    # what cannot be locked is not tidied up either
            handle = open_inside.enter_context(opened(folder))
            take_lock(handle, shared=True)
        yield


def remove_pieces(folder: Path, pattern: str) -> None:
    """Remove the pieces, whole or not, of killed runs and removed checkpoints, unless a live run writes some.

    Whole ones belong to the checkpoint of their step.
    """
    with contextlib.suppress(OSError), opened(folder) as handle:
        if not take_lock(handle):
            return
        steps = {path.name[len("step-"):len("step-0000000")] for path in folder.glob("step-*.pt")}
        for path in folder.glob(pattern):
            piece = re.fullmatch(r"rows-(\d{7})-.*\.(pt|part)", path.name)
            if piece is None:
                continue
            step, ending = piece.groups()
            if ending == "part" or step not in steps:
                remove_files([path])


def write_pieces(folder: Path, step: int, tables: dict[str, EventTable], with_state: bool) -> dict[str, Any]:
    """Write the touched rows of this rank's slices, as parts of the files that they are to be.

    Returns their entries in a manifest by name. Raises RunError; then nothing stays.
    """
    entries: dict[str, Any] = {}
    parts = []                                                # what is removed if one of them fails
    try:
        for label, table in tables.items():
            for number, (ids, live) in enumerate(table.touched()):
                content = dict(ids=ids, rows=live.rows)
                if with_state:
                    content |= dict(v=live.v, last=live.last)
                piece = Piece(step, label, table.fabric.rank, table.fabric.world, number, sha256="")
                unnamed = folder / str(piece)
                parts.append(part_of(unnamed))
                entry = write_part(unnamed, content)
                name = f"{piece._replace(sha256=entry['sha256'])}.pt"
                parts.append(part_of(folder / name))
                with writing(unnamed):
                    part_of(unnamed).rename(part_of(folder / name))
                entries[name] = entry
    except BaseException:
        remove_files(parts)
        raise
    return entries


@contextlib.contextmanager
def pieces_of_all(folder: Path, step: int, tables: dict[str, EventTable], with_state: bool,
                  fabric: Fabric) -> Iterator[dict[str, Any]]:
    """The touched rows of all ranks as parts of files, which rank 0 gives their names inside: entries in a manifest.

    Every rank calls it, and nobody waits for others inside. Raises RunError on all of them if one fails, inside too;
    then no parts stay.
    """
    entries: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as until_named:
            if tables:
                with fabric.failing_together():
                    if fabric.rank == 0:
                        until_named.enter_context(pieces_without_a_name(folder))
                with fabric.failing_together():
                    mine = write_pieces(folder, step, tables, with_state)
                for theirs in fabric.of_all(mine):
                    entries |= theirs
            with fabric.failing_together():
                yield entries
    except BaseException:
        remove_files(part_of(folder / name) for name in mine)
        raise


def table_constants(cfg: Config) -> list[dict[str, Any]]:
    """What decides which rows of the tables of n-grams a token reads and where they go, table by table, for a file."""
    constants = []
    for line in ngram_tables(cfg):
        columns = {name: getattr(line, name) for name in TABLE_CONSTANTS}
        as_in_a_file = json.loads(json.dumps(columns))        # a list for a tuple
        constants.append(as_in_a_file)
    return constants


def table_records(cfg: Config, pieces: Iterable[str]) -> list[dict[str, Any]]:
    """What a checkpoint or a save says of its tables of n-grams: constants, and the files with their rows."""
    records = []
    for constants in table_constants(cfg):
        names = [name for name in pieces if Piece.named(name).label == constants["label"]]
        records.append(dict(constants, pieces=names))
    return records


def saved_already(folder: Path) -> list[str]:
    """Names in a folder that a save would write over, or that would be mixed with it."""
    found = [name for name in (*SAVED_FILES, MANIFEST) if os.path.lexists(folder / name)]
    if any(folder.glob(PIECES)):
        found.append(PIECES)
    return found


def prepare_save(folder: Path) -> None:
    """Before training: see that a save can be written there, over nobody's. Raises ConfigError."""
    taken = saved_already(folder)
    if taken:
        raise ConfigError(f"--save={folder}", f"{', '.join(taken)}, of another run or data set",
                          "a folder without a save", "another --save=DIR, or move these files away")
    trial = part_of(folder / MANIFEST)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(part_of(folder / name) for name in (*SAVED_FILES, MANIFEST))
        remove_pieces(folder, "rows-*.part")
        open(trial, "xb").close()
        trial.unlink()
    except (OSError, ValueError) as error:
        found = reason_of(error)
        if folder.is_dir():
            found = f"a folder that takes no file ({found})"
        elif os.path.lexists(folder):
            found = "something that is not a folder"
        raise ConfigError(f"--save={folder}", found, "a folder that can be written to",
                          "another --save=DIR") from None


def save_contents(cfg: Config, tensors: dict[str, Tensor], vocabulary: list[bytes] | None,
                  pieces: Iterable[str]) -> dict[str, Any]:
    """Files of a save but pieces and manifest, by name. vocabulary: bytes of the tokens, where known."""
    contents: dict[str, Any] = {}
    if vocabulary is not None:
        lines = []
        for token, piece in enumerate(vocabulary):
            if piece:
                lines.append(b"%s %d\n" % (base64.b64encode(piece), token))
        contents[VOCABULARY] = b"".join(lines)
    contents["weights.pt"] = tensors
    if ngram_tables(cfg):
        contents[TABLES] = json.dumps(table_records(cfg, pieces), indent=1).encode()
    contents["config.json"] = json.dumps(asdict(cfg), indent=1).encode()
    return contents


def save_weights(folder: Path, cfg: Config, tensors: dict[str, Tensor],
                 vocabulary: list[bytes] | None, pieces: dict[str, Any] | None = None) -> None:
    """Write weights.pt (logical shapes and order), config.json, vocab.txt, tables.json and the manifest.

    pieces: rows of tables, as parts that are there already: their entries in the manifest by name.
    All are whole and flushed before the first gets its name. Without config.json a folder is no
    save, so that one whose names a kill cut short is refused by `load_weights`.
    Raises RunError; then nothing half-made stays.
    """
    pieces = pieces or {}
    contents = save_contents(cfg, tensors, vocabulary, pieces)
    names = (*pieces, *contents, MANIFEST)
    written = [part_of(folder / name) for name in names]      # all that is removed if one of them fails
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            entries = dict(pieces)
            for name, content in contents.items():
                entries[name] = write_part(folder / name, content)
            manifest = json.dumps(dict(format=MANIFEST_FORMAT, files=entries), indent=1)
            write_part(folder / MANIFEST, manifest.encode())

            taken = saved_already(folder)
            if taken:
                raise ValueError(f"another run has saved {', '.join(taken)} there in the meantime")
            for name in names:
                part_of(folder / name).rename(folder / name)
                written.append(folder / name)
            flush_names(folder)
    except BaseException:
        remove_files(written)
        raise


def is_record(found: Any, **types: type) -> bool:
    """Whether this is a dictionary of exactly these keys, with values of exactly these types."""
    if not isinstance(found, dict) or found.keys() != types.keys():
        return False
    return all(type(found[key]) is kind for key, kind in types.items())


def read_json(path: Path, what: str) -> Any:
    """What is in a JSON file. Raises DataError, whatever the file is."""
    content = read_bounded(path, what)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} as {what}", f"{type(error).__name__}: {error}",
                        "JSON, as --save writes it", "train with --save=DIR again") from None


def read_tensors(path: Path, what: str) -> Any:
    """What torch.save wrote; no code in it is run. Raises DataError, whatever the file is."""
    regular_file(path, what)
    try:
        return torch.load(path, "cpu", weights_only=True, mmap=True)
    except Exception as error:           # its text would advise to let the file run its code
        kind = type(error).__name__
        raise DataError(f"{path} as {what}",
                        f"{kind}: this file would run code when loaded, or is damaged",
                        "tensors, as this trainer writes them",
                        "take a file that you know") from None


def check_save(folder: Path) -> None:
    """Raise DataError if a save is not what its manifest says. Older saves have no manifest."""
    if not os.path.lexists(folder / MANIFEST):
        return
    written = read_manifest(folder)
    pieces = {path.name for path in folder.glob(PIECES)}
    pieces.update(name for name in written if Piece.named(name))
    for name in (*SAVED_FILES, *sorted(pieces)):
        path = folder / name
        if name in written:
            size = regular_file(path, f"part of a save, which {MANIFEST} names").stat().st_size
            sound = size == written[name].size and file_sha256(path) == written[name].sha256
            found = "another content than the manifest says"
        else:
            sound = not os.path.lexists(path)
            found = "a file that the manifest does not name"
        if not sound:
            raise DataError(f"{path} beside {MANIFEST}", found, "the files of one run, as written",
                            "copy the save again: it is damaged, or mixed from several")


def whole_parameters(cfg: Config) -> list[Parameter]:
    """Rows of the parameter table that a file holds whole: all but those of rule "rowwise"."""
    return [row for row in parameter_table(cfg) if row.optimizer != "rowwise"]


def weight_kinds(cfg: Config) -> dict[str, TensorKind]:
    """Shape and type of every weight in a file, by label."""
    dtype = getattr(torch, cfg.dtype)
    exact = accum_dtype(dtype)
    kinds = {}
    for row in whole_parameters(cfg):
        kinds[row.label] = TensorKind(row.shape, exact if row.full_precision else dtype)
    return kinds


def moment_kinds(cfg: Config) -> dict[str, TensorKind]:
    """Shape and type of all that the optimizer keeps, whole, as in a checkpoint."""
    dtype = getattr(torch, cfg.dtype)
    exact = accum_dtype(dtype)
    kinds = {}
    for row in whole_parameters(cfg):
        if row.optimizer == "adam":
            kinds[f"{row.label}.m"] = TensorKind(row.shape, exact)
            kinds[f"{row.label}.v"] = TensorKind(row.shape, exact)
            continue
        height, width = matrix_shape(row.label, row.shape)
        count = math.prod(row.shape) // (height * width)
        matrices = (count, height, width)
        kinds[f"{row.label}.momentum"] = TensorKind(matrices, exact)
        kinds[f"{row.label}.second"] = TensorKind(second_shape(matrices), exact)
        if dtype == torch.bfloat16:
            kinds[f"{row.label}.mantissa"] = TensorKind(matrices, torch.int16)
    return kinds


def fault_of(name: Any, x: Any, expected: TensorKind | None) -> str:
    """What is wrong with one tensor of a file, in words, or an empty text."""
    if expected is None:
        return f"{name!r:.60} unknown"
    plain = isinstance(x, Tensor) and x.layout == torch.strided and x.device.type == "cpu"
    if not plain or x.is_nested:
        return f"{name} is no plain tensor"
    kind = TensorKind(tuple(x.shape), x.dtype)
    if kind != expected:
        return f"{name} is {kind} instead of {expected}"
    if not x.isfinite().all():
        return f"{name} is not finite"
    return ""


def faults(tensors: Any, expected: dict[str, TensorKind]) -> str:
    """The first three faults of tensors from a file, in words, or an empty text."""
    if not isinstance(tensors, dict):
        return f"{type(tensors).__name__} instead of tensors by name"
    found = [f"{name} missing" for name in expected if name not in tensors]
    for name, x in tensors.items():
        fault = fault_of(name, x, expected.get(name))
        if fault:
            found.append(fault)
    return ", ".join(found[:3])


def piece_kinds(cfg: Config, count: int, with_state: bool) -> dict[str, TensorKind]:
    """Shape and type of what is in a file with so many rows of a table."""
    dtype = getattr(torch, cfg.dtype)
    kinds = dict(ids=TensorKind((count,), torch.int64), rows=TensorKind((count, cfg.model_dim), dtype))
    if with_state:
        kinds["v"] = TensorKind((count,), accum_dtype(dtype))
        kinds["last"] = TensorKind((count,), torch.int32)
    return kinds


def wrong_with_piece(content: Any, piece: Piece, cfg: Config, rows: int, events: int | None, behind: int) -> str:
    """What does not fit in the content of a piece, or an empty text.

    rows: of its table. events: of the table so far; None: there is no state. behind: the row that it has to go on
    behind, the last one of the piece before.
    """
    ids = content.get("ids") if isinstance(content, dict) else None
    if not isinstance(ids, Tensor) or not 0 < ids.numel() <= rows:
        return f"not 1 to {rows} rows with their numbers"
    wrong = faults(content, piece_kinds(cfg, ids.numel(), with_state=events is not None))
    if wrong:
        return wrong
    if ids[0] <= behind or (ids.diff() <= 0).any():
        return f"rows that do not ascend, behind row {behind}"
    if ids[-1] >= rows:
        return f"row {ids[-1]} of a table of {rows}"
    if (ids % piece.world != piece.rank).any():
        return f"rows of another owner than rank {piece.rank} of {piece.world}"
    if events is None:
        return ""
    if (content["v"] < 0).any():
        return "a second moment below 0"
    first, last = content["last"].min(), content["last"].max()
    if first < 1 or last > events:
        return f"rows that were touched last at events {first} to {last}, of 1 to {events}"
    return ""


def saved_rows(folder: Path, names: Iterable[str], cfg: Config, rows: int,
               events: int | None) -> Iterator[tuple[Tensor, Live]]:
    """Rows of a table from its pieces, one piece at a time, each of them checked. Raises DataError.

    rows, events: as for wrong_with_piece. Numbers (n,) i64 in the whole table, ascending for each owner.
    """
    rank = None
    for name in names:
        piece = Piece.named(name)
        if piece.rank != rank:
            rank = piece.rank
            behind = -1
        what = f"rows of {piece.label}"
        content = read_tensors(folder / name, what)
        wrong = wrong_with_piece(content, piece, cfg, rows, events, behind)
        if wrong:
            raise DataError(f"{folder / name} as {what}", wrong, "rows that were touched, as this trainer writes them",
                            "go on from another checkpoint, or copy the files again")
        ids = content["ids"]
        behind = int(ids[-1])
        if events is None:                                    # for readers: touched at some time
            content["v"] = torch.zeros(len(ids))
            content["last"] = torch.ones(len(ids))
        yield ids, Live(content["rows"], content["v"], content["last"])


def load_tables(folder: Path, cfg: Config, records: list[dict[str, Any]], counts: dict[str, int] | None,
                tables: dict[str, EventTable], fabric: Fabric) -> None:
    """Put the saved rows of the tables in the place of all. Every rank calls it, each for what it owns.

    cfg: of the run that saved. counts: events by label; None for a save. Raises DataError on all ranks if one fails.
    """
    with fabric.failing_together():
        for record in records:
            label = record["label"]
            if label not in tables:
                continue
            names = pieces_to_read(record["pieces"], fabric)
            events = counts[label] if counts else None
            tables[label].load(saved_rows(folder, names, cfg, record["rows"], events))


def pieces_to_read(names: Iterable[str], fabric: Fabric) -> list[str]:
    """Those of a table's pieces that may hold rows which this rank owns, all of an earlier owner or none."""
    names_to_read = []
    for name in names:
        piece = Piece.named(name)
        common = math.gcd(piece.world, fabric.world)          # row r is of owner r mod W, then and now
        if piece.rank % common == fabric.rank % common:
            names_to_read.append(name)
    return names_to_read


def wrong_with_tables(records: Any, cfg: Config, step: int | None) -> str:
    """What does not fit in what a file says of its tables of n-grams, or an empty text. step: None: of any."""
    try:
        json.dumps(records)                                   # plain values can be compared, whatever they are
    except (TypeError, ValueError, RecursionError):
        return "tables of another form"
    if not isinstance(records, list):
        return "tables that are no list"
    for record in records:
        if not isinstance(record, dict) or record.keys() != {*TABLE_CONSTANTS, "pieces"}:
            return "a table of another form"
        if not isinstance(record["pieces"], list):
            return "pieces of a table that are no list"

    expected = table_constants(cfg)
    found_labels = [record["label"] for record in records]
    expected_labels = [constants["label"] for constants in expected]
    if found_labels != expected_labels:
        return f"the tables {shown(found_labels)}, where this trainer has {expected_labels}"
    rowwise = {table.label for table in row_tables(cfg) if table.is_rowwise}
    for record, constants in zip(records, expected):
        label = constants["label"]
        for name, value in constants.items():
            if record[name] != value:
                return f"{label} with {name} {shown(record[name])}, where this trainer has {value}"
        if record["pieces"] and label not in rowwise:
            return f"pieces of {label}, which weights.pt holds"
        wrong = wrong_with_names(record["pieces"], label, step)
        if wrong:
            return wrong
    return ""


def wrong_with_names(names: list, label: str, step: int | None) -> str:
    """What does not fit in the names of a table's pieces, or an empty text."""
    before = None
    for name in names:
        piece = Piece.named(name)
        if piece is None or piece.label != label or step not in (None, piece.step) or piece.rank >= piece.world:
            return f"{shown(name)} as a piece of {label}"
        if before is not None and piece.world != before.world:
            return f"pieces of {label} by {before.world} and by {piece.world} ranks"
        if before is not None and (piece.rank, piece.number) <= (before.rank, before.number):
            return f"pieces of {label} in another order than written"
        before = piece
    return ""


def load_weights(folder: Path, device: str) -> tuple[Config, dict[str, Tensor]]:
    """What save_weights wrote; the device is the caller's. Raises DataError or ConfigError."""
    if not folder.is_dir():
        raise DataError(f"saved weights in {folder}", "no such folder",
                        "one with config.json and weights.pt", "train with --save=DIR first")
    check_save(folder)
    path = folder / "config.json"
    settings = read_json(path, "the configuration of a save")
    cfg = replace(config_from_json(settings, str(path)), device=device)
    if not 0 <= cfg.document_start < cfg.vocab_size <= min(cfg.padded_vocab, MAX_VOCAB):
        sizes = (cfg.document_start, cfg.vocab_size, cfg.padded_vocab)
        raise DataError(f"{path}: document_start, vocab_size, padded_vocab", sizes,
                        f"each below the next, and at most {MAX_VOCAB} tokens",
                        "train with --save=DIR again")

    path = folder / "weights.pt"
    tensors = read_tensors(path, "the weights of a save")
    wrong = faults(tensors, weight_kinds(cfg))
    if wrong:
        raise DataError(f"{path} as the weights of a save", wrong,
                        "finite weights, as config.json describes them",
                        "copy the save again, or train with --save=DIR again")
    return cfg, tensors


def read_tables(folder: Path, cfg: Config) -> list[dict[str, Any]]:
    """What a save says of its tables of n-grams, whose rows `load_tables` reads. Raises DataError."""
    if not ngram_tables(cfg):
        return []
    path = folder / TABLES
    records = read_json(path, "the tables of a save")
    wrong = wrong_with_tables(records, cfg, step=None)
    if wrong:
        raise DataError(f"{path} as the tables of a save", wrong, "the constants in NGRAM_TABLES, and names of pieces",
                        "sample with the trainer of that run, or copy the save again")
    return records


def check_room_for_tables(folder: Path, trained: Config, cfg: Config, records: list[dict[str, Any]],
                          fabric: Fabric) -> None:
    """Raise RunError where the rows in the pieces of a save, in the types of cfg, do not fit into the host's memory."""
    saved_row_bytes = trained.model_dim * getattr(torch, trained.dtype).itemsize
    needed = 0
    for record in records:
        in_files = sum(regular_file(folder / name, "rows of a table").stat().st_size for name in record["pieces"])
        needed += mapped_bytes(cfg, record["rows"], touched=in_files // saved_row_bytes)
    room = room_on_host(fabric)
    if needed > room:
        raise RunError(ON_HOST, f"{room / 2**30:.1f} GiB", f"{needed / 2**30:.1f} GiB for the rows in {folder}",
                       "a host with more memory")


def load_vocabulary(folder: Path, cfg: Config) -> list[bytes] | None:
    """Bytes of each token of a save that `load_weights` has compared with its manifest, or None. Raises DataError."""
    path = folder / VOCABULARY
    if not os.path.lexists(path):
        return None
    content = read_bounded(path, "the bytes of the tokens")
    return parsed_vocabulary(path, content, cfg.vocab_size, cfg.document_start)


def save_checkpoint(folder: Path, step: int, content: dict[str, Any], pieces: Iterable[str] = ()) -> None:
    """Write step-<step>-<hash of the file>.pt, and keep only one before it. Raises RunError.

    pieces: names of files that are there as parts; they get them before the checkpoint has its own.
    """
    new = folder / NEW_CHECKPOINT
    named = []                                                # what is removed if the checkpoint comes to nothing
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            written = write_part(new, content)
            for name in pieces:
                part_of(folder / name).rename(folder / name)
                named.append(folder / name)
            if named:
                flush_names(folder)
            last = folder / f"step-{step:07d}-{written['sha256']}.pt"
            part_of(new).rename(last)
    except BaseException:
        remove_files([part_of(new), *named])
        raise
    flush_names(folder)

    before = [path for path in folder.glob("step-*.pt") if path.name < last.name]
    newest_first = sorted(before, reverse=True)
    remove_files(newest_first[KEPT_CHECKPOINTS - 1:])


def wrong_with_log(log: dict[str, Any], step: int) -> str:
    """What does not fit in the log that a checkpoint of this step holds, or an empty text."""
    if not is_record(log, tokens=int, done=int, last_good=str, lines=dict):
        return "a log of another form"
    if log["done"] != step or log["tokens"] < 0:
        return f"a log of {log['done']} steps and {log['tokens']} tokens"
    if not is_record(log["lines"], **{"log.txt": str, "log.jsonl": str}):
        return "lines of other files than log.txt and log.jsonl"
    try:
        for text in log["lines"].values():
            text.encode()
    except UnicodeEncodeError:
        return "lines that no file can hold"
    try:
        events = [json.loads(line) for line in log["lines"]["log.jsonl"].splitlines()]
    except (ValueError, RecursionError):
        return "lines of log.jsonl that are no JSON"
    if not all(isinstance(event, dict) for event in events):
        return "lines of log.jsonl that are no events"
    return ""


def wrong_with_budget(budget: dict[str, Any], cfg: Config, step: int, ms: float) -> str:
    """What does not fit in the budget that a checkpoint of this step and training time holds, or an empty text."""
    if not is_record(budget, seconds_per_step=list, fits=list):
        return "a time budget of another form"
    seconds_per_step = budget["seconds_per_step"]
    for seconds in seconds_per_step:
        if type(seconds) is not float or not CLOCK_TICK <= seconds <= MOST["time_budget"]:
            return f"a step that takes {shown(seconds)} s"
    if len(seconds_per_step) != len(cfg.stages):
        return f"times of {len(seconds_per_step)} stages, where the run has {len(cfg.stages)}"

    fits = budget["fits"]
    cycle = run_cycle(cfg)
    before = Fit(0, 0.0, cfg.num_scheduled_steps + cfg.num_extension_steps)
    for found in fits:
        if type(found) is not list or [type(part) for part in found] != [int, float, int]:
            return f"a fit of another form, {shown(found)}"
        fit = Fit(*found)
        last_to_fit_at = min(step, before.total_steps - cycle - 1)
        if fit.step % cycle or not before.step < fit.step <= last_to_fit_at:
            return f"a fit at step {fit.step}, where none was made"
        if not before.ms <= fit.ms <= ms:
            return f"a fit after {fit.ms} ms of {ms}"
        if not fit.step + cycle <= fit.total_steps <= MAX_STEPS:
            return f"a fit at step {fit.step} to {fit.total_steps} steps"
        before = fit
    return ""


def with_fits(cfg: Config, checkpoint: dict[str, Any] | None) -> Schedule:
    """The schedule of a run, which may go on from a checkpoint."""
    fits = []
    if checkpoint and cfg.time_budget:
        fits = [Fit(*fit) for fit in checkpoint["budget"]["fits"]]
    return Schedule(cfg, fits)


def wrong_with_state(state: dict[str, Any], schedule: Schedule, step: int) -> str:
    """What does not fit in the state that a checkpoint of this step holds, or an empty text."""
    if not is_record(state, weights=dict, moments=dict, tied=bool, adam_steps=dict):
        return "a state of another form"
    cfg = schedule.cfg
    tied = schedule.at(step).tied
    if state["tied"] != tied:
        return f"tied={state['tied']}, where the schedule says {tied}"
    updates = {}
    for row in parameter_table(cfg):
        if row.optimizer == "adam":
            updates[row.label] = step // CYCLE
        if row.optimizer == "rowwise":
            updates[row.label] = step // row.rows.cadence
    if tied:
        updates["embed"] = 0                                  # what is updated is the head
    if state["adam_steps"] != updates:
        return f"counts of updates that are not those of step {step}"
    wrong = faults(state["weights"], weight_kinds(cfg))
    if not wrong:
        wrong = faults(state["moments"], moment_kinds(cfg))
    return wrong


def wrong_with_checkpoint(content: Any, cfg: Config, step: int) -> str:
    """What makes the content of a checkpoint unusable for this run, or an empty text."""
    parts = dict(log=dict, train_time_ms=float, data_sha256=str, lengths=dict, state=dict)
    if cfg.time_budget:
        parts["budget"] = dict
    has_tables = isinstance(content, dict) and "tables" in content
    if has_tables or ngram_tables(cfg):
        parts["tables"] = list
    if not is_record(content, **parts):
        return "other content than a checkpoint's"
    wrong = wrong_with_tables(content.get("tables", []), cfg, step)
    if wrong:
        return wrong
    if not 0 <= content["train_time_ms"] < math.inf:
        return f"a training time of {content['train_time_ms']} ms"
    if not re.fullmatch("[0-9a-f]{64}", content["data_sha256"]):
        return "a hash of the data that is none"

    lengths = content["lengths"]
    if not is_record(lengths, num_scheduled_steps=int, num_extension_steps=int):
        return "lengths of another form"
    as_set = {name: getattr(cfg, name) for name in lengths}
    if lengths != as_set and not cfg.time_budget:
        return f"{lengths}, where the flags of the run say {as_set}"
    cfg = replace(cfg, **lengths)                             # a time budget may have set them
    try:
        check_config(cfg)
    except ConfigError as error:
        return " ".join(str(error).split())
    wrong = ""
    if cfg.time_budget:
        wrong = wrong_with_budget(content["budget"], cfg, step, content["train_time_ms"])
    if wrong:
        return wrong
    schedule = with_fits(cfg, content)
    if step % schedule.cycle or step > schedule.total_steps:
        return f"step {step}, at which a run of {schedule.total_steps} steps writes none"

    wrong = wrong_with_log(content["log"], step)
    if not wrong:
        wrong = wrong_with_state(content["state"], schedule, step)
    return wrong


def read_checkpoint(path: Path, cfg: Config) -> dict[str, Any]:
    """Content of a checkpoint of this run, every part of it checked. Raises DataError."""
    what = "a checkpoint"
    regular_file(path, what)
    name = re.fullmatch(r"step-(?P<step>\d{7})-(?P<sha256>[0-9a-f]{64})", path.stem)
    if name is None:
        wrong = "a name of another form"
    elif file_sha256(path) != name["sha256"]:
        wrong = "damaged: its content has another hash than its name"
    else:
        content = read_tensors(path, what)
        wrong = wrong_with_checkpoint(content, cfg, int(name["step"]))
    if wrong:
        raise DataError(f"{path} as {what}", wrong, "step-<step>-<hash>.pt, as this run wrote it",
                        "nothing: the one before is taken, if there is one")
    return content


def check_pieces(path: Path, content: dict[str, Any], cfg: Config, fabric: Fabric) -> None:
    """Raise DataError unless the pieces of a checkpoint that this rank is to read are as they were written."""
    for record in content.get("tables", []):
        names = pieces_to_read(record["pieces"], fabric)
        for name in names:
            piece = regular_file(path.with_name(name), f"a piece of {path.name}")
            if file_sha256(piece) != Piece.named(name).sha256:
                raise DataError(f"{piece} as a piece of {path.name}",
                                "damaged: its content has another hash than its name", "the file as this run wrote it",
                                "nothing: the checkpoint before is taken, if there is one")
        events = content["state"]["adam_steps"].get(record["label"])
        for _ in saved_rows(path.parent, names, cfg, record["rows"], events):
            pass                                              # each has been checked


def load_checkpoint(folder: Path, cfg: Config, fabric: Fabric) -> tuple[Path, dict[str, Any]]:
    """The last checkpoint that every rank can use, and its file. Every rank calls it.

    Raises DataError if there is none, FabricError if ranks see others.
    """
    newest_first = sorted(folder.glob("step-*.pt"), reverse=True)
    names = [path.name for path in newest_first]
    fabric.check_agreement(dict(checkpoints=", ".join(names) or "none"))
    found = f"no whole one in {folder}"
    for path in newest_first:
        error = None
        try:
            content = read_checkpoint(path, cfg)
            check_pieces(path, content, cfg, fabric)
        except DataError as refusal:
            error = refusal
        texts = fabric.of_all(error and (str(error), str(error.found)))
        refusals = [text for text in texts if text is not None]
        if not refusals:
            return path, content
        text, wrong = refusals[0]
        fabric.say(text)
        if path == newest_first[0]:
            found += ", of the newest: " + " ".join(wrong.split())
    raise DataError("checkpoint", found,
                    "step-<step>-<hash>.pt, where every rank can read it",
                    "--resume=the run directory of an earlier run, or start anew")

# ====== Room 9: Race ==================================================================================================
SAMPLE_TEMPERATURE = 0.8
PLAIN_LINES = 20                         # step lines of a whole run on a console that is no terminal
DEVICE_POLL = 2e-4                       # s between two looks at the device, which is a cycle behind the host
TRIAL_ROUNDS = 4                         # through all stages, to find how long a step takes: a machine's speed drifts
TRIAL_STEPS = 8                          # of each stage in a round: whole cycles
RESERVE_BYTES = 1 << 14                  # of the disk, held back for the last lines of a run that has filled it
CHECKPOINTS = "checkpoints"              # folder in the run directory
FALLBACK = "save"                        # folder in the run directory, of weights that --save could not take


class Clock:
    """Training time in ms. Waits for the device only when it starts and stops."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.before = 0.0                # ms until it was stopped last
        self.since: float | None = None  # time of its start in s; None: it stands

    @property
    def ms(self) -> float:
        if self.since is None:
            return self.before
        return self.before + (time.perf_counter() - self.since) * 1000

    def start(self) -> None:
        self.fabric.synchronize()
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.fabric.synchronize()
        self.before = self.ms
        self.since = None


def wait_for_device(event: Any, seconds: float) -> None:
    """Until the device has come to this event, a cycle behind the host. Raises RunError behind the given time.

    By looking again and again: a wait in C, as the clock's are, keeps signals from being heard and may have no end.
    """
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise RunError("waiting for the device", f"work unfinished after {seconds:g} s", "its end by then",
                           "look at the other ranks and, with nvidia-smi, at this GPU; or give a longer --comm_timeout")
        time.sleep(DEVICE_POLL)


@contextlib.contextmanager
def settled_objects() -> Iterator[None]:
    """Within this, the garbage collector passes over all that is there now: models and graphs are many objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class StepLine(NamedTuple):
    """What the log knows of a step before it may look at the loss."""

    fields: dict[str, Any]               # of its line in log.jsonl, all but the loss
    slot_sums: Tensor                    # (b,) losses of this rank's slots, in host memory once `copied` has come
    tokens: int                          # of this rank
    copied: Any                          # CUDA event behind the copy; None on a CPU


class Log:
    """log.txt for people and existing parsers, log.jsonl as the source of truth, and the console of rank 0.

    Losses are looked at one cycle late, so that no step waits for the device. Every rank checks its own.
    """

    def __init__(self, run_dir: Path, fabric: Fabric, schedule: Schedule, tokens: int = 0, done: int = 0,
                 last_good: str = "none", lines: dict[str, str] | None = None) -> None:
        """tokens and so on: what `seen` gave to a checkpoint. Raises RunError; an old log is never overwritten."""
        self.run_dir = run_dir
        self.fabric = fabric
        self.schedule = schedule
        self.tokens = tokens
        self.done = done                 # steps
        self.last_good = last_good       # validation, in words
        self.pending: list[StepLine] = []
        self.copies: list[tuple[Tensor, Any]] = []            # pinned places for losses, and events; used in turn
        self.files: dict[str, Any] = {}
        self.reserve: Any = None
        self.bar: Any = None
        self.ended = threading.Lock()    # taken once, by whoever ends the log: nothing is written behind the last line
        if fabric.rank != 0:
            return
        try:
            self._open(lines or {})
        except (OSError, ValueError) as error:
            found = reason_of(error)
            if os.path.lexists(run_dir) and not run_dir.is_dir():
                found = "something that is not a folder"
            raise RunError(f"run directory {run_dir}", found, "a folder that can be written to, without a log",
                           "another --run_dir") from None

    def _open(self, lines: dict[str, str]) -> None:
        """Make the files, in which the lines of an earlier run may come first, and copy the source beside them."""
        source = Path(__file__)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.run_dir / source.name, "xb") as copy:
            copy.write(source.read_bytes())
        for name in ("log.txt", "log.jsonl"):
            self.files[name] = open(self.run_dir / name, "xb", buffering=0)

        self.reserve = tempfile.TemporaryFile(dir=self.run_dir, buffering=0)  # without a name: a kill leaves nothing
        self.reserve.write(bytes(RESERVE_BYTES))
        for name, text in lines.items():
            content = text.encode()
            if self.files[name].write(content) < len(content):
                raise OSError(errno.ENOSPC, "no room for the lines of the earlier run")

    def seen(self) -> dict[str, Any]:
        """What a checkpoint keeps of the log."""
        self.flush()
        lines = {name: (self.run_dir / name).read_text("utf-8") for name in self.files}
        return dict(tokens=self.tokens, done=self.done, last_good=self.last_good, lines=lines)

    def event(self, kind: str, **fields: Any) -> None:
        """A line of log.jsonl."""
        if not self.ended.locked():
            self._write("log.jsonl", event_line(kind, fields))

    def text(self, line: str, console: bool = True) -> None:
        """A line of log.txt, shown on the console too unless that gets only a selection."""
        if not self.ended.locked():
            self._write("log.txt", line)
        if not console:
            return
        if self.bar is None:
            self.fabric.say(line)
        else:
            with self.bar.external_write_mode():                              # above the bar
                self.fabric.say(line)

    def _write(self, name: str, line: str) -> None:
        """Append a line. Raises RunError, and leaves no half of it."""
        file = self.files.get(name)
        if file is None:                                                      # not rank 0
            return
        data = (line + "\n").encode("utf-8", "replace")
        before = os.fstat(file.fileno())
        try:
            if before.st_nlink == 0:
                raise OSError(errno.ENOENT, "the file was deleted")
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, "no room for a line")
        except OSError as error:
            file.truncate(before.st_size)
            file.seek(before.st_size)
            raise RunError(f"writing {self.run_dir / name}", error.strerror, "a run directory that stays, and room",
                           "free some and start again with another --run_dir") from None

    @contextlib.contextmanager
    def phase(self, name: str, timed: bool = False) -> Iterator[None]:
        """Lines that say how long the body took. timed: on the clock."""
        began = time.perf_counter()
        yield
        ms = (time.perf_counter() - began) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=timed)
        self.text(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if timed else ''}")

    def open_bar(self) -> None:
        """A progress bar, where there is a terminal for it."""
        if self.fabric.rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(desc="steps", total=self.schedule.end_step, leave=False, dynamic_ncols=True,
                            initial=self.done)

    def follow(self, schedule: Schedule) -> None:
        """From here on the run has another length."""
        self.flush()                                                          # lines of steps in front of it
        self.schedule = schedule
        if self.bar is not None:
            self.bar.total = schedule.end_step

    def step(self, losses: Losses, ms: float) -> None:
        """One more step done. ms is host time: on a GPU the step is launched, not finished."""
        self.done += 1
        self.tokens += losses.tokens * self.fabric.world

        sums = losses.slot_sums
        copied = None
        if sums.is_cuda:
            sums, copied = self._leaving(sums)
        fields = dict(step=self.done, train_time_ms=round(ms, 3), tokens=self.tokens)
        self.pending.append(StepLine(fields, sums, losses.tokens, copied))
        self.flush(keep=CYCLE)

    def _leaving(self, sums: Tensor) -> tuple[Tensor, Any]:
        """Losses on their way to host memory, and the event behind the copy. `flush` leaves CYCLE copies in use."""
        if not self.copies:
            for _ in range(CYCLE + 1):
                place = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
                self.copies.append((place, torch.cuda.Event()))
        place, copied = self.copies[self.done % len(self.copies)]
        place.copy_(sums, non_blocking=True)
        copied.record()
        return place, copied

    def flush(self, keep: int = 0) -> None:
        """Write the lines of all steps but the last `keep`. Raises RunError on a loss that is not finite."""
        while len(self.pending) > keep:
            line = self.pending[0]
            if line.copied is not None:
                wait_for_device(line.copied, LONG_PATIENCE * self.schedule.cfg.comm_timeout)
            loss = float(line.slot_sums.sum()) / line.tokens
            self.check(loss, f"training loss of step {line.fields['step'] - 1}")
            self.pending.pop(0)
            self._write_step(line.fields, loss)

    def _write_step(self, fields: dict[str, Any], loss: float) -> None:
        """One step in both files, and on the bar or, of some steps, the console."""
        step = fields["step"]
        ms = fields["train_time_ms"]
        self.event("step", **fields, train_loss=loss)

        steps_between = -(-self.schedule.end_step // PLAIN_LINES)
        on_console = self.bar is None and step % steps_between == 0
        text = f"step:{step}/{self.schedule.total_steps} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms"
        self.text(text, on_console)
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {ms / step:.0f} ms/step")
            self.bar.update()

    def check(self, loss: float, what: str) -> None:
        """Raise RunError if a loss is not finite."""
        if not math.isfinite(loss):
            raise RunError(what, loss, f"a finite number (last good validation: {self.last_good})",
                           "lower --adam_lr and --normuon_lr; --dtype=float32 --head=plain --attention=reference shows "
                           "if it is an overflow")

    def validation(self, loss: float, ms: float, data: ValidationSet) -> None:
        """The loss after the steps done so far. Raises RunError if it is not finite."""
        self.flush()
        self.check(loss, f"validation loss at step {self.done}")
        self.last_good = f"{loss:.4f} at step {self.done}"
        self.event("val", step=self.done, val_loss=loss, train_time_ms=round(ms, 3), **data.text_losses(loss))
        self.text(f"step:{self.done}/{self.schedule.total_steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms "
                  f"step_avg:{ms / max(self.done, 1):.2f}ms")

    def aborted(self, cause: str) -> None:
        """Last lines of a run that did not finish. Never raises.

        Any thread may call it, even while another is stuck in a write of its own: the first call counts.
        """
        if not self.ended.acquire(blocking=False):
            return
        self._free_reserve()                                                  # room for these lines on a full disk
        last_lines = [("log.jsonl", event_line("step", line.fields))          # their losses are not known
                      for line in list(self.pending)]
        last_lines.append(("log.jsonl", event_line("aborted", dict(step=self.done, cause=cause))))
        last_lines.append(("log.txt", f"aborted after step {self.done}: {' '.join(cause.split())}"))
        for name, line in last_lines:
            with contextlib.suppress(TrainerError, ValueError, OSError):
                self._write(name, line)

    def close(self) -> None:
        self.ended.acquire(blocking=False)
        self._free_reserve()
        for file in self.files.values():
            file.close()
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _free_reserve(self) -> None:
        if self.reserve is not None:
            with contextlib.suppress(OSError):
                self.reserve.close()


def event_line(kind: str, fields: dict[str, Any]) -> str:
    return json.dumps(dict(type=kind, **fields))


def train_step(executor: Executor, loader: Loader, values: Values) -> Losses:
    """One step as the race and the warm-up do it."""
    batch = loader.next(values)
    losses = executor.forward_backward(batch, values)
    executor.optim_step(values, loader.plans_ahead)
    return losses


@contextlib.contextmanager
def reported_graphs(log: Log, graphs: list[dict[str, Any]], place: str) -> Iterator[None]:
    """Within this, the log is told of each graph that torch compiles, once that is done; so is the list.

    By torch's own account, which has a line for every compilation. place: where in the run, in words.
    """
    from torch._dynamo import callback, utils
    names: dict[str, str] = {}                                                # of the function, by compilation
    steps: dict[str, int] = {}                                                # done when it began, by compilation

    def begin(compilation: Any) -> None:
        with contextlib.suppress(TrainerError):               # torch would wrap it up; the last `tell` meets it again
            tell()
        steps.setdefault(compilation.compile_id, log.done)

    def tell() -> None:
        for found in utils.get_compilation_metrics():
            number = found.compile_id
            name = names.setdefault(number, found.co_name)                    # a backward has that of its forward
            if not found.is_forward:
                name = f"backward of {name}"
            guard = (found.recompile_reason or "").partition("User stack trace")[0]
            graph = dict(name=name, place=place, step=steps.get(number, log.done),
                         ms=round(found.duration_us / 1000, 3), guard=" ".join(guard.split()))
            log.event("graph", **graph)
            log.text(f"compiled {name} for {place}: {graph['ms'] / 1000:.2f} s")
            graphs.append(graph)
        utils.clear_compilation_metrics()

    utils.clear_compilation_metrics()                                         # of what was compiled before
    callback.callback_handler.register_start_callback(begin)
    try:
        yield
        tell()
    finally:
        callback.callback_handler.remove_start_callback(begin)


def warm_up(cfg: Config, fabric: Fabric, schedule: Schedule, executor: Executor,
            during: Callable[[str], Any] = contextlib.nullcontext) -> None:
    """Run every graph the race will need, on tokens from a formula (recipe 1.4). The state is put back bit by bit.

    during(place): a context for each step and evaluation.
    """
    saved = executor.snapshot()
    invented_cfg, headers, validation = invented_data(cfg, fabric, executor)
    values_of_steps = [schedule.at(step) for step in schedule.warm_up_steps()]
    loader = Loader(invented_cfg, fabric, headers, values_of_steps, executor.exchange_ahead, "warm-up")
    loader.start()
    for values in values_of_steps:
        with during(f"stage {values.stage + 1}"):
            train_step(executor, loader, values)

    last_of_stage = {values.stage: values for values in values_of_steps}
    for values in last_of_stage.values():
        with during(f"validation of stage {values.stage + 1}"):
            executor.evaluate(validation.batches(values), values)
    end = schedule.at(schedule.end_step)
    with during("the final validation"):
        executor.evaluate(validation.batches(end), end)
    loader.close()
    executor.restore(saved)


def invented_data(cfg: Config, fabric: Fabric, executor: Executor) -> tuple[Config, list[ShardHeader], ValidationSet]:
    """For the warm-up: settings, one shard to train on and a validation set, of tokens from a formula.

    They are as many as the largest batch wants.
    """
    most_tokens = cfg.val_batch_tokens + max(stage.batch_tokens for stage in cfg.stages)
    factor = 1 + 2 * FORMULA_DOCUMENT // cfg.max_doc_len                      # long documents are cut to max_doc_len
    tokens = 4 * most_tokens * factor
    headers = [ShardHeader(f"{FORMULA}warm-up#0", tokens, cfg.vocab_size, cfg.document_start)]
    patience = LONG_PATIENCE if executor.compiling else 1
    invented_cfg = replace(cfg, epochs=0, val_tokens=cfg.val_batch_tokens, comm_timeout=cfg.comm_timeout * patience)
    validation = ValidationSet(invented_cfg, fabric, headers, executor.exchange, "warm-up")
    return invented_cfg, headers, validation


def try_steps(cfg: Config, fabric: Fabric, executor: Executor, train: list[ShardHeader]) -> list[tuple[int, float]]:
    """Train TRIAL_STEPS of each stage, and put the state back. Returns (stage, time in s) of the end of each cycle.

    On the tokens of the race: evenly drawn ones touch more rows, and a step takes a tenth longer on a CPU.
    """
    scheduled_stages = len(cfg.stages) - 1
    trial = Schedule(replace(cfg, num_scheduled_steps=TRIAL_STEPS * scheduled_stages, num_extension_steps=TRIAL_STEPS))
    values_of_steps = [trial.at(step) for step in range(trial.total_steps)]
    saved = executor.snapshot()
    loader = Loader(replace(cfg, epochs=0), fabric, train, values_of_steps, executor.exchange_ahead, "step times")
    loader.start()

    cycle_ends = []
    for values in values_of_steps:
        train_step(executor, loader, values)
        if values.adam_step:
            fabric.synchronize()
            cycle_ends.append((values.stage, time.perf_counter()))
    loader.close()
    executor.restore(saved)
    return cycle_ends


def time_steps(cfg: Config, fabric: Fabric, executor: Executor, train: list[ShardHeader], log: Log) -> list[float]:
    """Seconds of a step in each stage, on the slowest rank.

    A mean, for the race pays its slow cycles too; but without the slowest and fastest tenth, which few rounds overrate.
    """
    cycles: list[list[float]] = [[] for _ in cfg.stages]
    with log.phase("step times"):
        for _ in range(TRIAL_ROUNDS):
            cycle_ends = try_steps(cfg, fabric, executor, train)
            for stage, seconds in enumerate(cycles):
                ends = [end for at, end in cycle_ends if at == stage]
                seconds.extend(np.diff(ends).tolist())                        # without the first, which changes stages

    seconds_per_step = []
    for seconds in cycles:
        tenth = len(seconds) // 10
        typical = sorted(seconds)[tenth:len(seconds) - tenth]
        seconds_per_step.append(float(np.mean(typical)) / CYCLE)
    return np.max(fabric.of_all(seconds_per_step), axis=0).tolist()


def fit_budget(cfg: Config, fabric: Fabric, executor: Executor, train: list[ShardHeader],
               log: Log) -> tuple[Config, list[float]]:
    """Scale the schedule to time_budget by the time of a step in each stage, which it returns too.

    Raises ConfigError.
    """
    scheduled_stages = len(cfg.stages) - 1
    seconds_per_step = time_steps(cfg, fabric, executor, train, log)
    *scheduled, extension = seconds_per_step
    tail = cfg.num_extension_steps / cfg.num_scheduled_steps
    seconds_of_a_scheduled_step = sum(scheduled) / scheduled_stages + tail * extension    # with its share of the tail
    steps = int(cfg.time_budget / seconds_of_a_scheduled_step)
    least = scheduled_stages * seconds_of_a_scheduled_step
    need(steps >= scheduled_stages, "--time_budget", f"{cfg.time_budget:g} s",
         f"a step of each stage and the share of the last, {least:.3f} s", f"--time_budget={1.1 * least:.3g}")

    extension_steps = round(steps * tail)
    total = steps + extension_steps
    most_seconds = MAX_STEPS / (1 + tail) * seconds_of_a_scheduled_step
    need(total <= MAX_STEPS, "--time_budget", f"{cfg.time_budget:g} s",
         f"at most {MAX_STEPS} steps, which take {most_seconds:.0f} s here", f"--time_budget={0.99 * most_seconds:.0f}")

    cfg = replace(cfg, num_scheduled_steps=steps, num_extension_steps=extension_steps)
    check_host_memory(cfg, fabric)                            # for more steps than were planned, perhaps
    log.schedule = Schedule(cfg)
    log.event("budget", seconds=cfg.time_budget, steps=total, seconds_per_step=seconds_per_step)
    log.text(f"time budget {cfg.time_budget:g} s: {total} steps")
    return cfg, seconds_per_step


def fit_due(schedule: Schedule, step: int) -> bool:
    """Whether half of what was left at the last fit is done, and a step behind the cycle that is prepared is left."""
    last = 0
    if schedule.fits:
        last = schedule.fits[-1].step
    half = (schedule.total_steps - last) // 2
    cycle = schedule.cycle
    if step % cycle != 0 or step == last or step + cycle >= schedule.total_steps:
        return False
    return step >= last + half - half % cycle


def most_steps(schedule: Schedule, first: int, tokens_left: float) -> int:
    """How long a run may be at most, if from step `first` on the data have so many tokens left."""
    cfg = schedule.cfg
    steps = schedule.total_steps - first
    batches = [stage.batch_tokens for stage in cfg.stages]
    tokens = float(np.dot(schedule.steps_by_stage(first, schedule.total_steps), batches))
    of_data = max(0.0, steps * tokens_left / tokens)
    return int(min(first + of_data, MAX_STEPS))


def fit_rest(schedule: Schedule, seconds_per_step: list[float], step: int, ms: float, most: int) -> Fit:
    """The length, of `most` steps at most, with which a run that has done `step` steps in `ms` ends with --time_budget.

    The stretch since the last fit says how fast the machine is now. It is about as long as what is left, so there is
    no better forecast. What a step of one stage costs next to that of another, seconds_per_step has to say.
    """
    budget_ms = 1000 * schedule.cfg.time_budget
    total = schedule.total_steps
    first = step + schedule.cycle                                             # the steps before it stay as they are
    last = Fit(0, 0.0, total)
    if schedule.fits:
        last = schedule.fits[-1]

    def seconds_of(start: int, end: int) -> float:
        return float(np.dot(schedule.steps_by_stage(start, end), seconds_per_step))

    pace = (ms - last.ms) / seconds_of(last.step, step)                       # ms now of a second then
    ms_left = budget_ms - ms - pace * seconds_of(step, first)
    stretch = max(0.0, ms_left / (pace * seconds_of(first, total)))
    wanted = first + stretch * (total - first)
    return Fit(step, ms, round(min(wanted, most)))


def keep_to_budget(seconds_per_step: list[float], loader: Loader, clock: Clock, log: Log) -> None:
    """Fit the rest of the run to what is left of --time_budget, on every rank by rank 0's clock, as in the result."""
    fabric = log.fabric
    schedule = log.schedule
    cfg = schedule.cfg
    fabric.synchronize()                                                      # the clock alone is ahead of a GPU
    ms = fabric.of_all(clock.ms)[0]
    most = most_steps(schedule, log.done + schedule.cycle, loader.tokens_left())
    fit = fit_rest(schedule, seconds_per_step, log.done, ms, most)

    log.follow(Schedule(cfg, (*schedule.fits, fit)))
    log.event("budget", seconds=cfg.time_budget, steps=fit.total_steps, step=fit.step, train_time_ms=round(ms, 3))
    remark = ""
    if fit.total_steps == most:
        remark = ", the most that the data last or a run may have"
    log.text(f"time budget {cfg.time_budget:g} s: {ms / 1000:.2f} s after {fit.step} steps, so {fit.total_steps} steps "
             f"in all{remark}")


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what (start, end) spans cover together."""
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profiled_kind(event: Any, on_cuda: bool, training_thread: int) -> str | None:
    """What a profiled event counts as: "computing", "exposed NAME" of a collective, or nothing.

    On a GPU kernels count. On a CPU it is what the training thread does, and collectives on any thread.
    """
    if on_cuda:
        collective = re.match("ncclDevKernel_[A-Za-z]+", event.name)
        counts = event.device_type.name == "CUDA" and not event.is_user_annotation
    else:
        collective = re.match(r"gloo:\w+", event.name)
        of_training = event.thread == training_thread and not event.name.startswith("ProfilerStep")
        counts = bool(collective) or of_training
    if not counts:
        return None
    return f"exposed {collective[0]}" if collective else "computing"


def profiled_ms(events: list, on_cuda: bool) -> dict[str, float]:
    """ms a step, by name.

    "wall": from its start to its end. "computing": in kernels, or in the training thread. "exposed NAME": in a
    collective while nothing computes. "gaps": in none of these.
    """
    steps = [event for event in events if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU"]
    step_spans = [(step.time_range.start, step.time_range.end) for step in steps]
    spans: dict[str, list] = dict(computing=[])
    for event in events:
        kind = profiled_kind(event, on_cuda, steps[0].thread)
        if kind is not None:
            spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))

    computing = spans.pop("computing")
    collectives = list(itertools.chain(*spans.values()))
    wall = union(step_spans)
    us = dict(wall=wall, gaps=wall - union(computing + collectives), computing=union(computing))
    for name, of_collective in spans.items():
        us[name] = union(computing + of_collective) - us["computing"]
    return {name: value / len(steps) / 1000 for name, value in us.items()}


def report_profile(profile: Any, log: Log) -> None:
    """A trace file of every rank, and on rank 0 where the time went. Every rank calls it."""
    fabric = log.fabric
    folder = fabric.of_all(str(log.run_dir))[0]                               # rank 0's: others may have made one up
    ranks = fabric.of_all(profiled_ms(profile.events(), fabric.on_cuda))
    Path(folder).mkdir(parents=True, exist_ok=True)                           # on another node too
    profile.export_chrome_trace(f"{folder}/trace_rank{fabric.rank}.json.gz")

    log.event("profile", ranks=ranks)
    log.text("profile, ms a step: mean of the ranks, least, most, skew; the time of this run does not count")
    for name in dict.fromkeys(itertools.chain(*ranks)):
        ms = [rank.get(name, 0.0) for rank in ranks]
        log.text(f"  {name:32}{np.mean(ms):10.3f}{min(ms):10.3f}{max(ms):10.3f}{np.ptp(ms):10.3f}")
    log.text(profile.key_averages().table(f"self_{fabric.device.type}_time_total", 12, max_name_column_width=60))


def race(loader: Loader, executor: Executor, validation: ValidationSet, clock: Clock, log: Log,
         before_step: Callable[[int], object] = lambda step: None) -> float:
    """Train against the clock; returns the final validation loss (nats per token).

    The schedule is the log's, which before_step may change.
    On the clock: reading, packing, plans, steps, logging. Off the clock: validation.
    """
    clock.start()
    with log.phase("first batch", timed=True):
        loader.start()
        loader.wait()

    try:
        while log.done < log.schedule.end_step:
            before_step(log.done)                                             # budget, checkpoints, profile, if any
            values = log.schedule.at(log.done)
            if values.validate:
                clock.stop()
                log.validation(executor.evaluate(validation.batches(values), values), clock.ms, validation)
                clock.start()
            losses = train_step(executor, loader, values)
            log.step(losses, clock.ms)
    except DataError:                                                         # the steps behind are whole
        log.flush()
        raise
    clock.stop()

    end = log.schedule.at(log.done)                                           # at the true end the long window is wider
    loss = executor.evaluate(validation.batches(end), end)
    log.validation(loss, clock.ms, validation)
    return loss


def generate(cfg: Config, executor: Evaluator, values: Values, prompt: Sequence[int] = ()) -> list[int]:
    """Up to sample_tokens token ids after a document start and the prompt; ends before the next document.

    Raises RunError where the weights give no finite logits.
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.document_start, *prompt]
    for _ in range(cfg.sample_tokens):
        logits = executor.next_logits(tokens, values)[:cfg.vocab_size].float().cpu()
        if not logits.isfinite().all():
            raise RunError("sample", "logits that are not finite", "weights that a run has left in order",
                           "sample from another save, or train again at a lower learning rate")
        shares = torch.softmax(logits / SAMPLE_TEMPERATURE, 0)
        drawn = int(torch.multinomial(shares, 1, generator=generator))
        token = min(executor.fabric.of_all(drawn))                            # one text, whatever a rank's rounding
        if token == cfg.document_start:
            break
        tokens.append(token)
    return tokens[1 + len(prompt):]


def spell(pieces: list[bytes] | None, tokens: Sequence[int]) -> str:
    """Text of tokens whose bytes are known; else their ids."""
    if not pieces:
        return "token ids (no vocab.txt beside them): " + " ".join(map(str, tokens))
    return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


# ====== Room 10: Main =================================================================================================
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_BY_SIGNAL = 128                     # plus its number, as in a shell: 130 interrupted, 143 ended, 129 hung up
ENDING_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
STORE_PATIENCE = 2.0                     # s for the launcher's store to say whether another rank ended first
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"        # torch's variable
CONSOLE_PATIENCE = 2.0                   # s for stderr to take the cause
JOIN_PATIENCE = 1.0                      # s beyond comm_timeout for torch's own message that a rank is missing
BEGIN_PATIENCE = 1.0                     # s from a signal until the main thread must have begun its end
END_PATIENCE = 5.0                       # s that an end may take
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3      # parameters of glibc's mallopt, from malloc.h
LARGEST_KEPT = 32 << 20                  # bytes of a block: the most that every glibc takes for M_MMAP_THRESHOLD


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What the call returns or raises. Raises TimeoutError when it takes longer: its thread is left behind."""
    answer: Future = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer.result(seconds)


def read_launch() -> tuple[int, int, int, int]:
    """Rank, rank on this host, number of ranks, number on this host, as torchrun tells them. Raises FabricError."""
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    told = {name: os.environ.get(name, text) for name, text in alone.items()}
    numbers = [int(text) if text.isdecimal() else -1 for text in told.values()]
    rank, local_rank, world, neighbours = numbers
    if not 0 <= rank < world or local_rank < 0:
        raise FabricError("launch", told, "0 <= RANK < WORLD_SIZE, as torchrun sets them", "start with torchrun")

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world > 1 and missing:
        raise FabricError("launch", f"WORLD_SIZE={world} without {', '.join(missing)}", "all that torchrun sets",
                          f"torchrun --standalone --nproc_per_node={world} train_gpt.py ..., or for a single process "
                          "unset WORLD_SIZE")
    return rank, local_rank, world, neighbours


def make_fabric(cfg: Config) -> Fabric:
    """Pick the device and join the process group that torchrun describes. Raises FabricError, ConfigError."""
    rank, local_rank, world, neighbours = read_launch()
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    if cfg.device == "cuda" and not cuda:
        raise ConfigError("--device=cuda, which the record preset sets", "no CUDA device",
                          "an NVIDIA GPU and torch for CUDA", "--preset=pocket trains on a CPU in about two minutes")
    if cuda and max(local_rank + 1, neighbours) > gpus:
        raise FabricError("more ranks than devices", f"{neighbours} ranks, {gpus} GPUs", "one GPU for each rank",
                          f"torchrun --nproc_per_node={gpus} train_gpt.py ...")
    if cfg.num_slots % world:
        fits = [w for w in range(1, cfg.num_slots + 1) if cfg.num_slots % w == 0]
        nearest_below = max(w for w in fits if w <= world)
        raise FabricError("number of ranks", world, f"a divisor of num_slots={cfg.num_slots}: {fits}",
                          f"torchrun --nproc_per_node={nearest_below} train_gpt.py ...")

    if not cuda:
        keep_freed_memory()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    fabric = Fabric(device, rank, world)
    fabric.enter_thread()
    if world == 1:
        return fabric
    return join_ranks(cfg, fabric)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: given back after each step, it would come again page by page, a fault for each."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, -1)                                        # -1: never trim
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


def join_ranks(cfg: Config, fabric: Fabric) -> Fabric:
    """The fabric with its process groups, in which each rank knows where the others run. Raises FabricError."""
    patience = timedelta(seconds=cfg.comm_timeout)

    def join() -> Any:
        fabric.enter_thread()
        dist.init_process_group("cpu:gloo,cuda:nccl" if fabric.on_cuda else "gloo", timeout=patience)
        return dist.new_group(backend="gloo", timeout=patience)

    try:
        plan_group = within(cfg.comm_timeout + JOIN_PATIENCE, join)           # torch waits for ever for a mute listener
    except (RuntimeError, ValueError, TimeoutError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        said = str(error)[:200] or "nothing that answers as a store of ranks does"
        raise FabricError("waiting for all ranks", f"at {address}: {said}",
                          f"{fabric.world} ranks in {cfg.comm_timeout} s",
                          "see that every rank starts; look at MASTER_ADDR and MASTER_PORT") from None
    processes = fabric.of_all((host_name(), os.getpid()))
    return replace(fabric, plan_group=plan_group, processes=tuple(processes))


def host_name() -> str:
    """What processes share that can look for one another by process id: the machine since its start, the container."""
    name = platform.node()
    with contextlib.suppress(OSError):                                        # two machines may have one name
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name += " " + os.readlink("/proc/self/ns/pid")
    return name


def head_precision(cfg: Config, fabric: Fabric) -> str:
    """What --head means on this device. Raises ConfigError for fp8 where there is none."""
    if cfg.head not in ("auto", "fp8"):
        return cfg.head
    native = False
    if fabric.on_cuda and cfg.dtype == "bfloat16":
        sizes_fit = cfg.model_dim % FP8_UNIT == cfg.padded_vocab % FP8_UNIT == 0
        native = sizes_fit and torch.cuda.get_device_capability(fabric.device) >= (8, 9)

    if native:
        return "fp8"
    if cfg.head == "fp8":
        raise ConfigError("--head=fp8", f"{cfg.dtype} on {hardware(fabric)}", "bfloat16 on CUDA capability 8.9 and up",
                          "--head=auto or plain, or --head=emulated for the same numbers without the speed")
    return "plain"


# Kernels behind torch's variable-length call, the likely fastest first, and the package that each comes from.
FLASH_PACKAGES = {"FA4": "flash-attn-4", "FA3": "flash-attn-3", "varlen": "torch"}
FLASH_WIDTH_UNIT, MOST_FLASH_WIDTH = 8, 256          # of the heads that they take, in bf16
FLASH_CARDS = {9: ("FA4", "FA3"), 10: ("FA4",)}      # faster than torch's own, by the GPU's capability (in torch 2.13)
NEEDS_FLASH = {"record", "record_tables"}        # presets whose speed and memory are those of such a kernel
# To check a kernel with: ends of documents inside of tiles of 128 and of windows, empty ones, one of a single token.
CHECKED_BOUNDS = (0, 0, 150, 151, 420, 420, 700)
CHECKED_WINDOWS = (2, 128, 300, 1000)    # the last is longer than any document
CHECKED_SPREAD = 4.0                     # of the logits: then a single key too many, or too few, shows somewhere
TIMED_DOCUMENTS = (1, 2, 4, 8)           # lengths in turn: these parts of the longest
TIMED_PASSES, UNTIMED_PASSES = 10, 3


def usable_attention(preset: str, cfg: Config, fabric: Fabric) -> list[str]:
    """Kernels that run on every rank and agree with the reference, the likely fastest first; or only "reference".

    Raises ConfigError where --attention asks for one that is not among them, or the preset for any.
    """
    asked = cfg.attention
    automatic = asked == "auto"
    if asked == "reference" or (automatic and not fabric.on_cuda):
        return ["reference"]
    fits = cfg.dtype == "bfloat16" and cfg.head_dim % FLASH_WIDTH_UNIT == 0 and cfg.head_dim <= MOST_FLASH_WIDTH
    if not fabric.on_cuda or not fits:
        found = f"{cfg.dtype}, heads of width {cfg.head_dim}, on {hardware(fabric)}"
        need(automatic and preset not in NEEDS_FLASH, f"--attention={asked}", found,
             f"bfloat16, heads whose width is a multiple of {FLASH_WIDTH_UNIT} up to {MOST_FLASH_WIDTH}, on a GPU",
             "--attention=reference, whose time and memory grow with the windows")
        fabric.say(f"attention: the reference, whose time and memory grow with the windows: {found}")
        return ["reference"]

    usable = []
    refusals = {}
    for name in FLASH_PACKAGES if automatic else [asked]:
        whys = fabric.of_all(refusal_of(name, cfg, fabric))
        refusal = next((f"{why} (rank {rank})" for rank, why in enumerate(whys) if why), "")
        if refusal:
            refusals[name] = refusal
            fabric.say(f"attention: {name} does not run here: {refusal}")
        else:
            usable.append(name)

    need(automatic or bool(usable), f"--attention={asked}", refusals.get(asked),
         "a kernel that runs and agrees with the reference", "--attention=auto; requirements-gpu.txt names packages")
    if preset in NEEDS_FLASH and automatic:
        say_what_is_lost(usable, fabric)
    return usable or ["reference"]


def say_what_is_lost(usable: list[str], fabric: Fabric) -> None:
    """Aloud, where a run could be faster on this GPU."""
    if not usable:
        fabric.say("attention: NO FAST KERNEL: the reference is slower by far; its memory grows with the windows")
        return
    capability, _ = torch.cuda.get_device_capability(fabric.device)
    faster = FLASH_CARDS.get(capability, ())
    if faster and not set(faster) & set(usable):
        fabric.say(f"attention: WITHOUT {' AND '.join(faster)}: a step with torch's own kernel is predicted to take "
                   "4 to 10 % longer on H100s; pip install -r requirements-gpu.txt")


def refusal_of(name: str, cfg: Config, fabric: Fabric) -> str:
    """Why this kernel is not to be used on this rank; empty: it is right."""
    try:
        put_in_place(name)
        check_attention(attention_varlen, fabric.device, getattr(torch, cfg.dtype), cfg.head_dim)
    except Exception as refusal:                                              # whatever a foreign kernel raises
        return f"{type(refusal).__name__} {str(refusal)[:100]}"
    return ""


def put_in_place(name: str) -> None:
    """Have torch's variable-length call reach this kernel. A torch that cannot say which has never given up its own."""
    if name in ("FA4", "FA3"):
        torch.nn.attention.activate_flash_attention_impl(name)
        return
    active = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if active is not None and active():
        torch.nn.attention.restore_flash_attention_impl()


def check_attention(kernel: Callable, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise RuntimeError unless outputs and gradients agree with the reference to the dtype's rounding.

    In sequences as plain layers have them, and paired ones: twice the positions, half the heads.
    """
    generator = torch.Generator(device).manual_seed(0)
    scale = CHECKED_SPREAD / head_dim**0.5
    plain = torch.tensor(CHECKED_BOUNDS, device=device, dtype=torch.int32)
    for window in CHECKED_WINDOWS:
        for per_token, heads in ((1, 2), (2, 1)):
            positions = per_token * CHECKED_BOUNDS[-1]
            inputs = torch.randn(4, positions, heads, head_dim, device=device, generator=generator).to(dtype)
            bounds = per_token * plain
            span = AttentionSpan(positions, window, scale)
            found = output_and_gradients(kernel, inputs, bounds, span)
            wanted = output_and_gradients(attention_reference, inputs.float(), bounds, span)
            for what, x, exact in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, wanted):
                error = float((x.float() - exact).abs().max() / exact.abs().max())
                if not error < 8 * torch.finfo(dtype).eps:
                    raise RuntimeError(f"its {what} is off by {error:.1e}, window {window}, {heads} heads")


def output_and_gradients(attend: Callable, inputs: Tensor, cu_seqlens: Tensor,
                         span: AttentionSpan) -> tuple[Tensor, ...]:
    """Of attention to q, k, v, the first three of inputs (4, N, H, E); the last is the gradient of the output."""
    q, k, v, seed = inputs.unbind()
    leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    out = attend(*leaves, cu_seqlens, span)
    return out.detach(), *torch.autograd.grad(out, leaves, seed)


def fastest_attention(cfg: Config, fabric: Fabric, usable: list[str], slots_at_once: int) -> str:
    """Put the fastest of these kernels in place, the same on every rank. Returns its name and package for people.

    The slowest rank's time decides; where times are equal, the order.
    """
    chosen = usable[0]
    if len(usable) > 1:
        ms = {name: max(fabric.of_all(attention_ms(name, cfg, fabric, slots_at_once))) for name in usable}
        chosen = min(usable, key=ms.get)
        times = ", ".join(f"{name} {ms[name]:.2f} ms" for name in usable)
        fabric.say(f"attention of a pass through all layers at the largest stage: {times}")
    put_in_place(chosen)
    if chosen == "reference":
        return chosen
    package = FLASH_PACKAGES[chosen]
    version = "of unknown version"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(package)
    return f"{chosen} ({package} {version})"


def attention_ms(name: str, cfg: Config, fabric: Fabric, slots_at_once: int) -> float:
    """Time of all layers' attention, forward and backward, at the largest stage; infinite where it fails."""
    stage = max(cfg.stages, key=operator.attrgetter("batch_tokens", "long_window"))
    windows = dict(short=stage.short_window * cfg.window_block, long=stage.long_window * cfg.window_block)
    tokens = slots_at_once * stage.batch_tokens // cfg.num_slots
    ends = torch.tensor(document_ends(tokens, cfg.max_doc_len), device=fabric.device, dtype=torch.int32)
    kinds = Counter((layer.attention, layer.window) for layer in LAYERS if layer.attention != "none")

    total = 0.0
    try:
        put_in_place(name)
        for (kind, window), layers in kinds.items():
            per_token = 2 if kind == "paired" else 1
            shape = (4, per_token * tokens, cfg.num_heads // per_token, cfg.head_dim)
            inputs = torch.randn(shape, device=fabric.device).to(getattr(torch, cfg.dtype))
            span = AttentionSpan(per_token * cfg.max_doc_len, windows[window], cfg.attn_scale)
            call = functools.partial(output_and_gradients, attention_varlen, inputs, per_token * ends, span)
            total += layers * median_ms(call)
    except Exception as refusal:                                              # which did not show at a small size
        fabric.say(f"attention: {name} fails at full size: {type(refusal).__name__} {str(refusal)[:100]}")
        return math.inf
    return total


def document_ends(tokens: int, longest: int) -> list[int]:
    """Bounds of documents of several lengths, made up, for as many tokens."""
    ends = [0]
    for part in itertools.cycle(TIMED_DOCUMENTS):
        if ends[-1] == tokens:
            return ends
        ends.append(min(tokens, ends[-1] + -(-longest // part)))


def median_ms(call: Callable) -> float:
    """Time of a call on the device, by its own events."""
    for _ in range(UNTIMED_PASSES):
        call()
    passes = []
    for _ in range(TIMED_PASSES):
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        ended.record()
        passes.append((began, ended))
    ended.synchronize()
    return float(np.median([began.elapsed_time(ended) for began, ended in passes]))


def hardware(fabric: Fabric) -> str:
    if fabric.on_cuda:
        return f"{torch.cuda.get_device_name(fabric.device)} x {fabric.world}"
    name = platform.machine()
    with contextlib.suppress(OSError, TypeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def peak_memory_mib(fabric: Fabric) -> dict[str, int]:
    """Of this process so far: on its GPU since the run began, or on the CPU."""
    if fabric.on_cuda:
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        return dict(allocated=allocated >> 20, reserved=reserved >> 20)
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:                                                       # on Windows
        return {}
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":                                              # there bytes, elsewhere KiB
        return dict(consumption=peak >> 20)
    return dict(consumption=peak >> 10)


def git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    folder = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()
    return None


def changed_fields(preset: str, cfg: Config) -> dict[str, str]:
    """The settings that the preset does not say, as texts of their flags."""
    before = vars(Config(**PRESETS[preset]))
    return {name: flag_text(value) for name, value in vars(cfg).items() if value != before[name]}


class Shards(NamedTuple):
    """The data of all runs of this process."""

    train: list[ShardHeader]
    val: list[ShardHeader]
    sha256: str                          # of all their contents, as they were found


class Origin(NamedTuple):
    """What the headers of all runs of this process say besides the settings of each."""

    preset: str
    given: Config                        # as flags and preset say, before shards and a checkpoint filled in the rest
    attention: str                       # the kernel, its package and version
    data_sha256: str


def software() -> dict[str, Any]:
    """Versions of what computes."""
    triton = None
    if importlib.util.find_spec("triton"):
        triton = importlib.import_module("triton").__version__
    return dict(python=platform.python_version(), torch=torch.__version__, triton=triton, cuda=torch.version.cuda,
                git_commit=git_commit(), source_sha256=file_sha256(Path(__file__)))


def size_of_model(cfg: Config) -> dict[str, Any]:
    """Parameters in all, those that a token meets, and the tables apart."""
    tables = row_tables(cfg)
    total = sum(math.prod(row.shape) for row in parameter_table(cfg))
    rows = {table.label: table.rows for table in tables}
    rows_unread = sum(table.rows - table.reads for table in tables)           # by a single token
    in_tables = cfg.model_dim * sum(rows.values())
    return dict(params_total=total, params_per_token=total - cfg.model_dim * rows_unread,
                table_rows=rows, table_bytes=in_tables * getattr(torch, cfg.dtype).itemsize,
                table_home={table.label: table.home for table in tables})


def write_header(log: Log, cfg: Config, executor: Executor, origin: Origin, kind: str = "header",
                 **facts: Any) -> None:
    """First lines of a run. kind: "header" of a new log, or "resumed" behind the lines of an earlier one."""
    fabric = log.fabric
    versions = software()
    sizes = size_of_model(cfg)
    changed = changed_fields(origin.preset, replace(origin.given, seed=cfg.seed))
    nccl = None
    if fabric.on_cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))

    slots_of_a_rank = cfg.num_slots // fabric.world
    micro_batches = -(-slots_of_a_rank // executor.slots_at_once)
    untimed_steps = len(log.schedule.warm_up_steps())
    if cfg.time_budget:
        untimed_steps += TRIAL_ROUNDS * TRIAL_STEPS * len(cfg.stages)

    started = time.strftime("%Y-%m-%dT%H:%M:%S")                              # by the clock of rank 0's machine
    log.event(kind, preset=origin.preset, started=started, changed=changed, config=asdict(cfg), seed=cfg.seed,
              **versions, nccl=nccl, hardware=hardware(fabric), world_size=fabric.world, attention=origin.attention,
              head=executor.precision, row_comms=cfg.row_comms, grad_accum_steps=micro_batches,
              slots_at_once=executor.slots_at_once, tokens_per_step=[stage.batch_tokens for stage in cfg.stages],
              untimed_warmup_steps=untimed_steps, target_loss=cfg.target_loss, data_sha256=origin.data_sha256,
              **sizes, **facts)

    settings = ", ".join(f"{name}={text}" for name, text in changed.items())
    log.text("=" * 100)
    log.text(f"Running Python {versions['python']}")
    log.text(f"Running PyTorch {versions['torch']} compiled for CUDA {versions['cuda']} on {hardware(fabric)} "
             f"with world_size {fabric.world}")
    log.text(f"preset {origin.preset}, {sizes['params_total']:,} parameters in {cfg.dtype}, attention "
             f"{origin.attention}, head {executor.precision}, {micro_batches} micro-batches a step, seed {cfg.seed}")
    log.text(f"changed from the preset: {settings or 'nothing'}")
    log.text("=" * 100)


def save_or_fall_back(log: Log, cfg: Config, executor: Executor,
                      vocabulary: list[bytes] | None) -> bool:
    """Save the weights where --save says, else in the run directory.

    Returns whether they are where they were wanted. Every rank calls it, and learns the same.
    A failure is said aloud and ends nothing, since the result is still to be written.
    """
    if not cfg.save:
        return True
    fabric = log.fabric
    fabric.set_timeout(cfg.comm_timeout * LONG_PATIENCE)      # while rank 0 writes
    tensors = executor.weights(log.schedule.at(log.done))
    tables = executor.rowwise_tables()
    wanted = Path(cfg.save)
    fallback = log.run_dir / FALLBACK

    failed = []                                               # the same on every rank
    for folder in (wanted, fallback):
        try:
            with pieces_of_all(folder, log.done, tables, False, fabric) as pieces:
                if fabric.rank == 0:
                    save_weights(folder, cfg, tensors, vocabulary, pieces)
            break
        except RunError as error:
            failed.append(folder)
            fabric.say(str(error))
    if failed:
        where = "lost" if fallback in failed else f"in {fallback}"
        log.text(f"the weights could not be saved in {wanted}: they are {where}")
    return not failed


def reason_for_void(cfg: Config, shards: Shards) -> str:
    """Why the time and loss of a run that ends now do not count; empty: they do."""
    reasons = []
    if cfg.profile:
        reasons.append("profiled")
    changed = changed_shards(shards.train + shards.val, shards.sha256)
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        reasons.append(f"data changed: {changed[0]}{others}")
    return "; ".join(reasons)


def recompiles_of_all(log: Log, mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Graphs that were compiled in the race, of all ranks, which are said aloud. Every rank calls it."""
    everyone = []
    for rank, theirs in enumerate(log.fabric.of_all(mine)):
        for graph in theirs:
            log.text(f"compiled in the race, on its clock: {graph['name']} on rank {rank} behind step {graph['step']}, "
                     f"{graph['ms'] / 1000:.2f} s; {graph['guard']}")
            everyone.append(dict(rank=rank, **graph))
    return everyone


def finish(log: Log, cfg: Config, executor: Executor, shards: Shards, validation: ValidationSet, ms: float,
           loss: float, recompiles: list[dict[str, Any]]) -> tuple[dict, bool]:
    """Last lines of a run's log, and its weights. Returns the result, and whether the weights are where wanted."""
    peak = peak_memory_mib(log.fabric)
    result = dict(val_loss=loss, train_time_ms=round(ms, 3), steps=log.done, tokens=log.tokens, peak_memory_mib=peak,
                  run_dir=str(log.run_dir), **validation.text_losses(loss))
    if validation.bytes_per_token:
        log.text(f"validation loss {loss:.4f} nats per token = {result['val_bpb']:.4f} bits per byte; unigram entropy "
                 f"{validation.unigram_nats:.4f} nats, ratio {loss / validation.unigram_nats:.4f}")
    if executor.compiling:
        of_all = recompiles_of_all(log, recompiles)
        if of_all:
            result["recompiles"] = of_all
    void = reason_for_void(cfg, shards)
    remark = ""
    if void:
        result["void"] = void
        remark = f" (void: {void})"
    if cfg.time_budget:
        result["budget_s"] = cfg.time_budget
        share = ms / (1000 * cfg.time_budget)
        log.text(f"time budget {cfg.time_budget:g} s: used {100 * share:.2f} %")
    log.text(f"training time {ms / 1000:.2f} s{remark}, {log.done} steps, {log.tokens:,} tokens; logs in {log.run_dir}")
    log.text("peak memory " + " ".join(f"{kind}: {mib} MiB" for kind, mib in peak.items()))

    saved = save_or_fall_back(log, cfg, executor, validation.vocabulary)
    result["comms"] = executor.traffic()
    touched = executor.touched_rows()
    if touched:
        result["touched_rows"] = touched
    log.event("result", **result)
    log.close()                                                               # no bar between the lines that follow
    return result, saved


def start_profile(cfg: Config, first: int) -> Any:
    """A profiler that counts steps from step first on, or None."""
    asked = profile_range(cfg)
    if asked is None:
        return None
    start, stop = asked
    traced = torch.profiler.schedule(skip_first=start - first - 1, wait=0, warmup=1, active=stop - start, repeat=1)
    profile = torch.profiler.profile(schedule=traced)
    profile.start()
    return profile


def write_checkpoint(cfg: Config, seconds_per_step: list[float], executor: Executor, clock: Clock, log: Log,
                     sha256: str) -> None:
    """Everything that the run needs to go on from here. Off the clock."""
    clock.stop()
    lengths = dict(num_scheduled_steps=cfg.num_scheduled_steps, num_extension_steps=cfg.num_extension_steps)
    content = dict(log=log.seen(), train_time_ms=clock.ms, data_sha256=sha256, lengths=lengths)
    if cfg.time_budget:
        fits = [list(fit) for fit in log.schedule.fits]
        content["budget"] = dict(seconds_per_step=seconds_per_step, fits=fits)
    folder = log.run_dir / CHECKPOINTS
    tables = executor.rowwise_tables()
    with log.phase("checkpoint"):
        content["state"] = executor.whole_state(log.schedule.at(log.done))
        with pieces_of_all(folder, log.done, tables, True, log.fabric) as pieces:
            if ngram_tables(cfg):
                content["tables"] = table_records(cfg, pieces)
            if log.fabric.rank == 0:
                save_checkpoint(folder, log.done, content, pieces)
        if tables and log.fabric.rank == 0:
            remove_pieces(folder, "rows-*")
    clock.start()


def checkpoint_due(cfg: Config, step: int) -> bool:
    """Where the run's cycle starts: at each multiple of checkpoint_every, or next behind it; not at step 0."""
    cycle = run_cycle(cfg)
    if cfg.checkpoint_every == 0 or step % cycle != 0 or step == 0:
        return False
    return step % cfg.checkpoint_every < cycle


def run_once(cfg: Config, seconds_per_step: list[float], executor: Executor, shards: Shards, validation: ValidationSet,
             log: Log, earlier: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """One race from the state that the executor is in, or from a checkpoint. Returns what `finish` does.

    seconds_per_step: with a time budget, by stage.
    """
    fabric = log.fabric
    first = log.done
    clock = Clock(fabric)

    def steps_to_do() -> Iterator[Values]:
        step = first
        while step < log.schedule.end_step:                                   # of the schedule at that time
            yield log.schedule.at(step)
            step += 1

    loader = Loader(cfg, fabric, shards.train, steps_to_do(), executor.exchange_ahead)
    if earlier:
        executor.load_state(earlier["state"])
        if executor.rowwise_tables():
            load_tables(Path(cfg.resume) / CHECKPOINTS, cfg, earlier["tables"], executor.optimizer.adam_steps,
                        executor.rowwise_tables(), fabric)
        loader.skip(map(log.schedule.at, range(first)))
        clock.before = earlier["train_time_ms"]
    profile = start_profile(cfg, first)

    def before_step(step: int) -> None:
        if cfg.time_budget and not cfg.profile and fit_due(log.schedule, step):
            keep_to_budget(seconds_per_step, loader, clock, log)
        if checkpoint_due(cfg, step):
            write_checkpoint(cfg, seconds_per_step, executor, clock, log, shards.sha256)
        if profile is not None and step > first:
            profile.step()                                                    # to what is recorded, or to nothing

    if fabric.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    log.open_bar()
    recompiles: list[dict[str, Any]] = []                     # graphs that the warm-up should have had
    watch: Any = contextlib.nullcontext()
    if executor.compiling:
        watch = reported_graphs(log, recompiles, "the race")
    with settled_objects(), watch:
        loss = race(loader, executor, validation, clock, log, before_step)
    loader.close()
    if profile is not None:
        profile.stop()
        report_profile(profile, log)
    return finish(log, cfg, executor, shards, validation, clock.ms, loss, recompiles)


def summary(results: list[dict], target: float) -> dict[str, Any]:
    """Several runs together, with the one-sided p of a mean loss below the target where that can be computed."""
    losses = [result["val_loss"] for result in results]
    p = None
    if target and importlib.util.find_spec("scipy"):
        from scipy import stats
        p = float(stats.ttest_1samp(losses, target, alternative="less").pvalue)
    return dict(type="summary", n=len(losses), mean=float(np.mean(losses)), sd=float(np.std(losses, ddof=1)),
                target_loss=target, p=p, runs=results)


def summary_lines(together: dict[str, Any]) -> list[str]:
    """The same for people."""
    seconds = [result["train_time_ms"] / 1000 for result in together["runs"]]
    target = together["target_loss"]
    if together["p"] is not None:
        p = f"{together['p']:.3g}"
    elif target:
        p = "pip install scipy"
    else:
        p = "no --target_loss"
    return [f"{together['n']} runs: validation loss {together['mean']:.4f} (standard deviation {together['sd']:.4f}), "
            f"training {np.mean(seconds):.2f} s ({np.std(seconds, ddof=1):.2f} s)",
            f"one-sided p of a mean below {target:g}: {p}"]


def report(cfg: Config, executor: Executor, validation: ValidationSet, log: Log, results: list[dict]) -> None:
    """After the last run: a sample, several runs together, and one JSON object as the last line on stdout."""
    lines = []
    if cfg.sample_tokens:
        tokens = generate(cfg, executor, log.schedule.at(log.done))
        lines += [f"{' sample ':-^100}", spell(validation.vocabulary, tokens), "-" * 100]
    last = dict(type="result", **results[-1])
    if len(results) > 1:
        last = summary(results, cfg.target_loss)
        lines += summary_lines(last)
    lines.append(json.dumps(last))
    print_result(log.fabric, "\n".join(lines), f"read the losses and times in {log.run_dir}, whose log is whole")


def print_result(fabric: Fabric, text: str, instead: str) -> None:
    """Print what a run or a sample is for. Raises RunError if the console does not take it."""
    if not fabric.say(text):
        raise RunError("printing the result", fabric.console.lost, "a standard output that takes all lines", instead)


def open_checkpoint(cfg: Config, fabric: Fabric, sha256: str) -> tuple[Config, dict[str, Any]]:
    """Config with the lengths of the resumed run, and the content of its last checkpoint.

    Raises DataError.
    """
    run_dir = Path(cfg.resume)
    folder = run_dir / CHECKPOINTS
    if fabric.rank == 0:
        new = folder / NEW_CHECKPOINT
        remove_leftovers([run_dir / ".reserve", new, part_of(new)])          # the first two: of older trainers
        remove_pieces(folder, "rows-*")
    _, content = load_checkpoint(folder, cfg, fabric)
    cfg = replace(cfg, **content["lengths"])

    if content["data_sha256"] != sha256:
        preset, changed = earlier_run(run_dir)
        before = Config(**PRESETS[preset] | changed)
        raise DataError(
            f"data to resume {run_dir} with",
            f"--train_files={cfg.train_files} --val_files={cfg.val_files}, whose content hashes to "
            f"{sha256[:16]}...",
            f"that of --train_files={before.train_files} --val_files={before.val_files}, which hashed to "
            f"{content['data_sha256'][:16]}...",
            "leave both flags out, or name the same shards in another place")
    done = content["log"]["done"]
    end_step = with_fits(cfg, content).end_step
    need(done <= end_step, f"--max_steps with --resume={run_dir}",
         f"{cfg.max_steps}: the run would end at step {end_step}",
         f"{done} or more: the run is there already", "--max_steps=0, for the whole schedule")
    return cfg, content


def open_data(cfg: Config, fabric: Fabric) -> tuple[Config, Shards, dict | None]:
    """Config with all sizes, shards to train on and to validate with, their hash, and the checkpoint to resume."""
    train = find_shards(cfg.train_files)
    val = find_shards(cfg.val_files)
    sha256 = scan_shards(train + val)
    flags = {f"--{name}": flag_text(value) for name, value in vars(cfg).items()}
    facts = dict(data_sha256=sha256, source_sha256=file_sha256(Path(__file__)), torch=torch.__version__)
    fabric.check_agreement(flags | facts)

    cfg = resolve(cfg, train, val)
    earlier = None
    if cfg.resume:
        cfg, earlier = open_checkpoint(cfg, fabric, sha256)
    check_enough_data(cfg, with_fits(cfg, earlier), train)
    check_enough_validation(cfg, val)

    shared = shared_shards(train, val)
    if shared:
        fabric.say(f"trained on and validated with: {shared[0]}, {len(shared)} such shards in all; "
                   "the validation losses say nothing about other text")
    return cfg, Shards(train, val, sha256), earlier


def run_folders(preset: str, cfg: Config, fabric: Fabric) -> list[Path]:
    """The run directory of each run, by seed. Raises RunError if one of them has a log."""
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{preset}-{os.urandom(4).hex()}"
    root = Path(cfg.run_dir or f"logs/{unique}")
    folders = [root]
    if cfg.runs > 1:
        folders = [root / f"seed_{cfg.seed + number}" for number in range(cfg.runs)]

    old_logs = [str(folder / "log.txt") for folder in folders if os.path.exists(folder / "log.txt")]
    if old_logs and fabric.rank == 0:
        raise RunError(f"run directory {root}", f"File exists: {old_logs}", "one without a log", "another --run_dir")
    return folders


def warm_up_with_patience(cfg: Config, fabric: Fabric, executor: Executor, log: Log) -> None:
    """Warm up with a timeout that leaves compilers their time; then set that of the race."""
    to_compile = LONG_PATIENCE if executor.compiling else 1
    to_write = LONG_PATIENCE if cfg.checkpoint_every else 1                   # the others wait for rank 0
    graphs: list[dict[str, Any]] = []
    during: Callable[[str], Any] = contextlib.nullcontext
    if executor.compiling:
        during = functools.partial(reported_graphs, log, graphs)
        log.text("compiling: minutes the first time, less with what an earlier run has left in "
                 f"{os.environ.get(COMPILE_CACHE, 'the folder that torch takes')}")

    with log.phase("warm-up"):
        fabric.set_timeout(cfg.comm_timeout * to_compile)
        warm_up(cfg, fabric, log.schedule, executor, during)
        fabric.set_timeout(cfg.comm_timeout * to_write)
    if executor.compiling:
        ms = sum(graph["ms"] for graph in graphs)
        log.event("compiled", graphs=len(graphs), ms=round(ms, 3), cache=os.environ.get(COMPILE_CACHE))
        log.text(f"compiled {len(graphs)} graphs in {ms / 1000:.2f} s")


def keep_compiled(fabric: Fabric) -> None:
    """Have torch keep what it compiles in the user's cache folder, for the next run, unless the user says where.

    Before torch.compile is called for the first time, which sets the variable too.
    """
    if os.environ.get(COMPILE_CACHE):
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():                                              # counts as unset, by its definition
        caches = Path("~/.cache")
    try:
        folder = caches.expanduser().absolute() / "train_gpt/torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()                            # raises where nothing can be written
    except (OSError, RuntimeError) as error:                                  # RuntimeError: no home
        fabric.say(f"what is compiled is kept where torch keeps it, not in {caches}: {error}")
        return
    os.environ[COMPILE_CACHE] = str(folder)


def make_executor(preset: str, cfg: Config, fabric: Fabric, precision: str,
                  report: Callable) -> tuple[Executor, str, dict[str, int]]:
    """The executor, its attention in words, and the estimate of the memory that it takes.

    Which kernels are right decides about memory, that about the slots at once, and these about which is the fastest.
    """
    if fabric.on_cuda:
        fabric.set_timeout(cfg.comm_timeout * LONG_PATIENCE)                  # a package may compile its kernels now
    usable = usable_attention(preset, cfg, fabric)
    kernel = attention_reference if usable == ["reference"] else attention_varlen
    slots_at_once, estimate = fit_memory(cfg, fabric, kernel)
    attention = fastest_attention(cfg, fabric, usable, slots_at_once)
    fabric.set_timeout(cfg.comm_timeout)
    executor = Executor(cfg, fabric, kernel, precision, slots_at_once, report)
    return executor, attention, estimate


def run_all(preset: str, given: Config, fabric: Fabric, ending: Ending) -> bool:
    """Set up and warm up once, then train once or several times. `ending` holds the log of the run in progress.

    Returns whether the weights are where they were wanted.
    """
    began = time.perf_counter()
    cfg, shards, earlier = open_data(given, fabric)
    schedule = with_fits(cfg, earlier)
    precision = head_precision(cfg, fabric)
    if earlier:
        check_profile(schedule, earlier["log"]["done"])
    elif not cfg.time_budget:                                                 # with one, the steps are not known yet
        check_profile(schedule, 0)
    if cfg.save and fabric.rank == 0:
        prepare_save(Path(cfg.save))                                          # not after hours of training
    folders = run_folders(preset, cfg, fabric)
    log_so_far = earlier["log"] if earlier else {}
    log = Log(folders[0], fabric, schedule, **log_so_far)
    ending.log = log

    def report_rows(**account: Any) -> None:
        ending.log.event("comms", **account)

    if will_compile(cfg, fabric):
        keep_compiled(fabric)
    executor, attention, estimate = make_executor(preset, cfg, fabric, precision, report_rows)
    origin = Origin(preset, given, attention, shards.sha256)
    if earlier:
        write_header(log, cfg, executor, origin, "resumed", step=log.done, source=cfg.resume)
    else:
        write_header(log, cfg, executor, origin)
    log.text("estimated memory: " + ", ".join(f"{part} {size / 2**20:,.0f} MiB" for part, size in estimate.items()))
    log.event("phase", name="set-up", ms=round(1000 * (time.perf_counter() - began), 3), timed=False)

    with log.phase("validation data"):
        validation = ValidationSet(cfg, fabric, shards.val, executor.exchange)
    warm_up_with_patience(cfg, fabric, executor, log)
    seconds_per_step: list[float] = []
    if cfg.time_budget and earlier:
        seconds_per_step = earlier["budget"]["seconds_per_step"]
    elif cfg.time_budget:
        cfg, seconds_per_step = fit_budget(cfg, fabric, executor, shards.train, log)
        check_enough_data(cfg, log.schedule, shards.train)
        check_profile(log.schedule, 0)

    pristine = executor.snapshot() if cfg.runs > 1 else None
    result, saved = run_once(cfg, seconds_per_step, executor, shards, validation, log, earlier)
    results = [result]
    for folder in folders[1:]:
        cfg = replace(cfg, seed=cfg.seed + 1)
        log = Log(folder, fabric, Schedule(cfg))
        ending.log = log
        write_header(log, cfg, executor, origin)
        with log.phase("reset"):
            executor.restore(pristine)
            executor.set_seed(cfg.seed)
        result, _ = run_once(cfg, seconds_per_step, executor, shards, validation, log, None)
        results.append(result)
    report(cfg, executor, validation, log, results)
    return saved


def run(preset: str, given: Config, fabric: Fabric, ending: Ending) -> int:
    """Train as configured. Returns the exit status. `ending` is given each log, to end it if the run ends early."""
    saved = run_all(preset, given, fabric, ending)
    if fabric.world > 1:
        dist.destroy_process_group()
    return EXIT_DONE if saved else EXIT_FAILED


def read_prompt(flags: Config, cfg: Config,
                pieces: list[bytes] | None) -> tuple[list[bytes] | None, list[int]]:
    """Bytes of each token, if anybody knows them, and the prompt as token ids. Raises DataError.

    pieces: from vocab.txt beside the weights. GPT-2's come from --ranks=FILE, or from tiktoken.
    """
    wants_gpt2 = flags.ranks != "" or pieces is None
    gpt2 = wants_gpt2 and cfg.vocab_size == GPT2_VOCAB
    ranks = None
    if flags.ranks:
        ranks = regular_file(Path(flags.ranks), "--ranks=FILE with the GPT-2 tokens")
    try:
        sys.path.append(str(Path(__file__).parent / "data"))
        tools = importlib.import_module("tokenize_text")
        if gpt2:
            ids = tools.gpt2_pieces(ranks)
            pieces = sorted(ids, key=ids.get)
            encode = tools.make_encoder("gpt2", ids)
        else:
            ids = {piece: token for token, piece in enumerate(pieces or ()) if piece}
            encode = tools.make_encoder("pocket", ids)
        return pieces, encode(flags.prompt.encode("utf-8", "surrogateescape"))
    except KeyError as missing:
        raise DataError("prompt", f"bytes that no token has: {missing}",
                        "bytes that are tokens in the vocab.txt beside the weights",
                        "leave them out of the prompt, or train on a vocabulary that has all 256") from None
    except Exception as error:           # no package, no network, any content of a file
        raise DataError("prompt", f"{type(error).__name__}: {error}",
                        "bytes of a vocab.txt beside the weights, or GPT-2 tokens, tiktoken and "
                        "--ranks=FILE", "leave them out; install tiktoken") from None


def sample_saved(flags: Config) -> int:
    """--sample=DIR "prompt": print text that goes on from the prompt, on any device.

    Returns the exit status.
    """
    folder = Path(flags.sample)
    cfg, tensors = load_weights(folder, flags.device)
    fabric = make_fabric(replace(cfg, num_slots=1))                           # a second rank would have nothing to do
    if not (folder / MANIFEST).exists():
        fabric.say(f"remark: no {MANIFEST} in {folder}: whether an older save is damaged, nobody can tell")
    pieces, prompt = read_prompt(flags, cfg, load_vocabulary(folder, cfg))
    tables = read_tables(folder, cfg)

    trained = cfg
    dtype = cfg.dtype
    if dtype == "bfloat16" and not fabric.on_cuda:
        dtype = "float32"
    cfg = replace(cfg, compile=0, dtype=dtype, seed=flags.seed, sample_tokens=flags.sample_tokens,
                  table_home="host")                          # a sample reads few rows, which any device has room for
    check_room_for_tables(folder, trained, cfg, tables, fabric)
    evaluator = Evaluator(cfg, fabric, attention_reference)
    evaluator.model.load_state_dict(tensors)
    load_tables(folder, trained, tables, None, evaluator.rowwise_tables(), fabric)
    schedule = Schedule(cfg)
    tokens = generate(cfg, evaluator, schedule.at(schedule.end_step), prompt)
    text = flags.prompt + spell(pieces, tokens)
    print_result(fabric, text, "redirect the output to where there is room")
    return EXIT_DONE


def lost_rank(found: str, fabric: Fabric | None) -> RunError:
    """What to tell when another rank is lost: which one on this host is gone, if one is."""
    gone = []
    if fabric:
        gone = fabric.gone()
        if not gone:
            time.sleep(0.1)                                                   # its sockets close just before it is gone
            gone = fabric.gone()

    if not gone:
        return RunError("lost another rank", found, "every rank's answer within --comm_timeout",
                        "look for the end of the other ranks: killed, out of memory, or stuck")
    return RunError("lost another rank", f"{', '.join(gone)} is gone, probably first; {found}", "ranks that stay",
                    "if it has not said why, it was killed: look at dmesg for the out-of-memory killer")


def in_our_words(error: BaseException, fabric: Fabric | None) -> BaseException:
    """The TrainerError that says what went wrong and what to do; a bug stays what it is."""
    first_line = (str(error).splitlines() or [""])[0]

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in first_line:
        return RunError("out of memory", first_line, "less at once",
                        "--slots_per_micro_batch=1, or more --num_slots")
    if isinstance(error, OSError):
        return DataError(str(error.filename or "disk"), error.strerror, "a file to use", "look at disk and rights")
    if isinstance(error, RuntimeError) and dist.is_initialized():
        connection = r"(?i)connection (closed|reset|refused)|timed? ?out|broken pipe|socket|gloo|nccl"
        if re.search(connection, first_line):
            return lost_rank(first_line, fabric)
    return error


def describe(error: BaseException, fabric: Fabric | None = None) -> tuple[int, str]:
    """(exit status, what to tell the user) of whatever ended the run."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_BY_SIGNAL + signal.SIGINT, "interrupted"
    if isinstance(error, SystemExit):
        if error.code <= EXIT_BY_SIGNAL:
            return error.code, ""                                             # --help
        cause = f"ended from outside ({signal.Signals(error.code - EXIT_BY_SIGNAL).name})"
        if fabric and fabric.gone():                                          # for which torchrun ends the others
            cause = f"RunError: {lost_rank(cause, fabric)}"
        return error.code, cause

    told = in_our_words(error, fabric)
    if not isinstance(told, TrainerError):
        return EXIT_FAILED, "".join(traceback.format_exception(error))
    status = EXIT_FAILED if isinstance(told, RunError) else EXIT_BAD_INPUT
    return status, f"{type(told).__name__}: {told}"


def first_cause(cause: str) -> tuple[str, bool]:
    """(the first cause that a rank gave to the launcher's store, whether that is this one).

    Without a launcher, or without an answer of its store, every rank's own cause is the first.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("WORLD_SIZE") == "1":
        return cause, True
    mine = f"{env.get('RANK')}\n{cause}"
    key = f"cause of the end, restart {env.get('TORCHELASTIC_RESTART_COUNT')}"

    def ask() -> str:
        patience = timedelta(seconds=STORE_PATIENCE)
        store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=patience)
        return store.compare_set(key, "", mine).decode()                      # sets it if nobody has; what it is then

    try:
        first = within(STORE_PATIENCE, ask)                                   # a stopped launcher answers nothing
    except Exception:
        return cause, True
    return first.partition("\n")[2], first == mine


def signal_error(number: int) -> BaseException:
    """What a signal raises, which no `except Exception` holds up."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_BY_SIGNAL + number)


class Ending:
    """The end of this process: begun once, and over in time, whatever the main thread is waiting for.

    Python calls a signal's handler between two steps of the main thread: not while that waits in C for another rank,
    a compiler or a store. So the number of the signal also wakes a thread, which ends the process if the main thread
    does not. Within `with` this is so; behind it, all is as it was before.
    """

    def __init__(self) -> None:
        self.fabric: Fabric | None = None            # once the ranks have met
        self.log: Log | None = None                  # of the run that is going on
        self.claiming = threading.Lock()
        self.begun = threading.Event()
        self.signalled = False
        self.handlers_before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        self.bell, listener = socket.socketpair()
        self.bell.setblocking(False)                                          # as set_wakeup_fd wants it
        self.bell_before = signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        self.watcher = threading.Thread(target=self.watch, args=(listener,), daemon=True)
        self.watcher.start()
        for name in ENDING_SIGNALS:
            number = getattr(signal, name, None)                              # Windows has no SIGHUP
            if number and signal.getsignal(number) not in (signal.SIG_IGN, None):          # ignored: by nohup
                self.handlers_before[number] = signal.signal(number, self.interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self.begun.set()                                                      # a signal that comes now is too late
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.bell_before)
        self.bell.close()
        self.watcher.join()                                                   # it may be just ending the process

    def interrupt(self, number: int, frame: Any) -> None:
        """Leave whatever the main thread is doing; but no second exception comes into the way of the first."""
        if self.signalled or self.begun.is_set():
            return
        self.signalled = True
        raise signal_error(number)

    def watch(self, listener: socket.socket) -> None:
        """In a thread of its own: end the process if the main thread does not begin to after a signal."""
        with listener:
            while heard := listener.recv(1):                                  # nothing once the bell is closed
                number = heard[0]
                if number not in self.handlers_before or self.begun.wait(BEGIN_PATIENCE):
                    continue
                if self.claim():                                              # else the main thread was just in time
                    os._exit(self.close(signal_error(number)))

    def claim(self) -> bool:
        """True for the first caller, who is to end this process."""
        with self.claiming:
            first = not self.begun.is_set()
            self.begun.set()
        return first

    def end(self, error: BaseException) -> int:
        """In the main thread: end the run because of this error. Returns the exit status."""
        if not self.claim():
            threading.Event().wait()                                          # the watching thread ends the process
        return self.close(error)

    def close(self, error: BaseException) -> int:
        """Say why the run ended, once over all ranks, and close its log. Returns the exit status."""
        status, cause = describe(error, self.fabric)
        limit = threading.Timer(END_PATIENCE, os._exit, [status])             # if a dead disk, say, holds this up
        limit.daemon = True
        limit.start()

        if cause:
            cause, speaks = first_cause(cause)
            if speaks:
                self.tell(cause)
        if self.log is not None:
            self.log.aborted(cause)
            self.log.close()
        limit.cancel()
        limit.join()
        return status

    def tell(self, cause: str) -> None:
        """On stderr; a console that is gone, or a full pipe that nobody reads, holds nothing up."""
        if sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):                        # TimeoutError is an OSError
            within(CONSOLE_PATIENCE, functools.partial(print, cause, file=sys.stderr, flush=True))


def open_missing_streams() -> None:
    """Put the null device where the caller closed stdin, stdout or stderr: else a log would get their number.

    Standard output stays None for Python, so that a lost result is noticed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)                           # the lowest free number: this one
            os.set_inheritable(opened, True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def start(argv: Sequence[str], ending: Ending) -> int:
    """Do what the flags say. Returns the exit status."""
    try:
        preset, cfg = parse_flags(argv)
        if cfg.sample:
            return sample_saved(cfg)
        ending.fabric = make_fabric(cfg)
        return run(preset, cfg, ending.fabric, ending)
    except BaseException as error:
        return ending.end(error)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 the run failed, 2 a bad setting or bad data, 128 + n ended by signal n."""
    open_missing_streams()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    with Ending() as ending:
        try:
            return start(argv, ending)
        except BaseException as late_signal:                                  # it came while an error was on its way
            return ending.end(late_signal.__context__ or late_signal)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):                             # full, closed or gone
        status = status or EXIT_FAILED
    os._exit(status)                                                          # even if a thread is stuck in a read

"""Train a small GPT against the clock: recipe A of the NanoGPT speedrun in one file.
    ./run.sh                                                   set-up, data, training, result and a sample
    torchrun --standalone --nproc_per_node=8 train_gpt.py      8 GPUs, preset `record`
    python train_gpt.py --preset=pocket                        one process, on a CPU about two minutes; see --help
The mathematics is modded-nanogpt's ("the peer") after pull request #221 (record 71, 2026-02-15). RECIPE means
records/RECIPE.md, which has its formulas and sources; credits are in README.md.

Contents. A section uses only sections above it, by name and by call, and nothing happens at import.
    1 Config      errors, layer table, stage table, n-gram tables, settings, presets, flags, Communicator
    2 Schedule    everything a step needs, in one `StepConfig`: pure functions of the progress
    3 Data        shards: headers, checks, packing of documents into slots, validation slots, vocabulary
    4 Kernels     references in PyTorch and Triton kernels: norm, rotation, attention, MLP, head loss, rows; main_grad
    5 Rows        embedding tables: row plans, exchange of requests, row stores on device or host, fetch and reduce
    6 Batches     from slots to batches with row plans; the loader thread; validation batches
    7 Model       parameter table and GPT
    8 Optimizer   NorMuon, Adam, row updates, groups of parameters, untying, order of communication
    9 Engine      forward_backward, optim_step, evaluate, snapshot and restore, memory, saves and checkpoints
   10 Loop        clock, log, warm-up, time budget, the training loop, sample
   11 Main        ranks and device, attention kernel, header, the end of every run, `train` from data to result
Letters                                                        [value in the record preset]
    W ranks                       L layers [11]                V vocabulary, padded [50,304]
    S slots in a step [8]         D model width [768]          R rows of a table [251,520]
    B slots in a micro-batch      H heads [6]                  E width of one head [128]
    T tokens in one slot          F MLP width [3,072]          G tokens predicted per position [3, 2, 1 by stage]
    M matrices in a bank          N rows of a product, B * T   C rows of an owner's shard of a table
A slot is one of S equal, independent shares of a step's tokens and the unit of data parallelism: slot s belongs to rank
s mod W. Adam updates on the last step of its cycle of --adam_every steps, NorMuon on every step; an n-gram table has a
cadence of 1, 2 or 4 steps. A bank is several matrices in one parameter. The objective of a step is
J = (1/S) * sum over slots of the slot's summed loss, at every W."""
from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # If a standard stream is closed, the next file that is opened gets its number, and receives what libraries print.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)               # takes the lowest number that is free: this one
    # Read the source before the imports. They take seconds, and the file may be edited meanwhile.
    with open(__file__, "rb") as file:
        SOURCE = file.read()
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")      # waiting threads that spin: 10 times slower beside busy cores
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C during the imports, until `main` begins

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
import itertools
import json
import math
import mmap
import operator
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ====== Section 1: Config =============================================================================================
class TrainerError(Exception):
    """An error that says what was found, what was expected, and what to do about it."""
    exit_status = 2                      # that the process exits with

    def __init__(self, what: str, found, expected, hint: str):
        super().__init__(what, str(found)[:1000], str(expected), hint)            # texts, which travel between ranks

    def __str__(self):
        what, found, expected, hint = self.args
        return f"{what}\n  found:    {found}\n  expected: {expected}\n  hint:     {hint}"

class ConfigError(TrainerError):
    """A setting, a launch or a device that cannot work."""

class DataError(TrainerError):
    """Files that are missing, damaged or too few."""

class RunError(TrainerError):
    """Something that went wrong in a run: loss, memory, disk, another rank."""
    exit_status = 1

def lost_rank_error(found: str) -> RunError:
    return RunError("lost another rank", found=found, expected="every rank's answer within --comm_timeout",
                    hint="look for the end of the other ranks: killed (dmesg tells of the out-of-memory killer), or "
                         "stuck; torchrun names the first")

def check(ok: object, what: object, *, found: object, expected: object, hint: str,
          error: type[TrainerError] = ConfigError) -> None:
    """Raise `error` unless `ok`."""
    if not ok:
        raise error(what, found, expected, hint)

@dataclass(frozen=True)
class Layer:
    """One layer of the model. Moving a feature to another layer is moving a word."""
    attention: str               # "plain", "paired" (heads j and j + H/2 share one sequence of 2T positions) or "none"
    window: str = "short"        # attention span: "short" or "long"
    value_embed: int | None = None       # value table added to the attention values
    key_offset: bool = False             # the unrotated half of the keys comes from the token before (key offset)
    save_as: str = ""                    # name under which the layer's output is kept
    add_saved: str = ""                  # kept stream added, gated, before the layer

    def __post_init__(self):
        check(self.attention in ("plain", "paired", "none") and self.window in ("short", "long"), "LAYERS", found=self,
              expected="attention `plain`, `paired` or `none`, window `short` or `long`",
              hint="see the columns of Layer")
        value_has_attention = self.value_embed is None or self.attention != "none"
        check(value_has_attention and (not self.key_offset or self.attention == "plain"), "LAYERS",
              found=self, expected="key_offset in a plain layer, value_embed in one with attention",
              hint="see the columns of Layer")

STAGE_SYNTAX = "rows 'batch_tokens short long lr_mul mtp_start mtp_end [untie]' joined by ';'"
TABLE_SYNTAX = ("n-grams: rows 'label order rows layer signs location update_every lr wd beta2' joined by ';', "
                "the last 7 columns of which may be left out; layer: `stream`, or the index of a layer")

SKIP, BACKOUT = "skip", "backout"
LAYERS = (                                                                    # depth (RECIPE 2.2)
    Layer("paired", "short"),                                                 #  0
    Layer("plain", "short", value_embed=0),                                   #  1
    Layer("paired", "short", value_embed=1),                                  #  2
    Layer("plain", "long", key_offset=True, save_as=SKIP),                    #  3
    Layer("plain", "short"),                                                  #  4
    Layer("paired", "short"),                                                 #  5
    Layer("none", add_saved=SKIP),                                            #  6: MLP only
    Layer("plain", "short", save_as=BACKOUT),                                 #  7: subtracted again before the head
    Layer("plain", "short", value_embed=2),                                   #  8
    Layer("paired", "short", value_embed=3),                                  #  9
    Layer("plain", "long", value_embed=4, key_offset=True))                   # 10
ATTENTION_LAYERS = tuple(depth for depth, layer in enumerate(LAYERS) if layer.attention != "none")
NUM_VALUE_EMBEDS = sum(layer.value_embed is not None for layer in LAYERS)

@dataclass(frozen=True)
class Stage:
    """One stage of the run. Windows are in blocks; weights of the predicted tokens move linearly over the stage."""
    batch_tokens: int
    short_window: int
    long_window: int
    lr_mul: float
    mtp_start: tuple[float, ...]
    mtp_end: tuple[float, ...]
    untie: bool = False                  # at its start head and embedding become two parameters (`untie_step`)

    def __post_init__(self):
        check(1 <= self.short_window < self.long_window, "--stages", found=self, expected="1 <= short < long window",
              hint=f"change that row; the table is {STAGE_SYNTAX}")
        check(len(self.mtp_start) == len(self.mtp_end), "--stages", found=self,
              expected="as many token weights at the end as at the start",
              hint=f"change that row; the table is {STAGE_SYNTAX}")
        check(all(0 <= x <= 1000 for x in (self.lr_mul, *self.mtp_start, *self.mtp_end)), "--stages", found=self,
              expected="a rate and token weights from 0 to 1,000", hint=f"change that row; the table is {STAGE_SYNTAX}")

STAGES = (                                                                    # RECIPE 4.1; the last is the extension
    Stage(131_072, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262_144, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393_216, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)))

# By order: odd factors of the tokens' hash and of the signs' hash, newest token first. Those for two and three tokens
# are the peer's of record 92, those of a fourth are ours; recipe A's own table of bigrams is none of these.
NGRAM_FACTORS = {
    2: ((36313, 27191), (48271, 30011)),
    3: ((17351, 60961, 45259), (58699, 39779, 26801)),
    4: ((50411, 22787, 64951, 38327), (43399, 56783, 20297, 61403))}
BUILTIN_TABLES = ("bigram_embed", "value_embed", "embed")
TABLE_LOCATIONS = ("device", "host")

@dataclass(frozen=True)
class NgramTable:
    """One table of hashed n-grams."""
    label: str                           # of its parameter
    order: int                           # n, a key of NGRAM_FACTORS
    rows: int                            # R; the last one means: no n-gram
    layer: int | None = None             # depth of the layer whose attention values get the rows; None: the stream
    signs: int = 0                       # 1: multiply a row by a hashed vector of +-1, which differs where rows collide
    location: str = "device"             # where owners keep the rows: "device" or "host"
    update_every: int = 2                # steps between updates
    lr_mul: float = 37.5                 # of adam_lr
    wd_mul: float = 5.0                  # of adam_weight_decay
    beta2: float = 0.95                  # decay of the second moment in an update

    def __post_init__(self):
        rules = {                        # what is expected, and whether it holds
            "a label of letters, digits and _ that ends with _embed": re.fullmatch(r"\w+_embed", self.label, re.ASCII),
            f"a label that the recipe has not, {BUILTIN_TABLES}": self.label not in BUILTIN_TABLES,
            f"an order of {list(NGRAM_FACTORS)}": self.order in NGRAM_FACTORS,
            "2 rows or more, below 2^31: the last one means that there is no n-gram": 2 <= self.rows < 2**31,
            f"layer `stream` or one with attention, {ATTENTION_LAYERS}": self.layer in (None, *ATTENTION_LAYERS),
            f"signs 0 or 1, location of {TABLE_LOCATIONS}": self.signs in (0, 1) and self.location in TABLE_LOCATIONS,
            "update_every of 1, 2 or 4 steps": self.update_every in (1, 2, 4),
            "lr and wd from 0 to 10^6, beta2 from 0 to 1":
                0 <= self.lr_mul <= 10**6 and 0 <= self.wd_mul <= 10**6 and 0 <= self.beta2 <= 1}
        for expected, holds in rules.items():
            check(holds, "--tables", found=self, expected=expected,
                  hint=f"change that row; the table is {TABLE_SYNTAX}")

GPT2_VOCAB, GPT2_BOS_ID = 50_257, 50_256
GATE_INPUTS = 12                         # features that a gate reads
FP8_MULTIPLE = 16                        # sizes in an fp8 product are multiples of it
SEQ_MULTIPLE = FP8_MULTIPLE              # tokens: a slot is a multiple of it, on every device

# The role of a flag. NUMBERS: it decides the results of a run, and a resumed run has to have the same. FREE: a resumed
# run inherits it and may change it. ONCE: a fact of one run, which a resumed one does not inherit.
NUMERIC, INHERITED, SINGLE_RUN = "numeric", "inherited", "single run"

def flag(group: str, default, unit: str, help: str, choices: tuple = (), lo: float = 0, hi: float = 2**31 - 1,
         role: str = NUMERIC):
    return field(default=default, metadata=dict(
        group=group, unit=unit, help=help, choices=choices, lo=lo, hi=hi, role=role))

_common = functools.partial(flag, "common", role=INHERITED)
_once = functools.partial(flag, "common", role=SINGLE_RUN)
_data = functools.partial(flag, "data")
_model = functools.partial(flag, "model")
_schedule = functools.partial(flag, "schedule")
_optim = functools.partial(flag, "optimizer")
_run = functools.partial(flag, "run", role=INHERITED)

ATTENTION_KERNELS = ("auto", "FA4", "FA3", "varlen", "reference")             # packages, torch's own, plain PyTorch

@dataclass(frozen=True)
class Config:
    """Everything a run may vary. One field is one flag; a preset gives fields other values and does nothing else."""
    # --help begins with these.
    preset: str = _common("record", "name", "record, record_tables, pocket, pocket_tables, race, race_tables or tiny",
                        role=NUMERIC)
    train_files: str = _common("data/fineweb10B/fineweb_train_*.bin", "pattern", "training shards, taken in name order")
    val_files: str = _common("data/fineweb10B/fineweb_val_*.bin", "pattern", "validation shards")
    epochs: int = _common(1, "passes", "over the training shards; 0: cycle without end")
    seed: int = _common(0, "integer", "initial values; each parameter draws from (seed, label)", role=NUMERIC)
    runs: int = _once(1, "runs", "in one process after one warm-up, with seeds seed, seed + 1, ...", (), 1, 10**4)
    max_steps: int = _common(0, "steps", "stop early, then validate; 0: the whole schedule")
    save: str = _once("", "folder", "for the final weights, their config and the bytes of the tokens; empty: none")
    sample: str = _once("", "folder", "generate from the weights that --save left there instead of training")
    resume: str = _once("", "folder", "run directory to continue from its last checkpoint, with its flags")
    # How documents are dealt to slots; a slot is the unit of packing, so seqs_per_step decides losses.
    val_tokens: int = _data(10_485_760, "tokens", "validation tokens, a multiple of val_batch_tokens", lo=1)
    val_batch_tokens: int = _data(2_097_152, "tokens", "one block of seqs_per_step validation slots", lo=1)
    max_doc_len: int = _data(2048, "tokens", "a document gives at most its first max_doc_len tokens", lo=2)
    seqs_per_step: int = _data(8, "slots", "equal shares of a step, divided by the ranks; sets the packing", lo=1)
    vocab_size: int = _data(0, "tokens", "0: from the shard header")
    padded_vocab: int = _data(0, "tokens", "columns of the head; 0: the next multiple of 128")
    bos_id: int = _data(-1, "id", "first token of every document; -1: from the header", lo=-1)
    bigram_rows: int = _data(0, "rows", "hash table of token pairs; 0: 5 x padded_vocab; the last row: no pair")
    # Number and features of the layers are no flags: they are recipe A's, in LAYERS.
    model_dim: int = _model(768, "features", "width D = num_heads x head_dim", (), GATE_INPUTS, 2**16)
    num_heads: int = _model(6, "heads", "an even number: paired layers join heads j and j + H/2", (), 2, 2**12)
    head_dim: int = _model(128, "features", "a multiple of 4; half of it rotates", (), 8, 2**14)
    attn_scale: float = _model(0.1, "number", "softmax scale before YaRN; queries and keys are normalised")
    tables: tuple = _model((), "table", TABLE_SYNTAX)
    dtype: str = _model("bfloat16", "type", "weights and activations", ("bfloat16", "float32", "float64"))
    head: str = _model("auto", "precision", "of training logits; auto: best", ("auto", "fp8", "emulated", "plain"))
    # The last row of `stages` is the extension, after the scheduled steps.
    num_scheduled_steps: int = _schedule(1507, "steps", "split evenly over all stages but the last", lo=1)
    num_extension_steps: int = _schedule(40, "steps", "last stage, at the lowest learning rate")
    stages: tuple = _schedule(STAGES, "table", STAGE_SYNTAX)
    window_block: int = _schedule(128, "tokens", "unit of the windows in the stage table", lo=1)
    final_long_window: int = _schedule(20, "blocks", "long window of the final validation", lo=1)
    cooldown_frac: float = _schedule(0.55, "share", "of the scheduled steps, at their end, with a falling rate", hi=1)
    lr_floor: float = _schedule(0.1, "number", "learning rate factor at the end of the cooldown")
    time_budget: float = _schedule(0.0, "s", "of training, for the whole schedule; 0: steps as set")
    # Rates before the factor of the stage and the parameter's own multiplier.
    normuon_lr: float = _optim(0.023, "number", "attention and MLP banks")
    normuon_beta2: float = _optim(0.95, "number", "decay of the second moment per row", hi=1)
    normuon_weight_decay: float = _optim(1.2, "number", "cautious, times lr^2")
    momentum_min: float = _optim(0.85, "number", "NorMuon momentum at both ends", hi=1)
    momentum_max: float = _optim(0.95, "number", "NorMuon momentum in between", hi=1)
    momentum_warmup_frac: float = _optim(300 / 1547, "share", "of all steps, with a rising momentum", hi=1)
    momentum_cooldown_frac: float = _optim(50 / 1547, "share", "of all steps, with a falling momentum", hi=1)
    adam_every: int = _optim(2, "steps", "between updates of Adam, for which gradients add up", (1, 2))
    adam_lr: float = _optim(0.008, "number", "everything else; multipliers stand in the parameter table")
    adam_weight_decay: float = _optim(0.005, "number", "cautious, times (lr x multiplier)^2")
    adam_eps: float = _optim(1e-10, "number", "added to the uncorrected root of the second moment")
    device: str = _run("auto", "device", "auto: cuda if there is one", ("auto", "cpu", "cuda"))
    compile: int = _run(-1, "0|1", "torch.compile; -1: on CUDA only", (-1, 0, 1))
    attention: str = _run("auto", "kernel", "auto: the first that is right", ATTENTION_KERNELS)
    row_comms: str = _run("sparse", "mode", "table rows that travel: all, or those asked for", ("dense", "sparse"))
    debug_rows: int = _run(0, "0|1", "poison rows not fetched, look for gradients of rows not planned", (0, 1))
    micro_batch_size: int = _run(0, "slots", "side by side in the model; 0: all that the device's memory fits")
    val_every: int = _run(250, "steps", "between validations; 0: only the final one")
    target_loss: float = _run(3.28, "nats", "against which several runs are tested; 0: none")
    run_dir: str = _run("", "folder", "of the logs; empty: logs/<run id>", role=SINGLE_RUN)
    checkpoint_every: int = _run(0, "steps", "between checkpoints, at even steps; the last two are kept; 0: none")
    profile: str = _run("", "a:b", "trace steps a to b - 1 on every rank; the time of such a run does not count",
                        role=SINGLE_RUN)
    comm_timeout: float = _run(60.0, "s", "longest wait for another rank or for the loader thread", lo=1)
    sample_tokens: int = _run(96, "tokens", "generated after the run, or by --sample; 0: none")
    temperature: float = _run(0.8, "number", "of a sample: the lower, the likelier its tokens", lo=0.01)
    prompt: str = _run("", "text", "with which a sample begins")

# A row of a table is one text in a flag, in a log and in the settings of a save; so it is written and read here alone.
def parse_floats(word):
    return tuple(map(float, word.split(",")))

def parse_layer(word):
    return None if word == "stream" else int(word)

def ngram_lr_mul(word: str) -> float:
    """Parse the column `lr`. Until this trainer had no rounding modes, the 8th column named one."""
    check(word not in ("nearest", "stochastic"), "--tables, 8th column", found=word,
          expected="lr, a number: rows are always rounded to nearest, and the column of the rounding mode is gone",
          hint=f"leave `{word}` out")
    return float(word)

SPEC_PARSERS = dict(
    stages=(Stage, int, int, int, float, parse_floats, parse_floats, {"untie": True}.__getitem__),
    tables=(NgramTable, str, int, int, parse_layer, int, str, int, ngram_lr_mul, float, float))

def parse_specs(name: str, text: str):
    """Return the rows of a table; columns left out have their defaults. Raises ValueError, TypeError or KeyError."""
    # strict: a word too many is an error, a word too few one of the constructor.
    make, *columns = SPEC_PARSERS[name]
    rows = []
    for row in text.split(";"):
        words = row.split()
        if words:
            rows.append(make(*(column(word) for column, word in zip(columns[:len(words)], words, strict=True))))
    return tuple(rows)

RECORD = dict(device="cuda")
POCKET = dict(
    train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin",
    val_tokens=65_536, val_batch_tokens=8_192, max_doc_len=256,
    model_dim=96, head_dim=16, attn_scale=12.8 / 16, dtype="float32", head="plain", compile=0,
    stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 256) for stage in STAGES),
    window_block=8, num_scheduled_steps=520, num_extension_steps=20, val_every=180, target_loss=0.0)
TINY = POCKET | dict(
    train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1",
    val_tokens=1024, val_batch_tokens=512, max_doc_len=24, model_dim=32, num_heads=2,
    stages=parse_specs("stages",         # its own: a fork that changes STAGES keeps this preset
                     "128 1 3 1 1,.5,.25 1,.5,0; 256 3 7 1.52 1,.5 1,0; 384 5 11 1.73 1 1 untie; 384 6 13 1 1 1"),
    window_block=4, num_scheduled_steps=9, num_extension_steps=3, val_every=5, sample_tokens=8)
RACE = POCKET | dict(                    # below 2.20 in half the time (record 23)
    num_scheduled_steps=190, stages=POCKET["stages"][1:], adam_every=1, num_heads=2, head_dim=48, attn_scale=12.8 / 48,
    tables=parse_specs("tables", "trigram_embed 3 20480; fourgram_embed 4 20480"))
LARGE_TABLES = dict(tables=parse_specs("tables", "trigram_embed 3 100000; fourgram_embed 4 100000"))
PRESETS = dict(
    record=RECORD,
    record_tables=RECORD | dict(tables=parse_specs("tables", "more_bigram_embed 2 21000000 stream 1 device 2 70; "
                                                 "trigram_embed 3 21000000 stream 1 device 2 70")),
    pocket=POCKET,
    pocket_tables=POCKET | LARGE_TABLES,
    race=RACE,
    race_tables=RACE | LARGE_TABLES,
    tiny=TINY)

SETTINGS_FILE = "settings.json"          # of a run directory and of a save: {field: text of its flag}

def format_spec(row: Stage | NgramTable):
    """Return the text of a row as `read_rows` reads it."""
    words = []
    for value in vars(row).values():
        if isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif isinstance(value, bool):
            words += ["untie"] if value else []
        else:
            words.append("stream" if value is None else str(value))
    return " ".join(words)

def format_value(value):
    return ";".join(map(format_spec, value)) if isinstance(value, tuple) else str(value)

def parse_value(name: str, text: str):
    """Read a field's value from the text of its flag. Raises ConfigError for another type, choice or bound."""
    config_field = Config.__dataclass_fields__[name]
    metadata = config_field.metadata
    kind = type(config_field.default)
    choices = metadata["choices"]
    allowed = f"{kind.__name__}, {metadata['unit']}"
    if choices:
        allowed = f"one of {list(choices)}"
    elif kind in (int, float):
        allowed += f", {metadata['lo']:,} to {metadata['hi']:,}"

    # What a column or a type cannot read ends in the message below; no shell expands the ~ of --save=~/x.
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if kind is tuple:
            return parse_specs(name, text)
        if metadata["unit"] in ("folder", "pattern"):
            text = os.path.expanduser(text)
        value = kind(text)
        in_bounds = kind is str or metadata["lo"] <= value <= metadata["hi"]  # a NaN never is
        if value in choices or (in_bounds and not choices):
            return value
    raise ConfigError(f"--{name}", found=repr(text), expected=f"{allowed}: {metadata['help']}",
                      hint=f"for example --{name}={format_value(config_field.default)}")

def check_layers(layers):
    """Raise ConfigError for a layer table that would train another model than it seems to say."""
    saved = []                           # streams, by the layers above
    for i, layer in enumerate(layers):
        check(layer.add_saved in ("", *saved), f"LAYERS, layer {i}", found=layer,
              expected=f"to add a stream that a layer above keeps, {saved}", hint="see the columns of Layer")
        if layer.save_as:
            saved.append(layer.save_as)
    values = sorted(layer.value_embed for layer in layers if layer.value_embed is not None)
    check(BACKOUT in saved and len(saved) == len(set(saved)) and values == list(range(len(values))), "LAYERS",
          found=f"streams kept {saved}, value tables {values}",
          expected=f"each stream once, with {BACKOUT!r}, and value tables 0, 1, ... once each",
          hint="see the columns of Layer")

def check_config(cfg: Config):
    """Raise ConfigError for settings that do not fit together, and name ones that do."""
    # Types and bounds were checked where texts were read; these are about several settings, or about more than bounds.
    check_layers(LAYERS)
    H, E = cfg.num_heads, cfg.head_dim
    unit = SEQ_MULTIPLE * cfg.seqs_per_step               # batches are whole slots of whole units
    for stage in cfg.stages:
        check(0 < stage.batch_tokens and stage.batch_tokens % unit == 0, "--stages", found=stage,
              expected=f"a batch of a multiple of {unit} tokens ({SEQ_MULTIPLE} x seqs_per_step)",
              hint=f"change that row; the table is {STAGE_SYNTAX}")
    labels = [table.label for table in cfg.tables]
    for table in cfg.tables:
        check(labels.count(table.label) == 1, "--tables", found=table, expected="a label that no other row has",
              hint="change one of them")
        check(table.update_every % cfg.adam_every == 0, "--tables", found=table,
              expected=f"update_every that is a multiple of adam_every={cfg.adam_every}",
              hint=f"change that row; the table is {TABLE_SYNTAX}")
    traced = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", cfg.profile or "1:2")
    rules = (                            # a field, whether it is right, what is expected, a value that is
        ("num_heads", H % 2 == 0, "an even number, since paired layers join two heads", H + 1),
        ("head_dim", E % 4 == 0, "a multiple of 4", E // 4 * 4),
        ("model_dim", cfg.model_dim == H * E, f"num_heads x head_dim = {H} x {E}", H * E),
        ("stages", len(cfg.stages) >= 2 and sum(stage.untie for stage in cfg.stages) <= 1,
         "two rows or more, the last for the extension, and `untie` in one row at most", format_value(STAGES)),
        ("val_batch_tokens", cfg.val_batch_tokens % unit == 0, f"a multiple of {unit} ({SEQ_MULTIPLE} x seqs_per_step)",
         -(-cfg.val_batch_tokens // unit) * unit),
        ("val_tokens", cfg.val_tokens % cfg.val_batch_tokens == 0, "a multiple of val_batch_tokens",
         -(-cfg.val_tokens // cfg.val_batch_tokens) * cfg.val_batch_tokens),
        ("runs", cfg.runs == 1 or not (cfg.resume or cfg.save or cfg.profile),
         "one run for --resume, --save or --profile", 1),
        ("profile", traced and 0 < int(traced[1]) < int(traced[2]), "a:b for steps a to b - 1, 0 < a < b", "100:104"))
    for name, right, expected, instead in rules:
        value = format_value(getattr(cfg, name))
        check(right, f"--{name}", found=value or "nothing", expected=expected, hint=f"for example --{name}={instead}")

def make_config(values: dict):
    """Return the settings that these fields and their preset give, checked. Raises ConfigError."""
    preset = values.get("preset", Config.preset)
    check(preset in PRESETS, "--preset", found=preset, expected=f"one of {list(PRESETS)}",
          hint="for example --preset=pocket")
    cfg = Config(**PRESETS[preset] | values)
    check_config(cfg)
    return cfg

def read_settings(folder: Path):
    """Return the settings that a run directory or a save has kept. Raises DataError."""
    path = folder / SETTINGS_FILE
    try:
        check(path.is_file() or not path.exists(), str(path), found="no regular file",
              expected="settings of a run or of a save", hint="name the folder of one", error=DataError)
        settings = json.loads(path.read_bytes())      # another trainer may have had other flags
        return make_config({name: parse_value(name, text) for name, text in settings.items()})
    except ConfigError as error:
        what, *rest = error.args
        raise ConfigError(f"{what}, in {path}", *rest) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(str(path), found=f"{type(error).__name__}: {error}", expected="flags of this trainer",
                        hint="name the folder of a run or of a save; one of an older trainer needs that "
                             "trainer, the train_gpt.py in the run directory") from None

def print_stdout(text: str):
    """Print what the user asked for. Raises RunError if standard output does not take it."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        raise RunError("standard output", found=error, expected="one that takes all lines",
                       hint="redirect it to where there is room; what a run has found stands in its log") from None

def make_arg_parser(preset: str):
    """Return a parser of all flags, whose help shows the preset's values."""
    parser = argparse.ArgumentParser(
        "train_gpt.py", "%(prog)s [--preset=NAME] [--field=value ...], or --sample=DIR [PROMPT]", add_help=False,
        allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS, epilog="exit status: 0 done, 1 "
        "the run failed, 2 a bad setting or bad data, 129 hung up, 130 interrupted, 143 ended")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("prompt", nargs="?", help="the same as --prompt")
    values = vars(make_config(dict(preset=preset)))
    for group, config_fields in itertools.groupby(fields(Config), lambda config_field: config_field.metadata["group"]):
        listed = parser.add_argument_group(group)
        for config_field in config_fields:
            help_text = f"{config_field.metadata['help']} [{format_value(values[config_field.name])}]"
            listed.add_argument(f"--{config_field.name}", metavar=config_field.metadata["unit"], help=help_text,
                                type=functools.partial(parse_value, config_field.name))
    return parser

# Old spelling: new spelling. Files and command lines of earlier versions have the old ones.
RENAMED_FLAGS = dict(num_slots="seqs_per_step", slots_per_micro_batch="micro_batch_size", document_start="bos_id")

def unknown_flag_error(text: str) -> ConfigError:
    """Return the error for a flag that does not exist, with a hint that names the closest ones."""
    name = text.partition("=")[0].removeprefix("--")
    closest = difflib.get_close_matches(name, Config.__dataclass_fields__, 3, 0.4)
    hint = "see --help"
    if name in RENAMED_FLAGS:
        hint = f"it was renamed to --{RENAMED_FLAGS[name]}"
    elif closest:
        hint = "did you mean " + " or ".join(f"--{other}" for other in closest) + "?"
    return ConfigError("unknown flag", found=repr(text),
                       expected="--field=value with a field that exists, or one prompt in quotes", hint=hint)

def parse_args(argv: list[str]) -> dict[str, Any]:
    """Return {field: value} of the given flags. --help prints and exits. Raises ConfigError."""
    try:
        flags, unknown = make_arg_parser(Config.preset).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("flags", found=error, expected="--field=value", hint="see --help") from None
    if unknown:
        raise unknown_flag_error(unknown[0])
    flags = vars(flags)
    if "help" in flags:
        print_stdout(make_arg_parser(flags.get("preset", Config.preset)).format_help())
        sys.exit(0)

    # An empty folder is --resume=$FOLDER without a FOLDER: training anew would be a bad surprise.
    for name in ("resume", "sample"):
        check(flags.get(name) != "", f"--{name}", found="an empty name", expected="a folder",
              hint=f"--{name}=FOLDER, or leave it out")
    check("sample" in flags or not flags.get("prompt"), "a word without a flag", found=flags.get("prompt"),
          expected="--field=value", hint="a prompt needs --sample=DIR")
    return flags

def flag_names(*roles: str) -> set[str]:
    """Return the names of all flags with one of these roles."""
    return {config_field.name for config_field in fields(Config) if config_field.metadata["role"] in roles}

def numeric_settings(cfg: Config):
    """Return the settings on which a run's numbers depend, as texts."""
    # Homes of tables change no bit, and a run may be resumed with another.
    cfg = replace(cfg, tables=tuple(replace(table, location="device") for table in cfg.tables))
    return {name: format_value(getattr(cfg, name)) for name in flag_names(NUMERIC)}

def load_config(argv):
    """Return the settings; --resume puts an earlier run's flags first. Raises ConfigError, DataError.
    With --sample=DIR they are the flags given alone: `read_settings(DIR)` says what was trained."""
    flags = parse_args(argv)
    if "sample" in flags:
        may_vary = flag_names(INHERITED, SINGLE_RUN) - {"resume"} | {"seed"}
        check(flags.keys() <= may_vary, "--sample", found=" ".join(argv), expected=f"beside it only {sorted(may_vary)}",
              hint="leave the others out: the folder says what was trained")
        return Config(**flags)
    if "resume" not in flags:
        return make_config(flags)

    # A flag may repeat what decides about the numbers of a run, and change the rest.
    earlier = read_settings(Path(flags["resume"]))
    inherited = {name: getattr(earlier, name) for name in flag_names(NUMERIC, INHERITED)}
    cfg = make_config(inherited | flags)
    before = numeric_settings(earlier)
    for name, text in numeric_settings(cfg).items():
        check(text == before[name], f"--{name} with --resume", found=repr(text),
              expected=f"{before[name]}, as in that run",
              hint=f"leave --{name} out; these may change: {sorted(flag_names(INHERITED))}, and the "
                   "location of a table")
    return cfg

def wait_for_work(work: Any) -> None:
    """Wait for a collective that was launched; None: there was nothing to launch."""
    if work is not None:
        work.wait()

DEVICE_TIMEOUT_FRACTION = 0.8            # longest wait for an event of the device, in timeouts in force
DEVICE_POLL_S = 1e-4                     # s between two queries of an event

def happens_within(seconds: float, event: torch.cuda.Event) -> bool:
    """Return whether an event of the device happens within this time. Event.synchronize() has no time limit."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(DEVICE_POLL_S)
    return True

@dataclass(eq=False)
class Communicator:
    """The one object that knows ranks and devices. Passed on, never global."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    loader_group: Any = None             # of row plans, on the CPU: the loader thread's own, so that no order can clash
    timeout: float = 600.0               # s, longest wait for another rank: see set_timeout

    @property
    def on_cuda(self):
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done its work. Raises RunError as `wait_for` does."""
        if self.on_cuda:
            self.wait_for(self.record_event())
            torch.cuda.synchronize(self.device)               # copies and messages of the next cycle, on other streams

    def record_event(self) -> torch.cuda.Event:
        """Return an event that happens when the device has done what the current stream was given so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of the device. Raises RunError if it does not happen in time."""
        # NCCL aborts the process, without a line in the log, when a collective has taken the timeout since its launch.
        # This wait begins later than the launch. It must end earlier, so the fraction is below 1.
        seconds = DEVICE_TIMEOUT_FRACTION * self.timeout
        if not happens_within(seconds, event):
            found = f"nothing from {self.device} after {seconds:.1f} s"
            raise lost_rank_error(found) if self.world_size > 1 else RunError("waiting for the device", found=found,
                expected="the end of what it was given",
                hint="look for its errors (dmesg, nvidia-smi -q); or give a longer --comm_timeout")

    def launch(self, collective: Callable, *tensors: Tensor):
        """Launch a collective of all ranks, unless this one is alone. Returns the work for `wait_for`."""
        return None if self.world_size == 1 else collective(*tensors, async_op=True)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a wait for another rank may take from now on."""
        self.timeout = seconds
        if self.world_size > 1:
            # Before torch 2.14 it has no public name.
            set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.loader_group):
                set_group_timeout(timedelta(seconds=seconds), group)

    def pinned(self, x):
        """Return an array or tensor as a tensor, pinned beside a GPU: torch uses a block again after its last copy."""
        tensor = torch.as_tensor(x)
        return tensor.pin_memory() if self.on_cuda else tensor

    def set_thread_device(self):
        # The current device is a thread's own: without this, pinning memory would open GPU 0 from every rank.
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def print0(self, text: str):
        """Print on rank 0. A console that is gone or full does not end the run."""
        if self.rank == 0:
            with contextlib.suppress(OSError, ValueError):
                print(text, flush=True)

    def all_gather(self, fact):
        """Return this fact of every rank, rank by rank. Collective."""
        everyone = [fact] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyone, fact)
        return everyone

    def check_agreement(self, facts: dict):
        """Raise ConfigError on every rank if any rank was started with other facts."""
        # All compare with rank 0, so that all find the same and none waits for another.
        everyone = self.all_gather(facts)
        for rank, theirs in enumerate(everyone):
            for name, expected in everyone[0].items():
                check(theirs.get(name) == expected, f"ranks disagree about {name}",
                      found=f"{expected} on rank 0, {theirs.get(name)} on rank {rank}", expected="one value",
                      hint="start every rank with the same flags, data and source")

    @contextlib.contextmanager
    def raise_together(self):
        """If the body raises a TrainerError on any rank, raise it on every rank, once all bodies have ended.
        Collective; the body must not wait for another rank."""
        failure = None
        try:
            yield
        except TrainerError as error:
            failure = error
        for rank, error in enumerate(self.all_gather(failure)):
            if error is not None:
                what, *rest = error.args
                raise type(error)(f"{what}, on rank {rank}" if self.world_size > 1 else what, *rest)

    def compiles(self, cfg: Config) -> bool:
        """True if torch.compile is used."""
        return cfg.compile == 1 or bool(cfg.compile and self.on_cuda)


# ====== Section 2: Schedule ===========================================================================================
class Rotary(NamedTuple):
    """Rotation of queries and keys in one stage."""
    frequencies: tuple[float, ...]       # E/4 angles per position; the other half of the head does not rotate
    attn_scale: float                    # softmax scale, grown by YaRN

@dataclass(frozen=True)
class StepConfig:
    """Everything the schedule says for one step."""
    step: int
    stage: int
    seq_len: int
    short_window: int                    # tokens; a query sees that many keys before its own, and its own
    long_window: int
    mtp_weights: tuple[float, ...]       # of the 1st, 2nd, ... next token, not normalised
    rotary: Rotary
    normuon_lr: float
    adam_lr: float
    momentum: float
    update_adam: bool                    # last step of an Adam cycle, whose gradients its update consumes
    tied: bool                           # this step's forward reads the head, transposed, for its embedding
    untie_after: bool                    # after this step's update, head and embedding become two parameters
    begins_cycle: bool                   # the run's cycle, the unit of loading and checkpoints, begins with this step
    checkpoint: bool                     # a checkpoint is written before this step
    validate: bool                       # a validation runs before this step

ROTARY_BASE = 1024.0
YARN_ALPHA, YARN_BETA = 1.0, 32.0        # full turns inside the old window: below alpha stretched, above beta kept
YARN_SCALE_GROWTH = 0.2                  # of the softmax scale, times the logarithm of the windows' ratio

def rotary_by_stage(cfg: Config):
    """Return the Rotary of each stage. At first its E/4 frequencies go from 1 down to 1/1024 (half-truncated rotary,
    RECIPE 2.4). YaRN lowers low frequencies as the long window grows (arXiv 2309.00071)."""
    count = cfg.head_dim // 4
    rotary = [Rotary(tuple(ROTARY_BASE ** (-i / (count - 1)) for i in range(count)), cfg.attn_scale)]
    for old_stage, new_stage in zip(cfg.stages, cfg.stages[1:]):
        old = old_stage.long_window * cfg.window_block
        new = new_stage.long_window * cfg.window_block
        lowered = old / new                                                   # a low frequency: as many turns as before
        frequencies = []
        for frequency in rotary[-1].frequencies:
            turns = old * frequency / (2 * math.pi)
            keep = min(max((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0.0), 1.0)
            frequencies.append(frequency * (lowered + keep * (1 - lowered)))
        growth = YARN_SCALE_GROWTH * math.log(new / old) + 1
        rotary.append(Rotary(tuple(frequencies), rotary[-1].attn_scale * growth))
    return rotary

class Schedule:
    """Pure functions of the step (RECIPE 4). `at(end_step)` is for the final validation, with the widest window."""
    # Each step has a place in the plan that the settings make: the step itself, or with --time_budget what the clock
    # said when its run cycle was prepared. Stages and rates go by the place, Adam and validation by the step.
    def __init__(self, cfg: Config, cycle_progress: tuple = ()):
        # places: of the first step of each run cycle so far, ascending, with --time_budget; the race appends to it.
        self.cfg = cfg
        # A run's cycle, in steps, is the largest cadence: plans and checkpoints come at its multiples.
        self.cycle_steps = max([cfg.adam_every, *(table.update_every for table in cfg.tables)])
        self.cycle_progress = list(cycle_progress)
        self.planned_steps = cfg.num_scheduled_steps + cfg.num_extension_steps    # of the plan
        # All stages but the last share the scheduled steps evenly.
        scheduled = len(cfg.stages) - 1
        stage_ends = [round(cfg.num_scheduled_steps * (i + 1) / scheduled) for i in range(scheduled)]
        self.stage_starts = (0, *stage_ends)              # of the stages, places in the plan
        self.stage_ends = (*stage_ends, self.planned_steps)
        untie_starts = (start for start, stage in zip(self.stage_starts, cfg.stages) if stage.untie)
        self.untie_progress = next(untie_starts, math.inf)
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))
        self.rotary = rotary_by_stage(cfg)

    def progress(self, step: int):
        """Return how far a step is in the plan, in planned steps."""
        if self.cfg.time_budget:
            return min(self.cycle_progress[step // self.cycle_steps], self.planned_steps)
        return step

    def first_step_at(self, progress: float):
        """Return the first step at this place of the plan or after it; infinite while no clock has said so."""
        if not self.cfg.time_budget:
            return progress
        cycles = bisect.bisect_left(self.cycle_progress, progress)
        return cycles * self.cycle_steps if cycles < len(self.cycle_progress) else math.inf

    @property
    def end_step(self):
        """Return the first step that is not trained; infinite while no clock has said which."""
        return min(self.cfg.max_steps or math.inf, self.first_step_at(self.planned_steps))

    @property
    def untie_step(self):
        """Return the last step of the Adam cycle in which the run reaches the stage that unties."""
        # An embedding that leaves the head in the middle of a cycle would lose the cycle's gradients.
        step = self.first_step_at(self.untie_progress)
        if step == math.inf:
            return step
        every = self.cfg.adam_every
        return step // every * every + every - 1

    def stage_at(self, progress: float):
        return min(bisect.bisect_right(self.stage_ends, progress), len(self.stage_ends) - 1)

    def lr_factor_at(self, progress: float):
        """Return the stage's multiplier, which from the cooldown's start on goes linearly to the floor. No warm-up."""
        cooldown_steps = max(1, self.cfg.num_scheduled_steps - self.cooldown_start)
        done = min(max(0.0, (progress - self.cooldown_start) / cooldown_steps), 1.0)
        return self.cfg.stages[self.stage_at(progress)].lr_mul * (1 - done) + self.cfg.lr_floor * done

    def momentum_at(self, progress: float):
        """Return NorMuon's momentum at a place of the plan: it rises at the start and falls at the end."""
        cfg = self.cfg
        up = round(cfg.momentum_warmup_frac * self.planned_steps)
        down = round(cfg.momentum_cooldown_frac * self.planned_steps)
        rise = cfg.momentum_max - cfg.momentum_min
        if progress < up:
            return cfg.momentum_min + rise * progress / up
        steps_down = progress - self.planned_steps + down
        if steps_down > 0:
            return cfg.momentum_max - rise * steps_down / down
        return cfg.momentum_max

    def at(self, step: int) -> StepConfig:
        """Return everything that a step needs; end_step's are those of the final validation."""
        # Stage and rates go by the place, which the clock may decide; Adam and validation by the step.
        cfg = self.cfg
        progress = self.progress(step)
        stage_idx = self.stage_at(progress)
        stage = cfg.stages[stage_idx]
        long_window = stage.long_window
        if progress >= self.planned_steps:
            long_window = cfg.final_long_window                               # grown without YaRN
        factor = self.lr_factor_at(progress)
        begins_cycle = step % self.cycle_steps == 0

        # Weights of the next tokens are linear in the position inside the stage.
        start, end = self.stage_starts[stage_idx], self.stage_ends[stage_idx]
        fraction = (progress - start) / max(1, end - start)
        mtp_weights = [first + (last - first) * fraction for first, last in zip(stage.mtp_start, stage.mtp_end)]
        return StepConfig(
            step=step, stage=stage_idx, seq_len=stage.batch_tokens // cfg.seqs_per_step,
            short_window=stage.short_window * cfg.window_block, long_window=long_window * cfg.window_block,
            mtp_weights=tuple(mtp_weights), rotary=self.rotary[stage_idx], momentum=self.momentum_at(progress),
            normuon_lr=cfg.normuon_lr * factor, adam_lr=cfg.adam_lr * factor,
            update_adam=step % cfg.adam_every == cfg.adam_every - 1, tied=step <= self.untie_step,
            untie_after=step == self.untie_step, begins_cycle=begins_cycle,
            checkpoint=begins_cycle and cfg.checkpoint_every > 0 and step % cfg.checkpoint_every < self.cycle_steps,
            validate=cfg.val_every > 0 and step % cfg.val_every == 0)

    def warm_up_steps(self):
        """Return the steps of whole run cycles around the start of every stage, in which every graph occurs."""
        # The largest stage comes first, so that a lack of memory shows early; a cycle cut short comes last.
        first_steps = {}                 # their first steps, each once
        starts_and_stages = zip(self.stage_starts, self.cfg.stages)
        for start, _ in sorted(starts_and_stages, key=lambda pair: -pair[1].batch_tokens):
            first = start // self.cycle_steps * self.cycle_steps
            first_steps |= {first: None, first + self.cycle_steps: None}
        steps = []
        for first in sorted(first_steps, key=lambda first: first + self.cycle_steps > self.end_step):
            steps += range(first, min(first + self.cycle_steps, self.end_step))
        return steps


# ====== Section 3: Data ===============================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # table in data/README.md
TOKEN_ITEMSIZE = 2                       # little-endian u16
MANIFEST_FORMATS = (1, 2)                # of data, and of saves and checkpoints
MANIFEST_FILE = "manifest.json"          # hashes of the files beside it, written last; table in data/README.md
VOCAB_FILE = "vocab.txt"                 # bytes of the tokens of the files beside it
SLOW_TIMEOUT_FACTOR = 10                 # ranks may be that many timeouts apart while they compile, or one writes files
SYNTHETIC_PREFIX = "formula:"            # formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS, tokens without a file
HASH_MULTIPLIER = 0x9E3779B97F4A7C15     # 2^64 over the golden ratio: products of neighbours look unrelated at the top
SYNTHETIC_DOC_LEN = 32                   # tokens, on average

class ShardHeader(NamedTuple):
    """One shard: a file, or a formula that makes its tokens."""
    name: str
    num_tokens: int
    vocab_size: int
    bos_id: int

    @property
    def vocab_and_bos(self):
        return self.vocab_size, self.bos_id

class TokenShard:
    """Tokens of one shard in memory, (tokens,) u16, and where its documents start."""
    def __init__(self, tokens: np.ndarray, bos_id: int):
        self.tokens = tokens
        self.doc_starts = np.flatnonzero(tokens == bos_id)
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))

class PackedSeq(NamedTuple):
    """One slot of T tokens on the host."""
    tokens: np.ndarray                   # (T + 1,) u16: inputs are the first T, targets the last T
    cu_seqlens: np.ndarray               # (documents + 1,) i32: 0, then the end of each document in the inputs, last T;
                                         # the first or last document may be empty

def synthetic_tokens(seed: int, count: int, vocab_size: int, bos_id: int):
    """Make (count,) u16 tokens from their positions and the seed alone: for the tiny preset and the warm-up."""
    position = np.arange(count, dtype=np.uint64) + (seed << 32)
    mixed = position * HASH_MULTIPLIER >> 40              # 24 bits, of a product that wraps
    drawn = mixed * mixed // 7 % (vocab_size - 1)
    drawn += drawn >= bos_id             # any token but the document start
    drawn[mixed % SYNTHETIC_DOC_LEN == 0] = bos_id
    drawn[:1] = bos_id
    return drawn.astype(np.uint16)

def read_shard_header(path: Path):
    """Return the header of a shard, its first 1,024 bytes, checked with its length. Raises DataError."""
    check(path.is_file(), f"{path} as a shard", found=f"no such file, or no regular one, seen from {os.getcwd()}",
          expected="a .bin shard",
          hint="preset pocket: run where data/pocket is, as in a clone; preset record: python "
               "data/cached_fineweb10B.py 9; other data: give --train_files= and --val_files=", error=DataError)
    size = path.stat().st_size
    words = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    words.resize(HEADER_BYTES // 4)                                           # zeros if the file is shorter
    magic, version, count, vocab, start = words[:5].tolist()
    whole = count >= 0 and HEADER_BYTES + TOKEN_ITEMSIZE * count == size
    check([magic, version] == [SHARD_MAGIC, SHARD_VERSION] and whole, f"{path} as a shard",
          found=f"{size} bytes that begin with {magic}, {version}, {count}",
          expected=f"a header of {HEADER_BYTES} bytes that begins with {SHARD_MAGIC}, {SHARD_VERSION} and the number "
                   f"of tokens, then {TOKEN_ITEMSIZE} bytes for each",
          hint="the file is cut, still being written, or none (data/README.md has the format): fetch or write it again",
          error=DataError)
    if vocab == 0:                                                            # old shards leave both words 0
        vocab, start = GPT2_VOCAB, GPT2_BOS_ID
    return ShardHeader(str(path), count, vocab, start)

def read_shard_headers(pattern: str):
    """Return the headers of all shards of a pattern in name order, checked. Raises DataError."""
    if pattern.startswith(SYNTHETIC_PREFIX):
        check(re.fullmatch(SYNTHETIC_PREFIX + r"\d{1,5}:\d{1,5}:\d{1,9}:[1-9]\d{0,4}", pattern), "formula",
              found=pattern, expected="formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS",
              hint="for example formula:512:511:40000:2", error=DataError)
        vocab, start, tokens, shards = map(int, pattern.removeprefix(SYNTHETIC_PREFIX).split(":"))
        return [ShardHeader(f"{pattern}#{seed}", tokens, vocab, start) for seed in range(shards)]
    # Brackets in the name of a folder mean themselves; what matches nothing may still be the name of a file. Whatever
    # matches has to be a shard: silently skipping a broken link would train on less data.
    folder, name = os.path.split(pattern)
    if os.path.isdir(folder):
        folder = glob.escape(folder)
    paths = sorted(glob.glob(os.path.join(folder, name))) or [pattern]
    return [read_shard_header(Path(path)) for path in paths]

def read_manifest(folder: Path):
    """Return the sha256 of each file that a folder's manifest names; {} without a manifest. Raises DataError."""
    path = folder / MANIFEST_FILE
    check(not os.path.lexists(f"{path}.part"), f"{path}.part",
          found="a tool was stopped while it gave the files their names", expected="files that belong together",
          hint="run that tool again, then this", error=DataError)
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] not in MANIFEST_FORMATS:
            raise ValueError(f"format {manifest['format']}")
        return {name: facts["sha256"] for name, facts in manifest["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} as a manifest", found=f"{type(error).__name__}: {error}",
                        expected="format 1 or 2, as data/README.md has it",
                        hint="write the folder again, or remove this file if those beside it are sound") from None

def check_manifest(path: Path, content: bytes):
    """Raise DataError if the manifest beside a file says that it had another content."""
    expected = read_manifest(path.parent).get(path.name)
    if expected is not None:
        sha256 = hashlib.sha256(content).hexdigest()
        check(sha256 == expected, f"{path}: content", found=f"sha256 {sha256}",
              expected=f"{expected}, says {MANIFEST_FILE} beside it",
              hint="the file is damaged, or a mixture of two data sets: write the data again, or remove "
                   f"{MANIFEST_FILE} if this content is meant", error=DataError)

def load_shard(header: ShardHeader):
    """Return a shard, read or made by its formula, with every token checked. Raises DataError."""
    name = header.name
    if name.startswith(SYNTHETIC_PREFIX):
        tokens = synthetic_tokens(int(name.rpartition("#")[2]), header.num_tokens, *header.vocab_and_bos)
    else:
        tokens = np.fromfile(name, "<u2", header.num_tokens, offset=HEADER_BYTES)
    shard = TokenShard(tokens, header.bos_id)
    largest = tokens.max(initial=0)
    check(len(tokens) == header.num_tokens and largest < header.vocab_size and len(shard.doc_starts),
          f"{name}: content",
          found=f"{len(tokens)} tokens up to {largest}, {len(shard.doc_starts)} of them document starts",
          expected=f"{header.num_tokens} tokens below the vocabulary size {header.vocab_size}, and token "
                   f"{header.bos_id} before every document",
          hint="fetch or write the shard again, and let nobody change it during a run", error=DataError)
    return shard

def verify_shards(headers: list):
    """Check every token of every shard; return the hash of all names and contents, in order. Raises DataError."""
    # The name of a formula says everything.
    digest = hashlib.sha256()
    for header in headers:
        path = Path(header.name)
        digest.update(os.fsencode(path.name))                                 # a name may be any bytes
        if not header.name.startswith(SYNTHETIC_PREFIX):
            content = path.read_bytes()
            digest.update(content)
            check_manifest(path, content)
            load_shard(header)
    return digest.hexdigest()

def resolve_sizes(cfg: Config, train: list[ShardHeader], val: list[ShardHeader]):
    """Return the config with the sizes that shard headers decide. Raises DataError or ConfigError if two disagree."""
    first = train[0]
    for other in train + val:
        check(other.vocab_and_bos == first.vocab_and_bos, "shards of different vocabularies",
              found=f"{other.vocab_and_bos} in {other.name}",
              expected=f"{first.vocab_and_bos} (size, document start) as in {first.name}",
              hint="give one data set only", error=DataError)
    vocab_size, bos_id = first.vocab_and_bos
    check(0 <= bos_id < vocab_size <= 2**16, f"{first.name}: vocabulary",
          found=f"{first.vocab_and_bos} (size, document start)",
          expected="document start < size <= 65536, for tokens are u16", hint="write the shards again", error=DataError)
    for name, stored in (("vocab_size", vocab_size), ("bos_id", bos_id)):
        given = getattr(cfg, name)
        check(given in (getattr(Config, name), stored), f"--{name}", found=given,
              expected=f"{stored}, header of {first.name}", hint="leave the flag out")
    padded = cfg.padded_vocab or -(-vocab_size // 128) * 128
    check(padded >= vocab_size, "--padded_vocab", found=padded, expected=f"at least the vocabulary size {vocab_size}",
          hint="--padded_vocab=0")
    bigram_rows = max(2, cfg.bigram_rows or 5 * padded)                       # one for pairs, one for no pair
    return replace(cfg, vocab_size=vocab_size, bos_id=bos_id, padded_vocab=padded,
                   bigram_rows=bigram_rows)

def usable_val_tokens(shard_tokens: int, block_tokens: int):
    """Count tokens of a shard's whole validation blocks; 2 stay out: the last target, and one more as in the peer."""
    return max(0, shard_tokens - 2) // block_tokens * block_tokens

def check_enough_data(cfg: Config, schedule: Schedule, train: list[ShardHeader], val: list[ShardHeader]):
    """Raise DataError before anything is built if the shards cannot last for the plan, or hold too few whole blocks."""
    # A lower bound: packing drops ends of documents and of shards. With --time_budget nobody knows the steps yet.
    last = min(cfg.max_steps or schedule.planned_steps, schedule.planned_steps)
    counts = np.diff(np.minimum((0, *schedule.stage_ends), last)).tolist()        # steps of each stage
    blocks = [stage.batch_tokens + cfg.seqs_per_step for stage in cfg.stages]     # a slot has one more, its last target
    needed = sum(count * tokens for count, tokens in zip(counts, blocks))
    have = cfg.epochs * sum(header.num_tokens for header in train)
    check(cfg.epochs == 0 or cfg.time_budget or needed <= have, "too few training tokens",
          found=f"{have} in {len(train)} shards of {cfg.train_files!r}", expected=f"{needed} for {sum(counts)} steps",
          hint="--epochs=0 reads them again and again; or more shards (FineWeb: python data/cached_fineweb10B.py N), "
               "or fewer --num_scheduled_steps", error=DataError)
    # A block never crosses a border of shards.
    largest_block = max(tokens for count, tokens in zip(counts, blocks) if count > 0)
    largest_shard = max(header.num_tokens for header in train)
    unit = SEQ_MULTIPLE * cfg.seqs_per_step
    fits = max(0, largest_shard - cfg.seqs_per_step) // unit * unit
    check(largest_block <= largest_shard, "training shards are too small",
          found=f"at most {largest_shard} tokens in one", expected=f"{largest_block} for a step's batch",
          hint=f"more text, or batches in --stages of at most {fits} tokens", error=DataError)
    tokens = sum(usable_val_tokens(header.num_tokens, cfg.val_batch_tokens) for header in val)
    fits = tokens or max(usable_val_tokens(header.num_tokens, unit) for header in val)
    check(tokens >= cfg.val_tokens, "too few validation tokens", found=f"{tokens} in blocks of {cfg.val_files!r}",
          expected=cfg.val_tokens,
          hint=f"more text; as much as this gives is --val_tokens={fits} "
               f"--val_batch_tokens={min(fits, cfg.val_batch_tokens)}, and {unit + 2} tokens in a shard are the fewest",
          error=DataError)

def pack_batch(shard: TokenShard, first_doc: int, seqs_per_step: int, seq_len: int, max_doc_len: int):
    """Deal documents to the slots of a block in stream order (RECIPE 5.2).
    Returns (slots, next document), or None where the shard ends too early. A slot is (starts, ends) of its pieces."""
    # Of documents cut to max_doc_len: tokens before each one, and before the end.
    tokens_before = np.concatenate([[0], np.cumsum(np.minimum(shard.doc_lengths, max_doc_len))])
    # Each slot takes documents until it has slot_tokens + 1 tokens; the last one is cut to fit, and its rest is lost:
    # the next slot begins with a fresh document.
    seqs = []
    doc = first_doc
    for _ in range(seqs_per_step):
        seq_end = tokens_before[doc] + seq_len + 1
        next_doc = int(np.searchsorted(tokens_before, seq_end))                   # the first that starts there or later
        if next_doc == len(tokens_before):
            return None
        starts = shard.doc_starts[doc:next_doc]
        ends = starts + np.diff(tokens_before[doc:next_doc + 1])
        ends[-1] -= tokens_before[next_doc] - seq_end
        seqs.append((starts, ends))
        doc = next_doc
    return seqs, doc

def pack_sequence(shard: TokenShard, starts: np.ndarray, ends: np.ndarray):
    """Return the slot that consists of these pieces of a shard."""
    pieces = [shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                                       # the last token is a target only
    return PackedSeq(np.concatenate(pieces), cu_seqlens.astype(np.int32))

def validation_sequences(shards: Iterable[TokenShard], seqs_per_step: int, seq_len: int, bos_id: int):
    """Yield consecutive slots in whole blocks of seqs_per_step, not aligned to documents, none cut short."""
    for shard in shards:
        for start in range(0, usable_val_tokens(len(shard.tokens), seqs_per_step * seq_len), seq_len):
            tokens = shard.tokens[start:start + seq_len + 1]
            borders = np.flatnonzero(tokens[:-1] == bos_id)
            yield PackedSeq(tokens, np.concatenate([[0], borders, [seq_len]]).astype(np.int32))

def read_token_bytes(folder: Path, cfg: Config):
    """Return the bytes of each token from a folder's vocab.txt, or None without one. Raises DataError."""
    # A line of the file is "base64 id"; the document start has no line and no bytes.
    path = folder / VOCAB_FILE
    if not path.is_file():
        return None
    content = path.read_bytes()
    check_manifest(path, content)
    bytes_of = {}
    with contextlib.suppress(ValueError):                                     # a line that is none: too few are read
        for line in content.splitlines():
            text, token = line.split()
            bytes_of[int(token)] = base64.b64decode(text, validate=True)
    check(bytes_of.keys() == set(range(cfg.vocab_size)) - {cfg.bos_id}, str(path),
          found=f"{len(bytes_of)} tokens before a line that is none, or before the end",
          expected=f"lines 'base64 id' for all of {cfg.vocab_size} tokens but the document start {cfg.bos_id}",
          hint="write the data again, or remove the file: bits per byte are then not printed", error=DataError)
    return [bytes_of.get(token, b"") for token in range(cfg.vocab_size)]


# ====== Section 4: Kernels ============================================================================================
# PyTorch references define each operation on every device. A Triton kernel is next to the reference it must match.
RMS_EPS = 2.0**-23                       # modded-nanogpt's epsilon in bf16, here in every dtype
FP8_MAX = 448.0                          # largest e4m3 value
# Scales of the fp8 head (RECIPE 2.8) are f32 values. Their products are computed in f64 and rounded once.
FP8_Y_SCALE = float(np.float32(100 / FP8_MAX))
FP8_W_SCALE = float(np.float32(1.6 / FP8_MAX))
FP8_GRAD_SCALE = float(np.float32(0.75 / FP8_MAX))
MIN_QUERY_BLOCK = 32                     # queries; the overhead of smaller blocks exceeds the work they save
ADD_ROWS_BLOCK = 16                      # gradients that a program of add_rows_kernel loads per iteration
NUM_SIGN_VECTORS = 8192                  # random +-1 vectors; sign_vectors adds one of only +1
SIGN_SEED = 92                           # arbitrary seed of sign_vectors
CPU_CHUNK_LOGITS = 1 << 19               # logits per chunk on a CPU, so that a chunk and its temporaries fit in cache
LOGIT_CAP, LOGIT_SHIFT, LOGIT_WIDTH = 23.0, 5.0, 7.5      # z = 23 sigmoid((logit + 5) / 7.5)

tl = None                                # triton.language after the first launch, because only GPUs need the package

@functools.cache
def triton_jit(kernel: Callable) -> Any:
    """Compile a kernel with triton.jit, and set the global `tl` of this file, which the kernel's body uses."""
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(kernel)

def compile_fn(fn: Callable, cfg: Config, comm: Communicator) -> Callable:
    """Wrap a function in torch.compile, or return it unchanged if this run compiles nothing."""
    return torch.compile(fn, dynamic=False, fullgraph=True) if comm.compiles(cfg) else fn

def first_order_only(backward: Callable) -> Callable:
    """Decorate a `backward` so that create_graph=True raises RunError.

    Weight gradients are written to buffers that autograd does not see, so second derivatives would be silently wrong.
    """
    # torch's once_differentiable does not help: it stays silent if the incoming gradient does not require grad.
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check(not torch.is_grad_enabled() or torch.compiler.is_compiling(), "backward with create_graph=True",
              found="a request for second derivatives", expected="first derivatives only",
              hint="drop create_graph=True, or use plain PyTorch operations", error=RunError)
        return backward(ctx, *grads)
    return wrapper

def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators and optimizer state for weights of this dtype: f32, or f64 in an f64 run."""
    return torch.promote_types(dtype, torch.float32)

def rms_norm(x: Tensor) -> Tensor:
    """Normalize the last axis without a gain: x / sqrt(mean(x^2) + RMS_EPS)."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMS_EPS)

def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (2i, 2i + 1) in the first half of every head by -angle.

    x (..., E). cos and sin are those of GPT.set_rotary: one value per channel, with sin negated for the second channel
    of a pair.
    """
    # cos and sin have E channels, and the angle is 0 in the second half. Splitting x into halves takes more passes.
    pairs_swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + pairs_swapped * sin


# ---- Attention
ATTENTION_ARGS: dict[str, "AttentionArgs"] = {}           # the newest arguments of each name; kernels look them up

@dataclass(frozen=True)
class AttentionArgs:
    """Window, maximum length and scale of attention. A new instance replaces the one of its name in ATTENTION_ARGS."""
    max_seqlen: int                      # upper bound of the document length, in positions
    window: int                          # maximum number of earlier positions that a query sees
    scale: float                         # softmax scale
    name: str = ""                       # one name per kind of layer, the same in all stages; empty: from the values

    def __post_init__(self) -> None:
        # Compiled code reads only the name. torch.compile guards on every value that it reads, and recompiles when one
        # changes. A CPU tensor as an input of the graph avoids recompilation, too. But Inductor assumes that the
        # outputs of an operation with such an input are unaligned, and loads and stores them 2 bytes at a time.
        name = self.name or f"{self.max_seqlen} {self.window} {self.scale}"
        object.__setattr__(self, "name", name)
        ATTENTION_ARGS[name] = self

def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: AttentionArgs) -> Tensor:
    """Compute causal softmax attention within documents and a window, in O(N * window).

    q, k, v (N, H, E) -> (N, H, E). cu_seqlens (num_docs + 1,) i32 ascends from 0 to N; documents may be empty.
    """
    # Blocks of queries are at least as long as the lookback. A query therefore sees only keys of the same block and of
    # the previous one. Zeros precede block 0 and fill up the last block.
    N, H, E = q.shape
    lookback = min(attn_args.window, attn_args.max_seqlen - 1)
    block_len = min(N, max(lookback, MIN_QUERY_BLOCK))
    num_blocks = -(-N // block_len)
    padding = num_blocks * block_len - N
    queries = F.pad(q, (0, 0, 0, 0, 0, padding)).view(num_blocks, block_len, H, E)
    padded_kv = [F.pad(x, (0, 0, 0, 0, block_len, padding)).view(num_blocks + 1, block_len, H, E) for x in (k, v)]
    keys, values = (torch.cat((x[:-1], x[1:]), dim=1) for x in padded_kv)     # (num_blocks, 2 * block_len, H, E)

    # Key positions before block 0 are negative. They index the document of some other position, and are masked.
    positions = torch.arange(num_blocks * block_len, device=q.device)
    doc_ids = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    query_pos = positions.view(num_blocks, block_len, 1)
    key_pos = query_pos[:, :1] + torch.arange(-block_len, block_len, device=q.device)  # (num_blocks, 1, 2 * block_len)
    in_window = (key_pos >= 0) & (key_pos <= query_pos) & (key_pos >= query_pos - attn_args.window)
    visible = in_window & (doc_ids[key_pos] == doc_ids[query_pos])
    heads_first = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible[:, None], scale=attn_args.scale)
    return out.transpose(1, 2).reshape(num_blocks * block_len, H, E)[:N]

def torch_varlen_ops() -> Any:
    """Return the namespace of torch's varlen attention ops. The import that registers them takes 1 s the first time."""
    importlib.import_module("torch.nn.attention.varlen")
    return torch.ops.torch_attn

def varlen_kwargs(cu_seqlens: Tensor, name: str) -> dict[str, Any]:
    """Build the arguments that torch's forward and backward op share, from the AttentionArgs of this name."""
    attn_args = ATTENTION_ARGS[name]
    # A window with 0 positions to the right makes attention causal.
    return dict(cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=attn_args.max_seqlen, max_k=attn_args.max_seqlen,
                is_causal=False, scale=attn_args.scale, window_size=[attn_args.window, 0])

@torch.library.custom_op("train_gpt::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, args_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention; return the output, and for backward the log-sum-exp and the state of the random generator."""
    return torch_varlen_ops()._varlen_attn(q, k, v, **varlen_kwargs(cu_seqlens, args_name))

@varlen.register_fake
def _(*inputs: Tensor | str) -> tuple[Tensor, Tensor, Tensor]:
    # The shapes of the outputs do not depend on max_q and max_k.
    *qkv, cu_seqlens, _ = inputs
    return torch_varlen_ops()._varlen_attn(*qkv, cu_seqlens, cu_seqlens, max_q=1, max_k=1)

@torch.library.custom_op("train_gpt::varlen_backward", mutates_args=())
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor,
                    logsumexp: Tensor, rng_state: Tensor, args_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    return torch_varlen_ops()._varlen_attn_backward(grad, q, k, v, out, logsumexp, rng_state=rng_state,
                                                 **varlen_kwargs(cu_seqlens, args_name))

@varlen_backward.register_fake
def _(_: Tensor, *inputs: Tensor | str) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs[:3]))                           # like q, k and v

class Varlen(torch.autograd.Function):
    """torch's varlen attention, with AttentionArgs passed by name: new values do not recompile the graph.

    Inputs: q, k, v (N, H, E), cu_seqlens (num_docs + 1,) i32, and the name of the AttentionArgs. -> (N, H, E)
    """
    # torch's public `varlen_attn` makes window, length and scale constants of a graph, so each stage would recompile.
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | str) -> Tensor:
        *tensors, ctx.args_name = inputs
        out, *for_backward = varlen(*inputs)
        ctx.save_for_backward(*tensors, out, *for_backward)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *varlen_backward(grad, *ctx.saved_tensors, ctx.args_name), None, None

def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: AttentionArgs) -> Tensor:
    """Compute attention_reference with torch's varlen kernel (FA2, FA3 or FA4). Needs CUDA, and bf16 or f16."""
    return Varlen.apply(q, k, v, cu_seqlens, attn_args.name)


# ---- Weight gradients. Backward accumulates them in main_grad as soon as it computes them, and autograd receives None.
# Megatron sets this attribute on weights whose hooks need a gradient. Backward then returns zeros, and sets it to True.
GRAD_ADDED_FLAG = "grad_added_to_main_grad"

def op_in_graphs(*mutates_args: str) -> Callable:
    """Make a function that mutates these arguments a custom op in compiled graphs.

    Eager code calls the function directly, which takes 8 us. Dispatching the custom op takes 26 us (measured).
    """
    def decorator(fn: Callable) -> Callable:
        op = torch.library.custom_op(f"train_gpt::{fn.__name__}", fn, mutates_args=mutates_args)

        @functools.wraps(fn)
        def wrapper(*args: Any) -> None:
            return op(*args) if torch.compiler.is_compiling() else fn(*args)
        return wrapper
    return decorator

def tensor_versions(*tensors: Tensor | None) -> list[int]:
    """Return the version counters of the tensors that are not None. Every in-place operation increments a counter."""
    return [x._version for x in tensors if x is not None]

@op_in_graphs("main_grad", "write_counts")
def add_to_main_grad(main_grad: Tensor, write_counts: Tensor, count_idx: int, a: Tensor, b: Tensor | None) -> None:
    """Accumulate a^T b into main_grad, or a if b is None; the first write after `zero_grad` overwrites it.

    main_grad (I, J): buffer of one matrix, in f32, f64 or the dtype of a and b. a (N, I) and b (N, J); without b, a is
    the gradient itself, (I, J). write_counts (num_matrices,) i64 on the CPU: writes per matrix since `zero_grad`, which
    sets them to 0. This increments write_counts[count_idx].
    """
    # The op reads the count on the CPU, so one compiled graph serves first and later writes. With beta 0, addmm does
    # not read the old content, which may be NaN.
    beta = min(int(write_counts[count_idx]), 1)
    write_counts[count_idx] += 1
    dtype = main_grad.dtype
    if b is None and beta == 0:
        main_grad.copy_(a)
    elif b is None:
        main_grad.add_(a)
    elif a.is_cuda and a.dtype != dtype:
        # The matmul accumulates in f32, without converted copies of a and b.
        torch.addmm(main_grad, a.t(), b, out_dtype=dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(a.t().to(dtype), b.to(dtype), beta=beta)

DeferredGrads = list[tuple["WeightMatrix", Tensor, Tensor | None, list[int]]]     # matrix, a, b, versions of a and b

class WeightMatrix(NamedTuple):
    """One matrix of a parameter, and the main_grad buffer its gradient accumulates in.

    To give a parameter (I, J) a main_grad, set two attributes: main_grad = zeros (I, J), in f32, f64 or the parameter's
    dtype, and write_counts = zeros (1,) i64 on the CPU. Backward of linear_main_grad(x, as_matrix(param)) then
    accumulates there, and param.grad stays None. write_counts.zero_() discards the gradient, because the next write
    overwrites main_grad. Without these attributes, autograd stores the gradient in param.grad as usual.
    """
    param: Tensor
    matrix: Tensor                       # (I, J): the whole parameter, or a view of one matrix of it
    main_grad: Tensor | None = None      # (I, J): the same view of the buffer; None: autograd stores the gradient
    count_idx: int = 0                   # index of this matrix in param.write_counts
    deferred: DeferredGrads | None = None  # queue of gradients for `run_deferred`; the trainer does not use it

    def add_gradient(self, a: Tensor, b: Tensor | None) -> Tensor | None:
        """Accumulate the gradient a^T b, or a if b is None. Returns what backward must return to autograd.

            param is frozen        no write                            returns None
            deferred is a queue    append to it, for run_deferred      returns None (*)
            main_grad is None      compute the gradient                returns the gradient
            otherwise              add_to_main_grad                    returns None (*)

        (*) If there is a main_grad and param has the attribute grad_added_to_main_grad, this sets the attribute to True
        and returns zeros (I, J), so that param's hooks receive a gradient. torch.compile rejects queues, and
        params with this attribute.
        """
        if not self.param.requires_grad:
            return None
        if self.deferred is not None:
            self.deferred.append((self, a, b, tensor_versions(a, b)))
        elif self.main_grad is None:
            return a if b is None else a.t() @ b
        else:
            add_to_main_grad(self.main_grad, self.param.write_counts, self.count_idx, a, b)
        # Never return main_grad or a view of it: autograd may store the tensor as .grad and later add to it in-place.
        # Zeros are allocated for every call for the same reason.
        if self.main_grad is None or not hasattr(self.param, GRAD_ADDED_FLAG):
            return None
        setattr(self.param, GRAD_ADDED_FLAG, True)
        return torch.zeros_like(self.matrix)

def as_matrix(param: Tensor, deferred: DeferredGrads | None = None) -> WeightMatrix:
    """Wrap a parameter (I, J) that is a single matrix."""
    return WeightMatrix(param, param, getattr(param, "main_grad", None), deferred=deferred)

def matrices_by_layer(bank: Tensor, matrix_heights: tuple[int, ...]) -> list[list[WeightMatrix]]:
    """Split a bank (L, ..., J), which stacks matrices of these heights in each layer, into the matrices of each layer.

    Raises RuntimeError if the bank has a main_grad that is not contiguous, because it cannot be viewed as matrices.
    """
    # Unbind once for all layers. Without main_grad, autograd then builds one gradient of the bank, not one per layer.
    shape = (len(bank), sum(matrix_heights), bank.shape[-1])
    layers = bank.view(shape).unbind()
    by_layer = []
    for i, layer in enumerate(layers):
        grads = [None] * len(matrix_heights)
        if hasattr(bank, "main_grad"):
            grads = bank.main_grad.view(shape)[i].split(matrix_heights)
        first_count_idx = i * len(matrix_heights)
        by_layer.append([WeightMatrix(bank, matrix, grad, first_count_idx + j)
                         for j, (matrix, grad) in enumerate(zip(layer.split(matrix_heights), grads))])
    return by_layer

@torch.no_grad()
def run_deferred(deferred: DeferredGrads) -> None:
    """Compute deferred gradients, accumulate them in main_grad, or in .grad without one, and clear the queue.

    Raises RunError if a tensor in the queue was modified in-place since backward. No gradient is written in that case.
    """
    for weight, a, b, versions in deferred:
        check(versions == tensor_versions(a, b),
              f"run_deferred: deferred gradient of a weight matrix {tuple(weight.matrix.shape)}",
              found="an input or output gradient of its matmul was modified in-place after backward",
              expected="tensors that are unchanged since backward",
              hint="call run_deferred before the in-place operation, or modify a copy", error=RunError)
    for weight, a, b, _ in deferred:
        grad = weight._replace(deferred=None).add_gradient(a, b)
        if weight.main_grad is None:
            weight.matrix.grad = grad if weight.matrix.grad is None else weight.matrix.grad + grad
    deferred.clear()

class LinearFunction(torch.autograd.Function):
    """Matmul with a scaled weight matrix: x @ (scale * matrix)^T, with gradients of x, scale and matrix.

    x (..., J), scale () or None, matrix (I, J) -> (..., I). grad_target accumulates the gradient of the matrix.
    """
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, matrix: Tensor, grad_target: WeightMatrix) -> Tensor:
        ctx.save_for_backward(x, scale, matrix)
        ctx.grad_target = grad_target
        return F.linear(x, matrix if scale is None else scale * matrix)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, matrix = ctx.saved_tensors
        weight = matrix if scale is None else scale * matrix
        grad_x = grad @ weight
        a, b = grad.flatten(0, -2), x.flatten(0, -2)
        grad_scale = None
        if scale is not None:
            # Rounding this gradient to bf16 loses precision that an f32 main_grad can store.
            main_grad = ctx.grad_target.main_grad
            dtype = a.dtype if main_grad is None else torch.promote_types(a.dtype, main_grad.dtype)
            if a.is_cuda and a.dtype != dtype:
                grad_weight = torch.mm(a.t(), b, out_dtype=dtype)
            else:
                grad_weight = a.t().to(dtype) @ b.to(dtype)
            grad_scale = (grad_weight * matrix).sum()
            a, b = scale * grad_weight, None
        return grad_x, grad_scale, ctx.grad_target.add_gradient(a, b), None

def linear_main_grad(x: Tensor, weight: WeightMatrix, scale: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix that accumulates its gradient: x @ (scale * matrix)^T, (..., J) -> (..., I)."""
    return LinearFunction.apply(x, scale, weight.matrix, weight)


# ---- relu^2 MLP. Forward saves only max(pre, 0)^2. Backward recovers max(pre, 0) as its square root.
# By compute capability: a tile whose accumulators fit in registers, and num_stages of (forward, backward), as many as
# fit in shared memory. Backward also needs shared memory for squares.
LARGE_TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8), (4, 3)
RELU_SQ_TILES = {(8, 0): (dict(LARGE_TILE[0], BLOCK_N=128), (3, 3)), (9, 0): LARGE_TILE, (10, 0): LARGE_TILE}
TMA_ALIGN_BYTES = 16                     # tensor descriptors need strides that are multiples of this

def relu_sq_kernel(x, w, squares, out, M, N, K, BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> None:
    """Compute out = max(x w^T, 0)^2, or with BACKWARD out = 2 (x w^T) sqrt(squares).

    x (M, K), w (N, K), squares and out (M, N). With BACKWARD, x is the gradient of the MLP's output, and squares is
    what forward returned.
    """
    # Each program computes several tiles, and loads the operands of the next tile while it stores the current one.
    # It stores a tile in two halves, which leaves more shared memory for the loads. Tensor descriptors have 64-bit
    # addresses, and read 0 out of bounds.
    HALF_N: tl.constexpr = BLOCK_N // 2
    x_desc = tl.make_tensor_descriptor(x, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    w_desc = tl.make_tensor_descriptor(w, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    squares_desc = tl.make_tensor_descriptor(squares, [M, N], [N, 1], [BLOCK_M, HALF_N])
    out_desc = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, HALF_N])
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.cdiv(M, BLOCK_M) * num_tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        start_m = tile // num_tiles_n * BLOCK_M
        start_n = tile % num_tiles_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start_k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([start_m, start_k]), w_desc.load([start_n, start_k]).T, acc)
        halves = tl.split(acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1))
        for half in tl.static_range(2):
            half_start_n = start_n + half * HALF_N
            if BACKWARD:
                result = 2 * halves[half] * tl.sqrt(squares_desc.load([start_m, half_start_n]).to(tl.float32))
            else:
                positive = tl.maximum(halves[half], 0)
                result = positive * positive
            out_desc.store([start_m, half_start_n], result.to(out_desc.dtype))

@torch.library.custom_op("train_gpt::relu_sq", mutates_args=())
def relu_sq(x: Tensor, w: Tensor, squares: Tensor | None) -> Tensor:
    """Launch relu_sq_kernel: forward, or with `squares` its backward. x (M, K), w (N, K), squares (M, N) -> (M, N)."""
    triton = importlib.import_module("triton")
    device = x.device
    props = torch.cuda.get_device_properties(device)
    tile, num_stages = RELU_SQ_TILES[props.major, props.minor]
    M, K = x.shape
    N = len(w)
    out = x.new_empty(M, N)
    backward = squares is not None
    squares_or_out = squares.contiguous() if backward else out                # forward does not read it

    # The allocator captures the device, not x: Triton stores the allocator, which would keep x alive. Set it on every
    # launch, because there is one per thread and autograd runs backward on another thread.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    num_tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    triton_jit(relu_sq_kernel)[(min(num_tiles, props.multi_processor_count),)](
        x.contiguous(), w.contiguous(), squares_or_out, out, M, N, K, BACKWARD=backward,
        num_stages=num_stages[backward], **tile)
    return out

@relu_sq.register_fake
def _(x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w))

def fits_relu_sq(x: Tensor, w: Tensor) -> bool:
    """Return whether relu_sq supports the device, dtype and shapes of x (M, K) and w (N, K)."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    # torch.compile treats the device properties as constants.
    aligned = all(size * x.element_size() % TMA_ALIGN_BYTES == 0 for size in (x.shape[1], len(w)))
    props = torch.cuda.get_device_properties(x.device)
    return aligned and (props.major, props.minor) in RELU_SQ_TILES

class ReluSqMLP(torch.autograd.Function):
    """relu^2 MLP: max(x up^T, 0)^2 down.

    x (..., D), up_matrix and down_matrix (F, D) -> (..., D). up and down are the WeightMatrix of each, and accumulate
    their gradients.
    """
    @staticmethod
    def forward(ctx: Any, x: Tensor, up_matrix: Tensor, down_matrix: Tensor, up: WeightMatrix,
                down: WeightMatrix) -> Tensor:
        flat_x = x.flatten(0, -2)
        if fits_relu_sq(flat_x, up_matrix):
            squares = relu_sq(flat_x, up_matrix, None)
        else:
            squares = F.linear(flat_x, up_matrix).relu_().square_()
        ctx.save_for_backward(x, squares, up_matrix, down_matrix)
        ctx.grad_targets = up, down
        return (squares @ down_matrix).view_as(x)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, squares, up_matrix, down_matrix = ctx.saved_tensors
        grad_y = grad.flatten(0, -2)
        if fits_relu_sq(grad_y, down_matrix):
            grad_pre = relu_sq(grad_y, down_matrix, squares)
        else:
            # In MKL, the square root of 0 takes 8 times as long as that of the smallest normal number. So clamp to
            # that number, and subtract its square root afterwards.
            tiny = torch.finfo(squares.dtype).tiny
            square_roots = squares.clamp_min(tiny).sqrt_().sub_(tiny**0.5)
            grad_pre = F.linear(2 * grad_y, down_matrix).mul_(square_roots)

        up, down = ctx.grad_targets
        grad_x = (grad_pre @ up_matrix).view_as(x)
        grad_up = up.add_gradient(grad_pre, x.flatten(0, -2))
        return grad_x, grad_up, down.add_gradient(squares, grad_y), None, None

def relu_sq_mlp(x: Tensor, up: WeightMatrix, down: WeightMatrix) -> Tensor:
    """Compute the relu^2 MLP, max(x up^T, 0)^2 down (RECIPE 2.7). x (..., D), up and down (F, D) -> (..., D)."""
    return ReluSqMLP.apply(x, up.matrix, down.matrix, up, down)


# ---- Head and loss
def softcap(logits: Tensor) -> Tensor:
    """Squash logits of any shape and float dtype into (0, LOGIT_CAP)."""
    return LOGIT_CAP * (logits + LOGIT_SHIFT).mul_(1 / LOGIT_WIDTH).sigmoid_()

def logit_chunks(logits: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split logits (N, V) and other tensors (N, ...) into chunks of positions that fit in the cache of a CPU.

    On a GPU and in a compiled graph there is one chunk. Inductor fuses the passes over the logits.
    """
    chunk_len = len(logits)
    if not logits.is_cuda and not torch.compiler.is_compiling():
        chunk_len = max(1, CPU_CHUNK_LOGITS // logits.shape[1])
    return zip(*(x.split(chunk_len) for x in (logits, *others)))

def next_token_losses(y: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of the next token, -log softmax(softcap(y @ w))[target], without fp8.

    y (N, D), w (D, V), targets (N,) -> losses (N,), f32 or f64.
    """
    losses = []
    for logits, ids in logit_chunks(y @ w, targets[:, None]):
        z = softcap(logits.to(accum_dtype(y.dtype)))
        # exp(z - LOGIT_CAP) cannot overflow, because z < LOGIT_CAP. This saves the pass that computes the maximum.
        lse = (z - LOGIT_CAP).exp().sum(dim=-1).log() + LOGIT_CAP
        losses.append(lse - z.gather(1, ids)[:, 0])
    return torch.cat(losses)

def mtp_targets(targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next G tokens of every position and their loss weights, which are 0 past the end of the sequence.

    targets (B, T), MTP weights (G,) -> ids (N, G) i64, token_weights (N, G).
    """
    B, T = targets.shape
    position = torch.arange(T, device=targets.device)
    ahead = position[:, None] + torch.arange(len(weights), device=targets.device)         # (T, G)
    in_sequence = ahead < T
    ids = targets[:, torch.where(in_sequence, ahead, 0)]                                  # (B, T, G)
    token_weights = (in_sequence * weights).expand(B, -1, -1)
    return ids.flatten(0, 1), token_weights.flatten(0, 1)

def mtp_losses_and_grad(logits: Tensor, ids: Tensor, token_weights: Tensor, grad: Tensor, grad_scale: float) -> Tensor:
    """Compute the multi-token loss of every position, and write the gradient of the logits into `grad`.

        z       = softcap(logits)
        loss[n] = sum over k of token_weights[n, k] * (logsumexp(z[n]) - z[n, ids[n, k]])
        grad    = grad_scale * LOGIT_WIDTH * dloss/dlogits

    logits (N, V), ids and token_weights (N, G) -> losses (N,). grad (N, V) may be `logits` itself.
    """
    if torch.compiler.is_compiling():
        # Inductor fuses this into two passes over (N, V), and materializes no f32 (N, V) tensor as softmax() would.
        # Exponents and logarithms are to base 2, because exp2 and log2 take fewer instructions.
        cap_log2 = LOGIT_CAP * math.log2(math.e)          # sig * cap_log2 = z / ln 2
        sig = torch.sigmoid((logits.to(token_weights.dtype) + LOGIT_SHIFT) * (1 / LOGIT_WIDTH))
        lse = ((sig - 1) * cap_log2).exp2().sum(dim=-1, keepdim=True).log2() + cap_log2   # no overflow: sig <= 1
        scaled = grad_scale * LOGIT_CAP * token_weights
        grad_z = (sig * cap_log2 - lse).exp2() * scaled.sum(dim=1, keepdim=True)
        # This loop fuses. An int32 comparison takes half the instructions of an int64 comparison.
        column = torch.arange(grad.shape[1], dtype=torch.int32, device=grad.device)
        for target, weight in zip(ids.split(1, dim=1), scaled.split(1, dim=1)):
            grad_z = grad_z - weight * (column == target.int())
        torch.mul(grad_z, sig - sig * sig, out=grad)      # LOGIT_WIDTH * dz/dlogit = LOGIT_CAP * (sig - sig^2)
        return math.log(2) * (token_weights * (lse - cap_log2 * sig.gather(1, ids))).sum(dim=1)

    losses = []
    for chunk, chunk_ids, chunk_weights, chunk_grad in logit_chunks(logits, ids, token_weights, grad):
        z = softcap(chunk.to(token_weights.dtype))
        p = z.softmax(dim=-1)
        nll = -p.gather(1, chunk_ids).log()               # finite: z < 23, so p > 1e-10 / V
        losses.append((chunk_weights * nll).sum(dim=1))
        scaled = grad_scale * chunk_weights               # scale the (N, G) weights, to save a pass over (N, V)
        grad_z = p.mul_(scaled.sum(dim=1, keepdim=True))
        # Scatter one target at a time, because a position may have the same id twice.
        for target, weight in zip(chunk_ids.split(1, dim=1), scaled.split(1, dim=1)):
            grad_z.scatter_add_(1, target, -weight)
        dz = torch.addcmul(z, z, z, value=-1 / LOGIT_CAP)  # LOGIT_WIDTH * dz/dlogit = z - z^2 / LOGIT_CAP
        torch.mul(grad_z, dz, out=chunk_grad)
    return torch.cat(losses)

def quantize_e4m3(x: Tensor, scale: float) -> Tensor:
    """Quantize x / scale to fp8 e4m3. Divides in f32, rounds once, and saturates on every torch version and device."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

def fp8_matmul(a: Tensor, b: Tensor, scale: Tensor, *, use_scaled_mm: bool, out_dtype: torch.dtype,
               fast_accum: bool = False) -> Tensor:
    """Compute scale * (a @ b) for fp8 matrices; scale () f64.

    use_scaled_mm: use the device's fp8 matmul, with a shorter accumulator if fast_accum. Otherwise emulate the matmul
    in out_dtype, which represents every fp8 value exactly.
    """
    if not use_scaled_mm:
        return a.to(out_dtype) @ b.to(out_dtype) * scale.to(out_dtype)
    b = b.t().contiguous().t()                            # scaled_mm needs a column-major b
    per_tensor = F.ScalingType.TensorWise
    return F.scaled_mm(a, b, scale.float(), per_tensor, torch.ones((), device=a.device), per_tensor,
                       output_dtype=out_dtype, use_fast_accum=fast_accum)

class HeadLoss(torch.autograd.Function):
    """Fused head and loss: softcapped cross-entropy of the next G tokens (RECIPE 2.8).

    For position t of a sequence, with z = softcap(y @ w) = 23 sigmoid((y @ w + 5) / 7.5):

        loss[t] = sum over k < G with t + k < T of weights[k] * (logsumexp(z[t]) - z[t, targets[t + k]])

    Targets may cross document boundaries, but not the end of the sequence. The softmax is over all V padded columns.

    y (N, D), w (D, V), targets (B, T) i64 with N = B * T, MTP weights (G,) -> losses (N,), f32 or f64.
    loss_scale ()   gradient that backward will receive for every loss. In fp8 it changes the scale of the stored
                    gradient, loss_scale * 0.75 / 448, but never the stored values.
    precision       "plain", or "fp8" / "emulated": y and w in e4m3, the gradient of the logits in e5m2
    logits_dtype    dtype of the logits, if precision is not "plain"
    grad_target     WeightMatrix of w, which accumulates its gradient
    """
    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor, targets: Tensor, weights: Tensor, loss_scale: Tensor, precision: str,
                logits_dtype: torch.dtype, grad_target: WeightMatrix) -> Tensor:
        ctx.grad_target = grad_target
        ctx.precision = precision
        accum = accum_dtype(y.dtype)
        # Compute the gradient of the logits now, so that the logits need not be saved for backward. The gradient
        # overwrites the logits, or in fp8 takes half their memory.
        if precision == "plain":
            logits = grad = y @ w
            grad_scale = 1.0                              # backward divides by LOGIT_WIDTH
        else:
            use_scaled_mm = precision == "fp8"
            matmul_dtype = logits_dtype if use_scaled_mm else accum
            scale = torch.full((), FP8_Y_SCALE * FP8_W_SCALE, dtype=torch.float64, device=y.device)
            y = quantize_e4m3(y, FP8_Y_SCALE)
            w = quantize_e4m3(w, FP8_W_SCALE)
            logits = fp8_matmul(y, w, scale, use_scaled_mm=use_scaled_mm, out_dtype=matmul_dtype, fast_accum=True)
            logits = logits.to(logits_dtype)
            grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
            grad_scale = 1 / (LOGIT_WIDTH * FP8_GRAD_SCALE)

        ids, token_weights = mtp_targets(targets, weights.to(accum))
        losses = mtp_losses_and_grad(logits, ids, token_weights, grad, grad_scale)
        ctx.save_for_backward(y, w, grad, loss_scale)
        return losses

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        y, w, grad, loss_scale = ctx.saved_tensors
        if ctx.precision == "plain":
            factor = (grad_losses / LOGIT_WIDTH).to(y.dtype)[:, None]         # (N, 1)
            grad_y = factor * (grad @ w.t())
            grad_w = ctx.grad_target.add_gradient(factor * y, grad)
            return grad_y, grad_w, *[None] * 6

        # In the trainer grad_losses equals loss_scale, so `factor` is 1. If a caller weights positions differently,
        # grad_y is still exact, while grad_w uses the weighted gradient rounded to e5m2. loss_scale = 0 gives zeros
        # instead of NaN.
        factor = torch.where(loss_scale == 0, 0, grad_losses / loss_scale)[:, None]
        scale = loss_scale.double() * FP8_GRAD_SCALE
        use_scaled_mm = ctx.precision == "fp8"
        dtype_y = torch.bfloat16 if use_scaled_mm else factor.dtype
        grad_y = factor.to(dtype_y) * fp8_matmul(grad, w.t(), scale * FP8_W_SCALE, use_scaled_mm=use_scaled_mm,
                                                 out_dtype=dtype_y)
        # The weighting fuses with the copy to column-major order. scaled_mm cannot accumulate into main_grad.
        weighted_grad = (factor * grad.to(factor.dtype)).to(grad.dtype)
        grad_w = fp8_matmul(y.t().contiguous(), weighted_grad, scale * FP8_Y_SCALE, use_scaled_mm=use_scaled_mm,
                            out_dtype=factor.dtype)
        grad_w = ctx.grad_target.add_gradient(grad_w, b=None)
        return grad_y, grad_w, *[None] * 6


# ---- Rows of tables
def sign_vectors(model_dim: int) -> Tensor:
    """Draw the NUM_SIGN_VECTORS random vectors of +1 and -1, and append one of only +1.

    -> (NUM_SIGN_VECTORS + 1, model_dim) i64. The seed is constant, so all tables share these vectors.
    """
    drawn = torch.randint(2, (NUM_SIGN_VECTORS, model_dim), generator=torch.Generator().manual_seed(SIGN_SEED))
    return torch.cat((2 * drawn - 1, torch.ones(1, model_dim, dtype=drawn.dtype)))

def add_rows_kernel(row_grads, rows, order, grad, num_lookups, D, BLOCK_ROWS: tl.constexpr,
                    BLOCK_D: tl.constexpr) -> None:
    """Accumulate row_grads[rows[i]] += grad[order[i]] for every i < num_lookups.

    row_grads (num_rows, D), rows and order (num_lookups,), grad (num_lookups, D). rows ascends, so that the lookups of
    a row are adjacent.
    """
    # There is one program per lookup. The program of a row's first lookup adds the gradients of all lookups of the row,
    # BLOCK_ROWS per iteration. The other programs exit at once. The row of a frequent token has thousands of lookups.
    # Each iteration loads rows and order for the next one, so that an iteration waits for one load, not for three in
    # sequence.
    # The order of summation is fixed: the iterations add to the old value sequentially, and the sum within an iteration
    # is a tree that depends on BLOCK_ROWS and the number of warps.
    first = tl.program_id(0)
    row = tl.load(rows + first)
    previous_row = tl.load(rows + first - 1, mask=first > 0, other=-1)        # -1 if there is none
    if row != previous_row:
        columns = tl.arange(0, BLOCK_D)
        in_row = columns < D
        target = row_grads + row.to(tl.int64) * D + columns                   # tables may have over 2^31 elements
        acc = tl.load(target, mask=in_row, other=0)
        lookups = first + tl.arange(0, BLOCK_ROWS)
        is_same_row = tl.load(rows + lookups, mask=lookups < num_lookups, other=-1) == row
        grad_idx = tl.load(order + lookups, mask=lookups < num_lookups, other=0)
        has_more = 1
        while has_more == 1:
            lookups = lookups + BLOCK_ROWS
            next_is_same_row = tl.load(rows + lookups, mask=lookups < num_lookups, other=-1) == row
            next_grad_idx = tl.load(order + lookups, mask=lookups < num_lookups, other=0)
            mask = is_same_row[:, None] & in_row[None, :]
            grads = tl.load(grad + (grad_idx * D)[:, None] + columns[None, :], mask=mask, other=0)
            acc += tl.sum(grads.to(acc.dtype), axis=0)
            has_more = tl.max(next_is_same_row.to(tl.int32), axis=0)
            is_same_row = next_is_same_row
            grad_idx = next_grad_idx
        tl.store(target, acc, mask=in_row)

@op_in_graphs("row_grads")
def add_rows(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """Accumulate row_grads[index[i]] += grad[i] in a fixed order.

    row_grads (num_rows, D) f32 or f64, index (...), grad (..., D).
    """
    index = index.flatten()
    grad = grad.flatten(0, -2)
    if not grad.is_cuda:
        row_grads.index_add_(0, index.long(), grad.to(row_grads.dtype))
        return
    # The sort makes the lookups of a row adjacent. It is stable, so that they are added in their original order.
    rows, order = index.sort(stable=True)
    num_lookups, D = grad.shape
    launch = triton_jit(add_rows_kernel)[(num_lookups,)]
    sizes = dict(BLOCK_ROWS=ADD_ROWS_BLOCK, BLOCK_D=1 << (D - 1).bit_length())            # BLOCK_D: a power of 2
    launch(row_grads, rows, order, grad.contiguous(), num_lookups, D, **sizes)

class RowLookup(torch.autograd.Function):
    """Lookup of rows, source[index], whose gradients accumulate in row_grads.

    source (num_rows, D), index (...) -> (..., D). Autograd receives None, so that no dense gradient is allocated.
    """
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, row_grads: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.row_grads = row_grads
        return F.embedding(index, source)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        add_rows(ctx.row_grads, index, grad)
        return None, None, None


# ====== Section 5: Rows ===============================================================================================
# A step looks up a small fraction of the rows of an embedding table. Global row r is local row r // W of rank r % W,
# its owner, which stores and updates it. With W = 1 a dense table is read in place. Otherwise a row plan lists the rows
# that a rank fetches from their owners before a cycle of steps. Their gradients return to the owners after the cycle.
BIGRAM_FACTORS = (36313, 27191)          # of the current and the previous token (RECIPE 2.5)
ROW_ID_BYTES = 4                         # of one local row in a request

def ngram_hash(tokens: np.ndarray, factors: tuple[int, ...], modulus: int, no_ngram: int) -> np.ndarray:
    """Hash the n-gram that ends at each position, (..., T) i32 -> (..., T) i32 below `modulus`.

    The first n - 1 positions of a sequence get `no_ngram`. N-grams cross documents, as modded-nanogpt's bigrams do.
    """
    # Combine token * factor by xor, newest token first, in 32-bit arithmetic that wraps around.
    mixed = tokens * factors[0]
    for distance, factor in enumerate(factors[1:], 1):
        mixed[..., distance:] ^= tokens[..., :-distance] * factor
    hashed = mixed - mixed // modulus * modulus           # same as mixed % modulus, which NumPy does not vectorize
    hashed[..., :len(factors) - 1] = no_ngram
    return hashed

def bigram_hash(tokens: np.ndarray, num_rows: int) -> np.ndarray:
    """Hash each (previous, current) pair of tokens to a row, (..., T) i32 -> (..., T) i32 below `num_rows`.

    row = (36313 * current xor 27191 * previous) mod (num_rows - 1). The last row means that there is no pair.
    """
    # modded-nanogpt overwrites the token at position 0 before it hashes, so position 1 sees the last row's id as its
    # previous token. Its published losses include this.
    no_pair = num_rows - 1
    overwritten = tokens.copy()
    overwritten[..., 0] = no_pair
    return ngram_hash(overwritten, BIGRAM_FACTORS, no_pair, no_ngram=no_pair)

class TableSpec(NamedTuple):
    """How tokens are looked up in one embedding table, and how the table is updated."""
    label: str
    num_rows: int                        # R
    lookups_per_token: int
    row_ids: Callable                    # tokens (B, T) i32 -> global rows (B, T), or (B, lookups_per_token, T), i32
    tied_to_head: bool = False           # shares its weights with the head until the two are untied
    rowwise: bool = False                # update only the rows that were looked up, instead of every row
    location: str = "device"             # where the owner stores the rows of a row-wise table: "device" or "host"
    update_every: int = 2                # steps per update
    sign_ids: Callable | None = None     # tokens (B, T) i32 -> sign vectors (B, T) i32

    def shard_rows(self, world_size: int) -> int:
        """Return the rows of each rank's shard, C. The last ones may be padding."""
        return -(-self.num_rows // world_size)

def table_specs(cfg: Config) -> tuple[TableSpec, ...]:
    """List the embedding tables: modded-nanogpt's three, then the n-gram tables of --tables."""
    V = cfg.padded_vocab
    first_rows = V * np.arange(NUM_VALUE_EMBEDS, dtype=np.int32)[:, None]

    def value_rows(tokens: np.ndarray) -> np.ndarray:
        """Return one row per token and value embedding; value_embed stacks the value embeddings."""
        return tokens[:, None] + first_rows

    every = cfg.adam_every
    bigram_rows = functools.partial(bigram_hash, num_rows=cfg.bigram_rows)
    specs = [
        TableSpec("bigram_embed", cfg.bigram_rows, 1, bigram_rows, update_every=every),
        TableSpec("value_embed", NUM_VALUE_EMBEDS * V, NUM_VALUE_EMBEDS, value_rows, update_every=every),
        TableSpec("embed", V, 1, np.asarray, tied_to_head=True, update_every=every)]       # row = token id
    for ngram in cfg.tables:
        factors, sign_factors = NGRAM_FACTORS[ngram.order]
        row_ids = functools.partial(ngram_hash, factors=factors, modulus=ngram.rows - 1, no_ngram=ngram.rows - 1)
        sign_ids = None
        if ngram.signs:
            sign_ids = functools.partial(ngram_hash, factors=sign_factors, modulus=NUM_SIGN_VECTORS,
                                         no_ngram=NUM_SIGN_VECTORS)
        specs.append(TableSpec(ngram.label, ngram.rows, 1, row_ids, rowwise=True, location=ngram.location,
                               update_every=ngram.update_every, sign_ids=sign_ids))
    return tuple(specs)


# ---- Row plans
def unique_with_inverse(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted unique ids and each input's index into them, both i64.

    Like np.unique(ids, return_inverse=True) for 0 <= ids < 2^32, but several times faster: it sorts 64-bit words that
    hold the id in the upper half and its position in the lower half.
    """
    n = len(ids)
    words = np.sort(ids.astype(np.uint64) << 32 | np.arange(n, dtype=np.uint64))
    sorted_ids = (words >> 32).astype(np.int64)
    is_first = np.diff(sorted_ids, prepend=-1) > 0        # first occurrence of each id
    inverse = np.empty(n, np.int64)
    inverse[words & 0xFFFFFFFF] = np.cumsum(is_first) - 1
    return sorted_ids[is_first], inverse

@dataclass(eq=False)
class RowPlan:
    """Which rows of one table this rank fetches during a cycle, and which rows of its shard it serves to others.

    The index lists are CPU tensors until the table fetches the rows.
    """
    tag: dict[str, Any]                  # purpose, cycle, tokens; must be equal on all ranks
    shard_rows: int                      # C, on every rank
    rows_to_fetch: Tensor                # (n,) i64, as owner * C + local row, ascending. Gradients return to them
    fetch_counts: list[int]              # how many of them each rank owns
    rows_to_serve: Tensor                # i64: local rows that the ranks fetch from this one, grouped by rank
    serve_counts: list[int]              # how many of them each rank fetches
    head_columns: Tensor | None = None   # (n,) i64: rows_to_fetch as columns of the head; None unless tied
    # Only of a row-wise table. `exchange_row_requests` sets both.
    rows_to_update: Tensor | None = None                  # (u,) i64: unique rows_to_serve, ascending; stays on the CPU
    update_index: Tensor | None = None   # i64: index into rows_to_update of each of rows_to_serve

    @property
    def tied(self) -> bool:
        """True if rows are read from the head, which every rank holds, so that nothing is exchanged."""
        return self.head_columns is not None

    def move_to(self, device: torch.device) -> None:
        """Start to copy the index lists to the device."""
        for name in ("rows_to_fetch", "rows_to_serve", "head_columns", "update_index"):
            index = getattr(self, name)
            if index is not None:
                setattr(self, name, index.to(device, non_blocking=True))

def plan_rows(table: TableSpec, comm: Communicator, tag: dict[str, Any], ids_by_step: list[np.ndarray], tied: bool,
              fetch_all: bool) -> tuple[RowPlan, list[np.ndarray]]:
    """Plan the rows of one table for one cycle, from the global rows that each step looks up.

    Returns the plan, and for each step the index into rows_to_fetch of each lookup, i32, in the shape of its ids.
    With fetch_all the plan fetches every row. The rows to serve are this rank's own until `exchange_row_requests`.
    """
    # Frequent tokens have nearby ids, so dealing rows round-robin balances the load of their owners. Numbering rows by
    # owner first makes each owner's rows contiguous in the sorted list, as the all-to-all needs them.
    W = comm.world_size
    C = table.shard_rows(W)
    global_rows = np.concatenate([ids.ravel() for ids in ids_by_step])
    local_rows = global_rows.astype(np.int64) // W
    owners = global_rows - local_rows * W                 # same as global_rows % W, which NumPy does not vectorize
    rows_by_owner = owners * C + local_rows

    if fetch_all:
        rows_to_fetch, lookups = np.arange(W * C), rows_by_owner
    else:
        rows_to_fetch, lookups = unique_with_inverse(rows_by_owner)
    ends = np.cumsum([ids.size for ids in ids_by_step])
    index_by_step = [index.reshape(ids.shape)
                     for ids, index in zip(ids_by_step, np.split(lookups.astype(np.int32), ends[:-1]))]

    counts = np.bincount(rows_to_fetch // C, minlength=W).tolist()
    head_columns = None
    if tied:
        head_columns = comm.pinned(rows_to_fetch % C * W + rows_to_fetch // C)    # back to global rows
    rows_to_fetch = comm.pinned(rows_to_fetch)
    plan = RowPlan(tag, C, rows_to_fetch, counts, rows_to_fetch, counts, head_columns)
    return plan, index_by_step

def _all_to_all_requests(comm: Communicator, process_group: Any, dtype: str, plans: dict[str, RowPlan]) -> None:
    W, rank = comm.world_size, comm.rank
    # For each table, the local rows that this rank fetches from each owner. Tied tables fetch none.
    requests, counts, tags = [], [], []
    for label, plan in plans.items():
        counts.append([0] * W if plan.tied else plan.fetch_counts)
        local_rows = plan.rows_to_fetch[:sum(counts[-1])] % plan.shard_rows
        requests.append(local_rows.int().split(counts[-1]))
        tags.append(dict(plan.tag, table=label, dtype=dtype, tied=plan.tied))

    # Compare the tags first. Otherwise requests of different cycles would be confused without an error.
    by_reader = [None] * W
    dist.all_gather_object(by_reader, (tags, counts), group=process_group)
    for reader, (reader_tags, _) in enumerate(by_reader):
        for found, expected in itertools.zip_longest(reader_tags, tags):
            check(found == expected, f"row plans of ranks {reader} and {rank}", found=found, expected=expected,
                  hint="start every rank with the same flags", error=RunError)

    # Send all requests in one message, grouped by owner. They arrive grouped by reader, then by table.
    sent = torch.cat([by_owner[owner] for owner in range(W) for by_owner in requests])
    all_counts = np.array([reader_counts for _, reader_counts in by_reader])  # (reader, table, owner)
    received_counts = all_counts[:, :, rank]
    received = torch.empty(received_counts.sum(), dtype=torch.int32)
    dist.all_to_all_single(received, sent, received_counts.sum(1).tolist(), np.sum(counts, 0).tolist(),
                           group=process_group)
    chunks = received.split(received_counts.flatten().tolist())

    # A request outside the shard would read and change other rows without an error.
    for table_idx, (label, plan) in enumerate(plans.items()):
        by_reader = chunks[table_idx::len(plans)]
        for reader, local_rows in enumerate(by_reader):
            ascending = np.diff(local_rows, prepend=-1, append=plan.shard_rows).min() > 0
            check(ascending, f"rows of {label} that rank {reader} requests", found=local_rows,
                  expected=f"ascending local rows below {plan.shard_rows}",
                  hint="this is a bug in the trainer; please report it with the log", error=RunError)
        plan.rows_to_serve = comm.pinned(torch.cat(by_reader).long())
        plan.serve_counts = received_counts[:, table_idx].tolist()

def exchange_row_requests(comm: Communicator, process_group: Any, dtype: str, tables: Iterable[TableSpec],
                          plans: dict[str, RowPlan]) -> None:
    """Tell every owner which of its rows this rank fetches, and fill in what the plans serve and update.

    process_group: a gloo group, or None for the group of all ranks. Raises RunError if ranks disagree. Collective.
    """
    if comm.world_size > 1:
        _all_to_all_requests(comm, process_group, dtype, plans)
    for table in tables:
        if table.rowwise and table.label in plans:
            plan = plans[table.label]
            rows_to_update, update_index = unique_with_inverse(plan.rows_to_serve.numpy())
            plan.rows_to_update = comm.pinned(rows_to_update)
            plan.update_index = comm.pinned(update_index)


# ---- Row stores: where an owner stores the shard of a row-wise table
class RowState(NamedTuple):
    """Rows of a shard with their optimizer state."""
    rows: Tensor                         # (n, D)
    v: Tensor                            # (n,) f32 or f64: second moment
    last: Tensor                         # (n,) i32: the update that changed the row last, counted from 1; 0: none

    def index_select(self, index: Tensor) -> RowState:
        index = index.to(self.rows.device, non_blocking=True)
        return RowState(*(x.index_select(0, index) for x in self))

    def index_copy_(self, index: Tensor, source: RowState) -> None:
        index = index.to(self.rows.device, non_blocking=True)
        for x, new in zip(self, source):
            x.index_copy_(0, index, new)

    def to(self, device: torch.device) -> RowState:
        return RowState(*(x.to(device, non_blocking=True) for x in self))

MAP_NORESERVE = 0x4000                   # of Linux on x86 and ARM; Python has the name since 3.13
CHUNK_ROWS = 1 << 14                     # rows of a rank that are copied, sent or written to a file at once

def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on the host that take memory page by page, when a page is first written."""
    if sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    # Without MAP_NORESERVE, Linux refuses a mapping that is larger than the memory. Huge pages would take 2 MB for the
    # first row written in each.
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with contextlib.suppress(OSError):                    # kernels without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

def result_with_timeout(future: Future, timeout_s: float, what: str) -> Any:
    """Return the result of a background thread, or raise its error. Raises RunError after `timeout_s`."""
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        if future.done():                                 # the work itself raised it, for example a network disk
            raise
        raise RunError(what, found=f"no result after {timeout_s} s", expected="a result within the timeout",
                       hint="look at the disk and at the other ranks, or set a longer --comm_timeout") from None

class DeviceRowStore:
    """Stores this rank's shard of a row-wise table, with its optimizer state, on the device.

    An update reads the rows it changes with `read_rows`, changes them in place, and stores them with `write_back`.
    """
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator):
        self.comm = comm
        C = table.shard_rows(comm.world_size)
        dtype = getattr(torch, cfg.dtype)
        # On the host, zeros take memory only once they are written, so a table may be larger than the memory.
        zeros = lazy_zeros
        if comm.on_cuda and table.location == "device":
            zeros = functools.partial(torch.zeros, device=comm.device)
        self.shard = RowState(zeros((C, cfg.model_dim), dtype=dtype), zeros((C,), dtype=accum_dtype(dtype)),
                              zeros((C,), dtype=torch.int32))
        self.invalidate()

    def prefetch(self, plan: RowPlan) -> None:
        """Start to copy the rows of the plan's update to the device."""

    def read_rows(self, plan: RowPlan) -> RowState:
        """Return copies of the rows of the plan's update on the device, with the results of all earlier updates."""
        return self.shard.index_select(plan.rows_to_update)

    def write_back(self, plan: RowPlan, changed: RowState) -> None:
        """Store the rows that the plan's update has changed."""
        self.shard.index_copy_(plan.rows_to_update, changed)

    def wait_for_writes(self) -> None:
        """Wait until every `write_back` has reached the shard."""

    def read_weights(self, local_rows: Tensor) -> Tensor:
        """Return the weights of these rows on the device, for evaluation."""
        self.wait_for_writes()
        weights = self.shard.rows
        return weights.index_select(0, local_rows.to(weights.device)).to(self.comm.device, non_blocking=True)

    def invalidate(self) -> None:
        """Discard prefetched rows and byte counts. The shard is the truth from here on."""
        self.traffic = Counter(bytes_up=0, bytes_down=0)  # host to device, device to host

    def touched_rows(self) -> tuple[Tensor, ...]:
        """Return the local rows that any update has changed so far, ascending, in chunks."""
        self.wait_for_writes()
        return self.shard.last.nonzero().flatten().split(CHUNK_ROWS)

    def touched_state(self) -> Iterable[tuple[Tensor, RowState]]:
        """Yield the touched rows with a copy of their state, both on the CPU, in chunks."""
        for rows in self.touched_rows():
            if len(rows) > 0:
                yield rows.cpu(), RowState(*(x.cpu() for x in self.shard.index_select(rows)))

    def clear(self) -> None:
        """Set all rows to zero."""
        # Write touched rows only. Writing zeros to the others would make them take memory.
        for rows in self.touched_rows():
            for x in self.shard:
                x.index_fill_(0, rows, 0)
        self.invalidate()

    def load_chunk(self, local_rows: Tensor, state: RowState) -> None:
        """Replace these rows, after `clear`."""
        self.shard.index_copy_(local_rows, state.to(self.shard.rows.device))

    def load(self, chunks: list[tuple[Tensor, RowState]]) -> None:
        """Replace the shard by chunks from `touched_state`. All other rows become zero."""
        self.clear()
        for local_rows, state in chunks:
            self.load_chunk(local_rows, state)

class HostRowStore(DeviceRowStore):
    """Stores the shard in pageable host memory, and overlaps its copies with training.

    The calls of one cycle, in the order in which the main thread makes them:

        prefetch(n+1)    worker: store what update n-1 changed in the shard, then copy the rows of n+1 to the device
        update n         main:   changes `active`, the rows that read_rows(n) returned
        write_back(n)    main:   launch the copy of `active` to pinned host memory
        read_rows(n+1)   main:   take the prefetched rows; those that update n has changed are copied from `active`
    """
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator):
        # Two streams, because a copy to the host waits for an update, and the next copy to the device must not.
        self.to_device_stream = torch.cuda.Stream(comm.device) if comm.on_cuda else None
        self.to_host_stream = torch.cuda.Stream(comm.device) if comm.on_cuda else None
        self.worker = ThreadPoolExecutor(1, "row-store", initializer=comm.set_thread_device)
        self.prefetched: tuple[RowPlan, Future] | None = None                 # a plan, and its rows on the device
        # What write_back left for the worker: local rows, their state on the host, the CUDA event after its copy.
        self.unstored: tuple[Tensor, RowState, Any] | None = None
        super().__init__(table, cfg, comm)

    def invalidate(self) -> None:
        self.wait_for_writes()
        super().invalidate()
        self.prefetched = None
        self.active: tuple[Tensor, RowState] | None = None                    # local rows and state, on the device

    def prefetch(self, plan: RowPlan) -> None:
        if self.prefetched is not None:
            if self.prefetched[0] is plan:
                return
            self._prefetched_state()                      # of a plan that was never read: only report its error
        unstored, self.unstored = self.unstored, None
        self.prefetched = plan, self.worker.submit(self._copy_to_device, unstored, plan.rows_to_update)

    def read_rows(self, plan: RowPlan) -> RowState:
        self.prefetch(plan)
        state, copied = self._prefetched_state()
        self.prefetched = None
        self.traffic["bytes_up"] += sum(x.nbytes for x in state)
        if copied is not None:                            # make the GPU wait for the copy, not this thread
            compute_stream = torch.cuda.current_stream(self.comm.device)
            compute_stream.wait_event(copied)
            for x in state:
                x.record_stream(compute_stream)

        # Shapes do not depend on how many rows the two updates share, so this does not synchronize.
        rows = plan.rows_to_update.to(self.comm.device, non_blocking=True)
        if self.active is not None and len(self.active[0]) > 0:
            active_rows, active = self.active
            index = torch.searchsorted(active_rows, rows).clamp(max=len(active_rows) - 1)
            is_active = active_rows[index] == rows
            state = RowState(torch.where(is_active[:, None], active.rows[index], state.rows),
                             torch.where(is_active, active.v[index], state.v),
                             torch.where(is_active, active.last[index], state.last))
        self.active = rows, state
        return state

    def write_back(self, plan: RowPlan, changed: RowState) -> None:
        if self.unstored is not None:                     # no `prefetch` has passed it to the worker
            self.wait_for_writes()
        self.traffic["bytes_down"] += sum(x.nbytes for x in changed)
        copied = None
        on_host = changed
        if self.to_host_stream is not None:
            on_host = self._pinned_buffers(len(plan.rows_to_update))
            self.to_host_stream.wait_stream(torch.cuda.current_stream(self.comm.device))
            with torch.cuda.stream(self.to_host_stream):
                for x, out in zip(changed, on_host):
                    out.copy_(x, non_blocking=True)
                    x.record_stream(self.to_host_stream)
                copied = self.to_host_stream.record_event()
        self.unstored = plan.rows_to_update, on_host, copied

    def wait_for_writes(self) -> None:
        if self.prefetched is not None:
            self._prefetched_state()
        if self.unstored is not None:
            result_with_timeout(self.worker.submit(self._store, *self.unstored), self.comm.timeout,
                                "copying table rows to host memory")
            self.unstored = None                          # after an error, the rows are stored by the next call

    def _prefetched_state(self) -> tuple[RowState, Any]:
        return result_with_timeout(self.prefetched[1], self.comm.timeout, "copying table rows from host memory")

    def _pinned_buffers(self, n: int) -> RowState:
        return RowState(*(torch.empty(n, *x.shape[1:], dtype=x.dtype, pin_memory=True) for x in self.shard))

    def _store(self, local_rows: Tensor, state: RowState, copied: Any) -> None:
        """Store rows in the shard once the CUDA event `copied` has passed. Runs on the worker."""
        if copied is not None:
            self.comm.wait_for(copied)
        self.shard.index_copy_(local_rows, state)

    def _copy_to_device(self, unstored: tuple | None, local_rows: Tensor) -> tuple[RowState, Any]:
        """Return rows of the shard on the device, and the CUDA event after their copy. Runs on the worker."""
        if unstored is not None:
            self._store(*unstored)
        if self.to_device_stream is None:
            return self.shard.index_select(local_rows), None
        buffers = self._pinned_buffers(len(local_rows))
        for x, out in zip(self.shard, buffers):
            torch.index_select(x, 0, local_rows, out=out)
        with torch.cuda.stream(self.to_device_stream):
            return buffers.to(self.comm.device), self.to_device_stream.record_event()

ROW_STORES = dict(device=DeviceRowStore, host=HostRowStore)


# ---- Tables of one rank. The optimizer updates every row of a dense table, and the requested rows of a row-wise one.
class LocalTable:
    """A dense table with W = 1. Lookups read the parameter in place; gradients accumulate in a buffer of its shape."""
    store = None

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.shard = weight.detach()
        self.grad = torch.zeros_like(self.shard, dtype=accum_dtype(weight.dtype))
        self.byte_totals = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.has_grads = False                            # gradients that no update has used

    def rows_for_forward(self, plan: None) -> tuple[Tensor, Tensor]:
        """Return the rows that lookups read, and the buffer their gradients accumulate in."""
        self.has_grads = True
        return self.weight, self.grad

    def fetch_for_eval(self, plan: None) -> Tensor:
        """Return the rows that lookups read."""
        return self.weight

    def launch_reduce(self) -> None:
        """Do nothing: this rank has the only gradients."""

    def reduced_grads(self) -> Tensor:
        """Return the gradient of the shard, (R, D)."""
        return self.grad

    def add_grads_to_head(self, head_grad: Tensor) -> None:
        """Move the gradients to the head's, (D, V), while head and embedding are tied."""
        head_grad += self.grad.t().to(head_grad.dtype)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.grad.zero_()
        self.has_grads = False

    reset = zero_grad

class ExchangedTable:
    """A dense table with W > 1: this rank's shard, the rows it fetched for the cycle, and their gradients.

    Cache and row_grads hold the rows of one plan, in the order of `RowPlan.rows_to_fetch`.
    """
    store: DeviceRowStore | None = None

    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator, shard: Tensor, max_tokens: int,
                 head: Tensor | None):
        """shard (C, D). max_tokens: of this rank in a cycle. head (D, V): where the rows of `embed` are while tied."""
        self.table = table
        self.comm = comm
        self.head = head
        self.debug = cfg.debug_rows
        self.shard = shard.detach()
        # Buffers fit the largest cycle, so that shapes and addresses never change.
        C, D = self.shard.shape
        num_rows = comm.world_size * C
        if table.rowwise or cfg.row_comms == "sparse":
            num_rows = min(num_rows, max_tokens * table.lookups_per_token)
        self.cache = self.shard.new_zeros(num_rows, D, device=comm.device).requires_grad_()
        self.row_grads = torch.zeros(num_rows, D, dtype=accum_dtype(self.shard.dtype), device=comm.device)
        self.fetch_work = self.reduce_work = None         # of the all-to-all into the cache, and of that of gradients
        self.reset()

    def reset(self) -> None:
        """Discard cache, gradients and byte counts. The shard remains."""
        wait_for_work(self.fetch_work)
        wait_for_work(self.reduce_work)
        self.fetch_work = self.reduce_work = None
        self.cached_plan: RowPlan | None = None           # whose rows are in the cache
        self.pending_plan: RowPlan | None = None          # whose gradients are in row_grads
        self.byte_totals = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.row_grads.zero_()

    @property
    def has_grads(self) -> bool:
        """True if there are gradients that no update has used."""
        return self.pending_plan is not None

    def rows_to_change(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Return the rows that the plan's update changes, (u, D), and the index into them of rows_to_serve."""
        return self.shard, plan.rows_to_serve

    def prefetch(self, plan: RowPlan) -> None:
        """Start to copy the plan's rows from host memory, if the table is stored there."""

    @torch.no_grad()
    def fetch(self, plan: RowPlan) -> None:
        """Launch the all-to-all of the plan's rows into the cache, with the results of the last update."""
        if self.cached_plan is not plan:
            wait_for_work(self.fetch_work)
            plan.move_to(self.comm.device)
            self.fetch_work = self._launch_fetch(plan, self.cache.detach(), *self.rows_to_change(plan))
            self.cached_plan = plan

    def rows_for_forward(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Return the cache with the plan's rows, and row_grads. Raises RunError if gradients of another plan wait."""
        check(self.pending_plan in (None, plan), f"gradients of {self.table.label}",
              found=self.pending_plan and self.pending_plan.tag, expected=f"{plan.tag}: batches of one cycle",
              hint="call optim_step on the last step of the cycle first", error=RunError)
        self.pending_plan = plan
        self.fetch(plan)                                  # unless `fetch_rows` has done it
        wait_for_work(self.fetch_work)
        self.fetch_work = None
        return self.cache, self.row_grads

    def fetch_for_eval(self, plan: RowPlan) -> Tensor:
        """Return the plan's rows in a new tensor."""
        plan.move_to(self.comm.device)
        rows, index = self.shard, plan.rows_to_serve
        if self.store is not None:
            rows, index = self.store.read_weights(plan.rows_to_serve), None
        out = self.cache.new_empty(len(plan.rows_to_fetch), self.cache.shape[1])
        wait_for_work(self._launch_fetch(plan, out, rows, index))
        return out

    def launch_reduce(self) -> None:
        """Launch the all-to-all of row_grads to the owners of the rows, in the dtype of the weights."""
        plan = self.pending_plan
        sent = self.row_grads[:len(plan.rows_to_fetch)].to(self.cache.dtype)
        self.received = sent.new_empty(len(plan.rows_to_serve), sent.shape[1])
        self.reduce_work = self._all_to_all(plan, self.received, sent, plan.serve_counts, plan.fetch_counts)

    def reduced_grads(self) -> Tensor:
        """Wait for the gradients, and return their sum over ranks for the rows that the update changes, (u, D)."""
        wait_for_work(self.reduce_work)
        rows, index = self.rows_to_change(self.pending_plan)
        grad = torch.zeros_like(rows, dtype=self.row_grads.dtype)
        add_rows(grad, index, self.received)              # in the order of ranks, the same on every run
        self.received = self.reduce_work = None           # the work would keep the received rows alive
        return grad

    def add_grads_to_head(self, head_grad: Tensor) -> None:
        """Move row_grads to the head's gradient, (D, V), while head and embedding are tied."""
        plan = self.pending_plan
        head_grad[:, plan.head_columns] += self.row_grads[:len(plan.rows_to_fetch)].t().to(head_grad.dtype)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Discard the gradients, and the cached rows, which the update has changed."""
        plan = self.pending_plan
        self.row_grads[:len(plan.rows_to_fetch)] = 0      # all other rows are zero already
        check(not self.debug or not self.row_grads.any(), f"--debug_rows: gradients of {self.table.label}",
              found="nonzero gradients in rows that were not planned", expected="zeros",
              hint="this is a bug in the trainer; please report it with the log", error=RunError)
        self.pending_plan = self.cached_plan = None

    def _launch_fetch(self, plan: RowPlan, out: Tensor, rows: Tensor, index: Tensor | None) -> Any:
        """Launch the all-to-all of the plan's rows into `out`. Returns its work, or None. This rank serves rows[index],
        or all of `rows` if index is None."""
        if self.debug:
            out.fill_(math.nan)                           # shows reads of rows that were not fetched
        fetched = out[:len(plan.rows_to_fetch)]
        if plan.tied:
            fetched.copy_(self.head.t()[plan.head_columns])
            return None
        if index is not None:
            rows = rows.index_select(0, index)
        self._count_bytes(plan, ROW_ID_BYTES, plan.serve_counts, plan.fetch_counts)       # the requests for them
        return self._all_to_all(plan, fetched, rows, plan.fetch_counts, plan.serve_counts)

    def _all_to_all(self, plan: RowPlan, out: Tensor, sent: Tensor, recv_counts: list[int],
                    send_counts: list[int]) -> Any:
        self._count_bytes(plan, sent.shape[1] * sent.element_size(), recv_counts, send_counts)
        if plan.tag["purpose"] == "train":                # a dense exchange sends the whole shard to every other rank
            self.byte_totals["bytes_dense"] += (self.comm.world_size - 1) * self.shard.nbytes
        if self.comm.world_size == 1:    # a row-wise table
            out.copy_(sent)
            return None
        return dist.all_to_all_single(out, sent, recv_counts, send_counts, async_op=True)

    def _count_bytes(self, plan: RowPlan, item_bytes: int, recv_counts: list[int], send_counts: list[int]) -> None:
        """Count what an all-to-all of training exchanges with other ranks. Counts are items per rank."""
        if plan.tag["purpose"] == "train":
            own = send_counts[self.comm.rank]             # what a rank sends to itself it also receives
            self.byte_totals["bytes_sent"] += (sum(send_counts) - own) * item_bytes
            self.byte_totals["bytes_received"] += (sum(recv_counts) - own) * item_bytes

class RowwiseTable(ExchangedTable):
    """A row-wise table at any W. Its shard is in a row store, and an update changes only the requested rows of it."""
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator, max_tokens: int):
        self.store = ROW_STORES[table.location](table, cfg, comm)
        super().__init__(table, cfg, comm, self.store.shard.rows, max_tokens, head=None)

    def reset(self) -> None:
        super().reset()
        self.active: RowState | None = None               # the rows that the next update changes
        self.store.invalidate()

    def rows_to_change(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        return self.active.rows, plan.update_index

    def fetch(self, plan: RowPlan) -> None:
        if self.cached_plan is not plan:
            self.active = self.store.read_rows(plan)
        super().fetch(plan)

    def prefetch(self, plan: RowPlan) -> None:
        if self.cached_plan is not plan:
            self.store.prefetch(plan)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.active = None                                # `fetch` reads those of the next update


# ====== Section 6: Batches ============================================================================================
class Batch(NamedTuple):
    """This rank's slots of one step, or of one micro-batch of it."""
    step: int
    plans: dict[str, RowPlan]            # by table that needs one; shared by the steps of a cycle
    tokens: Tensor                       # (B, T) i32
    targets: Tensor                      # (B, T) i64: the next token
    cu_seqlens: Tensor                   # (B, K) i32: 0 and the end of each document, padded to K columns with T
    row_index: dict[str, Tensor]         # by table, shaped like its row_ids: index into the fetched rows, or the table
    sign_ids: dict[str, Tensor]          # by table with signs, (B, T) i32

    def map(self, fn: Callable) -> Batch:
        """Apply `fn` to every array or tensor."""
        row_index = {label: fn(x) for label, x in self.row_index.items()}
        sign_ids = {label: fn(x) for label, x in self.sign_ids.items()}
        return Batch(self.step, self.plans, fn(self.tokens), fn(self.targets), fn(self.cu_seqlens), row_index, sign_ids)

    def to(self, device: torch.device) -> Batch:
        return self.map(operator.methodcaller("to", device, non_blocking=True))

def collate(step_cfg: StepConfig, tables: Iterable[TableSpec], seqs: list[PackedSeq]) -> Batch:
    """Stack this rank's slots of one step, as NumPy arrays. The row index of every table is its global row."""
    tokens = np.stack([seq.tokens for seq in seqs])
    # Slots contain different numbers of documents. Repeating T pads their bounds with empty documents.
    bounds = [seq.cu_seqlens for seq in seqs]
    K = max(map(len, bounds))
    cu_seqlens = np.stack([np.pad(x, (0, K - len(x)), "edge") for x in bounds])
    inputs = tokens[:, :-1].astype(np.int32)
    targets = tokens[:, 1:].astype(np.int64)
    row_index = {table.label: table.row_ids(inputs) for table in tables}
    sign_ids = {table.label: table.sign_ids(inputs) for table in tables if table.sign_ids}
    return Batch(step_cfg.step, {}, inputs, targets, cu_seqlens, row_index, sign_ids)

def build_batches(cfg: Config, comm: Communicator, process_group: Any, purpose: str, cycle: list[StepConfig],
                  seqs_by_step: list[list[PackedSeq]]) -> list[Batch]:
    """Build one batch per step of a cycle from this rank's slots of each step, with the row plans of all tables.

    process_group: a gloo group, or None for the group of all ranks. The batches are on the host. Collective.
    """
    tables = table_specs(cfg)
    batches = [collate(step_cfg, tables, seqs) for step_cfg, seqs in zip(cycle, seqs_by_step)]

    # A plan covers the `update_every` steps up to its table's next update. The tables whose plans start at the same
    # step share one exchange.
    planned = [table for table in tables if table.rowwise or comm.world_size > 1]  # others are read in place
    plans = {}
    for first in range(0, len(cycle), cfg.adam_every):
        step_cfg = cycle[first]
        new_plans = {}
        for table in planned:
            if first % table.update_every == 0:
                covered = batches[first:first + table.update_every]
                tag = dict(purpose=purpose, cycle=step_cfg.step // table.update_every,
                           tokens=sum(batch.tokens.shape[1] for batch in covered))
                tied = table.tied_to_head and step_cfg.tied  # the same for the whole cycle, because untying ends one
                fetch_all = cfg.row_comms == "dense" and not table.rowwise and not tied
                ids_by_step = [batch.row_index[table.label] for batch in covered]
                plan, index_by_step = plan_rows(table, comm, tag, ids_by_step, tied, fetch_all)
                new_plans[table.label] = plan
                for batch, index in zip(covered, index_by_step):
                    batch.row_index[table.label] = index
        exchange_row_requests(comm, process_group, cfg.dtype, tables, new_plans)
        plans |= new_plans
        for batch in batches[first:first + cfg.adam_every]:
            batch.plans.update(plans)
    return [batch.map(comm.pinned) for batch in batches]

class OutOfData(DataError):
    """No shard has another batch. Raised on every rank in the same cycle."""

class Loader:
    """Builds the batches of the next cycle on a background thread, while the current one trains.

    The caller passes the steps of each cycle, so the stream of batches never depends on timing, and every W gets the
    same one.
    """
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader], purpose: str = "train"):
        self.cfg = cfg
        self.comm = comm
        self.headers = headers
        self.purpose = purpose
        self.worker = ThreadPoolExecutor(1, "loader", initializer=comm.set_thread_device)
        self.reader = ThreadPoolExecutor(1, "shard-reader")
        self.shards = self._prefetch_shards()
        self.shard = TokenShard(np.empty(0, np.uint16), 0)  # in use, from `next_doc` on; empty at first
        self.next_doc = 0
        self.ready: list[Batch] = []                      # batches of the current cycle that `next` has not returned
        self.next_cycle: Future | None = None             # the batches of the next one

    def skip(self, steps: Iterable[StepConfig]) -> None:
        """Skip the data of these steps, which a resumed run has trained on."""
        for step_cfg in steps:
            self._pack_batch(step_cfg)

    def start(self, cycle: list[StepConfig]) -> None:
        """Build the batches of the first cycle, and wait for them."""
        self.next_cycle = self.worker.submit(self._build_cycle, cycle)
        self._wait_for_cycle()

    def advance(self, following: list[StepConfig]) -> None:
        """Switch to the next cycle, and start to build the batches of the one that follows it. Raises DataEnded."""
        self.ready = self._wait_for_cycle()
        self.next_cycle = self.worker.submit(self._build_cycle, following)

    def next(self, step_cfg: StepConfig) -> Batch:
        """Return the batch of this step on the device."""
        is_next = self.ready and self.ready[0].step == step_cfg.step
        assert is_next, f"step {step_cfg.step} is not the next one of the loader"
        batch = self.ready.pop(0)
        return batch.to(self.comm.device)

    def next_plans(self) -> dict[str, RowPlan]:
        """Return the row plans of the next step, or {} at the end of training or data."""
        try:
            batches = self.ready or self._wait_for_cycle()
        except OutOfData:                # `advance` raises it again
            return {}
        return batches[0].plans if batches else {}

    def close(self) -> None:
        for pool in (self.worker, self.reader):
            pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for_cycle(self) -> list[Batch]:
        return result_with_timeout(self.next_cycle, self.cfg.comm_timeout, "waiting for the loader thread")

    def _build_cycle(self, cycle: list[StepConfig]) -> list[Batch]:
        """Build this rank's batches of a cycle. Runs on the loader thread. Collective."""
        seqs_by_step = []
        for step_cfg in cycle:
            shard, seqs = self._pack_batch(step_cfg)
            my_seqs = seqs[self.comm.rank::self.comm.world_size]
            seqs_by_step.append([pack_sequence(shard, starts, ends) for starts, ends in my_seqs])
        return build_batches(self.cfg, self.comm, self.comm.loader_group, self.purpose, cycle, seqs_by_step)

    def _prefetch_shards(self) -> Iterable[TokenShard]:
        """Yield the shards of every pass, and read the next one on a second thread while one is in use."""
        passes = range(self.cfg.epochs) if self.cfg.epochs else itertools.count()
        coming = None
        for _ in passes:
            for header in self.headers:
                current, coming = coming, self.reader.submit(load_shard, header)
                if current is not None:
                    yield result_with_timeout(current, self.cfg.comm_timeout, "reading a shard")
        yield result_with_timeout(coming, self.cfg.comm_timeout, "reading a shard")

    def _pack_batch(self, step_cfg: StepConfig) -> tuple[TokenShard, list[tuple[np.ndarray, np.ndarray]]]:
        """Pack the next S slots. Returns their shard, and for each slot the starts and ends of its pieces of it."""
        # All slots of a step come from one shard. Try the rest of the current one, which is empty at first, then each
        # shard from its start, the current one included.
        for _ in range(len(self.headers) + 1):
            packed = pack_batch(self.shard, self.next_doc, self.cfg.seqs_per_step, step_cfg.seq_len,
                                self.cfg.max_doc_len)
            if packed is not None:
                seqs, self.next_doc = packed
                return self.shard, seqs
            self.shard = next(self.shards, None)
            self.next_doc = 0
            if self.shard is None:
                break
        raise OutOfData("training data ended",
                        found=f"{len(self.headers)} shards of {self.cfg.train_files!r}: enough for {step_cfg.step} "
                              "steps",
                        expected=f"room for {self.cfg.seqs_per_step} x {step_cfg.seq_len + 1} tokens in one shard, at "
                                 f"most {self.cfg.max_doc_len} of each document",
                        hint="more or larger shards, a larger --max_doc_len, --epochs=0 to read them again and "
                             "again, or fewer steps by --max_steps")

class ValidationSet:
    """The validation slots, in memory, and statistics of their text."""
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader], purpose: str = "validation"):
        # Every rank keeps all slots, which are few, and takes its own in each validation.
        self.cfg = cfg
        self.comm = comm
        self.purpose = purpose
        seq_len = cfg.val_batch_tokens // cfg.seqs_per_step
        shards = map(load_shard, headers)                 # read only as far as they are needed
        seqs = validation_sequences(shards, cfg.seqs_per_step, seq_len, cfg.bos_id)
        self.seqs = list(itertools.islice(seqs, cfg.val_tokens // seq_len))

        # Entropy and bytes are those of exactly the tokens that are predicted.
        targets = np.concatenate([seq.tokens[1:] for seq in self.seqs])
        counts = np.bincount(targets, minlength=cfg.vocab_size)
        frequencies = counts[counts > 0] / len(targets)
        self.unigram_nats = float(-(frequencies * np.log(frequencies)).sum())
        self.token_bytes = None
        name = headers[0].name
        if not name.startswith(SYNTHETIC_PREFIX):
            self.token_bytes = read_token_bytes(Path(name).parent, cfg)
        self.bytes_per_token = None
        if self.token_bytes is not None:
            self.bytes_per_token = float(counts @ list(map(len, self.token_bytes)) / len(targets))

    def text_metrics(self, loss: float) -> dict[str, float]:
        """Return bits per byte of a loss in nats per token, and the unigram entropy; {} if bytes are not known."""
        if self.bytes_per_token is None:
            return {}
        return dict(val_bpb=loss / math.log(2) / self.bytes_per_token, unigram_nats=self.unigram_nats)

    def batches(self, step_cfg: StepConfig) -> Iterable[Batch]:
        """Yield this rank's batches on the device, one per block of S slots. Collective."""
        S = self.cfg.seqs_per_step
        for first in range(0, len(self.seqs), S):
            my_seqs = self.seqs[first + self.comm.rank:first + S:self.comm.world_size]
            batch, = build_batches(self.cfg, self.comm, None, self.purpose, [step_cfg], [my_seqs])
            yield batch.to(self.comm.device)


# ====== Section 7: Model ==============================================================================================
class ParameterSpec(NamedTuple):
    """One row of the parameter table: all about a parameter but its place in the forward pass."""
    label: str
    shape: tuple[int, ...]
    init: tuple[str, Any]                # distribution and its number, as initial_values draws it
    optimizer: str = "adam"              # "normuon" for banks of matrices, or "rowwise": section Rows stores it
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    betas: tuple = (0.9, 0.99)
    full_precision: bool = False         # f32 where the weights are bf16
    # A parameter with one of these two is owned in shards; every rank updates all others alike.
    matrix_heights: tuple[int, ...] = ()  # heights of a layer's matrices in its main_grad; (): autograd's gradient
    table: TableSpec | None = None       # of an embedding table

SCALARS = {                              # name -> initial value of each of the packed scalars (RECIPE 2.6)
    "residual": (1.1,) * len(LAYERS),
    "attention": (0.5, 1.0) * len(LAYERS),                                    # of q, k, v and of the output
    "bigram": (0.1,) * len(LAYERS),
    "smear": (0.0,),
    "backout": (0.5,),
    "skip": (-1.5,),
}
NGRAM_INIT_COEF = 0.1                    # initial share of a table of n-grams in the residual stream of each layer
MLP_RATIO = 4                            # F / D
MLP_MATRICES = 2                         # matrices of one MLP
QKVO = 4                                 # matrices of one attention layer, below each other
QKV = 3                                  # of them, those before the attention

def init_parameter(spec: ParameterSpec, generator: torch.Generator):
    """Draw a parameter's initial values, f32 in logical order."""
    kind, number = spec.init
    shape = spec.shape
    if kind == "constant":
        return torch.tensor(number).expand(shape)                             # one value for all, or each its own
    if kind == "normal":
        return torch.randn(shape, generator=generator) * number
    if kind == "up":
        shape = (shape[0], 1, *shape[2:])
    drawn = torch.rand(shape, generator=generator) * (2 * number) - number
    if kind == "up":                                                          # down is zero: an MLP starts as nothing
        drawn = torch.cat((drawn, torch.zeros_like(drawn)), dim=1)
    return drawn

def initial_scalars(cfg: Config):
    """Return initial values of the packed scalars by name: recipe A's, then tables that enter the residual stream."""
    return SCALARS | {ngram.label: (NGRAM_INIT_COEF,) * len(LAYERS) for ngram in cfg.tables if ngram.layer is None}

def parameter_specs(cfg: Config) -> tuple[ParameterSpec, ...]:
    """Return all parameters, tables included: shapes, initial values, optimizers, multipliers (RECIPE 2.1, 2.6)."""
    D, H, V = cfg.model_dim, cfg.num_heads, cfg.padded_vocab
    L, A, mlp_dim = len(LAYERS), len(ATTENTION_LAYERS), MLP_RATIO * D
    value_gates = NUM_VALUE_EMBEDS + sum(ngram.layer is not None for ngram in cfg.tables)
    bigrams, values, embed, *ngram_rows = table_specs(cfg)
    scalars = sum(initial_scalars(cfg).values(), ())

    # What several rows of the table have in common.
    zeros = "constant", 0.0
    bound = 3**0.5 * 0.5 * D**-0.5                                            # a standard deviation of 0.5 / sqrt(D)
    exact = dict(lr_mul=5, wd_mul=0, full_precision=True)
    table = dict(lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    head = dict(wd_mul=150, betas=(0.5, 0.95))
    return (
        ParameterSpec("attn", (A, QKVO * D, D), ("uniform", bound), "normuon", matrix_heights=(QKV * D, D)),
        ParameterSpec("mlp", (L, MLP_MATRICES, mlp_dim, D), ("up", bound), "normuon",
                      matrix_heights=(mlp_dim, mlp_dim)),
        ParameterSpec("scalars", (len(scalars),), ("constant", scalars), **exact),
        ParameterSpec("x0_lambdas", (L,), zeros, **exact, betas=(0.65, 0.95)),
        ParameterSpec("smear_gate", (1, GATE_INPUTS), zeros, lr_mul=0.01, wd_mul=0),
        ParameterSpec("skip_gate", (1, GATE_INPUTS), zeros, lr_mul=0.05, wd_mul=0),
        ParameterSpec("attn_gate_bank", (A, H, GATE_INPUTS), zeros),
        ParameterSpec("ve_gate_bank", (value_gates, H, GATE_INPUTS), zeros),
        ParameterSpec("bigram_embed", (bigrams.num_rows, D), zeros, **table, table=bigrams),
        ParameterSpec("value_embed", (values.num_rows, D), ("normal", 0.01), **table, table=values),
        ParameterSpec("lm_head", (D, V), ("normal", 0.005), **head, matrix_heights=(D,)),
        ParameterSpec("embed", (embed.num_rows, D), zeros, **head, table=embed),  # lm_head^T while they are tied
        # The row-wise rule has no first moment.
        *(ParameterSpec(ngram.label, (ngram.rows, D), zeros, "rowwise", ngram.lr_mul, ngram.wd_mul, (0.0, ngram.beta2),
                    table=rows) for ngram, rows in zip(cfg.tables, ngram_rows)))

AttentionArgsByKind = dict[tuple[str, str], AttentionArgs]                        # by attention and window of a layer

def attention_args(short: int, long: int, max_len: int, scale: float):
    """Return the span of every kind of layer. Windows in positions; max_len in tokens: 2 positions in paired layers."""
    return {(attention, name): AttentionArgs(per_token * max_len, window, scale, f"{attention} {name}")
            for attention, per_token in (("plain", 1), ("paired", 2))
            for name, window in (("short", short), ("long", long))}

def initial_weights(cfg: Config, seed: int):
    """Draw all weights but those of row-wise tables, which are zeros: yield (label, weight in logical order)."""
    for spec in parameter_specs(cfg):
        if spec.optimizer == "rowwise":
            continue
        # Each label has a generator of its own, so that a parameter more or less changes no other.
        digest = hashlib.sha256(f"{seed}/{spec.label}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        drawn = init_parameter(spec, generator)
        if not spec.full_precision:
            drawn = drawn.bfloat16()                                          # the same numbers in any dtype
        if spec.label == "lm_head":
            head = drawn
        if spec.label == "embed":
            drawn = head.t()                                                  # one parameter at first
        yield spec.label, drawn

def sigmoid_gate(features: Tensor, weight: Tensor):
    """Return shares between 0 and 1: features (..., GATE_INPUTS), weight (heads, GATE_INPUTS) -> (..., heads)."""
    return torch.sigmoid(F.linear(features, weight))

class GPT(nn.Module):
    """The model of RECIPE 2. Knows shapes, not ranks. Parameters carry the labels of the parameter table."""
    def __init__(self, cfg: Config, attention: Callable, max_seq_len: int, shard_rows: dict):
        """rotary_len: the longest slot in tokens. shard_rows: rows that this rank keeps, by label of a table."""
        super().__init__()
        self.num_heads = cfg.num_heads
        self.head_dim = cfg.head_dim
        self.attention = attention
        # Row-wise tables are not parameters. Section Rows stores them and passes their rows to `losses`.
        self.specs = {spec.label: spec for spec in parameter_specs(cfg) if spec.optimizer != "rowwise"}
        self.scalar_sizes = {name: len(value_embeds) for name, value_embeds in initial_scalars(cfg).items()}
        self.ngrams = cfg.tables
        dtype = getattr(torch, cfg.dtype)
        for label, spec in self.specs.items():
            rows, *rest = spec.shape
            row_dtype = accum_dtype(dtype) if spec.full_precision else dtype
            weight = torch.empty((shard_rows.get(label, rows), *rest), dtype=row_dtype)
            self.register_parameter(label, nn.Parameter(weight))

        # Buffers follow from settings and schedule: no checkpoint needs them.
        if any(ngram.signs for ngram in self.ngrams):
            self.register_buffer("sign_vectors", sign_vectors(cfg.model_dim).to(dtype), persistent=False)
        for name in ("rotary_cos", "rotary_sin"):                             # paired layers have 2T positions
            self.register_buffer(name, torch.zeros(2 * max_seq_len, cfg.head_dim, dtype=dtype), persistent=False)
        self.channel_freqs = {}          # frequencies -> angle per position of each channel

    def set_rotary(self, frequencies: tuple):
        """Refill cos and sin of position * frequency in place; angles in f32 (f64 in an f64 run)."""
        dtype = accum_dtype(self.rotary_cos.dtype)
        device = self.rotary_cos.device
        # Frequencies come from the host once, in the warm-up: a copy at the first step of a stage would wait.
        if frequencies not in self.channel_freqs:
            per_position = torch.tensor(frequencies, dtype=dtype, device=device)
            # Neighbours turn by the same angle, negated for the second; the other half of the channels by 0.
            neighbours = torch.stack((per_position, -per_position), dim=-1).flatten()
            self.channel_freqs[frequencies] = F.pad(neighbours, (0, len(neighbours)))
        positions = torch.arange(len(self.rotary_cos), dtype=dtype, device=device)
        angles = torch.outer(positions, self.channel_freqs[frequencies])
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())

    def losses(self, batch: Batch, weights: Tensor, loss_scale: Tensor, attn_args_by_kind: AttentionArgsByKind,
               head_precision: str, row_buffers: dict):
        """Return losses (B, T); weights (G,) of the next tokens; loss_weight () is the seed backward gets."""
        y = self.hidden_states(batch, attn_args_by_kind, row_buffers).flatten(0, 1)
        logits_dtype = torch.float64 if y.dtype == torch.float64 else torch.bfloat16       # of an fp8 head
        return HeadLoss.apply(y, self.lm_head, batch.targets, weights, loss_scale, head_precision, logits_dtype,
                              as_matrix(self.lm_head)).view_as(batch.targets)

    def hidden_states(self, batch: Batch, attn_args_by_kind: AttentionArgsByKind, row_buffers: dict):
        """Return the normalised stream that enters the head, (B, T, D).
        row_buffers: label of a table -> (rows to read, f32 or f64 sums of their gradients or None)"""
        # All that the layers share is taken apart once: each access would cost the backward a pass of its own.
        scalars = dict(zip(self.scalar_sizes, self.scalars.split(list(self.scalar_sizes.values()))))
        residual = scalars["residual"].unbind()
        attention_scales = scalars["attention"].unbind()
        x0_lambdas = self.x0_lambdas.unbind()
        attn = matrices_by_layer(self.attn, self.specs["attn"].matrix_heights)
        mlp = matrices_by_layer(self.mlp, self.specs["mlp"].matrix_heights)

        # The slots of a micro-batch form one sequence, so bounds of documents count on from slot to slot.
        B, T = batch.tokens.shape
        starts = torch.arange(B, device=batch.tokens.device, dtype=torch.int32) * T
        cu_seqlens = (batch.cu_seqlens + starts[:, None]).flatten()           # what fills a row is the next one's start

        x0, residual_inputs, value_embeds = self.embed_inputs(batch, scalars, row_buffers)
        x = x0
        saved = {}                       # name -> stream after the layer that keeps it
        for i, layer in enumerate(LAYERS):
            # A kept stream joins before the mix, which scales it too.
            if layer.add_saved:
                gate = 2 * sigmoid_gate(x0[..., :GATE_INPUTS], self.skip_gate)
                x = x + torch.sigmoid(scalars["skip"]).type_as(x) * gate * saved[layer.add_saved]
            x = residual[i] * x + x0_lambdas[i] * x0
            for coefs, rows in residual_inputs:
                x = x + coefs[i] * rows

            # A gate per head can close what attention found before it joins the stream.
            if layer.attention != "none":
                attn_idx = ATTENTION_LAYERS.index(i)      # its place in the banks of attention
                w_qkv, w_out = attn[attn_idx]
                scale_in, scale_out = attention_scales[2 * i:2 * i + 2]
                n = rms_norm(x)
                qkv = linear_main_grad(n, w_qkv, scale_in)
                attn_args = attn_args_by_kind[layer.attention, layer.window]
                y = self.attend(layer, n, qkv, value_embeds.get(i, ()), cu_seqlens, attn_args)
                y = y * sigmoid_gate(n[..., :GATE_INPUTS], self.attn_gate_bank[attn_idx])[..., None]
                x = x + linear_main_grad(y.flatten(2), w_out, scale_out)

            x = x + relu_sq_mlp(rms_norm(x), *mlp[i])
            if layer.save_as:
                saved[layer.save_as] = x

        # A learnt share of what an earlier layer kept is taken back: the head sees what the later ones found.
        return rms_norm(x - scalars["backout"].type_as(x) * saved[BACKOUT])

    def embed_inputs(self, batch: Batch, scalars: dict, row_buffers: dict):
        """Read the tables. Returns all that enters the layers, rows (B, T, D) each:
        x0       the normalised embedding, where the residual stream begins
        streams  (share by layer, rows) of what every layer mixes in: bigrams, then tables of n-grams
        values   depth -> [(number of the gate, rows)] of what joins the attention values of a layer"""
        # Each token's embedding gets a gated share of the one before it in the slot, over documents.
        e, = self.lookup("embed", batch, row_buffers)
        gate = scalars["smear"].type_as(e) * sigmoid_gate(e[:, 1:, :GATE_INPUTS], self.smear_gate)
        smeared = torch.cat((e[:, :1], e[:, 1:] + gate * e[:, :-1]), dim=1)
        x0 = rms_norm(smeared)
        residual_inputs = [(scalars["bigram"].unbind(), *self.lookup("bigram_embed", batch, row_buffers))]
        value_rows = self.lookup("value_embed", batch, row_buffers)
        value_embeds = {}
        for i, layer in enumerate(LAYERS):
            if layer.value_embed is not None:
                value_embeds[i] = [(layer.value_embed, value_rows[layer.value_embed])]

        # Gates of n-gram tables come after those of the value tables, in the order of the tables.
        gate_idx = NUM_VALUE_EMBEDS
        for ngram in self.ngrams:
            rows, = self.lookup(ngram.label, batch, row_buffers)
            if ngram.signs:
                rows = rows * F.embedding(batch.sign_ids[ngram.label], self.sign_vectors)
            if ngram.layer is None:
                residual_inputs.append((scalars[ngram.label].unbind(), rows))
            else:
                value_embeds.setdefault(ngram.layer, []).append((gate_idx, rows))
                gate_idx += 1
        return x0, residual_inputs, value_embeds

    def lookup(self, label: str, batch: Batch, row_buffers: dict):
        """Look up rows by the batch's index, (B, T) or (B, lookups, T): one (B, T, D) per lookup."""
        index = batch.row_index[label]
        rows, row_grads = row_buffers[label]
        # A lookup for each read: its gradient goes to the row gradients as it comes up, and is stacked with no other.
        planes = index.unbind(1) if index.dim() == 3 else [index]
        return [RowLookup.apply(rows, plane, row_grads) for plane in planes]

    def attend(self, layer: Layer, n: Tensor, qkv: Tensor, value_rows: list,
               cu_seqlens: Tensor, attn_args: AttentionArgs):
        """Do one layer's attention, up to its gate and output matrix: qkv (B, T, 3D) of n (B, T, D) -> (B, T, H, E).
        value_rows: (number of the gate, rows (B, T, D)) that join the values. Angles are of positions in the slot."""
        B, T, _ = n.shape
        q, k, v = qkv.view(B, T, QKV, self.num_heads, self.head_dim).unbind(2)
        q = rms_norm(q)
        k = rms_norm(k)
        # A gate from 0 to 2 for each head's rows. Plain layers look at the row too, paired ones do not.
        for gate_idx, rows in value_rows:
            features = n[..., :GATE_INPUTS]
            if layer.attention == "plain":
                half = GATE_INPUTS // 2
                features = torch.cat((n[..., :half], rows[..., :half]), dim=-1)
            gate = 2 * sigmoid_gate(features, self.ve_gate_bank[gate_idx])
            v = v + gate[..., None] * rows.view(v.shape)

        # Paired layers put heads j and j + H/2 of token t at 2t and 2t + 1 of one sequence. The angles follow another
        # pairing, even heads at 2t and odd heads at 2t + 1: the peer assigns them before it regroups, and its published
        # losses contain that (RECIPE 2.4).
        per_token = 1                                                         # positions
        if layer.attention == "paired":
            per_token = 2
            cu_seqlens = 2 * cu_seqlens
        cos = self.rotary_cos[:per_token * T].view(T, 1, per_token, -1)           # alike for all heads
        sin = self.rotary_sin[:per_token * T].view(T, 1, per_token, -1)
        by_position = (B, T, self.num_heads // per_token, per_token, self.head_dim)
        q = apply_rotary(q.view(by_position), cos, sin)
        k = apply_rotary(k.view(by_position), cos, sin)
        # The half of a key that does not rotate is that of the token before, in its document or not.
        if layer.key_offset:
            rotated, unrotated = k.chunk(2, dim=-1)
            shifted = torch.cat((unrotated[:, :1], unrotated[:, :-1]), dim=1)     # a slot's first token keeps its own
            k = torch.cat((rotated, shifted), dim=-1)
        flat = [x.reshape(-1, self.num_heads // per_token, self.head_dim) for x in (q, k, v)]
        return self.attention(*flat, cu_seqlens, attn_args).view(v.shape)


# ====== Section 8: Optimizer ==========================================================================================
# Reductions are launched, and updates computed, in two orders that may differ. NorMuon comes first, because it overlaps
# the all-to-all of row gradients. N-gram tables are inserted before the last group.
REPLICATED = "replicated"                # label of the group of all parameters that every rank updates in full
REDUCE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", REPLICATED)
UPDATE_ORDER = REDUCE_ORDER              # of updates and their gathers; the two may differ
POLAR_EXPRESS = (                        # (a, b, c) of each step (arXiv 2505.16932, RECIPE 3.1)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
DOWN_LR_MUL = 2.0                        # down matrices of the MLP, on top of the factor of their shape

def polar_express(x):
    """Approximate the polar factor of each matrix, (M, r, c): singular values go to 0.86 .. 1.14. Keeps the dtype."""
    norm = x.norm(dim=(-2, -1), keepdim=True)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT                                                              # the smaller of the two Gram matrices
    x = x / (1.02 * norm + 1e-6)                                              # a margin of 2 % (RECIPE 3.1)
    for a, b, c in POLAR_EXPRESS:                                             # x -> (a + b G + c G^2) x, G = x x^T
        gram = x @ x.mT
        higher_terms = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, higher_terms, x, beta=a)
    return x.mT if tall else x

def normuon_direction(grad, momentum, second_moment, mu, beta2: float,
                      polar_dtype: torch.dtype):
    """Return orthogonalised Nesterov momentum, normalised per row at an unchanged Frobenius norm (arXiv 2510.05491).
    grad, momentum (M, r, c); second (M, r, 1), or (M, 1, c) of wide matrices. momentum and second change in place."""
    momentum.add_((grad - momentum) * (1 - mu))
    nesterov = grad * (1 - mu) + momentum * mu
    o = polar_express(nesterov.to(polar_dtype)).to(grad.dtype)

    # Divide each row, or column of a wide matrix, by the running root mean square of its updates.
    axis = -1 if second_moment.shape[-1] == 1 else -2     # the one that second lacks
    mean_square = o.square().mean(dim=axis, keepdim=True)                     # shaped like second
    second_moment.lerp_(mean_square, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()

    # Norms of whole matrices come from the means: o itself is read once more, for the product alone.
    count = grad.shape[axis]                                                  # numbers in each mean
    norm = (count * mean_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scaled_square = mean_square * scale.square()
    scaled_norm = (count * scaled_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    factor = scale * norm / scaled_norm.clamp_min(1e-10)
    return o * factor.to(polar_dtype).to(grad.dtype)                          # rounded, RECIPE 3.1

def with_mantissa(p, mantissa):
    """Join a bf16 weight and the 16 bits below it (i16 words, whose sign is a bit like others) to the f32 weight."""
    upper = p.view(torch.int16).int() << 16
    return (upper | mantissa.int() & 0xFFFF).view(torch.float32)

def normuon_update(p, mantissa: Tensor | None, grad, momentum, second_moment,
                   grad_scale: float, mu, lr, lr_muls, decay, beta2: float):
    """Make one NorMuon step on matrices p (M, r, c), or on the upper halves of f32 weights with a mantissa, in place.
    grad (M, r, c) a plain sum over slots; lr_muls (M, 1, 1); lr (), decay () = weight decay x lr, cautious."""
    grad = grad.to(momentum.dtype) * grad_scale
    update = normuon_direction(grad, momentum, second_moment, mu, beta2, p.dtype)
    rates = lr_muls * lr
    exact = p if mantissa is None else with_mantissa(p, mantissa)
    agrees = update * exact >= 0
    moved = exact - exact * agrees * decay * rates - update * rates           # in that order (RECIPE 3.1)
    if mantissa is None:
        p.copy_(moved)
        return
    # The f32 weight is cut in two halves, never rounded: together they are all of it (RECIPE 3.2).
    words = moved.view(torch.int32)
    p.copy_((words >> 16).to(torch.int16).view(torch.bfloat16))
    mantissa.copy_(words.to(torch.int16))

def cautious_adam(p, update, decay):
    """Return p - update, less decay p where the two agree. NorMuon has >= in place of > (RECIPE 3.3)."""
    agrees = update * p > 0
    return p - (update + p * agrees * decay)

def adam_update(p, grad, m, v, grad_scale: float, betas: tuple,
                eps: float, step_size, decay):
    """Make one dense Adam step in place (RECIPE 3.4): eps joins the uncorrected root, decay is cautious."""
    grad = grad.to(m.dtype) * grad_scale
    beta1, beta2 = betas
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square(), 1 - beta2)
    p.copy_(cautious_adam(p.to(m.dtype), m / (v.sqrt() + eps) * step_size, decay))

def rowwise_update(rows, v, last, grad, grad_scale: float, update_num, beta2: float, eps: float, step_size, decay):
    """Make one update of the requested rows of a row-wise table in place: one second moment per row.
    rows (u, D), v (u,), last (u,) i32, grad (u, D) a plain sum over slots and ranks; number () of the update, from 1;
    step_size () = lr sqrt(1 - beta2^number), decay () = lr^2 x weight decay."""
    grad = grad * grad_scale
    # v decays for all updates that a row missed, as if it had been in each; in f64, rounded once.
    missed = torch.pow(beta2, (update_num - last).double()).to(v.dtype)
    v.copy_(v * missed + (1 - beta2) * grad.square().mean(dim=1))
    last.copy_(update_num.expand_as(last))
    update = grad / (v.sqrt() + eps)[:, None] * step_size
    rows.copy_(cautious_adam(rows.to(grad.dtype), update, decay))

def cpu_scalar(value: float):
    """Return a number that changes every step as a tensor, so that compiled updates need no new graph."""
    return torch.tensor(value, dtype=torch.float64)

def bank_matrices(spec: ParameterSpec, weight):
    """View a NorMuon bank as its matrices (M, r, c), and any other weight as it is."""
    if spec.optimizer != "normuon":
        return weight
    return weight.view(-1, math.gcd(*spec.matrix_heights), spec.shape[-1])        # q, k and v are one part of three

def init_optimizer_state(spec: ParameterSpec, shard):
    """Return the optimizer's state of a parameter or a shard of it: name -> zeros."""
    # The one place that lists it: snapshots, checkpoints and the memory estimate follow.
    shard = bank_matrices(spec, shard)
    zeros = functools.partial(torch.zeros_like, dtype=accum_dtype(shard.dtype))
    if spec.optimizer == "adam":
        return dict(m=zeros(shard), v=zeros(shard))
    # NorMuon takes means of squares along rows, or along columns of wide matrices: the smaller state.
    axis = -1 if shard.shape[-2] >= shard.shape[-1] else -2
    state = dict(momentum=zeros(shard), second=zeros(shard.narrow(axis, 0, 1)))
    if shard.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(shard, dtype=torch.int16)
    return state


def update_scalars(cfg: Config, spec: ParameterSpec, step_cfg: StepConfig) -> tuple[int, Tensor, Tensor]:
    """Return the number of an Adam or row-wise update, from 1, its step size and its weight decay."""
    update_every = spec.table.update_every if spec.table else cfg.adam_every
    update_num = (step_cfg.step + 1) // update_every
    beta1, beta2 = spec.betas
    lr = step_cfg.adam_lr * spec.lr_mul
    bias_correction = math.sqrt(1 - beta2**update_num) / (1 - beta1**update_num)
    decay = lr * lr * cfg.adam_weight_decay * spec.wd_mul                     # quadratic in the schedule (RECIPE 3.3)
    return update_num, cpu_scalar(lr * bias_correction), cpu_scalar(decay)

def apply_adam(update_fn: Callable, cfg: Config, spec: ParameterSpec, p: Tensor, grad: Tensor, state: dict[str, Tensor],
               step_cfg: StepConfig) -> None:
    """Apply update_fn, `adam_update` or its compiled form, to a parameter or to this rank's shard of it."""
    _, step_size, decay = update_scalars(cfg, spec, step_cfg)
    update_fn(p, grad, state["m"], state["v"], 1 / cfg.seqs_per_step, spec.betas, cfg.adam_eps, step_size, decay)


# ---- Parameter groups. Each reduces its gradient, updates what this rank owns, and owns its optimizer state.
class ReplicatedGroup:
    """All parameters that every rank updates in full. One all-reduce sums their gradients."""
    def __init__(self, cfg: Config, comm: Communicator, specs: list[ParameterSpec], weights: list[Tensor],
                 adam: Callable):
        self.comm = comm
        self.specs = specs
        self.weights = weights
        self.adam = adam
        self.update_every = cfg.adam_every
        self.state = {spec.label: init_optimizer_state(spec, p.data) for spec, p in zip(specs, weights)}

    def has_gradient(self) -> bool:
        """Return whether every parameter has a gradient."""
        return all(p.grad is not None for p in self.weights)

    def launch_reduce(self) -> None:
        """Launch the all-reduce of all gradients in one message, in accum_dtype."""
        self.grad = torch.cat([p.grad.flatten().to(accum_dtype(p.dtype)) for p in self.weights])
        self.work = self.comm.launch(dist.all_reduce, self.grad)

    def update(self, step_cfg: StepConfig) -> None:
        """Wait for the gradients, and update all parameters."""
        wait_for_work(self.work)
        grads = self.grad.split([p.numel() for p in self.weights])
        for spec, p, grad in zip(self.specs, self.weights, grads):
            self.adam(spec, p.data, grad.view_as(p), self.state[spec.label], step_cfg)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for p in self.weights:
            p.grad = None

class ShardedGroup:
    """One parameter with a main_grad, of which each rank updates one of W shards and owns its optimizer state."""
    def __init__(self, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter, units: Tensor, num_matrices: int,
                 grad_dtype: torch.dtype):
        """units: the weight as the matrices or rows that are divided among ranks. num_matrices: of its main_grad."""
        self.comm = comm
        self.spec = spec
        self.weight = weight
        # The weight moves into a buffer of W equal shards, so that collectives work in place. Only they read padding.
        count = len(units)
        self.shard_size = -(-count // comm.world_size)
        self.padded = units.new_zeros(self.shard_size * comm.world_size, *units.shape[1:])
        self.padded[:count] = units
        weight.data = self.padded[:count].view_as(weight)
        first = comm.rank * self.shard_size
        self.slice = slice(first, first + self.shard_size)
        self.shard = self.padded[:count][self.slice]
        self.state = {spec.label: init_optimizer_state(spec, self.shard)}

        # Messages have the dtype of the weight.
        self.main_grad = torch.zeros_like(self.padded, dtype=grad_dtype)
        self.comm_buffer = self.main_grad
        if comm.world_size > 1:
            self.comm_buffer = self.main_grad.to(weight.dtype)                # the same tensor if the dtypes are equal
        weight.main_grad = self.main_grad[:count].view_as(weight)
        weight.write_counts = torch.zeros(num_matrices, dtype=torch.int64)
        self.num_backwards = 0           # backward passes since `zero_grad`; each writes every matrix once

    def has_gradient(self) -> bool:
        """Return whether there was a backward pass since the last update."""
        return self.num_backwards > 0

    def check_writes(self) -> None:
        """Raise RunError unless each backward pass has written every matrix of the main_grad once."""
        counts = self.weight.write_counts
        check(counts.eq(self.num_backwards).all(), f"main_grad of {self.spec.label}",
              found=f"its matrices were written {counts.tolist()} times",
              expected=f"{self.num_backwards} times each, once in every backward pass since the last update",
              hint="a micro-batch was lost or ran twice: call discard_grads, and repeat the step", error=RunError)

    def add_zero_grads(self) -> None:
        """Start a gradient of zeros unless there is one."""
        if self.num_backwards == 0:
            self.num_backwards = 1
            self.weight.write_counts.fill_(1)
            self.main_grad.zero_()

    def launch_reduce(self) -> None:
        """Launch the reduce-scatter of the gradient."""
        self.comm_buffer.copy_(self.main_grad)                                # nothing to do if they are one tensor
        self.grad = self.comm_buffer[self.slice]
        self.work = self.comm.launch(dist.reduce_scatter_tensor, self.grad, self.comm_buffer)

    def update(self, step_cfg: StepConfig) -> Any:
        """Wait for the gradient, update the shard, and launch its all-gather. Returns the work of the all-gather."""
        wait_for_work(self.work)
        self.update_shard(self.grad[:len(self.shard)], step_cfg)
        return self.comm.launch(dist.all_gather_into_tensor, self.padded, self.padded[self.slice])

    def zero_grad(self) -> None:
        """Discard the gradient. The next write overwrites main_grad, so it needs no clearing."""
        self.num_backwards = 0
        self.weight.grad = None
        self.weight.write_counts.zero_()

class BankGroup(ShardedGroup):
    """A bank of matrices, updated by NorMuon on every step."""
    update_every = 1

    def __init__(self, cfg: Config, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter,
                 multiple_micro_batches: bool, normuon: Callable):
        """multiple_micro_batches: of a step on this rank; their gradients accumulate in f32."""
        self.cfg = cfg
        self.normuon = normuon
        units = bank_matrices(spec, weight.data)
        accum = accum_dtype(weight.dtype)
        grad_dtype = accum if multiple_micro_batches else weight.dtype
        super().__init__(comm, spec, weight, units, len(spec.matrix_heights) * len(weight), grad_dtype)

        # Tall matrices take larger steps, by the square root of their aspect ratio; down matrices take twice as large.
        aspect = max(1.0, units.shape[-2] / units.shape[-1]) ** 0.5
        lr_muls = units.new_full((len(units), 1, 1), aspect, dtype=accum)
        if spec.label == "mlp":
            lr_muls[1::MLP_MATRICES] *= DOWN_LR_MUL       # up, down, up, down, ...
        self.lr_muls = lr_muls[self.slice]

    def update_shard(self, grad: Tensor, step_cfg: StepConfig) -> None:
        if len(self.shard) == 0:                          # more ranks than matrices
            return
        cfg = self.cfg
        state = self.state[self.spec.label]
        lr = cpu_scalar(step_cfg.normuon_lr)
        decay = lr * cfg.normuon_weight_decay             # the update multiplies by the learning rate once more
        self.normuon(self.shard, state.get("mantissa"), grad, state["momentum"], state["second"], 1 / cfg.seqs_per_step,
                     cpu_scalar(step_cfg.momentum), lr, self.lr_muls, decay, cfg.normuon_beta2)

class HeadGroup(ShardedGroup):
    """The head, updated by Adam. The gradients of its cycle accumulate in f32."""
    def __init__(self, cfg: Config, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter, adam: Callable):
        self.update_every = cfg.adam_every
        self.adam = adam
        super().__init__(comm, spec, weight, weight.data, 1, accum_dtype(weight.dtype))

    def update_shard(self, grad: Tensor, step_cfg: StepConfig) -> None:
        self.adam(self.spec, self.shard, grad, self.state[self.spec.label], step_cfg)

class TableGroup:
    """A dense table: Adam updates every row of this rank's shard."""
    def __init__(self, spec: ParameterSpec, table: LocalTable | ExchangedTable, adam: Callable):
        self.spec = spec
        self.table = table
        self.adam = adam
        self.update_every = spec.table.update_every
        self.state = {spec.label: init_optimizer_state(spec, table.shard)}

    def has_gradient(self) -> bool:
        """Return whether there was a backward pass since the last update."""
        return self.table.has_grads

    def launch_reduce(self) -> None:
        """Launch the row gradients to the owners of the rows."""
        self.table.launch_reduce()

    def update(self, step_cfg: StepConfig) -> None:
        """Wait for the gradients, and update the shard."""
        grad = self.table.reduced_grads()
        self.adam(self.spec, self.table.shard, grad, self.state[self.spec.label], step_cfg)

    def zero_grad(self) -> None:
        """Discard the gradients, and the cached rows, which the update has changed."""
        self.table.zero_grad()

class RowwiseTableGroup(TableGroup):
    """A row-wise table: an update changes only the requested rows. The row store owns their state."""
    def __init__(self, cfg: Config, comm: Communicator, spec: ParameterSpec, table: RowwiseTable, rowwise: Callable):
        self.cfg = cfg
        self.compiling = comm.compiles(cfg)
        self.spec = spec
        self.table = table
        self.rowwise = rowwise
        self.update_every = spec.table.update_every
        self.state = {}

    def update(self, step_cfg: StepConfig) -> None:
        """Wait for the gradients, update the requested rows, and store them."""
        grad = self.table.reduced_grads()
        active = self.table.active
        update_num, step_size, decay = update_scalars(self.cfg, self.spec, step_cfg)
        # Create the number on the device. Copying it from the host would synchronize.
        update_num = torch.full((), update_num, dtype=torch.int32, device=grad.device)
        if self.compiling:                                # one graph for any number of rows
            for x in (*active, grad):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        self.rowwise(*active, grad, 1 / self.cfg.seqs_per_step, update_num, self.spec.betas[1], self.cfg.adam_eps,
                     step_size, decay)
        self.table.store.write_back(self.table.pending_plan, active)

class Optimizer:
    """NorMuon for banks on every step, Adam for all else every --adam_every steps, row-wise updates for n-gram tables.

    Gradients are sums over slots and ranks; the updates scale them by 1 / S.
    """
    def __init__(self, cfg: Config, comm: Communicator, model: GPT, tables: dict[str, Any],
                 multiple_micro_batches: bool):
        """tables: by label. multiple_micro_batches: of a step on this rank."""
        self.comm = comm
        self.model = model
        adam = functools.partial(apply_adam, compile_fn(adam_update, cfg, comm), cfg)
        normuon = compile_fn(normuon_update, cfg, comm)
        rowwise = compile_fn(rowwise_update, cfg, comm)
        self.groups = {}
        replicated = []
        for spec in parameter_specs(cfg):
            label = spec.label
            if spec.optimizer == "rowwise":
                self.groups[label] = RowwiseTableGroup(cfg, comm, spec, tables[label], rowwise)
            elif spec.table:
                self.groups[label] = TableGroup(spec, tables[label], adam)
            elif spec.optimizer == "normuon":
                weight = model.get_parameter(label)
                self.groups[label] = BankGroup(cfg, comm, spec, weight, multiple_micro_batches, normuon)
            elif spec.matrix_heights:
                self.groups[label] = HeadGroup(cfg, comm, spec, model.get_parameter(label), adam)
            else:
                replicated.append(spec)
        weights = [model.get_parameter(spec.label) for spec in replicated]
        self.groups[REPLICATED] = ReplicatedGroup(cfg, comm, replicated, weights, adam)
        self.sharded_groups = {label: group for label, group in self.groups.items() if isinstance(group, ShardedGroup)}
        # The optimizer state that this rank owns, by label. Snapshots and checkpoints use its names.
        self.state = {}
        for group in self.groups.values():
            self.state |= group.state
        # N-gram tables are inserted into both orders. A group that an order omits would never be trained.
        ngrams = [table.label for table in cfg.tables]
        orders = ((*order[:-1], *ngrams, order[-1]) for order in (REDUCE_ORDER, UPDATE_ORDER))
        self.reduce_order, self.update_order = orders
        assert sorted(self.reduce_order) == sorted(self.update_order) == sorted(self.groups), "each group once in each"

    def add_zero_grads(self) -> None:
        """Start gradients of zeros where there are none, so that a rank without data joins the reductions."""
        for group in self.sharded_groups.values():
            group.add_zero_grads()
        for p in self.groups[REPLICATED].weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, step_cfg: StepConfig) -> None:
        """Reduce gradients, update the parameters that are due, gather the results, and clear their gradients.

        Raises RunError if a gradient is missing, or if a main_grad was not written once in every backward pass.
        """
        # Check before anything is launched, while no weight has changed.
        due = [label for label, group in self.groups.items() if (step_cfg.step + 1) % group.update_every == 0]
        for label in due:
            if label in self.sharded_groups:
                self.sharded_groups[label].check_writes()
        missing = sorted(label for label in due if not self.groups[label].has_gradient())
        check(not missing, "optim_step", found=f"no gradient of {missing}",
              expected="a gradient of every parameter that is due", hint="call forward_backward first", error=RunError)

        # While they are tied, head and embedding are one parameter with one gradient.
        head = self.model.lm_head
        tied_update = step_cfg.tied and "embed" in due
        if tied_update:
            self.groups["embed"].table.add_grads_to_head(head.main_grad)
            due.remove("embed")

        # Launch all reductions before the first update, and all gathers before waiting for one.
        for label in self.reduce_order:
            if label in due:
                self.groups[label].launch_reduce()
        gathers = []
        for label in self.update_order:
            if label in due:
                gathers.append(self.groups[label].update(step_cfg))
                self.groups[label].zero_grad()
        for work in gathers:
            wait_for_work(work)
        if tied_update and self.comm.world_size == 1:     # with more ranks, its rows are read from the head
            self.model.embed.copy_(head.t())
        if step_cfg.untie_after:
            self._untie()

    def _untie(self) -> None:
        """Make head and embedding two parameters. The embedding starts with the head's weights and moments."""
        W = self.comm.world_size
        head = self.model.lm_head                         # (D, V)
        # The head's moments are sharded along D, and the embedding's along V: rank r owns rows r, r + W, ...
        for name, moment in self.state["embed"].items():
            C, D = moment.shape
            owned = self.state["lm_head"][name]
            padding = self.sharded_groups["lm_head"].shard_size - len(owned)
            padded = F.pad(owned, (0, W * C - head.shape[1], 0, padding))
            sent = padded.t().view(C, W, -1).transpose(0, 1).contiguous()     # grouped by owner
            received = sent.clone()
            wait_for_work(self.comm.launch(dist.all_to_all_single, received, sent))
            moment.copy_(received.transpose(0, 1).reshape(C, -1)[:, :D])
        rows = head.t()[self.comm.rank::W]
        self.groups["embed"].table.shard[:len(rows)] = rows


# ====== Section 9: Engine =============================================================================================
EVAL_CHUNK = 8192                        # rows of validation logits at a time: evaluation never decides the memory
RECOMPILE_LIMIT = 64                     # graphs of one function: each set of shapes, each span of the reference

class StepLoss(NamedTuple):
    """Unscaled loss of one forward_backward on this rank; on the device, nothing waited for."""
    seq_sums: Tensor                     # (b,) f32 or f64: sum over the slot's positions
    num_tokens: int

class Engine:
    """Model, tables and optimizer of this rank: forward and backward passes, updates, evaluation, state.

    Independent of the schedule, except for the `StepConfig` of a step, and of logs.
    """
    def __init__(self, cfg: Config, comm: Communicator, attention: Callable, head_precision: str | None,
                 micro_batch_size: int = 0):
        """precision: of the head, "plain", "fp8" or "emulated"; None: no optimizer. micro_batch_size: 0 for all."""
        self.cfg = cfg
        self.comm = comm
        self.head_precision = head_precision
        self.rotary = None                                # the Rotary whose angles the model has
        self.accum_dtype = accum_dtype(getattr(torch, cfg.dtype))
        self.micro_batch_size = micro_batch_size or cfg.seqs_per_step // comm.world_size

        # Buffers fit the largest batch of the run, so that shapes and addresses never change.
        largest_batch = max(stage.batch_tokens for stage in cfg.stages)
        max_seq_len = max(cfg.val_batch_tokens, largest_batch) // cfg.seqs_per_step
        specs = table_specs(cfg)
        self.num_rows = {spec.label: spec.num_rows for spec in specs}
        self.shard_rows = {spec.label: spec.shard_rows(comm.world_size) for spec in specs}
        self.model = GPT(cfg, attention, max_seq_len, self.shard_rows)
        self.reseed(cfg.seed)
        self.model.to(comm.device)
        self.tables = {}
        weights = dict(self.model.named_parameters())
        for spec in specs:
            max_tokens = spec.update_every * largest_batch // comm.world_size if head_precision else 0
            if spec.rowwise:
                table = RowwiseTable(spec, cfg, comm, max_tokens)
            elif comm.world_size == 1:
                table = LocalTable(weights[spec.label])
            else:
                table = ExchangedTable(spec, cfg, comm, weights[spec.label], max_tokens, self.model.lm_head)
            self.tables[spec.label] = table

        # Only what is called often, and with few sets of shapes, is compiled.
        self.compiling = comm.compiles(cfg)
        if self.compiling:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.model_hidden = compile_fn(self.model.hidden_states, cfg, comm)
        self.model_losses = compile_fn(self.model.losses, cfg, comm)
        self.next_token_losses = compile_fn(next_token_losses, cfg, comm)
        if head_precision:
            multiple_micro_batches = self.micro_batch_size * comm.world_size < cfg.seqs_per_step
            self.optimizer = Optimizer(cfg, comm, self.model, self.tables, multiple_micro_batches)

    @torch.no_grad()
    def reseed(self, seed: int):
        """Give all weights their initial values."""
        for label, weight in initial_weights(self.cfg, seed):
            self.model.get_parameter(label).copy_(self.local_part(label, weight))

    def local_part(self, name: str, whole: Tensor):
        """Return what this rank keeps of a whole weight or moment; of a table every W-th row, and zeros after them."""
        label, is_moment, _ = name.partition(".")
        if is_moment and label in self.optimizer.sharded_groups:
            return whole[self.optimizer.sharded_groups[label].slice]
        if label not in self.shard_rows:
            return whole
        rows = whole[self.comm.rank::self.comm.world_size]
        return F.pad(rows, (0, 0, 0, self.shard_rows[label] - len(rows)))

    def forward_backward(self, batch: Batch, step_cfg: StepConfig, loss_scale: float = 1.0) -> StepLoss:
        """Add loss_scale * d(sum of this rank's slot losses) to the gradients. Does not wait for the device.
        A weight of 0 adds zeros, whatever the loss: this rank still takes part in the update."""
        # The rows of the tables were launched after the last update; wait for them here.
        attn_args_by_kind = self._set_attention(step_cfg, min(self.cfg.max_doc_len, batch.tokens.shape[1]))
        row_buffers = {}
        for label, table in self.tables.items():
            row_buffers[label] = table.rows_for_forward(batch.plans.get(label))

        # Scalars are made on the device: a copy from the host would wait.
        scalar = functools.partial(torch.full, (), dtype=self.accum_dtype, device=self.comm.device)
        weights = torch.stack([scalar(weight) for weight in step_cfg.mtp_weights])
        scale = scalar(loss_scale)

        # Micro-batches change nothing but rounding: each adds its sums to the same gradients.
        sums = []
        for micro_batch in self._micro_batches(batch):
            losses = self.model_losses(micro_batch, weights, scale, attn_args_by_kind, self.head_precision,
                                       row_buffers)
            seq_sums = losses.sum(dim=1)
            if loss_scale:
                for group in self.optimizer.sharded_groups.values():
                    group.num_backwards += 1
                seq_sums.sum().backward(scale)
            else:
                self.optimizer.add_zero_grads()
            sums.append(seq_sums.detach())
        return StepLoss(torch.cat(sums), batch.tokens.numel())

    def optim_step(self, step_cfg: StepConfig):
        """Update what this step updates with the gradients so far, and clear these."""
        self.optimizer.step(step_cfg)

    def prefetch_rows(self, plans: dict[str, RowPlan]) -> None:
        """Start to copy the rows of the next step from host memory to the device, before `optim_step`."""
        for label, plan in plans.items():
            self.tables[label].prefetch(plan)

    def fetch_rows(self, plans: dict[str, RowPlan]) -> None:
        """Launch the all-to-all of the rows that the next step looks up, after `optim_step`."""
        for label, plan in plans.items():
            self.tables[label].fetch(plan)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], step_cfg: StepConfig):
        """Return the mean loss per token (nats) over all ranks' batches: next token, no fp8, documents uncut."""
        # The sum stays on the device, so that no batch waits for a copy, and in f64: it is of millions of losses.
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        tokens = 0
        for batch in batches:
            attn_args_by_kind, row_buffers = self._eval_inputs(batch, step_cfg)
            for micro_batch in self._micro_batches(batch):
                rows = self.model_hidden(micro_batch, attn_args_by_kind, row_buffers).flatten(0, 1)
                for y, targets in zip(rows.split(EVAL_CHUNK), micro_batch.targets.flatten().split(EVAL_CHUNK)):
                    losses = self.next_token_losses(y, self.model.lm_head, targets)
                    total += losses.sum(dtype=torch.float64)
            tokens += batch.targets.numel() * self.comm.world_size
        self.comm.synchronize()          # has a time limit, and float() has none
        return sum(self.comm.all_gather(float(total))) / tokens

    @torch.no_grad()
    def next_logits(self, tokens: list, step_cfg: StepConfig):
        """Return softcapped logits (V,) of the token that follows the last that fit a validation slot. Collective."""
        # A slot has a length that attention takes; no position looks at those after it, which are padding.
        context = tokens[-(self.cfg.val_batch_tokens // self.cfg.seqs_per_step):]
        length = -(-len(context) // SEQ_MULTIPLE) * SEQ_MULTIPLE
        padded = np.zeros(length + 1, np.uint16)
        padded[:len(context)] = context
        seq = PackedSeq(padded, np.asarray([0, length], np.int32))
        batch, = build_batches(self.cfg, self.comm, None, "sample", [step_cfg], [[seq]])
        batch = batch.to(self.comm.device)
        hidden_states = self.model.hidden_states(batch, *self._eval_inputs(batch, step_cfg))
        return softcap((hidden_states[0, len(context) - 1] @ self.model.lm_head).to(self.accum_dtype))

    def _eval_inputs(self, batch: Batch, step_cfg: StepConfig):
        """Return the spans of uncut documents, and rows of tables that take no gradient."""
        row_buffers = {}
        for label, table in self.tables.items():
            rows = table.fetch_for_eval(batch.plans.get(label))
            if self.compiling and label in batch.plans:       # one graph for any number of rows
                torch._dynamo.maybe_mark_dynamic(rows, 0)
            row_buffers[label] = rows, None
        return self._set_attention(step_cfg, batch.tokens.shape[1]), row_buffers

    def _set_attention(self, step_cfg: StepConfig, longest: int):
        """Set the rotary tables, and return the spans. longest: upper bound of a document's length in tokens."""
        if step_cfg.rotary != self.rotary:
            self.model.set_rotary(step_cfg.rotary.frequencies)
            self.rotary = step_cfg.rotary
        return attention_args(step_cfg.short_window, step_cfg.long_window, longest, step_cfg.rotary.attn_scale)

    def _micro_batches(self, batch: Batch):
        for first in range(0, len(batch.tokens), self.micro_batch_size):
            micro_batch = batch.map(operator.itemgetter(slice(first, first + self.micro_batch_size)))
            if self.compiling:                                # any number of documents, one graph
                torch._dynamo.maybe_mark_dynamic(micro_batch.cu_seqlens, 1)
            yield micro_batch

    # State: what this rank holds, for a snapshot; as a whole, the same at every W, for a file.
    def state_tensors(self):
        """Return every tensor that a run trains, by name: weights and state of the optimizer."""
        tensors = self.model.state_dict()
        for label, state in self.optimizer.state.items():
            tensors |= {f"{label}.{name}": x for name, x in state.items()}
        return tensors

    def snapshot(self):
        """Copy all that a run changes to the host. Returns the call that puts it back in place, bit by bit."""
        copies = {name: x.to("cpu", copy=True) for name, x in self.state_tensors().items()}
        touched = [(table.store, list(table.store.touched_state())) for table in self.tables.values() if table.store]
        rng = torch.get_rng_state()                           # of the device nothing draws

        @torch.no_grad()
        def restore():
            # Every tensor keeps its address, so that nothing recompiles.
            for name, x in self.state_tensors().items():
                x.copy_(copies[name])
            for store, chunks in touched:
                store.load(chunks)
            self.rotary = None                                # the next step makes its angles
            self.discard_grads()
            torch.set_rng_state(rng)

        return restore

    def discard_grads(self):
        """Forget what calls have added so far; a table also forgets what it has fetched and counted."""
        for label, group in self.optimizer.groups.items():
            if label in self.tables:
                self.tables[label].reset()
            else:
                group.zero_grad()

    def _gather_full(self, name: str, x: Tensor):
        """Return a weight or a moment as a whole, in logical order, on the host of rank 0. Collective."""
        label, is_moment, _ = name.partition(".")
        is_shard = is_moment and label in self.optimizer.sharded_groups
        if label not in self.tables and not is_shard:
            return x.to("cpu", copy=True)
        # Piece by piece: messages go through memory of the device.
        pieces = [self.comm.all_gather(piece.cpu()) for piece in x.split(CHUNK_ROWS)]
        if self.comm.rank != 0:
            return None
        if is_shard:
            return torch.cat(*pieces)                         # few matrices or rows: one piece
        # Row r is at rank r mod W, and padding follows the last.
        rows = torch.cat([torch.stack(everyone, dim=1).flatten(0, 1) for everyone in pieces])
        return rows[:self.num_rows[label]]

    def full_state(self, step_cfg: StepConfig, with_moments: bool):
        """Return weights, without row-wise tables, and optimizer state by name, whole and in logical order, on rank 0's
        host; elsewhere what is sharded is None. Equal at every W. Between cycles; collective.
        values: of the next step to train, which say whether the embedding is still the head."""
        wholes = {name: self._gather_full(name, x) for name, x in self.state_tensors().items()
                  if with_moments or "." not in name}
        if step_cfg.tied:
            wholes["embed"] = wholes["lm_head"].t().contiguous()
        return wholes

    @torch.no_grad()
    def load_state(self, wholes: dict):
        """Copy this rank's part of whole weights and moments in place; `check_tensors` has looked at them."""
        for name, x in self.state_tensors().items():
            x.copy_(self.local_part(name, wholes[name]))
        self.discard_grads()

    def traffic_totals(self) -> dict[str, Counter]:
        """Return by table the bytes that training has exchanged, summed over ranks. Collective."""
        result = {}
        for label, table in self.tables.items():
            result[label] = Counter()
            between_host_and_device = table.store.traffic if table.store else {}
            for totals in self.comm.all_gather({**table.byte_totals, **between_host_and_device}):
                result[label].update(totals)
        return result


# ---- Memory: an estimate before anything is built
USABLE_MEMORY = 0.9                      # of a device: the rest is for its driver, NCCL, the allocator, the compiler
HOST_TABLES = "tables on the host"       # the part that takes memory row by row, as rows are updated
# What a step keeps per token at its peak, in the head: compiled (counted by tests/dry_run.py), or in plain PyTorch.
SAVED_VECTORS = 17                       # of width D, in each layer: 183 in 11 layers, and statistics in f32
SAVED_VECTORS_EAGER = 26
LOGIT_COPIES = 1.5                       # logits in bf16, and their gradient in fp8
LOGIT_COPIES_EAGER = 6                   # the same in f32 or f64

def estimate_memory(cfg: Config, comm: Communicator, attention: Callable, micro_batch_size: int):
    """Return the most memory that a rank takes, bytes by part: activations by the constants above, all else counted."""
    W = comm.world_size
    dtype = getattr(torch, cfg.dtype)
    item = dtype.itemsize
    accum_item = accum_dtype(dtype).itemsize
    largest_batch = max(stage.batch_tokens for stage in cfg.stages)
    parts = Counter()
    for spec in parameter_specs(cfg):
        table = spec.table
        kept = math.prod(spec.shape)     # numbers that have a gradient here
        gradient = accum_item                                 # bytes of each
        if table:
            # A shard, and a cache of the most that a cycle may read. A row-wise table also has the rows of one update
            # on the device, with a host home those of two. (Their state is left out: 8 bytes a row.)
            shard = kept // W
            read = table.update_every * largest_batch * table.lookups_per_token * cfg.model_dim      # by all ranks
            cache = min(kept, read // W) if table.rowwise or cfg.row_comms == "sparse" else kept
            if table.rowwise:
                home = HOST_TABLES if table.location == "host" or not comm.on_cuda else "weights"
                parts[home] += shard * item
                parts["weights"] += min(shard, read) * item * (2 if table.location == "host" else 1)
                kept = cache
            elif W > 1:
                kept = shard + cache
        elif spec.optimizer == "normuon" and micro_batch_size * W >= cfg.seqs_per_step:
            gradient = item                                   # written once, and sent as it is
        elif W > 1 and accum_item > item:
            gradient += item                                  # the copy that is sent
        parts["weights"] += kept * item
        parts["gradients"] += kept * gradient
        if spec.optimizer != "rowwise":
            state = init_optimizer_state(spec, torch.empty(spec.shape, dtype=dtype, device="meta"))
            owners = W if spec.table or spec.matrix_heights else 1
            parts["moments"] += sum(x.nbytes for x in state.values()) // owners

    # Activations of a step of the largest stage. Evaluation, whose logits come in chunks, and updates of rows take
    # less, unless slots are many and short.
    saved_rows = SAVED_VECTORS
    logit_bytes = LOGIT_COPIES * item
    if attention is not attention_varlen:
        saved_rows = SAVED_VECTORS_EAGER
        logit_bytes = LOGIT_COPIES_EAGER * accum_item
    token_bytes = len(LAYERS) * saved_rows * cfg.model_dim * item + int(cfg.padded_vocab * logit_bytes)
    parts["working"] = micro_batch_size * largest_batch * token_bytes // cfg.seqs_per_step
    return parts

def choose_micro_batch_size(cfg: Config, comm: Communicator, attention: Callable):
    """Return how many slots go through the model at once, and the estimate of what that takes. Raises RunError."""
    # They follow from the card, not from what others use of it now: a run is the same each time.
    local = cfg.seqs_per_step // comm.world_size
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if comm.on_cuda:
        total = torch.cuda.mem_get_info(comm.device)[1]
    available = USABLE_MEMORY * min(comm.all_gather(total))
    choices = [m for m in range(local, 0, -1) if local % m == 0]
    if cfg.micro_batch_size:
        choices = [min(cfg.micro_batch_size, local)]
    # As many slots as fit: products are larger then, and graphs run less often.
    for micro_batch_size in choices:
        estimate = estimate_memory(cfg, comm, attention, micro_batch_size)
        if estimate.total() - estimate[HOST_TABLES] <= available:
            return micro_batch_size, estimate
    parts = ", ".join(f"{part} {size / 2**30:.1f} GiB" for part, size in estimate.items())
    raise RunError("memory", found=f"{available / 2**30:.1f} GiB to use", expected=f"room for {parts}",
                   hint="more ranks, a larger device, more and shorter slots (--seqs_per_step=32), "
                        "--micro_batch_size=1, smaller batches in --stages, fewer rows in --tables or location host "
                        "there, a smaller model")


# ---- Files: a save and a checkpoint are folders, whole before they have their name. Loading runs no code.
CHECKPOINT_DIR = "checkpoints"           # folder in the run directory
KEPT_CHECKPOINTS = 2
DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)        # the disk has lost data, or is full
PARTIAL_DIRS = set()                     # folders that this process writes and has not named: its end removes them

def file_sha256(path: Path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def fsync_path(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder, if its file system can do that for a folder."""
    # Some file systems (shared folders, FUSE, CIFS) refuse fsync of a folder, with various codes. Nothing is lost.
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in DISK_ERRORS or not path.is_dir():
            raise

@contextlib.contextmanager
def write_errors(path: Path, error_type: type[TrainerError] = RunError):
    """Turn what the system raises in the body, for a full disk say, into an error of that kind with the path."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:      # torch.save makes RuntimeErrors of what the disk says
        raise error_type(f"writing {path}", error.__context__ or error, "room, and the right to write there",
                   "free some, or name another folder") from None

@contextlib.contextmanager
def read_errors(path: Path):
    """Turn any error in the body, other than our own, into a DataError that names the path."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:           # without torch's text, which advises to let a file run its code
        found = getattr(error, "strerror", None) or f"damaged, unreadable or with code in it ({type(error).__name__})"
        raise DataError(path, found=found, expected="content as this trainer writes it",
                        hint="take another, write it again, or use the trainer that wrote it") from None

def partial_path(directory: Path, run_id: str):
    """Return where a run writes a folder until it is whole; no other run touches it."""
    return directory.with_name(f"{directory.name}.{run_id}.part")

def touched_row_files(engine: Engine):
    """Yield (name, content) of the files with this rank's touched rows of row-wise tables, by logical row number."""
    comm = engine.comm
    for label, table in engine.tables.items():
        if table.store:
            # In pieces, for a table may be larger than the memory that is left.
            for number, (local_rows, state) in enumerate(table.store.touched_state()):
                name = f"rows-{label}-{comm.rank}of{comm.world_size}-{number}.pt"
                yield name, dict(state._asdict(), ids=local_rows * comm.world_size + comm.rank)

def write_directory(folder: Path, run_id: str, files: dict, engine: Engine):
    """Write a new folder with these files of rank 0, name -> bytes or what torch.save takes, and each rank's rows; then
    give it its name. Raises RunError. Collective."""
    comm = engine.comm
    part = partial_path(folder, run_id)
    contents = touched_row_files(engine)                  # each made when the one before it is on the disk
    if comm.rank == 0:
        contents = itertools.chain(files.items(), contents)

    def write(name: str, content):
        path = part / name
        with open(path, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
        fsync_path(path)
        return dict(bytes=path.stat().st_size, sha256=file_sha256(path))

    PARTIAL_DIRS.add(part)
    try:
        with comm.raise_together(), write_errors(part):
            if comm.rank == 0:
                part.mkdir(parents=True)
        with comm.raise_together(), write_errors(part):
            facts = {name: write(name, content) for name, content in contents}
        # The name comes last, when every byte under it is on the disk.
        facts = functools.reduce(operator.or_, comm.all_gather(facts))
        with comm.raise_together(), write_errors(folder):
            if comm.rank == 0:
                write(MANIFEST_FILE, json.dumps(dict(format=max(MANIFEST_FORMATS), files=facts), indent=1).encode())
                fsync_path(part)
                part.rename(folder)                           # fails if another run has taken the name
                fsync_path(folder.parent)
    finally:
        PARTIAL_DIRS.discard(part)
        if comm.rank == 0:
            shutil.rmtree(part, ignore_errors=True)           # of a failure; else nothing has this name any more

def read_tensors(path: Path, manifest: dict):
    """Return what torch.save wrote; no code in it is run. Raises DataError, whatever the file is."""
    with read_errors(path):
        check(path.is_file() and file_sha256(path) == manifest.get(path.name), path,
              found="no such file, or another content than its manifest says", expected="the file as it was written",
              hint="name a folder that --save made; if this is one, it is damaged: copy it again", error=DataError)
        return torch.load(path, "cpu", weights_only=True, mmap=True)

def check_tensors(path: Path, cfg: Config, found, with_moments: bool = False):
    """Raise DataError unless names, shapes and dtypes are those of this config's weights, with or without moments."""
    dtype = getattr(torch, cfg.dtype)
    tensors = {}
    for spec in parameter_specs(cfg):
        if spec.optimizer != "rowwise":
            own_dtype = accum_dtype(dtype) if spec.full_precision else dtype
            weight = tensors[spec.label] = torch.empty(spec.shape, dtype=own_dtype, device="meta")
            if with_moments:
                state = init_optimizer_state(spec, weight)
                tensors |= {f"{spec.label}.{name}": x for name, x in state.items()}
    expected = {name: (x.dtype, *x.shape) for name, x in tensors.items()}
    with read_errors(path):
        found = {name: (x.dtype, *x.shape) for name, x in found.items()}
    for name in expected | found:
        check(found.get(name) == expected.get(name), f"{name} in {path}", found=found.get(name, "no such tensor"),
              expected=expected.get(name, "no such tensor"), hint="use the trainer and settings of that run",
              error=DataError)

def load_rows(folder: Path, manifest: dict[str, str], engine: Engine) -> None:
    """Load the row-wise tables of a save or checkpoint: each rank takes the rows it owns. Raises DataError."""
    comm = engine.comm
    for label, table in engine.tables.items():
        if table.store:
            table.store.clear()
            for name in manifest:
                if re.fullmatch(rf"rows-{label}-\d+of\d+-\d+\.pt", name):
                    content = read_tensors(folder / name, manifest)
                    with read_errors(folder / name):      # rows of another width, dtype or table
                        owned = content["ids"] % comm.world_size == comm.rank
                        rows, v, last = (content[field][owned] for field in RowState._fields)
                        state = RowState(rows.to(table.shard.dtype), v, last)
                        table.store.load_chunk(content["ids"][owned] // comm.world_size, state)

def settings_json(cfg: Config):
    """Return a run's settings as texts of its flags; `read_settings` reads them."""
    return json.dumps({name: format_value(value) for name, value in vars(cfg).items()}, indent=1).encode()

def save_weights(folder: Path, run_id: str, cfg: Config, engine: Engine, step_cfg: StepConfig,
                 token_bytes: list[bytes] | None):
    """Save weights in logical shapes, settings, and the bytes of the tokens. Raises RunError. Collective."""
    files = {"weights.pt": engine.full_state(step_cfg, with_moments=False), SETTINGS_FILE: settings_json(cfg)}
    if token_bytes is not None:
        lines = [b"%s %d\n" % (base64.b64encode(piece), token) for token, piece in enumerate(token_bytes) if piece]
        files[VOCAB_FILE] = b"".join(lines)
    write_directory(folder, run_id, files, engine)

def write_checkpoint(run_dir: Path, run_id: str, content: dict, engine: Engine, step_cfg: StepConfig):
    """Write what the run needs to go on before the step of these values, and keep the last two. Collective."""
    # A checkpoint that cannot be written ends nothing: the next may be.
    comm = engine.comm
    folder = run_dir / CHECKPOINT_DIR
    name = f"step-{step_cfg.step:07d}"
    files = {"run.pt": dict(content, state=engine.full_state(step_cfg, with_moments=True))}
    try:
        write_directory(folder / name, run_id, files, engine)
    except RunError as error:
        comm.print0(f"{error}\nthe run goes on without this checkpoint")
        return
    if comm.rank == 0:
        before = sorted(path for path in folder.glob("step-???????") if path.name < name)
        for old in before[:1 - KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)

def load_checkpoint(run_dir: Path, engine: Engine):
    """Load the newest checkpoint that is whole on every rank; return the rest of it. Raises DataError. Collective."""
    comm = engine.comm
    newest_first = sorted((run_dir / CHECKPOINT_DIR).glob("step-???????"), reverse=True)
    comm.check_agreement(dict(checkpoints=str([path.name for path in newest_first])))
    # What one rank cannot read nobody takes: all ranks go on from the same step.
    for path in newest_first:
        run = path / "run.pt"
        try:
            with comm.raise_together(), read_errors(run):
                manifest = read_manifest(path)
                content = read_tensors(run, manifest)
                wholes = content.pop("state")
                check("moments" not in wholes, run, found="a checkpoint of an older trainer",
                      expected="one of this trainer", hint="resume it with the train_gpt.py in that run directory",
                      error=DataError)
                check_tensors(run, engine.cfg, wholes, with_moments=True)
                engine.load_state(wholes)
                load_rows(path, manifest, engine)
                return content
        except DataError as error:
            comm.print0(f"{error}\nthe checkpoint before {path.name} is taken, if there is one")
    raise DataError(f"checkpoints in {run_dir}", found=[path.name for path in newest_first],
                    expected="a whole one of this trainer",
                    hint="--resume the run before it, if it was itself resumed; or start anew, with "
                         "--checkpoint_every=100")


# ====== Section 10: Loop ==============================================================================================
LOG_FILES = ("log.txt", "log.jsonl")
CONSOLE_STEP_LINES = 20                  # of a whole run, if the console is no terminal
EMPTY_LOG_STATE = dict(tokens=0, steps_done=0, last_val="none", lines={})         # `Log.state` of a run that begins

class Clock:
    """Training time in ms. Waits for the device only when it starts and stops."""
    def __init__(self, comm: Communicator, initial_ms: float = 0.0):
        self.comm = comm
        self.initial_ms = initial_ms     # ms up to the last stop
        self.since = None                # s of the start; None: it stands still
        self.cycle_began = initial_ms    # ms at the last `next_cycle_ms`

    @property
    def ms(self):
        return self.initial_ms if self.since is None else self.initial_ms + (time.perf_counter() - self.since) * 1000

    def start(self):
        self.comm.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.comm.synchronize()
        self.initial_ms = self.ms
        self.since = None

    def next_cycle_ms(self):
        """Return the ms at which the next cycle will begin if this one, which begins now, is as long as the last."""
        now = self.ms
        last = now - self.cycle_began
        self.cycle_began = now
        return now + last

class Log:
    """log.txt for people and existing parsers, log.jsonl as the source of truth, and the console of rank 0.
    Losses are read one Adam cycle late, so that no step waits for the device. Every rank checks its own. beside:
    content of further files of the run directory; earlier: what `state` gave to a checkpoint."""
    def __init__(self, run_dir: Path, comm: Communicator, schedule: Schedule, files: dict,
                 resumed: dict = EMPTY_LOG_STATE):
        self.run_dir = run_dir
        self.comm = comm
        self.schedule = schedule
        self.total_steps = schedule.planned_steps         # steps of the run; a forecast if there is a time budget
        self.tokens = resumed["tokens"]
        self.steps_done = resumed["steps_done"]           # steps
        self.last_val = resumed["last_val"]               # validation, in words
        self.pending = []                # steps whose loss is not read yet: (fields, slot sums, tokens, CUDA event)
        self.files = {}
        self.is_tty = comm.rank == 0 and bool(sys.stderr) and sys.stderr.isatty()  # None if it is closed
        if comm.rank == 0:
            # An existing log is another run's. Without buffers a killed run leaves every line.
            with write_errors(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                for name in LOG_FILES:
                    self.files[name] = open(run_dir / name, "xb", buffering=0)
                for name, content in files.items():
                    (run_dir / name).write_bytes(content)
        for name, info in resumed["lines"].items():
            self._write(name, info.encode())

    def state(self):
        """Return what a checkpoint needs to go on with this log."""
        self.flush()
        return dict(tokens=self.tokens, steps_done=self.steps_done, last_val=self.last_val,
                    lines={name: (self.run_dir / name).read_text("utf-8") for name in self.files})

    def event(self, kind: str, **fields):
        self._write("log.jsonl", (json.dumps(dict(type=kind, **fields)) + "\n").encode())

    def info(self, line: str):
        """Write a line of log.txt, and print it on the console."""
        self._write("log.txt", (line + "\n").encode("utf-8", "replace"))
        self.show_progress("")
        self.comm.print0(line)

    def show_progress(self, text: str) -> None:
        """Replace the last line of a terminal by this text. The next line overwrites it."""
        if self.is_tty:
            with contextlib.suppress(OSError):
                width = shutil.get_terminal_size().columns - 1                # a line that wraps would remain
                print(f"\r\x1b[K{text[:width]}\r", end="", file=sys.stderr, flush=True)

    def _write(self, name: str, data: bytes):
        file = self.files.get(name)                                           # of rank 0, until the log is closed
        if file is not None:
            with write_errors(self.run_dir / name):
                if file.write(data) < len(data):
                    raise OSError("no room for a whole line")

    @contextlib.contextmanager
    def phase(self, name: str, timed: bool = False):
        """Write how long the body took. timed: it was on the clock."""
        began = time.perf_counter()
        yield
        ms = (time.perf_counter() - began) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=timed)
        self.info(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if timed else ''}")

    def step(self, losses: StepLoss, ms: float):
        """Count one more step. ms is host time: on a GPU the step is launched, not finished."""
        self.steps_done += 1
        self.tokens += losses.num_tokens * self.comm.world_size
        fields = dict(step=self.steps_done, train_time_ms=round(ms, 3), tokens=self.tokens)
        if self.schedule.cfg.time_budget:
            progress = self.schedule.progress(self.steps_done - 1)
            fields["progress"] = progress
            self.total_steps = round(self.schedule.planned_steps * self.steps_done / max(progress, 1))
        # On a GPU the copy comes after the step; by the time it is looked at, the device is a cycle further.
        sums = losses.seq_sums
        copied = None
        if sums.is_cuda:
            sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
            copied = self.comm.record_event()
        self.pending.append((fields, sums, losses.num_tokens, copied))
        self.flush(keep=self.schedule.cfg.adam_every)

    def flush(self, keep: int = 0):
        """Write pending lines but for the last `keep` steps'. Raises RunError on a loss that is not finite."""
        while len(self.pending) > keep:
            fields, sums, tokens, copied = self.pending.pop(0)
            if copied is not None:
                self.comm.wait_for(copied)
            loss = float(sums.sum()) / tokens
            step, ms = fields["step"], fields["train_time_ms"]
            self.check_finite(loss, f"training loss of step {step - 1}")
            self.event("step", **fields, train_loss=loss)
            line = f"step:{step}/{self.total_steps} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms"
            self._write("log.txt", (line + "\n").encode())
            seconds_left = (min(self.total_steps, self.schedule.end_step) - step) * ms / step / 1000
            more = f"{seconds_left:.0f} s left, train_loss:{loss:.3f} (sum over predicted tokens)"
            self.show_progress(f"step:{step}/{self.total_steps} {more}")
            if not self.is_tty and step % -(-self.total_steps // CONSOLE_STEP_LINES) == 0:
                self.comm.print0(f"{line} {more}")

    def check_finite(self, loss: float, what: str):
        """Raise RunError unless a loss is finite."""
        check(math.isfinite(loss), what, found=loss,
              expected=f"a finite number (last good validation: {self.last_val})",
              hint="lower --adam_lr and --normuon_lr; --dtype=float32 --head=plain shows if it is an overflow",
              error=RunError)

    def validation(self, loss: float, ms: float, data: ValidationSet):
        """Write the loss after the steps done so far. Raises RunError if it is not finite."""
        self.flush()
        self.check_finite(loss, f"validation loss at step {self.steps_done}")
        self.last_val = f"{loss:.4f} at step {self.steps_done}"
        self.event("val", step=self.steps_done, val_loss=loss, train_time_ms=round(ms, 3), **data.text_metrics(loss))
        self.info(f"step:{self.steps_done}/{self.total_steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms "
                  f"step_avg:{ms / max(self.steps_done, 1):.2f}ms")

    def write_aborted(self, cause: str):
        """Write the last lines of a run that did not finish; no other thread writes after them. Never raises."""
        # The main thread may still be in a step: whatever it writes from here on goes nowhere.
        files, self.files = self.files, {}
        last = {"log.txt": f"aborted after step {self.steps_done}: {' '.join(cause.split())}\n",
                "log.jsonl": json.dumps(dict(type="aborted", step=self.steps_done, cause=cause)) + "\n"}
        for name, file in files.items():
            with contextlib.suppress(Exception):
                file.write(last[name].encode("utf-8", "replace"))

    def close(self):
        for file in self.files.values():
            file.close()
        self.files = {}
        self.show_progress("")

def train_step(engine: Engine, loader: Loader, step_cfg: StepConfig) -> StepLoss:
    """Run one training step, and fetch the table rows of the next one."""
    losses = engine.forward_backward(loader.next(step_cfg), step_cfg)
    next_plans = loader.next_plans()     # waits for the loader at the end of a cycle; the GPU keeps computing
    engine.prefetch_rows(next_plans)     # rows in host memory start their way to the device
    engine.optim_step(step_cfg)
    engine.fetch_rows(next_plans)        # all-to-all of the rows of the next cycle
    return losses

def warm_up(cfg: Config, comm: Communicator, engine: Engine, log: Log):
    """Run every graph the race will need, the largest stage first, on tokens from a formula; then restore the state."""
    # Enough tokens for whatever a cycle of a stage reads. A rank that compiles keeps the others waiting for minutes.
    restore = engine.snapshot()
    cfg = replace(cfg, epochs=0, time_budget=0, val_tokens=cfg.val_batch_tokens,
                  comm_timeout=SLOW_TIMEOUT_FACTOR * cfg.comm_timeout)
    most_tokens = cfg.val_batch_tokens + max(stage.batch_tokens for stage in cfg.stages)
    tokens = 4 * most_tokens * (1 + 2 * SYNTHETIC_DOC_LEN // cfg.max_doc_len)  # long documents are cut to max_doc_len
    headers = [ShardHeader(f"{SYNTHETIC_PREFIX}warm-up#0", tokens, cfg.vocab_size, cfg.bos_id)]
    validation = ValidationSet(cfg, comm, headers, "warm-up")
    schedule = Schedule(cfg)
    steps = [schedule.at(step) for step in schedule.warm_up_steps()]
    cycles = [steps[first:first + schedule.cycle_steps] for first in range(0, len(steps), schedule.cycle_steps)]

    # One phase a cycle, so that a slow compiler is seen at work.
    loader = Loader(cfg, comm, headers, "warm-up")
    loader.start(cycles[0])
    for cycle, following in zip(cycles, [*cycles[1:], []]):
        loader.advance(following)
        with log.phase(f"warm-up of stage {cycle[-1].stage + 1}"):
            for step_cfg in cycle:
                train_step(engine, loader, step_cfg)
    with log.phase("warm-up of validation"):
        # Attention's spans differ by stage, and once more at the end.
        last_of_stage = {step_cfg.stage: step_cfg for step_cfg in steps}
        for step_cfg in (*last_of_stage.values(), schedule.at(schedule.end_step)):
            engine.evaluate(validation.batches(step_cfg), step_cfg)
    loader.close()
    restore()

def schedule_cycle(first: int, schedule: Schedule, clock: Clock) -> list[StepConfig]:
    """Return the StepConfigs of the cycle that begins at step `first`, or [] at the end of training. Collective.

    With --time_budget the clock of rank 0 decides, one cycle ahead, where in the plan the cycle begins.
    """
    budget_ms = 1000 * schedule.cfg.time_budget
    if budget_ms and len(schedule.cycle_progress) <= first // schedule.cycle_steps:
        fraction = clock.comm.all_gather(clock.next_cycle_ms())[0] / budget_ms
        previous = schedule.cycle_progress[-1] if schedule.cycle_progress else 0.0
        schedule.cycle_progress.append(max(previous, fraction * schedule.planned_steps))
    if first >= schedule.end_step:
        return []
    return [schedule.at(step) for step in range(first, min(first + schedule.cycle_steps, schedule.end_step))]

class RunInfo(NamedTuple):
    """What the logs and checkpoints of this process record about its runs."""
    run_id: str
    source: bytes                        # of this file
    raw_cfg: Config                      # from flags and preset, before the shard headers decide sizes
    attention_name: str                  # name and version of the kernel
    fingerprint: dict[str, str]          # settings, hashes and versions on which the results of a run depend
    resumed: dict[str, Any]              # what `check_resumed` returns; {} for a new run

def train_loop(info: RunInfo, loader: Loader, engine: Engine, validation: ValidationSet, clock: Clock, log: Log,
         profiler: torch.profiler.profile | None = None) -> tuple[float, OutOfData | None]:
    """Train until the end of the schedule or of the data. Collective.

    Returns the final validation loss in nats per token, and the error if the data ended early. On the clock: reading,
    packing, row plans, steps, logging. Off the clock: checkpoints and validations.
    """
    schedule = log.schedule
    first_step = log.steps_done
    out_of_data = None
    clock.start()
    with log.phase("first batch", timed=True):
        loader.start(schedule_cycle(first_step, schedule, clock))
    try:
        while log.steps_done < schedule.end_step:
            step_cfg = schedule.at(log.steps_done)
            if step_cfg.checkpoint and step_cfg.step > first_step:
                clock.stop()
                with log.phase("checkpoint"):
                    content = dict(log=log.state(), train_time_ms=clock.ms, cycle_progress=schedule.cycle_progress,
                                   fingerprint=info.fingerprint | dict(seed=str(schedule.cfg.seed)))
                    write_checkpoint(log.run_dir, info.run_id, content, engine, step_cfg)
                clock.start()
            if profiler and step_cfg.step > first_step:
                profiler.step()
            if step_cfg.validate:
                clock.stop()
                log.validation(engine.evaluate(validation.batches(step_cfg), step_cfg), clock.ms, validation)
                clock.start()
            if step_cfg.begins_cycle:
                loader.advance(schedule_cycle(step_cfg.step + schedule.cycle_steps, schedule, clock))
            log.step(train_step(engine, loader, step_cfg), clock.ms)
    except OutOfData as error:           # the steps so far count
        out_of_data = error
    clock.stop()

    # The number of steps of a time budget is known only now. If the schedule was completed, `end` has the wider
    # window of the final validation.
    log.flush()
    if schedule.cfg.time_budget:
        log.total_steps = log.steps_done
        log.event("budget", seconds=schedule.cfg.time_budget, steps=log.steps_done)
    end = schedule.at(log.steps_done)
    with log.phase("evaluation"):
        loss = engine.evaluate(validation.batches(end), end)
    log.validation(loss, clock.ms, validation)
    return loss, out_of_data

def generate(cfg: Config, engine: Engine, step_cfg: StepConfig, token_bytes: list[bytes] | None,
             prompt=()):
    """Return up to sample_tokens tokens after a document start and the prompt, as text or, without pieces, as ids."""
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.bos_id, *prompt]
    for _ in range(cfg.sample_tokens):
        # Columns after the vocabulary are padding, which is never drawn.
        logits = engine.next_logits(tokens, step_cfg)[:cfg.vocab_size].float().cpu()
        check(logits.isfinite().all(), "sample", found="logits that are not finite",
              expected="weights of a run that ended well",
              hint="sample from another save, or train again at a lower learning rate", error=RunError)

        probability = torch.softmax(logits / cfg.temperature, 0)
        drawn = torch.multinomial(probability, 1, generator=generator)
        token = min(engine.comm.all_gather(int(drawn)))   # one text, however each rank rounds
        if token == cfg.bos_id:
            break
        tokens.append(token)
    tokens = tokens[1 + len(prompt):]
    if not token_bytes:
        return "token ids (no vocab.txt beside them): " + " ".join(map(str, tokens))
    return b"".join(token_bytes[token] for token in tokens).decode("utf-8", "replace")


# ====== Section 11: Main ==============================================================================================
EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STORE_TIMEOUT_S = 2.0                    # s for the store at which ranks met to say whether another one ended first
BUSY_CORES_WARN = 0.3                    # in use by other processes during set-up: the log warns above this
ALL_RANKS_TIMEOUT_S = 1.0                # s for all ranks to hear of a signal that is meant for all
EXIT_TIMEOUT_S = 5.0                     # s that an end may take
LOST_CONNECTION_RE = r"(?i)connection (closed|reset|refused)|timed? ?out|broken pipe|socket|gloo|nccl"
POCKET_TOKEN_RE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")                       # as in data/pocket.py
FALLBACK_SAVE_DIR = "save"               # folder in the run directory, of weights that --save could not take

def call_with_timeout(seconds, call):
    """Return what the call returns. Raises TimeoutError when it takes longer; its thread is left running."""
    return ThreadPoolExecutor(1).submit(call).result(seconds)

def init_distributed(cfg: Config) -> Communicator:
    """Pick the device and join the process groups that torchrun describes. Raises ConfigError."""
    # The launch: each rank has to know all of it, or would train alone beside the others.
    env = os.environ
    defaults = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    launch_env = {name: env.get(name, text) for name, text in defaults.items()}
    numbers = (int(text) if text.isdecimal() else -1 for text in launch_env.values())
    rank, local_rank, world_size, local_world_size = numbers
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 and name not in env]
    tasks = env.get("SLURM_NTASKS", "1")
    check(0 <= rank < world_size and local_rank >= 0 and not missing, "launch", found=f"{launch_env} without {missing}",
          expected="all that torchrun sets, with 0 <= RANK < WORLD_SIZE",
          hint=f"torchrun --standalone --nproc_per_node={max(world_size, 1)} train_gpt.py ..., or unset WORLD_SIZE "
               "for a single process")
    check("WORLD_SIZE" in env or tasks == "1", "launch", found=f"{tasks} tasks of Slurm, and no WORLD_SIZE",
          expected="ranks that know each other",
          hint="srun ... torchrun ..., one task a node; or set WORLD_SIZE=1, for each task to train alone")
    usable = max(w for w in range(1, min(world_size, cfg.seqs_per_step) + 1) if cfg.seqs_per_step % w == 0)
    check(usable == world_size, "number of ranks", found=world_size,
          expected=f"a divisor of seqs_per_step={cfg.seqs_per_step}",
          hint=f"torchrun --nproc_per_node={usable} train_gpt.py ...")

    # The device: a GPU for each rank, or the CPU for all.
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    check(cuda or cfg.device != "cuda", "--device=cuda, which the record preset sets", found="no CUDA device",
          expected="an NVIDIA GPU and torch for CUDA", hint="--preset=pocket trains on a CPU in about two minutes")
    check(not cuda or max(local_rank + 1, local_world_size) <= gpus, "more ranks than devices",
          found=f"{local_world_size} ranks, {gpus} GPUs", expected="one GPU for each rank",
          hint=f"--nproc_per_node={gpus} for torchrun")
    comm = Communicator(torch.device("cuda", local_rank) if cuda else torch.device("cpu"), rank, world_size)
    comm.set_thread_device()
    # glibc would give memory back after each step, and get it again page by page with a fault for each.
    if not cuda and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)                                                  # M_TRIM_THRESHOLD of malloc.h: never
        libc.mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: the most bytes of a block that every glibc takes for it
    if world_size == 1:
        return comm

    # The ranks meet. In a thread, since torch itself waits for ever for a port that accepts and says nothing.
    def join():
        patience = timedelta(seconds=cfg.comm_timeout)
        comm.set_thread_device()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=patience)
        return dist.new_group(backend="gloo", timeout=patience)

    try:
        return replace(comm, loader_group=call_with_timeout(cfg.comm_timeout + 1, join))
    except (RuntimeError, ValueError, TimeoutError) as error:
        answer = str(error)[:200] or "nothing that answers as a store of ranks does"
        raise ConfigError("waiting for all ranks", found=f"at {env['MASTER_ADDR']}:{env['MASTER_PORT']}: {answer}",
                          expected=f"{world_size} ranks in {cfg.comm_timeout} s",
                          hint="see that every rank starts; look at MASTER_ADDR and MASTER_PORT") from None

def describe_hardware(comm: Communicator):
    if comm.on_cuda:
        return f"{torch.cuda.get_device_name(comm.device)} x {comm.world_size}"
    name = platform.machine()
    with contextlib.suppress(OSError, TypeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"

def resolve_head_precision(cfg: Config, comm: Communicator):
    """Return the precision of the head: --head, with auto resolved. Raises ConfigError for fp8 without such a GPU."""
    fits = cfg.dtype == "bfloat16" and cfg.model_dim % FP8_MULTIPLE == cfg.padded_vocab % FP8_MULTIPLE == 0
    native = fits and comm.on_cuda and torch.cuda.get_device_capability(comm.device) >= (8, 9)
    check(native or cfg.head != "fp8", "--head=fp8", found=f"{cfg.dtype} on {describe_hardware(comm)}",
          expected="bfloat16 on CUDA capability 8.9 and up",
          hint="--head=auto or plain, or --head=emulated for the same numbers")
    if cfg.head == "auto":
        return "fp8" if native else "plain"
    return cfg.head

# Kernels behind torch's variable-length call by the GPU's major capability, tried in this order; and their packages.
# FA3 is written for 9.x, and there is an official wheel. Two users measured FA4 on 9.x: it was no faster than FA3. A
# maintainer of torch reports that FA4 is slower for variable lengths. No GPU has timed both with this trainer yet.
ATTENTION_BY_CAPABILITY = {9: ("FA3", "FA4", "varlen"), 10: ("FA4", "varlen")}
ATTENTION_PACKAGES = {"FA4": "flash-attn-4", "FA3": "flash-attn-3", "varlen": "torch"}
# A kernel is checked with documents that end inside tiles of 128 and inside windows, empty ones, and one of one token.
CHECK_CU_SEQLENS = (0, 0, 150, 151, 420, 420, 700)
CHECK_WINDOWS = (2, 128, 300, 1000)      # the last is longer than any document
CHECK_LOGIT_STD = 4.0                    # of the logits: so large that one key too many or too few shows
CHECK_TIMEOUT = 60.0                     # s for a kernel to return, once it is compiled

def check_attention(cfg: Config, comm: Communicator, name: str) -> None:
    """Raise AssertionError unless outputs and gradients agree with the reference to the dtype's rounding.
    Raises RunError if the kernel of this name does not return."""
    dtype = getattr(torch, cfg.dtype)
    device = comm.device
    generator = torch.Generator(device).manual_seed(0)
    bounds = torch.tensor(CHECK_CU_SEQLENS, device=device, dtype=torch.int32)
    # The layouts of plain layers, and of paired ones: twice the positions, half the heads.
    for window, (per_token, heads) in itertools.product(CHECK_WINDOWS, ((1, 2), (2, 1))):
        positions = per_token * CHECK_CU_SEQLENS[-1]
        inputs = torch.randn(4, positions, heads, cfg.head_dim, device=device, generator=generator).to(dtype)
        q, k, v, grad = inputs
        if per_token == 1:                                    # a part of qkv, as a layer without value rows has it
            v = torch.cat((q, k, v), dim=1)[:, -heads:]
        attn_args = AttentionArgs(positions, window, CHECK_LOGIT_STD / cfg.head_dim**0.5)
        results = []
        for attend, to_dtype in ((attention_varlen, dtype), (attention_reference, torch.float32)):
            qkv = [x.to(to_dtype).detach().requires_grad_() for x in (q, k, v)]
            out = attend(*qkv, per_token * bounds, attn_args)
            results.append((out.detach(), *torch.autograd.grad(out, qkv, grad.to(to_dtype))))
        # A kernel that never ends blocks the device for this process, so that no other kernel can be tried.
        check(happens_within(CHECK_TIMEOUT, comm.record_event()), f"attention kernel {name}, window {window}",
              found=f"no result after {CHECK_TIMEOUT} s", expected="results within a second",
              hint=f"leave it out: --attention={'reference' if name == 'varlen' else 'varlen'}", error=RunError)
        for found, exact in zip(*results):
            most = 8 * torch.finfo(dtype).eps * float(exact.abs().max())
            torch.testing.assert_close(
                found.float(), exact, rtol=0, atol=most,
                msg=f"its output or a gradient is off by more than {most:.1e}, window {window}, {heads} heads")

def package_version(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None

def choose_attention(cfg: Config, comm: Communicator):
    """Return the first kernel that all ranks find equal to the reference, and its name. Raises ConfigError."""
    if cfg.attention == "reference" or (cfg.attention == "auto" and not comm.on_cuda):
        return attention_reference, "reference"
    names = (cfg.attention,)
    if cfg.attention == "auto":
        capability, _ = torch.cuda.get_device_capability(comm.device)
        names = ATTENTION_BY_CAPABILITY.get(capability, ("varlen",))

    # All ranks take the same kernel: ranks with different ones would not train the same model.
    refusal = ""
    for name in names:
        why = ""
        try:
            if name in ("FA4", "FA3"):
                torch.nn.attention.activate_flash_attention_impl(name)
            elif torch.nn.attention.current_flash_attention_impl():
                torch.nn.attention.restore_flash_attention_impl()
            check_attention(cfg, comm, name)
        except RunError:
            raise
        except Exception as error:                                            # whatever a foreign kernel raises
            why = f"{type(error).__name__} {str(error)[:100]}"
        refusal = next((f"{why} (rank {rank})" for rank, why in enumerate(comm.all_gather(why)) if why), "")
        if not refusal:
            package = ATTENTION_PACKAGES[name]
            return attention_varlen, f"{name} ({package} {package_version(package)})"
        comm.print0(f"attention: {name} does not run here: {refusal}; requirements-gpu.txt names packages")
    check(cfg.attention == "auto" and not cfg.preset.startswith("record"),
          f"--attention={cfg.attention} of preset {cfg.preset}", found=refusal,
          expected="a kernel that runs and agrees with the reference",
          hint="pip install -r requirements-gpu.txt, or --attention=reference, whose time and memory grow with the "
               "windows")
    comm.print0("attention: NO FAST KERNEL: the reference is slower by far; its memory grows with the windows")
    return attention_reference, "reference"

def slow_attention(attention: str, comm: Communicator) -> str:
    """Say that the chosen kernel is slower than others of this GPU; empty if it is not."""
    if not comm.on_cuda:
        return ""
    major, minor = torch.cuda.get_device_capability(comm.device)
    *faster, _ = ATTENTION_BY_CAPABILITY.get(major, ("varlen",))
    name = attention.partition(" ")[0]
    if not faster or name in faster:
        return ""
    return (f"attention kernel {name} is slower than {' or '.join(faster)}, which a GPU of capability {major}.{minor} "
            "can run: requirements-gpu.txt names packages")

def other_cpu_seconds(comm: Communicator):
    """Return s of this machine's cores that other processes have used so far; negative where it does not say.
    Collective."""
    busy = 0.0
    with contextlib.suppress(OSError):
        ticks = Path("/proc/stat").read_text().split()[1:4]                   # user, nice, system
        busy = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return busy - sum(comm.all_gather(time.process_time()))

def write_header(log: Log, info: RunInfo, engine: Engine) -> None:
    """Write the first lines of a run: settings, versions, hardware, sizes."""
    # What another needs to repeat the run: flags, commit, versions.
    cfg = log.schedule.cfg
    comm = log.comm
    of_preset = vars(make_config(dict(preset=cfg.preset)))
    flags = vars(replace(info.raw_cfg, seed=cfg.seed, run_dir=""))
    changed = {name: format_value(value) for name, value in flags.items()
               if value != of_preset[name]}
    config = {name: [vars(row) for row in value] if isinstance(value, tuple) else value
              for name, value in vars(cfg).items()}
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    # All parameters, and those that one token uses: of a table only the rows that it looks up.
    tables = table_specs(cfg)
    table_rows = {table.label: table.num_rows for table in tables}
    params_total = sum(math.prod(row.shape) for row in parameter_specs(cfg))
    rows_unread = sum(table.num_rows - table.lookups_per_token for table in tables)
    facts = dict(
        preset=cfg.preset, started=time.strftime("%Y-%m-%dT%H:%M:%S"), changed=changed, config=config, seed=cfg.seed,
        python=platform.python_version(), torch=torch.__version__, triton=package_version("triton"),
        cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if comm.on_cuda else None,
        git_commit=commit, source_sha256=info.fingerprint["source_sha256"], data_sha256=info.fingerprint["data_sha256"],
        hardware=describe_hardware(comm), world_size=comm.world_size, attention=info.attention_name,
        head=engine.head_precision,
        grad_accum_steps=-(-cfg.seqs_per_step // comm.world_size // engine.micro_batch_size),
        untimed_warmup_steps=len(Schedule(replace(cfg, time_budget=0.0)).warm_up_steps()), target_loss=cfg.target_loss,
        params_total=params_total, params_per_token=params_total - cfg.model_dim * rows_unread, table_rows=table_rows,
        table_bytes=sum(table_rows.values()) * cfg.model_dim * getattr(torch, cfg.dtype).itemsize)
    log.event("resumed" if info.resumed else "header", **facts, **info.resumed)
    changes = ", ".join(f"{name}={text}" for name, text in changed.items())
    for line in (
            "=" * 100,
            f"Running Python {facts['python']}",
            f"Running PyTorch {facts['torch']} compiled for CUDA {facts['cuda'] or 'none'} on {facts['hardware']} "
            f"with world_size {comm.world_size}",
            f"preset {cfg.preset}, {params_total:,} parameters in {cfg.dtype}, attention kernel {info.attention_name}, "
            f"products of the head in {engine.head_precision} precision, seed {cfg.seed}",
            f"changed from the preset: {changes or 'nothing'}",
            "=" * 100,
            f"logs in {log.run_dir}",
            slow_attention(info.attention_name, comm)):
        if line:
            log.info(line)
    if info.resumed:
        log.info(f"goes on after step {log.steps_done} of {info.resumed['source']}, whose lines stand above in the log")
        for name, (then, now) in info.resumed["differs"].items():
            log.info(f"resumed with another {name}: {then} then, {now} now")

def open_log(run_dir: Path, info: RunInfo, schedule: Schedule, engine: Engine, resumed: dict = EMPTY_LOG_STATE) -> Log:
    """Open the log of one run, next to its source and settings. earlier: what `Log.state` gave to a checkpoint."""
    settings = replace(info.raw_cfg, seed=schedule.cfg.seed, micro_batch_size=engine.micro_batch_size)
    files = {Path(__file__).name: info.source, SETTINGS_FILE: settings_json(settings)}
    log = Log(run_dir, engine.comm, schedule, files, resumed)
    write_header(log, info, engine)
    return log

def open_data(raw_cfg: Config, comm: Communicator, source: bytes):
    """Check every shard. Returns the config with all sizes, headers of the shards to train and to validate with, and
    what decides a run's numbers: {flag or fact: text}, with hashes of data and source. Raises TrainerError."""
    train_headers = read_shard_headers(raw_cfg.train_files)
    val_headers = read_shard_headers(raw_cfg.val_files)
    content = dict(data_sha256=verify_shards(train_headers + val_headers), torch=str(torch.__version__),
                   source_sha256=hashlib.sha256(source).hexdigest())
    comm.check_agreement({f"--{name}": format_value(value) for name, value in vars(raw_cfg).items()} | content)
    cfg = resolve_sizes(raw_cfg, train_headers, val_headers)
    check_enough_data(cfg, Schedule(cfg), train_headers, val_headers)
    # Links are followed: it is the same text under any name.
    validated = {os.path.realpath(header.name) for header in val_headers}
    shared = validated.intersection(os.path.realpath(header.name) for header in train_headers)
    if shared:
        comm.print0(f"trained on and validated with, at least: {min(shared)}; the validation losses say nothing about "
                   "other text")
    return cfg, train_headers, val_headers, numeric_settings(raw_cfg) | content

def check_compilers(cfg: Config, comm: Communicator) -> None:
    """Raise ConfigError unless torch.compile and Triton find what they compile with."""
    others = f"g++ {os.environ.get('CC', 'gcc')} clang"
    compilers = os.environ.get("CXX", others).split()                         # for C++ torch tries none but CXX
    check(not comm.compiles(cfg) or any(map(shutil.which, compilers)), "--compile", found="no C++ compiler",
          expected="g++ or another that torch.compile finds", hint="install one (apt install g++), or --compile=0")
    if not comm.on_cuda:
        return

    # Before its first kernel Triton compiles a module for Python, in C. Eager code has kernels of Triton's, too.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    check(any(map(shutil.which, compilers)), "compiling kernels for the GPU",
          found=f"no C compiler, {' or '.join(compilers)}", expected="gcc, clang, or the one that CC names",
          hint="install one (apt install gcc)")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")        # as Triton does, for Debian
    headers = sysconfig.get_paths(scheme)["include"]
    searched = os.pathsep.join([headers, os.environ.get("CPATH", ""), os.environ.get("C_INCLUDE_PATH", "")])
    check(any(Path(folder, "Python.h").is_file() for folder in searched.split(os.pathsep) if folder),
          "compiling kernels for the GPU", found=f"no Python.h in {headers}", expected="the headers of this Python",
          hint="apt install python3-dev, or python3.12-dev for a Python 3.12; or use a Python that comes with them")

def preflight(cfg: Config, run_id: str, run_dirs: list[Path], comm: Communicator):
    """Refuse what would end a run hours later: taken names, no place to save, no compiler. Raises TrainerError."""
    with comm.raise_together():
        check_compilers(cfg, comm)
        if comm.rank > 0:
            return

        for folder in run_dirs:
            check(not any(os.path.lexists(folder / name) for name in LOG_FILES), f"run directory {folder}",
                  found="the log of a run", expected="a folder without one",
                  hint="another --run_dir, or remove what an earlier start has left", error=RunError)
        if cfg.save:
            folder = Path(cfg.save)
            check(not os.path.lexists(folder), f"--save={cfg.save}", found="a name that is taken",
                  expected="a free name", hint="another name; nothing is overwritten")
            with write_errors(folder, ConfigError):
                partial_path(folder, run_id).mkdir(parents=True)
                partial_path(folder, run_id).rmdir()

def check_resume(cfg: Config, resumed: dict, facts: dict, end_step: float):
    """Return dict(step, source, differs). differs: facts that have changed since the checkpoint, name -> (then, now).
    Raises DataError if the data differ, ConfigError if that run is past the end of this one."""
    before = resumed["fingerprint"]
    check(before["data_sha256"] == facts["data_sha256"], f"data to resume {cfg.resume} with",
          found=f"shards of hash {facts['data_sha256'][:16]}...",
          expected=f"those of the run, of hash {before['data_sha256'][:16]}...",
          hint="leave --train_files and --val_files out, or name the same shards in another place", error=DataError)
    done = resumed["log"]["steps_done"]
    check(done <= end_step, f"--max_steps with --resume={cfg.resume}",
          found=f"{cfg.max_steps}: the run would end at step {end_step}",
          expected=f"{done} or more: the run is there already", hint="--max_steps=0, for the whole schedule")
    differs = {name: (before.get(name), facts.get(name)) for name in before | facts
               if before.get(name) != facts.get(name)}
    return dict(step=done, source=cfg.resume, differs=differs)

def finish_run(log: Log, info: RunInfo, engine: Engine, validation: ValidationSet, train_time_ms: float, loss: float,
               num_graphs: int):
    """Write the last lines of a run's log, and the weights. graphs: how many were compiled before the race. Collective.
    Returns the result, and the error of --save or None."""
    cfg = log.schedule.cfg
    comm = log.comm
    if comm.on_cuda:                     # since the race began
        peak = dict(allocated=torch.cuda.max_memory_allocated() >> 20, reserved=torch.cuda.max_memory_reserved() >> 20)
    else:                                                                     # of the process; KiB, on macOS bytes
        unit = 20 if sys.platform == "darwin" else 10
        peak = dict(consumption=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> unit)
    result = dict(val_loss=loss, train_time_ms=round(train_time_ms, 3), steps=log.steps_done, tokens=log.tokens,
                  peak_memory_mib=peak, run_dir=str(log.run_dir), **validation.text_metrics(loss))
    if validation.bytes_per_token:
        log.info(f"validation loss {loss:.4f} nats per token = {result['val_bpb']:.4f} bits per byte; unigram entropy "
                 f"{validation.unigram_nats:.4f} nats, ratio {loss / validation.unigram_nats:.4f}")

    # Facts without which the training time would mislead.
    recompiled = sum(comm.all_gather(torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_graphs))
    if recompiled:
        result["recompiles"] = recompiled
        log.info(f"{recompiled} graphs were compiled after the warm-up: TORCH_LOGS=recompiles says why")
    slow = slow_attention(info.attention_name, comm)
    if slow:
        result["slow_attention"] = slow
    if cfg.profile:
        result["void"] = "profiled"
    elif log.steps_done < log.schedule.end_step:
        result["void"] = "the data ended early"
    if "void" in result:
        log.info(f"this time does not count: {result['void']}")
    if cfg.time_budget:
        result["budget_s"] = cfg.time_budget
    log.info(f"training time {train_time_ms / 1000:.2f} s, {log.steps_done} steps, {log.tokens:,} tokens")
    log.info("peak memory " + " ".join(f"{kind}: {mib} MiB" for kind, mib in peak.items()))

    result["comms"] = engine.traffic_totals()
    touched = {label: sum(comm.all_gather(sum(map(len, table.store.touched_rows()))))
               for label, table in engine.tables.items() if table.store}
    if touched:
        result["touched_rows"] = touched

    # Weights go where --save says, else into the run directory.
    save_error = None
    if cfg.save:
        fate = "lost"
        for folder in (Path(cfg.save), log.run_dir / FALLBACK_SAVE_DIR):
            try:
                save_weights(folder, info.run_id, cfg, engine, log.schedule.at(log.steps_done), validation.token_bytes)
                fate = f"in {folder}"
                break
            except RunError as error:
                save_error = save_error or error
        log.info(f"weights {fate}")
    log.event("result", **result)
    log.close()
    return result, save_error

def report_results(log: Log, engine: Engine, validation: ValidationSet, results: list[dict]):
    """Print a sample, and as the last line on stdout a JSON object with means over the runs. Raises RunError."""
    cfg = log.schedule.cfg
    if cfg.sample_tokens:
        sample = generate(cfg, engine, log.schedule.at(log.steps_done), validation.token_bytes)
        engine.comm.print0(f"{' sample ':-^100}\n{sample}\n{'-' * 100}")
    loss, ms = np.mean([(result["val_loss"], result["train_time_ms"]) for result in results], 0).tolist()
    last = dict(type="result", val_loss=loss, train_time_ms=ms, run_dirs=[result["run_dir"] for result in results])
    if engine.comm.rank == 0:
        print_stdout(json.dumps(last))

def make_profiler(cfg: Config, first: int, end_step: float):
    """Return a profiler for the steps of --profile in a run from step `first` on, or None. Raises ConfigError."""
    if not cfg.profile:
        return None
    start, stop = map(int, cfg.profile.split(":"))
    check(first < start and stop < end_step, f"--profile={cfg.profile}", found=f"steps {first} to {end_step}",
          expected=f"{first} < a < b < {end_step}: it warms up in the step before a, and the one after ends the trace",
          hint=f"--profile={first + 1}:{first + 3}")
    traced = torch.profiler.schedule(skip_first=start - first - 1, wait=0, warmup=1, active=stop - start, repeat=1)
    return torch.profiler.profile(schedule=traced)

def write_trace(profiler: torch.profiler.profile, log: Log) -> None:
    """Write a trace of each rank, and a table of the most expensive operations into the log."""
    trace = log.run_dir / f"trace_rank{log.comm.rank}.json.gz"
    with write_errors(trace):
        profiler.export_chrome_trace(str(trace))
    sort_by = f"self_{log.comm.device.type}_time_total"
    log.info(profiler.key_averages().table(sort_by, 12, max_name_column_width=60))

def describe_exit(error: BaseException | signal.Signals):
    """Return (exit status, what to tell the user) for what ended the run. A bug keeps its traceback."""
    if isinstance(error, signal.Signals):
        return 128 + error, "interrupted" if error == signal.SIGINT else f"ended from outside ({error.name})"
    first_line = str(error).partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first_line:
        error = RunError("out of memory", found=first_line, expected="less at once",
                         hint="--micro_batch_size=1, or more --seqs_per_step")
    elif isinstance(error, OSError):
        error = DataError(str(error.filename or "disk"), found=error.strerror, expected="a file to use",
                          hint="look at disk and rights")
    elif isinstance(error, RuntimeError) and dist.is_initialized() and re.search(LOST_CONNECTION_RE, first_line):
        error = lost_rank_error(first_line)
    if isinstance(error, TrainerError):
        return error.exit_status, f"{type(error).__name__}: {error}"
    return 1, "".join(traceback.format_exception(error))

def agree_on_cause(cause: str, if_alone: str):
    """Agree with the other ranks on what ended the run first. Returns it, and whether this rank prints it.
    alone: takes the place of the cause unless all ranks end within OTHERS_PATIENCE."""
    env = os.environ
    restart = f"restart {env.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=STORE_TIMEOUT_S))
    store.add(f"ended ranks, {restart}", 1)

    def all_ended():
        deadline = time.monotonic() + ALL_RANKS_TIMEOUT_S
        while store.add(f"ended ranks, {restart}", 0) < int(env["WORLD_SIZE"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    if cause != if_alone and not all_ended():
        cause = if_alone
    my_cause = f"{env['RANK']}\n{cause}"
    first = store.compare_set(f"first cause, {restart}", "", my_cause).decode()
    if env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        all_ended()                                                           # the store ends with this process
    return first.partition("\n")[2], first == my_cause

class ExitHandler:
    """The one end of this process, by an error or a signal, and bounded in time."""
    # A signal wakes a thread, which ends the process whatever the main thread waits for in C.
    def __init__(self):
        self.log = None                                                       # of the run that is going on
        self.exiting = threading.Lock()  # taken by whoever ends the process
        self.wakeup_send, self.wakeup_recv = socket.socketpair()
        self.wakeup_send.setblocking(False)               # as set_wakeup_fd wants it
        signal.set_wakeup_fd(self.wakeup_send.fileno(), warn_on_full_buffer=False)
        for number in EXIT_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:                    # ignored: by nohup
                signal.signal(number, lambda *_: None)                        # the thread reads its number
        threading.Thread(target=lambda: self.end(signal.Signals(self.wakeup_recv.recv(1)[0])), daemon=True).start()

    def end(self, error):
        """Say why the run ended, once over all ranks, close its log, and end the process. Does not return."""
        self.exiting.acquire()           # the second waits here for the end
        status, cause = describe_exit(error)
        threading.Timer(EXIT_TIMEOUT_S, os._exit, [status]).start()               # if a dead disk, say, holds this up
        prints = True
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # A signal that only some ranks get means that one was lost: torchrun, or srun, ends the others.
            if_alone = f"RunError: {lost_rank_error(cause)}" if isinstance(error, signal.Signals) else cause
            try:
                meet = functools.partial(agree_on_cause, cause, if_alone)
                cause, prints = call_with_timeout(STORE_TIMEOUT_S + 2 * ALL_RANKS_TIMEOUT_S, meet)
            except Exception:                                                 # a stopped launcher answers nothing
                cause = if_alone
        if prints:
            with contextlib.suppress(Exception):                              # a full pipe that nobody reads, no stderr
                erase = "\r\x1b[K" if self.log and self.log.is_tty else ""              # the line of progress
                call_with_timeout(1, functools.partial(print, erase + cause, file=sys.stderr, flush=True))
        if self.log is not None:
            self.log.write_aborted(cause)
        for part in tuple(PARTIAL_DIRS):
            shutil.rmtree(part, ignore_errors=True)
        os._exit(status)

def train(raw_cfg: Config, comm: Communicator, exit_handler: ExitHandler, source: bytes) -> None:
    """Set up and warm up once, then train once or several times: the whole run in the order in which it happens."""
    # Check first what would end the run after hours of work, before data are read and anything is written.
    start = time.perf_counter()
    before = other_cpu_seconds(comm)
    run_id = comm.all_gather(os.urandom(4).hex())[0]
    # One name for all ranks, whose clocks may differ.
    default_dir = f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{raw_cfg.preset}-{run_id}"
    root = Path(comm.all_gather(raw_cfg.run_dir or default_dir)[0])
    seeds = range(raw_cfg.seed, raw_cfg.seed + raw_cfg.runs)
    run_dirs = [root / f"seed_{seed}" if raw_cfg.runs > 1 else root for seed in seeds]
    preflight(raw_cfg, run_id, run_dirs, comm)

    # Data come before the model: their headers decide sizes, and nothing is worth building on bad ones.
    cfg, train_headers, val_headers, fingerprint = open_data(raw_cfg, comm, source)
    head_precision = resolve_head_precision(cfg, comm)

    # Memory depends on the attention kernel, and the micro-batch on memory. Attention packages may compile now, which
    # takes ranks different times.
    comm.set_timeout(cfg.comm_timeout * SLOW_TIMEOUT_FACTOR)
    attention, attention_name = choose_attention(cfg, comm)
    micro_batch_size, estimate = choose_micro_batch_size(cfg, comm, attention)
    engine = Engine(cfg, comm, attention, head_precision, micro_batch_size)

    # A resumed run continues with the state, log, clock and places of its last checkpoint.
    resumed = dict(log=EMPTY_LOG_STATE, cycle_progress=(), train_time_ms=0.0)
    if cfg.resume:
        resumed = load_checkpoint(Path(cfg.resume), engine)
    schedule = Schedule(cfg, resumed["cycle_progress"])
    resume_facts = check_resume(cfg, resumed, fingerprint, schedule.end_step) if cfg.resume else {}
    first_step = resumed["log"]["steps_done"]
    profiler = make_profiler(cfg, first_step, schedule.end_step)

    # The log of the first run contains set-up and warm-up.
    info = RunInfo(run_id, source, raw_cfg, attention_name, fingerprint, resume_facts)
    seconds = time.perf_counter() - start
    busy = (other_cpu_seconds(comm) - before) / seconds
    log = exit_handler.log = open_log(run_dirs[0], info, schedule, engine, resumed["log"])
    if busy > BUSY_CORES_WARN:
        log.info(f"{busy:.1f} of {os.cpu_count()} cores work for others: the time will mean little")
    log.info("estimated memory: " + ", ".join(f"{part} {size / 2**20:,.0f} MiB" for part, size in estimate.items()))
    log.event("phase", name="set-up", ms=round(1000 * seconds, 3), timed=False)

    # The warm-up compiles and runs every graph, and then restores the state. After it, a rank that is silent is lost.
    with log.phase("validation data"):
        validation = ValidationSet(cfg, comm, val_headers)
    with log.phase("warm-up"):
        warm_up(cfg, comm, engine, log)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if engine.compiling:
        log.event("compiled", graphs=num_graphs)
    # Checkpoints and saves let all ranks wait for the slowest disk. A single rank waits only for its device, which may
    # be slow.
    if not cfg.checkpoint_every and not cfg.save and comm.world_size > 1:
        comm.set_timeout(cfg.comm_timeout)

    restore = engine.snapshot() if cfg.runs > 1 else None
    results, problem = [], None
    for seed, run_dir in zip(seeds, run_dirs):
        # Further runs start from the same state, but with the initial values of their seed.
        if results:
            cfg = replace(cfg, seed=seed)
            schedule = Schedule(cfg)
            log = exit_handler.log = open_log(run_dir, info, schedule, engine)
            with log.phase("reset"):
                restore()
                engine.reseed(seed)

        clock = Clock(comm, resumed["train_time_ms"])
        loader = Loader(cfg, comm, train_headers)
        loader.skip(map(schedule.at, range(first_step)))

        # Models and graphs are many objects, which the garbage collector need not visit in every step.
        gc.collect()
        gc.freeze()
        if comm.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with profiler or contextlib.nullcontext():
            loss, out_of_data = train_loop(info, loader, engine, validation, clock, log, profiler)
        gc.unfreeze()
        loader.close()
        if profiler and profiler.profiler:                # else the data ended before the profiled steps
            write_trace(profiler, log)

        # The result is the last line of a log. After it, only the sample can fail.
        result, save_error = finish_run(log, info, engine, validation, clock.ms, loss, num_graphs)
        results.append(result)
        problem = problem or out_of_data or save_error

    report_results(log, engine, validation, results)
    if problem:
        raise problem

def sample_from_save(flags: Config):
    """Do --sample=DIR "prompt": print text that goes on from the prompt, on any device. Raises TrainerError."""
    # Settings come first: they say what the tensors have to be.
    folder = Path(flags.sample)
    weights = folder / "weights.pt"
    saved = read_settings(folder)
    check_manifest(folder / SETTINGS_FILE, (folder / SETTINGS_FILE).read_bytes())
    manifest = read_manifest(folder)
    tensors = read_tensors(weights, manifest)
    check_tensors(weights, saved, tensors)

    # One rank on any device, without compiler and optimizer; rows of tables stay on the host, where a prompt needs few.
    comm = init_distributed(replace(saved, seqs_per_step=1, device=flags.device))
    dtype = saved.dtype
    if dtype == "bfloat16" and not comm.on_cuda:
        dtype = "float32"
    tables = tuple(replace(table, location="host") for table in saved.tables)
    cfg = replace(saved, compile=0, dtype=dtype, seed=flags.seed, sample_tokens=flags.sample_tokens,
                  temperature=flags.temperature, tables=tables, time_budget=0.0, max_steps=0)
    token_bytes = read_token_bytes(folder, cfg)
    try:
        if token_bytes is None and cfg.vocab_size == GPT2_VOCAB:
            encoding = importlib.import_module("tiktoken").get_encoding("gpt2")
            token_bytes = [encoding.decode_single_token_bytes(token) for token in range(GPT2_BOS_ID)] + [b""]
            prompt = encoding.encode_ordinary(flags.prompt)
        else:
            # Split as data/pocket.py splits its text: known pieces, and single bytes for the rest.
            ids = {piece: token for token, piece in enumerate(token_bytes or ()) if piece}
            words = POCKET_TOKEN_RE.findall(flags.prompt.encode("utf-8", "surrogateescape"))
            known_pieces = [[word] if word in ids else [bytes((byte,)) for byte in word] for word in words]
            prompt = [ids[piece] for piece in itertools.chain(*known_pieces)]
    except Exception as error:           # no package, no network, bytes that no token has
        raise DataError("prompt", found=f"{type(error).__name__}: {error}",
                        expected="bytes of a vocab.txt beside the weights, or GPT-2 tokens by tiktoken, which has "
                                 "them from the network or from TIKTOKEN_CACHE_DIR",
                        hint="leave it out, use other words, or install tiktoken") from None
    engine = Engine(cfg, comm, attention_reference, head_precision=None)
    with read_errors(weights):
        engine.model.load_state_dict(tensors)
    load_rows(folder, manifest, engine)

    schedule = Schedule(cfg)
    sample = generate(cfg, engine, schedule.at(schedule.end_step), token_bytes, prompt)
    print_stdout(f"{' prompt ':-^100}\n{flags.prompt}\n{' sample ':-^100}\n{sample}")

def main(argv: list[str], source: bytes | None = None) -> None:
    """Do what the flags say. Exits with 0: done, 1: the run failed, 2: bad settings or data, 128 + n: by signal n.
    source: text of this file; None: as it is now."""
    exit_handler = ExitHandler()
    try:
        if source is None:
            source = Path(__file__).read_bytes()
        if sys.stdout:                                                        # None if it is closed
            sys.stdout.reconfigure(errors="backslashreplace")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        cfg = load_config(argv)
        if cfg.sample:
            sample_from_save(cfg)
        else:
            train(cfg, init_distributed(cfg), exit_handler, source)
    except SystemExit:                                                        # --help was shown
        pass
    except BaseException as error:
        exit_handler.end(error)
    exit_handler.exiting.acquire()       # a signal that came before has its end
    os._exit(0)                                                               # even if a thread is stuck in a read


if __name__ == "__main__":
    main(sys.argv[1:], SOURCE)

"""Train a small GPT against the clock: the modded-nanogpt speedrun in one file.

    ./run.sh                                                 set up, fetch data, train, print the result and a sample
    python train_gpt.py --preset=pocket                      one process; about two minutes on two CPU cores
    torchrun --standalone --nproc_per_node=8 train_gpt.py    eight GPUs, preset `record`
    python train_gpt.py --help                               all flags

Model, optimizers and schedule are those of modded-nanogpt after its pull request #221 (record 71, 2026-02-15). Two
features are added: ranks exchange only the embedding rows that they look up, and --tables adds hashed n-gram tables in
device or host memory. RECIPE refers to records/RECIPE.md, which has the formulas and their sources. "record 43" is the
43rd record of modded-nanogpt; records of this repository are cited by their path. Credits are in README.md.

Sections. Part I is the race: what a fork changes, read from top to bottom. Importing the file has no side effects.
     1 Settings    layers, stages, n-gram tables, flags, presets
     2 Schedule    Schedule.at(step) -> StepConfig: everything that changes from step to step
     3 Model       parameters and tables with shape, initial value, optimizer and multipliers; GPT
     4 Updates     NorMuon, Adam, row-wise updates; Optimizer: order of the collectives, untying
     5 Step        Engine: forward_backward, optim_step, fetch_rows, evaluate; train_step, train_loop
Part II is machinery. Of part I, sections 6 to 11 use settings, StepConfig and parameter specs; of part II, each section
uses the sections above it.
     6 Base        errors, Communicator (rank, device, collectives), waits, compile_fn
     7 Kernels     PyTorch references and Triton kernels: norm, rotary, attention, MLP, head and loss, rows; main_grad
     8 Data        data shards, their checks, packing of documents into sequences, vocabulary
     9 Rows        embedding tables sharded by row: row plans, exchange between ranks, device and host memory
    10 Batches     batches with their row plans, the background loader, validation batches
    11 Groups      parameter groups: reduction of gradients, shards, optimizer state, gathering of weights
    12 Files       clock, log, checkpoints, saves, sampling
    13 Launch      command line, ranks, attention kernel, memory, warm-up, a run from data to result (`train`), exits
To learn the algorithm, read part I, and of section 7 the PyTorch references: activation, softcap and loss. To learn how
ranks share the work, read sections 9 to 11.

Letters in shapes and formulas, with their values in preset `record`
    W  world size: number of ranks    L  layers [11]                V  padded vocabulary [50,304]
    S  sequences per step [8]         D  model dim [768]            R  rows of a table [bigrams: 251,520]
    B  sequences per micro-batch      H  attention heads [6]        C  rows of a rank's shard: R / W, rounded up
    T  tokens per sequence            E  head dim [128]             G  predicted tokens per position [3, 2, 1 by stage]
    N  tokens per micro-batch, B * T  F  MLP hidden dim [3,072]     M  matrices in a bank
A shape in a docstring follows the name: x (N, D) is a matrix, and x () is a 0-dim tensor. Matmul kernels use the usual
GEMM letters instead: M, N and K are the sizes of one matmul there, (M, K) times (K, N). Section 7 also uses (I, J) for
the shape of any weight matrix. Linear layers store their weight as (output features, input features).

Terms
    sequence        T tokens, packed from documents. A step trains on S sequences, which are independent of each other.
                    Sequences are the unit of data parallelism: sequence s belongs to rank s mod W.
    bank            several matrices stacked in one parameter
    update_every    steps per update of a parameter; gradients accumulate in between. NorMuon updates on every step,
                    Adam on the last of every --adam_every steps, an n-gram table on the last of every 1, 2 or 4 steps.
    update cycle    the update_every steps from one update of a parameter to the next. The Adam cycle is the update
                    cycle of the parameters that Adam updates, --adam_every steps.
    cycle           without a qualifier: the run's cycle, which is the longest update cycle of all parameters. Data is
                    loaded and checkpoints are written in units of whole cycles.
    extension       the last stage of the schedule, --num_extension_steps long. The other stages split the scheduled
                    steps (--num_scheduled_steps) evenly. The planned steps are the scheduled steps and the extension.
    progress        position in the schedule, in planned steps. The progress equals the step, unless --time_budget is
                    set. Then the clock determines the progress.
    tied            head and embedding are one parameter. Untying splits this parameter into two.
    MTP weights     loss weights of the next G tokens (multi-token prediction)
    weight matrix   one matrix of a bank or of another parameter (`WeightMatrix`)
    main_grad       buffer in which backward accumulates the gradient of a weight matrix, instead of in param.grad
    table           an embedding table, sharded by row. The owner of a row is the rank that stores and updates the row.
    dense table     a table of which every update modifies all rows. With W = 1, lookups read its parameter in place.
    row-wise table  a table of which an update modifies only the rows that some rank looked up in the update cycle. The
                    n-gram tables are row-wise.
    row plan        the rows of one table that a rank fetches (receives from their owners) and serves (sends from its
                    shard to the ranks that look them up) in one update cycle
    row cache       device buffer with the rows of a table that a rank has fetched for an update cycle
    row store       where an owner stores the weights and optimizer state of its shard of a row-wise table: in device
                    memory (`DeviceRowStore`) or in host memory (`HostRowStore`)
    step loss       token losses summed over each sequence, averaged over the S sequences; the same for every W
"""
from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # If a standard stream is closed, the next file that is opened gets the descriptor of the stream, and libraries
    # would print into this file. Open /dev/null on the descriptor of every closed stream.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)               # POSIX: open() returns the lowest free descriptor
    # Read the source before the imports. The imports take seconds, and the file may be edited in that time.
    with open(__file__, "rb") as file:
        SOURCE = file.read()
    # Limit how long waiting OpenMP threads spin. If other processes use the cores, spinning makes training 10 times
    # slower. The variable must be set before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # Until `main` installs its signal handlers, let Ctrl-C end the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

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
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
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

# ====== Section 1: Settings ===========================================================================================
class TrainerError(Exception):
    """Base class of all errors that are reported to the user."""
    exit_status = 2

    def __init__(self, what: object, found: object, expected: object, hint: str) -> None:
        # Convert `found` and `expected` to strings, so that the error can be pickled and sent to other ranks. Truncate
        # `found`, because user input may be long.
        super().__init__(what, str(found)[:1000], str(expected), hint)

    def __str__(self) -> str:
        what, found, expected, hint = self.args
        return f"{what}\n  found:    {found}\n  expected: {expected}\n  hint:     {hint}"

class ConfigError(TrainerError):
    """Invalid settings, launch environment or device."""

def check(ok: object, what: object, *, found: object, expected: object, hint: str,
          error: type[TrainerError] = ConfigError) -> None:
    """Raise an exception of class `error` unless `ok` is true."""
    if not ok:
        raise error(what, found, expected, hint)

@dataclass(frozen=True)
class Layer:
    """Features of one transformer layer. LAYERS lists the layers of the model."""
    attention: str                   # "plain", "paired" (heads j and j + H/2 attend as one sequence of 2T) or "none"
    window: str = "short"            # attention window: the "short" one or the "long" one of the current stage
    value_embed: int | None = None   # index of the value embedding to add to the attention values; None: none
    key_offset: bool = False         # in the half of the channels without RoPE, use the key of the previous token
    save_as: str = ""                # name under which the output of the layer is saved; empty: not saved
    add_saved: str = ""              # name of a saved output to gate and add to the input of the layer; empty: none

    def __post_init__(self) -> None:
        check(self.attention in ("plain", "paired", "none") and self.window in ("short", "long"),
              "LAYERS: invalid layer", found=self,
              expected="attention `plain`, `paired` or `none`; window `short` or `long`",
              hint="correct the layer; class Layer describes its fields")
        value_embed_allowed = self.value_embed is None or self.attention != "none"
        check(value_embed_allowed and (not self.key_offset or self.attention == "plain"), "LAYERS: invalid layer",
              found=self, expected="key_offset only with plain attention, value_embed only with attention",
              hint="correct the layer; class Layer describes its fields")

STAGE_SYNTAX = "stages separated by ';', each 'batch_tokens short long lr_mul mtp_start mtp_end [untie]'"
TABLE_SYNTAX = ("n-gram tables separated by ';', each 'label order rows layer signs location update_every lr wd "
                "beta2', where layer is `stream` or a layer index; fields after rows may be omitted from the end")

# Names of saved layer outputs, for Layer.save_as and Layer.add_saved.
SKIP, BACKOUT = "skip", "backout"
# The layers of modded-nanogpt (RECIPE 2.2). Sources: value embeddings, records 9, 14 and 17; skip, records 11 and 45;
# short and long windows, records 12, 13, 20 and 29; no attention in layer 6, record 17; backout, record 40; key offset,
# record 49; gates of the value embeddings and of the skip, record 55; paired heads, record 58.
LAYERS = (
    Layer("paired", "short"),                                                 #  0
    Layer("plain", "short", value_embed=0),                                   #  1
    Layer("paired", "short", value_embed=1),                                  #  2
    Layer("plain", "long", key_offset=True, save_as=SKIP),                    #  3
    Layer("plain", "short"),                                                  #  4
    Layer("paired", "short"),                                                 #  5
    Layer("none", add_saved=SKIP),                                            #  6: MLP only
    Layer("plain", "short", save_as=BACKOUT),                                 #  7: partly subtracted before the head
    Layer("plain", "short", value_embed=2),                                   #  8
    Layer("paired", "short", value_embed=3),                                  #  9
    Layer("plain", "long", value_embed=4, key_offset=True))                   # 10
ATTENTION_LAYERS = tuple(i for i, layer in enumerate(LAYERS) if layer.attention != "none")
NUM_VALUE_EMBEDS = sum(layer.value_embed is not None for layer in LAYERS)

@dataclass(frozen=True)
class Stage:
    """One stage of the schedule. Windows are in blocks of --window_block tokens."""
    batch_tokens: int                # tokens per step, over all ranks
    short_window: int
    long_window: int
    lr_mul: float                    # multiplier of normuon_lr and adam_lr
    mtp_start: tuple[float, ...]     # loss weights of the 1st, 2nd, ... next token (MTP) at the start of the stage
    mtp_end: tuple[float, ...]       # MTP weights at the end of the stage; linearly interpolated in between
    untie: bool = False              # split head and embedding after the Adam cycle in which this stage begins

    def __post_init__(self) -> None:
        what = "--stages: invalid stage"
        hint = f"correct the stage; --stages takes {STAGE_SYNTAX}"
        check(1 <= self.short_window < self.long_window, what, found=self, expected="1 <= short < long window",
              hint=hint)
        check(len(self.mtp_start) == len(self.mtp_end), what, found=self,
              expected="as many MTP weights at the end as at the start", hint=hint)
        check(all(0 <= x <= 1000 for x in (self.lr_mul, *self.mtp_start, *self.mtp_end)), what, found=self,
              expected="lr_mul and MTP weights from 0 to 1,000", hint=hint)

# The stages of modded-nanogpt (RECIPE 4.1). The last stage is the extension after the scheduled steps. Sources: growing
# windows, records 12, 13, 20 and 29; growing batches, record 46; MTP weights and untying after two thirds of the steps,
# record 53.
STAGES = (
    Stage(131_072, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262_144, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393_216, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)))

# {n: (multipliers of the n-gram hash, multipliers of the sign hash)}. A hash has one odd multiplier per token, newest
# token first. The multipliers for n = 2 and 3 are from record 92; the ones for n = 4 were chosen for this file. The
# bigram table of modded-nanogpt is not an NgramTable, and its hash uses BIGRAM_FACTORS.
NGRAM_FACTORS = {
    2: ((36313, 27191), (48271, 30011)),
    3: ((17351, 60961, 45259), (58699, 39779, 26801)),
    4: ((50411, 22787, 64951, 38327), (43399, 56783, 20297, 61403))}
BUILTIN_TABLES = ("bigram_embed", "value_embed", "embed")
TABLE_LOCATIONS = ("device", "host")

@dataclass(frozen=True)
class NgramTable:
    """Settings of a hashed n-gram embedding table, one entry of --tables. See records/guide/NGRAM_TABLES.md."""
    label: str                       # parameter name
    order: int                       # n of the n-grams, a key of NGRAM_FACTORS
    rows: int                        # number of rows; the last row means "no n-gram"
    layer: int | None = None         # add the rows to the attention values of this layer; None: to the residual stream
    signs: int = 0                   # 1: multiply rows by +-1 vectors from a second hash; colliding n-grams then differ
    location: str = "device"         # memory in which the owners store their rows: "device" or "host"
    update_every: int = 2            # steps per update
    lr_mul: float = 37.5             # multiplier of adam_lr
    wd_mul: float = 5.0              # multiplier of adam_weight_decay
    beta2: float = 0.95              # decay of the second moment, per update

    def __post_init__(self) -> None:
        rules = {                    # {`expected` in the error: condition that must be true}
            "a label of letters, digits and _ that ends with _embed": re.fullmatch(r"\w+_embed", self.label, re.ASCII),
            f"a label other than the built-in ones, {BUILTIN_TABLES}": self.label not in BUILTIN_TABLES,
            f"order: one of {list(NGRAM_FACTORS)}": self.order in NGRAM_FACTORS,
            "rows: at least 2 and below 2^31; the last row means \"no n-gram\"": 2 <= self.rows < 2**31,
            f"layer: `stream` or a layer with attention, {ATTENTION_LAYERS}": self.layer in (None, *ATTENTION_LAYERS),
            f"signs: 0 or 1; location: one of {TABLE_LOCATIONS}":
                self.signs in (0, 1) and self.location in TABLE_LOCATIONS,
            "update_every: 1, 2 or 4 steps": self.update_every in (1, 2, 4),
            "lr and wd from 0 to 10^6, beta2 from 0 to 1":
                0 <= self.lr_mul <= 10**6 and 0 <= self.wd_mul <= 10**6 and 0 <= self.beta2 <= 1}
        for expected, holds in rules.items():
            check(holds, "--tables: invalid table", found=self, expected=expected,
                  hint=f"correct the table; --tables takes {TABLE_SYNTAX}")

GATE_INPUTS = 12                     # input features of every gate
FP8_MULTIPLE = 16                    # every dimension of an fp8 matmul must be a multiple of this
# Sequence lengths in tokens must be multiples of SEQ_MULTIPLE on every device, because the fp8 head requires it.
SEQ_MULTIPLE = FP8_MULTIPLE

# The role of a flag determines how --resume treats the flag.
# NUMERIC: the flag affects the results of a run. A resumed run must use the value of the earlier run.
# INHERITED: the flag does not affect the results of a step beyond rounding. A resumed run inherits the value, unless
# the flag is given again. The paths of the data files have this role, because --resume compares the SHA-256 of the data
# instead.
# SINGLE_RUN: the flag applies to a single run. A resumed run does not inherit the value.
NUMERIC, INHERITED, SINGLE_RUN = "numeric", "inherited", "single run"

def flag(group: str, default: Any, unit: str, help: str, choices: tuple = (), lo: float = 0, hi: float = 2**31 - 1,
         role: str = NUMERIC) -> Any:
    """Build a dataclass field of Config, with the metadata of its command-line flag."""
    return field(default=default, metadata=dict(
        group=group, unit=unit, help=help, choices=choices, lo=lo, hi=hi, role=role))

_common = functools.partial(flag, "common", role=INHERITED)
_single_run = functools.partial(flag, "common", role=SINGLE_RUN)
_data = functools.partial(flag, "data")
_model = functools.partial(flag, "model")
_schedule = functools.partial(flag, "schedule")
_optim = functools.partial(flag, "optimizer")
_run = functools.partial(flag, "run", role=INHERITED)

# FA4 and FA3 are FlashAttention packages, varlen is torch's built-in kernel, and the reference is plain PyTorch.
ATTENTION_KERNELS = ("auto", "FA4", "FA3", "varlen", "reference")

@dataclass(frozen=True)
class Config:
    """All settings of a run. Every field is a flag, --field=value. A preset replaces the defaults of some fields."""
    # --help lists flags in the order of the fields, so the common flags are first.
    preset: str = _common("record", "name", "set of defaults: record, record_tables, pocket, pocket_tables, race, "
                          "race_tables or tiny", role=NUMERIC)
    train_files: str = _common("data/fineweb10B/fineweb_train_*.bin", "glob", "training shards, read in name order")
    val_files: str = _common("data/fineweb10B/fineweb_val_*.bin", "glob", "validation shards, read in name order")
    epochs: int = _common(1, "passes", "over the training shards; 0: repeat them forever")
    seed: int = _common(0, "integer", "seed of the initial weights, each parameter from (seed, label), and of samples",
                        role=NUMERIC)
    runs: int = _single_run(1, "runs", "to train in one process after one warm-up, with seeds seed, seed + 1, ...",
                            lo=1, hi=10**4)
    max_steps: int = _common(0, "steps", "to train before stopping early and validating; 0: the whole schedule")
    save: str = _single_run("", "directory", "for the final weights, their settings and the bytes of the tokens; "
                            "empty: do not save")
    sample: str = _single_run("", "directory", "written by --save; generate text with its weights instead of training")
    resume: str = _single_run("", "directory", "of an earlier run, to continue from its last checkpoint with its flags")
    # Documents are packed into sequences, so seqs_per_step affects the losses. Sources: sequences that begin with a
    # document, record 26; max_doc_len, record 29; bigram table, record 62.
    val_tokens: int = _data(10_485_760, "tokens", "to validate on, a multiple of val_batch_tokens", lo=1)
    val_batch_tokens: int = _data(2_097_152, "tokens", "per validation batch, which has seqs_per_step sequences", lo=1)
    max_doc_len: int = _data(2048, "tokens", "truncate training documents to this length", lo=2)
    seqs_per_step: int = _data(8, "sequences", "per step, divided among the ranks; packing depends on it", lo=1)
    vocab_size: int = _data(0, "tokens", "in the vocabulary; 0: as in the shard headers")
    padded_vocab: int = _data(0, "columns", "of the head; 0: vocab_size rounded up to a multiple of 128")
    bos_id: int = _data(-1, "token id", "first token of every document; -1: as in the shard headers", lo=-1)
    bigram_rows: int = _data(0, "rows", "of the bigram table, the last of which means 'no bigram'; 0: 5 * padded_vocab")
    # The number of layers and their features are not flags. LAYERS sets them as in modded-nanogpt. Sources: normalized
    # queries and keys, record 5; bf16 activations, record 10; fp8 head, record 19; bf16 weights, record 57.
    model_dim: int = _model(768, "features", "D, which must equal num_heads * head_dim", lo=GATE_INPUTS, hi=2**16)
    num_heads: int = _model(6, "heads", "per layer; even, because paired layers join heads j and j + H/2",
                            lo=2, hi=2**12)
    head_dim: int = _model(128, "features", "per head, a multiple of 4; rotary embedding rotates half of them",
                           lo=8, hi=2**14)
    attn_scale: float = _model(0.1, "number", "softmax scale before YaRN; queries and keys are normalized")
    tables: tuple[NgramTable, ...] = _model((), "list", TABLE_SYNTAX)
    dtype: str = _model("bfloat16", "type", "of weights and activations", ("bfloat16", "float32", "float64"))
    head: str = _model("auto", "precision", "of the training logits; auto: fp8 if the GPU and the sizes allow it, else "
                       "plain", ("auto", "fp8", "emulated", "plain"))
    # The last stage is the extension. It follows the scheduled steps. Source of lr_floor: record 19.
    num_scheduled_steps: int = _schedule(1507, "steps", "split evenly over all stages but the last", lo=1)
    num_extension_steps: int = _schedule(40, "steps", "of the last stage, at the lowest learning rate")
    stages: tuple[Stage, ...] = _schedule(STAGES, "list", STAGE_SYNTAX)
    window_block: int = _schedule(128, "tokens", "per block, the unit of the windows in --stages", lo=1)
    final_long_window: int = _schedule(20, "blocks", "in the long window of the final validation", lo=1)
    cooldown_frac: float = _schedule(0.55, "fraction", "of the scheduled steps, at their end, over which the learning "
                                     "rate decays", hi=1)
    lr_floor: float = _schedule(0.1, "number", "learning rate multiplier at the end of the cooldown")
    time_budget: float = _schedule(0.0, "seconds", "of training time to fit the schedule into; 0: the planned steps")
    # Learning rates do not include the multipliers of stages and parameters. Sources: Muon, records 3 and 4;
    # momentum warm-up, record 9; momentum cooldown and Adam on every second step, record 39; NorMuon, records 41, 42
    # and 48; cautious weight decay, records 43 and 50.
    normuon_lr: float = _optim(0.023, "number", "learning rate of the attention and MLP matrices")
    normuon_beta2: float = _optim(0.95, "number", "decay of the second moment, one per row of a matrix", hi=1)
    normuon_weight_decay: float = _optim(1.2, "number", "cautious weight decay; the effective decay is "
                                         "lr^2 times this value")
    momentum_min: float = _optim(0.85, "number", "NorMuon momentum at the start and at the end", hi=1)
    momentum_max: float = _optim(0.95, "number", "NorMuon momentum in between", hi=1)
    momentum_warmup_frac: float = _optim(300 / 1547, "fraction", "of all steps, over which the momentum rises", hi=1)
    momentum_cooldown_frac: float = _optim(50 / 1547, "fraction", "of all steps, over which the momentum falls", hi=1)
    adam_every: int = _optim(2, "steps", "per Adam update; gradients accumulate in between", (1, 2))
    adam_lr: float = _optim(0.008, "number", "learning rate of all other parameters, before their multipliers")
    adam_weight_decay: float = _optim(0.005, "number", "cautious weight decay; the effective decay is "
                                      "(lr * multiplier)^2 times this value")
    adam_eps: float = _optim(1e-10, "number", "added to the square root of the uncorrected second moment")
    # The flags below do not affect the results of a step beyond rounding.
    device: str = _run("auto", "device", "auto: CUDA if available", ("auto", "cpu", "cuda"))
    compile: int = _run(-1, "-1, 0 or 1", "use torch.compile; -1: on CUDA only", (-1, 0, 1))
    attention: str = _run("auto", "kernel", "auto: the first that works and matches the reference", ATTENTION_KERNELS)
    row_comms: str = _run("sparse", "mode", "sparse: exchange the table rows that are looked up; dense: whole tables",
                          ("dense", "sparse"))
    debug_rows: int = _run(0, "0 or 1", "fill unfetched rows with NaN, and fail on gradients of unplanned rows", (0, 1))
    micro_batch_size: int = _run(0, "sequences", "per forward and backward pass of a rank; 0: as many as fit in memory")
    val_every: int = _run(250, "steps", "between validations; 0: only the final one")
    target_loss: float = _run(3.28, "nats", "per token that several runs are tested against; 0: no test")
    run_dir: str = _run("", "directory", "for the logs; empty: logs/<run id>", role=SINGLE_RUN)
    checkpoint_every: int = _run(0, "steps", "between checkpoints, each at the start of a cycle; the last two are "
                                 "kept; 0: none")
    profile: str = _run("", "a:b", "trace steps a to b - 1 on every rank; the time of such a run does not count",
                        role=SINGLE_RUN)
    comm_timeout: float = _run(60.0, "seconds", "to wait for another rank or for the loader thread", lo=1)
    sample_tokens: int = _run(96, "tokens", "to generate after training, or with --sample; 0: none")
    temperature: float = _run(0.8, "number", "sampling temperature; lower values favor likely tokens", lo=0.01)
    prompt: str = _run("", "text", "to continue with --sample")

# Stages and tables are written as text in flags, logs and settings files. Only `parse_specs` and `format_spec` read and
# write this text.
def parse_floats(text: str) -> tuple[float, ...]:
    """Parse MTP weights, such as "1,.5,.25". Raises ValueError if a weight is not a number."""
    return tuple(map(float, text.split(",")))

def parse_layer(text: str) -> int | None:
    """Parse NgramTable.layer: a layer index, or None for `stream`, the residual stream."""
    return None if text == "stream" else int(text)

def parse_lr_mul(text: str) -> float:
    """Parse NgramTable.lr_mul, the multiplier of adam_lr."""
    check(text not in ("nearest", "stochastic"), "--tables: invalid 8th field", found=text,
          expected="lr, a number; the rounding mode was removed, because rows are always rounded to nearest",
          hint=f"omit `{text}`")
    return float(text)

# {flag: (class, parser of the 1st field, parser of the 2nd field, ...)}. The last field of a stage is the word `untie`.
SPEC_PARSERS = dict(
    stages=(Stage, int, int, int, float, parse_floats, parse_floats, {"untie": True}.__getitem__),
    tables=(NgramTable, str, int, int, parse_layer, int, str, int, parse_lr_mul, float, float))

def parse_specs(name: str, text: str) -> tuple[Stage, ...] | tuple[NgramTable, ...]:
    """Parse the text of --stages into Stage objects, or the text of --tables into NgramTable objects."""
    # The strict zip raises ValueError for an extra field. The constructor raises TypeError for a missing field that has
    # no default.
    spec_class, *parsers = SPEC_PARSERS[name]
    specs = []
    for field_texts in filter(None, map(str.split, text.split(";"))):         # skip empty specs
        specs.append(spec_class(*(
            parse(field_text) for parse, field_text in zip(parsers[:len(field_texts)], field_texts, strict=True))))
    return tuple(specs)

# Preset `record`, for GPUs: the settings of modded-nanogpt at record 71, which are the defaults of Config.
RECORD = dict(device="cuda")
# Preset `pocket`, for CPUs: the same layers and schedule at width 96, with 1/256 of the tokens per batch. attn_scale
# is larger, so that the bound of the attention logits stays attn_scale * head_dim = 12.8 (RECIPE 2.4).
POCKET = dict(
    train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin",
    val_tokens=65_536, val_batch_tokens=8_192, max_doc_len=256,
    model_dim=96, head_dim=16, attn_scale=12.8 / 16, dtype="float32", head="plain", compile=0,
    stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 256) for stage in STAGES),
    window_block=8, num_scheduled_steps=520, num_extension_steps=20, val_every=180, target_loss=0.0)
# Preset `tiny`, for tests: 12 steps on synthetic tokens, which need no files.
TINY = POCKET | dict(
    train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1",
    val_tokens=1024, val_batch_tokens=512, max_doc_len=24, model_dim=32, num_heads=2,
    stages=parse_specs("stages",         # independent of STAGES, so that a fork can change STAGES and keep this preset
                     "128 1 3 1 1,.5,.25 1,.5,0; 256 3 7 1.52 1,.5 1,0; 384 5 11 1.73 1 1 untie; 384 6 13 1 1 1"),
    window_block=4, num_scheduled_steps=9, num_extension_steps=3, val_every=5, sample_tokens=8)
# Preset `race`: a validation loss below 2.20 in half the time of `pocket` (records/2026-11-25_23_Race).
RACE = POCKET | dict(
    num_scheduled_steps=190, stages=POCKET["stages"][1:], adam_every=1, num_heads=2, head_dim=48, attn_scale=12.8 / 48,
    tables=parse_specs("tables", "trigram_embed 3 20480; fourgram_embed 4 20480"))
# Two tables of 100,000 rows lower the loss of `pocket` by 0.174 nats (records/2026-11-23_11_PocketTables).
LARGE_TABLES = dict(tables=parse_specs("tables", "trigram_embed 3 100000; fourgram_embed 4 100000"))
# `record_tables` has not been run yet; records/2026-11-23_08_Ngrams predicts its time. Source of the signs: record 92.
PRESETS = dict(
    record=RECORD,
    record_tables=RECORD | dict(tables=parse_specs("tables", "more_bigram_embed 2 21000000 stream 1 device 2 70; "
                                                 "trigram_embed 3 21000000 stream 1 device 2 70")),
    pocket=POCKET,
    pocket_tables=POCKET | LARGE_TABLES,
    race=RACE,
    race_tables=RACE | LARGE_TABLES,
    tiny=TINY)


# ====== Section 2: Schedule ===========================================================================================
class Rotary(NamedTuple):
    """RoPE frequencies and softmax scale of the attention in one stage."""
    frequencies: tuple[float, ...]       # E/4 values, in radians per position; they rotate E/2 of the E head features
    attn_scale: float                    # softmax scale, adapted by YaRN

@dataclass(frozen=True)
class StepConfig:
    """All values that the schedule sets for one step."""
    step: int
    stage: int                           # index into cfg.stages
    seq_len: int                         # T, tokens
    # A window counts the earlier tokens that a query attends to, in addition to its own token.
    short_window: int                    # tokens
    long_window: int                     # tokens
    mtp_weights: tuple[float, ...]       # loss weights of the 1st, 2nd, ... next token; their sum need not be 1
    rotary: Rotary
    normuon_lr: float                    # --normuon_lr * Schedule.lr_factor_at(progress)
    adam_lr: float                       # --adam_lr * Schedule.lr_factor_at(progress), before multipliers of parameters
    momentum: float                      # NorMuon momentum
    tied: bool                           # head and embedding are one parameter; the embedding is the transposed head
    untie_after: bool                    # split head and embedding into two parameters after the update of this step
    begins_cycle: bool                   # first step of a cycle of the run
    checkpoint: bool                     # write a checkpoint before this step
    validate: bool                       # validate before this step

ROTARY_BASE = 1024.0                     # the lowest frequency of the first stage is 1 / ROTARY_BASE
# When the window grows, YaRN counts the full turns that a frequency makes within the old window. A frequency with fewer
# turns than YARN_ALPHA is multiplied by old window / new window. A frequency with more turns than YARN_BETA does not
# change.
YARN_ALPHA, YARN_BETA = 1.0, 32.0
YARN_SCALE_GROWTH = 0.2                  # relative growth of the softmax scale per log(new window / old window)

def rotary_by_stage(cfg: Config) -> list[Rotary]:
    """Compute the Rotary of each stage: half-truncated RoPE, adapted to longer windows by YaRN (RECIPE 2.4)."""
    num_frequencies = cfg.head_dim // 4
    frequencies = tuple(ROTARY_BASE ** (-i / (num_frequencies - 1)) for i in range(num_frequencies))
    rotary = [Rotary(frequencies, cfg.attn_scale)]
    for old_stage, new_stage in zip(cfg.stages, cfg.stages[1:]):
        old_window = old_stage.long_window * cfg.window_block
        new_window = new_stage.long_window * cfg.window_block
        # Multiplying a frequency by this ratio keeps its number of turns per window.
        window_ratio = old_window / new_window
        frequencies = []
        for frequency in rotary[-1].frequencies:
            turns = old_window * frequency / (2 * math.pi)
            keep = min(max((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0.0), 1.0)
            frequencies.append(frequency * (window_ratio + keep * (1 - window_ratio)))
        scale_growth = YARN_SCALE_GROWTH * math.log(new_window / old_window) + 1
        rotary.append(Rotary(tuple(frequencies), rotary[-1].attn_scale * scale_growth))
    return rotary

class Schedule:
    """Schedule of a run: `at` maps a step to its StepConfig, the settings that change from step to step (RECIPE 4)."""
    def __init__(self, cfg: Config, cycle_progress: Iterable[float] = ()) -> None:
        self.cfg = cfg
        # The run's cycle is the longest update cycle of all parameters. Data is loaded and checkpoints are written at
        # multiples of cycle_steps.
        self.cycle_steps = max([cfg.adam_every, *(table.update_every for table in cfg.tables)])
        self.cycle_progress = list(cycle_progress)
        self.planned_steps = cfg.num_scheduled_steps + cfg.num_extension_steps
        # All stages but the last split the scheduled steps evenly. The last stage is the extension.
        num_scheduled_stages = len(cfg.stages) - 1
        scheduled_stage_ends = [round(cfg.num_scheduled_steps * (i + 1) / num_scheduled_stages)
                                for i in range(num_scheduled_stages)]
        self.stage_starts = (0, *scheduled_stage_ends)    # progress at which each stage begins
        self.stage_ends = (*scheduled_stage_ends, self.planned_steps)
        untie_starts = (start for start, stage in zip(self.stage_starts, cfg.stages) if stage.untie)
        self.untie_progress = next(untie_starts, math.inf)    # math.inf if no stage unties
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))
        self.rotary = rotary_by_stage(cfg)

    def progress(self, step: int) -> float:
        """Return the progress at the start of a step: the position of the step in the schedule, in planned steps."""
        if self.cfg.time_budget:
            return min(self.cycle_progress[step // self.cycle_steps], self.planned_steps)
        return step

    def first_step_at(self, progress: float) -> float:
        """Return the first step that reaches a position in the schedule, or math.inf if no such step is known yet."""
        if not self.cfg.time_budget:
            return progress
        cycle_idx = bisect.bisect_left(self.cycle_progress, progress)
        return cycle_idx * self.cycle_steps if cycle_idx < len(self.cycle_progress) else math.inf

    @property
    def end_step(self) -> float:
        """Return the step at which training ends: --max_steps or the end of the schedule, whichever is earlier."""
        return min(self.cfg.max_steps or math.inf, self.first_step_at(self.planned_steps))

    @property
    def untie_step(self) -> float:
        """Return the step after whose update head and embedding are split into two parameters."""
        # Untying earlier would lose the gradients that the embedding has accumulated since the start of the Adam cycle.
        step = self.first_step_at(self.untie_progress)
        if step == math.inf:
            return step
        adam_every = self.cfg.adam_every
        return step // adam_every * adam_every + adam_every - 1

    def stage_at(self, progress: float) -> int:
        """Return the index of the stage at a position in the schedule."""
        return min(bisect.bisect_right(self.stage_ends, progress), len(self.stage_ends) - 1)

    def lr_factor_at(self, progress: float) -> float:
        """Return the learning rate multiplier at a position in the schedule (RECIPE 4.2)."""
        cooldown_steps = max(1, self.cfg.num_scheduled_steps - self.cooldown_start)
        fraction = min(max(0.0, (progress - self.cooldown_start) / cooldown_steps), 1.0)
        return self.cfg.stages[self.stage_at(progress)].lr_mul * (1 - fraction) + self.cfg.lr_floor * fraction

    def momentum_at(self, progress: float) -> float:
        """Return the NorMuon momentum at a position in the schedule (RECIPE 4.2)."""
        cfg = self.cfg
        warmup_steps = round(cfg.momentum_warmup_frac * self.planned_steps)
        cooldown_steps = round(cfg.momentum_cooldown_frac * self.planned_steps)
        momentum_range = cfg.momentum_max - cfg.momentum_min
        if progress < warmup_steps:
            return cfg.momentum_min + momentum_range * progress / warmup_steps
        steps_into_cooldown = progress - self.planned_steps + cooldown_steps
        if steps_into_cooldown > 0:
            return cfg.momentum_max - momentum_range * steps_into_cooldown / cooldown_steps
        return cfg.momentum_max

    def at(self, step: int) -> StepConfig:
        """Return the StepConfig of a step. `at(end_step)` is the StepConfig of the final validation."""
        cfg = self.cfg
        progress = self.progress(step)
        stage_idx = self.stage_at(progress)
        stage = cfg.stages[stage_idx]
        # If the schedule is completed, the final validation uses a wider window. YaRN does not adapt to this window.
        long_window_blocks = stage.long_window if progress < self.planned_steps else cfg.final_long_window
        lr_factor = self.lr_factor_at(progress)
        begins_cycle = step % self.cycle_steps == 0

        # The MTP weights are interpolated linearly over the stage (RECIPE 4.1).
        stage_start, stage_end = self.stage_starts[stage_idx], self.stage_ends[stage_idx]
        stage_fraction = (progress - stage_start) / max(1, stage_end - stage_start)
        mtp_weights = [start + (end - start) * stage_fraction for start, end in zip(stage.mtp_start, stage.mtp_end)]
        # Checkpoints are written at starts of cycles only: each multiple of checkpoint_every is rounded up to the next
        # start of a cycle. So a start of a cycle is a checkpoint if and only if
        # step % checkpoint_every < cycle_steps.
        return StepConfig(
            step=step, stage=stage_idx, seq_len=stage.batch_tokens // cfg.seqs_per_step,
            short_window=stage.short_window * cfg.window_block, long_window=long_window_blocks * cfg.window_block,
            mtp_weights=tuple(mtp_weights), rotary=self.rotary[stage_idx], momentum=self.momentum_at(progress),
            normuon_lr=cfg.normuon_lr * lr_factor, adam_lr=cfg.adam_lr * lr_factor,
            tied=step <= self.untie_step, untie_after=step == self.untie_step, begins_cycle=begins_cycle,
            checkpoint=begins_cycle and cfg.checkpoint_every > 0 and step % cfg.checkpoint_every < self.cycle_steps,
            validate=cfg.val_every > 0 and step % cfg.val_every == 0)

    def warm_up_steps(self) -> list[int]:
        """Return the steps of the warm-up: for every stage, the cycle in which the stage begins, and the next cycle."""
        # Run the stage with the largest batches first, so that an OOM surfaces early. `warm_up` splits the list into
        # cycles of cycle_steps steps, so a cycle that end_step truncates must be the last one.
        cycle_starts: dict[int, None] = {}                # an ordered set of steps
        starts_and_stages = zip(self.stage_starts, self.cfg.stages)
        for stage_start, _ in sorted(starts_and_stages, key=lambda pair: -pair[1].batch_tokens):
            cycle_start = stage_start // self.cycle_steps * self.cycle_steps
            cycle_starts |= {cycle_start: None, cycle_start + self.cycle_steps: None}
        ordered_starts = sorted(cycle_starts, key=lambda start: start + self.cycle_steps > self.end_step)
        return [step for start in ordered_starts for step in range(start, min(start + self.cycle_steps, self.end_step))]


# ====== Section 3: Model ==============================================================================================
BIGRAM_FACTORS = (36313, 27191)          # multipliers of the current and the previous token (RECIPE 2.5)

def ngram_hash(tokens: np.ndarray, factors: tuple[int, ...], modulus: int, no_ngram: int) -> np.ndarray:
    """Hash the n-gram that ends at each position: tokens (..., T) i32 -> hashes (..., T) i32 in [0, modulus)."""
    # Combine the products token * factor by xor, in 32-bit arithmetic that wraps around.
    mixed = tokens * factors[0]
    for distance, factor in enumerate(factors[1:], 1):
        mixed[..., distance:] ^= tokens[..., :-distance] * factor
    hashed = mixed - mixed // modulus * modulus           # same as mixed % modulus, which NumPy does not vectorize
    hashed[..., :len(factors) - 1] = no_ngram
    return hashed

def bigram_hash(tokens: np.ndarray, num_rows: int) -> np.ndarray:
    """Hash each pair of a token and the token before it to a row of the bigram table."""
    # modded-nanogpt overwrites the token at position 0 with the index of the last row before hashing, and position 1
    # therefore hashes this index as its previous token. The published losses of modded-nanogpt include this.
    no_pair = num_rows - 1
    overwritten = tokens.copy()
    overwritten[..., 0] = no_pair
    return ngram_hash(overwritten, BIGRAM_FACTORS, no_pair, no_ngram=no_pair)

class TableSpec(NamedTuple):
    """Size, row lookup and update rule of one embedding table."""
    label: str
    num_rows: int                        # R
    lookups_per_token: int               # rows that are looked up for every token
    # tokens (B, T) i32 -> global row indices (B, T) or (B, lookups_per_token, T), i32
    row_ids: Callable[[np.ndarray], np.ndarray]
    tied_to_head: bool = False           # shares its weights with the head until untying
    rowwise: bool = False                # a row-wise table, not a dense one
    location: str = "device"             # memory that stores a row-wise table: "device" or "host"
    update_every: int = 2                # steps per update
    # tokens (B, T) i32 -> indices of sign vectors (B, T) i32; None: no signs
    sign_ids: Callable[[np.ndarray], np.ndarray] | None = None

    def shard_rows(self, world_size: int) -> int:
        """Return C = ceil(R / W), the number of rows in the shard of each rank. The last row may be padding."""
        return -(-self.num_rows // world_size)

def table_specs(cfg: Config) -> tuple[TableSpec, ...]:
    """Build the TableSpec of every embedding table: bigram_embed, value_embed, embed, then the tables of --tables."""
    # The table value_embed stacks the value embeddings. Each one has V rows.
    V = cfg.padded_vocab
    first_rows = V * np.arange(NUM_VALUE_EMBEDS, dtype=np.int32)[:, None]

    def value_rows(tokens: np.ndarray) -> np.ndarray:
        """Return the global row index of each token in each value embedding: (B, T) -> (B, NUM_VALUE_EMBEDS, T)."""
        return tokens[:, None] + first_rows

    adam_every = cfg.adam_every
    bigram_rows = functools.partial(bigram_hash, num_rows=cfg.bigram_rows)
    specs = [
        TableSpec("bigram_embed", cfg.bigram_rows, 1, bigram_rows, update_every=adam_every),
        TableSpec("value_embed", NUM_VALUE_EMBEDS * V, NUM_VALUE_EMBEDS, value_rows, update_every=adam_every),
        # The row index in `embed` is the token id.
        TableSpec("embed", V, 1, np.asarray, tied_to_head=True, update_every=adam_every)]
    for ngram in cfg.tables:
        factors, sign_factors = NGRAM_FACTORS[ngram.order]
        row_ids = functools.partial(ngram_hash, factors=factors, modulus=ngram.rows - 1, no_ngram=ngram.rows - 1)
        sign_ids = functools.partial(ngram_hash, factors=sign_factors, modulus=NUM_SIGN_VECTORS,
                                     no_ngram=NUM_SIGN_VECTORS) if ngram.signs else None
        specs.append(TableSpec(ngram.label, ngram.rows, 1, row_ids, rowwise=True, location=ngram.location,
                               update_every=ngram.update_every, sign_ids=sign_ids))
    return tuple(specs)

class ParameterSpec(NamedTuple):
    """Shape, initialization, optimizer and multipliers of one parameter or table (RECIPE 2.1)."""
    label: str                           # name of the parameter; also seeds its initial values
    shape: tuple[int, ...]               # unsharded
    # (distribution of the initial values, argument):
    #     ("constant", values)            one value, or one value per element
    #     ("normal", standard deviation)
    #     ("uniform", bound)              uniform in [-bound, bound]
    #     ("up", bound)                   for the bank of MLPs, (L, number of matrices, F, D): the last matrix of every
    #                                     layer (down) is zero, and all others (up) are uniform in [-bound, bound]
    init: tuple[str, float | tuple[float, ...]]
    optimizer: str = "adam"              # "adam"; "normuon" for banks of matrices; "rowwise" for n-gram tables
    lr_mul: float = 1.0                  # multiplier of adam_lr
    wd_mul: float = 1.0                  # multiplier of adam_weight_decay
    betas: tuple[float, float] = (0.9, 0.99)              # Adam: decay of the first and of the second moment
    full_precision: bool = False         # f32 even if the weights are bf16
    # Parameters with matrices or a table are sharded. All others are replicated: every rank updates them in full.
    # matrices: (name, height, multiplier of the NorMuon learning rate) of each weight matrix. A bank stacks these
    # matrices in each layer; the head is one matrix. Gradients of weight matrices accumulate in main_grad. Gradients of
    # replicated parameters are in .grad.
    matrices: tuple[tuple[str, int, float], ...] = ()
    table: TableSpec | None = None       # how tokens are looked up, for an embedding table

    @property
    def matrix_heights(self) -> tuple[int, ...]:
        """Heights of the weight matrices that the parameter stacks in each layer."""
        return tuple(height for _, height, _ in self.matrices)

# Initial values of the learned scalars, keyed by name (RECIPE 2.6). They are packed into the parameter `scalars`. Each
# layer has two attention scalars: the first multiplies the weights of q, k and v, the second the output projection.
SCALARS = {
    "residual": (1.1,) * len(LAYERS),
    "attention": (0.5, 1.0) * len(LAYERS),
    "bigram": (0.1,) * len(LAYERS),
    "smear": (0.0,),
    "backout": (0.5,),
    "skip": (-1.5,),
}
NGRAM_INIT_COEF = 0.1                    # initial coefficient of an n-gram table in the residual stream, for each layer
MLP_RATIO = 4                            # MLP hidden dim / model dim
DOWN_LR_MUL = 2.0                        # learning rate multiplier of the down matrices of the MLP
QKVO = 4                                 # matrices of an attention layer, stacked: q, k, v, output projection
QKV = 3                                  # matrices that a layer applies in one matmul before attention: q, k, v

def init_parameter(spec: ParameterSpec, generator: torch.Generator) -> Tensor:
    """Create the initial weight of a parameter as spec.init describes: unsharded, f32, of shape spec.shape."""
    distribution, argument = spec.init
    shape = spec.shape
    if distribution == "constant":
        return torch.tensor(argument).expand(shape)       # the argument is a float, or one float per element
    if distribution == "normal":
        return torch.randn(shape, generator=generator) * argument
    if distribution == "up":
        uniform = spec._replace(shape=(shape[0], shape[1] - 1, *shape[2:]), init=("uniform", argument))
        weight = init_parameter(uniform, generator)
        # Zero down matrices, so that every MLP outputs zeros at first.
        return torch.cat((weight, torch.zeros_like(weight[:, :1])), dim=1)
    return torch.rand(shape, generator=generator) * (2 * argument) - argument

def initial_scalars(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Return the initial values of the learned scalars, keyed by name, in the order of the parameter `scalars`."""
    # An n-gram table with layer None is added to the residual stream. Any other n-gram table is added to the attention
    # values of layer ngram.layer.
    return SCALARS | {ngram.label: (NGRAM_INIT_COEF,) * len(LAYERS) for ngram in cfg.tables if ngram.layer is None}

def parameter_specs(cfg: Config) -> tuple[ParameterSpec, ...]:
    """Build the ParameterSpec of every parameter and table (RECIPE 2.1, 2.6). The n-gram tables are last."""
    D, H, V = cfg.model_dim, cfg.num_heads, cfg.padded_vocab
    L, num_attn, mlp_dim = len(LAYERS), len(ATTENTION_LAYERS), MLP_RATIO * D
    # Each value embedding, and each n-gram table that is added to attention values, has one gate per head.
    num_value_gates = NUM_VALUE_EMBEDS + sum(ngram.layer is not None for ngram in cfg.tables)
    bigram_table, value_table, embed_table, *ngram_tables = table_specs(cfg)
    scalars = sum(initial_scalars(cfg).values(), ())

    # The matrices of an MLP, in the order in which `relu_sq_mlp` receives them.
    mlp_matrices = ("up", mlp_dim, 1.0), ("down", mlp_dim, DOWN_LR_MUL)

    # Settings that several parameters share.
    zeros = "constant", 0.0
    # Uniform values in [-bound, bound] have the standard deviation bound / sqrt(3) = 0.5 / sqrt(D).
    bound = 3**0.5 * 0.5 * D**-0.5
    scalar_kwargs = dict(lr_mul=5, wd_mul=0, full_precision=True)
    table_kwargs = dict(lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    head_kwargs = dict(wd_mul=150, betas=(0.5, 0.95))
    return (
        ParameterSpec("attn", (num_attn, QKVO * D, D), ("uniform", bound), "normuon",
                      matrices=(("qkv", QKV * D, 1.0), ("out", D, 1.0))),
        ParameterSpec("mlp", (L, len(mlp_matrices), mlp_dim, D), ("up", bound), "normuon", matrices=mlp_matrices),
        ParameterSpec("scalars", (len(scalars),), ("constant", scalars), **scalar_kwargs),
        ParameterSpec("x0_lambdas", (L,), zeros, **scalar_kwargs, betas=(0.65, 0.95)),
        ParameterSpec("smear_gate", (1, GATE_INPUTS), zeros, lr_mul=0.01, wd_mul=0),
        ParameterSpec("skip_gate", (1, GATE_INPUTS), zeros, lr_mul=0.05, wd_mul=0),
        ParameterSpec("attn_gate_bank", (num_attn, H, GATE_INPUTS), zeros),
        ParameterSpec("ve_gate_bank", (num_value_gates, H, GATE_INPUTS), zeros),
        ParameterSpec("bigram_embed", (bigram_table.num_rows, D), zeros, **table_kwargs, table=bigram_table),
        ParameterSpec("value_embed", (value_table.num_rows, D), ("normal", 0.01), **table_kwargs, table=value_table),
        ParameterSpec("lm_head", (D, V), ("normal", 0.005), **head_kwargs, matrices=(("head", D, 1.0),)),
        # Head and embedding are tied at first, so `initial_weights` replaces the zeros by the transpose of lm_head.
        ParameterSpec("embed", (embed_table.num_rows, D), zeros, **head_kwargs, table=embed_table),
        # Row-wise updates have no first moment, so the first beta is 0.
        *(ParameterSpec(ngram.label, (ngram.rows, D), zeros, "rowwise", ngram.lr_mul, ngram.wd_mul, (0.0, ngram.beta2),
                        table=table_spec) for ngram, table_spec in zip(cfg.tables, ngram_tables)))

# Type aliases of the arguments and results of GPT's methods. Embeddings are (B, T, D). Rows to read are (num_rows, D).
# Their gradient buffer has the same shape, and is f32, or f64 in an f64 run. In evaluation, None replaces the buffer.
RowBuffers = dict[str, tuple[Tensor, Tensor | None]]      # label of a table -> (rows to read, their gradient buffer)
ResidualInputs = list[tuple[tuple[Tensor, ...], Tensor]]  # (coefficient of each layer, embedding)
ValueEmbeds = dict[int, list[tuple[int, Tensor]]]         # layer index -> (index in ve_gate_bank, embedding)

def attention_args(short: int, long: int, max_len: int, scale: float) -> AttentionArgsByKind:
    """Build the AttentionArgs of every kind of layer, keyed by (Layer.attention, Layer.window)."""
    return {(attention, window_name): AttentionArgs(positions_per_token * max_len, window, scale,
                                                    name=f"{attention} {window_name}")
            for attention, positions_per_token in (("plain", 1), ("paired", 2))
            for window_name, window in (("short", short), ("long", long))}

def initial_weights(cfg: Config, seed: int) -> Iterable[tuple[str, Tensor]]:
    """Yield (label, initial weight) for every parameter, unsharded, except row-wise tables, which start at zero."""
    for spec in parameter_specs(cfg):
        if spec.optimizer == "rowwise":
            continue
        # Use one generator per label, so that adding a parameter does not change the initial values of the others.
        digest = hashlib.sha256(f"{seed}/{spec.label}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        weight = init_parameter(spec, generator)
        # Round to bf16 in every run, so that initial values do not depend on --dtype.
        if not spec.full_precision:
            weight = weight.bfloat16()
        if spec.label == "lm_head":
            head = weight
        # Head and embedding are tied at first: embed (V, D) = lm_head^T, with lm_head (D, V).
        if spec.label == "embed":
            weight = head.t()
        yield spec.label, weight

def sigmoid_gate(inputs: Tensor, weight: Tensor) -> Tensor:
    """Compute gates in (0, 1): sigmoid(inputs @ weight^T)."""
    return torch.sigmoid(F.linear(inputs, weight))

class GPT(nn.Module):
    """The transformer of RECIPE 2. Runs no collectives. The name of a parameter is the label of its ParameterSpec."""
    def __init__(self, cfg: Config, attention: Callable, max_seq_len: int, shard_rows: dict[str, int]):
        super().__init__()
        self.num_heads = cfg.num_heads
        self.head_dim = cfg.head_dim
        self.attention = attention
        # Row-wise tables are not parameters of the model, because row stores contain their weights. The methods receive
        # the rows to read in the argument row_buffers.
        self.specs = {spec.label: spec for spec in parameter_specs(cfg) if spec.optimizer != "rowwise"}
        self.scalar_sizes = {name: len(scalars) for name, scalars in initial_scalars(cfg).items()}
        self.ngrams = cfg.tables
        dtype = getattr(torch, cfg.dtype)
        for label, spec in self.specs.items():
            first_dim, *other_dims = spec.shape
            param_dtype = accum_dtype(dtype) if spec.full_precision else dtype
            weight = torch.empty((shard_rows.get(label, first_dim), *other_dims), dtype=param_dtype)
            self.register_parameter(label, nn.Parameter(weight))

        # persistent=False omits the buffers from checkpoints, because settings and schedule determine their values.
        if any(ngram.signs for ngram in self.ngrams):
            self.register_buffer("sign_vectors", sign_vectors(cfg.model_dim).to(dtype), persistent=False)
        for name in ("rotary_cos", "rotary_sin"):         # paired layers have two positions per token
            self.register_buffer(name, torch.zeros(2 * max_seq_len, cfg.head_dim, dtype=dtype), persistent=False)
        # Cache of `set_rotary`: frequencies of a stage -> (E,), the signed frequency of each channel of a head.
        self.channel_freqs: dict[tuple[float, ...], Tensor] = {}

    def set_rotary(self, frequencies: tuple[float, ...]) -> None:
        """Fill the RoPE buffers in place: rotary_cos = cos(angles), rotary_sin = sin(angles), (2 * max_seq_len, E)."""
        dtype = accum_dtype(self.rotary_cos.dtype)
        device = self.rotary_cos.device
        # Cache the frequencies of each stage on the device. The warm-up fills the cache, because a copy from the host
        # at the first step of a stage would synchronize.
        if frequencies not in self.channel_freqs:
            freqs = torch.tensor(frequencies, dtype=dtype, device=device)
            # `apply_rotary` requires the negated sin in channel 2i + 1. Negating the frequency negates the sin, and
            # does not change the cos. Frequency 0 does not rotate the second half of the channels.
            signed_freqs = torch.stack((freqs, -freqs), dim=-1).flatten()
            self.channel_freqs[frequencies] = F.pad(signed_freqs, (0, len(signed_freqs)))
        positions = torch.arange(len(self.rotary_cos), dtype=dtype, device=device)
        angles = torch.outer(positions, self.channel_freqs[frequencies])
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())

    def losses(self, batch: Batch, mtp_weights: Tensor, loss_scale: Tensor, attn_args_by_kind: AttentionArgsByKind,
               head_precision: str, row_buffers: RowBuffers) -> tuple[Tensor, Tensor]:
        """Compute the multi-token and the next-token loss of every position (RECIPE 2.8)."""
        y = self.hidden_states(batch, attn_args_by_kind, row_buffers).flatten(0, 1)
        # logits_dtype is the dtype of "fp8" and "emulated" logits. "plain" logits have the dtype of y.
        logits_dtype = torch.float64 if y.dtype == torch.float64 else torch.bfloat16
        losses, next_losses = HeadLoss.apply(y, self.lm_head, batch.targets, mtp_weights, loss_scale, head_precision,
                                             logits_dtype, as_matrix(self.lm_head))
        return losses.view_as(batch.targets), next_losses.view_as(batch.targets)

    def hidden_states(self, batch: Batch, attn_args_by_kind: AttentionArgsByKind, row_buffers: RowBuffers) -> Tensor:
        """Compute the normalized hidden states that enter the head, (B, T, D) (RECIPE 2.3)."""
        # Unbind shared parameters once. Indexing them in every layer would add a backward kernel per access.
        scalars = dict(zip(self.scalar_sizes, self.scalars.split(list(self.scalar_sizes.values()))))
        residual = scalars["residual"].unbind()
        attention_scales = scalars["attention"].unbind()
        x0_lambdas = self.x0_lambdas.unbind()
        attn = matrices_by_layer(self.attn, self.specs["attn"].matrix_heights)
        mlp = matrices_by_layer(self.mlp, self.specs["mlp"].matrix_heights)

        # Attention treats the micro-batch as one sequence of B * T tokens, so offset the document bounds of sequence b
        # by b * T. The entries that pad batch.cu_seqlens (all T) become empty documents.
        B, T = batch.tokens.shape
        seq_starts = torch.arange(B, device=batch.tokens.device, dtype=torch.int32) * T
        cu_seqlens = (batch.cu_seqlens + seq_starts[:, None]).flatten()

        x0, residual_inputs, value_embeds = self.embed_inputs(batch, scalars, row_buffers)
        x = x0
        saved = {}                       # Layer.save_as -> output of that layer
        for i, layer in enumerate(LAYERS):
            # Add the saved output before the residual scalar is applied, so that the scalar multiplies the sum. The
            # gate is in (0, 2) and reads the first GATE_INPUTS channels of x0.
            if layer.add_saved:
                gate = 2 * sigmoid_gate(x0[..., :GATE_INPUTS], self.skip_gate)
                skip_coef = torch.sigmoid(scalars["skip"]).type_as(x)
                x = x + skip_coef * gate * saved[layer.add_saved]
            x = residual[i] * x + x0_lambdas[i] * x0
            for coefs, rows in residual_inputs:
                x = x + coefs[i] * rows

            # Multiply the output of each head by a gate in (0, 1), so that a head can be switched off per token
            # (RECIPE 2.4). The gate reads the first GATE_INPUTS channels of the attention input.
            if layer.attention != "none":
                attn_idx = ATTENTION_LAYERS.index(i)      # index in `attn` and attn_gate_bank
                w_qkv, w_out = attn[attn_idx]
                qkv_scale, out_scale = attention_scales[2 * i:2 * i + 2]
                normed = rms_norm(x)
                qkv = linear_main_grad(normed, w_qkv, qkv_scale)
                attn_args = attn_args_by_kind[layer.attention, layer.window]
                y = self.attend(layer, normed, qkv, value_embeds.get(i, ()), cu_seqlens, attn_args)
                y = y * sigmoid_gate(normed[..., :GATE_INPUTS], self.attn_gate_bank[attn_idx])[..., None]
                x = x + linear_main_grad(y.flatten(2), w_out, out_scale)

            x = x + relu_sq_mlp(rms_norm(x), *mlp[i])
            if layer.save_as:
                saved[layer.save_as] = x

        # Backout: subtract a learned multiple of the output of an earlier layer. The result depends more on what later
        # layers have added.
        return rms_norm(x - scalars["backout"].type_as(x) * saved[BACKOUT])

    def embed_inputs(self, batch: Batch, scalars: dict[str, Tensor],
                     row_buffers: RowBuffers) -> tuple[Tensor, ResidualInputs, ValueEmbeds]:
        """Look up all tables, and compute the embeddings that enter the layers, each (B, T, D)."""
        # The smear crosses document boundaries within a sequence, as in modded-nanogpt (RECIPE 2.3).
        embed, = self.lookup("embed", batch, row_buffers)
        smear = scalars["smear"].type_as(embed)
        gate = smear * sigmoid_gate(embed[:, 1:, :GATE_INPUTS], self.smear_gate)
        smeared = torch.cat((embed[:, :1], embed[:, 1:] + gate * embed[:, :-1]), dim=1)
        x0 = rms_norm(smeared)
        bigram_coefs = scalars["bigram"].unbind()
        bigram_rows, = self.lookup("bigram_embed", batch, row_buffers)
        residual_inputs = [(bigram_coefs, bigram_rows)]
        value_rows = self.lookup("value_embed", batch, row_buffers)
        value_embeds = {i: [(layer.value_embed, value_rows[layer.value_embed])]
                        for i, layer in enumerate(LAYERS) if layer.value_embed is not None}

        # In ve_gate_bank, the gates of n-gram tables follow the gates of value embeddings, in the order of --tables.
        gate_idx = NUM_VALUE_EMBEDS
        for ngram in self.ngrams:
            ngram_embed, = self.lookup(ngram.label, batch, row_buffers)
            # sign_ids (B, T) contains a second hash of the n-gram that ends at each token. sign_vectors[hash] is a
            # random vector of +1 and -1. Two n-grams that share a row thus differ in about half of the signs.
            if ngram.signs:
                ngram_embed = ngram_embed * F.embedding(batch.sign_ids[ngram.label], self.sign_vectors)
            if ngram.layer is None:
                residual_inputs.append((scalars[ngram.label].unbind(), ngram_embed))
            else:
                value_embeds.setdefault(ngram.layer, []).append((gate_idx, ngram_embed))
                gate_idx += 1
        return x0, residual_inputs, value_embeds

    def lookup(self, label: str, batch: Batch, row_buffers: RowBuffers) -> list[Tensor]:
        """Look up every token in the table `label`. Returns a list of lookups_per_token embeddings, each (B, T, D)."""
        row_index = batch.row_index[label]
        rows, row_grads = row_buffers[label]
        # Use one autograd node per lookup. Backward then adds each gradient to row_grads as soon as the gradient is
        # computed, and never stacks gradients.
        indices = row_index.unbind(1) if row_index.dim() == 3 else [row_index]
        return [RowLookup.apply(rows, index, row_grads) for index in indices]

    def attend(self, layer: Layer, normed: Tensor, qkv: Tensor, value_embeds: Iterable[tuple[int, Tensor]],
               cu_seqlens: Tensor, attn_args: AttentionArgs) -> Tensor:
        """Compute the attention of one layer, before the output gate and output projection (RECIPE 2.4)."""
        B, T, _ = normed.shape
        q, k, v = qkv.view(B, T, QKV, self.num_heads, self.head_dim).unbind(2)
        q = rms_norm(q)
        k = rms_norm(k)
        # Add each value embedding to v, scaled per head by a gate in (0, 2). In paired layers, the gate reads the first
        # GATE_INPUTS channels of `normed`. In plain layers, the gate reads the first GATE_INPUTS / 2 channels of
        # `normed`, and the first GATE_INPUTS / 2 channels of the value embedding.
        for gate_idx, value_embed in value_embeds:
            gate_inputs = normed[..., :GATE_INPUTS]
            if layer.attention == "plain":
                half = GATE_INPUTS // 2
                gate_inputs = torch.cat((normed[..., :half], value_embed[..., :half]), dim=-1)
            gate = 2 * sigmoid_gate(gate_inputs, self.ve_gate_bank[gate_idx])
            v = v + gate[..., None] * value_embed.view(v.shape)

        # In the folded sequence of a paired layer, position 2t is head j of token t, and position 2t + 1 is head
        # j + H/2 of token t. RoPE is applied before the heads are regrouped, and therefore does not use these
        # positions: even heads have the angles of position 2t, and odd heads have the angles of position 2t + 1. This
        # looks like a bug, but the published losses of modded-nanogpt include it (RECIPE 2.4).
        positions_per_token = 1
        if layer.attention == "paired":
            positions_per_token = 2
            cu_seqlens = 2 * cu_seqlens
        cos = self.rotary_cos[:positions_per_token * T].view(T, 1, positions_per_token, -1)
        sin = self.rotary_sin[:positions_per_token * T].view(T, 1, positions_per_token, -1)
        rotary_shape = (B, T, self.num_heads // positions_per_token, positions_per_token, self.head_dim)
        q = apply_rotary(q.view(rotary_shape), cos, sin)
        k = apply_rotary(k.view(rotary_shape), cos, sin)
        # Key offset: the unrotated half of key t becomes that of key t - 1. A query that matches token t - 1 then
        # attends to the value of token t (a one-layer induction head). The shift crosses document boundaries, as in
        # modded-nanogpt (RECIPE 2.4). The first key of a sequence does not change.
        if layer.key_offset:
            rotary_half, other_half = k.chunk(2, dim=-1)
            shifted = torch.cat((other_half[:, :1], other_half[:, :-1]), dim=1)
            k = torch.cat((rotary_half, shifted), dim=-1)
        # Regroup the heads: (positions_per_token * B * T, H / positions_per_token, E).
        flat_qkv = [x.reshape(-1, self.num_heads // positions_per_token, self.head_dim) for x in (q, k, v)]
        return self.attention(*flat_qkv, cu_seqlens, attn_args).view(v.shape)


# ====== Section 4: Updates ============================================================================================
POLAR_EXPRESS = (                        # coefficients (a, b, c) per iteration (arXiv 2505.16932, RECIPE 3.1)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

def polar_express(x: Tensor) -> Tensor:
    """Approximate the polar factor of each matrix in x by Polar Express iterations (arXiv 2505.16932)."""
    norm = x.norm(dim=(-2, -1), keepdim=True)
    # Transpose tall matrices, so that the Gram matrix x x^T below is as small as possible.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The iteration requires singular values of at most 1. The Frobenius norm is an upper bound of the singular values.
    # The factor 1.02 is a margin (RECIPE 3.1).
    x = x / (1.02 * norm + 1e-6)
    for a, b, c in POLAR_EXPRESS:                                             # x <- a x + (b A + c A^2) x, A = x x^T
        gram = x @ x.mT
        higher_terms = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, higher_terms, x, beta=a)
    return x.mT if tall else x

def normuon_direction(grad: Tensor, momentum: Tensor, second_moment: Tensor, mu: Tensor, beta2: float,
                      polar_dtype: torch.dtype) -> Tensor:
    """Compute the NorMuon update direction (arXiv 2510.05491), and update momentum and second_moment in place."""
    momentum.add_((grad - momentum) * (1 - mu))
    nesterov = grad * (1 - mu) + momentum * mu
    orthogonal = polar_express(nesterov.to(polar_dtype)).to(grad.dtype)

    # Divide each row by the running root mean square of its updates.
    axis = -1 if second_moment.shape[-1] == 1 else -2                         # the axis of the mean
    mean_square = orthogonal.square().mean(dim=axis, keepdim=True)            # (M, r, 1) or (M, 1, c)
    second_moment.lerp_(mean_square, 1 - beta2)
    inverse_rms = second_moment.clamp_min(1e-10).rsqrt()

    # Compute |O| and |U| from the means, so that the full matrices are read only once more, in the return statement.
    count = grad.shape[axis]                                                  # elements per mean
    norm = (count * mean_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scaled_square = mean_square * inverse_rms.square()
    scaled_norm = (count * scaled_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scale = inverse_rms * norm / scaled_norm.clamp_min(1e-10)
    return orthogonal * scale.to(polar_dtype).to(grad.dtype)                  # rounded to polar_dtype, RECIPE 3.1

def with_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """Combine p (bf16: upper 16 bits) and mantissa (i16: lower 16 bits) into f32 weights of the same shape."""
    # int() sign-extends an i16 mantissa. Mask off the upper 16 bits, because bit 15 of a mantissa is not a sign bit.
    upper = p.view(torch.int16).int() << 16
    return (upper | mantissa.int() & 0xFFFF).view(torch.float32)

def normuon_update(p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum: Tensor, second_moment: Tensor,
                   grad_scale: float, mu: Tensor, lr: Tensor, lr_muls: Tensor, decay: Tensor, beta2: float) -> None:
    """Apply one NorMuon step with cautious weight decay to the matrices p in place."""
    grad = grad.to(momentum.dtype) * grad_scale
    update = normuon_direction(grad, momentum, second_moment, mu, beta2, p.dtype)
    lrs = lr_muls * lr
    exact = p if mantissa is None else with_mantissa(p, mantissa)
    agrees = update * exact >= 0
    new_p = exact - exact * agrees * decay * lrs - update * lrs               # order of operations: RECIPE 3.1
    if mantissa is None:
        p.copy_(new_p)
        return
    # Split the f32 weight into its two halves without rounding, so that no bit is lost (RECIPE 3.2).
    bits = new_p.view(torch.int32)
    p.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))
    mantissa.copy_(bits.to(torch.int16))

def cautious_adam(p: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """Subtract an Adam update and cautious weight decay from p, out of place (RECIPE 3.3)."""
    # modded-nanogpt tests > 0 here, but >= 0 in NorMuon.
    agrees = update * p > 0
    return p - (update + p * agrees * decay)

def adam_update(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, grad_scale: float, betas: tuple[float, float],
                eps: float, step_size: Tensor, decay: Tensor) -> None:
    """Apply one Adam step with cautious weight decay to p in place (RECIPE 3.4)."""
    grad = grad.to(m.dtype) * grad_scale
    beta1, beta2 = betas
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square(), 1 - beta2)
    p.copy_(cautious_adam(p.to(m.dtype), m / (v.sqrt() + eps) * step_size, decay))

def rowwise_update(rows: Tensor, v: Tensor, last: Tensor, grad: Tensor, grad_scale: float, update_num: Tensor,
                   beta2: float, eps: float, step_size: Tensor, decay: Tensor) -> None:
    """Apply one row-wise update in place: Adam without a first moment, and with one second moment per row."""
    grad = grad * grad_scale
    # Decay v by beta2 for every update since `last`, as if the row had had a zero gradient in the updates between.
    # Compute the power in f64, and round once.
    v_decay = torch.pow(beta2, (update_num - last).double()).to(v.dtype)
    v.copy_(v * v_decay + (1 - beta2) * grad.square().mean(dim=1))
    last.copy_(update_num.expand_as(last))
    update = grad / (v.sqrt() + eps)[:, None] * step_size
    rows.copy_(cautious_adam(rows.to(grad.dtype), update, decay))

def init_optimizer_state(spec: ParameterSpec, shard: Tensor) -> dict[str, Tensor]:
    """Create zero-initialized Adam or NorMuon state, {state name: tensor}, for a parameter or a shard of one."""
    # Snapshots, checkpoints and the memory estimate derive names, shapes and dtypes of the state from this function.
    shard = bank_matrices(spec, shard)
    zeros = functools.partial(torch.zeros_like, dtype=accum_dtype(shard.dtype))
    if spec.optimizer == "adam":
        return dict(m=zeros(shard), v=zeros(shard))
    # NorMuon averages squares over each row, or over each column of wide matrices.
    axis = -1 if shard.shape[-2] >= shard.shape[-1] else -2
    state = dict(momentum=zeros(shard), second=zeros(shard.narrow(axis, 0, 1)))
    if shard.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(shard, dtype=torch.int16)
    return state


def update_scalars(cfg: Config, spec: ParameterSpec, step_cfg: StepConfig) -> tuple[int, Tensor, Tensor]:
    """Compute (update_num, step_size, decay) of the Adam or row-wise update at the end of this step."""
    update_every = spec.table.update_every if spec.table else cfg.adam_every
    update_num = (step_cfg.step + 1) // update_every
    beta1, beta2 = spec.betas
    lr = step_cfg.adam_lr * spec.lr_mul
    bias_correction = math.sqrt(1 - beta2**update_num) / (1 - beta1**update_num)
    decay = lr * lr * cfg.adam_weight_decay * spec.wd_mul                     # quadratic in lr (RECIPE 3.3)
    return update_num, cpu_scalar(lr * bias_correction), cpu_scalar(decay)

def apply_adam(update_fn: Callable, cfg: Config, spec: ParameterSpec, p: Tensor, grad: Tensor, state: dict[str, Tensor],
               step_cfg: StepConfig) -> None:
    """Apply the Adam update of this step to p and its moments, in place."""
    _, step_size, decay = update_scalars(cfg, spec, step_cfg)
    update_fn(p, grad, state["m"], state["v"], 1 / cfg.seqs_per_step, spec.betas, cfg.adam_eps, step_size, decay)

# `Optimizer.step` launches the reductions of gradients in REDUCE_ORDER. It then updates the groups in UPDATE_ORDER, and
# launches the all-gather of a group right after its update. The two orders may differ. The banks come first, so that
# their NorMuon updates overlap the all-to-alls of row gradients. `Optimizer` inserts the n-gram tables before the last
# group.
REPLICATED = "replicated"                # label of the group of all parameters that every rank updates in full
REDUCE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", REPLICATED)
UPDATE_ORDER = REDUCE_ORDER

class Optimizer:
    """The optimizer of this rank: NorMuon for banks, row-wise updates for n-gram tables, Adam for the rest."""
    def __init__(self, cfg: Config, comm: Communicator, model: GPT,
                 tables: dict[str, LocalTable | ExchangedTable], multiple_micro_batches: bool):
        self.comm = comm
        self.model = model
        adam = functools.partial(apply_adam, compile_fn(adam_update, cfg, comm), cfg)
        # RECIPE 3.1 rounds polar_express and the row factor to bf16.
        normuon = compile_fn(normuon_update, cfg, comm, round_as_eager=True)
        rowwise = compile_fn(rowwise_update, cfg, comm)
        self.groups: dict[str, ReplicatedGroup | ShardedGroup | TableGroup] = {}
        replicated_specs = []
        for spec in parameter_specs(cfg):
            label = spec.label
            if spec.optimizer == "rowwise":
                self.groups[label] = RowwiseTableGroup(cfg, spec, tables[label], rowwise)
            elif spec.table:
                self.groups[label] = TableGroup(spec, tables[label], adam)
            elif spec.optimizer == "normuon":
                self.groups[label] = BankGroup(cfg, comm, spec, model.get_parameter(label), multiple_micro_batches,
                                               normuon)
            elif spec.matrices:
                self.groups[label] = HeadGroup(cfg, comm, spec, model.get_parameter(label), adam)
            else:
                replicated_specs.append(spec)
        weights = [model.get_parameter(spec.label) for spec in replicated_specs]
        self.groups[REPLICATED] = ReplicatedGroup(cfg, comm, replicated_specs, weights, adam)
        self.sharded_groups = {label: group for label, group in self.groups.items() if isinstance(group, ShardedGroup)}
        # Optimizer state of this rank, keyed by label, then by state name. Snapshots and checkpoints use these keys.
        self.state = {label: state for group in self.groups.values() for label, state in group.state.items()}
        # Insert the n-gram tables into both orders. A group that is missing in an order would never be updated.
        ngrams = [table.label for table in cfg.tables]
        self.reduce_order, self.update_order = (
            (*order[:-1], *ngrams, order[-1]) for order in (REDUCE_ORDER, UPDATE_ORDER))
        assert sorted(self.reduce_order) == sorted(self.update_order) == sorted(self.groups), "each group once in each"

    def add_zero_grads(self) -> None:
        """Set the missing gradients of banks, head and replicated parameters to zero, and leave existing ones."""
        for group in self.sharded_groups.values():
            group.add_zero_grads()
        for p in self.groups[REPLICATED].weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, step_cfg: StepConfig) -> None:
        """Update the parameters that are due in this step, and clear their gradients."""
        # Check before launching any collective, so that an error leaves all weights unchanged.
        due_labels = [label for label in self.update_order
                      if (step_cfg.step + 1) % self.groups[label].update_every == 0]
        for label in due_labels:
            if label in self.sharded_groups:
                self.sharded_groups[label].check_writes()
        missing = sorted(label for label in due_labels if not self.groups[label].has_gradient())
        check(not missing, "optim_step", found=f"no gradients for {missing}",
              expected="gradients for every group that is due for an update", hint="call forward_backward first",
              error=RunError)

        # While head and embedding are tied, they are one parameter. Add the gradient of the embedding to the gradient
        # of the head, and update only the head.
        head = self.model.lm_head
        tied_update = step_cfg.tied and "embed" in due_labels
        if tied_update:
            self.groups["embed"].table.add_grads_to_head(head.main_grad)
            due_labels.remove("embed")

        # Launch all reductions before the first update, and all all-gathers before waiting for any of them, so that
        # communication overlaps the updates.
        for label in self.reduce_order:
            if label in due_labels:
                self.groups[label].launch_reduce()
        # All reductions are in progress, and no weight has changed yet. To use all gradients at once, for example to
        # clip them by their global norm, call reduced_grad() of every group here, once, and pass the results to
        # update() below. This waits for all reductions, so that they no longer overlap the updates. Ranks own disjoint
        # shards, but all of them have the gradients of the group REPLICATED. Gradients are sums over sequences.
        gather_works = []
        for label in due_labels:
            gather_works.append(self.groups[label].update(self.groups[label].reduced_grad(), step_cfg))
            self.groups[label].zero_grad()
        for work in gather_works:
            wait_for_work(work)
        # With W = 1, lookups read model.embed, so copy the updated head there. With W > 1, lookups in a tied table read
        # the head.
        if tied_update and self.comm.world_size == 1:
            self.model.embed.copy_(head.t())
        if step_cfg.untie_after:
            self._untie()

    def _untie(self) -> None:
        """Split head and embedding into two parameters: copy the head's weights and Adam moments to the embedding."""
        W = self.comm.world_size
        head = self.model.lm_head                         # (D, V)
        # Reshard the Adam moments with an all-to-all. The head's moments (D, V) are sharded along D. The embedding's
        # moments (V, D) are sharded by row: the shard of rank r contains rows r, r + W, ..., padded to C rows.
        for name, embed_moment in self.state["embed"].items():
            C, D = embed_moment.shape
            head_moment = self.state["lm_head"][name]
            padding = self.sharded_groups["lm_head"].shard_size - len(head_moment)
            padded = F.pad(head_moment, (0, W * C - head.shape[1], 0, padding))
            sent = padded.t().view(C, W, -1).transpose(0, 1).contiguous()     # (owner of the rows, C, D / W rounded up)
            received = sent.clone()                       # with W = 1, `launch` is a no-op, and this is the result
            wait_for_work(self.comm.launch(dist.all_to_all_single, received, sent))
            embed_moment.copy_(received.transpose(0, 1).reshape(C, -1)[:, :D])
        rows = head.t()[self.comm.rank::W]
        self.groups["embed"].table.shard[:len(rows)] = rows


# ====== Section 5: Step ===============================================================================================
EVAL_CHUNK = 8192                        # positions per chunk of validation logits; one chunk is in memory at a time
# Maximum number of graphs per compiled function. A function has one graph for each set of input shapes. With the
# attention reference, it has one graph for each combination of input shapes and AttentionArgs.
RECOMPILE_LIMIT = 64

class StepLoss(NamedTuple):
    """Losses of one forward_backward call on this rank, not multiplied by the loss scale."""
    seq_sums: Tensor                     # (sequences of this rank,): summed multi-token loss of each sequence
    next_sum: Tensor                     # (): summed next-token loss of all sequences of this rank
    num_tokens: int                      # tokens of all sequences of this rank

class Engine:
    """Model, tables and optimizer of this rank: forward and backward passes, updates, evaluation, state."""
    def __init__(self, cfg: Config, comm: Communicator, attention: Callable, head_precision: str | None,
                 micro_batch_size: int = 0):
        self.cfg = cfg
        self.comm = comm
        self.head_precision = head_precision
        # The Rotary in the model's buffers rotary_cos and rotary_sin; None: compute them before the next forward pass.
        self.rotary: Rotary | None = None
        self.accum_dtype = accum_dtype(getattr(torch, cfg.dtype))
        self.micro_batch_size = micro_batch_size or cfg.seqs_per_step // comm.world_size

        # Allocate buffers for the largest batch of the run, so that their shapes and addresses never change.
        largest_batch = max(stage.batch_tokens for stage in cfg.stages)
        max_seq_len = max(cfg.val_batch_tokens, largest_batch) // cfg.seqs_per_step
        specs = table_specs(cfg)
        self.shard_rows = {spec.label: spec.shard_rows(comm.world_size) for spec in specs}
        self.model = GPT(cfg, attention, max_seq_len, self.shard_rows)
        self.reseed(cfg.seed)                             # initialize all weights except row-wise tables
        self.model.to(comm.device)
        self.tables: dict[str, LocalTable | ExchangedTable] = {}
        for spec in specs:
            # The row cache must hold the rows of all tokens of this rank in one update cycle of the table. Evaluation
            # uses no row cache.
            max_tokens = spec.update_every * largest_batch // comm.world_size if head_precision else 0
            if spec.rowwise:
                self.tables[spec.label] = RowwiseTable(spec, cfg, comm, max_tokens)
            elif comm.world_size == 1:
                # W = 1: lookups read the parameter in place.
                self.tables[spec.label] = LocalTable(self.model.get_parameter(spec.label))
            else:
                weight = self.model.get_parameter(spec.label)
                self.tables[spec.label] = ExchangedTable(spec, cfg, comm, weight, max_tokens, self.model.lm_head)

        # Compile only functions that are called often and with few different input shapes.
        self.compiling = comm.compiles(cfg)
        if self.compiling:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.model_hidden = compile_fn(self.model.hidden_states, cfg, comm)
        # "emulated" has the bf16 logits of "fp8" (RECIPE 2.8). The fp8 matmul itself returns bf16.
        self.model_losses = compile_fn(self.model.losses, cfg, comm, round_as_eager=head_precision == "emulated")
        self.next_token_losses = compile_fn(next_token_losses, cfg, comm)
        if head_precision:
            multiple_micro_batches = self.micro_batch_size * comm.world_size < cfg.seqs_per_step
            self.optimizer = Optimizer(cfg, comm, self.model, self.tables, multiple_micro_batches)

    @torch.no_grad()
    def reseed(self, seed: int) -> None:
        """Reset all weights except row-wise tables in place to their initial values for `seed`."""
        for label, weight in initial_weights(self.cfg, seed):
            self.model.get_parameter(label).copy_(self.local_part(label, weight))

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full weight or of a full optimizer state tensor."""
        label, _, state_name = name.partition(".")
        if state_name and label in self.optimizer.sharded_groups:
            return full[self.optimizer.sharded_groups[label].slice]
        if label not in self.shard_rows:
            return full
        owned_rows = full[self.comm.rank::self.comm.world_size]
        return F.pad(owned_rows, (0, 0, 0, self.shard_rows[label] - len(owned_rows)))

    def forward_backward(self, batch: Batch, step_cfg: StepConfig, loss_scale: float = 1.0) -> StepLoss:
        """Run forward and backward on this rank's batch, and accumulate the gradients."""
        attn_args_by_kind = self._set_attention(step_cfg, min(self.cfg.max_doc_len, batch.tokens.shape[1]))
        # `fetch_rows` has launched the all-to-alls of the rows after the last update. Make the compute stream wait for
        # the rows. If `fetch_rows` was not called, rows_for_forward launches the all-to-alls.
        row_buffers = {}
        for label, table in self.tables.items():
            row_buffers[label] = table.rows_for_forward(batch.plans.get(label))

        # Create scalars on the device. Copying them from the host would synchronize.
        device_scalar = functools.partial(torch.full, (), dtype=self.accum_dtype, device=self.comm.device)
        mtp_weights = torch.stack([device_scalar(weight) for weight in step_cfg.mtp_weights])
        device_loss_scale = device_scalar(loss_scale)

        # All micro-batches accumulate into the same gradients, so the micro-batch size affects only rounding.
        seq_sums_by_micro_batch = []
        next_sum = device_scalar(0)
        for micro_batch in self._micro_batches(batch):
            losses, next_losses = self.model_losses(micro_batch, mtp_weights, device_loss_scale, attn_args_by_kind,
                                                    self.head_precision, row_buffers)
            next_sum += next_losses.sum()
            seq_sums = losses.sum(dim=1)
            if loss_scale:
                for group in self.optimizer.sharded_groups.values():
                    group.num_backwards += 1
                seq_sums.sum().backward(device_loss_scale)
            else:
                self.optimizer.add_zero_grads()
            seq_sums_by_micro_batch.append(seq_sums.detach())
        return StepLoss(torch.cat(seq_sums_by_micro_batch), next_sum, batch.tokens.numel())

    def optim_step(self, step_cfg: StepConfig) -> None:
        """Update the parameters that are due in this step, and clear their gradients. Collective."""
        self.optimizer.step(step_cfg)

    def prefetch_rows(self, plans: dict[str, RowPlan]) -> None:
        """Start to copy table rows from host memory to the device, for the next step."""
        for label, plan in plans.items():
            self.tables[label].prefetch(plan)

    def fetch_rows(self, plans: dict[str, RowPlan]) -> None:
        """Launch the all-to-alls that fetch the table rows of the next step into the row caches. Collective."""
        for label, plan in plans.items():
            self.tables[label].fetch(plan)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], step_cfg: StepConfig) -> float:
        """Return the validation loss: mean next-token cross-entropy over all ranks, in nats per token. Collective."""
        # Sum on the device, to avoid a synchronization per batch. Sum in f64, because there are millions of losses.
        total_loss = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        num_tokens = 0
        for batch in batches:
            # row_buffers is {table label: (rows, None)}, because evaluation has no gradient buffers.
            attn_args_by_kind, row_buffers = self._eval_inputs(batch, step_cfg)
            for micro_batch in self._micro_batches(batch):
                hidden = self.model_hidden(micro_batch, attn_args_by_kind, row_buffers).flatten(0, 1)
                for y, targets in zip(hidden.split(EVAL_CHUNK), micro_batch.targets.flatten().split(EVAL_CHUNK)):
                    losses = self.next_token_losses(y, self.model.lm_head, targets)
                    total_loss += losses.sum(dtype=torch.float64)
            num_tokens += batch.targets.numel() * self.comm.world_size
        # float() would synchronize without a timeout, so synchronize with a timeout first.
        self.comm.synchronize()
        return sum(self.comm.all_gather(float(total_loss))) / num_tokens

    @torch.no_grad()
    def next_logits(self, tokens: list[int], step_cfg: StepConfig) -> Tensor:
        """Compute the softcapped logits (V,) of the token that follows `tokens`. Collective."""
        # Sequence lengths must be multiples of SEQ_MULTIPLE. Attention is causal, so padding after the context does not
        # affect the logits at the last position of the context.
        context = tokens[-(self.cfg.val_batch_tokens // self.cfg.seqs_per_step):]
        seq_len = -(-len(context) // SEQ_MULTIPLE) * SEQ_MULTIPLE
        padded = np.zeros(seq_len + 1, np.uint16)
        padded[:len(context)] = context
        seq = PackedSeq(padded, np.asarray([0, seq_len], np.int32))
        batch, = build_batches(self.cfg, self.comm, process_group=None, purpose="sample", cycle=[step_cfg],
                               seqs_by_step=[[seq]])
        batch = batch.to(self.comm.device)
        hidden_states = self.model.hidden_states(batch, *self._eval_inputs(batch, step_cfg))
        return softcap((hidden_states[0, len(context) - 1] @ self.model.lm_head).to(self.accum_dtype))

    def _eval_inputs(self, batch: Batch,
                     step_cfg: StepConfig) -> tuple[AttentionArgsByKind, dict[str, tuple[Tensor, None]]]:
        """Prepare the remaining arguments of `GPT.hidden_states` for an evaluation batch. Collective."""
        row_buffers = {}
        for label, table in self.tables.items():
            rows = table.fetch_for_eval(batch.plans.get(label))
            if self.compiling and label in batch.plans:   # do not recompile when the number of rows changes
                torch._dynamo.maybe_mark_dynamic(rows, 0)
            row_buffers[label] = rows, None
        # Evaluation does not truncate documents, so a document may be as long as a sequence.
        return self._set_attention(step_cfg, max_doc_len=batch.tokens.shape[1]), row_buffers

    def _set_attention(self, step_cfg: StepConfig, max_doc_len: int) -> AttentionArgsByKind:
        """Build the AttentionArgs of a step, and update the model's RoPE buffers if necessary."""
        if step_cfg.rotary != self.rotary:
            self.model.set_rotary(step_cfg.rotary.frequencies)
            self.rotary = step_cfg.rotary
        return attention_args(step_cfg.short_window, step_cfg.long_window, max_doc_len, step_cfg.rotary.attn_scale)

    def _micro_batches(self, batch: Batch) -> Iterable[Batch]:
        """Yield the micro-batches of a batch: views of at most self.micro_batch_size sequences each."""
        for start in range(0, len(batch.tokens), self.micro_batch_size):
            micro_batch = batch.map(operator.itemgetter(slice(start, start + self.micro_batch_size)))
            if self.compiling:                            # do not recompile when the number of documents changes
                torch._dynamo.maybe_mark_dynamic(micro_batch.cu_seqlens, 1)
            yield micro_batch

    # A snapshot copies the tensors of this rank, including its shards. Files contain full tensors, and table rows with
    # their global indices, so that a run with another world size can load the files.
    def state_tensors(self) -> dict[str, Tensor]:
        """Return {name: tensor} of this rank's weights and optimizer state, except row-wise tables."""
        tensors = self.model.state_dict()
        for label, state in self.optimizer.state.items():
            tensors |= {f"{label}.{name}": x for name, x in state.items()}
        return tensors

    def snapshot(self) -> Callable[[], None]:
        """Copy the training state to host memory, and return a function that restores it in place, bit for bit."""
        copies = {name: x.to("cpu", copy=True) for name, x in self.state_tensors().items()}
        touched_by_store = [(table.store, list(table.store.touched_state()))
                            for table in self.tables.values() if table.store]
        # Training uses only the CPU generator, and never that of the device.
        rng = torch.get_rng_state()

        @torch.no_grad()
        def restore() -> None:
            # Copy in place, so that every tensor keeps its address and no graph is recompiled.
            for name, x in self.state_tensors().items():
                x.copy_(copies[name])
            for store, chunks in touched_by_store:
                store.clear()
                for local_rows, state in chunks:
                    store.load_chunk(local_rows, state)
            self.rotary = None                            # the next step recomputes the RoPE buffers
            self.discard_grads()
            torch.set_rng_state(rng)

        return restore

    def discard_grads(self) -> None:
        """Clear all gradients, invalidate cached and prefetched table rows, and zero the byte counts of tables."""
        for label, group in self.optimizer.groups.items():
            if label in self.tables:
                self.tables[label].reset()
            else:
                group.zero_grad()

    def _gather_full(self, name: str, x: Tensor) -> Tensor | None:
        """Gather one weight or optimizer state tensor from all ranks into a CPU tensor on rank 0. Collective."""
        label, _, state_name = name.partition(".")
        is_shard = state_name and label in self.optimizer.sharded_groups
        if label not in self.tables and not is_shard:
            return x.to("cpu", copy=True)
        # comm.all_gather gathers Python objects, which NCCL copies to device memory. Limit this memory with chunks of
        # up to CHUNK_ROWS rows. Shards may differ in size between ranks, but the number of chunks must not.
        num_rows = self.model.specs[label].shape[0]
        num_chunks = num_rows // (CHUNK_ROWS * self.comm.world_size) + 1
        # all_gather pickles the whole storage of a tensor, so copy the chunk also on a CPU.
        chunks = [self.comm.all_gather(chunk.to("cpu", copy=True)) for chunk in x.tensor_split(num_chunks)]
        if self.comm.rank != 0:
            return None
        shards = [torch.cat(chunks_of_rank) for chunks_of_rank in zip(*chunks)]
        if is_shard:
            return torch.cat(shards)
        # Interleave the rows of the ranks: global row r is local row r // W of rank r % W. Drop the padding at the end.
        return torch.stack(shards, dim=1).flatten(0, 1)[:num_rows]

    def full_state(self, step_cfg: StepConfig, with_moments: bool) -> dict[str, Tensor | None]:
        """Gather all weights except row-wise tables into full CPU tensors on rank 0. Collective."""
        # Only the names of optimizer state contain a dot.
        tensors = {name: self._gather_full(name, x) for name, x in self.state_tensors().items()
                   if with_moments or "." not in name}
        if step_cfg.tied and self.comm.rank == 0:
            tensors["embed"] = tensors["lm_head"].t().contiguous()
        return tensors

    @torch.no_grad()
    def load_state(self, full_tensors: dict[str, Tensor]) -> None:
        """Copy this rank's part of full weights and optimizer state into the engine, and clear all gradients."""
        for name, x in self.state_tensors().items():
            x.copy_(self.local_part(name, full_tensors[name]))
        self.discard_grads()

    def traffic_totals(self) -> dict[str, Counter[str]]:
        """Return {table label: byte counts of training}, summed over all ranks. Collective."""
        bytes_by_table = {}
        for label, table in self.tables.items():
            bytes_by_table[label] = Counter()
            host_traffic = table.store.traffic if table.store else {}
            for totals in self.comm.all_gather({**table.byte_totals, **host_traffic}):
                bytes_by_table[label].update(totals)
        return bytes_by_table

def train_step(engine: Engine, loader: Loader, step_cfg: StepConfig) -> StepLoss:
    """Train on the batch of one step, and start to fetch the table rows of the next step. Collective."""
    losses = engine.forward_backward(loader.next(step_cfg), step_cfg)
    # On the last step of a cycle, next_plans() waits for the loader thread. The backward pass is launched earlier, so
    # that the GPU computes during this wait.
    next_plans = loader.next_plans()
    engine.prefetch_rows(next_plans)     # start to copy rows of host tables to the device
    engine.optim_step(step_cfg)
    engine.fetch_rows(next_plans)        # launch the all-to-alls of the rows in next_plans
    return losses

def schedule_cycle(first_step: int, schedule: Schedule, clock: Clock) -> list[StepConfig]:
    """Return the step configs of the cycle that starts at `first_step`, or [] at the end of training. Collective."""
    budget_ms = 1000 * schedule.cfg.time_budget
    if budget_ms and len(schedule.cycle_progress) <= first_step // schedule.cycle_steps:
        predicted_start_ms = clock.comm.all_gather(clock.predict_next_cycle_start_ms())[0]
        previous_progress = schedule.cycle_progress[-1] if schedule.cycle_progress else 0.0
        schedule.cycle_progress.append(max(previous_progress, predicted_start_ms / budget_ms * schedule.planned_steps))
    return [schedule.at(step) for step in range(first_step, min(first_step + schedule.cycle_steps, schedule.end_step))]

def train_loop(info: RunInfo, loader: Loader, engine: Engine, validation: ValidationSet, clock: Clock, log: Log,
               profiler: torch.profiler.profile | None = None) -> tuple[float, OutOfData | None]:
    """Train until the schedule or the data ends, then validate. Collective."""
    schedule = log.schedule
    first_step = log.steps_done
    out_of_data: OutOfData | None = None
    clock.start()
    with log.phase("first batch", timed=True):
        loader.start(schedule_cycle(first_step, schedule, clock))
    try:
        while log.steps_done < schedule.end_step:
            step_cfg = schedule.at(log.steps_done)
            if step_cfg.checkpoint and step_cfg.step > first_step:
                clock.stop()
                with log.phase("checkpoint"):
                    state = dict(log=log.state(), train_time_ms=clock.ms, cycle_progress=schedule.cycle_progress,
                                 fingerprint=info.fingerprint | dict(seed=str(schedule.cfg.seed)))
                    write_checkpoint(log.run_dir, info.run_id, state, engine, step_cfg)
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
    except OutOfData as error:           # the caller raises it, after the trained steps are validated and saved
        out_of_data = error
    clock.stop()

    # With --time_budget, log the number of steps, because it is not known before the end of training.
    log.flush()
    if schedule.cfg.time_budget:
        log.total_steps = log.steps_done
        log.event("budget", seconds=schedule.cfg.time_budget, steps=log.steps_done)
    # If the schedule was completed, this step config has the wider window of the final validation.
    end_cfg = schedule.at(log.steps_done)
    with log.phase("evaluation"):
        loss = engine.evaluate(validation.batches(end_cfg), end_cfg)
    log.validation(loss, clock.ms, validation)
    return loss, out_of_data


# ====== Section 6: Base ===============================================================================================
class DataError(TrainerError):
    """Missing, corrupt or insufficient data."""

class RunError(TrainerError):
    """A failure during a run: non-finite loss, out of memory, full disk, lost rank."""
    exit_status = 1

def lost_rank_error(found: str) -> RunError:
    """Build the RunError for a rank that no longer responds. found: the symptom, such as a timeout."""
    return RunError("lost another rank", found=found, expected="a response from every rank within --comm_timeout",
                    hint="check the other ranks: killed (dmesg shows the out-of-memory killer) or stuck; torchrun "
                         "names the first to fail")

# {errno of an OSError: (`expected`, `hint`) of the TrainerError that reports it}
IO_REMEDIES = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), (
        "a path that does not exist", "choose another path; another run may be writing to this one")),
    errno.ENOENT: ("an existing path", "check the spelling, and whether another program has removed the path"),
    errno.EIO: ("a disk that works", "check the disk (dmesg shows its errors), or use another disk"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("free disk space", "free disk space, or use another disk")),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), (
        "permission to access the path", "fix the permissions (ls -ld PATH shows them), or choose another path"))}

@contextlib.contextmanager
def write_errors(path: Path, error_type: type[TrainerError] = RunError, source: str = "") -> Iterator[None]:
    """Convert an I/O error in the body of a `with` statement into an error of class `error_type` that names `path`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        # If the disk fails, torch.save raises a RuntimeError whose context is the OSError.
        expected, hint = IO_REMEDIES.get(getattr(error.__context__ or error, "errno", None), (
            "a path that can be written", "check the path, or choose another one"))
        raise error_type(f"{source}writing {path}", found=error.__context__ or error, expected=expected,
                         hint=hint) from None

@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert any exception in the body of a `with` statement into a DataError that names `path`."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        # Omit torch's message. It suggests weights_only=False, which executes code from the file.
        found = getattr(error, "strerror", None) or f"corrupt, unreadable or with pickled code ({type(error).__name__})"
        expected, hint = IO_REMEDIES.get(getattr(error, "errno", None), (
            "a file as this trainer writes it",
            "choose another file, write it again, or use the trainer that wrote it"))
        raise DataError(path, found=found, expected=expected, hint=hint) from None

MAX_SMALL_FILE_BYTES = 64 << 20      # of settings, a manifest or a vocabulary; the vocabulary of GPT-2 has 0.8 MB

def read_small_file(path: Path, hint: str) -> bytes:
    """Read the bytes of a settings file, a manifest or a vocabulary."""
    # Check before opening the file, because opening a named pipe waits for another process.
    check(path.is_file() and path.stat().st_size <= MAX_SMALL_FILE_BYTES, path,
          found=f"{path.stat().st_size:,} bytes" if path.is_file() else "no regular file of this name",
          expected=f"a regular file of at most {MAX_SMALL_FILE_BYTES:,} bytes", hint=hint, error=DataError)
    return path.read_bytes()

# {character: escape sequence}, for `str.translate`. File names, samples and messages may contain text of a downloaded
# file. A terminal executes control characters, so escape them, except line breaks and tabs, wherever text is printed.
ESCAPED_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}

def wait_for_work(work: dist.Work | None) -> None:
    """Wait for a collective. With NCCL, this blocks the current CUDA stream, not the host."""
    if work is not None:
        work.wait()

def result_with_timeout(future: Future, timeout_s: float, what: str) -> Any:
    """Wait for a background task, and return the task's result or raise the task's exception."""
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        if future.done():                                 # the task raised TimeoutError, for example on a network disk
            raise
        raise RunError(what, found=f"no result after {timeout_s} s", expected="a result within the timeout",
                       hint="check the disk and the other ranks, or increase --comm_timeout") from None

DEVICE_TIMEOUT_FRACTION = 0.8        # timeout of waiting for a device event, as a fraction of Communicator.timeout
DEVICE_POLL_S = 1e-4                 # s between two queries of an event

def happens_within(seconds: float, event: torch.cuda.Event) -> bool:
    """Poll a device event from the host, and return whether the event completes within `seconds`."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(DEVICE_POLL_S)
    return True

@dataclass(eq=False)
class Communicator:
    """Rank and device of this process, and collectives over all ranks. Passed as an argument, never global."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    # The loader thread exchanges row plans over a separate gloo group, because all ranks must launch the collectives of
    # one group in the same order.
    loader_group: dist.ProcessGroup | None = None
    timeout: float = 600.0           # s to wait for another rank; `set_timeout` changes it

    @property
    def on_cuda(self) -> bool:
        """Return whether the device of this rank is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all work on the device, on all streams. No-op on a CPU."""
        if self.on_cuda:
            self.wait_for(self.record_event())
            # The event covers the current stream only. Copies and collectives of the next cycle run on other streams,
            # so wait for the whole device, too. Only the wait for the event has a timeout.
            torch.cuda.synchronize(self.device)

    def record_event(self) -> torch.cuda.Event:
        """Record a CUDA event on the current stream, and return the event. Requires a GPU."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Block the host until a device event completes."""
        # NCCL aborts the process, without a line in the log, if a collective does not complete within `timeout` after
        # its launch. This wait begins after the launch and must end before NCCL aborts, so the fraction is below 1.
        seconds = DEVICE_TIMEOUT_FRACTION * self.timeout
        if not happens_within(seconds, event):
            no_response = f"no response from {self.device} after {seconds:.1f} s"
            raise lost_rank_error(no_response) if self.world_size > 1 else RunError("waiting for the device",
                found=no_response, expected="the device finishes the work launched on it",
                hint="check the device for errors (dmesg, nvidia-smi -q), or give a longer --comm_timeout")

    def launch(self, collective: Callable, *tensors: Tensor) -> dist.Work | None:
        """Launch a torch.distributed collective, such as dist.all_reduce, asynchronously. Collective."""
        return None if self.world_size == 1 else collective(*tensors, async_op=True)

    def set_timeout(self, seconds: float) -> None:
        """Set self.timeout and the timeouts of all process groups, in seconds."""
        self.timeout = seconds
        if self.world_size > 1:
            # torch has no public function for this before version 2.14.
            set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.loader_group):
                set_group_timeout(timedelta(seconds=seconds), group)

    def pinned(self, x: np.ndarray | Tensor) -> Tensor:
        """Convert an array or a CPU tensor to a CPU tensor, in pinned memory if the device is a GPU."""
        tensor = torch.as_tensor(x)
        return tensor.pin_memory() if self.on_cuda else tensor

    def set_thread_device(self) -> None:
        """Make this rank's GPU the current device of the calling thread. No-op on a CPU."""
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def print0(self, text: str) -> None:
        """Print text on rank 0 only. Control characters are escaped."""
        if self.rank == 0:
            with contextlib.suppress(OSError, ValueError):
                print(text.translate(ESCAPED_CONTROLS), flush=True)

    def all_gather(self, obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather one picklable object from every rank into a list, in rank order. Collective."""
        objs = [obj] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(objs, obj, group)
        return objs

    def check_agreement(self, facts: dict[str, str]) -> None:
        """Check that every value of `facts`, {name: value}, is equal on all ranks. Collective."""
        # Every rank compares all ranks with rank 0, so that all ranks raise the same error and no rank is left waiting.
        facts_by_rank = self.all_gather(facts)
        for rank, other_facts in enumerate(facts_by_rank):
            for name, value in facts_by_rank[0].items():
                other_value = other_facts.get(name)
                check(other_value == value, f"ranks disagree about {name}",
                      found=f"{value} on rank 0, {other_value} on rank {rank}", expected="the same value on every rank",
                      hint="start every rank with the same flags, data and source")

    @contextlib.contextmanager
    def raise_together(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Context manager: a TrainerError that the body raises on any rank is raised on every rank. Collective."""
        own_error = None
        try:
            yield
        except TrainerError as error:
            own_error = error
        errors = self.all_gather(own_error, group)
        for rank, error in enumerate(errors):
            if error is not None:
                what, *rest = error.args                  # args of a TrainerError: what, found, expected, hint
                raise type(error)(f"{what}, on rank {rank}" if None in errors else what, *rest)

    def compiles(self, cfg: Config) -> bool:
        """Return whether this run uses torch.compile: if --compile is 1, or if it is -1 and the device is a GPU."""
        return cfg.compile == 1 or bool(cfg.compile and self.on_cuda)

def compile_fn(fn: Callable, cfg: Config, comm: Communicator, *, round_as_eager: bool = False) -> Callable:
    """Wrap `fn` in torch.compile, or return `fn` unchanged if this run does not use torch.compile."""
    options = {"emulate_precision_casts": round_as_eager}
    return torch.compile(fn, dynamic=False, fullgraph=True, options=options) if comm.compiles(cfg) else fn

def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators and optimizer state for weights of `dtype`: f32, or f64 for f64 weights."""
    return torch.promote_types(dtype, torch.float32)


# ====== Section 7: Kernels ============================================================================================
# The PyTorch reference of an operation runs on every device. A Triton kernel must match the reference next to it.
RMS_EPS = 2.0**-23                       # modded-nanogpt's epsilon for bf16, used for every dtype here
FP8_MAX = 448.0                          # largest e4m3 value
# Dequantization scales of the fp8 head (RECIPE 2.8), as f32 values. Multiply scales in f64, and round the result once.
FP8_Y_SCALE = float(np.float32(100 / FP8_MAX))
FP8_W_SCALE = float(np.float32(1.6 / FP8_MAX))
FP8_GRAD_SCALE = float(np.float32(0.75 / FP8_MAX))
MIN_QUERY_BLOCK = 32                     # queries; the overhead of smaller blocks exceeds the work that they save
ADD_ROWS_BLOCK = 16                      # gradients that a program of add_rows_kernel loads per iteration
NUM_SIGN_VECTORS = 8192                  # random +-1 vectors; sign_vectors appends an all-ones vector
SIGN_SEED = 92                           # arbitrary seed of sign_vectors
CPU_CHUNK_LOGITS = 1 << 19               # logits per chunk on a CPU, so that a chunk and its temporaries fit in cache
LOGIT_CAP, LOGIT_SHIFT, LOGIT_WIDTH = 23.0, 5.0, 7.5      # z = 23 sigmoid((logit + 5) / 7.5)

# The module triton.language. `triton_jit` imports it on first use, because runs on a CPU need no Triton.
tl = None

@functools.cache
def triton_jit(kernel: Callable) -> Any:
    """Wrap a kernel in triton.jit. Imports Triton on first use, and sets the global `tl` that the kernels refer to."""
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(kernel)

def first_order_only(backward: Callable) -> Callable:
    """Decorate the `backward` of an autograd function so that it raises RunError with create_graph=True."""
    # torch's once_differentiable is not enough: it raises no error if the upstream gradient does not require grad.
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run `backward`. Raises RunError if backward runs with create_graph=True."""
        check(not torch.is_grad_enabled() or torch.compiler.is_compiling(), "backward with create_graph=True",
              found="a request for second derivatives", expected="first derivatives only",
              hint="drop create_graph=True, or use plain PyTorch operations", error=RunError)
        return backward(ctx, *grads)
    return wrapper

def rms_norm(x: Tensor) -> Tensor:
    """Apply RMSNorm without a learned gain over the last dimension: x / sqrt(mean(x^2) + RMS_EPS)."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMS_EPS)

def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate the channel pairs (2i, 2i + 1) in the first half of every head by -angle."""
    # Rotating all channels, the second half by angle 0, takes fewer passes than splitting x into halves.
    pairs_swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + pairs_swapped * sin


# ---- Attention
ATTENTION_ARGS: dict[str, "AttentionArgs"] = {}           # registry, keyed by AttentionArgs.name

@dataclass(frozen=True)
class AttentionArgs:
    """Attention window, maximum document length and softmax scale."""
    max_seqlen: int                      # upper bound of the document length, in positions
    window: int                          # maximum number of earlier positions that a query sees
    scale: float                         # softmax scale
    # Key in ATTENTION_ARGS. Layers with the same attention and window use the same name in all stages. An empty name is
    # replaced by a name that lists the three values.
    name: str = ""

    def __post_init__(self) -> None:
        # torch.compile guards on every value that compiled code reads, and recompiles when a value changes. Compiled
        # code therefore reads only the name, which is constant. Passing the values as a CPU tensor also avoids
        # recompilation, but Inductor then assumes that the outputs of the operation are unaligned, and loads and stores
        # them 2 bytes at a time.
        name = self.name or f"{self.max_seqlen} {self.window} {self.scale}"
        object.__setattr__(self, "name", name)
        ATTENTION_ARGS[name] = self

AttentionArgsByKind = dict[tuple[str, str], AttentionArgs]            # (Layer.attention, Layer.window) -> arguments

def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: AttentionArgs) -> Tensor:
    """Compute causal softmax attention within each document and a sliding window, in O(N * window)."""
    # The lookback is the largest distance between a query and a key that the query sees. Split the queries into blocks
    # that are at least as long as the lookback. Every query then sees only keys of its block and of the previous block.
    # Pad with zeros before block 0 and at the end of the last block.
    N, H, E = q.shape
    lookback = min(attn_args.window, attn_args.max_seqlen - 1)
    block_len = min(N, max(lookback, MIN_QUERY_BLOCK))
    num_blocks = -(-N // block_len)
    padding = num_blocks * block_len - N
    queries = F.pad(q, (0, 0, 0, 0, 0, padding)).view(num_blocks, block_len, H, E)
    padded_kv = [F.pad(x, (0, 0, 0, 0, block_len, padding)).view(num_blocks + 1, block_len, H, E) for x in (k, v)]
    keys, values = (torch.cat((x[:-1], x[1:]), dim=1) for x in padded_kv)     # (num_blocks, 2 * block_len, H, E)

    # Key positions before block 0 are negative. For these keys, doc_ids[key_pos] wraps around and returns an unrelated
    # id, so in_window must mask them.
    positions = torch.arange(num_blocks * block_len, device=q.device)
    doc_ids = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    query_pos = positions.view(num_blocks, block_len, 1)
    key_pos = query_pos[:, :1] + torch.arange(-block_len, block_len, device=q.device)  # (num_blocks, 1, 2 * block_len)
    in_window = (key_pos >= 0) & (key_pos <= query_pos) & (key_pos >= query_pos - attn_args.window)
    visible = in_window & (doc_ids[key_pos] == doc_ids[query_pos])            # (num_blocks, block_len, 2 * block_len)
    heads_first = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible[:, None], scale=attn_args.scale)
    return out.transpose(1, 2).reshape(num_blocks * block_len, H, E)[:N]

def torch_varlen_ops() -> Any:
    """Return torch.ops.torch_attn, the namespace of torch's varlen attention ops."""
    importlib.import_module("torch.nn.attention.varlen")
    return torch.ops.torch_attn

def varlen_kwargs(cu_seqlens: Tensor, name: str) -> dict[str, Any]:
    """Build the keyword arguments that torch's varlen forward and backward ops share."""
    attn_args = ATTENTION_ARGS[name]
    # window_size is (left, right). A right window of 0 makes attention causal.
    return dict(cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=attn_args.max_seqlen, max_k=attn_args.max_seqlen,
                is_causal=False, scale=attn_args.scale, window_size=[attn_args.window, 0])

@torch.library.custom_op("train_gpt::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, args_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward pass of torch's varlen attention. Returns (out, logsumexp, rng_state), all saved for backward."""
    return torch_varlen_ops()._varlen_attn(q, k, v, **varlen_kwargs(cu_seqlens, args_name))

@varlen.register_fake
def _(*inputs: Tensor | str) -> tuple[Tensor, Tensor, Tensor]:
    # The output shapes do not depend on max_q and max_k, so any values will do.
    *qkv, cu_seqlens, _ = inputs
    return torch_varlen_ops()._varlen_attn(*qkv, cu_seqlens, cu_seqlens, max_q=1, max_k=1)

@torch.library.custom_op("train_gpt::varlen_backward", mutates_args=())
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor,
                    logsumexp: Tensor, rng_state: Tensor, args_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass of torch's varlen attention. Returns the gradients of q, k and v."""
    return torch_varlen_ops()._varlen_attn_backward(grad, q, k, v, out, logsumexp, rng_state=rng_state,
                                                 **varlen_kwargs(cu_seqlens, args_name))

@varlen_backward.register_fake
def _(_: Tensor, *inputs: Tensor | str) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs[:3]))                           # inputs[:3]: q, k and v

class Varlen(torch.autograd.Function):
    """torch's varlen attention, with AttentionArgs passed by name, so that new values do not recompile."""
    # With torch's public `varlen_attn`, torch.compile would treat window, maximum length and scale as constants of the
    # graph, and recompile in every stage.
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
    """Compute causal softmax attention within each document and a sliding window, with torch's varlen kernel."""
    return Varlen.apply(q, k, v, cu_seqlens, attn_args.name)


# ---- Weight gradients. Backward accumulates them in main_grad immediately, and returns None to autograd.
# Megatron sets this attribute on weights whose hooks need a gradient. For such a weight, backward returns zeros instead
# of None, and sets the attribute to True.
GRAD_ADDED_FLAG = "grad_added_to_main_grad"

def op_in_graphs(*mutates_args: str) -> Callable:
    """Return a decorator that makes a function a custom op in compiled graphs."""
    def decorator(fn: Callable) -> Callable:
        """Register `fn` as custom op train_gpt::<fn.__name__>."""
        op = torch.library.custom_op(f"train_gpt::{fn.__name__}", fn, mutates_args=mutates_args)

        @functools.wraps(fn)
        def wrapper(*args: Any) -> None:
            """Call the custom op in compiled graphs, and `fn` in eager code."""
            return op(*args) if torch.compiler.is_compiling() else fn(*args)
        return wrapper
    return decorator

@op_in_graphs("main_grad", "write_counts")
def add_to_main_grad(main_grad: Tensor, write_counts: Tensor, count_idx: int, a: Tensor, b: Tensor | None) -> None:
    """Accumulate a weight gradient in main_grad: the matmul a^T b, or `a` if b is None."""
    # Read the count on the CPU at run time, so that the first and later writes run the same compiled graph. With
    # beta = 0, addmm does not read the old content of main_grad, which may be NaN.
    beta = min(int(write_counts[count_idx]), 1)
    write_counts[count_idx] += 1
    dtype = main_grad.dtype
    if b is None and beta == 0:
        main_grad.copy_(a)
    elif b is None:
        main_grad.add_(a)
    elif a.is_cuda and a.dtype != dtype:
        # With out_dtype, the matmul accumulates in f32 without converted copies of a and b.
        torch.addmm(main_grad, a.t(), b, out_dtype=dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(a.t().to(dtype), b.to(dtype), beta=beta)

# Queue of deferred weight gradients: for each one, the WeightMatrix, the arguments a and b of
# WeightMatrix.add_gradient, and the autograd versions of these tensors when they were queued.
DeferredGrads = list[tuple["WeightMatrix", Tensor, Tensor | None, list[int]]]

class WeightMatrix(NamedTuple):
    """One matrix of a parameter, and the main_grad buffer that accumulates the gradient of the matrix."""
    param: Tensor
    matrix: Tensor                       # (I, J): param itself, a view of one matrix of a bank, or a transposed view
    main_grad: Tensor | None = None      # (I, J): this matrix's view of param.main_grad; None: use param.grad
    count_idx: int = 0                   # index of this matrix in param.write_counts
    # Queue to which backward appends the gradient for `run_deferred`; None: backward computes the gradient immediately.
    # The trainer itself always uses None.
    deferred: DeferredGrads | None = None

    def t(self) -> WeightMatrix:
        """Return a view with matrix and main_grad transposed."""
        main_grad = None if self.main_grad is None else self.main_grad.t()
        return self._replace(matrix=self.matrix.t(), main_grad=main_grad)

    def add_gradient(self, a: Tensor, b: Tensor | None) -> Tensor | None:
        """Accumulate the gradient of the matrix: a^T b, or `a` if b is None."""
        if not self.param.requires_grad:
            return None
        if self.deferred is not None:
            self.deferred.append((self, a, b, [x._version for x in (a, b) if x is not None]))
        elif self.main_grad is None:
            return a if b is None else a.t() @ b
        else:
            add_to_main_grad(self.main_grad, self.param.write_counts, self.count_idx, a, b)
        # Never return main_grad or a view of main_grad: autograd may store the returned tensor as .grad, and later add
        # to .grad in place. For the same reason, allocate new zeros in every call.
        if self.main_grad is None or not hasattr(self.param, GRAD_ADDED_FLAG):
            return None
        setattr(self.param, GRAD_ADDED_FLAG, True)
        return torch.zeros_like(self.matrix)

def as_matrix(param: Tensor, deferred: DeferredGrads | None = None) -> WeightMatrix:
    """Build the WeightMatrix of a parameter (I, J) that is a single matrix. Uses param.main_grad if it exists."""
    return WeightMatrix(param, param, getattr(param, "main_grad", None), deferred=deferred)

def matrices_by_layer(bank: Tensor, matrix_heights: tuple[int, ...]) -> list[list[WeightMatrix]]:
    """Split a bank into one list of weight matrices per layer."""
    # Unbind the bank once for all layers. Without main_grad, autograd then builds one gradient of the bank's size
    # instead of one per layer.
    shape = (len(bank), sum(matrix_heights), bank.shape[-1])
    layers = bank.view(shape).unbind()
    by_layer = []
    for i, layer in enumerate(layers):
        main_grads = (bank.main_grad.view(shape)[i].split(matrix_heights) if hasattr(bank, "main_grad")
                      else [None] * len(matrix_heights))
        first_count_idx = i * len(matrix_heights)
        by_layer.append([WeightMatrix(bank, matrix, main_grad, first_count_idx + j)
                         for j, (matrix, main_grad) in enumerate(zip(layer.split(matrix_heights), main_grads))])
    return by_layer

@torch.no_grad()
def run_deferred(deferred: DeferredGrads) -> None:
    """Compute and accumulate all weight gradients in the queue `deferred`, and clear the queue."""
    for weight, a, b, versions in deferred:
        check(versions == [x._version for x in (a, b) if x is not None],
              f"run_deferred: deferred gradient of a weight matrix {tuple(weight.matrix.shape)}",
              found="a tensor that its gradient is computed from was modified in place after backward",
              expected="tensors that are unchanged since backward",
              hint="call run_deferred before the in-place operation, or modify a copy", error=RunError)
    for weight, a, b, _ in deferred:
        grad = weight._replace(deferred=None).add_gradient(a, b)
        # The matrix may be a view. Its backward adds the gradient to the corresponding elements of param.grad.
        if weight.main_grad is None:
            weight.matrix.backward(grad)
    deferred.clear()

class LinearFunction(torch.autograd.Function):
    """Linear layer with an optional scale on the weight: x @ (scale * matrix)^T."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, matrix: Tensor, grad_target: WeightMatrix) -> Tensor:
        ctx.save_for_backward(x, scale, matrix)
        ctx.grad_target = grad_target
        return F.linear(x, matrix if scale is None else scale * matrix)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, matrix = ctx.saved_tensors
        grad_x = grad_out @ (matrix if scale is None else scale * matrix)
        flat_grad_out, flat_x = grad_out.flatten(0, -2), x.flatten(0, -2)
        if scale is None:
            return grad_x, None, ctx.grad_target.add_gradient(flat_grad_out, flat_x), None

        # Compute the gradient of scale * matrix in the dtype of main_grad. Rounding it to bf16 first would lose
        # precision that an f32 main_grad can store.
        main_grad = ctx.grad_target.main_grad
        dtype = grad_out.dtype if main_grad is None else torch.promote_types(grad_out.dtype, main_grad.dtype)
        if grad_out.is_cuda and grad_out.dtype != dtype:
            grad_weight = torch.mm(flat_grad_out.t(), flat_x, out_dtype=dtype)
        else:
            grad_weight = flat_grad_out.t().to(dtype) @ flat_x.to(dtype)
        grad_scale = (grad_weight * matrix).sum()
        # b=None: the first argument is already the product.
        return grad_x, grad_scale, ctx.grad_target.add_gradient(scale * grad_weight, b=None), None

def linear_main_grad(x: Tensor, weight: WeightMatrix, scale: Tensor | None = None) -> Tensor:
    """Apply a linear layer, x @ (scale * weight.matrix)^T. Backward accumulates the weight gradient in main_grad."""
    return LinearFunction.apply(x, scale, weight.matrix, weight)


# ---- relu^2 MLP. Forward saves only relu(x up^T)^2. Backward recovers relu(x up^T) as the square root.
# {compute capability: (tile, (num_stages in forward, num_stages in backward))}. The accumulators of a tile fit in
# registers. num_stages is the largest that fits in shared memory. Backward also needs shared memory for `squares`.
LARGE_TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8), (4, 3)
RELU_SQ_TILES = {(8, 0): (dict(LARGE_TILE[0], BLOCK_N=128), (3, 3)), (9, 0): LARGE_TILE, (10, 0): LARGE_TILE}
TMA_ALIGN_BYTES = 16                     # strides of tensor descriptors must be multiples of this

def relu_sq_kernel(x, w, squares, out, M, N, K, BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> None:
    """Compute out = relu(x w^T)^2, or out = 2 (x w^T) sqrt(squares) if BACKWARD is true."""
    # This is a persistent kernel: each program computes several tiles, and loads the operands of the next tile while it
    # stores the current tile. A tile is stored in two halves, which leaves more shared memory for the loads. Tensor
    # descriptors have 64-bit addresses, and out-of-bounds loads return 0.
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
    """Compute a matmul of the relu^2 MLP, fused with the activation in forward or with its derivative in backward."""
    triton = importlib.import_module("triton")
    device = x.device
    props = torch.cuda.get_device_properties(device)
    tile, num_stages = RELU_SQ_TILES[props.major, props.minor]
    M, K = x.shape
    N = len(w)
    out = x.new_empty(M, N)
    backward = squares is not None
    squares_or_out = squares.contiguous() if backward else out                # forward ignores this argument

    # Triton allocates memory for the tensor descriptors with this allocator. The lambda captures the device instead of
    # x, because Triton stores the lambda, and a captured x would stay in memory. Set the allocator on every launch,
    # because Triton has one per thread, and autograd runs backward on another thread.
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
    """Return whether relu_sq supports the device, the dtype and the GEMM sizes K and N of x (M, K) and w (N, K)."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    # Compiled code may read device properties, because torch.compile treats them as constants.
    aligned = all(size * x.element_size() % TMA_ALIGN_BYTES == 0 for size in (x.shape[1], len(w)))
    props = torch.cuda.get_device_properties(x.device)
    return aligned and (props.major, props.minor) in RELU_SQ_TILES

class ReluSqMLP(torch.autograd.Function):
    """relu^2 MLP: relu(x up^T)^2 down."""
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
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, squares, up_matrix, down_matrix = ctx.saved_tensors
        flat_grad_out = grad_out.flatten(0, -2)
        if fits_relu_sq(flat_grad_out, down_matrix):
            grad_preact = relu_sq(flat_grad_out, down_matrix, squares)
        else:
            # MKL takes 8 times as long for the square root of 0 as for the square root of `tiny`, the smallest normal
            # number. Clamp to `tiny`, and subtract the square root of `tiny` afterwards, so that 0 remains 0.
            tiny = torch.finfo(squares.dtype).tiny
            square_roots = squares.clamp_min(tiny).sqrt_().sub_(tiny**0.5)
            grad_preact = F.linear(2 * flat_grad_out, down_matrix).mul_(square_roots)

        up, down = ctx.grad_targets
        grad_x = (grad_preact @ up_matrix).view_as(x)
        grad_up = up.add_gradient(grad_preact, x.flatten(0, -2))
        return grad_x, grad_up, down.add_gradient(squares, flat_grad_out), None, None

MLP_SAVED = 1                            # vectors of F elements per token that the MLP saves for backward

def relu_sq_mlp(x: Tensor, up: WeightMatrix, down: WeightMatrix) -> Tensor:
    """Apply the relu^2 MLP, relu(x up^T)^2 down (RECIPE 2.7). Backward accumulates weight gradients in main_grad."""
    # ReluSqMLP equals the composition of two matmuls with main_grad:
    #     linear_main_grad(linear_main_grad(x, up).relu().square(), down.t())
    # It saves one vector of F elements per token where this composition saves two. To use another activation, return
    # such a composition instead, and set MLP_SAVED. `parameter_specs` lists the matrices that this function receives.
    return ReluSqMLP.apply(x, up.matrix, down.matrix, up, down)


# ---- Head and loss
def softcap(logits: Tensor) -> Tensor:
    """Compute LOGIT_CAP * sigmoid((logits + LOGIT_SHIFT) / LOGIT_WIDTH), which is in (0, LOGIT_CAP)."""
    return LOGIT_CAP * (logits + LOGIT_SHIFT).mul_(1 / LOGIT_WIDTH).sigmoid_()

def logit_chunks(logits: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split logits (N, V) and other tensors (N, ...) along N into chunks that fit in the cache of a CPU."""
    chunk_len = len(logits)
    if not logits.is_cuda and not torch.compiler.is_compiling():
        chunk_len = max(1, CPU_CHUNK_LOGITS // logits.shape[1])
    return zip(*(x.split(chunk_len) for x in (logits, *others)))

def next_token_losses(y: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Compute the next-token loss of every position: -log softmax(softcap(y @ w))[target]."""
    losses = []
    # There is one chunk, except in eager code on a CPU, where the logits of a chunk must fit in the cache.
    for logits, ids in logit_chunks(y @ w, targets[:, None]):
        z = softcap(logits.to(accum_dtype(y.dtype)))
        # exp(z - LOGIT_CAP) cannot overflow, because z < LOGIT_CAP. So no pass has to compute the maximum.
        lse = (z - LOGIT_CAP).exp().sum(dim=-1).log() + LOGIT_CAP
        losses.append(lse - z.gather(1, ids)[:, 0])
    return torch.cat(losses)

def mtp_targets(targets: Tensor, mtp_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the ids of the next G tokens of every position, and their loss weights."""
    B, T = targets.shape
    positions = torch.arange(T, device=targets.device)
    target_pos = positions[:, None] + torch.arange(len(mtp_weights), device=targets.device)   # (T, G)
    in_sequence = target_pos < T
    ids = targets[:, torch.where(in_sequence, target_pos, 0)]                             # (B, T, G)
    token_weights = (in_sequence * mtp_weights).expand(B, -1, -1)
    return ids.flatten(0, 1), token_weights.flatten(0, 1)

def mtp_losses_and_grad(logits: Tensor, ids: Tensor, token_weights: Tensor, grad: Tensor,
                        grad_scale: float) -> tuple[Tensor, Tensor]:
    """Return the multi-token and next-token losses of every position; write the gradient of the logits to `grad`."""
    if torch.compiler.is_compiling():
        # Inductor fuses this branch into two passes over the (N, V) logits. softmax() would materialize an f32 (N, V)
        # tensor. Exponents and logarithms, including `lse`, are to base 2, because exp2 and log2 take fewer
        # instructions than exp and log.
        cap_log2 = LOGIT_CAP * math.log2(math.e)          # sig * cap_log2 = z / ln 2
        sig = torch.sigmoid((logits.to(token_weights.dtype) + LOGIT_SHIFT) * (1 / LOGIT_WIDTH))
        lse = ((sig - 1) * cap_log2).exp2().sum(dim=-1, keepdim=True).log2() + cap_log2   # no overflow: sig <= 1
        scaled_weights = grad_scale * LOGIT_CAP * token_weights
        grad_z = (sig * cap_log2 - lse).exp2() * scaled_weights.sum(dim=1, keepdim=True)
        # Subtract the one-hot targets. Inductor fuses this loop. Comparing int32 takes half the instructions of int64.
        columns = torch.arange(grad.shape[1], dtype=torch.int32, device=grad.device)
        for target, weight in zip(ids.split(1, dim=1), scaled_weights.split(1, dim=1)):
            grad_z = grad_z - weight * (columns == target.int())
        torch.mul(grad_z, sig - sig * sig, out=grad)      # LOGIT_WIDTH * dz/dlogit = LOGIT_CAP * (sig - sig^2)
        nll_log2 = lse - cap_log2 * sig.gather(1, ids)
        return math.log(2) * (token_weights * nll_log2).sum(dim=1), math.log(2) * nll_log2[:, 0]

    losses_by_chunk = []
    for chunk, chunk_ids, chunk_weights, chunk_grad in logit_chunks(logits, ids, token_weights, grad):
        z = softcap(chunk.to(token_weights.dtype))
        p = z.softmax(dim=-1)
        nll = -p.gather(1, chunk_ids).log()               # finite: 0 < z < LOGIT_CAP, so p > exp(-LOGIT_CAP) / V
        losses_by_chunk.append(((chunk_weights * nll).sum(dim=1), nll[:, 0]))
        scaled_weights = grad_scale * chunk_weights       # scale the (N, G) weights, to save a pass over (N, V)
        grad_z = p.mul_(scaled_weights.sum(dim=1, keepdim=True))
        # Scatter one of the G targets at a time, because the same id may occur twice in a position.
        for target, weight in zip(chunk_ids.split(1, dim=1), scaled_weights.split(1, dim=1)):
            grad_z.scatter_add_(1, target, -weight)
        dz = torch.addcmul(z, z, z, value=-1 / LOGIT_CAP)  # LOGIT_WIDTH * dz/dlogit = z - z^2 / LOGIT_CAP
        torch.mul(grad_z, dz, out=chunk_grad)
    losses, next_losses = map(torch.cat, zip(*losses_by_chunk))
    return losses, next_losses

def quantize_e4m3(x: Tensor, scale: float) -> Tensor:
    """Quantize x / scale to fp8 e4m3, saturating at +-FP8_MAX; x of any shape."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

def fp8_matmul(a: Tensor, b: Tensor, scale: Tensor, *, use_scaled_mm: bool, out_dtype: torch.dtype,
               fast_accum: bool = False) -> Tensor:
    """Compute scale * (a @ b) for fp8 matrices, with a dequantization scale () f64."""
    if not use_scaled_mm:
        return a.to(out_dtype) @ b.to(out_dtype) * scale.to(out_dtype)
    b = b.t().contiguous().t()                            # _scaled_mm needs a column-major b
    # Do not use F.scaled_mm: torch.compile cannot trace it in torch 2.11 (pytorch issue 180604).
    return torch._scaled_mm(a, b, scale_a=scale.float(), scale_b=torch.ones((), device=a.device), out_dtype=out_dtype,
                            use_fast_accum=fast_accum)

class HeadLoss(torch.autograd.Function):
    """Fused head and loss: softcapped cross-entropy of the next G tokens (RECIPE 2.8)."""
    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, loss_scale: Tensor,
                precision: str, logits_dtype: torch.dtype, grad_target: WeightMatrix) -> tuple[Tensor, Tensor]:
        ctx.grad_target = grad_target
        ctx.precision = precision
        accum = accum_dtype(y.dtype)
        # Compute `grad`, the gradient of the logits, in forward, so that the logits need not be saved for backward.
        # With precision "plain", `grad` overwrites the logits. Otherwise, `grad` is a separate e5m2 tensor, and takes
        # half the memory of bf16 logits.
        if precision == "plain":
            # With grad_scale = 1, `grad` is LOGIT_WIDTH * dloss/dlogits. Backward divides by LOGIT_WIDTH, the divisor
            # inside softcap (7.5).
            logits = grad = y @ w
            grad_scale = 1.0
        else:
            use_scaled_mm = precision == "fp8"
            matmul_dtype = logits_dtype if use_scaled_mm else accum
            logits_scale = torch.full((), FP8_Y_SCALE * FP8_W_SCALE, dtype=torch.float64, device=y.device)
            y = quantize_e4m3(y, FP8_Y_SCALE)
            w = quantize_e4m3(w, FP8_W_SCALE)
            logits = fp8_matmul(y, w, logits_scale, use_scaled_mm=use_scaled_mm, out_dtype=matmul_dtype,
                                fast_accum=True)
            logits = logits.to(logits_dtype)
            grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
            grad_scale = 1 / (LOGIT_WIDTH * FP8_GRAD_SCALE)

        ids, token_weights = mtp_targets(targets, mtp_weights.to(accum))
        losses, next_losses = mtp_losses_and_grad(logits, ids, token_weights, grad, grad_scale)
        ctx.save_for_backward(y, w, grad, loss_scale)
        ctx.mark_non_differentiable(next_losses)
        return losses, next_losses

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_losses: Tensor, _grad_next: Tensor) -> tuple[Tensor | None, ...]:
        # `grad` (N, V) is the gradient of the logits from forward. With precision "plain", y and w have their original
        # dtype, and `grad` is LOGIT_WIDTH * dloss/dlogits, so divide by LOGIT_WIDTH here. With "fp8" and "emulated", y
        # and w are quantized, and `grad` is dloss/dlogits / FP8_GRAD_SCALE in e5m2. The values of `grad` do not contain
        # loss_scale, which is a factor of dequant_scale below.
        y, w, grad, loss_scale = ctx.saved_tensors
        if ctx.precision == "plain":
            factor = (grad_losses / LOGIT_WIDTH).to(y.dtype)[:, None]         # (N, 1)
            grad_y = factor * (grad @ w.t())
            grad_w = ctx.grad_target.add_gradient(factor * y, grad)
            return grad_y, grad_w, *[None] * 6

        # The trainer calls backward with grad_losses equal to loss_scale, so `factor` (N, 1) is 1. Any other upstream
        # gradient has one factor per position. For grad_y, `factor` multiplies the result of the matmul. For grad_w,
        # `factor` multiplies `grad` before the matmul, so factor * grad is rounded to e5m2 again. If loss_scale is 0,
        # `factor` is 0 instead of NaN.
        factor = torch.where(loss_scale == 0, 0, grad_losses / loss_scale)[:, None]
        dequant_scale = loss_scale.double() * FP8_GRAD_SCALE
        use_scaled_mm = ctx.precision == "fp8"
        grad_y_dtype = torch.bfloat16 if use_scaled_mm else factor.dtype
        grad_y = factor.to(grad_y_dtype) * fp8_matmul(grad, w.t(), dequant_scale * FP8_W_SCALE, out_dtype=grad_y_dtype,
                                                      use_scaled_mm=use_scaled_mm)
        # Inductor fuses this multiplication with the copy to column-major order in fp8_matmul. _scaled_mm cannot
        # accumulate in place, so add_gradient adds the result of the matmul to main_grad afterwards.
        weighted_grad = (factor * grad.to(factor.dtype)).to(grad.dtype)
        grad_w = fp8_matmul(y.t().contiguous(), weighted_grad, dequant_scale * FP8_Y_SCALE,
                            use_scaled_mm=use_scaled_mm, out_dtype=factor.dtype)
        grad_w = ctx.grad_target.add_gradient(grad_w, b=None)                 # b=None: grad_w is already the product
        return grad_y, grad_w, *[None] * 6


# ---- Rows of tables
def sign_vectors(model_dim: int) -> Tensor:
    """Draw NUM_SIGN_VECTORS random vectors of +1 and -1, and append an all-ones vector."""
    drawn = torch.randint(2, (NUM_SIGN_VECTORS, model_dim), generator=torch.Generator().manual_seed(SIGN_SEED))
    return torch.cat((2 * drawn - 1, torch.ones(1, model_dim, dtype=drawn.dtype)))

def add_rows_kernel(row_grads, rows, order, grad, num_lookups, D, BLOCK_ROWS: tl.constexpr,
                    BLOCK_D: tl.constexpr) -> None:
    """Add grad[order[i]] to row_grads[rows[i]] for every i < num_lookups."""
    # There is one program per lookup. The program of a row's first lookup adds the gradients of all lookups of the row,
    # BLOCK_ROWS per iteration, and the other programs exit at once. The row of a frequent token has thousands of
    # lookups. Each iteration prefetches `rows` and `order` of the next iteration, so that an iteration waits for one
    # load instead of three dependent loads.
    # The order of summation is fixed: the iterations add to the old value sequentially, and the sum within an iteration
    # is a tree that depends on BLOCK_ROWS and the number of warps.
    lookup = tl.program_id(0)
    row = tl.load(rows + lookup)
    previous_row = tl.load(rows + lookup - 1, mask=lookup > 0, other=-1)      # -1 for the first lookup
    if row != previous_row:
        columns = tl.arange(0, BLOCK_D)
        column_mask = columns < D
        row_ptrs = row_grads + row.to(tl.int64) * D + columns                 # tables may have over 2^31 elements
        acc = tl.load(row_ptrs, mask=column_mask, other=0)
        lookups = lookup + tl.arange(0, BLOCK_ROWS)
        is_same_row = tl.load(rows + lookups, mask=lookups < num_lookups, other=-1) == row
        grad_idx = tl.load(order + lookups, mask=lookups < num_lookups, other=0)
        has_more = 1
        while has_more == 1:
            lookups = lookups + BLOCK_ROWS
            next_is_same_row = tl.load(rows + lookups, mask=lookups < num_lookups, other=-1) == row
            next_grad_idx = tl.load(order + lookups, mask=lookups < num_lookups, other=0)
            mask = is_same_row[:, None] & column_mask[None, :]
            grads = tl.load(grad + (grad_idx * D)[:, None] + columns[None, :], mask=mask, other=0)
            acc += tl.sum(grads.to(acc.dtype), axis=0)
            has_more = tl.max(next_is_same_row.to(tl.int32), axis=0)
            is_same_row = next_is_same_row
            grad_idx = next_grad_idx
        tl.store(row_ptrs, acc, mask=column_mask)

@op_in_graphs("row_grads")
def add_rows(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """Add grad[i] to row_grads[index[i]] for every lookup i, as a deterministic index_add_."""
    index = index.flatten()
    grad = grad.flatten(0, -2)
    if not grad.is_cuda:
        row_grads.index_add_(0, index.long(), grad.to(row_grads.dtype))
        return
    # Sort the lookups, so that the lookups of a row are adjacent. The sort is stable, so that the gradients of a row
    # are added in their original order.
    rows, order = index.sort(stable=True)
    num_lookups, D = grad.shape
    triton_jit(add_rows_kernel)[(num_lookups,)](
        row_grads, rows, order, grad.contiguous(), num_lookups, D, BLOCK_ROWS=ADD_ROWS_BLOCK,
        BLOCK_D=1 << (D - 1).bit_length())                                    # a power of 2

class RowLookup(torch.autograd.Function):
    """Embedding lookup, source[index], with gradients that accumulate in row_grads."""
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


# ====== Section 8: Data ===============================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # format: data/README.md
TOKEN_ITEMSIZE = 2                       # bytes; a token is a little-endian u16
MANIFEST_FORMATS = (1, 2)                # 1: data sets; 2: saves and checkpoints
MANIFEST_FILE = "manifest.json"          # SHA-256 of the files next to it, written last; format: data/README.md
VOCAB_FILE = "vocab.txt"                 # bytes of each token, for the shards in the same directory
GPT2_VOCAB, GPT2_BOS_ID = 50_257, 50_256                      # for shard headers that store vocabulary size 0
SYNTHETIC_PREFIX = "formula:"            # synthetic data: formula:VOCAB_SIZE:BOS_ID:TOKENS_PER_SHARD:SHARDS
# 2^64 / golden ratio. Multiplying adjacent integers by it yields high bits that look unrelated (Fibonacci hashing).
HASH_MULTIPLIER = 0x9E3779B97F4A7C15
SYNTHETIC_DOC_LEN = 32                   # mean length of a synthetic document, in tokens
WARM_UP_SHARD = f"{SYNTHETIC_PREFIX}warm-up#0"                    # synthetic tokens of the warm-up

class ShardHeader(NamedTuple):
    """Name, size and vocabulary of one data shard: a .bin file or synthetic tokens."""
    name: str                            # path of the .bin file, or "formula:...#seed" for synthetic tokens
    num_tokens: int
    vocab_size: int
    bos_id: int

    @property
    def vocab_and_bos(self) -> tuple[int, int]:
        """Return (vocabulary size, BOS id), which are equal for all shards of a run."""
        return self.vocab_size, self.bos_id

class TokenShard:
    """Tokens of one data shard in host memory, with the starts and lengths of its documents."""
    def __init__(self, tokens: np.ndarray, bos_id: int) -> None:
        self.tokens = tokens                                              # (num_tokens,) u16
        self.doc_starts = np.flatnonzero(tokens == bos_id)                # (num_docs,) indices of the BOS tokens
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))   # (num_docs,) in tokens, including BOS

class PackedSeq(NamedTuple):
    """One training or validation sequence of T inputs, in host memory."""
    tokens: np.ndarray                   # (T + 1,) u16: the first T tokens are the inputs, the last T the targets
    # (num_docs + 1,) i32: cumulative lengths of the documents in the inputs, from 0 to T. The first document or the
    # last document may have 0 tokens.
    cu_seqlens: np.ndarray

def synthetic_tokens(seed: int, count: int, vocab_size: int, bos_id: int, repeat_ngrams: bool = False) -> np.ndarray:
    """Generate `count` synthetic tokens, (count,) u16, for preset tiny and the warm-up."""
    positions = np.arange(count, dtype=np.uint64)
    if repeat_ngrams:
        positions[positions // 8 % 8 == 1] -= 8
    hashed = (positions + (seed << 32)) * HASH_MULTIPLIER >> 40           # high 24 bits; multiplication wraps at 2^64
    tokens = hashed * hashed // 7 % (vocab_size - 1)      # an arbitrary function of the hash, 0 to vocab_size - 2
    tokens += tokens >= bos_id           # 0 to vocab_size - 1 without bos_id
    tokens[hashed % SYNTHETIC_DOC_LEN == 0] = bos_id
    tokens[:1] = bos_id
    return tokens.astype(np.uint16)

def read_shard_header(path: Path) -> ShardHeader:
    """Read the 1,024-byte header of a .bin shard."""
    check(path.is_file(), f"data shard {path}",
          found=f"no regular file of this name (working directory {os.getcwd()})", expected="a .bin shard",
          hint="preset record: run python data/cached_fineweb10B.py 9. Preset pocket: run in a clone, which has "
               "data/pocket. Other data: give --train_files and --val_files", error=DataError)
    size = path.stat().st_size
    header_words = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    header_words.resize(HEADER_BYTES // 4)                # zero-pad if the file is shorter
    magic, version, num_tokens, vocab_size, bos_id = header_words[:5].tolist()
    length_matches = num_tokens > 0 and HEADER_BYTES + TOKEN_ITEMSIZE * num_tokens == size
    check([magic, version] == [SHARD_MAGIC, SHARD_VERSION] and length_matches, f"data shard {path}",
          found=f"{size:,} bytes that begin with the int32 words {magic}, {version}, {num_tokens}",
          expected=f"a header of {HEADER_BYTES:,} bytes that begins with {SHARD_MAGIC}, {SHARD_VERSION} and the number "
                   f"of tokens, at least 1, then {TOKEN_ITEMSIZE} bytes per token",
          hint="the file is truncated, still being written, or not a shard (format: data/README.md); download or write "
               "it again", error=DataError)
    # Older shards contain GPT-2 tokens, and store 0 as vocabulary size and BOS id.
    if vocab_size == 0:
        vocab_size, bos_id = GPT2_VOCAB, GPT2_BOS_ID
    return ShardHeader(str(path), num_tokens, vocab_size, bos_id)

def read_shard_headers(pattern: str) -> list[ShardHeader]:
    """Read the headers of all data shards that match a pattern, sorted by name."""
    if pattern.startswith(SYNTHETIC_PREFIX):
        check(re.fullmatch(SYNTHETIC_PREFIX + r"\d{1,5}:\d{1,5}:[1-9]\d{0,8}:[1-9]\d{0,4}", pattern),
              "synthetic data", found=pattern,
              expected="formula:VOCAB_SIZE:BOS_ID:TOKENS:SHARDS, with at least 1 token and 1 shard",
              hint="for example --train_files=formula:512:511:40000:2", error=DataError)
        vocab_size, bos_id, num_tokens, num_shards = map(int, pattern.removeprefix(SYNTHETIC_PREFIX).split(":"))
        return [ShardHeader(f"{pattern}#{seed}", num_tokens, vocab_size, bos_id) for seed in range(num_shards)]
    # If the directory of the pattern exists, escape its name: brackets in the name are literal. If the glob has no
    # matches, try the pattern as a literal file name, because file names may contain brackets, too. Every match must be
    # a shard: skipping a broken link would silently train on less data.
    folder, name = os.path.split(pattern)
    if os.path.isdir(folder):
        folder = glob.escape(folder)
    paths = sorted(glob.glob(os.path.join(folder, name))) or [pattern]
    return [read_shard_header(Path(path)) for path in paths]

def read_manifest(folder: Path) -> dict[str, str]:
    """Read {file name: SHA-256 hex digest} from the manifest of a directory."""
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        return {}
    hint = "write the directory again; or remove this file if the files next to it are intact"
    try:
        manifest = json.loads(read_small_file(path, hint))
        if manifest["format"] not in MANIFEST_FORMATS:
            raise ValueError(f"format {manifest['format']}")
        return {name: entry["sha256"] for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"manifest {path}", found=f"{type(error).__name__}: {error}",
                        expected="format 1 or 2, as described in data/README.md", hint=hint) from None

def check_manifest(path: Path, content: bytes) -> None:
    """Verify the content of a file against the SHA-256 in the manifest of its directory."""
    sha256 = hashlib.sha256(content).hexdigest()
    expected = read_manifest(path.parent).get(path.name, sha256)
    check(sha256 == expected, f"{path}: content", found=f"sha256 {sha256}",
          expected=f"sha256 {expected}, as in {MANIFEST_FILE} next to it",
          hint="the file is damaged or belongs to another directory: write or copy the directory again; or remove "
               f"{MANIFEST_FILE} if this content is intended", error=DataError)

def load_shard(header: ShardHeader) -> TokenShard:
    """Load a data shard from its file, or generate a synthetic one, and validate every token."""
    name = header.name
    if name.startswith(SYNTHETIC_PREFIX):
        tokens = synthetic_tokens(int(name.rpartition("#")[2]), header.num_tokens, *header.vocab_and_bos,
                                  repeat_ngrams=name == WARM_UP_SHARD)
    else:
        with read_errors(Path(name)):
            tokens = np.fromfile(name, "<u2", header.num_tokens, offset=HEADER_BYTES)
    shard = TokenShard(tokens, header.bos_id)
    max_token = tokens.max(initial=0)
    check(len(tokens) == header.num_tokens and max_token < header.vocab_size and len(shard.doc_starts),
          f"data shard {name}: content",
          found=f"{len(tokens):,} tokens with ids up to {max_token}; BOS tokens: {len(shard.doc_starts):,}",
          expected=f"{header.num_tokens:,} tokens with ids below the vocabulary size {header.vocab_size:,}, and at "
                   f"least one BOS token {header.bos_id}",
          hint="download or write the shard again, and do not change it during a run", error=DataError)
    return shard

def verify_shards(headers: list[ShardHeader]) -> str:
    """Validate every token of every data file, and return one SHA-256 hex digest over all shards."""
    digest = hashlib.sha256()
    for header in headers:
        path = Path(header.name)
        digest.update(os.fsencode(path.name))             # file names need not be valid UTF-8
        if not header.name.startswith(SYNTHETIC_PREFIX):
            with read_errors(path):
                content = path.read_bytes()
            check_manifest(path, content)
            digest.update(content)
            load_shard(header)
    return digest.hexdigest()

def resolve_sizes(cfg: Config, train_headers: list[ShardHeader], val_headers: list[ShardHeader]) -> Config:
    """Return `cfg` with vocab_size, bos_id, padded_vocab and bigram_rows filled in from the shard headers."""
    first_header = train_headers[0]
    for header in train_headers + val_headers:
        check(header.vocab_and_bos == first_header.vocab_and_bos, "data shards have different vocabularies",
              found=f"{header.vocab_and_bos} in {header.name}",
              expected=f"{first_header.vocab_and_bos} (vocabulary size, BOS id), as in {first_header.name}",
              hint="use one data set for --train_files and --val_files", error=DataError)
    vocab_size, bos_id = first_header.vocab_and_bos
    check(0 <= bos_id < vocab_size and 2 <= vocab_size <= 2**16, f"data shard {first_header.name}: vocabulary",
          found=f"vocabulary size {vocab_size}, BOS id {bos_id}",
          expected="a vocabulary size from 2 to 65,536, because tokens are u16, and 0 <= BOS id < vocabulary size",
          hint="write the shards again, or use other data", error=DataError)
    # A flag with its default value takes the value of the shard headers.
    for name, header_value in (("vocab_size", vocab_size), ("bos_id", bos_id)):
        flag_value = getattr(cfg, name)
        check(flag_value in (getattr(Config, name), header_value), f"--{name}", found=flag_value,
              expected=f"{header_value}, as in the header of {first_header.name}", hint=f"omit --{name}")
    padded_vocab = cfg.padded_vocab or -(-vocab_size // 128) * 128
    check(padded_vocab >= vocab_size, "--padded_vocab", found=padded_vocab,
          expected=f"at least the vocabulary size {vocab_size}",
          hint="--padded_vocab=0, which rounds the vocabulary size up to a multiple of 128")
    # The bigram table needs at least 2 rows. The last row is for positions without a bigram.
    return replace(cfg, vocab_size=vocab_size, bos_id=bos_id, padded_vocab=padded_vocab,
                   bigram_rows=max(2, cfg.bigram_rows or 5 * padded_vocab))

def usable_val_tokens(shard_tokens: int, batch_tokens: int) -> int:
    """Return the number of tokens of a data shard that are validation inputs, a multiple of batch_tokens."""
    return max(0, shard_tokens - 2) // batch_tokens * batch_tokens

def pack_batch(shard: TokenShard, first_doc: int, seqs_per_step: int, seq_len: int,
               max_doc_len: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int] | None:
    """Pack documents, in shard order, into the S sequences of one step (RECIPE 5.2)."""
    # tokens_before[i] is the number of tokens before document i, after truncation. The last entry is the total.
    tokens_before = np.concatenate([[0], np.cumsum(np.minimum(shard.doc_lengths, max_doc_len))])
    # Append documents to a sequence until it has seq_len + 1 tokens, and cut the last document to fit. Drop the rest of
    # the cut document: the next sequence begins with a new document.
    seqs = []
    doc = first_doc
    for _ in range(seqs_per_step):
        seq_end = tokens_before[doc] + seq_len + 1
        next_doc = int(np.searchsorted(tokens_before, seq_end))           # first document at or after seq_end
        if next_doc == len(tokens_before):
            return None
        starts = shard.doc_starts[doc:next_doc]
        ends = starts + np.diff(tokens_before[doc:next_doc + 1])
        ends[-1] -= tokens_before[next_doc] - seq_end
        seqs.append((starts, ends))
        doc = next_doc
    return seqs, doc

def pack_pieces(shard: TokenShard, first_token: int, seqs_per_step: int, seq_len: int,
                max_doc_len: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int] | None:
    """Pack consecutive tokens, without dropping any, into the S sequences of one step."""
    end = first_token + seqs_per_step * seq_len
    if end >= len(shard.tokens):
        return None
    seqs = []
    for seq_start in range(first_token, end, seq_len):
        seq_end = seq_start + seq_len + 1
        first_doc, next_doc = np.searchsorted(shard.doc_starts, (seq_start + 1, seq_end))
        bounds = [seq_start, *shard.doc_starts[first_doc:next_doc].tolist(), seq_end]
        starts = np.concatenate([np.arange(*pair, max_doc_len) for pair in itertools.pairwise(bounds)])
        seqs.append((starts, np.append(starts[1:], seq_end)))
    return seqs, end

def pack_sequence(shard: TokenShard, starts: np.ndarray, ends: np.ndarray) -> PackedSeq:
    """Build a PackedSeq from the token ranges of its documents."""
    documents = [shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                   # the last token is a target, not an input
    return PackedSeq(np.concatenate(documents), cu_seqlens.astype(np.int32))

def validation_sequences(shards: Iterable[TokenShard], seqs_per_step: int, seq_len: int,
                         bos_id: int) -> Iterable[PackedSeq]:
    """Yield consecutive sequences of seq_len inputs from each validation shard."""
    for shard in shards:
        for start in range(0, usable_val_tokens(len(shard.tokens), seqs_per_step * seq_len), seq_len):
            tokens = shard.tokens[start:start + seq_len + 1]
            doc_starts = np.flatnonzero(tokens[:-1] == bos_id)
            yield PackedSeq(tokens, cu_seqlens=np.concatenate([[0], doc_starts, [seq_len]]).astype(np.int32))

def read_token_bytes(folder: Path, cfg: Config) -> list[bytes] | None:
    """Read the bytes of every token, indexed by token id, from the vocab.txt of a directory."""
    path = folder / VOCAB_FILE
    if not os.path.lexists(path):
        return None
    hint = "write the data again; or remove the file, and bits per byte are not printed"
    content = read_small_file(path, hint)
    check_manifest(path, content)
    bytes_by_id: dict[int, bytes] = {}
    # Stop at the first invalid line. The check below then reports that lines are missing.
    with contextlib.suppress(ValueError):
        for line in content.splitlines():
            encoded, token_id = line.split()
            bytes_by_id[int(token_id)] = base64.b64decode(encoded, validate=True)
    check(bytes_by_id.keys() == set(range(cfg.vocab_size)) - {cfg.bos_id}
          and len(bytes_by_id) == len(content.splitlines()), path,
          found=f"{len(bytes_by_id):,} tokens before the first invalid line or the end of the file, which has "
                f"{len(content.splitlines()):,} lines",
          expected=f"one line 'base64 id' for each of the {cfg.vocab_size:,} tokens except BOS ({cfg.bos_id}), and no "
                   "other line", hint=hint, error=DataError)
    return [bytes_by_id.get(token_id, b"") for token_id in range(cfg.vocab_size)]


# ====== Section 9: Rows ===============================================================================================
# Embedding tables are sharded by row. Rank r % W is the owner of global row r. The owner updates the row, and stores
# the row in its shard as local row r // W. A step looks up a small fraction of the rows. Before an update cycle of a
# table, each rank fetches the rows that it looks up from their owners. After the update cycle, each rank sends the
# gradients of these rows to the owners. A row plan lists the rows that a rank fetches and serves in one update cycle of
# one table.
#     dense table      an update modifies every row. With W = 1, a dense table has no row plan, and lookups read the
#                      parameter in place.
#     row-wise table   an update modifies only the rows that some rank looked up in the update cycle. On their owner,
#                      these rows are the plan's rows_to_update.
#     touched rows     the rows of a row-wise table that any update so far has modified
ROW_ID_BYTES = 4                         # bytes per requested row: ranks exchange local rows as i32


# ---- Row plans
def unique_with_inverse(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (unique, inverse), both i64: the sorted unique ids, and indices with unique[inverse] == ids."""
    num_ids = len(ids)
    packed = np.sort(ids.astype(np.uint64) << 32 | np.arange(num_ids, dtype=np.uint64))
    sorted_ids = (packed >> 32).astype(np.int64)
    is_first = np.diff(sorted_ids, prepend=-1) > 0        # first occurrence of each id
    inverse = np.empty(num_ids, np.int64)
    inverse[packed & 0xFFFFFFFF] = np.cumsum(is_first) - 1
    return sorted_ids[is_first], inverse

@dataclass(eq=False)
class RowPlan:
    """Rows of one table that this rank fetches, and rows of its shard that it serves, in one update cycle."""
    # Identifies the plan; must be equal on all ranks. purpose: "train" or another use; cycle: index of the update
    # cycle; tokens: T, summed over the steps of the update cycle.
    tag: dict[str, Any]
    shard_rows: int                      # C, on every rank
    rows_to_fetch: Tensor                # (n,): owner * C + local row, unique, ascending
    fetch_counts: list[int]              # number of rows_to_fetch of each owner
    rows_to_serve: Tensor                # (m,): local rows, grouped by the rank that fetches them, ascending per rank
    serve_counts: list[int]              # number of rows_to_serve for each fetching rank
    head_column_ids: Tensor | None = None                 # (n,): column of the head for each of rows_to_fetch, if tied
    # `exchange_row_requests` sets the next two fields for a row-wise table.
    rows_to_update: Tensor | None = None                  # (u,): unique rows_to_serve, ascending
    serve_to_update: Tensor | None = None                 # (m,): rows_to_update[serve_to_update] == rows_to_serve

    @property
    def tied(self) -> bool:
        """True if rows are read from columns of the head. Every rank has the full head, so ranks exchange no rows."""
        return self.head_column_ids is not None

    def move_to(self, device: torch.device) -> None:
        """Move all index tensors of the plan except rows_to_update to the device, asynchronously."""
        for name in ("rows_to_fetch", "rows_to_serve", "head_column_ids", "serve_to_update"):
            index = getattr(self, name)
            if index is not None:
                setattr(self, name, index.to(device, non_blocking=True))

def plan_rows(table: TableSpec, comm: Communicator, tag: dict[str, Any], ids_by_step: list[np.ndarray], tied: bool,
              fetch_all: bool) -> tuple[RowPlan, list[np.ndarray]]:
    """Plan which rows of one table this rank fetches in one update cycle of the table."""
    # Frequent tokens have nearby ids, so round-robin ownership balances the load of the ranks. Sorting by the key
    # owner * C + local row makes the rows of each owner contiguous, as the all-to-all requires.
    W = comm.world_size
    C = table.shard_rows(W)
    global_rows = np.concatenate([ids.ravel() for ids in ids_by_step])
    local_rows = global_rows.astype(np.int64) // W
    owners = global_rows - local_rows * W                 # same as global_rows % W, which NumPy does not vectorize
    row_keys = owners * C + local_rows

    rows_to_fetch, row_index = (np.arange(W * C), row_keys) if fetch_all else unique_with_inverse(row_keys)
    step_ends = np.cumsum([ids.size for ids in ids_by_step])
    index_by_step = [index.reshape(ids.shape)
                     for ids, index in zip(ids_by_step, np.split(row_index.astype(np.int32), step_ends[:-1]))]

    fetch_counts = np.bincount(rows_to_fetch // C, minlength=W).tolist()
    # A column of the head is a token id, which is the global row of `embed`: local row * W + owner.
    head_column_ids = comm.pinned(rows_to_fetch % C * W + rows_to_fetch // C) if tied else None
    rows_to_fetch = comm.pinned(rows_to_fetch)
    return RowPlan(tag, C, rows_to_fetch, fetch_counts, rows_to_serve=rows_to_fetch, serve_counts=fetch_counts,
                   head_column_ids=head_column_ids), index_by_step

def _all_to_all_requests(comm: Communicator, process_group: dist.ProcessGroup | None, dtype: str,
                         plans: dict[str, RowPlan]) -> None:
    """Send row requests to the owners, and set rows_to_serve and serve_counts of every plan from received requests."""
    W, rank = comm.world_size, comm.rank
    # A request lists the local rows of one table that this rank fetches from one owner. A tied table has no requests.
    fetch_counts_by_table = [[0] * W if plan.tied else plan.fetch_counts for plan in plans.values()]
    requests_by_table = [(plan.rows_to_fetch[:sum(fetch_counts)] % plan.shard_rows).int().split(fetch_counts)
                         for plan, fetch_counts in zip(plans.values(), fetch_counts_by_table)]
    tags = [plan.tag | dict(table=label, dtype=dtype, tied=plan.tied) for label, plan in plans.items()]

    # Compare the tags first. Otherwise, ranks with plans of different update cycles would exchange wrong rows without
    # an error.
    tags_and_counts = [None] * W
    dist.all_gather_object(tags_and_counts, (tags, fetch_counts_by_table), group=process_group)
    for other_rank, (other_tags, _) in enumerate(tags_and_counts):
        for other_tag, own_tag in itertools.zip_longest(other_tags, tags):
            check(other_tag == own_tag, f"row plans of ranks {other_rank} and {rank} differ", found=other_tag,
                  expected=own_tag, hint="start every rank with the same flags", error=RunError)

    # One all-to-all exchanges the requests of all tables. A reader is a rank that sends requests to this rank.
    # `received` is grouped by reader, then by table.
    sent = torch.cat([requests[owner] for owner in range(W) for requests in requests_by_table])
    counts_by_rank = np.array([counts for _, counts in tags_and_counts])      # (reader, table, owner)
    serve_counts = counts_by_rank[:, :, rank]                                 # (reader, table)
    received = torch.empty(serve_counts.sum(), dtype=torch.int32)
    dist.all_to_all_single(received, sent, serve_counts.sum(1).tolist(), np.sum(fetch_counts_by_table, 0).tolist(),
                           group=process_group)
    received_requests = received.split(serve_counts.flatten().tolist())

    # Validate every request. An invalid request would read and update wrong rows without an error.
    for table_idx, (label, plan) in enumerate(plans.items()):
        rows_by_reader = received_requests[table_idx::len(plans)]
        for reader, local_rows in enumerate(rows_by_reader):
            ascending = np.diff(local_rows, prepend=-1, append=plan.shard_rows).min() > 0
            check(ascending, f"invalid rows of {label} requested by rank {reader}", found=local_rows,
                  expected=f"ascending local rows below {plan.shard_rows}",
                  hint="this is a bug in the trainer; please report it with the log", error=RunError)
        plan.rows_to_serve = comm.pinned(torch.cat(rows_by_reader).long())
        plan.serve_counts = serve_counts[:, table_idx].tolist()

def exchange_row_requests(comm: Communicator, process_group: dist.ProcessGroup | None, dtype: str,
                          tables: Iterable[TableSpec], plans: dict[str, RowPlan]) -> None:
    """Exchange requests for the rows to fetch, and complete the plans with the rows that this rank serves."""
    if comm.world_size > 1:
        _all_to_all_requests(comm, process_group, dtype, plans)
    for table in tables:
        if table.rowwise and table.label in plans:
            plan = plans[table.label]
            unique_and_inverse = unique_with_inverse(plan.rows_to_serve.numpy())
            plan.rows_to_update, plan.serve_to_update = map(comm.pinned, unique_and_inverse)


# ---- Row stores: where an owner stores the shard of a row-wise table
class RowState(NamedTuple):
    """Weights and optimizer state of n rows of a row-wise table."""
    rows: Tensor                         # (n, D): weights
    v: Tensor                            # (n,) f32 or f64: second moment, one per row
    last: Tensor                         # (n,) i32: last update that modified the row, counted from 1; 0: none

    def index_select(self, index: Tensor) -> RowState:
        """Gather the state of the rows at `index`, (k,) i64, into new tensors of k rows."""
        index = index.to(self.rows.device, non_blocking=True)
        return RowState(*(x.index_select(0, index) for x in self))

    def index_copy_(self, index: Tensor, source: RowState) -> None:
        """Write the k rows of `source` to the rows at `index`, (k,) i64, in place."""
        index = index.to(self.rows.device, non_blocking=True)
        for x, source_x in zip(self, source):
            x.index_copy_(0, index, source_x)

    def to(self, device: torch.device) -> RowState:
        """Return this state on `device`. The copy is asynchronous if this state is in pinned memory."""
        return RowState(*(x.to(device, non_blocking=True) for x in self))

MAP_NORESERVE = 0x4000                   # value on Linux, x86 and ARM; Python 3.13 and later have mmap.MAP_NORESERVE
CHUNK_ROWS = 1 << 14                     # rows of a shard per copy, message or file

def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of zeros in host memory. On Linux, a page takes no physical memory until its first write."""
    if sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    # Without MAP_NORESERVE, Linux refuses a mapping that exceeds the physical memory. Disable huge pages: writing one
    # row would allocate 2 MB.
    num_bytes = math.prod(shape) * dtype.itemsize
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with contextlib.suppress(OSError):                    # the kernel has no huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)

class DeviceRowStore:
    """Row store in device memory: this rank's C rows of a row-wise table, with their optimizer state."""
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator):
        self.comm = comm
        C = table.shard_rows(comm.world_size)
        dtype = getattr(torch, cfg.dtype)
        # In host memory, allocate lazily. The table may then exceed the physical memory, because only rows that some
        # update has modified take memory.
        in_device_memory = comm.on_cuda and table.location == "device"
        zeros = functools.partial(torch.zeros, device=comm.device) if in_device_memory else lazy_zeros
        self.shard = RowState(zeros((C, cfg.model_dim), dtype=dtype), zeros((C,), dtype=accum_dtype(dtype)),
                              zeros((C,), dtype=torch.int32))
        self.invalidate()

    def prefetch(self, plan: RowPlan) -> None:
        """No-op, because the shard is in device memory already."""

    def read_rows(self, plan: RowPlan) -> RowState:
        """Copy the state of the plan's rows_to_update from the shard to a new RowState on the device."""
        return self.shard.index_select(plan.rows_to_update)

    def write_back(self, plan: RowPlan, state: RowState) -> None:
        """Write the updated state of the plan's rows_to_update to the shard."""
        self.shard.index_copy_(plan.rows_to_update, state)

    def wait_for_writes(self) -> None:
        """No-op, because `write_back` writes to the shard immediately."""

    def read_weights(self, local_rows: Tensor) -> Tensor:
        """Return the weights of the rows with local indices local_rows, (n,) i64, for evaluation."""
        self.wait_for_writes()
        weights = self.shard.rows
        return weights.index_select(0, local_rows.to(weights.device)).to(self.comm.device, non_blocking=True)

    def invalidate(self) -> None:
        """Zero self.traffic, the counts of bytes copied between host and device."""
        self.traffic = Counter(bytes_up=0, bytes_down=0)  # up: host to device; down: device to host

    def touched_rows(self) -> tuple[Tensor, ...]:
        """Return the local indices of all touched rows: rows that any update so far has modified."""
        self.wait_for_writes()
        return self.shard.last.nonzero().flatten().split(CHUNK_ROWS)

    def touched_state(self) -> Iterable[tuple[Tensor, RowState]]:
        """Yield (local_rows, state) for each chunk of the touched rows, those that any update so far has modified."""
        for local_rows in self.touched_rows():
            if len(local_rows) > 0:
                yield local_rows.cpu(), RowState(*(x.cpu() for x in self.shard.index_select(local_rows)))

    def clear(self) -> None:
        """Zero the weights and the optimizer state of all rows, and call `invalidate`."""
        # Write only to touched rows. Writing zeros to the other rows would allocate their memory.
        for local_rows in self.touched_rows():
            for x in self.shard:
                x.index_fill_(0, local_rows, 0)
        self.invalidate()

    def load_chunk(self, local_rows: Tensor, state: RowState) -> None:
        """Write `state` to the rows of the shard with local indices local_rows, (n,) i64."""
        self.shard.index_copy_(local_rows, state.to(self.shard.rows.device))

class HostRowStore(DeviceRowStore):
    """Row store in pageable host memory. Copies between host and device overlap with training."""
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator):
        # Use two streams: copies to the host wait for the update, and copies to the device must not wait for it.
        self.to_device_stream = torch.cuda.Stream(comm.device) if comm.on_cuda else None
        self.to_host_stream = torch.cuda.Stream(comm.device) if comm.on_cuda else None
        self.worker = ThreadPoolExecutor(1, "row-store", initializer=comm.set_thread_device)
        self.prefetched: tuple[RowPlan, Future] | None = None                 # plan, future of `_copy_to_device`
        # The last write_back, until it is flushed to the shard: local rows, their state on the host, and the CUDA event
        # recorded after the copy to the host.
        self.pending_write: tuple[Tensor, RowState, torch.cuda.Event | None] | None = None
        super().__init__(table, cfg, comm)

    def invalidate(self) -> None:
        self.wait_for_writes()
        super().invalidate()
        self.prefetched = None
        # Local rows and state that the last `read_rows` returned, on the device. An update modifies the state in place.
        self.previous_read: tuple[Tensor, RowState] | None = None

    def prefetch(self, plan: RowPlan) -> None:
        # self.prefetched is (plan, future).
        if self.prefetched is not None:
            if self.prefetched[0] is plan:
                return
            # Another plan was prefetched but never read. Wait for its copy, so that an error of the worker is raised.
            self._wait_for_prefetch()
        pending_write, self.pending_write = self.pending_write, None
        self.prefetched = plan, self.worker.submit(self._copy_to_device, pending_write, plan.rows_to_update)

    def read_rows(self, plan: RowPlan) -> RowState:
        self.prefetch(plan)
        state, copied = self._wait_for_prefetch()
        self.prefetched = None
        self.traffic["bytes_up"] += sum(x.nbytes for x in state)
        # The compute stream waits for the copy. This thread does not.
        if copied is not None:
            compute_stream = torch.cuda.current_stream(self.comm.device)
            compute_stream.wait_event(copied)
            for x in state:
                x.record_stream(compute_stream)

        # Rows that the previous update modified may be stale in `state`. Take these rows from `previous_read`, which is
        # (local rows, state), instead. Use torch.where, because boolean indexing would synchronize with the device.
        local_rows = plan.rows_to_update.to(self.comm.device, non_blocking=True)
        if self.previous_read is not None and len(self.previous_read[0]) > 0:
            previous_rows, previous_state = self.previous_read
            index = torch.searchsorted(previous_rows, local_rows).clamp(max=len(previous_rows) - 1)
            in_previous = previous_rows[index] == local_rows
            state = RowState(torch.where(in_previous[:, None], previous_state.rows[index], state.rows),
                             torch.where(in_previous, previous_state.v[index], state.v),
                             torch.where(in_previous, previous_state.last[index], state.last))
        self.previous_read = local_rows, state
        return state

    def write_back(self, plan: RowPlan, state: RowState) -> None:
        # If no prefetch followed the previous write_back, it is still pending. Flush it now.
        if self.pending_write is not None:
            self.wait_for_writes()
        self.traffic["bytes_down"] += sum(x.nbytes for x in state)
        copied = None
        host_state = state
        if self.to_host_stream is not None:
            host_state = self._pinned_buffers(len(plan.rows_to_update))
            self.to_host_stream.wait_stream(torch.cuda.current_stream(self.comm.device))
            with torch.cuda.stream(self.to_host_stream):
                for x, out in zip(state, host_state):
                    out.copy_(x, non_blocking=True)
                    x.record_stream(self.to_host_stream)
                copied = self.to_host_stream.record_event()
        self.pending_write = plan.rows_to_update, host_state, copied

    def wait_for_writes(self) -> None:
        if self.prefetched is not None:
            self._wait_for_prefetch()
        if self.pending_write is not None:
            result_with_timeout(self.worker.submit(self._store, *self.pending_write), self.comm.timeout,
                                "copying table rows to host memory")
            # Clear pending_write only here, so that after an exception the next call tries to flush again.
            self.pending_write = None

    def _wait_for_prefetch(self) -> tuple[RowState, torch.cuda.Event | None]:
        """Wait until the worker has launched the copy of the prefetched rows, and return (state, copied)."""
        _, future = self.prefetched
        return result_with_timeout(future, self.comm.timeout, "copying table rows from host memory")

    def _pinned_buffers(self, num_rows: int) -> RowState:
        """Allocate an uninitialized RowState of num_rows rows in pinned host memory."""
        return RowState(*(torch.empty(num_rows, *x.shape[1:], dtype=x.dtype, pin_memory=True) for x in self.shard))

    def _store(self, local_rows: Tensor, state: RowState, copied: torch.cuda.Event | None) -> None:
        """Wait for the copy to the host that `write_back` launched, then write the rows to the shard."""
        if copied is not None:
            self.comm.wait_for(copied)
        self.shard.index_copy_(local_rows, state)

    def _copy_to_device(self, pending_write: tuple[Tensor, RowState, torch.cuda.Event | None] | None,
                        local_rows: Tensor) -> tuple[RowState, torch.cuda.Event | None]:
        """Flush pending_write to the shard, then launch a copy of the rows local_rows to the device."""
        if pending_write is not None:
            self._store(*pending_write)
        if self.to_device_stream is None:
            return self.shard.index_select(local_rows), None
        buffers = self._pinned_buffers(len(local_rows))
        for x, out in zip(self.shard, buffers):
            torch.index_select(x, 0, local_rows, out=out)
        with torch.cuda.stream(self.to_device_stream):
            return buffers.to(self.comm.device), self.to_device_stream.record_event()

ROW_STORES = dict(device=DeviceRowStore, host=HostRowStore)


# ---- Tables of one rank
class LocalTable:
    """A dense table with W = 1. Lookups read the parameter in place, and gradients accumulate in a buffer (R, D)."""
    store = None

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.shard = weight.detach()
        self.grad = torch.zeros_like(self.shard, dtype=accum_dtype(weight.dtype))
        self.byte_totals = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.has_grads = False                            # True from the first lookup to `zero_grad`

    def rows_for_forward(self, plan: None) -> tuple[Tensor, Tensor]:
        """Return (weights, grads), both (R, D): lookups read `weights`, and backward accumulates in `grads`."""
        self.has_grads = True
        return self.weight, self.grad

    def fetch_for_eval(self, plan: None) -> Tensor:
        """Return the parameter itself, (R, D), because lookups read the parameter in place."""
        return self.weight

    def launch_reduce(self) -> None:
        """No-op, because with W = 1 the gradient of this rank is the gradient summed over ranks."""

    def reduced_grads(self) -> Tensor:
        """Return the gradient of the table, (R, D), in f32, or in f64 in an f64 run."""
        return self.grad

    def add_grads_to_head(self, head_grad: Tensor) -> None:
        """Add the transposed gradient of the table to head_grad (D, V) in place, and zero the gradient of the table."""
        head_grad += self.grad.t().to(head_grad.dtype)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Zero the gradient of the table."""
        self.grad.zero_()
        self.has_grads = False

    reset = zero_grad

class ExchangedTable:
    """A dense table with W > 1: this rank's shard, the row cache, and the gradients of the cached rows."""
    store: DeviceRowStore | None = None

    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator, shard: Tensor, max_tokens: int,
                 head: Tensor | None):
        self.table = table
        self.comm = comm
        self.head = head
        self.debug = cfg.debug_rows
        self.shard = shard.detach()
        # Allocate the buffers once, for max_tokens, so that their shapes and addresses never change.
        C, D = self.shard.shape
        num_rows = comm.world_size * C
        if table.rowwise or cfg.row_comms == "sparse":
            num_rows = min(num_rows, max_tokens * table.lookups_per_token)
        self.cache = self.shard.new_zeros(num_rows, D, device=comm.device).requires_grad_()
        self.row_grads = torch.zeros(num_rows, D, dtype=accum_dtype(self.shard.dtype), device=comm.device)
        # Pending all-to-alls: fetch_work receives rows into the cache, reduce_work sends gradients to their owners.
        self.fetch_work = self.reduce_work = None
        self.reset()

    def reset(self) -> None:
        """Wait for pending all-to-alls, zero row_grads and self.byte_totals, and invalidate the row cache."""
        wait_for_work(self.fetch_work)
        wait_for_work(self.reduce_work)
        self.fetch_work = self.reduce_work = None
        self.cached_plan: RowPlan | None = None           # plan of the rows in `cache`
        self.pending_plan: RowPlan | None = None          # plan of the gradients in `row_grads`
        self.byte_totals = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.row_grads.zero_()

    @property
    def has_grads(self) -> bool:
        """True from the first `rows_for_forward` of an update cycle until `zero_grad`."""
        return self.pending_plan is not None

    def weights_to_update(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Return (weights, index), such that weights[index] are the rows that this rank serves."""
        return self.shard, plan.rows_to_serve

    def prefetch(self, plan: RowPlan) -> None:
        """No-op, because the shard of a dense table is in device memory already. RowwiseTable overrides this method."""

    @torch.no_grad()
    def fetch(self, plan: RowPlan) -> None:
        """Launch the all-to-all that fetches the plan's rows into the row cache. Collective."""
        if self.cached_plan is not plan:
            wait_for_work(self.fetch_work)
            plan.move_to(self.comm.device)
            weights, index = self.weights_to_update(plan)
            self.fetch_work = self._launch_fetch(plan, self.cache.detach(), weights.index_select(0, index))
            self.cached_plan = plan

    def rows_for_forward(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Return (cache, row_grads): the plan's rows, and the buffer that their gradients accumulate in. Collective."""
        # plan.tag is the dict that identifies a plan: purpose, index of the update cycle, and number of tokens.
        check(self.pending_plan in (None, plan), f"gradients of {self.table.label} from another cycle",
              found=self.pending_plan and self.pending_plan.tag, expected=f"{plan.tag}, or no gradients",
              hint="call optim_step on the last step of a cycle before the next cycle", error=RunError)
        self.pending_plan = plan
        self.fetch(plan)                                  # no-op if `Engine.fetch_rows` has fetched the plan already
        wait_for_work(self.fetch_work)
        self.fetch_work = None
        return self.cache, self.row_grads

    def fetch_for_eval(self, plan: RowPlan) -> Tensor:
        """Fetch the plan's n rows into a new tensor (n, D) for evaluation, and wait for them. Collective."""
        plan.move_to(self.comm.device)
        served = (self.store.read_weights(plan.rows_to_serve) if self.store
                  else self.shard.index_select(0, plan.rows_to_serve))
        out = self.cache.new_empty(len(plan.rows_to_fetch), self.cache.shape[1])
        wait_for_work(self._launch_fetch(plan, out, served))
        return out

    def launch_reduce(self) -> None:
        """Launch the all-to-all that sends row_grads to the owners, in the dtype of the weights. Collective."""
        plan = self.pending_plan
        sent = self.row_grads[:len(plan.rows_to_fetch)].to(self.cache.dtype)
        self.received_grads = sent.new_empty(len(plan.rows_to_serve), sent.shape[1])
        self.reduce_work = self._all_to_all(plan, self.received_grads, sent, plan.serve_counts, plan.fetch_counts)

    def reduced_grads(self) -> Tensor:
        """Wait for the all-to-all launched by `launch_reduce`, and return the gradient summed over ranks."""
        wait_for_work(self.reduce_work)
        weights, index = self.weights_to_update(self.pending_plan)
        grad = torch.zeros_like(weights, dtype=self.row_grads.dtype)
        # The sums are deterministic: received_grads is in rank order, and add_rows adds in a fixed order.
        add_rows(grad, index, self.received_grads)
        # Clear both references to free the received gradients. The work object refers to them, too.
        self.received_grads = self.reduce_work = None
        return grad

    def add_grads_to_head(self, head_grad: Tensor) -> None:
        """Add row_grads, transposed, to their columns of head_grad (D, V) in place, and call `zero_grad`."""
        plan = self.pending_plan
        head_grad[:, plan.head_column_ids] += self.row_grads[:len(plan.rows_to_fetch)].t().to(head_grad.dtype)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Zero row_grads, and invalidate the row cache, which is stale after the update."""
        self.row_grads[:len(self.pending_plan.rows_to_fetch)] = 0             # the rest of the buffer is zero already
        check(not self.debug or not self.row_grads.any(), f"--debug_rows: gradients of {self.table.label}",
              found="nonzero gradients in rows that were not planned", expected="zeros",
              hint="this is a bug in the trainer; please report it with the log", error=RunError)
        self.pending_plan = self.cached_plan = None

    def _launch_fetch(self, plan: RowPlan, out: Tensor, served: Tensor) -> dist.Work | None:
        """Launch the all-to-all that fetches the plan's n rows into out[:n]. Collective."""
        if self.debug:
            # The loss becomes NaN if a lookup reads a row that was not fetched.
            out.fill_(math.nan)
        fetched = out[:len(plan.rows_to_fetch)]
        if plan.tied:
            fetched.copy_(self.head.t()[plan.head_column_ids])
            return None
        # Also count the bytes of the requests for these rows, which `exchange_row_requests` has exchanged.
        self._count_bytes(plan, ROW_ID_BYTES, plan.serve_counts, plan.fetch_counts)
        return self._all_to_all(plan, fetched, served, plan.fetch_counts, plan.serve_counts)

    def _all_to_all(self, plan: RowPlan, out: Tensor, sent: Tensor, recv_counts: list[int],
                    send_counts: list[int]) -> dist.Work | None:
        """Launch an all-to-all of rows or of gradients of rows, and count the bytes that it exchanges. Collective."""
        self._count_bytes(plan, sent.shape[1] * sent.element_size(), recv_counts, send_counts)
        # For comparison with bytes_sent, bytes_dense counts the bytes that this rank would send if ranks exchanged
        # whole tables. In every all-to-all, the rank would then send its shard to every other rank.
        if plan.tag["purpose"] == "train":
            self.byte_totals["bytes_dense"] += (self.comm.world_size - 1) * self.shard.nbytes
        # With W = 1, this table is row-wise, because a dense table is a LocalTable.
        if self.comm.world_size == 1:
            out.copy_(sent)
            return None
        return dist.all_to_all_single(out, sent, recv_counts, send_counts, async_op=True)

    def _count_bytes(self, plan: RowPlan, item_bytes: int, recv_counts: list[int], send_counts: list[int]) -> None:
        """Add the bytes that an all-to-all exchanges with other ranks to self.byte_totals."""
        if plan.tag["purpose"] == "train":
            to_self = send_counts[self.comm.rank]         # equals recv_counts[rank]
            self.byte_totals["bytes_sent"] += (sum(send_counts) - to_self) * item_bytes
            self.byte_totals["bytes_received"] += (sum(recv_counts) - to_self) * item_bytes

class RowwiseTable(ExchangedTable):
    """A row-wise table, for any world size. Its shard is in a row store."""
    def __init__(self, table: TableSpec, cfg: Config, comm: Communicator, max_tokens: int):
        self.store = ROW_STORES[table.location](table, cfg, comm)
        super().__init__(table, cfg, comm, self.store.shard.rows, max_tokens, head=None)

    def reset(self) -> None:
        super().reset()
        # Copy of rows_to_update of the cached plan. The next update modifies this copy in place.
        self.row_state: RowState | None = None
        self.store.invalidate()

    def weights_to_update(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        return self.row_state.rows, plan.serve_to_update

    def fetch(self, plan: RowPlan) -> None:
        if self.cached_plan is not plan:
            self.row_state = self.store.read_rows(plan)
        super().fetch(plan)

    def prefetch(self, plan: RowPlan) -> None:
        if self.cached_plan is not plan:
            self.store.prefetch(plan)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.row_state = None                             # set by the next `fetch`


# ====== Section 10: Batches ===========================================================================================
class Batch(NamedTuple):
    """This rank's sequences of one step, or of one micro-batch of the step. B is the number of these sequences."""
    step: int                            # the step that trains on the batch
    # Keyed by table label. A table that is read in place has no plan. All steps of an update cycle share one plan.
    plans: dict[str, RowPlan]
    tokens: Tensor                       # (B, T) i32: input tokens
    targets: Tensor                      # (B, T) i64: the next token of every position
    # (B, num_bounds) i32: for each sequence, 0 and then the end of each document; padded with T.
    cu_seqlens: Tensor
    # Keyed by table label: (B, T) or (B, lookups_per_token, T), i32. Each entry is one lookup: an index into the plan's
    # rows_to_fetch. If the table is read in place, the entry is a global row index instead.
    row_index: dict[str, Tensor]
    # Keyed by table label, only for tables with signs: (B, T) i32. Each entry is an index into GPT.sign_vectors.
    sign_ids: dict[str, Tensor]

    def map(self, convert: Callable[[Any], Any]) -> Batch:
        """Return a new batch with `convert` applied to every array or tensor. Both batches share the plans."""
        row_index = {label: convert(x) for label, x in self.row_index.items()}
        sign_ids = {label: convert(x) for label, x in self.sign_ids.items()}
        return Batch(self.step, self.plans, convert(self.tokens), convert(self.targets), convert(self.cu_seqlens),
                     row_index, sign_ids)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch, except its plans, to the device. Asynchronous if the batch is in pinned memory."""
        return self.map(operator.methodcaller("to", device, non_blocking=True))

def collate(step_cfg: StepConfig, tables: Iterable[TableSpec], seqs: list[PackedSeq]) -> Batch:
    """Stack this rank's sequences of one step into a batch of NumPy arrays, without row plans."""
    tokens = np.stack([seq.tokens for seq in seqs])
    # Sequences have different numbers of documents. Pad with the last bound, T. The padding adds empty documents.
    bounds_by_seq = [seq.cu_seqlens for seq in seqs]
    num_bounds = max(map(len, bounds_by_seq))
    cu_seqlens = np.stack([np.pad(bounds, (0, num_bounds - len(bounds)), "edge") for bounds in bounds_by_seq])
    inputs = tokens[:, :-1].astype(np.int32)
    targets = tokens[:, 1:].astype(np.int64)
    row_index = {table.label: table.row_ids(inputs) for table in tables}
    sign_ids = {table.label: table.sign_ids(inputs) for table in tables if table.sign_ids}
    return Batch(step_cfg.step, {}, inputs, targets, cu_seqlens, row_index, sign_ids)

def build_batches(cfg: Config, comm: Communicator, process_group: dist.ProcessGroup | None, purpose: str,
                  cycle: list[StepConfig], seqs_by_step: list[list[PackedSeq]]) -> list[Batch]:
    """Build this rank's batches for one cycle of the run, one per step, with their row plans."""
    tables = table_specs(cfg)
    batches = [collate(step_cfg, tables, seqs) for step_cfg, seqs in zip(cycle, seqs_by_step)]

    # A dense table with W = 1 is read in place and needs no plan. Every other table needs one plan per update cycle.
    # Update cycles begin at multiples of adam_every, because table.update_every is a multiple of adam_every. Tables
    # whose update cycles begin at the same step share one exchange.
    planned_tables = [table for table in tables if table.rowwise or comm.world_size > 1]
    plans = {}
    for i in range(0, len(cycle), cfg.adam_every):
        step_cfg = cycle[i]
        new_plans = {}
        for table in planned_tables:
            if i % table.update_every == 0:
                cycle_batches = batches[i:i + table.update_every]
                # In the tag, `cycle` is the index of the table's update cycle, and `tokens` is T summed over the steps
                # of this update cycle. Both are equal on all ranks.
                tag = dict(purpose=purpose, cycle=step_cfg.step // table.update_every,
                           tokens=sum(batch.tokens.shape[1] for batch in cycle_batches))
                # One value of `tied` is enough for the update cycle. The update cycle of the tied table is an Adam
                # cycle, and step_cfg.tied changes only between Adam cycles.
                tied = table.tied_to_head and step_cfg.tied
                # With row_comms=dense, every rank fetches all rows of a dense table.
                fetch_all = cfg.row_comms == "dense" and not table.rowwise and not tied
                # row_index has global rows until here. Replace each global row by its index in plan.rows_to_fetch.
                ids_by_step = [batch.row_index[table.label] for batch in cycle_batches]
                plan, index_by_step = plan_rows(table, comm, tag, ids_by_step, tied, fetch_all)
                new_plans[table.label] = plan
                for batch, index in zip(cycle_batches, index_by_step):
                    batch.row_index[table.label] = index
        exchange_row_requests(comm, process_group, cfg.dtype, tables, new_plans)
        plans |= new_plans
        for batch in batches[i:i + cfg.adam_every]:
            batch.plans.update(plans)
    return [batch.map(comm.pinned) for batch in batches]

class OutOfData(DataError):
    """The next step cannot be packed: the shards have too few tokens left, or a shard cannot be read any more."""

class Packer:
    """Packer that cuts a stream of data shards into the S sequences of each step, the same on every rank."""
    def __init__(self, cfg: Config, headers: list[ShardHeader],
                 load: Callable[[Iterator[ShardHeader]], Iterator[TokenShard]]) -> None:
        self.cfg = cfg
        # Do not build a list of all epochs, because --epochs may be large.
        epochs = itertools.repeat(headers, cfg.epochs) if cfg.epochs else itertools.repeat(headers)
        self.shards = enumerate(load(itertools.chain.from_iterable(epochs)))
        self.shards_per_epoch = len(headers)
        self.epoch = 0                   # epoch of the current shard, counted from 0
        self.shard = TokenShard(np.empty(0, np.uint16), cfg.bos_id)       # an empty placeholder
        # Start of the next step in the shard: a document index in the first epoch, a token index in later epochs.
        self.position = 0

    def next(self, step_cfg: StepConfig) -> tuple[TokenShard, list[tuple[np.ndarray, np.ndarray]]]:
        """Pack the S sequences of the next step, for all ranks."""
        while True:
            pack = pack_pieces if self.epoch else pack_batch
            packed = pack(self.shard, self.position, self.cfg.seqs_per_step, step_cfg.seq_len, self.cfg.max_doc_len)
            if packed is not None:
                seqs, self.position = packed
                return self.shard, seqs
            rest = self.shard.tokens[self.position:] if self.epoch else self.shard.tokens[:0]
            try:
                shard_idx, self.shard = next(self.shards)
            except StopIteration:
                raise OutOfData("training data ended",
                                found=f"{self.cfg.train_files!r} ends before step {step_cfg.step}, counted from 0",
                                expected=f"{self.cfg.seqs_per_step} x {step_cfg.seq_len + 1} more tokens, at most "
                                         f"{self.cfg.max_doc_len} of each document in the first epoch",
                                hint="--epochs=0 repeats the data; or add shards (FineWeb: python "
                                     "data/cached_fineweb10B.py N)"
                                     + f"; or --max_steps={step_cfg.step}" * bool(step_cfg.step)) from None
            except DataError as error:   # the shard file was valid when the run started
                raise OutOfData(*error.args) from None
            self.epoch = shard_idx // self.shards_per_epoch
            if len(rest):
                self.shard = TokenShard(np.concatenate([rest, self.shard.tokens]), self.cfg.bos_id)
            self.position = 0

class Loader:
    """Background loader: a thread builds the batches of the next cycle of the run while the current cycle trains."""
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader], purpose: str = "train"):
        self.cfg = cfg
        self.comm = comm
        self.purpose = purpose
        self.worker = ThreadPoolExecutor(1, "loader", initializer=comm.set_thread_device)
        self.reader = ThreadPoolExecutor(1, "shard-reader")
        self.packer = Packer(cfg, headers, self._prefetch_shards)
        self.ready: list[Batch] = []                      # remaining batches of the current cycle, in order
        self.next_cycle: Future[list[Batch]] | None = None                    # batches of the next cycle, one per step

    def start(self, cycle: list[StepConfig]) -> None:
        """Build the batches of the first cycle, and wait for the batches. The first `advance` makes them current."""
        self.next_cycle = self.worker.submit(self._build_cycle, cycle)
        self._wait_for_cycle()

    def advance(self, cycle_after_next: list[StepConfig]) -> None:
        """Make the next cycle the current one, and start to build `cycle_after_next` in the background."""
        self.ready = self._wait_for_cycle()
        self.next_cycle = self.worker.submit(self._build_cycle, cycle_after_next)

    def next(self, step_cfg: StepConfig) -> Batch:
        """Return the batch of this step, copied to the device asynchronously."""
        is_next = self.ready and self.ready[0].step == step_cfg.step
        assert is_next, f"step {step_cfg.step} is not the next one of the loader"
        batch = self.ready.pop(0)
        return batch.to(self.comm.device)

    def next_plans(self) -> dict[str, RowPlan]:
        """Return the row plans of the next step, keyed by table label; {} at the end of training or data."""
        try:
            batches = self.ready or self._wait_for_cycle()
        except OutOfData:                # `advance` raises this error again at the start of the next cycle
            return {}
        return batches[0].plans if batches else {}

    def close(self) -> None:
        """Shut down the loader thread and the shard reader: cancel queued tasks, and do not wait for running tasks."""
        for thread_pool in (self.worker, self.reader):
            thread_pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for_cycle(self) -> list[Batch]:
        """Wait for the loader thread, and return the batches of the next cycle, one per step."""
        return result_with_timeout(self.next_cycle, self.cfg.comm_timeout, "waiting for the loader thread")

    def _build_cycle(self, cycle: list[StepConfig]) -> list[Batch]:
        """Pack the sequences of a cycle, and build this rank's batches, one per step. Collective."""
        seqs_by_step = []
        # If one rank fails to read a shard, raise the error on all ranks, so that training ends in the same cycle.
        with self.comm.raise_together(self.comm.loader_group):
            for step_cfg in cycle:
                shard, seqs = self.packer.next(step_cfg)
                my_seqs = seqs[self.comm.rank::self.comm.world_size]
                seqs_by_step.append([pack_sequence(shard, starts, ends) for starts, ends in my_seqs])
        return build_batches(self.cfg, self.comm, self.comm.loader_group, self.purpose, cycle, seqs_by_step)

    def _prefetch_shards(self, headers: Iterator[ShardHeader]) -> Iterator[TokenShard]:
        """Yield the shard of each header. The reader thread loads the next shard while the caller uses one."""
        # Remove a future before yielding its shard, so that this generator does not keep the shard in memory.
        futures: deque[Future[TokenShard]] = deque()
        for header in headers:
            futures.append(self.reader.submit(load_shard, header))
            if len(futures) > 1:
                yield result_with_timeout(futures.popleft(), self.cfg.comm_timeout, "reading a shard")
        yield result_with_timeout(futures.popleft(), self.cfg.comm_timeout, "reading a shard")

class ValidationSet:
    """The validation sequences, in host memory, and the token statistics that convert a loss to bits per byte."""
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader], purpose: str = "validation"):
        # Every rank stores all sequences, because there are few. Each rank evaluates every W-th sequence.
        self.cfg = cfg
        self.comm = comm
        self.purpose = purpose
        seq_len = cfg.val_batch_tokens // cfg.seqs_per_step
        # `map` is lazy, so shards beyond the first --val_tokens tokens are not read.
        shards = map(load_shard, headers)
        seqs = validation_sequences(shards, cfg.seqs_per_step, seq_len, cfg.bos_id)
        self.seqs = list(itertools.islice(seqs, cfg.val_tokens // seq_len))

        # Compute the unigram entropy and the bytes per token over the targets, the tokens that the loss averages over.
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
        """Return dict(val_bpb, unigram_nats): the loss in bits per byte, and the unigram entropy in nats per token."""
        if self.bytes_per_token is None:
            return {}
        return dict(val_bpb=loss / math.log(2) / self.bytes_per_token, unigram_nats=self.unigram_nats)

    def batches(self, step_cfg: StepConfig) -> Iterable[Batch]:
        """Yield this rank's validation batches, on the device, with S / W sequences each. Collective."""
        S = self.cfg.seqs_per_step
        for start in range(0, len(self.seqs), S):
            my_seqs = self.seqs[start + self.comm.rank:start + S:self.comm.world_size]
            batch, = build_batches(self.cfg, self.comm, process_group=None, purpose=self.purpose, cycle=[step_cfg],
                                   seqs_by_step=[my_seqs])
            yield batch.to(self.comm.device)


# ====== Section 11: Groups ============================================================================================
# A parameter group contains one or more parameters. The group reduces their gradients over ranks, updates this rank's
# part of the parameters, and stores the optimizer state of this part. Every group has the attributes update_every
# (steps per update) and state ({label: {state name: tensor}}). `Optimizer.step` calls the methods has_gradient,
# launch_reduce, reduced_grad, update and zero_grad of a group, in this order.
def cpu_scalar(value: float) -> Tensor:
    """Convert a scalar that changes every step to a 0-dim f64 CPU tensor."""
    return torch.tensor(value, dtype=torch.float64)

def bank_matrices(spec: ParameterSpec, weight: Tensor) -> Tensor:
    """View a NorMuon bank as the M matrices to orthogonalize, (M, rows, columns). Return other weights unchanged."""
    if spec.optimizer != "normuon":
        return weight
    # The forward pass uses q, k and v of a layer as one matrix (3D, D), but NorMuon orthogonalizes q, k and v
    # separately. The greatest common divisor of the heights 3D and D is D, the height of each of these matrices.
    return weight.view(-1, math.gcd(*spec.matrix_heights), spec.shape[-1])

class ReplicatedGroup:
    """The parameters that every rank updates in full. One all-reduce sums all of their gradients over ranks."""
    def __init__(self, cfg: Config, comm: Communicator, specs: list[ParameterSpec], weights: list[Tensor],
                 adam: Callable):
        self.comm = comm
        self.specs = specs
        self.weights = weights
        self.adam = adam
        self.update_every = cfg.adam_every
        self.state = {spec.label: init_optimizer_state(spec, p.data) for spec, p in zip(specs, weights)}

    def has_gradient(self) -> bool:
        """Return whether every parameter of the group has a gradient."""
        return all(p.grad is not None for p in self.weights)

    def launch_reduce(self) -> None:
        """Concatenate all gradients in f32, or in f64 in an f64 run, and launch their all-reduce. Collective."""
        self.grad = torch.cat([p.grad.flatten().to(accum_dtype(p.dtype)) for p in self.weights])
        self.work = self.comm.launch(dist.all_reduce, self.grad)

    def reduced_grad(self) -> Tensor:
        """Wait for the all-reduce, and return the gradients summed over ranks."""
        wait_for_work(self.work)
        return self.grad

    def update(self, grad: Tensor, step_cfg: StepConfig) -> None:
        """Apply the Adam update to all parameters of the group, in place. grad: the result of `reduced_grad`."""
        grads = grad.split([p.numel() for p in self.weights])
        for spec, p, p_grad in zip(self.specs, self.weights, grads):
            self.adam(spec, p.data, p_grad.view_as(p), self.state[spec.label], step_cfg)

    def zero_grad(self) -> None:
        """Set the gradients of all parameters of the group to None."""
        for p in self.weights:
            p.grad = None

class ShardedGroup:
    """One parameter with a main_grad, split into W shards. Each rank updates one shard."""
    def __init__(self, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter, sharded_view: Tensor,
                 num_matrices: int, grad_dtype: torch.dtype):
        self.comm = comm
        self.spec = spec
        self.weight = weight
        # Collectives work in place, because one buffer contains all shards, and all shards have the same size. Only
        # collectives read the padding.
        unpadded_size = len(sharded_view)
        self.shard_size = -(-unpadded_size // comm.world_size)
        self.padded = sharded_view.new_zeros(self.shard_size * comm.world_size, *sharded_view.shape[1:])
        self.padded[:unpadded_size] = sharded_view
        weight.data = self.padded[:unpadded_size].view_as(weight)
        start = comm.rank * self.shard_size
        self.slice = slice(start, start + self.shard_size)
        self.shard = self.padded[:unpadded_size][self.slice]
        self.state = {spec.label: init_optimizer_state(spec, self.shard)}

        self.main_grad = torch.zeros_like(self.padded, dtype=grad_dtype)
        # The reduce-scatter sends gradients in the dtype of the weight. If grad_dtype is this dtype, `to` returns
        # main_grad itself, and the reduce-scatter needs no copy.
        self.comm_buffer = self.main_grad.to(weight.dtype) if comm.world_size > 1 else self.main_grad
        weight.main_grad = self.main_grad[:unpadded_size].view_as(weight)
        weight.write_counts = torch.zeros(num_matrices, dtype=torch.int64)
        self.num_backwards = 0           # backward passes since `zero_grad`; each pass writes every matrix once

    def has_gradient(self) -> bool:
        """Return whether a backward pass or `add_zero_grads` has run since the last update."""
        return self.num_backwards > 0

    def check_writes(self) -> None:
        """Raise RunError unless each backward pass since the last update has written each matrix of main_grad once."""
        counts = self.weight.write_counts
        check(counts.eq(self.num_backwards).all(), f"main_grad of {self.spec.label}",
              found=f"its matrices were written {counts.tolist()} times",
              expected=f"{self.num_backwards} times each, once per backward pass since the last update",
              hint="a micro-batch was lost or ran twice; call discard_grads and repeat the step", error=RunError)

    def add_zero_grads(self) -> None:
        """Zero main_grad if no backward pass has run since the last update."""
        if self.num_backwards == 0:
            self.num_backwards = 1
            self.weight.write_counts.fill_(1)
            self.main_grad.zero_()

    def launch_reduce(self) -> None:
        """Launch the reduce-scatter that sums main_grad over ranks, in the dtype of the weight. Collective."""
        self.comm_buffer.copy_(self.main_grad)                                # no-op if both are the same tensor
        self.grad = self.comm_buffer[self.slice]
        self.work = self.comm.launch(dist.reduce_scatter_tensor, self.grad, self.comm_buffer)

    def reduced_grad(self) -> Tensor:
        """Wait for the reduce-scatter, and return the gradient of this rank's shard, summed over ranks."""
        wait_for_work(self.work)
        return self.grad[:len(self.shard)]

    def update(self, grad: Tensor, step_cfg: StepConfig) -> dist.Work | None:
        """Update this rank's shard in place, and launch the all-gather of the weight. Collective."""
        self.update_shard(grad, step_cfg)
        return self.comm.launch(dist.all_gather_into_tensor, self.padded, self.padded[self.slice])

    def zero_grad(self) -> None:
        """Discard the gradient: the next backward pass overwrites main_grad, and weight.grad is set to None."""
        # main_grad need not be zeroed: while a write count is 0, the next write overwrites main_grad.
        self.num_backwards = 0
        self.weight.grad = None
        self.weight.write_counts.zero_()

class BankGroup(ShardedGroup):
    """A bank of matrices, updated by NorMuon on every step. Each rank updates a contiguous range of the matrices."""
    update_every = 1

    def __init__(self, cfg: Config, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter,
                 multiple_micro_batches: bool, normuon: Callable):
        self.cfg = cfg
        self.normuon = normuon
        matrices = bank_matrices(spec, weight.data)                           # (M, rows, columns)
        accum = accum_dtype(weight.dtype)
        grad_dtype = accum if multiple_micro_batches else weight.dtype
        super().__init__(comm, spec, weight, matrices, len(spec.matrix_heights) * len(weight), grad_dtype)

        # Multiply the learning rate of a matrix by its multiplier in the spec, and the learning rate of tall matrices
        # also by the square root of their aspect ratio. NorMuon may split a weight matrix into several matrices.
        _, rows, columns = matrices.shape
        aspect_mul = max(1.0, rows / columns) ** 0.5
        layer_lr_muls: list[float] = []
        for _, height, lr_mul in spec.matrices:
            layer_lr_muls += [lr_mul * aspect_mul] * (height // rows)
        lr_muls = matrices.new_tensor(layer_lr_muls, dtype=accum).repeat(len(weight))
        self.lr_muls = lr_muls[self.slice, None, None]

    def update_shard(self, grad: Tensor, step_cfg: StepConfig) -> None:
        """Apply the NorMuon update to self.shard, the matrices of this rank, in place."""
        if len(self.shard) == 0:                          # more ranks than matrices
            return
        cfg = self.cfg
        state = self.state[self.spec.label]
        lr = cpu_scalar(step_cfg.normuon_lr)
        # Weight decay is quadratic in the learning rate: lr * weight_decay here, times lr in normuon_update.
        decay = lr * cfg.normuon_weight_decay
        self.normuon(self.shard, state.get("mantissa"), grad, state["momentum"], state["second"], 1 / cfg.seqs_per_step,
                     cpu_scalar(step_cfg.momentum), lr, self.lr_muls, decay, cfg.normuon_beta2)

class HeadGroup(ShardedGroup):
    """The head (D, V), sharded along the model dim D. Adam updates the head every --adam_every steps."""
    def __init__(self, cfg: Config, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter, adam: Callable):
        self.update_every = cfg.adam_every
        self.adam = adam
        super().__init__(comm, spec, weight, sharded_view=weight.data, num_matrices=1,
                         grad_dtype=accum_dtype(weight.dtype))

    def update_shard(self, grad: Tensor, step_cfg: StepConfig) -> None:
        """Apply the Adam update to self.shard, this rank's slice of the head along D, in place."""
        self.adam(self.spec, self.shard, grad, self.state[self.spec.label], step_cfg)

class TableGroup:
    """A dense embedding table. Adam updates every row of this rank's shard, including rows that were not looked up."""
    def __init__(self, spec: ParameterSpec, table: LocalTable | ExchangedTable, update_fn: Callable):
        self.spec = spec
        self.table = table
        self.update_fn = update_fn
        self.update_every = spec.table.update_every
        self.state = {} if spec.table.rowwise else {spec.label: init_optimizer_state(spec, table.shard)}

    def has_gradient(self) -> bool:
        """Return whether a training forward pass has read the table since the last update."""
        return self.table.has_grads

    def launch_reduce(self) -> None:
        """Launch the all-to-all that sends row gradients to the owners of the rows. Collective."""
        self.table.launch_reduce()

    def reduced_grad(self) -> Tensor:
        """Wait for the row gradients, and return the gradient of the rows to update, summed over ranks."""
        return self.table.reduced_grads()

    def update(self, grad: Tensor, step_cfg: StepConfig) -> None:
        """Apply the Adam update to this rank's shard of a dense table, in place. RowwiseTableGroup overrides this."""
        # For a dense table, update_fn is `apply_adam` with its arguments update_fn and cfg bound.
        self.update_fn(self.spec, self.table.shard, grad, self.state[self.spec.label], step_cfg)

    def zero_grad(self) -> None:
        """Clear the row gradients, and invalidate the row cache, because the update has changed the rows."""
        self.table.zero_grad()

class RowwiseTableGroup(TableGroup):
    """A row-wise table: an update modifies only the owned rows that some rank looked up in the update cycle."""
    def __init__(self, cfg: Config, spec: ParameterSpec, table: RowwiseTable, update_fn: Callable):
        super().__init__(spec, table, update_fn)
        self.cfg = cfg

    def update(self, grad: Tensor, step_cfg: StepConfig) -> None:
        row_state = self.table.row_state
        update_num, step_size, decay = update_scalars(self.cfg, self.spec, step_cfg)
        # Create update_num on the device. Copying it from the host would synchronize.
        device_update_num = torch.full((), update_num, dtype=torch.int32, device=grad.device)
        if self.table.comm.compiles(self.cfg):            # do not recompile when the number of rows changes
            for x in (*row_state, grad):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        # betas[1] is beta2. A row-wise update has no first moment, and does not use beta1.
        self.update_fn(*row_state, grad, 1 / self.cfg.seqs_per_step, device_update_num, self.spec.betas[1],
                       self.cfg.adam_eps, step_size, decay)
        self.table.store.write_back(self.table.pending_plan, row_state)


# ====== Section 12: Files =============================================================================================
# ---- Clock and log
LOG_FILES = ("log.txt", "log.jsonl")
CONSOLE_STEP_LINES = 20                  # step lines printed per run, if the console is not a terminal
EMPTY_LOG_STATE = dict(tokens=0, steps_done=0, last_val="none", lines={})         # result of Log.state for a new run

class Clock:
    """Stopwatch for the training time in ms. Only `start` and `stop` synchronize with the device."""
    def __init__(self, comm: Communicator, initial_ms: float = 0.0):
        self.comm = comm
        self.ms_at_last_stop = initial_ms  # training time at the last stop; initial_ms before the first stop
        self.start_s: float | None = None  # time.perf_counter() at the last start; None while the clock is stopped
        self.cycle_start_ms = initial_ms  # training time at the last call of `predict_next_cycle_start_ms`

    @property
    def ms(self) -> float:
        """Training time so far, in ms, including the time since the last start if the clock is running."""
        return self.ms_at_last_stop if self.start_s is None else (
            self.ms_at_last_stop + (time.perf_counter() - self.start_s) * 1000)

    def start(self) -> None:
        """Start the clock. Synchronize with the device first, so that earlier device work is not timed."""
        self.comm.synchronize()
        self.start_s = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock. Synchronize with the device first, so that all device work so far is timed."""
        self.comm.synchronize()
        self.ms_at_last_stop = self.ms
        self.start_s = None

    def predict_next_cycle_start_ms(self) -> float:
        """Predict the training time, in ms, at which the next cycle will start."""
        now_ms = self.ms
        previous_cycle_ms = now_ms - self.cycle_start_ms
        self.cycle_start_ms = now_ms
        return now_ms + previous_cycle_ms

class Log:
    """Log files and console output of a run. Rank 0 writes them, and every rank checks losses for NaN and infinity."""
    def __init__(self, run_dir: Path, comm: Communicator, schedule: Schedule, files: dict[str, bytes],
                 resumed: dict[str, Any] = EMPTY_LOG_STATE):
        self.run_dir = run_dir
        self.comm = comm
        self.schedule = schedule
        self.total_steps = schedule.planned_steps         # steps of the run; an estimate with --time_budget
        self.tokens = resumed["tokens"]  # tokens trained so far, on all ranks
        self.steps_done = resumed["steps_done"]
        self.last_val = resumed["last_val"]               # last finite validation loss and its step, as text
        # Steps whose log lines are not written yet, as (fields, sums, num_tokens, work, copied):
        #     fields       of the line in log.jsonl
        #     sums         (2,), on the host: multi-token loss and next-token loss, each summed over all ranks
        #     num_tokens   of all ranks
        #     work         handle of the all-reduce of `sums`; None if W = 1
        #     copied       CUDA event after the copy of `sums` to the host; None on a CPU
        self.pending: list[tuple[dict[str, Any], Tensor, int, dist.Work | None, torch.cuda.Event | None]] = []
        self.copy_stream = torch.cuda.Stream(comm.device) if comm.on_cuda else None
        self.files: dict[str, Any] = {}  # open log files, keyed by name; empty unless rank 0
        self.is_tty = comm.rank == 0 and bool(sys.stderr) and sys.stderr.isatty()  # stderr is None if it was closed
        if comm.rank == 0:
            # Mode "x" refuses to overwrite an existing log, because an existing log belongs to another run. The files
            # are unbuffered, so that a killed run loses no lines.
            with write_errors(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                for name in LOG_FILES:
                    self.files[name] = open(run_dir / name, "xb", buffering=0)
                for name, content in files.items():
                    (run_dir / name).write_bytes(content)
        for name, text in resumed["lines"].items():
            self._write(name, text.encode())

    def state(self) -> dict[str, Any]:
        """Write all pending lines, and return the state of the log for a checkpoint."""
        self.flush()
        return dict(tokens=self.tokens, steps_done=self.steps_done, last_val=self.last_val,
                    lines={name: (self.run_dir / name).read_text("utf-8") for name in self.files})

    def event(self, kind: str, **fields: Any) -> None:
        """Append dict(type=kind, **fields) to log.jsonl as a line of JSON. Raises RunError if writing fails."""
        self._write("log.jsonl", (json.dumps(dict(type=kind, **fields)) + "\n").encode())

    def info(self, line: str) -> None:
        """Append a line to log.txt, and print the line to stdout. Raises RunError if writing log.txt fails."""
        self._write("log.txt", (line + "\n").encode("utf-8", "replace"))
        self.show_progress("")           # erase the progress line
        self.comm.print0(line)

    def show_progress(self, text: str) -> None:
        """Show `text` as the progress line of the terminal, or erase the progress line if `text` is ""."""
        if self.is_tty:
            with contextlib.suppress(OSError):
                # Truncate the text to the width of the terminal, because a wrapped line is not erased completely.
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\x1b[K{text[:width]}\r", end="", file=sys.stderr, flush=True)

    def _write(self, name: str, data: bytes) -> None:
        """Append data to the log file `name`. Raises RunError if writing fails."""
        file = self.files.get(name)
        if file is not None:
            with write_errors(self.run_dir / name):
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, "No space left on device: only a part of the line was written")

    @contextlib.contextmanager
    def phase(self, name: str, timed: bool = False) -> Iterator[None]:
        """Context manager that logs the wall time of its body as phase `name`."""
        start = time.perf_counter()
        yield
        ms = (time.perf_counter() - start) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=timed)
        self.info(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if timed else ''}")

    def step(self, losses: StepLoss, ms: float) -> None:
        """Record a training step, and write the log lines of the step --adam_every steps before it. Collective."""
        self.steps_done += 1
        self.tokens += losses.num_tokens * self.comm.world_size
        fields = dict(step=self.steps_done, train_time_ms=round(ms, 3), tokens=self.tokens)
        if self.schedule.cfg.time_budget:
            progress = self.schedule.progress(self.steps_done - 1)
            fields["progress"] = progress
            self.total_steps = round(self.schedule.planned_steps * self.steps_done / max(progress, 1))
        # Sum the losses of all ranks, and copy the sums to the host, on a separate stream, so that training does not
        # wait. `flush` reads the copy --adam_every steps later, when the device is already running later steps.
        sums = torch.stack([losses.seq_sums.sum(), losses.next_sum])
        work = self.comm.launch(dist.all_reduce, sums)
        copied = None
        if self.copy_stream:
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.comm.device))
            sums.record_stream(self.copy_stream)
            with torch.cuda.stream(self.copy_stream):
                wait_for_work(work)
                sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
                copied = self.comm.record_event()
        self.pending.append((fields, sums, losses.num_tokens * self.comm.world_size, work, copied))
        self.flush(keep=self.schedule.cfg.adam_every)

    def flush(self, keep: int = 0) -> None:
        """Write the log lines of the pending steps, except those of the last `keep` pending steps."""
        while len(self.pending) > keep:
            fields, sums, num_tokens, work, copied = self.pending.pop(0)
            # On a GPU, `copied` is the CUDA event after the copy of `sums` to the host. On a CPU, it is None.
            if copied is None:
                wait_for_work(work)
            else:
                self.comm.wait_for(copied)
            loss, next_loss = (loss_sum / num_tokens for loss_sum in sums.tolist())
            step, ms = fields["step"], fields["train_time_ms"]
            self.check_finite(loss, f"training loss of step {step - 1}")
            self.event("step", **fields, train_loss=loss, train_loss_next=next_loss)
            line = f"step:{step}/{self.total_steps} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms"
            self._write("log.txt", (line + "\n").encode())
            # end_step includes --max_steps, and total_steps does not. With --time_budget, end_step may be infinite.
            seconds_left = (min(self.total_steps, self.schedule.end_step) - step) * ms / step / 1000
            summary = f"{seconds_left:.0f} s left, train_loss:{next_loss:.3f}"
            self.show_progress(f"step:{step}/{self.total_steps} {summary}")
            if not self.is_tty and step % -(-self.total_steps // CONSOLE_STEP_LINES) == 0:
                self.comm.print0(f"{line} {summary}")

    def check_finite(self, loss: float, what: str) -> None:
        """Raise RunError if `loss` is NaN or infinite. what: name of the loss, for the error message."""
        check(math.isfinite(loss), what, found=loss,
              expected=f"a finite loss (last finite validation loss: {self.last_val})",
              hint="lower --adam_lr and --normuon_lr; to test for overflow, run with --dtype=float32 --head=plain",
              error=RunError)

    def validation(self, loss: float, ms: float, validation_set: ValidationSet) -> None:
        """Write all pending lines, then log the validation loss at step self.steps_done."""
        self.flush()
        self.check_finite(loss, f"validation loss at step {self.steps_done}")
        self.last_val = f"{loss:.4f} at step {self.steps_done}"
        self.event("val", step=self.steps_done, val_loss=loss, train_time_ms=round(ms, 3),
                   **validation_set.text_metrics(loss))
        self.info(f"step:{self.steps_done}/{self.total_steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms "
                  f"step_avg:{ms / max(self.steps_done, 1):.2f}ms")

    def write_aborted(self, cause: str) -> None:
        """Append a final `aborted` line to both log files."""
        # The main thread may still be running a step. Clear self.files first, so that `_write` discards its lines.
        open_files, self.files = self.files, {}
        last_lines = {"log.txt": f"aborted after step {self.steps_done}: {' '.join(cause.split())}\n",
                      "log.jsonl": json.dumps(dict(type="aborted", step=self.steps_done, cause=cause)) + "\n"}
        for name, file in open_files.items():
            with contextlib.suppress(Exception):
                file.write(last_lines[name].encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the log files, and erase the progress line. Anything logged afterwards is not written to the files."""
        for file in self.files.values():
            file.close()
        self.files = {}
        self.show_progress("")

class RunInfo(NamedTuple):
    """Metadata for logs and checkpoints, shared by all runs (seeds) of this process."""
    run_id: str                          # 8 random hex digits, the same on all ranks
    source: bytes                        # content of this file
    raw_cfg: Config                      # flags and preset, before the shard headers fill in the sizes
    attention_name: str                  # kernel, package and version, for example "FA3 (flash-attn-3 3.0.0)"
    fingerprint: dict[str, str]          # {name: text} of settings, hashes and versions that affect results
    resumed: dict[str, Any]              # dict(step, source, differs) from `check_resume`; {} for a new run


# ---- Saves and checkpoints. Both are directories. A directory is written under a temporary name, and renamed once all
# of its files are on the disk, so an interrupted write never leaves an incomplete directory under the final name.
# Loading never executes code from the files.
CHECKPOINT_DIR = "checkpoints"           # in the run directory
KEPT_CHECKPOINTS = 2
SETTINGS_FILE = "settings.json"          # in run directories and saves: {field: value as on the command line}
DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)                         # I/O error, disk full, quota exceeded
PARTIAL_DIRS: set[Path] = set()          # directories that this process is writing; the exit handler deletes them

def file_sha256(path: Path) -> str:
    """Compute the SHA-256 hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def fsync_path(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to the disk with fsync."""
    # Some file systems (network shares, FUSE, CIFS) refuse fsync of a directory, with various error codes. Ignore these
    # errors, because no data is lost.
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in DISK_ERRORS or not path.is_dir():
            raise

def partial_path(directory: Path, run_id: str) -> Path:
    """Return the temporary path "<directory>.<run_id>.part", under which this run writes `directory`."""
    return directory.with_name(f"{directory.name}.{run_id}.part")

def touched_row_files(engine: Engine) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the files that store this rank's shards of the row-wise tables, as (file name, content)."""
    comm = engine.comm
    for label, table in engine.tables.items():
        if table.store:
            # Copy one chunk at a time, because a copy of all rows may exceed the free memory.
            for chunk_idx, (local_rows, state) in enumerate(table.store.touched_state()):
                name = f"rows-{label}-{comm.rank}of{comm.world_size}-{chunk_idx}.pt"
                yield name, dict(state._asdict(), ids=local_rows * comm.world_size + comm.rank)

def write_directory(directory: Path, run_id: str, files: dict[str, Any], engine: Engine) -> None:
    """Write `files` and the row-wise tables of all ranks to a new directory, atomically. Collective."""
    comm = engine.comm
    partial = partial_path(directory, run_id)
    # chain iterates lazily, so that only one chunk of rows is in memory at a time.
    contents = itertools.chain(files.items() if comm.rank == 0 else (), touched_row_files(engine))

    def write(name: str, content: Any) -> dict[str, int | str]:
        """Write one file to the partial directory, flush the file to the disk, and return dict(bytes, sha256) of it."""
        path = partial / name
        with open(path, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
        fsync_path(path)
        return dict(bytes=path.stat().st_size, sha256=file_sha256(path))

    PARTIAL_DIRS.add(partial)
    try:
        with comm.raise_together(), write_errors(partial):
            if comm.rank == 0:
                partial.mkdir(parents=True)
        with comm.raise_together(), write_errors(partial):
            entries = {name: write(name, content) for name, content in contents}
        # The files of all ranks are on the disk now, because `raise_together` has waited for all ranks.
        entries = functools.reduce(operator.or_, comm.all_gather(entries))
        with comm.raise_together(), write_errors(directory):
            if comm.rank == 0:
                write(MANIFEST_FILE, json.dumps(dict(format=max(MANIFEST_FORMATS), files=entries), indent=1).encode())
                fsync_path(partial)
                partial.rename(directory)                 # raises if another run has created the directory meanwhile
                fsync_path(directory.parent)
    finally:
        PARTIAL_DIRS.discard(partial)
        if comm.rank == 0:
            # Delete the partial directory after a failure. After success, the path no longer exists.
            shutil.rmtree(partial, ignore_errors=True)

def read_tensors(path: Path, manifest: dict[str, str]) -> dict[str, Any]:
    """Load a dict written by torch.save, with memory-mapped CPU tensors. Executes no code from the file."""
    with read_errors(path):
        check(path.is_file() and file_sha256(path) == manifest.get(path.name), path,
              found=f"missing, or its sha256 differs from {MANIFEST_FILE}", expected="the file as it was written",
              hint="name a directory that --save wrote; if it is one, copy it again", error=DataError)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

def check_tensors(path: Path, cfg: Config, found: Any, with_moments: bool = False) -> None:
    """Check that the tensors loaded from `path` have the names, shapes and dtypes that `cfg` implies."""
    dtype = getattr(torch, cfg.dtype)
    tensors = {}
    for spec in parameter_specs(cfg):
        if spec.optimizer != "rowwise":
            weight_dtype = accum_dtype(dtype) if spec.full_precision else dtype
            weight = tensors[spec.label] = torch.empty(spec.shape, dtype=weight_dtype, device="meta")
            if with_moments:
                tensors |= {f"{spec.label}.{name}": x for name, x in init_optimizer_state(spec, weight).items()}
    expected_layouts = {name: (x.dtype, *x.shape) for name, x in tensors.items()}
    with read_errors(path):
        layouts = {name: (x.dtype, *x.shape) for name, x in found.items()}
    for name in expected_layouts | layouts:
        check(layouts.get(name) == expected_layouts.get(name), f"{name} in {path}",
              found=layouts.get(name, "no such tensor"), expected=expected_layouts.get(name, "no such tensor"),
              hint="use the trainer and settings of the run that wrote it", error=DataError)

def load_rows(directory: Path, manifest: dict[str, str], engine: Engine) -> None:
    """Load this rank's rows of the row-wise tables from a save or checkpoint. Rows not in the files become zeros."""
    comm = engine.comm
    for label, table in engine.tables.items():
        if table.store:
            table.store.clear()
            for name in manifest:
                if re.fullmatch(rf"rows-{label}-\d+of\d+-\d+\.pt", name):
                    content = read_tensors(directory / name, manifest)
                    # If the rows do not fit the table, for example in width, one of these statements raises.
                    with read_errors(directory / name):
                        owned = content["ids"] % comm.world_size == comm.rank
                        rows, v, last = (content[field][owned] for field in RowState._fields)
                        table.store.load_chunk(content["ids"][owned] // comm.world_size,
                                               RowState(rows.to(table.shard.dtype), v, last))

def format_spec(spec: Stage | NgramTable) -> str:
    """Serialize a Stage or NgramTable to the syntax of --stages or --tables: its fields, separated by spaces."""
    field_texts = []
    for value in vars(spec).values():
        if isinstance(value, tuple):
            field_texts.append(",".join(map(str, value)))
        elif isinstance(value, bool):                     # Stage.untie: the word `untie`, or nothing
            field_texts += ["untie"] if value else []
        else:
            field_texts.append("stream" if value is None else str(value))
    return " ".join(field_texts)

def format_value(value: Any) -> str:
    """Serialize the value of a Config field to its command-line syntax. `parse_value` is the inverse."""
    return ";".join(map(format_spec, value)) if isinstance(value, tuple) else str(value)

def settings_json(cfg: Config) -> bytes:
    """Serialize a config as JSON: {field: value as written on the command line}. `read_settings` reads this format."""
    return json.dumps({name: format_value(value) for name, value in vars(cfg).items()}, indent=1).encode()

def save_weights(directory: Path, run_id: str, cfg: Config, engine: Engine, step_cfg: StepConfig,
                 token_bytes: list[bytes] | None) -> None:
    """Write the directory of --save: full weights, settings, vocabulary and row-wise tables. Collective."""
    # `write_directory` adds the touched rows of the row-wise tables.
    files = {"weights.pt": engine.full_state(step_cfg, with_moments=False), SETTINGS_FILE: settings_json(cfg)}
    if token_bytes is not None:
        files[VOCAB_FILE] = b"".join(b"%s %d\n" % (base64.b64encode(text), token)
                                     for token, text in enumerate(token_bytes) if text)
    write_directory(directory, run_id, files, engine)

def write_checkpoint(run_dir: Path, run_id: str, content: dict[str, Any], engine: Engine,
                     step_cfg: StepConfig) -> None:
    """Write a checkpoint from which --resume continues at step_cfg.step, and delete old checkpoints. Collective."""
    comm = engine.comm
    checkpoints = run_dir / CHECKPOINT_DIR
    name = f"step-{step_cfg.step:07d}"
    files = {"run.pt": dict(content, state=engine.full_state(step_cfg, with_moments=True))}
    try:
        write_directory(checkpoints / name, run_id, files, engine)
    except RunError as error:
        # Continue the run, because the next checkpoint may succeed.
        comm.print0(f"{error}\nwarning: continuing without this checkpoint")
        return
    if comm.rank == 0:
        earlier_dirs = sorted(path for path in checkpoints.glob("step-???????") if path.name < name)
        for directory in earlier_dirs[:1 - KEPT_CHECKPOINTS]:
            shutil.rmtree(directory, ignore_errors=True)

def load_checkpoint(run_dir: Path, engine: Engine) -> dict[str, Any]:
    """Load the newest intact checkpoint of run_dir into the engine. Collective."""
    comm = engine.comm
    newest_first = sorted((run_dir / CHECKPOINT_DIR).glob("step-???????"), reverse=True)
    comm.check_agreement(dict(checkpoints=str([path.name for path in newest_first])))
    # If one rank cannot read a checkpoint, all ranks skip it, so that all ranks resume at the same step.
    for path in newest_first:
        run_file = path / "run.pt"
        try:
            with comm.raise_together(), read_errors(run_file):
                manifest = read_manifest(path)
                content = read_tensors(run_file, manifest)
                # Another trainer may have stored other entries or types. Use and convert all entries inside this
                # block, which reports any exception as an error of the file.
                state, log, fingerprint = (content[name] for name in ("state", "log", "fingerprint"))
                step_cfg = Schedule(engine.cfg, content["cycle_progress"]).at(log["steps_done"])
                check("moments" not in state and "data_sha256" in fingerprint
                      and path.name == f"step-{step_cfg.step:07d}", run_file, found="a checkpoint of another trainer",
                      expected="a checkpoint of this trainer",
                      hint="resume with the train_gpt.py in that run directory", error=DataError)
                check_tensors(run_file, engine.cfg, state, with_moments=True)
                engine.load_state(state)
                load_rows(path, manifest, engine)
                return dict(
                    log=dict(tokens=int(log["tokens"]), steps_done=step_cfg.step, last_val=str(log["last_val"]),
                             lines={str(name): str(text) for name, text in log["lines"].items()}),
                    train_time_ms=float(content["train_time_ms"]),
                    cycle_progress=list(map(float, content["cycle_progress"])),
                    fingerprint={str(name): str(text) for name, text in fingerprint.items()})
        except DataError as error:
            comm.print0(f"{error}\nwarning: skipping checkpoint {path.name}; trying the one before it")
    raise DataError(f"checkpoints in {run_dir}", found=f"none is intact: {[path.name for path in newest_first]}",
                    expected="an intact checkpoint of this trainer",
                    hint="if this run was resumed, --resume the earlier run; otherwise start again with "
                         "--checkpoint_every=100")


# ---- Sampling
def generate(cfg: Config, engine: Engine, step_cfg: StepConfig, token_bytes: list[bytes] | None,
             prompt: list[int] | tuple[int, ...] = ()) -> str:
    """Sample a continuation of the prompt, and return the continuation as text. Collective."""
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.bos_id, *prompt]
    for _ in range(cfg.sample_tokens):
        # Drop the logits of ids from vocab_size on. These ids pad the vocabulary, and must never be sampled.
        logits = engine.next_logits(tokens, step_cfg)[:cfg.vocab_size].float().cpu()
        check(logits.isfinite().all(), "sample: logits of the next token", found="NaN or infinity",
              expected="finite logits", hint="use other weights, or train again with lower --adam_lr and --normuon_lr",
              error=RunError)

        sampled = torch.multinomial(torch.softmax(logits / cfg.temperature, 0), 1, generator=generator)
        token = min(engine.comm.all_gather(int(sampled)))  # same token on all ranks, even if rounding differs
        if token == cfg.bos_id:
            break
        tokens.append(token)
    tokens = tokens[1 + len(prompt):]
    if not token_bytes:
        return "token ids (there is no vocab.txt to decode them): " + " ".join(map(str, tokens))
    return b"".join(token_bytes[token] for token in tokens).decode("utf-8", "replace")


# ====== Section 13: Launch ============================================================================================
# ---- Command line
def parse_value(name: str, text: str, preset: str = Config.preset) -> Any:
    """Parse and validate the value of the flag --`name`. Expands `~` in directories and globs."""
    config_field = Config.__dataclass_fields__[name]
    metadata = config_field.metadata
    value_type = type(config_field.default)
    choices = metadata["choices"]
    if choices:
        expected = f"one of {', '.join(map(str, choices))}"
    elif value_type is tuple:
        expected = metadata["help"]
    else:
        type_name = "an integer" if value_type is int else "a number"
        expected = f"{type_name} from {metadata['lo']:,} to {metadata['hi']:,}"
        if metadata["unit"] not in ("integer", "number"):
            expected += f" ({metadata['unit']})"

    # A failed conversion, here or in `parse_specs`, falls through to the ConfigError below.
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if value_type is tuple:
            return parse_specs(name, text)
        if metadata["unit"] in ("directory", "glob"):
            text = os.path.expanduser(text)           # the shell does not expand ~ in --save=~/x
        value = value_type(text)
        in_bounds = value_type is str or metadata["lo"] <= value <= metadata["hi"]  # False for NaN
        if value in choices or (in_bounds and not choices):
            return value
    # Most presets have no tables, and an empty list is a poor example.
    example = shlex.quote(format_value(PRESETS.get(preset, {}).get(name, config_field.default))
                          or "trigram_embed 3 20480")
    raise ConfigError(f"--{name}: invalid value", found=repr(text), expected=expected,
                      hint=f"for example --{name}={example}; see --help")

def check_layers(layers: tuple[Layer, ...]) -> None:
    """Check that save_as, add_saved and value_embed of all layers fit together."""
    saved_names = []                 # save_as of the layers so far
    for i, layer in enumerate(layers):
        check(layer.add_saved in ("", *saved_names), f"LAYERS: invalid layer {i}", found=layer,
              expected=f"add_saved is a name that an earlier layer saves, {saved_names}",
              hint="correct the layer; class Layer describes its fields")
        if layer.save_as:
            saved_names.append(layer.save_as)
    value_embeds = sorted(layer.value_embed for layer in layers if layer.value_embed is not None)
    names_valid = BACKOUT in saved_names and len(saved_names) == len(set(saved_names))
    check(names_valid and value_embeds == list(range(len(value_embeds))), "LAYERS: layers that do not fit together",
          found=f"save_as {saved_names}, value_embed {value_embeds}",
          expected=f"save_as: different names, among them {BACKOUT!r}; value_embed: 0, 1, ... once each",
          hint="correct the layers; class Layer describes their fields")

def check_config(cfg: Config) -> None:
    """Validate LAYERS and the settings that depend on each other."""
    # `parse_value` has already validated the type and range of each flag.
    check_layers(LAYERS)
    H, E = cfg.num_heads, cfg.head_dim
    # Sequence lengths must be multiples of SEQ_MULTIPLE, so the tokens of a batch must be a multiple of this.
    batch_multiple = SEQ_MULTIPLE * cfg.seqs_per_step
    for stage in cfg.stages:
        check(0 < stage.batch_tokens and stage.batch_tokens % batch_multiple == 0, "--stages: invalid stage",
              found=stage, expected=f"batch_tokens: a multiple of {batch_multiple} ({SEQ_MULTIPLE} * seqs_per_step)",
              hint=f"correct the stage; --stages takes {STAGE_SYNTAX}")
    labels = [table.label for table in cfg.tables]
    for table in cfg.tables:
        check(labels.count(table.label) == 1, "--tables: duplicate label", found=table,
              expected="a label that no other table has", hint="rename one of the tables")
        check(table.update_every % cfg.adam_every == 0, "--tables: invalid table", found=table,
              expected=f"update_every: a multiple of adam_every={cfg.adam_every}",
              hint=f"correct the table; --tables takes {TABLE_SYNTAX}")
    # Replace an empty --profile, which is valid, by a range that is valid.
    profile_match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", cfg.profile or "1:2")
    rules = (                        # (name of the field, is its value valid, what is expected, a valid value)
        ("num_heads", H % 2 == 0, "an even number, because paired layers join two heads", H + 1),
        ("head_dim", E % 4 == 0, "a multiple of 4", E // 4 * 4),
        ("model_dim", cfg.model_dim == H * E, f"num_heads * head_dim = {H} * {E}", H * E),
        ("stages", len(cfg.stages) >= 2 and sum(stage.untie for stage in cfg.stages) <= 1,
         "at least two stages, of which the last is the extension after the scheduled steps, "
         "and `untie` in at most one",
         format_value(PRESETS[cfg.preset].get("stages", STAGES))),
        ("val_batch_tokens", cfg.val_batch_tokens % batch_multiple == 0,
         f"a multiple of {batch_multiple} ({SEQ_MULTIPLE} * seqs_per_step)",
         -(-cfg.val_batch_tokens // batch_multiple) * batch_multiple),
        ("val_tokens", cfg.val_tokens % cfg.val_batch_tokens == 0, "a multiple of val_batch_tokens",
         -(-cfg.val_tokens // cfg.val_batch_tokens) * cfg.val_batch_tokens),
        ("runs", cfg.runs == 1 or not (cfg.resume or cfg.save or cfg.profile),
         "1 together with --resume, --save or --profile", 1),
        ("profile", profile_match and 0 < int(profile_match[1]) < int(profile_match[2]),
         "a:b with 0 < a < b, to trace steps a to b - 1", "100:104"))
    for name, ok, expected, example in rules:
        value = format_value(getattr(cfg, name))
        check(ok, f"--{name}: invalid value", found=value or "nothing", expected=expected,
              hint=f"for example --{name}={shlex.quote(str(example))}")

def make_config(settings: dict[str, Any]) -> Config:
    """Build and validate a Config from {field: value}."""
    preset = settings.get("preset", Config.preset)
    check(preset in PRESETS, "--preset: unknown preset", found=preset, expected=f"one of {', '.join(PRESETS)}",
          hint="for example --preset=pocket")
    cfg = Config(**PRESETS[preset] | settings)
    check_config(cfg)
    return cfg

def read_settings(directory: Path) -> Config:
    """Load the Config from the settings.json of a run directory or a save."""
    path = directory / SETTINGS_FILE
    hint = ("give a run directory, or a directory written by --save; a prompt is an argument of its own: --sample=DIR "
            "'a prompt'; for a run of an older version, use the train_gpt.py in its run directory")
    check(directory.is_dir(), f"settings file {path}",
          found=f"no directory of this name (working directory {os.getcwd()})",
          expected="a directory with the settings of a run or a save", hint=hint, error=DataError)
    try:
        # Another version of this trainer, with other flags, may have written the file.
        return make_config({name: parse_value(name, text)
                            for name, text in json.loads(read_small_file(path, hint)).items()})
    except ConfigError as error:
        raise ConfigError(f"{error.args[0]}, in {path}", *error.args[1:]) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # A KeyError is raised for the name of a flag that this version does not have.
        raise DataError(f"settings file {path}",
                        found=f"{'unknown setting' if isinstance(error, KeyError) else type(error).__name__}: {error}",
                        expected="settings of this version of the trainer", hint=hint) from None

def print_stdout(text: str) -> None:
    """Print text that the user asked for, such as --help or a sample, with control characters escaped."""
    try:
        print(text.translate(ESCAPED_CONTROLS), flush=True)
    except (OSError, ValueError) as error:
        raise RunError("standard output: write failed", found=error, expected="an open stream with free space",
                       hint="redirect it to a disk with free space; the results of a run are also in its log") from None

def make_arg_parser(preset: str) -> argparse.ArgumentParser:
    """Build the command-line parser. Its help text shows the values of the preset as defaults."""
    # The help shows the defaults of --preset, which are known only after parsing. So argparse must not print the help;
    # `parse_args` prints it.
    parser = argparse.ArgumentParser(
        "train_gpt.py", "%(prog)s [--preset=NAME] [--field=value ...], or --sample=DIR [PROMPT]", add_help=False,
        allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS, epilog="exit status: 0 success, "
        "1 the run failed, 2 invalid settings or data, 129 hangup, 130 interrupted, 143 terminated")
    parser.add_argument("-h", "--help", action="store_true", help="print this help and exit")
    parser.add_argument("prompt", nargs="?", help="same as --prompt")
    defaults = vars(make_config(dict(preset=preset)))
    for group, config_fields in itertools.groupby(fields(Config), lambda config_field: config_field.metadata["group"]):
        help_group = parser.add_argument_group(group)
        for config_field in config_fields:
            help_group.add_argument(
                f"--{config_field.name}", metavar=config_field.metadata["unit"],
                help=f"{config_field.metadata['help']} [{format_value(defaults[config_field.name])}]")
    return parser

# {old name: new name}. The old names, which earlier versions used on command lines and in settings files, are rejected.
RENAMED_FLAGS = dict(num_slots="seqs_per_step", slots_per_micro_batch="micro_batch_size", document_start="bos_id")

def unknown_flag_error(text: str) -> ConfigError:
    """Build the ConfigError for an unknown command-line argument."""
    flag_text = text.partition("=")[0]
    name = flag_text.removeprefix("--")
    # Names below a similarity of 0.7 have few letters in common with the text, so they mislead.
    similar_names = difflib.get_close_matches(name, Config.__dataclass_fields__, 3, 0.7)
    hint = "--help lists all flags"
    if name in RENAMED_FLAGS:
        hint = f"it was renamed to --{RENAMED_FLAGS[name]}"
    elif similar_names:
        hint = "did you mean " + " or ".join(f"--{similar_name}" for similar_name in similar_names) + "?"
    what = f"unknown flag {flag_text}" if flag_text.startswith("-") else "argument without a flag"
    return ConfigError(what, found=repr(text),
                       expected="--field=value, where field is a setting; or one prompt in quotes", hint=hint)

def parse_args(argv: list[str]) -> dict[str, Any]:
    """Parse the command line into {field: value}. Flags that are not given are absent from the result."""
    try:
        namespace, unknown_args = make_arg_parser(Config.preset).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("invalid command line", found=error, expected="--field=value",
                          hint="--help lists all flags") from None
    if unknown_args:
        raise unknown_flag_error(unknown_args[0])
    texts = vars(namespace)
    if "help" in texts:
        print_stdout(make_arg_parser(texts.get("preset", Config.preset)).format_help())
        sys.exit(0)
    # Parse the values after all flags are known, because the examples in error messages depend on --preset.
    flags = {name: parse_value(name, text, texts.get("preset", Config.preset)) for name, text in texts.items()}

    # An empty directory is probably --resume=$DIR with DIR unset. Reject the flag instead of starting a new run.
    for name in ("resume", "sample"):
        check(flags.get(name) != "", f"--{name}: no directory", found="an empty value", expected="a directory",
              hint=f"give --{name}=DIR, or omit --{name}")
    check("sample" in flags or not flags.get("prompt"), "argument without a flag", found=flags.get("prompt"),
          expected="--field=value", hint="a prompt needs --sample=DIR")
    return flags

def flag_names(*roles: str) -> set[str]:
    """Return the names of all flags that have one of these roles: NUMERIC, INHERITED or SINGLE_RUN."""
    return {config_field.name for config_field in fields(Config) if config_field.metadata["role"] in roles}

def numeric_settings(cfg: Config) -> dict[str, str]:
    """Return {field: formatted value} of the settings that affect results. --resume may not change these settings."""
    # The location of a table does not affect results, not even their rounding. Format all locations as "device", so
    # that --resume may change the location.
    cfg = replace(cfg, tables=tuple(replace(table, location="device") for table in cfg.tables))
    return {name: format_value(getattr(cfg, name)) for name in flag_names(NUMERIC)}

def load_config(argv: list[str]) -> Config:
    """Parse and validate the command line into a Config."""
    flags = parse_args(argv)
    if "sample" in flags:
        allowed_flags = flag_names(INHERITED, SINGLE_RUN) - {"resume"} | {"seed"}
        check(flags.keys() <= allowed_flags, "--sample: incompatible flags", found=" ".join(argv),
              expected=f"no flags other than {', '.join(sorted(allowed_flags))}",
              hint="omit the others; the settings of the model are in the directory of --sample")
        return Config(**flags)
    if "resume" not in flags:
        return make_config(flags)

    # With --resume, numeric settings may be given again, but not changed.
    earlier_cfg = read_settings(Path(flags["resume"]))
    inherited = {name: getattr(earlier_cfg, name) for name in flag_names(NUMERIC, INHERITED)}
    cfg = make_config(inherited | flags)
    earlier_settings = numeric_settings(earlier_cfg)
    for name, text in numeric_settings(cfg).items():
        check(text == earlier_settings[name], f"--{name} with --resume", found=repr(text),
              expected=f"{earlier_settings[name]!r}, as in the resumed run",
              hint=f"omit --{name}; only these flags may change: {', '.join(sorted(flag_names(INHERITED)))}, and the "
                   "location of tables")
    return cfg


# ---- Ranks and devices
EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STORE_TIMEOUT_S = 2.0                    # timeout of the TCPStore in `agree_on_cause`
BUSY_CORES_WARN = 0.3                    # warn if other processes use more cores than this during set-up
ALL_RANKS_TIMEOUT_S = 1.0                # maximum wait in `agree_on_cause` until all ranks exit
EXIT_TIMEOUT_S = 5.0                     # the process exits after this time even if the exit handler hangs
LOST_CONNECTION_RE = r"(?i)connection (closed|reset|refused)|timed? ?out|broken pipe|socket|gloo|nccl"
POCKET_TOKEN_RE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")                       # same as in data/pocket.py
FALLBACK_SAVE_DIR = "save"               # in the run directory, for the weights if --save cannot be written
# Factor on --comm_timeout while ranks wait for another rank that compiles or writes files.
SLOW_TIMEOUT_FACTOR = 10

def call_with_timeout(seconds: float, call: Callable[[], Any]) -> Any:
    """Run `call` on a new thread, and return the result of `call` or raise the exception of `call`."""
    return ThreadPoolExecutor(1).submit(call).result(seconds)

def read_launch_env(cfg: Config) -> tuple[int, int, int, int]:
    """Read (rank, local rank, world size, local world size) from the environment variables that torchrun sets."""
    # Without these checks, a rank that lacks a variable would train separately from the others.
    env = os.environ
    defaults = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    launch_env = {name: env.get(name, value) for name, value in defaults.items()}
    rank, local_rank, world_size, local_world_size = (
        int(value) if value.isdecimal() else -1 for value in launch_env.values())
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 and name not in env]
    num_tasks = env.get("SLURM_NTASKS", "1")
    check(0 <= rank < world_size and local_rank >= 0 and not missing, "environment variables of the launch",
          found=f"{launch_env}, not set: {missing}",
          expected="the variables that torchrun sets, with 0 <= RANK < WORLD_SIZE",
          hint=f"run torchrun --standalone --nproc_per_node={max(world_size, 1)} train_gpt.py ...; or unset WORLD_SIZE "
               "to train in a single process")
    check("WORLD_SIZE" in env or num_tasks == "1", "environment variables of the launch",
          found=f"{num_tasks} Slurm tasks, and WORLD_SIZE is not set",
          expected="the variables that torchrun sets, so that the ranks can connect",
          hint="run srun ... torchrun ... with one task per node; or set WORLD_SIZE=1 to train separately in each task")
    valid_world_size = max(W for W in range(1, min(world_size, cfg.seqs_per_step) + 1) if cfg.seqs_per_step % W == 0)
    check(valid_world_size == world_size, "world size", found=f"{world_size} ranks",
          expected=f"a divisor of --seqs_per_step={cfg.seqs_per_step}",
          hint=f"torchrun --nproc_per_node={valid_world_size} train_gpt.py ...")
    return rank, local_rank, world_size, local_world_size

def init_distributed(cfg: Config) -> Communicator:
    """Select the device, initialize the process group as torchrun's environment says, and return a Communicator."""
    rank, local_rank, world_size, local_world_size = read_launch_env(cfg)
    # Select the device: one GPU per rank, or the CPU for all ranks.
    use_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    num_gpus = torch.cuda.device_count()
    check(use_cuda or cfg.device != "cuda", "--device=cuda", found="no CUDA device",
          expected="an NVIDIA GPU and a CUDA build of torch",
          hint="preset record needs one; --preset=pocket trains on a CPU in about two minutes")
    check(not use_cuda or max(local_rank + 1, local_world_size) <= num_gpus, "more ranks than GPUs",
          found=f"ranks: {local_world_size}, GPUs: {num_gpus}", expected="one GPU per rank on this machine",
          hint=f"torchrun --nproc_per_node={num_gpus} train_gpt.py ...")
    comm = Communicator(torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"), rank, world_size)
    comm.set_thread_device()
    # Keep freed memory in the process. By default, glibc returns freed memory to the system after each step, and every
    # page that the next step allocates costs a page fault.
    if not use_cuda and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)                                                  # M_TRIM_THRESHOLD in malloc.h: never trim
        libc.mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: 32 MiB, the largest value that every glibc accepts
    if world_size == 1:
        return comm

    # Use a thread with a timeout, because torch waits forever for a port that accepts connections but does not respond.
    def join() -> dist.ProcessGroup:
        timeout = timedelta(seconds=cfg.comm_timeout)
        comm.set_thread_device()
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timeout)
        return dist.new_group(backend="gloo", timeout=timeout)
    try:
        return replace(comm, loader_group=call_with_timeout(cfg.comm_timeout + 1, join))
    except (RuntimeError, ValueError, TimeoutError) as error:
        message = str(error)[:200] or "no response from a store of torch.distributed"
        raise ConfigError("waiting for all ranks",
                          found=f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {message}",
                          expected=f"{world_size} ranks within {cfg.comm_timeout} s",
                          hint="check that every rank has started, and check MASTER_ADDR and MASTER_PORT") from None

def describe_hardware(comm: Communicator) -> str:
    """Return the hardware as text for the log: GPU name and world size, or CPU name, cores and torch threads."""
    if comm.on_cuda:
        return f"{torch.cuda.get_device_name(comm.device)} x {comm.world_size}"
    name = platform.machine()
    with contextlib.suppress(OSError, TypeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"

def resolve_head_precision(cfg: Config, comm: Communicator) -> str:
    """Return the precision of the head's training matmuls on this device: "plain", "fp8" or "emulated"."""
    settings_fit_fp8 = cfg.dtype == "bfloat16" and cfg.model_dim % FP8_MULTIPLE == cfg.padded_vocab % FP8_MULTIPLE == 0
    supports_fp8 = settings_fit_fp8 and comm.on_cuda and torch.cuda.get_device_capability(comm.device) >= (8, 9)
    check(supports_fp8 or cfg.head != "fp8", "--head=fp8", found=f"{cfg.dtype} on {describe_hardware(comm)}",
          expected="bfloat16 on a GPU of compute capability 8.9 or later; model_dim and padded_vocab multiples of "
                   f"{FP8_MULTIPLE}",
          hint="--head=auto or --head=plain; or --head=emulated, for the same numbers on any device")
    if cfg.head == "auto":
        return "fp8" if supports_fp8 else "plain"
    return cfg.head


# ---- Choice of the attention kernel
# Kernels of torch's variable-length attention, keyed by the GPU's major compute capability. `choose_attention` tries
# them in this order. FA3 is written for 9.x, and has an official wheel. Two users measured FA4 on 9.x: FA4 was no
# faster than FA3. A maintainer of torch reports that FA4 is slower for variable lengths. FA3 and FA4 have not been
# timed with this trainer on a GPU yet.
ATTENTION_BY_CAPABILITY = {9: ("FA3", "FA4", "varlen"), 10: ("FA4", "varlen")}
ATTENTION_PACKAGES = {"FA4": "flash-attn-4", "FA3": "flash-attn-3", "varlen": "torch"}         # package of each kernel
# Inputs of `check_attention`. Documents end inside tiles of 128 tokens and inside windows. Some documents are empty,
# and one document has a single token.
CHECK_CU_SEQLENS = (0, 0, 150, 151, 420, 420, 700)
CHECK_WINDOWS = (2, 128, 300, 1000)      # the last window is longer than any document
CHECK_LOGIT_STD = 4.0                    # large enough that one key too many or too few changes the output
CHECK_TIMEOUT = 60.0                     # s for a kernel to return, after its compilation

def check_attention(cfg: Config, comm: Communicator, name: str) -> None:
    """Check that outputs and gradients of the active attention kernel match those of the reference, up to rounding."""
    dtype = getattr(torch, cfg.dtype)
    device = comm.device
    generator = torch.Generator(device).manual_seed(0)
    cu_seqlens = torch.tensor(CHECK_CU_SEQLENS, device=device, dtype=torch.int32)
    # Check the shapes of plain and of paired layers. Paired layers have twice the positions and half the heads.
    for window, (positions_per_token, num_heads) in itertools.product(CHECK_WINDOWS, ((1, 2), (2, 1))):
        num_positions = positions_per_token * CHECK_CU_SEQLENS[-1]
        q, k, v, grad = torch.randn(4, num_positions, num_heads, cfg.head_dim, device=device,
                                    generator=generator).to(dtype)
        if positions_per_token == 1:     # test a strided v, which is a slice of qkv in layers without value embeddings
            v = torch.cat((q, k, v), dim=1)[:, -num_heads:]
        attn_args = AttentionArgs(num_positions, window, CHECK_LOGIT_STD / cfg.head_dim**0.5)
        results = []
        for attend, compute_dtype in ((attention_varlen, dtype), (attention_reference, torch.float32)):
            qkv = [x.to(compute_dtype).detach().requires_grad_() for x in (q, k, v)]
            out = attend(*qkv, positions_per_token * cu_seqlens, attn_args)
            results.append((out.detach(), *torch.autograd.grad(out, qkv, grad.to(compute_dtype))))
        # A kernel that never returns blocks the device for this process. Raise RunError, because no other kernel can be
        # tried.
        check(happens_within(CHECK_TIMEOUT, comm.record_event()), f"attention kernel {name}, window {window}",
              found=f"no result after {CHECK_TIMEOUT} s", expected="a result within 1 s",
              hint=f"use another kernel: --attention={'reference' if name == 'varlen' else 'varlen'}", error=RunError)
        for actual, expected in zip(*results):
            atol = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
            torch.testing.assert_close(
                actual.float(), expected, rtol=0, atol=atol,
                msg=f"the output or a gradient is off by more than {atol:.1e}, window {window}, {num_heads} heads")

def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None if the package is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None

def choose_attention(cfg: Config, comm: Communicator) -> tuple[Callable, str]:
    """Choose the first attention kernel that matches the reference on all ranks. Collective."""
    if cfg.attention == "reference" or (cfg.attention == "auto" and not comm.on_cuda):
        return attention_reference, "reference"
    candidates = (cfg.attention,)
    if cfg.attention == "auto":
        major, _ = torch.cuda.get_device_capability(comm.device)
        candidates = ATTENTION_BY_CAPABILITY.get(major, ("varlen",))

    # All ranks must use the same kernel, because ranks with different kernels would not train the same model.
    for name in candidates:
        error_text = ""
        try:
            if name in ("FA4", "FA3"):
                torch.nn.attention.activate_flash_attention_impl(name)
            elif torch.nn.attention.current_flash_attention_impl():
                torch.nn.attention.restore_flash_attention_impl()
            check_attention(cfg, comm, name)
        except RunError:
            raise
        except Exception as error:       # external kernels may raise anything
            error_text = f"{type(error).__name__} {str(error)[:100]}"
        errors_by_rank = enumerate(comm.all_gather(error_text))
        first_error = next((f"{text} (rank {rank})" for rank, text in errors_by_rank if text), "")
        if not first_error:
            package = ATTENTION_PACKAGES[name]
            return attention_varlen, f"{name} ({package} {package_version(package)})"
        comm.print0(f"attention: {name} does not work: {first_error}; requirements-gpu.txt lists the packages")
    check(cfg.attention == "auto" and not cfg.preset.startswith("record"),
          f"--attention={cfg.attention} with preset {cfg.preset}", found=f"no kernel works: {first_error}",
          expected="a kernel that runs and matches the reference",
          hint="pip install -r requirements-gpu.txt; or --attention=reference, whose time and memory grow with the "
               "windows")
    comm.print0("warning: no fast attention kernel works; using the reference, whose time and memory grow with the "
                "windows")
    return attention_reference, "reference"

def slow_attention_warning(attention_name: str, comm: Communicator) -> str:
    """Return a warning if the chosen kernel is varlen although this GPU supports faster attention kernels, else ""."""
    if not attention_name.startswith("varlen"):
        return ""
    major, minor = torch.cuda.get_device_capability(comm.device)
    *faster, varlen = ATTENTION_BY_CAPABILITY.get(major, ("varlen",))
    if not faster:
        return ""
    return (f"attention kernel {varlen} is slower than {' or '.join(faster)}, which GPUs of compute capability "
            f"{major}.{minor} can run; requirements-gpu.txt lists the packages")


# ---- Memory, estimated before the model is built
USABLE_MEMORY = 0.9                      # fraction of the memory; the rest is for driver, NCCL, allocator and compiler
HOST_TABLES = "tables on the host"       # category of `estimate_memory`; a row is allocated when it is first updated
# Activations per token at the peak of a step, which is in the head. A layer saves SAVED_VECTORS vectors of D elements
# for backward, and its MLP saves MLP_SAVED hidden vectors of MLP_RATIO * D elements. The total was counted: 183 vectors
# of D elements in 11 layers, 16.6 per layer. This is rounded up to 17, to cover statistics in f32. Logits and their
# gradient take LOGIT_COPIES times the memory of the logits. tests/dry_run.py counts the saved vectors and the memory of
# the logits in compiled steps. The constants *_EAGER are for plain PyTorch.
SAVED_VECTORS = 13
SAVED_VECTORS_EAGER = 22
LOGIT_COPIES = 1.5                       # bf16 logits, and their fp8 gradient
LOGIT_COPIES_EAGER = 6                   # f32 or f64 logits, and their gradient

def estimate_memory(cfg: Config, comm: Communicator, attention: Callable, micro_batch_size: int) -> Counter[str]:
    """Estimate the peak memory of one rank, as {category: bytes}. attention: attention function of the run."""
    W = comm.world_size
    dtype = getattr(torch, cfg.dtype)
    item_bytes = dtype.itemsize
    accum_bytes = accum_dtype(dtype).itemsize
    largest_batch = max(stage.batch_tokens for stage in cfg.stages)
    estimate: Counter[str] = Counter()
    for spec in parameter_specs(cfg):
        table = spec.table
        num_elements = math.prod(spec.shape)              # with a gradient on this rank; adjusted for tables below
        grad_bytes = accum_bytes                          # bytes of gradients per element
        if table:
            # A table takes memory for its shard, and for a row cache with the maximum number of rows in an update
            # cycle. A row-wise table also takes device memory for copies of the rows that an update changes: the rows
            # of one update, or of two updates if the table is in host memory. The optimizer state of these copies, 8
            # bytes per row, is not counted. lookup_elements is the number of elements that all ranks look up in an
            # update cycle. This bounds the copies on one rank, because one shard may contain all of these rows.
            shard_elements = num_elements // W
            lookup_elements = table.update_every * largest_batch * table.lookups_per_token * cfg.model_dim
            cache_elements = num_elements
            if table.rowwise or cfg.row_comms == "sparse":
                cache_elements = min(num_elements, lookup_elements // W)
            if table.rowwise:
                category = HOST_TABLES if table.location == "host" or not comm.on_cuda else "weights"
                estimate[category] += shard_elements * item_bytes
                num_updates = 2 if table.location == "host" else 1            # updates whose rows are on the device
                estimate["weights"] += min(shard_elements, lookup_elements) * item_bytes * num_updates
                num_elements = cache_elements
            elif W > 1:
                num_elements = shard_elements + cache_elements
        elif spec.optimizer == "normuon" and micro_batch_size * W >= cfg.seqs_per_step:
            # With one micro-batch, main_grad has the dtype of the weights, and is reduced without a copy.
            grad_bytes = item_bytes
        elif W > 1 and accum_bytes > item_bytes:
            grad_bytes += item_bytes                      # the reduce-scatter sends a copy in the dtype of the weights
        estimate["weights"] += num_elements * item_bytes
        estimate["gradients"] += num_elements * grad_bytes
        if spec.optimizer != "rowwise":
            state = init_optimizer_state(spec, torch.empty(spec.shape, dtype=dtype, device="meta"))
            owners = W if spec.table or spec.matrices else 1            # number of ranks that split the moments
            estimate["moments"] += sum(x.nbytes for x in state.values()) // owners

    # Estimate the activations of a step with the largest batch. Evaluation takes less memory, because it computes the
    # logits in chunks. Row-wise updates take less memory, too, unless a micro-batch is a small part of a step: the
    # temporaries of an update grow with the tokens of the whole step.
    eager = attention is not attention_varlen
    saved_vectors = MLP_SAVED * MLP_RATIO + (SAVED_VECTORS_EAGER if eager else SAVED_VECTORS)
    logit_bytes = LOGIT_COPIES_EAGER * accum_bytes if eager else LOGIT_COPIES * item_bytes
    bytes_per_layer = saved_vectors * cfg.model_dim * item_bytes
    bytes_per_token = len(LAYERS) * bytes_per_layer + int(cfg.padded_vocab * logit_bytes)
    estimate["working"] = micro_batch_size * largest_batch * bytes_per_token // cfg.seqs_per_step
    return estimate

def choose_micro_batch_size(cfg: Config, comm: Communicator, attention: Callable) -> tuple[int, Counter[str]]:
    """Choose the largest micro-batch size whose estimated memory fits on every rank. Collective."""
    local_seqs = cfg.seqs_per_step // comm.world_size
    # Use the total memory rather than the free memory, so that other processes on the device do not affect the choice.
    # mem_get_info returns (free bytes, total bytes).
    total_bytes = (torch.cuda.mem_get_info(comm.device)[1] if comm.on_cuda
                   else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    available_bytes = USABLE_MEMORY * min(comm.all_gather(total_bytes))
    sizes = [size for size in range(local_seqs, 0, -1) if local_seqs % size == 0]
    if cfg.micro_batch_size:
        sizes = [min(cfg.micro_batch_size, local_seqs)]
    # Try large sizes first: larger matmuls and fewer runs of the graphs make steps faster.
    for micro_batch_size in sizes:
        estimate = estimate_memory(cfg, comm, attention, micro_batch_size)
        if estimate.total() - estimate[HOST_TABLES] <= available_bytes:
            return micro_batch_size, estimate
    components = ", ".join(f"{category} {num_bytes / 2**30:.1f} GiB" for category, num_bytes in estimate.items())
    raise RunError("memory", found=f"estimated: {components}", expected=f"at most {available_bytes / 2**30:.1f} GiB",
                   hint="use more ranks, a larger device, more and shorter sequences (--seqs_per_step=32), "
                        "--micro_batch_size=1, smaller batches in --stages, fewer rows in --tables or location host "
                        "there, or a smaller model")


# ---- Warm-up, header, checks, result
def warm_up(cfg: Config, comm: Communicator, engine: Engine, log: Log) -> None:
    """Compile and run every graph of the training loop on synthetic tokens, then restore the engine. Collective."""
    restore = engine.snapshot()
    # Use a longer timeout, because a rank may compile for minutes while the other ranks wait.
    cfg = replace(cfg, epochs=0, time_budget=0, val_tokens=cfg.val_batch_tokens,
                  comm_timeout=SLOW_TIMEOUT_FACTOR * cfg.comm_timeout)
    # Generate enough tokens for a cycle of any stage, although truncation to max_doc_len drops some of the tokens.
    max_tokens = cfg.val_batch_tokens + max(stage.batch_tokens for stage in cfg.stages)
    num_tokens = 4 * max_tokens * (1 + 2 * SYNTHETIC_DOC_LEN // cfg.max_doc_len)
    headers = [ShardHeader(WARM_UP_SHARD, num_tokens, cfg.vocab_size, cfg.bos_id)]
    validation = ValidationSet(cfg, comm, headers, purpose="warm-up")
    schedule = Schedule(cfg)
    step_cfgs = [schedule.at(step) for step in schedule.warm_up_steps()]
    cycles = [step_cfgs[first:first + schedule.cycle_steps] for first in range(0, len(step_cfgs), schedule.cycle_steps)]

    # Log each cycle as a phase, so that the console shows progress while graphs compile slowly.
    loader = Loader(cfg, comm, headers, purpose="warm-up")
    loader.start(cycles[0])
    for number, (cycle, next_cycle) in enumerate(zip(cycles, [*cycles[1:], []]), 1):
        loader.advance(next_cycle)
        with log.phase(f"warm-up of stage {cycle[-1].stage + 1} ({number} of {len(cycles)})"):
            for step_cfg in cycle:
                train_step(engine, loader, step_cfg)
    with log.phase("warm-up of validation"):
        # Validate with every stage and with the final validation, because their attention windows differ.
        last_of_stage = {step_cfg.stage: step_cfg for step_cfg in step_cfgs}
        for step_cfg in (*last_of_stage.values(), schedule.at(schedule.end_step)):
            engine.evaluate(validation.batches(step_cfg), step_cfg)
    loader.close()
    restore()

def other_cpu_seconds(comm: Communicator) -> float:
    """Return the CPU time, in s, that processes other than the ranks have used since boot. Collective."""
    used_s = 0.0
    with contextlib.suppress(OSError):
        ticks = Path("/proc/stat").read_text().split()[1:4]                   # user, nice, system
        used_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return used_s - sum(comm.all_gather(time.process_time()))

def write_header(log: Log, info: RunInfo, engine: Engine) -> None:
    """Write the header of a log: settings, versions, hardware and model sizes."""
    # Collect what is needed to reproduce the run: flags, config and git commit.
    cfg = log.schedule.cfg
    comm = log.comm
    preset_flags = vars(make_config(dict(preset=cfg.preset)))
    flags = vars(replace(info.raw_cfg, seed=cfg.seed, run_dir=""))
    changed = {name: format_value(value) for name, value in flags.items()
               if value != preset_flags[name]}
    config = {name: [vars(spec) for spec in value] if isinstance(value, tuple) else value
              for name, value in vars(cfg).items()}
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True,
                                text=True, timeout=10, check=True).stdout.strip()

    # params_per_token counts the parameters that one token uses: the table rows that it looks up, and all parameters
    # that are not tables.
    tables = table_specs(cfg)
    table_rows = {table.label: table.num_rows for table in tables}
    params_total = sum(math.prod(spec.shape) for spec in parameter_specs(cfg))
    unused_rows = sum(table.num_rows - table.lookups_per_token for table in tables)
    header = dict(
        preset=cfg.preset, started=time.strftime("%Y-%m-%dT%H:%M:%S"), changed=changed, config=config, seed=cfg.seed,
        python=platform.python_version(), torch=torch.__version__, triton=package_version("triton"),
        cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if comm.on_cuda else None,
        git_commit=commit, source_sha256=info.fingerprint["source_sha256"], data_sha256=info.fingerprint["data_sha256"],
        hardware=describe_hardware(comm), world_size=comm.world_size, attention=info.attention_name,
        head=engine.head_precision,
        grad_accum_steps=-(-cfg.seqs_per_step // comm.world_size // engine.micro_batch_size),
        untimed_warmup_steps=len(Schedule(replace(cfg, time_budget=0.0)).warm_up_steps()), target_loss=cfg.target_loss,
        params_total=params_total, params_per_token=params_total - cfg.model_dim * unused_rows, table_rows=table_rows,
        table_bytes=sum(table_rows.values()) * cfg.model_dim * getattr(torch, cfg.dtype).itemsize)
    log.event("resumed" if info.resumed else "header", **header, **info.resumed)
    changes = ", ".join(f"{name}={value}" for name, value in changed.items())
    for line in (
            "=" * 100,
            f"Running Python {header['python']}",
            f"Running PyTorch {header['torch']} compiled for CUDA {header['cuda'] or 'none'} on {header['hardware']} "
            f"with world_size {comm.world_size}",
            f"preset {cfg.preset}, {params_total:,} parameters in {cfg.dtype}, attention kernel {info.attention_name}, "
            f"head precision {engine.head_precision}, seed {cfg.seed}",
            f"flags that differ from the preset: {changes or 'none'}",
            "=" * 100,
            f"logs in {log.run_dir}",
            slow_attention_warning(info.attention_name, comm)):
        if line:
            log.info(line)
    if info.resumed:
        log.info(f"resuming {info.resumed['source']} after step {log.steps_done}; the lines above are from its log")
        for name, (before, now) in info.resumed["differs"].items():
            log.info(f"warning: {name} differs from the earlier run: {before} then, {now} now")

def open_log(run_dir: Path, info: RunInfo, schedule: Schedule, engine: Engine,
             resumed: dict[str, Any] = EMPTY_LOG_STATE) -> Log:
    """Open the log of one run in `run_dir`, and write the log header, the source of the trainer and the settings."""
    settings = replace(info.raw_cfg, seed=schedule.cfg.seed, micro_batch_size=engine.micro_batch_size)
    files = {Path(__file__).name: info.source, SETTINGS_FILE: settings_json(settings)}
    log = Log(run_dir, engine.comm, schedule, files, resumed)
    write_header(log, info, engine)
    return log

def check_enough_data(cfg: Config, schedule: Schedule, train_headers: list[ShardHeader],
                      val_headers: list[ShardHeader]) -> None:
    """Check, before the model is built, that the shards have enough tokens to train and to validate."""
    # In the first epoch, all sequences of a step are packed from one shard. A sequence of T inputs has T + 1 tokens,
    # because the last token is only a target.
    num_steps = min(cfg.max_steps or schedule.planned_steps, schedule.planned_steps)
    used_stages = [stage for stage, start in zip(cfg.stages, schedule.stage_starts) if start < num_steps]
    max_step_tokens = max(stage.batch_tokens for stage in used_stages) + cfg.seqs_per_step
    max_shard_tokens = max(header.num_tokens for header in train_headers)
    batch_multiple = SEQ_MULTIPLE * cfg.seqs_per_step
    suggested_batch_tokens = max(0, max_shard_tokens - cfg.seqs_per_step) // batch_multiple * batch_multiple
    check(max_step_tokens <= max_shard_tokens, "training shards are too small",
          found=f"at most {max_shard_tokens:,} tokens in a shard",
          expected=f"{max_step_tokens:,} tokens in one shard, enough for the sequences of one step",
          hint="use larger shards" + (f"; or lower batch_tokens in --stages to at most {suggested_batch_tokens}"
                                      if suggested_batch_tokens else ""),
          error=DataError)
    usable_tokens = sum(usable_val_tokens(header.num_tokens, cfg.val_batch_tokens) for header in val_headers)
    suggested_val_tokens = usable_tokens or max(usable_val_tokens(header.num_tokens, batch_multiple)
                                                for header in val_headers)
    check(usable_tokens >= cfg.val_tokens, "too few validation tokens",
          found=f"{usable_tokens:,} tokens in whole batches of {cfg.val_batch_tokens:,}, from {cfg.val_files!r}",
          expected=f"{cfg.val_tokens:,} tokens (--val_tokens)",
          hint=f"add validation text, in shards of at least {batch_multiple + 2} tokens" + (
              f"; or use all that this text allows, --val_tokens={suggested_val_tokens} "
              f"--val_batch_tokens={min(suggested_val_tokens, cfg.val_batch_tokens)}" if suggested_val_tokens else ""),
          error=DataError)

def count_packed_tokens(cfg: Config, schedule: Schedule, headers: list[ShardHeader]) -> tuple[int, int]:
    """Return (tokens read in the first epoch, tokens read in later epochs), summed over all steps of the schedule."""
    packer = Packer(cfg, headers, functools.partial(map, load_shard))
    counts = [0, 0]
    for step_cfg in map(schedule.at, range(schedule.end_step)):
        packer.next(step_cfg)
        # A sequence has T + 1 tokens. In later epochs, its last token is also the first token of the next sequence, so
        # count only T of them.
        counts[packer.epoch > 0] += (step_cfg.seq_len + (packer.epoch == 0)) * cfg.seqs_per_step
    return counts[0], counts[1]

def open_data(raw_cfg: Config, comm: Communicator,
              source: bytes) -> tuple[Config, list[ShardHeader], list[ShardHeader], dict[str, str]]:
    """Validate all data shards, and fill in the config sizes that depend on the shard headers. Collective."""
    train_headers = read_shard_headers(raw_cfg.train_files)
    val_headers = read_shard_headers(raw_cfg.val_files)
    versions = dict(data_sha256=verify_shards(train_headers + val_headers), torch=str(torch.__version__),
                    source_sha256=hashlib.sha256(source).hexdigest())
    comm.check_agreement({f"--{name}": format_value(value) for name, value in vars(raw_cfg).items()} | versions)
    cfg = resolve_sizes(raw_cfg, train_headers, val_headers)
    schedule = Schedule(cfg)
    check_enough_data(cfg, schedule, train_headers, val_headers)
    if not cfg.time_budget:                               # with a time budget, the number of steps is not known
        first_epoch, later_epochs = count_packed_tokens(cfg, schedule, train_headers)
        total = sum(header.num_tokens for header in train_headers)
        # Later epochs read the data from its start, without gaps.
        comm.print0(f"the run reads {first_epoch / total:.1%} of the {total:,} training tokens in the first epoch"
                    + f"; later epochs read all of them {later_epochs / total:.2f} times" * bool(later_epochs))
    # Resolve symbolic links, because two paths may refer to the same file.
    val_paths = {os.path.realpath(header.name) for header in val_headers}
    in_both = val_paths.intersection(os.path.realpath(header.name) for header in train_headers)
    if in_both:
        comm.print0(f"warning: training and validation shards overlap, at least in {min(in_both)}; the validation loss "
                    "does not measure generalization")
    return cfg, train_headers, val_headers, numeric_settings(raw_cfg) | versions

def check_compilers(cfg: Config, comm: Communicator) -> None:
    """Raise ConfigError unless torch.compile and Triton find the compilers and headers that they need."""
    # If CXX is set, torch tries no other compiler.
    compilers = os.environ.get("CXX", f"g++ {os.environ.get('CC', 'gcc')} clang").split()
    check(not comm.compiles(cfg) or any(map(shutil.which, compilers)), "--compile", found="no C++ compiler",
          expected="g++, or another compiler that torch.compile finds", hint="apt install g++; or --compile=0")
    if not comm.on_cuda:
        return

    # Triton compiles a Python extension module in C. Eager code uses Triton kernels, too.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    check(any(map(shutil.which, compilers)), "compiling kernels for the GPU",
          found=f"no C compiler: {' or '.join(compilers)}", expected="gcc, clang, or the compiler that CC names",
          hint="apt install gcc")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")        # as in Triton, for Debian
    include_dir = sysconfig.get_paths(scheme)["include"]
    search_path = os.pathsep.join([include_dir, os.environ.get("CPATH", ""), os.environ.get("C_INCLUDE_PATH", "")])
    check(any(Path(folder, "Python.h").is_file() for folder in search_path.split(os.pathsep) if folder),
          "compiling kernels for the GPU", found=f"no Python.h in {include_dir}",
          expected="the C headers of this Python",
          hint="apt install python3-dev, or python3.12-dev for Python 3.12; or use a Python that includes its headers")

def preflight(cfg: Config, run_id: str, run_dirs: list[Path], comm: Communicator) -> None:
    """Check the run directories, --save and the compilers before the run starts. Collective."""
    with comm.raise_together():
        check_compilers(cfg, comm)
        if comm.rank > 0:
            return

        for run_dir in run_dirs:
            check(not any(os.path.lexists(run_dir / name) for name in LOG_FILES), f"run directory {run_dir}",
                  found="it already contains a log", expected="a directory without a log",
                  hint="choose another --run_dir, or delete the files of the earlier run", error=RunError)
        check(not cfg.save or not os.path.lexists(cfg.save), f"--save={cfg.save}", found="the path already exists",
              expected="a path that does not exist", hint="choose another name; nothing is overwritten")
        # Create and remove a directory, to check that --save and the cache of torch.compile can be written. Importing
        # torch._dynamo fails if the cache cannot be written, also with --compile=0.
        cache_dir = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        for name, path in (("--save", cfg.save), ("TORCHINDUCTOR_CACHE_DIR", cache_dir and f"{cache_dir}/test")):
            if path:
                with write_errors(Path(path), ConfigError, source=f"{name}: "):
                    partial_path(Path(path), run_id).mkdir(parents=True)
                    partial_path(Path(path), run_id).rmdir()

def check_resume(cfg: Config, checkpoint: dict[str, Any], fingerprint: dict[str, str],
                 end_step: float) -> dict[str, Any]:
    """Check that this run can continue from a checkpoint, and return facts about the earlier run for the log."""
    previous = checkpoint["fingerprint"]
    check(previous["data_sha256"] == fingerprint["data_sha256"], f"data with --resume={cfg.resume}",
          found=f"shards with sha256 {fingerprint['data_sha256'][:16]}...",
          expected=f"the shards of the earlier run, with sha256 {previous['data_sha256'][:16]}...",
          hint="omit --train_files and --val_files, or give other paths of the same shards", error=DataError)
    steps_done = checkpoint["log"]["steps_done"]
    check(steps_done <= end_step, f"--max_steps with --resume={cfg.resume}",
          found=f"{cfg.max_steps}: the run would end at step {end_step}",
          expected=f"{steps_done} or more, because the checkpoint is at step {steps_done}",
          hint="--max_steps=0 runs the whole schedule")
    differs = {name: (previous.get(name), fingerprint.get(name)) for name in previous | fingerprint
               if previous.get(name) != fingerprint.get(name)}
    return dict(step=steps_done, source=cfg.resume, differs=differs)

def finish_run(log: Log, info: RunInfo, engine: Engine, validation: ValidationSet, train_time_ms: float, loss: float,
               num_graphs: int) -> tuple[dict[str, Any], RunError | None]:
    """Log the result of a run, save the weights if --save is given, and close the log. Collective."""
    cfg = log.schedule.cfg
    comm = log.comm
    if comm.on_cuda:                     # peak in MiB since the start of the training loop
        peak = dict(allocated=torch.cuda.max_memory_allocated() >> 20, reserved=torch.cuda.max_memory_reserved() >> 20)
    else:                                # peak in MiB of the whole process; ru_maxrss is in KiB, on macOS in bytes
        peak = dict(consumption=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    >> (20 if sys.platform == "darwin" else 10))
    result = dict(val_loss=loss, train_time_ms=round(train_time_ms, 3), steps=log.steps_done, tokens=log.tokens,
                  peak_memory_mib=peak, run_dir=str(log.run_dir), **validation.text_metrics(loss))
    if validation.bytes_per_token:
        log.info(f"validation loss {loss:.4f} nats per token = {result['val_bpb']:.4f} bits per byte; this is "
                 f"{loss / validation.unigram_nats:.4f} of the unigram entropy, {validation.unigram_nats:.4f} nats")

    # Log what makes the training time misleading: recompiles, slow attention, profiling, missing data, a missed budget.
    recompiled = sum(comm.all_gather(torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_graphs))
    ended_early = "the data ended early or changed" * (log.steps_done < log.schedule.end_step)
    void = "profiled" if cfg.profile else ended_early
    # If the machine has a constant speed, a run ends within one cycle of its time budget.
    late_s = train_time_ms / 1000 - cfg.time_budget
    cycle_s = train_time_ms / 1000 / max(log.steps_done, 1) * log.schedule.cycle_steps
    for applies, text in (
            (recompiled, f"graphs compiled after the warm-up: {recompiled}; TORCH_LOGS=recompiles shows why"),
            (void, f"the training time is not valid: {void}"),
            (cfg.time_budget and late_s > max(0.01 * cfg.time_budget, cycle_s),
             f"--time_budget={cfg.time_budget:g} was missed by {late_s:.2f} s; possible causes: other processes used "
             "the machine, or the budget is not much longer than a cycle of steps")):
        if applies:
            log.info(f"warning: {text}")
    log.info(f"training time {train_time_ms / 1000:.2f} s, {log.steps_done} steps, {log.tokens:,} tokens")
    log.info("peak memory " + " ".join(f"{name}: {mib} MiB" for name, mib in peak.items()))
    touched_rows = {label: sum(comm.all_gather(sum(map(len, table.store.touched_rows()))))
                    for label, table in engine.tables.items() if table.store}
    optional = dict(recompiles=recompiled, slow_attention=slow_attention_warning(info.attention_name, comm), void=void,
                    budget_s=cfg.time_budget, comms=engine.traffic_totals(), touched_rows=touched_rows)
    result |= {name: value for name, value in optional.items() if value}      # omit 0, "" and {}

    # If --save cannot be written, write the weights to the run directory instead.
    save_error: RunError | None = None
    if cfg.save:
        outcome = "not saved"
        for directory in (Path(cfg.save), log.run_dir / FALLBACK_SAVE_DIR):
            try:
                save_weights(directory, info.run_id, cfg, engine, log.schedule.at(log.steps_done),
                             validation.token_bytes)
                outcome = f"saved in {directory}"
                break
            except RunError as error:
                save_error = save_error or error
        log.info(f"weights {outcome}")
    log.event("result", **result)
    log.close()
    return result, save_error

def report_results(log: Log, engine: Engine, validation: ValidationSet, results: list[dict[str, Any]]) -> None:
    """Print a sample, then the mean loss and mean training time of all runs as JSON on the last line. Collective."""
    cfg = log.schedule.cfg
    if cfg.sample_tokens:
        sample = generate(cfg, engine, log.schedule.at(log.steps_done), validation.token_bytes)
        engine.comm.print0(f"{' sample ':-^100}\n{sample}\n{'-' * 100}")
    loss, train_time_ms = np.mean([(result["val_loss"], result["train_time_ms"]) for result in results],
                                  axis=0).tolist()
    summary = dict(type="result", val_loss=loss, train_time_ms=train_time_ms,
                   run_dirs=[result["run_dir"] for result in results])
    if engine.comm.rank == 0:
        print_stdout(json.dumps(summary))

def make_profiler(cfg: Config, first_step: int, end_step: float) -> torch.profiler.profile | None:
    """Build the profiler of --profile=a:b, which traces steps a to b - 1. Returns None without --profile."""
    if not cfg.profile:
        return None
    start, stop = map(int, cfg.profile.split(":"))
    limit = "" if end_step == math.inf else f" < {end_step}"
    check(first_step < start and stop < end_step, f"--profile={cfg.profile}",
          found=f"a run of steps {first_step} <= step{limit}",
          expected=f"{first_step} < a < b{limit}: step a - 1 warms up the profiler, and step b ends the trace",
          hint=f"--profile={first_step + 1}:{first_step + 3}")
    profile_schedule = torch.profiler.schedule(skip_first=start - first_step - 1, wait=0, warmup=1,
                                               active=stop - start, repeat=1)
    return torch.profiler.profile(schedule=profile_schedule)


# ---- How a run ends
def describe_exit(error: BaseException | signal.Signals) -> tuple[int, str]:
    """Return (exit status, message) for the error or signal that ended the run."""
    if isinstance(error, signal.Signals):
        return 128 + error, "interrupted" if error == signal.SIGINT else f"terminated by {error.name}"
    first_line = str(error).partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first_line:
        error = RunError("out of memory", found=first_line, expected="a micro-batch that fits",
                         hint="--micro_batch_size=1, or a larger --seqs_per_step, which shortens the sequences")
    elif isinstance(error, OSError):
        expected, hint = IO_REMEDIES.get(error.errno, ("a readable and writable file", "check the path and the disk"))
        error = DataError(str(error.filename or "input or output"), found=error.strerror or error, expected=expected,
                          hint=hint)
    elif isinstance(error, RuntimeError) and dist.is_initialized() and re.search(LOST_CONNECTION_RE, first_line):
        error = lost_rank_error(first_line)
    if isinstance(error, TrainerError):
        return error.exit_status, f"{type(error).__name__}: {error}"
    return 1, "".join(traceback.format_exception(error))

def agree_on_cause(cause: str, partial_exit_cause: str) -> tuple[str, bool]:
    """Agree with the other ranks on the cause of the exit that all ranks report."""
    # The store outlives a restart by torchrun, so the keys contain the number of restarts.
    env = os.environ
    restart = f"restart {env.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=STORE_TIMEOUT_S))
    store.add(f"ended ranks, {restart}", 1)

    def all_ended() -> bool:
        """Wait up to ALL_RANKS_TIMEOUT_S seconds for every rank to call agree_on_cause, and return whether all have."""
        deadline = time.monotonic() + ALL_RANKS_TIMEOUT_S
        # add(key, 0) returns the value of the key.
        while store.add(f"ended ranks, {restart}", 0) < int(env["WORLD_SIZE"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    if cause != partial_exit_cause and not all_ended():
        cause = partial_exit_cause
    # Store this cause unless another rank has stored one. Prefix the rank, so that no two ranks store the same text.
    my_cause = f"{env['RANK']}\n{cause}"
    first_cause = store.compare_set(f"first cause, {restart}", "", my_cause).decode()
    # If rank 0 hosts the store, and not torchrun, the store ends with the process of rank 0. Wait for the other ranks.
    if env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        all_ended()
    return first_cause.partition("\n")[2], first_cause == my_cause

def describe_progress(log: Log) -> str:
    """Return a message with the steps done, and the command that resumes the run from its last checkpoint."""
    # If a resumed run has no checkpoint yet, use the last one of the earlier run.
    last_checkpoints = [path for run_dir in filter(None, (str(log.run_dir), log.schedule.cfg.resume))
                        for path in sorted(Path(run_dir, CHECKPOINT_DIR).glob("step-???????"))[-1:]]
    if not last_checkpoints:
        steps = log.schedule.cfg.checkpoint_every or 100
        return (f"after step {log.steps_done} of {log.total_steps}, without a checkpoint to continue from; "
                f"--checkpoint_every={steps} writes one every {steps} steps")
    # A checkpoint is at <run directory>/checkpoints/step-0000000, so parents[1] is the run directory. run.sh changes to
    # the directory of this file, so print the path relative to the directory of this file.
    resume = os.path.relpath(last_checkpoints[0].parents[1], Path(__file__).parent)
    return (f"after step {log.steps_done} of {log.total_steps}; last checkpoint: {last_checkpoints[0].name}; "
            f"to continue: ./run.sh --resume={shlex.quote(resume).translate(ESCAPED_CONTROLS)}")

class ExitHandler:
    """Handler that ends this process within EXIT_TIMEOUT_S of the first error or signal."""
    def __init__(self):
        self.log: Log | None = None                                           # log of the current run
        self.exiting = threading.Lock()  # held by the thread that ends the process
        self.wakeup_send, self.wakeup_recv = socket.socketpair()
        self.wakeup_send.setblocking(False)               # required by set_wakeup_fd
        signal.set_wakeup_fd(self.wakeup_send.fileno(), warn_on_full_buffer=False)
        for signum in EXIT_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:                    # keep SIG_IGN, for example under nohup
                signal.signal(signum, lambda *_: None)                        # the background thread handles the signal
        # For every signal, Python writes one byte to wakeup_send: the signal number.
        threading.Thread(target=lambda: self.end(signal.Signals(self.wakeup_recv.recv(1)[0])), daemon=True).start()

    def end(self, error: BaseException | signal.Signals) -> None:
        """End the process with the exit status that `describe_exit` returns for `error`. Does not return."""
        self.exiting.acquire()           # a second call waits here until the process has ended
        exit_status, cause = describe_exit(error)
        # Exit after EXIT_TIMEOUT_S even if the code below hangs, for example on a dead disk.
        threading.Timer(EXIT_TIMEOUT_S, os._exit, [exit_status]).start()
        prints = True
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # If a signal reaches only some ranks, another rank was lost, and torchrun or srun is ending the remaining
            # ranks. Then report the lost rank instead of the signal.
            partial_exit_cause = f"RunError: {lost_rank_error(cause)}" if isinstance(error, signal.Signals) else cause
            try:
                cause, prints = call_with_timeout(STORE_TIMEOUT_S + 2 * ALL_RANKS_TIMEOUT_S, functools.partial(
                    agree_on_cause, cause, partial_exit_cause))
            except Exception:                                                 # a stopped torchrun does not respond
                cause = partial_exit_cause
        if prints:
            with contextlib.suppress(Exception):                              # stderr may be closed, or a full pipe
                message = ("\r\x1b[K" if self.log and self.log.is_tty else "") + cause.translate(ESCAPED_CONTROLS)
                call_with_timeout(1, functools.partial(print, message, file=sys.stderr, flush=True))
                if self.log and isinstance(error, signal.Signals):            # may hang on a dead disk, so it is last
                    call_with_timeout(1, lambda: print(describe_progress(self.log), file=sys.stderr, flush=True))
        if self.log is not None:
            self.log.write_aborted(cause)
        for path in tuple(PARTIAL_DIRS):
            shutil.rmtree(path, ignore_errors=True)
        os._exit(exit_status)


# ---- A run
def train(raw_cfg: Config, comm: Communicator, exit_handler: ExitHandler, source: bytes) -> None:
    """Run the trainer from set-up to result: load data, build the model, warm up, train once per seed. Collective."""
    # Fail fast: `preflight` checks what would otherwise fail hours into the run.
    start = time.perf_counter()
    other_cpu_before = other_cpu_seconds(comm)
    # All ranks use the run id and the run directory of rank 0. The default name of the directory contains the time, and
    # the clocks of ranks may differ.
    run_id = comm.all_gather(os.urandom(4).hex())[0]
    default_dir = f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{raw_cfg.preset}-{run_id}"
    root = Path(comm.all_gather(raw_cfg.run_dir or default_dir)[0])
    seeds = range(raw_cfg.seed, raw_cfg.seed + raw_cfg.runs)
    run_dirs = [root / f"seed_{seed}" if raw_cfg.runs > 1 else root for seed in seeds]
    preflight(raw_cfg, run_id, run_dirs, comm)

    # Open the data before building the model, because the shard headers determine the sizes of the model.
    cfg, train_headers, val_headers, fingerprint = open_data(raw_cfg, comm, source)
    head_precision = resolve_head_precision(cfg, comm)

    # Choose attention before the micro-batch size, because the kernel determines the memory per sequence. Use a longer
    # timeout, because attention packages may compile kernels now, and some ranks may take longer than others.
    comm.set_timeout(cfg.comm_timeout * SLOW_TIMEOUT_FACTOR)
    attention, attention_name = choose_attention(cfg, comm)
    micro_batch_size, estimate = choose_micro_batch_size(cfg, comm, attention)
    engine = Engine(cfg, comm, attention, head_precision, micro_batch_size)

    # With --resume, restore the state, log, clock and schedule progress from the last checkpoint.
    new_run = dict(log=EMPTY_LOG_STATE, cycle_progress=(), train_time_ms=0.0)
    checkpoint = load_checkpoint(Path(cfg.resume), engine) if cfg.resume else new_run
    schedule = Schedule(cfg, checkpoint["cycle_progress"])
    resume_facts = check_resume(cfg, checkpoint, fingerprint, schedule.end_step) if cfg.resume else {}
    first_step = checkpoint["log"]["steps_done"]
    profiler = make_profiler(cfg, first_step, schedule.end_step)

    # Log set-up and warm-up in the log of the first run.
    info = RunInfo(run_id, source, raw_cfg, attention_name, fingerprint, resume_facts)
    setup_s = time.perf_counter() - start
    busy_cores = (other_cpu_seconds(comm) - other_cpu_before) / setup_s
    log = exit_handler.log = open_log(run_dirs[0], info, schedule, engine, checkpoint["log"])
    if busy_cores > BUSY_CORES_WARN:
        log.info(f"warning: other processes use {busy_cores:.1f} of {os.cpu_count()} cores; the training time will be "
                 "unreliable")
    log.info("estimated memory: " + ", ".join(f"{category} {num_bytes / 2**20:,.0f} MiB"
                                              for category, num_bytes in estimate.items()))
    log.event("phase", name="set-up", ms=round(1000 * setup_s, 3), timed=False)

    # Compile and run every graph before the clock starts, then restore the state bitwise.
    with log.phase("validation data"):
        validation = ValidationSet(cfg, comm, val_headers)
    with log.phase("warm-up"):
        warm_up(cfg, comm, engine, log)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if engine.compiling:
        log.event("compiled", graphs=num_graphs)
    # From here on, a rank counts as lost if it does not respond within --comm_timeout. Keep the longer timeout if the
    # run writes checkpoints or weights, because all ranks wait for the slowest disk. Keep it also for a single rank,
    # which waits only for its device, because the device may be slow.
    if not cfg.checkpoint_every and not cfg.save and comm.world_size > 1:
        comm.set_timeout(cfg.comm_timeout)

    restore = engine.snapshot() if cfg.runs > 1 else None
    results: list[dict[str, Any]] = []
    first_error: TrainerError | None = None
    for seed, run_dir in zip(seeds, run_dirs):
        # Every run after the first restores the state before training, and starts from the initial weights of its seed.
        if results:
            cfg = replace(cfg, seed=seed)
            schedule = Schedule(cfg)
            log = exit_handler.log = open_log(run_dir, info, schedule, engine)
            with log.phase("reset"):
                restore()
                engine.reseed(seed)

        clock = Clock(comm, checkpoint["train_time_ms"])
        loader = Loader(cfg, comm, train_headers)
        # A resumed run has already trained on the first steps.
        for step in range(first_step):
            loader.packer.next(schedule.at(step))

        # During training, exclude the many Python objects of model and graphs from garbage collection.
        gc.collect()
        gc.freeze()
        if comm.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with profiler or contextlib.nullcontext():
            loss, out_of_data = train_loop(info, loader, engine, validation, clock, log, profiler)
        gc.unfreeze()
        loader.close()
        if profiler and profiler.profiler:                # None if the data ended before the traced steps
            trace_path = run_dir / f"trace_rank{comm.rank}.json.gz"
            with write_errors(trace_path):
                profiler.export_chrome_trace(str(trace_path))
            log.info(profiler.key_averages().table(f"self_{comm.device.type}_time_total", row_limit=12,
                                                   max_name_column_width=60))

        # The result is the last line of the log. After that line, only sampling and printing can still fail.
        result, save_error = finish_run(log, info, engine, validation, clock.ms, loss, num_graphs)
        results.append(result)
        first_error = first_error or out_of_data or save_error

    exit_handler.log = None              # complete: after a signal, there is nothing to continue
    report_results(log, engine, validation, results)
    if first_error:
        raise first_error

def sample_from_save(flags: Config) -> None:
    """Print a continuation of --prompt, sampled with the weights saved in --sample=DIR."""
    # Read the settings first, because they determine the names and shapes of the tensors.
    directory = Path(flags.sample)
    weights_path = directory / "weights.pt"
    saved_cfg = read_settings(directory)
    check_manifest(directory / SETTINGS_FILE, (directory / SETTINGS_FILE).read_bytes())
    manifest = read_manifest(directory)
    tensors = read_tensors(weights_path, manifest)
    check_tensors(weights_path, saved_cfg, tensors)

    # Use one rank, without torch.compile. Store n-gram tables in host memory, because a prompt looks up few rows.
    comm = init_distributed(replace(saved_cfg, seqs_per_step=1, device=flags.device))
    dtype = "float32" if saved_cfg.dtype == "bfloat16" and not comm.on_cuda else saved_cfg.dtype
    tables = tuple(replace(table, location="host") for table in saved_cfg.tables)
    cfg = replace(saved_cfg, compile=0, dtype=dtype, seed=flags.seed, sample_tokens=flags.sample_tokens,
                  temperature=flags.temperature, tables=tables, time_budget=0.0, max_steps=0)
    token_bytes = read_token_bytes(directory, cfg)
    try:
        if token_bytes is None and cfg.vocab_size == GPT2_VOCAB:
            encoding = importlib.import_module("tiktoken").get_encoding("gpt2")
            token_bytes = [encoding.decode_single_token_bytes(i) for i in range(GPT2_BOS_ID)] + [b""]
            prompt = encoding.encode_ordinary(flags.prompt)
        else:
            # Tokenize the prompt like data/pocket.py: split a word that is not in the vocabulary into single bytes.
            token_ids = {piece: i for i, piece in enumerate(token_bytes or ()) if piece}
            words = POCKET_TOKEN_RE.findall(flags.prompt.encode("utf-8", "surrogateescape"))
            pieces = [[word] if word in token_ids else [bytes((byte,)) for byte in word] for word in words]
            prompt = [token_ids[piece] for piece in itertools.chain(*pieces)]
    except Exception as error:           # no tiktoken, no network, or bytes without a token
        raise DataError("prompt", found=f"{type(error).__name__}: {error}",
                        expected="a prompt that vocab.txt next to the weights can encode; or, for GPT-2 tokens, "
                                 "tiktoken, which downloads its data or reads it from TIKTOKEN_CACHE_DIR",
                        hint="omit the prompt, use other words, or pip install tiktoken") from None
    engine = Engine(cfg, comm, attention_reference, head_precision=None)
    with read_errors(weights_path):
        engine.model.load_state_dict(tensors)
    load_rows(directory, manifest, engine)

    schedule = Schedule(cfg)
    sample = generate(cfg, engine, schedule.at(schedule.end_step), token_bytes, prompt)
    print_stdout(f"{' prompt ':-^100}\n{flags.prompt}\n{' sample ':-^100}\n{sample}")

def main(argv: list[str], source: bytes | None = None) -> None:
    """Run the trainer with the command-line arguments `argv`, and end the process."""
    exit_handler = ExitHandler()
    try:
        if source is None:
            source = Path(__file__).read_bytes()
        if sys.stdout:                                                        # None if it was closed
            sys.stdout.reconfigure(errors="backslashreplace")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # Without a CUDA toolkit, Inductor warns that round_as_eager leaves Triton's own libdevice in use, as intended.
        warnings.filterwarnings("ignore", message="CUDA_HOME not set|CUDA libdevice not found")
        cfg = load_config(argv)
        if cfg.sample:
            sample_from_save(cfg)
        else:
            train(cfg, init_distributed(cfg), exit_handler, source)
    except SystemExit:                                                        # after --help
        pass
    except BaseException as error:
        exit_handler.end(error)
    # If the signal thread is ending the process, wait here until the process has ended. Otherwise, end the process
    # without waiting for other threads, because a thread may be stuck in a read.
    exit_handler.exiting.acquire()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:], SOURCE)

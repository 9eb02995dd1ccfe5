"""Train a small GPT against the clock: the modded-nanogpt speedrun (record 71, pull request #221) in one file.

    ./run.sh                                                 set up, fetch data, train, print the result and a sample
    [python | uv run] train_gpt.py --preset=pocket           one process; two minutes on two CPU cores
    torchrun --standalone --nproc_per_node=8 train_gpt.py    eight GPUs, preset `record`
    python train_gpt.py --help                               all flags

Part I is the race. A fork changes it: read it from top to bottom.
     1 Settings   layers, stages, n-gram tables, flags, presets
     2 Schedule   Schedule.at(step) -> StepConfig: everything that changes from step to step
     3 Model      one row per parameter and table; GPT
     4 Updates    NorMuon, Adam, row-wise Adam; the order of the collectives
     5 Step       Engine (forward_backward, optim_step, evaluate, reset), train_step, train_loop
Part II is machinery, a library for part I. Open it when you need it; new activations and losses are in section 7.
     6 Base       errors, Communicator, torch.compile
     7 Kernels    PyTorch reference and Triton kernel of each operation; main_grad
     8 Data       shards, packing of documents into sequences
     9 Rows       embedding tables sharded by row: plans, exchange between ranks
    10 Batches    batches with their row plans, the background loader, validation batches
    11 Groups     parameter groups: which rank reduces and updates what
    12 Files      clock, log, checkpoints, saved weights, sampling
    13 Launch     command line, ranks, attention kernel, warm-up, header, train, main
For the algorithm alone, read Schedule.at, GPT, the update rules and train_step.

Letters in shapes, with their values in preset `record`
    W  world size: number of ranks    L  layers [11]                V  padded vocabulary [50,304]
    S  sequences per step [8]         D  model dim [768]            R  rows of a table [bigrams: 251,520]
    B  sequences per micro-batch      H  attention heads [6]        C  rows of a rank's shard: R / W, rounded up
    T  tokens per sequence            E  head dim [128]             G  predicted tokens per position [3, 2, 1 by stage]
    N  tokens per micro-batch, B * T  F  MLP hidden dim [3,072]     M  matrices in a bank
x (N, D) is a matrix and x () a 0-dim tensor. Matmul kernels call their own sizes M, N and K.

Terms
    spec       describes a parameter or a table under its label, which is its name
    bank       one parameter that stacks matrices of all layers
    main_grad  buffer in which the gradient of a weight accumulates; a WeightMatrix is a matrix with its main_grad
    shard      what one rank updates of a weight; in section 8, a file of tokens
    table      embedding table; its global row r is local row r // W of rank r % W, the owner
    row plan   which rows of a table a rank fetches from their owners, and serves to other ranks
    cycle      Parameters are updated every 1, 2 or 4 steps. The longest of these intervals is the run's cycle: data is
               loaded and checkpoints are written in whole cycles.
cfg is the Config, step_cfg the StepConfig of a step, comm the Communicator; the process group None is the default one.
RECIPE is records/RECIPE.md, with formulas and sources; "record 43" is the 43rd record of modded-nanogpt. More terms:
records/guide/GLOSSARY.md.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy", "safetensors", "torch>=2.11,<2.20"]
# ///
from __future__ import annotations

import os

if __name__ == "__main__" and "__file__" in globals():
    with open(__file__, "rb") as file:                        # now, because the file may be edited during the imports
        SOURCE = file.read()
    PARENT_PID = os.getppid()
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")           # before torch: spinning threads starve other processes

import argparse
import ast
import base64
import contextlib
import ctypes
import functools
import gc
import glob
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import math
import mmap
import platform
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


# ====== Section 1: Settings ===========================================================================================
@dataclass(frozen=True)
class Layer:
    attention: str                   # "plain", "paired" (heads j and j + H/2 attend as one sequence of 2T) or "none"
    window: str = "short"            # the "short" or the "long" window of the stage
    value_embed: int | None = None   # index of a value embedding to add to the attention values
    key_offset: bool = False         # the half of each key without RoPE is taken from the previous token
    save_as: str = ""                # save the output of the layer under this name
    add_saved: str = ""              # add the saved output of this name, gated, to the input of the layer


# The layers of modded-nanogpt (RECIPE 2.2). Sources: value embeddings, records 9, 14, 17; skip, 11 and 45; windows, 12,
# 13, 20, 29; layer 6 without attention, 17; backout, 40; key offset, 49; gates, 55; paired heads, 58.
SKIP = "skip"
BACKOUT = "backout"
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
    batch_tokens: int                # tokens per step, over all ranks
    short_window: int                # blocks of --window_block tokens
    long_window: int
    lr_mul: float                    # multiplier of normuon_lr and adam_lr
    mtp_start: tuple[float, ...]     # loss weights of the 1st, 2nd, ... next token at the start of the stage
    mtp_end: tuple[float, ...]       # and at its end; linear in between
    untie: bool = False              # split head and embedding after the first Adam update in the stage


# The stages of modded-nanogpt (RECIPE 4.1). The last one is the extension after the scheduled steps. Sources: windows,
# records 12, 13, 20, 29; batches, 46; loss weights (multi-token prediction, MTP) and untying, 53. Batches are multiples
# of 32,768, because preset `pocket` divides them by 256.
STAGES = (
    Stage(131_072, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262_144, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393_216, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)))

@dataclass(frozen=True)
class NgramTable:
    label: str                       # parameter name, ends with _embed
    order: int                       # n of the n-grams: 2, 3 or 4
    rows: int                        # the last row means "no n-gram"
    update_every: int = 2            # steps per update: 1, 2 or 4
    lr_mul: float = 37.5             # multiplier of adam_lr
    wd_mul: float = 5.0              # multiplier of adam_weight_decay
    beta2: float = 0.95


# {n: one odd multiplier per token of an n-gram, newest first}. n = 2: RECIPE 2.5; 3: record 92; 4: chosen here.
NGRAM_FACTORS = {2: (36313, 27191), 3: (17351, 60961, 45259), 4: (50411, 22787, 64951, 38327)}
GPT2_VOCAB, GPT2_BOS_ID = 50_257, 50_256  # where a shard header has vocabulary size 0
GATE_INPUTS = 12                     # input features of every gate
FP8_MULTIPLE = 16                    # the fp8 head needs dimensions, and sequence lengths, that are multiples of this

@dataclass(frozen=True)
class Config:
    """Every field is a flag, --field=value, and its comment is the help text. A preset changes some defaults."""
    preset: str = "record"           # record, record_24gb, pocket, pocket_tables, race, race_tables or tiny
    # Data. seqs_per_step changes the packing of documents, and so the losses. Sources: records 26, 29; bigrams, 62.
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # training shards, read in name order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # validation shards
    epochs: int = 1                  # passes over the training shards; 0: repeat them forever
    val_tokens: int = 10_485_760     # tokens to validate on, a multiple of val_batch_tokens
    val_batch_tokens: int = 2_097_152  # tokens per validation batch, which has seqs_per_step sequences
    max_doc_len: int = 2048          # training documents are truncated to this number of tokens
    seqs_per_step: int = 8           # sequences per step, divided among the ranks
    vocab_size: int = 0              # number of token ids; 0: from the shard headers
    padded_vocab: int = 0            # columns of the head; 0: vocab_size rounded up to a multiple of 128
    bos_id: int = -1                 # first token of every document; -1: from the shard headers
    bigram_rows: int = 0             # rows of the bigram table; 0: 5 * padded_vocab
    # Model. Sources: normalized queries and keys, record 5; bf16, 10 and 57; fp8 head, 19.
    seed: int = 0                    # initial weights: each parameter is drawn from (seed, label)
    model_dim: int = 768             # num_heads * head_dim
    num_heads: int = 6               # even, because paired layers join heads j and j + H/2
    head_dim: int = 128              # a multiple of 4; RoPE rotates half of the features
    attn_scale: float = 0.1          # softmax scale before YaRN
    tables: tuple[NgramTable, ...] = ()  # n-gram tables, as fields of NgramTable: "[('trigram_embed', 3, 20480)]"
    dtype: str = "bfloat16"          # of weights and activations
    head: str = "auto"               # precision of the training logits; auto: fp8 if GPU and sizes allow it
    # Schedule. Source of lr_floor: record 19.
    num_scheduled_steps: int = 1507  # split evenly over all stages but the last
    num_extension_steps: int = 40    # steps of the last stage
    stages: tuple[Stage, ...] = STAGES  # list of stages, written like tables: fields of Stage
    window_block: int = 128          # tokens per block of a window
    final_long_window: int = 20      # blocks in the long window of the final validation
    cooldown_frac: float = 0.55      # fraction of the scheduled steps, at their end, over which learning rates decay
    lr_floor: float = 0.1            # learning rate multiplier at the end of the cooldown
    max_steps: int = 0               # stop after this many steps, then validate; 0: the whole schedule
    # Optimizers. Sources: Muon, records 3 and 4; momentum, 9 and 39; NorMuon, 41, 42, 48; cautious decay, 43 and 50.
    normuon_lr: float = 0.023        # learning rate of attention and MLP matrices
    normuon_beta2: float = 0.95      # decay of the second moment, one per row of a matrix
    normuon_weight_decay: float = 1.2  # cautious; the effective decay is lr^2 times this value
    momentum_min: float = 0.85       # NorMuon momentum at the start and at the end
    momentum_max: float = 0.95       # NorMuon momentum in between
    momentum_warmup_frac: float = 300 / 1547  # fraction of all steps over which the momentum rises
    momentum_cooldown_frac: float = 50 / 1547  # fraction of all steps over which the momentum falls
    adam_every: int = 2              # steps per Adam update; gradients accumulate in between
    adam_lr: float = 0.008           # learning rate of all other parameters, before their multipliers
    adam_weight_decay: float = 0.005  # cautious; the effective decay is (lr * multiplier)^2 times this value
    adam_eps: float = 1e-10          # added to the square root of the uncorrected second moment
    # Run. These flags do not change the results of a step beyond rounding.
    device: str = "auto"             # auto: CUDA if available
    compile: int = -1                # torch.compile: 1, 0 or -1 (on CUDA only)
    attention: str = "auto"          # auto: the fastest kernel that this GPU and the installed packages provide
    row_comms: str = "sparse"        # exchange the table rows that are looked up; dense: whole tables
    micro_batch_size: int = 2        # sequences per forward and backward pass of a rank, at most; 2 fit on 80 GB
    val_every: int = 250             # steps between validations; 0: only the final one
    runs: int = 1                    # runs in one process after one warm-up, with seeds seed, seed + 1, ...
    sample_tokens: int = 96          # tokens to generate after training; 0: none
    temperature: float = 0.8         # of sampling; 0: the likeliest token
    target_loss: float = 3.28        # loss that the runs are tested against, for the log; 0: none
    run_dir: str = ""                # directory of the logs; empty: logs/<time>-<preset>-<run id>
    save: str = ""                   # new directory for the final weights
    checkpoint_every: int = 0        # steps between checkpoints; the last cycle start has one, too; 0: none
    resume: str = ""                 # run directory to continue from its last checkpoint, with its flags
    comm_timeout: float = 600.0      # seconds to wait for another rank or for a thread


# Preset `record`, for GPUs: the defaults of Config. Preset `pocket`, for CPUs: the same layers and schedule at width 96
# with 1/256 of the tokens per batch; attn_scale keeps the bound of the attention logits (RECIPE 2.4).
RECORD = dict(device="cuda")
POCKET = dict(
    train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin", val_tokens=65_536,
    val_batch_tokens=8_192, max_doc_len=256, model_dim=96, head_dim=16, attn_scale=12.8 / 16, dtype="float32",
    head="plain", compile=0, micro_batch_size=8, window_block=8, num_scheduled_steps=520, num_extension_steps=20,
    val_every=180, target_loss=0.0,
    stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 256) for stage in STAGES))
# Preset `tiny`, for tests: 12 steps on synthetic tokens. Its stages do not depend on STAGES, which a fork may change.
TINY = POCKET | dict(
    train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1", val_tokens=1024, val_batch_tokens=512,
    max_doc_len=24, model_dim=32, num_heads=2, window_block=4, num_scheduled_steps=9, num_extension_steps=3,
    val_every=5, sample_tokens=8, stages=(
        Stage(128, 1, 3, 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), Stage(256, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(384, 5, 11, 1.73, (1.0,), (1.0,), untie=True), Stage(384, 6, 13, 1.0, (1.0,), (1.0,))))
# Preset `race`: a loss below 2.20 in half the time of `pocket` (records/2026-11-25_23_Race).
RACE = POCKET | dict(
    num_scheduled_steps=190, stages=POCKET["stages"][1:], adam_every=1, num_heads=2, head_dim=48, attn_scale=12.8 / 48,
    tables=(NgramTable("trigram_embed", 3, 20_480), NgramTable("fourgram_embed", 4, 20_480)))
# Two tables of 100,000 rows lower the loss of `pocket` by 0.174 nats (records/2026-11-23_11_PocketTables).
LARGE_TABLES = dict(tables=(NgramTable("trigram_embed", 3, 100_000), NgramTable("fourgram_embed", 4, 100_000)))
PRESETS = dict(
    record=RECORD, record_24gb=RECORD | dict(seqs_per_step=16, micro_batch_size=1),     # shorter sequences, less memory
    pocket=POCKET, pocket_tables=POCKET | LARGE_TABLES, race=RACE, race_tables=RACE | LARGE_TABLES, tiny=TINY)


# ====== Section 2: Schedule ===========================================================================================
class Rotary(NamedTuple):
    """RoPE of the attention in one stage."""
    frequencies: tuple[float, ...]       # E/4 values, in radians per position; they rotate E/2 of the E head features
    attn_scale: float                    # softmax scale, adapted by YaRN

@dataclass(frozen=True)
class StepConfig:
    """All values that the schedule sets for one step."""
    step: int
    stage: int                           # index into cfg.stages
    seq_len: int                         # T, tokens
    short_window: int                    # earlier positions that a query attends to, in addition to its own
    long_window: int
    mtp_weights: tuple[float, ...]       # loss weights of the 1st, 2nd, ... next token; their sum need not be 1
    rotary: Rotary
    normuon_lr: float
    adam_lr: float                       # before multipliers of parameters
    momentum: float
    tied: bool                           # head and embedding are one parameter; the embedding is the transposed head
    untie_after: bool                    # split head and embedding into two parameters after the update of this step
    checkpoint: bool                     # write a checkpoint before this step
    validate: bool


ROTARY_BASE = 1024.0                     # the lowest frequency of the first stage is 1 / ROTARY_BASE
YARN_ALPHA, YARN_BETA = 1.0, 32.0        # up to ALPHA turns in the old window a frequency scales; from BETA on it stays
YARN_SCALE_GROWTH = 0.2                  # relative growth of the softmax scale per log(new window / old window)

def rotary_by_stage(cfg: Config) -> list[Rotary]:
    """For each stage, RoPE of half of the features, adapted to its long window by YaRN (RECIPE 2.4, arXiv 2309.00071).

    In the first stage, frequencies f fall geometrically from 1 to 1/1024. When the long window grows from w to w':

        turns = w f / (2 pi)                                  w in tokens
        keep  = clamp((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0, 1)
        f     <- f (w/w' + keep (1 - w/w'))
        scale <- scale (1 + YARN_SCALE_GROWTH log(w'/w))      softmax scale
    """
    num_frequencies = cfg.head_dim // 4
    frequencies = np.array([ROTARY_BASE ** (-i / (num_frequencies - 1)) for i in range(num_frequencies)])
    rotary = [Rotary(tuple(frequencies.tolist()), cfg.attn_scale)]
    for old_stage, new_stage in itertools.pairwise(cfg.stages):
        old_window = old_stage.long_window * cfg.window_block
        new_window = new_stage.long_window * cfg.window_block
        window_ratio = old_window / new_window            # f * window_ratio keeps the number of turns per window
        turns = old_window * frequencies / (2 * math.pi)
        keep = np.clip((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0.0, 1.0)
        frequencies = frequencies * (window_ratio + keep * (1 - window_ratio))
        attn_scale = rotary[-1].attn_scale * (YARN_SCALE_GROWTH * math.log(new_window / old_window) + 1)
        rotary.append(Rotary(tuple(frequencies.tolist()), attn_scale))
    return rotary

class Schedule:
    """`at(step)` gives the settings of a step (RECIPE 4). Steps count from 0; training ends before step end_step."""
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.steps_per_cycle = max([cfg.adam_every, *(table.update_every for table in cfg.tables)])
        self.total_steps = cfg.num_scheduled_steps + cfg.num_extension_steps  # --max_steps may stop earlier
        self.end_step = min(cfg.max_steps or self.total_steps, self.total_steps)
        # All stages but the last split the scheduled steps evenly. The last stage is the extension.
        last_stage = len(cfg.stages) - 1
        self.stage_starts = [round(cfg.num_scheduled_steps * i / last_stage) for i in range(len(cfg.stages))]
        self.stage_ends = [*self.stage_starts[1:], self.total_steps]
        # Untie at the end of an Adam interval: earlier, the embedding's gradients of the interval would be lost.
        untie_starts = [start for start, stage in zip(self.stage_starts, cfg.stages) if stage.untie]
        self.last_tied_step = (untie_starts[0] // cfg.adam_every + 1) * cfg.adam_every - 1 if untie_starts else math.inf
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))
        self.rotary = rotary_by_stage(cfg)

    def stage_at(self, step: int) -> int:
        """Index of the stage of a step; after the schedule, the last one."""
        return sum(end <= step for end in self.stage_ends[:-1])

    def lr_factor_at(self, step: int) -> float:
        """Factor of all learning rates: lr_mul of the stage, interpolated to lr_floor in the cooldown (RECIPE 4.2)."""
        cooldown_steps = max(1, self.cfg.num_scheduled_steps - self.cooldown_start)
        fraction = min(max(0.0, (step - self.cooldown_start) / cooldown_steps), 1.0)
        return self.cfg.stages[self.stage_at(step)].lr_mul * (1 - fraction) + self.cfg.lr_floor * fraction

    def momentum_at(self, step: int) -> float:
        """NorMuon momentum: linear from momentum_min to momentum_max, constant, back at total_steps (RECIPE 4.2)."""
        cfg = self.cfg
        warmup_steps = round(cfg.momentum_warmup_frac * self.total_steps)
        cooldown_steps = round(cfg.momentum_cooldown_frac * self.total_steps)
        rise = step / warmup_steps if step < warmup_steps else 1.0
        fall = (self.total_steps - step) / max(1, cooldown_steps)
        return cfg.momentum_min + (cfg.momentum_max - cfg.momentum_min) * min(rise, fall, 1.0)

    def at(self, step: int) -> StepConfig:
        """Settings of a step. `at(end_step)` has those of the final validation."""
        cfg = self.cfg
        stage_idx = self.stage_at(step)
        stage = cfg.stages[stage_idx]
        # The final validation, after the whole schedule, has a wider window, but keeps the stage's RoPE frequencies.
        long_window_blocks = stage.long_window if step < self.total_steps else cfg.final_long_window
        lr_factor = self.lr_factor_at(step)

        # MTP weights are linear in the step within a stage (RECIPE 4.1).
        stage_start, stage_end = self.stage_starts[stage_idx], self.stage_ends[stage_idx]
        stage_fraction = (step - stage_start) / max(1, stage_end - stage_start)
        mtp_weights = [start + (end - start) * stage_fraction for start, end in zip(stage.mtp_start, stage.mtp_end)]

        # Checkpoints are written where cycles begin: at the first cycle start at or after each multiple of
        # checkpoint_every, and at the last cycle start up to end_step.
        begins_cycle = step % self.steps_per_cycle == 0
        is_last_start = step == self.end_step // self.steps_per_cycle * self.steps_per_cycle
        is_due = cfg.checkpoint_every > 0 and (step % cfg.checkpoint_every < self.steps_per_cycle or is_last_start)
        return StepConfig(
            step=step, stage=stage_idx, seq_len=stage.batch_tokens // cfg.seqs_per_step,
            short_window=stage.short_window * cfg.window_block, long_window=long_window_blocks * cfg.window_block,
            mtp_weights=tuple(mtp_weights), rotary=self.rotary[stage_idx], momentum=self.momentum_at(step),
            normuon_lr=cfg.normuon_lr * lr_factor, adam_lr=cfg.adam_lr * lr_factor,
            tied=step <= self.last_tied_step, untie_after=step == self.last_tied_step,
            checkpoint=begins_cycle and is_due, validate=cfg.val_every > 0 and step % cfg.val_every == 0)

    def cycles(self, first_step: int) -> Iterator[list[StepConfig]]:
        """Yield one list of step settings per cycle, until end_step. A cycle must begin at first_step."""
        for start in range(first_step, self.end_step, self.steps_per_cycle):
            yield [self.at(step) for step in range(start, min(start + self.steps_per_cycle, self.end_step))]

    def warm_up_cycles(self, every_graph: bool) -> list[list[StepConfig]]:
        """Cycles that compile every graph of training: for each stage, the cycle it begins in, and the one after.

        A graph depends on the stage, on whether head and embedding are tied, and on whether Adam updates. Without
        every_graph, only the cycle with the largest batches.
        """
        firsts = {start // self.steps_per_cycle for start in self.stage_starts}
        cycles = [cycle for i, cycle in enumerate(self.cycles(first_step=0)) if {i, i - 1} & firsts]
        # Largest batches (longest seq_len) first, to find an OOM early; but cycles that end_step cuts short come last.
        cycles.sort(key=lambda cycle: (len(cycle), cycle[-1].seq_len), reverse=True)
        return cycles if every_graph else cycles[:1]


# ====== Section 3: Model ==============================================================================================
MLP_RATIO = 4                            # MLP hidden dim / model dim
DOWN_LR_MUL = 2.0                        # learning rate multiplier of the down matrices of the MLP
QKVO, QKV = 4, 3                         # number of stacked matrices: q, k, v and output projection; q, k, v
NGRAM_INIT_COEF = 0.1                    # initial coefficient of an n-gram table in the residual stream, for each layer
# Initial values of the learned scalars, packed into the parameter `scalars` (RECIPE 2.6). Each layer has two attention
# scalars: the first multiplies the weights of q, k and v, the second the output projection.
SCALARS = dict(residual=(1.1,) * len(LAYERS), attention=(0.5, 1.0) * len(LAYERS),
               bigram_embed=(0.1,) * len(LAYERS), smear=(0.0,), backout=(0.5,), skip=(-1.5,))

class TableSpec(NamedTuple):
    """How tokens are looked up in an embedding table."""
    label: str
    num_rows: int                        # R
    lookups_per_token: int
    row_ids: Callable[[np.ndarray], np.ndarray]           # tokens (B, T) -> rows (B, T) or (B, lookups, T), all i32
    rowwise: bool = False                # an update changes only the rows that were looked up; else all rows
    update_every: int = 2                # steps per update

    def shard_rows(self, world_size: int) -> int:
        """C = ceil(R / W)."""
        return -(-self.num_rows // world_size)

class ParameterSpec(NamedTuple):
    """Shape, initial values and optimizer of one parameter (RECIPE 2.1)."""
    label: str                           # name of the parameter; also seeds its initial values
    shape: tuple[int, ...]               # unsharded
    # ("constant", value or one per element), ("normal", standard deviation), ("uniform", bound: in [-bound, bound]), or
    # ("mlp", bound) for the MLP bank (L, matrices, F, D): the last matrix of a layer is zero, others are uniform.
    init: tuple[str, float | tuple[float, ...]]
    optimizer: str = "adam"              # "adam"; "normuon" for banks of matrices; "rowwise" for n-gram tables
    lr_mul: float = 1.0                  # multiplier of adam_lr
    wd_mul: float = 1.0                  # multiplier of adam_weight_decay
    betas: tuple[float, float] = (0.9, 0.99)              # Adam: decay of the first and of the second moment
    full_precision: bool = False         # f32 even if the weights are bf16
    # (name, height, multiplier of the NorMuon learning rate) of each matrix that the parameter stacks per layer. A
    # parameter with matrices has a main_grad, and is sharded. Tables are sharded, too. All others are replicated.
    matrices: tuple[tuple[str, int, float], ...] = ()
    table: TableSpec | None = None

    @property
    def matrix_heights(self) -> tuple[int, ...]:
        return tuple(height for _, height, _ in self.matrices)

def ngram_hash(tokens: np.ndarray, factors: tuple[int, ...], num_rows: int) -> np.ndarray:
    """Table row of the n-gram that ends at each position: tokens (..., T) i32 -> (..., T) i32 in [0, num_rows).

    factors: n odd multipliers, newest token first. The first n - 1 positions have no n-gram, and get the last row.
    N-grams cross document boundaries, as modded-nanogpt's bigrams do.
    """
    modulus = num_rows - 1
    mixed = tokens * factors[0]                           # i32 wraps around
    for distance, factor in enumerate(factors[1:], 1):
        mixed[..., distance:] ^= tokens[..., :-distance] * factor
    hashed = mixed - mixed // modulus * modulus           # same as mixed % modulus, which NumPy does not vectorize
    hashed[..., :len(factors) - 1] = modulus
    return hashed

def bigram_hash(tokens: np.ndarray, num_rows: int) -> np.ndarray:
    """Row of the bigram table at each position: (36313 * current xor 27191 * previous) mod (num_rows - 1), i32.

    Position 0 has no bigram, and gets the last row. Position 1 hashes that row's number, num_rows - 1, in place of
    token 0: a quirk of modded-nanogpt, whose published losses include it.
    """
    overwritten = tokens.copy()
    overwritten[..., 0] = num_rows - 1
    return ngram_hash(overwritten, NGRAM_FACTORS[2], num_rows)

def initial_scalars(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Initial values of the parameter `scalars`, in its order: {name: values}. Unused ones keep their values."""
    return SCALARS | {ngram.label: (NGRAM_INIT_COEF,) * len(LAYERS) for ngram in cfg.tables}

def parameter_specs(cfg: Config) -> tuple[ParameterSpec, ...]:
    """One ParameterSpec per parameter and table (RECIPE 2.1, 2.6); those of cfg.tables last."""
    D, H, V, every = cfg.model_dim, cfg.num_heads, cfg.padded_vocab, cfg.adam_every
    L, num_attn, mlp_dim = len(LAYERS), len(ATTENTION_LAYERS), MLP_RATIO * D
    num_skip_gates = int(any(layer.add_saved for layer in LAYERS))            # all layers with add_saved share one
    first_rows = V * np.arange(NUM_VALUE_EMBEDS, dtype=np.int32)[:, None]     # one per value embedding, (lookups, 1)
    scalars = sum(initial_scalars(cfg).values(), ())
    mlp_matrices = ("up", mlp_dim, 1.0), ("down", mlp_dim, DOWN_LR_MUL)       # order: relu_sq_mlp(x, up, down)

    zeros = "constant", 0.0
    bound = 3**0.5 * 0.5 * D**-0.5                        # standard deviation: bound / sqrt(3) = 0.5 / sqrt(D)
    scalar_kwargs = dict(lr_mul=5, wd_mul=0, full_precision=True)
    table_kwargs = dict(lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    head_kwargs = dict(wd_mul=150, betas=(0.5, 0.95))

    bigram_ids = functools.partial(bigram_hash, num_rows=cfg.bigram_rows)
    bigrams = TableSpec("bigram_embed", cfg.bigram_rows, 1, bigram_ids, update_every=every)
    values = TableSpec("value_embed", NUM_VALUE_EMBEDS * V, NUM_VALUE_EMBEDS,
                       lambda tokens: tokens[:, None] + first_rows, update_every=every)       # (B, lookups, T)
    embed = TableSpec("embed", V, 1, np.asarray, update_every=every)
    ngrams = []
    for ngram in cfg.tables:
        row_ids = functools.partial(ngram_hash, factors=NGRAM_FACTORS[ngram.order], num_rows=ngram.rows)
        table = TableSpec(ngram.label, ngram.rows, 1, row_ids, rowwise=True, update_every=ngram.update_every)
        ngrams.append(ParameterSpec(ngram.label, (ngram.rows, D), zeros, "rowwise", ngram.lr_mul, ngram.wd_mul,
                                    (0.0, ngram.beta2), table=table))         # row-wise updates have no first moment
    specs = [
        ParameterSpec("attn", (num_attn, QKVO * D, D), ("uniform", bound), "normuon",
                      matrices=(("qkv", QKV * D, 1.0), ("out", D, 1.0))),
        ParameterSpec("mlp", (L, len(mlp_matrices), mlp_dim, D), ("mlp", bound), "normuon", matrices=mlp_matrices),
        ParameterSpec("scalars", (len(scalars),), ("constant", scalars), **scalar_kwargs),
        ParameterSpec("x0_lambdas", (L,), zeros, **scalar_kwargs, betas=(0.65, 0.95)),        # x0: token embedding
        ParameterSpec("smear_gate", (1, GATE_INPUTS), zeros, lr_mul=0.01, wd_mul=0),          # gate of token t - 1
        ParameterSpec("skip_gate", (num_skip_gates, GATE_INPUTS), zeros, lr_mul=0.05, wd_mul=0),
        ParameterSpec("attn_gate_bank", (num_attn, H, GATE_INPUTS), zeros),
        ParameterSpec("ve_gate_bank", (NUM_VALUE_EMBEDS, H, GATE_INPUTS), zeros),             # ve: value embedding
        ParameterSpec("bigram_embed", (cfg.bigram_rows, D), zeros, **table_kwargs, table=bigrams),
        ParameterSpec("value_embed", (NUM_VALUE_EMBEDS * V, D), ("normal", 0.01), **table_kwargs, table=values),
        ParameterSpec("lm_head", (D, V), ("normal", 0.005), **head_kwargs, matrices=(("head", D, 1.0),)),
        # Head and embedding are tied at first: `initial_weights` takes the transpose of lm_head.
        ParameterSpec("embed", (V, D), zeros, **head_kwargs, table=embed),
        *ngrams]
    return tuple(spec for spec in specs if 0 not in spec.shape)               # without those that no layer uses

def table_specs(cfg: Config) -> tuple[TableSpec, ...]:
    """The tables of all parameters; those of cfg.tables last."""
    return tuple(spec.table for spec in parameter_specs(cfg) if spec.table)

def init_parameter(spec: ParameterSpec, generator: torch.Generator) -> Tensor:
    """Initial weight as spec.init says: unsharded, f32."""
    distribution, argument = spec.init
    shape = spec.shape
    if distribution == "constant":
        return torch.tensor(argument).expand(shape)
    if distribution == "normal":
        return torch.randn(shape, generator=generator) * argument
    if distribution == "mlp":            # the last matrix is `down`: MLPs output zeros at first
        others = spec._replace(shape=(shape[0], shape[1] - 1, *shape[2:]), init=("uniform", argument))
        return F.pad(init_parameter(others, generator), (0, 0, 0, 0, 0, 1))
    return torch.rand(shape, generator=generator) * (2 * argument) - argument

def initial_weights(cfg: Config, seed: int) -> Iterable[tuple[str, Tensor]]:
    """Yield (label, unsharded weight) of every parameter but the tables with row-wise Adam, which are zero at first.

    A weight depends on seed, label, shape and init alone, not on other parameters; embed is the transposed head.
    """
    for spec in parameter_specs(cfg):
        if spec.optimizer == "rowwise":
            continue
        digest = hashlib.sha256(f"{seed}/{spec.label}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        weight = init_parameter(spec, generator)
        if not spec.full_precision:
            weight = weight.bfloat16()                    # for any --dtype, so that all runs start from equal values
        if spec.label == "lm_head":
            head = weight
        yield spec.label, head.t() if spec.label == "embed" else weight


# Arguments and results of GPT's methods. Embeddings are (B, T, D).
RowBuffers = dict[str, tuple[Tensor, "Tensor | None"]]    # table -> (rows to read, their gradient buffer; None in eval)
ResidualInputs = list[tuple[tuple[Tensor, ...], Tensor]]  # (coefficient of each layer, embedding)

def set_attention_args(step_cfg: StepConfig, max_doc_len: int) -> None:
    """Set ATTENTION_ARGS of 4 kinds of layers: plain or paired heads, short or long window.

    max_doc_len is in tokens, windows in positions. Paired layers have 2 per token: theirs span half the tokens.
    """
    for attention, positions_per_token in (("plain", 1), ("paired", 2)):
        for name, window in (("short", step_cfg.short_window), ("long", step_cfg.long_window)):
            ATTENTION_ARGS[f"{attention} {name}"] = AttentionArgs(positions_per_token * max_doc_len, window,
                                                                  step_cfg.rotary.attn_scale)

def sigmoid_gate(inputs: Tensor, weight: Tensor) -> Tensor:
    """Gates in (0, 1): inputs (..., GATE_INPUTS), weight (num_gates, GATE_INPUTS) -> (..., num_gates)."""
    return torch.sigmoid(F.linear(inputs, weight))

class GPT(nn.Module):
    """The transformer of RECIPE 2. Runs no collectives. The name of a parameter is the label of its ParameterSpec."""
    def __init__(self, cfg: Config, attention: Callable, max_seq_len: int, shard_rows: dict[str, int]) -> None:
        """Allocates weights; `Engine.reset` fills them. shard_rows: {table: rows of its shard}; others are whole."""
        super().__init__()
        self.num_heads = cfg.num_heads
        self.attention = attention                        # signature and results of `attention_reference`
        # Row-wise tables are not parameters: the methods get their rows in the argument row_buffers.
        self.specs = {spec.label: spec for spec in parameter_specs(cfg) if spec.optimizer != "rowwise"}
        self.scalar_sizes = {name: len(scalars) for name, scalars in initial_scalars(cfg).items()}
        self.residual_tables = "bigram_embed", *(table.label for table in cfg.tables)
        dtype = getattr(torch, cfg.dtype)
        for label, spec in self.specs.items():
            first_dim, *other_dims = spec.shape
            param_dtype = accum_dtype(dtype) if spec.full_precision else dtype
            weight = torch.empty((shard_rows.get(label, first_dim), *other_dims), dtype=param_dtype)
            self.register_parameter(label, nn.Parameter(weight))
        for name in ("rotary_cos", "rotary_sin"):         # "paired" layers have two positions per token
            self.register_buffer(name, torch.zeros(2 * max_seq_len, cfg.head_dim, dtype=dtype), persistent=False)

    def set_rotary(self, frequencies: tuple[float, ...]) -> None:
        """Fill rotary_cos and rotary_sin in place: angle[position, channel] = position * frequency of the channel.

        Channels 2i and 2i + 1 have frequencies[i] and -frequencies[i]; the second half of the channels has 0.
        """
        dtype = accum_dtype(self.rotary_cos.dtype)
        device = self.rotary_cos.device
        # Filled on the device: a copy from the host at the first step of a stage would synchronize.
        signed_freqs = [torch.full((), sign * freq, dtype=dtype, device=device)
                        for freq in frequencies for sign in (1, -1)]
        channel_freqs = F.pad(torch.stack(signed_freqs), (0, len(signed_freqs)))
        positions = torch.arange(len(self.rotary_cos), dtype=dtype, device=device)
        angles = torch.outer(positions, channel_freqs)
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())

    def losses(self, batch: Batch, mtp_weights: Tensor, head_precision: str,
               row_buffers: RowBuffers) -> tuple[Tensor, Tensor]:
        """For training: multi-token and next-token losses (RECIPE 2.8), both (B, T), in f32, or f64 in f64 runs.

        mtp_weights (G,): loss weights of the next G tokens. head_precision: see HeadLoss. next_losses have no gradient.
        """
        y = self.hidden_states(batch, row_buffers).flatten(0, 1)
        losses, next_losses = HeadLoss.apply(y, self.lm_head, batch.targets, mtp_weights, head_precision,
                                             as_matrix(self.lm_head))
        return losses.view_as(batch.targets), next_losses.view_as(batch.targets)

    def hidden_states(self, batch: Batch, row_buffers: RowBuffers) -> Tensor:
        """Normalized hidden states that enter the head, (B, T, D) (RECIPE 2.3)."""
        # Unbind shared parameters once. Indexing them in every layer would add a backward kernel per access.
        scalars = dict(zip(self.scalar_sizes, self.scalars.split(list(self.scalar_sizes.values()))))
        residual, attention_scales = scalars["residual"].unbind(), scalars["attention"].unbind()
        x0_lambdas = self.x0_lambdas.unbind()
        attn = matrices_by_layer(self.attn, self.specs["attn"].matrix_heights)
        mlp = matrices_by_layer(self.mlp, self.specs["mlp"].matrix_heights)

        # Attention treats the micro-batch as one sequence of B * T tokens. batch.cu_seqlens is padded with T, which
        # adds empty documents.
        B, T = batch.tokens.shape
        seq_starts = torch.arange(B, device=batch.tokens.device, dtype=torch.int32) * T
        bounds = (batch.cu_seqlens + seq_starts[:, None]).flatten()
        cu_seqlens = dict(plain=bounds, paired=2 * bounds)    # in positions: paired layers have two per token
        x0, residual_inputs, value_embeds = self.embed_inputs(batch, scalars, row_buffers)    # x0: token embeddings

        x = x0
        saved = {}                       # Layer.save_as -> output of that layer
        for i, layer in enumerate(LAYERS):
            if layer.add_saved:          # first, so that residual[i] multiplies it, too
                gate = 2 * sigmoid_gate(x0[..., :GATE_INPUTS], self.skip_gate)
                x = x + torch.sigmoid(scalars["skip"]).type_as(x) * gate * saved[layer.add_saved]
            x = residual[i] * x + x0_lambdas[i] * x0
            for coefs, rows in residual_inputs:               # bigrams and n-grams
                x = x + coefs[i] * rows

            if layer.attention != "none":
                attn_idx = ATTENTION_LAYERS.index(i)      # index in `attn` and attn_gate_bank
                w_qkv, w_out = attn[attn_idx]
                qkv_scale, out_scale = attention_scales[2 * i:2 * i + 2]
                normed = rms_norm(x)
                qkv = linear_main_grad(normed, w_qkv, qkv_scale)
                y = self.attend(layer, normed, qkv, value_embeds, cu_seqlens[layer.attention])
                # One gate in (0, 1) per head, so that a head can be switched off per token (RECIPE 2.4).
                y = y * sigmoid_gate(normed[..., :GATE_INPUTS], self.attn_gate_bank[attn_idx])[..., None]
                x = x + linear_main_grad(y.flatten(2), w_out, out_scale)

            x = x + relu_sq_mlp(rms_norm(x), *mlp[i])
            if layer.save_as:
                saved[layer.save_as] = x

        if BACKOUT in saved:             # so that the result depends more on later layers
            x = x - scalars["backout"].type_as(x) * saved[BACKOUT]
        return rms_norm(x)

    def embed_inputs(self, batch: Batch, scalars: dict[str, Tensor],
                     row_buffers: RowBuffers) -> tuple[Tensor, ResidualInputs, list[Tensor]]:
        """Look up all tables. Returns (x0, coefficients per layer and embedding of residual_tables, value embeddings).

        x0 is the normalized, smeared token embedding: embed[t] + smear * gate[t] * embed[t - 1]. The smear crosses
        document boundaries, as in modded-nanogpt (RECIPE 2.3).
        """
        embed, = self.lookup("embed", batch, row_buffers)
        gate = scalars["smear"].type_as(embed) * sigmoid_gate(embed[:, 1:, :GATE_INPUTS], self.smear_gate)
        x0 = rms_norm(torch.cat((embed[:, :1], embed[:, 1:] + gate * embed[:, :-1]), dim=1))
        residual_inputs = [(scalars[label].unbind(), *self.lookup(label, batch, row_buffers))
                           for label in self.residual_tables]
        value_embeds = self.lookup("value_embed", batch, row_buffers) if NUM_VALUE_EMBEDS else []
        return x0, residual_inputs, value_embeds

    def lookup(self, label: str, batch: Batch, row_buffers: RowBuffers) -> list[Tensor]:
        """Look up every token in a table: one tensor (B, T, D) for each of its lookups_per_token."""
        lookup_rows = batch.lookup_rows[label]
        rows, row_grads = row_buffers[label]
        # One autograd node per lookup: each adds its own gradient to row_grads, and autograd stacks none.
        indices = lookup_rows.unbind(1) if lookup_rows.dim() == 3 else [lookup_rows]
        return [RowLookup.apply(rows, index, row_grads) for index in indices]

    def attend(self, layer: Layer, normed: Tensor, qkv: Tensor, value_embeds: list[Tensor],
               cu_seqlens: Tensor) -> Tensor:
        """Attention of one layer before output gate and projection (RECIPE 2.4): qkv (B, T, 3D) -> (B, T, H, E).

        normed (B, T, D): normalized layer input, for the gates. cu_seqlens (num_docs + 1,) i32: document bounds of the
        flat micro-batch, in positions (paired: 2 per token). RoPE counts from the sequence's start, not a document's.
        """
        B, T, _ = normed.shape
        q, k, v = qkv.view(B, T, QKV, self.num_heads, -1).unbind(2)
        q, k = rms_norm(q), rms_norm(k)
        # Add the value embedding, with a gate in (0, 2) per head. In paired layers, the gate reads `normed` only; in
        # plain layers, half of its inputs come from the embedding.
        if layer.value_embed is not None:
            value_embed = value_embeds[layer.value_embed]
            gate_inputs = normed[..., :GATE_INPUTS]
            if layer.attention == "plain":
                half = GATE_INPUTS // 2
                gate_inputs = torch.cat((normed[..., :half], value_embed[..., :half]), dim=-1)
            gate = 2 * sigmoid_gate(gate_inputs, self.ve_gate_bank[layer.value_embed])
            v = v + gate[..., None] * value_embed.view(v.shape)

        # A paired layer has two positions per token. In the final reshape, which joins heads j and j + H/2 into one
        # sequence, they are 2t for head j, 2t + 1 for head j + H/2; but RoPE takes 2t for even heads, 2t + 1 for odd
        # ones. This looks like a bug, but the published losses of modded-nanogpt include it (RECIPE 2.4).
        positions_per_token = 2 if layer.attention == "paired" else 1
        cos = self.rotary_cos[:positions_per_token * T].view(T, 1, positions_per_token, -1)
        sin = self.rotary_sin[:positions_per_token * T].view(T, 1, positions_per_token, -1)
        rotary_shape = (B, T, self.num_heads // positions_per_token, positions_per_token, -1)
        q = apply_rotary(q.view(rotary_shape), cos, sin)
        k = apply_rotary(k.view(rotary_shape), cos, sin)
        # Key offset: a query that matches token t - 1 attends to the value of token t (a one-layer induction head). The
        # shift crosses document boundaries, as in modded-nanogpt. The first key of a sequence stays.
        if layer.key_offset:
            with_rope, without_rope = k.chunk(2, dim=-1)
            shifted = torch.cat((without_rope[:, :1], without_rope[:, :-1]), dim=1)
            k = torch.cat((with_rope, shifted), dim=-1)
        flat_qkv = [x.reshape(-1, self.num_heads // positions_per_token, x.shape[-1]) for x in (q, k, v)]
        return self.attention(*flat_qkv, cu_seqlens, f"{layer.attention} {layer.window}").view(v.shape)


# ====== Section 4: Updates ============================================================================================
# Groups are reduced and updated in this order; n-gram tables come before the last group.
# The banks are first, so that their NorMuon updates overlap the all-to-alls of row gradients.
REPLICATED = "replicated"                # the group of all parameters that every rank updates in full
UPDATE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", REPLICATED)
POLAR_EXPRESS = (                        # coefficients (a, b, c) per iteration (arXiv 2505.16932, RECIPE 3.1)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

def polar_express(x: Tensor) -> Tensor:
    """Approximate the polar factor U V^T of each matrix U S V^T in x (M, rows, columns), in the dtype of x.

    Singular values above 0.002 times the Frobenius norm are mapped to [0.86, 1.14] (arXiv 2505.16932, RECIPE 3.1).
    """
    rows, columns = x.shape[-2:]
    tall = rows > columns                # the smaller Gram matrix A is then x^T x, and H multiplies x from the right
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)                # singular values must be at most 1
    # With A = x x^T and H = b A + c A^2, an iteration is x <- a x + H x. If one side of x is over twice the other, it
    # takes fewer FLOP to iterate on A, and to apply 2 or 3 iterations at once, x <- q x + R x; all 5, or 16 bits, would
    # be inexact. R is symmetric but for rounding; errors stay small if the H of the final iteration acts on x last.
    on_gram = max(rows, columns) > 2 * min(rows, columns) and x.dtype in (torch.float32, torch.float64)
    for iterations in (POLAR_EXPRESS[:2], POLAR_EXPRESS[2:]) if on_gram else zip(POLAR_EXPRESS):
        gram = x.mT @ x if tall else x @ x.mT
        q = 1.0
        r = None
        for a, b, c in iterations:
            if r is not None:            # A <- (a I + H) A (a I + H), with a and H of the previous iteration
                gram = torch.baddbmm(gram, h, gram, beta=prev_a)
                gram = torch.baddbmm(gram, gram, h, beta=prev_a)
            h = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            r = h if r is None else torch.baddbmm(a * r + q * h, r, h)
            q *= a
            prev_a = a
        factors = (x, r) if tall else (r.mT, x)
        x = torch.baddbmm(x, *factors, beta=q)
    return x

def normuon_direction(grad: Tensor, momentum: Tensor, second_moment: Tensor, mu: Tensor, beta2: float,
                      polar_dtype: torch.dtype) -> Tensor:
    """Orthogonalize the Nesterov momentum, divide rows by a running RMS, restore the norm (arXiv 2510.05491).

        momentum      <- mu * momentum + (1 - mu) * grad
        O             =  polar_express(mu * momentum + (1 - mu) * grad)
        second_moment <- beta2 * second_moment + (1 - beta2) * (mean of O^2 over each row; if wide, each column)
        U             =  O / sqrt(second_moment)
        result        =  U * |O| / |U|, where |.| is the Frobenius norm of a matrix

    Of M matrices: grad, momentum, result (M, r, c); second_moment (M, r, 1), or (M, 1, c) if they are wide.
    """
    momentum.lerp_(grad, 1 - mu)
    nesterov = momentum.lerp(grad, 1 - mu)
    orthogonal = polar_express(nesterov.to(polar_dtype)).to(grad.dtype)

    axis = -1 if second_moment.shape[-1] == 1 else -2     # of the mean
    mean_square = orthogonal.square().mean(dim=axis, keepdim=True)            # (M, r, 1) or (M, 1, c)
    second_moment.lerp_(mean_square, 1 - beta2)
    inverse_rms = second_moment.clamp_min(1e-10).rsqrt()

    # |O| and |U| follow from the means, so that the full matrices are read only once more, in the last line.
    count = grad.shape[axis]             # elements per mean
    norm = (count * mean_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scaled_square = mean_square * inverse_rms.square()
    scaled_norm = (count * scaled_square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    scale = inverse_rms * norm / scaled_norm.clamp_min(1e-10)
    return orthogonal * scale.to(polar_dtype).to(grad.dtype)                  # rounded to polar_dtype, RECIPE 3.1

def with_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """f32 weights from p (bf16: upper 16 bits) and mantissa (i16: lower 16 bits)."""
    upper = p.view(torch.int16).int() << 16
    return (upper | mantissa.int() & 0xFFFF).view(torch.float32)              # the mask undoes the sign extension

def normuon_update(p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum: Tensor, second_moment: Tensor,
                   grad_scale: float, mu: Tensor, lr: Tensor, lr_muls: Tensor, decay_per_lr: Tensor,
                   beta2: float) -> None:
    """One NorMuon step with cautious weight decay, in place, on the matrices p (M, r, c).

        U = normuon_direction(grad * grad_scale)
        p <- p - lr_muls * lr * (decay_per_lr * p + U)   where U * p >= 0
        p <- p - lr_muls * lr * U                        elsewhere

    mantissa (M, r, c) i16: lower 16 bits of f32 weights whose upper 16 bits are p; None: p is the full weight.
    lr_muls (M, 1, 1); mu, lr, decay_per_lr (); decay_per_lr = lr * weight decay: decay per step is quadratic in lr.
    """
    grad = grad.to(momentum.dtype) * grad_scale
    update = normuon_direction(grad, momentum, second_moment, mu, beta2, p.dtype)
    lrs = lr_muls * lr
    exact = p if mantissa is None else with_mantissa(p, mantissa)
    agrees = (update * exact).ge_(0)     # not bool: CPUs multiply slowly by it
    decayed = (exact * agrees).mul_(decay_per_lr).mul_(lrs)   # in the order of RECIPE 3.1
    new_p = (exact - decayed).sub_(update.mul_(lrs))
    if mantissa is None:
        p.copy_(new_p)
        return
    bits = new_p.view(torch.int32)       # split without rounding, so that no bit is lost (RECIPE 3.2)
    p.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))
    mantissa.copy_(bits.to(torch.int16))

def cautious_adam(p: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """p - (update + decay * p) where update * p > 0, else p - update (RECIPE 3.3). NorMuon tests >= 0."""
    agrees = (update * p).gt_(0)
    return p - (p * agrees).mul_(decay).add_(update)

def adam_update(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, grad_scale: float, betas: tuple[float, float],
                eps: float, step_size: Tensor, decay: Tensor) -> None:
    """One Adam step, in place (RECIPE 3.4). step_size: bias-corrected learning rate; decay: lr^2 * weight decay.

        m <- beta1 * m + (1 - beta1) * grad_scale * grad
        v <- beta2 * v + (1 - beta2) * (grad_scale * grad)^2
        p <- cautious_adam(p, step_size * m / (sqrt(v) + eps), decay)
    """
    grad = grad.to(m.dtype) * grad_scale
    beta1, beta2 = betas
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square_(), 1 - beta2)
    # In MKL, sqrt(0) takes 8 times as long as sqrt(tiny), of the smallest normal number; the default eps absorbs it.
    denominator = v.clamp_min(torch.finfo(v.dtype).tiny).sqrt_().add_(eps)
    update = (m / denominator).mul_(step_size)
    p.copy_(cautious_adam(p.to(m.dtype), update, decay))

def rowwise_update(rows: Tensor, v: Tensor, last_update: Tensor, grad: Tensor, grad_scale: float, update_num: Tensor,
                   beta2: float, eps: float, step_size: Tensor, decay: Tensor) -> None:
    """One Adam step, in place, on n rows (n, D), without first moment, with one v per row; see also adam_update.

        g           =  grad_scale * grad
        v           <- beta2^(update_num - last_update) * v + (1 - beta2) * (mean of g^2 over each row)
        last_update <- update_num
        rows        <- cautious_adam(rows, step_size * g / (sqrt(v) + eps), decay)

    last_update (n,): number of that update, from 1; 0: none. v (n,) decays as if gradients had been 0 since then.
    """
    grad = grad * grad_scale
    v_decay = torch.pow(beta2, (update_num - last_update).double()).to(v.dtype)           # in f64, rounded once
    v.copy_(v * v_decay + (1 - beta2) * grad.square().mean(dim=1))
    last_update.copy_(update_num.expand_as(last_update))
    update = grad / (v.sqrt() + eps)[:, None] * step_size
    rows.copy_(cautious_adam(rows.to(grad.dtype), update, decay))

def init_optimizer_state(spec: ParameterSpec, shard: Tensor) -> dict[str, Tensor]:
    """Zeros for a weight or shard, in f32 (f64 for f64): Adam's m and v, or NorMuon's momentum and second moment.

    `second`: (M, rows, 1), or (M, 1, columns) if columns > rows. bf16: also `mantissa`, i16, low bits of f32 weights.
    """
    zeros = functools.partial(torch.zeros_like, dtype=accum_dtype(shard.dtype))
    if spec.optimizer == "adam":
        return dict(m=zeros(shard), v=zeros(shard))
    axis = -1 if shard.shape[-2] >= shard.shape[-1] else -2
    state = dict(momentum=zeros(shard), second=zeros(shard.narrow(axis, 0, 1)))
    if shard.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(shard, dtype=torch.int16)
    return state

def cpu_scalar(value: float) -> Tensor:
    """A scalar that changes every step, as a tensor: torch.compile would recompile for every value of a float."""
    return torch.tensor(value, dtype=torch.float64)

class Optimizer:
    """Updates of this rank: NorMuon for banks on every step, row-wise Adam for n-gram tables, Adam for all others.

    Gradients are sums over sequences and ranks; the updates multiply them by 1 / S.
    """
    def __init__(self, cfg: Config, comm: Communicator, model: GPT, tables: dict[str, Table],
                 accumulates: bool) -> None:
        """Makes groups and state. Moves banks and the head to padded buffers, and gives them a main_grad."""
        self.cfg, self.comm, self.model = cfg, comm, model
        self.grad_scale = 1 / cfg.seqs_per_step
        self.adam = compile_fn(adam_update, cfg, comm)
        self.normuon = compile_fn(normuon_update, cfg, comm, round_as_eager=True)             # RECIPE 3.1
        self.rowwise = compile_fn(rowwise_update, cfg, comm)
        self.groups: dict[str, Table | ShardedGroup | ReplicatedGroup] = dict(tables)
        self.lr_muls: dict[str, Tensor] = {}              # of the matrices in this rank's shard of a bank, (M, 1, 1)
        for spec in model.specs.values():
            weight = model.get_parameter(spec.label)
            if spec.optimizer == "normuon":
                # The forward pass uses q, k and v of a layer as one matrix (3D, D), NorMuon as three: it cuts all
                # matrices to the greatest common divisor of their heights.
                shape = -1, math.gcd(*spec.matrix_heights), spec.shape[-1]
                # With one micro-batch per step, main_grad sums nothing, so it can have the dtype of the weight.
                group = ShardedGroup(comm, spec, weight, weight.data.view(shape), accumulates, 1)
                self.groups[spec.label] = group
                self.lr_muls[spec.label] = self.matrix_lr_muls(spec, group)
            elif spec.matrices:                               # the head
                self.groups[spec.label] = ShardedGroup(comm, spec, weight, weight.data, True, cfg.adam_every)
        replicated = [spec for spec in model.specs.values() if spec.label not in self.groups]
        weights = [model.get_parameter(spec.label) for spec in replicated]
        self.groups[REPLICATED] = ReplicatedGroup(comm, replicated, weights, cfg.adam_every)
        self.state = {spec.label: init_optimizer_state(spec, shard) for group in self.groups.values()
                      for spec, shard in zip(group.specs, group.shards)}
        ngrams = (table.label for table in cfg.tables)    # they go before REPLICATED
        order = (*UPDATE_ORDER[:-1], *ngrams, UPDATE_ORDER[-1])
        self.order = [label for label in order if label in self.groups]
        assert sorted(self.order) == sorted(self.groups), "UPDATE_ORDER must have every group once"

    def matrix_lr_muls(self, spec: ParameterSpec, group: ShardedGroup) -> Tensor:
        """Learning rate multiplier of each matrix in this rank's shard of a bank, (M, 1, 1).

        It is the multiplier in spec.matrices, times sqrt(rows / columns) if the matrix is tall.
        """
        *_, rows, columns = group.padded.shape            # the bank, padded to W equal shards
        aspect_mul = max(1.0, rows / columns) ** 0.5
        one_layer = []
        for _name, height, lr_mul in spec.matrices:       # each counts as height / rows matrices: qkv as three
            one_layer += [lr_mul * aspect_mul] * (height // rows)
        lr_muls = group.padded.new_tensor(one_layer, dtype=accum_dtype(group.padded.dtype))
        return lr_muls.repeat(spec.shape[0])[group.shard_slice, None, None]   # once per layer; without padding

    @torch.no_grad()
    def reset(self) -> None:
        """Zero optimizer state and n-gram tables; drop gradients, cached rows and counts of exchanged bytes."""
        for state in self.state.values():
            for x in state.values():
                x.zero_()
        for group in self.groups.values():
            group.reset()

    @torch.no_grad()
    def step(self, step_cfg: StepConfig) -> None:
        """Reduce gradients, update what is due in this step, gather weights, untie if it is time. Collective."""
        due = [label for label in self.order if (step_cfg.step + 1) % self.groups[label].update_every == 0]
        # While head and embedding are tied, they are one parameter: add the embedding's gradient to that of the head.
        if step_cfg.tied and "embed" in due:
            self.groups["embed"].add_grads_to_head(self.model.lm_head.main_grad)
            due.remove("embed")

        # All reductions before the first update, and all gathers before waiting for one, so that they overlap.
        for label in due:
            self.groups[label].launch_reduce()
        # To use all gradients at once, for example to clip by the global norm, call reduced_grads() of all groups here,
        # and not again below. Ranks own disjoint shards, but each has all gradients of the group REPLICATED.
        gather_works = []
        updates = dict(adam=self.update_adam, normuon=self.update_normuon, rowwise=self.update_rowwise)
        for label in due:
            group = self.groups[label]
            for spec, shard, grad in zip(group.specs, group.to_update(), group.reduced_grads()):
                updates[spec.optimizer](spec, shard, grad, step_cfg)
            gather_works.append(group.launch_gather())
            group.zero_grad()
        for work in gather_works:
            wait_for_work(work)
        if step_cfg.untie_after:
            self.untie()

    def update_normuon(self, spec: ParameterSpec, shard: Tensor, grad: Tensor, step_cfg: StepConfig) -> None:
        if not len(shard):               # more ranks than matrices
            return
        state = self.state[spec.label]
        lr = cpu_scalar(step_cfg.normuon_lr)
        decay_per_lr = lr * self.cfg.normuon_weight_decay     # normuon_update multiplies by lr again
        self.normuon(shard, state.get("mantissa"), grad, state["momentum"], state["second"], self.grad_scale,
                     cpu_scalar(step_cfg.momentum), lr, self.lr_muls[spec.label], decay_per_lr, self.cfg.normuon_beta2)

    def update_adam(self, spec: ParameterSpec, p: Tensor, grad: Tensor, step_cfg: StepConfig) -> None:
        state = self.state[spec.label]
        _update_num, step_size, decay = self.adam_scalars(spec, step_cfg)     # decay: lr^2 * weight decay (RECIPE 3.3)
        self.adam(p, grad, state["m"], state["v"], self.grad_scale, spec.betas, self.cfg.adam_eps, step_size, decay)

    def update_rowwise(self, spec: ParameterSpec, row_copies: RowState, grad: Tensor, step_cfg: StepConfig) -> None:
        """Update row_copies (rows, v, last_update) in place. `RowwiseTable.launch_gather` writes them to the table."""
        update_num, step_size, decay = self.adam_scalars(spec, step_cfg)
        # On the device, because a copy from the host would synchronize.
        update_num = torch.full((), update_num, dtype=torch.int32, device=grad.device)
        if self.comm.compiles(self.cfg):                  # do not recompile when the number of rows changes
            for x in (*row_copies, grad):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        self.rowwise(*row_copies, grad, self.grad_scale, update_num, spec.betas[1], self.cfg.adam_eps, step_size, decay)

    def adam_scalars(self, spec: ParameterSpec, step_cfg: StepConfig) -> tuple[int, Tensor, Tensor]:
        """Number n of the update, from 1; step size lr * sqrt(1 - beta2^n) / (1 - beta1^n); lr^2 * weight decay."""
        update_num = (step_cfg.step + 1) // (spec.table.update_every if spec.table else self.cfg.adam_every)
        beta1, beta2 = spec.betas
        lr = step_cfg.adam_lr * spec.lr_mul
        bias_correction = math.sqrt(1 - beta2**update_num) / (1 - beta1**update_num)
        decay = lr * lr * self.cfg.adam_weight_decay * spec.wd_mul            # quadratic in lr (RECIPE 3.3)
        return update_num, cpu_scalar(lr * bias_correction), cpu_scalar(decay)

    def untie(self) -> None:
        """Copy weights and Adam moments of the head to the embedding. Collective."""
        rank, W = self.comm.rank, self.comm.world_size
        rows = self.model.lm_head.t()[rank::W]            # this rank's embedding rows: rank, rank + W, ...
        self.groups["embed"].shards[0][:len(rows)] = rows
        for name, embed_moment in self.state["embed"].items():
            # Moments of the head (D, V) are sharded along D, in shards of shard_size = D / W, rounded up.
            shard = self.state["lm_head"][name]
            padded = F.pad(shard, (0, 0, 0, self.groups["lm_head"].shard_size - len(shard)))
            whole = padded.repeat(W, 1)                   # filled by all_gather, which `launch` skips if W = 1
            wait_for_work(self.comm.launch(dist.all_gather_into_tensor, whole, padded))
            embed_moment[:len(rows)] = whole.t()[rank::W, :rows.shape[1]]


# ====== Section 5: Step ===============================================================================================
EVAL_CHUNK = dict(cuda=8192, cpu=256)    # positions per chunk of validation logits; one chunk is in memory at a time

class StepLoss(NamedTuple):
    """Losses of one forward_backward on this rank, on the device, because copying them would synchronize."""
    seq_sums: Tensor                     # (sequences,): summed multi-token loss of each sequence of this rank
    next_sum: Tensor                     # (): summed next-token loss of all these sequences

class Engine:
    """Model, tables and optimizer of this rank. Knows neither logs nor the schedule: methods get the StepConfig."""
    def __init__(self, cfg: Config, comm: Communicator, attention: Callable, head_precision: str | None) -> None:
        """head_precision: "plain", "fp8" or "emulated" for the training logits; None: evaluation only, no optimizer."""
        self.cfg, self.comm, self.head_precision = cfg, comm, head_precision
        self.accum_dtype = accum_dtype(getattr(torch, cfg.dtype))
        # Buffers are allocated for the largest batch of the run, so that their shapes and addresses never change.
        largest_batch = max(stage.batch_tokens for stage in cfg.stages)
        max_seq_len = max(cfg.val_batch_tokens, largest_batch) // cfg.seqs_per_step
        self.shard_rows = {table.label: table.shard_rows(comm.world_size) for table in table_specs(cfg)}
        self.model = GPT(cfg, attention, max_seq_len, self.shard_rows).to(comm.device)
        self.tables: dict[str, Table] = {}
        for spec in parameter_specs(cfg):
            if spec.table:
                tokens_per_update = spec.table.update_every * largest_batch // comm.world_size if head_precision else 0
                self.tables[spec.label] = make_table(spec, cfg, comm, self.model, tokens_per_update)

        self.uses_compile = comm.compiles(cfg)
        self.compiles_code = self.uses_compile or comm.on_cuda    # Triton kernels are compiled, too
        if self.uses_compile:
            torch._dynamo.config.recompile_limit = 64     # each set of input shapes compiles a function anew
        self.model_hidden = compile_fn(self.model.hidden_states, cfg, comm)
        # "emulated" rounds logits to bf16, as "fp8" does (RECIPE 2.8).
        self.model_losses = compile_fn(self.model.losses, cfg, comm, round_as_eager=head_precision == "emulated")
        self.next_token_losses = compile_fn(next_token_losses, cfg, comm)
        self.optimizer: Optimizer | None = None
        if head_precision:
            accumulates = cfg.micro_batch_size * comm.world_size < cfg.seqs_per_step
            self.optimizer = Optimizer(cfg, comm, self.model, self.tables, accumulates)
        self.reset(cfg.seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Set the initial weights of a seed; zero optimizer state and row-wise tables; drop gradients, cached rows."""
        for label, weight in initial_weights(self.cfg, seed):
            if label in self.shard_rows:                  # rank r has rows r, r + W, ..., padded to C rows
                weight = weight[self.comm.rank::self.comm.world_size]
                weight = F.pad(weight, (0, 0, 0, self.shard_rows[label] - len(weight)))
            self.model.get_parameter(label).copy_(weight)
        if self.optimizer:
            self.optimizer.reset()
        self.filled_rotary: Rotary | None = None          # now in the RoPE buffers; None: refill them before next use

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far in this process."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.uses_compile else 0

    def tensors(self) -> dict[str, Tensor]:
        """This rank's weights and optimizer state without row-wise tables, by name ("attn", "attn.momentum")."""
        state = {f"{label}.{name}": x for label, by_name in self.optimizer.state.items() for name, x in by_name.items()}
        return self.model.state_dict() | state

    def forward_backward(self, batch: Batch, step_cfg: StepConfig, loss_scale: float = 1.0) -> StepLoss:
        """Add loss_scale * d(summed multi-token losses of the batch) / d(weights) to the gradients. Collective.

        The returned sums are of this rank's losses, without loss_scale. Does not wait for the device.
        """
        self.set_attention(step_cfg, min(self.cfg.max_doc_len, batch.tokens.shape[1]))
        # Requests the rows in batch.plans, unless `fetch_rows` has. The compute stream waits for them.
        row_buffers = {label: table.rows_for_forward(batch.plans[label]) for label, table in self.tables.items()}
        # Filled on the device, because copies from the host would synchronize.
        mtp_weights = torch.stack([torch.full((), weight, dtype=self.accum_dtype, device=self.comm.device)
                                   for weight in step_cfg.mtp_weights])
        seq_sums_by_micro_batch, next_sums = [], []
        for micro_batch in self.micro_batches(batch):         # their size changes the results only by rounding
            losses, next_losses = self.model_losses(micro_batch, mtp_weights, self.head_precision, row_buffers)
            next_sums.append(next_losses.sum())
            seq_sums = losses.sum(dim=1)
            (loss_scale * seq_sums.sum()).backward()
            seq_sums_by_micro_batch.append(seq_sums.detach())
        return StepLoss(torch.cat(seq_sums_by_micro_batch), torch.stack(next_sums).sum())

    def optim_step(self, step_cfg: StepConfig) -> None:
        self.optimizer.step(step_cfg)

    def fetch_rows(self, plans: dict[str, RowPlan]) -> None:
        """Start to fetch the rows of the next step, unless that was done before. plans: {table: plan}. Collective."""
        for label, plan in plans.items():
            self.tables[label].fetch(plan)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], step_cfg: StepConfig) -> float:
        """Validation loss: mean next-token loss of all ranks, in nats per token; no fp8 head. Collective."""
        total_loss = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        num_tokens = 0
        chunk_len = EVAL_CHUNK[self.comm.device.type]
        for batch in batches:
            row_buffers = self.prepare_eval(batch, step_cfg)
            for micro_batch in self.micro_batches(batch):
                hidden = self.model_hidden(micro_batch, row_buffers).flatten(0, 1)
                for chunk, targets in zip(hidden.split(chunk_len), micro_batch.targets.flatten().split(chunk_len)):
                    losses = self.next_token_losses(chunk, self.model.lm_head, targets)
                    total_loss += losses.sum(dtype=torch.float64)
            num_tokens += batch.targets.numel() * self.comm.world_size
        return sum(self.comm.all_gather(float(total_loss))) / num_tokens

    @torch.no_grad()
    def next_logits(self, tokens: list[int], step_cfg: StepConfig) -> Tensor:
        """Softcapped logits (V,) of the token after `tokens`, cut on the left to a validation length. Collective."""
        # Attention is causal, so padding after the context changes nothing.
        context = tokens[-(self.cfg.val_batch_tokens // self.cfg.seqs_per_step):]
        seq_len = -(-len(context) // FP8_MULTIPLE) * FP8_MULTIPLE
        padded = np.zeros(seq_len + 1, np.uint16)
        padded[:len(context)] = context
        seq = PackedSeq(padded, cu_seqlens=np.asarray([0, seq_len], np.int32))
        batch, = build_batches(self.cfg, self.comm, process_group=None, cycle=[step_cfg], seqs_by_step=[[seq]])
        batch = batch.to(self.comm.device)
        hidden_states = self.model.hidden_states(batch, self.prepare_eval(batch, step_cfg))  # (1, seq_len, D)
        return softcap((hidden_states[0, len(context) - 1] @ self.model.lm_head).to(self.accum_dtype))

    def prepare_eval(self, batch: Batch, step_cfg: StepConfig) -> RowBuffers:
        """Set RoPE and attention arguments, fetch table rows. Collective."""
        row_buffers = {}
        for label, table in self.tables.items():
            rows = table.fetch_for_eval(batch.plans[label])
            if self.uses_compile:        # do not recompile when the number of rows changes
                torch._dynamo.maybe_mark_dynamic(rows, 0)
            row_buffers[label] = rows, None               # no gradient buffer
        # Evaluation does not cut documents to max_doc_len: T bounds their length.
        self.set_attention(step_cfg, batch.tokens.shape[1])
        return row_buffers

    def set_attention(self, step_cfg: StepConfig, max_doc_len: int) -> None:
        """Refill the RoPE buffers if step_cfg.rotary is new; set attention's windows, softmax scale and max_doc_len."""
        if step_cfg.rotary != self.filled_rotary:
            self.model.set_rotary(step_cfg.rotary.frequencies)
            self.filled_rotary = step_cfg.rotary
        set_attention_args(step_cfg, max_doc_len)

    def micro_batches(self, batch: Batch) -> Iterable[Batch]:
        for first_seq in range(0, len(batch.tokens), self.cfg.micro_batch_size):
            micro_batch = batch.map(lambda x: x[first_seq:first_seq + self.cfg.micro_batch_size])
            if self.uses_compile:        # do not recompile when the number of documents changes
                torch._dynamo.maybe_mark_dynamic(micro_batch.cu_seqlens, 1)
            yield micro_batch

def train_step(engine: Engine, loader: Loader, step_cfg: StepConfig) -> StepLoss:
    """Train on one step, and start to fetch the rows of the next one. Does not wait for the device. Collective."""
    losses = engine.forward_backward(loader.next(), step_cfg)
    # After the last batch of a cycle, this waits for the loader thread, while the GPU computes the backward pass.
    next_step_plans = loader.next_step_plans()
    engine.optim_step(step_cfg)
    engine.fetch_rows(next_step_plans)
    return losses

def train_loop(engine: Engine, loader: Loader, validation: ValidationSet, clock: Clock,
               log: Log) -> tuple[float, OutOfData | None]:
    """Train from step log.steps_done until the schedule or the data ends, with checkpoints, then validate. Collective.

    Returns the final validation loss, in nats per token, and the error if the data ended early or changed. The clock
    includes data, row plans, steps and logging; it stops for validations and checkpoints.
    """
    schedule = log.schedule
    last_checkpoint = log.steps_done
    out_of_data = None
    clock.start()
    with log.phase("first batch", on_clock=True):
        loader.start()
    try:
        while log.steps_done < schedule.end_step:
            step_cfg = schedule.at(log.steps_done)
            if step_cfg.checkpoint and step_cfg.step > last_checkpoint:
                clock.stop()
                write_checkpoint(engine, clock, log)
                last_checkpoint = step_cfg.step
                clock.start()
            if step_cfg.validate:
                clock.stop()
                log.validation(engine.evaluate(validation.batches(step_cfg), step_cfg), clock.ms, validation)
                clock.start()
            log.step(train_step(engine, loader, step_cfg), clock.ms)
    except OutOfData as error:           # the caller raises it, after validating and saving
        out_of_data = error
    clock.stop()
    log.flush()
    end_cfg = schedule.at(log.steps_done)                 # at the end of the schedule, its attention window is wider
    if (end_cfg.checkpoint or out_of_data and schedule.cfg.checkpoint_every) and end_cfg.step > last_checkpoint:
        write_checkpoint(engine, clock, log)              # between cycles, as it must be: data ends only there
    with log.phase("evaluation"):
        loss = engine.evaluate(validation.batches(end_cfg), end_cfg)
    log.validation(loss, clock.ms, validation)
    return loss, out_of_data


# ====== Section 6: Base ===============================================================================================
class TrainerError(Exception):
    """An error that ends the run and is no bug: `main` prints its message without a traceback."""
    exit_status = 1

class ConfigError(TrainerError):
    """Wrong settings, data or launch."""
    exit_status = 2

def check(ok: object, message: str, error: type[TrainerError] = ConfigError) -> None:
    """Raise `error` unless `ok` is true. The message says what is wrong and which value would be right."""
    if not ok:
        raise error(message)

def wait_for_work(work: dist.Work | None) -> None:
    """Wait for a collective, if any. With NCCL, the current stream waits, not the host."""
    if work is not None:
        work.wait()

def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of accumulators and optimizer state for weights of `dtype`: f32, or f64 for f64."""
    return torch.promote_types(dtype, torch.float32)

@dataclass(eq=False)
class Communicator:
    """Rank, device and collectives of this process. With one rank, the collectives do nothing."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    # The loader thread exchanges row plans over its own gloo group, because all ranks must launch the collectives of a
    # group in the same order.
    loader_group: dist.ProcessGroup | None = None
    timeout: float = 600.0           # s, of every wait

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def launch(self, collective: Callable, *tensors: Tensor) -> dist.Work | None:
        """Launch a collective such as dist.all_reduce; None if W = 1."""
        return collective(*tensors, async_op=True) if self.world_size > 1 else None

    def all_gather(self, obj: Any, process_group: dist.ProcessGroup | None = None) -> list[Any]:
        """One picklable object from every rank, in rank order. Collective."""
        objs = [obj] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(objs, obj, process_group)
        return objs

    def check_agreement(self, facts: dict[str, str]) -> None:
        """Raise ConfigError on every rank unless all agree on the facts {name: value}. Collective."""
        differing = set()
        for rank_facts in self.all_gather(facts):
            differing.update(name for name, _ in rank_facts.items() ^ facts.items())
        check(not differing, f"ranks have different {', '.join(sorted(differing))}: use equal flags and files on all")

    def wait_for_result(self, future: Future, what: str) -> Any:
        """Result of a background task, after at most `timeout` seconds."""
        try:
            return future.result(self.timeout)
        except TimeoutError:
            raise TrainerError(f"{what}: no result after {self.timeout:g} s; check the disk and the other ranks, or "
                               "give a longer --comm_timeout") from None

    def pinned(self, x: np.ndarray | Tensor) -> Tensor:
        """CPU tensor, pinned if the device is a GPU. It may be dropped while an asynchronous copy from it runs."""
        tensor = torch.as_tensor(x)
        return tensor.pin_memory() if self.on_cuda else tensor

    def set_thread_device(self) -> None:
        """Call this first in a new thread: otherwise, pinning memory there would create a CUDA context on GPU 0."""
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def print0(self, text: str) -> None:
        if self.rank == 0:
            with contextlib.suppress(OSError):            # a closed console does not end a run
                print(text, flush=True)

    def compiles(self, cfg: Config) -> bool:
        return cfg.compile == 1 or bool(cfg.compile and self.on_cuda)  # -1: on CUDA only

class Group:
    """Parameters that are reduced and updated together: this rank's part of a table (section 9) or of weights (11).

    `Optimizer.step` calls launch_reduce (sums over ranks), to_update, reduced_grads, launch_gather, and zero_grad.
    to_update and reduced_grads return one item per spec; the spec's update rule gets both before launch_gather.
    """
    specs: list[ParameterSpec]
    update_every: int                # steps per update
    shards: list[Tensor]             # what this rank updates in place; [] for row-wise tables

    def to_update(self) -> list[Any]:
        return self.shards

    def launch_gather(self) -> dist.Work | None:
        """Start to send the updated weights to the ranks that need them. Collective."""

def compile_fn(fn: Callable, cfg: Config, comm: Communicator, *, round_as_eager: bool = False) -> Callable:
    """`fn`, compiled if this run uses torch.compile.

    round_as_eager: round every bf16 result, as eager code does. Otherwise Inductor keeps f32 values between fused
    operations.
    """
    options = {"emulate_precision_casts": round_as_eager}
    return torch.compile(fn, dynamic=False, fullgraph=True, options=options) if comm.compiles(cfg) else fn


# ====== Section 7: Kernels ============================================================================================
# The PyTorch reference of an operation runs on every device. A Triton kernel matches the reference next to it. Backward
# functions write buffers or change tensors in place, so no second derivative exists: once_differentiable refuses
# create_graph=True, except where the upstream gradient does not require grad. Shapes: see the head of the file.
RMS_EPS = 2.0**-23                       # modded-nanogpt's epsilon for bf16, used for every dtype here
FP8_MAX = 448.0                          # largest e4m3 value
# Dequantization scales of the fp8 head (RECIPE 2.8), as f32 values. Multiply scales in f64, and round the result once.
FP8_Y_SCALE = float(np.float32(100 / FP8_MAX))
FP8_W_SCALE = float(np.float32(1.6 / FP8_MAX))
FP8_GRAD_SCALE = float(np.float32(0.75 / FP8_MAX))
ADD_ROWS_BLOCK = 16                      # gradients that a program of add_rows_kernel loads per iteration
ADD_ROWS_CHUNK = 128                     # lookups that a program sums, at most
CPU_CHUNK_LOGITS = 1 << 19               # logits per chunk on a CPU, so that a chunk and its temporaries fit in cache
LOGIT_CAP, LOGIT_SHIFT, LOGIT_WIDTH = 23.0, 5.0, 7.5      # z = 23 sigmoid((logit + 5) / 7.5)
LOSS_BLOCK = 4096                        # columns that a program of mtp_loss_kernel loads at a time, into fp8 gradients

tl = None                                # triton.language, once `triton_jit` has imported it: CPUs need no Triton

@functools.cache
def triton_jit(kernel: Callable) -> Any:
    """triton.jit(kernel). Imports Triton, and sets the global `tl` that kernels use."""
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(kernel, do_not_specialize=["num_lookups"])            # else it may recompile in a step

def is_eager_cpu(x: Tensor) -> bool:
    """Whether operations on x, in f32 or f64, run one by one on a CPU. Fewer passes then need code of their own."""
    return not x.is_cuda and x.dtype != torch.bfloat16 and not torch.compiler.is_compiling()

class EagerRMSNorm(torch.autograd.Function):
    """F.rms_norm but for rounding, in fewer passes. Backward: (g - y * mean(g * y)) * inverse_rms."""
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse_rms = (norm.square() / x.shape[-1] + RMS_EPS).rsqrt()
        y = x * inverse_rms
        ctx.save_for_backward(y, inverse_rms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, inverse_rms = ctx.saved_tensors
        projection = (grad * y).sum(dim=-1, keepdim=True)
        return torch.addcmul(grad, y, projection, value=-1 / y.shape[-1]).mul_(inverse_rms)

def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + RMS_EPS) over the last dimension."""
    return EagerRMSNorm.apply(x) if is_eager_cpu(x) else F.rms_norm(x, x.shape[-1:], eps=RMS_EPS)

def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: rotate the channel pairs (2i, 2i + 1) in the first half of every head by -angle.

        out[2i]     = x[2i] * cos(angle) + x[2i + 1] * sin(angle)
        out[2i + 1] = x[2i + 1] * cos(angle) - x[2i] * sin(angle)

    cos and sin have one value per channel. In channel 2i + 1, sin is -sin(angle). In the second half, angle is 0.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if is_eager_cpu(x):                  # a complex product takes one pass
        rotation = torch.complex(cos[..., ::2], sin[..., 1::2])
        return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2)
    return x * cos + pairs.flip(-1).flatten(-2) * sin     # flip takes fewer passes than splitting x


# ---- Attention: causal, within documents and a sliding window. q, k, v, out and their gradients are (N, H, E);
# cu_seqlens (num_docs + 1,) i32 has cumulative document lengths, from 0 to N; logsumexp is (H, N) f32.
class AttentionArgs(NamedTuple):
    max_seqlen: int                      # upper bound of the document length, in positions
    window: int                          # earlier positions that a query sees, at most
    scale: float


# Of the current step, by kind of layer, such as "paired long". An attention function gets only the kind, because
# torch.compile recompiles when a value that it reads changes. (A CPU tensor of values would not either, but Inductor
# then loads and stores outputs 2 bytes at a time.)
ATTENTION_ARGS: dict[str, AttentionArgs] = {}

class KeyBlocks(torch.autograd.Function):
    """Keys or values (N, H, E) -> (num_blocks, H, 2 * block_len, E): of each block, the previous one, then its own."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, block_len: int) -> Tensor:
        ctx.N = len(x)
        padded = F.pad(x, (0, 0, 0, 0, block_len, -len(x) % block_len))
        return padded.unfold(0, 2 * block_len, block_len).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        previous, own = grad.transpose(1, 2).chunk(2, dim=1)  # (num_blocks, block_len, H, E)
        grad_x = own.contiguous()
        grad_x[:-1] += previous[1:]      # from the next block's queries
        return grad_x.flatten(0, 1)[:ctx.N], None

def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> Tensor:
    """PyTorch reference, in O(N * window). Documents may be empty."""
    # The lookback is the largest distance to a key. A block has at least `lookback` queries, or all queries, so a query
    # sees only keys of its block and of the previous one.
    attn_args = ATTENTION_ARGS[layer_kind]
    N = len(q)
    lookback = min(attn_args.window, attn_args.max_seqlen - 1)
    block_len = min(N, max(lookback, 32))                 # the overhead of smaller blocks exceeds what they save
    queries = F.pad(q, (0, 0, 0, 0, 0, -N % block_len)).unflatten(0, (-1, block_len)).transpose(1, 2)
    keys, values = (KeyBlocks.apply(x, block_len) for x in (k, v))

    # A query sees keys from the start of its document, or of its window, to itself. Padding queries see only padding.
    positions = torch.arange(len(queries) * block_len, device=q.device)
    doc_starts = cu_seqlens[torch.searchsorted(cu_seqlens.long(), positions, right=True) - 1]
    first_key = torch.maximum(doc_starts, positions - attn_args.window).view(-1, 1, block_len, 1)
    last_key = positions.view(-1, 1, block_len, 1)
    key_pos = last_key[:, :, :1] + torch.arange(-block_len, block_len, device=q.device)
    visible = (key_pos >= first_key) & (key_pos <= last_key)              # (num_blocks, 1, block_len, 2 * block_len)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=attn_args.scale)
    return out.transpose(1, 2).flatten(0, 1)[:N]

def varlen_kwargs(cu_seqlens: Tensor, layer_kind: str) -> dict[str, Any]:
    """Arguments that torch's _varlen_attn and _varlen_attn_backward share."""
    attn_args = ATTENTION_ARGS[layer_kind]
    # Causal by window_size = (left, right = 0), not by is_causal.
    return dict(cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=attn_args.max_seqlen, max_k=attn_args.max_seqlen,
                is_causal=False, scale=attn_args.scale, window_size=[attn_args.window, 0])

@torch.library.custom_op("train_gpt::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """torch's varlen attention: (out, logsumexp, rng_state of a dropout that is not used)."""
    return torch.ops.torch_attn._varlen_attn(q, k, v, **varlen_kwargs(cu_seqlens, layer_kind))

@varlen.register_fake
def _(*inputs: Tensor | str) -> tuple[Tensor, Tensor, Tensor]:
    *qkv, cu_seqlens, _ = inputs
    return torch.ops.torch_attn._varlen_attn(*qkv, cu_seqlens, cu_seqlens, max_q=1, max_k=1)  # any max_q, max_k will do

@torch.library.custom_op("train_gpt::varlen_backward", mutates_args=())
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor,
                    logsumexp: Tensor, rng_state: Tensor, layer_kind: str) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.torch_attn._varlen_attn_backward(grad, q, k, v, out, logsumexp, rng_state=rng_state,
                                                      **varlen_kwargs(cu_seqlens, layer_kind))

@varlen_backward.register_fake
def _(_: Tensor, *inputs: Tensor | str) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs[:3]))

class Varlen(torch.autograd.Function):
    """torch's varlen attention. The public `varlen_attn` of torch would recompile in every stage."""
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | str) -> Tensor:
        *tensors, ctx.layer_kind = inputs                 # (q, k, v, cu_seqlens) and, for example, "plain long"
        out, *for_backward = varlen(*inputs)
        ctx.save_for_backward(*tensors, out, *for_backward)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *varlen_backward(grad, *ctx.saved_tensors, ctx.layer_kind), None, None

def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> Tensor:
    """FA2, FA3 or FA4, whichever is active in torch. Requires CUDA and bf16 or f16."""
    return Varlen.apply(q, k, v, cu_seqlens, layer_kind)


# ---- main_grad. Backward accumulates the gradient of a weight matrix (I, J) in a buffer at once, and returns None to
# autograd. A weight whose hooks need a gradient has the attribute GRAD_ADDED_FLAG (Megatron's): backward sets it to
# True, and returns zeros.
GRAD_ADDED_FLAG = "grad_added_to_main_grad"

def custom_op_in_graphs(fn: Callable, mutates_args: tuple[str, ...]) -> Callable:
    """Compiled graphs call `fn` as a custom op. Eager code calls `fn` itself, which saves 50 to 100 us."""
    op = torch.library.custom_op(f"train_gpt::{fn.__name__}", fn, mutates_args=mutates_args)

    @functools.wraps(fn)
    def wrapper(*args: Any) -> None:
        return op(*args) if torch.compiler.is_compiling() else fn(*args)
    return wrapper

@functools.partial(custom_op_in_graphs, mutates_args=("main_grad", "write_counts"))
def add_to_main_grad(main_grad: Tensor, write_counts: Tensor, matrix_idx: int, a: Tensor, b: Tensor | None) -> None:
    """Add a^T b, or `a` (I, J) if b is None, to main_grad (I, J); overwrite it on the first write since zero_grad.

    For a weight (out, in), a is the output gradient (N, I) and b the input (N, J); for (in, out), the reverse.
    write_counts i64 on the CPU: writes since zero_grad to each matrix of the parameter; this one has index matrix_idx.
    """
    # The count is read at run time, so that first and later writes share a graph. With beta = 0, addmm does not read
    # main_grad, which may be NaN.
    beta = min(int(write_counts[matrix_idx]), 1)
    write_counts[matrix_idx] += 1
    dtype = main_grad.dtype
    if b is None and beta == 0:
        main_grad.copy_(a)
    elif b is None:
        main_grad.add_(a)
    elif a.is_cuda and a.dtype != dtype:                      # accumulates in f32 without converted copies
        torch.addmm(main_grad, a.t(), b, out_dtype=dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(a.t().to(dtype), b.to(dtype), beta=beta)


# Deferred calls of add_gradient: matrix, and the arguments a and b, which must not be changed in place.
DeferredGrads = list[tuple["WeightMatrix", Tensor, "Tensor | None"]]

class WeightMatrix(NamedTuple):
    """One matrix of a parameter, and where its gradient goes.

    To give a parameter (I, J) a main_grad, set two attributes: main_grad, zeros (I, J) in f32, f64 or its own dtype,
    and write_counts, zeros (1,) i64 on the CPU. write_counts.zero_() clears the gradient.
    """
    param: Tensor
    matrix: Tensor                       # (I, J): param itself, a view of one matrix of a bank, or a transposed view
    main_grad: Tensor | None = None      # this matrix's view of param.main_grad; None: autograd uses .grad
    matrix_idx: int = 0                  # index of this matrix in param.write_counts
    deferred: DeferredGrads | None = None  # queue for `run_deferred`, in eager code; the trainer uses None

    def t(self) -> WeightMatrix:
        """The transposed matrix: linear_main_grad(x, weight.t()) is x @ weight.matrix."""
        main_grad = None if self.main_grad is None else self.main_grad.t()
        return self._replace(matrix=self.matrix.t(), main_grad=main_grad)

    def add_gradient(self, a: Tensor, b: Tensor | None) -> Tensor | None:
        """Queue the gradient a^T b (b None: `a`), else add it to main_grad, else return it. Result: for autograd."""
        if not self.param.requires_grad:
            return None
        if self.deferred is not None:
            self.deferred.append((self, a, b))
        elif self.main_grad is None:
            return a if b is None else a.t() @ b
        else:
            add_to_main_grad(self.main_grad, self.param.write_counts, self.matrix_idx, a, b)
        # If flagged, the weight's hooks need a gradient: new zeros, as autograd may change main_grad in place.
        if self.main_grad is None or not hasattr(self.param, GRAD_ADDED_FLAG):
            return None
        setattr(self.param, GRAD_ADDED_FLAG, True)
        return torch.zeros_like(self.matrix)

@torch.no_grad()
def run_deferred(deferred: DeferredGrads) -> None:
    """Accumulate all queued gradients a^T b in main_grad or .grad; clear the queue. Call it before optim_step."""
    for weight, a, b in deferred:
        grad = weight._replace(deferred=None).add_gradient(a, b)
        if weight.main_grad is None:     # if `matrix` is a view, autograd adds it to param.grad
            weight.matrix.backward(grad)
    deferred.clear()

def as_matrix(param: Tensor, deferred: DeferredGrads | None = None) -> WeightMatrix:
    """WeightMatrix of a parameter that is a single matrix."""
    return WeightMatrix(param, param, getattr(param, "main_grad", None), deferred=deferred)

def matrices_by_layer(bank: Tensor, matrix_heights: tuple[int, ...]) -> list[list[WeightMatrix]]:
    """Split a bank (L, ..., J) of matrices with J inputs: per layer, one WeightMatrix (height, J) for each height."""
    # One `unbind`, not L slices: without main_grad, each slice would get a gradient of the bank's size.
    shape = (len(bank), sum(matrix_heights), bank.shape[-1])
    result = []
    for i, layer in enumerate(bank.view(shape).unbind()):
        main_grads = (bank.main_grad.view(shape)[i].split(matrix_heights) if hasattr(bank, "main_grad")
                      else [None] * len(matrix_heights))
        pairs = enumerate(zip(layer.split(matrix_heights), main_grads), i * len(matrix_heights))
        result.append([WeightMatrix(bank, matrix, main_grad, matrix_idx) for matrix_idx, (matrix, main_grad) in pairs])
    return result

class LinearFunction(torch.autograd.Function):
    """x @ (scale * matrix)^T: x (..., J), scale () or None, matrix (I, J) -> (..., I)."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, matrix: Tensor, grad_target: WeightMatrix) -> Tensor:
        ctx.save_for_backward(x, scale, matrix)
        ctx.grad_target = grad_target
        return F.linear(x, matrix if scale is None else scale * matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, matrix = ctx.saved_tensors
        grad_x = grad_out @ (matrix if scale is None else scale * matrix)
        flat_grad_out, flat_x = grad_out.flatten(0, -2), x.flatten(0, -2)
        if scale is None:
            return grad_x, None, ctx.grad_target.add_gradient(flat_grad_out, flat_x), None
        # Gradient of scale * matrix, in the dtype of main_grad: bf16 would lose bits before main_grad sums it.
        main_grad = ctx.grad_target.main_grad
        dtype = grad_out.dtype if main_grad is None else torch.promote_types(grad_out.dtype, main_grad.dtype)
        if grad_out.is_cuda and grad_out.dtype != dtype:
            grad_weight = torch.mm(flat_grad_out.t(), flat_x, out_dtype=dtype)
        else:
            grad_weight = flat_grad_out.t().to(dtype) @ flat_x.to(dtype)
        grad_of_scale = (grad_weight * matrix).sum()
        return grad_x, grad_of_scale, ctx.grad_target.add_gradient(scale * grad_weight, b=None), None

def linear_main_grad(x: Tensor, weight: WeightMatrix, scale: Tensor | None = None) -> Tensor:
    """x @ (scale * weight.matrix)^T; the weight's gradient accumulates in main_grad, or .grad if there is none."""
    return LinearFunction.apply(x, scale, weight.matrix, weight)


# ---- relu^2 MLP. Forward saves one of relu(x up^T) and its square: the kernel's backward needs the square.
# {compute capability: (tile, (num_stages in forward, in backward))}. The accumulators of a tile fit in registers;
# num_stages is the largest that fits in shared memory, which also holds `squares` in backward.
LARGE_TILE = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8), (4, 3)
RELU_SQ_TILES = {(8, 0): (dict(LARGE_TILE[0], BLOCK_N=128), (3, 3)), (9, 0): LARGE_TILE, (10, 0): LARGE_TILE}

def relu_sq_kernel(x, w, squares, out, M, N, K, BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> None:
    """relu(x w^T)^2. BACKWARD: 2 (x w^T) sqrt(squares). Arguments: see `relu_sq`."""
    # Persistent: each program computes several tiles, and loads operands of the next one while it stores the current
    # one. Storing a tile in two halves leaves more shared memory for the loads. Out-of-bounds loads return 0.
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
    """One matmul of the MLP, fused with the operation after it; requires relu_sq_supports(x, w).

        forward (squares is None)    relu(x w^T)^2              x: input, w: up
        backward                     2 (x w^T) sqrt(squares)    x: output gradient, w: down, squares: forward result
    """
    triton = importlib.import_module("triton")
    device = x.device
    props = torch.cuda.get_device_properties(device)
    tile, num_stages = RELU_SQ_TILES[props.major, props.minor]
    M, K = x.shape
    N = len(w)
    out = x.new_empty(M, N)
    backward = squares is not None
    squares_or_out = squares.contiguous() if backward else out                # the kernel ignores it in forward
    # The lambda allocates tensor descriptors. Triton keeps it, so it must not capture x, which would stay in memory.
    # Set it on every launch: Triton has one allocator per thread, and autograd runs backward on another thread.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    num_tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    triton_jit(relu_sq_kernel)[(min(num_tiles, props.multi_processor_count),)](
        x.contiguous(), w.contiguous(), squares_or_out, out, M, N, K, BACKWARD=backward,
        num_stages=num_stages[backward], **tile)
    return out

@relu_sq.register_fake
def _(x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w))

def relu_sq_supports(x: Tensor, w: Tensor) -> bool:
    """Whether relu_sq supports device, dtype and sizes. torch.compile decides this as it traces."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    # Strides of tensor descriptors must be multiples of 16 bytes.
    aligned = all(size * x.element_size() % 16 == 0 for size in (x.shape[1], len(w)))
    props = torch.cuda.get_device_properties(x.device)
    return aligned and (props.major, props.minor) in RELU_SQ_TILES

class ReluSqMLP(torch.autograd.Function):
    """relu(x up^T)^2 down: x (..., D), up_matrix and down_matrix (F, D) -> (..., D)."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, up_matrix: Tensor, down_matrix: Tensor, up: WeightMatrix,
                down: WeightMatrix) -> Tensor:
        flat_x = x.flatten(0, -2)
        ctx.fused = relu_sq_supports(flat_x, up_matrix)
        saved = relu_sq(flat_x, up_matrix, None) if ctx.fused else F.linear(flat_x, up_matrix).relu_()
        squares = saved if ctx.fused else saved.square()
        ctx.save_for_backward(x, saved, up_matrix, down_matrix)
        ctx.grad_targets = up, down
        return (squares @ down_matrix).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, saved, up_matrix, down_matrix = ctx.saved_tensors
        flat_grad_out = grad_out.flatten(0, -2)
        squares = saved if ctx.fused else saved.square()
        if ctx.fused:
            grad_preact = relu_sq(flat_grad_out, down_matrix, squares)        # as below, in one kernel
        else:
            grad_preact = F.linear(2 * flat_grad_out, down_matrix).mul_(saved)
        up, down = ctx.grad_targets
        grad_x = (grad_preact @ up_matrix).view_as(x)
        grad_up = up.add_gradient(grad_preact, x.flatten(0, -2))
        return grad_x, grad_up, down.add_gradient(squares, flat_grad_out), None, None

def relu_sq_mlp(x: Tensor, up: WeightMatrix, down: WeightMatrix) -> Tensor:
    """relu(x up^T)^2 down (RECIPE 2.7).

    Equals linear_main_grad(linear_main_grad(x, up).relu().square(), down.t()), but keeps one hidden vector per token
    for backward, not two. For another MLP, return such a composition, and list its matrices in `parameter_specs`.
    """
    return ReluSqMLP.apply(x, up.matrix, down.matrix, up, down)


# ---- Head and loss: logits (N, V), target_ids and target_weights (N, G), losses (N,)
def softcap(logits: Tensor) -> Tensor:
    """LOGIT_CAP * sigmoid((logits + LOGIT_SHIFT) / LOGIT_WIDTH), in (0, LOGIT_CAP)."""
    return LOGIT_CAP * (logits + LOGIT_SHIFT).mul_(1 / LOGIT_WIDTH).sigmoid_()

def next_token_losses(y: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(softcap(y @ w))[target], without fp8: y (N, D), w (D, V), targets (N,) -> (N,)."""
    z = softcap((y @ w).to(accum_dtype(y.dtype)))
    lse = (z - LOGIT_CAP).exp().sum(dim=-1).log() + LOGIT_CAP                 # no overflow: z < LOGIT_CAP
    return lse - z.gather(1, targets[:, None])[:, 0]

def mtp_targets(targets: Tensor, mtp_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Multi-token prediction: ids of the next G tokens of every position, and their weights, (N, G) each.

    targets (B, T). Past the end of sequence b: weight 0, placeholder id targets[b, 0].
    """
    B, T = targets.shape
    positions = torch.arange(T, device=targets.device)
    target_pos = positions[:, None] + torch.arange(len(mtp_weights), device=targets.device)   # (T, G)
    in_sequence = target_pos < T
    target_ids = targets[:, torch.where(in_sequence, target_pos, 0)]                      # (B, T, G)
    target_weights = (in_sequence * mtp_weights).expand(B, -1, -1)
    return target_ids.flatten(0, 1), target_weights.flatten(0, 1)

def mtp_losses_and_grad(logits: Tensor, target_ids: Tensor, target_weights: Tensor, grad: Tensor,
                        grad_factor: float) -> tuple[Tensor, Tensor]:
    """Multi-token and next-token losses, and the gradient of the logits, written to `grad`, which may be `logits`.

        z         = softcap(logits)
        nll[n, k] = logsumexp(z[n]) - z[n, target_ids[n, k]]
        loss[n]   = sum over k of target_weights[n, k] * nll[n, k]
        grad[n]   = grad_factor * LOGIT_WIDTH * dloss[n]/dlogits[n]      (the caller cancels LOGIT_WIDTH)
    """
    if logits.is_cuda and logits.dtype == torch.bfloat16:
        losses, next_losses = (target_weights.new_empty(len(logits)) for _ in range(2))
        mtp_loss(logits, None if grad is logits else grad, target_ids, target_weights, losses, next_losses, grad_factor)
        return losses, next_losses

    losses_by_chunk = []
    chunk_len = CPU_CHUNK_LOGITS // logits.shape[1] if is_eager_cpu(logits) else len(logits)
    chunks = (x.split(chunk_len) for x in (logits, target_ids, target_weights, grad))
    for chunk, chunk_ids, chunk_weights, chunk_grad in zip(*chunks):
        z = softcap(chunk.to(target_weights.dtype))
        p = z.softmax(dim=-1)
        nll = -p.gather(1, chunk_ids).log()               # finite: 0 < z < LOGIT_CAP, so p > exp(-LOGIT_CAP) / V
        losses_by_chunk.append(((chunk_weights * nll).sum(dim=1), nll[:, 0]))
        scaled_weights = grad_factor * chunk_weights      # scaling (N, G) is cheaper than scaling grad_z (N, V)
        grad_z = p.mul_(scaled_weights.sum(dim=1, keepdim=True))
        # One of the G targets at a time, because a position may have the same target id twice.
        for target, weight in zip(chunk_ids.split(1, dim=1), scaled_weights.split(1, dim=1)):
            grad_z.scatter_add_(1, target, -weight)
        dz = torch.addcmul(z, z, z, value=-1 / LOGIT_CAP)  # LOGIT_WIDTH * dz/dlogit = z - z^2 / LOGIT_CAP
        torch.mul(grad_z, dz, out=chunk_grad)
    return tuple(map(torch.cat, zip(*losses_by_chunk)))

def mtp_loss_kernel(logits, grad, target_ids, target_weights, losses, next_losses, grad_factor, V: tl.constexpr,
                    G: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                    BLOCK_G: tl.constexpr) -> None:
    """See `mtp_losses_and_grad`; one program per row. logits and grad (N, V), target_ids and target_weights (N, G)."""
    # z = CAP * sig; p = softmax(z) = exponential / total. Except at the targets, grad_z = p * sum(weights). The row is
    # read once: registers keep exponential * (sig - sig^2) as pairs of bf16, rounded by adding half a unit. To base 2,
    # because exp2 and log2 take fewer instructions; sqrt_sig^2 takes fewer than a division.
    LOG2_E: tl.constexpr = 1.4426950408889634
    CAP_LOG2: tl.constexpr = CAP * LOG2_E
    EXP2_SCALE: tl.constexpr = -LOG2_E / WIDTH
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK,), tl.float32)
    pairs = ()
    for start in tl.static_range(0, V, BLOCK):
        mask = start + columns < V
        logit = tl.load(logits + row * V + start + columns, mask=mask, other=0).to(tl.float32)
        sqrt_sig = tl.rsqrt(1 + tl.exp2((logit + SHIFT) * EXP2_SCALE))
        sig = sqrt_sig * sqrt_sig
        exponential = tl.exp2(CAP_LOG2 * sig - CAP_LOG2)  # no overflow: sig <= 1
        totals += tl.where(mask, exponential, 0)
        bits = (exponential * (sig - sig * sig)).to(tl.uint32, bitcast=True) + 0x8000
        low, high = tl.split(bits.reshape(BLOCK // 2, 2))
        pairs = pairs + (low >> 16 | high & 0xFFFF0000,)
    total = tl.sum(totals)

    k = tl.arange(0, BLOCK_G)
    is_target = k < G
    targets = tl.load(target_ids + row * G + k, mask=is_target, other=-1)
    weights = tl.load(target_weights + row * G + k, mask=is_target, other=0)
    logit = tl.load(logits + row * V + targets, mask=is_target, other=0).to(tl.float32)
    sig = 1 / (1 + tl.exp2((logit + SHIFT) * EXP2_SCALE))
    exponential = tl.exp2(CAP_LOG2 * sig - CAP_LOG2)
    lse = tl.log2(total) / LOG2_E + CAP
    nll = lse - CAP * sig
    tl.store(losses + row, tl.sum(weights * nll))
    tl.store(next_losses + row + k, nll, mask=k == 0)
    factor = grad_factor * CAP * tl.sum(weights) / total
    weights_of_id = tl.sum(tl.where(targets[:, None] == targets[None, :], weights[None, :], 0), axis=1)
    target_grads = (factor * exponential - grad_factor * CAP * weights_of_id) * (sig - sig * sig)
    tl.debug_barrier()                   # the logits, which grad may overwrite, have been read
    for i in tl.static_range(len(pairs)):
        low = (pairs[i] << 16).to(tl.float32, bitcast=True)
        high = (pairs[i] & 0xFFFF0000).to(tl.float32, bitcast=True)
        block_grad = (factor * tl.interleave(low, high)).to(grad.dtype.element_ty)
        tl.store(grad + row * V + i * BLOCK + columns, block_grad, mask=i * BLOCK + columns < V)
    tl.debug_barrier()                   # before the targets are overwritten
    tl.store(grad + row * V + targets, target_grads.to(grad.dtype.element_ty), mask=is_target)

@torch.library.custom_op("train_gpt::mtp_loss", mutates_args=("logits", "grad", "losses", "next_losses"))
def mtp_loss(logits: Tensor, grad: Tensor | None, target_ids: Tensor, target_weights: Tensor, losses: Tensor,
             next_losses: Tensor, grad_factor: float) -> None:
    """Triton version of `mtp_losses_and_grad` for contiguous bf16 logits, in f32. grad None: written over logits."""
    G = target_ids.shape[1]
    grad = logits if grad is None else grad
    block = LOSS_BLOCK if grad.element_size() == 1 else LOSS_BLOCK // 4       # larger blocks would spill registers
    triton_jit(mtp_loss_kernel)[(len(logits),)](
        logits, grad, target_ids.contiguous(), target_weights.contiguous(), losses, next_losses, grad_factor,
        V=logits.shape[1], G=G, CAP=LOGIT_CAP, SHIFT=LOGIT_SHIFT, WIDTH=LOGIT_WIDTH, BLOCK=block,
        BLOCK_G=1 << (G - 1).bit_length(), num_warps=16)

def quantize_e4m3(x: Tensor, scale: float) -> Tensor:
    """x / scale in fp8 e4m3, rounded once. Values that are too large saturate on every torch version and device."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

def fp8_matmul(a: Tensor, b: Tensor, scale: Tensor, precision: str, out_dtype: torch.dtype,
               fast_accum: bool = False) -> Tensor:
    """scale * (a @ b) in fp8: a (M, K), b (K, N), scale () f64 -> (M, N) in out_dtype.

    precision "emulated": in f32 (f64 if out_dtype is f64), which represents every fp8 value exactly.
    """
    if precision == "emulated":
        dtype = accum_dtype(out_dtype)
        return (a.to(dtype) @ b.to(dtype) * scale.to(dtype)).to(out_dtype)
    b = b.t().contiguous().t()                            # _scaled_mm needs a column-major b
    # Not F.scaled_mm: torch.compile cannot trace it in torch 2.11 (pytorch issue 180604).
    return torch._scaled_mm(a, b, scale_a=scale.float(), scale_b=torch.ones((), device=a.device), out_dtype=out_dtype,
                            use_fast_accum=fast_accum)

class HeadLoss(torch.autograd.Function):
    """Fused head and loss: softcapped cross-entropy of the next G tokens (RECIPE 2.8).

        z       = softcap(y @ w)
        loss[t] = sum over k < G with t + k < T of mtp_weights[k] * (logsumexp(z[t]) - z[t, targets[t + k]])

    y (N, D), w (D, V), targets (B, T), mtp_weights (G,) -> (losses, next_losses), (N,) each, in f32, or f64 for f64;
    next_losses are the terms k = 0 without weight, and not differentiable. Targets may cross document boundaries. The
    softmax is over the whole padded vocabulary. precision "plain": matmuls in the dtype of y; "fp8": y and w in e4m3,
    gradient of the logits in e5m2; "emulated": the same rounded values, with matmuls in f32 or f64.
    """
    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor, targets: Tensor, mtp_weights: Tensor, precision: str,
                grad_target: WeightMatrix) -> tuple[Tensor, Tensor]:
        ctx.grad_target, ctx.precision = grad_target, precision
        accum = accum_dtype(y.dtype)
        # The gradient of the logits is computed here, so that they need not be saved. If precision is "plain", it
        # overwrites them; else it is in e5m2, half the size of bf16. mtp_losses_and_grad multiplies it by LOGIT_WIDTH,
        # the divisor in softcap, which grad_factor cancels, or backward if "plain".
        if precision == "plain":
            logits = grad = y @ w
            grad_factor = 1.0
        else:
            logits_dtype = torch.float64 if y.dtype == torch.float64 else torch.bfloat16
            logits_scale = torch.full((), FP8_Y_SCALE * FP8_W_SCALE, dtype=torch.float64, device=y.device)
            y, w = quantize_e4m3(y, FP8_Y_SCALE), quantize_e4m3(w, FP8_W_SCALE)
            logits = fp8_matmul(y, w, logits_scale, precision, logits_dtype, fast_accum=True)
            grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
            grad_factor = 1 / (LOGIT_WIDTH * FP8_GRAD_SCALE)
        target_ids, target_weights = mtp_targets(targets, mtp_weights.to(accum))
        losses, next_losses = mtp_losses_and_grad(logits, target_ids, target_weights, grad, grad_factor)
        ctx.save_for_backward(y, w, grad)
        ctx.mark_non_differentiable(next_losses)
        return losses, next_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _grad_next: Tensor) -> tuple[Tensor | None, ...]:
        # grad (N, V) is LOGIT_WIDTH * dloss/dlogits if plain, else dloss/dlogits / FP8_GRAD_SCALE in e5m2.
        y, w, grad = ctx.saved_tensors
        if ctx.precision == "plain":
            factor = (grad_losses / LOGIT_WIDTH).to(y.dtype)[:, None]         # (N, 1)
            return factor * (grad @ w.t()), ctx.grad_target.add_gradient(factor * y, grad), *[None] * 4

        # Computed without `largest` (below), so that Inductor fuses grad_y with the backward pass of GPT's `backout`.
        out_dtype = torch.bfloat16 if ctx.precision == "fp8" else grad_losses.dtype
        grad_y_scale = torch.full((), FP8_GRAD_SCALE * FP8_W_SCALE, dtype=torch.float64, device=y.device)
        grad_y = grad_losses.to(out_dtype)[:, None] * fp8_matmul(grad, w.t(), grad_y_scale, ctx.precision, out_dtype)
        # grad_losses = factor (N, 1) * largest. e5m2 cannot overflow, because |factor| <= 1 goes into weighted_grad,
        # and `largest` into the scale of the matmul. In the trainer, every factor is 1.
        largest = grad_losses.abs().amax()
        factor = (grad_losses / largest.clamp_min(torch.finfo(largest.dtype).tiny))[:, None]
        # Inductor fuses this product with fp8_matmul's copy to column-major order. _scaled_mm cannot accumulate in
        # main_grad, so add_gradient gets grad_w, not two factors as above.
        weighted_grad = (factor * grad.to(factor.dtype)).to(grad.dtype)
        grad_w = fp8_matmul(y.t().contiguous(), weighted_grad, largest.double() * FP8_GRAD_SCALE * FP8_Y_SCALE,
                            ctx.precision, factor.dtype)
        return grad_y, ctx.grad_target.add_gradient(grad_w, b=None), *[None] * 4


# ---- Rows of tables
def add_rows_kernel(row_grads, rows, order, grad, later_chunk_sums, num_lookups, D, CHUNK: tl.constexpr,
                    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr) -> None:
    """row_grads[rows[i]] += grad[order[i]] for i < num_lookups, where `rows` ascends and row_grads is (num_rows, D).

    If a row's lookups span several chunks of CHUNK lookups, row_grads gets the sum of the first chunk only;
    later_chunk_sums (num_chunks, D), zero before, gets in row c the sum of a later chunk c.
    """
    # One program per lookup. The program of the first lookup of a row in a chunk adds the gradients of all its lookups
    # there, BLOCK_ROWS per iteration, and prefetches the next indices; other programs exit. The order of summation is
    # fixed: iterations run in turn, and BLOCK_ROWS and num_warps fix the tree sum in each.
    lookup = tl.program_id(0)
    row = tl.load(rows + lookup)
    previous_row = tl.load(rows + lookup - 1, mask=lookup > 0, other=-1)
    if (row != previous_row) | (lookup % CHUNK == 0):
        columns = tl.arange(0, BLOCK_D)
        column_mask = columns < D
        sum_ptrs = row_grads + row.to(tl.int64) * D + columns                 # tables may have over 2^31 elements
        if row == previous_row:
            sum_ptrs = later_chunk_sums + (lookup // CHUNK).to(tl.int64) * D + columns
        acc = tl.load(sum_ptrs, mask=column_mask, other=0)
        end = tl.minimum(num_lookups, lookup - lookup % CHUNK + CHUNK)
        lookups = lookup + tl.arange(0, BLOCK_ROWS)
        is_same_row = tl.load(rows + lookups, mask=lookups < end, other=-1) == row
        grad_idx = tl.load(order + lookups, mask=lookups < end, other=0)
        has_more = 1
        while has_more == 1:
            lookups = lookups + BLOCK_ROWS
            next_is_same_row = tl.load(rows + lookups, mask=lookups < end, other=-1) == row
            next_grad_idx = tl.load(order + lookups, mask=lookups < end, other=0)
            mask = is_same_row[:, None] & column_mask[None, :]
            grads = tl.load(grad + (grad_idx * D)[:, None] + columns[None, :], mask=mask, other=0)
            acc += tl.sum(grads.to(acc.dtype), axis=0)
            has_more = tl.max(next_is_same_row.to(tl.int32), axis=0)
            is_same_row = next_is_same_row
            grad_idx = next_grad_idx
        tl.store(sum_ptrs, acc, mask=column_mask)

@functools.partial(custom_op_in_graphs, mutates_args=("row_grads",))
def add_rows(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """Deterministic index_add_: row_grads[index[i]] += grad[i], in the order of i.

    A GPU sorts lookups, sums each chunk of ADD_ROWS_CHUNK, ADD_ROWS_BLOCK at a time, then adds the chunk sums.
    row_grads (rows, D) f32 or f64, index (...), grad (..., D).
    """
    index = index.flatten()
    grad = grad.flatten(0, -2)
    if not grad.is_cuda:
        row_grads.index_add_(0, index.long(), grad.to(row_grads.dtype))
        return
    rows, order = index.sort(stable=True)                 # makes the lookups of a row adjacent, in their order
    D = grad.shape[1]
    # One program would be slow on thousands of lookups of a row. So the first launch sums each chunk, to row_grads
    # where a row begins, else to later_chunk_sums; the second adds these to row_grads, all in one chunk.
    rows_of_chunks = rows[::ADD_ROWS_CHUNK].contiguous()
    later_chunk_sums = row_grads.new_zeros(len(rows_of_chunks), D)
    chunks = torch.arange(len(rows_of_chunks), device=grad.device)
    for launch_args in ((rows, order, grad.contiguous(), later_chunk_sums, len(rows), D, ADD_ROWS_CHUNK),
                        (rows_of_chunks, chunks, later_chunk_sums, later_chunk_sums, len(chunks), D, 1 << 30)):
        triton_jit(add_rows_kernel)[(len(launch_args[0]),)](
            row_grads, *launch_args, BLOCK_ROWS=ADD_ROWS_BLOCK, BLOCK_D=1 << (D - 1).bit_length())     # a power of 2

class RowLookup(torch.autograd.Function):
    """source[index], whose backward adds to row_grads and returns None: no dense gradient of `source`."""
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, row_grads: Tensor | None) -> Tensor:
        ctx.save_for_backward(index)
        ctx.row_grads = row_grads
        return F.embedding(index, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        index, = ctx.saved_tensors
        add_rows(ctx.row_grads, index, grad)
        return None, None, None


# ====== Section 8: Data ===============================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # format: data/README.md
TOKEN_BYTES = 2                          # a token is a little-endian u16
VOCAB_FILE = "vocab.txt"                 # bytes of each token, for the shards in the same directory
SYNTHETIC_PREFIX = "formula:"            # synthetic data: formula:VOCAB_SIZE:BOS_ID:TOKENS_PER_SHARD:SHARDS
SYNTHETIC_DOC_LEN = 32                   # mean length of a synthetic document, in tokens
# 2^64 / golden ratio. Multiplying adjacent integers by it yields high bits that look unrelated (Fibonacci hashing).
HASH_MULTIPLIER = 0x9E3779B97F4A7C15

class OutOfData(ConfigError):
    """No more data: the shards ended, or one changed. The run then validates and saves what it has trained."""

class ShardHeader(NamedTuple):
    """A data shard: a .bin file, or synthetic tokens with the name "formula:...#seed"."""
    name: str
    num_tokens: int
    vocab_size: int
    bos_id: int

class TokenShard:
    """Tokens of a shard. A document begins with BOS and ends before the next BOS or at the end of the shard."""
    def __init__(self, tokens: np.ndarray, bos_id: int) -> None:
        self.tokens = tokens                                              # (num_tokens,) u16
        self.doc_starts = np.flatnonzero(tokens == bos_id)                # (num_docs,)
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))   # (num_docs,) in tokens, including BOS

class PackedSeq(NamedTuple):
    """One sequence of T inputs."""
    tokens: np.ndarray                   # (T + 1,) u16: the first T tokens are the inputs, the last T the targets
    cu_seqlens: np.ndarray               # (num_docs + 1,) i32: cumulative lengths of the documents, from 0 to T

def synthetic_tokens(seed: int, count: int, vocab_size: int, bos_id: int) -> np.ndarray:
    """(count,) u16: hashes of position and seed; BOS first, and on average every SYNTHETIC_DOC_LEN tokens."""
    positions = np.arange(count, dtype=np.uint64)
    hashed = (positions + (seed << 32)) * HASH_MULTIPLIER >> 40           # high 24 bits; multiplication wraps at 2^64
    tokens = hashed * hashed // 7 % (vocab_size - 1)      # an arbitrary function of the hash, 0 to vocab_size - 2
    tokens += tokens >= bos_id           # 0 to vocab_size - 1, except bos_id
    tokens[hashed % SYNTHETIC_DOC_LEN == 0] = bos_id
    tokens[:1] = bos_id
    return tokens.astype(np.uint16)

def read_shard_header(path: Path) -> ShardHeader:
    check(path.is_file(), f"no data shard {path}: for preset record, run python data/cached_fineweb10B.py 9; for "
          "preset pocket, start in a clone of the repository; for other data, give --train_files and --val_files")
    words = [*np.fromfile(path, "<i4", 5).tolist(), 0, 0, 0, 0, 0]            # the file may be empty
    magic, version, num_tokens, vocab_size, bos_id = words[:5]
    expected_size = HEADER_BYTES + TOKEN_BYTES * num_tokens
    check([magic, version] == [SHARD_MAGIC, SHARD_VERSION] and num_tokens > 0 and path.stat().st_size == expected_size,
          f"{path} is not a whole data shard: it has {path.stat().st_size:,} bytes and header [{magic}, {version}, "
          f"{num_tokens}]; a shard of n tokens has {HEADER_BYTES:,} + {TOKEN_BYTES} n bytes and header [{SHARD_MAGIC}, "
          f"{SHARD_VERSION}, n]: download or write it again")
    if vocab_size == 0:                                   # an older shard, with GPT-2 tokens
        vocab_size, bos_id = GPT2_VOCAB, GPT2_BOS_ID
    return ShardHeader(str(path), num_tokens, vocab_size, bos_id)

def read_shard_headers(pattern: str) -> list[ShardHeader]:
    """Headers of the shards that match a glob, sorted by name, or of synthetic shards (see SYNTHETIC_PREFIX)."""
    if pattern.startswith(SYNTHETIC_PREFIX):
        check(re.fullmatch(SYNTHETIC_PREFIX + r"\d{1,5}:\d{1,5}:[1-9]\d{0,8}:[1-9]\d{0,4}", pattern),
              f"{pattern} must be formula:VOCAB_SIZE:BOS_ID:TOKENS_PER_SHARD:SHARDS, such as formula:512:511:40000:2")
        vocab_size, bos_id, num_tokens, num_shards = map(int, pattern.removeprefix(SYNTHETIC_PREFIX).split(":"))
        return [ShardHeader(f"{pattern}#{seed}", num_tokens, vocab_size, bos_id) for seed in range(num_shards)]
    # A pattern without a match is taken as a path. A broken link is an error: to skip it would lose data silently.
    return [read_shard_header(Path(path)) for path in sorted(glob.glob(pattern)) or [pattern]]

def check_tokens(header: ShardHeader, tokens: np.ndarray) -> None:
    largest = tokens.max(initial=0)
    check(len(tokens) == header.num_tokens and largest < header.vocab_size and (tokens == header.bos_id).any(),
          f"{header.name} has {len(tokens):,} tokens with ids up to {largest}; its header needs {header.num_tokens:,} "
          f"with ids below {header.vocab_size:,}, and a BOS ({header.bos_id}): download or write the file again")

def load_shard(header: ShardHeader) -> TokenShard:
    if header.name.startswith(SYNTHETIC_PREFIX):
        seed = int(header.name.rpartition("#")[2])
        tokens = synthetic_tokens(seed, header.num_tokens, header.vocab_size, header.bos_id)
    else:
        tokens = np.fromfile(header.name, "<u2", header.num_tokens, offset=HEADER_BYTES)
    check_tokens(header, tokens)
    return TokenShard(tokens, header.bos_id)

def hash_shards(headers: list[ShardHeader]) -> str:
    """Check all tokens of all files. Returns one SHA-256 of names and contents; synthetic shards have only a name."""
    digest = hashlib.sha256()
    for header in headers:
        path = Path(header.name)
        digest.update(os.fsencode(path.name))
        if not header.name.startswith(SYNTHETIC_PREFIX):
            content = path.read_bytes()
            check_tokens(header, np.frombuffer(content, "<u2", offset=HEADER_BYTES))
            digest.update(content)
    return digest.hexdigest()

def resolve_sizes(cfg: Config, train_headers: list[ShardHeader], val_headers: list[ShardHeader]) -> Config:
    """`cfg` with the shards' vocab_size and bos_id; padded_vocab and bigram_rows are computed where they are 0."""
    vocabs = {(header.vocab_size, header.bos_id): header.name for header in train_headers + val_headers}
    check(len(vocabs) == 1, f"shards of different vocabularies, {{(size, BOS): file}}: {vocabs}; use one data set")
    (vocab_size, bos_id), = vocabs
    check(cfg.vocab_size in (0, vocab_size) and cfg.bos_id in (-1, bos_id),
          f"--vocab_size or --bos_id differs: the shards have {vocab_size} and {bos_id}; omit both flags")
    padded_vocab = cfg.padded_vocab or -(-vocab_size // 128) * 128
    check(padded_vocab >= vocab_size, f"--padded_vocab={padded_vocab} must be at least the vocabulary size "
          f"{vocab_size}; 0 rounds it up to a multiple of 128")
    return replace(cfg, vocab_size=vocab_size, bos_id=bos_id, padded_vocab=padded_vocab,
                   bigram_rows=max(2, cfg.bigram_rows or 5 * padded_vocab))

def num_val_batches(shard_tokens: int, batch_tokens: int) -> int:
    """Validation batches in a shard. The last token has no target; one more input is omitted, as in modded-nanogpt."""
    return max(0, shard_tokens - 2) // batch_tokens

# A packer returns the S sequences of a step, and where the next step begins, or None if the shard ends before.
Packed = tuple[list[PackedSeq], int] | None

def pack_sequence(shard: TokenShard, starts: np.ndarray, ends: np.ndarray) -> PackedSeq:
    documents = [shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                   # the last token is a target, not an input
    return PackedSeq(np.concatenate(documents), cu_seqlens.astype(np.int32))

def pack_truncated(shard: TokenShard, first_doc: int, seqs_per_step: int, seq_len: int, max_doc_len: int) -> Packed:
    """The S sequences of a step in the first epoch: consecutive documents, each cut to max_doc_len (RECIPE 5.2).

    The last document of a sequence is cut to fit. Returns (seqs, first_doc of the next step).
    """
    # tokens_before[i]: tokens before document i, after truncation; the last entry is the total.
    tokens_before = np.concatenate([[0], np.cumsum(np.minimum(shard.doc_lengths, max_doc_len))])
    seqs = []
    doc = first_doc
    for _ in range(seqs_per_step):
        seq_end = tokens_before[doc] + seq_len + 1
        next_doc = np.searchsorted(tokens_before, seq_end)                # first document beyond the sequence
        if next_doc == len(tokens_before):
            return None
        starts = shard.doc_starts[doc:next_doc]
        ends = starts + np.diff(tokens_before[doc:next_doc + 1])
        ends[-1] -= tokens_before[next_doc] - seq_end
        seqs.append(pack_sequence(shard, starts, ends))
        doc = next_doc
    return seqs, doc

def pack_all_tokens(shard: TokenShard, first_token: int, seqs_per_step: int, seq_len: int, max_doc_len: int) -> Packed:
    """The S sequences of a step of a later epoch or of validation. Returns (seqs, first_token of the next step).

    A sequence of T + 1 tokens is split at document starts, and pieces longer than max_doc_len again. Its last
    token is also the first token of the next sequence.
    """
    end = first_token + seqs_per_step * seq_len
    if end >= len(shard.tokens):
        return None
    seqs = []
    for seq_start in range(first_token, end, seq_len):
        seq_end = seq_start + seq_len + 1
        first_doc, next_doc = np.searchsorted(shard.doc_starts, (seq_start + 1, seq_end))
        bounds = [seq_start, *shard.doc_starts[first_doc:next_doc].tolist(), seq_end]
        starts = np.concatenate([np.arange(*pair, max_doc_len) for pair in itertools.pairwise(bounds)])
        seqs.append(pack_sequence(shard, starts, np.append(starts[1:], seq_end)))
    return seqs, end

def validation_sequences(shards: Iterable[TokenShard], seqs_per_step: int, seq_len: int) -> Iterable[PackedSeq]:
    """Consecutive sequences of each shard, in whole batches of seqs_per_step. Only sequence ends cut documents."""
    for shard in shards:
        batch_tokens = seqs_per_step * seq_len
        for batch in range(num_val_batches(len(shard.tokens), batch_tokens)):
            yield from pack_all_tokens(shard, batch * batch_tokens, seqs_per_step, seq_len, max_doc_len=seq_len + 1)[0]

def read_token_bytes(folder: Path, cfg: Config) -> list[bytes] | None:
    """Bytes of every token, from the lines "base64 id" of vocab.txt; b"" for BOS. None if there is no such file."""
    path = folder / VOCAB_FILE
    if not path.is_file():
        return None
    token_bytes = {}
    try:
        for line in path.read_bytes().splitlines():
            encoded, token_id = line.split()
            token_bytes[int(token_id)] = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ConfigError(f"{path}: a line is not 'base64 id' ({error}); write or remove the file") from None
    token_bytes[cfg.bos_id] = b""
    check(token_bytes.keys() == set(range(cfg.vocab_size)),
          f"{path} must have lines for all {cfg.vocab_size:,} token ids but BOS ({cfg.bos_id}), and for no other")
    return [token_bytes[token_id] for token_id in range(cfg.vocab_size)]


# ====== Section 9: Rows ===============================================================================================
# Embedding tables are sharded by row: rank r % W owns global row r, as local row r // W. A step looks up a small
# fraction of the rows. An update interval of a table is the update_every steps from one update to the next. Before it,
# a rank fetches into a cache, from their owners, the rows that it will look up; after it, the rank sends back their
# gradients. A row plan lists both directions for one table and interval: rows_to_fetch, and rows_to_serve to the ranks
# that fetch them. Plans are made on the CPU, one cycle of the run ahead.

@dataclass(eq=False)
class RowPlan:
    """The rows of one table that this rank fetches and serves in one update interval. Gradients go the opposite way.

    Index tensors are i64. `move_to` moves those that the device needs, which are pinned. If tied, the rows are columns
    of the head, which every rank has: it serves to itself all that it fetches, and rows_to_serve has token ids.
    """
    table: TableSpec
    tied: bool
    rows_to_fetch: Tensor                # (n,): owner * C + local row, unique, ascending
    fetch_counts: list[int]              # number of rows_to_fetch of each owner
    rows_to_serve: Tensor                # (m,): local rows, grouped by the rank that fetches them, ascending per rank
    serve_counts: list[int]              # number of rows_to_serve for each fetching rank
    rows_to_update: Tensor | None = None   # (u,), of a row-wise table: unique rows_to_serve, ascending
    update_index: Tensor | None = None     # (m,): rows_to_update[update_index] == rows_to_serve

    def move_to(self, device: torch.device) -> None:
        for name in ("rows_to_serve", "rows_to_update", "update_index"):
            index = getattr(self, name)
            if index is not None:
                setattr(self, name, index.to(device, non_blocking=True))

def plan_rows(table: TableSpec, comm: Communicator, ids_by_step: list[np.ndarray], tied: bool,
              fetch_all: bool) -> tuple[RowPlan, list[np.ndarray]]:
    """Plan an update interval. ids_by_step: global rows that a step looks up, i32, of any shape. fetch_all: all rows.

    Returns the plan, and for each step, in the shape of its ids, their indices in rows_to_fetch, i32. The plan serves
    what it fetches: right for W = 1 or a tied plan; otherwise `exchange_row_requests` replaces that.
    """
    # Round-robin ownership balances the load, because frequent tokens have nearby ids. The key owner * C + local row
    # makes the rows of each owner contiguous, as the all-to-all needs.
    W, C = comm.world_size, table.shard_rows(comm.world_size)
    global_rows = np.concatenate([ids.ravel() for ids in ids_by_step])
    local_rows = global_rows.astype(np.int64) // W
    row_keys = (global_rows - local_rows * W) * C + local_rows                # first factor: the owner, row % W

    if fetch_all:
        rows_to_fetch, row_index = np.arange(W * C), row_keys
    else:                                # faster than NumPy's `unique`
        unique_and_inverse = torch.unique(torch.from_numpy(row_keys), return_inverse=True)
        rows_to_fetch, row_index = (x.numpy() for x in unique_and_inverse)
    step_ends = np.cumsum([ids.size for ids in ids_by_step])
    lookup_rows = [index.reshape(ids.shape)
                   for ids, index in zip(ids_by_step, np.split(row_index.astype(np.int32), step_ends[:-1]))]
    fetch_counts = np.bincount(rows_to_fetch // C, minlength=W).tolist()
    # A tied plan reads columns of the head, by token id, the global row: local row * W + owner.
    rows_to_serve = comm.pinned(rows_to_fetch % C * W + rows_to_fetch // C if tied else rows_to_fetch)
    return RowPlan(table, tied, torch.from_numpy(rows_to_fetch), fetch_counts, rows_to_serve, fetch_counts), lookup_rows

def exchange_row_requests(comm: Communicator, process_group: dist.ProcessGroup | None,
                          plans: dict[str, RowPlan]) -> None:
    """Tell owners which rows this rank fetches, and complete the plans with those it serves and updates. Collective.

    plans: {label: plan} of some tables; those tied to the head request nothing. process_group: a gloo group or None.
    """
    W = comm.world_size
    if W > 1:
        counts = [[0] * W if plan.tied else plan.fetch_counts for plan in plans.values()]     # (table, owner)
        # Owners get local rows: rows_to_fetch has owner * shard_rows + local row. Of a tied plan, the slice is empty.
        requests = [(plan.rows_to_fetch[:sum(fetch_counts)] % plan.table.shard_rows(W)).int().split(fetch_counts)
                    for plan, fetch_counts in zip(plans.values(), counts)]
        serve_counts = np.array(comm.all_gather(counts, process_group))[:, :, comm.rank]      # (sender, table)
        # One all-to-all for all tables, grouped by receiving rank, then by table.
        sent = torch.cat([by_owner[owner] for owner in range(W) for by_owner in requests])
        received = torch.empty(serve_counts.sum(), dtype=torch.int32)
        dist.all_to_all_single(received, sent, serve_counts.sum(1).tolist(), np.sum(counts, 0).tolist(),
                               group=process_group)
        received_requests = received.split(serve_counts.flatten().tolist())
        for table_idx, plan in enumerate(plans.values()):
            if not plan.tied:
                plan.rows_to_serve = comm.pinned(torch.cat(received_requests[table_idx::len(plans)]).long())
                plan.serve_counts = serve_counts[:, table_idx].tolist()
    for plan in plans.values():
        if plan.table.rowwise:
            unique_and_inverse = torch.unique(plan.rows_to_serve, return_inverse=True)
            plan.rows_to_update, plan.update_index = map(comm.pinned, unique_and_inverse)

def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory. On Linux, a page takes no physical memory until its first write."""
    if sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    # Without 0x4000, MAP_NORESERVE, Linux refuses mappings that exceed the physical memory. Huge pages would take
    # 2 MB for one row.
    num_bytes = math.prod(shape) * dtype.itemsize
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    with contextlib.suppress(OSError):                    # the kernel has no huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


# ---- Tables: groups that also provide the rows for lookups, and a buffer for their gradients (f32; f64 in f64 runs)
class Table(Group):
    """A table, of which all rows are updated: the shard (C, D), a cache of fetched rows, and their gradients."""
    def __init__(self, spec: ParameterSpec, cfg: Config, comm: Communicator, shard: Tensor, tokens_per_update: int,
                 head: Tensor | None) -> None:
        """tokens_per_update: this rank's maximum; 0: evaluation only. head (D, V): gives the rows of tied plans."""
        self.specs, self.update_every = [spec], spec.table.update_every
        self.comm, self.head, self.shard = comm, head, shard
        self.shards = [shard]
        # Allocated once, for the largest batch: shapes and addresses never change.
        C, D = shard.shape
        num_rows = comm.world_size * C
        if spec.table.rowwise or cfg.row_comms == "sparse":
            num_rows = min(num_rows, tokens_per_update * spec.table.lookups_per_token)
        self.cache = shard.new_zeros(num_rows, D, device=comm.device).requires_grad_()
        self.row_grads = torch.zeros(num_rows, D, dtype=accum_dtype(shard.dtype), device=comm.device)
        self.fetch_work = None
        self.reset()

    def reset(self) -> None:
        """Drop gradients, cached rows and counts of bytes. The shard stays."""
        wait_for_work(self.fetch_work)
        self.fetch_work = None
        self.cached_plan: RowPlan | None = None           # its rows are in `cache`, or on their way
        self.grads_plan: RowPlan | None = None            # of the gradients in `row_grads`
        self.bytes = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)   # dense: if whole tables were sent
        self.row_grads.zero_()

    @torch.no_grad()
    def fetch(self, plan: RowPlan) -> None:
        """Start to fetch the plan's rows into the cache, unless they are there or on their way. Collective."""
        if self.cached_plan is not plan:
            wait_for_work(self.fetch_work)
            plan.move_to(self.comm.device)
            self.fetch_work = self.launch_fetch(plan, self.cache.detach())
            self.cached_plan = plan
            if not plan.tied:
                self.count_bytes(plan, bytes_to_owner=4, bytes_from_owner=self.shard[:1].nbytes)    # requests are i32

    def launch_fetch(self, plan: RowPlan, out: Tensor) -> dist.Work | None:
        fetched = out[:len(plan.rows_to_fetch)]
        if plan.tied:
            fetched.copy_(self.head.t()[plan.rows_to_serve])
            return None
        if self.comm.world_size == 1:
            torch.index_select(self.shard, 0, plan.rows_to_serve, out=fetched)
            return None
        served = self.shard.index_select(0, plan.rows_to_serve)
        return dist.all_to_all_single(fetched, served, plan.fetch_counts, plan.serve_counts, async_op=True)

    def rows_for_forward(self, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """(cache, row_grads), of fixed size; row i of each is for plan.rows_to_fetch[i]. Waits for them."""
        assert self.grads_plan in (None, plan), f"{self.specs[0].label}: call optim_step before the next interval"
        self.grads_plan = plan                            # its gradients will accumulate in row_grads
        self.fetch(plan)                                  # if `Engine.fetch_rows` has not
        wait_for_work(self.fetch_work)
        self.fetch_work = None
        return self.cache, self.row_grads

    def fetch_for_eval(self, plan: RowPlan) -> Tensor:
        """Fetch plan.rows_to_fetch into a new tensor (n, D), not into the cache. Collective."""
        plan.move_to(self.comm.device)
        out = self.cache.new_empty(len(plan.rows_to_fetch), self.cache.shape[1])
        wait_for_work(self.launch_fetch(plan, out))
        return out

    def launch_reduce(self) -> None:
        """If W > 1, start to send row_grads to the rows' owners, in the weights' dtype. Collective."""
        plan = self.grads_plan
        assert plan, f"{self.specs[0].label}: call forward_backward before optim_step"
        self.received_grads, self.reduce_work = self.row_grads[:len(plan.rows_to_fetch)], None
        if self.comm.world_size > 1:
            sent = self.received_grads.to(self.shard.dtype)
            self.received_grads = sent.new_empty(len(plan.rows_to_serve), sent.shape[1])
            self.reduce_work = dist.all_to_all_single(self.received_grads, sent, plan.serve_counts, plan.fetch_counts,
                                                      async_op=True)
        self.count_bytes(plan, bytes_to_owner=self.shard[:1].nbytes, bytes_from_owner=0)

    def reduced_grads(self) -> list[Tensor]:
        """Gradient of the shard, or of rows_to_update, summed in rank order. Call it once per launch_reduce."""
        wait_for_work(self.reduce_work)
        plan = self.grads_plan
        num_rows, index = len(self.shard), plan.rows_to_serve
        if plan.rows_to_update is not None:               # of a row-wise table
            num_rows, index = len(plan.rows_to_update), plan.update_index
        grad = self.row_grads.new_zeros(num_rows, self.shard.shape[1])
        add_rows(grad, index, self.received_grads)        # received_grads is grouped by sending rank
        self.received_grads = self.reduce_work = None     # frees the received gradients; the work refers to them, too
        return [grad]

    def add_grads_to_head(self, head_grad: Tensor) -> None:
        """The update of a tied embedding: adds row_grads, transposed, to the columns of head_grad (D, V)."""
        plan = self.grads_plan
        assert plan, f"{self.specs[0].label}: call forward_backward before optim_step"
        head_grad[:, plan.rows_to_serve] += self.row_grads[:len(plan.rows_to_fetch)].t().to(head_grad.dtype)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients, and the cached rows, which are stale after the update."""
        self.row_grads[:len(self.grads_plan.rows_to_fetch)] = 0               # the rest of the buffer is zero already
        self.grads_plan = self.cached_plan = None

    def count_bytes(self, plan: RowPlan, bytes_to_owner: int, bytes_from_owner: int) -> None:
        """Count an exchange. bytes_to_owner and bytes_from_owner are per fetched row."""
        to_self = plan.fetch_counts[self.comm.rank]       # equals serve_counts[rank]
        fetched, served = sum(plan.fetch_counts) - to_self, sum(plan.serve_counts) - to_self
        self.bytes.update(bytes_sent=fetched * bytes_to_owner + served * bytes_from_owner,
                          bytes_received=served * bytes_to_owner + fetched * bytes_from_owner,
                          bytes_dense=(self.comm.world_size - 1) * self.shard.nbytes)

class RowState(NamedTuple):
    """n rows of a row-wise table."""
    rows: Tensor                         # (n, D): weights
    v: Tensor                            # (n,) f32 or f64: second moment
    last_update: Tensor                  # (n,) i32: number (from 1) of the last update that changed the row, or 0

class RowwiseTable(Table):
    """An n-gram table, for any W: an update changes only rows that some rank has looked up since the last update."""
    def __init__(self, spec: ParameterSpec, cfg: Config, comm: Communicator, tokens_per_update: int) -> None:
        C, dtype = spec.table.shard_rows(comm.world_size), getattr(torch, cfg.dtype)
        zeros = functools.partial(torch.zeros, device=comm.device) if comm.on_cuda else lazy_zeros
        self.state = RowState(zeros((C, cfg.model_dim), dtype=dtype), zeros((C,), dtype=accum_dtype(dtype)),
                              zeros((C,), dtype=torch.int32))
        super().__init__(spec, cfg, comm, self.state.rows, tokens_per_update, head=None)
        self.shards = []                                  # Optimizer allocates no state: self.state has it

    def reset(self) -> None:
        """Drop gradients, cached rows and counts of bytes; zero weights and Adam state of the rows ever updated."""
        super().reset()
        touched = self.touched_rows()                     # the others are zero; on a CPU, writing would allocate them
        for x in self.state:
            x.index_fill_(0, touched, 0)

    def touched_rows(self) -> Tensor:
        """Local indices of the rows that some update has changed; all others are zero."""
        return self.state.last_update.nonzero().flatten()

    def touched_state(self) -> dict[str, Tensor]:
        """For files: local_rows of the rows that some update has changed, and fields of their RowState, on the CPU."""
        touched = self.touched_rows()
        state = dict(local_rows=touched, **self.read_rows(touched)._asdict())
        return {name: x.cpu() for name, x in state.items()}

    def read_rows(self, local_rows: Tensor) -> RowState:
        return RowState(*(x.index_select(0, local_rows) for x in self.state))

    def write_rows(self, local_rows: Tensor, *new: Tensor) -> None:
        for x, new_x in zip(self.state, new):
            x.index_copy_(0, local_rows, new_x)

    def to_update(self) -> list[RowState]:
        self.row_copies = self.read_rows(self.grads_plan.rows_to_update)      # copies, updated in place
        return [self.row_copies]

    def launch_gather(self) -> None:
        """Write the updated rows back to the shard. Ranks fetch them later, so nothing is sent here."""
        self.write_rows(self.grads_plan.rows_to_update, *self.row_copies)
        self.row_copies = None

def make_table(spec: ParameterSpec, cfg: Config, comm: Communicator, model: nn.Module, tokens_per_update: int) -> Table:
    """tokens_per_update: most tokens that this rank looks up between updates of the table; 0 for evaluation only."""
    if spec.table.rowwise:
        return RowwiseTable(spec, cfg, comm, tokens_per_update)
    return Table(spec, cfg, comm, model.get_parameter(spec.label).detach(), tokens_per_update, head=model.lm_head)


# ====== Section 10: Batches ===========================================================================================
class Batch(NamedTuple):
    """This rank's sequences of one step, or of one micro-batch of the step: B sequences of T tokens."""
    plans: dict[str, RowPlan]
    tokens: Tensor                       # (B, T) i32: inputs
    targets: Tensor                      # (B, T) i64: the next token of every position
    cu_seqlens: Tensor                   # (B, num_bounds) i32: 0, then the end of each document; padded with T
    # {table: (B, T) or (B, lookups, T) i32}: index of each lookup in rows_to_fetch
    lookup_rows: dict[str, Tensor]

    def map(self, convert: Callable[[Any], Any]) -> Batch:
        """A new batch with `convert` applied to every array or tensor, and the same plans."""
        lookup_rows = {label: convert(x) for label, x in self.lookup_rows.items()}
        return Batch(self.plans, convert(self.tokens), convert(self.targets), convert(self.cu_seqlens), lookup_rows)

    def to(self, device: torch.device) -> Batch:
        """Copied asynchronously if the batch is in pinned memory."""
        return self.map(lambda x: x.to(device, non_blocking=True))

def collate(tables: Iterable[TableSpec], seqs: list[PackedSeq]) -> Batch:
    """This rank's batch of one step, as arrays, with global rows as lookup_rows until `build_batches` plans them."""
    tokens = np.stack([seq.tokens for seq in seqs])
    num_bounds = max(len(seq.cu_seqlens) for seq in seqs)  # the padding adds empty documents
    cu_seqlens = [np.pad(seq.cu_seqlens, (0, num_bounds - len(seq.cu_seqlens)), "edge") for seq in seqs]
    inputs = tokens[:, :-1].astype(np.int32)
    lookup_rows = {table.label: table.row_ids(inputs) for table in tables}
    return Batch({}, inputs, tokens[:, 1:].astype(np.int64), np.stack(cu_seqlens), lookup_rows)

def build_batches(cfg: Config, comm: Communicator, process_group: dist.ProcessGroup | None, cycle: list[StepConfig],
                  seqs_by_step: list[list[PackedSeq]]) -> list[Batch]:
    """This rank's batches of one cycle of the run, with their row plans, in pinned memory. Collective.

    process_group: a gloo group for the row requests; None: the default group. cycle: may be shorter at the end of the
    run; evaluation passes a single step. seqs_by_step: this rank's sequences of each step.
    """
    tables = table_specs(cfg)
    batches = [collate(tables, seqs) for seqs in seqs_by_step]
    # One plan per table and update interval, whose length is a multiple of adam_every. All plans that begin at the same
    # step share one exchange.
    plans = {}
    for i in range(0, len(cycle), cfg.adam_every):
        new_plans = {}
        for table in tables:
            if i % table.update_every == 0:
                interval_batches = batches[i:i + table.update_every]
                # `embed` is updated every adam_every steps, and `tied` changes only between updates.
                tied = table.label == "embed" and cycle[i].tied
                fetch_all = cfg.row_comms == "dense" and not table.rowwise and not tied
                ids_by_step = [batch.lookup_rows[table.label] for batch in interval_batches]
                new_plans[table.label], lookup_rows = plan_rows(table, comm, ids_by_step, tied, fetch_all)
                for batch, index in zip(interval_batches, lookup_rows):
                    batch.lookup_rows[table.label] = index
        exchange_row_requests(comm, process_group, new_plans)
        plans |= new_plans
        for batch in batches[i:i + cfg.adam_every]:
            batch.plans.update(plans)
    return [batch.map(comm.pinned) for batch in batches]

class Packer:
    """Cuts a stream of shards into the S sequences of each step, the same on every rank.

    The first epoch uses `pack_truncated`, as modded-nanogpt does: the rest of a cut document and the end of a shard are
    dropped. Later epochs use `pack_all_tokens` and drop nothing: the end of a shard is joined to the next one.
    """
    def __init__(self, cfg: Config, headers: list[ShardHeader],
                 load: Callable[[Iterator[ShardHeader]], Iterator[TokenShard]]) -> None:
        """headers: of one epoch, in order. load: yields the shard of each header."""
        self.cfg = cfg
        epochs = itertools.repeat(headers, cfg.epochs) if cfg.epochs else itertools.repeat(headers)
        self.shards = enumerate(load(itertools.chain.from_iterable(epochs)))
        self.shards_per_epoch = len(headers)
        self.epoch = 0                   # of the current shard
        self.shard = TokenShard(np.empty(0, np.uint16), cfg.bos_id)
        self.position = 0                # where the next step starts in `shard`: document index in epoch 0, then token

    def next(self, step_cfg: StepConfig) -> list[PackedSeq]:
        """The S sequences of a step. Raises OutOfData."""
        while True:
            pack = pack_all_tokens if self.epoch else pack_truncated
            packed = pack(self.shard, self.position, self.cfg.seqs_per_step, step_cfg.seq_len, self.cfg.max_doc_len)
            if packed:
                seqs, self.position = packed
                return seqs
            rest = self.shard.tokens[self.position:]
            try:
                shard_idx, self.shard = next(self.shards)
            except StopIteration:
                stop = f", --max_steps={step_cfg.step} ends the run before that step" if step_cfg.step else ""
                raise OutOfData(
                    f"{self.cfg.train_files} ended before step {step_cfg.step} (the first epoch drops what a document "
                    f"has beyond {self.cfg.max_doc_len} tokens); --epochs=0 repeats the data{stop}") from None
            except (OSError, ConfigError) as error:       # the shard was valid when the run started
                raise OutOfData(f"a training shard changed during the run: {error}") from None
            if self.epoch:               # of the shard before
                self.shard = TokenShard(np.concatenate([rest, self.shard.tokens]), self.cfg.bos_id)
            self.epoch = shard_idx // self.shards_per_epoch
            self.position = 0

class Loader:
    """A thread builds the batches of the next cycle of the run while the model trains on the current one.

    Batches depend only on data and step configs; the S sequences of a step are the same for every W.
    """
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader],
                 cycles: Iterable[list[StepConfig]]) -> None:
        self.cfg, self.comm = cfg, comm
        self.cycles = iter(cycles)
        self.builder = ThreadPoolExecutor(1, "loader", initializer=comm.set_thread_device)
        self.reader = ThreadPoolExecutor(1, "shard-reader")
        self.packer = Packer(cfg, headers, self.read_ahead)
        self.rest_of_cycle: list[Batch] = []              # batches that `next` has not returned
        self.next_batches: Future[list[Batch]] | None = None

    def start(self) -> None:
        """Build the first cycle, and wait for it. Call it before `next`. Raises OutOfData. Collective."""
        self.next_batches = self.builder.submit(self.build_cycle, next(self.cycles))
        self.wait_for_cycle()

    def next(self) -> Batch:
        """The next step's batch, copied to the device asynchronously. Raises OutOfData only at a cycle's start."""
        if not self.rest_of_cycle:
            self.rest_of_cycle = self.wait_for_cycle()
            self.next_batches = self.builder.submit(self.build_cycle, next(self.cycles, []))
        return self.rest_of_cycle.pop(0).to(self.comm.device)

    def next_step_plans(self) -> dict[str, RowPlan]:
        """The next step's {table: row plan}, without taking its batch; {} at the end of training or data.

        After a cycle's last batch, waits for the next cycle, but leaves its batches to `next`.
        """
        try:
            batches = self.rest_of_cycle or self.wait_for_cycle()
        except OutOfData:                # `next` will raise it again, from the same future
            return {}
        return batches[0].plans if batches else {}

    def close(self) -> None:
        for thread_pool in (self.builder, self.reader):
            thread_pool.shutdown(wait=False, cancel_futures=True)

    def wait_for_cycle(self) -> list[Batch]:
        """Wait for the next cycle's batches, one per step; keep rest_of_cycle. Raises OutOfData."""
        return self.comm.wait_for_result(self.next_batches, "loader thread")

    def build_cycle(self, cycle: list[StepConfig]) -> list[Batch]:
        seqs_by_step = [self.packer.next(step_cfg)[self.comm.rank::self.comm.world_size] for step_cfg in cycle]
        return build_batches(self.cfg, self.comm, self.comm.loader_group, cycle, seqs_by_step)

    def read_ahead(self, headers: Iterator[ShardHeader]) -> Iterator[TokenShard]:
        """Yield each shard while the reader thread loads the next one."""
        futures = (self.reader.submit(load_shard, header) for header in headers)
        for future, _next in itertools.pairwise(itertools.chain(futures, [None])):
            yield self.comm.wait_for_result(future, "reading a shard")

class ValidationSet:
    """The first --val_tokens tokens of the validation shards, and what converts a loss to bits per byte."""
    def __init__(self, cfg: Config, comm: Communicator, headers: list[ShardHeader]) -> None:
        self.cfg, self.comm = cfg, comm
        seq_len = cfg.val_batch_tokens // cfg.seqs_per_step
        seqs = validation_sequences(map(load_shard, headers), cfg.seqs_per_step, seq_len)
        self.seqs = list(itertools.islice(seqs, cfg.val_tokens // seq_len))
        targets = np.concatenate([seq.tokens[1:] for seq in self.seqs])
        counts = np.bincount(targets, minlength=cfg.vocab_size)
        frequencies = counts[counts > 0] / len(targets)
        self.unigram_nats = -(frequencies * np.log(frequencies)).sum()      # entropy of single tokens
        synthetic = headers[0].name.startswith(SYNTHETIC_PREFIX)
        self.token_bytes = None if synthetic else read_token_bytes(Path(headers[0].name).parent, cfg)
        self.bytes_per_token = counts @ list(map(len, self.token_bytes)) / len(targets) if self.token_bytes else None

    def text_metrics(self, loss: float) -> dict[str, float]:
        """Bits per byte of a loss in nats per token, and the unigram entropy; {} if the tokens' bytes are unknown."""
        if not self.bytes_per_token:
            return {}
        return dict(val_bpb=loss / math.log(2) / self.bytes_per_token, unigram_nats=self.unigram_nats)

    def batches(self, step_cfg: StepConfig) -> Iterable[Batch]:
        """Yield this rank's validation batches, on the device. Only step_cfg.tied is used, by the row plans."""
        S = self.cfg.seqs_per_step
        for start in range(0, len(self.seqs), S):
            my_seqs = self.seqs[start + self.comm.rank:start + S:self.comm.world_size]
            batch, = build_batches(self.cfg, self.comm, process_group=None, cycle=[step_cfg], seqs_by_step=[my_seqs])
            yield batch.to(self.comm.device)


# ====== Section 11: Groups ============================================================================================
class ReplicatedGroup(Group):
    """Parameters that every rank updates in full. One all-reduce sums all of their gradients."""
    def __init__(self, comm: Communicator, specs: list[ParameterSpec], weights: list[Tensor],
                 update_every: int) -> None:
        self.comm, self.specs, self.update_every = comm, specs, update_every
        self.weights = weights
        self.shards = [p.data for p in weights]

    def launch_reduce(self) -> None:
        missing = [spec.label for spec, p in zip(self.specs, self.weights) if p.grad is None]
        assert not missing, f"no gradients for {missing}: call forward_backward first; the loss must use all weights"
        self.grad = torch.cat([p.grad.flatten().to(accum_dtype(p.dtype)) for p in self.weights])
        self.work = self.comm.launch(dist.all_reduce, self.grad)

    def reduced_grads(self) -> list[Tensor]:
        wait_for_work(self.work)
        sizes = [p.numel() for p in self.weights]
        return [grad.view_as(p) for p, grad in zip(self.weights, self.grad.split(sizes))]

    def zero_grad(self) -> None:
        for p in self.weights:
            p.grad = None

    reset = zero_grad

class ShardedGroup(Group):
    """One parameter with a main_grad. Every rank has the full weight, and updates one of W shards of `view`.

    view: the weight, or a view of it; dim 0 is split into shards. accumulates: main_grad is f32, or f64 in an f64 run;
    if false, it has the dtype of the weight.
    """
    def __init__(self, comm: Communicator, spec: ParameterSpec, weight: nn.Parameter, view: Tensor, accumulates: bool,
                 update_every: int) -> None:
        self.comm, self.weight = comm, weight
        self.specs, self.update_every = [spec], update_every
        # Weight and gradient move to buffers of W equal shards, so that collectives work in place. Only collectives
        # read the padding.
        unpadded_size = len(view)
        self.shard_size = -(-unpadded_size // comm.world_size)
        self.padded = view.new_zeros(self.shard_size * comm.world_size, *view.shape[1:])
        self.padded[:unpadded_size] = view
        weight.data = self.padded[:unpadded_size].view_as(weight)
        start = comm.rank * self.shard_size
        self.shard_slice = slice(start, start + self.shard_size)
        self.shards = [self.padded[:unpadded_size][self.shard_slice]]

        grad_dtype = accum_dtype(weight.dtype) if accumulates else weight.dtype
        self.main_grad = torch.zeros_like(self.padded, dtype=grad_dtype)
        # Gradients are sent in the dtype of the weight. If that is grad_dtype, `to` returns main_grad itself.
        self.comm_buffer = self.main_grad.to(weight.dtype) if comm.world_size > 1 else self.main_grad
        weight.main_grad = self.main_grad[:unpadded_size].view_as(weight)
        num_matrices = len(spec.matrices) * (len(weight) if spec.optimizer == "normuon" else 1)
        weight.write_counts = torch.zeros(num_matrices, dtype=torch.int64)    # writes since zero_grad

    def launch_reduce(self) -> None:
        counts = self.weight.write_counts.tolist()
        assert 0 < min(counts) == max(counts), f"{self.specs[0].label}: main_grad writes must be equal, not 0: {counts}"
        self.comm_buffer.copy_(self.main_grad)            # no-op if both are the same tensor
        self.grad = self.comm_buffer[self.shard_slice]
        self.work = self.comm.launch(dist.reduce_scatter_tensor, self.grad, self.comm_buffer)

    def reduced_grads(self) -> list[Tensor]:
        wait_for_work(self.work)
        return [self.grad[:len(self.shards[0])]]

    def launch_gather(self) -> dist.Work | None:
        return self.comm.launch(dist.all_gather_into_tensor, self.padded, self.padded[self.shard_slice])

    def zero_grad(self) -> None:
        """The next backward pass overwrites main_grad."""
        self.weight.grad = None
        self.weight.write_counts.zero_()

    reset = zero_grad


# ====== Section 12: Files =============================================================================================
SETTINGS_FILE = "settings.json"          # in run directories and saves: {field: value as on the command line}
CHECKPOINT_DIR, KEPT_CHECKPOINTS = "checkpoints", 2       # in the run directory
CONSOLE_STEP_LINES = 20
# Settings that belong to one run, which --resume does not inherit, and those that a resumed run may change.
SINGLE_RUN = ("run_dir", "runs", "save", "resume")
MAY_DIFFER = (*SINGLE_RUN, "train_files", "val_files", "epochs", "max_steps", "device", "compile", "attention",
              "row_comms", "micro_batch_size", "val_every", "sample_tokens", "temperature", "target_loss",
              "checkpoint_every", "comm_timeout", "source_sha256", "torch")

def format_value(value: Any) -> str:
    """The inverse of `parse_value` (section 13), for settings.json and the log."""
    return str([astuple(row) for row in value]) if isinstance(value, tuple) else str(value)

def settings_json(cfg: Config) -> str:
    return json.dumps({name: format_value(value) for name, value in vars(cfg).items()}, indent=1)

@dataclass
class Clock:
    """Training time in ms. Only `start` and `stop` wait for the device."""
    comm: Communicator
    ms_at_last_stop: float = 0.0         # above 0 at first if the run is resumed
    start_s: float | None = None         # None while the clock is stopped

    @property
    def ms(self) -> float:
        running_s = 0.0 if self.start_s is None else time.perf_counter() - self.start_s
        return self.ms_at_last_stop + 1000 * running_s

    def start(self) -> None:
        self.comm.synchronize()
        self.start_s = time.perf_counter()

    def stop(self) -> None:
        self.comm.synchronize()
        self.ms_at_last_stop = self.ms
        self.start_s = None

class Log:
    """Log files and console of a run, written by rank 0; every rank checks that losses are finite.

    log.txt has modded-nanogpt's format, log.jsonl is the source of truth (records/guide/FILES.md). Losses are logged
    --adam_every steps late, so that no step waits for the device.
    """
    def __init__(self, run_dir: Path, comm: Communicator, schedule: Schedule, files: dict[str, bytes],
                 facts: dict[str, str], resumed: dict[str, Any] | None = None) -> None:
        """files: {name: content} beside the logs. facts: settings, hashes, versions. resumed: an earlier `state()`."""
        self.run_dir, self.comm, self.schedule, self.facts = run_dir, comm, schedule, facts
        resumed = resumed or dict(tokens=0, steps_done=0, lines={})
        self.tokens, self.steps_done = resumed["tokens"], resumed["steps_done"]               # trained so far
        # Steps whose lines are not written yet: fields of the line, the two loss sums on the host, number of tokens,
        # function that waits for the sums.
        self.pending: list[tuple[dict[str, Any], Tensor, int, Callable[[], None]]] = []
        self.files: dict[str, Any] = {}
        if comm.rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            for name in ("log.txt", "log.jsonl"):         # buffering=1: a killed run loses no line; "x": no overwriting
                self.files[name] = open(run_dir / name, "x", buffering=1, encoding="utf-8", errors="replace")
            for name, content in files.items():
                (run_dir / name).write_bytes(content)
        for name, text in resumed["lines"].items():
            self.write(name, text)

    def state(self) -> dict[str, Any]:
        """Write all pending lines, as `flush`. Returns tokens and steps trained so far, and {log file: its text}."""
        self.flush()
        return dict(tokens=self.tokens, steps_done=self.steps_done,
                    lines={name: (self.run_dir / name).read_text("utf-8") for name in self.files})

    def write(self, name: str, text: str) -> None:
        if name in self.files:
            self.files[name].write(text)

    def event(self, kind: str, **event_fields: Any) -> None:
        """A line of log.jsonl."""
        self.write("log.jsonl", json.dumps(dict(type=kind, **event_fields)) + "\n")

    def info(self, line: str) -> None:
        """A line of log.txt and of the console."""
        self.write("log.txt", line + "\n")
        self.comm.print0(line)

    @contextlib.contextmanager
    def phase(self, name: str, on_clock: bool = False) -> Iterator[None]:
        """Log the wall time of the `with` block. on_clock: the block counts as training time."""
        start = time.perf_counter()
        yield
        ms = (time.perf_counter() - start) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=on_clock)
        self.info(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if on_clock else ''}")

    def step(self, losses: StepLoss, ms: float) -> None:
        """Record the step just launched; `ms`: training time so far. Write the lines of earlier steps. Collective."""
        step_cfg = self.schedule.at(self.steps_done)
        self.steps_done += 1
        num_tokens = step_cfg.seq_len * self.schedule.cfg.seqs_per_step
        self.tokens += num_tokens
        step_fields = dict(step=self.steps_done, train_time_ms=round(ms, 3), tokens=self.tokens,
                           normuon_lr=step_cfg.normuon_lr, adam_lr=step_cfg.adam_lr)
        # Multi-token and next-token loss: sum over ranks, and copy to the host. `flush` reads the copy while the device
        # runs later steps.
        loss_sums = torch.stack([losses.seq_sums.sum(), losses.next_sum])
        wait_for_sums = functools.partial(wait_for_work, self.comm.launch(dist.all_reduce, loss_sums))
        if self.comm.on_cuda:
            wait_for_sums()              # the stream waits, not the host
            on_host = torch.empty_like(loss_sums, device="cpu", pin_memory=True)
            loss_sums = on_host.copy_(loss_sums, non_blocking=True)
            wait_for_sums = torch.cuda.current_stream(self.comm.device).record_event().synchronize
        self.pending.append((step_fields, loss_sums, num_tokens, wait_for_sums))
        self.flush(keep=self.schedule.cfg.adam_every)

    def flush(self, keep: int = 0) -> None:
        """Write the lines of all pending steps but the last `keep`; print about CONSOLE_STEP_LINES of them per run."""
        total_steps = self.schedule.total_steps
        while len(self.pending) > keep:
            step_fields, loss_sums, num_tokens, wait_for_sums = self.pending.pop(0)
            wait_for_sums()
            mtp_loss, next_token_loss = (loss_sum / num_tokens for loss_sum in loss_sums.tolist())
            steps_done, ms = step_fields["step"], step_fields["train_time_ms"]
            self.check_finite(mtp_loss, f"training loss of step {steps_done - 1}")
            self.event("step", **step_fields, train_loss=mtp_loss, train_loss_next=next_token_loss)
            line = f"step:{steps_done}/{total_steps} train_time:{ms:.0f}ms step_avg:{ms / steps_done:.2f}ms"
            self.write("log.txt", line + "\n")
            if steps_done % -(-total_steps // CONSOLE_STEP_LINES) == 0:
                seconds_left = (self.schedule.end_step - steps_done) * ms / steps_done / 1000
                self.comm.print0(f"{line} {seconds_left:.0f} s left, train_loss:{next_token_loss:.3f}")

    def check_finite(self, loss: float, what: str) -> None:
        check(math.isfinite(loss), f"{what} is {loss}: lower --adam_lr and --normuon_lr, or test for overflow with "
              "--dtype=float32 --head=plain", TrainerError)

    def validation(self, loss: float, ms: float, validation_set: ValidationSet) -> None:
        """Log a validation after training for `ms`. loss: in nats per token."""
        self.flush()
        step = self.steps_done
        self.check_finite(loss, f"validation loss at step {step}")
        self.event("val", step=step, val_loss=loss, train_time_ms=round(ms, 3), **validation_set.text_metrics(loss))
        self.info(f"step:{step}/{self.schedule.total_steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms "
                  f"step_avg:{ms / max(step, 1):.2f}ms")

    def aborted(self, cause: str) -> None:
        """The last line, in both logs, of a run that did not finish."""
        with contextlib.suppress(OSError):
            self.event("aborted", step=self.steps_done, cause=cause)
            self.write("log.txt", f"aborted after step {self.steps_done}: {' '.join(cause.split())}\n")

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files = {}


# ---- Checkpoints: a folder with one file per rank, renamed when all ranks have written theirs. Loading runs no code.
def checkpoint_paths(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CHECKPOINT_DIR).glob("step-???????"))

def write_checkpoint(engine: Engine, clock: Clock, log: Log) -> None:
    """Write a checkpoint, from which --resume continues with step log.steps_done; keep only the last two. Collective.

    The caller has stopped the clock.
    """
    comm, step = engine.comm, log.steps_done
    path = log.run_dir / CHECKPOINT_DIR / f"step-{step:07d}"
    partial = path.with_suffix(".part")
    with log.phase(f"checkpoint at step {step}"):
        rows = {label: table.touched_state() for label, table in engine.tables.items()
                if isinstance(table, RowwiseTable)}
        content = dict(state={name: x.cpu() for name, x in engine.tensors().items()}, rows=rows, log=log.state(),
                       train_time_ms=clock.ms, facts=log.facts)
        partial.mkdir(parents=True, exist_ok=True)
        torch.save(content, partial / f"rank{comm.rank}.pt")
        comm.all_gather(None)                             # wait until all ranks have written
        if comm.rank == 0:
            partial.rename(path)
            for old in checkpoint_paths(log.run_dir)[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old, ignore_errors=True)

def read_checkpoint(cfg: Config, comm: Communicator, facts: dict[str, str], end_step: int) -> dict[str, Any]:
    """Read this rank's file of the last checkpoint of --resume. `facts` (settings, hashes, versions) must fit it."""
    paths = checkpoint_paths(Path(cfg.resume))
    check(paths, f"--resume={cfg.resume} has no checkpoint yet: with --checkpoint_every=N, the first one is due at "
          "step N, and the last one at the end of training")
    num_ranks = len(list(paths[-1].glob("rank*.pt")))
    check(num_ranks == comm.world_size, f"{paths[-1]} needs {num_ranks} ranks, not {comm.world_size}")
    path = paths[-1] / f"rank{comm.rank}.pt"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        earlier, steps_done = content["facts"], content["log"]["steps_done"]
    except Exception as error:           # torch raises many kinds; its text advises weights_only=False, which runs code
        raise ConfigError(f"{path} is damaged or of another trainer ({type(error).__name__}): remove {paths[-1]} to "
                          "continue from an earlier checkpoint") from None
    changed = [name for name in facts if name not in MAY_DIFFER and earlier.get(name) != facts[name]]
    check(not changed, f"--resume={cfg.resume}: {', '.join(changed)} must be as in the earlier run; data_sha256 covers "
          "contents and names of all shards")
    check(steps_done < end_step, f"--resume={cfg.resume} has trained {steps_done} steps, and this run ends at step "
          f"{end_step}: give a larger --max_steps, or 0 (all steps)")
    return content

@torch.no_grad()
def load_checkpoint(engine: Engine, checkpoint: dict[str, Any]) -> None:
    """Load a checkpoint after `Engine.reset`. N-gram rows that no update has changed are not stored, and stay zero."""
    for name, x in engine.tensors().items():
        x.copy_(checkpoint["state"][name].view_as(x))     # copy_ alone would broadcast another shape
    for label, touched in checkpoint["rows"].items():     # what RowwiseTable.touched_state returned, in its order
        engine.tables[label].write_rows(*(x.to(engine.comm.device) for x in touched.values()))


# ---- Saves
def full_weights(engine: Engine, tied: bool) -> dict[str, Tensor]:
    """{label: whole weight}, on the CPU of every rank, for --save. tied: embed is the transposed lm_head. Collective.

    An n-gram table has two entries: LABEL.ids, global rows that updates have changed, and LABEL.rows, their weights.
    """
    comm, full = engine.comm, {}
    gather = functools.partial(comm.all_gather, process_group=comm.loader_group)    # gloo: gathers in host memory
    for label, weight in engine.model.state_dict().items():
        full[label] = weight.cpu()
        if label in engine.tables:       # global row r is local row r // W of rank r % W
            full[label] = torch.stack(gather(full[label]), dim=1).flatten(0, 1)[:engine.model.specs[label].shape[0]]
    for label, table in engine.tables.items():
        if isinstance(table, RowwiseTable):
            touched = table.touched_state()
            by_rank = gather((touched["local_rows"] * comm.world_size + comm.rank, touched["rows"]))
            full[f"{label}.ids"], full[f"{label}.rows"] = map(torch.cat, zip(*by_rank))
    if tied:
        full["embed"] = full["lm_head"].t()
    return full

def save_weights(log: Log, engine: Engine, token_bytes: list[bytes] | None) -> str:
    """Write a temporary directory; rename it to --save if that is still free. Rank 0 returns its path. Collective.

    Files: weights.safetensors from `full_weights`, settings.json, and vocab.txt with the bytes of each token.
    """
    cfg = log.schedule.cfg
    path = Path(cfg.save)
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    weights = full_weights(engine, log.schedule.at(log.steps_done).tied)
    if engine.comm.rank == 0:
        partial.mkdir(parents=True)
        safetensors = importlib.import_module("safetensors.torch")
        safetensors.save_file({name: x.contiguous() for name, x in weights.items()}, partial / "weights.safetensors")
        (partial / SETTINGS_FILE).write_text(settings_json(cfg))
        if token_bytes:
            lines = [b"%s %d\n" % (base64.b64encode(text), token) for token, text in enumerate(token_bytes) if text]
            (partial / VOCAB_FILE).write_bytes(b"".join(lines))
        if not os.path.lexists(path):                     # else --save has appeared during the run
            partial.rename(path)
    return str(partial if partial.exists() else path)

def generate(engine: Engine, step_cfg: StepConfig, token_bytes: list[bytes] | None, num_tokens: int,
             temperature: float, prompt: Iterable[int] = (), top_k: int = 0) -> str:
    """Text that continues a prompt of token ids, until BOS. Collective.

    temperature 0: always the likeliest token. top_k: sample from the k likeliest tokens; 0: from all. step_cfg: sets
    attention windows and RoPE. token_bytes: bytes of each token; None: the text is a list of ids.
    """
    cfg = engine.cfg
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.bos_id, *prompt]
    prompt_end = len(tokens)
    for _ in range(num_tokens):
        logits = engine.next_logits(tokens, step_cfg)[:cfg.vocab_size].float().cpu()          # without padding ids
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -math.inf
        token = int(logits.argmax())
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
        token = min(engine.comm.all_gather(token))        # the same on all ranks, even if rounding differs
        if token == cfg.bos_id:
            break
        tokens.append(token)
    token_bytes = token_bytes or [b" %d" % token for token in range(cfg.vocab_size)]
    return b"".join(token_bytes[token] for token in tokens[prompt_end:]).decode("utf-8", "replace")


# ====== Section 13: Launch ============================================================================================
LIST_FLAG_TYPES = dict(stages=Stage, tables=NgramTable)   # {flag that is a list: class of its entries}
CHOICES = dict(
    preset=tuple(PRESETS), dtype=("bfloat16", "float32", "float64"), head=("auto", "fp8", "emulated", "plain"),
    adam_every=(1, 2), device=("auto", "cpu", "cuda"), compile=(-1, 0, 1), row_comms=("sparse", "dense"),
    attention=("auto", "FA4", "FA3", "varlen", "reference"), order=tuple(NGRAM_FACTORS), update_every=(1, 2, 4))
MOST = 2**31 - 1
# {field of Config, Stage or NgramTable: (least, most)}, also of the elements of a list; (0, MOST) if absent
BOUNDS = dict(
    val_tokens=(1, MOST), val_batch_tokens=(1, MOST), max_doc_len=(2, MOST), seqs_per_step=(1, MOST), bos_id=(-1, MOST),
    padded_vocab=(0, 2**19), model_dim=(GATE_INPUTS, 2**16), num_heads=(2, 2**12), head_dim=(8, 2**14),
    num_scheduled_steps=(1, MOST), window_block=(1, MOST), final_long_window=(1, MOST), cooldown_frac=(0, 1),
    normuon_beta2=(0, 1), momentum_min=(0, 1), momentum_max=(0, 1), momentum_warmup_frac=(0, 1),
    momentum_cooldown_frac=(0, 1), micro_batch_size=(1, MOST), runs=(1, 10**4), comm_timeout=(1, 10**6),
    compile=(-1, 1), batch_tokens=(1, MOST), short_window=(1, MOST), long_window=(1, MOST), mtp_start=(0, 1000),
    mtp_end=(0, 1000), rows=(2, MOST), beta2=(0, 1))
FIELD_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "tuple[float, ...]": (int, float),
               "tuple[Stage, ...]": Stage, "tuple[NgramTable, ...]": NgramTable}      # of the elements of a list


# ---- Settings and command line
def parse_value(name: str, text: str) -> Any:
    """Convert the text of a flag to the type of its default. Lists are literals: --tables="[('x_embed', 3, 20480)]"."""
    default = getattr(Config, name)
    try:
        if name in LIST_FLAG_TYPES:
            return tuple(LIST_FLAG_TYPES[name](*entry) for entry in ast.literal_eval(text))
        return os.path.expanduser(text) if isinstance(default, str) else type(default)(text)
    except (ValueError, TypeError, SyntaxError) as error:
        raise ConfigError(f"--{name}={text!r} is not like {format_value(default)!r}: {error}") from None

def check_fields(prefix: str, settings: Config | Stage | NgramTable) -> None:
    """Check types, CHOICES and BOUNDS of all fields and list elements. prefix: printed before the name of a field."""
    for setting in fields(settings):
        name, value = setting.name, getattr(settings, setting.name)
        elements = value if isinstance(value, tuple) else (value,)
        expected = FIELD_TYPES.get(setting.type, object)
        check(isinstance(value, tuple) == setting.type.startswith("tuple") and all(
            isinstance(x, expected) for x in elements), f"{prefix}{name}={value!r} must be {setting.type}")
        choices = CHOICES.get(name, (value,))
        check(value in choices, f"{prefix}{name}={value} must be one of {', '.join(map(str, choices))}")
        least, most = BOUNDS.get(name, (0, MOST))
        for x in elements:
            if name in LIST_FLAG_TYPES:
                check_fields(f"--{name}: {x}: ", x)
            elif isinstance(x, (int, float)):
                check(least <= x <= most, f"{prefix}{name}={value} must be from {least:,} to {most:,}")

def check_layers(layers: tuple[Layer, ...]) -> None:
    """Raise ConfigError if layers do not fit together: unchecked, they would silently train another model."""
    for i, layer in enumerate(layers):
        check((layer.value_embed is None or layer.attention != "none")
              and (not layer.key_offset or layer.attention == "plain"),
              f"LAYERS[{i}]: value_embed needs attention, and key_offset plain attention: {layer}")
    used = sorted(layer.value_embed for layer in layers if layer.value_embed is not None)
    check(used == list(range(len(used))), f"LAYERS: value_embed must be 0, 1, ... once each, not {used}")
    saved = [layer.save_as for layer in layers if layer.save_as]
    check(len(saved) == len(set(saved)), f"LAYERS: save_as must be different names, not {saved}")

def check_config(cfg: Config) -> None:
    """Raise ConfigError if LAYERS are inconsistent, a setting is out of bounds, or settings contradict each other."""
    check_layers(LAYERS)
    check_fields("--", cfg)
    D, H, E = cfg.model_dim, cfg.num_heads, cfg.head_dim
    batch_multiple = FP8_MULTIPLE * cfg.seqs_per_step     # sequences have a multiple of FP8_MULTIPLE tokens
    check(D == H * E and H % 2 == 0 and E % 4 == 0,
          f"--model_dim={D} must be num_heads * head_dim = {H} * {E}, num_heads even, head_dim a multiple of 4")
    check(len(cfg.stages) >= 2 and sum(stage.untie for stage in cfg.stages) <= 1,
          "--stages: needs two or more, the last for the extension steps, and at most one with untie=True")
    for stage in cfg.stages:
        check(stage.batch_tokens % batch_multiple == 0, f"--stages: {stage}: batch_tokens must be a multiple of "
              f"{FP8_MULTIPLE} * seqs_per_step = {batch_multiple}")
        check(stage.short_window < stage.long_window and len(stage.mtp_start) == len(stage.mtp_end) > 0,
              f"--stages: {stage}: needs short_window < long_window, mtp_end as long as mtp_start, at least one weight")
    check(cfg.val_batch_tokens % batch_multiple == 0 and cfg.val_tokens % cfg.val_batch_tokens == 0,
          f"--val_tokens={cfg.val_tokens} must be a multiple of --val_batch_tokens={cfg.val_batch_tokens}, itself a "
          f"multiple of {FP8_MULTIPLE} * seqs_per_step = {batch_multiple}")
    labels = ["bigram_embed", "value_embed", "embed", *(table.label for table in cfg.tables)]
    for table in cfg.tables:
        check(re.fullmatch(r"\w+_embed", table.label, re.ASCII) and labels.count(table.label) == 1,
              f"--tables: {table}: the label must end with _embed, and occur once in {labels}")
        check(table.update_every % cfg.adam_every == 0,
              f"--tables: {table}: update_every must be a multiple of --adam_every={cfg.adam_every}")
    check(cfg.runs == 1 or not (cfg.resume or cfg.save), "--resume and --save need --runs=1")

def make_config(flags: dict[str, Any]) -> Config:
    """Build a Config from {field: value}. Missing fields have the values of the preset."""
    preset = flags.get("preset", Config.preset)
    cfg = Config(**PRESETS.get(preset, {}) | flags)
    check_config(cfg)
    return cfg

def load_settings(directory: Path) -> dict[str, Any]:
    """Settings of a run or of saved weights, {field: value}, except those that belong to a single run."""
    path = directory / SETTINGS_FILE
    check(path.is_file(), f"no settings file {path}: give the directory of a run, or one that --save wrote")
    try:
        return {name: parse_value(name, text) for name, text in json.loads(path.read_text("utf-8")).items()
                if name not in SINGLE_RUN}
    except (ValueError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{path} is not of this version ({error}): use the train_gpt.py in that directory") from None

class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}; --help lists all flags")

def load_config(argv: list[str]) -> Config:
    """Parse the command line. Precedence: flags, settings of the --resume run, preset."""
    parser = ArgumentParser("train_gpt.py", "%(prog)s [--field=value ...]", allow_abbrev=False,
                            argument_default=argparse.SUPPRESS)
    preset = re.search(r"--preset[= ](\w+)", " ".join(argv))
    defaults, helps = vars(Config()) | PRESETS.get(preset[1] if preset else Config.preset, {}), {}
    if {"-h", "--help"} & set(argv):     # helps: comments on Config's fields
        helps = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for setting in fields(Config):
        text = f"{helps.get(setting.name, '')} [{format_value(defaults[setting.name])}]".replace("%", "%%")
        parser.add_argument(f"--{setting.name}", type=functools.partial(parse_value, setting.name),
                            metavar=setting.type, help=text)
    flags = vars(parser.parse_args(argv))
    if "resume" in flags:
        flags = load_settings(Path(flags["resume"])) | flags
    return make_config(flags)


# ---- Ranks and device
def init_distributed(cfg: Config) -> Communicator:
    """Select the device. With more than one rank, join torchrun's process group. Collective."""
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    usable_ranks = max(W for W in range(1, world_size + 1) if cfg.seqs_per_step % W == 0)
    check(usable_ranks == world_size, f"{world_size} ranks: the number must divide "
          f"--seqs_per_step={cfg.seqs_per_step}, so --nproc_per_node={usable_ranks} fits")
    use_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    check(use_cuda or cfg.device != "cuda", "--device=cuda: no CUDA device, or no CUDA build of torch; --preset=pocket "
          "trains on a CPU in about two minutes")
    comm = Communicator(torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"), rank, world_size,
                        timeout=cfg.comm_timeout)
    comm.set_thread_device()
    # By default, glibc returns freed memory to the system after each step, which costs page faults in the next one.
    if not use_cuda and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)             # M_TRIM_THRESHOLD: never trim
        libc.mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: 32 MiB, the largest value that every glibc accepts
    if world_size == 1:
        return comm

    def join() -> dist.ProcessGroup:     # on a thread, with a timeout: torch may wait forever for a silent port
        timeout = timedelta(seconds=cfg.comm_timeout)
        comm.set_thread_device()
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timeout)
        return dist.new_group(backend="gloo", timeout=timeout)

    joined = ThreadPoolExecutor(1).submit(join)
    return replace(comm, loader_group=comm.wait_for_result(joined, "meeting the other ranks"))

def describe_hardware(comm: Communicator) -> str:
    if comm.on_cuda:
        return f"{torch.cuda.get_device_name(comm.device)} x {comm.world_size}"
    name = platform.machine()
    with contextlib.suppress(OSError, TypeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"

def peak_memory(comm: Communicator) -> dict[str, int]:
    """Peaks in MiB: on a GPU, since training began; on a CPU, of the whole process (VmHWM, Linux only)."""
    if comm.on_cuda:
        return dict(allocated=torch.cuda.max_memory_allocated() >> 20, reserved=torch.cuda.max_memory_reserved() >> 20)
    with contextlib.suppress(OSError, TypeError):
        return dict(consumption=int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
    return {}

def resolve_head_precision(cfg: Config, comm: Communicator) -> str:
    """Precision of the training logits: --head, where auto means fp8 if GPU, dtype and sizes allow it, else plain."""
    fits = cfg.dtype == "bfloat16" and cfg.model_dim % FP8_MULTIPLE == cfg.padded_vocab % FP8_MULTIPLE == 0
    supported = fits and comm.on_cuda and torch.cuda.get_device_capability(comm.device) >= (8, 9)
    check(supported or cfg.head != "fp8", "--head=fp8 needs bfloat16, a GPU of capability 8.9 or later, and model_dim "
          f"and padded_vocab that are multiples of {FP8_MULTIPLE}; --head=emulated rounds like fp8 on any device")
    if cfg.head == "auto":
        return "fp8" if supported else "plain"
    return cfg.head

def package_version(package: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


# Kernels of torch's variable-length attention by the GPU's major capability, and their packages. FA3 is written for
# 9.x; two users measured that FA4 is no faster there.
ATTENTION_BY_CAPABILITY = {9: ("FA3", "FA4", "varlen"), 10: ("FA4", "varlen")}
ATTENTION_PACKAGES = {"FA4": "flash-attn-4", "FA3": "flash-attn-3", "varlen": "torch"}
CHECK_CU_SEQLENS = (0, 0, 150, 151, 420, 420, 700)        # of `attention_error`: empty documents, and one of one token

def attention_error(cfg: Config, comm: Communicator) -> float:
    """Largest relative error of attention_varlen with the activated kernel, over output and gradients."""
    generator = torch.Generator(comm.device).manual_seed(0)
    cu_seqlens = torch.tensor(CHECK_CU_SEQLENS, device=comm.device, dtype=torch.int32)
    ATTENTION_ARGS["check"] = AttentionArgs(CHECK_CU_SEQLENS[-1], 128, 4 / cfg.head_dim**0.5)
    qkv_grad = torch.randn(CHECK_CU_SEQLENS[-1], 8, cfg.head_dim, device=comm.device, generator=generator)
    q, k, v, grad = qkv_grad.bfloat16().split(2, dim=1)       # strided, as in the model
    results = []
    for attend, dtype in ((attention_varlen, torch.bfloat16), (attention_reference, torch.float32)):
        qkv = [x.to(dtype).requires_grad_() for x in (q.detach(), k.detach(), v.detach())]
        out = attend(*qkv, cu_seqlens, "check")
        results.append((out.detach(), *torch.autograd.grad(out, qkv, grad.to(dtype))))
    return max(float((x.float() - exact).abs().max() / exact.abs().max()) for x, exact in zip(*results))

def choose_attention(cfg: Config, comm: Communicator) -> tuple[Callable, str]:
    """(function, name with package and version) of the first kernel that agrees with the reference. Collective."""
    auto = cfg.attention == "auto"
    if cfg.attention == "reference" or auto and not (comm.on_cuda and cfg.dtype == "bfloat16"):
        return attention_reference, "reference"
    major = torch.cuda.get_device_capability(comm.device)[0] if comm.on_cuda else 0
    candidates = ATTENTION_BY_CAPABILITY.get(major, ("varlen",)) if auto else (cfg.attention,)
    for name in candidates:
        try:
            importlib.import_module("torch.nn.attention.varlen")              # registers torch's operations; takes 1 s
            if name in ("FA4", "FA3"):
                torch.nn.attention.activate_flash_attention_impl(name)
            elif torch.nn.attention.current_flash_attention_impl():
                torch.nn.attention.restore_flash_attention_impl()
            error = attention_error(cfg, comm)
            failure = "" if error <= 8 * torch.finfo(torch.bfloat16).eps else f"relative error {error:.1e}"
        except Exception as error:       # external kernels may raise anything
            failure = f"{type(error).__name__} {str(error)[:100]}"
        failures = list(filter(None, comm.all_gather(failure)))               # all ranks must use the same kernel
        if not failures:
            package = ATTENTION_PACKAGES[name]
            return attention_varlen, f"{name} ({package} {package_version(package)})"
        comm.print0(f"attention: {name} does not work: {failures[0]}; requirements-gpu.txt lists the packages")
    raise ConfigError(f"no attention kernel of {candidates} works here: pip install -r requirements-gpu.txt, or "
                      "--attention=reference, which is slow and needs more memory")


# ---- A run
def open_data(raw_cfg: Config, comm: Communicator,
              source: bytes) -> tuple[Config, list[ShardHeader], list[ShardHeader], dict[str, str]]:
    """Check data. Returns (raw_cfg with all sizes, headers of both, facts for the log and --resume). Collective."""
    train_headers, val_headers = read_shard_headers(raw_cfg.train_files), read_shard_headers(raw_cfg.val_files)
    # The first rank of each node hashes all shards; the others wait, and take rank 0's hash. All must agree.
    own_hash = hash_shards(train_headers + val_headers) if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    data_hash = comm.all_gather(own_hash)[0]
    facts = {name: format_value(value) for name, value in vars(raw_cfg).items()}
    facts |= dict(LAYERS=str(LAYERS), torch=str(torch.__version__), data_sha256=own_hash or data_hash,
                  source_sha256=hashlib.sha256(source).hexdigest())
    comm.check_agreement(facts)
    cfg = resolve_sizes(raw_cfg, train_headers, val_headers)

    schedule = Schedule(cfg)
    needed = cfg.seqs_per_step * sum(schedule.at(step).seq_len for step in range(schedule.end_step))
    available = cfg.epochs * sum(header.num_tokens for header in train_headers)
    check(not cfg.epochs or needed <= available, f"{schedule.end_step} steps need {needed:,} tokens; {cfg.epochs} "
          f"epoch(s) of {cfg.train_files} have {available:,}: --epochs=0 repeats them, --max_steps=N stops earlier")
    batches = sum(num_val_batches(header.num_tokens, cfg.val_batch_tokens) for header in val_headers)
    advised = max(batches * cfg.val_batch_tokens, FP8_MULTIPLE * cfg.seqs_per_step)         # else the smallest batch
    check(batches * cfg.val_batch_tokens >= cfg.val_tokens, f"--val_tokens={cfg.val_tokens}: {cfg.val_files} has only "
          f"{batches} batches of {cfg.val_batch_tokens}; give --val_tokens={advised} --val_batch_tokens="
          f"{min(advised, cfg.val_batch_tokens)}")
    facts["head"] = resolve_head_precision(cfg, comm)
    return cfg, train_headers, val_headers, facts

def write_header(log: Log, raw_cfg: Config, engine: Engine, attention_name: str, checkpoint: dict[str, Any]) -> None:
    """Log what reproduces this run (keys: records/guide/FILES.md). raw_cfg: before `resolve_sizes`, of all --runs."""
    cfg, comm = log.schedule.cfg, log.comm
    preset = vars(make_config(dict(preset=cfg.preset)))
    changed = {name: format_value(value) for name, value in vars(replace(raw_cfg, run_dir="", seed=cfg.seed)).items()
               if value != preset[name]}
    config = vars(cfg) | {name: list(map(vars, getattr(cfg, name))) for name in LIST_FLAG_TYPES}
    params_total = sum(math.prod(spec.shape) for spec in parameter_specs(cfg))
    header = dict(
        preset=cfg.preset, started=time.strftime("%Y-%m-%dT%H:%M:%S"), changed=changed, config=config, seed=cfg.seed,
        python=platform.python_version(), torch=torch.__version__, triton=package_version("triton"),
        cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if comm.on_cuda else None,
        source_sha256=log.facts["source_sha256"], data_sha256=log.facts["data_sha256"],
        hardware=describe_hardware(comm), world_size=comm.world_size, attention=attention_name,
        head=engine.head_precision, grad_accum_steps=-(-cfg.seqs_per_step // comm.world_size // cfg.micro_batch_size),
        untimed_warmup_steps=sum(map(len, log.schedule.warm_up_cycles(engine.compiles_code))),
        target_loss=cfg.target_loss, params_total=params_total)
    resumed = dict(step=log.steps_done, source=cfg.resume) if checkpoint else {}
    log.event("resumed" if checkpoint else "header", **resumed, **header)
    for line in (
            "=" * 100,
            f"Running PyTorch {header['torch']} compiled for CUDA {header['cuda'] or 'none'} on {header['hardware']} "
            f"with world_size {comm.world_size}",
            f"preset {cfg.preset}, {params_total:,} parameters in {cfg.dtype}, attention kernel {attention_name}, "
            f"head precision {engine.head_precision}, seed {cfg.seed}",
            f"flags that differ from the preset: {', '.join(f'{k}={v}' for k, v in changed.items()) or 'none'}",
            "=" * 100, f"logs in {log.run_dir}"):
        log.info(line)
    if checkpoint:
        log.info(f"resuming {cfg.resume} after step {log.steps_done}; log.txt begins with the lines of that run")

def warm_up(cfg: Config, comm: Communicator, engine: Engine, log: Log) -> None:
    """Compile and run every graph of training and validation on synthetic tokens. `Engine.reset` must follow."""
    cfg = replace(cfg, epochs=0, val_tokens=cfg.val_batch_tokens)
    # One shard, long enough for validation and for the longest cycle, 4 steps, after documents are cut to max_doc_len.
    batch_tokens_bound = cfg.val_batch_tokens + max(stage.batch_tokens for stage in cfg.stages)
    num_tokens = 4 * batch_tokens_bound * (1 + 2 * SYNTHETIC_DOC_LEN // cfg.max_doc_len)
    headers = [ShardHeader(f"{SYNTHETIC_PREFIX}warm-up#0", num_tokens, cfg.vocab_size, cfg.bos_id)]
    validation = ValidationSet(cfg, comm, headers)
    schedule = Schedule(cfg)
    cycles = schedule.warm_up_cycles(every_graph=engine.compiles_code)
    with contextlib.closing(Loader(cfg, comm, headers, cycles)) as loader:
        loader.start()
        for number, cycle in enumerate(cycles, 1):
            with log.phase(f"warm-up of stage {cycle[-1].stage + 1} ({number} of {len(cycles)})"):
                for step_cfg in cycle:
                    train_step(engine, loader, step_cfg)
    with log.phase("warm-up of validation"):
        # Attention windows differ by stage, and in the final validation.
        last_of_stage = {step_cfg.stage: step_cfg for step_cfg in itertools.chain(*cycles)}
        for step_cfg in (*last_of_stage.values(), schedule.at(schedule.end_step)):
            engine.evaluate(validation.batches(step_cfg), step_cfg)

def run_seed(log: Log, engine: Engine, validation: ValidationSet, train_headers: list[ShardHeader],
             clock: Clock) -> dict[str, Any]:
    """Train, log and save one run. Returns its result. Raises OutOfData at the end if data ended early. Collective."""
    cfg, comm, graphs_before = log.schedule.cfg, engine.comm, engine.num_graphs
    with contextlib.closing(Loader(cfg, comm, train_headers, log.schedule.cycles(log.steps_done))) as loader:
        for step in range(log.steps_done):                # skip what a resumed run has trained on
            loader.packer.next(log.schedule.at(step))
        gc.collect()                                      # exclude the objects of model and graphs from collections
        gc.freeze()
        if comm.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        loss, out_of_data = train_loop(engine, loader, validation, clock, log)
        gc.unfreeze()

    comm_bytes = {label: Counter() for label in engine.tables}                # sums over all ranks
    for rank_bytes in comm.all_gather({label: table.bytes for label, table in engine.tables.items()}):
        for label, counts in rank_bytes.items():
            comm_bytes[label].update(counts)
    recompiled = sum(comm.all_gather(engine.num_graphs - graphs_before))
    result = dict(val_loss=loss, train_time_ms=round(clock.ms, 3), steps=log.steps_done, tokens=log.tokens,
                  peak_memory_mib=peak_memory(comm), run_dir=str(log.run_dir), **validation.text_metrics(loss),
                  comms=comm_bytes)
    if recompiled:
        result["recompiles"] = recompiled
        log.info(f"warning: graphs compiled after the warm-up: {recompiled}; TORCH_LOGS=recompiles shows why")
    if out_of_data:
        result["void"] = "the data ended early or changed"
        log.info(f"warning: the training time is not valid: {result['void']}")
    log.event("result", **result)        # before saving, which may fail
    log.info(f"training time {clock.ms / 1000:.2f} s, {log.steps_done} steps, {log.tokens:,} tokens")
    peaks = (f"{name}: {mib} MiB" for name, mib in result["peak_memory_mib"].items())
    log.info("peak memory " + " ".join(peaks))
    if cfg.save:
        log.info(f"weights saved in {save_weights(log, engine, validation.token_bytes)}")
    log.close()
    if out_of_data:
        raise out_of_data
    return result

def train(raw_cfg: Config, source: bytes | None = None) -> dict[str, Any]:
    """Set up once, then train --runs times, with consecutive seeds. Collective.

    Returns dict(type, val_loss, train_time_ms, run_dirs), loss and time as means over the runs. source: bytes of
    train_gpt.py.
    """
    source = source or Path(__file__).read_bytes()
    comm = init_distributed(raw_cfg)
    default_dir = f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{raw_cfg.preset}-{os.urandom(4).hex()}"
    root = Path(comm.all_gather(raw_cfg.run_dir or default_dir)[0])
    if raw_cfg.save:
        check(not os.path.lexists(raw_cfg.save), f"--save={raw_cfg.save} exists: choose a new directory")
        importlib.import_module("safetensors.torch")      # fail now if it is missing
    # cfg: with vocabulary sizes. facts: settings, hashes and versions.
    cfg, train_headers, val_headers, facts = open_data(raw_cfg, comm, source)
    checkpoint = read_checkpoint(cfg, comm, facts, Schedule(cfg).end_step) if cfg.resume else {}
    attention, attention_name = choose_attention(cfg, comm)
    engine = Engine(cfg, comm, attention, head_precision=facts["head"])

    log = None
    results = []
    try:
        for seed in range(cfg.seed, cfg.seed + cfg.runs):
            run_dir = root / f"seed_{seed}" if cfg.runs > 1 else root
            settings = settings_json(replace(raw_cfg, seed=seed))
            files = {"train_gpt.py": source, SETTINGS_FILE: settings.encode()}
            log = Log(run_dir, comm, Schedule(replace(cfg, seed=seed)), files, facts | dict(seed=str(seed)),
                      checkpoint.get("log"))
            write_header(log, raw_cfg, engine, attention_name, checkpoint)
            if not results:
                with log.phase("validation data"):
                    validation = ValidationSet(cfg, comm, val_headers)
                with log.phase("warm-up"):
                    warm_up(cfg, comm, engine, log)
                if engine.uses_compile:
                    log.event("compiled", graphs=engine.num_graphs)
            with log.phase("reset"):
                engine.reset(seed)
                if checkpoint:
                    load_checkpoint(engine, checkpoint)
            clock = Clock(comm, checkpoint.get("train_time_ms", 0.0))
            results.append(run_seed(log, engine, validation, train_headers, clock))
    except BaseException as error:
        if log:
            log.aborted(describe_error(error)[1])
            error.add_note(describe_progress(log))
        raise
    if cfg.sample_tokens:
        sample = generate(engine, log.schedule.at(log.steps_done), validation.token_bytes, cfg.sample_tokens,
                          cfg.temperature)
        comm.print0(f"{' sample ':-^100}\n{sample}\n{'-' * 100}")
    means = {key: float(np.mean([result[key] for result in results])) for key in ("val_loss", "train_time_ms")}
    return dict(type="result", **means, run_dirs=[result["run_dir"] for result in results])


# ---- How a run ends
EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

class Terminated(BaseException):
    """One of EXIT_SIGNALS has arrived; the argument is its number."""

def describe_error(error: BaseException) -> tuple[int, str]:
    """(exit status, message). The message of a bug is its traceback."""
    text = str(error)
    first_line = re.sub(r"^\[\S+\] ", "", text.partition("\n")[0])         # gloo's text begins with a path
    if isinstance(error, Terminated):
        return 128 + error.args[0], f"ended by {signal.Signals(error.args[0]).name}"
    if isinstance(error, (TrainerError, OSError)):
        return getattr(error, "exit_status", 1), f"{type(error).__name__}: {text}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first_line:
        return 1, f"out of memory ({first_line}): lower --micro_batch_size; if that is 1, give --preset=record_24gb"
    is_lost = re.search(r"(?i)connection (closed|reset|refused)|timed? ?out|broken pipe|socket|gloo|nccl", first_line)
    if isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and dist.is_initialized() and is_lost:
        return 1, f"lost another rank ({first_line[:200]}): torchrun's report names the first that failed"
    return 1, "".join(traceback.format_exception(error))

def describe_progress(log: Log) -> str:
    """The last step, the last checkpoint, and the command that continues from there."""
    progress = f"after step {log.steps_done} of {log.schedule.end_step}"
    resumed_from = Path(log.schedule.cfg.resume or log.run_dir)   # this run may have no checkpoint of its own yet
    for run_dir in (log.run_dir, resumed_from):
        if paths := checkpoint_paths(run_dir):
            command = f"./run.sh --resume={shlex.quote(str(run_dir.resolve()))}"
            return f"{progress}; last checkpoint: {paths[-1].name}; to continue: {command}"
    return f"{progress}, without a checkpoint to continue from: --checkpoint_every=100 writes one every 100 steps"

def main(argv: list[str], source: bytes | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 failed, 2 wrong settings or data, 128 + n after signal n."""
    def terminate(signum: int, _: object) -> None:
        for other in EXIT_SIGNALS:       # a second signal must not interrupt the ending
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(signum)

    for signum in EXIT_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:    # nohup ignores SIGHUP
            signal.signal(signum, terminate)
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")     # escapes what the console cannot show of a sample
    # Intended: Triton's own libdevice for round_as_eager, and names of collectives that older versions of torch have.
    warnings.filterwarnings("ignore", message="CUDA_HOME not set|CUDA libdevice not found|`torch.distributed")
    rank = os.environ.get("RANK", "0")
    prefix = f"rank {rank}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    try:
        result = train(load_config(argv), source)
        if rank == "0":
            print(json.dumps(result))
        return 0
    except (Exception, Terminated) as error:              # not SystemExit, after --help
        notes = vars(error).pop("__notes__", ())          # a traceback would repeat them
        status, message = describe_error(error)
        # Before the process group exists, all ranks find the same wrong settings: one rank per node prints them.
        same_on_all = isinstance(error, ConfigError) and not dist.is_initialized()
        if not same_on_all or os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join([prefix + message, *notes]), file=sys.stderr)
        elif "TORCHELASTIC_RUN_ID" in os.environ:         # let the first rank print: torchrun ends all when one exits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)
        return status


if __name__ == "__main__" and "__file__" in globals():
    # Let Linux kill this process when torchrun is gone; otherwise ranks would go on training, unseen.
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)        # PR_SET_PDEATHSIG
        if os.getppid() != PARENT_PID:
            os._exit(1)
    exit_status = main(sys.argv[1:], SOURCE)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_status)                # sys.exit would wait for threads, and one may be stuck in a read

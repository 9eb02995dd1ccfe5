"""Train a small GPT against the clock: recipe A of the NanoGPT speedrun in one file.

    ./run.sh                                                   set-up, data, training, result and a sample
    torchrun --standalone --nproc_per_node=8 train_gpt.py      8 GPUs, preset `record`
    python train_gpt.py --preset=pocket                        one process; on a CPU about two minutes
    python train_gpt.py --help                                 every setting, with its unit

The mathematics is that of modded-nanogpt right after pull request #221 (record 71, 2026-02-15); README.md credits the
people behind each part. A run leaves log.txt, log.jsonl and this source in its run directory.

Floor plan. A room uses only rooms above it, and nothing happens at import.
    1 Config      settings, presets, layer table, stage table, flags, errors, Fabric
    2 Schedule    pure functions of the step: everything a step needs, in one `Values`
    3 Data        shards, packing, bigram hash, the loader thread, validation batches
    4 Kernels     references in PyTorch: norm, rotation, attention, MLP, head loss, symmetric products
    5 Model       parameter table and GPT
    6 Rows        the exchange of embedding rows between ranks
    7 Optimizer   NorMuon, Adam, tie and split, orders of communication
    8 Executor    forward_backward, optim_step, evaluate, snapshot and restore
    9 Race        warm-up, clock, log, validation, sample
   10 Main        flags, process group, device, run

Letters                                                        [value in the record preset]
    W ranks                       L layers [11]                V vocabulary, padded [50,304]
    S slots in a step [8]         D model width [768]          R rows of a table [251,520]
    B slots in a micro-batch      H heads [6]                  E width of one head [128]
    T tokens in one slot          F MLP width [3,072]          G tokens predicted per position [3, 2, 1 by stage]
    M matrices in a bank          N rows of a matrix product, B * T

A slot is one of S equal, independent shares of a step's tokens and the unit of data parallelism: slot s belongs to rank
s mod W. A cycle is two steps, an even and an odd one; Adam updates on the odd one. A bank is several matrices in one
parameter. The objective of a step is J = (1/S) * sum over slots of the slot's summed loss, at every W.
"""
from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import difflib
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ======================================================================================================================
# Room 1: Config
# ======================================================================================================================

class TrainerError(Exception):
    """What was found, what was expected, and what to do about it."""

    def __init__(self, what: str, *, found: object, expected: object, do: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  do:       {do}")


class ConfigError(TrainerError):
    """A setting that cannot work."""


class DataError(TrainerError):
    """Shards that are missing, damaged or too few."""


class FabricError(TrainerError):
    """Ranks or devices that do not fit the run."""


class RunError(TrainerError):
    """Something that went wrong in a run: loss, memory, disk, a stuck thread."""


@dataclass(frozen=True)
class Layer:
    """One layer of the model. Moving a feature to another layer is moving a word."""
    attention: str               # "plain", "paired" (heads j and j + H/2 share one sequence of 2T positions) or "none"
    window: str = "short"        # attention reach: "short" or "long"
    value: int | None = None     # value table added to the attention values
    key_shift: bool = False      # the unrotated half of the keys comes from the token before (key offset, PR #169)
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
    Layer("plain", "long", value=4, key_shift=True),                          # 10
)
ATTENTION_LAYERS = tuple(depth for depth, layer in enumerate(LAYERS) if layer.attention != "none")
NUM_VALUE_TABLES = sum(layer.value is not None for layer in LAYERS)


@dataclass(frozen=True)
class Stage:
    """One stage of the run. Windows are in blocks; the weights of the predicted tokens move linearly over the stage."""
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
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)),
)


def knob(group: str, default: Any, unit: str, about: str, choices: tuple = ()) -> Any:
    return field(default=default, metadata=dict(group=group, unit=unit, about=about, choices=choices))


_data, _model, _schedule, _optim, _run = (functools.partial(knob, g) for g in ("data", "model", "schedule", "optimizer", "run"))


@dataclass(frozen=True)
class Config:
    """Everything a run may vary. One field is one flag; a preset overrides fields and nothing else."""
    train_files: str = _data("data/fineweb10B/fineweb_train_*.bin", "pattern", "training shards, taken in name order")
    val_files: str = _data("data/fineweb10B/fineweb_val_*.bin", "pattern", "validation shards")
    val_tokens: int = _data(10_485_760, "tokens", "validation tokens, a multiple of val_batch_tokens")
    val_batch_tokens: int = _data(2_097_152, "tokens", "one block of num_slots validation slots")
    max_doc_len: int = _data(2048, "tokens", "a document gives at most its first max_doc_len tokens")
    epochs: int = _data(1, "passes", "over the training shards; 0: cycle without end")
    num_slots: int = _data(8, "slots", "equal shares of a step; the ranks must divide it; changing it changes the packing")
    vocab_size: int = _data(0, "tokens", "0: from the shard header")
    padded_vocab: int = _data(0, "tokens", "columns of the head; 0: the next multiple of 128")
    document_start: int = _data(-1, "token id", "first token of every document; -1: from the shard header")
    bigram_rows: int = _data(0, "rows", "hash table of token pairs; 0: 5 x padded_vocab; the last row: no pair")

    model_dim: int = _model(768, "features", "width D = num_heads x head_dim")
    num_heads: int = _model(6, "heads", "an even number: paired layers join heads j and j + H/2")
    head_dim: int = _model(128, "features", "a multiple of 4, at least 8; half of it rotates")
    attn_scale: float = _model(0.1, "1", "softmax scale before YaRN; queries and keys are normalised")
    dtype: str = _model("bfloat16", "type", "weights and activations", ("bfloat16", "float32", "float64"))
    head: str = _model("auto", "precision", "training logits; auto: fp8 on devices that have it",
                       ("auto", "fp8", "emulated", "plain"))

    num_scheduled_steps: int = _schedule(1507, "steps", "split evenly over all stages but the last")
    num_extension_steps: int = _schedule(40, "steps", "last stage, at the lowest learning rate")
    stages: tuple = _schedule(STAGES, "table", "rows 'batch_tokens short long lr_mul mtp_start mtp_end', joined by ';'")
    window_block: int = _schedule(128, "tokens", "unit of the windows in the stage table")
    final_long_window: int = _schedule(20, "blocks", "long window of the final validation")
    split_stage: int = _schedule(2, "stage", "head and embedding part at its first odd step")
    cooldown_frac: float = _schedule(0.55, "share", "of the scheduled steps, at the end, on a falling learning rate")
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

    seed: int = _run(0, "integer", "initial values; each parameter draws from (seed, label)")
    device: str = _run("auto", "device", "auto: cuda if there is one", ("auto", "cpu", "cuda"))
    compile: int = _run(-1, "0 or 1", "torch.compile; -1: on CUDA only", (-1, 0, 1))
    slots_per_micro_batch: int = _run(0, "slots", "that go through the model together; 0: all on a CPU, 1 on a GPU")
    max_steps: int = _run(0, "steps", "stop early, then validate; 0: the whole schedule")
    run_dir: str = _run("", "folder", "logs; empty: logs/<run id>")
    comm_timeout: float = _run(60.0, "s", "longest wait for another rank or for the loader thread")
    sample_tokens: int = _run(96, "tokens", "generated after the run; 0: none")


PRESETS: dict[str, dict[str, Any]] = {
    "record": dict(device="cuda"),
    "pocket": dict(
        train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin", val_tokens=65_536,
        val_batch_tokens=8_192, max_doc_len=256, model_dim=96, head_dim=16, attn_scale=12.8 / 16, dtype="float32",
        head="plain", stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 256) for stage in STAGES),
        window_block=8, num_scheduled_steps=520, num_extension_steps=20, val_every=180),
    "tiny": dict(
        train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1", val_tokens=1024, val_batch_tokens=512,
        max_doc_len=24, model_dim=32, num_heads=2, head_dim=16, attn_scale=12.8 / 16, dtype="float32", head="plain",
        stages=tuple(replace(stage, batch_tokens=stage.batch_tokens // 1024) for stage in STAGES), window_block=4,
        num_scheduled_steps=9, num_extension_steps=3, val_every=5, sample_tokens=8),
}
RECORD_STEPS, RECORD_MOMENTUM_WARMUP, RECORD_MOMENTUM_COOLDOWN = 1547, 300, 50    # recipe 4
GPT2_VOCAB, GPT2_DOCUMENT_START = 50_257, 50_256
MAX_VOCAB = 65_535                                                            # token ids are stored as u16
GATE_INPUTS = 12                                                              # features that a gate reads


def parse_stage(row: str) -> Stage:
    batch_tokens, short, long, lr_mul, start, end = row.split()
    weights = [tuple(map(float, w.split(","))) for w in (start, end)]
    return Stage(int(batch_tokens), int(short), int(long), float(lr_mul), *weights)


def parse_value(knob_field: dataclasses.Field, text: str) -> Any:
    """Text of a flag -> value of its field. Raises ConfigError."""
    kind, meta = type(knob_field.default), knob_field.metadata
    try:
        value = tuple(map(parse_stage, text.split(";"))) if kind is tuple else kind(text.replace("_", "") if kind is int else text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(text)
    except (ValueError, TypeError):
        raise ConfigError(f"--{knob_field.name}", found=repr(text), expected=f"{kind.__name__} ({meta['unit']}): {meta['about']}",
                          do=f"for example --{knob_field.name}={flag_text(knob_field.default)}") from None
    if meta["choices"] and value not in meta["choices"]:
        near = difflib.get_close_matches(str(value), list(map(str, meta["choices"])), 1)
        raise ConfigError(f"--{knob_field.name}", found=repr(text), expected=f"one of {list(meta['choices'])}",
                          do=f"--{knob_field.name}={near[0] if near else meta['choices'][0]}")
    return value


def flag_text(value: Any) -> str:
    """A field's value as it is written behind its flag."""
    if not isinstance(value, tuple):
        return str(value)
    return ";".join(" ".join(",".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in dataclasses.astuple(stage))
                    for stage in value)


def parse_flags(argv: Sequence[str]) -> tuple[str, Config]:
    """Flags -> (preset name, Config). Raises ConfigError; --help prints the fields by group and exits."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    parser = argparse.ArgumentParser("train_gpt.py", allow_abbrev=False, exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="train_gpt.py [--preset=NAME] [--field=value ...]",
                                     description="Train a small GPT against the clock. A preset sets fields; flags override it.",
                                     epilog="exit status: 0 done, 1 run failed, 2 bad setting or data, 130 interrupted")
    parser.add_argument("--preset", default="record", metavar="NAME", help=f"one of {', '.join(PRESETS)} (record)")
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(f.metadata["group"] for f in fields.values())}
    for f in fields.values():
        shown = "see STAGES" if isinstance(f.default, tuple) else f.default if f.default != "" else "empty"
        groups[f.metadata["group"]].add_argument(f"--{f.name}", metavar=f.metadata["unit"].upper().replace(" ", "_"),
                                                 help=f"{f.metadata['about']} ({shown})".replace("%", "%%"))
    try:
        flags, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("flags", found=str(error), expected="--field=value", do="see --help") from None
    if unknown:
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, [f"--{known}" for known in ("preset", *fields)], 3)
        raise ConfigError("unknown flag", found=name, expected="--field=value", do=f"did you mean {', '.join(near) or '--help'}?")
    preset = flags.preset
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, 1)
        raise ConfigError("unknown preset", found=repr(preset), expected=f"one of {list(PRESETS)}",
                          do=f"--preset={near[0] if near else 'pocket'}")
    given = {name: parse_value(f, text) for name, f in fields.items() if (text := getattr(flags, name)) is not None}
    cfg = Config(**{**PRESETS[preset], **given})
    check_config(cfg)
    return preset, cfg


def check_config(cfg: Config) -> None:
    """Raise ConfigError for sizes that cannot work, with the nearest ones that do."""
    def need(ok: bool, what: str, found: object, expected: str, do: str) -> None:
        if not ok:
            raise ConfigError(what, found=found, expected=expected, do=do)

    need(cfg.num_heads >= 2 and cfg.num_heads % 2 == 0, "num_heads", cfg.num_heads, "an even number: paired layers join two heads",
         f"--num_heads={max(2, cfg.num_heads - 1)} or --num_heads={max(2, cfg.num_heads + 1)}")
    need(cfg.head_dim >= 8 and cfg.head_dim % 4 == 0, "head_dim", cfg.head_dim, "a multiple of 4, at least 8",
         f"--head_dim={max(8, cfg.head_dim // 4 * 4)} or --head_dim={max(8, (cfg.head_dim + 3) // 4 * 4)}")
    need(cfg.model_dim >= GATE_INPUTS and cfg.model_dim == cfg.num_heads * cfg.head_dim, "model_dim", cfg.model_dim,
         f"num_heads x head_dim = {cfg.num_heads} x {cfg.head_dim}, at least {GATE_INPUTS}",
         f"--model_dim={cfg.num_heads * cfg.head_dim}")
    need(cfg.num_slots >= 1, "num_slots", cfg.num_slots, "at least 1", "--num_slots=8")
    blocks = [("stages", stage.batch_tokens) for stage in cfg.stages] + [("val_batch_tokens", cfg.val_batch_tokens)]
    unit = 16 * cfg.num_slots
    for name, tokens in blocks:
        need(tokens >= unit and tokens % unit == 0, f"{name}: tokens of a batch", tokens,
             f"a multiple of 16 x num_slots = {unit}, so that a slot is a multiple of 16 tokens",
             f"{max(unit, tokens // unit * unit)} or {max(unit, (tokens + unit - 1) // unit * unit)} tokens")
    below, above = (max(1, cfg.val_tokens // cfg.val_batch_tokens + k) * cfg.val_batch_tokens for k in (0, 1))
    need(cfg.val_tokens >= 1 and cfg.val_tokens % cfg.val_batch_tokens == 0, "val_tokens", cfg.val_tokens,
         f"a multiple of val_batch_tokens={cfg.val_batch_tokens}", f"--val_tokens={below} or --val_tokens={above}")
    need(len(cfg.stages) >= 2, "stages", f"{len(cfg.stages)} rows", "at least two: scheduled stages, then the extension", "see STAGES")
    for stage in cfg.stages:
        need(len(stage.mtp_start) == len(stage.mtp_end) >= 1 and min(stage.mtp_start + stage.mtp_end) >= 0, "stages: token weights",
             f"{stage.mtp_start} and {stage.mtp_end}", "two equally long rows of weights >= 0", "see STAGES")
        need(1 <= stage.short_window < stage.long_window, "stages: windows", (stage.short_window, stage.long_window),
             "1 <= short < long", "see STAGES")
    scheduled_stages = len(cfg.stages) - 1
    need(cfg.num_scheduled_steps >= scheduled_stages, "num_scheduled_steps", cfg.num_scheduled_steps,
         f"at least one step for each of {scheduled_stages} stages", f"--num_scheduled_steps={scheduled_stages}")
    need(cfg.vocab_size <= MAX_VOCAB and cfg.padded_vocab <= MAX_VOCAB + 1, "vocabulary", max(cfg.vocab_size, cfg.padded_vocab),
         f"at most {MAX_VOCAB} ids, since shards store 16-bit tokens", "a smaller vocabulary")
    for name, least in dict(num_extension_steps=0, max_doc_len=2, epochs=0, val_every=0, max_steps=0, slots_per_micro_batch=0,
                            window_block=1, final_long_window=1, split_stage=0, sample_tokens=0, vocab_size=0, padded_vocab=0,
                            bigram_rows=0, document_start=-1, momentum_warmup_steps=-1, momentum_cooldown_steps=-1).items():
        need(getattr(cfg, name) >= least, name, getattr(cfg, name), f"at least {least}", f"--{name}={max(least, 0)}")
    need(0 <= cfg.cooldown_frac <= 1, "cooldown_frac", cfg.cooldown_frac, "a share between 0 and 1", "--cooldown_frac=0.55")
    need(cfg.comm_timeout > 0, "comm_timeout", cfg.comm_timeout, "seconds above 0", "--comm_timeout=60")
    need(cfg.split_stage < len(cfg.stages), "split_stage", cfg.split_stage, f"a stage 0..{len(cfg.stages) - 1}", "--split_stage=2")


@dataclass(frozen=True)
class Fabric:
    """The one object that knows ranks and devices. Passed on, never global."""
    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def check_fabric(cfg: Config, fabric: Fabric) -> None:
    if cfg.num_slots % fabric.world:
        fits = [w for w in range(1, cfg.num_slots + 1) if cfg.num_slots % w == 0]
        raise FabricError("number of ranks", found=fabric.world, expected=f"a divisor of num_slots={cfg.num_slots}: {fits}",
                          do=f"torchrun --nproc_per_node={max(w for w in fits if w <= fabric.world)} train_gpt.py ...")

# ======================================================================================================================
# Room 2: Schedule
# ======================================================================================================================

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
    short_window: int                    # tokens; a query sees that many keys before itself, and itself
    long_window: int
    mtp_weights: tuple[float, ...]       # weight of the 1st, 2nd, ... next token, not normalised
    rotary: Rotary
    lr_factor: float
    normuon_lr: float
    adam_lr: float
    momentum: float
    adam_step: bool                      # odd step: Adam consumes the gradients of the cycle
    split: bool                          # after this step's update, head and embedding part
    validate: bool                       # validation comes before the training part of this step


ROTARY_BASE = 1024.0
YARN_ALPHA, YARN_BETA = 1.0, 32.0        # full turns inside the old window: below alpha stretched, above beta kept


def base_frequencies(head_dim: int) -> tuple[float, ...]:
    """E/4 frequencies from 1 down to 1/1024 (half-truncated rotary, recipe 2.4)."""
    count = head_dim // 4
    return tuple(ROTARY_BASE ** (-i / (count - 1)) for i in range(count))


def yarn(rotary: Rotary, old: int, new: int) -> Rotary:
    """Stretch low frequencies when the long window grows from `old` to `new` tokens (YaRN, arXiv 2309.00071; recipe 2.4)."""
    def stretched(frequency: float) -> float:
        turns = old * frequency / (2 * math.pi)
        keep = min(max((turns - YARN_ALPHA) / (YARN_BETA - YARN_ALPHA), 0.0), 1.0)
        return frequency * (old / new + keep * (1 - old / new))
    return Rotary(tuple(map(stretched, rotary.frequencies)), rotary.attn_scale * (0.2 * math.log(new / old) + 1))


class Schedule:
    """Pure functions of the step, recipe 4. `at(total_steps)` is the final validation, with the widest window."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.total_steps = cfg.num_scheduled_steps + cfg.num_extension_steps
        scheduled_stages = len(cfg.stages) - 1
        ends = [round(cfg.num_scheduled_steps * (k + 1) / scheduled_stages) for k in range(scheduled_stages)]
        self.stage_ends = (*ends, self.total_steps)
        self.stage_starts = (0, *ends)
        self.split_step = self.stage_starts[cfg.split_stage] | 1             # an Adam step, so that both moments are fresh
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))
        self.last_step = min(cfg.max_steps or self.total_steps, self.total_steps)
        self.rotary = [Rotary(base_frequencies(cfg.head_dim), cfg.attn_scale)]
        for old, new in zip(cfg.stages, cfg.stages[1:]):
            windows = (old.long_window * cfg.window_block, new.long_window * cfg.window_block)
            self.rotary.append(yarn(self.rotary[-1], *windows) if windows[0] != windows[1] else self.rotary[-1])

    def stage_at(self, step: int) -> int:
        return next((k for k, end in enumerate(self.stage_ends) if step < end), len(self.stage_ends) - 1)

    def lr_factor_at(self, step: int) -> float:
        """Stage multiplier, then linear from the cooldown's start to the floor; no warm-up."""
        factor = self.cfg.stages[self.stage_at(step)].lr_mul
        if step < self.cooldown_start:
            return factor
        done = min(1.0, (step - self.cooldown_start) / max(1, self.cfg.num_scheduled_steps - self.cooldown_start))
        return factor * (1 - done) + self.cfg.lr_floor * done

    def momentum_at(self, step: int) -> float:
        """Up over the first steps, down over the last; both ramps in proportion to the run unless set."""
        low, high = self.cfg.momentum_min, self.cfg.momentum_max
        up, down = (round(record * self.total_steps / RECORD_STEPS) if given < 0 else given for record, given in
                    ((RECORD_MOMENTUM_WARMUP, self.cfg.momentum_warmup_steps),
                     (RECORD_MOMENTUM_COOLDOWN, self.cfg.momentum_cooldown_steps)))
        if step < up:
            return low + (high - low) * step / up
        falling = step - (self.total_steps - down)
        return high - (high - low) * falling / down if falling > 0 else high

    def mtp_weights_at(self, step: int) -> tuple[float, ...]:
        """Weights of the next tokens, linear in the position inside the stage, which never reaches 1."""
        k = self.stage_at(step)
        position = (step - self.stage_starts[k]) / max(1, self.stage_ends[k] - self.stage_starts[k])
        stage = self.cfg.stages[k]
        return tuple(start + (end - start) * position for start, end in zip(stage.mtp_start, stage.mtp_end))

    def at(self, step: int) -> Values:
        cfg, k, factor = self.cfg, self.stage_at(step), self.lr_factor_at(step)
        stage = cfg.stages[k]
        long_window = cfg.final_long_window if step == self.total_steps else stage.long_window     # no YaRN at the end
        return Values(
            step=step, stage=k, slot_tokens=stage.batch_tokens // cfg.num_slots, max_doc_len=cfg.max_doc_len,
            val_slot_tokens=cfg.val_batch_tokens // cfg.num_slots, short_window=stage.short_window * cfg.window_block,
            long_window=long_window * cfg.window_block, mtp_weights=self.mtp_weights_at(step), rotary=self.rotary[k],
            lr_factor=factor, normuon_lr=cfg.normuon_lr * factor, adam_lr=cfg.adam_lr * factor,
            momentum=self.momentum_at(step), adam_step=step % 2 == 1, split=step == self.split_step,
            validate=cfg.val_every > 0 and step % cfg.val_every == 0)

    def warm_up_steps(self) -> list[int]:
        """Whole cycles around the start of every stage: each graph of the run, tied and split, occurs in them."""
        cycles = {0, *(start // 2 + k for start in self.stage_starts for k in (0, 1))}
        return [step for cycle in sorted(cycles) for step in (2 * cycle, 2 * cycle + 1) if step < self.last_step]

# ======================================================================================================================
# Room 3: Data
# ======================================================================================================================

SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # recipe 1.2; table in data/README.md
HASH_CURRENT, HASH_PREVIOUS = 36313, 27191                                    # recipe 2.5
FORMULA = "formula:"                                                          # formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS


class ShardHeader(NamedTuple):
    """One shard: a file, or a formula that makes its tokens."""
    name: str
    tokens: int
    vocab_size: int
    document_start: int


class Shard:
    """Tokens of one shard in memory and where its documents start."""

    def __init__(self, tokens: np.ndarray, document_start: int) -> None:
        self.tokens = tokens                                                  # (tokens,) u16
        self.doc_starts = np.flatnonzero(tokens == document_start)            # (documents,) i64
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))
        self._totals: tuple[int, np.ndarray] = (0, np.zeros(1, np.int64))

    def totals(self, max_doc_len: int) -> np.ndarray:
        """(documents + 1,) i64: tokens before each document when every document is cut to max_doc_len."""
        if self._totals[0] != max_doc_len:
            self._totals = max_doc_len, np.concatenate([[0], np.cumsum(np.minimum(self.doc_lengths, max_doc_len))])
        return self._totals[1]


class Slot(NamedTuple):
    """One slot of T tokens on the host."""
    tokens: np.ndarray                   # (T + 1,) i32: inputs are the first T, targets the last T
    cu_seqlens: np.ndarray               # (documents + 1,) i32: 0, then the end of each document in the inputs


def formula_tokens(seed: int, count: int, vocab_size: int, document_start: int) -> np.ndarray:
    """Tokens from a formula, (count,) u16: a noisy walk over the vocabulary in documents of 2 to 62 tokens.

    Every platform makes the same ones. Used by the tiny preset and by the warm-up, which must see no training data.
    """
    at = np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)
    mixed = ((at * np.uint64(0x9E3779B97F4A7C15)) ^ (at >> np.uint64(7))) * np.uint64(0xD1342543DE82EF95) >> np.uint64(40)
    noise = mixed % np.uint64(5) == 0
    tokens = (np.where(noise, mixed // np.uint64(5), at * np.uint64(7)) % np.uint64(max(1, vocab_size - 1))).astype(np.int64)
    tokens += tokens >= document_start                                        # never the document start by chance
    starts = np.cumsum(2 + mixed % np.uint64(61)).astype(np.int64)
    tokens[starts[starts < count]] = document_start
    tokens[:1] = document_start
    return np.minimum(tokens, vocab_size - 1).astype(np.uint16)


def read_header(path: Path) -> ShardHeader:
    """Read and check the first 1,024 bytes and the length of a shard. Raises DataError."""
    size = path.stat().st_size
    words = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    if len(words) < HEADER_BYTES // 4 or words[0] != SHARD_MAGIC or words[1] != SHARD_VERSION:
        raise DataError(f"{path}: header at byte 0", found=f"{size} bytes, first words {words[:2].tolist()}",
                        expected=f"{HEADER_BYTES} bytes that begin with {SHARD_MAGIC} (magic), {SHARD_VERSION} (version)",
                        do="fetch or write the file again; the format is in data/README.md")
    count, vocab, start = (int(word) for word in words[2:5])
    if count <= 0 or size != HEADER_BYTES + 2 * count:
        raise DataError(f"{path}: length", found=f"{size} bytes", expected=f"{HEADER_BYTES} + 2 x {count} tokens (header word 2) "
                        f"= {HEADER_BYTES + 2 * count} bytes", do="the file is cut or still being written; fetch it again")
    vocab, start = (vocab, start) if vocab else (GPT2_VOCAB, GPT2_DOCUMENT_START)       # old shards leave both words 0
    if not 0 <= start < vocab <= MAX_VOCAB:
        raise DataError(f"{path}: header words 3 and 4", found=f"vocabulary {vocab}, document start {start}",
                        expected=f"0 <= document start < vocabulary <= {MAX_VOCAB}", do="write the shards again")
    return ShardHeader(str(path), count, vocab, start)


def find_shards(pattern: str) -> list[ShardHeader]:
    """Headers of all shards of a pattern in name order, checked. Raises DataError."""
    if pattern.startswith(FORMULA):
        vocab, start, tokens, shards = map(int, pattern[len(FORMULA):].split(":"))
        return [ShardHeader(f"{pattern}#{seed}", tokens, vocab, start) for seed in range(shards)]
    headers = [read_header(Path(path)) for path in sorted(glob.glob(pattern))]
    if not headers:
        raise DataError("no shards", found=f"no file matches {pattern!r} in {os.getcwd()}", expected="at least one .bin shard",
                        do="python data/cached_fineweb10B.py 9 for the record preset, python data/pocket.py for pocket, "
                           "or --train_files= and --val_files=")
    for other in headers[1:]:
        if other[2:] != headers[0][2:]:
            raise DataError("shards of different vocabularies", found=f"{other.name}: {other[2:]}",
                            expected=f"(vocabulary, document start) {headers[0][2:]} as in {headers[0].name}",
                            do="narrow the file pattern to one data set")
    return headers


def load_shard(header: ShardHeader) -> Shard:
    """Read a shard and check every token. Raises DataError."""
    if header.name.startswith(FORMULA):
        tokens = formula_tokens(int(header.name.rpartition("#")[2]), header.tokens, header.vocab_size, header.document_start)
    else:
        tokens = np.fromfile(header.name, "<u2", header.tokens, offset=HEADER_BYTES)
    if len(tokens) != header.tokens:
        raise DataError(f"{header.name}: cut while in use", found=f"{len(tokens)} tokens", expected=f"{header.tokens} as at the start",
                        do="fetch the file again and start over")
    if tokens.max() >= header.vocab_size:
        at = int(np.argmax(tokens >= header.vocab_size))
        raise DataError(f"{header.name}: token {at} at byte {HEADER_BYTES + 2 * at}", found=int(tokens[at]),
                        expected=f"an id below the vocabulary size {header.vocab_size}", do="write the shard again with its true "
                        "vocabulary size in header word 3")
    shard = Shard(tokens, header.document_start)
    if len(shard.doc_starts) == 0:
        raise DataError(f"{header.name}: documents", found="no document start in the whole shard",
                        expected=f"token {header.document_start} in front of every document", do="write the shard again")
    return shard


def resolve(cfg: Config, train: list[ShardHeader], val: list[ShardHeader]) -> Config:
    """Fill the sizes that come from the shard header. Raises ConfigError where a flag contradicts it."""
    header = train[0]
    if val[0][2:] != header[2:]:
        raise DataError("training and validation shards", found=f"{val[0].name}: (vocabulary, document start) {val[0][2:]}",
                        expected=f"{header[2:]} as in {header.name}", do="give --train_files and --val_files of one data set")
    for name, unset, stored in (("vocab_size", 0, header.vocab_size), ("document_start", -1, header.document_start)):
        if getattr(cfg, name) not in (unset, stored):
            raise ConfigError(f"--{name}", found=getattr(cfg, name), expected=f"{stored}, which {header.name} says",
                              do="leave the flag out: the header decides")
    padded = cfg.padded_vocab or (header.vocab_size + 127) // 128 * 128
    if padded < header.vocab_size:
        raise ConfigError("--padded_vocab", found=padded, expected=f"at least the vocabulary size {header.vocab_size}",
                          do="--padded_vocab=0")
    rows = cfg.bigram_rows or 5 * padded
    if not 2 <= rows < 2**31:
        raise ConfigError("--bigram_rows", found=rows, expected="2 to 2^31 - 1", do=f"--bigram_rows={5 * padded}")
    return replace(cfg, vocab_size=header.vocab_size, document_start=header.document_start, padded_vocab=padded, bigram_rows=rows)


def pack_block(shard: Shard, first_doc: int, num_slots: int, slot_tokens: int, max_doc_len: int) -> tuple[list[tuple], int] | None:
    """Deal documents to the slots of a block in stream order (recipe 5.2, 11.3).

    Each slot takes whole documents, cut to max_doc_len, until it has slot_tokens + 1 tokens; the last one is cut to fit and
    its rest is lost, so that the next slot begins with a fresh document.
    Returns (slots, next document), a slot being (starts, ends) of its pieces, or None if the documents run out for any slot.
    """
    totals, slots, doc = shard.totals(max_doc_len), [], first_doc
    for _ in range(num_slots):
        goal = totals[doc] + slot_tokens + 1
        last = int(np.searchsorted(totals, goal))                             # the first document boundary at or past the goal
        if last == len(totals):
            return None
        starts = shard.doc_starts[doc:last]
        ends = starts + (totals[doc + 1:last + 1] - totals[doc:last])
        ends[-1] -= totals[last] - goal
        slots.append((starts, ends))
        doc = last
    return slots, doc


def make_slot(shard: Shard, starts: np.ndarray, ends: np.ndarray) -> Slot:
    tokens = np.concatenate([shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())])
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                                       # the last token is a target only
    return Slot(tokens.astype(np.int32), cu_seqlens.astype(np.int32))


def bigram_hash(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Row of each (previous, current) token pair of a slot, (T,) i32 -> (T,) i32 in [0, rows) (recipe 2.5).

    row = ((36313 * current) xor (27191 * previous)) mod (rows - 1), in 32-bit arithmetic that wraps. The last row means: no
    pair, and stands at position 0. Two quirks are part of the published losses: pairs cross document borders, and position 1
    takes rows - 1 for its previous token, because the peer overwrites position 0 before it multiplies.
    """
    previous = np.empty_like(tokens)
    previous[1:] = tokens[:-1]
    previous[:2] = rows - 1
    mixed = (tokens * np.int32(HASH_CURRENT)) ^ (previous * np.int32(HASH_PREVIOUS))
    hashed = np.remainder(mixed, np.int32(rows - 1))
    hashed[0] = rows - 1
    return hashed


class Batch(NamedTuple):
    """This rank's slots of one step, b of them."""
    step: int
    tokens: Tensor                       # (b, T) i32
    targets: Tensor                      # (b, T) i64: the next token
    bigram_rows: Tensor                  # (b, T) i32
    cu_seqlens: Tensor                   # (b, C) i32: 0, document ends, then T as often as needed to fill C columns

    def to(self, device: torch.device) -> Batch:
        return Batch(self.step, *(x.to(device, non_blocking=True) for x in self[1:]))


def make_batch(step: int, slots: list[Slot], bigram_rows: int, pin: bool) -> Batch:
    tokens = np.stack([slot.tokens for slot in slots])
    inputs = tokens[:, :-1]
    cu_seqlens = np.full((len(slots), max(len(slot.cu_seqlens) for slot in slots)), inputs.shape[1], np.int32)
    for row, slot in zip(cu_seqlens, slots):
        row[:len(slot.cu_seqlens)] = slot.cu_seqlens
    hashed = np.stack([bigram_hash(row, bigram_rows) for row in inputs])
    arrays = (np.ascontiguousarray(inputs), tokens[:, 1:].astype(np.int64), hashed, cu_seqlens)
    return Batch(step, *(torch.from_numpy(a).pin_memory() if pin else torch.from_numpy(a) for a in arrays))


class TrainStream:
    """Blocks of slots in stream order; the same at every number of ranks. A block that does not fit starts the next shard."""

    def __init__(self, headers: list[ShardHeader], cfg: Config) -> None:
        self.cfg, self.headers, self.doc, self.opened = cfg, headers, 0, 0
        self.reader = ThreadPoolExecutor(1, "shard-reader")
        self.upcoming = self._open_next()
        self.shard = self._take_next(step=0)

    def _open_next(self) -> Future | None:
        passes = self.cfg.epochs or math.inf
        if self.opened >= len(self.headers) * passes:
            return None
        self.opened += 1
        return self.reader.submit(load_shard, self.headers[(self.opened - 1) % len(self.headers)])

    def _take_next(self, step: int) -> Shard:
        if self.upcoming is None:
            raise DataError("training data ended", found=f"{len(self.headers)} shards, {sum(h.tokens for h in self.headers)} tokens, "
                            f"enough for {step} steps", expected="more shards, or fewer steps",
                            do=f"fetch more shards, --max_steps={step}, or --epochs=0 to cycle")
        shard, self.upcoming, self.doc = bounded(self.upcoming, self.cfg, "reading a shard"), self._open_next(), 0
        return shard

    def block(self, step: int, slot_tokens: int, max_doc_len: int) -> tuple[Shard, list[tuple]]:
        for _ in range(len(self.headers) + 1):
            packed = pack_block(self.shard, self.doc, self.cfg.num_slots, slot_tokens, max_doc_len)
            if packed is not None:
                slots, self.doc = packed
                return self.shard, slots
            self.shard = self._take_next(step)
        raise DataError("training shards are too small", found=f"no shard holds one block of {self.cfg.num_slots} slots of "
                        f"{slot_tokens + 1} tokens", expected="documents enough for one block in a shard",
                        do="larger shards, or smaller batches in --stages")


def bounded(future: Future, cfg: Config, what: str) -> Any:
    """Result of a thread's work; its exception surfaces here, and the wait has an end."""
    try:
        return future.result(timeout=cfg.comm_timeout)
    except FutureTimeout:
        raise RunError(what, found=f"not done after {cfg.comm_timeout} s", expected="an answer within --comm_timeout",
                       do="look at the disk, or give a longer --comm_timeout") from None


class Loader:
    """Batches of the given steps, made on a background thread exactly one cycle ahead.

    Taking the first batch of a cycle starts the work on the next cycle, so at most one cycle waits, and what it holds does
    not depend on timing. Packing state belongs to the thread.
    """

    def __init__(self, cfg: Config, fabric: Fabric, headers: list[ShardHeader], steps: Sequence[Values]) -> None:
        self.cfg, self.fabric, self.headers = cfg, fabric, headers
        self.cycles = [steps[i:i + 2] for i in range(0, len(steps), 2)]
        self.taken, self.ready = 0, []
        self.worker = ThreadPoolExecutor(1, "loader")
        self.stream: TrainStream | None = None
        self.ahead: Future | None = None

    def start(self) -> None:
        """Begin to read. Called when the clock starts: reading and packing are on it."""
        self.ahead = self.worker.submit(self._make_cycle, self.cycles[0])

    def wait(self) -> None:
        """Until the first cycle is there."""
        bounded(self.ahead, self.cfg, "waiting for the loader thread")

    def next(self, values: Values) -> Batch:
        """The batch of this step, on the device."""
        if not self.ready:
            self.ready = bounded(self.ahead, self.cfg, "waiting for the loader thread")
            self.taken += 1
            if self.taken < len(self.cycles):
                self.ahead = self.worker.submit(self._make_cycle, self.cycles[self.taken])
        batch = self.ready.pop(0)
        assert batch.step == values.step, f"the loader is at step {batch.step}, the run at {values.step}"
        return batch.to(self.fabric.device)

    def close(self) -> None:
        for pool in (self.worker, *([self.stream.reader] if self.stream else [])):
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_cycle(self, steps: Sequence[Values]) -> list[Batch]:
        if self.stream is None:
            self.stream = TrainStream(self.headers, self.cfg)
        batches = []
        for values in steps:
            shard, pieces = self.stream.block(values.step, values.slot_tokens, values.max_doc_len)
            mine = [make_slot(shard, *piece) for piece in pieces[self.fabric.rank::self.fabric.world]]
            batches.append(make_batch(values.step, mine, self.cfg.bigram_rows, self.fabric.on_cuda))
        return batches


def check_enough_data(cfg: Config, schedule: Schedule, train: list[ShardHeader], val: list[ShardHeader]) -> None:
    """Raise DataError before anything compiles if the shards cannot last; a lower bound, since packing drops tokens."""
    have = math.inf if cfg.epochs == 0 else cfg.epochs * sum(h.tokens for h in train)
    need = steps = 0
    for step in range(schedule.last_step):
        need += cfg.num_slots * (schedule.at(step).slot_tokens + 1)
        steps += need <= have
    if need > have:
        raise DataError("too few training tokens", found=f"{len(train)} shards of {cfg.train_files!r} with {have} tokens, at most "
                        f"{steps} steps", expected=f"at least {need} tokens for {schedule.last_step} steps",
                        do="fetch more shards (python data/cached_fineweb10B.py N for FineWeb), fewer steps "
                           "(--num_scheduled_steps), or --epochs=0 to cycle")
    have = sum(h.tokens for h in val)
    if cfg.val_tokens + 2 > have:
        raise DataError("too few validation tokens", found=f"{have} in {cfg.val_files!r}", expected=f"{cfg.val_tokens} + 2 (--val_tokens)",
                        do=f"--val_tokens={(have - 2) // cfg.val_batch_tokens * cfg.val_batch_tokens}, or a smaller --val_batch_tokens")


def validation_slots(shards: Iterable[Shard], num_slots: int, slot_tokens: int, document_start: int) -> Iterator[Slot]:
    """Consecutive slots of slot_tokens + 1 tokens in blocks of num_slots, not aligned to documents (recipe 1.3, 5.2).

    Documents end at each document start inside the slot, and none is cut. A block that does not fit goes to the next shard.
    """
    for shard in shards:
        for start in range(0, len(shard.tokens) - num_slots * slot_tokens - 1, num_slots * slot_tokens):
            for slot_start in range(start, start + num_slots * slot_tokens, slot_tokens):
                tokens = shard.tokens[slot_start:slot_start + slot_tokens + 1].astype(np.int32)
                borders = np.flatnonzero(tokens[:-1] == document_start)
                yield Slot(tokens, np.concatenate([[0], borders, [slot_tokens]]).astype(np.int32))


class ValidationSet:
    """The validation tokens in memory, and what is known of their text."""

    def __init__(self, cfg: Config, fabric: Fabric, headers: list[ShardHeader]) -> None:
        self.cfg, self.fabric = cfg, fabric
        slot_tokens, count = cfg.val_batch_tokens // cfg.num_slots, cfg.val_tokens // (cfg.val_batch_tokens // cfg.num_slots)
        slots = validation_slots(map(load_shard, headers), cfg.num_slots, slot_tokens, cfg.document_start)
        self.slots = list(itertools.islice(slots, count))
        if len(self.slots) < count:
            raise DataError("too few validation tokens", found=f"{len(self.slots) * slot_tokens} in whole blocks", expected=cfg.val_tokens,
                            do=f"--val_tokens={len(self.slots) * slot_tokens // cfg.val_batch_tokens * cfg.val_batch_tokens}")
        counts = np.bincount(np.concatenate([slot.tokens[1:] for slot in self.slots]), minlength=cfg.vocab_size)
        shares = counts[counts > 0] / counts.sum()
        self.unigram_nats = float(-(shares * np.log(shares)).sum())           # entropy of the targets' own distribution
        self.vocabulary = read_vocabulary(headers[0], cfg.vocab_size)
        self.bytes_per_token = None
        if self.vocabulary is not None:
            self.bytes_per_token = float(np.dot(counts, [len(piece) for piece in self.vocabulary]) / counts.sum())

    def bits_per_byte(self, loss: float) -> float:
        """Of a loss in nats per token; needs bytes_per_token."""
        return loss / math.log(2) / self.bytes_per_token

    def batches(self, values: Values) -> Iterator[Batch]:
        """This rank's slots, one block of num_slots at a time."""
        for block in range(0, len(self.slots), self.cfg.num_slots):
            mine = self.slots[block + self.fabric.rank:block + self.cfg.num_slots:self.fabric.world]
            yield make_batch(values.step, mine, self.cfg.bigram_rows, self.fabric.on_cuda).to(self.fabric.device)


def read_vocabulary(header: ShardHeader, vocab_size: int) -> list[bytes] | None:
    """Bytes of each token from vocab.txt beside the shards ("base64 id" per line), or None. Raises DataError."""
    path = Path(header.name).parent / "vocab.txt"
    if header.name.startswith(FORMULA) or not path.exists():
        return None
    pieces = [b""] * vocab_size                                               # the document start has no bytes
    for number, line in enumerate(path.read_text("ascii").splitlines(), 1):
        try:
            piece, token = line.split()
            pieces[int(token)] = base64.b64decode(piece, validate=True)
        except (ValueError, IndexError):
            raise DataError(f"{path}: line {number}", found=repr(line[:60]), expected=f"base64 bytes, a space, an id below {vocab_size}",
                            do="write the data again, or remove vocab.txt: bits per byte are then not printed") from None
    return pieces

# ======================================================================================================================
# Room 4: Kernels. Each operation has a reference in PyTorch, which is its specification and the path of every device;
# a Triton body, its launcher and the autograd wrapper stand beside the reference they must match.
# ======================================================================================================================

RMS_EPS = 2.0**-23                       # what the peer's bf16 run uses, in every dtype (oracle README 1, patch 3)
FP8_MAX = 448.0                          # largest e4m3 number
FP8_Y_SCALE, FP8_W_SCALE, FP8_GRAD_SCALE = 100 / FP8_MAX, 1.6 / FP8_MAX, 0.75 / FP8_MAX     # recipe 2.8
LOGIT_CAP, LOGIT_SHIFT, LOGIT_WIDTH = 23.0, 5.0, 7.5                          # z = 23 * sigmoid((logit + 5) / 7.5)

AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, float], Tensor]


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, no gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMS_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (2i, 2i + 1) of the first half of the last axis by -angle; the second half stays (recipe 2.4).

    x (..., E), cos and sin (..., E/4) broadcastable to it.
    """
    turning, still = x.chunk(2, dim=-1)
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((cos * even + sin * odd, cos * odd - sin * even), dim=-1).flatten(-2)
    return torch.cat((turned, still), dim=-1)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, window: int, scale: float) -> Tensor:
    """Causal softmax attention inside documents; a query sees at most `window` keys before its own.

    q, k, v (N, H, E) any float dtype; cu_seqlens (C,) i32 ascending from 0 to N, empty documents allowed; max_len is an upper
    bound of a document's length. Returns (N, H, E). Queries go in blocks as long as the reach, so that each block needs its
    own keys and the block before: cost N * reach, any device, any dtype.
    """
    count, heads, width = q.shape
    block = min(count, max(32, min(window, max_len - 1)))
    blocks = (count + block - 1) // block
    pad = blocks * block - count
    q_blocks = F.pad(q, (0, 0, 0, 0, 0, pad)).view(blocks, block, heads, width)
    k_blocks, v_blocks = (F.pad(x, (0, 0, 0, 0, block, pad)).view(blocks + 1, block, heads, width) for x in (k, v))
    keys, values = (torch.cat((x[:-1], x[1:]), dim=1) for x in (k_blocks, v_blocks))
    at = torch.arange(blocks * block, device=q.device)
    document = torch.searchsorted(cu_seqlens.to(at.dtype), at, right=True)
    ahead = torch.cat((torch.full_like(at[:block], -1), at)).view(blocks + 1, block)
    key_at = torch.cat((ahead[:-1], ahead[1:]), dim=1)[:, None, :]
    query_at = at.view(blocks, block, 1)
    seen = (key_at >= 0) & (key_at <= query_at) & (key_at >= query_at - window)
    seen &= document[key_at] == document[query_at]
    out = F.scaled_dot_product_attention(q_blocks.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
                                         attn_mask=seen[:, None], scale=scale)
    return out.transpose(1, 2).reshape(blocks * block, heads, width)[:count]


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, window: int, scale: float) -> Tensor:
    """The same by torch's variable-length kernel: CUDA, bf16 or f16. Its left window is inclusive too."""
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale, window_size=(window, 0))


def choose_attention(fabric: Fabric, dtype: torch.dtype, head_dim: int) -> tuple[str, AttentionKernel]:
    """(name, kernel) of the fastest attention that really runs here, forward and backward."""
    if not fabric.on_cuda or dtype == torch.float64:
        return "reference", attention_reference
    try:
        q, k, v = torch.randn(3, 32, 2, head_dim, device=fabric.device, dtype=dtype, requires_grad=True).unbind()
        bounds = torch.tensor([0, 20, 32], device=fabric.device, dtype=torch.int32)
        attention_varlen(q, k, v, bounds, 20, 8, 0.1).sum().backward()
        fabric.synchronize()
        return "torch varlen", attention_varlen
    except (RuntimeError, NotImplementedError, ImportError) as refusal:
        fabric.say(f"attention: torch varlen does not run here ({str(refusal).splitlines()[0]}); using the reference")
        return "reference", attention_reference


def relu_sq_mlp(n: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """max(n up^T, 0)^2 down. n (..., D), up and down (F, D) as stored (recipe 2.7)."""
    return F.linear(n, up).relu().square() @ down


def softcap(logits: Tensor) -> Tensor:
    return LOGIT_CAP * torch.sigmoid((logits + LOGIT_SHIFT) / LOGIT_WIDTH)


def fp8_product(a: Tensor, b: Tensor, scale: Tensor, *, native: bool, out_dtype: torch.dtype, fast: bool = False) -> Tensor:
    """(N, K) fp8 @ (K, M) fp8 * scale. native: torch._scaled_mm; else the products in out_dtype, which holds fp8 exactly."""
    if native:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b.t().contiguous().t(), scale_a=scale.float(), scale_b=one, out_dtype=out_dtype, use_fast_accum=fast)
    return (a.to(out_dtype) @ b.to(out_dtype)) * scale.to(out_dtype)


def e4m3(x: Tensor, scale: float) -> Tensor:
    """x / scale, divided in f32 and rounded once; beyond the range it saturates on every version and device."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


class HeadLoss(torch.autograd.Function):
    """Softcapped cross-entropy of the next G tokens, with the head's product inside (recipe 2.8, PR #207).

    y (N, D) and w (D, V), targets (B, T) i64 with B * T = N, weights (G,). Returns the loss of each position, (N,) f32 or f64:
        sum over k < G with t + k < T of weights[k] * (lse_t - z_t[targets[t + k]]),  z = 23 sigmoid((y w + 5) / 7.5).
    Targets cross documents and stop at the slot's end; all V columns are in the softmax. With precision "fp8" or "emulated"
    y and w are e4m3 and the gradient of the logits is e5m2, under the scale loss_weight * 0.75 / 448: the seed of the
    backward, loss_weight, moves the scale and never the payload; a position's own incoming gradient goes into the payload.
    """

    @staticmethod
    def forward(ctx, y, w, targets, weights, loss_weight, precision, logits_dtype):
        ctx.precision, ctx.work = precision, torch.float64 if y.dtype == torch.float64 else torch.float32
        if precision == "plain":
            logits = y @ w
        else:
            y, w = e4m3(y, FP8_Y_SCALE), e4m3(w, FP8_W_SCALE)
            native = precision == "fp8"
            logits = fp8_product(y, w, _scale(FP8_Y_SCALE, y) * _scale(FP8_W_SCALE, y), native=native, fast=True,
                                 out_dtype=logits_dtype if native else ctx.work)
        logits = logits.to(logits_dtype)
        z = softcap(logits.to(ctx.work))
        lse = z.logsumexp(dim=-1)
        columns, shares = _next_targets(targets, weights)                     # (N, G), (N, G)
        losses = (shares * (lse[:, None] - z.gather(1, columns))).sum(dim=1)
        ctx.save_for_backward(y, w, logits, lse, columns, shares, loss_weight)
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        y, w, logits, lse, columns, shares, loss_weight = ctx.saved_tensors
        logits = logits.to(ctx.work)
        s = torch.sigmoid((logits + LOGIT_SHIFT) / LOGIT_WIDTH)
        grad = shares.sum(dim=1, keepdim=True) * torch.exp(LOGIT_CAP * s - lse[:, None])
        column = torch.arange(grad.shape[1], device=grad.device)
        for k in range(columns.shape[1]):                                     # a comparison fuses, a scatter would not
            grad = grad - shares[:, k:k + 1] * (column == columns[:, k:k + 1])
        grad = grad_losses[:, None] * grad * (LOGIT_CAP / LOGIT_WIDTH) * s * (1 - s)
        if ctx.precision == "plain":
            grad = grad.to(y.dtype)
            return grad @ w.t(), y.t() @ grad, None, None, None, None, None
        native, out = ctx.precision == "fp8", torch.bfloat16 if ctx.precision == "fp8" else ctx.work
        grad_scale = loss_weight.float() * _scale(FP8_GRAD_SCALE, y).float()
        grad = (grad / grad_scale).to(torch.float8_e5m2)
        grad_y = fp8_product(grad, w.t(), grad_scale.double() * _scale(FP8_W_SCALE, y), native=native, out_dtype=out)
        grad_w = fp8_product(y.t().contiguous(), grad, _scale(FP8_Y_SCALE, y) * grad_scale.double(), native=native,
                             out_dtype=ctx.work)
        return grad_y, grad_w, None, None, None, None, None


def _scale(value: float, like: Tensor) -> Tensor:
    """A scale rounded to f32 first, held in f64, so that products of scales are rounded once."""
    return torch.full((), value, dtype=torch.float32, device=like.device).double()


def _next_targets(targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) targets, (G,) weights -> columns (N, G) i64 and their weights (N, G), 0 where t + k passes the slot's end."""
    slots, length = targets.shape
    ahead = torch.arange(length, device=targets.device)[:, None] + torch.arange(len(weights), device=targets.device)   # (T, G)
    inside = ahead < length
    columns = targets[:, torch.where(inside, ahead, 0)]                       # (B, T, G)
    return columns.flatten(0, 1), (inside * weights).expand(slots, -1, -1).flatten(0, 1)


def next_token_losses(y: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Evaluation: -log softmax(softcap(y w))[target] without fp8. y (N, D), w (D, V), targets (N,) -> (N,) f32 or f64."""
    z = softcap((y @ w).to(torch.float64 if y.dtype == torch.float64 else torch.float32))
    return z.logsumexp(dim=-1) - z.gather(1, targets[:, None])[:, 0]


def gram(x: Tensor) -> Tensor:
    """X X^T of each matrix, (M, r, c) -> (M, r, r); symmetric."""
    return x @ x.mT


def gram_polynomial(a: Tensor, b: float, c: float) -> Tensor:
    """b A + c A A of symmetric matrices, (M, r, r)."""
    return torch.baddbmm(a, a, a, beta=b, alpha=c)

# ======================================================================================================================
# Room 5: Model
# ======================================================================================================================

class Parameter(NamedTuple):
    """Everything about a parameter that is not mathematics of the forward pass. One row of the parameter table."""
    label: str
    shape: tuple[int, ...]
    init: Callable[[torch.Generator, tuple[int, ...]], Tensor]                # draws f32, in logical order
    optimizer: str                       # "normuon" or "adam"
    sharded: bool                        # updated by owners of rows (of matrices, for banks), or by every rank alike
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    bank: bool = False                   # matrices are the last two axes
    full_precision: bool = False         # f32 where the weights are bf16


def _zeros(_: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape)


def _normal(std: float) -> Callable:
    return lambda generator, shape: torch.randn(shape, generator=generator) * std


def _uniform(bound: float) -> Callable:
    return lambda generator, shape: torch.rand(shape, generator=generator) * (2 * bound) - bound


def _mlp_bank(bound: float) -> Callable:
    """Up matrices uniform, down matrices zero: every MLP starts as nothing."""
    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        up, down = _uniform(bound)(generator, (shape[0], 1, *shape[2:])), torch.zeros(shape[0], 1, *shape[2:])
        return torch.cat((up, down), dim=1)
    return draw


def _scalars(_: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    layers = len(LAYERS)
    return torch.cat([torch.full((layers,), 1.1), torch.tensor([0.5, 1.0]).repeat(layers), torch.full((layers,), 0.1),
                      torch.tensor([0.0, 0.5, -1.5])])                        # in the order of SCALAR_NAMES


SCALAR_NAMES = ("residual", "attention", "bigram", "smear", "backout", "skip")
SCALAR_COUNTS = (len(LAYERS), 2 * len(LAYERS), len(LAYERS), 1, 1, 1)
MLP_FACTOR, UP_AND_DOWN, QKVO = 4, 2, 4


def parameter_table(cfg: Config) -> tuple[Parameter, ...]:
    """Label, shape, initial value, optimizer, multipliers (recipe 2.1, 2.6, 3.5)."""
    D, H, V, R, L = cfg.model_dim, cfg.num_heads, cfg.padded_vocab, cfg.bigram_rows, len(LAYERS)
    attentions = len(ATTENTION_LAYERS)
    bound = 3**0.5 * 0.5 * D**-0.5
    gates = dict(optimizer="adam", sharded=False)
    tables = dict(optimizer="adam", sharded=True, lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    heads = dict(optimizer="adam", sharded=True, lr_mul=1, wd_mul=150, betas=(0.5, 0.95))
    return (
        Parameter("attn", (attentions, QKVO * D, D), _uniform(bound), "normuon", sharded=True, bank=True),
        Parameter("mlp", (L, UP_AND_DOWN, MLP_FACTOR * D, D), _mlp_bank(bound), "normuon", sharded=True, bank=True),
        Parameter("scalars", (sum(SCALAR_COUNTS),), _scalars, **gates, lr_mul=5, wd_mul=0, full_precision=True),
        Parameter("x0_lambdas", (L,), _zeros, **gates, lr_mul=5, wd_mul=0, betas=(0.65, 0.95), full_precision=True),
        Parameter("smear_gate", (1, GATE_INPUTS), _zeros, **gates, lr_mul=0.01, wd_mul=0),
        Parameter("skip_gate", (1, GATE_INPUTS), _zeros, **gates, lr_mul=0.05, wd_mul=0),
        Parameter("attn_gate_bank", (attentions, H, GATE_INPUTS), _zeros, **gates),
        Parameter("ve_gate_bank", (NUM_VALUE_TABLES, H, GATE_INPUTS), _zeros, **gates),
        Parameter("bigram_embed", (R, D), _zeros, **tables),
        Parameter("value_embed", (NUM_VALUE_TABLES * V, D), _normal(0.01), **tables),
        Parameter("lm_head", (D, V), _normal(0.005), **heads),
        Parameter("embed", (V, D), _zeros, **heads),                          # a copy of lm_head^T while they are tied
    )


class Reach(NamedTuple):
    """What attention sees in one forward; constants of the compiled graph."""
    short: int
    long: int
    max_len: int
    scale: float


class GPT(nn.Module):
    """Recipe A, section 2. Knows shapes, not ranks. Parameters carry the labels of the parameter table."""

    def __init__(self, cfg: Config, attention: AttentionKernel, rotary_len: int) -> None:
        """rotary_len: the longest slot in tokens; the tables hold twice that, since paired layers have 2T positions."""
        super().__init__()
        self.heads, self.head_dim, self.vocab, self.attention = cfg.num_heads, cfg.head_dim, cfg.padded_vocab, attention
        weights, exact = getattr(torch, cfg.dtype), torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        self.table = parameter_table(cfg)
        for row in self.table:
            dtype = exact if row.full_precision else weights
            self.register_parameter(row.label, nn.Parameter(torch.empty(row.shape, dtype=dtype)))
        for name in ("rotary_cos", "rotary_sin"):
            self.register_buffer(name, torch.zeros(2 * rotary_len, cfg.head_dim // 4, dtype=weights), persistent=False)

    @torch.no_grad()
    def set_initial_values(self, seed: int) -> None:
        """One generator per label, seeded by (seed, label); all but the f32 rows pass through bf16: equal in every dtype."""
        for row in self.table:
            digest = hashlib.sha256(f"{seed}/{row.label}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            drawn = row.init(generator, row.shape)
            self.get_parameter(row.label).copy_(drawn if row.full_precision else drawn.bfloat16())
        self.embed.copy_(self.lm_head.t())

    @torch.no_grad()
    def set_rotary(self, frequencies: Sequence[float]) -> None:
        """Refill cos and sin of position * frequency in place; angles in f32 (f64 in an f64 run)."""
        exact = torch.promote_types(self.rotary_cos.dtype, torch.float32)
        at = torch.arange(len(self.rotary_cos), dtype=exact, device=self.rotary_cos.device)
        angles = torch.outer(at, torch.tensor(frequencies, dtype=exact, device=at.device))
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())

    def losses(self, batch: Batch, weights: Tensor, loss_weight: Tensor, reach: Reach, precision: str) -> Tensor:
        """Weighted loss of every position, (B, T); weights (G,) of the next tokens, loss_weight () seeds the backward."""
        y = self.hidden(batch, reach)
        logits_dtype = y.dtype if precision == "plain" or y.dtype == torch.float64 else torch.bfloat16
        losses = HeadLoss.apply(y.flatten(0, 1), self.lm_head, batch.targets, weights, loss_weight, precision, logits_dtype)
        return losses.view(batch.targets.shape)

    def hidden(self, batch: Batch, reach: Reach) -> Tensor:
        """The normalised stream in front of the head, (B, T, D)."""
        scalars = dict(zip(SCALAR_NAMES, self.scalars.split(SCALAR_COUNTS)))
        residual, attention, bigram = (scalars[name].unbind() for name in SCALAR_NAMES[:3])
        x0_lambdas, cu_seqlens = self.x0_lambdas.unbind(), self.document_bounds(batch)
        attentions, mlps = iter(self.attn.unbind()), self.mlp.unbind()          # one gradient per bank, not one per layer
        x0, pairs, values = self.inputs(batch, scalars["smear"])
        x, kept = x0, {}
        for depth, layer in enumerate(LAYERS):
            if layer.add:                                                     # before the mix, so the residual factor scales it too
                gate = torch.sigmoid(scalars["skip"]).type_as(x) * 2 * torch.sigmoid(F.linear(x0[..., :GATE_INPUTS], self.skip_gate))
                x = x + gate * kept[layer.add]
            x = residual[depth] * x + x0_lambdas[depth] * x0 + bigram[depth] * pairs
            if layer.attention != "none":
                scale_in, scale_out = attention[2 * depth:2 * depth + 2]
                w_qkv, w_out = next(attentions).split((3 * x.shape[-1], x.shape[-1]))
                x = x + self.attend(layer, depth, rms_norm(x), values, scale_in * w_qkv, scale_out * w_out, cu_seqlens, reach)
            up, down = mlps[depth].unbind()
            x = x + relu_sq_mlp(rms_norm(x), up, down)
            if layer.keep_as:
                kept[layer.keep_as] = x
        return rms_norm(x - scalars["backout"].type_as(x) * kept[BACKOUT])

    def document_bounds(self, batch: Batch) -> Tensor:
        """cu_seqlens of the flattened micro-batch, (B * C,): a slot's filling is the next slot's start."""
        slots, length = batch.tokens.shape
        starts = torch.arange(slots, device=batch.tokens.device, dtype=torch.int32)[:, None] * length
        return (batch.cu_seqlens + starts).flatten()

    def inputs(self, batch: Batch, smear: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Normalised smeared embedding and bigram rows, (B, T, D), and value rows, one (B, T, D) per value table."""
        e = F.embedding(batch.tokens, self.embed)
        gate = smear.type_as(e) * torch.sigmoid(F.linear(e[:, 1:, :GATE_INPUTS], self.smear_gate))
        smeared = torch.cat((e[:, :1], e[:, 1:] + gate * e[:, :-1]), dim=1)   # crosses documents, not slots
        tables = torch.arange(NUM_VALUE_TABLES, device=e.device, dtype=batch.tokens.dtype)[:, None, None] * self.vocab
        values = F.embedding(batch.tokens + tables, self.value_embed)
        return rms_norm(smeared), F.embedding(batch.bigram_rows, self.bigram_embed), list(values.unbind())

    def attend(self, layer: Layer, depth: int, n: Tensor, values: list[Tensor], w_qkv: Tensor, w_out: Tensor,
               cu_seqlens: Tensor, reach: Reach) -> Tensor:
        """One attention layer on the normalised stream n (B, T, D) (recipe 2.4)."""
        q, k, v = F.linear(n, w_qkv).view(*n.shape[:2], 3, self.heads, self.head_dim).unbind(2)
        q, k = rms_norm(q), rms_norm(k)
        if layer.value is not None:
            row = values[layer.value]
            half = GATE_INPUTS // 2
            gate_in = n[..., :GATE_INPUTS] if layer.attention == "paired" else torch.cat((n[..., :half], row[..., :half]), dim=-1)
            gate = 2 * torch.sigmoid(F.linear(gate_in, self.ve_gate_bank[layer.value]))
            v = v + gate[..., None] * row.view(v.shape)
        window = reach.long if layer.window == "long" else reach.short
        attend = self.attend_paired if layer.attention == "paired" else self.attend_plain
        y = attend(q, k, v, layer.key_shift, cu_seqlens, window, reach)
        y = y * torch.sigmoid(F.linear(n[..., :GATE_INPUTS], self.attn_gate_bank[ATTENTION_LAYERS.index(depth)]))[..., None]
        return F.linear(y.flatten(2), w_out)

    def attend_plain(self, q: Tensor, k: Tensor, v: Tensor, key_shift: bool, cu_seqlens: Tensor, window: int, reach: Reach) -> Tensor:
        """q, k, v (B, T, H, E) -> (B, T, H, E); positions count in the slot."""
        cos, sin = (x[:q.shape[1], None] for x in (self.rotary_cos, self.rotary_sin))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if key_shift:                                                         # crosses documents, not slots
            turning, still = k.chunk(2, dim=-1)
            k = torch.cat((turning, torch.cat((still[:, :1], still[:, :-1]), dim=1)), dim=-1)
        y = self.attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, reach.max_len, window, reach.scale)
        return y.view(v.shape)

    def attend_paired(self, q: Tensor, k: Tensor, v: Tensor, key_shift: bool, cu_seqlens: Tensor, window: int, reach: Reach) -> Tensor:
        """q, k, v (B, T, H, E) -> (B, T, H, E); heads j and j + H/2 of token t stand at 2t and 2t + 1 of one sequence.

        The angles follow another pairing, even heads at 2t and odd heads at 2t + 1: the peer assigns them before it
        regroups, and its published losses contain that (recipe 9.1, 7). The window counts positions, so it reaches half as far.
        """
        assert not key_shift, "paired layers have no key shift"
        slots, length, heads, width = q.shape
        cos, sin = (x[:2 * length].view(length, 1, 2, -1) for x in (self.rotary_cos, self.rotary_sin))
        q, k = (rotate(x.view(slots, length, heads // 2, 2, width), cos, sin) for x in (q, k))
        q, k, v = (x.reshape(slots * length * 2, heads // 2, width) for x in (q, k, v))
        y = self.attention(q, k, v, 2 * cu_seqlens, 2 * reach.max_len, window, reach.scale)
        return y.view(slots, length, heads, width)

# ======================================================================================================================
# Room 6: Rows. The exchange of embedding rows between ranks, planned ahead by the loader. For now every rank holds whole
# tables, and room 7 reduces their gradients and gathers their rows densely: the yardstick for the sparse exchange.
# ======================================================================================================================

# ======================================================================================================================
# Room 7: Optimizer
# ======================================================================================================================

# Launch order of the gradient reductions, and order of updates with their gathers: large ones travel while NorMuon computes.
REDUCE_ORDER = ("attn", "mlp", "scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas",
                "bigram_embed", "lm_head", "value_embed", "embed")
UPDATE_ORDER = ("scalars", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "x0_lambdas", "lm_head",
                "bigram_embed", "value_embed", "embed", "attn", "mlp")
POLAR_EXPRESS = (                        # (a, b, c) of each step: arXiv 2505.16932 as tuned in the speedrun (recipe 3.1)
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
DOWN_LR_MUL = 2.0                        # down matrices of the MLP, on top of the shape's factor


def polar_express(x: Tensor) -> Tensor:
    """Nearly the polar factor of each matrix, (M, r, c): singular values move to 0.86 .. 1.14. Same dtype in and out."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        x = torch.baddbmm(x, gram_polynomial(gram(x), b, c), x, beta=a)
    return x.mT if tall else x


def normuon_direction(grad: Tensor, momentum: Tensor, second: Tensor, mu: Tensor, beta2: float, polar_dtype: torch.dtype) -> Tensor:
    """Orthogonalised Nesterov momentum, scaled per row to equal size; keeps each matrix's Frobenius norm (arXiv 2510.05491).

    grad, momentum (M, r, c), second (M, r, 1) or (M, 1, c) over the shorter side; momentum and second change in place.
    """
    momentum.add_((grad - momentum) * (1 - mu))
    o = polar_express((grad * (1 - mu) + momentum * mu).to(polar_dtype))
    exact = o.to(grad.dtype)
    axis = -1 if grad.shape[-2] >= grad.shape[-1] else -2
    size = grad.shape[axis]
    square = exact.square().mean(dim=axis, keepdim=True)
    norm = (size * square.sum(dim=(-2, -1), keepdim=True)).sqrt()
    second.lerp_(square, 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()
    scaled_norm = (size * (square * scale.square()).sum(dim=(-2, -1), keepdim=True)).sqrt()
    return exact * (scale * norm / scaled_norm.clamp_min(1e-10)).to(polar_dtype).to(grad.dtype)


def cautious_descent(p: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> Tensor:
    """p - p [update p >= 0] decay lr - update lr, in that order: the decay counts only where it agrees with the update."""
    return p - p * (update * p >= 0) * decay * lr - update * lr


def with_mantissa(p: Tensor, mantissa: Tensor) -> Tensor:
    """bf16 weight + the 16 bits below it (i16 words) -> the f32 weight (recipe 3.2)."""
    return ((p.view(torch.int16).int() << 16) | (mantissa.int() & 0xFFFF)).view(torch.float32)


def split_mantissa(exact: Tensor, p: Tensor, mantissa: Tensor) -> None:
    """f32 weight -> bf16 weight and lower 16 bits, in place: truncated, never rounded."""
    words = exact.view(torch.int32)
    p.copy_((words >> 16).to(torch.int16).view(torch.bfloat16))
    mantissa.copy_((words & 0xFFFF).to(torch.int16))


def normuon_update(p: Tensor, mantissa: Tensor | None, grad: Tensor, momentum: Tensor, second: Tensor, share: float, mu: Tensor,
                   lr: Tensor, lr_muls: Tensor, decay: Tensor, beta2: float) -> None:
    """One NorMuon step on matrices p (M, r, c), in place; lr_muls (M, 1, 1), decay () = weight decay x lr without them."""
    lr = lr_muls * lr
    update = normuon_direction(grad.to(momentum.dtype) * share, momentum, second, mu, beta2, p.dtype)
    if mantissa is None:
        p.copy_(cautious_descent(p, update, lr, decay))
    else:
        split_mantissa(cautious_descent(with_mantissa(p, mantissa), update, lr, decay), p, mantissa)


def adam_update(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, share: float, betas: tuple[float, float], eps: float,
                step_size: Tensor, decay: Tensor) -> None:
    """One dense Adam step in place (recipe 3.4): eps joins the uncorrected root; decay only where the update shrinks p."""
    grad = grad.to(m.dtype) * share
    m.lerp_(grad, 1 - betas[0])
    v.lerp_(grad.square(), 1 - betas[1])
    update = m / (v.sqrt() + eps) * step_size
    exact = p.to(m.dtype)
    p.copy_(exact - (update + exact * (update * exact > 0) * decay))


class Optimizer:
    """NorMuon on banks at every step, Adam on the rest at odd steps; who updates what, and in which order it travels.

    Replicated parameters are reduced and updated on every rank. Of a sharded one, rank r updates the r-th of W equal slices
    of its first axis (for a bank: of its matrices), padded for the communication only; moments exist for that slice alone.
    """

    def __init__(self, cfg: Config, fabric: Fabric, model: GPT, compiled: bool) -> None:
        self.cfg, self.fabric, self.rows = cfg, fabric, {row.label: row for row in model.table}
        assert set(REDUCE_ORDER) == set(UPDATE_ORDER) == set(self.rows), "every label once in both orders"
        self.weights = {label: model.get_parameter(label) for label in self.rows}
        self.state: dict[str, dict[str, Tensor]] = {label: self._new_state(row) for label, row in self.rows.items()}
        self.adam_steps = dict.fromkeys((label for label, row in self.rows.items() if row.optimizer == "adam"), 0)
        self.matrix_lr_muls = {label: self._matrix_lr_muls(label) for label, row in self.rows.items() if row.bank}
        self.tied = True
        wrap = functools.partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda update: update
        self.normuon_update, self.adam_update = wrap(normuon_update), wrap(adam_update)

    def units(self, label: str, x: Tensor) -> Tensor:
        """A parameter, or its gradient, along the axis that ranks share: matrices of a bank, rows of the rest. A view."""
        width = self.cfg.model_dim
        return x.view(-1, width if label == "attn" else x.shape[-2], width) if self.rows[label].bank else x

    def _slice(self, label: str, x: Tensor) -> Tensor:
        """What this rank updates: a view of the units, shorter or empty on the last ranks."""
        units = self.units(label, x)
        size = self._slice_size(label)
        return units[self.fabric.rank * size:(self.fabric.rank + 1) * size]

    def _slice_size(self, label: str) -> int:
        count = len(self.units(label, self.weights[label].data))
        return -(-count // self.fabric.world) if self.rows[label].sharded else count

    def _owned(self, label: str, x: Tensor) -> Tensor:
        return self._slice(label, x) if self.rows[label].sharded else x

    def _new_state(self, row: Parameter) -> dict[str, Tensor]:
        mine = self._owned(row.label, self.weights[row.label].data)
        exact = torch.promote_types(mine.dtype, torch.float32)
        new = functools.partial(torch.zeros, device=mine.device)
        if row.optimizer == "adam":
            return dict(m=new(mine.shape, dtype=exact), v=new(mine.shape, dtype=exact))
        count, height, width = mine.shape
        per_row = (count, height, 1) if height >= width else (count, 1, width)
        state = dict(momentum=new(mine.shape, dtype=exact), second=new(per_row, dtype=exact))
        if mine.dtype == torch.bfloat16:
            state["mantissa"] = new(mine.shape, dtype=torch.int16)
        return state

    @torch.no_grad()
    def step(self, values: Values) -> None:
        """Reduce, update and gather what this step updates, then clear its gradients. The rest keep theirs."""
        active = {label for label, row in self.rows.items() if row.optimizer == "normuon" or values.adam_step}
        if values.adam_step and self.tied:                                    # the embedding is the head: one gradient
            self.weights["lm_head"].grad += self.weights["embed"].grad.t()
            self.weights["embed"].grad = None
            active.remove("embed")
        missing = sorted(label for label in active if self.weights[label].grad is None)
        if missing:
            raise RunError("optim_step", found=f"no gradient for {missing}", expected="forward_backward before it", do="call it first")
        reduced = {label: self._reduce(label) for label in REDUCE_ORDER if label in active}
        gathers = {label: self._update(label, *reduced[label], values) for label in UPDATE_ORDER if label in active}
        for wait in gathers.values():
            wait()
        if values.adam_step and self.tied:
            self.weights["embed"].copy_(self.weights["lm_head"].t())
        for label in active:
            self.weights[label].grad = None
        if values.split:
            self._split()

    def _reduce(self, label: str) -> tuple[Tensor, Callable[[], Any]]:
        """Launch the sum over ranks; returns the gradient of what this rank updates, and a wait for it."""
        grad, world = self.weights[label].grad, self.fabric.world
        if world == 1:
            return self._owned(label, grad), lambda: None
        if not self.rows[label].sharded:
            return grad, dist.all_reduce(grad, async_op=True).wait
        padded = self._padded(label, self.units(label, grad))
        mine = torch.empty_like(padded[:len(padded) // world])
        work = dist.reduce_scatter_tensor(mine, padded, async_op=True)
        return mine[:len(self._slice(label, grad))], work.wait

    def _padded(self, label: str, units: Tensor) -> Tensor:
        """Units in a multiple of W: the same tensor where they divide, else a copy with zeros behind."""
        missing = self._slice_size(label) * self.fabric.world - len(units)
        return torch.cat((units, units.new_zeros(missing, *units.shape[1:]))) if missing else units.contiguous()

    def _update(self, label: str, grad: Tensor, wait: Callable, values: Values) -> Callable[[], None]:
        """Update this rank's slice and launch the gather of the others'; returns a wait for it."""
        wait()
        row, state, cfg = self.rows[label], self.state[label], self.cfg
        mine, share = self._owned(label, self.weights[label].data), 1 / cfg.num_slots
        if row.optimizer == "adam":
            self.adam_steps[label] += 1
            beta1, beta2 = row.betas
            lr, count = values.adam_lr * row.lr_mul, self.adam_steps[label]
            step_size, decay = lr * math.sqrt(1 - beta2**count) / (1 - beta1**count), lr * lr * cfg.adam_weight_decay * row.wd_mul
            self.adam_update(mine, grad, state["m"], state["v"], share, row.betas, cfg.adam_eps, *map(_number, (step_size, decay)))
        elif len(mine):
            self.normuon_update(mine, state.get("mantissa"), grad, state["momentum"], state["second"], share,
                                _number(values.momentum), _number(values.normuon_lr), self.matrix_lr_muls[label],
                                _number(values.normuon_lr * cfg.normuon_weight_decay), cfg.normuon_beta2)
        return self._gather(label, mine) if row.sharded and self.fabric.world > 1 else lambda: None

    def _matrix_lr_muls(self, label: str) -> Tensor:
        """(M, 1, 1): root of the aspect ratio of tall matrices, and twice that for the down matrices of the MLP."""
        mine = self._owned(label, self.weights[label].data)
        shape = max(1.0, mine.shape[-2] / mine.shape[-1]) ** 0.5
        first = self.fabric.rank * self._slice_size(label)
        muls = [shape * (DOWN_LR_MUL if label == "mlp" and (first + i) % UP_AND_DOWN == 1 else 1.0) for i in range(len(mine))]
        return torch.tensor(muls, dtype=self.state[label]["momentum"].dtype, device=mine.device).view(-1, 1, 1)

    def _gather(self, label: str, mine: Tensor) -> Callable[[], None]:
        units, size = self.units(label, self.weights[label].data), self._slice_size(label)
        send = torch.cat((mine, mine.new_zeros(size - len(mine), *mine.shape[1:]))) if len(mine) < size else mine.contiguous()
        direct = size * self.fabric.world == len(units)
        full = units if direct else units.new_empty(size * self.fabric.world, *units.shape[1:])
        work = dist.all_gather_into_tensor(full, send, async_op=True)

        def wait() -> None:
            work.wait()
            if not direct:
                units.copy_(full[:len(units)])
        return wait

    def _split(self) -> None:
        """From here on head and embedding are two parameters; the embedding starts with the head's moments (recipe 3.6)."""
        self.tied = False
        self.adam_steps["embed"] = self.adam_steps["lm_head"]
        for name, mine in self.state["embed"].items():
            full = self.state["lm_head"][name]
            if self.fabric.world > 1:                                         # the head is cut along D, the embedding along V
                padded = torch.cat((full, full.new_zeros(self._slice_size("lm_head") - len(full), full.shape[1])))
                full = full.new_empty(len(padded) * self.fabric.world, full.shape[1])
                dist.all_gather_into_tensor(full, padded)
                full = full[:self.cfg.model_dim]
            mine.copy_(self._slice("embed", full.t()))


def _number(value: float) -> Tensor:
    """A number that changes every step, as a CPU scalar: compiled updates then need no new graph."""
    return torch.tensor(value, dtype=torch.float64)

# ======================================================================================================================
# Room 8: Executor
# ======================================================================================================================

EVAL_ROWS = 8192                         # rows of validation logits at a time: evaluation never decides the memory


class Losses(NamedTuple):
    """Unscaled loss of one forward_backward on this rank, on the device, without waiting for it."""
    slot_sums: Tensor                    # (b,) f32 or f64: sum over the slot's positions
    tokens: int


class Snapshot(NamedTuple):
    """Copies of all that a run changes, on the host."""
    tensors: dict[str, Tensor]
    adam_steps: dict[str, int]
    tied: bool
    rotary: Rotary | None
    rng: list[Tensor]


class Executor:
    """Runs slots through the model and updates it. Knows no step numbers beyond `values`, and no logs."""

    def __init__(self, cfg: Config, fabric: Fabric, attention: AttentionKernel, precision: str) -> None:
        self.cfg, self.fabric, self.precision = cfg, fabric, precision
        schedule_slots = [stage.batch_tokens for stage in cfg.stages] + [cfg.val_batch_tokens]
        compiled = cfg.compile == 1 or (cfg.compile == -1 and fabric.on_cuda)
        self.model = GPT(cfg, attention, max(schedule_slots) // cfg.num_slots)
        self.model.set_initial_values(cfg.seed)
        self.model.to(fabric.device)
        self.optimizer = Optimizer(cfg, fabric, self.model, compiled)
        self.exact = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        wrap = functools.partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda call: call
        self.model_losses, self.model_hidden = wrap(self.model.losses), wrap(self.model.hidden)
        self.rotary: Rotary | None = None
        self.slots_at_once = cfg.slots_per_micro_batch or (1 if fabric.on_cuda else cfg.num_slots)

    def forward_backward(self, batch: Batch, values: Values, loss_weight: float = 1.0) -> Losses:
        """Add loss_weight * d(sum of this rank's slot losses) to the gradients. Calls add up until optim_step.

        No reduction over ranks, no division, no waiting for the device. A weight of 0 changes no gradient at all.
        """
        self._set_rotary(values)
        fill = functools.partial(torch.full, dtype=self.exact, device=self.fabric.device)      # a copy from the host would wait
        weights, seed = torch.cat([fill((1,), weight) for weight in values.mtp_weights]), fill((), loss_weight)
        sums = []
        for part in self._micro_batches(batch):
            losses = self.model_losses(part, weights, seed, self._reach(values, values.max_doc_len, batch), self.precision)
            slot_sums = losses.sum(dim=1)
            if loss_weight:
                slot_sums.sum().backward(seed)
            sums.append(slot_sums.detach())
        return Losses(torch.cat(sums), batch.tokens.numel())

    def optim_step(self, values: Values) -> None:
        """Update what this step updates with the gradients gathered so far; those are cleared, the others stay."""
        self.optimizer.step(values)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], values: Values) -> float:
        """Mean loss per token (nats) over all ranks' batches; next token only, no fp8, documents uncut."""
        self._set_rotary(values)
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.fabric.device), 0
        for batch in batches:
            for part in self._micro_batches(batch):
                y = self.model_hidden(part, self._reach(values, part.tokens.shape[1], part)).flatten(0, 1)
                for rows, targets in zip(y.split(EVAL_ROWS), part.targets.flatten().split(EVAL_ROWS)):
                    total += next_token_losses(rows, self.model.lm_head, targets).sum(dtype=torch.float64)
            tokens += batch.targets.numel() * self.fabric.world
        if self.fabric.world > 1:
            dist.all_reduce(total)
        return float(total) / tokens

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int], values: Values) -> Tensor:
        """Softcapped logits (V,) of the token that follows; at most val_slot_tokens of context count."""
        self._set_rotary(values)
        context = np.asarray(tokens[-values.val_slot_tokens:], np.int32)
        padded = np.zeros((len(context) + 15) // 16 * 16 + 1, np.int32)       # later positions cannot be seen
        padded[:len(context)] = context
        bounds = np.asarray([0, len(padded) - 1], np.int32)
        batch = make_batch(values.step, [Slot(padded, bounds)], self.cfg.bigram_rows, pin=False).to(self.fabric.device)
        y = self.model.hidden(batch, self._reach(values, len(padded) - 1, batch))[0, len(context) - 1]
        return softcap((y @ self.model.lm_head).to(self.exact))

    def _reach(self, values: Values, max_len: int, batch: Batch) -> Reach:
        return Reach(values.short_window, values.long_window, min(max_len, batch.tokens.shape[1]), values.rotary.attn_scale)

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for first in range(0, len(batch.tokens), self.slots_at_once):
            part = Batch(batch.step, *(x[first:first + self.slots_at_once] for x in batch[1:]))
            torch._dynamo.maybe_mark_dynamic(part.cu_seqlens, 1)              # the number of documents must not recompile
            yield part

    def _set_rotary(self, values: Values) -> None:
        if values.rotary != self.rotary:
            self.model.set_rotary(values.rotary.frequencies)
            self.rotary = values.rotary

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that a run changes, by name: weights, rotary tables, moments and mantissa words."""
        named = {name: p.data for name, p in self.model.named_parameters()} | dict(self.model.named_buffers())
        return named | {f"{label}.{name}": x for label, state in self.optimizer.state.items() for name, x in state.items()}

    def snapshot(self) -> Snapshot:
        rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(self.fabric.device)] if self.fabric.on_cuda else [])
        copies = {name: x.to("cpu", copy=True) for name, x in self.state_tensors().items()}
        return Snapshot(copies, dict(self.optimizer.adam_steps), self.optimizer.tied, self.rotary, rng)

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Back to the snapshot bit by bit, in place: every tensor keeps its address, so nothing recompiles."""
        self.fabric.synchronize()
        for name, x in self.state_tensors().items():
            x.copy_(saved.tensors[name])
        for p in self.model.parameters():
            p.grad = None
        self.optimizer.adam_steps, self.optimizer.tied, self.rotary = dict(saved.adam_steps), saved.tied, saved.rotary
        torch.set_rng_state(saved.rng[0])
        if self.fabric.on_cuda:
            torch.cuda.set_rng_state(saved.rng[1], self.fabric.device)
        self.fabric.synchronize()

# ======================================================================================================================
# Room 9: Race
# ======================================================================================================================

# Validation losses of ten public 8 x H100 runs with the record preset's mathematics but for an unfused head: mean and
# standard deviation (records/track_1_short/2026-02-03_VeTuned of modded-nanogpt; recipe 8).
REFERENCE_LOSSES = {0: (10.8299, 0.0019), 250: (4.5463, 0.0048), 500: (4.2221, 0.0041), 750: (3.8687, 0.0087),
                    1000: (3.5663, 0.0024), 1250: (3.3952, 0.0019), 1500: (3.2926, 0.0015), 1547: (3.2782, 0.0015)}
SAMPLE_TEMPERATURE = 0.8
PLAIN_LINES = 20                         # console lines of a run without a terminal


class Clock:
    """Training time in ms. Waits for the device only when it starts and stops."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.before, self.since = fabric, 0.0, None

    @property
    def ms(self) -> float:
        return self.before + (0.0 if self.since is None else (time.perf_counter() - self.since) * 1000)

    def start(self) -> None:
        self.fabric.synchronize()
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.fabric.synchronize()
        self.before, self.since = self.ms, None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()


class Log:
    """log.txt for people and existing parsers, log.jsonl for everything else, and the console. Rank 0 writes, all check losses.

    Losses are looked at one cycle late, so that no step waits for the device.
    """

    def __init__(self, run_dir: Path | None, fabric: Fabric, schedule: Schedule, expected: dict[int, tuple]) -> None:
        """run_dir None: no files. Raises RunError if the folder cannot be used; an old log is never overwritten."""
        self.fabric, self.schedule, self.expected, self.run_dir = fabric, schedule, expected, run_dir
        self.pending: list[tuple] = []
        self.tokens, self.last_step, self.last_validation, self.bar, self.files = 0, 0, "none", None, {}
        if run_dir is not None:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                self.files = {name: open(run_dir / name, "x", encoding="utf-8") for name in ("log.txt", "log.jsonl")}
                shutil.copyfile(__file__, run_dir / Path(__file__).name)
            except OSError as error:
                raise RunError(f"run directory {run_dir}", found=error.strerror, expected="a writable folder without a log",
                               do="give another --run_dir") from None

    def event(self, kind: str, **fields: Any) -> None:
        """One line of log.jsonl."""
        if self.files:
            self._write("log.jsonl", json.dumps(dict(type=kind, **fields)))

    def text(self, line: str, console: bool = True) -> None:
        if self.files:
            self._write("log.txt", line)
        if console and self.fabric.rank == 0:
            (self.bar.write if self.bar else print)(line)
            sys.stdout.flush()

    def _write(self, name: str, line: str) -> None:
        try:
            self.files[name].write(line + "\n")
            self.files[name].flush()
        except OSError as error:
            raise RunError(f"writing {self.run_dir / name}", found=error.strerror, expected="space on the disk",
                           do="free some space and start again; the log up to here is intact") from None

    @contextlib.contextmanager
    def phase(self, name: str, timed: bool = False) -> Iterator[None]:
        began = time.perf_counter()
        yield
        ms = (time.perf_counter() - began) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=timed)
        self.text(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if timed else ''}")

    def open_bar(self) -> None:
        if self.fabric.rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(total=self.schedule.last_step, unit="step", dynamic_ncols=True)

    def step(self, done: int, losses: Losses, ms: float) -> None:
        """After `done` finished steps. ms is host time: launched, not finished, on a GPU."""
        self.tokens += losses.tokens * self.fabric.world
        self.last_step = done
        sums = losses.slot_sums
        if sums.is_cuda:
            sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.pending.append((done, ms, self.tokens, losses.tokens, sums, copied if losses.slot_sums.is_cuda else None))
        while len(self.pending) > 2:
            self._inspect(*self.pending.pop(0))

    def _inspect(self, done: int, ms: float, total_tokens: int, tokens: int, sums: Tensor, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        loss = float(sums.sum()) / tokens
        if not math.isfinite(loss):
            raise RunError(f"training loss of step {done - 1}", found=loss, expected=f"a finite number (last good validation: {self.last_validation})",
                           do="lower --adam_lr and --normuon_lr, or try --dtype=float32 --head=plain to look for an overflow")
        self.event("step", step=done, train_time_ms=round(ms, 3), tokens=total_tokens, train_loss=loss)
        plain = self.bar is None and (done % max(1, self.schedule.last_step // PLAIN_LINES) == 0)
        self.text(f"step:{done}/{self.schedule.total_steps} train_time:{ms:.0f}ms step_avg:{ms / done:.2f}ms", console=plain)
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {ms / done:.0f} ms/step")
            self.bar.update(done - self.bar.n)

    def flush(self) -> None:
        while self.pending:
            self._inspect(*self.pending.pop(0))

    def validation(self, step: int, loss: float, ms: float, data: ValidationSet) -> None:
        self.flush()
        if not math.isfinite(loss):
            raise RunError(f"validation loss at step {step}", found=loss, expected=f"finite (last good validation: {self.last_validation})",
                           do="lower the learning rates")
        self.last_validation = f"{loss:.4f} at step {step}"
        known = dict(val_bpb=data.bits_per_byte(loss), unigram_nats=data.unigram_nats) if data.bytes_per_token else {}
        self.event("val", step=step, val_loss=loss, train_time_ms=round(ms, 3), **known)
        self.text(f"step:{step}/{self.schedule.total_steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms")
        if step in self.expected:
            mean, sd = self.expected[step]
            self.text(f"  public runs of the same mathematics at step {step}: {mean:.4f}, standard deviation {sd:.4f}")

    def aborted(self, cause: str) -> None:
        """Last lines of a run that did not finish; never raises."""
        with contextlib.suppress(TrainerError, OSError, ValueError):
            for done, ms, tokens, *_ in self.pending:
                self.event("step", step=done, train_time_ms=round(ms, 3), tokens=tokens)
        with contextlib.suppress(TrainerError, OSError, ValueError):
            self.event("aborted", step=self.last_step, cause=cause)
            self.text(f"aborted after step {self.last_step}: {cause}", console=False)

    def close(self) -> None:
        if self.bar:
            self.bar.close()
        self.bar = None
        for file in self.files.values():
            file.close()


def train_step(executor: Executor, loader: Loader, values: Values) -> Losses:
    batch = loader.next(values)
    losses = executor.forward_backward(batch, values)
    executor.optim_step(values)
    return losses


def warm_up(cfg: Config, fabric: Fabric, schedule: Schedule, executor: Executor) -> None:
    """Run every graph the race will need on tokens from a formula, then put the state back bit by bit (recipe 1.4)."""
    saved = executor.snapshot()
    tokens = 4 * max(stage.batch_tokens for stage in cfg.stages) + 4 * cfg.val_batch_tokens
    headers = find_shards(f"{FORMULA}{cfg.vocab_size}:{cfg.document_start}:{tokens}:1")
    invented = replace(cfg, epochs=0, val_tokens=cfg.val_batch_tokens)
    validation = ValidationSet(invented, fabric, headers)
    steps = [schedule.at(step) for step in schedule.warm_up_steps()]
    loader = Loader(invented, fabric, headers, steps)
    loader.start()
    stage = None
    for values in steps:
        if values.stage != stage:
            executor.evaluate(validation.batches(values), values)
            stage = values.stage
        train_step(executor, loader, values)
    end = schedule.at(schedule.last_step)
    executor.evaluate(validation.batches(end), end)
    loader.close()
    executor.restore(saved)


def race(schedule: Schedule, loader: Loader, executor: Executor, validation: ValidationSet, clock: Clock, log: Log) -> float:
    """Train against the clock; returns the final validation loss (nats per token).

    On the clock: reading, packing, steps, logging. Off the clock: warm-up before and validation in between.
    """
    clock.start()
    with log.phase("first batch", timed=True):
        loader.start()
        loader.wait()
    for step in range(schedule.last_step):
        values = schedule.at(step)
        if values.validate:
            with clock.stopped():
                log.validation(step, executor.evaluate(validation.batches(values), values), clock.ms, validation)
        losses = train_step(executor, loader, values)
        log.step(step + 1, losses, clock.ms)
    clock.stop()
    end = schedule.at(schedule.last_step)                                     # at the true end the long window is wider
    loss = executor.evaluate(validation.batches(end), end)
    log.validation(schedule.last_step, loss, clock.ms, validation)
    return loss


def sample(cfg: Config, executor: Executor, values: Values, vocabulary: list[bytes] | None) -> str:
    """Text generated from a document start; token ids where the bytes of the tokens are not known."""
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.document_start]
    for _ in range(cfg.sample_tokens):
        logits = executor.next_logits(tokens, values)[:cfg.vocab_size].float().cpu()
        token = int(torch.multinomial(torch.softmax(logits / SAMPLE_TEMPERATURE, 0), 1, generator=generator))
        if token == cfg.document_start:
            break
        tokens.append(token)
    if vocabulary is None:
        return "token ids (no vocab.txt beside the shards): " + " ".join(map(str, tokens[1:]))
    return b"".join(vocabulary[token] for token in tokens).decode("utf-8", "replace")

# ======================================================================================================================
# Room 10: Main
# ======================================================================================================================

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
NOT_MATHEMATICS = ("device", "compile", "slots_per_micro_batch", "seed", "run_dir", "comm_timeout", "sample_tokens", "val_every",
                   "max_steps", "train_files", "val_files", "epochs")


def make_fabric(cfg: Config) -> Fabric:
    """Join the process group that torchrun describes, if any, and pick the device. Raises FabricError, ConfigError."""
    rank, local_rank, world = (int(os.environ.get(name, default)) for name, default in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available() and cfg.device != "cpu"
    if cfg.device == "cuda" and not cuda:
        raise ConfigError("--device=cuda (the record preset asks for it)", found="no CUDA device", expected="an NVIDIA GPU and a "
                          "CUDA build of torch", do="--preset=pocket runs on a CPU in about two minutes")
    if cuda and local_rank >= torch.cuda.device_count():
        raise FabricError("more ranks than devices", found=f"local rank {local_rank}, {torch.cuda.device_count()} GPUs",
                          expected="one GPU for each rank", do=f"torchrun --nproc_per_node={torch.cuda.device_count()} ...")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    fabric = Fabric(device, rank, world)
    check_fabric(cfg, fabric)
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=cfg.comm_timeout))
    return fabric


def head_precision(cfg: Config, fabric: Fabric) -> str:
    """What --head means on this device. Raises ConfigError for fp8 where it does not exist."""
    native = fabric.on_cuda and torch.cuda.get_device_capability(fabric.device) >= (8, 9) and cfg.dtype == "bfloat16"
    if cfg.head == "fp8" and not native:
        raise ConfigError("--head=fp8", found=f"{cfg.dtype} on {hardware(fabric)}", expected="bfloat16 on CUDA capability 8.9 or higher",
                          do="--head=auto, --head=plain, or --head=emulated for the same numbers without the speed")
    return cfg.head if cfg.head != "auto" else "fp8" if native else "plain"


def hardware(fabric: Fabric) -> str:
    if fabric.on_cuda:
        return f"{torch.cuda.get_device_name(fabric.device)} x {fabric.world}"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        name = next(line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def peak_memory_mib(fabric: Fabric) -> dict[str, int]:
    if fabric.on_cuda:
        return dict(allocated=torch.cuda.max_memory_allocated() >> 20, reserved=torch.cuda.max_memory_reserved() >> 20)
    with contextlib.suppress(ImportError):                                    # not on Windows
        import resource
        return dict(resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10))
    return {}


def data_sha256(headers: list[ShardHeader]) -> str:
    """Hash of the names and contents of all shards, in order."""
    def digest(header: ShardHeader) -> bytes:
        if header.name.startswith(FORMULA):
            return b"formula"
        with open(header.name, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    with ThreadPoolExecutor() as pool:
        parts = pool.map(digest, headers)
        return hashlib.sha256(b"".join(Path(h.name).name.encode() + part for h, part in zip(headers, parts))).hexdigest()


def git_commit() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10,
                              check=True).stdout.strip()
    return None


def expected_losses(preset: str, cfg: Config) -> dict[int, tuple]:
    """The public losses, if this run has the mathematics they belong to."""
    record = Config(**PRESETS["record"])
    changed = [f.name for f in dataclasses.fields(Config) if getattr(cfg, f.name) != getattr(record, f.name)]
    return REFERENCE_LOSSES if preset == "record" and set(changed) <= set(NOT_MATHEMATICS) else {}


def write_header(log: Log, preset: str, cfg: Config, fabric: Fabric, executor: Executor, attention: str, sha256: str) -> None:
    versions = dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda, triton=None)
    with contextlib.suppress(ImportError):
        import triton
        versions["triton"] = triton.__version__
    start = Config(**PRESETS[preset])
    changed = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(Config) if getattr(cfg, f.name) != getattr(start, f.name)}
    accum = -(-cfg.num_slots // fabric.world // executor.slots_at_once)
    log.event("header", config=dataclasses.asdict(cfg), preset=preset, changed={k: flag_text(v) for k, v in changed.items()},
              seed=cfg.seed, world_size=fabric.world, grad_accum_steps=accum, tokens_per_step=[s.batch_tokens for s in cfg.stages],
              git_commit=git_commit(), source_sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), data_sha256=sha256,
              **versions, hardware=hardware(fabric), attention=attention, head=executor.precision)
    parameters = sum(p.numel() for p in executor.model.parameters())
    log.text("=" * 100, console=False)
    log.text(f"Running Python {sys.version.split()[0]}", console=False)
    log.text(f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda} on {hardware(fabric)} with world_size {fabric.world}")
    log.text(f"preset {preset}, {parameters:,} parameters in {cfg.dtype}, attention {attention}, head {executor.precision}, {accum} "
             f"micro-batches a step, seed {cfg.seed}")
    log.text("changed from the preset: " + (", ".join(f"{k}={flag_text(v)}" for k, v in changed.items()) or "nothing"), console=False)
    log.text("=" * 100, console=False)


def finish(log: Log, cfg: Config, schedule: Schedule, executor: Executor, validation: ValidationSet, clock: Clock, loss: float) -> None:
    """Result, sample, and one JSON object as the last line on stdout."""
    memory = peak_memory_mib(log.fabric)
    result = dict(val_loss=loss, train_time_ms=round(clock.ms, 3), steps=schedule.last_step, tokens=log.tokens, peak_memory_mib=memory,
                  run_dir=str(log.run_dir))
    if validation.bytes_per_token:
        result |= dict(val_bpb=validation.bits_per_byte(loss), unigram_nats=validation.unigram_nats)
        log.text(f"validation loss {loss:.4f} nats per token = {result['val_bpb']:.4f} bits per byte; unigram entropy "
                 f"{validation.unigram_nats:.4f} nats, ratio {loss / validation.unigram_nats:.4f}")
    log.text(f"training time {clock.ms / 1000:.2f} s for {schedule.last_step} steps, {log.tokens:,} tokens; logs in {log.run_dir}")
    if log.fabric.on_cuda:
        log.text(f"peak memory allocated: {memory['allocated']} MiB reserved: {memory['reserved']} MiB")
    elif memory:
        log.text(f"peak memory consumption: {memory['resident']} MiB")
    log.event("result", **result)
    if cfg.sample_tokens:
        text = sample(cfg, executor, schedule.at(schedule.last_step), validation.vocabulary)
        log.fabric.say(f"{'-' * 40} sample {'-' * 40}\n{text}\n{'-' * 88}")
    log.fabric.say(json.dumps(dict(type="result", **result)))


def run(preset: str, cfg: Config, fabric: Fabric) -> None:
    began = time.perf_counter()
    train, val = find_shards(cfg.train_files), find_shards(cfg.val_files)
    expected, cfg = expected_losses(preset, cfg), resolve(cfg, train, val)
    schedule = Schedule(cfg)
    check_enough_data(cfg, schedule, train, val)
    precision = head_precision(cfg, fabric)
    run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{preset}-{uuid.uuid4().hex[:8]}"
    log = Log(Path(cfg.run_dir or f"logs/{run_id}") if fabric.rank == 0 else None, fabric, schedule, expected)
    try:
        attention, kernel = choose_attention(fabric, getattr(torch, cfg.dtype), cfg.head_dim)
        executor = Executor(cfg, fabric, kernel, precision)
        write_header(log, preset, cfg, fabric, executor, attention, data_sha256(train + val))
        log.event("phase", name="set-up", ms=round((time.perf_counter() - began) * 1000, 3), timed=False)
        with log.phase("validation data"):
            validation = ValidationSet(cfg, fabric, val)
        with log.phase("warm-up"):
            warm_up(cfg, fabric, schedule, executor)
        if fabric.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        loader = Loader(cfg, fabric, train, [schedule.at(step) for step in range(schedule.last_step)])
        clock = Clock(fabric)
        log.open_bar()
        loss = race(schedule, loader, executor, validation, clock, log)
        loader.close()
        finish(log, cfg, schedule, executor, validation, clock, loss)
    except torch.OutOfMemoryError as error:
        log.aborted("out of memory")
        raise RunError("out of memory", found=str(error).splitlines()[0], expected="less at a time",
                       do=f"--slots_per_micro_batch=1, or more and shorter slots: --num_slots={2 * cfg.num_slots}") from None
    except BaseException as error:
        log.aborted("interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}")
        raise
    finally:
        log.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 the run failed, 2 a bad setting or bad data, 130 interrupted."""
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupt)                                  # torchrun's way to end a rank
    try:
        preset, cfg = parse_flags(sys.argv[1:] if argv is None else argv)
        run(preset, cfg, make_fabric(cfg))
    except TrainerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED if isinstance(error, RunError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
